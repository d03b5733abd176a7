// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads the statistics of ZFS's ARC, its cache of file contents in the host's memory.
//!
//! The kernel does not count the ARC in `MemAvailable`, although ZFS releases most of it when memory
//! is short (openzfs/zfs issue 10255). The daemon adds the releasable part, and `tmemctl doctor`
//! reports it. Limits: ZFS releases it over some time, and a part may be in use.

/// Path of the statistics. It exists while the kernel module of ZFS is loaded.
pub const PATH: &str = "/proc/spl/kstat/zfs/arcstats";

/// Returns the value of the row `name`; None if the text does not contain it. A row has the form
/// `NAME TYPE VALUE`.
pub fn value(arcstats: &str, name: &str) -> Option<u64> {
    let mut rows = arcstats.lines().map(str::split_whitespace);
    let row = rows.find_map(|mut row| (row.next() == Some(name)).then_some(row));
    row?.nth(1)?.parse().ok()
}

/// Returns the bytes that the ARC can release: its size without its minimum size `c_min`, below
/// which ZFS does not shrink it. Returns 0 if the text does not contain both.
pub fn releasable_bytes(arcstats: &str) -> u64 {
    let sizes = value(arcstats, "size").zip(value(arcstats, "c_min"));
    sizes.map_or(0, |(bytes, least_bytes)| bytes.saturating_sub(least_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The files are statistics of real hosts, shortened to the rows around the sizes.
    #[test]
    fn the_releasable_part_of_the_arc_is_its_size_without_its_minimum() {
        for (text, expected) in [
            // OpenZFS 2.2 on a host with 128 GiB.
            (include_str!("../testdata/arcstats-2.2"), 61_749_764_240),
            // ZFS 0.6 on a host with 16 GiB.
            (include_str!("../testdata/arcstats-0.6"), 1_570_385_360),
            // The pool has just been imported: the ARC is smaller than its minimum.
            (include_str!("../testdata/arcstats-new-pool"), 0),
            ("", 0),
            ("size 4 7\n", 0),
            ("c_min 4 7\n", 0),
            ("size 4\nc_min 4 1\n", 0),
            ("size 4 -1\nc_min 4 1\n", 0),
        ] {
            assert_eq!(releasable_bytes(text), expected, "{text:?}");
        }
    }

    #[test]
    fn a_row_is_found_by_its_complete_name() {
        let text = include_str!("../testdata/arcstats-0.6");
        assert_eq!(value(text, "size"), Some(1_603_939_792));
        assert_eq!(value(text, "c"), Some(1_643_208_777));
        assert_eq!(value(text, "c_max"), Some(8_367_976_448));
        assert_eq!(value(text, "siz"), None);
        assert_eq!(value(text, "name"), None);
    }
}
