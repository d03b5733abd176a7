// SPDX-License-Identifier: GPL-2.0-only
/*
 * File systems: which types are served, which of their mounts are known, and
 * which inodes of those may be put and got.
 *
 * A mount gets a pool when it is made, or when a page of one of its files is
 * seen. Hooks look it up by the address of its super block, in atomic context,
 * under RCU. It leaves before generic_shutdown_super() begins, so an address
 * that is used again finds an empty pool.
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

#include "../compat.h"
#include "hooks.h"

/*
 * With data=journal (by mount or by file) a clean page may have its newest
 * content in the journal only; such inodes have another way of migrating.
 */
static bool ext4_mapping_ok(const struct address_space *mapping)
{
	return mapping->a_ops->migrate_folio == buffer_migrate_folio;
}

/*
 * What exchanges blocks below the page cache (clone, exchange-range, swapext) locks out readers and
 * empties the range by truncation first. Pages of a realtime volume are as others.
 */
static bool xfs_mapping_ok(const struct address_space *mapping)
{
	return mapping->a_ops->migrate_folio == filemap_migrate_folio;
}

struct tmem_fs_type tmem_fs_types[] = {
	{
		.name = "ext4",
		.mapping_ok = ext4_mapping_ok,
		.symbols = { { "ext4_move_extents", TMEM_HOOK_MOVE_EXT, tmem_entry_move_ext } },
		.at_load = true,
	},
	{
		.name = "xfs",
		.mapping_ok = xfs_mapping_ok,
	},
	{}
};

#define NR_FS_TYPES (ARRAY_SIZE(tmem_fs_types) - 1)

/* More mounts than this are not served. */
#define TMEM_FS_MAX 64

static DEFINE_HASHTABLE(tmem_fs_hash, 6);
static DEFINE_SPINLOCK(fs_lock);	/* guards: writers of tmem_fs_hash, nr_fs */
static unsigned int nr_fs;

static unsigned long types_noted;	/* a bit for each entry of tmem_fs_types[] */
static bool discovery_stopped;
/* Guards tmem_fs_type.off, tmem_mount.off, and tmem_fs.live being set by them. */
static DEFINE_MUTEX(switch_lock);
/* Guards types, targets of ftrace.c, registration of file systems, and found. */
static DEFINE_MUTEX(discovery_lock);
static void tmem_discover(struct work_struct *work);
static DECLARE_DELAYED_WORK(discovery, tmem_discover);
static unsigned int found;		/* types activated and file systems registered */
static unsigned int fruitless;		/* discoveries in a row that found nothing */

/*
 * A file system that cannot be served is noted with each of its pages: after so many times it is
 * looked at once a second only.
 */
#define TMEM_FRUITLESS_MAX 16

/*
 * A file system may have millions of inodes, and who makes or evicts one spins meanwhile: so many
 * are looked at before s_inode_list_lock is given up. Each may be a few cache misses.
 */
#define TMEM_WALK_INODES 256
/* So many are looked at for a file that can be served; the newest come first. */
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
 * tmem_fs_find - the file system of a super block
 * @sb: its super block
 *
 * Context: any; the caller holds the RCU read lock for as long as it uses the result.
 * Return: NULL if it is not served (yet).
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
 * tmem_fs_get - the file system of a super block, for use across a sleep
 * @sb: its super block
 *
 * Return: NULL or a file system to be given to tmem_fs_put().
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
 * tmem_fs_put - end of use
 * @fs: from tmem_fs_get()
 */
void tmem_fs_put(struct tmem_fs *fs)
{
	if (refcount_dec_and_test(&fs->users))
		complete(&fs->idle);
}

/* No hook can find it any more. */
static void tmem_fs_free(struct tmem_fs *fs)
{
	tmem_fs_put(fs);
	wait_for_completion(&fs->idle);
	tmem_verify_void_fs(fs);
	tmem_pool_free(fs->pool);
	kfree_rcu(fs, rcu);
}

/* The same, with what sysfs shows of it; it is in the table no longer. */
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
 * The caller holds s_umount for writing, so the discovery cannot bring it back.
 * All files are closed: nobody can be inside a get.
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
	tmem_fs_remove(fs);
}

/**
 * tmem_fs_inode_ok - may pages of the inode be put and got, as far as it matters for all pages?
 * @fs: its file system
 * @inode: the inode
 *
 * Context: any. Who gets a no erases the inode.
 */
bool tmem_fs_inode_ok(struct tmem_fs *fs, const struct inode *inode)
{
	/* Swap files change below the page cache; quota files are the file system's own. */
	const unsigned int never = S_ENCRYPTED | S_VERITY | S_DAX | S_SWAPFILE | S_NOQUOTA;

	if (!S_ISREG(inode->i_mode) || (READ_ONCE(inode->i_flags) & never))
		return false;
	/* A page that could not be written is clean, and the disk has something else. */
	if (READ_ONCE(inode->i_mapping->wb_err))
		return false;
	return fs->type->mapping_ok(inode->i_mapping);
}

/**
 * tmem_fs_note - a file of a file system that is not known was used
 * @sb: its super block
 *
 * Context: any.
 * Return: true if it will be looked at.
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

/*
 * Looks at each inode of a file system, but for those made meanwhile, until @look returns true. The
 * lock is given up now and then, while a reference to the inode it is at keeps its place in the
 * list. The caller holds s_umount, so unmounting meets no such reference.
 *
 * None is taken to an inode without a name: were it the last, the inode would be deleted here. That
 * waits while the file system is frozen, and who thaws it waits for s_umount. A name can be lost
 * only while it is not frozen, and who freezes it waits for s_umount.
 */
static void walk_inodes(struct super_block *sb, bool (*look)(struct inode *inode, void *arg),
			void *arg)
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
	const struct address_space_operations *aops;	/* found */
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

/* A regular file's operations are those of all regular files of the type. */
static const struct address_space_operations *tmem_fs_aops(struct super_block *sb,
							   struct tmem_fs_type *type)
{
	struct aops_search search = { .type = type };

	walk_inodes(sb, look_for_aops, &search);
	return search.aops;
}

/* Coherence first: the functions that read come last. */
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
	int err;

	for (symbol = type->symbols; symbol->name; symbol++) {
		err = tmem_ftrace_add_name(symbol->name, symbol->hook, symbol->entry);
		if (err) {
			tmem_hooks_off("%s: cannot hook %s: error %d%s", type->name, symbol->name,
				       err, err == -EBUSY ? " (a live patch has it)" : "");
			goto failed;
		}
	}
	for (i = 0; i < ARRAY_SIZE(targets); i++) {
		err = targets[i].addr ? tmem_ftrace_add(&targets[i]) : -ENOENT;
		if (err) {
			tmem_hooks_off("%s: cannot hook its %s: error %d%s", type->name,
				       tmem_hook_names[targets[i].hook], err,
				       err == -EBUSY ? " (a live patch has it)" : "");
			goto failed;
		}
	}
	WRITE_ONCE(type->active, true);
	found++;
	return;
failed:
	WRITE_ONCE(type->failed, true);
}

struct marking {
	struct tmem_fs *fs;
	bool lost_marks;
};

static bool mark_writers(struct inode *inode, void *arg)
{
	struct marking *marking = arg;
	bool writers = atomic_read(&inode->i_writecount) > 0;
	bool suspect = marking->lost_marks && (writers || READ_ONCE(inode->i_data.nrpages));

	if (S_ISREG(inode->i_mode) && (writers || suspect))
		tmem_fs_bypass(marking->fs, inode, TMEM_INVAL_DIRECT,
			       suspect || IS_SWAPFILE(inode));
	return false;
}

/*
 * From the moment it can be found, invalidations reach the pool; only then are
 * those inodes marked that someone may be changing already, having passed a
 * hook before: all who truncate or write directly hold i_writecount. Only then
 * are puts allowed. Inodes need not be looked at in one go: who begins to write
 * or makes an inode beside it passes the hooks.
 *
 * One that is to be flushed is replaced: the sticky marks, which are the
 * mount's, live on, as they are about the page cache, and so do the policies,
 * which both pools have. If there were too many marks, each inode is marked that
 * may have been one: that has pages cached, or that someone may be changing. The
 * others have nothing that the disk does not.
 */
static void tmem_fs_register(struct super_block *sb, struct tmem_fs_type *type)
{
	struct marking marking = {};
	struct tmem_fs *fs, *old;

	/* s_umount and discovery_lock keep it from being freed. */
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
	fs->mount = old ? old->mount : tmem_mount_new(sb, type);
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

	/* Whoever looked before it could be found has finished that look by now. */
	synchronize_rcu_expedited();

	if (old) {
		TMEM_HOLD(replace);
		marking.lost_marks = tmem_fs_inherit_marks(fs);
		tmem_fs_free(old);
	}

	marking.fs = fs;
	walk_inodes(sb, mark_writers, &marking);

	mutex_lock(&switch_lock);
	if (!type->off && !fs->mount->off)
		/* After the marks above; read_begin() and put_folio() look at it first. */
		smp_store_release(&fs->live, true);
	mutex_unlock(&switch_lock);
}

/* s_umount is held and @sb is alive. */
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
 * tmem_fs_flush_all - forget what is held of all file systems
 *
 * Nothing is put or got any more when this returns, but for gets that were
 * begun before; the discovery work then gives each file system an empty pool.
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
 * tmem_fs_mounted - a file system was mounted
 * @sb: its super block, s_umount held for writing
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
 * @type: all mounts of this type, also those to come; or NULL
 * @mount: if not, this one
 * @on: on or off; a mount is served if neither it nor its type is off
 *
 * Off: when this returns nothing is held and nothing is put or got, but for
 * gets whose request is on its way, which end by their deadline. Hooks go on
 * to mark who writes directly.
 *
 * On: the discovery work gives each an empty pool and marks anew. That is also
 * the way out for one that had too many marks.
 *
 * Context: process, may sleep, but not for s_umount or discovery_lock.
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
	/* No more than are counted, and none that is being replaced. */
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

	/* Who found it live before has put, and entered it, by now. */
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
 * tmem_fs_state - what keeps a mount from being cached, if anything
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
	else if (!fs || !READ_ONCE(fs->live))
		state = "starting";
	else if (READ_ONCE(mount->sticky_all))
		state = "blocked: too many files changed below the page cache";
	else if (tmem_pool_overflowed(fs->pool))
		state = "blocked: too many files open for direct writes";
	rcu_read_unlock();
	return state;
}

/**
 * tmem_fs_pages - how many pages are held of a mount
 * @mount: the mount
 *
 * Context: process, may sleep; walks through the index.
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

static void tmem_discover(struct work_struct *work)
{
	unsigned int found_before = READ_ONCE(found), i;
	bool all_active = true;

	/* Noted at the last moment: the hooks may be gone, and nothing may join a tracepoint. */
	if (READ_ONCE(discovery_stopped))
		return;
	for (i = 0; i < NR_FS_TYPES; i++) {
		struct tmem_fs_type *type = &tmem_fs_types[i];

		/* Cleared first: what is noted from here on is looked at again. */
		if (test_and_clear_bit(i, &types_noted)) {
			/* Holds the module of the file system until this one goes. */
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
	/* Known functions report new mounts from here on; until then pages added do. */
	tmem_probe_new_mounts(!all_active);
}

/**
 * tmem_fs_init - look for mounted file systems
 *
 * Return: 0; a file system that cannot be served is reported with tmem_hooks_off().
 */
int tmem_fs_init(void)
{
	unsigned int i;

	for (i = 0; i < NR_FS_TYPES; i++)
		if (tmem_fs_types[i].at_load)
			set_bit(i, &types_noted);
	schedule_delayed_work(&discovery, 0);
	/* So that a cache that can work does when insmod returns. */
	flush_delayed_work(&discovery);
	return 0;
}

/**
 * tmem_fs_stop - find no more file systems
 *
 * Before the hooks go; tmem_fs_exit() comes after them.
 */
void tmem_fs_stop(void)
{
	mutex_lock(&discovery_lock);
	WRITE_ONCE(discovery_stopped, true);
	mutex_unlock(&discovery_lock);
	cancel_delayed_work_sync(&discovery);
}

/**
 * tmem_fs_exit - free everything; no hook is left
 */
void tmem_fs_exit(void)
{
	struct hlist_node *next;
	struct tmem_fs *fs;
	unsigned int i;

	hash_for_each_safe(tmem_fs_hash, i, next, fs, node) {
		spin_lock_irq(&fs_lock);
		hash_del_rcu(&fs->node);
		spin_unlock_irq(&fs_lock);
		tmem_fs_remove(fs);
	}
	/* A last note, or a mount's switch, may have passed the check just before. */
	cancel_delayed_work_sync(&discovery);
	for (i = 0; i < NR_FS_TYPES; i++)
		if (tmem_fs_types[i].fst)
			module_put(tmem_fs_types[i].fst->owner);
}
