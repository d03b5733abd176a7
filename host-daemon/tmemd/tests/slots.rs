// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of memory slots. A VM can use as many slots at a time as the daemon announces. Its VMM can
//! add and remove memory in any order while requests are in flight. The daemon refuses a further
//! slot, and memory above the number of regions of all VMs. Other VMs are not affected.

use crate::common::{Daemon, allow_many_files, guest, seed, taken_by, until, work};
use tmem_control::VarlinkClientInterface;
use tmem_model::{Driver, DriverConfig, GuestConfig, GuestRam, RamRegion};
use vhost::VhostUserMemoryRegionInfo;
use vhost::vhost_user::VhostUserFrontend;

/// Number of memory slots that the daemon announces to a VMM. docs/operating.md states this number.
const SLOTS: usize = 509;

const ROUNDS: usize = 600;

/// Number of mappings that the daemon keeps for itself. docs/operating.md states this number.
const OWN_MAPPINGS: u64 = 8_192;

/// Returns the configuration of a guest that uses all memory slots. One region contains the rings
/// and buffers. No request refers to the other regions.
fn full() -> GuestConfig {
    allow_many_files();
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
        let said = log.matches("VM a: more than 509 memory regions").count();
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

/// Returns the number of regions that the daemon has mapped, and their maximum.
fn regions(daemon: &Daemon) -> (u64, u64) {
    let mut client = tmem_control::connect(&daemon.path("control")).unwrap();
    let daemon = client.get_stats(None).call().unwrap().daemon;
    let number = |value: i64| u64::try_from(value).unwrap();
    (
        number(daemon.memory_regions),
        number(daemon.memory_regions_max),
    )
}

/// Fills all slots of the VM, except for the one that it uses, with regions of one page of the
/// same file. The test process does not map them.
fn fill(driver: &mut Driver, page: &VhostUserMemoryRegionInfo) -> Result<(), String> {
    let front_end = driver.guest.frontend().unwrap();
    for slot in 1..SLOTS as u64 {
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: slot << 32,
            userspace_addr: slot << 32,
            ..*page
        };
        let added = front_end.add_mem_region(&region);
        added.map_err(|error| format!("slot {slot}: {error}"))?;
    }
    Ok(())
}

/// All VMs together may have `vm.max_map_count` minus `OWN_MAPPINGS` regions. The test fills the
/// daemon with as many as the kernel's default of 65,530 allows. The daemon needs no more than one
/// mapping for each, and no descriptor, and it refuses further regions before the kernel does.
#[test]
fn regions_of_all_vms_are_limited_and_a_refusal_affects_no_other_vm() {
    let map_count: u64 = std::fs::read_to_string("/proc/sys/vm/max_map_count")
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let max = map_count - OWN_MAPPINGS;
    let hogs = (max.min(65_530 - OWN_MAPPINGS) / SLOTS as u64) as usize;
    let names: Vec<String> = (0..=hogs).map(|number| format!("hog{number}")).collect();
    let mut vms: Vec<(&str, Option<&str>)> = names.iter().map(|n| (n.as_str(), None)).collect();
    vms.push(("neighbour", None));
    let mut daemon = Daemon::with_arguments(&vms, "64MiB", |_| vec!["--no-sandbox".to_string()]);
    let mut neighbour = daemon.driver("neighbour", 1);
    let page = RamRegion {
        start: 1 << 45,
        size_bytes: 4096,
    };
    let page = GuestRam::new(&[page], true).unwrap();
    let region = page.vhost_regions()[0];
    let slim = |name: &str| GuestConfig {
        ram: vec![RamRegion {
            start: 0,
            size_bytes: 2 << 20,
        }],
        request_queues: 1,
        slots: 4,
        mem_slots: true,
        ..guest(name)
    };
    let pid = daemon.pid() as i32;
    let mut drivers = Vec::new();
    for name in &names[..hogs] {
        let mut driver = daemon.driver_with(slim(name), DriverConfig::default());
        if drivers.is_empty() {
            let before = taken_by(pid);
            fill(&mut driver, &region).unwrap();
            let after = taken_by(pid);
            let mappings = after.mappings - before.mappings;
            assert!(
                (SLOTS / 2..SLOTS).contains(&mappings),
                "{} regions needed {mappings} mappings",
                SLOTS - 1
            );
            // The daemon keeps one descriptor of the file that contains all new regions.
            assert_eq!(
                after.descriptors,
                before.descriptors + 1,
                "regions keep descriptors open"
            );
        } else {
            fill(&mut driver, &region).unwrap();
        }
        drivers.push(driver);
    }
    let (used, most) = regions(&daemon);
    assert_eq!(most, max, "the daemon does not report the host's limit");
    assert_eq!(used, (hogs * SLOTS) as u64 + 2, "regions are not counted");
    let taken = taken_by(pid);
    println!("{used} regions of {hogs} VMs: the daemon has {taken:?}");
    assert!(
        (taken.mappings as u64) < used + OWN_MAPPINGS / 4,
        "the daemon needs more mappings of its own than expected: {taken:?}"
    );
    let last = &names[hogs];
    let mut late = daemon.driver_with(slim(last), DriverConfig::default());
    let filled = fill(&mut late, &region);
    if max == 65_530 - OWN_MAPPINGS {
        filled.expect_err("more regions than the maximum were accepted");
        let log = std::fs::read_to_string(daemon.path("log")).unwrap();
        let refused = format!(
            "VM {last}: memory region at guest address {:#x}: all VMs together have {max} memory \
             regions, and the daemon can map {max}",
            (max - used) << 32,
        );
        assert!(
            log.contains(&refused),
            "{refused:?} is not in the log: {log}"
        );
        assert!(log.contains("Raise vm.max_map_count (sysctl)"), "{log}");
    }
    work(&mut neighbour, 100);
    // A VM that disconnects makes room for the others.
    late.guest.disconnect();
    drivers.truncate(hogs - 2);
    until("the regions of three VMs are unmapped", || {
        regions(&daemon).0 == ((hogs - 2) * SLOTS) as u64 + 2
    });
    daemon.connect(&mut late, last);
    fill(&mut late, &region).unwrap();
    work(&mut late, 50);
    work(&mut neighbour, 50);
}
