/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Places in the driver at which tests intervene. They are empty unless the module was built with
 * TEST=1; the parameters behind them are in testing/.
 */
#ifndef _TMEM_TESTING_H
#define _TMEM_TESTING_H

#include <linux/types.h>

#ifdef TMEM_TEST

#include <linux/atomic.h>
#include <linux/bits.h>
#include <linux/bug.h>
#include <linux/compiler.h>
#include <linux/jiffies.h>
#include <linux/minmax.h>

/* TMEM_INJECT(what) - return whether the fault of the parameter inject_<what> occurs now */
#define TMEM_INJECT(what) \
	({ static atomic_t calls; tmem_inject(&calls, READ_ONCE(tmem_inject_##what)); })
extern unsigned int tmem_inject_ring_full;
extern unsigned int tmem_inject_nomem;
extern unsigned int tmem_inject_nomem_device;
extern unsigned int tmem_inject_nomem_states;
extern unsigned int tmem_inject_nomem_write;
extern unsigned int tmem_inject_more_queues;
extern unsigned int tmem_inject_memory_error;
extern unsigned int tmem_inject_corrupt;
extern unsigned int tmem_inject_retained_changed;
extern unsigned int tmem_inject_erased_late;
extern unsigned int tmem_inject_config_deaf;
extern unsigned int tmem_inject_vq_full;
bool tmem_inject(atomic_t *calls, unsigned int every);

/*
 * TMEM_HOLD(place) - stop the calling task if a test requests it
 *
 * The test sets the parameter test_hold_<place> to WANTED. The parameter reads as HELD when a task
 * waits, and the test sets it back to NO to release the task.
 */
#define TMEM_HOLD(place)	tmem_hold(&tmem_hold_##place)
/* TMEM_HOLD_CLOCK(place, deadline_ns) - like TMEM_HOLD(); returns the deadline plus the wait */
#define TMEM_HOLD_CLOCK(place, deadline_ns) tmem_hold_and_extend(&tmem_hold_##place, deadline_ns)
/* TMEM_HOLD_ATOMIC(place) - like TMEM_HOLD(), for a task that must not sleep; busy-waits */
#define TMEM_HOLD_ATOMIC(place)	tmem_hold_atomic(&tmem_hold_##place)
enum tmem_hold { TMEM_HOLD_NO, TMEM_HOLD_WANTED, TMEM_HOLD_HELD };
extern unsigned int tmem_hold_feeder, tmem_hold_probe, tmem_hold_fetch;
extern unsigned int tmem_hold_submit, tmem_hold_fill, tmem_hold_free;
extern unsigned int tmem_hold_drain, tmem_hold_put, tmem_hold_selftest, tmem_hold_write;
extern unsigned int tmem_hold_choice, tmem_hold_forbid;
void tmem_hold(unsigned int *place);
void tmem_hold_atomic(unsigned int *place);
u64 tmem_hold_and_extend(unsigned int *place, u64 deadline_ns);

extern unsigned long tmem_test_index_bytes;
/* Returns the limit of the index in bytes, which a test may lower. */
static inline long tmem_test_limit(long bytes)
{
	long test_bytes = READ_ONCE(tmem_test_index_bytes);

	return test_bytes ? min(bytes, test_bytes) : bytes;
}

/* Reports a condition that must be true, and that only a fault of the driver makes false. */
#define TMEM_TEST_CHECK(condition)	WARN_ON(!(condition))

/* TMEM_TEST_COUNT(what) - add one to the parameter test_<what>; calls are not concurrent */
#define TMEM_TEST_COUNT(what)	WRITE_ONCE(tmem_test_##what, tmem_test_##what + 1)
extern unsigned int tmem_test_sweeps, tmem_test_replaced;

/* Returns the time between two retries: a tenth of @seconds, so that tests need not wait long. */
static inline unsigned int tmem_retry_seconds(unsigned int seconds)
{
	return seconds / 10;
}

extern unsigned long tmem_test_cookies;
/*
 * Returns the first sequence number of a queue, whose last number is @max. A test can set
 * tmem_test_cookies, so that a queue has only this many numbers.
 */
static inline u64 tmem_test_first_seq(u64 max)
{
	return tmem_test_cookies ? max - tmem_test_cookies : 0;
}

extern unsigned long tmem_test_hooks_off;
/*
 * Returns whether a test has switched a hook (enum tmem_hook) off, to show what fails without the
 * hook.
 */
static inline bool tmem_hook_off(unsigned int hook)
{
	return READ_ONCE(tmem_test_hooks_off) & BIT(hook);
}

extern unsigned long tmem_test_selftest_blind;
/* Returns whether the self-test ignores a hook's calls, as if the kernel did not make them. */
static inline bool tmem_selftest_blind(unsigned int hook)
{
	return READ_ONCE(tmem_test_selftest_blind) & BIT(hook);
}

extern char *tmem_test_release;
/* Returns the kernel's point release @name, in whose place a test may put another text. */
static inline const char *tmem_test_point_release(const char *name)
{
	return tmem_test_release ?: name;
}

/*
 * Safety checks of hooks/blocks.h, and of the pages of swap areas. A test can remove each of them.
 * Each comment says what the check does, and which fault occurs without the check.
 */
enum tmem_block_check {
	/* A write erases the records of its blocks. Without: a page older than the write is put. */
	TMEM_CHECK_ERASE,
	/* A write erases its index entries. Without: a get returns bytes from before the write. */
	TMEM_CHECK_FORGET,
	/* A put needs the bytes of the record. Without: a page unlike its block is put. */
	TMEM_CHECK_EQUAL,
	/* No put during a write of the block. Without: the bytes from before the write are put. */
	TMEM_CHECK_IN_FLIGHT,
	/* A read that overlaps a write makes no record. Without: a page with old bytes is put. */
	TMEM_CHECK_READ_SEQ,
	/* A get that overlaps a write is no hit. Without: the reader gets old bytes. */
	TMEM_CHECK_GET_SEQ,
	/*
	 * A failed write stops recording. Without: a get returns bytes that the disk has replaced.
	 */
	TMEM_CHECK_FAILED,
	/* A user's command ends the interval. Without: a get returns bytes that it replaced. */
	TMEM_CHECK_PASSTHROUGH,
	/* A write beside submit_bio() ends the interval. Without: a get returns old bytes. */
	TMEM_CHECK_BIO_QUEUE,
	/* An area starts with a drain. Without: a write from before it makes a stored page old. */
	TMEM_CHECK_DRAIN,
	/*
	 * A segment's place is counted in bytes. Without: a write erases other blocks than its own.
	 */
	TMEM_CHECK_BYTES,
	/*
	 * Only whole blocks are recorded and got. Without: a page is put that spans two blocks, and
	 * a write of the second one leaves the page in the pool.
	 */
	TMEM_CHECK_WHOLE,
	/* A disk with writes that are no bios has no area. Without: a get returns old bytes. */
	TMEM_CHECK_VISIBLE,
	/* A folio that may not be put loses its hints. Without: its pages are put when freed. */
	TMEM_CHECK_LEAVE,
	/* A policy holds for pages that were removed and not freed. Without: they are put. */
	TMEM_CHECK_POLICY,
	/*
	 * A page that becomes dirty voids its record. Without: a page is put that changed while the
	 * disk read or wrote its block.
	 */
	TMEM_CHECK_DIRTY,
	/*
	 * A guest that continues after a hibernation erases its records. Without: the driver did
	 * not see the writes of the image, and puts a page from before them.
	 */
	TMEM_CHECK_RESUME,
	/*
	 * Tables that replace others begin an interval of each area. Without: a get takes a record
	 * of the new tables for its own, and returns old bytes.
	 */
	TMEM_CHECK_RENEW,
	/*
	 * A block is in flight only if both its counters say so. Without: many puts are refused
	 * because of writes of other blocks.
	 */
	TMEM_CHECK_SECOND_HASH,
	/*
	 * Only the later of two writes of a page is recorded. Without: the page changes, and the
	 * record of the earlier write stays.
	 */
	TMEM_CHECK_LATEST,
	/*
	 * A write that outlives its area erases again at its end. Without: after the next mount, a
	 * get returns bytes from before the write.
	 */
	TMEM_CHECK_FORMER,
	/*
	 * Block numbers are used again without records. Without: a page of the former file system
	 * is put as a page of the new one.
	 */
	TMEM_CHECK_NUMBERS,
	/* A get is no hit if its area was drained meanwhile. Without: it returns old bytes. */
	TMEM_CHECK_FILL_EPOCH,
	/*
	 * A policy waits for puts that missed it. Without: a page is put after the policy was set.
	 */
	TMEM_CHECK_GRACE,
	/*
	 * A write that overlaps another one makes no record. Without: the record has the bytes of
	 * one write, and the disk may have those of the other.
	 */
	TMEM_CHECK_WRITE_SEQ,
	/* No get during a write of the block. Without: the reader gets bytes from before it. */
	TMEM_CHECK_GET_WRITTEN,
	/*
	 * No get of an area before its drain has ended. Without: a get returns bytes from before a
	 * write that the driver did not see begin.
	 */
	TMEM_CHECK_SERVED,
	/*
	 * A drain erases what was put meanwhile. Without: a later get returns bytes from before a
	 * write that the driver did not see begin.
	 */
	TMEM_CHECK_DRAINED,
	/* The pool of a swap area is private. Without: the host shares its pages with other VMs. */
	TMEM_CHECK_PRIVATE,
	/*
	 * A write with a wrong alignment does not stop recording. Without: a user can stop the
	 * cache of a file system with such a write.
	 */
	TMEM_CHECK_INVAL,
	/*
	 * A failed flush empties its private pool. Without: pages of freed slots stay at the host.
	 */
	TMEM_CHECK_LOST,
	/*
	 * Slots that cannot be erased in time empty their pool. Without: their pages stay at the
	 * host.
	 */
	TMEM_CHECK_BEHIND,
	/* A page stored after its erasure is flushed. Without: it stays at the host for good. */
	TMEM_CHECK_ORPHAN,
	/*
	 * The slots of a merged bio have to be neighbours. Without: a page of a swap file counts
	 * as that of another slot.
	 */
	TMEM_CHECK_SLOTS,
	/*
	 * A write of a slot of a swap file erases the block of the file system. Without: a read of
	 * the file gets old bytes.
	 */
	TMEM_CHECK_SWAP_FILE,
	NR_TMEM_BLOCK_CHECKS
};

/* TMEM_WITHOUT(check) - return whether a test has removed the check TMEM_CHECK_<check> */
#define TMEM_WITHOUT(check)	(READ_ONCE(tmem_test_blocks_without) & BIT(TMEM_CHECK_##check))
extern unsigned long tmem_test_blocks_without;

extern unsigned int tmem_test_replace_ms;
/* Returns whether the tables of records are replaced, although RAM has the same size. */
static inline bool tmem_test_replace(void)
{
	return READ_ONCE(tmem_test_replace_ms);
}

/* Returns the period in jiffies at which the driver checks whether the tables fit the RAM. */
static inline unsigned long tmem_test_ram_period(unsigned long period)
{
	unsigned int test_ms = READ_ONCE(tmem_test_replace_ms);

	return test_ms ? msecs_to_jiffies(test_ms) : period;
}

struct tmem_key;
int tmem_test_pool(struct tmem_key *key, const char *name);

#else

#define TMEM_INJECT(what)	(sizeof(#what) == 0)	/* without TEST=1, no fault occurs */
#define TMEM_HOLD(place)	((void)sizeof(#place))
#define TMEM_HOLD_CLOCK(place, deadline_ns)	((void)sizeof(#place), (deadline_ns))
#define TMEM_HOLD_ATOMIC(place)	((void)sizeof(#place))
#define TMEM_WITHOUT(check)	(sizeof(#check) == 0)
#define TMEM_TEST_CHECK(condition)	((void)sizeof(condition))
#define TMEM_TEST_COUNT(what)	((void)sizeof(#what))

static inline long tmem_test_limit(long bytes)
{
	return bytes;
}

static inline unsigned int tmem_retry_seconds(unsigned int seconds)
{
	return seconds;
}

static inline u64 tmem_test_first_seq(u64 max)
{
	return 0;
}

static inline bool tmem_hook_off(unsigned int hook)
{
	return false;
}

static inline bool tmem_selftest_blind(unsigned int hook)
{
	return false;
}

static inline const char *tmem_test_point_release(const char *name)
{
	return name;
}

static inline bool tmem_test_replace(void)
{
	return false;
}

static inline unsigned long tmem_test_ram_period(unsigned long period)
{
	return period;
}

#endif /* TMEM_TEST */

#endif /* _TMEM_TESTING_H */
