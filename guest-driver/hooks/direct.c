// SPDX-License-Identifier: GPL-2.0-only
/*
 * Operations that write below the page cache: direct writes, EXT4_IOC_MOVE_EXT, swap files, md's
 * bitmap files, and quota files. The hook of an operation marks the inode before the operation
 * starts, because pages that are cached at that time, or are read in during the operation, are
 * clean and may be old. The hook of dquot_disable() marks a quota file when the writes end.
 */
#include <linux/fs.h>
#include <linux/quota.h>

#include "../compat.h"
#include "hooks.h"

static void bypass_inode(struct inode *inode, enum tmem_inval why)
{
	struct tmem_fs *fs;

	if (!inode || !S_ISREG(inode->i_mode))
		return;
	rcu_read_lock();
	fs = tmem_fs_find(inode->i_sb);
	if (fs)
		tmem_fs_bypass(fs, inode, why);
	rcu_read_unlock();
}

/**
 * tmem_entry_direct() - mark an inode whose direct write is about to start (or has ended)
 * @args: arguments of invalidate_inode_pages2_range(); the first is the mapping
 *
 * Erasing the range of the write is not enough: a page that is read in during the write and
 * reclaimed again would be put. At the end of the write, the kernel does not invalidate the range
 * if nothing is cached at that time. It does not invalidate either if the write failed midway,
 * which leaves a clean but old page in the page cache. So the inode stays marked until no page that
 * was cached during the write is left (marks.c).
 */
void tmem_entry_direct(struct tmem_args *args)
{
	const struct address_space *mapping = (void *)tmem_arg(args, 0);

	bypass_inode(mapping->host, TMEM_INVAL_DIRECT);
}

/**
 * tmem_entry_move_ext() - mark two files whose blocks are about to be exchanged
 * @args: arguments of ext4_move_extents(); the first two are the files
 *
 * The exchange neither dirties nor removes pages of the donor, so the donor's page cache may have
 * content that the disk no longer has. Pages that the driver is filling from the host are locked,
 * like pages that are being read from the disk, so the exchange treats both alike.
 */
void tmem_entry_move_ext(struct tmem_args *args)
{
	const struct file *orig = (void *)tmem_arg(args, 0);
	const struct file *donor = (void *)tmem_arg(args, 1);

	bypass_inode(file_inode(orig), TMEM_INVAL_MOVE_EXT);
	bypass_inode(file_inode(donor), TMEM_INVAL_MOVE_EXT);
}

/**
 * tmem_entry_swapon() - mark a file that is about to become a swap file
 * @args: arguments of ->swap_activate(); the second is the file
 *
 * Swapping writes below the page cache, and pages that were cached before stay cached after
 * swapoff.
 */
void tmem_entry_swapon(struct tmem_args *args)
{
	const struct file *file = (void *)tmem_arg(args, 1);

	bypass_inode(file_inode(file), TMEM_INVAL_INODE);
}

/**
 * tmem_entry_bmap() - mark a file whose block numbers are requested, if it is open for writing
 * @args: arguments of ->bmap(); the first is the mapping
 *
 * md writes the blocks of a bitmap file itself. It has the file open for writing when it requests
 * block numbers, and pages that were cached before stay cached after md has closed the file. If a
 * file is not open for writing, the caller only reads block numbers (FIBMAP), and the file is not
 * marked: marks for all files whose block numbers are read could need more memory than marks may
 * use.
 */
void tmem_entry_bmap(struct tmem_args *args)
{
	const struct address_space *mapping = (void *)tmem_arg(args, 0);

	if (atomic_read(&mapping->host->i_writecount) > 0)
		bypass_inode(mapping->host, TMEM_INVAL_INODE);
}

/**
 * tmem_entry_quota() - mark the quota files of a file system that may become ordinary files
 * @args: arguments of dquot_disable(); the first is the super block, whose s_umount is held
 *
 * While quotas are on, a quota file has S_NOQUOTA, and the kernel writes its blocks through the
 * buffers of the block device. dquot_disable() writes these buffers back. Then it clears S_NOQUOTA,
 * or suspends quotas. The pages of the file that were cached before are not always removed: not if
 * suspended quotas are switched off, nor if they cannot be resumed, which clears S_NOQUOTA without
 * another call of dquot_disable(). The mark stays while the file has S_NOQUOTA (marks.c).
 */
void tmem_entry_quota(struct tmem_args *args)
{
	const struct super_block *sb = (void *)tmem_arg(args, 0);
	unsigned int type;

	for (type = 0; type < MAXQUOTAS; type++)
		bypass_inode(sb->s_dquot.files[type], TMEM_INVAL_INODE);
}
