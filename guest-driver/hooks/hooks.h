/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Declarations that the files of hooks/ share. blocks.h has those for disk blocks, and the rules of
 * coherence, which depend on blocks only.
 *
 * Lock order, outermost first: tmem_hooks_mutex, s_umount, discovery_lock of discover.c,
 * areas_lock of areas.c, tmem_fs_switch_lock, a folio's lock, the i_pages lock, the locks of the
 * records, the locks of the core. Access to a sysfs file of mounts.c counts as a lock below
 * s_umount and discovery_lock.
 */
#ifndef _TMEM_HOOKS_H
#define _TMEM_HOOKS_H

#include <linux/completion.h>
#include <linux/fs.h>
#include <linux/kobject.h>
#include <linux/mutex.h>
#include <linux/percpu.h>
#include <linux/spinlock.h>

#include "../testing.h"
#include "../tmem.h"
#include "attach.h"

/* Bits of the mask that tmem_core_set_hooks() gets. */
enum tmem_hook {
	TMEM_HOOK_REMOVED,	/* tracepoint: page leaves the page cache */
	TMEM_HOOK_FREE,		/* free_unref_folios(): makes puts */
	TMEM_HOOK_DIRTY,	/* tracepoint: page made dirty */
	TMEM_HOOK_BIO,		/* submit_bio() */
	TMEM_HOOK_MOUNT,	/* security_sb_set_mnt_opts() */
	TMEM_HOOK_UNMOUNT,	/* generic_shutdown_super() */
	TMEM_HOOK_FADVISE,	/* generic_fadvise() */
	TMEM_HOOK_DROP_SLAB,	/* drop_slab(): second half of drop_caches=3 */
	TMEM_HOOK_RECLAIM,	/* try_to_unmap_flush(): after some evictions of reclaim */
	TMEM_HOOK_MIGRATE,	/* folio_migrate_flags(): a folio moves to other page frames */
	TMEM_HOOK_READAHEAD,	/* page_cache_ra_order(), since Linux 6.17 */
	TMEM_HOOK_SWAP,		/* functions that free slots of swap areas */
	TMEM_HOOK_SELFTEST,	/* a function of this module's own */
	NR_TMEM_HOOKS
};

/* --- state.c ------------------------------------------------------------------------------- */

/* Held while hooks are taken, added or released. */
extern struct mutex tmem_hooks_mutex;
/* True while puts and gets are allowed. */
extern bool tmem_hooks_on;
/* True if untested kernels and file systems are served. */
extern bool tmem_allow_untested;

void tmem_hooks_set(enum tmem_hook hook);
__printf(1, 2) void tmem_hooks_off(const char *fmt, ...);
void tmem_hooks_none(void);
void tmem_hooks_retry(void);
void tmem_hooks_report(void);

/*
 * Begins a section that may last long. Each CPU counts its sections, so that tasks on different
 * CPUs share no cache line. A task may end its section on another CPU. So only the sum of the
 * counts has a meaning, and only when no section can begin any more. A percpu_ref would add to each
 * unmount a grace period that cannot be expedited.
 */
static inline void tmem_users_begin(long __percpu *users)
{
	this_cpu_inc(*users);
}

static inline void tmem_users_end(long __percpu *users)
{
	/*
	 * Complete the accesses of the section before counting its end; pairs with
	 * tmem_users_wait().
	 */
	smp_mb();
	this_cpu_dec(*users);
}

void tmem_users_wait(const long __percpu *users);

/*
 * Number of pages of the self-test's file. The kernel keeps up to 31 new folios in a per-CPU batch,
 * with a reference to each. Reclaim can take a folio only after it has left the batch, as most
 * folios of this file have.
 */
#define TMEM_SELFTEST_PAGES 128

/*
 * Record of the hooks during the self-test: the hooked functions that a task entered (calls), how
 * often the tracepoints reported folios of the test's mapping, and the page index of the last folio
 * that became dirty. freed counts how often a folio was freed that reclaim had removed.
 */
struct tmem_seen {
	unsigned long calls;		/* bits of enum tmem_hook */
	atomic_t reclaimed, removed, dirty, freed;
	const struct folio *evicted;	/* the last one that was reclaimed; only compared */
	pgoff_t dirty_index;
};

extern struct tmem_seen tmem_seen;

/*
 * Mapping of the file that the self-test uses, or NULL. For this mapping the hooks only report what
 * they see.
 */
extern struct address_space *tmem_selftest_mapping;
void tmem_selftest_saw_removed(const struct folio *folio);
void tmem_selftest_saw_freed(const struct folio *folio);
void tmem_selftest_saw_dirty(const struct folio *folio);
void tmem_selftest_saw_call(enum tmem_hook hook);

/* --- fs.c ---------------------------------------------------------------------------------- */

/* Size in bytes of the reason why the driver refuses a file system, which is one line. */
#define TMEM_REFUSED_BYTES 128

/* A type of file system that is served. tmem_fs_types[] ends with an entry without a name. */
struct tmem_fs_type {
	const char *name;
	/*
	 * True if the module searches for mounts of this type when it is loaded, because the type
	 * is built in or loaded early.
	 */
	bool at_load;
	unsigned int report_bit;	/* bit of the type in reports: VIRTIO_TMEM_H_... */
	/*
	 * True if an inode number does not name a file for as long as the file exists, so that the
	 * file cannot have a policy.
	 */
	bool no_policies;
	bool has_no_bdev;		/* super blocks of the type have no s_bdev */

	/* Written under discovery_lock; also read without it. */
	struct file_system_type *fst;
	bool active;			/* a mount was found */
	/* Type of the last unknown super block; only compared until it belongs to fst's module. */
	struct file_system_type *seen;

	/* switched off by the operator; guarded by tmem_fs_switch_lock */
	bool off;
	struct kobject *kobj;		/* directory in sysfs, made by mounts.c */
};

extern struct tmem_fs_type tmem_fs_types[];
/* The type of swap areas, which is not in the array. */
extern struct tmem_fs_type tmem_swap_type;

struct tmem_area;

/* Per-CPU part of the state of a file system, so that CPUs do not share its cache lines. */
struct tmem_fs_cpu {
	long users;			/* calls of tmem_fs_get() minus calls of tmem_fs_put() */
	unsigned long puts, gets, hits;	/* pages */
	/* reads that verify.c has counted on this CPU; it selects every n-th one */
	unsigned long reads;
};

/* A mounted file system or a swap area, and its directory in sysfs (mounts.c). */
struct tmem_fs {
	struct hlist_node node;		/* read under RCU; writers hold tmem_fs_lock */
	const struct super_block *sb;	/* only compared; or a tmem_swap_sb() (blocks.h) */
	struct tmem_fs_type *type;
	struct tmem_pool *pool;
	struct block_device *bdev;	/* its device, or NULL if the driver cannot find it */
	struct tmem_area *area;		/* its disk blocks, or NULL (blocks.h) */
	const char *no_area;		/* why area is NULL, unless the mount is refused */
	bool live;			/* puts and gets are allowed */
	bool flush;			/* the discovery will empty the pool */
	/* switched off by the operator; guarded by tmem_fs_switch_lock */
	bool off;
	char refused[TMEM_REFUSED_BYTES];	/* why the driver refuses the mount, or empty */
	struct tmem_fs_cpu __percpu *cpu;
	/* hits that verify.c has counted, up to TMEM_VERIFY_FIRST_HITS */
	atomic_t first_hits;
	struct kobject kobj;
	struct completion released;
	struct rcu_head rcu;
};

struct tmem_fs *tmem_fs_find(const struct super_block *sb);
struct tmem_fs *tmem_fs_get(const struct super_block *sb);
void tmem_fs_put(struct tmem_fs *fs);
void tmem_fs_flush(struct tmem_fs *fs);
void tmem_fs_flush_all(void);
bool tmem_fs_note(const struct super_block *sb);
bool tmem_fs_serves(const struct super_block *sb);
bool tmem_fs_inode_secret(const struct inode *inode);
void tmem_fs_switch(struct tmem_fs_type *type, struct tmem_fs *fs, bool on);
int tmem_fs_state(const struct tmem_fs *fs, char *buf, size_t bytes);

/* --- discover.c ---------------------------------------------------------------------------- */

void tmem_fs_drop(const struct super_block *sb);
void tmem_fs_refill(struct tmem_fs *fs);
struct tmem_fs *tmem_fs_serve_swap(unsigned int type, struct block_device *bdev, const char *why);
void tmem_fs_mounted(struct super_block *sb);
void tmem_fs_setup(void);
void tmem_fs_init(void);
void tmem_fs_stop(void);
void tmem_fs_exit(void);

/* --- mounts.c ------------------------------------------------------------------------------ */

int tmem_mount_add(struct tmem_fs *fs, dev_t dev);
void tmem_mount_remove(struct tmem_fs *fs);
int tmem_mounts_init(void);
void tmem_mounts_stop(void);
void tmem_mounts_exit(void);

/* --- bdev.c -------------------------------------------------------------------------------- */

bool tmem_bdev_hold(struct block_device *bdev);
struct block_device *tmem_bdev_get(const struct super_block *sb);
void tmem_bdev_put(struct block_device *bdev);

/* --- refuse.c ------------------------------------------------------------------------------ */

bool tmem_refuse(struct super_block *sb, const struct block_device *bdev, char *why,
		 size_t why_bytes);

/* --- slots.c ------------------------------------------------------------------------------- */

void tmem_swap_soon(void);

/* --- swap.c -------------------------------------------------------------------------------- */

void tmem_swap_setup(void);
void tmem_swap_init(void);
void tmem_swap_stop(void);
void tmem_swap_empty(void);
void tmem_swap_exit(void);

/* --- put.c --------------------------------------------------------------------------------- */

void tmem_probe_removed(void *data, struct folio *folio);
void tmem_probe_dirty(void *data, struct folio *folio, struct address_space *mapping);

/* --- tracepoints.c, or intree.c ------------------------------------------------------------ */

int tmem_probes_register(void);
void tmem_probes_unregister(void);

/* --- ftrace.c, or intree.c ----------------------------------------------------------------- */

/*
 * Function of the kernel that the driver watches or replaces. Each address has at most one target.
 * Lists of targets end with an entry without a name.
 */
struct tmem_target {
	const char *name;
	/*
	 * If it is 0, the name finds the function. Then a replacement cannot call the original: the
	 * kernel never takes the address of the function, so with indirect branch tracking the
	 * function may have lost the mark that allows a call by address.
	 */
	unsigned long addr;
	enum tmem_hook hook;
	/* Called with the function's arguments when it is entered, in any context. */
	void (*entry)(struct tmem_args *args);
	/* Called instead of the function, unless this module is the caller. */
	void *wrap;
	/*
	 * Returns whether the replacement handles a call with these arguments. Runs in any context.
	 * If it is NULL, the replacement handles all calls. A task inside a replacement keeps the
	 * module loaded, so calls that may wait for a server must not be replaced. submit_bio() is
	 * an exception: it waits for the disk, and unloading waits for the bios anyway.
	 */
	bool (*wanted)(struct tmem_args *args);
	/*
	 * If it is not NULL, the replacement only handles calls from the function that has this
	 * name. In a kernel with the patches of intree/, that function alone calls the hook.
	 */
	const char *caller;
	/* Names what is missing without the hook. NULL if the cache stays off without it. */
	const char *without;
};

int tmem_target_add(const struct tmem_target *target);
int tmem_targets_start(void);
bool tmem_targets_stop(void);
void tmem_targets_reset(void);
void tmem_targets_drain(void);

/* Counts whose sum over all CPUs is the number of tasks that run a replacement function. */
DECLARE_PER_CPU(long, tmem_nr_inside);

/*
 * Each replacement calls tmem_enter() first and tmem_leave() last. A task does not sleep between
 * its redirection and tmem_enter(), nor between tmem_leave() and its return, so
 * synchronize_rcu_tasks() waits for tasks in these parts.
 */
static inline void tmem_enter(void)
{
	tmem_users_begin(&tmem_nr_inside);
}

static inline void tmem_leave(void)
{
	tmem_users_end(&tmem_nr_inside);
	/*
	 * Keeps the compiler from turning the call of the original function, which precedes
	 * tmem_leave(), into a jump.
	 */
	barrier();
}

/* --- targets of the files that have hooks --------------------------------------------------- */

extern const struct tmem_target tmem_vfs_targets[];
extern const struct tmem_target tmem_fadvise_targets[];
extern const struct tmem_target tmem_bio_targets[];
extern const struct tmem_target tmem_free_targets[];
extern const struct tmem_target tmem_reclaim_targets[];
extern const struct tmem_target tmem_readahead_targets[];
extern const struct tmem_target tmem_migrate_targets[];
extern const struct tmem_target tmem_selftest_targets[];

/* --- fadvise.c ----------------------------------------------------------------------------- */

bool tmem_fadvise_covers(const struct address_space *mapping, pgoff_t index);

/* --- verify.c ------------------------------------------------------------------------------ */

bool tmem_verify_due(struct tmem_fs *fs, unsigned int pages);
void tmem_verify_untested(const char *release);

/* --- device.c ------------------------------------------------------------------------------ */

void tmem_device_init(void);
void tmem_device_exit(void);

/* --- selftest.c ---------------------------------------------------------------------------- */

const char *tmem_selftest_run(void);

#endif /* _TMEM_HOOKS_H */
