// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Test in which 256 VMs connect, send requests and disconnect at the same time, in several rounds.
//! The daemon is designed for this number of VMs.
//!
//! The drivers' models check every answer, and every message has a time limit. The daemon's
//! resources stay within the bounds of docs/operating.md. They return to their first values after
//! the VMs have disconnected.

use crate::common::{Daemon, seed};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tmem_model::{Driver, DriverConfig, GuestConfig, RamRegion};

/// Number of VMs for which one daemon is designed.
const VMS: usize = 256;

const ROUNDS: usize = 4;

/// Number of random requests that each VM sends in a round.
const STEPS: usize = 12;

/// QUEUES is the number of request queues of a VM, REGIONS the number of its memory regions. The
/// VMM adds and removes the last region, which contains no requests.
const QUEUES: u16 = 2;
const REGIONS: usize = 3;

/// Longest time that a VMM waits for each reply to a vhost-user message. It is longer than any
/// reply takes on a busy machine (docs/benchmarks/history.md).
const REPLY_TIMEOUT: Duration = Duration::from_secs(60);

/// Resources that the daemon uses for each connected VM, as docs/operating.md states. Threads: one.
/// Descriptors: a socket with four duplicates; the file of each region; kick, call and error of each
/// queue. Mappings: the
/// regions, and the thread's stack and signal stack, each with a guard page.
/// Memory: mostly the used part of the thread's stack.
const THREADS_PER_VM: usize = 1;
const DESCRIPTORS_PER_VM: usize = 5 + REGIONS + 3 * (1 + QUEUES as usize);
const MAPPINGS_PER_VM: usize = REGIONS + 4;
const MEMORY_PER_VM_BYTES: usize = 256 << 10;

/// Maximum number of bytes that the allocator may keep after all VMs have disconnected.
const MEMORY_LEFT_BYTES: usize = 32 << 20;
const MAPPINGS_LEFT: usize = 64;

/// Returns the configuration of a guest with little memory and few slots for requests, because the
/// test runs 256 guests. Guests with even numbers use memory slots.
fn small_guest(name: &str, number: usize) -> GuestConfig {
    let region = |start, size_bytes| RamRegion { start, size_bytes };
    GuestConfig {
        name: name.into(),
        ram: vec![
            region(0, 512 << 10),
            region(1 << 32, 1 << 20),
            region(2 << 32, 64 << 10),
        ],
        request_queues: QUEUES,
        queue_size: 64,
        slots: 4,
        mem_slots: number.is_multiple_of(2),
        reply_timeout: REPLY_TIMEOUT,
        ..GuestConfig::default()
    }
}

/// Barrier at which the threads of all VMs wait for each other. If one of the threads fails, the
/// other threads fail after a time limit.
#[derive(Default)]
struct Barrier(AtomicUsize);

impl Barrier {
    fn wait(&self, parties: usize) {
        let arrived = self.0.fetch_add(1, Ordering::SeqCst) + 1;
        let wanted = arrived.next_multiple_of(parties);
        let deadline = Instant::now() + crate::common::scaled(REPLY_TIMEOUT);
        while self.0.load(Ordering::SeqCst) < wanted {
            assert!(
                Instant::now() < deadline,
                "a thread did not reach the barrier in time"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Polls the resources of the daemon until `stated` returns true for them, and returns them.
fn wait_settled(pid: i32, stated: impl Fn(&crate::common::Taken) -> bool) -> crate::common::Taken {
    let deadline = Instant::now() + crate::common::scaled(crate::common::TIMEOUT);
    loop {
        let now = crate::common::taken_by(pid);
        if stated(&now) {
            return now;
        }
        assert!(
            Instant::now() < deadline,
            "the daemon did not release the resources of ended connections in time: {now:?}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Connects a guest to its VM's socket. Tries again while the VM's previous connection has not
/// ended.
fn connect(driver: &mut Driver, socket: &std::path::Path) {
    crate::common::until("the VM's socket is free", || {
        driver.guest.connect(socket).is_ok()
    });
    driver.start().unwrap();
}

/// Runs one VM's part of a round: it connects, sends requests, and changes its memory table. In
/// some rounds, it also reboots or connects again.
fn visit(driver: &mut Driver, socket: &std::path::Path, rng: &mut fastrand::Rng) {
    connect(driver, socket);
    for _ in 0..STEPS {
        driver.step().unwrap();
    }
    match rng.u8(..4) {
        0 => driver.settle().unwrap(),
        1 => driver.reboot().unwrap(),
        2 => {
            driver.hang_up().unwrap();
            connect(driver, socket);
        }
        _ => {}
    }
    driver.guest.set_mem_table_of(REGIONS - 1).unwrap();
    driver.guest.set_mem_table_of(REGIONS).unwrap();
}

#[test]
fn vms_that_reconnect_concurrently_leave_no_resources_in_the_daemon() {
    let seed = seed("vms_that_reconnect_concurrently_leave_no_resources_in_the_daemon");
    let names: Vec<String> = (0..VMS).map(|number| format!("vm{number}")).collect();
    let vms: Vec<(&str, Option<&str>)> = names.iter().map(|name| (name.as_str(), None)).collect();
    // The daemon runs without the sandbox, because the test cannot inspect a sandboxed daemon in
    // /proc.
    let seen = |_: &std::path::Path| vec!["--no-sandbox".into()];
    let mut daemon = Daemon::with_arguments(&vms, "128MiB", seen);
    let sockets: Vec<_> = names.iter().map(|name| daemon.socket(name)).collect();
    // The test counts the daemon's resources while no VM is connected. `Daemon::spawn` connects to
    // each socket, so the test waits until these connections have ended.
    let mut before = daemon.taken();
    let mut same = 0;
    daemon.until("no VM is connected", || {
        let now = crate::common::taken_by(before.pid);
        same = match (now.threads, now.descriptors) == (before.threads, before.descriptors) {
            true => same + 1,
            false => 0,
        };
        before = now;
        same == 20 && before.threads < 20
    });
    let barrier = Barrier::default();
    let in_flight = AtomicUsize::new(0);
    println!("daemon's resources before the first round: {before:?}");
    let mut most = before;
    std::thread::scope(|scope| {
        for (number, socket) in sockets.iter().enumerate() {
            let (barrier, in_flight, name) = (&barrier, &in_flight, &names[number]);
            scope.spawn(move || {
                let own = seed.wrapping_mul(VMS as u64) + number as u64;
                let mut rng = fastrand::Rng::with_seed(own);
                let config = DriverConfig {
                    seed: own,
                    window: 3,
                    objects: 2,
                    ..DriverConfig::default()
                };
                let mut driver = Driver::new(small_guest(name, number), config).unwrap();
                for _ in 0..ROUNDS {
                    barrier.wait(VMS + 1);
                    visit(&mut driver, socket, &mut rng);
                    barrier.wait(VMS + 1);
                    // All threads wait here while their VMs are connected, so that the main thread
                    // can count the daemon's resources.
                    barrier.wait(VMS + 1);
                    if rng.bool() {
                        driver.put(1, 0, 8);
                        in_flight.fetch_add(driver.guest.in_flight(), Ordering::SeqCst);
                        driver.hang_up().unwrap();
                    } else {
                        // The VM closes the connection, and does not wait until the daemon has
                        // noticed that.
                        driver.settle().unwrap();
                        driver.lose_backend().unwrap();
                    }
                }
            });
        }
        for _ in 0..ROUNDS {
            barrier.wait(VMS + 1);
            barrier.wait(VMS + 1);
            // The daemon unmaps the memory tables of a connection shortly after the connection has
            // ended. So the test waits for the expected numbers.
            let now = wait_settled(before.pid, |now| {
                now.threads == before.threads + VMS * THREADS_PER_VM
                    && now.descriptors == before.descriptors + VMS * DESCRIPTORS_PER_VM
                    && now.mappings <= before.mappings + VMS * MAPPINGS_PER_VM
            });
            println!("the daemon's resources while all VMs are connected: {now:?}");
            most = most.most(&now);
            barrier.wait(VMS + 1);
        }
    });
    println!("daemon's resources before the first round: {before:?}");
    assert!(
        in_flight.load(Ordering::SeqCst) > 0,
        "no VM had requests in flight when it disconnected"
    );
    let memory = most.memory_bytes - before.memory_bytes;
    assert!(
        memory <= VMS * MEMORY_PER_VM_BYTES,
        "the daemon kept {memory} bytes, more than {MEMORY_PER_VM_BYTES} for each VM"
    );
    let after = wait_settled(before.pid, |now| {
        now.threads <= before.threads
            && now.descriptors <= before.descriptors
            && now.mappings <= before.mappings + MAPPINGS_LEFT
            && now.memory_bytes <= before.memory_bytes + MEMORY_LEFT_BYTES
    });
    println!("daemon's resources after all rounds: {after:?}");
    // After all rounds, the daemon serves a new connection.
    let mut driver = daemon.driver("vm0", seed);
    crate::common::work(&mut driver, 100);
}
