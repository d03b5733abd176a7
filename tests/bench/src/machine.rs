// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Description of the machine that runs a benchmark: the processor's name and its caches.
//!
//! Ratios of times depend on the caches and on the speed of memory. So figures of two machines can
//! be compared only if the machines are known.

use std::fs;
use std::path::Path;
use tmem_pool::PAGE_SIZE;

/// Memory in bytes that [`touch_memory`] touches: as much as the pools of a benchmark take.
const TOUCHED_BYTES: usize = 2 << 30;

/// Writes to all pages of a large allocation and frees it. On a virtual machine, the first access
/// to memory that the machine never used takes ten times as long as a page fault. The hypervisor
/// has to provide the memory first. Without this call, the benchmark would measure the hypervisor.
pub fn touch_memory() {
    let mut memory = vec![0u8; TOUCHED_BYTES];
    for byte in memory.iter_mut().step_by(PAGE_SIZE) {
        *byte = 1;
    }
    std::hint::black_box(&memory);
}

/// Size in bytes of the last-level cache that the benchmark assumes if the system reports no cache.
const LLC_BYTES: u64 = 32 << 20;

/// A cache of the first processor.
struct Cache {
    /// Level and kind of the cache, for example "L1d".
    name: String,
    bytes: u64,
}

/// The machine's processor and its caches.
pub struct Machine {
    processor: String,
    caches: Vec<Cache>,
    processors: usize,
}

/// Parses the size of a cache in sysfs, for example "48K". Returns the number of bytes.
fn bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.trim_end_matches(['K', 'M']);
    let shift = match &text[digits.len()..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

fn cache(dir: &Path) -> Option<Cache> {
    let read = |name| fs::read_to_string(dir.join(name)).ok();
    let (level, kind) = (read("level")?, read("type")?);
    let kind = match kind.trim() {
        "Data" => "d",
        "Instruction" => "i",
        _ => "",
    };
    Some(Cache {
        name: format!("L{}{kind}", level.trim()),
        bytes: bytes(&read("size")?)?,
    })
}

impl Machine {
    /// Reads the name of the processor and its caches from the system. Caches that the system does
    /// not report are left out.
    pub fn read() -> Machine {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = |line: &&str| line.starts_with("model name");
        let name = cpuinfo
            .lines()
            .find(model)
            .and_then(|line| line.split_once(':'));
        let caches = (0..).map_while(|nr| {
            let dir = format!("/sys/devices/system/cpu/cpu0/cache/index{nr}");
            cache(Path::new(&dir))
        });
        Machine {
            processor: name.map_or("unknown", |(_, name)| name.trim()).into(),
            caches: caches.collect(),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
        }
    }

    /// Returns the size of the largest cache in bytes, or a default if the system reports no cache.
    pub fn llc_bytes(&self) -> u64 {
        let sizes = self.caches.iter().map(|cache| cache.bytes);
        sizes.max().unwrap_or(LLC_BYTES)
    }

    /// Returns the description of the machine as one line of text.
    pub fn text(&self) -> String {
        let caches = self
            .caches
            .iter()
            .map(|Cache { name, bytes }| format!(", {name} {} KiB", bytes >> 10));
        let caches: String = caches.collect();
        format!("{}, {} processors{caches}", self.processor, self.processors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_sizes_in_sysfs_are_parsed() {
        assert_eq!(bytes("48K\n"), Some(48 << 10));
        assert_eq!(bytes("32M"), Some(32 << 20));
        assert_eq!(bytes("512"), Some(512));
        assert_eq!(bytes("1G"), None);
        assert_eq!(bytes(""), None);
    }
}
