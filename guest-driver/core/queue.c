// SPDX-License-Identifier: GPL-2.0-only
/*
 * Request queues: which queue serves a page, the ranges that the host should forget, and the
 * device's answers. feeder.c and get.c send the requests.
 */
#include <linux/hash.h>

#include "ring.h"

/**
 * tmem_queue_of() - return the request queue of a page
 * @dev: the device
 * @bucket: index bucket of the inode
 * @index: page number
 *
 * Return: the queue, the same one for all pages of an inode in one chunk.
 */
struct tmem_queue *tmem_queue_of(struct tmem_dev *dev, u32 bucket, u64 index)
{
	u64 chunk = index >> VIRTIO_TMEM_CHUNK_SHIFT;

	return &dev->queue[hash_64((u64)bucket << 40 ^ chunk, 32) % dev->nr_queues];
}

/**
 * tmem_queue_flush() - queue a range for the host to forget
 * @where: object
 * @index: first page number
 * @nr_pages: number of pages, or VIRTIO_TMEM_TO_END
 *
 * The range is a hint, which is sent later and dropped if there is no room.
 *
 * Context: any but NMI.
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
	    nr_pages && range->nr_pages && range->index + range->nr_pages == index) {
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

/* Takes the device's answers. vq_lock is held. Returns whether there is work for the feeder. */
static bool drain(struct tmem_queue *queue)
{
	bool feeder = false;
	struct tmem_req *req;
	unsigned int len;

	while ((req = virtqueue_get_buf(queue->vq, &len))) {
		tmem_req_used(req, len);
		/* Any answer makes room for requests that the feeder could not send. */
		if (queue->stalled) {
			WRITE_ONCE(queue->stalled, false);
			feeder = true;
		}
		if (req->kind == TMEM_REQ_GET) {
			tmem_bounce_answered(queue->dev,
					     container_of(req, struct tmem_get_req, req));
		} else {
			/* Pairs with take_answers(). */
			smp_store_release(&req->state, TMEM_REQ_DONE);
			WRITE_ONCE(queue->answered, true);
			feeder = true;
		}
	}
	return feeder;
}

/**
 * tmem_queue_drain() - take the device's answers without waiting for its interrupt
 * @queue: the queue
 */
void tmem_queue_drain(struct tmem_queue *queue)
{
	unsigned long flags;
	bool feeder;

	spin_lock_irqsave(&queue->vq_lock, flags);
	feeder = drain(queue);
	spin_unlock_irqrestore(&queue->vq_lock, flags);
	if (feeder && current != queue->dev->feeder)
		wake_up(&queue->dev->feeder_wait);
}

/**
 * tmem_queue_vq_callback() - take the device's answers at its interrupt
 * @vq: a request queue
 */
void tmem_queue_vq_callback(struct virtqueue *vq)
{
	struct tmem_dev *dev = vq->vdev->priv;
	struct tmem_queue *queue = &dev->queue[vq->index - 1];
	unsigned long flags;
	bool feeder = false;

	spin_lock_irqsave(&queue->vq_lock, flags);
	do {
		virtqueue_disable_cb(vq);
		feeder |= drain(queue);
	} while (!virtqueue_enable_cb(vq));
	spin_unlock_irqrestore(&queue->vq_lock, flags);
	if (feeder)
		wake_up(&dev->feeder_wait);
}
