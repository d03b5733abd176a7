// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Poller that uses epoll. Workers use it where io_uring is missing or forbidden. It is
//! edge-triggered: it reports each kick (eventfd signalled by the guest) once.
//!
//! System calls: epoll_create1, epoll_ctl, epoll_wait, eventfd2.

use crate::queue::poller::{Poller, WAKE};
use crate::util::event_fd::{consume, signal};
use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, Timespec};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Maximum number of events that one epoll_wait(2) returns. The next call returns the remaining
/// events.
const EVENTS_MAX: usize = 256;

/// Poller with an epoll instance, and with an eventfd through which other threads wake the worker.
pub struct Epoll {
    epoll: OwnedFd,
    wake: OwnedFd,
}

impl Epoll {
    /// Creates a poller that watches only its own wake-up eventfd.
    ///
    /// # Errors
    /// The system has no descriptor left.
    pub fn new() -> io::Result<Epoll> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &wake, EventData::new_u64(WAKE), EventFlags::IN)?;
        Ok(Epoll { epoll, wake })
    }
}

impl Poller for Epoll {
    fn add(&self, fd: &Arc<OwnedFd>, token: u64) -> io::Result<()> {
        let data = EventData::new_u64(token);
        // Each signal is reported once (EPOLLET). A front end may pass an eventfd that stays
        // readable after a read: with EFD_SEMAPHORE, a read only subtracts 1 from its counter.
        let once = EventFlags::IN | EventFlags::ET;
        Ok(epoll::add(&self.epoll, fd, data, once)?)
    }

    fn remove(&self, fd: &OwnedFd, _token: u64) -> io::Result<()> {
        Ok(epoll::delete(&self.epoll, fd)?)
    }

    fn wait(&self, ready: &mut Vec<u64>, block: bool) -> io::Result<()> {
        ready.clear();
        let mut events = Vec::with_capacity(EVENTS_MAX);
        let none = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let timeout = if block { None } else { Some(&none) };
        match epoll::wait(&self.epoll, spare_capacity(&mut events), timeout) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        for event in &events {
            match event.data.u64() {
                WAKE => consume(&self.wake),
                token => ready.push(token),
            }
        }
        Ok(())
    }

    fn wake(&self) {
        signal(&self.wake);
    }
}
