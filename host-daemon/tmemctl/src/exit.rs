// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Exit codes, failures as text and as JSON, and the end of the process. A test compares the help
//! text and docs/tmemctl.md with [`Code`].

use serde_json::json;
use std::io::Write;

/// Reason of a failure. Its numeric value is the exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Code {
    /// Reading or writing failed, or the daemon gave an invalid answer.
    Failed = 1,
    /// The command line is wrong.
    Usage = 2,
    /// The daemon or libvirt cannot be reached.
    Unreachable = 3,
    /// The daemon or libvirt did not answer in time.
    Timeout = 4,
    /// There is no such VM or domain.
    NotFound = 5,
    /// The daemon or libvirt refused the request.
    Refused = 6,
    /// The user has no permission for the socket, or the socket is read-only.
    Denied = 7,
    /// `doctor` found faults.
    Faults = 8,
}

/// Failure of a command: a sentence for the user, and the exit code that tells the kind of failure.
#[derive(Debug)]
pub struct Failure(pub String, pub Code);

/// Text at the end of `tmemctl --help`.
pub const HELP: &str = "\
Exit codes:
  0  success
  1  failed: input or output failed, or an answer was invalid
  2  usage: the command line is wrong
  3  unreachable: the daemon or libvirt does not run, has ended, or closed the connection
  4  timeout: the daemon or libvirt did not answer in time
  5  not_found: there is no such VM or domain
  6  refused: the daemon or libvirt refused the request
  7  denied: no permission for the socket, or the read-only socket does not allow the command
  8  faults: doctor found faults

With --json, an error is a JSON object on stderr: error (a name of this list), exit_code, message.";

impl Code {
    /// Returns the name by which the JSON output identifies the exit code.
    pub fn name(self) -> &'static str {
        match self {
            Code::Failed => "failed",
            Code::Usage => "usage",
            Code::Unreachable => "unreachable",
            Code::Timeout => "timeout",
            Code::NotFound => "not_found",
            Code::Refused => "refused",
            Code::Denied => "denied",
            Code::Faults => "faults",
        }
    }
}

impl Failure {
    /// Prints the failure to stderr, as text or as one line of JSON. Returns the exit code.
    pub fn print(&self, json: bool) -> u8 {
        // If stderr cannot be written, the exit code still reports the failure.
        let _ = std::io::stderr().write_all(self.line(json).as_bytes());
        self.1 as u8
    }

    fn line(&self, json: bool) -> String {
        let Failure(message, code) = self;
        match json {
            false => format!("tmemctl: {message}\n"),
            true => {
                let error = json!({
                    "error": code.name(), "exit_code": *code as u8, "message": message,
                });
                format!("{error}\n")
            }
        }
    }
}

/// Ends the process without running exit handlers. Handlers of C libraries (OpenSSL, GLib) free
/// memory that a thread of [`within_timeout`](crate::reach::within_timeout) may still use, and have corrupted the heap that way. The
/// functions that print have flushed all output before.
pub fn exit_now(code: u8) -> ! {
    // SAFETY: _exit ends the process at once and does not access its memory.
    unsafe { libc::_exit(i32::from(code)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Code; 8] = [
        Code::Failed,
        Code::Usage,
        Code::Unreachable,
        Code::Timeout,
        Code::NotFound,
        Code::Refused,
        Code::Denied,
        Code::Faults,
    ];

    #[test]
    fn help_and_documentation_list_every_exit_code() {
        let document = include_str!("../../../docs/tmemctl.md");
        for (number, code) in (1..).zip(ALL) {
            assert_eq!(
                code as u8, number,
                "the exit codes are not consecutive numbers"
            );
            let line = format!("\n  {number}  {}: ", code.name());
            assert!(HELP.contains(&line), "the help text has no line {line:?}");
            let row = format!("\n| {number} | `{}` | ", code.name());
            assert!(
                document.contains(&row),
                "docs/tmemctl.md has no row {row:?}"
            );
        }
    }
}
