// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Test of a daemon's stop, which must release its threads, descriptors, mappings, memory and
//! files.
//!
//! The file has only one test, because the test counts the resources of its whole process.

mod common;

use common::{Taken, taken_by, until};
use rustix::thread::disable_transparent_huge_pages;
use std::fs;
use tmem_model::{Driver, DriverConfig};
use tmemd::{Config, Daemon};

/// Maximum number of bytes that the allocator may keep after the daemon has stopped.
const MEMORY_LEFT_BYTES: usize = 4 << 20;
const MAPPINGS_LEFT: usize = 16;

/// Starts a daemon, connects two VMs, and stops the daemon while the VMs are connected.
fn live(round: u64) {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let config = Config::for_test(directory.path(), &["a", "b"]);
    let daemon = Daemon::start(config.clone()).expect("cannot start the daemon");
    let mut drivers = Vec::new();
    for vm in &config.vms {
        let driver = DriverConfig {
            seed: round,
            ..DriverConfig::default()
        };
        let mut driver = Driver::new(crate::common::guest(&vm.name), driver)
            .expect("cannot create the simulated guest");
        driver
            .connect(&vm.socket)
            .expect("cannot connect to the VM's socket");
        crate::common::work(&mut driver, 200);
        drivers.push(driver);
    }
    let _client =
        tmem_control::connect(&config.control).expect("cannot connect to the control socket");
    daemon.stop();
    let left: Vec<_> = fs::read_dir(directory.path())
        .expect("cannot list the directory")
        .map(|file| file.expect("cannot read a directory entry").file_name())
        .collect();
    assert!(left.is_empty(), "the stopped daemon left files: {left:?}");
}

#[test]
fn a_clean_stop_releases_all_resources() {
    let own = std::process::id() as i32;
    // The test disables transparent huge pages. With them, the remaining memory would depend on the
    // kernel's decisions in units of 2 MiB.
    disable_transparent_huge_pages(true)
        .expect("the kernel cannot disable huge pages for a process (Linux 3.15)");
    // In the first run, the process creates resources that it creates only once, such as the SIGBUS
    // handler. So the test counts the resources after this run.
    live(0);
    let wait_settled = |before: Option<&Taken>| {
        let mut now = taken_by(own);
        if let Some(before) = before {
            until("the daemon's threads have ended", || {
                now = taken_by(own);
                now.threads <= before.threads
            });
        }
        now
    };
    let before = wait_settled(None);
    for round in 1..5 {
        live(round);
    }
    let after = wait_settled(Some(&before));
    println!(
        "the process's resources before the daemon's start: {before:?}, after its stop: {after:?}"
    );
    assert_eq!(after.descriptors, before.descriptors);
    assert!(
        after.mappings <= before.mappings + MAPPINGS_LEFT,
        "the stopped daemon left mappings: {before:?} became {after:?}"
    );
    assert!(
        after.memory_bytes <= before.memory_bytes + MEMORY_LEFT_BYTES,
        "the stopped daemon left memory: {before:?} became {after:?}"
    );
}
