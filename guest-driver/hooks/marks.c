// SPDX-License-Identifier: GPL-2.0-only
/*
 * Which inodes of a mount are marked, so that they take no puts: those that are written below the
 * page cache.
 *
 * A mark holds while anyone has the inode open for writing. Clearing it at a put and setting it
 * are one at a time (bypass_lock), and whoever writes raised i_writecount before he set the mark,
 * so a mark set for a running write is never cleared. A sticky mark stays until the inode is
 * evicted: its page cache may hold what the disk does not.
 *
 * Where the marks are kept is core/bypass.c. Never here: which operations set one (coherence.c).
 */
#include <linux/fs.h>
#include <linux/spinlock.h>

#include "hooks.h"

static bool tmem_mount_sticky(const struct tmem_mount *mount, u64 ino)
{
	unsigned int i;

	lockdep_assert_held(&mount->bypass_lock);
	if (mount->sticky_all)
		return true;
	for (i = 0; i < mount->nr_sticky; i++)
		if (mount->sticky[i] == ino)
			return true;
	return false;
}

/**
 * tmem_fs_bypass - an inode is about to change below the page cache
 * @fs: its file system
 * @inode: the inode
 * @why: counted
 * @sticky: not only while it is open for writing but until it is evicted
 *
 * Context: any but NMI.
 */
void tmem_fs_bypass(struct tmem_fs *fs, const struct inode *inode, enum tmem_inval why,
		    bool sticky)
{
	struct tmem_mount *mount = fs->mount;
	u64 ino = inode->i_ino;
	unsigned long flags;

	/* Also where the mark is set already: a get may have come before it. */
	tmem_verify_void(fs, ino, 0, ULONG_MAX);

	spin_lock_irqsave(&mount->bypass_lock, flags);
	if (sticky && !tmem_mount_sticky(mount, ino)) {
		if (mount->nr_sticky < TMEM_STICKY_MAX) {
			mount->sticky[mount->nr_sticky] = ino;
			WRITE_ONCE(mount->nr_sticky, mount->nr_sticky + 1);
		} else {
			WRITE_ONCE(mount->sticky_all, true);
		}
	}
	/* Even if it counts as marked: in a pool without room for marks, it may hold pages. */
	tmem_bypass(fs->pool, ino, why);
	spin_unlock_irqrestore(&mount->bypass_lock, flags);
}

/**
 * tmem_fs_inherit_marks - a mount's sticky marks hold for the pool of one that replaces another
 * @fs: the new one, which nobody finds yet
 *
 * Under the lock, so that none of them ends on the way.
 *
 * Context: process.
 * Return: true if there were too many to keep: then any inode may be one that had a mark.
 */
bool tmem_fs_inherit_marks(struct tmem_fs *fs)
{
	struct tmem_mount *mount = fs->mount;
	unsigned int i;
	bool lost;

	spin_lock_irq(&mount->bypass_lock);
	for (i = 0; i < mount->nr_sticky; i++)
		tmem_bypass(fs->pool, mount->sticky[i], TMEM_INVAL_DIRECT);
	lost = mount->sticky_all;
	WRITE_ONCE(mount->sticky_all, false);
	spin_unlock_irq(&mount->bypass_lock);
	return lost;
}

/**
 * tmem_fs_may_put - is the inode free of a mark, or can it be freed of it?
 * @fs: its file system
 * @inode: the inode
 *
 * The caller found it live, so that the marks are set. A mark that is set after
 * this said yes makes tmem_put() refuse.
 *
 * Context: any but NMI.
 */
bool tmem_fs_may_put(struct tmem_fs *fs, const struct inode *inode)
{
	struct tmem_mount *mount = fs->mount;
	u64 ino = inode->i_ino;
	unsigned long flags;
	bool ok = true;

	if (READ_ONCE(mount->sticky_all))
		return false;
	if (likely(!tmem_is_bypassed(fs->pool, ino)))
		return true;
	spin_lock_irqsave(&mount->bypass_lock, flags);
	if (tmem_mount_sticky(mount, ino) || atomic_read(&inode->i_writecount) > 0)
		ok = false;
	else
		tmem_unbypass(fs->pool, ino);
	spin_unlock_irqrestore(&mount->bypass_lock, flags);
	return ok;
}

/**
 * tmem_fs_inode_gone - an inode was evicted and its page cache is empty
 * @fs: its file system
 * @inode: the inode
 *
 * Marks end: nobody has it open. What is held of an inode that still has a
 * name stays, which is the point of the cache; that of a deleted one goes.
 */
void tmem_fs_inode_gone(struct tmem_fs *fs, const struct inode *inode)
{
	struct tmem_mount *mount = fs->mount;
	u64 ino = inode->i_ino;
	unsigned long flags;
	unsigned int i;

	if (!inode->i_nlink || !tmem_fs_inode_ok(fs, inode))
		tmem_invalidate_inode(fs->pool, ino, TMEM_INVAL_INODE);
	if (!inode->i_nlink)
		tmem_policy_forget(fs->pool, ino);

	/* A sticky one may have no mark in a pool that is about to replace another. */
	if (!tmem_is_bypassed(fs->pool, ino) && !READ_ONCE(mount->nr_sticky))
		return;
	spin_lock_irqsave(&mount->bypass_lock, flags);
	for (i = 0; i < mount->nr_sticky; i++) {
		if (mount->sticky[i] == ino) {
			mount->sticky[i] = mount->sticky[mount->nr_sticky - 1];
			WRITE_ONCE(mount->nr_sticky, mount->nr_sticky - 1);
			break;
		}
	}
	tmem_unbypass(fs->pool, ino);
	spin_unlock_irqrestore(&mount->bypass_lock, flags);
}
