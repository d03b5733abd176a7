// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Table of all statistics: name, kind, unit, metric and meaning of each.
//!
//! The macro [`statistics!`](crate::statistics!) contains the table. Everything else is generated
//! from it:
//!
//! | generated | by |
//! | --- | --- |
//! | counters of the engine, their sums, and its statistics | `tmem-pool/src/stats.rs` |
//! | counters of the daemon for each VM | `tmemd/src/vm/state.rs` |
//! | the answer to `GetStats` | `tmemd/src/control/statistics.rs` |
//! | the interface file and docs/statistics.md | `TMEM_WRITE_DOCS=1 cargo test -p tmem-control` |
//! | the number of series in docs/metrics.md | `TMEM_WRITE_DOCS=1 cargo test -p tmem-exporter` |
//! | the sample screen in docs/tmemctl.md | `TMEM_WRITE_DOCS=1 cargo test -p tmemctl` |
//! | metrics, the output of `tmemctl stats` and `tmemctl top` | the list [`Statistic::all`] |
//!
//! To add a counter, add a row to a block whose name ends with `counters` or `sums`, increment the
//! field of this name where the event occurs, and run the tests that write the documents. The test
//! of tmem-control comes first, because the daemon does not compile before the interface file has
//! the field.

/// Calls the macro `$then` with the table of statistics, after the tokens `$arguments` in braces.
/// Each block of the table contains the statistics of one origin. A statistic of the engine or a
/// counter of `tmemd` is a row `name("unit", EXPORT "metric");`, and a statistic that `tmemd` sets
/// itself is a row `name("type in the interface", KIND, "unit", EXPORT "metric");`. The doc comment
/// of a row is the meaning of the statistic.
///
/// `EXPORT` is a value of [`Export`](crate::statistics::Export); `No` has no metric. The name of a
/// metric has no suffix such as `_total`, and may have a label: `name{key=value}`. If the statistic
/// is a list, `/` separates the values of the label.
#[macro_export]
macro_rules! statistics {
    ($then:ident $($arguments:tt)*) => {
        $then! {
            { $($arguments)* }
            // Values of the pool that the engine determines when the statistics are read.
            pool_gauges {
                /// current limit of the pool's memory, including metadata
                size_bytes("bytes", Exact "tmem_pool_size_bytes");
                /// host memory that the pool uses: frames and metadata (metric: only the unused
                /// parts of frames, `frames_bytes` minus `payload_bytes`)
                held_bytes("bytes", RestInSteps "tmem_pool_memory_bytes{use=gaps}");
                /// memory for stored pages, including unused parts
                frames_bytes("bytes", No);
                /// size of the stored copies, each once. The rest of `frames_bytes` is unused: gaps
                /// between the copies
                payload_bytes("bytes", Steps "tmem_pool_memory_bytes{use=payload}");
                /// memory for keys, tables and records; an upper estimate
                metadata_bytes("bytes", Steps "tmem_pool_memory_bytes{use=metadata}");
                /// sum of the charges of all VMs
                charged_bytes("bytes", Exact "tmem_pool_charged_bytes");
                /// sum of the reserves of all VMs. A reserve that is larger than the VM's limit
                /// counts as the limit
                reserved_bytes("bytes", Exact "tmem_pool_reserved_bytes");
                /// VMs that have a place in the pool
                tenants("VMs", No);
                /// pages of all VMs in the pool (metric: those that are in no other form)
                pages("pages", Rest "tmem_pool_pages{form=stored}");
                /// uncompressed size of all pages, 4,096 B each
                original_bytes("bytes", Exact "tmem_pool_original_bytes");
                /// compressed size of all pages; a shared page counts in full for each VM
                compressed_bytes("bytes", Exact "tmem_pool_compressed_bytes");
                /// pages in the nursery: accepted and not finalized yet
                nursery_pages("pages", Exact "tmem_pool_pages{form=nursery}");
                /// pages that are stored as a pattern of four bytes
                same_filled_pages("pages", Exact "tmem_pool_pages{form=same_filled}");
                /// pages that need no copy of their own because an equal page is stored
                shared_pages("pages", Steps "tmem_pool_pages{form=shared}");
                /// pages that guests have in their page caches, too: a get returned them and left
                /// them in the pool, and no REF followed
                retained_pages("pages", Exact "tmem_pool_retained_pages");
                /// pages that are dropped and not freed yet, including those of removed VMs
                detached_pages("pages", Exact "tmem_pool_detached_pages");
                /// stored copies of pages
                blobs("copies", Steps "tmem_pool_blobs");
                /// bytes that zstd saves for the copies that are stored now
                zstd_saved_bytes("bytes", Steps "tmem_pool_zstd_saved_bytes");
            }
            // Values of the pool that `tmemd` sets itself.
            pool {
                /// limit of the pool's memory while the host has enough memory
                configured_bytes("int", Gauge, "bytes", Exact "tmem_pool_configured_bytes");
                /// memory that the host has available, as the daemon last read it: `MemAvailable`
                /// and `host_arc_bytes`. 0 if the daemon does not watch it
                host_available_bytes("int", Gauge, "bytes", Exact "tmem_pool_host_available_bytes");
                /// part of `host_available_bytes` that ZFS's ARC can release: its size without its
                /// minimum size
                host_arc_bytes("int", Gauge, "bytes", Exact "tmem_pool_host_arc_bytes");
                /// free swap of the host, as the daemon last read it. 0 if the daemon does not watch
                /// the host's memory
                host_swap_free_bytes("int", Gauge, "bytes", Exact "tmem_pool_host_swap_free_bytes");
                /// steps by which the pool shrank for the host or for a VM that started (metric:
                /// only those that `host_shrinks_stalls` does not count)
                host_shrinks("int", Counter, "steps", Rest "tmem_pool_host_shrinks{cause=memory}");
                /// part of `host_shrinks` whose reason was that tasks waited for memory (PSI),
                /// although the host had `host_free_min` available
                host_shrinks_stalls(
                    "int", Counter, "steps",
                    Exact "tmem_pool_host_shrinks{cause=stalls}"
                );
                /// steps by which the pool grew again towards its configured size
                host_grows("int", Counter, "steps", Exact "tmem_pool_host_grows");
                /// `original_bytes` minus `held_bytes`: host RAM saved. Guests would need
                /// `original_bytes` for the same hits, and the pool uses `held_bytes`. Below 0
                /// while the pool is nearly empty
                saved_bytes("int", Gauge, "bytes", Steps "tmem_pool_saved_bytes");
                /// `compressed_bytes` minus `payload_bytes` and `zstd_saved_bytes`: memory that is
                /// saved because equal pages are stored once
                dedup_saved_bytes("int", Gauge, "bytes", Steps "tmem_pool_dedup_saved_bytes");
            }
            // Events that the engine counts for the whole pool.
            pool_counters {
                /// copies that compaction moved together to release the memory between them
                moved_blobs("copies", Exact "tmem_pool_moved_blobs");
                /// cold copies that were compressed again with zstd
                recompressed_blobs("copies", Exact "tmem_pool_recompressed_blobs");
                /// bytes by which zstd made cold copies smaller
                recompressed_saved_bytes("bytes", Exact "tmem_pool_recompressed_saved_bytes");
            }
            // Values of a VM that `tmemd` sets itself.
            vm {
                /// name of the VM; the label `vm` of its metrics
                name("string", Text, "", No);
                /// UUID of the libvirt domain; the label `uuid` of `tmem_vm_info`
                uuid("?string", Text, "", No);
                /// trust domain of the VM; the label `trust_domain` of `tmem_vm_info`
                trust_domain("?string", Text, "", No);
                /// memory to which the VM is entitled before others share the rest
                reserve_bytes("int", Gauge, "bytes", Exact "tmem_vm_reserve_bytes");
                /// limit of `charged_bytes`; none if only the pool limits the VM
                limit_bytes("?int", Gauge, "bytes", Exact "tmem_vm_limit_bytes");
                /// share of the VM in memory that is not reserved
                weight("int", Gauge, "", Exact "tmem_vm_weight");
                /// whether the VM's VMM is connected (metric: 1 or 0)
                connected("bool", Gauge, "", Exact "tmem_vm_connected");
                /// whether the VM's puts are refused, see `tmemctl freeze` (metric: 1 or 0)
                frozen("bool", Gauge, "", Exact "tmem_vm_frozen");
            }
            // Values of a VM that the engine determines when the statistics are read.
            tenant_gauges {
                /// pages of the VM in the pool, of 4,096 B each (metric: those that are in no other
                /// form)
                pages("pages", Rest "tmem_vm_pages{form=stored}");
                /// bytes that count against the VM's quota: compressed size and 320 B for each
                /// page, shared or not; 4,096 B and 320 B for a page in the nursery
                charged_bytes("bytes", Exact "tmem_vm_charged_bytes");
                /// entitlement of the VM in the pool's current size: its reserve and a share by
                /// weight, up to its limit. The VM may use more while others leave it unused
                entitled_bytes("bytes", Exact "tmem_vm_entitled_bytes");
                /// uncompressed size of the VM's pages, 4,096 B each
                original_bytes("bytes", Exact "tmem_vm_original_bytes");
                /// compressed size of the VM's pages; a shared page counts in full
                compressed_bytes("bytes", Exact "tmem_vm_compressed_bytes");
                /// pages in the nursery: accepted and not finalized yet
                nursery_pages("pages", Exact "tmem_vm_pages{form=nursery}");
                /// limit of `nursery_pages` now; further puts are refused. It is higher while the
                /// VM has not used its entitlement, or while memory of the pool is free
                nursery_pages_max("pages", Exact "tmem_vm_nursery_limit_pages");
                /// pages that are stored as a pattern of four bytes
                same_filled_pages("pages", Exact "tmem_vm_pages{form=same_filled}");
                /// pages that were found equal to a stored page of the trust domain
                shared_pages("pages", No);
                /// part of `pages` that the guest has in its page cache, too: a get returned them
                /// and left them in the pool, and no REF followed. They are evicted before other
                /// pages of the VM
                retained_pages("pages", Exact "tmem_vm_retained_pages");
                /// pages that are dropped and not freed yet
                detached_pages("pages", Exact "tmem_vm_detached_pages");
            }
            // Events that the engine counts for each VM. The second metric is that of the sum over
            // all VMs, which is a statistic of the pool.
            tenant_counters_with_sums {
                /// pages that the guest put, including refused ones. The pool's value does not
                /// include `refused_frozen`
                puts("pages", Exact "tmem_vm_put_pages", Exact "tmem_pool_put_pages");
                /// refused puts: the sum of the values by reason, and pages in guest memory that
                /// was lost. The pool's value does not include `refused_frozen`
                puts_refused("pages", No, Exact "tmem_pool_put_refused_pages");
                /// pages that the guest requested
                gets("pages", Exact "tmem_vm_get_pages", Exact "tmem_pool_get_pages");
                /// requested pages that were returned; the guest did not read them from its disk
                hits("pages", Exact "tmem_vm_hit_pages", Exact "tmem_pool_hit_pages");
                /// part of `hits` that left the page in the pool. 0 unless QEMU and the driver use
                /// VIRTIO_TMEM_F_RETAIN
                retained_hits(
                    "pages",
                    Exact "tmem_vm_retained_hit_pages",
                    Exact "tmem_pool_retained_hit_pages"
                );
                /// pages that the guest evicted and named in REF requests instead of putting a copy
                refs("pages", Exact "tmem_vm_ref_pages", Exact "tmem_pool_ref_pages");
                /// part of `refs` whose page the pool no longer had. The guest reads these pages
                /// from its disk. A driver should put copies instead of sending REF requests while
                /// more than 1/16 of the last 1,024 pages that it named in them were gone
                refs_gone(
                    "pages",
                    Exact "tmem_vm_ref_gone_pages",
                    Exact "tmem_pool_ref_gone_pages"
                );
                /// pages that were evicted: the sum of the values by cause
                evictions("pages", No, No);
                /// pages that were evicted because the VM reached its limit
                evictions_limit(
                    "pages",
                    Exact "tmem_vm_evicted_pages{cause=limit}",
                    Exact "tmem_pool_evicted_pages{cause=limit}"
                );
                /// pages that were evicted because the pool was full or nearly full and the VM was
                /// furthest above its entitlement
                evictions_pool(
                    "pages",
                    Exact "tmem_vm_evicted_pages{cause=pool}",
                    Exact "tmem_pool_evicted_pages{cause=pool}"
                );
                /// pages that were evicted because the pool was made smaller, by an operator or for
                /// the host
                evictions_shrink(
                    "pages",
                    Exact "tmem_vm_evicted_pages{cause=shrink}",
                    Exact "tmem_pool_evicted_pages{cause=shrink}"
                );
                /// part of `evictions` that hit retained pages, for any cause
                evictions_retained(
                    "pages",
                    Exact "tmem_vm_evicted_retained_pages",
                    Exact "tmem_pool_evicted_retained_pages"
                );
                /// pages that were dropped because the guest changed or removed them, a connection
                /// ended, or by `tmemctl flush`
                flushed_pages(
                    "pages",
                    Exact "tmem_vm_flushed_pages",
                    Exact "tmem_pool_flushed_pages"
                );
                /// pages that were not returned because their bytes failed the check. Must be 0;
                /// otherwise the host's memory or the engine is faulty
                hash_mismatches(
                    "pages",
                    Exact "tmem_vm_hash_mismatch_pages",
                    Exact "tmem_pool_hash_mismatch_pages"
                );
            }
            // Events that the engine counts for each VM.
            tenant_counters {
                /// pages that a put of the same key replaced
                replaced_pages("pages", Exact "tmem_vm_replaced_pages");
                /// misses of pages that were in the pool with another cookie than the requested one
                cookie_mismatches("pages", Exact "tmem_vm_cookie_mismatch_pages");
                /// puts refused because too many pages waited in the nursery: the guest puts faster
                /// than the host compresses (see `background_threads` in configuration.md), and
                /// neither the VM's entitlement nor the pool has free memory for waiting pages
                refused_nursery("pages", Exact "tmem_vm_put_refused_pages{reason=nursery}");
                /// puts refused because the pool was full and no page could be evicted within the
                /// time of a put
                refused_pool("pages", Exact "tmem_vm_put_refused_pages{reason=pool}");
                /// puts refused because the VM was above its limit, after the limit was lowered far
                refused_limit("pages", Exact "tmem_vm_put_refused_pages{reason=limit}");
                /// puts refused because the VM had the maximum number of pages, or there was no
                /// memory for another index entry
                refused_keys("pages", Exact "tmem_vm_put_refused_pages{reason=keys}");
                /// pages that were finalized as a pattern
                finalized_same_filled("pages", Exact "tmem_vm_finalized_same_filled_pages");
                /// pages that were finalized as a share of an equal page
                finalized_shared("pages", No);
                /// pages that were finalized by compression
                finalized_compressed("pages", No);
                /// pages that were finalized uncompressed, because they compress to more than 3,772
                /// B
                finalized_raw("pages", No);
            }
            // Events that `tmemd` counts for each VM.
            vm_counters {
                /// puts refused because the VM is frozen
                refused_frozen("pages", Exact "tmem_vm_put_refused_pages{reason=frozen}");
                /// accepted connections. If there are more than a few, the VMM or the daemon
                /// restarts repeatedly
                connections("", Exact "tmem_vm_connections");
                /// refused connections: the VM had one already, or the peer's user was not allowed
                connections_refused("", Exact "tmem_vm_connections_refused");
                /// virtqueues that were stopped for a fault of the guest or the VMM; the log has
                /// the reason
                queues_stopped("", Exact "tmem_vm_queues_stopped");
                /// descriptor chains that were answered
                requests("requests", Exact "tmem_vm_requests");
                /// requests with the generation of an earlier connection
                requests_stale("requests", Exact "tmem_vm_requests_stale");
                /// requests with a shape that the guest driver never sends
                requests_bad("requests", Exact "tmem_vm_requests_bad");
                /// pages that were refused, missed or gone because the VM's memory was about to
                /// change (pause, migration, reset)
                drain_cut_pages("pages", Exact "tmem_vm_drain_cut_pages");
                /// pages that were refused, missed or gone because the VM exceeded
                /// `vm_pages_per_second`
                limited_pages("pages", Exact "tmem_vm_limited_pages");
            }
            // Times that `tmemd` measures for each VM.
            vm_latencies {
                /// time of PUT requests, of up to 64 pages each, from the moment when a worker
                /// takes the request until the answer is in the used ring. The wait for a worker is
                /// in `wait_latency`
                put_latency("ns, requests", Exact "tmem_vm_request_duration_seconds{request=put}");
                /// time of GET requests, measured as `put_latency`
                get_latency("ns, requests", Exact "tmem_vm_request_duration_seconds{request=get}");
                /// time of FLUSH requests, measured as `put_latency`. For a request that takes
                /// several scheduling slices, only the last slice counts
                flush_latency(
                    "ns, requests",
                    Exact "tmem_vm_request_duration_seconds{request=flush}"
                );
                /// time of REF requests, measured as `put_latency`
                ref_latency("ns, requests", Exact "tmem_vm_request_duration_seconds{request=ref}");
                /// wait of the VM's queues for a worker, from the moment when the worker sees their
                /// work until the scheduling slice begins. A slice answers requests for up to a
                /// few hundred pages
                wait_latency("ns, slices", Exact "tmem_vm_slice_wait_seconds");
            }
            // Values of a VM that `tmemd` computes from others, or sets itself.
            vm_derived {
                /// `original_bytes` minus `charged_bytes`: memory that the guest would need itself
                /// for these pages, minus their charge. Below 0 while most pages are new
                saved_bytes("int", Gauge, "bytes", Exact "tmem_vm_saved_bytes");
                /// all other pages: compressed, or raw if they do not compress
                stored_pages("int", Gauge, "pages", No);
                /// requested pages that were not returned: `gets` minus `hits`
                misses("int", Counter, "pages", No);
                /// hits in bytes, 4,096 B each: data that the guest did not read from its disk. The
                /// disk's own counters may differ because of readahead
                disk_read_avoided_bytes(
                    "int", Counter, "bytes",
                    Exact "tmem_vm_disk_read_avoided_bytes"
                );
                /// estimate: misses that would have been hits with 25, 50 and 100 % more memory.
                /// Each of the three values includes the one before it (metric: the difference from
                /// that value)
                gain_hits(
                    "[]int", Counter, "pages",
                    Ranges "tmem_vm_gain_hit_pages{more_percent=0-25/25-50/50-100}"
                );
                /// estimate: hits that would have been misses with 25, 50 and 75 % less memory than
                /// the VM held. Each of the three values includes the one before it (metric: the
                /// difference from that value)
                loss_hits(
                    "[]int", Counter, "pages",
                    Ranges "tmem_vm_loss_hit_pages{less_percent=0-25/25-50/50-75}"
                );
                /// estimate: all hits, scaled up from the sampled hits that the estimator examined
                /// for `loss_hits` (metric: the hits that the VM would still have had with 75 %
                /// less memory)
                loss_hits_seen(
                    "int", Counter, "pages",
                    Rest "tmem_vm_loss_hit_pages{less_percent=75-100}"
                );
                /// time of workers at the VM's requests, by the clock. It includes waits for a
                /// processor, and for guest memory that the host has swapped out, so the sum over
                /// all VMs may exceed `cpu_requests_ms` of the daemon. It does not include
                /// background work
                cpu_requests_ms("int", Counter, "ms", Exact "tmem_vm_cpu_seconds");
                /// address space in which the daemon has mapped the VM's memory, including memory
                /// that waits to be unmapped
                memory_mapped_bytes("int", Gauge, "bytes", Exact "tmem_vm_memory_mapped_bytes");
                /// size of the VM's memory as its VMM shares it with the daemon; 0 if the VM is not
                /// connected
                memory_bytes("int", Gauge, "bytes", Exact "tmem_vm_memory_bytes");
                /// part of `memory_bytes` that the host has allocated, in RAM or swap. The rest was
                /// never used, or the guest has returned it. None if the VM is not connected, or if
                /// its memory consists of more than 4 files
                memory_resident_bytes(
                    "?int", Gauge, "bytes",
                    Exact "tmem_vm_memory_resident_bytes"
                );
                /// maximum size of the VM's memory: `memory_max`, or what libvirt's hook says. The
                /// daemon refuses a VM with more memory
                memory_max_bytes("int", Gauge, "bytes", Exact "tmem_vm_memory_max_bytes");
                /// last report of the guest driver on this connection, if there is one; see the
                /// next table
                driver("?DriverReport", Text, "", No);
            }
            // Values of the report that a guest's driver sends.
            driver {
                /// version of the module
                version("string", Text, "", No);
                /// off, on, offline (no daemon), tripped (late answers, tries again) or poisoned (a
                /// mismatch: off until the module is loaded again); metric: 1 for the current
                /// state, `none` without a report
                state("string", Text, "", Exact "tmem_vm_driver_state");
                /// kernel release of the guest
                kernel("string", Text, "", No);
                /// bit mask of the driver's live hooks in the kernel
                hooks("int", Text, "", No);
                /// types of file systems that the driver serves; empty before it knows the first
                /// one, and from older drivers
                file_systems("string", Text, "", No);
                /// memory of the guest that the driver uses
                memory_bytes("int", Gauge, "bytes", Exact "tmem_vm_driver_memory_bytes");
                /// pages that the driver's index lists as stored in the pool
                index_pages("int", Gauge, "pages", Exact "tmem_vm_driver_index_pages");
                /// pages that the driver sent
                puts("int", Counter, "pages", Exact "tmem_vm_driver_put_pages");
                /// pages that the driver did not send, because its ring was full or it had no
                /// memory
                puts_dropped("int", Counter, "pages", Exact "tmem_vm_driver_put_dropped_pages");
                /// pages that the driver looked up in its ring or requested from the host
                gets("int", Counter, "pages", Exact "tmem_vm_driver_get_pages");
                /// pages from the ring or the host that the guest used
                hits("int", Counter, "pages", Exact "tmem_vm_driver_hit_pages");
                /// answers after the driver's deadline, for which the guest did not wait
                late("int", Counter, "requests", Exact "tmem_vm_driver_late_requests");
                /// pages that differed from the page that the driver put. Must be 0
                mismatches("int", Counter, "pages", Exact "tmem_vm_driver_mismatch_pages");
                /// pages that the driver erased from its index, for any reason
                invalidations("int", Counter, "pages", Exact "tmem_vm_driver_invalidated_pages");
                /// GET requests since the module was loaded, by the time that their reader waited:
                /// from the request to the answer or the deadline, by the guest's clock. The driver
                /// sends it if QEMU offers VIRTIO_TMEM_F_LATENCIES. Older drivers do not send it
                get_latency(
                    "?Histogram", Histogram, "ns, requests",
                    Exact "tmem_vm_driver_get_duration_seconds"
                );
            }
            // Values of the daemon, which `tmemd` sets itself.
            daemon {
                /// version of tmemd; the label `version` of `tmem_daemon_build_info`
                version("string", Text, "", No);
                /// process ID of tmemd
                pid("int", Text, "", No);
                /// Unix time of the daemon's start
                start_time_seconds("int", Gauge, "seconds", Exact "tmem_daemon_start_time_seconds");
                /// time since the daemon's start
                uptime_seconds("int", Gauge, "seconds", No);
                /// threads that answer requests
                workers("int", Gauge, "threads", Exact "tmem_daemon_workers");
                /// VMs for which the daemon has a socket
                vms("int", Gauge, "VMs", Exact "tmem_daemon_vms");
                /// VMs that are connected
                vms_connected("int", Gauge, "VMs", No);
                /// VMs that are frozen
                vms_frozen("int", Gauge, "VMs", No);
                /// processor time of requests: copying in, decompressing, copying out, freeing
                cpu_requests_ms(
                    "int", Counter, "ms",
                    Exact "tmem_daemon_cpu_seconds{stage=requests}"
                );
                /// processor time of background work: finding equal pages, compression, compaction,
                /// recompression. The next three values are parts of it
                cpu_background_ms("int", Counter, "ms", No);
                /// part of `cpu_background_ms` for new pages: finding equal pages, lz4. Background
                /// workers add their time to this value and the next two after each step of about
                /// 1,024 pages. The time that these three values do not count is spent on waking
                /// threads up and on unmapping the memory of VMs
                cpu_finalize_ms(
                    "int", Counter, "ms",
                    Exact "tmem_daemon_cpu_seconds{stage=finalize}"
                );
                /// part of `cpu_background_ms` for cold pages: finding them, zstd
                cpu_recompress_ms(
                    "int", Counter, "ms",
                    Exact "tmem_daemon_cpu_seconds{stage=recompress}"
                );
                /// part of `cpu_background_ms` for releasing memory: eviction, freeing of dropped
                /// pages, compaction, returning memory to the host
                cpu_reclaim_ms(
                    "int", Counter, "ms",
                    Exact "tmem_daemon_cpu_seconds{stage=reclaim}"
                );
                /// processor time that no other stage counts: connections, control, waking
                /// background threads up, and unmapping the memory of VMs. It is `cpu_ms` minus the
                /// other stages at the time when that difference was largest, because a counter
                /// must not shrink. So the sum of all stages may exceed `cpu_ms` by some ms
                cpu_other_ms("int", Counter, "ms", Exact "tmem_daemon_cpu_seconds{stage=other}");
                /// processor time of the process: the sum of all stages
                cpu_ms("int", Counter, "ms", No);
                /// resident memory of the process without mapped guest memory: the pool and the
                /// daemon's own memory
                resident_bytes("int", Gauge, "bytes", Steps "tmem_daemon_resident_bytes");
                /// whether all memory of the pool is locked, so that pages of guests are never
                /// swapped by the host (metric: 1 or 0)
                memory_locked("bool", Gauge, "", Exact "tmem_daemon_memory_locked");
                /// interrupts that the kernel refused to deliver to a guest or its VMM. The log
                /// names them, and the guest continues at its deadline. Must be 0
                interrupts_lost("int", Counter, "interrupts", Exact "tmem_daemon_interrupts_lost");
                /// sum of `memory_bytes` of the VMs that have a `memory_resident_bytes`
                memory_bytes("int", Gauge, "bytes", Exact "tmem_daemon_memory_bytes");
                /// sum of `memory_resident_bytes` of all VMs
                memory_resident_bytes(
                    "int", Gauge, "bytes",
                    Exact "tmem_daemon_memory_resident_bytes"
                );
                /// `memory_bytes` minus `memory_resident_bytes` and the `held_bytes` of the pool:
                /// host RAM that the VMs leave free, after what the pool uses. Below 0 if the pool
                /// uses more than the VMs have returned
                memory_saved_bytes(
                    "int", Gauge, "bytes",
                    Exact "tmem_daemon_memory_saved_bytes"
                );
                /// address space in which the daemon has mapped the memory of all VMs
                memory_mapped_bytes("int", Gauge, "bytes", Exact "tmem_daemon_memory_mapped_bytes");
                /// limit of `memory_mapped_bytes`. The daemon refuses VMs whose memory does not
                /// fit
                memory_budget_bytes("int", Gauge, "bytes", Exact "tmem_daemon_memory_budget_bytes");
                /// regions of memory (memory slots) that the daemon has mapped for all VMs,
                /// including those that wait to be unmapped
                memory_regions("int", Gauge, "regions", Exact "tmem_daemon_memory_regions");
                /// limit of `memory_regions`: `vm.max_map_count` minus 8,192. The daemon refuses
                /// VMs whose regions do not fit
                memory_regions_max("int", Gauge, "regions", Exact "tmem_daemon_memory_regions_max");
            }
        }
    };
}

/// Type in the control interface that contains a statistic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// The statistic is a field of type `DaemonStats`: it describes the daemon.
    Daemon,
    /// The statistic is a field of type `PoolStats`: it describes the pool.
    Pool,
    /// The statistic is a field of type `VmStats`: it describes one VM.
    Vm,
    /// The statistic is a field of type `DriverReport`: a guest's driver reports it.
    Driver,
}

/// Kind of a statistic, which determines the type of its metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The statistic is a current value, which goes up and down.
    Gauge,
    /// The statistic is a sum that only grows while the daemon runs.
    Counter,
    /// The statistic has the number of requests in each range of durations, and the sum of the
    /// durations.
    Histogram,
    /// The statistic is a text, not a number.
    Text,
}

/// How precisely the exporter may show a statistic as a metric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Export {
    /// No metric shows the statistic.
    No,
    /// The metric shows the exact value of the statistic.
    Exact,
    /// The metric shows the value rounded down to a large step. An exact value could reveal which
    /// pages VMs have in common.
    Steps,
    /// The metric shows the part of the value that no other statistic of the metric counts, so that
    /// the metric's series can be added. The exporter subtracts the other statistics as it exports
    /// them, exact or rounded.
    Rest,
    /// The metric shows what `Rest` shows, but the value is first rounded down to a large step.
    RestInSteps,
    /// The statistic is a list in which each value includes the value before it. The metric shows
    /// the differences, so that its series can be added.
    Ranges,
}

/// Description of one statistic.
#[derive(Clone, Copy, Debug)]
pub struct Statistic {
    /// Type of the control interface that contains the statistic.
    pub scope: Scope,
    /// Name of the statistic, which is the name of the field in the control interface.
    pub field: &'static str,
    /// Type of the field in the control interface, such as `int`.
    pub field_type: &'static str,
    /// Name of the metric without suffixes such as `_total`, or with a label: `name{key=value}`.
    /// Empty if no metric shows the statistic.
    pub metric: &'static str,
    /// How precisely the metric may show the statistic.
    pub export: Export,
    /// Kind of the statistic, which determines the type of the metric.
    pub kind: Kind,
    /// Unit of the statistic in the control interface. The metric uses a base unit instead, such as
    /// seconds.
    pub unit: &'static str,
    /// Meaning of the statistic, in words.
    pub meaning: &'static str,
}

/// Creates a [`Statistic`].
macro_rules! statistic {
    (
        $scope:ident $name:ident $type:literal $kind:ident $unit:literal
        $export:ident [$($metric:literal)?] $meaning:expr
    ) => {
        Statistic {
            scope: Scope::$scope,
            field: stringify!($name),
            field_type: $type,
            metric: concat!($($metric)?),
            export: Export::$export,
            kind: Kind::$kind,
            unit: $unit,
            meaning: $meaning.trim_ascii_start(),
        }
    };
}

/// Creates the list of the statistics of one block of the table. The first rules give the scope and
/// the kind of the rows of each block.
macro_rules! block {
    (pool_gauges $rows:tt) => { block!(Pool Gauge "int" $rows) };
    (pool $rows:tt) => { block!(Pool $rows) };
    (pool_counters $rows:tt) => { block!(Pool Counter "int" $rows) };
    (vm $rows:tt) => { block!(Vm $rows) };
    (tenant_gauges $rows:tt) => { block!(Vm Gauge "int" $rows) };
    (tenant_counters $rows:tt) => { block!(Vm Counter "int" $rows) };
    (vm_counters $rows:tt) => { block!(Vm Counter "int" $rows) };
    (vm_latencies $rows:tt) => { block!(Vm Histogram "Histogram" $rows) };
    (vm_derived $rows:tt) => { block!(Vm $rows) };
    (driver $rows:tt) => { block!(Driver $rows) };
    (daemon $rows:tt) => { block!(Daemon $rows) };
    (tenant_counters_with_sums { $(
        $(#[doc = $meaning:literal])*
        $name:ident(
            $unit:literal,
            $export:ident $($metric:literal)?,
            $sum_export:ident $($sum_metric:literal)?
        );
    )* }) => {
        &[
            $(statistic!(
                Vm $name "int" Counter $unit $export [$($metric)?] concat!($($meaning),*)
            ),)*
            $(statistic!(
                Pool $name "int" Counter $unit $sum_export [$($sum_metric)?]
                concat!("sum over all VMs, including removed ones:" $(, $meaning)*)
            ),)*
        ]
    };
    ($scope:ident { $(
        $(#[doc = $meaning:literal])*
        $name:ident($type:literal, $kind:ident, $unit:literal, $export:ident $($metric:literal)?);
    )* }) => {
        &[$(statistic!(
            $scope $name $type $kind $unit $export [$($metric)?] concat!($($meaning),*)
        )),*]
    };
    ($scope:ident $kind:ident $type:literal { $(
        $(#[doc = $meaning:literal])*
        $name:ident($unit:literal, $export:ident $($metric:literal)?);
    )* }) => {
        &[$(statistic!(
            $scope $name $type $kind $unit $export [$($metric)?] concat!($($meaning),*)
        )),*]
    };
}

macro_rules! blocks {
    ({} $($block:ident $rows:tt)*) => {
        &[$(block!($block $rows)),*]
    };
}

/// The statistics of each block of the table.
const BLOCKS: &[&[Statistic]] = statistics!(blocks);

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
    /// Returns all statistics.
    pub fn all() -> impl Iterator<Item = &'static Statistic> {
        BLOCKS.iter().copied().flatten()
    }

    /// Returns the statistics of one type of the control interface, in the order of its fields.
    pub fn in_scope(scope: Scope) -> impl Iterator<Item = &'static Statistic> {
        Statistic::all().filter(move |row| row.scope == scope)
    }

    /// Returns the name of the statistic's metric without suffixes, and the key and values of its
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

    #[test]
    fn metric_names_follow_prometheus_conventions() {
        for row in Statistic::all() {
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
}
