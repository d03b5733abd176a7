/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Counters of core/ and hooks/, one sysfs file each in /sys/kernel/virtio_tmem/stats/.
 *
 * stats_list.h has their names. Counters only grow. Each CPU has counters of its own, so that puts
 * on different CPUs write to different cache lines.
 */
#ifndef _TMEM_STATS_H
#define _TMEM_STATS_H

#include <linux/percpu.h>

#include "../tmem.h"

enum tmem_stat {
#define TMEM_STAT(name) TMEM_STAT_##name,
#include "stats_list.h"
#undef TMEM_STAT
	NR_TMEM_STATS
};

struct tmem_stats {
	unsigned long count[NR_TMEM_STATS];
};

/* Names of the counters, in the order of stats_list.h. */
extern const char *const tmem_stat_names[NR_TMEM_STATS];

DECLARE_PER_CPU(struct tmem_stats, tmem_stats);

/* Adds to a counter, in any context. */
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
	BUILD_BUG_ON(TMEM_STAT_invalidations_block - TMEM_STAT_invalidations_unmount !=
		     NR_TMEM_INVAL - 1);
	tmem_count_n(TMEM_STAT_invalidations_unmount + why, n);
}

static inline const char *tmem_stat_name(enum tmem_stat stat)
{
	return tmem_stat_names[stat];
}

static inline const char *tmem_inval_name(enum tmem_inval why)
{
	return tmem_stat_names[TMEM_STAT_invalidations_unmount + why];
}

u64 tmem_stat_sum(enum tmem_stat first, enum tmem_stat last);

/*
 * Returns the number of eligible pages: evicted pages that no rule, policy or filter excluded.
 * Afterwards, each of them is in the ring or the pool, was evicted by the host, or is lost. The
 * pages that refs_gone counts were evicted by the host.
 */
static inline u64 tmem_stat_eligible(void)
{
	return tmem_stat_sum(TMEM_STAT_refs, TMEM_STAT_puts_dropped_cookies);
}

/* Returns the number of eligible pages that the put ring did not accept. */
static inline u64 tmem_stat_not_accepted(void)
{
	return tmem_stat_sum(TMEM_STAT_puts_dropped_pool, TMEM_STAT_puts_dropped_cookies);
}

/*
 * Returns the number of eligible pages that neither put ring nor pool holds, for any reason except
 * eviction by the host.
 */
static inline u64 tmem_stat_lost(void)
{
	return tmem_stat_sum(TMEM_STAT_puts_dropped_pool, TMEM_STAT_index_evicted);
}

#endif /* _TMEM_STATS_H */
