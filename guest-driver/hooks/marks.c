// SPDX-License-Identifier: GPL-2.0-only
/*
 * Marks of inodes whose cached pages may differ from the disk, so that the driver takes no puts of
 * them.
 *
 * A page that is read in during a write below the page cache is clean and may be old. It can stay
 * old for as long as it is cached, because the kernel does not invalidate it after a direct write
 * that failed midway, after swapoff or after EXT4_IOC_MOVE_EXT. So the driver clears a mark only
 * when no such page can be left:
 *
 * - at the eviction of the inode, or
 * - under the i_pages lock, on three conditions: no task has the inode open for writing; it is
 *   neither a quota file nor a swap file; and no page is cached except those that the caller holds
 *   locked to fill them from the disk, or removes under that lock.
 *
 * A task that writes below the page cache opens the inode for writing before the mark is set, and
 * keeps it open until the write has ended, asynchronous writes included. The kernel opens no quota
 * file when it writes its blocks, but clears S_NOQUOTA only when the blocks are on the disk. A put
 * never clears a mark.
 *
 * Marks that cannot be stored are lost. The mount then takes no puts until a sweep has marked each
 * inode again that may need it. A sweep also handles changes from before the driver knew the mount.
 *
 * core/bypass.c stores the marks. Out of scope: which operations set a mark (coherence.c).
 */
#include <linux/fs.h>
#include <linux/pagemap.h>

#include "hooks.h"

/*
 * Returns whether an inode has a mark that stays until a task that has the inode open for writing
 * closes it. Two facts make the answer reliable. Marks of inodes in use are cleared under the
 * i_pages lock only, so a mark that was cleared earlier is not seen. A mark is not cleared while
 * there are writers, and each writer is counted before it changes the inode.
 */
static bool marked_for_writer(struct tmem_fs *fs, struct inode *inode)
{
	struct address_space *mapping = &inode->i_data;
	unsigned long flags;
	bool marked;

	xa_lock_irqsave(&mapping->i_pages, flags);
	marked = atomic_read(&inode->i_writecount) > 0 && tmem_is_marked(fs->pool, inode->i_ino);
	xa_unlock_irqrestore(&mapping->i_pages, flags);
	return marked;
}

/**
 * tmem_fs_bypass() - mark an inode that is about to change below the page cache
 * @fs: its file system
 * @inode: the inode
 * @why: reason, for the counters
 *
 * A marked inode takes only the lock of its own page cache, and not the lock of the mount's marks.
 * Its entries are erased all the same: the task that set the mark may not have erased them yet. The
 * bucket that is searched for them has at most BUCKET_OBJECTS_MAX inodes.
 *
 * Context: any but NMI; the caller does not hold the i_pages lock.
 */
void tmem_fs_bypass(struct tmem_fs *fs, struct inode *inode, enum tmem_inval why)
{
	u64 ino = inode->i_ino;

	/*
	 * Void the pending comparisons of this inode's hits with the disk, even if the inode is
	 * already marked. A get from before the mark may have queued one, which would compare the
	 * page with changed data.
	 */
	tmem_verify_void(fs, ino, 0, ULONG_MAX);
	if (!marked_for_writer(fs, inode) && tmem_bypass(fs->pool, ino))
		tmem_fs_sweep_soon(fs);
	tmem_invalidate_inode(fs->pool, ino, why);
}

/*
 * Clears a mark unless a task, or the kernel itself, may be writing below the page cache. The
 * kernel does so while the inode is a quota file or a swap file.
 */
static void unmark(struct tmem_fs *fs, const struct inode *inode)
{
	if (!(READ_ONCE(inode->i_flags) & (S_NOQUOTA | S_SWAPFILE)))
		tmem_unbypass(fs->pool, inode->i_ino, &inode->i_writecount);
}

/**
 * tmem_fs_emptied() - clear the mark of an inode whose last cached pages are being removed
 * @fs: its file system
 * @inode: the inode; the i_pages lock is held, and no page is left when it is released
 *
 * The mark stays while the inode is open for writing, or is a quota file or a swap file.
 *
 * Context: any but NMI.
 */
void tmem_fs_emptied(struct tmem_fs *fs, const struct inode *inode)
{
	lockdep_assert_held(&inode->i_data.i_pages.xa_lock);
	unmark(fs, inode);
}

/**
 * tmem_fs_clear_mark() - clear the mark of an inode if none of its cached pages can be old
 * @fs: its file system
 * @inode: the inode
 * @own: number of pages that the caller has added, holds locked, and is about to read
 *
 * Context: any but NMI.
 */
void tmem_fs_clear_mark(struct tmem_fs *fs, struct inode *inode, unsigned long own)
{
	struct address_space *mapping = &inode->i_data;
	unsigned long flags;

	if (likely(!tmem_is_bypassed(fs->pool, inode->i_ino)))
		return;
	xa_lock_irqsave(&mapping->i_pages, flags);
	if (mapping->nrpages == own)
		unmark(fs, inode);
	xa_unlock_irqrestore(&mapping->i_pages, flags);
}

/**
 * tmem_fs_inode_gone() - handle the eviction of an inode, whose page cache is empty
 * @fs: its file system
 * @inode: the inode
 *
 * The mark is cleared, because no task has the inode open. If the inode still has a name, its
 * entries stay: they serve the next reader. The entries of a deleted inode are erased.
 */
void tmem_fs_inode_gone(struct tmem_fs *fs, const struct inode *inode)
{
	u64 ino = inode->i_ino;

	if (!inode->i_nlink || !tmem_fs_inode_ok(fs, inode))
		tmem_invalidate_inode(fs->pool, ino, TMEM_INVAL_INODE);
	if (!inode->i_nlink)
		tmem_policy_forget(fs->pool, ino);
	tmem_unbypass(fs->pool, ino, NULL);
}

static bool clear_idle(struct inode *inode, void *fs)
{
	if (S_ISREG(inode->i_mode))
		tmem_fs_clear_mark(fs, inode, 0);
	return false;
}

/*
 * Marks an inode that may have changed without a hook. Its entries can stay: each was made while
 * the inode had no mark, and operations that changed the inode since then have erased it.
 */
static bool mark_suspect(struct inode *inode, void *arg)
{
	struct tmem_fs *fs = arg;

	if (S_ISREG(inode->i_mode) &&
	    (atomic_read(&inode->i_writecount) > 0 || READ_ONCE(inode->i_data.nrpages)))
		tmem_bypass(fs->pool, inode->i_ino);
	return false;
}

/**
 * tmem_fs_mark_suspects() - mark each inode that may have changed without a hook
 * @fs: a file system that the hooks have not known until now, or whose marks were lost
 * @sb: its super block, s_umount held
 *
 * The function marks inodes that are open for writing and inodes that have cached pages. No other
 * inode has pages that could differ from the disk. The inodes need not be visited atomically: if a
 * task begins to write or makes an inode during the walk, the hooks see it.
 *
 * Context: process, may sleep.
 * Return: true if all marks were stored.
 */
bool tmem_fs_mark_suspects(struct tmem_fs *fs, struct super_block *sb)
{
	unsigned long lost = tmem_bypass_lost(fs->pool);

	tmem_fs_walk(sb, mark_suspect, fs);
	return tmem_bypass_clear_lost(fs->pool, lost);
}

/**
 * tmem_fs_sweep() - clear the marks that are no longer needed
 * @fs: the file system. Its memory for marks runs short, it has lost marks, or ext4 has found an
 * error.
 * @sb: its super block, s_umount held
 *
 * Context: process, may sleep.
 * Return: true if no mark of the file system is missing.
 */
bool tmem_fs_sweep(struct tmem_fs *fs, struct super_block *sb)
{
	if (tmem_bypass_is_all(fs->pool)) {
		tmem_pool_empty(fs->pool);
		return true;
	}
	tmem_fs_walk(sb, clear_idle, fs);
	return !tmem_bypass_lost(fs->pool) || tmem_fs_mark_suspects(fs, sb);
}
