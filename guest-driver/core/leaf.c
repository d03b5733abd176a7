// SPDX-License-Identifier: GPL-2.0-only
/*
 * Leaves of the index: the entries of 64 neighbouring pages in as little memory as possible.
 *
 * A leaf packs its entries, in the order of their pages, in 6, 14, 30 or 64 places. A full leaf
 * moves to the next size. Most files are small, and the memory of the index is bounded. Every byte
 * is charged before it is allocated, XArray nodes included. Memory that the slab allocator cannot
 * use is not charged.
 *
 * An entry is held or retained. The page of a held entry is in the pool and not in the page cache.
 * The page of a retained entry is in both: a get brought it, and the host keeps it.
 */
#include <linux/mm.h>
#include <linux/slab.h>

#include "leaf.h"

static const u8 leaf_capacity[] = { 6, 14, 30, 64 };
static const char *const leaf_name[] = {
	"tmem_leaf_6", "tmem_leaf_14", "tmem_leaf_30", "tmem_leaf_64"
};

static struct kmem_cache *leaf_cache[ARRAY_SIZE(leaf_capacity)];

static size_t leaf_bytes(unsigned int class)
{
	return sizeof(struct leaf) + leaf_capacity[class] * sizeof(u64);
}

static void leaf_free(struct leaf *leaf)
{
	tmem_uncharge(leaf_bytes(leaf->class) + TMEM_SLAB_LINK);
	kmem_cache_free(leaf_cache[leaf->class], leaf);
}

static struct leaf *new_leaf(struct object *object, unsigned long nr, unsigned int class,
			     const struct leaf *old)
{
	long node = old || !tmem_alone_in_node(&object->leaves, nr) ? 0 : sizeof(struct xa_node);
	long bytes = leaf_bytes(class) + TMEM_SLAB_LINK + node;
	struct leaf *leaf;

	if (!tmem_charge(bytes))
		return ERR_PTR(-ENOSPC);
	leaf = kmem_cache_alloc(leaf_cache[class], GFP_INDEX);
	if (!leaf)
		goto nomem;
	/* A reader without a lock may still read a freed leaf whose memory this leaf has now. */
	WRITE_ONCE(leaf->present, old ? old->present : 0);
	WRITE_ONCE(leaf->retained, old ? old->retained : 0);
	leaf->class = class;
	leaf->referenced = 1;
	if (old)
		memcpy(leaf->entry, old->entry, leaf_capacity[old->class] * sizeof(u64));
	if (xa_is_err(xa_store(&object->leaves, nr, leaf, GFP_INDEX))) {
		kmem_cache_free(leaf_cache[class], leaf);
		goto nomem;
	}
	return leaf;
nomem:
	tmem_uncharge(bytes);
	return ERR_PTR(-ENOMEM);
}

/* Takes a leaf out of its object. The caller frees the leaf. */
static void remove_leaf(struct object *object, unsigned long nr)
{
	xa_erase(&object->leaves, nr);
	if (tmem_alone_in_node(&object->leaves, nr))
		tmem_uncharge(sizeof(struct xa_node));
}

/**
 * tmem_leaf_store() - enter a page
 * @object: object of the page
 * @index: page number
 * @entry: new entry, which is held and replaces the old one
 *
 * Return: 0; -ENOSPC if the index is full, or -ENOMEM: an old entry is still there then.
 */
int tmem_leaf_store(struct object *object, u64 index, u64 entry)
{
	unsigned int bit = index & (LEAF_PAGES - 1), nr, at;
	struct leaf *leaf, *old;

	leaf = xa_load(&object->leaves, index >> LEAF_SHIFT);
	if (!leaf) {
		leaf = new_leaf(object, index >> LEAF_SHIFT, 0, NULL);
		if (IS_ERR(leaf))
			return PTR_ERR(leaf);
	}
	leaf->referenced = 1;
	at = leaf_rank(leaf, bit);
	if (leaf->present & BIT_ULL(bit)) {
		leaf->entry[at] = entry;
		tmem_leaf_hold(object, leaf, BIT_ULL(bit));
		return 0;
	}
	nr = hweight64(leaf->present);
	if (nr == leaf_capacity[leaf->class]) {
		old = leaf;
		leaf = new_leaf(object, index >> LEAF_SHIFT, old->class + 1, old);
		if (IS_ERR(leaf))
			return PTR_ERR(leaf);
		leaf_free(old);
	}
	memmove(&leaf->entry[at + 1], &leaf->entry[at], (nr - at) * sizeof(u64));
	leaf->entry[at] = entry;
	WRITE_ONCE(leaf->present, leaf->present | BIT_ULL(bit));
	object->nr_pages++;
	tmem_index_add_pages(1);
	return 0;
}

/**
 * tmem_leaf_erase() - erase pages of a leaf, and free the leaf if it is empty
 * @object: object of the leaf
 * @nr: number of the leaf
 * @leaf: the leaf
 * @mask: pages to erase, one bit each
 *
 * Return: number of entries that were erased.
 */
unsigned int tmem_leaf_erase(struct object *object, unsigned long nr, struct leaf *leaf, u64 mask)
{
	unsigned int erased = hweight64(leaf->present & mask);
	unsigned int from = 0, to = 0, bit;
	u64 present = leaf->present;

	if (!erased)
		return 0;
	tmem_leaf_hold(object, leaf, mask);
	object->nr_pages -= erased;
	tmem_index_add_pages(-(long)erased);
	if (!(present & ~mask)) {
		remove_leaf(object, nr);
		leaf_free(leaf);
		return erased;
	}
	for (; present; present &= present - 1, from++) {
		bit = __ffs64(present);
		if (!(mask & BIT_ULL(bit)))
			leaf->entry[to++] = leaf->entry[from];
	}
	WRITE_ONCE(leaf->present, leaf->present & ~mask);
	return erased;
}

/**
 * tmem_leaf_retain() - make held entries of a leaf retained
 * @object: object of the leaf
 * @leaf: the leaf
 * @mask: pages, one bit each; all have an entry that is held
 */
void tmem_leaf_retain(struct object *object, struct leaf *leaf, u64 mask)
{
	long pages = hweight64(mask);

	if (!pages)
		return;
	WRITE_ONCE(leaf->retained, leaf->retained | mask);
	object->nr_retained += pages;
	tmem_index_add_retained(pages);
}

/**
 * tmem_leaf_hold() - make retained entries of a leaf held
 * @object: object of the leaf
 * @leaf: the leaf
 * @mask: pages, one bit each; those without a retained entry stay as they are
 */
void tmem_leaf_hold(struct object *object, struct leaf *leaf, u64 mask)
{
	long pages = hweight64(leaf->retained & mask);

	if (!pages)
		return;
	WRITE_ONCE(leaf->retained, leaf->retained & ~mask);
	object->nr_retained -= pages;
	tmem_index_add_retained(-pages);
}

/**
 * tmem_leaf_free_all() - free all leaves of an object
 * @object: the object, which can no longer be found
 */
void tmem_leaf_free_all(struct object *object)
{
	unsigned long i, node = ULONG_MAX;
	struct leaf *leaf;

	xa_for_each(&object->leaves, i, leaf) {
		if (i && i >> XA_CHUNK_SHIFT != node) {
			node = i >> XA_CHUNK_SHIFT;
			tmem_uncharge(sizeof(struct xa_node));
		}
		leaf_free(leaf);
	}
	xa_destroy(&object->leaves);
}

/**
 * tmem_leaf_init() - create the slab caches of leaves
 *
 * Return: 0 or -ENOMEM.
 */
int tmem_leaf_init(void)
{
	unsigned int i;

	BUILD_BUG_ON(sizeof(struct leaf) + LEAF_PAGES * sizeof(u64) + TMEM_SLAB_LINK +
		     DIV_ROUND_UP(sizeof(struct xa_node), XA_CHUNK_SIZE) >
		     LEAF_PAGES * TMEM_INDEX_PAGE_BYTES);
	for (i = 0; i < ARRAY_SIZE(leaf_cache); i++) {
		/* tmem_held() reads leaves without a lock. */
		leaf_cache[i] = kmem_cache_create(leaf_name[i], leaf_bytes(i), 0,
						  SLAB_TYPESAFE_BY_RCU, NULL);
		if (!leaf_cache[i]) {
			tmem_leaf_exit();
			return -ENOMEM;
		}
	}
	return 0;
}

/**
 * tmem_leaf_exit() - destroy the slab caches, after all leaves were freed
 */
void tmem_leaf_exit(void)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(leaf_cache); i++) {
		kmem_cache_destroy(leaf_cache[i]);
		leaf_cache[i] = NULL;
	}
}
