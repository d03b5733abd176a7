// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Waiting with io_uring: each kick is a poll in the ring that stays until it is removed, so that a
//! worker that has work sees new kicks in memory that it shares with the kernel, and makes a system
//! call only to sleep, or when the kernel says that something is to be fetched.
//!
//! The ring can do nothing else: it is restricted to [`OPERATIONS`] before it is used. No operation
//! has memory of ours, so that none has to be waited for before memory goes; each holds its own
//! reference to the file. Never here: writes to call eventfds, see bell.rs.
//!
//! System calls: io_uring_setup, io_uring_register (before it serves), io_uring_enter, eventfd2.

use crate::queue::poller::{Poller, WAKE};
use crate::util::event_fd::{consume, signal};
use io_uring::register::Restriction;
use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue, types};
use rustix::event::{EventfdFlags, PollFlags};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// All that the ring may be asked for.
pub const OPERATIONS: [u8; 2] = [opcode::PollAdd::CODE, opcode::AsyncCancel::CODE];

/// Polls begun or ended at once; more take another system call.
const SUBMITTED_MAX: u32 = 128;

/// Kicks reported at once: as many as 256 VMs have queues, on two workers. More are kept by the
/// kernel, and their polls are begun anew.
const COMPLETIONS_MAX: u32 = 4096;

/// The token of what nobody waits for. Other tokens count from 0.
const NOBODY: u64 = u64::MAX - 1;

/// A poll to begin or to end.
enum Change {
    Add(Arc<OwnedFd>, u64),
    Remove(u64),
}

/// A ring and an eventfd to wake it.
pub struct Uring {
    /// Guards the ring. The one thread that waits takes it, alone or with `changes` under it.
    ring: Mutex<Ring>,
    /// Guards what the ring is yet to be told, in order.
    changes: Mutex<Vec<Change>>,
    wake: Arc<OwnedFd>,
}

struct Ring {
    io: IoUring,
    /// It takes operations, of the thread that waited first and of no other.
    enabled: bool,
    /// So that a process that has nothing to do does not count as one that waits for a disk.
    wait_flags: EnterFlags,
    /// What is polled, by token.
    watched: HashMap<u64, Arc<OwnedFd>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Uring {
    /// A poller that watches nothing.
    ///
    /// # Errors
    /// The kernel is older than 6.1, or does not let us.
    pub fn new() -> io::Result<Uring> {
        let io: IoUring = IoUring::builder()
            // Kicks are reported when the worker asks, not by interrupting it.
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_cqsize(COMPLETIONS_MAX)
            .setup_r_disabled()
            .build(SUBMITTED_MAX)?;
        let mut only = OPERATIONS.map(Restriction::sqe_op);
        io.submitter().register_restrictions(&mut only)?;
        let wait_flags = match io.params().is_feature_no_iowait() {
            true => EnterFlags::GETEVENTS | EnterFlags::NO_IOWAIT,
            false => EnterFlags::GETEVENTS,
        };
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Uring {
            ring: Mutex::new(Ring {
                io,
                enabled: false,
                wait_flags,
                watched: HashMap::new(),
            }),
            changes: Mutex::default(),
            wake: Arc::new(wake),
        })
    }

    fn change(&self, change: Change) {
        lock(&self.changes).push(change);
        self.wake();
    }
}

fn poll(fd: RawFd, token: u64) -> squeue::Entry {
    opcode::PollAdd::new(types::Fd(fd), u32::from(PollFlags::IN.bits()))
        .multi(true)
        .build()
        .user_data(token)
}

impl Ring {
    fn push(&mut self, entry: squeue::Entry) -> io::Result<()> {
        // SAFETY: polls and their ends name no memory, and descriptors that are open until they are
        // submitted: those of `watched` or the wake descriptor.
        while unsafe { self.io.submission().push(&entry) }.is_err() {
            self.io.submit()?;
        }
        Ok(())
    }

    fn make(&mut self, change: Change) -> io::Result<()> {
        match change {
            Change::Add(fd, token) => {
                let entry = poll(fd.as_raw_fd(), token);
                self.watched.insert(token, fd);
                self.push(entry)
            }
            Change::Remove(token) => {
                // Not PollRemove: it fails and leaves the poll if that was signalled and the kernel is yet
                // to report it. This has what is to report it end it instead.
                // Submitted before its descriptor is let go, which it may be yet to be polled by.
                self.push(opcode::AsyncCancel::new(token).build().user_data(NOBODY))?;
                self.io.submit()?;
                self.watched.remove(&token);
                Ok(())
            }
        }
    }

    /// Takes what the kernel has reported. True: there was a wake, which is gone with this.
    fn reap(&mut self, wake: &OwnedFd, ready: &mut Vec<u64>) -> io::Result<bool> {
        let mut woken = false;
        loop {
            let Some(completion) = self.io.completion().next() else {
                return Ok(woken);
            };
            let (token, result) = (completion.user_data(), completion.result());
            let fd = match token {
                NOBODY => continue,
                WAKE => wake.as_raw_fd(),
                token => match self.watched.get(&token) {
                    Some(fd) => fd.as_raw_fd(),
                    // It was removed meanwhile.
                    None => continue,
                },
            };
            if result < 0 {
                // It is an eventfd and open: only want of memory can be the reason.
                let error = io::Error::from_raw_os_error(-result);
                tracing::error!("a kick could not be watched, and is watched anew: {error}");
            }
            match token {
                WAKE => {
                    consume(wake);
                    woken = true;
                }
                token => ready.push(token),
            }
            if !cqueue::more(completion.flags()) {
                self.push(poll(fd, token))?;
            }
        }
    }
}

impl Poller for Uring {
    fn add(&self, fd: &Arc<OwnedFd>, token: u64) -> io::Result<()> {
        self.change(Change::Add(fd.clone(), token));
        Ok(())
    }

    fn remove(&self, _fd: &OwnedFd, token: u64) -> io::Result<()> {
        self.change(Change::Remove(token));
        Ok(())
    }

    fn wait(&self, ready: &mut Vec<u64>, block: bool) -> io::Result<()> {
        ready.clear();
        let mut ring = lock(&self.ring);
        if !ring.enabled {
            ring.io.submitter().register_enable_rings()?;
            ring.enabled = true;
            ring.push(poll(self.wake.as_raw_fd(), WAKE))?;
        }
        for change in std::mem::take(&mut *lock(&self.changes)) {
            ring.make(change)?;
        }
        // The kernel may report whenever it is told something, as by the changes. Who takes a wake must
        // not sleep on it: what it was for came after the caller looked.
        let woken = ring.reap(&self.wake, ready)?;
        let wait_flags = ring.wait_flags.bits();
        let (submitter, queue, _) = ring.io.split();
        let pending = !queue.is_empty() || queue.taskrun() || queue.cq_overflow();
        let entries = queue.len() as u32;
        drop(queue);
        let done = if block && ready.is_empty() && !woken {
            // SAFETY: no argument is passed, and what is submitted names no memory.
            unsafe { submitter.enter::<()>(entries, 1, wait_flags, None) }
        } else if pending {
            submitter.submit()
        } else {
            return Ok(());
        };
        match done {
            Ok(_) => {}
            // A signal, or memory or room for completions is short: the next time.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)
                ) => {}
            Err(error) => return Err(error),
        }
        ring.reap(&self.wake, ready)?;
        Ok(())
    }

    fn wake(&self) {
        signal(&self.wake);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tmem_sim::{Missing, skipped};

    /// Whoever takes over a worker can have its ring do nothing that the worker itself does not.
    #[test]
    fn other_operations_are_refused() {
        let uring = match Uring::new() {
            Ok(uring) => uring,
            Err(error) => return skipped(Missing::IoUring, error),
        };
        let mut ready = Vec::new();
        uring.wait(&mut ready, false).expect("it can wait");
        let mut ring = lock(&uring.ring);
        let nop = opcode::Nop::new().build().user_data(3);
        ring.push(nop).expect("room");
        ring.io.submit_and_wait(1).expect("submitted");
        let refused = ring.io.completion().find(|entry| entry.user_data() == 3);
        assert_eq!(refused.expect("answered").result(), -libc::EACCES);
    }
}
