// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Executes a request against a tenant and writes the answer into guest memory.
//!
//! Page data passes through buffers of the worker in both directions: the guest can change its
//! memory at any time, and the pool must never see that. Work is done in groups of up to
//! [`GROUP_PAGES`]; once a drain's time is up, what has not begun is refused or missed.
//!
//! A request that costs more than a scheduling slice is interrupted between two groups. What it has
//! done by then is in the pool or in guest memory, results included, so that only two numbers are kept of it
//! ([`Progress`]), and no page of a guest stays in a buffer of the worker. The next slice reads the
//! request again and goes on behind the finished pages. If the request changed meanwhile, which no driver
//! does, the guest gets the results of a mixture of its own two requests.

use crate::host::clock::ClockAndEntropy;
use crate::memory::peer::Peer;
use crate::memory::table::GuestMemory;
use crate::queue::chain::{Chain, WriteError};
use crate::queue::request::{Body, Request};
use crate::queue::slice::{STEP_NS, Slice};
use crate::vm::state::Vm;
use std::io;
use std::sync::atomic::Ordering;
#[cfg(test)]
use tmem_pool::Page;
use tmem_pool::{
    CreateError, DESTROY_NS_MAX, FLUSH_NS_MIN, GET_NS_MAX, GetResult, NoPool, PUT_NS_MAX, Put,
    PutResult, SecretPages, Spent, Time,
};
use virtio_tmem as wire;
use virtio_tmem::{GetPage, Resp};
use zerocopy::IntoBytes;

/// Pages between two looks at the clock: some tens of µs, a small part of the 10 ms that a drain may take.
const GROUP_PAGES: usize = 16;

/// A range of few pages begins with no less.
const RANGE_NS_LEAST: u64 = 5_000;

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
    pub clock: &'a ClockAndEntropy,
    /// It asks for more than its rate: all is refused or missed.
    pub limited: bool,
    /// True once a drain waits no longer: what is not begun is refused or missed.
    pub drain_expired: &'a dyn Fn() -> bool,
    /// Bounds the work.
    pub slice: &'a Slice<'a>,
}

/// How far a request has come.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Pages of a PUT or GET, or ranges of a FLUSH, that are finished. Their results are written.
    done: usize,
    /// Bytes of the answer, up to the last page that was written.
    used_bytes: usize,
}

impl Context<'_, '_> {
    fn now(&self) -> Time {
        Time(self.clock.now_ns())
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

/// Executes and answers; returns the bytes to report in the used element. None: the slice is over before
/// the request is finished, and it is not answered; executing it again with the same `progress` goes on.
/// What a GET has taken out is in `spent`, to be freed once the guest has its answer.
pub fn execute<'vm>(
    context: &Context<'vm, '_>,
    request: &Request<'_>,
    chain: &Chain,
    memory: &GuestMemory,
    buffers: &mut PageBuffers,
    (spent, progress): (&mut Vec<Spent<'vm>>, &mut Progress),
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
        Body::Put { .. } => return put(context, stale, request, chain, memory, progress),
        Body::Get { .. } => {
            let kept = (spent, progress);
            return get(context, stale, request, chain, memory, buffers, kept);
        }
        _ if stale => wire::S_STALE,
        Body::Flush { ranges } => {
            let flush = |range: &wire::Range| {
                let nr_pages = match range.nr_pages.get() {
                    wire::TO_END => None,
                    nr_pages => Some(nr_pages),
                };
                let (object, index) = (range.object.get(), range.index.get());
                let done = flush_range(context, pool, object, index, nr_pages);
                if let (Some(tap), Ok(true)) = (&context.vm.tap, done) {
                    tap.flush(pool, object, index, nr_pages);
                }
                done
            };
            let mut status = wire::S_OK;
            for range in ranges.iter().skip(progress.done) {
                match flush(range) {
                    Ok(true) => progress.done += 1,
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
        Body::PoolDestroy if context.slice.step(DESTROY_NS_MAX).is_none() => return Ok(None),
        Body::PoolDestroy => match tenant.destroy_pool(pool) {
            Ok(()) => {
                context.slice.charge(DESTROY_NS_MAX);
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

/// Drops a range as far as the slice allows. True: all of it.
fn flush_range(
    context: &Context<'_, '_>,
    pool: u32,
    object: u64,
    index: u64,
    nr_pages: Option<u64>,
) -> Result<bool, NoPool> {
    let Context { vm, slice, .. } = context;
    while let Some(step_ns) = slice.step(RANGE_NS_LEAST) {
        let step_ns = step_ns.min(STEP_NS);
        let mut left_ns = step_ns;
        let done = vm
            .tenant
            .flush_some(pool, object, index, nr_pages, &mut left_ns);
        slice.charge(step_ns - left_ns);
        // With less it may have done nothing, and would do so again.
        if done? {
            return Ok(true);
        }
        if step_ns < FLUSH_NS_MIN {
            break;
        }
    }
    Ok(false)
}

fn put(
    context: &Context<'_, '_>,
    stale: bool,
    request: &Request<'_>,
    chain: &Chain,
    memory: &GuestMemory,
    progress: &mut Progress,
) -> Result<Option<u32>, WriteError> {
    let Body::Put { pages, data } = &request.body else {
        return Ok(Some(0));
    };
    let (vm, slice) = (context.vm, context.slice);
    let pool = request.header.pool;
    let mut results = [wire::P_REFUSED; wire::BATCH_MAX];
    let mut status = if stale { wire::S_STALE } else { wire::S_OK };
    // Results before it are written.
    let mut from = progress.done.min(pages.len());
    let mut done = from;
    while status == wire::S_OK && done < pages.len() {
        let drain_expired = (context.drain_expired)();
        let left = pages.len() - done;
        let group = match slice.step_pages(PUT_NS_MAX, left.min(GROUP_PAGES)) {
            Some(pages) => pages,
            // A drain that waits no longer has all refused at once.
            None if drain_expired => left,
            None => break,
        };
        let end = done + group;
        let frozen = vm.frozen.load(Ordering::Relaxed);
        if frozen || context.limited || drain_expired {
            // A refused page leaves nothing behind, not even what was put before.
            for page in &pages[done..end] {
                let (object, index) = (page.object.get(), page.index.get());
                let mut left_ns = u64::MAX;
                let dropped = vm
                    .tenant
                    .flush_some(pool, object, index, Some(1), &mut left_ns);
                slice.charge(u64::MAX - left_ns);
                if dropped.is_err() {
                    status = wire::S_NO_POOL;
                    break;
                }
                if let (true, Some(tap)) = (frozen || context.limited, &vm.tap) {
                    tap.flush(pool, object, index, Some(1));
                }
            }
            let counter = match (frozen, context.limited) {
                (true, _) => &vm.counters.refused_frozen,
                (false, true) => &vm.counters.limited_pages,
                (false, false) => &vm.counters.drain_cut_pages,
            };
            counter.fetch_add(group as u64, Ordering::Relaxed);
            done = end;
            continue;
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
        let mut answers = [PutResult::Refused; GROUP_PAGES];
        let answers = &mut answers[..puts.len()];
        match vm.tenant.put(context.now(), pool, &puts, answers) {
            Ok(cost_ns) => {
                slice.charge(cost_ns);
                if let Some(tap) = &vm.tap {
                    tap.put(pool, &puts, answers);
                }
                for (result, put) in results[done..end].iter_mut().zip(answers) {
                    *result = match put {
                        PutResult::Stored => wire::P_STORED,
                        PutResult::Refused => wire::P_REFUSED,
                    };
                }
            }
            Err(NoPool) => status = wire::S_NO_POOL,
        }
        done = end;
    }
    let write = |offset: usize, bytes: &[u8]| {
        let wrote = chain.write(memory, context.peer, offset as u64, bytes)?;
        debug_assert!(wrote, "parse made sure that the answer fits");
        Ok::<_, WriteError>(())
    };
    if status == wire::S_OK && done < pages.len() {
        write(RESP_BYTES + from, &results[from..done])?;
        progress.done = done;
        return Ok(None);
    }
    if status != wire::S_OK {
        // The pool or the generation ended, perhaps between two groups; so did what they stored.
        results.fill(wire::P_REFUSED);
        from = 0;
    }
    let mut answer = [0u8; RESP_BYTES + wire::BATCH_MAX];
    answer[..RESP_BYTES].copy_from_slice(resp(status).as_bytes());
    let bytes = RESP_BYTES + pages.len();
    answer[RESP_BYTES..bytes].copy_from_slice(&results[..pages.len()]);
    write_results(from, 1, &answer[..bytes], write)?;
    Ok(Some(bytes as u32))
}

/// Writes a status and results, but for those of the first `from` pages, of which each has `result_bytes`.
fn write_results<E>(
    from: usize,
    result_bytes: usize,
    answer: &[u8],
    write: impl Fn(usize, &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    if from == 0 {
        return write(0, answer);
    }
    let at = RESP_BYTES + from * result_bytes;
    write(0, &answer[..RESP_BYTES])?;
    write(at, &answer[at..])
}

fn get<'vm>(
    context: &Context<'vm, '_>,
    stale: bool,
    request: &Request<'_>,
    chain: &Chain,
    memory: &GuestMemory,
    buffers: &mut PageBuffers,
    (spent, progress): (&mut Vec<Spent<'vm>>, &mut Progress),
) -> Result<Option<u32>, WriteError> {
    let Body::Get {
        object,
        index,
        cookies,
    } = &request.body
    else {
        return Ok(Some(0));
    };
    let (vm, slice, pool) = (context.vm, context.slice, request.header.pool);
    let count = cookies.len();
    let miss = GetPage {
        cookie: 0.into(),
        result: wire::P_MISS,
        reserved: [0; 7],
    };
    let mut results = [miss; wire::BATCH_MAX];
    let mut status = if stale { wire::S_STALE } else { wire::S_OK };
    // Results before it are written, and so is their data.
    let mut from = progress.done.min(count);
    let mut done = from;
    while status == wire::S_OK && done < count {
        if context.limited || (context.drain_expired)() {
            let drain_expired = (count - done) as u64;
            let counter = match context.limited {
                true => &vm.counters.limited_pages,
                false => &vm.counters.drain_cut_pages,
            };
            counter.fetch_add(drain_expired, Ordering::Relaxed);
            // Drops nothing, and says whether there is such a pool: what changes is pages to misses, not
            // the status of a request.
            if vm.tenant.flush(pool, *object, *index, Some(0)).is_err() {
                status = wire::S_NO_POOL;
            }
            done = count;
            break;
        }
        let Some(group) = slice.step_pages(GET_NS_MAX, (count - done).min(GROUP_PAGES)) else {
            break;
        };
        let end = done + group;
        let mut wanted = [0u64; GROUP_PAGES];
        for (wanted, cookie) in wanted.iter_mut().zip(&cookies[done..end]) {
            *wanted = cookie.get();
        }
        let wanted = &wanted[..group];
        let mut answers = [GetResult::Miss; GROUP_PAGES];
        let answers = &mut answers[..group];
        let out = &mut buffers.0.pages()[done..end];
        let first = index + done as u64;
        let got = vm
            .tenant
            .get(context.now(), pool, *object, first, wanted, out, answers);
        match got {
            Ok(taken) => {
                slice.charge(taken.cost_ns());
                spent.push(taken);
                if let Some(tap) = &vm.tap {
                    let hits = answers.iter().map(|result| *result != GetResult::Miss);
                    tap.get(pool, *object, first, hits);
                }
                let answers = results[done..end].iter_mut().zip(answers);
                for ((result, got), wanted) in answers.zip(wanted) {
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
            Err(NoPool) => status = wire::S_NO_POOL,
        }
        done = end;
    }

    let write = |offset: usize, bytes: &[u8]| {
        let wrote = chain.write(memory, context.peer, offset as u64, bytes)?;
        debug_assert!(wrote, "parse made sure that the answer fits");
        Ok::<_, WriteError>(())
    };
    if status != wire::S_OK {
        // The pool or the generation ended, perhaps between two groups.
        results.fill(miss);
        (from, done, progress.used_bytes) = (0, count, 0);
    }
    let mut answer = [0u8; RESP_BYTES + wire::BATCH_MAX * GET_PAGE_BYTES];
    answer[..RESP_BYTES].copy_from_slice(resp(status).as_bytes());
    let data_offset = RESP_BYTES + count * GET_PAGE_BYTES;
    answer[RESP_BYTES..data_offset].copy_from_slice(results[..count].as_bytes());
    if done == count {
        write_results(from, GET_PAGE_BYTES, &answer[..data_offset], write)?;
    } else {
        let at = |page| RESP_BYTES + page * GET_PAGE_BYTES;
        write(at(from), &answer[at(from)..at(done)])?;
    }
    let mut used_bytes = data_offset.max(progress.used_bytes);
    // Neighbouring hits go in one copy; the data of a miss is left as the driver had it.
    let mut page = from;
    while page < done {
        let hits = results[page..done]
            .iter()
            .take_while(|r| r.result == wire::P_HIT)
            .count();
        if hits > 0 {
            let offset = data_offset + page * wire::PAGE_SIZE;
            let bytes = buffers.0.pages()[page..page + hits].as_flattened();
            write(offset, bytes)?;
            used_bytes = offset + bytes.len();
        }
        page += hits.max(1);
    }
    *progress = Progress { done, used_bytes };
    Ok((done == count).then_some(used_bytes as u32))
}
