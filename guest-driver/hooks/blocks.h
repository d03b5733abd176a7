/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Coherence by disk block: which bytes the disk has, seen from the bios of a served disk.
 *
 * A record says that the last transfer between a page and a block of 4 KiB carried bytes with a
 * certain check of 64 bits. A page that reclaim evicts may be put only if its bytes have the check
 * in the record of its block. Five rules keep a record true:
 * - Erase. A write erases the records of all blocks that it touches, also in part: before the
 *   device sees it, and again when it ends. All operations but READ and an empty FLUSH are writes.
 *   The erasure itself counts as a write in flight.
 * - Record. A record is made only after a transfer without error, and only if no other write of the
 *   block began or ended meanwhile. Each record has a sequence number for this. While a write of
 *   the block is in flight, the record is not used.
 * - Put. A wrong hint (which block belongs to a page) leads to another check, and so to no put.
 * - Start. The driver records nothing of an area until all transfers have ended that it did not see
 *   begin. A write that it did not see begin starts the area again. Transfers of a slot of a swap
 *   area do not overlap. So on a stacked disk the area needs no such start (fs_new()).
 * - Dirty. A page that becomes dirty voids the record of its last write: it may have changed while
 *   the device read it.
 *
 * An area is the range of a disk on which a served file system lies. The blocks of a swap area are
 * its slots, wherever the kernel stores them. The kernel writes each slot before it reads it, and
 * its transfers do not overlap. So only writes of the slot count, and erase at their begin. If the
 * slot is in a swap file, they also erase the block of the file system, at begin and end. In
 * between, a read of the file may get bytes of before. Blocks of areas are numbered from 1, without
 * gaps between the blocks of one area.
 *
 * Limits: records and hints take memory in proportion to RAM (tmem_records_init()). A record that
 * finds no space displaces another one, and a page without a record is not put.
 */
#ifndef _TMEM_BLOCKS_H
#define _TMEM_BLOCKS_H

#include <linux/atomic.h>
#include <linux/bits.h>
#include <linux/blk_types.h>
#include <linux/types.h>

#include "hooks.h"

#define TMEM_BLOCK_SHIFT	12
#define TMEM_BLOCK_SECTORS	(1 << (TMEM_BLOCK_SHIFT - SECTOR_SHIFT))

/* Sets bits of a bitmap. Other bits of the same words may change meanwhile. */
static inline void tmem_set_bits(unsigned long *map, unsigned long first, unsigned long nr)
{
	unsigned long end = first + nr, bits;

	for (; first < end; first += bits) {
		bits = min(end - first, BITS_PER_LONG - first % BITS_PER_LONG);
		atomic_long_or(GENMASK(bits - 1, 0) << first % BITS_PER_LONG,
			       (atomic_long_t *)&map[BIT_WORD(first)]);
	}
}

/* --- records.c ----------------------------------------------------------------------------- */

int tmem_records_init(void);
void tmem_records_exit(void);
u32 tmem_record_read(u32 block);
u32 tmem_record_write(u32 block, struct page *page);
bool tmem_record_fill(u32 block, u32 seq, const struct page *page);
void tmem_record_flush(u32 block, u32 seq, u64 check, struct page *page);
void tmem_record_erase(u32 first, u32 nr);
void tmem_record_write_range(u32 first, u32 nr, bool begins);
unsigned int tmem_record_long_write(u32 first, u32 last);
void tmem_record_long_end(unsigned int nr);
u32 tmem_record_get(u32 block);
bool tmem_record_got(u32 block, u32 seq, struct page *page, u64 check, bool verify);
bool tmem_record_compare(u32 block, const struct tmem_evicted *evicted,
			 void (*put)(u32 block, void *arg), void *arg);
void tmem_record_dirty(struct folio *folio);
unsigned long tmem_record_leave(struct folio *folio, bool may_put);
bool tmem_record_may_put(const struct page *page);
u32 tmem_record_free(const struct page *page);
void tmem_record_forbid(void);
void tmem_record_move(struct folio *to, struct folio *from);
void tmem_record_mark(struct page *page);
void tmem_records_fit_ram(void (*renew)(void));

/* --- areas.c ------------------------------------------------------------------------------- */

/* The blocks of a served file system on a disk, or the slots of a swap area. Read under RCU. */
struct tmem_area {
	const struct super_block *sb;	/* only compared; or a tmem_swap_sb() */
	const struct gendisk *disk;
	sector_t start;			/* first sector, on the whole disk; or tmem_swap_start() */
	u32 first;			/* number of the first block */
	u32 nr;				/* number of whole blocks */
	/*
	 * Number of the interval in which all transfers are seen, or 0 outside of one. It is never
	 * reused.
	 */
	u32 epoch;
	u32 served;			/* epoch from whose drain on blocks may be got */
	unsigned long retry;		/* jiffies before which no drain begins; by drain_lock */
	bool drained;			/* the disk can be drained of transfers */
	bool busy;			/* the disk is being drained; guarded by areas_lock */
	bool failed;			/* a write has failed */
	struct rcu_head rcu;
};

/* Returns whether blocks of an area, which may be NULL, are recorded and got. */
static inline bool tmem_area_works(const struct tmem_area *area)
{
	u32 epoch = area ? READ_ONCE(area->epoch) : 0;

	return epoch && (READ_ONCE(area->served) == epoch || TMEM_WITHOUT(SERVED));
}

const struct tmem_area *tmem_area_find(const struct gendisk *disk, sector_t sector, sector_t nr);
const struct tmem_area *tmem_area_of(u32 block);
bool tmem_area_serves(const struct gendisk *disk);
u32 tmem_area_epoch(const struct gendisk *disk, sector_t start);
void tmem_area_forget(const struct super_block *sb, u32 first, u32 nr, bool may_sleep,
		      enum tmem_inval why);
bool tmem_area_erase(const struct gendisk *disk, sector_t sector, sector_t nr, bool may_sleep);
void tmem_area_unseen(const struct gendisk *disk, sector_t sector, sector_t nr);
void tmem_area_failed(const struct gendisk *disk, sector_t sector, sector_t nr);
struct tmem_area *tmem_area_new(const struct super_block *sb, struct block_device *bdev,
				sector_t start, u64 nr, bool from_start, const char **why);
void tmem_area_free(struct tmem_area *area);
int tmem_areas_init(void);
void tmem_areas_exit(void);

/* --- fill.c -------------------------------------------------------------------------------- */

/* Maximum number of blocks that are looked up in the index at a time. */
#define TMEM_RUN_PAGES 64

/*
 * Returns whether the reader must not sleep, as with RWF_NOWAIT or in io_uring's first attempt. The
 * flags of its request do not reach the bio, but since 6.12 the page cache sets PF_MEMALLOC_NOIO
 * for such a reader during readahead. Kernel threads that always have this flag, such as the thread
 * of a loop device, do not count: they wait for the disk as well.
 */
static inline bool tmem_must_not_wait(void)
{
	return (current->flags & (PF_MEMALLOC_NOIO | PF_KTHREAD)) == PF_MEMALLOC_NOIO;
}

bool tmem_is_filled(struct page *page, const struct super_block *sb);
bool tmem_is_flushed(struct page *page, const struct super_block *sb);
bool tmem_is_block(const struct bio_vec *bv, u64 place);
bool tmem_is_awaited(struct bio *bio);
void tmem_note_page(struct page *page);

/* Result of tmem_fill(): what is filled of a bio. */
enum tmem_filled {
	TMEM_FILLED_NOTHING,	/* the disk has to read what is left of the bio */
	TMEM_FILLED_PART,	/* tmem_fill() may be called for the rest, with the same deadline */
	TMEM_FILLED_ALL,	/* the bio has ended */
	TMEM_FILLED_LATER,	/* the bio will end, or will be submitted again */
};

/* Instead of a deadline: the deadline begins now. */
#define TMEM_FILL_FIRST	U64_MAX

typedef void tmem_submit_t(struct bio *bio, u64 deadline_ns);

enum tmem_filled tmem_fill(struct bio *bio, const struct tmem_area *area, sector_t sector,
			   u64 deadline_ns, bool awaited, tmem_submit_t *submit);
int tmem_fill_init(void);
void tmem_fill_wait(void);
void tmem_fill_exit(void);

/* --- slots.c ------------------------------------------------------------------------------- */

extern bool tmem_swap_allowed;		/* true while swap areas may be served */
extern bool tmem_swap_on;		/* true while freed slots are seen */

/* Returns what stands for the super block of a swap area, by the kernel's number of the area. */
static inline const struct super_block *tmem_swap_sb(unsigned int type)
{
	return (const struct super_block *)(type * 2UL + 1);
}

/* Returns whether something stands for a swap area, and is no address of a super block. */
static inline bool tmem_is_swap(const struct super_block *sb)
{
	return (unsigned long)sb & 1;
}

/* Returns the kernel's number of the swap area that something stands for. */
static inline unsigned int tmem_swap_type_of(const struct super_block *sb)
{
	return (unsigned long)sb / 2;
}

/*
 * Returns the first sector of a swap area. Areas count slots by sectors that no disk has: an area
 * has fewer than 2^40, and the range of bio.c that covers any disk has these sectors, too.
 */
static inline sector_t tmem_swap_start(unsigned int type)
{
	return BIT_ULL(55) + ((sector_t)type << 40);
}

bool tmem_swap_wanted(void);
bool tmem_swap_unwanted(void);
bool tmem_swap_has(struct folio *folio, const struct super_block *sb);
unsigned long tmem_swap_slots(const struct super_block *sb);
sector_t tmem_swap_sector(struct page *page, const struct block_device *bdev);
bool tmem_swap_is_freed(const struct super_block *sb, u32 block);
bool tmem_swap_reuse(const struct super_block *sb, u32 block);
void tmem_swap_note(struct bio *bio);

/* --- bio.c --------------------------------------------------------------------------------- */

bool tmem_bio_begin(struct bio *bio);
void tmem_bio_init(void);
void tmem_bio_wait(void);
void tmem_probe_bio_queue(void *data, struct bio *bio);
void tmem_probe_rq_issue(void *data, struct request *rq);

#endif /* _TMEM_BLOCKS_H */
