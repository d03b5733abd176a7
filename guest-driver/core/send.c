// SPDX-License-Identifier: GPL-2.0-only
/*
 * Sender: gives the slots of put rings and the noted flushes to the virtqueues of a device, and
 * takes the answers.
 *
 * A full batch leaves without a thread. The put that completes it requests an irq_work, which runs
 * when the page cache's lock was released, on the CPU of the put. The device's interrupt takes
 * answers, erases the entries of pages that the host refused, frees the slots, and sends the full
 * batches that waited for an answer. The feeder sends the rest: puts and references that fill no
 * batch in time, and flushes. All of them call tmem_send(), whose lock makes one of them the
 * queue's only sender. It does at most TMEM_SEND_BATCHES batches of work with interrupts off.
 *
 * A put waits only while TMEM_PUTS_IN_FLIGHT batches are at the host, or the virtqueue is full.
 *
 * Every outcome of a put other than STORED erases its index entry, if that entry is still the put's
 * own. The sender never sends a page that was put before the driver last forgot all entries.
 */
#include <linux/slab.h>

#include "ring.h"

/* Data blocks that a batch touches: one more than it fills, because it may start within a block. */
#define BATCH_SGS	(TMEM_BATCH_BLOCKS + 1)

/* One turn of the sender. */
struct turn {
	u64 generation;
	u64 head;
	u32 epoch;
	unsigned int budget;	/* batches that may still be taken back, sent or erased */
	bool all;		/* what fills no batch is sent as well */
	bool notify;		/* the device has to be notified */
};

static void erase_slot(struct tmem_slot *slot, enum tmem_stat why)
{
	tmem_index_erase_offset(slot->bucket, slot->object, slot->index, slot->offset);
	tmem_count(why);
}

/* --- answers ------------------------------------------------------------------------------- */

/* Takes the device's answers. vq_lock is held. Returns whether there is work for the sender. */
static bool drain(struct tmem_queue *queue)
{
	bool work = false;
	struct tmem_req *req;
	unsigned int len;

	lockdep_assert_held(&queue->vq_lock);
	while ((req = virtqueue_get_buf(queue->vq, &len))) {
		tmem_req_used(req, len);
		/* Any answer makes room for requests that the sender could not send. */
		if (queue->stalled) {
			WRITE_ONCE(queue->stalled, false);
			work = true;
		}
		if (req->kind == TMEM_REQ_GET) {
			tmem_bounce_answered(queue->dev,
					     container_of(req, struct tmem_get_req, req));
		} else {
			/* Pairs with req_done(). */
			smp_store_release(&req->state, TMEM_REQ_DONE);
			work = true;
		}
	}
	return work;
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
		WRITE_ONCE(slot->state, TMEM_SLOT_FREE);
	}
	tmem_count_n(TMEM_STAT_puts_stored, stored);
	batch->req.state = TMEM_REQ_FREE;
	WRITE_ONCE(queue->puts_in_flight, queue->puts_in_flight - 1);
}

/*
 * Handles a batch of references. Each outcome but HELD erases the index entry, if that entry is
 * still the reference's own. Otherwise the page was invalidated before the answer, and GONE does
 * not show that the host lost a page.
 */
static void ref_answered(struct tmem_queue *queue, struct tmem_ref_batch *batch)
{
	u8 status = VIRTIO_TMEM_S_UNANSWERED, result;
	unsigned int i, answered = 0;
	u64 gone = 0;
	bool lost;

	if (batch->req.used_bytes >= sizeof(batch->in.resp))
		status = READ_ONCE(batch->in.resp.status);
	if (status == VIRTIO_TMEM_S_STALE) {
		tmem_count(TMEM_STAT_stale);
		tmem_dev_resync(queue->dev, false);
	}
	for (i = 0; i < batch->count; i++) {
		result = VIRTIO_TMEM_S_UNANSWERED;
		if (status == VIRTIO_TMEM_S_OK &&
		    batch->req.used_bytes >= sizeof(batch->in.resp) + i + 1)
			result = READ_ONCE(batch->in.result[i]);
		if (result == VIRTIO_TMEM_P_HELD) {
			answered++;
			continue;
		}
		lost = tmem_index_erase_offset(batch->bucket[i],
					       le64_to_cpu(batch->out.page[i].object),
					       le64_to_cpu(batch->out.page[i].index),
					       batch->offset[i]);
		if (!lost)
			tmem_count(TMEM_STAT_refs_unneeded);
		else if (result == VIRTIO_TMEM_P_GONE)
			gone |= BIT_ULL(answered++);
		else
			tmem_count(TMEM_STAT_refs_unanswered);
	}
	tmem_count_n(TMEM_STAT_refs_held, answered - hweight64(gone));
	tmem_count_n(TMEM_STAT_refs_gone, hweight64(gone));
	tmem_retain_learn(queue->dev, gone, answered);
	batch->req.state = TMEM_REQ_FREE;
	WRITE_ONCE(queue->refs_in_flight, queue->refs_in_flight - 1);
}

static bool req_done(const struct tmem_req *req)
{
	/* The answer was written before; pairs with drain(). */
	return smp_load_acquire(&req->state) == TMEM_REQ_DONE;
}

/*
 * Only the sender frees a request. Concurrently, drain() only turns a SENT request into a DONE one.
 */
static bool req_free(const struct tmem_req *req)
{
	return READ_ONCE(req->state) == TMEM_REQ_FREE;
}

static void take_answers(struct tmem_queue *queue, struct turn *turn)
{
	unsigned int i;

	for (i = 0; i < TMEM_FLUSHES_IN_FLIGHT; i++) {
		if (!req_done(&queue->flush[i]->req))
			continue;
		queue->flush[i]->req.state = TMEM_REQ_FREE;
		WRITE_ONCE(queue->flushes_in_flight, queue->flushes_in_flight - 1);
	}
	for (i = 0; queue->ref && i < TMEM_REFS_IN_FLIGHT && turn->budget; i++) {
		if (!req_done(&queue->ref_batch[i]->req))
			continue;
		ref_answered(queue, queue->ref_batch[i]);
		turn->budget--;
	}
	for (i = 0; i < TMEM_PUTS_IN_FLIGHT && turn->budget; i++) {
		if (!req_done(&queue->put[i]->req))
			continue;
		put_answered(queue, queue->put[i]);
		turn->budget--;
	}
}

/* --- flushes ------------------------------------------------------------------------------- */

static int submit(struct tmem_queue *queue, struct turn *turn, struct tmem_req *req,
		  struct scatterlist *out, struct scatterlist *in)
{
	struct scatterlist *sgs[] = { out, in };
	int err;

	spin_lock(&queue->vq_lock);
	err = virtqueue_add_sgs(queue->vq, sgs, 1, 1, req, GFP_ATOMIC);
	if (!err) {
		req->state = TMEM_REQ_SENT;
		turn->notify |= virtqueue_kick_prepare(queue->vq);
	} else if (err == -ENOSPC || err == -ENOMEM) {
		/*
		 * Wait until something is answered. If nothing is in flight, the queue stays
		 * stalled.
		 */
		WRITE_ONCE(queue->stalled, true);
	}
	spin_unlock(&queue->vq_lock);
	return err;
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
static bool send_flushes(struct tmem_queue *queue, struct turn *turn)
{
	struct tmem_flush_batch *batch = free_flush_batch(queue);
	unsigned int taken, count = 0;
	struct scatterlist out, in;
	u32 pool = 0;

	if (!READ_ONCE(queue->nr_flush) || (!batch && turn->generation))
		return false;
	spin_lock(&queue->ring_lock);
	for (taken = 0; taken < queue->nr_flush; taken++) {
		const struct tmem_flush_range *range = &queue->pending[taken];

		if (!turn->generation || range->epoch != turn->epoch)
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
	spin_unlock(&queue->ring_lock);
	if (!count)
		return false;

	batch->out.hdr = (struct virtio_tmem_req){
		.generation = cpu_to_le64(turn->generation),
		.type = cpu_to_le16(VIRTIO_TMEM_T_FLUSH),
		.count = cpu_to_le16(count),
		.pool = cpu_to_le32(pool),
	};
	batch->resp.status = VIRTIO_TMEM_S_UNANSWERED;
	batch->req.room_bytes = sizeof(batch->resp);
	sg_init_one(&out, &batch->out, sizeof(batch->out.hdr) + count * sizeof(*batch->out.range));
	sg_init_one(&in, &batch->resp, sizeof(batch->resp));
	WRITE_ONCE(queue->flushes_in_flight, queue->flushes_in_flight + 1);
	if (submit(queue, turn, &batch->req, &out, &in)) {
		WRITE_ONCE(queue->flushes_in_flight, queue->flushes_in_flight - 1);
		tmem_count_n(TMEM_STAT_flushes_dropped, count);
		return false;
	}
	tmem_count(TMEM_STAT_requests_flush);
	return true;
}

/* --- puts ---------------------------------------------------------------------------------- */

/* Frees the next slot without sending it. */
static void skip_slot(struct tmem_queue *queue, struct tmem_slot *slot)
{
	if (slot->state == TMEM_SLOT_READY)
		erase_slot(slot, TMEM_STAT_puts_unanswered);
	WRITE_ONCE(slot->state, TMEM_SLOT_FREE);
	/* Pairs with waiting_puts(). */
	smp_store_release(&queue->next, queue->next + 1);
}

static struct tmem_put_batch *free_put_batch(struct tmem_queue *queue)
{
	unsigned int i;

	for (i = 0; i < TMEM_PUTS_IN_FLIGHT; i++)
		if (req_free(&queue->put[i]->req))
			return queue->put[i];
	return NULL;
}

/*
 * Returns how many slots from next on can go in one request: ready, of one pool, of this epoch.
 * Frees slots before them that must not be sent, a batch at most; then it returns 0.
 */
static unsigned int count_slots(struct tmem_queue *queue, struct turn *turn)
{
	unsigned int count = 0, skipped = 0;
	struct tmem_slot *slot;
	u32 pool = 0;
	u8 state;

	while (count < queue->dev->batch_max && queue->next + count != turn->head) {
		slot = slot_of(queue, queue->next + count);
		state = slot_state(slot);
		if (state == TMEM_SLOT_FILLING)
			break;
		if (state == TMEM_SLOT_SKIP || !turn->generation ||
		    slot->epoch != turn->epoch) {
			if (count || skipped++ == queue->dev->batch_max)
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

/*
 * Sends one batch of puts: a full one, or any if puts are due. Returns whether there may be more to
 * send.
 */
static bool send_puts(struct tmem_queue *queue, struct turn *turn, bool due)
{
	unsigned int count, i, nr = 0;
	struct tmem_put_batch *batch = free_put_batch(queue);
	u64 next = queue->next;
	struct scatterlist out[1 + BATCH_SGS], in;
	struct tmem_slot *slot;
	int err;

	count = count_slots(queue, turn);
	if (!count)
		return queue->next != next;
	if (!batch || (turn->head - queue->next < queue->dev->batch_full && !due))
		return false;
	slot = slot_of(queue, queue->next);
	batch->first = queue->next;
	batch->count = count;
	batch->out.hdr = (struct virtio_tmem_req){
		.generation = cpu_to_le64(turn->generation),
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
	err = submit(queue, turn, &batch->req, out, &in);
	if (err) {
		WRITE_ONCE(queue->puts_in_flight, queue->puts_in_flight - 1);
		/*
		 * If the virtqueue is full or memory is short (-ENOSPC, -ENOMEM), the slots wait.
		 * Any other error means that the queue has stopped, so its slots are skipped.
		 */
		if (err != -ENOSPC && err != -ENOMEM)
			for (i = 0; i < count; i++)
				skip_slot(queue, slot_of(queue, queue->next));
		return false;
	}
	tmem_count(TMEM_STAT_requests_put);
	/* Pairs with waiting_puts(). */
	smp_store_release(&queue->next, queue->next + count);
	return true;
}

/* --- references ---------------------------------------------------------------------------- */

static struct tmem_ref_batch *free_ref_batch(struct tmem_queue *queue)
{
	unsigned int i;

	for (i = 0; i < TMEM_REFS_IN_FLIGHT; i++)
		if (req_free(&queue->ref_batch[i]->req))
			return queue->ref_batch[i];
	return NULL;
}

/*
 * Moves the oldest references of one pool to a batch, and drops those of older epochs. Returns
 * whether there is something to send.
 */
static bool fill_ref_batch(struct tmem_queue *queue, struct turn *turn,
			   struct tmem_ref_batch *batch)
{
	unsigned int tail, count = 0, dropped = 0;
	u32 pool = 0;

	spin_lock(&queue->ring_lock);
	for (tail = queue->ref_tail; tail != queue->ref_head; tail++) {
		const struct tmem_ref *ref = &queue->ref[tail % queue->dev->ref_pending];

		if (!turn->generation || ref->epoch != turn->epoch) {
			dropped++;	/* the host has forgotten this page already */
			continue;
		}
		if (count && (ref->pool != pool || count == queue->dev->batch_max))
			break;
		pool = ref->pool;
		batch->offset[count] = ref->offset;
		batch->bucket[count] = ref->bucket;
		batch->out.page[count++] = (struct virtio_tmem_ref_page){
			.object = cpu_to_le64(ref->object),
			.index = cpu_to_le64(ref->index),
			.cookie = cpu_to_le64(ref->cookie),
		};
	}
	WRITE_ONCE(queue->ref_tail, tail);
	spin_unlock(&queue->ring_lock);
	tmem_count_n(TMEM_STAT_refs_dropped, dropped);
	if (!count)
		return false;
	batch->count = count;
	batch->out.hdr = (struct virtio_tmem_req){
		.generation = cpu_to_le64(turn->generation),
		.type = cpu_to_le16(VIRTIO_TMEM_T_REF),
		.count = cpu_to_le16(count),
		.pool = cpu_to_le32(pool),
	};
	return true;
}

/*
 * Sends one batch of references: a full one, or any if they are due. Returns whether there may be
 * more to send.
 */
static bool send_refs(struct tmem_queue *queue, struct turn *turn, bool due)
{
	unsigned int waiting = waiting_refs(queue);
	struct scatterlist out, in;
	struct tmem_ref_batch *batch;

	if (!waiting || (turn->generation && waiting < queue->dev->batch_max && !due))
		return false;
	batch = free_ref_batch(queue);
	if ((!batch && turn->generation) || !fill_ref_batch(queue, turn, batch))
		return false;
	batch->in.resp.status = VIRTIO_TMEM_S_UNANSWERED;
	memset(batch->in.result, VIRTIO_TMEM_S_UNANSWERED, sizeof(batch->in.result));
	batch->req.room_bytes = sizeof(batch->in.resp) + batch->count;
	sg_init_one(&out, &batch->out,
		    sizeof(batch->out.hdr) + batch->count * sizeof(*batch->out.page));
	sg_init_one(&in, &batch->in, batch->req.room_bytes);
	WRITE_ONCE(queue->refs_in_flight, queue->refs_in_flight + 1);
	if (submit(queue, turn, &batch->req, &out, &in)) {
		WRITE_ONCE(queue->refs_in_flight, queue->refs_in_flight - 1);
		tmem_count_n(TMEM_STAT_refs_dropped, batch->count);
		return false;
	}
	tmem_count(TMEM_STAT_requests_ref);
	return true;
}

/* Sends what is due. send_lock is held. */
static void send_due(struct tmem_queue *queue, struct turn *turn)
{
	struct tmem_dev *dev = queue->dev;
	unsigned int ref_tail = queue->ref_tail;
	u64 next = queue->next;
	bool due, later, puts, refs;

	/*
	 * Read the generation before the epoch, against the order of sync_work_fn(), so that slots
	 * of an older epoch are never sent with a newer generation.
	 */
	turn->generation = READ_ONCE(dev->generation);
	smp_rmb();	/* pairs with sync_work_fn() */
	turn->epoch = READ_ONCE(dev->epoch);
	/*
	 * Read the head before the flushes, so that a flush that was noted before a later put of
	 * the same page is also sent before that put.
	 */
	turn->head = smp_load_acquire(&queue->head);	/* pairs with reserve() */
	while (turn->budget && send_flushes(queue, turn))
		turn->budget--;
	/* Puts and references wait for flushes that cannot be sent yet. */
	if (READ_ONCE(queue->nr_flush))
		return;
	due = turn->all || (queue->timed && time_after_eq(jiffies, queue->kick_at));
	while (turn->budget && send_puts(queue, turn, due))
		turn->budget--;
	while (turn->budget && send_refs(queue, turn, due))
		turn->budget--;
	/*
	 * Puts that are left after others were sent began to wait later, unless the budget ended
	 * before the last that was due. So did references. Both have one time, which moves only if
	 * it does not make the other kind wait longer.
	 */
	puts = queue->next != turn->head;
	refs = waiting_refs(queue);
	if (due)
		later = !puts && !refs;
	else
		later = (queue->next != next && !refs) || (queue->ref_tail != ref_tail && !puts);
	if (later)
		WRITE_ONCE(queue->kick_at, jiffies + msecs_to_jiffies(TMEM_PUT_DELAY_MS));
}

/* Runs one turn of the sender, as tmem_send() and tmem_send_all() describe it. */
static bool send_turn(struct tmem_queue *queue, bool all)
{
	struct turn turn = { .budget = TMEM_SEND_BATCHES, .all = all };
	struct tmem_dev *dev = queue->dev;
	unsigned long flags;

	spin_lock_irqsave(&queue->send_lock, flags);
	if (!READ_ONCE(dev->stopping)) {
		/* Answers whose interrupt has not come yet free slots as well. */
		spin_lock(&queue->vq_lock);
		drain(queue);
		spin_unlock(&queue->vq_lock);
		take_answers(queue, &turn);
		/* Fields that block senders are written before slots are read; see slot_done(). */
		smp_mb();
		send_due(queue, &turn);
		tmem_ring_free(queue);
		/* The feeder skipped this queue when it set its time, because it was blocked. */
		if (queue->unwatched && !all_blocked(queue)) {
			queue->unwatched = false;
			WRITE_ONCE(queue->attention, true);
		}
	} else {
		turn.budget = 1;
	}
	spin_unlock_irqrestore(&queue->send_lock, flags);
	if (turn.notify)
		virtqueue_notify(queue->vq);
	if (READ_ONCE(queue->attention))
		wake_feeder(queue);
	return !turn.budget;
}

/**
 * tmem_send() - take the answers of a queue and send what is due
 * @queue: the queue
 *
 * Context: any but NMI, without locks of the core. The device is not reset before the call returns.
 *
 * Return: true if the work was limited, so that there may be more.
 */
bool tmem_send(struct tmem_queue *queue)
{
	return send_turn(queue, false);
}

/**
 * tmem_send_all() - take the answers of a queue and send what waits, in full batches or not
 * @queue: the queue
 *
 * Pages that the host cannot take now stay in the queue. The work is limited to as many batches as
 * the host can have.
 *
 * Context: process, may sleep. The device is not reset before the call returns.
 */
void tmem_send_all(struct tmem_queue *queue)
{
	unsigned int turns = DIV_ROUND_UP(TMEM_PUTS_IN_FLIGHT, TMEM_SEND_BATCHES);

	while (turns-- && send_turn(queue, true))
		cond_resched();
}

/**
 * tmem_send_timeout() - return how long the feeder may sleep without being woken
 * @queue: the queue, which tmem_send() was called for
 *
 * Context: the feeder.
 *
 * Return: time in jiffies until waiting puts and references are due.
 */
long tmem_send_timeout(struct tmem_queue *queue)
{
	long timeout = MAX_SCHEDULE_TIMEOUT;

	spin_lock_irq(&queue->send_lock);
	queue->unwatched = false;
	/*
	 * Pairs with reserve() and tmem_queue_ref(). A put or reference that comes later sees that
	 * timed is false.
	 */
	if (smp_load_acquire(&queue->head) == queue->next && !waiting_refs(queue)) {
		WRITE_ONCE(queue->timed, false);
	} else {
		if (!queue->timed) {
			WRITE_ONCE(queue->kick_at, jiffies + msecs_to_jiffies(TMEM_PUT_DELAY_MS));
			WRITE_ONCE(queue->timed, true);
		}
		/* The next answer brings the feeder back. */
		if (all_blocked(queue))
			queue->unwatched = true;
		else
			timeout = max((long)(queue->kick_at - jiffies), 1L);
	}
	spin_unlock_irq(&queue->send_lock);
	return timeout;
}

/* --- callers ------------------------------------------------------------------------------- */

/* Sends, and leaves what exceeds the limit of one turn to another turn. */
static void send_one_turn(struct tmem_queue *queue)
{
	if (!tmem_send(queue))
		return;
	if (arch_irq_work_has_interrupt()) {
		irq_work_queue(&queue->send_work);
	} else {
		WRITE_ONCE(queue->attention, true);
		wake_feeder(queue);
	}
}

static void send_work_fn(struct irq_work *work)
{
	send_one_turn(container_of(work, struct tmem_queue, send_work));
}

/**
 * tmem_put_end() - send the full batches of puts, after the page cache's lock was released
 *
 * Kernels whose irq_work has an interrupt need no call.
 *
 * Context: any but NMI, without locks of the core and i_pages.
 */
void tmem_put_end(void)
{
	struct tmem_dev *dev;
	unsigned int i;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	if (dev && READ_ONCE(dev->full))
		for (i = 0; i < dev->nr_queues; i++)
			if (test_and_clear_bit(i, &dev->full))
				send_one_turn(&dev->queue[i]);
	rcu_read_unlock();
}

/**
 * tmem_send_drain() - take the device's answers without waiting for its interrupt
 * @queue: the queue
 */
void tmem_send_drain(struct tmem_queue *queue)
{
	unsigned long flags;
	bool work;

	spin_lock_irqsave(&queue->vq_lock, flags);
	work = drain(queue);
	spin_unlock_irqrestore(&queue->vq_lock, flags);
	if (work)
		send_one_turn(queue);
}

/**
 * tmem_send_vq_callback() - take the device's answers at its interrupt
 * @vq: a request queue
 */
void tmem_send_vq_callback(struct virtqueue *vq)
{
	struct tmem_dev *dev = vq->vdev->priv;
	struct tmem_queue *queue = &dev->queue[vq->index - 1];
	unsigned long flags;
	bool work = false;

	spin_lock_irqsave(&queue->vq_lock, flags);
	do {
		virtqueue_disable_cb(vq);
		work |= drain(queue);
	} while (!virtqueue_enable_cb(vq));
	spin_unlock_irqrestore(&queue->vq_lock, flags);
	if (work)
		send_one_turn(queue);
}

/* --- set-up -------------------------------------------------------------------------------- */

/**
 * tmem_send_init() - allocate the requests of a queue
 * @dev: the device; its memory_bytes grow
 * @queue: the queue
 *
 * Return: 0, or -ENOMEM; the caller then calls tmem_send_exit() as well.
 */
int tmem_send_init(struct tmem_dev *dev, struct tmem_queue *queue)
{
	unsigned int i;

	init_irq_work(&queue->send_work, send_work_fn);
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
 * tmem_send_stop() - wait until no irq_work of a queue runs
 * @queue: the queue; no put and no interrupt of the device can come any more
 *
 * Context: process, may sleep.
 */
void tmem_send_stop(struct tmem_queue *queue)
{
	irq_work_sync(&queue->send_work);
}

/**
 * tmem_send_exit() - free the requests of a queue
 * @queue: the queue; the device was reset
 */
void tmem_send_exit(struct tmem_queue *queue)
{
	unsigned int i;

	for (i = 0; i < TMEM_PUTS_IN_FLIGHT; i++)
		kfree(queue->put[i]);
	for (i = 0; i < TMEM_FLUSHES_IN_FLIGHT; i++)
		kfree(queue->flush[i]);
}
