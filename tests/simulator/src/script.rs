// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Scripts: lists of steps that the simulator executes, drawn from a seed.
//!
//! A step names the guests, hosts or files that it affects by small numbers. In any state of the
//! simulated world, a step has a meaning or does nothing. So a script from which steps are removed
//! is still a valid script, which shrinking needs. The seed also selects which kinds of faults
//! occur in the script, because some combinations of faults occur only if others are absent.

use crate::kernel::{FILES, PAGES};
use crate::mutation::Mutation;

/// One step of a script. A `u8` that numbers a guest, host or file is taken modulo their count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(
    missing_docs,
    reason = "their fields are guests, hosts, files and pages"
)]
pub enum Step {
    /// Each guest does its pending work, each feeder thread sends its requests, and each worker
    /// does one round. The field is the seed of their order.
    Serve(u16),
    /// A worker of a host's daemon does one round. The fields are the host and the worker.
    Round(u8, u8),
    /// The background workers of a host's daemon do one step of work.
    Maintain(u8),
    /// The guest takes its interrupts and answers, and does pending work.
    Run(u8),
    /// The driver's feeder thread sends the requests of a guest's queue. The fields are guest and
    /// queue.
    Feed(u8, u8),
    /// A guest reads pages of a file. The fields are guest, file, first page, number of pages, and
    /// the number of times that all workers do a round while the reader spins.
    Read(u8, u8, u8, u8, u8),
    /// A guest overwrites pages. The fields are guest, file, first page and number of pages.
    Write(u8, u8, u8, u8),
    /// A guest writes the dirty pages of a file to the disk. The fields are guest and file.
    WriteBack(u8, u8),
    /// A guest reclaims clean pages. The fields are guest, file, first page and number of pages.
    Evict(u8, u8, u8, u8),
    /// A guest truncates a file. The fields are guest, file and first truncated page.
    Truncate(u8, u8, u8),
    /// Two files of a guest exchange a block, and cached pages stay. The fields are guest, file and
    /// page.
    Exchange(u8, u8, u8),
    /// A failed operation changes a clean page in the page cache. The fields are guest, file and
    /// page.
    Zero(u8, u8, u8),
    /// A guest begins to write a page past the page cache. The fields are guest, file and page.
    WriteDirect(u8, u8, u8),
    /// A guest begins to write a page directly, and the driver sees the write on its way to the
    /// disk only. The fields are guest, file and page.
    WriteUnseen(u8, u8, u8),
    /// The next write of a guest's disk fails. The fields are the guest, and whether the disk
    /// executes the write later nevertheless.
    Break(u8, bool),
    /// The disk of a guest executes and ends some bios. The fields are the guest and the seed of
    /// their order.
    Disk(u8, u16),
    /// A guest unmounts the file system and mounts it again.
    Remount(u8),
    /// A guest unmounts the file system and mounts it again. `See` lets the driver know it
    /// later.
    RemountUnseen(u8),
    See(u8),
    /// The guest requests the page of an earlier put, usually one that the device must not return
    /// any more. The fields are the guest and a number that selects the page.
    AskOld(u8, u16),
    /// The given number of µs passes.
    Time(u32),
    /// The daemon of a host is killed after it has checked the given number of times that a front
    /// end is connected.
    Kill(u8, u8),
    /// The daemon of a host starts, if it is not running.
    Boot(u8),
    /// The daemon of a host is stopped, as by SIGSTOP. `Thaw` continues it.
    Freeze(u8),
    Thaw(u8),
    /// The VMM of a guest closes its connection after the daemon has checked it the given number of
    /// times.
    HangUp(u8, u8),
    /// The daemon notices that a guest's VMM has closed its connections, and ends them.
    Notice(u8),
    /// The VMM of a guest connects to the daemon and starts the device.
    Connect(u8),
    /// The VMM of a guest connects with unsealed memory, which the daemon must refuse.
    Refuse(u8),
    /// The VM is paused. `Continue` ends the pause.
    Pause(u8),
    /// The VM is paused in the middle of a worker's scheduling slice, after the daemon has checked
    /// its connection the given number of times. The drain does not wait for the end of the slice.
    PauseLate(u8, u8),
    Continue(u8),
    /// The VM is reset, and its memory is lost.
    Reset(u8),
    /// The VMM takes a snapshot of the VM's memory and disk. `Rollback` restores it.
    Snapshot(u8),
    Rollback(u8),
    /// The guest hibernates to a swap file, and resumes.
    Hibernate(u8),
    /// The VM's disk is restored from the snapshot while the VM is off, and the VM boots.
    Revert(u8),
    /// The VMM begins a migration and sends the VM's memory to another host. With `Arrive` the VM
    /// moves there, and with `Cancel` it stays.
    Migrate(u8),
    Arrive(u8),
    Cancel(u8),
    /// The VMM removes a region from the guest's memory table and adds it again.
    MemTable(u8),
    /// The pool of a host gets the given size in KiB. The fields are the host and the size.
    Resize(u8, u16),
    /// The daemon freezes a VM's cache, so that it refuses puts. `ThawVm` ends that. The fields are
    /// the host and the guest.
    FreezeVm(u8, u8),
    ThawVm(u8, u8),
    /// A VM's limit on a host is changed. The fields are the host, the guest and the limit in KiB.
    Limit(u8, u8, u16),
}

/// Parameters of a simulated world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setup {
    /// Seed of all random numbers in the simulated world.
    pub seed: u64,
    /// Number of guests, each with its VMM.
    pub guests: usize,
    /// Number of hosts, each with its daemon.
    pub hosts: usize,
    /// Number of workers of each daemon.
    pub workers: usize,
    /// Longest time in µs that a worker polls an empty virtqueue.
    pub poll_us: u64,
    /// Number of queues of each guest, the control queue included.
    pub queues: usize,
    /// Whether the guests negotiate the feature VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// Whether the guests negotiate the feature VIRTIO_F_INDIRECT_DESC.
    pub indirect: bool,
    /// Whether each guest negotiates `VIRTIO_TMEM_F_RETAIN`. A real guest may lack the feature
    /// because of its driver, its device or its host's daemon.
    pub retain: Vec<bool>,
    /// Whether each guest's front end notifies the guest of a changed configuration, as that of
    /// QEMU does. A generic vhost-user front end never does.
    pub notifies: Vec<bool>,
    /// Size of each host's pool in KiB.
    pub pool_kib: u16,
    /// Whether all guests are in one trust domain.
    pub one_domain: bool,
    /// Rule that is broken on purpose, if any.
    pub mutation: Option<Mutation>,
}

/// Parameters of a simulated world and the steps that it executes.
#[derive(Clone, Debug)]
pub struct Script {
    /// Parameters of the simulated world.
    pub setup: Setup,
    /// Steps in the order in which they are executed.
    pub steps: Vec<Step>,
}

/// Smallest and largest number of steps of a script.
const STEPS: std::ops::RangeInclusive<usize> = 60..=240;

/// Maximum number of steps that a script places between a fault and its repair.
const REMEDY_WITHIN: usize = 14;

/// Maximum number of places in a script where a guest with retained pages reads a file again.
const REREADS_MAX: usize = 2;

/// Maximum number of places in a script where steps meet on the same pages, and their number there.
const RACES_MAX: usize = 3;
const RACE_STEPS: std::ops::RangeInclusive<usize> = 10..=30;

/// Number of kinds of faults that a seed enables or disables.
const FAULTS: usize = 13;

struct Draw {
    rng: fastrand::Rng,
    guests: u8,
    hosts: u8,
    enabled: [bool; FAULTS],
}

impl Draw {
    fn guest(&mut self) -> u8 {
        self.rng.u8(..self.guests)
    }

    fn host(&mut self) -> u8 {
        self.rng.u8(..self.hosts)
    }

    fn file(&mut self) -> u8 {
        self.rng.u8(..FILES as u8)
    }

    fn page(&mut self) -> u8 {
        self.rng.u8(..PAGES as u8)
    }

    fn work(&mut self) -> Step {
        let (guest, file, page) = (self.guest(), self.file(), self.page());
        match self.rng.u8(..144) {
            0..=24 => Step::Serve(self.rng.u16(..)),
            25..=36 => Step::Round(self.host(), self.rng.u8(..4)),
            37..=42 => Step::Maintain(self.host()),
            43..=52 => Step::Run(guest),
            53..=62 => Step::Feed(guest, self.rng.u8(..4)),
            63..=86 => {
                let (count, spin) = (self.rng.u8(1..=PAGES as u8), self.rng.u8(..4));
                Step::Read(guest, file, page, count, spin)
            }
            87..=96 => Step::Write(guest, file, page, self.rng.u8(1..=6)),
            97..=101 => Step::WriteBack(guest, file),
            102..=121 => Step::Evict(guest, file, page, self.rng.u8(1..=PAGES as u8)),
            122 => Step::Truncate(guest, file, page),
            123 | 124 => Step::Exchange(guest, file, page),
            125 => Step::WriteDirect(guest, file, page),
            126 | 127 => Step::Disk(guest, self.rng.u16(..)),
            128 => match self.rng.bool() {
                true => Step::Remount(guest),
                false => Step::RemountUnseen(guest),
            },
            129 | 130 => Step::See(guest),
            131..=136 => Step::AskOld(guest, self.rng.u16(..)),
            _ => {
                let times = [20, 100, 1_000, 6_000, 21_000, 60_000, 300_000, 1_100_000];
                Step::Time(times[self.rng.usize(..times.len())])
            }
        }
    }

    /// Returns none to three steps to execute before a VM arrives at the destination of its
    /// migration. The first two cause answers that the driver does not take before the arrival. The
    /// third closes the connection to the daemon at the source.
    fn before_arrival(&mut self, guest: u8) -> Vec<Step> {
        let (file, page) = (self.file(), self.page());
        let steps = [
            Step::Read(guest, file, page, PAGES as u8, 0),
            Step::Serve(self.rng.u16(..)),
            Step::HangUp(guest, 0),
        ];
        steps[..self.rng.usize(..=steps.len())].to_vec()
    }

    /// Returns steps in which a guest reads, evicts and reads a file again, so that the device
    /// retains pages and gets references (REF). Between these steps the pages may change, or the
    /// reader may give up.
    fn reread(&mut self, guest: u8) -> Vec<Step> {
        let (file, page, all) = (self.file(), self.page(), PAGES as u8);
        let read = |spin| Step::Read(guest, file, 0, all, spin);
        let evict = Step::Evict(guest, file, 0, all);
        let mut steps = vec![evict];
        steps.extend((0..3).map(|_| Step::Serve(self.rng.u16(..))));
        let changes: &[Step] = match self.rng.u8(..12) {
            0 => &[read(3), Step::Write(guest, file, page, 3)],
            1 => &[
                read(3),
                Step::Write(guest, file, page, 3),
                Step::WriteBack(guest, file),
            ],
            2 => &[
                read(3),
                evict,
                Step::Read(guest, file, page, 3, 3),
                Step::Write(guest, file, page, 3),
                Step::WriteBack(guest, file),
            ],
            3 => &[read(3), Step::Truncate(guest, file, page)],
            4 => &[read(3), Step::WriteDirect(guest, file, page)],
            5 => &[read(3), Step::Zero(guest, file, page)],
            6 => &[read(3), Step::Remount(guest)],
            7 => &[read(0), Step::Time(21_000)],
            8 => &[
                read(0),
                Step::Time(21_000),
                Step::Write(guest, file, page, 3),
                Step::Serve(0),
                Step::WriteBack(guest, file),
            ],
            _ => &[read(3)],
        };
        steps.extend(changes);
        steps.push(Step::Disk(guest, self.rng.u16(..)));
        steps.push(evict);
        if self.rng.bool() {
            steps.extend((0..2).map(|_| Step::Serve(self.rng.u16(..))));
        }
        steps.push(read(3));
        steps
    }

    /// Returns steps in which the device refuses puts of blocks of which it has older pages, and is
    /// asked for these.
    fn refusal(&mut self, guest: u8, file: u8, page: u8) -> Vec<Step> {
        let disk = Step::Disk(guest, 0);
        let put = [disk, disk, Step::Evict(guest, file, page, 4)];
        let served = [0, 1].map(|_| Step::Serve(self.rng.u16(..)));
        let mut steps = vec![Step::Read(guest, file, page, 4, 3)];
        steps.extend(put.into_iter().chain(served));
        steps.extend([0, 1].map(|host| Step::FreezeVm(host, guest)));
        steps.push(Step::Write(guest, file, page, 4));
        steps.push(Step::WriteBack(guest, file));
        steps.extend(put.into_iter().chain(served));
        steps.extend([0, 1].map(|host| Step::ThawVm(host, guest)));
        steps.extend([0, 1, 2].map(|_| Step::AskOld(guest, self.rng.u16(..))));
        steps.extend(served);
        steps
    }

    /// Returns steps that transfer, evict and change the same pages of a file, in any order.
    fn race(&mut self, guest: u8) -> Vec<Step> {
        let (file, page) = (self.file(), self.page());
        let write = Step::WriteDirect(guest, file, page);
        let read = Step::Read(guest, file, page, 2, 0);
        let rounds = (0..2).flat_map(|h| (0..2).map(move |w| Step::Round(h, w)));
        let mut steps: Vec<Step> = match self.rng.u8(..6) {
            0 => {
                // The driver gets a pool, and learns of the mount while a write is in flight.
                let online = rounds.chain([Step::Run(guest)]);
                let twice = online.clone().chain(online);
                let mut steps = vec![Step::RemountUnseen(guest), Step::Run(guest)];
                steps.extend(twice.chain([write, Step::See(guest), read]));
                steps
            }
            1 => vec![Step::Break(guest, true), write, Step::Disk(guest, 0)],
            2 => vec![write, read],
            3 => self.refusal(guest, file, page),
            _ => vec![],
        };
        for _ in 0..self.rng.usize(RACE_STEPS) {
            let salt = self.rng.u16(..);
            steps.push(match self.rng.u8(..22) {
                0..=4 => Step::Read(guest, file, page, 2, self.rng.u8(..2) * 3),
                5..=8 => Step::Evict(guest, file, page, 2),
                9..=13 => Step::Disk(guest, salt),
                14 => Step::Serve(salt),
                15 | 16 => write,
                17 => Step::Write(guest, file, page, 1),
                18 => Step::WriteBack(guest, file),
                19 => Step::Zero(guest, file, page),
                20 => Step::Exchange(guest, file, page),
                _ => match self.rng.u8(..6) {
                    0 => Step::WriteUnseen(guest, file, page),
                    1 => Step::RemountUnseen(guest),
                    2 => Step::Break(guest, self.rng.bool()),
                    3 => Step::Hibernate(guest),
                    _ => Step::See(guest),
                },
            });
        }
        steps
    }

    /// Returns a random fault and its repair. The repair is None if the fault ends without one.
    /// Returns None if the seed has disabled this kind of fault.
    fn fault(&mut self) -> Option<(Step, Option<Step>)> {
        let kind = self.rng.usize(..FAULTS);
        if !self.enabled[kind] {
            return None;
        }
        let (guest, host) = (self.guest(), self.host());
        let checks = self.rng.u8(..40);
        Some(match kind {
            0 => (Step::Kill(host, checks), Some(Step::Boot(host))),
            1 => (Step::Freeze(host), Some(Step::Thaw(host))),
            2 => (Step::HangUp(guest, checks), Some(Step::Connect(guest))),
            3 => (Step::Refuse(guest), Some(Step::Connect(guest))),
            4 => {
                let pauses = [Step::Pause(guest), Step::PauseLate(guest, checks)];
                (pauses[self.rng.usize(..2)], Some(Step::Continue(guest)))
            }
            5 => (Step::Reset(guest), None),
            6 => (Step::Snapshot(guest), Some(Step::Rollback(guest))),
            7 => (Step::Snapshot(guest), Some(Step::Revert(guest))),
            8 => {
                let ends = [Step::Arrive(guest), Step::Cancel(guest)];
                (Step::Migrate(guest), Some(ends[self.rng.usize(..2)]))
            }
            9 => (Step::MemTable(guest), None),
            10 => {
                let sizes = [160, 240, 400, 700];
                let size = sizes[self.rng.usize(..sizes.len())];
                (Step::Resize(host, size), Some(Step::Resize(host, 1024)))
            }
            11 => (Step::FreezeVm(host, guest), Some(Step::ThawVm(host, guest))),
            _ => {
                let limits = [0, 8, 40, 4096];
                let limit = limits[self.rng.usize(..limits.len())];
                (Step::Limit(host, guest, limit), None)
            }
        })
    }
}

impl Script {
    /// Draws the script of a seed. `mutation` is the rule that is broken on purpose.
    #[must_use]
    pub fn draw(seed: u64, mutation: Option<Mutation>) -> Script {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (setup_seed, guests) = (rng.u64(..), rng.usize(1..=3));
        // Draw the guests' virtio features from a generator of their own, so that a feature added
        // later does not change the scripts of existing seeds.
        let mut features = fastrand::Rng::with_seed(setup_seed);
        let mut front_ends = fastrand::Rng::with_seed(!setup_seed);
        let setup = Setup {
            seed: setup_seed,
            guests,
            notifies: (0..guests).map(|_| front_ends.bool()).collect(),
            retain: (0..guests).map(|_| features.bool()).collect(),
            hosts: rng.usize(1..=2),
            workers: rng.usize(1..=2),
            // Choose a polling time: none, enough for a few steps, or enough for many steps.
            poll_us: [0, 50, 1000][(seed % 3) as usize],
            queues: rng.usize(2..=4),
            event_idx: rng.u8(..4) > 0,
            indirect: rng.u8(..4) > 0,
            pool_kib: if rng.bool() { 1024 } else { 4096 },
            one_domain: rng.bool(),
            mutation,
        };
        let mut draw = Draw {
            guests: setup.guests as u8,
            hosts: setup.hosts as u8,
            enabled: std::array::from_fn(|_| rng.bool()),
            rng,
        };
        let count = draw.rng.usize(STEPS);
        // Choose how rare faults are: one in `every` steps is a fault, unless its kind is disabled.
        let every = draw.rng.usize(6..=30);
        // Begin with steps that bring the guests online, so that most faults hit a connection in
        // use.
        let mut steps: Vec<Step> = (0..4).map(Step::Serve).collect();
        let mut remedies: Vec<(usize, Step)> = Vec::new();
        while steps.len() < count {
            if let Some(at) = remedies.iter().position(|(due, _)| *due <= steps.len()) {
                let remedy = remedies.swap_remove(at).1;
                if let Step::Arrive(guest) = remedy {
                    steps.extend(draw.before_arrival(guest));
                }
                steps.push(remedy);
                if let Step::Boot(_) = remedy {
                    steps.extend((0..draw.guests).map(Step::Connect));
                }
                continue;
            }
            let fault = (draw.rng.usize(..every) == 0)
                .then(|| draw.fault())
                .flatten();
            let Some((fault, remedy)) = fault else {
                let step = draw.work();
                steps.push(step);
                continue;
            };
            steps.push(fault);
            if let Step::HangUp(guest, _) = fault
                && draw.rng.bool()
            {
                steps.push(Step::Notice(guest));
            }
            let due = steps.len() + draw.rng.usize(..=REMEDY_WITHIN);
            remedies.extend(remedy.map(|step| (due, step)));
        }
        let retaining = (0..).zip(&setup.retain).filter(|(_, retains)| **retains);
        let retaining: Vec<u8> = retaining.map(|(guest, _)| guest).collect();
        draw.rng = features;
        for _ in 0..draw.rng.usize(..=REREADS_MAX) {
            if let Some(guest) = draw.rng.choice(&retaining) {
                let at = draw.rng.usize(4..=steps.len());
                steps.splice(at..at, draw.reread(*guest));
            }
        }
        for _ in 0..draw.rng.usize(..=RACES_MAX) {
            let guest = draw.guest();
            let at = draw.rng.usize(4..=steps.len());
            steps.splice(at..at, draw.race(guest));
        }
        Script { setup, steps }
    }
}
