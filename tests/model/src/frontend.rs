// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The fake guest. It does what a VMM and a guest's driver do with a daemon, in the same order. The
//! VMM is QEMU, unless the configuration gives it the habits of others ([`Vmm`]).
//!
//! Memory and rings stay when a connection ends, as a guest outlives its daemon. After the loss of
//! a back end, the rings start again from the last used element. The fake guest has the buffers and
//! rings of a driver, but no index of pages. [`crate::Model`] decides which answers are allowed.
//! Every wait has a time limit.

mod requests_in_flight;

use std::collections::HashMap;
use std::io;
use std::io::Read;
use std::net::Shutdown;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VringConfigData};
use virtio_tmem as wire;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::memory::{DirtyLog, GuestRam, PAGE_BYTES, RamRegion};
use crate::requests::{Answer, Cut, Encoded, PAGE, Request, cut, decode};
use crate::ring::{DriverRing, RingError, RingFull, RingLayout};

/// Feature bit VIRTIO_F_INDIRECT_DESC: a descriptor may refer to a table of descriptors.
pub const F_INDIRECT_DESC: u64 = 1 << 28;
/// Feature bit VIRTIO_F_EVENT_IDX: kicks and interrupts are requested by ring index.
pub const F_EVENT_IDX: u64 = 1 << 29;
/// Feature bit VHOST_USER_F_PROTOCOL_FEATURES: the daemon has vhost-user protocol features.
pub const F_PROTOCOL_FEATURES: u64 = 1 << 30;
/// Feature bit VIRTIO_F_VERSION_1: the device follows virtio 1.
pub const F_VERSION_1: u64 = 1 << 32;
/// Feature bit VIRTIO_TMEM_F_RETAIN: the device may retain pages that it returns.
pub const F_RETAIN: u64 = 1 << wire::F_RETAIN;
/// Feature bit VHOST_F_LOG_ALL: the daemon marks pages that it writes in the dirty log.
pub const F_LOG_ALL: u64 = 1 << 26;
/// Bytes of `struct virtio_tmem_config`.
pub const CONFIG_BYTES: usize = 32;

/// Number of pages of a slot, which is the guest memory for one request. A request has a readable
/// and a writable part, and only one of them contains page data. The metadata of that part is at
/// the end of the slot's first page, and the 64 data pages follow. The next page has the part
/// without page data, and the last page has the indirect descriptor table.
const SLOT_PAGES: u64 = 67;
/// Largest number of descriptors in a slot's indirect table.
const INDIRECT_MAX: usize = (PAGE_BYTES / 16) as usize;

/// Habits of a VMM in which it differs from QEMU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Vmm {
    /// The VMM does not report a reset of the device: it disables the rings and sends neither
    /// GET_VRING_BASE nor RESET_DEVICE. Cloud Hypervisor and user-mode Linux send no RESET_DEVICE.
    pub silent_resets: bool,
    /// After the loss of its back end, the VMM starts the rings at their available index instead of
    /// the used index, and so skips the requests in flight. Cloud Hypervisor does so up to v53.
    pub skips_in_flight: bool,
    /// All queues share one call eventfd, as with virtio-mmio, which has one interrupt.
    pub one_interrupt: bool,
}

/// Configuration of a [`FakeGuest`] and of the VMM that it simulates.
#[derive(Clone, Debug)]
pub struct GuestConfig {
    /// Name of the guest, for error messages.
    pub name: String,
    /// Regions of the guest's RAM, in ascending order of their addresses.
    pub ram: Vec<RamRegion>,
    /// Whether the memory files (memfds) of the RAM have the seal F_SEAL_SHRINK.
    pub sealed: bool,
    /// Whether the memory files (memfds) of the RAM consist of huge pages. They are then sealed,
    /// and the host must have enough free huge pages.
    pub huge: bool,
    /// Directory of the files of the RAM, which have no name; None if they are memfds.
    pub directory: Option<PathBuf>,
    /// Whether all RAM regions map the same memory, so that the guest can have more RAM than its
    /// host. All regions then have the same size.
    pub one_file: bool,
    /// Number of request queues, without the control queue.
    pub request_queues: u16,
    /// Number of descriptors of each queue.
    pub queue_size: u16,
    /// Feature bits that the driver accepts, if the device offers them.
    pub features: u64,
    /// Maximum number of requests in flight, over all queues.
    pub slots: usize,
    /// How the guest divides the chains of requests into descriptors.
    pub cut: Cut,
    /// Whether the guest sends its memory regions one by one (ADD_MEM_REG) instead of in a table
    /// (SET_MEM_TABLE), if the daemon offers that.
    pub mem_slots: bool,
    /// Habits in which the VMM differs from QEMU.
    pub vmm: Vmm,
    /// Whether the guest requests an acknowledgement of every vhost-user message, so that the
    /// caller notices every refusal. QEMU requests only the acknowledgement of the memory table.
    pub acknowledged: bool,
    /// Longest time that the daemon may take to answer a vhost-user message.
    pub reply_timeout: Duration,
}

impl Default for GuestConfig {
    fn default() -> Self {
        Self {
            name: "guest".into(),
            // Leave a hole in the RAM below 4 GiB, as a PC does.
            ram: vec![
                RamRegion {
                    start: 0,
                    size_bytes: 8 << 20,
                },
                RamRegion {
                    start: 1 << 32,
                    size_bytes: 8 << 20,
                },
            ],
            sealed: true,
            huge: false,
            directory: None,
            one_file: false,
            request_queues: 2,
            queue_size: 128,
            features: F_VERSION_1 | F_INDIRECT_DESC | F_EVENT_IDX | F_PROTOCOL_FEATURES,
            slots: 24,
            cut: Cut::Natural,
            mem_slots: false,
            vmm: Vmm::default(),
            acknowledged: true,
            reply_timeout: Duration::from_secs(10),
        }
    }
}

/// Reason why a step of the fake guest failed.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// The daemon refused or dropped a vhost-user message.
    #[error("{guest}: {message}: {error}")]
    Message {
        /// Name of the guest that sent the message.
        guest: String,
        /// Name of the vhost-user message.
        message: &'static str,
        /// Error that the vhost library returned.
        error: vhost::Error,
    },
    /// An operation on the daemon's socket, or on another file descriptor, failed.
    #[error("an operation on the daemon's socket or a file descriptor failed: {0}")]
    Socket(io::Error),
    /// The device broke the rules of a virtqueue.
    #[error("{guest}: queue {queue}: {error}")]
    Ring {
        /// Name of the guest that owns the queue.
        guest: String,
        /// Number of the queue.
        queue: usize,
        /// Rule of the virtqueue that the device broke.
        error: RingError,
    },
    /// The device offers a feature or reports a value that no driver accepts.
    #[error("{0}")]
    Device(String),
    /// No answer arrived in time.
    #[error("{guest}: {in_flight} requests were not answered in time")]
    Late {
        /// Name of the guest that waited.
        guest: String,
        /// Number of requests that the device has not answered.
        in_flight: usize,
    },
    /// The guest has no connection to a daemon.
    #[error("the guest is not connected to a daemon")]
    NoBackend,
}

/// The device configuration as the driver reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Generation that every request must carry.
    pub generation: u64,
    /// Page size in bytes that the device uses.
    pub page_size: u32,
    /// Number of request queues that the device has, without the control queue.
    pub num_request_queues: u16,
    /// Maximum number of pages or ranges in a request.
    pub batch_max: u16,
    /// Maximum number of pools that exist at the same time.
    pub pools_max: u32,
    /// Reserved fields of the configuration, which must be 0.
    pub reserved: [u32; 3],
}

impl DeviceConfig {
    fn decode(b: &[u8]) -> Self {
        let u32_at = |at: usize| {
            u32::from_le_bytes(
                b[at..at + 4]
                    .try_into()
                    .expect("the slice does not have four bytes"),
            )
        };
        let u16_at = |at: usize| {
            u16::from_le_bytes(
                b[at..at + 2]
                    .try_into()
                    .expect("the slice does not have two bytes"),
            )
        };
        Self {
            generation: u64::from_le_bytes(
                b[..8]
                    .try_into()
                    .expect("the slice does not have eight bytes"),
            ),
            page_size: u32_at(8),
            num_request_queues: u16_at(12),
            batch_max: u16_at(14),
            pools_max: u32_at(16),
            reserved: [u32_at(20), u32_at(24), u32_at(28)],
        }
    }
}

/// Addresses of the readable and the writable part of a request in guest memory.
#[derive(Clone, Debug)]
pub struct Placed {
    /// Pieces of the part that the device reads, each with its address and number of bytes.
    pub readable: Vec<(u64, usize)>,
    /// Pieces of the part that the device writes, each with its address and number of bytes.
    pub writable: Vec<(u64, usize)>,
    /// Address of the page for the chain's indirect descriptor table.
    pub table: u64,
}

#[derive(Debug)]
struct Pending {
    queue: usize,
    request: Request,
    generation: u64,
    slot: usize,
    placed: Placed,
}

/// A request that the device has answered, with its answer.
#[derive(Clone, Debug)]
pub struct Done {
    /// Token of the request, as [`FakeGuest::submit`] returned it.
    pub token: u64,
    /// Number of the queue on which the request was sent.
    pub queue: usize,
    /// The request that the guest sent.
    pub request: Request,
    /// Generation that the request carried.
    pub generation: u64,
    /// The answer that the device wrote.
    pub answer: Answer,
}

struct Queue {
    ring: DriverRing,
    kick: EventFd,
    call: EventFd,
    err: EventFd,
    /// Ring index at which the device starts or continues, as SET_VRING_BASE passes it.
    base: u16,
}

struct Link {
    frontend: Frontend,
    /// Socket of the front end (QEMU's side), which [`FakeGuest::hang_up`] shuts down.
    stream: UnixStream,
    offered: u64,
    protocol: VhostUserProtocolFeatures,
    /// Number of memory regions that the guest has sent to the daemon one by one (ADD_MEM_REG).
    slots_known: usize,
    started: bool,
}

/// A simulated guest and its QEMU, without a VM.
pub struct FakeGuest {
    config: GuestConfig,
    ram: Arc<GuestRam>,
    queues: Vec<Queue>,
    slots: Vec<u64>,
    slots_free: Vec<usize>,
    pending: HashMap<u64, Pending>,
    token_next: u64,
    link: Option<Link>,
    features: u64,
    device: Option<DeviceConfig>,
    log: Option<DirtyLog>,
}

impl FakeGuest {
    /// Creates a guest that is not connected to a daemon.
    ///
    /// # Errors
    /// When the kernel refuses memory or descriptors.
    pub fn new(config: GuestConfig) -> io::Result<Self> {
        let ram = match (&config.directory, config.huge, config.one_file) {
            (Some(directory), _, _) => GuestRam::in_directory(&config.ram, directory)?,
            (None, true, _) => GuestRam::huge(&config.ram)?,
            (None, false, true) => GuestRam::in_one_file(&config.ram)?,
            (None, false, false) => GuestRam::new(&config.ram, config.sealed)?,
        };
        let mut queues = Vec::<Queue>::new();
        for _ in 0..=config.request_queues {
            let layout = RingLayout::alloc(&ram, config.queue_size);
            let call = match queues.first() {
                Some(first) if config.vmm.one_interrupt => first.call.try_clone()?,
                _ => EventFd::new(EFD_NONBLOCK)?,
            };
            queues.push(Queue {
                ring: DriverRing::new(ram.clone(), layout),
                kick: EventFd::new(EFD_NONBLOCK)?,
                call,
                err: EventFd::new(EFD_NONBLOCK)?,
                base: 0,
            });
        }
        let slots: Vec<u64> = (0..config.slots).map(|_| ram.alloc(SLOT_PAGES)).collect();
        Ok(Self {
            slots_free: (0..slots.len()).rev().collect(),
            slots,
            config,
            ram,
            queues,
            pending: HashMap::new(),
            token_next: 1,
            link: None,
            features: 0,
            device: None,
            log: None,
        })
    }

    /// Returns the guest's name, for test messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.config.name
    }

    /// Returns the guest's memory.
    #[must_use]
    pub fn ram(&self) -> &Arc<GuestRam> {
        &self.ram
    }

    /// Returns the number of queues, the control queue included.
    #[must_use]
    pub fn num_queues(&self) -> usize {
        self.queues.len()
    }

    /// Returns the ring of a queue.
    #[must_use]
    pub fn ring(&self, queue: usize) -> &DriverRing {
        &self.queues[queue].ring
    }

    /// Returns the descriptor through which a queue's interrupts arrive.
    #[must_use]
    pub fn call_fd(&self, queue: usize) -> &EventFd {
        &self.queues[queue].call
    }

    /// Returns the descriptor through which the device is notified of a queue's requests.
    #[must_use]
    pub fn kick_fd(&self, queue: usize) -> &EventFd {
        &self.queues[queue].kick
    }

    /// Makes the driver use only the first `request_queues` request queues after the next reset, as
    /// the driver of another operating system may.
    pub fn use_fewer_queues(&mut self, request_queues: u16) {
        self.config.request_queues = request_queues;
    }

    /// Returns the ring of a queue. The caller may change it, for example to inject a fault.
    pub fn ring_mut(&mut self, queue: usize) -> &mut DriverRing {
        &mut self.queues[queue].ring
    }

    /// Returns the device configuration that the guest last read, or None before the first
    /// connection.
    #[must_use]
    pub fn device(&self) -> Option<DeviceConfig> {
        self.device
    }

    /// Returns the generation that the guest last read, or 0 if no back end is connected.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.link
            .as_ref()
            .and(self.device)
            .map_or(0, |d| d.generation)
    }

    /// Returns the feature bits that the device offered at this connection, or 0 without a
    /// connection.
    #[must_use]
    pub fn offered_features(&self) -> u64 {
        self.link.as_ref().map_or(0, |l| l.offered)
    }

    /// Returns the feature bits that the guest accepted when it last sent the features.
    #[must_use]
    pub fn accepted_features(&self) -> u64 {
        self.features
    }

    /// Returns the number of requests without an answer.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// Returns the number of requests without an answer that a device with another generation
    /// answers with STALE. It answers GENERATION requests with its generation.
    #[must_use]
    pub fn in_flight_of_generation(&self) -> usize {
        let requests = self.pending.values().map(|pending| &pending.request);
        requests
            .filter(|request| **request != Request::Generation)
            .count()
    }

    /// Returns the vhost-user front end, with which a test sends messages that QEMU would not send.
    /// Returns None while there is no connection to the daemon.
    pub fn frontend(&mut self) -> Option<&mut Frontend> {
        self.link.as_mut().map(|l| &mut l.frontend)
    }

    fn message<T>(&self, message: &'static str, r: vhost::Result<T>) -> Result<T, GuestError> {
        r.map_err(|error| GuestError::Message {
            guest: self.config.name.clone(),
            message,
            error,
        })
    }

    /// Connects and negotiates as QEMU does when a character device opens: features, protocol
    /// features, owner, queue number, call descriptors, configuration. Does not start the rings.
    ///
    /// # Errors
    /// Returns each error on which QEMU drops the connection. The connection is then dropped.
    pub fn connect(&mut self, socket: &Path) -> Result<(), GuestError> {
        self.disconnect();
        let stream = UnixStream::connect(socket).map_err(GuestError::Socket)?;
        self.connect_stream(stream)
    }

    /// Connects and negotiates as [`Self::connect`] does, on a socket that is already open.
    ///
    /// # Errors
    /// Errors of [`Self::connect`].
    pub fn connect_stream(&mut self, stream: UnixStream) -> Result<(), GuestError> {
        let timeout = Some(self.config.reply_timeout);
        stream
            .set_read_timeout(timeout)
            .map_err(GuestError::Socket)?;
        stream
            .set_write_timeout(timeout)
            .map_err(GuestError::Socket)?;
        let same = stream.try_clone().map_err(GuestError::Socket)?;
        let mut fe = Frontend::from_stream(stream, self.queues.len() as u64);
        let offered = self.message("GET_FEATURES", fe.get_features())?;
        if offered & F_PROTOCOL_FEATURES == 0 || offered & F_VERSION_1 == 0 {
            return Err(GuestError::Device(format!(
                "the device offers features {offered:#x} without VERSION_1 or PROTOCOL_FEATURES"
            )));
        }
        let r = fe.get_protocol_features();
        let mut protocol = self.message("GET_PROTOCOL_FEATURES", r)?;
        protocol &= VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
        if !self.config.mem_slots {
            protocol &= !VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
        }
        let r = fe.set_protocol_features(protocol);
        self.message("SET_PROTOCOL_FEATURES", r)?;
        let r = fe.get_queue_num();
        let queues = self.message("GET_QUEUE_NUM", r)?;
        if queues < self.queues.len() as u64 {
            return Err(GuestError::Device(format!(
                "the device has {queues} queues, but the simulated machine needs {}",
                self.queues.len()
            )));
        }
        self.message("SET_OWNER", fe.set_owner())?;
        if protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) && self.config.acknowledged {
            fe.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        for (i, q) in self.queues.iter().enumerate() {
            self.message("SET_VRING_CALL", fe.set_vring_call(i, &q.call))?;
        }
        self.link = Some(Link {
            frontend: fe,
            stream: same,
            offered,
            protocol,
            slots_known: 0,
            started: false,
        });
        self.read_config().inspect_err(|_| self.link = None)?;
        Ok(())
    }

    /// Reads the device configuration, as QEMU does to fill its cache.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub fn read_config(&mut self) -> Result<DeviceConfig, GuestError> {
        let link = self.link.as_mut().ok_or(GuestError::NoBackend)?;
        let r = link.frontend.get_config(
            0,
            CONFIG_BYTES as u32,
            VhostUserConfigFlags::empty(),
            &[0; CONFIG_BYTES],
        );
        let (_, bytes) = self.message("GET_CONFIG", r)?;
        let config = DeviceConfig::decode(&bytes);
        self.device = Some(config);
        Ok(config)
    }

    /// Starts the device as QEMU's `vhost_dev_start` does: sends the features, the memory table and
    /// each ring with its base index, and enables the rings last. Then reads the configuration
    /// again and kicks queues that have requests in flight.
    ///
    /// # Errors
    /// When the daemon refuses one of the messages.
    pub fn start(&mut self) -> Result<(), GuestError> {
        self.set_features()?;
        self.set_mem_table()?;
        for i in 0..self.queues.len() {
            self.start_ring(i)?;
        }
        self.enable_rings(true)?;
        self.link()?.started = true;
        self.read_config()?;
        for q in &self.queues {
            if q.ring.in_flight() > 0 {
                q.kick.write(1).map_err(GuestError::Socket)?;
            }
        }
        Ok(())
    }

    fn link(&mut self) -> Result<&mut Link, GuestError> {
        self.link.as_mut().ok_or(GuestError::NoBackend)
    }

    fn set_features(&mut self) -> Result<(), GuestError> {
        let log = if self.log.is_some() { F_LOG_ALL } else { 0 };
        let wanted = self.config.features | log;
        let link = self.link()?;
        let features = wanted & link.offered;
        let r = link.frontend.set_features(features);
        self.message("SET_FEATURES", r)?;
        self.features = features;
        let event_idx = features & F_EVENT_IDX != 0;
        for q in &mut self.queues {
            q.ring.set_event_idx(event_idx);
        }
        Ok(())
    }

    /// Sends the memory table. The caller may send it again while rings are running, as QEMU does
    /// at each change of the memory map.
    ///
    /// # Errors
    /// When the daemon refuses the memory table.
    pub fn set_mem_table(&mut self) -> Result<(), GuestError> {
        self.set_mem_table_of(self.config.ram.len())
    }

    /// Sends a memory map that consists of the first `count` regions. With memory slots, sends a
    /// message for each region to add or remove; otherwise sends one message.
    ///
    /// # Errors
    /// When the daemon refuses the memory map.
    pub fn set_mem_table_of(&mut self, count: usize) -> Result<(), GuestError> {
        let acknowledged = self.config.acknowledged;
        let link = self.link()?;
        if link.protocol.contains(VhostUserProtocolFeatures::REPLY_ACK) {
            link.frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        let done = self.change_mem_table(count);
        if !acknowledged {
            let frontend = &self.link()?.frontend;
            frontend.set_hdr_flags(VhostUserHeaderFlag::empty());
        }
        done
    }

    fn change_mem_table(&mut self, count: usize) -> Result<(), GuestError> {
        let regions = self.ram.vhost_regions();
        let slots = VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS;
        let link = self.link()?;
        if !link.protocol.contains(slots) {
            let r = link.frontend.set_mem_table(&regions[..count]);
            self.message("SET_MEM_TABLE", r)?;
            return Ok(());
        }
        let known = link.slots_known;
        for region in regions.iter().take(known).skip(count) {
            let r = self.link()?.frontend.remove_mem_region(region);
            self.message("REM_MEM_REG", r)?;
        }
        for region in regions.iter().take(count).skip(known) {
            let r = self.link()?.frontend.add_mem_region(region);
            self.message("ADD_MEM_REG", r)?;
        }
        self.link()?.slots_known = count;
        Ok(())
    }

    fn set_ring_addr(&mut self, queue: usize) -> Result<(), GuestError> {
        let layout = self.queues[queue].ring.layout();
        let logged = self.log.is_some();
        let addr = VringConfigData {
            queue_max_size: layout.size,
            queue_size: layout.size,
            flags: u32::from(logged),
            desc_table_addr: self.ram.host_addr(layout.desc),
            used_ring_addr: self.ram.host_addr(layout.used),
            avail_ring_addr: self.ram.host_addr(layout.avail),
            log_addr: logged.then_some(layout.used),
        };
        let r = self.link()?.frontend.set_vring_addr(queue, &addr);
        self.message("SET_VRING_ADDR", r)
    }

    fn start_ring(&mut self, i: usize) -> Result<(), GuestError> {
        let (size, base) = (self.queues[i].ring.layout().size, self.queues[i].base);
        let r = self.link()?.frontend.set_vring_num(i, size);
        self.message("SET_VRING_NUM", r)?;
        let r = self.link()?.frontend.set_vring_base(i, base);
        self.message("SET_VRING_BASE", r)?;
        self.set_ring_addr(i)?;
        let link = self.link.as_ref().ok_or(GuestError::NoBackend)?;
        let q = &self.queues[i];
        self.message("SET_VRING_KICK", link.frontend.set_vring_kick(i, &q.kick))?;
        self.message("SET_VRING_CALL", link.frontend.set_vring_call(i, &q.call))?;
        self.message("SET_VRING_ERR", link.frontend.set_vring_err(i, &q.err))
    }

    /// Stops the rings as QEMU's `vhost_dev_stop` does at a pause or a migration. Disables each
    /// ring first. GET_VRING_BASE then waits until the ring is drained. Returns the base index of
    /// each ring.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub fn stop(&mut self) -> Result<Vec<u16>, GuestError> {
        self.enable_rings(false)?;
        self.get_vring_bases()
    }

    fn enable_rings(&mut self, enable: bool) -> Result<(), GuestError> {
        for i in 0..self.queues.len() {
            let r = self.link()?.frontend.set_vring_enable(i, enable);
            self.message("SET_VRING_ENABLE", r)?;
        }
        Ok(())
    }

    /// Sends GET_VRING_BASE for every queue, without disabling the queues first. Returns the base
    /// index of each ring.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub fn get_vring_bases(&mut self) -> Result<Vec<u16>, GuestError> {
        for i in 0..self.queues.len() {
            let r = self.link()?.frontend.get_vring_base(i);
            let base = self.message("GET_VRING_BASE", r)?;
            self.queues[i].base = u16::try_from(base).map_err(|_| {
                GuestError::Device(format!(
                    "the daemon returned the invalid ring base {base} of queue {i}"
                ))
            })?;
        }
        self.link()?.started = false;
        Ok(self.queues.iter().map(|q| q.base).collect())
    }

    /// Resets the device as a reboot does: stops the rings, sends RESET_DEVICE, forgets all
    /// requests in flight and empties the rings. The next [`Self::start`] finds another generation.
    ///
    /// With [`Vmm::silent_resets`], only disables the rings, and places new rings elsewhere in
    /// guest memory.
    ///
    /// # Errors
    /// When the daemon does not answer, or does not offer RESET_DEVICE.
    pub fn reset(&mut self) -> Result<(), GuestError> {
        if self.config.vmm.silent_resets {
            self.enable_rings(false)?;
            self.link()?.started = false;
            for q in &mut self.queues {
                let layout = RingLayout::alloc(&self.ram, self.config.queue_size);
                q.ring = DriverRing::new(self.ram.clone(), layout);
            }
        } else {
            if self.link()?.started {
                self.stop()?;
            }
            let r = self.link()?.frontend.reset_device();
            self.message("RESET_DEVICE", r)?;
        }
        self.queues
            .truncate(1 + usize::from(self.config.request_queues));
        for q in &mut self.queues {
            q.ring.reset();
            q.base = 0;
        }
        self.pending.clear();
        self.slots_free = (0..self.slots.len()).rev().collect();
        Ok(())
    }

    /// Drops the connection, because the daemon has ended or to simulate a guest that has ended.
    /// The next start of the rings continues after the last used element, as with QEMU, or skips the
    /// requests in flight ([`Vmm::skips_in_flight`]).
    pub fn disconnect(&mut self) {
        self.link = None;
        for q in &mut self.queues {
            q.base = match self.config.vmm.skips_in_flight {
                true => q.ring.avail_idx_in_memory(),
                false => q.ring.used_idx_in_memory(),
            };
        }
    }

    /// Closes the connection and waits until the daemon has closed its end, too. From then on the
    /// daemon must not have the guest's memory mapped.
    ///
    /// # Errors
    /// When the daemon does not close its end in time.
    pub fn hang_up(&mut self) -> Result<(), GuestError> {
        let link = self.link.take().ok_or(GuestError::NoBackend)?;
        let mut stream = &link.stream;
        stream
            .shutdown(Shutdown::Write)
            .map_err(GuestError::Socket)?;
        let mut sink = [0; 256];
        while stream.read(&mut sink).map_err(GuestError::Socket)? > 0 {}
        self.disconnect();
        Ok(())
    }

    /// Switches on a new dirty log while rings are running, as QEMU does for a migration. Returns
    /// the log.
    ///
    /// # Errors
    /// When the daemon refuses the log.
    pub fn start_log(&mut self) -> Result<&DirtyLog, GuestError> {
        let log = DirtyLog::new(&self.ram).map_err(GuestError::Socket)?;
        self.start_this_log(log)
    }

    /// Switches on the given dirty log, which may have any size. Returns the log.
    ///
    /// # Errors
    /// When the daemon refuses the log.
    pub fn start_this_log(&mut self, log: DirtyLog) -> Result<&DirtyLog, GuestError> {
        let region = log.region();
        let r = self.link()?.frontend.set_log_base(0, Some(region));
        self.message("SET_LOG_BASE", r)?;
        self.log = Some(log);
        self.set_features()?;
        for i in 0..self.queues.len() {
            self.set_ring_addr(i)?;
        }
        Ok(self.log.as_ref().expect("the guest has no dirty log"))
    }

    /// Returns the dirty log, or None if no dirty log is switched on.
    #[must_use]
    pub fn log(&self) -> Option<&DirtyLog> {
        self.log.as_ref()
    }
}
