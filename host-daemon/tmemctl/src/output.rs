// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Output of a command on stdout, as text or as JSON.

use crate::exit::{Code, Failure, exit_now};
use std::io::Write;

/// Output of a command, as text and as JSON.
pub struct Output {
    /// Text for a terminal, with a line break at its end.
    pub text: String,
    /// JSON for `--json`.
    pub json: serde_json::Value,
}

impl Output {
    /// Builds the output of a command from a reply of the daemon. The JSON output is the reply
    /// itself.
    pub fn from_reply(text: String, reply: &impl serde::Serialize) -> Result<Output, Failure> {
        let json = serde_json::to_value(reply).map_err(|e| Failure(e.to_string(), Code::Failed))?;
        Ok(Output { text, json })
    }

    /// Prints the output to stdout, as JSON if `json` is true.
    pub fn print(&self, json: bool) -> Result<(), Failure> {
        if json {
            return print(&format!("{:#}\n", self.json));
        }
        print(&self.text)
    }
}

/// Prints a text to stdout and flushes it.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Ok(()) => Ok(()),
        // EPIPE means that the reader has closed the pipe, as head(1) does after its last line.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => exit_now(0),
        Err(error) => Err(Failure(format!("cannot print: {error}"), Code::Failed)),
    }
}
