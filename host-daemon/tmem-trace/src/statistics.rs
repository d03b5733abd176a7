// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Table of all figures (statistics) of the control interface: unit, meaning, metric, and the
//! source file that counts the figure.
//!
//! This table is the source. The exporter makes metrics of it, `tmemctl stats` prints its
//! descriptions, and docs/statistics.md is generated from it (`TMEM_BLESS=1 cargo test -p
//! tmem-trace`). A test compares the table with the interface file, so that each figure has a
//! meaning.

/// Type in the control interface that contains a figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The figure is a field of type `DaemonStats`: it describes the daemon.
    Daemon,
    /// The figure is a field of type `PoolStats`: it describes the pool.
    Pool,
    /// The figure is a field of type `VmStats`: it describes one VM.
    Vm,
    /// The figure is a field of type `DriverReport`: a guest's driver reports it.
    Driver,
}

/// Kind of a figure, which determines the type of its metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The figure is a current value, which goes up and down.
    Gauge,
    /// The figure is a sum that only grows while the daemon runs.
    Counter,
    /// The figure has the number of requests in each range of durations, and the sum of the
    /// durations.
    Histogram,
    /// The figure is a text, not a number.
    Text,
}

/// How precisely the exporter may show a figure as a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Export {
    /// No metric shows the figure.
    No,
    /// The metric shows the exact value of the figure.
    Exact,
    /// The metric shows the value rounded down to a large step. An exact value could reveal which
    /// pages VMs have in common.
    Steps,
    /// The metric shows the part of the value that no other figure of the metric counts, so that
    /// the metric's series can be added. The exporter subtracts the other figures as it exports
    /// them, exact or rounded.
    Rest,
    /// The metric shows what `Rest` shows, but the value is first rounded down to a large step.
    RestInSteps,
    /// The figure is a list in which each value includes the value before it. The metric shows the
    /// differences, so that its series can be added.
    Ranges,
}

/// Description of one figure of the control interface.
#[derive(Clone, Copy, Debug)]
pub struct Statistic {
    /// Type of the control interface that contains the figure.
    pub scope: Scope,
    /// Name of the figure's field in the control interface.
    pub field: &'static str,
    /// Name of the metric without suffixes such as `_total`, or with a label: `name{key=value}`. If
    /// the figure is a list, `/` separates the values of the label.
    pub metric: &'static str,
    /// How precisely the metric may show the figure.
    pub export: Export,
    /// Kind of the figure, which determines the type of the metric.
    pub kind: Kind,
    /// Unit of the figure in the control interface. The metric uses a base unit instead, such as
    /// seconds.
    pub unit: &'static str,
    /// Meaning of the figure, in words.
    pub meaning: &'static str,
    /// Path below `host-daemon/` of the file that counts the figure.
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

const VM: &str = "tmemd/src/vm/state.rs";
const STATE: &str = "tmem-pool/src/state.rs";
const TENANT: &str = "tmem-pool/src/tenant/mod.rs";
const GET: &str = "tmem-pool/src/tenant/get.rs";
const ENTRY: &str = "tmem-pool/src/index/entry.rs";
const GAIN: &str = "tmem-trace/src/estimate.rs";
const POOL: &str = "tmem-pool/src/engine.rs";
const HEAP: &str = "tmem-pool/src/heap/mod.rs";
const BLOB: &str = "tmem-pool/src/blob.rs";
const AVAILABLE: &str = "tmemd/src/host/available.rs";
const PRESSURE: &str = "tmemd/src/host/pressure.rs";
const USAGE: &str = "tmemd/src/host/usage.rs";
const FIGURES: &str = "tmemd/src/control/statistics.rs";
const GUEST: &str = "tmemd/src/queue/execute.rs";
const BUDGET: &str = "tmemd/src/memory/budget.rs";

use Export::{Exact, No, Ranges, Rest, RestInSteps, Steps};
use Kind::{Counter, Gauge, Histogram, Text};
use Scope::{Daemon, Driver, Pool, Vm};

/// All figures, in the order of their fields in the control interface.
#[rustfmt::skip]
pub const STATISTICS: &[Statistic] = &[
    row(Vm, ("name", "", No), (Text, ""), "name of the VM; the label `vm` of its metrics", VM),
    row(Vm, ("uuid", "", No), (Text, ""), "UUID of the libvirt domain; the label `uuid` of `tmem_vm_info`", VM),
    row(Vm, ("trust_domain", "", No), (Text, ""), "trust domain of the VM; the label `trust_domain` of `tmem_vm_info`", VM),
    row(Vm, ("reserve_bytes", "tmem_vm_reserve_bytes", Exact), (Gauge, "bytes"), "memory to which the VM is entitled before others share the rest", TENANT),
    row(Vm, ("limit_bytes", "tmem_vm_limit_bytes", Exact), (Gauge, "bytes"), "limit of `charged_bytes`; none if only the pool limits the VM", TENANT),
    row(Vm, ("weight", "tmem_vm_weight", Exact), (Gauge, ""), "share of the VM in memory that is not reserved", TENANT),
    row(Vm, ("connected", "tmem_vm_connected", Exact), (Gauge, ""), "whether the VM's VMM is connected (metric: 1 or 0)", VM),
    row(Vm, ("frozen", "tmem_vm_frozen", Exact), (Gauge, ""), "whether the VM's puts are refused, see `tmemctl freeze` (metric: 1 or 0)", VM),
    row(Vm, ("connections", "tmem_vm_connections", Exact), (Counter, ""), "accepted connections. If there are more than a few, the VMM or the daemon restarts repeatedly", VM),
    row(Vm, ("connections_refused", "tmem_vm_connections_refused", Exact), (Counter, ""), "refused connections: the VM had one already, or the peer's user was not allowed", VM),
    row(Vm, ("queues_stopped", "tmem_vm_queues_stopped", Exact), (Counter, ""), "virtqueues that were stopped for a fault of the guest or the VMM; the log has the reason", VM),
    row(Vm, ("requests", "tmem_vm_requests", Exact), (Counter, "requests"), "descriptor chains that were answered", VM),
    row(Vm, ("requests_stale", "tmem_vm_requests_stale", Exact), (Counter, "requests"), "requests with the generation of an earlier connection", VM),
    row(Vm, ("requests_bad", "tmem_vm_requests_bad", Exact), (Counter, "requests"), "requests with a shape that the guest driver never sends", VM),
    row(Vm, ("drain_cut_pages", "tmem_vm_drain_cut_pages", Exact), (Counter, "pages"), "pages that were refused, missed or gone because the VM's memory was about to change (pause, migration, reset)", VM),
    row(Vm, ("limited_pages", "tmem_vm_limited_pages", Exact), (Counter, "pages"), "pages that were refused, missed or gone because the VM exceeded `vm_pages_per_second`", VM),
    row(Vm, ("pages", "tmem_vm_pages{form=stored}", Rest), (Gauge, "pages"), "pages of the VM in the pool, of 4,096 B each (metric: those that are in no other form)", ENTRY),
    row(Vm, ("charged_bytes", "tmem_vm_charged_bytes", Exact), (Gauge, "bytes"), "bytes that count against the VM's quota: compressed size and 320 B for each page, shared or not; 4,096 B and 320 B for a page in the nursery", ENTRY),
    row(Vm, ("entitled_bytes", "tmem_vm_entitled_bytes", Exact), (Gauge, "bytes"), "entitlement of the VM in the pool's current size: its reserve and a share by weight, up to its limit. The VM may use more while others leave it unused", "tmem-pool/src/quota.rs"),
    row(Vm, ("original_bytes", "tmem_vm_original_bytes", Exact), (Gauge, "bytes"), "uncompressed size of the VM's pages, 4,096 B each", ENTRY),
    row(Vm, ("compressed_bytes", "tmem_vm_compressed_bytes", Exact), (Gauge, "bytes"), "compressed size of the VM's pages; a shared page counts in full", ENTRY),
    row(Vm, ("saved_bytes", "tmem_vm_saved_bytes", Exact), (Gauge, "bytes"), "`original_bytes` minus `charged_bytes`: memory that the guest would need itself for these pages, minus their charge. Below 0 while most pages are new", FIGURES),
    row(Vm, ("nursery_pages", "tmem_vm_pages{form=nursery}", Exact), (Gauge, "pages"), "pages in the nursery: accepted and not finalized yet", ENTRY),
    row(Vm, ("nursery_pages_max", "tmem_vm_nursery_limit_pages", Exact), (Gauge, "pages"), "limit of `nursery_pages`; further puts are refused", STATE),
    row(Vm, ("same_filled_pages", "tmem_vm_pages{form=same_filled}", Exact), (Gauge, "pages"), "pages that are stored as a pattern of four bytes", ENTRY),
    row(Vm, ("shared_pages", "", No), (Gauge, "pages"), "pages that were found equal to a stored page of the trust domain", ENTRY),
    row(Vm, ("stored_pages", "", No), (Gauge, "pages"), "all other pages: compressed, or raw if they do not compress", FIGURES),
    row(Vm, ("retained_pages", "tmem_vm_retained_pages", Exact), (Gauge, "pages"), "part of `pages` that the guest has in its page cache, too: a get returned them and left them in the pool, and no REF followed. They are evicted before other pages of the VM", ENTRY),
    row(Vm, ("detached_pages", "tmem_vm_detached_pages", Exact), (Gauge, "pages"), "pages that are dropped and not freed yet", "tmem-pool/src/index/mod.rs"),
    row(Vm, ("puts", "tmem_vm_put_pages", Exact), (Counter, "pages"), "pages that the guest put, including refused ones", STATE),
    row(Vm, ("puts_refused", "", No), (Counter, "pages"), "refused puts: the sum of the next five values, and pages in guest memory that was lost", STATE),
    row(Vm, ("refused_nursery", "tmem_vm_put_refused_pages{reason=nursery}", Exact), (Counter, "pages"), "puts refused because too many pages waited in the nursery: the guest puts faster than the host compresses; see `background_threads` in configuration.md", STATE),
    row(Vm, ("refused_pool", "tmem_vm_put_refused_pages{reason=pool}", Exact), (Counter, "pages"), "puts refused because the pool was full and no page could be evicted within the time of a put", STATE),
    row(Vm, ("refused_limit", "tmem_vm_put_refused_pages{reason=limit}", Exact), (Counter, "pages"), "puts refused because the VM was above its limit, after the limit was lowered far", STATE),
    row(Vm, ("refused_keys", "tmem_vm_put_refused_pages{reason=keys}", Exact), (Counter, "pages"), "puts refused because the VM had the maximum number of pages, or there was no memory for another index entry", STATE),
    row(Vm, ("refused_frozen", "tmem_vm_put_refused_pages{reason=frozen}", Exact), (Counter, "pages"), "puts refused because the VM is frozen", GUEST),
    row(Vm, ("finalized_same_filled", "tmem_vm_finalized_same_filled_pages", Exact), (Counter, "pages"), "pages that were finalized as a pattern", STATE),
    row(Vm, ("finalized_shared", "", No), (Counter, "pages"), "pages that were finalized as a share of an equal page", STATE),
    row(Vm, ("finalized_compressed", "", No), (Counter, "pages"), "pages that were finalized by compression", STATE),
    row(Vm, ("finalized_raw", "", No), (Counter, "pages"), "pages that were finalized uncompressed, because they compress to more than 3,772 B", STATE),
    row(Vm, ("gets", "tmem_vm_get_pages", Exact), (Counter, "pages"), "pages that the guest requested", STATE),
    row(Vm, ("hits", "tmem_vm_hit_pages", Exact), (Counter, "pages"), "requested pages that were returned; the guest did not read them from its disk", GET),
    row(Vm, ("retained_hits", "tmem_vm_retained_hit_pages", Exact), (Counter, "pages"), "part of `hits` that left the page in the pool. 0 unless QEMU and the driver use VIRTIO_TMEM_F_RETAIN", GET),
    row(Vm, ("refs", "tmem_vm_ref_pages", Exact), (Counter, "pages"), "pages that the guest evicted and named in REF requests instead of putting a copy", STATE),
    row(Vm, ("refs_gone", "tmem_vm_ref_gone_pages", Exact), (Counter, "pages"), "part of `refs` whose page the pool no longer had. The guest reads these pages from its disk. A driver should put copies instead of sending REF requests while more than 1/16 of the last 1,024 pages that it named in them were gone", STATE),
    row(Vm, ("misses", "", No), (Counter, "pages"), "requested pages that were not returned: `gets` minus `hits`", FIGURES),
    row(Vm, ("cookie_mismatches", "tmem_vm_cookie_mismatch_pages", Exact), (Counter, "pages"), "misses of pages that were in the pool with another cookie than the requested one", STATE),
    row(Vm, ("disk_read_avoided_bytes", "tmem_vm_disk_read_avoided_bytes", Exact), (Counter, "bytes"), "hits in bytes, 4,096 B each: data that the guest did not read from its disk. The disk's own counters may differ because of readahead", FIGURES),
    row(Vm, ("evictions", "", No), (Counter, "pages"), "pages that were evicted: the sum of the next three values", STATE),
    row(Vm, ("evictions_limit", "tmem_vm_evicted_pages{cause=limit}", Exact), (Counter, "pages"), "pages that were evicted because the VM reached its limit", STATE),
    row(Vm, ("evictions_pool", "tmem_vm_evicted_pages{cause=pool}", Exact), (Counter, "pages"), "pages that were evicted because the pool was full or nearly full and the VM was furthest above its entitlement", STATE),
    row(Vm, ("evictions_shrink", "tmem_vm_evicted_pages{cause=shrink}", Exact), (Counter, "pages"), "pages that were evicted because the pool was made smaller, by an operator or for the host", STATE),
    row(Vm, ("evictions_retained", "tmem_vm_evicted_retained_pages", Exact), (Counter, "pages"), "part of `evictions` that hit retained pages, for any cause", STATE),
    row(Vm, ("flushed_pages", "tmem_vm_flushed_pages", Exact), (Counter, "pages"), "pages that were dropped because the guest changed or removed them, a connection ended, or by `tmemctl flush`", STATE),
    row(Vm, ("replaced_pages", "tmem_vm_replaced_pages", Exact), (Counter, "pages"), "pages that a put of the same key replaced", STATE),
    row(Vm, ("hash_mismatches", "tmem_vm_hash_mismatch_pages", Exact), (Counter, "pages"), "pages that were not returned because their bytes failed the check. Must be 0; otherwise the host's memory or the engine is faulty", GET),
    row(Vm, ("gain_hits", "tmem_vm_gain_hit_pages{more_percent=0-25/25-50/50-100}", Ranges), (Counter, "pages"), "estimate: misses that would have been hits with 25, 50 and 100 % more memory. Each of the three values includes the one before it (metric: the difference from that value)", GAIN),
    row(Vm, ("loss_hits", "tmem_vm_loss_hit_pages{less_percent=0-25/25-50/50-75}", Ranges), (Counter, "pages"), "estimate: hits that would have been misses with 25, 50 and 75 % less memory than the VM held. Each of the three values includes the one before it (metric: the difference from that value)", GAIN),
    row(Vm, ("loss_hits_seen", "tmem_vm_loss_hit_pages{less_percent=75-100}", Rest), (Counter, "pages"), "estimate: all hits, scaled up from the sampled hits that the estimator examined for `loss_hits` (metric: the hits that the VM would still have had with 75 % less memory)", GAIN),
    row(Vm, ("put_latency", "tmem_vm_request_duration_seconds{request=put}", Exact), (Histogram, "ns, requests"), "time of PUT requests, of up to 64 pages each, from the moment when a worker takes the request until the answer is in the used ring. The wait for a worker is in `wait_latency`", "tmemd/src/util/histogram.rs"),
    row(Vm, ("get_latency", "tmem_vm_request_duration_seconds{request=get}", Exact), (Histogram, "ns, requests"), "time of GET requests, measured as `put_latency`", "tmemd/src/util/histogram.rs"),
    row(Vm, ("flush_latency", "tmem_vm_request_duration_seconds{request=flush}", Exact), (Histogram, "ns, requests"), "time of FLUSH requests, measured as `put_latency`. For a request that takes several scheduling slices, only the last slice counts", "tmemd/src/util/histogram.rs"),
    row(Vm, ("ref_latency", "tmem_vm_request_duration_seconds{request=ref}", Exact), (Histogram, "ns, requests"), "time of REF requests, measured as `put_latency`", "tmemd/src/util/histogram.rs"),
    row(Vm, ("wait_latency", "tmem_vm_slice_wait_seconds", Exact), (Histogram, "ns, slices"), "wait of the VM's queues for a worker, from the moment when the worker sees their work until the scheduling slice begins. A slice answers requests for up to some hundred pages", "tmemd/src/queue/vring.rs"),
    row(Vm, ("cpu_requests_ms", "tmem_vm_cpu_seconds", Exact), (Counter, "ms"), "time of workers at the VM's requests, by the clock. It includes waits for a processor, and for guest memory that the host has swapped out, so the sum over all VMs may exceed `cpu_requests_ms` of the daemon. It does not include background work", "tmemd/src/queue/vring.rs"),
    row(Vm, ("memory_mapped_bytes", "tmem_vm_memory_mapped_bytes", Exact), (Gauge, "bytes"), "address space in which the daemon has mapped the VM's memory, including memory that waits to be unmapped", BUDGET),
    row(Vm, ("memory_max_bytes", "tmem_vm_memory_max_bytes", Exact), (Gauge, "bytes"), "maximum size of the VM's memory: `memory_max`, or what libvirt's hook says. The daemon refuses a VM with more memory", BUDGET),
    row(Vm, ("driver", "", No), (Text, ""), "last report of the guest driver on this connection, if there is one; see the next table", VM),

    row(Driver, ("version", "", No), (Text, ""), "version of the module", GUEST),
    row(Driver, ("state", "tmem_vm_driver_state", Exact), (Text, ""), "off, on, offline (no daemon), tripped (late answers, tries again) or poisoned (a mismatch: off until the module is loaded again); metric: 1 for the current state, `none` without a report", GUEST),
    row(Driver, ("kernel", "", No), (Text, ""), "kernel release of the guest", GUEST),
    row(Driver, ("hooks", "", No), (Text, ""), "bit mask of the driver's live hooks in the kernel", GUEST),
    row(Driver, ("file_systems", "", No), (Text, ""), "types of file systems that the driver serves; empty before it knows the first one, and from older drivers", GUEST),
    row(Driver, ("memory_bytes", "tmem_vm_driver_memory_bytes", Exact), (Gauge, "bytes"), "memory of the guest that the driver uses", GUEST),
    row(Driver, ("index_pages", "tmem_vm_driver_index_pages", Exact), (Gauge, "pages"), "pages in the driver's index, which the pool may hold", GUEST),
    row(Driver, ("puts", "tmem_vm_driver_put_pages", Exact), (Counter, "pages"), "pages that the driver sent", GUEST),
    row(Driver, ("puts_dropped", "tmem_vm_driver_put_dropped_pages", Exact), (Counter, "pages"), "pages that the driver did not send, because its ring was full or it had no memory", GUEST),
    row(Driver, ("gets", "tmem_vm_driver_get_pages", Exact), (Counter, "pages"), "pages that the driver looked up in its ring or requested from the host", GUEST),
    row(Driver, ("hits", "tmem_vm_driver_hit_pages", Exact), (Counter, "pages"), "pages from the ring or the host that the guest used", GUEST),
    row(Driver, ("late", "tmem_vm_driver_late_requests", Exact), (Counter, "requests"), "answers after the driver's deadline, for which the guest did not wait", GUEST),
    row(Driver, ("mismatches", "tmem_vm_driver_mismatch_pages", Exact), (Counter, "pages"), "pages that differed from the page that the driver put. Must be 0", GUEST),
    row(Driver, ("invalidations", "tmem_vm_driver_invalidated_pages", Exact), (Counter, "pages"), "pages that the driver erased from its index because the file changed", GUEST),
    row(Driver, ("get_latency", "tmem_vm_driver_get_duration_seconds", Exact), (Histogram, "ns, requests"), "GET requests since the module was loaded, by the time that their reader waited: from the request to the answer or the deadline, by the guest's clock. The driver sends it if QEMU offers VIRTIO_TMEM_F_LATENCIES. Older drivers do not send it", GUEST),

    row(Pool, ("size_bytes", "tmem_pool_size_bytes", Exact), (Gauge, "bytes"), "current limit of the pool's memory, including metadata", POOL),
    row(Pool, ("configured_bytes", "tmem_pool_configured_bytes", Exact), (Gauge, "bytes"), "limit of the pool's memory while the host has enough memory", PRESSURE),
    row(Pool, ("host_available_bytes", "tmem_pool_host_available_bytes", Exact), (Gauge, "bytes"), "memory that the host has available, as the daemon last read it: `MemAvailable` and `host_arc_bytes`. 0 if the daemon does not watch it", AVAILABLE),
    row(Pool, ("host_arc_bytes", "tmem_pool_host_arc_bytes", Exact), (Gauge, "bytes"), "part of `host_available_bytes` that ZFS's ARC can release: its size without its minimum size", AVAILABLE),
    row(Pool, ("host_shrinks", "tmem_pool_host_shrinks{cause=memory}", Rest), (Counter, "steps"), "steps by which the pool shrank for the host or for a VM that started (metric: only those that `host_shrinks_stalls` does not count)", PRESSURE),
    row(Pool, ("host_shrinks_stalls", "tmem_pool_host_shrinks{cause=stalls}", Exact), (Counter, "steps"), "part of `host_shrinks` whose reason was that tasks waited for memory (PSI), although the host had `host_free_min` available", PRESSURE),
    row(Pool, ("host_grows", "tmem_pool_host_grows", Exact), (Counter, "steps"), "steps by which the pool grew again towards its configured size", PRESSURE),
    row(Pool, ("held_bytes", "tmem_pool_memory_bytes{use=gaps}", RestInSteps), (Gauge, "bytes"), "host memory that the pool uses: frames and metadata (metric: only the unused parts of frames, `frames_bytes` minus `payload_bytes`)", POOL),
    row(Pool, ("frames_bytes", "", No), (Gauge, "bytes"), "memory for stored pages, including unused parts", HEAP),
    row(Pool, ("payload_bytes", "tmem_pool_memory_bytes{use=payload}", Steps), (Gauge, "bytes"), "size of the stored copies, each once. The rest of `frames_bytes` is unused: gaps between the copies", HEAP),
    row(Pool, ("metadata_bytes", "tmem_pool_memory_bytes{use=metadata}", Steps), (Gauge, "bytes"), "memory for keys, tables and records; an upper estimate", POOL),
    row(Pool, ("charged_bytes", "tmem_pool_charged_bytes", Exact), (Gauge, "bytes"), "sum of the charges of all VMs", POOL),
    row(Pool, ("reserved_bytes", "tmem_pool_reserved_bytes", Exact), (Gauge, "bytes"), "sum of the reserves of all VMs. A reserve that is larger than the VM's limit counts as the limit", "tmem-pool/src/membership.rs"),
    row(Pool, ("tenants", "", No), (Gauge, "VMs"), "VMs that have a place in the pool", "tmem-pool/src/membership.rs"),
    row(Pool, ("pages", "tmem_pool_pages{form=stored}", Rest), (Gauge, "pages"), "pages of all VMs in the pool (metric: those that are in no other form)", POOL),
    row(Pool, ("original_bytes", "tmem_pool_original_bytes", Exact), (Gauge, "bytes"), "uncompressed size of all pages, 4,096 B each", POOL),
    row(Pool, ("compressed_bytes", "tmem_pool_compressed_bytes", Exact), (Gauge, "bytes"), "compressed size of all pages; a shared page counts in full for each VM", POOL),
    row(Pool, ("saved_bytes", "tmem_pool_saved_bytes", Steps), (Gauge, "bytes"), "`original_bytes` minus `held_bytes`: host RAM saved. Guests would need `original_bytes` for the same hits, and the pool uses `held_bytes`. Below 0 while the pool is nearly empty", FIGURES),
    row(Pool, ("dedup_saved_bytes", "tmem_pool_dedup_saved_bytes", Steps), (Gauge, "bytes"), "`compressed_bytes` minus `payload_bytes` and `zstd_saved_bytes`: memory that is saved because equal pages are stored once", FIGURES),
    row(Pool, ("nursery_pages", "tmem_pool_pages{form=nursery}", Exact), (Gauge, "pages"), "pages in the nursery: accepted and not finalized yet", POOL),
    row(Pool, ("same_filled_pages", "tmem_pool_pages{form=same_filled}", Exact), (Gauge, "pages"), "pages that are stored as a pattern of four bytes", POOL),
    row(Pool, ("shared_pages", "tmem_pool_pages{form=shared}", Steps), (Gauge, "pages"), "pages that need no copy of their own because an equal page is stored", POOL),
    row(Pool, ("retained_pages", "tmem_pool_retained_pages", Exact), (Gauge, "pages"), "pages that guests have in their page caches, too: a get returned them and left them in the pool, and no REF followed", POOL),
    row(Pool, ("detached_pages", "tmem_pool_detached_pages", Exact), (Gauge, "pages"), "pages that are dropped and not freed yet, including those of VMs that left", POOL),
    row(Pool, ("blobs", "tmem_pool_blobs", Steps), (Gauge, "copies"), "stored copies of pages", HEAP),
    row(Pool, ("moved_blobs", "tmem_pool_moved_blobs", Exact), (Counter, "copies"), "copies that compaction moved together to release the memory between them", POOL),
    row(Pool, ("recompressed_blobs", "tmem_pool_recompressed_blobs", Exact), (Counter, "copies"), "cold copies that were compressed again with zstd", BLOB),
    row(Pool, ("recompressed_saved_bytes", "tmem_pool_recompressed_saved_bytes", Exact), (Counter, "bytes"), "bytes by which zstd made cold copies smaller", BLOB),
    row(Pool, ("zstd_saved_bytes", "tmem_pool_zstd_saved_bytes", Steps), (Gauge, "bytes"), "bytes that zstd saves for the copies that are stored now", BLOB),
    row(Pool, ("puts", "tmem_pool_put_pages", Exact), (Counter, "pages"), "pages that guests put, including VMs that left. Pages that were refused because a VM was frozen are counted in none of the puts, gets and hits of the pool", POOL),
    row(Pool, ("puts_refused", "tmem_pool_put_refused_pages", Exact), (Counter, "pages"), "refused puts of all VMs", POOL),
    row(Pool, ("gets", "tmem_pool_get_pages", Exact), (Counter, "pages"), "pages that guests requested", POOL),
    row(Pool, ("hits", "tmem_pool_hit_pages", Exact), (Counter, "pages"), "requested pages that were returned", POOL),
    row(Pool, ("retained_hits", "tmem_pool_retained_hit_pages", Exact), (Counter, "pages"), "part of `hits` that left the page in the pool", POOL),
    row(Pool, ("refs", "tmem_pool_ref_pages", Exact), (Counter, "pages"), "pages that guests evicted and named in REF requests instead of putting a copy", POOL),
    row(Pool, ("refs_gone", "tmem_pool_ref_gone_pages", Exact), (Counter, "pages"), "part of `refs` whose page the pool no longer had", POOL),
    row(Pool, ("evictions", "", No), (Counter, "pages"), "pages that were evicted: the sum of the next three values", POOL),
    row(Pool, ("evictions_limit", "tmem_pool_evicted_pages{cause=limit}", Exact), (Counter, "pages"), "pages that were evicted because a VM reached its limit", POOL),
    row(Pool, ("evictions_pool", "tmem_pool_evicted_pages{cause=pool}", Exact), (Counter, "pages"), "pages that were evicted because the pool was full or nearly full", POOL),
    row(Pool, ("evictions_shrink", "tmem_pool_evicted_pages{cause=shrink}", Exact), (Counter, "pages"), "pages that were evicted because the pool was made smaller", POOL),
    row(Pool, ("evictions_retained", "tmem_pool_evicted_retained_pages", Exact), (Counter, "pages"), "part of `evictions` that hit retained pages, for any cause", POOL),
    row(Pool, ("flushed_pages", "tmem_pool_flushed_pages", Exact), (Counter, "pages"), "pages that were dropped because a guest changed or removed them, a connection ended, or by `tmemctl flush`", POOL),
    row(Pool, ("hash_mismatches", "tmem_pool_hash_mismatch_pages", Exact), (Counter, "pages"), "pages that were not returned because their bytes failed the check. Must be 0", POOL),

    row(Daemon, ("version", "", No), (Text, ""), "version of tmemd; the label `version` of `tmem_daemon_build_info`", FIGURES),
    row(Daemon, ("pid", "", No), (Text, ""), "process ID of tmemd", FIGURES),
    row(Daemon, ("start_time_seconds", "tmem_daemon_start_time_seconds", Exact), (Gauge, "seconds"), "Unix time of the daemon's start", FIGURES),
    row(Daemon, ("uptime_seconds", "", No), (Gauge, "seconds"), "time since the daemon's start", FIGURES),
    row(Daemon, ("workers", "tmem_daemon_workers", Exact), (Gauge, "threads"), "threads that answer requests", "tmemd/src/queue/worker.rs"),
    row(Daemon, ("vms", "tmem_daemon_vms", Exact), (Gauge, "VMs"), "VMs for which the daemon has a socket", FIGURES),
    row(Daemon, ("vms_connected", "", No), (Gauge, "VMs"), "VMs that are connected", FIGURES),
    row(Daemon, ("vms_frozen", "", No), (Gauge, "VMs"), "VMs that are frozen", FIGURES),
    row(Daemon, ("cpu_requests_ms", "tmem_daemon_cpu_seconds{stage=requests}", Exact), (Counter, "ms"), "processor time of requests: copying in, decompressing, copying out, freeing", USAGE),
    row(Daemon, ("cpu_background_ms", "", No), (Counter, "ms"), "processor time of background work: finding equal pages, compression, compaction, recompression. The next three values are parts of it", USAGE),
    row(Daemon, ("cpu_finalize_ms", "tmem_daemon_cpu_seconds{stage=finalize}", Exact), (Counter, "ms"), "part of `cpu_background_ms` for new pages: finding equal pages, lz4. Background workers add their time to this value and the next two after each step of about 1,024 pages. The time that these three values do not count is spent on waking threads up and on unmapping the memory of VMs", USAGE),
    row(Daemon, ("cpu_recompress_ms", "tmem_daemon_cpu_seconds{stage=recompress}", Exact), (Counter, "ms"), "part of `cpu_background_ms` for cold pages: finding them, zstd", USAGE),
    row(Daemon, ("cpu_reclaim_ms", "tmem_daemon_cpu_seconds{stage=reclaim}", Exact), (Counter, "ms"), "part of `cpu_background_ms` for releasing memory: eviction, freeing of dropped pages, compaction, returning memory to the host", USAGE),
    row(Daemon, ("cpu_other_ms", "tmem_daemon_cpu_seconds{stage=other}", Exact), (Counter, "ms"), "processor time that no other stage counts: connections, control, waking background threads up, and unmapping the memory of VMs. It is `cpu_ms` minus the other stages at the time when that difference was largest, because a counter must not shrink. So the sum of all stages may exceed `cpu_ms` by some ms", FIGURES),
    row(Daemon, ("cpu_ms", "", No), (Counter, "ms"), "processor time of the process: the sum of all stages", USAGE),
    row(Daemon, ("resident_bytes", "tmem_daemon_resident_bytes", Steps), (Gauge, "bytes"), "resident memory of the process without mapped guest memory: the pool and the daemon's own memory", USAGE),
    row(Daemon, ("memory_locked", "tmem_daemon_memory_locked", Exact), (Gauge, ""), "whether all memory of the pool is locked, so that pages of guests are never swapped by the host (metric: 1 or 0)", HEAP),
    row(Daemon, ("interrupts_lost", "tmem_daemon_interrupts_lost", Exact), (Counter, "interrupts"), "interrupts that the kernel refused to deliver to a guest or its VMM. The log names them, and the guest continues at its deadline. Must be 0", "tmemd/src/queue/notifier.rs"),
    row(Daemon, ("memory_mapped_bytes", "tmem_daemon_memory_mapped_bytes", Exact), (Gauge, "bytes"), "address space in which the daemon has mapped the memory of all VMs", BUDGET),
    row(Daemon, ("memory_budget_bytes", "tmem_daemon_memory_budget_bytes", Exact), (Gauge, "bytes"), "limit of `memory_mapped_bytes`. The daemon refuses VMs whose memory does not fit", BUDGET),
    row(Daemon, ("memory_regions", "tmem_daemon_memory_regions", Exact), (Gauge, "regions"), "regions of memory (memory slots) that the daemon has mapped for all VMs, including those that wait to be unmapped", BUDGET),
    row(Daemon, ("memory_regions_max", "tmem_daemon_memory_regions_max", Exact), (Gauge, "regions"), "limit of `memory_regions`: `vm.max_map_count` minus 8,192. The daemon refuses VMs whose regions do not fit", BUDGET),
];

impl Scope {
    /// Returns the name of the type in the control interface.
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
    /// Returns the figures of one type of the control interface.
    pub fn of(scope: Scope) -> impl Iterator<Item = &'static Statistic> {
        STATISTICS.iter().filter(move |row| row.scope == scope)
    }

    /// Returns the name of the figure's metric without suffixes, and the key and values of its
    /// label if it has one.
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

    const INTERFACE: &str = include_str!("../../tmem-control/src/io.virtiotmem.Control.varlink");
    const SCOPES: [Scope; 4] = [Vm, Driver, Pool, Daemon];

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    /// Returns the names of a type's fields in the interface file.
    fn fields(type_name: &str) -> Vec<&'static str> {
        let begin = format!("type {type_name} (\n");
        let (_, rest) = INTERFACE
            .split_once(&begin)
            .expect("the interface file defines no type of this name");
        let (body, _) = rest
            .split_once(')')
            .expect("the type does not end with a parenthesis");
        let lines = body.lines();
        lines
            .filter_map(|line| Some(line.trim().split_once(':')?.0))
            .collect()
    }

    #[test]
    fn every_field_of_the_varlink_interface_is_described() {
        for scope in SCOPES {
            let rows: Vec<&str> = Statistic::of(scope).map(|row| row.field).collect();
            assert_eq!(
                rows,
                fields(scope.type_name()),
                "the rows of {} differ from the fields of the interface",
                scope.type_name()
            );
        }
    }

    #[test]
    fn sources_exist_and_metric_names_follow_prometheus_conventions() {
        for row in STATISTICS {
            let path = root().join("host-daemon").join(row.source);
            assert!(
                path.exists(),
                "row {} names {}, which does not exist",
                row.field,
                row.source
            );
            assert!(!row.meaning.is_empty() && !row.meaning.ends_with('.'));
            let (name, label) = row.metric();
            assert_eq!(
                row.export == Export::No,
                name.is_empty(),
                "row {}: a row must have a metric name exactly if it is exported",
                row.field
            );
            let good = |c: char| c.is_ascii_lowercase() || c == '_';
            assert!(
                name.chars().all(good),
                "metric {name} has an invalid character"
            );
            assert!(label.is_none_or(|(key, values)| key.chars().all(good) && !values.is_empty()));
            // Prometheus' naming conventions require base units. A metric's name therefore need not
            // end with the unit of the field.
            match row.unit {
                "bytes" => assert!(
                    name.is_empty() || name.ends_with("_bytes"),
                    "metric {name} counts bytes and does not end with _bytes"
                ),
                "ms" | "seconds" => {
                    assert!(
                        name.ends_with("_seconds") || name.is_empty(),
                        "metric {name} is a time and does not end with _seconds"
                    )
                }
                // A metric that counts pages must not have a name that looks like a number of
                // requests.
                "pages" => assert!(
                    name.ends_with("_pages") || name.is_empty(),
                    "metric {name} counts pages and does not end with _pages"
                ),
                _ => {}
            }
        }
    }

    fn table(scope: Scope) -> String {
        let mut text = String::from(
            "| value | metric | kind | unit | meaning | source |\n| --- | --- | --- | --- | --- | --- |\n",
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
                Export::Steps | Export::RestInSteps => {
                    format!("`{name}{suffix}{}` in steps", label.unwrap_or_default())
                }
                _ => format!("`{name}{suffix}{}`", label.unwrap_or_default()),
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

    /// Compares the tables of docs/statistics.md with [`STATISTICS`]. With `TMEM_BLESS=1`, the test
    /// writes the tables to the file.
    #[test]
    fn docs_statistics_md_matches_the_table() {
        let path = root().join("docs/statistics.md");
        let text = std::fs::read_to_string(&path).expect("cannot read docs/statistics.md");
        let mut new = text.clone();
        for scope in SCOPES {
            let begin = format!("<!-- table {} -->\n", scope.type_name());
            let (before, rest) = new
                .split_once(&begin)
                .expect("docs/statistics.md has no mark for the table");
            let (_, after) = rest
                .split_once("<!-- end -->")
                .expect("docs/statistics.md has no mark for the end of the table");
            new = format!("{before}{begin}{}<!-- end -->{after}", table(scope));
        }
        if std::env::var_os("TMEM_BLESS").is_some() {
            std::fs::write(&path, &new).expect("cannot write the file");
        }
        assert!(
            text == new,
            "docs/statistics.md differs from the table: run this test with TMEM_BLESS=1 to write it"
        );
    }
}
