// SPDX-License-Identifier: GPL-2.0-only
/*
 * Probes of the page cache. The driver puts a page that reclaim removes, if its bytes equal the
 * record of its disk block (records.c). A page that is made dirty voids the record of its last
 * write.
 *
 * Both probes run under the i_pages lock with interrupts off, while mapping, index and contents are
 * valid. So nothing here may wait.
 */
#include <linux/mm.h>
#include <linux/page-flags.h>
#include <linux/pagemap.h>
#include <linux/prefetch.h>

#include "../compat.h"
#include "../core/stats.h"
#include "blocks.h"
#include "hooks.h"

/*
 * Number of bytes of the next page that a put prefetches. The processor's own prefetcher does not
 * go beyond the end of a page.
 */
#define PREFETCH_BYTES	512

static bool folio_ok(struct folio *folio)
{
	if (!folio_test_uptodate(folio) || folio_test_dirty(folio) ||
	    folio_test_writeback(folio) || folio_test_private_2(folio) ||
	    folio_test_swapbacked(folio))
		return false;
	return !folio_test_hwpoison(folio) &&
	       !(folio_test_large(folio) && folio_test_has_hwpoisoned(folio));
}

/* Arguments and result of put_block() for one page. */
struct block_put {
	struct tmem_fs *fs;
	struct tmem_evicted evicted;
	bool workingset, taken;
};

static void put_block(u32 block, void *arg)
{
	struct block_put *put = arg;
	const struct tmem_area *area = put->fs->area;
	struct tmem_key key;
	pgoff_t index;

	/* A wrong hint may name a block of another mount. */
	if (block - area->first >= area->nr && !TMEM_WITHOUT(OWN_AREA))
		return;
	index = tmem_block_key(&key, put->fs->pool, block - area->first);
	put->taken = tmem_put(&key, index, &put->evicted, put->workingset);
}

/*
 * Puts the pages of a folio whose bytes equal the records of their blocks. It copies
 * TMEM_FOLIO_MAX_PAGES at most, because interrupts are off.
 */
static void put_blocks(struct tmem_fs *fs, const struct inode *inode, struct folio *folio)
{
	unsigned long all = folio_nr_pages(folio), taken = 0, i;
	unsigned long nr = min_t(unsigned long, all, TMEM_FOLIO_MAX_PAGES);
	struct block_put put = { .fs = fs, .workingset = tmem_folio_used_again(folio) };

	if (!READ_ONCE(tmem_hooks_on) || !tmem_online()) {
		tmem_count_n(TMEM_STAT_puts_skipped_offline, all);
		return;
	}
	if (tmem_fs_inode_secret(inode)) {
		tmem_count_n(TMEM_STAT_puts_skipped_inode, all);
		return;
	}
	if (tmem_policy_never(fs->pool, inode->i_ino, inode->i_generation)) {
		tmem_count_n(TMEM_STAT_puts_dropped_policy, all);
		return;
	}
	if (!folio_ok(folio)) {
		tmem_count_n(TMEM_STAT_puts_skipped_folio, all);
		return;
	}
	if (!READ_ONCE(fs->live) || tmem_pool_is_wrong(fs->pool)) {
		tmem_count_n(TMEM_STAT_puts_skipped_off, all);
		return;
	}
	tmem_count_n(TMEM_STAT_puts_skipped_large, all - nr);
	for (i = 0; i < nr; i++) {
		if (i + 1 < nr)
			prefetch_range(page_address(folio_page(folio, i + 1)), PREFETCH_BYTES);
		put.evicted = (struct tmem_evicted){ .page = folio_page(folio, i) };
		put.taken = false;
		if (tmem_record_compare(&put.evicted, put_block, &put) != TMEM_VERDICT_EQUAL)
			tmem_count(put.evicted.error ? TMEM_STAT_puts_dropped_memory_error :
				   TMEM_STAT_puts_skipped_block);
		taken += put.taken;
	}
	this_cpu_add(fs->cpu->puts, taken);
	/* A retained page had changed, so the pool is to be emptied. */
	if (unlikely(taken < nr && tmem_pool_is_wrong(fs->pool)))
		tmem_fs_flush(fs);
}

/**
 * tmem_probe_removed() - put the pages of a folio that reclaim evicts
 * @data: unused
 * @folio: the folio, which leaves the page cache
 *
 * Context: interrupts off, with the i_pages lock.
 */
void tmem_probe_removed(void *data, struct folio *folio)
{
	struct address_space *mapping = folio->mapping;
	struct inode *inode = mapping->host;
	struct tmem_fs *fs;

	if (unlikely(mapping == READ_ONCE(tmem_selftest_mapping))) {
		tmem_selftest_saw_removed(folio);
		return;
	}
	/* The driver caches regular files only. This check saves the look-up of the file system. */
	if (!inode || !S_ISREG(inode->i_mode))
		return;

	rcu_read_lock();
	fs = tmem_fs_find(inode->i_sb);
	if (!fs) {
		tmem_fs_note(inode->i_sb);
		goto out;
	}
	/*
	 * Only reclaim sets the reference count to 0 before it removes a folio. Other code that
	 * removes a folio holds a reference.
	 */
	if (!folio_ref_count(folio) && !tmem_fadvise_covers(mapping, folio->index))
		put_blocks(fs, inode, folio);
	tmem_record_forget(folio);
	if (mapping_exiting(mapping) && !inode->i_nlink)
		tmem_policy_forget(fs->pool, inode->i_ino);
out:
	rcu_read_unlock();
}

/**
 * tmem_probe_dirty() - void the records of a folio that becomes dirty
 * @data: unused
 * @folio: the folio
 * @mapping: its mapping
 *
 * Context: interrupts off, with the i_pages lock.
 */
void tmem_probe_dirty(void *data, struct folio *folio, struct address_space *mapping)
{
	struct inode *inode = mapping ? mapping->host : NULL;

	if (unlikely(mapping && mapping == READ_ONCE(tmem_selftest_mapping))) {
		tmem_selftest_saw_dirty(folio);
		return;
	}
	if (!inode || !S_ISREG(inode->i_mode) || tmem_hook_off(TMEM_HOOK_DIRTY))
		return;

	rcu_read_lock();
	if (tmem_fs_find(inode->i_sb))
		tmem_record_dirty(folio);
	rcu_read_unlock();
}

/**
 * tmem_probe_added() - request a discovery if the file system of a folio is not known yet
 * @data: unused
 * @folio: the folio, which was added to the page cache
 *
 * Context: any but NMI.
 */
void tmem_probe_added(void *data, struct folio *folio)
{
	struct inode *inode = folio->mapping ? folio->mapping->host : NULL;

	if (!inode || !S_ISREG(inode->i_mode))
		return;
	rcu_read_lock();
	if (!tmem_fs_find(inode->i_sb))
		tmem_fs_note(inode->i_sb);
	rcu_read_unlock();
}
