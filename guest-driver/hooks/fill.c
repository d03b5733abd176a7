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
 * No function of this file sleeps. The bio is in flight, as on its way to a disk, unless the put
 * ring has all of its pages. A tasklet ends the bio, or a work item submits the rest of it to the
 * disk.
 *
 * A get and a write of the same block: a get that begins while a write may be in flight is left to
 * the disk, and so is one whose block a write has reached before the answer. So a reader never sees
 * bytes that are older than those that another reader has seen.
 */
#include <linux/bio.h>
#include <linux/bitmap.h>
#include <linux/blkdev.h>
#include <linux/ioprio.h>
#include <linux/irqflags.h>
#include <linux/pagemap.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/workqueue.h>

#include "../core/get.h"
#include "blocks.h"

/* Maximum number of pages of a bio that is filled. Readahead of 8 MiB has this many. */
#define FILL_PAGES_MAX 2048

/*
 * Maximum number of fills in flight, with those whose rest waits in the work queue. The queue has
 * as many workers, so a slow disk cannot delay the rests for other disks.
 */
#define FILLS_MAX 128
/* Number of rests in the work queue at which reads go to their disk directly. */
#define RESTS_MAX 32

/* A bio, and those of its pages that one fetch gets: the first or the last ones. */
struct fill {
	struct tmem_fetch fetch;
	DECLARE_BITMAP(want, TMEM_FETCH_PAGES_MAX);
	struct work_struct work;
	struct bio *bio;
	struct tmem_fs *fs;
	tmem_submit_t *submit;
	u32 block;			/* block of the first page */
	u32 epoch;			/* of the area when the fill began */
	sector_t area_start;		/* on the whole disk */
	bool suffix;			/* the last pages of the bio */
	bool all;			/* all pages were got */
	u32 *seq;			/* sequence numbers of the records */
	u64 *check64;			/* checks of the pages that were got */
	struct page *page[];
};

static struct workqueue_struct *fill_wq;
/*
 * Number of fills in flight. They begin and end on different processors, so a sum of counters of
 * processors could miss one.
 */
static atomic_t nr_fills = ATOMIC_INIT(0);
/* Number of bios whose rest was not submitted yet. */
static atomic_t nr_rests = ATOMIC_INIT(0);

/* Counts a fill that has ended, after all accesses of it. */
static void fill_gone(void)
{
	smp_mb__before_atomic();	/* pairs with tmem_fill_wait() */
	atomic_dec(&nr_fills);
}

/*
 * Returns the inode of a folio's mapping, or NULL. Another task may own the lock or the writeback,
 * and evict the inode. So the caller holds the RCU read lock.
 */
static const struct inode *inode_of(struct folio *folio)
{
	const struct address_space *mapping = folio_mapping(folio);

	return mapping ? mapping->host : NULL;
}

static bool is_of_file(struct folio *folio, const struct super_block *sb)
{
	const struct inode *inode;
	bool same;

	rcu_read_lock();
	inode = inode_of(folio);
	same = inode && S_ISREG(inode->i_mode) && inode->i_sb == sb;
	rcu_read_unlock();
	return same;
}

/* Returns whether a folio, which is locked or under writeback, is of a file system or swap area. */
static bool is_of(struct folio *folio, const struct super_block *sb)
{
	return tmem_is_swap(sb) ? tmem_swap_has(folio, sb) : is_of_file(folio, sb);
}

/*
 * Requests a discovery if the mount of a page is not known. @page is the first page of a bio that
 * is being submitted. The mount may be older than the hooks, or the kernel has no hook of mounts.
 * Small files of btrfs and f2fs are in pages of metadata. Context: any but NMI.
 */
void tmem_note_page(struct page *page)
{
	struct folio *folio = page_folio(page);
	const struct inode *inode;

	if (!folio_test_locked(folio) && !folio_test_writeback(folio))
		return;
	rcu_read_lock();
	inode = inode_of(folio);
	if (inode && !tmem_fs_find(inode->i_sb))
		tmem_fs_note(inode->i_sb);
	rcu_read_unlock();
}

/*
 * Returns whether only a read can change a page of @sb until the read ends. The lock is
 * tested first: it keeps the mapping. No task has mapped or pinned a folio that is not uptodate,
 * except on ext4 of Linux 6.12 after a failed writeback. Context: any.
 */
bool tmem_is_filled(struct page *page, const struct super_block *sb)
{
	struct folio *folio = page_folio(page);

	return folio_test_locked(folio) && !folio_test_uptodate(folio) && !folio_mapped(folio) &&
	       is_of(folio, sb);
}

/* Returns whether a clean page of @sb is being written back. Context: any. */
bool tmem_is_flushed(struct page *page, const struct super_block *sb)
{
	struct folio *folio = page_folio(page);

	return folio_test_writeback(folio) && !folio_test_dirty(folio) && is_of(folio, sb);
}

/*
 * Returns whether a segment of a bio is a page, and a whole block of an area. @place is its place
 * in bytes from the beginning of the area.
 */
bool tmem_is_block(const struct bio_vec *bv, u64 place)
{
	return bv->bv_len == PAGE_SIZE && !bv->bv_offset &&
	       (!(place & ~PAGE_MASK) || TMEM_WITHOUT(WHOLE));
}

/*
 * Returns whether the bio may be delayed until the deadline. A task inside a journal transaction
 * would wait for the page with the transaction open, and reclaim would wait without memory. Inside
 * a stacked driver, bios wait for each other, and a loop device's task waits for bios of its file.
 */
static bool may_delay(void)
{
	return in_task() && !irqs_disabled() && !current->bio_list && !current->journal_info &&
	       !(current->flags & (PF_MEMALLOC | PF_LOCAL_THROTTLE)) &&
	       atomic_read(&nr_rests) < RESTS_MAX;
}

/* Returns whether the page before a folio is being read, so that a reader waits for that one. */
static bool follows_read(struct folio *folio)
{
	struct address_space *mapping;
	struct folio *before = NULL;
	bool follows = false;

	if (folio_test_swapcache(folio))
		return false;
	rcu_read_lock();
	/* The bio may be one of a direct read, whose pages have no mapping. */
	mapping = folio_mapping(folio);
	if (mapping && folio->index)
		before = xa_load(&mapping->i_pages, folio->index - 1);
	if (before && !xa_is_value(before) && folio_try_get(before)) {
		follows = folio_test_locked(before) && !folio_test_uptodate(before);
		folio_put(before);
	}
	rcu_read_unlock();
	return follows;
}

/*
 * Returns whether a reader will wait for the first page of a bio that the current task submits, as
 * far as the driver can see: nobody waits yet for a window that readahead starts in advance. Its
 * first folio has the flag "readahead". A wrong answer only costs time.
 */
bool tmem_is_awaited(struct bio *bio)
{
	struct folio *folio = page_folio(bio_page(bio));

	return !(bio->bi_opf & REQ_NOWAIT) && !tmem_plug_nowait(current->plug) &&
	       !tmem_must_not_wait() && !folio_test_readahead(folio) && !follows_read(folio);
}

/*
 * Returns the page for which a reader of the bio waits. btrfs splits bios before it submits them.
 * All parts of a bio share its pages, which stay locked until the last part has ended.
 */
static struct page *first_page(const struct bio *bio)
{
	return bio->bi_io_vec->bv_page;
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
		    (!tmem_is_swap(area->sb) &&
		     tmem_fs_inode_secret(page_folio(bv.bv_page)->mapping->host)))
			return 0;
		place += PAGE_SIZE;
	}
	return nr;
}

/*
 * Sets the numbers of pages that the host has at the begin and at the end of a bio. Both are @nr if
 * it has all pages.
 */
static void find_held(const struct tmem_fs *fs, u32 block, unsigned int nr, unsigned int *prefix,
		      unsigned int *suffix)
{
	DECLARE_BITMAP(held, TMEM_RUN_PAGES);
	unsigned int at, part, i;
	struct tmem_key key;
	pgoff_t index;

	*prefix = *suffix = 0;
	for (at = 0; at < nr; at += part) {
		index = tmem_block_key(&key, fs->pool, block + at);
		part = min3((unsigned int)TMEM_RUN_PAGES, nr - at,
			    (unsigned int)(BIT(TMEM_OBJECT_BITS) - index));
		tmem_held(&key, index, part, held);
		for (i = 0; i < part; i++) {
			if (!test_bit(i, held)) {
				*suffix = 0;
				continue;
			}
			if (*prefix == at + i)
				++*prefix;
			++*suffix;
		}
	}
}

/*
 * Chooses the pages of a bio that a fetch gets: from @first on, as many as the function returns.
 * They are of one object of the index.
 */
static unsigned int choose(const struct tmem_fs *fs, u32 block, unsigned int nr,
			   unsigned int *first, bool *suffix)
{
	unsigned int held, held_last, object;

	find_held(fs, block, nr, &held, &held_last);
	*suffix = held_last > held;
	*first = 0;
	if (!*suffix) {
		object = BIT(TMEM_OBJECT_BITS) - block % BIT(TMEM_OBJECT_BITS);
		return min3(held, object, (unsigned int)TMEM_FETCH_PAGES_MAX);
	}
	object = (block + nr - 1) % BIT(TMEM_OBJECT_BITS) + 1;
	/*
	 * Pages are requested in ascending order. One leaf has one request, so that no page is
	 * requested in vain because there is none for a later one.
	 */
	held = min(held_last, (object - 1) % TMEM_RUN_PAGES + 1);
	*first = nr - held;
	return held;
}

/* Allocates a fill of @nr pages of a bio, from page @first on. @block is the block of the bio. */
static struct fill *fill_new(struct bio *bio, const struct tmem_area *area, struct tmem_fs *fs,
			     u32 block, unsigned int first, unsigned int nr)
{
	struct bvec_iter iter = bio->bi_iter;
	struct fill *fill = NULL;
	unsigned int i;

	if (!TMEM_INJECT(nomem))
		fill = kmalloc(struct_size(fill, page, nr) +
			       nr * (sizeof(*fill->check64) + sizeof(*fill->seq)),
			       GFP_NOWAIT | __GFP_NOWARN | __GFP_NOMEMALLOC);
	if (!fill) {
		tmem_count(TMEM_STAT_fetches_no_memory);
		return NULL;
	}
	*fill = (struct fill){
		.bio = bio,
		.fs = fs,
		.block = area->first + block + first,
		.epoch = area->epoch,
		.area_start = area->start,
		.check64 = (u64 *)(fill->page + nr),
		.seq = (u32 *)((u64 *)(fill->page + nr) + nr),
	};
	fill->fetch.index = tmem_block_key(&fill->fetch.key, fs->pool, block + first);
	fill->fetch.nr = nr;
	fill->fetch.pages = fill->page;
	fill->fetch.want = fill->want;
	fill->fetch.check64 = fill->check64;
	bio_advance_iter(bio, &iter, first << PAGE_SHIFT);
	for (i = 0; i < nr; i++) {
		fill->page[i] = bio_iter_iovec(bio, iter).bv_page;
		bio_advance_iter_single(bio, &iter, PAGE_SIZE);
		fill->seq[i] = tmem_record_get(fill->block + i);
		if (fill->seq[i])
			__set_bit(i, fill->want);
	}
	return fill;
}

/*
 * Ends a fill whose fetch has ended, and shortens the bio to the pages that are left. Returns
 * whether none is left. Pages without a gap to the end of the bio are done.
 */
static bool fill_end(struct fill *fill)
{
	/* The first pages may come in several parts. */
	unsigned int nr = fill->suffix ? fill->fetch.nr : fill->fetch.nr_tried;
	unsigned int i, done = 0;
	struct bio *bio = fill->bio;
	bool whole, verify;

	/* The epoch and the records belong together (tmem_records_fit_ram()). */
	rcu_read_lock();
	/*
	 * A wrong page may have blocked the mount meanwhile. If the interval of the area has ended,
	 * the page may be one that was put during the next drain.
	 */
	if (tmem_pool_is_wrong(fill->fs->pool) ||
	    (tmem_area_epoch(bio->bi_bdev->bd_disk, fill->area_start) != fill->epoch &&
	     !TMEM_WITHOUT(FILL_EPOCH)))
		bitmap_zero(fill->want, nr);
	verify = !bitmap_empty(fill->want, nr) &&
		 tmem_verify_due(fill->fs, bitmap_weight(fill->want, nr));
	for_each_set_bit(i, fill->want, nr)
		if (!tmem_record_got(fill->block + i, fill->seq[i], fill->page[i],
				     fill->check64[i], verify))
			__clear_bit(i, fill->want);
		else if (tmem_is_swap(fill->fs->sb))
			tmem_record_mark(fill->page[i]);
	rcu_read_unlock();
	this_cpu_add(fill->fs->cpu->hits, bitmap_weight(fill->want, nr));
	/* In the sample, the disk reads all pages, whose bytes are compared with the records. */
	if (verify) {
		tmem_count_n(TMEM_STAT_verified_hits, bitmap_weight(fill->want, nr));
		bitmap_zero(fill->want, nr);
	}
	tmem_fs_put(fill->fs);
	while (done < nr && test_bit(fill->suffix ? nr - 1 - done : done, fill->want))
		done++;
	fill->all = nr && done == nr;
	if (!fill->all)
		tmem_count(TMEM_STAT_fetches_disk);
	whole = bio->bi_iter.bi_size == done << PAGE_SHIFT;
	if (fill->suffix && !whole)
		bio->bi_iter.bi_size -= done << PAGE_SHIFT;
	else if (!whole)
		bio_advance(bio, done << PAGE_SHIFT);
	return whole;
}

/* Submits the rest of a bio, from a work item, so the submission may sleep. */
static void rest_fn(struct work_struct *work)
{
	struct fill *fill = container_of(work, struct fill, work);
	u64 deadline_ns = fill->all ? fill->fetch.deadline_ns : 0;
	tmem_submit_t *submit = fill->submit;
	struct bio *bio = fill->bio;

	kfree(fill);
	bio->bi_opf &= ~REQ_NOWAIT;
	submit(bio, deadline_ns);
	atomic_dec(&nr_rests);
	fill_gone();
}

static void fetch_done(struct tmem_fetch *fetch)
{
	struct fill *fill = container_of(fetch, struct fill, fetch);
	struct bio *bio = fill->bio;

	if (!fill_end(fill)) {
		atomic_inc(&nr_rests);
		queue_work(fill_wq, &fill->work);
		return;
	}
	kfree(fill);
	bio_endio(bio);
	fill_gone();
}

/*
 * Fills pages of a read from the host, and shortens the bio to the pages that the disk has to read.
 * @area is a copy of its area, and @sector its first sector on the whole disk. @awaited is from
 * tmem_is_awaited(). @submit is called in a task to submit what is left of the bio, with the
 * deadline, or with 0 if the disk has to read it.
 *
 * Returns what the caller has to do with the bio. Context: any; does not sleep.
 */
enum tmem_filled tmem_fill(struct bio *bio, const struct tmem_area *area, sector_t sector,
			   u64 deadline_ns, bool awaited, tmem_submit_t *submit)
{
	u32 block = (sector - area->start) / TMEM_BLOCK_SECTORS;
	enum tmem_filled filled = TMEM_FILLED_NOTHING;
	unsigned int nr, from, part;
	struct fill *fill = NULL;
	struct tmem_fs *fs;
	bool suffix;

	/*
	 * Puts do not test tmem_hooks_on. After the release of the hooks, they may enter bytes from
	 * before a write that the driver does not see. A get that has passed this test may return
	 * them: its bio was submitted before that write, with its pages locked.
	 */
	if (!READ_ONCE(tmem_hooks_on) || !tmem_online() || !may_delay())
		return filled;
	nr = count_pages(bio, area, sector);
	if (!nr)
		return filled;
	fs = tmem_fs_get(area->sb);
	if (!fs)
		return filled;
	if (!READ_ONCE(fs->live) || tmem_pool_is_wrong(fs->pool))
		goto put;
	part = choose(fs, block, nr, &from, &suffix);
	TMEM_HOLD(fill);
	deadline_ns = TMEM_HOLD_CLOCK(choice, deadline_ns);
	if (!part)
		goto put;
	if (atomic_inc_return(&nr_fills) <= FILLS_MAX)
		fill = fill_new(bio, area, fs, block, from, part);
	if (!fill) {
		fill_gone();
		goto put;
	}
	fill->suffix = suffix;
	fill->submit = submit;
	fill->fetch.done = fetch_done;
	/* The bio may be the rest of one whose first pages are filled. */
	fill->fetch.first = first_page(bio);
	/* Readahead sets the flag in the first folio of a window that it begins in advance. */
	fill->fetch.ahead = folio_test_readahead(page_folio(fill->fetch.first));
	fill->fetch.awaited = awaited;
	fill->fetch.deadline_ns = deadline_ns;
	INIT_WORK(&fill->work, rest_fn);
	this_cpu_add(fs->cpu->gets, bitmap_weight(fill->want, part));
	/* A worker submits the rest, which must not have the worker's priority. */
	if (IOPRIO_PRIO_CLASS(bio->bi_ioprio) == IOPRIO_CLASS_NONE)
		bio->bi_ioprio = get_current_ioprio();
	/* All pages can be retained: at its next eviction, a page is compared with its record. */
	if (!tmem_fetch_start(&fill->fetch))
		return TMEM_FILLED_LATER;
	if (fill_end(fill))
		filled = TMEM_FILLED_ALL;
	else if (fill->all)
		filled = TMEM_FILLED_PART;
	kfree(fill);
	if (filled == TMEM_FILLED_ALL)
		bio_endio(bio);
	fill_gone();
	return filled;
put:
	tmem_fs_put(fs);
	return filled;
}

/* Makes the work queue. Returns 0 or -ENOMEM. */
int tmem_fill_init(void)
{
	/* A reader may need the page to free memory, and may wait for it while tasks freeze. */
	fill_wq = alloc_workqueue("virtio_tmem_fill", WQ_UNBOUND | WQ_HIGHPRI | WQ_MEM_RECLAIM,
				  FILLS_MAX);
	return fill_wq ? 0 : -ENOMEM;
}

/*
 * Waits until no fill is in flight, after submit_bio() was released. A fill ends at its deadline at
 * the latest. The rest of its bio may still be at the disk. A disk that takes no bio, because it is
 * frozen, delays this function.
 */
void tmem_fill_wait(void)
{
	while (atomic_read(&nr_fills))
		schedule_timeout_idle(1);
	smp_mb();	/* pairs with fill_gone() */
	flush_workqueue(fill_wq);
}

/* Frees the work queue. */
void tmem_fill_exit(void)
{
	if (fill_wq)
		destroy_workqueue(fill_wq);
	fill_wq = NULL;
}
