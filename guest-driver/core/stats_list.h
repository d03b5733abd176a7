/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Counters, in the order of enum tmem_stat. A file that includes this one defines TMEM_STAT()
 * before. To add a counter, add a line here and call tmem_count().
 */

/*
 * The counters from here to retained_changed are of evicted pages of regular files of served file
 * systems. The hooks count a page once: as accepted into the put ring, or by the reason why it was
 * not accepted. A page that a function without a hook frees has no counter. stats.h sums up the
 * first four groups, so their order matters.
 *
 * refs: eligible pages that the host had retained and that had not changed. The driver sends a
 * reference (REF) for them and no copy.
 */
TMEM_STAT(refs)

/* Eligible pages that were accepted into the put ring. */
TMEM_STAT(puts)

/* Eligible pages that the put ring did not accept, and that are therefore lost, by reason. */
TMEM_STAT(puts_dropped_pool)
TMEM_STAT(puts_dropped_ring_full)
TMEM_STAT(puts_dropped_index_full)
TMEM_STAT(puts_dropped_nomem)
TMEM_STAT(puts_dropped_cookies)

/*
 * Pages that the put ring accepted and that were lost afterwards, other than by the host's
 * eviction.
 */
TMEM_STAT(puts_refused)
TMEM_STAT(puts_unanswered)
TMEM_STAT(index_evicted)

/*
 * Evicted pages that are not eligible: the cache is off for them, a rule or a policy excludes them,
 * or they have a memory error.
 */
TMEM_STAT(puts_dropped_offline)
TMEM_STAT(puts_dropped_policy)
TMEM_STAT(puts_dropped_memory_error)
TMEM_STAT(puts_skipped_admission)
TMEM_STAT(puts_skipped_offline)
TMEM_STAT(puts_skipped_inode)
TMEM_STAT(puts_skipped_metadata)
TMEM_STAT(puts_skipped_folio)
TMEM_STAT(puts_skipped_off)
TMEM_STAT(puts_skipped_block)
TMEM_STAT(retained_changed)

/* Pages that the put ring accepted and the host stored. */
TMEM_STAT(puts_stored)

/*
 * Pages that refs counts, by the result of their REF request, in this order: the host answered
 * HELD; it answered GONE; neither of these answers came; the REF was not sent; no REF was needed,
 * because the put of the page had not been sent, or the page was invalidated before the answer.
 */
TMEM_STAT(refs_held)
TMEM_STAT(refs_gone)
TMEM_STAT(refs_unanswered)
TMEM_STAT(refs_dropped)
TMEM_STAT(refs_unneeded)

/*
 * retained_hits: pages that gets returned and the host retained. retained_evicted: entries of
 * retained pages that a full or nearly full index erased.
 */
TMEM_STAT(retained_hits)
TMEM_STAT(retained_evicted)

/*
 * Pages that fetches wanted, and their results. The counter hits includes ring_hits.
 */
TMEM_STAT(gets)
TMEM_STAT(hits)
TMEM_STAT(ring_hits)
TMEM_STAT(misses_index)
TMEM_STAT(misses_offline)
TMEM_STAT(misses_tripped)
TMEM_STAT(misses_bounce)
TMEM_STAT(misses_queue)
TMEM_STAT(misses_late)
TMEM_STAT(misses_host)
TMEM_STAT(misses_answer)
TMEM_STAT(misses_check)

/*
 * Fetches (gets of one bio) that sent a request, and their ends: all answers came; one did not come
 * before the deadline. The other fetches are in flight.
 */
TMEM_STAT(fetches)
TMEM_STAT(fetches_answered)
TMEM_STAT(fetches_late)
/* Waits of fetches for bounce pages or a request. */
TMEM_STAT(fetches_waited)
/* Fetches that ended early or did not begin: no bounce page or request, no memory for the bio. */
TMEM_STAT(fetches_no_room)
TMEM_STAT(fetches_no_memory)
/* Fetches that left pages to the disk: pages were missing, or a write of their blocks had begun. */
TMEM_STAT(fetches_disk)

/* Requests sent to the host, and events while the driver sends them and waits for answers. */
TMEM_STAT(requests_put)
TMEM_STAT(requests_get)
TMEM_STAT(requests_flush)
TMEM_STAT(requests_ref)
TMEM_STAT(requests_generation)
TMEM_STAT(config_reads)
TMEM_STAT(late)
TMEM_STAT(slow)
TMEM_STAT(waits_us)
TMEM_STAT(stale)
TMEM_STAT(trips)
TMEM_STAT(pace_waits)
TMEM_STAT(pace_timeouts)
TMEM_STAT(mismatches)
TMEM_STAT(flushes_dropped)
TMEM_STAT(generation_changes)
TMEM_STAT(device_resets)

/*
 * Get requests by the time that their reader waited, with the limits of virtio_tmem_latencies, and
 * the sum of these times.
 */
TMEM_STAT(get_waits_1us)
TMEM_STAT(get_waits_2us)
TMEM_STAT(get_waits_4us)
TMEM_STAT(get_waits_8us)
TMEM_STAT(get_waits_16us)
TMEM_STAT(get_waits_32us)
TMEM_STAT(get_waits_64us)
TMEM_STAT(get_waits_128us)
TMEM_STAT(get_waits_256us)
TMEM_STAT(get_waits_512us)
TMEM_STAT(get_waits_1024us)
TMEM_STAT(get_waits_2048us)
TMEM_STAT(get_waits_4096us)
TMEM_STAT(get_waits_8192us)
TMEM_STAT(get_waits_16384us)
TMEM_STAT(get_waits_longer)
TMEM_STAT(get_waits_ns)

/* Index entries that were erased, by reason, in the order of enum tmem_inval. */
TMEM_STAT(invalidations_unmount)
TMEM_STAT(invalidations_dropped)
TMEM_STAT(invalidations_generation)
TMEM_STAT(invalidations_off)
TMEM_STAT(invalidations_freed)
TMEM_STAT(invalidations_block)

/* Comparisons of hits with the disk (hooks/verify.c): begun, and with a difference. */
TMEM_STAT(verified_hits)
TMEM_STAT(verify_mismatches)

/*
 * Records of disk blocks (hooks/blocks.h). Pages that a read or a write recorded, and that were not
 * recorded because another write was in flight or memory for the bio was missing; writes that the
 * driver did not see.
 */
TMEM_STAT(blocks_read)
TMEM_STAT(blocks_written)
TMEM_STAT(blocks_raced)
TMEM_STAT(blocks_nomem)
TMEM_STAT(blocks_unseen)
/*
 * Evicted pages by the result of the comparison with the record of their block: equal bytes, other
 * bytes than the last transfer, or no record.
 */
TMEM_STAT(blocks_puts_equal)
TMEM_STAT(blocks_puts_other)
TMEM_STAT(blocks_puts_none)
/* Results of these comparisons: equal and other bytes. Writes and errors void a comparison. */
TMEM_STAT(blocks_gets_equal)
TMEM_STAT(blocks_gets_wrong)
