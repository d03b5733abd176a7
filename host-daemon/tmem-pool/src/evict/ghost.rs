// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Pages that were here not long ago, and how they left: fingerprints of keys, of which the oldest
//! are forgotten.
//!
//! A set-associative table of 14-bit fingerprints: a bucket of eight is a queue. It says yes for a
//! page that it never saw once in two thousand times, which a policy can bear. It grows and
//! shrinks with what the tenant holds, and forgets when it does.

use crate::fail;

/// Fingerprints of a bucket: a quarter of a cache line.
const WAYS: usize = 8;

/// A small tenant's.
const BUCKETS_MIN: usize = 64;

/// How a page left. Two bits, of which 0 is no page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Past {
    /// The guest got it.
    Got = 1,
    /// It was evicted from the small queue.
    Small = 2,
    /// It was evicted from the main queue.
    Main = 3,
}

const PAST: u16 = 3;

#[derive(Debug, Default)]
pub(super) struct Ghost {
    /// Oldest first: a fingerprint, and in the lowest bits its past; 0 is none.
    buckets: Vec<[u16; WAYS]>,
}

impl Ghost {
    /// Makes it remember about as many pages as are held. Without memory it
    /// stays as it is.
    pub(super) fn fit(&mut self, pages: u32) {
        let wanted = (pages as usize / WAYS).next_power_of_two().max(BUCKETS_MIN);
        let now = self.buckets.len();
        // Not again and again at a boundary.
        if wanted <= now && wanted * 4 > now {
            return;
        }
        let mut buckets = Vec::new();
        if !fail::memory() && buckets.try_reserve_exact(wanted).is_ok() {
            buckets.resize(wanted, [0; WAYS]);
            self.buckets = buckets;
        }
    }

    fn place(&self, key_hash: u64) -> (usize, u16) {
        let fingerprint = (key_hash >> 48) as u16 & !PAST;
        (key_hash as usize & (self.buckets.len() - 1), fingerprint)
    }

    pub(super) fn add(&mut self, key_hash: u64, past: Past) {
        if self.buckets.is_empty() {
            return;
        }
        let (bucket, fingerprint) = self.place(key_hash);
        let bucket = &mut self.buckets[bucket];
        bucket.rotate_left(1);
        bucket[WAYS - 1] = fingerprint | past as u16;
    }

    /// Forgets the page and says how it left, if it knows it.
    pub(super) fn take(&mut self, key_hash: u64) -> Option<Past> {
        if self.buckets.is_empty() {
            return None;
        }
        let (bucket, fingerprint) = self.place(key_hash);
        let bucket = &mut self.buckets[bucket];
        let same = |&way: &u16| way & !PAST == fingerprint && way & PAST != 0;
        let at = bucket.iter().rposition(same)?;
        let past = match bucket[at] & PAST {
            1 => Past::Got,
            2 => Past::Small,
            _ => Past::Main,
        };
        bucket[..=at].rotate_right(1);
        bucket[0] = 0;
        Some(past)
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.buckets.capacity() * size_of::<[u16; WAYS]>()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::rng::Rng;

    #[test]
    fn it_knows_the_latest_and_forgets_the_oldest() {
        let (mut ghost, mut rng) = (Ghost::default(), Rng::new(3));
        ghost.add(1, Past::Got);
        assert_eq!(ghost.take(1), None, "it has no room yet");
        ghost.fit(4096);
        let keys: Vec<u64> = (0..16_384).map(|_| rng.next()).collect();
        let past = |key: u64| [Past::Got, Past::Small, Past::Main][key as usize % 3];
        keys.iter().for_each(|&key| ghost.add(key, past(key)));
        let known = |ghost: &mut Ghost, keys: &[u64]| {
            let known = keys
                .iter()
                .filter(|&&key| ghost.take(key) == Some(past(key)));
            known.count()
        };
        let strangers: Vec<u64> = (0..16_384).map(|_| rng.next()).collect();
        assert!(known(&mut ghost, &strangers) < 16);
        assert!(known(&mut ghost, &keys[..8192]) < 600);
        assert!(known(&mut ghost, &keys[16_384 - 2048..]) > 1950);
        assert_eq!(
            known(&mut ghost, &keys[16_384 - 2048..]),
            0,
            "it was told to forget them"
        );
    }
}
