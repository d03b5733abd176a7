// SPDX-License-Identifier: GPL-2.0-only
/*
 * Properties of a mount that are private to its file system: the mount options, and whether an ext4
 * may store files in their inodes. The driver reads them from the text that /proc/self/mountinfo
 * has, and from the superblock, whose format on the disk is stable.
 */
#include <linux/buffer_head.h>
#include <linux/delay.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <linux/seq_file.h>
#include <linux/slab.h>

#include "fs.h"

/* Size of the buffer for mount options. Options of an xfs take a few hundred bytes. */
#define OPTIONS_BYTES 4096

/*
 * Place of the superblock in an ext4, and of two fields in it, in bytes. Source: the section "Super
 * Block" of Documentation/filesystems/ext4.
 */
#define EXT4_SUPER_OFFSET		1024
#define EXT4_SUPER_MAGIC_OFFSET		0x38
#define EXT4_SUPER_INCOMPAT_OFFSET	0x60
/* Bit of the incompatible features: small files and directories may be stored in their inode. */
#define EXT4_INCOMPAT_INLINE_DATA	0x8000

/*
 * Number of attempts to find the buffer of the superblock, and the time between two of them. A
 * search does not find a buffer whose page the kernel tries to migrate at this moment. Such a
 * migration ends soon and fails, because ext4 uses the buffer.
 */
#define SUPER_TRIES 5
#define SUPER_TRY_MS 20

/**
 * tmem_sb_has_option() - check whether a mount has an option
 * @sb: its super block, s_umount held
 * @option: the option as in /proc/self/mountinfo, with the comma before it
 *
 * Context: process, may sleep, does no I/O.
 * Return: true if it has the option, or if its options cannot be read.
 */
bool tmem_sb_has_option(struct super_block *sb, const char *option)
{
	struct seq_file options = { .size = OPTIONS_BYTES };
	bool has = true;

	if (!sb->s_op->show_options)
		return false;
	options.buf = kzalloc(OPTIONS_BYTES, GFP_KERNEL);
	if (options.buf && !sb->s_op->show_options(&options, sb->s_root) &&
	    options.count < OPTIONS_BYTES)
		has = strstr(options.buf, option);
	kfree(options.buf);
	return has;
}

/**
 * tmem_ext4_refusal() - check whether an ext4 may store files in their inodes (inline_data)
 * @sb: its super block, s_umount held
 *
 * No hook sees writes of data that is stored in an inode. When a file becomes too large for its
 * inode, ext4 writes the file's first block through the journal. Until the block has been copied
 * from the journal to its place, a read of the file may return the old content of the block.
 *
 * The function reads the buffer of the superblock, which ext4 itself keeps in memory while it is
 * mounted. With the mount option sb, ext4 uses another superblock. Neither the kernel nor tune2fs
 * adds the feature to a mounted file system. e2fsck may add it to a damaged root that is mounted
 * read-only, and then demands a restart of the system.
 *
 * Context: process, sleeps for SUPER_TRIES * SUPER_TRY_MS at most, does no I/O.
 * Return: the reason not to serve the file system, or NULL.
 */
const char *tmem_ext4_refusal(struct super_block *sb)
{
	const char *why = "ext4's features cannot be read; mount it without the option sb";
	struct buffer_head *bh = NULL;
	unsigned int tries;
	const char *super;

	if (tmem_sb_has_option(sb, ",sb="))
		return why;
	/*
	 * sb_getblk() could wait for a read of the page that has the buffer, which another task has
	 * started, and so for a disk that does not answer.
	 */
	for (tries = 0; tries < SUPER_TRIES; tries++) {
		bh = sb_find_get_block(sb, EXT4_SUPER_OFFSET / sb->s_blocksize);
		if (bh)
			break;
		msleep(SUPER_TRY_MS);
	}
	if (!bh || !buffer_uptodate(bh))
		goto out;
	super = bh->b_data + EXT4_SUPER_OFFSET % sb->s_blocksize;
	if (le16_to_cpup((__le16 *)(super + EXT4_SUPER_MAGIC_OFFSET)) != EXT4_SUPER_MAGIC)
		goto out;
	why = NULL;
	if (le32_to_cpup((__le32 *)(super + EXT4_SUPER_INCOMPAT_OFFSET)) &
	    EXT4_INCOMPAT_INLINE_DATA)
		why = "ext4 has the feature inline_data; make it again without this feature";
out:
	brelse(bh);
	return why;
}
