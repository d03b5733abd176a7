// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of drains, in which the daemon stops using a guest's memory (SPEC.md, "Drain"). When the
//! daemon has answered GET_VRING_BASE, SET_MEM_TABLE or RESET_DEVICE, all requests that it took are
//! answered, and their answers are logged and published. It never accesses the released memory
//! again.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::common::{Daemon, TIMEOUT, guest, seed, work};
use tmem_model::{
    Content, DirtyLog, Driver, DriverConfig, GuestConfig, Key, PutPage, RamRegion, Request,
};
use vhost::vhost_user::VhostUserFrontend;
use virtio_tmem as wire;

/// Submits requests of various types and sizes without waiting for answers.
fn burst(driver: &mut Driver, rng: &mut fastrand::Rng) {
    for _ in 0..rng.usize(8..24) {
        let (object, start) = (rng.u64(1..6), rng.u64(..8) * 64);
        let end = start + rng.u64(1..=64);
        let _ = match rng.u8(..4) {
            0 => driver.get(object, start, end),
            1 => driver.flush(object, start, end),
            _ => driver.put(object, start, end),
        };
    }
}

/// Lets a second VM send requests for a while. If a thread of the daemon still has a guest address
/// of the first VM, the thread can use that address in this time.
fn time_passes(neighbour: &mut Driver) {
    work(neighbour, 60);
}

fn nothing_changes(driver: &Driver, neighbour: &mut Driver, after: &str) {
    let before = driver.guest.ram().snapshot();
    time_passes(neighbour);
    let changed = driver.guest.ram().changed_pages(&before);
    assert!(
        changed.is_empty(),
        "pages {changed:x?} of the guest changed after {after}"
    );
}

fn slots() -> GuestConfig {
    GuestConfig {
        slots: 24,
        ..guest("a")
    }
}

/// The VMM pauses a VM and lets it continue while requests are in flight.
#[test]
fn pausing_a_vm_releases_guest_memory_and_keeps_the_cache() {
    let seed = seed("pausing_a_vm_releases_guest_memory_and_keeps_the_cache");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut daemon = Daemon::start(&[("a", None), ("b", None)]);
    let config = DriverConfig {
        seed,
        window: 24,
        ..DriverConfig::default()
    };
    let mut driver = daemon.driver_with(slots(), config);
    let mut neighbour = daemon.driver("b", seed + 1);
    let mut met = 0;
    for round in 0..25 {
        burst(&mut driver, &mut rng);
        let bases = if round % 2 == 0 {
            driver.guest.stop().unwrap()
        } else {
            driver.guest.get_vring_bases().unwrap()
        };
        met += driver.guest.in_flight();
        for (queue, base) in bases.iter().enumerate() {
            let used = driver.guest.ring(queue).used_idx_in_memory();
            assert_eq!(
                used, *base,
                "queue {queue}: a chain that the daemon took before the drain was not answered"
            );
        }
        nothing_changes(&driver, &mut neighbour, "GET_VRING_BASE");
        driver.collect().unwrap();
        let generation = driver.guest.generation();
        driver.guest.start().unwrap();
        assert_eq!(
            driver.guest.generation(),
            generation,
            "the generation changed at a pause of the VM, which must keep it"
        );
        driver.settle().unwrap();
    }
    println!(
        "sum of the requests in flight at all pauses: {met}; answers: {:?}",
        driver.model.counts()
    );
    assert!(met > 0, "no request was in flight at any pause of the VM");
    // The pool keeps pages during a pause of the VM, and returns them afterwards.
    driver.put(9, 0, 64);
    driver.settle().unwrap();
    let kept = driver.index().keys().filter(|k| k.object == 9).count();
    driver.guest.stop().unwrap();
    driver.guest.start().unwrap();
    let hits = driver.model.counts().hits;
    driver.get(9, 0, 64);
    driver.settle().unwrap();
    assert_eq!(driver.model.counts().hits - hits, kept as u64);
}

/// While requests are in flight, the VMM sends RESET_DEVICE or closes the connection.
#[test]
fn a_device_reset_releases_guest_memory_and_empties_the_cache() {
    let seed = seed("a_device_reset_releases_guest_memory_and_empties_the_cache");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut daemon = Daemon::start(&[("a", None), ("b", None)]);
    let config = DriverConfig {
        seed,
        window: 24,
        ..DriverConfig::default()
    };
    let mut driver = daemon.driver_with(slots(), config);
    let mut neighbour = daemon.driver("b", seed + 1);
    for round in 0..16 {
        burst(&mut driver, &mut rng);
        if round % 2 == 0 {
            driver.guest.frontend().unwrap().reset_device().unwrap();
            nothing_changes(&driver, &mut neighbour, "RESET_DEVICE");
            driver.collect().unwrap();
            driver.reboot().unwrap();
        } else {
            driver.hang_up().unwrap();
            nothing_changes(&driver, &mut neighbour, "the end of the connection");
            daemon.connect(&mut driver, "a");
        }
    }
    work(&mut driver, 100);
}

/// A drain refuses pages for which it has no time. Afterwards, the pool must contain neither a
/// refused page nor an older version of it. The test stops the daemon while a drain waits for a
/// batch, until the drain cut has passed.
#[test]
fn a_put_that_is_refused_during_a_drain_leaves_no_page_in_the_pool() {
    let seed = seed("a_put_that_is_refused_during_a_drain_leaves_no_page_in_the_pool");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut daemon = Daemon::start(&[("a", None)]);
    let config = GuestConfig {
        request_queues: 1,
        ..slots()
    };
    let mut driver = daemon.driver_with(
        config,
        DriverConfig {
            seed,
            ..Default::default()
        },
    );
    let mut refused = 0;
    for _ in 0..1500 {
        for object in 1..=4 {
            driver.put(object, 0, 64);
        }
        driver.settle().unwrap();
        // List of cookies: first those of the older versions of the pages, then those of the later
        // puts.
        let mut cookies: Vec<(Key, u64)> = Vec::new();
        cookies.extend(driver.index().iter().map(|(k, c)| (*k, *c)));
        for object in 1..=4 {
            driver.put(object, 0, 64);
        }
        cookies.extend(driver.index().iter().map(|(k, c)| (*k, *c)));
        let before = driver.model.counts();
        // How soon the drain reaches the batch depends on the machine.
        let delay = Duration::from_micros(rng.u64(..1500) >> rng.u32(..5));
        std::thread::scope(|scope| {
            let daemon = &daemon;
            scope.spawn(move || {
                std::thread::sleep(delay);
                daemon.freeze(Duration::from_millis(12));
            });
            driver.guest.set_mem_table().unwrap();
        });
        driver.settle().unwrap();
        let new = driver.model.counts().refused - before.refused;
        if new == 0 {
            continue;
        }
        // The driver's model accepts a hit only if the cookie is that of the last put that was
        // stored.
        for (key, cookie) in cookies {
            let Key {
                pool,
                object,
                index,
            } = key;
            let get = Request::Get {
                pool,
                object,
                index,
                cookies: vec![cookie],
                retain: 0,
            };
            while !driver.send(driver.queue_of(object, index), get.clone(), vec![]) {
                driver.settle().unwrap();
            }
        }
        driver.settle().unwrap();
        refused += new;
        if refused > 100 {
            break;
        }
    }
    println!("pages that drains refused: {refused}");
    assert!(refused > 0, "no drain interrupted a batch");
}

/// The daemon never writes to a memory region that the VMM has removed, even if the region contains
/// requests.
#[test]
fn a_removed_memory_region_is_unmapped_and_not_written() {
    let seed = seed("a_removed_memory_region_is_unmapped_and_not_written");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut daemon = Daemon::start(&[("a", None), ("b", None)]);
    let mut neighbour = daemon.driver("b", seed);
    for round in 0..12 {
        // The rings are in the first memory region, and the buffers in the second.
        let ram = vec![
            RamRegion {
                start: 0,
                size_bytes: 128 << 10,
            },
            RamRegion {
                start: 1 << 32,
                size_bytes: 8 << 20,
            },
        ];
        let config = DriverConfig {
            seed,
            window: 24,
            ..DriverConfig::default()
        };
        let machine = GuestConfig {
            ram,
            // In even rounds, the VMM removes the region with REM_MEM_REG. In odd rounds, it sends
            // a SET_MEM_TABLE without the region.
            mem_slots: round % 2 == 0,
            ..slots()
        };
        let mut driver = daemon.driver_with(machine, config);
        burst(&mut driver, &mut rng);
        driver.guest.set_mem_table_of(1).unwrap();
        let before = driver.guest.ram().snapshot();
        time_passes(&mut neighbour);
        let changed = driver.guest.ram().changed_pages(&before);
        let gone: Vec<_> = changed.iter().filter(|&&p| p >= (1 << 32) / 4096).collect();
        assert!(
            gone.is_empty(),
            "the daemon wrote to pages {gone:x?} of a region that was removed"
        );
        // The driver's model checks the answers to all requests that the daemon took.
        driver.collect().unwrap();
        driver.guest.hang_up().unwrap();
    }
    daemon.expect_alive();
}

/// Adds three GETs, a PUT and a REPORT to the rings without publishing them. When the daemon
/// answers these requests, it must mark all pages that it writes in the dirty log.
fn staged(driver: &mut Driver, object: u64) {
    let pool = driver.pool();
    let generation = driver.guest.generation();
    let get = |index: u64, n: u64| {
        let cookies = (index..index + n)
            .map(|i| {
                driver
                    .index()
                    .get(&Key {
                        pool,
                        object,
                        index: i,
                    })
                    .copied()
                    .unwrap_or(1)
            })
            .collect();
        Request::Get {
            pool,
            object,
            index,
            cookies,
            retain: 0,
        }
    };
    let page = |i: u64| PutPage {
        object: object + 1,
        index: i,
        cookie: 77,
        flags: 0,
        page: Content::Text(i).page(),
    };
    let put = Request::Put {
        pool,
        pages: (0..20).map(page).collect(),
    };
    for request in [get(0, 64), put, get(64, 3), get(200, 5)] {
        driver.guest.add(1, request, generation).unwrap();
    }
    let report = Request::Report(Box::new([0; tmem_model::requests::REPORT_BYTES]));
    driver.guest.add(0, report, generation).unwrap();
}

/// A migration ends with GET_VRING_BASE, or when the front end closes the connection. Before that,
/// the daemon must report that it wrote pages that are beyond the end of the dirty log.
#[test]
fn a_dirty_log_that_is_too_short_is_reported_before_the_migration_ends() {
    let region = |start, size_bytes| RamRegion { start, size_bytes };
    for stops in [true, false] {
        let mut daemon = Daemon::start(&[("a", None)]);
        let config = GuestConfig {
            // The rings are in the first memory region, and the buffers in the second. The dirty
            // log covers only the first region.
            ram: vec![region(0, 128 << 10), region(1 << 32, 8 << 20)],
            request_queues: 1,
            ..guest("a")
        };
        let mut driver = daemon.driver_with(config, DriverConfig::default());
        driver.put(5, 0, 64);
        driver.settle().unwrap();
        let log = DirtyLog::sized(4096).unwrap();
        driver.guest.start_this_log(log).unwrap();
        driver.get(5, 0, 64);
        driver.settle().unwrap();
        let reports = |daemon: &Daemon| {
            let log = std::fs::read_to_string(daemon.path("log")).expect("cannot read the log");
            log.matches("could not be marked in the dirty log").count()
        };
        assert_eq!(
            reports(&daemon),
            0,
            "a write outside of the dirty log was reported before a request wrote there"
        );
        if stops {
            driver.guest.stop().unwrap();
            assert_eq!(
                reports(&daemon),
                1,
                "a write outside of the dirty log was not reported before the answer to \
                 GET_VRING_BASE"
            );
        }
        driver.guest.hang_up().unwrap();
        assert_eq!(
            reports(&daemon),
            1,
            "writes outside of the dirty log were not reported exactly once (VM stopped before: \
             {stops})"
        );
    }
}

/// The daemon marks each page of guest memory that it writes in the dirty log: while the VM runs,
/// when it is paused, and after a new memory table.
#[test]
fn the_dirty_log_covers_all_written_pages() {
    let mut daemon = Daemon::start(&[("a", None)]);
    for round in 0..6 {
        let config = GuestConfig {
            request_queues: 1,
            ..guest("a")
        };
        let mut driver = daemon.driver_with(config, DriverConfig::default());
        driver.put(5, 0, 64);
        driver.put(5, 64, 67);
        driver.settle().unwrap();
        driver.guest.start_log().unwrap();
        match round % 3 {
            1 => driver.guest.set_mem_table().unwrap(),
            2 => {
                driver.guest.stop().unwrap();
                driver.guest.start().unwrap();
            }
            _ => {}
        }
        staged(&mut driver, 5);
        let before = driver.guest.ram().snapshot();
        for queue in 0..2 {
            driver.guest.publish(queue);
        }
        if round >= 3 {
            driver.guest.stop().unwrap();
        } else {
            let used = |d: &Driver| {
                (0..2)
                    .map(|q| d.guest.ring(q).in_flight() as u16)
                    .collect::<Vec<_>>()
                    == (0..2)
                        .map(|q| {
                            let ring = d.guest.ring(q);
                            ring.used_idx_in_memory().wrapping_sub(
                                ring.avail_idx_in_memory()
                                    .wrapping_sub(ring.in_flight() as u16),
                            )
                        })
                        .collect::<Vec<_>>()
            };
            daemon.until("all requests are answered", || used(&driver));
            // The daemon may mark a page after it has changed the used index, but not after it has
            // stopped the vring.
            driver.guest.stop().unwrap();
        }
        let changed = driver.guest.ram().changed_pages(&before);
        let own: BTreeSet<u64> = (0..2)
            .map(|q| driver.guest.ring(q).layout().avail / 4096)
            .collect();
        let log = driver.guest.log().unwrap();
        let device: Vec<u64> = changed.into_iter().filter(|p| !own.contains(p)).collect();
        let missing: Vec<_> = device.iter().filter(|&&p| !log.is_dirty(p)).collect();
        assert!(
            missing.is_empty(),
            "round {round}: pages {missing:x?} changed and are not in the dirty log"
        );
        if round < 3 {
            assert!(
                device.len() > 64 + 3,
                "the daemon wrote only {} pages: the gets had too few hits",
                device.len()
            );
        }
        // The daemon has written 136 pages for 5 answers, and two used rings. The dirty log must
        // not contain many other pages.
        assert!(
            log.dirty_pages() < 200,
            "{} pages are in the dirty log, more than were written",
            log.dirty_pages()
        );
        let done = driver.guest.poll_all().unwrap();
        if round < 3 {
            let hits = done[1]
                .answer
                .pages
                .iter()
                .filter(|a| a.result == wire::P_HIT)
                .count();
            assert_eq!((done.len(), hits), (5, 64));
        }
        driver.guest.start().unwrap();
        driver.guest.drain(TIMEOUT).unwrap();
        driver.guest.hang_up().unwrap();
    }
}
