// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests with several random guests at the same time, while QEMU pauses, resets and reconnects the
//! VMs. The model of each guest detects a wrong byte, a page of another guest, and a page of an
//! older generation.

use crate::common::{Daemon, every_queue_answers, guest, seed, work};
use tmem_control::VarlinkClientInterface;
use tmem_model::frontend::{F_EVENT_IDX, F_INDIRECT_DESC, F_RETAIN};
use tmem_model::{Cut, Driver, DriverConfig, GuestConfig, RamRegion};

/// Performs a random action: pauses the VM, resets it, reconnects it, sends its memory table again,
/// creates another pool, or gets all pages.
fn event(daemon: &mut Daemon, driver: &mut Driver, rng: &mut fastrand::Rng) {
    match rng.u8(..6) {
        0 => {
            // The VM is paused while requests are in flight, and then continues. Its pages stay in
            // the pool.
            driver.guest.stop().unwrap();
            driver.collect().unwrap();
            driver.guest.start().unwrap();
            let before = driver.model.generation();
            driver.new_generation().unwrap();
            assert_eq!(
                driver.model.generation(),
                before,
                "the generation changed at a pause of the VM, which must keep it"
            );
        }
        1 => driver.reboot().unwrap(),
        2 => {
            driver.hang_up().unwrap();
            let name = driver.guest.name().to_string();
            daemon.connect(driver, &name);
        }
        3 => driver.guest.set_mem_table().unwrap(),
        4 => driver.create_pool().unwrap(),
        _ => {
            driver.get_all().unwrap();
        }
    }
}

/// Indexes, in the list of guests, of those that use retained pages (pages that a get leaves in the
/// pool). The other guests of their trust domains do not use retained pages.
const RETAINING: [usize; 2] = [1, 2];

/// Runs four guests with random requests. Returns the driver of each guest, with the number of its
/// pages that the daemon refused or missed because of a drain. The number is from the daemon's
/// statistics.
fn crowd(seed: u64, pool_size: &str, steps: usize) -> Vec<(Driver, u64)> {
    let vms = [
        ("a", Some("team")),
        ("b", Some("team")),
        ("c", None),
        ("d", None),
    ];
    let mut daemon = Daemon::with_pool(&vms, pool_size);
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut drivers: Vec<Driver> = vms
        .iter()
        .enumerate()
        .map(|(i, (name, _))| {
            let cut = match i {
                0 => Cut::Natural,
                1 => Cut::Whole,
                _ => Cut::Random {
                    seed: rng.u64(..),
                    max: 40,
                },
            };
            let mut config = GuestConfig {
                cut,
                mem_slots: i == 1,
                acknowledged: i != 0,
                ..guest(name)
            };
            if i == 2 {
                config.features &= !(F_INDIRECT_DESC | F_EVENT_IDX);
            }
            if RETAINING.contains(&i) {
                config.features |= F_RETAIN;
            }
            let seed = rng.u64(1..1 << 20);
            daemon.driver_with(
                config,
                DriverConfig {
                    seed,
                    ..DriverConfig::default()
                },
            )
        })
        .collect();
    for _ in 0..steps {
        let driver = &mut drivers[rng.usize(..vms.len())];
        if rng.u16(..400) == 0 {
            event(&mut daemon, driver, &mut rng);
        } else {
            driver.step().unwrap();
        }
    }
    for driver in &mut drivers {
        driver.settle().unwrap();
        driver.get_all().unwrap();
        every_queue_answers(driver);
    }
    daemon.expect_alive();
    let mut client = tmem_control::connect(&daemon.path("control")).unwrap();
    let stats = client.get_stats(None).call().unwrap();
    let cut = |driver: &Driver| {
        let name = driver.guest.name();
        let vm = stats.vms.iter().find(|vm| vm.name == name).unwrap();
        vm.drain_cut_pages as u64
    };
    drivers
        .into_iter()
        .map(|driver| {
            let cut = cut(&driver);
            (driver, cut)
        })
        .collect()
}

/// Four guests send thousands of requests to a pool that has space for all of their pages.
#[test]
fn guests_with_random_requests_read_their_own_pages_in_a_large_pool() {
    let drivers = crowd(
        seed("guests_with_random_requests_read_their_own_pages_in_a_large_pool"),
        "512MiB",
        8_000,
    );
    for (driver, cut) in drivers {
        let counts = driver.model.counts();
        println!(
            "{}: {} requests, {cut} pages refused or missed because of drains, {counts:?}",
            driver.guest.name(),
            driver.requests()
        );
        // The test requires hits, because a cache that always misses would never be wrong. Some
        // pages may be lost: a flush may overtake a put on another queue, or a drain may exceed its
        // time limit on a busy machine. The daemon counts the pages that drains refuse or miss.
        assert!(
            counts.hits > 300,
            "the guest had too few hits for this test: {counts:?}"
        );
        let retains = driver.guest.accepted_features() & F_RETAIN != 0;
        assert_eq!(
            retains,
            counts.retained > 100 && counts.refs_held > 20,
            "the device retained too few pages, or pages for a driver without the retain feature: \
             {counts:?}"
        );
        let lost = counts.lost.saturating_sub(cut);
        assert!(
            lost * 20 < counts.hits,
            "too many pages were lost, not counting {cut} pages refused or missed because of \
             drains: {counts:?}"
        );
    }
}

/// Four guests send requests to a pool that is so small that pages are evicted all the time.
#[test]
fn guests_with_random_requests_read_their_own_pages_in_a_small_pool() {
    let drivers = crowd(
        seed("guests_with_random_requests_read_their_own_pages_in_a_small_pool"),
        "2MiB",
        5_000,
    );
    let lost: u64 = drivers
        .iter()
        .map(|(d, _)| d.model.counts().lost + d.model.counts().refused)
        .sum();
    let hits: u64 = drivers.iter().map(|(d, _)| d.model.counts().hits).sum();
    assert!(
        lost > 0,
        "the pool lost and refused no page, so it was not full"
    );
    assert!(hits > 0);
}

/// The guest sends full batches through rings of the largest, the smallest and other sizes.
#[test]
fn batches_and_rings_of_every_size_are_answered_correctly() {
    let seed = seed("batches_and_rings_of_every_size_are_answered_correctly");
    let mut daemon = Daemon::start(&[("a", None)]);
    for (queue_size, request_queues, features_off) in [
        (1024, 1, F_EVENT_IDX),
        (256, 4, 0),
        (8, 3, 0),
        (128, 1, F_INDIRECT_DESC),
    ] {
        let mut config = GuestConfig {
            queue_size,
            request_queues,
            ram: vec![RamRegion {
                start: 0,
                size_bytes: 16 << 20,
            }],
            ..guest("a")
        };
        config.features &= !features_off;
        let work_config = DriverConfig {
            seed,
            batch_max: 64,
            ..DriverConfig::default()
        };
        let mut driver = daemon.driver_with(config, work_config);
        work(&mut driver, 400);
        driver.get_all().unwrap();
        assert!(driver.model.counts().hits > 0);
        driver.hang_up().unwrap();
    }
}
