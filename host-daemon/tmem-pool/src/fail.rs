// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory that the system does not give: wherever the engine asks for some and can go on without,
//! tests let it fail.

/// The system gives none. Outside of tests whoever asks finds out by asking.
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

    /// From now on one request of this thread in `n` fails; 0: none.
    pub(crate) fn one_in(n: u64, seed: u64) {
        FAILS.set((n > 0).then(|| (Rng::new(seed), n)));
    }

    pub(crate) fn memory() -> bool {
        FAILS.with_borrow_mut(|fails| fails.as_mut().is_some_and(|(rng, n)| rng.one_in(*n)))
    }
}
