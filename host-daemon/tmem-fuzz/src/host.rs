// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The daemon without its threads, and a neighbour whose pages must stay what they are.
//!
//! A worker looks whether the front end is there each time before it touches guest memory. That look
//! is asked of [`Watch`], which can do in between what another processor of the guest would, at a
//! place that is the same in each run.

use std::cell::RefCell;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::Duration;

use tmem_pool::{
    GetResult, Pool, PoolConfig, Put, PutResult, Quota, Tenant, TenantSpec, TenantStats, Time,
};
use tmemd::VmConfig;
use tmemd::events::bus::{Events, Subscription};
use tmemd::parts::{
    BackgroundWorkers, ClockAndEntropy, ConnectionContext, Device, HungUp, Peer, Session,
    SimulatedClock, Vm, WorkerContext, Workers,
};

/// Enough for all that an input can put.
const POOL_BYTES: u64 = 32 << 20;

/// Time between two looks; nothing depends on how long, but it goes on.
const LOOK_NS: u64 = 1_000;

/// Longer than a drain waits before it cuts off what it finds.
const DRAIN_NS: u64 = 6_000_000;

/// Pages that the neighbour has.
const NEIGHBOURS: u64 = 4;

/// Where the neighbour's pages are, which is where a guest's may be, too.
const POOL: u32 = 1;
const OBJECT: u64 = 1;

/// Looks of a turn at most: one for each chain and each answer, and one for each slice of its data; a
/// turn has 64 pages of work and may begin another batch with the last of them.
const LOOKS_PER_ROUND_MAX: u64 = 1000;

/// Work of a slice at most, in nanoseconds by [`work_ns`]: the 200 µs of a slice, and a first step that
/// begins however little is left.
const WORK_PER_SLICE_MAX_NS: u64 = 260_000;

/// Rounds until nothing is left to do, at most. An input has less work than that.
const ROUNDS_MAX: usize = 2000;

/// What is done at a look.
pub enum Act {
    /// The guest writes these bytes at an offset of its memory's file.
    Write(Arc<File>, u64, Vec<u8>),
    /// The front end hangs up: from then on the guest's memory, whose file this is, stays as it is.
    HangUp(Arc<File>, usize),
    /// A drain begins.
    Drain(Weak<Mutex<Device>>),
}

/// What happens at a worker's looks.
#[derive(Default)]
pub struct Watch {
    looks: AtomicU64,
    /// Acts that are to come, each after so many looks.
    acts: Mutex<Vec<(u64, Act)>>,
    /// An act was done.
    acted: AtomicBool,
    hung_up: AtomicBool,
    /// The memory at the moment of the hang-up.
    left: Mutex<Option<Vec<u8>>>,
    now_ns: AtomicU64,
    generation: AtomicU64,
}

impl Watch {
    fn look(&self) -> Result<(), HungUp> {
        self.now_ns.fetch_add(LOOK_NS, SeqCst);
        self.looks.fetch_add(1, SeqCst);
        let mut acts = lock(&self.acts);
        acts.iter_mut().for_each(|(left, _)| *left -= 1);
        let (due, rest): (Vec<_>, _) = acts.drain(..).partition(|(left, _)| *left == 0);
        *acts = rest;
        drop(acts);
        for (_, act) in due {
            // After a hang-up memory is what somebody else makes of it.
            if self.hung_up.load(SeqCst) {
                break;
            }
            self.acted.store(true, SeqCst);
            match act {
                Act::Write(file, at, bytes) => file.write_all_at(&bytes, at).expect("inside"),
                Act::HangUp(file, bytes) => {
                    let mut left = vec![0; bytes];
                    file.read_exact_at(&mut left, 0).expect("as long");
                    *lock(&self.left) = Some(left);
                    self.hung_up.store(true, SeqCst);
                }
                Act::Drain(device) => {
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

    /// Lets something happen after so many looks, from 1 on.
    pub fn at(&self, looks: u64, act: Act) {
        lock(&self.acts).push((looks.max(1), act));
    }

    /// Whether something has happened since this was asked last; what has not is called off.
    pub fn take_acted(&self) -> bool {
        lock(&self.acts).clear();
        self.acted.swap(false, SeqCst)
    }

    /// The memory as it was when the front end hung up, if it has.
    pub fn left(&self) -> Option<Vec<u8>> {
        lock(&self.left).clone()
    }
}

impl SimulatedClock for Watch {
    fn now_ns(&self) -> u64 {
        self.now_ns.load(SeqCst)
    }

    /// Counted, so that an input can name it.
    fn generation(&self) -> u64 {
        self.generation.fetch_add(1, SeqCst) + 1
    }
}

/// Estimates from the pool's counters what a turn's work costs at least. No figure by which the daemon
/// itself ends a turn is used.
fn work_ns(before: &TenantStats, after: &TenantStats) -> u64 {
    let since = |of: fn(&TenantStats) -> u64| of(after) - of(before);
    let (puts, refused) = (since(|s| s.puts), since(|s| s.puts_refused));
    let (gets, hits) = (since(|s| s.gets), since(|s| s.hits));
    // A large object is dropped in one step, and freed later.
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

/// Locks what no panic of the daemon's can have left half done, since such a one ends the run.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no panic")
}

/// What is made once for all inputs, since address space for a pool takes milliseconds to make. Between
/// two of them it is empty.
struct Base {
    pool: Arc<Pool>,
    vm: Arc<Vm>,
    neighbour: Tenant,
    workers: Arc<Workers>,
    background: Arc<BackgroundWorkers>,
    context: RefCell<WorkerContext>,
    told: Arc<Subscription>,
}

thread_local! {
    static BASE: Rc<Base> = Rc::new(Base::new());
}

/// A daemon with a connection of its guest.
pub struct Host {
    base: Rc<Base>,
    /// What happens at looks.
    pub watch: Arc<Watch>,
    /// The connection.
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
        let pool = Pool::new(PoolConfig {
            size_bytes: POOL_BYTES,
            size_max_bytes: 0,
            seed: 1,
            policy: Default::default(),
        });
        let pool = Arc::new(pool.expect("address space"));
        let tenant = |name: &str| {
            let spec = TenantSpec {
                name: name.into(),
                trust_domain: Some("team".into()),
                quota: Quota {
                    reserve_bytes: 0,
                    limit_bytes: None,
                    weight: 100,
                },
            };
            pool.add_tenant(spec).expect("nothing is reserved")
        };
        let (guest, neighbour) = (tenant("guest"), tenant("neighbour"));
        neighbour.create_pool(POOL).expect("the first");
        let events: Arc<Events> = Arc::default();
        let told = events.subscribe().expect("a descriptor");
        let config: VmConfig = "name=guest,socket=none".parse().expect("good");
        let vm = Arc::new(Vm::new(config, guest, None, events));
        let background = BackgroundWorkers::start(
            pool.clone(),
            &ClockAndEntropy::host(),
            0,
            &Default::default(),
        );
        let workers = Workers::without_threads(1, Duration::ZERO).expect("descriptors");
        Base {
            pool,
            vm,
            neighbour,
            workers: Arc::new(workers),
            background: background.expect("no thread is started"),
            context: RefCell::new(WorkerContext::new().expect("memory")),
            told,
        }
    }

    /// Background work, to its end: equal pages are found, others compressed, what was dropped is freed.
    fn settle(&self, now_ns: u64) {
        let mut steps = 0;
        while self.pool.maintain(Time(now_ns), 16) {
            steps += 1;
            assert!(steps < ROUNDS_MAX, "background work for ever");
        }
    }

    fn give_the_neighbour_its_pages(&self) {
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
            let done = self.neighbour.put(Time(0), POOL, &[put], &mut stored);
            assert!(done.is_ok() && stored == [PutResult::Stored]);
        }
    }

    fn take_the_neighbours_pages(&self) {
        for index in 0..NEIGHBOURS {
            let mut page = [[0; tmem_pool::PAGE_SIZE]];
            let mut result = [GetResult::Miss];
            let cookie = index + 1;
            let (pages, results) = (&mut page, &mut result);
            let tenant = &self.neighbour;
            let got = tenant.get(Time(0), POOL, OBJECT, index, &[cookie], pages, results);
            drop(got.expect("its pool is there"));
            assert_eq!(result, [GetResult::Hit { cookie }], "the neighbour's page");
            assert!(page[0] == content(index), "the neighbour's page");
        }
    }
}

impl Host {
    /// A daemon, a neighbour with pages, and a guest that is connected and has shared nothing yet.
    pub fn new() -> Host {
        let base = BASE.with(Rc::clone);
        base.give_the_neighbour_its_pages();
        let watch: Arc<Watch> = Arc::default();
        let shared = ConnectionContext {
            workers: base.workers.clone(),
            background: base.background.clone(),
            clock: ClockAndEntropy::Simulated(watch.clone()),
        };
        let (own, front_end) = UnixStream::pair().expect("descriptors");
        let looks = watch.clone();
        let peer = Peer::simulated(Box::new(move || looks.look()));
        let session = Session::begin(&base.vm, &own, peer, &shared);
        Host {
            base,
            watch,
            session: session.expect("nobody else is there"),
            _front_end: front_end,
        }
    }

    /// Lets the worker do what there is to do, in bounded steps.
    pub fn work(&mut self) {
        let Base {
            workers,
            background,
            context,
            vm,
            ..
        } = &*self.base;
        let mut context = context.borrow_mut();
        for _ in 0..ROUNDS_MAX {
            let before = self.watch.looks.load(SeqCst);
            let stats = vm.tenant.stats();
            workers.round(0, &mut context, background).expect("epoll");
            let work_ns = work_ns(&stats, &vm.tenant.stats());
            assert!(
                work_ns <= WORK_PER_SLICE_MAX_NS,
                "a slice of {work_ns} ns of work"
            );
            let looks = self.watch.looks.load(SeqCst) - before;
            assert!(looks <= LOOKS_PER_ROUND_MAX, "a turn of {looks} looks");
            if looks == 0 {
                background.unmap();
                return;
            }
        }
        panic!("the worker finds work for ever");
    }

    /// Background work.
    pub fn settle(&self) {
        self.base.settle(self.watch.now_ns());
    }

    /// Stores pages of one value for the guest, without a request of its own.
    #[cfg(test)]
    pub fn store_same(&self, pages: u64) {
        let tenant = &self.base.vm.tenant;
        tenant.create_pool(POOL).expect("the first");
        for index in 0..pages {
            let put = Put {
                object: OBJECT,
                index,
                cookie: index + 1,
                workingset: false,
                page: &[7; tmem_pool::PAGE_SIZE],
            };
            let mut stored = [PutResult::Refused];
            let done = tenant.put(Time(0), POOL, &[put], &mut stored);
            assert!(done.is_ok() && stored == [PutResult::Stored]);
            if index % 64 == 63 {
                self.settle();
            }
        }
    }

    /// Pages of the guest.
    #[cfg(test)]
    pub fn held(&self) -> u64 {
        self.base.vm.tenant.stats().pages
    }

    /// Nothing that went wrong was the daemon's own fault.
    pub fn check(&self) {
        for event in self.base.told.take() {
            assert!(!event.text.contains("a bug"), "{}", event.text);
        }
    }

    /// The connection ends, and the neighbour has all its pages.
    pub fn end(self) {
        self.check();
        let Host { base, session, .. } = self;
        session.end();
        base.take_the_neighbours_pages();
        base.settle(0);
        base.background.unmap();
        let held = base.pool.stats().pages;
        assert_eq!(held, 0, "pages of nobody");
    }
}
