/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Inside of the index: objects and their leaves, and the memory that both may use.
 *
 * Everything here is called with the lock of the object's bucket held, or by who owns the object.
 */
#ifndef _TMEM_LEAF_H
#define _TMEM_LEAF_H

#include "core.h"

#define LEAF_SHIFT		6
#define LEAF_PAGES		64

/*
 * The page is being freed while we run, mostly by reclaim: take the memory from the caches, with
 * some access to reserves (a hundred times as much is being freed) but none to the reclaimer's.
 */
#define GFP_INDEX (__GFP_HIGH | __GFP_KSWAPD_RECLAIM | __GFP_NOMEMALLOC | __GFP_NOWARN)

/*
 * Stated in docs and sysfs: bytes of index for a page held of a file that is read in order, which
 * are its entry and its share of leaf, XArray node and what the slab allocator cannot use.
 */
#define TMEM_INDEX_PAGE_BYTES	9

/*
 * The slab allocator keeps its list of free objects beside them, not in them, where readers may
 * still look at one that was freed.
 */
#define TMEM_SLAB_LINK		((long)sizeof(void *))

struct leaf {
	u64 present;		/* bit i: page i of the leaf has an entry */
	u8 class;
	u8 referenced;		/* stored to since the evictor last came by */
	u64 entry[];		/* of the set bits, in their order */
};

struct object {
	struct hlist_node node;
	u64 ino;
	u64 id;
	u32 igen;
	u32 pool;
	unsigned long nr_pages;
	struct xarray leaves;
};

extern long tmem_index_limit_bytes;
extern atomic_long_t tmem_index_used_bytes;
extern atomic_long_t tmem_index_nr_pages;

int tmem_leaf_init(void);
void tmem_leaf_exit(void);
long tmem_index_limit(void);
bool tmem_charge(long bytes);
void tmem_uncharge(long bytes);
bool tmem_alone_in_node(struct xarray *xa, unsigned long index);
int tmem_leaf_store(struct object *object, u64 index, u64 entry);
unsigned int tmem_leaf_erase(struct object *object, unsigned long nr, struct leaf *leaf, u64 mask);
void tmem_leaf_free_all(struct object *object);

/* Place of a page's entry among those present. */
static inline unsigned int leaf_rank(const struct leaf *leaf, unsigned int bit)
{
	return hweight64(leaf->present & (BIT_ULL(bit) - 1));
}

/* Bits of leaf @nr that lie within first .. last. */
static inline u64 leaf_mask(unsigned long nr, u64 first, u64 last)
{
	u64 start = (u64)nr << LEAF_SHIFT;
	unsigned int low = first > start ? first - start : 0;
	unsigned int high = min_t(u64, last - start, LEAF_PAGES - 1);

	return GENMASK_ULL(high, low);
}

#endif /* _TMEM_LEAF_H */
