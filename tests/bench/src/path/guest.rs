// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A fake guest that takes very little time itself, so that the benchmark measures the daemon. The
//! guest does not copy pages. For each request it writes only some bytes of metadata and three
//! descriptors.

use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};
use tmem_model::{Buffer, FakeGuest, GuestConfig, RamRegion, Request};
use tmem_pool::{PAGE_SIZE, Page};
use virtio_tmem as wire;
use zerocopy::IntoBytes;

/// Largest number of pages in a request.
pub const BATCH: usize = wire::BATCH_MAX;

/// Largest number of requests that the guest has in flight.
pub const WINDOW: usize = 4;

/// Time after which the guest counts an answer as lost.
const TIMEOUT: Duration = Duration::from_secs(20);

const QUEUE: usize = 1;
const POOL: u32 = 1;
const PAGE: u64 = PAGE_SIZE as u64;

/// Bytes of guest memory besides the pages and the requests. The fake guest uses it for its
/// virtqueues and for other data.
const OTHER_BYTES: u64 = 1 << 20;

/// Guest memory for a request in flight, with the request's type and number of pages.
struct Slot {
    /// Guest addresses of three pages: one for bytes that the device reads, one for bytes that it
    /// writes, and one for the request's descriptors.
    at: [u64; 3],
    kind: u16,
    pages: usize,
}

/// A fake guest with one request queue.
pub struct Guest {
    guest: FakeGuest,
    pages_at: u64,
    into_at: u64,
    slots: Vec<Slot>,
    free: Vec<usize>,
    /// Result that the guest expects for each page of a put, such as `P_STORED`. Any other result
    /// is an error.
    pub put_is: u8,
}

/// A run of consecutive pages of the guest's only object.
#[derive(Clone, Copy, Debug)]
pub struct Run {
    /// Page number of the run's first page within the object. The page's bytes are the page with
    /// the same number in the guest's memory for pages.
    pub index: usize,
    /// Number of pages, at most [`BATCH`].
    pub pages: usize,
}

impl Guest {
    /// Creates a guest whose memory contains these pages and has space for `into` returned pages.
    ///
    /// # Errors
    /// The system has no memory for the guest.
    pub fn new<'a>(
        name: &str,
        pages: impl ExactSizeIterator<Item = &'a Page>,
        into: usize,
    ) -> Result<Guest, String> {
        let slots_bytes = (WINDOW * 3) as u64 * PAGE;
        let size_bytes = (pages.len() + into) as u64 * PAGE + slots_bytes + OTHER_BYTES;
        let config = GuestConfig {
            name: name.into(),
            ram: vec![RamRegion {
                start: 0,
                size_bytes,
            }],
            request_queues: 1,
            slots: 1,
            ..GuestConfig::default()
        };
        let guest = FakeGuest::new(config)
            .map_err(|error| format!("cannot allocate the memory of a guest: {error}"))?;
        let ram = guest.ram().clone();
        let slots = (0..WINDOW).map(|_| Slot {
            at: [ram.alloc(1), ram.alloc(1), ram.alloc(1)],
            kind: 0,
            pages: 0,
        });
        let slots = slots.collect();
        let pages_at = ram.alloc(pages.len() as u64);
        let into_at = ram.alloc(into as u64);
        for (number, page) in pages.enumerate() {
            ram.write(pages_at + number as u64 * PAGE, page);
        }
        // Touch the pages for returned data, so that the benchmark does not measure page faults of
        // the daemon.
        for number in 0..into as u64 {
            ram.write(into_at + number * PAGE, &[0; PAGE_SIZE]);
        }
        Ok(Guest {
            guest,
            pages_at,
            into_at,
            slots,
            free: (0..WINDOW).collect(),
            put_is: wire::P_STORED,
        })
    }

    /// Connects the guest to the daemon at the other end of `stream`, and creates the guest's pool.
    ///
    /// # Errors
    /// The daemon refuses the connection or the guest's pool.
    pub fn connect(&mut self, stream: UnixStream) -> Result<(), String> {
        let fault = |error: tmem_model::GuestError| error.to_string();
        self.guest.connect_stream(stream).map_err(fault)?;
        self.guest.start().map_err(fault)?;
        let create = Request::PoolCreate {
            pool: POOL,
            flags: 0,
        };
        self.guest
            .submit(0, create)
            .ok_or("the queue has no room for a request")?;
        self.guest.wait(TIMEOUT).map_err(fault)?;
        Ok(())
    }

    fn header(&self, kind: u16, pages: usize) -> wire::Req {
        wire::Req {
            generation: self.guest.generation().into(),
            r#type: kind.into(),
            count: (pages as u16).into(),
            pool: POOL.into(),
            retain: 0.into(),
        }
    }

    /// Sends a put of a run of pages. Returns false, and sends nothing, if too many requests are in
    /// flight.
    pub fn put(&mut self, run: Run) -> bool {
        let Some(number) = self.free.pop() else {
            return false;
        };
        let mut meta = self.header(wire::T_PUT, run.pages).as_bytes().to_vec();
        for index in run.index..run.index + run.pages {
            let page = wire::PutPage {
                object: 1.into(),
                index: (index as u64).into(),
                cookie: (index as u64 + 1).into(),
                flags: 0.into(),
                reserved: 0.into(),
            };
            meta.extend(page.as_bytes());
        }
        let data = self.pages_at + run.index as u64 * PAGE;
        let answer_bytes = size_of::<wire::Resp>() + run.pages;
        self.submit(
            number,
            (wire::T_PUT, run.pages),
            &meta,
            answer_bytes,
            (data, false),
        );
        true
    }

    /// Sends a get of a run of pages. The daemon writes the pages to the guest's memory for
    /// returned pages, from page `into` of that memory on. Returns false, and sends nothing, if too
    /// many requests are in flight.
    pub fn get(&mut self, run: Run, into: usize) -> bool {
        let Some(number) = self.free.pop() else {
            return false;
        };
        let get = wire::Get {
            object: 1.into(),
            index: (run.index as u64).into(),
        };
        let header = self.header(wire::T_GET, run.pages);
        let mut meta = [header.as_bytes(), get.as_bytes()].concat();
        for index in run.index..run.index + run.pages {
            meta.extend((index as u64 + 1).to_le_bytes());
        }
        let data = self.into_at + into as u64 * PAGE;
        let answer_bytes = size_of::<wire::Resp>() + run.pages * size_of::<wire::GetPage>();
        self.submit(
            number,
            (wire::T_GET, run.pages),
            &meta,
            answer_bytes,
            (data, true),
        );
        true
    }

    fn submit(
        &mut self,
        number: usize,
        (kind, pages): (u16, usize),
        meta: &[u8],
        answer_bytes: usize,
        (data, writable): (u64, bool),
    ) {
        let slot = &mut self.slots[number];
        (slot.kind, slot.pages) = (kind, pages);
        let [readable, answer, table] = slot.at;
        let ram = self.guest.ram();
        ram.write(readable, meta);
        ram.write(answer, &[wire::S_UNANSWERED]);
        let buffer = |addr, len: usize, writable| Buffer {
            addr,
            len: len as u32,
            writable,
        };
        let data = buffer(data, pages * PAGE_SIZE, writable);
        let answer = buffer(answer, answer_bytes, true);
        let readable = buffer(readable, meta.len(), false);
        let chain = match writable {
            false => [readable, data, answer],
            true => [readable, answer, data],
        };
        let ring = self.guest.ring_mut(QUEUE);
        ring.add(&chain, Some(table), number as u64)
            .expect("the queue has no descriptors for another request");
        self.guest.publish(QUEUE);
    }

    /// Takes one answer, if the daemon has sent one. Returns the number of pages of the answered
    /// request.
    ///
    /// # Errors
    /// A page of a put does not have the result `put_is`, or a page of a get was not returned.
    pub fn answer(&mut self) -> Result<Option<usize>, String> {
        let used = self.guest.ring_mut(QUEUE).pop_used();
        let Some(used) = used.map_err(|error| error.to_string())? else {
            return Ok(None);
        };
        let number = used.token as usize;
        let Slot { at, kind, pages } = self.slots[number];
        let mut answer = [0; size_of::<wire::Resp>() + BATCH * size_of::<wire::GetPage>()];
        let head = size_of::<wire::Resp>();
        let (step, at_in_step, wanted) = match kind {
            wire::T_PUT => (1, 0, self.put_is),
            _ => (size_of::<wire::GetPage>(), 8, wire::P_HIT),
        };
        let answer = &mut answer[..head + pages * step];
        self.guest.ram().read(at[1], answer);
        let mut results = answer[head..].chunks(step).map(|result| result[at_in_step]);
        if answer[0] != wire::S_OK || results.any(|result| result != wanted) {
            return Err(format!(
                "a request of {pages} pages got an unexpected answer: {answer:?}"
            ));
        }
        self.free.push(number);
        Ok(Some(pages))
    }

    /// Polls until the daemon has sent an answer. Returns the number of pages of the answered
    /// request.
    ///
    /// # Errors
    /// [`Self::answer`] returns an error, or there is no answer within the time limit.
    pub fn wait(&mut self) -> Result<usize, String> {
        let begun = Instant::now();
        loop {
            for _ in 0..10_000 {
                if let Some(pages) = self.answer()? {
                    return Ok(pages);
                }
                std::hint::spin_loop();
            }
            if begun.elapsed() > TIMEOUT {
                return Err("a request was not answered in time".into());
            }
        }
    }

    /// Puts or gets all runs, with as many requests in flight as possible. Returns the seconds
    /// between the answer number WINDOW and the last answer, and the number of pages answered in
    /// that time.
    ///
    /// # Errors
    /// [`Self::wait`] returns an error.
    pub fn run_all(&mut self, runs: &[Run], puts: bool) -> Result<(f64, usize), String> {
        let (mut sent, mut answered, mut into, mut pages) = (0, 0, 0, 0);
        let mut begun = Instant::now();
        while answered < runs.len() {
            while let Some(run) = runs.get(sent) {
                let done = match puts {
                    true => self.put(*run),
                    false => self.get(*run, into),
                };
                if !done {
                    break;
                }
                into += run.pages;
                sent += 1;
            }
            pages += self.wait()?;
            answered += 1;
            if answered == WINDOW {
                begun = Instant::now();
                pages = 0;
            }
        }
        Ok((begun.elapsed().as_secs_f64(), pages))
    }

    /// Compares the pages that gets of these runs returned with the pages that the guest put.
    ///
    /// # Errors
    /// A returned page has a wrong byte.
    pub fn check(&self, runs: &[Run]) -> Result<(), String> {
        let ram = self.guest.ram();
        let (mut put, mut got) = ([0; PAGE_SIZE], [0; PAGE_SIZE]);
        let indices = runs.iter().flat_map(|run| run.index..run.index + run.pages);
        for (number, index) in indices.enumerate() {
            ram.read(self.pages_at + index as u64 * PAGE, &mut put);
            ram.read(self.into_at + number as u64 * PAGE, &mut got);
            if put != got {
                return Err(format!("a get returned wrong bytes for page {index}"));
            }
        }
        Ok(())
    }
}
