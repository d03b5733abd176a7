// SPDX-License-Identifier: GPL-2.0-only
/*
 * The put rings of the request queues, and the thread that feeds the virtqueues from them.
 *
 * A put happens under the page cache's lock with interrupts off, so it only copies: into a
 * preallocated slot, whose place follows from the cookie. The slot is the page's home until the
 * host has answered, and its data stay valid until the slot is reserved again, so that a get of a
 * page that was evicted a moment ago needs no host.
 *
 * Reclaim takes neighbours together, and neighbours go to one queue: so the slots are not divided
 * among the queues but shared, in blocks of TMEM_BLOCK_PAGES. A queue takes a block when it has
 * filled the last one, and gives it back when all its slots are free. queue->map has the blocks of
 * a queue, by sequence number; what it says of a block given back stays, and is right until the
 * block is taken again, which the cookie tells.
 *
 * A slot's life: reserved (FILLING, cookie 0), copied, entered into the index, READY with its
 * cookie; sent in a batch; answered, FREE; the tail moves over free slots in order. A put that
 * failed after the reservation leaves a SKIP behind.
 *
 * A get reads slots without a lock: cookie, data, cookie again. Since a new put sets the cookie
 * to 0 before it touches the data, an unchanged cookie means that the data are whole.
 *
 * How long a put waits in the ring: a full batch is sent at once, by the feeder, a real-time
 * thread; a smaller one after TMEM_PUT_DELAY_MS. A request costs as much as many copies, and
 * reclaim takes more than a page: sent one by one, as the host answers, they would cost more than
 * all else. Nobody misses what waits, since a get finds it here. Only with TMEM_PUTS_IN_FLIGHT
 * batches at the host does the feeder wait for an answer.
 *
 * Every way a put can end other than STORED erases its index entry, if that is still its own. Never
 * waits for room: a full ring drops the put and erases the key.
 */
#include <linux/hash.h>
#include <linux/highmem.h>
#include <linux/kthread.h>
#include <linux/slab.h>

#include "../trace.h"
#include "core.h"

/* Data blocks a batch touches: one more than it fills, as it may start within one. */
#define BATCH_SGS	(TMEM_BATCH_BLOCKS + 1)

/*
 * A queue takes another block only while it has less than so many times what is free: alone it may
 * have 8/9 of all, and one that the host does not serve leaves something to the others.
 */
#define SHARE_OF_FREE	8

/* Where slot and data of a sequence number are; seldom of another one, as the cookie tells. */
static unsigned int place_of(struct tmem_queue *queue, u64 seq)
{
	unsigned int block = READ_ONCE(queue->map[seq / TMEM_BLOCK_PAGES % queue->dev->nr_blocks]);

	return block * TMEM_BLOCK_PAGES + seq % TMEM_BLOCK_PAGES;
}

static void *data_at(struct tmem_dev *dev, unsigned int place)
{
	return dev->block[place / TMEM_BLOCK_PAGES] + place % TMEM_BLOCK_PAGES * PAGE_SIZE;
}

static struct tmem_slot *slot_of(struct tmem_queue *queue, u64 seq)
{
	return &queue->dev->slot[place_of(queue, seq)];
}

static u8 slot_state(const struct tmem_slot *slot)
{
	/* Slot and data were written before READY: pairs with put(). */
	return smp_load_acquire(&slot->state);
}

static void *data_of(struct tmem_queue *queue, u64 seq)
{
	return data_at(queue->dev, place_of(queue, seq));
}

/* The slots from head on need a block. */
static bool take_block(struct tmem_dev *dev, struct tmem_queue *queue)
{
	bool taken = false;

	lockdep_assert_held(&queue->ring_lock);
	spin_lock(&dev->block_lock);
	if (queue->owned < SHARE_OF_FREE * dev->nr_free) {
		WRITE_ONCE(queue->map[queue->head / TMEM_BLOCK_PAGES % dev->nr_blocks],
			   dev->free[dev->first_free]);
		dev->first_free = (dev->first_free + 1) % dev->nr_blocks;
		dev->nr_free--;
		queue->owned++;
		taken = true;
	}
	spin_unlock(&dev->block_lock);
	return taken;
}

/* All slots of the block before @seq are free. Used again last: until then its pages are hits. */
static void give_block(struct tmem_dev *dev, struct tmem_queue *queue, u64 seq)
{
	lockdep_assert_held(&queue->ring_lock);
	spin_lock(&dev->block_lock);
	dev->free[(dev->first_free + dev->nr_free) % dev->nr_blocks] =
		queue->map[(seq / TMEM_BLOCK_PAGES - 1) % dev->nr_blocks];
	dev->nr_free++;
	queue->owned--;
	spin_unlock(&dev->block_lock);
}

/**
 * tmem_queue_of() - request queue of a page
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

/* --- put ----------------------------------------------------------------------------------- */

/* Interrupts are off. */
static struct tmem_slot *reserve(struct tmem_dev *dev, struct tmem_queue *queue, void **data,
				 enum tmem_stat *why)
{
	struct tmem_slot *slot = NULL;
	unsigned int place;
	u64 offset;

	spin_lock(&queue->ring_lock);
	offset = tmem_cookie_offset(queue->head - queue->seq_start, dev->nr_queues, queue->nr);
	if (offset > TMEM_SEQ_MASK) {
		*why = TMEM_STAT_puts_dropped_cookies;
	} else if (TMEM_INJECT(ring_full) ||
		   (!(queue->head % TMEM_BLOCK_PAGES) && !take_block(dev, queue))) {
		*why = TMEM_STAT_puts_dropped_ring_full;
	} else {
		place = place_of(queue, queue->head);
		slot = &dev->slot[place];
		*data = data_at(dev, place);
		WRITE_ONCE(slot->state, TMEM_SLOT_FILLING);
		WRITE_ONCE(slot->cookie, 0);
		slot->offset = offset;
		slot->base = READ_ONCE(dev->cookie_base);
		slot->epoch = READ_ONCE(dev->epoch);
		/* The map and the state before it: pairs with queue_has_work() and feed(). */
		smp_store_release(&queue->head, queue->head + 1);
	}
	spin_unlock(&queue->ring_lock);
	/* No data before the zero: pairs with smp_rmb() in tmem_ring_copy(). */
	smp_wmb();
	return slot;
}

static bool queue_has_work(struct tmem_queue *queue)
{
	/* Pairs with reserve(). */
	u64 pending = smp_load_acquire(&queue->head) - READ_ONCE(queue->next);
	unsigned int in_flight = READ_ONCE(queue->puts_in_flight);
	bool stalled = READ_ONCE(queue->stalled);

	if (READ_ONCE(queue->answered))
		return true;
	if (READ_ONCE(queue->nr_flush) && !READ_ONCE(queue->flushes_in_flight) && !stalled)
		return true;
	if (!pending || slot_state(slot_of(queue, READ_ONCE(queue->next))) == TMEM_SLOT_FILLING)
		return false;
	if (!READ_ONCE(queue->dev->generation))
		return true;
	if (stalled || in_flight >= TMEM_PUTS_IN_FLIGHT)
		return false;
	/* The first of a batch wakes the feeder, too: it sets the time. */
	return pending >= queue->dev->batch_full || !READ_ONCE(queue->kick_armed) ||
	       time_after_eq(jiffies, READ_ONCE(queue->kick_at));
}

static void wake_feeder(struct tmem_queue *queue)
{
	/* Pairs with the barrier of wait_event: either we see the sleeper or it sees our work. */
	if (queue_has_work(queue) && wq_has_sleeper(&queue->dev->feeder_wait))
		wake_up(&queue->dev->feeder_wait);
}

/* Puts the page or says why not, having left no entry in the index, if it got so far. */
static bool put(struct tmem_dev *dev, const struct tmem_key *key, pgoff_t index, struct page *page,
		bool workingset, enum tmem_stat *why)
{
	struct tmem_queue *queue = tmem_queue_of(dev, tmem_index_bucket(key), index);
	struct tmem_where where;
	struct tmem_slot *slot;
	void *data, *from;
	u32 check;
	int err;

	slot = reserve(dev, queue, &data, why);
	if (!slot)
		return false;

	from = kmap_local_page(page);
	check = tmem_check_copy(&tmem_keys, data, from);
	kunmap_local(from);

	err = tmem_index_store(key, index, tmem_entry(slot->offset, check), &where);
	if (err) {
		*why = err == -EPERM ? TMEM_STAT_puts_dropped_bypass :
		       err == -EACCES ? TMEM_STAT_puts_dropped_policy :
		       err == -ENOSPC ? TMEM_STAT_puts_dropped_index_full :
		       err == -ENODEV ? TMEM_STAT_puts_dropped_pool :
		       TMEM_STAT_puts_dropped_nomem;
		WRITE_ONCE(slot->state, TMEM_SLOT_SKIP);
	} else {
		slot->object = where.object;
		slot->pool = where.pool;
		slot->bucket = where.bucket;
		slot->index = index;
		slot->flags = workingset ? VIRTIO_TMEM_PUT_WORKINGSET : 0;
		/* Pairs with tmem_ring_copy(). */
		smp_store_release(&slot->cookie, slot->base + slot->offset);
		/* Pairs with slot_state(). */
		smp_store_release(&slot->state, TMEM_SLOT_READY);
	}
	wake_feeder(queue);
	return !err;
}

/**
 * tmem_put() - offer a page that leaves the page cache
 * @key: pool and inode
 * @index: page number
 * @page: its content, which does not change during the call
 * @workingset: the page was active
 *
 * Context: any but NMI; never waits.
 *
 * Return: true if it was taken; if not, the index holds nothing for it.
 */
bool tmem_put(const struct tmem_key *key, pgoff_t index, struct page *page, bool workingset)
{
	enum tmem_stat why = TMEM_STAT_puts_dropped_offline;
	struct tmem_dev *dev;
	unsigned long flags;
	bool taken = false;

	if (tmem_policy_never(key)) {
		/* Before the copy; the look that counts is that of tmem_index_store(). */
		why = TMEM_STAT_puts_dropped_policy;
	} else if (tmem_online() && index <= TMEM_INDEX_MAX) {
		/* A slot being filled holds up those behind it: nothing may come between. */
		local_irq_save(flags);
		rcu_read_lock();
		dev = rcu_dereference(tmem_device);
		if (dev && !tmem_admit(dev, key, index, workingset))
			why = TMEM_STAT_puts_skipped_admission;
		else if (dev)
			taken = put(dev, key, index, page, workingset, &why);
		rcu_read_unlock();
		local_irq_restore(flags);
	}
	if (taken) {
		tmem_count(TMEM_STAT_puts);
		trace_tmem_put(key->pool->name, key->ino, index, workingset,
			       tmem_stat_name(TMEM_STAT_puts));
		return true;
	}
	tmem_count(why);
	trace_tmem_put(key->pool->name, key->ino, index, workingset, tmem_stat_name(why));
	tmem_invalidate(key->pool, key->ino, index, index, TMEM_INVAL_DROPPED);
	if (why == TMEM_STAT_puts_dropped_cookies)
		tmem_control_resync_any(true);
	return false;
}

/**
 * tmem_ring_copy() - get a page that is still in the ring
 * @dev: the device
 * @queue: queue of the page
 * @entry: its index entry, already taken out
 * @dst: where to copy it
 *
 * Return: true if it was there; otherwise @dst has unspecified content.
 */
bool tmem_ring_copy(struct tmem_dev *dev, struct tmem_queue *queue, u64 entry, void *dst)
{
	u64 offset = tmem_entry_offset(entry);
	u64 cookie = READ_ONCE(dev->cookie_base) + offset;
	u64 seq = READ_ONCE(queue->seq_start) + tmem_cookie_seq(offset, dev->nr_queues);
	unsigned int place = place_of(queue, seq);
	struct tmem_slot *slot = &dev->slot[place];

	/* The data were written before: pairs with put(). */
	if (smp_load_acquire(&slot->cookie) != cookie)
		return false;
	copy_page(dst, data_at(dev, place));
	/* The data before the second look: pairs with smp_wmb() in reserve(). */
	smp_rmb();
	return READ_ONCE(slot->cookie) == cookie;
}

/**
 * tmem_ring_flush() - tell the host, some time, what it can forget
 * @where: object
 * @index: first page number
 * @nr_pages: number of pages, or VIRTIO_TMEM_TO_END
 *
 * Context: any but NMI. A hint: dropped if there is no room.
 */
void tmem_ring_flush(const struct tmem_where *where, u64 index, u64 nr_pages)
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

/* --- feeder -------------------------------------------------------------------------------- */

static void free_slots(struct tmem_queue *queue)
{
	u64 tail = queue->tail;

	while (tail != queue->next && slot_of(queue, tail)->state == TMEM_SLOT_FREE)
		tail++;
	if (tail == queue->tail)
		return;
	spin_lock_irq(&queue->ring_lock);
	while (queue->tail != tail)
		if (!(++queue->tail % TMEM_BLOCK_PAGES))
			give_block(queue->dev, queue, queue->tail);
	spin_unlock_irq(&queue->ring_lock);
}

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
		/* Until something is answered; if nothing is in flight there is no hope. */
		WRITE_ONCE(queue->stalled, true);
	}
	spin_unlock_irq(&queue->vq_lock);
	if (notify)
		virtqueue_notify(queue->vq);
	return err;
}

/* The device answered a batch of puts, or gave it back unanswered. */
static void put_answered(struct tmem_queue *queue, struct tmem_put_batch *batch)
{
	u8 status = VIRTIO_TMEM_S_UNANSWERED, result;
	struct tmem_slot *slot;
	unsigned int i, stored = 0;

	if (batch->req.used_bytes >= sizeof(batch->in.resp))
		status = READ_ONCE(batch->in.resp.status);
	if (status == VIRTIO_TMEM_S_STALE) {
		tmem_count(TMEM_STAT_stale);
		tmem_control_resync(queue->dev, false);
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
	/* The answer was written before: pairs with drain(). */
	return smp_load_acquire(&req->state) == TMEM_REQ_DONE;
}

/* Only the feeder frees a request; beside it drain() makes one that is SENT a DONE one. */
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
	free_slots(queue);
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
			continue;	/* the host has forgotten already */
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

/* How many slots from next on can go in one request: ready, of one pool, of this epoch. */
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

/* When puts that are less than a batch, and are left waiting, go out all the same. */
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

	/* A part of a batch waits for the rest, but not for long. */
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
		/* Without room the slots wait; a queue that stopped will never have any. */
		if (err != -ENOSPC && err != -ENOMEM)
			for (i = 0; i < count; i++)
				skip_slot(queue, slot_of(queue, queue->next));
		return false;
	}
	tmem_count(TMEM_STAT_requests_put);
	WRITE_ONCE(queue->next, queue->next + count);
	/* What comes after these began to wait later. */
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
	 * The generation before the epoch, against the order of tmem_sync_work(): slots of an
	 * older epoch never go out with a newer generation.
	 */
	generation = READ_ONCE(dev->generation);
	smp_rmb();	/* pairs with sync_work_fn() */
	epoch = READ_ONCE(dev->epoch);
	/*
	 * The head before the flushes: one that was noted before a later put of the same page
	 * also goes out before it.
	 */
	head = smp_load_acquire(&queue->head);	/* pairs with reserve() */
	while (send_flushes(queue, generation, epoch))
		;
	while (send_puts(queue, head, generation, epoch))
		;
	arm_kick(queue);
	free_slots(queue);
}

static bool feeder_has_work(struct tmem_dev *dev)
{
	unsigned int i;

	for (i = 0; i < dev->nr_queues; i++)
		if (queue_has_work(&dev->queue[i]))
			return true;
	return false;
}

/* How long the feeder may sleep if nobody wakes it, in jiffies: until puts have waited enough. */
static long feeder_patience(struct tmem_dev *dev)
{
	long patience = MAX_SCHEDULE_TIMEOUT;
	struct tmem_queue *queue;
	unsigned int i;

	for (i = 0; i < dev->nr_queues; i++) {
		queue = &dev->queue[i];
		/* With no room at the host it is an answer that ends the wait. */
		if (!queue->kick_armed || queue->puts_in_flight >= TMEM_PUTS_IN_FLIGHT ||
		    READ_ONCE(queue->stalled))
			continue;
		patience = min(patience, max((long)(queue->kick_at - jiffies), 1L));
	}
	return patience;
}

/**
 * tmem_feeder() - thread that feeds all request queues of a device
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
					feeder_patience(dev));
		for (i = 0; i < dev->nr_queues; i++)
			feed(&dev->queue[i]);
	}
	return 0;
}

/* --- set-up -------------------------------------------------------------------------------- */

/**
 * tmem_ring_renew() - let the cookie offsets of a queue begin at 0 again
 * @queue: the queue; all pools were forgotten before
 */
void tmem_ring_renew(struct tmem_queue *queue)
{
	u64 begin = 0;

#ifdef TMEM_TEST
	if (tmem_test_cookies)
		begin = TMEM_SEQ_MASK / queue->dev->nr_queues - tmem_test_cookies;
#endif
	spin_lock_irq(&queue->ring_lock);
	WRITE_ONCE(queue->seq_start, queue->head - begin);
	spin_unlock_irq(&queue->ring_lock);
}

/**
 * tmem_slots_init() - allocate the slots that all queues share
 * @dev: the device; its memory_bytes grow
 * @nr_slots: how many, a multiple of TMEM_BLOCK_PAGES
 *
 * Return: 0 or -ENOMEM, after which tmem_slots_exit() is due as well.
 */
int tmem_slots_init(struct tmem_dev *dev, unsigned int nr_slots)
{
	unsigned int i;

	spin_lock_init(&dev->block_lock);
	dev->nr_blocks = nr_slots / TMEM_BLOCK_PAGES;
	dev->slot = kvcalloc(nr_slots, sizeof(*dev->slot), GFP_KERNEL);
	dev->block = kcalloc(dev->nr_blocks, sizeof(*dev->block), GFP_KERNEL);
	dev->free = kcalloc(dev->nr_blocks, sizeof(*dev->free), GFP_KERNEL);
	if (!dev->slot || !dev->block || !dev->free)
		return -ENOMEM;
	for (i = 0; i < dev->nr_blocks; i++) {
		dev->block[i] = (void *)__get_free_pages(GFP_KERNEL, TMEM_BLOCK_ORDER);
		if (!dev->block[i])
			return -ENOMEM;
		dev->free[i] = i;
	}
	dev->nr_free = dev->nr_blocks;
	dev->memory_bytes += nr_slots * (PAGE_SIZE + sizeof(*dev->slot)) +
			     dev->nr_blocks * (sizeof(*dev->block) + sizeof(*dev->free));
	return 0;
}

/**
 * tmem_slots_exit() - free them
 * @dev: the device; it was reset
 */
void tmem_slots_exit(struct tmem_dev *dev)
{
	unsigned int i;

	for (i = 0; dev->block && i < dev->nr_blocks; i++)
		free_pages((unsigned long)dev->block[i], TMEM_BLOCK_ORDER);
	kfree(dev->free);
	kfree(dev->block);
	kvfree(dev->slot);
}

/**
 * tmem_ring_init() - allocate the ring of a queue
 * @dev: the device; its memory_bytes grow
 * @queue: the queue; the slots are there
 *
 * Return: 0 or -ENOMEM, after which tmem_ring_exit() is due as well.
 */
int tmem_ring_init(struct tmem_dev *dev, struct tmem_queue *queue)
{
	unsigned int i;

	queue->map = kcalloc(dev->nr_blocks, sizeof(*queue->map), GFP_KERNEL);
	queue->pending = kvcalloc(TMEM_FLUSH_PENDING, sizeof(*queue->pending), GFP_KERNEL);
	if (!queue->map || !queue->pending)
		return -ENOMEM;
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
	tmem_ring_renew(queue);
	dev->memory_bytes += dev->nr_blocks * sizeof(*queue->map) +
			     TMEM_FLUSH_PENDING * sizeof(*queue->pending) +
			     TMEM_PUTS_IN_FLIGHT * sizeof(*queue->put[0]) +
			     TMEM_FLUSHES_IN_FLIGHT * sizeof(*queue->flush[0]);
	return 0;
}

/**
 * tmem_ring_exit() - free the ring of a queue
 * @queue: the queue; the device was reset
 */
void tmem_ring_exit(struct tmem_queue *queue)
{
	unsigned int i;

	for (i = 0; i < TMEM_PUTS_IN_FLIGHT; i++)
		kfree(queue->put[i]);
	for (i = 0; i < TMEM_FLUSHES_IN_FLIGHT; i++)
		kfree(queue->flush[i]);
	kvfree(queue->pending);
	kfree(queue->map);
}
