// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Command line of tmemctl: the commands, and which function runs each of them.

use crate::client::{connect, refused, stats};
use crate::exit::{Code, Failure, HELP, exit_now};
use crate::output::Output;
use crate::reach::{Reach, within_timeout};
use crate::{advise, args, doctor, event, operate, quota, show, table, top, trace, watch};
use clap::{Parser, Subcommand};
use std::path::PathBuf;
use tmem_control as api;
use tmem_control::VarlinkClientInterface;

#[cfg(feature = "libvirt")]
use crate::libvirt;

/// Command line of the virtio-tmem host daemon.
#[derive(Parser)]
#[command(version, after_help = HELP)]
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
    Quota(args::QuotaArguments),
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
    } = Arguments::try_parse().unwrap_or_else(|error| usage_error(&error));
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
            Ok((output, false)) => output.print(json),
            Ok((output, true)) => match output.print(json) {
                Ok(()) => exit_now(Code::Faults as u8),
                failed => failed,
            },
            Err(failure) => Err(failure),
        },
        Command::Event(event) => event::run(&reach, &event),
        Command::Advise(advise) => {
            advise::run(&reach, &advise).and_then(|output| output.print(json))
        }
        // `trace` sends no request to a service, and a trace can be long, so no time limit applies.
        Command::Trace(trace) => trace::run(&trace).and_then(|output| output.print(json)),
        command => {
            let asked = command.asks(&reach);
            let output = within_timeout(&asked, &reach, move |reach| run(command, reach));
            output.and_then(|output| output.print(json))
        }
    };
    match done {
        Ok(()) => exit_now(0),
        Err(failure) => exit_now(failure.print(json)),
    }
}

/// Prints an error in the command line, or the help text or version that the user asked for.
fn usage_error(error: &clap::Error) -> ! {
    if error.use_stderr() && std::env::args_os().any(|word| word == "--json") {
        let message = error.to_string();
        let message = message.trim_end();
        let message = message.strip_prefix("error: ").unwrap_or(message);
        exit_now(Failure(message.into(), Code::Usage).print(true));
    }
    error.exit();
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
            Output::from_reply(show::list_text(&reply.vms, &table)?, &reply)
        }
        Command::Stats { vm, table, .. } => {
            let reply = stats(reach, vm.clone())?;
            let text = match (&reply.vms[..], vm) {
                (vms, _) if table.is_chosen() => show::stats_table(vms, &table)?,
                ([vm], Some(_)) => show::vm_text(vm, table.sizes()),
                (vms, _) => show::overview_text(&reply, vms, &table)?,
            };
            Output::from_reply(text, &reply)
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
