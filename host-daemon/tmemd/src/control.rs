// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The control sockets: varlink interface `io.virtiotmem.Control`, whose file is in `tmem-control`.
//!
//! A thread per client, with limits on clients, message size and idle time. A read-only socket
//! answers the methods that only read. Nothing here touches a page.

use crate::outside::Outside;
use crate::pressure;
use crate::registry::{Refused, Registry};
use crate::vm::{LogLimit, Vm};
use crate::worker::Workers;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tmem_control as api;
use tmem_pool::Pool;
use varlink::{ConnectionHandler, VarlinkService};
use virtio_tmem as wire;

/// Clients of a control socket at once: people, an exporter, a bridge, and as many again.
pub const CLIENTS_MAX: usize = 16;
/// The longest message that a client may send; the longest method call has some hundred bytes.
const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// A client that says nothing for so long, or does not take its answer, is let go.
const IDLE: Duration = Duration::from_secs(60);

/// What a control socket answers from.
pub struct Service {
    varlink: VarlinkService,
    log_limit: LogLimit,
}

struct Control {
    pool: Arc<Pool>,
    registry: Arc<Registry>,
    workers: Arc<Workers>,
    /// The pool's size while the host has enough.
    configured_bytes: u64,
    /// Of its size, away from there and back.
    steps: Arc<pressure::Counters>,
    outside: Outside,
    read_only: bool,
}

impl Service {
    /// The service of one socket.
    pub fn new(
        pool: Arc<Pool>,
        registry: Arc<Registry>,
        workers: Arc<Workers>,
        (configured_bytes, steps): (u64, Arc<pressure::Counters>),
        outside: Outside,
        read_only: bool,
    ) -> Service {
        let control = Control {
            pool,
            registry,
            workers,
            configured_bytes,
            steps,
            outside,
            read_only,
        };
        let interface = api::new(Box::new(control));
        Service {
            varlink: VarlinkService::new(
                "virtio-tmem",
                "tmemd",
                env!("CARGO_PKG_VERSION"),
                "https://varlink.org/",
                vec![Box::new(interface)],
            ),
            log_limit: LogLimit::default(),
        }
    }

    /// Logs what a client did, at a bounded rate: it may do so in a loop.
    pub fn warn(&self, message: std::fmt::Arguments<'_>) {
        match self.log_limit.admit(Instant::now()) {
            None => {}
            Some(0) => tracing::warn!("control socket: {message}"),
            Some(left_out) => {
                tracing::warn!("control socket: {message} ({left_out} messages left out)");
            }
        }
    }
}

/// Serves a client to its end.
pub fn serve(service: &Service, mut stream: &UnixStream) {
    if stream
        .set_read_timeout(Some(IDLE))
        .and(stream.set_write_timeout(Some(IDLE)))
        .is_err()
    {
        return;
    }
    let mut message = Vec::new();
    let mut part = [0u8; 4096];
    loop {
        let read = match stream.read(&mut part) {
            Ok(0) | Err(_) => return,
            Ok(read) => read,
        };
        // One message a time, so that the limit holds for each; clients may send several at once.
        for piece in part[..read].split_inclusive(|byte| *byte == 0) {
            message.extend_from_slice(piece);
            if message.len() > MESSAGE_BYTES_MAX {
                service.warn(format_args!(
                    "a client sent more than {MESSAGE_BYTES_MAX} bytes and is let go"
                ));
                return;
            }
            if message.last() == Some(&0) {
                let mut answer = Vec::new();
                let result = service
                    .varlink
                    .handle(&mut message.as_slice(), &mut answer, None);
                // Also after an error: it may have been put into words.
                if stream.write_all(&answer).is_err() || result.is_err() {
                    return;
                }
                message.clear();
            }
        }
    }
}

/// varlink integers are signed.
fn int(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn load(counter: &AtomicU64) -> i64 {
    int(counter.load(Ordering::Relaxed))
}

fn quota_of(vm: &Vm) -> api::Quota {
    let stats = vm.tenant.stats();
    api::Quota {
        reserve_bytes: int(stats.reserve_bytes),
        limit_bytes: stats.limit_bytes.map(int),
        weight: i64::from(stats.weight),
    }
}

fn vm_of(vm: &Vm) -> api::Vm {
    api::Vm {
        name: vm.name().to_string(),
        uuid: vm.config.uuid.clone(),
        socket: vm.config.socket.display().to_string(),
        trust_domain: vm.config.trust_domain.clone(),
        quota: quota_of(vm),
        connected: vm.connected.load(Ordering::Acquire),
        problem: vm.problem(),
    }
}

fn vm_stats_of(vm: &Vm) -> api::VmStats {
    let stats = vm.tenant.stats();
    let counters = &vm.counters;
    api::VmStats {
        name: vm.name().to_string(),
        connected: vm.connected.load(Ordering::Acquire),
        connections: load(&counters.connections),
        connections_refused: load(&counters.connections_refused),
        queues_stopped: load(&counters.queues_stopped),
        requests: load(&counters.requests),
        requests_stale: load(&counters.requests_stale),
        requests_bad: load(&counters.requests_bad),
        drain_cut_pages: load(&counters.drain_cut_pages),
        pages: int(stats.pages),
        charged_bytes: int(stats.charged_bytes),
        entitled_bytes: int(stats.entitled_bytes),
        original_bytes: int(stats.original_bytes),
        compressed_bytes: int(stats.compressed_bytes),
        same_filled_pages: int(stats.same_filled_pages),
        shared_pages: int(stats.shared_pages),
        puts: int(stats.puts),
        puts_refused: int(stats.puts_refused),
        gets: int(stats.gets),
        hits: int(stats.hits),
        evictions: int(stats.evictions),
        flushed_pages: int(stats.flushed_pages),
        hash_mismatches: int(stats.hash_mismatches),
        driver: vm.report().map(|report| report_of(&report)),
    }
}

/// The guest wrote this: text is made harmless for terminals and logs.
fn report_of(report: &wire::Report) -> api::DriverReport {
    let version = report.version.get();
    let printable = |byte: &u8| {
        if byte.is_ascii_graphic() {
            char::from(*byte)
        } else {
            '?'
        }
    };
    api::DriverReport {
        version: format!(
            "{}.{}.{}",
            version >> 16,
            (version >> 8) & 0xff,
            version & 0xff
        ),
        state: match report.state.get() {
            wire::R_OFF => "off",
            wire::R_ON => "on",
            wire::R_OFFLINE => "offline",
            wire::R_TRIPPED => "tripped",
            wire::R_POISONED => "poisoned",
            _ => "unknown",
        }
        .into(),
        kernel: report
            .kernel
            .iter()
            .take_while(|byte| **byte != 0)
            .map(printable)
            .collect(),
        hooks: report.hooks.get() as i64,
        memory_bytes: int(report.memory_bytes.get()),
        index_pages: int(report.index_pages.get()),
        puts: int(report.puts.get()),
        puts_dropped: int(report.puts_dropped.get()),
        gets: int(report.gets.get()),
        hits: int(report.hits.get()),
        late: int(report.late.get()),
        mismatches: int(report.mismatches.get()),
        invalidations: int(report.invalidations.get()),
    }
}

impl Control {
    fn pool_stats(&self) -> api::PoolStats {
        let stats = self.pool.stats();
        api::PoolStats {
            size_bytes: int(stats.size_bytes),
            configured_bytes: int(self.configured_bytes),
            host_shrinks: load(&self.steps.shrinks),
            host_grows: load(&self.steps.grows),
            held_bytes: int(stats.held_bytes),
            payload_bytes: int(stats.payload_bytes),
            metadata_bytes: int(stats.metadata_bytes),
            tenants: int(stats.tenants),
            pages: int(stats.pages),
            original_bytes: int(stats.original_bytes),
            same_filled_pages: int(stats.same_filled_pages),
            shared_pages: int(stats.shared_pages),
            blobs: int(stats.blobs),
            evictions: int(stats.evictions),
        }
    }

    fn daemon_stats(&self, vms: &[Arc<Vm>]) -> api::DaemonStats {
        let connected = vms
            .iter()
            .filter(|vm| vm.connected.load(Ordering::Acquire))
            .count();
        api::DaemonStats {
            version: env!("CARGO_PKG_VERSION").into(),
            pid: i64::from(std::process::id()),
            uptime_seconds: int(self.outside.uptime().as_secs()),
            workers: self.workers.count() as i64,
            vms: vms.len() as i64,
            vms_connected: connected as i64,
        }
    }
}

impl api::VarlinkInterface for Control {
    fn list(&self, call: &mut dyn api::Call_List) -> varlink::Result<()> {
        call.reply(self.registry.vms().iter().map(|vm| vm_of(vm)).collect())
    }

    fn stats(&self, call: &mut dyn api::Call_Stats, name: Option<String>) -> varlink::Result<()> {
        let all = self.registry.vms();
        let vms = match &name {
            None => all.iter().map(|vm| vm_stats_of(vm)).collect(),
            Some(wanted) => match all.iter().find(|vm| *vm.name() == **wanted) {
                Some(vm) => vec![vm_stats_of(vm)],
                None => return call.reply_no_such_vm(wanted.clone()),
            },
        };
        call.reply(self.daemon_stats(&all), self.pool_stats(), vms)
    }

    fn set_quota(
        &self,
        call: &mut dyn api::Call_SetQuota,
        name: String,
        quota: api::Quota,
    ) -> varlink::Result<()> {
        if self.read_only {
            return call.reply_read_only_socket("SetQuota".into());
        }
        match self.registry.set_quota(&name, &quota) {
            None => call.reply_no_such_vm(name),
            Some(Ok(())) => {
                tracing::info!(vm = name, ?quota, "quota changed");
                call.reply()
            }
            Some(Err(why)) => call.reply_bad_quota(name, why.to_string()),
        }
    }

    fn add_vm(&self, call: &mut dyn api::Call_AddVm, vm: api::VmSpec) -> varlink::Result<()> {
        if self.read_only {
            return call.reply_read_only_socket("AddVm".into());
        }
        let name = vm.name.clone();
        match self.registry.add(vm) {
            Ok(added) => call.reply(added),
            Err(Refused::Quota(reason)) => call.reply_bad_quota(name, reason),
            Err(Refused::Vm(reason)) => call.reply_bad_vm(name, reason),
        }
    }

    fn remove_vm(&self, call: &mut dyn api::Call_RemoveVm, uuid: String) -> varlink::Result<()> {
        if self.read_only {
            return call.reply_read_only_socket("RemoveVm".into());
        }
        let removed = self.registry.remove(&uuid);
        call.reply(removed)
    }

    fn set_problem(
        &self,
        call: &mut dyn api::Call_SetProblem,
        uuid: String,
        problem: Option<String>,
    ) -> varlink::Result<()> {
        if self.read_only {
            return call.reply_read_only_socket("SetProblem".into());
        }
        match self.registry.set_problem(&uuid, problem) {
            true => call.reply(),
            false => call.reply_no_such_vm(uuid),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    /// It may reach a terminal, a log and a metric.
    #[test]
    fn what_a_guest_calls_its_kernel_is_made_harmless() {
        let mut report = wire::Report::new_zeroed();
        let text = b"6.12\x1b]0;x\x07\n\xc2\x9b1m {}\"\0behind";
        report.kernel[..text.len()].copy_from_slice(text);
        assert_eq!(report_of(&report).kernel, "6.12?]0;x????1m?{}\"");
        report.kernel = [0xff; 64];
        assert_eq!(report_of(&report).kernel, "?".repeat(64), "without an end");
    }
}
