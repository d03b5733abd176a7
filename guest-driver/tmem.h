/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * virtio-tmem guest driver: the line between its two halves.
 *
 * The core (index, put ring, virtqueues) knows pools, inode numbers and pages.
 * The hooks (tracepoints, ftrace, file systems) know mm and VFS. Hooks call the
 * core through the functions below; the core never calls a hook.
 *
 * The index is the authority on what may be got. Invalidating erases from it,
 * takes only spinlocks with interrupts off, allocates nothing and cannot fail.
 */
#ifndef _TMEM_H
#define _TMEM_H

#include <linux/bitmap.h>
#include <linux/mm_types.h>
#include <linux/types.h>

/* A file system's share of the index, one per super block. */
struct tmem_pool;

/* Why entries are erased; a counter each. */
enum tmem_inval {
	TMEM_INVAL_REMOVED,	/* left the page cache otherwise than by reclaim */
	TMEM_INVAL_DIRTY,	/* page made dirty */
	TMEM_INVAL_TRUNCATE,	/* truncate, punch, zero, collapse, insert, reflink */
	TMEM_INVAL_DIRECT,	/* direct write is about to start */
	TMEM_INVAL_MOVE_EXT,	/* blocks exchanged below the page cache */
	TMEM_INVAL_INODE,	/* inode deleted, reused or become ineligible */
	TMEM_INVAL_UNMOUNT,
	TMEM_INVAL_DROPPED,	/* a put of the key was refused or dropped */
	TMEM_INVAL_GENERATION,	/* device reset, backend lost or replaced */
	TMEM_INVAL_FADVISE,	/* POSIX_FADV_DONTNEED */
	TMEM_INVAL_OFF,		/* the file system was switched off */
	NR_TMEM_INVAL
};

/* Which page, on whose behalf. igen is inode->i_generation: a change of it empties the inode. */
struct tmem_key {
	struct tmem_pool *pool;
	u64 ino;
	u32 igen;
};

/*
 * Places where a test may hold a task until something else has happened: a parameter test_hold_...
 * each, which the test sets to WANTED, reads as HELD once a task is there, and sets back to NO.
 */
#ifdef TMEM_TEST
enum tmem_hold { TMEM_HOLD_NO, TMEM_HOLD_WANTED, TMEM_HOLD_HELD };
extern unsigned int tmem_hold_replace, tmem_hold_verify, tmem_hold_breaker;
void tmem_hold(unsigned int *place);
#define TMEM_HOLD(place)	tmem_hold(&tmem_hold_##place)
#else
#define TMEM_HOLD(place)	((void)sizeof(#place))
#endif

/* --- core: implemented in core/, called by hooks ------------------------------------------- */

/* Is a put or a get worth preparing? Any context, one load; may be wrong a moment later. */
bool tmem_online(void);

/*
 * Process context. The device learns of the pool when it is online, again after each generation.
 * One that replaces @old, which is not used for puts any more, has the same policies and marks.
 */
struct tmem_pool *tmem_pool_new(const char *name, struct tmem_pool *old);
/*
 * Process context. Empties it: what was put before is found by nobody. The pool and its marks stay;
 * unless the caller keeps hooks from putting, new pages come in at once.
 */
void tmem_pool_empty(struct tmem_pool *pool);
/* Process context. Pages held of it, counted by a walk through the whole index. */
unsigned long tmem_pool_pages(struct tmem_pool *pool);
/* Empties it at once; memory is freed behind. No other call with this pool may be running. */
void tmem_pool_free(struct tmem_pool *pool);

/*
 * Any context but NMI, interrupts on or off; never waits. Copies the page into the put ring and
 * enters it into the index. A put that is not taken erases the key. Returns whether it was taken.
 * The page is on its way to the host when a batch is full, or within TMEM_PUT_DELAY_MS (10 ms, in
 * ticks), unless the host has as many batches as it can have: see core/feeder.c.
 * @workingset: the page was used again since it was read in.
 */
bool tmem_put(const struct tmem_key *key, pgoff_t index, struct page *page, bool workingset);

/* Any context but NMI. Erases first .. last, both included; cost in proportion to entries held. */
void tmem_invalidate(struct tmem_pool *pool, u64 ino, pgoff_t first, pgoff_t last,
		     enum tmem_inval why);
/* O(1). */
void tmem_invalidate_inode(struct tmem_pool *pool, u64 ino, enum tmem_inval why);

/*
 * Marks: no put is taken for a marked inode. tmem_bypass() sets a mark, in any context but NMI, and
 * cannot fail: without memory for it, marks are lost and no put is taken for the file system. What
 * is held stays; a caller for whom it may be old erases it afterwards. Returns whether marks run
 * out or were lost: then the caller has to have them swept. tmem_unbypass() clears a mark unless
 * @writers, if given, is above 0. After lost marks, all inodes that may need one are marked again,
 * and tmem_bypass_restored() ends the state if no further mark was lost since @lost was read.
 * tmem_bypass_all() marks all inodes until the file system is unmounted; then the hooks get no page
 * of it either, and empty the pool.
 */
bool tmem_bypass(struct tmem_pool *pool, u64 ino);
bool tmem_is_bypassed(struct tmem_pool *pool, u64 ino);
void tmem_unbypass(struct tmem_pool *pool, u64 ino, const atomic_t *writers);
unsigned long tmem_bypass_lost(const struct tmem_pool *pool);
void tmem_bypass_all(struct tmem_pool *pool);
bool tmem_bypass_is_all(const struct tmem_pool *pool);
bool tmem_bypass_restored(struct tmem_pool *pool, unsigned long lost);

/*
 * A wish that pages of the inode are not put, of as many as there is room for. tmem_policy_forbid()
 * erases what is held, and may fail. Kept until forgotten, or until the pool is freed and with it
 * the last of those that replaced it.
 */
bool tmem_policy_never(const struct tmem_key *key);
int tmem_policy_forbid(const struct tmem_key *key);
void tmem_policy_forget(struct tmem_pool *pool, u64 ino);

/* Any context but NMI. How many pages of the inode the index has. */
unsigned long tmem_held_pages(const struct tmem_key *key);

/*
 * Any context but NMI. Sets bit i of @held if the index has page @index + i; the bitmap has @nr
 * bits and is cleared first. Returns how many. No exit to the host.
 */
unsigned int tmem_held(const struct tmem_key *key, pgoff_t index, unsigned int nr,
		       unsigned long *held);

/*
 * When a reader that starts to wait for the host now has waited long enough, by ktime_get_ns().
 *
 * So long waits, at most, one readahead window, or one folio of a fault; D is deadline_ms. A
 * read(2) of any length that meets slow answers, those that take more than D / 4, late or not,
 * waits for them 11 D at most (220 ms unless set otherwise), and in the long run no more than a
 * fifth of its time: then the breaker is open, and everything comes from the disk until a probe is
 * answered within D / 4. See core/get.c. A reader that must not sleep (RWF_NOWAIT, io_uring's
 * first attempt) does not wait at all where the kernel lets hooks/read.c know of it: in the
 * readahead that a miss starts, from 6.12 on; not in the one that a marked page starts.
 */
u64 tmem_get_deadline_ns(void);

/*
 * Process context, may sleep until @deadline_ns, however many pages. Asks for each page i of
 * @index .. @index + @nr - 1 whose bit is set in @want, copies it into pages[i] (locked by the
 * caller, not uptodate) and leaves the bit set; clears the bit of a miss, whose pages[i] then has
 * unspecified content. Each entry asked for is erased from the index first. Returns the number of
 * hits. Content check and cookie were compared.
 */
unsigned int tmem_get(const struct tmem_key *key, pgoff_t index, unsigned int nr,
		      struct page **pages, unsigned long *want, u64 deadline_ns);

/*
 * Any context. What tmem_get() brought into @from is in the page cache as @to: what was got is a
 * copy, to be compared, and the disk fills the page itself.
 */
void tmem_moved(struct page *from, struct page *to);

/* A page was proved wrong: switch the cache off until the module is loaded again, and say so. */
void tmem_poison(const char *why, u64 ino, pgoff_t index);

/* Hook state for the report and sysfs: one bit per live hook; reason is NULL when all is well. */
void tmem_core_set_hooks(u64 live, const char *off_reason);

/* Length of a note, which is one line. */
#define TMEM_NOTE_BYTES 1024

/*
 * Which types of file systems are served, as bits of the report (VIRTIO_TMEM_H_...), and what is
 * not served and why: sysfs adds this to the state. A driver with a note that serves none is off.
 */
void tmem_core_set_served(u64 types, const char *note);
/* Sets the text that sysfs shows after "on". */
void tmem_core_set_note(const char *note);

/* /sys/kernel/virtio_tmem, from tmem_core_init() to tmem_core_exit(). */
extern struct kobject *tmem_kobj;

/* virtio driver, index, ring, sysfs. */
int tmem_core_init(void);
void tmem_core_exit(void);

/* --- hooks: implemented in hooks/, called by main.c ---------------------------------------- */

/*
 * Whitelist, self-test, tracepoints, ftrace. 0 also when the module stays off (the reason is
 * logged and shown in sysfs); an error only when loading must fail.
 */
int tmem_hooks_init(void);
void tmem_hooks_exit(void);

#endif /* _TMEM_H */
