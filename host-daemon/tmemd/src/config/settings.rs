// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What the daemon is told: pool, sockets, VMs. Parsed and checked here, with errors that name the
//! VM, the key and the value, so that nothing later has to doubt them.

use crate::config::account::{Account, GROUPS, USERS};
use crate::config::meminfo::host_memory_bytes;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;
use tmem_pool::Quota;

/// VMs of a daemon at most: four times what it is built for; each may need a thread and some
/// hundred file descriptors and mappings.
pub const VMS_MAX: usize = 1024;
/// Data workers at most: more than memory bandwidth can feed.
pub const WORKERS_MAX: usize = 64;
/// Threads for background work at most: more than memory bandwidth can feed, too.
pub const BACKGROUND_THREADS_MAX: usize = 64;
/// And if nothing is said: compression by so many is faster than guests put.
const BACKGROUND_THREADS_DEFAULT_MAX: usize = 8;
/// Weight of a VM that is told none.
pub const WEIGHT_DEFAULT: u32 = 100;
/// Weights go from 0, no share of what is not reserved, to this.
pub const WEIGHT_MAX: u32 = 10_000;
/// The smallest pool: below it, metadata of a few VMs is all there is room for.
pub const POOL_BYTES_MIN: u64 = 1 << 20;
/// A trace ends at this size if it is told none: some ten million events.
pub const TRACE_BYTES_DEFAULT: &str = "64MiB";
/// Time that a worker looks at a virtqueue that has run dry, if nothing is said: twice what a kick and the
/// wake-up by it take between two processors.
pub const POLL_MAX_DEFAULT: Duration = Duration::from_micros(50);
/// No pause that is longer is worth a processor.
pub const POLL_US_MAX: u64 = 1000;
/// Pages in a second that an operator can allow each VM; more than a host can copy.
pub const VM_PAGES_PER_SECOND_MAX: u64 = 1_000_000_000;
/// The longest name of a VM or trust domain, in bytes.
pub const NAME_BYTES_MAX: usize = 64;

/// Everything that a daemon is started with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Memory of the pool, metadata included.
    pub pool_size_bytes: u64,
    /// Data workers.
    pub workers: usize,
    /// Threads that find equal pages, compress, and make room.
    pub background_threads: usize,
    /// How they wait for work.
    pub waiting: Waiting,
    /// Pages that each VM may ask for in a second; 0: as many as it likes.
    pub vm_pages_per_second: u64,
    /// Socket of the control interface.
    pub control: PathBuf,
    /// Whose members may use it; None: the daemon's.
    pub control_group: Option<Account>,
    /// Socket of its methods that only read.
    pub control_read_only: Option<PathBuf>,
    /// Whose members may use that one; None: the daemon's.
    pub control_read_only_group: Option<Account>,
    /// Where the sockets of VMs that are added lie, and in `vms/` what they were added with.
    pub run_folder: PathBuf,
    /// The VMs served from the start.
    pub vms: Vec<VmConfig>,
    /// The pool gives way to the host; None: it never does.
    pub pressure: Option<PressureConfig>,
    /// Where to record what guests ask, if at all.
    pub trace: Option<TraceConfig>,
}

/// How a worker waits for work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// What it sleeps in.
    pub event_loop: EventLoop,
    /// How long it looks at a virtqueue that has run dry, at most.
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

/// What a worker sleeps in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EventLoop {
    /// io_uring, or epoll where the kernel does not give it.
    #[default]
    Auto,
    /// epoll.
    Epoll,
    /// io_uring, or the daemon does not start.
    IoUring,
}

impl std::str::FromStr for EventLoop {
    type Err = String;

    fn from_str(text: &str) -> Result<EventLoop, String> {
        match text {
            "auto" => Ok(EventLoop::Auto),
            "epoll" => Ok(EventLoop::Epoll),
            "io_uring" => Ok(EventLoop::IoUring),
            _ => Err("write auto, epoll or io_uring".into()),
        }
    }
}

/// When the pool gives way to the host's other users of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PressureConfig {
    /// So much should be available on the host.
    pub host_free_min_bytes: u64,
    /// Where the host tells what is.
    pub meminfo: PathBuf,
    /// Where the host, or a control group, tells how long tasks waited for memory.
    pub stalls: Option<PathBuf>,
}

/// A trace to record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceConfig {
    /// Its file, which is not there yet.
    pub path: PathBuf,
    /// It ends there.
    pub bytes_max: u64,
}

/// A VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VmConfig {
    /// For people and statistics; unique.
    pub name: String,
    /// vhost-user socket; unique.
    pub socket: PathBuf,
    /// Whom its QEMU runs as; None: the daemon's user, or of one that is added what AddVm says.
    pub owner: Option<Account>,
    /// As libvirt knows it, in lower case; unique.
    pub uuid: Option<String>,
    /// VMs of equal domains share equal pages; None shares with nobody.
    pub trust_domain: Option<String>,
    /// Its part of the pool.
    pub quota: Quota,
}

/// What is wrong with a configuration; a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError(pub String);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Workers if nothing is said: they copy pages in and decompress them, while a guest waits, so two at
/// least; and no more than half of the processors, which are the guests'.
pub fn workers_default() -> usize {
    (processors() / 2).clamp(2, 8)
}

/// Threads for background work if nothing is said: a quarter of the processors, since nobody waits for
/// it but puts that are refused meanwhile.
pub fn background_threads_default() -> usize {
    processors().div_ceil(4).min(BACKGROUND_THREADS_DEFAULT_MAX)
}

/// Memory to leave available if nothing is said: a 32nd of the host's, in which the kernel still
/// reclaims without haste, but no more than 1 GiB, which outlasts the second between two looks.
pub fn host_free_min_default() -> u64 {
    (host_memory_bytes() / 32).min(1 << 30)
}

/// Parses a size: a whole number of bytes with an optional unit B, KiB, MiB, GiB or TiB.
pub fn parse_size(text: &str) -> Result<u64, ConfigError> {
    tmem_control::size::parse(text).map_err(ConfigError)
}

/// Parses a name that can stand in a log line, a table and a metric.
pub fn parse_name(text: &str) -> Result<String, String> {
    let good = |c: char| c.is_ascii_alphanumeric() || "-_.:@+".contains(c);
    if text.is_empty() || text.len() > NAME_BYTES_MAX || !text.chars().all(good) {
        return Err(format!(
            "must have 1 to {NAME_BYTES_MAX} letters, digits or any of - _ . : @ +"
        ));
    }
    Ok(text.into())
}

/// Parses a UUID; gives it back in lower case.
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

impl std::str::FromStr for VmConfig {
    type Err = ConfigError;

    /// Parses `socket=PATH,name=NAME[,owner=...][,uuid=...][,trust-domain=...][,reserve=...]
    /// [,limit=...][,weight=...]`. A path with a comma cannot be given.
    fn from_str(text: &str) -> Result<VmConfig, ConfigError> {
        let named = text
            .split(',')
            .find_map(|pair| pair.strip_prefix("name="))
            .map_or_else(|| format!("VM {text:?}"), |name| format!("VM {name:?}"));
        let fault = |what: String| ConfigError(format!("{named}: {what}"));
        let (mut name, mut socket, mut uuid, mut trust_domain) = (None, None, None, None);
        let (mut owner, mut reserve, mut limit, mut weight) = (None, None, None, None);
        for pair in text.split(',') {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(fault(format!("{pair:?} is not of the form key=value")));
            };
            let fault = |what: String| fault(format!("{key}={value}: {what}"));
            let twice = match key {
                "name" => name.replace(parse_name(value).map_err(fault)?).is_some(),
                "socket" if value.is_empty() => return Err(fault("is empty".into())),
                "socket" => socket.replace(PathBuf::from(value)).is_some(),
                "owner" => owner.replace(value.parse().map_err(fault)?).is_some(),
                "uuid" => uuid.replace(parse_uuid(value).map_err(fault)?).is_some(),
                "trust-domain" => trust_domain
                    .replace(parse_name(value).map_err(fault)?)
                    .is_some(),
                "reserve" => reserve
                    .replace(parse_size(value).map_err(|e| fault(e.0))?)
                    .is_some(),
                "limit" => limit
                    .replace(parse_size(value).map_err(|e| fault(e.0))?)
                    .is_some(),
                "weight" => {
                    let number = value.parse().ok().filter(|weight| *weight <= WEIGHT_MAX);
                    let number = number.ok_or_else(|| {
                        fault(format!("is not a whole number from 0 to {WEIGHT_MAX}"))
                    })?;
                    weight.replace(number).is_some()
                }
                _ => {
                    return Err(fault(
                        "is no key of a VM; there are socket, name, owner, uuid, trust-domain, \
                         reserve, limit and weight"
                            .into(),
                    ));
                }
            };
            if twice {
                return Err(fault("is given twice".into()));
            }
        }
        let quota = Quota {
            reserve_bytes: reserve.unwrap_or(0),
            limit_bytes: limit,
            weight: weight.unwrap_or(WEIGHT_DEFAULT),
        };
        check_quota(&quota).map_err(&fault)?;
        Ok(VmConfig {
            name: name.ok_or_else(|| fault("name=NAME is missing".into()))?,
            socket: socket.ok_or_else(|| fault("socket=PATH is missing".into()))?,
            owner,
            uuid,
            trust_domain,
            quota,
        })
    }
}

/// What makes a quota senseless in itself.
pub fn check_quota(quota: &Quota) -> Result<(), String> {
    match quota.limit_bytes {
        Some(limit) if limit < quota.reserve_bytes => Err(format!(
            "limit={limit} is below reserve={}: it could never use its reserve",
            quota.reserve_bytes
        )),
        _ if quota.weight > WEIGHT_MAX => {
            Err(format!("weight={} is above {WEIGHT_MAX}", quota.weight))
        }
        _ => Ok(()),
    }
}

/// What is wrong with a reserve beside others.
pub fn reserve_text(reserve_bytes: u64, available_bytes: u64) -> String {
    format!(
        "a reserve of {reserve_bytes} bytes does not fit: the other VMs' reserves leave {available_bytes} \
         bytes of the pool; lower a reserve or enlarge the pool"
    )
}

impl Config {
    /// Checks what no single value shows.
    pub fn check(&self) -> Result<(), ConfigError> {
        let fault = |what: String| Err(ConfigError(what));
        if self.pool_size_bytes < POOL_BYTES_MIN {
            return fault(format!(
                "a pool of {} bytes is too small: it must have at least {POOL_BYTES_MIN}",
                self.pool_size_bytes
            ));
        }
        if self.workers == 0 || self.workers > WORKERS_MAX {
            return fault(format!(
                "{} workers: there must be 1 to {WORKERS_MAX}",
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
                "poll_max_us = {poll_us}: it can be 0 to {POLL_US_MAX}"
            ));
        }
        if self.vms.len() > VMS_MAX {
            return fault(format!("{} VMs: there can be {VMS_MAX}", self.vms.len()));
        }
        for (number, vm) in self.vms.iter().enumerate() {
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
                "control_read_only_group = {:?}: there is no socket to give it: name one with control_read_only",
                group.name
            ));
        }
        let mut available_bytes = self.pool_size_bytes;
        for vm in &self.vms {
            // All of it can be used: no limit is below it.
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

    /// Looks up the users and groups that it names, those that were not yet.
    ///
    /// # Errors
    /// There is no such one.
    pub fn find_accounts(&mut self) -> Result<(), ConfigError> {
        for (key, group) in [
            ("control_group", &mut self.control_group),
            ("control_read_only_group", &mut self.control_read_only_group),
        ] {
            if let Some(group) = group {
                let found = group.find(GROUPS);
                found.map_err(|what| ConfigError(format!("{key} = {:?}: {what}", group.name)))?;
            }
        }
        for vm in &mut self.vms {
            if let Some(owner) = &mut vm.owner {
                let found = owner.find(USERS);
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

    #[test]
    fn sizes() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("7B", 7),
            ("1KiB", 1024),
            ("256MiB", 256 << 20),
            ("3GiB", 3 << 30),
            ("2TiB", 2 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in [
            "",
            "MiB",
            "-1",
            "1.5GiB",
            "1 GiB",
            "1GB",
            "1G",
            "99999999TiB",
            "0x10",
            "1é",
        ] {
            let error = parse_size(text).expect_err(text).0;
            assert!(
                error.contains(&format!("{text:?}")) && error.contains("512MiB"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_vm_in_full() {
        let vm: VmConfig =
            "socket=/run/a.sock,name=web-1,owner=qemu,uuid=01234567-89AB-cdef-0123-456789abcdef,\
                            trust-domain=debian,reserve=16MiB,limit=1GiB,weight=7"
                .parse()
                .expect("good");
        assert_eq!(
            vm,
            VmConfig {
                name: "web-1".into(),
                socket: "/run/a.sock".into(),
                owner: Some("qemu".parse().expect("a name")),
                uuid: Some("01234567-89ab-cdef-0123-456789abcdef".into()),
                trust_domain: Some("debian".into()),
                quota: Quota {
                    reserve_bytes: 16 << 20,
                    limit_bytes: Some(1 << 30),
                    weight: 7
                },
            }
        );
        let vm: VmConfig = "name=a,socket=s".parse().expect("good");
        assert_eq!(
            vm.quota,
            Quota {
                reserve_bytes: 0,
                limit_bytes: None,
                weight: WEIGHT_DEFAULT
            }
        );
        assert_eq!((vm.uuid, vm.trust_domain, vm.owner), (None, None, None));
    }

    #[test]
    fn errors_name_vm_key_and_value() {
        for (text, parts) in [
            (
                "name=a,socket=s,limit=12XB",
                &["\"a\"", "limit=12XB", "XB"][..],
            ),
            (
                "name=a,socket=s,weight=10001",
                &["\"a\"", "weight=10001", "10000"],
            ),
            ("name=a,socket=s,weight=-1", &["weight=-1"]),
            ("name=a,socket=s,uuid=123", &["\"a\"", "uuid=123", "UUID"]),
            (
                "name=a,socket=s,color=red",
                &["\"a\"", "color=red", "trust-domain"],
            ),
            ("name=a,socket=s,socket=t", &["\"a\"", "socket=t", "twice"]),
            (
                "name=a,socket=s,reserve=2MiB,limit=1MiB",
                &["\"a\"", "1048576", "2097152"],
            ),
            ("name=a", &["\"a\"", "socket=PATH"]),
            ("socket=s", &["socket=s", "name=NAME"]),
            ("name=a b,socket=s", &["name=a b", "letters"]),
            ("name=a,socket=", &["socket=", "empty"]),
            ("name=a,socket=s,owner=", &["owner=", "empty"]),
            ("name=a,socket=s,owner=a,owner=b", &["owner=b", "twice"]),
            (
                "name=a,socket=s,trust-domain=",
                &["trust-domain=", "letters"],
            ),
            ("name=a,socket", &["\"socket\"", "key=value"]),
        ] {
            let error = text.parse::<VmConfig>().expect_err(text).0;
            for part in parts {
                assert!(error.contains(part), "{text}: {error} lacks {part}");
            }
        }
    }

    fn config(vms: &[&str]) -> Config {
        Config {
            pool_size_bytes: 64 << 20,
            workers: 2,
            background_threads: 1,
            waiting: Waiting::default(),
            vm_pages_per_second: 0,
            control: "/c".into(),
            control_group: None,
            control_read_only: Some("/r".into()),
            control_read_only_group: None,
            run_folder: "/".into(),
            vms: vms.iter().map(|vm| vm.parse().expect("good")).collect(),
            pressure: None,
            trace: None,
        }
    }

    #[test]
    fn whole_configurations() {
        config(&["name=a,socket=/a", "name=b,socket=/b"])
            .check()
            .expect("good");
        let mut full = config(&["name=a,socket=/a,reserve=1MiB,limit=1MiB"]);
        full.pool_size_bytes = 1 << 20;
        full.check().expect("all of it");
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
                "VM \"b\": a reserve of 26214400 bytes does not fit: the other VMs' reserves leave 25165824",
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
                    control_read_only_group: Some("kvm".parse().expect("a name")),
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
        ] {
            let error = config.check().expect_err(part).0;
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn accounts_that_are_not_there_are_named() {
        let some = |name: &str| Some(name.parse().expect("a name"));
        let mut good = Config {
            control_group: some("root"),
            control_read_only_group: some("17"),
            ..config(&["name=a,socket=/a,owner=root", "name=b,socket=/b"])
        };
        good.find_accounts().expect("every host has them");
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
                (of_control, "control_group = ", GROUPS),
                (of_read_only, "control_read_only_group = ", GROUPS),
                (of_vm, "VM \"a\": owner=", USERS),
            ] {
                config.check().expect("it looks nothing up");
                let error = config.find_accounts().expect_err(key).0;
                for part in [key, name, file, "create it"] {
                    assert!(error.contains(part), "{error} lacks {part}");
                }
            }
        }
    }
}
