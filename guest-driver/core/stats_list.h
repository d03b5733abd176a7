/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Counters, in the order of enum tmem_stat. Files include this one with TMEM_STAT() defined. To add
 * a counter, add a line here and call tmem_count().
 */

/*
 * Evicted pages of regular files of served file systems. The hook counts each of them once: as
 * accepted into the ring, or by the reason why it was not accepted. stats.h sums up the first four
 * groups, so their order matters.
 *
 * Eligible pages that the host had retained and that had not changed, so that they needed no copy.
 */
TMEM_STAT(refs)

/* Eligible pages that were accepted into the ring. */
TMEM_STAT(puts)

/* Eligible pages that were not accepted, and so are lost. */
TMEM_STAT(puts_dropped_pool)
TMEM_STAT(puts_dropped_ring_full)
TMEM_STAT(puts_dropped_index_full)
TMEM_STAT(puts_dropped_nomem)
TMEM_STAT(puts_dropped_cookies)
TMEM_STAT(puts_skipped_large)

/* Pages that were accepted and lost afterwards, other than by the host's eviction. */
TMEM_STAT(puts_refused)
TMEM_STAT(puts_unanswered)
TMEM_STAT(index_evicted)

/* Pages that are not eligible: the cache is off for them, or a rule or a policy excludes them. */
TMEM_STAT(puts_dropped_offline)
TMEM_STAT(puts_dropped_bypass)
TMEM_STAT(puts_dropped_policy)
TMEM_STAT(puts_skipped_admission)
TMEM_STAT(puts_skipped_offline)
TMEM_STAT(puts_skipped_inode)
TMEM_STAT(puts_skipped_size)
TMEM_STAT(puts_skipped_folio)
TMEM_STAT(puts_skipped_marked)
TMEM_STAT(puts_skipped_off)
TMEM_STAT(retained_changed)

/* accepted puts that the host stored */
TMEM_STAT(puts_stored)

/*
 * pages of refs by what became of their REF: answered HELD or GONE; without such an answer; not
 * sent; not needed, because the put of the page had not been sent, or because the page was
 * invalidated before the answer
 */
TMEM_STAT(refs_held)
TMEM_STAT(refs_gone)
TMEM_STAT(refs_unanswered)
TMEM_STAT(refs_dropped)
TMEM_STAT(refs_unneeded)

/* hits that the host retained; retained entries that a full index erased */
TMEM_STAT(retained_hits)
TMEM_STAT(retained_evicted)

/* gets: pages that callers of tmem_get() wanted; hits include ring_hits */
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

/* readaheads that were left to the disk because their reader must not wait */
TMEM_STAT(reads_nowait)

/* requests */
TMEM_STAT(requests_put)
TMEM_STAT(requests_get)
TMEM_STAT(requests_flush)
TMEM_STAT(requests_ref)
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

/*
 * get requests by the wait of their reader, as in virtio_tmem_latencies, and the sum of the waits
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

/* index entries erased, in the order of enum tmem_inval */
TMEM_STAT(invalidations_removed)
TMEM_STAT(invalidations_dirty)
TMEM_STAT(invalidations_truncate)
TMEM_STAT(invalidations_direct)
TMEM_STAT(invalidations_move_ext)
TMEM_STAT(invalidations_inode)
TMEM_STAT(invalidations_unmount)
TMEM_STAT(invalidations_dropped)
TMEM_STAT(invalidations_generation)
TMEM_STAT(invalidations_fadvise)
TMEM_STAT(invalidations_off)

/* hooks */
TMEM_STAT(verified_hits)
TMEM_STAT(verify_mismatches)
TMEM_STAT(verify_errors)
