// SPDX-License-Identifier: GPL-2.0-only
/*
 * Get requests: takes entries out of the index, sends the requests for their pages, and checks the
 * answers. fetch.c takes the answers.
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
 * The driver never trusts an answer. Length, status, result and cookie must be right, and so must
 * the content check, which is computed on the destination page itself. A page whose check is wrong
 * switches the cache off until the module is loaded again.
 */
#include <linux/highmem.h>
#include <linux/moduleparam.h>
#include <linux/slab.h>

#include "get.h"
#include "wait.h"

/* Largest deadline. A reader that would have to wait longer should read the disk instead. */
#define DEADLINE_MS_MAX		1000

/* --- parameters ---------------------------------------------------------------------------- */

static int set_deadline_ms(const char *value, const struct kernel_param *param)
{
	return param_set_uint_minmax(value, param, 1, DEADLINE_MS_MAX);
}

static const struct kernel_param_ops deadline_ms_ops = {
	.set = set_deadline_ms,
	.get = param_get_uint,
};

static unsigned int deadline_ms = 20;
module_param_cb(deadline_ms, &deadline_ms_ops, &deadline_ms, 0644);
MODULE_PARM_DESC(deadline_ms, "longest time in ms that one bio waits for the host (1-1000, default 20)");

/* Returns the time in ns from the begin of a wait to its deadline. */
u64 tmem_get_span_ns(void)
{
	return (u64)READ_ONCE(deadline_ms) * NSEC_PER_MSEC;
}

u64 tmem_get_deadline_ns(void)
{
	return ktime_get_ns() + tmem_get_span_ns();
}

/* --- requests ------------------------------------------------------------------------------ */

/*
 * Abandons a get request unless its answer has come. An abandoned request belongs to the device.
 * Returns whether the answer has come. Context: any but NMI.
 */
bool tmem_get_abandon(struct tmem_get_req *get)
{
	struct tmem_queue *queue = get->queue;
	struct tmem_dev *dev = queue->dev;
	unsigned long flags;
	bool done;

	spin_lock_irqsave(&queue->vq_lock, flags);
	done = get->req.state == TMEM_REQ_DONE;
	if (!done) {
		get->req.state = TMEM_REQ_ABANDONED;
		spin_lock(&dev->get_lock);
		WRITE_ONCE(dev->nr_kept, dev->nr_kept + get->nr_groups);
		spin_unlock(&dev->get_lock);
	}
	spin_unlock_irqrestore(&queue->vq_lock, flags);
	return done;
}

/*
 * Sends a get request. The caller has filled in count, group, entry, and out except for out.hdr.
 * Returns 0 or an error of the virtqueue. Context: process or softirq.
 */
int tmem_get_submit(struct tmem_dev *dev, struct tmem_get_req *get, u64 generation, u32 pool)
{
	struct scatterlist out, in[1 + TMEM_BATCH_GROUPS], *sgs[] = { &out, in };
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
	sg_init_table(in, 1 + get->nr_groups);
	sg_set_buf(&in[0], &get->in, offsetof(typeof(get->in), page[count]));
	for (i = 0; i < get->nr_groups; i++) {
		pages = min(count - i * TMEM_GROUP_PAGES, (unsigned int)TMEM_GROUP_PAGES);
		sg_set_buf(&in[1 + i], get->group[i], pages * PAGE_SIZE);
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

/*
 * Waits until a get request is answered or the deadline passes. Returns whether there is an answer.
 * If there is none, the request belongs to the device. Sleeps.
 */
bool tmem_get_wait(struct tmem_get_req *get, u64 deadline_ns)
{
	tmem_wait_event_until(get->wait, tmem_get_done(get), deadline_ns);
	return tmem_get_abandon(get);
}

/* Adds the time that a reader waited for one request, answered or not, to the statistics. */
void tmem_get_count_wait(u64 waited_ns)
{
	unsigned int bucket = fls64(div_u64(waited_ns, NSEC_PER_USEC));

	tmem_count_n(TMEM_STAT_get_waits_ns, waited_ns);
	tmem_count(min_t(unsigned int, TMEM_STAT_get_waits_1us + bucket,
			 TMEM_STAT_get_waits_longer));
}

/* --- pages --------------------------------------------------------------------------------- */

/* Counts page @i of a fetch as a miss. */
void tmem_fetch_miss(struct tmem_fetch *fetch, unsigned int i, enum tmem_stat why)
{
	__clear_bit(i, fetch->want);
	tmem_count(why);
}

/*
 * Erases the retained index entries of pages @first + i whose bit i is set in @mask. All of these
 * pages lie in one leaf (64 neighbouring pages) of the index.
 */
static void forget(struct tmem_fetch *fetch, u64 object, unsigned int first, u64 mask)
{
	if (mask)
		tmem_index_forget(fetch->bucket, object, fetch->index + first, mask);
}

/*
 * Verifies the content check on the page that the caller will use, and switches the cache off if it
 * is wrong. Returns whether the check is right.
 */
static bool check_page(struct tmem_fetch *fetch, unsigned int i, u64 entry)
{
	void *data = kmap_local_page(fetch->pages[i]);
	struct tmem_checks checks;

	if (TMEM_INJECT(corrupt))
		*(u8 *)data ^= 1;
	checks = tmem_checks_page(&tmem_keys, data);
	kunmap_local(data);
	if (checks.check == tmem_entry_check(entry)) {
		fetch->check64[i] = checks.check64;
		fetch->hits++;
		tmem_count(TMEM_STAT_hits);
		if (!fetch->key.pool->private)	/* no put of a swap area would clear the bit */
			tmem_admit_back(fetch->dev, fetch->pages[i]);
		return true;
	}
	tmem_fetch_miss(fetch, i, TMEM_STAT_misses_check);
	tmem_poison("content check", tmem_key_block(&fetch->key, fetch->index + i));
	return false;
}

/*
 * Checks the answer for one page, and copies the page from its bounce page to its destination.
 * Returns whether the page is correct and the host has retained it.
 */
static bool take_page(struct tmem_fetch *fetch, struct tmem_get_req *get, unsigned int nr,
		      u8 status)
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
		fetch->lost++;
	}
	if (result != VIRTIO_TMEM_P_HIT || get->req.used_bytes < needed ||
	    READ_ONCE(get->in.page[nr].cookie) != get->out.cookie[nr])
		goto no;
	data = kmap_local_page(fetch->pages[i]);
	copy_page(data, get->group[nr / TMEM_GROUP_PAGES] + nr % TMEM_GROUP_PAGES * PAGE_SIZE);
	kunmap_local(data);
	return check_page(fetch, i, get->entry[nr]) &&
	       READ_ONCE(get->in.page[nr].flags) & VIRTIO_TMEM_GET_RETAINED;
no:
	tmem_fetch_miss(fetch, i, why);
	return false;
}

/*
 * Checks the answer to a request, and copies the pages that it brought. The request is free
 * afterwards. Context: any but NMI and hard interrupts.
 */
void tmem_fetch_take(struct tmem_fetch *fetch, struct tmem_fetch_sent *sent)
{
	u8 status = VIRTIO_TMEM_S_UNANSWERED;
	struct tmem_get_req *get = sent->get;
	unsigned int nr;
	u64 retained = 0;

	if (get->req.used_bytes >= sizeof(get->in.resp))
		status = READ_ONCE(get->in.resp.status);
	if (status == VIRTIO_TMEM_S_STALE) {
		tmem_count(TMEM_STAT_stale);
		tmem_dev_ask(fetch->dev);
	}
	for (nr = 0; nr < get->count; nr++)
		if (take_page(fetch, get, nr, status))
			retained |= BIT_ULL(nr);
	retained &= get->retain;
	tmem_count_n(TMEM_STAT_retained_hits, hweight64(retained));
	forget(fetch, sent->object, get->first, get->retain & ~retained);
	tmem_bounce_free(fetch->dev, get);
}

/*
 * Counts the pages of a request that was not answered before the deadline, and belongs to the
 * device. Context: any but NMI.
 */
void tmem_fetch_lost(struct tmem_fetch *fetch, struct tmem_fetch_sent *sent)
{
	unsigned int nr;

	for (nr = 0; nr < sent->count; nr++)
		tmem_fetch_miss(fetch, sent->first + nr, TMEM_STAT_misses_late);
	if (fetch->dev->retain)
		forget(fetch, sent->object, sent->first, GENMASK_ULL(sent->count - 1, 0));
	tmem_count(TMEM_STAT_late);
	fetch->late = true;
}

/* Returns the reserved request, with space for @count pages, or another one, or NULL. */
static struct tmem_get_req *take_request(struct tmem_fetch *fetch, unsigned int count)
{
	struct tmem_get_req *get = fetch->spare;

	if (!get)
		return tmem_bounce_alloc(fetch->dev, count, fetch->ahead);
	fetch->spare = NULL;
	tmem_bounce_trim(fetch->dev, get, count);
	return get;
}

/*
 * Requests pages first .. first + count - 1 from the host, after the caller has taken their entries
 * out of the index. Bit i of @retain is set if the entry of page first + i stays in the index,
 * marked as retained.
 */
static void request_pages(struct tmem_fetch *fetch, struct tmem_queue *queue,
			  const struct tmem_where *where, unsigned int first, unsigned int count,
			  const u64 *entry, u64 retain)
{
	struct tmem_dev *dev = fetch->dev;
	struct tmem_get_req *get;
	enum tmem_stat why;
	unsigned int nr;
	u64 base;

	why = TMEM_STAT_misses_bounce;
	get = fetch->nr_sent < TMEM_GET_BURST ? take_request(fetch, count) : NULL;
	if (!get)
		goto no;
	get->queue = queue;
	get->fetch = fetch;
	get->first = first;
	get->count = count;
	get->retain = retain;
	get->out.get.object = cpu_to_le64(where->object);
	get->out.get.index = cpu_to_le64(fetch->index + first);
	base = READ_ONCE(dev->cookie_base);
	for (nr = 0; nr < count; nr++) {
		get->entry[nr] = entry[nr];
		get->out.cookie[nr] = cpu_to_le64(base + tmem_entry_offset(entry[nr]));
	}
	why = TMEM_STAT_misses_queue;
	/* The answer may come at once. The caller has a use of the fetch, too. */
	atomic_inc(&fetch->pending);
	if (tmem_get_submit(dev, get, fetch->generation, where->pool)) {
		atomic_dec(&fetch->pending);
		tmem_bounce_free(dev, get);
		goto no;
	}
	fetch->sent[fetch->nr_sent++] = (struct tmem_fetch_sent){
		.get = get,
		.queue = queue,
		.object = where->object,
		.first = first,
		.count = count,
	};
	return;
no:
	for (nr = 0; nr < count; nr++)
		tmem_fetch_miss(fetch, first + nr, why);
	forget(fetch, where->object, first, retain);
}

/* Returns @count bits of @mask, from bit @first on. */
static u64 part_of(u64 mask, unsigned int first, unsigned int count)
{
	return mask >> first & GENMASK_ULL(count - 1, 0);
}

/*
 * Takes the entries of pages @from to @to - 1 of a fetch out of the index, and copies or requests
 * the pages. All pages are in one leaf of the index. Context: any but NMI and hard
 * interrupts.
 */
void tmem_fetch_leaf(struct tmem_fetch *fetch, unsigned int from, unsigned int to)
{
	unsigned int nr = to - from, i, run = 0;
	u64 entry[VIRTIO_TMEM_BATCH_MAX], keep = 0;
	struct tmem_where where = {};
	struct tmem_queue *queue;
	unsigned long want = 0;
	bool there, good;
	void *data;

	for (i = 0; i < nr; i++)
		if (test_bit(from + i, fetch->want))
			want |= BIT(i);
	if (!want)
		return;
	/* All pages can be retained: at its next eviction, a page is compared with its record. */
	if (tmem_retain_wanted(fetch->dev, nr))
		keep = GENMASK_ULL(nr - 1, 0);
	/* Let a test erase the entries here, as another CPU can at any time. */
	if (TMEM_INJECT(erased_late))
		tmem_invalidate(&fetch->key, fetch->index + from, fetch->index + to - 1,
				TMEM_INVAL_BLOCK);
	tmem_index_take(&fetch->key, fetch->index + from, nr, &want, keep, entry, &where);
	queue = tmem_queue_of(fetch->dev, fetch->bucket, fetch->index + from);

	for (i = 0; i < nr; i++) {
		there = false;
		if (!(want & BIT(i))) {
			entry[i] = 0;
		} else if (!entry[i]) {
			tmem_fetch_miss(fetch, from + i, TMEM_STAT_misses_index);
		} else {
			data = kmap_local_page(fetch->pages[from + i]);
			there = tmem_ring_copy(fetch->dev, queue, entry[i], data);
			kunmap_local(data);
		}
		if (there) {
			good = check_page(fetch, from + i, entry[i]);
			tmem_count_n(TMEM_STAT_ring_hits, good);
			if (!good)
				forget(fetch, where.object, from + i, keep >> i & 1);
			else if (keep & BIT_ULL(i))
				tmem_count(TMEM_STAT_retained_hits);
		}
		/*
		 * Request each run of pages that are at the host and not in the put ring with one
		 * request.
		 */
		if (!there && entry[i] && run < fetch->dev->batch_max) {
			run++;
			continue;
		}
		if (run)
			request_pages(fetch, queue, &where, from + i - run, run, &entry[i - run],
				      part_of(keep, i - run, run));
		run = !there && entry[i] ? 1 : 0;
	}
	if (run)
		request_pages(fetch, queue, &where, to - run, run, &entry[nr - run],
			      part_of(keep, nr - run, run));
}
