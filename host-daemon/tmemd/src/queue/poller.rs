// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Interface through which a worker waits for kicks, the eventfds that guests signal.
//!
//! Out of scope: the implementations (`uring.rs`, `epoll.rs`), the choice between them
//! (`event_loop.rs`), and the meaning of a kick (`worker.rs`).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Waits until at least one of many eventfds is signalled.
///
/// `wait` reports each signal once, even if the eventfd stays readable. The caller consumes reported
/// signals nevertheless, because a full counter would block the sender. One thread calls `wait`; any thread may call the
/// other methods.
pub trait Poller: Send + Sync {
    /// Watches an eventfd until `remove` is called for it. `wait` reports a signal of the eventfd
    /// as `token`, which must differ from the tokens of all earlier calls.
    ///
    /// # Errors
    /// The kernel cannot watch the descriptor.
    fn add(&self, fd: &Arc<OwnedFd>, token: u64) -> io::Result<()>;
    /// Stops watching an eventfd. The next call of `wait` may still report a signal from before
    /// this call. The poller may have a reference to the eventfd until then.
    ///
    /// # Errors
    /// The poller did not watch the descriptor.
    fn remove(&self, fd: &OwnedFd, token: u64) -> io::Result<()>;
    /// Replaces the content of `ready` with the tokens of the signalled eventfds. With `block`,
    /// waits until an eventfd is signalled or another thread calls `wake`, but may return earlier.
    ///
    /// # Errors
    /// The system call that waits fails.
    fn wait(&self, ready: &mut Vec<u64>, block: bool) -> io::Result<()>;
    /// Ends the current call of `wait`. If no thread waits, ends the next call of `wait`.
    fn wake(&self);
}

/// Token of the poller's own eventfd, with which other threads wake the waiting worker.
pub const WAKE: u64 = u64::MAX;
