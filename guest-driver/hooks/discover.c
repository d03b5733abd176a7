// SPDX-License-Identifier: GPL-2.0-only
/*
 * Discovery: finds mounts of the file system types that the driver serves, and registers and
 * removes them. It also empties pools.
 *
 * A work item runs the discovery in process context. fs.c queues the work item when a hook sees a
 * page of an unknown mount. A mount that is made while the hooks are live is registered at once.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/fs.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "blocks.h"
#include "fs.h"

static unsigned int nr_fs;	/* number of entries in tmem_fs_hash; written under tmem_fs_lock */
/* Guards tmem_fs_types[], the registration of file systems, and the variable found. */
static DEFINE_MUTEX(discovery_lock);
static unsigned int found;	/* grows with each registered file system */

/*
 * Reports to the core which types are served, and which mounts are not served, with the reasons.
 * The core shows them in sysfs and in the report.
 */
static void tmem_fs_report(void)
{
	static DEFINE_MUTEX(lock);
	static char note[TMEM_NOTE_BYTES];	/* guarded by @lock */
	static char state[TMEM_NOTE_BYTES];	/* guarded by @lock */
	const struct tmem_fs_type *type;
	u64 served = 0, block;
	struct tmem_fs *fs;
	unsigned int i;
	size_t len = 0;

	mutex_lock(&lock);
	*note = '\0';
	for (type = tmem_fs_types; type->name; type++)
		if (READ_ONCE(type->active))
			served |= BIT_ULL(type->report_bit);
	spin_lock_irq(&tmem_fs_lock);
	hash_for_each(tmem_fs_hash, i, fs, node) {
		if (!*fs->refused && !tmem_pool_why(fs->pool, &block))
			continue;
		tmem_fs_state(fs, state, sizeof(state));
		len += scnprintf(note + len, sizeof(note) - len, "%s%s is %s", len ? "; " : "",
				 kobject_name(&fs->kobj), state);
	}
	spin_unlock_irq(&tmem_fs_lock);
	tmem_core_set_served(served, note);
	mutex_unlock(&lock);
}

/* Frees a file system that hooks can no longer find. */
static void tmem_fs_free(struct tmem_fs *fs)
{
	tmem_mount_remove(fs);
	tmem_users_wait(&fs->cpu->users);
	tmem_area_free(fs->area);
	tmem_bdev_put(fs->bdev);
	tmem_pool_free(fs->pool);
	free_percpu(fs->cpu);
	kfree_rcu(fs, rcu);
}

/*
 * Removes a file system that is about to be shut down. The caller holds s_umount for writing, so
 * the discovery cannot register it again. All files are closed, so no task begins a get.
 */
void tmem_fs_drop(const struct super_block *sb)
{
	struct tmem_fs *fs;
	bool report;

	spin_lock_irq(&tmem_fs_lock);
	fs = tmem_fs_find(sb);
	if (fs) {
		hash_del_rcu(&fs->node);
		nr_fs--;
	}
	spin_unlock_irq(&tmem_fs_lock);
	if (!fs)
		return;
	WRITE_ONCE(fs->live, false);
	synchronize_rcu_expedited();
	report = *fs->refused || tmem_pool_is_wrong(fs->pool);
	tmem_fs_free(fs);
	if (report)
		tmem_fs_report();
}

/*
 * Makes a file system, or a swap area if @sb stands for one. If the driver refuses it, the refusal
 * lasts until it is unmounted. If @new is true, the file system is being mounted. @refused_why is
 * NULL, or why a swap area is refused. The caller's references to @bdev, which may be NULL, go to
 * the file system, or are released.
 */
static struct tmem_fs *fs_new(struct super_block *sb, struct tmem_fs_type *type,
			      struct block_device *bdev, const char *refused_why, bool new)
{
	struct tmem_fs *fs = kzalloc(sizeof(*fs), GFP_KERNEL);
	char why[TMEM_REFUSED_BYTES - sizeof("refused: ")], name[BDEVNAME_SIZE];
	bool is_swap = tmem_is_swap(sb), refused = false;
	sector_t start;
	u64 nr;

	if (!fs) {
		tmem_bdev_put(bdev);
		return NULL;
	}
	fs->sb = sb;
	fs->type = type;
	fs->cpu = alloc_percpu(struct tmem_fs_cpu);
	if (is_swap)
		snprintf(name, sizeof(name), "%pg", bdev);
	else
		strscpy(name, sb->s_id, sizeof(name));
	fs->pool = fs->cpu ? tmem_pool_new(name, is_swap && !TMEM_WITHOUT(PRIVATE)) : NULL;
	if (!fs->pool) {
		tmem_bdev_put(bdev);
		free_percpu(fs->cpu);
		kfree(fs);
		return NULL;
	}
	fs->bdev = bdev;
	if (!bdev) {
		fs->no_area = "the driver does not find the disk";
	} else if (refused_why) {
		refused = true;
		strscpy(why, refused_why, sizeof(why));
	} else {
		refused = tmem_refuse(is_swap ? NULL : sb, bdev, why, sizeof(why));
	}
	if (refused) {
		snprintf(fs->refused, sizeof(fs->refused), "refused: %s", why);
		pr_notice("%s on %s is %s\n", type->name, name, fs->refused);
	} else if (bdev) {
		start = is_swap ? tmem_swap_start(tmem_swap_type_of(sb)) : get_start_sect(bdev);
		nr = is_swap ? tmem_swap_slots(sb) : bdev_nr_sectors(bdev) / TMEM_BLOCK_SECTORS;
		/*
		 * Only btrfs has no s_bdev. It may write before the hook of mounts runs, so the
		 * driver may have missed writes, and the area does not count as seen from its
		 * start.
		 *
		 * A swap area counts as seen from its start: a transfer of a slot begins only after
		 * the last one has ended. A folio under writeback stays in the swap cache, and the
		 * kernel uses a slot that it discards only after the discard. While it hibernates,
		 * readahead may read a slot that is being written, but no process has that slot.
		 */
		fs->area = tmem_area_new(sb, bdev, start, nr,
					 is_swap || (new && !type->has_no_bdev), &fs->no_area);
	}
	if (tmem_mount_add(fs, is_swap ? bdev->bd_dev : sb->s_dev)) {
		tmem_fs_free(fs);
		return NULL;
	}
	return fs;
}

/* Empties the pool of a file system, as was requested, and lets it take pages again. Sleeps. */
void tmem_fs_refill(struct tmem_fs *fs)
{
	/* If another flush is requested meanwhile, it follows. */
	WRITE_ONCE(fs->flush, false);
	tmem_pool_empty(fs->pool);
	tmem_fs_start(fs);
	tmem_fs_report();
}

/* Registers a file system or swap area, so that its pages are put and got. */
static void fs_register(struct tmem_fs *fs)
{
	lockdep_assert_held(&discovery_lock);
	spin_lock_irq(&tmem_fs_lock);
	hash_add_rcu(tmem_fs_hash, &fs->node, (unsigned long)fs->sb);
	nr_fs++;
	spin_unlock_irq(&tmem_fs_lock);
	found++;
	tmem_fs_start(fs);
	if (!fs->type->active || *fs->refused) {
		WRITE_ONCE(fs->type->active, true);
		tmem_fs_report();
	}
}

/*
 * Serves a swap area, or refuses it if @why is not NULL. The caller's references to the device go
 * to it, or are released. Returns NULL without memory. tmem_fs_drop() ends it.
 */
struct tmem_fs *tmem_fs_serve_swap(unsigned int type, struct block_device *bdev, const char *why)
{
	struct tmem_fs *fs = NULL;

	mutex_lock(&discovery_lock);
	if (!tmem_fs_stopped && READ_ONCE(nr_fs) < TMEM_FS_MAX)
		fs = fs_new((struct super_block *)tmem_swap_sb(type), &tmem_swap_type, bdev, why,
			    false);
	else
		tmem_bdev_put(bdev);
	if (fs)
		fs_register(fs);
	mutex_unlock(&discovery_lock);
	return fs;
}

/*
 * Registers a mounted file system, so that its pages are put and got, or empties its pool if that
 * was requested. The caller holds s_umount, and @sb is alive. If @new is true, it is being mounted.
 */
static void serve(struct super_block *sb, struct tmem_fs_type *type, bool new)
{
	struct tmem_fs *fs;

	mutex_lock(&discovery_lock);
	if (tmem_fs_stopped || (!sb->s_bdev && !type->has_no_bdev) || !sb->s_root)
		goto unlock;
	/* s_umount and discovery_lock keep @fs from being freed. */
	rcu_read_lock();
	fs = tmem_fs_find(sb);
	rcu_read_unlock();
	if (fs && READ_ONCE(fs->flush))
		tmem_fs_refill(fs);
	if (fs || READ_ONCE(nr_fs) >= TMEM_FS_MAX)
		goto unlock;
	fs = fs_new(sb, type, tmem_bdev_get(sb), NULL, new);
	if (fs)
		fs_register(fs);
unlock:
	mutex_unlock(&discovery_lock);
}

static void tmem_fs_seen(struct super_block *sb, void *arg)
{
	serve(sb, arg, false);
}

/* Serves a file system that was mounted just now. The caller holds s_umount. */
void tmem_fs_mounted(struct super_block *sb)
{
	unsigned int i;

	for (i = 0; i < NR_TMEM_FS_TYPES; i++) {
		struct tmem_fs_type *type = &tmem_fs_types[i];

		if (strcmp(sb->s_type->name, type->name))
			continue;
		if (READ_ONCE(type->fst))
			/* A file system that is mounted a second time has written already. */
			serve(sb, type, atomic_read(&sb->s_active) == 1);
		else
			tmem_fs_note(sb);
	}
}

/*
 * Returns the type whose super blocks the discovery examines. On Linux 6.1, super blocks of btrfs
 * have another type than the one that is registered.
 */
static struct file_system_type *type_of_supers(const struct tmem_fs_type *type)
{
	struct file_system_type *seen = READ_ONCE(type->seen);

	/* The module may have been unloaded and loaded again since. */
	if (!seen || (type->fst->owner && !within_module((unsigned long)seen, type->fst->owner)))
		return type->fst;
	return seen;
}

static void discover_fn(struct work_struct *work)
{
	unsigned int found_before = READ_ONCE(found), i;

	/* A hook may have queued this work item just after tmem_fs_stop() cancelled it. */
	if (READ_ONCE(tmem_fs_stopped))
		return;
	for (i = 0; i < NR_TMEM_FS_TYPES; i++) {
		struct tmem_fs_type *type = &tmem_fs_types[i];

		/*
		 * Clear the bit before the search. If a hook sees an unknown mount during the
		 * search, it sets the bit and starts another search.
		 */
		if (test_and_clear_bit(i, &tmem_fs_types_noted)) {
			/*
			 * Keep the module of the file system loaded until this module is unloaded.
			 */
			if (!type->fst)
				WRITE_ONCE(type->fst, get_fs_type(type->name));
			if (type->fst)
				iterate_supers_type(type_of_supers(type), tmem_fs_seen, type);
		}
	}
	if (READ_ONCE(found) != found_before)
		WRITE_ONCE(tmem_fs_fruitless, 0);
	else if (tmem_fs_fruitless < TMEM_FRUITLESS_MAX)
		WRITE_ONCE(tmem_fs_fruitless, tmem_fs_fruitless + 1);
}

/* Sets up the work item, once, before any hook can queue it. */
void tmem_fs_setup(void)
{
	INIT_DELAYED_WORK(&tmem_fs_discovery, discover_fn);
}

/* Looks for mounted file systems. The state in sysfs names those that cannot be served. */
void tmem_fs_init(void)
{
	unsigned int i;

	tmem_fs_types_noted = 0;
	tmem_fs_fruitless = 0;
	mutex_lock(&discovery_lock);
	WRITE_ONCE(tmem_fs_stopped, false);
	mutex_unlock(&discovery_lock);
	for (i = 0; i < NR_TMEM_FS_TYPES; i++)
		if (tmem_fs_types[i].at_load)
			set_bit(i, &tmem_fs_types_noted);
	schedule_delayed_work(&tmem_fs_discovery, 0);
	/* Wait for the discovery, so that mounted file systems are served when insmod returns. */
	flush_delayed_work(&tmem_fs_discovery);
}

/* Stops looking for file systems. The caller then removes the hooks, and calls tmem_fs_exit(). */
void tmem_fs_stop(void)
{
	mutex_lock(&discovery_lock);
	WRITE_ONCE(tmem_fs_stopped, true);
	mutex_unlock(&discovery_lock);
	cancel_delayed_work_sync(&tmem_fs_discovery);
}

/* Frees all file systems, after all hooks were removed. tmem_fs_init() may then begin again. */
void tmem_fs_exit(void)
{
	struct tmem_fs_type *type;
	struct hlist_node *next;
	struct tmem_fs *fs;
	unsigned int i;

	hash_for_each_safe(tmem_fs_hash, i, next, fs, node) {
		spin_lock_irq(&tmem_fs_lock);
		hash_del_rcu(&fs->node);
		spin_unlock_irq(&tmem_fs_lock);
		/*
		 * Wait for tasks that are reading the state in sysfs and have already looked up
		 * this file system.
		 */
		synchronize_rcu_expedited();
		tmem_fs_free(fs);
	}
	/*
	 * A hook may have queued the work item just after tmem_fs_stop() cancelled it, because it
	 * had read tmem_fs_stopped before tmem_fs_stop() set it.
	 */
	cancel_delayed_work_sync(&tmem_fs_discovery);
	nr_fs = 0;
	for (type = tmem_fs_types; type->name; type++) {
		if (type->fst)
			module_put(type->fst->owner);
		WRITE_ONCE(type->fst, NULL);
		WRITE_ONCE(type->active, false);
		WRITE_ONCE(type->seen, NULL);
	}
	tmem_fs_report();
}
