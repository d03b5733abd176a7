// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Events and their subscribers. Events report that VMs come and go, that operators act, or that
//! the host runs short of memory.
//!
//! Each subscriber has a bounded queue. A subscriber that does not read its events loses the oldest
//! ones and receives their number. Out of scope: events for single requests of a guest, and the
//! bound on the events of a VM, see `limit.rs`.

use crate::util::event_fd::{consume, signal};
use rustix::event::EventfdFlags;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::SystemTime;
use tmem_control::Event;

/// Maximum number of events that wait for a subscriber. Each of many VMs can cause several when it
/// reconnects.
const QUEUE_MAX: usize = 1024;

/// Kinds of events. Their names are part of the control interface (docs/control.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The subscription begins.
    Subscribed,
    /// The daemon serves the VM from now on.
    Added,
    /// The daemon no longer serves the VM.
    Removed,
    /// A VMM has connected to the VM's socket.
    Connected,
    /// The connection of the VM's VMM has ended.
    Disconnected,
    /// A connection to the VM's socket was refused.
    ConnectionRefused,
    /// A virtqueue was stopped because of a fault.
    QueueStopped,
    /// The guest's driver reports another state.
    Driver,
    /// The VM's quota was changed.
    Quota,
    /// The VM's manager (such as the libvirt bridge) reports a problem, or that the problem is
    /// solved.
    Problem,
    /// An operator dropped the VM's pages.
    Flushed,
    /// The VM was frozen, see the method FreezeVm.
    Frozen,
    /// The VM was thawed, see the method ThawVm.
    Thawed,
    /// The pool's configured size was changed.
    Resized,
    /// The host is short of memory, and the pool begins to shrink.
    HostShort,
    /// The pool has its configured size again.
    HostWell,
    /// The configuration was read again.
    Reloaded,
}

impl EventKind {
    /// All kinds of events. A test compares them with the documentation.
    pub const ALL: [EventKind; 17] = [
        EventKind::Subscribed,
        EventKind::Added,
        EventKind::Removed,
        EventKind::Connected,
        EventKind::Disconnected,
        EventKind::ConnectionRefused,
        EventKind::QueueStopped,
        EventKind::Driver,
        EventKind::Quota,
        EventKind::Problem,
        EventKind::Flushed,
        EventKind::Frozen,
        EventKind::Thawed,
        EventKind::Resized,
        EventKind::HostShort,
        EventKind::HostWell,
        EventKind::Reloaded,
    ];

    /// Returns the sort of an event that a guest, its VMM or a peer of its socket can cause in a
    /// loop; None for other events. Among waiting events of the same sort, only the last one is
    /// kept, because it describes the current state.
    pub fn sort(self) -> Option<EventKind> {
        match self {
            EventKind::Connected | EventKind::Disconnected => Some(EventKind::Connected),
            EventKind::ConnectionRefused | EventKind::QueueStopped | EventKind::Driver => {
                Some(self)
            }
            EventKind::Subscribed
            | EventKind::Added
            | EventKind::Removed
            | EventKind::Quota
            | EventKind::Problem => None,
            EventKind::Flushed | EventKind::Frozen | EventKind::Thawed | EventKind::Resized => None,
            EventKind::HostShort | EventKind::HostWell | EventKind::Reloaded => None,
        }
    }

    /// Returns the kind's name in the control interface.
    pub fn name(self) -> &'static str {
        match self {
            EventKind::Subscribed => "subscribed",
            EventKind::Added => "added",
            EventKind::Removed => "removed",
            EventKind::Connected => "connected",
            EventKind::Disconnected => "disconnected",
            EventKind::ConnectionRefused => "connection-refused",
            EventKind::QueueStopped => "queue-stopped",
            EventKind::Driver => "driver",
            EventKind::Quota => "quota",
            EventKind::Problem => "problem",
            EventKind::Flushed => "flushed",
            EventKind::Frozen => "frozen",
            EventKind::Thawed => "thawed",
            EventKind::Resized => "resized",
            EventKind::HostShort => "host-short",
            EventKind::HostWell => "host-well",
            EventKind::Reloaded => "reloaded",
        }
    }
}

/// The subscribers to events.
#[derive(Debug, Default)]
pub struct Events {
    /// Guards the subscribers and the number of events so far. A subscriber's queue is locked under
    /// it.
    state: Mutex<(Vec<Weak<Subscription>>, i64)>,
}

/// Subscription to events, which lasts until it is dropped.
#[derive(Debug)]
pub struct Subscription {
    /// Guards the waiting events, and the number of events lost since the last one was taken.
    queue: Mutex<(VecDeque<Event>, i64)>,
    /// Descriptor that is readable while events wait.
    ready: OwnedFd,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Events {
    fn event(number: i64, kind: EventKind, vm: Option<&str>, text: String) -> Event {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        Event {
            number,
            time_ms: now.map_or(0, |now| now.as_millis() as i64),
            kind: kind.name().into(),
            vm: vm.map(Into::into),
            text,
            lost: 0,
        }
    }

    /// Sends an event to all subscribers. It is cheap without subscribers and never waits for one.
    pub fn emit(&self, kind: EventKind, vm: Option<&str>, text: std::fmt::Arguments<'_>) {
        let mut state = lock(&self.state);
        state.1 += 1;
        if state.0.is_empty() {
            return;
        }
        let event = Events::event(state.1, kind, vm, text.to_string());
        state.0.retain(|subscription| {
            let subscription = subscription.upgrade();
            subscription.is_some_and(|s| {
                s.push(event.clone());
                true
            })
        });
    }

    /// Creates a subscription to all events from now on. Its first event reports that it begins.
    ///
    /// # Errors
    /// The system has no descriptor left.
    pub fn subscribe(&self) -> io::Result<Arc<Subscription>> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let subscription = Arc::new(Subscription {
            queue: Mutex::default(),
            ready: rustix::event::eventfd(0, flags)?,
        });
        let mut state = lock(&self.state);
        let text = "events from now on".into();
        subscription.push(Events::event(state.1, EventKind::Subscribed, None, text));
        state.0.push(Arc::downgrade(&subscription));
        Ok(subscription)
    }
}

impl Subscription {
    fn push(&self, event: Event) {
        let mut queue = lock(&self.queue);
        if queue.0.len() >= QUEUE_MAX {
            queue.0.pop_front();
            queue.1 += 1;
        }
        queue.0.push_back(event);
        signal(&self.ready);
    }

    /// Returns a descriptor that is readable while events wait.
    pub fn ready(&self) -> &OwnedFd {
        &self.ready
    }

    /// Takes the waiting events, oldest first.
    pub fn take(&self) -> Vec<Event> {
        consume(&self.ready);
        let mut queue = lock(&self.queue);
        let lost = std::mem::take(&mut queue.1);
        let mut events: Vec<Event> = queue.0.drain(..).collect();
        if let Some(first) = events.first_mut() {
            first.lost = lost;
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_lists_all_event_kinds() {
        let document = include_str!("../../../../docs/control.md");
        let (_, events) = document
            .split_once("## Events")
            .expect("docs/control.md has no chapter Events");
        for kind in EventKind::ALL {
            let named = |row: &str| {
                let first = row.trim_start_matches("| ").split(" |").next();
                first.is_some_and(|names| names.split(", ").any(|name| name == kind.name()))
            };
            assert!(
                events.lines().any(named),
                "the documentation does not list event {}",
                kind.name()
            );
        }
    }

    #[test]
    fn a_slow_subscriber_loses_the_oldest_events_and_learns_how_many() {
        let events = Events::default();
        events.emit(EventKind::Added, Some("a"), format_args!("before"));
        let subscription = events
            .subscribe()
            .expect("cannot create the subscription's eventfd");
        let emit = |count| {
            for nth in 0..count {
                events.emit(EventKind::Connected, Some("a"), format_args!("{nth}"));
            }
        };
        emit(2);
        let taken = subscription.take();
        let kinds: Vec<&str> = taken.iter().map(|event| event.kind.as_str()).collect();
        assert_eq!(kinds, ["subscribed", "connected", "connected"]);
        assert_eq!(taken[2].number, taken[1].number + 1);
        emit(QUEUE_MAX + 5);
        let taken = subscription.take();
        assert_eq!((taken.len(), taken[0].lost), (QUEUE_MAX, 5));
        assert_eq!(
            taken[0].text, "5",
            "the queue did not drop its oldest events"
        );
        assert!(subscription.take().is_empty());
        drop(subscription);
        emit(1);
        assert!(
            lock(&events.state).0.is_empty(),
            "the state of the dropped subscription was kept"
        );
    }
}
