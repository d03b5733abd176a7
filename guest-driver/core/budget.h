/* SPDX-License-Identifier: GPL-2.0-only */
/* Internal interface of the index: accounting of the memory that it uses. */
#ifndef _TMEM_BUDGET_H
#define _TMEM_BUDGET_H

#include "core.h"

/*
 * An allocation happens while the page is being freed, mostly by reclaim. It takes memory from the
 * allocator's caches. It may use some of the reserves (a hundred times as much is being freed), but
 * not those of the reclaimer.
 */
#define GFP_INDEX (__GFP_HIGH | __GFP_KSWAPD_RECLAIM | __GFP_NOMEMALLOC | __GFP_NOWARN)

extern long tmem_index_limit_bytes;
extern long tmem_index_table_bytes;
extern atomic_long_t tmem_index_used_bytes;
extern atomic_long_t tmem_index_nr_pages;
extern struct work_struct tmem_evict_work;

long tmem_index_limit(void);
bool tmem_charge(long bytes);
void tmem_uncharge(long bytes);
bool tmem_alone_in_node(struct xarray *xa, unsigned long index);
void tmem_evict_start(void);
void tmem_index_make_room(void);

#endif /* _TMEM_BUDGET_H */
