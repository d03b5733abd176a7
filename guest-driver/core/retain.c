// SPDX-License-Identifier: GPL-2.0-only
/*
 * Retained pages: when the host may keep a page that a get returns, and the references (REF) that
 * the driver sends instead of a copy when such a page is evicted unchanged.
 *
 * A full pool evicts retained pages first. The driver then has sent no copy, and the page is lost.
 * So the driver watches the answers to its references. While more than one in RETAIN_GONE_DIVISOR
 * of the last TMEM_REF_WINDOW pages were gone, it is in fallback: gets take their pages out of the
 * pool, and evicted pages are copied, as without the feature. A sample of gets still lets the host
 * retain pages, so that the share can fall again.
 *
 * A page that was invalidated before the answer does not count: a flush may have overtaken its
 * reference.
 *
 * The admission filter does not learn of pages that were gone. A share of 1/16 would not engage it,
 * because a loss weighs as much as 16 hits, and above that share the driver puts copies, whose
 * losses the filter sees.
 */
#include <linux/bitmap.h>
#include <linux/percpu.h>
#include <linux/slab.h>

#include "ring.h"

/* Fallback begins above one page gone in this many: see DRV-54 in proto/SPEC.md. */
#define RETAIN_GONE_DIVISOR	16
/*
 * In fallback, one part of a get in this many lets the host retain its pages. A part is up to 64
 * pages. If all of these pages are lost, reads from the disk grow by 1.6 %. If none is, fallback
 * ends after 256 MiB of gets. Parts are counted, and not chosen by their place in a file, because a
 * small working set may have none of the chosen places.
 */
#define RETAIN_SAMPLE		64

/* Parts of gets in fallback on this CPU. */
static DEFINE_PER_CPU(unsigned int, retain_tries);

static bool in_fallback(struct tmem_dev *dev)
{
	return READ_ONCE(dev->nr_gone) > TMEM_REF_WINDOW / RETAIN_GONE_DIVISOR;
}

/**
 * tmem_retain_wanted() - decide whether the host may retain the pages of a part of a get
 * @dev: the device
 *
 * Context: any.
 *
 * Return: true if it may.
 */
bool tmem_retain_wanted(struct tmem_dev *dev)
{
	if (!dev->retain)
		return false;
	return !in_fallback(dev) || !(this_cpu_inc_return(retain_tries) % RETAIN_SAMPLE);
}

/**
 * tmem_retain_learn() - record the answers to references
 * @dev: the device
 * @gone: a bit for each answer; set if the host does not have the page
 * @count: number of answers, at most 64
 *
 * Context: any but NMI, with interrupts off.
 */
void tmem_retain_learn(struct tmem_dev *dev, u64 gone, unsigned int count)
{
	unsigned int nr, i;

	spin_lock(&dev->window_lock);
	nr = dev->nr_gone;
	for (i = 0; i < count; i++) {
		nr -= test_bit(dev->window_at, dev->window);
		__assign_bit(dev->window_at, dev->window, gone & BIT_ULL(i));
		nr += !!(gone & BIT_ULL(i));
		dev->window_at = (dev->window_at + 1) % TMEM_REF_WINDOW;
	}
	WRITE_ONCE(dev->nr_gone, nr);
	spin_unlock(&dev->window_lock);
}

/**
 * tmem_retain_reset() - forget the answers to references, for a new backend
 * @dev: the device
 *
 * Context: process.
 */
void tmem_retain_reset(struct tmem_dev *dev)
{
	spin_lock_irq(&dev->window_lock);
	bitmap_zero(dev->window, TMEM_REF_WINDOW);
	WRITE_ONCE(dev->nr_gone, 0);
	spin_unlock_irq(&dev->window_lock);
}

/* Has references sent: now if they fill a batch, or in time. */
static void ref_added(struct tmem_queue *queue)
{
	unsigned int waiting;

	/* ref_head is written before the fields that follow are read, as in slot_done(). */
	smp_mb();
	waiting = waiting_refs(queue);
	if (waiting >= queue->dev->batch_max) {
		if (!refs_blocked(queue) || !(waiting % queue->dev->batch_max))
			request_send(queue);
	} else if (!READ_ONCE(queue->timed) || !READ_ONCE(queue->dev->generation)) {
		wake_feeder(queue);
	}
}

/**
 * tmem_queue_ref() - queue a reference to a page whose entry became held
 * @dev: the device
 * @where: object
 * @index: page number
 * @offset: cookie offset of the entry
 * @epoch: dev->epoch before the entry became held
 *
 * Without the reference the host keeps the page as a retained one, so it is dropped if there is no
 * room.
 *
 * Context: interrupts are off.
 */
void tmem_queue_ref(struct tmem_dev *dev, const struct tmem_where *where, u64 index, u64 offset,
		    u32 epoch)
{
	struct tmem_queue *queue = tmem_queue_of(dev, where->bucket, index);
	u64 seq = READ_ONCE(queue->seq_start) + tmem_cookie_seq(offset, dev->nr_queues);
	bool added = false;

	/*
	 * If a get found the page in the ring and its put was not sent yet, the put makes the page
	 * held. A reference would overtake the put.
	 */
	if ((s64)(seq - READ_ONCE(queue->next)) >= 0) {
		tmem_count(TMEM_STAT_refs_unneeded);
		return;
	}
	spin_lock(&queue->ring_lock);
	if (queue->ref_head - queue->ref_tail < dev->ref_pending) {
		queue->ref[queue->ref_head % dev->ref_pending] = (struct tmem_ref){
			.object = where->object,
			.index = index,
			.cookie = READ_ONCE(dev->cookie_base) + offset,
			.offset = offset,
			.pool = where->pool,
			.bucket = where->bucket,
			.epoch = epoch,
		};
		WRITE_ONCE(queue->ref_head, queue->ref_head + 1);
		added = true;
	}
	spin_unlock(&queue->ring_lock);
	if (added)
		ref_added(queue);
	else
		tmem_count(TMEM_STAT_refs_dropped);
}

/**
 * tmem_retain_init() - allocate the references and their requests of a queue
 * @dev: the device; its memory_bytes grow
 * @queue: the queue
 *
 * Return: 0, or -ENOMEM; the caller then calls tmem_retain_exit() as well.
 */
int tmem_retain_init(struct tmem_dev *dev, struct tmem_queue *queue)
{
	unsigned int i;

	if (!dev->retain)
		return 0;
	dev->ref_pending = max_t(unsigned int, TMEM_REF_PENDING_MIN,
				 rounddown_pow_of_two(TMEM_REF_PENDING / dev->nr_queues));
	queue->ref = kvcalloc(dev->ref_pending, sizeof(*queue->ref), GFP_KERNEL);
	if (!queue->ref)
		return -ENOMEM;
	for (i = 0; i < TMEM_REFS_IN_FLIGHT; i++) {
		queue->ref_batch[i] = kzalloc(sizeof(*queue->ref_batch[i]), GFP_KERNEL);
		if (!queue->ref_batch[i])
			return -ENOMEM;
		queue->ref_batch[i]->req.kind = TMEM_REQ_REF;
	}
	dev->memory_bytes += dev->ref_pending * sizeof(*queue->ref) +
			     TMEM_REFS_IN_FLIGHT * sizeof(*queue->ref_batch[0]);
	return 0;
}

/**
 * tmem_retain_exit() - free the references and their requests of a queue
 * @queue: the queue; the device was reset
 */
void tmem_retain_exit(struct tmem_queue *queue)
{
	unsigned int i;

	for (i = 0; i < TMEM_REFS_IN_FLIGHT; i++)
		kfree(queue->ref_batch[i]);
	kvfree(queue->ref);
}
