// SPDX-License-Identifier: GPL-2.0-only
/*
 * Put rings of the request queues, which keep each page from its put until the host has answered.
 *
 * A put happens under the lock of a record with interrupts off. So it only copies the page to a
 * preallocated slot, which a get finds by the cookie. Until the host has answered, the only copy
 * is in the slot. The data stay valid until the slot is reserved again, so a get can copy recently
 * evicted pages without the host.
 *
 * Reclaim often evicts neighbouring pages together, and neighbours go to one queue. Therefore the
 * queues share the slots, in groups of TMEM_GROUP_PAGES. A queue takes a group when it has filled
 * the last one, and returns it when all its slots are free. queue->map has the groups of a queue,
 * by sequence number. The map keeps the number of a returned group. A get checks the cookie,
 * because the group may have been taken again.
 *
 * The states of a slot are: reserved (FILLING, cookie 0), copied, entered into the index, READY
 * with its cookie, sent in a batch, answered (FREE). The tail moves over free slots in order. A put
 * that fails after the reservation leaves a SKIP slot behind.
 *
 * A get reads slots without a lock: cookie, data, cookie again. A new put sets the cookie to 0
 * before it touches the data, so an unchanged cookie means that the data are consistent.
 *
 * A put never waits, neither for a free slot nor for the host: a full ring drops the put and erases
 * the key.
 *
 * This file writes the head, under ring_lock. The sender (send.c) owns the slots from the tail to
 * the head whose state is READY or SKIP.
 */
#include <linux/highmem.h>
#include <linux/irq_work.h>
#include <linux/mm.h>
#include <linux/percpu.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "../trace.h"
#include "wake.h"

/*
 * If there are several queues, a queue may take another group while it has fewer than this many
 * times the number of free groups. One queue can so have at most 8/9 of all groups. If the host
 * does not serve a queue, the other queues still have groups.
 */
#define SHARE_OF_FREE	8
/*
 * Takes a free group of the put ring's memory and maps it to the ring positions of @queue from
 * queue->head on. Returns false if the queue may not have another group.
 */
static bool take_group(struct tmem_dev *dev, struct tmem_queue *queue)
{
	bool taken = false;

	lockdep_assert_held(&queue->ring_lock);
	spin_lock(&dev->group_lock);
	if (dev->nr_free &&
	    (dev->nr_queues == 1 || queue->owned < SHARE_OF_FREE * dev->nr_free)) {
		WRITE_ONCE(queue->map[queue->head / TMEM_GROUP_PAGES % dev->nr_groups],
			   dev->free[dev->first_free]);
		dev->first_free = (dev->first_free + 1) % dev->nr_groups;
		dev->nr_free--;
		queue->owned++;
		taken = true;
	}
	spin_unlock(&dev->group_lock);
	return taken;
}

/*
 * Returns to the free list the group of @queue that ends before sequence number @seq, whose slots
 * are all free. Queues take the oldest free group first, so that gets find the pages in free groups
 * as long as possible.
 */
static void return_group(struct tmem_dev *dev, struct tmem_queue *queue, u64 seq)
{
	lockdep_assert_held(&queue->ring_lock);
	spin_lock(&dev->group_lock);
	dev->free[(dev->first_free + dev->nr_free) % dev->nr_groups] =
		queue->map[(seq / TMEM_GROUP_PAGES - 1) % dev->nr_groups];
	dev->nr_free++;
	queue->owned--;
	spin_unlock(&dev->group_lock);
}

/* --- put ----------------------------------------------------------------------------------- */

/*
 * Reserves a slot of the put ring. If that fails, sets @why to the reason and returns NULL. The
 * caller has disabled interrupts.
 */
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
		   (!(queue->head % TMEM_GROUP_PAGES) && !take_group(dev, queue))) {
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
		/*
		 * Write the map and the slot's state before the head; pairs with the reads of the
		 * head in waiting_puts() and send_due().
		 */
		smp_store_release(&queue->head, queue->head + 1);
	}
	spin_unlock(&queue->ring_lock);
	/* Set the cookie to 0 before writing the data; pairs with smp_rmb() in tmem_ring_copy(). */
	smp_wmb();
	return slot;
}

/*
 * Copies an evicted page to @to and computes the content checks of the copy. Returns false if the
 * page has a memory error, and then reports the page to the kernel.
 *
 * Without the driver, an eviction does not read the page, so a memory error in a clean page is
 * harmless. copy_mc_to_kernel() returns after such an error, if the processor reports it and the
 * architecture has CONFIG_ARCH_HAS_COPY_MC. An ordinary access would stop the guest. The check
 * reads the copy, which is in the processor's first-level cache.
 *
 * Other code of the driver does not need this function. It reads pages that the driver or the disk
 * has just filled, or that the disk reads, too.
 */
static bool copy_page_mc(void *to, struct page *page, struct tmem_checks *checks)
{
	void *from = kmap_local_page(page);
	unsigned long left = copy_mc_to_kernel(to, from, PAGE_SIZE);

	kunmap_local(from);
	if (left || TMEM_INJECT(memory_error)) {
		memory_failure_queue(page_to_pfn(page), 0);
		return false;
	}
	*checks = tmem_checks_page(&tmem_keys, to);
	return true;
}

/*
 * Copies a page into the put ring and enters it into the index. If that fails, sets @why to the
 * reason and leaves no entry of this put in the index.
 */
static bool put(struct tmem_dev *dev, const struct tmem_key *key, pgoff_t index,
		const struct tmem_evicted *evicted, bool workingset, enum tmem_stat *why)
{
	struct tmem_queue *queue = tmem_queue_of(dev, tmem_index_bucket(key), index);
	struct tmem_where where;
	struct tmem_slot *slot;
	void *data;
	int err;

	slot = reserve(dev, queue, &data, why);
	if (!slot) {
		/*
		 * The sender takes answers and frees slots. An architecture without an interrupt
		 * for irq_work has slow interrupts of devices, too. On others, many tasks would
		 * call the sender for each page of a full ring, and delay that interrupt.
		 */
		if (!arch_irq_work_has_interrupt())
			request_send(queue);
		return false;
	}

	memcpy(data, evicted->copy, PAGE_SIZE);
	err = tmem_index_store(key, index, tmem_entry(slot->offset, evicted->checks.check), &where);
	if (err) {
		*why = err == -ENOSPC ? TMEM_STAT_puts_dropped_index_full :
		       err == -ENODEV ? TMEM_STAT_puts_dropped_pool :
		       TMEM_STAT_puts_dropped_nomem;
		WRITE_ONCE(slot->state, TMEM_SLOT_SKIP);
	} else {
		slot->object = where.object;
		slot->pool = where.pool;
		slot->bucket = where.bucket;
		slot->index = index;
		slot->private = key->pool->private;
		slot->flags = workingset ? VIRTIO_TMEM_PUT_WORKINGSET : 0;
		/* Write the data before the cookie; pairs with tmem_ring_copy(). */
		smp_store_release(&slot->cookie, slot->base + slot->offset);
		/* Complete the slot before setting its state to READY; pairs with slot_state(). */
		smp_store_release(&slot->state, TMEM_SLOT_READY);
	}
	slot_done(queue);
	return !err;
}

/*
 * If the host retains the page and the page has not changed, makes its index entry held instead of
 * retained, and queues a reference instead of a copy. Returns the result of tmem_index_hold(). The
 * caller has disabled interrupts.
 */
static int refer(struct tmem_dev *dev, const struct tmem_key *key, pgoff_t index,
		 const struct tmem_evicted *evicted)
{
	/*
	 * Read the epoch before the entry becomes held. If the epoch changes in between, the sender
	 * drops the reference.
	 */
	u32 epoch = READ_ONCE(dev->epoch), check;
	struct tmem_where where;
	u64 offset;
	int err;

	if (!dev->retain || !tmem_index_retained(key, index))
		return -ENOENT;
	check = evicted->checks.check;
	if (TMEM_INJECT(retained_changed))
		check ^= 1;
	err = tmem_index_hold(key, index, check, &where, &offset);
	if (!err)
		tmem_queue_ref(dev, &where, index, offset, epoch);
	return err;
}

/*
 * Sends a reference to an evicted page that the host has retained, or puts the page. Returns the
 * counter of the outcome. The caller has disabled interrupts.
 */
static enum tmem_stat take(struct tmem_dev *dev, const struct tmem_key *key, pgoff_t index,
			   const struct tmem_evicted *evicted, bool workingset)
{
	/*
	 * The filter records each evicted page, even if its decision is not needed because the page
	 * is in the pool. It knows nothing of swap areas, whose slots get other pages all the time.
	 */
	bool admitted = key->pool->private ||
			tmem_admit(dev, key, index, evicted->page, workingset);
	enum tmem_stat why = TMEM_STAT_puts;
	int err = refer(dev, key, index, evicted);

	if (!err)
		return TMEM_STAT_refs;
	if (err == -EILSEQ)
		return TMEM_STAT_retained_changed;
	/* If the page has no retained entry (-ENOENT), put it. */
	if (!admitted)
		return TMEM_STAT_puts_skipped_admission;
	put(dev, key, index, evicted, workingset, &why);
	return why;
}

bool tmem_evicted_read(struct tmem_evicted *evicted)
{
	struct tmem_dev *dev;
	void *copy;

	lockdep_assert_preemption_disabled();
	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	if (dev) {
		copy = this_cpu_ptr(dev->scratch);
		evicted->error = !copy_page_mc(copy, evicted->page, &evicted->checks);
		if (!evicted->error)
			evicted->copy = copy;
	}
	rcu_read_unlock();
	return evicted->copy;
}

bool tmem_put(const struct tmem_key *key, pgoff_t index, const struct tmem_evicted *evicted,
	      bool workingset)
{
	enum tmem_stat why = TMEM_STAT_puts_dropped_offline;
	struct tmem_dev *dev;
	unsigned long flags;

	if (tmem_online()) {
		/*
		 * Disable interrupts: the sender cannot send later slots while this one is being
		 * filled.
		 */
		local_irq_save(flags);
		rcu_read_lock();
		dev = rcu_dereference(tmem_device);
		if (dev)
			why = take(dev, key, index, evicted, workingset);
		rcu_read_unlock();
		local_irq_restore(flags);
	}
	tmem_count(why);
	trace_tmem_put(key->pool->name, tmem_key_block(key, index), workingset,
		       tmem_stat_name(why));
	if (why == TMEM_STAT_puts || why == TMEM_STAT_refs)
		return true;
	tmem_invalidate(key, index, index, TMEM_INVAL_DROPPED);
	if (why == TMEM_STAT_puts_dropped_cookies)
		tmem_dev_resync_any(true);
	else if (why == TMEM_STAT_retained_changed)
		tmem_pool_wrong(key->pool, "a clean page changed while the host kept it",
				tmem_key_block(key, index));
	return false;
}

/*
 * Copies a page that is still in the ring to @dst. @entry is its index entry, already taken out.
 * Returns whether the page was in the ring; otherwise @dst has unspecified content.
 */
bool tmem_ring_copy(struct tmem_dev *dev, struct tmem_queue *queue, u64 entry, void *dst)
{
	u64 offset = tmem_entry_offset(entry);
	u64 cookie = READ_ONCE(dev->cookie_base) + offset;
	u64 seq = READ_ONCE(queue->seq_start) + tmem_cookie_seq(offset, dev->nr_queues);
	unsigned int place = place_of(queue, seq);
	struct tmem_slot *slot = &dev->slot[place];

	/* Read the data after the cookie; pairs with put(). */
	if (smp_load_acquire(&slot->cookie) != cookie)
		return false;
	copy_page(dst, data_at(dev, place));
	/* Read the data before reading the cookie again; pairs with smp_wmb() in reserve(). */
	smp_rmb();
	return READ_ONCE(slot->cookie) == cookie;
}

/*
 * Moves the tail over slots that have become free. The caller holds send_lock and has set slots
 * before next to FREE.
 */
void tmem_ring_free(struct tmem_queue *queue)
{
	u64 tail = queue->tail;

	lockdep_assert_held(&queue->send_lock);
	while (tail != queue->next && slot_of(queue, tail)->state == TMEM_SLOT_FREE)
		tail++;
	if (tail == queue->tail)
		return;
	spin_lock(&queue->ring_lock);
	while (queue->tail != tail) {
		WRITE_ONCE(queue->tail, queue->tail + 1);
		if (!(queue->tail % TMEM_GROUP_PAGES))
			return_group(queue->dev, queue, queue->tail);
	}
	spin_unlock(&queue->ring_lock);
	if (wq_has_sleeper(&queue->dev->pace_wait))
		wake_up(&queue->dev->pace_wait);
}

/* --- set-up -------------------------------------------------------------------------------- */

/* Makes the cookie offsets of a queue begin at 0 again, after tmem_pools_forget(). */
void tmem_ring_renew(struct tmem_queue *queue)
{
	u64 begin = tmem_test_first_seq(TMEM_SEQ_MASK / queue->dev->nr_queues);

	spin_lock_irq(&queue->ring_lock);
	WRITE_ONCE(queue->seq_start, queue->head - begin);
	spin_unlock_irq(&queue->ring_lock);
}

/*
 * Allocates the slots that all queues share, whose number is a multiple of TMEM_GROUP_PAGES, and
 * the scratch pages, and adds their size to dev->memory_bytes. Returns 0, or -ENOMEM; the caller
 * then calls tmem_slots_exit(), too.
 */
int tmem_slots_init(struct tmem_dev *dev, unsigned int nr_slots)
{
	unsigned int i;

	spin_lock_init(&dev->group_lock);
	dev->nr_groups = nr_slots / TMEM_GROUP_PAGES;
	dev->slot = kvcalloc(nr_slots, sizeof(*dev->slot), GFP_KERNEL);
	dev->group = kcalloc(dev->nr_groups, sizeof(*dev->group), GFP_KERNEL);
	dev->free = kcalloc(dev->nr_groups, sizeof(*dev->free), GFP_KERNEL);
	if (!dev->slot || !dev->group || !dev->free)
		return -ENOMEM;
	for (i = 0; i < dev->nr_groups; i++) {
		dev->group[i] = (void *)__get_free_pages(GFP_KERNEL, TMEM_GROUP_ORDER);
		if (!dev->group[i])
			return -ENOMEM;
		/*
		 * Write all pages once, so that the host backs them with memory before the first
		 * burst.
		 */
		memset(dev->group[i], 0, TMEM_GROUP_PAGES * PAGE_SIZE);
		dev->free[i] = i;
	}
	dev->nr_free = dev->nr_groups;
	dev->scratch = __alloc_percpu(PAGE_SIZE, SMP_CACHE_BYTES);
	if (!dev->scratch)
		return -ENOMEM;
	dev->memory_bytes += num_possible_cpus() * PAGE_SIZE;
	dev->memory_bytes += nr_slots * (PAGE_SIZE + sizeof(*dev->slot)) +
			     dev->nr_groups * (sizeof(*dev->group) + sizeof(*dev->free));
	return 0;
}

/* Frees the slots and the scratch pages of a device that was reset. */
void tmem_slots_exit(struct tmem_dev *dev)
{
	unsigned int i;

	for (i = 0; dev->group && i < dev->nr_groups; i++)
		free_pages((unsigned long)dev->group[i], TMEM_GROUP_ORDER);
	free_percpu(dev->scratch);
	kfree(dev->free);
	kfree(dev->group);
	kvfree(dev->slot);
}

/*
 * Allocates the ring of a queue, after the slots, and adds its size to dev->memory_bytes. Returns
 * 0, or -ENOMEM; the caller then calls tmem_ring_exit(), too.
 */
int tmem_ring_init(struct tmem_dev *dev, struct tmem_queue *queue)
{
	queue->map = kcalloc(dev->nr_groups, sizeof(*queue->map), GFP_KERNEL);
	queue->pending = kvcalloc(TMEM_FLUSH_PENDING, sizeof(*queue->pending), GFP_KERNEL);
	if (!queue->map || !queue->pending)
		return -ENOMEM;
	tmem_ring_renew(queue);
	dev->memory_bytes += dev->nr_groups * sizeof(*queue->map) +
			     TMEM_FLUSH_PENDING * sizeof(*queue->pending);
	return 0;
}

/* Frees the ring of a queue, after the reset of the device. */
void tmem_ring_exit(struct tmem_queue *queue)
{
	kvfree(queue->pending);
	kfree(queue->map);
}
