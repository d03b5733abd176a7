// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Executes a request against a tenant and writes the answer into guest memory.
//!
//! Page data passes through buffers of the worker in both directions: the guest can change its
//! memory at any time, and the pool must never see that. Work is done in slices of
//! [`SLICE_PAGES`]; once a drain's time is up, what has not begun is refused or missed.

use crate::chain::{Chain, WriteError};
use crate::memory::GuestMemory;
use crate::outside::Outside;
use crate::peer::Peer;
use crate::request::{Body, Request};
use crate::vm::Vm;
use std::io;
use std::sync::atomic::Ordering;
#[cfg(test)]
use tmem_pool::Page;
use tmem_pool::{CreateError, GetResult, Put, PutResult, SecretPages, Spent, Time};
use virtio_tmem as wire;
use virtio_tmem::{GetPage, Resp};
use zerocopy::IntoBytes;

/// Pages between two looks at the clock of a drain: compressing one takes some µs, so that a slice
/// is a small part of the 10 ms that a drain may take.
const SLICE_PAGES: usize = 16;

/// Pages that a FLUSH drops in one turn of its vring. Each takes about 1 µs, so that this takes as
/// long as a batch of puts; a range may hold millions, which would hold up other VMs and a drain.
const FLUSH_PAGES_MAX: usize = 512;

const RESP_BYTES: usize = size_of::<Resp>();
const GET_PAGE_BYTES: usize = size_of::<GetPage>();

/// What a request needs beside itself.
pub struct Context<'vm, 'a> {
    /// Whose pages these are.
    pub vm: &'vm Vm,
    /// Who waits for the answer.
    pub peer: &'a Peer,
    /// The connection's generation.
    pub generation: u64,
    /// Time.
    pub outside: &'a Outside,
    /// It asks for more than its rate: all is refused or missed.
    pub limited: bool,
    /// True once a drain waits no longer: what is not begun is refused or missed.
    pub cut: &'a dyn Fn() -> bool,
}

impl Context<'_, '_> {
    fn now(&self) -> Time {
        Time(self.outside.now_ns())
    }
}

/// Buffers of a worker for the pages of a GET.
pub struct PageBuffers(SecretPages);

impl PageBuffers {
    /// Room for the largest batch.
    ///
    /// # Errors
    /// The system has not the address space.
    pub fn new() -> io::Result<PageBuffers> {
        SecretPages::new(wire::BATCH_MAX).map(PageBuffers)
    }

    /// They are neither swapped nor dumped.
    #[cfg(test)]
    pub fn pages(&mut self) -> &mut [Page] {
        self.0.pages()
    }
}

fn resp(status: u8) -> Resp {
    Resp {
        status,
        reserved: [0; 7],
    }
}

/// Writes an answer that is a status alone; returns the bytes written.
pub fn answer_status(
    chain: &Chain,
    memory: &GuestMemory,
    peer: &Peer,
    status: u8,
) -> Result<u32, WriteError> {
    let wrote = chain.write(memory, peer, 0, resp(status).as_bytes())?;
    debug_assert!(wrote, "parse made sure that a status fits");
    Ok(RESP_BYTES as u32)
}

/// Executes and answers; returns the bytes to report in the used element. None: a FLUSH that drops
/// much has dropped a part and is not answered; executing it again goes on. What a GET has taken out
/// is in `spent`, to be freed once the guest has its answer.
pub fn execute<'vm>(
    context: &Context<'vm, '_>,
    request: &Request<'_>,
    chain: &Chain,
    memory: &GuestMemory,
    buffers: &mut PageBuffers,
    spent: &mut Vec<Spent<'vm>>,
) -> Result<Option<u32>, WriteError> {
    let stale = request.header.generation != context.generation;
    if stale {
        context
            .vm
            .counters
            .requests_stale
            .fetch_add(1, Ordering::Relaxed);
    }
    let pool = request.header.pool;
    let tenant = &context.vm.tenant;
    let status = match &request.body {
        Body::Put { .. } => return put(context, stale, request, chain, memory).map(Some),
        Body::Get { .. } => {
            return get(context, stale, request, chain, memory, buffers, spent).map(Some);
        }
        _ if stale => wire::S_STALE,
        Body::Flush { ranges } => {
            let mut budget = FLUSH_PAGES_MAX;
            let mut flush = |range: &wire::Range| {
                let nr_pages = match range.nr_pages.get() {
                    wire::TO_END => None,
                    nr_pages => Some(nr_pages),
                };
                let (object, index) = (range.object.get(), range.index.get());
                let done = tenant.flush_some(pool, object, index, nr_pages, &mut budget);
                if let (Some(tap), Ok(true)) = (&context.vm.tap, done) {
                    tap.flush(pool, object, index, nr_pages);
                }
                done
            };
            let mut status = wire::S_OK;
            for range in *ranges {
                match flush(range) {
                    Ok(true) => {}
                    Ok(false) => return Ok(None),
                    Err(tmem_pool::NoPool) => {
                        status = wire::S_NO_POOL;
                        break;
                    }
                }
            }
            status
        }
        Body::PoolCreate => match tenant.create_pool(pool) {
            Ok(()) => wire::S_OK,
            Err(CreateError::Exists) => wire::S_BAD,
            Err(CreateError::Limit) => wire::S_LIMIT,
        },
        Body::PoolDestroy => match tenant.destroy_pool(pool) {
            Ok(()) => {
                if let Some(tap) = &context.vm.tap {
                    tap.destroy_pool(pool);
                }
                wire::S_OK
            }
            Err(tmem_pool::NoPool) => wire::S_NO_POOL,
        },
        Body::Report(report) => {
            context.vm.set_report(**report);
            wire::S_OK
        }
        Body::Latencies(latencies) => {
            context.vm.set_latencies(**latencies);
            wire::S_OK
        }
    };
    answer_status(chain, memory, context.peer, status).map(Some)
}

fn put(
    context: &Context<'_, '_>,
    stale: bool,
    request: &Request<'_>,
    chain: &Chain,
    memory: &GuestMemory,
) -> Result<u32, WriteError> {
    let Body::Put { pages, data } = &request.body else {
        return Ok(0);
    };
    let pool = request.header.pool;
    let mut results = [wire::P_REFUSED; wire::BATCH_MAX];
    let mut status = if stale { wire::S_STALE } else { wire::S_OK };
    let mut done = 0;
    while status == wire::S_OK && done < pages.len() {
        let end = (done + SLICE_PAGES).min(pages.len());
        let frozen = context.vm.frozen.load(Ordering::Relaxed);
        if frozen || context.limited || (context.cut)() {
            // A refused page leaves nothing behind, not even what was put before.
            for page in &pages[done..] {
                let (object, index) = (page.object.get(), page.index.get());
                if context
                    .vm
                    .tenant
                    .flush(pool, object, index, Some(1))
                    .is_err()
                {
                    status = wire::S_NO_POOL;
                    break;
                }
                if let (true, Some(tap)) = (frozen || context.limited, &context.vm.tap) {
                    tap.flush(pool, object, index, Some(1));
                }
            }
            let counters = &context.vm.counters;
            let counter = match (frozen, context.limited) {
                (true, _) => &counters.refused_frozen,
                (false, true) => &counters.limited_pages,
                (false, false) => &counters.drain_cut_pages,
            };
            counter.fetch_add((pages.len() - done) as u64, Ordering::Relaxed);
            break;
        }
        let puts: Vec<Put<'_>> = pages[done..end]
            .iter()
            .zip(&data[done..end])
            .map(|(page, data)| Put {
                object: page.object.get(),
                index: page.index.get(),
                cookie: page.cookie.get(),
                workingset: page.flags.get() & wire::PUT_WORKINGSET != 0,
                page: data,
            })
            .collect();
        let mut slice = [PutResult::Refused; SLICE_PAGES];
        let slice = &mut slice[..puts.len()];
        match context.vm.tenant.put(context.now(), pool, &puts, slice) {
            Ok(()) => {
                if let Some(tap) = &context.vm.tap {
                    tap.put(pool, &puts, slice);
                }
                for (result, put) in results[done..end].iter_mut().zip(slice) {
                    *result = match put {
                        PutResult::Stored => wire::P_STORED,
                        PutResult::Refused => wire::P_REFUSED,
                    };
                }
            }
            Err(tmem_pool::NoPool) => status = wire::S_NO_POOL,
        }
        done = end;
    }
    if status == wire::S_NO_POOL {
        // The pool went, perhaps between two slices; so did what they stored.
        results.fill(wire::P_REFUSED);
    }
    let mut answer = [0u8; RESP_BYTES + wire::BATCH_MAX];
    answer[..RESP_BYTES].copy_from_slice(resp(status).as_bytes());
    let bytes = RESP_BYTES + pages.len();
    answer[RESP_BYTES..bytes].copy_from_slice(&results[..pages.len()]);
    let wrote = chain.write(memory, context.peer, 0, &answer[..bytes])?;
    debug_assert!(wrote, "parse made sure that the answer fits");
    Ok(bytes as u32)
}

fn get<'vm>(
    context: &Context<'vm, '_>,
    stale: bool,
    request: &Request<'_>,
    chain: &Chain,
    memory: &GuestMemory,
    buffers: &mut PageBuffers,
    spent: &mut Vec<Spent<'vm>>,
) -> Result<u32, WriteError> {
    let Body::Get {
        object,
        index,
        cookies,
    } = &request.body
    else {
        return Ok(0);
    };
    let count = cookies.len();
    let miss = GetPage {
        cookie: 0.into(),
        result: wire::P_MISS,
        reserved: [0; 7],
    };
    let mut results = [miss; wire::BATCH_MAX];
    let mut status = if stale { wire::S_STALE } else { wire::S_OK };
    let mut done = 0;
    while status == wire::S_OK && done < count {
        if context.limited || (context.cut)() {
            let cut = (count - done) as u64;
            let counters = &context.vm.counters;
            let counter = match context.limited {
                true => &counters.limited_pages,
                false => &counters.drain_cut_pages,
            };
            counter.fetch_add(cut, Ordering::Relaxed);
            // Drops nothing, and says whether there is such a pool: what changes is pages to misses, not
            // the status of a request.
            let pool = request.header.pool;
            if context
                .vm
                .tenant
                .flush(pool, *object, *index, Some(0))
                .is_err()
            {
                status = wire::S_NO_POOL;
                results.fill(miss);
            }
            break;
        }
        let end = (done + SLICE_PAGES).min(count);
        let mut wanted = [0u64; SLICE_PAGES];
        for (wanted, cookie) in wanted.iter_mut().zip(&cookies[done..end]) {
            *wanted = cookie.get();
        }
        let wanted = &wanted[..end - done];
        let mut slice = [GetResult::Miss; SLICE_PAGES];
        let slice = &mut slice[..end - done];
        let out = &mut buffers.0.pages()[done..end];
        let first = index + done as u64;
        let got = context.vm.tenant.get(
            context.now(),
            request.header.pool,
            *object,
            first,
            wanted,
            out,
            slice,
        );
        match got {
            Ok(taken) => {
                spent.push(taken);
                if let Some(tap) = &context.vm.tap {
                    let hits = slice.iter().map(|result| *result != GetResult::Miss);
                    tap.get(request.header.pool, *object, first, hits);
                }
                for ((result, got), wanted) in results[done..end].iter_mut().zip(slice).zip(wanted)
                {
                    // The pool answers no other cookie; looked at here all the same, since a page
                    // of another put is the one thing that must never leave.
                    if let GetResult::Hit { cookie } = got
                        && *cookie == *wanted
                    {
                        result.cookie = (*cookie).into();
                        result.result = wire::P_HIT;
                    }
                }
            }
            Err(tmem_pool::NoPool) => {
                status = wire::S_NO_POOL;
                results.fill(miss);
            }
        }
        done = end;
    }

    let mut answer = [0u8; RESP_BYTES + wire::BATCH_MAX * GET_PAGE_BYTES];
    answer[..RESP_BYTES].copy_from_slice(resp(status).as_bytes());
    let data_offset = RESP_BYTES + count * GET_PAGE_BYTES;
    answer[RESP_BYTES..data_offset].copy_from_slice(results[..count].as_bytes());
    let mut wrote = chain.write(memory, context.peer, 0, &answer[..data_offset])?;
    let mut used_bytes = data_offset;
    // Neighbouring hits go in one copy; the data of a miss is left as the driver had it.
    let mut page = 0;
    while page < count {
        let hits = results[page..count]
            .iter()
            .take_while(|r| r.result == wire::P_HIT)
            .count();
        if hits > 0 {
            let offset = data_offset + page * wire::PAGE_SIZE;
            let bytes = buffers.0.pages()[page..page + hits].as_flattened();
            wrote &= chain.write(memory, context.peer, offset as u64, bytes)?;
            used_bytes = offset + bytes.len();
        }
        page += hits.max(1);
    }
    debug_assert!(wrote, "parse made sure that the answer fits");
    Ok(used_bytes as u32)
}
