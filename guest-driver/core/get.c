// SPDX-License-Identifier: GPL-2.0-only
/*
 * Gets: take entries out of the index, request their pages, and wait until a deadline.
 *
 * A get may let the host retain a page. The entry of such a page stays in the index, marked as
 * retained, before the page is requested. The get erases the entry if the page does not come, or
 * the host did not retain it. A get never adds an entry.
 *
 * The device writes to bounce pages only. A bounce page belongs to the device until the device
 * answers or is reset. A request for which no task waits any more keeps its pages, so that a late
 * answer cannot land in memory that was given away. While the device has all bounce pages, gets are
 * misses.
 *
 * The wait of readers is bounded twice. First, a call (one readahead window) waits no longer than
 * its deadline. Second, the breaker opens, and the driver then requests nothing until a probe is
 * answered quickly. The breaker opens in each of these cases:
 * - LATE_ROW_MAX calls in a row were late.
 * - Abandoned requests have more than half of the bounce pages at the host. A single call for a
 *   large window can cause this.
 * - The device does not answer a request on the control queue, and then no GENERATION request.
 *   Without this, the state would stay "on" while no page is read and the back end is gone.
 * - The waits of slow calls have filled a bucket. A call is slow if it waits longer than a quarter
 *   of the deadline. The bucket holds WAIT_BUDGET deadlines and empties at WAIT_BUDGET per
 *   WAIT_PERIOD deadlines, but not during a slow call. Only the time until the answer counts, and
 *   at most one deadline for each call. The time from the answer until the scheduler runs the
 *   reader does not count, because a reader of the disk would wait for it, too.
 *
 * The driver does not probe before half of the bucket is empty again, because a host may answer a
 * probe quickly and gets slowly. With the defaults, readers that come one after the other wait for
 * a slow host for 200 ms plus one deadline in total. Beyond that, their waits take at most a fifth
 * of their other time. Each concurrent reader adds at most one deadline.
 *
 * The driver never trusts an answer. Length, status, result and cookie must be right, and so must
 * the content check, which is computed on the destination page itself. A page whose check is wrong
 * switches the cache off until the module is loaded again.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/highmem.h>
#include <linux/moduleparam.h>
#include <linux/sched.h>
#include <linux/slab.h>

#include "../trace.h"
#include "core.h"
#include "wait.h"

/* Largest deadline. A reader that would have to wait longer should read the disk instead. */
#define DEADLINE_MS_MAX		1000
/* Longest spin in microseconds. A spin that is longer than a context switch wastes a vCPU. */
#define SPIN_US_MAX		1000
/*
 * Maximum number of requests in flight of one tmem_get() call. They bring 4 MiB of pages, the
 * largest readahead in use.
 */
#define GET_BURST		16
/* The breaker opens after this many tmem_get() calls in a row that missed the deadline. */
#define LATE_ROW_MAX		3
/*
 * A tmem_get() call is slow if it waits longer for answers than the deadline divided by this
 * number. A disk would be as fast as a slow call.
 */
#define SLOW_DIVISOR		4
/*
 * The breaker also opens when abandoned requests (not answered before the deadline) have more than
 * 1 / KEPT_DIVISOR of the bounce pages at the host.
 */
#define KEPT_DIVISOR		2
/*
 * The breaker adds up the waits of slow calls in a leaky bucket. The bucket holds WAIT_BUDGET
 * deadlines, and loses as much in WAIT_PERIOD deadlines.
 */
#define WAIT_BUDGET		10
#define WAIT_PERIOD		50

/* --- parameters ---------------------------------------------------------------------------- */

static int set_deadline_ms(const char *value, const struct kernel_param *param)
{
	return param_set_uint_minmax(value, param, 1, DEADLINE_MS_MAX);
}

static int set_spin_us(const char *value, const struct kernel_param *param)
{
	return param_set_uint_minmax(value, param, 0, SPIN_US_MAX);
}

static const struct kernel_param_ops deadline_ms_ops = {
	.set = set_deadline_ms,
	.get = param_get_uint,
};

static const struct kernel_param_ops spin_us_ops = {
	.set = set_spin_us,
	.get = param_get_uint,
};

static unsigned int deadline_ms = 20;
module_param_cb(deadline_ms, &deadline_ms_ops, &deadline_ms, 0644);
MODULE_PARM_DESC(deadline_ms, "longest time in ms that one readahead waits for the host (1-1000, default 20)");

static unsigned int spin_us = 30;
module_param_cb(spin_us, &spin_us_ops, &spin_us, 0644);
MODULE_PARM_DESC(spin_us, "time in us for which a reader polls for an answer before it sleeps (0-1000, default 30)");

/* --- requests ------------------------------------------------------------------------------ */

/*
 * Returns whether abandoned requests, for whose answer no reader waits any more, have more than 1 /
 * KEPT_DIVISOR of the bounce pages at the host.
 */
static bool host_keeps(struct tmem_dev *dev)
{
	return READ_ONCE(dev->nr_kept) > dev->nr_bounce / KEPT_DIVISOR;
}

/* Abandons a get request unless its answer has come. Returns whether the answer has come. */
static bool get_abandon(struct tmem_get_req *get)
{
	struct tmem_queue *queue = get->queue;
	struct tmem_dev *dev = queue->dev;
	bool done;

	spin_lock_irq(&queue->vq_lock);
	done = get->req.state == TMEM_REQ_DONE;
	if (!done) {
		get->req.state = TMEM_REQ_ABANDONED;
		spin_lock(&dev->get_lock);
		WRITE_ONCE(dev->nr_kept, dev->nr_kept + get->nr_blocks);
		spin_unlock(&dev->get_lock);
	}
	spin_unlock_irq(&queue->vq_lock);
	return done;
}

/*
 * Sends a get request. The caller has filled in count, block, entry and out; this function fills in
 * out.hdr.
 */
static int get_submit(struct tmem_dev *dev, struct tmem_get_req *get, u64 generation, u32 pool)
{
	struct scatterlist out, in[1 + TMEM_BATCH_BLOCKS], *sgs[] = { &out, in };
	unsigned int count = get->count, i, pages;
	struct tmem_queue *queue = get->queue;
	bool notify = false;
	int err;

	get->out.hdr = (struct virtio_tmem_req){
		.generation = cpu_to_le64(generation),
		.type = cpu_to_le16(VIRTIO_TMEM_T_GET),
		.count = cpu_to_le16(count),
		.pool = cpu_to_le32(pool),
		.retain = cpu_to_le64(get->retain),
	};
	memset(&get->in, VIRTIO_TMEM_S_UNANSWERED, sizeof(get->in));
	get->req.room_bytes = offsetof(typeof(get->in), page[count]) + count * PAGE_SIZE;
	sg_init_one(&out, &get->out, offsetof(typeof(get->out), cookie[count]));
	sg_init_table(in, 1 + get->nr_blocks);
	sg_set_buf(&in[0], &get->in, offsetof(typeof(get->in), page[count]));
	for (i = 0; i < get->nr_blocks; i++) {
		pages = min(count - i * TMEM_BLOCK_PAGES, (unsigned int)TMEM_BLOCK_PAGES);
		sg_set_buf(&in[1 + i], get->block[i], pages * PAGE_SIZE);
	}

	spin_lock_irq(&queue->vq_lock);
	err = virtqueue_add_sgs(queue->vq, sgs, 1, 1, &get->req, GFP_ATOMIC);
	if (!err) {
		tmem_req_sent(&queue->in_flight, &get->req);
		notify = virtqueue_kick_prepare(queue->vq);
	}
	spin_unlock_irq(&queue->vq_lock);
	if (notify)
		virtqueue_notify(queue->vq);
	if (!err)
		tmem_count(TMEM_STAT_requests_get);
	return err;
}

static bool get_done(struct tmem_get_req *get)
{
	/* Read the answer after the state; pairs with tmem_bounce_answered(). */
	return smp_load_acquire(&get->req.state) == TMEM_REQ_DONE;
}

/*
 * Waits until a get request is answered or the deadline passes. The function spins for a short
 * time, because an idle host answers faster than a context switch takes, and then sleeps. It
 * returns whether there is an answer. If there is none, the request belongs to the device.
 */
static bool get_wait(struct tmem_get_req *get, u64 spin_until_ns, u64 deadline_ns)
{
	u64 now_ns = ktime_get_ns();

	while (now_ns < spin_until_ns && !need_resched()) {
		tmem_send_drain(get->queue);
		if (get_done(get))
			return true;
		cpu_relax();
		now_ns = ktime_get_ns();
	}
	if (get_done(get))
		return true;
	if (now_ns < deadline_ns)
		tmem_wait_event_until(get->wait, get_done(get), deadline_ns);
	return get_abandon(get);
}

/* Adds the time that a reader waited for one request, answered or not, to the statistics. */
static void count_wait(u64 waited_ns)
{
	unsigned int bucket = fls64(div_u64(waited_ns, NSEC_PER_USEC));

	tmem_count_n(TMEM_STAT_get_waits_ns, waited_ns);
	tmem_count(min_t(unsigned int, TMEM_STAT_get_waits_1us + bucket,
			 TMEM_STAT_get_waits_longer));
}

/* --- breaker ------------------------------------------------------------------------------- */

static u64 deadline_span_ns(void)
{
	return (u64)READ_ONCE(deadline_ms) * NSEC_PER_MSEC;
}

/*
 * Returns the fill of the breaker's bucket in ns: the waits of slow calls, minus the part that has
 * leaked until now. The caller holds dev->get_lock.
 */
static u64 slow_ns(struct tmem_dev *dev)
{
	/*
	 * Read the clock under the lock. Otherwise another task could meanwhile set slow_at_ns to a
	 * time after now_ns.
	 */
	u64 now_ns = ktime_get_ns(), leaked_ns;

	lockdep_assert_held(&dev->get_lock);
	leaked_ns = div_u64((now_ns - dev->slow_at_ns) * WAIT_BUDGET, WAIT_PERIOD);
	dev->slow_at_ns = now_ns;
	dev->slow_ns -= min(dev->slow_ns, leaked_ns);
	return dev->slow_ns;
}

/*
 * Opens or closes the breaker, and changes the module's state, which sysfs and reports to the host
 * show. The caller holds get_lock during both changes. Otherwise a change of the backend between
 * them could leave a wrong state permanently.
 */
static void breaker_set(struct tmem_dev *dev, bool open)
{
	lockdep_assert_held(&dev->get_lock);
	WRITE_ONCE(dev->tripped, open);
	tmem_state_tripped(open);
}

static void breaker_log(bool open)
{
	trace_tmem_breaker(open);
	pr_notice_ratelimited("%s\n", open ?
			      "the host answers too late: all reads go to the disk for now" :
			      "the host answers in time again: reads use the cache again");
}

static bool may_probe(struct tmem_dev *dev)
{
	bool may;

	spin_lock_irq(&dev->get_lock);
	may = dev->tripped && !host_keeps(dev) &&
	      slow_ns(dev) <= deadline_span_ns() * WAIT_BUDGET / 2;
	spin_unlock_irq(&dev->get_lock);
	return may;
}

/* Closes the breaker, and empties its bucket if @forget. Returns whether the breaker was open. */
static bool breaker_close(struct tmem_dev *dev, bool forget)
{
	bool was;

	spin_lock_irq(&dev->get_lock);
	was = dev->tripped;
	WRITE_ONCE(dev->late_row, 0);
	if (forget)
		dev->slow_ns = 0;
	breaker_set(dev, false);
	spin_unlock_irq(&dev->get_lock);
	return was;
}

/*
 * Records the waits of a tmem_get() call with requests, and opens the breaker if needed. The reader
 * waited for @waited_ns. For @host_ns of this time, a request was neither answered nor late.
 */
static void breaker_note(struct tmem_dev *dev, bool late, u64 waited_ns, u64 host_ns)
{
	u64 span_ns = deadline_span_ns();
	bool slow = host_ns > span_ns / SLOW_DIVISOR, opens = false;

	tmem_count_n(TMEM_STAT_waits_us, div_u64(waited_ns, NSEC_PER_USEC));
	if (slow)
		tmem_count(TMEM_STAT_slow);
	/*
	 * A quick call needs no lock, unless it ends a row of late calls. When the next slow call
	 * comes, that call subtracts what has leaked from the bucket meanwhile.
	 */
	if (!late && !slow && !READ_ONCE(dev->late_row) && !host_keeps(dev) &&
	    waited_ns <= READ_ONCE(dev->wait_max_ns))
		return;
	spin_lock_irq(&dev->get_lock);
	if (waited_ns > dev->wait_max_ns)
		WRITE_ONCE(dev->wait_max_ns, waited_ns);
	WRITE_ONCE(dev->late_row, late ? dev->late_row + 1 : 0);
	if (slow) {
		/*
		 * The bucket does not leak during a slow call; otherwise readers could wait longer
		 * than the bound in the header of this file.
		 */
		dev->slow_at_ns = min(dev->slow_at_ns + host_ns, ktime_get_ns());
		dev->slow_ns = slow_ns(dev) + host_ns;
	}
	if (!dev->tripped) {
		opens = dev->late_row >= LATE_ROW_MAX || host_keeps(dev) ||
			slow_ns(dev) > span_ns * WAIT_BUDGET;
		if (opens)
			breaker_set(dev, true);
	}
	spin_unlock_irq(&dev->get_lock);
	if (!opens)
		return;
	TMEM_HOLD(breaker);
	tmem_count(TMEM_STAT_trips);
	/*
	 * Another task may have closed the breaker after this function opened it and dropped the
	 * lock. The last message in the log must give the current state.
	 */
	if (READ_ONCE(dev->tripped))
		breaker_log(true);
	/*
	 * Queue the GENERATION request before the report, which waits until the host answers: the
	 * workqueue is ordered.
	 */
	tmem_dev_ask(dev);
	tmem_dev_report(dev);
}

/**
 * tmem_breaker_trip() - open the breaker, because the device does not answer GENERATION requests
 * @dev: the device
 *
 * Context: process; the ask work.
 */
void tmem_breaker_trip(struct tmem_dev *dev)
{
	bool opens;

	spin_lock_irq(&dev->get_lock);
	opens = !dev->tripped;
	if (opens)
		breaker_set(dev, true);
	spin_unlock_irq(&dev->get_lock);
	if (!opens)
		return;
	tmem_count(TMEM_STAT_trips);
	breaker_log(true);
}

/**
 * tmem_breaker_probe() - if the breaker is open, test whether the host answers quickly again
 * @dev: the device
 *
 * The probe requests of each queue one page of object 1 with cookie 0, which no put has. Any answer
 * that is not slow counts as success.
 *
 * Context: process, sleeps up to a quarter of the deadline for each queue.
 */
void tmem_breaker_probe(struct tmem_dev *dev)
{
	u64 generation = READ_ONCE(dev->generation);
	struct tmem_get_req *get;
	bool answered, late = false;
	unsigned int i;
	u64 deadline_ns;

	if (!generation || !may_probe(dev))
		return;
	for (i = 0; i < dev->nr_queues && !late; i++) {
		get = tmem_bounce_alloc(dev, 1);
		if (!get)
			return;
		get->queue = &dev->queue[i];
		get->count = 1;
		get->retain = 0;
		get->out.get.object = cpu_to_le64(1);
		get->out.get.index = 0;
		get->out.cookie[0] = 0;
		deadline_ns = ktime_get_ns() + deadline_span_ns() / SLOW_DIVISOR;
		if (get_submit(dev, get, generation, 1)) {
			tmem_bounce_free(dev, get);
			return;
		}
		TMEM_HOLD(probe);
		answered = get_wait(get, 0, deadline_ns);
		late = !answered || get->answered_ns > deadline_ns;
		if (answered)
			tmem_bounce_free(dev, get);
	}
	if (late || !breaker_close(dev, false))
		return;
	breaker_log(false);
	tmem_dev_report(dev);
}

/**
 * tmem_breaker_reset() - close the breaker and clear its history, because the backend is new
 * @dev: the device
 */
void tmem_breaker_reset(struct tmem_dev *dev)
{
	if (breaker_close(dev, true))
		trace_tmem_breaker(false);
}

/* --- get ----------------------------------------------------------------------------------- */

/* Traces the end of a tmem_get() call. @begin_ns is 0 if tracing was off at its begin. */
static void trace_get(const struct tmem_key *key, pgoff_t index, unsigned int wanted,
		      unsigned int hits, u64 begin_ns)
{
	if (begin_ns && trace_tmem_get_enabled())
		trace_tmem_get(key->pool->name, key->ino, index, wanted, hits,
			       div_u64(ktime_get_ns() - begin_ns, NSEC_PER_USEC));
}

/* State of one tmem_get() call. */
struct get_call {
	struct tmem_dev *dev;
	const struct tmem_key *key;
	pgoff_t index;
	struct page **pages;
	unsigned long *want;
	pgoff_t inside_end;
	u64 generation;
	u64 spin_until_ns;
	u64 deadline_ns;
	u64 waited_ns;		/* time that the reader waited for requests */
	u64 host_ns;		/* part of waited_ns until answers came or the deadline passed */
	u32 bucket;		/* bucket of the inode in the index */
	struct tmem_get_req *burst[GET_BURST];
	u64 burst_object[GET_BURST];
	unsigned int burst_first[GET_BURST];
	unsigned int burst_count[GET_BURST];
	unsigned int nr_burst;
	unsigned int hits;
	unsigned int lost;	/* pages that the host reported as missing */
	bool late;
	bool answered;		/* at least one answer came in time */
};

static void miss(struct get_call *call, unsigned int i, enum tmem_stat why)
{
	__clear_bit(i, call->want);
	tmem_count(why);
}

/*
 * Erases the retained index entries of pages @first + i whose bit i is set in @mask. All of these
 * pages lie in one leaf (64 neighbouring pages) of the index.
 */
static void forget(struct get_call *call, u64 object, unsigned int first, u64 mask)
{
	if (mask)
		tmem_index_forget(call->bucket, object, call->index + first, mask);
}

/*
 * Verifies the content check on the page that the caller will use, and switches the cache off if it
 * is wrong. Returns whether the check is right.
 */
static bool check_page(struct get_call *call, unsigned int i, u64 entry)
{
	void *data = kmap_local_page(call->pages[i]);
	bool good;

	if (TMEM_INJECT(corrupt))
		*(u8 *)data ^= 1;
	good = tmem_check_page(&tmem_keys, data) == tmem_entry_check(entry);
	kunmap_local(data);
	if (good) {
		call->hits++;
		tmem_count(TMEM_STAT_hits);
		tmem_admit_back(call->dev, call->pages[i]);
		return true;
	}
	miss(call, i, TMEM_STAT_misses_check);
	tmem_poison("content check", call->key->ino, call->index + i);
	return false;
}

/*
 * Checks the answer for one page, and copies the page from its bounce page to its destination.
 * Returns whether the page is correct and the host has retained it.
 */
static bool take_page(struct get_call *call, struct tmem_get_req *get, unsigned int nr, u8 status)
{
	unsigned int i = get->first + nr;
	enum tmem_stat why = TMEM_STAT_misses_answer;
	u32 needed = offsetof(typeof(get->in), page[get->count]) + (nr + 1) * PAGE_SIZE;
	void *data;
	u8 result;

	if (status != VIRTIO_TMEM_S_OK ||
	    get->req.used_bytes < offsetof(typeof(get->in), page[get->count]))
		goto no;
	result = READ_ONCE(get->in.page[nr].result);
	if (result == VIRTIO_TMEM_P_MISS) {
		why = TMEM_STAT_misses_host;
		call->lost++;
	}
	if (result != VIRTIO_TMEM_P_HIT || get->req.used_bytes < needed ||
	    READ_ONCE(get->in.page[nr].cookie) != get->out.cookie[nr])
		goto no;
	data = kmap_local_page(call->pages[i]);
	copy_page(data, get->block[nr / TMEM_BLOCK_PAGES] + nr % TMEM_BLOCK_PAGES * PAGE_SIZE);
	kunmap_local(data);
	return check_page(call, i, get->entry[nr]) &&
	       READ_ONCE(get->in.page[nr].flags) & VIRTIO_TMEM_GET_RETAINED;
no:
	miss(call, i, why);
	return false;
}

/* Waits for all requests in flight of a tmem_get() call, and copies the pages that they brought. */
static void finish_burst(struct get_call *call)
{
	u64 sent_ns, since_ns, now_ns, end_ns;
	struct tmem_get_req *get;
	unsigned int b, nr;
	bool answered;
	u64 retained;
	u8 status;

	for (b = 0; b < call->nr_burst; b++) {
		get = call->burst[b];
		sent_ns = get->sent_ns;
		since_ns = ktime_get_ns();
		answered = get_wait(get, call->spin_until_ns, call->deadline_ns);
		now_ns = ktime_get_ns();
		call->waited_ns += now_ns - since_ns;
		/*
		 * Count at most the time until the deadline. If the guest did not run for a time
		 * (QEMU was stopped, the host was suspended), its clock jumps, and the answer seems
		 * to be that much later. The request belongs to the device if it is not answered.
		 */
		end_ns = call->deadline_ns;
		if (answered)
			end_ns = min(end_ns, get->answered_ns);
		call->host_ns += clamp(end_ns, since_ns, now_ns) - since_ns;
		count_wait(now_ns - sent_ns);
		if (!answered) {
			/*
			 * The request belongs to the device from now on. Use the copies of its
			 * count and first in @call.
			 */
			for (nr = 0; nr < call->burst_count[b]; nr++)
				miss(call, call->burst_first[b] + nr, TMEM_STAT_misses_late);
			if (call->dev->retain)
				forget(call, call->burst_object[b], call->burst_first[b],
				       GENMASK_ULL(call->burst_count[b] - 1, 0));
			tmem_count(TMEM_STAT_late);
			call->late = true;
			continue;
		}
		call->answered = true;
		status = VIRTIO_TMEM_S_UNANSWERED;
		if (get->req.used_bytes >= sizeof(get->in.resp))
			status = READ_ONCE(get->in.resp.status);
		if (status == VIRTIO_TMEM_S_STALE) {
			tmem_count(TMEM_STAT_stale);
			tmem_dev_ask(call->dev);
		}
		retained = 0;
		for (nr = 0; nr < get->count; nr++)
			if (take_page(call, get, nr, status))
				retained |= BIT_ULL(nr);
		retained &= get->retain;
		tmem_count_n(TMEM_STAT_retained_hits, hweight64(retained));
		forget(call, call->burst_object[b], get->first, get->retain & ~retained);
		tmem_bounce_free(call->dev, get);
	}
	call->nr_burst = 0;
}

/*
 * Requests pages first .. first + count - 1 from the host, after the caller has taken their entries
 * out of the index. Bit i of @retain is set if the entry of page first + i stays in the index,
 * marked as retained.
 */
static void request_pages(struct get_call *call, struct tmem_queue *queue,
			  const struct tmem_where *where, unsigned int first, unsigned int count,
			  const u64 *entry, u64 retain)
{
	struct tmem_dev *dev = call->dev;
	struct tmem_get_req *get;
	enum tmem_stat why;
	unsigned int nr;
	u64 base;

	if (call->nr_burst == GET_BURST)
		finish_burst(call);
	why = TMEM_STAT_misses_late;
	if (call->late)
		goto no;
	why = TMEM_STAT_misses_bounce;
	get = tmem_bounce_alloc(dev, count);
	if (!get)
		goto no;
	get->queue = queue;
	get->first = first;
	get->count = count;
	get->retain = retain;
	get->out.get.object = cpu_to_le64(where->object);
	get->out.get.index = cpu_to_le64(call->index + first);
	base = READ_ONCE(dev->cookie_base);
	for (nr = 0; nr < count; nr++) {
		get->entry[nr] = entry[nr];
		get->out.cookie[nr] = cpu_to_le64(base + tmem_entry_offset(entry[nr]));
	}
	why = TMEM_STAT_misses_queue;
	get->sent_ns = ktime_get_ns();
	if (get_submit(dev, get, call->generation, where->pool)) {
		tmem_bounce_free(dev, get);
		goto no;
	}
	call->burst_object[call->nr_burst] = where->object;
	call->burst_first[call->nr_burst] = first;
	call->burst_count[call->nr_burst] = count;
	call->burst[call->nr_burst++] = get;
	return;
no:
	for (nr = 0; nr < count; nr++)
		miss(call, first + nr, why);
	forget(call, where->object, first, retain);
}

/*
 * Returns the pages from .. to - 1 of the call that the host may retain: bit i for page from + i.
 */
static u64 may_retain(struct get_call *call, unsigned int from, unsigned int to)
{
	pgoff_t first = call->index + from;
	unsigned int pages;

	if (first >= call->inside_end)
		return 0;
	pages = min_t(pgoff_t, to - from, call->inside_end - first);
	return tmem_retain_wanted(call->dev, pages) ? GENMASK_ULL(pages - 1, 0) : 0;
}

/* Returns @count bits of @mask, from bit @first on. */
static u64 part_of(u64 mask, unsigned int first, unsigned int count)
{
	return mask >> first & GENMASK_ULL(count - 1, 0);
}

/* Gets pages from .. to - 1 of the call, all in one 64-page unit of the index. */
static void get_unit(struct get_call *call, unsigned int from, unsigned int to)
{
	unsigned int nr = to - from, i, run = 0;
	u64 entry[VIRTIO_TMEM_BATCH_MAX], keep;
	struct tmem_where where = {};
	struct tmem_queue *queue;
	unsigned long want = 0;
	bool there, good;
	void *data;

	for (i = 0; i < nr; i++)
		if (test_bit(from + i, call->want))
			want |= BIT(i);
	if (!want)
		return;
	keep = may_retain(call, from, to);
	/* Let a test erase the entries here, as another CPU can at any time. */
	if (TMEM_INJECT(erased_late))
		tmem_invalidate(call->key->pool, call->key->ino, call->index + from,
				call->index + to - 1, TMEM_INVAL_TRUNCATE);
	tmem_index_take(call->key, call->index + from, nr, &want, keep, entry, &where);
	queue = tmem_queue_of(call->dev, call->bucket, call->index + from);

	for (i = 0; i < nr; i++) {
		there = false;
		if (!(want & BIT(i))) {
			entry[i] = 0;
		} else if (!entry[i]) {
			miss(call, from + i, TMEM_STAT_misses_index);
		} else {
			data = kmap_local_page(call->pages[from + i]);
			there = tmem_ring_copy(call->dev, queue, entry[i], data);
			kunmap_local(data);
		}
		if (there) {
			good = check_page(call, from + i, entry[i]);
			tmem_count_n(TMEM_STAT_ring_hits, good);
			if (!good)
				forget(call, where.object, from + i, keep >> i & 1);
			else if (keep & BIT_ULL(i))
				tmem_count(TMEM_STAT_retained_hits);
		}
		/*
		 * Request each run of pages that are at the host and not in the put ring with one
		 * request.
		 */
		if (!there && entry[i] && run < call->dev->batch_max) {
			run++;
			continue;
		}
		if (run)
			request_pages(call, queue, &where, from + i - run, run, &entry[i - run],
				      part_of(keep, i - run, run));
		run = !there && entry[i] ? 1 : 0;
	}
	if (run)
		request_pages(call, queue, &where, to - run, run, &entry[nr - run],
			      part_of(keep, nr - run, run));
}

/**
 * tmem_get_deadline_ns() - return the deadline of a reader that begins to wait now
 *
 * Return: a time of ktime_get_ns().
 */
u64 tmem_get_deadline_ns(void)
{
	return ktime_get_ns() + deadline_span_ns();
}

/**
 * tmem_get() - get pages back from the put ring or from the host
 * @key: pool and inode
 * @index: page number of the first page
 * @nr: number of pages
 * @pages: destinations, locked by the caller and not uptodate
 * @want: bitmap of @nr bits: the pages to get; on return the pages that were got
 * @deadline_ns: from tmem_get_deadline_ns(); no request is sent after it
 * @inside_end: number of the first page that does not lie completely inside the file; the host does
 *   not retain this page and later ones
 *
 * Context: process, may sleep until the deadline. Destinations whose bit in @want is clear on
 * return have unspecified content.
 *
 * Return: number of hits.
 */
unsigned int tmem_get(const struct tmem_key *key, pgoff_t index, unsigned int nr,
		      struct page **pages, unsigned long *want, u64 deadline_ns,
		      pgoff_t inside_end)
{
	unsigned int wanted = bitmap_weight(want, nr), from, to;
	enum tmem_stat why = TMEM_STAT_misses_offline;
	u64 begin_ns = trace_tmem_get_enabled() ? ktime_get_ns() : 0;
	struct get_call call;
	struct tmem_dev *dev;
	u64 now_ns;
	bool late;

	if (!wanted)
		return 0;
	tmem_count_n(TMEM_STAT_gets, wanted);
	dev = tmem_online() ? tmem_dev_get() : NULL;
	if (!dev)
		goto none;
	why = TMEM_STAT_misses_tripped;
	if (READ_ONCE(dev->tripped))
		goto put;

	why = TMEM_STAT_misses_late;
	now_ns = ktime_get_ns();
	if (now_ns >= deadline_ns)
		goto put;
	call = (struct get_call){
		.dev = dev,
		.key = key,
		.index = index,
		.pages = pages,
		.want = want,
		.inside_end = inside_end,
		.spin_until_ns = now_ns + (u64)spin_us * NSEC_PER_USEC,
		.deadline_ns = deadline_ns,
		.generation = READ_ONCE(dev->generation),
		.bucket = tmem_index_bucket(key),
	};
	TMEM_HOLD(get);
	smp_rmb();	/* read the generation before the index; pairs with sync_work_fn() */
	for (from = 0; from < nr; from = to) {
		to = min(nr, from + 64 - (unsigned int)((index + from) & 63));
		/*
		 * If no more requests may be sent, the other pages are misses and their entries
		 * stay in the index. If the scheduler has delayed the reader beyond the deadline,
		 * an answer to another request would be late without a fault of the host.
		 */
		late = call.late || ktime_get_ns() >= deadline_ns;
		if (!call.generation || late || !tmem_online()) {
			for (; from < to; from++)
				if (test_bit(from, want))
					miss(&call, from, late ? TMEM_STAT_misses_late :
					     TMEM_STAT_misses_offline);
			continue;
		}
		get_unit(&call, from, to);
	}
	finish_burst(&call);
	if (call.late || call.answered)
		breaker_note(dev, call.late, call.waited_ns, call.host_ns);
	tmem_admit_learn(dev, call.hits, call.lost);
	tmem_dev_put(dev);
	trace_get(key, index, wanted, call.hits, begin_ns);
	return call.hits;
put:
	tmem_dev_put(dev);
none:
	bitmap_zero(want, nr);
	tmem_count_n(why, wanted);
	trace_get(key, index, wanted, 0, begin_ns);
	return 0;
}
