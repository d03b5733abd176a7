// SPDX-License-Identifier: GPL-2.0-only
/*
 * Inodes that must not be put, however clean their pages look: swap files, files open for direct
 * writing and the like. A mark in an XArray of the pool, by inode number.
 *
 * A mark is set and the inode's object detached under the lock of its bucket, where each put looks
 * again: a put that comes later sees the mark. Marks are few and their memory is bounded; if one
 * cannot be stored, all of the pool is marked. Never waits, never fails.
 */
#include "index.h"

/* Bypassed inodes a pool; above, the pool takes no puts. */
#define BYPASSED_MAX		4096
/* The same if the marks of all pools would take more than this part of the index's memory. */
#define BYPASS_DIVISOR		4

static atomic_long_t bypass_bytes;	/* of the marks; part of tmem_index_used_bytes */

/* Marks come before entries, which make room for them: their memory is not asked for but taken. */
static void charge_marks(long bytes)
{
	atomic_long_add(bytes, &bypass_bytes);
	atomic_long_add(bytes, &tmem_index_used_bytes);
}

static bool room_for_mark(long bytes)
{
	return atomic_long_read(&bypass_bytes) + bytes <=
	       (tmem_index_limit() - tmem_table_bytes()) / BYPASS_DIVISOR;
}

/**
 * tmem_bypass() - take no puts for an inode, and erase its pages
 * @pool: file system
 * @ino: inode number
 * @why: for the counters
 *
 * Context: any but NMI. If the mark cannot be stored, the pool takes no puts until it is freed.
 * Marks may push the index over its limit for the time until the evictor, woken here, has run.
 */
void tmem_bypass(struct tmem_pool *pool, u64 ino, enum tmem_inval why)
{
	u32 nr = bucket_of(pool, ino);
	struct object *object;
	unsigned long flags;

	spin_lock_irqsave(&tmem_buckets[nr].lock, flags);
	xa_lock(&pool->bypass);
	if (!xa_load(&pool->bypass, ino) && !pool->bypass_all) {
		long bytes = tmem_alone_in_node(&pool->bypass, ino) ? sizeof(struct xa_node) : 0;

		if (pool->nr_bypassed >= BYPASSED_MAX || !room_for_mark(bytes) ||
		    xa_is_err(__xa_store(&pool->bypass, ino, xa_mk_value(1), GFP_INDEX))) {
			WRITE_ONCE(pool->bypass_all, true);
		} else {
			pool->nr_bypassed++;
			charge_marks(bytes);
		}
	}
	xa_unlock(&pool->bypass);
	object = find_object(&tmem_buckets[nr], pool, ino);
	if (object)
		tmem_object_detach(nr, object, why);
	spin_unlock_irqrestore(&tmem_buckets[nr].lock, flags);
	tmem_index_make_room();
}

/**
 * tmem_is_bypassed() - is an inode marked by tmem_bypass()?
 * @pool: file system
 * @ino: inode number
 *
 * Return: true if puts of it are refused.
 */
bool tmem_is_bypassed(struct tmem_pool *pool, u64 ino)
{
	return bypassed(pool, ino);
}

/**
 * tmem_unbypass() - take puts for an inode again
 * @pool: file system
 * @ino: inode number
 *
 * Context: any but NMI.
 */
void tmem_unbypass(struct tmem_pool *pool, u64 ino)
{
	u32 nr = bucket_of(pool, ino);
	unsigned long flags;

	spin_lock_irqsave(&tmem_buckets[nr].lock, flags);
	xa_lock(&pool->bypass);
	if (__xa_erase(&pool->bypass, ino)) {
		pool->nr_bypassed--;
		if (tmem_alone_in_node(&pool->bypass, ino))
			charge_marks(-(long)sizeof(struct xa_node));
	}
	xa_unlock(&pool->bypass);
	spin_unlock_irqrestore(&tmem_buckets[nr].lock, flags);
}

/**
 * tmem_bypass_free() - forget all marks of a pool that nobody uses any more
 * @pool: file system
 */
void tmem_bypass_free(struct tmem_pool *pool)
{
	unsigned long i, node = ULONG_MAX;
	void *mark;

	xa_for_each(&pool->bypass, i, mark) {
		if (!i || i >> XA_CHUNK_SHIFT == node)
			continue;
		node = i >> XA_CHUNK_SHIFT;
		charge_marks(-(long)sizeof(struct xa_node));
	}
	xa_destroy(&pool->bypass);
}
