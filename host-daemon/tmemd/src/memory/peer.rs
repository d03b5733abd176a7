// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Whether the front end is still there: a worker looks before it touches guest memory.
//!
//! A VMM gives up on a daemon that is stopped or starved: it closes the connection, and the guest
//! may be reset and use the memory of rings and buffers for something else, which the daemon still
//! maps. When the daemon goes on, a worker may be ahead of the control thread that will hear of it,
//! with a kick to follow or in the middle of a chain. While the VMM waits for an answer the memory
//! stays what it was, so unread messages do not matter.
//!
//! What remains is the time between a look and the access that follows it: a daemon that is
//! stopped just there, for as long as the VMM waits, still writes what it was about to write, at
//! most a slice of an answer. And for [`GOOD_FOR`] a look is not repeated. No look of the daemon
//! can close the first; only a VMM that waits for the daemon's end can. Never here: what to do
//! about a hang-up.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a look is good for, since a small request takes not much longer than a system call.
/// In that time no VMM gets from closing a connection over running its guest again to a guest that
/// has freed the memory and uses it for something else. A daemon that is stopped between two looks
/// sees at the second that time has gone by.
const GOOD_FOR: Duration = Duration::from_micros(5);

/// The front end's end of a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HungUp;

/// The front end of a connection.
///
/// Its handle is one of several of the same socket: whoever ends a connection shuts the socket
/// down, so that the front end sees the end before the last of them is closed.
pub struct Peer(Source);

/// How it is looked at, in a simulator.
pub type Check = Box<dyn Fn() -> Result<(), HungUp> + Send + Sync>;

enum Source {
    Socket(Socket),
    Simulated(Check),
}

struct Socket {
    socket: OwnedFd,
    epoch: Instant,
    /// When a look began that found it there, by `now_ns`. Whichever worker looked.
    seen_at_ns: AtomicU64,
    /// So many looks find it there.
    #[cfg(test)]
    checks: AtomicU64,
}

impl Peer {
    /// Whoever is at the other end of that socket.
    pub fn new(stream: UnixStream) -> Peer {
        Peer(Source::Socket(Socket {
            socket: stream.into(),
            epoch: Instant::now(),
            seen_at_ns: 0.into(),
            #[cfg(test)]
            checks: u64::MAX.into(),
        }))
    }

    /// Whoever a simulator says is there: each look asks it.
    pub fn simulated(check: Check) -> Peer {
        Peer(Source::Simulated(check))
    }

    /// Finds out whether it is still there; never waits. A hang-up is never taken back.
    pub fn check(&self) -> Result<(), HungUp> {
        match &self.0 {
            Source::Socket(socket) => socket.check(),
            Source::Simulated(check) => check(),
        }
    }

    /// Lets it hang up between a look and the next: so many find it there.
    #[cfg(test)]
    pub fn hang_up_after(&self, checks: u64) {
        match &self.0 {
            Source::Socket(socket) => socket.checks.store(checks, Ordering::SeqCst),
            Source::Simulated(_) => unreachable!("it is told when"),
        }
    }
}

impl Socket {
    /// Starts where 0 is too long ago to be good.
    fn now_ns(&self) -> u64 {
        (self.epoch.elapsed() + GOOD_FOR).as_nanos() as u64
    }

    fn check(&self) -> Result<(), HungUp> {
        #[cfg(test)]
        {
            let left = self.checks.load(Ordering::SeqCst);
            self.checks
                .store(left.checked_sub(1).ok_or(HungUp)?, Ordering::SeqCst);
        }
        // From before the look: the daemon may be stopped after it.
        let now_ns = self.now_ns();
        let seen_ago_ns = now_ns.saturating_sub(self.seen_at_ns.load(Ordering::Relaxed));
        if seen_ago_ns < GOOD_FOR.as_nanos() as u64 {
            return Ok(());
        }
        // HUP and ERR are told unasked.
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let no_wait = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        loop {
            match poll(&mut fds, Some(&no_wait)) {
                Ok(0) => {
                    self.seen_at_ns.store(now_ns, Ordering::Relaxed);
                    return Ok(());
                }
                Err(Errno::INTR) => {}
                // Who cannot look must not touch.
                Ok(_) | Err(_) => return Err(HungUp),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::Shutdown;

    fn pair() -> (Peer, UnixStream, UnixStream) {
        let (own, other) = UnixStream::pair().expect("sockets");
        let same = own.try_clone().expect("a second handle");
        (Peer::new(own), same, other)
    }

    /// A look when the one before is no longer good.
    fn check(peer: &Peer) -> Result<(), HungUp> {
        std::thread::sleep(2 * GOOD_FOR);
        peer.check()
    }

    #[test]
    fn the_first_look_is_one() {
        let (own, other) = UnixStream::pair().expect("sockets");
        drop(other);
        assert_eq!(Peer::new(own).check(), Err(HungUp));
    }

    #[test]
    fn messages_are_no_hang_up() {
        let (peer, _own, mut other) = pair();
        assert_eq!(check(&peer), Ok(()));
        other.write_all(b"unread").expect("room");
        assert_eq!(check(&peer), Ok(()));
        drop(other);
        assert_eq!(check(&peer), Err(HungUp), "unread messages or none");
    }

    #[test]
    fn each_way_to_hang_up_is_seen() {
        for how in [Shutdown::Write, Shutdown::Both] {
            let (peer, _own, other) = pair();
            other.shutdown(how).expect("connected");
            assert_eq!(check(&peer), Err(HungUp), "{how:?}");
            assert_eq!(check(&peer), Err(HungUp), "{how:?}: for good");
        }
        let (peer, own, other) = pair();
        let other_handle = other.try_clone().expect("a second handle");
        drop(other);
        assert_eq!(check(&peer), Ok(()), "another handle is open");
        drop(other_handle);
        assert_eq!(check(&peer), Err(HungUp));
        drop(own);
        let (peer, own, _other) = pair();
        own.shutdown(Shutdown::Both).expect("connected");
        assert_eq!(check(&peer), Err(HungUp), "by this daemon");
    }
}
