// SPDX-License-Identifier: GPL-2.0-only
/*
 * Index of the pages that the host is believed to hold, with cookie and content check.
 *
 * The index is the authority: a page that is not in it is never requested, so erasing an entry is a
 * complete invalidation. It is a fixed hash table of objects. An object has an XArray of leaves of
 * 64 pages (leaf.c).
 *
 * Races. An object hashes to one bucket. The lock of that bucket protects the entries of the
 * object. Puts also read the id of its pool under it. So this lock orders any two operations on an
 * object.
 * - Put and invalidation: the hooks call tmem_put() under the lock of the record of the block. They
 *   erase the record under this lock, and invalidate afterwards. So a put that found the record has
 *   taken the lock of the bucket before the invalidation, and the invalidation finds the entry.
 * - Put and erasing of all entries: tmem_pools_forget() sets the ids of all pools to 0. Each entry
 *   belongs to an object that carries the id of its pool, ids are never reused, and a put reads
 *   the id under the lock. So an entry that a put made earlier is unreachable afterwards. The
 *   sweep runs after the ids have changed and visits each bucket under its lock, so it frees all
 *   of these entries.
 * - Put answered REFUSED and a later put of the same page: the entry is erased only if it has the
 *   cookie of the refused put.
 *
 * - Retained entries: a get leaves the entry of a page that the host may retain, and marks it, so
 *   that no other get takes it. The folio of the page is locked. If the get ends without the page,
 *   it erases the entry before the folio is unlocked, unless reclaim has meanwhile put another page
 *   with the same content, which it had removed before. An invalidation erases
 *   retained entries as it erases others. Reclaim makes an entry held only if the content is the
 *   same, after the checks of a put.
 *
 * tmem_held(), which finds out whether a get is worthwhile, reads without the lock. Objects and
 * leaves come from slab caches whose memory keeps its type while RCU readers run. So the reader may
 * find a freed, a new or an unrelated object, but never other memory. A wrong answer costs a read
 * from the disk, or a get that finds no entry under the lock.
 *
 * The index never waits, never fails to erase, and allocates only without waiting.
 */
#include <linux/hash.h>
#include <linux/log2.h>

#include "../trace.h"
#include "index.h"

#define BUCKET_BITS	ilog2(NR_TMEM_BUCKETS)

struct bucket tmem_buckets[NR_TMEM_BUCKETS];

/* Counts and traces an entry that was erased. The caller holds the lock of its bucket. */
static void note_erased(const struct object *object, u64 index)
{
	u64 block = (object->nr << TMEM_OBJECT_BITS) + index;

	tmem_count_inval(TMEM_INVAL_DROPPED, 1);
	trace_tmem_invalidate(tmem_pool_name(object->pool), block, block, 1,
			      tmem_inval_name(TMEM_INVAL_DROPPED));
}

/* --- buckets and objects ------------------------------------------------------------------- */

/* Returns the bucket of an object, which is the same for all of its pages. */
u32 tmem_index_bucket(const struct tmem_key *key)
{
	return hash_64(key->object * GOLDEN_RATIO_64 + key->pool->serial, BUCKET_BITS);
}

/* Returns an object of the bucket @bucket, which is locked, or NULL. */
static struct object *find_object(struct bucket *bucket, const struct tmem_key *key)
{
	u32 id = READ_ONCE(key->pool->id);
	struct object *object;

	lockdep_assert_held(&bucket->lock);
	if (!id)
		return NULL;
	hlist_for_each_entry(object, &bucket->objects, node)
		if (object->nr == key->object && object->pool == id)
			return object;
	return NULL;
}

/* Frees an object without pages, unless its pool is private. */
static void free_if_empty(struct object *object)
{
	if (object->nr_pages || object->private)
		return;
	hlist_del_rcu(&object->node);
	tmem_object_release(object);
}

/* Makes an object, in which the caller then stores a page. */
static struct object *new_object(u32 nr, const struct tmem_key *key, u32 pool)
{
	struct bucket *bucket = &tmem_buckets[nr];
	struct object *object = tmem_object_new();

	if (IS_ERR(object))
		return object;
	object->id = ++bucket->nr_made << BUCKET_BITS | nr;
	object->private = key->pool->private;
	/*
	 * A reader without the lock may read these fields now, because an object that was freed at
	 * this address may have been in the table. So write them with WRITE_ONCE().
	 */
	WRITE_ONCE(object->nr, key->object);
	WRITE_ONCE(object->pool, pool);
	hlist_add_head_rcu(&object->node, &bucket->objects);
	return object;
}

/* --- operations ---------------------------------------------------------------------------- */

/*
 * Stores @entry for the page with number @index of the object @key. Returns 0, and sets @where;
 * -ENODEV if the pool is not at the host; -ENOSPC if the index is full; or -ENOMEM. After an error,
 * the page has no entry, also not an earlier one.
 */
int tmem_index_store(const struct tmem_key *key, pgoff_t index, u64 entry,
		     struct tmem_where *where)
{
	u32 nr = tmem_index_bucket(key);
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
	object = find_object(bucket, key);
	if (TMEM_INJECT(nomem))
		err = -ENOMEM;
	if (!object && !err) {
		object = new_object(nr, key, pool);
		if (IS_ERR(object)) {
			err = PTR_ERR(object);
			object = NULL;
		}
	}
	if (object && !err)
		err = tmem_leaf_store(object, index, entry);
	if (err && object) {
		leaf = leaf_load(object, index >> LEAF_SHIFT);
		if (leaf && tmem_leaf_erase(object, index >> LEAF_SHIFT, leaf,
					    BIT_ULL(index & (LEAF_PAGES - 1))))
			note_erased(object, index);
		free_if_empty(object);
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

/*
 * Takes the held entries of pages from place @index on, to request these pages. All pages lie in
 * one leaf (64 pages, aligned). A bit in @want is set for each page that is wanted. An entry whose
 * bit in @keep is set stays, marked as retained; other wanted entries are erased.
 *
 * Sets @entry to the entry of each page, 0 where none is held, and @where if anything was taken.
 */
void tmem_index_take(const struct tmem_key *key, pgoff_t index, unsigned int nr,
		     const unsigned long *want, u64 keep, u64 *entry, struct tmem_where *where)
{
	u32 bucket_nr = tmem_index_bucket(key);
	unsigned int base = index & (LEAF_PAGES - 1);
	struct bucket *bucket = &tmem_buckets[bucket_nr];
	struct object *object;
	unsigned long flags;
	struct leaf *leaf;
	u64 mask = 0, held;
	unsigned int i;

	memset(entry, 0, nr * sizeof(*entry));
	spin_lock_irqsave(&bucket->lock, flags);
	object = find_object(bucket, key);
	if (!object)
		goto unlock;
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
	free_if_empty(object);
unlock:
	spin_unlock_irqrestore(&bucket->lock, flags);
}

static struct object *find_object_id(struct bucket *bucket, u64 id)
{
	struct object *object;

	lockdep_assert_held(&bucket->lock);
	hlist_for_each_entry(object, &bucket->objects, node)
		if (object->id == id)
			return object;
	return NULL;
}

/*
 * Erases retained entries of pages that a get did not bring or the host did not retain. All pages
 * lie in one leaf; bit i of @mask is set for page @index + i. The caller has locked their folios,
 * which keeps other tasks from making new entries for these pages.
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
		free_if_empty(object);
	}
	spin_unlock_irqrestore(&bucket->lock, flags);
}

/*
 * Changes the entry of an evicted page from retained to held. Returns 0, and sets @where and the
 * cookie offset of the entry; -ENOENT if there is no retained entry; -EILSEQ if the content check
 * of the page (@check) differs from that of the entry, which is then erased.
 */
int tmem_index_hold(const struct tmem_key *key, pgoff_t index, u32 check, struct tmem_where *where,
		    u64 *offset)
{
	u32 nr = tmem_index_bucket(key);
	unsigned int bit = index & (LEAF_PAGES - 1);
	struct bucket *bucket = &tmem_buckets[nr];
	struct object *object;
	unsigned long flags;
	struct leaf *leaf;
	int err = -ENOENT;
	u64 entry;

	spin_lock_irqsave(&bucket->lock, flags);
	object = find_object(bucket, key);
	leaf = object ? leaf_load(object, index >> LEAF_SHIFT) : NULL;
	if (!leaf || !(leaf_retained(leaf) & BIT_ULL(bit)))
		goto unlock;
	entry = *leaf_entry(leaf, bit);
	if (tmem_entry_check(entry) != check) {
		err = -EILSEQ;
		tmem_leaf_erase(object, index >> LEAF_SHIFT, leaf, BIT_ULL(bit));
		note_erased(object, index);
		free_if_empty(object);
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

/*
 * Erases the entry of a put whose page the host does not have. An entry with another cookie offset
 * belongs to another put, and stays. Returns whether there was an entry with this offset.
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
		note_erased(object, index);
		free_if_empty(object);
	}
	spin_unlock_irqrestore(&bucket->lock, flags);
	return found;
}

/*
 * Entries that existed at the call are gone at the return. The function drops the lock about every
 * LEAVES_PER_LOCK leaves.
 */
void tmem_invalidate(const struct tmem_key *key, u64 first, u64 last, enum tmem_inval why)
{
	u32 nr = tmem_index_bucket(key);
	struct bucket *bucket = &tmem_buckets[nr];
	struct tmem_where where = { .bucket = nr };
	unsigned long i = first >> LEAF_SHIFT, erased = 0;
	unsigned int budget;
	struct object *object;
	unsigned long flags;
	struct leaf *leaf;

	do {
		budget = LEAVES_PER_LOCK;
		spin_lock_irqsave(&bucket->lock, flags);
		object = find_object(bucket, key);
		leaf = object ? leaf_find(object, &i, last >> LEAF_SHIFT) : NULL;
		if (object) {
			where.object = object->id;
			where.pool = object->pool;
		}
		while (leaf) {
			erased += tmem_leaf_erase(object, i, leaf, leaf_mask(i, first, last));
			if (!budget--)
				break;
			leaf = leaf_find_after(object, &i, last >> LEAF_SHIFT);
		}
		if (object && !object->nr_pages) {
			free_if_empty(object);
			leaf = NULL;
		}
		spin_unlock_irqrestore(&bucket->lock, flags);
	} while (leaf);

	if (erased) {
		tmem_count_inval(why, erased);
		trace_tmem_invalidate(key->pool->name, tmem_key_block(key, first),
				      tmem_key_block(key, last), erased, tmem_inval_name(why));
	}
	/* The host may have a page without an entry, for example after a get that was late. */
	if (erased || (why == TMEM_INVAL_FREED && where.object))
		tmem_queue_flush(&where, first, last - first + 1, why == TMEM_INVAL_FREED);
}

/*
 * Returns whether a page that the host has stored now has no entry any more, because it was erased
 * while the put was on its way. Only private pools are looked at. Context: any but NMI.
 */
bool tmem_index_orphan(u32 nr, u64 id, u64 index)
{
	struct bucket *bucket = &tmem_buckets[nr];
	struct object *object;
	unsigned long flags;
	struct leaf *leaf;
	bool orphan = false;

	spin_lock_irqsave(&bucket->lock, flags);
	object = find_object_id(bucket, id);
	if (object && object->private) {
		leaf = leaf_load(object, index >> LEAF_SHIFT);
		orphan = !leaf || !(leaf_present(leaf) & BIT_ULL(index & (LEAF_PAGES - 1)));
	}
	spin_unlock_irqrestore(&bucket->lock, flags);
	return orphan;
}

/*
 * Finds an object without the bucket lock. The object may be freed, or become another object, at
 * any moment.
 */
static struct object *find_object_rcu(const struct tmem_key *key)
{
	u32 id = READ_ONCE(key->pool->id);
	struct object *object;

	if (!id)
		return NULL;
	hlist_for_each_entry_rcu(object, &tmem_buckets[tmem_index_bucket(key)].objects, node)
		if (READ_ONCE(object->nr) == key->object && READ_ONCE(object->pool) == id)
			return object;
	return NULL;
}

/*
 * This function takes no lock, so that a miss costs as little as a miss in the page cache. A page
 * whose entry is made or erased during the call may be reported as held or not.
 */
unsigned int tmem_held(const struct tmem_key *key, pgoff_t index, unsigned int nr,
		       unsigned long *held)
{
	unsigned int bit, count = 0;
	struct object *object;
	struct leaf *leaf;
	unsigned long i;
	u64 mask, last;

	bitmap_zero(held, nr);
	if (!nr || !tmem_online())
		return 0;
	last = (u64)index + nr - 1;
	rcu_read_lock();
	object = find_object_rcu(key);
	if (object) {
		/* A search for the next leaf costs more than a look-up of each leaf. */
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
	return count;
}

/*
 * Returns whether a page has a retained entry, without a lock, like tmem_held(). The answer may be
 * outdated; tmem_index_hold() checks again under the lock. Context: any but NMI.
 */
bool tmem_index_retained(const struct tmem_key *key, pgoff_t index)
{
	struct object *object;
	struct leaf *leaf;
	bool retained;

	rcu_read_lock();
	object = find_object_rcu(key);
	leaf = object ? leaf_load(object, index >> LEAF_SHIFT) : NULL;
	retained = leaf && leaf_retained(leaf) & BIT_ULL(index & (LEAF_PAGES - 1));
	rcu_read_unlock();
	return retained;
}

/* --- set-up -------------------------------------------------------------------------------- */

/* Allocates the slab caches, and sets up the hash table. Returns 0 or -ENOMEM. */
int tmem_index_init(void)
{
	unsigned int i;

	if (tmem_leaf_init())
		return -ENOMEM;
	for (i = 0; i < ARRAY_SIZE(tmem_buckets); i++)
		spin_lock_init(&tmem_buckets[i].lock);
	tmem_index_budget_init(sizeof(tmem_buckets));
	return 0;
}

/* Frees the slab caches, after tmem_evict_exit(). */
void tmem_index_exit(void)
{
	TMEM_TEST_CHECK(tmem_index_bytes() == tmem_index_table_bytes);
	tmem_leaf_exit();
}
