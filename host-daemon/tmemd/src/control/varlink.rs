// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The control sockets of the daemon. They offer the varlink interface `io.virtiotmem.Control`,
//! which is defined in `tmem-control`.
//!
//! Each client has a thread. The number of clients, the size of a message and the idle time are
//! limited. A read-only socket answers only methods that change nothing. No code in this file
//! accesses the contents of a page.

use crate::config::settings::POOL_BYTES_MIN;
use crate::control::sources::{Figures, Sources};
use crate::control::statistics;
use crate::events::bus::EventKind;
use crate::memory::budget::POOL_BYTES_MAX;
use crate::util::log_limit::LogLimit;
use crate::util::request_rate::RequestRate;
use crate::vm::registry::Refused;
use crate::vm::state::Vm;
use rustix::event::{PollFd, PollFlags, Timespec};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tmem_control as api;
use varlink::{ConnectionHandler, VarlinkService};

/// Maximum number of clients of one control socket. It is twice the number of clients that
/// operators, an exporter and a bridge need together.
pub const CLIENTS_MAX: usize = 16;
/// Longest message of a client in bytes. The longest valid call has a few hundred bytes.
const MESSAGE_BYTES_MAX: usize = 64 << 10;
/// Idle time after which a client is disconnected. A client that takes longer than this time to
/// read its answer is disconnected, too.
const IDLE: Duration = Duration::from_secs(60);

/// Interval at which the daemon sends events that it delayed because a VM caused too many.
const CATCH_UP: Timespec = Timespec {
    tv_sec: 1,
    tv_nsec: 0,
};

/// Maximum number of calls per second that each client of the read-only socket may make. After a
/// pause, a client may make this number of calls at once. The thread of the client delays further
/// calls. An exporter and tmemctl make only a few calls a second.
const READ_ONLY_CALLS_PER_SECOND: u64 = 50;

/// Pause after which a delayed call is checked against the rate limit again.
const CALL_WAIT: Duration = Duration::from_millis(5);

/// Varlink interface of one control socket. It offers all methods, or only those that change
/// nothing.
struct SocketInterface {
    control: Arc<Sources>,
    read_only: bool,
}

/// Varlink service of one control socket.
pub struct Service {
    varlink: VarlinkService,
    control: Arc<Sources>,
    read_only: bool,
    log_limit: LogLimit,
}

impl Service {
    /// Creates the service of a control socket. With `read_only`, methods that change something are
    /// refused.
    pub fn new(control: Arc<Sources>, read_only: bool) -> Service {
        let interface = SocketInterface {
            control: control.clone(),
            read_only,
        };
        let interface = api::new(Box::new(interface));
        Service {
            control,
            read_only,
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

    /// Logs a warning about a client. The rate is limited, because the client may repeat its action
    /// in a loop.
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

/// Returns true if a client's message subscribes to events. The varlink library cannot write events
/// as they occur, so this file handles subscriptions itself.
fn is_subscription(message: &[u8]) -> bool {
    let message = message.strip_suffix(&[0]).unwrap_or(message);
    let call: serde_json::Value = serde_json::from_slice(message).unwrap_or_default();
    call["method"] == format!("{}.SubscribeEvents", api::INTERFACE) && call["more"] == true
}

/// Sends events to a subscriber until it disconnects, sends another message, or stops reading.
fn monitor(control: &Sources, mut stream: &UnixStream) -> std::io::Result<()> {
    // The threads of subscribers send events that a VM's rate limit delayed. Without a subscriber,
    // no program needs these events.
    let catch_up = || {
        for vm in control.registry.vms() {
            vm.catch_up(Instant::now());
        }
    };
    // Delayed events are sent before the client subscribes. The client therefore receives no event
    // from the time before its subscription.
    catch_up();
    let subscription = control.events.subscribe()?;
    loop {
        catch_up();
        let mut fds = [
            PollFd::new(stream, PollFlags::IN),
            PollFd::new(subscription.ready(), PollFlags::IN),
        ];
        match rustix::event::poll(&mut fds, Some(&CATCH_UP)) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        if !fds[0].revents().is_empty() {
            return Ok(());
        }
        for event in subscription.take() {
            let answer = serde_json::json!({ "parameters": { "event": event }, "continues": true });
            let mut answer = serde_json::to_vec(&answer)?;
            answer.push(0);
            stream.write_all(&answer)?;
        }
    }
}

/// Answers the calls of a control client until its connection ends.
pub fn serve(service: &Service, mut stream: &UnixStream) {
    if stream
        .set_read_timeout(Some(IDLE))
        .and(stream.set_write_timeout(Some(IDLE)))
        .is_err()
    {
        return;
    }
    let calls = Arc::new(AtomicU64::new(match service.read_only {
        true => READ_ONLY_CALLS_PER_SECOND,
        false => 0,
    }));
    let (rate, begun) = (RequestRate::new(&calls), Instant::now());
    let mut message = Vec::new();
    let mut part = [0u8; 4096];
    loop {
        let read = match stream.read(&mut part) {
            Ok(0) | Err(_) => return,
            Ok(read) => read,
        };
        // A client may send several messages at once. The loop handles them one by one, so that the
        // limits on size and rate apply to each message.
        for piece in part[..read].split_inclusive(|byte| *byte == 0) {
            message.extend_from_slice(piece);
            if message.len() > MESSAGE_BYTES_MAX {
                service.warn(format_args!(
                    "a client sent a message of more than {MESSAGE_BYTES_MAX} bytes and is \
                     disconnected"
                ));
                return;
            }
            if message.last() == Some(&0) {
                while !rate.admit(begun.elapsed().as_nanos() as u64, 1) {
                    std::thread::sleep(CALL_WAIT);
                }
                if is_subscription(&message) {
                    // If monitor() fails, the client has disconnected or the system lacks a
                    // descriptor. The connection ends in both cases.
                    let _ = monitor(&service.control, stream);
                    return;
                }
                let mut answer = Vec::new();
                let result = service
                    .varlink
                    .handle(&mut message.as_slice(), &mut answer, None);
                // The answer may be an error reply even if `handle` failed. Therefore the answer is
                // always written before the result is checked.
                if stream.write_all(&answer).is_err() || result.is_err() {
                    return;
                }
                message.clear();
            }
        }
    }
}

impl api::VarlinkInterface for SocketInterface {
    fn list_vms(&self, call: &mut dyn api::Call_ListVms) -> varlink::Result<()> {
        if self.read_only {
            return call.reply(self.figures().list.clone());
        }
        let vms = self.control.registry.vms();
        call.reply(vms.iter().map(|vm| statistics::vm(vm)).collect())
    }

    fn get_stats(
        &self,
        call: &mut dyn api::Call_GetStats,
        name: Option<String>,
    ) -> varlink::Result<()> {
        if self.read_only {
            let figures = self.figures();
            let mut vms = figures.vms.clone();
            if let Some(wanted) = name {
                vms.retain(|vm| vm.name == wanted);
                if vms.is_empty() {
                    return call.reply_no_such_vm(wanted);
                }
            }
            return call.reply(figures.daemon.clone(), figures.pool.clone(), vms);
        }
        let all = self.control.registry.vms();
        let vms = match &name {
            None => all.iter().map(|vm| statistics::vm_stats(vm)).collect(),
            Some(wanted) => match all.iter().find(|vm| *vm.name() == **wanted) {
                Some(vm) => vec![statistics::vm_stats(vm)],
                None => return call.reply_no_such_vm(wanted.clone()),
            },
        };
        let control = &self.control;
        call.reply(
            statistics::daemon_stats(control, &all),
            statistics::pool_stats(control),
            vms,
        )
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
        match self.control.registry.set_quota(&name, &quota) {
            None => call.reply_no_such_vm(name),
            Some(Ok(())) => {
                tracing::info!(vm = name, ?quota, "the quota of the VM was changed");
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
        match self.control.registry.add(vm) {
            Ok(added) => call.reply(added),
            Err(Refused::Quota(reason)) => call.reply_bad_quota(name, reason),
            Err(Refused::Vm(reason)) => call.reply_bad_vm(name, reason),
        }
    }

    fn remove_vm(
        &self,
        call: &mut dyn api::Call_RemoveVm,
        uuid: String,
        socket: String,
    ) -> varlink::Result<()> {
        if self.read_only {
            return call.reply_read_only_socket("RemoveVm".into());
        }
        let socket = Path::new(&socket);
        let removed = self.control.registry.remove(&uuid, socket);
        call.reply(removed)
    }

    fn release_memory(
        &self,
        call: &mut dyn api::Call_ReleaseMemory,
        bytes: i64,
    ) -> varlink::Result<()> {
        if self.read_only {
            return call.reply_read_only_socket("ReleaseMemory".into());
        }
        let bytes = u64::try_from(bytes).unwrap_or(0);
        call.reply(self.control.size.make_room(bytes))
    }

    fn set_problem(
        &self,
        call: &mut dyn api::Call_SetProblem,
        uuid: String,
        socket: String,
        problem: Option<String>,
    ) -> varlink::Result<()> {
        if self.read_only {
            return call.reply_read_only_socket("SetProblem".into());
        }
        let socket = Path::new(&socket);
        match self.control.registry.set_problem(&uuid, socket, problem) {
            true => call.reply(),
            false => call.reply_no_such_vm(uuid),
        }
    }

    fn flush_vm(&self, call: &mut dyn api::Call_FlushVm, name: String) -> varlink::Result<()> {
        if self.read_only {
            return call.reply_read_only_socket("FlushVm".into());
        }
        let Some(vm) = self.vm(&name) else {
            return call.reply_no_such_vm(name);
        };
        let pages = vm.tenant.drop_pages();
        if let Some(tap) = &vm.tap {
            tap.clear();
        }
        tracing::info!(vm = name, pages, "all pages of the VM were flushed");
        vm.emit(EventKind::Flushed, format_args!("{pages} pages"));
        call.reply(statistics::int(pages))
    }

    fn freeze_vm(&self, call: &mut dyn api::Call_FreezeVm, name: String) -> varlink::Result<()> {
        if self.read_only {
            return call.reply_read_only_socket("FreezeVm".into());
        }
        match self.set_frozen(&name, true) {
            Some(changed) => call.reply(changed),
            None => call.reply_no_such_vm(name),
        }
    }

    fn thaw_vm(&self, call: &mut dyn api::Call_ThawVm, name: String) -> varlink::Result<()> {
        if self.read_only {
            return call.reply_read_only_socket("ThawVm".into());
        }
        match self.set_frozen(&name, false) {
            Some(changed) => call.reply(changed),
            None => call.reply_no_such_vm(name),
        }
    }

    fn set_pool_size(
        &self,
        call: &mut dyn api::Call_SetPoolSize,
        size_bytes: i64,
    ) -> varlink::Result<()> {
        if self.read_only {
            return call.reply_read_only_socket("SetPoolSize".into());
        }
        let bytes_max = self.control.engine.size_max_bytes();
        let bytes = u64::try_from(size_bytes).ok();
        match bytes.filter(|bytes| (POOL_BYTES_MIN..=bytes_max).contains(bytes)) {
            Some(bytes) => {
                tracing::info!(size_bytes, "the configured size of the pool was changed");
                self.control.size.set_configured_size(bytes);
                self.control.registry.grant_reserves();
                call.reply()
            }
            None => call.reply_bad_size(
                size_bytes,
                format!(
                    "a pool must have {POOL_BYTES_MIN} to {bytes_max} bytes: at most the host's \
                     memory when the daemon started, and at most {POOL_BYTES_MAX} bytes"
                ),
            ),
        }
    }

    fn get_features(&self, call: &mut dyn api::Call_GetFeatures) -> varlink::Result<()> {
        let names = crate::vhost::device::feature_names();
        call.reply(names.map(Into::into).collect())
    }

    fn get_freeable(&self, call: &mut dyn api::Call_GetFreeable) -> varlink::Result<()> {
        let [held, freeable, above_reserves, sparse] = match self.read_only {
            true => self.figures().freeable,
            false => freeable(&self.control.engine.stats()),
        };
        call.reply(held, freeable, above_reserves, sparse)
    }

    fn subscribe_events(&self, call: &mut dyn api::Call_SubscribeEvents) -> varlink::Result<()> {
        call.reply_more_expected("SubscribeEvents".into())
    }
}

/// Returns four amounts in bytes: memory that the pool holds; memory that it could free; memory
/// that it could free without going below the VMs' reserves; unused memory in its page frames.
fn freeable(stats: &tmem_pool::EngineStats) -> [i64; 4] {
    let least_bytes = POOL_BYTES_MIN.max(stats.tables_bytes);
    let floor_bytes = least_bytes.max(stats.reserved_bytes);
    [
        stats.held_bytes,
        stats.held_bytes.saturating_sub(least_bytes),
        stats.held_bytes.saturating_sub(floor_bytes),
        stats.frames_bytes.saturating_sub(stats.payload_bytes),
    ]
    .map(statistics::int)
}

impl SocketInterface {
    /// Returns the snapshot of the statistics, which all read-only clients share.
    fn figures(&self) -> Arc<Figures> {
        let control = &self.control;
        control.snapshot.get(Instant::now(), || {
            let vms = control.registry.vms();
            let stats = control.engine.stats();
            Figures {
                list: vms.iter().map(|vm| statistics::vm(vm)).collect(),
                daemon: statistics::daemon_stats(control, &vms),
                pool: statistics::pool(control, &stats),
                vms: vms.iter().map(|vm| statistics::vm_stats(vm)).collect(),
                freeable: freeable(&stats),
            }
        })
    }

    fn vm(&self, name: &str) -> Option<Arc<Vm>> {
        let vms = self.control.registry.vms();
        vms.into_iter().find(|vm| *vm.name() == *name)
    }

    /// Freezes or thaws a VM. A frozen VM's puts are refused. Returns true if the VM's state has
    /// changed, and None if no VM has that name.
    fn set_frozen(&self, name: &str, frozen: bool) -> Option<bool> {
        let vm = self.vm(name)?;
        let changed = vm.frozen.swap(frozen, Ordering::Relaxed) != frozen;
        if changed {
            let (kind, text) = match frozen {
                true => (EventKind::Frozen, "its puts are refused from now on"),
                false => (EventKind::Thawed, "its puts are accepted again"),
            };
            tracing::info!(vm = name, frozen, "{text}");
            vm.emit(kind, format_args!("{text}"));
        }
        Some(changed)
    }
}
