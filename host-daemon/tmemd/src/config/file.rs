// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The settings of the configuration file, `/etc/virtio-tmem/tmemd.toml`, and of the command line.
//!
//! [`Settings`] defines the settings for the configuration file and the command line: serde derives
//! the keys of the file from it, and clap the options. Tests compare docs/configuration.md and
//! tmemd.toml with it. Out of scope: relations between settings, see
//! [`Config::check`](crate::Config::check).

use crate::config::account::Account;
use crate::config::settings::{
    BACKGROUND_THREADS_MAX, ConfigError, EventLoop, POLL_US_MAX, VM_PAGES_PER_SECOND_MAX, VmConfig,
    WEIGHT_DEFAULT, WEIGHT_MAX, WORKERS_MAX, check_memory_max, parse_name, parse_uuid,
};
use crate::memory::budget::VM_MEMORY_BYTES_DEFAULT;
use serde::de::{Deserialize, Deserializer, Error};
use std::path::{Path, PathBuf};
use tmem_control::size;
use tmem_pool::Quota;
use toml::{Table, Value};

/// Default path of the configuration file.
pub const DEFAULT_PATH: &str = "/etc/virtio-tmem/tmemd.toml";

/// Maximum size of the configuration file in bytes. A file with 1,024 VMs, the maximum, has about
/// 200 KiB.
const FILE_BYTES_MAX: u64 = 4 << 20;

/// Settings as a file or the command line gives them. A setting that is not given is None.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Deserialize, clap::Args)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Size of the pool, including metadata.
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub pool_size: Option<u64>,
    /// Memory that the pool leaves available on the host. 0: none; if `memory_pressure` is `none`
    /// as well, the pool never shrinks for the host (default: a 32nd of the host, at most 1GiB).
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    #[serde(deserialize_with = "bytes")]
    pub host_free_min: Option<u64>,
    /// Pressure (PSI) file that shows how long tasks wait for memory: the host's or that of a
    /// control group. The pool also shrinks when tasks wait and little memory is left, but not below
    /// the sum of all reserves (default: /proc/pressure/memory).
    #[arg(long, value_name = "PATH")]
    #[serde(deserialize_with = "some_path")]
    pub memory_pressure: Option<PathBuf>,
    /// Threads that answer requests (default: half the processors, 2 to 8).
    #[arg(long, value_name = "N")]
    #[serde(deserialize_with = "within::<1, { WORKERS_MAX as u64 }, _, _>")]
    pub workers: Option<usize>,
    /// Threads that find equal pages, compress and release memory while no guest waits. With too
    /// few threads, `refused nursery` grows (default: a quarter of the processors, 1 to 8).
    #[arg(long, value_name = "N")]
    #[serde(deserialize_with = "within::<1, { BACKGROUND_THREADS_MAX as u64 }, _, _>")]
    pub background_threads: Option<usize>,
    /// How workers wait for events. auto: io_uring, or epoll if the kernel does not allow io_uring
    /// (default: auto).
    #[arg(long, value_name = "KIND")]
    pub event_loop: Option<EventLoop>,
    /// Time in µs for which a worker polls an empty virtqueue before it requests a kick. It polls
    /// only if the guest's last pause between two requests was shorter than this time. 0: never
    /// (default: 50).
    #[arg(long, value_name = "N")]
    #[serde(deserialize_with = "within::<0, POLL_US_MAX, _, _>")]
    pub poll_max_us: Option<u64>,
    /// Pages that each VM may put and get in a second. Beyond this limit, the daemon refuses puts
    /// and answers gets with misses, both at once. Flushes count, too, and are always executed. 0:
    /// no limit (default: 0).
    #[arg(long, value_name = "N")]
    #[serde(deserialize_with = "within::<0, VM_PAGES_PER_SECOND_MAX, _, _>")]
    pub vm_pages_per_second: Option<u64>,
    /// Socket of the control interface (default: /run/virtio-tmem/control).
    #[arg(long, value_name = "PATH")]
    #[serde(deserialize_with = "some_path")]
    pub control: Option<PathBuf>,
    /// Group whose members may use the control socket: its name or its number
    /// (default: the daemon's group).
    #[arg(long, value_name = "GROUP")]
    pub control_group: Option<Account>,
    /// Read-only socket of the control interface (default: the path of the control socket with -ro
    /// appended).
    #[arg(long, value_name = "PATH")]
    #[serde(deserialize_with = "some_path")]
    pub control_read_only: Option<PathBuf>,
    /// Group whose members may use the read-only socket. Use a group without other rights (default:
    /// the daemon's group).
    #[arg(long, value_name = "GROUP")]
    pub control_read_only_group: Option<Account>,
    /// Directory of the VM store, and of the sockets of VMs that are added while tmemd runs
    /// (default: the directory of the control socket).
    #[arg(long, value_name = "PATH")]
    #[serde(deserialize_with = "some_path")]
    pub run_directory: Option<PathBuf>,
    /// Log level or filter. The command line does not set it.
    #[arg(skip)]
    #[serde(deserialize_with = "filter")]
    pub log: Option<String>,
    /// VM that is served from the start, once for each VM: socket=PATH,name=NAME[,owner=USER]
    /// [,uuid=UUID][,trust_domain=NAME][,reserve=SIZE][,limit=SIZE][,weight=N]
    /// [,memory_max=SIZE].
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub vm: Vec<VmConfig>,
}

/// Settings of one VM, a `[[vm]]` table of the configuration file.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct VmTable {
    #[serde(deserialize_with = "name")]
    name: String,
    #[serde(deserialize_with = "path")]
    socket: PathBuf,
    owner: Option<Account>,
    #[serde(default, deserialize_with = "some_uuid")]
    uuid: Option<String>,
    #[serde(default, deserialize_with = "some_name")]
    trust_domain: Option<String>,
    #[serde(default, deserialize_with = "bytes")]
    reserve: Option<u64>,
    #[serde(default, deserialize_with = "bytes")]
    limit: Option<u64>,
    #[serde(default, deserialize_with = "within::<0, { WEIGHT_MAX as u64 }, _, _>")]
    weight: Option<u32>,
    #[serde(default, deserialize_with = "memory_max")]
    memory_max: Option<u64>,
}

impl<'de> Deserialize<'de> for VmConfig {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<VmConfig, D::Error> {
        let vm = VmTable::deserialize(value)?;
        Ok(VmConfig {
            name: vm.name,
            socket: vm.socket,
            owner: vm.owner,
            uuid: vm.uuid,
            trust_domain: vm.trust_domain,
            quota: Quota {
                reserve_bytes: vm.reserve.unwrap_or(0),
                limit_bytes: vm.limit,
                weight: vm.weight.unwrap_or(WEIGHT_DEFAULT),
            },
            memory_max_bytes: vm.memory_max.unwrap_or(VM_MEMORY_BYTES_DEFAULT),
        })
    }
}

impl std::str::FromStr for VmConfig {
    type Err = ConfigError;

    /// Parses the keys of a `[[vm]]` table as they are written on the command line:
    /// `key=value,...`. A value in this form cannot contain a comma.
    fn from_str(text: &str) -> Result<VmConfig, ConfigError> {
        let fault = |what: String| ConfigError(format!("VM {text:?}: {what}"));
        let mut table = Table::new();
        for pair in text.split(',') {
            let Some((key, value)) = pair.split_once('=') else {
                return Err(fault(format!("{pair:?} is not of the form key=value")));
            };
            let value = match value.parse() {
                Ok(number) if key == "weight" => Value::Integer(number),
                _ => value.into(),
            };
            if table.insert(key.into(), value).is_some() {
                return Err(fault(format!("{key} is given twice")));
            }
        }
        let vm = table.try_into();
        vm.map_err(|error: toml::de::Error| fault(error.to_string().trim_end().replace('\n', " ")))
    }
}

/// Deserializes a string and converts it with the function `parse`.
fn text<'de, T, D: Deserializer<'de>>(
    value: D,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<T, D::Error> {
    parse(&String::deserialize(value)?).map_err(D::Error::custom)
}

fn name<'de, D: Deserializer<'de>>(value: D) -> Result<String, D::Error> {
    text(value, parse_name)
}

fn some_name<'de, D: Deserializer<'de>>(value: D) -> Result<Option<String>, D::Error> {
    name(value).map(Some)
}

fn some_uuid<'de, D: Deserializer<'de>>(value: D) -> Result<Option<String>, D::Error> {
    text(value, parse_uuid).map(Some)
}

fn filter<'de, D: Deserializer<'de>>(value: D) -> Result<Option<String>, D::Error> {
    text(value, |filter| {
        tmem_control::log::check(filter).map(|()| Some(filter.into()))
    })
}

fn path<'de, D: Deserializer<'de>>(value: D) -> Result<PathBuf, D::Error> {
    text(value, |path| match path {
        "" => Err("is empty: write a path".into()),
        path => Ok(path.into()),
    })
}

fn some_path<'de, D: Deserializer<'de>>(value: D) -> Result<Option<PathBuf>, D::Error> {
    path(value).map(Some)
}

/// Deserializes a size: either text with a unit, such as "1GiB", or a number of bytes.
fn bytes<'de, D: Deserializer<'de>>(value: D) -> Result<Option<u64>, D::Error> {
    let bytes = match Value::deserialize(value)? {
        Value::Integer(bytes) => u64::try_from(bytes).map_err(|_| "is negative".into()),
        Value::String(text) => size::parse(&text),
        _ => Err("write a size, as in \"512MiB\", or a number of bytes".into()),
    };
    bytes.map(Some).map_err(D::Error::custom)
}

fn memory_max<'de, D: Deserializer<'de>>(value: D) -> Result<Option<u64>, D::Error> {
    let size = bytes(value)?.map(check_memory_max);
    size.transpose().map_err(D::Error::custom)
}

/// Deserializes a number and checks that it is from MIN to MAX.
fn within<'de, const MIN: u64, const MAX: u64, T: TryFrom<u64>, D: Deserializer<'de>>(
    value: D,
) -> Result<Option<T>, D::Error> {
    let number = u64::try_from(i64::deserialize(value)?).ok();
    let number = number.filter(|number| (MIN..=MAX).contains(number));
    let number = number.and_then(|number| T::try_from(number).ok());
    let what = || D::Error::custom(format!("write a number from {MIN} to {MAX}"));
    number.map(Some).ok_or_else(what)
}

impl Settings {
    /// Parses the text of a configuration file.
    ///
    /// # Errors
    /// The text is invalid. The error is one line, with the number and the text of the faulty line.
    pub fn parse(toml: &str) -> Result<Settings, ConfigError> {
        toml::from_str(toml).map_err(|error: toml::de::Error| {
            let message = error.message();
            let at = error.span().map_or(0, |span| span.start);
            let number = toml[..at].matches('\n').count();
            let line = toml.lines().nth(number).unwrap_or_default().trim();
            ConfigError(format!("line {}: {line}: {message}", number + 1))
        })
    }

    /// Reads the configuration file at the path `at`. If the path is the default and no file exists
    /// there, returns empty settings.
    ///
    /// # Errors
    /// The file cannot be read or parsed. The error begins with the file's path.
    pub fn read(at: &Path) -> Result<Settings, ConfigError> {
        let fault = |what: String| ConfigError(format!("{}: {what}", at.display()));
        let bytes = std::fs::metadata(at).map(|metadata| metadata.len());
        match bytes {
            Err(error)
                if error.kind() == std::io::ErrorKind::NotFound
                    && at == Path::new(DEFAULT_PATH) =>
            {
                return Ok(Settings::default());
            }
            Ok(FILE_BYTES_MAX..) => return Err(fault("it is too large".into())),
            _ => {}
        }
        let text = std::fs::read_to_string(at).map_err(|error| fault(error.to_string()))?;
        Settings::parse(&text).map_err(|ConfigError(what)| fault(what))
    }

    /// Combines two sets of settings. A setting that is None in `self` is taken from `other`. The
    /// result contains the VMs of both sets.
    #[must_use]
    pub fn or(self, other: Settings) -> Settings {
        Settings {
            pool_size: self.pool_size.or(other.pool_size),
            host_free_min: self.host_free_min.or(other.host_free_min),
            memory_pressure: self.memory_pressure.or(other.memory_pressure),
            workers: self.workers.or(other.workers),
            background_threads: self.background_threads.or(other.background_threads),
            event_loop: self.event_loop.or(other.event_loop),
            poll_max_us: self.poll_max_us.or(other.poll_max_us),
            vm_pages_per_second: self.vm_pages_per_second.or(other.vm_pages_per_second),
            control: self.control.or(other.control),
            control_group: self.control_group.or(other.control_group),
            control_read_only: self.control_read_only.or(other.control_read_only),
            control_read_only_group: self
                .control_read_only_group
                .or(other.control_read_only_group),
            run_directory: self.run_directory.or(other.run_directory),
            log: self.log.or(other.log),
            vm: [self.vm, other.vm].concat(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXAMPLE: &str = include_str!("../../tmemd.toml");

    /// Returns the setting of a commented-out line of the template `tmemd.toml`; None for any other
    /// line.
    fn example(line: &str) -> Option<&str> {
        let setting = line.strip_prefix('#')?;
        setting
            .starts_with(|c: char| c.is_ascii_lowercase())
            .then_some(setting)
    }

    #[test]
    fn the_configuration_template_is_valid_with_any_line_uncommented() {
        let lines: Vec<&str> = EXAMPLE.lines().collect();
        let mut found = 0;
        for (number, line) in lines.iter().enumerate() {
            let Some(setting) = example(line) else {
                continue;
            };
            let mut changed = lines.clone();
            changed[number] = setting;
            let parsed = Settings::parse(&changed.join("\n"));
            assert!(
                parsed.is_ok(),
                "the template's line {setting} was refused: {parsed:?}"
            );
            found += 1;
        }
        // The template `tmemd.toml` has a line for each key except the keys of a VM. `found` counts
        // the lines that are commented out. Two further lines are in effect, because the template
        // sets their keys.
        assert_eq!(found + 2, keys("x = 1").len());
    }

    #[test]
    fn a_configuration_file_with_all_keys_is_parsed() {
        let file = Settings::parse(
            "pool_size = \"8GiB\"\nhost_free_min = 1048576\nmemory_pressure = \"none\"\nworkers = 3\nbackground_threads = 64\nevent_loop = \"epoll\"\npoll_max_us = 7\nvm_pages_per_second = 9\n\
             control = \"/c\"\ncontrol_group = \"g\"\ncontrol_read_only = \"/r\"\ncontrol_read_only_group = \"7\"\nrun_directory = \"/f\"\nlog = \"info,tmemd=debug\"\n\
             [[vm]]\nname = \"a\"\nsocket = \"/a.sock\"\ntrust_domain = \"web\"\nreserve = \"1MiB\"\n\
             [[vm]]\nname = \"b\"\nsocket = \"/b.sock\"\nowner = \"nobody-such\"\nlimit = 4096\nweight = 7\nmemory_max = \"16GiB\"\n",
        )
        .expect("a valid configuration was refused");
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
        assert!(file.vm[0].owner.is_none() && is(&file.vm[1].owner, "nobody-such"));
        assert_eq!(file.vm[0].trust_domain.as_deref(), Some("web"));
        assert_eq!(file.vm[0].quota.reserve_bytes, 1 << 20);
        let quota = file.vm[1].quota;
        assert_eq!((quota.limit_bytes, quota.weight), (Some(4096), 7));
        let memory_max = [0, 1].map(|vm: usize| file.vm[vm].memory_max_bytes);
        assert_eq!(memory_max, [VM_MEMORY_BYTES_DEFAULT, 16 << 30]);
        assert_eq!(
            Settings::parse("").expect("an empty configuration was refused"),
            Settings::default()
        );
    }

    #[test]
    fn configuration_errors_name_line_key_value_and_remedy() {
        for (text, parts) in [
            (
                "\n# comment\npoolsize = 1",
                &["line 3: poolsize = 1: ", "expected one of", "`pool_size`"][..],
            ),
            (
                "pool_size = \"8GB\"",
                &["line 1: pool_size = \"8GB\": ", "GiB"],
            ),
            ("pool_size = -1", &["pool_size = -1: is negative"]),
            ("pool_size = 1.5", &["pool_size = 1.5: write a size"]),
            ("workers = \"2\"", &["workers = \"2\": invalid type"]),
            ("workers = 0", &["workers = 0: ", "1 to 64"]),
            (
                "background_threads = 0",
                &["background_threads = 0: ", "1 to 64"],
            ),
            (
                "background_threads = 65",
                &["background_threads = 65: ", "1 to 64"],
            ),
            ("log = \"loud\"", &["log = \"loud\": "]),
            (
                "event_loop = \"kqueue\"",
                &["event_loop = \"kqueue\": ", "`io_uring`"],
            ),
            ("poll_max_us = 1001", &["poll_max_us = 1001: ", "0 to 1000"]),
            (
                "vm_pages_per_second = -1",
                &["vm_pages_per_second = -1: ", "0 to 1000000000"],
            ),
            ("control = 3", &["control = 3: ", "expected a string"]),
            ("control = \"\"", &["control = \"\": ", "write a path"]),
            ("control_group = 0", &["control_group = 0: ", "string"]),
            (
                "control_read_only_group = \"\"",
                &["_group = \"\": is empty: write a name"],
            ),
            (
                "[[vm]]\nname = \"a\"\nsocket = \"/a\"\nowner = 107",
                &["line 4: owner = 107: ", "string"],
            ),
            ("vm = 3", &["line 1: vm = 3: "]),
            (
                "pool_size = 1\npool_size = 2",
                &["line 2: pool_size = 2: duplicate key"],
            ),
            ("pool_size = ", &["line 1: pool_size"]),
            (
                "workers = 1\n[[vm]]\nname = \"a\"\nsockt = \"/a\"",
                &["line 4: sockt = \"/a\": ", "expected one of", "`socket`"],
            ),
            (
                "[[vm]]\nname = \"a\"",
                &["line 1: [[vm]]: missing field `socket`"],
            ),
            (
                "[[vm]]\nname = \"a b\"",
                &["line 2: name = \"a b\": must have 1 to 64 letters"],
            ),
            (
                "[[vm]]\nname = \"a\"\nsocket = \"/a\"\nweight = 10001",
                &["line 4: weight = 10001: ", "0 to 10000"],
            ),
            (
                "[[vm]]\nname = \"a\"\nsocket = \"/a\"\nlimit = \"x\"",
                &["line 4: limit = \"x\": ", "GiB"],
            ),
            (
                "[[vm]]\nname = \"a\"\nsocket = \"/a\"\nmemory_max = \"9TiB\"",
                &["line 4: memory_max = \"9TiB\": ", "8TiB"],
            ),
        ] {
            let Err(ConfigError(error)) = Settings::parse(text) else {
                panic!("the invalid configuration {text:?} was accepted");
            };
            for part in parts {
                assert!(
                    error.contains(part),
                    "{text}: the error does not contain {part:?}: {error}"
                );
            }
            assert_eq!(
                error.lines().count(),
                1,
                "the error has more than one line: {error}"
            );
        }
    }

    /// Returns the rows of the tables in docs/configuration.md: key, unit, default, reload or
    /// start, meaning.
    fn documented() -> Vec<[&'static str; 5]> {
        let document = include_str!("../../../../docs/configuration.md");
        let rows = document.lines().filter_map(|line| {
            let row = line.strip_prefix("| `")?.strip_suffix(" |")?;
            let (key, row) = row.split_once('`')?;
            let columns: Vec<&str> = row.split(" | ").skip(1).collect();
            let [unit, default, applies, meaning] = columns.try_into().ok()?;
            Some([key, unit, default, applies, meaning])
        });
        rows.collect()
    }

    /// Returns the valid keys of a configuration. The error that an unknown key causes lists them.
    fn keys(toml: &str) -> Vec<String> {
        let ConfigError(error) = Settings::parse(toml).expect_err("an unknown key was accepted");
        let (_, keys) = error
            .split_once("expected one of ")
            .expect("the error does not list the valid keys");
        keys.replace('`', "").split(", ").map(Into::into).collect()
    }

    /// The documentation, the help of the command-line options and the template `tmemd.toml`
    /// describe each key with the same text.
    #[test]
    fn the_documentation_and_the_template_contain_every_configuration_key() {
        let documented = documented();
        let of_vm = keys("[[vm]]\nx = 1");
        let names: Vec<_> = documented.iter().map(|row| row[0]).collect();
        assert_eq!(names, [&keys("x = 1")[..], &of_vm].concat());
        let uncommented: String = EXAMPLE
            .lines()
            .map(|line| example(line).unwrap_or(line))
            .map(|line| format!("{line}\n"))
            .collect();
        Settings::parse(&uncommented).expect("the template was refused");
        let table: Table = uncommented.parse().expect("the template is not valid TOML");
        let command = <Settings as clap::Args>::augment_args(clap::Command::new("tmemd"));
        let settings = documented.len() - of_vm.len();
        for (number, [key, _, default, applies, meaning]) in documented.into_iter().enumerate() {
            assert!(
                EXAMPLE.contains(meaning),
                "the template does not contain {meaning:?}"
            );
            assert!(
                ["reload", "start"].contains(&applies),
                "the documentation gives {applies:?} for {key}, not \"reload\" or \"start\""
            );
            if number >= settings {
                assert!(
                    table["vm"][0].get(key).is_some(),
                    "the template sets no {key} for a VM"
                );
                continue;
            }
            assert!(table.contains_key(key), "the template does not set {key}");
            let option = command
                .get_arguments()
                .find(|option| option.get_id() == key);
            let Some(option) = option.filter(|_| key != "vm") else {
                assert!(
                    ["log", "vm"].contains(&key),
                    "no option of the command line corresponds to {key}"
                );
                continue;
            };
            let help = option
                .get_help()
                .expect("an option has no help text")
                .to_string();
            let good = [meaning.into(), format!("{meaning} (default: {default})")];
            let good = good.iter().any(|good| good.eq_ignore_ascii_case(&help));
            assert!(
                good,
                "the help of {key} differs from the documentation: {help}"
            );
        }
        assert!(Settings::parse(EXAMPLE).is_ok_and(|file| file.vm.is_empty()));
    }
}
