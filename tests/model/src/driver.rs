// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A driver that follows the specification. Like the kernel module, it has an index with cookies
//! and a generation, and uses one queue for each chunk (256 adjacent pages of an object). It sends
//! random requests from a seed, and checks every answer.
//!
//! The driver also requests pages that it must not get: pages by old cookies, pages that were
//! already returned, and pages that it never put. At most `window` requests are in flight.
//!
//! This driver has neither a page cache nor deadlines: it generates requests. The simulator's
//! `DriverModel` models how guest-driver/ stores, evicts and reads pages. The two share requests,
//! rings, memory, the oracle and the choice of the queue.
//!
//! If the guest has accepted `VIRTIO_TMEM_F_RETAIN`, gets allow the device to retain some of their
//! pages. The driver then sends references (REF) to retained pages. It also sends references that
//! the device must answer with GONE: to pages by old cookies, and to pages that it never put.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::time::Duration;

use virtio_tmem as wire;

use crate::content::Content;
use crate::frontend::{Done, F_RETAIN, FakeGuest, GuestConfig, GuestError};
use crate::model::{Model, SentRequest, Violation};
use crate::requests::{Key, LATENCIES_BYTES, PutPage, REPORT_BYTES, Range, RefPage, Request};

/// Time after which a missing answer counts as lost. It is long because tests may run on a busy
/// machine.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);

/// Parameters of the random requests of a driver.
#[derive(Clone, Debug)]
pub struct DriverConfig {
    /// Seed of all random choices.
    pub seed: u64,
    /// Largest number of requests that the driver has in flight.
    pub window: usize,
    /// Largest number of pages that a request names, up to 64.
    pub batch_max: usize,
    /// Number of objects in the pool from which requests choose.
    pub objects: u64,
    /// Number of pages in each object. An object with more than 256 pages has several chunks and so
    /// uses several queues.
    pub object_pages: u64,
    /// Number of page contents from which all guests choose, so that guests have equal pages.
    pub shared_contents: u64,
}

impl Default for DriverConfig {
    fn default() -> Self {
        Self {
            seed: 1,
            window: 8,
            batch_max: 12,
            objects: 6,
            object_pages: 600,
            shared_contents: 64,
        }
    }
}

/// Reason why a step of the driver failed.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The connection, a vhost-user message or a ring failed, or an answer was late.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The device gave an answer that the oracle (the model of the device) forbids.
    #[error("VIOLATION: {0}")]
    Violation(#[from] Violation),
}

/// A guest that sends random requests, with the oracle that checks the answers.
pub struct Driver {
    /// The fake guest with its rings and its connection to the daemon.
    pub guest: FakeGuest,
    /// The oracle, which decides which answers the device may give.
    pub model: Model,
    config: DriverConfig,
    rng: fastrand::Rng,
    /// Records of the requests in flight, by their tokens.
    in_flight: HashMap<u64, SentRequest>,
    index: HashMap<Key, u64>,
    /// Cookies of the pages that the device retains. A real driver has these pages in its page
    /// cache.
    retained: BTreeMap<Key, u64>,
    /// Cookies that are no longer valid. The driver uses them for gets that must miss.
    old: Vec<(Key, u64)>,
    cookie_next: u64,
    pool: u32,
    pool_next: u32,
    requests: u64,
}

impl Driver {
    /// Creates a driver that is not connected to a device.
    ///
    /// # Errors
    /// When the kernel refuses memory or file descriptors.
    pub fn new(guest: GuestConfig, config: DriverConfig) -> std::io::Result<Self> {
        let mut rng = fastrand::Rng::with_seed(config.seed);
        Ok(Self {
            model: Model::new(&guest.name),
            guest: FakeGuest::new(guest)?,
            cookie_next: rng.u64(1..u64::MAX / 2),
            rng,
            config,
            in_flight: HashMap::new(),
            index: HashMap::new(),
            retained: BTreeMap::new(),
            old: Vec::new(),
            pool: 0,
            pool_next: 1,
            requests: 0,
        })
    }

    /// Returns the number of requests that the driver has sent.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests
    }

    /// Returns the id of the pool that the random requests use.
    #[must_use]
    pub fn pool(&self) -> u32 {
        self.pool
    }

    /// Returns the driver's index: the cookie of each page that the driver would request from the
    /// device, by the page's key.
    #[must_use]
    pub fn index(&self) -> &HashMap<Key, u64> {
        &self.index
    }

    /// Returns the queue for a page. All requests for pages of one chunk use the same queue.
    #[must_use]
    pub fn queue_of(&self, object: u64, index: u64) -> usize {
        queue_of(self.guest.num_queues(), object, index)
    }

    /// Connects to the daemon, starts the device and creates the pool.
    ///
    /// # Errors
    /// Errors of [`FakeGuest::connect`] and [`Self::start`].
    pub fn connect(&mut self, socket: &Path) -> Result<(), DriverError> {
        self.guest.connect(socket)?;
        self.start()
    }

    /// Starts the connected device and creates the pool.
    ///
    /// # Errors
    /// Errors of [`FakeGuest::start`], [`Self::new_generation`] and [`Self::create_pool`].
    pub fn start(&mut self) -> Result<(), DriverError> {
        self.guest.start()?;
        self.new_generation()?;
        self.create_pool()
    }

    /// Takes over the generation that the guest has read from the configuration. If it differs from
    /// the previous generation, the driver forgets all pages.
    ///
    /// # Errors
    /// The generation is 0, so no back end is connected, or the oracle forbids the generation.
    pub fn new_generation(&mut self) -> Result<(), DriverError> {
        let generation = self.guest.generation();
        if generation == self.model.generation() && generation != 0 {
            return Ok(());
        }
        self.model.begin(generation)?;
        self.index.clear();
        self.retained.clear();
        self.old.clear();
        Ok(())
    }

    /// Creates a pool with a new id, which all later requests use.
    ///
    /// # Errors
    /// Errors of [`Self::settle`].
    pub fn create_pool(&mut self) -> Result<(), DriverError> {
        // Wait for all answers, because requests for the old pool must not be in flight while the
        // new pool is created.
        self.settle()?;
        self.pool = self.pool_next;
        self.pool_next += 1;
        self.send(
            0,
            Request::PoolCreate {
                pool: self.pool,
                flags: 0,
            },
            vec![],
        );
        self.settle()
    }

    /// Resets the device as a reboot does, starts it again and creates a pool. The rebooted kernel
    /// numbers its pools from 1 again.
    ///
    /// # Errors
    /// Errors of [`FakeGuest::reset`] and [`Self::start`].
    pub fn reboot(&mut self) -> Result<(), DriverError> {
        self.guest.reset()?;
        self.in_flight.clear();
        self.pool_next = 1;
        self.start()
    }

    /// Handles the loss of the daemon: takes the answers that the daemon has written, and drops the
    /// connection. Requests in flight stay in the rings. The next connection sends them again.
    ///
    /// # Errors
    /// Errors of [`Self::collect`].
    pub fn lose_backend(&mut self) -> Result<(), DriverError> {
        self.collect()?;
        self.guest.disconnect();
        Ok(())
    }

    /// Closes the connection while requests are in flight. They stay in the rings. The next
    /// connection sends them again.
    ///
    /// # Errors
    /// Errors of [`FakeGuest::hang_up`] and [`Self::collect`].
    pub fn hang_up(&mut self) -> Result<(), DriverError> {
        self.guest.hang_up()?;
        self.collect()?;
        self.guest.disconnect();
        Ok(())
    }

    /// Sends one request and records what is needed to check its answer. Returns false if the ring
    /// is full or no slot (memory for a request) is free.
    pub fn send(&mut self, queue: usize, request: Request, contents: Vec<Content>) -> bool {
        match self.guest.submit(queue, request) {
            Some(token) => {
                let record = self.model.record_request(contents);
                self.in_flight.insert(token, record);
                self.requests += 1;
                true
            }
            None => false,
        }
    }

    /// Takes the answers that have arrived and checks them. Returns whether there was an answer.
    ///
    /// # Errors
    /// The oracle forbids an answer, or a ring is broken.
    pub fn collect(&mut self) -> Result<bool, DriverError> {
        let done = self.guest.poll_all()?;
        self.judge(&done)?;
        Ok(!done.is_empty())
    }

    /// Waits for the answers to all requests in flight, and checks them.
    ///
    /// # Errors
    /// The oracle forbids an answer, a ring is broken, or an answer is late.
    pub fn settle(&mut self) -> Result<(), DriverError> {
        while self.guest.in_flight() > 0 {
            let done = self.guest.wait(ANSWER_TIMEOUT)?;
            self.judge(&done)?;
        }
        Ok(())
    }

    fn judge(&mut self, done: &[Done]) -> Result<(), DriverError> {
        let queues = self.guest.num_queues();
        for d in done {
            let record = self
                .in_flight
                .remove(&d.token)
                .expect("an answered request is not in the list of sent requests");
            self.model
                .judge(&record, d, |k| queue_of(queues, k.object, k.index))?;
            self.update_index(d);
        }
        Ok(())
    }

    /// Updates the index and the list of retained pages after an answer. The index loses a page
    /// whose PUT was not stored and a page whose REF was not held, and gets a page whose REF was
    /// held. The list gets the pages that the device retained at a GET.
    fn update_index(&mut self, done: &Done) {
        for ((key, cookie), answer) in done.request.pages().into_iter().zip(&done.answer.pages) {
            match (&done.request, answer.result) {
                (Request::Put { .. }, wire::P_STORED) => {}
                (Request::Ref { .. }, wire::P_HELD) => {
                    self.index.entry(key).or_insert(cookie);
                }
                (Request::Put { .. } | Request::Ref { .. }, _)
                    if self.index.get(&key) == Some(&cookie) =>
                {
                    self.index.remove(&key);
                }
                // Do not record the page as retained if the driver has put it again since the get.
                (Request::Get { .. }, _)
                    if answer.flags & wire::GET_RETAINED != 0 && !self.index.contains_key(&key) =>
                {
                    self.retained.insert(key, cookie);
                }
                _ => {}
            }
        }
    }

    /// Returns a cookie that this driver has never used.
    pub fn new_cookie(&mut self) -> u64 {
        self.cookie_next += 1;
        self.cookie_next
    }

    fn new_content(&mut self, cookie: u64) -> Content {
        let shared = self.config.shared_contents;
        match self.rng.u8(..10) {
            0 => Content::SameFilled(self.rng.u64(..4)),
            1 => Content::SameFilled(cookie),
            2..=4 => Content::Text(self.rng.u64(..shared)),
            5 => Content::Noise(self.rng.u64(..shared)),
            6 | 7 => Content::Text(cookie ^ (self.config.seed << 40)),
            _ => Content::Noise(cookie ^ (self.config.seed << 40)),
        }
    }

    /// Does one random step: sends a request. While `window` requests are in flight, first waits
    /// for answers and checks them.
    ///
    /// # Errors
    /// The oracle forbids an answer, a ring is broken, or an answer is late.
    pub fn step(&mut self) -> Result<(), DriverError> {
        while self.guest.in_flight() >= self.config.window {
            let done = self.guest.wait(ANSWER_TIMEOUT)?;
            self.judge(&done)?;
        }
        let object = self.rng.u64(1..=self.config.objects);
        let start = self.rng.u64(..self.config.object_pages);
        let count = self.rng.u64(1..=self.config.batch_max as u64);
        // Do not let a batch cross the end of its chunk, because the next chunk may use another
        // queue.
        let chunk_end = (start | ((1 << wire::CHUNK_SHIFT) - 1)) + 1;
        let end = (start + count).min(chunk_end);
        let sent = match self.rng.u8(..100) {
            0..=44 => self.put(object, start, end),
            45..=74 => self.get(object, start, end),
            75..=84 if self.retains() => self.refer(object, start),
            75..=84 => self.get(object, start, end),
            85..=88 => self.get_old(),
            89..=96 => self.flush(object, start, end),
            97 => {
                let mut report = Box::new([0; REPORT_BYTES]);
                self.rng.fill(&mut *report);
                let state = self.rng.u32(..=wire::R_POISONED);
                report[4..8].copy_from_slice(&state.to_le_bytes());
                let mut latencies = Box::new([0; LATENCIES_BYTES]);
                self.rng.fill(&mut *latencies);
                let request = match self.rng.u8(..3) {
                    0 => Request::Report(report),
                    1 => Request::Latencies(latencies),
                    _ => Request::Generation,
                };
                self.send(wire::CONTROL_QUEUE, request, vec![])
            }
            98 => self.flush_object(object),
            _ => {
                let get = Request::Get {
                    pool: self.pool + 1,
                    object,
                    index: start,
                    cookies: vec![1; (end - start) as usize],
                    retain: self.retain_bits(end - start),
                };
                self.send(self.queue_of(object, start), get, vec![])
            }
        };
        if !sent {
            // The ring is full or no slot is free. Take answers, which free descriptors and slots.
            let done = self.guest.wait(ANSWER_TIMEOUT)?;
            self.judge(&done)?;
        }
        if self.rng.bool() {
            self.collect()?;
        }
        Ok(())
    }

    /// Puts the pages `start..end` of an object with new contents. Returns false if the ring is
    /// full or no slot (memory for a request) is free.
    pub fn put(&mut self, object: u64, start: u64, end: u64) -> bool {
        let mut pages = Vec::new();
        let mut contents = Vec::new();
        for index in start..end {
            let cookie = self.new_cookie();
            let content = self.new_content(cookie);
            let flags = u32::from(self.rng.bool()) * wire::PUT_WORKINGSET;
            pages.push(PutPage {
                object,
                index,
                cookie,
                flags,
                page: content.page(),
            });
            contents.push(content);
        }
        let pool = self.pool;
        let request = Request::Put { pool, pages };
        let named = request.pages();
        if !self.send(self.queue_of(object, start), request, contents) {
            return false;
        }
        for (key, cookie) in named {
            if let Some(old) = self.index.insert(key, cookie) {
                self.remember_old(key, old);
            }
            if let Some(old) = self.retained.remove(&key) {
                self.remember_old(key, old);
            }
        }
        true
    }

    fn retains(&self) -> bool {
        self.guest.accepted_features() & F_RETAIN != 0
    }

    /// Returns a random value for the field `retain` of a get of `pages` pages: no bit, some bits
    /// or all bits.
    fn retain_bits(&mut self, pages: u64) -> u64 {
        if !self.retains() {
            return 0;
        }
        let bits = match self.rng.u8(..4) {
            0 => 0,
            1 => self.rng.u64(..),
            _ => u64::MAX,
        };
        bits & u64::MAX >> (64 - pages)
    }

    /// Sends a REF to retained pages of a chunk, to a page that was replaced or removed, and to a
    /// page that was never put. Returns false if the ring is full or no slot (memory for a request)
    /// is free.
    fn refer(&mut self, object: u64, start: u64) -> bool {
        let pool = self.pool;
        let chunk = |key: &Key| (key.pool, key.object, key.index >> wire::CHUNK_SHIFT);
        let key = |index| Key {
            pool,
            object,
            index,
        };
        let first = start >> wire::CHUNK_SHIFT << wire::CHUNK_SHIFT;
        let range = key(first)..key(first + (1 << wire::CHUNK_SHIFT));
        let mut named: Vec<(Key, u64)> = self
            .retained
            .range(range)
            .map(|(key, cookie)| (*key, *cookie))
            .take(self.config.batch_max.saturating_sub(2).max(1))
            .collect();
        let old = self
            .old
            .iter()
            .find(|(old, _)| chunk(old) == chunk(&key(start)));
        named.extend(old.copied());
        if named.is_empty() || named.len() < self.config.batch_max {
            let never = self.cookie_next + (1 << 40);
            named.push((key(start), never));
        }
        let pages = named.iter().map(|(key, cookie)| RefPage {
            object: key.object,
            index: key.index,
            cookie: *cookie,
        });
        let pages = pages.collect();
        let queue = self.queue_of(object, start);
        if !self.send(queue, Request::Ref { pool, pages }, vec![]) {
            return false;
        }
        // In one of four cases, leave the pages in the list of retained pages, so that a later REF
        // names them again.
        if self.rng.u8(..4) > 0 {
            for (key, cookie) in named {
                if self.retained.get(&key) == Some(&cookie) {
                    self.retained.remove(&key);
                }
            }
        }
        true
    }

    /// Gets the pages `start..end` of an object. Requests pages in the index by their cookies, and
    /// other pages by a cookie that was never used. Returns false if the ring is full or no slot
    /// (memory for a request) is free.
    pub fn get(&mut self, object: u64, start: u64, end: u64) -> bool {
        let pool = self.pool;
        let never = self.cookie_next + (1 << 40);
        let key = |index| Key {
            pool,
            object,
            index,
        };
        let cookies = (start..end).map(|i| self.index.get(&key(i)).copied().unwrap_or(never));
        let get = Request::Get {
            pool,
            object,
            index: start,
            cookies: cookies.collect(),
            retain: self.retain_bits(end - start),
        };
        let named = get.pages();
        if !self.send(self.queue_of(object, start), get, vec![]) {
            return false;
        }
        for (key, _) in named {
            if let Some(old) = self.index.remove(&key) {
                self.remember_old(key, old);
            }
        }
        true
    }

    /// Gets a page by a cookie that is no longer valid for the page. The get must miss.
    fn get_old(&mut self) -> bool {
        if self.old.is_empty() {
            return true;
        }
        let (key, cookie) = self.old.swap_remove(self.rng.usize(..self.old.len()));
        let get = Request::Get {
            pool: key.pool,
            object: key.object,
            index: key.index,
            cookies: vec![cookie],
            retain: self.retain_bits(1),
        };
        self.send(self.queue_of(key.object, key.index), get, vec![])
    }

    fn remember_old(&mut self, key: Key, cookie: u64) {
        const OLD_MAX: usize = 512;
        if self.old.len() < OLD_MAX {
            self.old.push((key, cookie));
        } else {
            let at = self.rng.usize(..OLD_MAX);
            self.old[at] = (key, cookie);
        }
    }

    /// Flushes a range of pages of one chunk. Returns false if the ring is full or no slot (memory
    /// for a request) is free.
    pub fn flush(&mut self, object: u64, start: u64, end: u64) -> bool {
        let range = Range {
            object,
            index: start,
            nr_pages: end - start,
        };
        self.flush_range(self.queue_of(object, start), range)
    }

    /// Flushes a whole object, whose pages may use all queues. Returns false if the ring is full or
    /// no slot (memory for a request) is free.
    pub fn flush_object(&mut self, object: u64) -> bool {
        let range = Range {
            object,
            index: 0,
            nr_pages: wire::TO_END,
        };
        self.flush_range(self.queue_of(object, 0), range)
    }

    fn flush_range(&mut self, queue: usize, range: Range) -> bool {
        let pool = self.pool;
        let ranges = vec![range];
        if !self.send(queue, Request::Flush { pool, ranges }, vec![]) {
            return false;
        }
        let kept = |k: &Key| k.pool != pool || !range.contains(k.object, k.index);
        self.index.retain(|k, _| kept(k));
        self.retained.retain(|k, _| kept(k));
        true
    }

    /// Gets all pages of the pool that are in the index, and checks the answers. Returns the number
    /// of hits.
    ///
    /// # Errors
    /// Errors of [`FakeGuest::wait`] and [`Self::settle`].
    pub fn get_all(&mut self) -> Result<u64, DriverError> {
        let before = self.model.counts().hits;
        let pool = self.pool;
        let mut keys: BTreeSet<Key> = self
            .index
            .keys()
            .filter(|k| k.pool == pool)
            .copied()
            .collect();
        while let Some(first) = keys.pop_first() {
            let mut end = first.index + 1;
            while end - first.index < wire::BATCH_MAX as u64
                && end >> wire::CHUNK_SHIFT == first.index >> wire::CHUNK_SHIFT
                && keys.remove(&Key {
                    index: end,
                    ..first
                })
            {
                end += 1;
            }
            while !self.get(first.object, first.index, end) {
                let done = self.guest.wait(ANSWER_TIMEOUT)?;
                self.judge(&done)?;
            }
        }
        self.settle()?;
        Ok(self.model.counts().hits - before)
    }
}

/// Returns the queue for a page. `queues` is the number of queues, including the control queue. All
/// pages of a chunk use one queue; the specification lets the driver choose which one.
#[must_use]
pub fn queue_of(queues: usize, object: u64, index: u64) -> usize {
    let chunk = index >> wire::CHUNK_SHIFT;
    let hash = (object ^ chunk.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    1 + (hash >> 40) as usize % (queues - 1)
}
