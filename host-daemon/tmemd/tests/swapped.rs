// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Test that a VM whose memory the host has swapped out does not delay the VMs of the same worker.
//!
//! The daemon runs in the test's process. The test takes the pages of the VM's memory from the
//! daemon's mapping, and a userfaultfd makes each access to such a page wait, as for a disk. The
//! bytes of the pages never change.

use crate::common::guest;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{Advice, UserfaultfdFlags, madvise, userfaultfd};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use tmem_model::{Driver, DriverConfig, Missing, skipped};
use tmemd::{Config, Daemon};

/// Time for which each access to a page that is not in the daemon's mapping waits.
const FAULT: Duration = Duration::from_millis(10);
/// Pages of each request of the slow VM.
const PAGES: u64 = 16;
/// Number of puts of the slow VM, which sends as many gets.
const ROUNDS: u64 = 12;
/// Time from which a request of the other VM counts as delayed: a few faults.
const DELAYED: Duration = Duration::from_millis(40);

/// Requests of ioctl_userfaultfd(2), and their flags.
const UFFDIO_API: u64 = 0xc018_aa3f;
const UFFDIO_REGISTER: u64 = 0xc020_aa00;
const UFFDIO_ZEROPAGE: u64 = 0xc020_aa04;
const UFFDIO_CONTINUE: u64 = 0xc020_aa07;
const UFFD_API: u64 = 0xaa;
const FEATURE_MISSING_SHMEM: u64 = 1 << 5;
const FEATURE_MINOR_SHMEM: u64 = 1 << 10;
const MODE_MISSING: u64 = 1;
const MODE_MINOR: u64 = 1 << 2;
const FLAG_MINOR: u64 = 1 << 2;
const PAGE_BYTES: u64 = 4096;

fn ioctl<const WORDS: usize>(
    fd: &OwnedFd,
    request: u64,
    mut words: [u64; WORDS],
) -> io::Result<()> {
    // SAFETY: the structures of these requests consist of WORDS u64, which the kernel may write.
    match unsafe { libc::ioctl(fd.as_raw_fd(), request, words.as_mut_ptr()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Memory of a guest as the daemon maps it. Each first access to a page of it waits.
struct SlowMemory {
    fd: OwnedFd,
    start: u64,
    bytes: u64,
    faults: AtomicU64,
}

impl SlowMemory {
    /// Finds the daemon's mapping of the guest's memory, and makes its faults slow.
    fn new(driver: &Driver) -> io::Result<SlowMemory> {
        // SAFETY: the descriptor has no effect before a mapping is registered.
        let fd = unsafe { userfaultfd(UserfaultfdFlags::CLOEXEC | UserfaultfdFlags::NONBLOCK) }?;
        let features = FEATURE_MISSING_SHMEM | FEATURE_MINOR_SHMEM;
        ioctl(&fd, UFFDIO_API, [UFFD_API, features, 0])?;
        let regions = driver.guest.ram().shared_regions()?;
        let (region, guest_address, file) = &regions[0];
        let inode = file.metadata()?.ino().to_string();
        let maps = std::fs::read_to_string("/proc/self/maps")?;
        let mut ranges = maps.lines().filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (start, end) = fields[0].split_once('-')?;
            let address = |text| u64::from_str_radix(text, 16).ok();
            let (start, end) = (address(start)?, address(end)?);
            (fields[4] == inode && start != *guest_address).then_some((start, end - start))
        });
        let (start, bytes) = ranges.next().expect("the daemon does not map the memory");
        assert_eq!(
            bytes, region.size_bytes,
            "the daemon maps the memory in parts"
        );
        ioctl(
            &fd,
            UFFDIO_REGISTER,
            [start, bytes, MODE_MISSING | MODE_MINOR, 0],
        )?;
        let faults = AtomicU64::new(0);
        Ok(SlowMemory {
            fd,
            start,
            bytes,
            faults,
        })
    }

    /// Takes all pages from the daemon's mapping.
    fn swap_out(&self) {
        let start = self.start as *mut std::ffi::c_void;
        // SAFETY: the mapping is shared memory of a file, so its bytes do not change.
        unsafe { madvise(start, self.bytes as usize, Advice::LinuxDontNeed) }
            .expect("cannot take the pages from the daemon's mapping");
    }

    /// Ends the waits of the daemon's threads, each after [`FAULT`], until `busy` is false.
    fn swap_in(&self, busy: &AtomicBool) {
        while busy.load(Ordering::SeqCst) {
            let mut polled = [PollFd::new(&self.fd, PollFlags::IN)];
            let period = Timespec {
                tv_sec: 0,
                tv_nsec: 10_000_000,
            };
            poll(&mut polled, Some(&period)).expect("cannot poll the userfaultfd");
            let mut event = [0u8; 32];
            if rustix::io::read(&self.fd, &mut event) != Ok(event.len()) {
                continue;
            }
            thread::sleep(FAULT);
            let word = |at: usize| u64::from_ne_bytes(event[at..at + 8].try_into().unwrap());
            let request = match word(8) & FLAG_MINOR {
                0 => UFFDIO_ZEROPAGE,
                _ => UFFDIO_CONTINUE,
            };
            let page = word(16) & !(PAGE_BYTES - 1);
            match ioctl(&self.fd, request, [page, PAGE_BYTES, 0, 0]) {
                // Another thread has caused the same fault.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                done => done.expect("cannot end the wait for a page"),
            }
            self.faults.fetch_add(1, Ordering::SeqCst);
        }
    }
}

fn connect(config: &Config, vm: usize) -> Driver {
    let vm = &config.vms[vm];
    let mut driver = Driver::new(guest(&vm.name), DriverConfig::default()).unwrap();
    driver.connect(&vm.socket).unwrap();
    driver
}

/// The other VM's requests wait for one or two slices of the slow VM, until the daemon has detected
/// the faults, but not for each of its slices.
#[test]
fn a_vm_with_swapped_memory_delays_no_other_vm() {
    let directory = tempfile::tempdir().expect("cannot create a temporary directory");
    let config = Config {
        workers: 1,
        ..Config::for_test(directory.path(), &["slow", "fast"])
    };
    let daemon = Daemon::start(config.clone()).expect("cannot start the daemon");
    let mut slow = connect(&config, 0);
    let mut fast = connect(&config, 1);
    let memory = match SlowMemory::new(&slow) {
        Ok(memory) => memory,
        Err(error) => return skipped(Missing::Userfaultfd, error),
    };
    let busy = AtomicBool::new(true);
    let (mut delays, mut requests) = (Vec::new(), 0);
    thread::scope(|scope| {
        scope.spawn(|| memory.swap_in(&busy));
        let slow = scope.spawn(|| {
            for round in 0..ROUNDS {
                memory.swap_out();
                assert!(slow.put(round + 1, 0, PAGES));
                slow.settle().unwrap();
                memory.swap_out();
                assert!(slow.get(round + 1, 0, PAGES));
                slow.settle().unwrap();
            }
        });
        while !slow.is_finished() {
            let begun = Instant::now();
            assert!(fast.put(1, 0, 1));
            fast.settle().unwrap();
            assert!(fast.get(1, 0, 1));
            fast.settle().unwrap();
            requests += 2;
            let took = begun.elapsed();
            if took > DELAYED {
                delays.push(took);
            }
            thread::sleep(Duration::from_millis(1));
        }
        busy.store(false, Ordering::SeqCst);
        slow.join().expect("the slow VM got a wrong answer");
    });
    let faults = memory.faults.load(Ordering::SeqCst);
    println!("{faults} faults, {requests} requests of the other VM, delayed: {delays:?}");
    assert!(
        faults >= ROUNDS * PAGES,
        "the daemon waited for only {faults} pages of the slow VM"
    );
    // Without partners, each request of the slow VM delays one of the other VM. A busy machine also
    // delays some.
    assert!(
        delays.len() as u64 <= ROUNDS / 2,
        "{} requests of the other VM waited for pages of the slow VM: {delays:?}",
        delays.len()
    );
    drop(memory);
    daemon.stop();
}
