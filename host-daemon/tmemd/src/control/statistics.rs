// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The statistics that the control interface returns; docs/statistics.md describes each value.
//!
//! The functions here only copy and add values. Events are counted in the code in which they occur.
//! The table [`tmem_trace::statistics!`] lists the values.

use crate::control::sources::Sources;
use crate::host::usage;
use crate::queue::notifier;
use crate::vm::state::{Vm, driver_state};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use tmem_control as api;
use tmem_pool::{PAGE_SIZE, Work};
use virtio_tmem as wire;

/// Converts an unsigned number to the signed type that varlink uses for integers.
pub fn int(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn load(counter: &AtomicU64) -> i64 {
    int(counter.load(Ordering::Relaxed))
}

/// Returns the identity and the quota of a VM.
pub fn vm(vm: &Vm) -> api::Vm {
    let stats = vm.tenant.stats();
    api::Vm {
        name: vm.name().to_string(),
        uuid: vm.config.uuid.clone(),
        socket: vm.config.socket.display().to_string(),
        trust_domain: vm.config.trust_domain.clone(),
        quota: api::Quota {
            reserve_bytes: int(stats.reserve_bytes),
            limit_bytes: stats.limit_bytes.map(int),
            weight: i64::from(stats.weight),
        },
        connected: vm.connected.load(Ordering::Acquire),
        problem: vm.problem(),
        frozen: vm.frozen.load(Ordering::Relaxed),
        memory_bytes: Some(int(vm.memory.table_bytes())),
        memory_resident_bytes: vm.memory.files.allocated_bytes().map(int),
        pages: Some(int(stats.pages)),
        charged_bytes: Some(int(stats.charged_bytes)),
    }
}

/// Creates a value of a type of the control interface. The caller lists the fields that the table
/// of statistics leaves to `tmemd`. The other fields are copied from the statistics of the engine
/// (`$stats`) and from the daemon's counters of the VM (`$counters`).
macro_rules! reply {
    (
        { $stats:ident, $counters:ident, VmStats $fields:tt }
        pool_gauges $pool_gauges:tt
        pool $pool:tt
        pool_counters $pool_counters:tt
        vm $vm:tt
        tenant_gauges { $($(#[$gauge_doc:meta])* $gauge:ident $gauge_row:tt;)* }
        tenant_counters_with_sums { $($(#[$sum_doc:meta])* $sum:ident $sum_row:tt;)* }
        tenant_counters { $($(#[$tenant_doc:meta])* $tenant:ident $tenant_row:tt;)* }
        vm_counters { $($(#[$counter_doc:meta])* $counter:ident $counter_row:tt;)* }
        vm_latencies { $($(#[$latency_doc:meta])* $latency:ident $latency_row:tt;)* }
        $($other:ident $other_rows:tt)*
    ) => {
        reply!(VmStats $fields {
            $($gauge: int($stats.$gauge),)*
            $($sum: int($stats.$sum),)*
            $($tenant: int($stats.$tenant),)*
            $($counter: load(&$counters.$counter),)*
            $($latency: $counters.$latency.read(),)*
        })
    };
    (
        { $stats:ident, PoolStats $fields:tt }
        pool_gauges { $($(#[$gauge_doc:meta])* $gauge:ident $gauge_row:tt;)* }
        pool $pool:tt
        pool_counters { $($(#[$counter_doc:meta])* $counter:ident $counter_row:tt;)* }
        vm $vm:tt
        tenant_gauges $tenant_gauges:tt
        tenant_counters_with_sums { $($(#[$sum_doc:meta])* $sum:ident $sum_row:tt;)* }
        $($other:ident $other_rows:tt)*
    ) => {
        reply!(PoolStats $fields {
            $($gauge: int($stats.$gauge),)*
            $($counter: int($stats.$counter),)*
            $($sum: int($stats.$sum),)*
        })
    };
    ($type:ident { $($fields:tt)* } { $($copied:tt)* }) => {
        api::$type { $($fields)* $($copied)* }
    };
}

/// Returns the statistics of a VM.
pub fn vm_stats(vm: &Vm) -> api::VmStats {
    let stats = vm.tenant.stats();
    let counters = &vm.counters;
    let in_other_forms = stats.nursery_pages + stats.same_filled_pages + stats.shared_pages;
    let ints = |numbers: [u64; 3]| numbers.into_iter().map(int).collect();
    let mut reply = tmem_trace::statistics!(reply stats, counters, VmStats {
        name: vm.name().to_string(),
        uuid: vm.config.uuid.clone(),
        trust_domain: vm.config.trust_domain.clone(),
        reserve_bytes: int(stats.reserve_bytes),
        limit_bytes: stats.limit_bytes.map(int),
        weight: i64::from(stats.weight),
        connected: vm.connected.load(Ordering::Acquire),
        frozen: vm.frozen.load(Ordering::Relaxed),
        saved_bytes: int(stats.original_bytes) - int(stats.charged_bytes),
        stored_pages: int(stats.pages.saturating_sub(in_other_forms)),
        misses: int(stats.gets.saturating_sub(stats.hits)),
        disk_read_avoided_bytes: int(stats.hits.saturating_mul(PAGE_SIZE as u64)),
        gain_hits: ints(stats.gain_hits),
        loss_hits: ints(stats.loss_hits),
        loss_hits_seen: int(stats.loss_hits_seen),
        cpu_requests_ms: load(&counters.slices_ns) / 1_000_000,
        memory_mapped_bytes: int(vm.memory.mapped_bytes()),
        memory_bytes: int(vm.memory.table_bytes()),
        memory_resident_bytes: vm.memory.files.allocated_bytes().map(int),
        memory_max_bytes: int(vm.memory.max_bytes()),
        driver: vm.report().map(|report| driver_stats(&report, vm.latencies().as_ref())),
    });
    // Puts that are refused because the VM is frozen never reach the engine. They are added to the
    // engine's counts of puts and of refused puts.
    reply.puts += reply.refused_frozen;
    reply.puts_refused += reply.refused_frozen;
    reply
}

/// Returns the types of file systems that a guest's driver serves, separated by commas. `hooks` is
/// the bit mask of these types in the driver's report.
fn file_systems(hooks: u64) -> String {
    let known = [
        (wire::H_EXT2, "ext2"),
        (wire::H_EXT3, "ext3"),
        (wire::H_EXT4, "ext4"),
        (wire::H_XFS, "xfs"),
        (wire::H_BTRFS, "btrfs"),
        (wire::H_F2FS, "f2fs"),
        (wire::H_EROFS, "erofs"),
        (wire::H_VFAT, "vfat"),
        (wire::H_EXFAT, "exfat"),
    ];
    let served = known.iter().filter(|(bit, _)| hooks & (1 << bit) != 0);
    let names: Vec<&str> = served.map(|(_, name)| *name).collect();
    names.join(", ")
}

/// Maximum count in a bucket of a latency histogram that a guest reports. With this maximum, the
/// sum and the percentages of sixteen buckets cannot overflow. A guest with a million requests a
/// second reaches the maximum after nine years.
const GUEST_COUNT_MAX: u64 = 1 << 48;

/// Converts a latency histogram that a guest wrote. Counts above [`GUEST_COUNT_MAX`] are reduced to
/// that maximum.
fn latency_histogram(latencies: &wire::Latencies) -> api::Histogram {
    let bounded = |count: &wire::U64| int(count.get().min(GUEST_COUNT_MAX));
    api::Histogram {
        sum_ns: int(latencies.get_ns.get()),
        buckets: latencies.get.iter().map(bounded).collect(),
    }
}

/// Converts a driver's report, which the guest wrote. Replaces characters that terminals or logs
/// could interpret.
fn driver_stats(report: &wire::Report, latencies: Option<&wire::Latencies>) -> api::DriverReport {
    let version = report.version.get();
    let printable = |byte: &u8| {
        if byte.is_ascii_graphic() {
            char::from(*byte)
        } else {
            '?'
        }
    };
    api::DriverReport {
        version: format!(
            "{}.{}.{}",
            version >> 16,
            (version >> 8) & 0xff,
            version & 0xff
        ),
        state: driver_state(report.state.get()).into(),
        kernel: report
            .kernel
            .iter()
            .take_while(|byte| **byte != 0)
            .map(printable)
            .collect(),
        hooks: report.hooks.get() as i64,
        file_systems: file_systems(report.hooks.get()),
        memory_bytes: int(report.memory_bytes.get()),
        index_pages: int(report.index_pages.get()),
        puts: int(report.puts.get()),
        puts_dropped: int(report.puts_dropped.get()),
        gets: int(report.gets.get()),
        hits: int(report.hits.get()),
        late: int(report.late.get()),
        mismatches: int(report.mismatches.get()),
        invalidations: int(report.invalidations.get()),
        get_latency: latencies.map(latency_histogram),
    }
}

/// Returns the bytes that deduplication saves. Each page counts with the size to which it was first
/// compressed, as in `compressed_bytes`. Later compression saves more bytes, but they are no effect
/// of deduplication.
fn dedup_saved_bytes(stats: &tmem_pool::EngineStats) -> u64 {
    let first_bytes = stats.payload_bytes + stats.zstd_saved_bytes;
    stats.compressed_bytes.saturating_sub(first_bytes)
}

/// Reads the engine's statistics of the pool and returns them for the control interface.
pub fn pool_stats(control: &Sources) -> api::PoolStats {
    pool(control, &control.engine.stats())
}

/// Converts the engine's statistics of the pool to the form of the control interface.
pub fn pool(control: &Sources, stats: &tmem_pool::EngineStats) -> api::PoolStats {
    let size = &control.size;
    let host_shrinks_stalls = load(&size.shrinks_stalls);
    tmem_trace::statistics!(reply stats, PoolStats {
        configured_bytes: int(size.configured_bytes()),
        host_available_bytes: load(&size.available_bytes),
        host_arc_bytes: load(&size.arc_bytes),
        host_swap_free_bytes: load(&size.swap_free_bytes),
        host_shrinks: load(&size.shrinks_memory) + host_shrinks_stalls,
        host_shrinks_stalls,
        host_grows: load(&size.grows),
        saved_bytes: int(stats.original_bytes) - int(stats.held_bytes),
        dedup_saved_bytes: int(dedup_saved_bytes(stats)),
    })
}

/// Returns the statistics of the daemon, which include counts of the given VMs.
pub fn daemon_stats(control: &Sources, vms: &[Arc<Vm>]) -> api::DaemonStats {
    let count = |what: fn(&Vm) -> bool| vms.iter().filter(|vm| what(vm)).count() as i64;
    // The processor times of each kind of work are read before the time of the whole process.
    // Therefore their sum never exceeds the process's time.
    let background = |work| int(control.background.cpu_time.cpu_ms(work));
    let [finalize, recompress, reclaim] =
        [Work::Finalize, Work::Recompress, Work::Reclaim].map(background);
    let requests = int(control.workers.stage().cpu_ms());
    let all_background = int(control.background.stage.cpu_ms());
    let all = int(usage::process_cpu_ms());
    let memory = |vm: &Arc<Vm>| {
        let resident_bytes = vm.memory.files.allocated_bytes()?;
        Some((vm.memory.table_bytes(), resident_bytes))
    };
    let (memory_bytes, resident_bytes) = vms
        .iter()
        .filter_map(memory)
        .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
    let held_bytes = control.engine.stats().held_bytes;
    // The time of other work is the remainder of the process's time. The times are read at
    // different moments, and background work adds its time after each step. The remainder could
    // therefore be smaller than in an earlier call. A counter must not decrease, so the largest
    // remainder so far is returned.
    let other = all - requests - finalize - recompress - reclaim;
    let other = control
        .cpu_other_ms
        .fetch_max(other, Ordering::Relaxed)
        .max(other);
    api::DaemonStats {
        version: env!("CARGO_PKG_VERSION").into(),
        pid: i64::from(std::process::id()),
        start_time_seconds: control.start_time_seconds,
        uptime_seconds: int(control.clock.uptime().as_secs()),
        workers: control.workers.count() as i64,
        vms: vms.len() as i64,
        vms_connected: count(|vm| vm.connected.load(Ordering::Acquire)),
        vms_frozen: count(|vm| vm.frozen.load(Ordering::Relaxed)),
        cpu_requests_ms: requests,
        cpu_background_ms: all_background,
        cpu_finalize_ms: finalize,
        cpu_recompress_ms: recompress,
        cpu_reclaim_ms: reclaim,
        cpu_other_ms: other,
        cpu_ms: all,
        resident_bytes: int(usage::resident_bytes()),
        memory_locked: control.engine.is_locked(),
        interrupts_lost: int(notifier::lost_interrupts()),
        memory_bytes: int(memory_bytes),
        memory_resident_bytes: int(resident_bytes),
        memory_saved_bytes: int(memory_bytes) - int(resident_bytes) - int(held_bytes),
        memory_mapped_bytes: int(control.registry.memory_budget().mapped_bytes()),
        memory_budget_bytes: int(control.registry.memory_budget().bytes()),
        memory_regions: int(control.registry.memory_budget().mapped_regions()),
        memory_regions_max: int(control.registry.memory_budget().regions()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromZeros;

    /// Counts in a guest's latency report are limited, so that no overflow occurs when readers of
    /// the statistics add and multiply them.
    #[test]
    fn counts_in_a_latency_report_of_a_guest_are_bounded() {
        let latencies = wire::Latencies {
            get_ns: u64::MAX.into(),
            get: [u64::MAX.into(); 16],
        };
        let told = latency_histogram(&latencies);
        let sum: i64 = told.buckets.iter().sum();
        assert!(sum.checked_mul(100).is_some() && told.sum_ns == i64::MAX);
    }

    #[test]
    fn unknown_file_system_bits_of_a_guest_are_ignored() {
        assert_eq!(file_systems(0x1ffff), "");
        assert_eq!(file_systems((1 << 56) | 0x1ffff), "ext4");
        let all = "ext2, ext3, ext4, xfs, btrfs, f2fs, erofs, vfat, exfat";
        assert_eq!(file_systems(u64::MAX), all);
    }

    /// Bytes that zstd saves must not count as saved by deduplication. Otherwise an operator might
    /// merge trust domains because of a large value, and gain nothing.
    #[test]
    fn zstd_gain_does_not_count_as_deduplication() {
        let mut stats = tmem_pool::EngineStats::default();
        stats.compressed_bytes = 100;
        stats.payload_bytes = 70;
        stats.zstd_saved_bytes = 30;
        assert_eq!(dedup_saved_bytes(&stats), 0);
        stats.payload_bytes = 30;
        assert_eq!(dedup_saved_bytes(&stats), 40);
        // Dropped pages whose storage is not freed yet still count in `payload_bytes`, but in no
        // other value.
        stats.payload_bytes = 90;
        assert_eq!(dedup_saved_bytes(&stats), 0);
    }

    /// A kernel name that a guest reports must be safe to print on a terminal, in a log and in a
    /// metric.
    #[test]
    fn the_kernel_name_of_a_guest_is_sanitized() {
        let mut report = wire::Report::new_zeroed();
        let text = b"6.12\x1b]0;x\x07\n\xc2\x9b1m {}\"\0behind";
        report.kernel[..text.len()].copy_from_slice(text);
        assert_eq!(driver_stats(&report, None).kernel, "6.12?]0;x????1m?{}\"");
        report.kernel = [0xff; 64];
        assert_eq!(driver_stats(&report, None).kernel, "?".repeat(64));
    }
}
