// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Options that several commands have: quotas, and domains of libvirt.

use clap::Args;
use tmem_libvirt::domain::{Cache, WEIGHT_MAX, parse_size};

/// A domain, and the URI of the libvirt that has it.
#[cfg(feature = "libvirt")]
#[derive(Args, Clone)]
pub struct Target {
    /// Name or UUID of the domain
    pub domain: String,
    /// URI of the libvirt that has the domain
    #[arg(short, long, value_name = "URI", default_value = "qemu:///system")]
    pub connect: String,
}

#[cfg(feature = "libvirt")]
impl Target {
    /// Creates the target with the name or UUID `domain` in the libvirt at `connect`.
    pub fn new(domain: &str, connect: &str) -> Target {
        Target {
            domain: domain.into(),
            connect: connect.into(),
        }
    }

    /// Returns the name of the service that a command for this domain calls, for error messages.
    pub fn asks(&self) -> String {
        format!("libvirt at {}", self.connect)
    }
}

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
    /// Returns true if the user gave none of the options.
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
