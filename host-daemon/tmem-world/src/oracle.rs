// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The oracle of one guest: it checks the answers of the guest's device and the requests of the
//! model of its driver.
//!
//! Answers are judged by [`tmem_sim::Model`] when the device publishes them, whatever the guest
//! does with the answers later. The oracle knows the whole history and is not part of the guest, so
//! that a rollback does not affect it. It never passes information to the guest.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};

use tmem_sim::{Answer, Content, Done, Key, Model, Request};
use virtio_tmem as wire;

use crate::content;
use crate::mutation::Mutation;
use crate::transport::{Flight, Transport};

/// A broken rule, which the oracle found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Name of the rule.
    pub rule: &'static str,
    /// Description of the failure.
    pub what: String,
}

/// Number of puts that the oracle remembers after the device had to drop them.
const ENDED: usize = 12;

/// State of a put, as a correct driver knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// The put was sent, and is stored or not answered yet.
    Sent,
    /// The device answered that it does not hold the page.
    Refused,
    /// A get has requested the page.
    Asked,
    /// The driver has taken the answer that the device retains the page.
    Retained,
    /// The driver has taken the answer that the device does not have the page.
    Gone,
}

/// A page that a broken device holds although it must not.
pub struct Kept {
    /// Key of the page.
    pub key: Key,
    /// Cookie of the page.
    pub cookie: u64,
    /// Contents of the page.
    pub content: Content,
}

/// The oracle of one guest.
pub struct Oracle {
    guest: usize,
    mutation: Option<Mutation>,
    /// Whether `VIRTIO_TMEM_F_RETAIN` is negotiated.
    retain: bool,
    /// Answers that the device may give.
    pub model: Model,
    generations: HashSet<u64>,
    /// Generation that requests must carry now; 0 without a back end.
    current: u64,
    /// Used index of each queue up to which answers were judged.
    seen: Vec<u16>,
    /// Ids of the pools of this generation.
    pools: BTreeSet<u32>,
    /// Puts of this generation, by key and cookie.
    puts: BTreeMap<(Key, u64), (Fate, Content)>,
    /// Cookies of this generation.
    cookies: HashSet<u64>,
    /// The last puts that the device had to drop.
    ended: VecDeque<(Key, u64)>,
    /// Queue of each chunk of pages in this generation.
    chunks: BTreeMap<(u32, u64, u64), usize>,
    /// The first rule that was broken.
    pub failure: Option<Failure>,
}

impl Oracle {
    /// Creates the oracle of a guest with `queues` queues.
    pub fn new(guest: usize, queues: usize, retain: bool, mutation: Option<Mutation>) -> Oracle {
        Oracle {
            guest,
            mutation,
            retain,
            model: Model::new(&format!("g{guest}")),
            generations: HashSet::new(),
            current: 0,
            seen: vec![0; queues],
            pools: BTreeSet::new(),
            puts: BTreeMap::new(),
            cookies: HashSet::new(),
            ended: VecDeque::new(),
            chunks: BTreeMap::new(),
            failure: None,
        }
    }

    /// Records a failure, unless an earlier one is recorded.
    pub fn fail(&mut self, rule: &'static str, what: String) {
        let what = format!("g{}: {what}", self.guest);
        self.failure.get_or_insert(Failure { rule, what });
    }

    /// Records the generation that the device reports, at the start of a connection and after a
    /// reset.
    pub fn begin(&mut self, generation: u64) {
        self.current = generation;
        if self.mutation == Some(Mutation::GenerationKept) && generation == self.model.generation()
        {
            return;
        }
        if !self.generations.insert(generation) {
            self.fail(
                "generation",
                format!("generation {generation:#x} was used before"),
            );
        }
        if let Err(violation) = self.model.begin(generation) {
            self.fail("generation", violation.to_string());
        }
        self.pools.clear();
        self.puts.clear();
        self.cookies.clear();
        self.ended.clear();
        self.chunks.clear();
    }

    /// Records that the back end is lost. Until the next back end starts, there is no generation.
    pub fn lost(&mut self) {
        self.current = 0;
    }

    /// Returns whether the device accepts requests of this generation.
    pub fn is_current(&self, generation: u64) -> bool {
        generation == self.current
    }

    /// Records that the rings were emptied, or were restored from a snapshot.
    pub fn rings_changed(&mut self, transport: &Transport) {
        let used = transport.rings.iter().map(|r| r.used_idx_in_memory());
        self.seen = used.collect();
    }

    /// Returns the used index of a queue up to which answers were judged.
    pub fn seen(&self, queue: usize) -> u16 {
        self.seen[queue]
    }

    /// Checks that no answer was published, because there is no back end.
    pub fn nothing_new(&mut self, transport: &Transport) {
        for (queue, ring) in transport.rings.iter().enumerate() {
            if ring.used_idx_in_memory() != self.seen[queue] {
                let what = format!("queue {queue}: an answer after the end of the connection");
                self.fail("hang-up", what);
            }
        }
    }

    /// Returns the key and cookie of a page that was put in this generation, often of one that the
    /// device has just had to drop.
    pub fn any_put(&self, pick: u64) -> Option<(Key, u64)> {
        let (ended, pick) = (!pick.is_multiple_of(4), pick / 4);
        if ended && !self.ended.is_empty() {
            return self.ended.get(pick as usize % self.ended.len()).copied();
        }
        let count = self.puts.len() as u64;
        let nth = pick.checked_rem(count)? as usize;
        self.puts.keys().nth(nth).copied()
    }

    /// Checks a request that the driver sends. `probe` is true if the request deliberately names a
    /// page that the device must not return.
    pub fn sent(&mut self, queue: usize, flight: &Flight, transport: &Transport, probe: bool) {
        let busy = transport.flight.iter().flatten();
        let busy: BTreeSet<u64> = busy.flat_map(Flight::pages).collect();
        if let Some(page) = flight.pages().find(|page| busy.contains(page)) {
            let what = format!("{:?} uses the device's page {page:#x}", flight.tag);
            self.fail("buffers", what);
        }
        let refers = matches!(&*flight.request, Request::Ref { .. });
        if !self.retain && (refers || flight.request.retain() != 0) {
            let what = format!("{:?} needs a feature that is not negotiated", flight.tag);
            self.fail("feature", what);
        }
        let current = self.is_current(flight.generation);
        if flight.generation == 0 {
            self.fail("generation", "a request without a generation".into());
        }
        if !current || probe {
            // The device must answer STALE, or the request is a deliberate probe.
            return;
        }
        if let Request::PoolCreate { pool, .. } = &*flight.request {
            if !self.pools.insert(*pool) {
                self.fail("ids", format!("pool {pool} was used before"));
            }
            return;
        }
        let pool = flight.request.pool();
        if pool != 0 && !self.pools.contains(&pool) {
            self.fail(
                "generation",
                format!("pool {pool} is of another generation"),
            );
        }
        match &*flight.request {
            Request::Put { pages, .. } => {
                for page in pages {
                    self.chunk(queue, pool, page.object, page.index);
                    // Only the repetition of a cookie is a failure. Cookies grow in the order of
                    // puts, but the feeder sends the puts of each queue separately, so not in that
                    // order.
                    if !self.cookies.insert(page.cookie) {
                        self.fail("cookie", format!("{:#x} was used before", page.cookie));
                    }
                }
            }
            Request::Get {
                object,
                index,
                cookies,
                ..
            } => {
                for (index, cookie) in (*index..).zip(cookies) {
                    let object = *object;
                    let key = Key {
                        pool,
                        object,
                        index,
                    };
                    self.asked(queue, key, *cookie);
                }
            }
            Request::Ref { pages, .. } => {
                for page in pages {
                    let key = Key {
                        pool,
                        object: page.object,
                        index: page.index,
                    };
                    self.chunk(queue, pool, page.object, page.index);
                    if !self.puts.contains_key(&(key, page.cookie)) {
                        let what = format!("{key:?} was not put in this one, but referred to");
                        self.fail("generation", what);
                    }
                }
            }
            _ => {}
        }
    }

    /// Records that the driver has taken the answer to a get or REF of its own.
    pub fn taken(&mut self, flight: &Flight, answer: &Answer) {
        if !self.is_current(flight.generation) {
            return;
        }
        let key = |pool, object, index| Key {
            pool,
            object,
            index,
        };
        match &*flight.request {
            Request::Get {
                pool,
                object,
                index,
                cookies,
                ..
            } => {
                for (i, (cookie, page)) in cookies.iter().zip(&answer.pages).enumerate() {
                    let put = (key(*pool, *object, index + i as u64), *cookie);
                    if page.flags & wire::GET_RETAINED != 0
                        && let Some((fate @ Fate::Asked, _)) = self.puts.get_mut(&put)
                    {
                        *fate = Fate::Retained;
                    }
                }
            }
            Request::Ref { pool, pages } => {
                for (page, answer) in pages.iter().zip(&answer.pages) {
                    let put = (key(*pool, page.object, page.index), page.cookie);
                    if answer.result == wire::P_GONE
                        && let Some((fate, _)) = self.puts.get_mut(&put)
                    {
                        *fate = Fate::Gone;
                    }
                }
            }
            _ => {}
        }
    }

    /// Returns the contents of a page that was put in this generation.
    pub fn content(&self, key: Key, cookie: u64) -> Option<Content> {
        self.puts.get(&(key, cookie)).map(|(_, content)| *content)
    }

    /// Records the contents of a put that is sent.
    pub fn putting(&mut self, key: Key, cookie: u64, content: Content) {
        self.puts.insert((key, cookie), (Fate::Sent, content));
    }

    fn asked(&mut self, queue: usize, key: Key, cookie: u64) {
        if cookie == 0 {
            return;
        }
        self.chunk(queue, key.pool, key.object, key.index);
        let fate = self.puts.get_mut(&(key, cookie));
        match fate.map(|(fate, _)| std::mem::replace(fate, Fate::Asked)) {
            Some(Fate::Sent | Fate::Retained) => {}
            Some(Fate::Gone) => self.fail("gone", format!("{key:?} is asked for")),
            Some(Fate::Refused) => self.fail("refused", format!("{key:?} is asked for")),
            Some(Fate::Asked) => self.fail("exclusive", format!("{key:?} is asked for twice")),
            None => self.fail("generation", format!("{key:?} was not put in this one")),
        }
    }

    fn chunk(&mut self, queue: usize, pool: u32, object: u64, index: u64) {
        let chunk = (pool, object, index >> wire::CHUNK_SHIFT);
        let first = *self.chunks.entry(chunk).or_insert(queue);
        if first != queue {
            let what = format!("{chunk:?} goes to queue {first} and to {queue}");
            self.fail("order", what);
        }
    }

    /// Judges the answers that the device has published since the last call. Returns the pages that
    /// a broken device keeps.
    pub fn observe(&mut self, transport: &Transport, queue_of: impl Fn(Key) -> usize) -> Vec<Kept> {
        let mut kept = Vec::new();
        for queue in 0..transport.queues() {
            let ring = &transport.rings[queue];
            while self.seen[queue] != ring.used_idx_in_memory() {
                let place = usize::from(self.seen[queue].wrapping_sub(ring.used_idx()));
                self.seen[queue] = self.seen[queue].wrapping_add(1);
                let used = transport.used(queue, place);
                let flight = transport.flight[queue].get(place);
                let (Some((_, used_bytes)), Some(flight)) = (used, flight) else {
                    self.fail("order", format!("queue {queue}: an answer to nothing"));
                    self.seen[queue] = ring.used_idx_in_memory();
                    break;
                };
                self.judge(queue, flight, used_bytes, transport, &queue_of, &mut kept);
            }
        }
        kept
    }

    fn judge(
        &mut self,
        queue: usize,
        flight: &Flight,
        used_bytes: u32,
        transport: &Transport,
        queue_of: &impl Fn(Key) -> usize,
        kept: &mut Vec<Kept>,
    ) {
        let done = Done {
            token: 0,
            queue,
            request: (*flight.request).clone(),
            generation: flight.generation,
            answer: flight.answer(transport.ram(), used_bytes),
        };
        let keeps = matches!(
            (self.mutation, &done.request),
            (Some(Mutation::HitKeepsPage), Request::Get { .. })
                | (Some(Mutation::FlushIgnored), Request::Flush { .. })
                | (Some(Mutation::RefusedLeavesOld), Request::Put { .. })
                | (Some(Mutation::GoneKeepsPage), Request::Ref { .. })
        );
        let held = |model: &Model, (key, cookie): &(Key, u64)| model.cookie(*key) == Some(*cookie);
        let before = self.held_of(&done.request);
        if let Err(violation) = self.model.judge(&flight.asked, &done, queue_of) {
            self.fail("device", violation.to_string());
        }
        if let Request::Put { pool, pages } = &done.request
            && done.generation == self.model.generation()
        {
            for (page, answer) in pages.iter().zip(&done.answer.pages) {
                let key = Key {
                    pool: *pool,
                    object: page.object,
                    index: page.index,
                };
                if answer.result == wire::P_REFUSED
                    && let Some((fate, _)) = self.puts.get_mut(&(key, page.cookie))
                {
                    *fate = Fate::Refused;
                }
            }
        }
        for put in before {
            if held(&self.model, &put) {
                continue;
            }
            self.ended.push_front(put);
            self.ended.truncate(ENDED);
            // A newer put for the key would replace the page.
            if keeps && self.model.cookie(put.0).is_none() {
                let (key, cookie) = put;
                let Some(&(_, content)) = self.puts.get(&put) else {
                    continue;
                };
                kept.push(Kept {
                    key,
                    cookie,
                    content,
                });
            }
        }
    }

    /// Returns the pages that the device holds and must drop with this request.
    fn held_of(&self, request: &Request) -> Vec<(Key, u64)> {
        let with_cookie = |key: Key| Some((key, self.model.cookie(key)?));
        match request {
            Request::Put { pool, pages } => {
                let keys = pages.iter().map(|page| Key {
                    pool: *pool,
                    object: page.object,
                    index: page.index,
                });
                keys.filter_map(with_cookie).collect()
            }
            Request::Get {
                pool,
                object,
                index,
                cookies,
                ..
            } => {
                let keys = (*index..).take(cookies.len()).map(|index| Key {
                    pool: *pool,
                    object: *object,
                    index,
                });
                keys.filter_map(with_cookie).collect()
            }
            Request::Ref { pool, pages } => {
                let keys = pages.iter().map(|page| Key {
                    pool: *pool,
                    object: page.object,
                    index: page.index,
                });
                keys.filter_map(with_cookie).collect()
            }
            Request::Flush { .. } => {
                let puts = self.puts.keys().copied();
                puts.filter(|put| with_cookie(put.0) == Some(*put))
                    .collect()
            }
            _ => Vec::new(),
        }
    }

    /// Searches the memory of this guest for pages of other guests.
    pub fn search_for_foreign_pages(&mut self, transport: &Transport) {
        for (addr, word) in transport.first_words() {
            if let Some(owner) = content::owner(word)
                && owner != self.guest
            {
                self.fail("isolation", format!("a page of g{owner} lies at {addr:#x}"));
            }
        }
    }
}
