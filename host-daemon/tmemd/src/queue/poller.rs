// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Interface through which a worker waits for kicks.
//!
//! Out of scope: the implementations (`uring.rs`, `epoll.rs`), the choice between them
//! (`event_loop.rs`), and the meaning of a kick (`worker.rs`).

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Waits until any of many eventfds is signalled.
///
/// The caller must consume each signal that is reported. It is unspecified whether a signal that
/// the caller does not consume is reported again. One thread waits; any thread may call the other
/// methods.
pub trait Poller: Send + Sync {
    /// Watches an eventfd until it is removed. `wait` reports it as `token`, which must differ from
    /// every token in use now or before.
    ///
    /// # Errors
    /// The kernel cannot watch the descriptor.
    fn add(&self, fd: &Arc<OwnedFd>, token: u64) -> io::Result<()>;
    /// Stops watching an eventfd. An earlier signal may be reported once more, and a reference to
    /// the file may be kept until the next wait.
    ///
    /// # Errors
    /// The descriptor was not watched.
    fn remove(&self, fd: &OwnedFd, token: u64) -> io::Result<()>;
    /// Replaces `ready` by tokens of signalled eventfds. With `block` it waits until one is
    /// signalled or until a wake; it may return sooner.
    ///
    /// # Errors
    /// The system call that waits fails.
    fn wait(&self, ready: &mut Vec<u64>, block: bool) -> io::Result<()>;
    /// Ends the current wait or the next one.
    fn wake(&self);
}

/// Token of the descriptor that wakes a waiting worker.
pub const WAKE: u64 = u64::MAX;
