// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmemd: reads command line and configuration, starts the daemon, waits for signals.

use clap::Parser;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use tmemd::config::account::Account;
use tmemd::config::file::{self, File};
use tmemd::config::{
    self, EventLoop, Waiting, background_threads_default, parse_size, workers_default,
};
use tmemd::host::sandbox;
use tmemd::host::watchdog::{self, NotifyState, Watchdog};
use tmemd::{Config, ConfigError, Daemon, VmConfig};

/// Host daemon of virtio-tmem: keeps pages that guests evict in a pool that all VMs share.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Configuration file; what is given here comes before it. docs/configuration.md
    #[arg(long, value_name = "PATH", default_value = file::DEFAULT_PATH)]
    config: PathBuf,
    /// Say whether file and options are good, and end
    #[arg(long)]
    check_config: bool,
    /// Memory of the pool, as in 256MiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pool_size: Option<u64>,
    /// Socket of the control interface [default: /run/virtio-tmem/control]
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,
    /// Group whose members may use it, by name or number [default: the daemon's]
    #[arg(long, value_name = "GROUP")]
    control_group: Option<Account>,
    /// Read-only socket of the control interface, or "none" [default: the path of --control with -ro
    /// appended]
    #[arg(long, value_name = "PATH")]
    control_read_only: Option<PathBuf>,
    /// Group whose members may use the read-only socket, by name or number [default: the daemon's]
    #[arg(long, value_name = "GROUP")]
    control_read_only_group: Option<Account>,
    /// Directory for the sockets of VMs that are added while the daemon runs, and for the VM store
    /// [default: the directory of --control]
    #[arg(long, value_name = "PATH")]
    run_directory: Option<PathBuf>,
    /// A VM: socket=PATH,name=NAME[,owner=USER][,uuid=UUID][,trust_domain=NAME][,reserve=SIZE]
    /// [,limit=SIZE][,weight=N]; once for each VM. The keys are those of a [[vm]] table. USER is the
    /// user that the VM's QEMU runs as, by name or number
    #[arg(long, value_name = "KEY=VALUE,...")]
    vm: Vec<VmConfig>,
    /// Threads that answer requests [default: half the processors, 2 to 8]
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// Threads that find equal pages, compress, and make room, while no guest waits
    /// [default: a quarter of the processors, 1 to 8]
    #[arg(long, value_name = "N")]
    background_threads: Option<usize>,
    /// Kernel interface in which workers sleep: auto, epoll or io_uring [default: auto]
    #[arg(long, value_name = "KIND")]
    event_loop: Option<EventLoop>,
    /// µs that they look at a virtqueue that has run dry before they ask for a kick, if its guest was that
    /// quick before; 0: never [default: 50]
    #[arg(long, value_name = "N")]
    poll_max_us: Option<u64>,
    /// Pages that each VM may put and get in a second; what it asks for beyond that is refused or missed
    /// at once. Flushes count, and are always done. 0: as many as it likes [default: 0]
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u64).range(..=config::VM_PAGES_PER_SECOND_MAX))]
    vm_pages_per_second: Option<u64>,
    /// Memory that the pool leaves available on the host, as in 2GiB; default: a 32nd of the host, at most 1GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    host_free_min: Option<u64>,
    /// How long tasks wait for memory, for which the pool gives way, too: the host's file, that of a
    /// control group, or "none" [default: /proc/pressure/memory]
    #[arg(long, value_name = "PATH")]
    memory_pressure: Option<PathBuf>,
    /// Record what guests ask, without contents and names, to a new file
    #[arg(long, value_name = "PATH")]
    trace: Option<PathBuf>,
    /// The trace ends at this size
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "trace",
          default_value = config::TRACE_BYTES_DEFAULT)]
    trace_max: u64,
    /// Do not confine the process to the system calls and files that it needs, for debuggers and profilers
    #[arg(long)]
    no_sandbox: bool,
}

/// Returns the default path of the read-only socket.
fn read_only_default(control: &Path) -> PathBuf {
    let mut path = control.as_os_str().to_owned();
    path.push("-ro");
    path.into()
}

/// Merges options, file and defaults, in this order of precedence.
fn configure(arguments: &Arguments, file: &File) -> Result<Config, ConfigError> {
    let size = arguments.pool_size.or(file.pool_size).ok_or_else(|| {
        let at = arguments.config.display();
        ConfigError(format!(
            "the pool has no size: give --pool-size, or pool_size in {at}"
        ))
    })?;
    let control = arguments.control.as_ref().or(file.control.as_ref());
    let control = control.map_or_else(|| tmem_control::DEFAULT_SOCKET.into(), PathBuf::clone);
    let of_control = control.parent().unwrap_or(Path::new("/"));
    let read_only = arguments
        .control_read_only
        .as_ref()
        .or(file.control_read_only.as_ref());
    let read_only = read_only.map_or_else(|| read_only_default(&control), PathBuf::clone);
    let run_folder = arguments
        .run_directory
        .as_ref()
        .or(file.run_directory.as_ref());
    let run_folder = run_folder.map_or(of_control, PathBuf::as_path).join(".");
    // Requests that add a VM name its socket by an absolute path.
    let run_folder = std::path::absolute(&run_folder)
        .map_err(|error| ConfigError(format!("run directory {}: {error}", run_folder.display())))?;
    let stalls = arguments
        .memory_pressure
        .as_ref()
        .or(file.memory_pressure.as_ref());
    let stalls = stalls.map_or_else(|| "/proc/pressure/memory".into(), PathBuf::clone);
    let stalls = Some(stalls).filter(|path| path.as_os_str() != "none");
    let free_min = arguments.host_free_min.or(file.host_free_min);
    let free_min = free_min.unwrap_or_else(config::host_free_min_default);
    let config = Config {
        pool_size_bytes: size,
        workers: arguments
            .workers
            .or(file.workers)
            .unwrap_or_else(workers_default),
        background_threads: arguments
            .background_threads
            .or(file.background_threads)
            .unwrap_or_else(background_threads_default),
        waiting: Waiting {
            event_loop: arguments.event_loop.or(file.event_loop).unwrap_or_default(),
            poll_max: arguments
                .poll_max_us
                .or(file.poll_max_us)
                .map_or(config::POLL_MAX_DEFAULT, Duration::from_micros),
        },
        vm_pages_per_second: arguments
            .vm_pages_per_second
            .or(file.vm_pages_per_second)
            .unwrap_or(0),
        control_group: arguments
            .control_group
            .clone()
            .or(file.control_group.clone()),
        control_read_only: Some(read_only).filter(|path| path.as_os_str() != "none"),
        control,
        control_read_only_group: arguments
            .control_read_only_group
            .clone()
            .or(file.control_read_only_group.clone()),
        run_folder,
        vms: [&arguments.vm[..], &file.vms].concat(),
        pressure: (free_min > 0 || stalls.is_some()).then(|| config::PressureConfig {
            host_free_min_bytes: free_min,
            meminfo: "/proc/meminfo".into(),
            stalls,
        }),
        trace: arguments.trace.clone().map(|path| config::TraceConfig {
            path,
            bytes_max: arguments.trace_max,
        }),
    };
    config.check()?;
    Ok(config)
}

fn read(arguments: &Arguments) -> Result<(Config, File), ConfigError> {
    let file = File::read(&arguments.config)?;
    Ok((configure(arguments, &file)?, file))
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.check_config {
        let found = read(&arguments).and_then(|(mut config, _)| config.find_accounts());
        return match found {
            Ok(()) => {
                println!("{}: good", arguments.config.display());
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("tmemd: {error}");
                ExitCode::FAILURE
            }
        };
    }
    let log = tmem_log::start("TMEMD_LOG");
    match run(&arguments, &log) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments, log: &tmem_log::Log) -> Result<(), Box<dyn std::error::Error>> {
    // Registered before the daemon starts, so that no signal is lost meanwhile.
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let (mut config, file) = read(arguments)?;
    // Looked up while the process may still read the files of users and groups.
    config.find_accounts()?;
    if let Some(filter) = &file.log {
        log.set(filter)?;
    }
    let Config {
        pool_size_bytes,
        workers,
        ..
    } = config;
    let vms = config.vms.len();
    match arguments.no_sandbox {
        true => tracing::warn!("not confined, as --no-sandbox asks"),
        false => sandbox::enter(&config, &arguments.config)?,
    }
    let daemon = Daemon::start(config)?;
    // Kept until the process ends, because the stop could hang, too.
    let _watchdog = Watchdog::start(daemon.heartbeats().clone())?;
    watchdog::tell(NotifyState::Ready);
    tracing::info!(pool_size_bytes, workers, vms, "serving");
    for signal in signals.forever() {
        if signal != SIGHUP {
            tracing::info!(signal, "stopping");
            break;
        }
        reload(arguments, log, &daemon);
    }
    watchdog::tell(NotifyState::Stopping);
    daemon.stop();
    tracing::info!("stopped");
    Ok(())
}

/// Reads the configuration again and applies it. An invalid configuration changes nothing.
fn reload(arguments: &Arguments, log: &tmem_log::Log, daemon: &Daemon) {
    let done = read(arguments).and_then(|(config, file)| {
        let later = daemon.reload(config)?;
        let filter = file.log.as_deref().unwrap_or("info");
        log.set(filter).map_err(ConfigError)?;
        Ok(later)
    });
    match done {
        Ok(later) if later.is_empty() => tracing::info!("the configuration was read again"),
        Ok(later) => tracing::warn!(
            "the configuration was read again; from the next start on hold: {}",
            later.join(", ")
        ),
        Err(error) => tracing::error!("the configuration stays as it was: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// An option is the key of the file with `-` for `_`, so that both have one name.
    #[test]
    fn options_have_the_names_of_their_keys() {
        let only_options = ["config", "check_config", "trace", "trace_max", "no_sandbox"];
        let command = Arguments::command();
        let options = command.get_arguments().filter_map(|arg| arg.get_long());
        let options: Vec<String> = options.map(|option| option.replace('-', "_")).collect();
        for key in file::KEYS.iter().filter(|key| key.name != "log") {
            assert!(
                options.iter().any(|option| option == key.name),
                "{}",
                key.name
            );
        }
        for option in options {
            let known = file::KEYS.iter().any(|key| key.name == option);
            assert!(known || only_options.contains(&option.as_str()), "{option}");
        }
    }

    #[test]
    fn a_read_only_socket_exists_by_default() {
        let socket = |options: &[&str]| {
            let all = [&["tmemd", "--pool-size", "1MiB"], options].concat();
            let arguments = Arguments::parse_from(all);
            let config = configure(&arguments, &File::default()).expect("good");
            config.control_read_only
        };
        // The exporter uses this path by default.
        let default = tmem_control::DEFAULT_READ_ONLY_SOCKET;
        assert_eq!(socket(&[]), Some(default.into()));
        assert_eq!(socket(&["--control", "/x/c"]), Some("/x/c-ro".into()));
        assert_eq!(socket(&["--control-read-only", "/r"]), Some("/r".into()));
        assert_eq!(socket(&["--control-read-only", "none"]), None);
    }
}
