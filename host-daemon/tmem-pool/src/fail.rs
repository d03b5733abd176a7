// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Injection of allocation failures. Tests use it to make an allocation fail at each place where
//! the engine can go on without the memory.

/// Returns whether the next allocation must fail. Only in tests can the result be true.
#[cfg(not(test))]
pub(crate) fn memory() -> bool {
    false
}

#[cfg(test)]
pub(crate) use injected::{memory, one_in};

#[cfg(test)]
mod injected {
    use crate::tests::rng::Rng;
    use std::cell::RefCell;

    thread_local! {
        static FAILS: RefCell<Option<(Rng, u64)>> = const { RefCell::new(None) };
    }

    /// Makes every `n`-th allocation of this thread fail from now on, on average. 0 switches
    /// failures off.
    pub(crate) fn one_in(n: u64, seed: u64) {
        FAILS.set((n > 0).then(|| (Rng::new(seed), n)));
    }

    pub(crate) fn memory() -> bool {
        FAILS.with_borrow_mut(|fails| fails.as_mut().is_some_and(|(rng, n)| rng.one_in(*n)))
    }
}
