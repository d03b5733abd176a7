// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmem-libvirt: follows libvirt's domains and tells the daemon what they say of their caches.
//!
//! A process of its own, with a connection that only reads: libvirt's library never runs in the
//! daemon, and the daemon works without it. What the hook does at a VM's start holds while this is
//! away; quotas that change meanwhile are told when it is back.
//!
//! | file | its idea |
//! | --- | --- |
//! | `libvirt.rs` | which domains run, and which of them something happened to |
//! | `wish.rs` | what a domain's XML asks for |
//! | `daemon.rs` | makes what the daemon has what the domains ask for |

mod daemon;
mod libvirt;
mod wish;

use clap::Parser;
use daemon::Daemon;
use libvirt::{Connection, Event};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tmem_hook::Owner;

/// Without events it compares with the daemon this often, which may have been started anew: often
/// enough that nobody waits for it, and a message over a socket is cheap.
const PERIOD: Duration = Duration::from_secs(1);

/// And asks libvirt anew for all domains this often, in case an event was lost.
const ASK_ANEW: Duration = Duration::from_secs(60);

/// Pauses before libvirt is tried again: doubled from the first to the last.
const PAUSES: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(5)];

/// Tells the virtio-tmem daemon what libvirt's domains say of their caches.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// libvirt to listen to; it is only read
    #[arg(short, long, value_name = "URI", default_value = "qemu:///system")]
    connect: String,
    /// Control socket of the daemon
    #[arg(long, value_name = "PATH", default_value = tmem_control::DEFAULT_SOCKET)]
    socket: PathBuf,
    /// User that QEMU runs as, who may connect to the sockets of VMs: a name, a number, or "none" for
    /// the daemon's own; default: that of /etc/libvirt/qemu.conf, or the distribution's
    #[arg(long, value_name = "USER")]
    owner: Option<String>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    tmem_log::start("TMEM_LIBVIRT_LOG");
    let started = Owner::find(arguments.owner.as_deref()).and_then(|owner| {
        let events = libvirt::start_events()?;
        Ok((owner, events))
    });
    match started {
        Ok((owner, events)) => {
            follow(&arguments, owner, &events);
            ExitCode::SUCCESS
        }
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Never returns: libvirt and the daemon may come and go.
fn follow(arguments: &Arguments, owner: Owner, events: &Receiver<Event>) {
    let mut daemon = Daemon::new(&arguments.socket);
    let mut pause = PAUSES[0];
    let mut complained = false;
    for number in 0.. {
        match Connection::open(&arguments.connect, number) {
            Ok(connection) => {
                tracing::info!("following libvirt at {}", arguments.connect);
                (pause, complained) = (PAUSES[0], false);
                let why = session(&connection, &mut daemon, owner, events, number);
                tracing::warn!("libvirt at {} is away: {why}", arguments.connect);
            }
            Err(why) if !complained => {
                tracing::warn!(
                    "cannot connect to libvirt at {}, and goes on trying: {why}",
                    arguments.connect
                );
                complained = true;
            }
            Err(_) => {}
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(PAUSES[1]);
    }
}

/// As long as the connection holds. The reason for its end.
fn session(
    connection: &Connection,
    daemon: &mut Daemon,
    owner: Owner,
    events: &Receiver<Event>,
    number: usize,
) -> String {
    let mut asked = None;
    let mut next = Instant::now();
    loop {
        let mut changed = Vec::new();
        let wait = next.saturating_duration_since(Instant::now());
        match events.recv_timeout(wait) {
            Ok(event) => {
                // All that came together; a domain's start are several.
                for event in std::iter::once(event).chain(events.try_iter()) {
                    match event {
                        Event::Closed(which) if which == number => {
                            return "it closed the connection".into();
                        }
                        // Of a connection that was given up.
                        Event::Closed(_) => {}
                        Event::Domain(uuid) if changed.contains(&uuid) => {}
                        Event::Domain(uuid) => changed.push(uuid),
                    }
                }
            }
            Err(RecvTimeoutError::Timeout) => next = Instant::now() + PERIOD,
            Err(RecvTimeoutError::Disconnected) => return "its events have ended".into(),
        }
        let read = |uuid: &str| {
            let xml = connection.running(uuid)?;
            Ok(xml.and_then(|xml| wish::read(uuid, &xml, owner)))
        };
        let refreshed = if asked.is_none_or(|asked: Instant| asked.elapsed() >= ASK_ANEW) {
            asked = Some(Instant::now());
            connection.all_running().and_then(|uuids| {
                daemon.forget_others(&uuids);
                uuids.iter().try_for_each(|uuid| {
                    daemon.wish(uuid, read(uuid)?);
                    Ok(())
                })
            })
        } else {
            changed.iter().try_for_each(|uuid| {
                daemon.wish(uuid, read(uuid)?);
                Ok(())
            })
        };
        if let Err(why) = refreshed
            .and_then(|()| daemon.reconcile(Instant::now(), &read, &|uuid| connection.state(uuid)))
        {
            return why;
        }
    }
}
