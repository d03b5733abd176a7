// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Commands that change the state of VMs and of the pool, and the commands `pool` and `version`.

use crate::client::{connect, refused, stats};
use crate::exit::Failure;
use crate::output::Output;
use crate::reach::Reach;
use crate::table::{Sizes, row, size};
use clap::Args;
use serde_json::json;
use tmem_control as api;
use tmem_control::VarlinkClientInterface;

/// VMs to which a command applies.
#[derive(Args, Clone)]
pub struct VmsArguments {
    /// Names of VMs, as in tmemctl list
    #[arg(required_unless_present = "all")]
    vms: Vec<String>,
    /// All VMs that the daemon serves
    #[arg(long, conflicts_with = "vms")]
    all: bool,
}

impl VmsArguments {
    fn names(&self, reach: &Reach) -> Result<Vec<String>, Failure> {
        if !self.all {
            return Ok(self.vms.clone());
        }
        let reply = connect(&reach.socket)?.list_vms().call();
        let reply = reply.map_err(|error| refused(&reach.socket, &error))?;
        Ok(reply.vms.into_iter().map(|vm| vm.name).collect())
    }
}

/// Runs `act` for each VM that the user named, or with --all for each VM of the daemon. The loop
/// goes on after a VM that does not exist, and ends at any other error. With --all, a VM that does
/// not exist is ignored, because it was removed after the daemon listed it. Otherwise it is a
/// failure. The command reports a failure after the results of the other VMs.
fn each(
    reach: &Reach,
    vms: &VmsArguments,
    act: impl Fn(&mut api::VarlinkClient, &str) -> Result<(String, serde_json::Value), api::Error>,
) -> Result<Output, Failure> {
    let (mut text, mut done, mut failure) = (String::new(), Vec::new(), None);
    let mut client = connect(&reach.socket)?;
    for name in vms.names(reach)? {
        match act(&mut client, &name) {
            Ok((what, json)) => {
                text += &format!("{name}: {what}\n");
                done.push(json);
            }
            Err(error) => {
                let not_there = matches!(error.kind(), api::ErrorKind::NoSuchVm(_));
                if !(not_there && vms.all) {
                    failure.get_or_insert_with(|| refused(&reach.socket, &error));
                }
                if !not_there {
                    break;
                }
            }
        }
    }
    let any = !done.is_empty();
    let json = json!({ "vms": done });
    let output = Output { text, json };
    match failure {
        None => Ok(output),
        Some(failure) => {
            if any {
                output.print(reach.json)?;
            }
            Err(failure)
        }
    }
}

/// Makes the daemon drop the pages of VMs.
pub fn flush(reach: &Reach, vms: &VmsArguments) -> Result<Output, Failure> {
    each(reach, vms, |client, name| {
        let pages = client.flush_vm(name.into()).call()?.pages;
        let json = json!({ "name": name, "pages": pages });
        Ok((format!("{pages} pages dropped"), json))
    })
}

/// Freezes or thaws VMs. The daemon refuses the puts of a frozen VM.
pub fn set_frozen(reach: &Reach, vms: &VmsArguments, frozen: bool) -> Result<Output, Failure> {
    each(reach, vms, |client, name| {
        let changed = match frozen {
            true => client.freeze_vm(name.into()).call()?.changed,
            false => client.thaw_vm(name.into()).call()?.changed,
        };
        let is = if frozen { "frozen" } else { "thawed" };
        let already = if changed { "" } else { " already" };
        let json = json!({ "name": name, "frozen": frozen, "changed": changed });
        Ok((format!("{is}{already}"), json))
    })
}

/// Options of `pool`.
#[derive(Args, Clone)]
pub struct PoolArguments {
    /// Set the size, as in 8GiB, until the daemon ends
    #[arg(long, value_name = "SIZE", value_parser = api::size::parse)]
    size: Option<u64>,
    /// Print sizes in bytes
    #[arg(short, long)]
    bytes: bool,
}

/// Sets the size of the pool if the arguments contain one, and prints the memory of the pool.
pub fn pool(reach: &Reach, arguments: &PoolArguments) -> Result<Output, Failure> {
    let mut client = connect(&reach.socket)?;
    let failed = |error| refused(&reach.socket, &error);
    let mut text = String::new();
    if let Some(bytes) = arguments.size {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        client.set_pool_size(bytes).call().map_err(failed)?;
        text = format!(
            "The pool has a size of {} until the daemon ends.\n",
            size(bytes)
        );
    }
    let pool = client.get_stats(None).call().map_err(failed)?.pool;
    let memory = client.get_freeable().call().map_err(failed)?;
    if memory.held_bytes > pool.configured_bytes {
        text += "The pool still holds more than its new size, and releases the excess now.\n";
    }
    if pool.reserved_bytes > pool.configured_bytes {
        text += "The VMs' reserves exceed the size of the pool and scale down to it.\n";
    }
    if pool.size_bytes < pool.configured_bytes {
        text += "The host is short of memory, so the current size is smaller.\n";
    }
    let sizes = Sizes::new(arguments.bytes);
    let mut json = json!({});
    for (name, bytes) in [
        ("configured", pool.configured_bytes),
        ("size", pool.size_bytes),
        ("reserved", pool.reserved_bytes),
        ("held", memory.held_bytes),
        ("freeable", memory.freeable_bytes),
        ("beyond_reserves", memory.beyond_reserves_bytes),
        ("unused", memory.unused_bytes),
    ] {
        text += &row(name, &sizes.text(bytes));
        json[format!("{name}_bytes")] = bytes.into();
    }
    Ok(Output { text, json })
}

/// Prints the versions of tmemctl and of the daemon. A daemon that cannot be reached is reported,
/// and is not a failure.
pub fn version(reach: &Reach) -> Result<Output, Failure> {
    let own = env!("CARGO_PKG_VERSION");
    let daemon = stats(reach, None).map(|reply| reply.daemon.version);
    let text = match &daemon {
        Ok(version) => format!("tmemctl {own}\ntmemd   {version}\n"),
        Err(Failure(why, _)) => format!("tmemctl {own}\ntmemd   - ({why})\n"),
    };
    let json = json!({ "tmemctl": own, "tmemd": daemon.ok() });
    Ok(Output { text, json })
}
