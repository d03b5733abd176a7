// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Poller that uses io_uring. Each kick (eventfd of a guest) has a multishot poll that stays in the
//! ring until the kick is removed. A worker that has work sees new kicks in memory that it shares
//! with the kernel. The worker makes a system call only to sleep, or when the kernel reports
//! pending work.
//!
//! The ring is restricted to [`OPERATIONS`] before its first use and can do nothing else. No
//! operation refers to memory of the daemon, so the daemon may free memory without waiting for an
//! operation. Each operation has its own reference to the file. Out of scope: interrupting guests,
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

/// The io_uring operations that the ring accepts: polls and their cancellation.
pub const OPERATIONS: [u8; 2] = [opcode::PollAdd::CODE, opcode::AsyncCancel::CODE];

/// Maximum number of polls that one system call can add or cancel.
const SUBMITTED_MAX: u32 = 128;

/// Size of the completion queue: the maximum number of kicks that the ring reports at once. It is
/// larger than the number of queues of a worker, if two workers serve 256 VMs with 17 queues each.
/// The kernel keeps the completions of further kicks and ends the polls of these kicks; the worker
/// then adds the polls again.
const COMPLETIONS_MAX: u32 = 4096;

/// Token of operations whose completions are ignored. The tokens of kicks are numbers from 0 on.
const NOBODY: u64 = u64::MAX - 1;

/// Change to make in the ring: a poll to add or to remove.
enum Change {
    Add(Arc<OwnedFd>, u64),
    Remove(u64),
}

/// Poller with an io_uring, and with an eventfd through which other threads wake the worker.
pub struct Uring {
    /// Guards the ring. Only the waiting thread takes this lock. While it holds the lock, it may
    /// take the lock of `changes`.
    ring: Mutex<Ring>,
    /// Guards the list of changes that other threads have requested and that are not made in the
    /// ring yet, in their order.
    changes: Mutex<Vec<Change>>,
    wake: Arc<OwnedFd>,
}

struct Ring {
    io: IoUring,
    /// Whether the ring is enabled. The first call of `wait` enables it, and the ring then accepts
    /// operations only from the thread of that call.
    enabled: bool,
    /// Flags of the system call that waits for completions. NO_IOWAIT is set if the kernel has it.
    /// Without this flag, the kernel would account an idle worker as waiting for a disk.
    wait_flags: EnterFlags,
    /// The watched eventfds, by token. The reference keeps each descriptor open.
    watched: HashMap<u64, Arc<OwnedFd>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Uring {
    /// Creates a poller that watches only its own wake-up eventfd.
    ///
    /// # Errors
    /// The kernel is older than 6.1 or does not permit io_uring.
    pub fn new() -> io::Result<Uring> {
        let io: IoUring = IoUring::builder()
            // These flags defer the kernel's work for completions until the worker enters the ring.
            // A kick therefore does not interrupt the worker.
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

    fn queue_change(&self, change: Change) {
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
        // SAFETY: polls and cancellations refer to no memory. The descriptor of an entry stays open
        // until the entry is submitted: it is in `watched`, or it is the wake-up eventfd.
        while unsafe { self.io.submission().push(&entry) }.is_err() {
            self.io.submit()?;
        }
        Ok(())
    }

    fn apply(&mut self, change: Change) -> io::Result<()> {
        match change {
            Change::Add(fd, token) => {
                let entry = poll(fd.as_raw_fd(), token);
                self.watched.insert(token, fd);
                self.push(entry)
            }
            Change::Remove(token) => {
                // If the eventfd was signalled and the kernel has not reported the signal yet,
                // PollRemove would fail and the poll would remain. AsyncCancel ends the poll in
                // that case, too. The cancellation is submitted before the descriptor is released,
                // because the poll may itself not be submitted yet.
                self.push(opcode::AsyncCancel::new(token).build().user_data(NOBODY))?;
                self.io.submit()?;
                self.watched.remove(&token);
                Ok(())
            }
        }
    }

    /// Takes the completions that the kernel has reported, and adds the tokens of kicks to `ready`.
    /// Returns true if the wake-up eventfd was signalled, and resets that eventfd.
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
                    // The kick was removed after the kernel had reported a completion for it, so
                    // the completion is ignored.
                    None => continue,
                },
            };
            if result < 0 {
                // The eventfd is open, so only a lack of kernel memory can have ended the poll.
                let error = io::Error::from_raw_os_error(-result);
                tracing::error!("a worker cannot poll a kick eventfd, and tries again: {error}");
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
        self.queue_change(Change::Add(fd.clone(), token));
        Ok(())
    }

    fn remove(&self, _fd: &OwnedFd, token: u64) -> io::Result<()> {
        self.queue_change(Change::Remove(token));
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
            ring.apply(change)?;
        }
        // Submitting the changes may already have produced completions. If one of them is for the
        // wake-up eventfd, the worker must not sleep: the caller has not seen the work for which
        // another thread woke it.
        let woken = ring.reap(&self.wake, ready)?;
        let wait_flags = ring.wait_flags.bits();
        let (submitter, queue, _) = ring.io.split();
        let pending = !queue.is_empty() || queue.taskrun() || queue.cq_overflow();
        let entries = queue.len() as u32;
        drop(queue);
        let done = if block && ready.is_empty() && !woken {
            // SAFETY: the call passes no argument structure, and the submitted operations refer to
            // no memory.
            unsafe { submitter.enter::<()>(entries, 1, wait_flags, None) }
        } else if pending {
            submitter.submit()
        } else {
            return Ok(());
        };
        match done {
            Ok(_) => {}
            // A signal interrupted the call, or the kernel has no memory or no space for
            // completions for a moment. The next call of `wait` tries again.
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
    use tmem_model::{Missing, skipped};

    /// The ring must refuse operations that workers do not use. An attacker who controls a worker
    /// thread could submit them.
    #[test]
    fn the_io_uring_refuses_operations_that_workers_do_not_use() {
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
