// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Conformance tests of the daemon with VMMs that differ from QEMU: they report no device reset, skip
//! requests in flight, share one interrupt, or change the memory map while rings run. docs/vmm.md
//! says which VMM does what. tests/slots.rs has the tests of memory slots.

use crate::common::{Daemon, every_queue_answers, guest, seed, until, work};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tmem_control::VarlinkClientInterface;
use tmem_model::frontend::CONFIG_BYTES;
use tmem_model::{Driver, DriverConfig, GuestConfig, RamRegion, Vmm};
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::VhostUserConfigFlags;

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

/// The driver of another operating system may use fewer queues. The memory of the other rings then
/// has other contents, and their kicks may still arrive.
#[test]
fn fewer_queues_after_an_unreported_reset_are_served() {
    let seed = seed("fewer_queues_after_an_unreported_reset_are_served");
    let mut daemon = Daemon::start(&[("a", None)]);
    let vmm = Vmm {
        silent_resets: true,
        ..Vmm::default()
    };
    let configuration = GuestConfig {
        request_queues: 4,
        ..guest_of(vmm)
    };
    let mut driver = daemon.driver_with(configuration, config(seed));
    work(&mut driver, 100);
    let former: Vec<_> = [3, 4]
        .map(|queue| {
            let ring = driver.guest.ring(queue);
            let kick = driver.guest.kick_fd(queue).try_clone().unwrap();
            (ring.layout(), ring.used_idx_in_memory(), kick)
        })
        .into();
    driver.guest.use_fewer_queues(2);
    driver.reboot().unwrap();
    let ram = driver.guest.ram().clone();
    for (layout, used, kick) in &former {
        // The first chain of these has no answer yet.
        ram.store_u16(layout.avail + 2, used.wrapping_add(3), Ordering::Release);
        kick.write(1).unwrap();
    }
    serves(&mut driver);
    work(&mut driver, 100);
    every_queue_answers(&mut driver);
    for (layout, used, _) in &former {
        let now = ram.load_u16(layout.used + 2, Ordering::Acquire);
        assert_eq!(
            now, *used,
            "the daemon wrote to a ring of the former driver"
        );
    }
}

/// Environment variable with the socket to which the process of the next test connects.
const VICTIM: &str = "TMEM_TEST_VICTIM";

/// Kills the process of a front end, which is this test in a process of its own, at random moments
/// while the daemon executes its requests. The daemon then has the only mapping of guest memory.
#[test]
fn a_front_end_that_is_killed_leaves_no_mapping_and_no_busy_socket() {
    let name = "a_front_end_that_is_killed_leaves_no_mapping_and_no_busy_socket";
    let seed = seed(name);
    if let Some(socket) = std::env::var_os(VICTIM) {
        let mut driver = Driver::new(guest("a"), config(seed)).unwrap();
        until("the VM's socket is free", || {
            driver.guest.connect(Path::new(&socket)).is_ok()
        });
        driver.start().unwrap();
        println!("connected");
        loop {
            work(&mut driver, 100);
        }
    }
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut daemon = Daemon::start(&[("a", None)]);
    let control = daemon.path("control");
    for round in 0..12 {
        let mut victim = Command::new(std::env::current_exe().unwrap())
            .args([&format!("front_ends::{name}"), "--exact", "--nocapture"])
            .env(VICTIM, daemon.socket("a"))
            .env("TMEM_SEED", (seed + round).to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(victim.stdout.take().unwrap()).lines();
        assert!(
            lines.any(|line| line.unwrap().ends_with("connected")),
            "round {round}: the front end could not connect"
        );
        std::thread::sleep(Duration::from_micros(rng.u64(..20_000)));
        victim.kill().unwrap();
        victim.wait().unwrap();
        daemon.until("the daemon releases the guest's memory", || {
            let mut client = tmem_control::connect(&control).unwrap();
            client.get_stats(None).call().unwrap().daemon.memory_regions == 0
        });
    }
    let mut driver = daemon.driver("a", seed);
    serves(&mut driver);
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

/// A VMM may reserve more bytes for the configuration of a device than the device has. An error
/// would stop it: a front end of the vhost crate waits for the payload of such an answer for ever.
#[test]
fn bytes_beyond_the_configuration_are_read_as_zeros() {
    let mut daemon = Daemon::start(&[("a", None)]);
    let mut driver = daemon.driver("a", 1);
    let known = driver.guest.read_config().unwrap();
    let mut read = |offset: u32, size: u32| {
        let front_end = driver.guest.frontend().unwrap();
        let room = vec![0; size as usize];
        let read = front_end.get_config(offset, size, VhostUserConfigFlags::empty(), &room);
        read.unwrap().1
    };
    for size in [33, 256, 4000] {
        let bytes = read(0, size);
        assert_eq!(bytes.len(), size as usize);
        assert_eq!(bytes[..8], known.generation.to_le_bytes());
        assert!(bytes[CONFIG_BYTES..].iter().all(|&byte| byte == 0));
    }
    assert_eq!(read(24, 16), [0; 16]);
    assert_eq!(read(4000, 8), [0; 8]);
    work(&mut driver, 20);
}
