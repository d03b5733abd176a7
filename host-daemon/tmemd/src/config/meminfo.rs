// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Memory of the host, as `/proc/meminfo` reports it. Defaults of some settings depend on it.

/// Returns the value of the field `name` of `/proc/meminfo` in bytes; None if the text does not
/// contain the field.
pub fn meminfo_bytes(meminfo: &str, name: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix(" kB")?.parse().ok()?;
    Some(kib << 10)
}

/// Returns the total memory of the host in bytes; 0 if the kernel does not report it.
pub fn host_memory_bytes() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    meminfo_bytes(&meminfo, "MemTotal").unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_fields_are_converted_to_bytes() {
        let meminfo = "MemTotal:       24684112 kB\nMemFree:  19 kB\nMemAvailable:   22753792 kB\n";
        assert_eq!(
            meminfo_bytes(meminfo, "MemAvailable"),
            Some(22_753_792 << 10)
        );
        assert_eq!(meminfo_bytes(meminfo, "Mem"), None);
        assert_eq!(meminfo_bytes("MemAvailable: lots\n", "MemAvailable"), None);
    }
}
