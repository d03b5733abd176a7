// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The control thread of a VM's connection, which processes vhost-user messages one by one.
//!
//! A front end (VMM) that sends half a message, or none, blocks only the thread of its own
//! connection. When the connection ends, for whatever reason, the control thread stops the vrings
//! and empties the VM's tenant, its record in the pool.

use crate::events::bus::EventKind;
use crate::host::background::BackgroundWorkers;
use crate::host::clock::ClockAndEntropy;
use crate::memory::peer::Peer;
use crate::queue::worker::Workers;
use crate::vhost::device::Device;
use crate::vm::state::{Connected, NoPlace, Vm};
use std::os::unix::net::UnixStream;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use vhost::vhost_user::{BackendReqHandler, Error};

/// Parts of the daemon that each VM connection uses.
#[derive(Clone)]
pub struct ConnectionContext {
    /// The data workers, which answer requests of guests.
    pub workers: Arc<Workers>,
    /// The background workers, which compress pages and unmap old guest memory.
    pub background: Arc<BackgroundWorkers>,
    /// The daemon's clock and entropy source.
    pub clock: ClockAndEntropy,
}

/// Connection of a VM's front end, from its first message to its end. Each VM has one slot for a
/// front end, which the session occupies.
pub struct Session {
    device: Arc<Mutex<Device>>,
    background: Arc<BackgroundWorkers>,
    /// The VM's slot for a front end. It is the last field, because Rust drops fields in their
    /// order: the slot becomes free only after the device has ended.
    _connected: Connected,
}

impl Session {
    /// Occupies the VM's slot for a front end and empties the VM's tenant. Returns None and logs
    /// the reason if the slot is taken or the system lacks a resource. Returns None without a
    /// message if the VM was removed.
    pub fn begin(
        vm: &Arc<Vm>,
        stream: &UnixStream,
        peer: Peer,
        shared: &ConnectionContext,
    ) -> Option<Session> {
        let connected = match Connected::claim(vm, stream) {
            Ok(connected) => connected,
            Err(NoPlace::Taken) => {
                vm.count_refusal(format_args!("there is a connection already"));
                vm.warn(format_args!(
                    "a second connection to {} is refused: the first one is still open",
                    vm.config.socket.display()
                ));
                return None;
            }
            // The peer connected just before the VM's socket was removed, so the connection is
            // dropped without a message.
            Err(NoPlace::Removed) => return None,
            Err(NoPlace::NoHandle) => {
                vm.warn(format_args!("no file descriptor is left for a connection"));
                return None;
            }
        };
        vm.counters.connections.fetch_add(1, Ordering::Relaxed);
        // The tenant, the VM's record in the pool, must be empty when a connection starts.
        vm.clear();
        let (workers, background) = (shared.workers.clone(), shared.background.clone());
        let clock = shared.clock.clone();
        match Device::new(vm.clone(), peer, workers, background, clock) {
            Ok(device) => Some(Session {
                device: Arc::new(Mutex::new(device)),
                background: shared.background.clone(),
                _connected: connected,
            }),
            Err(error) => {
                vm.warn(format_args!("a connection cannot be served: {error}"));
                None
            }
        }
    }

    /// Returns the device that processes the connection's vhost-user messages.
    pub fn device(&self) -> &Arc<Mutex<Device>> {
        &self.device
    }

    /// Ends the connection: stops the vrings and drops all pages of the VM.
    pub fn end(self) {
        let mut device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        device.end();
        drop(device);
        self.background.wake();
    }
}

/// Processes the vhost-user messages of a VM's connection until it ends.
pub fn serve(vm: &Arc<Vm>, stream: UnixStream, peer: Peer, shared: &ConnectionContext) {
    let Some(session) = Session::begin(vm, &stream, peer, shared) else {
        return;
    };
    let device = session.device().clone();
    vm.info(format_args!("connected"));
    vm.emit(EventKind::Connected, format_args!("connected"));
    let mut handler = BackendReqHandler::from_stream(stream, device.clone());
    let end = std::panic::catch_unwind(AssertUnwindSafe(|| {
        loop {
            match handler.handle_request() {
                Ok(()) => {
                    let device = device.lock().unwrap_or_else(PoisonError::into_inner);
                    if device.memory_is_lost() {
                        return None;
                    }
                }
                Err(Error::Disconnected) => return None,
                Err(error) => {
                    let mut device = device.lock().unwrap_or_else(PoisonError::into_inner);
                    if !device.take_refused() {
                        return Some(error);
                    }
                }
            }
        }
    }));
    let lost = || {
        let device = device.lock().unwrap_or_else(PoisonError::into_inner);
        device.memory_is_lost()
    };
    match end {
        Ok(_) if lost() => vm.warn(format_args!(
            "connection ended: a page of the guest's memory was lost: its file was truncated, a hole \
             was punched into a file of huge pages, a tmpfs is full, or the host's memory has an \
             error"
        )),
        Ok(None) => vm.info(format_args!("disconnected")),
        Ok(Some(error)) => vm.warn(format_args!("connection ended: {error}")),
        Err(_) => tracing::error!(
            vm = %vm.name(),
            "connection ended: its control thread panicked, which is a bug in the daemon"
        ),
    }
    vm.emit(EventKind::Disconnected, format_args!("disconnected"));
    session.end();
}
