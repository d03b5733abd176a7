// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `doctor`: looks at host, daemon, VMs and libvirt's domains, and names the command that mends each fault.
//!
//! | file | its idea |
//! | --- | --- |
//! | `host.rs` | files of the host: kernel, hook, AppArmor |
//! | `daemon.rs` | what the daemon says of itself and of its VMs, and their sockets |
//! | `domain.rs` | what libvirt's domains say |
//!
//! It only looks. Each fault has a test that makes it: a check that was never seen to fail is none.

mod daemon;
#[cfg(feature = "libvirt")]
mod domain;
mod host;

use crate::{Failure, Reach, Said};
use clap::Args;
use serde::Serialize;
use std::path::PathBuf;

/// Where it looks.
#[derive(Args, Clone)]
pub struct DoctorArguments {
    /// libvirt to ask for its domains
    #[arg(short, long, value_name = "URI", default_value = "qemu:///system")]
    connect: String,
    /// Look at the host's files below this folder
    #[arg(long, value_name = "PATH", default_value = "/", hide = true)]
    root: PathBuf,
    /// Print also what is as it should be
    #[arg(long)]
    all: bool,
}

/// How it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// Something does not work.
    Fault,
    /// Something works less well than it could, or is as somebody wanted it for a while.
    Warning,
    /// As it should be, or not used here.
    Good,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// How it is.
    pub state: State,
    /// What was looked at; does not change between versions.
    pub check: &'static str,
    /// Of whom: host, daemon, or a VM.
    pub about: String,
    /// A sentence.
    pub text: String,
    /// A command that mends it, or what to look at.
    pub mend: Option<String>,
}

impl Finding {
    fn new(
        state: State,
        (check, about): (&'static str, &str),
        text: impl Into<String>,
        mend: Option<String>,
    ) -> Finding {
        let about = about.into();
        // Some of it was written by others.
        let text = text.into().replace(char::is_control, " ");
        Finding {
            state,
            check,
            about,
            text,
            mend,
        }
    }

    fn good(of: (&'static str, &str), text: impl Into<String>) -> Finding {
        Finding::new(State::Good, of, text, None)
    }

    fn warning(of: (&'static str, &str), text: impl Into<String>, mend: &str) -> Finding {
        Finding::new(State::Warning, of, text, Some(mend.into()))
    }

    fn fault(of: (&'static str, &str), text: impl Into<String>, mend: &str) -> Finding {
        Finding::new(State::Fault, of, text, Some(mend.into()))
    }
}

/// Looks at everything. With faults the exit code is 1.
pub fn run(reach: &Reach, arguments: &DoctorArguments) -> Result<(Said, bool), Failure> {
    let mut findings = host::look(&arguments.root);
    let (of_daemon, vms) = daemon::look(reach);
    findings.extend(of_daemon);
    #[cfg(feature = "libvirt")]
    findings.extend(domain::look(
        reach,
        &arguments.connect,
        &arguments.root,
        vms.as_deref(),
    ));
    #[cfg(not(feature = "libvirt"))]
    drop(vms);
    // Faults first, each group in the order of looking.
    findings.sort_by_key(|finding| finding.state);
    let count = |state| {
        findings
            .iter()
            .filter(|finding| finding.state == state)
            .count()
    };
    let (faults, warnings) = (count(State::Fault), count(State::Warning));
    let mut text = String::new();
    for finding in &findings {
        let word = match finding.state {
            State::Fault => "FAULT",
            State::Warning => "warning",
            State::Good if arguments.all => "good",
            State::Good => continue,
        };
        text += &format!("{word:<8} {}: {}\n", finding.about, finding.text);
        if let Some(mend) = &finding.mend {
            text += &format!("         -> {mend}\n");
        }
    }
    text += &format!(
        "{faults} faults, {warnings} warnings, {} good\n",
        count(State::Good)
    );
    let json = serde_json::json!({
        "faults": faults, "warnings": warnings, "findings": findings,
    });
    Ok((Said { text, json }, faults > 0))
}
