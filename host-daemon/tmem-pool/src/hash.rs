// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The content hash: seeded 128-bit xxh3. It only nominates; bytes decide.
//!
//! xxh3 is fast and not collision-resistant: whoever knows the seed can make two pages of one hash.
//! So no page is ever taken for another because of it, see `blob.rs`.
//!
//! The library chooses its instructions when it is compiled, which is for the oldest processors.
//! Where there is AVX2 its inner loop is run by `avx2.rs`, in 60 % of the time.

#[cfg(target_arch = "x86_64")]
mod avx2;

use crate::config::Page;
use xxhash_rust::const_xxh3::const_custom_default_secret;
use xxhash_rust::xxh3::xxh3_128_with_secret;

/// Bytes that a seed is spread to.
const SECRET_BYTES: usize = 192;

/// Hashes pages, under a seed. Public for those who compare with it.
#[derive(Clone, Debug)]
pub struct PageHash {
    secret: [u8; SECRET_BYTES],
}

/// Hash of a page; replaced in tests, to make pages collide.
pub(crate) type HashFn = fn(&PageHash, &Page) -> u128;

impl PageHash {
    /// The hash of this seed: `xxh3_128_with_seed`.
    pub fn new(seed: u64) -> PageHash {
        PageHash {
            secret: const_custom_default_secret(seed),
        }
    }

    /// Of a page.
    pub fn of(&self, page: &Page) -> u128 {
        #[cfg(target_arch = "x86_64")]
        if std::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has it.
            return unsafe { avx2::hash(page, &self.secret) };
        }
        xxh3_128_with_secret(page, &self.secret)
    }
}

/// The bits of a hash that a key entry keeps to check what a get returns.
pub(crate) fn check_bits(hash: u128) -> u32 {
    hash as u32
}

/// Where a page is looked for in its trust domain. Pages that are equal are apart in each two domains,
/// so that what one VM holds does not make another's chains longer, which takes time that it can
/// measure. The mixing is MurmurHash3's (Appleby).
pub(crate) fn place_bits(table_bits: u32, domain: u32) -> u64 {
    let mut x = u64::from(table_bits) ^ u64::from(domain).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    x ^ (x >> 33)
}

/// The bits of a hash by which equal pages are looked for: others than the check's. With 2^24 blobs
/// one look-up in 256 finds another page, which is decompressed in vain, and as few are not shared.
pub(crate) fn table_bits(hash: u128) -> u32 {
    (hash >> 64) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::rng::{Rng, for_each_seed};
    use xxhash_rust::xxh3::xxh3_128_with_seed;

    #[test]
    fn it_is_xxh3_whatever_the_processor() {
        for_each_seed("hash", 100, |seed| {
            let mut rng = Rng::new(seed);
            let page = std::array::from_fn(|_| rng.next() as u8);
            let hash = PageHash::new(seed);
            let wanted = xxh3_128_with_seed(&page, seed);
            assert_eq!(hash.of(&page), wanted);
            assert_eq!(xxh3_128_with_secret(&page, &hash.secret), wanted);
            assert_ne!(PageHash::new(seed + 1).of(&page), wanted);
        });
    }
}
