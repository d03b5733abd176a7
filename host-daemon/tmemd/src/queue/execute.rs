// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Executes a request on the tenant of its VM (the VM's pages in the pool) and writes the answer
//! into guest memory.
//!
//! The guest can change its memory at any time, and the pool must never observe such a change. So
//! the pool copies each page of a PUT once, from guest memory to memory of its own, and uses only
//! this copy. The pages of a GET pass through buffers of the worker. The pages of a PUT are
//! processed in groups of up to [`PUT_GROUP_PAGES`]. The pages of a GET are one group, as far as
//! the scheduling slice allows. After the drain cut, the remaining pages of a PUT are refused, and
//! those of a GET are answered with MISS.
//!
//! A request that costs more than a scheduling slice is interrupted between two groups. The results
//! and contents of the finished pages are then in the pool or in guest memory. So the daemon stores
//! only two numbers for an interrupted request ([`Progress`]), and no page of a guest stays in a
//! buffer of the worker. The next slice reads the head of the request again and continues after
//! the finished pages. If the guest changes the request meanwhile, which no correct driver does, it
//! gets results of a mixture of both requests.

use crate::memory::peer::Peer;
use crate::memory::table::Memory;
use crate::queue::chain::{AccessError, Chain};
use crate::queue::request::{Body, Request};
use crate::queue::slice::{STEP_NS, Slice};
use crate::vm::state::Vm;
use std::cell::Cell;
use std::io;
use std::ops::Range;
use std::sync::atomic::Ordering;
use tmem_pool::{
    CreateError, DESTROY_NS_MAX, FLUSH_NS_MIN, GET_NS_MAX, GET_PAGES_MAX, Get, GetResult, NoPool,
    PUT_NS_MAX, Page, PageSource, Put, PutResult, REF_NS_MAX, Ref, SecretPages, Spent,
};
use virtio_tmem as wire;
use virtio_tmem::{Generation, GetPage, PutPage, RefPage, Resp, U64};
use zerocopy::IntoBytes;

/// Maximum number of pages of a PUT that are stored between two reads of the clock. Storing them
/// takes tens of µs, a small part of the 10 ms that a drain may take.
const PUT_GROUP_PAGES: usize = 16;

/// Maximum number of pages of a REF that are processed between two reads of the clock. Processing
/// them takes some µs.
const REF_GROUP_PAGES: usize = 16;

const _: () = assert!(wire::BATCH_MAX <= GET_PAGES_MAX);

/// Least time in ns that a slice must have left before the flush of a range begins, even if the
/// range has few pages.
const RANGE_NS_LEAST: u64 = 5_000;

const RESP_BYTES: usize = size_of::<Resp>();
const GET_PAGE_BYTES: usize = size_of::<GetPage>();

/// Data about VM, connection and slice that the execution of a request uses.
pub struct Context<'vm, 'a> {
    /// The VM that sent the request.
    pub vm: &'vm Vm,
    /// Number of the current generation of the VM's device. Requests of another generation are
    /// answered with STALE.
    pub generation: u64,
    /// Whether the request exceeds the VM's rate limit. If so, all its pages are refused or missed.
    pub limited: bool,
    /// Function that returns true after the drain cut. The remaining pages of a request are then
    /// refused, missed or gone.
    pub after_drain_cut: &'a dyn Fn() -> bool,
    /// The scheduling slice, which limits the work on the request.
    pub slice: &'a Slice<'a>,
}

/// Progress of a request, whose execution may take several slices.
#[derive(Clone, Copy, Debug, Default)]
pub struct Progress {
    /// Number of pages of a PUT, GET or REF that are finished and whose results are written. For a
    /// FLUSH, the number of finished ranges.
    done: usize,
    /// Length of the answer in bytes, up to the end of the last page that was written into guest
    /// memory.
    used_bytes: usize,
}

/// Values that outlive a call of [`execute`]: the caller keeps them until the request is answered.
pub struct Remainder<'vm, 'a> {
    /// Storage of the pages that a GET took out of the pool. The caller frees the storage after the
    /// guest has its answer, so that freeing does not delay the answer.
    pub spent: &'a mut Option<Spent<'vm>>,
    /// Progress of the request, which the next slice continues.
    pub progress: &'a mut Progress,
}

/// Buffers of a worker for the pages of a GET. The kernel neither swaps nor dumps their memory.
pub struct PageBuffers(SecretPages);

impl PageBuffers {
    /// Allocates page buffers for the largest batch.
    ///
    /// # Errors
    /// The system lacks address space.
    pub fn new() -> io::Result<PageBuffers> {
        SecretPages::new(wire::BATCH_MAX).map(PageBuffers)
    }

    /// Returns the page buffers. Tests check the attributes of their memory.
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

/// Buffers of a descriptor chain in guest memory. A request is read from them, and its answer is
/// written into them.
#[derive(Clone, Copy)]
pub struct GuestBuffers<'a> {
    /// The descriptor chain of the request.
    pub chain: &'a Chain,
    /// Guest memory that contains the chain's buffers.
    pub memory: &'a Memory,
    /// The front end (VMM), which must be connected while guest memory is accessed.
    pub peer: &'a Peer,
}

impl GuestBuffers<'_> {
    /// Reads bytes at an offset of the request from guest memory. The caller then checks whether a
    /// page of guest memory was lost.
    ///
    /// # Errors
    /// Guest memory cannot be accessed.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), AccessError> {
        let fits = self.chain.read(&self.memory.guest, offset, into)?;
        assert!(fits, "a read goes beyond the readable part of the chain");
        Ok(())
    }

    /// Writes an answer that consists only of a status. Returns the number of bytes written.
    ///
    /// # Errors
    /// The front end hung up, or guest memory cannot be accessed.
    pub fn answer_status(&self, status: u8) -> Result<u32, AccessError> {
        self.write(0, resp(status).as_bytes())?;
        Ok(RESP_BYTES as u32)
    }

    /// Answers a GENERATION with the device's current generation. Returns the number of bytes
    /// written.
    ///
    /// # Errors
    /// The front end hung up, or guest memory cannot be accessed.
    fn answer_generation(&self, generation: u64) -> Result<u32, AccessError> {
        let body = Generation {
            generation: generation.into(),
        };
        let mut answer = [0; RESP_BYTES + size_of::<Generation>()];
        answer[..RESP_BYTES].copy_from_slice(resp(wire::S_OK).as_bytes());
        answer[RESP_BYTES..].copy_from_slice(body.as_bytes());
        self.write(0, &answer)?;
        Ok(answer.len() as u32)
    }

    /// Writes bytes at an offset of the answer in guest memory.
    fn write(&self, offset: usize, bytes: &[u8]) -> Result<(), AccessError> {
        let fits = self
            .chain
            .write(self.memory, self.peer, offset as u64, bytes)?;
        assert!(fits, "a write goes beyond the writable part of the chain");
        Ok(())
    }

    /// Writes the status of a request and the results of its pages, except the first `from` pages.
    /// Each result has `result_bytes` bytes.
    fn write_results(
        &self,
        from: usize,
        result_bytes: usize,
        answer: &[u8],
    ) -> Result<(), AccessError> {
        if from == 0 {
            return self.write(0, answer);
        }
        let at = RESP_BYTES + from * result_bytes;
        self.write(0, &answer[..RESP_BYTES])?;
        self.write(at, &answer[at..])
    }
}

/// Executes a request and writes its answer. Returns the number of bytes to report in the used
/// element, or None if the slice ends before the request is finished. An unfinished request has no
/// complete answer yet; the next call with the same `progress` continues the request.
///
/// # Errors
/// The front end hung up, or guest memory cannot be accessed.
pub fn execute<'vm>(
    context: &Context<'vm, '_>,
    request: &Request<'_>,
    guest: GuestBuffers<'_>,
    buffers: &mut PageBuffers,
    remainder: Remainder<'vm, '_>,
) -> Result<Option<u32>, AccessError> {
    let (vm, pool) = (context.vm, request.header.pool);
    // The device answers a GENERATION whatever generation it carries.
    let asks = matches!(request.body, Body::Generation);
    let stale = !asks && request.header.generation != context.generation;
    if stale {
        vm.counters.requests_stale.fetch_add(1, Ordering::Relaxed);
    }
    let progress = remainder.progress;
    let status = match &request.body {
        Body::Put { pages, data_offset } => {
            let batch = PutBatch {
                pool,
                pages,
                data_offset: *data_offset,
            };
            return execute_batch(context, stale, &batch, guest, progress);
        }
        Body::Get {
            object,
            index,
            cookies,
            retain,
        } => {
            let batch = GetBatch {
                pool,
                object: *object,
                index: *index,
                cookies,
                retain: *retain,
            };
            let remainder = Remainder {
                spent: remainder.spent,
                progress,
            };
            return get(context, stale, &batch, guest, buffers, remainder);
        }
        Body::Ref { pages } => {
            let batch = RefBatch { pool, pages };
            return execute_batch(context, stale, &batch, guest, progress);
        }
        Body::Generation => return guest.answer_generation(context.generation).map(Some),
        _ if stale => Some(wire::S_STALE),
        Body::Flush { ranges } => flush(context, pool, ranges, progress),
        Body::PoolCreate { private } => {
            let created = if *private {
                vm.tenant.create_private_pool(pool)
            } else {
                vm.tenant.create_pool(pool)
            };
            Some(match created {
                Ok(()) => wire::S_OK,
                Err(CreateError::Exists) => wire::S_BAD,
                Err(CreateError::Limit) => wire::S_LIMIT,
            })
        }
        Body::PoolDestroy => destroy_pool(context, pool),
        Body::Report(report) => {
            vm.set_report(**report);
            Some(wire::S_OK)
        }
        Body::Latencies(latencies) => {
            vm.set_latencies(**latencies);
            Some(wire::S_OK)
        }
    };
    status.map(|status| guest.answer_status(status)).transpose()
}

/// Executes a POOL_DESTROY request. Returns its status, or None if the slice has no time left for
/// it.
fn destroy_pool(context: &Context<'_, '_>, pool: u32) -> Option<u8> {
    let Context { vm, slice, .. } = context;
    slice.begin_step(DESTROY_NS_MAX)?;
    let Ok(()) = vm.tenant.destroy_pool(pool) else {
        return Some(wire::S_NO_POOL);
    };
    slice.charge(DESTROY_NS_MAX);
    if let Some(tap) = &vm.tap {
        tap.destroy_pool(pool);
    }
    Some(wire::S_OK)
}

/// Executes a FLUSH, which drops ranges of pages. Returns the status, or None if the slice ends
/// before the request is finished.
fn flush(
    context: &Context<'_, '_>,
    pool: u32,
    ranges: &[wire::Range],
    progress: &mut Progress,
) -> Option<u8> {
    for range in ranges.iter().skip(progress.done) {
        let nr_pages = match range.nr_pages.get() {
            wire::TO_END => None,
            nr_pages => Some(nr_pages),
        };
        let (object, index) = (range.object.get(), range.index.get());
        match flush_range(context, pool, object, index, nr_pages) {
            Ok(true) => progress.done += 1,
            Ok(false) => return None,
            Err(NoPool) => return Some(wire::S_NO_POOL),
        }
        if let Some(tap) = &context.vm.tap {
            tap.flush(pool, object, index, nr_pages);
        }
    }
    Some(wire::S_OK)
}

/// Drops pages of a range until the range is finished or the slice is over. Returns true if the
/// complete range is dropped.
fn flush_range(
    context: &Context<'_, '_>,
    pool: u32,
    object: u64,
    index: u64,
    nr_pages: Option<u64>,
) -> Result<bool, NoPool> {
    let Context { vm, slice, .. } = context;
    while let Some(step_ns) = slice.begin_step(RANGE_NS_LEAST) {
        let step_ns = step_ns.min(STEP_NS);
        let flushed = vm
            .tenant
            .flush_some(pool, object, index, nr_pages, step_ns)?;
        slice.charge(flushed.cost_ns);
        if flushed.is_complete {
            return Ok(true);
        }
        // A step that is shorter than FLUSH_NS_MIN may drop no page. The flush stops after such a
        // step, because further steps could drop none either.
        if step_ns < FLUSH_NS_MIN {
            break;
        }
    }
    Ok(false)
}

/// Reason why a group of pages of a request is not executed.
enum GroupError {
    /// The tenant has no such pool.
    NoPool,
    /// Guest memory cannot be accessed, so the request gets no answer.
    Access(AccessError),
}

impl From<NoPool> for GroupError {
    fn from(_: NoPool) -> Self {
        GroupError::NoPool
    }
}

impl From<AccessError> for GroupError {
    fn from(error: AccessError) -> Self {
        GroupError::Access(error)
    }
}

/// A request whose answer has one byte for each page: a PUT or a REF.
trait Batch {
    /// Largest cost of a page in ns.
    const PAGE_NS_MAX: u64;
    /// Maximum number of pages that are executed between two reads of the clock.
    const GROUP_PAGES: usize;
    /// Result of a page that is refused.
    const REFUSED: u8;

    /// Returns the number of pages of the request.
    fn count(&self) -> usize;

    /// Executes the request for a group of its pages and sets the results of these pages.
    fn execute(
        &self,
        context: &Context<'_, '_>,
        guest: GuestBuffers<'_>,
        group: Range<usize>,
        results: &mut [u8],
    ) -> Result<(), GroupError>;

    /// Refuses a group of pages of the request, because of a frozen VM, a rate limit or a drain.
    /// `frozen` tells whether the VM is frozen. A refused page must leave nothing under its key in
    /// the pool.
    fn refuse(
        &self,
        context: &Context<'_, '_>,
        group: Range<usize>,
        frozen: bool,
    ) -> Result<(), NoPool>;
}

/// Executes a PUT or a REF in groups of pages. Returns the number of bytes to report in the used
/// element, or None if the slice ends before the request is finished.
fn execute_batch<B: Batch>(
    context: &Context<'_, '_>,
    stale: bool,
    batch: &B,
    guest: GuestBuffers<'_>,
    progress: &mut Progress,
) -> Result<Option<u32>, AccessError> {
    let (vm, slice, count) = (context.vm, context.slice, batch.count());
    let mut results = [B::REFUSED; wire::BATCH_MAX];
    let mut status = if stale { wire::S_STALE } else { wire::S_OK };
    // The results of the pages before `from` are already in guest memory, written in an earlier
    // slice.
    let mut from = progress.done.min(count);
    let mut done = from;
    while status == wire::S_OK && done < count {
        let after_drain_cut = (context.after_drain_cut)();
        let left = count - done;
        let group = match slice.begin_pages(B::PAGE_NS_MAX, left.min(B::GROUP_PAGES)) {
            Some(pages) => pages,
            // After the drain cut, all remaining pages are refused at once, whatever the slice
            // allows.
            None if after_drain_cut => left,
            None => break,
        };
        let group = done..done + group;
        done = group.end;
        let frozen = vm.frozen.load(Ordering::Relaxed);
        let executed = if frozen || context.limited || after_drain_cut {
            batch.refuse(context, group, frozen).map_err(Into::into)
        } else {
            batch.execute(context, guest, group.clone(), &mut results[group])
        };
        match executed {
            Ok(()) => {}
            Err(GroupError::NoPool) => status = wire::S_NO_POOL,
            Err(GroupError::Access(error)) => return Err(error),
        }
    }
    if status == wire::S_OK && done < count {
        guest.write(RESP_BYTES + from, &results[from..done])?;
        progress.done = done;
        return Ok(None);
    }
    if status != wire::S_OK {
        // The request is stale, or its pool does not exist. The pool may have been removed while
        // this request was in progress. The pages that the pool had before no longer exist either,
        // so all pages of the request are reported as refused.
        results.fill(B::REFUSED);
        from = 0;
    }
    let mut bytes = [0u8; RESP_BYTES + wire::BATCH_MAX];
    bytes[..RESP_BYTES].copy_from_slice(resp(status).as_bytes());
    let end = RESP_BYTES + count;
    bytes[RESP_BYTES..end].copy_from_slice(&results[..count]);
    guest.write_results(from, 1, &bytes[..end])?;
    Ok(Some(end as u32))
}

/// The pages of a PUT request. Their contents are in guest memory.
struct PutBatch<'a> {
    pool: u32,
    pages: &'a [PutPage],
    /// Offset in the request at which the contents of the pages begin, in bytes.
    data_offset: u64,
}

/// Contents of a page of a PUT request in guest memory.
struct GuestPage<'a> {
    guest: GuestBuffers<'a>,
    /// Offset of the contents in the request, in bytes.
    offset: u64,
    /// Compressed size of the page in bytes, if the VM's requests are recorded in a trace.
    stored_bytes: Option<Cell<usize>>,
    /// Reason why a page of the group could not be read.
    error: &'a Cell<Option<AccessError>>,
}

impl GuestPage<'_> {
    fn read(&self, frame: &mut Page) -> Result<(), AccessError> {
        self.guest.read(self.offset, frame)?;
        // The loss is checked after the page is read and before the pool stores the page. Otherwise
        // zeros from the replacement of a lost page could be stored as a page of the guest.
        match self.guest.memory.lost.is_read_lost() {
            true => Err(AccessError::Lost),
            false => Ok(()),
        }
    }
}

impl PageSource for GuestPage<'_> {
    fn copy_to(&self, frame: &mut Page) -> bool {
        if let Err(error) = self.read(frame) {
            self.error.set(Some(error));
            return false;
        }
        if let Some(stored_bytes) = &self.stored_bytes {
            stored_bytes.set(tmem_pool::stored_bytes(frame));
        }
        true
    }
}

impl Batch for PutBatch<'_> {
    const PAGE_NS_MAX: u64 = PUT_NS_MAX;
    const GROUP_PAGES: usize = PUT_GROUP_PAGES;
    const REFUSED: u8 = wire::P_REFUSED;

    fn count(&self) -> usize {
        self.pages.len()
    }

    fn execute(
        &self,
        context: &Context<'_, '_>,
        guest: GuestBuffers<'_>,
        group: Range<usize>,
        results: &mut [u8],
    ) -> Result<(), GroupError> {
        store_group(context, self, guest, group, results)
    }

    fn refuse(
        &self,
        context: &Context<'_, '_>,
        group: Range<usize>,
        frozen: bool,
    ) -> Result<(), NoPool> {
        refuse_group(context, self, group, frozen)
    }
}

/// Refuses a group of pages of a PUT. A refused page must leave nothing under its key, so an older
/// version of the page in the pool is dropped.
fn refuse_group(
    context: &Context<'_, '_>,
    batch: &PutBatch<'_>,
    group: Range<usize>,
    frozen: bool,
) -> Result<(), NoPool> {
    let (vm, slice, pool) = (context.vm, context.slice, batch.pool);
    let counter = match (frozen, context.limited) {
        (true, _) => &vm.counters.refused_frozen,
        (false, true) => &vm.counters.limited_pages,
        (false, false) => &vm.counters.drain_cut_pages,
    };
    counter.fetch_add(group.len() as u64, Ordering::Relaxed);
    for page in &batch.pages[group] {
        let (object, index) = (page.object.get(), page.index.get());
        let flushed = vm
            .tenant
            .flush_some(pool, object, index, Some(1), u64::MAX)?;
        slice.charge(flushed.cost_ns);
        if let (true, Some(tap)) = (frozen || context.limited, &vm.tap) {
            tap.flush(pool, object, index, Some(1));
        }
    }
    Ok(())
}

/// Stores a group of pages of a PUT and sets the pages' results.
///
/// # Errors
/// The front end hung up, the contents of a page cannot be read from guest memory, or the pool does
/// not exist. The pool of the engine refuses a page that cannot be read.
fn store_group(
    context: &Context<'_, '_>,
    batch: &PutBatch<'_>,
    guest: GuestBuffers<'_>,
    group: Range<usize>,
    results: &mut [u8],
) -> Result<(), GroupError> {
    let (vm, pool) = (context.vm, batch.pool);
    guest.peer.check().map_err(AccessError::from)?;
    let error = Cell::new(None);
    let sources: Vec<GuestPage<'_>> = group
        .clone()
        .map(|nth| GuestPage {
            guest,
            offset: batch.data_offset + (nth * wire::PAGE_SIZE) as u64,
            stored_bytes: vm.tap.as_ref().map(|_| Cell::default()),
            error: &error,
        })
        .collect();
    let puts: Vec<Put<'_>> = batch.pages[group]
        .iter()
        .zip(&sources)
        .map(|(page, source)| Put {
            object: page.object.get(),
            index: page.index.get(),
            cookie: page.cookie.get(),
            workingset: page.flags.get() & wire::PUT_WORKINGSET != 0,
            page: source,
        })
        .collect();
    let mut stored = [PutResult::Refused; PUT_GROUP_PAGES];
    let stored = &mut stored[..puts.len()];
    let put = vm.tenant.put(pool, &puts, stored);
    if let Some(error) = error.take() {
        return Err(error.into());
    }
    context.slice.charge(put?);
    if let Some(tap) = &vm.tap {
        let stored_bytes = sources.iter().filter_map(|page| page.stored_bytes.as_ref());
        tap.put(pool, &puts, stored, stored_bytes.map(Cell::get));
    }
    for (result, put) in results.iter_mut().zip(stored) {
        *result = match put {
            PutResult::Stored => wire::P_STORED,
            PutResult::Refused => wire::P_REFUSED,
        };
    }
    Ok(())
}

/// The pages of a REF request, with which the guest reports evicted retained pages.
struct RefBatch<'a> {
    pool: u32,
    pages: &'a [RefPage],
}

impl Batch for RefBatch<'_> {
    const PAGE_NS_MAX: u64 = REF_NS_MAX;
    const GROUP_PAGES: usize = REF_GROUP_PAGES;
    const REFUSED: u8 = wire::P_GONE;

    fn count(&self) -> usize {
        self.pages.len()
    }

    fn execute(
        &self,
        context: &Context<'_, '_>,
        _: GuestBuffers<'_>,
        group: Range<usize>,
        results: &mut [u8],
    ) -> Result<(), GroupError> {
        refer_group(context, self.pool, &self.pages[group], results).map_err(Into::into)
    }

    fn refuse(
        &self,
        context: &Context<'_, '_>,
        group: Range<usize>,
        frozen: bool,
    ) -> Result<(), NoPool> {
        drop_refs(context, self.pool, &self.pages[group], frozen)
    }
}

/// Converts the pages of a REF request to the type `Ref` of the pool's engine.
fn to_refs(pages: &[RefPage]) -> Vec<Ref> {
    let refs = pages.iter().map(|page| Ref {
        object: page.object.get(),
        index: page.index.get(),
        cookie: page.cookie.get(),
    });
    refs.collect()
}

/// Drops those pages of a REF that are answered with GONE instead of being looked up. The driver
/// never requests a page again after GONE, so the pool must not keep the page.
fn drop_refs(
    context: &Context<'_, '_>,
    pool: u32,
    pages: &[RefPage],
    frozen: bool,
) -> Result<(), NoPool> {
    let vm = context.vm;
    if !frozen {
        let counter = match context.limited {
            true => &vm.counters.limited_pages,
            false => &vm.counters.drain_cut_pages,
        };
        counter.fetch_add(pages.len() as u64, Ordering::Relaxed);
    }
    let refs = to_refs(pages);
    context.slice.charge(vm.tenant.drop_refs(pool, &refs)?);
    if let Some(tap) = &vm.tap {
        tap.refer(pool, &refs, &vec![false; refs.len()]);
    }
    Ok(())
}

/// Executes a REF for a group of its pages and sets the pages' results.
fn refer_group(
    context: &Context<'_, '_>,
    pool: u32,
    pages: &[RefPage],
    results: &mut [u8],
) -> Result<(), NoPool> {
    let vm = context.vm;
    let refs = to_refs(pages);
    let mut held = [false; REF_GROUP_PAGES];
    let held = &mut held[..refs.len()];
    context.slice.charge(vm.tenant.refer(pool, &refs, held)?);
    if let Some(tap) = &vm.tap {
        tap.refer(pool, &refs, held);
    }
    for (result, held) in results.iter_mut().zip(held) {
        *result = if *held { wire::P_HELD } else { wire::P_GONE };
    }
    Ok(())
}

/// The pages of a GET request: consecutive pages of an object from `index` on, one for each cookie.
struct GetBatch<'a> {
    pool: u32,
    object: u64,
    index: u64,
    cookies: &'a [U64],
    /// Bit mask: if bit n is set, the pool may retain the page with the index `index` + n.
    retain: u64,
}

/// Returns the result that a GET reports for a page that is missed.
fn miss() -> GetPage {
    GetPage {
        cookie: 0.into(),
        result: wire::P_MISS,
        flags: 0,
        reserved: [0; 6],
    }
}

/// Executes a GET. Returns the number of bytes to report in the used element, or None if the slice
/// ends before the request is finished.
fn get<'vm>(
    context: &Context<'vm, '_>,
    stale: bool,
    batch: &GetBatch<'_>,
    guest: GuestBuffers<'_>,
    buffers: &mut PageBuffers,
    remainder: Remainder<'vm, '_>,
) -> Result<Option<u32>, AccessError> {
    let (slice, count) = (context.slice, batch.cookies.len());
    let Remainder { spent, progress } = remainder;
    let mut results = [miss(); wire::BATCH_MAX];
    let mut status = if stale { wire::S_STALE } else { wire::S_OK };
    // The results and contents of the pages before `from` are already in guest memory, written in
    // an earlier slice.
    let mut from = progress.done.min(count);
    let mut done = from;
    if status == wire::S_OK && done < count {
        let taken = if context.limited || (context.after_drain_cut)() {
            let missed = miss_rest(context, batch, count - done);
            done = count;
            missed
        } else if let Some(step_ns) = slice.begin_step(GET_NS_MAX) {
            let (pages, results) = (
                &mut buffers.0.pages()[done..count],
                &mut results[done..count],
            );
            take_pages(context, batch, done, step_ns, pages, results).map(|taken| {
                done += taken.pages();
                *spent = Some(taken);
            })
        } else {
            Ok(())
        };
        if taken.is_err() {
            status = wire::S_NO_POOL;
        }
    }
    if status != wire::S_OK {
        // The request is stale, or its pool does not exist. The pool may have been removed while
        // this GET was in progress. All its pages are then answered with MISS, also those that an
        // earlier slice found.
        results.fill(miss());
        (from, done, progress.used_bytes) = (0, count, 0);
    }
    let results = &results[..count];
    write_get_results(guest, status, results, from..done)?;
    let written = write_get_pages(guest, results, from..done, buffers);
    if spent.as_ref().is_some_and(Spent::is_private) {
        // The guest may free these pages, and then expects that the host forgets their bytes.
        buffers.0.wipe_some(from..done);
    }
    let written = written?;
    let least_bytes = RESP_BYTES + count * GET_PAGE_BYTES;
    let used_bytes = written.unwrap_or(least_bytes.max(progress.used_bytes));
    *progress = Progress { done, used_bytes };
    Ok((done == count).then_some(used_bytes as u32))
}

/// Counts the remaining pages of a GET as missed, because of a rate limit or a drain. A rate limit
/// or a drain does not change the status of a request, so a missing pool is still an error.
fn miss_rest(context: &Context<'_, '_>, batch: &GetBatch<'_>, pages: usize) -> Result<(), NoPool> {
    let vm = context.vm;
    let counter = match context.limited {
        true => &vm.counters.limited_pages,
        false => &vm.counters.drain_cut_pages,
    };
    counter.fetch_add(pages as u64, Ordering::Relaxed);
    match vm.tenant.has_pool(batch.pool) {
        true => Ok(()),
        false => Err(NoPool),
    }
}

/// Takes pages out of the pool for up to `step_ns`, beginning with page number `start` of the
/// batch. Copies the contents of the pages to `pages` and sets the pages' results.
fn take_pages<'vm>(
    context: &Context<'vm, '_>,
    batch: &GetBatch<'_>,
    start: usize,
    step_ns: u64,
    pages: &mut [tmem_pool::Page],
    results: &mut [GetPage],
) -> Result<Spent<'vm>, NoPool> {
    let (vm, pool, object) = (context.vm, batch.pool, batch.object);
    let mut wanted = [0u64; wire::BATCH_MAX];
    for (wanted, cookie) in wanted.iter_mut().zip(&batch.cookies[start..]) {
        *wanted = cookie.get();
    }
    let wanted = &wanted[..pages.len()];
    let mut found = [GetResult::Miss; wire::BATCH_MAX];
    let found = &mut found[..pages.len()];
    let first = batch.index + start as u64;
    // A GET of a frozen VM lets the pool retain no page, so that the pool's memory becomes free.
    let retain = match vm.frozen.load(Ordering::Relaxed) {
        true => 0,
        false => batch.retain >> start,
    };
    let get = Get {
        object,
        index: first,
        cookies: wanted,
        retain,
        budget_ns: step_ns,
    };
    let taken = vm.tenant.get(pool, &get, pages, found)?;
    context.slice.charge(taken.cost_ns());
    if let Some(tap) = &vm.tap {
        let found = found[..taken.pages()].iter();
        let hits = found.map(|result| *result != GetResult::Miss);
        tap.get(pool, object, first, hits, batch.retain >> start);
    }
    for ((result, found), wanted) in results.iter_mut().zip(found).zip(wanted) {
        // The pool returns only pages with the requested cookie. The daemon compares the cookie
        // once more here, because the page of another put must never reach a guest.
        let (cookie, flags) = match found {
            GetResult::Miss => continue,
            GetResult::Hit { cookie } => (*cookie, 0),
            GetResult::Retained { cookie } => (*cookie, wire::GET_RETAINED),
        };
        if cookie == *wanted {
            result.cookie = cookie.into();
            result.result = wire::P_HIT;
            result.flags = flags;
        }
    }
    Ok(taken)
}

/// Writes the results of the pages in `group` to the answer. When all pages of the request are
/// done, also writes the status.
fn write_get_results(
    guest: GuestBuffers<'_>,
    status: u8,
    results: &[GetPage],
    group: Range<usize>,
) -> Result<(), AccessError> {
    let mut bytes = [0u8; RESP_BYTES + wire::BATCH_MAX * GET_PAGE_BYTES];
    let at = |page| RESP_BYTES + page * GET_PAGE_BYTES;
    let end = at(results.len());
    bytes[..RESP_BYTES].copy_from_slice(resp(status).as_bytes());
    bytes[RESP_BYTES..end].copy_from_slice(results.as_bytes());
    if group.end == results.len() {
        guest.write_results(group.start, GET_PAGE_BYTES, &bytes[..end])
    } else {
        guest.write(at(group.start), &bytes[at(group.start)..at(group.end)])
    }
}

/// Writes the contents of the pages in `group` that the pool had (hits). Adjacent hits are written
/// in one copy. Where a page is missed, the guest's buffer stays unchanged. Returns the offset in
/// the answer of the end of the last written page, in bytes; None if no page was a hit.
fn write_get_pages(
    guest: GuestBuffers<'_>,
    results: &[GetPage],
    group: Range<usize>,
    buffers: &mut PageBuffers,
) -> Result<Option<usize>, AccessError> {
    let data_offset = RESP_BYTES + results.len() * GET_PAGE_BYTES;
    let mut end = None;
    let mut page = group.start;
    while page < group.end {
        let hits = results[page..group.end]
            .iter()
            .take_while(|r| r.result == wire::P_HIT)
            .count();
        if hits > 0 {
            let offset = data_offset + page * wire::PAGE_SIZE;
            let bytes = buffers.0.pages()[page..page + hits].as_flattened();
            guest.write(offset, bytes)?;
            end = Some(offset + bytes.len());
        }
        page += hits.max(1);
    }
    Ok(end)
}
