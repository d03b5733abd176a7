// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The acceptor thread: accepts connections on all sockets and starts a thread for each connection.
//!
//! Out of scope: the protocol of a connection, see `vhost/connection.rs` and `control/varlink.rs`.

use crate::control::varlink::{self, Service};
use crate::host::heartbeat::Heartbeat;
use crate::host::sandbox::{self, ThreadKind};
use crate::memory::peer::Peer;
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

/// Pause after a failed accept(2) or poll(2), for example because the system lacks descriptors or
/// memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Stack size in bytes of a thread that serves one connection. The stack is small, because there
/// may be a thousand such threads, and each does little.
const CONNECTION_STACK_BYTES: usize = 512 << 10;

/// Socket and thread of a connection. The daemon ends the connection by shutting the socket down.
pub type Connection = (UnixStream, JoinHandle<()>);

/// Prefix of the name of a thread that serves a VM's connection, before the name of the VM.
const VM_THREAD: &str = "vm-";

/// Joins the thread of a connection. Logs an error with the name of the VM if the thread panicked.
pub fn join(thread: JoinHandle<()>) {
    let name = thread.thread().name().unwrap_or_default().to_owned();
    if thread.join().is_ok() {
        return;
    }
    match name.strip_prefix(VM_THREAD) {
        Some(vm) => tracing::error!(
            %vm,
            "a bug: the thread of the VM's connection panicked; report it with this log"
        ),
        None => tracing::error!(
            "a bug: the thread of a control client panicked; report it with this log"
        ),
    }
}

/// The service that a listening socket offers.
#[derive(Clone)]
pub enum Purpose {
    /// vhost-user service for the front end (QEMU) of this VM.
    Vm(Arc<Vm>),
    /// Control interface, with the number of clients that are connected to this socket. Each socket
    /// counts its own clients, so clients of the read-only socket cannot use up the slots of the
    /// full socket.
    Control(Arc<Service>, Arc<Mutex<usize>>),
}

impl Purpose {
    /// Logs that a peer connected to the socket without permission. For a VM's socket, also counts
    /// the refused connection and sends an event.
    fn report_unauthorized(&self, peer: &UnauthorizedPeer) {
        match self {
            Purpose::Vm(vm) => vm.report_unauthorized(peer),
            Purpose::Control(service, _) => {
                service.warn(format_args!("a client is refused: {peer}"))
            }
        }
    }
}

/// Threads of connections that have ended and must be joined. The acceptor thread joins them at
/// once. Otherwise it would keep their resources until the next connection arrives.
pub struct EndedThreads {
    /// Eventfd that is signalled when a connection's thread ends.
    ended: OwnedFd,
    /// Guards the ids of connection threads that have ended and are not joined yet. Leaf lock.
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

    /// Joins the connection threads that have ended, and removes their connections from
    /// `connections`.
    fn join(&self, connections: &mut Vec<Connection>) {
        consume(&self.ended);
        let ended = std::mem::take(&mut *self.lock());
        for id in ended {
            let is_it = |(_, thread): &Connection| thread.thread().id() == id;
            if let Some(at) = connections.iter().position(is_it) {
                join(connections.swap_remove(at).1);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<ThreadId>> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Guard that a connection's thread drops when it ends. The drop reports the thread in
/// [`EndedThreads`].
struct EndGuard(Arc<EndedThreads>);

impl Drop for EndGuard {
    fn drop(&mut self) {
        self.0.lock().push(std::thread::current().id());
        signal(&self.0.ended);
    }
}

/// Data that the acceptor thread uses.
pub struct Acceptor {
    /// Listening sockets of the control interface.
    pub control: Vec<(Arc<Listener>, Purpose)>,
    /// Registry of all VMs. VMs and their sockets come and go while the daemon runs.
    pub registry: Arc<Registry>,
    /// Parts of the daemon that each VM connection uses, such as the workers.
    pub shared: ConnectionContext,
    /// List of connection threads that have ended and must be joined.
    pub ended: Arc<EndedThreads>,
    /// Eventfd that the daemon signals to stop the acceptor thread.
    pub stop: Arc<OwnedFd>,
    /// Heartbeat of the acceptor thread.
    pub heartbeat: Heartbeat,
}

impl Acceptor {
    /// Accepts connections until `stop` is signalled. Then removes the socket files and returns the
    /// connections that are still open.
    pub fn accept_all(self) -> Vec<Connection> {
        let mut connections: Vec<Connection> = Vec::new();
        // This limit bounds the log lines, because the acceptor retries and can fail many times a
        // second.
        let log_limit = LogLimit::default();
        loop {
            self.heartbeat.work();
            // The eventfd is reset before the list of VMs is read. A change of the list after the
            // read therefore signals the eventfd again.
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

    /// Returns all listening sockets with their services: first those of the control interface,
    /// then those of the VMs.
    fn listeners(&self) -> Vec<(Arc<Listener>, Purpose)> {
        let vms = self.registry.listeners().into_iter();
        let vms = vms.map(|(listener, vm)| (listener, Purpose::Vm(vm)));
        self.control.iter().cloned().chain(vms).collect()
    }

    /// Waits until a connection arrives, a connection's thread ends, the list of VMs changes or the
    /// daemon stops. The first elements of the result tell for each listener whether a connection
    /// waits. The last element tells whether the daemon stops.
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
                purpose.report_unauthorized(&peer);
                Ok(None)
            }
        }
    }
}

/// Logs a failure of the acceptor thread, unless the rate of such lines exceeds the limit.
fn log_failure(log_limit: &LogLimit, what: &str, error: io::Error) {
    if let Some(left_out) = log_limit.admit(Instant::now()) {
        // The log line contains the number of left-out lines only if lines were left out.
        let left_out = (left_out > 0).then_some(left_out);
        tracing::error!(left_out, "{what}: {error}");
    }
}

/// Slot of one client at a control socket. Dropping the value frees the slot for another client.
struct ClientSlot(Arc<Mutex<usize>>);

impl ClientSlot {
    /// Takes a slot for a client of the control socket; returns None if all slots are taken.
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
            let peer = Peer::new(stream.try_clone()?);
            let builder = builder.name(format!("{VM_THREAD}{}", vm.name()));
            builder.spawn(move || {
                let _guard = guard;
                serve_vm(&vm, stream, peer, &shared);
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

/// Serves the connection of a VM's front end until the connection ends.
fn serve_vm(vm: &Arc<Vm>, stream: UnixStream, peer: Peer, shared: &ConnectionContext) {
    sandbox::narrow(ThreadKind::Connection);
    // The acceptor thread has a duplicate of the socket's descriptor, so dropping `stream` does not
    // end the connection. Therefore the socket is shut down: the peer sees the end at once.
    let end = stream.try_clone();
    connection::serve(vm, stream, peer, shared);
    if let Ok(end) = end {
        let _ = end.shutdown(Shutdown::Both);
    }
}

/// Serves a control client until its connection ends. Refuses the client if no slot is free.
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
    fn a_panic_in_a_client_thread_releases_its_connection_slot() {
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
