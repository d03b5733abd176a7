// SPDX-License-Identifier: Apache-2.0 OR MIT
//! From the bytes of a descriptor chain to a request, or to the reason why it is none.
//!
//! A pure function of bytes that the guest can no longer change: the caller has copied them. What
//! it returns is in range; whether the generation is right and the pool is live is for the
//! executor. It must never panic and never look at anything but its arguments.

use virtio_tmem as wire;
use virtio_tmem::{Get, PoolCreate, PutPage, Range, Report, Req, Resp, U64};
use zerocopy::FromBytes;

/// The two kinds of virtqueue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueKind {
    /// Queue 0.
    Control,
    /// Queues 1 to `num_request_queues`.
    Request,
}

/// What every request carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// As the driver knows it.
    pub generation: u64,
    /// In range, but not known to be live. 0 for a report.
    pub pool: u32,
}

/// A request of good shape whose values are in range.
#[derive(Debug, PartialEq, Eq)]
pub enum Body<'a> {
    /// `pages.len() == data.len()`.
    Put {
        /// Keys, cookies and flags.
        pages: &'a [PutPage],
        /// Page contents.
        data: &'a [[u8; wire::PAGE_SIZE]],
    },
    /// The run of pages from `index` on, one per cookie.
    Get {
        /// Not 0.
        object: u64,
        /// First page.
        index: u64,
        /// The cookie wanted of each page.
        cookies: &'a [U64],
    },
    /// Ranges to drop.
    Flush {
        /// At least one.
        ranges: &'a [Range],
    },
    /// Create the pool of the header.
    PoolCreate,
    /// Destroy the pool of the header.
    PoolDestroy,
    /// The driver's counters.
    Report(&'a Report),
}

/// A request to execute.
#[derive(Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Generation and pool.
    pub header: Header,
    /// The rest, by type.
    pub body: Body<'a>,
}

/// Why there is nothing to execute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rejected {
    /// Answer with this status and nothing else: `S_BAD` or `S_UNSUPPORTED`.
    Status(u8),
    /// There is no room for an answer: the queue stops.
    Unanswerable,
}

const BAD: Rejected = Rejected::Status(wire::S_BAD);
const UNSUPPORTED: Rejected = Rejected::Status(wire::S_UNSUPPORTED);

/// Reads a request from the readable bytes of a chain, given the length of its writable part.
///
/// A caller that found more than [`wire::READABLE_BYTES_MAX`] readable bytes may pass any
/// `READABLE_BYTES_MAX + 1` of them: no request is that large.
pub fn parse(
    kind: QueueKind,
    readable: &[u8],
    writable_bytes: u64,
) -> Result<Request<'_>, Rejected> {
    if writable_bytes < size_of::<Resp>() as u64 {
        return Err(Rejected::Unanswerable);
    }
    let (req, rest) = Req::ref_from_prefix(readable).map_err(|_| BAD)?;
    let (request_type, count) = (req.r#type.get(), req.count.get());
    let queue_of_type = match request_type {
        wire::T_PUT | wire::T_GET | wire::T_FLUSH => QueueKind::Request,
        wire::T_POOL_CREATE | wire::T_POOL_DESTROY | wire::T_REPORT => QueueKind::Control,
        _ => return Err(UNSUPPORTED),
    };
    let shape = wire::shape(request_type, count).ok_or(BAD)?;
    if queue_of_type != kind
        || readable.len() != shape.readable_bytes
        || writable_bytes != shape.writable_bytes as u64
        || req.reserved.get() != 0
    {
        return Err(BAD);
    }
    let header = Header {
        generation: req.generation.get(),
        pool: req.pool.get(),
    };
    if header.pool == 0 && request_type != wire::T_REPORT {
        return Err(BAD);
    }
    let count = usize::from(count);
    let body = match request_type {
        wire::T_PUT => put(rest, count)?,
        wire::T_GET => get(rest, count)?,
        wire::T_FLUSH => flush(rest, count)?,
        wire::T_POOL_CREATE => pool_create(rest)?,
        wire::T_POOL_DESTROY => Body::PoolDestroy,
        _ => report(rest)?,
    };
    Ok(Request { header, body })
}

/// Pages that a request of bad or good shape asks for, for accounting of work: at least 1.
pub fn cost_pages(body: &Body<'_>) -> u32 {
    match body {
        Body::Put { pages, .. } => pages.len() as u32,
        Body::Get { cookies, .. } => cookies.len() as u32,
        Body::Flush { ranges } => ranges.len() as u32,
        _ => 1,
    }
}

/// The pages from index on exist: object is not 0 and no index reaches the limit.
fn in_range(object: u64, index: u64, nr_pages: u64) -> bool {
    let limit = 1u64 << wire::INDEX_BITS;
    object != 0 && index < limit && nr_pages <= limit - index
}

fn put(rest: &[u8], count: usize) -> Result<Body<'_>, Rejected> {
    let (pages, data) = <[PutPage]>::ref_from_prefix_with_elems(rest, count).map_err(|_| BAD)?;
    let data =
        <[[u8; wire::PAGE_SIZE]]>::ref_from_bytes_with_elems(data, count).map_err(|_| BAD)?;
    for page in pages {
        let known = in_range(page.object.get(), page.index.get(), 1);
        if !known || page.cookie.get() == 0 || page.reserved.get() != 0 {
            return Err(BAD);
        }
        if page.flags.get() & !wire::PUT_WORKINGSET != 0 {
            return Err(UNSUPPORTED);
        }
    }
    Ok(Body::Put { pages, data })
}

fn get(rest: &[u8], count: usize) -> Result<Body<'_>, Rejected> {
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
    })
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
    if create.flags.get() != 0 {
        return Err(UNSUPPORTED);
    }
    if create.reserved.get() != 0 {
        Err(BAD)
    } else {
        Ok(Body::PoolCreate)
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
