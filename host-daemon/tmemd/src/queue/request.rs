// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Parses the bytes of a descriptor chain into a request of the guest's driver.
//!
//! Parsing is a pure function of bytes that the guest can no longer change, because the caller has
//! copied them. The parser never panics and uses nothing but its arguments. All values of a parsed
//! request are in range. Out of scope: the contents of a PUT's pages, which the pool copies from
//! guest memory, and whether the generation is current and the pool exists, see `execute.rs`.

use virtio_tmem as wire;
use virtio_tmem::{
    Get, Latencies, PoolCreate, PutPage, Range, RefPage, Report, Req, Resp, Shape, U64,
};
use zerocopy::FromBytes;

/// Kind of a virtqueue of the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// Control queue, which has number 0.
    Control,
    /// Request queue. Request queues have the numbers 1 to `num_request_queues`.
    Request,
}

/// Fields that requests of all types have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Generation number that the request carries. It can differ from the number of the device's
    /// current generation.
    pub generation: u64,
    /// Pool number. It is in range, but the VM need not have a pool with this number. It has no
    /// meaning in a REPORT, LATENCIES or GENERATION request, which names no pool.
    pub pool: u32,
}

/// Fields of a well-formed request that depend on its type. All values are in range.
#[derive(Debug, PartialEq, Eq)]
pub enum Body<'a> {
    /// PUT: stores pages.
    Put {
        /// Keys, cookies and flags of the pages to store.
        pages: &'a [PutPage],
        /// Offset in bytes, in the readable part of the chain, at which the contents of the pages
        /// begin.
        data_offset: u64,
    },
    /// GET: returns consecutive pages of an object from `index` on, one for each cookie.
    Get {
        /// Number of the object (part of a disk) in the pool; not 0.
        object: u64,
        /// Index in the object of the first page.
        index: u64,
        /// The cookie that each page must have to be returned.
        cookies: &'a [U64],
        /// Bit mask: if bit n is set, the pool may retain the page `index` + n.
        retain: u64,
    },
    /// REF: reports that the guest has evicted retained pages unchanged.
    Ref {
        /// Keys and cookies of the evicted pages.
        pages: &'a [RefPage],
    },
    /// FLUSH: drops ranges of pages from the pool.
    Flush {
        /// The ranges of pages to drop, at least one.
        ranges: &'a [Range],
    },
    /// POOL_CREATE: creates the pool with the number in the header.
    PoolCreate {
        /// True if pages of the pool are never shared with other VMs.
        private: bool,
    },
    /// POOL_DESTROY: destroys the pool with the number in the header.
    PoolDestroy,
    /// REPORT: reports counters of the guest's driver.
    Report(&'a Report),
    /// LATENCIES: reports the latencies that readers in the guest observed.
    Latencies(&'a Latencies),
    /// GENERATION: returns the device's current generation.
    Generation,
}

/// A well-formed request that is not executed yet.
#[derive(Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Generation number and pool number of the request.
    pub header: Header,
    /// Fields of the request that depend on its type.
    pub body: Body<'a>,
}

/// Reason why a descriptor chain contains no request that can be executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejected {
    /// The worker must answer the chain with only this status: `S_BAD` or `S_UNSUPPORTED`.
    Status(u8),
    /// The writable part of the chain has no space for an answer, so the worker must stop the
    /// queue.
    Unanswerable,
}

const BAD: Rejected = Rejected::Status(wire::S_BAD);
const UNSUPPORTED: Rejected = Rejected::Status(wire::S_UNSUPPORTED);

/// Largest length in bytes of a request's head. The head is the readable part of its chain without
/// the contents of the pages of a PUT.
pub const HEAD_BYTES_MAX: usize = put_head_bytes(wire::BATCH_MAX);

/// Returns the length in bytes of the head of a PUT: the part before the contents of its pages.
const fn put_head_bytes(pages: usize) -> usize {
    size_of::<Req>() + pages * size_of::<PutPage>()
}

/// Returns true if a request of this type and count has at most [`HEAD_BYTES_MAX`] bytes.
const fn fits_head(request_type: u16, count: usize) -> bool {
    match wire::shape(request_type, count as u16) {
        Some(shape) => shape.readable_bytes <= HEAD_BYTES_MAX,
        None => false,
    }
}

const _: () = {
    assert!(fits_head(wire::T_GET, wire::BATCH_MAX) && fits_head(wire::T_FLUSH, wire::BATCH_MAX));
    assert!(fits_head(wire::T_REF, wire::BATCH_MAX) && fits_head(wire::T_POOL_CREATE, 0));
    assert!(fits_head(wire::T_POOL_DESTROY, 0) && fits_head(wire::T_REPORT, 0));
    assert!(fits_head(wire::T_LATENCIES, 0) && fits_head(wire::T_GENERATION, 0));
};

/// Returns the number of bytes that [`parse`] needs from the beginning of a chain's readable part,
/// at most [`HEAD_BYTES_MAX`]. If the readable part is shorter, it needs all of its bytes. `req`
/// contains the first bytes of the readable part.
pub fn head_bytes(req: &[u8]) -> usize {
    match Req::ref_from_prefix(req) {
        Ok((req, _)) if req.r#type.get() == wire::T_PUT => {
            put_head_bytes(usize::from(req.count.get()).min(wire::BATCH_MAX))
        }
        _ => HEAD_BYTES_MAX,
    }
}

/// Parses a request from the first [`head_bytes`] bytes of a chain's readable part and the sizes
/// of its two parts. `retain` says whether the driver has accepted [`wire::F_RETAIN`].
///
/// # Errors
/// The chain does not contain a valid request; [`Rejected`] gives the reason.
pub fn parse(
    kind: QueueKind,
    head: &[u8],
    sizes: Shape,
    retain: bool,
) -> Result<Request<'_>, Rejected> {
    if sizes.writable_bytes < size_of::<Resp>() {
        return Err(Rejected::Unanswerable);
    }
    let (req, rest) = Req::ref_from_prefix(head).map_err(|_| BAD)?;
    let (request_type, count) = (req.r#type.get(), req.count.get());
    let queue_of_type = match request_type {
        wire::T_PUT | wire::T_GET | wire::T_FLUSH => QueueKind::Request,
        wire::T_REF if retain => QueueKind::Request,
        wire::T_POOL_CREATE
        | wire::T_POOL_DESTROY
        | wire::T_REPORT
        | wire::T_LATENCIES
        | wire::T_GENERATION => QueueKind::Control,
        _ => return Err(UNSUPPORTED),
    };
    let shape = wire::shape(request_type, count).ok_or(BAD)?;
    let allowed = match request_type {
        wire::T_GET if retain => wire::retain_bits(count),
        _ => 0,
    };
    if queue_of_type != kind || sizes != shape || req.retain.get() & !allowed != 0 {
        return Err(BAD);
    }
    let header = Header {
        generation: req.generation.get(),
        pool: req.pool.get(),
    };
    if header.pool == 0 && !names_no_pool(request_type) {
        return Err(BAD);
    }
    let count = usize::from(count);
    let body = match request_type {
        wire::T_PUT => put(rest, count)?,
        wire::T_GET => get(rest, count, req.retain.get())?,
        wire::T_FLUSH => flush(rest, count)?,
        wire::T_REF => refer(rest, count)?,
        wire::T_POOL_CREATE => pool_create(rest)?,
        wire::T_POOL_DESTROY => Body::PoolDestroy,
        wire::T_REPORT => report(rest)?,
        wire::T_GENERATION => Body::Generation,
        _ => Body::Latencies(Latencies::ref_from_bytes(rest).map_err(|_| BAD)?),
    };
    Ok(Request { header, body })
}

/// Returns the number of pages, at least 1, that a request counts against the rate limit of its VM.
pub fn cost_pages(body: &Body<'_>) -> u32 {
    match body {
        Body::Put { pages, .. } => pages.len() as u32,
        Body::Get { cookies, .. } => cookies.len() as u32,
        Body::Flush { ranges } => ranges.len() as u32,
        Body::Ref { pages } => pages.len() as u32,
        _ => 1,
    }
}

/// Returns true if the device ignores the pool number in requests of this type.
fn names_no_pool(request_type: u16) -> bool {
    matches!(
        request_type,
        wire::T_REPORT | wire::T_LATENCIES | wire::T_GENERATION
    )
}

/// Returns true if the object number is not 0 and all `nr_pages` page indexes from `index` on are
/// below the limit.
fn in_range(object: u64, index: u64, nr_pages: u64) -> bool {
    let limit = 1u64 << wire::INDEX_BITS;
    object != 0 && index < limit && nr_pages <= limit - index
}

fn put(rest: &[u8], count: usize) -> Result<Body<'_>, Rejected> {
    let pages = <[PutPage]>::ref_from_bytes_with_elems(rest, count).map_err(|_| BAD)?;
    for page in pages {
        let known = in_range(page.object.get(), page.index.get(), 1);
        if !known || page.cookie.get() == 0 || page.reserved.get() != 0 {
            return Err(BAD);
        }
        if page.flags.get() & !wire::PUT_WORKINGSET != 0 {
            return Err(UNSUPPORTED);
        }
    }
    let data_offset = put_head_bytes(count) as u64;
    Ok(Body::Put { pages, data_offset })
}

fn get(rest: &[u8], count: usize, retain: u64) -> Result<Body<'_>, Rejected> {
    let (get, rest) = Get::ref_from_prefix(rest).map_err(|_| BAD)?;
    let cookies = <[U64]>::ref_from_bytes_with_elems(rest, count).map_err(|_| BAD)?;
    let (object, index) = (get.object.get(), get.index.get());
    if !in_range(object, index, count as u64) {
        return Err(BAD);
    }
    Ok(Body::Get {
        object,
        index,
        cookies,
        retain,
    })
}

fn refer(rest: &[u8], count: usize) -> Result<Body<'_>, Rejected> {
    let pages = <[RefPage]>::ref_from_bytes_with_elems(rest, count).map_err(|_| BAD)?;
    let good =
        |page: &RefPage| in_range(page.object.get(), page.index.get(), 1) && page.cookie.get() != 0;
    if pages.iter().all(good) {
        Ok(Body::Ref { pages })
    } else {
        Err(BAD)
    }
}

fn flush(rest: &[u8], count: usize) -> Result<Body<'_>, Rejected> {
    let ranges = <[Range]>::ref_from_bytes_with_elems(rest, count).map_err(|_| BAD)?;
    let good = |r: &Range| in_range(r.object.get(), r.index.get(), r.nr_pages.get());
    if ranges.iter().all(good) {
        Ok(Body::Flush { ranges })
    } else {
        Err(BAD)
    }
}

fn pool_create(rest: &[u8]) -> Result<Body<'_>, Rejected> {
    let create = PoolCreate::ref_from_bytes(rest).map_err(|_| BAD)?;
    let flags = create.flags.get();
    if flags & !wire::POOL_PRIVATE != 0 {
        return Err(UNSUPPORTED);
    }
    if create.reserved.get() != 0 {
        Err(BAD)
    } else {
        Ok(Body::PoolCreate {
            private: flags & wire::POOL_PRIVATE != 0,
        })
    }
}

fn report(rest: &[u8]) -> Result<Body<'_>, Rejected> {
    let report = Report::ref_from_bytes(rest).map_err(|_| BAD)?;
    if report.state.get() > wire::R_POISONED {
        Err(BAD)
    } else {
        Ok(Body::Report(report))
    }
}

#[cfg(test)]
mod tests {
    use super::{parse as parse_with, *};
    use virtio_tmem::{READABLE_BYTES_MAX, shape};
    use zerocopy::IntoBytes;

    /// Parses a request as if the driver had accepted the feature bit F_RETAIN. `readable` is the
    /// complete readable part, of which the parser gets the head.
    fn parse(kind: QueueKind, readable: &[u8], room: u64) -> Result<Request<'_>, Rejected> {
        let sizes = sizes(readable, room);
        let head = &readable[..head_bytes(readable).min(readable.len())];
        parse_with(kind, head, sizes, true)
    }

    fn sizes(readable: &[u8], room: u64) -> Shape {
        Shape {
            readable_bytes: readable.len(),
            writable_bytes: room as usize,
        }
    }

    const LAST_INDEX: u64 = (1 << wire::INDEX_BITS) - 1;

    fn req(request_type: u16, count: u16) -> Req {
        Req {
            generation: 7.into(),
            r#type: request_type.into(),
            count: count.into(),
            pool: 3.into(),
            retain: 0.into(),
        }
    }

    fn bytes(parts: &[&[u8]]) -> Vec<u8> {
        parts.concat()
    }

    fn put_page(object: u64, index: u64, cookie: u64, flags: u32, reserved: u32) -> PutPage {
        PutPage {
            object: object.into(),
            index: index.into(),
            cookie: cookie.into(),
            flags: flags.into(),
            reserved: reserved.into(),
        }
    }

    fn range(object: u64, index: u64, nr_pages: u64) -> Range {
        Range {
            object: object.into(),
            index: index.into(),
            nr_pages: nr_pages.into(),
        }
    }

    fn ref_page(object: u64, index: u64, cookie: u64) -> RefPage {
        RefPage {
            object: object.into(),
            index: index.into(),
            cookie: cookie.into(),
        }
    }

    /// Returns a valid request of each type, as queue, type, count and readable bytes.
    fn good() -> Vec<(QueueKind, u16, u16, Vec<u8>)> {
        use QueueKind::{Control, Request};
        let page = put_page(1, LAST_INDEX, u64::MAX, wire::PUT_WORKINGSET, 0);
        let get = Get {
            object: 1.into(),
            index: (LAST_INDEX - 1).into(),
        };
        let all = [
            (
                Request,
                wire::T_PUT,
                1,
                bytes(&[page.as_bytes(), &[9; wire::PAGE_SIZE]]),
            ),
            (Request, wire::T_GET, 2, bytes(&[get.as_bytes(), &[1; 16]])),
            (Request, wire::T_FLUSH, 1, range(1, 0, 0).as_bytes().into()),
            (Request, wire::T_REF, 1, ref_page(1, 0, 1).as_bytes().into()),
            (Control, wire::T_POOL_CREATE, 0, vec![0; 8]),
            (
                Control,
                wire::T_POOL_CREATE,
                0,
                vec![1, 0, 0, 0, 0, 0, 0, 0],
            ),
            (Control, wire::T_POOL_DESTROY, 0, vec![]),
            (Control, wire::T_REPORT, 0, vec![0; size_of::<Report>()]),
            (
                Control,
                wire::T_LATENCIES,
                0,
                vec![0; size_of::<Latencies>()],
            ),
            (Control, wire::T_GENERATION, 0, vec![]),
        ];
        all.into_iter()
            .map(|(queue, t, n, rest)| (queue, t, n, bytes(&[req(t, n).as_bytes(), &rest])))
            .collect()
    }

    fn writable(request_type: u16, count: u16) -> u64 {
        shape(request_type, count)
            .expect("the request type or the count is invalid")
            .writable_bytes as u64
    }

    #[test]
    fn valid_requests_are_parsed() {
        for (queue, t, n, readable) in good() {
            let request =
                parse(queue, &readable, writable(t, n)).expect("a valid request was refused");
            assert_eq!(
                request.header,
                Header {
                    generation: 7,
                    pool: 3
                }
            );
            match (t, request.body) {
                (wire::T_PUT, Body::Put { pages, data_offset }) => {
                    assert_eq!(pages, [put_page(1, LAST_INDEX, u64::MAX, 1, 0)]);
                    assert_eq!(readable[data_offset as usize..], [9; wire::PAGE_SIZE]);
                }
                (
                    wire::T_GET,
                    Body::Get {
                        object: 1,
                        index,
                        cookies,
                        retain: 0,
                    },
                ) => {
                    assert_eq!(index, LAST_INDEX - 1);
                    assert_eq!(cookies, [U64::new(0x0101_0101_0101_0101); 2]);
                }
                (wire::T_FLUSH, Body::Flush { ranges }) => assert_eq!(ranges, [range(1, 0, 0)]),
                (wire::T_REF, Body::Ref { pages }) => assert_eq!(pages, [ref_page(1, 0, 1)]),
                (wire::T_POOL_CREATE, Body::PoolCreate { .. }) => {}
                (wire::T_POOL_DESTROY, Body::PoolDestroy) => {}
                (wire::T_REPORT, Body::Report(_)) => {}
                (wire::T_LATENCIES, Body::Latencies(_)) => {}
                (wire::T_GENERATION, Body::Generation) => {}
                (_, body) => panic!("a request of type {t} was parsed as another type: {body:?}"),
            }
        }
    }

    /// The readable and the writable part of a request must have exactly the size that the
    /// request's type and count determine.
    #[test]
    fn requests_of_a_wrong_size_are_refused_as_bad() {
        for (queue, t, n, readable) in good() {
            let room = writable(t, n);
            for length in 0..readable.len() {
                let short = parse(queue, &readable[..length], room);
                assert_eq!(
                    short,
                    Err(BAD),
                    "a request of type {t} was accepted with only {length} readable bytes"
                );
            }
            let long = bytes(&[&readable, &[0]]);
            assert_eq!(
                parse(queue, &long, room),
                Err(BAD),
                "a request of type {t} was accepted with too many readable bytes"
            );
            let huge = vec![readable[0]; READABLE_BYTES_MAX + 1];
            parse(queue, &huge, room)
                .expect_err("a request larger than any valid request was accepted");
            for room in (size_of::<Resp>() as u64..room).chain([room + 1, u64::MAX]) {
                assert_eq!(
                    parse(queue, &readable, room),
                    Err(BAD),
                    "a request of type {t} was accepted with {room} writable bytes"
                );
            }
        }
    }

    #[test]
    fn a_request_without_space_for_a_status_is_unanswerable() {
        for room in 0..size_of::<Resp>() as u64 {
            for (queue, _, _, readable) in good() {
                assert_eq!(parse(queue, &readable, room), Err(Rejected::Unanswerable));
            }
            assert_eq!(
                parse(QueueKind::Request, &[], room),
                Err(Rejected::Unanswerable)
            );
        }
    }
}
