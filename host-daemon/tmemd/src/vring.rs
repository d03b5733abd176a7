// SPDX-License-Identifier: Apache-2.0 OR MIT
//! One virtqueue: its state, what a worker does in a turn, and how the control thread stops it.
//!
//! Two threads know a vring: the worker that it belongs to and the control thread of its
//! connection. The lock guards everything that may hold a guest address. The worker only ever
//! tries it, so that a control thread that holds it delays no other VM; the control thread raises
//! `hold` before it takes it, upon which the worker leaves after the chain it is at. So when the
//! control thread has the lock, the vring is drained: chains are answered one by one in the order
//! in which they were made available.
//!
//! A turn is a scheduling slice (`slice.rs`). Its end may interrupt a chain, which then counts as not
//! taken: the next turn finds it at the head of the available ring, and goes on where the last turn stopped.
//! If the ring changes hands first (GET_VRING_BASE, another daemon), its next owner executes the chain from its
//! beginning, as after a daemon that was killed (DEV-24 in proto/SPEC.md): puts and flushes are
//! repeated, and pages that a GET has already taken are missed.

use crate::chain::{Chain, READ_BUFFER_BYTES, WriteError};
use crate::execute::{self, Context, PageBuffers, Progress};
use crate::latency::Histogram;
use crate::memory::Memory;
use crate::outside::Outside;
use crate::peer::{HungUp, Peer};
use crate::polling::Polling;
use crate::request::{self, Body, QueueKind, Rejected};
use crate::slice::{CHAIN_NS, DESCRIPTOR_NS, PAGE_EXPECTED_NS, READ_PAGE_NS, Slice};
use crate::vm::Vm;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tmem_pool::{SecretPages, Spent};
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use virtio_tmem as wire;
use vm_memory::{Bytes, GuestAddress};

const PAGE_BYTES: u64 = wire::PAGE_SIZE as u64;

/// After so long, a drain refuses or misses what the current chain has left to do: half of the
/// 10 ms that it may take, the other half being for what has begun.
const DRAIN_CUT: Duration = Duration::from_millis(5);

/// Descriptors are 16 bytes; a used ring has 8 per element and an available ring 2, each with a
/// head and an event index of 6 in all (virtio 1.3, 2.7).
const DESCRIPTOR_BYTES: u64 = 16;
const AVAIL_ELEMENT_BYTES: u64 = 2;
const USED_ELEMENT_BYTES: u64 = 8;
const RING_EXTRA_BYTES: u64 = 6;

/// In the flags of an available ring: the driver wants no interrupts.
const AVAIL_F_NO_INTERRUPT: u16 = 1;

/// What the vrings of a connection share.
pub struct Link {
    /// Whose connection it is.
    pub vm: Arc<Vm>,
    /// Its VMM.
    pub peer: Peer,
    /// The number that requests must carry; changes only while all vrings are held.
    pub generation: AtomicU64,
    /// Time.
    pub outside: Outside,
}

/// Ring addresses as the VMM gives them: its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingAddresses {
    /// Descriptor table.
    pub descriptor: u64,
    /// Available ring.
    pub available: u64,
    /// Used ring.
    pub used: u64,
}

/// Guarded by the vring's lock.
pub struct State {
    /// Ring indices and addresses.
    pub queue: Queue,
    /// The guest's memory; empty while there is none.
    pub memory: Arc<Memory>,
    /// As told by the VMM.
    pub addresses: Option<RingAddresses>,
    /// What the worker knows the kick by. Present from SET_VRING_KICK to GET_VRING_BASE: the ring
    /// is started.
    pub kick: Option<u64>,
    /// Interrupts the guest.
    pub call: Option<OwnedFd>,
    /// Tells the VMM that the ring is broken.
    pub error: Option<OwnedFd>,
    /// As told by SET_VRING_ENABLE.
    pub enabled: bool,
    /// Rings are in guest memory, and the used index was found to be the base.
    ready: bool,
    /// The used index was compared with the base since that was set.
    synced: bool,
    /// Why nothing is done until the ring is set up anew.
    stopped: Option<String>,
    /// When it ran dry, and whether to look or to sleep then.
    polling: Polling,
    /// The chain that the end of a turn interrupted: the next one that is available.
    unfinished: Option<Unfinished>,
}

/// A chain that the end of a turn interrupted.
#[derive(Clone, Copy)]
struct Unfinished {
    /// Its first descriptor.
    head: u16,
    /// Generation, type, count and pool, as they were read. A guest that changes them, or the ring, has
    /// its request executed from the beginning.
    header: [u8; size_of::<wire::Req>()],
    /// When its execution began, for its latency.
    begun_ns: u64,
    /// It exceeds the VM's rate, which is asked once for each chain.
    limited: bool,
    progress: Progress,
}

/// What a turn leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// Nothing to do before the next kick.
    Idle,
    /// Nothing to do, and no kick is asked for: to be looked at until then, and to get a turn then.
    Look {
        /// By the daemon's clock.
        until_ns: u64,
    },
    /// There is more.
    More,
}

/// What `Vring::answer` says.
enum Answered<'a> {
    /// Bytes written, since when, and where the time is counted.
    Done(u32, u64, Option<&'a Histogram>),
    /// The slice is over.
    Unfinished(Unfinished),
}

/// Why a turn ended before its time.
enum Halt {
    /// The memory may no longer be the guest's.
    HungUp,
    /// A page of it has gone, and what was read may be the daemon's own zeros.
    Lost,
    /// A fault of the guest, of the VMM or of the daemon.
    Fault(String),
}

impl From<HungUp> for Halt {
    fn from(_: HungUp) -> Self {
        Halt::HungUp
    }
}

impl From<String> for Halt {
    fn from(reason: String) -> Self {
        Halt::Fault(reason)
    }
}

/// What was read of the memory until now is the guest's.
fn intact(memory: &Memory) -> Result<(), Halt> {
    match memory.lost.is_lost() {
        true => Err(Halt::Lost),
        false => Ok(()),
    }
}

/// Buffers of a worker.
pub struct Scratch {
    chain: Chain,
    readable: SecretPages,
    pages: PageBuffers,
}

impl Scratch {
    /// Buffers for the largest request.
    ///
    /// # Errors
    /// The system has not the address space.
    pub fn new() -> io::Result<Scratch> {
        Ok(Scratch {
            chain: Chain::new(),
            readable: SecretPages::new(READ_BUFFER_BYTES.div_ceil(wire::PAGE_SIZE))?,
            pages: PageBuffers::new()?,
        })
    }
}

/// A virtqueue.
pub struct Vring {
    /// Number within the device; 0 is the control queue.
    pub index: usize,
    /// The worker that it belongs to.
    pub worker: usize,
    /// It is in the worker's run queue.
    queued: AtomicBool,
    /// Since when, on the daemon's clock; the worker's own.
    queued_at_ns: AtomicU64,
    link: Arc<Link>,
    hold: AtomicBool,
    /// Nanoseconds of the daemon's clock at which a drain cuts off; `u64::MAX` while there is none.
    cut_at_ns: AtomicU64,
    state: Mutex<State>,
}

impl Vring {
    /// A vring that was never set up.
    pub fn new(index: usize, worker: usize, link: Arc<Link>) -> Vring {
        let queue = Queue::new(wire::QUEUE_SIZE_MAX).expect("the maximum is a power of two");
        Vring {
            index,
            worker,
            queued: AtomicBool::new(false),
            queued_at_ns: AtomicU64::new(0),
            link,
            hold: AtomicBool::new(false),
            cut_at_ns: AtomicU64::new(u64::MAX),
            state: Mutex::new(State {
                queue,
                memory: Arc::new(Memory::empty(&Arc::default())),
                addresses: None,
                kick: None,
                call: None,
                error: None,
                enabled: false,
                ready: false,
                synced: false,
                stopped: None,
                polling: Polling::default(),
                unfinished: None,
            }),
        }
    }

    /// Tells the vrings of one VM from those of others.
    pub fn owner(&self) -> usize {
        Arc::as_ptr(&self.link.vm) as usize
    }

    /// For messages.
    pub fn vm_name(&self) -> Arc<str> {
        self.link.vm.name()
    }

    fn now_ns(&self) -> u64 {
        self.link.outside.now_ns()
    }

    /// Whether it is to be put in the worker's run queue, from now on: it is not there yet.
    pub fn enqueue(&self) -> bool {
        let comes = !self.queued.swap(true, Ordering::SeqCst);
        if comes {
            self.queued_at_ns.store(self.now_ns(), Ordering::Relaxed);
        }
        comes
    }

    /// It was taken from there for a turn that has not begun, so that a kick during it is not lost. Returns
    /// when that was, for [`took`](Self::took).
    pub fn dequeue(&self) -> u64 {
        let now_ns = self.now_ns();
        let waited_ns = now_ns - self.queued_at_ns.load(Ordering::Relaxed);
        self.queued.store(false, Ordering::SeqCst);
        let counters = &self.link.vm.counters;
        counters.wait_latency.count(Duration::from_nanos(waited_ns));
        now_ns
    }

    /// Its turn has ended: that was its VM's time. By the daemon's clock, which is read without a system
    /// call: a turn may be a single page in 5 µs, of which the clock of a thread's processor time would take
    /// a tenth. The two differ where a worker has to wait for a processor, or for a page of the guest's that
    /// the host has swapped; it waits for nothing else in a turn.
    pub fn took(&self, begun_ns: u64) {
        let took_ns = self.now_ns() - begun_ns;
        let counters = &self.link.vm.counters;
        counters.turns_ns.fetch_add(took_ns, Ordering::Relaxed);
    }

    /// First half of holding: the worker leaves at the end of the chain it is at.
    pub fn raise_hold(&self) {
        self.cut_at_ns.store(
            self.now_ns() + DRAIN_CUT.as_nanos() as u64,
            Ordering::SeqCst,
        );
        self.hold.store(true, Ordering::SeqCst);
    }

    /// Second half: waits for that. The vring is drained as long as the guard lives.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the worker back in; the caller must have dropped the guard, and must schedule the
    /// vring afterwards, since the worker ignored kicks meanwhile.
    pub fn lower_hold(&self) {
        self.cut_at_ns.store(u64::MAX, Ordering::SeqCst);
        self.hold.store(false, Ordering::SeqCst);
    }

    /// There is something to do, or a turn has to say that there is not. Cheap: for a vring whose last
    /// turn said to look.
    pub fn looks_busy(&self, until_ns: u64) -> bool {
        // Of the control thread's: it schedules the vring when it lets go.
        let Some(state) = self.try_lock() else {
            return true;
        };
        let avail = state
            .queue
            .avail_idx(&state.memory.guest, Ordering::Relaxed);
        let next = state.queue.next_avail();
        !state.is_running()
            || avail.map_or(true, |avail| avail.0 != next)
            || self.now_ns() >= until_ns
    }

    /// Answers some chains, in order. When there are no more it may say to look for others up to
    /// `poll_max_ns`, instead of asking for a kick.
    pub fn turn(&self, scratch: &mut Scratch, poll_max_ns: u64) -> Turn {
        // Only the control thread holds the lock for longer, and it schedules the vring after it.
        let Some(mut state) = self.try_lock() else {
            return Turn::Idle;
        };
        if !state.is_running() {
            return Turn::Idle;
        }
        let memory = state.memory.clone();
        let result = self.run(&mut state, &memory, scratch, poll_max_ns);
        // Whatever it did last, and what it then took for a fault of the guest.
        match intact(&memory).and(result) {
            Ok(turn) => turn,
            Err(Halt::Lost) => {
                // The control thread ends the connection, and lets go of the memory.
                state.give_back();
                state.stopped = Some("a page of the guest's memory has gone".into());
                self.link.vm.hang_up();
                Turn::Idle
            }
            Err(Halt::Fault(reason)) => {
                self.stop(&mut state, reason);
                Turn::Idle
            }
            Err(Halt::HungUp) => {
                // Until the control thread, which is yet to hear of it, lets go of the memory.
                state.give_back();
                state.stopped = Some("the front end hung up".into());
                Turn::Idle
            }
        }
    }

    /// Stops the queue after a panic in `turn`, which is a bug of the daemon: other queues go on.
    pub fn stop_after_panic(&self) {
        let mut state = self.lock();
        self.stop(
            &mut state,
            "a bug in the daemon: its worker panicked".into(),
        );
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, State>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(std::sync::TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }

    fn run(
        &self,
        state: &mut State,
        table: &Memory,
        scratch: &mut Scratch,
        poll_max_ns: u64,
    ) -> Result<Turn, Halt> {
        let memory = &table.guest;
        let ring_fault = |what: &'static str| {
            move |error: virtio_queue::Error| format!("{what} cannot be accessed: {error}")
        };
        let peer = &self.link.peer;
        peer.look()?;
        state
            .queue
            .disable_notification(memory)
            .map_err(ring_fault("the used ring"))?;
        let slice = Slice::begin(&self.link.outside);
        let mut unfinished = state.unfinished.take();
        let mut to_interrupt = false;
        // The first chain of a turn is always taken.
        let mut has_begun = false;
        let turn = loop {
            if self.hold.load(Ordering::SeqCst) {
                state.unfinished = unfinished;
                break Turn::Idle;
            }
            if has_begun && !slice.fits(CHAIN_NS) {
                break Turn::More;
            }
            // For the next chain, or for the wish to be kicked.
            peer.look()?;
            let chains = state.queue.iter(memory);
            let Some(descriptors) = chains
                .map_err(|error| format!("the available ring is broken: {error}"))?
                .next()
            else {
                if let Some(until_ns) = state.polling.dry(self.now_ns(), poll_max_ns) {
                    break Turn::Look { until_ns };
                }
                let more = state.queue.enable_notification(memory);
                if !more.map_err(ring_fault("the used ring"))? {
                    break Turn::Idle;
                }
                // More came just now. Counted as work, so that the turn ends whatever is done.
                slice.charge(CHAIN_NS);
                has_begun = true;
                state
                    .queue
                    .disable_notification(memory)
                    .map_err(ring_fault("the used ring"))?;
                continue;
            };
            // After a lost backend the VMM replays from the last used element: completing out of
            // order would answer into memory that the driver has reused.
            let answered = state.queue.next_used().wrapping_add(1);
            if state.queue.next_avail() != answered {
                return Err(Halt::Fault(format!(
                    "a bug in the daemon: {} chains were taken, and this would be the answer to number {answered}",
                    state.queue.next_avail(),
                )));
            }
            let head = descriptors.head_index();
            let begun_ns = self.now_ns();
            state.polling.work(begun_ns, poll_max_ns);
            scratch
                .chain
                .fill(memory, descriptors)
                .map_err(|error| error.to_string())?;
            let chain = &scratch.chain;
            slice.charge(CHAIN_NS + u64::from(chain.descriptors()) * DESCRIPTOR_NS);
            let expected_ns = chain.pages().min(wire::BATCH_MAX as u64) * PAGE_EXPECTED_NS;
            if has_begun && !slice.fits(expected_ns) {
                state.give_back();
                break Turn::More;
            }
            has_begun = true;
            let last = unfinished.take().filter(|last| last.head == head);
            let mut spent = Vec::new();
            let answered =
                self.answer(table, scratch, &slice, (head, begun_ns), last, &mut spent)?;
            let (used_bytes, begun_ns, timed) = match answered {
                Answered::Done(used_bytes, begun_ns, timed) => (used_bytes, begun_ns, timed),
                Answered::Unfinished(chain) => {
                    state.give_back();
                    state.unfinished = Some(chain);
                    break Turn::More;
                }
            };
            peer.look()?;
            intact(table)?;
            state
                .queue
                .add_used(memory, head, used_bytes)
                .map_err(ring_fault("the used ring"))?;
            let counters = &self.link.vm.counters;
            counters.requests.fetch_add(1, Ordering::Relaxed);
            if let Some(histogram) = timed {
                histogram.count(Duration::from_nanos(self.now_ns() - begun_ns));
            }
            // The driver says with EVENT_IDX which answer it waits for; otherwise one interrupt
            // stands for the whole turn.
            to_interrupt = !state.queue.event_idx_enabled();
            if !to_interrupt {
                state.interrupt(memory, &self.link.vm)?;
            }
            // The guest has its answer: freeing what it got is not its time any more.
            drop(spent);
        };
        if to_interrupt {
            state.interrupt(memory, &self.link.vm)?;
        }
        Ok(turn)
    }

    /// Executes the chain in `scratch`, or goes on with it if it was interrupted last.
    fn answer<'a>(
        &'a self,
        table: &Memory,
        scratch: &mut Scratch,
        slice: &Slice<'_>,
        (head, begun_ns): (u16, u64),
        last: Option<Unfinished>,
        spent: &mut Vec<Spent<'a>>,
    ) -> Result<Answered<'a>, Halt> {
        let memory = &table.guest;
        let Scratch {
            chain,
            readable,
            pages,
        } = scratch;
        let vm: &'a Vm = &self.link.vm;
        let fault = |error| match error {
            WriteError::HungUp => Halt::HungUp,
            WriteError::Memory(error) => {
                Halt::Fault(format!("a buffer of the guest cannot be accessed: {error}"))
            }
        };
        let read_pages = chain.readable_bytes().min(READ_BUFFER_BYTES as u64) / PAGE_BYTES;
        slice.charge(read_pages * READ_PAGE_NS);
        let readable = chain
            .read(
                memory,
                &mut readable.pages().as_flattened_mut()[..READ_BUFFER_BYTES],
            )
            .map_err(|error| fault(error.into()))?;
        // Before anything is done about it: an empty page is not to be stored as the guest's.
        intact(table)?;
        let kind = if self.index == wire::CONTROL_QUEUE {
            QueueKind::Control
        } else {
            QueueKind::Request
        };
        let parsed = match request::parse(kind, readable, chain.writable_bytes()) {
            Ok(_) if chain.is_out_of_order() => Err(Rejected::Status(wire::S_BAD)),
            parsed => parsed,
        };
        match parsed {
            Ok(request) => {
                let mut header = [0; size_of::<wire::Req>()];
                header.copy_from_slice(&readable[..size_of::<wire::Req>()]);
                let last = last.filter(|last| last.header == header);
                let mut chain_state = last.unwrap_or_else(|| {
                    let cost_pages = request::cost_pages(&request.body);
                    Unfinished {
                        head,
                        header,
                        begun_ns,
                        limited: !vm.rate.admit(self.now_ns(), cost_pages),
                        progress: Progress::default(),
                    }
                });
                let context = Context {
                    vm,
                    peer: &self.link.peer,
                    generation: self.link.generation.load(Ordering::SeqCst),
                    outside: &self.link.outside,
                    limited: chain_state.limited,
                    cut: &|| self.now_ns() >= self.cut_at_ns.load(Ordering::SeqCst),
                    slice,
                };
                let kept = (spent, &mut chain_state.progress);
                let used = execute::execute(&context, &request, chain, memory, pages, kept);
                let timed = match &request.body {
                    Body::Put { .. } => Some(&vm.counters.put_latency),
                    Body::Get { .. } => Some(&vm.counters.get_latency),
                    Body::Flush { .. } => Some(&vm.counters.flush_latency),
                    _ => None,
                };
                Ok(match used.map_err(fault)? {
                    Some(used_bytes) => Answered::Done(used_bytes, chain_state.begun_ns, timed),
                    None => Answered::Unfinished(chain_state),
                })
            }
            Err(Rejected::Status(status)) => {
                vm.counters.requests_bad.fetch_add(1, Ordering::Relaxed);
                let used = execute::answer_status(chain, memory, &self.link.peer, status);
                Ok(Answered::Done(used.map_err(fault)?, begun_ns, None))
            }
            Err(Rejected::Unanswerable) => Err(Halt::Fault(format!(
                "a request has {} writable bytes, too few for an answer",
                chain.writable_bytes()
            ))),
        }
    }

    fn stop(&self, state: &mut State, reason: String) {
        let vm = &self.link.vm;
        vm.counters.queues_stopped.fetch_add(1, Ordering::Relaxed);
        vm.queue_stopped(self.index, &reason);
        state.give_back();
        state.stopped = Some(reason);
        // For what was answered before it.
        if let Some(call) = &state.call {
            vm.interrupt(call);
        }
        if let Some(error) = &state.error {
            vm.interrupt(error);
        }
    }

    /// Takes over what the VMM told: finds the rings in guest memory, and when they are there for
    /// the first time, compares the used index with the base. The caller holds the vring.
    pub fn configure(&self, state: &mut State) {
        state.ready = false;
        let Some(addresses) = state.addresses else {
            return;
        };
        let size = u64::from(state.queue.size());
        let memory = state.memory.clone();
        let find = |address, element_bytes, extra_bytes| {
            memory
                .guest_address(address, element_bytes * size + extra_bytes)
                .map(GuestAddress)
        };
        let (Some(descriptor), Some(available), Some(used)) = (
            find(addresses.descriptor, DESCRIPTOR_BYTES, 0),
            find(addresses.available, AVAIL_ELEMENT_BYTES, RING_EXTRA_BYTES),
            find(addresses.used, USED_ELEMENT_BYTES, RING_EXTRA_BYTES),
        ) else {
            // The VMM adds regions one by one: the ring is ready when all are there.
            return;
        };
        let placed = state
            .queue
            .try_set_desc_table_address(descriptor)
            .and_then(|()| state.queue.try_set_avail_ring_address(available))
            .and_then(|()| state.queue.try_set_used_ring_address(used));
        if let Err(error) = placed {
            self.stop(state, format!("its rings are misplaced: {error}"));
            return;
        }
        state.queue.set_ready(true);
        if !state.synced && state.kick.is_some() {
            match state.queue.used_idx(&memory.guest, Ordering::Acquire) {
                Ok(used) if used.0 == state.queue.next_avail() => {
                    state.queue.set_next_used(used.0);
                    state.synced = true;
                }
                Ok(used) => {
                    let base = state.queue.next_avail();
                    self.stop(
                        state,
                        format!(
                            "the VMM starts it at {base}, but its used index is {}: requests in \
                             between would never be answered, or be answered twice",
                            used.0
                        ),
                    );
                    return;
                }
                Err(error) => {
                    self.stop(state, format!("the used ring cannot be accessed: {error}"));
                    return;
                }
            }
        }
        state.ready = state.synced;
    }
}

impl State {
    /// A worker may take chains.
    pub fn is_running(&self) -> bool {
        self.ready && self.enabled && self.kick.is_some() && self.stopped.is_none()
    }

    /// The chain that was taken last and is not answered counts as not taken.
    fn give_back(&mut self) {
        self.queue.set_next_avail(self.queue.next_used());
        self.unfinished = None;
    }

    /// Sets where the next chain is taken, and clears a fault: the ring is set up anew.
    pub fn set_base(&mut self, base: u16) {
        self.unfinished = None;
        self.queue.set_next_avail(base);
        self.queue.set_next_used(base);
        self.ready = false;
        self.synced = false;
        self.stopped = None;
    }

    fn interrupt(&mut self, memory: &crate::memory::GuestMemory, vm: &Vm) -> Result<(), String> {
        let fault = |error: &dyn std::fmt::Display| {
            format!("the available ring cannot be accessed: {error}")
        };
        let mut wanted = self
            .queue
            .needs_notification(memory)
            .map_err(|e| fault(&e))?;
        if !self.queue.event_idx_enabled() {
            let flags: u16 = memory
                .load(GuestAddress(self.queue.avail_ring()), Ordering::Relaxed)
                .map_err(|e| fault(&e))?;
            wanted = u16::from_le(flags) & AVAIL_F_NO_INTERRUPT == 0;
        }
        if let (true, Some(call)) = (wanted, &self.call) {
            vm.interrupt(call);
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "vring_test.rs"]
mod tests;
