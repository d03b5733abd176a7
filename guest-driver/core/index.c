// SPDX-License-Identifier: GPL-2.0-only
/*
 * Index of the pages that the host is believed to hold, with cookie and content check.
 *
 * The index is the authority: a page that is not in it is never requested, so erasing an entry is a
 * complete invalidation. It is a fixed hash table of objects (inodes). The entries of a small file
 * are inside its object. Other objects have an XArray of leaves of 64 pages (leaf.c).
 *
 * Races. An inode hashes to one bucket. The lock of that bucket protects the entries of the inode.
 * Puts also read the inode's mark (bypass.c) and the id of its pool under it. So this lock orders
 * any two operations on an inode.
 * - Put and invalidation: the hooks call tmem_put() before the page leaves the page cache. They
 *   invalidate after the page has left the page cache, or while reclaim cannot evict it. So the put
 *   of the page has always taken the lock before the invalidation, and the invalidation finds the
 *   entry.
 * - Put and bypass: the mark is set first, then the object is detached under this lock. The entry
 *   of a put that took the lock earlier is detached with the object; a later put sees the mark.
 * - Put and erasing of all entries: tmem_pools_forget() sets the ids of all pools to 0. Each entry
 *   belongs to an object that carries the id of its pool, ids are never reused, and a put reads
 *   the id under the lock. So an entry that a put made earlier is unreachable afterwards. The
 *   sweep runs after the ids have changed and visits each bucket under its lock, so it frees all
 *   of these entries.
 * - Put answered REFUSED and a later put of the same page: the entry is erased only if it has the
 *   cookie of the refused put.
 *
 * - Retained entries: a get leaves the entry of a page that the host may retain, and marks it, so
 *   that no other get takes it. The folio of the page is locked and in the page cache. If the get
 *   ends without the page, it erases the entry before the folio is unlocked. An invalidation erases
 *   retained entries as it erases others. Reclaim makes an entry held only if the content is the
 *   same, after the checks of a put, which it makes under this lock.
 *
 * tmem_held(), which finds out whether a get is worthwhile, reads without the lock. Objects and
 * leaves come from slab caches whose memory keeps its type while RCU readers run. So the reader may
 * find a freed, a new or an unrelated object, but never other memory. A wrong answer costs a read
 * from the disk, or a get that finds no entry under the lock.
 *
 * The index never waits, never fails to erase, and allocates only without waiting.
 */
#include <linux/mm.h>
#include <linux/slab.h>

#include "../compat.h"
#include "../trace.h"
#include "index.h"

/*
 * Bytes of the module's memory for each bucket. The number of buckets is rounded down to a power of
 * two. So an index full of files of one page has at most 42 objects in each bucket on average, or
 * 50 with VIRTIO_TMEM_F_RETAIN, up to 1.6 TiB of RAM. Beyond that the table does not grow, because
 * a walk visits all buckets.
 */
#define BYTES_PER_BUCKET	1024
#define BUCKETS_MIN		256
#define BUCKETS_MAX		16777216
/*
 * Maximum number of objects in a bucket. A walk through a full bucket takes about 50 us with
 * interrupts off, if no object is in the processor's cache. No bucket comes near this number unless
 * a user chooses inode numbers for it, or RAM has grown by a factor of ten since the module was
 * loaded. The oldest object of a full bucket makes room for a new one.
 */
#define BUCKET_OBJECTS_MAX	512

struct bucket *tmem_buckets __read_mostly;
unsigned int tmem_bucket_bits __read_mostly;

/*
 * Counts and traces entries that were erased from an object. The caller holds the lock of its
 * bucket.
 */
static void note_erased(const struct object *object, u64 first, u64 last, unsigned long pages,
			enum tmem_inval why)
{
	tmem_count_inval(why, pages);
	if (pages && trace_tmem_invalidate_enabled())
		trace_tmem_invalidate(tmem_pool_name(object->pool), object->ino, first, last, pages,
				      tmem_inval_name(why));
}

/* --- buckets and objects ------------------------------------------------------------------- */

/**
 * tmem_index_bucket() - return the bucket of an inode
 * @key: the inode
 *
 * Return: a number that is always the same for all pages of the inode.
 */
u32 tmem_index_bucket(const struct tmem_key *key)
{
	return bucket_of(key->pool, key->ino);
}

/**
 * tmem_object_free() - free an object and its leaves
 * @object: the object, which can no longer be found
 *
 * Context: process, may sleep.
 */
void tmem_object_free(struct object *object)
{
	tmem_leaf_free_all(object);
	tmem_object_release(object);
}

/*
 * Detached objects, to be freed by a work item, because freeing them takes too long for the context
 * that detached them.
 */
static struct object __rcu *detached;
static DEFINE_SPINLOCK(detached_lock);

static void free_detached_fn(struct work_struct *work)
{
	struct object *object;

	for (;;) {
		spin_lock_irq(&detached_lock);
		object = chain_pop(&detached);
		spin_unlock_irq(&detached_lock);
		if (!object)
			return;
		tmem_object_free(object);
		cond_resched();
	}
}

static DECLARE_WORK(free_detached, free_detached_fn);

/**
 * tmem_object_detach() - take an object with all its pages out of the index, without visiting them
 * @bucket: bucket of the object; locked
 * @object: the object, which can no longer be found; its pages no longer count as held
 * @why: reason, for the counters
 */
void tmem_object_detach(u32 bucket, struct object *object, enum tmem_inval why)
{
	struct tmem_where where = { object->id, object->pool, bucket };

	lockdep_assert_held(&tmem_buckets[bucket].lock);
	uncount_object(object);
	note_erased(object, 0, TMEM_INDEX_MAX, object_pages(object), why);
	tmem_queue_flush(&where, 0, VIRTIO_TMEM_TO_END);
	chain_remove(&tmem_buckets[bucket].objects, object);
	spin_lock(&detached_lock);
	chain_add(&detached, object);
	spin_unlock(&detached_lock);
	queue_work(tmem_system_wq, &free_detached);
}

/**
 * tmem_object_free_empty() - free an object whose last page was erased
 * @bucket: its bucket; locked
 * @object: the object, which has no entries
 */
void tmem_object_free_empty(struct bucket *bucket, struct object *object)
{
	chain_remove(&bucket->objects, object);
	tmem_object_release(object);
}

/* Makes the object of an inode, in which the caller then stores page @index. */
static struct object *new_object(u32 nr, const struct tmem_key *key, u32 pool, u64 index)
{
	struct bucket *bucket = &tmem_buckets[nr];
	unsigned int objects = 0;
	struct object *object;

	for (object = chain_object(&bucket->objects); object;
	     object = chain_object(&object->next))
		if (++objects == BUCKET_OBJECTS_MAX) {
			tmem_count_n(TMEM_STAT_index_evicted,
				     object_pages(object) - object_retained(object));
			tmem_count_n(TMEM_STAT_retained_evicted, object_retained(object));
			tmem_object_detach(nr, object, TMEM_INVAL_DROPPED);
			break;
		}
	object = tmem_object_new(index);
	if (IS_ERR(object))
		return object;
	object->id = ++bucket->nr_made << tmem_bucket_bits | nr;
	/*
	 * A reader without the lock may read these fields now, because an object that was freed at
	 * this address may have been in the table. So write them with WRITE_ONCE().
	 */
	WRITE_ONCE(object->ino, key->ino);
	WRITE_ONCE(object->igen, key->igen);
	WRITE_ONCE(object->pool, pool);
	chain_add(&bucket->objects, object);
	return object;
}

/* --- operations ---------------------------------------------------------------------------- */

/**
 * tmem_index_store() - enter a page, or erase its entry if it cannot be entered
 * @key: pool and inode
 * @index: page number
 * @entry: cookie offset and check
 * @where: set to the object's id and place if 0 is returned
 *
 * Return: 0; -ENODEV if the pool is not at the host; -EPERM if the inode is bypassed; -EACCES if a
 * policy forbids it; -ENOSPC if the index is full; -ENOMEM. With every result but 0, no entry is
 * left for the page.
 */
int tmem_index_store(const struct tmem_key *key, pgoff_t index, u64 entry,
		     struct tmem_where *where)
{
	u32 nr = bucket_of(key->pool, key->ino);
	struct bucket *bucket = &tmem_buckets[nr];
	struct object *object;
	unsigned long flags;
	struct leaf *leaf;
	int err = 0;
	u32 pool;

	spin_lock_irqsave(&bucket->lock, flags);
	pool = READ_ONCE(key->pool->id);
	if (!pool) {
		err = -ENODEV;
		goto unlock;
	}
	object = find_object(bucket, key->pool, key->ino);
	if (object && object->igen != key->igen) {
		tmem_object_detach(nr, object, TMEM_INVAL_INODE);
		object = NULL;
	}
	if (tmem_is_bypassed(key->pool, key->ino))
		err = -EPERM;
	else if (tmem_policy_never(key))
		err = -EACCES;
	else if (TMEM_INJECT(nomem))
		err = -ENOMEM;
	if (!object && !err) {
		object = new_object(nr, key, pool, index);
		if (IS_ERR(object)) {
			err = PTR_ERR(object);
			object = NULL;
		}
	}
	if (object && !err)
		err = tmem_leaf_store(&bucket->objects, &object, index, entry);
	if (err && object) {
		leaf = leaf_load(object, index >> LEAF_SHIFT);
		if (leaf && tmem_leaf_erase(object, index >> LEAF_SHIFT, leaf,
					    BIT_ULL(index & (LEAF_PAGES - 1))))
			note_erased(object, index, index, 1, TMEM_INVAL_DROPPED);
		if (!object_pages(object))
			tmem_object_free_empty(bucket, object);
	} else if (!err) {
		where->object = object->id;
		where->pool = pool;
		where->bucket = nr;
	}
unlock:
	spin_unlock_irqrestore(&bucket->lock, flags);
	if (err == -ENOSPC)
		tmem_evict_start();
	return err;
}

/**
 * tmem_index_take() - take held entries, to request their pages
 * @key: pool and inode
 * @index: first page number; all pages lie in one leaf (64 pages, aligned)
 * @nr: number of pages
 * @want: bit i is set if page @index + i is wanted
 * @keep: bit i is set if the entry of page @index + i stays, marked as retained; other wanted
 *   entries are erased
 * @entry: set to the entry of each page, 0 where none is held
 * @where: set to the object's id and place if anything was taken
 */
void tmem_index_take(const struct tmem_key *key, pgoff_t index, unsigned int nr,
		     const unsigned long *want, u64 keep, u64 *entry, struct tmem_where *where)
{
	u32 bucket_nr = bucket_of(key->pool, key->ino);
	unsigned int base = index & (LEAF_PAGES - 1);
	struct bucket *bucket = &tmem_buckets[bucket_nr];
	struct object *object;
	unsigned long flags;
	struct leaf *leaf;
	u64 mask = 0, held;
	unsigned int i;

	memset(entry, 0, nr * sizeof(*entry));
	spin_lock_irqsave(&bucket->lock, flags);
	object = find_object(bucket, key->pool, key->ino);
	if (!object)
		goto unlock;
	if (object->igen != key->igen) {
		tmem_object_detach(bucket_nr, object, TMEM_INVAL_INODE);
		goto unlock;
	}
	leaf = leaf_load(object, index >> LEAF_SHIFT);
	if (!leaf)
		goto unlock;
	held = leaf_present(leaf) & ~leaf_retained(leaf);
	for_each_set_bit(i, want, nr) {
		if (!(held & BIT_ULL(base + i)))
			continue;
		entry[i] = *leaf_entry(leaf, base + i);
		mask |= BIT_ULL(base + i);
	}
	if (!mask)
		goto unlock;
	where->object = object->id;
	where->pool = object->pool;
	where->bucket = bucket_nr;
	keep = mask & keep << base;
	tmem_leaf_retain(object, leaf, keep);
	tmem_leaf_erase(object, index >> LEAF_SHIFT, leaf, mask & ~keep);
	if (!object_pages(object))
		tmem_object_free_empty(bucket, object);
unlock:
	spin_unlock_irqrestore(&bucket->lock, flags);
}

static struct object *find_object_id(struct bucket *bucket, u64 id)
{
	struct object *object;

	lockdep_assert_held(&bucket->lock);
	for (object = chain_object(&bucket->objects); object;
	     object = chain_object(&object->next))
		if (object->id == id)
			return object;
	return NULL;
}

/**
 * tmem_index_forget() - erase retained entries of pages that a get did not bring or the host did
 * not retain
 * @nr: bucket of the object
 * @id: object of the get
 * @index: page number; all pages lie in one leaf
 * @mask: bit i is set for page @index + i, whose folio the caller has locked
 *
 * The caller's lock on the folios keeps other tasks from making new entries for these pages.
 */
void tmem_index_forget(u32 nr, u64 id, pgoff_t index, u64 mask)
{
	struct bucket *bucket = &tmem_buckets[nr];
	struct object *object;
	unsigned long flags;
	struct leaf *leaf;

	spin_lock_irqsave(&bucket->lock, flags);
	object = find_object_id(bucket, id);
	leaf = object ? leaf_load(object, index >> LEAF_SHIFT) : NULL;
	if (leaf) {
		mask <<= index & (LEAF_PAGES - 1);
		tmem_leaf_erase(object, index >> LEAF_SHIFT, leaf, leaf_retained(leaf) & mask);
		if (!object_pages(object))
			tmem_object_free_empty(bucket, object);
	}
	spin_unlock_irqrestore(&bucket->lock, flags);
}

/**
 * tmem_index_hold() - change the entry of an evicted page from retained to held
 * @key: pool and inode
 * @index: page number
 * @check: content check of the page
 * @where: set to the object's id and place if 0 is returned
 * @offset: set to the cookie offset of the entry if 0 is returned
 *
 * Return: 0; -ENOENT if there is no retained entry; -EPERM if the inode is bypassed; -EACCES if a
 * policy forbids it; -EILSEQ if the content check differs from that of the entry, which is then
 * erased.
 */
int tmem_index_hold(const struct tmem_key *key, pgoff_t index, u32 check, struct tmem_where *where,
		    u64 *offset)
{
	u32 nr = bucket_of(key->pool, key->ino);
	unsigned int bit = index & (LEAF_PAGES - 1);
	struct bucket *bucket = &tmem_buckets[nr];
	struct object *object;
	unsigned long flags;
	struct leaf *leaf;
	int err = -ENOENT;
	u64 entry;

	spin_lock_irqsave(&bucket->lock, flags);
	object = find_object(bucket, key->pool, key->ino);
	if (object && object->igen != key->igen) {
		tmem_object_detach(nr, object, TMEM_INVAL_INODE);
		object = NULL;
	}
	leaf = object ? leaf_load(object, index >> LEAF_SHIFT) : NULL;
	if (!leaf || !(leaf_retained(leaf) & BIT_ULL(bit)))
		goto unlock;
	entry = *leaf_entry(leaf, bit);
	if (tmem_is_bypassed(key->pool, key->ino)) {
		err = -EPERM;
	} else if (tmem_policy_never(key)) {
		err = -EACCES;
	} else if (tmem_entry_check(entry) != check) {
		err = -EILSEQ;
		tmem_leaf_erase(object, index >> LEAF_SHIFT, leaf, BIT_ULL(bit));
		note_erased(object, index, index, 1, TMEM_INVAL_DROPPED);
		if (!object_pages(object))
			tmem_object_free_empty(bucket, object);
	} else {
		err = 0;
		tmem_leaf_hold(object, leaf, BIT_ULL(bit));
		leaf->referenced = 1;
		where->object = object->id;
		where->pool = object->pool;
		where->bucket = nr;
		*offset = tmem_entry_offset(entry);
	}
unlock:
	spin_unlock_irqrestore(&bucket->lock, flags);
	return err;
}

/**
 * tmem_index_erase_offset() - erase the entry of a put whose page the host does not have
 * @nr: bucket of the put
 * @id: object of the put
 * @index: page number
 * @offset: cookie offset of the put; an entry with another offset belongs to another put, and stays
 *
 * Return: true if there was an entry with this offset.
 */
bool tmem_index_erase_offset(u32 nr, u64 id, u64 index, u64 offset)
{
	unsigned int bit = index & (LEAF_PAGES - 1);
	struct bucket *bucket = &tmem_buckets[nr];
	struct object *object;
	unsigned long flags;
	struct leaf *leaf;
	bool found;

	spin_lock_irqsave(&bucket->lock, flags);
	object = find_object_id(bucket, id);
	leaf = object ? leaf_load(object, index >> LEAF_SHIFT) : NULL;
	found = leaf && leaf_present(leaf) & BIT_ULL(bit) &&
		tmem_entry_offset(*leaf_entry(leaf, bit)) == offset;
	if (found) {
		tmem_leaf_erase(object, index >> LEAF_SHIFT, leaf, BIT_ULL(bit));
		note_erased(object, index, index, 1, TMEM_INVAL_DROPPED);
		if (!object_pages(object))
			tmem_object_free_empty(bucket, object);
	}
	spin_unlock_irqrestore(&bucket->lock, flags);
	return found;
}

/*
 * Erases a range of pages of an inode. Entries that existed at the call are gone at the return. The
 * function drops the lock about every LEAVES_PER_LOCK leaves. It then reschedules if @may_sleep is
 * true.
 */
static void erase_range(struct tmem_pool *pool, u64 ino, pgoff_t first, pgoff_t last,
			enum tmem_inval why, bool may_sleep)
{
	u32 nr = bucket_of(pool, ino);
	struct bucket *bucket = &tmem_buckets[nr];
	struct tmem_where where = { .bucket = nr };
	unsigned long i, erased = 0;
	unsigned int budget;
	struct object *object;
	unsigned long flags;
	struct leaf *leaf;

	if (first > last)
		return;
	if (!first && last >= TMEM_INDEX_MAX) {
		tmem_invalidate_inode(pool, ino, why);
		return;
	}
	i = first >> LEAF_SHIFT;
	do {
		budget = LEAVES_PER_LOCK;
		spin_lock_irqsave(&bucket->lock, flags);
		object = find_object(bucket, pool, ino);
		leaf = object ? leaf_find(object, &i, last >> LEAF_SHIFT) : NULL;
		while (leaf) {
			where.object = object->id;
			where.pool = object->pool;
			erased += tmem_leaf_erase(object, i, leaf, leaf_mask(i, first, last));
			if (!budget--)
				break;
			leaf = leaf_find_after(object, &i, last >> LEAF_SHIFT);
		}
		if (object && !object_pages(object)) {
			tmem_object_free_empty(bucket, object);
			leaf = NULL;
		}
		spin_unlock_irqrestore(&bucket->lock, flags);
		if (leaf && may_sleep)
			cond_resched();
	} while (leaf);

	if (!erased)
		return;
	tmem_count_inval(why, erased);
	trace_tmem_invalidate(pool->name, ino, first, min_t(u64, last, TMEM_INDEX_MAX), erased,
			      tmem_inval_name(why));
	tmem_queue_flush(&where, first,
			 last >= TMEM_INDEX_MAX ? VIRTIO_TMEM_TO_END : last - first + 1);
}

/**
 * tmem_invalidate() - erase the pages of a folio, or of another short range of an inode
 * @pool: file system
 * @ino: inode number
 * @first: first page number
 * @last: last page number, included
 * @why: reason, for the counters
 *
 * Context: any but NMI.
 */
void tmem_invalidate(struct tmem_pool *pool, u64 ino, pgoff_t first, pgoff_t last,
		     enum tmem_inval why)
{
	erase_range(pool, ino, first, last, why, false);
}

/**
 * tmem_invalidate_range() - erase a range of pages of an inode
 * @pool: file system
 * @ino: inode number
 * @first: first page number
 * @last: last page number, included
 * @why: reason, for the counters
 *
 * Context: process, may sleep.
 */
void tmem_invalidate_range(struct tmem_pool *pool, u64 ino, pgoff_t first, pgoff_t last,
			   enum tmem_inval why)
{
	might_sleep();
	erase_range(pool, ino, first, last, why, true);
}

/**
 * tmem_invalidate_inode() - erase all pages of an inode, without visiting them
 * @pool: file system
 * @ino: inode number
 * @why: reason, for the counters
 *
 * Context: any but NMI.
 */
void tmem_invalidate_inode(struct tmem_pool *pool, u64 ino, enum tmem_inval why)
{
	u32 nr = bucket_of(pool, ino);
	struct object *object;
	unsigned long flags;

	spin_lock_irqsave(&tmem_buckets[nr].lock, flags);
	object = find_object(&tmem_buckets[nr], pool, ino);
	if (object)
		tmem_object_detach(nr, object, why);
	spin_unlock_irqrestore(&tmem_buckets[nr].lock, flags);
}

/* Erases the entries of an earlier inode that had the inode number of @key. */
static void drop_stale(const struct tmem_key *key)
{
	u32 nr = bucket_of(key->pool, key->ino);
	struct object *object;
	unsigned long flags;

	spin_lock_irqsave(&tmem_buckets[nr].lock, flags);
	object = find_object(&tmem_buckets[nr], key->pool, key->ino);
	if (object && object->igen != key->igen)
		tmem_object_detach(nr, object, TMEM_INVAL_INODE);
	spin_unlock_irqrestore(&tmem_buckets[nr].lock, flags);
}

/*
 * Finds the object of an inode without the bucket lock. The object may be freed, or become the
 * object of another inode, at any moment.
 */
static struct object *find_object_rcu(struct bucket *bucket, const struct tmem_pool *pool, u64 ino)
{
	u32 id = READ_ONCE(pool->id);
	struct object *object;

	if (!id)
		return NULL;
	for (object = rcu_dereference(bucket->objects); object;
	     object = rcu_dereference(object->next))
		if (READ_ONCE(object->ino) == ino && READ_ONCE(object->pool) == id)
			return object;
	return NULL;
}

/**
 * tmem_held() - find out which pages have a held entry
 * @key: pool and inode
 * @index: first page number
 * @nr: number of pages
 * @held: bitmap of @nr bits: set to the pages that have a held entry
 *
 * This function takes no lock, so that a miss costs as little as a miss in the page cache. A page
 * whose entry is made or erased during the call may be reported as held or not.
 *
 * Context: any but NMI.
 *
 * Return: number of bits set.
 */
unsigned int tmem_held(const struct tmem_key *key, pgoff_t index, unsigned int nr,
		       unsigned long *held)
{
	struct bucket *bucket = &tmem_buckets[bucket_of(key->pool, key->ino)];
	unsigned int bit, count = 0;
	struct object *object;
	bool stale = false;
	struct leaf *leaf;
	unsigned long i;
	u64 mask, last;

	bitmap_zero(held, nr);
	if (!nr || !tmem_online())
		return 0;
	last = (u64)index + nr - 1;
	rcu_read_lock();
	object = find_object_rcu(bucket, key->pool, key->ino);
	if (object && READ_ONCE(object->igen) != key->igen) {
		stale = true;
		object = NULL;
	}
	if (object) {
		/*
		 * The pages are in one to nine leaves. A search for the next leaf costs more than a
		 * look-up of each leaf.
		 */
		for (i = index >> LEAF_SHIFT; i <= last >> LEAF_SHIFT; i++) {
			leaf = leaf_load(object, i);
			mask = leaf ? leaf_present(leaf) & ~leaf_retained(leaf) &
				      leaf_mask(i, index, last) : 0;
			for (; mask; mask &= mask - 1, count++) {
				bit = __ffs64(mask);
				__set_bit(((u64)i << LEAF_SHIFT) + bit - index, held);
			}
		}
	}
	rcu_read_unlock();
	if (stale)
		drop_stale(key);
	return count;
}

/**
 * tmem_index_retained() - find out whether a page has a retained entry
 * @key: pool and inode
 * @index: page number
 *
 * This function takes no lock, like tmem_held(). The answer may be outdated; tmem_index_hold()
 * checks again under the lock.
 *
 * Context: any but NMI.
 *
 * Return: true if there is a retained entry.
 */
bool tmem_index_retained(const struct tmem_key *key, pgoff_t index)
{
	struct bucket *bucket = &tmem_buckets[bucket_of(key->pool, key->ino)];
	struct object *object;
	struct leaf *leaf;
	bool retained;

	rcu_read_lock();
	object = find_object_rcu(bucket, key->pool, key->ino);
	leaf = object ? leaf_load(object, index >> LEAF_SHIFT) : NULL;
	retained = leaf && leaf_retained(leaf) & BIT_ULL(index & (LEAF_PAGES - 1));
	rcu_read_unlock();
	return retained;
}

/**
 * tmem_held_pages() - count the entries of an inode, held and retained
 * @key: pool and inode
 *
 * Context: any but NMI.
 *
 * Return: number of pages.
 */
unsigned long tmem_held_pages(const struct tmem_key *key)
{
	struct bucket *bucket = &tmem_buckets[bucket_of(key->pool, key->ino)];
	struct object *object;
	unsigned long flags, nr;

	spin_lock_irqsave(&bucket->lock, flags);
	object = find_object(bucket, key->pool, key->ino);
	nr = object && object->igen == key->igen ? object_pages(object) : 0;
	spin_unlock_irqrestore(&bucket->lock, flags);
	return nr;
}

/* --- set-up -------------------------------------------------------------------------------- */

/**
 * tmem_index_init() - allocate the slab caches and the hash table
 *
 * Return: 0 or -ENOMEM.
 */
int tmem_index_init(void)
{
	unsigned long nr, i;

	nr = clamp_t(unsigned long, tmem_budget_bytes() / BYTES_PER_BUCKET, BUCKETS_MIN,
		     BUCKETS_MAX);
	tmem_bucket_bits = ilog2(nr);
	nr = 1UL << tmem_bucket_bits;

	if (tmem_leaf_init())
		return -ENOMEM;
	tmem_buckets = kvmalloc_array(nr, sizeof(*tmem_buckets), GFP_KERNEL);
	if (!tmem_buckets) {
		tmem_leaf_exit();
		return -ENOMEM;
	}
	for (i = 0; i < nr; i++) {
		spin_lock_init(&tmem_buckets[i].lock);
		tmem_buckets[i].nr_made = 0;
		RCU_INIT_POINTER(tmem_buckets[i].objects, NULL);
	}
	tmem_index_budget_init((long)nr * sizeof(*tmem_buckets));
	return 0;
}

/**
 * tmem_index_exit() - free the index, after tmem_evict_exit()
 */
void tmem_index_exit(void)
{
	flush_work(&free_detached);
	TMEM_TEST_CHECK(tmem_index_bytes() == tmem_index_table_bytes);
	tmem_leaf_exit();
	kvfree(tmem_buckets);
}
