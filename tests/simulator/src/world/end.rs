// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The end of a script: the world repairs all faults, and then the whole system must recover.
//!
//! Recovery means that each request is answered, that each driver knows its device's generation and
//! has a pool, and that reads of all files return what the disk has.

use super::World;
use crate::kernel::{FILES, PAGES};

/// Maximum number of times that the world checks whether all guests are idle and online.
const CHECKS_MAX: usize = 260;
/// Time in nanoseconds before each of the first `SHORT_CHECKS` checks, long enough for answers.
const SHORT_NS: u64 = 500_000;
/// Number of checks with the short interval. All later checks use the longer interval, which leaves
/// time for reports and control requests.
const SHORT_CHECKS: usize = 60;
/// Time in nanoseconds before each check after the first `SHORT_CHECKS` checks.
const LONG_NS: u64 = 50_000_000;

impl World {
    /// Repairs all faults of the script and checks that the system recovers.
    pub fn end(&mut self) {
        for h in 0..self.hosts.len() {
            self.start_host(h);
            self.freeze(h, false);
            self.resize(h, 4096);
            let hosts = self.hosts[h].as_ref();
            hosts
                .iter()
                .for_each(|host| host.death.trigger_after(u64::MAX));
            for g in 0..self.guests.len() {
                self.limit(h, g, u16::MAX);
                self.freeze_vm(h, g, false);
            }
        }
        for g in 0..self.guests.len() {
            self.notice(g);
            let link = self.guests[g].machine.link.as_ref();
            link.iter().for_each(|link| {
                link.hang_up.trigger_after(u64::MAX);
                link.hang_up.end_drain();
            });
            self.cancel(g);
            self.go_on(g);
            self.connect(g);
        }
        self.become_quiet();
        for g in 0..self.guests.len() {
            for file in 0..FILES {
                self.files(g, |kernel, storage| {
                    storage.broken = None;
                    kernel.register();
                    kernel.write_back(storage, file);
                    while kernel.disk(storage, 0) {}
                    kernel.evict(file, 0, PAGES);
                    kernel.free();
                });
            }
        }
        self.become_quiet();
        for g in 0..self.guests.len() {
            for file in 0..FILES {
                self.read(g, file, (0, PAGES), 2);
            }
        }
        self.become_quiet();
        for guest in &mut self.guests {
            guest
                .oracle
                .search_for_foreign_pages(&guest.kernel.driver.transport);
        }
        for host in self.hosts.iter().flatten() {
            for (g, guest) in self.guests.iter_mut().enumerate() {
                let mismatches = host.vm(g).tenant.stats().hash_mismatches;
                if mismatches > 0 {
                    let what = format!("{mismatches} stored pages failed the pool's checksum");
                    guest.oracle.fail("pool", what);
                }
            }
        }
    }

    fn become_quiet(&mut self) {
        for check in 0..CHECKS_MAX {
            self.at += 1;
            self.advance(if check < SHORT_CHECKS {
                SHORT_NS
            } else {
                LONG_NS
            });
            self.write_late();
            self.serve(check as u16);
            for h in 0..self.hosts.len() {
                self.maintain(h);
            }
            if self.failure().is_some() || (0..self.guests.len()).all(|g| self.is_quiet(g)) {
                return;
            }
        }
        for g in 0..self.guests.len() {
            if !self.is_quiet(g) {
                let guest = &mut self.guests[g];
                let driver = &guest.kernel.driver;
                let what = format!(
                    "the guest did not become idle: the driver's generation is {:#x?}, the \
                     device's {:#x}; requests in flight: {}",
                    driver.online(),
                    guest.machine.generation,
                    driver.transport.in_flight()
                );
                guest.oracle.fail("liveness", what);
            }
        }
    }

    fn is_quiet(&self, g: usize) -> bool {
        let guest = &self.guests[g];
        let driver = &guest.kernel.driver;
        let generation = guest.machine.generation;
        generation != 0
            && driver.online() == Some(generation)
            && !driver.busy()
            && !guest.kernel.busy()
    }
}
