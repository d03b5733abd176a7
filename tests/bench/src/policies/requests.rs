// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Events of a trace without what a comparison of policies leaves out: hints and retention.
//!
//! No policy retains pages: a get that may retain its page becomes a get, and a reference (REF)
//! becomes a put of the size that the page had before. Retention saves copies between guest and
//! pool. The guest has a retained page, too, so the engine always evicts it first, and no policy
//! decides about it.

use std::collections::BTreeMap;
use tmem_trace::format::{Event, ObjectKey, Op, SizeClass};

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_become_puts_of_the_size_that_the_page_had() {
        let (object, page, hit, held) = (ObjectKey::default(), 4, true, false);
        let refer = |page| Op::Ref { object, page, held };
        let put = Op::Put {
            object,
            page,
            workingset: false,
            size: SizeClass::from_bytes(1024),
        };
        let ops = [
            put,
            Op::GetRetaining { object, page, hit },
            refer(4),
            refer(9),
        ];
        let events = ops.map(|op| Event {
            time_us: 0,
            tenant: 7,
            op,
        });
        let left: Vec<Op> = without_retention(&events)
            .iter()
            .map(|event| event.op)
            .collect();
        assert_eq!(left, [put, Op::Get { object, page, hit }, put]);
    }
}
