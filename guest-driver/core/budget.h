/* SPDX-License-Identifier: GPL-2.0-only */
/* Internal interface of the index: accounting of the memory that it uses. */
#ifndef _TMEM_BUDGET_H
#define _TMEM_BUDGET_H

#include <linux/percpu.h>

#include "core.h"

/*
 * Flags for allocations of the index. The driver allocates while a page is being freed, mostly by
 * reclaim. The page is about a hundred times as large as the allocated memory. So the allocations
 * may use some of the kernel's reserves, but not those for reclaim itself (PF_MEMALLOC).
 */
#define GFP_INDEX (__GFP_HIGH | __GFP_KSWAPD_RECLAIM | __GFP_NOMEMALLOC | __GFP_NOWARN)

/*
 * Memory of an XArray node in bytes: the node, and the slab allocator's link of free objects, which
 * is behind each object of a slab cache with a constructor.
 */
#define TMEM_NODE_BYTES		((long)(sizeof(struct xa_node) + sizeof(void *)))

extern long tmem_index_limit_bytes;
extern long tmem_index_table_bytes;
extern atomic_long_t tmem_index_used_bytes;
extern struct work_struct tmem_evict_work;

/*
 * Part of the accounting that one CPU writes. A page is often entered on one CPU and erased on
 * another, so only the sums over all CPUs have a meaning.
 */
struct tmem_index_cpu {
	long stock_bytes;	/* charged in tmem_index_used_bytes but not in use; never below 0 */
	long nr_pages;		/* entries made on this CPU minus entries erased on it */
	long nr_retained;	/* retained entries, which nr_pages includes */
};

DECLARE_PER_CPU(struct tmem_index_cpu, tmem_index_cpu);

/* Adds @pages, which may be negative, to this CPU's number of entries, in any context. */
static inline void tmem_index_add_pages(long pages)
{
	this_cpu_add(tmem_index_cpu.nr_pages, pages);
}

/* Adds @pages, which may be negative, to this CPU's number of retained entries, in any context. */
static inline void tmem_index_add_retained(long pages)
{
	this_cpu_add(tmem_index_cpu.nr_retained, pages);
}

void tmem_index_budget_init(long table_bytes);
long tmem_index_limit(void);
long tmem_index_entry_bytes(void);
bool tmem_charge(long bytes);
void tmem_uncharge(long bytes);
unsigned int tmem_nodes_missing(struct xarray *xa, unsigned long index);
int tmem_nodes_store(struct xarray *xa, unsigned long index, void *entry, u32 *nodes);
void *tmem_nodes_erase(struct xarray *xa, unsigned long index, u32 *nodes);
void tmem_evict_start(void);
void tmem_index_make_room(void);

#endif /* _TMEM_BUDGET_H */
