// SPDX-License-Identifier: GPL-2.0-only
/*
 * Pools: one per super block, known to the host by a number that changes whenever everything is
 * forgotten, so that forgetting is setting numbers to 0.
 *
 * A pool's id is nonzero only after the device has answered its creation. Never waits in
 * tmem_pool_new() or tmem_pool_free() for the device: the sync work does the asking.
 */
#include <linux/slab.h>

#include "core.h"

static DEFINE_MUTEX(tmem_pools_lock);
static LIST_HEAD(tmem_pools);
/* Freed by the hooks, to be destroyed at the device. */
static LIST_HEAD(tmem_pools_dead);
/* Pools by id, while the id can be reached. */
static DEFINE_XARRAY(tmem_pools_live);
/* Somebody will look at the list above. */
static bool have_device;
static u32 last_serial;
static u32 last_id;

/**
 * tmem_pool_new() - add a file system
 * @name: for messages
 * @old: the pool that this one replaces, to be freed afterwards, or NULL
 *
 * Context: process, may sleep. Puts are taken once the device has answered.
 *
 * Return: the pool, or NULL without memory.
 */
struct tmem_pool *tmem_pool_new(const char *name, struct tmem_pool *old)
{
	struct tmem_pool *pool = kzalloc(sizeof(*pool), GFP_KERNEL);

	if (!pool)
		return NULL;
	strscpy(pool->name, name, sizeof(pool->name));
	mutex_lock(&tmem_pools_lock);
	if (tmem_policy_init(pool, old))
		goto nomem;
	if (tmem_bypass_init(pool, old)) {
		tmem_policy_free(pool);
		goto nomem;
	}
	pool->serial = ++last_serial;
	list_add_tail(&pool->list, &tmem_pools);
	mutex_unlock(&tmem_pools_lock);
	tmem_control_resync_any(false);
	return pool;
nomem:
	mutex_unlock(&tmem_pools_lock);
	kfree(pool);
	return NULL;
}

static void free_dead(void)
{
	struct tmem_pool *pool, *next;

	list_for_each_entry_safe(pool, next, &tmem_pools_dead, list) {
		list_del(&pool->list);
		kfree_rcu(pool, rcu);
	}
}

/**
 * tmem_pools_device() - a device came, or its sync work will not run again
 * @present: which of the two
 */
void tmem_pools_device(bool present)
{
	mutex_lock(&tmem_pools_lock);
	have_device = present;
	if (!present)
		free_dead();
	mutex_unlock(&tmem_pools_lock);
}

static void bury(struct tmem_pool *pool)
{
	if (!pool->id)
		return;
	xa_erase(&tmem_pools_live, pool->id);
	pool->burnt_id = pool->id;
	WRITE_ONCE(pool->id, 0);
}

/**
 * tmem_pool_free() - remove a file system and all its pages
 * @pool: the pool; no other call with it may be running
 *
 * Context: process, may sleep, but not for the device.
 */
void tmem_pool_free(struct tmem_pool *pool)
{
	u32 id;

	mutex_lock(&tmem_pools_lock);
	id = pool->id;
	bury(pool);
	pool->freed = true;
	list_move_tail(&pool->list, &tmem_pools_dead);
	if (id)
		tmem_index_drop_pool(id, pool->name, TMEM_INVAL_UNMOUNT);
	tmem_bypass_free(pool);
	tmem_policy_free(pool);
	if (!have_device)
		free_dead();
	mutex_unlock(&tmem_pools_lock);
	tmem_control_resync_any(false);
}

/**
 * tmem_pool_empty() - forget all pages of a file system that stays
 * @pool: the pool, which other calls may be using
 *
 * As tmem_pools_forget() for one pool: without its id no entry is reachable. The host frees the
 * pages when the sync work has the old id destroyed, and the pool gets a new one.
 *
 * Context: process, may sleep, but not for the device.
 */
void tmem_pool_empty(struct tmem_pool *pool)
{
	u32 id;

	mutex_lock(&tmem_pools_lock);
	id = pool->id;
	bury(pool);
	if (id)
		tmem_index_drop_pool(id, pool->name, TMEM_INVAL_OFF);
	mutex_unlock(&tmem_pools_lock);
	tmem_control_resync_any(false);
}

/**
 * tmem_pool_pages() - how many pages of a file system could be got
 * @pool: the pool
 *
 * Context: process, may sleep: looks at the whole index.
 *
 * Return: number of pages.
 */
unsigned long tmem_pool_pages(struct tmem_pool *pool)
{
	u32 id = READ_ONCE(pool->id);

	return id ? tmem_index_pool_pages(id) : 0;
}

/**
 * tmem_pool_live() - does the id belong to a pool that puts and gets use?
 * @id: pool id
 *
 * Return: true if so.
 */
bool tmem_pool_live(u32 id)
{
	return xa_load(&tmem_pools_live, id);
}

/**
 * tmem_pool_name() - name of a pool, for who has only its id
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
 * tmem_pools_forget() - make all entries of the index unreachable
 *
 * Context: process, may sleep.
 */
void tmem_pools_forget(void)
{
	struct tmem_pool *pool;

	mutex_lock(&tmem_pools_lock);
	list_for_each_entry(pool, &tmem_pools, list)
		bury(pool);
	mutex_unlock(&tmem_pools_lock);
}

/* A pool whose id is to be destroyed at the device, first of all those that are freed. */
static struct tmem_pool *find_burnt(void)
{
	struct tmem_pool *pool;

	list_for_each_entry(pool, &tmem_pools_dead, list)
		return pool;
	list_for_each_entry(pool, &tmem_pools, list)
		if (pool->burnt_id)
			return pool;
	return NULL;
}

/* A pool that the device does not have, among the first @max. */
static struct tmem_pool *find_missing(unsigned int max)
{
	struct tmem_pool *pool;

	list_for_each_entry(pool, &tmem_pools, list) {
		if (!max--)
			return NULL;
		if (!pool->id)
			return pool;
	}
	return NULL;
}

static int destroy_one(struct tmem_dev *dev, u64 generation, struct tmem_pool *pool)
{
	int err = 0;

	mutex_unlock(&tmem_pools_lock);
	if (pool->burnt_id)
		err = tmem_control_pool(dev, generation, VIRTIO_TMEM_T_POOL_DESTROY,
					pool->burnt_id);
	mutex_lock(&tmem_pools_lock);
	/* An id of an older generation is not there any more. */
	if (err && err != -ENOENT)
		return err;
	pool->burnt_id = 0;
	if (pool->freed) {
		list_del(&pool->list);
		kfree_rcu(pool, rcu);
	}
	return 0;
}

static int create_one(struct tmem_dev *dev, u64 generation, struct tmem_pool *pool)
{
	u32 id;
	int err;

	/* An id that wrapped could be one that the device still has. */
	if (last_id == U32_MAX)
		return -ENOSPC;
	id = ++last_id;
	/* Until it is answered we do not know whether the device has it. */
	pool->burnt_id = id;
	mutex_unlock(&tmem_pools_lock);
	err = tmem_control_pool(dev, generation, VIRTIO_TMEM_T_POOL_CREATE, id);
	mutex_lock(&tmem_pools_lock);
	if (err == -ENOSPC)
		pool->burnt_id = 0;
	if (err || pool->freed)
		return err;
	err = xa_err(xa_store(&tmem_pools_live, id, pool, GFP_KERNEL));
	if (err)
		return err;
	pool->burnt_id = 0;
	WRITE_ONCE(pool->id, id);
	return 0;
}

/**
 * tmem_pools_create() - make the device's pools those of the guest
 * @dev: the device
 * @generation: to be carried by the requests
 *
 * Context: the sync work only, which alone frees pools, so that no lock is held while the device is
 * asked. The first request that is not answered ends it.
 *
 * Return: 0, -ESTALE if the generation is over, or another error if pools are missing.
 */
int tmem_pools_create(struct tmem_dev *dev, u64 generation)
{
	struct tmem_pool *pool;
	int err = 0;

	mutex_lock(&tmem_pools_lock);
	while (!err) {
		pool = find_burnt();
		if (pool) {
			err = destroy_one(dev, generation, pool);
			continue;
		}
		pool = find_missing(dev->pools_max);
		if (!pool)
			break;
		err = create_one(dev, generation, pool);
	}
	mutex_unlock(&tmem_pools_lock);
	return err;
}

/**
 * tmem_pools_exit() - after the hooks have freed all pools and the device is gone
 */
void tmem_pools_exit(void)
{
	WARN_ON(!list_empty(&tmem_pools));
	xa_destroy(&tmem_pools_live);
}
