// SPDX-License-Identifier: GPL-2.0-only
/*
 * Thread that sends pages from the put rings to the virtqueues of a device, and takes the answers.
 *
 * The feeder is a real-time thread. It sends a full batch at once, and a smaller one after
 * TMEM_PUT_DELAY_MS. A request costs as much as copies of many pages, and reclaim takes more than
 * one page. So requests for single pages would cost more than all other work of a put. Waiting
 * pages are not lost for gets, because a get finds them in the ring. The feeder waits for an answer
 * only when TMEM_PUTS_IN_FLIGHT batches are at the host.
 *
 * Every outcome of a put other than STORED erases its index entry, if that entry is still the put's
 * own. The feeder never sends a page that was put before the driver last forgot all entries.
 */
#include <linux/kthread.h>
#include <linux/slab.h>

#include "ring.h"

/* Data blocks that a batch touches: one more than it fills, because it may start within a block. */
#define BATCH_SGS	(TMEM_BATCH_BLOCKS + 1)

static void erase_slot(struct tmem_slot *slot, enum tmem_stat why)
{
	tmem_index_erase_offset(slot->bucket, slot->object, slot->index, slot->offset);
	tmem_count(why);
}

static int submit(struct tmem_queue *queue, struct tmem_req *req, struct scatterlist *out,
		  struct scatterlist *in)
{
	struct scatterlist *sgs[] = { out, in };
	bool notify = false;
	int err;

	spin_lock_irq(&queue->vq_lock);
	err = virtqueue_add_sgs(queue->vq, sgs, 1, 1, req, GFP_ATOMIC);
	if (!err) {
		req->state = TMEM_REQ_SENT;
		notify = virtqueue_kick_prepare(queue->vq);
	} else if (err == -ENOSPC || err == -ENOMEM) {
		/*
		 * Wait until something is answered. If nothing is in flight, the queue stays
		 * stalled.
		 */
		WRITE_ONCE(queue->stalled, true);
	}
	spin_unlock_irq(&queue->vq_lock);
	if (notify)
		virtqueue_notify(queue->vq);
	return err;
}

/* Handles a batch of puts that the device answered or gave back unanswered. */
static void put_answered(struct tmem_queue *queue, struct tmem_put_batch *batch)
{
	u8 status = VIRTIO_TMEM_S_UNANSWERED, result;
	struct tmem_slot *slot;
	unsigned int i, stored = 0;

	if (batch->req.used_bytes >= sizeof(batch->in.resp))
		status = READ_ONCE(batch->in.resp.status);
	if (status == VIRTIO_TMEM_S_STALE) {
		tmem_count(TMEM_STAT_stale);
		tmem_dev_resync(queue->dev, false);
	}
	for (i = 0; i < batch->count; i++) {
		slot = slot_of(queue, batch->first + i);
		result = VIRTIO_TMEM_S_UNANSWERED;
		if (status == VIRTIO_TMEM_S_OK &&
		    batch->req.used_bytes >= sizeof(batch->in.resp) + i + 1)
			result = READ_ONCE(batch->in.result[i]);
		if (result == VIRTIO_TMEM_P_STORED)
			stored++;
		else if (result == VIRTIO_TMEM_P_REFUSED)
			erase_slot(slot, TMEM_STAT_puts_refused);
		else
			erase_slot(slot, TMEM_STAT_puts_unanswered);
		slot->state = TMEM_SLOT_FREE;
	}
	tmem_count_n(TMEM_STAT_puts_stored, stored);
	batch->req.state = TMEM_REQ_FREE;
	WRITE_ONCE(queue->puts_in_flight, queue->puts_in_flight - 1);
}

static bool req_done(const struct tmem_req *req)
{
	/* The answer was written before; pairs with drain(). */
	return smp_load_acquire(&req->state) == TMEM_REQ_DONE;
}

/*
 * Only the feeder frees a request. Concurrently, drain() only turns a SENT request into a DONE one.
 */
static bool req_free(const struct tmem_req *req)
{
	return READ_ONCE(req->state) == TMEM_REQ_FREE;
}

static void take_answers(struct tmem_queue *queue)
{
	unsigned int i;

	spin_lock_irq(&queue->vq_lock);
	WRITE_ONCE(queue->answered, false);
	spin_unlock_irq(&queue->vq_lock);
	for (i = 0; i < TMEM_PUTS_IN_FLIGHT; i++)
		if (req_done(&queue->put[i]->req))
			put_answered(queue, queue->put[i]);
	for (i = 0; i < TMEM_FLUSHES_IN_FLIGHT; i++) {
		if (!req_done(&queue->flush[i]->req))
			continue;
		queue->flush[i]->req.state = TMEM_REQ_FREE;
		WRITE_ONCE(queue->flushes_in_flight, queue->flushes_in_flight - 1);
	}
	tmem_ring_free(queue);
}

static struct tmem_flush_batch *free_flush_batch(struct tmem_queue *queue)
{
	unsigned int i;

	for (i = 0; i < TMEM_FLUSHES_IN_FLIGHT; i++)
		if (req_free(&queue->flush[i]->req))
			return queue->flush[i];
	return NULL;
}

/* Sends the oldest pending ranges of one pool. Returns whether there may be more to send. */
static bool send_flushes(struct tmem_queue *queue, u64 generation, u32 epoch)
{
	struct tmem_flush_batch *batch = free_flush_batch(queue);
	unsigned int taken, count = 0;
	struct scatterlist out, in;
	u32 pool = 0;

	if (!READ_ONCE(queue->nr_flush) || (!batch && generation))
		return false;
	spin_lock_irq(&queue->ring_lock);
	for (taken = 0; taken < queue->nr_flush; taken++) {
		const struct tmem_flush_range *range = &queue->pending[taken];

		if (!generation || range->epoch != epoch)
			continue;	/* the host has forgotten this range already */
		if (count && (range->pool != pool || count == queue->dev->batch_max))
			break;
		pool = range->pool;
		batch->out.range[count++] = (struct virtio_tmem_range){
			.object = cpu_to_le64(range->object),
			.index = cpu_to_le64(range->index),
			.nr_pages = cpu_to_le64(range->nr_pages),
		};
	}
	WRITE_ONCE(queue->nr_flush, queue->nr_flush - taken);
	memmove(queue->pending, queue->pending + taken, queue->nr_flush * sizeof(*queue->pending));
	spin_unlock_irq(&queue->ring_lock);
	if (!count)
		return false;

	batch->out.hdr = (struct virtio_tmem_req){
		.generation = cpu_to_le64(generation),
		.type = cpu_to_le16(VIRTIO_TMEM_T_FLUSH),
		.count = cpu_to_le16(count),
		.pool = cpu_to_le32(pool),
	};
	batch->resp.status = VIRTIO_TMEM_S_UNANSWERED;
	batch->req.room_bytes = sizeof(batch->resp);
	sg_init_one(&out, &batch->out, sizeof(batch->out.hdr) + count * sizeof(*batch->out.range));
	sg_init_one(&in, &batch->resp, sizeof(batch->resp));
	WRITE_ONCE(queue->flushes_in_flight, queue->flushes_in_flight + 1);
	if (submit(queue, &batch->req, &out, &in)) {
		WRITE_ONCE(queue->flushes_in_flight, queue->flushes_in_flight - 1);
		tmem_count_n(TMEM_STAT_flushes_dropped, count);
		return false;
	}
	tmem_count(TMEM_STAT_requests_flush);
	return true;
}

static void skip_slot(struct tmem_queue *queue, struct tmem_slot *slot)
{
	if (slot->state == TMEM_SLOT_READY)
		erase_slot(slot, TMEM_STAT_puts_unanswered);
	slot->state = TMEM_SLOT_FREE;
	WRITE_ONCE(queue->next, queue->next + 1);
}

static struct tmem_put_batch *free_put_batch(struct tmem_queue *queue)
{
	unsigned int i;

	for (i = 0; i < TMEM_PUTS_IN_FLIGHT; i++)
		if (req_free(&queue->put[i]->req))
			return queue->put[i];
	return NULL;
}

/* Returns how many slots from next on can go in one request: ready, of one pool, of this epoch. */
static unsigned int count_slots(struct tmem_queue *queue, u64 head, u64 generation, u32 epoch)
{
	unsigned int count = 0;
	struct tmem_slot *slot;
	u32 pool = 0;
	u8 state;

	while (count < queue->dev->batch_max && queue->next + count != head) {
		slot = slot_of(queue, queue->next + count);
		state = slot_state(slot);
		if (state == TMEM_SLOT_FILLING)
			break;
		if (state == TMEM_SLOT_SKIP || !generation || slot->epoch != epoch) {
			if (count)
				break;
			skip_slot(queue, slot);
			continue;
		}
		if (count && slot->pool != pool)
			break;
		pool = slot->pool;
		count++;
	}
	return count;
}

/* Sets the time at which puts that do not fill a batch are sent although more may come. */
static void arm_kick(struct tmem_queue *queue)
{
	/* Pairs with reserve(). */
	if (smp_load_acquire(&queue->head) == queue->next) {
		WRITE_ONCE(queue->kick_armed, false);
	} else if (!queue->kick_armed) {
		WRITE_ONCE(queue->kick_at, jiffies + msecs_to_jiffies(TMEM_PUT_DELAY_MS));
		WRITE_ONCE(queue->kick_armed, true);
	}
}

/* Sends one batch of puts. Returns whether there may be more to send. */
static bool send_puts(struct tmem_queue *queue, u64 head, u64 generation, u32 epoch)
{
	unsigned int count = count_slots(queue, head, generation, epoch), i, nr = 0;
	struct tmem_put_batch *batch = free_put_batch(queue);
	bool due = queue->kick_armed && time_after_eq(jiffies, queue->kick_at);
	struct scatterlist out[1 + BATCH_SGS], in;
	struct tmem_slot *slot;
	int err;

	/* An incomplete batch waits for further puts until kick_at. */
	if (!count || !batch || (count < queue->dev->batch_full && queue->next + count == head &&
				 !due))
		return false;
	slot = slot_of(queue, queue->next);
	batch->first = queue->next;
	batch->count = count;
	batch->out.hdr = (struct virtio_tmem_req){
		.generation = cpu_to_le64(generation),
		.type = cpu_to_le16(VIRTIO_TMEM_T_PUT),
		.count = cpu_to_le16(count),
		.pool = cpu_to_le32(slot->pool),
	};
	batch->in.resp.status = VIRTIO_TMEM_S_UNANSWERED;
	memset(batch->in.result, VIRTIO_TMEM_S_UNANSWERED, sizeof(batch->in.result));
	batch->req.room_bytes = sizeof(batch->in.resp) + count;
	sg_init_table(out, ARRAY_SIZE(out));
	sg_set_buf(&out[0], &batch->out,
		   sizeof(batch->out.hdr) + count * sizeof(*batch->out.page));
	for (i = 0; i < count; i++) {
		slot = slot_of(queue, batch->first + i);
		batch->out.page[i] = (struct virtio_tmem_put_page){
			.object = cpu_to_le64(slot->object),
			.index = cpu_to_le64(slot->index),
			.cookie = cpu_to_le64(slot->base + slot->offset),
			.flags = cpu_to_le32(slot->flags),
		};
		if (!i || !((batch->first + i) % TMEM_BLOCK_PAGES))
			sg_set_buf(&out[++nr], data_of(queue, batch->first + i), PAGE_SIZE);
		else
			out[nr].length += PAGE_SIZE;
	}
	sg_mark_end(&out[nr]);
	sg_init_one(&in, &batch->in, sizeof(batch->in.resp) + count);

	WRITE_ONCE(queue->puts_in_flight, queue->puts_in_flight + 1);
	err = submit(queue, &batch->req, out, &in);
	if (err) {
		WRITE_ONCE(queue->puts_in_flight, queue->puts_in_flight - 1);
		/*
		 * Without room in the virtqueue the slots wait. A queue that stopped never has room
		 * again.
		 */
		if (err != -ENOSPC && err != -ENOMEM)
			for (i = 0; i < count; i++)
				skip_slot(queue, slot_of(queue, queue->next));
		return false;
	}
	tmem_count(TMEM_STAT_requests_put);
	WRITE_ONCE(queue->next, queue->next + count);
	/* The puts after this batch began to wait later. */
	WRITE_ONCE(queue->kick_armed, false);
	return true;
}

static void feed(struct tmem_queue *queue)
{
	struct tmem_dev *dev = queue->dev;
	u64 generation, head;
	u32 epoch;

	tmem_queue_drain(queue);
	take_answers(queue);

	/*
	 * Read the generation before the epoch, against the order of sync_work_fn(), so that slots
	 * of an older epoch are never sent with a newer generation.
	 */
	generation = READ_ONCE(dev->generation);
	smp_rmb();	/* pairs with sync_work_fn() */
	epoch = READ_ONCE(dev->epoch);
	/*
	 * Read the head before the flushes, so that a flush that was noted before a later put of
	 * the same page is also sent before that put.
	 */
	head = smp_load_acquire(&queue->head);	/* pairs with reserve() */
	while (send_flushes(queue, generation, epoch))
		;
	while (send_puts(queue, head, generation, epoch))
		;
	arm_kick(queue);
	tmem_ring_free(queue);
}

static bool feeder_has_work(struct tmem_dev *dev)
{
	unsigned int i;

	for (i = 0; i < dev->nr_queues; i++)
		if (queue_has_work(&dev->queue[i]))
			return true;
	return false;
}

/*
 * Returns how long the feeder may sleep without being woken, in jiffies: until waiting puts are
 * due.
 */
static long feeder_timeout(struct tmem_dev *dev)
{
	long timeout = MAX_SCHEDULE_TIMEOUT;
	struct tmem_queue *queue;
	unsigned int i;

	for (i = 0; i < dev->nr_queues; i++) {
		queue = &dev->queue[i];
		/*
		 * No time-out is needed if the virtqueue is full or TMEM_PUTS_IN_FLIGHT batches are
		 * at the host: the next answer wakes the feeder.
		 */
		if (!queue->kick_armed || queue->puts_in_flight >= TMEM_PUTS_IN_FLIGHT ||
		    READ_ONCE(queue->stalled))
			continue;
		timeout = min(timeout, max((long)(queue->kick_at - jiffies), 1L));
	}
	return timeout;
}

/**
 * tmem_feeder() - serve all request queues of a device, as a thread
 * @data: the device
 *
 * Return: 0, when stopped.
 */
int tmem_feeder(void *data)
{
	struct tmem_dev *dev = data;
	unsigned int i;

	while (!kthread_should_stop()) {
		wait_event_idle_timeout(dev->feeder_wait,
					kthread_should_stop() || feeder_has_work(dev),
					feeder_timeout(dev));
		for (i = 0; i < dev->nr_queues; i++)
			feed(&dev->queue[i]);
	}
	return 0;
}

/* --- set-up -------------------------------------------------------------------------------- */

/**
 * tmem_feeder_init() - allocate the requests of a queue
 * @dev: the device; its memory_bytes grow
 * @queue: the queue
 *
 * Return: 0, or -ENOMEM; the caller then calls tmem_feeder_exit() as well.
 */
int tmem_feeder_init(struct tmem_dev *dev, struct tmem_queue *queue)
{
	unsigned int i;

	for (i = 0; i < TMEM_PUTS_IN_FLIGHT; i++) {
		queue->put[i] = kzalloc(sizeof(*queue->put[i]), GFP_KERNEL);
		if (!queue->put[i])
			return -ENOMEM;
		queue->put[i]->req.kind = TMEM_REQ_PUT;
	}
	for (i = 0; i < TMEM_FLUSHES_IN_FLIGHT; i++) {
		queue->flush[i] = kzalloc(sizeof(*queue->flush[i]), GFP_KERNEL);
		if (!queue->flush[i])
			return -ENOMEM;
		queue->flush[i]->req.kind = TMEM_REQ_FLUSH;
	}
	dev->memory_bytes += TMEM_PUTS_IN_FLIGHT * sizeof(*queue->put[0]) +
			     TMEM_FLUSHES_IN_FLIGHT * sizeof(*queue->flush[0]);
	return 0;
}

/**
 * tmem_feeder_exit() - free the requests of a queue
 * @queue: the queue; the device was reset
 */
void tmem_feeder_exit(struct tmem_queue *queue)
{
	unsigned int i;

	for (i = 0; i < TMEM_PUTS_IN_FLIGHT; i++)
		kfree(queue->put[i]);
	for (i = 0; i < TMEM_FLUSHES_IN_FLIGHT; i++)
		kfree(queue->flush[i]);
}
