// SPDX-License-Identifier: GPL-2.0-only
/*
 * Replacements of a file system's ->readahead and ->read_folio. Pages that the host holds come from
 * the host, and the original function reads the other pages from the disk.
 *
 * The caller has locked the folios, which are in the page cache and not uptodate. It holds the file
 * system's invalidate_lock, as for a read from the disk. A task that changes the file's blocks has
 * either erased the entries before, or waits for these folios and then removes them. So held pages
 * equal what the disk would return now.
 *
 * If no page is held, the original is called with the unchanged request. Every failure of a get is
 * a miss.
 */
#include <linux/bitmap.h>
#include <linux/blkdev.h>
#include <linux/highmem.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/pagemap.h>
#include <linux/slab.h>

#include "../compat.h"
#include "../core/stats.h"
#include "blocks.h"
#include "hooks.h"

/*
 * Number of pages of a readahead that are handled at a time. The largest readahead of the kernel
 * itself is 2 MiB.
 */
#define TMEM_WINDOW_PAGES 512

/*
 * Pages that one tmem_get() requests. The structure is on the heap, because a page fault leaves
 * little space on the stack.
 */
struct tmem_run {
	struct page *pages[TMEM_RUN_PAGES];
	struct tmem_verify *verify[TMEM_RUN_PAGES];
	DECLARE_BITMAP(want, TMEM_RUN_PAGES);
	DECLARE_BITMAP(sampled, TMEM_RUN_PAGES);
};

/* State of one call of a replacement, for ->readahead and ->read_folio. */
struct tmem_read {
	struct tmem_fs *fs;
	struct address_space *mapping;
	struct tmem_key key;
	loff_t isize_bytes;
	/* number of the first page that lies wholly beyond the end of the file */
	pgoff_t end;
	u64 deadline_ns;	/* common deadline of all gets of the call */
	bool submitted;		/* the block plug may still hold reads from the disk */
};

static bool read_begin(struct tmem_read *rd, struct address_space *mapping)
{
	struct inode *inode = mapping->host;

	if (!READ_ONCE(tmem_hooks_on))
		return false;
	rd->fs = tmem_fs_get(inode->i_sb);
	if (!rd->fs) {
		tmem_fs_note(inode->i_sb);
		return false;
	}
	/* If live is set, all inodes that need a mark have one; pairs with tmem_fs_register(). */
	if (!smp_load_acquire(&rd->fs->live) || !tmem_online() || tmem_bypass_is_all(rd->fs->pool))
		goto put;
	if (tmem_must_not_wait()) {
		tmem_count(TMEM_STAT_reads_nowait);
		goto put;
	}
	if (!tmem_fs_inode_ok(rd->fs, inode)) {
		tmem_invalidate_inode(rd->fs->pool, inode->i_ino, TMEM_INVAL_INODE);
		goto put;
	}
	rd->mapping = mapping;
	rd->isize_bytes = i_size_read(inode);
	rd->end = DIV_ROUND_UP_ULL(rd->isize_bytes, PAGE_SIZE);
	tmem_fs_key(rd->fs, inode, &rd->key);
	rd->submitted = false;
	return true;
put:
	tmem_fs_put(rd->fs);
	return false;
}

/*
 * Returns whether the whole folio can be filled from held pages. @first is the number of the bit in
 * @held for the folio's first page. A folio with private data, such as buffers, may already have
 * content.
 */
static bool folio_wanted(const struct tmem_read *rd, struct folio *folio,
			 const unsigned long *held, unsigned int first)
{
	unsigned long nr = folio_nr_pages(folio);

	if (nr > TMEM_RUN_PAGES || folio_test_uptodate(folio) || folio_test_dirty(folio) ||
	    folio_test_private(folio) || folio_test_private_2(folio) || folio->index >= rd->end)
		return false;
	nr = min_t(unsigned long, nr, rd->end - folio->index);
	return find_next_zero_bit(held, first + nr, first) >= first + nr;
}

/* Zeroes the bytes beyond the end of the file, as a read from the disk does. */
static void zero_beyond_eof(const struct tmem_read *rd, struct folio *folio)
{
	size_t size_bytes = folio_size(folio);
	loff_t left_bytes = rd->isize_bytes - folio_pos(folio);

	if (left_bytes < size_bytes)
		folio_zero_segment(folio, left_bytes, size_bytes);
}

/*
 * Dispatches the reads from the disk that were submitted so far. The caller of ->readahead has
 * plugged the block layer, which keeps requests in current->plug until the plug is full, the task
 * sleeps or ->readahead returns. A get spins before it sleeps, and a sleeping task leaves the
 * dispatch to a kernel thread. So the disk would be idle while the task waits for the host.
 *
 * The new plug uses the structure of the plug that it replaces, which may belong to an outer
 * caller.
 */
static void dispatch_reads(struct tmem_read *rd)
{
	struct blk_plug *plug = current->plug;

	if (rd->submitted && plug) {
		blk_finish_plug(plug);
		blk_start_plug(plug);
	}
	rd->submitted = false;
}

/*
 * Gets the wanted pages of the run (the pages of one tmem_get()). The run has @nr pages and starts
 * at page @index.
 */
static void run_get(struct tmem_run *run, struct tmem_read *rd, pgoff_t index, unsigned int nr)
{
	struct tmem_mount_counts __percpu *counts = rd->fs->mount->counts;
	unsigned int wanted = bitmap_weight(run->want, nr), hits;

	/* A wrong page may have blocked the mount since the read began. */
	if (tmem_bypass_is_all(rd->fs->pool)) {
		bitmap_zero(run->want, nr);
		return;
	}
	dispatch_reads(rd);
	hits = tmem_get(&rd->key, index, nr, run->pages, run->want, rd->deadline_ns,
			rd->isize_bytes >> PAGE_SHIFT);
	this_cpu_add(counts->gets, wanted);
	this_cpu_add(counts->hits, hits);
}

/*
 * Adds a folio to the run (the pages of one tmem_get()). The folio's first page is page @at of the
 * run.
 */
static void run_add(struct tmem_run *run, const struct tmem_read *rd, struct folio *folio,
		    unsigned int at)
{
	unsigned long nr = min_t(unsigned long, folio_nr_pages(folio), rd->end - folio->index);
	bool sample = tmem_verify_due(rd->fs, 1);
	unsigned long i;

	for (i = 0; i < nr; i++) {
		struct tmem_verify *v = NULL;

		/* If there is no memory for a copy, a page of a sampled folio is not compared. */
		if (sample)
			v = tmem_verify_new(rd->fs, folio, folio->index + i, rd->isize_bytes);
		run->verify[at + i] = v;
		run->pages[at + i] = v ? tmem_verify_page(v) : folio_page(folio, i);
		__set_bit(at + i, run->want);
		if (v)
			bitmap_set(run->sampled, at, nr);
	}
}

/*
 * Finishes a folio after tmem_get(). Returns whether the folio is complete: uptodate and still
 * locked. The original function reads a folio that was sampled or missed.
 */
static bool run_done(struct tmem_run *run, const struct tmem_read *rd, struct folio *folio,
		     unsigned int at)
{
	unsigned long nr = min_t(unsigned long, folio_nr_pages(folio), rd->end - folio->index);
	bool hit = find_next_zero_bit(run->want, at + nr, at) >= at + nr;
	unsigned long i;

	if (test_bit(at, run->sampled)) {
		for (i = 0; i < nr; i++)
			if (run->verify[at + i] && test_bit(at + i, run->want))
				tmem_moved(run->pages[at + i], folio_page(folio, i));
		return false;
	}
	if (!hit)
		return false;
	zero_beyond_eof(rd, folio);
	if (tmem_blocks_mode)
		tmem_record_from_host(folio);
	flush_dcache_folio(folio);
	folio_mark_uptodate(folio);
	return true;
}

/*
 * Submits the comparisons of hits with the disk, and cancels those of misses. The original function
 * has read the incomplete folios before.
 */
static void run_verify(struct tmem_run *run, unsigned int nr)
{
	unsigned int i;

	for (i = 0; i < nr; i++) {
		if (!run->verify[i])
			continue;
		if (test_bit(i, run->want))
			tmem_verify_submit(run->verify[i]);
		else
			tmem_verify_cancel(run->verify[i]);
	}
}

/*
 * Lets the file system's original ->readahead read a part of a request. The kernel later calls
 * ->read_folio for folios that it leaves unread.
 */
static void read_part(struct tmem_read *rd, const struct readahead_control *rac, pgoff_t index,
		      unsigned int nr)
{
	struct readahead_control part = tmem_rac_part(rac, index, nr);
	struct folio *folio;

	if (!nr)
		return;
	rd->submitted = true;
	rac->mapping->a_ops->readahead(&part);
	while ((folio = readahead_folio(&part)))
		folio_unlock(folio);
}

/* Returns the folio of a page that is in the page cache and locked by the caller. */
static struct folio *folio_at(const struct tmem_read *rd, pgoff_t index)
{
	return xa_load(&rd->mapping->i_pages, index);
}

/*
 * Gets the pages of one run with one tmem_get(), and lets the original function read the misses.
 * Bit i of @held is for page @base + i. The run has the pages of bits @first to @end - 1, which are
 * whole folios.
 */
static void read_run(struct tmem_read *rd, const struct readahead_control *rac,
		     struct tmem_run *run, const unsigned long *held, pgoff_t base,
		     unsigned int first, unsigned int end)
{
	unsigned int i, miss = first, nr = end - first;
	struct folio *folio;

	memset(run, 0, sizeof(*run));
	for (i = first; i < end; i += folio_nr_pages(folio)) {
		folio = folio_at(rd, base + i);
		run_add(run, rd, folio, i - first);
	}
	run_get(run, rd, base + first, nr);

	for (i = first; i < end;) {
		unsigned int folio_pages;

		folio = folio_at(rd, base + i);
		folio_pages = folio_nr_pages(folio);
		if (run_done(run, rd, folio, i - first)) {
			folio_unlock(folio);
			/*
			 * Drop the reference of the readahead; the page cache has a reference of
			 * its own.
			 */
			folio_put(folio);
			read_part(rd, rac, base + miss, i - miss);
			miss = i + folio_pages;
		}
		i += folio_pages;
	}
	read_part(rd, rac, base + miss, end - miss);
	run_verify(run, nr);
}

/*
 * Clears the bits in @held of folios that cannot be filled as a whole. Returns the length in pages
 * of the window (the part of the readahead that is handled now), which has whole folios only.
 */
static unsigned int trim_window(const struct tmem_read *rd, pgoff_t base, unsigned int nr,
				unsigned long *held)
{
	unsigned int i;

	for (i = 0; i < nr;) {
		struct folio *folio = folio_at(rd, base + i);
		unsigned long folio_pages = folio_nr_pages(folio);

		if (i + folio_pages > nr) {
			/*
			 * The folio crosses the end of the window. If it is also the first folio of
			 * the window, it is larger than any folio that is held.
			 */
			if (!i) {
				bitmap_clear(held, 0, nr);
				return folio_pages;
			}
			return i;
		}
		if (folio_wanted(rd, folio, held, i))
			bitmap_set(held, i, folio_pages);
		else
			bitmap_clear(held, i, folio_pages);
		i += folio_pages;
	}
	return nr;
}

static void read_window(struct tmem_read *rd, const struct readahead_control *rac,
			struct tmem_run *run, const unsigned long *held, pgoff_t base,
			unsigned int nr)
{
	unsigned int i, end;

	/* Start the reads from the disk first, so that the disk works during the gets. */
	for (i = find_first_zero_bit(held, nr); i < nr; i = find_next_zero_bit(held, nr, end)) {
		end = find_next_bit(held, nr, i);
		read_part(rd, rac, base + i, end - i);
	}
	for (i = find_first_bit(held, nr); i < nr; i = find_next_bit(held, nr, end)) {
		unsigned int stop = find_next_zero_bit(held, nr, i);

		/* Take as many whole folios as one request can have. Any single folio fits. */
		for (end = i; end < stop;) {
			unsigned int next = end + folio_nr_pages(folio_at(rd, base + end));

			if (next - i > TMEM_RUN_PAGES)
				break;
			end = next;
		}
		read_run(rd, rac, run, held, base, i, end);
	}
}

/**
 * tmem_wrap_readahead() - replacement of a file system's ->readahead
 * @rac: the request
 */
void tmem_wrap_readahead(struct readahead_control *rac)
{
	DECLARE_BITMAP(held, TMEM_WINDOW_PAGES);
	struct address_space *mapping = rac->mapping;
	pgoff_t base = readahead_index(rac);
	unsigned int left = readahead_count(rac), nr;
	struct tmem_run *run = NULL;
	struct tmem_read rd;

	tmem_enter();
	if (!read_begin(&rd, mapping)) {
		mapping->a_ops->readahead(rac);
		goto leave;
	}
	tmem_fs_clear_mark(rd.fs, mapping->host, left);
	/*
	 * Limit the size of folios: a get cannot fill a folio if some of its pages are never put.
	 * With the readahead of 8 MiB that 7.2 uses on virtio-blk, nearly all folios of a stream
	 * would be too large.
	 */
	tmem_rac_limit_order(rac, ilog2(TMEM_FOLIO_MAX_PAGES));
	nr = min(left, TMEM_WINDOW_PAGES);
	if (!left || (!tmem_held(&rd.key, base, nr, held) && nr == left))
		goto original;
	run = kmalloc(sizeof(*run), GFP_NOFS | __GFP_NORETRY | __GFP_NOWARN);
	if (!run)
		goto original;
	TMEM_HOLD(read);
	rd.deadline_ns = tmem_get_deadline_ns();

	for (;;) {
		nr = trim_window(&rd, base, nr, held);
		if (nr > TMEM_WINDOW_PAGES)
			read_part(&rd, rac, base, nr);
		else
			read_window(&rd, rac, run, held, base, nr);
		base += nr;
		left -= nr;
		if (!left)
			break;
		nr = min(left, TMEM_WINDOW_PAGES);
		tmem_held(&rd.key, base, nr, held);
	}
	tmem_rac_done(rac);
	kfree(run);
	tmem_fs_put(rd.fs);
	goto leave;
original:
	mapping->a_ops->readahead(rac);
	tmem_fs_put(rd.fs);
leave:
	tmem_leave();
}

/**
 * tmem_wrap_read_folio() - replacement of a file system's ->read_folio
 * @file: the file; may be NULL
 * @folio: the folio, locked; it is unlocked when its read ends
 *
 * Return: 0, or the error of the original ->read_folio.
 */
int tmem_wrap_read_folio(struct file *file, struct folio *folio)
{
	DECLARE_BITMAP(held, TMEM_RUN_PAGES);
	struct address_space *mapping = folio->mapping;
	unsigned long nr = folio_nr_pages(folio);
	struct tmem_run *run = NULL;
	struct tmem_read rd;
	bool hit = false;
	int ret = 0;

	tmem_enter();
	if (!read_begin(&rd, mapping)) {
		ret = mapping->a_ops->read_folio(file, folio);
		goto leave;
	}
	if (nr <= TMEM_RUN_PAGES && tmem_held(&rd.key, folio->index, nr, held) &&
	    folio_wanted(&rd, folio, held, 0))
		run = kzalloc(sizeof(*run), GFP_NOFS | __GFP_NORETRY | __GFP_NOWARN);
	if (run) {
		run_add(run, &rd, folio, 0);
		rd.deadline_ns = tmem_get_deadline_ns();
		run_get(run, &rd, folio->index, nr);
		hit = run_done(run, &rd, folio, 0);
	}
	if (hit)
		folio_unlock(folio);
	else
		ret = mapping->a_ops->read_folio(file, folio);
	if (run) {
		run_verify(run, nr);
		kfree(run);
	}
	tmem_fs_put(rd.fs);
leave:
	tmem_leave();
	return ret;
}
