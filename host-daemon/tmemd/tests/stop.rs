// SPDX-License-Identifier: Apache-2.0 OR MIT
//! A stopped daemon releases threads, descriptors, mappings, memory and files.
//!
//! This is one test in a process of its own, because it counts the resources of the whole process.

mod common;

use common::{Taken, taken_by, until};
use rustix::thread::disable_transparent_huge_pages;
use std::fs;
use tmem_sim::{Driver, DriverConfig};
use tmemd::{Config, Daemon};

/// Memory that allocators keep for later, in bytes.
const MEMORY_LEFT_BYTES: usize = 4 << 20;
const MAPPINGS_LEFT: usize = 16;

/// Runs a daemon from start to stop, with VMs that are connected at the stop.
fn live(round: u64) {
    let folder = tempfile::tempdir().expect("folder");
    let config = Config::for_test(folder.path(), &["a", "b"]);
    let daemon = Daemon::start(config.clone()).expect("starts");
    let mut drivers = Vec::new();
    for vm in &config.vms {
        let driver = DriverConfig {
            seed: round,
            ..DriverConfig::default()
        };
        let mut driver = Driver::new(common::guest(&vm.name), driver).expect("memory");
        driver.guest.connect(&vm.socket).expect("connects");
        driver.guest.start().expect("started");
        driver.new_generation().expect("told");
        driver.settle().expect("served");
        driver.create_pool().expect("served");
        common::work(&mut driver, 200);
        drivers.push(driver);
    }
    let _client = tmem_control::connect(&config.control).expect("connects");
    daemon.stop();
    let left: Vec<_> = fs::read_dir(folder.path())
        .expect("there")
        .map(|file| file.expect("there").file_name())
        .collect();
    assert!(left.is_empty(), "files: {left:?}");
}

#[test]
fn a_clean_stop_releases_all_resources() {
    let own = std::process::id() as i32;
    // With huge pages the kernel would decide in steps of 2 MiB how much remains.
    disable_transparent_huge_pages(true).expect("3.15 or later");
    // The first run leaves what a process creates once.
    live(0);
    let settled = |before: Option<&Taken>| {
        let mut now = taken_by(own);
        if let Some(before) = before {
            until("threads have ended", || {
                now = taken_by(own);
                now.threads <= before.threads
            });
        }
        now
    };
    let before = settled(None);
    for round in 1..5 {
        live(round);
    }
    let after = settled(Some(&before));
    println!("{before:?}, {after:?}");
    assert_eq!(after.descriptors, before.descriptors);
    assert!(
        after.mappings <= before.mappings + MAPPINGS_LEFT,
        "{after:?}"
    );
    assert!(
        after.memory_bytes <= before.memory_bytes + MEMORY_LEFT_BYTES,
        "{after:?}"
    );
}
