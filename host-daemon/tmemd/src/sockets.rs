// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listening Unix sockets: those of a dead daemon are replaced, those of a live one are refused.

use rustix::fs::{AtFlags, CWD, Gid, Uid, chownat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Who may connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// User; None: the daemon's.
    pub owner: Option<u32>,
    /// Group; None: the daemon's.
    pub group: Option<u32>,
    /// Permissions.
    pub mode: u32,
}

impl Default for Access {
    /// The daemon's user and group, nobody else.
    fn default() -> Access {
        Access {
            owner: None,
            group: None,
            mode: 0o660,
        }
    }
}

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 64;

/// A listening socket that removes its file when dropped, if the file is still its own.
pub struct Listener {
    /// The socket; accepting never waits.
    pub socket: UnixListener,
    path: PathBuf,
    device_inode: (u64, u64),
    /// Its file is removed already, and another may have its inode.
    closed: AtomicBool,
}

fn at(path: &Path, what: impl std::fmt::Display) -> io::Error {
    io::Error::other(format!("socket {}: {what}", path.display()))
}

impl Listener {
    /// Binds and listens.
    pub fn bind(path: &Path, access: Access) -> io::Result<Listener> {
        match std::fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(at(path, error)),
            Ok(metadata) if !metadata.file_type().is_socket() => {
                return Err(at(
                    path,
                    "there is a file in its place, which is not a socket",
                ));
            }
            Ok(_) => match UnixStream::connect(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    std::fs::remove_file(path).map_err(|e| at(path, e))?;
                    tracing::info!("replaced the socket {} of a dead process", path.display());
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                _ => {
                    return Err(at(
                        path,
                        "another process is listening on it: stop that one, or choose another path",
                    ));
                }
            },
        }
        // Listening comes last, so that nobody can slip in before all is set.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let bound = SocketAddrUnix::new(path).and_then(|address| {
            let unix = AddressFamily::UNIX;
            let socket = rustix::net::socket_with(unix, SocketType::STREAM, flags, None)?;
            rustix::net::bind(&socket, &address)?;
            Ok(socket)
        });
        let socket = bound.map_err(|errno| match path.parent() {
            Some(folder) if errno == Errno::NOENT => at(
                path,
                format_args!(
                    "there is no directory {}: create it, or choose another path",
                    folder.display()
                ),
            ),
            _ => at(path, io::Error::from(errno)),
        })?;
        // Removes its file from here on, whatever fails.
        let metadata = std::fs::symlink_metadata(path).map_err(|e| at(path, e))?;
        let listener = Listener {
            socket: socket.into(),
            path: path.into(),
            device_inode: (metadata.dev(), metadata.ino()),
            closed: AtomicBool::new(false),
        };
        listener.give(access)?;
        rustix::net::listen(&listener.socket, BACKLOG).map_err(|e| at(path, io::Error::from(e)))?;
        Ok(listener)
    }

    /// Sets who may connect.
    pub fn give(&self, access: Access) -> io::Result<()> {
        let path = &self.path;
        let Access { owner, group, mode } = access;
        if owner.is_some() || group.is_some() {
            let (uid, gid) = (owner.map(Uid::from_raw), group.map(Gid::from_raw));
            chownat(CWD, path, uid, gid, AtFlags::SYMLINK_NOFOLLOW).map_err(|errno| {
                let name = |id: Option<u32>| id.map_or("-".into(), |id| id.to_string());
                at(
                    path,
                    format_args!(
                        "it cannot be given to user {} and group {} ({errno}): run the daemon as root, \
                         or ask for no owner",
                        name(owner),
                        name(group)
                    ),
                )
            })?;
        }
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
            .map_err(|e| at(path, e))
    }

    /// Removes its file, if it is still its own; at once, whoever else still has the listener.
    pub fn close(&self) {
        if self.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        let metadata = std::fs::symlink_metadata(&self.path);
        if metadata.is_ok_and(|m| (m.dev(), m.ino()) == self.device_inode)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!("socket {} cannot be removed: {error}", self.path.display());
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.close();
    }
}
