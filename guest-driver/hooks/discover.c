// SPDX-License-Identifier: GPL-2.0-only
/*
 * Discovery: finds mounts of the file system types that the driver serves, hooks the functions of a
 * type when it finds the first mount, and registers and removes mounts. The discovery also sweeps
 * the marks of mounts.
 *
 * A work item runs the discovery in process context. fs.c queues the work item when a hook sees a
 * page of an unknown mount. A mount that is made while the hooks are live is registered at once.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pagemap.h>
#include <linux/slab.h>

#include "../compat.h"
#include "blocks.h"
#include "fs.h"

/*
 * Least number of seconds between two sweeps of the marks of a file system, because a sweep visits
 * all inodes in memory.
 */
#define TMEM_SWEEP_SECONDS 10

/* Maximum number of inodes that a search for a regular file visits, beginning with the newest. */
#define TMEM_SEARCH_INODES 4096

static unsigned int nr_fs;	/* number of entries in tmem_fs_hash; written under tmem_fs_lock */
/*
 * Guards tmem_fs_types[], the targets of attach.h, the registration of file systems, and the
 * variable found.
 */
static DEFINE_MUTEX(discovery_lock);
static unsigned int found;	/* grows with each hooked type and each registered file system */

/*
 * Reports to the core which types are served, and which types and mounts are not served, with the
 * reasons. The core shows them in sysfs and in the report.
 */
static void tmem_fs_report(void)
{
	static DEFINE_MUTEX(lock);
	static char note[TMEM_NOTE_BYTES];	/* guarded by @lock */
	const struct tmem_fs_type *type;
	u64 served = 0;
	struct tmem_fs *fs;
	unsigned int i;
	size_t len = 0;
	bool failed = false;

	mutex_lock(&lock);
	*note = '\0';
	for (type = tmem_fs_types; type->name; type++) {
		/* Read the flag before the text why_failed; pairs with tmem_fs_type_failed(). */
		failed |= smp_load_acquire(&type->failed);
		if (READ_ONCE(type->active))
			served |= BIT_ULL(type->report_bit);
	}
	for (type = tmem_fs_types; type->name && failed; type++) {
		if (READ_ONCE(type->active))
			len += scnprintf(note + len, sizeof(note) - len, "%s%s is served",
					 len ? "; " : "", type->name);
		else if (READ_ONCE(type->failed))
			len += scnprintf(note + len, sizeof(note) - len, "%s%s: %s",
					 len ? "; " : "", type->name, type->why_failed);
	}
	spin_lock_irq(&tmem_fs_lock);
	hash_for_each(tmem_fs_hash, i, fs, node) {
		char blocked[TMEM_BLOCKED_BYTES];
		const char *why = fs->mount->refused;

		if (tmem_fs_blocked(fs, blocked, sizeof(blocked)))
			why = blocked;
		if (*why)
			len += scnprintf(note + len, sizeof(note) - len, "%s%s is %s",
					 len ? "; " : "", kobject_name(&fs->mount->kobj), why);
	}
	spin_unlock_irq(&tmem_fs_lock);
	tmem_core_set_served(served, note);
	mutex_unlock(&lock);
}

/* Frees a file system that hooks can no longer find. */
static void tmem_fs_free(struct tmem_fs *fs)
{
	tmem_users_wait(&fs->cpu->users);
	tmem_verify_void_fs(fs);
	tmem_pool_free(fs->pool);
	free_percpu(fs->cpu);
	kfree_rcu(fs, rcu);
}

/* Frees a file system that was removed from the table, and its mount in sysfs. */
static void tmem_fs_remove(struct tmem_fs *fs)
{
	struct tmem_mount *mount = fs->mount;

	tmem_fs_free(fs);
	tmem_area_free(mount->area);
	tmem_mount_free(mount);
}

/**
 * tmem_fs_drop() - remove a file system that is about to be shut down
 * @sb: its super block
 *
 * The caller holds s_umount for writing, so the discovery cannot register it again. All files are
 * closed, so no task can be inside a get.
 */
void tmem_fs_drop(const struct super_block *sb)
{
	struct tmem_fs *fs;

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
	if (*fs->mount->refused || tmem_bypass_is_all(fs->pool))
		tmem_fs_report();
	tmem_fs_remove(fs);
}

struct aops_search {
	const struct tmem_fs_type *type;
	/* result: the operations of a regular file */
	const struct address_space_operations *aops;
	unsigned int searched;
};

static bool search_aops(struct inode *inode, void *arg)
{
	struct aops_search *search = arg;

	search->searched++;
	tmem_test_walk(0, search->searched);
	if (S_ISREG(inode->i_mode) && !IS_DAX(inode) && inode->i_mapping->a_ops &&
	    search->type->mapping_ok(inode->i_mapping))
		search->aops = inode->i_mapping->a_ops;
	return search->aops || search->searched == TMEM_SEARCH_INODES;
}

/*
 * Returns the operations of a regular file of @sb for which @type->mapping_ok() is true, or NULL.
 * The operations of all such files of the file system type @type contain the same hooked functions.
 */
static const struct address_space_operations *tmem_fs_aops(struct super_block *sb,
							   struct tmem_fs_type *type)
{
	struct aops_search search = { .type = type };

	tmem_fs_walk(sb, search_aops, &search);
	return search.aops;
}

static void tmem_fs_type_failed(struct tmem_fs_type *type, const char *function, int err)
{
	const char *remedy = "";

	if (err == -EBUSY)
		remedy = " (a live patch redirects it; remove the patch and load the module again)";
	snprintf(type->why_failed, sizeof(type->why_failed), "cannot hook %s: error %d%s",
		 function, err, remedy);
	pr_warn("%s is not served: %s\n", type->name, type->why_failed);
	/* Complete the text why_failed before setting the flag; pairs with tmem_fs_report(). */
	smp_store_release(&type->failed, true);
	tmem_fs_report();
}

/*
 * Functions that change blocks below the page cache or report errors, and that are in no table of
 * operations. The driver hooks them by their names.
 */
static const struct fs_symbol {
	const char *type;
	const char *name;
	enum tmem_hook hook;
	void (*entry)(struct tmem_args *args);
} symbols[] = {
	{ "ext4", "ext4_move_extents", TMEM_HOOK_MOVE_EXT, tmem_entry_move_ext },
	{ "ext4", "__ext4_warning", TMEM_HOOK_CONVERSION, tmem_entry_ext4_warning },
	{ "ext4", "jbd2_journal_abort", TMEM_HOOK_JOURNAL_ABORT, tmem_entry_journal_abort },
};

static void type_active(struct tmem_fs_type *type)
{
	WRITE_ONCE(type->active, true);
	found++;
	tmem_fs_report();
}

/* Hooks the functions of a type: first those for coherence, and then those that read pages. */
static void tmem_fs_type_activate(struct tmem_fs_type *type,
				  const struct address_space_operations *aops)
{
	const struct tmem_target targets[] = {
		{ (unsigned long)aops->swap_activate, TMEM_HOOK_SWAPON, tmem_entry_swapon },
		{ (unsigned long)aops->bmap, TMEM_HOOK_BMAP, tmem_entry_bmap },
		{ (unsigned long)aops->readahead, TMEM_HOOK_READAHEAD, NULL, tmem_wrap_readahead },
		{ (unsigned long)aops->read_folio, TMEM_HOOK_READ_FOLIO, NULL,
		  tmem_wrap_read_folio },
	};
	const struct fs_symbol *symbol;
	struct tmem_target target;
	unsigned int i;
	char its[32];
	int err;

	for (symbol = symbols; symbol < symbols + ARRAY_SIZE(symbols); symbol++) {
		if (strcmp(symbol->type, type->name))
			continue;
		target = (struct tmem_target){ .hook = symbol->hook, .entry = symbol->entry };
		err = tmem_target_add_name(symbol->name, &target);
		if (err) {
			tmem_fs_type_failed(type, symbol->name, err);
			return;
		}
	}
	for (i = 0; i < ARRAY_SIZE(targets); i++) {
		err = targets[i].addr ? tmem_target_add(&targets[i]) : -ENOENT;
		if (err) {
			snprintf(its, sizeof(its), "its %s", tmem_hook_names[targets[i].hook]);
			tmem_fs_type_failed(type, its, err);
			return;
		}
	}
	type_active(type);
}

/*
 * Creates the mount of a super block. If the driver refuses the mount, the refusal lasts until it
 * is unmounted. If @new is true, the file system is being mounted.
 */
static struct tmem_mount *mount_new(struct super_block *sb, struct tmem_fs_type *type, bool new)
{
	struct tmem_mount *mount = tmem_mount_new(sb, type);
	char why[TMEM_REFUSED_BYTES - sizeof("refused: ")];

	if (mount && tmem_refuse(sb, why, sizeof(why))) {
		snprintf(mount->refused, sizeof(mount->refused), "refused: %s", why);
		pr_notice("%s on %s is %s\n", type->name, sb->s_id, mount->refused);
	} else if (mount && tmem_blocks_mode) {
		mount->area = tmem_area_new(sb, new);
	}
	return mount;
}

/*
 * Registers a file system in three steps. First, it enters the file system into the table, so that
 * invalidations reach the pool. Second, it marks the inodes that may have changed while no hook
 * knew the file system: a task may have made a direct write, swapped to a file, or exchanged its
 * blocks. Third, it allows puts.
 *
 * To flush a file system, the driver replaces its pool by a new one. Marks and policies stay,
 * because both pools share them.
 */
static void tmem_fs_register(struct super_block *sb, struct tmem_fs_type *type, bool new)
{
	struct tmem_fs *fs, *old;
	bool marked = true;

	/* s_umount and discovery_lock keep @old from being freed. */
	rcu_read_lock();
	old = tmem_fs_find(sb);
	rcu_read_unlock();
	if (old ? !READ_ONCE(old->flush) : READ_ONCE(nr_fs) >= TMEM_FS_MAX)
		return;

	fs = kzalloc(sizeof(*fs), GFP_KERNEL);
	if (!fs)
		return;
	fs->sb = sb;
	fs->type = type;
	fs->cpu = alloc_percpu(struct tmem_fs_cpu);
	if (!fs->cpu)
		goto nomem;
	fs->pool = tmem_pool_new(sb->s_id, old ? old->pool : NULL);
	if (!fs->pool)
		goto nomem;
	fs->mount = old ? old->mount : mount_new(sb, type, new);
	if (!fs->mount)
		goto nomem_mount;
	spin_lock_irq(&tmem_fs_lock);
	if (old) {
		hlist_replace_rcu(&old->node, &fs->node);
	} else {
		hash_add_rcu(tmem_fs_hash, &fs->node, (unsigned long)sb);
		nr_fs++;
	}
	spin_unlock_irq(&tmem_fs_lock);
	found++;

	/* Wait for tasks that looked the file system up before it was in the table. */
	synchronize_rcu_expedited();

	if (old) {
		TMEM_HOLD(replace);
		tmem_fs_free(old);
	} else if (!*fs->mount->refused && tmem_blocks_mode != TMEM_BLOCKS_ON) {
		marked = tmem_fs_mark_suspects(fs, sb);
	}
	if (!marked)
		tmem_fs_sweep_soon(fs);

	mutex_lock(&tmem_fs_switch_lock);
	if (!type->off && !fs->mount->off && !*fs->mount->refused)
		/*
		 * The marks are set before "live". read_begin() and put_folio() read "live" first,
		 * so they see the marks if they see "live".
		 */
		smp_store_release(&fs->live, true);
	mutex_unlock(&tmem_fs_switch_lock);
	if (*fs->mount->refused)
		tmem_fs_report();
	return;
nomem_mount:
	tmem_pool_free(fs->pool);
nomem:
	free_percpu(fs->cpu);
	kfree(fs);
}

/*
 * Registers a mounted file system, so that its pages are put and got. The caller holds s_umount,
 * and @sb is alive. If @new is true, it is being mounted.
 */
static void serve(struct super_block *sb, struct tmem_fs_type *type, bool new)
{
	const struct address_space_operations *aops;

	mutex_lock(&discovery_lock);
	if (tmem_fs_stopped || type->failed || !sb->s_bdev || !sb->s_root)
		goto unlock;
	/* With keys of blocks, no function of a file system is hooked. */
	if (!type->active && tmem_blocks_mode == TMEM_BLOCKS_ON) {
		type_active(type);
	} else if (!type->active) {
		aops = tmem_fs_aops(sb, type);
		if (aops)
			tmem_fs_type_activate(type, aops);
	}
	if (type->active)
		tmem_fs_register(sb, type, new);
unlock:
	mutex_unlock(&discovery_lock);
}

static void tmem_fs_seen(struct super_block *sb, void *arg)
{
	serve(sb, arg, false);
}

/**
 * tmem_fs_mounted() - serve a file system that was mounted just now
 * @sb: its super block, s_umount held
 */
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

/* Sweeps a file system if a sweep was requested. The caller holds s_umount, and @sb is alive. */
static void tmem_fs_sweep_seen(struct super_block *sb, void *arg)
{
	struct tmem_fs *fs;

	mutex_lock(&discovery_lock);
	/* s_umount and discovery_lock keep @fs from being freed. */
	rcu_read_lock();
	fs = tmem_fs_find(sb);
	rcu_read_unlock();
	if (fs && READ_ONCE(fs->mount->sweep) && !tmem_fs_stopped) {
		/*
		 * Clear the request before the sweep. If memory for marks runs short or a mark is
		 * lost during the sweep, another sweep is then requested.
		 */
		WRITE_ONCE(fs->mount->next_sweep, jiffies + TMEM_SWEEP_SECONDS * HZ);
		WRITE_ONCE(fs->mount->sweep, false);
		if (!tmem_fs_sweep(fs, sb))
			tmem_fs_sweep_soon(fs);
		if (tmem_bypass_is_all(fs->pool))
			tmem_fs_report();
	}
	mutex_unlock(&discovery_lock);
}

static void sweep_fn(struct work_struct *work)
{
	unsigned int i;

	TMEM_HOLD(sweep);
	for (i = 0; i < NR_TMEM_FS_TYPES; i++)
		if (READ_ONCE(tmem_fs_types[i].fst))
			iterate_supers_type(tmem_fs_types[i].fst, tmem_fs_sweep_seen, NULL);
}

static void discover_fn(struct work_struct *work)
{
	unsigned int found_before = READ_ONCE(found), i;
	bool all_active = true;

	/*
	 * A hook may queue this work item just before tmem_fs_stop(). The hooks may then be removed
	 * already, and the work must not register a tracepoint again.
	 */
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
				iterate_supers_type(type->fst, tmem_fs_seen, type);
		}
		all_active &= READ_ONCE(type->active) || READ_ONCE(type->failed);
	}
	if (READ_ONCE(found) != found_before)
		WRITE_ONCE(tmem_fs_fruitless, 0);
	else if (tmem_fs_fruitless < TMEM_FRUITLESS_MAX)
		WRITE_ONCE(tmem_fs_fruitless, tmem_fs_fruitless + 1);
	/*
	 * Once each type is hooked or cannot be hooked, stop watching pages that are added to the
	 * page cache: the hooked functions report new mounts.
	 */
	tmem_probe_new_mounts(!all_active);
}

/**
 * tmem_fs_setup() - set up the work items, once, before any hook can queue them
 */
void tmem_fs_setup(void)
{
	INIT_DELAYED_WORK(&tmem_fs_discovery, discover_fn);
	INIT_DELAYED_WORK(&tmem_fs_sweeping, sweep_fn);
}

/**
 * tmem_fs_init() - look for mounted file systems
 *
 * Return: 0. The state in sysfs names file systems that cannot be served.
 */
int tmem_fs_init(void)
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
	return 0;
}

/**
 * tmem_fs_stop() - stop looking for file systems
 *
 * The caller removes the hooks after this call, and then calls tmem_fs_exit().
 */
void tmem_fs_stop(void)
{
	mutex_lock(&discovery_lock);
	WRITE_ONCE(tmem_fs_stopped, true);
	mutex_unlock(&discovery_lock);
	cancel_delayed_work_sync(&tmem_fs_discovery);
	cancel_delayed_work_sync(&tmem_fs_sweeping);
}

/**
 * tmem_fs_exit() - free all file systems, after all hooks were removed
 *
 * The caller may then call tmem_fs_init() to begin again.
 */
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
		tmem_fs_remove(fs);
	}
	/*
	 * A hook, a switch of a mount or a lost mark may have queued a work item just after
	 * tmem_fs_stop() cancelled the work items, because it had read tmem_fs_stopped before
	 * tmem_fs_stop() set it.
	 */
	cancel_delayed_work_sync(&tmem_fs_discovery);
	cancel_delayed_work_sync(&tmem_fs_sweeping);
	nr_fs = 0;
	for (type = tmem_fs_types; type->name; type++) {
		if (type->fst)
			module_put(type->fst->owner);
		WRITE_ONCE(type->fst, NULL);
		WRITE_ONCE(type->active, false);
		WRITE_ONCE(type->failed, false);
	}
	tmem_fs_report();
}
