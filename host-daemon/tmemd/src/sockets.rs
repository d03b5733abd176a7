// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Listening Unix sockets: those of a dead daemon are replaced, those of a live one are refused.

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

/// Owner and group may connect, nobody else.
const SOCKET_MODE: u32 = 0o660;

/// Connections that may wait to be accepted.
const BACKLOG: i32 = 64;

/// A listening socket that removes its file when dropped, if the file is still its own.
pub struct Listener {
    /// The socket; accepting never waits.
    pub socket: UnixListener,
    path: PathBuf,
    device_inode: (u64, u64),
}

fn at(path: &Path, what: impl std::fmt::Display) -> io::Error {
    io::Error::other(format!("socket {}: {what}", path.display()))
}

impl Listener {
    /// Binds and listens.
    pub fn bind(path: &Path) -> io::Result<Listener> {
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
        // The mode is set before listening, so that nobody can slip in.
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
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(SOCKET_MODE))
            .map_err(|e| at(path, e))?;
        rustix::net::listen(&socket, BACKLOG).map_err(|e| at(path, io::Error::from(e)))?;
        let metadata = std::fs::symlink_metadata(path).map_err(|e| at(path, e))?;
        Ok(Listener {
            socket: socket.into(),
            path: path.into(),
            device_inode: (metadata.dev(), metadata.ino()),
        })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let metadata = std::fs::symlink_metadata(&self.path);
        if metadata.is_ok_and(|m| (m.dev(), m.ino()) == self.device_inode)
            && let Err(error) = std::fs::remove_file(&self.path)
        {
            tracing::warn!("socket {} cannot be removed: {error}", self.path.display());
        }
    }
}
