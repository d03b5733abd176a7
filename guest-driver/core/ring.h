/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Internal interface of the put rings: slots and requests, for ring.c, which fills them, and
 * feeder.c, which empties them. The parts that a put needs are inline, because it runs with
 * interrupts off.
 *
 * Other files of the core use cookies and sequence numbers and do not access slots.
 */
#ifndef _TMEM_RING_H
#define _TMEM_RING_H

#include "core.h"

/* States of a slot. Slot i holds a page of the put ring; its data are page i of the blocks. */
enum tmem_slot_state { TMEM_SLOT_FREE, TMEM_SLOT_FILLING, TMEM_SLOT_READY, TMEM_SLOT_SKIP };

struct tmem_slot {
	u64 cookie;		/* 0 while the data may change; gets read it without a lock */
	u64 object;
	u64 index;
	u64 base;		/* cookie = base + offset */
	u64 offset;		/* the same as in the index entry */
	u32 pool;
	u32 bucket;		/* bucket of the index, to find the entry again */
	u32 epoch;		/* dev->epoch at the time of the put */
	u32 flags;		/* VIRTIO_TMEM_PUT_... */
	u8 state;		/* enum tmem_slot_state */
};

struct tmem_put_batch {
	struct tmem_req req;
	u64 first;		/* sequence number of the first slot */
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
	u32 epoch;
};

struct tmem_flush_batch {
	struct tmem_req req;
	struct {
		struct virtio_tmem_req hdr;
		struct virtio_tmem_range range[VIRTIO_TMEM_BATCH_MAX];
	} out;
	struct virtio_tmem_resp resp;
};

void tmem_ring_free(struct tmem_queue *queue);

/*
 * Returns the place of slot and data of a sequence number. The place may have been reused for
 * another sequence number, which the cookie shows.
 */
static inline unsigned int place_of(struct tmem_queue *queue, u64 seq)
{
	unsigned int block = READ_ONCE(queue->map[seq / TMEM_BLOCK_PAGES % queue->dev->nr_blocks]);

	return block * TMEM_BLOCK_PAGES + seq % TMEM_BLOCK_PAGES;
}

static inline void *data_at(struct tmem_dev *dev, unsigned int place)
{
	return dev->block[place / TMEM_BLOCK_PAGES] + place % TMEM_BLOCK_PAGES * PAGE_SIZE;
}

static inline struct tmem_slot *slot_of(struct tmem_queue *queue, u64 seq)
{
	return &queue->dev->slot[place_of(queue, seq)];
}

static inline u8 slot_state(const struct tmem_slot *slot)
{
	/* Slot and data were written before READY; pairs with put(). */
	return smp_load_acquire(&slot->state);
}

static inline void *data_of(struct tmem_queue *queue, u64 seq)
{
	return data_at(queue->dev, place_of(queue, seq));
}

/*
 * Returns whether the feeder has work. Called before waking the feeder, and by the feeder before it
 * sleeps.
 */
static inline bool queue_has_work(struct tmem_queue *queue)
{
	/* Pairs with reserve(). */
	u64 pending = smp_load_acquire(&queue->head) - READ_ONCE(queue->next);
	unsigned int in_flight = READ_ONCE(queue->puts_in_flight);
	bool stalled = READ_ONCE(queue->stalled);

	if (READ_ONCE(queue->answered))
		return true;
	if (READ_ONCE(queue->nr_flush) && !READ_ONCE(queue->flushes_in_flight) && !stalled)
		return true;
	if (!pending || slot_state(slot_of(queue, READ_ONCE(queue->next))) == TMEM_SLOT_FILLING)
		return false;
	if (!READ_ONCE(queue->dev->generation))
		return true;
	if (stalled || in_flight >= TMEM_PUTS_IN_FLIGHT)
		return false;
	/*
	 * The first put of a batch wakes the feeder as well. The feeder then sets kick_at, the time
	 * at which an incomplete batch is sent.
	 */
	return pending >= queue->dev->batch_full || !READ_ONCE(queue->kick_armed) ||
	       time_after_eq(jiffies, READ_ONCE(queue->kick_at));
}

/* Wakes the feeder if the queue has work for it. */
static inline void wake_feeder(struct tmem_queue *queue)
{
	/*
	 * Pairs with the barrier of wait_event: either this CPU sees the sleeper, or the feeder
	 * sees the work.
	 */
	if (queue_has_work(queue) && wq_has_sleeper(&queue->dev->feeder_wait))
		wake_up(&queue->dev->feeder_wait);
}

#endif /* _TMEM_RING_H */
