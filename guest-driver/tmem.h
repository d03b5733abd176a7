/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * virtio-tmem guest driver: the interface between its two halves.
 *
 * The core (index, put ring, virtqueues) knows pools, disk blocks and pages. The hooks
 * (tracepoints, ftrace) know mm, VFS and bios. Hooks call the core through the functions below; the
 * core never calls a hook.
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
	TMEM_INVAL_UNMOUNT,
	TMEM_INVAL_DROPPED,	/* a put of the key was refused or dropped */
	TMEM_INVAL_GENERATION,	/* device reset, backend lost or replaced */
	TMEM_INVAL_OFF,		/* the file system was switched off, or its pool emptied */
	TMEM_INVAL_FREED,	/* the kernel has freed the slot of a swap area */
	TMEM_INVAL_BLOCK,	/* a write of the disk block */
	NR_TMEM_INVAL
};

/*
 * Number of blocks of an object of the index, as a power of two. Blocks of one object share locks,
 * and neighbours share leaves.
 */
#define TMEM_OBJECT_BITS 18

/*
 * Number of blocks that are erased from the index before the task may be rescheduled. They have up
 * to 1,024 leaves, which take 100,000 instructions. Objects have a multiple of it.
 */
#define TMEM_FORGET_BLOCKS	8192

/* Identifies an object of the index: 2^TMEM_OBJECT_BITS neighbouring blocks of a file system. */
struct tmem_key {
	struct tmem_pool *pool;
	u64 object;
};

/*
 * Sets the key of the object of a block, and returns the place of the block in its object. Blocks
 * of 4 KiB count from the beginning of the file system.
 */
static inline pgoff_t tmem_block_key(struct tmem_key *key, struct tmem_pool *pool, u32 block)
{
	*key = (struct tmem_key){ .pool = pool, .object = block >> TMEM_OBJECT_BITS };
	return block & (BIT(TMEM_OBJECT_BITS) - 1);
}

/* Returns the block at a place in an object. */
static inline u64 tmem_key_block(const struct tmem_key *key, u64 index)
{
	return (key->object << TMEM_OBJECT_BITS) + index;
}

/* --- core: implemented in core/, called by hooks ------------------------------------------- */

/*
 * Returns whether a put or a get is worth preparing. Any context, one load; it may be wrong a
 * moment later.
 */
bool tmem_online(void);

/*
 * Adds a pool. Process context. The device learns of the pool when it is online, and again after
 * each change of the generation. @private: the host must not share the pages with other VMs, and
 * drops a page soon after the driver has erased it with TMEM_INVAL_FREED.
 */
struct tmem_pool *tmem_pool_new(const char *name, bool private);
/* Returns whether the device offers no private pools, so that the pool takes no puts. */
bool tmem_pool_refused(const struct tmem_pool *pool);
/*
 * Empties a pool. Process context. Gets no longer find pages that were put before. The pool and its
 * policies stay. The pool takes puts again when the device has confirmed it, after all puts that
 * had begun before have ended. The memory of the entries is freed in the background.
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
 * An evicted page. @copy is NULL until the page was read, and then points to a copy in the
 * processor's scratch page, which stays valid until the task enables preemption.
 */
struct tmem_evicted {
	struct page *page;
	const void *copy;
	bool error;			/* a memory error; there is no copy */
	struct tmem_checks checks;	/* of the copy */
};

/*
 * Copies an evicted page, and computes its checks. The caller is in no interrupt, and has disabled
 * preemption. Returns false if there is no device, or if the page has a memory error.
 */
bool tmem_evicted_read(struct tmem_evicted *evicted);

/*
 * Copies a page into the put ring and enters it into the index. If the host has retained the page
 * since a get, and the page has not changed, the driver copies nothing and sends a reference. Any
 * context but NMI, interrupts on or off; never waits. Returns whether the page was taken. If it
 * was not, its entry is erased.
 * @workingset: the page was used again after it was read in.
 *
 * The page is sent to the host when a batch is full, or within TMEM_PUT_DELAY_MS (10 ms, in ticks),
 * unless the maximum number of batches is in flight (core/send.c).
 */
bool tmem_put(const struct tmem_key *key, pgoff_t index, const struct tmem_evicted *evicted,
	      bool workingset);
/*
 * Sends batches that puts have filled. The caller of tmem_put() calls it afterwards, without locks
 * of the driver. Any context but NMI. If no batch is full, the call costs one load.
 */
void tmem_put_end(void);

/*
 * Erases the entries of the blocks at the places first .. last of an object, both included. Any
 * context but NMI. The cost is proportional to the number of entries in the range. With
 * TMEM_INVAL_FREED, the host drops its pages of the range even if the index has no entry of them.
 */
void tmem_invalidate(const struct tmem_key *key, u64 first, u64 last, enum tmem_inval why);

/*
 * Returns whether many ranges wait until the host is told of them. The caller should then erase no
 * others with TMEM_INVAL_FREED. If a flush of a private pool finds no space, the driver empties the
 * pool. Any context.
 */
bool tmem_flushes_wait(void);

/*
 * A page of the pool was wrong. The hooks then put and get no page of it, and empty it. The core
 * calls tmem_pool_wrong() in tmem_put(), too. tmem_pool_why() returns which check found the first
 * wrong page, or NULL.
 */
void tmem_pool_wrong(struct tmem_pool *pool, const char *why, u64 block);
bool tmem_pool_is_wrong(const struct tmem_pool *pool);
const char *tmem_pool_why(const struct tmem_pool *pool, u64 *block);

/*
 * Policies: a user's request that pages of an inode are not put. igen is inode->i_generation. The
 * number of policies is limited, so tmem_policy_forbid() may fail. A policy stays until
 * tmem_policy_forget(), or until the pool is freed.
 */
bool tmem_policy_never(struct tmem_pool *pool, u64 ino, u32 igen);
int tmem_policy_forbid(struct tmem_pool *pool, u64 ino, u32 igen);
void tmem_policy_forget(struct tmem_pool *pool, u64 ino);

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
 * One bio waits at most D, which is deadline_ms. An answer that takes more than D / 4 counts as
 * slow, whether it is late or not. A read(2) of any length waits for slow answers 11 D at most (220
 * ms unless set otherwise), and in the long run no more than a fifth of its time. After that the
 * breaker is open, and all reads go to the disk until the host answers a probe within D / 4
 * (core/breaker.c). core/get.h has the functions that get pages.
 */
u64 tmem_get_deadline_ns(void);

/*
 * Switches the cache off until the module is loaded again, and reports it, because a page from the
 * host failed its content check. That is evidence about the host or the guest's memory.
 */
void tmem_poison(const char *why, u64 block);

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
