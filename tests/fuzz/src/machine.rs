// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A guest with a control queue and a request queue, and its front end. The daemon executes the
//! descriptor chains that the guest offers. The machine compares the result with the required one.
//!
//! While all offered chains are disjoint in memory and nothing changes during the daemon's work,
//! the machine knows each byte that the daemon may write ([`Machine::judged`]). Otherwise the
//! machine continues, but judges no answers. It then checks only the properties that hold in any
//! case: the daemon writes nothing outside of the guest's memory, its work ends, it logs no bug,
//! and the neighbour (another VM) has its pages.

use std::os::fd::OwnedFd;
use std::sync::MutexGuard;

use tmem_model::Model;
use tmem_model::daemon::{RingSetup, generation, notifiers, set_up_ring, stop_ring};
use tmem_model::frontend::{
    F_EVENT_IDX, F_INDIRECT_DESC, F_PROTOCOL_FEATURES, F_RETAIN, F_VERSION_1,
};
use tmemd::parts::Device;
use vhost::vhost_user::VhostUserBackendReqHandlerMut;

use crate::host::{FuzzedDaemon, lock};
use crate::judge::{Chain, Due, Piece, due, judge, walk};
use crate::ram::{BASE, Ram};

/// Number of queues: the control queue, and one request queue.
pub const QUEUES: usize = 2;
/// Maximum number of descriptors of a queue.
pub const SIZE_MAX: u16 = 64;
/// Bytes of guest memory for the three parts of a virtqueue.
const RING_BYTES: u64 = 0x1000;
const AVAIL_AT: u64 = 0x400;
const USED_AT: u64 = 0x600;
/// First guest address for buffers and descriptor tables. It follows the rings, in the first memory
/// region.
pub const ARENA: u64 = BASE + QUEUES as u64 * RING_BYTES;

/// A virtqueue, as its driver sees it.
#[derive(Clone, Copy, Debug)]
pub struct Ring {
    /// Number of descriptors of the virtqueue.
    pub size: u16,
    /// Guest address of the descriptor table. The available ring and the used ring follow the
    /// table.
    pub table: u64,
    /// Number of chains that the driver has put into the available ring. The available ring's index
    /// in guest memory is smaller until the driver publishes these chains.
    pub offered: u16,
    /// Number of chains of this virtqueue that the daemon has answered.
    pub answered: u16,
    /// Whether a faulty chain has stopped the queue. The daemon takes no chain of the queue until
    /// the front end sets the queue up again.
    stopped: bool,
    running: bool,
}

impl Ring {
    fn avail(&self) -> u64 {
        self.table + AVAIL_AT
    }

    fn used(&self) -> u64 {
        self.table + USED_AT
    }

    /// Returns the length of the used ring in bytes: flags and index, elements, and event index.
    fn used_bytes(&self) -> u64 {
        6 + 8 * u64::from(self.size)
    }
}

/// A descriptor chain that the daemon must answer, with the required reaction.
struct Planned {
    queue: usize,
    head: u16,
    chain: Chain,
    due: Due,
}

/// Actions that the specification requires of the daemon for the published chains.
struct Plan {
    chains: Vec<Planned>,
    /// For each queue, whether the daemon must stop it after the listed chains.
    stops: [bool; QUEUES],
}

/// A guest that the fuzzer controls, its front end, and the daemon.
pub struct Machine {
    /// The daemon, with the guest's connection.
    pub host: FuzzedDaemon,
    /// The guest's memory.
    pub ram: Ram,
    /// The guest's control queue and request queue.
    pub rings: [Ring; QUEUES],
    /// Model of the pages that the device may hold.
    pub model: Model,
    kicks: Vec<OwnedFd>,
    calls: Vec<OwnedFd>,
    /// Whether the specification determines all actions of the daemon, so that the machine can
    /// judge them.
    pub judged: bool,
    /// Whether the driver has accepted the feature bit of retained pages.
    pub retain: bool,
}

fn device(host: &FuzzedDaemon) -> MutexGuard<'_, Device> {
    lock(host.session.device())
}

impl Machine {
    /// Creates a machine with two running virtqueues of `size` descriptors each. `retain` says
    /// whether the driver accepts the feature bit of retained pages.
    pub fn new(size: u16, event_idx: bool, retain: bool) -> Machine {
        assert!(size.is_power_of_two() && size <= SIZE_MAX);
        let ring = |number: usize| Ring {
            size,
            table: BASE + number as u64 * RING_BYTES,
            offered: 0,
            answered: 0,
            stopped: false,
            running: false,
        };
        let mut machine = Machine {
            host: FuzzedDaemon::new(),
            ram: Ram::new(),
            rings: [ring(0), ring(1)],
            model: Model::new("guest").lossless(),
            kicks: notifiers(QUEUES),
            calls: notifiers(QUEUES),
            judged: true,
            retain,
        };
        let event = if event_idx { F_EVENT_IDX } else { 0 };
        let retain = if retain { F_RETAIN } else { 0 };
        let features = F_VERSION_1 | F_INDIRECT_DESC | F_PROTOCOL_FEATURES | event | retain;
        let (regions, files) = machine.ram.table();
        let mut device = device(&machine.host);
        device
            .set_features(features)
            .expect("the device refused features that it had offered");
        let table = device.set_mem_table(&regions, files, None);
        drop(table.expect("the device refused sealed memory without overlaps"));
        drop(device);
        machine.begin();
        (0..QUEUES).for_each(|queue| machine.start(queue));
        machine
    }

    /// Reads the generation from the device. Records that the device has no page of this generation
    /// yet.
    fn begin(&mut self) {
        let generation = generation(&mut device(&self.host));
        self.model
            .begin(generation)
            .expect("the device reports a generation that is not new");
    }

    /// Sets up and enables a virtqueue, which continues after the last answered chain.
    fn start(&mut self, queue: usize) {
        let ring = &mut self.rings[queue];
        (ring.stopped, ring.running) = (false, true);
        let ring = *ring;
        let used = ring.answered.to_le_bytes();
        assert!(self.ram.write(ring.used() + 2, &used));
        let setup = RingSetup {
            queue,
            size: ring.size,
            base: ring.answered,
            addresses: [ring.table, ring.used(), ring.avail()].map(Ram::user),
            kick: &self.kicks[queue],
            call: &self.calls[queue],
        };
        let mut device = device(&self.host);
        set_up_ring(&mut device, &setup).expect("the device refused a message");
        let enabled = device.set_vring_enable(queue as u32, true);
        enabled.expect("the device refused SET_VRING_ENABLE");
    }

    /// Stops a virtqueue and sets it up again, as around a pause or after a lost daemon. The daemon
    /// then executes the chains that were published and not answered.
    pub fn restart(&mut self, queue: usize) {
        if self.is_over() {
            return;
        }
        self.run_checked(|machine| {
            let base = stop_ring(&mut device(&machine.host), queue);
            let base = base.expect("the device does not have the queue");
            let ring = &mut machine.rings[queue];
            if machine.judged {
                assert_eq!(
                    base, ring.answered,
                    "GET_VRING_BASE did not return the number of answered chains"
                );
            }
            ring.answered = base;
            ring.running = false;
        });
        if self.is_over() {
            return;
        }
        self.start(queue);
        self.work();
    }

    /// Sends RESET_DEVICE, which begins another generation without pages. Empties the rings.
    pub fn reset(&mut self) {
        for queue in 0..QUEUES {
            stop_ring(&mut device(&self.host), queue).expect("the device does not have the queue");
            self.rings[queue].running = false;
        }
        device(&self.host)
            .reset_device()
            .expect("RESET_DEVICE failed");
        for queue in 0..QUEUES {
            let ring = &mut self.rings[queue];
            (ring.offered, ring.answered) = (0, 0);
            let (avail, used, bytes) = (ring.avail(), ring.used(), ring.used_bytes());
            assert!(
                self.ram
                    .write(avail, &vec![0; 6 + 2 * usize::from(SIZE_MAX)])
            );
            assert!(self.ram.write(used, &vec![0; bytes as usize]));
        }
        self.begin();
        (0..QUEUES).for_each(|queue| self.start(queue));
        self.work();
    }

    /// Sends a memory table to the daemon. It has all memory if `whole` is true, and otherwise
    /// lacks the region near 2^64.
    pub fn remap(&mut self, whole: bool) {
        let (mut regions, mut files) = self.ram.table();
        if !whole {
            regions.pop();
            files.pop();
            // Stop judging answers, because the machine still treats the removed addresses as
            // memory, but the daemon does not.
            self.judged = false;
        }
        let done = device(&self.host).set_mem_table(&regions, files, None);
        drop(done.expect("the device refused sealed memory without overlaps"));
        self.work();
    }

    /// Returns whether the front end has closed the connection, so that the guest must not offer
    /// any more chains.
    pub fn is_over(&self) -> bool {
        self.host.watch.left().is_some()
    }

    /// Writes a descriptor into a descriptor table. `flags` are its flags and the number of the
    /// next descriptor.
    pub fn describe(
        &mut self,
        table: u64,
        number: u64,
        address: u64,
        bytes: u32,
        flags: (u16, u16),
    ) {
        let mut all = address.to_le_bytes().to_vec();
        all.extend(bytes.to_le_bytes());
        all.extend(flags.0.to_le_bytes());
        all.extend(flags.1.to_le_bytes());
        self.ram.write(table.wrapping_add(16 * number), &all);
    }

    /// Puts the number of a chain's first descriptor into the available ring. [`Self::kick`]
    /// publishes it.
    pub fn offer(&mut self, queue: usize, head: u16) {
        let ring = self.rings[queue];
        let slot = ring.avail() + 4 + 2 * u64::from(ring.offered % ring.size);
        assert!(self.ram.write(slot, &head.to_le_bytes()));
        self.rings[queue].offered = ring.offered.wrapping_add(1);
    }

    /// Publishes the offered chains, kicks the queue, and lets the daemon execute the chains.
    pub fn kick(&mut self, queue: usize) {
        let ring = self.rings[queue];
        let index = ring.avail() + 2;
        assert!(self.ram.write(index, &ring.offered.to_le_bytes()));
        rustix::io::write(&self.kicks[queue], &1u64.to_ne_bytes())
            .expect("cannot write to the eventfd");
        self.work();
    }

    /// Lets the daemon do all its work, and checks what it wrote.
    pub fn work(&mut self) {
        self.run_checked(|machine| machine.host.work());
    }

    fn run_checked(&mut self, work: impl FnOnce(&mut Machine)) {
        let plan = if self.judged { self.plan() } else { None };
        work(self);
        let happened = self.host.watch.take_happened();
        let after = self.ram.current();
        if let Some(left) = self.host.watch.left() {
            assert!(
                left == after,
                "the daemon wrote to guest memory after the front end had hung up"
            );
        }
        if happened || plan.is_none() {
            self.judged = false;
        }
        if let Some(plan) = plan.filter(|_| self.judged) {
            self.judge(plan, &after);
        }
        self.ram.accept(after);
        self.host.check();
    }

    /// Returns the actions that the specification requires for the published chains, in order.
    /// Returns None if the actions are unknown. This is so if buffers of chains overlap or if both
    /// queues have work.
    fn plan(&self) -> Option<Plan> {
        let image = &self.ram.image;
        let mut plan = Plan {
            chains: Vec::new(),
            stops: [false; QUEUES],
        };
        let mut reads: Vec<Piece> = Vec::new();
        let mut writes: Vec<Piece> = Vec::new();
        let mut busy = 0;
        for (queue, ring) in self.rings.iter().enumerate() {
            let size = u64::from(ring.size);
            reads.extend([(ring.table, 16 * size), (ring.avail(), 6 + 2 * size)]);
            writes.push((ring.used(), ring.used_bytes()));
            if ring.stopped || !ring.running {
                continue;
            }
            let published = Ram::u16_of(image, ring.avail() + 2).wrapping_sub(ring.answered);
            busy += u32::from(published > 0);
            if published > ring.size {
                plan.stops[queue] = true;
                continue;
            }
            for number in 0..published {
                let slot = ring.answered.wrapping_add(number) % ring.size;
                let head = Ram::u16_of(image, ring.avail() + 4 + 2 * u64::from(slot));
                let Some(chain) = walk(image, ring.table, ring.size, head) else {
                    plan.stops[queue] = true;
                    break;
                };
                reads.extend(chain.table);
                reads.extend(&chain.readable);
                writes.extend(&chain.writable);
                let request = chain.request(image);
                let due = due(
                    queue == 0,
                    &request,
                    chain.writable_bytes(),
                    chain.out_of_order,
                    self.retain,
                );
                if let Due::Stop = due {
                    plan.stops[queue] = true;
                    break;
                }
                plan.chains.push(Planned {
                    queue,
                    head,
                    chain,
                    due,
                });
            }
        }
        (busy < 2 && are_disjoint(&reads, writes)).then_some(plan)
    }

    fn judge(&mut self, plan: Plan, after: &[u8]) {
        let mut expected = self.ram.copy();
        let mut accept = |piece: &Piece| {
            for (from, count) in
                Ram::places(piece.0, piece.1).expect("the range is outside of the guest's memory")
            {
                expected[from..from + count].copy_from_slice(&after[from..from + count]);
            }
        };
        for ring in &self.rings {
            // Let the device write the fields by which it requests kicks: the flags of the used
            // ring and the avail event index.
            accept(&(ring.used(), 2));
            accept(&(ring.used() + 4 + 8 * u64::from(ring.size), 2));
        }
        for planned in plan.chains {
            let ring = &mut self.rings[planned.queue];
            let slot = u64::from(ring.answered % ring.size);
            let element = (ring.used() + 4 + 8 * slot, 8);
            accept(&element);
            let bytes =
                Ram::read(after, element.0, 8).expect("the range is outside of the guest's memory");
            let id = u32::from_le_bytes(
                bytes[..4]
                    .try_into()
                    .expect("the slice does not have 4 bytes"),
            );
            let length = u32::from_le_bytes(
                bytes[4..]
                    .try_into()
                    .expect("the slice does not have 4 bytes"),
            );
            assert_eq!(
                id,
                u32::from(planned.head),
                "the answers are not in the order of the requests"
            );
            assert!(
                u64::from(length) <= planned.chain.writable_bytes(),
                "the used length {length} exceeds the writable part of the chain"
            );
            ring.answered = ring.answered.wrapping_add(1);
            let pieces = planned.chain.answer(length.into());
            let mut answer = Vec::new();
            for piece in &pieces {
                accept(piece);
                answer.extend(
                    Ram::read(after, piece.0, piece.1)
                        .expect("the range is outside of the guest's memory"),
                );
            }
            assert!(
                answer.len() >= 8,
                "the answer has only {length} bytes, less than a status"
            );
            assert_eq!(
                answer[1..8],
                [0; 7],
                "a reserved byte of the answer is not 0"
            );
            match planned.due {
                Due::Refused(statuses) => {
                    assert!(
                        statuses.contains(&answer[0]),
                        "the answer has the status {}, not one of {statuses:?}",
                        answer[0]
                    );
                    assert_eq!(
                        length, 8,
                        "the answer to a refused request has bytes after the status"
                    );
                }
                Due::Answer {
                    generation,
                    request,
                } => {
                    let request = (generation, request);
                    if let Err(violation) = judge(&mut self.model, planned.queue, request, &answer)
                    {
                        panic!("{violation}");
                    }
                }
                Due::Stop => {
                    unreachable!("the plan expects an answer to a chain that must stop the queue")
                }
            }
        }
        for (queue, ring) in self.rings.iter_mut().enumerate() {
            accept(&(ring.used() + 2, 2));
            let used = Ram::u16_of(after, ring.used() + 2);
            assert_eq!(
                used, ring.answered,
                "the used index of queue {queue} differs from the number of answered chains"
            );
            ring.stopped |= plan.stops[queue];
        }
        let changed = first_difference(&expected, after);
        assert_eq!(
            changed, None,
            "the daemon wrote outside of the requests' buffers"
        );
        self.ram.drop_copy(expected);
    }

    /// Ends the guest's connection, and asserts that this changes no guest memory.
    pub fn end(mut self) {
        self.work();
        self.host.end();
        let memory = self.ram.current();
        assert!(
            memory == self.ram.image,
            "the end of the connection changed guest memory"
        );
        self.ram.drop_copy(memory);
        self.ram.keep();
    }
}

fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    // Compare the whole memory first, which is faster than comparing byte by byte.
    (one != other).then(|| one.iter().zip(other).position(|(a, b)| a != b))?
}

/// Returns whether no written piece of memory overlaps another written or a read piece.
fn are_disjoint(reads: &[Piece], writes: Vec<Piece>) -> bool {
    let end = |piece: &Piece| u128::from(piece.0) + u128::from(piece.1);
    let mut all: Vec<(Piece, bool)> = writes.into_iter().map(|piece| (piece, true)).collect();
    all.extend(reads.iter().map(|piece| (*piece, false)));
    all.sort_unstable();
    // Largest end address among the written pieces, and among all pieces, that the loop has seen.
    let (mut written, mut any) = (0, 0);
    for (piece, write) in all {
        let start = u128::from(piece.0);
        if start < written || (write && start < any) {
            return false;
        }
        any = any.max(end(&piece));
        if write {
            written = written.max(end(&piece));
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use tmem_model::requests::REQ_BYTES;
    use virtio_tmem as wire;

    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const INDIRECT: u16 = 4;

    /// Flushes about as many pages with each chain as one scheduling slice may drop, so all chains
    /// together take many slices. [`FuzzedDaemon::work`] checks the work of each slice.
    #[test]
    fn flush_work_is_bounded_per_slice() {
        const PAGES: u64 = 511;
        let mut machine = Machine::new(SIZE_MAX, false, false);
        // Do not judge answers. The test stores the pages without requests of the guest, so the
        // model does not know them.
        machine.judged = false;
        machine.host.store_same(u64::from(SIZE_MAX) * PAGES);
        for chain in 0..SIZE_MAX {
            let mut bytes = machine.model.generation().to_le_bytes().to_vec();
            bytes.extend(wire::T_FLUSH.to_le_bytes());
            bytes.extend(1u16.to_le_bytes());
            bytes.extend(1u32.to_le_bytes());
            bytes.extend([0; 8]);
            assert_eq!(bytes.len(), REQ_BYTES);
            for number in [1, u64::from(chain) * PAGES, PAGES] {
                bytes.extend(number.to_le_bytes());
            }
            let at = ARENA + u64::from(chain) * 0x100;
            let (answer, table) = (at + 0x40, at + 0x80);
            assert!(machine.ram.write(at, &bytes));
            machine.describe(table, 0, at, bytes.len() as u32, (NEXT, 1));
            machine.describe(table, 1, answer, 8, (WRITE, 0));
            let head = (INDIRECT, 0);
            machine.describe(machine.rings[1].table, chain.into(), table, 32, head);
            machine.offer(1, chain);
        }
        machine.kick(1);
        assert_eq!(machine.host.held(), 0);
    }
}
