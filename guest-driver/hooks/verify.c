// SPDX-License-Identifier: GPL-2.0-only
/*
 * A sample of hits is read from disk as well and compared.
 *
 * The page that came from the host goes into a copy of our own and the folio
 * is read by the file system as if it had been a miss, so the sample can do no
 * harm. A worker locks the folio, which waits for the read, and compares. Any
 * invalidation of the page in between makes the comparison void: then they may
 * rightly differ. The content of a folio changes only after its hook fired
 * (page made dirty before a mapping becomes writable) or under its lock with
 * the dirty bit set before it is given up; under the lock both are seen.
 */
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

/* Copies at a time, 1 MiB; a hit beyond is served without being compared. */
#define TMEM_VERIFY_MAX 256

/* By default: the first hits of each file system all, then every so many. */
#define TMEM_VERIFY_FIRST_HITS 1000
#define TMEM_VERIFY_EVERY_HITS 1024
/* One hit in this many is compared on an untested kernel release; README.md has the cost. */
#define TMEM_VERIFY_UNTESTED_HITS 64

struct tmem_verify {
	struct list_head list;		/* all of them; the pending lock */
	struct list_head queue;		/* those whose read was started; same lock */
	/* Compared, never followed. Not the struct tmem_fs, which may be replaced meanwhile. */
	const struct super_block *sb;
	const struct address_space *mapping;	/* likewise */
	struct folio *folio;		/* with a reference */
	struct page *copy;
	u64 ino;
	pgoff_t index;
	loff_t isize_bytes;		/* at the get */
	bool voided;
};

static int verify_every = -1;

/* The kernel release, if it was not tested, else empty. Guarded by the lock of the parameters. */
static char untested_release[__NEW_UTS_LEN + 1];
/* Value that verify_every=-1 stands for; written before there are hits. */
static unsigned int default_every = TMEM_VERIFY_EVERY_HITS;

/* Shows in "state" how many hits are compared. The caller holds the lock of the parameters. */
static void show_untested(void)
{
	char note[128];
	int every = verify_every < 0 ? TMEM_VERIFY_UNTESTED_HITS : verify_every;

	if (!*untested_release)
		return;
	if (every)
		scnprintf(note, sizeof(note), "kernel %s is not tested, one hit in %d is compared",
			  untested_release, every);
	else
		scnprintf(note, sizeof(note), "kernel %s is not tested, no hit is compared",
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
static DEFINE_SPINLOCK(pending_lock);	/* guards the lists, nr_pending, voided; innermost */

static void verify_work(struct work_struct *work);
static DECLARE_WORK(work, verify_work);
static struct workqueue_struct *verify_wq;

/**
 * tmem_verify_due - is this hit one of the sample?
 * @fs: its file system
 */
bool tmem_verify_due(struct tmem_fs *fs)
{
	int every = READ_ONCE(verify_every);
	unsigned long hit;

	if (!every)
		return false;
	hit = atomic_long_inc_return(&fs->hits);
	if (every > 0)
		return !(hit % every);
	return hit <= TMEM_VERIFY_FIRST_HITS || !(hit % default_every);
}

/**
 * tmem_verify_new - before the get of a page that shall be compared
 * @fs: its file system
 * @folio: locked
 * @index: of the page
 * @isize_bytes: of the file; what is beyond is not compared
 *
 * Return: NULL if there are enough of them.
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
	nr_pending++;
	spin_unlock_irq(&pending_lock);
	return v;
}

/**
 * tmem_verify_page - where the page of the host shall go
 * @v: from tmem_verify_new()
 */
struct page *tmem_verify_page(struct tmem_verify *v)
{
	return v->copy;
}

static void verify_free(struct tmem_verify *v)
{
	spin_lock_irq(&pending_lock);
	list_del(&v->list);
	nr_pending--;
	spin_unlock_irq(&pending_lock);
	folio_put(v->folio);
	__free_page(v->copy);
	kfree(v);
}

/**
 * tmem_verify_cancel - it was a miss
 * @v: from tmem_verify_new()
 */
void tmem_verify_cancel(struct tmem_verify *v)
{
	verify_free(v);
}

/**
 * tmem_verify_submit - the copy is filled and the read from disk was started
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
 * tmem_verify_void - pages are about to change
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
	 * One that is being added is of a locked folio, and its get comes after:
	 * it is seen here, or finds what the caller erases next erased.
	 */
	if (likely(!READ_ONCE(nr_pending)))
		return;
	spin_lock_irqsave(&pending_lock, flags);
	list_for_each_entry(v, &pending, list)
		if (v->sb == fs->sb && v->ino == ino && v->index >= first && v->index <= last)
			v->voided = true;
	spin_unlock_irqrestore(&pending_lock, flags);
}

/**
 * tmem_verify_void_fs - a file system goes, and its super block's address may be used again
 * @fs: the file system; nobody has it in hand to begin another verification
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
	void *disk, *host;
	loff_t isize_bytes;
	size_t len_bytes;
	bool differs;

	TMEM_HOLD(verify);
	folio_lock(folio);
	/* The mapping being the same, its inode is alive while the folio is locked. */
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
		tmem_poison("a page from the host differs from the disk", v->ino, v->index);
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
 * tmem_verify_untested - compare more hits: the kernel release was not tested
 * @release: the release, for "state"
 *
 * An explicit verify_every of the operator still wins. Process context, before there are hits.
 */
void tmem_verify_untested(const char *release)
{
	kernel_param_lock(THIS_MODULE);
	default_every = TMEM_VERIFY_UNTESTED_HITS;
	strscpy(untested_release, release, sizeof(untested_release));
	show_untested();
	kernel_param_unlock(THIS_MODULE);
	pr_notice("virtio_tmem: kernel %s is not tested: more hits are compared with the disk\n",
		  release);
}

/**
 * tmem_verify_init - start the worker
 *
 * Return: 0 or -ENOMEM.
 */
int tmem_verify_init(void)
{
	/* It waits for disk reads: not on a queue that others share. */
	verify_wq = alloc_workqueue("virtio_tmem_verify", WQ_UNBOUND, 1);
	return verify_wq ? 0 : -ENOMEM;
}

/**
 * tmem_verify_exit - end the worker; nobody submits any more
 */
void tmem_verify_exit(void)
{
	if (verify_wq)
		destroy_workqueue(verify_wq);
	verify_wq = NULL;
}
