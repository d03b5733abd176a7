// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory slots: a VM can use as many slots at once as the daemon announces, and can add and remove
//! them in any order with requests in flight. One slot more is refused without an effect on other
//! VMs.

mod common;

use common::{Daemon, guest, seed, work};
use tmem_sim::{Driver, DriverConfig, GuestConfig, GuestRam, RamRegion};
use vhost::vhost_user::VhostUserFrontend;

/// Number of slots that the daemon announces, which docs/operating.md states.
const SLOTS: usize = 64;

const ROUNDS: usize = 600;

/// Returns a guest with all slots in use. One region contains rings and buffers. No request refers
/// to the other regions.
fn full() -> GuestConfig {
    let region = |number: u64| RamRegion {
        start: number << 32,
        size_bytes: if number == 0 { 8 << 20 } else { 64 << 10 },
    };
    GuestConfig {
        ram: (0..SLOTS as u64).map(region).collect(),
        mem_slots: true,
        ..guest("a")
    }
}

/// Submits puts and gets on every queue, without waiting.
fn burst(driver: &mut Driver, rng: &mut fastrand::Rng) {
    for _ in 0..rng.usize(2..12) {
        let (object, start) = (rng.u64(1..6), rng.u64(..8) * 64);
        let end = start + rng.u64(1..=64);
        let _ = match rng.bool() {
            true => driver.get(object, start, end),
            false => driver.put(object, start, end),
        };
    }
}

#[test]
fn memory_slot_changes_under_load_lose_no_request() {
    let seed = seed("memory_slot_changes_under_load_lose_no_request");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut daemon = Daemon::start(&[("a", None)]);
    let config = DriverConfig {
        seed,
        window: 24,
        ..DriverConfig::default()
    };
    let mut driver = daemon.driver_with(full(), config);
    let regions = driver.guest.ram().vhost_regions();
    let announced = driver.guest.frontend().unwrap().get_max_mem_slots();
    assert_eq!(announced.unwrap(), SLOTS as u64);
    // At the start every region occupies a slot.
    let mut plugged = [true; SLOTS];
    let (mut met, mut changes) = (0, 0);
    for round in 0..ROUNDS {
        burst(&mut driver, &mut rng);
        met += usize::from(driver.guest.in_flight() > 0);
        // Each round adds or removes one slot. Every 50th round adds all missing slots, so that all
        // are in use again.
        let all = round % 50 == 49;
        let one = rng.usize(1..SLOTS);
        for (number, region) in regions.iter().enumerate() {
            let (change, plug) = match all {
                true => (!plugged[number], true),
                false => (number == one, !plugged[number]),
            };
            if !change {
                continue;
            }
            let front_end = driver.guest.frontend().unwrap();
            match plug {
                true => front_end.add_mem_region(region).map(drop),
                false => front_end.remove_mem_region(region),
            }
            .unwrap_or_else(|e| {
                panic!(
                    "round {round}, region {number}, add {plug}: the daemon refused the change: {e}"
                )
            });
            plugged[number] = plug;
            changes += 1;
        }
        driver.collect().unwrap();
    }
    driver.settle().unwrap();
    driver.get_all().unwrap();
    let counts = driver.model.counts();
    println!("{met} of {ROUNDS} rounds had requests in flight, {changes} changes; {counts:?}");
    assert!(
        met > ROUNDS / 2,
        "only {met} of {ROUNDS} rounds had requests in flight"
    );
    assert!(counts.hits > 100, "the guest had too few hits: {counts:?}");
    // Removing a region that is not mapped fails and changes nothing.
    let front_end = driver.guest.frontend().unwrap();
    front_end.remove_mem_region(&regions[5]).unwrap();
    front_end.remove_mem_region(&regions[5]).unwrap_err();
}

#[test]
fn one_slot_too_many_is_refused_without_effect_on_others() {
    let seed = seed("one_slot_too_many_is_refused_without_effect_on_others");
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut daemon = Daemon::start(&[("a", None), ("b", None)]);
    let config = |seed| DriverConfig {
        seed,
        window: 24,
        ..DriverConfig::default()
    };
    let mut driver = daemon.driver_with(full(), config(seed));
    let mut neighbour = daemon.driver_with(guest("b"), config(seed + 1));
    let more = RamRegion {
        start: 1 << 44,
        size_bytes: 64 << 10,
    };
    let more = GuestRam::new(&[more], true).unwrap();
    for round in 1..=10 {
        work(&mut neighbour, 40);
        burst(&mut driver, &mut rng);
        burst(&mut neighbour, &mut rng);
        let front_end = driver.guest.frontend().unwrap();
        front_end
            .add_mem_region(&more.vhost_regions()[0])
            .unwrap_err();
        let log = std::fs::read_to_string(daemon.path("log")).unwrap();
        let said = log.matches("more than 64 memory regions").count();
        assert!(
            said > 0,
            "round {round}: the log does not report too many regions: {log}"
        );
        // The other VM keeps its cache, and each answer is correct.
        let before = neighbour.model.counts().hits;
        neighbour.settle().unwrap();
        neighbour.get_all().unwrap();
        assert!(
            neighbour.model.counts().hits > before,
            "round {round}: the neighbour lost its cache"
        );
        // The VM is served again when it connects with the permitted number of regions.
        driver.hang_up().unwrap();
        daemon.connect(&mut driver, "a");
        work(&mut driver, 20);
    }
}
