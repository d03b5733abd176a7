// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Benchmark of many VMs on one daemon. It measures the resources that the daemon takes from the
//! host, and the times of answers when all VMs connect at once and when the VMs are under load. It
//! also measures whether the daemon answers a VM later while a large VM disconnects. There are two
//! kinds of large VMs. One has many pages in the pool. The other has much memory that the daemon
//! has touched and has to unmap.
//!
//! The guests are fake (`tmem-sim`) and share the machine with the daemon, so that the reported
//! times are upper bounds. A guest sends each request after the answer to its previous one, as a
//! reader does that waits for each page.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tmem_sim::{FakeGuest, GuestConfig, PutPage, RamRegion, Request};

/// Longest time that the benchmark waits for an answer or for a state of the daemon.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Time without a change after which the daemon's memory counts as no longer shrinking.
const STILL: Duration = Duration::from_secs(1);

const POOL: u32 = 1;
const PAGE: usize = 4096;
const BATCH: u64 = 64;

/// Options of the benchmark.
#[derive(clap::Args)]
pub struct Args {
    /// Number of VMs on the daemon.
    #[arg(long, default_value_t = 256, value_name = "NUMBER")]
    vms: usize,
    /// Number of rounds. In each round all VMs connect at once; between rounds they disconnect.
    #[arg(long, default_value_t = 5, value_name = "NUMBER")]
    rounds: usize,
    /// Number of threads that run the guests.
    #[arg(long, default_value_t = 4, value_name = "NUMBER")]
    clients: usize,
    /// Duration in seconds of each measurement of messages, and of the measurement before a large
    /// VM disconnects.
    #[arg(long, default_value_t = 3, value_name = "NUMBER")]
    seconds: u64,
    /// GiB of pages in the pool of the large VM that disconnects. All are same-filled pages, which
    /// take metadata only.
    #[arg(long, default_value_t = 16, value_name = "GIB")]
    leaving_gib: u64,
    /// Measure only what happens when a large VM disconnects.
    #[arg(long)]
    leaving_only: bool,
    /// Memory in GiB of the VM whose memory the daemon has touched and unmaps. The host needs only
    /// 1 GiB for it, because all parts of the VM's memory map the same file.
    #[arg(long, default_value_t = 64, value_name = "GIB", value_parser = clap::value_parser!(u64).range(1..=64))]
    mapped_gib: u64,
    /// Do not confine the daemon, so that users other than root can see its resources.
    #[arg(long)]
    no_sandbox: bool,
    /// Path of the daemon's program. The default is tmemd in the directory of this program.
    #[arg(long, value_name = "PATH")]
    tmemd: Option<PathBuf>,
}

/// Durations of the repetitions of one operation.
#[derive(Default)]
struct Times(Vec<Duration>);

impl Times {
    fn time<R>(&mut self, what: impl FnOnce() -> R) -> R {
        let begun = Instant::now();
        let result = what();
        self.0.push(begun.elapsed());
        result
    }

    fn line(&mut self, name: &str) -> String {
        self.0.sort_unstable();
        let at = |part: f64| {
            let last = self.0.len().saturating_sub(1);
            let nth = (last as f64 * part) as usize;
            self.0.get(nth).map_or(0.0, |time| time.as_secs_f64() * 1e6)
        };
        let mut line = format!("{name:40} {:>8}", self.0.len());
        for part in [0.5, 0.99, 0.999, 1.0] {
            let _ = write!(line, " {:>10.0}", at(part));
        }
        line
    }
}

/// A daemon process, which is killed when this value is dropped.
struct Daemon {
    child: Child,
    directory: tempfile::TempDir,
}

impl Daemon {
    fn start(program: &Path, vms: usize, no_sandbox: bool) -> Result<Daemon, String> {
        let directory =
            tempfile::tempdir().map_err(|e| format!("cannot create a temporary directory: {e}"))?;
        let log = File::create(directory.path().join("log"))
            .map_err(|e| format!("cannot create the daemon's log file: {e}"))?;
        let mut command = Command::new(program);
        command.args(["--pool-size", "8GiB", "--host-free-min", "0"]);
        command.args(["--memory-pressure", "none"]);
        command.args(no_sandbox.then_some("--no-sandbox"));
        command
            .arg("--control")
            .arg(directory.path().join("control"));
        for vm in 0..=vms {
            let socket = directory.path().join(format!("{vm}.sock"));
            let vm = format!("socket={},name=vm{vm}", socket.display());
            command.args(["--vm", &vm]);
        }
        command.stdout(Stdio::null()).stderr(log);
        let child = command
            .spawn()
            .map_err(|e| format!("cannot start {}: {e}", program.display()))?;
        let daemon = Daemon { child, directory };
        until(|| daemon.directory.path().join("control").exists() && daemon.socket(vms).exists())?;
        Ok(daemon)
    }

    fn socket(&self, vm: usize) -> PathBuf {
        self.directory.path().join(format!("{vm}.sock"))
    }

    /// Returns the bytes of guest memory that the daemon has touched and still maps.
    fn touched_bytes(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id()));
        let status = status.unwrap_or_default();
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix("RssShmem:"));
        let kib = line.and_then(|kib| kib.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        kib.unwrap_or(0) << 10
    }

    /// Returns four resources of the daemon's process: the numbers of its threads, of its
    /// descriptors and of its mappings, and its anonymous memory in KiB.
    fn resources(&self) -> [u64; 4] {
        let proc = PathBuf::from(format!("/proc/{}", self.child.id()));
        let entries = |name| fs::read_dir(proc.join(name)).map_or(0, Iterator::count) as u64;
        let read = |name| fs::read_to_string(proc.join(name)).unwrap_or_default();
        let status = read("status");
        let kib = status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"));
        let kib = kib.and_then(|kib| kib.trim().strip_suffix(" kB")?.parse().ok());
        let mappings = read("maps").lines().count() as u64;
        [entries("task"), entries("fd"), mappings, kib.unwrap_or(0)]
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Ignore an error, which means that the daemon has already ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn until(mut check: impl FnMut() -> bool) -> Result<(), String> {
    let deadline = Instant::now() + TIMEOUT;
    while !check() {
        if Instant::now() >= deadline {
            return Err(format!(
                "the daemon did not reach the expected state within {TIMEOUT:?}"
            ));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn guest(vm: usize) -> Result<FakeGuest, String> {
    let config = GuestConfig {
        name: format!("vm{vm}"),
        ram: vec![RamRegion {
            start: 0,
            size_bytes: 1 << 20,
        }],
        request_queues: 2,
        queue_size: 64,
        slots: 2,
        reply_timeout: TIMEOUT,
        ..GuestConfig::default()
    };
    FakeGuest::new(config).map_err(|e| format!("cannot create a guest: {e}"))
}

fn put(object: u64, index: u64, pages: u64, value: u64) -> Request {
    let page = |nth| PutPage {
        object,
        index: index + nth,
        cookie: index + nth + 1,
        flags: 0,
        page: Box::new([value as u8; PAGE]),
    };
    Request::Put {
        pool: POOL,
        pages: (0..pages).map(page).collect(),
    }
}

fn get(object: u64, index: u64, pages: u64) -> Request {
    Request::Get {
        pool: POOL,
        object,
        index,
        cookies: (index + 1..=index + pages).collect(),
        retain: 0,
    }
}

/// Connects a guest, starts its device and creates its pool. Retries while the daemon is still
/// ending the guest's last connection.
fn connect(guest: &mut FakeGuest, socket: &Path) -> Result<(), String> {
    until(|| guest.connect(socket).is_ok())?;
    guest.start().map_err(|e| e.to_string())?;
    let create = Request::PoolCreate {
        pool: POOL,
        flags: 0,
    };
    guest.call(0, create).map_err(|e| e.to_string())?;
    Ok(())
}

fn ask(guest: &mut FakeGuest, request: Request) -> Result<(), String> {
    guest.call(1, request).map_err(|e| e.to_string())?;
    Ok(())
}

/// Lets all VMs connect, put a page and wait for the answer, in `clients` threads at the same time.
/// Returns the time that each VM took, and the seconds until the last VM had its answer.
fn storm(
    daemon: &Daemon,
    guests: &mut [FakeGuest],
    clients: usize,
) -> Result<(Times, f64), String> {
    let begun = Instant::now();
    let times = Mutex::new(Times::default());
    let part = guests.len().div_ceil(clients);
    let each = |first: usize, guests: &mut [FakeGuest]| {
        for (nth, guest) in guests.iter_mut().enumerate() {
            let socket = daemon.socket(first + nth);
            let mut own = Times::default();
            own.time(|| connect(guest, &socket).and_then(|()| ask(guest, put(1, 0, 1, 7))))?;
            times.lock().map_err(|e| e.to_string())?.0.extend(own.0);
        }
        Ok::<(), String>(())
    };
    std::thread::scope(|scope| {
        let parts = guests.chunks_mut(part).enumerate();
        let threads: Vec<_> = parts
            .map(|(nth, guests)| scope.spawn(move || each(nth * part, guests)))
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined
            .map(|done| done.map_err(|_| "a thread of the benchmark panicked".to_string())?)
            .collect::<Result<Vec<()>, String>>()
    })?;
    let took = begun.elapsed().as_secs_f64();
    let times = times.into_inner().map_err(|e| e.to_string())?;
    Ok((times, took))
}

/// Measures how long the daemon takes to answer the messages and requests of one more VM. If
/// `loaded` is true, all other VMs put and get batches meanwhile.
fn messages(
    daemon: &Daemon,
    guests: &mut [FakeGuest],
    args: &Args,
    loaded: bool,
) -> Result<Vec<(&'static str, Times)>, String> {
    let stop = AtomicBool::new(false);
    let part = guests.len().div_ceil(args.clients);
    let mut one = guest(args.vms)?;
    std::thread::scope(|scope| {
        let stop = &stop;
        for guests in guests.chunks_mut(part).filter(|_| loaded) {
            scope.spawn(move || {
                let mut turn = 0;
                while !stop.load(Ordering::Relaxed) {
                    turn += 1;
                    for guest in &mut *guests {
                        let first = turn % 16 * BATCH;
                        for request in [put(2, first, BATCH, turn), get(2, first, BATCH)] {
                            if stop.load(Ordering::Relaxed) || ask(guest, request).is_err() {
                                return;
                            }
                        }
                    }
                }
            });
        }
        let done = message_times(daemon, &mut one, args);
        stop.store(true, Ordering::Relaxed);
        done
    })
}

fn message_times(
    daemon: &Daemon,
    one: &mut FakeGuest,
    args: &Args,
) -> Result<Vec<(&'static str, Times)>, String> {
    let mut times: [Times; 4] = Default::default();
    let until = Instant::now() + Duration::from_secs(args.seconds);
    let text = |error: tmem_sim::GuestError| error.to_string();
    connect(one, &daemon.socket(args.vms))?;
    while Instant::now() < until {
        let [config, table, base, answer] = &mut times;
        config.time(|| one.read_config()).map_err(text)?;
        table.time(|| one.set_mem_table()).map_err(text)?;
        answer.time(|| ask(one, put(3, 0, 1, 9)))?;
        answer.time(|| ask(one, get(3, 0, 1)))?;
        // GET_VRING_BASE stops one queue, so get_vring_bases() sends a message for each queue.
        base.time(|| one.get_vring_bases()).map_err(text)?;
        one.start().map_err(text)?;
    }
    one.disconnect();
    let names = [
        "GET_CONFIG",
        "SET_MEM_TABLE",
        "GET_VRING_BASE, of three queues",
        "put or get of one page, to its answer",
    ];
    Ok(names.into_iter().zip(times).collect())
}

/// Measures the times of answers to one VM, before and while another VM disconnects that has many
/// pages in the pool.
fn leaving(daemon: &Daemon, args: &Args) -> Result<Vec<(&'static str, Times)>, String> {
    let (mut large, mut one) = (guest(0)?, guest(1)?);
    connect(&mut large, &daemon.socket(0))?;
    connect(&mut one, &daemon.socket(1))?;
    let pages = args.leaving_gib << 18;
    for first in (0..pages).step_by(BATCH as usize) {
        ask(&mut large, put(1 + first / (1 << 16), first, BATCH, 5))?;
    }
    let mut asked = |times: &mut Times, until: &dyn Fn() -> bool| {
        while !until() {
            times.time(|| ask(&mut one, put(1, 0, 1, 9)))?;
            times.time(|| ask(&mut one, get(1, 0, 1)))?;
        }
        Ok::<(), String>(())
    };
    let after = |time: Duration| {
        let end = Instant::now() + time;
        move || Instant::now() >= end
    };
    let (mut before, mut during) = (Times::default(), Times::default());
    asked(&mut before, &after(Duration::from_secs(args.seconds)))?;
    let full_kib = daemon.resources()[3];
    large.disconnect();
    let begun = Instant::now();
    // Wait until the daemon's memory no longer shrinks.
    let kib = std::cell::Cell::new((full_kib, begun));
    asked(&mut during, &|| {
        let (before, since) = kib.get();
        let now = daemon.resources()[3];
        if now != before {
            kib.set((now, Instant::now()));
        }
        since.elapsed() > STILL || begun.elapsed() > TIMEOUT
    })?;
    let (left_kib, freed) = kib.get();
    println!(
        "\na VM with {pages} pages disconnects: the daemon's memory shrinks from {} MiB to {} MiB \
         in {:.2} s",
        full_kib >> 10,
        left_kib >> 10,
        (freed - begun).as_secs_f64()
    );
    Ok(vec![
        ("put or get of another VM, before", before),
        ("put or get of another VM, meanwhile", during),
    ])
}

/// Number of bytes that the kernel maps around a page at a page fault, as far as the file has pages
/// there.
const FAULT_AROUND_BYTES: u64 = 64 << 10;

/// Connects a VM with `gib` GiB of memory and lets the daemon touch all of it.
fn touched(daemon: &Daemon, gib: u64) -> Result<FakeGuest, String> {
    const REGION_BYTES: u64 = 1 << 30;
    let region = |number| RamRegion {
        start: number * REGION_BYTES,
        size_bytes: REGION_BYTES,
    };
    let config = GuestConfig {
        name: "vm0".into(),
        ram: (0..gib).map(region).collect(),
        one_file: true,
        mem_slots: true,
        request_queues: 2,
        queue_size: 128,
        slots: 2,
        reply_timeout: TIMEOUT,
        ..GuestConfig::default()
    };
    let mut large = FakeGuest::new(config).map_err(|e| format!("cannot create a guest: {e}"))?;
    for page in (0..REGION_BYTES).step_by(PAGE) {
        large.ram().write(page, &[0]);
    }
    connect(&mut large, &daemon.socket(0))?;
    let addresses: Vec<u64> = (0..gib * REGION_BYTES)
        .step_by(FAULT_AROUND_BYTES as usize)
        .collect();
    let request = put(1, 0, BATCH, 0);
    for pages in addresses.chunks(BATCH as usize) {
        let generation = large.generation();
        large
            .add_put_of(1, request.clone(), generation, pages)
            .ok_or("the queue has no room for a request")?;
        large.publish(1);
        large.drain(TIMEOUT).map_err(|e| e.to_string())?;
    }
    Ok(large)
}

/// Repeats an operation and records its times for two phases: before a VM disconnects, and while
/// the daemon releases that VM's memory. Returns when `phase` shows that the memory is released.
fn in_phases(
    phase: &AtomicUsize,
    mut what: impl FnMut(&mut Times) -> Result<(), String>,
) -> Result<[Times; 2], String> {
    let mut times = [Times::default(), Times::default()];
    while let Some(times) = times.get_mut(phase.load(Ordering::Relaxed)) {
        what(times)?;
    }
    Ok(times)
}

/// Measures the times of answers to one VM's requests, and to messages by which another VM changes
/// its memory map, while a third VM disconnects. The daemon has to unmap much memory of that third
/// VM.
fn unmapping(daemon: &Daemon, args: &Args) -> Result<Vec<(&'static str, Times)>, String> {
    let mut large = touched(daemon, args.mapped_gib)?;
    let (mut one, mut other) = (guest(1)?, guest(2)?);
    connect(&mut one, &daemon.socket(1))?;
    connect(&mut other, &daemon.socket(2))?;
    let phase = AtomicUsize::new(0);
    let phase = &phase;
    std::thread::scope(|scope| {
        let answers = scope.spawn(|| {
            in_phases(phase, |times| {
                times.time(|| ask(&mut one, put(1, 0, 1, 9)))?;
                times.time(|| ask(&mut one, get(1, 0, 1)))
            })
        });
        let tables = scope.spawn(|| {
            in_phases(phase, |times| {
                let done = times.time(|| other.set_mem_table());
                // Send one message per millisecond, as when memory is hot-plugged. Without the
                // pause, this thread would send messages as fast as its processor allows.
                std::thread::sleep(Duration::from_millis(1));
                done.map_err(|e| e.to_string())
            })
        });
        std::thread::sleep(Duration::from_secs(args.seconds));
        let full = daemon.touched_bytes();
        phase.store(1, Ordering::Relaxed);
        let begun = Instant::now();
        large.disconnect();
        // The memory of the large VM counts as released when the daemon maps less than a hundredth
        // of the bytes that it mapped before. All other VMs together have less memory than that.
        let gone = until(|| daemon.touched_bytes() < full / 100);
        let took = begun.elapsed();
        phase.store(2, Ordering::Relaxed);
        let joined = [answers, tables].map(|thread| thread.join());
        gone?;
        println!(
            "\na VM disconnects: {} MiB that the daemon has touched are unmapped in {:.2} s",
            full >> 20,
            took.as_secs_f64()
        );
        let mut all = Vec::new();
        for (names, times) in [
            [
                "put or get of another VM, before",
                "put or get of another VM, meanwhile",
            ],
            [
                "SET_MEM_TABLE of a third VM, before",
                "SET_MEM_TABLE of a third VM, meanwhile",
            ],
        ]
        .into_iter()
        .zip(joined)
        {
            let times = times.map_err(|_| "a thread of the benchmark panicked")??;
            all.extend(names.into_iter().zip(times));
        }
        Ok(all)
    })
}

fn print(times: Vec<(&'static str, Times)>) {
    println!(
        "{:40} {:>8} {:>10} {:>10} {:>10} {:>10}",
        "µs", "", "p50", "p99", "p99.9", "max"
    );
    for (name, mut times) in times {
        println!("{}", times.line(name));
    }
}

/// Measures the daemon with all VMs connected: its resources, the time until each VM is connected,
/// and the times of answers to messages.
fn crowd(program: &Path, args: &Args) -> Result<(), String> {
    let daemon = Daemon::start(program, args.vms, args.no_sandbox)?;
    let mut guests = (0..args.vms).map(guest).collect::<Result<Vec<_>, _>>()?;
    let empty = daemon.resources();
    if empty[1] == 0 {
        return Err(
            "the daemon's resources cannot be read. Run the benchmark as root or with --no-sandbox"
                .into(),
        );
    }
    let tell = |what: &str, [threads, descriptors, mappings, kib]: [u64; 4]| {
        println!("{what:24} {threads:>8} {descriptors:>12} {mappings:>10} {kib:>12}");
    };
    println!(
        "{:24} {:>8} {:>12} {:>10} {:>12}",
        "", "threads", "descriptors", "mappings", "KiB"
    );
    tell("no VM connected", empty);
    let mut storms = Vec::new();
    for round in 0..args.rounds {
        let (times, took) = storm(&daemon, &mut guests, args.clients)?;
        storms.push((times, took));
        if round == 0 {
            // Wait a little, because the daemon unmaps old memory tables after it has answered.
            std::thread::sleep(Duration::from_millis(500));
            tell(&format!("{} VMs connected", args.vms), daemon.resources());
        }
        if round + 1 < args.rounds {
            guests.iter_mut().for_each(FakeGuest::disconnect);
        }
    }
    println!(
        "\nall {} VMs connect at once, {} clients",
        args.vms, args.clients
    );
    let mut all = Times::default();
    for (nth, (times, took)) in storms.into_iter().enumerate() {
        println!("round {nth}: {took:.3} s until the last VM has its first answer");
        all.0.extend(times.0);
    }
    print(vec![("connect to first put answered, of a VM", all)]);
    for (what, loaded) in [("idle", false), ("under load", true)] {
        println!("\nvhost-user messages of one more VM, while the other VMs are {what}");
        print(messages(&daemon, &mut guests, args, loaded)?);
    }
    guests.iter_mut().for_each(FakeGuest::disconnect);
    until(|| daemon.resources()[0] <= empty[0])?;
    std::thread::sleep(Duration::from_secs(1));
    println!();
    tell("all VMs disconnected", daemon.resources());
    Ok(())
}

/// Runs the benchmark and prints the results.
///
/// # Errors
/// The daemon cannot be started, or violates the protocol.
pub fn run(args: &Args) -> Result<(), String> {
    let beside = || {
        let own = std::env::current_exe().map_err(|e| e.to_string())?;
        Ok::<PathBuf, String>(own.with_file_name("tmemd"))
    };
    let program = args.tmemd.clone().map_or_else(beside, Ok)?;
    if args.vms < 2 || args.clients == 0 {
        return Err("the benchmark needs at least two VMs and one client thread".into());
    }
    if !args.leaving_only {
        crowd(&program, args)?;
    }
    let daemon = Daemon::start(&program, 2, args.no_sandbox)?;
    print(leaving(&daemon, args)?);
    drop(daemon);
    let daemon = Daemon::start(&program, 3, args.no_sandbox)?;
    print(unmapping(&daemon, args)?);
    Ok(())
}
