// SPDX-License-Identifier: GPL-2.0-only
/*
 * Marks of inodes whose pages must not be put even if they are clean, because cached pages may
 * differ from the disk (direct writes, swap files and the like).
 *
 * The marks belong to a mount. A mount may get several pools, one after the other, which share the
 * marks.
 *
 * The caller sets a mark before it erases the inode's index entries. Each put checks for the mark
 * under the bucket lock of the index, which erasing takes as well. So the caller erases the entry
 * of an earlier put, and a later put finds the mark. Setting a mark never waits and never fails. If
 * there is no memory for it, the mark is lost. The driver then takes no put for the mount until a
 * sweep is complete: the hooks visit all inodes of the mount and set the necessary marks again
 * (hooks/marks.c).
 *
 * One word of an XArray has the marks of 32 neighbouring inode numbers, so 10,000 files of one
 * directory take about 5 KiB.
 *
 * Out of scope: the decision when a mark may be cleared, which hooks/marks.c makes.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/slab.h>

#include "../trace.h"
#include "budget.h"

/*
 * Number of neighbouring inode numbers whose marks share one word: the largest power of two that
 * fits into the 63 bits of an XArray's value entry.
 */
#define MARKS_PER_WORD		32
/*
 * Marks of all pools may take the limit of the index in bytes, divided by this number. A mark takes
 * TMEM_NODE_BYTES for each level of the XArray if no other mark has an inode number near it. With
 * inode numbers of 32 bits, the XArray has up to five levels.
 */
#define BYPASS_DIVISOR		4
/*
 * The driver requests a sweep, which clears marks, when marks use CROWDED_NUMERATOR /
 * CROWDED_DENOMINATOR of the memory that they may use.
 */
#define CROWDED_NUMERATOR	3
#define CROWDED_DENOMINATOR	4

struct tmem_marks {
	/*
	 * marks by inode number / MARKS_PER_WORD; its lock also guards nr_nodes, nr and lost, and
	 * writers of wrong, wrong_ino and wrong_index
	 */
	struct xarray words;
	u32 nr_nodes;		/* nodes of words */
	unsigned long nr;
	unsigned long lost;	/* marks that could not be stored since the last complete sweep */
	bool all;		/* each inode counts as marked; never cleared */
	const char *wrong;	/* check that found the first wrong page, or NULL; set last */
	u64 wrong_ino;
	pgoff_t wrong_index;
	unsigned int pools;	/* pools that share the marks; guarded by tmem_pools_lock */
};

static atomic_long_t bypass_bytes;	/* bytes of all marks; part of tmem_index_used_bytes */

/*
 * Adds @bytes of memory for marks to the memory that the index uses, even above its limit. Marks
 * have priority over entries: the evictor later frees entries until the index is within its limit
 * again.
 */
static void charge_marks(long bytes)
{
	atomic_long_add(bytes, &bypass_bytes);
	atomic_long_add(bytes, &tmem_index_used_bytes);
}

static long marks_limit(void)
{
	return (tmem_index_limit() - tmem_index_table_bytes) / BYPASS_DIVISOR;
}

static unsigned long mark_bit(u64 ino)
{
	return BIT(ino % MARKS_PER_WORD);
}

static unsigned long load_word(struct tmem_marks *marks, u64 ino)
{
	void *word = xa_load(&marks->words, ino / MARKS_PER_WORD);

	return word ? xa_to_value(word) : 0;
}

/**
 * tmem_bypass_init() - set up empty marks, or share those of the pool that is replaced
 * @pool: a new file system
 * @old: the pool that it replaces, or NULL
 *
 * Context: process; one tmem_bypass_init() or tmem_bypass_free() at a time.
 *
 * Return: 0 or -ENOMEM.
 */
int tmem_bypass_init(struct tmem_pool *pool, struct tmem_pool *old)
{
	if (old) {
		pool->marks = old->marks;
	} else {
		pool->marks = kzalloc(sizeof(*pool->marks), GFP_KERNEL);
		if (!pool->marks)
			return -ENOMEM;
		xa_init(&pool->marks->words);
	}
	pool->marks->pools++;
	return 0;
}

/**
 * tmem_bypass_free() - free the marks of a pool, unless another pool shares them
 * @pool: file system that is no longer in use
 *
 * Context: process; one tmem_bypass_init() or tmem_bypass_free() at a time.
 */
void tmem_bypass_free(struct tmem_pool *pool)
{
	if (--pool->marks->pools)
		return;
	xa_destroy(&pool->marks->words);
	charge_marks(-TMEM_NODE_BYTES * pool->marks->nr_nodes);
	kfree(pool->marks);
}

/* Stores a mark and returns whether that succeeded. The lock of @marks->words is held. */
static bool store_mark(struct tmem_marks *marks, u64 ino)
{
	unsigned long word = load_word(marks, ino), i = ino / MARKS_PER_WORD;
	long bytes = tmem_nodes_missing(&marks->words, i) * TMEM_NODE_BYTES;
	u32 before = marks->nr_nodes;
	int err;

	if (word & mark_bit(ino))
		return true;
	if (atomic_long_read(&bypass_bytes) + bytes > marks_limit())
		return false;
	err = tmem_nodes_store(&marks->words, i, xa_mk_value(word | mark_bit(ino)),
			       &marks->nr_nodes);
	if (marks->nr_nodes != before)
		charge_marks((marks->nr_nodes - before) * TMEM_NODE_BYTES);
	if (err)
		return false;
	WRITE_ONCE(marks->nr, marks->nr + 1);
	return true;
}

/**
 * tmem_bypass() - take no puts for an inode from now on
 * @pool: file system
 * @ino: inode number
 *
 * The inode's entries stay. If the caller's operation changes the file, the caller erases them
 * afterwards. If the mark cannot be stored, no put is taken for the file system until
 * tmem_bypass_clear_lost().
 *
 * Context: any but NMI. Marks may push the index over its limit until the evictor, which this
 * function wakes, has run.
 *
 * Return: true if the memory for marks runs short or a mark was lost. The caller then requests a
 * sweep.
 */
bool tmem_bypass(struct tmem_pool *pool, u64 ino)
{
	struct tmem_marks *marks = pool->marks;
	unsigned long flags;
	bool crowded;

	xa_lock_irqsave(&marks->words, flags);
	if (!store_mark(marks, ino))
		WRITE_ONCE(marks->lost, marks->lost + 1);
	crowded = marks->lost || atomic_long_read(&bypass_bytes) >
				 marks_limit() / CROWDED_DENOMINATOR * CROWDED_NUMERATOR;
	xa_unlock_irqrestore(&marks->words, flags);
	tmem_index_make_room();
	return crowded;
}

/**
 * tmem_is_bypassed() - check whether pages of an inode must not be put
 * @pool: file system
 * @ino: inode number
 *
 * Context: any. A put must not miss a mark, so it calls this function under the inode's bucket
 * lock.
 *
 * Return: true if the inode is marked, if marks of the file system were lost, or if all of its
 * inodes count as marked.
 */
bool tmem_is_bypassed(struct tmem_pool *pool, u64 ino)
{
	struct tmem_marks *marks = pool->marks;

	return READ_ONCE(marks->lost) || READ_ONCE(marks->all) ||
	       (READ_ONCE(marks->nr) && load_word(marks, ino) & mark_bit(ino));
}

/**
 * tmem_is_marked() - check whether an inode has a mark of its own
 * @pool: file system
 * @ino: inode number
 *
 * Context: any. The mark may be cleared a moment later, unless the caller prevents this.
 *
 * Return: true if the mark is stored. Unlike with tmem_is_bypassed(), a lost mark does not count.
 */
bool tmem_is_marked(struct tmem_pool *pool, u64 ino)
{
	return READ_ONCE(pool->marks->nr) && load_word(pool->marks, ino) & mark_bit(ino);
}

/**
 * tmem_unbypass() - clear the mark of an inode
 * @pool: file system
 * @ino: inode number
 * @writers: number of open files that can write to the inode, or NULL if there can be none
 *
 * The mark stays if there are writers. The function reads @writers under the lock under which marks
 * are set. Each writer is counted before it sets a mark, so the mark of a running write is never
 * cleared.
 *
 * Context: any but NMI.
 */
void tmem_unbypass(struct tmem_pool *pool, u64 ino, const atomic_t *writers)
{
	struct tmem_marks *marks = pool->marks;
	unsigned long flags, word, i = ino / MARKS_PER_WORD;
	u32 before;

	if (!READ_ONCE(marks->nr))
		return;
	xa_lock_irqsave(&marks->words, flags);
	before = marks->nr_nodes;
	word = load_word(marks, ino);
	if (!(word & mark_bit(ino)) || (writers && atomic_read(writers) > 0))
		goto unlock;
	word &= ~mark_bit(ino);
	if (word) {
		/* This cannot fail: storing a value over an old one allocates no memory. */
		__xa_store(&marks->words, i, xa_mk_value(word), 0);
	} else {
		tmem_nodes_erase(&marks->words, i, &marks->nr_nodes);
		if (marks->nr_nodes != before)
			charge_marks(-TMEM_NODE_BYTES * (before - marks->nr_nodes));
	}
	WRITE_ONCE(marks->nr, marks->nr - 1);
unlock:
	xa_unlock_irqrestore(&marks->words, flags);
}

/**
 * tmem_bypass_all() - mark all inodes of a file system, until it is unmounted
 * @pool: file system
 *
 * Context: any but NMI.
 */
void tmem_bypass_all(struct tmem_pool *pool)
{
	WRITE_ONCE(pool->marks->all, true);
}

/**
 * tmem_bypass_is_all() - check whether tmem_bypass_all() was called
 * @pool: file system
 *
 * Return: true if it was called.
 */
bool tmem_bypass_is_all(const struct tmem_pool *pool)
{
	return READ_ONCE(pool->marks->all);
}

/**
 * tmem_bypass_wrong() - mark all inodes of a file system because a page of it was wrong
 * @pool: file system
 * @why: the check that found the page
 * @ino: inode number
 * @index: page number
 *
 * Context: any but NMI. The caller then requests a sweep, which empties the pool.
 */
void tmem_bypass_wrong(struct tmem_pool *pool, const char *why, u64 ino, pgoff_t index)
{
	struct tmem_marks *marks = pool->marks;
	unsigned long flags;
	bool first;

	tmem_count(TMEM_STAT_mismatches);
	trace_tmem_poison(why, ino, index);
	tmem_bypass_all(pool);
	xa_lock_irqsave(&marks->words, flags);
	first = !marks->wrong;
	if (first) {
		marks->wrong_ino = ino;
		marks->wrong_index = index;
		/* Complete the page before the check; pairs with tmem_bypass_why(). */
		smp_store_release(&marks->wrong, why);
	}
	xa_unlock_irqrestore(&marks->words, flags);
	if (!first)
		return;
	pr_crit("%s: a page was wrong (%s, inode %llu page %lu): the file system is not cached until it is mounted again; check it\n",
		pool->name, why, ino, index);
	tmem_dev_report_any();
}

/**
 * tmem_bypass_why() - return which check found the first wrong page of a file system
 * @pool: file system
 * @ino: set to the inode number of the page
 * @index: set to the number of the page
 *
 * Return: the check, or NULL if no page was wrong.
 */
const char *tmem_bypass_why(const struct tmem_pool *pool, u64 *ino, pgoff_t *index)
{
	/* Read the check before the page; pairs with tmem_bypass_wrong(). */
	const char *why = smp_load_acquire(&pool->marks->wrong);

	if (why) {
		*ino = pool->marks->wrong_ino;
		*index = pool->marks->wrong_index;
	}
	return why;
}

/**
 * tmem_bypass_lost() - return how many marks of a file system were lost
 * @pool: file system
 *
 * Return: 0, or a number that grows with each lost mark. Above 0 the file system takes no puts.
 */
unsigned long tmem_bypass_lost(const struct tmem_pool *pool)
{
	return READ_ONCE(pool->marks->lost);
}

/**
 * tmem_bypass_clear_lost() - allow puts again after a sweep has restored the lost marks
 * @pool: file system
 * @lost: value of tmem_bypass_lost() before the sweep marked the first inode again
 *
 * Before the call, the caller has set the mark of each inode again whose mark may be lost.
 *
 * Return: true if no further mark was lost meanwhile, so that puts are taken again.
 */
bool tmem_bypass_clear_lost(struct tmem_pool *pool, unsigned long lost)
{
	struct tmem_marks *marks = pool->marks;
	unsigned long flags;

	xa_lock_irqsave(&marks->words, flags);
	if (marks->lost == lost)
		WRITE_ONCE(marks->lost, 0);
	lost = marks->lost;
	xa_unlock_irqrestore(&marks->words, flags);
	return !lost;
}
