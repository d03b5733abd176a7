// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Benchmark of whether a guest can find out, by timing its own requests, that a VM of another
//! trust domain has a page.
//!
//! This is an equivalence test. In each round, a neighbour (another VM) has put one half of the
//! test pages, chosen at random. A guest of another domain puts all of them, page by page and in
//! batches, in random order. The benchmark divides its times for the neighbour's half by its times
//! for the other half. So each page is its own control, and load affects both halves alike. Times
//! count as equal if the median of the rounds' ratios lies within a bound of 1 with 95 %
//! confidence. The test consists of two one-sided sign tests, at 2.5 % each, which assume nothing
//! about the distribution of times.
//!
//! A test that finds nothing proves nothing. So each run must also find differences that exist: an
//! injected delay, and the known effect of a page that a VM of the same domain has. If a run does
//! not find these, or if an interval is too wide, the result is "undecided" and never "equal". The
//! contents of answers are out of scope: `tmem-pool/tests/isolation.rs` tests that no bit of an
//! answer depends on the pages of other domains.
//!
//! With `--full-pool`, a further VM of another domain fills a small pool before each round, so that
//! the measured puts evict pages of this VM.

use crate::measure::{Ratio, cpu_ns};
use crate::path::guest::{BATCH, Guest, Run};
use crate::path::host::{BenchDaemon, Path, pin};
use crate::report::progress;
use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};
use tmem_pool::{PAGE_METADATA_CHARGE_BYTES, PAGE_SIZE, Page, Quota, Tenant};
use tmemd::config::EventLoop;
use virtio_tmem as wire;

/// Largest relative difference of times that counts as equal. A put of a page takes about a
/// microsecond, so this is some 30 ns. That is less than the single cache miss of the cheapest
/// look-up in an index, and a tenth of the time of hashing a page.
const BOUND: f64 = 0.03;

/// Injected delay that a run has to find, as a multiple of the largest difference that counts as
/// equal. It is above 1, so that the delay exceeds that difference, whatever value `--bound` sets.
const DELAY_BOUNDS: f64 = 2.0;

/// Number of runs in a row that must find a difference before the benchmark reports it. One run in
/// forty finds a difference by chance.
const REPEATS: usize = 3;

/// Smallest number of rounds for which a 95 % confidence interval exists. With six rounds the
/// interval reaches from the smallest to the largest value.
const ROUNDS_MIN: usize = 6;

/// Largest number of batches in one half of the pages. Both halves together, and the RAW_MIN pages
/// of a refusal, must not have more pages than RAW_MAX.
const BATCHES_MAX: usize = 14;

/// Number of pages of each half that the guest puts one by one in a round. They are the first batch
/// of the half.
const SINGLES: usize = BATCH;

/// Largest number of raw pages of a VM without entitlement (RAW_PAGES_MIN in tmem-pool).
const RAW_MIN: usize = 256;

/// Limit in bytes of the guest that gets refusals. It has no room for more raw pages than RAW_MIN.
const FULL_LIMIT_BYTES: u64 = RAW_MIN as u64 * (PAGE_SIZE as u64 + PAGE_METADATA_CHARGE_BYTES);

/// Largest number of raw pages of the guest that measures.
const RAW_MAX: usize = 2048;

/// Reserve in bytes of the guest that measures: with it, RAW_MAX pages of the guest may be raw at a
/// time, even in a full pool (RAW_DIVISOR in tmem-pool).
const RESERVE_BYTES: u64 = 128 << 20;

/// Reserve in bytes of a neighbour: enough for one half of the pages.
const NEIGHBOUR_RESERVE_BYTES: u64 = 4 << 20;

/// Size in bytes of the pool with `--full-pool`: the reserves of the guest and of both neighbours,
/// and 8 MiB for other VMs.
const FULL_POOL_BYTES: u64 = RESERVE_BYTES + 2 * NEIGHBOUR_RESERVE_BYTES + (8 << 20);

/// Largest number of batches in one half of the pages with `--full-pool`. The other raw pages of
/// the guest use the memory that the pool keeps free for puts, which is 1/32 of it.
const FULL_BATCHES_MAX: usize = 7;

/// Number of pages of the VM that fills the pool. The pages cannot be compressed, so the pool
/// cannot hold all of them.
const FILL_PAGES: usize = FULL_POOL_BYTES as usize / PAGE_SIZE;

const _: () = {
    assert!(2 * BATCHES_MAX * BATCH + RAW_MIN <= RAW_MAX && FILL_PAGES.is_multiple_of(RAW_MIN));
    let rest = RAW_MAX - 2 * FULL_BATCHES_MAX * BATCH;
    assert!((rest * PAGE_SIZE) as u64 >= FULL_POOL_BYTES / 32);
};

/// Polling time of the worker, longer than any pause of the benchmark, so that the worker does not
/// sleep between two requests.
const POLL_MAX: Duration = Duration::from_millis(1);

/// Numbers of the processors on which the worker and the guest run.
const PROCESSORS: [usize; 2] = [0, 1];

/// Number of random bytes at the start of each test page.
const NOISE_BYTES: usize = 1024;

/// Options of the benchmark.
#[derive(clap::Args)]
pub struct Args {
    /// Number of rounds in a run. Four times as many rounds make the confidence interval half as
    /// wide.
    #[arg(long, default_value_t = 200, value_name = "NUMBER")]
    rounds: usize,
    /// Maximum duration of a run in seconds. A run ends after this time with the rounds that it
    /// has.
    #[arg(long, default_value_t = 60, value_name = "NUMBER")]
    seconds: u64,
    /// Number of batches of 64 pages in each half of the test pages.
    #[arg(long, default_value_t = BATCHES_MAX, value_name = "NUMBER")]
    batches: usize,
    /// Largest difference of times that counts as equal, as a fraction of the time.
    #[arg(long, default_value_t = BOUND, value_name = "PART")]
    bound: f64,
    /// Event loop of the worker: auto, epoll or io_uring.
    #[arg(long, default_value = "auto", value_name = "KIND")]
    event_loop: EventLoop,
    /// Measure in a full pool, in which puts evict pages of a further VM.
    #[arg(long)]
    full_pool: bool,
    /// Seed of the random numbers. They choose the contents of the pages, the half of the pages
    /// that the other VM has, and the order of puts.
    #[arg(long, default_value_t = 1, value_name = "NUMBER")]
    seed: u64,
}

/// Operation that the benchmark times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    /// A put of a batch of 64 pages, from the request to the answer.
    PutBatch,
    PutPage,
    /// A put that the daemon refuses because it exceeds the VM's limit.
    RefusedLimit,
    RefusedNursery,
    GetBatch,
    /// Finalizing the guest's pages: the processor time of the background work on one half of the
    /// pages.
    Finalize,
    /// A put of a batch; the benchmark delays half of these puts on purpose.
    Delayed,
}

impl What {
    fn name(self) -> &'static str {
        match self {
            What::PutBatch => "put_batch",
            What::PutPage => "put_page",
            What::RefusedLimit => "refused_limit",
            What::RefusedNursery => "refused_nursery",
            What::GetBatch => "get_batch",
            What::Finalize => "finalize",
            What::Delayed => "delayed",
        }
    }
}

/// Neighbour that has put one half of the test pages: its relation to the guest that measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Holder {
    /// The neighbour is in another trust domain than the guest, so the guest's times must be equal.
    OtherDomain,
    /// The neighbour is in the guest's trust domain, so that its pages do affect the guest's times.
    SameDomain,
}

/// Result of the comparison of an operation's times for pages that the neighbour has and has not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Equal,
    Different,
    Undecided,
}

impl Verdict {
    fn of(ratio: Ratio, bound: f64) -> Verdict {
        let (least, most) = (1.0 - bound, 1.0 + bound);
        match ratio {
            Ratio { low, high, .. } if low > least && high < most => Verdict::Equal,
            Ratio { low, high, .. } if low > most || high < least => Verdict::Different,
            _ => Verdict::Undecided,
        }
    }
}

/// Results of a run. `ratios` has, for each round, the time for the neighbour's pages divided by
/// the time for the other pages. `ns` has the times for the other pages, in ns per page.
struct Times {
    bound: f64,
    ratios: BTreeMap<(Holder, What), Vec<f64>>,
    ns: BTreeMap<(Holder, What), Vec<f64>>,
}

/// Times of a round: first for pages that the neighbour has put, then for pages that it has not.
type Arms = [Vec<f64>; 2];

const HELD: usize = 0;
const NEW: usize = 1;

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

impl Times {
    fn new(bound: f64) -> Times {
        Times {
            bound,
            ratios: BTreeMap::new(),
            ns: BTreeMap::new(),
        }
    }

    fn verdict(&self, what: (Holder, What)) -> Verdict {
        Verdict::of(self.ratio(what), self.bound)
    }

    fn add(&mut self, what: (Holder, What), arms: Arms) {
        let [held, new] = arms.map(median);
        self.ratios.entry(what).or_default().push(held / new);
        self.ns.entry(what).or_default().push(new);
    }

    fn ratio(&self, what: (Holder, What)) -> Ratio {
        Ratio::of(self.ratios[&what].clone())
    }
}

/// Returns `count` different pages. The first `noise_bytes` of each page are random, and the rest
/// repeats one byte.
fn pages(count: usize, noise_bytes: usize, rng: &mut fastrand::Rng) -> Vec<Page> {
    let page = |_| {
        let mut page = [7; PAGE_SIZE];
        rng.fill(&mut page[..noise_bytes]);
        page
    };
    (0..count).map(page).collect()
}

/// VM that keeps the pool full.
struct Filler {
    guest: Guest,
    tenant: Tenant,
    /// Page number of the next put.
    next: usize,
}

impl Filler {
    /// Puts pages until the pool evicts one, and then uses memory that the pool keeps free.
    ///
    /// # Errors
    /// The daemon refuses a put, or the pool has room for all pages.
    fn fill(&mut self, host: &BenchDaemon) -> Result<(), String> {
        let before = self.tenant.stats().evictions;
        for _ in 0..FILL_PAGES / RAW_MIN {
            self.put()?;
            host.maintain_all();
            if self.tenant.stats().evictions > before {
                return self.put();
            }
        }
        Err(format!("the pool has room for {FILL_PAGES} pages"))
    }

    fn put(&mut self) -> Result<(), String> {
        let pages = self.next..self.next + RAW_MIN;
        self.guest.run_all(&runs(pages), true)?;
        self.next = (self.next + RAW_MIN) % FILL_PAGES;
        Ok(())
    }
}

/// Returns batches of these pages, whose number is a multiple of [`BATCH`].
fn runs(pages: Range<usize>) -> Vec<Run> {
    let run = |index| Run {
        index,
        pages: BATCH,
    };
    pages.step_by(BATCH).map(run).collect()
}

/// A daemon with the guest that measures, its neighbours, and two guests whose puts are refused.
struct Rig {
    guest: Guest,
    other_domain: Guest,
    same_domain: Guest,
    /// Guest without entitlement and with a limit, for refusals: once it has as many raw pages as
    /// it may have, the daemon refuses its further puts.
    full: Guest,
    /// Guest whose limit is 0 bytes, so that the daemon refuses all its puts.
    poor: Guest,
    /// VM that keeps the pool full, with `--full-pool`.
    filler: Option<Filler>,
    batches: usize,
    /// The daemon. The field comes after the guests, because the guests must be dropped before it.
    host: BenchDaemon,
    _path: Path,
}

impl Rig {
    fn new(args: &Args, rng: &mut fastrand::Rng) -> Result<Rig, String> {
        if !(1..=BATCHES_MAX).contains(&args.batches) {
            return Err(format!("the value of --batches must be 1 to {BATCHES_MAX}"));
        }
        let pool_bytes = if args.full_pool {
            FULL_POOL_BYTES
        } else {
            1 << 30
        };
        let host = BenchDaemon::new(pool_bytes);
        let path = host.serve(args.event_loop, POLL_MAX, PROCESSORS[0])?;
        // Generate the pages of both halves, and then those with which a guest reaches its maximum
        // of raw pages.
        let pages = pages(RAW_MAX, NOISE_BYTES, rng);
        let enough = (RESERVE_BYTES, None, 100);
        let neighbour = (NEIGHBOUR_RESERVE_BYTES, None, 100);
        let connect = |name, domain, (reserve_bytes, limit_bytes, weight)| {
            let mut guest = Guest::new(name, pages.iter(), RAW_MAX)?;
            let quota = Quota {
                reserve_bytes,
                limit_bytes,
                weight,
            };
            host.connect_as(&path, name, Some(domain), quota, &mut guest)?;
            Ok::<_, String>(guest)
        };
        let filler = args.full_pool.then(|| {
            let pages = self::pages(FILL_PAGES, PAGE_SIZE, rng);
            let mut guest = Guest::new("filler", pages.iter(), 0)?;
            let connect = |stream| guest.connect(stream);
            let quota = Quota {
                reserve_bytes: 0,
                limit_bytes: None,
                weight: 100,
            };
            let tenant = host.connect_by(&path, "filler", Some("elsewhere"), quota, connect)?;
            let mut filler = Filler {
                guest,
                tenant,
                next: 0,
            };
            filler.fill(&host)?;
            Ok::<_, String>(filler)
        });
        Ok(Rig {
            filler: filler.transpose()?,
            guest: connect("guest", "here", enough)?,
            other_domain: connect("other_domain", "there", neighbour)?,
            same_domain: connect("same_domain", "here", neighbour)?,
            full: connect("full", "here", (0, Some(FULL_LIMIT_BYTES), 0))?,
            poor: connect("poor", "here", (0, Some(0), 0))?,
            batches: match args.full_pool {
                true => args.batches.min(FULL_BATCHES_MAX),
                false => args.batches,
            },
            host,
            _path: path,
        })
    }

    /// Returns the batches of one half of the test pages, which has the number 0 or 1.
    fn half(&self, half: usize) -> Vec<Run> {
        let pages = self.batches * BATCH;
        runs(half * pages..(half + 1) * pages)
    }

    /// Returns runs of one page each: the pages of a half that the guest puts one by one.
    fn singles(&self, half: usize) -> Vec<Run> {
        let first = half * self.batches * BATCH;
        let run = |index| Run { index, pages: 1 };
        (first..first + SINGLES).map(run).collect()
    }

    /// Returns the runs of both halves in random order. Each run comes with HELD if the neighbour
    /// has put the run's pages, and with NEW otherwise.
    fn mixed_runs(
        &self,
        held: usize,
        rng: &mut fastrand::Rng,
        of: impl Fn(&Rig, usize) -> Vec<Run>,
    ) -> Vec<(usize, Run)> {
        let arm = |half| if half == held { HELD } else { NEW };
        let runs =
            (0..2).flat_map(|half| of(self, half).into_iter().map(move |run| (arm(half), run)));
        let mut runs: Vec<_> = runs.collect();
        rng.shuffle(&mut runs);
        runs
    }

    /// Does one round. The neighbour puts the pages of the half with the number `held`.
    fn run_round(
        &mut self,
        times: &mut Times,
        holder: Holder,
        held: usize,
        rng: &mut fastrand::Rng,
    ) -> Result<(), String> {
        let own = self.half(held);
        for runs in own.chunks(RAW_MIN / BATCH) {
            self.holder(holder).run_all(runs, true)?;
            self.host.maintain_all();
        }
        let batches = |rig: &Rig, half| rig.half(half);
        let later = |rig: &Rig, half| rig.half(half).split_off(1);
        let singles = |rig: &Rig, half| rig.singles(half);

        // Put the first batch of each half page by page.
        self.fill_pool()?;
        let order = self.mixed_runs(held, rng, later);
        let arms = self.time_puts(&order)?;
        times.add((holder, What::PutBatch), arms);
        let order = self.mixed_runs(held, rng, singles);
        let arms = self.time_puts(&order)?;
        times.add((holder, What::PutPage), arms);
        let order = self.mixed_runs(held, rng, batches);
        self.poor.put_is = wire::P_REFUSED;
        let arms = time(&mut self.poor, &order, Guest::put_one)?;
        times.add((holder, What::RefusedLimit), arms);
        self.leave_pool()?;
        let order = self.mixed_runs(held, rng, batches);
        let arms = time(&mut self.guest, &order, Guest::get_one)?;
        times.add((holder, What::GetBatch), arms);

        let arms = self.finalize(held, rng)?;
        times.add((holder, What::Finalize), arms);
        let arms = self.measure_refused_nursery(held, rng)?;
        times.add((holder, What::RefusedNursery), arms);

        // Delay a put by a part of the time that such puts took in the previous round.
        let known = [What::Delayed, What::PutBatch].map(|what| times.ns.get(&(holder, what)));
        let ns = known
            .into_iter()
            .flatten()
            .next()
            .and_then(|all| all.last());
        let ns = ns.expect("no batch was measured before the delayed puts");
        let delay_ns = DELAY_BOUNDS * times.bound * ns * BATCH as f64;
        self.fill_pool()?;
        let arms = self.measure_delayed(1 - held, delay_ns, rng)?;
        times.add((holder, What::Delayed), arms);
        self.leave_pool()?;
        self.guest.run_all(&self.half(1 - held), false)?;

        self.holder(holder).run_all(&own, false)?;
        self.host.maintain_all();
        Ok(())
    }

    /// Returns the pages of the guest that are in no half. They and the pages of both halves are as
    /// many as the guest may have raw.
    fn rest(&self) -> Vec<Run> {
        runs(2 * self.batches * BATCH..RAW_MAX)
    }

    /// With `--full-pool`, fills the pool. The pool keeps some memory free for puts; the guest then
    /// uses this memory, so that its next puts have to evict pages.
    fn fill_pool(&mut self) -> Result<(), String> {
        let rest = self.rest();
        match &mut self.filler {
            Some(filler) => {
                filler.fill(&self.host)?;
                self.guest.run_all(&rest, true).map(drop)
            }
            None => Ok(()),
        }
    }

    /// Finalizes the pages of all VMs, and takes back the pages that `fill_pool` put for the guest.
    fn leave_pool(&mut self) -> Result<(), String> {
        self.host.maintain_all();
        if self.filler.is_some() {
            self.guest.run_all(&self.rest(), false)?;
        }
        Ok(())
    }

    /// Measures puts of the guest.
    ///
    /// # Errors
    /// A put fails, or the puts evicted fewer pages than they must evict in a full pool.
    fn time_puts(&mut self, order: &[(usize, Run)]) -> Result<Arms, String> {
        let evictions = |rig: &Rig| rig.filler.as_ref().map(|it| it.tenant.stats().evictions);
        let before = evictions(self);
        let arms = time(&mut self.guest, order, Guest::put_one)?;
        if let (Some(before), Some(after)) = (before, evictions(self)) {
            let pages: usize = order.iter().map(|(_, run)| run.pages).sum();
            // An evicted page takes about as much memory as a raw page.
            if after - before < pages as u64 / 2 {
                return Err(format!(
                    "the pool is not full: {pages} puts evicted {} pages",
                    after - before
                ));
            }
        }
        Ok(arms)
    }

    /// Measures the processor time of the background work on each half. One call of this work
    /// finalizes all raw pages, so the halves are put one after the other.
    fn finalize(&mut self, held: usize, rng: &mut fastrand::Rng) -> Result<Arms, String> {
        let mut arms = Arms::default();
        let first = rng.usize(..2);
        for half in [first, 1 - first] {
            let runs = self.half(half);
            self.guest.run_all(&runs, true)?;
            let begun_ns = cpu_ns();
            self.host.maintain_all();
            let arm = if half == held { HELD } else { NEW };
            arms[arm].push((cpu_ns() - begun_ns) / (runs.len() * BATCH) as f64);
            self.guest.run_all(&runs, false)?;
            self.guest.check(&runs)?;
        }
        Ok(arms)
    }

    /// Measures puts of a half of the pages, which no other VM has. A random half of these puts
    /// takes `delay_ns` longer. The run must find this difference.
    fn measure_delayed(
        &mut self,
        half: usize,
        delay_ns: f64,
        rng: &mut fastrand::Rng,
    ) -> Result<Arms, String> {
        let swap = rng.usize(..2);
        let runs = self.half(half).into_iter().enumerate();
        let mut order: Vec<_> = runs.map(|(nr, run)| ((nr % 2) ^ swap, run)).collect();
        rng.shuffle(&mut order);
        let mut arms = Arms::default();
        for (arm, run) in &order {
            let begun = Instant::now();
            self.guest.put_one(*run)?;
            let answered = begun.elapsed().as_nanos() as f64;
            while *arm == HELD && (begun.elapsed().as_nanos() as f64) < answered + delay_ns {}
            arms[*arm].push(begun.elapsed().as_nanos() as f64 / BATCH as f64);
        }
        Ok(arms)
    }

    /// Measures puts that the daemon refuses because the guest has as many raw pages as it may
    /// have.
    fn measure_refused_nursery(
        &mut self,
        held: usize,
        rng: &mut fastrand::Rng,
    ) -> Result<Arms, String> {
        let fill = runs(2 * self.batches * BATCH..2 * self.batches * BATCH + RAW_MIN);
        self.full.put_is = wire::P_STORED;
        self.full.run_all(&fill, true)?;
        self.full.put_is = wire::P_REFUSED;
        let order = self.mixed_runs(held, rng, Rig::half);
        let arms = time(&mut self.full, &order, Guest::put_one)?;
        self.host.maintain_all();
        self.full.run_all(&fill, false)?;
        Ok(arms)
    }

    fn holder(&mut self, holder: Holder) -> &mut Guest {
        match holder {
            Holder::OtherDomain => &mut self.other_domain,
            Holder::SameDomain => &mut self.same_domain,
        }
    }
}

impl Guest {
    fn put_one(&mut self, run: Run) -> Result<(), String> {
        self.put(run);
        self.wait().map(drop)
    }

    fn get_one(&mut self, run: Run) -> Result<(), String> {
        self.get(run, 0);
        self.wait().map(drop)
    }
}

/// Executes the operation `what` on the runs of `order` one after the other. Returns the times in
/// ns per page, as one list for each half of the pages.
fn time(
    guest: &mut Guest,
    order: &[(usize, Run)],
    what: fn(&mut Guest, Run) -> Result<(), String>,
) -> Result<Arms, String> {
    let mut arms = Arms::default();
    for (arm, run) in order {
        let begun = Instant::now();
        what(guest, *run)?;
        arms[*arm].push(begun.elapsed().as_nanos() as f64 / run.pages as f64);
    }
    Ok(arms)
}

/// Operations whose times must not depend on the pages of another trust domain.
const EQUAL: [What; 6] = [
    What::PutBatch,
    What::PutPage,
    What::RefusedLimit,
    What::RefusedNursery,
    What::GetBatch,
    What::Finalize,
];

/// Operations whose times must differ, each with the neighbour that has the pages. A run that does
/// not find these differences is undecided.
const DIFFERENT: [(Holder, What); 2] = [
    (Holder::OtherDomain, What::Delayed),
    (Holder::SameDomain, What::Finalize),
];

/// Does one run of the benchmark: all rounds, or as many as the time allows.
fn measure(args: &Args, seed: u64) -> Result<Times, String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    pin(None, PROCESSORS[1])?;
    let mut rig = Rig::new(args, &mut rng)?;
    let mut times = Times::new(args.bound);
    let until = Instant::now() + Duration::from_secs(args.seconds);
    for round in 0..args.rounds {
        if round > 0 && Instant::now() > until {
            break;
        }
        progress(&format!("round {} of {}", round + 1, args.rounds));
        for holder in [Holder::OtherDomain, Holder::SameDomain] {
            let held = rng.usize(..2);
            rig.run_round(&mut times, holder, held, &mut rng)?;
        }
    }
    progress("");
    Ok(times)
}

/// Result of all runs of the benchmark.
#[derive(Debug, PartialEq)]
enum Outcome {
    Equal,
    /// Name of the operation whose time differed.
    Different(&'static str),
    /// Reason why the measurement is inconclusive.
    Undecided(String),
}

/// Returns the result of one run, from its times.
fn outcome(times: &Times) -> Outcome {
    let rounds = times.ratios.values().next().map_or(0, Vec::len);
    if rounds < ROUNDS_MIN {
        return Outcome::Undecided(format!(
            "there was time for only {rounds} rounds, fewer than {ROUNDS_MIN}"
        ));
    }
    for (holder, what) in DIFFERENT {
        let ratio = times.ratio((holder, what));
        if times.verdict((holder, what)) != Verdict::Different {
            return Outcome::Undecided(format!(
                "the run did not find a difference that is known to exist, so it may have missed \
                 others: {} with pages of {holder:?} has a time ratio of {:.3} – {:.3}",
                what.name(),
                ratio.low,
                ratio.high
            ));
        }
    }
    let verdict = |what: &What| times.verdict((Holder::OtherDomain, *what));
    if let Some(what) = EQUAL
        .iter()
        .find(|what| verdict(what) == Verdict::Different)
    {
        return Outcome::Different(what.name());
    }
    match EQUAL
        .iter()
        .find(|what| verdict(what) == Verdict::Undecided)
    {
        Some(what) => {
            let ratio = times.ratio((Holder::OtherDomain, *what));
            Outcome::Undecided(format!(
                "the 95 % interval of the time ratio of {} is {:.3} – {:.3}, which is partly \
                 within the bound and partly outside of it",
                what.name(),
                ratio.low,
                ratio.high
            ))
        }
        None => Outcome::Equal,
    }
}

/// Repeats the run until a run finds all times equal, but does at most [`REPEATS`] runs. Reports a
/// difference only if each run finds a difference for the same operation.
fn decide(mut run: impl FnMut(usize) -> Result<Times, String>) -> Result<(Times, Outcome), String> {
    let mut last = None;
    let mut different = Vec::new();
    for nth in 0..REPEATS {
        let times = run(nth)?;
        let found = outcome(&times);
        if found == Outcome::Equal {
            return Ok((times, found));
        }
        if let Outcome::Different(what) = found {
            different.push(what);
        }
        last = Some((times, found));
    }
    let (times, found) = last.expect("the number of runs, REPEATS, is 0");
    let same = different.len() == REPEATS && different.iter().all(|what| *what == different[0]);
    let found = match found {
        Outcome::Different(what) if !same => Outcome::Undecided(format!(
            "the time of {what} differed in the last run, but not in every run"
        )),
        found => found,
    };
    Ok((times, found))
}

/// Runs the benchmark and prints the results.
///
/// # Errors
/// There are too few processors, a measured operation fails, the times differ, or the result is
/// undecided.
pub fn run(args: &Args) -> Result<(), String> {
    let (times, outcome) = decide(|nth| measure(args, args.seed + nth as u64))?;
    print(&times, &outcome);
    match outcome {
        Outcome::Different(what) => Err(format!(
            "{what}: a guest can find out by timing its requests which pages a VM of another trust domain has"
        )),
        Outcome::Undecided(why) => Err(format!(
            "the result is undecided: {why}; repeat the benchmark on a machine without other load"
        )),
        Outcome::Equal => Ok(()),
    }
}

fn text(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Equal => "equal".into(),
        Outcome::Different(what) => format!("different: {what}"),
        Outcome::Undecided(why) => format!("undecided: {why}"),
    }
}

fn print(times: &Times, outcome: &Outcome) {
    println!(
        "{:16} {:10} {:>8} {:>8}   95 % interval",
        "what", "held by", "ns/page", "ratio"
    );
    for key in times.ratios.keys() {
        let ratio = times.ratio(*key);
        println!(
            "{:16} {:10} {:8.0} {:8.4}   {:.4} – {:.4}   {:?}",
            key.1.name(),
            format!("{:?}", key.0).to_lowercase(),
            median(times.ns[key].clone()),
            ratio.value,
            ratio.low,
            ratio.high,
            times.verdict(*key)
        );
    }
    println!("\nbound: 1 ± {}; {}", times.bound, text(outcome));
}

#[cfg(test)]
mod tests {
    use super::*;
    use tmem_model::{Missing, skipped};

    /// Returns the times of a simulated run. `of` gives the median ratio for each holder and
    /// operation, and `spread` is the range over which the ratios of the rounds vary.
    fn times(of: impl Fn(Holder, What) -> f64, spread: f64) -> Times {
        let mut times = Times::new(BOUND);
        for holder in [Holder::OtherDomain, Holder::SameDomain] {
            for what in EQUAL.into_iter().chain([What::Delayed]) {
                for round in 0..100 {
                    let off = (round as f64 / 99.0 - 0.5) * spread;
                    times.add((holder, what), [vec![of(holder, what) + off], vec![1.0]]);
                }
            }
        }
        times
    }

    fn as_designed(holder: Holder, what: What) -> f64 {
        match (holder, what) {
            (_, What::Delayed) => 1.0 + DELAY_BOUNDS * BOUND,
            (Holder::SameDomain, What::Finalize) => 0.5,
            _ => 1.0,
        }
    }

    #[test]
    fn a_timing_difference_is_reported_only_if_each_run_shows_it() {
        let (equal, noise) = (times(as_designed, 0.01), times(as_designed, 1.0));
        assert_eq!(outcome(&equal), Outcome::Equal);
        assert!(matches!(outcome(&noise), Outcome::Undecided(_)));
        let leak = |holder, what| match what {
            What::PutPage if holder == Holder::OtherDomain => 1.0 + 2.0 * BOUND,
            _ => as_designed(holder, what),
        };
        assert_eq!(outcome(&times(leak, 0.01)), Outcome::Different("put_page"));
        let always = decide(|_| Ok(times(leak, 0.01)))
            .expect("a simulated run failed")
            .1;
        assert_eq!(always, Outcome::Different("put_page"));
        let twice = decide(|nth| {
            Ok(times(
                if nth == 0 { as_designed } else { leak },
                if nth == 0 { 1.0 } else { 0.01 },
            ))
        });
        assert!(matches!(
            twice.expect("a simulated run failed").1,
            Outcome::Undecided(_)
        ));
        let at_last = decide(|nth| {
            Ok(if nth < 2 {
                times(leak, 0.01)
            } else {
                times(as_designed, 0.01)
            })
        });
        assert_eq!(at_last.expect("a simulated run failed").1, Outcome::Equal);
        // A run must be undecided if it finds no difference, because DIFFERENT lists differences
        // that exist.
        let blind = times(|_, _| 1.0, 0.01);
        assert!(matches!(outcome(&blind), Outcome::Undecided(_)));
    }

    /// Runs the benchmark with few rounds. Such a run can find a difference of a tenth of the time
    /// of a put. The command `tmem-bench timing` finds smaller differences. The two runs share the
    /// processors, so one test does both. In an unoptimized daemon, the known difference is too
    /// small to be found, so no run would reach a decision.
    #[test]
    #[cfg_attr(debug_assertions, ignore = "needs an optimized daemon: shard ops")]
    fn timing_does_not_reveal_pages_of_another_trust_domain() {
        if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
            return skipped(
                Missing::Processors,
                "the guest needs a processor of its own",
            );
        }
        for full_pool in [false, true] {
            let args = Args {
                rounds: 100,
                seconds: 15,
                batches: FULL_BATCHES_MAX,
                bound: 0.1,
                event_loop: EventLoop::default(),
                full_pool,
                seed: 1,
            };
            let (times, outcome) = decide(|nth| measure(&args, args.seed + nth as u64))
                .expect("the measurement failed");
            print(&times, &outcome);
            match outcome {
                Outcome::Equal => {}
                Outcome::Undecided(why) => {
                    skipped(Missing::Quiet, format_args!("undecided: {why}"))
                }
                Outcome::Different(what) => panic!(
                    "full pool: {full_pool}: the time of {what} depends on the pages of another \
                     trust domain"
                ),
            }
        }
    }
}
