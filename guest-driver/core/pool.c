// SPDX-License-Identifier: GPL-2.0-only
/*
 * Pools: one for each super block. The host knows a pool by a number (id). To erase all entries,
 * the driver sets the ids of all pools to 0, and later gives the pools new ids.
 *
 * A pool's id is nonzero only after the device has confirmed its creation. tmem_pool_new() and
 * tmem_pool_free() never wait for the device; the sync work sends the requests.
 */
#include <linux/percpu.h>
#include <linux/slab.h>

#include "../trace.h"
#include "core.h"

/*
 * Maximum number of pools that the hooks have freed and that the host has not yet destroyed. If a
 * host does not answer while file systems are mounted and unmounted, further ones are not cached
 * until it answers.
 */
#define POOLS_FREED_MAX		1024

static DEFINE_MUTEX(tmem_pools_lock);
static LIST_HEAD(tmem_pools);
/* Pools that the hooks have freed and that the sync work has not yet destroyed at the device. */
static LIST_HEAD(tmem_pools_freed);
/* True while there is a device whose sync work handles tmem_pools_freed. */
static bool have_device;
unsigned int tmem_pools_nr_freed;
static u32 last_serial;
static u32 last_id;

/* Returns NULL if there is no memory or POOLS_FREED_MAX is reached. */
struct tmem_pool *tmem_pool_new(const char *name, bool private)
{
	struct tmem_pool *pool = kzalloc(sizeof(*pool), GFP_KERNEL);

	if (!pool)
		return NULL;
	strscpy(pool->name, name, sizeof(pool->name));
	pool->private = private;
	pool->nr_pages = alloc_percpu(long);
	mutex_lock(&tmem_pools_lock);
	if (!pool->nr_pages || tmem_pools_nr_freed >= POOLS_FREED_MAX)
		goto fail;
	if (tmem_policy_init(pool))
		goto fail;
	pool->serial = ++last_serial;
	list_add_tail(&pool->list, &tmem_pools);
	mutex_unlock(&tmem_pools_lock);
	tmem_dev_resync_any(false);
	return pool;
fail:
	mutex_unlock(&tmem_pools_lock);
	free_percpu(pool->nr_pages);
	kfree(pool);
	return NULL;
}

static void free_rcu(struct rcu_head *rcu)
{
	struct tmem_pool *pool = container_of(rcu, struct tmem_pool, rcu);

	free_percpu(pool->nr_pages);
	kfree(pool);
}

/* Frees a pool of tmem_pools_freed when no RCU reader uses it any more. */
static void release(struct tmem_pool *pool)
{
	list_del(&pool->list);
	tmem_pools_nr_freed--;
	call_rcu(&pool->rcu, free_rcu);
}

/* Releases freed pools. With @keep, leaves out private pools that the device may have. */
static void release_freed(bool keep)
{
	struct tmem_pool *pool, *next;

	list_for_each_entry_safe(pool, next, &tmem_pools_freed, list)
		if (!keep || !pool->private || !pool->retired_id)
			release(pool);
}

/* Records that a device is present, or that its sync work will not run again. */
void tmem_pools_device(bool present)
{
	mutex_lock(&tmem_pools_lock);
	have_device = present;
	if (!present)
		release_freed(false);
	mutex_unlock(&tmem_pools_lock);
}

/*
 * Releases freed pools, because the generation of their ids is over. If the device's generation is
 * known (@generation is not 0), the device has no pool of an earlier one. Context: the sync work,
 * which is the only code that frees pools while there is a device.
 */
void tmem_pools_gone(u64 generation)
{
	struct tmem_pool *pool;

	mutex_lock(&tmem_pools_lock);
	/* If the same generation comes back, the device has to destroy the private pools. */
	release_freed(!generation);
	if (generation)
		list_for_each_entry(pool, &tmem_pools, list)
			pool->retired_id = 0;
	mutex_unlock(&tmem_pools_lock);
}

/*
 * Takes the id of a pool away, which makes its entries unreachable, and counts them as erased for
 * the reason @why. Returns their number. A later sweep of the index frees their memory.
 */
static unsigned long retire_id(struct tmem_pool *pool, enum tmem_inval why)
{
	unsigned long pages;

	if (!pool->id)
		return 0;
	pages = tmem_pool_pages(pool);
	pool->retired_id = pool->id;
	tmem_pool_clear_id(pool);
	tmem_count_inval(why, pages);
	if (pages)
		trace_tmem_invalidate(pool->name, 0, U32_MAX, pages, tmem_inval_name(why));
	return pages;
}

/*
 * The pool gets no new entries any more, so a sweep is not needed if it has none. A private pool
 * has objects without entries.
 */
void tmem_pool_free(struct tmem_pool *pool)
{
	mutex_lock(&tmem_pools_lock);
	if (retire_id(pool, TMEM_INVAL_UNMOUNT) || pool->private)
		tmem_index_sweep_start();
	pool->freed = true;
	list_move_tail(&pool->list, &tmem_pools_freed);
	tmem_pools_nr_freed++;
	tmem_policy_free(pool);
	if (!have_device)
		release_freed(false);
	mutex_unlock(&tmem_pools_lock);
	tmem_dev_resync_any(false);
}

/*
 * Without its id, no entry of the pool is reachable. The sync work later destroys the old id, which
 * makes the host free the pages, and gives the pool a new id. tmem_pools_forget() empties all
 * pools.
 */
void tmem_pool_empty(struct tmem_pool *pool)
{
	mutex_lock(&tmem_pools_lock);
	retire_id(pool, TMEM_INVAL_OFF);
	tmem_index_sweep_start();
	mutex_unlock(&tmem_pools_lock);
	tmem_dev_resync_any(false);
}

void tmem_pools_wait_emptied(void)
{
	tmem_index_sweep();
}

/* Makes all entries of the index unreachable. Sleeps. */
void tmem_pools_forget(void)
{
	struct tmem_pool *pool;

	mutex_lock(&tmem_pools_lock);
	list_for_each_entry(pool, &tmem_pools, list)
		retire_id(pool, TMEM_INVAL_GENERATION);
	mutex_unlock(&tmem_pools_lock);
}

/*
 * Finds a pool whose id is to be destroyed at the device. Pools that the hooks have freed come
 * first.
 */
static struct tmem_pool *find_retired(void)
{
	struct tmem_pool *pool;

	list_for_each_entry(pool, &tmem_pools_freed, list)
		return pool;
	list_for_each_entry(pool, &tmem_pools, list)
		if (pool->retired_id)
			return pool;
	return NULL;
}

/*
 * Takes the ids of private pools of which the device may have a page that the driver has erased,
 * because a flush was dropped. Their destruction takes its place.
 */
static void retire_lost(void)
{
	struct tmem_pool *pool;
	bool found = false;

	list_for_each_entry(pool, &tmem_pools, list) {
		if (!xchg(&pool->lost, false))
			continue;
		retire_id(pool, TMEM_INVAL_OFF);
		found = true;
	}
	if (found)
		tmem_index_sweep_start();
}

bool tmem_pool_refused(const struct tmem_pool *pool)
{
	return READ_ONCE(pool->refused) && !READ_ONCE(pool->id);
}

/* Finds, among the first @max pools, a pool that the device does not have, and has not refused. */
static struct tmem_pool *find_missing(unsigned int max, u64 generation)
{
	struct tmem_pool *pool;

	list_for_each_entry(pool, &tmem_pools, list) {
		if (!max--)
			return NULL;
		if (!pool->id && pool->refused != generation)
			return pool;
	}
	return NULL;
}

static int destroy_one(struct tmem_dev *dev, u64 generation, struct tmem_pool *pool)
{
	int err = 0;

	mutex_unlock(&tmem_pools_lock);
	if (pool->retired_id)
		err = tmem_control_pool(dev, generation, VIRTIO_TMEM_T_POOL_DESTROY,
					pool->retired_id, 0);
	mutex_lock(&tmem_pools_lock);
	/* ENOENT is success: an id of an older generation no longer exists. */
	if (err && err != -ENOENT)
		return err;
	pool->retired_id = 0;
	if (pool->freed)
		release(pool);
	return 0;
}

static int create_one(struct tmem_dev *dev, u64 generation, struct tmem_pool *pool)
{
	u32 id;
	int err;

	/*
	 * Never reuse an id: the device may still have the pool of an id from before a wrap-around.
	 */
	if (last_id == U32_MAX)
		return -ENOSPC;
	id = ++last_id;
	/*
	 * If no answer comes, the device may have the pool. So the id counts as one to destroy
	 * until the device has confirmed the pool.
	 */
	pool->retired_id = id;
	mutex_unlock(&tmem_pools_lock);
	err = tmem_control_pool(dev, generation, VIRTIO_TMEM_T_POOL_CREATE, id,
				pool->private ? VIRTIO_TMEM_POOL_PRIVATE : 0);
	/* Wait for puts and erasures that count entries with the last id of the pool. */
	synchronize_rcu_expedited();
	mutex_lock(&tmem_pools_lock);
	WRITE_ONCE(pool->refused, err == -EOPNOTSUPP && pool->private ? generation : 0);
	if (err == -ENOSPC || pool->refused)
		pool->retired_id = 0;
	if (pool->refused)
		return 0;
	if (err || pool->freed)
		return err;
	err = tmem_pool_set_id(pool, id);
	if (err)
		return err;
	pool->retired_id = 0;
	return 0;
}

/*
 * Creates and destroys pools at the device, to match the guest's pools. The first request without
 * an answer ends the function, and so does tmem_sync_stop(). Returns 0, -ESTALE if the generation
 * is over, or another error if pools are missing.
 *
 * Context: the sync work, which is the only code that frees pools while there is a device, so no
 * lock is held while it waits for the device.
 */
int tmem_pools_create(struct tmem_dev *dev, u64 generation)
{
	struct tmem_pool *pool;
	int err = 0;

	mutex_lock(&tmem_pools_lock);
	retire_lost();
	while (!err && !READ_ONCE(dev->stopping)) {
		pool = find_retired();
		if (pool) {
			err = destroy_one(dev, generation, pool);
			continue;
		}
		pool = find_missing(dev->pools_max, generation);
		if (!pool)
			break;
		err = create_one(dev, generation, pool);
	}
	mutex_unlock(&tmem_pools_lock);
	return err;
}

/* Cleans up after the hooks have freed all pools and the device is gone. */
void tmem_pools_exit(void)
{
	WARN_ON(!list_empty(&tmem_pools));
	tmem_pool_ids_exit();
	rcu_barrier();	/* wait for free_rcu(), which is code of this module */
}
