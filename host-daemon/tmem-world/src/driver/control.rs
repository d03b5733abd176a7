// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The driver's generation and its control queue. The driver is online while it has a generation
//! from the device's configuration and a pool.

use tmem_sim::Request;
use tmem_sim::requests::REPORT_BYTES;
use virtio_tmem as wire;

use super::{CONTROL_NS, Driver, Port, REPORT_NS};
use crate::mutation::Mutation;
use crate::transport::{CONTROLS, Flight, Tag};

/// State of a buffer for a control request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// The driver may use the buffer for a new request.
    Free,
    /// The device owns the buffer. At this time in nanoseconds, the driver gives up the request.
    Sent(u64),
    /// The device still owns the buffer, but the driver no longer waits for the answer.
    Abandoned,
}

impl Driver {
    /// Records that the device's configuration changed.
    pub fn config_changed(&mut self) {
        self.resync = true;
    }

    /// Does the work of the driver's work queue: reports, time limits and a changed generation.
    pub fn work(&mut self, port: &mut Port<'_>) {
        if port.now_ns >= self.report_at_ns {
            self.report_at_ns = port.now_ns + REPORT_NS;
            self.resync = true;
            self.probe(port);
            if self.generation != 0 {
                let report = Box::new([0; REPORT_BYTES]);
                self.control(port, Request::Report(report));
            }
        }
        for control in &mut self.controls {
            if matches!(control, Control::Sent(until) if *until <= port.now_ns) {
                *control = Control::Abandoned;
            }
        }
        if self.resync && !(self.is(Mutation::ConfigIgnored) && self.generation != 0) {
            self.sync(port);
        }
    }

    fn sync(&mut self, port: &mut Port<'_>) {
        if port.generation != self.generation {
            self.forget();
            self.generation = port.generation;
            (self.late_row, self.tripped) = (0, false);
        }
        // Send one control request at a time. The driver sends the next one when the answer
        // arrives.
        let waiting = |c: &Control| matches!(c, Control::Sent(_));
        if self.generation == 0 || self.controls.iter().any(waiting) {
            self.resync = self.generation != 0;
            return;
        }
        self.resync = false;
        if let Some(&pool) = self.dead_pools.first() {
            self.control(port, Request::PoolDestroy { pool });
        } else if self.pool == 0 {
            if !self.is(Mutation::PoolIdReused) || self.pool_last == 0 {
                self.pool_last += 1;
            }
            let pool = self.pool_last;
            self.control(port, Request::PoolCreate { pool, flags: 0 });
        }
    }

    fn forget(&mut self) {
        if self.is(Mutation::IndexKept) && self.pool != 0 {
            // Keep the index although the generation has changed: this is the rule that the
            // simulated driver breaks. The driver also keeps its pool's id, because it does not
            // know that the pool is gone.
            return;
        }
        if !self.is(Mutation::EpochIgnored) {
            self.epoch += 1;
        }
        self.index.clear();
        self.gone.clear();
        self.objects.clear();
        self.dead_pools.clear();
        self.pool = 0;
    }

    /// Unmounts the file system and mounts it again. The driver then creates another pool for it.
    pub fn remount(&mut self) {
        let keeps = self.is(Mutation::RetainedKeptAtUnmount);
        self.index.retain(|_, entry| entry.retained && keeps);
        self.objects.clear();
        self.bypass.clear();
        if self.pool != 0 {
            self.dead_pools.push(self.pool);
        }
        self.pool = 0;
        self.resync = true;
    }

    fn control(&mut self, port: &mut Port<'_>, request: Request) {
        let free = |c: &Control| *c == Control::Free;
        let Some(nr) = (0..CONTROLS).find(|nr| free(&self.controls[*nr])) else {
            self.resync = true;
            return;
        };
        if !self.transport.has_room(wire::CONTROL_QUEUE) {
            self.resync = true;
            return;
        }
        self.controls[nr] = Control::Sent(port.now_ns + CONTROL_NS);
        let page = self.transport.layout.controls[nr];
        let flight = self.flight(port, Tag::Control(nr), request, (page, vec![]), vec![]);
        self.send(port, wire::CONTROL_QUEUE, flight, false);
    }

    pub(super) fn control_answered(&mut self, nr: usize, flight: &Flight, status: u8) {
        let waited = matches!(self.controls[nr], Control::Sent(_));
        self.controls[nr] = Control::Free;
        self.stale(status);
        // An answer counts only if the driver still waited for it and its generation is the present
        // one. If the driver had given the request up, it sends the request again.
        self.resync |= !waited;
        let current = flight.generation == self.generation;
        if let (false, true, Request::PoolCreate { pool, .. }) = (waited, current, &*flight.request)
        {
            // The driver had given up this POOL_CREATE, so the device now has a pool that the
            // driver does not use.
            self.dead_pools.push(*pool);
        }
        if !waited || !current {
            return;
        }
        match &*flight.request {
            Request::PoolCreate { pool, .. }
                if status == wire::S_OK && self.pool == 0 && *pool == self.pool_last =>
            {
                self.pool = *pool;
            }
            Request::PoolDestroy { pool } => {
                self.dead_pools.retain(|dead| dead != pool);
                self.resync = true;
            }
            _ => {}
        }
    }
}
