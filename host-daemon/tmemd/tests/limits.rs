// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of limits: the number of log lines, and the memory, threads and descriptors of a
//! connection.

mod common;

use common::{Daemon, Taken, taken_by, until};
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};
use std::fs;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tmem_control::VarlinkClientInterface;
use tmem_sim::{DriverConfig, GuestConfig, RamRegion};
use vhost::VhostBackend;

/// BURST_ALL is the number of lines that the daemon logs in a burst about all VMs together. BURST
/// is the number of lines in a burst about each other source, such as a control socket.
const BURST_ALL: usize = 512;
const BURST: usize = 10;

/// Largest numbers of queues, memory regions, threads and descriptors that docs/operating.md states
/// for a connection.
const QUEUES: usize = 17;
const REGIONS: usize = 64;
const THREADS_MAX: usize = 1;
const DESCRIPTORS_MAX: usize = 5 + 3 * QUEUES + REGIONS;
/// Maximum number of memory regions in one SET_MEM_TABLE message. While the front end changes its
/// memory table in a loop, the daemon has open descriptors for one such message. It also has those
/// of the tables that wait to be unmapped.
const MESSAGE_REGIONS: usize = 32;
const TABLES_WAITING: usize = 4;
const DESCRIPTORS_CHANGING_MAX: usize =
    DESCRIPTORS_MAX + TABLES_WAITING * REGIONS + MESSAGE_REGIONS;
const MEMORY_MAX_BYTES: usize = 1 << 20;

/// Number of times that the front end changes its memory table in a loop. The daemon can unmap some
/// hundred tables per second.
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
                .expect("the daemon answered the varlink call with an error");
            stats.vms.iter().all(|vm| !vm.connected)
        });
    }
    until("all connections are counted", || {
        let stats = client
            .get_stats(None)
            .call()
            .expect("the daemon answered the varlink call with an error");
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
    assert_eq!(
        descriptors,
        before.descriptors + DESCRIPTORS_MAX,
        "the connection uses fewer descriptors than DESCRIPTORS_MAX, so that bound is too high"
    );
    let pool = daemon_pool_bytes(&daemon);
    let own = memory_bytes.saturating_sub(before.memory_bytes + pool);
    println!("memory of the connection: {own} bytes, plus {pool} bytes in the pool");
    assert!(
        own <= MEMORY_MAX_BYTES,
        "{own} bytes beside the pool are more than {MEMORY_MAX_BYTES}"
    );

    // Each SET_MEM_TABLE message passes new descriptors. The daemon closes them when it unmaps the
    // memory table.
    let regions = driver.guest.ram().vhost_regions();
    let changed = AtomicBool::new(false);
    let most = std::thread::scope(|scope| {
        let counter = scope.spawn(|| {
            let mut most = 0;
            while !changed.load(Ordering::SeqCst) {
                most = most.max(taken_by(pid).descriptors);
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
    println!("the daemon has at most {most} descriptors while the VM's memory table changes");
    let bound = before.descriptors + DESCRIPTORS_CHANGING_MAX;
    assert!(
        most <= bound,
        "{most} descriptors were open, more than {bound}"
    );
    let table = DESCRIPTORS_MAX - REGIONS + MESSAGE_REGIONS;
    let one = before.descriptors + table;
    assert!(
        most > one,
        "only {most} descriptors were open, those of one memory table"
    );
    daemon.until("tmemd has closed the descriptors of old tables", || {
        taken_by(pid).descriptors <= one
    });
}

/// Returns the number of bytes of memory that the pool takes.
fn daemon_pool_bytes(daemon: &Daemon) -> usize {
    let mut client = tmem_control::connect(&daemon.path("control"))
        .expect("cannot connect to the control socket");
    let stats = client
        .get_stats(None)
        .call()
        .expect("the daemon answered the varlink call with an error");
    usize::try_from(stats.pool.held_bytes).expect("the number is negative")
}
