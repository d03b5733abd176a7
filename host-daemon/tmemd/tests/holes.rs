// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Measures how long VMs wait for answers if a worker of the daemon is blocked. The worker accesses
//! a page in the memory of another VM while that VM's VMM punches a hole that contains the page.
//!
//! The kernel blocks the worker until the whole hole is punched, and no signal ends that wait.
//! docs/threat-model.md lists this wait as a remaining risk, with the measurements of this test.

use crate::common::{Daemon, guest};
use rustix::fs::{FallocateFlags, fallocate};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tmem_model::{Driver, DriverConfig, GuestConfig, PutPage, RamRegion, Request};

/// Size in bytes of the file that is a VM's memory, and in which the test punches a hole.
const FILE_BYTES: u64 = 4 << 30;
/// Number of times that the test fills the file and punches a hole in it.
const ROUNDS: usize = 5;
/// Longest time for which a guest's driver lets a reader wait for the daemon, before it reads the
/// disk.
const DEADLINE: Duration = Duration::from_millis(20);

/// Time between the gets of the VM whose waits are measured.
const PACE: Duration = Duration::from_millis(1);

/// Puts a page and gets it again, in a loop until `busy` is false. Returns how long after its
/// intended time each get was answered.
fn gets(driver: &mut Driver, busy: &AtomicBool) -> Vec<Duration> {
    let mut times = Vec::new();
    let (mut objects, mut wanted) = ((1..=8).cycle(), Instant::now());
    while busy.load(Ordering::SeqCst) {
        let object = objects.next().unwrap();
        assert!(driver.put(object, 0, 1));
        driver.settle().unwrap();
        wanted += PACE;
        thread::sleep(wanted.saturating_duration_since(Instant::now()));
        assert!(driver.get(object, 0, 1));
        driver.settle().unwrap();
        times.push(wanted.elapsed());
    }
    times
}

fn print(what: &str, mut times: Vec<Duration>) {
    times.sort_unstable();
    let at = |percent| times[(times.len() - 1) * percent / 100];
    let late = times.iter().filter(|time| **time > DEADLINE).count();
    println!(
        "{what}: {} gets, p50 {:?}, p99 {:?}, max {:?}; {late} gets took more than {DEADLINE:?}",
        times.len(),
        at(50),
        at(99),
        at(100),
    );
}

#[test]
#[ignore = "measures, on a quiet machine with 6 GiB to spare: --release -- --ignored --nocapture"]
fn gets_are_measured_while_another_vm_punches_a_hole() {
    let mut daemon = Daemon::start(&[("a", None), ("b", None)]);
    let mut neighbour = daemon.driver("b", 1);
    let region = |start, size_bytes| RamRegion { start, size_bytes };
    let config = GuestConfig {
        // The rings are in the first memory region. Everything else, such as buffers, is in the
        // second.
        ram: vec![region(0, 256 << 10), region(1 << 32, FILE_BYTES)],
        // Each round uses two queues of its own, because a queue whose requests are lost may stop.
        request_queues: 2 * ROUNDS as u16,
        ..guest("a")
    };
    let mut driver = daemon.driver_with(config, DriverConfig::default());
    let (pool, generation) = (driver.pool(), driver.guest.generation());
    let files = driver.guest.ram().shared_regions().unwrap();
    let file = &files[1].2;
    let alone = AtomicBool::new(true);
    thread::scope(|scope| {
        let gets = scope.spawn(|| gets(&mut neighbour, &alone));
        thread::sleep(Duration::from_secs(3));
        alone.store(false, Ordering::SeqCst);
        print("alone", gets.join().unwrap());
    });
    let busy = AtomicBool::new(true);
    let punched = AtomicBool::new(false);
    let punch = || {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let begun = Instant::now();
        fallocate(file, flags, 0, FILE_BYTES).unwrap();
        punched.store(true, Ordering::SeqCst);
        println!("punched in {:?}", begun.elapsed());
    };
    thread::scope(|scope| {
        let gets = scope.spawn(|| gets(&mut neighbour, &busy));
        for round in 0..ROUNDS {
            fallocate(file, FallocateFlags::empty(), 0, FILE_BYTES).unwrap();
            let queues = 2 * round + 1..2 * round + 3;
            for queue in queues.clone() {
                let page = PutPage {
                    object: 1,
                    index: 0,
                    cookie: 1,
                    flags: 0,
                    page: Box::new([1; 4096]),
                };
                let put = Request::Put {
                    pool,
                    pages: vec![page],
                };
                driver
                    .guest
                    .add(queue, put, generation)
                    .expect("the queue has no room for the request");
            }
            punched.store(false, Ordering::SeqCst);
            let punch = scope.spawn(punch);
            // The requests name pages of the hole. They are published 20 ms after the kernel began
            // to punch the hole, so that workers access the hole meanwhile.
            thread::sleep(Duration::from_millis(20));
            let in_time = !punched.load(Ordering::SeqCst);
            queues.for_each(|queue| driver.guest.publish(queue));
            println!(
                "round {round}: requests published before the hole was completely punched: \
                 {in_time}"
            );
            punch.join().unwrap();
        }
        busy.store(false, Ordering::SeqCst);
        print("while another VM punches a hole", gets.join().unwrap());
    });
    daemon.expect_alive();
}
