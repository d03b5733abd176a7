// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Result of a check of `doctor`.

use serde::Serialize;

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// The check found that something does not work.
    Fault,
    /// The check found that something works less well than it could, or that an operator has
    /// changed it temporarily.
    Warning,
    /// The check found no fault, or this host does not use the checked part.
    Good,
}

/// Finding of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Result of the check.
    pub state: State,
    /// Name of the check; it does not change between versions.
    pub check: &'static str,
    /// Subject of the finding: host, daemon, or the name of a VM.
    pub about: String,
    /// The finding in one sentence.
    pub text: String,
    /// Command that fixes the fault, or place to look at; None for a good state.
    pub remedy: Option<String>,
}

/// A check, which creates its findings.
#[derive(Clone, Copy)]
pub struct Check<'a> {
    name: &'static str,
    about: &'a str,
}

impl<'a> Check<'a> {
    /// Creates the check `name` of the subject `about`: host, daemon, or the name of a VM.
    pub fn new(name: &'static str, about: &'a str) -> Check<'a> {
        Check { name, about }
    }

    fn finding(self, state: State, text: String, remedy: Option<String>) -> Finding {
        Finding {
            state,
            check: self.name,
            about: self.about.into(),
            // Control characters are removed, because parts of the text may come from other
            // programs or from VMs.
            text: text.replace(char::is_control, " "),
            remedy,
        }
    }

    /// Creates the finding that there is no fault.
    pub fn good(self, text: impl Into<String>) -> Finding {
        self.finding(State::Good, text.into(), None)
    }

    /// Creates the finding that something works less well than it could.
    pub fn warning(self, text: impl Into<String>, remedy: &str) -> Finding {
        self.finding(State::Warning, text.into(), Some(remedy.into()))
    }

    /// Creates the finding that something does not work.
    pub fn fault(self, text: impl Into<String>, remedy: &str) -> Finding {
        self.finding(State::Fault, text.into(), Some(remedy.into()))
    }
}
