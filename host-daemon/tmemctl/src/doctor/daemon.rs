// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Checks the daemon and its systemd unit, its VMs, and the permissions of their sockets.

use super::finding::{Check, Finding};
#[cfg(feature = "libvirt")]
use crate::client;
use crate::client::{connect, refused};
use crate::exit::{Code, Failure};
use crate::reach::{Reach, within_timeout};
use crate::table::size;
use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::process::Command;
use tmem_control as api;
use tmem_control::VarlinkClientInterface;
use tmem_control::arcstats;
use tmem_control::overcommit::Overcommit;

const DAEMON: &str = "daemon";

/// The daemon's systemd unit.
const UNIT: &str = "tmemd.service";
/// Properties of the unit that `doctor` reads.
const UNIT_PROPERTIES: &str = "--property=LoadState,ActiveState,ExecMainStatus,NRestarts";
/// Path of the daemon's program in the unit.
const DAEMON_PATH: &str = "/usr/sbin/tmemd";
/// Exit status of a daemon whose options are invalid.
const EXIT_USAGE: u8 = 2;
/// Number of restarts since the last stop from which `doctor` warns. A daemon that was killed once,
/// for example because a page of its memory was faulty, needs no operator.
const RESTARTS_WARNED: u64 = 3;

/// Free part of the daemon's memory regions, in percent, below which `doctor` warns.
const REGIONS_FREE_PERCENT: i64 = 20;

/// Permission bits of a socket that let users outside its owner and group connect.
const OTHERS: u32 = 0o007;

/// Checks the daemon and its VMs, and the host's files below `root` that the daemon reads. Returns
/// the findings and the list of VMs; the list is None if the daemon does not answer.
pub fn findings(reach: &Reach, root: &Path) -> (Vec<Finding>, Option<Vec<api::Vm>>) {
    let asked = within_timeout(&reach.daemon(), reach, |reach| {
        let failed = |error: api::Error| refused(&reach.socket, &error);
        let mut client = connect(&reach.socket)?;
        let vms = client.list_vms().call().map_err(failed)?.vms;
        let stats = client.get_stats(None).call().map_err(failed)?;
        Ok((vms, stats))
    });
    let (vms, stats) = match asked {
        Ok(reply) => reply,
        Err(Failure(why, code)) => {
            let remedy = match code == Code::Denied {
                true => format!(
                    "usermod -aG \"$(stat -c %G {})\" \"$USER\", and log in again",
                    reach.socket.display()
                ),
                false => "tmemd --check-config && systemctl start tmemd, or name its socket with \
                          --socket"
                    .into(),
            };
            return (vec![Check::new("daemon", DAEMON).fault(why, &remedy)], None);
        }
    };
    let mut findings = check_daemon(&stats.daemon, &stats.pool);
    findings.push(arc_counted(root, &stats.pool));
    findings.push(returned_memory(&stats.daemon, &stats.pool));
    findings.push(control_socket(&reach.socket));
    findings.push(locked(&stats.daemon));
    for vm in &vms {
        let stats = stats.vms.iter().find(|stats| stats.name == vm.name);
        findings.extend(stats.map(|stats| check_vm(vm, stats)).unwrap_or_default());
    }
    (findings, Some(vms))
}

/// Checks that the daemon's unit did not fail, that systemd does not restart the daemon again and
/// again, and that the daemon could start again with its present configuration. Returns nothing if
/// systemd does not run on the host below `root`, or does not know the unit.
pub fn unit(reach: &Reach, root: &Path) -> Vec<Finding> {
    // systemd creates this directory where it is process 1, see sd_booted(3).
    if root != Path::new("/") || !root.join("run/systemd/system").exists() {
        return Vec::new();
    }
    let output = |program: &'static str, arguments: &'static [&str]| {
        within_timeout(program, reach, move |_| {
            let output = Command::new(program).args(arguments).output();
            output.map_err(|error| Failure(error.to_string(), Code::Failed))
        })
    };
    let Ok(shown) = output("systemctl", &["show", UNIT, UNIT_PROPERTIES]) else {
        return Vec::new();
    };
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    if !shown.contains("LoadState=loaded") {
        return Vec::new();
    }
    let checked = output(DAEMON_PATH, &["--check-config"]).ok();
    let checked = checked.map(|output| check_configuration(output.status.code(), &output.stderr));
    [check_unit(&shown)].into_iter().chain(checked).collect()
}

/// Judges the result of `tmemd --check-config`: its exit status, and its message.
fn check_configuration(status: Option<i32>, message: &[u8]) -> Finding {
    let check = Check::new("configuration", DAEMON);
    match status {
        Some(status) if status == i32::from(api::EXIT_CONFIGURATION) => check.fault(
            format!(
                "the daemon cannot start again with the present configuration: {}",
                String::from_utf8_lossy(message).trim()
            ),
            "correct /etc/virtio-tmem/tmemd.toml; tmemd --check-config; systemctl reload-or-restart \
             tmemd",
        ),
        _ => check.good("the configuration has no fault that this user can see"),
    }
}

/// Judges the properties of the unit as `systemctl show` prints them.
fn check_unit(shown: &str) -> Finding {
    let check = Check::new("unit", DAEMON);
    let property = |name: &str| {
        let value = |line: &'_ str| Some(line.strip_prefix(name)?.strip_prefix('=')?.to_string());
        shown.lines().find_map(value).unwrap_or_default()
    };
    let status = property("ExecMainStatus").parse().unwrap_or(0);
    let restarts: u64 = property("NRestarts").parse().unwrap_or(0);
    match (property("ActiveState").as_str(), status) {
        ("failed", api::EXIT_CONFIGURATION) => check.fault(
            format!(
                "the daemon ended with status {status}, because its configuration is invalid: \
                 systemd does not start it again"
            ),
            "tmemd --check-config; correct /etc/virtio-tmem/tmemd.toml; systemctl start tmemd",
        ),
        ("failed", EXIT_USAGE) => check.fault(
            format!(
                "the daemon ended with status {status}, because its options are invalid: systemd \
                 does not start it again"
            ),
            "systemctl cat tmemd; correct ExecStart= with systemctl edit tmemd; systemctl start tmemd",
        ),
        ("failed", _) => check.fault(
            format!("the daemon's unit failed, with status {status}"),
            "journalctl -u tmemd has the reason; systemctl start tmemd",
        ),
        _ if restarts >= RESTARTS_WARNED => check.warning(
            format!("systemd has restarted the daemon {restarts} times since its last stop"),
            "journalctl -u tmemd has the reasons; systemctl reset-failed tmemd resets the number",
        ),
        _ => check.good("systemd does not restart the daemon repeatedly"),
    }
}

/// Returns whether the daemon supports retained pages; None if the daemon does not answer. The
/// request is separate from those of other checks, because an older daemon may refuse one of those.
#[cfg(feature = "libvirt")]
pub fn knows_retained_pages(reach: &Reach) -> Option<bool> {
    let asked = within_timeout(&reach.daemon(), reach, |reach| {
        client::knows_retained_pages(&reach.socket)
    });
    asked.ok()
}

fn check_daemon(daemon: &api::DaemonStats, pool: &api::PoolStats) -> Vec<Finding> {
    let own = env!("CARGO_PKG_VERSION");
    let mut findings = vec![match daemon.version == own {
        true => Check::new("daemon", DAEMON).good(format!("tmemd {own} answers")),
        false => Check::new("daemon", DAEMON).warning(
            format!(
                "the daemon has version {}, and this tmemctl has version {own}",
                daemon.version
            ),
            "systemctl restart tmemd: VMs go on without the cache meanwhile",
        ),
    }];
    findings.push(host_memory(pool));
    findings.push(memory_regions(daemon));
    findings.push(match pool.reserved_bytes > pool.size_bytes {
        true => Check::new("reserves", DAEMON).warning(
            format!(
                "the reserves of all VMs add up to {}, more than the pool's size of {}: the daemon \
                 scales each reserve down",
                size(pool.reserved_bytes),
                size(pool.size_bytes)
            ),
            "tmemctl quota VM --reserve SIZE, or tmemctl pool --size SIZE",
        ),
        false => Check::new("reserves", DAEMON).good("the reserves fit"),
    });
    findings.push(match pool.hash_mismatches {
        0 => Check::new("bytes", DAEMON).good("no stored page failed its check"),
        bad => Check::new("bytes", DAEMON).fault(
            format!(
                "{bad} stored pages failed their checksum, and guests did not get them: the host's \
                 memory or the daemon is at fault"
            ),
            "memtester 1G 3, and journalctl -u tmemd",
        ),
    });
    findings
}

/// Checks that the pool has its configured size. If not, the text says how often each reason has made
/// the pool smaller since the daemon's start.
fn host_memory(pool: &api::PoolStats) -> Finding {
    let check = Check::new("host-memory", DAEMON);
    if pool.size_bytes >= pool.configured_bytes {
        return check.good("the pool has its configured size");
    }
    let stall_shrinks = pool.host_shrinks_stalls;
    let memory_shrinks = pool.host_shrinks - stall_shrinks;
    let text = format!(
        "the host is short of memory: the pool has {} of its configured {}. It shrank {memory_shrinks} \
         times because too little memory was available, and {stall_shrinks} times because tasks waited \
         for memory",
        size(pool.size_bytes),
        size(pool.configured_bytes)
    );
    let smaller = format!(
        "tmemctl pool --size {}, or give VMs less memory",
        pool.size_bytes
    );
    let remedy = match stall_shrinks > memory_shrinks {
        true => format!(
            "grep some /sys/fs/cgroup/*.slice/memory.pressure shows which control group waits: raise \
             its memory limit. Otherwise {smaller}"
        ),
        false => smaller,
    };
    check.warning(text, &remedy)
}

/// Checks that the daemon has mappings left for the memory of further VMs.
fn memory_regions(daemon: &api::DaemonStats) -> Finding {
    let check = Check::new("memory-regions", DAEMON);
    let (regions, max) = (daemon.memory_regions, daemon.memory_regions_max);
    // An older daemon reports 0 of 0 regions.
    match regions > max - max / 100 * REGIONS_FREE_PERCENT {
        true => check.warning(
            format!(
                "all VMs together have {regions} memory regions, and the daemon can map {max}: it \
                 refuses VMs whose regions do not fit"
            ),
            "sysctl -w vm.max_map_count=262144, and the same line in /etc/sysctl.d; then systemctl \
             restart tmemd",
        ),
        false => check.good("the daemon can map the memory of further VMs"),
    }
}

/// Checks that the daemon counts the memory that ZFS's ARC can release. Its sandbox permits it to
/// read the ARC's statistics only if the file exists when the daemon starts.
fn arc_counted(root: &Path, pool: &api::PoolStats) -> Finding {
    let check = Check::new("arc-counted", DAEMON);
    let stats = fs::read_to_string(root.join(arcstats::PATH.trim_start_matches('/')));
    let releasable_bytes = stats.map_or(0, |text| arcstats::releasable_bytes(&text));
    // An older daemon, and one that does not watch the host's memory, report 0 bytes.
    match pool.host_available_bytes > 0 && pool.host_arc_bytes == 0 && releasable_bytes > 0 {
        true => check.warning(
            "ZFS was loaded after the daemon's start, so the daemon does not count the memory that \
             ZFS's ARC can release, and makes the pool too small",
            "systemctl restart tmemd: VMs go on without the cache meanwhile",
        ),
        false => check.good("the daemon counts the memory that ZFS's ARC can release"),
    }
}

/// Checks that the host can give VMs the memory that they have returned or never used. Otherwise the
/// kernel may kill a QEMU when the VMs use it.
fn returned_memory(daemon: &api::DaemonStats, pool: &api::PoolStats) -> Finding {
    let check = Check::new("returned-memory", DAEMON);
    let Some(memory) = Overcommit::new(daemon, pool) else {
        return check.good(
            "not known: the daemon does not watch the host's memory, so the memory that VMs may \
             still use is not compared with it",
        );
    };
    match memory.missing_bytes(0) > 0 {
        true => check.warning(
            format!(
                "the VMs have returned or never used {} of their memory, and can use it at any time. \
                 The host has {} for that: available memory, the pool without reserves, and free swap",
                size(memory.unused_bytes),
                size(memory.host_bytes)
            ),
            "start no further VM on this host; move a VM to another host, or add swap",
        ),
        false => check.good("the host has the memory that VMs may still use"),
    }
}

fn control_socket(socket: &Path) -> Finding {
    let check = Check::new("control-socket", DAEMON);
    let mode = fs::metadata(socket).map_or(0, |metadata| metadata.permissions().mode());
    let at = socket.display();
    match mode & OTHERS {
        0 => check.good("only its group may use the control socket"),
        _ => check.warning(
            format!(
                "the mode of the control socket {at} was changed to {:o}: the daemon still \
                 refuses other users",
                mode & 0o777
            ),
            &format!("chmod o= {at}"),
        ),
    }
}

/// Checks that the host cannot swap out pages of guests, because the daemon has locked its memory.
/// The daemon itself reports whether locking succeeded. The limit RLIMIT_MEMLOCK would not show
/// this, because root may lock memory whatever the limit is.
fn locked(daemon: &api::DaemonStats) -> Finding {
    let check = Check::new("memory-lock", DAEMON);
    match daemon.memory_locked {
        true => check.good("pages of guests stay out of the host's swap"),
        false => check.fault(
            "the daemon could not lock its memory: pages of guests can get into the host's swap",
            "systemctl edit tmemd: [Service] LimitMEMLOCK=infinity; then systemctl restart tmemd; \
             started by hand: prlimit --memlock=unlimited tmemd …",
        ),
    }
}

fn vm_socket(vm: &api::Vm) -> Finding {
    let (check, at) = (Check::new("vm-socket", &vm.name), &vm.socket);
    match fs::metadata(at) {
        Ok(metadata) if !metadata.file_type().is_socket() => check.fault(
            format!("the file {at} in place of the VM's socket is not a socket"),
            &format!("rm {at}; systemctl restart tmemd"),
        ),
        Ok(metadata) => match metadata.permissions().mode() {
            mode if mode & 0o600 != 0o600 => check.fault(
                format!(
                    "the owner of the VM's socket {at} may not connect: the socket's mode is {:o}",
                    mode & 0o777
                ),
                &format!("chmod u+rw {at}"),
            ),
            mode if mode & OTHERS != 0 => check.warning(
                format!(
                    "the mode of the VM's socket {at} is {:o}: every user may connect, unless a \
                     stricter mode is configured",
                    mode & 0o777
                ),
                &format!("chmod o= {at}"),
            ),
            _ => check.good("the VM's socket exists"),
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => check.fault(
            format!("the VM's socket {at} is missing"),
            "systemctl restart tmemd: the daemon creates the sockets of all VMs again",
        ),
        Err(error) => check.good(format!(
            "the VM's socket {at} cannot be checked by this user: {error}"
        )),
    }
}

/// Checks one VM that the daemon serves.
fn check_vm(vm: &api::Vm, stats: &api::VmStats) -> Vec<Finding> {
    let name = vm.name.as_str();
    let mut findings = vec![vm_socket(vm)];
    if let Some(problem) = &vm.problem {
        findings.push(Check::new("problem", name).fault(
            format!("the VM's requested settings are not in effect: {problem}"),
            &format!("tmemctl quota {name}, with values that fit"),
        ));
    }
    if vm.frozen {
        findings.push(Check::new("frozen", name).warning(
            "the VM is frozen: the daemon refuses its puts",
            &format!("tmemctl thaw {name}"),
        ));
    }
    if stats.queues_stopped > 0 {
        findings.push(Check::new("virtqueues", name).warning(
            format!(
                "{} of the VM's virtqueues were stopped because of a fault of the guest or the VMM",
                stats.queues_stopped
            ),
            &format!("journalctl -u tmemd TMEM_VM={name}; a reset of the guest sets the virtqueues up again"),
        ));
    }
    if !vm.connected {
        findings.push(Check::new("connected", name).warning(
            "the VM's QEMU is not connected: it does not run, has no device, or may not use the socket",
            &format!(
                "virsh start {name}; ls -l {}; grep DENIED /var/log/audit/audit.log",
                vm.socket
            ),
        ));
        return findings;
    }
    findings.push(driver(name, stats));
    findings
}

/// Checks the state that the guest's driver reports.
fn driver(name: &str, stats: &api::VmStats) -> Finding {
    let check = Check::new("driver", name);
    let Some(driver) = &stats.driver else {
        return check.warning(
            "the guest's driver has not reported: it is not loaded, or the guest is starting",
            "in the guest: modprobe virtio_tmem",
        );
    };
    if driver.mismatches > 0 || driver.state == "poisoned" {
        return check.fault(
            format!(
                "the guest's driver found {} wrong pages, and switched off its cache or that of a file system",
                driver.mismatches
            ),
            "in the guest: tmem-guest status. Did another machine change the guest's disk?",
        );
    }
    match driver.state.as_str() {
        "on" => check.good(format!("the guest's driver {} is on", driver.version)),
        "tripped" => check.warning(
            format!(
                "{} answers came after the driver's deadline, so the driver pauses the cache for a while",
                driver.late
            ),
            "check with tmemctl stats whether the host is overloaded; set more workers in /etc/virtio-tmem/tmemd.toml",
        ),
        state => check.warning(
            format!("the guest's driver reports the state {state}"),
            "in the guest: tmem-guest status shows the reason",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::finding::State;
    use super::*;
    use crate::top::tests::{reply, vm as stats_of};
    use std::os::unix::net::UnixListener;

    fn vm(socket: &Path) -> api::Vm {
        api::Vm {
            name: "web".into(),
            uuid: None,
            socket: socket.display().to_string(),
            trust_domain: None,
            quota: api::quota(None, None, None),
            connected: true,
            problem: None,
            frozen: false,
            memory_bytes: None,
            memory_resident_bytes: None,
            pages: None,
            charged_bytes: None,
        }
    }

    fn report(state: &str, mismatches: i64) -> api::DriverReport {
        api::DriverReport {
            version: "1.0.0".into(),
            state: state.into(),
            kernel: "6.12".into(),
            hooks: 0,
            file_systems: String::new(),
            memory_bytes: 0,
            index_pages: 0,
            puts: 0,
            puts_dropped: 0,
            gets: 0,
            hits: 0,
            late: 3,
            mismatches,
            invalidations: 0,
            get_latency: None,
        }
    }

    fn state(findings: &[Finding], check: &str) -> State {
        let found = findings.iter().find(|finding| finding.check == check);
        let found = found.unwrap_or_else(|| {
            panic!("doctor has no finding for check {check} among {findings:#?}")
        });
        assert_eq!(
            found.state != State::Good,
            found.remedy.is_some(),
            "a good finding has a remedy, or a finding that is not good has none: {found:?}"
        );
        found.state
    }

    #[test]
    fn doctor_finds_each_fault_of_the_daemon() {
        let reply = reply(vec![]);
        let (mut daemon, mut pool) = (reply.daemon, reply.pool);
        daemon.version = env!("CARGO_PKG_VERSION").into();
        for finding in check_daemon(&daemon, &pool) {
            assert_eq!(
                finding.state,
                State::Good,
                "a healthy daemon has a finding: {finding:?}"
            );
        }
        daemon.version = "0.0.1".into();
        (pool.size_bytes, pool.configured_bytes) = (1 << 20, 2 << 20);
        (pool.reserved_bytes, pool.hash_mismatches) = (3 << 20, 1);
        (daemon.memory_regions, daemon.memory_regions_max) = (801, 1000);
        let found = check_daemon(&daemon, &pool);
        assert_eq!(state(&found, "daemon"), State::Warning);
        assert_eq!(state(&found, "memory-regions"), State::Warning);
        daemon.memory_regions = 800;
        assert_eq!(memory_regions(&daemon).state, State::Good);
        assert_eq!(state(&found, "host-memory"), State::Warning);
        // The remedy depends on the more frequent reason.
        for (shrinks, stalls, limit) in [(9, 2, false), (9, 7, true)] {
            (pool.host_shrinks, pool.host_shrinks_stalls) = (shrinks, stalls);
            let found = host_memory(&pool);
            let counts = format!("{} times because too little", shrinks - stalls);
            assert!(found.text.contains(&counts), "{}", found.text);
            let remedy = found.remedy.expect("the warning has no remedy");
            assert_eq!(remedy.contains("raise its memory limit"), limit, "{remedy}");
        }
        assert_eq!(state(&found, "reserves"), State::Warning);
        assert_eq!(state(&found, "bytes"), State::Fault);
    }

    #[test]
    fn doctor_finds_a_daemon_that_does_not_count_the_arc() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let root = directory.path();
        let mut pool = reply(vec![]).pool;
        let mut check = |available, arc| {
            (pool.host_available_bytes, pool.host_arc_bytes) = (available, arc);
            state(&[arc_counted(root, &pool)], "arc-counted")
        };
        assert_eq!(check(1 << 30, 0), State::Good);
        let file = root.join("proc/spl/kstat/zfs/arcstats");
        fs::create_dir_all(file.parent().expect("the path has no parent directory"))
            .expect("cannot create the directory");
        fs::write(file, "c_min 4 1\nsize 4 5\n").expect("cannot write the file");
        assert_eq!(check(1 << 30, 0), State::Warning);
        assert_eq!(check(1 << 30, 4), State::Good);
        assert_eq!(check(0, 0), State::Good);
    }

    #[test]
    fn doctor_finds_returned_memory_that_the_host_does_not_have() {
        let stats = reply(vec![]);
        let (mut daemon, mut pool) = (stats.daemon, stats.pool);
        pool.reserved_bytes = 7;
        let mut check = |returned: i64, available: i64, held: i64, swap: i64| {
            (daemon.memory_bytes, daemon.memory_resident_bytes) = (returned + 5, 5);
            (pool.host_available_bytes, pool.held_bytes) = (available, held + 7);
            pool.host_swap_free_bytes = swap;
            let finding = returned_memory(&daemon, &pool);
            assert_eq!(finding.text.starts_with("not known"), available == 0);
            state(&[finding], "returned-memory")
        };
        assert_eq!(check(3 << 20, 1 << 20, 2 << 20, 0), State::Good);
        assert_eq!(check((3 << 20) + 1, 1 << 20, 2 << 20, 0), State::Warning);
        assert_eq!(check((3 << 20) + 1, 0, 2 << 20, 0), State::Good);
        assert_eq!(check((3 << 20) + 1024, 1 << 20, 2 << 20, 1024), State::Good);
    }

    #[test]
    fn doctor_finds_a_unit_that_failed_or_restarts_again_and_again() {
        let shown = |state: &str, status: u8, restarts: u64| {
            format!("NRestarts={restarts}\nExecMainStatus={status}\nActiveState={state}\n")
        };
        for (unit_state, status, restarts, wanted, part) in [
            ("active", 0, 0, State::Good, ""),
            ("inactive", 0, 0, State::Good, ""),
            ("active", 0, RESTARTS_WARNED - 1, State::Good, ""),
            ("active", 0, RESTARTS_WARNED, State::Warning, "3 times"),
            ("activating", 1, 9, State::Warning, "9 times"),
            ("failed", 78, 0, State::Fault, "configuration is invalid"),
            ("failed", 2, 0, State::Fault, "options are invalid"),
            ("failed", 1, 0, State::Fault, "with status 1"),
            // An operator has corrected the configuration and started the daemon.
            ("active", 78, 0, State::Good, ""),
        ] {
            let found = [check_unit(&shown(unit_state, status, restarts))];
            assert_eq!(state(&found, "unit"), wanted, "{found:?}");
            assert!(found[0].text.contains(part), "{found:?}");
        }
    }

    #[test]
    fn doctor_finds_a_configuration_with_which_the_daemon_cannot_start() {
        let found = check_configuration(Some(78), b"tmemd: line 1: unknown key\n");
        assert_eq!(found.state, State::Fault);
        assert!(found.text.ends_with("tmemd: line 1: unknown key"));
        // An older daemon does not know the option, and a signal may end the process.
        for status in [Some(0), Some(2), None] {
            assert_eq!(check_configuration(status, b"").state, State::Good);
        }
    }

    #[test]
    fn doctor_finds_each_fault_of_memory_and_sockets() {
        let mut daemon = reply(vec![]).daemon;
        for (memory_locked, wanted) in [(false, State::Fault), (true, State::Good)] {
            daemon.memory_locked = memory_locked;
            assert_eq!(state(&[locked(&daemon)], "memory-lock"), wanted);
        }
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let path = directory.path().join("socket");
        let vm = vm(&path);
        assert_eq!(
            vm_socket(&vm).state,
            State::Fault,
            "doctor reports no fault for a missing socket"
        );
        let _listener = UnixListener::bind(&path).expect("cannot bind the socket");
        for (mode, wanted) in [
            (0o660, State::Good),
            (0o600, State::Good),
            (0o060, State::Fault),
            (0o666, State::Warning),
        ] {
            fs::set_permissions(&path, fs::Permissions::from_mode(mode))
                .expect("cannot change the file's mode");
            assert_eq!(
                vm_socket(&vm).state,
                wanted,
                "doctor judges a VM's socket of mode {mode:o} wrongly"
            );
            if mode != 0o060 {
                assert_eq!(
                    control_socket(&path).state,
                    wanted,
                    "doctor judges a control socket of mode {mode:o} wrongly"
                );
            }
        }
        fs::remove_file(&path).expect("cannot remove the file");
        fs::write(&path, "").expect("cannot write the file");
        assert_eq!(
            vm_socket(&vm).state,
            State::Fault,
            "doctor reports no fault for a file in place of the VM's socket"
        );
    }

    #[test]
    fn doctor_finds_each_fault_of_a_vm() {
        let directory = tempfile::tempdir().expect("cannot create a temporary directory");
        let path = directory.path().join("socket");
        let _listener = UnixListener::bind(&path).expect("cannot bind the socket");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o660))
            .expect("cannot change the file's mode");
        let mut vm = vm(&path);
        let mut stats = stats_of("web", 0, 0, 0);
        for (reply, wanted) in [
            (None, State::Warning),
            (Some(report("on", 0)), State::Good),
            (Some(report("off", 0)), State::Warning),
            (Some(report("offline", 0)), State::Warning),
            (Some(report("tripped", 0)), State::Warning),
            (Some(report("poisoned", 0)), State::Fault),
            (Some(report("on", 1)), State::Fault),
        ] {
            stats.driver = reply;
            assert_eq!(
                state(&check_vm(&vm, &stats), "driver"),
                wanted,
                "doctor judges the driver's state wrongly: {:?}",
                stats.driver
            );
        }
        (vm.frozen, vm.problem, stats.queues_stopped) = (true, Some("too\nmuch".into()), 2);
        let found = check_vm(&vm, &stats);
        assert_eq!(state(&found, "frozen"), State::Warning);
        assert_eq!(state(&found, "problem"), State::Fault);
        assert_eq!(state(&found, "virtqueues"), State::Warning);
        assert!(found.iter().all(|finding| !finding.text.contains('\n')));
        vm.connected = false;
        assert_eq!(state(&check_vm(&vm, &stats), "connected"), State::Warning);
    }
}
