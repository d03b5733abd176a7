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

use std::collections::{BTreeSet, HashMap};

use virtio_tmem as wire;

use crate::content::Content;
use crate::frontend::Done;
use crate::requests::{Answer, RefPage, Request};

/// Key of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Id of the pool that contains the page.
    pub pool: u32,
    /// Id of the object that contains the page.
    pub object: u64,
    /// Index of the page in its object.
    pub index: u64,
}

/// Error: the device gave a forbidden answer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Violation(pub String);

#[derive(Clone, Copy, Debug)]
struct Held {
    cookie: u64,
    content: Content,
    /// Tick at which the put was answered. The model counts a tick for each request and each
    /// answer.
    since: u64,
    /// Tick at which the device answered a flush of this page, if the flush was sent on another
    /// queue than the page's. A get sent before that tick may still hit, because the device may
    /// have executed it before the flush.
    dropped: Option<u64>,
}

/// Data of a request that the model needs to check the device's answer.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Tick at which the request was sent. The model counts a tick for each request and each
    /// answer.
    sent: u64,
    /// Contents of the pages of a put, in their order; empty for other requests.
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
#[derive(Debug, Default)]
pub struct Model {
    name: String,
    generation: u64,
    tick: u64,
    pools: BTreeSet<u32>,
    held: HashMap<Key, Held>,
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

    /// Begins a generation. From now on the device holds no page of an earlier generation, and must
    /// answer requests of other generations with STALE.
    ///
    /// # Errors
    /// When the generation is 0 or equal to the last one.
    pub fn begin(&mut self, generation: u64) -> Result<(), Violation> {
        if generation == 0 || generation == self.generation {
            return Err(self.wrong(format!(
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
    /// their order. Returns the data that [`Self::judge`] needs to check the answer.
    pub fn ask(&mut self, contents: Vec<Content>) -> Asked {
        self.tick += 1;
        Asked {
            sent: self.tick,
            contents,
        }
    }

    fn wrong(&self, what: String) -> Violation {
        Violation(format!("{}: {what}", self.name))
    }

    /// Checks the answer to a request and updates the model. `queue_of` returns the queue that
    /// requests for a key use.
    ///
    /// # Errors
    /// When the specification forbids the answer.
    pub fn judge(
        &mut self,
        asked: &Asked,
        done: &Done,
        queue_of: impl Fn(Key) -> usize,
    ) -> Result<(), Violation> {
        self.tick += 1;
        let answer = &done.answer;
        if answer.status == wire::S_UNANSWERED || answer.status == 0 {
            return Err(self.wrong(format!(
                "the device used the chain of {:?} without writing an answer",
                done.request
            )));
        }
        if answer.reserved != [0; 7] {
            return Err(self.wrong(format!(
                "the reserved bytes of resp are {:?} and not 0",
                answer.reserved
            )));
        }
        let room = done.request.encode(0).answer_bytes();
        if answer.used_bytes as usize > room {
            return Err(self.wrong(format!(
                "the device reports {} written bytes for an answer of at most {room} bytes",
                answer.used_bytes
            )));
        }
        if done.request == Request::Generation {
            return self.judge_generation(answer);
        }
        if done.generation != self.generation {
            if answer.status != wire::S_STALE {
                return Err(self.wrong(format!(
                    "the answer to a request of generation {1:#x} in generation {2:#x} has status {0} and not STALE",
                    answer.status, done.generation, self.generation
                )));
            }
            self.counts.stale += 1;
            return Ok(());
        }
        let pool = done.request.pool();
        let live = self.pools.contains(&pool);
        let expected = match &done.request {
            Request::PoolCreate { .. } if live => wire::S_BAD,
            Request::PoolCreate { .. } if self.pools.len() >= wire::POOLS_MAX => wire::S_LIMIT,
            Request::PoolCreate { .. } | Request::Report(_) | Request::Latencies(_) => wire::S_OK,
            _ if !live => wire::S_NO_POOL,
            _ => wire::S_OK,
        };
        if answer.status != expected {
            return Err(self.wrong(format!(
                "the answer has status {} and not {expected}: request type {}, pool {pool}",
                answer.status,
                done.request.kind()
            )));
        }
        if answer.status != wire::S_OK {
            return Ok(());
        }
        match &done.request {
            Request::PoolCreate { pool, .. } => {
                self.pools.insert(*pool);
            }
            Request::PoolDestroy { pool } => {
                self.pools.remove(pool);
                self.held.retain(|key, _| key.pool != *pool);
            }
            Request::Report(_) | Request::Latencies(_) | Request::Generation => {}
            Request::Put { .. } => self.judge_put(asked, &done.request, answer)?,
            Request::Get { .. } => self.judge_get(asked, &done.request, answer)?,
            Request::Ref { pool, pages } => self.judge_ref(asked, *pool, pages, answer)?,
            Request::Flush { pool, ranges } => {
                let (queue, sent, now) = (done.queue, asked.sent, self.tick);
                self.held.retain(|key, held| {
                    let inside = key.pool == *pool
                        && ranges.iter().any(|r| {
                            r.object == key.object
                                && key.index >= r.index
                                && (r.nr_pages == wire::TO_END || key.index - r.index < r.nr_pages)
                        });
                    // The flush drops pages that use its own queue. Requests for other pages have
                    // no order with the flush while both are in flight.
                    let same_queue = queue_of(*key) == queue;
                    if inside && !same_queue && held.since < sent {
                        held.dropped.get_or_insert(now);
                    }
                    !(inside && same_queue)
                });
            }
        }
        Ok(())
    }

    fn judge_put(
        &mut self,
        asked: &Asked,
        request: &Request,
        answer: &Answer,
    ) -> Result<(), Violation> {
        let Request::Put { pool, pages } = request else {
            unreachable!("the caller passed a request other than PUT")
        };
        for (i, (page, result)) in pages.iter().zip(&answer.pages).enumerate() {
            let key = Key {
                pool: *pool,
                object: page.object,
                index: page.index,
            };
            match result.result {
                wire::P_STORED => {
                    self.counts.stored += 1;
                    let content = asked.contents[i];
                    self.held.insert(
                        key,
                        Held {
                            cookie: page.cookie,
                            content,
                            since: self.tick,
                            dropped: None,
                        },
                    );
                }
                wire::P_REFUSED => {
                    self.counts.refused += 1;
                    self.held.remove(&key);
                }
                other => {
                    return Err(
                        self.wrong(format!("the put of {key:?} has the invalid result {other}"))
                    );
                }
            }
        }
        Ok(())
    }

    fn judge_ref(
        &mut self,
        asked: &Asked,
        pool: u32,
        pages: &[RefPage],
        answer: &Answer,
    ) -> Result<(), Violation> {
        for (page, result) in pages.iter().zip(&answer.pages) {
            let key = Key {
                pool,
                object: page.object,
                index: page.index,
            };
            let held = self.with_cookie(asked, key, page.cookie);
            match (result.result, held) {
                (wire::P_HELD, Some(_)) => self.counts.refs_held += 1,
                (wire::P_GONE, None) => {}
                (wire::P_GONE, Some(held)) => {
                    self.counts.refs_gone += u64::from(held.dropped.is_none());
                    self.held.remove(&key);
                }
                (wire::P_HELD, None) => {
                    return Err(self.wrong(format!(
                        "the reference to {key:?} with cookie {:#x} found a page that the device \
                         cannot have; for this key, the device may have {:?}",
                        page.cookie,
                        self.held.get(&key)
                    )));
                }
                (other, _) => {
                    return Err(self.wrong(format!(
                        "the reference to {key:?} has the invalid result {other}"
                    )));
                }
            }
        }
        Ok(())
    }

    /// Judges the answer to a GENERATION, which the device gives whatever generation the request
    /// carries.
    fn judge_generation(&self, answer: &Answer) -> Result<(), Violation> {
        if (answer.status, answer.generation) == (wire::S_OK, self.generation) {
            return Ok(());
        }
        Err(self.wrong(format!(
            "the answer to a GENERATION has status {} and generation {:#x} in generation {:#x}",
            answer.status, answer.generation, self.generation
        )))
    }

    /// Returns the page with this key and cookie, if the device may have had it when it executed
    /// the request `asked`.
    fn with_cookie(&self, asked: &Asked, key: Key, cookie: u64) -> Option<Held> {
        let held = self.held.get(&key).copied();
        held.filter(|h| h.cookie == cookie && h.dropped.is_none_or(|at| asked.sent < at))
    }

    fn judge_get(
        &mut self,
        asked: &Asked,
        request: &Request,
        answer: &Answer,
    ) -> Result<(), Violation> {
        let Request::Get {
            pool,
            object,
            index,
            cookies,
            retain,
        } = request
        else {
            unreachable!("the caller passed a request other than GET")
        };
        for (i, (&cookie, got)) in cookies.iter().zip(&answer.pages).enumerate() {
            let key = Key {
                pool: *pool,
                object: *object,
                index: index + i as u64,
            };
            let held = self.with_cookie(asked, key, cookie);
            let retained = match got.flags {
                0 => false,
                wire::GET_RETAINED if got.result == wire::P_HIT && retain >> i & 1 != 0 => true,
                flags => {
                    return Err(self.wrong(format!(
                        "the get of {key:?} has the forbidden flags {flags:#x} with the result {}",
                        got.result
                    )));
                }
            };
            match (got.result, held) {
                (wire::P_MISS, held) => {
                    if got.cookie != 0 {
                        return Err(
                            self.wrong(format!("the miss of {key:?} has a cookie other than 0"))
                        );
                    }
                    match held {
                        Some(Held { dropped: None, .. }) => self.counts.lost += 1,
                        _ => self.counts.misses += 1,
                    }
                }
                (wire::P_HIT, Some(held)) => {
                    if got.cookie != cookie {
                        return Err(self.wrong(format!(
                            "the get of {key:?} was a hit with cookie {:#x}, but requested {cookie:#x}",
                            got.cookie
                        )));
                    }
                    let Some(page) = &got.page else {
                        return Err(self.wrong(format!(
                            "the used length of a hit on {key:?} does not cover the page"
                        )));
                    };
                    let expected = held.content.page();
                    if **page != *expected {
                        let at = page.iter().zip(&*expected).position(|(a, b)| a != b);
                        return Err(self.wrong(format!(
                            "the get of {key:?} returned wrong bytes, the first at offset {at:?}, expected {:?}",
                            held.content
                        )));
                    }
                    self.counts.hits += 1;
                    self.counts.retained += u64::from(retained);
                    if !retained {
                        self.held.remove(&key);
                    }
                }
                (wire::P_HIT, None) => {
                    return Err(self.wrong(format!(
                        "the get of {key:?} with cookie {cookie:#x} was a hit, although the device \
                         cannot have that page; for this key, the device may have {:?}",
                        self.held.get(&key)
                    )));
                }
                (other, _) => {
                    return Err(
                        self.wrong(format!("the get of {key:?} has the invalid result {other}"))
                    );
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::requests::{PageAnswer, PutPage, Range};

    const KEY: Key = Key {
        pool: 1,
        object: 2,
        index: 3,
    };

    fn done(request: Request, status: u8, pages: Vec<PageAnswer>) -> Done {
        let used_bytes = 8;
        let answer = Answer {
            status,
            reserved: [0; 7],
            used_bytes,
            pages,
            generation: 0,
        };
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
        let asked = m.ask(vec![]);
        let create = Request::PoolCreate { pool: 1, flags: 0 };
        m.judge(&asked, &done(create, wire::S_OK, vec![]), |_| 1)
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
        let asked = m.ask(vec![content]);
        let answers = vec![PageAnswer {
            result,
            cookie: 0,
            flags: 0,
            page: None,
        }];
        let put = Request::Put {
            pool: 1,
            pages: vec![page],
        };
        m.judge(&asked, &done(put, wire::S_OK, answers), |_| 1)
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
        let asked = m.ask(vec![]);
        let answers = vec![match answer {
            Some(c) => PageAnswer {
                result: wire::P_HIT,
                cookie,
                flags,
                page: Some(c.page()),
            },
            None => PageAnswer {
                result: wire::P_MISS,
                cookie: 0,
                flags,
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
        m.judge(&asked, &done(get, wire::S_OK, answers), |_| 1)
    }

    fn refer(m: &mut Model, cookie: u64, result: u8) -> Result<(), Violation> {
        let page = RefPage {
            object: 2,
            index: 3,
            cookie,
        };
        let asked = m.ask(vec![]);
        let answers = vec![PageAnswer {
            result,
            cookie: 0,
            flags: 0,
            page: None,
        }];
        let refer = Request::Ref {
            pool: 1,
            pages: vec![page],
        };
        m.judge(&asked, &done(refer, wire::S_OK, answers), |_| 1)
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
            let asked = m.ask(vec![]);
            m.judge(&asked, &done, |_| 1)
        };
        answered(7, wire::S_OK).unwrap();
        answered(6, wire::S_OK).expect_err("the oracle accepts an earlier generation");
        answered(0, wire::S_OK).expect_err("the oracle accepts generation 0");
        answered(7, wire::S_STALE).expect_err("the oracle accepts STALE");
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
        let asked = m.ask(vec![]);
        // Put the page after the flush was sent, on another queue. The two requests have no order,
        // so the device may hold the page or not.
        put(&mut m, 11, B, wire::P_STORED).unwrap();
        m.judge(&asked, &flush, |_| 2).unwrap();
        assert_eq!(m.cookie(KEY), Some(11));
        // Send a flush on the queue of the page. The device executes it after earlier requests on
        // that queue.
        let asked = m.ask(vec![]);
        m.judge(&asked, &flush, |_| 1).unwrap();
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
        let asked_flush = m.ask(vec![]);
        let asked_get = m.ask(vec![]);
        m.judge(&asked_flush, &flush, |_| 2).unwrap();
        assert_eq!(m.held_pages(), 0);
        get(&mut m, 10, Some(A)).expect_err(
            "the oracle accepts a hit on a page whose flush was answered before the get was sent",
        );
        let hit = PageAnswer {
            result: wire::P_HIT,
            cookie: 10,
            flags: 0,
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
        m.judge(&asked_get, &hit, |_| 1).unwrap();
        m.judge(&asked_get, &hit, |_| 1)
            .expect_err("the oracle accepts a second hit on a page that was put once");
    }

    #[test]
    fn the_oracle_rejects_a_hit_in_a_destroyed_pool() {
        let mut m = model();
        put(&mut m, 10, A, wire::P_STORED).unwrap();
        let asked = m.ask(vec![]);
        let destroy = done(Request::PoolDestroy { pool: 1 }, wire::S_OK, vec![]);
        m.judge(&asked, &destroy, |_| 1).unwrap();
        get(&mut m, 10, Some(A)).expect_err("the oracle accepts a hit in a destroyed pool");
        assert_eq!(m.held_pages(), 0);
    }
}
