// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Reads how much memory the host and the daemon's control group have left.
//!
//! The monitor of the host's memory (`pressure.rs`) decides from these values how large the pool
//! may be. A file that cannot be parsed makes its value unknown, and never stops the daemon. Limits:
//! control groups of version 1 are not read, because they report no stalls either.

use crate::config::meminfo::meminfo_bytes;
use crate::config::settings::PressureConfig;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use tmem_control::arcstats::releasable_bytes;

/// Directory in which control groups of version 2 are mounted.
const GROUPS: &str = "/sys/fs/cgroup";

/// Memory that is left, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Available {
    /// Memory that the host can allocate without harmful reclaim; None if the host does not report
    /// it. It includes `arc_bytes`.
    pub host_bytes: Option<u64>,
    /// Memory that ZFS's ARC can release; 0 on a host without ZFS. The kernel does not count it in
    /// `MemAvailable`.
    pub arc_bytes: u64,
    /// Free swap of the host; 0 if the host does not report it.
    pub swap_free_bytes: u64,
    /// Memory that the daemon's control group may still use below its limits; None if neither the
    /// group nor a group that contains it has a limit.
    pub group_bytes: Option<u64>,
}

impl Available {
    /// Reads the files that the configuration names.
    ///
    /// # Errors
    /// The host's memory cannot be read. A host that is short of memory can refuse the kernel
    /// memory for this, so an error does not mean that the host reports nothing.
    pub fn read(config: &PressureConfig) -> io::Result<Available> {
        let meminfo = fs::read_to_string(&config.meminfo)?;
        let arcstats = fs::read_to_string(&config.arcstats).unwrap_or_default();
        let arc_bytes = releasable_bytes(&arcstats);
        let host_bytes = meminfo_bytes(&meminfo, "MemAvailable");
        Ok(Available {
            host_bytes: host_bytes.map(|bytes| bytes.saturating_add(arc_bytes)),
            arc_bytes,
            swap_free_bytes: meminfo_bytes(&meminfo, "SwapFree").unwrap_or(0),
            group_bytes: config.group.as_deref().and_then(group_bytes),
        })
    }
}

/// Returns the directory of the daemon's control group; None if the host has no control groups of
/// version 2.
pub fn own_group() -> Option<PathBuf> {
    let text = fs::read_to_string("/proc/self/cgroup").ok()?;
    group_directory(Path::new(GROUPS), &text)
}

/// Returns the directory below `groups` of the control group that `text` names. `text` has the form
/// of /proc/self/cgroup; its line `0::` names the group of version 2.
fn group_directory(groups: &Path, text: &str) -> Option<PathBuf> {
    let path = text.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let directory = groups.join(path);
    directory.join("cgroup.procs").exists().then_some(directory)
}

/// Returns the bytes that a control group may still use below the limits `memory.max` and
/// `memory.high` of the group and of the groups that contain it; None if there is no limit.
///
/// Memory that the kernel could reclaim in the group counts as used: a group at its limit makes its
/// tasks wait, whatever it has filled the limit with.
fn group_bytes(directory: &Path) -> Option<u64> {
    let number = |at: &Path, name| -> Option<u64> {
        let text = fs::read_to_string(at.join(name)).ok()?;
        text.trim().parse().ok()
    };
    let left = |at: &Path| {
        // A limit of `max` is no number, so it is left out.
        let limits = ["memory.max", "memory.high"].map(|name| number(at, name));
        let limit_bytes = limits.into_iter().flatten().min()?;
        Some(limit_bytes.saturating_sub(number(at, "memory.current")?))
    };
    let groups = directory
        .ancestors()
        .take_while(|at| at.join("cgroup.procs").exists());
    groups.filter_map(left).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Writes the files of a control group as the kernel does.
    fn group(directory: &Path, current: u64, max: &str, high: &str) {
        fs::create_dir_all(directory).expect("cannot create the directory");
        let current = current.to_string();
        let files = [
            ("cgroup.procs", ""),
            ("memory.current", &current),
            ("memory.max", max),
            ("memory.high", high),
        ];
        for (name, text) in files {
            fs::write(directory.join(name), format!("{text}\n")).expect("cannot write the file");
        }
    }

    /// On a host whose ARC has nearly all memory, `MemAvailable` alone would make the pool shrink to
    /// its minimum.
    #[test]
    fn memory_that_the_arc_can_release_is_available() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let path = |name: &str| directory.path().join(name);
        let config = PressureConfig {
            meminfo: path("meminfo"),
            arcstats: path("arcstats"),
            ..PressureConfig::default()
        };
        let read = || Available::read(&config).expect("cannot read the files");
        fs::write(path("meminfo"), "MemAvailable:   500000 kB\n").expect("cannot write the file");
        assert_eq!(read().host_bytes, Some(500_000 << 10));
        let arcstats = include_str!("../../../tmem-control/testdata/arcstats-2.2");
        fs::write(path("arcstats"), arcstats).expect("cannot write the file");
        let arc_bytes = 65_967_562_640 - 4_217_798_400;
        assert_eq!(read().arc_bytes, arc_bytes);
        assert_eq!(read().host_bytes, Some((500_000 << 10) + arc_bytes));
        // Without `MemAvailable`, the host's memory is unknown, whatever the ARC has.
        fs::write(path("meminfo"), "").expect("cannot write the file");
        assert_eq!(read().host_bytes, None);
    }

    #[test]
    fn the_tightest_limit_of_a_group_and_its_parents_counts() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        // The root group has no memory files, and the directory above it is no group.
        let root = directory.path().join("cgroup");
        let (slice, unit) = (
            root.join("system.slice"),
            root.join("system.slice/tmemd.service"),
        );
        group(&unit, 100, "max", "max");
        group(&slice, 300, "max", "max");
        fs::write(root.join("cgroup.procs"), "").expect("cannot write the file");
        assert_eq!(group_bytes(&unit), None, "a group without limits has one");
        group(&slice, 300, "1000", "max");
        assert_eq!(group_bytes(&unit), Some(700));
        group(&unit, 100, "600", "150");
        assert_eq!(group_bytes(&unit), Some(50));
        group(&unit, 200, "600", "150");
        assert_eq!(
            group_bytes(&unit),
            Some(0),
            "a group above memory.high has memory left"
        );
        assert_eq!(group_bytes(&directory.path().join("none")), None);
    }

    #[test]
    fn the_daemon_finds_its_own_control_group() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let groups = directory.path();
        group(&groups.join("system.slice/tmemd.service"), 0, "max", "max");
        fs::write(groups.join("cgroup.procs"), "").expect("cannot write the file");
        for (text, expected) in [
            (
                "0::/system.slice/tmemd.service\n",
                Some("system.slice/tmemd.service"),
            ),
            ("0::/\n", Some("")),
            // A host with both versions: only the line of version 2 counts.
            (
                "4:memory:/m\n0::/system.slice/tmemd.service\n",
                Some("system.slice/tmemd.service"),
            ),
            ("0::/gone\n", None),
            ("4:memory:/system.slice/tmemd.service\n", None),
            ("", None),
        ] {
            let expected = expected.map(|path| groups.join(path));
            assert_eq!(group_directory(groups, text), expected, "{text:?}");
        }
    }
}
