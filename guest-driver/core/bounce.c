// SPDX-License-Identifier: GPL-2.0-only
/*
 * Get requests and their bounce pages, into which the host writes the answers. request.c takes and
 * sends requests, the device writes to the bounce pages, and send.c passes the answers to
 * fetches and probes.
 */
#include <linux/slab.h>

#include "get.h"

/*
 * Returns whether a get request and bounce pages for @nr_pages pages are free. Bounce pages are in
 * groups of TMEM_GROUP_PAGES. If @nr_pages needs more groups than are usable, all usable groups
 * must be free. If @ahead is true, a quarter of the groups and requests must stay free, unless all
 * usable groups are free. The answer may be out of date.
 */
bool tmem_bounce_fits(const struct tmem_dev *dev, unsigned int nr_pages, bool ahead)
{
	unsigned int usable = dev->nr_bounce - READ_ONCE(dev->nr_kept);
	unsigned int groups = READ_ONCE(dev->nr_bounce_free);
	unsigned int requests = READ_ONCE(dev->nr_get_free);
	unsigned int needed;

	needed = min_t(unsigned int, DIV_ROUND_UP(nr_pages, TMEM_GROUP_PAGES), usable);
	if (ahead && groups < usable) {
		needed += usable / TMEM_AHEAD_DIVISOR;
		requests -= min_t(unsigned int, requests, TMEM_GET_REQUESTS / TMEM_AHEAD_DIVISOR);
	}
	return needed && needed <= groups && requests;
}

/*
 * Takes a get request and groups for up to VIRTIO_TMEM_BATCH_MAX pages from the free lists. Returns
 * NULL if there is no free request or too few free groups. @ahead is as in tmem_bounce_fits().
 */
struct tmem_get_req *tmem_bounce_alloc(struct tmem_dev *dev, unsigned int nr_pages, bool ahead)
{
	unsigned int nr_groups = DIV_ROUND_UP(nr_pages, TMEM_GROUP_PAGES), i;
	struct tmem_get_req *get = NULL;

	spin_lock_irq(&dev->get_lock);
	if (nr_groups <= dev->nr_bounce_free && tmem_bounce_fits(dev, nr_pages, ahead)) {
		get = list_first_entry_or_null(&dev->get_free, struct tmem_get_req, list);
		if (get) {
			list_del(&get->list);
			dev->nr_get_free--;
			get->fetch = NULL;
			get->nr_groups = nr_groups;
			for (i = 0; i < nr_groups; i++)
				get->group[i] = dev->bounce_free[--dev->nr_bounce_free];
		}
	}
	spin_unlock_irq(&dev->get_lock);
	return get;
}

/* Returns the groups of a request from the @first one on. The caller holds get_lock. */
static void free_groups(struct tmem_dev *dev, struct tmem_get_req *get, unsigned int first)
{
	unsigned int i;

	lockdep_assert_held(&dev->get_lock);
	for (i = first; i < get->nr_groups; i++)
		dev->bounce_free[dev->nr_bounce_free++] = get->group[i];
	get->nr_groups = min(get->nr_groups, first);
}

/* Returns groups that a get request does not need, which was not sent yet. */
void tmem_bounce_trim(struct tmem_dev *dev, struct tmem_get_req *get, unsigned int nr_pages)
{
	unsigned int nr_groups = DIV_ROUND_UP(nr_pages, TMEM_GROUP_PAGES);

	if (nr_groups >= get->nr_groups)
		return;
	spin_lock_irq(&dev->get_lock);
	free_groups(dev, get, nr_groups);
	spin_unlock_irq(&dev->get_lock);
}

/* Returns a get request and its groups to the free lists. The device no longer uses it. */
void tmem_bounce_free(struct tmem_dev *dev, struct tmem_get_req *get)
{
	unsigned long flags;

	spin_lock_irqsave(&dev->get_lock, flags);
	get->req.state = TMEM_REQ_FREE;
	free_groups(dev, get, 0);
	list_add(&get->list, &dev->get_free);
	dev->nr_get_free++;
	spin_unlock_irqrestore(&dev->get_lock, flags);
}

/*
 * Ends a use of a fetch, by a request or a task. The tasklet of @queue ends the fetch if this was
 * the last use. Context: any but NMI.
 */
void tmem_fetch_release(struct tmem_fetch *fetch, struct tmem_queue *queue)
{
	if (!atomic_dec_and_test(&fetch->pending))
		return;
	llist_add(&fetch->node, &queue->fetched);
	tasklet_schedule(&queue->fetch_tasklet);
}

/* Takes back a get request that the device has answered. The caller holds vq_lock of its queue. */
void tmem_bounce_answered(struct tmem_dev *dev, struct tmem_get_req *get)
{
	struct tmem_fetch *fetch = get->fetch;

	lockdep_assert_held(&get->queue->vq_lock);
	if (get->req.state == TMEM_REQ_ABANDONED) {
		spin_lock(&dev->get_lock);
		WRITE_ONCE(dev->nr_kept, dev->nr_kept - get->nr_groups);
		spin_unlock(&dev->get_lock);
		tmem_bounce_free(dev, get);
		return;
	}
	get->answered_ns = ktime_get_ns();
	/* Complete the answer before setting the state to DONE; pairs with tmem_get_done(). */
	smp_store_release(&get->req.state, TMEM_REQ_DONE);
	if (fetch)
		tmem_fetch_release(fetch, get->queue);
	else
		wake_up(&get->wait);
}

/* Puts all get requests and all groups of bounce pages on the free lists. */
static void bounce_reset(struct tmem_dev *dev)
{
	unsigned int i;

	INIT_LIST_HEAD(&dev->get_free);
	for (i = 0; i < TMEM_GET_REQUESTS; i++) {
		dev->get_req[i]->req.state = TMEM_REQ_FREE;
		dev->get_req[i]->nr_groups = 0;
		list_add(&dev->get_req[i]->list, &dev->get_free);
	}
	dev->nr_get_free = TMEM_GET_REQUESTS;
	memcpy(dev->bounce_free, dev->bounce, dev->nr_bounce * sizeof(*dev->bounce));
	dev->nr_bounce_free = dev->nr_bounce;
	dev->nr_kept = 0;
}

/*
 * Allocates the get requests, and bounce pages, whose number is a multiple of TMEM_GROUP_PAGES, and
 * adds their size to dev->memory_bytes. Returns 0, or -ENOMEM; the caller then calls
 * tmem_bounce_exit(), too.
 */
int tmem_bounce_init(struct tmem_dev *dev, unsigned int bounce_pages)
{
	unsigned int i;

	spin_lock_init(&dev->get_lock);
	dev->nr_bounce = bounce_pages / TMEM_GROUP_PAGES;
	dev->get_req = kcalloc(TMEM_GET_REQUESTS, sizeof(*dev->get_req), GFP_KERNEL);
	dev->bounce = kcalloc(dev->nr_bounce, sizeof(*dev->bounce), GFP_KERNEL);
	dev->bounce_free = kcalloc(dev->nr_bounce, sizeof(*dev->bounce_free), GFP_KERNEL);
	if (!dev->get_req || !dev->bounce || !dev->bounce_free || TMEM_INJECT(nomem_device))
		return -ENOMEM;
	for (i = 0; i < TMEM_GET_REQUESTS; i++) {
		dev->get_req[i] = kzalloc(sizeof(*dev->get_req[i]), GFP_KERNEL);
		if (!dev->get_req[i])
			return -ENOMEM;
		dev->get_req[i]->req.kind = TMEM_REQ_GET;
		init_waitqueue_head(&dev->get_req[i]->wait);
	}
	for (i = 0; i < dev->nr_bounce; i++) {
		dev->bounce[i] = (void *)__get_free_pages(GFP_KERNEL, TMEM_GROUP_ORDER);
		if (!dev->bounce[i])
			return -ENOMEM;
	}
	dev->memory_bytes += bounce_pages * PAGE_SIZE +
			     TMEM_GET_REQUESTS * sizeof(*dev->get_req[0]);
	bounce_reset(dev);
	return 0;
}

/* Frees the get requests and bounce pages of a device that was reset. */
void tmem_bounce_exit(struct tmem_dev *dev)
{
	unsigned int i;

	for (i = 0; dev->bounce && i < dev->nr_bounce; i++)
		free_pages((unsigned long)dev->bounce[i], TMEM_GROUP_ORDER);
	for (i = 0; dev->get_req && i < TMEM_GET_REQUESTS; i++)
		kfree(dev->get_req[i]);
	kfree(dev->bounce_free);
	kfree(dev->bounce);
	kfree(dev->get_req);
}
