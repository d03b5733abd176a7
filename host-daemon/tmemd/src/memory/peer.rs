// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Check that the front end (VMM) of a connection is still connected. A worker makes this check
//! before it accesses guest memory.
//!
//! A VMM gives up on a daemon that is stopped or starved, and closes the connection. The guest may
//! then be reset and use the memory of rings and buffers for other data, while the daemon still has
//! that memory mapped. When the daemon continues, a worker may run before the control thread
//! notices the end of the connection. A VMM that has sent a message waits for the answer and does
//! not reuse the memory meanwhile, so the check ignores unread messages.
//!
//! The time between a check and the access after it remains unprotected. A daemon that is stopped
//! exactly there, for as long as the VMM waits, still completes that access. The access reads at
//! most 64 KiB of pages, which are never acknowledged then, or writes at most 64 KiB of an answer.
//! Only a VMM that waits for the end of the daemon could prevent that. In
//! addition, a check is not repeated within [`GOOD_FOR`]. Out of scope: the reaction to a front end
//! that hung up.

use crate::socket::credentials::Credentials;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Time after a check of the front end during which it is not checked again. A small request takes
/// not much longer than a system call, so a check before each access would be expensive. A VMM
/// needs more than 5 µs to close a connection, run its guest again, and have the guest reuse the
/// memory. If the daemon is stopped after a check, the next check finds that this time has passed,
/// and asks the kernel again.
const GOOD_FOR: Duration = Duration::from_micros(5);

/// Error: the front end (VMM) has closed its end of the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HungUp;

/// The front end (VMM) of a connection, as far as the daemon checks that it is connected.
///
/// The value owns one of several descriptors of the connection's socket. A thread that ends the
/// connection shuts the socket down, so that the front end sees the end before the last descriptor
/// is closed.
pub struct Peer(Source);

/// Function that replaces the check of the socket if the front end is simulated.
pub type Check = Box<dyn Fn() -> Result<(), HungUp> + Send + Sync>;

enum Source {
    Socket(Socket),
    Simulated(Check),
}

struct Socket {
    socket: OwnedFd,
    /// User of the front end; None if the kernel does not report it.
    user: Option<u32>,
    epoch: Instant,
    /// Time, by `now_ns`, at which the last successful check of any worker began, in ns.
    seen_at_ns: AtomicU64,
    /// Number of further checks that succeed in a test. The check after them finds that the front
    /// end hung up.
    #[cfg(test)]
    checks: AtomicU64,
}

impl Peer {
    /// Creates a `Peer` for the front end at the other end of a socket. Its checks ask the kernel
    /// whether the front end is connected. Connection threads may not make the system call that
    /// reads the front end's user, so the acceptor calls this function.
    pub fn new(stream: UnixStream) -> Peer {
        let credentials = Credentials::from_stream(&stream).ok();
        Peer(Source::Socket(Socket {
            user: credentials.map(|credentials| credentials.user),
            socket: stream.into(),
            epoch: Instant::now(),
            seen_at_ns: 0.into(),
            #[cfg(test)]
            checks: u64::MAX.into(),
        }))
    }

    /// Creates a simulated front end, each check of which calls the function `check`.
    pub fn simulated(check: Check) -> Peer {
        Peer(Source::Simulated(check))
    }

    /// Checks whether the front end is connected, without waiting.
    ///
    /// # Errors
    /// The front end is not connected. Every later check returns this error, too.
    pub fn check(&self) -> Result<(), HungUp> {
        match &self.0 {
            Source::Socket(socket) => socket.check(),
            Source::Simulated(check) => check(),
        }
    }

    /// Returns the user that the front end had when it connected; None if it is unknown.
    pub fn user(&self) -> Option<u32> {
        match &self.0 {
            Source::Socket(socket) => socket.user,
            Source::Simulated(_) => None,
        }
    }

    /// Makes the front end appear to hang up after `checks` further checks.
    #[cfg(test)]
    pub fn hang_up_after(&self, checks: u64) {
        match &self.0 {
            Source::Socket(socket) => socket.checks.store(checks, Ordering::SeqCst),
            Source::Simulated(_) => unreachable!("hang_up_after() was called for a simulated peer"),
        }
    }
}

impl Socket {
    /// Returns the time in ns since the connection began, plus `GOOD_FOR`. The addition makes the
    /// initial value 0 of `seen_at_ns` count as an expired check.
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
        // The time is read before poll(2). If the daemon is stopped between the two, the result of
        // the check expires too early instead of too late.
        let now_ns = self.now_ns();
        let seen_ago_ns = now_ns.saturating_sub(self.seen_at_ns.load(Ordering::Relaxed));
        if seen_ago_ns < GOOD_FOR.as_nanos() as u64 {
            return Ok(());
        }
        // poll(2) reports HUP and ERR always, even if they are not requested.
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
                // If poll(2) fails, the front end counts as not connected, because its memory must
                // not be accessed then.
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
        let (own, other) = UnixStream::pair().expect("cannot create a socket pair");
        let same = own.try_clone().expect("cannot duplicate the descriptor");
        (Peer::new(own), same, other)
    }

    /// Waits until the previous check of the front end has expired, and checks again.
    fn check(peer: &Peer) -> Result<(), HungUp> {
        std::thread::sleep(2 * GOOD_FOR);
        peer.check()
    }

    #[test]
    fn the_first_check_detects_an_earlier_hang_up() {
        let (own, other) = UnixStream::pair().expect("cannot create a socket pair");
        drop(other);
        assert_eq!(Peer::new(own).check(), Err(HungUp));
    }

    #[test]
    fn unread_messages_do_not_count_as_a_hang_up() {
        let (peer, _own, mut other) = pair();
        assert_eq!(check(&peer), Ok(()));
        other
            .write_all(b"unread")
            .expect("the socket's buffer has no room for 6 bytes");
        assert_eq!(check(&peer), Ok(()));
        drop(other);
        assert_eq!(
            check(&peer),
            Err(HungUp),
            "a closed peer that had sent an unread message was not detected"
        );
    }

    #[test]
    fn each_way_to_close_the_connection_is_detected_as_a_hang_up() {
        for how in [Shutdown::Write, Shutdown::Both] {
            let (peer, _own, other) = pair();
            other
                .shutdown(how)
                .expect("cannot shut the connection down");
            assert_eq!(
                check(&peer),
                Err(HungUp),
                "a peer that shut down {how:?} was not detected"
            );
            assert_eq!(
                check(&peer),
                Err(HungUp),
                "a later check took a peer that shut down {how:?} for connected"
            );
        }
        let (peer, own, other) = pair();
        let other_handle = other.try_clone().expect("cannot duplicate the descriptor");
        drop(other);
        assert_eq!(
            check(&peer),
            Ok(()),
            "the peer was taken for closed although another handle of its socket is open"
        );
        drop(other_handle);
        assert_eq!(check(&peer), Err(HungUp));
        drop(own);
        let (peer, own, _other) = pair();
        own.shutdown(Shutdown::Both)
            .expect("cannot shut the connection down");
        assert_eq!(
            check(&peer),
            Err(HungUp),
            "a connection that this process shut down was not detected"
        );
    }
}
