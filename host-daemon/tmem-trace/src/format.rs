// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Format of traces of guests' requests to a pool. docs/traces.md describes it.
//!
//! A trace contains the time and the page of each put, get and flush, and the stored size of each
//! put page. It contains neither contents nor names. The recorder replaces the numbers of objects
//! by keyed hashes. It adds to each page number a distance that depends on the object and on the
//! key of the hashes. This key is a random number of the system and is not stored in any file.

use std::fmt;
use std::hash::{BuildHasher, RandomState};

/// First bytes of a trace: name of the format and its version.
const MAGIC: [u8; 8] = *b"tmemtr\x00\x01";

/// Bytes of a page. The device supports no other size.
const PAGE_SIZE: usize = 4096;

/// Granularity of stored sizes in a trace, in bytes. Finer sizes would reveal more of the contents,
/// and no policy uses them.
pub const SIZE_CLASS_BYTES: usize = 256;

/// Bits of an object's hash in a trace. With 100,000 objects, one in 200 traces has two objects
/// with the same hash.
const OBJECT_BITS: u32 = 40;
const OBJECT_BYTES: usize = OBJECT_BITS as usize / 8;

/// Smallest page number that a trace does not record. Page numbers have at most 51 bits, so no
/// object is that large. With this bound, no sum of page number and distance overflows.
const INDEX_MAX: u64 = 1 << 62;

/// Upper bound of the length of an event in bytes. The longest event consists of a first byte,
/// three variable-length numbers, the pool, the object, and one more number.
const EVENT_BYTES_MAX: usize = 64;

/// Class of a stored size: 0 for a same-filled page (a page that repeats four bytes), otherwise the
/// size in units of [`SIZE_CLASS_BYTES`], rounded up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeClass(u8);

impl SizeClass {
    const MAX: u8 = (PAGE_SIZE / SIZE_CLASS_BYTES) as u8;

    /// Returns the class of a page with this stored size in bytes.
    pub fn from_bytes(bytes: usize) -> SizeClass {
        SizeClass((bytes.min(PAGE_SIZE)).div_ceil(SIZE_CLASS_BYTES) as u8)
    }

    /// Returns the largest stored size of the class in bytes.
    pub fn bytes(self) -> usize {
        usize::from(self.0) * SIZE_CLASS_BYTES
    }
}

/// Name of an object in a trace: hashes instead of the guest's numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectKey {
    /// Hash of the number of the object's pool.
    pub pool: u16,
    /// Hash of the object's number.
    pub object: u64,
}

/// A request in a trace. Its page numbers are those of the guest plus the [`Distance`] of the
/// object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// A PUT of a page, which the pool stored.
    Put {
        /// Object that contains the page.
        object: ObjectKey,
        /// Recorded page number: the page's number in its object plus the secret [`Distance`].
        page: u64,
        /// Whether the guest reported the page as active.
        workingset: bool,
        /// Class of the size in which the pool stored the page.
        size: SizeClass,
    },
    /// A GET of a page, which the pool must not retain.
    Get {
        /// Object that contains the page.
        object: ObjectKey,
        /// Recorded page number: the page's number in its object plus the secret [`Distance`].
        page: u64,
        /// Whether the pool returned the page.
        hit: bool,
    },
    /// A GET of a page, which the guest allowed the pool to retain.
    GetRetaining {
        /// Object that contains the page.
        object: ObjectKey,
        /// Recorded page number: the page's number in its object plus the secret [`Distance`].
        page: u64,
        /// Whether the pool returned the page.
        hit: bool,
    },
    /// A REF: the guest evicted a retained page and sent a reference instead of a copy.
    Ref {
        /// Object that contains the page.
        object: ObjectKey,
        /// Recorded page number: the page's number in its object plus the secret [`Distance`].
        page: u64,
        /// Whether the pool still had the page.
        held: bool,
    },
    /// A FLUSH of a range of pages, or a refused PUT, which drops the page as a flush does.
    Flush {
        /// Object that contains the pages.
        object: ObjectKey,
        /// Number of the first page in the trace: see [`Distance::page`].
        page: u64,
        /// Number of pages. None stands for all pages from the first one to the end of the object.
        nr_pages: Option<u64>,
    },
    /// A FLUSH of all pages of an object.
    FlushObject(ObjectKey),
    /// The guest destroyed a pool. The field is the hash of the pool's number.
    DestroyPool(u16),
    /// All pools of the tenant were destroyed, for example by a device reset.
    Clear,
}

/// A request in a trace, with its tenant and time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Time since the trace began, in microseconds.
    pub time_us: u64,
    /// Number that stands for the tenant, because a trace contains no names.
    pub tenant: u32,
    /// The request and its page or object.
    pub op: Op,
}

/// Converts a guest's numbers of pools, objects and pages to those of a trace. Each instance has a
/// random key for its hashes, which it never reveals.
#[derive(Debug, Default)]
pub struct Blind(RandomState);

impl Blind {
    /// Returns the number that stands for a pool in a trace: a hash of the pool's number.
    pub fn pool(&self, tenant: u32, pool: u32) -> u16 {
        self.0.hash_one((0u8, tenant, pool)) as u16
    }

    /// Returns the key that stands for an object in a trace, and the distance that is added to the
    /// numbers of its pages.
    pub fn object(&self, tenant: u32, pool: u32, object: u64) -> (ObjectKey, Distance) {
        let hash = self.0.hash_one((1u8, tenant, pool, object));
        let key = ObjectKey {
            pool: self.pool(tenant, pool),
            object: hash & ((1 << OBJECT_BITS) - 1),
        };
        let distance = self.0.hash_one((2u8, tenant, pool, object)) % INDEX_MAX;
        (key, Distance(distance))
    }
}

/// Distance that a trace adds to the page numbers of an object, to hide the guest's numbers.
#[derive(Clone, Copy, Debug)]
pub struct Distance(u64);

impl Distance {
    /// Returns the recorded number of the page `index`: `index` plus the distance. Returns None if
    /// the trace does not record the page.
    pub fn page(self, index: u64) -> Option<u64> {
        (index < INDEX_MAX).then(|| index + self.0)
    }
}

// Bits of an event's first byte, from the lowest: three bits for the kind of request, a flag, and a
// bit for each field that follows because it differs from that of the previous event.
const OP: u8 = 7;
const OP_PUT: u8 = 0;
const OP_GET: u8 = 1;
const OP_FLUSH: u8 = 2;
const OP_FLUSH_OBJECT: u8 = 3;
const OP_DESTROY_POOL: u8 = 4;
const OP_CLEAR: u8 = 5;
const OP_GET_RETAINING: u8 = 6;
const OP_REF: u8 = 7;
/// Flag in an event's first byte. For a put: the guest reported the page as active (workingset).
/// For a get: it was a hit. For a reference: the pool still had the page. For a flush: it reaches
/// to the end of the object.
const FLAG: u8 = 1 << 3;
const HAS_TIME: u8 = 1 << 4;
const HAS_TENANT: u8 = 1 << 5;
const HAS_OBJECT: u8 = 1 << 6;
const HAS_PAGE: u8 = 1 << 7;

/// Fields of the previous event. The next event leaves out fields that are equal to them.
#[derive(Clone, Debug, Default)]
struct Last {
    time_us: u64,
    tenant: u32,
    object: ObjectKey,
    /// Number of the page that follows the page of the previous event.
    page: u64,
}

fn write_number(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

/// Maps a signed number near 0 to a small unsigned number, even if it is negative.
fn zigzag(number: i64) -> u64 {
    ((number << 1) ^ (number >> 63)) as u64
}

fn unzigzag(number: u64) -> i64 {
    (number >> 1) as i64 ^ -((number & 1) as i64)
}

/// Writer of a trace, which converts events to bytes.
#[derive(Debug, Default)]
pub struct Writer {
    last: Last,
    begun: bool,
}

impl Writer {
    /// Upper bound of the bytes that a call of [`Writer::write`] appends, even if the call also
    /// writes the header.
    pub const EVENT_BYTES_MAX: usize = EVENT_BYTES_MAX;

    /// Appends an event to `out`, and before the first event the header. Times must not decrease.
    pub fn write(&mut self, event: &Event, out: &mut Vec<u8>) {
        if !self.begun {
            out.extend(MAGIC);
            self.begun = true;
        }
        let (op, flag, object, page) = match event.op {
            Op::Put {
                object,
                page,
                workingset,
                ..
            } => (OP_PUT, workingset, Some(object), Some(page)),
            Op::Get { object, page, hit } => (OP_GET, hit, Some(object), Some(page)),
            Op::GetRetaining { object, page, hit } => {
                (OP_GET_RETAINING, hit, Some(object), Some(page))
            }
            Op::Ref { object, page, held } => (OP_REF, held, Some(object), Some(page)),
            Op::Flush {
                object,
                page,
                nr_pages,
            } => (OP_FLUSH, nr_pages.is_none(), Some(object), Some(page)),
            Op::FlushObject(object) => (OP_FLUSH_OBJECT, false, Some(object), None),
            Op::DestroyPool(_) => (OP_DESTROY_POOL, false, None, None),
            Op::Clear => (OP_CLEAR, false, None, None),
        };
        let last = &mut self.last;
        let first = out.len();
        out.push(if flag { op | FLAG } else { op });
        let since_us = event.time_us.saturating_sub(last.time_us);
        if since_us > 0 {
            out[first] |= HAS_TIME;
            write_number(out, since_us);
            last.time_us = event.time_us;
        }
        if event.tenant != last.tenant {
            out[first] |= HAS_TENANT;
            write_number(out, event.tenant.into());
            last.tenant = event.tenant;
        }
        if let Some(object) = object
            && object != last.object
        {
            out[first] |= HAS_OBJECT;
            out.extend(object.pool.to_le_bytes());
            out.extend(&object.object.to_le_bytes()[..OBJECT_BYTES]);
            last.object = object;
        }
        if let Some(page) = page {
            if page != last.page {
                out[first] |= HAS_PAGE;
                write_number(out, zigzag(page.wrapping_sub(last.page) as i64));
            }
            last.page = page.wrapping_add(1);
        }
        match event.op {
            Op::Put { size, .. } => out.push(size.0),
            Op::Flush {
                nr_pages: Some(nr_pages),
                ..
            } => write_number(out, nr_pages),
            Op::DestroyPool(pool) => out.extend(pool.to_le_bytes()),
            _ => {}
        }
    }
}

/// Reason why a trace cannot be read any further.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TraceError {
    /// The bytes do not begin with the name of the trace format and this version of it.
    NoTrace,
    /// The trace ends within an event, because the recorder was killed or the file was truncated.
    Cut,
    /// The bytes at this offset are not a valid event.
    Broken(usize),
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TraceError::NoTrace => {
                write!(
                    f,
                    "the file is not a trace, or is a trace of a version other than {}",
                    MAGIC[7]
                )
            }
            TraceError::Cut => write!(f, "the trace is cut off within an event"),
            TraceError::Broken(at) => write!(f, "the trace is damaged at byte {at}"),
        }
    }
}

impl std::error::Error for TraceError {}

/// Reader of a trace, an iterator over its events. After an error it returns no more events.
#[derive(Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    last: Last,
}

impl<'a> Reader<'a> {
    /// Creates a reader of the bytes of a trace.
    ///
    /// # Errors
    /// The bytes do not begin with the name of the trace format and this version of it.
    pub fn new(bytes: &'a [u8]) -> Result<Reader<'a>, TraceError> {
        if !bytes.starts_with(&MAGIC) {
            return Err(TraceError::NoTrace);
        }
        Ok(Reader {
            bytes,
            at: MAGIC.len(),
            last: Last::default(),
        })
    }

    fn byte(&mut self) -> Result<u8, TraceError> {
        let byte = *self.bytes.get(self.at).ok_or(TraceError::Cut)?;
        self.at += 1;
        Ok(byte)
    }

    /// Reads a little-endian number of `bytes` bytes.
    fn fixed(&mut self, bytes: usize) -> Result<u64, TraceError> {
        (0..bytes).try_fold(0, |number, nth| {
            Ok(number | u64::from(self.byte()?) << (8 * nth))
        })
    }

    fn number(&mut self) -> Result<u64, TraceError> {
        let (first, mut number) = (self.at, 0u64);
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let part = u64::from(byte & 0x7f);
            if part << shift >> shift != part {
                break;
            }
            number |= part << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err(TraceError::Broken(first))
    }

    fn event(&mut self) -> Result<Event, TraceError> {
        let at = self.at;
        let broken = TraceError::Broken(at);
        let first = self.byte()?;
        let has = |bit| first & bit != 0;
        if has(HAS_TIME) {
            let since_us = self.number()?;
            let time_us = self.last.time_us.checked_add(since_us);
            self.last.time_us = time_us.ok_or_else(|| broken.clone())?;
        }
        if has(HAS_TENANT) {
            self.last.tenant = u32::try_from(self.number()?).map_err(|_| broken.clone())?;
        }
        if has(HAS_OBJECT) {
            self.last.object = ObjectKey {
                pool: self.fixed(2)? as u16,
                object: self.fixed(OBJECT_BYTES)?,
            };
        }
        if has(HAS_PAGE) {
            let distance = unzigzag(self.number()?);
            self.last.page = self.last.page.wrapping_add(distance as u64);
        }
        let (object, page) = (self.last.object, self.last.page);
        let has_page = matches!(
            first & OP,
            OP_PUT | OP_GET | OP_FLUSH | OP_GET_RETAINING | OP_REF
        );
        if has_page {
            self.last.page = page.wrapping_add(1);
        }
        let op = match first & OP {
            OP_PUT => Op::Put {
                object,
                page,
                workingset: has(FLAG),
                size: match self.byte()? {
                    size @ 0..=SizeClass::MAX => SizeClass(size),
                    _ => return Err(broken),
                },
            },
            OP_GET => Op::Get {
                object,
                page,
                hit: has(FLAG),
            },
            OP_FLUSH => Op::Flush {
                object,
                page,
                nr_pages: match has(FLAG) {
                    true => None,
                    false => Some(self.number()?),
                },
            },
            OP_FLUSH_OBJECT => Op::FlushObject(object),
            OP_DESTROY_POOL => Op::DestroyPool(self.fixed(2)? as u16),
            OP_CLEAR => Op::Clear,
            OP_GET_RETAINING => Op::GetRetaining {
                object,
                page,
                hit: has(FLAG),
            },
            // The kind is OP_REF, because all other values of these three bits are handled above.
            _ => Op::Ref {
                object,
                page,
                held: has(FLAG),
            },
        };
        Ok(Event {
            time_us: self.last.time_us,
            tenant: self.last.tenant,
            op,
        })
    }
}

impl Iterator for Reader<'_> {
    type Item = Result<Event, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at == self.bytes.len() {
            return None;
        }
        let event = self.event();
        if event.is_err() {
            self.at = self.bytes.len();
        }
        Some(event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::{Rng, for_each_seed};

    fn any_event(rng: &mut Rng, time_us: &mut u64) -> Event {
        *time_us += [0, 0, 1, 300, 1 << 40][rng.below(5) as usize];
        let object = ObjectKey {
            pool: rng.below(2) as u16,
            object: rng.below(3) << 33,
        };
        let page = match rng.below(3) {
            0 => rng.next(),
            _ => rng.below(4),
        };
        let op = match rng.below(10) {
            8 => Op::GetRetaining {
                object,
                page,
                hit: rng.one_in(2),
            },
            9 => Op::Ref {
                object,
                page,
                held: rng.one_in(2),
            },
            0..3 => Op::Put {
                object,
                page,
                workingset: rng.one_in(2),
                size: SizeClass::from_bytes(rng.below(5000) as usize),
            },
            3..5 => Op::Get {
                object,
                page,
                hit: rng.one_in(2),
            },
            5 => Op::Flush {
                object,
                page,
                nr_pages: (!rng.one_in(3)).then(|| rng.next() >> rng.below(64)),
            },
            6 => Op::FlushObject(object),
            _ if rng.one_in(2) => Op::DestroyPool(rng.next() as u16),
            _ => Op::Clear,
        };
        Event {
            time_us: *time_us,
            tenant: rng.below(3) as u32,
            op,
        }
    }

    #[test]
    fn a_written_trace_reads_back() {
        for_each_seed("trace", 20, |seed| {
            let (mut rng, mut time_us) = (Rng::new(seed), 0);
            let events: Vec<Event> = (0..500)
                .map(|_| any_event(&mut rng, &mut time_us))
                .collect();
            let (mut writer, mut bytes, mut ends) = (Writer::default(), Vec::new(), Vec::new());
            for event in &events {
                let before = bytes.len();
                writer.write(event, &mut bytes);
                assert!(bytes.len() - before <= Writer::EVENT_BYTES_MAX);
                ends.push(bytes.len());
            }
            let read: Result<Vec<Event>, TraceError> = Reader::new(&bytes).unwrap().collect();
            assert_eq!(read.unwrap(), events);
            // Truncate the trace at random places. The reader must return all events that are
            // complete before that place.
            for _ in 0..50 {
                let len = MAGIC.len() + rng.below((bytes.len() - MAGIC.len()) as u64) as usize;
                let read: Vec<_> = Reader::new(&bytes[..len]).unwrap().collect();
                let complete = ends.iter().take_while(|end| **end <= len).count();
                let good = read.iter().filter_map(|event| event.clone().ok());
                assert!(good.eq(events[..complete].iter().copied()));
                let at_an_end = len == MAGIC.len() || ends.contains(&len);
                assert_eq!(read.last() == Some(&Err(TraceError::Cut)), !at_an_end);
            }
        });
    }

    #[test]
    fn reading_a_trace_ends_at_the_first_damaged_event() {
        for_each_seed("damaged trace", 20, |seed| {
            let mut rng = Rng::new(seed);
            for _ in 0..200 {
                let mut bytes = MAGIC.to_vec();
                bytes.extend((0..rng.below(200)).map(|_| rng.next() as u8));
                let events: Vec<_> = Reader::new(&bytes).unwrap().collect();
                assert!(
                    events.iter().rev().skip(1).all(Result::is_ok),
                    "the reader returned an event after an error"
                );
            }
        });
        let error = |event: &[u8]| {
            let bytes = [&MAGIC, event].concat();
            Reader::new(&bytes).unwrap().last()
        };
        for broken in [
            &[OP_PUT, SizeClass::MAX + 1][..],
            &[OP_CLEAR | HAS_TENANT, 0xff, 0xff, 0xff, 0xff, 0x1f],
            &[
                OP_CLEAR | HAS_TIME,
                255,
                255,
                255,
                255,
                255,
                255,
                255,
                255,
                255,
                2,
            ],
        ] {
            assert!(
                matches!(error(broken), Some(Err(TraceError::Broken(_)))),
                "the invalid event {broken:?} was not reported as broken"
            );
        }
        assert_eq!(
            Reader::new(b"tmemtr\x00\x02").unwrap_err(),
            TraceError::NoTrace
        );
        assert_eq!(Reader::new(b"").unwrap_err(), TraceError::NoTrace);
    }

    #[test]
    fn blinding_a_trace_hides_object_ids_and_keeps_page_distances() {
        let (blind, other) = (Blind::default(), Blind::default());
        let (key, distance) = blind.object(0, 1, 7);
        assert_eq!(
            blind.object(0, 1, 7).0,
            key,
            "the key of an object changed within a trace"
        );
        let differ = [
            blind.object(1, 1, 7).0,
            blind.object(0, 2, 7).0,
            blind.object(0, 1, 8).0,
            other.object(0, 1, 7).0,
        ];
        assert!(differ.iter().all(|another| another.object != key.object));
        let first = distance.page(0).unwrap();
        assert_eq!(distance.page(5), Some(first + 5));
        assert_ne!(other.object(0, 1, 7).1.page(0), Some(first));
        assert_eq!(distance.page(u64::MAX), None);
    }

    #[test]
    fn sizes_in_a_trace_are_rounded_up_to_256_bytes() {
        for (bytes, class_bytes) in [(0, 0), (1, 256), (256, 256), (257, 512), (9999, PAGE_SIZE)] {
            assert_eq!(SizeClass::from_bytes(bytes).bytes(), class_bytes);
        }
    }
}
