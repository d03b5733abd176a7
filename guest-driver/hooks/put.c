// SPDX-License-Identifier: GPL-2.0-only
/*
 * Probes of the page cache, and puts. The driver puts a page that reclaim evicts, if its bytes
 * equal the record of its disk block (records.c). A page that is made dirty voids the record of its
 * last write.
 *
 * A put has two steps, because it copies a page, and a folio may have 512 of them:
 * - When a folio leaves the page cache, its mapping is valid, but the i_pages lock is held and
 *   interrupts are off. The probe only decides whether the pages may be put, and marks them.
 * - When the kernel frees the folio, nobody has a reference or a TLB entry any more, and interrupts
 *   are on. The driver puts the marked pages.
 *
 * The driver hooks the functions that free folios whose last reference is gone. Reclaim frees a
 * batch of folios after it has flushed the TLB entries of their pages, and drop_caches when it
 * drops its references. The page allocator has not touched the contents and the flags of a folio
 * yet. Before Linux 6.9, large folios are freed one by one, with another function.
 *
 * A task may look at a page that it has found by its frame number, and so hold the last reference
 * to it for a moment. Then the page is freed elsewhere, and is not put. Pages that an interrupt
 * frees are not put either, because the interrupted task may use the processor's scratch page.
 *
 * Coherence does not depend on the first step: if the copy of any page has the bytes of a record
 * that is true now, the put is right. Pages of swap areas have no first step. They are marked when
 * they are recorded (swap.c).
 */
#include <linux/hugetlb.h>
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

/*
 * Maximum number of pages that one call puts, because nothing else but interrupts may run on the
 * processor meanwhile. Reclaim frees fewer at a time: it takes folios until these have 32 pages, or
 * 64 with the multi-generational LRU, and the last one may have 512. drop_caches and DAMON free up
 * to 31 folios of any size.
 */
#define FREE_PAGES_MAX	1024

static bool folio_ok(struct folio *folio)
{
	if (!folio_test_uptodate(folio) || folio_test_dirty(folio) ||
	    folio_test_writeback(folio) || folio_test_private_2(folio))
		return false;
	return !folio_test_hwpoison(folio) &&
	       !(folio_test_large(folio) && folio_test_has_hwpoisoned(folio));
}

/*
 * Returns whether the pages of a folio that leaves the page cache may be put. Counts them if not.
 *
 * Reclaim sets the reference count to 0 before it removes a folio. Other code that removes a folio
 * holds a reference, except for splice() and soft offlining, which remove it as reclaim does. Their
 * pages are marked, too, and compared like others if they are ever freed by a hooked function.
 */
static bool may_put(struct tmem_fs *fs, const struct inode *inode, struct folio *folio)
{
	enum tmem_stat why;

	if (folio_ref_count(folio) || tmem_fadvise_covers(folio->mapping, folio->index))
		return false;
	if (!READ_ONCE(tmem_hooks_on) || !tmem_online())
		why = TMEM_STAT_puts_skipped_offline;
	else if (tmem_fs_inode_secret(inode))
		why = TMEM_STAT_puts_skipped_inode;
	else if (tmem_policy_never(fs->pool, inode->i_ino, inode->i_generation))
		why = TMEM_STAT_puts_dropped_policy;
	else if (!folio_ok(folio) || folio_test_swapbacked(folio))
		why = TMEM_STAT_puts_skipped_folio;
	else if (!READ_ONCE(fs->live) || tmem_pool_is_wrong(fs->pool))
		why = TMEM_STAT_puts_skipped_off;
	else
		return true;
	tmem_count_n(why, folio_nr_pages(folio));
	return false;
}

/* Marks the pages of a folio that leaves the page cache, if they may be put. */
static void leave(struct tmem_fs *fs, const struct inode *inode, struct folio *folio)
{
	unsigned long none;

	if (!may_put(fs, inode, folio)) {
		tmem_record_leave(folio, TMEM_WITHOUT(LEAVE));
		return;
	}
	/* Before the folio is freed, the kernel clears the flag "active", but not this one. */
	if (folio_test_active(folio))
		folio_set_workingset(folio);
	none = folio_nr_pages(folio) - tmem_record_leave(folio, true);
	tmem_count_n(TMEM_STAT_blocks_puts_none, none);
	tmem_count_n(TMEM_STAT_puts_skipped_block, none);
}

/* Arguments and result of put_block() for one page. */
struct block_put {
	struct tmem_pool *pool;
	u32 first;			/* first block of the mount */
	struct tmem_evicted evicted;
	bool workingset, taken;
};

static void put_block(u32 block, void *arg)
{
	struct block_put *put = arg;
	struct tmem_key key;
	pgoff_t index;

	index = tmem_block_key(&key, put->pool, block - put->first);
	put->taken = tmem_put(&key, index, &put->evicted, put->workingset);
}

/*
 * Puts a marked page if its bytes equal the record of the block of its hint. The mount is the one
 * that has the block now. So a put is right even if the hint was wrong, or if the mount has changed
 * since the page left the page cache.
 */
static void put_marked(struct page *page, bool workingset)
{
	struct block_put put = { .evicted = { .page = page }, .workingset = workingset };
	const struct tmem_area *area;
	struct tmem_fs *fs;
	bool equal = false;
	u32 block;

	rcu_read_lock();
	block = tmem_record_free(page);
	if (!block)
		goto out;
	area = tmem_area_of(block);
	fs = area ? tmem_fs_find(area->sb) : NULL;
	if (!fs || !READ_ONCE(fs->live) || tmem_pool_is_wrong(fs->pool) ||
	    (tmem_is_swap(area->sb) &&
	     (!tmem_swap_wanted() || tmem_swap_is_freed(area->sb, block - area->first)))) {
		tmem_count(TMEM_STAT_puts_skipped_off);
		goto out;
	}
	put.pool = fs->pool;
	put.first = area->first;
	if (preemptible())
		TMEM_HOLD_ATOMIC(put);
	/* The copy is in the scratch page of this processor, which interrupts do not use. */
	preempt_disable();
	if (tmem_evicted_read(&put.evicted))
		equal = tmem_record_compare(block, &put.evicted, put_block, &put);
	preempt_enable();
	if (!equal)
		tmem_count(put.evicted.error ? TMEM_STAT_puts_dropped_memory_error :
			   TMEM_STAT_puts_skipped_block);
	if (put.taken)
		this_cpu_inc(fs->cpu->puts);
	/* A retained page had changed, so the pool is to be emptied. */
	else if (unlikely(tmem_pool_is_wrong(fs->pool)))
		tmem_fs_flush(fs);
out:
	rcu_read_unlock();
}

/*
 * Puts the marked pages of a folio that is being freed, to which nobody has a reference: up to
 * @most; the others are counted as dropped. Returns how many of @most are left. Context: process,
 * maybe with locks or with interrupts off; does not sleep.
 */
static unsigned int folio_freed(struct folio *folio, unsigned int most)
{
	unsigned int i, nr = folio_nr_pages(folio);
	struct page *page;
	bool workingset;

	if (unlikely(READ_ONCE(tmem_selftest_mapping)))
		tmem_selftest_saw_freed(folio);
	/* Pages of processes still have a mapping. They are swapbacked, like those of shmem. */
	if (folio_test_swapbacked(folio) ? !READ_ONCE(tmem_swap_on) : !!folio->mapping)
		return most;
	if (!folio_ok(folio))
		return most;
	workingset = tmem_folio_used_again(folio);
	for (i = 0; i < nr; i++) {
		page = folio_page(folio, i);
		if (!tmem_record_may_put(page))
			continue;
		/* The mark stays, and does no harm: if the page is freed again, it is compared. */
		if (!most) {
			tmem_count(TMEM_STAT_puts_dropped_ring_full);
			continue;
		}
		most--;
		if (i + 1 < nr)
			prefetch_range(page_address(page + 1), PREFETCH_BYTES);
		if (preemptible() && !rcu_preempt_depth())
			TMEM_HOLD(free);
		put_marked(page, workingset);
		tmem_put_end();
	}
	return most;
}

#if TMEM_FREES_BATCHES

static void entry_free(struct tmem_args *args)
{
	const struct folio_batch *batch = (void *)tmem_arg(args, 0);
	unsigned int i, most = FREE_PAGES_MAX;

	for (i = 0; in_task() && i < batch->nr; i++)
		most = folio_freed(batch->folios[i], most);
}

#else

static void entry_free_list(struct tmem_args *args)
{
	struct list_head *list = (void *)tmem_arg(args, 0);
	unsigned int most = FREE_PAGES_MAX;
	struct page *page;

	if (in_task())
		list_for_each_entry(page, list, lru)
			most = folio_freed(page_folio(page), most);
}

static void entry_free_large(struct tmem_args *args)
{
	struct folio *folio = (void *)tmem_arg(args, 0);

	if (in_task() && !folio_test_hugetlb(folio))
		folio_freed(folio, FREE_PAGES_MAX);
}

#endif

const struct tmem_target tmem_free_targets[] = {
#if TMEM_FREES_BATCHES
	{ .name = "free_unref_folios", .hook = TMEM_HOOK_FREE, .entry = entry_free },
#else
	{ .name = "free_unref_page_list", .hook = TMEM_HOOK_FREE, .entry = entry_free_list },
	{ .name = "destroy_large_folio", .hook = TMEM_HOOK_FREE, .entry = entry_free_large },
#endif
	{}
};

/*
 * Decides whether the pages of a folio that leaves the page cache may be put when it is freed.
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
	if (!inode || !S_ISREG(inode->i_mode)) {
		if (inode && S_ISBLK(inode->i_mode) && !folio_ref_count(folio))
			tmem_count_n(TMEM_STAT_puts_skipped_metadata, folio_nr_pages(folio));
		return;
	}

	rcu_read_lock();
	fs = tmem_fs_find(inode->i_sb);
	if (fs) {
		leave(fs, inode, folio);
		if (mapping_exiting(mapping) && !inode->i_nlink)
			tmem_policy_forget(fs->pool, inode->i_ino);
	} else {
		tmem_record_leave(folio, false);
		tmem_fs_note(inode->i_sb);
	}
	rcu_read_unlock();
}

/*
 * Voids the records of a folio that becomes dirty. Context: interrupts off, with the i_pages lock.
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
