// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Remembers for a short time that the daemon did not answer, so that not every VM that starts waits
//! for it. libvirt starts a hook for each VM, so the record is a file.
//!
//! The file has the host's uptime and the path of the daemon's control socket. The uptime does not
//! jump when the clock is set. The hook runs as root and trusts only a regular file of its own user
//! that nobody else may write. It follows no symbolic link, and never waits for the file. If the
//! record cannot be written or read, the hook waits for the daemon, as without a record. Limit: two
//! daemons on one host overwrite each other's record.

use rustix::fs::{Mode, OFlags};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Default path of the record. Only root may write in this directory. The daemon's run directory
/// belongs to the daemon's user, who must not direct writes of root.
pub const DEFAULT_PATH: &str = "/run/tmem-hook.late";

/// Time for which a record counts. systemd replaces a daemon that hangs after 10 s.
const REMEMBERED: Duration = Duration::from_secs(10);

/// Largest size of the record in bytes: an uptime, and the longest path of Linux.
const RECORD_BYTES_MAX: u64 = 4096 + 32;

/// Record that the daemon did not answer.
pub struct LateRecord {
    path: PathBuf,
}

impl LateRecord {
    /// Returns the record in the file `path`, which need not exist.
    pub fn new(path: PathBuf) -> LateRecord {
        LateRecord { path }
    }

    /// Returns true if the daemon at the control socket `socket` did not answer a short time ago.
    pub fn is_recent(&self, socket: &Path) -> bool {
        let recent = |uptime| Some(self.read()?.is_recent(socket, uptime));
        uptime().and_then(recent).unwrap_or(false)
    }

    /// Records that the daemon at the control socket `socket` does not answer now.
    ///
    /// # Errors
    /// The file cannot be written, or another user may write it.
    pub fn write(&self, socket: &Path) -> io::Result<()> {
        let uptime = uptime().ok_or_else(|| io::Error::other("/proc/uptime cannot be read"))?;
        let mut file = self.open(OFlags::WRONLY | OFlags::CREATE)?;
        file.set_len(0)?;
        file.write_all(format!("{} {}", uptime.as_millis(), socket.display()).as_bytes())
    }

    /// Removes the record, because the daemon answers again.
    pub fn remove(&self) {
        // An error is ignored: the record ends by itself after a short time.
        let _ = std::fs::remove_file(&self.path);
    }

    fn read(&self) -> Option<Late> {
        let file = self.open(OFlags::RDONLY).ok()?;
        let mut text = String::new();
        file.take(RECORD_BYTES_MAX).read_to_string(&mut text).ok()?;
        let (millis, socket) = text.split_once(' ')?;
        Some(Late {
            uptime: Duration::from_millis(millis.parse().ok()?),
            socket: socket.into(),
        })
    }

    /// Opens the file. Refuses a file that another user owns or may write.
    fn open(&self, flags: OFlags) -> io::Result<File> {
        let flags = flags | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK;
        let file = File::from(rustix::fs::open(
            &self.path,
            flags,
            Mode::RUSR | Mode::WUSR,
        )?);
        let found = file.metadata()?;
        let own = found.uid() == rustix::process::geteuid().as_raw();
        if !found.is_file() || !own || found.mode() & 0o022 != 0 || found.nlink() != 1 {
            return Err(io::Error::other(format!(
                "{}: not a regular file that only this user may write",
                self.path.display()
            )));
        }
        Ok(file)
    }
}

/// Contents of a record.
struct Late {
    uptime: Duration,
    socket: PathBuf,
}

impl Late {
    fn is_recent(&self, socket: &Path, uptime: Duration) -> bool {
        let age = uptime.checked_sub(self.uptime);
        self.socket == socket && age.is_some_and(|age| age < REMEMBERED)
    }
}

/// Returns the time since the host's start; None if the kernel does not report it.
fn uptime() -> Option<Duration> {
    let text = std::fs::read_to_string("/proc/uptime").ok()?;
    let seconds: f64 = text.split(' ').next()?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn a_record_counts_for_ten_seconds_and_for_its_socket() {
        let late = Late {
            uptime: Duration::from_secs(100),
            socket: "/run/a".into(),
        };
        let at = |millis| Duration::from_millis(millis);
        for (socket, uptime, expected) in [
            ("/run/a", at(100_000), true),
            ("/run/a", at(109_999), true),
            ("/run/a", at(110_000), false),
            // The host was restarted, and its /run was kept.
            ("/run/a", at(99_999), false),
            ("/run/b", at(100_000), false),
        ] {
            assert_eq!(
                late.is_recent(Path::new(socket), uptime),
                expected,
                "{socket} at {uptime:?}"
            );
        }
    }

    #[test]
    fn a_record_that_others_may_write_is_neither_read_nor_written() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let path = directory.path().join("late");
        let (record, socket) = (LateRecord::new(path.clone()), Path::new("/run/a"));
        assert!(!record.is_recent(socket), "a missing record was read");
        record.write(socket).expect("cannot write the record");
        assert!(record.is_recent(socket));
        let mode = fs::metadata(&path).expect("there is no file").mode();
        assert_eq!(mode & 0o777, 0o600);
        record.write(socket).expect("cannot write the record again");
        assert!(record.is_recent(socket));

        let text = fs::read(&path).expect("cannot read the file");
        fs::set_permissions(&path, Permissions::from_mode(0o622)).expect("cannot change the mode");
        assert!(!record.is_recent(socket), "a file of mode 622 was trusted");
        record
            .write(socket)
            .expect_err("a file that others may write was written");

        // The daemon's user or a guest cannot make the hook write to another file of root.
        let target = directory.path().join("target");
        fs::write(&target, &text).expect("cannot write the file");
        for link in [
            |target: &Path, path: &Path| symlink(target, path),
            |target: &Path, path: &Path| fs::hard_link(target, path),
        ] {
            record.remove();
            link(&target, &path).expect("cannot create the link");
            assert!(!record.is_recent(socket), "a link was followed");
            record.write(socket).expect_err("a link was followed");
            assert_eq!(fs::read(&target).ok(), Some(text.clone()));
        }
        // A pipe must not make the hook wait.
        record.remove();
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &path, fifo, Mode::RUSR | Mode::WUSR, 0)
            .expect("cannot create a pipe");
        assert!(!record.is_recent(socket), "a pipe was read");
        record.write(socket).expect_err("a pipe was written");
        record.remove();
        fs::write(&path, "no number").expect("cannot write the file");
        assert!(!record.is_recent(socket));
    }
}
