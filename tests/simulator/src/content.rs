// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Contents of pages of files, computed from the version of a page (the number of the write).
//!
//! Each write of a guest has a version of its own. The guest never uses that version again, not
//! even after it was restored from a snapshot. Some versions have contents that occur several times
//! and in all guests, to test deduplication. The contents of all other versions are private: they
//! occur only once, and contain a mark of their guest. So the oracle recognizes such a page in the
//! memory of another guest.

use tmem_model::Content;

/// Number of the write that gave a page its contents. Version 0 stands for a page that was never
/// written. Such a page consists of zero bytes.
pub type Version = u32;

/// Number of page contents of each kind that guests share.
const SHARED: u64 = 12;

/// Maximum number of guests in a simulated world.
const GUESTS_MAX: u64 = 4;

/// Value in the upper 16 bits of the first word of a private page of guest 0. The mark of guest n
/// is higher by n.
const MARK: u64 = 0x5ec0;

fn mix(x: u64) -> u64 {
    let mut x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

/// Returns the content of a page that this guest wrote with this version.
#[must_use]
pub fn of(guest: usize, version: Version) -> Content {
    if version == 0 {
        return Content::SameFilled(0);
    }
    let secret = (MARK + guest as u64) << 48 | u64::from(version);
    let draw = mix(secret);
    match draw % 10 {
        0 => Content::SameFilled(draw >> 32 & 3),
        1 => Content::Text(draw >> 32 & (SHARED - 1)),
        2 => Content::Noise(draw >> 32 & (SHARED - 1)),
        3..=6 => Content::Text(secret),
        _ => Content::Noise(secret),
    }
}

/// Returns the guest whose private page begins with this word, if any.
#[must_use]
pub fn owner(first_word: u64) -> Option<usize> {
    let (mark, version) = (first_word >> 48, first_word & 0xffff_ffff_ffff);
    // Check all 64 bits, so that a generation, which may be any number, is not taken for the
    // beginning of a page.
    let is_page = (MARK..MARK + GUESTS_MAX).contains(&mark) && version <= u64::from(Version::MAX);
    is_page.then(|| (mark - MARK) as usize)
}

/// Returns a word with which a private page of this guest could begin.
#[must_use]
pub fn mark(guest: usize) -> u64 {
    (MARK + guest as u64) << 48 | 1
}
