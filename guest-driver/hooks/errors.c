// SPDX-License-Identifier: GPL-2.0-only
/*
 * Errors of ext4 after which a clean page differs from the disk.
 *
 * ext4 writes data to blocks that count as unwritten, and converts the blocks when the data is on
 * the disk. If the conversion fails, ext4 only logs the failure: the page has the data, is clean,
 * and leaves writeback, but a read from the disk returns zeroes. mapping->wb_err is not set. Before
 * the page leaves writeback, one of the following hooks reports the cause:
 *
 * - a failed conversion: __ext4_warning(), whose fifth argument is the inode number. The inode is
 *   marked (marks.c), and is cached again after the page has left the page cache;
 * - an aborted journal: jbd2_journal_abort(). After it, every conversion fails without a message.
 *   Changed metadata is dropped, so an inode that was evicted can come back in an older state. The
 *   driver empties the pool of the file system, and makes no puts and gets for it until it is
 *   unmounted;
 * - a forced shutdown, or any error of a file system without a journal: the tracepoints
 *   ext4_shutdown and ext4_error. The driver acts as after an aborted journal.
 *
 * xfs sets mapping->wb_err wherever a conversion fails. tmem_fs_inode_ok() checks it.
 *
 * Out of scope: an error from before this module was loaded.
 */
#include <linux/fs.h>
#include <linux/jbd2.h>
#include <linux/string.h>

#include "../compat.h"
#include "hooks.h"

/*
 * Function of fs/ext4/extents.c that converts unwritten blocks. Its only warning is about a failed
 * conversion.
 */
#define CONVERSION "ext4_convert_unwritten_extents"

static void fs_failed(const struct super_block *sb)
{
	struct tmem_fs *fs;

	rcu_read_lock();
	fs = tmem_fs_find(sb);
	if (fs) {
		tmem_bypass_all(fs->pool);
		/* Request a sweep, which empties the pool. */
		tmem_fs_sweep_soon(fs);
	}
	rcu_read_unlock();
}

/**
 * tmem_entry_ext4_warning() - mark the inode of a failed conversion
 * @args: arguments of the function: super block, name of a function, line, format, and, if a
 *        conversion failed, the inode number
 */
void tmem_entry_ext4_warning(struct tmem_args *args)
{
	const struct super_block *sb = (void *)tmem_arg(args, 0);
	const char *function = (void *)tmem_arg(args, 1);
	struct tmem_fs *fs;

	if (strcmp(function, CONVERSION))
		return;
	rcu_read_lock();
	fs = tmem_fs_find(sb);
	if (fs && tmem_bypass(fs->pool, tmem_arg(args, 4)))
		tmem_fs_sweep_soon(fs);
	rcu_read_unlock();
}

/**
 * tmem_entry_journal_abort() - stop caching a file system whose journal is aborted
 * @args: arguments of the function; the first is the journal, whose private field is the super
 *        block
 */
void tmem_entry_journal_abort(struct tmem_args *args)
{
	const journal_t *journal = (void *)tmem_arg(args, 0);

	/*
	 * Other users of jbd2 have something else than a super block in the private field.
	 * fs_failed() only compares the pointer, and does nothing for them.
	 */
	fs_failed(READ_ONCE(journal->j_private));
}

/**
 * tmem_probe_ext4_error() - tracepoint: ext4 found an error
 * @data: unused
 * @sb: super block
 * @function: function of ext4
 * @line: line of its source
 */
void tmem_probe_ext4_error(void *data, struct super_block *sb, const char *function,
			   unsigned int line)
{
	if (!tmem_hook_off(TMEM_HOOK_FS_ERROR))
		fs_failed(sb);
}

/**
 * tmem_probe_ext4_shutdown() - tracepoint: ext4 is about to be shut down by force
 * @data: unused
 * @sb: super block
 * @flags: kind of shutdown
 */
void tmem_probe_ext4_shutdown(void *data, struct super_block *sb, unsigned long flags)
{
	if (!tmem_hook_off(TMEM_HOOK_FS_ERROR))
		fs_failed(sb);
}
