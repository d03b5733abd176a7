// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The test oracle, which decides which answers a device may give to one guest.
//!
//! For each key, the oracle records the cookie and contents of the last put, as long as the device
//! may hold the page. A get may return that page or a miss, and nothing else. If a get leaves its
//! page in the device as a retained page, the record stays until a later answer shows that the
//! device no longer has the page. The model changes at answers, because the device answers the
//! requests of a queue in the order in which it executes them (SPEC.md, "Order"). For a flush that
//! spans queues, the model also uses the time at which the flush was sent. The oracle never asks
//! the device for its state.
//!
//! This is the only oracle of answers: guests on a socket, the simulator and the fuzz targets use
//! it. Each of them brings its own chains, and the fuzz targets their own parser of requests.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use virtio_tmem as wire;

use crate::content::Content;
use crate::frontend::Done;
use crate::requests::{
    Answer, GENERATION_BYTES, GET_PAGE_BYTES, Key, PAGE, Page, PageAnswer, RESP_BYTES, Request,
};

/// Error: the device gave a forbidden answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Violation(pub String);

/// Bytes that a page must have.
#[derive(Clone)]
enum Bytes {
    /// Bytes that are generated again for each comparison, so that a large model takes little
    /// memory.
    Generated(Content),
    /// Bytes of the put itself.
    Kept(Arc<Page>),
}

impl Bytes {
    /// Returns the offset of the first byte in which a page differs, or None if it is equal.
    fn first_difference(&self, page: &Page) -> Option<usize> {
        let generated;
        let expected: &Page = match self {
            Self::Generated(content) => {
                generated = content.page();
                &generated
            }
            Self::Kept(page) => page,
        };
        // Compare all bytes at once, which is faster than comparing them one by one.
        (page != expected)
            .then(|| page.iter().zip(expected).position(|(a, b)| a != b))
            .flatten()
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Generated(content) => content.fmt(f),
            Self::Kept(_) => f.write_str("the bytes of the put"),
        }
    }
}

#[derive(Clone, Debug)]
struct Held {
    cookie: u64,
    bytes: Bytes,
    /// Tick at which the put was answered. The model counts a tick for each request and each
    /// answer.
    since: u64,
    /// Tick at which the device answered a flush of this page, if the flush was sent on another
    /// queue than the page's. A get sent before that tick may still hit, because the device may
    /// have executed it before the flush.
    dropped: Option<u64>,
    /// Whether the device may lose the page only by evicting it. False after a get that named
    /// another cookie than the page's: the device may drop the page at such a get.
    certain: bool,
}

/// Record of a sent request, which the model needs to check the device's answer.
#[derive(Clone, Debug)]
pub struct SentRequest {
    /// Tick at which the request was sent. The model counts a tick for each request and each
    /// answer.
    tick: u64,
    /// Contents of the pages of a put, in their order. Empty for other requests, and for a put that
    /// has the bytes of its pages.
    contents: Vec<Content>,
}

/// Counters of the device's answers. All count pages, except `stale`, which counts requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Pages of puts that the device answered with STORED.
    pub stored: u64,
    /// Pages of puts that the device answered with REFUSED.
    pub refused: u64,
    /// Pages of gets that the device returned.
    pub hits: u64,
    /// Pages of gets that were answered with a miss, although the device had answered that it
    /// stored the page.
    pub lost: u64,
    /// Pages of gets that were answered with a miss, and that the device could not have had.
    pub misses: u64,
    /// Requests that the device answered with STALE.
    pub stale: u64,
    /// Pages that gets returned and that the device retained.
    pub retained: u64,
    /// Pages of references (REF) that the device answered with HELD.
    pub refs_held: u64,
    /// Pages of references (REF) that the device answered with GONE, although it had answered that
    /// it stored or retained them.
    pub refs_gone: u64,
}

/// Model of the pages that one guest's device may hold.
#[derive(Clone, Debug, Default)]
pub struct Model {
    name: String,
    generation: u64,
    tick: u64,
    pools: BTreeSet<u32>,
    held: HashMap<Key, Held>,
    /// Whether the device has memory for all pages, so that it may not lose any.
    lossless: bool,
    counts: Counts,
}

impl Model {
    /// Creates a model of a device that holds no page and has no generation.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            ..Self::default()
        }
    }

    /// Forbids the device to lose pages. This applies to a device that has memory for all pages
    /// that the guest puts, and whose queues are not drained. Without this call, a get of any page
    /// may miss.
    #[must_use]
    pub fn lossless(mut self) -> Self {
        self.lossless = true;
        self
    }

    /// Begins a generation. From now on the device holds no page of an earlier generation, and must
    /// answer requests of other generations with STALE.
    ///
    /// # Errors
    /// When the generation is 0 or equal to the last one.
    pub fn begin(&mut self, generation: u64) -> Result<(), Violation> {
        if generation == 0 || generation == self.generation {
            return Err(self.violation(format!(
                "the device reports generation {generation:#x} after generation {:#x}: \
                 a new generation must differ from the last one and from 0",
                self.generation
            )));
        }
        self.generation = generation;
        self.pools.clear();
        self.held.clear();
        Ok(())
    }

    /// Returns the generation that requests must carry now.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the counters of all answers so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns the number of pages that the device may hold.
    #[must_use]
    pub fn held_pages(&self) -> usize {
        self.held.values().filter(|h| h.dropped.is_none()).count()
    }

    /// Returns the cookie of the page that the device may hold under a key.
    #[must_use]
    pub fn cookie(&self, key: Key) -> Option<u64> {
        self.held.get(&key).map(|h| h.cookie)
    }

    /// Returns the ids of the pools that exist.
    #[must_use]
    pub fn pools(&self) -> &BTreeSet<u32> {
        &self.pools
    }

    /// Records that the guest sends a request. `contents` are the contents of a put's pages in
    /// their order, or empty if the request has the pages' bytes. Returns the record that
    /// [`Self::judge`] needs to check the answer.
    pub fn record_request(&mut self, contents: Vec<Content>) -> SentRequest {
        self.tick += 1;
        SentRequest {
            tick: self.tick,
            contents,
        }
    }

    fn violation(&self, what: String) -> Violation {
        Violation(format!("{}: {what}", self.name))
    }

    /// Returns the status that the device must give to a well-formed request.
    fn expected_status(&self, done: &Done) -> u8 {
        let live = self.pools.contains(&done.request.pool());
        match &done.request {
            Request::Generation => wire::S_OK,
            _ if done.generation != self.generation => wire::S_STALE,
            Request::PoolCreate { .. } if live => wire::S_BAD,
            Request::PoolCreate { .. } if self.pools.len() >= wire::POOLS_MAX => wire::S_LIMIT,
            Request::PoolCreate { .. } | Request::Report(_) | Request::Latencies(_) => wire::S_OK,
            _ if !live => wire::S_NO_POOL,
            _ => wire::S_OK,
        }
    }

    /// Checks the answer to a request and updates the model. `queue_of` returns the queue that
    /// requests for a key use.
    ///
    /// # Errors
    /// When the specification forbids the answer.
    pub fn judge(
        &mut self,
        sent: &SentRequest,
        done: &Done,
        queue_of: impl Fn(Key) -> usize,
    ) -> Result<(), Violation> {
        self.tick += 1;
        let (request, answer) = (&done.request, &done.answer);
        if answer.status == wire::S_UNANSWERED || answer.status == 0 {
            return Err(self.violation(format!(
                "the device used the chain of {request:?} without writing an answer"
            )));
        }
        if answer.reserved != [0; 7] {
            return Err(self.violation(format!(
                "the reserved bytes of resp are {:?} and not 0",
                answer.reserved
            )));
        }
        let expected = self.expected_status(done);
        if answer.status != expected {
            return Err(self.violation(format!(
                "the answer to a request of type {} for pool {} has status {} and not {expected}: \
                 it carries generation {:#x} in generation {:#x}",
                request.kind(),
                request.pool(),
                answer.status,
                done.generation,
                self.generation
            )));
        }
        self.counts.stale += u64::from(answer.status == wire::S_STALE);
        if answer.status == wire::S_OK {
            self.judge_executed(sent, done, queue_of)?;
        } else {
            self.judge_not_executed(request, answer)?;
        }
        let written = written_bytes(request, answer);
        if answer.used_bytes as usize != written {
            return Err(self.violation(format!(
                "the device reports {} written bytes and not {written}, in the answer to a request \
                 of type {}",
                answer.used_bytes,
                request.kind()
            )));
        }
        Ok(())
    }

    fn judge_executed(
        &mut self,
        sent: &SentRequest,
        done: &Done,
        queue_of: impl Fn(Key) -> usize,
    ) -> Result<(), Violation> {
        let (request, answer) = (&done.request, &done.answer);
        match request {
            Request::PoolCreate { pool, .. } => {
                self.pools.insert(*pool);
            }
            Request::PoolDestroy { pool } => {
                self.pools.remove(pool);
                self.held.retain(|key, _| key.pool != *pool);
            }
            Request::Report(_) | Request::Latencies(_) => {}
            Request::Generation if answer.generation == self.generation => {}
            Request::Generation => {
                return Err(self.violation(format!(
                    "the answer to a GENERATION has generation {:#x} in generation {:#x}",
                    answer.generation, self.generation
                )));
            }
            Request::Put { .. } => self.judge_put(sent, request, answer)?,
            Request::Get { .. } => self.judge_get(sent, request, answer)?,
            Request::Ref { .. } => self.judge_ref(sent, request, answer)?,
            Request::Flush { pool, ranges } => {
                let now = self.tick;
                self.held.retain(|key, held| {
                    let inside = key.pool == *pool
                        && ranges.iter().any(|r| r.contains(key.object, key.index));
                    // The flush drops pages that use its own queue. Requests for other pages have
                    // no order with the flush while both are in flight.
                    let same_queue = queue_of(*key) == done.queue;
                    if inside && !same_queue && held.since < sent.tick {
                        held.dropped.get_or_insert(now);
                    }
                    !(inside && same_queue)
                });
            }
        }
        Ok(())
    }

    /// Checks that an answer with another status than OK has no result by which the driver would
    /// use a page (SPEC.md, DEV-23).
    fn judge_not_executed(&self, request: &Request, answer: &Answer) -> Result<(), Violation> {
        let nothing = match request {
            Request::Put { .. } => wire::P_REFUSED,
            Request::Ref { .. } => wire::P_GONE,
            _ => wire::P_MISS,
        };
        for ((key, _), got) in request.pages().into_iter().zip(&answer.pages) {
            if (got.result, got.cookie, got.flags, got.reserved) != (nothing, 0, 0, [0; 6]) {
                return Err(self.violation(format!(
                    "an answer with status {} has the result {} and not {nothing} for {key:?}, \
                     with cookie {:#x} and flags {:#x}",
                    answer.status, got.result, got.cookie, got.flags
                )));
            }
        }
        Ok(())
    }

    fn judge_put(
        &mut self,
        sent: &SentRequest,
        request: &Request,
        answer: &Answer,
    ) -> Result<(), Violation> {
        let Request::Put { pages, .. } = request else {
            unreachable!("the caller passed a request other than PUT")
        };
        for (i, ((key, cookie), got)) in request.pages().into_iter().zip(&answer.pages).enumerate()
        {
            match got.result {
                wire::P_STORED => {
                    self.counts.stored += 1;
                    let bytes = match sent.contents.get(i) {
                        Some(content) => Bytes::Generated(*content),
                        None => Bytes::Kept(Arc::from(pages[i].page.clone())),
                    };
                    let held = Held {
                        cookie,
                        bytes,
                        since: self.tick,
                        dropped: None,
                        certain: true,
                    };
                    self.held.insert(key, held);
                }
                wire::P_REFUSED => {
                    self.counts.refused += 1;
                    self.held.remove(&key);
                }
                other => {
                    return Err(self
                        .violation(format!("the put of {key:?} has the invalid result {other}")));
                }
            }
        }
        Ok(())
    }

    fn judge_ref(
        &mut self,
        sent: &SentRequest,
        request: &Request,
        answer: &Answer,
    ) -> Result<(), Violation> {
        for ((key, cookie), got) in request.pages().into_iter().zip(&answer.pages) {
            match (got.result, self.find(sent, key, cookie)) {
                (wire::P_HELD, Some(_)) => self.counts.refs_held += 1,
                (wire::P_GONE, None) => {}
                (wire::P_GONE, Some(held)) => {
                    self.check_loss(key, &held)?;
                    self.counts.refs_gone += u64::from(held.dropped.is_none());
                    self.held.remove(&key);
                }
                (wire::P_HELD, None) => {
                    return Err(self.violation(format!(
                        "the reference to {key:?} with cookie {cookie:#x} found a page that the \
                         device cannot have; for this key, the device may have {:?}",
                        self.held.get(&key)
                    )));
                }
                (other, _) => {
                    return Err(self.violation(format!(
                        "the reference to {key:?} has the invalid result {other}"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Returns the page with this key and cookie, if the device may have had it when it executed
    /// the request `sent`.
    fn find(&self, sent: &SentRequest, key: Key, cookie: u64) -> Option<Held> {
        let held = self.held.get(&key);
        held.filter(|h| h.cookie == cookie && h.dropped.is_none_or(|at| sent.tick < at))
            .cloned()
    }

    /// Checks that the device was allowed to lose a page.
    fn check_loss(&self, key: Key, held: &Held) -> Result<(), Violation> {
        if self.lossless && held.certain && held.dropped.is_none() {
            return Err(self.violation(format!(
                "the device lost the page {key:?}, although it has memory for all pages"
            )));
        }
        Ok(())
    }

    fn judge_get(
        &mut self,
        sent: &SentRequest,
        request: &Request,
        answer: &Answer,
    ) -> Result<(), Violation> {
        for (i, ((key, cookie), got)) in request.pages().into_iter().zip(&answer.pages).enumerate()
        {
            let may_retain = got.result == wire::P_HIT && request.retain() >> i & 1 != 0;
            let retained = match got.flags {
                0 => false,
                wire::GET_RETAINED if may_retain => true,
                flags => {
                    return Err(self.violation(format!(
                        "the get of {key:?} has the forbidden flags {flags:#x} with the result {}",
                        got.result
                    )));
                }
            };
            if got.reserved != [0; 6] {
                return Err(self.violation(format!(
                    "the result of the get of {key:?} has the reserved bytes {:?}",
                    got.reserved
                )));
            }
            match (got.result, self.find(sent, key, cookie)) {
                (wire::P_MISS, held) => {
                    if got.cookie != 0 {
                        return Err(self
                            .violation(format!("the miss of {key:?} has a cookie other than 0")));
                    }
                    match held {
                        Some(held) if held.dropped.is_none() => {
                            self.check_loss(key, &held)?;
                            self.counts.lost += 1;
                        }
                        _ => self.counts.misses += 1,
                    }
                    if let Some(held) = self.held.get_mut(&key) {
                        held.certain = false;
                    }
                }
                (wire::P_HIT, Some(held)) => {
                    self.judge_hit(key, &held, got)?;
                    self.counts.hits += 1;
                    self.counts.retained += u64::from(retained);
                    if !retained {
                        self.held.remove(&key);
                    }
                }
                (wire::P_HIT, None) => {
                    return Err(self.violation(format!(
                        "the get of {key:?} with cookie {cookie:#x} was a hit, although the device \
                         cannot have that page; for this key, the device may have {:?}",
                        self.held.get(&key)
                    )));
                }
                (other, _) => {
                    return Err(self
                        .violation(format!("the get of {key:?} has the invalid result {other}")));
                }
            }
        }
        Ok(())
    }

    fn judge_hit(&self, key: Key, held: &Held, got: &PageAnswer) -> Result<(), Violation> {
        if got.cookie != held.cookie {
            return Err(self.violation(format!(
                "the get of {key:?} was a hit with cookie {:#x}, but requested {:#x}",
                got.cookie, held.cookie
            )));
        }
        let Some(page) = &got.page else {
            return Err(self.violation(format!(
                "the used length of a hit on {key:?} does not cover the page"
            )));
        };
        if let Some(at) = held.bytes.first_difference(page) {
            return Err(self.violation(format!(
                "the get of {key:?} returned wrong bytes, the first at offset {at}, expected {:?}",
                held.bytes
            )));
        }
        Ok(())
    }
}

/// Returns the number of bytes that the device writes for an answer (SPEC.md, DEV-22 and DEV-54):
/// the status, all results, and the page data up to the last hit.
fn written_bytes(request: &Request, answer: &Answer) -> usize {
    let n = answer.pages.len();
    let results = match request {
        Request::Get { .. } => {
            let last_hit = answer.pages.iter().rposition(|p| p.result == wire::P_HIT);
            n * GET_PAGE_BYTES + last_hit.map_or(0, |last| (last + 1) * PAGE)
        }
        Request::Put { .. } | Request::Ref { .. } => n,
        Request::Generation if answer.status == wire::S_OK => GENERATION_BYTES,
        _ => 0,
    };
    RESP_BYTES + results
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::requests::{PutPage, Range, RefPage};

    const KEY: Key = Key {
        pool: 1,
        object: 2,
        index: 3,
    };

    fn done(request: Request, status: u8, pages: Vec<PageAnswer>) -> Done {
        let mut answer = Answer {
            status,
            reserved: [0; 7],
            used_bytes: 0,
            pages,
            generation: 0,
        };
        answer.used_bytes = written_bytes(&request, &answer) as u32;
        Done {
            token: 0,
            queue: 1,
            request,
            generation: 7,
            answer,
        }
    }

    fn model() -> Model {
        let mut m = Model::new("vm");
        m.begin(7).unwrap();
        let sent = m.record_request(vec![]);
        let create = Request::PoolCreate { pool: 1, flags: 0 };
        m.judge(&sent, &done(create, wire::S_OK, vec![]), |_| 1)
            .unwrap();
        m
    }

    fn put(m: &mut Model, cookie: u64, content: Content, result: u8) -> Result<(), Violation> {
        let page = PutPage {
            object: 2,
            index: 3,
            cookie,
            flags: 0,
            page: content.page(),
        };
        let sent = m.record_request(vec![content]);
        let answers = vec![PageAnswer {
            result,
            cookie: 0,
            flags: 0,
            reserved: [0; 6],
            page: None,
        }];
        let put = Request::Put {
            pool: 1,
            pages: vec![page],
        };
        m.judge(&sent, &done(put, wire::S_OK, answers), |_| 1)
    }

    fn get(m: &mut Model, cookie: u64, answer: Option<Content>) -> Result<(), Violation> {
        get_flagged(m, cookie, 0, answer, 0)
    }

    fn get_flagged(
        m: &mut Model,
        cookie: u64,
        retain: u64,
        answer: Option<Content>,
        flags: u8,
    ) -> Result<(), Violation> {
        let sent = m.record_request(vec![]);
        let answers = vec![match answer {
            Some(c) => PageAnswer {
                result: wire::P_HIT,
                cookie,
                flags,
                reserved: [0; 6],
                page: Some(c.page()),
            },
            None => PageAnswer {
                result: wire::P_MISS,
                cookie: 0,
                flags,
                reserved: [0; 6],
                page: None,
            },
        }];
        let get = Request::Get {
            pool: 1,
            object: 2,
            index: 3,
            cookies: vec![cookie],
            retain,
        };
        m.judge(&sent, &done(get, wire::S_OK, answers), |_| 1)
    }

    fn refer(m: &mut Model, cookie: u64, result: u8) -> Result<(), Violation> {
        let page = RefPage {
            object: 2,
            index: 3,
            cookie,
        };
        let sent = m.record_request(vec![]);
        let answers = vec![PageAnswer {
            result,
            cookie: 0,
            flags: 0,
            reserved: [0; 6],
            page: None,
        }];
        let refer = Request::Ref {
            pool: 1,
            pages: vec![page],
        };
        m.judge(&sent, &done(refer, wire::S_OK, answers), |_| 1)
    }

    const A: Content = Content::Noise(1);
    const B: Content = Content::Text(2);

    /// Gives the oracle, for each of its rules, an answer that violates the rule. The oracle must
    /// report each violation.
    #[test]
    fn the_oracle_rejects_each_kind_of_wrong_answer() {
        let mut m = model();
        put(&mut m, 10, A, wire::P_STORED).unwrap();
        get(&mut m, 10, Some(B)).expect_err("the oracle accepts a hit with wrong bytes");
        get(&mut m, 11, Some(A))
            .expect_err("the oracle accepts a hit with a cookie that was never put");
        get(&mut m, 10, Some(A)).unwrap();
        get(&mut m, 10, Some(A))
            .expect_err("the oracle accepts a second hit on a page that was put once");

        put(&mut m, 12, A, wire::P_STORED).unwrap();
        put(&mut m, 13, B, wire::P_STORED).unwrap();
        get(&mut m, 12, Some(A)).expect_err("the oracle accepts a hit on a page that was replaced");

        put(&mut m, 14, A, wire::P_REFUSED).unwrap();
        get(&mut m, 13, Some(B)).expect_err(
            "the oracle accepts a hit on a page that a refused put should have dropped",
        );
        put(&mut m, 15, A, wire::P_HIT).expect_err("the oracle accepts the result HIT for a put");

        m.begin(7)
            .expect_err("the oracle accepts a repeated generation");
        m.begin(0).expect_err("the oracle accepts generation 0");
        put(&mut m, 16, A, wire::P_STORED).unwrap();
        m.begin(8).unwrap();
        get(&mut m, 16, Some(A))
            .expect_err("the oracle accepts an answer other than STALE in an old generation");
        assert_eq!(m.held_pages(), 0);
    }

    /// Gives the oracle, for each rule of retained pages, an answer that violates the rule. The
    /// oracle must report each violation.
    #[test]
    fn the_oracle_rejects_each_kind_of_wrong_answer_about_retained_pages() {
        const RETAINED: u8 = wire::GET_RETAINED;
        let mut m = model();
        put(&mut m, 10, A, wire::P_STORED).unwrap();
        get_flagged(&mut m, 10, 0, Some(A), RETAINED)
            .expect_err("the oracle accepts a retained page although req.retain is 0");
        get_flagged(&mut m, 10, 0b10, Some(A), RETAINED).expect_err(
            "the oracle accepts a retained page although only the bit of another page is set",
        );
        get_flagged(&mut m, 10, 1, Some(A), 2)
            .expect_err("the oracle accepts an unknown flag in the result of a get");
        get_flagged(&mut m, 11, 1, None, RETAINED)
            .expect_err("the oracle accepts a miss with the flag RETAINED");
        get_flagged(&mut m, 10, 1, Some(A), RETAINED).unwrap();
        refer(&mut m, 10, wire::P_HELD).unwrap();
        refer(&mut m, 11, wire::P_HELD)
            .expect_err("the oracle accepts HELD for a cookie that was never put");
        refer(&mut m, 10, wire::P_HIT).expect_err("the oracle accepts the result HIT for a REF");
        get_flagged(&mut m, 10, 1, Some(B), RETAINED)
            .expect_err("the oracle accepts a hit with wrong bytes on a retained page");
        refer(&mut m, 11, wire::P_GONE).unwrap();
        get_flagged(&mut m, 10, 1, Some(A), RETAINED).unwrap();
        // Return the page in a hit without the flag RETAINED. The page has then left the device.
        get_flagged(&mut m, 10, 1, Some(A), 0).unwrap();
        refer(&mut m, 10, wire::P_HELD)
            .expect_err("the oracle accepts HELD for a page that a get removed");

        put(&mut m, 12, A, wire::P_STORED).unwrap();
        refer(&mut m, 12, wire::P_GONE).unwrap();
        get(&mut m, 12, Some(A))
            .expect_err("the oracle accepts a hit on a page whose REF was answered with GONE");

        put(&mut m, 13, A, wire::P_STORED).unwrap();
        get_flagged(&mut m, 13, 1, Some(A), RETAINED).unwrap();
        put(&mut m, 14, B, wire::P_STORED).unwrap();
        refer(&mut m, 13, wire::P_HELD)
            .expect_err("the oracle accepts HELD for a page that a newer put replaced");
        get(&mut m, 14, Some(B)).unwrap();
        let counts = m.counts();
        assert_eq!((counts.retained, counts.refs_held), (3, 1));
        assert_eq!(counts.refs_gone, 1);
    }

    #[test]
    fn the_oracle_rejects_each_kind_of_wrong_answer_to_a_generation_request() {
        let mut m = model();
        let mut answered = |generation, status| {
            let mut done = done(Request::Generation, status, vec![]);
            // The generation that the request carries has no meaning.
            done.generation = 0;
            done.answer.generation = generation;
            let sent = m.record_request(vec![]);
            m.judge(&sent, &done, |_| 1)
        };
        answered(7, wire::S_OK).unwrap();
        answered(6, wire::S_OK).expect_err("the oracle accepts an earlier generation");
        answered(0, wire::S_OK).expect_err("the oracle accepts generation 0");
        answered(7, wire::S_STALE).expect_err("the oracle accepts STALE");
    }

    /// Gives a lossless device the chance to lose a page: at a get of the page, at a REF, and at a
    /// get that names another cookie.
    #[test]
    fn the_oracle_rejects_a_lost_page_of_a_lossless_device() {
        let mut m = model().lossless();
        put(&mut m, 10, A, wire::P_STORED).unwrap();
        get(&mut m, 10, None).expect_err("the oracle accepts a miss of a stored page");
        refer(&mut m, 10, wire::P_GONE).expect_err("the oracle accepts GONE for a stored page");
        // The device may remove a page at a get of another cookie (DEV-33), or keep it.
        get(&mut m, 11, None).unwrap();
        get(&mut m, 10, None).unwrap();
        get(&mut m, 10, Some(A)).unwrap();
        get(&mut m, 10, None).unwrap();
    }

    /// The request of the put has the bytes of the page, as a fuzzer's request has.
    #[test]
    fn the_oracle_compares_hits_with_the_bytes_of_the_put() {
        let mut m = model();
        let page = PutPage {
            object: 2,
            index: 3,
            cookie: 10,
            flags: 0,
            page: A.page(),
        };
        let request = Request::Put {
            pool: 1,
            pages: vec![page],
        };
        let stored = PageAnswer {
            result: wire::P_STORED,
            cookie: 0,
            flags: 0,
            reserved: [0; 6],
            page: None,
        };
        let sent = m.record_request(vec![]);
        m.judge(&sent, &done(request, wire::S_OK, vec![stored]), |_| 1)
            .unwrap();
        get(&mut m, 10, Some(B)).expect_err("the oracle accepts a hit with wrong bytes");
        get(&mut m, 10, Some(A)).unwrap();
    }

    #[test]
    fn the_oracle_rejects_results_and_lengths_that_do_not_fit_the_status() {
        type Change = fn(&mut Answer);
        let mut m = model();
        put(&mut m, 10, A, wire::P_STORED).unwrap();
        let mut stale = |change: Change| {
            let get = Request::Get {
                pool: 1,
                object: 2,
                index: 3,
                cookies: vec![10],
                retain: 1,
            };
            let miss = PageAnswer {
                result: wire::P_MISS,
                cookie: 0,
                flags: 0,
                reserved: [0; 6],
                page: None,
            };
            let mut done = done(get, wire::S_STALE, vec![miss]);
            done.generation = 6;
            change(&mut done.answer);
            let sent = m.record_request(vec![]);
            m.judge(&sent, &done, |_| 1)
        };
        stale(|_| ()).unwrap();
        let wrong: [(&str, Change); 8] = [
            ("a reserved byte of resp", |a| a.reserved[6] = 1),
            ("a length without the results", |a| a.used_bytes = 8),
            ("a length beyond the results", |a| a.used_bytes += 1),
            ("a missing result", |a| {
                a.pages[0].result = wire::S_UNANSWERED;
            }),
            ("a hit", |a| a.pages[0].result = wire::P_HIT),
            ("a cookie", |a| a.pages[0].cookie = 10),
            ("a flag", |a| a.pages[0].flags = wire::GET_RETAINED),
            ("a reserved byte of a result", |a| {
                a.pages[0].reserved[5] = 1
            }),
        ];
        for (what, change) in wrong {
            stale(change).expect_err(&format!("the oracle accepts {what} in a STALE answer"));
        }
        let mut flush = flush_object();
        flush.answer.used_bytes = 9;
        let sent = m.record_request(vec![]);
        m.judge(&sent, &flush, |_| 1)
            .expect_err("the oracle accepts an answer to a FLUSH with a byte after its status");
    }

    /// Returns an answered flush of all pages of object 2, which contains the tests' page.
    fn flush_object() -> Done {
        let range = Range {
            object: 2,
            index: 0,
            nr_pages: wire::TO_END,
        };
        done(
            Request::Flush {
                pool: 1,
                ranges: vec![range],
            },
            wire::S_OK,
            vec![],
        )
    }

    #[test]
    fn the_oracle_rejects_a_hit_on_a_page_flushed_after_its_put() {
        let mut m = model();
        put(&mut m, 10, A, wire::P_STORED).unwrap();
        let flush = flush_object();
        let sent = m.record_request(vec![]);
        // Put the page after the flush was sent, on another queue. The two requests have no order,
        // so the device may hold the page or not.
        put(&mut m, 11, B, wire::P_STORED).unwrap();
        m.judge(&sent, &flush, |_| 2).unwrap();
        assert_eq!(m.cookie(KEY), Some(11));
        // Send a flush on the queue of the page. The device executes it after earlier requests on
        // that queue.
        let sent = m.record_request(vec![]);
        m.judge(&sent, &flush, |_| 1).unwrap();
        get(&mut m, 11, Some(B)).expect_err("the oracle accepts a hit on a flushed page");
    }

    /// Sends a get and a flush on two queues, so that both are in flight. The device may execute
    /// either request first. The order in which the guest takes the answers does not show which
    /// one.
    #[test]
    fn the_oracle_allows_a_hit_during_a_flush_on_another_queue() {
        let mut m = model();
        put(&mut m, 10, A, wire::P_STORED).unwrap();
        let flush = flush_object();
        let sent_flush = m.record_request(vec![]);
        let sent_get = m.record_request(vec![]);
        m.judge(&sent_flush, &flush, |_| 2).unwrap();
        assert_eq!(m.held_pages(), 0);
        get(&mut m, 10, Some(A)).expect_err(
            "the oracle accepts a hit on a page whose flush was answered before the get was sent",
        );
        let hit = PageAnswer {
            result: wire::P_HIT,
            cookie: 10,
            flags: 0,
            reserved: [0; 6],
            page: Some(A.page()),
        };
        let get = Request::Get {
            pool: 1,
            object: 2,
            index: 3,
            cookies: vec![10],
            retain: 0,
        };
        let hit = done(get, wire::S_OK, vec![hit]);
        m.judge(&sent_get, &hit, |_| 1).unwrap();
        m.judge(&sent_get, &hit, |_| 1)
            .expect_err("the oracle accepts a second hit on a page that was put once");
    }

    #[test]
    fn the_oracle_rejects_a_hit_in_a_destroyed_pool() {
        let mut m = model();
        put(&mut m, 10, A, wire::P_STORED).unwrap();
        let sent = m.record_request(vec![]);
        let destroy = done(Request::PoolDestroy { pool: 1 }, wire::S_OK, vec![]);
        m.judge(&sent, &destroy, |_| 1).unwrap();
        get(&mut m, 10, Some(A)).expect_err("the oracle accepts a hit in a destroyed pool");
        assert_eq!(m.held_pages(), 0);
    }
}
