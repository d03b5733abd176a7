// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Events and their subscribers. An event reports, for example, that a VM comes or goes, that an
//! operator acts, or that the host is short of memory.
//!
//! Each subscriber has a bounded queue. A subscriber that does not read its events loses the oldest
//! ones, and receives the number of lost events. Out of scope: events for single requests of a
//! guest, and the bound on the events of a VM, see `limit.rs`.

use crate::util::event_fd::{consume, signal};
use rustix::event::EventfdFlags;
use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::SystemTime;
use tmem_control::Event;

/// Maximum number of events in one subscriber's queue. The queue is long, because each of many VMs
/// can cause several events when it reconnects.
const QUEUE_MAX: usize = 1024;

/// Kinds of events. Their names are part of the control interface (docs/control.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// First event of each subscription: it reports that the subscription has begun.
    Subscribed,
    /// A VM was added: the daemon serves it from now on.
    Added,
    /// A VM was removed: the daemon no longer serves it.
    Removed,
    /// A VMM, such as QEMU, has connected to the VM's vhost-user socket.
    Connected,
    /// The connection of the VM's VMM has ended.
    Disconnected,
    /// The daemon refused a connection to the VM's vhost-user socket.
    ConnectionRefused,
    /// The daemon stopped one of the VM's virtqueues because of a fault in it.
    QueueStopped,
    /// The driver in the guest reports that its state has changed.
    Driver,
    /// The VM's quota (reserve, limit and weight) was changed.
    Quota,
    /// The VM's manager (such as the libvirt bridge) reports a problem with the VM, or reports that
    /// the problem is solved.
    Problem,
    /// An operator dropped all pages of the VM from the pool.
    Flushed,
    /// An operator froze the VM with the method FreezeVm: its puts are refused from now on.
    Frozen,
    /// An operator thawed the VM with the method ThawVm: its puts are accepted again.
    Thawed,
    /// The configured size of the pool was changed.
    Resized,
    /// The host needs memory, so the pool begins to shrink below its configured size.
    HostShort,
    /// The host no longer needs the memory, and the pool has its configured size again.
    HostWell,
    /// The daemon read its configuration file again and applied it.
    Reloaded,
}

impl EventKind {
    /// All kinds of events. A test compares their names with docs/control.md.
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

    /// Returns the sort of an event: a group of kinds that describe the same state, such as the
    /// connection. None for kinds that no guest, VMM or peer of the VM's socket can cause in a
    /// loop. If several events of one sort wait to be sent, only the last one is kept, because it
    /// describes the current state.
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

    /// Returns the name of this kind of event in the control interface.
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

/// The subscribers to events, to which the daemon sends each event.
#[derive(Debug, Default)]
pub struct Events {
    /// Guards the list of subscribers and the number of events so far. A thread that holds this
    /// lock may take the lock of a subscriber's queue.
    state: Mutex<(Vec<Weak<Subscription>>, i64)>,
}

/// Subscription of a client to events. It lasts until the client's thread drops it.
#[derive(Debug)]
pub struct Subscription {
    /// Guards the events that wait in this subscriber's queue, and the number of events that were
    /// lost since the client last took events.
    queue: Mutex<(VecDeque<Event>, i64)>,
    /// Eventfd that is readable while events wait in the queue.
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

    /// Sends an event to all subscribers without waiting for them to read it. The call is cheap if
    /// there are no subscribers.
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

    /// Creates a subscription to all events from now on. Its first event reports that the
    /// subscription begins.
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

    /// Returns an eventfd that is readable while events wait in this subscription's queue.
    pub fn ready(&self) -> &OwnedFd {
        &self.ready
    }

    /// Takes all events that wait in this subscription's queue, oldest first. The first event has
    /// the number of events that the subscriber has lost since the last call.
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
    fn a_slow_subscriber_loses_the_oldest_events_and_learns_their_number() {
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
            "the subscription did not drop exactly the oldest events"
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
