// SPDX-License-Identifier: Apache-2.0 OR MIT
//! `tmemctl quota`: gets or sets a VM's quota.
//!
//! The quota of a libvirt domain is stored in libvirt's metadata (`libvirt.rs`). The quota of a VM
//! that the daemon got from `--vm` or from a `[[vm]]` table exists only in the daemon. The command
//! asks libvirt first. If it changed a domain's quota only in the daemon, the bridge (tmem-libvirt)
//! would revert the change.

use crate::Output;
use crate::client::{connect, refused};
use crate::exit::{Code, Failure};
use clap::Args;
use std::path::Path;
use tmem_control as api;
use tmem_control::VarlinkClientInterface;
use tmem_libvirt::domain::{Cache, WEIGHT_MAX, parse_size, write_size};

#[cfg(feature = "libvirt")]
use crate::libvirt::{self, Target};

/// Text that follows libvirt's error message if neither libvirt nor the daemon has a VM of that
/// name.
#[cfg(feature = "libvirt")]
const NOR_THE_DAEMON: &str = "; and the daemon has no VM of that name: see tmemctl list";

/// Quota options; an option that is not given changes nothing.
#[derive(Args, Clone)]
pub struct QuotaValues {
    /// Maximum charge of the VM, as in 2GiB; none: only the pool limits the VM
    #[arg(long, value_name = "SIZE|none", value_parser = size_or_none)]
    limit: Option<SizeOrNone>,
    /// Bytes of the pool to which the VM is entitled before all VMs share the rest by weight
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    reserve: Option<u64>,
    /// Weight of the VM in the part of the pool that no VM has reserved
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..=i64::from(WEIGHT_MAX)))]
    weight: Option<u32>,
}

#[derive(Clone, Copy)]
struct SizeOrNone(Option<u64>);

fn size_or_none(text: &str) -> Result<SizeOrNone, String> {
    match text {
        "none" => Ok(SizeOrNone(None)),
        size => parse_size(size).map(|size| SizeOrNone(Some(size))),
    }
}

impl QuotaValues {
    pub fn is_empty(&self) -> bool {
        self.limit.is_none() && self.reserve.is_none() && self.weight.is_none()
    }

    /// Changes those values of a quota for which the user gave an option.
    pub fn apply(&self, cache: &mut Cache) {
        if let Some(SizeOrNone(limit)) = self.limit {
            cache.limit = limit;
        }
        cache.reserve = self.reserve.or(cache.reserve);
        cache.weight = self.weight.or(cache.weight);
    }
}

/// Options of quota.
#[derive(Args, Clone)]
pub struct QuotaArguments {
    /// Name or UUID of a libvirt domain, or the name of another VM as tmemctl list has it
    pub vm: String,
    /// URI of the libvirt to ask
    #[cfg(feature = "libvirt")]
    #[arg(short, long, value_name = "URI", default_value = "qemu:///system")]
    connect: String,
    #[command(flatten)]
    pub quota: QuotaValues,
    /// Print or change the quota of the running VM
    #[arg(long)]
    pub live: bool,
    /// Print or change the quota of a domain's next start
    #[arg(long)]
    pub config: bool,
    /// Print or change the quota of the VM if it runs, otherwise of its next start (the default)
    #[arg(long, conflicts_with_all = ["live", "config"])]
    current: bool,
    /// Print sizes in bytes
    #[arg(short, long)]
    pub bytes: bool,
}

#[cfg(feature = "libvirt")]
impl QuotaArguments {
    /// Returns the libvirt and the name or UUID under which that libvirt may have the VM.
    pub fn target(&self) -> Target {
        Target::new(&self.vm, &self.connect)
    }
}

/// Gets or sets the quota of a VM, in libvirt if the VM is a libvirt domain, otherwise in the
/// daemon.
#[cfg(feature = "libvirt")]
pub fn run(arguments: &QuotaArguments, socket: &Path) -> Result<Output, Failure> {
    let target = arguments.target();
    let vm = || served(socket, &arguments.vm);
    let connection = match target.connect(arguments.quota.is_empty()) {
        Ok(connection) => connection,
        // A VM without a UUID is not a libvirt domain, so its quota can be changed although libvirt
        // cannot be reached.
        Err(Failure(what, code)) => match vm() {
            Ok(Some(vm)) if vm.uuid.is_none() => return of_daemon(arguments, vm, socket),
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
        None => of_daemon(arguments, vm, socket),
    }
}

/// Gets or sets a VM's quota in the daemon. This variant is built without support for libvirt.
#[cfg(not(feature = "libvirt"))]
pub fn run(arguments: &QuotaArguments, socket: &Path) -> Result<Output, Failure> {
    match served(socket, &arguments.vm)? {
        Some(vm) => of_daemon(arguments, vm, socket),
        None => Err(Failure(
            format!("the daemon has no VM {:?}: see tmemctl list", arguments.vm),
            Code::NotFound,
        )),
    }
}

/// Returns the VM with that name from the daemon's list; None if the daemon has no such VM.
fn served(socket: &Path, name: &str) -> Result<Option<api::Vm>, Failure> {
    let reply = connect(socket)?.list_vms().call();
    let vms = reply.map_err(|error| refused(socket, &error))?.vms;
    Ok(vms.into_iter().find(|vm| vm.name == name))
}

/// Gets or sets the quota of a VM that is not a libvirt domain.
fn of_daemon(arguments: &QuotaArguments, vm: api::Vm, socket: &Path) -> Result<Output, Failure> {
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
        let text = print(&cache, arguments.bytes);
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

/// Adds the fields of a quota to a JSON object.
pub fn quota_json(json: &mut serde_json::Value, cache: &Cache) {
    json["limit_bytes"] = cache.limit.into();
    json["reserve_bytes"] = cache.reserve.unwrap_or(0).into();
    json["weight"] = cache.weight.unwrap_or(api::WEIGHT_DEFAULT).into();
    json["trust_domain"] = cache.trust_domain.clone().into();
}

/// Formats a quota as text, with sizes in bytes or in the largest unit that needs no fraction.
pub fn print(cache: &Cache, in_bytes: bool) -> String {
    let size = |bytes: u64| {
        if in_bytes {
            return bytes.to_string();
        }
        let (number, unit) = write_size(bytes);
        format!("{number} {unit}")
    };
    let rows = [
        ("limit", cache.limit.map_or("unlimited".into(), size)),
        ("reserve", size(cache.reserve.unwrap_or(0))),
        (
            "weight",
            cache.weight.unwrap_or(api::WEIGHT_DEFAULT).to_string(),
        ),
        (
            "trust_domain",
            cache.trust_domain.clone().unwrap_or_else(|| "-".into()),
        ),
    ];
    rows.iter().map(|(key, value)| row(key, value)).collect()
}

/// Formats one line of the text in which a quota is printed.
pub fn row(key: &str, value: &str) -> String {
    format!("{key:<15}: {value}\n")
}
