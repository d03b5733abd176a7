// SPDX-License-Identifier: GPL-2.0-only
/*
 * Self-test of the hooks of mm, before anything is cached. It works on an inode of this module, and
 * proves that the kernel calls the hooks with the right folio and that redirection works.
 *
 * The test reaches the functions through exported callers in the kernel, because calls from this
 * module are not redirected.
 */
#include <linux/fs.h>
#include <linux/fs_context.h>
#include <linux/magic.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mount.h>
#include <linux/pagemap.h>
#include <linux/pseudo_fs.h>

#include "../compat.h"
#include "hooks.h"

/* Runs until a failure counts: reclaim takes the few young pages of a run rarely. */
#define RUNS_MAX	3

static atomic_t redirected, original_run;

static noinline void selftest_readahead(struct readahead_control *rac)
{
	struct folio *folio;

	atomic_inc(&original_run);
	while ((folio = readahead_folio(rac))) {
		folio_zero_range(folio, 0, folio_size(folio));
		folio_mark_uptodate(folio);
		folio_unlock(folio);
	}
}

static void wrap_selftest_readahead(struct readahead_control *rac)
{
	tmem_enter();
	atomic_inc(&redirected);
	/* Call the redirected function from its replacement. The call must reach the original. */
	selftest_readahead(rac);
	tmem_leave();
}

static const struct address_space_operations selftest_aops = {
	.readahead = selftest_readahead,
	.dirty_folio = filemap_dirty_folio,
};

static int selftest_init_fs_context(struct fs_context *fc)
{
	/* Any magic number works, because the file system is mounted inside the kernel only. */
	return init_pseudo(fc, ANON_INODE_FS_MAGIC) ? 0 : -ENOMEM;
}

static struct file_system_type selftest_fs = {
	.name = "virtio_tmem_selftest",
	.owner = THIS_MODULE,
	.init_fs_context = selftest_init_fs_context,
	.kill_sb = kill_anon_super,
};

/* A kernel with the patches of intree/ redirects no function. */
const struct tmem_target tmem_selftest_targets[] = {
	{
		.name = TMEM_BUILT_IN ? NULL : "selftest_readahead",
		.addr = (unsigned long)selftest_readahead,
		.hook = TMEM_HOOK_SELFTEST,
		.wrap = wrap_selftest_readahead,
	},
	{}
};

static void selftest_read(struct address_space *mapping)
{
	struct file_ra_state ra = {};
	DEFINE_READAHEAD(rac, NULL, &ra, mapping, 0);

	page_cache_ra_unbounded(&rac, TMEM_SELFTEST_PAGES, 0);
}

static const char *selftest_dirty(struct address_space *mapping)
{
	struct folio *folio = filemap_get_folio(mapping, 1);

	if (IS_ERR_OR_NULL(folio))
		return "redirected readahead left no page";
	folio_lock(folio);
	folio_mark_dirty(folio);
	folio_cancel_dirty(folio);
	folio_unlock(folio);
	folio_put(folio);
	if (atomic_read(&tmem_seen.dirty) != 1 || tmem_seen.dirty_index != 1)
		return "tracepoint writeback_dirty_folio was not seen";
	return NULL;
}

static const char *selftest_mapping(struct inode *inode)
{
	struct address_space *mapping = inode->i_mapping;
	const char *why;

	selftest_read(mapping);
	if (!TMEM_BUILT_IN && !atomic_read(&redirected))
		return "a function was not redirected";
	if (!atomic_read(&original_run))
		return "the original of a redirected function was not reached";

	why = selftest_dirty(mapping);
	if (why)
		return why;

	invalidate_mapping_pages(mapping, 0, -1);
	if (!atomic_read(&tmem_seen.reclaimed))
		return "tracepoint mm_filemap_delete_from_page_cache did not see reclaim";
	if (!atomic_read(&tmem_seen.freed))
		return "the hook of folios that are freed did not see a reclaimed folio";

	/* Read pages into the page cache, so that invalidate_inode_pages2() can remove them. */
	selftest_read(mapping);
	invalidate_inode_pages2(mapping);
	if (!atomic_read(&tmem_seen.removed))
		return "tracepoint mm_filemap_delete_from_page_cache did not see removal";

	return NULL;
}

static const char *selftest_once(void)
{
	struct vfsmount *mnt = kern_mount(&selftest_fs);
	const char *why = "no inode can be allocated";
	struct inode *inode;

	tmem_seen = (struct tmem_seen){};
	atomic_set(&redirected, 0);
	atomic_set(&original_run, 0);
	if (IS_ERR(mnt))
		return "the test's file system cannot be mounted";
	inode = alloc_anon_inode(mnt->mnt_sb);
	if (!IS_ERR(inode)) {
		inode->i_mode |= S_IFREG;
		inode->i_mapping->a_ops = &selftest_aops;
		mapping_set_gfp_mask(inode->i_mapping, GFP_KERNEL);
		WRITE_ONCE(tmem_selftest_mapping, inode->i_mapping);
		why = selftest_mapping(inode);
		truncate_inode_pages(inode->i_mapping, 0);
		iput(inode);
	}
	kern_unmount(mnt);
	if (!why && !test_bit(TMEM_HOOK_UNMOUNT, &tmem_seen.calls))
		why = "generic_shutdown_super was not seen";
	WRITE_ONCE(tmem_selftest_mapping, NULL);
	return why;
}

/*
 * Runs the test, after all hooks of mm were registered. Returns NULL or a sentence that names the
 * hook that does not work. Runs the test again after a failure, because reclaim may take its pages.
 */
const char *tmem_selftest_run(void)
{
	unsigned int runs = 0;
	const char *why;

	do
		why = selftest_once();
	while (why && ++runs < RUNS_MAX);
	return why;
}
