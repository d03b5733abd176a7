// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Tests of a VM that loses a page of its memory: the daemon disconnects this VM, and other VMs are
//! not affected.
//!
//! Other tests truncate files on tmpfs. Some tests run the daemon in the process of the test and remove a page from its mapping, which
//! needs no privilege. Another test punches a hole into huge pages when the host has no free huge
//! pages. That test needs root and unused huge pages. Without them, it is skipped and prints the
//! reason.

use crate::common::{Daemon, guest, seed, until, work};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{
    FallocateFlags, FlockOperation, MemfdFlags, fallocate, flock, ftruncate, memfd_create,
};
use rustix::mm::{MapFlags, ProtFlags};
use std::fs::{self, File};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use tmem_model::{
    Driver, DriverConfig, GuestConfig, Key, Missing, PutPage, RamRegion, Request, TestDaemon,
    skipped,
};
use vhost::VhostBackend;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

const HUGE_BYTES: u64 = 2 << 20;
const NR_HUGEPAGES: &str = "/proc/sys/vm/nr_hugepages";

/// Returns the start and the end of each mapping in this process that maps the file that is mapped
/// at `address`.
fn mappings_like(address: u64) -> Vec<(u64, u64)> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let parse = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (start, end) = fields[0].split_once('-').unwrap();
        let number = |text| u64::from_str_radix(text, 16).unwrap();
        (number(start), number(end), fields[3..5].join(" "))
    };
    let all: Vec<(u64, u64, String)> = maps.lines().map(parse).collect();
    let own = all.iter().find(|m| m.0 <= address && address < m.1);
    let file = &own.expect("the daemon has not mapped the file").2;
    let same = all.iter().filter(|m| m.2 == *file);
    same.map(|m| (m.0, m.1)).collect()
}

/// Removes pages from a mapping: an empty file is mapped in their place.
fn take_away(start: u64, bytes: u64) {
    let empty = memfd_create("gone", MemfdFlags::CLOEXEC).unwrap();
    let at = std::ptr::with_exposed_provenance_mut(start as usize);
    let flags = MapFlags::SHARED | MapFlags::FIXED;
    let prot = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the call replaces pages of the daemon's mapping of guest memory, which the daemon
    // accesses as memory that may change at any time.
    unsafe { rustix::mm::mmap(at, bytes as usize, prot, flags, &empty, 0) }.unwrap();
}

fn connect(driver: &mut Driver, socket: &Path) {
    until("the VM's socket is free", || {
        driver.guest.connect(socket).is_ok()
    });
    driver.start().unwrap();
}

/// Returns the configuration of a guest whose rings are in the first memory region, and nearly all
/// of whose buffers are in the second.
fn two_regions(name: &str) -> GuestConfig {
    let mut config = guest(name);
    config.ram[0].size_bytes = 512 << 10;
    config
}

/// Guard that sets a flag when it is dropped, even if the test panics. Another thread of the test
/// ends when the flag is set.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Removes all pages of a region from the daemon's mappings of guest memory. The daemon runs in the
/// process of the test.
fn take_away_region(driver: &Driver, region: RamRegion) {
    let own = driver.guest.ram().host_addr(region.start);
    let mappings = mappings_like(own);
    let theirs: Vec<_> = mappings.iter().filter(|m| m.0 != own).collect();
    assert!(!theirs.is_empty(), "the daemon has not mapped the memory");
    for (start, end) in theirs {
        take_away(*start, end - start);
    }
}

#[test]
fn only_the_vm_whose_guest_memory_disappears_is_disconnected() {
    let seed = seed("only_the_vm_whose_guest_memory_disappears_is_disconnected");
    let mut daemon = TestDaemon::start(&["a", "b"]);
    let directory = daemon.folder().to_path_buf();
    let socket = |name: &str| directory.join(format!("{name}.sock"));
    let driver = |name: &str, seed| {
        let config = DriverConfig {
            seed,
            ..DriverConfig::default()
        };
        let mut driver = Driver::new(two_regions(name), config).unwrap();
        connect(&mut driver, &socket(name));
        driver
    };
    let mut neighbour = driver("b", seed + 1);
    let before = neighbour.guest.generation();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let neighbour = &mut neighbour;
        let works = scope.spawn(|| {
            while !stop.load(Ordering::SeqCst) {
                work(neighbour, 20);
            }
            assert!(
                neighbour.guest.read_config().is_ok(),
                "a VM that lost no page was disconnected"
            );
        });
        let end = End(&stop);
        let mut driver = driver("a", seed);
        for region in [0, 1, 0] {
            work(&mut driver, 50);
            take_away_region(&driver, two_regions("a").ram[region]);
            // The guest sends requests until the daemon has accessed the removed pages of the
            // region.
            until(&format!("region {region}: the VM is disconnected"), || {
                for object in 1..4 {
                    driver.put(object, 0, 64);
                }
                driver.guest.read_config().is_err()
            });
            driver.lose_backend().unwrap();
            connect(&mut driver, &socket("a"));
        }
        work(&mut driver, 100);
        drop(end);
        works.join().unwrap();
    });
    assert_eq!(neighbour.guest.generation(), before);
    daemon.stop();
}

/// The control thread reads a ring when the VMM starts that ring. It may thus be the first thread
/// that accesses a page that is lost.
#[test]
fn a_lost_page_that_the_control_thread_reads_ends_the_connection() {
    let mut daemon = TestDaemon::start(&["a"]);
    let mut driver = Driver::new(two_regions("a"), DriverConfig::default()).unwrap();
    connect(&mut driver, &daemon.path("a.sock"));
    work(&mut driver, 50);
    driver.guest.stop().unwrap();
    take_away_region(&driver, two_regions("a").ram[0]);
    let kick = EventFd::new(EFD_NONBLOCK).unwrap();
    // The daemon may end the connection before it answers this message, so an error is ignored.
    let _ = driver.guest.frontend().unwrap().set_vring_kick(1, &kick);
    until("the VM is disconnected", || {
        driver.guest.read_config().is_err()
    });
    driver.lose_backend().unwrap();
    connect(&mut driver, &daemon.path("a.sock"));
    work(&mut driver, 50);
    daemon.stop();
}

/// Returns true if the daemon has closed the VM's connection.
fn has_ended(driver: &mut Driver) -> bool {
    let frontend = driver.guest.frontend().unwrap();
    // SAFETY: the front end keeps the socket open as long as the descriptor is borrowed.
    let socket = unsafe { BorrowedFd::borrow_raw(frontend.as_raw_fd()) };
    let mut fds = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
    let no_wait = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut fds, Some(&no_wait)).unwrap() > 0
}

/// A temporary change of the host's number of huge pages. Dropping this value restores the earlier
/// number. A lock makes tests that change the number run one after the other.
struct HugePages {
    before: u64,
    _turn: File,
}

impl HugePages {
    fn set(count: u64) -> Result<(), String> {
        let written = fs::write(NR_HUGEPAGES, count.to_string());
        written.map_err(|error| format!("{NR_HUGEPAGES}: {error}"))?;
        match Self::count() {
            Some(got) if got >= count => Ok(()),
            got => Err(format!(
                "{count} huge pages were requested, but the host has {got:?}"
            )),
        }
    }

    fn count() -> Option<u64> {
        let text = fs::read_to_string(NR_HUGEPAGES).ok()?;
        text.trim().parse().ok()
    }

    /// Increases the host's number of huge pages by `count`.
    fn more(count: u64) -> Result<HugePages, String> {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let size = format!("Hugepagesize: {:>10} kB", HUGE_BYTES >> 10);
        if !meminfo.lines().any(|line| line.starts_with(&size)) {
            return Err("the host's huge pages are not of 2 MiB".into());
        }
        let turn = File::open(NR_HUGEPAGES).map_err(|_| "the kernel has no huge pages")?;
        flock(&turn, FlockOperation::LockExclusive).map_err(|error| error.to_string())?;
        let before = Self::count().ok_or("the kernel has no huge pages")?;
        let kept = HugePages {
            before,
            _turn: turn,
        };
        Self::set(before + count)?;
        Ok(kept)
    }

    /// Removes all free huge pages from the host, so that no process can get one.
    fn take_free(&self) {
        let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
        let field = |name: &str| {
            let line = meminfo.lines().find(|line| line.starts_with(name)).unwrap();
            let number = line.split_whitespace().nth(1).unwrap();
            number.parse::<u64>().unwrap()
        };
        let reserved = field("HugePages_Rsvd:");
        let used = field("HugePages_Total:") - field("HugePages_Free:") + reserved;
        Self::set(used).unwrap();
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(NR_HUGEPAGES, self.before.to_string());
    }
}

#[test]
fn a_hole_in_huge_pages_ends_only_the_connection_of_its_vm() {
    // The guest's two memory regions have 4 huge pages. The other 2 remain free.
    let kept = match HugePages::more(6) {
        Ok(kept) => kept,
        Err(why) => return skipped(Missing::HugePages, why),
    };
    if kept.before > 0 {
        let why = "the host uses huge pages itself, which this test would take away";
        return skipped(Missing::HugePages, why);
    }
    let mut daemon = Daemon::start(&[("a", None), ("b", None)]);
    let mut neighbour = daemon.driver("b", 1);
    let region = |start, pages| RamRegion {
        start,
        size_bytes: pages * HUGE_BYTES,
    };
    let config = GuestConfig {
        huge: true,
        ram: vec![region(0, 1), region(1 << 32, 3)],
        request_queues: 1,
        ..guest("a")
    };
    let mut driver = daemon.driver_with(config, DriverConfig::default());
    work(&mut driver, 200);
    let (pool, generation) = (driver.pool(), driver.guest.generation());
    // The rings and some of these requests are in the first memory region. The other requests are
    // in the second region, in which the test punches a hole.
    for number in 0..20 {
        let put = Request::Put {
            pool,
            pages: vec![PutPage {
                object: 50,
                index: number,
                cookie: 1 + number,
                flags: 0,
                page: Box::new([number as u8; 4096]),
            }],
        };
        driver
            .guest
            .add(1, put, generation)
            .expect("the queue has no room for the request");
    }
    let files = driver.guest.ram().shared_regions().unwrap();
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&files[1].2, flags, 0, files[1].0.size_bytes).unwrap();
    kept.take_free();
    driver.guest.publish(1);
    // While the test waits, it sends no message, because the control thread would check the memory
    // when it receives one.
    daemon.until("the VM is disconnected", || has_ended(&mut driver));
    let answered = driver.guest.ring(1).used_idx_in_memory();
    let asked = driver.guest.ring(1).avail_idx_in_memory();
    let left = asked.wrapping_sub(answered);
    // The first request in the second memory region, and all requests after it, are never answered.
    assert!(
        (1..=20).contains(&left),
        "{left} of 20 requests were not answered, expected 1 to 20"
    );
    // Other VMs are not affected. The daemon serves the disconnected VM again after it connects
    // with new memory.
    work(&mut neighbour, 200);
    drop((driver, files));
    let mut driver = daemon.driver("a", 2);
    work(&mut driver, 200);
    let key = Key {
        pool: driver.pool(),
        object: 50,
        index: 0,
    };
    assert!(!driver.index().contains_key(&key));
    daemon.expect_alive();
}

/// A VMM truncates files of its guest's memory on tmpfs while the workers copy pages from and to
/// that memory.
#[test]
fn a_truncated_file_ends_only_the_connection_of_its_vm() {
    const ROUNDS: u64 = 24;
    let mut daemon = Daemon::start(&[("a", None), ("b", None)]);
    let mut neighbour = daemon.driver("b", 1);
    let mut ended = 0;
    for round in 0..ROUNDS {
        let config = GuestConfig {
            directory: Some("/dev/shm".into()),
            ..two_regions("a")
        };
        let mut driver = daemon.driver_with(config, DriverConfig::default());
        work(&mut driver, 20);
        let (pool, generation) = (driver.pool(), driver.guest.generation());
        let page = |index| PutPage {
            object: 50,
            index,
            cookie: 1 + index,
            flags: 0,
            page: Box::new([index as u8; 4096]),
        };
        let indexes = |number: u64| number * 64..(number + 1) * 64;
        for number in 0..10 {
            let put = Request::Put {
                pool,
                pages: indexes(number).map(page).collect(),
            };
            let get = Request::Get {
                pool,
                object: 50,
                index: number * 64,
                cookies: indexes(number).map(|index| 1 + index).collect(),
                retain: 0,
            };
            for request in [put, get] {
                let added = driver.guest.add(1, request, generation);
                added.expect("the queue has no room for the request");
            }
        }
        let files = driver.guest.ram().shared_regions().unwrap();
        driver.guest.publish(1);
        // The daemon has answered none of the requests, some of them, or all of them.
        std::thread::sleep(std::time::Duration::from_micros(round * 100));
        ftruncate(&files[1].2, 0).unwrap();
        let answered = |driver: &Driver| {
            let ring = driver.guest.ring(1);
            ring.used_idx_in_memory() == ring.avail_idx_in_memory()
        };
        daemon.until(
            "the VM is disconnected, or all requests are answered",
            || has_ended(&mut driver) || answered(&driver),
        );
        ended += u64::from(has_ended(&mut driver));
        work(&mut neighbour, 20);
    }
    assert!(ended > 0, "the daemon read no page of a truncated file");
    let mut driver = daemon.driver("a", 2);
    work(&mut driver, 200);
    daemon.expect_alive();
}

/// The rings of a queue are in a file that the VMM truncates while the queue is stopped.
#[test]
fn a_truncated_file_with_rings_ends_only_the_connection_of_its_vm() {
    let mut daemon = Daemon::start(&[("a", None), ("b", None)]);
    let mut neighbour = daemon.driver("b", 1);
    let config = GuestConfig {
        directory: Some("/dev/shm".into()),
        ..two_regions("a")
    };
    let mut driver = daemon.driver_with(config, DriverConfig::default());
    work(&mut driver, 50);
    driver.guest.stop().unwrap();
    let files = driver.guest.ram().shared_regions().unwrap();
    ftruncate(&files[0].2, 0).unwrap();
    let kick = EventFd::new(EFD_NONBLOCK).unwrap();
    // The daemon may end the connection before it answers this message, so an error is ignored.
    let _ = driver.guest.frontend().unwrap().set_vring_kick(1, &kick);
    daemon.until("the VM is disconnected", || has_ended(&mut driver));
    work(&mut neighbour, 50);
    let mut driver = daemon.driver("a", 2);
    work(&mut driver, 50);
    daemon.expect_alive();
}
