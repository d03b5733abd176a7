// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Time of puts and gets under load, in hard cases: a full pool, many tenants, keys in random
//! order, tables larger than the processor's caches, a growing pool. The easy case is a small pool
//! with free memory for one tenant.
//!
//! There are two cases of a full pool. In `full_pool`, puts come in bursts that are larger than the
//! free memory at which background work begins to evict, and background work is never done when a
//! burst begins. In `full_pool_rested`, background work is done before each round, and the pages of
//! a round fit into the free memory, so that puts never evict pages.
//!
//! One run measures the hard cases and the easy case alternately. In each round, each case stores
//! the same number of pages, except that `full_pool` stores more. The pages are real pages of
//! files. The benchmark makes each page unique, so that the engine deduplicates no page.

use crate::machine::Machine;
use crate::measure::{Ratio, Samples, cpu_ns, quantile};
use crate::report::{Results, Target};
use crate::rig::{BATCH, Guest, RAW_PAGES, Rig, add_guest_to};
use std::time::Instant;
use tmem_pool::{PAGE_SIZE, Page};

/// Number of batches that each case puts in a round. They have half as many pages as a tenant may
/// have raw pages, so that no page is refused because background work is late.
const BATCHES: usize = RAW_PAGES / BATCH / 2;
const PAGES: usize = BATCHES * BATCH;

/// Number of batches of real pages in the pool when a round begins. Each round replaces some of
/// these batches.
const POPULATION: usize = 64 * BATCHES;

/// Number of tenants in the case `tenants256`, which measures a pool of many tenants.
const TENANTS: usize = 256;

/// Bytes of metadata per page. The benchmark divides the wanted size of the large tables by this
/// number to find the number of pages.
const METADATA_BYTES: u64 = 64;

/// Largest number of small pages (pages that contain only a number) in the pool with large tables.
/// Without this limit, the benchmark would take minutes on a processor with a very large cache.
const SMALL_PAGES_MAX: u64 = 4 << 20;

/// Size in bytes of the pool in the cases of a full pool. Pools of real hosts are larger, so the
/// pages of a burst are a smaller part of such a pool.
const FULL_POOL_BYTES: u64 = 256 << 20;

/// Number of batches in a burst of the case `full_pool`. A burst is 6 MiB of pages, which is more
/// than the free memory (4 MiB, a 64th of the pool) below which background work begins to evict.
const BURST_BATCHES: usize = RAW_PAGES / BATCH * 3 / 4;

/// Number of raw pages at which the next burst of the case `full_pool` begins. Together with the
/// pages of a burst, these are as many raw pages as the tenant may have.
const RAW_PAGES_LEFT: usize = RAW_PAGES - BURST_BATCHES * BATCH;

/// Budget in pages of one call of background work in the case `full_pool`.
const MAINTAIN_PAGES: usize = 128;

/// Number of batches that the benchmark puts to fill the pool in the cases of a full pool. The pool
/// does not have memory for all of them, because each batch takes about 140 KiB.
const FULL_POOL_BATCHES: usize = 3 * POPULATION;

/// Bytes of pool memory per page in the cases whose pool does not fill up.
const ROOM_BYTES: u64 = 2 * PAGE_SIZE as u64;

/// Bit that is set in the numbers in small pages and in their object numbers, and is clear for real
/// pages. So a small page never equals a real page, and their keys differ.
const SMALL: u64 = 1 << 63;

/// Keys of the pages of a batch.
#[derive(Clone)]
enum Keys {
    /// Keys of consecutive pages of an object, from page number `first` on.
    Run { object: u64, first: usize },
    /// Keys of unrelated pages, each as (object, page number).
    Any(Vec<(u64, u64)>),
}

/// A batch of pages that a case puts: the number of the tenant, and the keys of the pages.
#[derive(Clone)]
struct Batch {
    tenant: usize,
    keys: Keys,
}

/// Way in which a case chooses the keys of the pages that a round puts.
enum Choice {
    /// A round replaces batches of the population (the batches of real pages in the pool). It gets
    /// the old pages first and then puts new pages under their keys.
    Population { batches: Vec<Batch>, next: usize },
    /// A round puts pages under keys that no earlier round used.
    New { next_object: u64 },
    /// A round puts a burst of pages under keys that no earlier round used. The background work
    /// after it does not wait until nothing is left to do: some pages are still raw when the next
    /// burst begins.
    Bursts { next_object: u64 },
}

impl Choice {
    /// Returns the number of batches that a round puts.
    fn batches(&self) -> usize {
        match self {
            Choice::Bursts { .. } => BURST_BATCHES,
            Choice::Population { .. } | Choice::New { .. } => BATCHES,
        }
    }
}

/// A pool in one of the compared situations (cases), with the figures measured in it.
struct Case {
    rig: Rig,
    tenants: Vec<Guest>,
    choice: Choice,
    /// Batches that the current round puts.
    round: Vec<Batch>,
    /// Processor time of puts and of the background work that stores the pages in their final form.
    /// Each round adds one value, in ns per stored page.
    put: Samples,
    /// Processor time of gets of consecutive pages. Each round adds one value, in ns per page.
    get: Samples,
    /// Elapsed time of each call that puts a batch, in ns. One list for each round.
    calls: Vec<Vec<f64>>,
    refused: u64,
    /// Number of pages that put calls had to evict, because the pool had no free memory. Background
    /// work evicts all other pages. Counted in the case `full_pool` only.
    evicted_by_puts: u64,
    pages: u64,
}

/// Pages of files. The benchmark writes a stamp (a new number) into each page before it puts the
/// page.
struct Source {
    pages: Vec<Box<Page>>,
    order: Vec<usize>,
    next: usize,
    stamp: u64,
}

impl Source {
    /// Returns the next `nr` pages in random order, each with a number (stamp) that no page had
    /// before. The stamp replaces the first eight bytes of the page. The call reads no other byte
    /// of the page, so that the page stays out of the processor's caches.
    fn take(&mut self, rng: &mut fastrand::Rng, nr: usize) -> Vec<&Page> {
        if self.next + nr > self.order.len() {
            rng.shuffle(&mut self.order);
            self.next = 0;
        }
        let chosen = &self.order[self.next..self.next + nr];
        self.next += nr;
        for &at in chosen {
            self.stamp += 1;
            self.pages[at][..8].copy_from_slice(&self.stamp.to_le_bytes());
        }
        chosen.iter().map(|&at| &*self.pages[at]).collect()
    }
}

/// Results of the load benchmark.
pub struct Load {
    cases: Vec<(&'static str, Case)>,
    tables_bytes: u64,
}

impl Case {
    fn new(rig: Rig, tenants: Vec<Guest>, choice: Choice) -> Case {
        Case {
            rig,
            tenants,
            choice,
            round: Vec::new(),
            put: Samples::default(),
            get: Samples::default(),
            calls: Vec::new(),
            refused: 0,
            evicted_by_puts: 0,
            pages: 0,
        }
    }

    fn tenant(&self, nr: usize) -> &Guest {
        match nr {
            0 => &self.rig.tenant,
            nr => &self.tenants[nr - 1],
        }
    }

    /// Puts the pages of a batch. Returns the number of pages that the engine stored.
    fn put(&self, batch: &Batch, pages: &[&Page]) -> usize {
        let (tenant, pages) = (self.tenant(batch.tenant), pages.iter().copied());
        match &batch.keys {
            &Keys::Run { object, first } => {
                let keys = (first..).map(|index| (object, index as u64));
                tenant.put_keys(keys.zip(pages))
            }
            Keys::Any(keys) => tenant.put_keys(keys.iter().copied().zip(pages)),
        }
    }

    /// Puts the population: all batches of real pages. Spreads `small_pages` small pages evenly
    /// between these batches.
    fn fill(&self, source: &mut Source, rng: &mut fastrand::Rng, small_pages: usize) {
        let Choice::Population { batches, .. } = &self.choice else {
            return;
        };
        let mut small = Small {
            pages: vec![[0; PAGE_SIZE]; BATCH],
            put: 0,
        };
        for (nth, batch) in batches.iter().enumerate() {
            self.put(batch, &source.take(rng, BATCH));
            if nth % BATCHES == 0 {
                self.rig.maintain_all();
            }
            small.put_up_to(small_pages * nth / batches.len(), &self.rig);
        }
        self.rig.maintain_all();
    }

    /// Chooses the batches that a round puts. Gets their pages, so that the pool no longer has
    /// them, unless the round uses new keys.
    fn vacate(&mut self, out: &mut [Page]) {
        let nr = self.choice.batches();
        match &mut self.choice {
            Choice::New { next_object } | Choice::Bursts { next_object } => {
                let object = *next_object;
                *next_object += 1;
                let batch = |nth| Batch {
                    tenant: 0,
                    keys: Keys::Run {
                        object,
                        first: nth * BATCH,
                    },
                };
                self.round = (0..nr).map(batch).collect();
                return;
            }
            Choice::Population { batches, next } => {
                // The batches are in random order. After the last batch, begin with the first one
                // again.
                if *next == batches.len() {
                    *next = 0;
                }
                self.round = batches[*next..*next + nr].to_vec();
                *next += nr;
            }
        }
        let (mut get_ns, mut got) = (0.0, 0);
        for (batch, out) in self.round.iter().zip(out.chunks_exact_mut(BATCH)) {
            let tenant = self.tenant(batch.tenant);
            match &batch.keys {
                &Keys::Run { object, first } => {
                    let since = cpu_ns();
                    drop(tenant.get(object, first, out));
                    get_ns += cpu_ns() - since;
                    got += out.len();
                }
                Keys::Any(keys) => {
                    for &(object, index) in keys {
                        drop(tenant.get(object, index as usize, &mut out[..1]));
                    }
                }
            }
        }
        if got > 0 {
            self.get.push(get_ns / got as f64);
        }
    }

    /// Puts the pages of a round, does the background work, and records times.
    fn store(&mut self, pages: &[&Page]) {
        let mut calls = Vec::with_capacity(self.round.len());
        let mut stored = 0;
        let bursts = matches!(self.choice, Choice::Bursts { .. });
        let evicted = || self.rig.engine.stats().evictions;
        let evicted_before = evicted();
        let since = cpu_ns();
        for (batch, pages) in self.round.iter().zip(pages.chunks(BATCH)) {
            let begun = Instant::now();
            stored += self.put(batch, pages);
            calls.push(begun.elapsed().as_nanos() as f64);
        }
        if bursts {
            self.evicted_by_puts += evicted() - evicted_before;
            self.rig.maintain_until(RAW_PAGES_LEFT, MAINTAIN_PAGES);
        } else {
            self.rig.maintain_all();
        }
        let spent_ns = cpu_ns() - since;
        // Divide the time by the number of stored pages only. A refused page takes almost no time,
        // so counting it would make the time per page too short.
        self.put.push(spent_ns / stored.max(1) as f64);
        self.calls.push(calls);
        self.refused += (pages.len() - stored) as u64;
        self.pages += pages.len() as u64;
    }
}

/// Returns batches of consecutive pages, spread over the given numbers of tenants and of objects.
fn runs(batches: usize, tenants: usize, objects: u64) -> impl Iterator<Item = Batch> {
    (0..batches).map(move |nth| Batch {
        tenant: nth % tenants,
        keys: Keys::Run {
            object: nth as u64 % objects + 1,
            first: nth / objects as usize * BATCH,
        },
    })
}

/// Creates a pool and its tenants, each in a trust domain of its own.
fn make_rig(size_bytes: u64, tenants: usize) -> Result<(Rig, Vec<Guest>), String> {
    let rig = Rig::new(size_bytes)?;
    let others =
        (1..tenants).map(|nr| add_guest_to(&rig.engine, &format!("bench-{}", nr + 1), None));
    let others = others.collect::<Result<_, _>>()?;
    Ok((rig, others))
}

/// Returns the number of small pages whose metadata takes about `tables_bytes` bytes, at most
/// [`SMALL_PAGES_MAX`].
fn small_pages(tables_bytes: u64) -> usize {
    let wanted = tables_bytes / METADATA_BYTES;
    wanted.min(SMALL_PAGES_MAX) as usize
}

/// Generator of small pages. A small page begins with a number of its own and is zero otherwise.
struct Small {
    pages: Vec<Page>,
    put: usize,
}

impl Small {
    /// Puts batches of small pages until the pool has at least `wanted` small pages.
    fn put_up_to(&mut self, wanted: usize, rig: &Rig) {
        while self.put < wanted {
            for (nth, page) in self.pages.iter_mut().enumerate() {
                page[..8].copy_from_slice(&(SMALL | (self.put + nth) as u64).to_le_bytes());
            }
            // An object has 64 MiB of small pages. Its number has the bit SMALL, which no object of
            // real pages has.
            let (object, first) = (self.put >> 14, self.put % (1 << 14));
            rig.tenant
                .put(SMALL | object as u64, first, self.pages.iter());
            self.put += BATCH;
            if self.put.is_multiple_of(PAGES) {
                rig.maintain_all();
            }
        }
    }
}

/// Measures all cases in `rounds` rounds. The tables of the case `large_tables` have about the size
/// of the last-level cache, multiplied by `tables_per_cache`.
///
/// # Errors
/// The system does not provide the address space for a pool.
pub fn run<'a>(
    pages: impl Iterator<Item = &'a Page>,
    (rounds, tables_per_cache): (usize, u64),
    seed: u64,
    machine: &Machine,
    progress: impl Fn(&str),
) -> Result<Load, String> {
    let pages: Vec<Box<Page>> = pages.map(|page| Box::new(*page)).collect();
    let mut source = Source {
        order: (0..pages.len()).collect(),
        next: pages.len(),
        pages,
        stamp: 0,
    };
    let mut rng = fastrand::Rng::with_seed(seed);
    let room_bytes = (POPULATION * BATCH) as u64 * ROOM_BYTES;
    let population = |mut batches: Vec<Batch>, rng: &mut fastrand::Rng| {
        rng.shuffle(&mut batches);
        Choice::Population { batches, next: 0 }
    };
    let mut cases = Vec::new();
    let mut add =
        |name, (rig, tenants), choice| cases.push((name, Case::new(rig, tenants, choice)));
    add(
        "room",
        make_rig(room_bytes, 1)?,
        population(runs(POPULATION, 1, 16).collect(), &mut rng),
    );
    for name in ["full_pool", "full_pool_rested"] {
        add(
            name,
            make_rig(FULL_POOL_BYTES, 1)?,
            population(runs(FULL_POOL_BATCHES, 1, 16).collect(), &mut rng),
        );
    }
    // This pool has 256 tenants, and each tenant may have as many raw pages as the single tenant of
    // the other cases. So more raw pages can wait for background work in this pool.
    add(
        "tenants256",
        make_rig(room_bytes, TENANTS)?,
        population(runs(POPULATION, TENANTS, 1).collect(), &mut rng),
    );
    let mut keys: Vec<(u64, u64)> = (0..(POPULATION * BATCH) as u64)
        .map(|nth| (nth % 16 + 1, nth / 16))
        .collect();
    rng.shuffle(&mut keys);
    let random = keys.chunks(BATCH).map(|keys| Batch {
        tenant: 0,
        keys: Keys::Any(keys.to_vec()),
    });
    add(
        "random_keys",
        make_rig(room_bytes, 1)?,
        population(random.collect(), &mut rng),
    );
    let small_bytes = SMALL_PAGES_MAX * 512;
    add(
        "large_tables",
        make_rig(room_bytes + small_bytes, 1)?,
        population(runs(POPULATION, 1, 16).collect(), &mut rng),
    );
    add(
        "growing",
        make_rig(room_bytes * 2, 1)?,
        Choice::New { next_object: 1 },
    );
    let mut load = Load {
        cases,
        tables_bytes: 0,
    };
    for (name, case) in &mut load.cases {
        progress(&format!("filling the pool of {name}"));
        let small = match *name {
            "large_tables" => small_pages(machine.llc_bytes() * tables_per_cache),
            _ => 0,
        };
        case.fill(&mut source, &mut rng, small);
        match *name {
            "large_tables" => load.tables_bytes = case.rig.engine.stats().metadata_bytes,
            "full_pool" => {
                case.choice = Choice::Bursts {
                    next_object: 1 << 20,
                }
            }
            "full_pool_rested" => {
                case.choice = Choice::New {
                    next_object: 1 << 20,
                }
            }
            _ => {}
        }
    }
    let mut out = vec![[0; PAGE_SIZE]; PAGES];
    for round in 0..rounds {
        progress(&format!("load, round {} of {rounds}", round + 1));
        load.cases
            .iter_mut()
            .for_each(|(_, case)| case.vacate(&mut out));
        let nr = load.cases.len();
        for nth in 0..nr {
            // Change the order of the cases in each round, because each case finds the processor's
            // caches as the previous case left them.
            let (_, case) = &mut load.cases[(nth + round) % nr];
            let pages = case.choice.batches() * BATCH;
            case.store(&source.take(&mut rng, pages));
        }
    }
    Ok(load)
}

impl Load {
    fn case(&self, name: &str) -> &Case {
        let found = self.cases.iter().find(|(other, _)| *other == name);
        &found
            .expect("the benchmark has no case of the given name")
            .1
    }

    /// Adds the figures of the hard cases to the results: their speed relative to the easy case
    /// `room` (below 1 if the hard case is slower), and their 99th percentiles divided by that of
    /// `room`. Also adds the shares of pages that were refused, or evicted by puts, in `full_pool`.
    pub fn add_to(&self, results: &mut Results) {
        let room = self.case("room");
        for (name, key, at_least) in [
            ("full_pool", "put_full_pool_ratio", 0.80),
            ("full_pool_rested", "full_pool_rested_ratio", 0.80),
            ("tenants256", "tenants256_ratio", 0.90),
            ("random_keys", "random_keys_ratio", 0.85),
            ("large_tables", "large_tables_ratio", 0.80),
            ("growing", "growing_ratio", 0.80),
        ] {
            let ratio = room.put.ratio_to(&self.case(name).put);
            results.add(key, Target::AtLeast(at_least), Ok(ratio));
        }
        for (name, key) in [
            ("full_pool", "full_pool_p99_ratio"),
            ("full_pool_rested", "full_pool_rested_p99_ratio"),
        ] {
            let p99 = self.p99_ratio(self.case(name), room);
            results.add(key, Target::AtMost(3.0), Ok(p99));
        }
        let full = self.case("full_pool");
        for (key, target, pages) in [
            ("full_pool_refused", Target::AtMost(0.01), full.refused),
            (
                "full_pool_evicted_by_puts",
                Target::None,
                full.evicted_by_puts,
            ),
        ] {
            let part = pages as f64 / full.pages as f64;
            results.add(key, target, Ok(Ratio::exact(part)));
        }
        for (name, key) in [
            ("tenants256", "tenants256_get_ratio"),
            ("large_tables", "large_tables_get_ratio"),
        ] {
            let ratio = room.get.ratio_to(&self.case(name).get);
            results.add(key, Target::None, Ok(ratio));
        }
    }

    /// Returns the 99th percentile of the times of put calls in `case`, divided by that in `easy`.
    /// A call puts a batch.
    fn p99_ratio(&self, case: &Case, easy: &Case) -> Ratio {
        // Resample whole rounds, because the times within one round depend on each other.
        let rounds: Vec<usize> = (0..case.calls.len()).collect();
        let mut drawn = Vec::new();
        Ratio::bootstrap(|pick| {
            pick.sample(&rounds, &mut drawn);
            let [case, easy] = [case, easy].map(|case| {
                let times = drawn.iter().flat_map(|&round| &case.calls[round]);
                quantile(&mut times.copied().collect::<Vec<f64>>(), 0.99)
            });
            case / easy
        })
    }

    /// Returns the names of the timed operations of all cases. Each comes with its time: the median
    /// in ns per page, or the 99th percentile in ns per call.
    pub fn times(&self) -> Vec<(String, f64)> {
        let mut all = Vec::new();
        for (name, case) in &self.cases {
            all.push((format!("load: {name}, put"), case.put.median()));
            if !case.get.is_empty() {
                all.push((format!("load: {name}, get and free"), case.get.median()));
            }
            let mut calls: Vec<f64> = case.calls.concat();
            all.push((
                format!("load: {name}, put of a batch, p99"),
                quantile(&mut calls, 0.99),
            ));
        }
        all
    }

    /// Prints the size of the large tables.
    pub fn print(&self) {
        println!(
            "\nMetadata of the large pool: {} MiB.",
            self.tables_bytes >> 20
        );
    }
}
