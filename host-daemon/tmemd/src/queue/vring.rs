// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Virtqueue: its state, the work of a worker on it in one slice, and how the control thread stops
//! the worker.
//!
//! Two threads use a vring: the worker that serves it, and the control thread of its connection.
//! While the host has swapped out the VM's memory, the worker's partner serves it (`worker.rs`). The
//! vring's lock guards everything that may contain a guest address. The worker only tries to take
//! the lock, so a control thread that holds the lock delays no other VM. Before the control thread
//! takes the lock, it begins a drain, and the worker leaves the vring after its current chain. When
//! the control thread has the lock, the vring is therefore drained: chains are answered one by one,
//! in the order in which they became available.
//!
//! A worker processes a vring in scheduling slices (`slice.rs`). The end of a slice may interrupt a
//! chain. The chain then counts as not taken: the next slice finds it at the head of the available
//! ring and continues it. The VMM may first give the ring to another daemon (GET_VRING_BASE). That
//! daemon executes the chain from its beginning, as after a daemon that was killed (DEV-24 in
//! proto/SPEC.md). Puts and flushes are then repeated, and pages that a GET has already taken are
//! missed.

use crate::host::clock::ClockAndEntropy;
use crate::host::usage::Counts;
use crate::memory::peer::{HungUp, Peer};
use crate::memory::table::{GuestMemory, Memory};
use crate::queue::chain::{AccessError, Chain};
use crate::queue::execute::{self, Context, GuestBuffers, PageBuffers, Progress, Remainder};
use crate::queue::notifier;
use crate::queue::polling::Polling;
use crate::queue::request::{self, Body, QueueKind, Rejected, Request};
use crate::queue::slice::{CHAIN_NS, DESCRIPTOR_NS, PAGE_EXPECTED_NS, Slice};
use crate::util::histogram::Histogram;
use crate::vm::state::Vm;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tmem_pool::{SecretPages, Spent};
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use virtio_tmem as wire;
use vm_memory::{Bytes, GuestAddress};

/// Time from the beginning of a drain after which the worker stops executing its current chain. It
/// then answers the chain's remaining pages with REFUSED, MISS or GONE. The time is half of the 10
/// ms that a drain may take. The other half is for the group of pages that the worker has already
/// begun.
const DRAIN_CUT: Duration = Duration::from_millis(5);

/// Sizes of a virtqueue's elements in bytes (virtio 1.3, 2.7). The available ring and the used ring
/// also have a header and an event index, together 6 bytes.
const DESCRIPTOR_BYTES: u64 = 16;
const AVAIL_ELEMENT_BYTES: u64 = 2;
const USED_ELEMENT_BYTES: u64 = 8;
const RING_EXTRA_BYTES: u64 = 6;

/// Flag of the available ring with which the driver suppresses interrupts.
const AVAIL_F_NO_INTERRUPT: u16 = 1;

/// Data that all vrings of a connection share.
pub struct Link {
    /// The VM of the connection.
    pub vm: Arc<Vm>,
    /// Front end (VMM) of the connection.
    pub peer: Peer,
    /// Number of the current generation of the VM's device. Requests with another number are
    /// answered with STALE. It changes only while no worker uses a vring of the connection.
    pub generation: AtomicU64,
    /// The daemon's clock and entropy source.
    pub clock: ClockAndEntropy,
}

/// Ring addresses as the VMM sends them. They are addresses in the VMM's address space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingAddresses {
    /// Address of the descriptor table, in the VMM's address space.
    pub descriptor: u64,
    /// Address of the available ring, in the VMM's address space.
    pub available: u64,
    /// Address of the used ring, in the VMM's address space.
    pub used: u64,
}

/// State of a vring. The vring's lock guards it.
pub struct VringState {
    /// Size, indices and guest addresses of the rings.
    pub queue: Queue,
    /// The guest's memory; empty before the VMM has sent the first memory table.
    pub memory: Arc<Memory>,
    /// Ring addresses that the VMM sent in SET_VRING_ADDR; None before that message.
    pub addresses: Option<RingAddresses>,
    /// Token under which the worker watches the vring's kick. SET_VRING_KICK sets it and
    /// GET_VRING_BASE clears it; the ring counts as started while it is set.
    pub kick: Option<u64>,
    /// The eventfd with which the daemon interrupts the guest; None if the VMM sent none.
    pub call: Option<OwnedFd>,
    /// The eventfd with which the daemon reports a broken ring to the VMM; None if the VMM sent
    /// none.
    pub error: Option<OwnedFd>,
    /// Whether the VMM has enabled the ring with SET_VRING_ENABLE.
    pub enabled: bool,
    /// Whether the driver has accepted the feature bit `VIRTIO_TMEM_F_RETAIN` (retained pages).
    pub retain: bool,
    /// Whether all parts of the ring are in guest memory and the used index equals the base of
    /// SET_VRING_BASE.
    ready: bool,
    /// Whether the daemon has compared the used index with the base since the last SET_VRING_BASE.
    synced: bool,
    /// Whether the ring has run since the connection or the generation began. The index of its next
    /// chain then shows whether the driver continues the ring or has set it up again.
    has_run: bool,
    /// Index of the first chain that the ring could take since the last SET_VRING_BASE.
    begin: u16,
    /// Reason why the daemon stopped the ring until the VMM sets it up again; None if the ring is
    /// not stopped.
    stopped: Option<String>,
    /// Decides whether the worker polls the ring when it is empty.
    polling: Polling,
    /// Chain that the end of the last slice interrupted. The ring returns it as the next available
    /// chain. None if no chain is interrupted.
    unfinished: Option<Unfinished>,
}

/// Descriptor chain that the end of a slice interrupted.
#[derive(Clone, Copy)]
struct Unfinished {
    /// Index in the descriptor table of the chain's first descriptor.
    head: u16,
    /// Request header (generation, type, count and pool) as the worker read it in the last slice.
    /// If the guest changes the header or the ring, the worker executes the request from its
    /// beginning.
    header: [u8; size_of::<wire::Req>()],
    /// Time at which the execution of the chain began, in ns of the daemon's clock.
    begun_ns: u64,
    /// Whether the request exceeds the VM's rate limit. The limit is checked once for each chain.
    limited: bool,
    progress: Progress,
}

/// State of a vring at the end of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SliceEnd {
    /// The worker has nothing to do for the vring before the next kick.
    Idle,
    /// The ring is empty, and the worker has requested no kick. The worker polls the ring until
    /// `until_ns`, and then gives the vring another slice.
    Poll {
        /// End of the polling, in ns of the daemon's clock.
        until_ns: u64,
    },
    /// The slice is over, and the ring contains further available chains.
    More,
    /// The worker's partner has the vring's lock. It may have looked for chains before the kick for
    /// which this worker queued the vring, so it has to process the vring again.
    Locked,
}

/// Descriptor chain that the worker has taken from the available ring.
struct TakenChain {
    /// Index in the descriptor table of the chain's first descriptor.
    head: u16,
    /// Time at which the worker took the chain, in ns of the daemon's clock.
    begun_ns: u64,
    /// State of this chain if the previous slice interrupted it; otherwise None.
    interrupted: Option<Unfinished>,
    /// Whether the driver has accepted the feature bit `VIRTIO_TMEM_F_RETAIN` (retained pages).
    retain: bool,
}

/// Descriptor chain whose request is executed and whose answer is in guest memory.
struct Done<'a> {
    /// Number of bytes of the answer, to report in the used element.
    used_bytes: u32,
    /// Time at which the execution of the chain began, in ns of the daemon's clock.
    begun_ns: u64,
    /// Histogram in which the latency of the request is counted; None for a request without a
    /// histogram.
    latency: Option<&'a Histogram>,
}

/// Result of executing the request of a chain in one slice.
enum Answered<'a> {
    /// The request is completely executed, and its answer is in guest memory.
    Done(Done<'a>),
    /// The slice ended before the request was finished.
    Unfinished(Unfinished),
}

/// Reason why a slice ended early and the ring must stop.
enum Halt {
    /// The front end (VMM) hung up, so guest memory may contain other data by now.
    HungUp,
    /// A page of guest memory was lost. Data that the worker read may be zeros from the page that
    /// replaced the lost page.
    Lost,
    /// A fault of the guest, the VMM or the daemon. The text describes the fault.
    Fault(String),
}

impl From<HungUp> for Halt {
    fn from(_: HungUp) -> Self {
        Halt::HungUp
    }
}

impl From<AccessError> for Halt {
    fn from(error: AccessError) -> Self {
        match error {
            AccessError::HungUp => Halt::HungUp,
            AccessError::Lost => Halt::Lost,
            AccessError::Memory(error) => {
                Halt::Fault(format!("a buffer of the guest cannot be accessed: {error}"))
            }
        }
    }
}

impl From<String> for Halt {
    fn from(reason: String) -> Self {
        Halt::Fault(reason)
    }
}

/// Converts the error of an access to the used ring into a reason to stop the ring.
fn used_ring_fault(error: virtio_queue::Error) -> Halt {
    Halt::Fault(format!("the used ring cannot be accessed: {error}"))
}

/// Returns true if `base` is the index of a chain in flight, or of the next chain, of a ring with
/// these used and available indices and `size` descriptors.
fn is_in_flight(used: u16, base: u16, avail: u16, size: u16) -> bool {
    let in_flight = avail.wrapping_sub(used);
    in_flight <= size && base.wrapping_sub(used) <= in_flight
}

/// Takes the next chain from the available ring. Returns None if no chain is available.
fn next_chain<'m>(
    state: &mut VringState,
    memory: &'m GuestMemory,
) -> Result<Option<DescriptorChain<&'m GuestMemory>>, Halt> {
    let chains = state.queue.iter(memory);
    let next = chains
        .map_err(|error| format!("the available ring is broken: {error}"))?
        .next();
    // A VMM that lost its back end replays requests from the last used element on, so answers must
    // be in order. Otherwise a replayed request could write into memory that the driver has reused.
    let answered = state.queue.next_used().wrapping_add(1);
    if next.is_some() && state.queue.next_avail() != answered {
        return Err(Halt::Fault(format!(
            "a bug in the daemon: the answers are out of order. The next answer belongs to chain \
             {answered}, but chain {} was taken",
            state.queue.next_avail(),
        )));
    }
    Ok(next)
}

/// Returns an error if guest memory has lost a page. If there is no error, all data that the daemon
/// read from guest memory before the call came from the guest.
fn check_not_lost(memory: &Memory) -> Result<(), Halt> {
    match memory.lost.is_lost() {
        true => Err(Halt::Lost),
        false => Ok(()),
    }
}

/// Copies the head of a request out of guest memory, each byte once. The head is the readable part
/// of the chain without the contents of the pages of a PUT.
fn read_head<'b>(guest: GuestBuffers<'_>, into: &'b mut [u8]) -> Result<&'b [u8], AccessError> {
    let readable_bytes = guest.chain.readable_bytes();
    let within = |bytes: usize| readable_bytes.min(bytes as u64) as usize;
    let req = within(size_of::<wire::Req>());
    guest.read(0, &mut into[..req])?;
    let head = within(request::head_bytes(&into[..req]));
    guest.read(req as u64, &mut into[req..head])?;
    Ok(&into[..head])
}

/// Buffers of a worker for one descriptor chain, the head of its request and the pages of a GET.
/// The pages of a PUT need no buffer.
pub struct Scratch {
    chain: Chain,
    head: SecretPages,
    pages: PageBuffers,
}

impl Scratch {
    /// Allocates buffers for the largest request.
    ///
    /// # Errors
    /// The system lacks address space.
    pub fn new() -> io::Result<Scratch> {
        Ok(Scratch {
            chain: Chain::new(),
            head: SecretPages::new(request::HEAD_BYTES_MAX.div_ceil(wire::PAGE_SIZE))?,
            pages: PageBuffers::new()?,
        })
    }
}

/// Virtqueue of a VM's connection.
pub struct Vring {
    /// Number of the virtqueue within the device; 0 is the control queue.
    pub index: usize,
    /// Number of the worker to which the vring belongs.
    pub worker: usize,
    /// Whether the vring is in the run queue of a worker, or on its way from one to another.
    queued: AtomicBool,
    /// Time at which the vring was put into a run queue, in ns of the daemon's clock. Only the
    /// worker that has queued it, or was passed it, uses it.
    queued_at_ns: AtomicU64,
    link: Arc<Link>,
    is_draining: AtomicBool,
    /// Time, in ns of the daemon's clock, at which a drain makes the worker answer the remaining
    /// pages of its chain with REFUSED, MISS or GONE; `u64::MAX` without a drain.
    cut_at_ns: AtomicU64,
    state: Mutex<VringState>,
}

impl Vring {
    /// Creates a vring that the VMM has not set up yet.
    pub fn new(index: usize, worker: usize, link: Arc<Link>) -> Vring {
        let queue = Queue::new(wire::QUEUE_SIZE_MAX).expect("the maximum is not a power of two");
        Vring {
            index,
            worker,
            queued: AtomicBool::new(false),
            queued_at_ns: AtomicU64::new(0),
            is_draining: AtomicBool::new(false),
            cut_at_ns: AtomicU64::new(u64::MAX),
            state: Mutex::new(VringState {
                queue,
                memory: Arc::new(Memory::empty(&Arc::default(), &link.vm.memory)),
                addresses: None,
                kick: None,
                call: None,
                error: None,
                enabled: false,
                retain: false,
                ready: false,
                synced: false,
                has_run: false,
                begin: 0,
                stopped: None,
                polling: Polling::default(),
                unfinished: None,
            }),
            link,
        }
    }

    /// Returns a number that stands for the vring's VM in the worker's run queue.
    pub fn owner(&self) -> usize {
        Arc::as_ptr(&self.link.vm) as usize
    }

    /// Returns the name of the vring's VM for log messages.
    pub fn vm_name(&self) -> Arc<str> {
        self.link.vm.name()
    }

    fn now_ns(&self) -> u64 {
        self.link.clock.now_ns()
    }

    /// Returns whether the host seems to have swapped out memory of the vring's VM.
    pub fn is_swapped(&self) -> bool {
        self.link.vm.swapped.is_swapped(|| self.now_ns())
    }

    /// Begins a slice at the time that [`dequeue`](Self::dequeue) has returned. Returns the counts
    /// of the calling thread for [`end_slice`](Self::end_slice) if the slice has to be measured,
    /// because the host may have swapped out memory of the VM.
    pub fn begin_slice(&self, begun_ns: u64) -> Option<Counts> {
        self.link.vm.swapped.begin_slice(begun_ns)
    }

    /// Marks the vring as queued. Returns true if it was not queued before; the caller must then
    /// put it into the run queue.
    pub fn enqueue(&self) -> bool {
        let comes = !self.queued.swap(true, Ordering::SeqCst);
        if comes {
            self.queued_at_ns.store(self.now_ns(), Ordering::Relaxed);
        }
        comes
    }

    /// Marks the vring as taken from the run queue. The worker calls this before the vring's slice,
    /// so that a kick during the slice queues the vring again. Returns the time in ns at which the
    /// slice begins, which the caller passes to [`end_slice`](Self::end_slice).
    pub fn dequeue(&self) -> u64 {
        let now_ns = self.now_ns();
        let waited_ns = now_ns - self.queued_at_ns.load(Ordering::Relaxed);
        self.queued.store(false, Ordering::SeqCst);
        let counters = &self.link.vm.counters;
        counters.wait_latency.count(Duration::from_nanos(waited_ns));
        now_ns
    }

    /// Ends a slice that began at `begun_ns`. Adds its time to the VM's processor time, and finds
    /// out whether the slice has waited for memory that the host has swapped out. If the VM begins
    /// to count as swapped, logs that. `before` is the result of
    /// [`begin_slice`](Self::begin_slice).
    ///
    /// The time is taken from the daemon's clock, which is read without a system call. A slice that
    /// answers a single page takes 5 µs, and reading the thread's CPU clock would take a tenth of
    /// that. The two clocks differ only if the worker waits for a processor or for a swapped page
    /// of the guest.
    pub fn end_slice(&self, begun_ns: u64, before: Option<&Counts>) {
        let took_ns = self.now_ns() - begun_ns;
        let vm = &self.link.vm;
        vm.counters.slices_ns.fetch_add(took_ns, Ordering::Relaxed);
        if vm.swapped.end_slice(begun_ns, took_ns, before) {
            vm.info(format_args!(
                "a request waited for memory that the host has swapped out: another worker serves \
                 the VM meanwhile"
            ));
        }
    }

    /// Begins a drain of the vring: its worker leaves it at the end of the current chain.
    pub(super) fn begin_drain(&self) {
        self.cut_at_ns.store(
            self.now_ns() + DRAIN_CUT.as_nanos() as u64,
            Ordering::SeqCst,
        );
        self.is_draining.store(true, Ordering::SeqCst);
    }

    /// Returns whether the worker has to leave the vring.
    #[cfg(test)]
    pub fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::SeqCst)
    }

    /// Waits until the worker has left the vring. The caller must have called
    /// [`begin_drain`](Self::begin_drain) to make the worker leave. As long as the returned guard
    /// lives, no worker processes the vring.
    pub fn lock(&self) -> MutexGuard<'_, VringState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the drain of the vring. The caller must first drop the guard that [`lock`](Self::lock)
    /// returned. Afterwards it must schedule the vring, because the worker ignored kicks during the
    /// drain.
    pub(super) fn end_drain(&self) {
        self.cut_at_ns.store(u64::MAX, Ordering::SeqCst);
        self.is_draining.store(false, Ordering::SeqCst);
    }

    /// Returns true if an empty vring that the worker polls needs a slice: a chain has arrived, the
    /// polling time is over, or the ring is no longer running. Also returns true if another
    /// thread has the vring's lock.
    pub fn poll_has_ended(&self, until_ns: u64) -> bool {
        // Another thread has the lock. The polling ends, and `run_slice` handles this case.
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

    /// Answers available chains in order, as far as the slice allows. If the ring is empty, either
    /// requests a kick from the driver, or returns the time until which the worker shall poll the
    /// ring. That time is at most `poll_max_ns` from now. Does nothing if another thread has the
    /// vring's lock or the ring is not running. A fault or a hang-up of the front end stops the
    /// ring, and a lost page ends the connection.
    pub fn run_slice(&self, scratch: &mut Scratch, poll_max_ns: u64) -> SliceEnd {
        // During a drain, the control thread has the lock. It schedules the vring when it releases
        // the lock.
        let Some(mut state) = self.try_lock() else {
            return match self.is_draining.load(Ordering::SeqCst) {
                true => SliceEnd::Idle,
                false => SliceEnd::Locked,
            };
        };
        if !state.is_running() {
            return SliceEnd::Idle;
        }
        let memory = state.memory.clone();
        let result = self.answer_chains(&mut state, &memory, scratch, poll_max_ns);
        // The worker first finds out whether the host lost a page of the guest's memory (SIGBUS).
        // The daemon replaces such a page by zeros, which may look like a fault of the guest.
        match check_not_lost(&memory).and(result) {
            Ok(end) => end,
            Err(Halt::Lost) => {
                // hang_up() shuts the connection down. The control thread then ends the connection
                // and releases the guest's memory.
                state.return_chain();
                state.stopped = Some("a page of the guest's memory was lost".into());
                self.link.vm.hang_up();
                SliceEnd::Idle
            }
            Err(Halt::Fault(reason)) => {
                self.stop(&mut state, reason);
                SliceEnd::Idle
            }
            Err(Halt::HungUp) => {
                // The ring stays stopped until the control thread detects that the front end hung
                // up and releases the guest's memory.
                state.return_chain();
                state.stopped = Some("the front end hung up".into());
                SliceEnd::Idle
            }
        }
    }

    /// Stops the queue after the worker panicked in a slice of it. A panic is a bug of the daemon;
    /// other queues continue.
    pub fn stop_after_panic(&self) {
        let mut state = self.lock();
        self.stop(
            &mut state,
            "a bug in the daemon: its worker panicked".into(),
        );
    }

    fn try_lock(&self) -> Option<MutexGuard<'_, VringState>> {
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(std::sync::TryLockError::Poisoned(state)) => Some(state.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }

    /// Answers chains until the slice is over, the ring is empty or a drain of the vring begins.
    fn answer_chains(
        &self,
        state: &mut VringState,
        table: &Memory,
        scratch: &mut Scratch,
        poll_max_ns: u64,
    ) -> Result<SliceEnd, Halt> {
        let memory = &table.guest;
        let peer = &self.link.peer;
        peer.check()?;
        let disabled = state.queue.disable_notification(memory);
        disabled.map_err(used_ring_fault)?;
        let slice = Slice::begin(&self.link.clock);
        let mut unfinished = state.unfinished.take();
        let mut to_interrupt = false;
        // The first chain of a slice is always executed, even if it is expected to cost more than a
        // slice.
        let mut has_begun = false;
        let end = loop {
            if self.is_draining.load(Ordering::SeqCst) {
                state.unfinished = unfinished;
                break SliceEnd::Idle;
            }
            if has_begun && !slice.fits(CHAIN_NS) {
                break SliceEnd::More;
            }
            // The daemon checks that the front end is connected before the next steps, which read
            // the available ring or write the event index.
            peer.check()?;
            let Some(descriptors) = next_chain(state, memory)? else {
                if let Some(end) = self.poll_or_request_kick(state, memory, poll_max_ns)? {
                    break end;
                }
                // A chain arrived after the ring was found empty. This pass of the loop is charged
                // like a chain. A guest that repeats the race therefore cannot extend the slice.
                slice.charge(CHAIN_NS);
                has_begun = true;
                continue;
            };
            let head = descriptors.head_index();
            let begun_ns = self.now_ns();
            state.polling.record_request(begun_ns, poll_max_ns);
            let filled = scratch.chain.fill(memory, descriptors);
            filled.map_err(|error| error.to_string())?;
            let chain = &scratch.chain;
            slice.charge(CHAIN_NS + u64::from(chain.descriptors()) * DESCRIPTOR_NS);
            let expected_ns = chain.pages().min(wire::BATCH_MAX as u64) * PAGE_EXPECTED_NS;
            if has_begun && !slice.fits(expected_ns) {
                state.return_chain();
                break SliceEnd::More;
            }
            has_begun = true;
            let taken = TakenChain {
                head,
                begun_ns,
                interrupted: unfinished.take().filter(|last| last.head == head),
                retain: state.retain,
            };
            let mut spent = None;
            match self.answer(table, scratch, &slice, taken, &mut spent)? {
                Answered::Done(done) => self.publish(state, table, head, done)?,
                Answered::Unfinished(chain) => {
                    state.return_chain();
                    state.unfinished = Some(chain);
                    break SliceEnd::More;
                }
            }
            // With EVENT_IDX, the driver determines after which answer it wants an interrupt.
            // Without EVENT_IDX, the guest is interrupted once, after all answers of the slice.
            to_interrupt = !state.queue.event_idx_enabled();
            if !to_interrupt {
                state.interrupt(memory, &self.link.vm)?;
            }
            // The storage of the pages that a GET took is freed after the guest has its answer, so
            // that freeing does not delay the answer.
            drop(spent);
        };
        if to_interrupt {
            state.interrupt(memory, &self.link.vm)?;
        }
        Ok(end)
    }

    /// Decides how the worker continues after it has found the ring empty: it polls the ring, or
    /// requests a kick from the driver. Returns None if a chain has arrived meanwhile.
    fn poll_or_request_kick(
        &self,
        state: &mut VringState,
        memory: &GuestMemory,
        poll_max_ns: u64,
    ) -> Result<Option<SliceEnd>, Halt> {
        if let Some(until_ns) = state.polling.record_empty(self.now_ns(), poll_max_ns) {
            return Ok(Some(SliceEnd::Poll { until_ns }));
        }
        let more = state.queue.enable_notification(memory);
        if !more.map_err(used_ring_fault)? {
            return Ok(Some(SliceEnd::Idle));
        }
        let disabled = state.queue.disable_notification(memory);
        disabled.map_err(used_ring_fault)?;
        Ok(None)
    }

    /// Puts an answered chain into the used ring and counts its request.
    fn publish(
        &self,
        state: &mut VringState,
        table: &Memory,
        head: u16,
        done: Done<'_>,
    ) -> Result<(), Halt> {
        self.link.peer.check()?;
        check_not_lost(table)?;
        let added = state.queue.add_used(&table.guest, head, done.used_bytes);
        added.map_err(used_ring_fault)?;
        let counters = &self.link.vm.counters;
        counters.requests.fetch_add(1, Ordering::Relaxed);
        if let Some(latency) = done.latency {
            latency.count(Duration::from_nanos(self.now_ns() - done.begun_ns));
        }
        Ok(())
    }

    /// Executes the chain in `scratch`: from where the previous slice interrupted it, or from its
    /// beginning.
    fn answer<'a>(
        &'a self,
        table: &Memory,
        scratch: &mut Scratch,
        slice: &Slice<'_>,
        taken: TakenChain,
        spent: &mut Option<Spent<'a>>,
    ) -> Result<Answered<'a>, Halt> {
        let Scratch { chain, head, pages } = scratch;
        let vm: &'a Vm = &self.link.vm;
        let guest = GuestBuffers {
            chain,
            memory: table,
            peer: &self.link.peer,
        };
        let head = read_head(guest, head.pages().as_flattened_mut())?;
        // Lost pages are checked before the request is executed. Otherwise zeros from the
        // replacement of a lost page could be executed as a request of the guest.
        check_not_lost(table)?;
        let kind = match self.index {
            wire::CONTROL_QUEUE => QueueKind::Control,
            _ => QueueKind::Request,
        };
        let sizes = wire::Shape {
            readable_bytes: chain.readable_bytes() as usize,
            writable_bytes: chain.writable_bytes() as usize,
        };
        let parsed = match request::parse(kind, head, sizes, taken.retain) {
            Ok(_) if chain.is_out_of_order() => Err(Rejected::Status(wire::S_BAD)),
            parsed => parsed,
        };
        let request = match parsed {
            Ok(request) => request,
            Err(Rejected::Status(status)) => {
                vm.counters.requests_bad.fetch_add(1, Ordering::Relaxed);
                return Ok(Answered::Done(Done {
                    used_bytes: guest.answer_status(status)?,
                    begun_ns: taken.begun_ns,
                    latency: None,
                }));
            }
            Err(Rejected::Unanswerable) => {
                return Err(Halt::Fault(format!(
                    "a request has {} writable bytes, too few for an answer",
                    chain.writable_bytes()
                )));
            }
        };
        let mut state = self.begin_or_continue(taken, head, &request);
        let context = Context {
            vm,
            generation: self.link.generation.load(Ordering::SeqCst),
            limited: state.limited,
            after_drain_cut: &|| self.now_ns() >= self.cut_at_ns.load(Ordering::SeqCst),
            slice,
        };
        let remainder = Remainder {
            spent,
            progress: &mut state.progress,
        };
        let used = execute::execute(&context, &request, guest, pages, remainder)?;
        let latency = match &request.body {
            Body::Put { .. } => Some(&vm.counters.put_latency),
            Body::Get { .. } => Some(&vm.counters.get_latency),
            Body::Flush { .. } => Some(&vm.counters.flush_latency),
            Body::Ref { .. } => Some(&vm.counters.ref_latency),
            _ => None,
        };
        Ok(match used {
            Some(used_bytes) => Answered::Done(Done {
                used_bytes,
                begun_ns: state.begun_ns,
                latency,
            }),
            None => Answered::Unfinished(state),
        })
    }

    /// Returns the state of the request at the beginning of this slice. If the previous slice
    /// interrupted this request, it has stored that state. Otherwise no part of the request has
    /// been executed, and its pages are now counted against the VM's rate limit.
    fn begin_or_continue(
        &self,
        taken: TakenChain,
        head: &[u8],
        request: &Request<'_>,
    ) -> Unfinished {
        let mut header = [0; size_of::<wire::Req>()];
        header.copy_from_slice(&head[..size_of::<wire::Req>()]);
        let interrupted = taken.interrupted.filter(|last| last.header == header);
        interrupted.unwrap_or_else(|| {
            let cost_pages = request::cost_pages(&request.body);
            Unfinished {
                head: taken.head,
                header,
                begun_ns: taken.begun_ns,
                limited: !self.link.vm.rate.admit(self.now_ns(), cost_pages),
                progress: Progress::default(),
            }
        })
    }

    fn stop(&self, state: &mut VringState, reason: String) {
        let vm = &self.link.vm;
        vm.counters.queues_stopped.fetch_add(1, Ordering::Relaxed);
        vm.queue_stopped(self.index, &reason);
        state.return_chain();
        state.stopped = Some(reason);
        // The guest may wait for the answers to chains before the faulty chain, so it is
        // interrupted.
        if let Some(call) = &state.call {
            notifier::interrupt(vm, call);
        }
        if let Some(error) = &state.error {
            notifier::interrupt(vm, error);
        }
    }

    /// Applies the VMM's settings of the ring: locates its parts in guest memory. When all parts
    /// are in guest memory and the VMM has started the ring, compares the used index with the base
    /// once. The ring starts at its used index, and stops if the base is not an index of a chain in
    /// flight or of the next chain. The caller must have the vring's lock.
    pub fn configure(&self, state: &mut VringState) {
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
            // A part of the ring is not in guest memory. The VMM may add the missing region later;
            // the device then calls this function again.
            return;
        };
        let placed = state
            .queue
            .try_set_desc_table_address(descriptor)
            .and_then(|()| state.queue.try_set_avail_ring_address(available))
            .and_then(|()| state.queue.try_set_used_ring_address(used));
        if let Err(error) = placed {
            self.stop(state, format!("the ring addresses are invalid: {error}"));
            return;
        }
        state.queue.set_ready(true);
        if !state.synced && state.kick.is_some() {
            let queue = &state.queue;
            let indices = queue
                .used_idx(&memory.guest, Ordering::Acquire)
                .and_then(|used| {
                    Ok((used.0, queue.avail_idx(&memory.guest, Ordering::Acquire)?.0))
                });
            let base = queue.next_avail();
            match indices {
                // A VMM that lost its back end may start at the available index. The chains in
                // flight would then never be answered. Their buffers still belong to the device, and
                // requests can be repeated, so the ring starts at its used index.
                Ok((used, avail)) if is_in_flight(used, base, avail, queue.size()) => {
                    state.queue.set_next_avail(used);
                    state.queue.set_next_used(used);
                    state.synced = true;
                    state.has_run = true;
                    state.begin = used;
                }
                Ok((used, avail)) => {
                    self.stop(
                        state,
                        format!(
                            "the VMM starts the ring at {base}, but its used index is {used} and its \
                             available index is {avail}: requests would be answered twice, or never"
                        ),
                    );
                    return;
                }
                Err(error) => {
                    self.stop(state, format!("the ring cannot be accessed: {error}"));
                    return;
                }
            }
        }
        state.ready = state.synced;
    }
}

impl VringState {
    /// Returns true if a worker may take chains from the ring.
    pub fn is_running(&self) -> bool {
        self.ready && self.enabled && self.kick.is_some() && self.stopped.is_none()
    }

    /// Returns the last taken chain to the available ring if the chain was not answered. Forgets
    /// the state of an interrupted chain.
    fn return_chain(&mut self) {
        self.queue.set_next_avail(self.queue.next_used());
        self.unfinished = None;
    }

    /// Sets the index of the next chain to take. Clears the reason for a stop, because the VMM sets
    /// the ring up again.
    pub fn set_base(&mut self, base: u16) {
        self.unfinished = None;
        self.queue.set_next_avail(base);
        self.queue.set_next_used(base);
        self.begin = base;
        self.ready = false;
        self.synced = false;
        self.stopped = None;
    }

    /// Returns false if the ring has run and would continue at another index than `base`. The driver
    /// has then set up the ring again, after a reset of the device that the VMM did not report.
    pub fn continues_at(&self, base: u16) -> bool {
        !self.has_run || self.queue.next_avail() == base
    }

    /// Returns true if the ring has taken chains since the last SET_VRING_BASE. After a reset of the
    /// device, such a ring is one that the driver has not set up again, or not yet.
    pub fn is_of_former_driver(&self) -> bool {
        self.has_run && self.queue.next_avail() != self.begin
    }

    /// Forgets the index at which the ring would continue: the ring may start at any base.
    pub fn forget_index(&mut self) {
        self.has_run = false;
    }

    /// Forgets where the ring is in guest memory, so that no worker follows it there.
    pub fn forget_place(&mut self) {
        self.addresses = None;
        self.ready = false;
        self.synced = false;
    }

    fn interrupt(&mut self, memory: &GuestMemory, vm: &Vm) -> Result<(), String> {
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
            notifier::interrupt(vm, call);
        }
        Ok(())
    }
}

#[cfg(test)]
#[path = "vring_test/mod.rs"]
mod tests;
