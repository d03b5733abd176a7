// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmemctl: asks the daemon over its control socket and prints what it says; puts the device into
//! libvirt's domains.
//!
//! Exit codes: 0 done, 1 the daemon or libvirt refused or answered nonsense, 2 wrong usage, 3 no
//! daemon, or no libvirt.

#[cfg(feature = "libvirt")]
mod libvirt;
mod table;

use clap::{Parser, Subcommand};
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;
use table::{Align, percent, ratio, size, table};
use tmem_control as api;
use tmem_control::VarlinkClientInterface;

/// Command line of the virtio-tmem host daemon.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// Control socket of the daemon; the read-only one does as well
    #[arg(long, global = true, value_name = "PATH", default_value = api::DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Seconds to wait for the daemon, from 1
    #[arg(long, global = true, value_name = "N", default_value_t = 10,
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
    /// Print JSON, as the daemon says it
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List the VMs that the daemon serves
    List,
    /// Print statistics of the daemon, the pool and its VMs
    Stats {
        /// Only this VM, in full
        vm: Option<String>,
    },
    /// Put the device into a libvirt domain, or change what attach gave it
    #[cfg(feature = "libvirt")]
    Attach(libvirt::AttachArguments),
    /// Take the device out of a libvirt domain, and all that attach changed
    #[cfg(feature = "libvirt")]
    Detach(libvirt::DetachArguments),
    /// Get or set the quota of a libvirt domain
    #[cfg(feature = "libvirt")]
    Tune(libvirt::TuneArguments),
}

/// What went wrong: a sentence and an exit code.
struct Failure(String, u8);

fn main() -> ExitCode {
    match run_in_time(Arguments::parse()) {
        Ok(text) => match std::io::stdout().write_all(text.as_bytes()) {
            Ok(()) => ExitCode::SUCCESS,
            // A reader that has seen enough, such as head.
            Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
            Err(error) => fail(Failure(format!("cannot print: {error}"), 1)),
        },
        Err(failure) => fail(failure),
    }
}

fn fail(Failure(message, code): Failure) -> ExitCode {
    eprintln!("tmemctl: {message}");
    ExitCode::from(code)
}

/// A daemon that hangs keeps its sockets, and connecting, too, may wait for it.
fn run_in_time(arguments: Arguments) -> Result<String, Failure> {
    let (socket, timeout) = (arguments.socket.clone(), arguments.timeout);
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // Nobody listens any more if it is too late.
        let _ = sender.send(run(&arguments));
    });
    let answer = receiver.recv_timeout(Duration::from_secs(timeout));
    answer.unwrap_or_else(|_| {
        Err(Failure(
            format!(
                "the daemon at {} did not answer within {timeout} s: it hangs or is stopped, or \
                 the host is overloaded (--timeout waits longer)",
                socket.display()
            ),
            3,
        ))
    })
}

fn run(arguments: &Arguments) -> Result<String, Failure> {
    #[cfg(feature = "libvirt")]
    match &arguments.command {
        Command::Attach(attach) => return libvirt::attach(attach),
        Command::Detach(detach) => return libvirt::detach(detach),
        Command::Tune(tune) => return libvirt::tune(tune, &arguments.socket),
        Command::List | Command::Stats { .. } => {}
    }
    let mut client = connect(&arguments.socket)?;
    let failed = |error: api::Error| refused(&arguments.socket, &error);
    let json = |value: Result<String, serde_json::Error>| {
        value
            .map(|text| text + "\n")
            .map_err(|error| Failure(error.to_string(), 1))
    };
    match &arguments.command {
        Command::List => {
            let reply = client.list().call().map_err(failed)?;
            if arguments.json {
                return json(serde_json::to_string_pretty(&reply));
            }
            Ok(list(&reply.vms))
        }
        Command::Stats { vm } => {
            let reply = client.stats(vm.clone()).call().map_err(failed)?;
            if arguments.json {
                return json(serde_json::to_string_pretty(&reply));
            }
            match (&reply.vms[..], vm) {
                ([vm], Some(_)) => Ok(one(vm)),
                (vms, _) => Ok(overview(&reply.daemon, &reply.pool, vms)),
            }
        }
        #[cfg(feature = "libvirt")]
        Command::Attach(_) | Command::Detach(_) | Command::Tune(_) => Ok(String::new()),
    }
}

/// Connects, after a look of our own: the library's error does not say what to do.
fn connect(socket: &Path) -> Result<api::VarlinkClient, Failure> {
    let at = socket.display();
    let failure = |what: String| Failure(what, 3);
    if let Err(error) = UnixStream::connect(socket) {
        return Err(failure(match error.kind() {
            std::io::ErrorKind::NotFound => format!(
                "there is no control socket {at}: start tmemd, or name its socket with --socket"
            ),
            std::io::ErrorKind::ConnectionRefused => format!(
                "nobody listens on the control socket {at}: tmemd was killed; start it again"
            ),
            std::io::ErrorKind::PermissionDenied => format!(
                "no permission for the control socket {at}: join its group, or use the read-only \
                 one with --socket"
            ),
            _ => format!("cannot connect to the control socket {at}: {error}"),
        }));
    }
    api::connect(socket).map_err(|error| {
        failure(format!(
            "cannot connect to the control socket {at}: {error}"
        ))
    })
}

fn refused(socket: &Path, error: &api::Error) -> Failure {
    let what = match error.kind() {
        api::ErrorKind::NoSuchVm(args) => format!(
            "the daemon has no VM {:?}: see tmemctl list",
            args.as_ref().map_or("", |args| &args.name)
        ),
        _ => match error.source_varlink_kind() {
            Some(kind) => format!("the daemon at {} did not answer: {kind}", socket.display()),
            None => format!("the daemon at {} refused: {error}", socket.display()),
        },
    };
    Failure(what, 1)
}

fn yes_no(value: bool) -> String {
    if value { "yes" } else { "no" }.into()
}

fn or_dash(value: Option<&str>) -> String {
    value.unwrap_or("-").into()
}

fn list(vms: &[api::Vm]) -> String {
    let columns = [
        ("NAME", Align::Left),
        ("CONNECTED", Align::Left),
        ("TRUST DOMAIN", Align::Left),
        ("RESERVE", Align::Right),
        ("LIMIT", Align::Right),
        ("WEIGHT", Align::Right),
        ("UUID", Align::Left),
        ("SOCKET", Align::Left),
    ];
    let row = |vm: &api::Vm| {
        vec![
            vm.name.clone(),
            yes_no(vm.connected),
            or_dash(vm.trust_domain.as_deref()),
            size(vm.quota.reserve_bytes),
            vm.quota.limit_bytes.map_or("-".into(), size),
            vm.quota.weight.to_string(),
            or_dash(vm.uuid.as_deref()),
            vm.socket.clone(),
        ]
    };
    let mut text = table(&columns, &vms.iter().map(row).collect::<Vec<_>>());
    for vm in vms {
        if let Some(problem) = &vm.problem {
            let problem = problem.replace(char::is_control, " ");
            text += &format!("\n{}: not as it was asked for: {problem}", vm.name);
        }
    }
    if text.ends_with('\n') {
        return text;
    }
    text + "\n"
}

/// The daemon in a line, the pool in two, and a row for each VM.
fn overview(daemon: &api::DaemonStats, pool: &api::PoolStats, vms: &[api::VmStats]) -> String {
    let columns = [
        ("NAME", Align::Left),
        ("CONNECTED", Align::Left),
        ("PAGES", Align::Right),
        ("ORIGINAL", Align::Right),
        ("CHARGED", Align::Right),
        ("ENTITLED", Align::Right),
        ("PUTS", Align::Right),
        ("REFUSED", Align::Right),
        ("GETS", Align::Right),
        ("HITS", Align::Right),
        ("HIT RATE", Align::Right),
        ("EVICTED", Align::Right),
        ("DRIVER", Align::Left),
    ];
    let row = |vm: &api::VmStats| {
        vec![
            vm.name.clone(),
            yes_no(vm.connected),
            vm.pages.to_string(),
            size(vm.original_bytes),
            size(vm.charged_bytes),
            size(vm.entitled_bytes),
            vm.puts.to_string(),
            vm.puts_refused.to_string(),
            vm.gets.to_string(),
            vm.hits.to_string(),
            percent(vm.hits, vm.gets),
            vm.evictions.to_string(),
            or_dash(vm.driver.as_ref().map(|driver| driver.state.as_str())),
        ]
    };
    let shrunk = if pool.size_bytes < pool.configured_bytes {
        format!(
            "; smaller than its {} since the host is short of memory",
            size(pool.configured_bytes)
        )
    } else {
        String::new()
    };
    format!(
        "daemon  {} pid {}, up {} s, {} workers, {} of {} VMs connected\n\
         pool    {} of {} held ({}): {} of pages, {} of metadata{}\n\
         \x20       {} pages of {}, {} per byte held; {} same-filled, {} shared, {} evicted\n\n{}",
        daemon.version,
        daemon.pid,
        daemon.uptime_seconds,
        daemon.workers,
        daemon.vms_connected,
        daemon.vms,
        size(pool.held_bytes),
        size(pool.size_bytes),
        percent(pool.held_bytes, pool.size_bytes),
        size(pool.payload_bytes),
        size(pool.metadata_bytes),
        shrunk,
        pool.pages,
        size(pool.original_bytes),
        ratio(pool.original_bytes, pool.held_bytes),
        pool.same_filled_pages,
        pool.shared_pages,
        pool.evictions,
        table(&columns, &vms.iter().map(row).collect::<Vec<_>>())
    )
}

/// Everything about one VM, a line each.
fn one(vm: &api::VmStats) -> String {
    let mut rows: Vec<(&str, String)> = vec![
        ("name", vm.name.clone()),
        ("connected", yes_no(vm.connected)),
        ("connections", vm.connections.to_string()),
        ("connections refused", vm.connections_refused.to_string()),
        ("virtqueues stopped", vm.queues_stopped.to_string()),
        ("requests", vm.requests.to_string()),
        ("requests stale", vm.requests_stale.to_string()),
        ("requests bad", vm.requests_bad.to_string()),
        ("pages cut by drains", vm.drain_cut_pages.to_string()),
        ("pages", vm.pages.to_string()),
        ("original", size(vm.original_bytes)),
        ("compressed", size(vm.compressed_bytes)),
        ("charged", size(vm.charged_bytes)),
        ("entitled", size(vm.entitled_bytes)),
        ("pages same-filled", vm.same_filled_pages.to_string()),
        ("pages shared", vm.shared_pages.to_string()),
        ("puts", vm.puts.to_string()),
        ("puts refused", vm.puts_refused.to_string()),
        ("gets", vm.gets.to_string()),
        (
            "hits",
            format!("{} ({})", vm.hits, percent(vm.hits, vm.gets)),
        ),
        ("evictions", vm.evictions.to_string()),
        ("pages flushed", vm.flushed_pages.to_string()),
        ("hash mismatches", vm.hash_mismatches.to_string()),
    ];
    if let Some(driver) = &vm.driver {
        rows.extend([
            ("driver", format!("{}, {}", driver.version, driver.state)),
            ("driver kernel", driver.kernel.clone()),
            ("driver hooks", format!("{:#x}", driver.hooks)),
            ("driver memory", size(driver.memory_bytes)),
            ("driver index pages", driver.index_pages.to_string()),
            ("driver puts", driver.puts.to_string()),
            ("driver puts dropped", driver.puts_dropped.to_string()),
            ("driver gets", driver.gets.to_string()),
            ("driver hits", driver.hits.to_string()),
            ("driver late", driver.late.to_string()),
            ("driver mismatches", driver.mismatches.to_string()),
            ("driver invalidations", driver.invalidations.to_string()),
        ]);
    }
    let width = rows.iter().map(|(key, _)| key.len()).max().unwrap_or(0);
    rows.iter()
        .map(|(key, value)| format!("{key:<width$}  {value}\n"))
        .collect()
}
