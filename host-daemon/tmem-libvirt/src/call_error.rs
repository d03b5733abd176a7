// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reasons why a call to the daemon fails, as sentences for operators.

use std::path::Path;
use tmem_control as api;

/// Reason why a call to the daemon failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    /// The daemon refused the VM or its quota.
    #[error("{0}")]
    Refused(String),
    /// The daemon did not answer, or returned another error.
    #[error("{0}")]
    Failed(String),
}

impl CallError {
    /// Converts an error of a call at the control socket `socket`.
    pub fn new(socket: &Path, error: &api::Error) -> CallError {
        match error.kind() {
            api::ErrorKind::BadQuota(Some(bad)) => {
                CallError::Refused(format!("the daemon refuses the VM's quota: {}", bad.reason))
            }
            api::ErrorKind::BadVm(Some(bad)) => {
                CallError::Refused(format!("the daemon refuses the VM: {}", bad.reason))
            }
            _ => CallError::no_answer(socket, &error.to_string()),
        }
    }

    /// Creates the error for a daemon that does not answer at its control socket.
    pub fn no_answer(socket: &Path, why: &str) -> CallError {
        CallError::Failed(format!(
            "the daemon's control socket {} does not answer: {why}",
            socket.display()
        ))
    }
}
