/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Chain of the objects in one bucket of the index.
 *
 * An object has one pointer, to the next object. An hlist would need two, and the memory of the
 * index is bounded. So removing an object takes a walk from the head of the chain, as finding an
 * object does.
 *
 * The caller holds the lock of the bucket, or no other task can reach the chain. RCU readers follow
 * the pointers with rcu_dereference(). If an object moves to another chain meanwhile, such a reader
 * continues in that chain.
 */
#ifndef _TMEM_CHAIN_H
#define _TMEM_CHAIN_H

#include <linux/rcupdate.h>

#include "leaf.h"

/* Returns the object to which @link points, or NULL at the end of the chain. */
static inline struct object *chain_object(struct object __rcu **link)
{
	return rcu_dereference_protected(*link, true);
}

/* Adds an object at the head of a chain. */
static inline void chain_add(struct object __rcu **head, struct object *object)
{
	/* An RCU reader may read the field now: the object may have been in another chain. */
	RCU_INIT_POINTER(object->next, chain_object(head));
	rcu_assign_pointer(*head, object);
}

/* Returns the pointer of a chain that points to @object, which is in the chain. */
static inline struct object __rcu **chain_link(struct object __rcu **head,
					       const struct object *object)
{
	struct object *other;

	while ((other = chain_object(head)) != object)
		head = &other->next;
	return head;
}

/*
 * Removes the object to which @link points. RCU readers that have reached the object continue with
 * the next one.
 */
static inline void chain_cut(struct object __rcu **link)
{
	rcu_assign_pointer(*link, chain_object(&chain_object(link)->next));
}

/*
 * Returns the pointer that leads to the next object of a loop over a chain: the one in @object, or
 * @link, which led to @object, if the loop has removed @object.
 */
static inline struct object __rcu **chain_step(struct object __rcu **link, struct object *object)
{
	return chain_object(link) == object ? &object->next : link;
}

/* Removes an object, which is in the chain. */
static inline void chain_remove(struct object __rcu **head, struct object *object)
{
	chain_cut(chain_link(head, object));
}

/* Removes the first object of a chain, and returns it; or returns NULL. */
static inline struct object *chain_pop(struct object __rcu **head)
{
	struct object *object = chain_object(head);

	if (object)
		chain_cut(head);
	return object;
}

#endif /* _TMEM_CHAIN_H */
