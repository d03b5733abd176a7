// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Benchmark of what a VM loses if the memory of its guest does not consist of transparent huge
//! pages.
//!
//! QEMU asks the kernel for huge pages for all memory of a guest (`MADV_HUGEPAGE`). For private
//! memory, the kernel complies by default. For a memfd, which the daemon needs, `shmem_enabled` is
//! `never` by default. The benchmark maps memory of both kinds as QEMU does. It measures the time
//! to touch each page for the first time, the time of reads at random addresses, and the memory of
//! the page tables. A process measures this, not a VM. With nested paging, a VM needs two
//! translations for each address, so that a miss in the TLB costs a VM more than this process.

use crate::machine::{Machine, touch_memory};
use crate::measure::Samples;
use crate::report::{Results, Target, progress};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use serde_json::json;
use std::ffi::c_void;
use std::fs::{self, File};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use tmem_pool::PAGE_SIZE;

/// Setting of the kernel for huge pages of memfds.
pub const SHMEM_ENABLED: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
/// Number of random reads in a round. With 1 GiB of memory, most reads miss the caches and the TLB.
const READS: usize = 2_000_000;
/// Multiplier and increment of the linear congruential generator of addresses (Knuth, MMIX).
const MULTIPLIER: u64 = 6_364_136_223_846_793_005;
const INCREMENT: u64 = 1_442_695_040_888_963_407;

/// Options of the benchmark.
#[derive(clap::Args)]
pub struct Args {
    /// Size of the memory in MiB.
    #[arg(long, default_value_t = 2048, value_name = "NUMBER")]
    mib: usize,
    /// Number of rounds. Results are medians.
    #[arg(long, default_value_t = 10, value_name = "NUMBER")]
    rounds: usize,
    /// Measure also a file in this directory: that of a tmpfs with huge=advise shows what a memfd
    /// gains from shmem_enabled=advise, without a change of this setting of the host.
    #[arg(long, value_name = "DIR")]
    directory: Option<PathBuf>,
    /// Print the result as JSON on standard output.
    #[arg(long)]
    json: bool,
}

/// Kind of a guest's memory.
enum Kind {
    /// Private anonymous memory, QEMU's default.
    Private,
    /// A memfd with share=on, as the daemon needs it.
    Memfd,
    /// A file in a directory, which is mapped shared.
    File(PathBuf),
}

impl Kind {
    fn name(&self) -> String {
        match self {
            Kind::Private => "private".into(),
            Kind::Memfd => "memfd".into(),
            Kind::File(directory) => format!("file in {}", directory.display()),
        }
    }

    fn file(&self, bytes: usize) -> Result<Option<OwnedFd>, String> {
        let file: OwnedFd = match self {
            Kind::Private => return Ok(None),
            Kind::Memfd => memfd_create("memory", MemfdFlags::CLOEXEC).map_err(text)?,
            Kind::File(directory) => tempfile::tempfile_in(directory).map_err(text)?.into(),
        };
        ftruncate(&file, bytes as u64).map_err(text)?;
        Ok(Some(file))
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Mapped memory of one kind. Dropping the value unmaps and frees the memory.
struct Memory {
    at: NonNull<u8>,
    bytes: usize,
}

impl Memory {
    fn map(kind: &Kind, bytes: usize) -> Result<Memory, String> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let file = kind.file(bytes)?;
        let any = std::ptr::null_mut();
        // SAFETY: the kernel chooses the address, so the mapping replaces no other one.
        let at = unsafe {
            match &file {
                None => mmap_anonymous(any, bytes, access, MapFlags::PRIVATE),
                Some(file) => mmap(any, bytes, access, MapFlags::SHARED, file, 0),
            }
        };
        let at = NonNull::new(at.map_err(text)?.cast()).ok_or("the kernel mapped address 0")?;
        let memory = Memory { at, bytes };
        // SAFETY: the advice concerns this mapping only, and changes no contents.
        unsafe { madvise(memory.start(), bytes, Advice::LinuxHugepage) }.map_err(text)?;
        Ok(memory)
    }

    fn start(&self) -> *mut c_void {
        self.at.as_ptr().cast()
    }

    /// Writes a byte of each page, so that the kernel provides all pages.
    fn touch(&self) {
        for offset in (0..self.bytes).step_by(PAGE_SIZE) {
            // SAFETY: the offset is inside the mapping, which belongs to this value.
            unsafe { self.at.add(offset).write_volatile(0) };
        }
    }

    /// Reads bytes at random addresses. Each address depends on the byte that was read before, so
    /// that the processor cannot overlap the reads.
    fn read(&self, reads: usize) -> u64 {
        let mut state = 1u64;
        for _ in 0..reads {
            state = state.wrapping_mul(MULTIPLIER).wrapping_add(INCREMENT);
            let offset = ((u128::from(state) * self.bytes as u128) >> 64) as usize;
            // SAFETY: the offset is below `bytes`, so it is inside the mapping.
            state += u64::from(unsafe { self.at.add(offset).read_volatile() });
        }
        state
    }

    /// Returns which part of the memory the kernel maps with huge pages.
    fn huge_part(&self) -> Result<f64, String> {
        let maps = fs::read_to_string("/proc/self/smaps").map_err(text)?;
        Ok(huge_kib(
            &maps,
            self.start() as usize..self.start() as usize + self.bytes,
        ) as f64
            / (self.bytes >> 10) as f64)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: no reference to the mapping exists outside of this value. If the call fails, the
        // mapping stays until the process ends.
        unsafe { munmap(self.start(), self.bytes) }.ok();
    }
}

/// Returns how many KiB of the mappings that overlap `range` the kernel maps with huge pages,
/// according to the text of /proc/PID/smaps.
fn huge_kib(smaps: &str, range: std::ops::Range<usize>) -> u64 {
    let address = |text: &str| usize::from_str_radix(text, 16).ok();
    let (mut inside, mut sum) = (false, 0);
    for line in smaps.lines() {
        let mut words = line.split_whitespace();
        let (Some(first), second) = (words.next(), words.next()) else {
            continue;
        };
        if let Some((start, end)) = first.split_once('-')
            && let (Some(start), Some(end)) = (address(start), address(end))
        {
            inside = start < range.end && range.start < end;
        }
        if inside && ["AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"].contains(&first) {
            sum += second.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    sum
}

/// Returns the size of this process's page tables in KiB.
fn page_table_kib() -> Result<i64, String> {
    let status = fs::read_to_string("/proc/self/status").map_err(text)?;
    let mut lines = status.lines();
    let size = lines.find_map(|line| line.strip_prefix("VmPTE:")?.strip_suffix("kB"));
    let size = size.and_then(|size| size.trim().parse().ok());
    size.ok_or_else(|| "/proc/self/status has no VmPTE".into())
}

/// Returns the choice that the kernel marks with brackets in a file of sysfs.
fn chosen(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.into())
}

/// Results of one kind of memory.
#[derive(Default)]
struct Figures {
    touch: Samples,
    read: Samples,
    huge_part: f64,
    page_table_kib: i64,
}

/// Runs the benchmark and prints the results.
///
/// # Errors
/// The host lacks memory, or the directory is not usable.
pub fn run(args: &Args) -> Result<(), String> {
    let mut kinds = vec![Kind::Private, Kind::Memfd];
    if let Some(directory) = &args.directory {
        File::open(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        kinds.push(Kind::File(directory.clone()));
    }
    let bytes = args.mib << 20;
    let pages = bytes / PAGE_SIZE;
    touch_memory();
    let mut all: Vec<Figures> = kinds.iter().map(|_| Figures::default()).collect();
    for round in 0..args.rounds {
        progress(&format!("round {} of {}", round + 1, args.rounds));
        for (kind, figures) in kinds.iter().zip(&mut all) {
            let before = page_table_kib()?;
            let memory = Memory::map(kind, bytes)?;
            figures.touch.time(pages, || memory.touch());
            figures.page_table_kib = page_table_kib()? - before;
            figures.huge_part = memory.huge_part()?;
            std::hint::black_box(figures.read.time(READS, || memory.read(READS)));
        }
    }
    let setting = chosen(Path::new(SHMEM_ENABLED)).unwrap_or_else(|| "unknown".into());
    let mut results = Results::default();
    for (figures, [touch, read]) in all[1..].iter().zip([
        ["touch_memfd_vs_private", "read_memfd_vs_private"],
        ["touch_file_vs_private", "read_file_vs_private"],
    ]) {
        let private = &all[0];
        results.add(
            touch,
            Target::None,
            Ok(figures.touch.ratio_to(&private.touch)),
        );
        results.add(read, Target::None, Ok(figures.read.ratio_to(&private.read)));
    }
    let figures = kinds.iter().zip(&all).map(|(kind, figures)| {
        json!({
            "memory": kind.name(),
            "touch_ns": figures.touch.median(),
            "read_ns": figures.read.median(),
            "huge_part": figures.huge_part,
            "page_table_kib": figures.page_table_kib,
        })
    });
    let figures: Vec<_> = figures.collect();
    let machine = Machine::read();
    if args.json {
        let mut json = results.json();
        json.insert("machine".into(), machine.json());
        json.insert("shmem_enabled".into(), setting.into());
        json.insert("memory".into(), figures.into());
        println!("{}", serde_json::Value::Object(json));
        return Ok(());
    }
    println!("{}; shmem_enabled is {setting}", machine.text());
    println!(
        "{:30} {:>12} {:>10} {:>10} {:>16}",
        format!("{} MiB of memory", args.mib),
        "ns per touch",
        "ns per read",
        "huge pages",
        "page tables, KiB"
    );
    for (kind, figures) in kinds.iter().zip(&all) {
        println!(
            "{:30} {:12.0} {:11.1} {:9.0}% {:16}",
            kind.name(),
            figures.touch.median(),
            figures.read.median(),
            100.0 * figures.huge_part,
            figures.page_table_kib
        );
    }
    results.print();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mappings are those of a QEMU with 64 MiB of memory in a tmpfs with huge=advise.
    #[test]
    fn huge_pages_are_counted_only_inside_the_range() {
        let smaps = "7f0000000000-7f0004000000 rw-s 00000000 00:2a 12 /mnt/ram\n\
                     Size:              65536 kB\nShmemPmdMapped:    40960 kB\nVmFlags: rd wr sh hg\n\
                     7f0004000000-7f0004200000 rw-p 00000000 00:00 0 \n\
                     AnonHugePages:      2048 kB\nFilePmdMapped:         0 kB\n";
        assert_eq!(huge_kib(smaps, 0x7f00_0000_0000..0x7f00_0400_0000), 40_960);
        assert_eq!(huge_kib(smaps, 0x7f00_0400_0000..0x7f00_0420_0000), 2048);
        assert_eq!(huge_kib(smaps, 0x7f00_03ff_f000..0x7f00_0400_1000), 43_008);
        assert_eq!(huge_kib(smaps, 0x1000..0x2000), 0);
    }

    #[test]
    fn memory_of_each_kind_can_be_touched_and_read() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        for kind in [
            Kind::Private,
            Kind::Memfd,
            Kind::File(directory.path().into()),
        ] {
            let memory = Memory::map(&kind, 4 << 20).expect("cannot map memory");
            memory.touch();
            memory.read(1000);
            let part = memory.huge_part().expect("cannot read smaps");
            assert!((0.0..=1.0).contains(&part), "{}: {part}", kind.name());
        }
    }
}
