// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Test of a daemon that is stopped by a signal while its front end closes the connection. When the
//! daemon continues, it still maps the guest's memory, which the guest uses for other data by then.
//! The daemon must not change a byte of that memory.
//!
//! This happens if QEMU disconnects from a daemon that does not answer, and the guest continues
//! without it. The guest may then reset the device or reboot, and use the memory of rings and
//! buffers for other data.

use crate::common::Daemon;
use std::sync::atomic::Ordering;
use tmem_model::requests::PAGE;
use tmem_model::ring::{F_NEXT, F_WRITE};
use tmem_model::{Desc, Driver, FakeGuest, Request};

/// Number of rounds. In each round, the daemon's workers race with its control thread, which
/// detects that the front end has closed the connection. If workers did not check the connection
/// themselves, they would write to guest memory in some of the rounds, before the control thread
/// acts.
const ROUNDS: u64 = 60;

/// Number of descriptor chains that each overwritten ring seems to contain.
const CHAINS: u16 = 16;

/// Number of pages that each chain in an overwritten ring requests.
const CHAIN_PAGES: u64 = 2;

/// Byte with which the test fills all guest memory except rings and requests.
const CANARY: u8 = 0xa5;

/// Fills all guest memory with canary bytes, and writes requests into the ring of each request
/// queue. The requests are GETs of pages that are in the pool. The buffers for their answers
/// contain canary bytes.
fn overwrite(driver: &Driver) {
    let (guest, ram) = (&driver.guest, driver.guest.ram());
    let index = |queue| guest.ring(queue).used_idx_in_memory();
    let indices: Vec<u16> = (0..guest.num_queues()).map(index).collect();
    let regions = crate::common::guest("a").ram;
    for region in &regions {
        for at in (0..region.size_bytes).step_by(PAGE) {
            ram.write(region.start + at, &[CANARY; PAGE]);
        }
    }
    // The requests are written to the second memory region, because the first contains the rings.
    let mut free = regions[1].start;
    let mut take = |bytes: usize| {
        free += bytes as u64;
        free - bytes as u64
    };
    for (queue, used) in indices.iter().enumerate().skip(1) {
        let ring = guest.ring(queue);
        let layout = ring.layout();
        let store = |at, value| ram.store_u16(at, value, Ordering::Release);
        for number in 0..CHAINS {
            let request = get(driver, queue as u64, u64::from(number) * CHAIN_PAGES);
            let encoded = request.encode(driver.model.generation());
            let readable = encoded.meta.len();
            let writable = encoded.answer_meta_bytes + encoded.answer_data_bytes;
            let (from, to) = (take(readable), take(writable));
            ram.write(from, &encoded.meta);
            let head = 2 * number;
            let desc = |addr, bytes: usize, flags, next| Desc {
                addr,
                len: bytes as u32,
                flags,
                next,
            };
            ring.write_desc(head, desc(from, readable, F_NEXT, head + 1));
            ring.write_desc(head + 1, desc(to, writable, F_WRITE, 0));
            let entry = u64::from(used.wrapping_add(number) % layout.size);
            store(layout.avail + 4 + 2 * entry, head);
        }
        store(layout.avail, 0);
        store(layout.avail + 2, used.wrapping_add(CHAINS));
        store(layout.used, 0);
        store(layout.used + 2, *used);
    }
}

/// Creates a GET of CHAIN_PAGES pages that are in the pool.
fn get(driver: &Driver, object: u64, first: u64) -> Request {
    let cookie = |(key, cookie): (&tmem_model::Key, &u64)| {
        let asked = key.object == object && (first..first + CHAIN_PAGES).contains(&key.index);
        asked.then_some((key.index, *cookie))
    };
    let mut cookies: Vec<(u64, u64)> = driver.index().iter().filter_map(cookie).collect();
    cookies.sort_unstable();
    assert_eq!(
        cookies.len() as u64,
        CHAIN_PAGES,
        "the driver's model does not contain all pages of the chain"
    );
    Request::Get {
        pool: driver.pool(),
        object,
        index: first,
        cookies: cookies.into_iter().map(|(_, cookie)| cookie).collect(),
        retain: 0,
    }
}

#[test]
fn a_daemon_stopped_during_a_hang_up_writes_no_guest_memory() {
    let mut daemon = Daemon::start(&[("a", None)]);
    let socket = daemon.socket("a");
    let mut probe = FakeGuest::new(crate::common::guest("a")).unwrap();
    let mut changed = Vec::new();
    for round in 0..ROUNDS {
        let mut driver = daemon.driver("a", round);
        let queues = driver.guest.num_queues();
        for object in 1..queues as u64 {
            driver.put(object, 0, u64::from(CHAINS) * CHAIN_PAGES);
        }
        driver.settle().unwrap();

        daemon.suspend();
        for queue in 1..queues {
            let request = get(&driver, queue as u64, 0);
            driver
                .guest
                .submit(queue, request)
                .expect("the queue has no room for the request");
        }
        driver.put(40, 0, 2);
        driver.put(41, 300, 302);
        (0..queues).for_each(|queue| driver.guest.kick(queue));
        driver.guest.disconnect();
        overwrite(&driver);
        let before = driver.guest.ram().snapshot();
        daemon.resume();

        // A VM can have one connection at a time. So a daemon that accepts another connection has
        // released the guest memory of the first one.
        daemon.until("the daemon accepts another connection", || {
            probe.connect(&socket).is_ok()
        });
        probe.disconnect();
        let pages = driver.guest.ram().changed_pages(&before);
        if !pages.is_empty() {
            changed.push((round, pages));
        }
    }
    assert!(
        changed.is_empty(),
        "in {} of {ROUNDS} rounds the daemon wrote to guest memory after the hang-up: pages \
         {changed:x?}",
        changed.len()
    );
    // After all rounds, the daemon serves a new connection of the VM.
    let mut driver = daemon.driver("a", ROUNDS);
    crate::common::work(&mut driver, 100);
}
