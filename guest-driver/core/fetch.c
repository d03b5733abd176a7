// SPDX-License-Identifier: GPL-2.0-only
/*
 * Fetches: gets of the pages of a bio. No task waits for them in this driver.
 *
 * The device's interrupt takes the answers, and a tasklet copies and checks the pages and ends the
 * fetch. Softirqs do what the end of a read from a disk does, too.
 *
 * One timer gives up fetches whose deadline has passed. Their requests are abandoned
 * (request.c), so a silent host delays a fetch until its deadline only. Fetches are
 * in the order of their deadlines, and the timer is armed only while there is one.
 *
 * The driver takes a request and its bounce pages before it takes the entries out of the index, so
 * that nothing is lost if there are none. Pages of a run that pages in the put ring divide are the
 * exception. A fetch that finds none waits until another fetch ends, which takes less time than a
 * disk. A fetch for readahead that begins in advance leaves a part of the requests and bounce pages
 * to readers that wait.
 */
#include <linux/sched.h>

#include "../compat.h"
#include "../trace.h"
#include "get.h"

/* Maximum number of times that a fetch looks for bounce pages before it leaves its pages. */
#define TRIES_MAX	3
/*
 * Maximum number of waiting fetches that the end of a fetch starts, because it runs in a tasklet.
 * The bounce pages of one request are enough for eight others.
 */
#define START_MAX	8

/* Set from the preparation of a suspend or hibernation to its end: no fetch begins. */
static bool paused;

static struct tmem_fetch_sent *end_of(struct tmem_fetch *fetch)
{
	return fetch->sent + fetch->nr_sent;
}

/* Adds a fetch to those that the timer gives up. */
static void add_locked(struct tmem_dev *dev, struct tmem_fetch *fetch)
{
	struct tmem_fetch *before;

	lockdep_assert_held(&dev->fetch_lock);
	/* Deadlines rarely differ from the order of the fetches. */
	list_for_each_entry_reverse(before, &dev->fetches, list)
		if (before->deadline_ns <= fetch->deadline_ns)
			break;
	list_add(&fetch->list, &before->list);
	/* A timer that expires before all deadlines arms itself again. */
	if (!dev->fetch_timer_ns || fetch->deadline_ns < dev->fetch_timer_ns) {
		dev->fetch_timer_ns = fetch->deadline_ns;
		hrtimer_start(&dev->fetch_timer, ns_to_ktime(fetch->deadline_ns),
			      HRTIMER_MODE_ABS_SOFT);
	}
}

/* Adds a fetch whose requests were sent. */
static void fetch_add(struct tmem_dev *dev, struct tmem_fetch *fetch)
{
	spin_lock_bh(&dev->fetch_lock);
	add_locked(dev, fetch);
	spin_unlock_bh(&dev->fetch_lock);
}

/* Removes a fetch from the list, if the timer has not done so. The timer does not use it then. */
static void fetch_forget(struct tmem_dev *dev, struct tmem_fetch *fetch)
{
	spin_lock_bh(&dev->fetch_lock);
	list_del_init(&fetch->list);
	spin_unlock_bh(&dev->fetch_lock);
}

/*
 * Returns whether there seem to be bounce pages for the first requests of a fetch, which are for 64
 * pages at most. A window that lies in two leaves of the index needs two requests.
 */
static bool has_room(const struct tmem_fetch *fetch)
{
	unsigned int nr = min(fetch->nr, 64U);

	if (fetch->index % 64 + nr > 64)
		nr += TMEM_GROUP_PAGES;	/* each request may leave a part of a group unused */
	return tmem_bounce_fits(fetch->dev, nr, fetch->ahead);
}

/* Returns the number of fetches that have begun and do not wait. At its end, each starts others. */
static unsigned int nr_running(struct tmem_dev *dev)
{
	lockdep_assert_held(&dev->fetch_lock);
	return atomic_read(&dev->nr_fetches) - dev->nr_waiting[false] - dev->nr_waiting[true];
}

/*
 * Lets a running fetch wait for bounce pages, until another one ends. Returns false if that would
 * be in vain. Otherwise its use belongs to the task that takes it from the list.
 */
static bool fetch_wait(struct tmem_dev *dev, struct tmem_fetch *fetch)
{
	unsigned int *nr = &dev->nr_waiting[fetch->ahead];
	bool waits;

	spin_lock_bh(&dev->fetch_lock);
	WRITE_ONCE(*nr, *nr + 1);
	/*
	 * Either this task sees what the end of another fetch has freed, and how many still run, or
	 * that end sees that this fetch waits; pairs with fetch_end().
	 */
	smp_mb();
	/* Readers get bounce pages in the order in which they came. */
	waits = nr_running(dev) && !READ_ONCE(dev->tripped) &&
		(!has_room(fetch) || (!fetch->ahead && *nr > 1));
	if (waits) {
		fetch->waits = true;
		tmem_count(TMEM_STAT_fetches_waited);
		add_locked(dev, fetch);
	} else {
		WRITE_ONCE(*nr, *nr - 1);
	}
	spin_unlock_bh(&dev->fetch_lock);
	return waits;
}

/* Ends the wait of a fetch for bounce pages. */
static void stop_waiting(struct tmem_dev *dev, struct tmem_fetch *fetch)
{
	lockdep_assert_held(&dev->fetch_lock);
	fetch->waits = false;
	WRITE_ONCE(dev->nr_waiting[fetch->ahead], dev->nr_waiting[fetch->ahead] - 1);
	list_del_init(&fetch->list);
}

/* Counts the wanted pages from @first on as misses. */
static void miss_from(struct tmem_fetch *fetch, unsigned int first, enum tmem_stat why)
{
	unsigned int i;

	for (i = first; i < fetch->nr; i++)
		if (__test_and_clear_bit(i, fetch->want))
			tmem_count(why);
}

/*
 * Abandons the requests of a fetch that are not answered. The caller has a use of the fetch. If
 * the processor that takes the interrupt does not run, answers may be in the ring.
 */
static void give_up(struct tmem_fetch *fetch)
{
	struct tmem_fetch_sent *sent;

	for (sent = fetch->sent; sent < end_of(fetch); sent++) {
		tmem_send_drain(sent->queue);
		if (tmem_get_abandon(sent->get))
			continue;
		WRITE_ONCE(sent->get, NULL);
		atomic_dec(&fetch->pending);
	}
}

static enum hrtimer_restart expired(struct hrtimer *timer)
{
	struct tmem_dev *dev = container_of(timer, struct tmem_dev, fetch_timer);
	u64 now_ns = ktime_get_ns();
	struct tmem_fetch *fetch;
	LIST_HEAD(late);

	spin_lock_bh(&dev->fetch_lock);
	while ((fetch = list_first_entry_or_null(&dev->fetches, struct tmem_fetch, list)) &&
	       fetch->deadline_ns <= now_ns) {
		list_del_init(&fetch->list);
		/* Without a use, the fetch is about to end. With one, it cannot end. */
		if (fetch->waits)
			stop_waiting(dev, fetch);
		else if (!atomic_inc_not_zero(&fetch->pending))
			continue;
		list_add_tail(&fetch->list, &late);
	}
	dev->fetch_timer_ns = fetch ? fetch->deadline_ns : 0;
	if (fetch)
		hrtimer_start(timer, ns_to_ktime(fetch->deadline_ns), HRTIMER_MODE_ABS_SOFT);
	spin_unlock_bh(&dev->fetch_lock);
	while (!list_empty(&late)) {
		fetch = list_first_entry(&late, struct tmem_fetch, list);
		list_del_init(&fetch->list);
		give_up(fetch);
		if (!fetch->nr_sent)
			miss_from(fetch, 0, TMEM_STAT_misses_late);
		tmem_fetch_release(fetch, &dev->queue[0]);
	}
	return HRTIMER_NORESTART;
}

/*
 * Returns whether a request that is sent now may be late without a fault of the host, because a
 * task or an earlier part of the same bio has used up the time.
 */
static bool is_too_late(const struct tmem_fetch *fetch, u64 now_ns)
{
	return now_ns + tmem_get_span_ns() / TMEM_SLOW_DIVISOR > fetch->deadline_ns;
}

/* Returns whether a request may be sent. Otherwise the wanted pages from @first on are misses. */
static bool may_request(struct tmem_fetch *fetch, unsigned int first)
{
	enum tmem_stat why;

	if (READ_ONCE(fetch->dev->tripped))
		why = TMEM_STAT_misses_tripped;
	else if (is_too_late(fetch, ktime_get_ns()))
		why = TMEM_STAT_misses_late;
	else if (!fetch->generation || !tmem_online())
		why = TMEM_STAT_misses_offline;
	else
		return true;
	miss_from(fetch, first, why);
	return false;
}

/* Leaves the wanted pages from @first on to the disk, because there are no bounce pages. */
static void no_room(struct tmem_fetch *fetch, unsigned int first)
{
	tmem_count(TMEM_STAT_fetches_no_room);
	fetch->nr_tried = first;
	miss_from(fetch, first, TMEM_STAT_misses_bounce);
}

/*
 * Takes the entries, and sends the requests. Pages that cannot be requested are misses, and their
 * entries stay in the index. Returns false, without an effect, if there are no bounce pages for the
 * first request.
 */
static bool fetch_request(struct tmem_fetch *fetch)
{
	struct tmem_dev *dev = fetch->dev;
	unsigned int from, to;

	fetch->sent_ns = ktime_get_ns();
	fetch->generation = READ_ONCE(dev->generation);
	smp_rmb();	/* read the generation before the index; pairs with sync_work_fn() */
	if (!may_request(fetch, 0))
		return true;
	if (!has_room(fetch))
		return false;
	for (from = 0; from < fetch->nr; from = to) {
		to = min(fetch->nr, from + 64 - (unsigned int)((fetch->index + from) & 63));
		if (!may_request(fetch, from))
			break;
		if (fetch->nr_sent < TMEM_GET_BURST)
			fetch->spare = tmem_bounce_alloc(dev, min(to - from, dev->batch_max),
							 fetch->ahead);
		if (!fetch->spare && !from)
			return false;
		if (!fetch->spare) {
			no_room(fetch, from);
			break;
		}
		tmem_fetch_leaf(fetch, from, to);
		/* All pages were in the put ring, or had left the index. */
		if (fetch->spare)
			tmem_bounce_free(dev, fetch->spare);
		fetch->spare = NULL;
	}
	return true;
}

/* Requests the pages of a fetch, or lets it wait. Returns whether it waits. */
static bool request_or_wait(struct tmem_fetch *fetch)
{
	unsigned int tries;

	for (tries = 0; tries < TRIES_MAX; tries++) {
		if (fetch_request(fetch))
			return false;
		if (fetch_wait(fetch->dev, fetch))
			return true;
	}
	no_room(fetch, 0);
	return false;
}

/*
 * Takes the first fetch whose wait can end from the list, or returns NULL. A fetch in advance does
 * not delay those behind it.
 */
static struct tmem_fetch *take_waiting(struct tmem_dev *dev)
{
	struct tmem_fetch *fetch, *found = NULL;
	bool all;

	spin_lock_bh(&dev->fetch_lock);
	all = !nr_running(dev) || READ_ONCE(dev->tripped);
	list_for_each_entry(fetch, &dev->fetches, list) {
		if (!fetch->waits)
			continue;
		if (all || has_room(fetch)) {
			stop_waiting(dev, fetch);
			found = fetch;
		}
		if (found || !fetch->ahead)
			break;
	}
	spin_unlock_bh(&dev->fetch_lock);
	return found;
}

/* Returns whether fetches wait for bounce pages. */
static bool is_waited(const struct tmem_dev *dev)
{
	return READ_ONCE(dev->nr_waiting[false]) || READ_ONCE(dev->nr_waiting[true]);
}

/*
 * Starts fetches that wait for bounce pages, after a fetch has ended. The tasklet ends them.
 * Returns their number of pages.
 */
static unsigned int start_waiting(struct tmem_dev *dev)
{
	unsigned int i, pages = 0;
	struct tmem_fetch *fetch;

	/* A task would wake a thread for each softirq. */
	local_bh_disable();
	for (i = 0; i < START_MAX && pages < TMEM_FETCH_PAGES_MAX && is_waited(dev); i++) {
		fetch = take_waiting(dev);
		if (!fetch || request_or_wait(fetch))
			break;
		pages += fetch->nr;
		if (fetch->nr_sent) {
			tmem_count(TMEM_STAT_fetches);
			fetch_add(dev, fetch);
		}
		tmem_fetch_release(fetch, &dev->queue[0]);
	}
	local_bh_enable();
	return pages;
}

/* Returns whether a task sleeps until the first page is unlocked. */
static bool is_waited_for(const struct tmem_fetch *fetch)
{
	return folio_test_waiters(page_folio(fetch->first));
}

/*
 * Ends a fetch that has no use any more: copies the pages, and records how long it took. The caller
 * then starts others, and releases the device.
 */
static void fetch_end(struct tmem_fetch *fetch)
{
	struct tmem_dev *dev = fetch->dev;
	struct tmem_fetch_sent *sent;
	u64 end_ns = fetch->sent_ns, at_ns;

	for (sent = fetch->sent; sent < end_of(fetch); sent++) {
		at_ns = fetch->deadline_ns;
		if (sent->get)
			at_ns = min(at_ns, sent->get->answered_ns);
		end_ns = max(end_ns, at_ns);
		if (fetch->awaited)
			tmem_get_count_wait(at_ns - min(at_ns, fetch->begin_ns));
		if (sent->get)
			tmem_fetch_take(fetch, sent);
		else
			tmem_fetch_lost(fetch, sent);
	}
	if (fetch->nr_sent) {
		tmem_count(fetch->late ? TMEM_STAT_fetches_late : TMEM_STAT_fetches_answered);
		fetch_forget(dev, fetch);
		/* A reader may have come to pages that were read in advance. */
		tmem_breaker_note(dev, fetch->late, fetch->awaited || is_waited_for(fetch),
				  fetch->begin_ns, fetch->sent_ns, end_ns);
	}
	/* All hits show that the index is of use, but the filter decides on pages of files only. */
	tmem_admit_learn(dev, fetch->hits, fetch->key.pool->private ? 0 : fetch->lost);
	if (trace_tmem_get_enabled())
		trace_tmem_get(fetch->key.pool->name, tmem_key_block(&fetch->key, fetch->index),
			       fetch->nr, fetch->hits,
			       div_u64(ktime_get_ns() - fetch->begin_ns, NSEC_PER_USEC));
	/*
	 * The bounce pages are free. A fetch that counts this one as running begins to wait before
	 * the caller looks for waiting ones.
	 */
	atomic_dec(&dev->nr_fetches);
	smp_mb__after_atomic();	/* pairs with fetch_wait() */
}

/* Ends the fetches of a queue. The answer of any queue may be the last one of a fetch. */
static void fetched(struct tasklet_struct *tasklet)
{
	struct tmem_queue *queue = from_tasklet(queue, tasklet, fetch_tasklet);
	struct tmem_dev *dev = queue->dev;
	unsigned int pages = 0;
	struct tmem_fetch *fetch;

	if (!queue->fetched_rest)
		queue->fetched_rest = llist_reverse_order(llist_del_all(&queue->fetched));
	while (queue->fetched_rest) {
		fetch = llist_entry(queue->fetched_rest, struct tmem_fetch, node);
		if (pages && pages + fetch->nr > TMEM_FETCH_PAGES_MAX)
			break;
		queue->fetched_rest = fetch->node.next;
		fetch_end(fetch);
		if (fetch->nr_sent)
			pages += fetch->nr;
		fetch->done(fetch);
		pages += start_waiting(dev);
		tmem_dev_put(dev);
	}
	if (queue->fetched_rest || !llist_empty(&queue->fetched))
		tasklet_schedule(tasklet);
}

/* Returns the device, if it may be used; or counts the reason. */
static struct tmem_dev *fetch_begin(struct tmem_fetch *fetch)
{
	struct tmem_dev *dev;

	tmem_count_n(TMEM_STAT_gets, bitmap_weight(fetch->want, fetch->nr));
	dev = tmem_online() ? tmem_dev_get() : NULL;
	if (!dev)
		goto none;
	/* Either this task sees the flag, or the task that sets it sees the fetch. */
	atomic_inc(&dev->nr_fetches);
	smp_mb__after_atomic();	/* pairs with tmem_fetches_pause() */
	if (!READ_ONCE(paused))
		return dev;
	atomic_dec(&dev->nr_fetches);
	tmem_dev_put(dev);
none:
	fetch->nr_tried = 0;
	miss_from(fetch, 0, TMEM_STAT_misses_offline);
	return NULL;
}

/*
 * Gets pages back from the put ring or from the host, without waiting. On a hit, the bit in
 * fetch->want stays set. Returns true if the fetch has ended. Otherwise it ends at its deadline at
 * the latest, and calls fetch->done(). Context: process, interrupts on, does not sleep.
 */
bool tmem_fetch_start(struct tmem_fetch *fetch)
{
	struct tmem_dev *dev;

	dev = fetch_begin(fetch);
	if (!dev)
		return true;
	fetch->dev = dev;
	fetch->bucket = tmem_index_bucket(&fetch->key);
	fetch->nr_tried = fetch->nr;
	fetch->begin_ns = ktime_get_ns();
	atomic_set(&fetch->pending, 1);
	INIT_LIST_HEAD(&fetch->list);
	fetch->waits = false;
	/* Others came first. */
	if (!fetch->ahead && READ_ONCE(dev->nr_waiting[false]) && fetch_wait(dev, fetch))
		return false;
	if (request_or_wait(fetch))
		return false;
	if (fetch->nr_sent) {
		tmem_count(TMEM_STAT_fetches);
		fetch_add(dev, fetch);
	}
	TMEM_HOLD(fetch);
	if (!atomic_dec_and_test(&fetch->pending))
		return false;
	fetch_end(fetch);
	start_waiting(dev);
	tmem_dev_put(dev);
	return true;
}

/*
 * Stops or allows fetches. If it stops them, it sleeps until the deadline of the last one that is
 * in flight.
 */
void tmem_fetches_pause(bool pause)
{
	struct tmem_dev *dev;

	WRITE_ONCE(paused, pause);
	if (!pause)
		return;
	smp_mb();	/* pairs with fetch_begin() */
	dev = tmem_dev_get();
	if (!dev)
		return;
	while (atomic_read(&dev->nr_fetches))
		schedule_timeout_uninterruptible(1);
	tmem_dev_put(dev);
}

/* Sets up the fetches of a device, whose queues are allocated. */
void tmem_fetch_init(struct tmem_dev *dev)
{
	unsigned int i;

	spin_lock_init(&dev->fetch_lock);
	INIT_LIST_HEAD(&dev->fetches);
	tmem_hrtimer_setup(&dev->fetch_timer, expired, HRTIMER_MODE_ABS_SOFT);
	for (i = 0; i < dev->nr_queues; i++) {
		init_llist_head(&dev->queue[i].fetched);
		tasklet_setup(&dev->queue[i].fetch_tasklet, fetched);
	}
}

/*
 * Stops timer and tasklets. The device has no fetch, and nobody takes its answers any more. Sleeps.
 */
void tmem_fetch_exit(struct tmem_dev *dev)
{
	unsigned int i;

	hrtimer_cancel(&dev->fetch_timer);
	for (i = 0; i < dev->nr_queues; i++)
		tasklet_kill(&dev->queue[i].fetch_tasklet);
}
