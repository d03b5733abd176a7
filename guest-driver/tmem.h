/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * virtio-tmem guest driver: the interface between its two halves.
 *
 * The core (index, put ring, virtqueues) knows pools, inode numbers and pages. The hooks
 * (tracepoints, ftrace, file systems) know mm and VFS. Hooks call the core through the functions
 * below; the core never calls a hook.
 *
 * The index is the authority on which pages may be got. An invalidation erases entries from it. It
 * takes only spinlocks with interrupts off, allocates nothing and cannot fail.
 */
#ifndef _TMEM_H
#define _TMEM_H

#include <linux/bitmap.h>
#include <linux/mm_types.h>
#include <linux/types.h>

#include "core/check.h"

/* Share of the index that belongs to one file system (super block). */
struct tmem_pool;

/* Reasons to erase entries. Each has a counter. */
enum tmem_inval {
	TMEM_INVAL_REMOVED,	/* left the page cache other than by reclaim */
	TMEM_INVAL_DIRTY,	/* page made dirty */
	TMEM_INVAL_TRUNCATE,	/* truncate, punch, zero, collapse, insert, reflink */
	TMEM_INVAL_DIRECT,	/* direct write is about to start */
	TMEM_INVAL_MOVE_EXT,	/* blocks exchanged below the page cache */
	/* inode was deleted or reused, or its pages may not be put any more */
	TMEM_INVAL_INODE,
	TMEM_INVAL_UNMOUNT,
	TMEM_INVAL_DROPPED,	/* a put of the key was refused or dropped */
	TMEM_INVAL_GENERATION,	/* device reset, backend lost or replaced */
	TMEM_INVAL_FADVISE,	/* POSIX_FADV_DONTNEED */
	TMEM_INVAL_OFF,		/* the file system was switched off */
	TMEM_INVAL_BLOCK,	/* a write of the disk block */
	NR_TMEM_INVAL
};

/*
 * Identifies an inode. igen is inode->i_generation; if it changes, the driver erases all entries of
 * the inode.
 */
struct tmem_key {
	struct tmem_pool *pool;
	u64 ino;
	u32 igen;
};

/* --- core: implemented in core/, called by hooks ------------------------------------------- */

/*
 * Returns whether a put or a get is worth preparing. Any context, one load; it may be wrong a
 * moment later.
 */
bool tmem_online(void);

/*
 * Adds a pool. Process context. The device learns of the pool when it is online, and again after
 * each change of the generation. A pool that replaces @old shares the policies and marks of @old.
 * The caller must not put pages into @old any more.
 */
struct tmem_pool *tmem_pool_new(const char *name, struct tmem_pool *old);
/*
 * Empties a pool. Process context. Gets no longer find pages that were put before. The pool and its
 * marks stay. The pool takes new puts at once, unless the caller has stopped them. The memory of
 * the entries is freed in the background.
 */
void tmem_pool_empty(struct tmem_pool *pool);
/*
 * Waits until the memory of emptied and removed pools is free. Process context. The wait may take
 * tenths of a second, so the caller holds no lock.
 */
void tmem_pools_wait_emptied(void);
/* Returns the number of entries of a pool, held and retained. Any context. */
unsigned long tmem_pool_pages(struct tmem_pool *pool);
/*
 * Removes a pool with all its pages. The memory of its entries is freed in the background, and the
 * host frees its memory later. No other call with this pool may be running.
 */
void tmem_pool_free(struct tmem_pool *pool);

/*
 * A page that leaves the page cache. @copy is NULL until the page was read, and then points to a
 * copy, which stays valid until the processor enables interrupts.
 */
struct tmem_evicted {
	struct page *page;
	const void *copy;
	bool error;			/* a memory error; there is no copy */
	struct tmem_checks checks;	/* of the copy */
};

/*
 * Copies an evicted page, and computes its checks. The caller has disabled interrupts. Returns
 * false if there is no device, or if the page has a memory error.
 */
bool tmem_evicted_read(struct tmem_evicted *evicted);

/*
 * Copies a page into the put ring and enters it into the index. If the host has retained the page
 * since a get, and the page has not changed, the driver copies nothing and sends a reference. Any
 * context but NMI, interrupts on or off; never waits. Returns whether the page was taken. If it
 * was not, its entry is erased.
 * @workingset: the page was used again after it was read in.
 * @inside: the page lies completely inside the file. Only such pages are retained, because the
 * bytes behind the end of a file can change without a write.
 *
 * The page is sent to the host when a batch is full, or within TMEM_PUT_DELAY_MS (10 ms, in ticks),
 * unless the maximum number of batches is in flight (core/send.c).
 */
bool tmem_put(const struct tmem_key *key, pgoff_t index, struct tmem_evicted *evicted,
	      bool workingset, bool inside);
/*
 * Calls tmem_put() for @nr pages that are neighbours in the file and in memory. Pages from
 * @inside_end on do not lie completely inside the file.
 */
unsigned int tmem_put_pages(const struct tmem_key *key, pgoff_t index, struct page *page,
			    unsigned int nr, bool workingset, pgoff_t inside_end);
/*
 * Sends batches that puts have filled. A kernel for which tmem_has_put_end() is true calls it after
 * the puts, when it has released the i_pages lock. Any context but NMI. If no batch is full, the
 * call costs one load.
 */
void tmem_put_end(void);

/*
 * Erases the entries of pages first .. last, both included. Any context but NMI. The cost is
 * proportional to the number of entries in the range, so the range is that of a folio.
 */
void tmem_invalidate(struct tmem_pool *pool, u64 ino, pgoff_t first, pgoff_t last,
		     enum tmem_inval why);
/* Erases the entries of a range of any length. Process context; may reschedule. */
void tmem_invalidate_range(struct tmem_pool *pool, u64 ino, pgoff_t first, pgoff_t last,
			   enum tmem_inval why);
/* Erases all entries of an inode in O(1). */
void tmem_invalidate_inode(struct tmem_pool *pool, u64 ino, enum tmem_inval why);

/*
 * Marks: no put is taken for a marked inode.
 *
 * tmem_bypass() sets a mark, in any context but NMI. If there is no memory for the mark, no put is
 * taken for the whole file system instead, and the mark counts as lost. tmem_bypass() returns
 * whether the memory for marks runs short or a mark was lost. The caller then requests a sweep,
 * which clears marks that are no longer needed (hooks/marks.c). The inode's entries stay. If the
 * caller's operation changes the file, the caller erases them afterwards.
 *
 * tmem_is_bypassed() returns whether no put is taken for an inode. tmem_is_marked() returns whether
 * the inode has a mark that is not lost.
 *
 * tmem_unbypass() clears a mark, unless @writers, the inode's i_writecount, is given and above 0.
 *
 * After marks were lost, the hooks set all marks again that may be needed. tmem_bypass_clear_lost()
 * then lets puts resume, if no further mark was lost since @lost was read.
 *
 * tmem_bypass_all() marks all inodes until the file system is unmounted. The hooks then also get no
 * page of this file system, and empty its pool. tmem_bypass_wrong() does the same because a page of
 * the file system was wrong: a page from the host differs from the disk, or a page changed while
 * the host retained it. That is evidence about one file system only. The core calls it in
 * tmem_put_pages(), too. tmem_bypass_why() returns which check found the first wrong page.
 */
bool tmem_bypass(struct tmem_pool *pool, u64 ino);
bool tmem_is_bypassed(struct tmem_pool *pool, u64 ino);
bool tmem_is_marked(struct tmem_pool *pool, u64 ino);
void tmem_unbypass(struct tmem_pool *pool, u64 ino, const atomic_t *writers);
unsigned long tmem_bypass_lost(const struct tmem_pool *pool);
void tmem_bypass_all(struct tmem_pool *pool);
bool tmem_bypass_is_all(const struct tmem_pool *pool);
void tmem_bypass_wrong(struct tmem_pool *pool, const char *why, u64 ino, pgoff_t index);
const char *tmem_bypass_why(const struct tmem_pool *pool, u64 *ino, pgoff_t *index);
bool tmem_bypass_clear_lost(struct tmem_pool *pool, unsigned long lost);

/*
 * Policies: a user's request that pages of an inode are not put. The number of policies is limited.
 * tmem_policy_forbid() may fail. If it succeeds, the caller erases the inode's entries. A policy
 * stays until tmem_policy_forget(), or until the last pool that shares it is freed.
 */
bool tmem_policy_never(const struct tmem_key *key);
int tmem_policy_forbid(const struct tmem_key *key);
void tmem_policy_forget(struct tmem_pool *pool, u64 ino);

/* Returns the number of entries of an inode, held and retained. Any context but NMI. */
unsigned long tmem_held_pages(const struct tmem_key *key);

/*
 * Sets bit i of @held if the index has page @index + i and the page is not retained. The bitmap
 * has @nr bits and is cleared first. Returns the number of bits set. Any context but NMI; there is
 * no exit to the host.
 */
unsigned int tmem_held(const struct tmem_key *key, pgoff_t index, unsigned int nr,
		       unsigned long *held);

/*
 * Returns the deadline, a time of ktime_get_ns(), of a reader that begins to wait now.
 *
 * One readahead window, or one folio of a fault, waits at most D, which is deadline_ms. An answer
 * that takes more than D / 4 counts as slow, whether it is late or not. A read(2) of any length
 * waits for slow answers 11 D at most (220 ms unless set otherwise), and in the long run no more
 * than a fifth of its time. After that the breaker is open, and all reads go to the disk until the
 * host answers a probe within D / 4 (core/breaker.c).
 *
 * A reader that must not sleep (RWF_NOWAIT, io_uring's first attempt) does not wait at all if the
 * kernel shows this to hooks/read.c. The kernel does so in the readahead that a miss starts, from
 * 6.12 on, and not in the readahead that a marked page starts.
 */
u64 tmem_get_deadline_ns(void);

/*
 * Gets pages. Process context, may sleep until @deadline_ns, for any number of pages. Requests each
 * page i of @index .. @index + @nr - 1 whose bit is set in @want. On a hit it copies the page into
 * pages[i] (locked by the caller, not uptodate) and leaves the bit set. On a miss it clears the
 * bit, and pages[i] has unspecified content. A request takes the page's entry out of the index. If
 * the host retains the page, the entry stays, marked as retained. The host may keep pages before
 * @inside_end, the first page that does not lie completely inside the file. Returns the number of
 * hits. Content check and cookie were compared.
 */
unsigned int tmem_get(const struct tmem_key *key, pgoff_t index, unsigned int nr,
		      struct page **pages, unsigned long *want, u64 deadline_ns,
		      pgoff_t inside_end);

/*
 * Informs the core that the content that tmem_get() brought into page @from is now in page @to of
 * the page cache. If a hit is compared with the disk, the content goes to a copy, and the disk
 * fills the page of the page cache. Any context.
 */
void tmem_moved(struct page *from, struct page *to);

/*
 * Switches the cache off until the module is loaded again, and reports it, because a page from the
 * host failed its content check. That is evidence about the host or the guest's memory.
 */
void tmem_poison(const char *why, u64 ino, pgoff_t index);

/*
 * tmem_pace_wanted() returns whether the current task should wait for the host, because the put
 * ring fills up. This holds for kswapd, and for a registered task in a write to memory.reclaim.
 * tmem_pace() waits, for a bounded time (core/pace.c).
 *
 * tmem_pace_register() registers the current thread, until tmem_pace_unregister() is called with
 * the same @owner. It returns -EBUSY if the maximum number of tasks is registered. Process context.
 */
bool tmem_pace_wanted(void);
void tmem_pace(void);
int tmem_pace_register(const void *owner);
void tmem_pace_unregister(const void *owner);

/*
 * Sets the hook state for the report and sysfs: one bit per live hook; off_reason is NULL if the
 * hooks work.
 */
void tmem_core_set_hooks(u64 live, const char *off_reason);

/* Size of a note, which is one line, in bytes. */
#define TMEM_NOTE_BYTES 1024

/*
 * Sets which types of file systems are served, as bits of the report (VIRTIO_TMEM_H_...). @note
 * names file systems that are not served, with the reason; sysfs adds it to the state. A driver
 * that has a note and serves no type is off.
 */
void tmem_core_set_served(u64 types, const char *note);
/* Sets the text that sysfs shows after "on". */
void tmem_core_set_note(const char *note);

/* The directory /sys/kernel/virtio_tmem, from tmem_core_init() to tmem_core_exit(). */
extern struct kobject *tmem_kobj;

/* Sets up or removes virtio driver, index, ring and sysfs. */
int tmem_core_init(void);
void tmem_core_exit(void);

/* --- hooks: implemented in hooks/, called by main.c ---------------------------------------- */

/*
 * Checks the list of tested kernels, runs the self-test, and takes tracepoints and ftrace. Returns
 * 0 also when the module stays off (the reason is logged and shown in sysfs), and an error only
 * when loading must fail.
 */
int tmem_hooks_init(void);
void tmem_hooks_exit(void);

#endif /* _TMEM_H */
