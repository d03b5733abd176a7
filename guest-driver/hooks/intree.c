// SPDX-License-Identifier: GPL-2.0-only
/*
 * Hooks that a kernel with the patches of intree/ calls itself. This file takes the place of
 * ftrace.c and tracepoints.c and has the same rules: tmem_target_add() adds a function, entry
 * functions run in any context, and a replacement calls the original by tmem_original().
 *
 * The kernel calls tmem_hook_...() while tmem_hooks_key is on. The key only saves time: each hook
 * checks under RCU whether it is registered. The code is never unloaded.
 */
#include <linux/export.h>
#include <linux/rcupdate.h>

#include "blocks.h"

/* Maximum number of targets: mm and VFS 8, bios 1, swap 2, self-test 1. */
#define TMEM_TARGETS_MAX 12

DEFINE_STATIC_KEY_FALSE(tmem_hooks_key);
EXPORT_SYMBOL_GPL(tmem_hooks_key);

/* Written in process context, by one task at a time. An entry below nr_targets never changes. */
static struct tmem_target targets[TMEM_TARGETS_MAX];
static unsigned int nr_targets;
static bool targets_on, probes_on;

DEFINE_PER_CPU(long, tmem_nr_inside);

/* Returns the target of a hook, or NULL. */
static const struct tmem_target *find_target(enum tmem_hook hook)
{
	/*
	 * Read the number before the entries, so that all entries below nr are complete. Pairs with
	 * tmem_target_add().
	 */
	unsigned int i, nr = smp_load_acquire(&nr_targets);

	for (i = 0; i < nr; i++)
		if (targets[i].hook == hook)
			return &targets[i];
	return NULL;
}

/*
 * Calls the entry function of a hook, and returns the replacement of the kernel's function, or
 * NULL. If there is a replacement, the task counts as a task inside the replacement until the
 * caller calls tmem_leave().
 */
static void *hook_enter(enum tmem_hook hook, struct tmem_args args)
{
	const struct tmem_target *target = NULL;
	void *wrap = NULL;

	rcu_read_lock();
	if (READ_ONCE(targets_on))
		target = find_target(hook);
	if (!target)
		goto unlock;
	if (unlikely(READ_ONCE(tmem_selftest_mapping)))
		tmem_selftest_saw_call(target->hook);
	if (tmem_hook_off(target->hook))
		goto unlock;
	if (target->entry)
		target->entry(&args);
	if (target->wrap && (!target->wanted || target->wanted(&args))) {
		wrap = target->wrap;
		tmem_enter();
	}
unlock:
	rcu_read_unlock();
	return wrap;
}

#define ARGS(...) ((struct tmem_args){ .value = { __VA_ARGS__ } })
#define ARG(pointer) ((unsigned long)(pointer))

/* --- called by the kernel ------------------------------------------------------------------ */

/*
 * Handles a folio that is about to leave the page cache. Its mapping, index and contents are valid,
 * the i_pages lock is held, and interrupts are off.
 */
void tmem_hook_removed(struct folio *folio)
{
	rcu_read_lock();
	if (READ_ONCE(probes_on))
		tmem_probe_removed(NULL, folio);
	rcu_read_unlock();
}

/*
 * Handles folios whose last reference is gone, before they are freed. Context: any but NMI; does
 * not sleep.
 */
void tmem_hook_free(struct folio_batch *folios)
{
	hook_enter(TMEM_HOOK_FREE, ARGS(ARG(folios)));
}

/* Handles a folio that becomes dirty. The i_pages lock is held, and interrupts are off. */
void tmem_hook_dirty(struct folio *folio, struct address_space *mapping)
{
	rcu_read_lock();
	if (READ_ONCE(probes_on))
		tmem_probe_dirty(NULL, folio, mapping);
	rcu_read_unlock();
}

/*
 * Handles a bio that is being submitted, whose sectors count from the beginning of its partition.
 * Returns true if submit_bio() must return, because the driver has taken the bio. Context: process;
 * waits for nothing, but may reschedule.
 */
bool tmem_hook_submit_bio(struct bio *bio)
{
	bool taken;

	/* Do not call the replacement of submit_bio() that hook_enter() returns. */
	if (!hook_enter(TMEM_HOOK_BIO, ARGS(ARG(bio))))
		return false;
	taken = tmem_bio_begin(bio);
	tmem_leave();
	return taken;
}

/* Handles a bio on its way to a disk. */
void tmem_hook_bio_queue(struct bio *bio)
{
	rcu_read_lock();
	if (READ_ONCE(probes_on))
		tmem_probe_bio_queue(NULL, bio);
	rcu_read_unlock();
}

/* Handles a request that a disk begins to process. Context: any but NMI. */
void tmem_hook_rq_issue(struct request *rq)
{
	rcu_read_lock();
	if (READ_ONCE(probes_on))
		tmem_probe_rq_issue(NULL, rq);
	rcu_read_unlock();
}

/* Handles the entry of drop_slab(). */
void tmem_hook_drop_slab(void)
{
	hook_enter(TMEM_HOOK_DROP_SLAB, ARGS(0));
}

/* Handles a task that is about to evict up to a few dozen folios, and may sleep. */
void tmem_hook_reclaim(void)
{
	void (*wrap)(void);

	wrap = hook_enter(TMEM_HOOK_RECLAIM, ARGS(0));
	if (!wrap)
		return;
	wrap();
	tmem_leave();
}

/* Handles slots of a swap area that are freed, with locks of the area. Context: any but NMI. */
void tmem_hook_swap_freed(unsigned int type, unsigned long first, unsigned int nr)
{
	hook_enter(TMEM_HOOK_SWAP, ARGS(type, first, nr));
}

/* Handles the entry of folio_migrate_flags(). */
void tmem_hook_migrate(struct folio *to, struct folio *from)
{
	hook_enter(TMEM_HOOK_MIGRATE, ARGS(ARG(to), ARG(from)));
}

#if TMEM_HAS_RA_ORDER
/* Handles the entry of page_cache_ra_order(). */
void tmem_hook_ra_order(struct readahead_control *rac, struct file_ra_state *ra)
{
	hook_enter(TMEM_HOOK_READAHEAD, ARGS(ARG(rac), ARG(ra)));
}
#endif

/* Handles a file system that was just mounted, with s_umount held for writing. */
void tmem_hook_mounted(struct super_block *sb)
{
	/*
	 * Do not call the replacement of security_sb_set_mnt_opts() that hook_enter() returns if
	 * the mount hook is on: the kernel has already called the function itself.
	 */
	if (!hook_enter(TMEM_HOOK_MOUNT, ARGS(ARG(sb))))
		return;
	tmem_fs_mounted(sb);
	tmem_leave();
}

/* Runs generic_shutdown_super() with its hook. */
void tmem_hook_generic_shutdown_super(struct super_block *sb)
{
	void (*wrap)(struct super_block *sb);

	wrap = hook_enter(TMEM_HOOK_UNMOUNT, ARGS(ARG(sb)));
	if (!wrap) {
		__generic_shutdown_super(sb);
		return;
	}
	wrap(sb);
	tmem_leave();
}

/* Runs generic_fadvise() with its hook. */
int tmem_hook_generic_fadvise(struct file *file, loff_t offset, loff_t len, int advice)
{
	int (*wrap)(struct file *file, loff_t offset, loff_t len, int advice);
	int ret;

	wrap = hook_enter(TMEM_HOOK_FADVISE, ARGS(ARG(file)));
	if (!wrap)
		return __generic_fadvise(file, offset, len, advice);
	ret = wrap(file, offset, len, advice);
	tmem_leave();
	return ret;
}

/* --- called by the driver ------------------------------------------------------------------ */

/* Removes all targets. The caller has stopped the hooks. */
void tmem_targets_reset(void)
{
	nr_targets = 0;
}

/*
 * Watches a function; @target is copied. Context: process, one call at a time, before
 * tmem_targets_start() or after it. Returns 0; -ENOSPC if there are TMEM_TARGETS_MAX targets;
 * -EEXIST if the hook has a target.
 */
int tmem_target_add(const struct tmem_target *target)
{
	if (find_target(target->hook))
		return -EEXIST;
	if (nr_targets == TMEM_TARGETS_MAX)
		return -ENOSPC;
	targets[nr_targets] = *target;
	/* Complete the entry before counting it; pairs with find_target(). */
	smp_store_release(&nr_targets, nr_targets + 1);
	if (targets_on)
		tmem_hooks_set(target->hook);
	return 0;
}

/* Begins to watch all functions added so far. Returns 0. */
int tmem_targets_start(void)
{
	unsigned int i;

	WRITE_ONCE(targets_on, true);
	static_branch_inc(&tmem_hooks_key);
	for (i = 0; i < nr_targets; i++)
		tmem_hooks_set(targets[i].hook);
	return 0;
}

/* Stops watching all functions; tmem_targets_drain() then waits. Returns true. */
bool tmem_targets_stop(void)
{
	if (targets_on)
		static_branch_dec(&tmem_hooks_key);
	WRITE_ONCE(targets_on, false);
	return true;
}

/*
 * Waits until no task is inside a hook, after tmem_targets_stop(). A task checks whether the hooks
 * are on and counts itself in one RCU section. So after a grace period, the count includes all
 * tasks that found the hooks on.
 */
void tmem_targets_drain(void)
{
	synchronize_rcu();
	tmem_users_wait(&tmem_nr_inside);
}

/* Begins to call the driver's probe functions (put.c, bio.c). Returns 0. */
int tmem_probes_register(void)
{
	WRITE_ONCE(probes_on, true);
	static_branch_inc(&tmem_hooks_key);
	return 0;
}

/* Stops calling the driver's probe functions, and waits until none runs. */
void tmem_probes_unregister(void)
{
	if (probes_on)
		static_branch_dec(&tmem_hooks_key);
	WRITE_ONCE(probes_on, false);
	synchronize_rcu();
}
