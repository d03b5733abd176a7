// SPDX-License-Identifier: Apache-2.0 OR MIT
//! tmem-libvirt: follows libvirt's domains and passes their cache settings on to the daemon.
//!
//! The bridge is a process of its own with a read-only connection to libvirt. libvirt's library
//! therefore never runs in the daemon, and the daemon works without libvirt. While the bridge does
//! not run, the daemon keeps the settings from each VM's start. When the bridge runs again, it
//! sends the changes of quotas that it has missed.
//!
//! | file | contents |
//! | --- | --- |
//! | `libvirt.rs` | lists running domains, and receives events about them |
//! | `request.rs` | reads what a domain's XML requests of the daemon |
//! | `reconcile.rs` | makes the daemon's VMs correspond to the domains |

mod libvirt;
mod reconcile;
mod request;

use clap::Parser;
use libvirt::{Connection, Event};
use reconcile::Reconciler;
use std::process::ExitCode;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};
use tmem_libvirt::{Arguments, Owner};

/// Longest time between two comparisons of the daemon's VMs with libvirt's domains. They are
/// repeated because the daemon may have restarted. Operators hardly notice a delay of 1 s, and a
/// comparison costs only a message over a socket.
const PERIOD: Duration = Duration::from_secs(1);

/// Time between two complete queries of libvirt's domains. They are repeated because an event may
/// have been lost.
const QUERY_PERIOD: Duration = Duration::from_secs(60);

/// Shortest and longest pause before the bridge connects to libvirt again. After each failure, the
/// pause is twice as long as the one before.
const PAUSES: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(5)];

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    tmem_control::log::start("TMEM_LIBVIRT_LOG");
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

/// Follows libvirt's domains, and reconnects whenever the connection ends. Never returns.
fn follow(arguments: &Arguments, owner: Owner, events: &Receiver<Event>) {
    let mut reconciler = Reconciler::new(&arguments.socket);
    let mut pause = PAUSES[0];
    let mut has_logged = false;
    for number in 0.. {
        match Connection::open(&arguments.connect, number) {
            Ok(connection) => {
                tracing::info!("following libvirt at {}", arguments.connect);
                (pause, has_logged) = (PAUSES[0], false);
                let why = session(&connection, &mut reconciler, owner, events, number);
                tracing::warn!(
                    "lost the connection to libvirt at {}: {why}; reconnecting",
                    arguments.connect
                );
            }
            Err(why) if !has_logged => {
                tracing::warn!(
                    "cannot connect to libvirt at {}: {why}; retrying",
                    arguments.connect
                );
                has_logged = true;
            }
            Err(_) => {}
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(PAUSES[1]);
    }
}

/// Follows libvirt's domains until the connection ends, and returns the reason for its end.
fn session(
    connection: &Connection,
    reconciler: &mut Reconciler,
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
                // The loop takes all waiting events together, because the start of a domain causes
                // several events.
                for event in std::iter::once(event).chain(events.try_iter()) {
                    match event {
                        Event::Closed(which) if which == number => {
                            return "it closed the connection".into();
                        }
                        // The end of an earlier connection to libvirt is ignored.
                        Event::Closed(_) => {}
                        Event::Domain(uuid) if changed.contains(&uuid) => {}
                        Event::Domain(uuid) => changed.push(uuid),
                    }
                }
            }
            Err(RecvTimeoutError::Timeout) => next = Instant::now() + PERIOD,
            Err(RecvTimeoutError::Disconnected) => {
                return "the event stream of libvirt ended".into();
            }
        }
        let read = |uuid: &str| {
            let xml = connection.running_xml(uuid)?;
            Ok(xml.and_then(|xml| request::read(uuid, &xml, owner)))
        };
        let refreshed = if asked.is_none_or(|asked: Instant| asked.elapsed() >= QUERY_PERIOD) {
            asked = Some(Instant::now());
            connection.running_uuids().and_then(|uuids| {
                reconciler.forget_others(&uuids);
                uuids.iter().try_for_each(|uuid| {
                    reconciler.set_request(uuid, read(uuid)?);
                    Ok(())
                })
            })
        } else {
            changed.iter().try_for_each(|uuid| {
                reconciler.set_request(uuid, read(uuid)?);
                Ok(())
            })
        };
        if let Err(why) = refreshed.and_then(|()| {
            reconciler.reconcile(Instant::now(), &read, &|uuid| connection.state(uuid))
        }) {
            return why;
        }
    }
}
