// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Asks an emulator whether it has the device. The emulator is any program, perhaps a script. The
//! wait for it is therefore bounded, and a process that the emulator leaves behind does not block
//! tmemctl.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;
use tmem_domain::DEVICE;

/// Maximum number of bytes of an answer that are read; QEMU's answer has about 30 KiB.
const ANSWER_BYTES: u64 = 1 << 20;

/// Returns whether the emulator has the device. `limit` bounds the wait.
///
/// # Errors
/// Returns the reason if the emulator cannot be asked.
pub fn has_device(emulator: &str, limit: Duration) -> Result<bool, String> {
    let mut command = Command::new(emulator);
    command
        .args(["-device", "help"])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = command
        .spawn()
        .map_err(|error| format!("it cannot be run: {error}"))?;
    let Some(answer) = child.stdout.take() else {
        return Err("a bug: it has no stdout".into());
    };
    let (sender, receiver) = mpsc::channel();
    // A child of the emulator may keep the pipe open. This thread then ends with that child, or
    // with this process.
    std::thread::spawn(move || {
        let lines = BufReader::new(answer.take(ANSWER_BYTES)).split(b'\n');
        let device = DEVICE.as_bytes();
        let found = lines
            .map_while(Result::ok)
            .any(|line| line.windows(device.len()).any(|part| part == device));
        // If the time limit has passed, the receiver no longer exists.
        let _ = sender.send(found);
    });
    let found = receiver.recv_timeout(limit);
    // The answer is complete, or the time limit has passed. The emulator may already have ended.
    let _ = child.kill();
    let _ = child.wait();
    found.map_err(|_| format!("it did not answer within {} s", limit.as_secs_f32()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::time::Instant;

    fn asked(script: &str, limit: Duration) -> Result<bool, String> {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let path = directory.path().join("emulator");
        std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).expect("cannot write the file");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755))
            .expect("cannot make the file executable");
        has_device(path.to_str().expect("the text is not UTF-8"), limit)
    }

    #[test]
    fn a_hung_emulator_is_reported_after_the_timeout() {
        // Processes that the test leaves behind end after about a minute.
        let long = Duration::from_secs(60);
        let says = format!("echo name \\\"{DEVICE}\\\", bus PCI");
        assert_eq!(asked(&says, long), Ok(true));
        assert_eq!(asked("echo name e1000", long), Ok(false));
        assert_eq!(asked("exit 1", long), Ok(false));
        let begun = Instant::now();
        // A child of the emulator keeps stdout open for longer than the limit.
        let kept = format!("sleep 70 & {says}; wait");
        assert_eq!(asked(&kept, long), Ok(true));
        let hangs = asked("exec sleep 1000", Duration::from_millis(100));
        assert_eq!(hangs, Err("it did not answer within 0.1 s".into()));
        assert!(begun.elapsed() < long);
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let absent = has_device(
            directory
                .path()
                .join("qemu")
                .to_str()
                .expect("the text is not UTF-8"),
            long,
        );
        assert!(absent.is_err_and(|why| why.starts_with("it cannot be run: ")));
    }
}
