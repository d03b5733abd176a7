/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Internal interface of the index: objects and their leaves.
 *
 * Callers of all functions in this file hold the lock of the object's bucket, or own the object.
 * RCU readers may also call leaf_load(), leaf_present() and leaf_retained().
 */
#ifndef _TMEM_LEAF_H
#define _TMEM_LEAF_H

#include <linux/rculist.h>
#include <linux/xarray.h>

#include "budget.h"

#define LEAF_SHIFT		6
#define LEAF_PAGES		64

/*
 * Bytes of index for each held page of a file that is read in order: the entry, and a share of the
 * leaf, of the XArray node and of memory that the slab allocator cannot use. The documentation and
 * sysfs state this number.
 */
#define TMEM_INDEX_PAGE_BYTES	9

/* Classes of leaves, by their maximum number of entries. Each class has a slab cache. */
enum tmem_class { TMEM_LEAF_6, TMEM_LEAF_14, TMEM_LEAF_30, TMEM_LEAF_64, NR_TMEM_CLASSES };

/* Indexes of the two bitmaps, and of the first entry, among the words of a leaf. */
enum { LEAF_PRESENT, LEAF_RETAINED, LEAF_BITMAPS };

/* Entries of 64 neighbouring blocks. */
struct leaf {
	u8 class;		/* enum tmem_class */
	u8 referenced;		/* an entry was stored since the evictor's last visit */
	/*
	 * word[LEAF_PRESENT]: bit i is set if page i of the leaf has an entry. word[LEAF_RETAINED]:
	 * bit i is set if that entry is retained. Behind the bitmaps are the entries of the bits
	 * that are set in the first one, in order.
	 */
	u64 word[];
};

/*
 * An object with entries. It is freed when its last entry is erased. An object of a private pool
 * stays until the pool loses its id, because its id names pages of which the index has no entry.
 */
struct object {
	struct hlist_node node;		/* in its bucket (index.h) */
	u64 nr;				/* number of the object (struct tmem_key) */
	u64 id;				/* not read by RCU readers; see tmem_leaf_init() */
	u32 pool;
	bool private;			/* of a private pool */
	u32 nr_nodes;			/* nodes of leaves */
	unsigned long nr_pages;
	unsigned long nr_retained;	/* how many of nr_pages are retained */
	struct xarray leaves;
};

int tmem_leaf_init(void);
void tmem_leaf_exit(void);
struct object *tmem_object_new(void);
void tmem_object_release(struct object *object);
int tmem_leaf_store(struct object *object, u64 index, u64 entry);
unsigned int tmem_leaf_erase(struct object *object, unsigned long nr, struct leaf *leaf, u64 mask);
void tmem_leaf_free_all(struct object *object);
void tmem_leaf_retain(struct object *object, struct leaf *leaf, u64 mask);
void tmem_leaf_hold(struct object *object, struct leaf *leaf, u64 mask);

/* Returns leaf @nr of an object, or NULL. */
static inline struct leaf *leaf_load(struct object *object, unsigned long nr)
{
	return xa_load(&object->leaves, nr);
}

/* Returns the first leaf from *@nr to @last, and sets *@nr to its number; or returns NULL. */
static inline struct leaf *leaf_find(struct object *object, unsigned long *nr, unsigned long last)
{
	return xa_find(&object->leaves, nr, last, XA_PRESENT);
}

/* Returns the first leaf behind *@nr, up to @last, and sets *@nr to its number; or returns NULL. */
static inline struct leaf *leaf_find_after(struct object *object, unsigned long *nr,
					   unsigned long last)
{
	return xa_find_after(&object->leaves, nr, last, XA_PRESENT);
}

/* Returns a bitmap of the pages that have an entry. */
static inline u64 leaf_present(const struct leaf *leaf)
{
	return READ_ONCE(leaf->word[LEAF_PRESENT]);
}

/* Returns a bitmap of the pages whose entry is retained; a subset of leaf_present(). */
static inline u64 leaf_retained(const struct leaf *leaf)
{
	return READ_ONCE(leaf->word[LEAF_RETAINED]);
}

/* Returns a pointer to the entry of page @bit. Entries are packed in the order of their pages. */
static inline u64 *leaf_entry(struct leaf *leaf, unsigned int bit)
{
	return leaf->word + LEAF_BITMAPS + hweight64(leaf_present(leaf) & (BIT_ULL(bit) - 1));
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
