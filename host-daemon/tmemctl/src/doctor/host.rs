// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks files of the host: KVM, PSI, transparent huge pages, libvirt's hook, and AppArmor's rules.

use super::finding::{Check, Finding};
use crate::table::size;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use tmem_control::arcstats;

const HOST: &str = "host";

/// Percentage of free AIO operations below which doctor warns. The number changes only when
/// processes such as QEMU start, so an operator has time to react.
const AIO_FREE_PERCENT_MIN: u64 = 20;

/// Default of fs.aio-max-nr in the kernel.
const AIO_MAX_DEFAULT: u64 = 65_536;

const SHMEM_ENABLED: &str = "sys/kernel/mm/transparent_hugepage/shmem_enabled";

const HOOK_DIRECTORY: &str = "etc/libvirt/hooks/qemu.d";

/// Checks the host's files in the file system below `root`.
pub fn findings(root: &Path) -> Vec<Finding> {
    vec![
        kvm(root),
        pressure(root),
        arc(root),
        aio(root),
        huge_pages(root),
        hook(root),
        apparmor(root),
    ]
}

fn kvm(root: &Path) -> Finding {
    let check = Check::new("kvm", HOST);
    match root.join("dev/kvm").exists() {
        true => check.good("there is KVM"),
        false => check.warning(
            "there is no KVM: VMs are emulated and slow",
            "modprobe kvm_intel || modprobe kvm_amd",
        ),
    }
}

fn pressure(root: &Path) -> Finding {
    let check = Check::new("psi", HOST);
    match fs::read_to_string(root.join("proc/pressure/memory")) {
        Ok(_) => check.good("the kernel reports memory pressure (PSI)"),
        Err(error) => check.warning(
            format!(
                "the kernel does not report memory pressure (PSI: {error}): the pool shrinks \
                 later when memory is short"
            ),
            "add psi=1 to the kernel's command line, and restart the host",
        ),
    }
}

/// Checks that ZFS's ARC leaves memory for the pool. The ARC grows into all memory that is free, and
/// so does the pool. ZFS releases memory more slowly than the pool does.
fn arc(root: &Path) -> Finding {
    let check = Check::new("zfs-arc", HOST);
    let Ok(stats) = fs::read_to_string(root.join(arcstats::PATH.trim_start_matches('/'))) else {
        return check.good("the host does not use ZFS");
    };
    let value = |name| {
        let bytes = arcstats::value(&stats, name).unwrap_or(0);
        i64::try_from(bytes).unwrap_or(i64::MAX)
    };
    let (arc_bytes, max_bytes) = (value("size"), value("c_max"));
    let meminfo = fs::read_to_string(root.join("proc/meminfo")).unwrap_or_default();
    let total = meminfo.lines().find_map(|row| {
        let kib = row.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?;
        kib.parse::<i64>().ok()
    });
    let half_bytes = total.map_or(i64::MAX, |kib| kib << 9);
    match max_bytes > half_bytes {
        true => check.warning(
            format!(
                "ZFS's ARC has {} and may grow to {}, more than half of the host's memory: the pool \
                 and VMs get memory only as fast as ZFS releases it",
                size(arc_bytes),
                size(max_bytes)
            ),
            "echo BYTES >/sys/module/zfs/parameters/zfs_arc_max, and options zfs zfs_arc_max=BYTES \
             in /etc/modprobe.d/zfs.conf",
        ),
        false => check.good(
            format!(
                "ZFS's ARC has {} and may grow to {}",
                size(arc_bytes),
                size(max_bytes)
            ),
        ),
    }
}

/// Checks that the host has free operations of the kernel's AIO. The daemon needs one for interrupts
/// of guests, and each QEMU with aio=native needs more.
fn aio(root: &Path) -> Finding {
    let check = Check::new("aio", HOST);
    let number = |name: &str| -> Option<u64> {
        let text = fs::read_to_string(root.join("proc/sys/fs").join(name)).ok()?;
        text.trim().parse().ok()
    };
    let Some((used, most)) = number("aio-nr").zip(number("aio-max-nr")) else {
        return check.warning(
            "the kernel has no AIO: interrupts of guests use io_uring, which takes more time",
            "use a kernel with CONFIG_AIO",
        );
    };
    let free = most.saturating_sub(used);
    let text = format!("{free} of {most} operations of the kernel's AIO are free");
    match free.saturating_mul(100) < most.saturating_mul(AIO_FREE_PERCENT_MIN) {
        true => check.warning(
            format!(
                "only {text}: without a free one, a daemon that starts uses io_uring for interrupts \
                 of guests, and QEMUs with aio=native do not start"
            ),
            &format!(
                "sysctl -w fs.aio-max-nr={}, and the same setting in /etc/sysctl.d",
                most.saturating_mul(4).max(AIO_MAX_DEFAULT)
            ),
        ),
        false => check.good(text),
    }
}

/// Checks that the memory of VMs can consist of transparent huge pages. VMs with the device have
/// their memory in memfds, for which the kernel uses no huge pages by default. QEMU requests them
/// for all memory of a guest, so the setting `advise` suffices.
fn huge_pages(root: &Path) -> Finding {
    let check = Check::new("shmem-huge-pages", HOST);
    let text = fs::read_to_string(root.join(SHMEM_ENABLED)).unwrap_or_default();
    match ["never", "deny"].map(|value| text.contains(&format!("[{value}]"))) {
        [false, false] if text.is_empty() => check.good(
            "the kernel has no transparent huge pages for shared memory",
        ),
        [false, false] => check.good(
            "the memory of VMs with the device can consist of transparent huge pages",
        ),
        [never, _] => check.warning(
            format!(
                "shmem_enabled is {}: the memory of VMs with the device consists of 4 KiB pages, so \
                 that their accesses to memory take longer (docs/install.md, transparent huge pages)",
                if never { "never" } else { "deny" }
            ),
            &format!(
                "echo advise >/{SHMEM_ENABLED}; echo 'w /{SHMEM_ENABLED} - - - - advise' \
                 >/etc/tmpfiles.d/virtio-tmem-huge-pages.conf keeps it after a restart of the host. \
                 VMs that start afterwards use huge pages, unless they have huge pages of hugetlbfs"
            ),
        ),
    }
}

/// Checks that libvirt runs `tmem-hook` before a VM starts and after it ends. Without the hook, the
/// daemon creates no sockets for libvirt's VMs.
fn hook(root: &Path) -> Finding {
    let check = Check::new("hook", HOST);
    if !root.join("etc/libvirt").exists() {
        return check.good("there is no libvirt");
    }
    let entries = fs::read_dir(root.join(HOOK_DIRECTORY))
        .into_iter()
        .flatten()
        .flatten();
    let ours = entries.map(|entry| entry.path()).find(|path| {
        let text = fs::read(path).unwrap_or_default();
        String::from_utf8_lossy(&text).contains("tmem-hook")
    });
    let Some(path) = ours else {
        return check.fault(
            format!(
                "libvirt does not run tmem-hook, which is missing in /{HOOK_DIRECTORY}: its VMs get no socket"
            ),
            "printf '#!/bin/sh\\nexec /usr/sbin/tmem-hook \"$@\"\\n' >/etc/libvirt/hooks/qemu.d/virtio-tmem; \
             chmod +x /etc/libvirt/hooks/qemu.d/virtio-tmem; systemctl reload libvirtd",
        );
    };
    let name = path
        .strip_prefix(root)
        .unwrap_or(&path)
        .display()
        .to_string();
    let mode = fs::metadata(&path).map_or(0, |metadata| metadata.permissions().mode());
    if mode & 0o111 == 0 {
        return check.fault(
            format!("libvirt cannot run the hook /{name}"),
            &format!("chmod +x /{name}; systemctl reload libvirtd"),
        );
    }
    check.good("libvirt runs the hook")
}

fn apparmor(root: &Path) -> Finding {
    let check = Check::new("apparmor", HOST);
    let enabled = fs::read_to_string(root.join("sys/module/apparmor/parameters/enabled"));
    let confines = root
        .join("etc/apparmor.d/abstractions/libvirt-qemu")
        .exists();
    if !confines || !enabled.is_ok_and(|text| text.starts_with('Y')) {
        return check.good("AppArmor does not confine libvirt's QEMUs");
    }
    // The package virtio-tmem-host installs its AppArmor rules in the directory libvirt-qemu.d.
    // Only some versions of libvirt include that directory in the rules for QEMU.
    let text = |path| fs::read_to_string(root.join(path)).unwrap_or_default();
    let local = text("etc/apparmor.d/local/abstractions/libvirt-qemu");
    let package_rules = root.join("etc/apparmor.d/abstractions/libvirt-qemu.d/virtio-tmem");
    let included = text("etc/apparmor.d/abstractions/libvirt-qemu").contains("/libvirt-qemu.d>");
    match local.contains("virtio-tmem") || included && package_rules.exists() {
        true => check.good("AppArmor lets QEMUs connect"),
        false => check.fault(
            "AppArmor confines libvirt's QEMUs and has no rule for the daemon's sockets",
            "cat host-daemon/tmem-libvirt/apparmor/libvirt-qemu >>/etc/apparmor.d/local/abstractions/libvirt-qemu \
             (docs/libvirt.md, confined hosts)",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::State;
    use super::*;

    fn write(root: &Path, name: &str, text: &str) {
        let path = root.join(name);
        fs::create_dir_all(path.parent().expect("the path has no parent directory"))
            .expect("cannot create the directory");
        fs::write(path, text).expect("cannot write the file");
    }

    #[test]
    fn doctor_finds_each_fault_of_the_host_with_its_remedy() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let root = directory.path();
        let states = || {
            findings(root)
                .iter()
                .map(|f| (f.check, f.state))
                .collect::<Vec<_>>()
        };
        let state = |check: &str| {
            states()
                .into_iter()
                .find(|(c, _)| *c == check)
                .expect("the report of doctor lacks the check")
                .1
        };
        // At first, the temporary directory that stands for the host has neither libvirt nor
        // AppArmor.
        assert_eq!(
            (state("hook"), state("apparmor")),
            (State::Good, State::Good)
        );
        assert_eq!(
            (state("kvm"), state("psi")),
            (State::Warning, State::Warning)
        );
        write(root, "dev/kvm", "");
        write(root, "proc/pressure/memory", "some avg10=0.00\n");
        assert_eq!((state("kvm"), state("psi")), (State::Good, State::Good));
        // A fifth of the AIO operations must be free.
        write(root, "proc/sys/fs/aio-max-nr", "65536\n");
        for (used, wanted) in [
            ("0\n", State::Good),
            ("52428\n", State::Good),
            ("52429\n", State::Warning),
            ("65536\n", State::Warning),
        ] {
            write(root, "proc/sys/fs/aio-nr", used);
            assert_eq!(state("aio"), wanted, "{used}");
        }
        let remedy = aio(root).remedy.expect("the warning has no remedy");
        assert!(remedy.contains("fs.aio-max-nr=262144"), "{remedy}");
        // The ARC of this host may use nearly all of its 128 GiB.
        assert_eq!(state("zfs-arc"), State::Good);
        let recorded = include_str!("../../../tmem-control/testdata/arcstats-2.2");
        write(root, "proc/spl/kstat/zfs/arcstats", recorded);
        write(root, "proc/meminfo", "MemTotal:       131826344 kB\n");
        assert_eq!(state("zfs-arc"), State::Warning);
        write(root, "proc/meminfo", "MemTotal:       527305376 kB\n");
        assert_eq!(state("zfs-arc"), State::Good);
        // The kernel may lack transparent huge pages for shared memory. The other texts are those of
        // Linux 6.18 with each setting.
        assert_eq!(state("shmem-huge-pages"), State::Good);
        for (text, wanted) in [
            (
                "always within_size advise [never] deny force\n",
                State::Warning,
            ),
            (
                "always within_size advise never [deny] force\n",
                State::Warning,
            ),
            (
                "always within_size [advise] never deny force\n",
                State::Good,
            ),
            (
                "[always] within_size advise never deny force\n",
                State::Good,
            ),
        ] {
            write(root, SHMEM_ENABLED, text);
            assert_eq!(state("shmem-huge-pages"), wanted, "{text}");
        }
        // From here on, the temporary directory that stands for the host contains a file of
        // libvirt.
        write(root, "etc/libvirt/hooks/qemu.d/other", "#!/bin/sh\n");
        assert_eq!(state("hook"), State::Fault);
        let hook = "etc/libvirt/hooks/qemu.d/virtio-tmem";
        write(root, hook, "#!/bin/sh\nexec /usr/sbin/tmem-hook \"$@\"\n");
        let found = self::hook(root);
        assert_eq!(
            found.state,
            State::Fault,
            "doctor reports no fault for a hook that cannot be run"
        );
        assert!(
            found
                .remedy
                .is_some_and(|remedy| remedy.contains(&format!("chmod +x /{hook}")))
        );
        fs::set_permissions(root.join(hook), fs::Permissions::from_mode(0o755))
            .expect("cannot change the file's mode");
        assert_eq!(state("hook"), State::Good);
        // From here on, the temporary directory that stands for the host contains a file of
        // AppArmor.
        write(root, "etc/apparmor.d/abstractions/libvirt-qemu", "");
        write(root, "sys/module/apparmor/parameters/enabled", "N\n");
        assert_eq!(state("apparmor"), State::Good);
        write(root, "sys/module/apparmor/parameters/enabled", "Y\n");
        assert_eq!(state("apparmor"), State::Fault);
        let rules = include_str!("../../../tmem-libvirt/apparmor/libvirt-qemu");
        write(
            root,
            "etc/apparmor.d/local/abstractions/libvirt-qemu",
            rules,
        );
        assert_eq!(state("apparmor"), State::Good);
        // The package's AppArmor rules have an effect only if libvirt's abstraction includes their
        // directory.
        write(root, "etc/apparmor.d/local/abstractions/libvirt-qemu", "");
        let package_rules = "etc/apparmor.d/abstractions/libvirt-qemu.d/virtio-tmem";
        write(root, package_rules, rules);
        assert_eq!(state("apparmor"), State::Fault);
        write(
            root,
            "etc/apparmor.d/abstractions/libvirt-qemu",
            "include if exists <abstractions/libvirt-qemu.d>\n",
        );
        assert_eq!(state("apparmor"), State::Good);
    }
}
