// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The control thread of a VM's connection: takes its messages one by one.
//!
//! A front end that sends half a message, or nothing, holds up its own thread and nobody else's.
//! Whatever ends the loop, the tenant is emptied and the vrings are stopped.

use crate::device::Device;
use crate::janitor::Janitor;
use crate::peer::Peer;
use crate::vm::{Connected, NoPlace, Vm};
use crate::worker::Workers;
use std::os::unix::net::UnixStream;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;
use vhost::vhost_user::{BackendReqHandler, Error};

/// What a connection shares with the daemon.
#[derive(Clone)]
pub struct Shared {
    /// The data workers.
    pub workers: Arc<Workers>,
    /// The background thread.
    pub janitor: Arc<Janitor>,
    /// Start of the daemon's clock.
    pub epoch: Instant,
}

/// Serves a connection to its end.
pub fn serve(vm: &Arc<Vm>, stream: UnixStream, shared: &Shared) {
    let _connected = match Connected::claim(vm, &stream) {
        Ok(connected) => connected,
        Err(NoPlace::Taken) => {
            vm.counters
                .connections_refused
                .fetch_add(1, Ordering::Relaxed);
            vm.warn(format_args!(
                "a second connection to {} is refused: the first one is still there",
                vm.config.socket.display()
            ));
            return;
        }
        // It came just before its socket went.
        Err(NoPlace::Removed) => return,
        Err(NoPlace::NoHandle) => {
            vm.warn(format_args!("no file descriptor is left for a connection"));
            return;
        }
    };
    vm.counters.connections.fetch_add(1, Ordering::Relaxed);
    // A connection starts empty, whatever was before.
    vm.clear();
    let (workers, janitor) = (shared.workers.clone(), shared.janitor.clone());
    let device = stream
        .try_clone()
        .and_then(|same| Device::new(vm.clone(), Peer::new(same), workers, janitor, shared.epoch));
    let device = match device {
        Ok(device) => Arc::new(Mutex::new(device)),
        Err(error) => {
            vm.warn(format_args!("a connection cannot be served: {error}"));
            return;
        }
    };
    vm.info(format_args!("connected"));
    let mut handler = BackendReqHandler::from_stream(stream, device.clone());
    let end = std::panic::catch_unwind(AssertUnwindSafe(|| {
        loop {
            match handler.handle_request() {
                Ok(()) => {}
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
    match end {
        Ok(None) => vm.info(format_args!("disconnected")),
        Ok(Some(error)) => vm.warn(format_args!("connection ended: {error}")),
        Err(_) => tracing::error!(
            "VM {}: connection ended: a bug, its control thread panicked",
            vm.name()
        ),
    }
    device.lock().unwrap_or_else(PoisonError::into_inner).end();
    shared.janitor.work_may_be_there();
}
