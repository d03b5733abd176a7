// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Counters of the processor and of the kernel for the calling thread: misses of the data TLB,
//! misses of the last-level cache, page faults.
//!
//! Most virtual machines do not count TLB and cache misses. If the kernel refuses to open a
//! counter, the benchmark reports the kernel's reason instead of a number.

use rustix::fd::{FromRawFd, OwnedFd};
use std::io;

/// An event that the kernel can count: its name, and its type and number in `struct
/// perf_event_attr`.
type Event = (&'static str, u32, u64);

// Types and numbers of events, as <linux/perf_event.h> defines them.
const HARDWARE: u32 = 0;
const SOFTWARE: u32 = 1;
const HW_CACHE: u32 = 3;
const CACHE_MISSES: u64 = 3;
const PAGE_FAULTS: u64 = 2;
const DTLB: u64 = 3;
const RESULT_MISS: u64 = 1 << 16;
/// Size of `struct perf_event_attr` in its first version, which all kernels accept.
const ATTR_BYTES: u64 = 64;
const EXCLUDE_KERNEL: u64 = 1 << 5;
const EXCLUDE_HV: u64 = 1 << 6;

/// Events that the benchmark counts.
const EVENTS: [Event; 3] = [
    ("dtlb_misses", HW_CACHE, DTLB | RESULT_MISS),
    ("cache_misses", HARDWARE, CACHE_MISSES),
    ("page_faults", SOFTWARE, PAGE_FAULTS),
];

/// Number of events that the benchmark counts.
pub const NR: usize = EVENTS.len();

/// Counters of events in the calling thread's user mode, one for each of [`EVENTS`]. If the kernel
/// refused a counter, its entry is the reason.
pub struct Counters([Result<OwnedFd, String>; NR]);

impl Counters {
    /// Opens the counters. They begin to count at once.
    pub fn open() -> Counters {
        Counters(EVENTS.map(|event| open(event).map_err(|error| error.to_string())))
    }

    /// Returns the names of the events. For an event that is not counted, the reason comes with the
    /// name.
    pub fn names(&self) -> impl Iterator<Item = (&'static str, Option<&str>)> {
        let reasons = self
            .0
            .iter()
            .map(|counter| counter.as_ref().err().map(String::as_str));
        EVENTS.iter().map(|&(name, ..)| name).zip(reasons)
    }

    /// Returns the present values of the counters. A counter that the kernel refused to open reads
    /// as 0.
    pub fn read(&self) -> [u64; NR] {
        std::array::from_fn(|nr| {
            let mut value = [0; 8];
            match &self.0[nr] {
                Ok(counter) if rustix::io::read(counter, &mut value).is_ok() => {
                    u64::from_ne_bytes(value)
                }
                _ => 0,
            }
        })
    }
}

fn open((_, kind, config): Event) -> io::Result<OwnedFd> {
    // Fields of the first version of `struct perf_event_attr`: type and size, config, sample
    // period, sample type, read format, flags, wakeup, breakpoint type and address.
    let attr: [u64; ATTR_BYTES as usize / 8] = [
        u64::from(kind) | ATTR_BYTES << 32,
        config,
        0,
        0,
        0,
        EXCLUDE_KERNEL | EXCLUDE_HV,
        0,
        0,
    ];
    let (this_thread, any_processor, no_group, close_on_exec) = (0, -1, -1, 8);
    // SAFETY: the kernel only reads `attr`, and the first word of `attr` contains its size.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            attr.as_ptr(),
            this_thread,
            any_processor,
            no_group,
            close_on_exec,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned this descriptor, and no other code has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_faults_of_the_calling_thread_are_counted() {
        const PAGES: usize = 300;
        let counters = Counters::open();
        let nr = EVENTS
            .iter()
            .position(|event| event.0 == "page_faults")
            .expect("EVENTS does not list page_faults");
        let before = counters.read()[nr];
        // Allocate so much memory that the allocator makes a new mapping. The kernel populates the
        // mapping page by page, with a fault for each page.
        let memory = std::hint::black_box(vec![1u8; PAGES * 4096]);
        let faults = counters.read()[nr] - before;
        drop(memory);
        match counters.names().nth(nr).and_then(|(_, reason)| reason) {
            None => assert!(
                faults >= PAGES as u64 / 2,
                "the counter shows only {faults} page faults for {PAGES} new pages"
            ),
            // The kernel does not let this user open the counter.
            Some(reason) => assert!(!reason.is_empty() && faults == 0),
        }
    }
}
