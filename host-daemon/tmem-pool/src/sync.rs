// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Locks and atomics. They are those of the standard library, except in tests with the feature
//! `shuttle`, which replaces them. The library shuttle runs one thread at a time. At each access to
//! a lock or atomic, it chooses which thread continues (tests/interleavings.rs).
//!
//! shuttle's own atomics are not used. Much of the pool's shared data lies in memory that is zero
//! at first, and the initial state of shuttle's atomics is not all zero. Instead, each access to a
//! standard atomic is preceded by a possible thread switch. That is equivalent, because shuttle
//! models sequentially consistent order only. Miri checks the memory orders.

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
            /// Atomic of the standard library with a possible thread switch of shuttle before each
            /// access.
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
