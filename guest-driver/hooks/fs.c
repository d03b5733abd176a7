// SPDX-License-Identifier: GPL-2.0-only
/*
 * File systems: the types that the driver serves, and the table of their known mounts. discover.c
 * finds the mounts. The hooks call this file to look mounts up, and to request a discovery.
 *
 * A mount gets a pool when it is made, or when a hook sees a page of one of its files. Hooks look a
 * mount up by the address of its super block, in atomic context, under RCU. The mount leaves the
 * table before generic_shutdown_super() begins, so an address that is used again finds an empty
 * pool.
 */
#include <linux/fs.h>
#include <linux/hashtable.h>
#include <linux/mutex.h>
#include <linux/workqueue.h>
#include <virtio_tmem.h>

#include "../compat.h"
#include "blocks.h"
#include "fs.h"

struct tmem_fs_type tmem_fs_types[] = {
	{
		.name = "ext4",
		.at_load = true,
		.report_bit = VIRTIO_TMEM_H_EXT4,
	},
	{
		.name = "xfs",
		.report_bit = VIRTIO_TMEM_H_XFS,
	},
	{
		.name = "ext2",
		.report_bit = VIRTIO_TMEM_H_EXT2,
	},
	{
		.name = "ext3",
		.report_bit = VIRTIO_TMEM_H_EXT3,
	},
	{
		.name = "btrfs",
		.report_bit = VIRTIO_TMEM_H_BTRFS,
		/* Inode numbers are unique in a subvolume. */
		.no_policies = true,
		.has_no_bdev = true,
	},
	{
		.name = "f2fs",
		.report_bit = VIRTIO_TMEM_H_F2FS,
	},
	{
		.name = "erofs",
		.report_bit = VIRTIO_TMEM_H_EROFS,
	},
	{
		.name = "vfat",
		.report_bit = VIRTIO_TMEM_H_VFAT,
		.no_policies = true,
	},
	{
		.name = "exfat",
		.report_bit = VIRTIO_TMEM_H_EXFAT,
		.no_policies = true,
	},
	{}
};

/* How to have a swap area served again that is blocked. */
#define SWAP_AGAIN \
	"run swapoff, unmount the file system of a swap file, wait two seconds, and run swapon"

struct tmem_fs_type tmem_swap_type = { .name = "swap", .no_policies = true };

static_assert(ARRAY_SIZE(tmem_fs_types) == NR_TMEM_FS_TYPES + 1);

DEFINE_HASHTABLE(tmem_fs_hash, TMEM_FS_HASH_BITS);
DEFINE_SPINLOCK(tmem_fs_lock);
unsigned long tmem_fs_types_noted;
bool tmem_fs_stopped = true;	/* until tmem_fs_init() */
unsigned int tmem_fs_fruitless;
DEFINE_MUTEX(tmem_fs_switch_lock);	/* fs.h lists what this lock guards */
struct delayed_work tmem_fs_discovery;

/*
 * Returns the file system of a super block, or NULL if it is not served (yet). The caller holds the
 * RCU read lock for as long as it uses the result. Context: any.
 */
struct tmem_fs *tmem_fs_find(const struct super_block *sb)
{
	struct tmem_fs *fs;

	hash_for_each_possible_rcu(tmem_fs_hash, fs, node, (unsigned long)sb)
		if (fs->sb == sb)
			return fs;
	return NULL;
}

/*
 * Returns the file system of a super block, for use across a sleep, or NULL. The caller releases it
 * with tmem_fs_put().
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

void tmem_fs_put(struct tmem_fs *fs)
{
	tmem_users_end(&fs->cpu->users);
}

/*
 * Returns whether the host must not see an inode's pages: those of encrypted files, and of files
 * whose pages are verified when they are read. Context: any.
 */
bool tmem_fs_inode_secret(const struct inode *inode)
{
	return READ_ONCE(inode->i_flags) & (S_ENCRYPTED | S_VERITY);
}

/* Returns whether a super block is of a type, and on a block device of this machine. */
static bool is_of_type(const struct super_block *sb, const struct tmem_fs_type *type)
{
	return (sb->s_bdev || type->has_no_bdev) && !strcmp(sb->s_type->name, type->name);
}

/*
 * Returns whether the type of a super block is served, even if this super block is not. Context:
 * any.
 */
bool tmem_fs_serves(const struct super_block *sb)
{
	unsigned int i;

	for (i = 0; i < NR_TMEM_FS_TYPES; i++)
		if (is_of_type(sb, &tmem_fs_types[i]))
			return true;
	return false;
}

/*
 * Notes that a page of an unknown file system was read, written or evicted. Returns whether the
 * discovery will examine the file system. Context: any.
 */
bool tmem_fs_note(const struct super_block *sb)
{
	unsigned long delay = READ_ONCE(tmem_fs_fruitless) < TMEM_FRUITLESS_MAX ? 0 : HZ;
	unsigned int i;

	if (READ_ONCE(tmem_fs_stopped))
		return false;
	for (i = 0; i < NR_TMEM_FS_TYPES; i++) {
		if (!is_of_type(sb, &tmem_fs_types[i]))
			continue;
		/* This code runs for each bio, so it writes only if no discovery is queued. */
		if (!test_bit(i, &tmem_fs_types_noted) &&
		    !test_and_set_bit(i, &tmem_fs_types_noted)) {
			WRITE_ONCE(tmem_fs_types[i].seen, sb->s_type);
			schedule_delayed_work(&tmem_fs_discovery, delay);
		}
		return true;
	}
	return false;
}

/* Lets the discovery empty the pools of file systems for which the caller has set "flush". */
static void discover_soon(const struct tmem_fs_type *type)
{
	if (type == &tmem_swap_type) {
		tmem_swap_soon();
		return;
	}
	set_bit(type - tmem_fs_types, &tmem_fs_types_noted);
	mod_delayed_work(tmem_system_wq, &tmem_fs_discovery, 0);
}

/*
 * Drops the held pages of a file system. When the function returns, no page is put or got any more,
 * except by gets that have already begun. The discovery work then empties the pool. It allows puts
 * and gets again, unless a page was wrong. Context: any but NMI.
 */
void tmem_fs_flush(struct tmem_fs *fs)
{
	if (READ_ONCE(tmem_fs_stopped))
		return;
	WRITE_ONCE(fs->flush, true);
	WRITE_ONCE(fs->live, false);
	discover_soon(fs->type);
}

/* Drops the held pages of all file systems. Context: any but NMI. */
void tmem_fs_flush_all(void)
{
	struct tmem_fs *fs;
	unsigned int i;

	rcu_read_lock();
	hash_for_each_rcu(tmem_fs_hash, i, fs, node)
		tmem_fs_flush(fs);
	rcu_read_unlock();
}

/* Allows or forbids puts and gets of a file system. */
static void set_live(struct tmem_fs *fs)
{
	lockdep_assert_held(&tmem_fs_switch_lock);
	WRITE_ONCE(fs->live, fs->area && !fs->off && !fs->type->off && !*fs->refused &&
		   !READ_ONCE(fs->flush) && !tmem_pool_is_wrong(fs->pool));
}

/* Allows puts and gets of a file system whose pool is empty, if nothing forbids them. Sleeps. */
void tmem_fs_start(struct tmem_fs *fs)
{
	mutex_lock(&tmem_fs_switch_lock);
	set_live(fs);
	mutex_unlock(&tmem_fs_switch_lock);
}

/*
 * Switches all mounts of @type off or on, also future ones; or, if it is NULL, the mount @only. A
 * mount is served if neither it nor its type is off.
 *
 * Off: when the function returns, the pools are empty and no page is put or got, except by gets
 * whose request is in flight, which end by their deadline. It sleeps, but does not wait for
 * s_umount or discovery_lock.
 */
void tmem_fs_switch(struct tmem_fs_type *type, struct tmem_fs *only, bool on)
{
	struct tmem_fs *fs, *chosen[TMEM_FS_MAX];
	unsigned int i, nr = 0;

	mutex_lock(&tmem_fs_switch_lock);
	WRITE_ONCE(*(only ? &only->off : &type->off), !on);
	/* chosen[] has space for all entries of the table, which are at most TMEM_FS_MAX. */
	spin_lock_irq(&tmem_fs_lock);
	hash_for_each(tmem_fs_hash, i, fs, node) {
		if (only ? fs != only : fs->type != type)
			continue;
		set_live(fs);
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
}

/*
 * Prints one line without its end: the state of a mount, with the reason if it is not cached.
 * Returns the number of characters. Context: any.
 */
int tmem_fs_state(const struct tmem_fs *fs, char *buf, size_t bytes)
{
	const char *state = "on", *why;
	bool is_swap = tmem_is_swap(fs->sb);
	u64 block;

	why = tmem_pool_why(fs->pool, &block);
	if (READ_ONCE(fs->off) || READ_ONCE(fs->type->off))
		state = "off";
	else if (*fs->refused)
		state = fs->refused;
	else if (why)
		return scnprintf(buf, bytes,
				 "blocked: %s, block %llu; %s", why, block, is_swap ?
				 SWAP_AGAIN : "check the file system and mount it again");
	else if (!fs->area)
		return scnprintf(buf, bytes, "blocked: %s", fs->no_area);
	else if (READ_ONCE(fs->area->failed))
		state = is_swap ?
			"blocked: a write failed; " SWAP_AGAIN :
			"blocked: a write of the disk failed; mount the file system again";
	else if (tmem_pool_refused(fs->pool))
		state = "blocked: the host has no private pools; it needs a newer tmemd";
	else if (!tmem_area_works(fs->area) && !fs->area->drained)
		state = is_swap ?
			"blocked: a write was missed; " SWAP_AGAIN :
			"blocked: the driver does not see all writes of the disk";
	else if (!tmem_area_works(fs->area) || !READ_ONCE(fs->live))
		state = "starting";
	return scnprintf(buf, bytes, "%s", state);
}
