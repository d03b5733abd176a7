// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Who is at the other end of a socket, by the kernel's word, and whether a socket is for him.
//!
//! The mode of a socket's file keeps out most. But its owner may change it, so may a hasty chmod; what was asked
//! for holds all the same. Never here: what a connection may do once it is taken.

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// Groups of a process, at most: the kernel's NGROUPS_MAX.
const GROUPS_MAX: usize = 65536;

/// To connect to a socket is to write to it.
const WRITE: u32 = 0o2;

/// Whoever connected, as the kernel noted it then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Process; 0: of a PID namespace that the daemon does not see.
    pub pid: u32,
    /// User.
    pub user: u32,
    /// Groups, all of them.
    pub groups: Vec<u32>,
}

/// Whom a socket is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permissions {
    /// User.
    pub owner: u32,
    /// Group.
    pub group: u32,
    /// Permissions, as they were asked for.
    pub mode: u32,
}

impl Credentials {
    /// Those of a connection's other end.
    ///
    /// # Errors
    /// The system fails.
    pub fn of(stream: &UnixStream) -> io::Result<Credentials> {
        // As struct ucred: process, user, group.
        let mut own = [0; 3];
        numbers(stream, libc::SO_PEERCRED, &mut own).1?;
        let [pid, user, group] = own;
        let mut groups = more_groups(stream)?;
        groups.push(group);
        Ok(Credentials { pid, user, groups })
    }

    /// It may connect: as the kernel decides about files, but that `daemon`, which is the daemon's own user, and
    /// root always may.
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

/// An option of a socket, as numbers: how many there are, of which no more are written than there is room for.
///
/// Not rustix's, for whom no process has the number 0: one of a foreign PID namespace does.
fn numbers(stream: &UnixStream, option: libc::c_int, room: &mut [u32]) -> (usize, io::Result<()>) {
    let mut bytes = size_of_val(room) as libc::socklen_t;
    // SAFETY: the room has that many bytes, of numbers that may have any value, and the kernel writes no more.
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

/// The supplementary ones.
fn more_groups(stream: &UnixStream) -> io::Result<Vec<u32>> {
    let mut groups = Vec::new();
    // Nothing changes them once somebody has connected.
    let (count, result) = numbers(stream, libc::SO_PEERGROUPS, &mut groups);
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ERANGE) && count <= GROUPS_MAX => {}
        // There are none.
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
    fn who_may_connect_is_what_was_asked_for() {
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
            assert_eq!(may(somebody(107, &[5]), mode), owner, "{mode:o}");
            // The owner's bits are his, whatever his groups may.
            assert_eq!(may(somebody(107, &[36]), mode), owner, "{mode:o}");
            assert_eq!(may(somebody(1000, &[5, 36]), mode), group, "{mode:o}");
            assert_eq!(may(somebody(1000, &[5]), mode), others, "{mode:o}");
            assert!(may(somebody(0, &[]), mode), "root, {mode:o}");
            assert!(may(somebody(DAEMON, &[]), mode), "its own, {mode:o}");
        }
    }

    #[test]
    fn the_kernel_tells_who_it_is() {
        let (one, _other) = UnixStream::pair().expect("sockets");
        let credentials = Credentials::of(&one).expect("told");
        assert_eq!(credentials.pid, std::process::id());
        assert_eq!(credentials.user, rustix::process::geteuid().as_raw());
        let mut groups = rustix::process::getgroups().expect("told");
        groups.push(rustix::process::getegid());
        for group in groups {
            assert!(credentials.groups.contains(&group.as_raw()), "{group:?}");
        }
    }
}
