// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Rate limit on the events that one VM can cause: a burst, and after it one event per period.
//!
//! A guest that changes its state in a loop must not displace events of other VMs from a
//! subscriber's queue. An event beyond the limit waits, and replaces a waiting event of the same
//! sort (such as an older state of the driver). The waiting event is sent as soon as the limit
//! permits, so the last event of a VM describes its current state. Out of scope: events that an
//! operator causes.

use crate::events::bus::EventKind;
use crate::util::rate_limit::{RateLimit, since_start_ns};
use std::collections::VecDeque;
use std::fmt::Arguments;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Number of events that a VM may cause at once. All virtqueues of a VM may stop at once, and the
/// VM may reconnect a few times. A subscriber's queue has space for 32 times as many events.
pub(crate) const BURST: u32 = 32;
/// Time after which a VM that used up its burst of events may cause one more event.
pub(crate) const PERIOD: Duration = Duration::from_secs(5);

/// Rate limit on the events of one VM, with the events that wait to be sent.
#[derive(Debug, Default)]
pub(crate) struct EventLimit {
    rate: RateLimit,
    /// Guards the waiting events, oldest first and at most one of each sort. A thread holds this
    /// lock while it sends events, so that they are sent in their order.
    pending: Mutex<VecDeque<PendingEvent>>,
}

#[derive(Debug)]
struct PendingEvent {
    kind: EventKind,
    text: String,
    /// Number of earlier events of the same sort that this event has replaced. They are never sent.
    left_out: u64,
}

impl EventLimit {
    /// Adds an event of the VM. The event replaces a waiting event of the same sort. Sends it at
    /// once if the rate limit permits, and otherwise keeps it for `catch_up`.
    pub(crate) fn add(&self, now: Instant, kind: EventKind, text: Arguments<'_>, emit: impl Emit) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        let before = pending
            .iter()
            .position(|other| other.kind.sort() == kind.sort());
        let before = before.and_then(|at| pending.remove(at));
        let event = PendingEvent {
            kind,
            text: text.to_string(),
            left_out: before.map_or(0, |before| before.left_out + 1),
        };
        pending.push_back(event);
        self.emit_some(&mut pending, now, emit);
    }

    /// Sends the VM's waiting events until none is left or the rate limit is reached.
    pub(crate) fn catch_up(&self, now: Instant, emit: impl Emit) {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        self.emit_some(&mut pending, now, emit);
    }

    fn emit_some(&self, pending: &mut VecDeque<PendingEvent>, now: Instant, emit: impl Emit) {
        let now_ns = since_start_ns(now);
        while !pending.is_empty() && self.rate.take(now_ns, BURST, PERIOD) {
            match pending.pop_front() {
                Some(event) if event.left_out > 0 => {
                    let (text, left_out) = (event.text, event.left_out);
                    emit(
                        event.kind,
                        format_args!("{text} ({left_out} left out before)"),
                    );
                }
                Some(event) => emit(event.kind, format_args!("{}", event.text)),
                None => {}
            }
        }
    }
}

/// Function that sends an event of the given kind and text to all subscribers.
pub(crate) trait Emit: Fn(EventKind, Arguments<'_>) {}
impl<F: Fn(EventKind, Arguments<'_>)> Emit for F {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn the_newest_waiting_event_of_each_sort_is_sent_when_the_limit_permits() {
        let limit = EventLimit::default();
        let reported = RefCell::new(Vec::new());
        let emit = |kind: EventKind, text: Arguments<'_>| {
            reported.borrow_mut().push((kind, text.to_string()))
        };
        let start = Instant::now();
        for nth in 0..BURST {
            limit.add(start, EventKind::Driver, format_args!("{nth}"), emit);
        }
        assert_eq!(reported.take().len(), BURST as usize);
        for nth in 0..10 {
            limit.add(start, EventKind::Connected, format_args!("{nth}"), emit);
            limit.add(start, EventKind::QueueStopped, format_args!("{nth}"), emit);
            limit.add(start, EventKind::Disconnected, format_args!("{nth}"), emit);
        }
        limit.catch_up(start, emit);
        assert_eq!(
            reported.take(),
            [],
            "an event was reported beyond the limit"
        );
        limit.catch_up(start + PERIOD, emit);
        let stopped = (EventKind::QueueStopped, "9 (9 left out before)".into());
        assert_eq!(
            reported.take(),
            [stopped],
            "not exactly one event was reported when the limit admits one"
        );
        // This event occurs while other events wait, so it is sent after them.
        limit.add(start + PERIOD, EventKind::Driver, format_args!("on"), emit);
        limit.catch_up(start + 10 * PERIOD, emit);
        let gone = (EventKind::Disconnected, "9 (19 left out before)".into());
        assert_eq!(reported.take(), [gone, (EventKind::Driver, "on".into())]);
        limit.catch_up(start + 20 * PERIOD, emit);
        assert_eq!(reported.take(), []);
    }
}
