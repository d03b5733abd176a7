// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The hash of page contents: seeded 128-bit xxh3. Equal hashes only make two pages candidates for
//! sharing. The engine then compares their bytes.
//!
//! xxh3 is fast and not collision-resistant: an attacker who knows the seed can make two different
//! pages with equal hashes. So the engine never takes one page for another because of the hash
//! (`blob.rs`).
//!
//! The library chooses its instructions at run time for the host's processor. On an Intel Xeon with
//! AVX2 it takes 127 ns for a page in the cache; an implementation in this crate took 132 ns.

use crate::config::Page;
use twox_hash::XxHash3_128;
use twox_hash::xxhash3_128::Hasher;

/// Seeded hash function for page contents. It is public because benchmarks measure it for
/// comparison.
#[derive(Clone, Debug)]
pub struct PageHash {
    /// Secret of xxh3, derived from the seed once. Deriving it for each page would take a
    /// fourteenth of the time of hashing the page.
    secret: Box<[u8]>,
}

/// Type of the hash function of page contents. Some tests use a function that gives different pages
/// equal hashes.
pub(crate) type HashFn = fn(&PageHash, &Page) -> u128;

impl PageHash {
    /// Creates the hash function `XXH3_128bits_withSeed` of xxHash with this seed.
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

/// Returns the check bits: the part of a page's hash that the index entry stores. A get compares
/// them with the hash of the page that it has restored.
pub(crate) fn check_bits(hash: u128) -> u32 {
    hash as u32
}

/// Returns the place of a page: 32 bits that select its buckets in the table of equal pages. They
/// are bits of the page's hash that are not check bits, mixed with the trust domain.
///
/// Equal pages of two trust domains always have different places, because all steps of this function
/// are reversible: for one hash, no two domains lead to the same place. So a look-up never finds a
/// page of another domain that has equal bytes. The copies of a page in many domains also lie in
/// different buckets, so that they do not fill the buckets of one VM, which that VM could notice.
/// The function mixes the bits with the finalizer of MurmurHash3 (Appleby).
pub(crate) fn place_bits(hash: u128, domain: u32) -> u32 {
    let mut x = (hash >> 64) as u32 ^ domain.wrapping_mul(0x9e37_79b1);
    x = (x ^ (x >> 16)).wrapping_mul(0x85eb_ca6b);
    x = (x ^ (x >> 13)).wrapping_mul(0xc2b2_ae35);
    x ^ (x >> 16)
}

/// Returns the part of a page's tag that the table of equal pages stores beside the number of the
/// blob. The tag, by which the engine looks for equal pages, consists of the 32 bits of the place
/// and these 16 bits. If two different pages have equal tags, only one of them can be shared. With
/// 2^30 pages in a trust domain, that concerns 2 pages in a million. With 32 bits it would concern
/// one page in nine.
pub(crate) fn slot_tag(check: u32) -> u16 {
    check as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::rng::{Rng, for_each_seed};
    use std::collections::HashSet;
    use xxhash_rust::xxh3::xxh3_128_with_seed;

    /// Counts how many of 2^30 pages (4 TiB) cannot be shared, because other pages have equal tags
    /// (bits of the hash by which equal pages are found). Hashing 2^30 pages takes too long.
    /// Only pages whose places begin with the same ten bits can have equal tags, and these are
    /// about 2^20 pages. So the test hashes 2^20 pages and shortens their places by ten bits. In
    /// proportion, these tags collide as often as the full tags of 2^30 pages.
    #[test]
    #[cfg_attr(miri, ignore = "hashes a million pages")]
    fn hash_tags_of_pages_rarely_collide_in_a_4_tib_pool() {
        const PAGES: u64 = 1 << 20;
        const SLICE_BITS: u32 = 10;
        let hash = PageHash::new(17);
        let mut page = [0x5a; crate::PAGE_SIZE];
        let [mut tags, mut places] = [HashSet::new(), HashSet::new()];
        for nr in 0..PAGES {
            page[..8].copy_from_slice(&nr.to_le_bytes());
            let hash = hash.of(&page);
            let place = place_bits(hash, 5) >> SLICE_BITS;
            tags.insert(u64::from(place) << 16 | u64::from(slot_tag(check_bits(hash))));
            places.insert(u64::from(place));
        }
        let lost = |tags: HashSet<u64>| PAGES - tags.len() as u64;
        let (lost, short_lost) = (lost(tags), lost(places));
        assert!(
            lost * 10_000 < PAGES,
            "{lost} of {PAGES} pages have the same hash tag as another page, 0.01 % or more"
        );
        assert!(
            short_lost * 20 > PAGES,
            "the test is too weak: only {short_lost} of {PAGES} pages have equal hash tags of 32 \
             bits"
        );
    }

    #[test]
    fn equal_pages_of_two_domains_have_different_places() {
        for hash in [0, 1 << 64, u128::MAX, 0x1234_5678 << 64] {
            let domains = (0..100_000).chain(u32::MAX - 1000..=u32::MAX);
            let places: HashSet<u32> = domains.map(|domain| place_bits(hash, domain)).collect();
            assert_eq!(places.len(), 101_001);
        }
    }

    #[test]
    fn page_hash_matches_another_implementation_of_seeded_xxh3() {
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
