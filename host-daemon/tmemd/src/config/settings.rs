// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The settings of the daemon, such as pool, sockets and VMs. This file parses and validates them,
//! so no later code has to check a setting again. Errors name the VM, the key and the value.

use crate::config::account::Account;
use crate::config::meminfo::host_memory_bytes;
use crate::memory::budget::{POOL_BYTES_MAX, VM_MEMORY_BYTES_MAX};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tmem_control::accounts::Kind;
use tmem_pool::Quota;

/// Maximum number of VMs: four times the number for which the daemon is designed. Each VM may need
/// a thread, and more than a hundred file descriptors and mappings.
pub const VMS_MAX: usize = 1024;
/// Maximum number of data workers (threads that answer guests' requests). Fewer workers already use
/// the complete memory bandwidth of a host.
pub const WORKERS_MAX: usize = 64;
/// Maximum number of background threads. Fewer threads already use the complete memory bandwidth of
/// a host.
pub const BACKGROUND_THREADS_MAX: usize = 64;
/// Largest number of background threads that is chosen by default. Eight threads compress pages
/// faster than guests put them.
const BACKGROUND_THREADS_DEFAULT_MAX: usize = 8;
/// Default weight of a VM.
pub const WEIGHT_DEFAULT: u32 = 100;
/// Maximum weight of a VM. A VM with weight 0 has no share of the memory that no VM has reserved.
pub const WEIGHT_MAX: u32 = 10_000;
/// Smallest permitted pool in bytes. A smaller pool would have space for little more than the
/// metadata of a few VMs.
pub const POOL_BYTES_MIN: u64 = 1 << 20;
/// Default size at which the recording of a trace ends. A trace of this size has about 10 million
/// events.
pub const TRACE_BYTES_DEFAULT: &str = "64MiB";
/// Default time for which a worker polls an empty virtqueue: twice the time from a kick to the
/// wake-up of a worker on another processor.
pub const POLL_MAX_DEFAULT: Duration = Duration::from_micros(50);
/// Longest permitted time of polling a virtqueue, in µs. Polling for longer is not worth the
/// processor time.
pub const POLL_US_MAX: u64 = 1000;
/// Maximum of the rate limit of a VM, in pages per second. It is more than a host can copy.
pub const VM_PAGES_PER_SECOND_MAX: u64 = 1_000_000_000;
/// Longest name of a VM or trust domain, in bytes.
pub const NAME_BYTES_MAX: usize = 64;

/// The complete configuration of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Size of the pool in bytes, metadata included.
    pub pool_size_bytes: u64,
    /// Number of data workers.
    pub workers: usize,
    /// Number of threads that deduplicate, compress and evict pages.
    pub background_threads: usize,
    /// How the data workers wait for work: the kernel interface and the polling time.
    pub waiting: Waiting,
    /// Pages per second that each VM may put, get and flush; 0 for no limit.
    pub vm_pages_per_second: u64,
    /// Path of the control interface's socket.
    pub control: PathBuf,
    /// Group that may use the control socket; None for the daemon's group.
    pub control_group: Option<Account>,
    /// Path of the control interface's read-only socket; None if there is no such socket.
    pub control_read_only: Option<PathBuf>,
    /// Group that may use the read-only socket; None for the daemon's group.
    pub control_read_only_group: Option<Account>,
    /// Run directory: it contains the sockets of VMs that are added while the daemon runs. Its
    /// subdirectory `vms/` is the VM store.
    pub run_directory: PathBuf,
    /// The VMs that the daemon serves from its start.
    pub vms: Vec<VmConfig>,
    /// Settings for shrinking the pool when the host is short of memory; None if the pool never
    /// shrinks for the host.
    pub pressure: Option<PressureConfig>,
    /// File and size of the trace of requests to record; None if no trace is recorded.
    pub trace: Option<TraceConfig>,
}

/// How a data worker waits for work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Kernel interface through which a worker waits for events.
    pub event_loop: EventLoop,
    /// Longest time for which a worker polls an empty virtqueue before it requests a kick
    /// (notification by the guest).
    pub poll_max: Duration,
}

impl Default for Waiting {
    fn default() -> Self {
        Waiting {
            event_loop: EventLoop::default(),
            poll_max: POLL_MAX_DEFAULT,
        }
    }
}

/// Kernel interface with which workers wait for events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum EventLoop {
    /// io_uring, or epoll if the kernel does not provide io_uring.
    #[default]
    Auto,
    /// epoll, even if the kernel provides io_uring.
    Epoll,
    /// io_uring; without it the daemon does not start.
    IoUring,
}

/// Settings for shrinking the pool when the host is short of memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PressureConfig {
    /// Memory in bytes that the pool leaves available on the host; 0 for none.
    pub host_free_min_bytes: u64,
    /// Path of the file that reports the host's available memory: `/proc/meminfo`, except in tests.
    pub meminfo: PathBuf,
    /// Path of the statistics of ZFS's ARC, see [`tmem_control::arcstats`]. The file need not exist.
    pub arcstats: PathBuf,
    /// Path of the pressure (PSI) file of the host or of a control group; None if the daemon does
    /// not watch waits for memory.
    pub stalls: Option<PathBuf>,
    /// Directory of the daemon's control group; None if its limits do not matter.
    pub group: Option<PathBuf>,
}

/// Settings of a trace of guests' requests that the daemon records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceConfig {
    /// Path of the trace's file. The daemon creates the file; it must not exist before.
    pub path: PathBuf,
    /// Size of the trace in bytes at which the recording ends.
    pub bytes_max: u64,
}

/// Settings of a VM that the daemon serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmConfig {
    /// Name of the VM in messages and statistics. No other VM has the same name.
    pub name: String,
    /// Path of the VM's vhost-user socket. No other VM has the same path.
    pub socket: PathBuf,
    /// User that the VM's QEMU runs as; None for the daemon's user. For a VM that is added while
    /// the daemon runs, the varlink call AddVm names this user.
    pub owner: Option<Account>,
    /// UUID of the VM in lower case, as libvirt knows it. No other VM has the same UUID.
    pub uuid: Option<String>,
    /// Trust domain of the VM. The pool stores equal pages of VMs of one trust domain once. If
    /// None, the VM shares pages with no other VM.
    pub trust_domain: Option<String>,
    /// Reserve, limit and weight of the VM.
    pub quota: Quota,
    /// Maximum size in bytes of the memory that the VM's QEMU shares with the daemon. For a VM that
    /// is added while the daemon runs, the varlink call AddVm may change it.
    pub memory_max_bytes: u64,
}

/// Reason why a configuration is invalid, as text for the operator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub String);

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the default number of data workers: half the processors, so that the other half is left
/// to the guests. The number is at least 2, because guests wait while workers copy and decompress
/// pages, and at most 8.
pub fn workers_default() -> usize {
    (processors() / 2).clamp(2, 8)
}

/// Returns the default number of background threads: a quarter of the processors, at most
/// [`BACKGROUND_THREADS_DEFAULT_MAX`]. No guest waits for these threads, but if there are too few
/// of them, the daemon refuses puts.
pub fn background_threads_default() -> usize {
    processors().div_ceil(4).min(BACKGROUND_THREADS_DEFAULT_MAX)
}

/// Returns the default of `host_free_min`, the memory that the pool leaves available on the host,
/// in bytes. The default is a 32nd of the host's memory, at most 1 GiB. With a 32nd available, the
/// kernel does not have to reclaim urgently. The host seldom uses 1 GiB within the 100 ms between
/// two readings of its memory.
pub fn host_free_min_default() -> u64 {
    (host_memory_bytes() / 32).min(1 << 30)
}

/// Parses the name of a VM or trust domain, which must be usable in a log line, a table and a
/// metric.
///
/// # Errors
/// The name is invalid; the text says why.
pub fn parse_name(text: &str) -> Result<String, String> {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.:@+".contains(c);
    if text.is_empty() || text.len() > NAME_BYTES_MAX || !text.chars().all(good) {
        return Err(format!(
            "must have 1 to {NAME_BYTES_MAX} letters, digits or any of - _ . : @ +"
        ));
    }
    Ok(text.into())
}

/// Parses a UUID and returns it in lower case.
///
/// # Errors
/// The text is no UUID.
pub fn parse_uuid(text: &str) -> Result<String, String> {
    let groups: Vec<&str> = text.split('-').collect();
    let lengths: Vec<usize> = groups.iter().map(|g| g.len()).collect();
    let hex = groups
        .iter()
        .all(|g| g.bytes().all(|b| b.is_ascii_hexdigit()));
    if lengths != [8, 4, 4, 4, 12] || !hex {
        return Err("is not a UUID, as in 01234567-89ab-cdef-0123-456789abcdef".into());
    }
    Ok(text.to_ascii_lowercase())
}

/// Checks the maximum size of a VM's memory in bytes, and returns it.
///
/// # Errors
/// The size is out of range.
pub fn check_memory_max(bytes: u64) -> Result<u64, String> {
    match bytes {
        1..=VM_MEMORY_BYTES_MAX => Ok(bytes),
        _ => Err(format!(
            "must be from 1 to {VM_MEMORY_BYTES_MAX} bytes ({}TiB)",
            VM_MEMORY_BYTES_MAX >> 40
        )),
    }
}

/// Checks the values of one VM's quota, without regard to other VMs.
///
/// # Errors
/// A value is invalid. The error names the key and the value.
pub fn check_quota(quota: &Quota) -> Result<(), String> {
    match quota.limit_bytes {
        Some(limit) if limit < quota.reserve_bytes => Err(format!(
            "limit={limit} is below reserve={}: the VM could never use its whole reserve",
            quota.reserve_bytes
        )),
        _ if quota.weight > WEIGHT_MAX => {
            Err(format!("weight={} is above {WEIGHT_MAX}", quota.weight))
        }
        _ => Ok(()),
    }
}

/// Returns the error text for a reserve of `reserve_bytes` of which only `available_bytes` fit into
/// the pool, because other VMs reserve the rest.
pub fn reserve_text(reserve_bytes: u64, available_bytes: u64) -> String {
    format!(
        "a reserve of {reserve_bytes} bytes does not fit: the other VMs' reserves leave {available_bytes} \
         bytes of the pool; lower a reserve or enlarge the pool"
    )
}

impl Config {
    /// Returns the configuration of a daemon for tests. Its pool is small and does not depend on
    /// the host's memory, and all its files are in `directory`. Each VM is written as
    /// `NAME[,KEY=VALUE...]`; its socket is `NAME.sock`.
    #[doc(hidden)]
    pub fn for_test(directory: &Path, vms: &[&str]) -> Config {
        let vm = |vm: &&str| {
            let name = vm.split(',').next().unwrap_or_default();
            let socket = directory.join(format!("{name}.sock"));
            let text = format!("name={vm},socket={}", socket.display());
            text.parse().expect("valid settings of a VM were refused")
        };
        Config {
            pool_size_bytes: 64 << 20,
            workers: 2,
            background_threads: 1,
            waiting: Waiting::default(),
            vm_pages_per_second: 0,
            control: directory.join("control"),
            control_group: None,
            control_read_only: Some(directory.join("read-only")),
            control_read_only_group: None,
            run_directory: directory.into(),
            vms: vms.iter().map(vm).collect(),
            pressure: None,
            trace: None,
        }
    }

    /// Checks settings that depend on each other, such as the pool size and the reserves of VMs.
    ///
    /// # Errors
    /// A setting contradicts another one. The error names the setting and the value.
    pub fn check(&self) -> Result<(), ConfigError> {
        let fault = |what: String| Err(ConfigError(what));
        if self.pool_size_bytes < POOL_BYTES_MIN {
            return fault(format!(
                "a pool of {} bytes is too small: the minimum is {POOL_BYTES_MIN} bytes",
                self.pool_size_bytes
            ));
        }
        if self.pool_size_bytes > POOL_BYTES_MAX {
            return fault(format!(
                "a pool of {} bytes is too large: the maximum is {POOL_BYTES_MAX} bytes, because \
                 the daemon needs address space for the memory of VMs",
                self.pool_size_bytes
            ));
        }
        if self.workers == 0 || self.workers > WORKERS_MAX {
            return fault(format!(
                "{} workers are configured: there must be 1 to {WORKERS_MAX}",
                self.workers
            ));
        }
        if self.background_threads == 0 || self.background_threads > BACKGROUND_THREADS_MAX {
            return fault(format!(
                "background_threads = {}: there must be 1 to {BACKGROUND_THREADS_MAX}",
                self.background_threads
            ));
        }
        let poll_us = self.waiting.poll_max.as_micros();
        if poll_us > u128::from(POLL_US_MAX) {
            return fault(format!(
                "poll_max_us = {poll_us}: the value must be 0 to {POLL_US_MAX}"
            ));
        }
        if self.vm_pages_per_second > VM_PAGES_PER_SECOND_MAX {
            return fault(format!(
                "vm_pages_per_second = {}: the value must be 0 to {VM_PAGES_PER_SECOND_MAX}",
                self.vm_pages_per_second
            ));
        }
        if self.vms.len() > VMS_MAX {
            return fault(format!(
                "{} VMs are configured: at most {VMS_MAX} are supported",
                self.vms.len()
            ));
        }
        for (number, vm) in self.vms.iter().enumerate() {
            check_quota(&vm.quota)
                .map_err(|what| ConfigError(format!("VM {:?}: {what}", vm.name)))?;
            let named = |what: &str| {
                ConfigError(format!("VM {:?}: another VM has the same {what}", vm.name))
            };
            for other in &self.vms[..number] {
                if other.name == vm.name {
                    return Err(named("name"));
                }
                if vm.uuid.is_some() && other.uuid == vm.uuid {
                    return Err(named(&format!("uuid={}", vm.uuid.as_deref().unwrap_or(""))));
                }
            }
        }
        if let (Some(group), None) = (&self.control_read_only_group, &self.control_read_only) {
            return fault(format!(
                "control_read_only_group = {:?}: there is no socket for this group: name one with \
                 control_read_only",
                group.name
            ));
        }
        let mut available_bytes = self.pool_size_bytes;
        for vm in &self.vms {
            // The sum of the reserves of all VMs must not exceed the pool.
            let reserve_bytes = vm.quota.reserve_bytes;
            let Some(left_bytes) = available_bytes.checked_sub(reserve_bytes) else {
                let what = reserve_text(reserve_bytes, available_bytes);
                return fault(format!("VM {:?}: {what}", vm.name));
            };
            available_bytes = left_bytes;
        }
        let mut sockets: Vec<&PathBuf> = vec![&self.control];
        sockets.extend(&self.control_read_only);
        sockets.extend(self.vms.iter().map(|vm| &vm.socket));
        for (number, socket) in sockets.iter().enumerate() {
            if sockets[..number].contains(socket) {
                return fault(format!("socket {} is given twice", socket.display()));
            }
        }
        Ok(())
    }

    /// Looks up the numeric ids of the configuration's users and groups, except of those that are
    /// known already.
    pub fn find_accounts(&mut self) -> Result<(), ConfigError> {
        for (key, group) in [
            ("control_group", &mut self.control_group),
            ("control_read_only_group", &mut self.control_read_only_group),
        ] {
            if let Some(group) = group {
                let found = group.find(Kind::Group);
                found.map_err(|what| ConfigError(format!("{key} = {:?}: {what}", group.name)))?;
            }
        }
        for vm in &mut self.vms {
            if let Some(owner) = &mut vm.owner {
                let found = owner.find(Kind::User);
                found.map_err(|what| {
                    ConfigError(format!("VM {:?}: owner={}: {what}", vm.name, owner.name))
                })?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::budget::VM_MEMORY_BYTES_DEFAULT;

    #[test]
    fn a_vm_option_with_all_keys_is_parsed() {
        let vm: VmConfig =
            "socket=/run/a.sock,name=web-1,owner=qemu,uuid=01234567-89AB-cdef-0123-456789abcdef,\
                            trust_domain=debian,reserve=16MiB,limit=1GiB,weight=7,memory_max=2TiB"
                .parse()
                .expect("valid settings of a VM were refused");
        assert_eq!(
            vm,
            VmConfig {
                name: "web-1".into(),
                socket: "/run/a.sock".into(),
                owner: Some("qemu".parse().expect("the account name is empty")),
                uuid: Some("01234567-89ab-cdef-0123-456789abcdef".into()),
                trust_domain: Some("debian".into()),
                quota: Quota {
                    reserve_bytes: 16 << 20,
                    limit_bytes: Some(1 << 30),
                    weight: 7
                },
                memory_max_bytes: 2 << 40,
            }
        );
        let vm: VmConfig = "name=a,socket=s"
            .parse()
            .expect("valid settings of a VM were refused");
        assert_eq!(
            vm.quota,
            Quota {
                reserve_bytes: 0,
                limit_bytes: None,
                weight: WEIGHT_DEFAULT
            }
        );
        assert_eq!((vm.uuid, vm.trust_domain, vm.owner), (None, None, None));
        assert_eq!(vm.memory_max_bytes, VM_MEMORY_BYTES_DEFAULT);
    }

    #[test]
    fn errors_in_vm_settings_name_the_vm_key_and_value() {
        for (text, parts) in [
            (
                "name=a,socket=s,limit=12XB",
                &["name=a", "in `limit`", "\"XB\"", "512MiB"][..],
            ),
            (
                "name=a,socket=s,weight=10001",
                &["name=a", "weight=10001", "0 to 10000", "in `weight`"],
            ),
            ("name=a,socket=s,weight=-1", &["weight=-1"]),
            (
                "name=a,socket=s,memory_max=9TiB",
                &["name=a", "memory_max=9TiB", "8TiB", "in `memory_max`"],
            ),
            ("name=a,socket=s,memory_max=0B", &["memory_max=0B", "8TiB"]),
            ("name=a,socket=s,uuid=123", &["name=a", "uuid=123", "UUID"]),
            (
                "name=a,socket=s,color=red",
                &["name=a", "`color`", "`trust_domain`"],
            ),
            (
                "name=a,socket=s,socket=t",
                &["name=a", "socket is given twice"],
            ),
            ("name=a", &["\"name=a\"", "missing field `socket`"]),
            ("socket=s", &["socket=s", "missing field `name`"]),
            ("name=a b,socket=s", &["name=a b", "letters"]),
            ("name=a,socket=", &["socket=", "empty"]),
            ("name=a,socket=s,owner=", &["owner=", "empty"]),
            ("name=a,socket=s,owner=a,owner=b", &["owner=b", "twice"]),
            (
                "name=a,socket=s,trust_domain=",
                &["trust_domain=", "letters"],
            ),
            ("name=a,socket", &["\"socket\"", "key=value"]),
        ] {
            let Err(error) = text.parse::<VmConfig>() else {
                panic!("the invalid VM settings {text:?} were accepted");
            };
            let error = error.0;
            for part in parts {
                assert!(
                    error.contains(part),
                    "{text}: the error does not contain {part:?}: {error}"
                );
            }
        }
    }

    fn config(vms: &[&str]) -> Config {
        Config {
            control: "/c".into(),
            control_read_only: Some("/r".into()),
            vms: vms
                .iter()
                .map(|vm| vm.parse().expect("valid settings of a VM were refused"))
                .collect(),
            ..Config::for_test("/".as_ref(), &[])
        }
    }

    #[test]
    fn contradicting_settings_are_refused() {
        config(&["name=a,socket=/a", "name=b,socket=/b"])
            .check()
            .expect("a valid configuration was refused");
        let mut full = config(&["name=a,socket=/a,reserve=1MiB,limit=1MiB"]);
        full.pool_size_bytes = 1 << 20;
        full.check()
            .expect("reserves that take the whole pool were refused");
        let uuid = "uuid=01234567-89ab-cdef-0123-456789abcdef";
        for (config, part) in [
            (
                config(&["name=a,socket=/a", "name=a,socket=/b"]),
                "same name",
            ),
            (
                config(&["name=a,socket=/a", "name=b,socket=/a"]),
                "/a is given twice",
            ),
            (config(&["name=a,socket=/c"]), "/c is given twice"),
            (config(&["name=a,socket=/r"]), "/r is given twice"),
            (
                config(&[
                    &format!("name=a,socket=/a,{uuid}"),
                    &format!("name=b,socket=/b,{uuid}"),
                ]),
                "same uuid",
            ),
            (
                config(&[
                    "name=a,socket=/a,reserve=40MiB",
                    "name=b,socket=/b,reserve=25MiB",
                ]),
                "VM \"b\": a reserve of 26214400 bytes does not fit: the other VMs' reserves leave \
                 25165824",
            ),
            (
                config(&["name=a,socket=/a,reserve=2MiB,limit=1MiB"]),
                "VM \"a\": limit=1048576 is below reserve=2097152",
            ),
            (
                Config {
                    vm_pages_per_second: VM_PAGES_PER_SECOND_MAX + 1,
                    ..config(&[])
                },
                "vm_pages_per_second = 1000000001",
            ),
            (
                Config {
                    waiting: Waiting {
                        poll_max: Duration::from_micros(POLL_US_MAX + 1),
                        ..Waiting::default()
                    },
                    ..config(&[])
                },
                "poll_max_us = 1001",
            ),
            (
                Config {
                    workers: 0,
                    ..config(&[])
                },
                "0 workers",
            ),
            (
                Config {
                    workers: 65,
                    ..config(&[])
                },
                "65 workers",
            ),
            (
                Config {
                    background_threads: 0,
                    ..config(&[])
                },
                "background_threads = 0: there must be 1 to 64",
            ),
            (
                Config {
                    background_threads: 65,
                    ..config(&[])
                },
                "background_threads = 65: there must be 1 to 64",
            ),
            (
                Config {
                    control_read_only: None,
                    control_read_only_group: Some(
                        "kvm".parse().expect("the account name is empty"),
                    ),
                    ..config(&[])
                },
                "control_read_only_group = \"kvm\": there is no socket",
            ),
            (
                Config {
                    pool_size_bytes: 4096,
                    ..config(&[])
                },
                "4096 bytes",
            ),
            (
                Config {
                    pool_size_bytes: POOL_BYTES_MAX + 1,
                    ..config(&[])
                },
                "too large",
            ),
        ] {
            let Err(ConfigError(error)) = config.check() else {
                panic!("an invalid configuration was accepted; its error should contain {part:?}");
            };
            assert!(
                error.contains(part),
                "the error does not contain {part:?}: {error}"
            );
        }
    }

    #[test]
    fn unknown_users_and_groups_are_named_in_errors() {
        let some = |name: &str| Some(name.parse().expect("the account name is empty"));
        let mut good = Config {
            control_group: some("root"),
            control_read_only_group: some("17"),
            ..config(&["name=a,socket=/a,owner=root", "name=b,socket=/b"])
        };
        good.find_accounts()
            .expect("the host lacks an account that the test uses");
        let number = |account: &Option<Account>| account.as_ref().and_then(Account::number);
        assert_eq!(number(&good.control_group), Some(0));
        assert_eq!(number(&good.control_read_only_group), Some(17));
        assert_eq!(number(&good.vms[0].owner), Some(0));
        for name in ["nobody-such", "4294967295"] {
            let of_control = Config {
                control_group: some(name),
                ..config(&[])
            };
            let of_read_only = Config {
                control_read_only_group: some(name),
                ..config(&[])
            };
            let of_vm = config(&[&format!("name=a,socket=/a,owner={name}")]);
            for (mut config, key, file) in [
                (of_control, "control_group = ", "getent group"),
                (of_read_only, "control_read_only_group = ", "getent group"),
                (of_vm, "VM \"a\": owner=", "getent passwd"),
            ] {
                config.check().expect(
                    "check() refused a configuration with an unknown account name; only \
                     find_accounts() may look names up",
                );
                let Err(ConfigError(error)) = config.find_accounts() else {
                    panic!("account {name:?} of {key:?}, which no host has, was found");
                };
                for part in [key, name, file, "create the account"] {
                    assert!(
                        error.contains(part),
                        "the error does not contain {part:?}: {error}"
                    );
                }
            }
        }
    }
}
