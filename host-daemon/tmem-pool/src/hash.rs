// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The content hash: seeded 128-bit xxh3. Equal hashes only make two pages candidates for sharing;
//! the engine then compares their bytes.
//!
//! xxh3 is fast and not collision-resistant: an attacker who knows the seed can make two pages with
//! one hash. So the engine never takes one page for another because of the hash (`blob.rs`).
//!
//! The library chooses its instructions at run time for the host's processor. On an Intel Xeon with
//! AVX2 it takes 127 ns for a page in the cache; an implementation in this crate took 132 ns.

use crate::config::Page;
use twox_hash::XxHash3_128;
use twox_hash::xxhash3_128::Hasher;

/// Seeded hash function for pages. It is public because benchmarks measure it for comparison.
#[derive(Clone, Debug)]
pub struct PageHash {
    /// Secret of xxh3, which is derived from the seed once. Deriving it for each page would take a
    /// fourteenth of the time of hashing the page.
    secret: Box<[u8]>,
}

/// Type of the hash function of pages. Some tests use another function, which gives different pages
/// equal hashes.
pub(crate) type HashFn = fn(&PageHash, &Page) -> u128;

impl PageHash {
    /// Creates the hash function with this seed, which is `XXH3_128bits_withSeed` of xxHash.
    pub fn new(seed: u64) -> PageHash {
        let secret = Hasher::with_seed(seed).into_secret();
        PageHash { secret }
    }

    /// Returns the hash of a page.
    pub fn of(&self, page: &Page) -> u128 {
        let hash = XxHash3_128::oneshot_with_secret(&self.secret, page);
        hash.expect("the secret derived from a seed does not have the length that xxh3 requires")
    }
}

/// Returns the bits of a hash that an index entry keeps, to check the page that a get returns.
pub(crate) fn check_bits(hash: u128) -> u32 {
    hash as u32
}

/// Returns the hash that selects the bucket of a page in the table of equal pages. Equal pages of
/// two domains have different values. So the pages of one VM do not lengthen the chains that a VM
/// of another domain walks, which the other VM could notice by timing. The bits are mixed with the
/// finalizer of MurmurHash3 (Appleby).
pub(crate) fn place_bits(table_bits: u32, domain: u32) -> u64 {
    let mut x = u64::from(table_bits) ^ u64::from(domain).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// Returns the bits of a hash by which the engine looks for equal pages. They differ from the check
/// bits. With 2^24 blobs one look-up in 256 finds a different page, which is decompressed in vain,
/// and one page in 256 cannot be shared.
pub(crate) fn table_bits(hash: u128) -> u32 {
    (hash >> 64) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::rng::{Rng, for_each_seed};
    use xxhash_rust::xxh3::xxh3_128_with_seed;

    #[test]
    fn page_hash_equals_seeded_xxh3_of_another_library() {
        for_each_seed("hash", 100, |seed| {
            let mut rng = Rng::new(seed);
            let page = std::array::from_fn(|_| rng.next() as u8);
            let hash = PageHash::new(seed);
            let wanted = xxh3_128_with_seed(&page, seed);
            assert_eq!(hash.of(&page), wanted);
            assert_ne!(PageHash::new(seed + 1).of(&page), wanted);
        });
    }
}
