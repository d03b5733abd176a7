// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What threads change all the time lies apart from what all of them read, or every change would
//! take that from the others' caches.

use std::ops::Deref;

/// On cache lines of its own: two, since processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Apart<T>(pub T);

impl<T> Deref for Apart<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0
    }
}
