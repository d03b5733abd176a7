// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests that kill the daemon at a random moment and start another one in its place. The VMM
//! replays the requests in flight: all requests after the last one that the used ring reports. The
//! new daemon answers them with STALE, and returns no page of the old daemon.

use crate::common::{Daemon, seed, work};
use tmem_model::{Driver, Key, Request};
use vhost::VhostBackend;
use virtio_tmem as wire;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// The test kills the daemon with SIGKILL while requests are in flight, in 12 rounds.
#[test]
fn requests_in_flight_are_replayed_after_the_daemon_is_killed() {
    let seed = seed("requests_in_flight_are_replayed_after_the_daemon_is_killed");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut daemon = Daemon::start(&[("a", Some("team")), ("b", Some("team"))]);
    let mut drivers = [daemon.driver("a", seed), daemon.driver("b", seed + 1)];
    let mut replayed = 0;
    for round in 0..12 {
        for _ in 0..rng.usize(50..300) {
            drivers[rng.usize(..2)].step().unwrap();
        }
        for driver in &mut drivers {
            // When the daemon is killed, these requests are in the rings. The daemon may have taken
            // some of them.
            driver.put(round + 1, 0, 64);
            driver.get(round + 1, 0, 64);
            driver.put(round + 1, 256, 300);
        }
        daemon.kill();
        for driver in &mut drivers {
            driver.lose_backend().unwrap();
            replayed += driver.guest.in_flight();
        }
        daemon.spawn();
        for (driver, name) in drivers.iter_mut().zip(["a", "b"]) {
            let old: Vec<(Key, u64)> = driver.index().iter().map(|(k, c)| (*k, *c)).collect();
            let stale = driver.model.counts().stale;
            let in_flight = driver.guest.in_flight_of_generation() as u64;
            daemon.connect(driver, name);
            assert_eq!(
                driver.model.counts().stale - stale,
                in_flight,
                "not every request in flight was replayed and answered STALE"
            );
            ask_for_old(driver, &old);
        }
    }
    assert!(
        replayed > 0,
        "no request was in flight when the daemon was killed"
    );
    for driver in &mut drivers {
        work(driver, 200);
        assert!(driver.get_all().unwrap() > 0);
    }
}

/// Requests pages that an earlier daemon had in its pool. The driver's model fails the test if the
/// present daemon returns one of them.
fn ask_for_old(driver: &mut Driver, old: &[(Key, u64)]) {
    let pool = driver.pool();
    for (key, cookie) in old.iter().take(50) {
        let get = Request::Get {
            pool,
            object: key.object,
            index: key.index,
            cookies: vec![*cookie],
            retain: 0,
        };
        let queue = driver.queue_of(key.object, key.index);
        while !driver.send(queue, get.clone(), vec![]) {
            driver.settle().unwrap();
        }
    }
    driver.settle().unwrap();
}

/// A VM's connection ends or the VM reboots, so that another generation begins. The daemon keeps no
/// page of earlier generations. The number of each generation is random.
#[test]
fn a_new_connection_starts_with_an_empty_cache() {
    let mut daemon = Daemon::start(&[("a", None)]);
    let mut driver = daemon.driver("a", 1);
    let mut generations = vec![driver.model.generation()];
    for i in 0..10 {
        driver.put(1, 0, 32);
        driver.settle().unwrap();
        let old: Vec<(Key, u64)> = driver.index().iter().map(|(k, c)| (*k, *c)).collect();
        assert!(old.len() >= 32);
        if i % 2 == 0 {
            driver.hang_up().unwrap();
            daemon.connect(&mut driver, "a");
        } else {
            driver.reboot().unwrap();
        }
        // The new pool gets the id of the old pool. A get then misses only because the page is
        // gone, not because its pool does not exist.
        let pool = old[0].0.pool;
        let misses = driver.model.counts().misses;
        driver.send(0, Request::PoolCreate { pool, flags: 0 }, vec![]);
        driver.settle().unwrap();
        for (key, cookie) in &old {
            let Key {
                pool,
                object,
                index,
            } = *key;
            let get = Request::Get {
                pool,
                object,
                index,
                cookies: vec![*cookie],
                retain: 0,
            };
            while !driver.send(driver.queue_of(object, index), get.clone(), vec![]) {
                driver.settle().unwrap();
            }
        }
        driver.settle().unwrap();
        assert_eq!(driver.model.counts().misses - misses, old.len() as u64);
        generations.push(driver.model.generation());
    }
    for (i, a) in generations.iter().enumerate() {
        for b in &generations[i + 1..] {
            assert!(
                a.abs_diff(*b) > 1 << 32,
                "generations {a:#x} and {b:#x} differ by at most 2^32, which is unlikely for \
                 random numbers"
            );
        }
    }
}

/// The daemon answers a GENERATION with the current generation, whatever generation the request
/// carries. A GENERATION that waits in the ring while no daemon runs is answered by the next daemon,
/// with the next daemon's generation.
#[test]
fn generation_requests_return_the_current_generation() {
    let mut daemon = Daemon::start(&[("a", None)]);
    let mut driver = daemon.driver("a", 1);
    let mut seen = Vec::new();
    for round in 0..3 {
        let now = driver.guest.generation();
        seen.push(now);
        let carried = seen.iter().copied().chain([0, now ^ 1, u64::MAX]);
        for carried in carried.collect::<Vec<_>>() {
            driver.guest.add(0, Request::Generation, carried).unwrap();
            driver.guest.publish(0);
            let done = driver.guest.drain(crate::common::TIMEOUT).unwrap();
            let answer = &done[0].answer;
            assert_eq!((answer.status, answer.generation), (wire::S_OK, now));
            assert_eq!(answer.used_bytes, 16);
        }
        if round == 0 {
            driver.reboot().unwrap();
            continue;
        }
        daemon.kill();
        driver.lose_backend().unwrap();
        driver.guest.add(0, Request::Generation, now).unwrap();
        driver.guest.publish(0);
        daemon.spawn();
        let socket = daemon.socket("a");
        daemon.until("the VM's socket is free", || {
            driver.guest.connect(&socket).is_ok()
        });
        driver.guest.start().unwrap();
        let done = driver.guest.drain(crate::common::TIMEOUT).unwrap();
        let next = driver.guest.generation();
        assert_ne!(next, now);
        let answer = &done[0].answer;
        assert_eq!((answer.status, answer.generation), (wire::S_OK, next));
    }
}

/// A daemon may die after it has written an answer and before it interrupts the guest. The driver
/// then waits for the interrupt. So the next daemon interrupts the guest as soon as it receives a
/// call descriptor.
#[test]
fn a_new_daemon_interrupts_the_guest_for_answers_of_the_old_daemon() {
    let mut daemon = Daemon::start(&[("a", None)]);
    let mut driver = daemon.driver("a", 1);
    let call = EventFd::new(EFD_NONBLOCK).unwrap();
    for queue in 0..driver.guest.num_queues() {
        let frontend = driver.guest.frontend().unwrap();
        frontend.set_vring_call(queue, &call).unwrap();
        daemon.until("the driver is interrupted", || call.read().is_ok());
    }
}
