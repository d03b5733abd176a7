// SPDX-License-Identifier: GPL-2.0-only
/*
 * Fills the pages of a READ bio from the host.
 *
 * The file system has mapped the pages to blocks just now, and asks for these blocks. The index has
 * the blocks whose bytes the host has. So an answer is what the disk would return.
 *
 * If all pages are held, the bio ends without the disk. If the first or the last pages are held,
 * the bio is shortened to the others, as device mapper does: the end functions of reads walk over
 * all pages of a bio. Held pages between others come from the disk. A get that fails leaves its
 * pages to the disk.
 *
 * A get and a write of the same block: a get that begins while a write may be in flight is left to
 * the disk, and so is one whose block a write has reached before the answer. So a reader never sees
 * bytes that are older than those that another reader has seen.
 */
#include <linux/bio.h>
#include <linux/bitmap.h>
#include <linux/blkdev.h>
#include <linux/pagemap.h>
#include <linux/sched.h>
#include <linux/slab.h>

#include "../core/stats.h"
#include "blocks.h"

/* Maximum number of pages of a bio that is filled. Readahead of 8 MiB has this many. */
#define FILL_PAGES_MAX 2048

/*
 * A bio, and the pages of one tmem_get(). The structure is on the heap, because a page fault leaves
 * little space on the stack.
 */
struct run {
	DECLARE_BITMAP(missing, FILL_PAGES_MAX);	/* pages of the bio that are not held */
	unsigned long want;				/* bits of pages of the run */
	struct page *page[TMEM_RUN_PAGES];
	u32 seq[TMEM_RUN_PAGES];
};

static bool is_of_file(struct folio *folio, const struct super_block *sb)
{
	struct address_space *mapping;
	bool same;

	/* Another task may own the lock or the writeback, and evict the inode. */
	rcu_read_lock();
	mapping = folio_mapping(folio);
	same = mapping && mapping->host && S_ISREG(mapping->host->i_mode) &&
	       mapping->host->i_sb == sb;
	rcu_read_unlock();
	return same;
}

/**
 * tmem_is_filled() - check whether only a read can change a page until the read ends
 * @page: the page
 * @sb: super block of the file to which it must belong
 *
 * The lock is tested first: it keeps the mapping. Nobody has mapped or pinned a folio that is not
 * uptodate.
 *
 * Context: any.
 * Return: true if nobody else can change it.
 */
bool tmem_is_filled(struct page *page, const struct super_block *sb)
{
	struct folio *folio = page_folio(page);

	return folio_test_locked(folio) && !folio_test_uptodate(folio) && is_of_file(folio, sb);
}

/**
 * tmem_is_flushed() - check whether a clean page is being written back
 * @page: the page
 * @sb: super block of the file to which it must belong
 *
 * Context: any.
 * Return: true if it is.
 */
bool tmem_is_flushed(struct page *page, const struct super_block *sb)
{
	struct folio *folio = page_folio(page);

	return folio_test_writeback(folio) && !folio_test_dirty(folio) && is_of_file(folio, sb);
}

/**
 * tmem_is_block() - check whether a segment of a bio is a page, and a whole block of an area
 * @bv: the segment
 * @place: its place, in bytes from the beginning of the area
 *
 * Return: true if it is.
 */
bool tmem_is_block(const struct bio_vec *bv, u64 place)
{
	return bv->bv_len == PAGE_SIZE && !bv->bv_offset && !(place & ~PAGE_MASK);
}

/*
 * Returns whether the task may wait for the host. A task inside a journal transaction must not, and
 * neither must reclaim, nor a stacked driver, whose bios wait for each other.
 */
static bool may_wait(const struct bio *bio)
{
	return in_task() && !(bio->bi_opf & REQ_NOWAIT) && !current->bio_list &&
	       !current->journal_info && !(current->flags & PF_MEMALLOC) &&
	       !tmem_plug_nowait(current->plug) && !tmem_must_not_wait();
}

/* Returns the number of pages if all pages of the bio can be filled, and 0 otherwise. */
static unsigned int count_pages(struct bio *bio, const struct tmem_area *area, sector_t sector)
{
	u64 place = (u64)(sector - area->start) << SECTOR_SHIFT;
	unsigned int nr = 0;
	struct bvec_iter iter;
	struct bio_vec bv;

	bio_for_each_segment(bv, bio, iter) {
		if (++nr > FILL_PAGES_MAX || !tmem_is_filled(bv.bv_page, area->sb) ||
		    !tmem_is_block(&bv, place) ||
		    tmem_fs_inode_secret(page_folio(bv.bv_page)->mapping->host))
			return 0;
		place += PAGE_SIZE;
	}
	return nr;
}

/*
 * Gets @nr pages, which @iter points to, of the blocks from @block on. Sets the bits in run->want
 * of the pages that have the bytes of the disk.
 */
static void get_run(struct run *run, struct tmem_fs *fs, struct bio *bio, struct bvec_iter *iter,
		    const struct tmem_area *area, u32 block, unsigned int nr, u64 deadline_ns)
{
	struct tmem_key key;
	pgoff_t index = tmem_block_key(&key, fs->pool, block);
	unsigned int i, hits;

	run->want = 0;
	for (i = 0; i < nr; i++) {
		run->page[i] = bio_iter_iovec(bio, *iter).bv_page;
		bio_advance_iter_single(bio, iter, PAGE_SIZE);
		run->seq[i] = tmem_record_get(area->first + block + i);
		if (run->seq[i])
			__set_bit(i, &run->want);
	}
	/* No write erases a pool that was replaced. Sequence numbers show later writes. */
	if (!smp_load_acquire(&fs->live))
		run->want = 0;
	this_cpu_add(fs->mount->counts->gets, hweight_long(run->want));
	/* All pages can be retained: at its next eviction, a page is compared with its record. */
	hits = tmem_get(&key, index, nr, run->page, &run->want, deadline_ns, ULONG_MAX);
	this_cpu_add(fs->mount->counts->hits, hits);
	for_each_set_bit(i, &run->want, nr)
		if (!tmem_record_got(area->first + block + i, run->seq[i], run->page[i]))
			__clear_bit(i, &run->want);
}

/*
 * Gets the pages from @from to @end - 1. Returns how many have the bytes of the disk without a gap:
 * from @from on, or, if @suffix is true, up to @end.
 */
static unsigned int get_pages(struct run *run, struct tmem_fs *fs, struct bio *bio,
			      const struct tmem_area *area, u32 block, unsigned int from,
			      unsigned int end, bool suffix)
{
	u64 deadline_ns = tmem_get_deadline_ns();
	struct bvec_iter iter = bio->bi_iter;
	unsigned int at, nr, done = 0;
	unsigned long missed;

	bio_advance_iter(bio, &iter, from << PAGE_SHIFT);
	for (at = from; at < end; at += nr) {
		/* A run lies within an object of the index. */
		nr = min3((unsigned int)TMEM_RUN_PAGES, end - at,
			  (unsigned int)(BIT(TMEM_OBJECT_BITS) -
					 (block + at) % BIT(TMEM_OBJECT_BITS)));
		get_run(run, fs, bio, &iter, area, block + at, nr, deadline_ns);
		missed = ~run->want & GENMASK(nr - 1, 0);
		if (!missed) {
			done += nr;
		} else if (suffix) {
			done = nr - 1 - __fls(missed);
		} else {
			done += __ffs(missed);
			break;
		}
	}
	return done;
}

/* Sets run->missing for the pages of a bio. Returns the number of pages that the host has. */
static unsigned int find_held(struct run *run, const struct tmem_fs *fs, u32 block,
			      unsigned int nr)
{
	DECLARE_BITMAP(held, TMEM_RUN_PAGES);
	unsigned int at, part, i, sum = 0;
	struct tmem_key key;
	pgoff_t index;

	bitmap_fill(run->missing, nr);
	for (at = 0; at < nr; at += part) {
		index = tmem_block_key(&key, fs->pool, block + at);
		part = min3((unsigned int)TMEM_RUN_PAGES, nr - at,
			    (unsigned int)(BIT(TMEM_OBJECT_BITS) - index));
		sum += tmem_held(&key, index, part, held);
		for_each_set_bit(i, held, part)
			__clear_bit(at + i, run->missing);
	}
	return sum;
}

/**
 * tmem_fill() - fill pages of a read from the host
 * @bio: the bio; shortened to the pages that the disk has to read
 * @area: copy of its area
 * @sector: first sector of the bio, on the whole disk
 *
 * Context: process, may sleep until the deadline.
 * Return: true if the bio has ended, because all pages were filled.
 */
bool tmem_fill(struct bio *bio, const struct tmem_area *area, sector_t sector)
{
	u32 block = (sector - area->start) / TMEM_BLOCK_SECTORS;
	unsigned int nr, prefix, suffix, done;
	struct run *run = NULL;
	struct tmem_fs *fs;
	bool ended = false;

	if (!READ_ONCE(tmem_hooks_on) || !tmem_online() || !may_wait(bio))
		return false;
	nr = count_pages(bio, area, sector);
	if (!nr)
		return false;
	fs = tmem_fs_get(area->sb);
	if (!fs)
		return false;
	/* If live is set, the pool has pages of this mount; pairs with tmem_fs_register(). */
	if (smp_load_acquire(&fs->live) && !tmem_bypass_is_all(fs->pool))
		run = kmalloc(sizeof(*run), GFP_NOIO | __GFP_NORETRY | __GFP_NOWARN);
	if (!run || !find_held(run, fs, block, nr))
		goto put;
	prefix = find_first_bit(run->missing, nr);
	suffix = prefix == nr ? 0 : nr - 1 - find_last_bit(run->missing, nr);
	if (!prefix && !suffix)
		goto put;
	if (prefix >= suffix) {
		done = get_pages(run, fs, bio, area, block, 0, prefix, false);
		if (done == nr)
			ended = true;
		else
			bio_advance(bio, done << PAGE_SHIFT);
	} else {
		done = get_pages(run, fs, bio, area, block, nr - suffix, nr, true);
		bio->bi_iter.bi_size -= done << PAGE_SHIFT;
	}
put:
	kfree(run);
	tmem_fs_put(fs);
	if (ended)
		bio_endio(bio);
	return ended;
}
