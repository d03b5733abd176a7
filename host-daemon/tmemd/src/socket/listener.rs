// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listening Unix sockets of the daemon. If a socket's file already exists, binding replaces it,
//! but fails if a process listens on it. Only authorized peers are admitted, whatever mode the
//! socket's file has.

use crate::socket::credentials::{Credentials, Permissions};
use rustix::fs::{AtFlags, CWD, Gid, Mode, OFlags, Uid, chownat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The configured permissions of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// User id of the socket's owner; None for the daemon's user.
    pub owner: Option<u32>,
    /// Id of the socket's group; None for the daemon's group.
    pub group: Option<u32>,
    /// Permission bits of the socket.
    pub mode: u32,
}

impl Default for Access {
    /// Returns the permissions of a socket to which only the daemon's user and group may connect.
    fn default() -> Access {
        Access {
            owner: None,
            group: None,
            mode: 0o660,
        }
    }
}

/// Maximum number of connections that wait for accept(2) at one socket.
const BACKLOG: i32 = 64;

/// Listening socket. Dropping the value removes the socket's file, unless another file now has its
/// path.
pub struct Listener {
    /// The listening socket. It is nonblocking, so accept(2) never blocks.
    pub socket: UnixListener,
    path: PathBuf,
    device_inode: (u64, u64),
    /// User id and group id of the socket's file when the daemon created it.
    created_as: (u32, u32),
    /// Permission bits of the socket, as configured.
    mode: AtomicU32,
    /// Whether the daemon has removed the socket's file. After the removal, another file may have
    /// the same inode number, and must not be removed.
    closed: AtomicBool,
}

/// Process that connected to a socket without permission.
#[derive(Debug)]
pub struct UnauthorizedPeer {
    credentials: Credentials,
    permissions: Permissions,
}

impl std::fmt::Display for UnauthorizedPeer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Permissions { owner, group, mode } = self.permissions;
        write!(
            f,
            "process {} of user {} has no permission. The socket's configured owner is user \
             {owner}, its group is {group} and its mode is {mode:o}",
            self.credentials.pid, self.credentials.user
        )
    }
}

/// Connects to a socket to find out whether a process listens on it. connect(2) needs write
/// permission. If the socket's file belongs to another user, as for a VM, the function first makes
/// the daemon the file's owner. If a process listens, it gives the file back to that user.
///
/// # Errors
/// No process listens (`ConnectionRefused`), or the file is no socket or not accessible.
fn probe(path: &Path) -> io::Result<UnixStream> {
    match UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
        connected => return connected,
    }
    // All further checks and changes of the file use this descriptor. They refer to the same file
    // even if the path is replaced meanwhile.
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
    let metadata = std::fs::File::from(file.try_clone()?).metadata()?;
    if !metadata.file_type().is_socket() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let give = |file: &OwnedFd, owner| chownat(file, "", Some(owner), None, AtFlags::EMPTY_PATH);
    give(&file, rustix::process::geteuid())?;
    let connected = UnixStream::connect(path);
    if connected.is_ok() {
        give(&file, Uid::from_raw(metadata.uid()))?;
    }
    connected
}

fn at(path: &Path, what: impl std::fmt::Display) -> io::Error {
    io::Error::other(format!("socket {}: {what}", path.display()))
}

impl Listener {
    /// Creates a socket at `path`, sets its permissions and listens.
    ///
    /// # Errors
    /// The path is in use, or the socket cannot be created; the text says what to do.
    pub fn bind(path: &Path, access: Access) -> io::Result<Listener> {
        match std::fs::symlink_metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(at(path, error)),
            Ok(metadata) if !metadata.file_type().is_socket() => {
                return Err(at(
                    path,
                    "a file that is not a socket has this path: remove it, or choose another path",
                ));
            }
            Ok(_) => match probe(path) {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    std::fs::remove_file(path).map_err(|e| at(path, e))?;
                    tracing::info!("replaced the socket {} of a dead process", path.display());
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    return Err(at(
                        path,
                        "another user owns the socket, and a process may be listening on it: \
                         remove it if no process is, or choose another path",
                    ));
                }
                _ => {
                    return Err(at(
                        path,
                        "another process is listening on it: stop that process, or choose another \
                         path",
                    ));
                }
            },
        }
        // listen(2) is called last, so that no peer can connect before the socket's permissions are
        // set.
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let bound = SocketAddrUnix::new(path).and_then(|address| {
            let unix = AddressFamily::UNIX;
            let socket = rustix::net::socket_with(unix, SocketType::STREAM, flags, None)?;
            rustix::net::bind(&socket, &address)?;
            Ok(socket)
        });
        let socket = bound.map_err(|errno| match path.parent() {
            Some(directory) if errno == Errno::NOENT => at(
                path,
                format_args!(
                    "there is no directory {}: create it, or choose another path",
                    directory.display()
                ),
            ),
            _ => at(path, io::Error::from(errno)),
        })?;
        // If a step after the creation of the listener fails, dropping the listener removes the
        // socket's file.
        let metadata = std::fs::symlink_metadata(path).map_err(|e| at(path, e))?;
        let listener = Listener {
            socket: socket.into(),
            path: path.into(),
            device_inode: (metadata.dev(), metadata.ino()),
            created_as: (metadata.uid(), metadata.gid()),
            mode: AtomicU32::new(access.mode),
            closed: AtomicBool::new(false),
        };
        listener.set_access(access)?;
        rustix::net::listen(&listener.socket, BACKLOG).map_err(|e| at(path, io::Error::from(e)))?;
        Ok(listener)
    }

    /// Sets owner, group and mode of the socket.
    ///
    /// # Errors
    /// The system does not permit the change. The error says what to do.
    pub fn set_access(&self, access: Access) -> io::Result<()> {
        let path = &self.path;
        let metadata = std::fs::symlink_metadata(path).map_err(|e| at(path, e))?;
        let owner = access.owner.unwrap_or(self.created_as.0);
        let group = access.group.unwrap_or(self.created_as.1);
        if (metadata.uid(), metadata.gid()) != (owner, group) {
            let (uid, gid) = (Some(Uid::from_raw(owner)), Some(Gid::from_raw(group)));
            chownat(CWD, path, uid, gid, AtFlags::SYMLINK_NOFOLLOW).map_err(|errno| {
                at(
                    path,
                    format_args!(
                        "it cannot be given to user {owner} and group {group} ({errno}): run the daemon as \
                         root or by its unit, or configure no other user and group"
                    ),
                )
            })?;
        }
        let mode = access.mode;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
            .map_err(|e| at(path, e))?;
        self.mode.store(mode, Ordering::SeqCst);
        Ok(())
    }

    /// Accepts a connection without waiting. If the socket does not admit the peer, returns the
    /// peer as the inner error.
    ///
    /// # Errors
    /// No connection waits (`WouldBlock`), or the system fails.
    pub fn accept(&self) -> io::Result<Result<UnixStream, UnauthorizedPeer>> {
        let (stream, _) = self.socket.accept()?;
        stream.set_nonblocking(false)?;
        let metadata = std::fs::symlink_metadata(&self.path).ok();
        let Some(metadata) = metadata.filter(|m| (m.dev(), m.ino()) == self.device_inode) else {
            // The peer connected just before the socket's file was removed or replaced, so the
            // connection is dropped.
            return Err(io::ErrorKind::WouldBlock.into());
        };
        let permissions = Permissions {
            owner: metadata.uid(),
            group: metadata.gid(),
            mode: self.mode.load(Ordering::SeqCst),
        };
        let credentials = Credentials::from_stream(&stream)?;
        match credentials.may_connect(permissions, rustix::process::geteuid().as_raw()) {
            true => Ok(Ok(stream)),
            false => Ok(Err(UnauthorizedPeer {
                credentials,
                permissions,
            })),
        }
    }

    /// Removes the socket's file, unless another file now has its path. Other threads may still
    /// have references to the listener.
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
