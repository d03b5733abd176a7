// SPDX-License-Identifier: GPL-2.0-only
/*
 * Hooks of functions that change the content of a file, and the invalidations that they need. Each
 * comment says why no concurrent put or get can leave or find old content.
 */
#include <linux/fadvise.h>
#include <linux/fs.h>
#include <linux/fs_context.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pagemap.h>
#include <linux/security.h>

#include "../compat.h"
#include "hooks.h"

/*
 * Truncate, punch, zero, collapse, insert, clone and dedupe, and eviction.
 *
 * The range is erased after the original ran, because reclaim may put a page of the range until the
 * page has left the page cache. From then until the blocks have changed, no page of the range can
 * be read in: file systems hold the invalidate_lock. (A page beyond the new end of file is neither
 * put nor got.) Pages that are cut in part are erased as well.
 *
 * Verifications become void before the original runs, because it zeroes parts of pages.
 */
static void wrap_truncate(struct address_space *mapping, loff_t start_byte, loff_t last_byte)
{
	struct inode *inode = mapping->host;
	pgoff_t first = start_byte >> PAGE_SHIFT;
	/* -1 is the end of the file; as a page number it is all ones, too. */
	pgoff_t last = (u64)last_byte == U64_MAX ? ULONG_MAX : (u64)last_byte >> PAGE_SHIFT;
	struct tmem_fs *fs;
	bool ours;

	tmem_enter();
	ours = inode && S_ISREG(inode->i_mode) && mapping == &inode->i_data;
	if (ours) {
		rcu_read_lock();
		fs = tmem_fs_find(inode->i_sb);
		if (fs)
			tmem_verify_void(fs, inode->i_ino, first, last);
		rcu_read_unlock();
	}

	tmem_original(truncate_inode_pages_range)(mapping, start_byte, last_byte);

	if (ours) {
		/* Looked up again, because the file system may have been registered meanwhile. */
		rcu_read_lock();
		fs = tmem_fs_find(inode->i_sb);
		if (fs) {
			tmem_verify_void(fs, inode->i_ino, first, last);
			if (mapping_exiting(mapping)) {
				tmem_fs_inode_gone(fs, inode);
			} else if (first <= last) {
				tmem_invalidate(fs->pool, inode->i_ino, first, last,
						TMEM_INVAL_TRUNCATE);
				tmem_fs_clear_mark(fs, inode, 0);
			}
		}
		rcu_read_unlock();
	}
	tmem_leave();
}

static bool wants_truncate(struct tmem_args *args)
{
	const struct address_space *mapping = (void *)tmem_arg(args, 0);

	return mapping->host && tmem_fs_serves(mapping->host->i_sb);
}

static void bypass_inode(const struct inode *inode, enum tmem_inval why)
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

/*
 * Marks an inode whose direct write is about to start (or has ended). Erasing the range of the
 * write is not enough: a page that is read in during the write and reclaimed again would be put.
 * The kernel leaves out its invalidation at the end if nothing is cached then, and if the write
 * failed midway, which leaves a clean but old page in the page cache. So the inode stays marked
 * until no page of that time is left (marks.c).
 */
static void entry_direct(struct tmem_args *args)
{
	const struct address_space *mapping = (void *)tmem_arg(args, 0);

	bypass_inode(mapping->host, TMEM_INVAL_DIRECT);
}

/**
 * tmem_entry_move_ext - mark two files whose blocks are about to be exchanged
 * @args: arguments of ext4_move_extents(); the first two are the files
 *
 * The exchange neither dirties nor removes pages of the donor, so the donor's page cache may have
 * content that the disk no longer has. Pages that are being read in at this moment are filled under
 * their lock, as by the disk.
 */
void tmem_entry_move_ext(struct tmem_args *args)
{
	const struct file *orig = (void *)tmem_arg(args, 0);
	const struct file *donor = (void *)tmem_arg(args, 1);

	bypass_inode(file_inode(orig), TMEM_INVAL_MOVE_EXT);
	bypass_inode(file_inode(donor), TMEM_INVAL_MOVE_EXT);
}

/**
 * tmem_entry_swapon - mark a file that is about to become a swap file
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
 * tmem_entry_bmap - mark a file whose block numbers are asked for, if it is open for writing
 * @args: arguments of ->bmap(); the first is the mapping
 *
 * md writes the blocks of a bitmap file itself. It has the file open for writing when it asks, and
 * pages that were cached before stay cached after md closed the file. If a file is not open for
 * writing, the caller only reads block numbers (FIBMAP). Marks for all such files could need more
 * memory than there is.
 */
void tmem_entry_bmap(struct tmem_args *args)
{
	const struct address_space *mapping = (void *)tmem_arg(args, 0);

	if (atomic_read(&mapping->host->i_writecount) > 0)
		bypass_inode(mapping->host, TMEM_INVAL_INODE);
}

/*
 * Registers a new mount before the first file is opened on it. Coherence does not depend on this:
 * files that are open for writing when the mount becomes known are cached only after they were
 * closed.
 *
 * vfs_get_tree() would be the natural place, but it may wait for a disk for ever, and the unloading
 * of this module would wait with it. It calls this function at its end, with s_umount held for
 * writing. The function allocates memory but does not wait for anything else.
 */
static int wrap_set_mnt_opts(struct super_block *sb, void *options, unsigned long kern_flags,
			     unsigned long *set_kern_flags)
{
	int err;

	tmem_enter();
	err = security_sb_set_mnt_opts(sb, options, kern_flags, set_kern_flags);
	if (!err)
		tmem_fs_mounted(sb);
	tmem_leave();
	return err;
}

static bool wants_set_mnt_opts(struct tmem_args *args)
{
	return tmem_fs_serves((void *)tmem_arg(args, 0));
}

/* Frees the pool before the super block is taken apart; see tmem_fs_drop(). */
static void wrap_shutdown_super(struct super_block *sb)
{
	tmem_enter();
	tmem_fs_drop(sb);
	tmem_original(generic_shutdown_super)(sb);
	tmem_leave();
}

static bool wants_shutdown_super(struct tmem_args *args)
{
	return tmem_fs_serves((void *)tmem_arg(args, 0));
}

/*
 * Ranges of running POSIX_FADV_DONTNEED calls. Pages that such a call evicts are not put, and the
 * entries of its range are erased. The advice is a wish, and coherence does not depend on it: with
 * more calls at once than slots, the pages of the others are put and erased afterwards.
 */
#define TMEM_FADVISE_MAX 8

static struct fadvise_range {
	const struct address_space *mapping;
	pgoff_t first, last;
} fadvise_ranges[TMEM_FADVISE_MAX];
static unsigned long fadvise_used;

/**
 * tmem_fadvise_covers - check whether a running POSIX_FADV_DONTNEED covers a page
 * @mapping: mapping of the page
 * @index: index of the page
 *
 * Context: any. The answer may be wrong while the call begins or ends.
 */
bool tmem_fadvise_covers(const struct address_space *mapping, pgoff_t index)
{
	unsigned int i;

	if (likely(!READ_ONCE(fadvise_used)))
		return false;
	for (i = 0; i < TMEM_FADVISE_MAX; i++) {
		if (READ_ONCE(fadvise_ranges[i].mapping) == mapping &&
		    index >= READ_ONCE(fadvise_ranges[i].first) &&
		    index <= READ_ONCE(fadvise_ranges[i].last))
			return true;
	}
	return false;
}

static int fadvise_dontneed(struct file *file, loff_t offset, loff_t len)
{
	struct address_space *mapping = file->f_mapping;
	struct inode *inode = mapping->host;
	/* Whole pages only, as in the kernel. A length of 0 means up to the end of the file. */
	u64 end = (u64)offset + (u64)len;
	pgoff_t first = DIV_ROUND_UP_ULL((u64)offset, PAGE_SIZE);
	pgoff_t nr = len && end >= (u64)len && end < (u64)i_size_read(inode) ?
		     end >> PAGE_SHIFT : ULONG_MAX;
	/* A range within one page contains no whole page. */
	unsigned int slot = nr > first ? 0 : TMEM_FADVISE_MAX;
	struct tmem_fs *fs;
	int ret;

	for (; slot < TMEM_FADVISE_MAX; slot++) {
		if (!test_and_set_bit(slot, &fadvise_used)) {
			fadvise_ranges[slot].first = first;
			fadvise_ranges[slot].last = nr - 1;
			/* Set after the range. A concurrent reader may still miss the slot. */
			smp_store_release(&fadvise_ranges[slot].mapping, mapping);
			break;
		}
	}
	ret = tmem_original(generic_fadvise)(file, offset, len, POSIX_FADV_DONTNEED);
	if (slot < TMEM_FADVISE_MAX) {
		WRITE_ONCE(fadvise_ranges[slot].mapping, NULL);
		clear_bit_unlock(slot, &fadvise_used);
	}
	if (ret || nr <= first)
		return ret;

	rcu_read_lock();
	fs = tmem_fs_find(inode->i_sb);
	if (fs)
		tmem_invalidate(fs->pool, inode->i_ino, first, nr - 1, TMEM_INVAL_FADVISE);
	rcu_read_unlock();
	return ret;
}

/*
 * Writing 3 to drop_caches drops pages first, which are put, and then calls drop_slab(). This
 * parameter is for users who want an empty cache for a measurement.
 */
static bool drop_caches_flush;
module_param(drop_caches_flush, bool, 0644);
MODULE_PARM_DESC(drop_caches_flush, "writing 2 or 3 to drop_caches empties the host's cache, too");

static void entry_drop_slab(struct tmem_args *args)
{
	if (READ_ONCE(drop_caches_flush))
		tmem_fs_flush_all();
}

static int wrap_fadvise(struct file *file, loff_t offset, loff_t len, int advice)
{
	int ret;

	tmem_enter();
	if (advice == POSIX_FADV_DONTNEED && offset >= 0 && len >= 0 &&
	    S_ISREG(file_inode(file)->i_mode))
		ret = fadvise_dontneed(file, offset, len);
	else
		ret = tmem_original(generic_fadvise)(file, offset, len, advice);
	tmem_leave();
	return ret;
}

static bool wants_fadvise(struct tmem_args *args)
{
	const struct file *file = (void *)tmem_arg(args, 0);

	return tmem_fs_serves(file_inode(file)->i_sb);
}

/**
 * tmem_coherence_add - hook the functions of mm and VFS that are watched on every kernel
 *
 * Return: 0 or an error, which was reported.
 */
int tmem_coherence_add(void)
{
	const struct tmem_target targets[] = {
		{ (unsigned long)truncate_inode_pages_range, TMEM_HOOK_TRUNCATE, NULL,
		  wrap_truncate, wants_truncate },
		{ (unsigned long)invalidate_inode_pages2_range, TMEM_HOOK_DIRECT, entry_direct },
		{ (unsigned long)security_sb_set_mnt_opts, TMEM_HOOK_MOUNT, NULL,
		  wrap_set_mnt_opts, wants_set_mnt_opts },
		{ (unsigned long)generic_shutdown_super, TMEM_HOOK_UNMOUNT, NULL,
		  wrap_shutdown_super, wants_shutdown_super },
		{ (unsigned long)generic_fadvise, TMEM_HOOK_FADVISE, NULL, wrap_fadvise,
		  wants_fadvise },
	};
	unsigned int i;
	int err;

	for (i = 0; i < ARRAY_SIZE(targets); i++) {
		/* Without this hook, a mount is known at its first page. */
		if (targets[i].hook == TMEM_HOOK_MOUNT && !TMEM_HAS_MOUNT_HOOK)
			continue;
		err = tmem_target_add(&targets[i]);
		if (err) {
			tmem_hooks_off("cannot hook %s: error %d",
				       tmem_hook_names[targets[i].hook], err);
			return err;
		}
	}
	/* Coherence does not depend on this hook; without it, the switch has no effect. */
	err = tmem_target_add_name("drop_slab", TMEM_HOOK_DROP_SLAB, entry_drop_slab);
	if (err)
		pr_info("virtio_tmem: cannot hook drop_slab: error %d; drop_caches_flush does nothing\n",
			err);
	return 0;
}
