// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Padding to cache lines (against false sharing). Data that threads change all the time lies on
//! other cache lines than data that all threads read. Otherwise each change would evict the shared
//! data from the caches of the other cores.

use std::ops::Deref;

/// A value on two cache lines of its own, because processors fetch cache lines in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Apart<T>(pub T);

impl<T> Deref for Apart<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}
