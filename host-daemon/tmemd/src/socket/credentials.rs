// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The credentials of a peer, as the kernel reports them, and whether a socket admits them.
//!
//! The mode of a socket's file keeps out most users. But the file's owner, or an accidental chmod,
//! may change the mode. The daemon checks the configured permissions in any case. Out of scope:
//! what an admitted connection may do.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// Maximum number of groups of a process: the kernel's NGROUPS_MAX.
const GROUPS_MAX: usize = 65536;

/// Write permission, which connect(2) to a socket needs.
const WRITE: u32 = 0o2;

/// Credentials of a peer at the time of its connect(2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Process id; 0 if the process is in a PID namespace that the daemon does not see.
    pub pid: u32,
    /// User id of the process.
    pub user: u32,
    /// Ids of all groups of the process.
    pub groups: Vec<u32>,
}

/// Permissions of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permissions {
    /// User id of the socket's owner.
    pub owner: u32,
    /// Id of the socket's group.
    pub group: u32,
    /// Configured permission bits.
    pub mode: u32,
}

impl Credentials {
    /// Reads the credentials of a connection's peer.
    ///
    /// # Errors
    /// The system call fails.
    pub fn of(stream: &UnixStream) -> io::Result<Credentials> {
        // The layout is that of struct ucred: process, user, group.
        let mut own = [0; 3];
        numbers(stream, libc::SO_PEERCRED, &mut own).1?;
        let [pid, user, group] = own;
        let mut groups = more_groups(stream)?;
        groups.push(group);
        Ok(Credentials { pid, user, groups })
    }

    /// Returns true if the peer may connect: by the kernel's rules for files, except that root and
    /// `daemon`, the daemon's own user, always may.
    pub fn may_connect(&self, permissions: Permissions, daemon: u32) -> bool {
        let Permissions { owner, group, mode } = permissions;
        let bits = match self.user {
            user if user == 0 || user == daemon => return true,
            user if user == owner => mode >> 6,
            _ if self.groups.contains(&group) => mode >> 3,
            _ => mode,
        };
        bits & WRITE != 0
    }
}

/// Reads a socket option that is an array of numbers. Writes as many of its elements as fit into
/// `room`, and returns the number of all elements.
///
/// rustix cannot be used here: its process ids are never 0, but a process of a foreign PID
/// namespace has that id.
fn numbers(stream: &UnixStream, option: libc::c_int, room: &mut [u32]) -> (usize, io::Result<()>) {
    let mut bytes = size_of_val(room) as libc::socklen_t;
    // SAFETY: `bytes` is the size of `room`, the kernel writes no more than that, and a `u32` may
    // have any value.
    let done = unsafe {
        let room = room.as_mut_ptr().cast();
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            room,
            &mut bytes,
        )
    };
    let result = match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    (bytes as usize / size_of::<u32>(), result)
}

/// Returns the supplementary groups of a connection's peer.
fn more_groups(stream: &UnixStream) -> io::Result<Vec<u32>> {
    let mut groups = Vec::new();
    // The kernel never changes the groups of a connection. The buffer that is allocated for their
    // number therefore fits the list.
    let (count, result) = numbers(stream, libc::SO_PEERGROUPS, &mut groups);
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ERANGE) && count <= GROUPS_MAX => {}
        // The first call has an empty buffer. If it succeeds, the peer has no supplementary groups.
        result => return result.map(|()| groups),
    }
    groups.resize(count, 0);
    numbers(stream, libc::SO_PEERGROUPS, &mut groups).1?;
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAEMON: u32 = 900;

    fn somebody(user: u32, groups: &[u32]) -> Credentials {
        Credentials {
            pid: 1,
            user,
            groups: groups.into(),
        }
    }

    #[test]
    fn the_configured_permissions_decide_who_may_connect() {
        let may = |credentials: Credentials, mode| {
            let permissions = Permissions {
                owner: 107,
                group: 36,
                mode,
            };
            credentials.may_connect(permissions, DAEMON)
        };
        for (mode, owner, group, others) in [
            (0o600, true, false, false),
            (0o660, true, true, false),
            (0o666, true, true, true),
            (0o060, false, true, false),
            (0o444, false, false, false),
        ] {
            assert_eq!(
                may(somebody(107, &[5]), mode),
                owner,
                "mode {mode:o}: wrong access for the owner"
            );
            // The owner's permission bits apply to the owner, also if the group's bits permit more
            // or less.
            assert_eq!(
                may(somebody(107, &[36]), mode),
                owner,
                "mode {mode:o}: wrong access for the owner who is in the group"
            );
            assert_eq!(
                may(somebody(1000, &[5, 36]), mode),
                group,
                "mode {mode:o}: wrong access for a member of the group"
            );
            assert_eq!(
                may(somebody(1000, &[5]), mode),
                others,
                "mode {mode:o}: wrong access for another user"
            );
            assert!(
                may(somebody(0, &[]), mode),
                "mode {mode:o}: root has no access"
            );
            assert!(
                may(somebody(DAEMON, &[]), mode),
                "mode {mode:o}: the daemon's own user has no access"
            );
        }
    }

    #[test]
    fn credentials_come_from_the_kernel() {
        let (one, _other) = UnixStream::pair().expect("cannot create a socket pair");
        let credentials = Credentials::of(&one).expect("cannot read the peer's credentials");
        assert_eq!(credentials.pid, std::process::id());
        assert_eq!(credentials.user, rustix::process::geteuid().as_raw());
        let mut groups = rustix::process::getgroups().expect("cannot read this process's groups");
        groups.push(rustix::process::getegid());
        for group in groups {
            assert!(
                credentials.groups.contains(&group.as_raw()),
                "the credentials lack group {group:?} of this process"
            );
        }
    }
}
