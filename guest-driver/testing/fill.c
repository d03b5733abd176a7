// SPDX-License-Identifier: GPL-2.0-only
/*
 * Makes pools for tests, and fills the list of former pools beyond its limit, which operations of a
 * guest would reach after hours only.
 */
#include <linux/delay.h>
#include <linux/moduleparam.h>

#include "../core/core.h"

/* Largest number of pools that a test may request. */
#define FILL_MAX	4096
/* Attempts, 1 ms apart, to store the first entry, while the host has not confirmed the pool. */
#define POOL_RETRIES	10000

/**
 * tmem_test_pool() - make a pool, and wait until an entry of it can be stored
 * @key: set to the first object of the new pool, which has one entry
 * @name: name of the pool
 *
 * Return: 0 or an error; after an error there is no pool.
 */
int tmem_test_pool(struct tmem_key *key, const char *name)
{
	unsigned int retries = POOL_RETRIES;
	struct tmem_where where;

	*key = (struct tmem_key){ tmem_pool_new(name, false), 0 };
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

static int set_pools(const char *value, const struct kernel_param *param)
{
	struct tmem_pool *pool;
	unsigned int nr;
	int err;

	err = kstrtouint(value, 0, &nr);
	if (err || nr > FILL_MAX)
		return err ?: -EINVAL;
	while (nr--) {
		pool = tmem_pool_new("former", false);
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
