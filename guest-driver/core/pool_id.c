// SPDX-License-Identifier: GPL-2.0-only
/*
 * Table that finds a pool by its id at the host. The index uses it, because its objects carry the
 * id of their pool. An id is in this table while puts and gets use it. pool.c decides when a pool
 * gets an id and when it loses it.
 */
#include <linux/percpu.h>

#include "core.h"

static DEFINE_XARRAY(tmem_pools_live);

/*
 * Gives a pool an id that was never used before and that the device has confirmed. The pool has no
 * id, and the caller has waited for an RCU grace period since the pool lost its last one. Returns 0
 * or -ENOMEM. Context: process, under tmem_pools_lock.
 */
int tmem_pool_set_id(struct tmem_pool *pool, u32 id)
{
	int cpu, err;

	for_each_possible_cpu(cpu)
		WRITE_ONCE(*per_cpu_ptr(pool->nr_pages, cpu), 0);
	err = xa_err(xa_store(&tmem_pools_live, id, pool, GFP_KERNEL));
	if (!err)
		WRITE_ONCE(pool->id, id);
	return err;
}

/*
 * Takes the id of a pool away, which makes its entries unreachable. Context: process, under
 * tmem_pools_lock.
 */
void tmem_pool_clear_id(struct tmem_pool *pool)
{
	xa_erase(&tmem_pools_live, pool->id);
	WRITE_ONCE(pool->id, 0);
}

/* Returns whether puts and gets use a pool id. */
bool tmem_pool_live(u32 id)
{
	return xa_load(&tmem_pools_live, id);
}

/*
 * Adds to the number of a pool's entries. If the id is no longer in use, nothing is counted.
 * Context: any but NMI; the caller holds a spinlock with interrupts off, or owns the object of the
 * entries.
 */
void tmem_pool_add_pages(u32 id, long pages)
{
	struct tmem_pool *pool;

	rcu_read_lock();
	pool = xa_load(&tmem_pools_live, id);
	if (pool)
		this_cpu_add(*pool->nr_pages, pages);
	rcu_read_unlock();
}

/*
 * The number is exact while nothing is entered or erased. If entries are only erased, 0 means that
 * none is left.
 */
unsigned long tmem_pool_pages(struct tmem_pool *pool)
{
	long pages = 0;
	int cpu;

	if (!READ_ONCE(pool->id))
		return 0;
	for_each_possible_cpu(cpu)
		pages += READ_ONCE(*per_cpu_ptr(pool->nr_pages, cpu));
	return max(pages, 0L);
}

/*
 * Returns the name of a pool from its id, or "?" when the id is no longer in use. The caller holds
 * the RCU read lock or a spinlock while it uses the name. Context: any but NMI.
 */
const char *tmem_pool_name(u32 id)
{
	struct tmem_pool *pool = xa_load(&tmem_pools_live, id);

	return pool ? pool->name : "?";
}

/*
 * Has a private pool emptied, because the host may keep a page of it that the driver has erased.
 * Context: any but NMI.
 */
void tmem_pool_lost(u32 id)
{
	struct tmem_pool *pool;
	bool private;

	rcu_read_lock();
	pool = xa_load(&tmem_pools_live, id);
	private = pool && pool->private && !TMEM_WITHOUT(LOST);
	if (private)
		WRITE_ONCE(pool->lost, true);
	rcu_read_unlock();
	if (private)
		tmem_dev_resync_any(false);
}

/* Frees the table, after all pools were freed. */
void tmem_pool_ids_exit(void)
{
	xa_destroy(&tmem_pools_live);
}
