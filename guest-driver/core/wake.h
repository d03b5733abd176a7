/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Decides who sends what waits in a request queue: the task whose put completes a batch, the answer
 * that ends a stall, or the feeder thread, which otherwise sleeps.
 *
 * The functions read fields of the queue without its locks. A task that adds work calls one of
 * slot_done() and wake_feeder() afterwards, and the feeder checks queue_has_work() after it has
 * announced that it will sleep. Both sides have a full barrier in between, so at least one of them
 * sees the work. The functions are inline, because puts run with interrupts off.
 */
#ifndef _TMEM_WAKE_H
#define _TMEM_WAKE_H

#include "../compat.h"
#include "slot.h"

/*
 * Returns whether the sender can send nothing before the device answers. Puts and references wait
 * for pending flushes.
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
 * Returns how many puts wait to be sent. Without send_lock the number may be too high, because the
 * sender may move queue->next after this function has read it.
 */
static inline u64 waiting_puts(struct tmem_queue *queue)
{
	u64 next = smp_load_acquire(&queue->next);	/* pairs with send_puts() */

	return smp_load_acquire(&queue->head) - next;	/* pairs with reserve() */
}

/* Returns how many references wait to be sent. Without ring_lock the number may be outdated. */
static inline unsigned int waiting_refs(struct tmem_queue *queue)
{
	unsigned int tail = READ_ONCE(queue->ref_tail);

	return READ_ONCE(queue->ref_head) - tail;
}

/*
 * Returns whether puts or references wait to be sent, and none of them can be sent before an
 * answer.
 */
static inline bool all_blocked(struct tmem_queue *queue)
{
	bool puts = waiting_puts(queue), refs = waiting_refs(queue);

	return (puts || refs) && (!puts || puts_blocked(queue)) && (!refs || refs_blocked(queue));
}

/*
 * Returns whether the feeder has to send a partial batch now, or has to set the time kick_at at
 * which it sends the batch.
 */
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
 * Returns whether the feeder has work. Tasks check this before they wake the feeder, and the feeder
 * before it sleeps.
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
	/*
	 * The first put of a batch wakes the feeder as well, so that the feeder sets the time at
	 * which to send the batch.
	 */
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
 * Makes tmem_put_end() call tmem_send() for a queue with a full batch. A put cannot make the call
 * itself, because it holds the lock of its record and a request may cost a microsecond.
 */
static inline void request_send(struct tmem_queue *queue)
{
	if (!test_bit(queue->nr, &queue->dev->full))
		set_bit(queue->nr, &queue->dev->full);
}

/*
 * Makes the sender process a slot that has just become READY or SKIP: at once if the slot completes
 * a batch, otherwise within TMEM_PUT_DELAY_MS.
 */
static inline void slot_done(struct tmem_queue *queue)
{
	u64 waiting;

	/*
	 * Write the slot's state before reading the queue's fields below. Pairs with the barrier of
	 * tmem_send(): either the sender sees the slot, or this CPU sees that it has to call
	 * request_send().
	 */
	smp_mb();
	waiting = waiting_puts(queue);
	if (waiting >= queue->dev->batch_full) {
		/*
		 * A blocked queue waits for the interrupt of an answer. Each further full batch
		 * calls the sender, which looks for answers, because that interrupt may be late.
		 */
		if (!puts_blocked(queue) || !(waiting % queue->dev->batch_full))
			request_send(queue);
	} else if (!READ_ONCE(queue->timed) || !READ_ONCE(queue->dev->generation)) {
		wake_feeder(queue);
	}
}

#endif /* _TMEM_WAKE_H */
