// SPDX-License-Identifier: GPL-2.0-only
/*
 * Table that finds a pool by its id at the host. The index uses it, because its objects carry the
 * id of their pool. An id is in this table while puts and gets use it. pool.c decides when a pool
 * gets an id and when it loses it.
 */
#include <linux/percpu.h>

#include "core.h"

static DEFINE_XARRAY(tmem_pools_live);

/**
 * tmem_pool_set_id() - give a pool the id that the device has confirmed
 * @pool: the pool, which has no id. The caller has waited for an RCU grace period since the pool
 *   lost its last one.
 * @id: an id that was never used before
 *
 * Context: process, under tmem_pools_lock.
 *
 * Return: 0 or -ENOMEM.
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

/**
 * tmem_pool_clear_id() - take the id of a pool away, which makes its entries unreachable
 * @pool: the pool, which has an id
 *
 * Context: process, under tmem_pools_lock.
 */
void tmem_pool_clear_id(struct tmem_pool *pool)
{
	xa_erase(&tmem_pools_live, pool->id);
	WRITE_ONCE(pool->id, 0);
}

/**
 * tmem_pool_live() - check whether puts and gets use a pool id
 * @id: pool id
 *
 * Return: true if a pool has this id now.
 */
bool tmem_pool_live(u32 id)
{
	return xa_load(&tmem_pools_live, id);
}

/**
 * tmem_pool_add_pages() - add to the number of a pool's entries
 * @id: pool id. If it is no longer in use, nothing is counted.
 * @pages: number of entries, which may be negative
 *
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

/**
 * tmem_pool_pages() - return the number of a pool's entries, held and retained
 * @pool: the pool
 *
 * Context: any.
 *
 * Return: number of pages. It is exact while nothing is entered or erased. If entries are only
 * erased, 0 means that none is left.
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

/**
 * tmem_pool_name() - return the name of a pool from its id
 * @id: pool id
 *
 * Context: any but NMI; the caller holds the RCU read lock or a spinlock while it uses the name.
 *
 * Return: the name, or "?" when the id is no longer in use.
 */
const char *tmem_pool_name(u32 id)
{
	struct tmem_pool *pool = xa_load(&tmem_pools_live, id);

	return pool ? pool->name : "?";
}

/**
 * tmem_pool_ids_exit() - free the table, after all pools were freed
 */
void tmem_pool_ids_exit(void)
{
	xa_destroy(&tmem_pools_live);
}
