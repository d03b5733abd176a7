/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Slots of the put rings, and the requests that are made from them. ring.c fills slots, and send.c
 * empties them. Functions that a put calls are inline, because puts run with interrupts off.
 *
 * Other files of the core use cookies and sequence numbers and do not access slots.
 */
#ifndef _TMEM_SLOT_H
#define _TMEM_SLOT_H

#include "core.h"

/*
 * States of a slot. Slot i describes a page of the put ring, whose data are in page i of the
 * groups.
 */
enum tmem_slot_state { TMEM_SLOT_FREE, TMEM_SLOT_FILLING, TMEM_SLOT_READY, TMEM_SLOT_SKIP };

struct tmem_slot {
	/* cookie of the page; 0 while the data may change; gets read it without a lock */
	u64 cookie;
	u64 object;
	u64 index;
	u64 base;		/* cookie minus offset */
	u64 offset;		/* cookie minus cookie base, as in the index entry */
	u32 pool;
	u32 bucket;		/* bucket of the index that has the entry */
	u32 epoch;		/* dev->epoch at the time of the put */
	u32 flags;		/* VIRTIO_TMEM_PUT_... */
	u8 state;		/* enum tmem_slot_state */
	bool private;		/* of a private pool */
};

struct tmem_put_batch {
	struct tmem_req req;
	u64 first;		/* sequence number of the batch's first slot */
	unsigned int count;
	struct {
		struct virtio_tmem_req hdr;
		struct virtio_tmem_put_page page[VIRTIO_TMEM_BATCH_MAX];
	} out;
	struct {
		struct virtio_tmem_resp resp;
		u8 result[VIRTIO_TMEM_BATCH_MAX];
	} in;
};

struct tmem_flush_range {
	u64 object;
	u64 index;
	u64 nr_pages;
	u32 pool;
	u32 epoch;		/* dev->epoch when the range was queued */
	bool must;		/* see tmem_queue_flush() */
};

struct tmem_flush_batch {
	struct tmem_req req;
	bool must;		/* of at least one range */
	struct {
		struct virtio_tmem_req hdr;
		struct virtio_tmem_range range[VIRTIO_TMEM_BATCH_MAX];
	} out;
	struct virtio_tmem_resp resp;
};

/* Reference to a retained page that was evicted unchanged. */
struct tmem_ref {
	u64 object;
	u64 index;
	u64 cookie;
	u64 offset;		/* cookie minus cookie base, as in the index entry */
	u32 pool;
	u32 bucket;		/* bucket of the index that has the entry */
	/* dev->epoch, read before the entry changed from retained to held */
	u32 epoch;
};

struct tmem_ref_batch {
	struct tmem_req req;
	unsigned int count;
	u64 offset[VIRTIO_TMEM_BATCH_MAX];
	u32 bucket[VIRTIO_TMEM_BATCH_MAX];
	struct {
		struct virtio_tmem_req hdr;
		struct virtio_tmem_ref_page page[VIRTIO_TMEM_BATCH_MAX];
	} out;
	struct {
		struct virtio_tmem_resp resp;
		u8 result[VIRTIO_TMEM_BATCH_MAX];
	} in;
};

void tmem_ring_free(struct tmem_queue *queue);

/*
 * Returns the place in the put ring of the slot and the data with sequence number @seq. The place
 * may by now belong to another sequence number, so a reader compares the cookie.
 */
static inline unsigned int place_of(struct tmem_queue *queue, u64 seq)
{
	unsigned int group = READ_ONCE(queue->map[seq / TMEM_GROUP_PAGES % queue->dev->nr_groups]);

	return group * TMEM_GROUP_PAGES + seq % TMEM_GROUP_PAGES;
}

static inline void *data_at(struct tmem_dev *dev, unsigned int place)
{
	return dev->group[place / TMEM_GROUP_PAGES] + place % TMEM_GROUP_PAGES * PAGE_SIZE;
}

static inline struct tmem_slot *slot_of(struct tmem_queue *queue, u64 seq)
{
	return &queue->dev->slot[place_of(queue, seq)];
}

static inline u8 slot_state(const struct tmem_slot *slot)
{
	/* Read the slot after its state; pairs with put(). */
	return smp_load_acquire(&slot->state);
}

static inline void *data_of(struct tmem_queue *queue, u64 seq)
{
	return data_at(queue->dev, place_of(queue, seq));
}

#endif /* _TMEM_SLOT_H */
