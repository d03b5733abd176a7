/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Internal interface of the index: objects and their leaves.
 *
 * Callers of all functions in this file hold the lock of the object's bucket, or own the object.
 * RCU readers may also call leaf_load(), leaf_present() and leaf_retained().
 */
#ifndef _TMEM_LEAF_H
#define _TMEM_LEAF_H

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

/*
 * Classes of objects and leaves, by their size. Each class has a slab cache. A small object has its
 * only leaf inside it, with up to 1, 2, 4, 8 or 16 entries. The leaves of a tree have 6, 14, 30 or
 * 64.
 */
enum tmem_class {
	TMEM_OBJECT_1, TMEM_OBJECT_2, TMEM_OBJECT_4, TMEM_OBJECT_8, TMEM_OBJECT_16,
	TMEM_OBJECT_TREE,
	TMEM_LEAF_6, TMEM_LEAF_14, TMEM_LEAF_30, TMEM_LEAF_64,
	NR_TMEM_CLASSES
};

/*
 * Number of pages, from page 0 on, that a small object can have. The bitmaps of 16 pages and the
 * class share a word, so a file of one page takes 48 bytes, and TMEM_SLAB_LINK.
 */
#define TMEM_SMALL_PAGES	16

/* Indexes of the two bitmaps, and of the first entry, among the words of a leaf of a tree. */
enum { LEAF_PRESENT, LEAF_RETAINED, LEAF_BITMAPS };

/* Entries of 64 neighbouring pages, or of the pages of a small object. */
struct leaf {
	/*
	 * enum tmem_class. Memory of a slab cache always has the same class, so RCU readers may
	 * depend on it.
	 */
	u8 class;
	u8 referenced;		/* an entry was stored since the evictor's last visit */
	/*
	 * Bitmaps of a small object. A leaf of a tree has them in word[LEAF_PRESENT] and
	 * word[LEAF_RETAINED].
	 */
	u16 present;		/* bit i is set if page i of the leaf has an entry */
	u16 retained;		/* bit i is set if that entry is retained; a subset of present */
	/* entries of the bits that are set in present, in order; in a tree, behind the bitmaps */
	u64 word[];
};

/*
 * An inode with entries. It is small while all of its entries are those of the first
 * TMEM_SMALL_PAGES pages. When an entry of a page behind them is stored, an object with a tree
 * replaces the small object, and stays until the last entry is erased.
 */
struct object {
	struct object __rcu *next;	/* in the chain of its bucket (chain.h) */
	u64 nr;				/* number of the object (struct tmem_key) */
	u64 id;				/* not read by RCU readers; see tmem_leaf_init() */
	u32 pool;
	union {
		struct leaf small;
		struct {
			u8 class;	/* TMEM_OBJECT_TREE; at the same offset as small.class */
			u32 nr_nodes;	/* nodes of leaves */
			unsigned long nr_pages;
			unsigned long nr_retained;	/* how many of nr_pages are retained */
			struct xarray leaves;
		} tree;
	};
};

static_assert(offsetof(struct object, small.class) == offsetof(struct object, tree.class));

int tmem_leaf_init(void);
void tmem_leaf_exit(void);
struct object *tmem_object_new(u64 index);
void tmem_object_release(struct object *object);
int tmem_leaf_store(struct object __rcu **head, struct object **where, u64 index, u64 entry);
unsigned int tmem_leaf_erase(struct object *object, unsigned long nr, struct leaf *leaf, u64 mask);
void tmem_leaf_free_all(struct object *object);
void tmem_leaf_retain(struct object *object, struct leaf *leaf, u64 mask);
void tmem_leaf_hold(struct object *object, struct leaf *leaf, u64 mask);

static inline bool object_is_small(const struct object *object)
{
	return READ_ONCE(object->small.class) < TMEM_OBJECT_TREE;
}

static inline unsigned long object_pages(const struct object *object)
{
	return object_is_small(object) ? hweight16(object->small.present) : object->tree.nr_pages;
}

static inline unsigned long object_retained(const struct object *object)
{
	return object_is_small(object) ? hweight16(object->small.retained) :
	       object->tree.nr_retained;
}

/* Returns leaf @nr of an object, or NULL. */
static inline struct leaf *leaf_load(struct object *object, unsigned long nr)
{
	if (object_is_small(object))
		return nr ? NULL : &object->small;
	return xa_load(&object->tree.leaves, nr);
}

/* Returns the first leaf from *@nr to @last, and sets *@nr to its number; or returns NULL. */
static inline struct leaf *leaf_find(struct object *object, unsigned long *nr, unsigned long last)
{
	if (object_is_small(object))
		return *nr ? NULL : &object->small;
	return xa_find(&object->tree.leaves, nr, last, XA_PRESENT);
}

/* Returns the first leaf behind *@nr, up to @last, and sets *@nr to its number; or returns NULL. */
static inline struct leaf *leaf_find_after(struct object *object, unsigned long *nr,
					   unsigned long last)
{
	if (object_is_small(object))
		return NULL;
	return xa_find_after(&object->tree.leaves, nr, last, XA_PRESENT);
}

static inline bool leaf_in_tree(const struct leaf *leaf)
{
	return READ_ONCE(leaf->class) > TMEM_OBJECT_TREE;
}

/* Returns a bitmap of the pages that have an entry. */
static inline u64 leaf_present(const struct leaf *leaf)
{
	return leaf_in_tree(leaf) ? READ_ONCE(leaf->word[LEAF_PRESENT]) :
	       READ_ONCE(leaf->present);
}

/* Returns a bitmap of the pages whose entry is retained; a subset of leaf_present(). */
static inline u64 leaf_retained(const struct leaf *leaf)
{
	return leaf_in_tree(leaf) ? READ_ONCE(leaf->word[LEAF_RETAINED]) :
	       READ_ONCE(leaf->retained);
}

/* Returns a pointer to the entry of page @bit. Entries are packed in the order of their pages. */
static inline u64 *leaf_entry(struct leaf *leaf, unsigned int bit)
{
	return leaf->word + (leaf_in_tree(leaf) ? LEAF_BITMAPS : 0) +
	       hweight64(leaf_present(leaf) & (BIT_ULL(bit) - 1));
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
