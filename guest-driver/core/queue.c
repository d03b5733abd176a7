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
 * Queues a flush: a range of pages that the host should drop. The sender sends it later. If too
 * many ranges wait, the driver discards it. With @must, the pages have to leave the host: if the
 * flush is discarded or fails, the pool is emptied if it is private. Context: any but NMI.
 */
void tmem_queue_flush(const struct tmem_where *where, u64 index, u64 nr_pages, bool must)
{
	struct tmem_flush_range *range;
	struct tmem_queue *queue;
	struct tmem_dev *dev;
	unsigned long flags;
	bool dropped = false;

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
		range->must |= must;
	} else if (queue->nr_flush < TMEM_FLUSH_PENDING) {
		queue->pending[queue->nr_flush] = (struct tmem_flush_range){
			.object = where->object,
			.index = index,
			.nr_pages = nr_pages,
			.pool = where->pool,
			.epoch = READ_ONCE(dev->epoch),
			.must = must,
		};
		WRITE_ONCE(queue->nr_flush, queue->nr_flush + 1);
	} else {
		dropped = true;
	}
	spin_unlock_irqrestore(&queue->ring_lock, flags);
	if (dropped) {
		tmem_count(TMEM_STAT_flushes_dropped);
		if (must)
			tmem_pool_lost(where->pool);
	}
	wake_feeder(queue);
unlock:
	rcu_read_unlock();
}

bool tmem_flushes_wait(void)
{
	struct tmem_dev *dev;
	bool wait = false;
	unsigned int i;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	for (i = 0; dev && i < dev->nr_queues; i++)
		wait |= READ_ONCE(dev->queue[i].nr_flush) > TMEM_FLUSH_PENDING / 2;
	rcu_read_unlock();
	return wait;
}
