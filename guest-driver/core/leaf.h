/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Internal interface of the index: objects and their leaves.
 *
 * Callers of all functions in this file hold the lock of the object's bucket, or own the object.
 */
#ifndef _TMEM_LEAF_H
#define _TMEM_LEAF_H

#include "budget.h"

#define LEAF_SHIFT		6
#define LEAF_PAGES		64

/*
 * Bytes of index for each page held of a file that is read in order: the entry and its share of the
 * leaf, of the XArray node and of memory that the slab allocator cannot use. The documentation and
 * sysfs state this number.
 */
#define TMEM_INDEX_PAGE_BYTES	9

/*
 * The slab allocator keeps its list of free objects beside these objects and not inside them,
 * because readers may still read an object that was freed.
 */
#define TMEM_SLAB_LINK		((long)sizeof(void *))

struct leaf {
	u64 present;		/* bit i is set if page i of the leaf has an entry */
	u64 retained;		/* part of present: the page is in the page cache, too */
	u8 class;
	u8 referenced;		/* an entry was stored since the evictor's last visit */
	u64 entry[];		/* entries of the set bits, in their order */
};

struct object {
	struct hlist_node node;
	u64 ino;
	u64 id;
	u32 igen;
	u32 pool;
	unsigned long nr_pages;
	unsigned long nr_retained;	/* part of nr_pages */
	struct xarray leaves;
};

int tmem_leaf_init(void);
void tmem_leaf_exit(void);
int tmem_leaf_store(struct object *object, u64 index, u64 entry);
unsigned int tmem_leaf_erase(struct object *object, unsigned long nr, struct leaf *leaf, u64 mask);
void tmem_leaf_free_all(struct object *object);
void tmem_leaf_retain(struct object *object, struct leaf *leaf, u64 mask);
void tmem_leaf_hold(struct object *object, struct leaf *leaf, u64 mask);

/* Returns the place of a page's entry among the entries present. */
static inline unsigned int leaf_rank(const struct leaf *leaf, unsigned int bit)
{
	return hweight64(leaf->present & (BIT_ULL(bit) - 1));
}

/* Returns the bits of leaf @nr that lie within first .. last. */
static inline u64 leaf_mask(unsigned long nr, u64 first, u64 last)
{
	u64 start = (u64)nr << LEAF_SHIFT;
	unsigned int low = first > start ? first - start : 0;
	unsigned int high = min_t(u64, last - start, LEAF_PAGES - 1);

	return GENMASK_ULL(high, low);
}

#endif /* _TMEM_LEAF_H */
