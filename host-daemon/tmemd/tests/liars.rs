// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests with guests that send malformed requests. The daemon gives each request the specified
//! answer or stops its queue. The request has no other effect, and affects neither other queues nor
//! other VMs.

use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::common::{Daemon, TIMEOUT, every_queue_answers, guest, seed, work};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::ReadWriteFlags;
use tmem_model::fault::{self, Expect, Fault, Target};
use tmem_model::frontend::F_RETAIN;
use tmem_model::requests::REQ_BYTES;
use tmem_model::ring::{Desc, F_NEXT, F_WRITE};
use tmem_model::{Content, Driver, DriverConfig, Key, PutPage, Request};
use virtio_tmem as wire;

const VICTIM: u64 = 900;

/// Puts the page to which malformed requests refer. After each malformed request that the daemon
/// does not execute, the page must still be in the pool. Returns the page's key, cookie and queue.
fn put_victim(driver: &mut Driver) -> Target {
    assert!(driver.put(VICTIM, 1, 2));
    driver.settle().unwrap();
    let pool = driver.pool();
    let key = Key {
        pool,
        object: VICTIM,
        index: 1,
    };
    let cookie = driver.index()[&key];
    let queue = driver.queue_of(VICTIM, 1);
    Target {
        pool,
        object: VICTIM,
        index: 1,
        cookie,
        queue,
    }
}

fn victim_is_there(driver: &mut Driver, fault: &str) {
    let hits = driver.model.counts().hits;
    assert!(driver.get(VICTIM, 1, 2));
    driver.settle().unwrap();
    assert_eq!(
        driver.model.counts().hits,
        hits + 1,
        "{fault}: the daemon lost a page because of the faulty request"
    );
}

/// Waits until the daemon has handled a malformed request. Returns the status of the answer, or
/// None if the daemon stopped the queue and signalled the error eventfd.
fn outcome(daemon: &mut Daemon, driver: &mut Driver, queue: usize, used: u16) -> Option<u8> {
    let guest = &driver.guest;
    let mut stopped = false;
    daemon.until("the fault is answered, or its queue stopped", || {
        stopped = guest.take_queue_error(queue);
        stopped || guest.ring(queue).used_idx_in_memory() != used
    });
    let answered = guest.ring(queue).used_idx_in_memory() != used;
    assert!(
        !(stopped && answered),
        "the daemon both answered the malformed request and stopped its queue"
    );
    let done = driver.guest.poll(queue).unwrap();
    done.map(|d| d.answer.status)
}

/// Checks that every queue except `stopped` still answers a request.
fn others_answer(daemon: &mut Daemon, driver: &mut Driver, stopped: usize) {
    let silent = driver.guest.ring(stopped).used_idx_in_memory();
    let pool = driver.pool();
    for queue in (0..driver.guest.num_queues()).filter(|q| *q != stopped) {
        let request = match queue {
            0 => Request::Report(Box::new([0; tmem_model::requests::REPORT_BYTES])),
            _ => Request::Get {
                pool,
                object: 77,
                index: 0,
                cookies: vec![1],
                retain: 0,
            },
        };
        let used = driver.guest.ring(queue).used_idx_in_memory();
        driver.guest.kick(stopped);
        assert!(driver.guest.submit(queue, request).is_some());
        let guest = &driver.guest;
        daemon.until("another queue answers", || {
            guest.ring(queue).used_idx_in_memory() != used
        });
    }
    assert_eq!(
        driver.guest.ring(stopped).used_idx_in_memory(),
        silent,
        "a stopped queue answered a request"
    );
}

#[test]
fn every_malformed_request_gets_the_specified_status() {
    send_each(fault::all(), 0);
}

#[test]
fn every_malformed_request_about_retained_pages_gets_the_specified_status() {
    send_each(fault::retained_page_faults(), F_RETAIN);
}

/// Returns the connected driver of the VM `liar`. The driver has accepted `features` in addition to
/// the default features.
fn liar(daemon: &mut Daemon, seed: u64, features: u64) -> Driver {
    let mut config = guest("liar");
    config.features |= features;
    let random = DriverConfig {
        seed,
        ..DriverConfig::default()
    };
    daemon.driver_with(config, random)
}

/// Sends each of the malformed requests while no other request is in flight. The driver has
/// accepted `features` in addition to the default features.
fn send_each(faults: Vec<Fault>, features: u64) {
    let mut daemon = Daemon::start(&[("liar", None), ("neighbour", None)]);
    let mut driver = liar(&mut daemon, 1, features);
    let mut neighbour = daemon.driver("neighbour", 2);
    let mut wrong = Vec::new();
    for fault in faults {
        let target = put_victim(&mut driver);
        let used: Vec<u16> = (0..driver.guest.num_queues())
            .map(|q| driver.guest.ring(q).used_idx_in_memory())
            .collect();
        let queue = fault.send(&mut driver.guest, target);
        let statuses = match fault.expect {
            Expect::Status(s) | Expect::Either(s) => s,
            Expect::Stopped => &[],
        };
        let status = outcome(&mut daemon, &mut driver, queue, used[queue]);
        let right = match status {
            Some(status) => statuses.contains(&status),
            None => !matches!(fault.expect, Expect::Status(_)),
        };
        if !right {
            wrong.push(format!(
                "{}: {status:?}, not {:?}",
                fault.name, fault.expect
            ));
        }
        neighbour.step().unwrap();
        if status.is_none() {
            others_answer(&mut daemon, &mut driver, queue);
        } else {
            if status != Some(wire::S_OK) {
                victim_is_there(&mut driver, &fault.name);
            }
            every_queue_answers(&mut driver);
        }
        // A stopped queue works again only after a reset, so the guest reboots. It also reboots if
        // the daemon has executed the request, so that the next request finds no effect of this
        // one.
        if status.is_none() || status == Some(wire::S_OK) {
            driver.reboot().unwrap();
        }
    }
    daemon.expect_alive();
    assert!(
        wrong.is_empty(),
        "the daemon did not answer {} malformed requests as specified:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    every_queue_answers(&mut driver);
    work(&mut neighbour, 100);
}

/// The guest changes requests in its memory while the daemon reads them. The daemon survives, and
/// other VMs are not affected. A hit always returns the page whose cookie is in the answer.
#[test]
fn requests_changed_while_the_daemon_reads_them_return_no_wrong_page() {
    let seed = seed("requests_changed_while_the_daemon_reads_them_return_no_wrong_page");
    let mut daemon = Daemon::start(&[("liar", Some("team")), ("neighbour", Some("team"))]);
    let mut liar = liar(&mut daemon, seed, F_RETAIN);
    let mut neighbour = daemon.driver("neighbour", seed + 1);
    let pool = liar.pool();
    // The content of each page follows from its cookie, so that the test can check a returned page.
    let content = |cookie: u64| Content::Noise(cookie);
    let cookie = |index: u64| 1000 + index;
    let refill = |liar: &mut Driver| {
        for start in [0, 64, 128, 192] {
            let pages = (start..start + 64)
                .map(|index| PutPage {
                    object: 1,
                    index,
                    cookie: cookie(index),
                    flags: 0,
                    page: content(cookie(index)).page(),
                })
                .collect();
            liar.guest.submit(1, Request::Put { pool, pages }).unwrap();
        }
        liar.guest.drain(TIMEOUT).unwrap();
    };
    let mut hits = 0;
    for round in 0..40 {
        refill(&mut liar);
        let get = Request::Get {
            pool,
            object: 1,
            index: 10,
            cookies: (10..74).map(cookie).collect(),
            retain: if round % 2 == 0 { u64::MAX } else { 0 },
        };
        let generation = liar.guest.generation();
        let token = liar.guest.add(1, get, generation).unwrap();
        let (addr, bytes) = liar.guest.readable_of(token).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let scribbler = {
            let (ram, stop) = (liar.guest.ram().clone(), stop.clone());
            let mut rng = fastrand::Rng::with_seed(seed + round);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    // This thread overwrites the index and the cookies of the request. Most of the
                    // new values name pages in the pool.
                    ram.write(addr + REQ_BYTES as u64 + 8, &rng.u64(..256).to_le_bytes());
                    let at = rng.u64(..64);
                    let value = cookie(rng.u64(..256)).to_le_bytes();
                    ram.write(addr + REQ_BYTES as u64 + 16 + 8 * at, &value);
                    assert!(REQ_BYTES + 16 + 8 * 64 <= bytes);
                }
            })
        };
        liar.guest.publish(1);
        let done = liar.guest.drain(TIMEOUT).unwrap();
        stop.store(true, Ordering::Relaxed);
        scribbler.join().unwrap();
        for answer in &done[0].answer.pages {
            if answer.result == wire::P_HIT {
                hits += 1;
                let page = answer.page.as_ref().unwrap();
                assert!(
                    **page == *content(answer.cookie).page(),
                    "the daemon returned a page that the cookie does not name"
                );
            }
        }
        neighbour.step().unwrap();
    }
    assert!(hits > 0);
    work(&mut neighbour, 100);
    neighbour.get_all().unwrap();
}

/// A guest overwrites its rings, descriptors and requests with random bytes while the daemon reads
/// them.
#[test]
fn random_bytes_in_guest_memory_affect_no_other_vm() {
    let seed = seed("random_bytes_in_guest_memory_affect_no_other_vm");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut daemon = Daemon::start(&[("liar", Some("team")), ("neighbour", Some("team"))]);
    let mut neighbour = daemon.driver("neighbour", seed + 1);
    for round in 0..10 {
        let features = if round % 4 < 2 { F_RETAIN } else { 0 };
        let mut liar = liar(&mut daemon, seed, features);
        let layouts: Vec<_> = (0..liar.guest.num_queues())
            .map(|q| liar.guest.ring(q).layout())
            .collect();
        let stop = Arc::new(AtomicBool::new(false));
        let scribbler = {
            let (ram, stop) = (liar.guest.ram().clone(), stop.clone());
            let mut rng = fastrand::Rng::with_seed(seed + round);
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let l = layouts[rng.usize(..layouts.len())];
                    let (area, bytes) = match rng.u8(..10) {
                        0 if round % 2 == 0 => (l.avail, 6 + 2 * u64::from(l.size)),
                        1 if round % 2 == 0 => (l.used, 6 + 8 * u64::from(l.size)),
                        2..=5 => (l.desc, 16 * u64::from(l.size)),
                        _ => (0, 8 << 20),
                    };
                    let at = area + rng.u64(..bytes - 8);
                    let noise = rng.u64(..) >> (8 * rng.u8(..8));
                    ram.write(at, &noise.to_le_bytes());
                }
            })
        };
        for _ in 0..200 {
            let (object, start) = (rng.u64(1..4), rng.u64(..200));
            if rng.bool() {
                liar.put(object, start, start + 30);
            } else {
                liar.get(object, start, start + 30);
            }
            // The test does not check the answers' content, because the guest has overwritten its
            // requests.
            while let Ok(Some(_)) = liar.guest.poll(rng.usize(..3)) {}
            neighbour.step().unwrap();
        }
        stop.store(true, Ordering::Relaxed);
        scribbler.join().unwrap();
        liar.guest.hang_up().unwrap();
    }
    daemon.expect_alive();
    work(&mut neighbour, 100);
    neighbour.get_all().unwrap();
}

/// A guest fills a ring again and again, kicks its queues, and never takes an answer. The daemon
/// still serves other VMs.
#[test]
fn a_guest_that_takes_no_answers_blocks_no_other_vm() {
    let mut daemon = Daemon::start(&[("liar", None), ("neighbour", None)]);
    let mut liar = daemon.driver("liar", 1);
    let mut neighbour = daemon.driver("neighbour", 2);
    let pool = liar.pool();
    let page = |i: u64| PutPage {
        object: 1,
        index: i,
        cookie: 5,
        flags: 0,
        page: Content::Text(i).page(),
    };
    let put = Request::Put {
        pool,
        pages: (0..8).map(page).collect(),
    };
    let encoded = put.encode(liar.guest.generation());
    let placed = liar.guest.place(&encoded).unwrap();
    // The guest makes one chain available again and again. It publishes as many entries at a time
    // as the ring has.
    let parts: Vec<(u64, usize, bool)> = placed
        .1
        .readable
        .iter()
        .map(|&(a, n)| (a, n, false))
        .chain(
            placed
                .1
                .writable
                .iter()
                .filter(|w| w.1 > 0)
                .map(|&(a, n)| (a, n, true)),
        )
        .collect();
    for (i, &(addr, len, writable)) in parts.iter().enumerate() {
        let next = if i + 1 < parts.len() { F_NEXT } else { 0 };
        let flags = next | if writable { F_WRITE } else { 0 };
        let desc = Desc {
            addr,
            len: len as u32,
            flags,
            next: i as u16 + 1,
        };
        liar.guest.ring_mut(1).write_desc(i as u16, desc);
    }
    for _ in 0..6 {
        for _ in 0..128 {
            liar.guest.ring_mut(1).add_raw(0, vec![], 0);
        }
        liar.guest.publish(1);
        for _ in 0..1000 {
            liar.guest.kick(1);
            liar.guest.kick(2);
        }
        work(&mut neighbour, 20);
        let guest = &liar.guest;
        daemon.until("all chains of the ring are answered", || {
            guest.ring(1).used_idx_in_memory() == guest.ring(1).avail_idx_in_memory()
        });
    }
    // Another queue of the guest that takes no answers is still served, and returns the guest's
    // pages.
    let get = Request::Get {
        pool,
        object: 1,
        index: 0,
        cookies: vec![5; 8],
        retain: 0,
    };
    let before = liar.guest.ring(2).used_idx_in_memory();
    let token = liar.guest.submit(2, get).unwrap();
    let guest = &liar.guest;
    daemon.until("the other queue answers", || {
        guest.ring(2).used_idx_in_memory() != before
    });
    let done = liar.guest.poll(2).unwrap().unwrap();
    assert_eq!(done.token, token);
    for (i, answer) in done.answer.pages.iter().enumerate() {
        assert_eq!(answer.result, wire::P_HIT);
        assert!(**answer.page.as_ref().unwrap() == *Content::Text(i as u64).page());
    }
    work(&mut neighbour, 100);
}

/// A front end clears O_NONBLOCK of the eventfds that it shares with the daemon, and keeps their
/// counters full. The guest of this front end may miss interrupts. Other VMs are not affected, and
/// the daemon can stop.
#[test]
fn blocking_call_eventfds_block_no_other_vm() {
    let mut daemon = Daemon::start(&[("liar", None), ("neighbour", None)]);
    let mut liar = daemon.driver("liar", 1);
    let mut neighbour = daemon.driver("neighbour", 2);
    let queues = liar.guest.num_queues();
    for queue in 0..queues {
        let call = liar.guest.call_fd(queue);
        // SAFETY: the descriptor stays open as long as `call` exists.
        let fd = unsafe { BorrowedFd::borrow_raw(call.as_raw_fd()) };
        fcntl_setfl(fd, OFlags::empty()).unwrap();
        // Reading the eventfd resets its counter to 0. The following write sets the counter to its
        // maximum.
        let _ = rustix::io::preadv2(
            fd,
            &mut [IoSliceMut::new(&mut [0; 8])],
            u64::MAX,
            ReadWriteFlags::NOWAIT,
        );
        call.write(u64::MAX - 1).unwrap();
    }
    // These requests cause an interrupt on each eventfd. If a full eventfd blocked the worker that
    // writes to it, all workers would be blocked, because there are more eventfds than workers.
    for object in 1..=64 {
        liar.put(object, 0, 1);
        liar.collect().unwrap();
    }
    liar.send(0, Request::PoolCreate { pool: 99, flags: 0 }, vec![]);
    work(&mut neighbour, 200);
    neighbour.settle().unwrap();
    let guest = &liar.guest;
    for queue in 0..queues {
        daemon.until("all chains of each queue are answered", || {
            guest.ring(queue).used_idx_in_memory() == guest.ring(queue).avail_idx_in_memory()
        });
    }
    daemon.terminate();
}
