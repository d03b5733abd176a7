// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of memory slots. A VM can use as many slots at a time as the daemon announces. Its VMM can
//! add and remove memory in any order while requests are in flight. The daemon refuses a further
//! slot, and other VMs are not affected.

mod common;

use common::{Daemon, guest, seed, work};
use tmem_sim::{Driver, DriverConfig, GuestConfig, GuestRam, RamRegion};
use vhost::vhost_user::VhostUserFrontend;

/// Number of memory slots that the daemon announces to a VMM. docs/operating.md states this number.
const SLOTS: usize = 64;

const ROUNDS: usize = 600;

/// Returns the configuration of a guest that uses all memory slots. One region contains the rings
/// and buffers. No request refers to the other regions.
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

/// Submits puts and gets on the request queues without waiting for answers.
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
    // At the start, each memory slot has a region.
    let mut plugged = [true; SLOTS];
    let (mut met, mut changes) = (0, 0);
    for round in 0..ROUNDS {
        burst(&mut driver, &mut rng);
        met += usize::from(driver.guest.in_flight() > 0);
        // In most rounds, the VMM adds or removes the region of one slot. In every 50th round, it
        // adds all missing regions, so that all slots are in use again.
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
    println!(
        "{met} of {ROUNDS} rounds had requests in flight; {changes} memory regions were added or \
         removed; answers: {counts:?}"
    );
    assert!(
        met > ROUNDS / 2,
        "{met} of {ROUNDS} rounds had requests in flight, expected more than half"
    );
    assert!(
        counts.hits > 100,
        "the guest had too few hits for this test: {counts:?}"
    );
    // The daemon refuses to remove a region that has already been removed, and changes nothing.
    let front_end = driver.guest.frontend().unwrap();
    front_end.remove_mem_region(&regions[5]).unwrap();
    front_end.remove_mem_region(&regions[5]).unwrap_err();
}

#[test]
fn a_memory_slot_above_the_limit_is_refused_without_effect_on_other_vms() {
    let seed = seed("a_memory_slot_above_the_limit_is_refused_without_effect_on_other_vms");
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
        // The other VM keeps its pages in the pool and gets correct answers.
        let before = neighbour.model.counts().hits;
        neighbour.settle().unwrap();
        neighbour.get_all().unwrap();
        assert!(
            neighbour.model.counts().hits > before,
            "round {round}: the other VM lost its cached pages"
        );
        // The VM with too many regions is served again after it connects with a permitted number of
        // regions.
        driver.hang_up().unwrap();
        daemon.connect(&mut driver, "a");
        work(&mut driver, 20);
    }
}
