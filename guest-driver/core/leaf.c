// SPDX-License-Identifier: GPL-2.0-only
/*
 * Objects and leaves of the index: the entries of an inode in as little memory as possible.
 *
 * Most files are small, and the memory of the index is bounded. So an object has its entries inside
 * it while all of them are those of the first TMEM_SMALL_PAGES pages. Other objects have a tree (an
 * XArray) of leaves of 64 pages. Small objects and leaves pack their entries in the order of their
 * pages. A full one moves to the next size. A small object takes 40 bytes and 8 for each place, so
 * 48 to 168. An object with a tree takes 72. A leaf of a tree takes 24 bytes and 8 for each place,
 * so 72 to 536. TMEM_SLAB_LINK comes on top. Every byte is charged before it is allocated, XArray
 * nodes included. Memory that the slab allocator cannot use, or keeps free in its slabs, is not
 * charged.
 *
 * An entry is held or retained. The page of a held entry is in the pool and not in the page cache.
 * The page of a retained entry is in both: a get brought it, and the host keeps it.
 */
#include <linux/mm.h>
#include <linux/slab.h>

#include "../compat.h"
#include "chain.h"

#define OBJECT_BYTES(places) (offsetof(struct object, small.word) + (places) * sizeof(u64))
#define LEAF_BYTES(places) (offsetof(struct leaf, word) + (LEAF_BITMAPS + (places)) * sizeof(u64))

/*
 * Name, size in bytes and "places" of each class of objects and leaves. "places" is the number of
 * entries that an object or leaf of the class can have.
 */
static const struct {
	const char *name;
	unsigned short bytes;
	u8 places;
} classes[] = {
	[TMEM_OBJECT_1] = { "tmem_object_1", OBJECT_BYTES(1), 1 },
	[TMEM_OBJECT_2] = { "tmem_object_2", OBJECT_BYTES(2), 2 },
	[TMEM_OBJECT_4] = { "tmem_object_4", OBJECT_BYTES(4), 4 },
	[TMEM_OBJECT_8] = { "tmem_object_8", OBJECT_BYTES(8), 8 },
	[TMEM_OBJECT_16] = { "tmem_object_16", OBJECT_BYTES(16), 16 },
	[TMEM_OBJECT_TREE] = { "tmem_object_tree", sizeof(struct object), 0 },
	[TMEM_LEAF_6] = { "tmem_leaf_6", LEAF_BYTES(6), 6 },
	[TMEM_LEAF_14] = { "tmem_leaf_14", LEAF_BYTES(14), 14 },
	[TMEM_LEAF_30] = { "tmem_leaf_30", LEAF_BYTES(30), 30 },
	[TMEM_LEAF_64] = { "tmem_leaf_64", LEAF_BYTES(64), 64 },
};

static_assert(ARRAY_SIZE(classes) == NR_TMEM_CLASSES);

static struct kmem_cache *caches[NR_TMEM_CLASSES];

/*
 * Charges the size of an object or leaf of a class, plus @more bytes, to the index, and allocates
 * the object or leaf. Returns it, -ENOSPC if the index is full, or -ENOMEM.
 */
static void *class_alloc(enum tmem_class class, long more)
{
	long bytes = classes[class].bytes + TMEM_SLAB_LINK + more;
	void *memory;

	if (!tmem_charge(bytes))
		return ERR_PTR(-ENOSPC);
	memory = kmem_cache_alloc(caches[class], GFP_INDEX);
	if (memory)
		return memory;
	tmem_uncharge(bytes);
	return ERR_PTR(-ENOMEM);
}

static void class_free(enum tmem_class class, void *memory)
{
	tmem_uncharge(classes[class].bytes + TMEM_SLAB_LINK);
	kmem_cache_free(caches[class], memory);
}

static void set_present(struct leaf *leaf, u64 pages)
{
	if (leaf_in_tree(leaf))
		WRITE_ONCE(leaf->word[LEAF_PRESENT], pages);
	else
		WRITE_ONCE(leaf->present, pages);
}

static void set_retained(struct leaf *leaf, u64 pages)
{
	if (leaf_in_tree(leaf))
		WRITE_ONCE(leaf->word[LEAF_RETAINED], pages);
	else
		WRITE_ONCE(leaf->retained, pages);
}

/*
 * Fills a new leaf, with the entries of leaf @old if there is one. RCU readers may still read the
 * class and the bitmaps of a freed leaf that had this memory.
 */
static void fill_leaf(struct leaf *leaf, enum tmem_class class, struct leaf *old)
{
	u64 present = old ? leaf_present(old) : 0;

	WRITE_ONCE(leaf->class, class);
	leaf->referenced = 1;
	set_present(leaf, present);
	set_retained(leaf, old ? leaf_retained(old) : 0);
	if (old)
		memcpy(leaf_entry(leaf, 0), leaf_entry(old, 0), hweight64(present) * sizeof(u64));
}

/* Adds to the number of entries of an object. */
static void count_pages(struct object *object, long pages)
{
	if (!object_is_small(object))
		object->tree.nr_pages += pages;
	tmem_index_add_pages(pages);
	tmem_pool_add_pages(object->pool, pages);
}

/* Adds to the number of retained entries of an object. */
static void count_retained(struct object *object, long pages)
{
	if (!object_is_small(object))
		object->tree.nr_retained += pages;
	tmem_index_add_retained(pages);
}

/* --- objects ------------------------------------------------------------------------------- */

static struct object *new_object(enum tmem_class class)
{
	struct object *object = class_alloc(class, 0);

	if (IS_ERR(object))
		return object;
	if (class == TMEM_OBJECT_TREE) {
		WRITE_ONCE(object->tree.class, class);
		object->tree.nr_nodes = 0;
		object->tree.nr_pages = 0;
		object->tree.nr_retained = 0;
		xa_init(&object->tree.leaves);
	} else {
		fill_leaf(&object->small, class, NULL);
	}
	return object;
}

/**
 * tmem_object_new() - allocate an object without entries
 * @index: number of the page that the caller will store first
 *
 * Return: the object, without a key and not in the table; -ENOSPC if the index is full; -ENOMEM.
 */
struct object *tmem_object_new(u64 index)
{
	return new_object(index < TMEM_SMALL_PAGES ? TMEM_OBJECT_1 : TMEM_OBJECT_TREE);
}

/**
 * tmem_object_release() - free the memory of an object
 * @object: the object, which can no longer be found and has no leaves in a tree that are in use
 */
void tmem_object_release(struct object *object)
{
	/*
	 * Free nodes of the tree, too: a store that found no memory may leave empty nodes behind.
	 */
	if (!object_is_small(object)) {
		xa_destroy(&object->tree.leaves);
		tmem_uncharge(object->tree.nr_nodes * TMEM_NODE_BYTES);
	}
	class_free(object->small.class, object);
}

/* --- leaves -------------------------------------------------------------------------------- */

/* Enters a new leaf into a tree, with the entries of leaf @old if there is one. */
static struct leaf *new_leaf(struct object *object, unsigned long nr, enum tmem_class class,
			     struct leaf *old)
{
	struct xarray *leaves = &object->tree.leaves;
	unsigned int charged = tmem_nodes_missing(leaves, nr);
	struct leaf *leaf = class_alloc(class, charged * TMEM_NODE_BYTES);
	u32 before = object->tree.nr_nodes;
	int err;

	if (IS_ERR(leaf))
		return leaf;
	fill_leaf(leaf, class, old);
	xa_lock(leaves);
	err = tmem_nodes_store(leaves, nr, leaf, &object->tree.nr_nodes);
	xa_unlock(leaves);
	if (!err)
		return leaf;
	class_free(class, leaf);
	tmem_uncharge((charged - (object->tree.nr_nodes - before)) * TMEM_NODE_BYTES);
	return ERR_PTR(err);
}

/* Takes an empty leaf out of its tree, and frees it. */
static void remove_leaf(struct object *object, unsigned long nr, struct leaf *leaf)
{
	u32 before = object->tree.nr_nodes;
	unsigned long flags;

	/* Interrupts are enabled if the caller owns the object. */
	xa_lock_irqsave(&object->tree.leaves, flags);
	tmem_nodes_erase(&object->tree.leaves, nr, &object->tree.nr_nodes);
	xa_unlock_irqrestore(&object->tree.leaves, flags);
	tmem_uncharge((before - object->tree.nr_nodes) * TMEM_NODE_BYTES);
	class_free(leaf->class, leaf);
}

/*
 * Replaces the small object *@where of chain @head by an object of another class, with the same
 * entries and the same place in the chain. Returns 0, -ENOSPC or -ENOMEM. After an error, *@where
 * is unchanged.
 */
static int change_class(struct object __rcu **head, struct object **where, enum tmem_class class)
{
	struct object *old = *where, *object = new_object(class);
	struct leaf *leaf;

	if (IS_ERR(object))
		return PTR_ERR(object);
	if (class == TMEM_OBJECT_TREE) {
		for (class = TMEM_LEAF_6; classes[class].places < object_pages(old); class++)
			;
		leaf = new_leaf(object, 0, class, &old->small);
		if (IS_ERR(leaf)) {
			tmem_object_release(object);
			return PTR_ERR(leaf);
		}
		object->tree.nr_pages = object_pages(old);
		object->tree.nr_retained = object_retained(old);
	} else {
		fill_leaf(&object->small, class, &old->small);
	}
	object->id = old->id;
	/*
	 * A reader without the lock may read these fields now, because an object that was freed at
	 * this address may have been in the table. So write them with WRITE_ONCE().
	 */
	WRITE_ONCE(object->nr, old->nr);
	WRITE_ONCE(object->pool, old->pool);
	chain_replace(head, old, object);
	tmem_object_release(old);
	*where = object;
	return 0;
}

/*
 * Returns the leaf of a page with a place for one more entry. Otherwise returns -ENOSPC or -ENOMEM.
 */
static struct leaf *leaf_with_place(struct object __rcu **head, struct object **where, u64 index)
{
	unsigned long nr = index >> LEAF_SHIFT;
	struct leaf *leaf, *old;
	int err;

	if (object_is_small(*where) && index >= TMEM_SMALL_PAGES) {
		err = change_class(head, where, TMEM_OBJECT_TREE);
		if (err)
			return ERR_PTR(err);
	}
	leaf = leaf_load(*where, nr);
	if (!leaf)
		return new_leaf(*where, nr, TMEM_LEAF_6, NULL);
	if (hweight64(leaf_present(leaf)) < classes[leaf->class].places)
		return leaf;
	if (object_is_small(*where)) {
		err = change_class(head, where, leaf->class + 1);
		return err ? ERR_PTR(err) : &(*where)->small;
	}
	old = leaf;
	leaf = new_leaf(*where, nr, old->class + 1, old);
	if (!IS_ERR(leaf))
		class_free(old->class, old);
	return leaf;
}

/**
 * tmem_leaf_store() - enter a page
 * @head: chain of the object
 * @where: object of the page; set to the object that takes its place if it must change its class
 * @index: page number
 * @entry: new entry, which is held and replaces the old one
 *
 * Return: 0; -ENOSPC if the index is full; -ENOMEM. After an error, the old entry is still there.
 */
int tmem_leaf_store(struct object __rcu **head, struct object **where, u64 index, u64 entry)
{
	struct leaf *leaf = leaf_load(*where, index >> LEAF_SHIFT);
	unsigned int bit = index & (LEAF_PAGES - 1);
	u64 *place, present;

	if (leaf && leaf_present(leaf) & BIT_ULL(bit)) {
		*leaf_entry(leaf, bit) = entry;
		tmem_leaf_hold(*where, leaf, BIT_ULL(bit));
		leaf->referenced = 1;
		return 0;
	}
	leaf = leaf_with_place(head, where, index);
	if (IS_ERR(leaf))
		return PTR_ERR(leaf);
	present = leaf_present(leaf);
	place = leaf_entry(leaf, bit);
	memmove(place + 1, place, hweight64(present & ~(BIT_ULL(bit) - 1)) * sizeof(u64));
	*place = entry;
	set_present(leaf, present | BIT_ULL(bit));
	leaf->referenced = 1;
	count_pages(*where, 1);
	return 0;
}

/**
 * tmem_leaf_erase() - erase pages of a leaf, and free a leaf of a tree if it is empty
 * @object: object of the leaf
 * @nr: number of the leaf
 * @leaf: the leaf
 * @mask: pages to erase, one bit each
 *
 * The caller frees the object if it has no pages left.
 *
 * Return: number of entries that were erased.
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
	if (!(present & ~mask) && leaf_in_tree(leaf)) {
		remove_leaf(object, nr, leaf);
		return erased;
	}
	for (rest = present; rest; rest &= rest - 1, from++)
		if (!(mask & BIT_ULL(__ffs64(rest))))
			*to++ = *from;
	set_present(leaf, present & ~mask);
	return erased;
}

/**
 * tmem_leaf_retain() - change held entries of a leaf to retained ones
 * @object: object of the leaf
 * @leaf: the leaf
 * @mask: pages, one bit each; all have an entry that is held
 */
void tmem_leaf_retain(struct object *object, struct leaf *leaf, u64 mask)
{
	if (!mask)
		return;
	set_retained(leaf, leaf_retained(leaf) | mask);
	count_retained(object, hweight64(mask));
}

/**
 * tmem_leaf_hold() - change retained entries of a leaf to held ones
 * @object: object of the leaf
 * @leaf: the leaf
 * @mask: pages, one bit each; those without a retained entry stay as they are
 */
void tmem_leaf_hold(struct object *object, struct leaf *leaf, u64 mask)
{
	u64 retained = leaf_retained(leaf);

	if (!(retained & mask))
		return;
	set_retained(leaf, retained & ~mask);
	count_retained(object, -(long)hweight64(retained & mask));
}

/**
 * tmem_leaf_free_all() - free all leaves of an object's tree
 * @object: the object, which can no longer be found
 *
 * The function takes each leaf out of the tree, so that it enables interrupts after each leaf.
 * xa_destroy() would free all nodes of the tree with interrupts off.
 *
 * Context: process, may sleep.
 */
void tmem_leaf_free_all(struct object *object)
{
	struct leaf *leaf;
	unsigned long i;

	if (object_is_small(object))
		return;
	xa_for_each(&object->tree.leaves, i, leaf) {
		remove_leaf(object, i, leaf);
		cond_resched();
	}
}

/**
 * tmem_leaf_init() - create the slab caches of objects and leaves
 *
 * Return: 0 or -ENOMEM.
 */
int tmem_leaf_init(void)
{
	unsigned int i;

	BUILD_BUG_ON(OBJECT_BYTES(1) != 48);
	BUILD_BUG_ON(LEAF_BYTES(LEAF_PAGES) + TMEM_SLAB_LINK +
		     DIV_ROUND_UP(TMEM_NODE_BYTES, XA_CHUNK_SIZE) >
		     LEAF_PAGES * TMEM_INDEX_PAGE_BYTES);
	for (i = 0; i < NR_TMEM_CLASSES; i++) {
		/*
		 * The memory keeps its type while RCU readers run, because tmem_held() reads
		 * objects and leaves without a lock. It reads neither the id of an object nor the
		 * entries of a leaf, so the allocator's link has their place.
		 */
		caches[i] = tmem_slab_create(classes[i].name, classes[i].bytes,
					     i <= TMEM_OBJECT_TREE ? offsetof(struct object, id) :
					     LEAF_BYTES(0));
		if (!caches[i]) {
			tmem_leaf_exit();
			return -ENOMEM;
		}
	}
	return 0;
}

/**
 * tmem_leaf_exit() - destroy the slab caches, after all objects were freed
 */
void tmem_leaf_exit(void)
{
	unsigned int i;

	for (i = 0; i < NR_TMEM_CLASSES; i++) {
		kmem_cache_destroy(caches[i]);
		caches[i] = NULL;
	}
}
