// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tmemctl quota`: gets or sets a VM's quota.
//!
//! The quota of a libvirt domain is stored in libvirt's metadata (`libvirt.rs`). The quota of a VM
//! that the daemon got from `--vm` or from a `[[vm]]` table exists only in the daemon. The command
//! asks libvirt first. If it changed a domain's quota only in the daemon, the bridge (tmem-libvirt)
//! would revert the change.

use crate::args::QuotaArguments;
use crate::client::{connect, refused};
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::show::{quota_json, quota_text};
use std::path::Path;
use tmem_control as api;
use tmem_control::VarlinkClientInterface;
use tmem_libvirt::domain::Cache;

#[cfg(feature = "libvirt")]
use crate::libvirt;

/// Text that follows libvirt's error message if neither libvirt nor the daemon has a VM of that
/// name.
#[cfg(feature = "libvirt")]
const NOR_THE_DAEMON: &str = "; and the daemon has no VM of that name: see tmemctl list";

/// Gets or sets the quota of a VM, in libvirt if the VM is a libvirt domain, otherwise in the
/// daemon.
#[cfg(feature = "libvirt")]
pub fn run(arguments: &QuotaArguments, socket: &Path) -> Result<Output, Failure> {
    let target = arguments.target();
    let vm = || find_vm(socket, &arguments.vm);
    let connection = match target.connect(arguments.quota.is_empty()) {
        Ok(connection) => connection,
        // A VM without a UUID is not a libvirt domain, so its quota can be changed although libvirt
        // cannot be reached.
        Err(Failure(what, code)) => match vm() {
            Ok(Some(vm)) if vm.uuid.is_none() => return daemon_quota(arguments, vm, socket),
            Ok(None) => return Err(Failure(what + NOR_THE_DAEMON, code)),
            _ => return Err(Failure(what, code)),
        },
    };
    if let Some(domain) = target.find(&connection, &arguments.vm)? {
        return libvirt::quota(arguments, &target, &domain, socket);
    }
    let Failure(no_domain, code) = target.no_domain();
    let vm = vm().map_err(|Failure(why, _)| Failure(format!("{no_domain}; {why}"), code))?;
    let Some(vm) = vm else {
        return Err(Failure(no_domain + NOR_THE_DAEMON, code));
    };
    // libvirt has no domain of the name that the user gave. But the daemon may know a domain under
    // another name than libvirt, so the domain is looked up by its UUID.
    let domain = vm.uuid.as_ref().map(|uuid| target.find(&connection, uuid));
    match domain.transpose()?.flatten() {
        Some(domain) => libvirt::quota(arguments, &target, &domain, socket),
        None => daemon_quota(arguments, vm, socket),
    }
}

/// Gets or sets a VM's quota in the daemon. This variant is built without support for libvirt.
#[cfg(not(feature = "libvirt"))]
pub fn run(arguments: &QuotaArguments, socket: &Path) -> Result<Output, Failure> {
    match find_vm(socket, &arguments.vm)? {
        Some(vm) => daemon_quota(arguments, vm, socket),
        None => Err(Failure(
            format!("the daemon has no VM {:?}: see tmemctl list", arguments.vm),
            Code::NotFound,
        )),
    }
}

/// Returns the VM with that name from the daemon's list; None if the daemon has no such VM.
fn find_vm(socket: &Path, name: &str) -> Result<Option<api::Vm>, Failure> {
    let reply = connect(socket)?.list_vms().call();
    let vms = reply.map_err(|error| refused(socket, &error))?.vms;
    Ok(vms.into_iter().find(|vm| vm.name == name))
}

/// Gets or sets the quota of a VM that is not a libvirt domain.
fn daemon_quota(arguments: &QuotaArguments, vm: api::Vm, socket: &Path) -> Result<Output, Failure> {
    let name = vm.name;
    let failure = |what: &str| Failure(format!("VM {name}: {what}"), Code::Refused);
    if arguments.config {
        return Err(failure(
            "it is not a libvirt domain, so it has no next start to change. Leave out --config. \
             To keep a change, write it into the VM's [[vm]] table of the daemon's file, or into its --vm option",
        ));
    }
    let bytes = |number: i64| u64::try_from(number).unwrap_or(0);
    let mut cache = Cache {
        limit: vm.quota.limit_bytes.map(bytes),
        reserve: Some(bytes(vm.quota.reserve_bytes)),
        weight: u32::try_from(vm.quota.weight).ok(),
        trust_domain: vm.trust_domain,
        required: false,
    };
    if arguments.quota.is_empty() {
        let mut json = serde_json::json!({ "vm": name });
        quota_json(&mut json, &cache);
        let text = quota_text(&cache, arguments.bytes);
        return Ok(Output { text, json });
    }
    arguments.quota.apply(&mut cache);
    cache.check().map_err(|error| failure(&error.0))?;
    let quota = api::quota(cache.reserve, cache.limit, cache.weight);
    let mut client = connect(socket)?;
    let set = client.set_quota(name.clone(), quota).call();
    set.map_err(|error| match error.kind() {
        api::ErrorKind::BadQuota(Some(bad)) => failure(&bad.reason),
        _ => refused(socket, &error),
    })?;
    let lasts = match vm.uuid {
        None => {
            "until the daemon ends. To keep it, write it into the VM's [[vm]] table of the daemon's file, or into its --vm option"
        }
        // The daemon has a UUID for a VM that was added with AddVm, or whose `[[vm]]` table sets
        // one.
        Some(_) => {
            "until the VM is removed, if it was added over the control socket. If a [[vm]] or --vm configures \
             the VM, the quota applies until the daemon ends. To keep it, change the [[vm]] table or the --vm option"
        }
    };
    let text = format!("VM {name}: this quota applies {lasts}\n");
    let json = serde_json::json!({ "vm": name, "text": text });
    Ok(Output { text, json })
}
