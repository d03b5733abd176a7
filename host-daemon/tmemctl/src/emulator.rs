// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Asks an emulator whether it has the virtio-tmem device, and which properties its device has.
//!
//! A domain may name any program as its emulator, for example a script. The wait for its answer is
//! therefore bounded, and a process that the emulator leaves behind does not block tmemctl.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use tmem_libvirt::domain::DEVICE;

/// Maximum number of bytes that tmemctl reads of an emulator's answer. QEMU's answer has about 3
/// KiB.
const ANSWER_BYTES: u64 = 1 << 20;

/// Parts of the virtio-tmem device that an emulator supports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Emulator {
    /// Whether the emulator has the virtio-tmem device.
    pub has_device: bool,
    /// Whether the emulator's device has the property `retain`.
    pub has_retain: bool,
    /// Whether the emulator's device has the property `swap`.
    pub has_swap: bool,
}

/// Runs an emulator with `-device …,help` and returns what it supports. `limit` bounds the wait.
///
/// # Errors
/// Returns the reason if the emulator cannot be run or does not answer in time.
pub fn ask(emulator: &str, limit: Duration) -> Result<Emulator, String> {
    let mut command = Command::new(emulator);
    command
        .args(["-device", &format!("{DEVICE},help")])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = command
        .spawn()
        .map_err(|error| format!("it cannot be run: {error}"))?;
    let Some(answer) = child.stdout.take() else {
        return Err(
            "tmemctl has no pipe for the program's output; this is a bug in tmemctl".into(),
        );
    };
    let (sender, receiver) = mpsc::channel();
    // The answer is read on a thread, because a child of the emulator may keep the pipe open after
    // the emulator has ended. The thread then ends with that child, or with tmemctl.
    std::thread::spawn(move || {
        let lines = BufReader::new(answer.take(ANSWER_BYTES)).split(b'\n');
        let mut found = Emulator::default();
        for line in lines.map_while(Result::ok) {
            found.has_device |= line.starts_with(DEVICE.as_bytes());
            found.has_retain |= line.trim_ascii_start().starts_with(b"retain=");
            found.has_swap |= line.trim_ascii_start().starts_with(b"swap=");
            if found.has_retain && found.has_swap {
                break;
            }
        }
        found.has_retain &= found.has_device;
        found.has_swap &= found.has_device;
        // Sending fails if the time limit has passed, because the receiver no longer exists then.
        let _ = sender.send(found);
    });
    let found = receiver.recv_timeout(limit);
    // tmemctl kills the emulator after a complete answer and after the time limit. An error means
    // that the emulator has already ended.
    let _ = child.kill();
    let _ = child.wait();
    found.map_err(|_| format!("it did not answer within {} s", limit.as_secs_f32()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Instant;

    fn asked(script: &str, limit: Duration) -> Result<Emulator, String> {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let path = directory.path().join("emulator");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("cannot write the file");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755))
            .expect("cannot make the file executable");
        ask(path.to_str().expect("the path is not UTF-8"), limit)
    }

    #[test]
    fn a_hung_emulator_is_reported_after_the_timeout() {
        // Processes `sleep 70`, which the emulators of this test leave behind, end after about a
        // minute.
        let long = Duration::from_secs(60);
        let has = |has_device, has_properties| {
            Ok(Emulator {
                has_device,
                has_retain: has_properties,
                has_swap: has_properties,
            })
        };
        let old = format!("echo {DEVICE} options:; echo '  rombar=<int32>'");
        let new = format!("{old}; echo '  retain=<bool>  - on/off'; echo '  swap=<bool>'");
        assert_eq!(asked(&old, long), has(true, false));
        assert_eq!(asked(&new, long), has(true, true));
        let asks = format!("[ \"$*\" = '-device {DEVICE},help' ] && {{ {new}; }}");
        assert_eq!(asked(&asks, long), has(true, true));
        assert_eq!(
            asked("echo e1000 options:; echo retain=; echo swap=", long),
            has(false, false)
        );
        assert_eq!(asked("exit 1", long), has(false, false));
        let begun = Instant::now();
        // A child of this emulator, `sleep 70`, keeps stdout open for longer than the time limit of
        // 60 s.
        let kept = format!("sleep 70 & {new}; wait");
        assert_eq!(asked(&kept, long), has(true, true));
        let hangs = asked("exec sleep 1000", Duration::from_millis(100));
        assert_eq!(hangs, Err("it did not answer within 0.1 s".into()));
        assert!(begun.elapsed() < long);
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let absent = ask(
            directory
                .path()
                .join("qemu")
                .to_str()
                .expect("the path is not UTF-8"),
            long,
        );
        assert!(absent.is_err_and(|why| why.starts_with("it cannot be run: ")));
    }
}
