// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Conformance tests of the daemon with VMMs that differ from QEMU: they report no device reset, skip
//! requests in flight, share one interrupt, or change the memory map while rings run. docs/vmm.md
//! says which VMM does what. tests/slots.rs has the tests of memory slots.

use crate::common::{Daemon, every_queue_answers, guest, seed, work};
use tmem_sim::{Driver, DriverConfig, GuestConfig, RamRegion, Vmm};

/// Returns the configuration of a guest whose VMM has the habits `vmm`.
fn guest_of(vmm: Vmm) -> GuestConfig {
    GuestConfig { vmm, ..guest("a") }
}

fn config(seed: u64) -> DriverConfig {
    DriverConfig {
        seed,
        window: 24,
        ..DriverConfig::default()
    }
}

/// Puts pages and reads them again, and checks that there were hits. The daemon thus serves the
/// guest.
fn serves(driver: &mut Driver) {
    let before = driver.model.counts().hits;
    driver.put(1, 0, 64);
    driver.settle().unwrap();
    driver.get(1, 0, 64);
    driver.settle().unwrap();
    assert!(
        driver.model.counts().hits > before,
        "the daemon returned no page: {:?}",
        driver.model.counts()
    );
}

/// A VMM disables the rings at a reset of the device, and sends neither GET_VRING_BASE nor
/// RESET_DEVICE. The driver then sets up rings elsewhere in memory, which start at 0. The daemon must
/// empty the cache, because the driver creates pools with the same numbers again.
#[test]
fn a_device_reset_that_the_vmm_does_not_report_empties_the_cache() {
    let seed = seed("a_device_reset_that_the_vmm_does_not_report_empties_the_cache");
    let mut daemon = Daemon::start(&[("a", None)]);
    let vmm = Vmm {
        silent_resets: true,
        ..Vmm::default()
    };
    let mut driver = daemon.driver_with(guest_of(vmm), config(seed));
    for round in 0..10 {
        serves(&mut driver);
        work(&mut driver, 50);
        // Requests may be in flight when the driver resets the device.
        driver.put(2, 0, 64);
        let generation = driver.guest.generation();
        driver.reboot().unwrap();
        assert_ne!(
            driver.guest.generation(),
            generation,
            "round {round}: the generation did not change at the reset"
        );
        every_queue_answers(&mut driver);
    }
    // A VMM that stops and starts the rings without a reset, as at a pause, keeps the cache.
    driver.put(1, 0, 64);
    driver.settle().unwrap();
    let generation = driver.guest.generation();
    driver.guest.stop().unwrap();
    driver.guest.start().unwrap();
    assert_eq!(driver.guest.generation(), generation);
    assert!(driver.get_all().unwrap() > 0, "a pause emptied the cache");
}

/// Kills the daemon while requests are in flight. A VMM starts the rings at their used index, and
/// so replays the requests, or at their available index, and so skips them. The daemon answers all
/// of them in both cases: otherwise the driver could never use their buffers again.
#[test]
fn requests_in_flight_are_answered_whether_the_vmm_replays_or_skips_them() {
    let seed = seed("requests_in_flight_are_answered_whether_the_vmm_replays_or_skips_them");
    let mut daemon = Daemon::start(&[("a", None)]);
    for (number, skips_in_flight) in [(0, false), (1, true)] {
        let vmm = Vmm {
            skips_in_flight,
            ..Vmm::default()
        };
        let mut driver = daemon.driver_with(guest_of(vmm), config(seed + number));
        let mut in_flight = 0;
        for round in 0..6 {
            work(&mut driver, 100);
            // The daemon is stopped, so it takes none of these requests.
            daemon.suspend();
            for start in [0, 256, 512] {
                driver.put(round + 1, start, start + 40);
                driver.get(round + 1, start, start + 40);
            }
            daemon.kill();
            driver.lose_backend().unwrap();
            in_flight += driver.guest.in_flight();
            daemon.spawn();
            daemon.connect(&mut driver, "a");
            assert_eq!(driver.guest.in_flight(), 0);
            serves(&mut driver);
            every_queue_answers(&mut driver);
        }
        assert!(in_flight >= 30, "only {in_flight} requests were in flight");
    }
}

/// virtio-mmio has one interrupt, so all queues have one call eventfd. An interrupt for one queue
/// must not be lost because another queue was interrupted before.
#[test]
fn all_queues_can_share_one_call_eventfd() {
    let seed = seed("all_queues_can_share_one_call_eventfd");
    let mut daemon = Daemon::start(&[("a", None)]);
    let vmm = Vmm {
        one_interrupt: true,
        ..Vmm::default()
    };
    let configuration = GuestConfig {
        request_queues: 4,
        ..guest_of(vmm)
    };
    let mut driver = daemon.driver_with(configuration, config(seed));
    // The fake guest sleeps until an interrupt, so a lost interrupt makes an answer late.
    for _ in 0..5 {
        work(&mut driver, 300);
        every_queue_answers(&mut driver);
        serves(&mut driver);
    }
    daemon.kill();
    driver.lose_backend().unwrap();
    daemon.spawn();
    daemon.connect(&mut driver, "a");
    work(&mut driver, 300);
}

/// A VMM without memory slots sends its complete memory table again at each change, while rings run
/// and requests are in flight.
#[test]
fn a_memory_table_that_is_sent_again_under_load_loses_no_request() {
    let seed = seed("a_memory_table_that_is_sent_again_under_load_loses_no_request");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut daemon = Daemon::start(&[("a", None)]);
    let region = |number: u64| RamRegion {
        start: number << 32,
        size_bytes: if number == 0 { 8 << 20 } else { 1 << 20 },
    };
    let configuration = GuestConfig {
        ram: (0..8).map(region).collect(),
        // These VMMs acknowledge only the memory table, as QEMU does.
        acknowledged: false,
        ..guest("a")
    };
    let mut driver = daemon.driver_with(configuration, config(seed));
    let mut met = 0;
    for round in 0..300 {
        for _ in 0..rng.usize(2..10) {
            let (object, start) = (rng.u64(1..6), rng.u64(..8) * 64);
            let end = start + rng.u64(1..=64);
            let _ = match rng.bool() {
                true => driver.get(object, start, end),
                false => driver.put(object, start, end),
            };
        }
        met += usize::from(driver.guest.in_flight() > 0);
        // The first region has the rings and all buffers.
        driver.guest.set_mem_table_of(rng.usize(1..=8)).unwrap();
        if round % 10 == 0 {
            driver.settle().unwrap();
        }
        driver.collect().unwrap();
    }
    driver.settle().unwrap();
    driver.get_all().unwrap();
    let counts = driver.model.counts();
    assert!(met > 100, "requests were in flight in only {met} rounds");
    assert!(counts.hits > 100, "too few hits for this test: {counts:?}");
}
