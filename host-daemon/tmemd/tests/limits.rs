// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of limits: the number of log lines, the memory, threads and descriptors of a connection,
//! and the guest memory that the daemon maps.

use crate::common::{Daemon, Taken, allow_many_files, guest, taken_by, until, work};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use std::fs;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tmem_control::{GetStats_Reply, VarlinkClientInterface};
use tmem_model::{Driver, DriverConfig, GuestConfig, GuestRam, RamRegion};
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VhostUserMemoryRegionInfo};

/// BURST_ALL is the number of lines that the daemon logs in a burst about all VMs together. BURST
/// is the number of lines in a burst about each other source, such as a control socket.
const BURST_ALL: usize = 512;
const BURST: usize = 10;

/// Largest numbers of queues, memory regions, threads and descriptors that docs/operating.md states
/// for a connection.
const QUEUES: usize = 17;
const REGIONS: usize = 509;
const THREADS_MAX: usize = 1;
const DESCRIPTORS_MAX: usize = 5 + 3 * QUEUES;
/// Number of threads that may allocate memory for the first time while the test runs: that of the
/// connection, two workers, and that of a client of the control socket. The allocator then makes two
/// mappings.
const ARENAS: usize = 4;
/// Number of mappings of a connection: those of its regions, two of its thread's stack, and those of
/// the allocator.
const MAPPINGS_MAX: usize = REGIONS + 2 + 2 * ARENAS;
/// Maximum number of memory regions in one SET_MEM_TABLE message. The daemon has open descriptors for
/// one such message; it closes each when it has mapped the region.
const MESSAGE_REGIONS: usize = 32;
const DESCRIPTORS_CHANGING_MAX: usize = DESCRIPTORS_MAX + MESSAGE_REGIONS + FILES_CHANGING;
/// Maximum number of descriptors of the files of two memory tables, which show how much memory the
/// host has allocated. The daemon keeps none for a table with more than four files, as in this test.
const FILES_CHANGING: usize = 8;
/// Number of descriptors of a client of a control socket. The client that read the size of the pool
/// may still be disconnecting.
const CLIENT_DESCRIPTORS: usize = 2;
/// While the front end changes its memory table in a loop, the daemon also has the mappings of the
/// tables that wait to be unmapped, and of the next table.
const TABLES_WAITING: usize = 4;
const MAPPINGS_CHANGING_MAX: usize = MAPPINGS_MAX + (TABLES_WAITING + 1) * REGIONS;
const MEMORY_MAX_BYTES: usize = 1 << 20;

/// Number of times that the front end changes its memory table in a loop. The daemon can unmap a
/// few hundred tables per second.
const CHANGES: usize = 2000;

/// Starts a daemon without the sandbox, because the test cannot inspect a sandboxed daemon in
/// /proc.
fn visible() -> Daemon {
    let seen = |_: &std::path::Path| vec!["--no-sandbox".into()];
    Daemon::with_arguments(&[("a", None)], "64MiB", seen)
}

/// Returns the daemon's resources while no VM is connected. `Daemon::spawn` connects to each
/// socket, so the function waits until these connections have ended.
fn at_rest(daemon: &mut Daemon) -> Taken {
    let pid = daemon.pid() as i32;
    let mut last = taken_by(pid);
    let mut same = 0;
    daemon.until("no VM is connected", || {
        let now = taken_by(pid);
        let is_same = (now.threads, now.descriptors) == (last.threads, last.descriptors);
        same = if is_same { same + 1 } else { 0 };
        last = now;
        same == 50
    });
    last
}

fn log(daemon: &Daemon) -> String {
    fs::read_to_string(daemon.path("log")).expect("cannot read the log")
}

#[test]
fn log_lines_of_all_vms_are_bounded() {
    let names: Vec<String> = (0..80).map(|number| format!("vm{number}")).collect();
    let vms: Vec<(&str, Option<&str>)> = names.iter().map(|name| (name.as_str(), None)).collect();
    let begun = Instant::now();
    let daemon = Daemon::with_pool(&vms, "64MiB");
    let mut client = tmem_control::connect(&daemon.path("control"))
        .expect("cannot connect to the control socket");
    for _ in 0..6 {
        for name in &names {
            // If the VM's previous connection has not ended yet, the daemon refuses this connection
            // and logs that.
            drop(UnixStream::connect(daemon.socket(name)).expect("cannot connect to the socket"));
        }
        until("no VM is connected", || {
            let stats = client
                .get_stats(None)
                .call()
                .expect("the daemon answered a valid varlink call with an error");
            stats.vms.iter().all(|vm| !vm.connected)
        });
    }
    until("all connections are counted", || {
        let stats = client
            .get_stats(None)
            .call()
            .expect("the daemon answered a valid varlink call with an error");
        let seen = stats
            .vms
            .iter()
            .map(|vm| vm.connections + vm.connections_refused);
        seen.sum::<i64>() >= 6 * 80
    });
    let log = log(&daemon);
    let lines = log.lines().filter(|line| line.contains("vm=")).count();
    let bound = BURST_ALL + 1 + begun.elapsed().as_secs() as usize;
    assert!(
        lines <= bound,
        "{lines} lines were logged, more than {bound}"
    );
    assert!(
        lines > BURST_ALL / 2,
        "only {lines} lines were logged, too few to reach the limit"
    );
}

#[test]
fn log_lines_of_failed_accepts_are_bounded() {
    let mut daemon = visible();
    at_rest(&mut daemon);
    let pid = Pid::from_raw(daemon.pid() as i32).expect("the process id is 0");
    let said = || {
        log(&daemon)
            .matches("a connection cannot be accepted")
            .count()
    };
    // The test sets the daemon's limit of open files to the lowest free descriptor number. The
    // daemon then cannot open another file.
    let descriptors =
        fs::read_dir(format!("/proc/{}/fd", daemon.pid())).expect("cannot list the directory");
    let number = |entry: fs::DirEntry| entry.file_name().to_str()?.parse::<u64>().ok();
    let numbers: Vec<u64> = descriptors
        .filter_map(|entry| number(entry.ok()?))
        .collect();
    let free = (0..).find(|number| !numbers.contains(number));
    // Later, the test raises the limit of open files to the hard limit, as the daemon does at its
    // start.
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = |current| {
        let limit = Rlimit { current, maximum };
        prlimit(Some(pid), Resource::Nofile, limit)
            .expect("cannot set the process's limit of descriptors");
    };
    limit(free);
    let begun = Instant::now();
    let client = UnixStream::connect(daemon.path("control"))
        .expect("the kernel did not queue the connection for the daemon");
    until("the log has the number of lines that were left out", || {
        log(&daemon).contains("cannot be accepted") && log(&daemon).contains("left_out=")
    });
    let bound = BURST + 1 + begun.elapsed().as_secs() as usize / 5;
    assert!(
        (BURST..=bound).contains(&said()),
        "{} lines were logged, not {BURST} to {bound}",
        said()
    );
    limit(maximum);
    drop(client);
    let mut client = tmem_control::connect(&daemon.path("control"))
        .expect("cannot connect to the control socket");
    client
        .list_vms()
        .call()
        .expect("the daemon does not serve after it has descriptors again");
}

/// The simulated front end uses the maximum number of queues and memory regions, and the largest
/// rings.
#[test]
fn resources_of_a_connection_are_bounded() {
    allow_many_files();
    let mut daemon = visible();
    let region = |number: u64| RamRegion {
        start: number << 32,
        size_bytes: if number == 0 { 64 << 20 } else { 64 << 10 },
    };
    let config = GuestConfig {
        name: "a".into(),
        ram: (0..REGIONS as u64).map(region).collect(),
        request_queues: QUEUES as u16 - 1,
        queue_size: 1024,
        mem_slots: true,
        ..GuestConfig::default()
    };
    let pid = daemon.pid() as i32;
    let before = at_rest(&mut daemon);
    let mut driver = daemon.driver_with(config, DriverConfig::default());
    let mut most = taken_by(pid);
    for _ in 0..200 {
        driver
            .step()
            .expect("the device did not answer each request correctly");
        most = most.most(&taken_by(pid));
    }
    driver
        .settle()
        .expect("the device did not answer each request correctly");
    let Taken {
        threads,
        descriptors,
        mappings,
        memory_bytes,
        ..
    } = most;
    println!("the daemon's resources before the connection: {before:?}, maximum: {most:?}");
    assert!(
        threads <= before.threads + THREADS_MAX,
        "a connection used more than {THREADS_MAX} threads: {before:?} became {most:?}"
    );
    assert!(
        descriptors <= before.descriptors + DESCRIPTORS_MAX,
        "a connection used more than {DESCRIPTORS_MAX} descriptors: {before:?} became {most:?}"
    );
    // A client that read the size of the pool may have been counted before, and has left since.
    assert!(
        descriptors + CLIENT_DESCRIPTORS >= before.descriptors + DESCRIPTORS_MAX,
        "the connection uses fewer descriptors than DESCRIPTORS_MAX, so that bound is too high"
    );
    assert!(
        mappings <= before.mappings + MAPPINGS_MAX,
        "a connection used more than {MAPPINGS_MAX} mappings: {before:?} became {most:?}"
    );
    let pool = daemon_pool_bytes(&daemon);
    let own = memory_bytes.saturating_sub(before.memory_bytes + pool);
    println!("memory of the connection: {own} bytes, plus {pool} bytes in the pool");
    assert!(
        own <= MEMORY_MAX_BYTES,
        "a connection used {own} bytes outside of the pool, more than {MEMORY_MAX_BYTES}"
    );

    // Each SET_MEM_TABLE message passes new descriptors and mappings. Tables that wait to be unmapped
    // keep their mappings.
    let regions = driver.guest.ram().vhost_regions();
    let changed = AtomicBool::new(false);
    let most = std::thread::scope(|scope| {
        let counter = scope.spawn(|| {
            let mut most = taken_by(pid);
            while !changed.load(Ordering::SeqCst) {
                most = most.most(&taken_by(pid));
            }
            most
        });
        let frontend = driver
            .guest
            .frontend()
            .expect("cannot connect the simulated VMM");
        for _ in 0..CHANGES {
            let changes = frontend.set_mem_table(&regions[..MESSAGE_REGIONS]);
            changes.expect("the daemon did not accept the memory table");
        }
        changed.store(true, Ordering::SeqCst);
        counter.join().expect("the thread panicked")
    });
    println!("the daemon has at most {most:?} while the VM's memory table changes");
    let bound = before.descriptors + DESCRIPTORS_CHANGING_MAX + CLIENT_DESCRIPTORS;
    assert!(
        most.descriptors <= bound,
        "{} descriptors were open, more than {bound}",
        most.descriptors
    );
    let bound = before.mappings + MAPPINGS_CHANGING_MAX;
    assert!(
        most.mappings <= bound,
        "{} mappings existed, more than {bound}",
        most.mappings
    );
    // The allocator may keep some mappings.
    let one = before.mappings + 2 * MESSAGE_REGIONS;
    daemon.until("tmemd has unmapped old tables", || {
        taken_by(pid).mappings <= one
    });
}

/// Returns the statistics of the daemon, the pool and all VMs.
fn stats(daemon: &Daemon) -> GetStats_Reply {
    let mut client = tmem_control::connect(&daemon.path("control"))
        .expect("cannot connect to the control socket");
    client
        .get_stats(None)
        .call()
        .expect("the daemon answered a valid varlink call with an error")
}

/// Returns the number of bytes of memory that the pool takes.
fn daemon_pool_bytes(daemon: &Daemon) -> usize {
    usize::try_from(stats(daemon).pool.held_bytes).expect("the number is negative")
}

const MIB: u64 = 1 << 20;
const TIB: u64 = 1 << 40;

/// Size of the memory with which each VM of the next two tests connects.
const FIRST_BYTES: u64 = 8 * MIB;

/// Starts a daemon that serves the VM `neighbour` and VMs with the given names and maximum sizes of
/// their memory.
fn with_maxima(vms: &[(&str, &str)]) -> Daemon {
    Daemon::with_arguments(&[("neighbour", None)], "64MiB", |directory| {
        let vm = |(name, memory_max): &(&str, &str)| {
            let socket = directory.join(format!("{name}.sock"));
            let socket = socket.display();
            let vm = format!("name={name},socket={socket},memory_max={memory_max}");
            ["--vm".into(), vm]
        };
        vms.iter().flat_map(vm).collect()
    })
}

/// Connects a VM with `FIRST_BYTES` of memory and free memory slots.
fn with_slots(daemon: &mut Daemon, name: &str) -> Driver {
    let config = GuestConfig {
        ram: vec![RamRegion {
            start: 0,
            size_bytes: FIRST_BYTES,
        }],
        mem_slots: true,
        ..guest(name)
    };
    daemon.driver_with(config, DriverConfig::default())
}

/// Creates memory that a VM can add in a free slot.
fn more(size_bytes: u64) -> (Arc<GuestRam>, VhostUserMemoryRegionInfo) {
    let region = RamRegion {
        start: 1 << 45,
        size_bytes,
    };
    let ram = GuestRam::new(&[region], true).expect("cannot create guest memory");
    let region = ram.vhost_regions()[0];
    (ram, region)
}

fn add(driver: &mut Driver, region: &VhostUserMemoryRegionInfo) -> Result<(), String> {
    let front_end = driver.guest.frontend();
    let front_end = front_end.expect("the simulated VMM is not connected");
    let added = front_end.add_mem_region(region);
    added.map(drop).map_err(|error| error.to_string())
}

/// Checks that the daemon's log has a line about the VM `name` with all `parts`.
fn assert_logged(daemon: &Daemon, name: &str, parts: &[&str]) {
    let log = log(daemon);
    let vm = format!("VM {name}: ");
    let is_it = |line: &&str| line.contains(&vm) && parts.iter().all(|part| line.contains(part));
    assert!(
        log.lines().any(|line| is_it(&line)),
        "no log line about {name} contains {parts:?}: {log}"
    );
}

#[test]
fn a_vm_above_its_maximum_memory_is_refused_without_effect_on_other_vms() {
    let mut daemon = with_maxima(&[("big", "66MiB")]);
    let mut neighbour = daemon.driver("neighbour", 1);
    let mut driver = with_slots(&mut daemon, "big");
    let (_too_much, too_much) = more(64 * MIB);
    let (_enough, enough) = more(58 * MIB);
    for _ in 0..5 {
        add(&mut driver, &too_much).expect_err("memory above the VM's maximum was accepted");
        work(&mut neighbour, 20);
        // The VM is served again after it connects with less memory.
        driver.hang_up().expect("cannot disconnect");
        daemon.connect(&mut driver, "big");
        work(&mut driver, 20);
        add(&mut driver, &enough).expect("memory up to the maximum was refused");
        work(&mut driver, 20);
    }
    assert_logged(
        &daemon,
        "big",
        &[
            "67108864 bytes",
            "75497472 bytes",
            "maximum is 69206016",
            "memory_max",
        ],
    );
    until("tables of earlier connections are unmapped", || {
        let stats = stats(&daemon);
        let mut vms = stats.vms.iter();
        let big = vms
            .find(|vm| vm.name == "big")
            .expect("the statistics do not list VM big");
        assert_eq!(big.memory_max_bytes as u64, 66 * MIB);
        big.memory_mapped_bytes as u64 == 66 * MIB
    });
}

#[test]
fn all_vms_share_one_budget_of_mapped_memory() {
    const HOGS: usize = 8;
    let names: Vec<String> = (0..HOGS).map(|number| format!("hog{number}")).collect();
    let mut vms: Vec<(&str, &str)> = names.iter().map(|name| (name.as_str(), "8TiB")).collect();
    vms.push(("late", "8TiB"));
    let mut daemon = with_maxima(&vms);
    let mut neighbour = daemon.driver("neighbour", 1);
    let mut late = with_slots(&mut daemon, "late");
    // All these VMs share one sparse file without pages, so that it takes no memory of the host.
    let (_ram, region) = more(7 * TIB + TIB / 2);
    let hogs: Vec<Driver> = names
        .iter()
        .map(|name| {
            let mut hog = with_slots(&mut daemon, name);
            add(&mut hog, &region).expect("memory within the budget was refused");
            hog
        })
        .collect();
    let (_too_much, too_much) = more(5 * TIB);
    add(&mut late, &too_much).expect_err("memory above the budget of all VMs was accepted");
    assert_logged(
        &daemon,
        "late",
        &[
            "5497558138880 bytes",
            "maximum is 8796093022208",
            "of the 70368744177664 bytes",
        ],
    );
    work(&mut neighbour, 100);
    late.hang_up().expect("cannot disconnect");
    daemon.connect(&mut late, "late");
    let (_enough, enough) = more(3 * TIB);
    add(&mut late, &enough).expect("memory within the budget was refused");
    work(&mut late, 100);
    let mapped = |daemon: &Daemon| stats(daemon).daemon.memory_mapped_bytes as u64;
    assert!(
        mapped(&daemon) > 63 * TIB,
        "the mapped memory of a VM is missing in memory_mapped_bytes"
    );
    let front_end = late.guest.frontend();
    let front_end = front_end.expect("the simulated VMM is not connected");
    front_end
        .remove_mem_region(&enough)
        .expect("the region was not removed");
    until("the removed memory is unmapped", || {
        mapped(&daemon) < 61 * TIB
    });
    assert_eq!(stats(&daemon).daemon.memory_budget_bytes as u64, 64 * TIB);
    work(&mut neighbour, 100);
    drop(hogs);
}
