// SPDX-License-Identifier: GPL-2.0-only
/*
 * Reads a sample of hits from the disk as well and compares them.
 *
 * The page from the host goes into a separate copy, and the file system reads the folio as after a
 * miss, so the sample can do no harm. A worker locks the folio, which waits for the read, and
 * compares.
 *
 * An invalidation of the page before the comparison makes the comparison void, because copy and
 * disk may then differ without a fault. The content of a folio changes either after its hook has
 * fired (a page is made dirty before a mapping becomes writable), or under the folio's lock. In
 * the second case the dirty bit is set before the lock is released. The worker holds the lock, so
 * it sees the invalidation or the dirty bit.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/hash.h>
#include <linux/highmem.h>
#include <linux/list.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pagemap.h>
#include <linux/slab.h>
#include <linux/utsname.h>
#include <linux/workqueue.h>

#include "../core/stats.h"
#include "hooks.h"

/*
 * Maximum number of pending comparisons, which have 1 MiB of copies. While there are this many,
 * further hits are not compared.
 */
#define TMEM_VERIFY_MAX 256

/*
 * By default, the first TMEM_VERIFY_FIRST_HITS hits of each file system are compared with the disk,
 * and then one hit in TMEM_VERIFY_EVERY_HITS.
 */
#define TMEM_VERIFY_FIRST_HITS 1000
#define TMEM_VERIFY_EVERY_HITS 1024
/*
 * On a kernel release that was not tested, one hit in this many is compared with the disk.
 * docs/guest-support.md has the cost.
 */
#define TMEM_VERIFY_UNTESTED_HITS 64

/*
 * Number of bits of the hash that selects a counter of pending comparisons. There are more counters
 * than files that are usually read at a time.
 */
#define TMEM_VERIFY_BITS 6

struct tmem_verify {
	struct list_head list;		/* link in the list pending; guarded by pending_lock */
	/* link in the list queued after the read has started; guarded by pending_lock */
	struct list_head queue;
	/*
	 * Super block of the folio: only compared, never dereferenced. It stands for the file
	 * system, because a flush replaces struct tmem_fs.
	 */
	const struct super_block *sb;
	const struct address_space *mapping;	/* only compared, never dereferenced */
	struct folio *folio;		/* the comparison holds a reference */
	struct page *copy;
	u64 ino;
	pgoff_t index;
	loff_t isize_bytes;		/* size of the file at the time of the get */
	bool voided;
};

static int verify_every = -1;

/* Kernel release if it was not tested, otherwise empty. Guarded by kernel_param_lock(). */
static char untested_release[__NEW_UTS_LEN + 1];
/* Value that verify_every=-1 stands for. It is set before the first hit. */
static unsigned int default_every = TMEM_VERIFY_EVERY_HITS;

/* Shows in "state" how many hits are compared. The caller holds kernel_param_lock(). */
static void show_untested(void)
{
	char note[128];
	int every = verify_every < 0 ? TMEM_VERIFY_UNTESTED_HITS : verify_every;

	if (!*untested_release)
		return;
	if (every)
		scnprintf(note, sizeof(note),
			  "kernel %s is not tested; one hit in %d is compared with the disk",
			  untested_release, every);
	else
		scnprintf(note, sizeof(note),
			  "kernel %s is not tested; no hit is compared with the disk",
			  untested_release);
	tmem_core_set_note(note);
}

static int set_verify_every(const char *val, const struct kernel_param *kp)
{
	int err = param_set_int(val, kp);

	if (!err)
		show_untested();
	return err;
}

static const struct kernel_param_ops verify_every_ops = {
	.set = set_verify_every,
	.get = param_get_int,
};
module_param_cb(verify_every, &verify_every_ops, &verify_every, 0644);
MODULE_PARM_DESC(verify_every,
		 "read each n-th hit from disk as well and compare (0: none; -1: the first 1000 of each file system, then each 1024th, or each 64th on an untested kernel release)");

static unsigned long verify_voided;
module_param(verify_voided, ulong, 0444);
MODULE_PARM_DESC(verify_voided, "comparisons that a change of the file made void");

static LIST_HEAD(pending);
static LIST_HEAD(queued);
static unsigned int nr_pending;
/*
 * Number of pending comparisons, by a hash of the inode. Puts read it without the lock. So while
 * one file has comparisons, puts of other files take no lock.
 */
static unsigned int pending_of[1 << TMEM_VERIFY_BITS];
/* Leaf lock. Guards the lists, nr_pending, pending_of and voided. */
static DEFINE_SPINLOCK(pending_lock);

static void verify_work(struct work_struct *work);
static DECLARE_WORK(work, verify_work);
static struct workqueue_struct *verify_wq;

/*
 * Returns the counter of the pending comparisons of an inode. Inodes with the same hash share it.
 */
static unsigned int *pending_at(const struct super_block *sb, u64 ino)
{
	return &pending_of[hash_64(ino ^ (unsigned long)sb, TMEM_VERIFY_BITS)];
}

/* Counts a comparison that is added (1) or freed (-1). */
static void count_pending(const struct tmem_verify *v, int change)
{
	unsigned int *at = pending_at(v->sb, v->ino);

	lockdep_assert_held(&pending_lock);
	WRITE_ONCE(nr_pending, nr_pending + change);
	WRITE_ONCE(*at, *at + change);
}

/**
 * tmem_verify_due() - count a hit, or those of a bio, and decide whether it is in the sample
 * @fs: its file system
 * @pages: number of hits that would be compared together
 *
 * Context: any but NMI.
 * Return: true if the hits are to be compared.
 */
bool tmem_verify_due(struct tmem_fs *fs, unsigned int pages)
{
	int every = READ_ONCE(verify_every);

	if (!every)
		return false;
	if (every < 0) {
		/* Count with an atomic, which all CPUs write, only until the limit is reached. */
		if (atomic_read(&fs->first_hits) < TMEM_VERIFY_FIRST_HITS) {
			atomic_add(pages, &fs->first_hits);
			return true;
		}
		every = default_every;
	}
	/*
	 * Each CPU selects one in @every of its own hits, or bios. So about one in @every of all
	 * hits is compared.
	 */
	return !(this_cpu_inc_return(fs->cpu->hits) % every);
}

/**
 * tmem_verify_new() - prepare the comparison of a page, before its get
 * @fs: its file system
 * @folio: folio of the page, locked
 * @index: index of the page
 * @isize_bytes: size of the file; bytes beyond it are not compared
 *
 * Return: the comparison, or NULL if TMEM_VERIFY_MAX comparisons are pending or memory is short.
 */
struct tmem_verify *tmem_verify_new(struct tmem_fs *fs, struct folio *folio, pgoff_t index,
				    loff_t isize_bytes)
{
	const gfp_t gfp = GFP_NOFS | __GFP_NORETRY | __GFP_NOWARN;
	struct tmem_verify *v;

	if (READ_ONCE(nr_pending) >= TMEM_VERIFY_MAX)
		return NULL;
	v = kzalloc(sizeof(*v), gfp);
	if (!v)
		return NULL;
	v->copy = alloc_page(gfp);
	if (!v->copy) {
		kfree(v);
		return NULL;
	}
	folio_get(folio);
	v->folio = folio;
	v->sb = fs->sb;
	v->mapping = folio->mapping;
	v->ino = folio->mapping->host->i_ino;
	v->index = index;
	v->isize_bytes = isize_bytes;
	INIT_LIST_HEAD(&v->queue);
	spin_lock_irq(&pending_lock);
	list_add_tail(&v->list, &pending);
	count_pending(v, 1);
	spin_unlock_irq(&pending_lock);
	return v;
}

/**
 * tmem_verify_page() - return the page into which the host's page is to be copied
 * @v: from tmem_verify_new()
 *
 * Return: the page.
 */
struct page *tmem_verify_page(struct tmem_verify *v)
{
	return v->copy;
}

static void verify_free(struct tmem_verify *v)
{
	spin_lock_irq(&pending_lock);
	list_del(&v->list);
	count_pending(v, -1);
	spin_unlock_irq(&pending_lock);
	folio_put(v->folio);
	__free_page(v->copy);
	kfree(v);
}

/**
 * tmem_verify_cancel() - give up a comparison because the get was a miss
 * @v: from tmem_verify_new()
 */
void tmem_verify_cancel(struct tmem_verify *v)
{
	verify_free(v);
}

/**
 * tmem_verify_submit() - queue a comparison, after the get has filled the copy and the read from
 * the disk has started
 * @v: from tmem_verify_new()
 */
void tmem_verify_submit(struct tmem_verify *v)
{
	spin_lock_irq(&pending_lock);
	list_add_tail(&v->queue, &queued);
	spin_unlock_irq(&pending_lock);
	queue_work(verify_wq, &work);
}

/**
 * tmem_verify_void() - void the comparisons of pages that are about to change
 * @fs: their file system
 * @ino: their inode
 * @first: first page
 * @last: last page
 *
 * Context: any but NMI.
 */
void tmem_verify_void(const struct tmem_fs *fs, u64 ino, pgoff_t first, pgoff_t last)
{
	struct tmem_verify *v;
	unsigned long flags;

	/*
	 * A comparison that is being added belongs to a locked folio, and its get comes later.
	 * Either this check sees the comparison, or the caller erases the page's entry before the
	 * get, which is then a miss.
	 */
	if (likely(!READ_ONCE(*pending_at(fs->sb, ino))))
		return;
	spin_lock_irqsave(&pending_lock, flags);
	list_for_each_entry(v, &pending, list)
		if (v->sb == fs->sb && v->ino == ino && v->index >= first && v->index <= last)
			v->voided = true;
	spin_unlock_irqrestore(&pending_lock, flags);
}

/**
 * tmem_verify_void_fs() - void all comparisons of a file system, before another file system can get
 * the address of its super block
 * @fs: the file system, for which no task can begin another comparison
 */
void tmem_verify_void_fs(const struct tmem_fs *fs)
{
	struct tmem_verify *v;

	spin_lock_irq(&pending_lock);
	list_for_each_entry(v, &pending, list)
		if (v->sb == fs->sb)
			v->voided = true;
	spin_unlock_irq(&pending_lock);
}

static void verify_one(struct tmem_verify *v)
{
	struct folio *folio = v->folio;
	struct tmem_fs *fs;
	void *disk, *host;
	loff_t isize_bytes;
	size_t len_bytes;
	bool differs;

	TMEM_HOLD(verify);
	folio_lock(folio);
	/* If the folio still has the mapping, the inode is alive while the folio is locked. */
	if (READ_ONCE(v->voided) || folio->mapping != v->mapping ||
	    !folio_contains(folio, v->index) || folio_test_dirty(folio) ||
	    folio_test_writeback(folio)) {
		verify_voided++;
		goto unlock;
	}
	if (!folio_test_uptodate(folio)) {
		tmem_count(TMEM_STAT_verify_errors);
		goto unlock;
	}
	isize_bytes = min(v->isize_bytes, i_size_read(folio->mapping->host));
	isize_bytes -= (loff_t)v->index << PAGE_SHIFT;
	len_bytes = clamp_t(loff_t, isize_bytes, 0, PAGE_SIZE);

	disk = kmap_local_page(folio_file_page(folio, v->index));
	host = kmap_local_page(v->copy);
	differs = memcmp(disk, host, len_bytes);
	kunmap_local(host);
	kunmap_local(disk);

	tmem_count(TMEM_STAT_verified_hits);
	if (differs) {
		tmem_count(TMEM_STAT_verify_mismatches);
		/*
		 * The inode is alive, so the super block is that of the mount of the page. But the
		 * driver may have forgotten the mount already, because it is being unmounted.
		 */
		rcu_read_lock();
		fs = tmem_fs_find(v->sb);
		if (fs) {
			tmem_bypass_wrong(fs->pool, "a page from the host differs from the disk",
					  v->ino, v->index);
			tmem_fs_sweep_soon(fs);
		} else {
			tmem_count(TMEM_STAT_mismatches);
		}
		rcu_read_unlock();
	}
unlock:
	folio_unlock(folio);
}

static void verify_work(struct work_struct *unused)
{
	struct tmem_verify *v;

	for (;;) {
		spin_lock_irq(&pending_lock);
		v = list_first_entry_or_null(&queued, struct tmem_verify, queue);
		if (v)
			list_del_init(&v->queue);
		spin_unlock_irq(&pending_lock);
		if (!v)
			return;
		verify_one(v);
		verify_free(v);
		cond_resched();
	}
}

/**
 * tmem_verify_untested() - compare more hits because the kernel release was not tested
 * @release: the release, for "state"
 *
 * If the operator set verify_every, that value is used.
 *
 * Context: process, before there are hits.
 */
void tmem_verify_untested(const char *release)
{
	kernel_param_lock(THIS_MODULE);
	default_every = TMEM_VERIFY_UNTESTED_HITS;
	strscpy(untested_release, release, sizeof(untested_release));
	show_untested();
	kernel_param_unlock(THIS_MODULE);
	pr_notice("kernel %s is not tested: one hit in %u is compared with the disk unless verify_every is set\n",
		  release, TMEM_VERIFY_UNTESTED_HITS);
}

/**
 * tmem_verify_init() - start the worker
 *
 * Return: 0 or -ENOMEM.
 */
int tmem_verify_init(void)
{
	/* Use a workqueue of its own, because the worker waits for disk reads. */
	verify_wq = alloc_workqueue("virtio_tmem_verify", WQ_UNBOUND, 1);
	return verify_wq ? 0 : -ENOMEM;
}

/**
 * tmem_verify_exit() - stop the worker, after the last comparison was submitted
 */
void tmem_verify_exit(void)
{
	if (verify_wq)
		destroy_workqueue(verify_wq);
	verify_wq = NULL;
}
