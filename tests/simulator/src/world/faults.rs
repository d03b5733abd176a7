// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Faults of a simulated world: daemons, connections and machines stop, memory is restored from a
//! snapshot, and VMs migrate.
//!
//! A VMM sends its messages in the order in which QEMU sends them. It closes the connection to a
//! daemon that does not answer a message.

use super::{Ghost, Late, Snapshot, World, mix};
use crate::driver::DriverModel;
use crate::kernel::Kernel;
use crate::mutation::Mutation;

/// Number of steps after which a back end with a broken rule writes data that it should have
/// written before.
const LATE_STEPS: usize = 30;

impl World {
    // ---- faults of daemons --------------------------------------------------------------------

    pub(super) fn kill_after(&mut self, h: usize, checks: u8) {
        if let Some(host) = &self.hosts[h] {
            host.death.trigger_after(checks.into());
            if checks == 0 {
                self.kill(h);
            }
        }
    }

    /// Kills the daemon of a host, as kill -9 does.
    pub(super) fn kill(&mut self, h: usize) {
        for guest in &mut self.guests {
            if guest.machine.link.as_ref().is_some_and(|l| l.host == h) {
                drop(guest.unlink());
            }
        }
        self.ghosts.retain(|ghost| ghost.link.host != h);
        self.hosts[h] = None;
    }

    pub(super) fn start_host(&mut self, h: usize) {
        if self.hosts[h].is_none() {
            self.hosts[h] = Some(self.boot());
        }
    }

    pub(super) fn freeze(&mut self, h: usize, frozen: bool) {
        if let Some(host) = &mut self.hosts[h] {
            host.frozen = frozen;
        }
    }

    pub(super) fn resize(&mut self, h: usize, kib: u16) {
        if let Some(host) = &self.hosts[h] {
            host.resize(u64::from(kib) << 10);
        }
    }

    pub(super) fn limit(&mut self, h: usize, g: usize, kib: u16) {
        if let Some(host) = &self.hosts[h] {
            let mut quota = host.vm(g).config.quota;
            quota.limit_bytes = Some(u64::from(kib) << 10);
            host.set_quota(g, quota);
        }
    }

    pub(super) fn freeze_vm(&mut self, h: usize, g: usize, frozen: bool) {
        if let Some(host) = &self.hosts[h] {
            host.freeze_vm(g, frozen);
        }
    }

    fn answers(&self, h: usize) -> bool {
        self.hosts[h].as_ref().is_some_and(|host| !host.frozen)
    }

    // ---- faults of connections ----------------------------------------------------------------

    pub(super) fn hang_up_after(&mut self, g: usize, checks: u8) {
        if let Some(link) = &self.guests[g].machine.link {
            link.hang_up.trigger_after(checks.into());
            if checks == 0 {
                self.hang_up(g);
            }
        }
    }

    /// Closes a guest's connection from the VMM's side. The daemon notices that in a later step.
    pub(super) fn hang_up(&mut self, g: usize) {
        if let Some(link) = self.guests[g].unlink() {
            link.hang_up.trigger();
            self.ghosts.push(Ghost { guest: g, link });
        }
    }

    /// Lets the daemon end the connections that a guest's VMM has closed, as its control threads
    /// do.
    pub(super) fn notice(&mut self, g: usize) {
        let ghosts = std::mem::take(&mut self.ghosts);
        for ghost in ghosts {
            if ghost.guest == g && self.answers(ghost.link.host) {
                ghost.link.session.end();
            } else {
                self.ghosts.push(ghost);
            }
        }
    }

    /// Connects a guest's VMM to the daemon, and starts the device if the VM runs.
    pub(super) fn connect(&mut self, g: usize) {
        if self.link(g) {
            self.start(g);
        }
    }

    /// Connects a guest's VMM to the daemon and reads the generation. Returns false if no daemon
    /// answers, or if the old connection still exists. The VMM tries again later.
    fn link(&mut self, g: usize) -> bool {
        let h = self.guests[g].home;
        if self.guests[g].machine.link.is_some() || !self.answers(h) {
            return false;
        }
        let Some(host) = &self.hosts[h] else {
            return false;
        };
        let guest = &mut self.guests[g];
        let Some(generation) = guest.machine.connect(g, h, host) else {
            return false;
        };
        guest.earlier = guest.oracle.model.generation();
        guest.oracle.begin(generation);
        true
    }

    /// Connects a guest's VMM with unsealed memory, which another process could truncate. The
    /// daemon must refuse that memory.
    pub(super) fn refuse(&mut self, g: usize) {
        if !self.link(g) {
            return;
        }
        let guest = &mut self.guests[g];
        if guest.machine.set_unsealed_memory().is_ok() {
            let what = "memory that could be truncated was taken".into();
            guest.oracle.fail("memory", what);
        }
        // End the connection, as the daemon's control thread does after the daemon has refused a
        // message.
        if let Some(link) = guest.unlink() {
            link.session.end();
        }
    }

    fn start(&mut self, g: usize) {
        let guest = &mut self.guests[g];
        if guest.runs() && guest.machine.link.is_some() && !guest.machine.started() {
            let transport = &guest.kernel.driver.transport;
            if let Err(error) = guest.machine.start(transport) {
                guest.oracle.fail("message", error);
            }
        }
    }

    /// Returns whether the guest's VMM is connected to a daemon that answers. Closes the connection
    /// to a daemon that does not answer.
    fn can_talk(&mut self, g: usize) -> bool {
        let Some(link) = &self.guests[g].machine.link else {
            return false;
        };
        let answers = self.answers(link.host);
        if !answers {
            self.hang_up(g);
        }
        answers
    }

    /// Stops a guest's rings, if they run and the daemon answers.
    fn stop(&mut self, g: usize) {
        if !self.guests[g].machine.started() || !self.can_talk(g) {
            return;
        }
        self.observe(g);
        let guest = &mut self.guests[g];
        let link = guest.machine.link.as_ref();
        link.iter().for_each(|link| link.hang_up.end_drain());
        if let Err(error) = guest.machine.stop() {
            guest.oracle.fail("message", error);
        }
        if self.is(Mutation::DrainSkipped) {
            self.hold_back(g);
        }
    }

    /// Simulates a back end that publishes answers before it writes their page data: overwrites the
    /// data now, and writes the right data some steps later.
    fn hold_back(&mut self, g: usize) {
        let transport = &self.guests[g].kernel.driver.transport;
        for (queue, requests) in transport.pending.iter().enumerate() {
            for (position, pending) in requests.iter().enumerate() {
                if transport.used(queue, position).is_none() {
                    break;
                }
                for &addr in &pending.data {
                    let mut bytes = vec![0; 64];
                    transport.ram().read(addr, &mut bytes);
                    transport.ram().write(addr, &[0xee; 64]);
                    self.late.push(Late {
                        due: self.at + LATE_STEPS,
                        guest: g,
                        addr,
                        bytes,
                    });
                }
            }
        }
    }

    /// Changes the memory table while the rings run: removes a region and adds it again.
    pub(super) fn change_memory(&mut self, g: usize) {
        if self.guests[g].machine.started() && self.can_talk(g) {
            let guest = &mut self.guests[g];
            for whole in [false, true] {
                if let Err(error) = guest.machine.set_mem_table(whole) {
                    guest.oracle.fail("message", error);
                }
            }
        }
    }

    // ---- faults of machines -------------------------------------------------------------------

    pub(super) fn pause(&mut self, g: usize) {
        if self.guests[g].runs() {
            self.stop(g);
            let now = self.now_ns();
            let guest = &mut self.guests[g];
            guest.paused_at_ns = Some(guest.now_ns(now));
        }
    }

    /// Prepares a pause of the VM that begins after `checks` more checks of the connection, in the
    /// middle of a worker's scheduling slice. At that moment the daemon's clock jumps, so that the
    /// drain has no time left for the rest of the slice.
    pub(super) fn pause_late(&mut self, g: usize, checks: u8) {
        let machine = &self.guests[g].machine;
        if let (true, Some(link)) = (machine.started(), &machine.link)
            && let Some(host) = &self.hosts[link.host]
        {
            host.drain_after(checks.into(), &link.session, &link.hang_up);
        }
    }

    pub(super) fn go_on(&mut self, g: usize) {
        let now = self.now_ns();
        let guest = &mut self.guests[g];
        if let Some(paused_at_ns) = guest.paused_at_ns.take() {
            guest.behind_ns = now - paused_at_ns;
            self.restart(g);
        }
    }

    /// Starts a guest's rings if the VM runs and a daemon answers.
    fn restart(&mut self, g: usize) {
        if self.guests[g].runs() && !self.guests[g].machine.started() && self.can_talk(g) {
            self.start(g);
        }
    }

    /// Stops the rings and sends RESET_DEVICE, if the daemon answers. The daemon then drops the
    /// VM's pages and begins another generation.
    fn reset_device(&mut self, g: usize) {
        self.stop(g);
        if self.can_talk(g) {
            let guest = &mut self.guests[g];
            match guest.machine.reset() {
                Ok(generation) => {
                    guest.earlier = guest.oracle.model.generation();
                    guest.oracle.begin(generation);
                }
                Err(error) => guest.oracle.fail("message", error),
            }
        }
    }

    /// Reboots the VM, as after a crash: the contents of its memory are lost.
    pub(super) fn reset(&mut self, g: usize) {
        self.reset_device(g);
        let (seed, now) = (self.setup.seed, self.now_ns());
        let guest = &mut self.guests[g];
        guest
            .oracle
            .search_for_foreign_pages(&guest.kernel.driver.transport);
        guest.boots += 1;
        let cookie = mix(seed, 100 * guest.boots + g as u64) >> 2;
        let driver = DriverModel::new(
            guest.machine.transport(),
            cookie,
            self.setup.retain[g],
            self.setup.mutation,
        );
        guest.kernel.drain(&mut guest.storage);
        guest.kernel = Kernel::new(g, driver);
        guest.oracle.rings_changed(&guest.kernel.driver.transport);
        guest.machine.bases = None;
        (guest.behind_ns, guest.paused_at_ns) = (now, None);
        self.restart(g);
    }

    /// Takes a snapshot of a VM, as QEMU's savevm does: stops the rings for it, and starts them
    /// again.
    pub(super) fn snapshot(&mut self, g: usize) {
        self.stop(g);
        self.guests[g].snapshot = Some(self.saved(g));
        self.restart(g);
    }

    fn saved(&mut self, g: usize) -> Snapshot {
        let now = self.now_ns();
        let guest = &mut self.guests[g];
        guest.kernel.drain(&mut guest.storage);
        let rings = guest.kernel.driver.transport.rings.iter();
        let used = rings.map(|ring| ring.used_idx_in_memory()).collect();
        Snapshot {
            kernel: guest.kernel.clone(),
            storage: guest.storage.clone(),
            ram: guest.machine.ram.snapshot(),
            bases: guest.machine.bases.clone().unwrap_or(used),
            now_ns: guest.now_ns(now),
        }
    }

    /// Restores memory, disk and clock of a VM from its snapshot, as QEMU's loadvm does.
    pub(super) fn rollback(&mut self, g: usize) {
        if let Some(snapshot) = self.guests[g].snapshot.take() {
            self.restore(g, &snapshot);
            self.guests[g].storage = snapshot.storage.clone();
            self.guests[g].snapshot = Some(snapshot);
            self.restart(g);
        }
    }

    /// Resets the device, and restores memory and clock of a VM.
    fn restore(&mut self, g: usize, snapshot: &Snapshot) {
        self.reset_device(g);
        let now = self.now_ns();
        let guest = &mut self.guests[g];
        guest
            .oracle
            .search_for_foreign_pages(&guest.kernel.driver.transport);
        guest.machine.ram.restore(&snapshot.ram);
        guest.kernel = snapshot.kernel.clone();
        guest.machine.bases = Some(snapshot.bases.clone());
        (guest.behind_ns, guest.paused_at_ns) = (now - snapshot.now_ns, None);
        // Notify the guest of a changed configuration, so that its driver reads the generation
        // again.
        guest.machine.notify_config();
        guest.oracle.rings_changed(&guest.kernel.driver.transport);
    }

    /// Hibernates the VM and resumes it, unless a bio is in flight: the guest saves its memory,
    /// writes it to a swap file, and restores it after a reset.
    pub(super) fn hibernate(&mut self, g: usize) {
        self.files(g, |kernel, storage| while kernel.disk(storage, 0) {});
        if !self.guests[g].runs() || self.guests[g].kernel.busy() {
            return;
        }
        self.guests[g].kernel.driver.forget_all();
        self.stop(g);
        let snapshot = self.saved(g);
        let guest = &mut self.guests[g];
        guest.version = Kernel::write_image(&mut guest.storage, guest.version);
        self.restore(g, &snapshot);
        self.guests[g].kernel.driver.resume();
        self.restart(g);
    }

    /// Restores a VM's disk from its snapshot while the VM is off. Then boots the VM.
    pub(super) fn revert(&mut self, g: usize) {
        if let Some(snapshot) = &self.guests[g].snapshot {
            let storage = snapshot.storage.clone();
            self.reset(g);
            self.guests[g].storage = storage;
        }
    }

    // ---- migration of VMs ---------------------------------------------------------------------

    pub(super) fn migrate(&mut self, g: usize) {
        if self.hosts.len() < 2 || self.guests[g].machine.migrates() {
            return;
        }
        // Close the connection to a daemon that does not answer. The migration continues without a
        // daemon.
        self.can_talk(g);
        let guest = &mut self.guests[g];
        if let Err(error) = guest.machine.begin_migration() {
            guest.oracle.fail("message", error);
        }
    }

    /// Ends a migration: stops the VM here and continues it at the other host. Cancels the
    /// migration if the daemon of the other host does not answer.
    pub(super) fn arrive(&mut self, g: usize) {
        let to = (self.guests[g].home + 1) % self.hosts.len();
        if !self.guests[g].machine.migrates() {
            return;
        }
        if !self.answers(to) {
            self.cancel(g);
            return;
        }
        self.stop(g);
        self.can_talk(g);
        let guest = &mut self.guests[g];
        guest.machine.complete_migration();
        if let Some(link) = guest.unlink() {
            link.session.end();
        }
        guest.home = to;
        self.connect(g);
    }

    pub(super) fn cancel(&mut self, g: usize) {
        if !self.guests[g].machine.migrates() {
            return;
        }
        self.can_talk(g);
        let guest = &mut self.guests[g];
        if let Err(error) = guest.machine.cancel_migration() {
            guest.oracle.fail("message", error);
        }
    }
}
