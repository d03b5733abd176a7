// SPDX-License-Identifier: GPL-2.0-only
/*
 * Feeder thread. It calls the sender (send.c) when neither a put nor an answer does: for puts that
 * have waited for TMEM_PUT_DELAY_MS in a partial batch, for flushes, and for work that an interrupt
 * left.
 *
 * A request costs as much as copies of many pages, and reclaim evicts more than one page at a time.
 * Therefore puts wait for a full batch: requests for single pages would cost more than all other
 * work of a put. A get finds waiting pages in the ring.
 *
 * The feeder is a real-time thread, because reclaim fills the rings and must not starve it. Full
 * batches and their answers do not need the feeder.
 */
#include <linux/kthread.h>

#include "wake.h"

static bool feeder_has_work(struct tmem_dev *dev)
{
	unsigned int i;

	for (i = 0; i < dev->nr_queues; i++)
		if (queue_has_work(&dev->queue[i]))
			return true;
	return false;
}

/* Serves all request queues of a device (@data), as a thread. Returns 0 when it is stopped. */
int tmem_feeder(void *data)
{
	long timeout = MAX_SCHEDULE_TIMEOUT;
	struct tmem_dev *dev = data;
	unsigned int i;
	bool more;

	while (!kthread_should_stop()) {
		wait_event_idle_timeout(dev->feeder_wait,
					kthread_should_stop() || feeder_has_work(dev), timeout);
		TMEM_HOLD(feeder);
		timeout = MAX_SCHEDULE_TIMEOUT;
		for (i = 0; i < dev->nr_queues; i++) {
			/*
			 * Clear the flag before the work, so that a request during the work is not
			 * lost.
			 */
			smp_store_mb(dev->queue[i].attention, false);
			do {
				/* The answer to a fetch raises a softirq. */
				local_bh_disable();
				more = tmem_send(&dev->queue[i]);
				local_bh_enable();
				cond_resched();
			} while (more);
			timeout = min(timeout, tmem_send_timeout(&dev->queue[i]));
		}
	}
	return 0;
}
