// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Every figure of the interface: its unit, what it means, where it is counted, and its metric.
//!
//! This table is the source: the exporter makes metrics of it, `tmemctl stats` words, and
//! docs/statistics.md is written from it (`TMEM_BLESS=1 cargo test -p tmem-control`). A test holds it against
//! the interface file, so that no figure is there without a meaning.

/// Whose figure it is: a type of the interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// `DaemonStats`.
    Daemon,
    /// `PoolStats`.
    Pool,
    /// `VmStats`.
    Vm,
    /// `DriverReport`: what a guest says of itself.
    Driver,
}

/// What the figure does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Is of now, goes up and down.
    Gauge,
    /// Only grows, from the daemon's start.
    Counter,
    /// Counts requests by their time.
    Histogram,
    /// Is no number.
    Text,
}

/// What a metric may tell of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Export {
    /// There is no metric.
    No,
    /// The value.
    Exact,
    /// It depends on pages that VMs have in common: only large steps are told.
    Steps,
}

/// A figure.
#[derive(Clone, Copy, Debug)]
pub struct Statistic {
    /// Of what.
    pub scope: Scope,
    /// Its name in the interface.
    pub field: &'static str,
    /// Its metric without suffixes, perhaps with a label: `name{key=value}`; of a list, the label's values
    /// are separated by `/`.
    pub metric: &'static str,
    /// What may be told of it.
    pub export: Export,
    /// What it does.
    pub kind: Kind,
    /// Of the field; metrics have base units.
    pub unit: &'static str,
    /// What it means.
    pub meaning: &'static str,
    /// The file, below `host-daemon/`, that counts it.
    pub source: &'static str,
}

const fn row(
    scope: Scope,
    (field, metric, export): (&'static str, &'static str, Export),
    (kind, unit): (Kind, &'static str),
    meaning: &'static str,
    source: &'static str,
) -> Statistic {
    Statistic {
        scope,
        field,
        metric,
        export,
        kind,
        unit,
        meaning,
        source,
    }
}

const VM: &str = "tmemd/src/vm.rs";
const STATE: &str = "tmem-pool/src/state.rs";
const TENANT: &str = "tmem-pool/src/tenant.rs";
const ENTRY: &str = "tmem-pool/src/entry.rs";
const GAIN: &str = "tmem-pool/src/gain.rs";
const POOL: &str = "tmem-pool/src/pool.rs";
const HEAP: &str = "tmem-pool/src/heap/mod.rs";
const BLOB: &str = "tmem-pool/src/blob.rs";
const PRESSURE: &str = "tmemd/src/pressure.rs";
const USAGE: &str = "tmemd/src/usage.rs";
const FIGURES: &str = "tmemd/src/statistics.rs";
const GUEST: &str = "tmemd/src/execute.rs";

use Export::{Exact, No, Steps};
use Kind::{Counter, Gauge, Histogram, Text};
use Scope::{Daemon, Driver, Pool, Vm};

/// All of them, in the order of the interface.
#[rustfmt::skip]
pub const STATISTICS: &[Statistic] = &[
    row(Vm, ("name", "", No), (Text, ""), "the VM's name; the label `vm` of its metrics", VM),
    row(Vm, ("connected", "tmem_vm_connected", Exact), (Gauge, ""), "its VMM has a connection (metric: 1 or 0)", VM),
    row(Vm, ("frozen", "tmem_vm_frozen", Exact), (Gauge, ""), "its puts are refused, see `tmemctl freeze` (metric: 1 or 0)", VM),
    row(Vm, ("connections", "tmem_vm_connections", Exact), (Counter, ""), "connections taken; more than a few: its VMM or the daemon starts again and again", VM),
    row(Vm, ("connections_refused", "tmem_vm_connections_refused", Exact), (Counter, ""), "connections refused: there was one already, or it was not for that user", VM),
    row(Vm, ("queues_stopped", "tmem_vm_queues_stopped", Exact), (Counter, ""), "virtqueues stopped for a fault of guest or VMM; the log has the reason", VM),
    row(Vm, ("requests", "tmem_vm_requests", Exact), (Counter, "requests"), "descriptor chains answered", VM),
    row(Vm, ("requests_stale", "tmem_vm_requests_stale", Exact), (Counter, "requests"), "of these, with the generation of an earlier connection", VM),
    row(Vm, ("requests_bad", "tmem_vm_requests_bad", Exact), (Counter, "requests"), "of these, of a shape that no driver of ours sends", VM),
    row(Vm, ("drain_cut_pages", "tmem_vm_drain_cut_pages", Exact), (Counter, "pages"), "refused or missed since the VM's memory was about to change (pause, migration, reset)", VM),
    row(Vm, ("limited_pages", "tmem_vm_limited_pages", Exact), (Counter, "pages"), "refused or missed since the VM asked for more than `vm_pages_per_second`", VM),
    row(Vm, ("pages", "tmem_vm_pages", Exact), (Gauge, "pages"), "held, of 4,096 B each", ENTRY),
    row(Vm, ("charged_bytes", "tmem_vm_charged_bytes", Exact), (Gauge, "bytes"), "what its quota is compared with: compressed size and 320 B of each page, shared or not; in the nursery 4,096 and 320 B", ENTRY),
    row(Vm, ("entitled_bytes", "tmem_vm_entitled_bytes", Exact), (Gauge, "bytes"), "its part of the pool as it is now: reserve and a share by weight, up to its limit; it may use more while nobody wants it", "tmem-pool/src/quota.rs"),
    row(Vm, ("original_bytes", "tmem_vm_original_bytes", Exact), (Gauge, "bytes"), "its pages at 4,096 B", ENTRY),
    row(Vm, ("compressed_bytes", "tmem_vm_compressed_bytes", Exact), (Gauge, "bytes"), "what its pages take compressed, each in full even if shared", ENTRY),
    row(Vm, ("saved_bytes", "tmem_vm_saved_bytes", Exact), (Gauge, "bytes"), "original less charged: memory that the guest would need itself for these pages, less what they cost; below 0 while most of them are new", FIGURES),
    row(Vm, ("nursery_pages", "tmem_vm_nursery_pages", Exact), (Gauge, "pages"), "as they came, waiting for their final form", ENTRY),
    row(Vm, ("nursery_pages_max", "tmem_vm_nursery_limit_pages", Exact), (Gauge, "pages"), "how many may wait; more are refused", STATE),
    row(Vm, ("same_filled_pages", "tmem_vm_same_filled_pages", Exact), (Gauge, "pages"), "kept as a pattern of four bytes", ENTRY),
    row(Vm, ("shared_pages", "", No), (Gauge, "pages"), "found equal to one of the trust domain that was there before", ENTRY),
    row(Vm, ("stored_pages", "", No), (Gauge, "pages"), "all others: compressed, or as they are if they do not compress", FIGURES),
    row(Vm, ("detached_pages", "tmem_vm_detached_pages", Exact), (Gauge, "pages"), "dropped and not yet freed", "tmem-pool/src/index/mod.rs"),
    row(Vm, ("puts", "tmem_vm_puts", Exact), (Counter, "pages"), "offered by the guest", STATE),
    row(Vm, ("puts_refused", "", No), (Counter, "pages"), "of these, not taken: the sum of the next five", STATE),
    row(Vm, ("refused_nursery", "tmem_vm_puts_refused{reason=nursery}", Exact), (Counter, "pages"), "too many pages wait for their final form: the guest puts faster than the host compresses; see `background_threads` in configuration.md", STATE),
    row(Vm, ("refused_pool", "tmem_vm_puts_refused{reason=pool}", Exact), (Counter, "pages"), "the pool was full, and nothing could be evicted in the time that a put has", STATE),
    row(Vm, ("refused_limit", "tmem_vm_puts_refused{reason=limit}", Exact), (Counter, "pages"), "above its own limit, which was lowered far", STATE),
    row(Vm, ("refused_keys", "tmem_vm_puts_refused{reason=keys}", Exact), (Counter, "pages"), "as many pages as a VM may have, or no memory for one more entry", STATE),
    row(Vm, ("refused_frozen", "tmem_vm_puts_refused{reason=frozen}", Exact), (Counter, "pages"), "the VM is frozen", GUEST),
    row(Vm, ("settled_same_filled", "tmem_vm_settled_same_filled_pages", Exact), (Counter, "pages"), "got their final form: a pattern", STATE),
    row(Vm, ("settled_shared", "", No), (Counter, "pages"), "got their final form: that of an equal page", STATE),
    row(Vm, ("settled_compressed", "", No), (Counter, "pages"), "got their final form: compressed", STATE),
    row(Vm, ("settled_raw", "", No), (Counter, "pages"), "got their final form: as they are, above 3,840 B compressed", STATE),
    row(Vm, ("gets", "tmem_vm_gets", Exact), (Counter, "pages"), "asked for by the guest", STATE),
    row(Vm, ("hits", "tmem_vm_hits", Exact), (Counter, "pages"), "of these, returned: each is a page that was not read from a disk", TENANT),
    row(Vm, ("misses", "", No), (Counter, "pages"), "of these, not returned: gets less hits", FIGURES),
    row(Vm, ("cookie_mismatches", "tmem_vm_cookie_mismatches", Exact), (Counter, "pages"), "of these, held, but put at another time than the guest meant", STATE),
    row(Vm, ("disk_read_avoided_bytes", "tmem_vm_disk_read_avoided_bytes", Exact), (Counter, "bytes"), "hits at 4,096 B: what the guest did not read from its disk. The disk's own figures may differ by read-ahead", FIGURES),
    row(Vm, ("evictions", "", No), (Counter, "pages"), "given up for room: the sum of the next three", STATE),
    row(Vm, ("evictions_limit", "tmem_vm_evictions{cause=limit}", Exact), (Counter, "pages"), "room under its own limit", STATE),
    row(Vm, ("evictions_pool", "tmem_vm_evictions{cause=pool}", Exact), (Counter, "pages"), "room in a full pool, of which it had most above its entitlement", STATE),
    row(Vm, ("evictions_shrink", "tmem_vm_evictions{cause=shrink}", Exact), (Counter, "pages"), "the pool was made smaller, by an operator or for the host", STATE),
    row(Vm, ("flushed_pages", "tmem_vm_flushed_pages", Exact), (Counter, "pages"), "dropped: the guest changed or removed them, a connection ended, or `tmemctl flush`", STATE),
    row(Vm, ("replaced_pages", "tmem_vm_replaced_pages", Exact), (Counter, "pages"), "put over one of the same place", STATE),
    row(Vm, ("hash_mismatches", "tmem_vm_hash_mismatches", Exact), (Counter, "pages"), "held back since their bytes failed the check. Must be 0: else the host's memory or the engine is at fault", TENANT),
    row(Vm, ("gain_hits", "tmem_vm_gain_hits{more_percent=25/50/100}", Exact), (Counter, "pages"), "about: misses that 25, 50 and 100 % more room would have made hits", GAIN),
    row(Vm, ("loss_hits", "tmem_vm_loss_hits{less_percent=25/50/75}", Exact), (Counter, "pages"), "about: hits that 25, 50 and 75 % less than what it held would have made misses", GAIN),
    row(Vm, ("loss_hits_seen", "tmem_vm_loss_hits_seen", Exact), (Counter, "pages"), "about: hits that the line above was told from", GAIN),
    row(Vm, ("put_latency", "tmem_vm_request_duration_seconds{request=put}", Exact), (Histogram, "ns, requests"), "PUT requests by their time, from when a worker takes one to when its answer is in the used ring; up to 64 pages each. Time spent waiting for a worker is not in it: `wait_latency`", "tmemd/src/latency.rs"),
    row(Vm, ("get_latency", "tmem_vm_request_duration_seconds{request=get}", Exact), (Histogram, "ns, requests"), "GET requests, likewise", "tmemd/src/latency.rs"),
    row(Vm, ("flush_latency", "tmem_vm_request_duration_seconds{request=flush}", Exact), (Histogram, "ns, requests"), "FLUSH requests, likewise; of one that takes several turns, the last", "tmemd/src/latency.rs"),
    row(Vm, ("wait_latency", "tmem_vm_turn_wait_seconds", Exact), (Histogram, "ns, turns"), "turns of its queues by how long they waited for a worker: from when it saw their work to when it began. A turn answers up to some hundred pages of requests", "tmemd/src/vring.rs"),
    row(Vm, ("cpu_requests_ms", "tmem_vm_cpu_seconds", Exact), (Counter, "ms"), "time of workers at its requests, by the clock: waiting for a processor, or for memory of the guest that the host has swapped, is in it, so all VMs together may be above `cpu_workers_ms`. What its pages take in the background is not", "tmemd/src/vring.rs"),
    row(Vm, ("driver", "", No), (Text, ""), "what its driver said last on this connection, if it did: below", VM),

    row(Driver, ("version", "", No), (Text, ""), "of the module", GUEST),
    row(Driver, ("state", "tmem_vm_driver_state", Exact), (Text, ""), "off, on, offline (no daemon), tripped (late answers, tries again), poisoned (a mismatch: off until it is loaded anew); metric: 1 for the state it is in, `none` without a report", GUEST),
    row(Driver, ("kernel", "", No), (Text, ""), "of the guest", GUEST),
    row(Driver, ("hooks", "", No), (Text, ""), "a bit for each place in the kernel that it is hooked into", GUEST),
    row(Driver, ("file_systems", "", No), (Text, ""), "types of file systems that it serves; empty before it knows the first, and from older drivers", GUEST),
    row(Driver, ("memory_bytes", "tmem_vm_driver_memory_bytes", Exact), (Gauge, "bytes"), "memory that the driver takes of the guest", GUEST),
    row(Driver, ("index_pages", "tmem_vm_driver_index_pages", Exact), (Gauge, "pages"), "pages that it believes to be here", GUEST),
    row(Driver, ("puts", "tmem_vm_driver_puts", Exact), (Counter, "pages"), "sent", GUEST),
    row(Driver, ("puts_dropped", "tmem_vm_driver_puts_dropped", Exact), (Counter, "pages"), "not sent: its ring was full, or no memory", GUEST),
    row(Driver, ("gets", "tmem_vm_driver_gets", Exact), (Counter, "pages"), "asked for, from its ring or from here", GUEST),
    row(Driver, ("hits", "tmem_vm_driver_hits", Exact), (Counter, "pages"), "used by the guest", GUEST),
    row(Driver, ("late", "tmem_vm_driver_late", Exact), (Counter, "requests"), "answers after its deadline, which the guest did not wait for", GUEST),
    row(Driver, ("mismatches", "tmem_vm_driver_mismatches", Exact), (Counter, "pages"), "that were not what it had put. Must be 0", GUEST),
    row(Driver, ("invalidations", "tmem_vm_driver_invalidations", Exact), (Counter, "pages"), "erased from its index since the file changed", GUEST),
    row(Driver, ("get_latency", "tmem_vm_driver_get_duration_seconds", Exact), (Histogram, "ns, requests"), "GET requests by how long their reader waited, by the guest's clock, from when it was sent to the answer or the deadline; since the module was loaded. Older drivers do not say it", GUEST),

    row(Pool, ("size_bytes", "tmem_pool_size_bytes", Exact), (Gauge, "bytes"), "what it may hold now, metadata included", POOL),
    row(Pool, ("configured_bytes", "tmem_pool_configured_bytes", Exact), (Gauge, "bytes"), "what it may hold while the host has enough", PRESSURE),
    row(Pool, ("host_shrinks", "tmem_pool_host_shrinks", Exact), (Counter, "steps"), "away from there, since the host was short of memory", PRESSURE),
    row(Pool, ("host_grows", "tmem_pool_host_grows", Exact), (Counter, "steps"), "and back", PRESSURE),
    row(Pool, ("held_bytes", "tmem_pool_held_bytes", Steps), (Gauge, "bytes"), "memory that it takes from the host: frames and metadata", POOL),
    row(Pool, ("frames_bytes", "tmem_pool_frames_bytes", Steps), (Gauge, "bytes"), "memory for stored pages, used or not", HEAP),
    row(Pool, ("payload_bytes", "tmem_pool_payload_bytes", Steps), (Gauge, "bytes"), "stored pages, each copy once; frames less payload lies between them", HEAP),
    row(Pool, ("metadata_bytes", "tmem_pool_metadata_bytes", Steps), (Gauge, "bytes"), "keys, tables, records; an estimate from above", POOL),
    row(Pool, ("charged_bytes", "tmem_pool_charged_bytes", Exact), (Gauge, "bytes"), "what all VMs are charged", POOL),
    row(Pool, ("reserved_bytes", "tmem_pool_reserved_bytes", Exact), (Gauge, "bytes"), "sum of all reserves, as far as limits leave them usable", "tmem-pool/src/registry.rs"),
    row(Pool, ("tenants", "", No), (Gauge, "VMs"), "with a place in the pool", "tmem-pool/src/registry.rs"),
    row(Pool, ("pages", "tmem_pool_pages", Exact), (Gauge, "pages"), "held, of all VMs", POOL),
    row(Pool, ("original_bytes", "tmem_pool_original_bytes", Exact), (Gauge, "bytes"), "these at 4,096 B", POOL),
    row(Pool, ("compressed_bytes", "tmem_pool_compressed_bytes", Exact), (Gauge, "bytes"), "these compressed, each in full even if shared", POOL),
    row(Pool, ("saved_bytes", "tmem_pool_saved_bytes", Steps), (Gauge, "bytes"), "original less held: host RAM saved. Guests would need original for the same hits, the pool takes held; below 0 while it is nearly empty", FIGURES),
    row(Pool, ("dedup_saved_bytes", "tmem_pool_dedup_saved_bytes", Steps), (Gauge, "bytes"), "compressed less payload and `zstd_saved_bytes`: what is not stored twice", FIGURES),
    row(Pool, ("nursery_pages", "tmem_pool_nursery_pages", Exact), (Gauge, "pages"), "waiting for their final form", POOL),
    row(Pool, ("same_filled_pages", "tmem_pool_same_filled_pages", Exact), (Gauge, "pages"), "kept as a pattern", POOL),
    row(Pool, ("shared_pages", "tmem_pool_shared_pages", Steps), (Gauge, "pages"), "that need no copy of their own since others have the same", POOL),
    row(Pool, ("detached_pages", "tmem_pool_detached_pages", Exact), (Gauge, "pages"), "dropped and not yet freed, those of VMs that left included", POOL),
    row(Pool, ("blobs", "tmem_pool_blobs", Steps), (Gauge, "copies"), "stored", HEAP),
    row(Pool, ("moved_blobs", "tmem_pool_moved_blobs", Exact), (Counter, "copies"), "moved together, so that memory between them could be given back (compaction)", POOL),
    row(Pool, ("denser_blobs", "tmem_pool_denser_blobs", Exact), (Counter, "copies"), "compressed anew with zstd, since they were cold", BLOB),
    row(Pool, ("denser_saved_bytes", "tmem_pool_denser_saved_bytes", Exact), (Counter, "bytes"), "by how much these became smaller", BLOB),
    row(Pool, ("zstd_saved_bytes", "tmem_pool_zstd_saved_bytes", Steps), (Gauge, "bytes"), "what copies that are stored now take less since they were compressed anew", BLOB),
    row(Pool, ("puts", "tmem_pool_puts", Exact), (Counter, "pages"), "of all VMs, those that left included, but for pages refused since a VM was frozen; so are the rest", POOL),
    row(Pool, ("puts_refused", "tmem_pool_puts_refused", Exact), (Counter, "pages"), "of these, not taken", POOL),
    row(Pool, ("gets", "tmem_pool_gets", Exact), (Counter, "pages"), "asked for", POOL),
    row(Pool, ("hits", "tmem_pool_hits", Exact), (Counter, "pages"), "of these, returned", POOL),
    row(Pool, ("evictions", "", No), (Counter, "pages"), "the sum of the next three", POOL),
    row(Pool, ("evictions_limit", "tmem_pool_evictions{cause=limit}", Exact), (Counter, "pages"), "room under a VM's own limit", POOL),
    row(Pool, ("evictions_pool", "tmem_pool_evictions{cause=pool}", Exact), (Counter, "pages"), "room in a full pool", POOL),
    row(Pool, ("evictions_shrink", "tmem_pool_evictions{cause=shrink}", Exact), (Counter, "pages"), "the pool was made smaller", POOL),
    row(Pool, ("flushed_pages", "tmem_pool_flushed_pages", Exact), (Counter, "pages"), "dropped", POOL),
    row(Pool, ("hash_mismatches", "tmem_pool_hash_mismatches", Exact), (Counter, "pages"), "held back since their bytes failed the check. Must be 0", POOL),

    row(Daemon, ("version", "", No), (Text, ""), "of tmemd; the label `version` of `tmem_daemon_info`", FIGURES),
    row(Daemon, ("pid", "", No), (Text, ""), "its process", FIGURES),
    row(Daemon, ("uptime_seconds", "tmem_daemon_uptime_seconds", Exact), (Gauge, "seconds"), "since its start", FIGURES),
    row(Daemon, ("workers", "tmem_daemon_workers", Exact), (Gauge, "threads"), "that answer requests", "tmemd/src/worker.rs"),
    row(Daemon, ("vms", "tmem_daemon_vms", Exact), (Gauge, "VMs"), "that it has sockets for", FIGURES),
    row(Daemon, ("vms_connected", "tmem_daemon_vms_connected", Exact), (Gauge, "VMs"), "of these, connected", FIGURES),
    row(Daemon, ("vms_frozen", "tmem_daemon_vms_frozen", Exact), (Gauge, "VMs"), "of these, frozen", FIGURES),
    row(Daemon, ("cpu_workers_ms", "tmem_daemon_stage_cpu_seconds{stage=requests}", Exact), (Counter, "ms"), "processor time of requests: copying in, decompressing, copying out, freeing", USAGE),
    row(Daemon, ("cpu_background_ms", "tmem_daemon_stage_cpu_seconds{stage=background}", Exact), (Counter, "ms"), "processor time of background work: finding equal pages, compressing, compaction, recompression", USAGE),
    row(Daemon, ("cpu_settling_ms", "tmem_daemon_background_cpu_seconds{work=settling}", Exact), (Counter, "ms"), "of this, for new pages: finding equal ones, lz4. These three are counted at the end of a turn of some 1,024 pages; what they leave of the line above is threads that wake up, and memory of VMs that is unmapped", USAGE),
    row(Daemon, ("cpu_recompression_ms", "tmem_daemon_background_cpu_seconds{work=recompression}", Exact), (Counter, "ms"), "of this, for cold pages: finding them, zstd", USAGE),
    row(Daemon, ("cpu_room_ms", "tmem_daemon_background_cpu_seconds{work=room}", Exact), (Counter, "ms"), "of this, for room: eviction, freeing what was dropped, compaction, memory given back to the host", USAGE),
    row(Daemon, ("cpu_ms", "tmem_daemon_cpu_seconds", Exact), (Counter, "ms"), "processor time of the whole process: these, connections, control", USAGE),
    row(Daemon, ("resident_bytes", "tmem_daemon_resident_bytes", Steps), (Gauge, "bytes"), "memory of the process without what it maps of guests; the pool and the daemon's own", USAGE),
    row(Daemon, ("memory_locked", "tmem_daemon_memory_locked", Exact), (Gauge, ""), "all of the pool's memory is locked: pages of guests stay out of the host's swap (metric: 1 or 0)", HEAP),
    row(Daemon, ("interrupts_lost", "tmem_daemon_interrupts_lost", Exact), (Counter, "interrupts"), "interrupts that the kernel refused to deliver to a guest or its VMM, which the log names; the guest goes on at its deadline. Must be 0", "tmemd/src/bell.rs"),
];

impl Scope {
    /// The type of the interface.
    pub fn type_name(self) -> &'static str {
        match self {
            Scope::Daemon => "DaemonStats",
            Scope::Pool => "PoolStats",
            Scope::Vm => "VmStats",
            Scope::Driver => "DriverReport",
        }
    }
}

impl Statistic {
    /// The figures of a scope.
    pub fn of(scope: Scope) -> impl Iterator<Item = &'static Statistic> {
        STATISTICS.iter().filter(move |row| row.scope == scope)
    }

    /// Its metric's name without suffixes, and its label with the values, if it has one.
    pub fn metric(&self) -> (&'static str, Option<(&'static str, Vec<&'static str>)>) {
        let Some((name, label)) = self.metric.split_once('{') else {
            return (self.metric, None);
        };
        let label = label.trim_end_matches('}').split_once('=');
        (
            name,
            label.map(|(key, values)| (key, values.split('/').collect())),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::{Path, PathBuf};

    const INTERFACE: &str = include_str!("io.virtiotmem.Control.varlink");
    const SCOPES: [Scope; 4] = [Vm, Driver, Pool, Daemon];

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    /// The fields of a type of the interface file.
    fn fields(type_name: &str) -> Vec<&'static str> {
        let begin = format!("type {type_name} (\n");
        let (_, rest) = INTERFACE.split_once(&begin).expect("the type is there");
        let (body, _) = rest.split_once(')').expect("it ends");
        let lines = body.lines();
        lines
            .filter_map(|line| Some(line.trim().split_once(':')?.0))
            .collect()
    }

    #[test]
    fn every_figure_of_the_interface_has_a_meaning() {
        for scope in SCOPES {
            let rows: Vec<&str> = Statistic::of(scope).map(|row| row.field).collect();
            assert_eq!(rows, fields(scope.type_name()), "{}", scope.type_name());
        }
    }

    #[test]
    fn sources_and_metrics_are_sound() {
        for row in STATISTICS {
            let path = root().join("host-daemon").join(row.source);
            assert!(path.exists(), "{}: there is no {}", row.field, row.source);
            assert!(!row.meaning.is_empty() && !row.meaning.ends_with('.'));
            let (name, label) = row.metric();
            assert_eq!(row.export == Export::No, name.is_empty(), "{}", row.field);
            let good = |c: char| c.is_ascii_lowercase() || c == '_';
            assert!(name.chars().all(good), "{name}");
            assert!(label.is_none_or(|(key, values)| key.chars().all(good) && !values.is_empty()));
            // Base units, as Prometheus' naming conventions have it.
            match row.unit {
                "bytes" => assert!(name.is_empty() || name.ends_with("_bytes"), "{name}"),
                "ms" | "seconds" => assert!(name.ends_with("_seconds"), "{name}"),
                _ => {}
            }
        }
    }

    fn table(scope: Scope) -> String {
        let mut text = String::from(
            "| figure | metric | kind | unit | meaning | counted in |\n| --- | --- | --- | --- | --- | --- |\n",
        );
        for row in Statistic::of(scope) {
            let suffix = match row.kind {
                Kind::Counter => "_total",
                _ => "",
            };
            let (name, label) = row.metric();
            let label =
                label.map(|(key, values)| format!("{{{key}=\"{}\"}}", values.join("\" / \"")));
            let metric = match row.export {
                Export::No => String::new(),
                Export::Exact => format!("`{name}{suffix}{}`", label.unwrap_or_default()),
                Export::Steps => format!("`{name}{suffix}` in steps"),
            };
            let kind = format!("{:?}", row.kind).to_lowercase();
            let source = format!("[{0}](../host-daemon/{0})", row.source);
            text += &format!(
                "| `{}` | {metric} | {kind} | {} | {} | {source} |\n",
                row.field, row.unit, row.meaning
            );
        }
        text
    }

    /// `TMEM_BLESS=1` writes the tables anew.
    #[test]
    fn the_document_says_the_same() {
        let path = root().join("docs/statistics.md");
        let text = std::fs::read_to_string(&path).expect("docs/statistics.md");
        let mut new = text.clone();
        for scope in SCOPES {
            let begin = format!("<!-- table {} -->\n", scope.type_name());
            let (before, rest) = new.split_once(&begin).expect("a mark for the table");
            let (_, after) = rest.split_once("<!-- end -->").expect("its end");
            new = format!("{before}{begin}{}<!-- end -->{after}", table(scope));
        }
        if std::env::var_os("TMEM_BLESS").is_some() {
            std::fs::write(&path, &new).expect("written");
        }
        assert!(
            text == new,
            "docs/statistics.md differs: TMEM_BLESS=1 writes it anew"
        );
    }
}
