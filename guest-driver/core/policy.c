// SPDX-License-Identifier: GPL-2.0-only
/*
 * Files whose pages are never put because a user requested that.
 *
 * A policy is an inode number and the generation of the inode, so that it does not apply to the
 * next inode with this number. It is a preference of the user, and coherence does not depend on it.
 * The caller sets the policy before it empties the pool. The pool then takes no put until the puts
 * that may have missed the policy have ended.
 */
#include <linux/slab.h>

#include "budget.h"

/*
 * Maximum number of files with a policy in one file system. Policies of this many neighbouring
 * inode numbers, as in one directory, take about 600 KiB.
 */
#define POLICIES_MAX		65536
/*
 * Policies of all pools may take the limit of the index in bytes, divided by this number. A policy
 * takes TMEM_NODE_BYTES for each level of the XArray if no other policy has an inode number near
 * it. With inode numbers of 32 bits, the XArray has up to six levels.
 */
#define POLICY_DIVISOR		8

struct tmem_policies {
	/* generations of inodes with a policy, by inode number; its lock also guards nr_nodes */
	struct xarray never;
	u32 nr_nodes;		/* nodes of never */
	unsigned int nr;	/* number of policies; written under the lock of never */
};

static atomic_long_t policy_bytes;	/* bytes of all policies; part of tmem_index_used_bytes */

static void charge(long bytes)
{
	atomic_long_add(bytes, &policy_bytes);
	atomic_long_add(bytes, &tmem_index_used_bytes);
}

static bool room_for(long bytes)
{
	return atomic_long_read(&policy_bytes) + bytes <= tmem_index_limit() / POLICY_DIVISOR;
}

/* Sets up the policies of a new pool, which are empty. Returns 0 or -ENOMEM. */
int tmem_policy_init(struct tmem_pool *pool)
{
	pool->policies = kzalloc(sizeof(*pool->policies), GFP_KERNEL);
	if (!pool->policies)
		return -ENOMEM;
	xa_init(&pool->policies->never);
	return 0;
}

/* Frees the policies of a pool that is no longer in use. */
void tmem_policy_free(struct tmem_pool *pool)
{
	xa_destroy(&pool->policies->never);
	charge(-TMEM_NODE_BYTES * pool->policies->nr_nodes);
	kfree(pool->policies);
}

bool tmem_policy_never(struct tmem_pool *pool, u64 ino, u32 igen)
{
	struct tmem_policies *policies = pool->policies;

	return READ_ONCE(policies->nr) && xa_load(&policies->never, ino) == xa_mk_value(igen);
}

/* Also called when the inode is deleted. Context: any but NMI; cannot fail. */
void tmem_policy_forget(struct tmem_pool *pool, u64 ino)
{
	struct tmem_policies *policies = pool->policies;
	unsigned long flags;
	u32 before;

	if (!READ_ONCE(policies->nr) || !xa_load(&policies->never, ino))
		return;
	xa_lock_irqsave(&policies->never, flags);
	before = policies->nr_nodes;
	if (tmem_nodes_erase(&policies->never, ino, &policies->nr_nodes)) {
		WRITE_ONCE(policies->nr, policies->nr - 1);
		charge(-TMEM_NODE_BYTES * (before - policies->nr_nodes));
	}
	xa_unlock_irqrestore(&policies->never, flags);
}

/*
 * The inode's entries stay. The caller erases them afterwards. Returns 0, -ENOSPC if there are too
 * many policies, or -ENOMEM. Context: any but NMI.
 */
int tmem_policy_forbid(struct tmem_pool *pool, u64 ino, u32 igen)
{
	struct tmem_policies *policies = pool->policies;
	unsigned long flags;
	int err = -ENOSPC;
	u32 before;
	bool fresh;

	xa_lock_irqsave(&policies->never, flags);
	before = policies->nr_nodes;
	fresh = !xa_load(&policies->never, ino);
	if (!fresh || (policies->nr < POLICIES_MAX &&
		       room_for(tmem_nodes_missing(&policies->never, ino) * TMEM_NODE_BYTES)))
		err = tmem_nodes_store(&policies->never, ino, xa_mk_value(igen),
				       &policies->nr_nodes);
	charge((policies->nr_nodes - before) * TMEM_NODE_BYTES);
	if (!err && fresh)
		WRITE_ONCE(policies->nr, policies->nr + 1);
	xa_unlock_irqrestore(&policies->never, flags);
	if (!err)
		tmem_index_make_room();
	return err;
}
