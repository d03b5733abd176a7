// SPDX-License-Identifier: GPL-2.0-only
/*
 * Fills a bucket of the index and the list of former pools beyond their limits, which operations of
 * a guest would reach after hours only.
 */
#include <linux/delay.h>
#include <linux/moduleparam.h>
#include <linux/mutex.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/sysfs.h>

#include "../core/core.h"

/* Limit of the search for inodes of one bucket: some 4,000 of them in the smallest index. */
#define SEARCH_MAX	BIT(26)
/* Largest number of inodes and pools that a test may request. */
#define FILL_MAX	4096
/* Attempts, 1 ms apart, to store the first entry, while the host has not confirmed the pool. */
#define POOL_RETRIES	10000
#define INO		12

static DEFINE_MUTEX(fill_lock);

/**
 * tmem_test_pool() - make a pool, and wait until an entry of it can be stored
 * @key: set to the new pool, and to an inode that has one entry
 * @name: name of the pool
 *
 * Return: 0 or an error; after an error there is no pool.
 */
int tmem_test_pool(struct tmem_key *key, const char *name)
{
	unsigned int retries = POOL_RETRIES;
	struct tmem_where where;

	*key = (struct tmem_key){ tmem_pool_new(name, NULL), INO, 1 };
	if (!key->pool)
		return -ENOMEM;
	while (tmem_index_store(key, 0, 1, &where)) {
		if (!retries--) {
			tmem_pool_free(key->pool);
			return -ETIMEDOUT;
		}
		fsleep(USEC_PER_MSEC);
	}
	return 0;
}

/**
 * tmem_test_fill_bucket() - store an entry of each of many inodes of one bucket
 * @key: pool, and the inode whose bucket is filled; its inode number changes
 * @ino: set to the numbers of the inodes whose entry was stored, in this order
 * @nr: number of inodes
 *
 * Return: number of inodes whose entry was stored.
 */
unsigned long tmem_test_fill_bucket(struct tmem_key *key, u64 *ino, unsigned long nr)
{
	u32 bucket = tmem_index_bucket(key);
	u64 first = key->ino + 1;
	struct tmem_where where;
	unsigned long stored = 0;
	u32 i;

	for (i = 0; i < SEARCH_MAX && stored < nr; i++) {
		key->ino = first + i;
		if (!(i % 4096))
			cond_resched();
		if (tmem_index_bucket(key) != bucket)
			continue;
		if (tmem_index_store(key, 0, 1, &where))
			break;
		ino[stored++] = key->ino;
	}
	return stored;
}

static struct {
	unsigned long stored, held, first;
} result;

static int set_bucket(const char *value, const struct kernel_param *param)
{
	struct tmem_key key;
	unsigned int nr, i;
	int err;
	u64 *ino;

	err = kstrtouint(value, 0, &nr);
	if (err || nr > FILL_MAX)
		return err ?: -EINVAL;
	ino = kvcalloc(nr, sizeof(*ino), GFP_KERNEL);
	if (!ino)
		return -ENOMEM;
	mutex_lock(&fill_lock);
	err = tmem_test_pool(&key, "bucket");
	if (err)
		goto unlock;
	tmem_invalidate_inode(key.pool, INO, TMEM_INVAL_INODE);
	result.stored = tmem_test_fill_bucket(&key, ino, nr);
	result.held = 0;
	result.first = nr;
	for (i = 0; i < result.stored; i++) {
		key.ino = ino[i];
		if (!tmem_held_pages(&key))
			continue;
		result.held++;
		result.first = min_t(unsigned long, result.first, i);
	}
	tmem_pool_free(key.pool);
unlock:
	mutex_unlock(&fill_lock);
	kvfree(ino);
	return err;
}

static int get_bucket(char *buffer, const struct kernel_param *param)
{
	return sysfs_emit(buffer, "%lu %lu %lu\n", result.stored, result.held, result.first);
}

static const struct kernel_param_ops bucket_ops = {
	.set = set_bucket,
	.get = get_bucket,
};
module_param_cb(test_bucket, &bucket_ops, NULL, 0600);
MODULE_PARM_DESC(test_bucket, "TEST: writing n stores entries of n inodes of one bucket; reads as the number of entries that were stored, the number that is held afterwards, and the place of the oldest held one");

static int set_pools(const char *value, const struct kernel_param *param)
{
	struct tmem_pool *pool;
	unsigned int nr;
	int err;

	err = kstrtouint(value, 0, &nr);
	if (err || nr > FILL_MAX)
		return err ?: -EINVAL;
	while (nr--) {
		pool = tmem_pool_new("former", NULL);
		if (!pool)
			return -ENOMEM;
		tmem_pool_free(pool);
	}
	return 0;
}

static const struct kernel_param_ops pools_ops = {
	.set = set_pools,
};
module_param_cb(test_pools, &pools_ops, NULL, 0200);
MODULE_PARM_DESC(test_pools, "TEST: writing n makes n pools and frees each at once; fails if a pool cannot be made");
