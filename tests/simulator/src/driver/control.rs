// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The driver's generation and its control queue. The driver is online while it has a generation
//! and a pool. It learns the generation from the device's configuration, which it reads after a
//! reset and after a notification only, and from the answers to GENERATION requests.

use tmem_model::Request;
use tmem_model::requests::REPORT_BYTES;
use virtio_tmem as wire;

use super::{CONTROL_NS, DriverModel, Port, QUERY_NS, REPORT_NS};
use crate::mutation::Mutation;
use crate::transport::{CONTROLS, PendingRequest, QUERIES, Tag};

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

impl DriverModel {
    /// Records that the device's configuration changed.
    pub fn config_changed(&mut self) {
        self.config = true;
    }

    /// Does the work of the driver's work queue: reports, time limits and a changed generation.
    pub fn work(&mut self, port: &mut Port<'_>) {
        if port.now_ns >= self.report_at_ns {
            self.report_at_ns = port.now_ns + REPORT_NS;
            self.resync = true;
            self.probe(port);
            if self.generation != 0 && !self.silent {
                let report = Box::new([0; REPORT_BYTES]);
                self.control(port, Request::Report(report));
            }
        }
        for control in &mut self.controls {
            if matches!(control, Control::Sent(until) if *until <= port.now_ns) {
                *control = Control::Abandoned;
                self.query_wanted = true;
            }
        }
        if std::mem::take(&mut self.config) {
            // The caller has taken the answers that have come. They are older than the
            // configuration.
            (self.device_generation, self.learned_from_answer) = (port.generation, false);
            (self.queries_unanswered, self.silent) = (0, false);
            self.resync = true;
        }
        if self.resync {
            self.sync(port);
        }
        self.query_generation(port);
    }

    /// Asks the device for its generation, if that is needed and the last request is long ago.
    fn query_generation(&mut self, port: &mut Port<'_>) {
        let needed = self.generation == 0 || self.tripped || self.query_wanted;
        let since_ns = self.queried_at_ns.map(|at_ns| port.now_ns - at_ns);
        let early = since_ns.is_some_and(|since_ns| since_ns < QUERY_NS);
        if self.is(Mutation::GenerationUnasked) || !needed || early {
            return;
        }
        if self.queries_unanswered > 0 {
            self.silent = true;
            self.tripped |= self.generation != 0;
        }
        let free = (0..QUERIES).find(|nr| !self.queries[*nr]);
        let Some(nr) = free.filter(|_| self.transport.has_room(wire::CONTROL_QUEUE)) else {
            return;
        };
        self.queries[nr] = true;
        self.queries_unanswered += 1;
        self.queried_at_ns = Some(port.now_ns);
        let page = self.transport.layout.queries[nr];
        let mut pending = self.pending(
            port,
            Tag::Query(nr),
            Request::Generation,
            (page, vec![]),
            vec![],
        );
        pending.generation = 0;
        self.send(port, wire::CONTROL_QUEUE, pending, false);
    }

    /// Takes the generation of an answer, which is 0 if the answer has none.
    pub(super) fn query_answered(&mut self, nr: usize, generation: u64) {
        self.queries[nr] = false;
        if generation != 0 {
            (self.device_generation, self.learned_from_answer) = (generation, true);
            (self.queries_unanswered, self.silent) = (0, false);
            (self.query_wanted, self.resync) = (false, true);
        }
    }

    fn sync(&mut self, port: &mut Port<'_>) {
        if self.device_generation != self.generation {
            self.forget();
            self.generation = self.device_generation;
            (self.late_row, self.tripped) = (0, false);
        }
        // Send one control request at a time. The driver sends the next one when the answer
        // arrives.
        let waiting = |c: &Control| matches!(c, Control::Sent(_));
        if self.generation == 0 || self.silent || self.controls.iter().any(waiting) {
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
        let keeps = self.is(Mutation::IndexKept)
            || (self.is(Mutation::IndexKeptAtAnswer) && self.learned_from_answer);
        if keeps && self.pool != 0 {
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
    /// `known` is whether the driver learns of the new mount at once.
    pub fn remount(&mut self, known: bool) {
        let keeps = self.is(Mutation::RetainedKeptAtUnmount);
        self.index.retain(|_, entry| entry.retained && keeps);
        self.objects.clear();
        self.records.remount(known);
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
        let pending = self.pending(port, Tag::Control(nr), request, (page, vec![]), vec![]);
        self.send(port, wire::CONTROL_QUEUE, pending, false);
    }

    pub(super) fn control_answered(&mut self, nr: usize, pending: &PendingRequest, status: u8) {
        let waited = matches!(self.controls[nr], Control::Sent(_));
        self.controls[nr] = Control::Free;
        self.stale(status);
        // An answer counts only if the driver still waited for it and its generation is the present
        // one. If the driver had given the request up, it sends the request again.
        self.resync |= !waited;
        let current = pending.generation == self.generation;
        if let (false, true, Request::PoolCreate { pool, .. }) =
            (waited, current, &*pending.request)
        {
            // The driver had given up this POOL_CREATE, so the device now has a pool that the
            // driver does not use.
            self.dead_pools.push(*pool);
        }
        if !waited || !current {
            return;
        }
        match &*pending.request {
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
