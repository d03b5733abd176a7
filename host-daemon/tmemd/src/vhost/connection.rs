// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The control thread of a VM's connection: takes its messages one by one.
//!
//! A front end that sends half a message, or nothing, holds up its own thread and nobody else's.
//! Whatever ends the loop, the tenant is emptied and the vrings are stopped.

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

/// What a connection shares with the daemon.
#[derive(Clone)]
pub struct ConnectionContext {
    /// The data workers.
    pub workers: Arc<Workers>,
    /// The background thread.
    pub background: Arc<BackgroundWorkers>,
    /// Time and chance.
    pub clock: ClockAndEntropy,
}

/// A connection that has its VM's place, from its first message to its end.
pub struct Session {
    device: Arc<Mutex<Device>>,
    background: Arc<BackgroundWorkers>,
    /// Last, so that nobody else has the place before the device has ended.
    _connected: Connected,
}

impl Session {
    /// Takes the VM's place and empties it; None: it is logged why not.
    pub fn begin(
        vm: &Arc<Vm>,
        stream: &UnixStream,
        peer: Peer,
        shared: &ConnectionContext,
    ) -> Option<Session> {
        let connected = match Connected::claim(vm, stream) {
            Ok(connected) => connected,
            Err(NoPlace::Taken) => {
                vm.refused(format_args!("there is one already"));
                vm.warn(format_args!(
                    "a second connection to {} is refused: the first one is still there",
                    vm.config.socket.display()
                ));
                return None;
            }
            // It came just before its socket went.
            Err(NoPlace::Removed) => return None,
            Err(NoPlace::NoHandle) => {
                vm.warn(format_args!("no file descriptor is left for a connection"));
                return None;
            }
        };
        vm.counters.connections.fetch_add(1, Ordering::Relaxed);
        // A connection starts empty, whatever was before.
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

    /// What its messages are for.
    pub fn device(&self) -> &Arc<Mutex<Device>> {
        &self.device
    }

    /// Ends it: the vrings are stopped and the VM is emptied.
    pub fn end(self) {
        let mut device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        device.end();
        drop(device);
        self.background.wake();
    }
}

/// Serves a connection to its end.
pub fn serve(vm: &Arc<Vm>, stream: UnixStream, shared: &ConnectionContext) {
    let Ok(same) = stream.try_clone() else {
        vm.warn(format_args!("no file descriptor is left for a connection"));
        return;
    };
    let Some(session) = Session::begin(vm, &stream, Peer::new(same), shared) else {
        return;
    };
    let device = session.device().clone();
    vm.info(format_args!("connected"));
    vm.tell(EventKind::Connected, format_args!("connected"));
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
            "connection ended: a page of the memory that it shares has gone: a hole was punched into \
             a file of huge pages, or the host's memory has an error"
        )),
        Ok(None) => vm.info(format_args!("disconnected")),
        Ok(Some(error)) => vm.warn(format_args!("connection ended: {error}")),
        Err(_) => tracing::error!(
            vm = %vm.name(),
            "connection ended: a bug, its control thread panicked"
        ),
    }
    vm.tell(EventKind::Disconnected, format_args!("disconnected"));
    session.end();
}
