// SPDX-License-Identifier: GPL-2.0-only
/*
 * File systems: which types are served, which of their mounts are known, and which of their inodes
 * may be put and got.
 *
 * A mount gets a pool when it is made, or when a page of one of its files is seen. Hooks look a
 * mount up by the address of its super block, in atomic context, under RCU. The mount leaves the
 * table before generic_shutdown_super() begins, so an address that is used again finds an empty
 * pool.
 */
#include <linux/buffer_head.h>
#include <linux/fs.h>
#include <linux/hashtable.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pagemap.h>
#include <linux/slab.h>
#include <linux/workqueue.h>
#include <virtio_tmem.h>

#include "../compat.h"
#include "hooks.h"

/*
 * Returns false with data=journal (by mount or by file): a clean page may then have its newest
 * content in the journal only. Such inodes have another migrate_folio.
 */
static bool ext4_mapping_ok(const struct address_space *mapping)
{
	return mapping->a_ops->migrate_folio == buffer_migrate_folio;
}

/*
 * Returns true for all regular files, those of a realtime volume included. Operations that exchange
 * blocks below the page cache (clone, exchange-range, swapext) lock out readers and first empty the
 * range by truncation.
 */
static bool xfs_mapping_ok(const struct address_space *mapping)
{
	return mapping->a_ops->migrate_folio == filemap_migrate_folio;
}

struct tmem_fs_type tmem_fs_types[] = {
	{
		.name = "ext4",
		.mapping_ok = ext4_mapping_ok,
		.symbols = {
			{ "ext4_move_extents", TMEM_HOOK_MOVE_EXT, tmem_entry_move_ext },
			{ "__ext4_warning", TMEM_HOOK_CONVERSION, tmem_entry_ext4_warning },
			{ "jbd2_journal_abort", TMEM_HOOK_JOURNAL_ABORT, tmem_entry_journal_abort },
			{}
		},
		.at_load = true,
		.report_bit = VIRTIO_TMEM_H_EXT4,
	},
	{
		.name = "xfs",
		.mapping_ok = xfs_mapping_ok,
		.report_bit = VIRTIO_TMEM_H_XFS,
	},
	{}
};

#define NR_FS_TYPES (ARRAY_SIZE(tmem_fs_types) - 1)

/* Mounts that are served; further ones are not. */
#define TMEM_FS_MAX 64

static DEFINE_HASHTABLE(tmem_fs_hash, 6);
static DEFINE_SPINLOCK(fs_lock);	/* guards writers of tmem_fs_hash, and nr_fs */
static unsigned int nr_fs;

static unsigned long types_noted;	/* a bit for each entry of tmem_fs_types[] */
static bool discovery_stopped;
/*
 * Guards tmem_fs_type.off and tmem_mount.off, and tmem_fs.live where it is set according to them.
 */
static DEFINE_MUTEX(switch_lock);
/* Guards types, targets of attach.h, registration of file systems, and found. */
static DEFINE_MUTEX(discovery_lock);
static void tmem_discover(struct work_struct *work);
static DECLARE_DELAYED_WORK(discovery, tmem_discover);
static void tmem_sweep(struct work_struct *work);
static DECLARE_DELAYED_WORK(sweep, tmem_sweep);
static unsigned int found;		/* types activated plus file systems registered */
static unsigned int fruitless;		/* discoveries in a row that found nothing */

/*
 * A file system that cannot be served is noted with each of its pages. After this many discoveries
 * in a row without a result, the discovery runs at most once a second.
 */
#define TMEM_FRUITLESS_MAX 16

/*
 * Seconds between two sweeps of the marks of a file system, however fast they run out. A sweep
 * visits all inodes in memory.
 */
#define TMEM_SWEEP_SECONDS 10

/*
 * A file system may have millions of inodes, and tasks that make or evict one spin during the walk.
 * The walk releases s_inode_list_lock after this many inodes. Each may cost a few cache misses.
 */
#define TMEM_WALK_INODES 256
/* Inodes that are searched for a file that can be served; the newest come first. */
#define TMEM_SEARCH_INODES 4096

#ifdef TMEM_TEST
static unsigned int test_walk_run, test_walk_most;
module_param(test_walk_run, uint, 0644);
MODULE_PARM_DESC(test_walk_run, "most inodes that were looked at under a lock without a break");
module_param(test_walk_most, uint, 0644);
MODULE_PARM_DESC(test_walk_most, "most inodes that were looked at in search of a file");

static void walk_note(unsigned int run, unsigned int looked)
{
	WRITE_ONCE(test_walk_run, max(test_walk_run, run));
	WRITE_ONCE(test_walk_most, max(test_walk_most, looked));
}
#else
static inline void walk_note(unsigned int run, unsigned int looked)
{
}
#endif

/**
 * tmem_fs_find - return the file system of a super block
 * @sb: its super block
 *
 * Context: any; the caller holds the RCU read lock for as long as it uses the result.
 * Return: the file system, or NULL if it is not served (yet).
 */
struct tmem_fs *tmem_fs_find(const struct super_block *sb)
{
	struct tmem_fs *fs;

	hash_for_each_possible_rcu(tmem_fs_hash, fs, node, (unsigned long)sb)
		if (fs->sb == sb)
			return fs;
	return NULL;
}

/**
 * tmem_fs_get - return the file system of a super block, for use across a sleep
 * @sb: its super block
 *
 * Return: NULL, or a file system that the caller releases with tmem_fs_put().
 */
struct tmem_fs *tmem_fs_get(const struct super_block *sb)
{
	struct tmem_fs *fs;

	rcu_read_lock();
	fs = tmem_fs_find(sb);
	if (fs && !refcount_inc_not_zero(&fs->users))
		fs = NULL;
	rcu_read_unlock();
	return fs;
}

/**
 * tmem_fs_put - release a file system
 * @fs: from tmem_fs_get()
 */
void tmem_fs_put(struct tmem_fs *fs)
{
	if (refcount_dec_and_test(&fs->users))
		complete(&fs->idle);
}

/* Sets which types are served, and what is not served with the reason, for state and report. */
static void tmem_fs_tell(void)
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
		/* Pairs with tmem_fs_type_failed(). */
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
	spin_lock_irq(&fs_lock);
	hash_for_each(tmem_fs_hash, i, fs, node)
		if (*fs->mount->refused)
			len += scnprintf(note + len, sizeof(note) - len, "%s%s is %s",
					 len ? "; " : "", kobject_name(&fs->mount->kobj),
					 fs->mount->refused);
	spin_unlock_irq(&fs_lock);
	tmem_core_set_served(served, note);
	mutex_unlock(&lock);
}

/* Frees a file system that hooks can no longer find. */
static void tmem_fs_free(struct tmem_fs *fs)
{
	tmem_fs_put(fs);
	wait_for_completion(&fs->idle);
	tmem_verify_void_fs(fs);
	tmem_pool_free(fs->pool);
	kfree_rcu(fs, rcu);
}

/* Frees a file system, which is no longer in the table, together with its mount in sysfs. */
static void tmem_fs_remove(struct tmem_fs *fs)
{
	struct tmem_mount *mount = fs->mount;

	tmem_fs_free(fs);
	tmem_mount_free(mount);
}

/**
 * tmem_fs_drop - forget a file system that is about to be shut down
 * @sb: its super block
 *
 * The caller holds s_umount for writing, so the discovery cannot bring it back. All files are
 * closed, so no task can be inside a get.
 */
void tmem_fs_drop(const struct super_block *sb)
{
	struct tmem_fs *fs;

	spin_lock_irq(&fs_lock);
	fs = tmem_fs_find(sb);
	if (fs) {
		hash_del_rcu(&fs->node);
		nr_fs--;
	}
	spin_unlock_irq(&fs_lock);
	if (!fs)
		return;
	WRITE_ONCE(fs->live, false);
	synchronize_rcu_expedited();
	if (*fs->mount->refused)
		tmem_fs_tell();
	tmem_fs_remove(fs);
}

/**
 * tmem_fs_inode_ok - check whether pages of an inode may be put and got, as far as the inode
 * decides
 * @fs: its file system
 * @inode: the inode
 *
 * Context: any. On false the caller erases the inode's entries.
 */
bool tmem_fs_inode_ok(struct tmem_fs *fs, const struct inode *inode)
{
	/* Swap files change below the page cache. Quota files are private to the file system. */
	const unsigned int never = S_ENCRYPTED | S_VERITY | S_DAX | S_SWAPFILE | S_NOQUOTA;

	if (!S_ISREG(inode->i_mode) || (READ_ONCE(inode->i_flags) & never))
		return false;
	/* A page that could not be written is clean, and the disk has other content. */
	if (READ_ONCE(inode->i_mapping->wb_err))
		return false;
	return fs->type->mapping_ok(inode->i_mapping);
}

/**
 * tmem_fs_serves - check whether a super block is of a type that is served
 * @sb: the super block
 *
 * Context: any.
 * Return: true if the type is served, even if this super block is not.
 */
bool tmem_fs_serves(const struct super_block *sb)
{
	unsigned int i;

	for (i = 0; i < NR_FS_TYPES; i++)
		if (sb->s_bdev && !strcmp(sb->s_type->name, tmem_fs_types[i].name))
			return true;
	return false;
}

/**
 * tmem_fs_note - note that a file of an unknown file system was used
 * @sb: its super block
 *
 * Context: any.
 * Return: true if the discovery will look at the file system.
 */
bool tmem_fs_note(const struct super_block *sb)
{
	bool noted = false;
	unsigned int i;

	if (!sb->s_bdev || READ_ONCE(discovery_stopped))
		return false;
	for (i = 0; i < NR_FS_TYPES; i++) {
		if (READ_ONCE(tmem_fs_types[i].failed) ||
		    strcmp(sb->s_type->name, tmem_fs_types[i].name))
			continue;
		if (!test_and_set_bit(i, &types_noted))
			schedule_delayed_work(&discovery,
					      READ_ONCE(fruitless) < TMEM_FRUITLESS_MAX ? 0 : HZ);
		noted = true;
	}
	return noted;
}

/**
 * tmem_fs_walk - visit each inode of a file system, except those made during the walk
 * @sb: its super block; the caller holds s_umount
 * @look: called under s_inode_list_lock; returns true to end the walk
 * @arg: argument for @look
 *
 * The lock is released now and then, while a reference to the current inode keeps its place in the
 * list. Unmounting never finds such a reference, because the caller holds s_umount.
 *
 * The walk takes no reference to an inode without a name. If it were the last reference, the walk
 * would delete the inode. A deletion waits while the file system is frozen, and the task that thaws
 * the file system waits for s_umount. A name can be lost only while the file system is not frozen,
 * and the task that freezes it waits for s_umount.
 *
 * Context: process, may sleep.
 */
void tmem_fs_walk(struct super_block *sb, bool (*look)(struct inode *inode, void *arg), void *arg)
{
	struct inode *inode, *kept = NULL;
	unsigned int run = 0;

	spin_lock(&sb->s_inode_list_lock);
	list_for_each_entry(inode, &sb->s_inodes, i_sb_list) {
		run++;
		walk_note(run, 0);
		if (look(inode, arg))
			break;
		if (run < TMEM_WALK_INODES || !READ_ONCE(inode->i_nlink) || !igrab(inode))
			continue;
		spin_unlock(&sb->s_inode_list_lock);
		iput(kept);
		kept = inode;
		run = 0;
		cond_resched();
		spin_lock(&sb->s_inode_list_lock);
	}
	spin_unlock(&sb->s_inode_list_lock);
	iput(kept);
}

struct aops_search {
	const struct tmem_fs_type *type;
	const struct address_space_operations *aops;	/* the operations that were found */
	unsigned int looked;
};

static bool look_for_aops(struct inode *inode, void *arg)
{
	struct aops_search *search = arg;

	search->looked++;
	walk_note(0, search->looked);
	if (S_ISREG(inode->i_mode) && !IS_DAX(inode) && inode->i_mapping->a_ops &&
	    search->type->mapping_ok(inode->i_mapping))
		search->aops = inode->i_mapping->a_ops;
	return search->aops || search->looked == TMEM_SEARCH_INODES;
}

/* Returns the operations of a regular file, which all regular files of the type share. */
static const struct address_space_operations *tmem_fs_aops(struct super_block *sb,
							   struct tmem_fs_type *type)
{
	struct aops_search search = { .type = type };

	tmem_fs_walk(sb, look_for_aops, &search);
	return search.aops;
}

static void tmem_fs_type_failed(struct tmem_fs_type *type, const char *function, int err)
{
	snprintf(type->why_failed, sizeof(type->why_failed), "cannot hook %s: error %d%s",
		 function, err, err == -EBUSY ? " (a live patch has it)" : "");
	pr_warn("virtio_tmem: %s is not served: %s\n", type->name, type->why_failed);
	/* The reason is complete; pairs with tmem_fs_tell(). */
	smp_store_release(&type->failed, true);
	tmem_fs_tell();
}

/* Hooks the functions of a type. Coherence comes first; the functions that read come last. */
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
	const struct tmem_fs_symbol *symbol;
	unsigned int i;
	char its[32];
	int err;

	for (symbol = type->symbols; symbol->name; symbol++) {
		err = tmem_target_add_name(symbol->name, symbol->hook, symbol->entry);
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
	WRITE_ONCE(type->active, true);
	found++;
	tmem_fs_tell();
}

/* Makes the mount of a super block. A mount that is refused stays refused until it is unmounted. */
static struct tmem_mount *mount_new(struct super_block *sb, struct tmem_fs_type *type)
{
	struct tmem_mount *mount = tmem_mount_new(sb, type);
	char why[TMEM_REFUSED_BYTES - sizeof("refused: ")];

	if (mount && tmem_refuse(sb, why, sizeof(why))) {
		snprintf(mount->refused, sizeof(mount->refused), "refused: %s", why);
		pr_notice("virtio_tmem: %s on %s is %s\n", type->name, sb->s_id, mount->refused);
	}
	return mount;
}

/*
 * Registers a file system in three steps. First, it can be found, and invalidations reach the pool.
 * Second, the driver marks the inodes that may have changed before, when no hook knew the file
 * system: a task may have passed a hook, swapped to a file, or exchanged its blocks. Third, puts
 * are allowed.
 *
 * A file system that is to be flushed is replaced. Marks and policies stay: both pools share them.
 */
static void tmem_fs_register(struct super_block *sb, struct tmem_fs_type *type)
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
	refcount_set(&fs->users, 1);
	init_completion(&fs->idle);
	fs->pool = tmem_pool_new(sb->s_id, old ? old->pool : NULL);
	if (!fs->pool) {
		kfree(fs);
		return;
	}
	fs->mount = old ? old->mount : mount_new(sb, type);
	if (!fs->mount) {
		tmem_pool_free(fs->pool);
		kfree(fs);
		return;
	}
	spin_lock_irq(&fs_lock);
	if (old) {
		hlist_replace_rcu(&old->node, &fs->node);
	} else {
		hash_add_rcu(tmem_fs_hash, &fs->node, (unsigned long)sb);
		nr_fs++;
	}
	spin_unlock_irq(&fs_lock);
	found++;

	/* Every look-up from before the file system could be found has ended after this call. */
	synchronize_rcu_expedited();

	if (old) {
		TMEM_HOLD(replace);
		tmem_fs_free(old);
	} else if (!*fs->mount->refused) {
		marked = tmem_fs_mark_suspects(fs, sb);
	}
	if (!marked)
		tmem_fs_sweep_soon(fs);

	mutex_lock(&switch_lock);
	if (!type->off && !fs->mount->off && !*fs->mount->refused)
		/* Set after the marks above; read_begin() and put_folio() read it first. */
		smp_store_release(&fs->live, true);
	mutex_unlock(&switch_lock);
	if (*fs->mount->refused)
		tmem_fs_tell();
}

/* Serves a mounted file system. s_umount is held and @sb is alive. */
static void tmem_fs_seen(struct super_block *sb, void *arg)
{
	const struct address_space_operations *aops;
	struct tmem_fs_type *type = arg;

	mutex_lock(&discovery_lock);
	if (discovery_stopped || type->failed || !sb->s_bdev || !sb->s_root)
		goto unlock;
	if (!type->active) {
		aops = tmem_fs_aops(sb, type);
		if (aops)
			tmem_fs_type_activate(type, aops);
	}
	if (type->active)
		tmem_fs_register(sb, type);
unlock:
	mutex_unlock(&discovery_lock);
}

/**
 * tmem_fs_flush_all - forget the held pages of all file systems
 *
 * When this returns, nothing is put or got any more, except by gets that began before. The
 * discovery work then gives each file system an empty pool.
 *
 * Context: any but NMI.
 */
void tmem_fs_flush_all(void)
{
	struct tmem_fs *fs;
	unsigned int i;

	if (READ_ONCE(discovery_stopped))
		return;
	rcu_read_lock();
	hash_for_each_rcu(tmem_fs_hash, i, fs, node) {
		WRITE_ONCE(fs->flush, true);
		WRITE_ONCE(fs->live, false);
	}
	rcu_read_unlock();
	for (i = 0; i < NR_FS_TYPES; i++)
		if (READ_ONCE(tmem_fs_types[i].fst))
			set_bit(i, &types_noted);
	mod_delayed_work(tmem_system_wq, &discovery, 0);
}

/**
 * tmem_fs_mounted - serve a file system that was mounted just now
 * @sb: its super block, s_umount held
 */
void tmem_fs_mounted(struct super_block *sb)
{
	unsigned int i;

	for (i = 0; i < NR_FS_TYPES; i++) {
		struct tmem_fs_type *type = &tmem_fs_types[i];

		if (strcmp(sb->s_type->name, type->name))
			continue;
		if (READ_ONCE(type->fst))
			tmem_fs_seen(sb, type);
		else
			tmem_fs_note(sb);
	}
}

/**
 * tmem_fs_switch - switch file systems off or on
 * @type: all mounts of this type, also future ones; or NULL
 * @mount: if @type is NULL, this mount
 * @on: on or off; a mount is served if neither it nor its type is off
 *
 * Off: when this returns, nothing is held, put or got, except by gets whose request is on its way,
 * which end by their deadline. The hooks still mark inodes that are written directly.
 *
 * On: the discovery work gives each file system an empty pool.
 *
 * Context: process, may sleep, but does not wait for s_umount or discovery_lock.
 */
void tmem_fs_switch(struct tmem_fs_type *type, struct tmem_mount *mount, bool on)
{
	bool *off = mount ? &mount->off : &type->off;
	struct tmem_fs *fs, *chosen[TMEM_FS_MAX];
	unsigned int i, nr = 0;

	mutex_lock(&switch_lock);
	if (on && !*off) {
		mutex_unlock(&switch_lock);
		return;
	}
	WRITE_ONCE(*off, !on);
	/* At most TMEM_FS_MAX are in the table, and none that is being replaced. */
	spin_lock_irq(&fs_lock);
	hash_for_each(tmem_fs_hash, i, fs, node) {
		if (mount ? fs->mount != mount : fs->type != type)
			continue;
		WRITE_ONCE(fs->live, false);
		if (on)
			WRITE_ONCE(fs->flush, true);
		refcount_inc(&fs->users);
		chosen[nr++] = fs;
	}
	spin_unlock_irq(&fs_lock);
	mutex_unlock(&switch_lock);

	/* A put that found the file system live has entered its page by now. */
	if (!on && nr)
		synchronize_rcu_expedited();
	for (i = 0; i < nr; i++) {
		if (!on)
			tmem_pool_empty(chosen[i]->pool);
		tmem_fs_put(chosen[i]);
	}
	if (!on || !nr || READ_ONCE(discovery_stopped))
		return;
	set_bit((mount ? mount->type : type) - tmem_fs_types, &types_noted);
	mod_delayed_work(tmem_system_wq, &discovery, 0);
}

/**
 * tmem_fs_state - return the state of a mount, with the reason if it is not cached
 * @mount: the mount
 *
 * Return: one line.
 */
const char *tmem_fs_state(const struct tmem_mount *mount)
{
	const char *state = "on";
	struct tmem_fs *fs;

	rcu_read_lock();
	fs = tmem_fs_find(mount->sb);
	if (READ_ONCE(mount->off) || READ_ONCE(mount->type->off))
		state = "off";
	else if (*mount->refused)
		state = mount->refused;
	else if (!fs || !READ_ONCE(fs->live))
		state = "starting";
	else if (tmem_bypass_is_all(fs->pool))
		state = "blocked: the file system had an error";
	else if (tmem_bypass_lost(fs->pool))
		state = "blocked: too many files may differ from the disk";
	rcu_read_unlock();
	return state;
}

/**
 * tmem_fs_pages - count the pages that are held of a mount
 * @mount: the mount
 *
 * Context: process, may sleep; walks through the index.
 *
 * Return: number of pages.
 */
unsigned long tmem_fs_pages(const struct tmem_mount *mount)
{
	struct tmem_fs *fs = tmem_fs_get(mount->sb);
	unsigned long pages;

	if (!fs)
		return 0;
	pages = tmem_pool_pages(fs->pool);
	tmem_fs_put(fs);
	return pages;
}

/**
 * tmem_fs_sweep_soon - request a sweep because marks of a file system run out or were lost
 * @fs: the file system
 *
 * Context: any but NMI.
 */
void tmem_fs_sweep_soon(struct tmem_fs *fs)
{
	struct tmem_mount *mount = fs->mount;
	unsigned long due = READ_ONCE(mount->next_sweep), now = jiffies;

	if (READ_ONCE(mount->sweep) || READ_ONCE(discovery_stopped))
		return;
	WRITE_ONCE(mount->sweep, true);
	/*
	 * There is one work item for all mounts, so a later time must not replace an earlier one.
	 */
	if (time_before(now, due))
		queue_delayed_work(tmem_system_wq, &sweep, due - now);
	else
		mod_delayed_work(tmem_system_wq, &sweep, 0);
}

/* Sweeps a file system if that was requested. s_umount is held and @sb is alive. */
static void tmem_fs_sweep_seen(struct super_block *sb, void *arg)
{
	struct tmem_fs *fs;

	mutex_lock(&discovery_lock);
	/* s_umount and discovery_lock keep @fs from being freed. */
	rcu_read_lock();
	fs = tmem_fs_find(sb);
	rcu_read_unlock();
	if (fs && READ_ONCE(fs->mount->sweep) && !discovery_stopped) {
		/* Cleared first, so that marks that run out from now on request another sweep. */
		WRITE_ONCE(fs->mount->next_sweep, jiffies + TMEM_SWEEP_SECONDS * HZ);
		WRITE_ONCE(fs->mount->sweep, false);
		if (!tmem_fs_sweep(fs, sb))
			tmem_fs_sweep_soon(fs);
	}
	mutex_unlock(&discovery_lock);
}

static void tmem_sweep(struct work_struct *work)
{
	unsigned int i;

	for (i = 0; i < NR_FS_TYPES; i++)
		if (READ_ONCE(tmem_fs_types[i].fst))
			iterate_supers_type(tmem_fs_types[i].fst, tmem_fs_sweep_seen, NULL);
}

static void tmem_discover(struct work_struct *work)
{
	unsigned int found_before = READ_ONCE(found), i;
	bool all_active = true;

	/*
	 * A note may come at the last moment, when the hooks may be gone. No tracepoint may be
	 * joined then.
	 */
	if (READ_ONCE(discovery_stopped))
		return;
	for (i = 0; i < NR_FS_TYPES; i++) {
		struct tmem_fs_type *type = &tmem_fs_types[i];

		/* Cleared first, so that a later note is looked at again. */
		if (test_and_clear_bit(i, &types_noted)) {
			/*
			 * The reference keeps the module of the file system loaded until this
			 * module is unloaded.
			 */
			if (!type->fst)
				WRITE_ONCE(type->fst, get_fs_type(type->name));
			if (type->fst)
				iterate_supers_type(type->fst, tmem_fs_seen, type);
		}
		all_active &= READ_ONCE(type->active) || READ_ONCE(type->failed);
	}
	if (READ_ONCE(found) != found_before)
		WRITE_ONCE(fruitless, 0);
	else if (fruitless < TMEM_FRUITLESS_MAX)
		WRITE_ONCE(fruitless, fruitless + 1);
	/*
	 * From now on known functions report new mounts. Until all types are known, added pages do.
	 */
	tmem_probe_new_mounts(!all_active);
}

/**
 * tmem_fs_init - look for mounted file systems
 *
 * Return: 0; the state names a file system that cannot be served.
 */
int tmem_fs_init(void)
{
	unsigned int i;

	types_noted = 0;
	fruitless = 0;
	mutex_lock(&discovery_lock);
	WRITE_ONCE(discovery_stopped, false);
	mutex_unlock(&discovery_lock);
	for (i = 0; i < NR_FS_TYPES; i++)
		if (tmem_fs_types[i].at_load)
			set_bit(i, &types_noted);
	schedule_delayed_work(&discovery, 0);
	/* Wait, so that the cache works when insmod returns, if it can work. */
	flush_delayed_work(&discovery);
	return 0;
}

/**
 * tmem_fs_stop - stop looking for file systems
 *
 * This comes before the hooks are removed, and tmem_fs_exit() after that.
 */
void tmem_fs_stop(void)
{
	mutex_lock(&discovery_lock);
	WRITE_ONCE(discovery_stopped, true);
	mutex_unlock(&discovery_lock);
	cancel_delayed_work_sync(&discovery);
	cancel_delayed_work_sync(&sweep);
}

/**
 * tmem_fs_exit - free all file systems, after all hooks were removed
 *
 * tmem_fs_init() may follow.
 */
void tmem_fs_exit(void)
{
	struct tmem_fs_type *type;
	struct hlist_node *next;
	struct tmem_fs *fs;
	unsigned int i;

	hash_for_each_safe(tmem_fs_hash, i, next, fs, node) {
		spin_lock_irq(&fs_lock);
		hash_del_rcu(&fs->node);
		spin_unlock_irq(&fs_lock);
		/* A task that reads the state in sysfs may have found the file system. */
		synchronize_rcu_expedited();
		tmem_fs_remove(fs);
	}
	/*
	 * A last note, a mount's switch or a mark may have passed its check just before the stop.
	 */
	cancel_delayed_work_sync(&discovery);
	cancel_delayed_work_sync(&sweep);
	nr_fs = 0;
	for (type = tmem_fs_types; type->name; type++) {
		if (type->fst)
			module_put(type->fst->owner);
		WRITE_ONCE(type->fst, NULL);
		WRITE_ONCE(type->active, false);
		WRITE_ONCE(type->failed, false);
	}
	tmem_fs_tell();
}
