// SPDX-License-Identifier: GPL-2.0-only
/*
 * Objects and leaves of the index: the entries of blocks in as little memory as possible.
 *
 * An object has a tree (an XArray) of leaves of 64 pages. A leaf packs its entries in the order of
 * their pages. A full one moves to the next size. An object takes 72 bytes. A leaf takes 24 bytes
 * and 8 for each place, so 72 to 536. TMEM_SLAB_LINK comes on top. Every byte is charged before it
 * is allocated, XArray nodes included. Memory that the slab allocator cannot use, or keeps free in
 * its slabs, is not charged.
 *
 * An entry is held or retained. The page of a held entry is in the pool and not in the page cache.
 * The page of a retained entry is in both: a get brought it, and the host keeps it.
 */
#include <linux/mm.h>
#include <linux/slab.h>

#include "../compat.h"
#include "leaf.h"

#define LEAF_BYTES(places) (offsetof(struct leaf, word) + (LEAF_BITMAPS + (places)) * sizeof(u64))

/* Name and maximum number of entries of each class of leaves. */
static const struct {
	const char *name;
	u8 places;
} classes[] = {
	[TMEM_LEAF_6] = { "tmem_leaf_6", 6 },
	[TMEM_LEAF_14] = { "tmem_leaf_14", 14 },
	[TMEM_LEAF_30] = { "tmem_leaf_30", 30 },
	[TMEM_LEAF_64] = { "tmem_leaf_64", 64 },
};

static_assert(ARRAY_SIZE(classes) == NR_TMEM_CLASSES);

static struct kmem_cache *leaf_caches[NR_TMEM_CLASSES], *object_cache;

/*
 * Charges @bytes, plus @more, to the index, and allocates an object or leaf of @bytes. Returns it,
 * -ENOSPC if the index is full, or -ENOMEM.
 */
static void *cache_alloc(struct kmem_cache *cache, long bytes, long more)
{
	void *memory;

	bytes += TMEM_SLAB_LINK + more;
	if (!tmem_charge(bytes))
		return ERR_PTR(-ENOSPC);
	memory = kmem_cache_alloc(cache, GFP_INDEX);
	if (memory)
		return memory;
	tmem_uncharge(bytes);
	return ERR_PTR(-ENOMEM);
}

static void cache_free(struct kmem_cache *cache, long bytes, void *memory)
{
	tmem_uncharge(bytes + TMEM_SLAB_LINK);
	kmem_cache_free(cache, memory);
}

static void free_leaf(struct leaf *leaf)
{
	cache_free(leaf_caches[leaf->class], LEAF_BYTES(classes[leaf->class].places), leaf);
}

static void set_present(struct leaf *leaf, u64 pages)
{
	WRITE_ONCE(leaf->word[LEAF_PRESENT], pages);
}

static void set_retained(struct leaf *leaf, u64 pages)
{
	WRITE_ONCE(leaf->word[LEAF_RETAINED], pages);
}

/*
 * Fills a new leaf, with the entries of leaf @old if there is one. RCU readers may still read the
 * bitmaps of a freed leaf that had this memory.
 */
static void fill_leaf(struct leaf *leaf, enum tmem_class class, struct leaf *old)
{
	u64 present = old ? leaf_present(old) : 0;

	leaf->class = class;
	leaf->referenced = 1;
	set_present(leaf, present);
	set_retained(leaf, old ? leaf_retained(old) : 0);
	if (old)
		memcpy(leaf_entry(leaf, 0), leaf_entry(old, 0), hweight64(present) * sizeof(u64));
}

/* Adds to the number of entries of an object. */
static void count_pages(struct object *object, long pages)
{
	object->nr_pages += pages;
	tmem_index_add_pages(pages);
	tmem_pool_add_pages(object->pool, pages);
}

/* Adds to the number of retained entries of an object. */
static void count_retained(struct object *object, long pages)
{
	object->nr_retained += pages;
	tmem_index_add_retained(pages);
}

/* --- objects ------------------------------------------------------------------------------- */

/*
 * Allocates an object without entries. Returns the object, without a key and not in the table;
 * -ENOSPC if the index is full; or -ENOMEM.
 */
struct object *tmem_object_new(void)
{
	struct object *object = cache_alloc(object_cache, sizeof(*object), 0);

	if (IS_ERR(object))
		return object;
	object->nr_nodes = 0;
	object->nr_pages = 0;
	object->nr_retained = 0;
	xa_init(&object->leaves);
	return object;
}

/* Frees the memory of an object that can no longer be found and has no leaves. */
void tmem_object_release(struct object *object)
{
	/*
	 * Free nodes of the tree, too: a store that found no memory may leave empty nodes behind.
	 */
	xa_destroy(&object->leaves);
	tmem_uncharge(object->nr_nodes * TMEM_NODE_BYTES);
	cache_free(object_cache, sizeof(*object), object);
}

/* --- leaves -------------------------------------------------------------------------------- */

/* Enters a new leaf into a tree, with the entries of leaf @old if there is one. */
static struct leaf *new_leaf(struct object *object, unsigned long nr, enum tmem_class class,
			     struct leaf *old)
{
	struct xarray *leaves = &object->leaves;
	unsigned int charged = tmem_nodes_missing(leaves, nr);
	u32 before = object->nr_nodes;
	struct leaf *leaf;
	int err;

	leaf = cache_alloc(leaf_caches[class], LEAF_BYTES(classes[class].places),
			   charged * TMEM_NODE_BYTES);
	if (IS_ERR(leaf))
		return leaf;
	fill_leaf(leaf, class, old);
	xa_lock(leaves);
	err = tmem_nodes_store(leaves, nr, leaf, &object->nr_nodes);
	xa_unlock(leaves);
	if (!err)
		return leaf;
	free_leaf(leaf);
	tmem_uncharge((charged - (object->nr_nodes - before)) * TMEM_NODE_BYTES);
	return ERR_PTR(err);
}

/* Takes an empty leaf out of its tree, and frees it. */
static void remove_leaf(struct object *object, unsigned long nr, struct leaf *leaf)
{
	u32 before = object->nr_nodes;
	unsigned long flags;

	/* Interrupts are enabled if the caller owns the object. */
	xa_lock_irqsave(&object->leaves, flags);
	tmem_nodes_erase(&object->leaves, nr, &object->nr_nodes);
	xa_unlock_irqrestore(&object->leaves, flags);
	tmem_uncharge((before - object->nr_nodes) * TMEM_NODE_BYTES);
	free_leaf(leaf);
}

/* Returns leaf @nr with a place for one more entry. Otherwise returns -ENOSPC or -ENOMEM. */
static struct leaf *leaf_with_place(struct object *object, unsigned long nr)
{
	struct leaf *leaf, *old = leaf_load(object, nr);

	if (!old)
		return new_leaf(object, nr, TMEM_LEAF_6, NULL);
	if (hweight64(leaf_present(old)) < classes[old->class].places)
		return old;
	leaf = new_leaf(object, nr, old->class + 1, old);
	if (!IS_ERR(leaf))
		free_leaf(old);
	return leaf;
}

/*
 * Enters a page at a place of an object. The new entry is held and replaces the old one. Returns 0;
 * -ENOSPC if the index is full; or -ENOMEM. After an error, the old entry is still there.
 */
int tmem_leaf_store(struct object *object, u64 index, u64 entry)
{
	struct leaf *leaf = leaf_load(object, index >> LEAF_SHIFT);
	unsigned int bit = index & (LEAF_PAGES - 1);
	u64 *place, present;

	if (leaf && leaf_present(leaf) & BIT_ULL(bit)) {
		*leaf_entry(leaf, bit) = entry;
		tmem_leaf_hold(object, leaf, BIT_ULL(bit));
		leaf->referenced = 1;
		return 0;
	}
	leaf = leaf_with_place(object, index >> LEAF_SHIFT);
	if (IS_ERR(leaf))
		return PTR_ERR(leaf);
	present = leaf_present(leaf);
	place = leaf_entry(leaf, bit);
	memmove(place + 1, place, hweight64(present & ~(BIT_ULL(bit) - 1)) * sizeof(u64));
	*place = entry;
	set_present(leaf, present | BIT_ULL(bit));
	leaf->referenced = 1;
	count_pages(object, 1);
	return 0;
}

/*
 * Erases the pages of @mask from leaf @nr, and frees the leaf if it is empty. The caller frees the
 * object if it has no pages left. Returns the number of entries that were erased.
 */
unsigned int tmem_leaf_erase(struct object *object, unsigned long nr, struct leaf *leaf, u64 mask)
{
	u64 present = leaf_present(leaf), *from = leaf_entry(leaf, 0), *to = from;
	unsigned int erased = hweight64(present & mask);
	u64 rest;

	if (!erased)
		return 0;
	tmem_leaf_hold(object, leaf, mask);
	count_pages(object, -(long)erased);
	if (!(present & ~mask)) {
		remove_leaf(object, nr, leaf);
		return erased;
	}
	for (rest = present; rest; rest &= rest - 1, from++)
		if (!(mask & BIT_ULL(__ffs64(rest))))
			*to++ = *from;
	set_present(leaf, present & ~mask);
	return erased;
}

/*
 * Changes held entries of a leaf to retained ones. All pages of @mask have an entry that is held.
 */
void tmem_leaf_retain(struct object *object, struct leaf *leaf, u64 mask)
{
	if (!mask)
		return;
	set_retained(leaf, leaf_retained(leaf) | mask);
	count_retained(object, hweight64(mask));
}

/*
 * Changes retained entries of a leaf to held ones. Pages of @mask without a retained entry stay as
 * they are.
 */
void tmem_leaf_hold(struct object *object, struct leaf *leaf, u64 mask)
{
	u64 retained = leaf_retained(leaf);

	if (!(retained & mask))
		return;
	set_retained(leaf, retained & ~mask);
	count_retained(object, -(long)hweight64(retained & mask));
}

/*
 * Frees all leaves of an object that can no longer be found. The function takes each leaf out of
 * the tree, so that it enables interrupts after each leaf. xa_destroy() would free all nodes of the
 * tree with interrupts off. Sleeps.
 */
void tmem_leaf_free_all(struct object *object)
{
	struct leaf *leaf;
	unsigned long i;

	xa_for_each(&object->leaves, i, leaf) {
		remove_leaf(object, i, leaf);
		cond_resched();
	}
}

/* Creates the slab caches of objects and leaves. Returns 0 or -ENOMEM. */
int tmem_leaf_init(void)
{
	unsigned int i;

	BUILD_BUG_ON(LEAF_BYTES(LEAF_PAGES) + TMEM_SLAB_LINK +
		     DIV_ROUND_UP(TMEM_NODE_BYTES, XA_CHUNK_SIZE) >
		     LEAF_PAGES * TMEM_INDEX_PAGE_BYTES);
	/*
	 * The memory keeps its type while RCU readers run, because tmem_held() reads objects and
	 * leaves without a lock. It reads neither the id of an object nor the entries of a leaf, so
	 * the allocator's link has their place.
	 */
	object_cache = tmem_slab_create("tmem_object", sizeof(struct object),
					offsetof(struct object, id));
	if (!object_cache)
		return -ENOMEM;
	for (i = 0; i < NR_TMEM_CLASSES; i++) {
		leaf_caches[i] = tmem_slab_create(classes[i].name, LEAF_BYTES(classes[i].places),
						  LEAF_BYTES(0));
		if (!leaf_caches[i]) {
			tmem_leaf_exit();
			return -ENOMEM;
		}
	}
	return 0;
}

/* Destroys the slab caches, after all objects were freed. */
void tmem_leaf_exit(void)
{
	unsigned int i;

	kmem_cache_destroy(object_cache);
	for (i = 0; i < NR_TMEM_CLASSES; i++) {
		kmem_cache_destroy(leaf_caches[i]);
		leaf_caches[i] = NULL;
	}
}
