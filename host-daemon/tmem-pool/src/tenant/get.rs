// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Gets: a get looks pages up under the tenant's lock, and restores them with no lock held.

use super::{Tenant, TenantOwner};
use crate::blob::{Reader, Store};
use crate::codec;
use crate::config::Page;
use crate::cost::{GET_DENSE_NS, GET_NS, GET_SAME_NS, MISS_NS, REF_NS};
use crate::error::NoPool;
use crate::index::entry::Content;
use crate::index::{PoolRef, Sharing};
use crate::request::{GET_PAGES_MAX, Get, GetResult, Ref};
use crate::state::Taken;

/// Number of stored pages whose first bytes a get prefetches together. An access to an address that
/// is not in the TLB waits for a page walk, but the processor does several page walks at the same
/// time.
const GET_TOGETHER: usize = 16;

/// Result of a get: how many pages it handled, what it cost, and the stored contents of the
/// returned pages. Dropping this value releases these contents. The caller should answer the guest
/// first, because releasing is a fifth of the work of a get.
#[derive(Debug)]
pub struct Spent<'a> {
    store: &'a Store,
    /// Contents to which this value owns references. Only the first `nr` elements are valid. The
    /// array is part of the value, so that a get allocates no memory.
    contents: [Content; GET_PAGES_MAX],
    nr: usize,
    pages: usize,
    cost_ns: u64,
    is_private: bool,
}

impl Spent<'_> {
    /// Returns the number of pages that the get has handled, both hits and misses.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// Returns whether the pool is private, so that its pages may be memory of processes.
    pub fn is_private(&self) -> bool {
        self.is_private
    }

    /// Returns the cost of the get in nanoseconds. It includes the cost of dropping this value.
    pub fn cost_ns(&self) -> u64 {
        self.cost_ns
    }
}

impl Drop for Spent<'_> {
    fn drop(&mut self) {
        self.store.release_all(&self.contents[..self.nr]);
        // Wipe the remains of decompressed pages only now, when no guest waits for an answer.
        codec::wipe();
    }
}

impl Tenant {
    /// Gets consecutive pages of one object. The cookies of the request, `out` and `results` must
    /// have the same length. A hit removes the page from the pool, or retains it. For a miss, the
    /// contents of the page in `out` are unspecified. The get compares the restored bytes with the
    /// hash of the bytes that were put. If they differ, the result is a miss, which is counted in
    /// `hash_mismatches`.
    ///
    /// The get handles as many pages as cost at most [`budget_ns`](Get::budget_ns), computed from
    /// the constants of `cost.rs`. The budget is for threads that have to serve other VMs in
    /// between. [`Spent::pages`] returns the number of pages handled. The get neither looks up nor
    /// removes further pages, and their result is `Miss`. With a budget of
    /// [`GET_NS_MAX`](crate::GET_NS_MAX) or more, a call handles at least one page.
    ///
    /// In two cases a get may cost more than the budget, because the cost of a page is estimated
    /// before the page is read. First, a background worker may be compressing the page with zstd at
    /// this moment. Second, for a retained page, the tenant may have less room than before, so that
    /// the estimator removes keys that it follows.
    ///
    /// # Errors
    /// The tenant has no such pool; then all results are `Miss`.
    ///
    /// # Panics
    /// If the slices differ in length, or have more than [`GET_PAGES_MAX`] elements.
    pub fn get(
        &self,
        pool: u32,
        get: &Get<'_>,
        out: &mut [Page],
        results: &mut [GetResult],
    ) -> Result<Spent<'_>, NoPool> {
        // The mask `retain` must have a bit for each page of a get.
        const { assert!(GET_PAGES_MAX <= u64::BITS as usize) };
        let cookies = get.cookies;
        assert!(
            cookies.len() == out.len() && cookies.len() == results.len(),
            "a get has {} cookies, {} pages and {} results",
            cookies.len(),
            out.len(),
            results.len()
        );
        let store = &self.0.engine.store;
        results.fill(GetResult::Miss);
        // Leave out cookies of pages beyond the page number u64::MAX, because there are no such
        // pages.
        let nr = (u64::MAX - get.index)
            .saturating_add(1)
            .min(cookies.len() as u64) as usize;
        let mut taken = [None; GET_PAGES_MAX];
        let get = Get {
            cookies: &cookies[..nr],
            ..*get
        };
        let mut state = self.0.lock();
        let pool = state.pool(pool)?;
        let estimator_before_ns = state.estimator_ns();
        let looked_up = state.take(pool, &get, &mut taken[..nr], store);
        let estimator_ns = state.estimator_ns() - estimator_before_ns;
        drop(state);

        let mut spent = Spent {
            store,
            contents: [Content::Same(0); GET_PAGES_MAX],
            nr: 0,
            pages: if looked_up == nr {
                cookies.len()
            } else {
                looked_up
            },
            cost_ns: estimator_ns,
            is_private: pool.sharing == Sharing::Tenant,
        };
        let mismatches = self.restore(pool, &get, &taken[..looked_up], out, results, &mut spent);
        if mismatches > 0 {
            let counters = &mut self.0.lock().counters;
            counters.hits -= mismatches;
            counters.hash_mismatches += mismatches;
        }
        Ok(spent)
    }

    /// Restores the pages of a get that were found, and sets their results. Adds their contents and
    /// their cost to `spent`. Returns the number of pages that do not match their hash, which are
    /// misses.
    fn restore(
        &self,
        pool: PoolRef,
        get: &Get<'_>,
        taken: &[Option<Taken>],
        out: &mut [Page],
        results: &mut [GetResult],
        spent: &mut Spent<'_>,
    ) -> u64 {
        let TenantOwner { engine, tenant } = &*self.0;
        let store = &engine.store;
        // Open the readers of all pages before the first page is read. An open reader keeps its
        // page in place. Opening a reader is an atomic access. If it came after the copy of another
        // page, it would wait until the copied bytes have reached memory.
        let mut readers = [const { None }; GET_PAGES_MAX];
        for (reader, taken) in readers.iter_mut().zip(taken) {
            *reader = taken.map(|Taken { content, .. }| store.reader(content));
        }
        let mut ahead = readers[..taken.len()].chunks(GET_TOGETHER);
        let mut fetch = || {
            let next = ahead.next().unwrap_or_default();
            next.iter().flatten().for_each(Reader::prefetch);
        };
        fetch();
        let mut mismatches = 0;
        for (i, (taken, reader)) in taken.iter().zip(&readers).enumerate() {
            if i.is_multiple_of(GET_TOGETHER) {
                fetch();
            }
            let (Some(taken), Some(reader)) = (*taken, reader) else {
                spent.cost_ns += MISS_NS;
                continue;
            };
            let Taken {
                content,
                check,
                was_retained,
                retained,
            } = taken;
            let page = Ref {
                object: get.object,
                index: get.index + i as u64,
                cookie: get.cookies[i],
            };
            if store.read(reader, check, &mut out[i]).is_ok() {
                let cookie = page.cookie;
                results[i] = match retained {
                    false => GetResult::Hit { cookie },
                    true => GetResult::Retained { cookie },
                };
            } else {
                tenant.log_mismatch(page.object, page.index);
                mismatches += 1;
                if retained {
                    self.drop_damaged(pool, &page);
                }
            }
            spent.cost_ns += match reader {
                Reader::Same(_) => GET_SAME_NS,
                Reader::Bytes(bytes) if codec::is_dense(bytes.bytes()) => GET_DENSE_NS,
                Reader::Bytes(_) => GET_NS,
            };
            spent.cost_ns += if was_retained { REF_NS } else { 0 };
            spent.contents[spent.nr] = content;
            spent.nr += 1;
        }
        mismatches
    }

    /// Drops a retained page whose bytes do not match its hash.
    fn drop_damaged(&self, pool: PoolRef, page: &Ref) {
        let mut state = self.0.lock();
        if !state.index.is_live(pool) {
            return;
        }
        // If another thread has removed the page in the meantime, that thread has already counted
        // the removal.
        if let Some(content) = state.drop_ref(pool, page) {
            state.counters.retained_hits -= 1;
            drop(state);
            self.0.engine.store.release_content(content);
        }
    }
}
