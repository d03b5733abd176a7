// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Computes the reaction that the specification requires to a descriptor chain. This code reads the
//! chain from the guest's memory, without the daemon's parser and without the library with which
//! the daemon walks chains.
//!
//! Out of scope: running the daemon, and reading what it wrote (see `machine.rs`).

use std::collections::{BTreeSet, HashMap};
use std::rc::Rc;

use tmem_model::requests::{
    GENERATION_BYTES, GET_PAGE_BYTES, LATENCIES_BYTES, PAGE, PUT_PAGE_BYTES, REPORT_BYTES,
    REQ_BYTES, RESP_BYTES,
};
use virtio_tmem as wire;

use crate::ram::Ram;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const DESCRIPTOR: u64 = 16;
const RANGE_BYTES: usize = 24;
const REF_PAGE_BYTES: usize = 24;

/// Piece of guest memory: its address and length in bytes.
pub type Piece = (u64, u64);

/// Buffers of a valid descriptor chain.
#[derive(Default)]
pub struct Chain {
    /// Pieces of guest memory that the device reads.
    pub readable: Vec<Piece>,
    /// Pieces of guest memory that the device may write.
    pub writable: Vec<Piece>,
    /// Indirect descriptor table of the chain, or None if the chain has none.
    pub table: Option<Piece>,
    /// Whether a readable descriptor follows a writable one.
    pub out_of_order: bool,
}

/// Walks the descriptor chain that begins at the descriptor `head` of a table with `size`
/// descriptors. Returns None if the device cannot follow the chain, for example because it loops.
pub fn walk(image: &[u8], table: u64, size: u16, head: u16) -> Option<Chain> {
    let mut chain = Chain::default();
    let (mut table, mut length, mut at) = (table, u64::from(size), u64::from(head));
    let (mut steps, mut all, mut sum) = (0, 0, 0u64);
    loop {
        if at >= length || steps == length {
            return None;
        }
        let bytes = Ram::read(image, table.checked_add(DESCRIPTOR * at)?, DESCRIPTOR)?;
        let address = u64::from_le_bytes(bytes[..8].try_into().ok()?);
        let bytes_long = u64::from(u32::from_le_bytes(bytes[8..12].try_into().ok()?));
        let flags = u16::from_le_bytes([bytes[12], bytes[13]]);
        let next = u16::from_le_bytes([bytes[14], bytes[15]]);
        if flags & INDIRECT != 0 {
            let whole = bytes_long % DESCRIPTOR == 0;
            length = bytes_long / DESCRIPTOR;
            if chain.table.is_some() || !whole || length > u64::from(u16::MAX) {
                return None;
            }
            (table, at, steps) = (address, 0, 0);
            chain.table = Some((address, bytes_long));
            continue;
        }
        (steps, all, sum) = (steps + 1, all + 1, sum + bytes_long);
        if all > usize::from(wire::QUEUE_SIZE_MAX) || sum > u64::from(u32::MAX) {
            return None;
        }
        if bytes_long > 0 {
            Ram::places(address, bytes_long)?;
            if flags & WRITE != 0 {
                chain.writable.push((address, bytes_long));
            } else {
                chain.out_of_order |= !chain.writable.is_empty();
                chain.readable.push((address, bytes_long));
            }
        }
        if flags & NEXT == 0 {
            return Some(chain);
        }
        at = u64::from(next);
    }
}

impl Chain {
    /// Returns the number of bytes that the device may write to the chain.
    pub fn room(&self) -> u64 {
        self.writable.iter().map(|piece| piece.1).sum()
    }

    /// Returns the bytes of the chain's readable part, which is the request. Leaves out bytes
    /// beyond the length of the longest possible request.
    pub fn request(&self, image: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        for (address, bytes) in &self.readable {
            let left = (wire::READABLE_BYTES_MAX + 1 - out.len()) as u64;
            out.extend(
                Ram::read(image, *address, (*bytes).min(left))
                    .expect("the descriptor's range is outside of memory"),
            );
        }
        out
    }

    /// Returns the pieces of guest memory that contain the first `bytes` bytes of the writable
    /// part.
    pub fn answer(&self, bytes: u64) -> Vec<Piece> {
        let mut left = bytes;
        let mut pieces = Vec::new();
        for (address, bytes) in &self.writable {
            let now = left.min(*bytes);
            if now > 0 {
                pieces.push((*address, now));
            }
            left -= now;
        }
        pieces
    }
}

/// Key of a page: pool, object and index.
type Key = (u32, u64, u64);
/// Contents of a page, shared by reference count.
type Page = Rc<[u8]>;

/// Contents of a well-formed request, by its type.
enum Asked {
    Put(Vec<(u64, u64, u64, Page)>),
    /// A GET: object, first index, cookies, and the bits of pages that the device may retain.
    Get(u64, u64, Vec<u64>, u64),
    Ref(Vec<(u64, u64, u64)>),
    Flush(Vec<(u64, u64, u64)>),
    Create,
    Destroy,
    Generation,
    Told,
}

/// Reaction to a descriptor chain that the specification requires.
pub enum Due {
    /// The device gives no answer and stops the queue.
    Stop,
    /// The device answers with one of these statuses and does not execute the request.
    Refused(&'static [u8]),
    /// The device executes the request.
    Run(Carry),
}

/// A well-formed request, which the device must execute.
pub struct Carry {
    generation: u64,
    pool: u32,
    asked: Asked,
}

const ODD: Due = Due::Refused(&[wire::S_BAD, wire::S_UNSUPPORTED]);

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(
        bytes[at..at + 4]
            .try_into()
            .expect("the slice does not have 4 bytes"),
    )
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(
        bytes[at..at + 8]
            .try_into()
            .expect("the slice does not have 8 bytes"),
    )
}

/// Returns whether a request may name `pages` pages from `index` on. The object must not be 0, and
/// no page number may have more than INDEX_BITS bits.
fn exist(object: u64, index: u64, pages: u64) -> bool {
    let end = u128::from(index) + u128::from(pages);
    object != 0 && index < 1 << wire::INDEX_BITS && end <= 1 << wire::INDEX_BITS
}

/// Returns the sizes in bytes of the readable and writable parts of a request with the type `kind`
/// and the field `count`. Returns None if no well-formed request has this type and count.
pub fn sizes(kind: u16, count: u16) -> Option<(usize, usize)> {
    let n = usize::from(count);
    let batch = n > 0 && n <= wire::BATCH_MAX;
    let (good, readable, writable) = match kind {
        wire::T_PUT => (batch, n * (PUT_PAGE_BYTES + PAGE), n),
        wire::T_GET => (batch, 16 + 8 * n, n * (GET_PAGE_BYTES + PAGE)),
        wire::T_FLUSH => (batch, n * RANGE_BYTES, 0),
        wire::T_REF => (batch, n * REF_PAGE_BYTES, n),
        wire::T_POOL_CREATE => (n == 0, 8, 0),
        wire::T_POOL_DESTROY => (n == 0, 0, 0),
        wire::T_REPORT => (n == 0, REPORT_BYTES, 0),
        wire::T_LATENCIES => (n == 0, LATENCIES_BYTES, 0),
        wire::T_GENERATION => (n == 0, 0, GENERATION_BYTES),
        _ => return None,
    };
    good.then_some((REQ_BYTES + readable, RESP_BYTES + writable))
}

/// Returns the reaction that the specification requires to a request. `control` says whether the
/// queue is the control queue, and `room` is the size of the writable part. `out_of_order` says
/// whether a readable descriptor follows a writable one. `retain` says whether the driver has
/// accepted the feature bit of retained pages.
pub fn due(control: bool, bytes: &[u8], room: u64, out_of_order: bool, retain: bool) -> Due {
    if room < RESP_BYTES as u64 {
        return Due::Stop;
    }
    if bytes.len() < REQ_BYTES || out_of_order {
        return ODD;
    }
    let (kind, count, pool) = (u16_at(bytes, 8), u16_at(bytes, 10), u32_at(bytes, 12));
    let Some((readable, writable)) = sizes(kind, count) else {
        return ODD;
    };
    let no_pool = matches!(
        kind,
        wire::T_REPORT | wire::T_LATENCIES | wire::T_GENERATION
    );
    let for_control = no_pool || matches!(kind, wire::T_POOL_CREATE | wire::T_POOL_DESTROY);
    let shaped = bytes.len() == readable && room == writable as u64 && control == for_control;
    let allowed = match kind {
        wire::T_GET if retain => u64::MAX >> (64 - u32::from(count)),
        wire::T_REF if !retain => return ODD,
        _ => 0,
    };
    let bits = u64_at(bytes, 16);
    if !shaped || bits & !allowed != 0 || (pool == 0 && !no_pool) {
        return ODD;
    }
    let (body, n) = (&bytes[REQ_BYTES..], usize::from(count));
    let asked = match kind {
        wire::T_PUT => {
            let (keys, data) = body.split_at(n * PUT_PAGE_BYTES);
            let mut pages = Vec::new();
            for (key, page) in keys.chunks(PUT_PAGE_BYTES).zip(data.chunks(PAGE)) {
                let (object, index, cookie) = (u64_at(key, 0), u64_at(key, 8), u64_at(key, 16));
                let flags = u32_at(key, 24);
                let known = flags & !wire::PUT_WORKINGSET == 0 && u32_at(key, 28) == 0;
                if !exist(object, index, 1) || cookie == 0 || !known {
                    return ODD;
                }
                pages.push((object, index, cookie, page.into()));
            }
            Asked::Put(pages)
        }
        wire::T_GET => {
            let (object, index) = (u64_at(body, 0), u64_at(body, 8));
            if !exist(object, index, n as u64) {
                return ODD;
            }
            let cookies = body[16..].chunks(8).map(|cookie| u64_at(cookie, 0));
            Asked::Get(object, index, cookies.collect(), bits)
        }
        wire::T_REF => {
            let pages = body.chunks(REF_PAGE_BYTES);
            let pages = pages.map(|p| (u64_at(p, 0), u64_at(p, 8), u64_at(p, 16)));
            let pages: Vec<_> = pages.collect();
            if !pages.iter().all(|p| exist(p.0, p.1, 1) && p.2 != 0) {
                return ODD;
            }
            Asked::Ref(pages)
        }
        wire::T_FLUSH => {
            let ranges = body.chunks(RANGE_BYTES);
            let ranges = ranges.map(|r| (u64_at(r, 0), u64_at(r, 8), u64_at(r, 16)));
            let ranges: Vec<_> = ranges.collect();
            if !ranges.iter().all(|r| exist(r.0, r.1, r.2)) {
                return ODD;
            }
            Asked::Flush(ranges)
        }
        wire::T_POOL_CREATE if u64_at(body, 0) != 0 => return ODD,
        wire::T_POOL_CREATE => Asked::Create,
        wire::T_POOL_DESTROY => Asked::Destroy,
        wire::T_GENERATION => Asked::Generation,
        wire::T_REPORT if u32_at(body, 4) > wire::R_POISONED => return ODD,
        _ => Asked::Told,
    };
    Due::Run(Carry {
        generation: u64_at(bytes, 0),
        pool,
        asked,
    })
}

/// A page that the device has stored.
struct Held {
    cookie: u64,
    page: Page,
    /// Whether the device must still have the page. False after a get that named another cookie
    /// than the page's: the get missed, and the device may drop the page at such a get.
    certain: bool,
}

/// Model of the guest's pools and of the pages that the device may hold.
#[derive(Default)]
pub struct Model {
    generation: u64,
    pools: BTreeSet<u32>,
    held: HashMap<Key, Held>,
    /// Whether a drain has begun. From then on, the device may answer gets of pages that it holds
    /// with a miss, and may drop these pages.
    pub drained: bool,
}

impl Model {
    /// Begins a generation, in which the device has no pool and no page yet.
    pub fn begin(&mut self, generation: u64) {
        assert!(generation != 0 && generation != self.generation);
        *self = Model {
            generation,
            ..Model::default()
        };
    }

    /// Returns the generation that requests must carry now.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    fn status(&self, carry: &Carry) -> u8 {
        let live = self.pools.contains(&carry.pool);
        match carry.asked {
            Asked::Generation => wire::S_OK,
            _ if carry.generation != self.generation => wire::S_STALE,
            Asked::Create if live => wire::S_BAD,
            Asked::Create if self.pools.len() >= wire::POOLS_MAX => wire::S_LIMIT,
            Asked::Create | Asked::Told => wire::S_OK,
            _ if !live => wire::S_NO_POOL,
            _ => wire::S_OK,
        }
    }

    /// Asserts that the bytes that the device wrote are a correct answer to a request. Updates the
    /// model.
    pub fn judge(&mut self, carry: &Carry, answer: &[u8]) {
        let status = self.status(carry);
        assert_eq!(
            answer[0], status,
            "the answer has another status than expected"
        );
        let (pool, ok) = (carry.pool, status == wire::S_OK);
        let results = &answer[RESP_BYTES..];
        match &carry.asked {
            Asked::Put(pages) => {
                assert_eq!(
                    results.len(),
                    pages.len(),
                    "the results of a PUT have the wrong length"
                );
                for ((object, index, cookie, page), result) in pages.iter().zip(results) {
                    let key = (pool, *object, *index);
                    match *result {
                        wire::P_STORED if ok => {
                            let held = Held {
                                cookie: *cookie,
                                page: page.clone(),
                                certain: true,
                            };
                            self.held.insert(key, held);
                        }
                        wire::P_REFUSED if ok => {
                            self.held.remove(&key);
                        }
                        wire::P_REFUSED => {}
                        other => panic!("a PUT has the unknown result {other}"),
                    }
                }
            }
            Asked::Ref(pages) => {
                assert_eq!(
                    results.len(),
                    pages.len(),
                    "the results of a REF have the wrong length"
                );
                for ((object, index, cookie), result) in pages.iter().zip(results) {
                    let key = (pool, *object, *index);
                    let held = self.held.get(&key).filter(|_| ok);
                    let held = held.filter(|held| held.cookie == *cookie);
                    match (*result, held) {
                        (wire::P_HELD, Some(_)) | (wire::P_GONE, None) => {}
                        (wire::P_GONE, Some(held)) => {
                            let lost = held.certain && !self.drained;
                            assert!(
                                !lost,
                                "a REF was answered with GONE although the page {key:?} is stored"
                            );
                            self.held.remove(&key);
                        }
                        (other, _) => {
                            panic!("a REF of a page that is not stored has result {other}")
                        }
                    }
                }
            }
            Asked::Get(object, index, cookies, retain) => {
                let data = cookies.len() * GET_PAGE_BYTES;
                assert!(
                    results.len() >= data,
                    "the answer to a GET is too short for its results"
                );
                let mut end = data;
                for (number, cookie) in cookies.iter().enumerate() {
                    let key = (pool, *object, index + number as u64);
                    let result = &results[number * GET_PAGE_BYTES..][..GET_PAGE_BYTES];
                    assert_eq!(
                        result[10..],
                        [0; 6],
                        "a reserved byte in a result of a GET is not 0"
                    );
                    let retained = match result[9] {
                        0 => false,
                        wire::GET_RETAINED => true,
                        other => panic!("a result of a GET has the unknown flags {other}"),
                    };
                    let may_retain = result[8] == wire::P_HIT && retain >> number & 1 != 0;
                    assert!(
                        !retained || may_retain,
                        "a get retained the page {key:?} although req.retain does not allow it"
                    );
                    let held = self.held.get_mut(&key).filter(|_| ok);
                    match (result[8], held) {
                        (wire::P_MISS, held) => {
                            assert_eq!(u64_at(result, 0), 0, "the result of a miss names a cookie");
                            if let Some(held) = held {
                                let lost = held.certain && held.cookie == *cookie;
                                assert!(
                                    !lost || self.drained,
                                    "a get missed although the page {key:?} is stored"
                                );
                                held.certain = false;
                            }
                        }
                        (wire::P_HIT, Some(held)) => {
                            assert_eq!(
                                held.cookie, *cookie,
                                "a get was a hit, although the stored page has another cookie"
                            );
                            assert_eq!(
                                u64_at(result, 0),
                                *cookie,
                                "the result of a hit names the wrong cookie"
                            );
                            let from = data + number * PAGE;
                            end = from + PAGE;
                            assert!(
                                results[from..end] == *held.page,
                                "a get returned wrong bytes for the page {key:?}"
                            );
                            if !retained {
                                self.held.remove(&key);
                            }
                        }
                        (other, _) => {
                            panic!("a GET of a page that is not stored has result {other}")
                        }
                    }
                }
                assert_eq!(
                    results.len(),
                    end,
                    "the answer to a GET has the wrong length"
                );
            }
            Asked::Generation => {
                assert_eq!(
                    results,
                    self.generation.to_le_bytes(),
                    "the answer to a GENERATION has another generation than the current one"
                );
            }
            asked => {
                assert!(
                    results.is_empty(),
                    "the answer to a request without results has bytes after the status"
                );
                match asked {
                    _ if !ok => {}
                    Asked::Flush(ranges) => self.held.retain(|key, _| {
                        !ranges.iter().any(|(object, index, pages)| {
                            let to_end = *pages == wire::TO_END;
                            let inside = key.2 >= *index && (to_end || key.2 - index < *pages);
                            key.0 == pool && key.1 == *object && inside
                        })
                    }),
                    Asked::Create => {
                        self.pools.insert(pool);
                    }
                    Asked::Destroy => {
                        self.pools.remove(&pool);
                        self.held.retain(|key, _| key.0 != pool);
                    }
                    _ => {}
                }
            }
        }
    }
}
