// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of a vring without a connection: the work in a slice, stopping the vring, and its state
//! after a drain.

use super::*;
use crate::config::settings::VmConfig;
use crate::host::clock::SimulatedClock;
use crate::memory::peer::Peer;
use crate::memory::table::RegionSpec;
use crate::queue::slice::SLICE_NS;
use crate::util::event_fd::consume;
use crate::util::request_rate::RequestRate;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::os::unix::net::UnixStream;
use tmem_pool::{Engine, EngineConfig, TenantSpec};
use virtio_tmem::{Get, GetPage, PAGE_SIZE, PutPage, RefPage, Req};
use vm_memory::GuestMemoryBackend;
use zerocopy::IntoBytes;

const MEMORY_BYTES: u64 = 4 << 20;
const SIZE: u16 = 256;
const GENERATION: u64 = 77;
/// Address in the VMM's address space of the guest's first byte. It differs from the byte's guest
/// address, so that a test fails if the daemon confuses the two.
const USER: u64 = 0x7000_0000;
const TABLE: u64 = 0;
const AVAIL: u64 = 0x2000;
const USED: u64 = 0x3000;
/// Guest address of the first request. Its answer follows it in memory. The next request and its
/// answer follow that answer, and so on.
const DATA: u64 = 0x10000;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

struct Guest {
    vring: Vring,
    memory: Arc<Memory>,
    link: Arc<Link>,
    _front_end: UnixStream,
    call: OwnedFd,
    scratch: Scratch,
    free: u64,
    heads: u16,
    available: u16,
    engine: Arc<Engine>,
    /// Rate limit of the VM in pages per second; 0 for no limit.
    pages_per_second: Arc<AtomicU64>,
    clock: Arc<Clock>,
}

/// Clock that stands still, so that only the cost of the work ends a slice. In some tests, each
/// read advances the clock by `step_ns`.
#[derive(Default)]
struct Clock {
    now_ns: AtomicU64,
    step_ns: AtomicU64,
}

impl SimulatedClock for Clock {
    fn now_ns(&self) -> u64 {
        let step_ns = self.step_ns.load(Ordering::Relaxed);
        self.now_ns.fetch_add(step_ns, Ordering::Relaxed)
    }

    fn generation(&self) -> u64 {
        GENERATION
    }
}

/// Creates a guest whose ring the VMM starts with the base `base`, while the used index in guest
/// memory is `used`.
fn guest_at(base: u16, used: u16) -> Guest {
    notifier::prepare().expect("cannot create the kernel's AIO context");
    let file = memfd_create("test", MemfdFlags::ALLOW_SEALING).expect("cannot create a memfd");
    ftruncate(&file, MEMORY_BYTES).expect("cannot set the length of the memfd");
    fcntl_add_seals(&file, SealFlags::SHRINK).expect("cannot seal the memfd");
    let spec = RegionSpec {
        guest_address: 0,
        user_address: USER,
        bytes: MEMORY_BYTES,
        file_offset: 0,
    };
    let memory = Memory::empty(&Default::default(), &Default::default())
        .with_region(spec, file.into(), &Default::default())
        .expect("cannot add the region to the table");
    let memory = Arc::new(memory);

    let engine = Engine::new(EngineConfig::new(64 << 20, 1))
        .expect("cannot reserve the pool's address space");
    let config: VmConfig = "name=test,socket=none"
        .parse()
        .expect("the VM's settings were refused");
    let spec = TenantSpec::new("test", config.quota);
    let tenant = engine
        .add_tenant(spec)
        .expect("the pool cannot add the tenant");
    tenant
        .create_pool(1)
        .expect("the tenant already has a pool with this id");
    let (own, front_end) = UnixStream::pair().expect("cannot create a socket pair");
    let pages_per_second = Arc::default();
    let mut vm = Vm::new(config, tenant, None, Arc::default());
    vm.rate = RequestRate::new(&pages_per_second);
    let clock: Arc<Clock> = Arc::default();
    let link = Arc::new(Link {
        vm: Arc::new(vm),
        peer: Peer::new(own),
        generation: AtomicU64::new(GENERATION),
        clock: ClockAndEntropy::Simulated(clock.clone()),
    });
    let vring = Vring::new(1, 0, link.clone());
    let call = eventfd(0, EventfdFlags::NONBLOCK).expect("cannot create an eventfd");
    memory
        .guest
        .store(used.to_le(), GuestAddress(USED + 2), Ordering::Release)
        .expect("the address is outside of the guest's memory");
    {
        let mut state = vring.lock();
        state.queue.set_size(SIZE);
        state.memory = memory.clone();
        state.set_base(base);
        state.addresses = Some(RingAddresses {
            descriptor: USER + TABLE,
            available: USER + AVAIL,
            used: USER + USED,
        });
        state.kick = Some(0);
        state.call = Some(call.try_clone().expect("cannot duplicate the descriptor"));
        state.enabled = true;
        vring.configure(&mut state);
    }
    let available = base;
    Guest {
        vring,
        memory,
        link,
        _front_end: front_end,
        call,
        scratch: Scratch::new().expect("cannot map the worker's buffers"),
        free: DATA,
        heads: 0,
        available,
        engine,
        pages_per_second,
        clock,
    }
}

fn guest() -> Guest {
    guest_at(0, 0)
}

impl Guest {
    fn descriptor(&self, number: u16, address: u64, length: usize, flags: u16) {
        let mut bytes = address.to_le_bytes().to_vec();
        bytes.extend((length as u32).to_le_bytes());
        bytes.extend(flags.to_le_bytes());
        bytes.extend((number + 1).to_le_bytes());
        let at = GuestAddress(TABLE + 16 * u64::from(number));
        self.memory
            .guest
            .write_slice(&bytes, at)
            .expect("the address is outside of the guest's memory");
    }

    /// Makes a chain available that consists of a request and a buffer for its answer. Returns the
    /// guest address of the answer.
    fn send(&mut self, readable: &[u8], writable_bytes: usize) -> u64 {
        let (request, answer) = (self.free, self.free + readable.len() as u64);
        self.free = answer + writable_bytes as u64;
        self.memory
            .guest
            .write_slice(readable, GuestAddress(request))
            .expect("the address is outside of the guest's memory");
        self.descriptor(self.heads, request, readable.len(), NEXT);
        self.descriptor(self.heads + 1, answer, writable_bytes, WRITE);
        self.offer(2);
        answer
    }

    /// Makes a chain available whose descriptors are in an indirect table at the guest address
    /// `table`.
    fn send_indirect(&mut self, table: u64, descriptors: usize) {
        self.descriptor(self.heads, table, 16 * descriptors, INDIRECT);
        self.offer(1);
    }

    fn offer(&mut self, descriptors: u16) {
        let slot = AVAIL + 4 + 2 * u64::from(self.available % SIZE);
        let memory = &self.memory.guest;
        memory
            .store(self.heads.to_le(), GuestAddress(slot), Ordering::Release)
            .expect("the address is outside of the guest's memory");
        self.heads += descriptors;
        self.available = self.available.wrapping_add(1);
        let index = self.available.to_le();
        memory
            .store(index, GuestAddress(AVAIL + 2), Ordering::Release)
            .expect("the address is outside of the guest's memory");
    }

    fn put(&mut self, index: u64, count: usize) -> u64 {
        let mut bytes = req(wire::T_PUT, count).as_bytes().to_vec();
        for number in 0..count as u64 {
            let page = PutPage {
                object: 1.into(),
                index: (index + number).into(),
                cookie: (index + number + 1).into(),
                flags: 0.into(),
                reserved: 0.into(),
            };
            bytes.extend(page.as_bytes());
        }
        for number in 0..count {
            bytes.extend([(index as usize + number) as u8; PAGE_SIZE]);
        }
        self.send(&bytes, 8 + count)
    }

    fn get(&mut self, index: u64, count: usize) -> u64 {
        let get = Get {
            object: 1.into(),
            index: index.into(),
        };
        let mut bytes = [req(wire::T_GET, count).as_bytes(), get.as_bytes()].concat();
        for number in 0..count as u64 {
            bytes.extend((index + number + 1).to_le_bytes());
        }
        self.send(&bytes, 8 + count * (size_of::<GetPage>() + PAGE_SIZE))
    }

    /// Brings the vring into the state after the driver has accepted the feature bit of retained
    /// pages.
    fn accept_retain(&self) {
        self.vring.lock().retain = true;
    }

    /// Sends a GET like [`get`](Self::get). If bit n of `retain` is set, the pool may retain page
    /// n.
    fn get_retaining(&mut self, index: u64, count: usize, retain: u64) -> u64 {
        let get = Get {
            object: 1.into(),
            index: index.into(),
        };
        let mut header = req(wire::T_GET, count);
        header.retain = retain.into();
        let mut bytes = [header.as_bytes(), get.as_bytes()].concat();
        for number in 0..count as u64 {
            bytes.extend((index + number + 1).to_le_bytes());
        }
        self.send(&bytes, 8 + count * (size_of::<GetPage>() + PAGE_SIZE))
    }

    /// Sends a REF of `count` pages. The cookie of each page is the cookie that [`put`](Self::put)
    /// gave the page, plus `beyond`.
    fn refer(&mut self, index: u64, count: usize, beyond: u64) -> u64 {
        let mut bytes = req(wire::T_REF, count).as_bytes().to_vec();
        for index in index..index + count as u64 {
            let page = RefPage {
                object: 1.into(),
                index: index.into(),
                cookie: (index + 1 + beyond).into(),
            };
            bytes.extend(page.as_bytes());
        }
        self.send(&bytes, 8 + count)
    }

    /// Returns the flags of each page from the answer to a GET.
    fn flags(&self, answer: u64, count: usize) -> Vec<u8> {
        self.bytes(answer + 8, count * 16)
            .chunks(16)
            .map(|page| page[9])
            .collect()
    }

    /// Returns two numbers of pages in the pool: all pages, and retained pages.
    fn pages(&self) -> (u64, u64) {
        let stats = self.link.vm.tenant.stats();
        (stats.pages, stats.retained_pages)
    }

    /// Stores a page in the pool and makes the pool finalize (deduplicate and compress) it.
    fn store(&self, index: u64, page: &[u8; PAGE_SIZE]) {
        let put = tmem_pool::Put {
            object: 1,
            index,
            cookie: index + 1,
            workingset: false,
            page,
        };
        let mut stored = [tmem_pool::PutResult::Refused];
        let tenant = &self.link.vm.tenant;
        tenant
            .put(1, &[put], &mut stored)
            .expect("the tenant's pool does not exist");
        assert_eq!(stored, [tmem_pool::PutResult::Stored]);
        if index % 64 == 63 {
            while self.engine.maintain(tmem_pool::Time(0), 64) {}
        }
    }

    /// Stores pages that zstd compresses better than lz4. Then advances the time until the pool
    /// recompresses the pages.
    fn store_dense(&self, count: u64) -> Vec<[u8; PAGE_SIZE]> {
        let page = |number: u64| {
            let mut page = [0; PAGE_SIZE];
            let mut state = number + 1;
            for byte in &mut page {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                *byte = b"etaoinsh"[(state >> 61) as usize];
            }
            page
        };
        let pages: Vec<_> = (0..count).map(page).collect();
        for (index, page) in pages.iter().enumerate() {
            self.store(index as u64, page);
        }
        for sweep in 1..=4 {
            let now = tmem_pool::Time(sweep * 3_600_000_000_000);
            while self.engine.maintain(now, 64) {}
        }
        let dense = self.engine.stats().denser_blobs;
        assert_eq!(dense, count, "not all pages are stored in zstd form");
        pages
    }

    fn run_slice(&mut self) -> SliceEnd {
        self.vring.run_slice(&mut self.scratch, 0)
    }

    fn used(&self) -> u16 {
        let index = self
            .memory
            .guest
            .load(GuestAddress(USED + 2), Ordering::Acquire);
        u16::from_le(index.expect("the address is outside of the guest's memory"))
    }

    fn bytes(&self, address: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.memory
            .guest
            .read_slice(&mut bytes, GuestAddress(address))
            .expect("the address is outside of the guest's memory");
        bytes
    }

    /// Returns the result of each page from the answer to a GET.
    fn results(&self, answer: u64, count: usize) -> Vec<u8> {
        self.bytes(answer + 8, count * 16)
            .chunks(16)
            .map(|page| page[8])
            .collect()
    }

    fn stopped(&self) -> Option<String> {
        self.vring.lock().stopped.clone()
    }

    fn interrupted(&self) -> bool {
        let mut bytes = [0; 8];
        rustix::io::read(&self.call, &mut bytes).is_ok()
    }
}

/// Returns the bytes of a FLUSH of `nr_pages` pages from `index` on. All tests use the same object.
fn flush(index: u64, nr_pages: u64) -> Vec<u8> {
    let range = wire::Range {
        object: 1.into(),
        index: index.into(),
        nr_pages: nr_pages.into(),
    };
    [req(wire::T_FLUSH, 1).as_bytes(), range.as_bytes()].concat()
}

fn req(request_type: u16, count: usize) -> Req {
    Req {
        generation: GENERATION.into(),
        r#type: request_type.into(),
        count: (count as u16).into(),
        pool: 1.into(),
        retain: 0.into(),
    }
}

#[test]
fn a_put_page_is_returned_by_a_get() {
    let mut guest = guest();
    let (put, get) = (guest.put(5, 3), guest.get(5, 3));
    assert_eq!(guest.run_slice(), SliceEnd::Idle);
    assert_eq!(guest.used(), 2);
    let expected = [
        vec![wire::S_OK, 0, 0, 0, 0, 0, 0, 0],
        vec![wire::P_STORED; 3],
    ]
    .concat();
    assert_eq!(guest.bytes(put, 11), expected);
    assert_eq!(guest.results(get, 3), [wire::P_HIT; 3]);
    let data = get + 8 + 3 * 16;
    for page in 0..3 {
        assert_eq!(
            guest.bytes(data + page * 4096, 4096),
            [5 + page as u8; 4096]
        );
    }
    assert!(guest.interrupted());
}

#[test]
fn one_slice_answers_a_bounded_number_of_puts() {
    let mut guest = guest();
    for index in 0..70 {
        guest.put(index, 1);
    }
    assert_eq!(guest.run_slice(), SliceEnd::More);
    let answered = guest.used();
    assert!(
        (30..=66).contains(&answered),
        "one slice answered {answered} of 70 puts, not 30 to 66"
    );
    assert_eq!(guest.run_slice(), SliceEnd::Idle);
    assert_eq!(guest.used(), 70);
}

/// Maximum number of pages that a slice can drop. Dropping a page costs more than 250 ns.
const DROPPED_PER_SLICE_MAX: u64 = SLICE_NS / 250;

/// In this test, each chain flushes one range of many pages that have no stored bytes. Such pages
/// are the fastest to drop.
#[test]
fn flush_work_is_bounded_per_slice_over_many_chains() {
    const CHAINS: u64 = 64;
    const PAGES: u64 = 511;
    let mut guest = guest();
    for index in 0..CHAINS * PAGES {
        guest.store(index, &[7; PAGE_SIZE]);
    }
    for chain in 0..CHAINS {
        guest.send(&flush(chain * PAGES, PAGES), 8);
    }
    let (mut held, mut slices) = (CHAINS * PAGES, 0);
    loop {
        let end = guest.run_slice();
        let now = guest.link.vm.tenant.stats().pages;
        assert!(
            held - now <= DROPPED_PER_SLICE_MAX,
            "one slice reduced {held} pages to {now}: it dropped more than {DROPPED_PER_SLICE_MAX}"
        );
        assert!(now < held, "a slice of the flush dropped no page");
        (held, slices) = (now, slices + 1);
        if end == SliceEnd::Idle {
            break;
        }
    }
    assert_eq!((held, u64::from(guest.used())), (0, CHAINS));
    assert!(slices >= CHAINS * PAGES / DROPPED_PER_SLICE_MAX);
}

/// The flush of a large range visits all keys that the pool tracks to estimate gains. This also
/// costs time if the range contains no page.
#[test]
fn flush_work_on_ranges_without_pages_is_bounded_per_slice() {
    const STEP_NS_MIN: u64 = 1;
    let mut guest = guest();
    for index in 0..1000 {
        guest.store(index, &[7; PAGE_SIZE]);
    }
    let range = wire::Range {
        object: 2.into(),
        index: 0.into(),
        nr_pages: 1000.into(),
    };
    let ranges = vec![range; wire::BATCH_MAX];
    let bytes = [
        req(wire::T_FLUSH, ranges.len()).as_bytes(),
        ranges.as_bytes(),
    ]
    .concat();
    for _ in 0..10 {
        guest.send(&bytes, 8);
    }
    let steps = |guest: &Guest| guest.link.vm.tenant.stats().gain_steps;
    let (mut before, mut slices) = (steps(&guest), 0);
    let all = before + 10 * 64 * 1000;
    while guest.used() < 10 {
        guest.run_slice();
        let now = steps(&guest);
        assert!(now > before, "a slice of the flush visited no page number");
        assert!(
            (now - before) * STEP_NS_MIN <= SLICE_NS / 2,
            "one slice visited page numbers {before} to {now}, more than half of its time allows"
        );
        (before, slices) = (now, slices + 1);
    }
    assert_eq!(
        before, all,
        "the flush did not visit each page number of its ranges exactly once"
    );
    assert!(
        slices >= 7,
        "the flush of all ranges took {slices} slices, expected at least 7"
    );
}

/// A GET of a batch of 64 pages in zstd form takes two slices, because decompressing them takes
/// longer than one slice.
#[test]
fn a_get_of_64_zstd_pages_takes_two_slices() {
    let mut guest = guest();
    let expected = guest.store_dense(64);
    let answer = guest.get(0, 64);
    assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::More, 0));
    let hits = guest.link.vm.tenant.stats().hits;
    assert!(
        (20..=33).contains(&hits),
        "one slice returned {hits} pages, not 20 to 33 (decompressing one page takes 6 µs)"
    );
    assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::Idle, 1));
    assert_eq!(guest.bytes(answer, 1), [wire::S_OK]);
    assert_eq!(guest.results(answer, 64), [wire::P_HIT; 64]);
    let data = guest.bytes(answer + 8 + 64 * 16, 64 * PAGE_SIZE);
    assert!(
        data == expected.concat(),
        "the get returned a page that is missing, repeated or in the wrong place"
    );
    let length = guest.bytes(USED + 4 + 4, 4);
    assert_eq!(length, (8 + 64 * (16 + 4096) as u32).to_le_bytes());
}

/// Allocator that counts the allocations of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is passed unchanged to the system's allocator. Counting allocates nothing,
// because the counter is initialized at compile time and needs no destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller of `alloc` promises what the system's allocator requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller of `dealloc` promises what the system's allocator requires.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static HEAP: Counting = Counting;

#[test]
fn a_get_of_64_pages_allocates_no_memory() {
    for retain in [0, u64::MAX] {
        get_64_pages_without_allocation(retain);
    }
}

/// Sends a GET for 64 pages, some of which are raw, same-filled, compressed or missing. Checks that
/// the worker allocates no memory. If bit n of `retain` is set, the pool may retain page n.
fn get_64_pages_without_allocation(retain: u64) {
    let mut guest = guest();
    guest.accept_retain();
    for index in 0..48u64 {
        let mut page = [index as u8; PAGE_SIZE];
        if index % 2 == 0 {
            page[..8].copy_from_slice(&(index + 1).to_le_bytes());
        }
        guest.store(index, &page);
    }
    while guest.engine.maintain(tmem_pool::Time(0), 64) {}
    guest.put(48, 8);
    assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::Idle, 1));
    let stats = guest.link.vm.tenant.stats();
    assert_eq!((stats.raw_pages, stats.same_filled_pages), (8, 24));
    let answer = guest.get_retaining(0, 64, retain);
    let before = ALLOCATIONS.get();
    let end = guest.run_slice();
    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert_eq!((end, guest.used()), (SliceEnd::Idle, 2));
    let results = [&[wire::P_HIT; 56][..], &[wire::P_MISS; 8]].concat();
    assert_eq!(guest.results(answer, 64), results);
    let stayed = if retain == 0 { 0 } else { 56 };
    assert_eq!(guest.pages(), (stayed, stayed));
    assert!(guest.interrupted(), "the guest was not interrupted");
}

/// A slice also ends when its time is over. Nevertheless, each slice makes progress, even if its
/// time is over when the slice begins.
#[test]
fn requests_of_each_type_resume_after_the_end_of_a_slice() {
    let mut guest = guest();
    guest.clock.step_ns.store(SLICE_NS, Ordering::Relaxed);
    let turns = |guest: &mut Guest, used: u16| {
        let mut turns = 0;
        while guest.used() < used {
            assert_ne!(
                guest.run_slice(),
                SliceEnd::Idle,
                "the queue became idle before {used} chains were answered"
            );
            turns += 1;
            assert!(turns < 100, "the chain was not answered after 100 slices");
        }
        turns
    };
    let put = guest.put(3, 64);
    assert!(turns(&mut guest, 1) > 5);
    assert_eq!(guest.bytes(put, 1), [wire::S_OK]);
    assert_eq!(guest.bytes(put + 8, 64), [wire::P_STORED; 64]);
    // Only the first 32 of the 64 pages from index 35 on are in the pool.
    let get = guest.get(35, 64);
    assert!(turns(&mut guest, 2) > 1);
    let results = [[wire::P_HIT; 32], [wire::P_MISS; 32]].concat();
    assert_eq!(guest.results(get, 64), results);
    for page in 0..32 {
        let data = guest.bytes(get + 8 + 64 * 16 + page * 4096, 4096);
        assert_eq!(data, [35 + page as u8; 4096]);
    }
    let length = guest.bytes(USED + 4 + 8 + 4, 4);
    let written = 8 + 64 * 16 + 32 * 4096u32;
    assert_eq!(
        length,
        written.to_le_bytes(),
        "the used length does not end after the last page that was found"
    );
    let ranges = [(3, 16), (19, 16)].map(|(index, nr_pages): (u64, u64)| wire::Range {
        object: 1.into(),
        index: index.into(),
        nr_pages: nr_pages.into(),
    });
    let flush = [req(wire::T_FLUSH, 2).as_bytes(), ranges.as_bytes()].concat();
    let flushed = guest.send(&flush, 8);
    assert!(turns(&mut guest, 3) > 1);
    assert_eq!(guest.bytes(flushed, 1), [wire::S_OK]);
    assert_eq!(guest.link.vm.tenant.stats().pages, 0);
}

/// A drain returns an interrupted chain to the ring as not taken. The next back end that uses the
/// ring executes the chain from its beginning.
#[test]
fn a_drain_returns_an_interrupted_chain_to_the_ring() {
    let mut guest = guest();
    guest.store_dense(64);
    let answer = guest.get(0, 64);
    assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::More, 0));
    let hits = guest.link.vm.tenant.stats().hits as usize;
    guest.vring.raise_hold();
    assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::Idle, 0));
    let mut state = guest.vring.lock();
    assert_eq!(
        state.queue.next_avail(),
        0,
        "the next available index counts the interrupted chain as taken"
    );
    assert!(
        state.unfinished.is_some(),
        "a drain without ring changes discarded the interrupted chain"
    );
    state.set_base(0);
    assert!(state.unfinished.is_none());
    guest.vring.configure(&mut state);
    drop(state);
    guest.vring.lower_hold();
    while guest.run_slice() == SliceEnd::More {}
    assert_eq!(guest.used(), 1);
    let mut expected = [wire::P_HIT; 64];
    expected[..hits].fill(wire::P_MISS);
    assert_eq!(
        guest.results(answer, 64),
        expected,
        "the restarted chain did not miss exactly the first {hits} pages, which were taken before"
    );
}

/// A drain that does not change the ring, for example because the VMM adds a memory region, does
/// not restart an interrupted chain.
#[test]
fn an_interrupted_chain_continues_after_a_drain_without_ring_changes() {
    let mut guest = guest();
    guest.store_dense(64);
    let answer = guest.get(0, 64);
    assert_eq!(guest.run_slice(), SliceEnd::More);
    guest.vring.raise_hold();
    assert_eq!(guest.run_slice(), SliceEnd::Idle);
    {
        let mut state = guest.vring.lock();
        state.memory = guest.memory.clone();
        guest.vring.configure(&mut state);
    }
    guest.vring.lower_hold();
    while guest.run_slice() == SliceEnd::More {}
    assert_eq!(guest.results(answer, 64), [wire::P_HIT; 64]);
}

/// The pool of a request may be destroyed, or its generation may end, between two slices of the
/// request. The answer then contains no page, as if that had happened before the first slice.
#[test]
fn an_interrupted_get_returns_no_page_after_its_pool_or_generation_ends() {
    for (what, status) in [("pool", wire::S_NO_POOL), ("generation", wire::S_STALE)] {
        let mut guest = guest();
        guest.store_dense(64);
        let get = guest.get(0, 64);
        assert_eq!(
            guest.run_slice(),
            SliceEnd::More,
            "the get was answered in one slice before its {what} ended"
        );
        if what == "pool" {
            guest
                .link
                .vm
                .tenant
                .destroy_pool(1)
                .expect("the tenant has no pool with this id");
        } else {
            let generation = &guest.link.generation;
            generation.store(GENERATION + 1, Ordering::SeqCst);
        }
        while guest.run_slice() == SliceEnd::More {}
        assert_eq!(
            guest.used(),
            1,
            "the get was not answered after its {what} ended"
        );
        assert_eq!(
            guest.bytes(get, 1),
            [status],
            "the get has the wrong status after its {what} ended"
        );
        assert_eq!(
            guest.results(get, 64),
            [wire::P_MISS; 64],
            "the get returned a page after its {what} ended"
        );
        let length = guest.bytes(USED + 4 + 4, 4);
        assert_eq!(
            length,
            (8 + 64 * 16u32).to_le_bytes(),
            "the get has the wrong used length after its {what} ended"
        );
    }
}

/// If a guest overwrites an interrupted request with another one, the worker executes the new
/// request from its beginning.
#[test]
fn a_request_that_replaces_an_interrupted_request_is_executed_in_full() {
    let mut guest = guest();
    guest.store_dense(64);
    let get = guest.get(0, 64);
    assert_eq!(guest.run_slice(), SliceEnd::More);
    let taken = guest.link.vm.tenant.stats().hits;
    // The new request has the same size and names a pool that does not exist.
    let mut other = req(wire::T_GET, 64);
    other.pool = 2.into();
    let at = GuestAddress(get - (24 + 16 + 64 * 8));
    let memory = &guest.memory.guest;
    memory
        .write_slice(other.as_bytes(), at)
        .expect("the address is outside of the guest's memory");
    while guest.run_slice() == SliceEnd::More {}
    assert_eq!(
        (guest.bytes(get, 1), guest.used()),
        (vec![wire::S_NO_POOL], 1)
    );
    assert_eq!(guest.results(get, 64), [wire::P_MISS; 64]);
    assert_eq!(guest.link.vm.tenant.stats().hits, taken);
}

/// A chain that is interrupted counts only once against the rate limit of its VM. A chain that
/// began within the limit is finished.
#[test]
fn an_interrupted_chain_counts_once_against_the_rate_limit() {
    let mut guest = guest();
    guest.store_dense(64);
    guest.pages_per_second.store(1, Ordering::SeqCst);
    let get = guest.get(0, 64);
    assert_eq!(guest.run_slice(), SliceEnd::More);
    while guest.run_slice() == SliceEnd::More {}
    assert_eq!(guest.results(get, 64), [wire::P_HIT; 64]);
}

/// A flush drops all pages in its range, possibly the complete pool. Other VMs, and a drain of the
/// queue, wait only until the current slice of the flush ends.
#[test]
fn a_large_flush_takes_many_slices() {
    let mut guest = guest();
    for index in 0..3000 {
        guest.store(index, &[7; PAGE_SIZE]);
    }
    let flush = flush(1, wire::TO_END);
    let answer = guest.send(&flush, 8);
    let get = guest.get(5, 1);
    let mut held = 3000;
    let mut turns = 0;
    while guest.run_slice() == SliceEnd::More {
        turns += 1;
        let (before, now) = (held, guest.link.vm.tenant.stats().pages);
        assert!(
            now < before && before - now <= DROPPED_PER_SLICE_MAX,
            "one slice reduced {before} pages to {now}: expected 1 to {DROPPED_PER_SLICE_MAX} fewer"
        );
        held = now;
        if turns == 2 {
            let state = guest.vring.lock();
            assert_eq!(
                (state.queue.next_avail(), guest.used()),
                (0, 0),
                "the ring's indexes count the unfinished flush as taken or answered"
            );
        }
    }
    assert!(
        turns >= 4,
        "the flush took {turns} slices, expected at least 4"
    );
    assert_eq!(
        guest.link.vm.tenant.stats().pages,
        1,
        "the flush did not leave exactly the page with index 0"
    );
    assert_eq!(guest.used(), 2);
    assert_eq!(guest.bytes(answer, 1), [wire::S_OK]);
    assert_eq!(guest.results(get, 1), [wire::P_MISS]);
}

/// The cost of each descriptor counts against the slice, because a guest may split a small request
/// into a thousand descriptors.
#[test]
fn the_cost_of_descriptors_counts_against_the_slice() {
    let mut guest = guest();
    for _ in 0..70 {
        let table = guest.free;
        let (request, answer) = (table + 16 * 200, table + 16 * 200 + 24);
        guest.free = answer + 8;
        guest
            .memory
            .guest
            .write_slice(
                req(wire::T_POOL_DESTROY, 0).as_bytes(),
                GuestAddress(request),
            )
            .expect("the address is outside of the guest's memory");
        for number in 0..200u16 {
            let (address, length, flags) = match number {
                0 => (request, 24u32, NEXT),
                199 => (answer, 8, WRITE),
                _ => (request, 0, NEXT),
            };
            let mut bytes = address.to_le_bytes().to_vec();
            bytes.extend(length.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend((number + 1).to_le_bytes());
            let at = GuestAddress(table + 16 * u64::from(number));
            guest
                .memory
                .guest
                .write_slice(&bytes, at)
                .expect("the address is outside of the guest's memory");
        }
        guest.send_indirect(table, 200);
    }
    assert_eq!(guest.run_slice(), SliceEnd::More);
    let answered = u32::from(guest.used());
    // A request costs 13 µs: 10 µs for its 200 descriptors and 3 µs for the chain. A slice of 200
    // µs therefore answers at most 16 requests.
    assert!(
        (1..=16).contains(&answered),
        "one slice answered {answered} of 70 requests, not 1 to 16"
    );
    while guest.run_slice() == SliceEnd::More {}
    assert_eq!(guest.used(), 70);
}

#[test]
fn the_driver_can_suppress_interrupts() {
    let mut guest = guest();
    guest.put(0, 1);
    let flags = AVAIL_F_NO_INTERRUPT.to_le();
    guest
        .memory
        .guest
        .store(flags, GuestAddress(AVAIL), Ordering::Release)
        .expect("the address is outside of the guest's memory");
    guest.run_slice();
    assert_eq!(guest.used(), 1);
    assert!(!guest.interrupted());
}

/// Collects the log lines of the calling thread, with their fields.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl tracing::field::Visit for Lines {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        let mut lines = self.0.lock().expect("the lock is poisoned");
        let line = lines
            .last_mut()
            .expect("a log field was recorded before its line began");
        line.push_str(&format!(" {field}={value:?}"));
    }
}

impl tracing::Subscriber for Lines {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        self.0
            .lock()
            .expect("the lock is poisoned")
            .push(String::new());
        event.record(&mut self.clone());
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// Interrupts that the kernel does not deliver are counted. No other test may lose interrupts,
/// because all tests of the process share the counter.
#[test]
fn lost_interrupts_are_counted_and_logged_with_their_vm() {
    let lines = Lines::default();
    let mut guest = guest();
    let no_eventfd = std::fs::File::open("/dev/null").expect("cannot open /dev/null");
    guest.vring.lock().call = Some(no_eventfd.into());
    let before = notifier::lost_interrupts();
    tracing::subscriber::with_default(lines.clone(), || {
        for nth in 0..100 {
            guest.put(nth, 1);
            guest.run_slice();
        }
    });
    assert_eq!(notifier::lost_interrupts() - before, 100);
    let lines = std::mem::take(&mut *lines.0.lock().expect("the lock is poisoned"));
    assert!(
        lines.len() > 1 && lines.len() < 50,
        "{} lines were logged, not 2 to 49: {lines:?}",
        lines.len()
    );
    for line in lines {
        assert!(
            line.contains("an interrupt is lost") && line.contains("vm=test"),
            "the log line does not name the failure and the VM: {line}"
        );
    }
    assert_eq!(
        guest.used(),
        100,
        "not all 100 requests were answered after interrupts had failed"
    );
    let call = guest
        .call
        .try_clone()
        .expect("cannot duplicate the descriptor");
    guest.vring.lock().call = Some(call);
    guest.put(100, 1);
    guest.run_slice();
    assert!(guest.interrupted());
    assert_eq!(notifier::lost_interrupts() - before, 100);
}

#[test]
fn the_guest_is_not_interrupted_without_an_answer() {
    let mut guest = guest();
    assert_eq!(guest.run_slice(), SliceEnd::Idle);
    assert!(!guest.interrupted());
    guest.put(0, 1);
    guest.run_slice();
    assert!(guest.interrupted());
    guest.run_slice();
    assert!(!guest.interrupted());
}

/// With EVENT_IDX, the driver determines after which answer it wants an interrupt, and the worker
/// sends one only then.
#[test]
fn interrupts_are_sent_only_after_the_answer_at_the_event_index() {
    let mut guest = guest();
    guest.vring.lock().queue.set_event_idx(true);
    let wait_for = |guest: &Guest, used: u16| {
        let at = GuestAddress(AVAIL + 4 + 2 * u64::from(SIZE));
        guest
            .memory
            .guest
            .store(used.to_le(), at, Ordering::Release)
            .expect("the address is outside of the guest's memory");
    };
    wait_for(&guest, 2);
    for (index, interrupted) in [false, false, true, false].into_iter().enumerate() {
        guest.put(index as u64, 1);
        guest.run_slice();
        assert_eq!(
            guest.interrupted(),
            interrupted,
            "answer {index}: the guest must be interrupted after answer 2 only"
        );
    }
    let at = GuestAddress(USED + 4 + 8 * u64::from(SIZE));
    let kick_at: u16 = guest
        .memory
        .guest
        .load(at, Ordering::Acquire)
        .expect("the address is outside of the guest's memory");
    assert_eq!(
        u16::from_le(kick_at),
        4,
        "the device did not request a kick for the next chain"
    );
}

#[test]
fn a_drained_or_locked_vring_takes_no_chain() {
    let mut guest = guest();
    guest.put(0, 1);
    guest.vring.raise_hold();
    assert_eq!(
        (guest.run_slice(), guest.used()),
        (SliceEnd::Idle, 0),
        "a chain was taken during a drain"
    );
    guest.vring.lower_hold();
    {
        let _state = guest.vring.lock();
        assert_eq!(
            guest.vring.run_slice(&mut guest.scratch, 0),
            SliceEnd::Idle,
            "a chain was taken while the ring was locked"
        );
    }
    assert_eq!(guest.used(), 0);
    guest.run_slice();
    assert_eq!(guest.used(), 1);
}

/// Before it writes each part of an answer, the worker checks that the front end is connected.
#[test]
fn a_worker_stops_writing_an_answer_when_the_front_end_hangs_up() {
    const PAGES: usize = 20;
    let stages = [
        // Each row begins with the number of checks that succeed before the front end hangs up.
        // Then come the expected status, number of written pages, used index and event index.
        (0, [0, 0, 1, 1]),
        (1, [0, 0, 1, 1]),
        (2, [0, 0, 1, 1]),
        (3, [1, 0, 1, 1]),
        (4, [1, 16, 1, 1]),
        (5, [1, PAGES, 1, 1]),
        (6, [1, PAGES, 2, 1]),
        (7, [1, PAGES, 2, 2]),
    ];
    for (checks, expected) in stages {
        let mut guest = guest();
        guest.vring.lock().queue.set_event_idx(true);
        guest.put(1, PAGES);
        assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::Idle, 1));
        consume(&guest.call);
        let answer = guest.get(1, PAGES);
        let all = |guest: &Guest| guest.bytes(0, MEMORY_BYTES as usize);
        let before = all(&guest);
        guest.link.peer.hang_up_after(checks);
        assert_eq!(guest.run_slice(), SliceEnd::Idle);
        let results = guest.results(answer, PAGES);
        let data = guest.bytes(answer + 8 + 16 * PAGES as u64, PAGES * PAGE_SIZE);
        let kick_at = guest.bytes(USED + 4 + 8 * u64::from(SIZE), 2);
        let seen = [
            usize::from(results == [wire::P_HIT; PAGES]),
            data.chunks(PAGE_SIZE).filter(|page| page[4095] > 0).count(),
            usize::from(guest.used()),
            usize::from(kick_at[0]),
        ];
        assert_eq!(
            seen, expected,
            "hang-up after {checks} checks of the front end: the written parts of the answer are \
             wrong"
        );
        if checks < 3 {
            assert!(
                before == all(&guest),
                "guest memory changed although the front end hung up after {checks} checks"
            );
        }
        assert_eq!(
            guest.stopped().is_some(),
            checks < 7,
            "hang-up after {checks} checks of the front end: the queue must stop below 7 checks \
             only"
        );
        let stopped = guest
            .link
            .vm
            .counters
            .queues_stopped
            .load(Ordering::Relaxed);
        assert_eq!(stopped, 0, "a hang-up is not counted as a stopped queue");
        // From here on, checks of the front end succeed again, but the ring stays stopped.
        guest.link.peer.hang_up_after(u64::MAX);
        guest.put(50, 1);
        let offered = all(&guest);
        guest.run_slice();
        assert_eq!(
            offered == all(&guest),
            checks < 7,
            "hang-up after {checks} checks of the front end: a stopped queue wrote to guest \
             memory, or a running queue wrote no answer"
        );
    }
}

/// Without EVENT_IDX, a slice begins by writing a flag to guest memory to disable kicks. After a
/// hang-up of the front end, the slice must not write that flag either.
#[test]
fn a_slice_after_a_hang_up_does_not_write_the_kick_flag() {
    let mut guest = guest();
    guest.put(1, 1);
    let before = guest.bytes(0, MEMORY_BYTES as usize);
    guest.link.peer.hang_up_after(0);
    assert_eq!(guest.run_slice(), SliceEnd::Idle);
    assert!(before == guest.bytes(0, MEMORY_BYTES as usize));
}

/// After the time limit of a drain, the remaining pages of a PUT are refused and leave nothing
/// under their keys. The remaining pages of a GET are missed.
#[test]
fn after_the_drain_deadline_puts_are_refused_and_gets_miss() {
    let mut guest = guest();
    guest.put(0, 2);
    guest.run_slice();
    // The time limit of a drain has expired, but no thread waits for the vring. The worker
    // therefore takes the chain and finds that the limit has expired.
    guest.vring.cut_at_ns.store(0, Ordering::SeqCst);
    let (put, missed) = (guest.put(0, 1), guest.get(1, 1));
    guest.run_slice();
    guest.vring.lower_hold();
    assert_eq!(guest.bytes(put, 9)[8], wire::P_REFUSED);
    assert_eq!(guest.results(missed, 1), [wire::P_MISS]);
    assert_eq!(
        guest
            .link
            .vm
            .counters
            .drain_cut_pages
            .load(Ordering::Relaxed),
        2
    );
    let both = guest.get(0, 2);
    guest.run_slice();
    assert_eq!(
        guest.results(both, 2),
        [wire::P_MISS, wire::P_HIT],
        "page 0 was kept although a later put of it was refused, or page 1 was lost"
    );
}

/// An expired drain changes the results of pages, but not the status of a request.
#[test]
fn requests_after_the_drain_deadline_still_report_missing_pools() {
    let mut guest = guest();
    guest.put(0, 1);
    guest.run_slice();
    let tenant = guest.link.vm.tenant.clone();
    tenant
        .destroy_pool(1)
        .expect("the tenant has no pool with this id");
    guest.vring.cut_at_ns.store(0, Ordering::SeqCst);
    let (put, get) = (guest.put(0, 1), guest.get(0, 1));
    guest.run_slice();
    assert_eq!(guest.bytes(put, 9)[0], wire::S_NO_POOL);
    assert_eq!(guest.bytes(get, 1), [wire::S_NO_POOL]);
    assert_eq!(guest.results(get, 1), [wire::P_MISS]);
}

/// Requests beyond a VM's rate limit are answered at once. The pages of a put are refused and leave
/// nothing under their keys. The pages of a get are missed and stay in the pool.
#[test]
fn requests_above_the_rate_limit_are_answered_at_once() {
    let mut guest = guest();
    guest.put(0, 2);
    guest.run_slice();
    // At one page per second, a batch of 64 pages uses up the rate of about a minute.
    guest.pages_per_second.store(1, Ordering::SeqCst);
    let first = guest.get(5, 64);
    guest.run_slice();
    assert_eq!(
        guest.results(first, 64),
        [wire::P_MISS; 64],
        "a get returned a page that was never put"
    );
    let counters = guest.link.clone();
    let limited = move || counters.vm.counters.limited_pages.load(Ordering::Relaxed);
    assert_eq!(limited(), 0);
    let (put, missed) = (guest.put(0, 1), guest.get(1, 1));
    let flush = flush(20, 1);
    let flushed = guest.send(&flush, 8);
    assert_eq!(
        (guest.run_slice(), guest.used()),
        (SliceEnd::Idle, 5),
        "a request above the rate limit was not answered at once"
    );
    assert_eq!(guest.bytes(put, 1), [wire::S_OK]);
    assert_eq!(guest.bytes(put, 9)[8], wire::P_REFUSED);
    assert_eq!(guest.bytes(missed, 1), [wire::S_OK]);
    assert_eq!(guest.results(missed, 1), [wire::P_MISS]);
    assert_eq!(guest.bytes(flushed, 1), [wire::S_OK]);
    assert_eq!(limited(), 2);
    guest.pages_per_second.store(0, Ordering::SeqCst);
    let both = guest.get(0, 2);
    guest.run_slice();
    assert_eq!(
        guest.results(both, 2),
        [wire::P_MISS, wire::P_HIT],
        "page 0 was kept although a later put of it was refused, or page 1 was lost"
    );
    assert_eq!(limited(), 2);
}

/// A VM beyond its rate limit can still flush, so that the pool keeps no page that the VM wants to
/// drop.
#[test]
fn flushes_are_not_rate_limited() {
    let mut guest = guest();
    guest.put(0, 4);
    guest.run_slice();
    guest.pages_per_second.store(1, Ordering::SeqCst);
    guest.get(5, 64);
    let flush = flush(1, 2);
    guest.send(&flush, 8);
    guest.run_slice();
    guest.pages_per_second.store(0, Ordering::SeqCst);
    let all = guest.get(0, 4);
    guest.run_slice();
    let (hit, miss) = (wire::P_HIT, wire::P_MISS);
    assert_eq!(guest.results(all, 4), [hit, miss, miss, hit]);
}

#[test]
fn a_stale_request_changes_nothing() {
    let mut guest = guest();
    guest.put(0, 1);
    guest.run_slice();
    guest
        .link
        .generation
        .store(GENERATION + 1, Ordering::SeqCst);
    let (get, put) = (guest.get(0, 1), guest.put(0, 1));
    guest.run_slice();
    assert_eq!(guest.bytes(get, 1), [wire::S_STALE]);
    assert_eq!(guest.results(get, 1), [wire::P_MISS]);
    assert_eq!(
        guest.bytes(put, 9),
        [wire::S_STALE, 0, 0, 0, 0, 0, 0, 0, wire::P_REFUSED]
    );
    guest.link.generation.store(GENERATION, Ordering::SeqCst);
    let get = guest.get(0, 1);
    guest.run_slice();
    assert_eq!(guest.results(get, 1), [wire::P_HIT]);
}

/// A request with several errors gets the status of the check that comes first (SPEC.md,
/// "Precedence of statuses").
#[test]
fn statuses_follow_the_precedence_in_the_specification() {
    let mut guest = guest();
    let flush = |object: u64, pool: u32| {
        let header = Req {
            pool: pool.into(),
            ..req(wire::T_FLUSH, 1)
        };
        let range = wire::Range {
            object: object.into(),
            index: 0.into(),
            nr_pages: 1.into(),
        };
        [header.as_bytes(), range.as_bytes()].concat()
    };
    let dead_pool = 9;
    let expected = [
        // Bytes of a request that has an unknown type and a wrong size.
        (req(99, 1).as_bytes().to_vec(), wire::S_UNSUPPORTED),
        // Bytes of a request that belongs on the control queue and names object 0.
        (
            req(wire::T_POOL_DESTROY, 0).as_bytes().to_vec(),
            wire::S_BAD,
        ),
        (flush(0, dead_pool), wire::S_BAD),
        // This FLUSH names a pool that does not exist.
        (flush(1, dead_pool), wire::S_STALE),
    ];
    guest
        .link
        .generation
        .store(GENERATION + 1, Ordering::SeqCst);
    for (request, status) in expected {
        let answer = guest.send(&request, 8);
        guest.run_slice();
        assert_eq!(guest.bytes(answer, 1), [status]);
    }
    guest.link.generation.store(GENERATION, Ordering::SeqCst);
    let answer = guest.send(&flush(1, dead_pool), 8);
    guest.run_slice();
    assert_eq!(guest.bytes(answer, 1), [wire::S_NO_POOL]);
}

/// A chain may have no space for a status. The daemon then stops the queue, signals the VMM's error
/// eventfd, and returns the chain to the ring.
#[test]
fn an_unanswerable_request_stops_the_queue() {
    let mut guest = guest();
    let error = eventfd(0, EventfdFlags::NONBLOCK).expect("cannot create an eventfd");
    guest.vring.lock().error = Some(error.try_clone().expect("cannot duplicate the descriptor"));
    guest.put(0, 1);
    guest.send(req(wire::T_POOL_DESTROY, 0).as_bytes(), 7);
    guest.put(1, 1);
    assert_eq!(guest.run_slice(), SliceEnd::Idle);
    assert_eq!(
        guest.used(),
        1,
        "the request before the faulty one was not answered"
    );
    assert!(
        guest.interrupted(),
        "the guest was not interrupted for the answered request"
    );
    assert!(
        guest
            .stopped()
            .expect("the queue did not stop")
            .contains("7 writable bytes")
    );
    assert!(
        rustix::io::read(&error, &mut [0; 8]).is_ok(),
        "the error eventfd did not report the fault to the VMM"
    );
    assert_eq!(
        (guest.run_slice(), guest.used()),
        (SliceEnd::Idle, 1),
        "the stopped queue answered a request"
    );
    let mut state = guest.vring.lock();
    assert_eq!(
        state.queue.next_avail(),
        1,
        "the VMM does not get the base of the faulty chain"
    );
    state.set_base(1);
    guest.vring.configure(&mut state);
    assert!(
        state.is_running(),
        "the queue does not run after the VMM set it up again"
    );
}

#[test]
fn an_available_index_beyond_the_ring_size_stops_the_queue() {
    let mut guest = guest();
    let index = (SIZE + 1).to_le();
    guest
        .memory
        .guest
        .store(index, GuestAddress(AVAIL + 2), Ordering::Release)
        .expect("the address is outside of the guest's memory");
    guest.run_slice();
    assert!(
        guest
            .stopped()
            .expect("the queue did not stop")
            .contains("available ring")
    );
}

#[test]
fn an_answer_out_of_order_is_never_published() {
    let mut guest = guest();
    let answer = guest.send(&flush(0, 1), 8);
    guest.send(&flush(1, 1), 8);
    // To simulate a bug of the daemon, the test makes the worker skip the first chain.
    guest.vring.lock().queue.set_next_avail(1);
    assert_eq!(guest.run_slice(), SliceEnd::Idle);
    let why = guest.stopped().expect("the queue did not stop");
    assert!(
        why.contains("a bug in the daemon"),
        "the queue stopped for the wrong reason: {why}"
    );
    assert_eq!(guest.used(), 0);
    assert_eq!(guest.bytes(answer, 8), [0; 8]);
}

#[test]
fn a_ring_base_that_differs_from_the_used_index_is_refused() {
    for (base, used) in [(1, 0), (0, 1), (0, u16::MAX)] {
        let guest = guest_at(base, used);
        let reason = guest.stopped().expect("the queue did not stop");
        assert!(
            reason.contains(&format!("starts the ring at {base}")),
            "the reason for the stop does not give base {base}: {reason}"
        );
    }
    let mut guest = guest_at(u16::MAX, u16::MAX);
    guest.put(0, 1);
    guest.put(1, 1);
    guest.run_slice();
    assert_eq!(
        (guest.stopped(), guest.used()),
        (None, 1),
        "the request at the wrap of the ring's index was not answered"
    );
}

#[test]
fn rings_outside_of_guest_memory_do_not_run() {
    let mut guest = guest();
    {
        let mut state = guest.vring.lock();
        state.memory = Arc::new(Memory::empty(&Default::default(), &Default::default()));
        guest.vring.configure(&mut state);
        assert!(
            !state.is_running(),
            "the ring was started without guest memory"
        );
    }
    guest.put(0, 1);
    assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::Idle, 0));
    for odd in [USER + MEMORY_BYTES - 8, USER - 8, u64::MAX] {
        let mut state = guest.vring.lock();
        state.memory = guest.memory.clone();
        state.addresses = Some(RingAddresses {
            descriptor: USER + TABLE,
            available: USER + AVAIL,
            used: odd,
        });
        guest.vring.configure(&mut state);
        assert!(
            !state.is_running(),
            "a ring runs whose used ring is at {odd:#x}, outside of guest memory"
        );
    }
    let mut state = guest.vring.lock();
    state.addresses = Some(RingAddresses {
        descriptor: USER + TABLE + 1,
        available: USER + AVAIL,
        used: USER + USED,
    });
    guest.vring.configure(&mut state);
    assert!(
        state
            .stopped
            .as_ref()
            .is_some_and(|reason| reason.contains("ring addresses are invalid"))
    );
}

#[test]
fn a_readable_descriptor_after_a_writable_one_is_answered_bad() {
    let mut guest = guest();
    let flush = flush(0, 1);
    for (turned, status) in [(false, wire::S_OK), (true, wire::S_BAD)] {
        let head = guest.heads;
        let answer = guest.send(&flush, 8);
        if turned {
            guest.descriptor(head, answer, 8, WRITE | NEXT);
            guest.descriptor(head + 1, answer - flush.len() as u64, flush.len(), 0);
        }
        guest.run_slice();
        assert_eq!(guest.bytes(answer, 1), [status]);
    }
}

#[test]
fn a_queue_stops_after_its_worker_panics() {
    let mut guest = guest();
    guest.put(0, 1);
    guest.vring.stop_after_panic();
    assert_eq!((guest.run_slice(), guest.used()), (SliceEnd::Idle, 0));
    assert_eq!(
        guest
            .link
            .vm
            .counters
            .queues_stopped
            .load(Ordering::Relaxed),
        1
    );
    consume(&guest.call);
}

/// In each case of this test, a page that a request needs is lost just before the worker accesses
/// it. The connection must end without an answer. Nothing may be stored or dropped because of the
/// zeros that the worker reads.
#[test]
fn a_lost_page_of_the_guest_ends_the_connection() {
    const HELD: u64 = 40;
    // REQUEST is the guest address of the request. It is the beginning of a page that contains no
    // part of the ring. Each case has the name and the address of the page that is lost.
    const REQUEST: u64 = DATA + 0x10000;
    let cases = [
        ("table", TABLE),
        ("available ring", AVAIL),
        ("used ring", USED),
        ("request", REQUEST),
        ("data", REQUEST + PAGE_SIZE as u64),
        ("answer", REQUEST + 4 * PAGE_SIZE as u64),
    ];
    for base in [0, 5] {
        for (what, page) in cases {
            let mut guest = guest_at(base, base);
            let own = UnixStream::pair().expect("cannot create a socket pair");
            let _place = crate::vm::state::Connected::claim(&guest.link.vm, &own.0)
                .expect("another connection has claimed the VM");
            guest.put(HELD, 8);
            assert_eq!(guest.run_slice(), SliceEnd::Idle);
            let before = guest.engine.stats().pages;
            assert_eq!(
                (guest.used(), before),
                (base + 1, 8),
                "{what}: the request before the loss was not answered"
            );
            guest.free = REQUEST;
            if what == "answer" {
                guest.get(HELD, 8);
            } else {
                guest.put(0, 4);
            }
            let address = guest.memory.guest.get_host_address(GuestAddress(page));
            crate::memory::sigbus::take_away(
                address.expect("the address is outside of the guest's memory"),
                PAGE_SIZE,
            );

            assert_eq!(guest.run_slice(), SliceEnd::Idle);
            let reason = guest
                .stopped()
                .unwrap_or_else(|| panic!("{what}: the queue runs on lost memory"));
            assert!(
                reason.contains("was lost"),
                "{what}: the queue stopped for the wrong reason: {reason}"
            );
            if what != "used ring" {
                assert_eq!(
                    guest.used(),
                    base + 1,
                    "{what}: a request was answered from lost memory"
                );
            }
            let stored = guest.engine.stats().pages;
            let expected = if what == "answer" { 0 } else { before };
            assert_eq!(
                stored, expected,
                "{what}: {stored} pages are stored, expected {expected}"
            );
            let counters = &guest.link.vm.counters;
            let faults = counters.queues_stopped.load(Ordering::Relaxed);
            assert_eq!(
                faults, 0,
                "{what}: the lost page was counted as a fault of the guest"
            );
            let ended =
                Peer::new(own.1.try_clone().expect("cannot duplicate the descriptor")).check();
            assert_eq!(
                ended,
                Err(HungUp),
                "{what}: the connection did not end after the loss of a page"
            );
        }
    }
}

/// The run queue serves owners in turn. All vrings of a VM must therefore have the same owner, and
/// vrings of different VMs must have different owners.
#[test]
fn all_vrings_of_a_vm_have_the_same_owner_in_the_run_queue() {
    let (one, other) = (guest(), guest());
    let second = Vring::new(2, 0, one.link.clone());
    assert_eq!(one.vring.owner(), second.owner());
    assert_ne!(one.vring.owner(), other.vring.owner());
}

#[test]
fn worker_buffers_are_excluded_from_core_dumps() {
    let mut scratch = Scratch::new().expect("cannot map the worker's buffers");
    let buffers = [
        scratch.readable.pages().as_ptr() as usize,
        scratch.pages.pages().as_ptr() as usize,
    ];
    let smaps = std::fs::read_to_string("/proc/self/smaps").expect("cannot read the file");
    let mut undumped = Vec::new();
    let mut range = 0..0;
    for line in smaps.lines() {
        let address = |text| usize::from_str_radix(text, 16).ok();
        let first = line.split(' ').next().unwrap_or_default().split_once('-');
        if let Some((Some(start), Some(end))) = first.map(|(a, b)| (address(a), address(b))) {
            range = start..end;
        } else if line.starts_with("VmFlags:") && line.contains(" dd") {
            undumped.push(range.clone());
        }
    }
    for buffer in buffers {
        let inside = undumped.iter().any(|range| range.contains(&buffer));
        assert!(
            inside,
            "the buffer at {buffer:#x} is in none of the mappings without core dump: {undumped:x?}"
        );
    }
}

/// A worker that polls a ring requests no kicks and finds new chains without them. When it stops
/// polling the ring, it requests kicks again.
#[test]
fn a_polled_ring_requests_no_kick() {
    const LONG: u64 = u64::MAX / 2;
    let mut guest = guest();
    let wanted = |guest: &Guest| {
        let flags: u16 = guest
            .memory
            .guest
            .load(GuestAddress(USED), Ordering::Acquire)
            .expect("the address is outside of the guest's memory");
        u16::from_le(flags) & 1 == 0
    };
    guest.put(0, 1);
    assert_eq!(
        guest.vring.run_slice(&mut guest.scratch, LONG),
        SliceEnd::Idle,
        "the ring was polled before any pause was measured"
    );
    assert!(wanted(&guest));
    guest.put(1, 1);
    let SliceEnd::Poll { until_ns } = guest.vring.run_slice(&mut guest.scratch, LONG) else {
        panic!("the ring was not polled after a short pause");
    };
    assert!(!wanted(&guest) && !guest.vring.poll_has_ended(until_ns));
    assert!(
        guest.vring.poll_has_ended(0),
        "the poll did not end at its time limit"
    );
    guest.put(2, 1);
    assert!(guest.vring.poll_has_ended(until_ns));
    assert!(matches!(
        guest.vring.run_slice(&mut guest.scratch, LONG),
        SliceEnd::Poll { .. }
    ));
    assert_eq!(guest.used(), 3);
    // A slice with a maximum polling time of 0 ends the polling of the ring.
    assert_eq!(guest.vring.run_slice(&mut guest.scratch, 0), SliceEnd::Idle);
    assert!(wanted(&guest));
    // A worker stops polling a ring while the control thread has its lock.
    let state = guest.vring.lock();
    assert!(guest.vring.poll_has_ended(until_ns));
    drop(state);
}

/// Two GETs return a page that stays in the pool (retained). After a REF, the pool keeps the page
/// as after a put. A GET that does not allow the pool to retain the page removes it.
#[test]
fn retained_pages_are_returned_again_and_kept_after_a_ref() {
    let mut guest = guest();
    guest.accept_retain();
    guest.put(5, 3);
    let (first, second) = (guest.get_retaining(5, 3, 5), guest.get_retaining(5, 3, 1));
    let (referred, other) = (guest.refer(5, 3, 0), guest.refer(5, 3, 9));
    guest.run_slice();
    assert_eq!(guest.results(first, 3), [wire::P_HIT; 3]);
    assert_eq!(
        guest.flags(first, 3),
        [wire::GET_RETAINED, 0, wire::GET_RETAINED]
    );
    let data = first + 8 + 3 * 16;
    assert_eq!(guest.bytes(data + 2 * 4096, 4096), [7; 4096]);
    assert_eq!(
        guest.results(second, 3),
        [wire::P_HIT, wire::P_MISS, wire::P_HIT]
    );
    assert_eq!(guest.flags(second, 3), [wire::GET_RETAINED, 0, 0]);
    let ok = [wire::S_OK, 0, 0, 0, 0, 0, 0, 0];
    let answered = |results: [u8; 3]| [&ok[..], &results].concat();
    assert_eq!(
        guest.bytes(referred, 11),
        answered([wire::P_HELD, wire::P_GONE, wire::P_GONE])
    );
    assert_eq!(guest.bytes(other, 11), answered([wire::P_GONE; 3]));
    assert_eq!(guest.pages(), (1, 0));
    let get = guest.get(5, 1);
    guest.run_slice();
    assert_eq!(
        (guest.results(get, 1), guest.flags(get, 1)),
        (vec![wire::P_HIT], vec![0])
    );
    assert_eq!(guest.pages(), (0, 0));
}

/// A driver that has not accepted the feature bit of retained pages gets the answers of a device
/// without the feature.
#[test]
fn pages_are_not_retained_without_the_retain_feature() {
    let mut guest = guest();
    guest.put(0, 1);
    let (get, referred) = (guest.get_retaining(0, 1, 1), guest.refer(0, 1, 0));
    guest.run_slice();
    assert_eq!(guest.bytes(get, 1), [wire::S_BAD]);
    assert_eq!(guest.bytes(referred, 1), [wire::S_UNSUPPORTED]);
    assert_eq!(guest.pages(), (1, 0));
}

#[test]
fn a_stale_ref_changes_nothing() {
    let mut guest = guest();
    guest.accept_retain();
    guest.put(0, 2);
    guest.get_retaining(0, 1, 1);
    guest.run_slice();
    guest
        .link
        .generation
        .store(GENERATION + 1, Ordering::SeqCst);
    let (referred, get) = (guest.refer(0, 2, 0), guest.get_retaining(0, 2, 3));
    guest.run_slice();
    assert_eq!(
        guest.bytes(referred, 10),
        [
            wire::S_STALE,
            0,
            0,
            0,
            0,
            0,
            0,
            0,
            wire::P_GONE,
            wire::P_GONE
        ]
    );
    assert_eq!(guest.results(get, 2), [wire::P_MISS; 2]);
    assert_eq!(guest.pages(), (2, 1));
}

#[test]
fn refs_to_a_missing_pool_are_answered_gone() {
    let mut guest = guest();
    guest.accept_retain();
    let tenant = guest.link.vm.tenant.clone();
    tenant
        .destroy_pool(1)
        .expect("the tenant has a pool with this id");
    for limit_ns in [u64::MAX, 0] {
        guest.vring.cut_at_ns.store(limit_ns, Ordering::SeqCst);
        let referred = guest.refer(0, 1, 0);
        guest.run_slice();
        assert_eq!(
            guest.bytes(referred, 9),
            [wire::S_NO_POOL, 0, 0, 0, 0, 0, 0, 0, wire::P_GONE]
        );
    }
}

/// The driver forgets a page that is answered with GONE, so the pool must drop the page.
#[test]
fn refs_that_are_not_executed_drop_their_pages() {
    for cause in ["drain", "rate", "frozen"] {
        let mut guest = guest();
        guest.accept_retain();
        guest.put(0, 3);
        guest.get_retaining(0, 2, 3);
        guest.run_slice();
        assert_eq!(guest.pages(), (3, 2));
        match cause {
            "drain" => guest.vring.cut_at_ns.store(0, Ordering::SeqCst),
            "rate" => {
                guest.pages_per_second.store(1, Ordering::SeqCst);
                guest.get(100, 64);
                guest.run_slice();
            }
            _ => guest.link.vm.frozen.store(true, Ordering::SeqCst),
        }
        let (referred, other) = (guest.refer(0, 1, 0), guest.refer(1, 1, 9));
        guest.run_slice();
        for answer in [referred, other] {
            assert_eq!(
                guest.bytes(answer, 9),
                [wire::S_OK, 0, 0, 0, 0, 0, 0, 0, wire::P_GONE],
                "{cause}: the REF was not answered GONE"
            );
        }
        // Page 0 has been dropped. The REF of page 1 has a wrong cookie and changes nothing.
        assert_eq!(
            guest.pages(),
            (2, 1),
            "{cause}: the pool does not hold the expected pages"
        );
        let stats = guest.link.vm.tenant.stats();
        assert_eq!(
            (stats.refs, stats.refs_held),
            (2, 0),
            "{cause}: the counters do not show two REFs of which none is held"
        );
    }
}

#[test]
fn a_get_of_a_frozen_vm_retains_no_page() {
    let mut guest = guest();
    guest.accept_retain();
    guest.put(0, 2);
    guest.run_slice();
    guest.link.vm.frozen.store(true, Ordering::SeqCst);
    let get = guest.get_retaining(0, 2, 3);
    guest.run_slice();
    assert_eq!(
        (guest.results(get, 2), guest.flags(get, 2)),
        (vec![wire::P_HIT; 2], vec![0; 2])
    );
    assert_eq!(guest.pages(), (0, 0));
}

/// Each read of the clock uses up the time of a slice. Each slice therefore processes only a few
/// pages.
#[test]
fn interrupted_refs_and_retaining_gets_continue_in_the_next_slice() {
    let mut guest = guest();
    guest.accept_retain();
    guest.put(0, 64);
    guest.run_slice();
    while guest.used() < 1 {
        guest.run_slice();
    }
    guest.clock.step_ns.store(SLICE_NS, Ordering::SeqCst);
    let every_third = 0x9249_2492_4924_9249;
    let get = guest.get_retaining(0, 64, every_third);
    let mut slices = 0;
    while guest.used() < 2 {
        guest.run_slice();
        slices += 1;
    }
    assert!(
        slices > 1,
        "the GET of retained pages was answered in one slice"
    );
    assert_eq!(guest.results(get, 64), [wire::P_HIT; 64]);
    let flags: Vec<u8> = (0..64).map(|page| u8::from(page % 3 == 0)).collect();
    assert_eq!(guest.flags(get, 64), flags);
    let referred = guest.refer(0, 64, 0);
    let mut slices = 0;
    while guest.used() < 3 {
        guest.run_slice();
        slices += 1;
    }
    assert!(slices > 1, "the REF was answered in one slice");
    let held = flags.iter().map(|&flag| match flag {
        0 => wire::P_GONE,
        _ => wire::P_HELD,
    });
    assert_eq!(guest.bytes(referred + 8, 64), held.collect::<Vec<u8>>());
    assert_eq!(guest.pages(), (22, 0));
}
