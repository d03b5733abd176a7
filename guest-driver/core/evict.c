// SPDX-License-Identifier: GPL-2.0-only
/*
 * Removal of index entries in bulk: the objects of pools that were freed or emptied, and, when the
 * index is full, the leaves into which no entry was stored for the longest time.
 *
 * The walk goes through the table bucket by bucket, because only the table has all objects. A list
 * of objects would cost memory, and a lock for each put. The walk never delays a put for long: it
 * drops a bucket's lock after some leaves, and frees objects after it has unlinked them and dropped
 * the lock.
 */
#include "../compat.h"
#include "index.h"

/*
 * The evictor makes room in a full index until the index uses this many sixteenths of its limit.
 */
#define FULL_SIXTEENTHS		13
/*
 * Leaves whose entries the evictor erases. RETAINED_LEAVES: those with retained entries only,
 * because a leaf takes the same memory until its last entry is erased.
 */
enum victims { ALL_LEAVES, RETAINED_LEAVES };

/* Number of objects that a sweep takes out of a bucket before it drops the bucket's lock. */
#define SWEEP_OBJECTS		64

/*
 * Place at which the evictor continues: its bucket, and the object and leaf in this bucket as for
 * evict_step(). Used by the work item only.
 */
static unsigned int evict_hand;
static u64 evict_object = U64_MAX;
static unsigned long evict_leaf;

/*
 * Frees all objects whose pool id is no longer in use. Their entries were counted as erased when
 * the pool lost its id.
 */
static void sweep_work_fn(struct work_struct *work)
{
	struct hlist_node *next;
	struct object *object;
	unsigned int budget;
	unsigned long i;

	TMEM_TEST_COUNT(sweeps);
	for (i = 0; i < NR_TMEM_BUCKETS; i += !!budget) {
		HLIST_HEAD(freed);

		budget = SWEEP_OBJECTS;
		spin_lock_irq(&tmem_buckets[i].lock);
		hlist_for_each_entry_safe(object, next, &tmem_buckets[i].objects, node) {
			if (tmem_pool_live(object->pool))
				continue;
			/* The pool lost the number of its pages with its id. */
			tmem_index_add_pages(-(long)object->nr_pages);
			tmem_index_add_retained(-(long)object->nr_retained);
			hlist_del_rcu(&object->node);
			hlist_add_head(&object->node, &freed);
			if (!--budget)
				break;	/* continue in this bucket after the lock was dropped */
		}
		spin_unlock_irq(&tmem_buckets[i].lock);
		hlist_for_each_entry_safe(object, next, &freed, node) {
			tmem_leaf_free_all(object);
			tmem_object_release(object);
			cond_resched();
		}
		cond_resched();
	}
}

static DECLARE_WORK(sweep_work, sweep_work_fn);

/*
 * Frees the objects of all pools that have lost their ids, in the background. A walk through the
 * table of a guest with 1 TiB takes 0.2 s, so that an unmount does not wait for it. No put or get
 * reaches the objects meanwhile. Context: any but NMI.
 */
void tmem_index_sweep_start(void)
{
	queue_work(tmem_system_wq, &sweep_work);
}

/*
 * Frees the objects of all pools that have lost their ids. Sleeps until the walk through the table
 * is complete.
 */
void tmem_index_sweep(void)
{
	tmem_index_sweep_start();
	flush_work(&sweep_work);
}

/*
 * Runs one step of the evictor: visits about LEAVES_PER_LOCK leaves of a bucket, beginning with
 * leaf *@nr of object *@at. Erases the leaves that match @victims. A leaf into which
 * an entry was stored since the last visit stays, except with RETAINED_LEAVES. Sets *@at and *@nr
 * to the place at which the next step begins. Returns false if the bucket is done.
 */
static bool evict_step(struct bucket *bucket, enum victims victims, u64 *at, unsigned long *nr)
{
	struct hlist_node *next;
	struct object *object;
	unsigned int budget = LEAVES_PER_LOCK;
	unsigned long evicted = 0, retained_evicted = 0;
	struct leaf *leaf;
	u64 retained;
	bool more = false;

	spin_lock_irq(&bucket->lock);
	hlist_for_each_entry_safe(object, next, &bucket->objects, node) {
		/*
		 * The list is in descending order of ids, because new objects are added at its
		 * head. Skip the objects that earlier steps have visited.
		 */
		if (object->id > *at)
			continue;
		if (victims == RETAINED_LEAVES && !object->nr_retained)
			continue;
		if (object->id < *at)
			*nr = 0;
		*at = object->id;
		leaf = leaf_find(object, nr, ULONG_MAX);
		while (leaf) {
			retained = leaf_retained(leaf);
			if (victims != RETAINED_LEAVES && leaf->referenced) {
				leaf->referenced = 0;
			} else if (victims != RETAINED_LEAVES || retained == leaf_present(leaf)) {
				retained_evicted += hweight64(retained);
				evicted += tmem_leaf_erase(object, *nr, leaf, ~0ULL);
			}
			if (!budget--) {
				(*nr)++;	/* continue after this leaf in the next step */
				more = true;
				break;
			}
			leaf = leaf_find_after(object, nr, ULONG_MAX);
		}
		if (!object->nr_pages && !object->private) {
			hlist_del_rcu(&object->node);
			tmem_object_release(object);
		}
		if (more)
			break;
	}
	spin_unlock_irq(&bucket->lock);
	tmem_count_n(TMEM_STAT_index_evicted, evicted - retained_evicted);
	tmem_count_n(TMEM_STAT_retained_evicted, retained_evicted);
	return more;
}

/*
 * Erases entries until the index uses at most @low bytes or @visits buckets were visited to their
 * end. The function may stop inside a bucket, because one object may have most entries of the
 * index. The next call continues there.
 */
static void evict(enum victims victims, unsigned long visits, long low)
{
	while (visits && atomic_long_read(&tmem_index_used_bytes) > low) {
		if (!evict_step(&tmem_buckets[evict_hand], victims, &evict_object, &evict_leaf)) {
			evict_object = U64_MAX;
			evict_leaf = 0;
			evict_hand = (evict_hand + 1) & (NR_TMEM_BUCKETS - 1);
			visits--;
		}
		cond_resched();
	}
}

/*
 * Makes room in a full index. It first erases leaves with only retained entries. Their pages are in
 * the page cache, so the guest only has to put copies at their next eviction. Then, like the CLOCK
 * algorithm, it erases leaves into which no entry was stored since its last visit. The driver does
 * not tell the host: the host's own eviction later drops its copies of these pages.
 */
static void evict_work_fn(struct work_struct *work)
{
	long low = tmem_index_table_bytes + tmem_index_entry_bytes() / 16 * FULL_SIXTEENTHS;
	unsigned long evicted = tmem_stat_sum(TMEM_STAT_index_evicted, TMEM_STAT_index_evicted);
	struct tmem_dev *dev;

	/* Policies alone may fill a small index. The evictor cannot free them. */
	if (!tmem_index_pages())
		return;
	/* A walk that begins inside a bucket visits the first part of this bucket at its end. */
	if (tmem_index_retained_pages())
		evict(RETAINED_LEAVES, NR_TMEM_BUCKETS + 1, low);
	evict(ALL_LEAVES, 2 * NR_TMEM_BUCKETS + 1, low);
	evicted = tmem_stat_sum(TMEM_STAT_index_evicted, TMEM_STAT_index_evicted) - evicted;
	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	if (dev)
		tmem_admit_count_evictions(dev, evicted);
	rcu_read_unlock();
}

/* Sets up the evictor, before the index is used. */
void tmem_evict_init(void)
{
	INIT_WORK(&tmem_evict_work, evict_work_fn);
}

/* Stops the evictor and empties the index, after all pools were freed. */
void tmem_evict_exit(void)
{
	cancel_work_sync(&tmem_evict_work);
	tmem_index_sweep();
}
