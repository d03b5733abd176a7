/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Counters of both halves, one sysfs file each in /sys/kernel/virtio_tmem/stats/.
 *
 * To add one, add a line to TMEM_STATS and call tmem_count(). Counters only grow
 * and are per CPU: no cache line is shared on the put path.
 */
#ifndef _TMEM_STATS_H
#define _TMEM_STATS_H

#include <linux/percpu.h>

#include "../tmem.h"

#define TMEM_STATS(X)			\
	/* puts: pages accepted into the ring, and why others were not */ \
	X(puts)				\
	X(puts_dropped_offline)		\
	X(puts_dropped_pool)		\
	X(puts_dropped_bypass)		\
	X(puts_dropped_ring_full)	\
	X(puts_dropped_index_full)	\
	X(puts_dropped_nomem)		\
	X(puts_dropped_cookies)		\
	/* what the host made of accepted puts */ \
	X(puts_stored)			\
	X(puts_refused)			\
	X(puts_unanswered)		\
	/* gets: pages asked of tmem_get(); hits include ring_hits */ \
	X(gets)				\
	X(hits)				\
	X(ring_hits)			\
	X(misses_index)			\
	X(misses_offline)		\
	X(misses_tripped)		\
	X(misses_bounce)		\
	X(misses_queue)			\
	X(misses_late)			\
	X(misses_host)			\
	X(misses_answer)		\
	X(misses_check)			\
	/* requests */			\
	X(requests_put)			\
	X(requests_get)			\
	X(requests_flush)		\
	X(late)				\
	X(stale)			\
	X(trips)			\
	X(mismatches)			\
	X(flushes_dropped)		\
	X(generation_changes)		\
	X(index_evicted)		\
	/* index entries erased, in the order of enum tmem_inval */ \
	X(invalidations_removed)	\
	X(invalidations_dirty)		\
	X(invalidations_truncate)	\
	X(invalidations_direct)		\
	X(invalidations_move_ext)	\
	X(invalidations_inode)		\
	X(invalidations_unmount)	\
	X(invalidations_dropped)	\
	X(invalidations_generation)	\
	X(invalidations_fadvise)	\
	/* hooks */			\
	X(verified_hits)		\
	X(verify_mismatches)		\
	X(verify_errors)

enum tmem_stat {
#define X(name) TMEM_STAT_##name,
	TMEM_STATS(X)
#undef X
	NR_TMEM_STATS
};

struct tmem_stats {
	unsigned long count[NR_TMEM_STATS];
};

DECLARE_PER_CPU(struct tmem_stats, tmem_stats);

/* Any context. */
static inline void tmem_count_n(enum tmem_stat stat, unsigned long n)
{
	this_cpu_add(tmem_stats.count[stat], n);
}

static inline void tmem_count(enum tmem_stat stat)
{
	tmem_count_n(stat, 1);
}

static inline void tmem_count_inval(enum tmem_inval why, unsigned long n)
{
	BUILD_BUG_ON(TMEM_STAT_invalidations_fadvise - TMEM_STAT_invalidations_removed !=
		     NR_TMEM_INVAL - 1);
	tmem_count_n(TMEM_STAT_invalidations_removed + why, n);
}

u64 tmem_stat_sum(enum tmem_stat first, enum tmem_stat last);

/* Readable state; see stats.c. */
int tmem_sysfs_init(void);
void tmem_sysfs_exit(void);

#endif /* _TMEM_STATS_H */
