/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Tracepoints, in /sys/kernel/tracing/events/virtio_tmem/. A tracepoint that is off costs one jump
 * that is not taken.
 *
 * A reason is the name of the counter that grew with the event, as in stats_list.h, so that a user
 * can compare events and counters. A pool has the name of its block device. Blocks of 4 KiB count
 * from the beginning of the file system.
 */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM virtio_tmem

#if !defined(_TMEM_TRACE_H) || defined(TRACE_HEADER_MULTI_READ)
#define _TMEM_TRACE_H

#include <linux/tracepoint.h>

#include "compat.h"

/*
 * An evicted page was offered for a put. The reason "puts" means that the put ring took the page.
 */
TRACE_EVENT(tmem_put,
	TP_PROTO(const char *pool, u64 block, bool workingset, const char *reason),
	TP_ARGS(pool, block, workingset, reason),
	TP_STRUCT__entry(
		__field(u64, block)
		__field(bool, workingset)
		__string(pool, pool)
		__string(reason, reason)
	),
	TP_fast_assign(
		__entry->block = block;
		__entry->workingset = workingset;
		tmem_assign_str(pool, pool);
		tmem_assign_str(reason, reason);
	),
	TP_printk("pool=%s block=%llu workingset=%d reason=%s", __get_str(pool), __entry->block,
		  __entry->workingset, __get_str(reason))
);

/* A get ended. It began wait_us ago, and spent most of this time waiting for the host. */
TRACE_EVENT(tmem_get,
	TP_PROTO(const char *pool, u64 block, unsigned int wanted, unsigned int hits, u64 wait_us),
	TP_ARGS(pool, block, wanted, hits, wait_us),
	TP_STRUCT__entry(
		__field(u64, block)
		__field(unsigned int, wanted)
		__field(unsigned int, hits)
		__field(u64, wait_us)
		__string(pool, pool)
	),
	TP_fast_assign(
		__entry->block = block;
		__entry->wanted = wanted;
		__entry->hits = hits;
		__entry->wait_us = wait_us;
		tmem_assign_str(pool, pool);
	),
	TP_printk("pool=%s block=%llu wanted=%u hits=%u wait_us=%llu", __get_str(pool),
		  __entry->block, __entry->wanted, __entry->hits, __entry->wait_us)
);

/*
 * Entries were erased: @pages entries of blocks @first to @last. An invalidation that erases
 * nothing is not traced.
 */
TRACE_EVENT(tmem_invalidate,
	TP_PROTO(const char *pool, u64 first, u64 last, unsigned long pages, const char *reason),
	TP_ARGS(pool, first, last, pages, reason),
	TP_STRUCT__entry(
		__field(u64, first)
		__field(u64, last)
		__field(unsigned long, pages)
		__string(pool, pool)
		__string(reason, reason)
	),
	TP_fast_assign(
		__entry->first = first;
		__entry->last = last;
		__entry->pages = pages;
		tmem_assign_str(pool, pool);
		tmem_assign_str(reason, reason);
	),
	TP_printk("pool=%s first=%llu last=%llu pages=%lu reason=%s", __get_str(pool),
		  __entry->first, __entry->last, __entry->pages, __get_str(reason))
);

/*
 * The breaker opened or closed. While it is open, the driver sends no gets, because the host
 * answers too late.
 */
TRACE_EVENT(tmem_breaker,
	TP_PROTO(bool open),
	TP_ARGS(open),
	TP_STRUCT__entry(
		__field(bool, open)
	),
	TP_fast_assign(
		__entry->open = open;
	),
	TP_printk("%s", __entry->open ? "open" : "closed")
);

/*
 * A page was wrong. The cache is off until the module is loaded again, or, if the reason is not the
 * content check, the file system of the page is not cached until it is mounted again.
 */
TRACE_EVENT(tmem_poison,
	TP_PROTO(const char *reason, u64 block),
	TP_ARGS(reason, block),
	TP_STRUCT__entry(
		__field(u64, block)
		__string(reason, reason)
	),
	TP_fast_assign(
		__entry->block = block;
		tmem_assign_str(reason, reason);
	),
	TP_printk("block=%llu reason=%s", __entry->block, __get_str(reason))
);

#endif /* _TMEM_TRACE_H */

/* Kbuild's -I finds this file, in the repository as well as in a DKMS tree. */
#undef TRACE_INCLUDE_PATH
#define TRACE_INCLUDE_PATH .
#undef TRACE_INCLUDE_FILE
#define TRACE_INCLUDE_FILE trace
#include <trace/define_trace.h>
