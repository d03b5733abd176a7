/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Internal interface of the put rings: slots and requests, for ring.c, which fills them, and
 * send.c, which empties them. The parts that a put needs are inline, because it runs with
 * interrupts off.
 *
 * Other files of the core use cookies and sequence numbers and do not access slots.
 */
#ifndef _TMEM_RING_H
#define _TMEM_RING_H

#include "../compat.h"
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

/* A retained page that was evicted unchanged. */
struct tmem_ref {
	u64 object;
	u64 index;
	u64 cookie;
	u64 offset;		/* of the cookie, as in the index entry */
	u32 pool;
	u32 bucket;		/* bucket of the index, to find the entry again */
	u32 epoch;		/* dev->epoch before the entry became held */
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
 * Returns whether nothing can be sent before the device answers: puts and references wait for
 * flushes.
 */
static inline bool queue_blocked(struct tmem_queue *queue)
{
	return READ_ONCE(queue->stalled) ||
	       (READ_ONCE(queue->nr_flush) &&
		READ_ONCE(queue->flushes_in_flight) >= TMEM_FLUSHES_IN_FLIGHT);
}

/* Returns whether no put can be sent before the device answers. */
static inline bool puts_blocked(struct tmem_queue *queue)
{
	return queue_blocked(queue) || READ_ONCE(queue->puts_in_flight) >= TMEM_PUTS_IN_FLIGHT;
}

/* Returns whether no reference can be sent before the device answers. */
static inline bool refs_blocked(struct tmem_queue *queue)
{
	return queue_blocked(queue) || READ_ONCE(queue->refs_in_flight) >= TMEM_REFS_IN_FLIGHT;
}

/*
 * Returns how many puts wait. Without send_lock the number may be too high, because next is read
 * first.
 */
static inline u64 waiting_puts(struct tmem_queue *queue)
{
	u64 next = smp_load_acquire(&queue->next);	/* pairs with send_puts() */

	return smp_load_acquire(&queue->head) - next;	/* pairs with reserve() */
}

/* Returns how many references wait. Without ring_lock the number is of some moment. */
static inline unsigned int waiting_refs(struct tmem_queue *queue)
{
	unsigned int tail = READ_ONCE(queue->ref_tail);

	return READ_ONCE(queue->ref_head) - tail;
}

/* Returns whether puts or references wait, and none of them can be sent before an answer. */
static inline bool all_blocked(struct tmem_queue *queue)
{
	bool puts = waiting_puts(queue), refs = waiting_refs(queue);

	return (puts || refs) && (!puts || puts_blocked(queue)) && (!refs || refs_blocked(queue));
}

/* Returns whether the feeder should send what fills no batch, or set the time for that. */
static inline bool partial_due(struct tmem_queue *queue)
{
	return !READ_ONCE(queue->timed) || time_after_eq(jiffies, READ_ONCE(queue->kick_at));
}

static inline bool feeder_has_refs(struct tmem_queue *queue)
{
	unsigned int waiting = waiting_refs(queue);

	if (!waiting)
		return false;
	if (!READ_ONCE(queue->dev->generation))
		return true;
	return !refs_blocked(queue) &&
	       (waiting >= queue->dev->batch_max || partial_due(queue));
}

/*
 * Returns whether the feeder has work. Called before waking the feeder, and by the feeder before it
 * sleeps.
 */
static inline bool queue_has_work(struct tmem_queue *queue)
{
	u64 waiting = waiting_puts(queue);

	if (READ_ONCE(queue->attention))
		return true;
	if (READ_ONCE(queue->nr_flush) && !READ_ONCE(queue->flushes_in_flight) &&
	    !READ_ONCE(queue->stalled))
		return true;
	if (feeder_has_refs(queue))
		return true;
	if (!waiting || slot_state(slot_of(queue, READ_ONCE(queue->next))) == TMEM_SLOT_FILLING)
		return false;
	if (!READ_ONCE(queue->dev->generation))
		return true;
	if (puts_blocked(queue))
		return false;
	/* The first put of a batch wakes the feeder as well, so that the feeder sets the time. */
	return waiting >= queue->dev->batch_full || partial_due(queue);
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

/*
 * Requests tmem_send() for a queue with a full batch, from a put: the page cache's lock is held,
 * and the request may cost a microsecond. An irq_work runs when the lock was released and
 * interrupts are on. If irq_work has to wait for the tick, a kernel that calls tmem_put_end() sends
 * the batch there. Otherwise the feeder sends it.
 */
static inline void request_send(struct tmem_queue *queue)
{
	if (arch_irq_work_has_interrupt()) {
		if (!irq_work_is_pending(&queue->send_work))
			irq_work_queue(&queue->send_work);
	} else if (tmem_has_put_end()) {
		if (!test_bit(queue->nr, &queue->dev->full))
			set_bit(queue->nr, &queue->dev->full);
	} else {
		wake_feeder(queue);
	}
}

/* Has a slot sent that has just become READY or SKIP: now if it completes a batch, or in time. */
static inline void slot_done(struct tmem_queue *queue)
{
	u64 waiting;

	/*
	 * The state is written before the fields that follow are read. Pairs with the barriers of
	 * tmem_send() and irq_work: either the sender sees the slot, or this CPU sees that it has
	 * to call request_send().
	 */
	smp_mb();
	waiting = waiting_puts(queue);
	if (waiting >= queue->dev->batch_full) {
		/*
		 * A blocked queue waits for the interrupt of an answer. Each further batch looks
		 * for answers, because that interrupt may be late.
		 */
		if (!puts_blocked(queue) || !(waiting % queue->dev->batch_full))
			request_send(queue);
	} else if (!READ_ONCE(queue->timed) || !READ_ONCE(queue->dev->generation)) {
		wake_feeder(queue);
	}
}

#endif /* _TMEM_RING_H */
