// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `doctor`: checks the host, the daemon, VMs and libvirt's domains, and names a command that fixes
//! each fault.
//!
//! | file | contents |
//! | --- | --- |
//! | `host.rs` | checks files of the host: kernel, hook, AppArmor |
//! | `installation.rs` | checks the installation: versions, denials, replaced programs, huge pages |
//! | `daemon.rs` | checks the daemon, its systemd unit, its VMs and their sockets |
//! | `domain.rs` | checks libvirt's domains |
//! | `finding.rs` | result of a check |
//!
//! `doctor` changes nothing. For each fault that `doctor` reports, a test causes the fault and
//! shows that the check finds it.

mod daemon;
#[cfg(feature = "libvirt")]
mod domain;
mod finding;
mod host;
mod installation;

use crate::exit::Failure;
use crate::output::Output;
use crate::reach::Reach;
use clap::Args;
use finding::State;
use std::path::PathBuf;

/// Options of `doctor`.
#[derive(Args, Clone)]
pub struct DoctorArguments {
    /// URI of the libvirt whose domains are checked
    #[arg(short, long, value_name = "URI", default_value = "qemu:///system")]
    connect: String,
    /// Check the host's files below this directory
    #[arg(long, value_name = "PATH", default_value = "/", hide = true)]
    root: PathBuf,
    /// Print also the checks that found no fault
    #[arg(long)]
    all: bool,
}

/// Runs all checks. Returns the output, and true if a check found a fault.
pub fn run(reach: &Reach, arguments: &DoctorArguments) -> Result<(Output, bool), Failure> {
    let mut findings = host::findings(&arguments.root);
    findings.extend(installation::findings(&arguments.root));
    findings.extend(daemon::unit(reach, &arguments.root));
    let (daemon_findings, vms) = daemon::findings(reach, &arguments.root);
    findings.extend(daemon_findings);
    #[cfg(feature = "libvirt")]
    findings.extend(domain::findings(
        reach,
        &arguments.connect,
        &arguments.root,
        vms.as_deref(),
        daemon::knows_retained_pages(reach),
    ));
    #[cfg(not(feature = "libvirt"))]
    drop(vms);
    // Faults are printed first, then warnings. Findings of the same state stay in the order of the
    // checks.
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
        if let Some(remedy) = &finding.remedy {
            text += &format!("         -> {remedy}\n");
        }
    }
    text += &format!(
        "{faults} faults, {warnings} warnings, {} good\n",
        count(State::Good)
    );
    let json = serde_json::json!({
        "faults": faults, "warnings": warnings, "findings": findings,
    });
    Ok((Output { text, json }, faults > 0))
}
