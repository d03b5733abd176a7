// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Applies a new configuration to the running daemon.
//!
//! Out of scope: reading the configuration file, see `config/file.rs`.

use crate::config::settings::{Config, ConfigError, VmConfig, reserve_text};
use crate::control::sources::Sources;
use crate::daemon::lifecycle::Daemon;
use crate::events::bus::EventKind;
use crate::vm::registry::Refused;
use std::path::Path;
use std::sync::PoisonError;

impl Daemon {
    /// Applies the settings that can change while the daemon runs: the size of the pool, the memory
    /// to leave available on the host, the rate limit, the quotas of configured VMs, and new VMs. No
    /// VM is interrupted. Returns the names of changed settings that take effect only at the daemon's
    /// next start.
    ///
    /// # Errors
    /// The configuration is invalid. In this case, nothing changes.
    pub fn reload(&self, new: Config) -> Result<Vec<String>, ConfigError> {
        new.check()?;
        let Some(control) = &self.control else {
            return Ok(Vec::new());
        };
        let mut config = self.config.lock().unwrap_or_else(PoisonError::into_inner);
        let (new_vms, mut later) = new_vms(&config, &new);
        // Only this step of a reload can fail, and a failure changes nothing. The reload therefore
        // takes effect completely or not at all.
        let refused = set_size_and_vms(control, &config, &new, &new_vms)?;
        let is_added = |vm: &VmConfig| refused.iter().all(|(name, _)| *name != vm.name);
        config.vms.extend(new_vms.into_iter().filter(is_added));
        later.extend(refused.iter().map(|(name, why)| new_vm_text(name, why)));
        config.pool_size_bytes = new.pool_size_bytes;
        control
            .registry
            .set_pages_per_second(new.vm_pages_per_second);
        config.vm_pages_per_second = new.vm_pages_per_second;
        later.extend(vm_changes(&mut config, &new));
        match config.pressure.is_some() {
            true => control.size.set_free_min(free_min_bytes(&new)),
            // No thread watches the host's memory, because the old configuration needs none. Only
            // the start creates that thread, so the new setting takes effect at the next start.
            false if new.pressure.is_some() => later.push("host_free_min".into()),
            false => {}
        }
        later.extend(settings_for_next_start(&config, &new));
        let text = format_args!("the configuration was reloaded");
        control.events.emit(EventKind::Reloaded, None, text);
        Ok(later)
    }
}

/// Returns the new VMs of the configuration with the numbers of their owners. If an owner must be
/// looked up, the VM can only be added at the next start. Returns a text for each such VM.
fn new_vms(config: &Config, new: &Config) -> (Vec<VmConfig>, Vec<String>) {
    let (mut vms, mut later) = (Vec::new(), Vec::new());
    let is_new = |vm: &&VmConfig| config.vms.iter().all(|old| old.name != vm.name);
    for vm in new.vms.iter().filter(is_new) {
        let mut vm = vm.clone();
        let known = config.vms.iter().filter_map(|old| old.owner.as_ref());
        let owner = vm.owner.as_mut();
        if let Some(owner) = owner
            && !owner.find_in(known)
        {
            let what = format!("the user {} can be looked up only then", owner.name);
            later.push(new_vm_text(&vm.name, what));
            continue;
        }
        vms.push(vm);
    }
    (vms, later)
}

/// Returns the text about a new VM that is added only at the next start.
fn new_vm_text(name: &str, reason: impl std::fmt::Display) -> String {
    format!("new VM {name} ({reason})")
}

/// Sets the size of the pool and the quotas of configured VMs, and adds new VMs. All reserves must
/// fit into the pool; otherwise nothing changes. Returns those new VMs that cannot be added now, by
/// name, each with the reason.
///
/// # Errors
/// The size exceeds the memory that the host had when the daemon started, or a reserve does not
/// fit into the pool.
fn set_size_and_vms(
    control: &Sources,
    config: &Config,
    new: &Config,
    new_vms: &[VmConfig],
) -> Result<Vec<(String, Refused)>, ConfigError> {
    let size_max_bytes = control.engine.size_max_bytes();
    let size_bytes = new.pool_size_bytes;
    if size_bytes > size_max_bytes {
        return Err(ConfigError(format!(
            "a pool of {size_bytes} bytes exceeds the host's memory at the daemon's start, \
             {size_max_bytes} bytes"
        )));
    }
    let configured_bytes = (size_bytes != config.pool_size_bytes).then_some(size_bytes);
    let differs = |vm: &&VmConfig| {
        let mut known = config.vms.iter();
        known.any(|old| old.name == vm.name && old.quota != vm.quota)
    };
    let changed = new.vms.iter().filter(differs);
    let quotas: Vec<_> = changed.map(|vm| (vm.name.as_str(), vm.quota)).collect();
    let set = control
        .registry
        .configure(&control.size, configured_bytes, &quotas, new_vms);
    set.map_err(|error| {
        let what = reserve_text(error.reserve_bytes, error.available_bytes);
        ConfigError(format!("VM {:?}: {what}", error.tenant))
    })
}

/// Copies the new quotas of VMs into `config`. Returns texts that name VMs whose other settings
/// have changed; these changes take effect only at the next start.
fn vm_changes(config: &mut Config, new: &Config) -> Vec<String> {
    let mut later = Vec::new();
    for vm in &new.vms {
        if let Some(old) = config.vms.iter_mut().find(|old| old.name == vm.name) {
            old.quota = vm.quota;
            if old != vm {
                later.push(format!(
                    "memory_max, socket, owner, UUID or trust domain of VM {}",
                    vm.name
                ));
            }
        }
    }
    let removed = config
        .vms
        .iter()
        .filter(|old| new.vms.iter().all(|vm| vm.name != old.name));
    later.extend(removed.map(|old| format!("removed VM {}", old.name)));
    later
}

fn free_min_bytes(config: &Config) -> u64 {
    let pressure = config.pressure.as_ref();
    pressure.map_or(0, |pressure| pressure.host_free_min_bytes)
}

fn stalls(config: &Config) -> Option<&Path> {
    config.pressure.as_ref()?.stalls.as_deref()
}

/// Returns the names of changed settings that take effect only at the daemon's next start.
fn settings_for_next_start(old: &Config, new: &Config) -> Vec<String> {
    let changes = [
        ("memory_pressure", stalls(old) != stalls(new)),
        ("workers", old.workers != new.workers),
        (
            "background_threads",
            old.background_threads != new.background_threads,
        ),
        ("event_loop or poll_max_us", old.waiting != new.waiting),
        ("control", old.control != new.control),
        ("control_group", old.control_group != new.control_group),
        (
            "control_read_only",
            old.control_read_only != new.control_read_only,
        ),
        (
            "control_read_only_group",
            old.control_read_only_group != new.control_read_only_group,
        ),
        ("run_directory", old.run_directory != new.run_directory),
    ];
    let changed = changes.into_iter().filter(|(_, differs)| *differs);
    changed.map(|(name, _)| name.to_owned()).collect()
}
