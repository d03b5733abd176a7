// SPDX-License-Identifier: GPL-2.0-only
/*
 * Sender: sends puts, flushes and references to the virtqueues of a device, and takes the answers.
 *
 * No thread is needed to send a full batch. The task whose put completes the batch sends it when it
 * has released the lock of the record. The device's interrupt takes answers, erases the entries of
 * pages that the host refused, frees the slots, and sends the full batches that waited for an
 * answer. The feeder sends the rest: partial batches whose time is over, and flushes. All of them
 * call tmem_send(), whose lock makes one of them the queue's only sender. A call processes at most
 * TMEM_SEND_BATCHES batches with that lock and interrupts off.
 *
 * A put waits only while TMEM_PUTS_IN_FLIGHT batches are at the host, or the virtqueue is full.
 *
 * After every outcome of a put other than STORED, the sender erases the index entry, if the entry
 * still belongs to this put. The sender never sends a page that was put before the driver last
 * erased all entries.
 */
#include <linux/slab.h>

#include "wake.h"

/*
 * Maximum number of groups with the pages of one batch of puts. It is one more than a batch fills,
 * because a batch may start within a group.
 */
#define BATCH_SGS	(TMEM_BATCH_GROUPS + 1)

/* State of one call of send_turn(), which handles at most TMEM_SEND_BATCHES batches. */
struct turn {
	u64 generation;
	u64 head;
	u32 epoch;
	unsigned int budget;	/* batches that the call may still send, complete or erase */
	bool all;		/* also send partial batches */
	bool notify;		/* the device has to be notified */
};

static void erase_slot(struct tmem_slot *slot, enum tmem_stat why)
{
	tmem_index_erase_offset(slot->bucket, slot->object, slot->index, slot->offset);
	tmem_count(why);
}

/* --- answers ------------------------------------------------------------------------------- */

/*
 * Removes answered requests from the virtqueue. The caller holds vq_lock.
 * Returns whether there is work for the sender.
 */
static bool drain(struct tmem_queue *queue)
{
	bool work = false;
	struct tmem_req *req;
	unsigned int len;

	lockdep_assert_held(&queue->vq_lock);
	while ((req = virtqueue_get_buf(queue->vq, &len))) {
		tmem_req_used(&queue->in_flight, req, len);
		/* Any answer frees descriptors for requests that did not fit into the virtqueue. */
		if (queue->stalled) {
			WRITE_ONCE(queue->stalled, false);
			work = true;
		}
		if (req->kind == TMEM_REQ_GET) {
			tmem_bounce_answered(queue->dev,
					     container_of(req, struct tmem_get_req, req));
		} else {
			/*
			 * Complete the answer before setting the state to DONE; pairs with
			 * req_done().
			 */
			smp_store_release(&req->state, TMEM_REQ_DONE);
			work = true;
		}
	}
	return work;
}

/* Has the host drop a page that it may have stored, if the page was erased meanwhile. */
static void flush_orphan(const struct tmem_slot *slot)
{
	const struct tmem_where where = {
		.object = slot->object,
		.pool = slot->pool,
		.bucket = slot->bucket,
	};

	if (slot->private && !TMEM_WITHOUT(ORPHAN) &&
	    tmem_index_orphan(where.bucket, where.object, slot->index))
		tmem_queue_flush(&where, slot->index, 1, true);
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
		tmem_dev_ask(queue->dev);
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
		if (result != VIRTIO_TMEM_P_REFUSED)
			flush_orphan(slot);
		WRITE_ONCE(slot->state, TMEM_SLOT_FREE);
	}
	tmem_count_n(TMEM_STAT_puts_stored, stored);
	batch->req.state = TMEM_REQ_FREE;
	WRITE_ONCE(queue->puts_in_flight, queue->puts_in_flight - 1);
}

/*
 * Handles a batch of references that the device answered or gave back unanswered. After each
 * outcome but HELD, erases the index entry, if the entry still has the reference's cookie. If the
 * entry no longer has this cookie, the page was invalidated before the answer, and GONE does not
 * mean that the host lost a page.
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
		tmem_dev_ask(queue->dev);
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
	/* Read the answer after the state; pairs with drain(). */
	return smp_load_acquire(&req->state) == TMEM_REQ_DONE;
}

/*
 * Returns whether a request is FREE. Only the sender frees a request. Concurrently, drain() only
 * turns a SENT request into a DONE one.
 */
static bool req_free(const struct tmem_req *req)
{
	return READ_ONCE(req->state) == TMEM_REQ_FREE;
}

/* Handles flushes that the device answered or gave back unanswered. */
static void flush_answered(struct tmem_queue *queue, struct tmem_flush_batch *batch)
{
	u8 status = VIRTIO_TMEM_S_UNANSWERED;

	if (batch->req.used_bytes >= sizeof(batch->resp))
		status = READ_ONCE(batch->resp.status);
	/* The host has no page of a pool or a generation that does not exist any more. */
	if (batch->must && status != VIRTIO_TMEM_S_OK && status != VIRTIO_TMEM_S_NO_POOL &&
	    status != VIRTIO_TMEM_S_STALE)
		tmem_pool_lost(le32_to_cpu(batch->out.hdr.pool));
	batch->req.state = TMEM_REQ_FREE;
	WRITE_ONCE(queue->flushes_in_flight, queue->flushes_in_flight - 1);
}

static void take_answers(struct tmem_queue *queue, struct turn *turn)
{
	unsigned int i;

	for (i = 0; i < TMEM_FLUSHES_IN_FLIGHT; i++)
		if (req_done(&queue->flush[i]->req))
			flush_answered(queue, queue->flush[i]);
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
	err = queue->in_flight.nr && TMEM_INJECT(vq_full) ? -ENOSPC :
	      virtqueue_add_sgs(queue->vq, sgs, 1, 1, req, GFP_ATOMIC);
	if (!err) {
		tmem_req_sent(&queue->in_flight, req);
		turn->notify |= virtqueue_kick_prepare(queue->vq);
	} else if (err == -ENOSPC || err == -ENOMEM) {
		/*
		 * Make the queue wait until a request is answered. If no request is in flight, the
		 * queue stays stalled.
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

/*
 * Removes the first @taken pending flushes, which were sent or are not needed. @pages: number of
 * pages of the last of them when it was sent. It may have grown since.
 */
static void remove_flushes(struct tmem_queue *queue, unsigned int taken, u64 pages)
{
	struct tmem_flush_range *range;

	spin_lock(&queue->ring_lock);
	range = &queue->pending[taken - 1];
	if (range->nr_pages > pages) {
		range->index += pages;
		range->nr_pages -= pages;
		taken--;
	}
	WRITE_ONCE(queue->nr_flush, queue->nr_flush - taken);
	memmove(queue->pending, queue->pending + taken, queue->nr_flush * sizeof(*queue->pending));
	spin_unlock(&queue->ring_lock);
}

/*
 * Sends the oldest pending flushes (ranges that the host should drop) of one pool. Returns whether
 * there may be more to send. If the virtqueue has no room, the flushes stay pending.
 */
static bool send_flushes(struct tmem_queue *queue, struct turn *turn)
{
	struct tmem_flush_batch *batch = free_flush_batch(queue);
	unsigned int taken, count = 0;
	struct scatterlist out, in;
	bool must = false;
	int err;
	u64 pages = 0;
	u32 pool = 0;

	if (!READ_ONCE(queue->nr_flush) || (!batch && turn->generation))
		return false;
	spin_lock(&queue->ring_lock);
	for (taken = 0; taken < queue->nr_flush; taken++) {
		const struct tmem_flush_range *range = &queue->pending[taken];
		bool is_old = !turn->generation || range->epoch != turn->epoch;

		if (!is_old && count && (range->pool != pool || count == queue->dev->batch_max))
			break;
		pages = range->nr_pages;
		if (is_old)
			continue;	/* discard: the host drops all pages of older epochs */
		pool = range->pool;
		must |= range->must;
		batch->out.range[count++] = (struct virtio_tmem_range){
			.object = cpu_to_le64(range->object),
			.index = cpu_to_le64(range->index),
			.nr_pages = cpu_to_le64(range->nr_pages),
		};
	}
	spin_unlock(&queue->ring_lock);
	if (!count) {
		remove_flushes(queue, taken, pages);
		return false;
	}
	batch->must = must;
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
	err = submit(queue, turn, &batch->req, &out, &in);
	if (err == -ENOSPC || err == -ENOMEM) {
		WRITE_ONCE(queue->flushes_in_flight, queue->flushes_in_flight - 1);
		return false;
	}
	remove_flushes(queue, taken, pages);
	if (err) {	/* the virtqueue is broken */
		WRITE_ONCE(queue->flushes_in_flight, queue->flushes_in_flight - 1);
		tmem_count_n(TMEM_STAT_flushes_dropped, count);
		if (must)
			tmem_pool_lost(pool);
		return false;
	}
	tmem_count(TMEM_STAT_requests_flush);
	return true;
}

/* --- puts ---------------------------------------------------------------------------------- */

/* Frees the next slot of the put ring without sending it. */
static void skip_slot(struct tmem_queue *queue, struct tmem_slot *slot)
{
	if (slot->state == TMEM_SLOT_READY)
		erase_slot(slot, TMEM_STAT_puts_unanswered);
	WRITE_ONCE(slot->state, TMEM_SLOT_FREE);
	/* Set the slot to FREE before moving next over it; pairs with waiting_puts(). */
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
 * Returns how many slots, from queue->next on, can go into one request: slots that are READY, of
 * one pool and of the current epoch. If the next slots must not be sent, frees up to a batch of
 * them and returns 0.
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
 * Sends one batch of puts: a full batch or, if @due, also a partial one. Returns whether there may
 * be more to send.
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
		if (!i || !((batch->first + i) % TMEM_GROUP_PAGES))
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
	/* Complete the batch before moving next over its slots; pairs with waiting_puts(). */
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
 * Moves the oldest references of one pool from the queue to a batch, and drops references of older
 * epochs. Returns whether there is something to send.
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
			dropped++;	/* not needed: the host drops all pages of older epochs */
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
 * Sends one batch of references: a full batch or, if @due, also a partial one. Returns whether
 * there may be more to send.
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

/*
 * Sends flushes, full batches and partial batches whose time has come. The caller holds send_lock.
 */
static void send_due(struct tmem_queue *queue, struct turn *turn)
{
	struct tmem_dev *dev = queue->dev;
	unsigned int ref_tail = queue->ref_tail;
	u64 next = queue->next;
	bool due, later, puts, refs;

	/*
	 * Read the generation before the epoch, because sync_work_fn() writes them in the opposite
	 * order, so that slots of an older epoch are never sent with a newer generation.
	 */
	turn->generation = READ_ONCE(dev->generation);
	smp_rmb();	/* pairs with sync_work_fn() */
	turn->epoch = READ_ONCE(dev->epoch);
	/*
	 * Read the head before the flushes, so that a flush that was queued before a later put of
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
	 * kick_at is the one time at which waiting puts and references become due. If they were
	 * due, move it to a later time only if none is left. If they were not due, move it if this
	 * call sent some of one kind and none of the other kind waits: those that are left began to
	 * wait later.
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

/*
 * Takes the answers of a queue, and sends full batches and due partial batches, or all batches if
 * @all. Returns whether the limit of TMEM_SEND_BATCHES batches was reached.
 */
static bool send_turn(struct tmem_queue *queue, bool all)
{
	struct turn turn = { .budget = TMEM_SEND_BATCHES, .all = all };
	struct tmem_dev *dev = queue->dev;
	unsigned long flags;

	spin_lock_irqsave(&queue->send_lock, flags);
	if (!READ_ONCE(dev->stopping)) {
		/* Take answers whose interrupt has not come yet, because they free slots, too. */
		spin_lock(&queue->vq_lock);
		drain(queue);
		spin_unlock(&queue->vq_lock);
		take_answers(queue, &turn);
		/*
		 * Write the fields that block senders before reading slots; pairs with the barrier
		 * in slot_done().
		 */
		smp_mb();
		send_due(queue, &turn);
		tmem_ring_free(queue);
		/*
		 * When the feeder set its timeout, it left out this queue, because the queue was
		 * blocked. The queue is not blocked any more.
		 */
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

/*
 * Takes the answers of a queue, and sends full batches and due partial batches. Returns whether the
 * call reached its limit of TMEM_SEND_BATCHES batches, so that there may be more work. Context: any
 * but NMI, without locks of the core. tear_down() in transport.c waits for all callers before it
 * deletes the virtqueues.
 */
bool tmem_send(struct tmem_queue *queue)
{
	return send_turn(queue, false);
}

/*
 * Takes the answers of a queue, and sends all waiting puts and references. Pages that the host
 * cannot take now stay in the queue. The function processes at most TMEM_PUTS_IN_FLIGHT batches.
 *
 * It may sleep. The caller has a reference to the device (tmem_dev_get()), so that the device is
 * not reset during the call.
 */
void tmem_send_all(struct tmem_queue *queue)
{
	unsigned int turns = DIV_ROUND_UP(TMEM_PUTS_IN_FLIGHT, TMEM_SEND_BATCHES);
	bool more;

	do {
		/* The answer to a fetch raises a softirq. */
		local_bh_disable();
		more = send_turn(queue, true);
		local_bh_enable();
		cond_resched();
	} while (more && --turns);
}

/*
 * Returns how long the feeder may sleep without being woken: the time in jiffies until the waiting
 * puts and references of the queue are due, or MAX_SCHEDULE_TIMEOUT if none waits or the device
 * must answer before any can be sent. The caller is the feeder, which has called tmem_send().
 */
long tmem_send_timeout(struct tmem_queue *queue)
{
	long timeout = MAX_SCHEDULE_TIMEOUT;

	spin_lock_irq(&queue->send_lock);
	queue->unwatched = false;
	/*
	 * Pairs with reserve() and tmem_queue_ref(). A later put or reference sees that timed is
	 * false, and wakes the feeder.
	 */
	if (smp_load_acquire(&queue->head) == queue->next && !waiting_refs(queue)) {
		WRITE_ONCE(queue->timed, false);
	} else {
		if (!queue->timed) {
			WRITE_ONCE(queue->kick_at, jiffies + msecs_to_jiffies(TMEM_PUT_DELAY_MS));
			WRITE_ONCE(queue->timed, true);
		}
		/* A blocked queue needs no timeout, because its next answer wakes the feeder. */
		if (all_blocked(queue))
			queue->unwatched = true;
		else
			timeout = max((long)(queue->kick_at - jiffies), 1L);
	}
	spin_unlock_irq(&queue->send_lock);
	return timeout;
}

/* --- callers ------------------------------------------------------------------------------- */

/*
 * Calls tmem_send() until no work is left. The number of calls suffices to handle the answer of
 * each batch at the host and to send a new batch in its place; the feeder does the rest.
 */
static void send_turns(struct tmem_queue *queue)
{
	unsigned int turns = DIV_ROUND_UP(2 * TMEM_PUTS_IN_FLIGHT, TMEM_SEND_BATCHES);

	while (tmem_send(queue)) {
		if (!--turns) {
			WRITE_ONCE(queue->attention, true);
			wake_feeder(queue);
			return;
		}
	}
}

void tmem_put_end(void)
{
	/* The answer to a fetch raises a softirq. In a task, only this call lets it run at once. */
	bool softirqs = !irqs_disabled();
	struct tmem_dev *dev;
	unsigned int i;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	if (dev && READ_ONCE(dev->full)) {
		if (softirqs)
			local_bh_disable();
		for (i = 0; i < dev->nr_queues; i++)
			if (test_and_clear_bit(i, &dev->full))
				send_turns(&dev->queue[i]);
		if (softirqs)
			local_bh_enable();
	}
	rcu_read_unlock();
}

/* Takes the device's answers without waiting for its interrupt. */
void tmem_send_drain(struct tmem_queue *queue)
{
	unsigned long flags;
	bool work;

	spin_lock_irqsave(&queue->vq_lock, flags);
	work = drain(queue);
	spin_unlock_irqrestore(&queue->vq_lock, flags);
	if (work)
		send_turns(queue);
}

/* Takes the device's answers at its interrupt. */
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
		send_turns(queue);
}

/* --- set-up -------------------------------------------------------------------------------- */

/*
 * Allocates the requests of a queue, and adds their size to dev->memory_bytes. Returns 0, or
 * -ENOMEM; the caller then calls tmem_send_exit(), too.
 */
int tmem_send_init(struct tmem_dev *dev, struct tmem_queue *queue)
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

/*
 * Counts the pages of a queue whose puts and references are lost by a reset of the device. No put
 * and no interrupt can come any more. The index need not be changed, because the caller empties it.
 */
void tmem_send_lost(struct tmem_queue *queue)
{
	unsigned int i;
	u64 seq;

	for (seq = queue->tail; seq != queue->head; seq++)
		if (slot_of(queue, seq)->state == TMEM_SLOT_READY)
			tmem_count(TMEM_STAT_puts_unanswered);
	for (i = 0; queue->ref && i < TMEM_REFS_IN_FLIGHT; i++)
		if (!req_free(&queue->ref_batch[i]->req))
			tmem_count_n(TMEM_STAT_refs_unanswered, queue->ref_batch[i]->count);
	tmem_count_n(TMEM_STAT_refs_dropped, waiting_refs(queue));
}

/* Frees the requests of a queue, after the reset of the device. */
void tmem_send_exit(struct tmem_queue *queue)
{
	unsigned int i;

	for (i = 0; i < TMEM_PUTS_IN_FLIGHT; i++)
		kfree(queue->put[i]);
	for (i = 0; i < TMEM_FLUSHES_IN_FLIGHT; i++)
		kfree(queue->flush[i]);
}
