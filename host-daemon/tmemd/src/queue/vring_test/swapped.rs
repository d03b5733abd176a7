// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests which worker serves a vring whose VM's memory the host has swapped out.

use super::*;
use crate::config::settings::{EventLoop, Waiting};
use crate::host::background::BackgroundWorkers;
use crate::queue::worker::{WorkerContext, Workers};
use std::time::Duration;

#[test]
fn a_swapped_vring_is_passed_on_to_the_partner_and_back() {
    const PARTNER: usize = 1;
    let mut guest = guest();
    let vring = Vring::new(1, 0, guest.link.clone());
    let vring = Arc::new(std::mem::replace(&mut guest.vring, vring));
    let waiting = Waiting {
        event_loop: EventLoop::Epoll,
        poll_max: Duration::ZERO,
    };
    let workers = Workers::new(1, true, waiting).expect("cannot create the workers");
    let clock = guest.link.clock.clone();
    let background =
        BackgroundWorkers::start(guest.engine.clone(), &clock, 0, workers.heartbeats())
            .expect("cannot start background work without threads");
    let mut contexts = [(); 2].map(|()| WorkerContext::new().expect("cannot map the buffers"));
    let mut round = |worker: usize| {
        workers
            .round(worker, &mut contexts[worker], &background)
            .expect("the worker cannot look for kicks");
    };
    let link = guest.link.clone();
    let swapped = &link.vm.swapped;
    guest.put(0, 1);
    swapped.set(u64::MAX);
    workers.schedule(&vring);
    round(0);
    assert_eq!(guest.used(), 0, "the vring's worker served a swapped VM");
    round(PARTNER);
    assert_eq!(guest.used(), 1, "the partner did not serve a swapped VM");

    guest.put(1, 1);
    workers.schedule(&vring);
    round(0);
    swapped.set(0);
    round(PARTNER);
    assert_eq!(guest.used(), 1, "the partner kept a VM that is not swapped");
    round(0);
    assert_eq!(
        guest.used(),
        2,
        "the vring's worker did not get its vring back"
    );

    // A worker that finds the vring locked leaves it to the other one.
    guest.put(2, 1);
    workers.schedule(&vring);
    {
        let _state = vring.lock();
        round(0);
    }
    round(PARTNER);
    round(0);
    assert_eq!(guest.used(), 3, "a vring that was locked was forgotten");
}
