// SPDX-License-Identifier: GPL-2.0-only
/*
 * Pools that must not be used any more, because a page was wrong: a page from the host differs from
 * the disk, or a page changed while the host retained it. That is evidence about one file system
 * only. The hooks put and get no page of such a pool, and empty it. It stays so until the file
 * system is mounted again.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include "../trace.h"
#include "core.h"

/* Context: any but NMI. The caller then lets the hooks empty the pool. */
void tmem_pool_wrong(struct tmem_pool *pool, const char *why, u64 block)
{
	tmem_count(TMEM_STAT_mismatches);
	trace_tmem_poison(why, block);
	if (test_and_set_bit(0, &pool->wrong))
		return;
	pool->wrong_block = block;
	/* Complete the block before the check; pairs with tmem_pool_why(). */
	smp_store_release(&pool->why, why);
	pr_crit("%s: a page was wrong (%s, block %llu): the file system is not cached until it is mounted again; check it\n",
		pool->name, why, block);
	tmem_dev_report_any();
}

bool tmem_pool_is_wrong(const struct tmem_pool *pool)
{
	return READ_ONCE(pool->wrong);
}

const char *tmem_pool_why(const struct tmem_pool *pool, u64 *block)
{
	/* Read the check before the block; pairs with tmem_pool_wrong(). */
	const char *why = smp_load_acquire(&pool->why);

	if (why)
		*block = pool->wrong_block;
	return why;
}
