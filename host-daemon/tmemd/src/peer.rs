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
//! most a slice of an answer. No look of the daemon can close that. Never here: what to do about it.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// The front end's end of a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HungUp;

/// The front end of a connection.
///
/// Its handle is one of several of the same socket: whoever ends a connection shuts the socket
/// down, so that the front end sees the end before the last of them is closed.
pub struct Peer {
    socket: OwnedFd,
    /// So many looks find it there.
    #[cfg(test)]
    looks: std::sync::atomic::AtomicUsize,
}

impl Peer {
    /// Whoever is at the other end of that socket.
    pub fn new(stream: UnixStream) -> Peer {
        Peer {
            socket: stream.into(),
            #[cfg(test)]
            looks: usize::MAX.into(),
        }
    }

    /// Finds out whether it is still there; never waits. A hang-up is never taken back.
    pub fn look(&self) -> Result<(), HungUp> {
        #[cfg(test)]
        {
            use std::sync::atomic::Ordering;
            let left = self.looks.load(Ordering::SeqCst);
            self.looks
                .store(left.checked_sub(1).ok_or(HungUp)?, Ordering::SeqCst);
        }
        // HUP and ERR are told unasked.
        let mut fds = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        loop {
            match poll(&mut fds, Some(&now)) {
                Ok(0) => return Ok(()),
                Err(Errno::INTR) => {}
                // Who cannot look must not touch.
                Ok(_) | Err(_) => return Err(HungUp),
            }
        }
    }

    /// Lets it hang up between a look and the next: so many find it there.
    #[cfg(test)]
    pub fn hang_up_after(&self, looks: usize) {
        self.looks.store(looks, std::sync::atomic::Ordering::SeqCst);
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

    #[test]
    fn messages_are_no_hang_up() {
        let (peer, _own, mut other) = pair();
        assert_eq!(peer.look(), Ok(()));
        other.write_all(b"unread").expect("room");
        assert_eq!(peer.look(), Ok(()));
        drop(other);
        assert_eq!(peer.look(), Err(HungUp), "unread messages or none");
    }

    #[test]
    fn each_way_to_hang_up_is_seen() {
        for how in [Shutdown::Write, Shutdown::Both] {
            let (peer, _own, other) = pair();
            other.shutdown(how).expect("connected");
            assert_eq!(peer.look(), Err(HungUp), "{how:?}");
            assert_eq!(peer.look(), Err(HungUp), "{how:?}: for good");
        }
        let (peer, own, other) = pair();
        let other_handle = other.try_clone().expect("a second handle");
        drop(other);
        assert_eq!(peer.look(), Ok(()), "another handle is open");
        drop(other_handle);
        assert_eq!(peer.look(), Err(HungUp));
        drop(own);
        let (peer, own, _other) = pair();
        own.shutdown(Shutdown::Both).expect("connected");
        assert_eq!(peer.look(), Err(HungUp), "by this daemon");
    }
}
