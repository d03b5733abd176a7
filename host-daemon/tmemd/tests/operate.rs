// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of an operator's commands to a running daemon (flush, freeze, resize, events) and of its
//! statistics.

use crate::common::{Daemon, until, work};
use rustix::fs::{FallocateFlags, fallocate};
use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};
use tmem_control::{ErrorKind, Event, VarlinkClient, VarlinkClientInterface, VmStats};
use tmem_model::{Content, Driver, PutPage, Request};

fn daemon() -> Daemon {
    Daemon::with_arguments(&[("a", None), ("b", None)], "64MiB", |directory| {
        let read_only = directory.join("read-only").to_str().unwrap().to_owned();
        vec!["--control-read-only".into(), read_only]
    })
}

fn client(socket: &Path) -> VarlinkClient {
    tmem_control::connect(socket).unwrap()
}

fn stats(client: &mut VarlinkClient, vm: &str) -> VmStats {
    client
        .get_stats(Some(vm.into()))
        .call()
        .unwrap()
        .vms
        .remove(0)
}

fn put(driver: &mut Driver, index: u64) {
    let cookie = driver.new_cookie();
    let content = Content::Noise(index);
    let put = Request::Put {
        pool: driver.pool(),
        pages: vec![PutPage {
            object: 9,
            index,
            cookie,
            flags: 0,
            page: content.page(),
        }],
    };
    let queue = driver.queue_of(9, index);
    assert!(driver.send(queue, put, vec![content]));
    driver.settle().unwrap();
}

#[test]
fn latencies_and_counts_of_requests_are_reported() {
    let mut daemon = daemon();
    let mut driver = daemon.driver("a", 1);
    work(&mut driver, 300);
    let mut client = client(&daemon.path("control"));
    let vm = stats(&mut client, "a");
    let sum = |histogram: &tmem_control::Histogram| histogram.buckets.iter().sum::<i64>();
    let latencies = [&vm.put_latency, &vm.get_latency, &vm.flush_latency];
    for latency in latencies {
        assert!(
            sum(latency) > 0 && latency.sum_ns > 0,
            "the statistics have no latency for one type of request: {latency:?}"
        );
    }
    assert!(
        sum(&vm.wait_latency) > 0,
        "the statistics have no latency of waiting for a worker"
    );
    // The daemon has no latency histogram for requests that create pools or send reports. The guest
    // sends only few such requests.
    let timed: i64 = latencies.into_iter().map(sum).sum();
    assert!(
        timed < vm.requests && timed > vm.requests - 10,
        "latencies of {timed} requests were recorded, expected up to 9 fewer than requests: {vm:?}"
    );
    assert_eq!(vm.misses, vm.gets - vm.hits);
    assert_eq!(vm.disk_read_avoided_bytes, vm.hits * 4096);
    assert_eq!(vm.saved_bytes, vm.pages * 4096 - vm.charged_bytes);
    let of_daemon = client.get_stats(None).call().unwrap().daemon;
    assert!(of_daemon.resident_bytes > 0 && of_daemon.cpu_ms >= of_daemon.cpu_requests_ms);
}

/// The reported processor time grows with work, and does not grow for an idle VM. The test depends
/// neither on the speed of the machine nor on other processes.
#[test]
fn processor_time_is_reported_by_kind_of_work_and_by_vm() {
    const BACKGROUND_THREADS: i64 = 2;
    let vms = [("a", None), ("b", None)];
    // The pool is so small that the daemon must evict pages.
    let mut daemon = Daemon::with_arguments(&vms, "4MiB", |_| {
        let threads = BACKGROUND_THREADS.to_string();
        ["--background-threads", &threads]
            .map(String::from)
            .to_vec()
    });
    let mut driver = daemon.driver("a", 1);
    let mut client = client(&daemon.path("control"));
    let mut indexes = 0..;
    let (mut settling_ms, mut room_ms, mut requests_ms) = (0, 0, 0);
    // The daemon reports the processor time of each kind of work. Each time grows with further
    // work.
    for _ in 0..2 {
        until("processor time of each kind of work is counted", || {
            (0..64).for_each(|_| put(&mut driver, indexes.next().unwrap()));
            let stats = client.get_stats(None).call().unwrap();
            stats.daemon.cpu_finalize_ms > settling_ms
                && stats.daemon.cpu_reclaim_ms > room_ms
                && stats.vms[0].cpu_requests_ms > requests_ms
        });
        let stats = client.get_stats(None).call().unwrap();
        settling_ms = stats.daemon.cpu_finalize_ms;
        room_ms = stats.daemon.cpu_reclaim_ms;
        requests_ms = stats.vms[0].cpu_requests_ms;
        // The reported times of kinds of work may exceed the background time. The kernel rounds the
        // user time and the system time of each thread down to a tick, and the daemon measures
        // kinds of work without rounding.
        let tick_ms = 1000 / i64::try_from(rustix::param::clock_ticks_per_second()).unwrap();
        let sum = settling_ms + stats.daemon.cpu_recompress_ms + room_ms;
        let most = stats.daemon.cpu_background_ms + BACKGROUND_THREADS * 2 * tick_ms;
        assert!(
            sum <= most,
            "the kinds of work used {sum} ms of processor time, more than {most} ms: {:?}",
            stats.daemon
        );
    }
    let [a, b] = ["a", "b"].map(|vm| stats(&mut client, vm));
    assert_eq!(
        (b.connected, b.cpu_requests_ms),
        (false, 0),
        "VM b, which did nothing, has a connection or processor time: {b:?}"
    );
    // A VM's processor time contains the time of its scheduling slices. The daemon counts the last
    // slice shortly after it has sent the slice's last answer, so the test waits.
    let sum_ns = a.put_latency.sum_ns + a.get_latency.sum_ns + a.flush_latency.sum_ns;
    until("the last slice is counted", || {
        stats(&mut client, "a").cpu_requests_ms >= sum_ns / 1_000_000
    });
}

/// The statistics of a VM contain the latencies that its driver has sent. They contain no latencies
/// if the driver sends only REPORT requests.
#[test]
fn latencies_of_readers_in_the_guest_are_reported() {
    let mut daemon = daemon();
    let mut driver = daemon.driver("a", 1);
    let mut client = client(&daemon.path("control"));
    let report = Request::Report(Box::new([0; tmem_model::requests::REPORT_BYTES]));
    assert!(driver.send(0, report, vec![]));
    driver.settle().unwrap();
    let latencies_of = |client: &mut VarlinkClient| {
        stats(client, "a")
            .driver
            .expect("the guest's driver sent no report")
            .get_latency
    };
    assert_eq!(latencies_of(&mut client), None);
    let mut latencies = [0; tmem_model::requests::LATENCIES_BYTES];
    latencies[..8].copy_from_slice(&70_000u64.to_le_bytes());
    latencies[8 + 5 * 8] = 3;
    latencies[8 + 15 * 8] = 1;
    let request = Request::Latencies(Box::new(latencies));
    assert!(driver.send(0, request, vec![]));
    driver.settle().unwrap();
    let mut buckets = vec![0; 16];
    (buckets[5], buckets[15]) = (3, 1);
    let sum_ns = 70_000;
    assert_eq!(
        latencies_of(&mut client),
        Some(tmem_control::Histogram { sum_ns, buckets })
    );
}

#[test]
fn a_flushed_vm_has_no_pages_and_is_served_again() {
    let mut daemon = daemon();
    let mut driver = daemon.driver("a", 2);
    (0..100).for_each(|index| put(&mut driver, index));
    let mut client = client(&daemon.path("control"));
    let before = stats(&mut client, "a");
    assert_eq!(before.pages, 100);
    assert_eq!(client.flush_vm("a".into()).call().unwrap().pages, 100);
    let after = stats(&mut client, "a");
    assert_eq!(
        (after.pages, after.flushed_pages),
        (0, before.flushed_pages + 100)
    );
    work(&mut driver, 300);
    assert_eq!(stats(&mut client, "a").hash_mismatches, 0);
}

/// If a frozen VM puts a page again, the daemon must not return the older version of the page
/// later.
#[test]
fn puts_of_a_frozen_vm_are_refused_and_gets_still_hit() {
    let mut daemon = daemon();
    let mut driver = daemon.driver("a", 3);
    (0..50).for_each(|index| put(&mut driver, index));
    let mut client = client(&daemon.path("control"));
    assert!(client.freeze_vm("a".into()).call().unwrap().changed);
    assert!(!client.freeze_vm("a".into()).call().unwrap().changed);
    assert!(client.list_vms().call().unwrap().vms[0].frozen);
    let before = stats(&mut client, "a");
    (25..75).for_each(|index| put(&mut driver, index));
    let frozen = stats(&mut client, "a");
    assert_eq!(
        frozen.pages, 25,
        "the frozen VM does not have exactly the 25 pages that it did not put again"
    );
    assert_eq!(frozen.refused_frozen, 50);
    assert_eq!(frozen.puts_refused, before.puts_refused + 50);
    assert_eq!(frozen.puts, before.puts + 50);
    // The driver's model checks each answer of the daemon.
    work(&mut driver, 200);
    driver.get_all().unwrap();
    assert!(client.thaw_vm("a".into()).call().unwrap().changed);
    assert!(!client.thaw_vm("a".into()).call().unwrap().changed);
    let before = stats(&mut client, "a").pages;
    (100..110).for_each(|index| put(&mut driver, index));
    assert_eq!(stats(&mut client, "a").pages, before + 10);
}

#[test]
fn setting_the_pool_size_shrinks_and_grows_the_pool() {
    let mut daemon = daemon();
    let mut driver = daemon.driver("a", 4);
    (0..4000).for_each(|index| put(&mut driver, index));
    let mut client = client(&daemon.path("control"));
    let held = client.get_freeable().call().unwrap();
    assert!(
        held.held_bytes > 12 << 20,
        "the pool holds at most 12 MiB, too little for this test: {held:?}"
    );
    assert_eq!(held.freeable_bytes, held.held_bytes - (1 << 20));
    assert_eq!(
        held.beyond_reserves_bytes, held.freeable_bytes,
        "not all memory is beyond reserves although nothing is reserved"
    );
    client.set_pool_size(8 << 20).call().unwrap();
    until("the pool holds at most 8 MiB", || {
        client.get_freeable().call().unwrap().held_bytes <= 8 << 20
    });
    let pool = client.get_stats(None).call().unwrap().pool;
    assert_eq!((pool.size_bytes, pool.configured_bytes), (8 << 20, 8 << 20));
    assert!(
        pool.evictions_shrink > 0 && pool.evictions_limit == 0,
        "pages were not evicted because the pool shrank: {pool:?}"
    );
    client.set_pool_size(32 << 20).call().unwrap();
    let pool = client.get_stats(None).call().unwrap().pool;
    assert_eq!(pool.size_bytes, 32 << 20);
    for size_bytes in [-1, 0, (1 << 20) - 1, i64::MAX] {
        let error = client
            .set_pool_size(size_bytes)
            .call()
            .expect_err("the daemon accepted an invalid pool size");
        assert!(
            matches!(error.kind(), ErrorKind::BadSize(Some(bad)) if bad.size_bytes == size_bytes
                && bad.reason.contains("1048576")),
            "the daemon did not answer with the error BadSize: {error}"
        );
    }
}

#[test]
fn unknown_vms_are_named_in_errors() {
    let daemon = daemon();
    let mut client = client(&daemon.path("control"));
    let unknown = |kind: &ErrorKind| {
        assert!(
            matches!(kind, ErrorKind::NoSuchVm(Some(args)) if args.name == "x"),
            "the daemon did not answer with the error NoSuchVm: {kind}"
        );
    };
    unknown(client.flush_vm("x".into()).call().unwrap_err().kind());
    unknown(client.freeze_vm("x".into()).call().unwrap_err().kind());
    unknown(client.thaw_vm("x".into()).call().unwrap_err().kind());
}

#[test]
fn subscribers_receive_events_of_vms_and_of_the_pool() {
    let mut daemon = daemon();
    let (sender, receiver) = std::sync::mpsc::channel::<Event>();
    let socket = daemon.path("read-only");
    let listener = std::thread::spawn(move || {
        let mut client = client(&socket);
        let mut call = client.subscribe_events();
        for event in call.more().unwrap().map_while(Result::ok) {
            sender.send(event.event).unwrap();
        }
    });
    let next = || {
        receiver
            .recv_timeout(crate::common::TIMEOUT)
            .expect("the subscriber received no event in time")
    };
    assert_eq!(next().kind, "subscribed");
    let mut driver = daemon.driver("b", 5);
    // Events of VM a are ignored. `Daemon::spawn` has connected to its socket to test it, and that
    // connection may still cause events.
    let until = |kind: &str| {
        let of_kind = std::iter::repeat_with(next)
            .find(|event| event.kind == kind && event.vm.as_deref() != Some("a"));
        of_kind.unwrap()
    };
    assert_eq!(until("connected").vm.as_deref(), Some("b"));
    let mut client = client(&daemon.path("control"));
    client.freeze_vm("b".into()).call().unwrap();
    let frozen = until("frozen");
    assert_eq!(frozen.vm.as_deref(), Some("b"));
    client.thaw_vm("b".into()).call().unwrap();
    assert_eq!(until("thawed").number, frozen.number + 1);
    client.set_pool_size(8 << 20).call().unwrap();
    assert_eq!(until("resized").vm, None);
    crate::common::every_queue_answers(&mut driver);
    assert!(until("driver").text.contains("off"));
    driver.hang_up().unwrap();
    assert_eq!(until("disconnected").vm.as_deref(), Some("b"));
    // A client that waits for events does not delay the stop of the daemon.
    daemon.terminate();
    listener.join().unwrap();
}

/// If connections begin and end in a loop, the daemon does not send an event for each of them. It
/// sends the event about the last state later, even if nothing more happens.
#[test]
fn the_last_rate_limited_connection_event_is_sent_after_a_delay() {
    let daemon = daemon();
    let mut listener = subscribe(&daemon.path("read-only")).unwrap();
    let mut client = client(&daemon.path("control"));
    until("VM b has had more than 40 connections", || {
        drop(UnixStream::connect(daemon.socket("b")).unwrap());
        stats(&mut client, "b").connections > 40
    });
    // One read may return only a part of an event.
    let (mut text, mut part) = (String::new(), [0; 4096]);
    let is_complete = |text: &str| {
        let last = text
            .split('\0')
            .rfind(|event| event.contains("connected\""));
        last.is_some_and(|event| event.contains("disconnected (") && event.ends_with('}'))
    };
    while !is_complete(&text) {
        let read = listener
            .read(&mut part)
            .expect("the subscriber received no event in time");
        text.push_str(std::str::from_utf8(&part[..read]).unwrap());
    }
}

/// Subscribes to the daemon's events. Returns when the subscription has begun.
fn subscribe(control: &Path) -> io::Result<UnixStream> {
    let call = b"{\"method\":\"io.virtiotmem.Control.SubscribeEvents\",\"more\":true}\0";
    let mut stream = UnixStream::connect(control)?;
    stream.set_read_timeout(Some(crate::common::TIMEOUT))?;
    stream.write_all(call)?;
    stream.read_exact(&mut [0])?;
    Ok(stream)
}

#[test]
fn a_subscription_requires_the_flag_more_and_ends_when_the_client_leaves() {
    let daemon = daemon();
    let error = client(&daemon.path("control")).subscribe_events().call();
    let error = error.expect_err("the daemon accepted a subscription without \"more\"");
    assert!(
        matches!(error.kind(), ErrorKind::MoreExpected(Some(args)) if args.method == "SubscribeEvents"),
        "the daemon did not answer with the error MoreExpected: {error}"
    );
    // In each round, the maximum number of clients subscribe to events, and then all of them
    // disconnect.
    for _ in 0..3 {
        // The daemon notices one by one that the clients of the previous round have disconnected.
        let streams: Vec<UnixStream> = (0..16)
            .map(|_| {
                let mut stream = None;
                until("the daemon accepts the subscription", || {
                    stream = subscribe(&daemon.path("control")).ok();
                    stream.is_some()
                });
                stream.unwrap()
            })
            .collect();
        let mut full = UnixStream::connect(daemon.path("control")).unwrap();
        full.set_read_timeout(Some(crate::common::TIMEOUT)).unwrap();
        assert_eq!(
            full.read(&mut [0]).unwrap(),
            0,
            "the daemon served more than the maximum of subscribers"
        );
        drop(streams);
        until("the daemon serves another client", || {
            client(&daemon.path("control")).list_vms().call().is_ok()
        });
    }
}

/// Makes three read-only calls, `calls` times in a row. Returns the time that all calls took.
fn read_in_a_loop(socket: &Path, calls: u32) -> Duration {
    let (mut client, begun) = (client(socket), Instant::now());
    for _ in 0..calls {
        client.get_stats(None).call().unwrap();
        assert_eq!(client.list_vms().call().unwrap().vms.len(), 2);
        client.get_freeable().call().unwrap();
    }
    begun.elapsed()
}

#[test]
fn calls_of_read_only_clients_are_rate_limited() {
    let daemon = daemon();
    let read_only = daemon.path("read-only");
    // The loop makes 150 calls. The daemon answers 50 of them at once, and the other 100 at a rate
    // of 50 per second.
    let took = read_in_a_loop(&read_only, 50);
    assert!(
        took >= Duration::from_millis(1900),
        "50 calls above the rate took only {took:?}"
    );
    // The rate limit of one client does not delay the calls of another client.
    let took = read_in_a_loop(&read_only, 10);
    assert!(
        took < Duration::from_millis(1900),
        "the calls of a client below the rate took {took:?}, as long as limited calls"
    );
    assert_eq!(stats(&mut client(&read_only), "a").name, "a");
    let mut nobody = client(&read_only);
    let error = nobody
        .get_stats(Some("c".into()))
        .call()
        .expect_err("the daemon returned statistics of an unknown VM");
    assert!(
        matches!(error.kind(), ErrorKind::NoSuchVm(_)),
        "the daemon did not answer with the error NoSuchVm: {error}"
    );
}

/// Read-only clients receive statistics that are up to 100 ms old, so that they cannot take the
/// locks of all VMs in a loop. Clients of the control socket receive current statistics.
#[test]
fn read_only_clients_receive_shared_statistics() {
    let daemon = daemon();
    let (mut full, mut read_only) = (
        client(&daemon.path("control")),
        client(&daemon.path("read-only")),
    );
    let mut older = [0, 0];
    for weight in 1..=20 {
        let quota = tmem_control::Quota {
            weight,
            ..tmem_control::quota(None, None, None)
        };
        full.set_quota("a".into(), quota).call().unwrap();
        assert_eq!(stats(&mut full, "a").weight, weight);
        let list = read_only.list_vms().call().unwrap().vms;
        let listed = list.iter().find(|vm| vm.name == "a").unwrap();
        older[0] += usize::from(listed.quota.weight != weight);
        older[1] += usize::from(stats(&mut read_only, "a").weight != weight);
    }
    assert!(
        older.iter().all(|older| *older > 0),
        "the read-only socket always returned current statistics"
    );
    until("the read-only socket returns the last weight", || {
        stats(&mut read_only, "a").weight == 20
    });
}

/// The memory of a VM that the host has allocated is reported. It shrinks when the VMM punches holes
/// for memory that the guest has returned.
#[test]
fn configured_and_resident_memory_of_vms_is_reported() {
    let mut daemon = daemon();
    let mut client = client(&daemon.path("control"));
    let vm = stats(&mut client, "a");
    assert_eq!((vm.memory_bytes, vm.memory_resident_bytes), (0, None));
    let mut driver = daemon.driver("a", 1);
    work(&mut driver, 200);
    let files = driver.guest.ram().shared_regions().unwrap();
    let blocks = || -> i64 {
        let blocks = files
            .iter()
            .map(|(_, _, file)| file.metadata().unwrap().blocks());
        blocks.sum::<u64>() as i64 * 512
    };
    let size = files
        .iter()
        .map(|(region, ..)| region.size_bytes as i64)
        .sum();
    let (region, _, file) = &files[1];
    for returns in [false, true] {
        if returns {
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            fallocate(file, hole, 0, region.size_bytes).unwrap();
        } else {
            fallocate(file, FallocateFlags::KEEP_SIZE, 0, region.size_bytes).unwrap();
            assert!(blocks() > region.size_bytes as i64);
        }
        // A worker that still polls a ring may allocate a page of it.
        until("all calls report the memory of the VM", || {
            let now = blocks();
            let reply = client.get_stats(None).call().unwrap();
            let vm = reply.vms.iter().find(|vm| vm.name == "a").unwrap();
            let list = client.list_vms().call().unwrap().vms;
            let listed = list.iter().find(|vm| vm.name == "a").unwrap();
            let all = &reply.daemon;
            (vm.memory_bytes, vm.memory_resident_bytes) == (size, Some(now))
                && listed.memory_bytes == Some(size)
                && listed.memory_resident_bytes == Some(now)
                && listed.pages == Some(vm.pages)
                && (all.memory_bytes, all.memory_resident_bytes) == (size, now)
                && all.memory_saved_bytes == size - now - reply.pool.held_bytes
        });
    }
    assert!(blocks() < region.size_bytes as i64);
    drop(driver);
    until("the memory of the disconnected VM is forgotten", || {
        let vm = stats(&mut client, "a");
        (vm.memory_bytes, vm.memory_resident_bytes) == (0, None)
    });
}
