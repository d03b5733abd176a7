// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of the classes of faults in Xen's XSA-15, by which a guest of Xen's transcendent memory
//! could take over the host. For each class, a test in this file sends faulty requests and messages
//! through a VM's socket. `liars.rs` tests single malformed requests, and `rules.rs` tests single
//! rules of the specification.

use crate::common::{Daemon, TIMEOUT, every_queue_answers, guest, until, work};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use tmem_control::{VarlinkClientInterface, VmSpec};
use tmem_model::memory::PAGE_BYTES;
use tmem_model::ring::{Desc, F_INDIRECT, F_NEXT, F_WRITE};
use tmem_model::{Answer, Content, Driver, GuestConfig, PutPage, RamRegion, Range, Request};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};
use virtio_tmem as wire;

const BAD: &[u8] = &[wire::S_BAD, wire::S_UNSUPPORTED];

/// Waits until no request is in flight, sends one request, and returns its answer.
fn ask(driver: &mut Driver, request: Request) -> Answer {
    let queue = usize::from(!request.is_control());
    driver.settle().unwrap();
    driver.guest.call(queue, request).unwrap()
}

fn put(pool: u32, object: u64, index: u64, cookie: u64) -> Request {
    let page = Content::Noise(cookie).page();
    let flags = 0;
    let page = PutPage {
        object,
        index,
        cookie,
        flags,
        page,
    };
    Request::Put {
        pool,
        pages: vec![page],
    }
}

fn get(pool: u32, object: u64, index: u64, cookie: u64) -> Request {
    Request::Get {
        pool,
        object,
        index,
        cookies: vec![cookie],
        retain: 0,
    }
}

fn flush(pool: u32, object: u64, index: u64, nr_pages: u64) -> Request {
    let range = Range {
        object,
        index,
        nr_pages,
    };
    Request::Flush {
        pool,
        ranges: vec![range],
    }
}

/// Puts one page into the pool. Panics if the daemon does not store the page.
fn store(driver: &mut Driver, pool: u32, object: u64, index: u64, cookie: u64) {
    let answer = ask(driver, put(pool, object, index, cookie));
    assert_eq!(answer.status, wire::S_OK);
    assert_eq!(answer.pages[0].result, wire::P_STORED);
}

/// Requests a page by its cookie. Returns true for a hit, and panics if the page does not have the
/// content that was put with the cookie.
fn hit(driver: &mut Driver, pool: u32, object: u64, index: u64, cookie: u64) -> bool {
    let answer = ask(driver, get(pool, object, index, cookie));
    let Some(page) = answer.pages.first().and_then(|page| page.page.as_ref()) else {
        return false;
    };
    assert!(
        **page == *Content::Noise(cookie).page(),
        "the daemon returned a page that the cookie does not name"
    );
    true
}

/// Sends a request of each type that names a pool. Each answer must have one of the statuses in
/// `status` and contain no page.
fn all_are(driver: &mut Driver, pool: u32, status: &[u8]) {
    let destroy = Request::PoolDestroy { pool };
    for request in [
        put(pool, 1, 1, 7),
        get(pool, 1, 1, 7),
        flush(pool, 1, 0, 0),
        destroy,
    ] {
        let kind = request.kind();
        let answer = ask(driver, request);
        assert!(
            status.contains(&answer.status),
            "a request of type {kind} for pool {pool:#x} was answered with unexpected status {}",
            answer.status
        );
        assert!(answer.pages.iter().all(|page| page.page.is_none()));
    }
}

/// XSA-15: a guest could call operations of the toolstack. In this daemon, only the control socket
/// gives access to quotas, sizes and other VMs. Neither a guest nor its VMM can send a message that
/// changes them.
#[test]
fn a_guest_cannot_perform_control_operations() {
    let mut daemon = Daemon::start(&[("liar", None), ("neighbour", None)]);
    let mut control = tmem_control::connect(&daemon.path("control")).unwrap();
    let mut figures = || {
        let vms = control.list_vms().call().unwrap().vms;
        let pool = control.get_stats(None).call().unwrap().pool;
        let quotas: Vec<_> = vms
            .into_iter()
            .map(|vm| (vm.name, vm.quota, vm.trust_domain))
            .collect();
        (quotas, pool.size_bytes, pool.configured_bytes)
    };
    let mut driver = daemon.driver("liar", 1);
    let mut neighbour = daemon.driver("neighbour", 2);
    work(&mut neighbour, 50);
    let before = figures();
    let known = [
        wire::T_PUT,
        wire::T_GET,
        wire::T_FLUSH,
        wire::T_POOL_CREATE,
        wire::T_POOL_DESTROY,
        wire::T_REPORT,
        wire::T_LATENCIES,
        wire::T_GENERATION,
    ];
    let types = (0..300).chain([0x7fff, 0x8000, 0x8001, 0xff00, u16::MAX]);
    for kind in types.filter(|kind| !known.contains(kind)) {
        for queue in [0, 1] {
            let create = Request::PoolCreate { pool: 77, flags: 0 };
            let generation = driver.guest.generation();
            let encoded = create.encode(generation).patch(8, &kind.to_le_bytes());
            let added = driver
                .guest
                .add_encoded(queue, create, generation, &encoded);
            added.unwrap();
            driver.guest.publish(queue);
            let status = driver.guest.drain(TIMEOUT).unwrap()[0].answer.status;
            assert_eq!(
                status,
                wire::S_UNSUPPORTED,
                "a request of type {kind} was not refused as unsupported"
            );
        }
    }
    // A guest can create only the usual kind of pool and private ones. Other flags are refused.
    for bit in 0..32 {
        let flags = 1 << bit;
        if flags == wire::POOL_PRIVATE {
            continue;
        }
        let answer = ask(&mut driver, Request::PoolCreate { pool: 78, flags });
        assert!(
            BAD.contains(&answer.status),
            "a pool with flag {bit} was created"
        );
    }
    // A control request on a request queue has no effect. A request for pages on the control queue
    // has no effect, either.
    let generation = driver.guest.generation();
    for (queue, request) in [
        (0, flush(1, 1, 0, 0)),
        (1, Request::PoolDestroy { pool: 1 }),
    ] {
        driver.guest.add(queue, request, generation).unwrap();
        driver.guest.publish(queue);
        let done = driver.guest.drain(TIMEOUT).unwrap();
        assert!(
            BAD.contains(&done[0].answer.status),
            "queue {queue} executed a request of the other kind of queue"
        );
    }
    // The daemon refuses a VMM that writes the device's configuration. Otherwise, QEMU would pass
    // on such writes of a guest.
    let frontend = driver.guest.frontend().unwrap();
    let flags = VhostUserConfigFlags::WRITABLE;
    let written = frontend.set_config(0, flags, &[0xff; 32]);
    written.expect_err("the VMM wrote to the configuration");
    assert_eq!(driver.guest.read_config().unwrap().generation, generation);
    work(&mut driver, 30);
    // A call of the control interface gets no answer on a VM's socket.
    driver.guest.hang_up().unwrap();
    let socket = daemon.socket("liar");
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let call =
        b"{\"method\":\"io.virtiotmem.Control.SetPoolSize\",\"parameters\":{\"size_bytes\":1048576}}\0";
    stream.write_all(call).unwrap();
    let mut answer = Vec::new();
    // The daemon may close the connection before it has read the whole message, so an error is
    // ignored.
    let _ = stream.read_to_end(&mut answer);
    assert_eq!(answer, b"");
    assert_eq!(figures(), before);
    neighbour.get_all().unwrap();
    work(&mut neighbour, 50);
}

/// XSA-15: a negative id passed the check of its upper bound. In this daemon, ids are unsigned, and
/// all of their bits are compared.
#[test]
fn pool_ids_are_unsigned() {
    let mut daemon = Daemon::start(&[("a", None)]);
    let mut driver = daemon.driver("a", 1);
    let negative = [1 << 31, (1 << 31) + 1, u32::MAX - 1, u32::MAX];
    for pool in negative {
        all_are(&mut driver, pool, &[wire::S_NO_POOL]);
    }
    for (number, pool) in negative.into_iter().enumerate() {
        let create = Request::PoolCreate { pool, flags: 0 };
        assert_eq!(
            ask(&mut driver, create.clone()).status,
            wire::S_OK,
            "pool {pool:#x} was not created"
        );
        assert_eq!(
            ask(&mut driver, create).status,
            wire::S_BAD,
            "pool {pool:#x} was created twice"
        );
        store(&mut driver, pool, u64::MAX, 1, 100 + number as u64);
    }
    // A pool whose id has the sign bit is not found by the id without that bit.
    for pool in negative.map(|pool| pool & 0x7fff_ffff) {
        if pool > 1 {
            all_are(&mut driver, pool, &[wire::S_NO_POOL]);
        }
    }
    assert!(
        !hit(&mut driver, 1, u64::MAX, 1, 101),
        "pool 1 returned a page of pool 0x80000001, whose id differs only in the sign bit"
    );
    for (number, pool) in negative.into_iter().enumerate() {
        let cookie = 100 + number as u64;
        for object in [1, u64::MAX >> 1, 1 << 63, u64::from(u32::MAX)] {
            assert!(
                !hit(&mut driver, pool, object, 1, cookie),
                "pool {pool:#x} returned a page for object {object:#x}, which was not put"
            );
        }
        assert!(
            hit(&mut driver, pool, u64::MAX, 1, cookie),
            "pool {pool:#x} lost its page"
        );
    }
    every_queue_answers(&mut driver);
}

/// XSA-15: an id was used before it was checked. In this daemon, a pool is searched for among the
/// tenant's own pools only. An id that was never created, was destroyed, or belongs to another VM
/// or an older generation is not found.
#[test]
fn foreign_or_stale_pool_ids_are_refused() {
    let mut daemon = Daemon::start(&[("a", Some("team")), ("b", Some("team"))]);
    let mut driver = daemon.driver("a", 1);
    let mut other = daemon.driver("b", 2);
    let none = &[wire::S_NO_POOL];
    all_are(&mut driver, 0, BAD);
    let create = ask(&mut driver, Request::PoolCreate { pool: 0, flags: 0 });
    assert!(BAD.contains(&create.status), "the daemon created pool 0");
    let borders = [2, 255, 256, 257, 0xffff, 0x1_0000, 0x1_0001, u32::MAX];
    for pool in borders {
        all_are(&mut driver, pool, none);
    }
    // For each id, the test creates a pool, destroys it, and creates another pool with that id.
    for pool in borders {
        let create = || Request::PoolCreate { pool, flags: 0 };
        assert_eq!(ask(&mut driver, create()).status, wire::S_OK);
        store(&mut driver, pool, 1, 1, 7);
        assert_eq!(
            ask(&mut driver, Request::PoolDestroy { pool }).status,
            wire::S_OK
        );
        all_are(&mut driver, pool, none);
        assert_eq!(ask(&mut driver, create()).status, wire::S_OK);
        assert!(
            !hit(&mut driver, pool, 1, 1, 7),
            "a new pool with the id of a destroyed one returned a page"
        );
    }
    // The second VM cannot use the ids of pools that belong to the first VM.
    for pool in borders {
        store(&mut driver, pool, 1, 1, 8);
        all_are(&mut other, pool, none);
        assert!(hit(&mut driver, pool, 1, 1, 8));
    }
    driver.reboot().unwrap();
    let live = driver.pool();
    for pool in borders.into_iter().filter(|pool| *pool != live) {
        all_are(&mut driver, pool, none);
    }
    work(&mut other, 30);
}

/// XSA-15: a guest without a tenant was served with a null pointer. In this daemon, a connection
/// has a tenant from its first message to its end, whether it has a pool or not.
#[test]
fn requests_before_or_after_a_generation_reach_no_pool() {
    let run = |directory: &std::path::Path| {
        let directory = directory.to_str().unwrap();
        vec!["--run-directory".into(), directory.into()]
    };
    let mut daemon = Daemon::with_arguments(&[("a", None), ("other", None)], "512MiB", run);
    let mut other = daemon.driver("other", 2);
    let mut driver = Driver::new(guest("a"), Default::default()).unwrap();
    let socket = daemon.socket("a");
    let first = &mut driver.guest;
    daemon.until("the VM's socket is free", || first.connect(&socket).is_ok());
    // The front end signals the queues (kick) before it has passed guest memory or rings to the
    // daemon.
    (0..driver.guest.num_queues()).for_each(|queue| driver.guest.kick(queue));
    driver.guest.start().unwrap();
    driver.new_generation().unwrap();
    let none = &[wire::S_NO_POOL];
    all_are(&mut driver, 1, none);
    driver.create_pool().unwrap();
    let pool = driver.pool();
    store(&mut driver, pool, 1, 1, 7);
    // After a device reset, the pool and its page are gone, for requests with the old generation
    // number and with the new one.
    let before = driver.guest.generation();
    driver.guest.reset().unwrap();
    driver.guest.start().unwrap();
    driver.new_generation().unwrap();
    for request in [put(pool, 1, 1, 7), get(pool, 1, 1, 7), flush(pool, 1, 0, 0)] {
        driver.guest.add(1, request, before).unwrap();
        driver.guest.publish(1);
        let done = driver.guest.drain(TIMEOUT).unwrap();
        assert_eq!(done[0].answer.status, wire::S_STALE);
    }
    all_are(&mut driver, pool, none);
    driver.create_pool().unwrap();
    let pool = driver.pool();
    assert!(
        !hit(&mut driver, pool, 1, 1, 7),
        "a new pool returned a page of an earlier generation"
    );
    // An operator removes a VM that sends requests. The VM's connection ends, and the daemon
    // answers none of its requests any more.
    let mut control = tmem_control::connect(&daemon.path("control")).unwrap();
    let (uuid, socket) = (
        "89abcdef-0123-4567-89ab-cdef01234567",
        daemon.socket("guest"),
    );
    let spec = VmSpec {
        uuid: uuid.into(),
        name: "guest".into(),
        socket: socket.to_str().unwrap().into(),
        trust_domain: None,
        quota: tmem_control::Quota {
            reserve_bytes: 0,
            limit_bytes: None,
            weight: 100,
        },
        owner: None,
        group: None,
        mode: None,
        memory_max_bytes: None,
    };
    for _ in 0..5 {
        assert!(control.add_vm(spec.clone()).call().unwrap().added);
        let mut removed = daemon.driver("guest", 3);
        for object in 1..20 {
            removed.put(object, 0, 12);
        }
        let path = socket.to_str().unwrap().to_string();
        assert!(control.remove_vm(uuid.into(), path).call().unwrap().removed);
        // The daemon may still answer requests that it took before the VM was removed.
        let guest = &mut removed.guest;
        until("the VM's connection ends", || guest.read_config().is_err());
        let used = |guest: &tmem_model::FakeGuest| -> Vec<u16> {
            let queues = 0..guest.num_queues();
            queues.map(|q| guest.ring(q).used_idx_in_memory()).collect()
        };
        let answered = used(&removed.guest);
        for queue in 0..removed.guest.num_queues() {
            removed.guest.publish(queue);
            removed.guest.kick(queue);
        }
        work(&mut other, 20);
        assert_eq!(
            used(&removed.guest),
            answered,
            "a request of a removed VM was answered"
        );
        assert!(removed.guest.connect(&socket).is_err());
    }
    work(&mut driver, 30);
}

/// Adds a descriptor chain to queue 1 without publishing it. `bend` gets the descriptors of a valid
/// chain and may make them invalid.
fn add_chain(driver: &mut Driver, request: Request, bend: impl FnOnce(&mut Vec<Desc>)) {
    let generation = driver.guest.generation();
    let placed = driver.guest.place(&request.encode(generation)).unwrap();
    let side = |pieces: &[(u64, usize)], flags: u16| -> Vec<Desc> {
        let pieces = pieces.iter().filter(|piece| piece.1 > 0);
        let desc = |&(addr, len): &(u64, usize)| Desc {
            addr,
            len: len as u32,
            flags,
            next: 0,
        };
        pieces.map(desc).collect()
    };
    let mut descs = side(&placed.1.readable, 0);
    descs.extend(side(&placed.1.writable, F_WRITE));
    bend(&mut descs);
    let ring = driver.guest.ring_mut(1);
    let slots: Vec<u16> = descs.iter().map(|_| ring.take_desc().unwrap()).collect();
    for (number, mut desc) in descs.into_iter().enumerate() {
        if let Some(next) = slots.get(number + 1) {
            desc.flags |= F_NEXT;
            desc.next = *next;
        }
        ring.write_desc(slots[number], desc);
    }
    driver
        .guest
        .add_by_hand(1, request, placed, slots[0], slots);
}

/// Adds a faulty descriptor chain, which the daemon must never answer. The queue stops, and the
/// daemon writes only event indices to guest memory. The daemon stores and drops no page, and
/// continues to serve both VMs.
fn stops(daemon: &mut Daemon, vms: &mut [Driver; 2], what: &str, add: impl FnOnce(&mut Driver)) {
    let [driver, neighbour] = vms;
    let pool = driver.pool();
    store(driver, pool, 900, 1, 5);
    let layout = driver.guest.ring(1).layout();
    let used = driver.guest.ring(1).used_idx_in_memory();
    add(driver);
    let before = driver.guest.ram().snapshot();
    driver.guest.publish(1);
    let guest = &driver.guest;
    daemon.until("the queue is stopped", || {
        assert_eq!(
            guest.ring(1).used_idx_in_memory(),
            used,
            "{what}: a request with an invalid buffer was answered"
        );
        guest.take_queue_error(1)
    });
    // Changes of the pages with the rings are ignored. A worker may request kicks again after the
    // guest has seen its last answer.
    let queues = 0..driver.guest.num_queues();
    let mut rings: Vec<u64> = queues
        .map(|queue| driver.guest.ring(queue).layout().used / PAGE_BYTES)
        .collect();
    rings.push(layout.avail / PAGE_BYTES);
    let changed = driver.guest.ram().changed_pages(&before);
    let wrong: Vec<_> = changed
        .iter()
        .filter(|page| !rings.contains(page))
        .collect();
    assert!(
        wrong.is_empty(),
        "{what}: the daemon wrote to pages {wrong:x?} of guest memory because of a refused buffer"
    );
    let generation = driver.guest.generation();
    let asked = get(pool, 900, 1, 5);
    driver.guest.add(2, asked, generation).unwrap();
    driver.guest.publish(2);
    let mut done = None;
    daemon.until("the other queue answers", || {
        done = driver.guest.poll(2).unwrap();
        done.is_some()
    });
    let result = done.unwrap().answer.pages[0].result;
    assert_eq!(
        result,
        wire::P_HIT,
        "{what}: the page that was stored before was lost"
    );
    driver.reboot().unwrap();
    work(driver, 5);
    work(neighbour, 5);
}

/// XSA-15: addresses that a guest passed were used without a check. In this daemon, each byte of a
/// buffer must be in the memory that the VMM shares. Otherwise, the queue stops before the daemon
/// reads or writes anything.
#[test]
fn buffers_outside_of_guest_memory_are_never_accessed() {
    let mut daemon = Daemon::start(&[("a", None), ("b", None)]);
    let mut vms = [daemon.driver("a", 1), daemon.driver("b", 2)];
    let log = vms[0].guest.start_log().unwrap().region();
    // Most of these addresses are beside, between and around the regions of guest memory. Others
    // belong to the VMM's mapping, the dirty log, the daemon or the kernel. Buffers at the last two
    // addresses begin inside a region and end outside.
    let end = (1 << 32) + (8 << 20);
    let addresses = [
        8 << 20,
        2 << 30,
        (1 << 32) - 1,
        end,
        vms[0].guest.ram().host_addr(0),
        log.mmap_size + end,
        0x5555_5555_4000,
        0x7fff_f7ff_0000,
        0xffff_8880_0000_0000,
        u64::MAX - 8,
        u64::MAX,
        (8 << 20) - 8,
        end - 8,
    ];
    for address in addresses {
        let at = |number: usize| {
            move |descs: &mut Vec<Desc>| {
                descs[number].addr = address;
            }
        };
        // Each faulty address replaces the address of a PUT's request, page or answer.
        for number in 0..3 {
            let what = format!("a put's descriptor {number} at {address:#x}");
            stops(&mut daemon, &mut vms, &what, |driver| {
                add_chain(driver, put(driver.pool(), 900, 1, 6), at(number));
            });
        }
        let what = format!("a get's page at {address:#x}");
        stops(&mut daemon, &mut vms, &what, |driver| {
            add_chain(driver, get(driver.pool(), 900, 1, 5), at(2));
        });
        let what = format!("a table at {address:#x}");
        let table = Desc {
            addr: address,
            len: 32,
            flags: F_INDIRECT,
            next: 0,
        };
        stops(&mut daemon, &mut vms, &what, |driver| {
            let request = flush(driver.pool(), 900, 0, 0);
            add_chain(driver, request, |descs| *descs = vec![table]);
        });
    }
    daemon.expect_alive();
}

/// XSA-15: the sum of an offset and a length could overflow before it was compared. This daemon
/// computes sums with more bits than their terms have. The lengths of a chain are tested here, with
/// buffers of 4 GiB, `liars.rs` tests the fields of requests, and unit tests test the addresses of
/// rings and regions.
#[test]
fn overflowing_lengths_of_a_chain_stop_its_queue() {
    let mut daemon = Daemon::start(&[("a", None)]);
    // The guest has 6 GiB of memory, so that buffers of 4 GiB are inside of it. Almost all of the
    // memory is untouched and takes no memory of the host.
    let large = GuestConfig {
        ram: vec![RamRegion {
            start: 0,
            size_bytes: 6 << 30,
        }],
        mem_slots: true,
        ..guest("a")
    };
    let mut driver = daemon.driver_with(large, Default::default());
    // The chain's readable or writable part is 4 GiB longer than the request needs.
    for writable in [false, true] {
        let request = flush(driver.pool(), 1, 0, 0);
        add_chain(&mut driver, request, |descs| {
            let flags = if writable { F_WRITE } else { 0 };
            let huge = [u32::MAX, 1].map(|len| Desc {
                addr: 0x1000,
                len,
                flags,
                next: 0,
            });
            let at = if writable { descs.len() } else { 1 };
            descs.splice(at..at, huge);
        });
        let used = driver.guest.ring(1).used_idx_in_memory();
        driver.guest.publish(1);
        let guest = &driver.guest;
        daemon.until("the queue is stopped", || guest.take_queue_error(1));
        assert_eq!(driver.guest.ring(1).used_idx_in_memory(), used);
        driver.reboot().unwrap();
    }
}

/// XSA-15: after an error, a lock was not released. This daemon keeps no lock after it has refused
/// a message. The test lets the refused VM, another VM and an operator use the same locks after
/// each refusal. `liars.rs` uses all queues after each refused request.
#[test]
fn refused_messages_leave_no_lock_held() {
    let mut daemon = Daemon::start(&[("a", Some("team")), ("b", Some("team"))]);
    let mut driver = daemon.driver("a", 1);
    let mut other = daemon.driver("b", 2);
    let mut control = tmem_control::connect(&daemon.path("control")).unwrap();
    let mut operator = || {
        for name in ["a", "b"] {
            let quota = tmem_control::Quota {
                reserve_bytes: 0,
                limit_bytes: None,
                weight: 100,
            };
            control.set_quota(name.into(), quota).call().unwrap();
            control.get_stats(Some(name.into())).call().unwrap();
            control.flush_vm(name.into()).call().unwrap();
        }
    };
    // Type of a function that sends a faulty message and returns true if the daemon refuses it. The
    // daemon ends the connection, unless it can refuse the message without harm.
    type Odd = fn(&mut tmem_model::FakeGuest) -> bool;
    let messages: [(&str, Odd); 6] = [
        ("features", |guest| {
            guest.frontend().unwrap().set_features(1 << 63).is_err()
        }),
        ("size", |guest| {
            guest.frontend().unwrap().set_vring_num(1, 3).is_err()
        }),
        ("no descriptors", |guest| {
            guest.frontend().unwrap().set_vring_num(1, 0).is_err()
        }),
        ("config", |guest| {
            let flags = VhostUserConfigFlags::WRITABLE;
            guest
                .frontend()
                .unwrap()
                .set_config(0, flags, &[1; 8])
                .is_err()
        }),
        ("memory", |guest| {
            let (null, _) = std::io::pipe().unwrap();
            let region = VhostUserMemoryRegionInfo {
                guest_phys_addr: 1 << 40,
                memory_size: 4096,
                userspace_addr: 1 << 40,
                mmap_offset: 0,
                mmap_handle: null.as_raw_fd(),
            };
            guest.frontend().unwrap().set_mem_table(&[region]).is_err()
        }),
        ("log", |guest| {
            let (null, _) = std::io::pipe().unwrap();
            let region = vhost::VhostUserDirtyLogRegion {
                mmap_size: 4096,
                mmap_offset: 0,
                mmap_handle: null.as_raw_fd(),
            };
            guest
                .frontend()
                .unwrap()
                .set_log_base(0, Some(region))
                .is_err()
        }),
    ];
    for (what, odd) in messages {
        // The faulty messages arrive while workers serve requests that need the same locks.
        for object in 1..6 {
            driver.put(object, 0, 12);
        }
        assert!(
            odd(&mut driver.guest),
            "{what}: the daemon accepted the invalid message"
        );
        work(&mut other, 20);
        operator();
        if driver.guest.read_config().is_err() {
            driver.lose_backend().unwrap();
            daemon.connect(&mut driver, "a");
        } else {
            driver.settle().unwrap();
        }
        work(&mut driver, 20);
    }
}
