// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The oracle of one guest. It checks the answers of the guest's device and the requests of the
//! model of its driver.
//!
//! [`tmem_model::Model`] judges the answers when the device publishes them, even if the guest never
//! takes them. The oracle knows the whole history and is not part of the guest, so that a rollback
//! of the guest does not affect it. It never passes information to the guest.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};

use tmem_model::{Answer, Content, Done, Key, Model, Request};
use virtio_tmem as wire;

use crate::content;
use crate::mutation::Mutation;
use crate::transport::{PendingRequest, Transport};

/// A failure that an oracle found: a rule was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Name of the broken rule.
    pub rule: &'static str,
    /// Description of the failure, with the guest and the page or request.
    pub what: String,
}

/// Number of pages that the device had to drop and that the oracle remembers, so that later gets
/// can test that the device has dropped them.
const ENDED: usize = 12;

/// State of a put page, as far as a correct driver knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PutState {
    /// The driver has sent the put. It is stored or not answered yet.
    Sent,
    /// The device answered the put with REFUSED, so it does not hold the page.
    Refused,
    /// The driver has sent a get for the page.
    Requested,
    /// The driver has taken the answer to a get, and the answer says that the device retains the
    /// page.
    Retained,
    /// The driver has taken the answer GONE to a REF, so the device does not have the page.
    Gone,
}

/// A page that a device with a broken rule keeps although it must not.
pub struct Kept {
    /// Key (pool, object and index) of the page.
    pub key: Key,
    /// Cookie with which the page was put.
    pub cookie: u64,
    /// Contents that were put.
    pub content: Content,
}

/// The oracle of one guest, which checks its device and its driver.
pub struct Oracle {
    guest: usize,
    mutation: Option<Mutation>,
    /// Whether `VIRTIO_TMEM_F_RETAIN` is negotiated.
    retain: bool,
    /// Model of the device, which decides which answers the device may give.
    pub model: Model,
    generations: HashSet<u64>,
    /// Generation that requests must carry now; 0 while no back end is connected.
    current: u64,
    /// Index of each queue's used ring up to which the oracle has judged answers.
    seen: Vec<u16>,
    /// Ids of all pools that the driver created in this generation.
    pools: BTreeSet<u32>,
    /// Puts of this generation with their states and contents, by key and cookie.
    puts: BTreeMap<(Key, u64), (PutState, Content)>,
    /// Cookies that the driver has used in this generation.
    cookies: HashSet<u64>,
    /// Pages that the device had to drop most recently, by key and cookie.
    ended: VecDeque<(Key, u64)>,
    /// Queue that requests for each chunk (pool, object and group of 256 pages) use in this
    /// generation.
    chunks: BTreeMap<(u32, u64, u64), usize>,
    /// The first failure that the oracle found.
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

    /// Records a broken rule, unless the oracle has recorded one before.
    pub fn fail(&mut self, rule: &'static str, what: String) {
        let what = format!("g{}: {what}", self.guest);
        self.failure.get_or_insert(Failure { rule, what });
    }

    /// Records a new generation. The device reports it at the start of a connection and after a
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
                format!("the device reports the earlier generation {generation:#x} again"),
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

    /// Records that the connection to the back end is lost. Until the next back end starts, there
    /// is no generation.
    pub fn lost(&mut self) {
        self.current = 0;
    }

    /// Returns whether the device accepts requests of this generation.
    pub fn is_current(&self, generation: u64) -> bool {
        generation == self.current
    }

    /// Records that the driver's rings were emptied, or were restored from a snapshot.
    pub fn rings_changed(&mut self, transport: &Transport) {
        let used = transport.rings.iter().map(|r| r.used_idx_in_memory());
        self.seen = used.collect();
    }

    /// Returns the index of a queue's used ring up to which the oracle has judged answers.
    pub fn seen(&self, queue: usize) -> u16 {
        self.seen[queue]
    }

    /// Checks that no answer was published since the rings were stopped or the back end was lost.
    pub fn nothing_new(&mut self, transport: &Transport) {
        for (queue, ring) in transport.rings.iter().enumerate() {
            if ring.used_idx_in_memory() != self.seen[queue] {
                let what = format!(
                    "queue {queue}: the device published an answer after the connection had ended"
                );
                self.fail("hang-up", what);
            }
        }
    }

    /// Returns the key and cookie of a page that was put in this generation. Three of four values
    /// of `pick` select one of the pages that the device had to drop most recently, if there are
    /// any.
    pub fn any_put(&self, pick: u64) -> Option<(Key, u64)> {
        let (ended, pick) = (!pick.is_multiple_of(4), pick / 4);
        if ended && !self.ended.is_empty() {
            return self.ended.get(pick as usize % self.ended.len()).copied();
        }
        let count = self.puts.len() as u64;
        let nth = pick.checked_rem(count)? as usize;
        self.puts.keys().nth(nth).copied()
    }

    /// Checks a request that the driver sends. `probe` is true for a test or a probe of the device,
    /// which names a page that a driver would not request.
    pub fn sent(
        &mut self,
        queue: usize,
        pending: &PendingRequest,
        transport: &Transport,
        probe: bool,
    ) {
        let busy = transport.pending.iter().flatten();
        let busy: BTreeSet<u64> = busy.flat_map(PendingRequest::pages).collect();
        if let Some(page) = pending.pages().find(|page| busy.contains(page)) {
            let what = format!(
                "the request {:?} uses the buffer page {page:#x} of a request in flight",
                pending.tag
            );
            self.fail("buffers", what);
        }
        let refers = matches!(&*pending.request, Request::Ref { .. });
        if !self.retain && (refers || pending.request.retain() != 0) {
            let what = format!(
                "the request {:?} uses retained pages, a feature that was not negotiated",
                pending.tag
            );
            self.fail("feature", what);
        }
        if *pending.request == Request::Generation {
            return;
        }
        let current = self.is_current(pending.generation);
        if pending.generation == 0 {
            self.fail(
                "generation",
                "the driver sent a request without a generation".into(),
            );
        }
        if !current || probe {
            // Skip the other checks for a test or a probe of the device. Skip them also for a
            // request of another generation, which the device must answer with STALE.
            return;
        }
        if let Request::PoolCreate { pool, .. } = &*pending.request {
            if !self.pools.insert(*pool) {
                self.fail(
                    "ids",
                    format!("the driver created pool {pool} twice in one generation"),
                );
            }
            return;
        }
        let pool = pending.request.pool();
        if pool != 0 && !self.pools.contains(&pool) {
            self.fail(
                "generation",
                format!("a request names pool {pool}, which was not created in this generation"),
            );
        }
        for (key, cookie) in pending.request.pages() {
            match &*pending.request {
                Request::Put { .. } => {
                    self.chunk(queue, key);
                    // Check only that no cookie is repeated. The driver draws cookies in ascending
                    // order, but the feeder sends the puts of each queue separately, so in another
                    // order.
                    if !self.cookies.insert(cookie) {
                        let what =
                            format!("the driver used cookie {cookie:#x} twice in one generation");
                        self.fail("cookie", what);
                    }
                }
                Request::Get { .. } => self.requested(queue, key, cookie),
                _ => {
                    self.chunk(queue, key);
                    if !self.puts.contains_key(&(key, cookie)) {
                        let what =
                            format!("a REF names {key:?}, which was not put in this generation");
                        self.fail("generation", what);
                    }
                }
            }
        }
    }

    /// Records that the driver has taken the answer to a get for a reader, or to a REF.
    pub fn taken(&mut self, pending: &PendingRequest, answer: &Answer) {
        if !self.is_current(pending.generation) {
            return;
        }
        for (put, page) in pending.request.pages().into_iter().zip(&answer.pages) {
            let Some((state, _)) = self.puts.get_mut(&put) else {
                continue;
            };
            match &*pending.request {
                Request::Get { .. }
                    if *state == PutState::Requested && page.flags & wire::GET_RETAINED != 0 =>
                {
                    *state = PutState::Retained;
                }
                Request::Ref { .. } if page.result == wire::P_GONE => *state = PutState::Gone,
                _ => {}
            }
        }
    }

    /// Returns the contents of a put of this generation, by key and cookie.
    pub fn content(&self, key: Key, cookie: u64) -> Option<Content> {
        self.puts.get(&(key, cookie)).map(|(_, content)| *content)
    }

    /// Records that the driver sends a put with these contents.
    pub fn putting(&mut self, key: Key, cookie: u64, content: Content) {
        self.puts.insert((key, cookie), (PutState::Sent, content));
    }

    fn requested(&mut self, queue: usize, key: Key, cookie: u64) {
        if cookie == 0 {
            return;
        }
        self.chunk(queue, key);
        let state = self.puts.get_mut(&(key, cookie));
        match state.map(|(state, _)| std::mem::replace(state, PutState::Requested)) {
            Some(PutState::Sent | PutState::Retained) => {}
            Some(PutState::Gone) => self.fail(
                "gone",
                format!("the driver requested {key:?} after the device had answered GONE"),
            ),
            Some(PutState::Refused) => self.fail(
                "refused",
                format!("the driver requested {key:?}, whose put was refused"),
            ),
            Some(PutState::Requested) => self.fail(
                "exclusive",
                format!("the driver requested {key:?} twice after one put"),
            ),
            None => self.fail(
                "generation",
                format!("the driver requested {key:?}, which was not put in this generation"),
            ),
        }
    }

    fn chunk(&mut self, queue: usize, key: Key) {
        let chunk = (key.pool, key.object, key.index >> wire::CHUNK_SHIFT);
        let first = *self.chunks.entry(chunk).or_insert(queue);
        if first != queue {
            let what = format!(
                "requests for one chunk (pool, object, group of pages) {chunk:?} went to the \
                 queues {first} and {queue}"
            );
            self.fail("order", what);
        }
    }

    /// Judges the answers that the device has published since the last call. Returns the pages that
    /// a device with a broken rule keeps.
    pub fn observe(&mut self, transport: &Transport, queue_of: impl Fn(Key) -> usize) -> Vec<Kept> {
        let mut kept = Vec::new();
        for queue in 0..transport.queues() {
            let ring = &transport.rings[queue];
            while self.seen[queue] != ring.used_idx_in_memory() {
                let position = usize::from(self.seen[queue].wrapping_sub(ring.used_idx()));
                self.seen[queue] = self.seen[queue].wrapping_add(1);
                let used = transport.used(queue, position);
                let pending = transport.pending[queue].get(position);
                let (Some((_, used_bytes)), Some(pending)) = (used, pending) else {
                    let what =
                        format!("queue {queue}: the device published an answer without a request");
                    self.fail("order", what);
                    self.seen[queue] = ring.used_idx_in_memory();
                    break;
                };
                self.judge(queue, pending, used_bytes, transport, &queue_of, &mut kept);
            }
        }
        kept
    }

    fn judge(
        &mut self,
        queue: usize,
        pending: &PendingRequest,
        used_bytes: u32,
        transport: &Transport,
        queue_of: &impl Fn(Key) -> usize,
        kept: &mut Vec<Kept>,
    ) {
        let done = Done {
            token: 0,
            queue,
            request: (*pending.request).clone(),
            generation: pending.generation,
            answer: pending.answer(transport.ram(), used_bytes),
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
        if let Err(violation) = self.model.judge(&pending.record, &done, queue_of) {
            self.fail("device", violation.to_string());
        }
        if let Request::Put { .. } = &done.request
            && done.generation == self.model.generation()
        {
            for (put, page) in done.request.pages().into_iter().zip(&done.answer.pages) {
                if page.result == wire::P_REFUSED
                    && let Some((state, _)) = self.puts.get_mut(&put)
                {
                    *state = PutState::Refused;
                }
            }
        }
        for put in before {
            if held(&self.model, &put) {
                continue;
            }
            self.ended.push_front(put);
            self.ended.truncate(ENDED);
            // Do not let the device keep the page if it holds a newer put for the key.
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

    /// Returns the pages that the device holds and that this request may make it drop.
    fn held_of(&self, request: &Request) -> Vec<(Key, u64)> {
        if let Request::Flush { .. } = request {
            let puts = self.puts.keys().copied();
            let held = |put: &(Key, u64)| self.model.cookie(put.0) == Some(put.1);
            return puts.filter(held).collect();
        }
        let keys = request.pages().into_iter().map(|(key, _)| key);
        keys.filter_map(|key| Some((key, self.model.cookie(key)?)))
            .collect()
    }

    /// Searches the memory of this guest for private pages of other guests.
    pub fn search_for_foreign_pages(&mut self, transport: &Transport) {
        for (addr, word) in transport.first_words() {
            if let Some(owner) = content::owner(word)
                && owner != self.guest
            {
                let what =
                    format!("a private page of guest g{owner} is at guest address {addr:#x}");
                self.fail("isolation", what);
            }
        }
    }
}
