// SPDX-License-Identifier: GPL-2.0-only
/*
 * Request queues: selects the queue of a page, and queues the ranges that the host should drop.
 * send.c and request.c send the requests.
 */
#include <linux/hash.h>

#include "wake.h"

/*
 * Returns the request queue of a page. All pages of a chunk (256 neighbouring blocks) have the same
 * queue.
 */
struct tmem_queue *tmem_queue_of(struct tmem_dev *dev, u32 bucket, u64 index)
{
	u64 chunk = index >> VIRTIO_TMEM_CHUNK_SHIFT;

	return &dev->queue[hash_64((u64)bucket << 40 ^ chunk, 32) % dev->nr_queues];
}

/*
 * Queues a flush: a range of pages that the host should drop. The range is a hint. The sender sends
 * it later; the driver discards it if too many ranges wait. Context: any but NMI.
 */
void tmem_queue_flush(const struct tmem_where *where, u64 index, u64 nr_pages)
{
	struct tmem_flush_range *range;
	struct tmem_queue *queue;
	struct tmem_dev *dev;
	unsigned long flags;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	if (!dev)
		goto unlock;
	queue = tmem_queue_of(dev, where->bucket, index);
	spin_lock_irqsave(&queue->ring_lock, flags);
	range = queue->nr_flush ? &queue->pending[queue->nr_flush - 1] : NULL;
	if (range && range->object == where->object && range->pool == where->pool &&
	    range->index + range->nr_pages == index) {
		range->nr_pages += nr_pages;
	} else if (queue->nr_flush < TMEM_FLUSH_PENDING) {
		queue->pending[queue->nr_flush] = (struct tmem_flush_range){
			.object = where->object,
			.index = index,
			.nr_pages = nr_pages,
			.pool = where->pool,
			.epoch = READ_ONCE(dev->epoch),
		};
		WRITE_ONCE(queue->nr_flush, queue->nr_flush + 1);
	} else {
		tmem_count(TMEM_STAT_flushes_dropped);
	}
	spin_unlock_irqrestore(&queue->ring_lock, flags);
	wake_feeder(queue);
unlock:
	rcu_read_unlock();
}
