// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A virtual machine and its VMM: memory, interrupts, and QEMU's messages in QEMU's order. The VMM
//! passes its messages to the daemon's real message handler.
//!
//! The VMM caches the part of the configuration that the guest may read. It notifies the guest when
//! a back end starts or is lost, unless it is a generic vhost-user front end, which never does. It
//! starts the rings of the next back end where the last one stopped. Out of scope: when a VMM connects, starts or stops a device.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, MutexGuard};

use tmem_model::daemon::{RingSetup, generation, notifiers, set_up_ring, stop_ring};
use tmem_model::frontend::{F_EVENT_IDX, F_INDIRECT_DESC, F_RETAIN, F_VERSION_1};
use tmem_model::memory::PAGE_BYTES;
use tmem_model::{DirtyLog, GuestRam};
use tmemd::parts::{Device, Session};
use vhost::vhost_user::VhostUserBackendReqHandlerMut;
use vhost::vhost_user::message::{VhostUserLog, VhostUserMemoryRegion, VhostUserVirtioFeatures};

use crate::host::{Fuse, SimulatedDaemon};
use crate::mutation::Mutation;
use crate::transport::{Layout, Transport, ram};

/// Connection of a VMM to a daemon.
pub struct Link {
    /// Number of the host on which the daemon runs.
    pub host: usize,
    /// The daemon's side of the connection.
    pub session: Session,
    /// Trigger that makes the VMM close the connection after a given number of the daemon's checks
    /// that the front end is connected. The daemon makes this check each time before it uses guest
    /// memory.
    pub hang_up: Arc<Fuse>,
    /// The VMM's end of the socket.
    _stream: UnixStream,
    /// Whether the VMM has started the rings on this connection.
    pub started: bool,
}

/// State of a migration at the source host.
pub struct Migration {
    /// Dirty logs of the migration, a new one for each start of the rings. The VMM reads a log when
    /// the rings are stopped or lost.
    logs: Vec<DirtyLog>,
    /// Guest memory that the VMM sent at the beginning of the migration.
    base: Vec<Vec<u8>>,
}

/// Hardware and VMM of one guest.
pub struct Machine {
    /// The guest's memory.
    pub ram: Arc<GuestRam>,
    /// Addresses of the driver's rings and buffers.
    pub layout: Arc<Layout>,
    /// Kick descriptors, through which the guest notifies the device.
    pub kicks: Vec<OwnedFd>,
    calls: Vec<OwnedFd>,
    /// Generation in the device's configuration, as the VMM reports it to the guest; 0 without a
    /// back end.
    pub generation: u64,
    /// Whether an interrupt is pending that notifies the guest of a changed device configuration.
    pub config_irq: bool,
    /// Whether the front end notifies the guest of a changed device configuration.
    notifies: bool,
    /// Connection of the VMM to the daemon, if there is one.
    pub link: Option<Link>,
    /// Ring indices at which the next start of the rings continues. With None, each ring continues
    /// after its last used element.
    pub bases: Option<Vec<u16>>,
    migration: Option<Migration>,
    event_idx: bool,
    indirect: bool,
    retain: bool,
    mutation: Option<Mutation>,
}

/// Text of the error with which the daemon refused a message.
pub type Refused = String;

type Done = Result<(), Refused>;

fn refused<T>(message: &str, result: vhost::vhost_user::Result<T>) -> Result<T, Refused> {
    result.map_err(|error| format!("{message}: {error}"))
}

fn device(session: &Session) -> MutexGuard<'_, Device> {
    session
        .device()
        .lock()
        .expect("another thread panicked while it held the device's lock")
}

fn consume(fd: &OwnedFd) -> bool {
    rustix::io::read(fd, &mut [0; 8]).is_ok()
}

impl Machine {
    /// Creates a machine that is not connected to a daemon.
    pub fn new(
        queues: usize,
        (event_idx, indirect, retain): (bool, bool, bool),
        notifies: bool,
        mutation: Option<Mutation>,
    ) -> Machine {
        let ram = GuestRam::new(&ram(), true).expect("cannot create the guest's memory");
        let layout = Arc::new(Layout::new(&ram, queues));
        Machine {
            ram,
            layout,
            kicks: notifiers(queues),
            calls: notifiers(queues),
            generation: 0,
            config_irq: false,
            notifies,
            link: None,
            bases: None,
            migration: None,
            event_idx,
            indirect,
            retain,
            mutation,
        }
    }

    /// Returns the machine's virtqueues in their empty state.
    pub fn transport(&self) -> Transport {
        Transport::new(&self.ram, &self.layout, self.event_idx, self.indirect)
    }

    /// Takes the interrupts of a queue. Returns whether there was any.
    pub fn interrupted(&self, queue: usize) -> bool {
        consume(&self.calls[queue])
    }

    /// Returns whether the VMM has started the rings.
    pub fn started(&self) -> bool {
        self.link.as_ref().is_some_and(|link| link.started)
    }

    /// Returns whether a migration is in progress, during which the daemon logs the pages that it
    /// writes.
    pub fn migrates(&self) -> bool {
        self.migration.is_some()
    }

    fn link(&mut self) -> Result<&mut Link, Refused> {
        self.link.as_mut().ok_or_else(|| "no backend".into())
    }

    /// Connects to the daemon of a host, and returns the generation of the device. Returns None if
    /// the daemon refuses, because the VM already has a connection.
    pub fn connect(&mut self, guest: usize, number: usize, host: &SimulatedDaemon) -> Option<u64> {
        let hang_up = Fuse::new();
        let (session, stream) = host.connect(guest, &hang_up)?;
        let generation = generation(&mut device(&session));
        self.link = Some(Link {
            host: number,
            session,
            hang_up,
            _stream: stream,
            started: false,
        });
        Some(generation)
    }

    fn features(&self) -> u64 {
        let bit = |on: bool, bit: u64| if on { bit } else { 0 };
        F_VERSION_1
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits()
            | bit(self.event_idx, F_EVENT_IDX)
            | bit(self.indirect, F_INDIRECT_DESC)
            | bit(self.retain, F_RETAIN)
            | bit(
                self.migration.is_some(),
                VhostUserVirtioFeatures::LOG_ALL.bits(),
            )
    }

    /// Sends the memory table to the daemon. It contains all memory if `whole` is true, and
    /// otherwise only the first region.
    pub fn set_mem_table(&mut self, whole: bool) -> Done {
        let regions = self
            .ram
            .shared_regions()
            .expect("cannot duplicate the descriptors of guest memory");
        let count = if whole { regions.len() } else { 1 };
        let (specs, files): (Vec<_>, Vec<_>) = regions
            .into_iter()
            .take(count)
            .map(|(r, addr, file)| {
                let spec = VhostUserMemoryRegion::new(r.start, r.size_bytes, addr, 0);
                (spec, file)
            })
            .unzip();
        let link = self.link()?;
        let r = device(&link.session).set_mem_table(&specs, files, None);
        refused("SET_MEM_TABLE", r).map(drop)
    }

    /// Sends a memory table with an unsealed file, which could be truncated. The daemon must refuse
    /// it.
    pub fn set_unsealed_memory(&mut self) -> Done {
        let ram = GuestRam::new(&ram(), false).expect("cannot create the guest's memory");
        let mut regions = ram
            .shared_regions()
            .expect("cannot duplicate the descriptors of guest memory");
        let (region, addr, file) = regions.remove(0);
        let spec = VhostUserMemoryRegion::new(region.start, region.size_bytes, addr, 0);
        let link = self.link()?;
        let r = device(&link.session).set_mem_table(&[spec], vec![file], None);
        refused("SET_MEM_TABLE", r).map(drop)
    }

    /// Starts the rings at the indices at which they stopped, as QEMU's `vhost_dev_start` does.
    /// `transport` contains the driver's rings.
    pub fn start(&mut self, transport: &Transport) -> Done {
        let features = self.features();
        let r = device(&self.link()?.session).set_features(features);
        refused("SET_FEATURES", r)?;
        self.set_mem_table(true)?;
        let mut bases: Vec<u16> = match self.bases.take() {
            Some(bases) => bases,
            None => {
                let rings = transport.rings.iter();
                rings.map(|ring| ring.used_idx_in_memory()).collect()
            }
        };
        if self.mutation == Some(Mutation::ReplaySkipped) {
            let rings = transport.rings.iter();
            bases = rings.map(|ring| ring.avail_idx_in_memory()).collect();
        }
        for (queue, base) in bases.into_iter().enumerate() {
            self.start_ring(queue, base)?;
        }
        self.set_log_base()?;
        let queues = self.kicks.len();
        let link = self.link()?;
        let mut device = device(&link.session);
        for queue in 0..queues {
            refused("ENABLE", device.set_vring_enable(queue as u32, true))?;
        }
        let generation = generation(&mut device);
        drop(device);
        link.started = true;
        if self.mutation == Some(Mutation::GenerationUnchecked) {
            for pending in transport.pending.iter().flatten() {
                self.ram.write(pending.page, &generation.to_le_bytes());
            }
        }
        self.generation = generation;
        self.notify_config();
        self.kicks.iter().for_each(crate::driver::kick);
        Ok(())
    }

    fn start_ring(&mut self, queue: usize, base: u16) -> Done {
        let layout = self.layout.rings[queue];
        let addresses = [layout.desc, layout.used, layout.avail].map(|at| self.ram.host_addr(at));
        let link = self.link.as_ref().ok_or("no backend")?;
        let ring = RingSetup {
            queue,
            size: layout.size,
            base,
            addresses,
            kick: &self.kicks[queue],
            call: &self.calls[queue],
        };
        set_up_ring(&mut device(&link.session), &ring)
    }

    /// Stops the rings. When this function returns, the daemon no longer uses them.
    pub fn stop(&mut self) -> Done {
        let queues = self.kicks.len();
        let link = self.link()?;
        let mut device = device(&link.session);
        let mut bases = Vec::new();
        for queue in 0..queues as u32 {
            refused("ENABLE", device.set_vring_enable(queue, false))?;
        }
        for queue in 0..queues {
            bases.push(stop_ring(&mut device, queue)?);
        }
        drop(device);
        link.started = false;
        self.bases = Some(bases);
        Ok(())
    }

    /// Sends RESET_DEVICE to the daemon. Returns the new generation.
    pub fn reset(&mut self) -> Result<u64, Refused> {
        let kept = self.mutation == Some(Mutation::GenerationKept);
        let link = self.link()?;
        let mut device = device(&link.session);
        if !kept {
            refused("RESET_DEVICE", device.reset_device())?;
        }
        Ok(generation(&mut device))
    }

    /// Drops the connection to the daemon and notifies the guest. A migration continues, and the
    /// next back end gets a dirty log of its own when it starts. Returns the connection, or None if
    /// there is none.
    pub fn unlink(&mut self) -> Option<Link> {
        let link = self.link.take()?;
        if link.started {
            self.bases = None;
            if self.mutation == Some(Mutation::LastLogUnread)
                && let Some(migration) = &mut self.migration
            {
                migration.logs.pop();
            }
        }
        self.generation = 0;
        self.notify_config();
        Some(link)
    }

    /// Notifies the guest of a changed device configuration, if the front end can.
    pub fn notify_config(&mut self) {
        self.config_irq = self.notifies;
    }

    /// Sends a new dirty log without marks to the daemon, if a migration is in progress.
    fn set_log_base(&mut self) -> Done {
        let Some(migration) = &mut self.migration else {
            return Ok(());
        };
        let log = DirtyLog::new(&self.ram).expect("cannot create the guest's memory");
        let file = log.file().expect("cannot duplicate the log's descriptor");
        let spec = VhostUserLog::new(log.size_bytes(), 0);
        migration.logs.push(log);
        let r = device(&self.link()?.session).set_log_base(&spec, file);
        refused("SET_LOG_BASE", r)
    }

    /// Begins a migration: the VMM sends all guest memory, and from now on the daemon logs pages
    /// that it writes.
    pub fn begin_migration(&mut self) -> Done {
        self.ram.track_written(true);
        let (logs, base) = (Vec::new(), self.ram.snapshot());
        self.migration = Some(Migration { logs, base });
        // Do not send a log while the rings are stopped, because the VMM sends one when it starts
        // them.
        if !self.started() {
            return Ok(());
        }
        self.set_log_base()?;
        let features = self.features();
        let r = device(&self.link()?.session).set_features(features);
        refused("SET_FEATURES", r)
    }

    /// Ends the migration: changes the guest's memory to what the destination has. A page that was
    /// not logged as written has the contents that were sent at the beginning of the migration. The
    /// rings must be stopped. The VMM itself logs the pages of the used rings.
    pub fn complete_migration(&mut self) {
        let Some(Migration { logs, base }) = self.migration.take() else {
            return;
        };
        let mut written = self.ram.track_written(false);
        written.extend(self.layout.rings.iter().map(|ring| ring.used / PAGE_BYTES));
        let lost = self.mutation == Some(Mutation::DirtyLogLost);
        for page in self.ram.changed_pages(&base) {
            let logged = !lost && logs.iter().any(|log| log.is_dirty(page));
            if !written.contains(&page) && !logged {
                self.ram.restore_page(&base, page);
            }
        }
        // Use other notifiers, because the destination has another VMM. So a daemon that hangs at
        // the source gets none of the guest's kicks.
        self.kicks = notifiers(self.kicks.len());
        self.calls = notifiers(self.calls.len());
    }

    /// Cancels the migration. The VM stays at the source.
    pub fn cancel_migration(&mut self) -> Done {
        if self.migration.take().is_none() {
            return Ok(());
        }
        self.ram.track_written(false);
        if !self.started() {
            return Ok(());
        }
        let features = self.features();
        let r = device(&self.link()?.session).set_features(features);
        refused("SET_FEATURES", r)
    }
}
