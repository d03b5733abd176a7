// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The configuration file, `/etc/virtio-tmem/tmemd.toml`. A misspelt key is an error that suggests
//! the right one.
//!
//! [`KEYS`] is the source: tests compare docs/configuration.md and tmemd.toml with it. Out of
//! scope: keys that only work in some cases.

use crate::config::account::Account;
use crate::config::settings::{
    BACKGROUND_THREADS_MAX, ConfigError, EventLoop, POLL_US_MAX, VM_PAGES_PER_SECOND_MAX, VmConfig,
};
use std::path::{Path, PathBuf};
use toml::{Table, Value};

/// Default path of the file.
pub const DEFAULT_PATH: &str = "/etc/virtio-tmem/tmemd.toml";

/// Maximum size of the file in bytes; 1,024 VMs take some 200 KiB.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Maximum edit distance of a suggestion.
const MISSPELT_MAX: usize = 3;

/// A key of the file.
#[derive(Debug)]
pub struct Key {
    /// Its name.
    pub name: &'static str,
    /// The unit or type of its value.
    pub unit: &'static str,
    /// Its default.
    pub default: &'static str,
    /// Its effect.
    pub meaning: &'static str,
    /// True if a reload applies it, false if the next start does.
    pub reloads: bool,
}

const fn key(
    name: &'static str,
    (unit, default): (&'static str, &'static str),
    reloads: bool,
    meaning: &'static str,
) -> Key {
    Key {
        name,
        unit,
        default,
        meaning,
        reloads,
    }
}

/// All keys of the file.
#[rustfmt::skip]
pub const KEYS: &[Key] = &[
    key("pool_size", ("size", "none: it must be given"), true, "size of the pool, including metadata"),
    key("host_free_min", ("size", "a 32nd of the host, at most 1GiB"), true, "memory that the pool leaves available on the host. 0: none; if `memory_pressure` is `none` as well, the pool never shrinks for the host"),
    key("memory_pressure", ("path, or none", "/proc/pressure/memory"), false, "pressure (PSI) file that shows how long tasks wait for memory: the host's or that of a control group. The pool also shrinks when tasks wait"),
    key("workers", ("threads", "half the processors, 2 to 8"), false, "threads that answer requests"),
    key("background_threads", ("1 to 64", "a quarter of the processors, 1 to 8"), false, "threads that find equal pages, compress and release memory while no guest waits. With too few threads, `refused nursery` grows"),
    key("event_loop", ("auto, epoll or io_uring", "auto"), false, "how workers wait for events. auto: io_uring, or epoll if the kernel does not allow io_uring"),
    key("poll_max_us", ("0 to 1000", "50"), false, "µs that a worker polls an empty virtqueue before it requests a kick, if the guest's last pause was that short. 0: never"),
    key("vm_pages_per_second", ("0 to 1000000000", "0"), true, "pages that each VM may put and get in a second. Puts and gets above it are refused or missed at once. Flushes count, too, and are always executed. 0: no limit"),
    key("control", ("path", "/run/virtio-tmem/control"), false, "socket of the control interface"),
    key("control_group", ("text", "the daemon's group"), false, "group whose members may use the control socket: its name in /etc/group, or its number"),
    key("control_read_only", ("path, or none", "the path of `control` with -ro appended"), false, "read-only socket of the control interface"),
    key("control_read_only_group", ("text", "the daemon's group"), false, "group whose members may use the read-only socket. Use a group without other rights"),
    key("run_directory", ("path", "the directory of `control`"), false, "run directory: directory of the sockets of VMs that are added, and of the VM store"),
    key("log", ("filter", "info"), true, "log level error, warn, info or debug, or a filter such as `info,tmemd::host::pressure=debug`. The environment variable TMEMD_LOG takes precedence"),
    key("vm", ("tables", "none"), true, "VMs that are served from the start, one `[[vm]]` table each; libvirt's hook adds others. A reload applies only their quotas"),
];

/// All keys of a `[[vm]]`.
#[rustfmt::skip]
pub const VM_KEYS: &[Key] = &[
    key("name", ("text", "none: it must be given"), false, "name of the VM: 1 to 64 letters, digits or any of - _ . : @ +"),
    key("socket", ("path", "none: it must be given"), false, "path of the VM's vhost-user socket"),
    key("owner", ("text", "the daemon's user"), false, "user of the VM's QEMU, who may connect: a name in /etc/passwd, or a number"),
    key("uuid", ("text", "none"), false, "UUID of the libvirt domain"),
    key("trust_domain", ("text", "none: it shares with nobody"), false, "trust domain: VMs with the same name share equal pages"),
    key("reserve", ("size", "0"), true, "memory to which the VM is entitled before others share the rest"),
    key("limit", ("size", "none"), true, "maximum charge of the VM"),
    key("weight", ("0 to 10000", "100"), true, "the VM's share of memory that is not reserved"),
];

/// The content of a file. A key that the file does not contain is None.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct File {
    /// See [`KEYS`].
    pub pool_size: Option<u64>,
    /// See [`KEYS`].
    pub host_free_min: Option<u64>,
    /// See [`KEYS`].
    pub memory_pressure: Option<PathBuf>,
    /// See [`KEYS`].
    pub workers: Option<usize>,
    /// See [`KEYS`].
    pub background_threads: Option<usize>,
    /// See [`KEYS`].
    pub event_loop: Option<EventLoop>,
    /// See [`KEYS`].
    pub poll_max_us: Option<u64>,
    /// See [`KEYS`].
    pub vm_pages_per_second: Option<u64>,
    /// See [`KEYS`].
    pub control: Option<PathBuf>,
    /// See [`KEYS`].
    pub control_group: Option<Account>,
    /// See [`KEYS`].
    pub control_read_only: Option<PathBuf>,
    /// See [`KEYS`].
    pub control_read_only_group: Option<Account>,
    /// See [`KEYS`].
    pub run_directory: Option<PathBuf>,
    /// See [`KEYS`].
    pub log: Option<String>,
    /// See [`VM_KEYS`].
    pub vms: Vec<VmConfig>,
}

/// Returns the most similar key, if one is similar enough.
fn nearest<'a>(name: &str, keys: &'a [Key]) -> Option<&'a str> {
    let distance = |key: &&Key| {
        strsim::damerau_levenshtein(
            &key.name.replace('_', "-"),
            &name.replace('_', "-").to_lowercase(),
        )
    };
    let key = keys.iter().min_by_key(distance)?;
    (distance(&key) <= MISSPELT_MAX).then_some(key.name)
}

fn unknown(name: &str, keys: &[Key]) -> String {
    match nearest(name, keys) {
        Some(meant) => format!("there is no key {name}: {meant} is meant?"),
        None => {
            let names: Vec<&str> = keys.iter().map(|key| key.name).collect();
            format!("there is no key {name}: there are {}", names.join(", "))
        }
    }
}

/// Parses a size with a unit, or a number of bytes.
fn size(value: &Value) -> Result<u64, String> {
    match value {
        Value::Integer(bytes) => u64::try_from(*bytes).map_err(|_| "it is negative".into()),
        Value::String(text) => tmem_control::size::parse(text),
        _ => Err("write a size, as in \"512MiB\", or a number of bytes".into()),
    }
}

fn text(value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) if !text.is_empty() => Ok(text.clone()),
        _ => Err("write a text, in quotation marks".into()),
    }
}

fn account(value: &Value) -> Result<Account, String> {
    text(value)?.parse()
}

fn path(value: &Value) -> Result<PathBuf, String> {
    text(value).map(PathBuf::from)
}

fn vm(table: &Table) -> Result<VmConfig, ConfigError> {
    let name = table.get("name").and_then(Value::as_str).unwrap_or("?");
    let fault = |what: String| ConfigError(format!("[[vm]] {name:?}: {what}"));
    // Converted to the form of the command line, so that the same checks apply.
    let mut pairs = Vec::new();
    for (key, value) in table {
        if !VM_KEYS.iter().any(|known| known.name == key) {
            return Err(fault(unknown(key, VM_KEYS)));
        }
        let value = match (key.as_str(), value) {
            ("reserve" | "limit", value) => size(value)
                .map_err(|what| fault(format!("{key} = {value}: {what}")))?
                .to_string(),
            ("weight", Value::Integer(weight)) => weight.to_string(),
            ("weight", value) => return Err(fault(format!("weight = {value}: write a number"))),
            (_, value) => text(value).map_err(|what| fault(format!("{key} = {value}: {what}")))?,
        };
        if value.contains(',') {
            return Err(fault(format!("{key} = {value:?}: it must have no comma")));
        }
        pairs.push(format!("{key}={value}"));
    }
    pairs.join(",").parse()
}

impl File {
    /// Parses the text of a file.
    ///
    /// # Errors
    /// A sentence that names the key and the value, or the line.
    pub fn parse(toml: &str) -> Result<File, ConfigError> {
        let table: Table = toml.parse().map_err(|error: toml::de::Error| {
            ConfigError(error.to_string().trim_end().to_string())
        })?;
        let mut file = File::default();
        for (key, value) in &table {
            let fault = |what: String| ConfigError(format!("{key} = {value}: {what}"));
            match key.as_str() {
                "pool_size" => file.pool_size = Some(size(value).map_err(fault)?),
                "host_free_min" => file.host_free_min = Some(size(value).map_err(fault)?),
                "memory_pressure" => file.memory_pressure = Some(path(value).map_err(fault)?),
                "workers" => {
                    let number = value.as_integer().and_then(|n| usize::try_from(n).ok());
                    let what = || fault("write a number from 1".into());
                    file.workers = Some(number.ok_or_else(what)?);
                }
                "background_threads" => {
                    let number = value.as_integer().and_then(|n| usize::try_from(n).ok());
                    let number = number.filter(|n| (1..=BACKGROUND_THREADS_MAX).contains(n));
                    let what =
                        || fault(format!("write a number from 1 to {BACKGROUND_THREADS_MAX}"));
                    file.background_threads = Some(number.ok_or_else(what)?);
                }
                "event_loop" => {
                    let kind = text(value).and_then(|text| text.parse());
                    file.event_loop = Some(kind.map_err(fault)?);
                }
                "poll_max_us" => {
                    let number = value.as_integer().and_then(|n| u64::try_from(n).ok());
                    let number = number.filter(|us| *us <= POLL_US_MAX);
                    let what = || fault(format!("write a number from 0 to {POLL_US_MAX}"));
                    file.poll_max_us = Some(number.ok_or_else(what)?);
                }
                "vm_pages_per_second" => {
                    let number = value.as_integer().and_then(|n| u64::try_from(n).ok());
                    let number = number.filter(|pages| *pages <= VM_PAGES_PER_SECOND_MAX);
                    let what = || {
                        fault(format!(
                            "write a number from 0 to {VM_PAGES_PER_SECOND_MAX}"
                        ))
                    };
                    file.vm_pages_per_second = Some(number.ok_or_else(what)?);
                }
                "control" => file.control = Some(path(value).map_err(fault)?),
                "control_group" => file.control_group = Some(account(value).map_err(fault)?),
                "control_read_only" => file.control_read_only = Some(path(value).map_err(fault)?),
                "control_read_only_group" => {
                    file.control_read_only_group = Some(account(value).map_err(fault)?);
                }
                "run_directory" => file.run_directory = Some(path(value).map_err(fault)?),
                "log" => {
                    let filter = text(value).map_err(fault)?;
                    tmem_log::check(&filter).map_err(fault)?;
                    file.log = Some(filter);
                }
                "vm" => {
                    let tables = value.as_array().map(|all| all.iter().map(Value::as_table));
                    let tables: Option<Vec<&Table>> = tables.and_then(Iterator::collect);
                    let what = || ConfigError("vm: write each VM under a [[vm]] of its own".into());
                    let vms = tables.ok_or_else(what)?.into_iter().map(vm);
                    file.vms = vms.collect::<Result<_, _>>()?;
                }
                _ => return Err(ConfigError(unknown(key, KEYS))),
            }
        }
        Ok(file)
    }

    /// Reads a file. The file of the default path need not exist.
    ///
    /// # Errors
    /// The file cannot be read or parsed; the sentence begins with its path.
    pub fn read(at: &Path) -> Result<File, ConfigError> {
        let fault = |what: String| ConfigError(format!("{}: {what}", at.display()));
        let bytes = std::fs::metadata(at).map(|metadata| metadata.len());
        match bytes {
            Err(error)
                if error.kind() == std::io::ErrorKind::NotFound
                    && at == Path::new(DEFAULT_PATH) =>
            {
                return Ok(File::default());
            }
            Ok(FILE_BYTES_MAX..) => return Err(fault("it is too large".into())),
            _ => {}
        }
        let text = std::fs::read_to_string(at).map_err(|error| fault(error.to_string()))?;
        File::parse(&text).map_err(|ConfigError(what)| fault(what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!("../../tmemd.toml");

    #[test]
    fn a_file_with_all_keys_is_parsed() {
        let file = File::parse(
            "pool_size = \"8GiB\"\nhost_free_min = 1048576\nmemory_pressure = \"none\"\nworkers = 3\nbackground_threads = 64\nevent_loop = \"epoll\"\npoll_max_us = 7\nvm_pages_per_second = 9\n\
             control = \"/c\"\ncontrol_group = \"g\"\ncontrol_read_only = \"/r\"\ncontrol_read_only_group = \"7\"\nrun_directory = \"/f\"\nlog = \"info,tmemd=debug\"\n\
             [[vm]]\nname = \"a\"\nsocket = \"/a.sock\"\ntrust_domain = \"web\"\nreserve = \"1MiB\"\n\
             [[vm]]\nname = \"b\"\nsocket = \"/b.sock\"\nowner = \"nobody-such\"\nlimit = 4096\nweight = 7\n",
        )
        .expect("good");
        assert_eq!(
            (file.pool_size, file.host_free_min),
            (Some(8 << 30), Some(1 << 20))
        );
        assert_eq!(
            (file.workers, file.log.as_deref()),
            (Some(3), Some("info,tmemd=debug"))
        );
        assert_eq!(
            (file.event_loop, file.poll_max_us),
            (Some(EventLoop::Epoll), Some(7))
        );
        assert_eq!(file.background_threads, Some(64));
        assert_eq!(file.vm_pages_per_second, Some(9));
        assert_eq!(file.control_read_only, Some("/r".into()));
        let is = |account: &Option<Account>, name: &str| *account == name.parse().ok();
        assert!(is(&file.control_group, "g") && is(&file.control_read_only_group, "7"));
        assert!(file.vms[0].owner.is_none() && is(&file.vms[1].owner, "nobody-such"));
        assert_eq!(file.vms[0].trust_domain.as_deref(), Some("web"));
        assert_eq!(file.vms[0].quota.reserve_bytes, 1 << 20);
        let quota = file.vms[1].quota;
        assert_eq!((quota.limit_bytes, quota.weight), (Some(4096), 7));
        assert_eq!(File::parse("").expect("empty"), File::default());
    }

    #[test]
    fn errors_suggest_the_nearest_key() {
        for (text, parts) in [
            ("poolsize = 1", &["poolsize", "pool_size is meant?"][..]),
            ("Pool-Size = 1", &["pool_size is meant?"]),
            ("colour = 1", &["colour", "there are pool_size, "]),
            ("pool_size = \"8GB\"", &["pool_size", "8GB", "GiB"]),
            ("pool_size = -1", &["pool_size = -1", "negative"]),
            ("workers = \"2\"", &["workers", "number"]),
            (
                "background_threads = 0",
                &["background_threads = 0", "1 to 64"],
            ),
            (
                "background_threads = 65",
                &["background_threads = 65", "1 to 64"],
            ),
            ("background_thread = 1", &["background_threads is meant?"]),
            ("log = \"loud\"", &["log", "loud"]),
            (
                "event_loop = \"kqueue\"",
                &["event_loop", "kqueue", "io_uring"],
            ),
            ("poll_max_us = 1001", &["poll_max_us", "0 to 1000"]),
            (
                "vm_pages_per_second = -1",
                &["vm_pages_per_second", "0 to 1000000000"],
            ),
            ("control = 3", &["control = 3", "quotation"]),
            ("control_group = 0", &["control_group = 0", "quotation"]),
            ("control_read_only_group = \"\"", &["_group", "text"]),
            (
                "[[vm]]\nname = \"a\"\nsocket = \"/a\"\nowner = 107",
                &["\"a\"", "owner = 107", "quotation"],
            ),
            ("vm = 3", &["[[vm]]"]),
            ("pool_size = 1\npool_size = 2", &["2", "pool_size"]),
            ("pool_size = ", &["line 1"]),
            (
                "[[vm]]\nname = \"a\"\nsockt = \"/a\"",
                &["\"a\"", "sockt", "socket is meant?"],
            ),
            ("[[vm]]\nname = \"a\"", &["\"a\"", "socket"]),
            ("[[vm]]\nname = \"a\"\nsocket = \"/a,weight=3\"", &["comma"]),
            (
                "[[vm]]\nname = \"a\"\nsocket = \"/a\"\nweight = 10001",
                &["weight=10001"],
            ),
            (
                "[[vm]]\nname = \"a\"\nsocket = \"/a\"\nlimit = \"x\"",
                &["\"a\"", "limit", "x"],
            ),
        ] {
            let ConfigError(error) = File::parse(text).expect_err(text);
            for part in parts {
                assert!(error.contains(part), "{text}: {error} lacks {part}");
            }
        }
    }

    /// The example contains each key with its meaning, and the example is valid.
    #[test]
    fn the_example_contains_every_key() {
        let uncommented: String = EXAMPLE
            .lines()
            .map(|line| line.strip_prefix("#: ").unwrap_or(line))
            .map(|line| format!("{line}\n"))
            .collect();
        File::parse(&uncommented).expect("the example is good");
        let table: Table = uncommented.parse().expect("TOML");
        for key in KEYS {
            assert!(table.contains_key(key.name), "{} is missing", key.name);
            assert!(
                EXAMPLE.contains(key.meaning),
                "of {} the meaning is",
                key.name
            );
        }
        for key in VM_KEYS {
            assert!(
                table["vm"][0].get(key.name).is_some(),
                "{} is missing",
                key.name
            );
            assert!(
                EXAMPLE.contains(key.meaning),
                "of {} the meaning is",
                key.name
            );
        }
        assert!(File::parse(EXAMPLE).is_ok_and(|file| file.vms.is_empty()));
    }

    #[test]
    fn the_documentation_contains_every_key() {
        let document = include_str!("../../../../docs/configuration.md");
        for key in KEYS.iter().chain(VM_KEYS) {
            let reload = if key.reloads { "reload" } else { "start" };
            let row = format!(
                "| `{}` | {} | {} | {reload} | {} |",
                key.name, key.unit, key.default, key.meaning
            );
            assert!(
                document.contains(&row),
                "docs/configuration.md lacks\n{row}"
            );
        }
    }
}
