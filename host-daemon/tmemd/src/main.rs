// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmemd: reads the command line, starts the daemon, waits for a signal.

use clap::Parser;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use tmemd::config::{self, parse_size, workers_default};
use tmemd::{Config, Daemon, VmConfig};

/// Host daemon of virtio-tmem: keeps pages that guests evict in a pool that all VMs share.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Memory of the pool, as in 256MiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pool_size: u64,
    /// Socket of the control interface
    #[arg(long, value_name = "PATH", default_value = tmem_control::DEFAULT_SOCKET)]
    control: PathBuf,
    /// Socket of the control interface's methods that only read
    #[arg(long, value_name = "PATH")]
    control_ro: Option<PathBuf>,
    /// Folder for the sockets of VMs that are added while it runs, as tmem-hook does it, and for what
    /// it notes of them for its next start; default: that of the control socket
    #[arg(long, value_name = "PATH")]
    run_folder: Option<PathBuf>,
    /// A VM: socket=PATH,name=NAME[,uuid=UUID][,trust-domain=NAME][,reserve=SIZE][,limit=SIZE]
    /// [,weight=N]; once for each VM
    #[arg(long, value_name = "KEY=VALUE,...")]
    vm: Vec<VmConfig>,
    /// Threads that move and compress pages
    #[arg(long, value_name = "N", default_value_t = workers_default())]
    workers: usize,
    /// Memory that the pool leaves available on the host, as in 2GiB; default: a 32nd of the host, at most 1GiB
    #[arg(long, value_name = "SIZE", value_parser = parse_size,
          default_value_t = config::host_free_min_default(), hide_default_value = true)]
    host_free_min: u64,
    /// How long tasks wait for memory, for which the pool gives way, too: the host's file, that of a
    /// control group, or "none"
    #[arg(long, value_name = "PATH", default_value = "/proc/pressure/memory")]
    memory_pressure: PathBuf,
    /// Record what guests ask, without contents and names, to a new file
    #[arg(long, value_name = "PATH")]
    trace: Option<PathBuf>,
    /// The trace ends at this size
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "trace",
          default_value = config::TRACE_BYTES_DEFAULT)]
    trace_max: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    tmem_log::start("TMEMD_LOG");
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> Result<(), Box<dyn std::error::Error>> {
    // Before the daemon starts, so that no signal is lost while it does.
    let mut signals = Signals::new([SIGTERM, SIGINT])?;
    let stalls = Some(arguments.memory_pressure).filter(|path| path.as_os_str() != "none");
    let of_control = arguments.control.parent().unwrap_or(Path::new("/"));
    let run_folder = arguments.run_folder.unwrap_or_else(|| of_control.into());
    // Whoever adds a VM names its socket from the root.
    let run_folder = std::path::absolute(run_folder.join("."))?;
    let config = config::Config {
        pool_size_bytes: arguments.pool_size,
        workers: arguments.workers,
        control: arguments.control,
        control_read_only: arguments.control_ro,
        run_folder,
        vms: arguments.vm,
        pressure: (arguments.host_free_min > 0 || stalls.is_some()).then(|| {
            config::PressureConfig {
                host_free_min_bytes: arguments.host_free_min,
                meminfo: "/proc/meminfo".into(),
                stalls,
            }
        }),
        trace: arguments.trace.map(|path| config::TraceConfig {
            path,
            bytes_max: arguments.trace_max,
        }),
    };
    let Config {
        pool_size_bytes,
        workers,
        ..
    } = config;
    let vms = config.vms.len();
    let daemon = Daemon::start(config)?;
    tracing::info!(pool_size_bytes, workers, vms, "serving");
    if let Some(signal) = signals.forever().next() {
        tracing::info!(signal, "stopping");
    }
    daemon.stop();
    tracing::info!("stopped");
    Ok(())
}
