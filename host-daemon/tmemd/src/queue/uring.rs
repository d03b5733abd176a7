// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Poller that uses io_uring. Each kick is a multishot poll that stays in the ring until it is
//! removed. A worker that has work sees new kicks in memory that it shares with the kernel. It
//! makes a system call only to sleep, or when the kernel reports pending work.
//!
//! The ring can do nothing else: it is restricted to [`OPERATIONS`] before its first use. No
//! operation refers to memory of the daemon, so nothing must wait for an operation before memory is
//! freed. Each operation holds its own reference to the file. Out of scope: interrupting guests,
//! see `notifier.rs`.
//!
//! System calls: io_uring_setup and io_uring_register at the start, io_uring_enter, eventfd2.

use crate::queue::poller::{Poller, WAKE};
use crate::util::event_fd::{consume, signal};
use io_uring::register::Restriction;
use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue, types};
use rustix::event::{EventfdFlags, PollFlags};
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The only operations that the ring accepts.
pub const OPERATIONS: [u8; 2] = [opcode::PollAdd::CODE, opcode::AsyncCancel::CODE];

/// Maximum number of polls that one system call can begin or end.
const SUBMITTED_MAX: u32 = 128;

/// Maximum number of kicks that are reported at once. With 256 VMs on two workers, a worker has
/// that many queues. The kernel keeps further kicks and ends their polls, which are then begun
/// again.
const COMPLETIONS_MAX: u32 = 4096;

/// Token of operations whose completion is ignored. Tokens of kicks are numbered from 0.
const NOBODY: u64 = u64::MAX - 1;

/// Change to make in the ring: a poll to begin or to end.
enum Change {
    Add(Arc<OwnedFd>, u64),
    Remove(u64),
}

/// Poller with an io_uring, and an eventfd to wake its worker.
pub struct Uring {
    /// Guards the ring. Only the thread that waits takes it, alone or with `changes` under it.
    ring: Mutex<Ring>,
    /// Guards the changes that the ring has yet to receive, in their order.
    changes: Mutex<Vec<Change>>,
    wake: Arc<OwnedFd>,
}

struct Ring {
    io: IoUring,
    /// Whether the ring accepts operations. It accepts them from the thread that waited first, and
    /// from no other.
    enabled: bool,
    /// Flags of a wait. NO_IOWAIT keeps an idle process from counting as waiting for a disk.
    wait_flags: EnterFlags,
    /// The descriptors that are polled, by token.
    watched: HashMap<u64, Arc<OwnedFd>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Uring {
    /// Creates a poller that watches nothing.
    ///
    /// # Errors
    /// The kernel is older than 6.1 or does not permit io_uring.
    pub fn new() -> io::Result<Uring> {
        let io: IoUring = IoUring::builder()
            // The kernel reports kicks when the worker asks for them, without interrupting the
            // worker.
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
        // SAFETY: polls and cancellations refer to no memory. Their descriptors stay open until the
        // submission: they are in `watched`, or are the wake descriptor.
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
                // PollRemove would fail and leave the poll if the eventfd was signalled and the
                // kernel has yet to report it. AsyncCancel ends the poll in that case, too. It is
                // submitted before the descriptor is released, because the poll itself may not be
                // submitted yet.
                self.push(opcode::AsyncCancel::new(token).build().user_data(NOBODY))?;
                self.io.submit()?;
                self.watched.remove(&token);
                Ok(())
            }
        }
    }

    /// Takes the completions that the kernel has reported. Returns true if there was a wake, which
    /// is consumed.
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
                    // The kick was removed after the kernel had reported this completion, so the
                    // completion is ignored.
                    None => continue,
                },
            };
            if result < 0 {
                // The eventfd is open, so the poll can only have ended because memory was short.
                let error = io::Error::from_raw_os_error(-result);
                tracing::error!("a kick could not be watched; the worker tries again: {error}");
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
        // The kernel may report completions at every submission, and adding and removing polls may
        // have submitted operations. If a wake is among the completions, the worker must not sleep:
        // the reason for the wake arose after the caller looked for work.
        let woken = ring.reap(&self.wake, ready)?;
        let wait_flags = ring.wait_flags.bits();
        let (submitter, queue, _) = ring.io.split();
        let pending = !queue.is_empty() || queue.taskrun() || queue.cq_overflow();
        let entries = queue.len() as u32;
        drop(queue);
        let done = if block && ready.is_empty() && !woken {
            // SAFETY: no argument is passed, and the submitted operations refer to no memory.
            unsafe { submitter.enter::<()>(entries, 1, wait_flags, None) }
        } else if pending {
            submitter.submit()
        } else {
            return Ok(());
        };
        match done {
            Ok(_) => {}
            // The call was interrupted by a signal, or memory or space for completions is short for
            // a moment. The next wait tries again.
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

    /// The ring must refuse other operations, which an attacker who controls a worker thread could
    /// submit.
    #[test]
    fn a_ring_refuses_operations_that_workers_do_not_use() {
        let uring = match Uring::new() {
            Ok(uring) => uring,
            Err(error) => return skipped(Missing::IoUring, error),
        };
        let mut ready = Vec::new();
        uring
            .wait(&mut ready, false)
            .expect("cannot wait for descriptors");
        let mut ring = lock(&uring.ring);
        let nop = opcode::Nop::new().build().user_data(3);
        ring.push(nop)
            .expect("the submission queue has no free entry");
        ring.io
            .submit_and_wait(1)
            .expect("cannot submit to io_uring");
        let refused = ring.io.completion().find(|entry| entry.user_data() == 3);
        assert_eq!(
            refused
                .expect("io_uring did not complete the entry")
                .result(),
            -libc::EACCES
        );
    }
}
