// SPDX-License-Identifier: GPL-2.0-only
/*
 * File systems: the types that the driver serves, the table of their known mounts, and the check
 * whether pages of an inode may be put and got. discover.c finds the mounts. The hooks call this
 * file to look mounts up, and to request a discovery or a sweep.
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
#include <linux/mutex.h>
#include <linux/pagemap.h>
#include <linux/slab.h>
#include <linux/workqueue.h>
#include <virtio_tmem.h>

#include "../compat.h"
#include "blocks.h"
#include "fs.h"

/*
 * Returns false with data=journal (by mount or by file): the newest content of a clean page may
 * then be in the journal only. Inodes with data=journal have another migrate_folio operation.
 */
static bool ext4_mapping_ok(const struct address_space *mapping)
{
	return mapping->a_ops->migrate_folio == buffer_migrate_folio;
}

/*
 * Returns true for all regular files, including files on a realtime volume. Operations that
 * exchange blocks below the page cache (clone, exchange-range, swapext) lock out readers and first
 * empty the range by truncation.
 */
static bool xfs_mapping_ok(const struct address_space *mapping)
{
	return mapping->a_ops->migrate_folio == filemap_migrate_folio;
}

struct tmem_fs_type tmem_fs_types[] = {
	{
		.name = "ext4",
		.mapping_ok = ext4_mapping_ok,
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

static_assert(ARRAY_SIZE(tmem_fs_types) == NR_TMEM_FS_TYPES + 1);

DEFINE_HASHTABLE(tmem_fs_hash, TMEM_FS_HASH_BITS);
DEFINE_SPINLOCK(tmem_fs_lock);
unsigned long tmem_fs_types_noted;
bool tmem_fs_stopped;
unsigned int tmem_fs_fruitless;
DEFINE_MUTEX(tmem_fs_switch_lock);	/* fs.h lists what this lock guards */
struct delayed_work tmem_fs_discovery, tmem_fs_sweeping;

/*
 * A walk over inodes releases s_inode_list_lock after this many inodes. A file system may have
 * millions of inodes, each may cost a few cache misses, and tasks that make or evict an inode spin
 * for the lock.
 */
#define TMEM_WALK_INODES 256

/**
 * tmem_fs_find() - return the file system of a super block
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
 * tmem_fs_get() - return the file system of a super block, for use across a sleep
 * @sb: its super block
 *
 * Return: NULL, or a file system that the caller releases with tmem_fs_put().
 */
struct tmem_fs *tmem_fs_get(const struct super_block *sb)
{
	struct tmem_fs *fs;

	rcu_read_lock();
	fs = tmem_fs_find(sb);
	if (fs)
		tmem_users_begin(&fs->cpu->users);
	rcu_read_unlock();
	return fs;
}

/**
 * tmem_fs_put() - release a file system
 * @fs: from tmem_fs_get()
 */
void tmem_fs_put(struct tmem_fs *fs)
{
	tmem_users_end(&fs->cpu->users);
}

/**
 * tmem_fs_inode_ok() - check whether the type and state of an inode allow puts and gets of its
 * pages
 * @fs: its file system
 * @inode: the inode
 *
 * Context: any. If the answer is false, the caller erases the inode's entries.
 */
bool tmem_fs_inode_ok(struct tmem_fs *fs, const struct inode *inode)
{
	/*
	 * Inodes with one of these flags are not cached. For example, swap files change below the
	 * page cache, and quota files are private to the file system.
	 */
	const unsigned int never = S_ENCRYPTED | S_VERITY | S_DAX | S_SWAPFILE | S_NOQUOTA;

	if (!S_ISREG(inode->i_mode) || (READ_ONCE(inode->i_flags) & never))
		return false;
	/*
	 * After an error of writeback, cache nothing of the inode: a page that could not be written
	 * is clean, although the disk has other content.
	 */
	if (READ_ONCE(inode->i_mapping->wb_err))
		return false;
	return fs->type->mapping_ok(inode->i_mapping);
}

/**
 * tmem_fs_inode_secret() - check whether the host must not see an inode's pages
 * @inode: the inode
 *
 * Context: any.
 * Return: true for encrypted files, and for files whose pages are verified when they are read.
 */
bool tmem_fs_inode_secret(const struct inode *inode)
{
	return READ_ONCE(inode->i_flags) & (S_ENCRYPTED | S_VERITY);
}

/**
 * tmem_fs_serves() - check whether a super block is of a type that is served
 * @sb: the super block
 *
 * Context: any.
 * Return: true if the type is served, even if this super block is not.
 */
bool tmem_fs_serves(const struct super_block *sb)
{
	unsigned int i;

	for (i = 0; i < NR_TMEM_FS_TYPES; i++)
		if (sb->s_bdev && !strcmp(sb->s_type->name, tmem_fs_types[i].name))
			return true;
	return false;
}

/**
 * tmem_fs_note() - note that a file of an unknown file system was used
 * @sb: its super block
 *
 * Context: any.
 * Return: true if the discovery will examine the file system.
 */
bool tmem_fs_note(const struct super_block *sb)
{
	unsigned long delay = READ_ONCE(tmem_fs_fruitless) < TMEM_FRUITLESS_MAX ? 0 : HZ;
	bool noted = false;
	unsigned int i;

	if (!sb->s_bdev || READ_ONCE(tmem_fs_stopped))
		return false;
	for (i = 0; i < NR_TMEM_FS_TYPES; i++) {
		if (READ_ONCE(tmem_fs_types[i].failed) ||
		    strcmp(sb->s_type->name, tmem_fs_types[i].name))
			continue;
		/* This code runs for each page, so it writes only if no discovery is queued. */
		if (!test_bit(i, &tmem_fs_types_noted) &&
		    !test_and_set_bit(i, &tmem_fs_types_noted))
			schedule_delayed_work(&tmem_fs_discovery, delay);
		noted = true;
	}
	return noted;
}

/**
 * tmem_fs_walk() - visit each inode of a file system, except those made during the walk
 * @sb: its super block; the caller holds s_umount
 * @visit: called under s_inode_list_lock; returns true to end the walk
 * @arg: argument for @visit
 *
 * The walk releases the lock from time to time. A reference to the current inode then keeps the
 * inode's place in the list. Unmounting never finds such a reference, because the caller holds
 * s_umount.
 *
 * The walk takes no reference to an inode without a name. If it were the last reference, the walk
 * would delete the inode. A deletion waits while the file system is frozen, and the task that thaws
 * the file system waits for s_umount. A name can be lost only while the file system is not frozen,
 * and the task that freezes it waits for s_umount.
 *
 * Context: process, may sleep.
 */
void tmem_fs_walk(struct super_block *sb, bool (*visit)(struct inode *inode, void *arg), void *arg)
{
	struct inode *inode, *kept = NULL;
	unsigned int run = 0;

	spin_lock(&sb->s_inode_list_lock);
	list_for_each_entry(inode, &sb->s_inodes, i_sb_list) {
		run++;
		tmem_test_walk(run, 0);
		if (visit(inode, arg))
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

/**
 * tmem_fs_flush_all() - drop the held pages of all file systems
 *
 * When the function returns, no page is put or got any more, except by gets that have already
 * begun. The discovery work then gives each file system an empty pool.
 *
 * Context: any but NMI.
 */
void tmem_fs_flush_all(void)
{
	struct tmem_fs *fs;
	unsigned int i;

	if (READ_ONCE(tmem_fs_stopped))
		return;
	rcu_read_lock();
	hash_for_each_rcu(tmem_fs_hash, i, fs, node) {
		WRITE_ONCE(fs->flush, true);
		WRITE_ONCE(fs->live, false);
	}
	rcu_read_unlock();
	for (i = 0; i < NR_TMEM_FS_TYPES; i++)
		if (READ_ONCE(tmem_fs_types[i].fst))
			set_bit(i, &tmem_fs_types_noted);
	mod_delayed_work(tmem_system_wq, &tmem_fs_discovery, 0);
}

/**
 * tmem_fs_switch() - switch file systems off or on
 * @type: all mounts of this type, also future ones; or NULL
 * @mount: if @type is NULL, this mount
 * @on: on or off; a mount is served if neither it nor its type is off
 *
 * Off: when the function returns, the pools are empty and no page is put or got, except by gets
 * whose request is in flight, which end by their deadline. The hooks still mark inodes that are
 * written directly.
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

	mutex_lock(&tmem_fs_switch_lock);
	if (on && !*off) {
		mutex_unlock(&tmem_fs_switch_lock);
		return;
	}
	WRITE_ONCE(*off, !on);
	/* chosen[] has space for all entries of the table, which are at most TMEM_FS_MAX. */
	spin_lock_irq(&tmem_fs_lock);
	hash_for_each(tmem_fs_hash, i, fs, node) {
		if (mount ? fs->mount != mount : fs->type != type)
			continue;
		WRITE_ONCE(fs->live, false);
		if (on)
			WRITE_ONCE(fs->flush, true);
		tmem_users_begin(&fs->cpu->users);
		chosen[nr++] = fs;
	}
	spin_unlock_irq(&tmem_fs_lock);
	mutex_unlock(&tmem_fs_switch_lock);

	/* Wait for puts that found the file system live, until the index has their pages. */
	if (!on && nr)
		synchronize_rcu_expedited();
	for (i = 0; i < nr; i++) {
		if (!on)
			tmem_pool_empty(chosen[i]->pool);
		tmem_fs_put(chosen[i]);
	}
	if (!on && nr)
		tmem_pools_wait_emptied();
	if (!on || !nr || READ_ONCE(tmem_fs_stopped))
		return;
	set_bit((mount ? mount->type : type) - tmem_fs_types, &tmem_fs_types_noted);
	mod_delayed_work(tmem_system_wq, &tmem_fs_discovery, 0);
}

/**
 * tmem_fs_blocked() - print why a file system takes no puts because a page was wrong
 * @fs: the file system
 * @buf: set to one line without its end
 * @bytes: size of @buf
 *
 * Context: any.
 * Return: number of characters, or 0 if no page was wrong.
 */
int tmem_fs_blocked(const struct tmem_fs *fs, char *buf, size_t bytes)
{
	const char *why;
	pgoff_t index;
	u64 ino;

	why = tmem_bypass_why(fs->pool, &ino, &index);
	if (!why)
		return 0;
	return scnprintf(buf, bytes,
			 "blocked: %s, inode %llu page %lu; check the file system and mount it again",
			 why, ino, index);
}

/**
 * tmem_fs_state() - print the state of a mount, with the reason if it is not cached
 * @mount: the mount
 * @buf: set to one line without its end
 * @bytes: size of @buf
 *
 * Return: number of characters.
 */
int tmem_fs_state(const struct tmem_mount *mount, char *buf, size_t bytes)
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
	else if (tmem_fs_blocked(fs, buf, bytes))
		state = NULL;
	else if (tmem_bypass_is_all(fs->pool))
		state = "blocked: the file system had an error; unmount and check it";
	else if (tmem_blocks_mode == TMEM_BLOCKS_ON && !tmem_area_works(mount->area))
		state = "blocked: the driver does not see all writes of the disk";
	else if (tmem_bypass_lost(fs->pool))
		state = "blocked: too many files may differ from the disk";
	rcu_read_unlock();
	return state ? scnprintf(buf, bytes, "%s", state) : strlen(buf);
}

/**
 * tmem_fs_pages() - count the held pages of a mount
 * @mount: the mount
 *
 * Context: process.
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
 * tmem_fs_sweep_soon() - request a sweep because the memory for marks runs short, marks of a file
 * system were lost, or the file system had an error
 * @fs: the file system
 *
 * Context: any but NMI.
 */
void tmem_fs_sweep_soon(struct tmem_fs *fs)
{
	struct tmem_mount *mount = fs->mount;
	unsigned long due = READ_ONCE(mount->next_sweep), now = jiffies;

	if (READ_ONCE(mount->sweep) || READ_ONCE(tmem_fs_stopped))
		return;
	WRITE_ONCE(mount->sweep, true);
	/*
	 * There is one work item for all mounts, so a later time must not replace an earlier one.
	 */
	if (time_before(now, due))
		queue_delayed_work(tmem_system_wq, &tmem_fs_sweeping, due - now);
	else
		mod_delayed_work(tmem_system_wq, &tmem_fs_sweeping, 0);
}
