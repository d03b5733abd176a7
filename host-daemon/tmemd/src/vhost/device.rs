// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The vhost-user back end of one connection. It defines what each message of the front end does.
//!
//! The device runs on the connection's control thread and stores or returns no pages, so it answers
//! each message quickly. Before a message changes rings or memory, the device keeps the workers
//! from using the affected vrings. It waits at most until the workers have finished their current
//! descriptor chains. Emptying the tenant is O(1).

use crate::host::background::BackgroundWorkers;
use crate::host::clock::ClockAndEntropy;
use crate::host::heartbeat::Heartbeat;
use crate::memory::budget::REGIONS_MAX;
use crate::memory::dirty_log::{DirtyLog, LogMap};
use crate::memory::peer::Peer;
use crate::memory::sigbus::Lost;
use crate::memory::table::{Memory, RegionSpec, check_file};
use crate::queue::drained::{self, DrainedVrings};
use crate::queue::notifier;
use crate::queue::vring::{Link, RingAddresses, Vring, VringState};
use crate::queue::worker::Workers;
use crate::vm::state::Vm;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tmem_control as api;
use vhost::VhostUserMemoryRegionBase;
use vhost::vhost_user::message::*;
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use virtio_queue::QueueT;
use virtio_tmem as wire;
use zerocopy::IntoBytes;

/// Number of virtqueues: the control queue and the maximum number of request queues.
pub const QUEUES: usize = 1 + wire::REQUEST_QUEUES_MAX;

const VIRTIO_F_VERSION_1: u64 = 1 << 32;
const VIRTIO_F_INDIRECT_DESC: u64 = 1 << 28;
const VIRTIO_F_EVENT_IDX: u64 = 1 << 29;
const VIRTIO_F_IN_ORDER: u64 = 1 << 35;

/// virtio and vhost-user features that the device offers. It offers no reserved bit, no packed ring
/// and no ACCESS_PLATFORM (SPEC.md, "Feature bits").
///
/// The device publishes answers in ring order, and executes LATENCIES requests, even if the driver
/// has not accepted the feature bits for them. The order is needed because a VMM that has lost its
/// back end replays requests. Older drivers send LATENCIES requests without negotiation.
const FEATURES: u64 = VIRTIO_F_VERSION_1
    | VIRTIO_F_INDIRECT_DESC
    | VIRTIO_F_EVENT_IDX
    | VIRTIO_F_IN_ORDER
    | 1 << wire::F_LATENCIES
    | 1 << wire::F_RETAIN
    | VhostUserVirtioFeatures::LOG_ALL.bits()
    | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();

/// Names under which the control interface reports the feature bits of virtio-tmem.
const FEATURE_NAMES: [(u32, &str); 2] = [
    (wire::F_RETAIN, api::FEATURE_RETAIN),
    (wire::F_LATENCIES, "VIRTIO_TMEM_F_LATENCIES"),
];

/// Returns the names of the feature bits of virtio-tmem that the daemon offers.
pub fn feature_names() -> impl Iterator<Item = &'static str> {
    let offered = |(bit, _): &(u32, &str)| FEATURES & 1 << bit != 0;
    FEATURE_NAMES
        .into_iter()
        .filter(offered)
        .map(|(_, name)| name)
}

/// vhost-user protocol features that the device offers. STATUS is missing because the vhost crate
/// does not handle it. INFLIGHT_SHMFD is missing because a drain leaves no request in flight. The
/// VMM replays requests of a killed daemon, which is safe because requests are idempotent.
const PROTOCOL_FEATURES: VhostUserProtocolFeatures = VhostUserProtocolFeatures::MQ
    .union(VhostUserProtocolFeatures::CONFIG)
    .union(VhostUserProtocolFeatures::REPLY_ACK)
    .union(VhostUserProtocolFeatures::LOG_SHMFD)
    .union(VhostUserProtocolFeatures::RESET_DEVICE)
    .union(VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS);

/// vhost-user back end of one connection.
pub struct Device {
    link: Arc<Link>,
    vrings: Vec<Arc<Vring>>,
    workers: Arc<Workers>,
    background: Arc<BackgroundWorkers>,
    memory: Arc<Memory>,
    /// Flag that is set when the daemon loses a page of the guest's memory or of the dirty log.
    lost: Arc<Lost>,
    log: Arc<DirtyLog>,
    missed_pages: u64,
    /// Heartbeat of the control thread for the watchdog. The thread counts as working while it
    /// waits for workers.
    heartbeat: Heartbeat,
    /// Whether the device refused the last message with an error that does not end the connection.
    refused: bool,
}

fn failed(what: impl std::fmt::Display) -> Error {
    Error::ReqHandlerError(std::io::Error::other(what.to_string()))
}

impl Device {
    /// Creates a device with a new generation number. The caller must have emptied the VM's tenant.
    ///
    /// # Errors
    /// The system has no entropy.
    pub fn new(
        vm: Arc<Vm>,
        peer: Peer,
        workers: Arc<Workers>,
        background: Arc<BackgroundWorkers>,
        clock: ClockAndEntropy,
    ) -> std::io::Result<Device> {
        let log = Arc::new(DirtyLog::default());
        let link = Arc::new(Link {
            vm,
            peer,
            generation: AtomicU64::new(clock.new_generation()?),
            clock,
        });
        let heartbeat = workers
            .heartbeats()
            .register(&format!("the connection of {}", link.vm.name()));
        let first = workers.assign();
        let vring = |index| {
            Arc::new(Vring::new(
                index,
                (first + index) % workers.count(),
                link.clone(),
            ))
        };
        let vrings = (0..QUEUES).map(vring).collect();
        let lost = Arc::default();
        let memory = Memory::empty(&lost, &link.vm.memory).with_vmm_user(link.peer.user());
        let memory = Arc::new(memory);
        Ok(Device {
            link,
            vrings,
            workers,
            background,
            memory,
            lost,
            log,
            missed_pages: 0,
            heartbeat,
            refused: false,
        })
    }

    /// Returns true if the device refused the last message with an error that does not end the
    /// connection. Resets the flag, so the next call returns false.
    pub fn take_refused(&mut self) -> bool {
        std::mem::take(&mut self.refused)
    }

    /// Returns true if a page of the guest's memory or of the dirty log was lost. The connection
    /// must then end.
    pub fn memory_is_lost(&self) -> bool {
        self.lost.is_lost()
    }

    fn vm(&self) -> &Vm {
        &self.link.vm
    }

    fn vring(&self, index: u32) -> Result<&Arc<Vring>> {
        self.vrings.get(index as usize).ok_or_else(|| {
            failed(format!(
                "there is no virtqueue {index}: the device has {QUEUES}"
            ))
        })
    }

    /// Begins a drain of all vrings without waiting for it. Each worker leaves its vring at the end
    /// of the current descriptor chain. After the drain cut, it answers the chain's remaining pages
    /// with REFUSED, MISS or GONE. A simulator, which has no second thread, calls this function to
    /// interrupt a slice.
    pub fn begin_drain(&self) {
        drained::begin_drain(&self.vrings);
    }

    /// Drains all vrings. No worker uses them until the returned guard is dropped.
    fn drain(&self) -> DrainedVrings<'_> {
        DrainedVrings::wait(&self.vrings, &self.workers, &self.heartbeat)
    }

    /// Drains one vring and changes its state while no worker uses the vring.
    fn drain_one<R>(
        &self,
        index: u32,
        change: impl FnOnce(&Arc<Vring>, &mut VringState) -> R,
    ) -> Result<R> {
        let vring = self.vring(index)?;
        let vrings = std::slice::from_ref(vring);
        let mut drained = DrainedVrings::wait(vrings, &self.workers, &self.heartbeat);
        Ok(change(vring, drained.state(0)))
    }

    fn drop_kick(&self, vring: &Vring, state: &mut VringState) {
        if let Some(token) = state.kick.take() {
            self.workers.unregister(vring, token);
        }
    }

    /// Gives all vrings a new table of the guest's memory. The table becomes the current one
    /// ([`set_memory`](Self::set_memory)).
    fn replace_memory(&mut self, memory: Memory) {
        let memory = Arc::new(memory);
        for (vring, state) in self.drain().iter_mut() {
            state.memory = memory.clone();
            vring.configure(state);
        }
        self.set_memory(memory);
    }

    /// Makes `memory` the current table of the guest's memory. A background thread unmaps the old
    /// table later. If too much memory of the VM waits to be unmapped, this thread unmaps the old
    /// table, which slows the front end down.
    fn set_memory(&mut self, memory: Arc<Memory>) {
        memory.become_current();
        let old = std::mem::replace(&mut self.memory, memory);
        if self.vm().memory.is_backlogged(self.memory.bytes()) {
            drop(old);
        } else {
            self.background.discard(old, &self.vm().discarded);
        }
    }

    fn empty_memory(&self) -> Memory {
        Memory::empty(&self.lost, &self.vm().memory).with_vmm_user(self.link.peer.user())
    }

    fn refuse_memory(&self, error: impl std::fmt::Display) -> Error {
        let error = format!("VM {}: {error}", self.vm().name());
        self.vm().warn(format_args!("{error}"));
        failed(error)
    }

    /// Resets the device: empties the VM's tenant, begins a new generation and disables all rings.
    fn reset(&mut self) -> Result<()> {
        self.drain()
            .states()
            .for_each(|state| state.enabled = false);
        let generation = self.new_generation()?;
        self.begin_generation(&mut self.drain(), generation);
        self.background.wake();
        Ok(())
    }

    fn new_generation(&self) -> Result<u64> {
        let clock = &self.link.clock;
        clock.new_generation().map_err(Error::ReqHandlerError)
    }

    /// Empties the VM's tenant and begins a generation, while no worker uses a ring.
    fn begin_generation(&self, drained: &mut DrainedVrings<'_>, generation: u64) {
        drained.states().for_each(VringState::forget_index);
        self.vm().clear();
        self.link.generation.store(generation, Ordering::SeqCst);
    }

    /// Ends the device: stops all rings, releases the guest's memory and empties the VM's tenant.
    pub fn end(&mut self) {
        let mut drained = self.drain();
        for (vring, state) in drained.iter_mut() {
            self.drop_kick(vring, state);
            state.enabled = false;
            state.memory = Arc::new(self.empty_memory());
            (state.call, state.error) = (None, None);
        }
        self.vm().clear();
        drop(drained);
        self.report_missed_pages();
        let empty = Arc::new(self.empty_memory());
        self.set_memory(empty);
    }

    /// Logs how many written guest pages could not be marked in the dirty log since the last call,
    /// if there are any.
    fn report_missed_pages(&mut self) {
        let missed = self.log.missed_pages();
        if missed > self.missed_pages {
            self.vm().warn(format_args!(
                "{} written guest pages could not be marked in the dirty log, which is too \
                 short: the current migration must not be completed",
                missed - self.missed_pages
            ));
            self.missed_pages = missed;
        }
    }
}

/// Checks that a descriptor from the front end is an eventfd. A read of another file could block,
/// for example if the front end serves the file system. For an eventfd, neither `event_fd::consume`
/// nor `notifier::interrupt` blocks, whatever the front end does with the flags of the shared file.
///
/// # Errors
/// The descriptor is not an eventfd.
fn event_fd(file: File) -> Result<OwnedFd> {
    let fd = OwnedFd::from(file);
    let bad = |what: String| failed(format!("not an eventfd: {what}"));
    let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let target = std::fs::read_link(&link).map_err(|e| bad(format!("{link}: {e}")))?;
    if target.as_os_str() != "anon_inode:[eventfd]" {
        return Err(bad(target.display().to_string()));
    }
    Ok(fd)
}

impl VhostUserBackendReqHandlerMut for Device {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.reset()
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(FEATURES)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !FEATURES != 0 {
            return Err(failed(format!(
                "the VMM sets feature bits {:#x}, which the device does not offer",
                features & !FEATURES
            )));
        }
        let enable = features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0;
        let mut drained = self.drain();
        // No worker uses a vring while dirty logging is switched on or off. Each write to guest
        // memory therefore comes either before or after the change.
        self.log
            .set_enabled(features & VhostUserVirtioFeatures::LOG_ALL.bits() != 0);
        for state in drained.states() {
            state
                .queue
                .set_event_idx(features & VIRTIO_F_EVENT_IDX != 0);
            state.retain = features & 1 << wire::F_RETAIN != 0;
            state.enabled |= enable;
        }
        drop(drained);
        self.report_missed_pages();
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<VhostUserMemoryRegionBase>>> {
        let mut memory = self.empty_memory();
        for (region, file) in regions.iter().zip(files) {
            let spec = RegionSpec {
                guest_address: region.guest_phys_addr,
                user_address: region.user_addr,
                bytes: region.memory_size,
                file_offset: region.mmap_offset,
            };
            memory = memory
                .with_region(spec, file, &self.log)
                .map_err(|error| self.refuse_memory(error))?;
        }
        self.replace_memory(memory);
        Ok(None)
    }

    fn set_vring_num(&mut self, index: u32, num: u32) -> Result<()> {
        let max = u32::from(wire::QUEUE_SIZE_MAX);
        if num == 0 || num > max || !num.is_power_of_two() {
            return Err(failed(format!(
                "virtqueue {index} has {num} descriptors: it must have a power of two, at most \
                 {max}"
            )));
        }
        self.drain_one(index, |vring, state| {
            state.queue.set_size(num as u16);
            vring.configure(state);
        })
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        // The dirty log covers writes to the used ring like all writes to guest memory. The flags
        // and the log address in this message, which could select another place in the log, are
        // therefore not needed.
        self.drain_one(index, |vring, state| {
            state.addresses = Some(RingAddresses {
                descriptor,
                available,
                used,
            });
            vring.configure(state);
        })
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base)
            .map_err(|_| failed(format!("virtqueue {index} cannot start at index {base}")))?;
        // A VMM need not send GET_VRING_BASE before, so this message stops the ring, too, until the
        // next SET_VRING_KICK. The ring must not start at its new base with its old addresses.
        let vring = self.vring(index)?;
        let generation = self.new_generation()?;
        let mut drained = self.drain();
        let state = drained.state(index as usize);
        let continues = state.continues_at(base);
        self.drop_kick(vring, state);
        if !continues {
            // The driver may set up other rings later, or never, and use their memory for something
            // else. Until then, no worker may follow them.
            let rings = drained.iter_mut();
            for (other, state) in rings.filter(|(_, state)| state.is_of_former_driver()) {
                self.drop_kick(other, state);
                if !Arc::ptr_eq(other, vring) {
                    state.forget_place();
                }
            }
            self.begin_generation(&mut drained, generation);
        }
        let state = drained.state(index as usize);
        state.set_base(base);
        vring.configure(state);
        drop(drained);
        if !continues {
            self.background.wake();
            self.vm().info(format_args!(
                "the driver has set up virtqueue {index} again: its device was reset"
            ));
        }
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let base = self.drain_one(index, |vring, state| {
            self.drop_kick(vring, state);
            state.call = None;
            let base = state.queue.next_avail();
            state.set_base(base);
            base
        })?;
        // GET_VRING_BASE is the last message before the VMM completes a migration, so the daemon
        // now reports the written pages that it could not mark in the dirty log.
        self.report_missed_pages();
        Ok(VhostUserVringState::new(index, u32::from(base)))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let file = file.ok_or_else(|| {
            failed(format!(
                "virtqueue {index}: rings without a kick eventfd (polled rings) are not supported"
            ))
        })?;
        let fd = Arc::new(event_fd(file)?);
        self.drain_one(u32::from(index), |vring, state| {
            self.drop_kick(vring, state);
            let token = self.workers.register(vring, fd).map_err(|e| {
                failed(format!(
                    "virtqueue {index}: cannot poll the kick eventfd: {e}"
                ))
            })?;
            state.kick = Some(token);
            vring.configure(state);
            Ok(())
        })?
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let fd = file.map(event_fd).transpose()?;
        self.drain_one(u32::from(index), |_, state| {
            // An interrupt is sent at once, because a daemon that was killed may have published
            // answers without sending an interrupt. With EVENT_IDX, later answers need not cause an
            // interrupt, and the driver would wait for ever.
            if let Some(call) = &fd {
                notifier::interrupt(self.vm(), call);
            }
            state.call = fd;
        })
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let fd = file.map(event_fd).transpose()?;
        self.drain_one(u32::from(index), |_, state| state.error = fd)
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(PROTOCOL_FEATURES)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        match features & !PROTOCOL_FEATURES.bits() {
            0 => Ok(()),
            odd => Err(failed(format!(
                "the VMM sets protocol feature bits {odd:#x}, which the device does not offer"
            ))),
        }
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(QUEUES as u64)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.drain_one(index, |_, state| state.enabled = enable)
    }

    fn get_config(&mut self, offset: u32, size: u32, _: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let config = wire::Config {
            generation: self.link.generation.load(Ordering::SeqCst).into(),
            page_size: (wire::PAGE_SIZE as u32).into(),
            num_request_queues: (wire::REQUEST_QUEUES_MAX as u16).into(),
            batch_max: (wire::BATCH_MAX as u16).into(),
            pools_max: (wire::POOLS_MAX as u32).into(),
            reserved: [0.into(); 3],
        };
        // Bytes beyond the configuration are 0. The crate would report an error by an answer without
        // bytes, and its own front end waits for them for ever.
        let bytes = config
            .as_bytes()
            .iter()
            .copied()
            .chain(std::iter::repeat(0));
        Ok(bytes.skip(offset as usize).take(size as usize).collect())
    }

    fn set_config(&mut self, _: u32, _: &[u8], _: VhostUserConfigFlags) -> Result<()> {
        self.refused = true;
        Err(failed("the configuration is read-only"))
    }

    fn set_gpu_socket(&mut self, _: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("not a GPU"))
    }

    fn get_shared_object(&mut self, _: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("no shared objects"))
    }

    fn get_inflight_fd(&mut self, _: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        Err(Error::InvalidOperation("nothing is in flight"))
    }

    fn set_inflight_fd(&mut self, _: &VhostUserInflight, _: File) -> Result<()> {
        Err(Error::InvalidOperation("nothing is in flight"))
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<VhostUserMemoryRegionBase>> {
        let memory = self
            .memory
            .with_region(single_region(region), file, &self.log)
            .map_err(|error| self.refuse_memory(error))?;
        self.replace_memory(memory);
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let memory = self
            .memory
            .without_region(single_region(region))
            .map_err(|error| self.refuse_memory(error))?;
        self.replace_memory(memory);
        Ok(())
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation(
            "the device has no state to transfer",
        ))
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(Error::InvalidOperation(
            "the device has no state to transfer",
        ))
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(Error::InvalidOperation("no shared memory regions"))
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        check_file(&file, log.mmap_offset, log.mmap_size)
            .map_err(|error| self.refuse_memory(format!("the dirty log {error}")))?;
        let map = LogMap::new(&file, log.mmap_offset, log.mmap_size, &self.lost)
            .map_err(|error| self.refuse_memory(format!("the dirty log: {error}")))?;
        self.log.set_map(map);
        Ok(())
    }
}

fn single_region(region: &VhostUserSingleMemoryRegion) -> RegionSpec {
    RegionSpec {
        guest_address: region.guest_phys_addr,
        user_address: region.user_addr,
        bytes: region.memory_size,
        file_offset: region.mmap_offset,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::background::DISCARDED_MAX;
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

    /// Returns the number of mappings of this process whose files have the given name.
    fn mapped(name: &str) -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("cannot read /proc/self/maps");
        maps.lines().filter(|line| line.contains(name)).count()
    }

    /// Returns a function that creates a device for a new connection of the same VM at each call.
    /// The background workers are stopped, so memory tables that wait to be unmapped stay mapped.
    fn devices() -> (
        impl Fn() -> (Device, std::os::unix::net::UnixStream),
        Arc<Workers>,
        Arc<BackgroundWorkers>,
    ) {
        let engine = tmem_pool::Engine::new(tmem_pool::EngineConfig::new(1 << 20, 1))
            .expect("cannot reserve the pool's address space");
        let config: crate::config::settings::VmConfig = "name=test,socket=none"
            .parse()
            .expect("valid settings of a VM were refused");
        let spec = tmem_pool::TenantSpec::new("test", config.quota);
        let tenant = engine
            .add_tenant(spec)
            .expect("the pool cannot add the tenant");
        let clock = ClockAndEntropy::host();
        let heartbeats = Arc::default();
        let background = BackgroundWorkers::start(engine, &clock, 1, &heartbeats)
            .expect("cannot start the thread");
        let workers = Arc::new(
            Workers::start(1, Default::default(), &background, &heartbeats)
                .expect("cannot start the workers"),
        );
        background.stop();
        let vm = Arc::new(Vm::new(config, tenant, None, Arc::default()));
        let (own_workers, own_background) = (workers.clone(), background.clone());
        let device = move || {
            let (own, front_end) =
                std::os::unix::net::UnixStream::pair().expect("cannot create a socket pair");
            let (workers, background) = (own_workers.clone(), own_background.clone());
            let device = Device::new(
                vm.clone(),
                Peer::new(own),
                workers,
                background,
                clock.clone(),
            );
            (device.expect("the host has no random numbers"), front_end)
        };
        (device, workers, background)
    }

    /// A panic of the control thread leaves the states of the vrings unknown. No worker may use the
    /// vrings then, until the thread has ended the connection.
    #[test]
    fn vrings_stay_drained_after_a_panic_of_the_control_thread() {
        let (device, workers, _background) = devices();
        let (device, _front_end) = device();
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _drained = device.drain();
            panic!("a panic of a test");
        }));
        assert!(panicked.is_err());
        assert!(device.vrings.iter().all(|vring| vring.is_draining()));
        drop(device.drain());
        assert!(!device.vrings.iter().any(|vring| vring.is_draining()));
        workers.stop();
    }

    /// The device limits the number of queues and their size, and thereby the requests in flight.
    #[test]
    fn invalid_queue_indexes_sizes_and_bases_are_refused() {
        let (device, workers, _background) = devices();
        let (mut device, _front_end) = device();
        let last = QUEUES as u32 - 1;
        for queue in [0, 1, last] {
            for size in [1, 2, 512, 1024] {
                device
                    .set_vring_num(queue, size)
                    .expect("a queue size that is a power of two was refused");
            }
            for size in [0, 3, 1023, 1025, 2048, 1 << 16, 1 << 31, u32::MAX] {
                let error = device
                    .set_vring_num(queue, size)
                    .expect_err("an invalid queue size was accepted");
                assert!(
                    error.to_string().contains(&size.to_string()),
                    "the error does not give the size {size}: {error}"
                );
            }
            device
                .set_vring_base(queue, 65_535)
                .expect("ring base 65,535, the largest valid one, was refused");
            device
                .set_vring_base(queue, 65_536)
                .expect_err("a ring base beyond 65,535 was accepted");
        }
        for queue in [last + 1, 256, 1 << 31, u32::MAX] {
            device
                .set_vring_num(queue, 1)
                .expect_err("a queue that does not exist was configured");
            device
                .set_vring_base(queue, 0)
                .expect_err("a queue that does not exist was configured");
            assert!(
                device.get_vring_base(queue).is_err(),
                "a queue that does not exist has a base"
            );
            device
                .set_vring_enable(queue, true)
                .expect_err("a queue that does not exist was enabled");
        }
        workers.stop();
    }

    /// After a reset that the VMM does not report, the driver may use fewer queues. The memory of a
    /// ring that it does not set up again has other contents then, also if the VMM enables the ring.
    #[test]
    fn rings_of_a_former_driver_do_not_run_after_a_reset() {
        let (device, workers, _background) = devices();
        // A worker would find that the available ring has no five chains, and would stop the ring.
        workers.stop();
        let (mut device, _front_end) = device();
        let file = memfd_create("test", MemfdFlags::ALLOW_SEALING).expect("cannot create a memfd");
        ftruncate(&file, 1 << 16).expect("cannot set the length of the memfd");
        fcntl_add_seals(&file, SealFlags::SHRINK).expect("cannot seal the memfd");
        let region = VhostUserMemoryRegion::new(0, 1 << 16, 0, 0);
        device
            .set_mem_table(&[region], vec![file.into()], None)
            .expect("the memory table was refused");
        let set_up = |device: &mut Device, queue: u32| {
            let at = u64::from(queue) << 13;
            let flags = VhostUserVringAddrFlags::empty();
            let kick = eventfd(0, EventfdFlags::CLOEXEC).expect("cannot create an eventfd");
            device
                .set_vring_num(queue, 16)
                .expect("the queue was refused");
            device
                .set_vring_addr(queue, flags, at, at + 0x800, at + 0x400, 0)
                .expect("the ring addresses were refused");
            device
                .set_vring_base(queue, 0)
                .expect("the base was refused");
            device
                .set_vring_kick(queue as u8, Some(kick.into()))
                .expect("the kick was refused");
            device
                .set_vring_enable(queue, true)
                .expect("the ring was not enabled");
        };
        let running = |device: &Device| {
            let running = device.vrings.iter().map(|vring| vring.lock().is_running());
            running.take(3).collect::<Vec<_>>()
        };
        (0..3).for_each(|queue| set_up(&mut device, queue));
        assert_eq!(running(&device), [true; 3]);
        // Each ring but the first has taken five chains.
        for vring in &device.vrings[1..3] {
            vring.lock().queue.set_next_avail(5);
        }
        let generation = device.link.generation.load(Ordering::SeqCst);
        // The first ring has taken no chain, so setting its base to 0 does not show the reset, and
        // the generation stays.
        set_up(&mut device, 0);
        assert_eq!(device.link.generation.load(Ordering::SeqCst), generation);
        set_up(&mut device, 1);
        assert_ne!(device.link.generation.load(Ordering::SeqCst), generation);
        device
            .set_vring_enable(2, true)
            .expect("the ring was not enabled");
        assert_eq!(running(&device), [true, true, false]);
        device.end();
    }

    #[test]
    fn replaced_memory_tables_that_wait_for_unmapping_are_limited_in_number() {
        let (device, workers, background) = devices();
        let name = "tmemd-changes-in-a-loop";
        let file = memfd_create(name, MemfdFlags::ALLOW_SEALING).expect("cannot create a memfd");
        ftruncate(&file, 4096).expect("cannot set the length of the memfd");
        fcntl_add_seals(&file, SealFlags::SHRINK).expect("cannot seal the memfd");
        let region = VhostUserMemoryRegion::new(0, 4096, 0, 0);
        // The limit of DISCARDED_MAX tables applies to the VM, not to a single connection, so the
        // test uses several connections.
        for connection in 0..3 {
            let (mut device, _front_end) = device();
            for _ in 0..50 {
                let file = file
                    .try_clone()
                    .expect("cannot duplicate the descriptor")
                    .into();
                device
                    .set_mem_table(&[region], vec![file], None)
                    .expect("the memory table was refused");
            }
            // DISCARDED_MAX tables wait to be unmapped. The first of them is empty and has no
            // mapping, but the table that the device uses now has one. So DISCARDED_MAX mappings
            // exist.
            assert_eq!(
                mapped(name),
                DISCARDED_MAX,
                "connection {connection}: the number of mapped tables is not DISCARDED_MAX"
            );
            device.end();
            assert_eq!(
                mapped(name),
                DISCARDED_MAX - 1,
                "connection {connection}: the end of the connection did not free one mapping"
            );
        }
        background.unmap();
        assert_eq!(mapped(name), 0);
        workers.stop();
    }

    /// If a VM changes its memory table or reconnects in a loop, the tables that wait to be
    /// unmapped have together at most as much memory as the VM may have. The daemon unmaps a
    /// refused table at once.
    #[test]
    fn replaced_memory_tables_that_wait_for_unmapping_fit_the_vm_maximum() {
        const MAX_BYTES: u64 = 1 << 20;
        let (device, workers, background) = devices();
        let file = memfd_create("test", MemfdFlags::ALLOW_SEALING).expect("cannot create a memfd");
        ftruncate(&file, 2 * MAX_BYTES).expect("cannot set the length of the memfd");
        fcntl_add_seals(&file, SealFlags::SHRINK).expect("cannot seal the memfd");
        let half = |start| VhostUserMemoryRegion::new(start, MAX_BYTES / 2, start, 0);
        let set = |device: &mut Device, regions: &[VhostUserMemoryRegion]| {
            let file = |_| {
                let file = file.try_clone();
                file.expect("cannot duplicate the descriptor").into()
            };
            let files = (0..regions.len()).map(file).collect();
            device.set_mem_table(regions, files, None)
        };
        for connection in 0..5 {
            let (mut device, _front_end) = device();
            let account = device.vm().memory.clone();
            account.set_max_bytes(MAX_BYTES);
            for change in 0..10 {
                set(&mut device, &[half(0), half(MAX_BYTES)])
                    .expect("a memory table within the VM's maximum was refused");
                let mapped_bytes = account.mapped_bytes();
                assert!(
                    (MAX_BYTES..=2 * MAX_BYTES).contains(&mapped_bytes),
                    "connection {connection}, change {change}: {mapped_bytes} bytes are mapped, \
                     expected one to two times {MAX_BYTES}"
                );
                // The third region exceeds the maximum. The first two regions are unmapped again.
                let more = set(
                    &mut device,
                    &[half(0), half(MAX_BYTES), half(2 * MAX_BYTES)],
                );
                let error = more
                    .expect_err("memory above the VM's maximum was accepted")
                    .to_string();
                for part in ["VM test", "1572864 bytes", "1048576", "memory_max"] {
                    assert!(
                        error.contains(part),
                        "the error does not contain {part:?}: {error}"
                    );
                }
                assert_eq!(account.mapped_bytes(), mapped_bytes);
            }
            device.end();
            assert!(account.mapped_bytes() <= MAX_BYTES);
        }
        let (device, _front_end) = device();
        background.unmap();
        assert_eq!(device.vm().memory.mapped_bytes(), 0);
        workers.stop();
    }

    /// A VM adds and removes regions, replaces its table and reconnects at random, while no table
    /// is unmapped in the background. Tables that wait to be unmapped share mappings with each
    /// other and with the current table.
    #[test]
    fn random_memory_changes_map_at_most_three_times_the_vm_maximum() {
        const QUARTER: u64 = 1 << 18;
        const MAX_BYTES: u64 = 4 * QUARTER;
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut rng = fastrand::Rng::with_seed(seed);
        let (new_device, workers, background) = devices();
        let file = memfd_create("test", MemfdFlags::ALLOW_SEALING).expect("cannot create a memfd");
        ftruncate(&file, MAX_BYTES).expect("cannot set the length of the memfd");
        fcntl_add_seals(&file, SealFlags::SHRINK).expect("cannot seal the memfd");
        let file = || {
            let file = file.try_clone();
            File::from(file.expect("cannot duplicate the descriptor"))
        };
        let (mut device, mut front_end) = new_device();
        let account = device.vm().memory.clone();
        account.set_max_bytes(MAX_BYTES);
        let (mut most, mut refused) = (0, 0);
        for step in 0..2000 {
            let (start, bytes) = (rng.u64(..5) * QUARTER, QUARTER * rng.u64(1..=4));
            let region = VhostUserSingleMemoryRegion::new(start, bytes, start, 0);
            let result = match rng.usize(..16) {
                0 => {
                    device.end();
                    (device, front_end) = new_device();
                    Ok(())
                }
                1..=3 => {
                    let table = VhostUserMemoryRegion::new(start, bytes, start, 0);
                    let set = device.set_mem_table(&[table], vec![file()], None);
                    set.map(drop)
                }
                4..=9 => device.remove_mem_region(&region),
                _ => device.add_mem_region(&region, file(), None).map(drop),
            };
            refused += usize::from(result.is_err());
            if rng.usize(..50) == 0 {
                background.unmap();
                assert_eq!(
                    account.mapped_bytes(),
                    device.memory.bytes(),
                    "seed {seed}: the VM is charged for other memory than its current table"
                );
            }
            let mapped_bytes = account.mapped_bytes();
            assert!(
                mapped_bytes <= 3 * MAX_BYTES,
                "seed {seed}, step {step}: {mapped_bytes} bytes are mapped, more than three times \
                 {MAX_BYTES}"
            );
            most = most.max(mapped_bytes);
        }
        assert!(
            most > MAX_BYTES,
            "seed {seed}: no replaced table ever waited to be unmapped"
        );
        assert!(
            refused > 100,
            "seed {seed}: {refused} changes were refused, expected more than 100"
        );
        device.end();
        background.unmap();
        assert_eq!(
            account.mapped_bytes(),
            0,
            "seed {seed}: the VM is still charged after all tables were unmapped"
        );
        drop(front_end);
        workers.stop();
    }

    #[test]
    fn only_eventfds_are_accepted_as_kicks_and_calls() {
        let fd = eventfd(0, EventfdFlags::empty()).expect("cannot create an eventfd");
        let other = fd.try_clone().expect("cannot duplicate the descriptor");
        let fd = event_fd(fd.into()).expect("an eventfd was refused as a kick or call");
        // Reading an eventfd whose counter is 0 must not block the reader.
        crate::util::event_fd::consume(&fd);
        crate::util::event_fd::signal(&other);
        let (reader, _writer) = std::io::pipe().expect("cannot create a pipe");
        let file = tempfile::tempfile().expect("cannot create a temporary file");
        for odd in [OwnedFd::from(reader).into(), file] {
            let error = event_fd(odd)
                .expect_err("a descriptor that is not an eventfd was accepted")
                .to_string();
            assert!(
                error.contains("not an eventfd"),
                "the error does not say \"not an eventfd\": {error}"
            );
        }
    }

    /// After a reboot, the guest's driver may accept other features than before. The device must
    /// then follow the new choice.
    #[test]
    fn pages_are_retained_only_if_the_driver_accepts_the_retain_feature() {
        let (device, workers, _background) = devices();
        let (mut device, _front_end) = device();
        for accepted in [true, false, true] {
            let features = VIRTIO_F_VERSION_1 | u64::from(accepted) << wire::F_RETAIN;
            device
                .set_features(features)
                .expect("the device refused features that it offers");
            for vring in &device.vrings {
                assert_eq!(vring.lock().retain, accepted);
            }
        }
        workers.stop();
    }

    /// A VMM of a later version may know more bits than this daemon.
    #[test]
    fn feature_bits_that_the_device_does_not_offer_are_refused() {
        let (device, workers, _background) = devices();
        let (mut device, _front_end) = device();
        for bit in (0..64).filter(|bit| FEATURES & 1 << bit == 0) {
            let error = device
                .set_features(FEATURES | 1 << bit)
                .expect_err("the device accepted a feature bit that it does not offer")
                .to_string();
            assert!(
                error.contains(&format!("feature bits {:#x}", 1_u64 << bit)),
                "the error does not name bit {bit}: {error}"
            );
        }
        workers.stop();
    }

    #[test]
    fn the_device_offers_no_reserved_feature_bit() {
        for bit in [wire::F_PERSISTENT, wire::F_SHARED, wire::F_EVENTS] {
            assert_eq!(FEATURES & (1 << bit), 0);
        }
        // Bits 33 and 34 are ACCESS_PLATFORM and RING_PACKED, which the device does not support.
        assert_eq!(FEATURES & (1 << 33 | 1 << 34), 0);
    }
}
