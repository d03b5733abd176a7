// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Statistics of the engine. A gauge is a current value. A counter only grows.
//!
//! The fields are the rows of the table [`tmem_trace::statistics!`], except for those that the
//! control interface does not have, or has in another form.

use crate::config::Quota;
use crate::totals::Sum;

/// Declares the counters and the statistics of the engine.
macro_rules! declare {
    (
        {}
        pool_gauges { $($(#[$pool_gauge_doc:meta])* $pool_gauge:ident $pool_gauge_row:tt;)* }
        pool $pool:tt
        pool_counters { $($(#[$event_doc:meta])* $event:ident $event_row:tt;)* }
        vm $vm:tt
        tenant_gauges { $($(#[$gauge_doc:meta])* $gauge:ident $gauge_row:tt;)* }
        tenant_counters_with_sums { $($(#[$sum_doc:meta])* $sum:ident $sum_row:tt;)* }
        tenant_counters { $($(#[$counter_doc:meta])* $counter:ident $counter_row:tt;)* }
        $($other:ident $other_rows:tt)*
    ) => {
        /// Statistics of one tenant. Gauges count only pages that the tenant can still get, except
        /// for `detached_pages`, which counts dropped pages that still occupy memory.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct TenantStats {
            $($(#[$gauge_doc])* pub $gauge: u64,)*
            $($(#[$sum_doc])* pub $sum: u64,)*
            $($(#[$counter_doc])* pub $counter: u64,)*
            /// Counter, pages, approximate: misses that would have been hits with more memory than
            /// the tenant used, one counter for each percentage of
            /// [`GAIN_PERCENT`](tmem_trace::estimate::GAIN_PERCENT).
            pub gain_hits: [u64; 3],
            /// Counter, pages, approximate: hits that would have been misses with less memory than
            /// the tenant used, one counter for each percentage of
            /// [`LOSS_PERCENT`](tmem_trace::estimate::LOSS_PERCENT).
            pub loss_hits: [u64; 3],
            /// Counter, pages, approximate: estimated number of all hits, extrapolated from the
            /// hits that the estimator examined for `loss_hits`. A value of `loss_hits` divided by
            /// this number is the share of hits that would be lost with less memory.
            pub loss_hits_seen: u64,
            /// Counter, keys: number of times that a request visited a sampled key for the
            /// estimates `gain_hits` and `loss_hits`. It measures work, for callers that bound
            /// their work.
            pub gain_steps: u64,
            /// Gauge, pools: live pools of the tenant.
            pub pools: u64,
            /// Gauge, bytes: reserve of the tenant's quota.
            pub reserve_bytes: u64,
            /// Gauge, bytes: limit of the tenant's quota. With None, the tenant has no limit of its
            /// own.
            pub limit_bytes: Option<u64>,
            /// Gauge, without unit: weight of the tenant's quota.
            pub weight: u32,
        }

        /// Statistics of an engine and of its pool, the memory for all tenants.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        #[non_exhaustive]
        pub struct EngineStats {
            $($(#[$pool_gauge_doc])* pub $pool_gauge: u64,)*
            $($(#[$event_doc])* pub $event: u64,)*
            $($(#[$sum_doc])* pub $sum: u64,)*
            /// Gauge, bytes: the part of `metadata_bytes` that never shrinks. It consists of the
            /// heap's records of stored copies and of spans (groups of memory frames), and of the
            /// numbers of free records.
            pub tables_bytes: u64,
            /// Gauge, tenants: tenants that were removed and whose pages are not all freed yet.
            pub removed_tenants: u64,
        }

        /// Counters of one tenant, which the tenant's lock guards.
        #[derive(Clone, Copy, Debug, Default)]
        pub(crate) struct Counters {
            $(pub $sum: u64,)*
            $(pub $counter: u64,)*
        }

        impl Counters {
            /// Adds the counters of a removed tenant to these sums, which include all removed
            /// tenants.
            pub(crate) fn add(&mut self, other: Counters) {
                $(self.$sum += other.$sum;)*
                $(self.$counter += other.$counter;)*
            }
        }

        impl From<Counters> for TenantStats {
            /// Returns statistics with these counters, in which all other fields are zero.
            fn from(counters: Counters) -> TenantStats {
                TenantStats {
                    $($sum: counters.$sum,)*
                    $($counter: counters.$counter,)*
                    ..TenantStats::default()
                }
            }
        }

        impl EngineStats {
            pub(crate) fn add_counters(&mut self, counters: Counters) {
                $(self.$sum += counters.$sum;)*
            }
        }

        /// Counters of the whole pool, which any thread may change without a lock.
        #[derive(Debug, Default)]
        pub(crate) struct PoolCounters {
            $(pub $event: Sum,)*
        }

        impl From<&PoolCounters> for EngineStats {
            /// Returns statistics with these counters, in which all other fields are zero.
            fn from(counters: &PoolCounters) -> EngineStats {
                EngineStats {
                    $($event: counters.$event.get(),)*
                    ..EngineStats::default()
                }
            }
        }
    };
}

tmem_trace::statistics!(declare);

impl TenantStats {
    pub(crate) fn set_quota(&mut self, quota: Quota) {
        self.reserve_bytes = quota.reserve_bytes;
        self.limit_bytes = quota.limit_bytes;
        self.weight = quota.weight;
    }
}
