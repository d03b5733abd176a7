// SPDX-License-Identifier: GPL-2.0-only
/*
 * Gets of tasks that wait: request pages, and wait until a deadline.
 *
 * The wait of readers is bounded twice. A call (one readahead window) waits no longer than its
 * deadline, and the breaker bounds the waits in total (breaker.c).
 */
#include <linux/moduleparam.h>
#include <linux/sched.h>

#include "../trace.h"
#include "get.h"

/* State of one tmem_get() call. */
struct waiting_call {
	struct tmem_get_call call;
	u64 spin_until_ns;
	u64 waited_ns;		/* time that the reader waited for requests */
	u64 host_ns;		/* part of waited_ns until answers came or the deadline passed */
};

/* Waits for all requests in flight of a tmem_get() call, and copies the pages that they brought. */
static void finish_sent(struct tmem_get_call *call)
{
	struct waiting_call *waiting = container_of(call, struct waiting_call, call);
	u64 sent_ns, since_ns, now_ns, end_ns;
	struct tmem_get_sent *sent;
	struct tmem_get_req *get;
	bool answered;

	for (sent = call->sent; sent < call->sent + call->nr_sent; sent++) {
		get = sent->get;
		sent_ns = get->sent_ns;
		since_ns = ktime_get_ns();
		answered = tmem_get_wait(get, waiting->spin_until_ns, call->deadline_ns);
		now_ns = ktime_get_ns();
		waiting->waited_ns += now_ns - since_ns;
		/*
		 * Count at most the time until the deadline. If the guest did not run for a time
		 * (QEMU was stopped, the host was suspended), its clock jumps, and the answer seems
		 * to be that much later. The request belongs to the device if it is not answered.
		 */
		end_ns = call->deadline_ns;
		if (answered)
			end_ns = min(end_ns, get->answered_ns);
		waiting->host_ns += clamp(end_ns, since_ns, now_ns) - since_ns;
		tmem_get_count_wait(now_ns - sent_ns);
		if (answered)
			tmem_get_take(call, sent);
		else
			tmem_get_lost(call, sent);
	}
	call->nr_sent = 0;
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
	struct waiting_call waiting;
	struct tmem_get_call *call = &waiting.call;
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
	waiting = (struct waiting_call){
		.call.dev = dev,
		.call.key = key,
		.call.index = index,
		.call.pages = pages,
		.call.want = want,
		.call.inside_end = inside_end,
		.call.deadline_ns = deadline_ns,
		.call.generation = READ_ONCE(dev->generation),
		.call.bucket = tmem_index_bucket(key),
		.call.full = finish_sent,
		.spin_until_ns = now_ns + tmem_get_spin_ns(),
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
		late = call->late || ktime_get_ns() >= deadline_ns;
		if (!call->generation || late || !tmem_online()) {
			for (; from < to; from++)
				if (test_bit(from, want))
					tmem_get_miss(call, from, late ? TMEM_STAT_misses_late :
						      TMEM_STAT_misses_offline);
			continue;
		}
		tmem_get_unit(call, from, to);
	}
	finish_sent(call);
	if (call->late || call->answered)
		tmem_breaker_note(dev, call->late, waiting.waited_ns, waiting.host_ns);
	tmem_admit_learn(dev, call->hits, call->lost);
	tmem_dev_put(dev);
	tmem_get_trace(key, index, wanted, call->hits, begin_ns);
	return call->hits;
put:
	tmem_dev_put(dev);
none:
	bitmap_zero(want, nr);
	tmem_count_n(why, wanted);
	tmem_get_trace(key, index, wanted, 0, begin_ns);
	return 0;
}
