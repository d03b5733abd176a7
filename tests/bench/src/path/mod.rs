// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Benchmark of the data path from a guest's virtqueue to the storage engine and back. The
//! benchmark compares the path with direct calls of the engine and with zram. It measures all of
//! them alternately in one run.
//!
//! The benchmark uses two processors. The daemon's worker and the engine run on the first. The code
//! that calls the worker runs on the second processor, as a guest would. zram does its work on the
//! second processor, too. The fake guest takes very little time.

pub mod guest;
pub mod host;
mod neighbour;

use crate::corpus;
use crate::measure::{Ratio, Samples, cpu_ns};
use crate::report::{Results, Target, progress};
use crate::rig;
use crate::times::{self, Sized};
use crate::zram::Zram;
use guest::{BATCH, Guest, Run, WINDOW};
use host::{BenchDaemon, Path, pin, switches, threads};
use neighbour::Waits;
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tmem_pool::{PAGE_SIZE, Page, PageHash};
use tmemd::config::EventLoop;

/// Processor of the worker, and of direct calls of the engine.
const SERVER: usize = 0;

/// Processor of the guest.
const CLIENT: usize = 1;

/// Number of batches that a round puts and gets. Together these batches have slightly fewer pages
/// than a tenant may have raw pages.
const BATCHES: usize = 28;

/// Number of single pages that a round gets from each of two workers. One worker polls for
/// requests, and the other sleeps as soon as it has none.
const SINGLES: usize = 100;

/// Pause of a guest between two single gets. A worker that polls for requests still polls at the
/// end of this pause. A worker that does not poll is asleep by then.
const THINK: Duration = Duration::from_micros(20);

/// Time after which a worker without requests sleeps.
const REST: Duration = Duration::from_millis(1);

/// Number of VMs that one daemon serves together.
const VMS: usize = 256;

/// Number of pages of each VM when one daemon serves many: one batch.
const VM_PAGES: usize = BATCH;

/// Time for which the benchmark observes an idle daemon.
const IDLE: Duration = Duration::from_secs(2);

/// Options of the benchmark of the data path.
#[derive(clap::Args)]
pub struct Args {
    /// Take the test pages from the files of this directory, instead of files of the whole machine.
    #[arg(long, value_name = "DIR")]
    corpus: Option<PathBuf>,
    /// Number of test pages. Together they should not fit into the processor's caches.
    #[arg(long, default_value_t = 49_152, value_name = "NUMBER")]
    pages: usize,
    /// Number of times that each operation is measured. Results are medians.
    #[arg(long, default_value_t = 40, value_name = "NUMBER")]
    rounds: usize,
    /// Event loop of the worker: auto, epoll or io_uring.
    #[arg(long, default_value = "auto", value_name = "KIND")]
    event_loop: EventLoop,
    /// Seed of the random choice of files and pages, and of their order.
    #[arg(long, default_value_t = 1, value_name = "NUMBER")]
    seed: u64,
}

/// Times of all measured operations in nanoseconds per page. `singles` has the times of gets of
/// single pages in microseconds.
#[derive(Default)]
struct Times {
    path: [Samples; 2],
    engine: [Samples; 2],
    path_cpu: [Samples; 2],
    engine_cpu: [Samples; 2],
    zram: [Samples; 2],
    many: Samples,
    one: Samples,
    singles: Vec<(&'static str, Vec<f64>)>,
}

const GET: usize = 0;
const PUT: usize = 1;

/// Runs the benchmark and prints the results.
///
/// # Errors
/// There are too few processors, pages or descriptors, or a measured operation fails.
pub fn run(args: &Args) -> Result<(), String> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    if processors < 2 {
        return Err(
            "the guest needs a processor of its own, but this process may use only one processor"
                .into(),
        );
    }
    raise_descriptor_limit()?;
    progress("reading files");
    let corpus = corpus::load(args.corpus.as_deref(), args.pages, args.seed)?;
    let pages = times::compressible_pages(&corpus.pages, &PageHash::new(42));
    drop(corpus);
    if pages.len() < (BATCHES * 8 * BATCH).max(VMS * VM_PAGES) {
        return Err(format!(
            "lz4 shrinks only {} of the test pages, too few for the benchmark: raise --pages",
            pages.len()
        ));
    }
    pin(None, CLIENT)?;
    let mut times = Times::default();
    let mut zram = Zram::new(pages.len());
    measure_one_vm(args, &pages, &mut times, zram.as_mut().ok())?;
    let idle = measure_many_vms(args, &pages, &mut times)?;
    let waits = neighbour::measure(args.event_loop)?;
    progress("");
    let results = results(&times, &idle, &zram.map(drop));
    print(&pages, &times, &waits, &results);
    Ok(())
}

/// Raises the process's limit of open files, because each VM needs descriptors at both ends of its
/// connection.
fn raise_descriptor_limit() -> Result<(), String> {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let wanted = (VMS * 64) as u64;
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_none_or(|current| current >= wanted) {
        return Ok(());
    }
    limit.current = Some(wanted);
    setrlimit(Resource::Nofile, limit)
        .map_err(|error| format!("cannot raise the limit of open files to {wanted}: {error}"))
}

fn batches(pages: usize) -> Vec<Run> {
    let run = |nr| Run {
        index: nr * BATCH,
        pages: BATCH,
    };
    (0..pages / BATCH).map(run).collect()
}

/// Measures a VM whose worker polls for requests, a VM whose worker does not poll, the engine and
/// zram.
fn measure_one_vm(
    args: &Args,
    pages: &[Sized],
    times: &mut Times,
    mut zram: Option<&mut Zram>,
) -> Result<(), String> {
    progress("filling a pool and zram");
    let host = BenchDaemon::new(6 * (pages.len() * PAGE_SIZE) as u64 + (256 << 20));
    let polls = tmemd::config::POLL_MAX_DEFAULT;
    let path = host.serve(args.event_loop, polls, SERVER)?;
    let sleeping = host.serve(args.event_loop, Duration::ZERO, SERVER)?;
    let all = || pages.iter().map(|sized| &*sized.page);
    let mut guest = Guest::new("polled", all(), BATCHES * BATCH)?;
    // Give the VM a reserve that is large enough for the largest number of raw pages.
    host.connect(&path, "polled", 256 << 20, &mut guest)?;
    let few = pages.len().min(16 * BATCH);
    let mut other = Guest::new("woken", all().take(few), SINGLES)?;
    host.connect(&sleeping, "woken", 64 << 20, &mut other)?;
    let engine = rig::add_guest(&host.daemon.engine, "engine")?;
    for (number, runs) in batches(pages.len()).chunks(BATCHES).enumerate() {
        guest.run_all(runs, true)?;
        if number * BATCHES * BATCH < few {
            let some: Vec<Run> = runs.iter().filter(|run| run.index < few).copied().collect();
            for run in some.chunks(WINDOW) {
                other.run_all(run, true)?;
                host.maintain_all();
            }
        }
        for run in runs {
            let batch = &pages[run.index..run.index + run.pages];
            engine.put(1, run.index, batch.iter().map(|sized| &*sized.page));
            if let Some(zram) = &mut zram {
                for (index, sized) in (run.index..).zip(batch) {
                    zram.write(index, &sized.page)?;
                }
            }
        }
        host.maintain_all();
    }
    let mut rng = fastrand::Rng::with_seed(args.seed);
    let mut order = batches(pages.len());
    let mut copies = vec![[0; PAGE_SIZE]; BATCHES * BATCH];
    times.singles = ["polling", "woken", "zram"]
        .map(|name| (name, vec![]))
        .into();
    for round in 0..args.rounds {
        progress(&format!("one VM, round {} of {}", round + 1, args.rounds));
        rng.shuffle(&mut order);
        let runs = &order[..BATCHES];
        // Change the order in each round, because the first operation of a round finds the caches
        // that the last round filled.
        for nth in 0..2 {
            match (round + nth) % 2 {
                0 => measure_path(times, &host, &path, &mut guest, runs)?,
                _ => measure_engine(times, &host, &engine, pages, runs, &mut copies)?,
            }
        }
        if let Some(zram) = &mut zram {
            measure_zram(times, zram, pages, &runs[..WINDOW])?;
        }
        let first = rng.usize(..pages.len() - SINGLES);
        measure_single_gets(&mut times.singles[0].1, &mut guest, first)?;
        let first = rng.usize(..few - SINGLES);
        measure_single_gets(&mut times.singles[1].1, &mut other, first)?;
        host.maintain_all();
    }
    Ok(())
}

fn measure_path(
    times: &mut Times,
    host: &BenchDaemon,
    path: &Path,
    guest: &mut Guest,
    runs: &[Run],
) -> Result<(), String> {
    for what in [GET, PUT] {
        let before = path.cpu_ns();
        let (seconds, pages) = guest.run_all(runs, what == PUT)?;
        times.path[what].push(seconds * 1e9 / pages as f64);
        // Wait until the worker sleeps, because its processor time is complete only then.
        std::thread::sleep(REST);
        times.path_cpu[what].push((path.cpu_ns() - before) / (runs.len() * BATCH) as f64);
        if what == GET {
            guest.check(runs)?;
        }
    }
    host.maintain_all();
    Ok(())
}

/// Gets the batches of `runs` and puts them again, for another tenant, by calling the engine
/// directly on the worker's processor.
fn measure_engine(
    times: &mut Times,
    host: &BenchDaemon,
    engine: &rig::Guest,
    pages: &[Sized],
    runs: &[Run],
    copies: &mut [Page],
) -> Result<(), String> {
    pin(None, SERVER)?;
    for what in [GET, PUT] {
        let (mut begun, before) = (Instant::now(), cpu_ns());
        for (number, (run, out)) in runs.iter().zip(copies.chunks_exact_mut(BATCH)).enumerate() {
            if number == WINDOW {
                begun = Instant::now();
            }
            match what {
                // Free the pages within the measured time. A guest gets its answer before the
                // daemon frees them, but freeing is part of the worker's time.
                GET => drop(engine.get(1, run.index, out)),
                _ => {
                    let batch = &pages[run.index..run.index + run.pages];
                    engine.put(1, run.index, batch.iter().map(|sized| &*sized.page));
                }
            }
        }
        let pages = ((runs.len() - WINDOW) * BATCH) as f64;
        times.engine[what].push(begun.elapsed().as_nanos() as f64 / pages);
        times.engine_cpu[what].push((cpu_ns() - before) / (runs.len() * BATCH) as f64);
    }
    pin(None, CLIENT)?;
    host.maintain_all();
    Ok(())
}

/// Reads the batches of `runs` from zram and writes them again, page by page, because zram has no
/// batches. The calling thread does zram's work, so the calls' elapsed time is zram's time.
fn measure_zram(
    times: &mut Times,
    zram: &mut Zram,
    pages: &[Sized],
    runs: &[Run],
) -> Result<(), String> {
    for run in runs {
        let indices = run.index..run.index + run.pages;
        let (singles, begun) = (&mut times.singles[2].1, Instant::now());
        for index in indices.clone() {
            let begun = Instant::now();
            zram.read(index)?;
            singles.push(begun.elapsed().as_nanos() as f64 / 1e3);
        }
        times.zram[GET].push(begun.elapsed().as_nanos() as f64 / BATCH as f64);
        let begun = Instant::now();
        for (index, sized) in indices.clone().zip(&pages[indices]) {
            zram.write(index, &sized.page)?;
        }
        times.zram[PUT].push(begun.elapsed().as_nanos() as f64 / BATCH as f64);
    }
    Ok(())
}

/// Gets pages one by one and adds each time in µs to `times`. The guest pauses for THINK before
/// each get. At the end, puts the pages again.
fn measure_single_gets(
    times: &mut Vec<f64>,
    guest: &mut Guest,
    first: usize,
) -> Result<(), String> {
    for nth in 0..SINGLES {
        let run = Run {
            index: first + nth,
            pages: 1,
        };
        let thought = Instant::now();
        while thought.elapsed() < THINK {
            std::hint::spin_loop();
        }
        let begun = Instant::now();
        guest.get(run, nth);
        guest.wait()?;
        times.push(begun.elapsed().as_nanos() as f64 / 1e3);
    }
    let run = |index: usize, pages| Run { index, pages };
    let back: Vec<Run> = (0..SINGLES)
        .step_by(BATCH)
        .map(|nth| run(first + nth, BATCH.min(SINGLES - nth)))
        .collect();
    guest.check(&back)?;
    guest.run_all(&back, true)?;
    Ok(())
}

/// Activity of a daemon that has no requests.
struct Idle {
    wakeups_per_s: f64,
    cpu_ms_per_s: f64,
}

/// Measures a daemon with many VMs, each with one batch in flight, for a comparison with one VM
/// that has several batches in flight. Then measures the daemon while it is idle.
fn measure_many_vms(args: &Args, pages: &[Sized], times: &mut Times) -> Result<Idle, String> {
    let host = BenchDaemon::new(4 << 30);
    let polls = tmemd::config::POLL_MAX_DEFAULT;
    let path = host.serve(args.event_loop, polls, SERVER)?;
    let all = |from: usize, count: usize| pages[from..from + count].iter().map(|s| &*s.page);
    let one_pages = pages.len() / BATCH * BATCH;
    let mut one = Guest::new("one", all(0, one_pages), BATCHES * BATCH)?;
    host.connect(&path, "one", 256 << 20, &mut one)?;
    let mut many = Vec::new();
    for number in 0..VMS {
        progress(&format!("VM {number} of {VMS}"));
        let name = format!("vm-{number}");
        let mut guest = Guest::new(&name, all(number * VM_PAGES, VM_PAGES), VM_PAGES)?;
        host.connect(&path, &name, 0, &mut guest)?;
        many.push(guest);
    }
    let mut rng = fastrand::Rng::with_seed(args.seed);
    let mut order = batches(one_pages);
    for round in 0..args.rounds {
        progress(&format!(
            "{VMS} VMs, round {} of {}",
            round + 1,
            args.rounds
        ));
        rng.shuffle(&mut order);
        for nth in 0..2 {
            let (mut seconds, mut pages) = (0.0, 0);
            let which = (round + nth) % 2;
            for puts in [true, false] {
                let done = match which {
                    0 => one.run_all(&order[..BATCHES], puts)?,
                    _ => run_crowd(&mut many, puts)?,
                };
                (seconds, pages) = (seconds + done.0, pages + done.1);
                host.maintain_all();
            }
            let samples = match which {
                0 => &mut times.one,
                _ => &mut times.many,
            };
            samples.push(seconds * 1e9 / pages as f64);
        }
    }
    progress("observing the idle daemon");
    // Wait until the workers have stopped polling for requests.
    std::thread::sleep(polls + Duration::from_millis(50));
    let all = || threads("worker-").into_iter().chain(threads("connection"));
    let seen = || {
        (
            all().map(switches).sum::<u64>(),
            all().map(host::cpu_ns).sum::<f64>(),
        )
    };
    let (begun, before) = (Instant::now(), seen());
    std::thread::sleep(IDLE);
    let (after, seconds) = (seen(), begun.elapsed().as_secs_f64());
    Ok(Idle {
        wakeups_per_s: (after.0 - before.0) as f64 / seconds,
        cpu_ms_per_s: (after.1 - before.1) / 1e6 / seconds,
    })
}

/// Lets each VM send its batch and takes the answers of all VMs. Returns the seconds between the
/// answer number WINDOW and the last answer, and the number of pages answered in that time.
fn run_crowd(guests: &mut [Guest], puts: bool) -> Result<(f64, usize), String> {
    let run = Run {
        index: 0,
        pages: VM_PAGES,
    };
    let (mut sent, mut answered, mut pages) = (0, 0, 0);
    let mut waiting: Vec<usize> = Vec::new();
    let mut begun = Instant::now();
    let started = Instant::now();
    while answered < guests.len() {
        if sent < guests.len() {
            let guest = &mut guests[sent];
            let done = match puts {
                true => guest.put(run),
                false => guest.get(run, 0),
            };
            assert!(
                done,
                "a guest without a request in flight cannot send its batch"
            );
            waiting.push(sent);
            sent += 1;
        }
        let mut fault = Ok(());
        waiting.retain(|number| match guests[*number].answer() {
            Ok(Some(count)) => {
                (answered, pages) = (answered + 1, pages + count);
                // Begin the measured time at the answer number WINDOW, as in the measurement of a
                // single VM.
                if answered == WINDOW {
                    (begun, pages) = (Instant::now(), 0);
                }
                false
            }
            Ok(None) => true,
            Err(error) => {
                fault = Err(error);
                false
            }
        });
        fault?;
        if started.elapsed() > Duration::from_secs(30) {
            return Err(format!("{} VMs got no answer within 30 s", waiting.len()));
        }
    }
    Ok((begun.elapsed().as_secs_f64(), pages))
}

fn percentile(values: &[f64], part: f64) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[((values.len() - 1) as f64 * part) as usize]
}

fn wait_percentiles(times: &[f64]) -> [f64; 4] {
    [0.5, 0.99, 0.999, 1.0].map(|part| percentile(times, part))
}

fn results(times: &Times, idle: &Idle, zram: &Result<(), String>) -> Results {
    let mut results = Results::default();
    let mut add = |key, target, ratio| results.add(key, target, ratio);
    for (what, key, cpu_key) in [
        (PUT, "path_put_ratio", "path_put_cpu_ratio"),
        (GET, "path_get_ratio", "path_get_cpu_ratio"),
    ] {
        let ratio = times.engine[what].ratio_to(&times.path[what]);
        add(key, Target::AtLeast(0.92), Ok(ratio));
        let ratio = times.engine_cpu[what].ratio_to(&times.path_cpu[what]);
        add(cpu_key, Target::None, Ok(ratio));
    }
    add(
        "vms256_ratio",
        Target::AtLeast(0.95),
        Ok(times.one.ratio_to(&times.many)),
    );
    add(
        "idle_wakeups_per_s",
        Target::AtMost(0.0),
        Ok(Ratio::exact(idle.wakeups_per_s)),
    );
    add(
        "idle_cpu_ms_per_s",
        Target::None,
        Ok(Ratio::exact(idle.cpu_ms_per_s)),
    );
    for (key, what) in [("zram_put_speedup", PUT), ("zram_get_speedup", GET)] {
        let speedup = zram
            .clone()
            .map(|()| times.zram[what].medians_by(&times.path[what]));
        add(key, Target::None, speedup);
    }
    results
}

fn print(pages: &[Sized], times: &Times, waits: &[Waits], results: &Results) {
    let rows: Vec<(&str, &Samples)> = [
        ("path: put", &times.path[PUT]),
        ("path: get", &times.path[GET]),
        ("engine: put", &times.engine[PUT]),
        ("engine: get, and freeing it", &times.engine[GET]),
        ("zram: write", &times.zram[PUT]),
        ("zram: read", &times.zram[GET]),
        ("one VM: put and get", &times.one),
        ("256 VMs: put and get", &times.many),
        ("host CPU, path: put", &times.path_cpu[PUT]),
        ("host CPU, path: get", &times.path_cpu[GET]),
    ]
    .into_iter()
    .filter(|(_, samples)| !samples.is_empty())
    .collect();
    let singles = times.singles.iter().filter(|(_, times)| !times.is_empty());
    let singles =
        singles.map(|(name, times)| (*name, percentile(times, 0.5), percentile(times, 0.99)));
    println!(
        "{} pages of files, {BATCH} a batch, {WINDOW} batches in flight; one worker and the engine on processor \
         {SERVER}, the guest on {CLIENT}.\n",
        pages.len()
    );
    println!("{:34} {:>9}   time, median", "ns a page", "");
    for (what, samples) in rows {
        println!("{what:34} {:9.0}", samples.median());
    }
    println!(
        "\n{:34} {:>9} {:>9}",
        "µs for a get of one page", "p50", "p99"
    );
    for (name, p50, p99) in singles {
        println!("{name:34} {p50:9.1} {p99:9.1}");
    }
    println!(
        "\n{:48} {:>7} {:>8} {:>8} {:>8} {:>8}",
        "µs for a get of one page beside a busy VM", "gets", "p50", "p99", "p99.9", "max"
    );
    for waits in waits {
        for (name, times) in [("  alone", &waits.alone), (waits.name, &waits.beside)] {
            let [p50, p99, p999, max] = wait_percentiles(times);
            let gets = times.len();
            println!("{name:48} {gets:7} {p50:8.1} {p99:8.1} {p999:8.1} {max:8.1}");
        }
    }
    results.print();
}
