// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests that the daemon's workers sleep without requests and share their time fairly among guests.
//! Both event loops are tested: io_uring and epoll.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::common::{Daemon, guest, until, work};
use tmem_model::{
    Content, DriverConfig, FakeGuest, GuestConfig, Missing, PutPage, Request, skipped,
};

fn daemon(vms: &[(&str, Option<&str>)], event_loop: &str, workers: usize) -> Daemon {
    let arguments = |_: &std::path::Path| {
        let workers = workers.to_string();
        let all = [
            "--workers",
            &workers,
            "--poll-max-us",
            "200",
            "--event-loop",
            event_loop,
        ];
        all.iter().map(|argument| argument.to_string()).collect()
    };
    Daemon::with_arguments(vms, "512MiB", arguments)
}

/// Returns how often each worker of a process has slept, and its processor time in ns.
fn slept(pid: u32) -> BTreeMap<String, (String, u64)> {
    let mut all = BTreeMap::new();
    for thread in std::fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let path = thread.unwrap().path();
        let read = |name| std::fs::read_to_string(path.join(name)).unwrap_or_default();
        if read("comm").starts_with("worker-") {
            let status = read("status");
            let switches = status.lines().filter(|line| line.starts_with("voluntary"));
            let switches: String = switches.collect();
            let time = read("schedstat");
            let time = time
                .split(' ')
                .next()
                .and_then(|ns| ns.parse().ok())
                .unwrap_or(0);
            all.insert(path.display().to_string(), (switches, time));
        }
    }
    assert!(!all.is_empty());
    all
}

/// Number of consecutive checks that must find no activity before the workers count as idle.
const CHECKS: u32 = 3;

/// A worker without requests does not wake up, even if it was busy before.
#[test]
fn idle_workers_sleep() {
    for event_loop in ["epoll", "auto"] {
        let mut daemon = daemon(&[("a", None)], event_loop, 2);
        let mut driver = daemon.driver("a", 1);
        work(&mut driver, 300);
        driver.settle().unwrap();
        let mut before = slept(daemon.pid());
        // A worker polls an empty ring for at most a millisecond, or for longer if the host is
        // busy. So the test waits until all workers sleep.
        let mut same = 0;
        until("the workers are idle", || {
            std::thread::sleep(Duration::from_millis(100));
            let now = slept(daemon.pid());
            same = if now == before { same + 1 } else { 0 };
            before = now;
            same == CHECKS
        });
        std::thread::sleep(Duration::from_millis(500));
        assert_eq!(
            slept(daemon.pid()),
            before,
            "{event_loop}: an idle worker woke up"
        );
        // Workers that sleep wake up for new requests.
        work(&mut driver, 100);
    }
}

/// Sends a PUT of `pages` pages on the queue `queue`. Returns false if the queue is full.
fn put(guest: &mut FakeGuest, queue: usize, pages: usize) -> bool {
    let page = |index| PutPage {
        object: queue as u64,
        index,
        cookie: 1,
        flags: 0,
        page: Content::SameFilled(index).page(),
    };
    let pages = (0..pages as u64).map(page).collect();
    guest
        .submit(queue, Request::Put { pool: 1, pages })
        .is_some()
}

/// One guest keeps eight queues full of the largest batches. Another guest has one small request at
/// a time. A worker serves each guest in turn for one scheduling slice. For each small request, it
/// therefore serves only one or two batches of the busy guest, however many batches wait.
#[test]
fn a_flood_of_requests_takes_only_the_fair_share_of_its_vm() {
    if std::thread::available_parallelism().is_ok_and(|number| number.get() == 1) {
        let why = "with one processor, the worker gives many slices before the test runs again and counts answers";
        return skipped(Missing::Processors, why);
    }
    for event_loop in ["epoll", "auto"] {
        let mut daemon = daemon(&[("flood", None), ("small", None)], event_loop, 1);
        let config = GuestConfig {
            request_queues: 8,
            slots: 64,
            ram: vec![tmem_model::RamRegion {
                start: 0,
                size_bytes: 32 << 20,
            }],
            ..guest("flood")
        };
        let mut flood = daemon.driver_with(config, DriverConfig::default()).guest;
        let mut small = daemon.driver("small", 2).guest;
        let answered = |flood: &FakeGuest| -> u64 {
            (1..=8)
                .map(|queue| u64::from(flood.ring(queue).used_idx_in_memory()))
                .sum()
        };
        let begun = Instant::now();
        let mut shares = Vec::new();
        for _ in 0..100 {
            for queue in 1..=8 {
                while flood.poll(queue).unwrap().is_some() {}
                while flood.ring(queue).in_flight() < 8 && put(&mut flood, queue, 64) {}
            }
            let before = answered(&flood);
            assert!(put(&mut small, 1, 1));
            while small.poll(1).unwrap().is_none() {
                assert!(
                    begun.elapsed() < Duration::from_secs(120),
                    "{event_loop}: the request of the small VM was not answered within 120 s"
                );
            }
            shares.push(answered(&flood) - before);
        }
        shares.sort_unstable();
        // The bound of 4 batches for each small request includes the worker's current scheduling
        // slice and a measuring error. If the worker served queues in turn instead of VMs, the
        // median would be eight.
        let median = shares[shares.len() / 2];
        assert!(
            median <= 4,
            "{event_loop}: the flooding VM got a median of {median} batches per request of the \
             small VM, more than 4: {shares:?}"
        );
        assert!(
            answered(&flood) > 0,
            "{event_loop}: the flooding VM got no answer"
        );
    }
}
