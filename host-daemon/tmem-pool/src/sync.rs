// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Locks and atomics: the system's. In tests with the feature `shuttle` those of shuttle, which
//! runs one thread at a time and chooses at each of them who goes on (tests/interleavings.rs).
//!
//! Its atomics are not used: much of what the pool shares lies in memory that is zero at first, which
//! theirs must not be. An atomic of the system before which somebody else may have a turn is the same,
//! since shuttle knows no weaker order than that of its turns. Orderings are Miri's to look at.

#[cfg(not(all(test, feature = "shuttle")))]
pub(crate) use std::sync::{
    Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
    atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize},
};

#[cfg(all(test, feature = "shuttle"))]
pub(crate) use self::turns::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
#[cfg(all(test, feature = "shuttle"))]
pub(crate) use shuttle::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

#[cfg(all(test, feature = "shuttle"))]
mod turns {
    use std::sync::atomic::Ordering;

    macro_rules! atomic {
        ($name:ident, $value:ty $(, $method:ident)*) => {
            /// See the file's comment.
            #[derive(Debug, Default)]
            #[repr(transparent)]
            pub(crate) struct $name(std::sync::atomic::$name);

            #[allow(dead_code, reason = "not all of them have a use")]
            impl $name {
                pub(crate) const fn new(value: $value) -> $name {
                    $name(std::sync::atomic::$name::new(value))
                }

                pub(crate) fn load(&self, order: Ordering) -> $value {
                    shuttle::thread::yield_now();
                    self.0.load(order)
                }

                pub(crate) fn store(&self, value: $value, order: Ordering) {
                    shuttle::thread::yield_now();
                    self.0.store(value, order);
                }

                pub(crate) fn compare_exchange(
                    &self,
                    old: $value,
                    new: $value,
                    set: Ordering,
                    other: Ordering,
                ) -> Result<$value, $value> {
                    shuttle::thread::yield_now();
                    self.0.compare_exchange(old, new, set, other)
                }

                pub(crate) fn fetch_update(
                    &self,
                    set: Ordering,
                    other: Ordering,
                    new: impl FnMut($value) -> Option<$value>,
                ) -> Result<$value, $value> {
                    shuttle::thread::yield_now();
                    self.0.fetch_update(set, other, new)
                }

                $(
                    pub(crate) fn $method(&self, value: $value, order: Ordering) -> $value {
                        shuttle::thread::yield_now();
                        self.0.$method(value, order)
                    }
                )*
            }
        };
    }

    atomic!(AtomicBool, bool, swap);
    atomic!(AtomicU32, u32, fetch_add, fetch_sub, fetch_and, fetch_or);
    atomic!(AtomicU64, u64, fetch_add, fetch_sub);
    atomic!(AtomicUsize, usize, fetch_add);
}
