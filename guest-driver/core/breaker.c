// SPDX-License-Identifier: GPL-2.0-only
/*
 * Breaker: bounds the time that readers wait for a slow host in total.
 *
 * Each get has a deadline. Beyond that, the breaker opens, and the driver then requests nothing
 * until a probe is answered quickly. The breaker opens in each of these cases:
 * - LATE_ROW_MAX fetches in a row were late. Of fetches that were in flight together, one counts.
 * - Abandoned requests have more than half of the bounce pages at the host.
 * - The device does not answer a request on the control queue, and then no GENERATION request.
 *   Without this, the state would stay "on" while no page is read and the back end is gone.
 * - The waits for slow fetches have filled a bucket. A fetch is slow if it takes longer than a
 *   quarter of the deadline. The bucket holds WAIT_BUDGET deadlines and empties at WAIT_BUDGET per
 *   WAIT_PERIOD deadlines, but not during a slow fetch. Only the time until the answer counts, and
 *   at most one deadline for each fetch. The time from the answer until the scheduler runs the
 *   reader does not count, because a reader of the disk would wait for it, too. A time in which
 *   several slow fetches are in flight counts once.
 *
 * The driver does not probe before half of the bucket is empty again, because a host may answer a
 * probe quickly and gets slowly. With the defaults, readers that come one after the other wait for
 * a slow host for 200 ms plus one deadline in total. Beyond that, their waits take at most a fifth
 * of their other time. Each concurrent reader adds at most one deadline.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include "../trace.h"
#include "get.h"

/* The breaker opens after this many fetches in a row that missed the deadline. */
#define LATE_ROW_MAX		3
/*
 * The breaker also opens when abandoned requests (not answered before the deadline) have more than
 * 1 / KEPT_DIVISOR of the bounce pages at the host.
 */
#define KEPT_DIVISOR		2
/*
 * The breaker adds up the waits for slow fetches in a leaky bucket. The bucket holds WAIT_BUDGET
 * deadlines, and loses as much in WAIT_PERIOD deadlines.
 */
#define WAIT_BUDGET		10
#define WAIT_PERIOD		50

/*
 * Returns whether abandoned requests, for whose answer no reader waits any more, have more than 1 /
 * KEPT_DIVISOR of the bounce pages at the host.
 */
static bool host_keeps(struct tmem_dev *dev)
{
	return READ_ONCE(dev->nr_kept) > dev->nr_bounce / KEPT_DIVISOR;
}

/*
 * Returns the fill of the breaker's bucket in ns: the waits for slow fetches, minus the part that
 * has leaked until now. The caller holds dev->get_lock.
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
	      slow_ns(dev) <= tmem_get_span_ns() * WAIT_BUDGET / 2;
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

/* Logs and reports that the breaker has opened. */
static void opened(struct tmem_dev *dev)
{
	tmem_count(TMEM_STAT_trips);
	/*
	 * Another task may have closed the breaker after this one opened it and dropped the lock.
	 * The last message in the log must give the current state.
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

/*
 * Records a fetch with requests, and opens the breaker if needed. @late: a request was not answered
 * before the deadline. @awaited: a reader has waited for the fetch since @begin_ns, or waits at its
 * end. @end_ns is the time of the last answer, at most the deadline.
 *
 * Many fetches may be in flight at a time, and a slow host delays all of them. Only the time that
 * no earlier slow fetch has covered goes into the bucket, and a late fetch counts only if it was
 * sent after the end of the last one that counted. Context: process or softirq.
 */
void tmem_breaker_note(struct tmem_dev *dev, bool late, bool awaited, u64 begin_ns, u64 sent_ns,
		       u64 end_ns)
{
	u64 host_ns = end_ns - min(begin_ns, end_ns), waited_ns = awaited ? host_ns : 0;
	/* A fetch in advance counts if a reader waits for it at its end, or if it is late. */
	bool slow = (awaited || late) && host_ns > tmem_get_span_ns() / TMEM_SLOW_DIVISOR;
	unsigned long flags;
	bool opens;

	tmem_count_n(TMEM_STAT_waits_us, div_u64(waited_ns, NSEC_PER_USEC));
	if (slow)
		tmem_count(TMEM_STAT_slow);
	/* Most fetches need no lock. If none comes, the next slow one subtracts the leak. */
	if (!late && !slow && !READ_ONCE(dev->late_row) && !host_keeps(dev) &&
	    waited_ns <= READ_ONCE(dev->wait_max_ns))
		return;
	spin_lock_irqsave(&dev->get_lock, flags);
	if (waited_ns > dev->wait_max_ns)
		WRITE_ONCE(dev->wait_max_ns, waited_ns);
	if (!late) {
		WRITE_ONCE(dev->late_row, 0);
	} else if (sent_ns >= dev->fetch_late_ns) {
		WRITE_ONCE(dev->late_row, dev->late_row + 1);
		dev->fetch_late_ns = end_ns;
	}
	if (slow) {
		host_ns = end_ns - min(max(begin_ns, dev->fetch_slow_ns), end_ns);
		dev->fetch_slow_ns = max(end_ns, dev->fetch_slow_ns);
		/*
		 * The bucket does not leak during a slow fetch; otherwise readers could wait longer
		 * than the bound in the header of this file.
		 */
		dev->slow_at_ns = min(dev->slow_at_ns + host_ns, ktime_get_ns());
		dev->slow_ns = slow_ns(dev) + host_ns;
	}
	opens = !dev->tripped && (dev->late_row >= LATE_ROW_MAX || host_keeps(dev) ||
				  slow_ns(dev) > tmem_get_span_ns() * WAIT_BUDGET);
	if (opens)
		breaker_set(dev, true);
	spin_unlock_irqrestore(&dev->get_lock, flags);
	if (opens)
		opened(dev);
}

/*
 * Opens the breaker, because the device does not answer GENERATION requests. Context: process; the
 * ask work.
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

/*
 * Tests whether the host answers quickly again, if the breaker is open. The probe requests of each
 * queue one page of object 1 with cookie 0, which no put has. Any answer that is not slow counts as
 * success. Sleeps up to a quarter of the deadline for each queue.
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
		get = tmem_bounce_alloc(dev, 1, false);
		if (!get)
			return;
		get->queue = &dev->queue[i];
		get->count = 1;
		get->retain = 0;
		get->out.get.object = cpu_to_le64(1);
		get->out.get.index = 0;
		get->out.cookie[0] = 0;
		deadline_ns = ktime_get_ns() + tmem_get_span_ns() / TMEM_SLOW_DIVISOR;
		if (tmem_get_submit(dev, get, generation, 1)) {
			tmem_bounce_free(dev, get);
			return;
		}
		TMEM_HOLD(probe);
		answered = tmem_get_wait(get, deadline_ns);
		late = !answered || get->answered_ns > deadline_ns;
		if (answered)
			tmem_bounce_free(dev, get);
	}
	if (late || !breaker_close(dev, false))
		return;
	breaker_log(false);
	tmem_dev_report(dev);
}

/* Closes the breaker and clears its history, because the backend is new. */
void tmem_breaker_reset(struct tmem_dev *dev)
{
	if (breaker_close(dev, true))
		trace_tmem_breaker(false);
}
