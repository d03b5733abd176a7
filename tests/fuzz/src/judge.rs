// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Computes the reaction that the specification requires to a descriptor chain. This code reads the
//! chain from the guest's memory, without the daemon's parser and without the library with which
//! the daemon walks chains.
//!
//! The oracle of `tmem-model` judges the answers to well-formed requests. Out of scope: running the
//! daemon, and reading what it wrote (see `machine.rs`).

use tmem_model::requests::{
    GENERATION_BYTES, GET_PAGE_BYTES, LATENCIES_BYTES, PAGE, PUT_PAGE_BYTES, REF_PAGE_BYTES,
    REPORT_BYTES, REQ_BYTES, RESP_BYTES, decode,
};
use tmem_model::{Done, Model, PutPage, Range, RefPage, Request, Violation};
use virtio_tmem as wire;

use crate::ram::Ram;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const DESCRIPTOR: u64 = 16;
const RANGE_BYTES: usize = 24;

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
    pub fn writable_bytes(&self) -> u64 {
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

/// Reaction to a descriptor chain that the specification requires.
pub enum Due {
    /// The device gives no answer and stops the queue.
    Stop,
    /// The device answers with one of these statuses and does not execute the request.
    Refused(&'static [u8]),
    /// The device answers this well-formed request, and executes it if the generation is current.
    Answer {
        /// Generation that the request carries.
        generation: u64,
        /// The request that the chain contains.
        request: Request,
    },
}

const MALFORMED: Due = Due::Refused(&[wire::S_BAD, wire::S_UNSUPPORTED]);

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
fn is_in_range(object: u64, index: u64, pages: u64) -> bool {
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
        return MALFORMED;
    }
    let (kind, count, pool) = (u16_at(bytes, 8), u16_at(bytes, 10), u32_at(bytes, 12));
    let Some((readable, writable)) = sizes(kind, count) else {
        return MALFORMED;
    };
    let no_pool = matches!(
        kind,
        wire::T_REPORT | wire::T_LATENCIES | wire::T_GENERATION
    );
    let for_control = no_pool || matches!(kind, wire::T_POOL_CREATE | wire::T_POOL_DESTROY);
    let shaped = bytes.len() == readable && room == writable as u64 && control == for_control;
    let allowed = match kind {
        wire::T_GET if retain => u64::MAX >> (64 - u32::from(count)),
        wire::T_REF if !retain => return MALFORMED,
        _ => 0,
    };
    let bits = u64_at(bytes, 16);
    if !shaped || bits & !allowed != 0 || (pool == 0 && !no_pool) {
        return MALFORMED;
    }
    let (body, n) = (&bytes[REQ_BYTES..], usize::from(count));
    let key = |bytes: &[u8]| (u64_at(bytes, 0), u64_at(bytes, 8), u64_at(bytes, 16));
    let request = match kind {
        wire::T_PUT => {
            let (keys, data) = body.split_at(n * PUT_PAGE_BYTES);
            let mut pages = Vec::new();
            for (bytes, page) in keys.chunks(PUT_PAGE_BYTES).zip(data.chunks(PAGE)) {
                let (object, index, cookie) = key(bytes);
                let flags = u32_at(bytes, 24);
                let known = flags & !wire::PUT_WORKINGSET == 0 && u32_at(bytes, 28) == 0;
                if !is_in_range(object, index, 1) || cookie == 0 || !known {
                    return MALFORMED;
                }
                let page = page.to_vec().into_boxed_slice();
                pages.push(PutPage {
                    object,
                    index,
                    cookie,
                    flags,
                    page: page.try_into().expect("the slice does not have a page"),
                });
            }
            Request::Put { pool, pages }
        }
        wire::T_GET => {
            let (object, index) = (u64_at(body, 0), u64_at(body, 8));
            if !is_in_range(object, index, n as u64) {
                return MALFORMED;
            }
            let cookies = body[16..].chunks(8).map(|cookie| u64_at(cookie, 0));
            Request::Get {
                pool,
                object,
                index,
                cookies: cookies.collect(),
                retain: bits,
            }
        }
        wire::T_REF => {
            let pages = body.chunks(REF_PAGE_BYTES).map(key);
            let pages = pages.map(|(object, index, cookie)| RefPage {
                object,
                index,
                cookie,
            });
            let pages: Vec<_> = pages.collect();
            let valid = |p: &RefPage| is_in_range(p.object, p.index, 1) && p.cookie != 0;
            if !pages.iter().all(valid) {
                return MALFORMED;
            }
            Request::Ref { pool, pages }
        }
        wire::T_FLUSH => {
            let ranges = body.chunks(RANGE_BYTES).map(key);
            let ranges = ranges.map(|(object, index, nr_pages)| Range {
                object,
                index,
                nr_pages,
            });
            let ranges: Vec<_> = ranges.collect();
            if !ranges
                .iter()
                .all(|r| is_in_range(r.object, r.index, r.nr_pages))
            {
                return MALFORMED;
            }
            Request::Flush { pool, ranges }
        }
        wire::T_POOL_CREATE if u64_at(body, 0) & !u64::from(wire::POOL_PRIVATE) != 0 => {
            return MALFORMED;
        }
        wire::T_POOL_CREATE => Request::PoolCreate {
            pool,
            flags: u32_at(body, 0),
        },
        wire::T_POOL_DESTROY => Request::PoolDestroy { pool },
        wire::T_GENERATION => Request::Generation,
        wire::T_REPORT if u32_at(body, 4) > wire::R_POISONED => return MALFORMED,
        wire::T_REPORT => {
            let report = body.try_into().expect("the body does not have a report");
            Request::Report(Box::new(report))
        }
        _ => {
            let latencies = body.try_into().expect("the body does not have latencies");
            Request::Latencies(Box::new(latencies))
        }
    };
    Due::Answer {
        generation: u64_at(bytes, 0),
        request,
    }
}

/// Checks the bytes that the device wrote as its answer to a request. Updates the model.
///
/// # Errors
/// When the specification forbids the answer.
pub fn judge(
    model: &mut Model,
    queue: usize,
    (generation, request): (u64, Request),
    written: &[u8],
) -> Result<(), Violation> {
    let data = request.answer_sizes().0;
    let answer = decode(&request, written.len() as u32, written, |page| {
        let page = &written[data + page * PAGE..][..PAGE];
        Box::new(page.try_into().expect("the slice does not have a page"))
    });
    let done = Done {
        token: 0,
        queue,
        request,
        generation,
        answer,
    };
    // The request has the bytes of its pages, and only one queue has work.
    let sent = model.record_request(Vec::new());
    model.judge(&sent, &done, |_| queue)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tmem_model::Content;

    const GENERATION: u64 = 7;

    fn put(cookies: &[u64]) -> Request {
        let page = |(index, cookie): (u64, &u64)| PutPage {
            object: 2,
            index,
            cookie: *cookie,
            flags: wire::PUT_WORKINGSET,
            page: Content::Noise(*cookie).page(),
        };
        Request::Put {
            pool: 1,
            pages: (3..).zip(cookies).map(page).collect(),
        }
    }

    fn get(pool: u32, cookies: &[u64], retain: u64) -> Request {
        Request::Get {
            pool,
            object: 2,
            index: 3,
            cookies: cookies.to_vec(),
            retain,
        }
    }

    fn refer(cookies: &[u64]) -> Request {
        let page = |(index, cookie): (u64, &u64)| RefPage {
            object: 2,
            index,
            cookie: *cookie,
        };
        Request::Ref {
            pool: 1,
            pages: (3..).zip(cookies).map(page).collect(),
        }
    }

    /// Returns an answer as bytes: the status, and what follows it.
    fn bytes(status: u8, rest: &[u8]) -> Vec<u8> {
        [&[status, 0, 0, 0, 0, 0, 0, 0], rest].concat()
    }

    /// Returns the result of a page of a GET: the cookie of a hit, or 0 for a miss.
    fn result(cookie: u64, flags: u8) -> Vec<u8> {
        let result = if cookie == 0 {
            wire::P_MISS
        } else {
            wire::P_HIT
        };
        [&cookie.to_le_bytes()[..], &[result, flags], &[0; 6]].concat()
    }

    /// Judges the correct answers to a sequence of requests, and each of these answers with one
    /// changed byte, a missing byte and a byte too many. The specification allows one answer only
    /// for each request, because the device has memory for all pages.
    #[test]
    fn a_changed_byte_of_an_answer_is_a_violation() {
        let noise = |cookie| Content::Noise(cookie).page().to_vec();
        let create = Request::PoolCreate { pool: 1, flags: 0 };
        let range = Range {
            object: 2,
            index: 4,
            nr_pages: 1,
        };
        let flush = Request::Flush {
            pool: 1,
            ranges: vec![range],
        };
        let (kept, retained) = (result(12, 0), result(10, wire::GET_RETAINED));
        let stored = [wire::P_STORED; 3];
        let steps = [
            (create.clone(), bytes(wire::S_OK, &[])),
            (create, bytes(wire::S_BAD, &[])),
            (
                Request::Generation,
                bytes(wire::S_OK, &GENERATION.to_le_bytes()),
            ),
            (put(&[10, 11, 12]), bytes(wire::S_OK, &stored)),
            (
                get(1, &[10, 99, 12], 1),
                bytes(
                    wire::S_OK,
                    &[
                        retained,
                        result(0, 0),
                        kept,
                        noise(10),
                        vec![0; PAGE],
                        noise(12),
                    ]
                    .concat(),
                ),
            ),
            (
                refer(&[10, 99, 12]),
                bytes(wire::S_OK, &[wire::P_HELD, wire::P_GONE, wire::P_GONE]),
            ),
            (flush, bytes(wire::S_OK, &[])),
            (
                get(1, &[10, 11, 12], 0),
                bytes(
                    wire::S_OK,
                    &[result(10, 0), result(0, 0), result(0, 0), noise(10)].concat(),
                ),
            ),
            (get(2, &[10], 0), bytes(wire::S_NO_POOL, &result(0, 0))),
            (Request::PoolDestroy { pool: 1 }, bytes(wire::S_OK, &[])),
            (put(&[13]), bytes(wire::S_NO_POOL, &[wire::P_REFUSED])),
            (refer(&[10]), bytes(wire::S_NO_POOL, &[wire::P_GONE])),
        ];
        let mut model = Model::new("guest").lossless();
        model.begin(GENERATION).unwrap();
        for (request, written) in steps {
            let chain = request.encode(GENERATION);
            let readable = [chain.meta.clone(), chain.data.clone()].concat();
            let room = chain.answer_bytes() as u64;
            let parsed = match due(request.is_control(), &readable, room, false, true) {
                Due::Answer {
                    generation,
                    request,
                } => (generation, request),
                _ => panic!("a well-formed request counts as malformed: {request:?}"),
            };
            assert_eq!(parsed, (GENERATION, request.clone()));
            let judged = |written: &[u8]| judge(&mut model.clone(), 1, parsed.clone(), written);
            // Leave out the data of the second page, which is a miss: its bytes have no meaning.
            let data = request.answer_sizes().0;
            let miss = data + PAGE..data + 2 * PAGE;
            for at in (0..written.len()).filter(|at| !miss.contains(at)) {
                // Change each byte of the metadata, and some bytes of the pages.
                if at > 64 && at % 97 > 0 && at + 1 < written.len() {
                    continue;
                }
                for bit in [1, 0x80] {
                    let mut wrong = written.clone();
                    wrong[at] ^= bit;
                    // The device need not retain the page for which the request allows it.
                    let not_retained = request.retain() & 1 == 1 && (at, bit) == (17, 1);
                    assert!(
                        judged(&wrong).is_err() || not_retained,
                        "byte {at} may be {:#x} in the answer to {request:?}",
                        wrong[at]
                    );
                }
            }
            let more = [&written[..], &[0]].concat();
            for wrong in [&written[..written.len() - 1], &more] {
                let length = wrong.len();
                assert!(
                    length < RESP_BYTES || judged(wrong).is_err(),
                    "an answer to {request:?} may have {length} bytes"
                );
            }
            judge(&mut model, 1, parsed, &written).unwrap();
        }
    }
}
