// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of kicks and interrupts.

use super::*;

#[test]
fn the_driver_can_suppress_interrupts() {
    let mut guest = guest();
    guest.put(0, 1);
    let flags = AVAIL_F_NO_INTERRUPT.to_le();
    guest
        .memory
        .guest
        .store(flags, GuestAddress(AVAIL), Ordering::Release)
        .expect("the address is outside of the guest's memory");
    guest.run_slice();
    assert_eq!(guest.used(), 1);
    assert!(!guest.interrupted());
}

/// Collects the log lines of the calling thread, with their fields.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl tracing::field::Visit for Lines {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
        let mut lines = self.0.lock().expect("the lock is poisoned");
        let line = lines
            .last_mut()
            .expect("a log field was recorded before its line began");
        line.push_str(&format!(" {field}={value:?}"));
    }
}

impl tracing::Subscriber for Lines {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        self.0
            .lock()
            .expect("the lock is poisoned")
            .push(String::new());
        event.record(&mut self.clone());
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// Interrupts that the kernel does not deliver are counted. No other test may lose interrupts,
/// because all tests of the process share the counter.
#[test]
fn lost_interrupts_are_counted_and_logged_with_their_vm() {
    let lines = Lines::default();
    let mut guest = guest();
    let no_eventfd = std::fs::File::open("/dev/null").expect("cannot open /dev/null");
    guest.vring.lock().call = Some(no_eventfd.into());
    let before = notifier::lost_interrupts();
    tracing::subscriber::with_default(lines.clone(), || {
        for nth in 0..100 {
            guest.put(nth, 1);
            guest.run_slice();
        }
    });
    assert_eq!(notifier::lost_interrupts() - before, 100);
    let lines = std::mem::take(&mut *lines.0.lock().expect("the lock is poisoned"));
    assert!(
        lines.len() > 1 && lines.len() < 50,
        "{} lines were logged, not 2 to 49: {lines:?}",
        lines.len()
    );
    for line in lines {
        assert!(
            line.contains("an interrupt is lost") && line.contains("vm=test"),
            "the log line does not name the failure and the VM: {line}"
        );
    }
    assert_eq!(
        guest.used(),
        100,
        "not all 100 requests were answered after interrupts had failed"
    );
    let call = guest
        .call
        .try_clone()
        .expect("cannot duplicate the descriptor");
    guest.vring.lock().call = Some(call);
    guest.put(100, 1);
    guest.run_slice();
    assert!(guest.interrupted());
    assert_eq!(notifier::lost_interrupts() - before, 100);
}

#[test]
fn the_guest_is_not_interrupted_without_an_answer() {
    let mut guest = guest();
    assert_eq!(guest.run_slice(), SliceEnd::Idle);
    assert!(!guest.interrupted());
    guest.put(0, 1);
    guest.run_slice();
    assert!(guest.interrupted());
    guest.run_slice();
    assert!(!guest.interrupted());
}

/// With EVENT_IDX, the driver determines after which answer it wants an interrupt, and the worker
/// sends one only then.
#[test]
fn interrupts_are_sent_only_after_the_answer_at_the_event_index() {
    let mut guest = guest();
    guest.vring.lock().queue.set_event_idx(true);
    let wait_for = |guest: &Guest, used: u16| {
        let at = GuestAddress(AVAIL + 4 + 2 * u64::from(SIZE));
        guest
            .memory
            .guest
            .store(used.to_le(), at, Ordering::Release)
            .expect("the address is outside of the guest's memory");
    };
    wait_for(&guest, 2);
    for (index, interrupted) in [false, false, true, false].into_iter().enumerate() {
        guest.put(index as u64, 1);
        guest.run_slice();
        assert_eq!(
            guest.interrupted(),
            interrupted,
            "answer {index}: the guest must be interrupted after answer 2 only"
        );
    }
    let at = GuestAddress(USED + 4 + 8 * u64::from(SIZE));
    let kick_at: u16 = guest
        .memory
        .guest
        .load(at, Ordering::Acquire)
        .expect("the address is outside of the guest's memory");
    assert_eq!(
        u16::from_le(kick_at),
        4,
        "the device did not request a kick for the next chain"
    );
}

/// A worker that polls a ring requests no kicks and finds new chains without them. When it stops
/// polling the ring, it requests kicks again.
#[test]
fn a_polled_ring_requests_no_kick() {
    const LONG: u64 = u64::MAX / 2;
    let mut guest = guest();
    let wanted = |guest: &Guest| {
        let flags: u16 = guest
            .memory
            .guest
            .load(GuestAddress(USED), Ordering::Acquire)
            .expect("the address is outside of the guest's memory");
        u16::from_le(flags) & 1 == 0
    };
    guest.put(0, 1);
    assert_eq!(
        guest.vring.run_slice(&mut guest.scratch, LONG),
        SliceEnd::Idle,
        "the ring was polled before any pause was measured"
    );
    assert!(wanted(&guest));
    guest.put(1, 1);
    let SliceEnd::Poll { until_ns } = guest.vring.run_slice(&mut guest.scratch, LONG) else {
        panic!("the ring was not polled after a short pause");
    };
    assert!(!wanted(&guest) && !guest.vring.poll_has_ended(until_ns));
    assert!(
        guest.vring.poll_has_ended(0),
        "the poll did not end at its time limit"
    );
    guest.put(2, 1);
    assert!(guest.vring.poll_has_ended(until_ns));
    assert!(matches!(
        guest.vring.run_slice(&mut guest.scratch, LONG),
        SliceEnd::Poll { .. }
    ));
    assert_eq!(guest.used(), 3);
    // A slice with a maximum polling time of 0 ends the polling of the ring.
    assert_eq!(guest.vring.run_slice(&mut guest.scratch, 0), SliceEnd::Idle);
    assert!(wanted(&guest));
    // A worker stops polling a ring while the control thread has its lock.
    let state = guest.vring.lock();
    assert!(guest.vring.poll_has_ended(until_ns));
    drop(state);
}
