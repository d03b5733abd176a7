// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks the installation: versions of packages, accesses that AppArmor denied, QEMU processes
//! whose program file was replaced, and huge pages that the host does not have.

use super::finding::{Check, Finding};
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use tmem_libvirt::domain::DEVICE;

const HOST: &str = "host";

/// Name of the package with the QEMU that has the virtio-tmem device. The package's version ends
/// with `+tmem`, the version of virtio-tmem, and a suffix of the distribution's release.
const QEMU_PACKAGE: &str = "virtio-tmem-qemu";
const QEMU_VERSION_MARK: &str = "+tmem";

/// Number of bytes that `doctor` reads at the end of the audit daemon's log.
const LOG_BYTES: u64 = 1 << 20;
/// Maximum number of kernel messages that `doctor` reads. The kernel keeps a few thousand; the
/// maximum ends the loop if the kernel logs new messages faster than `doctor` reads them.
const KERNEL_MESSAGES: usize = 100_000;
/// Size of the buffer for one kernel message in bytes. No message of the kernel is longer.
const KERNEL_MESSAGE_BYTES: usize = 8192;

/// Checks the installation in the file system below `root`.
pub fn findings(root: &Path) -> Vec<Finding> {
    let status = fs::read_to_string(root.join("var/lib/dpkg/status")).unwrap_or_default();
    let mut findings = vec![packages(&status, env!("CARGO_PKG_VERSION"))];
    findings.push(denials(root));
    findings.extend(replaced(root));
    findings
}

/// Returns the version of a package, or None if the package is not installed. `status` is the text
/// of dpkg's status file.
fn version_of<'a>(status: &'a str, package: &str) -> Option<&'a str> {
    let field = |entry: &'a str, name: &str| {
        let mut lines = entry.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    };
    let mut entries = status.split("\n\n");
    let entry = entries.find(|entry| field(entry, "Package") == Some(package))?;
    let installed = field(entry, "Status")?.ends_with(" installed");
    installed.then(|| field(entry, "Version")).flatten()
}

/// Checks that the QEMU of the package virtio-tmem-qemu has the same version as this tmemctl.
fn packages(status: &str, own: &str) -> Finding {
    let check = Check::new("packages", HOST);
    let version = version_of(status, QEMU_PACKAGE);
    let Some(version) = version.and_then(|version| version.rsplit_once(QEMU_VERSION_MARK)) else {
        return check.good(format!("the package {QEMU_PACKAGE} is not installed"));
    };
    let qemu = version.1.split('~').next().unwrap_or_default();
    match qemu == own {
        true => check.good(format!("{QEMU_PACKAGE} is of version {own}")),
        false => check.warning(
            format!("{QEMU_PACKAGE} is of version {qemu}, and this tmemctl of {own}"),
            "install the packages of one version; VMs use the new QEMU after a shutdown and a start",
        ),
    }
}

/// Reads the kernel's messages from /dev/kmsg. The kernel logs AppArmor's denials there if no audit
/// daemon runs.
fn kernel_messages(path: &Path) -> std::io::Result<String> {
    let mut options = OpenOptions::new();
    let mut file = options
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)?;
    let mut text = Vec::new();
    let mut message = [0; KERNEL_MESSAGE_BYTES];
    for _ in 0..KERNEL_MESSAGES {
        match file.read(&mut message) {
            Ok(0) => break,
            Ok(bytes) => text.extend_from_slice(&message[..bytes]),
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            // EPIPE means that the kernel overwrote messages before they were read. Reading
            // continues with the oldest message that exists.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => {}
            Err(error) => return Err(error),
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Reads the end of the audit daemon's log.
fn audit_log(path: &Path) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let bytes = file.metadata()?.len();
    file.seek(SeekFrom::Start(bytes.saturating_sub(LOG_BYTES)))?;
    let mut text = Vec::new();
    file.take(LOG_BYTES).read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Returns the value of `key="value"` in an audit message.
fn value<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let mut words = line.split(' ');
    words.find_map(|word| {
        word.strip_prefix(key)?
            .strip_prefix("=\"")?
            .split('"')
            .next()
    })
}

/// Checks that AppArmor's log has no denied access to the daemon's sockets or to the packaged QEMU.
fn denials(root: &Path) -> Finding {
    let check = Check::new("denials", HOST);
    let audit = audit_log(&root.join("var/log/audit/audit.log"));
    let kernel = kernel_messages(&root.join("dev/kmsg"));
    let unreadable = |result: &std::io::Result<String>| matches!(result, Err(error) if error.kind() == ErrorKind::PermissionDenied);
    if unreadable(&audit) || unreadable(&kernel) {
        return check.good("this user cannot read the log of AppArmor's denials");
    }
    let text = kernel.unwrap_or_default() + &audit.unwrap_or_default();
    let denied: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("apparmor=\"DENIED\""))
        .filter(|line| {
            let ours = |name: &str| name.contains("virtio-tmem") || name.contains("x86_64-tmem");
            value(line, "name").is_some_and(ours) || value(line, "profile").is_some_and(ours)
        })
        .collect();
    let Some(last) = denied.last() else {
        return check.good("AppArmor's log has no denial of virtio-tmem's files");
    };
    check.warning(
        format!(
            "AppArmor denied {} accesses to virtio-tmem's files, the last one by {} to {}",
            denied.len(),
            value(last, "profile").unwrap_or("a program"),
            value(last, "name").unwrap_or("a file"),
        ),
        "if the denials are older than the rules: shut the VM down and start it; otherwise see \
         docs/libvirt.md, AppArmor",
    )
}

/// Checks that each QEMU with the device runs the installed program, not one that was replaced
/// after the start of the VM.
fn replaced(root: &Path) -> Vec<Finding> {
    let processes = fs::read_dir(root.join("proc")).into_iter().flatten();
    let mut findings = Vec::new();
    for process in processes.flatten().map(|entry| entry.path()) {
        let Ok(command) = fs::read(process.join("cmdline")) else {
            continue;
        };
        let command = String::from_utf8_lossy(&command);
        let arguments: Vec<&str> = command.split('\0').collect();
        let after = |option: &str| {
            let pair = arguments.windows(2).find(|pair| pair[0] == option);
            pair.map(|pair| pair[1])
        };
        let has_device = arguments
            .windows(2)
            .any(|pair| pair[0] == "-device" && pair[1].contains(DEVICE));
        // The link /proc/PID/exe of another user's process cannot be read, so that process is
        // skipped.
        let Some(program) = fs::read_link(process.join("exe"))
            .ok()
            .filter(|_| has_device)
        else {
            continue;
        };
        let name = after("-name").unwrap_or("a VM").split(',').next();
        let name = name.unwrap_or_default().trim_start_matches("guest=");
        let check = Check::new("replaced-qemu", name);
        let program = program.to_string_lossy();
        findings.push(match program.strip_suffix(" (deleted)") {
            None => check.good(format!("the VM runs the installed {program}")),
            Some(program) => check.warning(
                format!("the VM runs a {program} that was replaced after the VM's start"),
                &format!("virsh shutdown {name}; virsh start {name}"),
            ),
        });
    }
    findings
}

/// Checks that the host has huge pages if a domain with the device needs them for its next start.
/// Returns None if the XML cannot be read, or if the domain has no device, needs no huge pages or
/// runs.
#[cfg(feature = "libvirt")]
pub fn huge_pages(xml: &str, active: bool, root: &Path) -> Option<Finding> {
    let domain = tmem_libvirt::domain::Domain::parse(xml).ok()?;
    // `host_memory_bytes` is 0 for a domain whose memory consists of huge pages, because it takes no
    // bytes of the host's available memory.
    if domain.device.is_none() || domain.host_memory_bytes > 0 || active {
        return None;
    }
    let check = Check::new("huge-pages", domain.name.as_str());
    let pools = fs::read_dir(root.join("sys/kernel/mm/hugepages")).into_iter();
    let mut pools = pools.flatten().flatten();
    let some = pools.any(|pool| {
        let number = fs::read_to_string(pool.path().join("nr_hugepages"));
        number.is_ok_and(|number| number.trim() != "0")
    });
    Some(match some {
        true => check.good("the host has huge pages for the domain's memory"),
        false => check.fault(
            "the domain's memory consists of huge pages, and the host has none: the domain does not start",
            "sysctl vm.nr_hugepages=NUMBER, or remove <hugepages/> with virsh edit",
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::super::finding::State;
    use super::*;
    use std::os::unix::fs::symlink;

    fn write(root: &Path, name: &str, text: &str) {
        let path = root.join(name);
        fs::create_dir_all(path.parent().expect("the path has no parent directory"))
            .expect("cannot create the directory");
        fs::write(path, text).expect("cannot write the file");
    }

    #[test]
    fn doctor_finds_a_package_of_another_version() {
        let status = |version: &str, state: &str| {
            format!(
                "Package: virtio-tmem-qemu-extra\nStatus: install ok installed\nVersion: 9\n\n\
                 Package: virtio-tmem-qemu\nStatus: {state}\nVersion: {version}\n\n\
                 Package: zlib\nStatus: install ok installed\nVersion: 1\n"
            )
        };
        let installed = "install ok installed";
        let state = |text: &str| packages(text, "1.2.0").state;
        let good = "10.0.13+ds-0+deb13u1+tmem1.2.0~deb12";
        let old = "10.0.13+ds-0+deb13u1+tmem1.1.0~deb12";
        assert_eq!(state(&status(good, installed)), State::Good);
        assert_eq!(state(&status(old, installed)), State::Warning);
        assert_eq!(
            state(&status(old, "deinstall ok config-files")),
            State::Good
        );
        assert_eq!(state(""), State::Good);
    }

    #[test]
    fn doctor_finds_denials_of_apparmor() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let root = directory.path();
        let denied = |name: &str| {
            format!(
                "6,1,2,-;audit: type=1400 audit(1.2:3): apparmor=\"DENIED\" operation=\"connect\" \
                 profile=\"libvirt-5ca1ab1e\" name=\"{name}\" pid=4 comm=\"qemu\"\n"
            )
        };
        assert_eq!(denials(root).state, State::Good);
        write(root, "dev/kmsg", &denied("/etc/passwd"));
        assert_eq!(denials(root).state, State::Good);
        for log in ["dev/kmsg", "var/log/audit/audit.log"] {
            for name in [
                "/run/virtio-tmem/web.sock",
                "/usr/bin/qemu-system-x86_64-tmem",
            ] {
                write(root, log, &(denied("/etc/passwd") + &denied(name)));
                let found = denials(root);
                assert_eq!(found.state, State::Warning, "{log}: {name}");
                assert!(found.text.contains(name) && found.text.contains("denied 1"));
            }
            write(root, log, &denied("/etc/passwd"));
        }
    }

    #[test]
    fn doctor_finds_a_qemu_that_was_replaced_after_the_vm_started() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let root = directory.path();
        let process = |pid: &str, name: &str, device: &str, program: &str| {
            let command =
                format!("qemu\0-name\0guest={name},debug-threads=on\0-device\0{device}\0");
            write(root, &format!("proc/{pid}/cmdline"), &command);
            symlink(program, root.join(format!("proc/{pid}/exe"))).expect("cannot make the link");
        };
        let device = format!("{DEVICE},id=virtio-tmem0");
        process("1", "old", &device, "/usr/bin/qemu (deleted)");
        process("2", "new", &device, "/usr/bin/qemu");
        process("3", "other", "e1000", "/usr/bin/qemu (deleted)");
        let mut found = replaced(root);
        found.sort_by(|one, other| one.about.cmp(&other.about));
        let found: Vec<_> = found.iter().map(|f| (f.about.as_str(), f.state)).collect();
        assert_eq!(found, [("new", State::Good), ("old", State::Warning)]);
    }

    #[cfg(feature = "libvirt")]
    #[test]
    fn doctor_finds_a_host_without_huge_pages() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let root = directory.path();
        let plain = |backing: &str| {
            format!(
                "<domain type='kvm'><name>web</name><uuid>5ca1ab1e-0000-4000-8000-0123456789ab</uuid>\
                 <memory unit='MiB'>512</memory>{backing}\
                 <os><type arch='x86_64' machine='q35'>hvm</type></os><devices/></domain>"
            )
        };
        let huge = plain("<memoryBacking><hugepages/></memoryBacking>");
        let attached = |xml: &str| {
            let attached =
                tmem_libvirt::domain::attach(xml, &tmem_libvirt::domain::Options::default());
            attached.expect("cannot attach the device")
        };
        let state = |xml: &str| huge_pages(xml, false, root).map(|finding| finding.state);
        assert_eq!(state(&huge), None);
        assert_eq!(state(&attached(&plain(""))), None);
        assert_eq!(state(&attached(&huge)), Some(State::Fault));
        let pool = "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
        write(root, pool, "0\n");
        assert_eq!(state(&attached(&huge)), Some(State::Fault));
        assert_eq!(huge_pages(&attached(&huge), true, root), None);
        write(root, pool, "256\n");
        assert_eq!(state(&attached(&huge)), Some(State::Good));
    }
}
