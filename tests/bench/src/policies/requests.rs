// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Requests of guests with numbered keys, made from the events of a trace.
//!
//! No policy retains pages: a get that may retain its page becomes a get, and a reference (REF)
//! becomes a put of the size that the page had before. Retention saves copies between guest and
//! pool. The guest has a retained page, too, so the engine always evicts it first, and no policy
//! decides about it.

use std::collections::BTreeMap;
use tmem_pool::PAGE_METADATA_CHARGE_BYTES;
use tmem_trace::format::{Event, ObjectKey, Op, SizeClass};

/// Number of a page among the keys of its tenant, from 0.
pub type Key = u32;

/// Kind of a request, which concerns one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The guest puts the page, whose charge has this number of bytes.
    Put(u32),
    /// The guest requests the page. If the pool has the page, the pool returns and removes it.
    Get,
    /// The guest flushes the page, so that the pool drops it.
    Flush,
}

/// A request of a guest for one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Number of the tenant, from 0.
    pub tenant: usize,
    /// Number of the page among the tenant's keys.
    pub key: Key,
    /// Kind of the request.
    pub kind: Kind,
}

/// All requests of a trace.
#[derive(Debug, Default)]
pub struct Requests {
    /// The requests in their order.
    pub list: Vec<Request>,
}

impl Requests {
    /// Returns the number of gets.
    pub fn gets(&self) -> u64 {
        let gets = |request: &&Request| request.kind == Kind::Get;
        self.list.iter().filter(gets).count() as u64
    }
}

/// Returns the events without the guests' hints that a page was used again.
pub fn without_hints(mut events: Vec<Event>) -> Vec<Event> {
    for event in &mut events {
        if let Op::Put { workingset, .. } = &mut event.op {
            *workingset = false;
        }
    }
    events
}

/// Returns the events without retention: gets and puts instead of retaining gets and references. A
/// reference to a page that the trace has not put is left out, because its size is unknown.
pub fn without_retention(events: &[Event]) -> Vec<Event> {
    let mut sizes: BTreeMap<(u32, ObjectKey, u64), SizeClass> = BTreeMap::new();
    let replace = |event: &Event| {
        let mut event = *event;
        match event.op {
            Op::Put {
                object, page, size, ..
            } => {
                sizes.insert((event.tenant, object, page), size);
            }
            Op::GetRetaining { object, page, hit } => event.op = Op::Get { object, page, hit },
            Op::Ref { object, page, .. } => {
                event.op = Op::Put {
                    object,
                    page,
                    workingset: false,
                    size: *sizes.get(&(event.tenant, object, page))?,
                };
            }
            _ => {}
        }
        Some(event)
    };
    events.iter().filter_map(replace).collect()
}

/// Keys of a tenant: the number of each page that its requests named, and the pages that a pool
/// which never evicts would have now.
#[derive(Default)]
struct Tenant {
    keys: BTreeMap<(ObjectKey, u64), Key>,
    stored: BTreeMap<(ObjectKey, u64), Key>,
}

impl Tenant {
    fn key(&mut self, page: (ObjectKey, u64)) -> Key {
        let next = self.keys.len() as Key;
        *self.keys.entry(page).or_insert(next)
    }

    /// Removes and returns the keys of all stored pages from `first` to `last`.
    fn flush(&mut self, first: (ObjectKey, u64), last: (ObjectKey, u64)) -> Vec<Key> {
        let keys = self.stored.range(first..=last);
        let pages: Vec<_> = keys.map(|(page, key)| (*page, *key)).collect();
        let remove = |(page, key)| {
            self.stored.remove(&page);
            key
        };
        pages.into_iter().map(remove).collect()
    }
}

/// Returns the requests of a trace without retention. A flush becomes one request for each page
/// that a pool without evictions would lose by it.
pub fn requests(events: &[Event]) -> Requests {
    let mut numbers = BTreeMap::new();
    let mut tenants: Vec<Tenant> = Vec::new();
    let mut list = Vec::new();
    for event in events {
        let next = tenants.len();
        let nr = *numbers.entry(event.tenant).or_insert(next);
        if nr == next {
            tenants.push(Tenant::default());
        }
        let tenant = &mut tenants[nr];
        let object = |pool, object| ObjectKey { pool, object };
        let flushed = match event.op {
            Op::Put {
                object,
                page,
                size,
                ..
            } => {
                let key = tenant.key((object, page));
                tenant.stored.insert((object, page), key);
                let bytes = size.bytes() as u32 + PAGE_METADATA_CHARGE_BYTES as u32;
                list.push(Request {
                    tenant: nr,
                    key,
                    kind: Kind::Put(bytes),
                });
                continue;
            }
            Op::Get { object, page, .. } => {
                let key = tenant.key((object, page));
                tenant.stored.remove(&(object, page));
                list.push(Request {
                    tenant: nr,
                    key,
                    kind: Kind::Get,
                });
                continue;
            }
            Op::GetRetaining { .. } | Op::Ref { .. } => {
                unreachable!("the trace still has requests of retained pages")
            }
            Op::Flush {
                nr_pages: Some(0), ..
            } => continue,
            Op::Flush {
                object,
                page,
                nr_pages,
            } => {
                let last = nr_pages.map_or(u64::MAX, |pages| page.saturating_add(pages - 1));
                tenant.flush((object, page), (object, last))
            }
            Op::FlushObject(object) => tenant.flush((object, 0), (object, u64::MAX)),
            Op::DestroyPool(pool) => {
                tenant.flush((object(pool, 0), 0), (object(pool, u64::MAX), u64::MAX))
            }
            Op::Clear => tenant.flush((object(0, 0), 0), (object(u16::MAX, u64::MAX), u64::MAX)),
        };
        list.extend(flushed.into_iter().map(|key| Request {
            tenant: nr,
            key,
            kind: Kind::Flush,
        }));
    }
    Requests { list }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: usize = 1024;
    const PUT: Kind = Kind::Put(SIZE as u32 + PAGE_METADATA_CHARGE_BYTES as u32);

    fn of(ops: &[Op]) -> Vec<(Key, Kind)> {
        let event = |op: &Op| Event {
            time_us: 0,
            tenant: 7,
            op: *op,
        };
        let events: Vec<Event> = ops.iter().map(event).collect();
        let requests = requests(&without_retention(&events));
        assert!(requests.list.iter().all(|request| request.tenant == 0));
        let part = |request: &Request| (request.key, request.kind);
        requests.list.iter().map(part).collect()
    }

    fn put(object: u64, page: u64) -> Op {
        Op::Put {
            object: ObjectKey { pool: 1, object },
            page,
            workingset: false,
            size: SizeClass::from_bytes(SIZE),
        }
    }

    #[test]
    fn flushes_name_each_stored_page_once() {
        let object = ObjectKey { pool: 1, object: 1 };
        let get = Op::Get {
            object,
            page: 6,
            hit: true,
        };
        let flush = Op::Flush {
            object,
            page: 5,
            nr_pages: Some(2),
        };
        let mut ops = vec![put(1, 4), put(1, 5), put(1, 6), put(2, 5), get, flush];
        let mut wanted = vec![(0, PUT), (1, PUT), (2, PUT), (3, PUT), (2, Kind::Get)];
        wanted.push((1, Kind::Flush));
        assert_eq!(of(&ops), wanted);
        ops.push(Op::FlushObject(object));
        wanted.push((0, Kind::Flush));
        assert_eq!(of(&ops), wanted);
        ops.extend([Op::DestroyPool(2), Op::DestroyPool(1), Op::Clear]);
        wanted.push((3, Kind::Flush));
        assert_eq!(of(&ops), wanted);
    }

    #[test]
    fn references_become_puts_of_the_size_that_the_page_had() {
        let object = ObjectKey { pool: 1, object: 1 };
        let (page, hit, held) = (4, true, false);
        let get = Op::GetRetaining { object, page, hit };
        let refer = |page| Op::Ref { object, page, held };
        assert_eq!(
            of(&[put(1, 4), get, refer(4), refer(9)]),
            [(0, PUT), (0, Kind::Get), (0, PUT)]
        );
    }
}
