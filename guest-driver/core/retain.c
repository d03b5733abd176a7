// SPDX-License-Identifier: GPL-2.0-only
/*
 * Retained pages: decides whether the host may keep a page that a get returns, and queues the
 * references (REF) that the driver sends instead of a copy when such a page is evicted unchanged.
 *
 * A full pool evicts retained pages first. A page that the host evicted in this way is lost when
 * the guest evicts it, because the driver sends a reference and no copy. So the driver watches the
 * answers to its references. While too many pages were gone, it is in fallback (fallback.h): gets
 * take their pages out of the pool, and evicted pages are copied, as without the feature. A sample
 * of gets still lets the host retain pages, so that the share can fall again.
 *
 * A page that was invalidated before the answer does not count, because the host may have processed
 * the flush before the reference.
 *
 * The admission filter does not count GONE answers. A share of 1/16 would not engage it, because a
 * loss weighs as much as 16 hits. Above that share the driver puts copies, whose losses the filter
 * counts.
 */
#include <linux/percpu.h>
#include <linux/slab.h>

#include "wake.h"

/* Argument of tmem_fallback_chooses() for the gets of this CPU. */
static DEFINE_PER_CPU(int, sample_due);

/* Returns whether the host may retain the pages of a part of a get. Context: process or softirq. */
bool tmem_retain_wanted(struct tmem_dev *dev, unsigned int pages)
{
	bool chosen;

	if (!dev->retain)
		return false;
	if (!tmem_in_fallback(&dev->fallback))
		return true;
	chosen = tmem_fallback_chooses(get_cpu_ptr(&sample_due), pages);
	put_cpu_ptr(&sample_due);
	if (!chosen)
		return false;
	spin_lock_irq(&dev->fallback_lock);
	tmem_fallback_sample(&dev->fallback, pages);
	spin_unlock_irq(&dev->fallback_lock);
	return true;
}

/*
 * Records up to 64 answers to references. A bit of @gone is set if the host does not have the page.
 * Context: any but NMI, with interrupts off.
 */
void tmem_retain_learn(struct tmem_dev *dev, u64 gone, unsigned int count)
{
	unsigned int i;

	spin_lock(&dev->fallback_lock);
	for (i = 0; i < count; i++)
		tmem_fallback_learn(&dev->fallback, gone & BIT_ULL(i));
	spin_unlock(&dev->fallback_lock);
}

/* Clears the answers to references, because the backend is new. Context: process. */
void tmem_retain_reset(struct tmem_dev *dev)
{
	spin_lock_irq(&dev->fallback_lock);
	memset(dev->fallback.window, 0, sizeof(dev->fallback.window));
	WRITE_ONCE(dev->fallback.nr_gone, 0);
	spin_unlock_irq(&dev->fallback_lock);
}

/*
 * Makes the sender send waiting references: at once if they fill a batch, otherwise within
 * TMEM_PUT_DELAY_MS.
 */
static void ref_added(struct tmem_queue *queue)
{
	unsigned int waiting;

	/*
	 * Write ref_head before reading the fields below. Either the sender sees the reference, or
	 * this CPU sees that it has to wake the sender, as in slot_done().
	 */
	smp_mb();
	waiting = waiting_refs(queue);
	if (waiting >= queue->dev->batch_max) {
		if (!refs_blocked(queue) || !(waiting % queue->dev->batch_max))
			request_send(queue);
	} else if (!READ_ONCE(queue->timed) || !READ_ONCE(queue->dev->generation)) {
		wake_feeder(queue);
	}
}

/*
 * Queues a reference to a retained page that was evicted unchanged. @offset is the cookie offset of
 * its entry, and @epoch is dev->epoch, read before the entry changed from retained to held. The
 * reference is dropped if the queue of references is full. The page then stays retained at the
 * host. Interrupts are off.
 */
void tmem_queue_ref(struct tmem_dev *dev, const struct tmem_where *where, u64 index, u64 offset,
		    u32 epoch)
{
	struct tmem_queue *queue = tmem_queue_of(dev, where->bucket, index);
	u64 seq = READ_ONCE(queue->seq_start) + tmem_cookie_seq(offset, dev->nr_queues);
	bool added = false;

	/*
	 * If the put of the page is still in the ring, where a get has found the page, send no
	 * reference: the reference would overtake the put. The put makes the page held as well.
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

/*
 * Allocates the references and their requests of a queue, and adds their size to dev->memory_bytes.
 * Returns 0, or -ENOMEM; the caller then calls tmem_retain_exit(), too.
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

/* Frees the references and their requests of a queue, after the reset of the device. */
void tmem_retain_exit(struct tmem_queue *queue)
{
	unsigned int i;

	for (i = 0; i < TMEM_REFS_IN_FLIGHT; i++)
		kfree(queue->ref_batch[i]);
	kvfree(queue->ref);
}
