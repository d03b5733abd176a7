// SPDX-License-Identifier: GPL-2.0-only
/*
 * Probes of the page cache. The driver puts a page that reclaim removes. If a page leaves the page
 * cache in another way, or is made dirty, the driver erases its entry.
 *
 * Both probes run under the i_pages lock with interrupts off, while mapping, index and
 * contents are valid. So nothing here may wait.
 *
 * A put and concurrent operations: during a put, the folio is locked and still in i_pages. A reader
 * that misses in the page cache adds its folio under the i_pages lock, and so after the put.
 * Truncation and direct writes of this page wait for it to leave i_pages, and then erase
 * (coherence.c). The eviction of an inode sets AS_EXITING and takes the i_pages lock before it
 * erases entries.
 *
 * Why both events erase entries: a get happens only for a folio that is not uptodate. As a rule
 * such a folio was just added, after the folio with newer content was removed. But a folio that was
 * written in part and is clean again can lose its record of uptodate blocks and stay cached, for
 * example when it is split. It is then read again without having been removed, and only the dirty
 * event has erased its old entry. So coherence depends on the dirty event, and the removal is a
 * second line of defence.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/mm.h>
#include <linux/page-flags.h>
#include <linux/pagemap.h>

#include "../compat.h"
#include "../core/stats.h"
#include "blocks.h"
#include "hooks.h"

static bool folio_ok(struct folio *folio)
{
	if (!folio_test_uptodate(folio) || folio_test_dirty(folio) ||
	    folio_test_writeback(folio) || folio_test_private_2(folio) ||
	    folio_test_swapbacked(folio))
		return false;
	return !folio_test_hwpoison(folio) &&
	       !(folio_test_large(folio) && folio_test_has_hwpoisoned(folio));
}

/*
 * Puts pages of a folio one by one, after each was compared with the record of its block. Returns
 * how many were taken.
 */
static unsigned int put_recorded(const struct tmem_key *key, const struct folio *folio,
				 unsigned long nr, bool workingset, pgoff_t inside_end)
{
	enum tmem_verdict verdict;
	unsigned int taken = 0;
	unsigned long i;

	for (i = 0; i < nr; i++) {
		struct tmem_evicted evicted = { .page = folio_page((struct folio *)folio, i) };

		verdict = tmem_record_compare(&evicted, NULL, NULL);
		if (tmem_blocks_mode == TMEM_BLOCKS_VETO &&
		    (verdict == TMEM_VERDICT_OTHER || verdict == TMEM_VERDICT_NONE)) {
			tmem_count(evicted.error ? TMEM_STAT_puts_dropped_memory_error :
				   TMEM_STAT_puts_skipped_block);
			tmem_invalidate(key->pool, key->ino, folio->index + i, folio->index + i,
					TMEM_INVAL_REMOVED);
		} else {
			taken += tmem_put(key, folio->index + i, &evicted, workingset,
					  folio->index + i < inside_end);
		}
	}
	return taken;
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
	struct tmem_key key;
	pgoff_t index;

	/* A wrong hint may name a block of another mount. */
	if (block - put->fs->mount->area->first >= put->fs->mount->area->nr &&
	    !TMEM_WITHOUT(OWN_AREA))
		return;
	index = tmem_block_key(&key, put->fs->pool, block - put->fs->mount->area->first);
	put->taken = tmem_put(&key, index, &put->evicted, put->workingset, true);
}

/*
 * Puts the pages of a folio whose bytes equal the records of their blocks, with the blocks as keys.
 */
static void put_blocks(struct tmem_fs *fs, const struct inode *inode, struct folio *folio)
{
	unsigned long i, nr = min_t(unsigned long, folio_nr_pages(folio), TMEM_FOLIO_MAX_PAGES);
	struct block_put put = { .fs = fs, .workingset = tmem_folio_used_again(folio) };
	unsigned long taken = 0;
	struct tmem_key key;

	if (!READ_ONCE(tmem_hooks_on) || !tmem_online()) {
		tmem_count_n(TMEM_STAT_puts_skipped_offline, nr);
		return;
	}
	tmem_fs_key(fs, inode, &key);
	if (tmem_fs_inode_secret(inode) || tmem_policy_never(&key)) {
		tmem_count_n(TMEM_STAT_puts_skipped_inode, nr);
		return;
	}
	if (!folio_ok(folio)) {
		tmem_count_n(TMEM_STAT_puts_skipped_folio, nr);
		return;
	}
	/* If live is set, the pool takes puts; pairs with tmem_fs_register(). */
	if (!smp_load_acquire(&fs->live) || !fs->mount->area || tmem_bypass_is_all(fs->pool)) {
		tmem_count_n(TMEM_STAT_puts_skipped_off, nr);
		return;
	}
	tmem_count_n(TMEM_STAT_puts_skipped_large, folio_nr_pages(folio) - nr);
	for (i = 0; i < nr; i++) {
		put.evicted = (struct tmem_evicted){ .page = folio_page(folio, i) };
		put.taken = false;
		if (tmem_record_compare(&put.evicted, put_block, &put) != TMEM_VERDICT_EQUAL)
			tmem_count(put.evicted.error ? TMEM_STAT_puts_dropped_memory_error :
				   TMEM_STAT_puts_skipped_block);
		taken += put.taken;
	}
	this_cpu_add(fs->mount->counts->puts, taken);
}

/*
 * Puts pages of a folio. Returns how many pages, from the first one on, need no invalidation any
 * more. It copies TMEM_FOLIO_MAX_PAGES at most, because interrupts are off.
 */
static unsigned long put_folio(struct tmem_fs *fs, const struct inode *inode,
			       struct folio *folio)
{
	unsigned long all = folio_nr_pages(folio);
	unsigned long nr = min_t(unsigned long, all, TMEM_FOLIO_MAX_PAGES);
	loff_t isize = i_size_read(inode);
	unsigned int taken;
	struct tmem_key key;
	pgoff_t end;
	bool workingset;

	if (!READ_ONCE(tmem_hooks_on) || !tmem_online()) {
		tmem_count_n(TMEM_STAT_puts_skipped_offline, all);
		return 0;
	}
	if (!tmem_fs_inode_ok(fs, inode)) {
		tmem_invalidate_inode(fs->pool, inode->i_ino, TMEM_INVAL_INODE);
		tmem_count_n(TMEM_STAT_puts_skipped_inode, all);
		return 0;
	}
	end = DIV_ROUND_UP_ULL(isize, PAGE_SIZE);
	if (folio->index >= end) {
		tmem_count_n(TMEM_STAT_puts_skipped_size, all);
		return 0;
	}
	if (mapping_exiting(folio->mapping) || !folio_ok(folio)) {
		tmem_count_n(TMEM_STAT_puts_skipped_folio, all);
		return 0;
	}
	/* If live is set, all inodes that need a mark have one; pairs with tmem_fs_register(). */
	if (!smp_load_acquire(&fs->live)) {
		tmem_count_n(TMEM_STAT_puts_skipped_off, all);
		return 0;
	}
	/* If the inode is marked after this check, tmem_put() refuses the page. */
	if (tmem_is_bypassed(fs->pool, inode->i_ino)) {
		tmem_count_n(TMEM_STAT_puts_skipped_marked, all);
		return 0;
	}
	end = min(end - folio->index, all);
	if (end > nr)
		tmem_count_n(TMEM_STAT_puts_skipped_large, end - nr);
	nr = min(nr, end);
	workingset = tmem_folio_used_again(folio);
	tmem_fs_key(fs, inode, &key);
	/* The checks above also apply to a page that the host has retained, which needs no copy. */
	if (tmem_blocks_mode)
		taken = put_recorded(&key, folio, nr, workingset, isize >> PAGE_SHIFT);
	else
		taken = tmem_put_pages(&key, folio->index, folio_page(folio, 0), nr, workingset,
				       isize >> PAGE_SHIFT);
	this_cpu_add(fs->mount->counts->puts, taken);
	/* A retained page had changed, so the pool is to be emptied. */
	if (unlikely(taken < nr && tmem_bypass_is_all(fs->pool)))
		tmem_fs_sweep_soon(fs);
	return nr;
}

/**
 * tmem_probe_removed() - put or invalidate the pages of a folio that leaves the page cache
 * @data: unused
 * @folio: the folio
 *
 * Context: interrupts off, with the i_pages lock.
 */
void tmem_probe_removed(void *data, struct folio *folio)
{
	struct address_space *mapping = folio->mapping;
	unsigned long nr = folio_nr_pages(folio), done = 0;
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
	if (tmem_blocks_mode == TMEM_BLOCKS_ON) {
		if (!folio_ref_count(folio) && !tmem_fadvise_covers(mapping, folio->index))
			put_blocks(fs, inode, folio);
		tmem_record_forget(folio);
		goto out;
	}
	tmem_verify_void(fs, inode->i_ino, folio->index, folio->index + nr - 1);
	/*
	 * Only reclaim sets the reference count to 0 before it removes a folio. Other code that
	 * removes a folio holds a reference.
	 */
	if (!folio_ref_count(folio) && !tmem_fadvise_covers(mapping, folio->index))
		done = put_folio(fs, inode, folio);
	if (done < nr && !tmem_hook_off(TMEM_HOOK_REMOVED))
		tmem_invalidate(fs->pool, inode->i_ino, folio->index + done,
				folio->index + nr - 1, TMEM_INVAL_REMOVED);
	if (tmem_blocks_mode)
		tmem_record_forget(folio);
	/*
	 * Check whether this folio is the last one of its mapping: nrpages includes the folio until
	 * the probe has returned.
	 */
	if (mapping->nrpages == nr)
		tmem_fs_emptied(fs, inode);
out:
	rcu_read_unlock();
}

/**
 * tmem_probe_dirty() - invalidate the pages of a folio that becomes dirty
 * @data: unused
 * @folio: the folio
 * @mapping: its mapping
 *
 * Context: interrupts off, with the i_pages lock.
 */
void tmem_probe_dirty(void *data, struct folio *folio, struct address_space *mapping)
{
	struct inode *inode = mapping ? mapping->host : NULL;
	pgoff_t last = folio->index + folio_nr_pages(folio) - 1;
	struct tmem_fs *fs;

	if (unlikely(mapping && mapping == READ_ONCE(tmem_selftest_mapping))) {
		tmem_selftest_saw_dirty(folio);
		return;
	}
	if (!inode || !S_ISREG(inode->i_mode) || tmem_hook_off(TMEM_HOOK_DIRTY))
		return;

	rcu_read_lock();
	fs = tmem_fs_find(inode->i_sb);
	if (fs && tmem_blocks_mode == TMEM_BLOCKS_ON) {
		tmem_record_dirty(folio);
	} else if (fs) {
		tmem_verify_void(fs, inode->i_ino, folio->index, last);
		tmem_invalidate(fs->pool, inode->i_ino, folio->index, last, TMEM_INVAL_DIRTY);
		if (tmem_blocks_mode)
			tmem_record_dirty(folio);
	}
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

	if (inode && S_ISREG(inode->i_mode))
		tmem_fs_note(inode->i_sb);
}
