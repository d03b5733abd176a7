// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The content hash: seeded 128-bit xxh3. It only nominates; bytes decide.
//!
//! xxh3 is fast and not collision-resistant: whoever knows the seed can make two pages of one hash.
//! So no page is ever taken for another because of it, see `blob.rs`.

use crate::config::Page;
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// Hash of a page under a seed; replaced in tests, to make pages collide.
pub(crate) type HashFn = fn(&Page, u64) -> u128;

/// The hash in use.
pub(crate) fn page_hash(page: &Page, seed: u64) -> u128 {
    xxh3_128_with_seed(page, seed)
}

/// The bits of a hash that a key entry keeps to check what a get returns.
pub(crate) fn check_bits(hash: u128) -> u32 {
    hash as u32
}

/// Where a page is looked for in its trust domain. Pages that are equal are apart in each two domains,
/// so that what one VM holds does not make another's chains longer, which takes time that it can
/// measure. The mixing is MurmurHash3's (Appleby).
pub(crate) fn place_bits(table_bits: u64, domain: u32) -> u64 {
    let mut x = table_bits ^ u64::from(domain).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// The bits of a hash by which equal pages are looked for: others than the check's.
pub(crate) fn table_bits(hash: u128) -> u64 {
    (hash >> 64) as u64
}
