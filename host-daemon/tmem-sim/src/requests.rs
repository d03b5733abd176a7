// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests to the device and its answers as bytes, and their division into the buffers of a chain.
//!
//! The layout is written by hand from SPEC.md. It does not use the structs of the wire crate, with
//! which the daemon decodes requests. Otherwise no test would notice a field that is at a wrong
//! offset in these structs. Only constants are shared.

use virtio_tmem as wire;

use crate::memory::PAGE_BYTES;
use crate::ring::Buffer;

/// Bytes of `struct virtio_tmem_req`.
pub const REQ_BYTES: usize = 24;
/// Bytes of `struct virtio_tmem_resp`.
pub const RESP_BYTES: usize = 8;
/// Bytes of `struct virtio_tmem_put_page`.
pub const PUT_PAGE_BYTES: usize = 32;
/// Bytes of `struct virtio_tmem_get_page`.
pub const GET_PAGE_BYTES: usize = 16;
/// Bytes of `struct virtio_tmem_ref_page`.
pub const REF_PAGE_BYTES: usize = 24;
/// Bytes of `struct virtio_tmem_report`.
pub const REPORT_BYTES: usize = 152;
/// Bytes of `struct virtio_tmem_latencies`.
pub const LATENCIES_BYTES: usize = 136;
/// Bytes of a page.
pub const PAGE: usize = PAGE_BYTES as usize;

/// Contents of a page.
pub type Page = [u8; PAGE];

/// One page of a PUT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutPage {
    /// Object id, from the driver's own counter.
    pub object: u64,
    /// Page index in the object.
    pub index: u64,
    /// Cookie of the page. A correct driver never uses 0.
    pub cookie: u64,
    /// Flags of the page, `VIRTIO_TMEM_PUT_*`.
    pub flags: u32,
    /// Contents of the page.
    pub page: Box<Page>,
}

/// One page of a REF.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefPage {
    /// Object id.
    pub object: u64,
    /// Page index in the object.
    pub index: u64,
    /// Cookie of the put of the page. A correct driver never uses 0.
    pub cookie: u64,
}

/// One range of a FLUSH.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Object id.
    pub object: u64,
    /// Index of the first page.
    pub index: u64,
    /// Number of pages, or `VIRTIO_TMEM_TO_END`.
    pub nr_pages: u64,
}

/// Request of a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Copies pages to the device.
    Put {
        /// Pool id.
        pool: u32,
        /// Pages; a correct driver sends 1 to 64.
        pages: Vec<PutPage>,
    },
    /// Gets adjacent pages of one object back.
    Get {
        /// Pool id.
        pool: u32,
        /// Object id.
        object: u64,
        /// Index of the first page.
        index: u64,
        /// Requested cookies, one for each page from `index` on.
        cookies: Vec<u64>,
        /// Bit n allows the device to retain the page `index` + n.
        retain: u64,
    },
    /// Names ranges that the device can forget.
    Flush {
        /// Pool id.
        pool: u32,
        /// Ranges; a correct driver sends 1 to 64.
        ranges: Vec<Range>,
    },
    /// Names retained pages that the driver has evicted unchanged.
    Ref {
        /// Pool id.
        pool: u32,
        /// Pages; a correct driver sends 1 to 64.
        pages: Vec<RefPage>,
    },
    /// Creates a pool.
    PoolCreate {
        /// Pool id.
        pool: u32,
        /// Flags; a correct driver sends 0.
        flags: u32,
    },
    /// Ends a pool and its pages.
    PoolDestroy {
        /// Pool id.
        pool: u32,
    },
    /// The driver's statistics: `struct virtio_tmem_report` as bytes.
    Report(Box<[u8; REPORT_BYTES]>),
    /// Latencies of the driver's readers: `struct virtio_tmem_latencies` as bytes.
    Latencies(Box<[u8; LATENCIES_BYTES]>),
}

impl Request {
    /// Returns the type of the request, `VIRTIO_TMEM_T_*`.
    #[must_use]
    pub fn kind(&self) -> u16 {
        match self {
            Self::Put { .. } => wire::T_PUT,
            Self::Get { .. } => wire::T_GET,
            Self::Flush { .. } => wire::T_FLUSH,
            Self::Ref { .. } => wire::T_REF,
            Self::PoolCreate { .. } => wire::T_POOL_CREATE,
            Self::PoolDestroy { .. } => wire::T_POOL_DESTROY,
            Self::Report(_) => wire::T_REPORT,
            Self::Latencies(_) => wire::T_LATENCIES,
        }
    }

    /// Returns whether the request belongs on the control queue.
    #[must_use]
    pub fn is_control(&self) -> bool {
        matches!(
            self,
            Self::PoolCreate { .. }
                | Self::PoolDestroy { .. }
                | Self::Report(_)
                | Self::Latencies(_)
        )
    }

    /// Returns the field `count`.
    #[must_use]
    pub fn count(&self) -> u16 {
        let n = match self {
            Self::Put { pages, .. } => pages.len(),
            Self::Get { cookies, .. } => cookies.len(),
            Self::Flush { ranges, .. } => ranges.len(),
            Self::Ref { pages, .. } => pages.len(),
            _ => 0,
        };
        u16::try_from(n).expect("the request has 65,536 pages or more")
    }

    /// Returns the field `pool`.
    #[must_use]
    pub fn pool(&self) -> u32 {
        match *self {
            Self::Put { pool, .. }
            | Self::Get { pool, .. }
            | Self::Flush { pool, .. }
            | Self::Ref { pool, .. }
            | Self::PoolCreate { pool, .. }
            | Self::PoolDestroy { pool } => pool,
            Self::Report(_) | Self::Latencies(_) => 0,
        }
    }

    /// Returns the field `retain`.
    #[must_use]
    pub fn retain(&self) -> u64 {
        match *self {
            Self::Get { retain, .. } => retain,
            _ => 0,
        }
    }

    /// Returns the bytes of the chain with this generation.
    #[must_use]
    pub fn encode(&self, generation: u64) -> Encoded {
        let mut meta = Vec::with_capacity(REQ_BYTES);
        meta.extend(generation.to_le_bytes());
        meta.extend(self.kind().to_le_bytes());
        meta.extend(self.count().to_le_bytes());
        meta.extend(self.pool().to_le_bytes());
        meta.extend(self.retain().to_le_bytes());
        let mut data = Vec::new();
        let n = usize::from(self.count());
        let (results_bytes, answer_pages) = match self {
            Self::Put { .. } | Self::Ref { .. } => (n, 0),
            Self::Get { .. } => (n * GET_PAGE_BYTES, n),
            _ => (0, 0),
        };
        match self {
            Self::Put { pages, .. } => {
                for p in pages {
                    meta.extend(p.object.to_le_bytes());
                    meta.extend(p.index.to_le_bytes());
                    meta.extend(p.cookie.to_le_bytes());
                    meta.extend(p.flags.to_le_bytes());
                    meta.extend(0u32.to_le_bytes());
                    data.extend_from_slice(&*p.page);
                }
            }
            Self::Get {
                object,
                index,
                cookies,
                ..
            } => {
                meta.extend(object.to_le_bytes());
                meta.extend(index.to_le_bytes());
                meta.extend(cookies.iter().flat_map(|c| c.to_le_bytes()));
            }
            Self::Flush { ranges, .. } => {
                for r in ranges {
                    meta.extend(r.object.to_le_bytes());
                    meta.extend(r.index.to_le_bytes());
                    meta.extend(r.nr_pages.to_le_bytes());
                }
            }
            Self::Ref { pages, .. } => {
                for p in pages {
                    meta.extend(p.object.to_le_bytes());
                    meta.extend(p.index.to_le_bytes());
                    meta.extend(p.cookie.to_le_bytes());
                }
            }
            Self::PoolCreate { flags, .. } => {
                meta.extend(flags.to_le_bytes());
                meta.extend(0u32.to_le_bytes());
            }
            Self::PoolDestroy { .. } => {}
            Self::Report(report) => meta.extend_from_slice(&**report),
            Self::Latencies(latencies) => meta.extend_from_slice(&**latencies),
        }
        Encoded {
            meta,
            data,
            answer_meta_bytes: RESP_BYTES + results_bytes,
            answer_data_bytes: answer_pages * PAGE,
        }
    }
}

/// A request as bytes, before it is written to guest memory. The readable part is `meta` followed
/// by `data`. The writable part has room for the answer's metadata and page data. A test may modify
/// each field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// `struct virtio_tmem_req` and the fields that follow it, without page data.
    pub meta: Vec<u8>,
    /// Page data of a PUT.
    pub data: Vec<u8>,
    /// Number of bytes for `resp` and the results of the pages.
    pub answer_meta_bytes: usize,
    /// Number of bytes for page data of a GET.
    pub answer_data_bytes: usize,
}

impl Encoded {
    /// Overwrites bytes of `meta`.
    #[must_use]
    pub fn patch(mut self, offset: usize, bytes: &[u8]) -> Self {
        self.meta[offset..offset + bytes.len()].copy_from_slice(bytes);
        self
    }

    /// Returns the bytes of the writable part.
    #[must_use]
    pub fn answer_bytes(&self) -> usize {
        self.answer_meta_bytes + self.answer_data_bytes
    }
}

/// Way of dividing a chain into descriptors. The device must accept every division.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Division as in the driver: the small parts, then one descriptor for each page.
    Natural,
    /// One descriptor for each contiguous piece of memory.
    Whole,
    /// Division at random places into at most `max` descriptors.
    Random {
        /// Seed of the random places.
        seed: u64,
        /// Largest number of descriptors. It must be at least 4.
        max: usize,
    },
}

/// Divides the pieces `(address, bytes, writable)` of a chain into buffers. A piece that is longer
/// than a page and begins at a page boundary is page data.
#[must_use]
pub fn cut(stretches: &[(u64, usize, bool)], how: Cut) -> Vec<Buffer> {
    let mut out = Vec::new();
    let mut push = |addr: u64, len: usize, writable: bool| {
        if len > 0 {
            out.push(Buffer {
                addr,
                len: len as u32,
                writable,
            });
        }
    };
    match how {
        Cut::Whole => stretches.iter().for_each(|&(a, n, w)| push(a, n, w)),
        Cut::Natural => {
            for &(addr, bytes, writable) in stretches {
                if addr % PAGE_BYTES == 0 && bytes % PAGE == 0 {
                    (0..bytes / PAGE)
                        .for_each(|i| push(addr + i as u64 * PAGE_BYTES, PAGE, writable));
                } else {
                    push(addr, bytes, writable);
                }
            }
        }
        Cut::Random { seed, max } => {
            let mut rng = fastrand::Rng::with_seed(seed);
            let live = stretches.iter().filter(|s| s.1 > 0).count();
            let mut spare = max.saturating_sub(live);
            for &(addr, bytes, writable) in stretches {
                let cuts = rng.usize(0..=spare.min(16));
                let mut places: Vec<usize> = (0..cuts).map(|_| rng.usize(0..=bytes)).collect();
                places.extend([0, bytes]);
                places.sort_unstable();
                places.dedup();
                spare -= places.len().saturating_sub(2);
                for pair in places.windows(2) {
                    push(addr + pair[0] as u64, pair[1] - pair[0], writable);
                }
            }
        }
    }
    out
}

/// Answer for one page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageAnswer {
    /// Result of the page, `VIRTIO_TMEM_P_*`, or UNANSWERED if the device wrote none.
    pub result: u8,
    /// Cookie of a GET's page; 0 for a PUT or REF.
    pub cookie: u64,
    /// Flags of a GET's page, `VIRTIO_TMEM_GET_*`; 0 for a PUT or REF.
    pub flags: u8,
    /// Contents of the page of a HIT, if the used length covers them.
    pub page: Option<Box<Page>>,
}

/// A decoded answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Status of the request, `VIRTIO_TMEM_S_*`.
    pub status: u8,
    /// Reserved bytes of `resp`.
    pub reserved: [u8; 7],
    /// Length of the used element.
    pub used_bytes: u32,
    /// One answer for each page of a PUT, GET or REF.
    pub pages: Vec<PageAnswer>,
}

/// Decodes an answer from the writable part. `meta` is the metadata as it is in memory, and
/// `page(i)` returns the page number i.
///
/// A result that the used length does not cover counts as UNANSWERED.
#[must_use]
pub fn decode(
    request: &Request,
    used_bytes: u32,
    meta: &[u8],
    mut page: impl FnMut(usize) -> Box<Page>,
) -> Answer {
    let n = usize::from(request.count());
    let covered = |end: usize| used_bytes as usize >= end;
    let unanswered = PageAnswer {
        result: wire::S_UNANSWERED,
        cookie: 0,
        flags: 0,
        page: None,
    };
    let status = if covered(RESP_BYTES) {
        meta[0]
    } else {
        wire::S_UNANSWERED
    };
    let mut answer = Answer {
        status,
        reserved: meta[1..RESP_BYTES]
            .try_into()
            .expect("the slice does not have seven bytes"),
        used_bytes,
        pages: Vec::new(),
    };
    if status != wire::S_OK {
        return answer;
    }
    answer.pages = match request {
        Request::Put { .. } | Request::Ref { .. } => (0..n)
            .map(|i| {
                let at = RESP_BYTES + i;
                let result = if covered(at + 1) {
                    meta[at]
                } else {
                    unanswered.result
                };
                PageAnswer {
                    result,
                    ..unanswered.clone()
                }
            })
            .collect(),
        Request::Get { .. } => (0..n)
            .map(|i| {
                let at = RESP_BYTES + i * GET_PAGE_BYTES;
                if !covered(at + GET_PAGE_BYTES) {
                    return unanswered.clone();
                }
                let cookie = u64::from_le_bytes(
                    meta[at..at + 8]
                        .try_into()
                        .expect("the slice does not have eight bytes"),
                );
                let result = meta[at + 8];
                let end = RESP_BYTES + n * GET_PAGE_BYTES + (i + 1) * PAGE;
                let hit = result == wire::P_HIT;
                if hit && !covered(end) {
                    return unanswered.clone();
                }
                PageAnswer {
                    result,
                    cookie,
                    flags: meta[at + 9],
                    page: hit.then(|| page(i)),
                }
            })
            .collect(),
        _ => Vec::new(),
    };
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares the hand-written sizes with those of the wire crate, which another test compares
    /// with the C header.
    #[test]
    fn request_sizes_match_the_wire_crate() {
        assert_eq!(REQ_BYTES, size_of::<wire::Req>());
        assert_eq!(RESP_BYTES, size_of::<wire::Resp>());
        assert_eq!(PUT_PAGE_BYTES, size_of::<wire::PutPage>());
        assert_eq!(GET_PAGE_BYTES, size_of::<wire::GetPage>());
        assert_eq!(REF_PAGE_BYTES, size_of::<wire::RefPage>());
        assert_eq!(REPORT_BYTES, size_of::<wire::Report>());
        assert_eq!(LATENCIES_BYTES, size_of::<wire::Latencies>());
    }

    /// Divides a chain in all ways. Each division must have the same bytes in the same order,
    /// readable ones first.
    #[test]
    fn each_cut_of_a_chain_has_the_same_bytes() {
        let stretches = [(4000, 96, false), (4096, 8192, false), (16384, 9, true)];
        let flat = |buffers: &[Buffer]| -> Vec<(u64, bool)> {
            buffers
                .iter()
                .flat_map(|b| (b.addr..b.addr + u64::from(b.len)).map(|a| (a, b.writable)))
                .collect()
        };
        let whole = flat(&cut(&stretches, Cut::Whole));
        assert_eq!(whole.len(), 96 + 8192 + 9);
        assert_eq!(cut(&stretches, Cut::Natural).len(), 4);
        assert_eq!(flat(&cut(&stretches, Cut::Natural)), whole);
        for seed in 0..200 {
            let buffers = cut(&stretches, Cut::Random { seed, max: 12 });
            assert!(buffers.len() <= 12);
            assert_eq!(
                flat(&buffers),
                whole,
                "the division with seed {seed} has the wrong bytes"
            );
        }
    }
}
