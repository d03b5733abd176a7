// SPDX-License-Identifier: GPL-2.0-only
/*
 * Replacement of submit_bio(), through which file systems, swap, direct I/O and raw writes reach
 * their disk. It sees each bio of a served disk before a partition or a stacked driver changes the
 * bio. blocks.h has the rules.
 *
 * The driver puts its own function into bi_end_io, as stacked drivers do, and keeps the caller's
 * function and the place of the transfer in an object of its own. The function runs once, after all
 * parts of a bio that was split, and before the file system unlocks a page or ends writeback.
 *
 * A disk ends bios in hard interrupts, with its queue locked. The work for each page, of which a
 * bio may have a million, runs in a tasklet. The tasklet also ends the bios of a chain one after
 * another; bio_endio() would call itself for each bio of the chain whose bi_end_io was changed.
 *
 * Two tracepoints, or hooks at the same places, are a second net: they see writes to served disks
 * that did not come through submit_bio().
 */
#include <linux/bio.h>
#include <linux/blk-crypto.h>
#include <linux/blk-integrity.h>
#include <linux/blk-mq.h>
#include <linux/blkdev.h>
#include <linux/interrupt.h>
#include <linux/llist.h>
#include <linux/pagemap.h>
#include <linux/slab.h>

#include "../compat.h"
#include "../core/core.h"
#include "blocks.h"

/*
 * Number of pages whose state is allocated at a time, so that an allocation has 2 KiB. A write of
 * large folios may have 512 MiB and more in one bio. The memory for all of its pages is not found
 * at once while reclaim runs.
 */
#define STATES		127
/*
 * Number of pages of a write whose state may take the last free memory. The state of the write has
 * to, because the driver must see its end; with these, it has 256 bytes. Reclaim swaps most folios
 * out in a bio of one page, and there is no other memory then.
 */
#define RESERVED_STATES	6
/* Number of pages that a run of the tasklet records. They take about 50 us. */
#define RUN_PAGES	256

/* Beginning and length of a range that covers any disk, in sectors. */
#define WHOLE_DISK	((sector_t)1 << 56)

/* State of a page of a bio: sequence number, or 0; and, of a write, check. */
struct state {
	u64 check;
	u32 seq;
};

/* States of some pages of a long bio. */
struct states {
	struct states *next;
	struct state state[STATES];
};

/* State of a bio between its submission and its end. */
struct tracked {
	struct llist_node node;
	struct bio *bio;
	bio_end_io_t *end_io;
	void *private;
	const struct gendisk *disk;
	sector_t sector, nr;		/* range of sectors on the whole disk, or of slots */
	bool whole;			/* the range is erased, and not page by page */
	unsigned int long_write;	/* its number, if @whole */
	bool drained;			/* the disk of the area can be drained */
	sector_t disk_sector;		/* first sector on the whole disk of written slots, or 0 */
	sector_t area_start;
	u32 area_first;
	const struct super_block *sb;	/* of the area; only compared */
	u32 epoch;			/* of the area at the submission, or 0 */
	bool write;
	/* the next segment, and its number */
	struct bvec_iter iter;
	unsigned int at;
	unsigned int nr_pages;		/* number of pages that have a state */
	struct states *more;		/* of the pages from number STATES on */
	struct states *now;		/* used by state_of() */
	struct state state[];
};

struct ended {
	struct llist_head list;
	struct llist_node *rest;	/* taken from the list, oldest first; used by the tasklet */
	struct tasklet_struct tasklet;
};

static DEFINE_PER_CPU(struct ended, ended);
/* Counts whose sum over all CPUs is the number of tracked bios. */
static DEFINE_PER_CPU(long, nr_tracked);
static bio_end_io_t *chain_end_io;

static void bio_ended(struct bio *bio);

/*
 * Returns the first sector, on the whole disk, of the device by which a bio counts its sectors. A
 * bio that is submitted again may count by the whole disk already.
 */
static sector_t device_start(const struct bio *bio)
{
	return bio_flagged((struct bio *)bio, BIO_REMAPPED) ? 0 : get_start_sect(bio->bi_bdev);
}

/*
 * Returns the first sector of the slots of a bio, or 0 if they are not served or no neighbours. The
 * kernel merges slots that are neighbours on the disk, and a swap file can have its blocks in any
 * order.
 */
static sector_t slots_of(struct bio *bio)
{
	sector_t first = tmem_swap_sector(bio_page(bio), bio->bi_bdev), next = first;
	struct bvec_iter iter;
	struct bio_vec bv;

	if (!first)
		return 0;
	bio_for_each_segment(bv, bio, iter) {
		if (!TMEM_WITHOUT(SLOTS) && tmem_swap_sector(bv.bv_page, bio->bi_bdev) != next)
			return 0;
		next += TMEM_BLOCK_SECTORS;
	}
	return first;
}

/* Returns the first sector of a bio as areas count: by slots, or on the whole disk. */
static sector_t sector_of(struct bio *bio)
{
	return slots_of(bio) ?: bio->bi_iter.bi_sector + device_start(bio);
}

/*
 * Erases each slot that a bio writes for the swap code. The end of the bio needs no erasure: no
 * other transfer of the slot begins before it. Context: any but NMI.
 */
static void erase_slots(struct bio *bio)
{
	struct bvec_iter iter;
	struct bio_vec bv;
	sector_t sector;

	if (!(bio->bi_opf & REQ_SWAP))
		return;
	bio_for_each_segment(bv, bio, iter) {
		sector = tmem_swap_sector(bv.bv_page, bio->bi_bdev);
		if (sector)
			tmem_area_erase(bio->bi_bdev->bd_disk, sector, TMEM_BLOCK_SECTORS, false);
	}
}

/*
 * Returns the place of a segment of a bio, in bytes from the beginning of its area. The sector in
 * the iterator is wrong after a segment that is not a multiple of a sector.
 */
static u64 place(const struct tracked *t, const struct bvec_iter *iter)
{
	u64 byte = ((u64)t->nr << SECTOR_SHIFT) - iter->bi_size;

	/* The test uses a disk without partitions. */
	if (TMEM_WITHOUT(BYTES))
		byte = (u64)(iter->bi_sector - t->sector) << SECTOR_SHIFT;
	return ((u64)(t->sector - t->area_start) << SECTOR_SHIFT) + byte;
}

/* Returns the block of a place in the area of a bio. */
static u32 block_at(const struct tracked *t, u64 place)
{
	return t->area_first + (u32)(place >> TMEM_BLOCK_SHIFT);
}

/* Begins or ends a write of a segment that is not recorded. */
static void write_part(const struct tracked *t, u64 place, const struct bio_vec *bv, bool begins)
{
	u32 first = block_at(t, place);

	tmem_record_write_range(first, block_at(t, place + bv->bv_len - 1) - first + 1, begins);
}

static u64 check_of(struct page *page)
{
	void *bytes = kmap_local_page(page);
	u64 check = tmem_check64_page(&tmem_keys, bytes);

	kunmap_local(bytes);
	return check;
}

/* Returns the state of a page. The pages must be passed in order, from 0 on. */
static struct state *state_of(struct tracked *t, unsigned int page)
{
	if (page < STATES)
		return &t->state[page];
	if (!(page % STATES))
		t->now = page == STATES ? t->more : t->now->next;
	return &t->now->state[page % STATES];
}

static void track_free(struct tracked *t)
{
	struct states *states, *next;

	for (states = t->more; states; states = next) {
		next = states->next;
		kfree(states);
	}
	kfree(t);
}

/* Allocates states until @nr_pages pages have one, as far as there is memory. */
static void add_states(struct tracked *t, unsigned int nr_pages, gfp_t gfp)
{
	struct states **end = &t->more;

	while (t->nr_pages < nr_pages) {
		*end = TMEM_INJECT(nomem_states) ? NULL : kmalloc(sizeof(**end), gfp);
		if (!*end)
			break;
		(*end)->next = NULL;
		end = &(*end)->next;
		t->nr_pages = min(t->nr_pages + STATES, nr_pages);
	}
	tmem_count_n(TMEM_STAT_blocks_nomem, nr_pages - t->nr_pages);
}

/*
 * Allocates the state of a bio and, as far as there is memory, of its first @nr_pages pages. If
 * @reserve is true, it may take the last free memory.
 */
static struct tracked *track_new(struct bio *bio, unsigned int nr_pages, bool write, bool reserve)
{
	gfp_t gfp = GFP_NOWAIT | __GFP_NOWARN | (reserve ? __GFP_HIGH : __GFP_NOMEMALLOC);
	unsigned int nr = min_t(unsigned int, nr_pages, STATES);
	struct tracked *t;

	if (TMEM_INJECT(nomem) || (write && !reserve && TMEM_INJECT(nomem_write)))
		return NULL;
	t = kmalloc(struct_size(t, state, nr), gfp);
	if (!t)
		return NULL;
	*t = (struct tracked){
		.bio = bio,
		.end_io = bio->bi_end_io,
		.private = bio->bi_private,
		.disk = bio->bi_bdev->bd_disk,
		.nr = bio_sectors(bio),
		.write = write,
		.iter = bio->bi_iter,
		.nr_pages = nr,
	};
	if (nr < nr_pages)
		add_states(t, nr_pages, gfp);
	return t;
}

static void track(struct tracked *t)
{
	tmem_users_begin(&nr_tracked);
	t->bio->bi_private = t;
	t->bio->bi_end_io = bio_ended;
}

/* Sets the area of a bio. Returns false if the whole bio is in no area. */
static bool set_area(struct tracked *t)
{
	const struct tmem_area *area;

	rcu_read_lock();
	area = tmem_area_find(t->disk, t->sector, t->nr);
	if (area) {
		t->area_start = area->start;
		t->area_first = area->first;
		t->sb = area->sb;
		t->epoch = READ_ONCE(area->epoch);
		t->drained = area->drained;
	}
	rcu_read_unlock();
	return area;
}

/* Returns whether no transfer of the bio's area was missed since the bio was submitted. */
static bool is_same_epoch(const struct tracked *t)
{
	return t->epoch && tmem_area_epoch(t->disk, t->area_start) == t->epoch;
}

static bool is_encoded(struct bio *bio)
{
	return bio_has_crypt_ctx(bio) || bio_integrity(bio);
}

static void submit_rest(struct bio *bio, u64 deadline_ns);

/*
 * Fills pages of a read from the host, if all conditions are met, and shortens the bio to the other
 * pages.
 */
static enum tmem_filled fill_part(struct bio *bio, u64 deadline_ns, bool awaited)
{
	sector_t sector = sector_of(bio);
	const struct tmem_area *area;
	struct tmem_area copy = {};

	rcu_read_lock();
	area = tmem_area_find(bio->bi_bdev->bd_disk, sector, bio_sectors(bio));
	if (area)
		copy = *area;
	rcu_read_unlock();
	if (!tmem_area_works(&copy))
		return TMEM_FILLED_NOTHING;
	return tmem_fill(bio, &copy, sector, deadline_ns, awaited, submit_rest);
}

/* Returns true if the bio has ended, or will end later. */
static bool fill(struct bio *bio, u64 deadline_ns)
{
	enum tmem_filled filled;
	bool awaited = false;

	if (deadline_ns == TMEM_FILL_FIRST) {
		deadline_ns = tmem_get_deadline_ns();
		awaited = tmem_is_awaited(bio);
	}
	do
		filled = fill_part(bio, deadline_ns, awaited);
	while (filled == TMEM_FILLED_PART);
	return filled != TMEM_FILLED_NOTHING;
}

/*
 * Begins a read. @deadline_ns is 0 if the disk has to read it, and TMEM_FILL_FIRST if it was not
 * submitted before. Returns true if the bio has ended, or will end later. Reads are not recorded
 * while there is no device.
 */
static bool begin_read(struct bio *bio, u64 deadline_ns)
{
	unsigned int i = 0, nr_pages;
	struct bvec_iter iter;
	struct state *state;
	struct bio_vec bv;
	struct tracked *t;
	u64 at;

	/* dm uses bi_private of a polled bio. */
	if (!tmem_dev_exists() || bio->bi_opf & REQ_POLLED || is_encoded(bio) ||
	    !bio->bi_end_io || !bio_sectors(bio) || !folio_test_locked(page_folio(bio_page(bio))))
		return false;
	if (deadline_ns && fill(bio, deadline_ns))
		return true;
	nr_pages = bio_segments(bio);
	t = track_new(bio, nr_pages, false, false);
	if (!t) {
		tmem_count_n(TMEM_STAT_blocks_nomem, nr_pages);
		return false;
	}
	t->sector = sector_of(bio);
	if (!set_area(t) || !t->epoch || !tmem_is_filled(bio_page(bio), t->sb)) {
		track_free(t);
		return false;
	}
	bio_for_each_segment(bv, bio, iter) {
		if (i == t->nr_pages)
			break;
		at = place(t, &iter);
		state = state_of(t, i++);
		state->seq = tmem_is_block(&bv, at) && tmem_is_filled(bv.bv_page, t->sb) ?
			     tmem_record_read(block_at(t, at)) : 0;
		if (!(i % STATES))
			cond_resched();	/* submit_bio() may sleep */
	}
	track(t);
	return false;
}

/* Submits what a fill has left of a read. The driver sees the bio as any other one. */
static void submit_rest(struct bio *bio, u64 deadline_ns)
{
	if (!begin_read(bio, deadline_ns))
		tmem_original(submit_bio)(bio);
}

/*
 * Erases the blocks that a write touches. For pages under writeback, it also stores the checks with
 * which they may be recorded when the write ends.
 */
static void begin_pages(struct tracked *t)
{
	struct bio *bio = t->bio;
	struct bvec_iter iter;
	struct state *state;
	enum tmem_inval why = TMEM_INVAL_BLOCK;
	unsigned int i = 0;
	struct bio_vec bv;
	u32 first, last;
	u64 at = 0;

	bio_for_each_segment(bv, bio, iter) {
		state = i < t->nr_pages ? state_of(t, i) : NULL;
		if (state)
			state->seq = 0;
		at = place(t, &iter);
		if (state && t->epoch && tmem_is_flushed(bv.bv_page, t->sb) &&
		    tmem_is_block(&bv, at)) {
			if (tmem_is_swap(t->sb) &&
			    tmem_swap_reuse(t->sb, at >> TMEM_BLOCK_SHIFT))
				why = TMEM_INVAL_FREED;
			state->seq = tmem_record_write(block_at(t, at), bv.bv_page);
			state->check = check_of(bv.bv_page);
		} else {
			write_part(t, at, &bv, true);
		}
		if (!(++i % STATES))
			cond_resched();	/* submit_bio() may sleep */
	}
	/* A put that found a record has ended, and no other one begins until the write ends. */
	first = block_at(t, place(t, &bio->bi_iter));
	last = block_at(t, at + bv.bv_len - 1);
	if (in_task() && !(current->flags & PF_KTHREAD))
		TMEM_HOLD(write);
	if (!TMEM_WITHOUT(FORGET))
		tmem_area_forget(t->sb, first - t->area_first, last - first + 1, true, why);
}

/*
 * Sets the area of a write, which begins at @sector on the whole disk. Returns false if it is in
 * none. Slots that are no neighbours are erased one by one, and not recorded.
 */
static bool set_write_area(struct tracked *t, sector_t sector)
{
	t->sector = t->bio->bi_opf & REQ_SWAP ? slots_of(t->bio) : 0;
	if (t->sector && set_area(t)) {
		/* A swap file also has blocks of the file system, which can be read as a file. */
		if (!TMEM_WITHOUT(SWAP_FILE)) {
			tmem_area_erase(t->disk, sector, t->nr, true);
			t->disk_sector = sector;
		}
		return true;
	}
	erase_slots(t->bio);
	t->sector = sector;
	return set_area(t);
}

static void begin_write(struct bio *bio, sector_t sector, sector_t nr)
{
	bool pages = bio_op(bio) == REQ_OP_WRITE && !is_encoded(bio) && tmem_dev_exists();
	u64 from, bytes = (u64)nr << SECTOR_SHIFT;
	unsigned int nr_pages = 0, nr_states;
	struct tracked *t = NULL;
	bool in_area;

	/* Only pages under writeback are recorded. A direct write, of any length, has none. */
	if (pages && folio_test_writeback(page_folio(bio_page(bio))))
		nr_pages = bio_segments(bio);
	if (nr_pages)
		t = track_new(bio, nr_pages, true, false);
	if (!t) {
		nr_states = min_t(unsigned int, nr_pages, RESERVED_STATES);
		t = track_new(bio, nr_states, true, true);
		if (!t && nr_states)
			t = track_new(bio, 0, true, true);
		tmem_count_n(TMEM_STAT_blocks_nomem, nr_pages - (t ? t->nr_pages : 0));
	}
	if (!t) {
		erase_slots(bio);
		tmem_area_unseen(bio->bi_bdev->bd_disk, sector, nr);
		return;
	}
	t->nr = nr;
	in_area = set_write_area(t, sector);
	t->whole = bio_op(bio) != REQ_OP_WRITE || !in_area;
	if (t->whole) {
		from = (u64)(sector - t->area_start) << SECTOR_SHIFT;
		/*
		 * While the write is in flight, an area that cannot be drained may follow, with
		 * other numbers.
		 */
		t->long_write = in_area && t->drained ?
			tmem_record_long_write(block_at(t, from), block_at(t, from + bytes - 1)) :
			tmem_record_long_write(0, U32_MAX);
		/* submit_bio() may sleep. */
		if (!tmem_area_erase(t->disk, sector, nr, true)) {
			tmem_record_long_end(t->long_write);
			track_free(t);
			return;
		}
	} else {
		begin_pages(t);
	}
	/* A poller would find the end of the bio before the driver has seen it. */
	bio_clear_polled(bio);
	track(t);
}

/*
 * Fills or tracks a bio that is being submitted. Its sectors count from the beginning of its
 * partition. Returns true if the bio must not be submitted, because it has ended or will end later.
 * Context: process; does not sleep, but may reschedule.
 */
bool tmem_bio_begin(struct bio *bio)
{
	sector_t sector, nr;

	/* Linux 6.1 submits some bios again, from another task. */
	if (bio->bi_end_io == bio_ended)
		return false;
	sector = bio->bi_iter.bi_sector + device_start(bio);
	nr = bio_sectors(bio);
	switch (bio_op(bio)) {
	case REQ_OP_READ:
		return begin_read(bio, TMEM_FILL_FIRST);
	case REQ_OP_FLUSH:
		return false;
	case REQ_OP_WRITE:
	case REQ_OP_WRITE_ZEROES:
	case REQ_OP_DISCARD:
	case REQ_OP_SECURE_ERASE:
		if (nr)
			begin_write(bio, sector, nr);
		return false;
	default:
		begin_write(bio, 0, WHOLE_DISK);
		return false;
	}
}

/* Disables a mount, because the host would have returned other bytes than the disk for a block. */
static void block_mount(const struct super_block *sb, u32 block)
{
	struct tmem_fs *fs;

	tmem_count(TMEM_STAT_verify_mismatches);
	rcu_read_lock();
	fs = tmem_fs_find(sb);
	if (fs) {
		tmem_pool_wrong(fs->pool, "a page from the host differs from the disk", block);
		tmem_fs_flush(fs);
	}
	rcu_read_unlock();
}

/* Records the next page of a bio that has ended, or erases the records of its blocks. */
static void end_page(struct tracked *t, const struct bio_vec *bv, bool good)
{
	struct state *state = t->at < t->nr_pages ? state_of(t, t->at) : NULL;
	u32 seq = state ? state->seq : 0;
	u64 at = place(t, &t->iter);

	if (t->write && seq && good)
		tmem_record_flush(block_at(t, at), seq, state->check, bv->bv_page);
	else if (t->write)
		write_part(t, at, bv, false);
	else if (seq && good && !tmem_record_fill(block_at(t, at), seq, bv->bv_page))
		block_mount(t->sb, block_at(t, at) - t->area_first);
	if (seq && good && tmem_is_swap(t->sb))
		tmem_record_mark(bv->bv_page);
}

/* Returns whether all pages are done. The iterator of the bio itself has changed meanwhile. */
static bool end_pages(struct tracked *t, unsigned int *budget)
{
	struct bio_vec bv;
	bool good;

	/* The epoch and the records belong together (tmem_records_fit_ram()). */
	rcu_read_lock();
	good = !t->bio->bi_status && is_same_epoch(t);
	for (; t->iter.bi_size && *budget; --*budget) {
		bv = bio_iter_iovec(t->bio, t->iter);
		end_page(t, &bv, good);
		bio_advance_iter_single(t->bio, &t->iter, bv.bv_len);
		t->at++;
	}
	rcu_read_unlock();
	return !t->iter.bi_size || (!t->write && t->at >= t->nr_pages);
}

/*
 * Returns whether a write may have reached the device, which has not acknowledged it. A user can
 * cause INVAL by a direct write whose parts have a wrong alignment.
 */
static bool is_failure(blk_status_t status)
{
	return status && status != BLK_STS_NOTSUPP && status != BLK_STS_AGAIN &&
	       status != BLK_STS_TARGET &&
	       (status != BLK_STS_INVAL || TMEM_WITHOUT(INVAL));
}

/*
 * Does a part of the work for a bio that has ended: at most @budget pages, which it lowers. Returns
 * whether the bio's end was passed on.
 */
static bool end_some(struct tracked *t, unsigned int *budget)
{
	struct bio *bio = t->bio, *parent;

	if (t->write && !t->at && is_failure(bio->bi_status) && !TMEM_WITHOUT(FAILED))
		tmem_area_failed(t->disk, 0, WHOLE_DISK);
	if (t->whole) {
		/* Erasing a long range takes as long as many pages. Others take the next run. */
		*budget = 0;
		tmem_area_erase(t->disk, t->sector, t->nr, false);
		tmem_record_long_end(t->long_write);
	} else if (!end_pages(t, budget)) {
		return false;
	} else if (t->write && !is_same_epoch(t) && !TMEM_WITHOUT(FORMER)) {
		/*
		 * The blocks may have another area since, whose drain does not wait for a bio that
		 * a throttle holds back, nor for bios of stacked disks. An entry may be older than
		 * this write.
		 */
		*budget = 0;
		tmem_area_erase(t->disk, t->sector, t->nr, false);
	}
	if (t->disk_sector)
		tmem_area_erase(t->disk, t->disk_sector, t->nr, false);
	bio->bi_end_io = t->end_io;
	bio->bi_private = t->private;
	track_free(t);
	if (bio->bi_end_io == chain_end_io) {
		/* Do what bio_endio() does for a bio of a chain. The function itself is a BUG(). */
		parent = bio->bi_private;
		if (bio->bi_status && !parent->bi_status)
			parent->bi_status = bio->bi_status;
		bio_put(bio);
		bio_endio(parent);
	} else if (bio->bi_end_io) {
		bio->bi_end_io(bio);
	}
	tmem_users_end(&nr_tracked);
	return true;
}

static void end_all(struct tasklet_struct *tasklet)
{
	struct ended *e = from_tasklet(e, tasklet, tasklet);
	unsigned int budget = RUN_PAGES;
	struct tracked *t;

	if (!e->rest)
		e->rest = llist_reverse_order(llist_del_all(&e->list));
	while (e->rest && budget) {
		t = llist_entry(e->rest, struct tracked, node);
		e->rest = t->node.next;
		if (!end_some(t, &budget)) {
			/* Other bios go first: they need no order, and may be short. */
			llist_add(&t->node, &e->list);
			break;
		}
	}
	if (e->rest || !llist_empty(&e->list))
		tasklet_schedule(tasklet);
}

/* The end function of tracked bios. Any context but NMI. */
static void bio_ended(struct bio *bio)
{
	struct tracked *t = bio->bi_private;
	/* A task must stay on its processor, as interrupts do. The tasklet runs at the end. */
	bool task = in_task() && !irqs_disabled();
	unsigned int budget;
	struct ended *e;

	if (tmem_bio_ends_in_task(bio)) {
		do {
			budget = RUN_PAGES;
		} while (!end_some(t, &budget));
		return;
	}
	if (task)
		local_bh_disable();
	e = this_cpu_ptr(&ended);
	llist_add(&t->node, &e->list);
	tasklet_schedule(&e->tasklet);
	if (task)
		local_bh_enable();
}

/* In a kernel with the patches of intree/, submit_bio() calls tmem_bio_begin() instead. */
static void wrap_submit_bio(struct bio *bio)
{
	tmem_enter();
	if (!tmem_bio_begin(bio)) {
		if (op_is_write(bio_op(bio)) && !(current->flags & PF_KTHREAD))
			TMEM_HOLD(submit);
		tmem_original(submit_bio)(bio);
	}
	tmem_leave();
}

static bool wants_submit_bio(struct tmem_args *args)
{
	struct bio *bio = (void *)tmem_arg(args, 0);

	if (bio_has_data(bio))
		tmem_note_page(bio_page(bio));
	if (bio->bi_opf & REQ_SWAP && READ_ONCE(tmem_swap_allowed))
		tmem_swap_note(bio);
	return bio->bi_bdev && tmem_area_serves(bio->bi_bdev->bd_disk);
}

/* Returns whether a bio writes, and the driver will not see its end. */
static bool is_unseen(const struct bio *bio)
{
	return op_is_write(bio_op(bio)) && bio_sectors(bio) && bio->bi_end_io != bio_ended;
}

/*
 * Erases what a bio writes that did not come through submit_bio(), or before its area was there.
 * Context: any but NMI.
 */
void tmem_probe_bio_queue(void *data, struct bio *bio)
{
	const struct gendisk *disk = bio->bi_bdev->bd_disk;
	sector_t sector;

	if (!is_unseen(bio) || !tmem_area_serves(disk) || TMEM_WITHOUT(BIO_QUEUE))
		return;
	sector = bio->bi_iter.bi_sector + device_start(bio);
	erase_slots(bio);
	tmem_area_unseen(disk, sector, bio_sectors(bio));
}

/*
 * Erases what a request writes that the driver did not see as a bio. A command of a user (SG_IO)
 * that does not return data may write anywhere. A write that was submitted before its disk was
 * served may reach the disk after the drain. Context: any but NMI.
 */
void tmem_probe_rq_issue(void *data, struct request *rq)
{
	const struct gendisk *disk = rq->q->disk;
	const struct bio *bio, *last;

	if (!disk || !tmem_area_serves(disk))
		return;
	if (blk_rq_is_passthrough(rq)) {
		if ((op_is_write(req_op(rq)) || !blk_rq_bytes(rq)) && !TMEM_WITHOUT(PASSTHROUGH))
			tmem_area_unseen(disk, 0, WHOLE_DISK);
		return;
	}
	__rq_for_each_bio(bio, rq) {
		/* Parts of a bio that was split are chained to the bio with its end function. */
		for (last = bio; last->bi_end_io == chain_end_io; last = last->bi_private)
			;
		if (is_unseen(bio) && last->bi_end_io != bio_ended)
			tmem_area_unseen(disk, bio->bi_iter.bi_sector, bio_sectors(bio));
	}
}

const struct tmem_target tmem_bio_targets[] = {
	{
		.name = "submit_bio",
		.addr = (unsigned long)submit_bio,
		.hook = TMEM_HOOK_BIO,
		.wrap = wrap_submit_bio,
		.wanted = wants_submit_bio,
	},
	{}
};

/* Prepares for bios, before submit_bio() is hooked. */
void tmem_bio_init(void)
{
	struct bio child, parent;
	int cpu;

	for_each_possible_cpu(cpu) {
		init_llist_head(&per_cpu(ended, cpu).list);
		tasklet_setup(&per_cpu(ended, cpu).tasklet, end_all);
	}
	/* bio_chain() shows the function, which has no symbol for modules. */
	bio_init(&child, NULL, NULL, 0, 0);
	bio_init(&parent, NULL, NULL, 0, 0);
	bio_chain(&child, &parent);
	chain_end_io = child.bi_end_io;
}

/*
 * Waits for the end of all tracked bios, after submit_bio() was released. A disk that does not
 * answer delays it until the disk answers.
 */
void tmem_bio_wait(void)
{
	int cpu;

	tmem_fill_wait();
	tmem_users_wait(&nr_tracked);
	for_each_possible_cpu(cpu)
		tasklet_kill(&per_cpu(ended, cpu).tasklet);
	/* The last bio may have ended in a task that has not left bio_ended() yet. */
	synchronize_rcu_tasks();
}
