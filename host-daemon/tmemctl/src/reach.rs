// SPDX-License-Identifier: Apache-2.0 OR MIT
//! How a command reaches the daemon, and time limits of requests.

use crate::exit::{Code, Failure};
use std::path::PathBuf;
use std::time::Duration;

/// Options that each command needs to call the daemon and to print the answer.
#[derive(Clone)]
pub struct Reach {
    /// Path of the daemon's control socket.
    pub socket: PathBuf,
    /// Time limit in seconds.
    pub timeout: u64,
    /// True if the command prints JSON.
    pub json: bool,
}

impl Reach {
    /// Returns half of the command's time limit. A command waits no longer than this for another
    /// program, such as an emulator, that it runs as one of its steps.
    #[cfg(feature = "libvirt")]
    pub fn half_the_time(&self) -> Duration {
        Duration::from_secs(self.timeout) / 2
    }

    /// Returns the name of the daemon for error messages.
    pub fn daemon(&self) -> String {
        format!("the daemon at {}", self.socket.display())
    }
}

/// Runs `run` on another thread, and fails after the time limit. A thread is necessary because even
/// connect() may block: the socket of a service that hangs still exists. `asked` names the service
/// in the error message.
pub fn within_timeout<T: Send + 'static>(
    asked: &str,
    reach: &Reach,
    run: impl FnOnce(&Reach) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let limit = Duration::from_secs(reach.timeout);
    within(limit, reach, run).unwrap_or_else(|| Err(timeout_failure(asked, reach)))
}

/// Runs `run` on another thread and returns its result; None if it takes longer than `limit`.
pub fn within<T: Send + 'static>(
    limit: Duration,
    reach: &Reach,
    run: impl FnOnce(&Reach) -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let own = reach.clone();
    std::thread::spawn(move || {
        // Sending fails if the time limit has passed, because the receiver no longer exists then.
        let _ = sender.send(run(&own));
    });
    receiver.recv_timeout(limit).ok()
}

/// Creates the failure of a command whose service `asked` did not answer in time.
pub fn timeout_failure(asked: &str, reach: &Reach) -> Failure {
    let what = format!(
        "{asked} did not answer within {} s: it hangs or is stopped, or the host is overloaded \
         (--timeout waits longer)",
        reach.timeout
    );
    Failure(what, Code::Timeout)
}
