// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The simulated world: hosts, guests and their time. It executes the steps of a script, one after
//! the other.
//!
//! Time passes only in steps. If the deadline of a fetch falls into a step, the fetch ends at the
//! deadline. Every random number is drawn from the setup's seed and the step's own numbers. If the
//! steps shared one stream of random numbers, leaving out a step would change all later steps.

mod end;
mod faults;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tmem_model::driver::queue_of;
use tmem_model::requests::{GET_PAGE_BYTES, RESP_BYTES};
use tmem_pool::{Put, PutResult};
use virtio_tmem as wire;

use crate::content::{self, Version};
use crate::driver::{DEADLINE_NS, DriverModel, Port};
use crate::host::{SimulatedDaemon, SimulatedDaemonConfig};
use crate::kernel::{FILES, FilePage, Kernel, Outcome, PAGES, Storage};
use crate::machine::{Link, Machine};
use crate::mutation::Mutation;
use crate::oracle::{Failure, Kept, Oracle};
use crate::run::{COUNTS, Counts};
use crate::script::{Setup, Step};
use crate::transport::{ANSWER_AT, Tag};

/// Time in nanoseconds that passes before each step.
const STEP_NS: u64 = 5_000;

/// Snapshot of a guest: its memory, disk and clock.
struct Snapshot {
    kernel: Kernel,
    storage: Storage,
    ram: Vec<Vec<u8>>,
    bases: Vec<u16>,
    now_ns: u64,
}

/// A guest with its machine, its oracle and its snapshot.
struct Guest {
    kernel: Kernel,
    storage: Storage,
    machine: Machine,
    oracle: Oracle,
    snapshot: Option<Snapshot>,
    /// Version (number) of the guest's last write. It never decreases, not even at a rollback.
    version: Version,
    /// Generation of the guest's device before the current one, or 0.
    earlier: u64,
    /// Number of times that the guest has rebooted.
    boots: u64,
    /// Number of the host on which the guest runs.
    home: usize,
    /// Nanoseconds by which the guest's clock is behind the world's time, because the guest's clock
    /// stood still during pauses.
    behind_ns: u64,
    paused_at_ns: Option<u64>,
}

impl Guest {
    fn now_ns(&self, world_ns: u64) -> u64 {
        self.paused_at_ns.unwrap_or(world_ns - self.behind_ns)
    }

    fn parts(&mut self, world_ns: u64) -> (&mut Kernel, &mut Storage, Port<'_>) {
        let port = Port {
            now_ns: self.now_ns(world_ns),
            generation: self.machine.generation,
            oracle: &mut self.oracle,
            kicks: &self.machine.kicks,
        };
        (&mut self.kernel, &mut self.storage, port)
    }

    fn runs(&self) -> bool {
        self.paused_at_ns.is_none()
    }

    fn unlink(&mut self) -> Option<Link> {
        self.oracle.lost();
        self.machine.unlink()
    }

    fn new_version(&mut self) -> Version {
        self.version += 1;
        self.version
    }
}

/// A connection that the front end (VMM) has closed, but whose end the daemon has not noticed yet.
struct Ghost {
    guest: usize,
    link: Link,
}

/// Bytes of an answer that a back end with a broken rule writes too late, at the step `due`.
struct Late {
    due: usize,
    guest: usize,
    addr: u64,
    bytes: Vec<u8>,
}

/// All hosts and guests, and the world's time.
pub struct World {
    setup: Setup,
    now_ns: Arc<AtomicU64>,
    hosts: Vec<Option<SimulatedDaemon>>,
    guests: Vec<Guest>,
    ghosts: Vec<Ghost>,
    late: Vec<Late>,
    /// Pages that a device with a broken rule keeps wrongly, each with its guest and generation.
    /// The world stores them in the pool again, so a page stays in this list until the pool has
    /// memory for it.
    kept: Vec<(usize, u64, Kept)>,
    boots: u64,
    /// Number of the step that the world executes.
    pub at: usize,
}

fn mix(seed: u64, salt: u64) -> u64 {
    fastrand::Rng::with_seed(seed ^ salt.wrapping_mul(0x9e37_79b9_7f4a_7c15)).u64(..)
}

impl World {
    /// Creates a world in which all hosts and guests have started and are connected.
    pub fn new(setup: &Setup) -> World {
        let mut world = World {
            setup: setup.clone(),
            now_ns: Arc::new(AtomicU64::new(0)),
            hosts: Vec::new(),
            guests: Vec::new(),
            ghosts: Vec::new(),
            late: Vec::new(),
            kept: Vec::new(),
            boots: 0,
            at: 0,
        };
        for _ in 0..setup.hosts {
            let host = world.boot();
            world.hosts.push(Some(host));
        }
        for number in 0..setup.guests {
            let queues = setup.queues;
            let retain = setup.retain[number];
            let features = (setup.event_idx, setup.indirect, retain);
            let notifies = setup.notifies[number];
            let machine = Machine::new(queues, features, notifies, setup.mutation);
            let driver = DriverModel::new(
                machine.transport(),
                mix(setup.seed, 50 + number as u64) >> 2,
                retain,
                setup.mutation,
            );
            let kernel = Kernel::new(number, driver);
            let mut storage = Storage::default();
            let version = Kernel::fill(&mut storage);
            world.guests.push(Guest {
                kernel,
                storage,
                machine,
                oracle: Oracle::new(number, queues, retain, setup.mutation),
                snapshot: None,
                version,
                earlier: 0,
                boots: 0,
                home: number % setup.hosts,
                behind_ns: 0,
                paused_at_ns: None,
            });
            world.connect(number);
        }
        world
    }

    fn boot(&mut self) -> SimulatedDaemon {
        self.boots += 1;
        let domain = self.setup.one_domain.then(|| "all".to_string());
        let config = SimulatedDaemonConfig {
            seed: mix(self.setup.seed, 1_000 + self.boots),
            pool_bytes: u64::from(self.setup.pool_kib) << 10,
            workers: self.setup.workers,
            poll_max: Duration::from_micros(self.setup.poll_us),
            domains: vec![domain; self.setup.guests],
            mutation: self.setup.mutation,
        };
        SimulatedDaemon::boot(&config, self.now_ns.clone())
    }

    fn is(&self, mutation: Mutation) -> bool {
        self.setup.mutation == Some(mutation)
    }

    /// Returns the time of the simulated world in nanoseconds.
    pub fn now_ns(&self) -> u64 {
        self.now_ns.load(Relaxed)
    }

    /// Returns the first failure that an oracle of any guest found.
    pub fn failure(&self) -> Option<Failure> {
        self.guests.iter().find_map(|g| g.oracle.failure.clone())
    }

    /// Returns a summary of the world's state in one line.
    pub fn digest(&self) -> String {
        let guests = self.guests.iter().map(|g| {
            let driver = &g.kernel.driver;
            let used = driver.transport.rings.iter();
            let used: Vec<u16> = used.map(|ring| ring.used_idx_in_memory()).collect();
            format!(
                "[VM {}, driver {}, {} pages in the driver's index, {} requests in flight, \
                 used indexes {used:?}, {:?}]",
                if g.machine.started() { "up" } else { "down" },
                if driver.online().is_some() {
                    "on"
                } else {
                    "off"
                },
                driver.held(),
                driver.transport.in_flight(),
                g.oracle.model.counts(),
            )
        });
        let guests: Vec<String> = guests.collect();
        format!("{} µs {}", self.now_ns() / 1_000, guests.join(" "))
    }

    /// Returns the counters of answers, summed over all guests.
    pub fn counts(&self) -> Counts {
        let mut sum = [0; COUNTS];
        for guest in &self.guests {
            let c = guest.oracle.model.counts();
            let counts = [
                c.stored,
                c.hits,
                c.refused,
                c.lost,
                c.stale,
                c.retained,
                c.refs_held,
                c.refs_gone,
            ];
            sum.iter_mut().zip(counts).for_each(|(sum, n)| *sum += n);
        }
        sum
    }

    /// Lets `ns` nanoseconds pass. Fetches whose deadline falls into this time end at their deadline.
    fn advance(&mut self, ns: u64) {
        let until = self.now_ns() + ns;
        loop {
            let next = self.guests.iter().filter(|g| g.runs()).filter_map(|g| {
                let deadline = g.kernel.driver.next_deadline_ns()?;
                Some(deadline + g.behind_ns)
            });
            let next = next.min().unwrap_or(u64::MAX);
            let now = next.clamp(self.now_ns(), until);
            self.now_ns.store(now, Relaxed);
            for guest in self.guests.iter_mut().filter(|g| g.runs()) {
                let (kernel, _, mut port) = guest.parts(now);
                kernel.finish(&mut port);
                let waited_ns = kernel.driver.longest_wait_ns(port.now_ns);
                if waited_ns > DEADLINE_NS {
                    let what =
                        format!("a fetch has waited for {waited_ns} ns, longer than its deadline");
                    port.oracle.fail("deadline", what);
                }
            }
            if now == until {
                return;
            }
        }
    }

    /// Executes a step. A step that is impossible in the present state does nothing.
    pub fn step(&mut self, step: Step) {
        self.at += 1;
        self.advance(STEP_NS);
        self.write_late();
        let guest = |g: u8| usize::from(g) % self.setup.guests;
        let host = |h: u8| usize::from(h) % self.setup.hosts;
        let file = |f: u8| u32::from(f) % FILES;
        let page = |p: u8| u64::from(p) % PAGES;
        match step {
            Step::Serve(salt) => self.serve(salt),
            Step::Round(h, w) => self.round(host(h), w.into()),
            Step::Maintain(h) => self.maintain(host(h)),
            Step::Run(g) => self.run(guest(g)),
            Step::Feed(g, q) => {
                let queues = self.setup.queues - 1;
                self.feed(guest(g), 1 + usize::from(q) % queues);
            }
            Step::Read(g, f, p, n, spin) => {
                self.read(guest(g), file(f), (page(p), n.into()), spin);
            }
            Step::Write(g, f, p, n) => {
                let (g, f) = (guest(g), file(f));
                for p in page(p)..(page(p) + u64::from(n)).min(PAGES) {
                    let version = self.guests[g].new_version();
                    self.files(g, |kernel, _| kernel.write((f, p), version));
                }
            }
            Step::WriteBack(g, f) => {
                let f = file(f);
                self.files(guest(g), |kernel, storage| kernel.write_back(storage, f));
            }
            Step::Evict(g, f, p, n) => {
                let (f, p) = (file(f), page(p));
                self.files(guest(g), |kernel, _| {
                    kernel.free();
                    kernel.evict(f, p, n.into());
                });
            }
            Step::Truncate(g, f, p) => {
                let (f, p) = (file(f), page(p));
                self.files(guest(g), |kernel, storage| kernel.truncate(storage, f, p));
            }
            Step::Exchange(g, f, p) => {
                let (f, p) = (file(f), page(p));
                self.files(guest(g), |kernel, storage| kernel.exchange(storage, f, p));
            }
            Step::Zero(g, f, p) => {
                let (g, page) = (guest(g), (file(f), page(p)));
                let version = self.guests[g].new_version();
                self.files(g, |kernel, _| kernel.zero(page, version));
            }
            Step::WriteDirect(g, f, p) => self.write_direct(guest(g), (file(f), page(p)), false),
            Step::WriteUnseen(g, f, p) => self.write_direct(guest(g), (file(f), page(p)), true),
            Step::Break(g, late) => {
                let outcome = if late {
                    Outcome::Late
                } else {
                    Outcome::Refused
                };
                self.guests[guest(g)].storage.broken = Some(outcome);
            }
            Step::Disk(g, salt) => self.disk(guest(g), salt),
            Step::Remount(g) => {
                self.files(guest(g), |kernel, storage| kernel.remount(storage, true));
            }
            Step::RemountUnseen(g) => {
                self.files(guest(g), |kernel, storage| kernel.remount(storage, false));
            }
            Step::See(g) => self.files(guest(g), |kernel, _| kernel.register()),
            Step::Hibernate(g) => self.hibernate(guest(g)),
            Step::AskOld(g, pick) => self.ask_old(guest(g), pick),
            Step::Time(us) => self.advance(u64::from(us) * 1_000),
            Step::Kill(h, checks) => self.kill_after(host(h), checks),
            Step::Boot(h) => self.start_host(host(h)),
            Step::Freeze(h) => self.freeze(host(h), true),
            Step::Thaw(h) => self.freeze(host(h), false),
            Step::HangUp(g, checks) => self.hang_up_after(guest(g), checks),
            Step::Notice(g) => self.notice(guest(g)),
            Step::Connect(g) => self.connect(guest(g)),
            Step::Refuse(g) => self.refuse(guest(g)),
            Step::Pause(g) => self.pause(guest(g)),
            Step::PauseLate(g, checks) => self.pause_late(guest(g), checks),
            Step::Continue(g) => self.go_on(guest(g)),
            Step::Reset(g) => self.reset(guest(g)),
            Step::Snapshot(g) => self.snapshot(guest(g)),
            Step::Rollback(g) => self.rollback(guest(g)),
            Step::Revert(g) => self.revert(guest(g)),
            Step::Migrate(g) => self.migrate(guest(g)),
            Step::Arrive(g) => self.arrive(guest(g)),
            Step::Cancel(g) => self.cancel(guest(g)),
            Step::MemTable(g) => self.change_memory(guest(g)),
            Step::Resize(h, kib) => self.resize(host(h), kib),
            Step::FreezeVm(h, g) => self.freeze_vm(host(h), guest(g), true),
            Step::ThawVm(h, g) => self.freeze_vm(host(h), guest(g), false),
            Step::Limit(h, g, kib) => self.limit(host(h), guest(g), kib),
        }
    }

    // ---- steps of guests ----------------------------------------------------------------------

    fn files(&mut self, g: usize, change: impl FnOnce(&mut Kernel, &mut Storage)) {
        let guest = &mut self.guests[g];
        if guest.runs() {
            change(&mut guest.kernel, &mut guest.storage);
            if let Some(block) = guest.kernel.driver.take_changed() {
                let what = format!(
                    "the block {block:#x} changed, but the driver did not erase its index entry"
                );
                guest.oracle.fail("retained_changed", what);
            }
        }
    }

    fn write_direct(&mut self, g: usize, page: FilePage, unseen: bool) {
        let version = self.guests[g].new_version();
        self.files(g, |kernel, storage| {
            kernel.write_direct(storage, page, version, unseen);
        });
    }

    /// Lets the disk of a guest execute and end some bios, in an order that `salt` selects.
    fn disk(&mut self, g: usize, salt: u16) {
        let mut rng = fastrand::Rng::with_seed(mix(self.setup.seed, 9_000 + u64::from(salt)));
        let draws: [u64; 4] = std::array::from_fn(|_| rng.u64(..));
        self.files(g, |kernel, storage| {
            for draw in draws {
                kernel.disk(storage, draw);
            }
            kernel.begin_interval();
        });
    }

    fn serve(&mut self, salt: u16) {
        let mut rng = fastrand::Rng::with_seed(mix(self.setup.seed, 5_000 + u64::from(salt)));
        let mut turns = Vec::new();
        for g in 0..self.setup.guests {
            turns.extend([(0, g, 0), (3, g, 0)]);
            turns.extend((1..self.setup.queues).map(|q| (1, g, q)));
        }
        for h in 0..self.setup.hosts {
            turns.extend((0..self.setup.workers).map(|w| (2, h, w)));
        }
        rng.shuffle(&mut turns);
        for (what, who, which) in turns {
            match what {
                0 => self.run(who),
                1 => self.feed(who, which),
                2 => self.round(who, which),
                _ => self.disk(who, salt),
            }
        }
    }

    /// Lets a guest take its interrupts and answers, and do pending work.
    fn run(&mut self, g: usize) {
        let now = self.now_ns();
        let guest = &mut self.guests[g];
        if !guest.runs() {
            return;
        }
        let changed = std::mem::take(&mut guest.machine.config_irq);
        let queues = 0..guest.kernel.driver.transport.queues();
        let called: Vec<usize> = queues.filter(|q| guest.machine.interrupted(*q)).collect();
        let (kernel, _, mut port) = guest.parts(now);
        if changed {
            kernel.driver.config_changed();
        }
        for queue in called {
            kernel.driver.collect(&mut port, queue);
        }
        kernel.driver.work(&mut port);
        kernel.finish(&mut port);
        self.forge_generations(g);
    }

    fn feed(&mut self, g: usize, queue: usize) {
        self.files(g, |kernel, _| kernel.free());
        let now = self.now_ns();
        let guest = &mut self.guests[g];
        if guest.runs() {
            let (kernel, _, mut port) = guest.parts(now);
            kernel.driver.feed(&mut port, queue);
            self.forge_generations(g);
        }
    }

    fn read(&mut self, g: usize, inode: u32, pages: (u64, u64), spin: u8) {
        let now = self.now_ns();
        if !self.guests[g].runs() {
            return;
        }
        let (kernel, storage, mut port) = self.guests[g].parts(now);
        kernel.read(&mut port, storage, inode, pages);
        self.forge_generations(g);
        for _ in 0..spin {
            let Some(h) = self.guests[g].machine.link.as_ref().map(|link| link.host) else {
                break;
            };
            (0..self.setup.workers).for_each(|worker| self.round(h, worker));
            let (kernel, _, mut port) = self.guests[g].parts(now);
            for queue in 0..kernel.driver.transport.queues() {
                kernel.driver.collect(&mut port, queue);
            }
            kernel.finish(&mut port);
        }
    }

    fn ask_old(&mut self, g: usize, pick: u16) {
        let now = self.now_ns();
        let guest = &mut self.guests[g];
        if let (true, Some((key, cookie))) = (guest.runs(), guest.oracle.any_put(pick.into())) {
            let (kernel, _, mut port) = guest.parts(now);
            kernel.driver.request_earlier_put(&mut port, key, cookie);
        }
    }

    /// Simulates a device that ignores generations: writes the generation that the device expects
    /// into the guest's requests.
    fn forge_generations(&mut self, g: usize) {
        let machine = &self.guests[g].machine;
        if self.is(Mutation::GenerationUnchecked) && machine.generation != 0 {
            let transport = &self.guests[g].kernel.driver.transport;
            for pending in transport.pending.iter().flatten() {
                let generation = machine.generation.to_le_bytes();
                machine.ram.write(pending.page, &generation);
            }
        }
    }

    // ---- work of hosts ------------------------------------------------------------------------

    fn round(&mut self, h: usize, worker: usize) {
        if let Some(host) = &mut self.hosts[h] {
            host.round(worker % host.workers());
            self.observe_host(h);
        }
    }

    fn maintain(&mut self, h: usize) {
        if let Some(host) = &mut self.hosts[h] {
            host.maintain();
        }
    }

    /// Judges the answers that a host's daemon has published. Then executes the faults that the
    /// daemon's work has triggered: kills the daemon, closes connections, or pauses VMs.
    fn observe_host(&mut self, h: usize) {
        for g in 0..self.guests.len() {
            self.swap_answers(g);
            self.forge_results(g);
            self.forge_old_generation(g);
            self.observe(g);
            self.show_neighbour(g);
        }
        if self.hosts[h]
            .as_ref()
            .is_some_and(|h| h.death.has_triggered())
        {
            self.kill(h);
        }
        for g in 0..self.guests.len() {
            let link = self.guests[g].machine.link.as_ref();
            if link.is_some_and(|link| link.hang_up.has_triggered()) {
                self.hang_up(g);
            } else if link.is_some_and(|link| link.hang_up.is_draining()) {
                self.pause(g);
            }
        }
    }

    fn observe(&mut self, g: usize) {
        let guest = &mut self.guests[g];
        let transport = &guest.kernel.driver.transport;
        let queues = transport.queues();
        if !guest.machine.started() {
            guest.oracle.nothing_new(transport);
            return;
        }
        let queue_of = |key: tmem_model::Key| queue_of(queues, key.object, key.index);
        let kept = guest.oracle.observe(transport, queue_of);
        let generation = guest.oracle.model.generation();
        self.kept
            .extend(kept.into_iter().map(|kept| (g, generation, kept)));
        if !self.kept.is_empty() {
            self.put_back(g, generation);
        }
    }

    /// Stores pages in the device of a guest that must not hold them, to simulate a device with a
    /// broken rule. Stores each page as soon as there is memory for it, unless the device has a
    /// newer page under its key.
    fn put_back(&mut self, g: usize, generation: u64) {
        let guest = &self.guests[g];
        let h = guest.machine.link.as_ref().map(|link| link.host);
        let Some(host) = h.and_then(|h| self.hosts[h].as_ref()) else {
            return;
        };
        self.kept.retain(|(who, when, kept)| {
            let waits = *who != g || *when != generation;
            waits || (guest.oracle.model.cookie(kept.key).is_none() && !put(host, g, kept))
        });
    }

    fn swap_answers(&mut self, g: usize) {
        if self.is(Mutation::AnswersSwapped) {
            let guest = &self.guests[g];
            let transport = &guest.kernel.driver.transport;
            for queue in 0..transport.queues() {
                let first = guest.oracle.seen(queue);
                let used = transport.rings[queue].used_idx_in_memory();
                if used.wrapping_sub(first) < 2 {
                    continue;
                }
                let at = [first, first.wrapping_add(1)].map(|n| transport.used_at(queue, n));
                let mut elements = [[0; 8]; 2];
                (0..2).for_each(|i| guest.machine.ram.read(at[i], &mut elements[i]));
                (0..2).for_each(|i| guest.machine.ram.write(at[i], &elements[1 - i]));
            }
        }
    }

    /// Changes answers, to simulate a device with a broken rule: it answers GONE instead of HELD
    /// and keeps the page, or it answers every hit with the flag RETAINED.
    fn forge_results(&mut self, g: usize) {
        let (denies, retains) = (
            self.is(Mutation::GoneKeepsPage),
            self.is(Mutation::RetainedFlagAlways),
        );
        if !denies && !retains {
            return;
        }
        let guest = &self.guests[g];
        let transport = &guest.kernel.driver.transport;
        for (queue, requests) in transport.pending.iter().enumerate() {
            let ring = &transport.rings[queue];
            let seen = guest.oracle.seen(queue).wrapping_sub(ring.used_idx());
            for (position, pending) in requests.iter().enumerate().skip(seen.into()) {
                let Some((_, bytes)) = transport.used(queue, position) else {
                    break;
                };
                let answer = pending.answer(transport.ram(), bytes);
                let results = pending.page + ANSWER_AT + RESP_BYTES as u64;
                for (nth, page) in (0..).zip(&answer.pages) {
                    match (pending.tag, page.result) {
                        (Tag::Ref, wire::P_HELD) if denies => {
                            transport.ram().write(results + nth, &[wire::P_GONE]);
                        }
                        (Tag::Get(_), wire::P_HIT) if retains => {
                            let flags = results + GET_PAGE_BYTES as u64 * nth + 9;
                            transport.ram().write(flags, &[wire::GET_RETAINED]);
                        }
                        _ => {}
                    }
                }
            }
        }
    }

    /// Changes the answers to GENERATION requests, to simulate a device that answers with the
    /// generation before the current one.
    fn forge_old_generation(&mut self, g: usize) {
        let guest = &self.guests[g];
        if !self.is(Mutation::GenerationOld) || guest.earlier == 0 {
            return;
        }
        let transport = &guest.kernel.driver.transport;
        for (position, pending) in transport.pending[wire::CONTROL_QUEUE].iter().enumerate() {
            if transport.used(wire::CONTROL_QUEUE, position).is_some()
                && matches!(pending.tag, Tag::Query(_))
            {
                let body = pending.page + ANSWER_AT + RESP_BYTES as u64;
                transport.ram().write(body, &guest.earlier.to_le_bytes());
            }
        }
    }

    fn show_neighbour(&mut self, g: usize) {
        if self.is(Mutation::NeighbourShown) && self.setup.guests > 1 {
            let transport = &self.guests[g].kernel.driver.transport;
            for (queue, requests) in transport.pending.iter().enumerate() {
                for (position, pending) in requests.iter().enumerate() {
                    let Some((_, bytes)) = transport.used(queue, position) else {
                        break;
                    };
                    let answer = pending.answer(transport.ram(), bytes);
                    let miss = answer.pages.first().map(|page| page.result);
                    if matches!(pending.tag, Tag::Get(_)) && miss == Some(wire::P_MISS) {
                        let word = content::mark((g + 1) % self.setup.guests);
                        transport.ram().write(pending.data[0], &word.to_le_bytes());
                    }
                }
            }
        }
    }

    fn write_late(&mut self) {
        let at = self.at;
        let (due, rest) = self.late.drain(..).partition(|late| late.due <= at);
        self.late = rest;
        let due: Vec<Late> = due;
        for late in due {
            self.guests[late.guest]
                .machine
                .ram
                .write(late.addr, &late.bytes);
        }
    }
}

/// Stores a page in the pool for a guest. Returns false if the pool does not exist or refuses the
/// page.
fn put(host: &SimulatedDaemon, guest: usize, kept: &Kept) -> bool {
    let page = kept.content.page();
    let put = Put {
        object: kept.key.object,
        index: kept.key.index,
        cookie: kept.cookie,
        workingset: false,
        page: &*page,
    };
    let tenant = &host.vm(guest).tenant;
    let mut result = [PutResult::Refused];
    let put = tenant.put(kept.key.pool, &[put], &mut result);
    put.is_ok() && result == [PutResult::Stored]
}
