/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Internal interface of the index: the table of objects, for index.c (operations on one object)
 * and evict.c (removal in bulk).
 *
 * Objects in the table are accessed only under the lock of their bucket, except by the RCU readers
 * of tmem_held(). If an object moves to another list meanwhile, such a reader continues in that
 * list.
 */
#ifndef _TMEM_INDEX_H
#define _TMEM_INDEX_H

#include "leaf.h"

/*
 * Number of leaves that are visited before the bucket's lock is dropped: about 10 us with
 * interrupts off.
 */
#define LEAVES_PER_LOCK		32

struct bucket {
	spinlock_t lock;	/* guards all fields of the bucket; see index.c */
	/* number of objects made in this bucket; part of the objects' ids */
	u64 nr_made;
	struct hlist_head objects;	/* a new object is the first */
};

/*
 * Number of buckets, a power of two. Blocks of all file systems together have 32 bits (areas.c), so
 * there are 16,384 objects in use at most, which is four for each bucket.
 */
#define NR_TMEM_BUCKETS	4096

extern struct bucket tmem_buckets[NR_TMEM_BUCKETS];

#endif /* _TMEM_INDEX_H */
