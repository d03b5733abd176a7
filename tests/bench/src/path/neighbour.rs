// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Benchmark of how long a VM waits for its pages while another VM keeps the worker busy.
//!
//! One guest, the victim, gets one page at a time. The benchmark alternates between measurements in
//! which the victim is alone and measurements in which another guest, the attacker, sends requests.
//! The attacker's requests are of a kind that costs the worker much time. As many of them are in
//! flight as fit into the attacker's queue. Both guests share one worker, which has a processor of
//! its own. A thread on another processor runs both guests. The benchmark measures each time at the
//! victim, from its request to the answer.

use super::guest::{Guest, Run};
use super::host::{BenchDaemon, Path, pin};
use super::{CLIENT, SERVER};
use crate::report::progress;
use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use tmem_model::{Buffer, FakeGuest, GuestConfig, RamRegion, Request};
use tmem_pool::{PAGE_SIZE, Page, Put, PutResult, Quota, Tenant};
use tmemd::config::EventLoop;
use virtio_tmem as wire;
use zerocopy::IntoBytes;

/// Number of descriptor chains (requests) that the attacker keeps in flight in most attacks.
const CHAINS: usize = 64;
/// Number of pages in a range that the attacker flushes. It is the largest range that an earlier
/// version of the daemon flushed in one scheduling slice.
const RANGE_PAGES: u64 = 511;
/// Largest number of pages of an object that a FLUSH frees before the daemon answers it. The daemon
/// frees larger objects in the background.
const OBJECT_PAGES: u64 = 16;
/// Number of descriptor chains in attacks whose requests name whole objects or batches. The number
/// is small, so that the benchmark generates the pages for these requests quickly.
const FEW_CHAINS: usize = 16;
const BATCH: usize = wire::BATCH_MAX;
/// Number of pages that the victim puts and gets.
const VICTIM_PAGES: usize = 512;
const POOL: u32 = 1;
const PAGE: u64 = PAGE_SIZE as u64;
const POOL_BYTES: u64 = 1 << 30;
/// Time in nanoseconds of the engine's clock after which pages count as cold.
const COLD_NS: u64 = 3_600_000_000_000;
/// Longest measurement of the victim during an attack. An attack that never ends by itself stops
/// then.
const ATTACK: Duration = Duration::from_millis(30);
const TIMEOUT: Duration = Duration::from_secs(20);
/// Polling time of the worker, so long that the worker does not sleep between the victim's
/// requests.
const POLL_MAX: Duration = Duration::from_millis(1);
/// Number of rounds for each attack. A round measures the victim alone, and then during the attack.
const ROUNDS: usize = 12;

/// Times of the victim's gets in µs.
pub struct Waits {
    /// Name of the attack for the report.
    pub name: &'static str,
    /// Times without the attack.
    pub alone: Vec<f64>,
    /// Times during the attack.
    pub beside: Vec<f64>,
}

/// Kind of the attacker's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attack {
    FlushRanges,
    FlushEmptyRanges,
    FlushObjects,
    GetDense,
    PutNoise,
    Descriptors,
    Pools,
}

impl Attack {
    const ALL: [Attack; 7] = [
        Attack::FlushRanges,
        Attack::FlushEmptyRanges,
        Attack::FlushObjects,
        Attack::GetDense,
        Attack::PutNoise,
        Attack::Descriptors,
        Attack::Pools,
    ];

    fn name(self) -> &'static str {
        match self {
            Attack::FlushRanges => "FLUSH, 64 chains of 511 same-filled pages",
            Attack::FlushEmptyRanges => "FLUSH, chains of 64 large ranges without pages",
            Attack::FlushObjects => "FLUSH, 16 chains of 64 objects of 16 pages",
            Attack::GetDense => "GET, 16 chains of 64 pages compressed with zstd",
            Attack::PutNoise => "PUT, 16 chains of 64 incompressible pages",
            Attack::Descriptors => "GET, chains of 1,000 descriptors",
            Attack::Pools => "POOL_CREATE and POOL_DESTROY",
        }
    }

    /// Returns whether the attacker sends a descriptor chain again after its answer. It does so if
    /// the chain's request does not use up pages in the pool.
    fn is_endless(self) -> bool {
        matches!(
            self,
            Attack::FlushEmptyRanges | Attack::Descriptors | Attack::Pools
        )
    }

    fn chains(self) -> usize {
        match self {
            Attack::FlushObjects | Attack::GetDense | Attack::PutNoise => FEW_CHAINS,
            _ => CHAINS,
        }
    }

    fn queue(self) -> usize {
        usize::from(self != Attack::Pools)
    }
}

/// A guest whose requests keep the worker busy. Its descriptor chains are built in advance.
struct Attacker {
    guest: FakeGuest,
    attack: Attack,
    chains: Vec<(Vec<Buffer>, u64)>,
    /// Numbers of the descriptor chains that the attacker has yet to send.
    left: VecDeque<usize>,
    in_flight: usize,
    answered: usize,
    stopped: bool,
}

fn noise(rng: &mut fastrand::Rng) -> Page {
    let mut page = [0; PAGE_SIZE];
    rng.fill(&mut page);
    page
}

/// Returns a page of eight different letters in random order, which zstd compresses and lz4 does
/// not.
fn dense(rng: &mut fastrand::Rng) -> Page {
    let mut page = noise(rng);
    page.iter_mut()
        .for_each(|byte| *byte = b"etaoinsh"[usize::from(*byte % 8)]);
    page
}

impl Attacker {
    fn new(attack: Attack) -> Result<Attacker, String> {
        let config = GuestConfig {
            name: "attacker".into(),
            ram: vec![RamRegion {
                start: 0,
                size_bytes: 16 << 20,
            }],
            request_queues: 1,
            slots: 1,
            ..GuestConfig::default()
        };
        let guest = FakeGuest::new(config)
            .map_err(|e| format!("cannot allocate the memory of a guest: {e}"))?;
        Ok(Attacker {
            guest,
            attack,
            chains: Vec::new(),
            left: VecDeque::new(),
            in_flight: 0,
            answered: 0,
            stopped: false,
        })
    }

    fn connect(&mut self, stream: UnixStream) -> Result<(), String> {
        let fault = |error: tmem_model::GuestError| error.to_string();
        self.guest.connect_stream(stream).map_err(fault)?;
        self.guest.start().map_err(fault)?;
        let create = Request::PoolCreate {
            pool: POOL,
            flags: 0,
        };
        self.guest
            .submit(0, create)
            .ok_or("the queue has no room for a request")?;
        self.guest.wait(TIMEOUT).map_err(fault)?;
        self.build();
        Ok(())
    }

    fn header(&self, kind: u16, count: usize, pool: u32) -> Vec<u8> {
        let req = wire::Req {
            generation: self.guest.generation().into(),
            r#type: kind.into(),
            count: (count as u16).into(),
            pool: pool.into(),
            retain: 0.into(),
        };
        req.as_bytes().to_vec()
    }

    /// Returns the header and metadata of the attack's request number `nth`, without its pages.
    fn request(&self, nth: usize) -> Vec<u8> {
        let first = nth as u64;
        let range = |object: u64, index: u64, nr_pages: u64| wire::Range {
            object: object.into(),
            index: index.into(),
            nr_pages: nr_pages.into(),
        };
        let get = |object: u64, index: u64| wire::Get {
            object: object.into(),
            index: index.into(),
        };
        let parts = match self.attack {
            Attack::FlushRanges => {
                let range = range(1, first * RANGE_PAGES, RANGE_PAGES);
                [self.header(wire::T_FLUSH, 1, POOL), range.as_bytes().into()]
            }
            Attack::FlushEmptyRanges => {
                let ranges = vec![range(9, 0, 1 << 20); BATCH];
                let head = self.header(wire::T_FLUSH, BATCH, POOL);
                [head, ranges.as_bytes().into()]
            }
            Attack::FlushObjects => {
                let objects = first * BATCH as u64..(first + 1) * BATCH as u64;
                let ranges: Vec<_> = objects.map(|nth| range(1 + nth, 0, wire::TO_END)).collect();
                let head = self.header(wire::T_FLUSH, BATCH, POOL);
                [head, ranges.as_bytes().into()]
            }
            Attack::GetDense | Attack::Descriptors => {
                let count = match self.attack {
                    Attack::GetDense => BATCH,
                    _ => 1,
                };
                let index = first * BATCH as u64;
                let mut body = get(1, index).as_bytes().to_vec();
                (0..count as u64).for_each(|nth| body.extend((index + nth + 1).to_le_bytes()));
                [self.header(wire::T_GET, count, POOL), body]
            }
            Attack::PutNoise => {
                let page = |nth: u64| wire::PutPage {
                    object: 1.into(),
                    index: (first * BATCH as u64 + nth).into(),
                    cookie: 1.into(),
                    flags: 0.into(),
                    reserved: 0.into(),
                };
                let pages: Vec<_> = (0..BATCH as u64).map(page).collect();
                let head = self.header(wire::T_PUT, BATCH, POOL);
                [head, pages.as_bytes().into()]
            }
            Attack::Pools if nth.is_multiple_of(2) => {
                [self.header(wire::T_POOL_CREATE, 0, 2), vec![0; 8]]
            }
            Attack::Pools => [self.header(wire::T_POOL_DESTROY, 0, 2), Vec::new()],
        };
        parts.concat()
    }

    fn build(&mut self) {
        let ram = self.guest.ram().clone();
        let data = ram.alloc(BATCH as u64);
        let mut rng = fastrand::Rng::with_seed(1);
        for nth in 0..BATCH as u64 {
            ram.write(data + nth * PAGE, &noise(&mut rng));
        }
        let buffer = |addr, len: usize, writable| Buffer {
            addr,
            len: len as u32,
            writable,
        };
        for nth in 0..self.attack.chains() {
            let request = self.request(nth);
            let (at, answer, table) = (ram.alloc(1), ram.alloc(2), ram.alloc(5));
            ram.write(at, &request);
            let answered = size_of::<wire::Resp>();
            let results = answered + BATCH * size_of::<wire::GetPage>();
            let mut chain = vec![buffer(at, request.len(), false)];
            match self.attack {
                Attack::GetDense => {
                    chain.push(buffer(answer, results, true));
                    chain.push(buffer(data, BATCH * PAGE_SIZE, true));
                }
                Attack::PutNoise => {
                    chain.push(buffer(data, BATCH * PAGE_SIZE, false));
                    chain.push(buffer(answer, answered + BATCH, true));
                }
                Attack::Descriptors => {
                    chain.clear();
                    let bytes = 0..request.len() as u64;
                    chain.extend(bytes.map(|byte| buffer(at + byte, 1, false)));
                    let room = answered + size_of::<wire::GetPage>() + PAGE_SIZE;
                    for from in (0..room).step_by(5) {
                        chain.push(buffer(answer + from as u64, 5.min(room - from), true));
                    }
                }
                _ => chain.push(buffer(answer, answered, true)),
            }
            self.chains.push((chain, table));
        }
    }

    fn begin(&mut self) {
        (self.stopped, self.answered) = (false, 0);
        self.left.extend(0..self.chains.len());
    }

    /// Takes the answers that have arrived, and sends as many of the descriptor chains in `left` as
    /// fit into the ring.
    fn exchange(&mut self) -> Result<(), String> {
        let queue = self.attack.queue();
        loop {
            let used = self.guest.ring_mut(queue).pop_used();
            let Some(used) = used.map_err(|e| e.to_string())? else {
                break;
            };
            self.in_flight -= 1;
            self.answered += 1;
            if self.attack.is_endless() && !self.stopped {
                self.left.push_back(used.token as usize);
            }
        }
        let mut sent = false;
        while let Some(&nth) = self.left.front() {
            let (chain, table) = &self.chains[nth];
            let ring = self.guest.ring_mut(queue);
            if ring.add(chain, Some(*table), nth as u64).is_err() {
                break;
            }
            self.left.pop_front();
            self.in_flight += 1;
            sent = true;
        }
        if sent {
            self.guest.publish(queue);
        }
        Ok(())
    }

    fn is_busy(&self) -> bool {
        self.in_flight > 0
    }
}

/// Stores pages by calling the engine directly.
fn store(tenant: &Tenant, object: u64, index: u64, pages: &[Page]) -> Result<(), String> {
    let puts: Vec<_> = pages
        .iter()
        .zip(index..)
        .map(|(page, index)| Put {
            object,
            index,
            cookie: index + 1,
            workingset: false,
            page,
        })
        .collect();
    let mut results = vec![PutResult::Refused; puts.len()];
    let put = tenant.put(POOL, &puts, &mut results);
    let stored = results.iter().all(|result| *result == PutResult::Stored);
    match put.is_ok() && stored {
        true => Ok(()),
        false => Err("the engine refused a put while the benchmark filled the pool".into()),
    }
}

/// A victim, an attacker and the daemon that serves both.
struct Rig {
    victim: Guest,
    attacker: Attacker,
    tenant: Tenant,
    host: BenchDaemon,
    _path: Path,
    now_ns: u64,
}

impl Rig {
    fn new(attack: Attack, event_loop: EventLoop) -> Result<Rig, String> {
        let host = BenchDaemon::new(POOL_BYTES);
        let path = host.serve(event_loop, POLL_MAX, SERVER)?;
        let mut rng = fastrand::Rng::with_seed(2);
        let pages: Vec<Page> = (0..VICTIM_PAGES).map(|_| dense(&mut rng)).collect();
        let mut victim = Guest::new("victim", pages.iter(), 1)?;
        let quota = Quota {
            reserve_bytes: POOL_BYTES / 4,
            limit_bytes: None,
            weight: 100,
        };
        host.connect_as(&path, "victim", None, quota, &mut victim)?;
        let mut attacker = Attacker::new(attack)?;
        let tenant = host.connect_by(&path, "attacker", None, quota, |stream| {
            attacker.connect(stream)
        })?;
        Ok(Rig {
            victim,
            attacker,
            tenant,
            host,
            _path: path,
            now_ns: 0,
        })
    }

    fn maintain_all(&mut self) {
        while self.host.daemon.maintain(self.now_ns, 4096) {}
    }

    /// Stores the pages that the attack's requests need. The benchmark calls this function before
    /// each round, because the requests of some attacks remove the pages.
    fn stock(&mut self, round: usize) -> Result<(), String> {
        let mut rng = fastrand::Rng::with_seed(round as u64);
        match self.attacker.attack {
            Attack::FlushRanges => {
                let pages = [[7; PAGE_SIZE]; BATCH];
                for index in (0..CHAINS as u64 * RANGE_PAGES).step_by(BATCH) {
                    store(&self.tenant, 1, index, &pages)?;
                    self.maintain_all();
                }
            }
            Attack::FlushObjects => {
                for object in 0..(FEW_CHAINS * BATCH) as u64 {
                    let pages: Vec<_> = (0..OBJECT_PAGES).map(|_| dense(&mut rng)).collect();
                    store(&self.tenant, 1 + object, 0, &pages)?;
                    self.maintain_all();
                }
            }
            Attack::GetDense => {
                for index in (0..(FEW_CHAINS * BATCH) as u64).step_by(BATCH) {
                    let pages: Vec<_> = (0..BATCH).map(|_| dense(&mut rng)).collect();
                    store(&self.tenant, 1, index, &pages)?;
                    self.maintain_all();
                }
                for _ in 0..4 {
                    self.now_ns += COLD_NS;
                    self.maintain_all();
                }
            }
            // Put pages whose keys the engine's estimator of hits samples. The requests of these
            // attacks make the estimator walk over all sampled keys.
            Attack::FlushEmptyRanges | Attack::Pools if round == 0 => {
                let pages = [[7; PAGE_SIZE]; BATCH];
                for index in (0..1024).step_by(BATCH) {
                    store(&self.tenant, 1, index, &pages)?;
                }
                self.maintain_all();
            }
            _ => {}
        }
        Ok(())
    }

    /// Gets the victim's pages one by one, and returns the times in µs. With `beside`, measures
    /// while the attack runs, until the attack ends or [`ATTACK`] has passed. Without it, measures
    /// without an attack until the victim has got each page once.
    fn measure_times(&mut self, beside: bool) -> Result<Vec<f64>, String> {
        let runs: Vec<Run> = (0..VICTIM_PAGES / BATCH)
            .map(|nth| Run {
                index: nth * BATCH,
                pages: BATCH,
            })
            .collect();
        // Put the pages that the gets of the previous measurement have removed from the pool.
        self.victim.run_all(&runs, true)?;
        self.maintain_all();
        let mut times = Vec::new();
        let mut begun = Instant::now();
        if beside {
            self.attacker.begin();
            // Wait until the worker has answered a chain of the attacker. From then on the worker
            // is busy.
            while self.attacker.answered == 0 {
                self.attacker.exchange()?;
                if begun.elapsed() > TIMEOUT {
                    return Err("requests of the attacker guest were not answered in time".into());
                }
            }
            begun = Instant::now();
        }
        for index in 0..VICTIM_PAGES {
            if beside && (!self.attacker.is_busy() || begun.elapsed() > ATTACK) {
                break;
            }
            let sent = Instant::now();
            if !self.victim.get(Run { index, pages: 1 }, 0) {
                return Err(
                    "the victim guest cannot send its get: another get is in flight".into(),
                );
            }
            while self.victim.answer()?.is_none() {
                if beside {
                    self.attacker.exchange()?;
                }
                if sent.elapsed() > TIMEOUT {
                    return Err("a get of the victim guest was not answered in time".into());
                }
            }
            times.push(sent.elapsed().as_secs_f64() * 1e6);
        }
        self.attacker.stopped = true;
        while self.attacker.is_busy() || !self.attacker.left.is_empty() {
            self.attacker.exchange()?;
            if begun.elapsed() > TIMEOUT {
                return Err("requests of the attacker guest were not answered in time".into());
            }
        }
        self.maintain_all();
        Ok(times)
    }
}

/// Measures the victim's gets with each kind of attack.
///
/// # Errors
/// The daemon refuses a connection or a message, or a request is not answered.
pub fn measure(event_loop: EventLoop) -> Result<Vec<Waits>, String> {
    pin(None, CLIENT)?;
    let mut all = Vec::new();
    for attack in Attack::ALL {
        progress(attack.name());
        let mut rig = Rig::new(attack, event_loop)?;
        let mut times = [Vec::new(), Vec::new()];
        for round in 0..ROUNDS {
            rig.stock(round)?;
            let first = round % 2;
            for arm in [first, 1 - first] {
                times[arm].extend(rig.measure_times(arm == 1)?);
            }
        }
        let [alone, beside] = times;
        all.push(Waits {
            name: attack.name(),
            alone,
            beside,
        });
    }
    Ok(all)
}
