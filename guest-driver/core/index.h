/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Internal interface of the index: the table of objects, for index.c (operations on one inode) and
 * evict.c (removal in bulk). The parts that a put needs are inline.
 *
 * Objects in the table are accessed only under the lock of their bucket, except by the RCU readers
 * of tmem_held().
 */
#ifndef _TMEM_INDEX_H
#define _TMEM_INDEX_H

#include <linux/hash.h>

#include "chain.h"

/*
 * Number of leaves that are visited before the bucket's lock is dropped: about 10 us with
 * interrupts off.
 */
#define LEAVES_PER_LOCK		32

struct bucket {
	spinlock_t lock;	/* guards all fields of the bucket; see index.c */
	/* number of objects made in this bucket; part of the objects' ids */
	u64 nr_made;
	struct object __rcu *objects;	/* chain; a new object is the first */
};

extern struct bucket *tmem_buckets;
extern unsigned int tmem_bucket_bits;

void tmem_object_detach(u32 bucket, struct object *object, enum tmem_inval why);
void tmem_object_free(struct object *object);
void tmem_object_free_empty(struct bucket *bucket, struct object *object);

/* Subtracts the pages of an object that is taken out of the index from the numbers of entries. */
static inline void uncount_object(const struct object *object)
{
	tmem_index_add_pages(-(long)object_pages(object));
	tmem_pool_add_pages(object->pool, -(long)object_pages(object));
	tmem_index_add_retained(-(long)object_retained(object));
}

static inline u32 bucket_of(const struct tmem_pool *pool, u64 ino)
{
	return hash_64(ino * GOLDEN_RATIO_64 + pool->serial, tmem_bucket_bits);
}

static inline struct object *find_object(struct bucket *bucket, const struct tmem_pool *pool,
					 u64 ino)
{
	u32 id = READ_ONCE(pool->id);
	struct object *object;

	lockdep_assert_held(&bucket->lock);
	if (!id)
		return NULL;
	for (object = chain_object(&bucket->objects); object;
	     object = chain_object(&object->next))
		if (object->ino == ino && object->pool == id)
			return object;
	return NULL;
}

#endif /* _TMEM_INDEX_H */
