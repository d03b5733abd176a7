// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Contents of pages of files, computed from the version of a page.
//!
//! Each write in a run has a version of its own, which is never used again, not even by a guest
//! that was restored from a snapshot. So pages with equal bytes come from the same write. Some
//! versions use contents that all guests share, to test deduplication. The other versions contain a
//! mark of their guest, so that the oracle recognizes such a page in the memory of another guest.

use tmem_sim::Content;

/// Number of the write that a page contains; 0 if the page was never written and is zero.
pub type Version = u32;

/// Number of different contents that guests share.
const SHARED: u64 = 12;

/// Maximum number of guests of a world.
const GUESTS_MAX: u64 = 4;

/// Mark in the upper bits of a private page's first word.
const MARK: u64 = 0x5ec0;

fn mix(x: u64) -> u64 {
    let mut x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    x ^ (x >> 32)
}

/// Returns the content of a guest's version.
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

/// Bit of a version in the contents of a page whose bytes behind the end of the file are not zero.
const BEHIND_END: Version = 1 << 31;

/// Returns the content of a guest's version whose bytes behind the end of the file are not zero. A
/// content has no parts, so all of its bytes differ from those of [`of`].
#[must_use]
pub fn with_bytes_behind_end(guest: usize, version: Version) -> Content {
    Content::Noise((MARK + guest as u64) << 48 | u64::from(version | BEHIND_END))
}

/// Returns the guest whose private page begins with this word.
#[must_use]
pub fn owner(first_word: u64) -> Option<usize> {
    let (mark, version) = (first_word >> 48, first_word & 0xffff_ffff_ffff);
    // The condition is strict, because a generation may be any number and must not be taken for the
    // beginning of a page.
    let is_page = (MARK..MARK + GUESTS_MAX).contains(&mark) && version <= u64::from(Version::MAX);
    is_page.then(|| (mark - MARK) as usize)
}

/// Returns a word with which a private page of a guest may begin.
#[must_use]
pub fn mark(guest: usize) -> u64 {
    (MARK + guest as u64) << 48 | 1
}
