// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests to the device and its answers as bytes, and their division into the buffers of a chain.
//!
//! This module writes and reads the bytes according to SPEC.md. It does not use the structs of the
//! wire crate, with which the daemon decodes requests. Otherwise no test would notice a field that
//! is at a wrong offset in these structs. This module and the daemon share only constants.

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
/// Bytes of `struct virtio_tmem_generation`.
pub const GENERATION_BYTES: usize = 8;
/// Bytes of a page.
pub const PAGE: usize = PAGE_BYTES as usize;

/// Contents of a page: 4,096 bytes.
pub type Page = [u8; PAGE];

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

/// One page of a PUT.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutPage {
    /// Id of the object, which the driver takes from a counter of its own.
    pub object: u64,
    /// Page index in the object.
    pub index: u64,
    /// Cookie that the driver gives to this put. A correct driver never uses 0.
    pub cookie: u64,
    /// Flags of the page, `VIRTIO_TMEM_PUT_*`.
    pub flags: u32,
    /// Contents of the page.
    pub page: Box<Page>,
}

/// One page of a REF, which refers to a retained page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefPage {
    /// Id of the object that contains the page.
    pub object: u64,
    /// Page index in the object.
    pub index: u64,
    /// Cookie with which the page was put. A correct driver never uses 0.
    pub cookie: u64,
}

/// One range of a FLUSH.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Id of the object whose pages are flushed.
    pub object: u64,
    /// Index of the first page of the range.
    pub index: u64,
    /// Number of pages of the range, or `VIRTIO_TMEM_TO_END`.
    pub nr_pages: u64,
}

impl Range {
    /// Returns whether the range contains a page.
    #[must_use]
    pub fn contains(&self, object: u64, index: u64) -> bool {
        let to_end = self.nr_pages == wire::TO_END;
        object == self.object
            && index >= self.index
            && (to_end || index - self.index < self.nr_pages)
    }
}

/// Request of a driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// PUT: copies pages to the device.
    Put {
        /// Id of the pool that gets the pages.
        pool: u32,
        /// Pages to store. A correct driver sends 1 to 64.
        pages: Vec<PutPage>,
    },
    /// GET: gets adjacent pages of one object back.
    Get {
        /// Id of the pool that contains the pages.
        pool: u32,
        /// Id of the object that contains the pages.
        object: u64,
        /// Index of the first requested page.
        index: u64,
        /// Requested cookies, one for each page from `index` on.
        cookies: Vec<u64>,
        /// Bit n allows the device to retain the page `index` + n.
        retain: u64,
    },
    /// FLUSH: names ranges whose pages the device drops.
    Flush {
        /// Id of the pool that contains the ranges.
        pool: u32,
        /// Ranges to drop. A correct driver sends 1 to 64.
        ranges: Vec<Range>,
    },
    /// REF: names retained pages that the guest has evicted from its page cache without a change.
    Ref {
        /// Id of the pool that contains the pages.
        pool: u32,
        /// Pages to which the driver refers. A correct driver sends 1 to 64.
        pages: Vec<RefPage>,
    },
    /// POOL_CREATE: creates a pool.
    PoolCreate {
        /// Id of the new pool, which the driver chooses.
        pool: u32,
        /// Flags of the pool, `VIRTIO_TMEM_POOL_*`.
        flags: u32,
    },
    /// POOL_DESTROY: destroys a pool and its pages.
    PoolDestroy {
        /// Id of the pool to destroy.
        pool: u32,
    },
    /// REPORT: the driver's statistics, as the bytes of `struct virtio_tmem_report`.
    Report(Box<[u8; REPORT_BYTES]>),
    /// LATENCIES: waiting times of readers in the guest, as the bytes of
    /// `struct virtio_tmem_latencies`.
    Latencies(Box<[u8; LATENCIES_BYTES]>),
    /// GENERATION: requests the device's current generation.
    Generation,
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
            Self::Generation => wire::T_GENERATION,
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
                | Self::Generation
        )
    }

    /// Returns the request's field `count`: its number of pages or ranges, 0 for control requests.
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

    /// Returns the request's field `pool`: the id of its pool, or 0 if it concerns no pool.
    #[must_use]
    pub fn pool(&self) -> u32 {
        match *self {
            Self::Put { pool, .. }
            | Self::Get { pool, .. }
            | Self::Flush { pool, .. }
            | Self::Ref { pool, .. }
            | Self::PoolCreate { pool, .. }
            | Self::PoolDestroy { pool } => pool,
            Self::Report(_) | Self::Latencies(_) | Self::Generation => 0,
        }
    }

    /// Returns the request's field `retain`: the pages that the device may retain, as bits.
    #[must_use]
    pub fn retain(&self) -> u64 {
        match *self {
            Self::Get { retain, .. } => retain,
            _ => 0,
        }
    }

    /// Returns the key and cookie of each page that a PUT, GET or REF names, in the order of the
    /// request. The result is empty for other requests.
    #[must_use]
    pub fn pages(&self) -> Vec<(Key, u64)> {
        let key = |pool: &u32, object: u64, index: u64| Key {
            pool: *pool,
            object,
            index,
        };
        match self {
            Self::Put { pool, pages } => pages
                .iter()
                .map(|p| (key(pool, p.object, p.index), p.cookie))
                .collect(),
            Self::Ref { pool, pages } => pages
                .iter()
                .map(|p| (key(pool, p.object, p.index), p.cookie))
                .collect(),
            Self::Get {
                pool,
                object,
                index,
                cookies,
                ..
            } => (*index..)
                .zip(cookies)
                .map(|(index, cookie)| (key(pool, *object, index), *cookie))
                .collect(),
            _ => Vec::new(),
        }
    }

    /// Returns the sizes in bytes of the answer's metadata and of its page data.
    #[must_use]
    pub fn answer_sizes(&self) -> (usize, usize) {
        let n = usize::from(self.count());
        let (results_bytes, pages) = match self {
            Self::Put { .. } | Self::Ref { .. } => (n, 0),
            Self::Get { .. } => (n * GET_PAGE_BYTES, n),
            Self::Generation => (GENERATION_BYTES, 0),
            _ => (0, 0),
        };
        (RESP_BYTES + results_bytes, pages * PAGE)
    }

    /// Returns the request as bytes, with this generation in its header.
    #[must_use]
    pub fn encode(&self, generation: u64) -> Encoded {
        let mut meta = Vec::with_capacity(REQ_BYTES);
        meta.extend(generation.to_le_bytes());
        meta.extend(self.kind().to_le_bytes());
        meta.extend(self.count().to_le_bytes());
        meta.extend(self.pool().to_le_bytes());
        meta.extend(self.retain().to_le_bytes());
        let mut data = Vec::new();
        let (answer_meta_bytes, answer_data_bytes) = self.answer_sizes();
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
            Self::PoolDestroy { .. } | Self::Generation => {}
            Self::Report(report) => meta.extend_from_slice(&**report),
            Self::Latencies(latencies) => meta.extend_from_slice(&**latencies),
        }
        Encoded {
            meta,
            data,
            answer_meta_bytes,
            answer_data_bytes,
        }
    }
}

/// A request as bytes, before the guest writes it to its memory. The readable part is `meta`
/// followed by `data`. The writable part has space for the answer's metadata and page data. A test
/// may modify each field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// Metadata of the request: `struct virtio_tmem_req` and the fields that follow it.
    pub meta: Vec<u8>,
    /// Page data of a PUT; empty for other requests.
    pub data: Vec<u8>,
    /// Size in bytes of the part of the answer before the page data: `struct virtio_tmem_resp` and
    /// the results of the pages.
    pub answer_meta_bytes: usize,
    /// Size in bytes of the page data in the answer to a GET; 0 for other requests.
    pub answer_data_bytes: usize,
}

impl Encoded {
    /// Overwrites bytes of the request's metadata, from `offset` on.
    #[must_use]
    pub fn patch(mut self, offset: usize, bytes: &[u8]) -> Self {
        self.meta[offset..offset + bytes.len()].copy_from_slice(bytes);
        self
    }

    /// Returns the size of the writable part in bytes.
    #[must_use]
    pub fn answer_bytes(&self) -> usize {
        self.answer_meta_bytes + self.answer_data_bytes
    }
}

/// Way of dividing a request and its answer into descriptors. The device must accept every
/// division.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Division as in the guest driver: a descriptor for each small part and for each page of data.
    Natural,
    /// One descriptor for each contiguous piece of memory.
    Whole,
    /// Division at random places into at most `max` descriptors.
    Random {
        /// Seed of the random places at which the chain is divided.
        seed: u64,
        /// Largest number of descriptors into which a chain (request and answer) is divided, at
        /// least 4.
        max: usize,
    },
}

/// Divides the pieces `(address, bytes, writable)` of a chain into buffers. A piece of whole pages
/// that begins at a page boundary is page data.
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

/// Device's answer for one page of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageAnswer {
    /// Result of the page, `VIRTIO_TMEM_P_*`, or UNANSWERED if the device wrote none.
    pub result: u8,
    /// Cookie of the page that a GET returns; 0 for a PUT or REF.
    pub cookie: u64,
    /// Flags for the page of a GET, `VIRTIO_TMEM_GET_*`; 0 for a PUT or REF.
    pub flags: u8,
    /// Reserved bytes of the result of a GET, which a correct device sets to 0.
    pub reserved: [u8; 6],
    /// Contents of the page if the result is HIT and the device reports that it wrote them.
    pub page: Option<Box<Page>>,
}

/// The device's answer to a request, decoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Status of the request, `VIRTIO_TMEM_S_*`.
    pub status: u8,
    /// Reserved bytes of `struct virtio_tmem_resp`, which a correct device sets to 0.
    pub reserved: [u8; 7],
    /// Number of bytes that the device wrote, as the used element of the ring says.
    pub used_bytes: u32,
    /// Answer for each page of a PUT, GET or REF, if the status is OK, STALE or NO_POOL. Answers
    /// with another status have no results.
    pub pages: Vec<PageAnswer>,
    /// Generation in the answer to a GENERATION whose status is OK; 0 if the used length does not
    /// cover it, and in other answers.
    pub generation: u64,
}

/// Decodes the device's answer to a request. `meta` is the answer's metadata in guest memory, and
/// `page(i)` returns the data of the i-th page.
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
        reserved: [0; 6],
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
        generation: 0,
    };
    if !matches!(status, wire::S_OK | wire::S_STALE | wire::S_NO_POOL) {
        return answer;
    }
    let has_generation = *request == Request::Generation && status == wire::S_OK;
    if has_generation && covered(RESP_BYTES + GENERATION_BYTES) {
        let bytes = &meta[RESP_BYTES..RESP_BYTES + GENERATION_BYTES];
        let bytes = bytes.try_into();
        answer.generation = u64::from_le_bytes(bytes.expect("the slice does not have 8 bytes"));
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
                    reserved: meta[at + 10..at + GET_PAGE_BYTES]
                        .try_into()
                        .expect("the slice does not have six bytes"),
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
    fn request_sizes_match_the_structs_of_the_wire_format() {
        assert_eq!(REQ_BYTES, size_of::<wire::Req>());
        assert_eq!(RESP_BYTES, size_of::<wire::Resp>());
        assert_eq!(PUT_PAGE_BYTES, size_of::<wire::PutPage>());
        assert_eq!(GET_PAGE_BYTES, size_of::<wire::GetPage>());
        assert_eq!(REF_PAGE_BYTES, size_of::<wire::RefPage>());
        assert_eq!(REPORT_BYTES, size_of::<wire::Report>());
        assert_eq!(LATENCIES_BYTES, size_of::<wire::Latencies>());
        assert_eq!(GENERATION_BYTES, size_of::<wire::Generation>());
    }

    /// Decodes the bytes of an answer to a GET of two pages: a hit and a miss. A result that the
    /// used length does not cover counts as missing.
    #[test]
    fn an_answer_has_only_the_results_that_its_used_length_covers() {
        let get = Request::Get {
            pool: 1,
            object: 2,
            index: 3,
            cookies: vec![0x0102_0304_0506_0708, 9],
            retain: 1,
        };
        let mut meta = vec![wire::S_OK, 0, 0, 0, 0, 0, 0, 0];
        meta.extend([8, 7, 6, 5, 4, 3, 2, 1, wire::P_HIT, wire::GET_RETAINED]);
        meta.extend([0, 0, 0, 0, 0, 1]);
        meta.extend([0, 0, 0, 0, 0, 0, 0, 0, wire::P_MISS, 0]);
        meta.extend([0, 0, 0, 0, 0, 0]);
        let all = meta.len() + PAGE;
        let decoded = |bytes: usize| decode(&get, bytes as u32, &meta, |_| Box::new([7; PAGE]));
        let answer = decoded(all);
        assert_eq!((answer.status, answer.pages.len()), (wire::S_OK, 2));
        let hit = &answer.pages[0];
        assert_eq!((hit.result, hit.flags), (wire::P_HIT, wire::GET_RETAINED));
        assert_eq!((hit.cookie, hit.reserved[5]), (0x0102_0304_0506_0708, 1));
        assert_eq!(hit.page.as_deref(), Some(&[7; PAGE]));
        assert_eq!(
            (answer.pages[1].result, answer.pages[1].cookie),
            (wire::P_MISS, 0)
        );
        let unanswered = |bytes| {
            let pages = decoded(bytes).pages;
            let results = pages.iter().map(|page| page.result == wire::S_UNANSWERED);
            results.collect::<Vec<bool>>()
        };
        assert_eq!(unanswered(all - 1), [true, false]);
        assert_eq!(unanswered(meta.len() - 1), [true, true]);
        assert_eq!(decoded(RESP_BYTES - 1).status, wire::S_UNANSWERED);
    }

    /// Divides a chain in all ways. The buffers of each division must have the same bytes in the
    /// same order, with the readable bytes first.
    #[test]
    fn dividing_a_chain_into_buffers_keeps_its_bytes() {
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
