// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmemd's main program: reads the command line and the configuration file, starts the daemon, and
//! waits for signals.

use clap::Parser;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use tmem_control::arcstats;
use tmemd::config::arguments::Arguments;
use tmemd::config::file::Settings;
use tmemd::config::{self, Waiting, background_threads_default, workers_default};
use tmemd::host::watchdog::{self, NotifyState, Watchdog};
use tmemd::host::{available, sandbox};
use tmemd::{Config, ConfigError, Daemon, StartError};

/// Time that the daemon waits before it ends if its start failed and a service manager started it.
/// Only systemd 254 and newer can delay each further restart more than the one before, and the
/// unit's RestartSec= is short, so that VMs soon have their cache again after a daemon was killed.
/// The causes of such failures (a socket in use, no memory) last for seconds or until an operator
/// acts. The log then has twelve messages a minute.
const START_FAILURE_PAUSE: Duration = Duration::from_secs(5);
/// Time between two looks for a signal that ends the pause after a failed start.
const PAUSE_STEP: Duration = Duration::from_millis(50);

/// Returns the default path of the read-only control socket: the path of the control socket with
/// `-ro` appended.
fn read_only_default(control: &Path) -> PathBuf {
    let mut path = control.as_os_str().to_owned();
    path.push("-ro");
    path.into()
}

/// Combines the command line's options, the configuration file and the defaults into the daemon's
/// configuration. Options take precedence over the file, and the file takes precedence over
/// defaults.
fn configure(arguments: &Arguments, file: Settings) -> Result<Config, ConfigError> {
    let settings = arguments.settings.clone().or(file);
    let pool_size_bytes = settings.pool_size.ok_or_else(|| {
        let at = arguments.config.display();
        ConfigError(format!(
            "the pool has no size: give --pool-size, or pool_size in {at}"
        ))
    })?;
    let control = settings.control;
    let control = control.unwrap_or_else(|| tmem_control::DEFAULT_SOCKET.into());
    let of_control = control.parent().unwrap_or(Path::new("/"));
    let read_only = settings.control_read_only;
    let read_only = read_only.unwrap_or_else(|| read_only_default(&control));
    let run_directory = settings
        .run_directory
        .as_deref()
        .unwrap_or(of_control)
        .join(".");
    // The path is made absolute, because requests that add a VM name its socket by an absolute
    // path.
    let run_directory = std::path::absolute(&run_directory).map_err(|error| {
        ConfigError(format!(
            "run directory {}: {error}",
            run_directory.display()
        ))
    })?;
    let stalls = settings.memory_pressure;
    let stalls = stalls.unwrap_or_else(|| "/proc/pressure/memory".into());
    let stalls = Some(stalls).filter(|path| path.as_os_str() != "none");
    let free_min = settings.host_free_min;
    let free_min = free_min.unwrap_or_else(config::host_free_min_default);
    let threads = settings.background_threads;
    let poll_max = settings.poll_max_us.map(Duration::from_micros);
    let config = Config {
        pool_size_bytes,
        workers: settings.workers.unwrap_or_else(workers_default),
        background_threads: threads.unwrap_or_else(background_threads_default),
        waiting: Waiting {
            event_loop: settings.event_loop.unwrap_or_default(),
            poll_max: poll_max.unwrap_or(config::POLL_MAX_DEFAULT),
        },
        vm_pages_per_second: settings.vm_pages_per_second.unwrap_or(0),
        control_read_only: Some(read_only).filter(|path| path.as_os_str() != "none"),
        control,
        control_group: settings.control_group,
        control_read_only_group: settings.control_read_only_group,
        run_directory,
        vms: settings.vm,
        pressure: (free_min > 0 || stalls.is_some()).then(|| config::PressureConfig {
            host_free_min_bytes: free_min,
            meminfo: "/proc/meminfo".into(),
            arcstats: arcstats::PATH.into(),
            stalls,
            group: available::own_group(),
        }),
        trace: arguments.trace.clone().map(|path| config::TraceConfig {
            path,
            bytes_max: arguments.trace_max,
        }),
    };
    config.check()?;
    Ok(config)
}

/// Reads the configuration file and combines it with the command line's options. Returns the
/// configuration, and the log filter that the file sets, if any.
fn read(arguments: &Arguments) -> Result<(Config, Option<String>), ConfigError> {
    let file = Settings::read(&arguments.config)?;
    let filter = file.log.clone();
    Ok((configure(arguments, file)?, filter))
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
                tmem_control::EXIT_CONFIGURATION.into()
            }
        };
    }
    let log = tmem_control::log::start("TMEMD_LOG");
    // Signal handlers are installed before the daemon starts. A signal that arrives during the
    // start is therefore not lost.
    let mut signals = match Signals::new([SIGTERM, SIGINT, SIGHUP]) {
        Ok(signals) => signals,
        Err(error) => {
            tracing::error!("signals cannot be handled: {error}");
            return ExitCode::FAILURE;
        }
    };
    match run(&arguments, &log, &mut signals) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if is_configuration_error(&*error) => {
            tracing::error!(
                "{error}. Correct the configuration, check it with tmemd --check-config, and \
                 start the daemon again"
            );
            tmem_control::EXIT_CONFIGURATION.into()
        }
        Err(error) => {
            tracing::error!("{error}");
            // A stop of the unit during the pause is no failure.
            if watchdog::has_service_manager() && pause(&mut signals) {
                return ExitCode::SUCCESS;
            }
            ExitCode::FAILURE
        }
    }
}

/// Returns true if only a change of the configuration can make the daemon start. This excludes
/// users and groups that were not found: a directory service that defines them may start later.
fn is_configuration_error(error: &(dyn std::error::Error + 'static)) -> bool {
    error.is::<ConfigError>()
        || matches!(
            error.downcast_ref(),
            Some(StartError::Config(_) | StartError::Admission(_))
        )
}

/// Waits for [`START_FAILURE_PAUSE`]. Returns true at once when a signal arrives that stops the
/// daemon.
fn pause(signals: &mut Signals) -> bool {
    let end = Instant::now() + START_FAILURE_PAUSE;
    while Instant::now() < end {
        if signals.pending().any(|signal| signal != SIGHUP) {
            return true;
        }
        std::thread::sleep(PAUSE_STEP);
    }
    false
}

fn run(
    arguments: &Arguments,
    log: &tmem_control::log::Log,
    signals: &mut Signals,
) -> Result<(), Box<dyn std::error::Error>> {
    let (mut config, filter) = read(arguments)?;
    // Users and groups are looked up before the sandbox is entered, because the sandboxed process
    // cannot ask the host's sources of accounts.
    config.find_accounts().map_err(|ConfigError(what)| what)?;
    if let Some(filter) = &filter {
        log.set(filter).map_err(ConfigError)?;
    }
    let Config {
        pool_size_bytes,
        workers,
        ..
    } = config;
    let vms = config.vms.len();
    match arguments.no_sandbox {
        true => tracing::warn!("the process is not sandboxed, because of --no-sandbox"),
        false => sandbox::enter(&config, &arguments.config)?,
    }
    let daemon = Daemon::start(config)?;
    // The watchdog is dropped when `run` returns, after the daemon has stopped, because the daemon
    // could also hang while it stops.
    let _watchdog = Watchdog::start(daemon.heartbeats().clone())?;
    watchdog::notify(NotifyState::Ready);
    tracing::info!(pool_size_bytes, workers, vms, "serving");
    for signal in signals.forever() {
        if signal != SIGHUP {
            tracing::info!(signal, "stopping");
            break;
        }
        reload(arguments, log, &daemon);
    }
    watchdog::notify(NotifyState::Stopping);
    daemon.stop();
    tracing::info!("stopped");
    Ok(())
}

/// Reads the configuration file again and applies it to the running daemon. If the file is invalid,
/// nothing changes.
fn reload(arguments: &Arguments, log: &tmem_control::log::Log, daemon: &Daemon) {
    let done = read(arguments).and_then(|(config, filter)| {
        let later = daemon.reload(config)?;
        log.set(filter.as_deref().unwrap_or("info"))
            .map_err(ConfigError)?;
        Ok(later)
    });
    match done {
        Ok(later) if later.is_empty() => tracing::info!("the configuration was reloaded"),
        Ok(later) => tracing::warn!(
            "the configuration was reloaded; changes of these settings apply at the next start: {}",
            later.join(", ")
        ),
        Err(error) => tracing::error!("the configuration is unchanged: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// Each command-line option has the name of its key in the configuration file, with `-` in
    /// place of `_`.
    #[test]
    fn command_line_options_have_the_names_of_configuration_keys() {
        let only_options = ["config", "check_config", "trace", "trace_max", "no_sandbox"];
        let example = include_str!("../tmemd.toml");
        let keys: Vec<&str> = example
            .lines()
            .filter_map(|line| Some(line.trim_start_matches('#').split_once(" = ")?.0))
            .collect();
        assert!(keys.contains(&"pool_size"));
        let command = Arguments::command();
        for option in command.get_arguments().filter_map(|arg| arg.get_long()) {
            let name = option.replace('-', "_");
            let known = keys.contains(&name.as_str()) || only_options.contains(&name.as_str());
            assert!(
                known,
                "option --{option} corresponds to no configuration key"
            );
        }
    }

    #[test]
    fn a_read_only_control_socket_is_configured_by_default() {
        let socket = |options: &[&str]| {
            let all = [&["tmemd", "--pool-size", "1MiB"], options].concat();
            let arguments = Arguments::parse_from(all);
            let config =
                configure(&arguments, Settings::default()).expect("valid arguments were refused");
            config.control_read_only
        };
        // The Prometheus exporter connects to this path by default, so both defaults must be equal.
        let default = tmem_control::DEFAULT_READ_ONLY_SOCKET;
        assert_eq!(socket(&[]), Some(default.into()));
        assert_eq!(socket(&["--control", "/x/c"]), Some("/x/c-ro".into()));
        assert_eq!(socket(&["--control-read-only", "/r"]), Some("/r".into()));
        assert_eq!(socket(&["--control-read-only", "none"]), None);
    }
}
