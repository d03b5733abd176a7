// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon without its threads, and a neighbour (another VM) whose pages must stay unchanged.
//!
//! A worker checks that the front end is connected each time before it touches guest memory.
//! [`Watch`] answers this check instead of a socket. In this check, [`Watch`] can change the
//! guest's memory or close the connection, as another thread could. So such a change happens at the
//! same point in each run of an input.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tmem_model::HeadlessDaemon;
use tmem_pool::{Get, GetResult, Put, PutResult, Tenant, TenantStats};
use tmemd::events::bus::{Events, Subscription};
use tmemd::parts::{
    ClockAndEntropy, ConnectionContext, Device, HungUp, Peer, Session, SimulatedClock, Vm,
    WorkerContext, Workers,
};

/// Size of the pool in bytes: enough for all pages that an input can put.
const POOL_BYTES: u64 = 32 << 20;

/// Virtual time in nanoseconds that passes at each check that the front end is connected. Any
/// positive value is suitable, because time only has to pass.
const CHECK_NS: u64 = 1_000;

/// Time in nanoseconds by which a drain makes the daemon's clock jump. It is longer than a drain
/// waits before it cuts off the remaining work.
const DRAIN_NS: u64 = 6_000_000;

/// Number of pages of the neighbour, which is another VM of the daemon.
const NEIGHBOURS: u64 = 4;

/// Pool id of the neighbour's pages. The guest may use the same pool and object numbers.
const POOL: u32 = 1;
const OBJECT: u64 = 1;

/// Maximum number of checks, in one scheduling slice of a worker, that the front end is still
/// connected. The worker checks once for each descriptor chain, for each answer, and for each piece
/// of an answer's data. A slice has time for about one batch of 64 pages, and may begin a second
/// one.
const CHECKS_PER_SLICE_MAX: u64 = 1000;

/// Maximum work of a scheduling slice, in nanoseconds as [`work_ns`] estimates them. It covers the
/// 200 µs of a slice and the cost of its first step, which always begins, even if the slice is
/// already over.
const WORK_PER_SLICE_MAX_NS: u64 = 260_000;

/// Maximum number of worker rounds, or of background steps, until no work is left. No input causes
/// more work than that.
const ROUNDS_MAX: usize = 2000;

/// Action of the guest or its front end that happens when a worker checks the connection.
pub enum Action {
    /// The guest writes these bytes to its memory. The fields are the file of the memory, the
    /// offset in the file, and the bytes.
    Write(Arc<File>, u64, Vec<u8>),
    /// The front end closes the connection. From then on the daemon must not change the guest's
    /// memory. The fields are the file of that memory and its length in bytes.
    HangUp(Arc<File>, usize),
    /// A drain of this device's queues begins.
    Drain(Weak<Mutex<Device>>),
}

/// Simulated connection of the front end. It counts the worker's checks of the connection, and
/// executes scheduled actions at these checks.
#[derive(Default)]
pub struct Watch {
    checks: AtomicU64,
    /// Pending actions, each with the number of connection checks after which it happens.
    actions: Mutex<Vec<(u64, Action)>>,
    /// Whether a scheduled action has happened since the last call of [`Watch::take_happened`].
    happened: AtomicBool,
    hung_up: AtomicBool,
    /// Contents of the guest's memory at the moment when the front end closed the connection.
    left: Mutex<Option<Vec<u8>>>,
    now_ns: AtomicU64,
    generation: AtomicU64,
}

impl Watch {
    fn check(&self) -> Result<(), HungUp> {
        self.now_ns.fetch_add(CHECK_NS, SeqCst);
        self.checks.fetch_add(1, SeqCst);
        let mut actions = lock(&self.actions);
        actions.iter_mut().for_each(|(left, _)| *left -= 1);
        let (due, rest): (Vec<_>, _) = actions.drain(..).partition(|(left, _)| *left == 0);
        *actions = rest;
        drop(actions);
        for (_, action) in due {
            // Do not execute actions after the front end has closed the connection, because the
            // memory may then belong to another process.
            if self.hung_up.load(SeqCst) {
                break;
            }
            self.happened.store(true, SeqCst);
            match action {
                Action::Write(file, at, bytes) => file
                    .write_all_at(&bytes, at)
                    .expect("the range is outside of the file of guest memory"),
                Action::HangUp(file, bytes) => {
                    let mut left = vec![0; bytes];
                    file.read_exact_at(&mut left, 0)
                        .expect("the range is outside of the file of guest memory");
                    *lock(&self.left) = Some(left);
                    self.hung_up.store(true, SeqCst);
                }
                Action::Drain(device) => {
                    if let Some(device) = device.upgrade() {
                        lock(&device).begin_drain();
                    }
                    self.now_ns.fetch_add(DRAIN_NS, SeqCst);
                }
            }
        }
        match self.hung_up.load(SeqCst) {
            true => Err(HungUp),
            false => Ok(()),
        }
    }

    /// Schedules an action for a later check of the connection. It happens at the next check if
    /// `checks` is 1.
    pub fn at(&self, checks: u64, action: Action) {
        lock(&self.actions).push((checks.max(1), action));
    }

    /// Returns whether a scheduled action has happened since the last call. Cancels the pending
    /// actions.
    pub fn take_happened(&self) -> bool {
        lock(&self.actions).clear();
        self.happened.swap(false, SeqCst)
    }

    /// Returns the guest's memory as it was when the front end closed the connection, or None if
    /// the front end has not closed it.
    pub fn left(&self) -> Option<Vec<u8>> {
        lock(&self.left).clone()
    }
}

impl SimulatedClock for Watch {
    fn now_ns(&self) -> u64 {
        self.now_ns.load(SeqCst)
    }

    /// Returns consecutive numbers as generations, so that an input can name a generation.
    fn generation(&self) -> u64 {
        self.generation.fetch_add(1, SeqCst) + 1
    }
}

/// Estimates a lower bound of the time that a slice's work takes, from the pool's counters before
/// and after it. Uses none of the figures by which the daemon itself ends a slice.
fn work_ns(before: &TenantStats, after: &TenantStats) -> u64 {
    let since = |of: fn(&TenantStats) -> u64| of(after) - of(before);
    let (puts, refused) = (since(|s| s.puts), since(|s| s.puts_refused));
    let (gets, hits) = (since(|s| s.gets), since(|s| s.hits));
    // Do not count the pages of large objects. A flush detaches such an object in one step, and
    // background work frees its pages later.
    let detached = after.detached_pages.saturating_sub(before.detached_pages);
    let dropped = since(|s| s.flushed_pages).saturating_sub(detached);
    1_000 * (puts - refused)
        + 300 * refused
        + 900 * hits
        + 200 * (gets - hits)
        + 250 * dropped
        + 400 * since(|s| s.evictions)
        + since(|s| s.gain_steps)
}

/// Locks a mutex. A poisoned lock cannot occur, because a panic of the daemon ends the run.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex
        .lock()
        .expect("another thread panicked while it held this lock")
}

/// Parts of a daemon that are created once for all inputs, because reserving address space for a
/// pool takes milliseconds. The pool is empty between two inputs.
struct Base {
    daemon: HeadlessDaemon,
    vm: Arc<Vm>,
    neighbour: Tenant,
    workers: Arc<Workers>,
    context: RefCell<WorkerContext>,
    subscription: Arc<Subscription>,
}

thread_local! {
    static BASE: Rc<Base> = Rc::new(Base::new());
}

/// A daemon without threads, a neighbour (another VM), and the connection of the guest that the
/// fuzzer controls.
pub struct FuzzedDaemon {
    base: Rc<Base>,
    /// Actions that are scheduled for the worker's checks of the connection.
    pub watch: Arc<Watch>,
    /// The connection of the guest that the fuzzer controls.
    pub session: Session,
    _front_end: UnixStream,
}

fn content(index: u64) -> [u8; tmem_pool::PAGE_SIZE] {
    let mut page = [0; tmem_pool::PAGE_SIZE];
    for (at, byte) in page.iter_mut().enumerate() {
        *byte = ((at as u64 * (index + 3)) >> 4) as u8;
    }
    page
}

impl Base {
    fn new() -> Base {
        let daemon = HeadlessDaemon::new(POOL_BYTES, 1, ClockAndEntropy::host());
        let tenant = |name: &str| daemon.tenant(name, Some("team"), 0);
        let (guest, neighbour) = (tenant("guest"), tenant("neighbour"));
        neighbour
            .create_pool(POOL)
            .expect("the tenant already has a pool with this id");
        let events: Arc<Events> = Arc::default();
        let subscription = events
            .subscribe()
            .expect("cannot create the subscription's eventfd");
        let vm = daemon.vm("guest", guest, events);
        let workers = Workers::without_threads(1, Duration::ZERO)
            .expect("cannot create the workers' descriptors");
        Base {
            vm,
            neighbour,
            workers: Arc::new(workers),
            daemon,
            context: RefCell::new(WorkerContext::new().expect("cannot map the worker's buffers")),
            subscription,
        }
    }

    /// Does all background work: finds equal pages, compresses other pages, frees dropped pages.
    fn maintain_all(&self, now_ns: u64) {
        let mut steps = 0;
        while self.daemon.maintain(now_ns, 16) {
            steps += 1;
            assert!(
                steps < ROUNDS_MAX,
                "background work still had work after {steps} steps"
            );
        }
    }

    fn put_neighbour_pages(&self) {
        for index in 0..NEIGHBOURS {
            let page = content(index);
            let put = Put {
                object: OBJECT,
                index,
                cookie: index + 1,
                workingset: false,
                page: &page,
            };
            let mut stored = [PutResult::Refused];
            let done = self.neighbour.put(POOL, &[put], &mut stored);
            assert!(done.is_ok() && stored == [PutResult::Stored]);
        }
    }

    fn check_neighbour_pages(&self) {
        for index in 0..NEIGHBOURS {
            let mut page = [[0; tmem_pool::PAGE_SIZE]];
            let mut result = [GetResult::Miss];
            let cookie = index + 1;
            let (pages, results) = (&mut page, &mut result);
            let tenant = &self.neighbour;
            let got = tenant.get(POOL, &Get::new(OBJECT, index, &[cookie]), pages, results);
            drop(got.expect("the neighbour VM has lost its pool"));
            assert_eq!(
                result,
                [GetResult::Hit { cookie }],
                "the neighbour VM did not get its page"
            );
            assert!(
                page[0] == content(index),
                "the neighbour VM got wrong bytes"
            );
        }
    }
}

impl FuzzedDaemon {
    /// Creates a daemon, a neighbour with pages, and a guest. The guest is connected and has not
    /// shared its memory yet.
    pub fn new() -> FuzzedDaemon {
        let base = BASE.with(Rc::clone);
        base.put_neighbour_pages();
        let watch: Arc<Watch> = Arc::default();
        let shared = ConnectionContext {
            workers: base.workers.clone(),
            background: base.daemon.background.clone(),
            clock: ClockAndEntropy::Simulated(watch.clone()),
        };
        let (own, front_end) = UnixStream::pair().expect("cannot create a socket pair");
        let checked = watch.clone();
        let peer = Peer::simulated(Box::new(move || checked.check()));
        let session = Session::begin(&base.vm, &own, peer, &shared);
        FuzzedDaemon {
            base,
            watch,
            session: session.expect("another connection has claimed the VM"),
            _front_end: front_end,
        }
    }

    /// Runs the daemon's worker until no work is left. Asserts that each scheduling slice is
    /// bounded.
    pub fn work(&mut self) {
        let Base {
            daemon,
            workers,
            context,
            vm,
            ..
        } = &*self.base;
        let mut context = context.borrow_mut();
        for _ in 0..ROUNDS_MAX {
            let before = self.watch.checks.load(SeqCst);
            let stats = vm.tenant.stats();
            workers
                .round(0, &mut context, &daemon.background)
                .expect("cannot poll for kicks");
            let work_ns = work_ns(&stats, &vm.tenant.stats());
            assert!(
                work_ns <= WORK_PER_SLICE_MAX_NS,
                "a scheduling slice did {work_ns} ns of work, more than {WORK_PER_SLICE_MAX_NS}"
            );
            let checks = self.watch.checks.load(SeqCst) - before;
            assert!(
                checks <= CHECKS_PER_SLICE_MAX,
                "a scheduling slice checked the front end {checks} times, more than \
                 {CHECKS_PER_SLICE_MAX}"
            );
            if checks == 0 {
                daemon.background.unmap();
                return;
            }
        }
        panic!("the worker still had work after {ROUNDS_MAX} rounds");
    }

    /// Does all background work of the daemon.
    pub fn maintain_all(&self) {
        self.base.maintain_all(self.watch.now_ns());
    }

    /// Stores `pages` same-filled pages for the guest by calling the pool directly, without a
    /// request.
    #[cfg(test)]
    pub fn store_same(&self, pages: u64) {
        let tenant = &self.base.vm.tenant;
        tenant
            .create_pool(POOL)
            .expect("the tenant already has a pool with this id");
        for index in 0..pages {
            let put = Put {
                object: OBJECT,
                index,
                cookie: index + 1,
                workingset: false,
                page: &[7; tmem_pool::PAGE_SIZE],
            };
            let mut stored = [PutResult::Refused];
            let done = tenant.put(POOL, &[put], &mut stored);
            assert!(done.is_ok() && stored == [PutResult::Stored]);
            if index % 64 == 63 {
                self.maintain_all();
            }
        }
    }

    /// Returns the number of pages that the pool has of the guest.
    #[cfg(test)]
    pub fn held(&self) -> u64 {
        self.base.vm.tenant.stats().pages
    }

    /// Asserts that the daemon's log reports no bug of the daemon.
    pub fn check(&self) {
        for event in self.base.subscription.take() {
            assert!(
                !event.text.contains("a bug"),
                "the daemon reports a bug of its own: {}",
                event.text
            );
        }
    }

    /// Ends the guest's connection, and asserts that the neighbour still has all its pages.
    pub fn end(self) {
        self.check();
        let FuzzedDaemon { base, session, .. } = self;
        session.end();
        base.check_neighbour_pages();
        base.maintain_all(0);
        base.daemon.background.unmap();
        let held = base.daemon.engine.stats().pages;
        assert_eq!(held, 0, "the pool holds pages that belong to no tenant");
    }
}
