// SPDX-License-Identifier: GPL-2.0-only
/*
 * Hooks of functions that change the content of a file, and the invalidations that they need. Each
 * comment says why no concurrent put or get can leave or find old content.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/fs.h>
#include <linux/fs_context.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pagemap.h>
#include <linux/quotaops.h>
#include <linux/security.h>

#include "../compat.h"
#include "blocks.h"
#include "hooks.h"

/*
 * Returns whether a cached folio contains byte @edge and bytes before it. After a truncation with
 * an end at @edge, a part of such a folio has been zeroed: the folio contains a page that is only
 * in part in the range, or it is a dirty large folio that could not be split. The truncation
 * removes all other folios.
 */
static bool cached_across(struct address_space *mapping, loff_t edge)
{
	struct folio *folio = filemap_get_folio(mapping, edge >> PAGE_SHIFT);
	bool across;

	/* If no folio is cached, the result is NULL before Linux 6.3, and an error since then. */
	if (IS_ERR_OR_NULL(folio))
		return false;
	across = edge > folio_pos(folio);
	folio_put(folio);
	return across;
}

/*
 * Returns whether a truncation has zeroed bytes inside the file that are still cached. A truncation
 * to a smaller size zeroes only bytes behind the new end.
 */
static bool left_zeroes(struct address_space *mapping, loff_t start_byte, loff_t last_byte)
{
	if (start_byte >= i_size_read(mapping->host))
		return false;
	return cached_across(mapping, start_byte) ||
	       ((u64)last_byte != U64_MAX && cached_across(mapping, last_byte + 1));
}

/*
 * Replacement of truncate_inode_pages_range(), which truncate, punch, zero, collapse, insert,
 * clone, dedupe and the eviction of an inode call.
 *
 * The entries of the range are erased after the original function ran, because reclaim may put a
 * page of the range until the page has left the page cache. From then until the blocks have
 * changed, no page of the range can be read in: file systems hold the invalidate_lock. (A page
 * beyond the new end of file is neither put nor got.) The entries of pages of which the operation
 * changes only a part are erased as well.
 *
 * Before the original function runs, comparisons with the disk (verify.c) become void and the
 * entries of the range are erased. The original function zeroes parts of clean pages, and reclaim
 * would find that such a page differs from its retained entry. While it runs, no entry of the range
 * becomes retained, because no page is read in. The entries of an inode that is only evicted from
 * memory stay.
 *
 * Punching and zeroing call this function before they change the blocks, which may fail, for
 * example on a full file system. A clean page of which a part was zeroed then differs from the
 * disk. So the inode is marked if a folio with a zeroed part stays cached. The mark stays at least
 * until the folio has left the page cache.
 */
static void wrap_truncate(struct address_space *mapping, loff_t start_byte, loff_t last_byte)
{
	struct inode *inode = mapping->host;
	pgoff_t first = start_byte >> PAGE_SHIFT;
	/*
	 * A last_byte of -1 means the end of the file. Its page number then has all bits set, which
	 * also means the end of the file.
	 */
	pgoff_t last = (u64)last_byte == U64_MAX ? ULONG_MAX : (u64)last_byte >> PAGE_SHIFT;
	struct tmem_fs *fs;
	bool ours;

	tmem_enter();
	ours = inode && S_ISREG(inode->i_mode) && mapping == &inode->i_data;
	/* The erasing of a long range reschedules, so it needs a reference instead of RCU. */
	fs = ours ? tmem_fs_get(inode->i_sb) : NULL;
	if (fs) {
		tmem_verify_void(fs, inode->i_ino, first, last);
		if (!mapping_exiting(mapping))
			tmem_invalidate_range(fs->pool, inode->i_ino, first, last,
					      TMEM_INVAL_TRUNCATE);
		tmem_fs_put(fs);
	}

	tmem_original(truncate_inode_pages_range)(mapping, start_byte, last_byte);

	if (ours) {
		TMEM_HOLD(truncate);
		/*
		 * Look the file system up again, because it may have been registered while the
		 * original function ran.
		 */
		fs = tmem_fs_get(inode->i_sb);
		if (fs) {
			tmem_verify_void(fs, inode->i_ino, first, last);
			if (mapping_exiting(mapping)) {
				tmem_fs_inode_gone(fs, inode);
			} else if (first <= last) {
				/*
				 * Mark before erasing: reclaim may have put a page with zeroes
				 * meanwhile, and this entry is erased. No page of the range was
				 * read in since.
				 */
				if (left_zeroes(mapping, start_byte, last_byte) &&
				    tmem_bypass(fs->pool, inode->i_ino))
					tmem_fs_sweep_soon(fs);
				tmem_invalidate_range(fs->pool, inode->i_ino, first, last,
						      TMEM_INVAL_TRUNCATE);
				tmem_fs_clear_mark(fs, inode, 0);
			}
			tmem_fs_put(fs);
		}
	}
	tmem_leave();
}

static bool wants_truncate(struct tmem_args *args)
{
	const struct address_space *mapping = (void *)tmem_arg(args, 0);

	return mapping->host && tmem_fs_serves(mapping->host->i_sb);
}

/*
 * Registers a new mount before the first file is opened on it. Coherence does not depend on this:
 * files that are open for writing when the mount becomes known are cached only after they were
 * closed.
 *
 * vfs_get_tree() would be the natural place, but it may wait for a disk without limit, and the
 * unloading of this module would wait with it. At its end it calls security_sb_set_mnt_opts(),
 * which this function replaces, with s_umount held for writing. The replacement allocates memory
 * but does not wait for anything else.
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

/* Replacement of generic_shutdown_super(): frees the pool before the super block is shut down. */
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
 * Parameter for users who want an empty cache for a measurement. Writing 3 to drop_caches first
 * drops pages, which the driver puts, and then calls drop_slab(), whose hook empties the pools.
 */
static bool drop_caches_flush;
module_param(drop_caches_flush, bool, 0644);
MODULE_PARM_DESC(drop_caches_flush, "writing 2 or 3 to drop_caches also empties the pools of this guest at the host");

static void entry_drop_slab(struct tmem_args *args)
{
	if (READ_ONCE(drop_caches_flush))
		tmem_fs_flush_all();
}

static bool is_needed_for_blocks(enum tmem_hook hook)
{
	return hook == TMEM_HOOK_MOUNT || hook == TMEM_HOOK_UNMOUNT || hook == TMEM_HOOK_FADVISE;
}

/**
 * tmem_coherence_add() - hook the functions of mm and VFS that the driver needs in every kernel
 *
 * Return: 0 or an error, which tmem_hooks_off() has reported.
 */
int tmem_coherence_add(void)
{
	const struct tmem_target targets[] = {
		{ (unsigned long)truncate_inode_pages_range, TMEM_HOOK_TRUNCATE, NULL,
		  wrap_truncate, wants_truncate },
		{ (unsigned long)invalidate_inode_pages2_range, TMEM_HOOK_DIRECT,
		  tmem_entry_direct },
		{ (unsigned long)security_sb_set_mnt_opts, TMEM_HOOK_MOUNT, NULL,
		  wrap_set_mnt_opts, wants_set_mnt_opts },
		{ (unsigned long)generic_shutdown_super, TMEM_HOOK_UNMOUNT, NULL,
		  wrap_shutdown_super, wants_shutdown_super },
		{ (unsigned long)dquot_disable, TMEM_HOOK_QUOTA, tmem_entry_quota },
		{ (unsigned long)generic_fadvise, TMEM_HOOK_FADVISE, NULL, tmem_wrap_fadvise,
		  tmem_wants_fadvise },
	};
	unsigned int i;
	int err;

	for (i = 0; i < ARRAY_SIZE(targets); i++) {
		/*
		 * Without this hook, the driver registers a mount when it sees the mount's first
		 * page.
		 */
		if (targets[i].hook == TMEM_HOOK_MOUNT && !TMEM_HAS_MOUNT_HOOK)
			continue;
		/* With keys of blocks, changes of files need no hook. */
		if (tmem_blocks_mode == TMEM_BLOCKS_ON && !is_needed_for_blocks(targets[i].hook))
			continue;
		/* Without CONFIG_QUOTA, no file becomes a quota file while it is mounted. */
		if (targets[i].hook == TMEM_HOOK_QUOTA && !IS_ENABLED(CONFIG_QUOTA))
			continue;
		err = tmem_target_add(&targets[i]);
		if (err) {
			tmem_hooks_off("cannot hook %s: error %d",
				       tmem_hook_names[targets[i].hook], err);
			return err;
		}
	}
	return 0;
}

/**
 * tmem_drop_slab_add() - hook drop_slab()
 *
 * Coherence does not depend on this hook. Without it, drop_caches_flush has no effect.
 */
void tmem_drop_slab_add(void)
{
	const struct tmem_target target = {
		.hook = TMEM_HOOK_DROP_SLAB,
		.entry = entry_drop_slab,
	};
	int err = tmem_target_add_name("drop_slab", &target);

	if (err)
		pr_info("cannot hook drop_slab: error %d; drop_caches_flush does nothing\n",
			err);
}
