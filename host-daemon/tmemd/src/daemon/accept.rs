// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The acceptor thread: accepts connections on all sockets and starts a thread for each connection.
//!
//! Out of scope: the protocol of a connection, see `vhost/connection.rs` and `control/varlink.rs`.

use crate::control::varlink::{self, Service};
use crate::host::heartbeat::Heartbeat;
use crate::host::sandbox::{self, ThreadKind};
use crate::socket::listener::{Listener, UnauthorizedPeer};
use crate::util::event_fd::{consume, signal};
use crate::util::log_limit::LogLimit;
use crate::vhost::connection::{self, ConnectionContext};
use crate::vm::registry::Registry;
use crate::vm::state::Vm;
use rustix::event::{EventfdFlags, PollFd, PollFlags};
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

/// Pause after a failure to accept a connection for lack of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Stack size in bytes of a connection's thread. It is small, because there may be a thousand such
/// threads, and each does little.
const CONNECTION_STACK_BYTES: usize = 512 << 10;

/// A connection: its socket, through which the daemon can end it, and its thread.
pub type Connection = (UnixStream, JoinHandle<()>);

/// The service that a listening socket offers.
#[derive(Clone)]
pub enum Purpose {
    /// Serves a vhost-user connection of this VM.
    Vm(Arc<Vm>),
    /// Serves the control interface. The number counts the connected clients. Each socket counts
    /// its own clients, so clients of the read-only socket cannot use up the slots of the other
    /// socket.
    Control(Arc<Service>, Arc<Mutex<usize>>),
}

impl Purpose {
    /// Reports a peer that the socket does not admit.
    fn refuse(&self, peer: &UnauthorizedPeer) {
        match self {
            Purpose::Vm(vm) => vm.refuse(peer),
            Purpose::Control(service, _) => {
                service.warn(format_args!("a client is refused, {peer}"))
            }
        }
    }
}

/// Joins connection threads as soon as they end, so that no resource of an ended thread is kept
/// until the next connection.
pub struct EndedThreads {
    /// Eventfd that is signalled when a connection's thread ends.
    ended: OwnedFd,
    /// Guards the threads that have ended and are not joined. Leaf lock.
    threads: Mutex<Vec<ThreadId>>,
}

impl EndedThreads {
    /// Creates an empty list of ended threads.
    ///
    /// # Errors
    /// The system has no descriptor left.
    pub fn new() -> io::Result<EndedThreads> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(EndedThreads {
            ended: rustix::event::eventfd(0, flags)?,
            threads: Mutex::default(),
        })
    }

    /// Joins the threads that have ended and removes their connections from the list.
    fn join(&self, connections: &mut Vec<Connection>) {
        consume(&self.ended);
        let ended = std::mem::take(&mut *self.lock());
        for id in ended {
            let is_it = |(_, thread): &Connection| thread.thread().id() == id;
            if let Some(at) = connections.iter().position(is_it)
                && connections.swap_remove(at).1.join().is_err()
            {
                tracing::error!("a connection's thread panicked");
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<ThreadId>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Guard that reports the end of its thread when the thread drops it.
struct EndGuard(Arc<EndedThreads>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.lock().push(std::thread::current().id());
        signal(&self.0.ended);
    }
}

/// The acceptor thread's data.
pub struct Acceptor {
    /// Sockets of the control interface.
    pub control: Vec<(Arc<Listener>, Purpose)>,
    /// The VMs, whose sockets change while the daemon runs.
    pub registry: Arc<Registry>,
    /// Parts of the daemon that each VM connection uses.
    pub shared: ConnectionContext,
    /// List of connection threads that have ended.
    pub ended: Arc<EndedThreads>,
    /// Eventfd that is signalled when the daemon stops.
    pub stop: Arc<OwnedFd>,
    /// Heartbeat of the acceptor thread.
    pub heartbeat: Heartbeat,
}

impl Acceptor {
    /// Accepts connections until `stop` is signalled. Then removes the sockets and returns the
    /// connections that are still open.
    pub fn accept_all(self) -> Vec<Connection> {
        let mut connections: Vec<Connection> = Vec::new();
        // Limits log lines, because the acceptor retries and can fail many times a second.
        let log_limit = LogLimit::default();
        loop {
            self.heartbeat.work();
            // The signal is consumed before the list of VMs is read, so that a later change signals
            // the descriptor again.
            consume(self.registry.changed());
            let listeners = self.listeners();
            let ready = match self.wait(&listeners) {
                Ok(ready) => ready,
                Err(error) => {
                    log_failure(&log_limit, "cannot wait for connections", error);
                    std::thread::sleep(ACCEPT_PAUSE);
                    continue;
                }
            };
            if ready.last() == Some(&true) {
                consume(&self.stop);
                listeners.iter().for_each(|(listener, _)| listener.close());
                return connections;
            }
            self.ended.join(&mut connections);
            let ready = listeners.iter().zip(ready).filter(|(_, ready)| *ready);
            for ((listener, purpose), _) in ready {
                match self.accept(listener, purpose) {
                    Ok(connection) => connections.extend(connection),
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => {
                        log_failure(&log_limit, "a connection cannot be accepted", error);
                        std::thread::sleep(ACCEPT_PAUSE);
                    }
                }
            }
        }
    }

    /// Returns all listening sockets: those of the control interface, then those of the VMs.
    fn listeners(&self) -> Vec<(Arc<Listener>, Purpose)> {
        let vms = self.registry.listeners().into_iter();
        let vms = vms.map(|(listener, vm)| (listener, Purpose::Vm(vm)));
        self.control.iter().cloned().chain(vms).collect()
    }

    /// Waits until a connection comes, a thread ends, the list of VMs changes or the daemon stops.
    /// Returns for each listener whether a connection waits; the last element tells whether the
    /// daemon stops.
    ///
    /// # Errors
    /// The system call that waits fails.
    fn wait(&self, listeners: &[(Arc<Listener>, Purpose)]) -> io::Result<Vec<bool>> {
        let mut fds: Vec<PollFd<'_>> = listeners
            .iter()
            .map(|(listener, _)| PollFd::new(&listener.socket, PollFlags::IN))
            .collect();
        fds.push(PollFd::new(self.registry.changed(), PollFlags::IN));
        fds.push(PollFd::new(&self.ended.ended, PollFlags::IN));
        fds.push(PollFd::new(&self.stop, PollFlags::IN));
        self.heartbeat.rest();
        let polled = rustix::event::poll(&mut fds, None);
        self.heartbeat.work();
        match polled {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect())
    }

    /// Accepts one connection and starts its thread. Returns None if the peer is not authorized.
    ///
    /// # Errors
    /// No connection waits (`WouldBlock`), or the system lacks a resource.
    fn accept(&self, listener: &Listener, purpose: &Purpose) -> io::Result<Option<Connection>> {
        match listener.accept()? {
            Ok(stream) => {
                let guard = EndGuard(self.ended.clone());
                spawn(stream, purpose, &self.shared, guard).map(Some)
            }
            Err(peer) => {
                purpose.refuse(&peer);
                Ok(None)
            }
        }
    }
}

/// Logs a failure of the acceptor, at a bounded rate.
fn log_failure(log_limit: &LogLimit, what: &str, error: io::Error) {
    if let Some(left_out) = log_limit.admit(Instant::now()) {
        // The log line omits the number of left-out lines if it is 0.
        let left_out = (left_out > 0).then_some(left_out);
        tracing::error!(left_out, "{what}: {error}");
    }
}

/// Slot of one client at a control socket. Dropping the value frees the slot.
struct ClientSlot(Arc<Mutex<usize>>);

impl ClientSlot {
    /// Takes a slot at the socket; None if all slots are taken.
    fn claim(clients: &Arc<Mutex<usize>>) -> Option<ClientSlot> {
        let mut count = clients.lock().unwrap_or_else(PoisonError::into_inner);
        if *count >= varlink::CLIENTS_MAX {
            return None;
        }
        *count += 1;
        Some(ClientSlot(clients.clone()))
    }
}

impl Drop for ClientSlot {
    fn drop(&mut self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
    }
}

/// Starts the thread that serves a connection.
///
/// # Errors
/// The system lacks a descriptor or a thread.
fn spawn(
    stream: UnixStream,
    purpose: &Purpose,
    shared: &ConnectionContext,
    guard: EndGuard,
) -> io::Result<Connection> {
    let handle = stream.try_clone()?;
    let builder = std::thread::Builder::new().stack_size(CONNECTION_STACK_BYTES);
    let thread = match purpose {
        Purpose::Vm(vm) => {
            let (vm, shared) = (vm.clone(), shared.clone());
            let builder = builder.name(format!("vm-{}", vm.name()));
            builder.spawn(move || {
                let _guard = guard;
                serve_vm(&vm, stream, &shared);
            })?
        }
        Purpose::Control(service, clients) => {
            let (service, clients) = (service.clone(), clients.clone());
            builder.name("control".into()).spawn(move || {
                let _guard = guard;
                serve_control(&service, &clients, &stream);
            })?
        }
    };
    Ok((handle, thread))
}

/// Serves a VM's connection until it ends.
fn serve_vm(vm: &Arc<Vm>, stream: UnixStream, shared: &ConnectionContext) {
    sandbox::narrow(ThreadKind::Connection);
    // The acceptor holds another handle of the socket. Shutting the socket down shows the peer the
    // end of the connection before that handle is closed.
    let end = stream.try_clone();
    connection::serve(vm, stream, shared);
    if let Ok(end) = end {
        let _ = end.shutdown(Shutdown::Both);
    }
}

/// Serves a control client until its connection ends, if a slot is free.
fn serve_control(service: &Service, clients: &Arc<Mutex<usize>>, stream: &UnixStream) {
    if let Some(_slot) = ClientSlot::claim(clients) {
        let serve = AssertUnwindSafe(|| varlink::serve(service, stream));
        if catch_unwind(serve).is_err() {
            tracing::error!("a bug: the thread of a control client panicked");
        }
    } else {
        service.warn(format_args!(
            "a client is refused: {} clients are connected already",
            varlink::CLIENTS_MAX
        ));
    }
    let _ = stream.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_that_panics_releases_its_slot() {
        let clients = Arc::default();
        for _ in 0..varlink::CLIENTS_MAX + 1 {
            let client = AssertUnwindSafe(|| {
                let _slot =
                    ClientSlot::claim(&clients).expect("CLIENTS_MAX clients are already connected");
                panic!("a simulated bug");
            });
            let panic = catch_unwind(client).expect_err("the client's thread did not panic");
            assert!(
                panic.is::<&str>(),
                "the slot of the panicked client was not released"
            );
        }
        let slots: Vec<_> = (0..varlink::CLIENTS_MAX)
            .map(|_| {
                ClientSlot::claim(&clients).expect("CLIENTS_MAX clients are already connected")
            })
            .collect();
        assert!(ClientSlot::claim(&clients).is_none());
        drop(slots);
        assert!(ClientSlot::claim(&clients).is_some());
    }
}
