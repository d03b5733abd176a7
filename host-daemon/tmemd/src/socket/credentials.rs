// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Credentials of the process that connects to a socket, as the kernel reports them, and the check
//! whether the socket admits it.
//!
//! The mode of a socket's file keeps out most users, but the file's owner may change the mode, for
//! example by an accidental chmod. Therefore the daemon also checks the configured permissions
//! itself. Out of scope: what an admitted connection may do.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// Maximum number of groups of a process: the kernel's NGROUPS_MAX.
const GROUPS_MAX: usize = 65536;

/// Write permission, in the bits of one class of users. connect(2) to a Unix socket needs it.
const WRITE: u32 = 0o2;

/// Credentials that a process had when it connected to a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Process id; 0 if the process is in a PID namespace that the daemon does not see.
    pub pid: u32,
    /// User id of the process.
    pub user: u32,
    /// Ids of all groups of the process.
    pub groups: Vec<u32>,
}

/// Permissions that decide which processes may connect to a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permissions {
    /// User id of the socket's owner.
    pub owner: u32,
    /// Id of the socket's group.
    pub group: u32,
    /// Permission bits of the socket, as configured.
    pub mode: u32,
}

impl Credentials {
    /// Reads the credentials of the process at the other end of a connection.
    ///
    /// # Errors
    /// The system call fails.
    pub fn from_stream(stream: &UnixStream) -> io::Result<Credentials> {
        // The kernel's struct ucred consists of three numbers: process, user and group.
        let mut own = [0; 3];
        numbers(stream, libc::SO_PEERCRED, &mut own).1?;
        let [pid, user, group] = own;
        let mut groups = more_groups(stream)?;
        groups.push(group);
        Ok(Credentials { pid, user, groups })
    }

    /// Returns true if the process may connect. The kernel's rules for files apply, with an
    /// exception: root and `daemon`, the user of the daemon, may always connect.
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

/// Reads a socket option whose value is an array of numbers. Fills `room` with as many numbers as
/// fit, and returns how many numbers the option has.
///
/// rustix cannot be used here, because its process ids are never 0. The kernel reports process id 0
/// for a process in a PID namespace that the daemon does not see.
fn numbers(stream: &UnixStream, option: libc::c_int, room: &mut [u32]) -> (usize, io::Result<()>) {
    let mut bytes = size_of_val(room) as libc::socklen_t;
    // SAFETY: `bytes` is the size of `room`, the kernel writes no more than `bytes` bytes, and a
    // `u32` may have any value.
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

/// Returns the supplementary groups of the process at the other end of a connection.
fn more_groups(stream: &UnixStream) -> io::Result<Vec<u32>> {
    let mut groups = Vec::new();
    // The first call reads the number of groups. The groups of a connection's peer never change, so
    // a buffer of this size has space for all of them.
    let (count, result) = numbers(stream, libc::SO_PEERGROUPS, &mut groups);
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ERANGE) && count <= GROUPS_MAX => {}
        // The first call passes an empty buffer. It therefore succeeds only if the peer has no
        // supplementary groups.
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
    fn socket_owner_group_and_mode_decide_which_users_may_connect() {
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
                "mode {mode:o}: the access of the socket's owner is wrong"
            );
            // Only the permission bits for the owner apply to the owner, even if the owner is also
            // a member of the group.
            assert_eq!(
                may(somebody(107, &[36]), mode),
                owner,
                "mode {mode:o}: the access of an owner in the socket's group is wrong"
            );
            assert_eq!(
                may(somebody(1000, &[5, 36]), mode),
                group,
                "mode {mode:o}: the access of a member of the socket's group is wrong"
            );
            assert_eq!(
                may(somebody(1000, &[5]), mode),
                others,
                "mode {mode:o}: the access of a user without relation to the socket is wrong"
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
    fn peer_credentials_are_read_from_the_kernel() {
        let (one, _other) = UnixStream::pair().expect("cannot create a socket pair");
        let credentials =
            Credentials::from_stream(&one).expect("cannot read the peer's credentials");
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
