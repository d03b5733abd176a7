// SPDX-License-Identifier: GPL-2.0-only
/*
 * Records of transfers, by block, and hints, by page. blocks.h has the rules.
 *
 * Records are in a table of sets: a block can only be in one set, and the set's lock guards it. A
 * set without space drops the oldest record without a check, or else the oldest one. So the table
 * allocates nothing after it was made, and takes the same time for each block, in any context. A
 * lost record costs a put.
 *
 * The tables are in proportion to RAM. If its size changes, new and empty tables take their place.
 * Meanwhile the tables are closed: nothing is recorded, and no page is put or got. A transfer that
 * begins before and ends after that has a number of the old tables. The caller makes sure that such
 * transfers are not recorded and their bytes not used.
 *
 * A sequence number is unique in its set for 2^30 changes of the set, which is more than happen
 * during a transfer. A record gets another number when a write of its block begins or ends, and
 * when its page becomes dirty after a write.
 *
 * The hint of a page is the block of its last transfer. Hints are in a table by page frame number,
 * and move with their page. A page that was freed or used again has a wrong hint or none. A bitmap
 * has the pages that have left the page cache, and may be put when they are freed (put.c).
 */
#include <linux/bitops.h>
#include <linux/hash.h>
#include <linux/log2.h>
#include <linux/mm.h>
#include <linux/pagemap.h>
#include <linux/rcupdate.h>
#include <linux/spinlock.h>
#include <linux/vmalloc.h>

#include "../core/core.h"
#include "blocks.h"

/* With its other fields, a set fills two cache lines of 64 bytes. */
#define SET_RECORDS	7
/*
 * Number of pages of RAM for each set, at most. A set has more places than that, because pages that
 * are read in random order fill the sets unevenly.
 */
#define SET_PAGES	5
#define SEQ_BITS	30
/*
 * Tables are too large if tables of 1/2^SHRINK_BITS of their size are enough. So a balloon that
 * changes its size a little does not replace them again and again.
 */
#define SHRINK_BITS	2

/*
 * Number of long writes in flight whose ranges are known. While there are more, no page is put or
 * got. xfs has 100 discards in flight when it is trimmed.
 */
#define LONG_WRITES	128

/* Number of sets that a walk visits in one RCU section, so that it delays no grace period long. */
#define WALK_SETS	4096
/* Number of words of the bitmap of removed pages that a walk visits in one RCU section. */
#define WALK_WORDS	65536UL

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
	struct record record[SET_RECORDS];
} ____cacheline_aligned;

struct tables {
	unsigned int set_bits;
	unsigned long nr_hints;
	struct record_set *sets;
	u32 *hints;
	unsigned long *removed;		/* pages that may be put when they are freed */
};

/* Read under RCU. A task that uses a record reads in the same RCU section that they are open. */
static struct tables __rcu *tables;
static bool closed;
/*
 * Numbers of writes in flight of blocks with the same hash. A block has two counters, by different
 * hashes, and no write of it is in flight if one of them is 0. They are raised before the write
 * erases the record, and lowered after it has erased the record again. The counters stay when RAM
 * changes, because writes are in flight then. A block of which other blocks have raised both
 * counters costs a put or a get. So there are as many counters as pages of RAM: thousands of pages
 * may be in flight to a slow disk.
 */
static atomic_t *writes;
static unsigned int writes_bits;
/*
 * Writes in flight that are not counted by block, because their ranges are long: number, and ranges
 * as first block << 32 | last block, or 0. long_others are those that found no free place.
 */
static atomic_t long_writes, long_others;
static atomic64_t long_range[LONG_WRITES];

static atomic_t *writes_of(u32 block, bool second)
{
	return &writes[hash_32(second ? ror32(block, 16) : block, writes_bits)];
}

/* Counts a write that begins, before its records are erased. A full barrier. */
static void count_begin(u32 block)
{
	atomic_inc(writes_of(block, false));
	atomic_inc(writes_of(block, true));
	/*
	 * Either this task erases the record, or the task that makes it sees the counters: the
	 * tables may be replaced between the two.
	 */
	smp_mb__after_atomic();
}

/* Counts a write that has ended, after its records were erased. */
static void count_end(u32 block)
{
	smp_mb__before_atomic();	/* pairs with is_written() */
	atomic_dec(writes_of(block, false));
	atomic_dec(writes_of(block, true));
}

/* Locks the set of a block in order to erase its record, and disables interrupts. */
static struct record_set *lock_set(u32 block, unsigned long *flags)
{
	struct record_set *set;
	struct tables *t;

	rcu_read_lock();
	t = rcu_dereference(tables);
	set = &t->sets[hash_32(block, t->set_bits)];
	spin_lock_irqsave(&set->lock, *flags);
	return set;
}

static void unlock_set(struct record_set *set, unsigned long flags)
{
	spin_unlock_irqrestore(&set->lock, flags);
	rcu_read_unlock();
}

/* Locks the set of a block in order to use its record, or returns NULL if the tables are closed. */
static struct record_set *open_set(u32 block, unsigned long *flags)
{
	struct record_set *set = NULL;

	rcu_read_lock();
	if (!READ_ONCE(closed))
		set = lock_set(block, flags);
	rcu_read_unlock();	/* the set's lock has a section of its own */
	return set;
}

static u32 next_seq(struct record_set *set)
{
	set->seq = (set->seq + 1) & (BIT(SEQ_BITS) - 1);
	/* 0 is no sequence number. */
	return set->seq ?: ++set->seq;
}

static bool is_in_long_write(u32 block)
{
	unsigned int i;
	u64 range;

	if (!atomic_read(&long_writes))
		return false;
	if (atomic_read(&long_others))
		return true;
	for (i = 0; i < LONG_WRITES; i++) {
		range = atomic64_read(&long_range[i]);
		if (range && block >= range >> 32 && block <= (u32)range)
			return true;
	}
	return false;
}

/* Returns whether a write of a block may be in flight. The caller holds the lock of its set. */
static bool is_written(u32 block)
{
	return (atomic_read(writes_of(block, false)) &&
		(atomic_read(writes_of(block, true)) || TMEM_WITHOUT(SECOND_HASH))) ||
	       is_in_long_write(block);
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
 * Returns the hint of a page, or NULL if the page was not there when the tables were made. Two
 * pages never share a hint, because tmem_record_dirty() must find the record of a page's last
 * write. The caller is in an RCU read section.
 */
static u32 *hint_of(const struct page *page)
{
	const struct tables *t = rcu_dereference(tables);
	unsigned long pfn = page_to_pfn(page);

	return pfn < t->nr_hints ? &t->hints[pfn] : NULL;
}

static bool is_dirty(struct page *page)
{
	return folio_test_dirty(page_folio(page)) && !TMEM_WITHOUT(DIRTY);
}

/*
 * Begins a read of a block. Returns a number for tmem_record_fill(), or 0 if the read is not
 * recorded. Context: any but NMI, like all functions of this file except init and exit.
 */
u32 tmem_record_read(u32 block)
{
	struct record_set *set;
	unsigned long flags;
	u32 seq;

	set = open_set(block, &flags);
	if (!set)
		return 0;
	seq = find_or_add(set, block)->seq;
	unlock_set(set, flags);
	return seq;
}

/*
 * Begins a write of a whole block from a page under writeback, and erases its record. Returns a
 * number for tmem_record_flush(), or 0 if the write is not recorded, for example because the page
 * became dirty again.
 */
u32 tmem_record_write(u32 block, struct page *page)
{
	struct record_set *set;
	struct record *record;
	unsigned long flags;
	u32 seq, *hint;

	rcu_read_lock();
	hint = hint_of(page);
	if (hint)
		WRITE_ONCE(*hint, block);
	/* Either tmem_record_dirty() sees the hint, or this function sees the dirty flag. */
	count_begin(block);
	set = lock_set(block, &flags);
	record = find_or_add(set, block);
	if (!TMEM_WITHOUT(ERASE))
		erase(set, record);
	seq = record->seq;
	unlock_set(set, flags);
	rcu_read_unlock();
	return !hint || is_dirty(page) ? 0 : seq;
}

/*
 * Records a read that has ended without error, to a page that nobody else can write to. @seq is
 * from tmem_record_read(). Returns false if the host would have returned other bytes.
 */
bool tmem_record_fill(u32 block, u32 seq, const struct page *page)
{
	void *bytes = kmap_local_page((struct page *)page);
	u64 check = tmem_check64_page(&tmem_keys, bytes);
	struct record_set *set;
	struct record *record;
	unsigned long flags;
	bool same = true;
	u32 *hint;

	kunmap_local(bytes);
	rcu_read_lock();
	hint = hint_of(page);
	set = hint ? open_set(block, &flags) : NULL;
	if (!set)
		goto out;
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
	unlock_set(set, flags);
out:
	rcu_read_unlock();
	return same;
}

/*
 * Records a write that has ended without error, from a page under writeback. @seq is from
 * tmem_record_write(), and not 0. @check is the check of the page before the device could read it.
 */
void tmem_record_flush(u32 block, u32 seq, u64 check, struct page *page)
{
	struct record_set *set;
	struct record *record;
	unsigned long flags;
	bool alone;
	u32 *hint;

	rcu_read_lock();
	hint = hint_of(page);
	set = lock_set(block, &flags);
	record = find(set, block);
	/* Another write from the page, to another block, takes the hint that a change needs. */
	alone = !READ_ONCE(closed) && record &&
		(record->seq == seq || TMEM_WITHOUT(WRITE_SEQ)) && hint &&
		(READ_ONCE(*hint) == block || TMEM_WITHOUT(LATEST));
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
	unlock_set(set, flags);
	rcu_read_unlock();
	count_end(block);
}

static void erase_block(u32 block)
{
	struct record_set *set;
	struct record *record;
	unsigned long flags;

	set = lock_set(block, &flags);
	record = find(set, block);
	if (record && !TMEM_WITHOUT(ERASE))
		erase(set, record);
	unlock_set(set, flags);
}

/*
 * Begins a write of blocks that tmem_record_write_range() does not count. @last is not 0. Returns a
 * number for tmem_record_long_end().
 */
unsigned int tmem_record_long_write(u32 first, u32 last)
{
	u64 range = (u64)first << 32 | last;
	unsigned int i;

	for (i = 0; i < LONG_WRITES; i++)
		if (!atomic64_read(&long_range[i]) &&
		    !atomic64_cmpxchg(&long_range[i], 0, range))
			break;
	if (i == LONG_WRITES)
		atomic_inc(&long_others);
	atomic_inc(&long_writes);
	/* Count before erasing; pairs with is_written(). */
	smp_mb__after_atomic();
	return i;
}

/* Ends a long write, after its blocks were erased. */
void tmem_record_long_end(unsigned int nr)
{
	smp_mb__before_atomic();	/* pairs with is_written() */
	if (nr == LONG_WRITES)
		atomic_dec(&long_others);
	else
		atomic64_set_release(&long_range[nr], 0);
	atomic_dec(&long_writes);
}

/* Begins or ends a write of blocks that are not recorded, and erases them. */
void tmem_record_write_range(u32 first, u32 nr, bool begins)
{
	u32 block;

	for (block = first; block < first + nr; block++) {
		if (begins)
			count_begin(block);
		erase_block(block);
		if (!begins)
			count_end(block);
	}
}

/* Erases the records of a range of blocks in WALK_SETS sets, from number @i on. */
static void erase_in_sets(unsigned long i, u32 first, u32 nr)
{
	unsigned long flags, end;
	struct record_set *set;
	struct tables *t;
	int j;

	rcu_read_lock();
	t = rcu_dereference(tables);
	end = min_t(unsigned long, i + WALK_SETS, BIT(t->set_bits));
	for (; i < end; i++) {
		set = &t->sets[i];
		spin_lock_irqsave(&set->lock, flags);
		for (j = 0; j < SET_RECORDS; j++)
			if (set->record[j].block - first < nr)
				erase(set, &set->record[j]);
		spin_unlock_irqrestore(&set->lock, flags);
	}
	rcu_read_unlock();
}

/*
 * Erases the records of a range of at most U32_MAX - @first blocks. A range with more blocks than
 * the table has sets is found by a walk over the table.
 */
void tmem_record_erase(u32 first, u32 nr)
{
	unsigned long nr_sets, i;
	u32 block;

	rcu_read_lock();
	nr_sets = BIT(rcu_dereference(tables)->set_bits);
	rcu_read_unlock();
	if (nr <= nr_sets)
		for (block = first; block < first + nr; block++)
			erase_block(block);
	else
		/* Tables that replace these have no record of before, and may be left out. */
		for (i = 0; i < nr_sets; i += WALK_SETS)
			erase_in_sets(i, first, nr);
}

/*
 * Begins a get of a block. Returns a number for tmem_record_got(), or 0 if there must be no get,
 * for example because a write may be in flight.
 */
u32 tmem_record_get(u32 block)
{
	struct record_set *set;
	unsigned long flags;
	u32 seq = 0;

	set = open_set(block, &flags);
	if (!set)
		return 0;
	if (!is_written(block) || TMEM_WITHOUT(GET_WRITTEN))
		seq = find_or_add(set, block)->seq;
	unlock_set(set, flags);
	return seq;
}

/*
 * Records the bytes that a get has returned, in a page that nobody else can write to. @seq is from
 * tmem_record_get(). @verify: the disk will read the block, to compare it with these bytes.
 *
 * Returns false if a write of the block may have begun since. The bytes must not be used then.
 */
bool tmem_record_got(u32 block, u32 seq, struct page *page, u64 check, bool verify)
{
	struct record_set *set;
	struct record *record;
	unsigned long flags;
	bool same = false;
	u32 *hint;

	rcu_read_lock();
	hint = hint_of(page);
	set = open_set(block, &flags);
	if (!set)
		goto out;
	record = find(set, block);
	same = record && (record->seq == seq || TMEM_WITHOUT(GET_SEQ));
	if (same && hint) {
		record->check = check;
		record->state = verify ? RECORD_HELD : RECORD_READ;
		WRITE_ONCE(*hint, block);
	}
	unlock_set(set, flags);
out:
	rcu_read_unlock();
	return same;
}

/*
 * Compares an evicted page, which tmem_evicted_read() has read, with the record of a block. If the
 * bytes are equal, calls @put. The record stays true while @put runs: a write of the block begins
 * after it. The record is then deleted, because the page has left the page cache.
 *
 * Returns whether they are equal, and counts the result.
 */
bool tmem_record_compare(u32 block, const struct tmem_evicted *evicted,
			 void (*put)(u32 block, void *arg), void *arg)
{
	enum tmem_stat result = TMEM_STAT_blocks_puts_none;
	struct record_set *set;
	struct record *record;
	unsigned long flags;

	set = open_set(block, &flags);
	if (!set)
		goto out;
	record = find(set, block);
	/*
	 * While a write may be in flight, the record may be older than the block. So no block has
	 * an index entry from the begin of a write to its end.
	 */
	if (record && record->state != RECORD_NONE &&
	    (!is_written(block) || TMEM_WITHOUT(IN_FLIGHT))) {
		result = record->check == evicted->checks.check64 || TMEM_WITHOUT(EQUAL) ?
			 TMEM_STAT_blocks_puts_equal : TMEM_STAT_blocks_puts_other;
		if (result == TMEM_STAT_blocks_puts_equal) {
			put(block, arg);
			/* Leave the place to the record of a page that is still cached. */
			record->block = 0;
		}
	}
	unlock_set(set, flags);
out:
	tmem_count(result);
	return result == TMEM_STAT_blocks_puts_equal;
}

/* Voids the records of the last writes of a folio whose dirty flag was just set. */
void tmem_record_dirty(struct folio *folio)
{
	unsigned long i, nr = folio_nr_pages(folio), flags;
	struct record_set *set;
	struct record *record;
	u32 block, *hint;

	rcu_read_lock();
	for (i = 0; i < nr; i++) {
		hint = hint_of(folio_page(folio, i));
		block = hint ? READ_ONCE(*hint) : 0;
		if (!block)
			continue;
		set = lock_set(block, &flags);
		record = find(set, block);
		/*
		 * NONE: the write may be in flight, and the page clean again before the write ends.
		 */
		if (record && !TMEM_WITHOUT(DIRTY) &&
		    (record->state == RECORD_WRITTEN || record->state == RECORD_NONE))
			erase(set, record);
		unlock_set(set, flags);
	}
	rcu_read_unlock();
}

/*
 * Marks a page of a swap area that was recorded just now, so that it may be put when it is freed.
 * Such a page leaves no page cache before.
 */
void tmem_record_mark(struct page *page)
{
	unsigned long pfn = page_to_pfn(page);
	const struct tables *t;

	rcu_read_lock();
	t = rcu_dereference(tables);
	if (pfn < t->nr_hints)
		tmem_set_bits(t->removed, pfn, 1);
	rcu_read_unlock();
}

/*
 * Notes that a folio leaves the page cache. @may_put: its pages may be put when they are freed;
 * otherwise they lose their hints. Returns the number of pages that had a hint.
 */
unsigned long tmem_record_leave(struct folio *folio, bool may_put)
{
	unsigned long i, pfn = folio_pfn(folio), nr = folio_nr_pages(folio), hints = 0;
	const struct tables *t;

	rcu_read_lock();
	t = rcu_dereference(tables);
	/* Folios that were plugged after the tables were made have no hints. */
	if (pfn + nr > t->nr_hints)
		goto out;
	for (i = pfn; i < pfn + nr; i++) {
		if (!READ_ONCE(t->hints[i]))
			continue;
		hints++;
		if (!may_put)
			WRITE_ONCE(t->hints[i], 0);
	}
	if (may_put && hints)
		tmem_set_bits(t->removed, pfn, nr);
out:
	rcu_read_unlock();
	return hints;
}

/* Returns whether a page that is being freed may be put. */
bool tmem_record_may_put(const struct page *page)
{
	unsigned long pfn = page_to_pfn(page);
	const struct tables *t;
	bool may_put;

	rcu_read_lock();
	t = rcu_dereference(tables);
	may_put = pfn < t->nr_hints && test_bit(pfn, t->removed) && READ_ONCE(t->hints[pfn]);
	rcu_read_unlock();
	return may_put;
}

/*
 * Returns the block of the hint of a page that is being freed, or 0 if the page may not be put. The
 * page loses its hint. The caller holds the RCU read lock until it has put the page.
 */
u32 tmem_record_free(const struct page *page)
{
	const struct tables *t = rcu_dereference(tables);
	unsigned long pfn = page_to_pfn(page);
	u32 block;

	if (pfn >= t->nr_hints || !test_and_clear_bit(pfn, t->removed))
		return 0;
	block = READ_ONCE(t->hints[pfn]);
	WRITE_ONCE(t->hints[pfn], 0);
	return block;
}

/*
 * Puts no page that has left the page cache so far. The caller has made sure that further pages of
 * a file are not marked. A page may have a mark of an earlier life in a swap area; then its removal
 * from the page cache has deleted its hint, which a put needs, too. When the function returns, puts
 * that had begun have ended. Sleeps.
 */
void tmem_record_forbid(void)
{
	unsigned long i = 0, end, words;
	const struct tables *t;

	/* Wait for tmem_record_leave(). */
	synchronize_rcu_expedited();
	TMEM_HOLD(forbid);
	/* Tables that replace these meanwhile have no mark of before. */
	do {
		rcu_read_lock();
		t = rcu_dereference(tables);
		words = BITS_TO_LONGS(t->nr_hints);
		for (end = min(i + WALK_WORDS, words); i < end; i++)
			WRITE_ONCE(t->removed[i], 0);
		rcu_read_unlock();
		cond_resched();
	} while (end < words);
	/* Wait for puts that have taken a mark before. */
	if (!TMEM_WITHOUT(GRACE))
		synchronize_rcu_expedited();
}

/*
 * Moves the hints of a folio that page migration moves to another folio of the same size, and the
 * marks of pages of a swap area.
 */
void tmem_record_move(struct folio *to, struct folio *from)
{
	unsigned long pfn = folio_pfn(from), end = pfn + folio_nr_pages(from), new = folio_pfn(to);
	/* Marks of files stay behind, because tmem_record_forbid() may be clearing them. */
	bool marked = folio_test_swapbacked(from);
	const struct tables *t;
	u32 block;

	rcu_read_lock();
	t = rcu_dereference(tables);
	for (; pfn < end; pfn++, new++) {
		block = pfn < t->nr_hints && READ_ONCE(t->hints[pfn]) ? xchg(&t->hints[pfn], 0) : 0;
		if (new >= t->nr_hints)
			continue;
		WRITE_ONCE(t->hints[new], block);
		if (marked && block && test_and_clear_bit(pfn, t->removed))
			tmem_set_bits(t->removed, new, 1);
	}
	rcu_read_unlock();
}

static void tables_free(struct tables *t)
{
	if (!t)
		return;
	vfree(t->sets);
	vfree(t->hints);
	vfree(t->removed);
	kfree(t);
}

static unsigned long ram_pages(void)
{
	return tmem_counted_ram_bytes() / PAGE_SIZE;
}

/* Returns the sizes of the tables for the present RAM: space for more records than pages. */
static struct tables sizes(void)
{
	struct tables t = { .set_bits = order_base_2(DIV_ROUND_UP(ram_pages(), SET_PAGES)) };
	int node;

	for_each_online_node(node)
		t.nr_hints = max(t.nr_hints, node_end_pfn(node));
	return t;
}

/* Allocates zeroed memory, without OOM killer, because a guest can do without new tables. */
static void *table_alloc(size_t nr, size_t bytes)
{
	return __vmalloc(array_size(nr, bytes),
			 GFP_KERNEL | __GFP_ZERO | __GFP_RETRY_MAYFAIL | __GFP_NOWARN);
}

/* Returns new tables, or NULL. */
static struct tables *tables_new(void)
{
	struct tables *t = kzalloc(sizeof(*t), GFP_KERNEL);
	unsigned long i;

	if (!t)
		return NULL;
	*t = sizes();
	t->sets = table_alloc(BIT(t->set_bits), sizeof(*t->sets));
	t->hints = table_alloc(t->nr_hints, sizeof(*t->hints));
	t->removed = table_alloc(BITS_TO_LONGS(t->nr_hints), sizeof(*t->removed));
	if (!t->sets || !t->hints || !t->removed) {
		tables_free(t);
		return NULL;
	}
	for (i = 0; i < BIT(t->set_bits); i++)
		spin_lock_init(&t->sets[i].lock);
	return t;
}

/*
 * Replaces the tables if RAM has another size. All records are lost: pages that are in the page
 * cache now are put only after another transfer. So RAM must have had the same size at the last
 * call. Without memory the old tables stay.
 *
 * @renew makes sure that transfers that began before are not recorded, and their bytes not used.
 * Sleeps. One call at a time, and none with init or exit.
 */
void tmem_records_fit_ram(void (*renew)(void))
{
	static unsigned int last_set_bits;
	static unsigned long last_nr_hints;
	struct tables *old = rcu_dereference_protected(tables, true), *new;
	struct tables want = sizes();
	bool same = want.set_bits == last_set_bits && want.nr_hints == last_nr_hints;

	last_set_bits = want.set_bits;
	last_nr_hints = want.nr_hints;
	/* Memory that is unplugged keeps its hints. */
	if (want.nr_hints <= old->nr_hints && want.set_bits <= old->set_bits &&
	    want.set_bits + SHRINK_BITS > old->set_bits && !tmem_test_replace())
		return;
	/* RAM may grow in many steps. */
	if (!same)
		return;
	new = tables_new();
	if (!new)
		return;
	TMEM_TEST_COUNT(replaced);
	WRITE_ONCE(closed, true);
	/*
	 * Until all puts have ended that found a record, writes have to find it, too, and erase it
	 * before they erase the index entry.
	 */
	synchronize_rcu();
	rcu_assign_pointer(tables, new);
	synchronize_rcu();	/* no number of the old tables is given any more */
	tables_free(old);
	renew();
	synchronize_rcu();	/* nobody relies on an epoch from before any more */
	smp_store_release(&closed, false);
	TMEM_TEST_COUNT(replaced);
}

/*
 * Makes the tables of records and hints. Returns 0 or -ENOMEM.
 *
 * The tables take 26 to 51 bytes for each page of RAM, depending on how far the sizes are rounded
 * up to a power of two, and 33 bits for each page frame number. The counters of writes take 4 to 8
 * bytes for each page of RAM.
 */
int tmem_records_init(void)
{
	writes_bits = min(order_base_2(ram_pages()), 32);
	writes = table_alloc(BIT(writes_bits), sizeof(*writes));
	rcu_assign_pointer(tables, tables_new());
	if (writes && rcu_access_pointer(tables))
		return 0;
	tmem_records_exit();
	return -ENOMEM;
}

/* Frees the tables, when no hook uses them any more. */
void tmem_records_exit(void)
{
	tables_free(rcu_dereference_protected(tables, true));
	RCU_INIT_POINTER(tables, NULL);
	vfree(writes);
	writes = NULL;
}
