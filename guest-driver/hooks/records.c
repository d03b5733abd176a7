// SPDX-License-Identifier: GPL-2.0-only
/*
 * Records of transfers, by block, and hints, by page. blocks.h has the rules.
 *
 * Records are in a table of sets: a block can only be in one set, and the set's lock guards it. A
 * set without space drops the oldest record without a check, or else the oldest one. So the table
 * allocates nothing after it was made, and takes the same time for each block, in any context. A
 * lost record costs a put.
 *
 * A sequence number is unique in its set for 2^30 changes of the set, which is more than happen
 * during a transfer. A record gets another number when a write of its block begins or ends, and
 * when its page becomes dirty after a write.
 *
 * The hint of a page is the block of its last transfer. Hints are in a table by page frame number,
 * and move with their page. A page that was freed or used again has a wrong hint or none.
 */
#include <linux/hash.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/pagemap.h>
#include <linux/spinlock.h>

#include "../core/core.h"
#include "blocks.h"

/* With its other fields, a set fills two cache lines of 64 bytes. */
#define SET_RECORDS	7
#define SEQ_BITS	30

/*
 * State of a record. NONE: a transfer is in flight, or the block was erased. READ, WRITTEN: the
 * check is that of the last transfer, which had this direction. HELD: a get has returned bytes with
 * this check, and the next read from the disk is compared with them.
 */
enum { RECORD_NONE, RECORD_READ, RECORD_WRITTEN, RECORD_HELD };

struct record {
	u64 check;
	u32 block;			/* 0: the place is free */
	u32 seq : SEQ_BITS;
	u32 state : 32 - SEQ_BITS;
};

struct record_set {
	spinlock_t lock;		/* guards all fields; taken with interrupts off */
	u32 seq;			/* last sequence number that was given */
	u32 writes;			/* writes in flight of blocks that belong into the set */
	struct record record[SET_RECORDS];
} ____cacheline_aligned;

static struct record_set *sets;
static unsigned int set_bits;
static u32 *hints;
static unsigned long nr_hints;
/* Number of writes in flight that are counted in no set, because their ranges are long. */
static atomic_t long_writes;

static struct record_set *set_of(u32 block)
{
	return &sets[hash_32(block, set_bits)];
}

static u32 next_seq(struct record_set *set)
{
	set->seq = (set->seq + 1) & (BIT(SEQ_BITS) - 1);
	/* 0 is no sequence number. */
	return set->seq ?: ++set->seq;
}

/* Returns whether a write of a block of the set may be in flight. The caller holds the lock. */
static bool is_written(const struct record_set *set)
{
	return set->writes || atomic_read(&long_writes);
}

static struct record *find(struct record_set *set, u32 block)
{
	unsigned int i;

	for (i = 0; i < SET_RECORDS; i++)
		if (set->record[i].block == block)
			return &set->record[i];
	return NULL;
}

/* Returns the number of changes of a set since a record got its sequence number. */
static u32 age(const struct record_set *set, const struct record *record)
{
	return (set->seq - record->seq) & (BIT(SEQ_BITS) - 1);
}

/* Returns the place for a new record: a free one, the oldest without a check, or the oldest. */
static struct record *victim(struct record_set *set)
{
	struct record *record, *oldest = NULL;
	unsigned int i;

	for (i = 0; i < SET_RECORDS; i++) {
		record = &set->record[i];
		if (!record->block)
			return record;
		if (!oldest || (!record->state > !oldest->state) ||
		    (!record->state == !oldest->state && age(set, record) > age(set, oldest)))
			oldest = record;
	}
	return oldest;
}

static struct record *find_or_add(struct record_set *set, u32 block)
{
	struct record *record = find(set, block);

	if (!record) {
		record = victim(set);
		*record = (struct record){ .block = block, .seq = next_seq(set) };
	}
	return record;
}

static void erase(struct record_set *set, struct record *record)
{
	record->state = RECORD_NONE;
	record->seq = next_seq(set);
}

/*
 * Returns the hint of a page, or NULL if the page was not there when the table was made. Two pages
 * never share a hint, because tmem_record_dirty() must find the record of a page's last write.
 */
static u32 *hint_of(const struct page *page)
{
	unsigned long pfn = page_to_pfn(page);

	return pfn < nr_hints ? &hints[pfn] : NULL;
}

static bool is_dirty(struct page *page)
{
	return folio_test_dirty(page_folio(page)) && !TMEM_WITHOUT(DIRTY);
}

/**
 * tmem_record_read() - begin a read of a block
 * @block: the block
 *
 * Context: any but NMI, like all functions of this file except init and exit.
 * Return: sequence number for tmem_record_fill().
 */
u32 tmem_record_read(u32 block)
{
	struct record_set *set = set_of(block);
	unsigned long flags;
	u32 seq;

	spin_lock_irqsave(&set->lock, flags);
	seq = find_or_add(set, block)->seq;
	spin_unlock_irqrestore(&set->lock, flags);
	return seq;
}

/**
 * tmem_record_write() - begin a write of a whole block, and erase its record
 * @block: the block
 * @page: the page, which is under writeback
 *
 * Return: sequence number for tmem_record_flush(), or 0 if the page became dirty again.
 */
u32 tmem_record_write(u32 block, struct page *page)
{
	struct record_set *set = set_of(block);
	u32 seq, *hint = hint_of(page);
	struct record *record;
	unsigned long flags;

	if (hint)
		WRITE_ONCE(*hint, block);
	/* Either tmem_record_dirty() sees the hint, or this function sees the dirty flag. */
	smp_mb();
	spin_lock_irqsave(&set->lock, flags);
	set->writes++;
	record = find_or_add(set, block);
	if (!TMEM_WITHOUT(ERASE))
		erase(set, record);
	seq = record->seq;
	spin_unlock_irqrestore(&set->lock, flags);
	return !hint || is_dirty(page) ? 0 : seq;
}

/**
 * tmem_record_fill() - record a read that has ended without error
 * @block: the block
 * @seq: from tmem_record_read()
 * @page: the page that was read, which nobody else can write to
 *
 * Return: false if the host would have returned other bytes.
 */
bool tmem_record_fill(u32 block, u32 seq, const struct page *page)
{
	void *bytes = kmap_local_page((struct page *)page);
	u64 check = tmem_check64_page(&tmem_keys, bytes);
	struct record_set *set = set_of(block);
	u32 *hint = hint_of(page);
	struct record *record;
	unsigned long flags;
	bool same = true;

	kunmap_local(bytes);
	if (!hint)
		return true;
	spin_lock_irqsave(&set->lock, flags);
	record = find(set, block);
	if (!record || (record->seq != seq && !TMEM_WITHOUT(READ_SEQ))) {
		tmem_count(TMEM_STAT_blocks_raced);
	} else {
		if (record->state == RECORD_HELD) {
			same = record->check == check;
			tmem_count(same ? TMEM_STAT_blocks_gets_equal :
					  TMEM_STAT_blocks_gets_wrong);
		}
		record->check = check;
		record->state = RECORD_READ;
		WRITE_ONCE(*hint, block);
		tmem_count(TMEM_STAT_blocks_read);
	}
	spin_unlock_irqrestore(&set->lock, flags);
	return same;
}

/**
 * tmem_record_flush() - record a write that has ended without error
 * @block: the block
 * @seq: from tmem_record_write(), not 0
 * @check: check of the page before the device could read it
 * @page: the page that was written, under writeback
 */
void tmem_record_flush(u32 block, u32 seq, u64 check, struct page *page)
{
	struct record_set *set = set_of(block);
	u32 *hint = hint_of(page);
	struct record *record;
	unsigned long flags;
	bool alone;

	spin_lock_irqsave(&set->lock, flags);
	set->writes--;
	record = find(set, block);
	/* Another write from the page, to another block, takes the hint that a change needs. */
	alone = record && record->seq == seq && hint && READ_ONCE(*hint) == block;
	if (record && !TMEM_WITHOUT(ERASE))
		erase(set, record);
	if (!alone) {
		tmem_count(TMEM_STAT_blocks_raced);
	} else if (!is_dirty(page)) {
		/* The page may become dirty from here on: tmem_record_dirty() takes the lock. */
		record->check = check;
		record->state = RECORD_WRITTEN;
		tmem_count(TMEM_STAT_blocks_written);
	}
	spin_unlock_irqrestore(&set->lock, flags);
}

static void erase_block(u32 block, int writes)
{
	struct record_set *set = set_of(block);
	struct record *record;
	unsigned long flags;

	spin_lock_irqsave(&set->lock, flags);
	set->writes += writes;
	record = find(set, block);
	if (record && !TMEM_WITHOUT(ERASE))
		erase(set, record);
	spin_unlock_irqrestore(&set->lock, flags);
}

/**
 * tmem_record_long_write() - count a write whose blocks tmem_record_write_range() does not count
 * @writes: 1 when it begins, -1 when it ends
 */
void tmem_record_long_write(int writes)
{
	atomic_add(writes, &long_writes);
	/* Count before erasing; pairs with tmem_record_get(). */
	smp_mb__after_atomic();
}

/**
 * tmem_record_write_range() - begin or end a write of blocks that are not recorded, and erase them
 * @first: first block
 * @nr: number of blocks
 * @writes: 1 when it begins, -1 when it ends
 */
void tmem_record_write_range(u32 first, u32 nr, int writes)
{
	u32 block;

	for (block = first; block < first + nr; block++)
		erase_block(block, writes);
}

/**
 * tmem_record_erase() - erase the records of a range of blocks
 * @first: first block
 * @nr: number of blocks, at most U32_MAX - @first
 *
 * A range with more blocks than the table has sets is found by a walk over the table.
 */
void tmem_record_erase(u32 first, u32 nr)
{
	struct record_set *set;
	unsigned long flags;
	u32 block;
	int i;

	if (nr <= BIT(set_bits)) {
		for (block = first; block < first + nr; block++)
			erase_block(block, 0);
		return;
	}
	for (set = sets; set < sets + BIT(set_bits); set++) {
		spin_lock_irqsave(&set->lock, flags);
		for (i = 0; i < SET_RECORDS; i++)
			if (set->record[i].block - first < nr)
				erase(set, &set->record[i]);
		spin_unlock_irqrestore(&set->lock, flags);
	}
}

/**
 * tmem_record_get() - begin a get of a block
 * @block: the block
 *
 * Return: sequence number for tmem_record_got(), or 0 if a write may be in flight.
 */
u32 tmem_record_get(u32 block)
{
	struct record_set *set = set_of(block);
	unsigned long flags;
	u32 seq = 0;

	spin_lock_irqsave(&set->lock, flags);
	if (!is_written(set))
		seq = find_or_add(set, block)->seq;
	spin_unlock_irqrestore(&set->lock, flags);
	return seq;
}

/**
 * tmem_record_got() - record the bytes that a get has returned
 * @block: the block
 * @seq: from tmem_record_get()
 * @page: the page, which nobody else can write to
 * @check: its check of 64 bits
 * @verify: the disk will read the block, to compare it with these bytes
 *
 * Return: false if a write of the block may have begun since. The bytes must not be used then.
 */
bool tmem_record_got(u32 block, u32 seq, struct page *page, u64 check, bool verify)
{
	struct record_set *set = set_of(block);
	u32 *hint = hint_of(page);
	struct record *record;
	unsigned long flags;
	bool same;

	spin_lock_irqsave(&set->lock, flags);
	record = find(set, block);
	same = record && (record->seq == seq || TMEM_WITHOUT(GET_SEQ));
	if (same && hint) {
		record->check = check;
		record->state = verify ? RECORD_HELD : RECORD_READ;
		WRITE_ONCE(*hint, block);
	}
	spin_unlock_irqrestore(&set->lock, flags);
	return same;
}

/**
 * tmem_record_compare() - compare an evicted page with the record of its block
 * @evicted: the page, which nobody can write to any more
 * @put: called if the bytes are equal, with the block and @arg
 * @arg: argument of @put
 *
 * The record stays true while @put runs: a write of the block begins after it. The record is then
 * deleted, because the page leaves the page cache.
 *
 * Context: interrupts off.
 * Return: the result, which is counted, too.
 */
enum tmem_verdict tmem_record_compare(struct tmem_evicted *evicted,
				      void (*put)(u32 block, void *arg), void *arg)
{
	enum tmem_verdict verdict = TMEM_VERDICT_NONE;
	u32 *hint = hint_of(evicted->page), block = hint ? xchg(hint, 0) : 0;
	struct record_set *set;
	struct record *record;
	unsigned long flags;

	if (block && tmem_evicted_read(evicted)) {
		set = set_of(block);
		spin_lock_irqsave(&set->lock, flags);
		record = find(set, block);
		/*
		 * While a write may be in flight, the record may be older than the block. So no
		 * block has an index entry from the begin of a write to its end.
		 */
		if (record && record->state != RECORD_NONE &&
		    (!is_written(set) || TMEM_WITHOUT(IN_FLIGHT))) {
			verdict = record->check == evicted->checks.check64 ||
				  TMEM_WITHOUT(EQUAL) ? TMEM_VERDICT_EQUAL :
							TMEM_VERDICT_OTHER;
			if (verdict == TMEM_VERDICT_EQUAL) {
				put(block, arg);
				/* Leave the place to the record of a page that is still cached. */
				record->block = 0;
			}
		}
		spin_unlock_irqrestore(&set->lock, flags);
	}
	tmem_count(TMEM_STAT_blocks_puts_equal + verdict);
	return verdict;
}

/**
 * tmem_record_dirty() - void the records of the last writes of a folio that becomes dirty
 * @folio: the folio, whose dirty flag is set
 */
void tmem_record_dirty(struct folio *folio)
{
	unsigned long i, nr = folio_nr_pages(folio), flags;
	struct record_set *set;
	struct record *record;
	u32 block, *hint;

	for (i = 0; i < nr; i++) {
		hint = hint_of(folio_page(folio, i));
		block = hint ? READ_ONCE(*hint) : 0;
		if (!block)
			continue;
		set = set_of(block);
		spin_lock_irqsave(&set->lock, flags);
		record = find(set, block);
		/*
		 * NONE: the write may be in flight, and the page clean again before the write ends.
		 */
		if (record && !TMEM_WITHOUT(DIRTY) &&
		    (record->state == RECORD_WRITTEN || record->state == RECORD_NONE))
			erase(set, record);
		spin_unlock_irqrestore(&set->lock, flags);
	}
}

/**
 * tmem_record_forget() - forget which blocks belong to a folio that leaves the page cache
 * @folio: the folio
 */
void tmem_record_forget(struct folio *folio)
{
	unsigned long i, nr = folio_nr_pages(folio);
	u32 *hint;

	for (i = 0; i < nr; i++) {
		hint = hint_of(folio_page(folio, i));
		if (hint && READ_ONCE(*hint))
			WRITE_ONCE(*hint, 0);
	}
}

/**
 * tmem_record_move() - move the hints of a folio that page migration moves to other page frames
 * @to: the new folio
 * @from: the old folio, of the same size
 */
void tmem_record_move(struct folio *to, struct folio *from)
{
	unsigned long i, nr = folio_nr_pages(from);
	u32 *hint, *old, block;

	for (i = 0; i < nr; i++) {
		hint = hint_of(folio_page(to, i));
		old = hint_of(folio_page(from, i));
		block = old && READ_ONCE(*old) ? xchg(old, 0) : 0;
		if (hint)
			WRITE_ONCE(*hint, block);
	}
}

/**
 * tmem_records_init() - make the tables of records and hints
 *
 * There is space for a record of each page of RAM. The tables take 18 to 37 bytes for each page of
 * RAM, depending on how far the sizes are rounded up to a power of two, and 4 bytes for each page
 * frame number.
 *
 * Return: 0 or -ENOMEM.
 */
int tmem_records_init(void)
{
	unsigned long i;
	int node;

	for_each_online_node(node)
		nr_hints = max(nr_hints, node_end_pfn(node));
	set_bits = order_base_2(DIV_ROUND_UP(totalram_pages(), SET_RECORDS));
	sets = kvcalloc(BIT(set_bits), sizeof(*sets), GFP_KERNEL);
	hints = kvcalloc(nr_hints, sizeof(*hints), GFP_KERNEL);
	if (!sets || !hints) {
		tmem_records_exit();
		return -ENOMEM;
	}
	for (i = 0; i < BIT(set_bits); i++)
		spin_lock_init(&sets[i].lock);
	return 0;
}

/**
 * tmem_records_exit() - free the tables, when no hook uses them any more
 */
void tmem_records_exit(void)
{
	kvfree(sets);
	kvfree(hints);
	sets = NULL;
	hints = NULL;
}
