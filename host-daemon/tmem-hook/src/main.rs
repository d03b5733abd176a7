// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmem-hook: what libvirt runs from /etc/libvirt/hooks/qemu.d/ when a VM comes and goes.
//!
//! Before a start it looks whether the VM can have its cache, and gives the daemon the quota that the
//! domain notes. It stops a start only if the domain says required='yes'; any other failure of its
//! own must not: libvirt kills a running VM whose hook fails when libvirtd comes back. It never
//! calls libvirt, which waits for it, and prints nothing on stdout, which would be the VM's new XML.
//!
//! Usage: tmem-hook [--socket PATH] DOMAIN OPERATION ..., with the domain's XML on stdin.

use std::io::Read;
use std::os::unix::net::UnixDatagram;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;
use tmem_control as api;
use tmem_control::VarlinkClientInterface;
use tmem_domain::{Device, Domain};

/// How long a daemon that does not answer holds up a start: it answers within milliseconds, and
/// people wait for this.
const TIMEOUT: Duration = Duration::from_secs(2);

/// syslog's facility daemon, level warning.
const SYSLOG_PRIORITY: u32 = 3 * 8 + 4;

/// libvirt's operations, as far as something is done.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Operation {
    /// A VM is about to start; this may be stopped.
    Prepare,
    /// libvirtd is back and finds the VM running; failing would kill it.
    Reconnect,
}

/// Why the VM has no cache, or not the one that it should have.
struct Problem {
    required: bool,
    what: String,
}

fn main() -> ExitCode {
    let mut words: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let mut socket = PathBuf::from(api::DEFAULT_SOCKET);
    if words.len() >= 2 && words[0] == "--socket" {
        socket = PathBuf::from(&words[1]);
        words.drain(..2);
    }
    // Always: libvirt waits for somebody to take it.
    let mut xml = Vec::new();
    let read = std::io::stdin().read_to_end(&mut xml);
    let operation = match words.get(1).map(String::as_str) {
        Some("prepare") => Operation::Prepare,
        Some("reconnect") => Operation::Reconnect,
        _ => return ExitCode::SUCCESS,
    };
    let look = move || match (read, String::from_utf8(xml)) {
        (Ok(_), Ok(xml)) => check(&xml, socket),
        _ => Some(not_needed("the domain's XML cannot be read".into())),
    };
    let bug = |_| Some(not_needed("a bug: tmem-hook panicked".into()));
    let problem = catch_unwind(std::panic::AssertUnwindSafe(look)).unwrap_or_else(bug);
    let Some(Problem { required, what }) = problem else {
        return ExitCode::SUCCESS;
    };
    let domain = words.first().map_or("?", String::as_str);
    let stop = required && operation == Operation::Prepare;
    let end = match (operation, stop) {
        (_, true) => ", which the domain requires",
        (Operation::Prepare, false) => "; it starts without",
        (Operation::Reconnect, false) => "",
    };
    let message = format!("virtio-tmem: domain {domain} cannot have its cache: {what}{end}");
    // libvirt shows this if the start is stopped, and nobody else does.
    eprintln!("{message}");
    if !stop {
        log(&message);
    }
    if stop {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    }
}

fn not_needed(what: String) -> Problem {
    Problem {
        required: false,
        what,
    }
}

/// To the host's log, if there is one.
fn log(message: &str) {
    let line = format!("<{SYSLOG_PRIORITY}>tmem-hook: {message}");
    let sent = UnixDatagram::unbound().and_then(|log| {
        log.set_nonblocking(true)?;
        log.send_to(line.as_bytes(), "/dev/log")
    });
    // There is nowhere else to complain.
    drop(sent);
}

/// What is wrong with a domain that has the device.
fn check(xml: &str, socket: PathBuf) -> Option<Problem> {
    let domain = match Domain::parse(xml) {
        Ok(domain) => domain,
        Err(error) => return Some(not_needed(error.0)),
    };
    let device = domain.device.clone()?;
    let required = matches!(&domain.cache, Some(Ok(cache)) if cache.required);
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        // Nobody listens any more if it is too late.
        let _ = sender.send(prepare(&domain, &device, &socket));
    });
    let late = || format!("the daemon did not answer within {} s", TIMEOUT.as_secs());
    let result = receiver.recv_timeout(TIMEOUT);
    let what = result.unwrap_or_else(|_| Err(late())).err()?;
    Some(Problem { required, what })
}

/// Looks at the VM's memory and at what the daemon knows of it, and sets its quota.
fn prepare(domain: &Domain, device: &Device, socket: &Path) -> Result<(), String> {
    domain.memory.clone().map_err(|error| error.0)?;
    let away = |error: String| {
        format!(
            "the daemon's control socket {} does not answer: {error}",
            socket.display()
        )
    };
    let client = api::connect(socket).map_err(|error| away(error.to_string()));
    let mut client = client?;
    let vms = client
        .list()
        .call()
        .map_err(|error| away(error.to_string()))?
        .vms;
    let by_uuid = |vm: &&api::Vm| vm.uuid.as_deref() == Some(domain.uuid.as_str());
    let vm = vms.iter().find(by_uuid).ok_or_else(|| {
        format!(
            "the daemon serves no VM with the UUID {}: give it one with --vm",
            domain.uuid
        )
    })?;
    if vm.socket != device.socket {
        return Err(format!(
            "its device has the socket {}, but the daemon serves it at {}: if it is a copy of another \
             domain, run tmemctl attach",
            device.socket, vm.socket
        ));
    }
    let cache = match &domain.cache {
        None => return Ok(()),
        Some(cache) => cache.clone().map_err(|error| error.0)?,
    };
    // Who shares pages with whom is settled when the daemon makes a VM's storage.
    if cache.trust_domain != vm.trust_domain {
        let name = |name: &Option<String>| name.clone().unwrap_or_else(|| "none".into());
        return Err(format!(
            "its trust domain is {}, but the daemon has it in {}",
            name(&cache.trust_domain),
            name(&vm.trust_domain)
        ));
    }
    let quota = api::quota(cache.reserve, cache.limit, cache.weight);
    match client.set_quota(vm.name.clone(), quota).call() {
        Ok(_) => Ok(()),
        Err(error) => Err(match error.kind() {
            api::ErrorKind::BadQuota(Some(bad)) => {
                format!("the daemon refuses its quota: {}", bad.reason)
            }
            _ => away(error.to_string()),
        }),
    }
}
