// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of a vring without a connection. This file has the simulated guest that all these tests
//! use.

mod answers;
mod drains;
mod faults;
mod interrupted_chains;
mod notifications;
mod retained;
mod slices;
mod swapped;
mod worker_memory;

use super::*;
use crate::config::settings::VmConfig;
use crate::host::clock::SimulatedClock;
use crate::memory::peer::Peer;
use crate::memory::table::RegionSpec;
use crate::util::request_rate::RequestRate;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
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
/// memory is `used` and no chain is in flight.
fn guest_at(base: u16, used: u16) -> Guest {
    guest_with_indices(base, used, used)
}

/// Creates a guest whose ring the VMM starts with the base `base`, while the indices in guest memory
/// are `used` and `avail`.
fn guest_with_indices(base: u16, used: u16, avail: u16) -> Guest {
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
        .expect("valid settings of a VM were refused");
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
    for (index, ring) in [(used, USED), (avail, AVAIL)] {
        memory
            .guest
            .store(index.to_le(), GuestAddress(ring + 2), Ordering::Release)
            .expect("the address is outside of the guest's memory");
    }
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
        self.put_version(index, count, 0)
    }

    /// Sends a PUT of pages whose contents and cookies differ from those of other versions.
    fn put_version(&mut self, index: u64, count: usize, version: u8) -> u64 {
        let mut bytes = req(wire::T_PUT, count).as_bytes().to_vec();
        for number in 0..count as u64 {
            let page = PutPage {
                object: 1.into(),
                index: (index + number).into(),
                cookie: (index + number + 1 + 1000 * u64::from(version)).into(),
                flags: 0.into(),
                reserved: 0.into(),
            };
            bytes.extend(page.as_bytes());
        }
        for number in 0..count {
            bytes.extend([(index as usize + number) as u8 + 100 * version; PAGE_SIZE]);
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
    /// n. Returns the guest address of the answer.
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
    /// gave the page, plus `beyond`. Returns the guest address of the answer.
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
    /// recompresses the pages. Returns the pages.
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
        let recompressed = self.engine.stats().recompressed_blobs;
        assert_eq!(recompressed, count, "not all pages are stored in zstd form");
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
