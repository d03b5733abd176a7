// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmemctl: command line for the daemon's control socket. It also adds the virtio-tmem device to
//! libvirt's domains. docs/tmemctl.md describes its commands, JSON and exit codes.
//!
//! | file | contents |
//! | --- | --- |
//! | `client.rs`, `exit.rs` | calls to the daemon, failures and exit codes |
//! | `show.rs`, `table.rs` | text of `list` and `stats`, tables and units |
//! | `operate.rs`, `quota.rs`, `libvirt.rs`, `retain.rs` | commands that change something |
//! | `packaged.rs` | the QEMU of the package virtio-tmem-qemu |

mod advise;
mod client;
mod doctor;
#[cfg(feature = "libvirt")]
mod emulator;
mod event;
mod exit;
#[cfg(feature = "libvirt")]
mod libvirt;
mod operate;
#[cfg(feature = "libvirt")]
mod packaged;
mod quota;
#[cfg(feature = "libvirt")]
mod retain;
mod show;
mod table;
mod top;
mod trace;
mod watch;

use clap::{Parser, Subcommand};
use client::{connect, refused};
use exit::{Code, Failure};
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;
use tmem_control as api;
use tmem_control::VarlinkClientInterface;

/// Command line of the virtio-tmem host daemon.
#[derive(Parser)]
#[command(version, after_help = exit::HELP)]
struct Arguments {
    /// Control socket of the daemon; the read-only one suffices for commands that change nothing
    #[arg(long, global = true, value_name = "PATH", default_value = api::DEFAULT_SOCKET)]
    socket: PathBuf,
    /// Seconds to wait for an answer of the daemon or of libvirt, at least 1
    #[arg(long, global = true, value_name = "N", default_value_t = 10,
          value_parser = clap::value_parser!(u64).range(1..=3600))]
    timeout: u64,
    /// Print JSON, as docs/tmemctl.md describes it
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Clone, Subcommand)]
enum Command {
    /// List the VMs that the daemon serves
    List {
        #[command(flatten)]
        table: table::TableArguments,
    },
    /// Print statistics of the daemon, the pool and its VMs
    Stats {
        /// Print all figures of this VM; with --output, print its row of the table
        vm: Option<String>,
        #[command(flatten)]
        watch: watch::WatchArguments,
        #[command(flatten)]
        table: table::TableArguments,
    },
    /// Show pool and VMs as they change
    Top(top::TopArguments),
    /// Print what each VM would gain from more pool memory, and how much it could give up
    Advise(advise::AdviseArguments),
    /// Drop the pages of VMs; the guests then read these pages from their disks
    Flush(operate::VmsArguments),
    /// Refuse puts of VMs; their stored pages can still be read
    Freeze(operate::VmsArguments),
    /// Accept puts of frozen VMs again
    Thaw(operate::VmsArguments),
    /// Print the size of the pool and how much memory it could give back to the host, or set its
    /// size
    Pool(operate::PoolArguments),
    /// Check host, daemon, VMs and domains, and print the remedy for each fault
    Doctor(doctor::DoctorArguments),
    /// Wait for one event, or print events as they happen
    Event(event::EventArguments),
    /// Summarize a recorded trace
    Trace(trace::TraceArguments),
    /// Print the versions of this command and of the daemon
    Version,
    /// Attach the device to a libvirt domain, or change the settings of an attached device
    #[cfg(feature = "libvirt")]
    Attach(libvirt::AttachArguments),
    /// Detach the device from a libvirt domain, and undo all changes of attach
    #[cfg(feature = "libvirt")]
    Detach(libvirt::DetachArguments),
    /// Print or set the quota of a VM
    Quota(quota::QuotaArguments),
}

impl Command {
    /// Returns the name of the service that the command calls (libvirt or the daemon), for error
    /// messages.
    fn asks(&self, reach: &Reach) -> String {
        match self {
            #[cfg(feature = "libvirt")]
            Command::Attach(attach) => attach.target.asks(),
            #[cfg(feature = "libvirt")]
            Command::Detach(detach) => detach.target.asks(),
            #[cfg(feature = "libvirt")]
            Command::Quota(quota) => format!("{}, or {},", quota.target().asks(), reach.daemon()),
            _ => reach.daemon(),
        }
    }
}

/// Output of a command, as text and as JSON.
struct Output {
    text: String,
    json: serde_json::Value,
}

impl Output {
    /// Builds the output of a command from a reply of the daemon. The JSON output is the reply
    /// itself.
    fn reply(text: String, reply: &impl serde::Serialize) -> Result<Output, Failure> {
        let json = serde_json::to_value(reply).map_err(|e| Failure(e.to_string(), Code::Failed))?;
        Ok(Output { text, json })
    }
}

/// Options that each command needs to call the daemon and to print the answer.
#[derive(Clone)]
struct Reach {
    socket: PathBuf,
    timeout: u64,
    json: bool,
}

impl Reach {
    /// Returns half of the command's time limit. A command waits no longer than this for another
    /// program, such as an emulator, that it runs as one of its steps.
    #[cfg(feature = "libvirt")]
    fn half_the_time(&self) -> Duration {
        Duration::from_secs(self.timeout) / 2
    }

    fn daemon(&self) -> String {
        format!("the daemon at {}", self.socket.display())
    }
}

/// Returns the definition of tmemctl's command line, from which man pages and completions are made.
pub fn command() -> clap::Command {
    <Arguments as clap::CommandFactory>::command()
}

/// Runs the command that the process's arguments name, and ends the process with its exit code.
pub fn main() {
    let Arguments {
        socket,
        timeout,
        json,
        command,
    } = Arguments::try_parse().unwrap_or_else(|error| wrong_usage(&error));
    let reach = Reach {
        socket,
        timeout,
        json,
    };
    let done = match command {
        // `stats --watch`, `top`, `doctor`, `event` and `advise` run until the user stops them, or
        // apply the time limit to each of their requests.
        Command::Stats { vm, watch, table } if watch.is_asked() => {
            watch::run(&reach, vm.as_deref(), &watch, &table)
        }
        Command::Top(top) => top::run(&reach, &top),
        Command::Doctor(doctor) => match doctor::run(&reach, &doctor) {
            Ok((output, false)) => say(json, &output),
            Ok((output, true)) => match say(json, &output) {
                Ok(()) => leave(Code::Faults as u8),
                failed => failed,
            },
            Err(failure) => Err(failure),
        },
        Command::Event(event) => event::run(&reach, &event),
        Command::Advise(advise) => {
            advise::run(&reach, &advise).and_then(|output| say(json, &output))
        }
        // `trace` sends no request to a service, and a trace can be long, so no time limit applies.
        Command::Trace(trace) => trace::run(&trace).and_then(|output| say(json, &output)),
        command => {
            let asked = command.asks(&reach);
            let output = in_time(&asked, &reach, move |reach| run(command, reach));
            output.and_then(|output| say(json, &output))
        }
    };
    match done {
        Ok(()) => leave(0),
        Err(failure) => leave(fail(&failure, json)),
    }
}

/// Prints an error in the command line, or the help text or version that the user asked for.
fn wrong_usage(error: &clap::Error) -> ! {
    if error.use_stderr() && std::env::args_os().any(|word| word == "--json") {
        let message = error.to_string();
        let message = message.trim_end();
        let message = message.strip_prefix("error: ").unwrap_or(message);
        leave(fail(&Failure(message.into(), Code::Usage), true));
    }
    error.exit();
}

/// Ends the process without running exit handlers. Handlers of C libraries (OpenSSL, GLib) free
/// memory that a thread of [`in_time`] may still use, and have corrupted the heap that way. The
/// functions that print have flushed all output before.
fn leave(code: u8) -> ! {
    // SAFETY: _exit ends the process at once and does not access its memory.
    unsafe { libc::_exit(i32::from(code)) }
}

fn say(json: bool, output: &Output) -> Result<(), Failure> {
    if json {
        return print(&format!("{:#}\n", output.json));
    }
    print(&output.text)
}

/// Prints a text to stdout and flushes it.
fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    match stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush())
    {
        Ok(()) => Ok(()),
        // EPIPE means that the reader has closed the pipe, as head(1) does after its last line.
        Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => leave(0),
        Err(error) => Err(Failure(format!("cannot print: {error}"), Code::Failed)),
    }
}

fn fail(failure: &Failure, json: bool) -> u8 {
    // If stderr cannot be written, the exit code still reports the failure.
    let _ = std::io::stderr().write_all(failure.line(json).as_bytes());
    failure.1 as u8
}

/// Runs `run` on another thread, and fails after the time limit. A thread is necessary because even
/// connect() may block: the socket of a service that hangs still exists. `asked` names the service
/// in the error message.
fn in_time<T: Send + 'static>(
    asked: &str,
    reach: &Reach,
    run: impl FnOnce(&Reach) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let limit = Duration::from_secs(reach.timeout);
    within(limit, reach, run).unwrap_or_else(|| Err(late(asked, reach)))
}

/// Runs `run` on another thread and returns its result; None if it takes longer than `limit`.
fn within<T: Send + 'static>(
    limit: Duration,
    reach: &Reach,
    run: impl FnOnce(&Reach) -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = std::sync::mpsc::channel();
    let own = reach.clone();
    std::thread::spawn(move || {
        // Sending fails if the time limit has passed, because the receiver no longer exists then.
        let _ = sender.send(run(&own));
    });
    receiver.recv_timeout(limit).ok()
}

fn late(asked: &str, reach: &Reach) -> Failure {
    let what = format!(
        "{asked} did not answer within {} s: it hangs or is stopped, or the host is overloaded \
         (--timeout waits longer)",
        reach.timeout
    );
    Failure(what, Code::Timeout)
}

/// Gets the statistics of the daemon, the pool and all VMs or, with `vm`, of that VM only.
fn stats(reach: &Reach, vm: Option<String>) -> Result<api::GetStats_Reply, Failure> {
    let mut client = connect(&reach.socket)?;
    let reply = client.get_stats(vm).call();
    reply.map_err(|error| refused(&reach.socket, &error))
}

fn run(command: Command, reach: &Reach) -> Result<Output, Failure> {
    let socket = &reach.socket;
    let failed = |error: api::Error| refused(socket, &error);
    match command {
        #[cfg(feature = "libvirt")]
        Command::Attach(attach) => libvirt::attach(&attach, reach),
        #[cfg(feature = "libvirt")]
        Command::Detach(detach) => libvirt::detach(&detach),
        Command::Quota(quota) => quota::run(&quota, socket),
        Command::List { table } => {
            let reply = connect(socket)?.list_vms().call().map_err(failed)?;
            Output::reply(show::list(&reply.vms, &table)?, &reply)
        }
        Command::Stats { vm, table, .. } => {
            let reply = stats(reach, vm.clone())?;
            let text = match (&reply.vms[..], vm) {
                (vms, _) if table.is_chosen() => show::rows(vms, &table)?,
                ([vm], Some(_)) => show::one(vm, table.sizes()),
                (vms, _) => show::overview(&reply, vms, &table)?,
            };
            Output::reply(text, &reply)
        }
        Command::Flush(vms) => operate::flush(reach, &vms),
        Command::Freeze(vms) => operate::set_frozen(reach, &vms, true),
        Command::Thaw(vms) => operate::set_frozen(reach, &vms, false),
        Command::Pool(pool) => operate::pool(reach, &pool),
        Command::Version => operate::version(reach),
        Command::Event(_)
        | Command::Advise(_)
        | Command::Top(_)
        | Command::Trace(_)
        | Command::Doctor(_) => Err(Failure(
            "internal error: this command is not handled here".into(),
            Code::Failed,
        )),
    }
}
