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

impl Finding {
    fn new(
        state: State,
        (check, about): (&'static str, &str),
        text: impl Into<String>,
        remedy: Option<String>,
    ) -> Finding {
        let about = about.into();
        // Control characters are removed, because parts of the text may come from other programs or
        // from VMs.
        let text = text.into().replace(char::is_control, " ");
        Finding {
            state,
            check,
            about,
            text,
            remedy,
        }
    }

    /// Creates the finding of a check that found no fault.
    pub fn good(of: (&'static str, &str), text: impl Into<String>) -> Finding {
        Finding::new(State::Good, of, text, None)
    }

    /// Creates the finding of something that works less well than it could.
    pub fn warning(of: (&'static str, &str), text: impl Into<String>, remedy: &str) -> Finding {
        Finding::new(State::Warning, of, text, Some(remedy.into()))
    }

    /// Creates the finding of something that does not work.
    pub fn fault(of: (&'static str, &str), text: impl Into<String>, remedy: &str) -> Finding {
        Finding::new(State::Fault, of, text, Some(remedy.into()))
    }
}
