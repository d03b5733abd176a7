// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Simulated pool of bounded size, to which a simulated policy of each tenant belongs.
//!
//! The pool accounts as the replayed engine does (replay/pool.rs): a page costs its charge, and a
//! full pool evicts from the tenant with the largest charge. The pool makes room before it adds a
//! page, as the published policies require.

use super::requests::{Key, Kind, Put, Requests};

/// How a policy treats a page that a get returned and that the guest puts again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reput {
    /// The page takes the place in the queue that it had before the get. So the policy works as
    /// published: in a cache that keeps pages at a hit, a hit moves no page.
    KeepsPlace,
    /// The get removes the page from its queue. The policy remembers whether the page was used
    /// (S3-FIFO: how often), as a ghost entry does. The put adds the page at the newest end of a
    /// queue.
    NewPlace,
}

/// Simulated eviction policy of one tenant. It knows which pages the pool has.
pub trait Policy {
    /// Adds a page that the pool does not have.
    fn put(&mut self, key: Key, put: Put);

    /// Notes a hit: the guest gets a page that the pool has, and the page leaves the pool.
    fn get(&mut self, key: Key);

    /// Removes a page from the pool, because the guest flushed or overwrote the page. The pool has
    /// the page before the call.
    fn flush(&mut self, key: Key);

    /// Chooses a page that the pool has and removes it. Returns None if the pool has no page of
    /// the tenant.
    fn evict(&mut self) -> Option<Key>;
}

struct Tenant<P> {
    policy: P,
    /// Charge of each page in bytes. 0 means that the pool does not have the page.
    pages: Vec<u32>,
    charged_bytes: u64,
}

impl<P> Tenant<P> {
    /// Takes a page out of the pool. Returns false if the pool does not have it.
    fn take(&mut self, key: Key) -> bool {
        let bytes = std::mem::take(&mut self.pages[key as usize]);
        self.charged_bytes -= u64::from(bytes);
        bytes != 0
    }
}

/// Simulated pool.
pub struct Pool<P> {
    size_bytes: u64,
    tenants: Vec<Tenant<P>>,
    hits: u64,
}

impl<P: Policy> Pool<P> {
    /// Creates an empty pool. `keys` has the number of keys of each tenant, and `policy` creates
    /// the policy of a tenant with this number of keys.
    pub fn new(size_bytes: u64, keys: &[usize], policy: impl Fn(usize) -> P) -> Self {
        let tenant = |&keys: &usize| Tenant {
            policy: policy(keys),
            pages: vec![0; keys],
            charged_bytes: 0,
        };
        Pool {
            size_bytes,
            tenants: keys.iter().map(tenant).collect(),
            hits: 0,
        }
    }

    /// Evicts pages until the pool has room for `bytes` more bytes of a tenant. Returns false if
    /// the pool is too small for them.
    fn make_room(&mut self, tenant: usize, bytes: u64) -> bool {
        while self.charged_bytes() + bytes > self.size_bytes {
            let charge = |nr: &usize| {
                let more = if *nr == tenant { bytes } else { 0 };
                self.tenants[*nr].charged_bytes + more
            };
            let victim = (0..self.tenants.len())
                .max_by_key(charge)
                .expect("the pool has no tenant");
            let victim = &mut self.tenants[victim];
            let Some(key) = victim.policy.evict() else {
                return false;
            };
            assert!(
                victim.take(key),
                "the policy evicted a page that the pool does not have"
            );
        }
        true
    }

    /// Executes one request. Returns true if it is a get and a hit.
    pub fn apply(&mut self, nr: usize, key: Key, kind: Kind) -> bool {
        let tenant = &mut self.tenants[nr];
        match kind {
            Kind::Get => {
                let hit = tenant.take(key);
                if hit {
                    tenant.policy.get(key);
                    self.hits += 1;
                }
                return hit;
            }
            Kind::Flush => {
                if tenant.take(key) {
                    tenant.policy.flush(key);
                }
            }
            Kind::Put(put) => {
                if tenant.take(key) {
                    tenant.policy.flush(key);
                }
                if self.make_room(nr, put.bytes.into()) {
                    let tenant = &mut self.tenants[nr];
                    tenant.pages[key as usize] = put.bytes;
                    tenant.charged_bytes += u64::from(put.bytes);
                    tenant.policy.put(key, put);
                }
            }
        }
        false
    }

    /// Returns the charge of all pages in bytes.
    pub fn charged_bytes(&self) -> u64 {
        self.tenants.iter().map(|tenant| tenant.charged_bytes).sum()
    }
}

/// Replays all requests in a pool of this size in bytes. Returns the number of hits.
pub fn hits<P: Policy>(requests: &Requests, size_bytes: u64, policy: impl Fn(usize) -> P) -> u64 {
    let mut pool = Pool::new(size_bytes, &requests.keys, policy);
    for request in &requests.list {
        pool.apply(request.tenant, request.key, request.kind);
    }
    pool.hits
}
