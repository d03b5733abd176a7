// SPDX-License-Identifier: GPL-2.0-only
/*
 * GENERATION requests: they ask the device for its generation, which also shows that a back end is
 * there. Some front ends cannot notify the driver of another back end, and a read of the
 * configuration then waits or ends the virtual machine. So the driver reads the configuration at
 * set-up and after a notification only, and otherwise asks.
 *
 * No task waits for an answer. The answer may come much later, for example from the next back end.
 * It may also be of a generation that has ended. The driver empties its index before it uses
 * another generation, so a wrong one costs only time: the device answers the next request with
 * STALE, and the driver asks again.
 *
 * sync.c decides when the driver asks. This file bounds rate and number of the requests.
 */
#include <linux/slab.h>

#include "core.h"

/*
 * Minimum time between two requests, and time after which an answer is late. A request costs the
 * host some microseconds, and a reader of a guest without a cache waits for a disk meanwhile.
 */
#define ASK_PERIOD_MS	1000
/*
 * The device is silent if this many requests are not answered, and the last one is late. One late
 * request is not enough: the guest's clock jumps if the guest does not run for a time.
 */
#define ASKS_LATE	2
/*
 * While requests stay unanswered, the driver sends further ones, because a front end may skip the
 * requests that are in the queue when a back end connects. The first ASKS_QUICK have ASK_PERIOD_MS
 * between them, which covers the restart of a daemon. After that the time doubles with each
 * request, so a back end that was away for long is found after at most as long again.
 */
#define ASKS_QUICK	8
/*
 * Maximum number of requests that are at the device. The last of them is sent 18.2 hours after the
 * first. A control queue of less than ASKS_MAX * ASK_DIVISOR descriptors has room for fewer: one of
 * 64 for 16 in 4.4 minutes, one of 16 for 4 in 3 s. If a front end skips all of them, only a
 * notification or a reload of the module helps (LIM-12 in proto/SPEC.md).
 */
#define ASKS_MAX	24
/* Requests take at most half of the control queue: two of ASK_DIVISOR descriptors each. */
#define ASK_DIVISOR	4

struct tmem_ask {
	struct tmem_req req;
	struct virtio_tmem_req out;
	struct {
		struct virtio_tmem_resp resp;
		struct virtio_tmem_generation body;
	} in;
};

/* Returns the time until the next request may be sent, in jiffies; 0 if it may be sent now. */
static unsigned long wait_jiffies(struct tmem_dev *dev)
{
	unsigned int late = dev->asks_unanswered;
	unsigned long next;

	lockdep_assert_held(&dev->control_vq_lock);
	next = dev->asked_at +
	       (msecs_to_jiffies(ASK_PERIOD_MS) << (late > ASKS_QUICK ? late - ASKS_QUICK : 0));
	return time_before(jiffies, next) ? next - jiffies : 0;
}

/* Adds a request to the control queue. Returns whether the device wants a notification. */
static bool add(struct tmem_dev *dev, struct tmem_ask *ask)
{
	struct scatterlist out, in, *sgs[] = { &out, &in };

	lockdep_assert_held(&dev->control_vq_lock);
	/* The device ignores the generation of the request. */
	ask->out = (struct virtio_tmem_req){ .type = cpu_to_le16(VIRTIO_TMEM_T_GENERATION) };
	memset(&ask->in, 0, sizeof(ask->in));
	ask->in.resp.status = VIRTIO_TMEM_S_UNANSWERED;
	ask->req.room_bytes = sizeof(ask->in);
	/* Clear it first: the answer does not show what happens after the request was sent. */
	WRITE_ONCE(dev->ask_wanted, false);
	sg_init_one(&out, &ask->out, sizeof(ask->out));
	sg_init_one(&in, &ask->in, sizeof(ask->in));
	if (virtqueue_add_sgs(dev->control_vq, sgs, 1, 1, &ask->req, GFP_ATOMIC)) {
		WRITE_ONCE(dev->ask_wanted, true);
		return false;
	}
	tmem_req_sent(&dev->control_in_flight, &ask->req);
	tmem_count(TMEM_STAT_requests_generation);
	return virtqueue_kick_prepare(dev->control_vq);
}

/*
 * Asks the device for its generation, if the last request is long ago. Sets dev->silent if the last
 * ASKS_LATE requests are not answered in time. Returns the time in jiffies after which the caller
 * should call the function again. Context: process; the ask work.
 */
unsigned long tmem_generation_ask(struct tmem_dev *dev)
{
	bool notify = false;
	unsigned long wait;
	unsigned int i;

	spin_lock_irq(&dev->control_vq_lock);
	if (dev->asks_unanswered >= ASKS_LATE &&
	    time_after_eq(jiffies, dev->asked_at + msecs_to_jiffies(ASK_PERIOD_MS)))
		WRITE_ONCE(dev->silent, true);
	if (!wait_jiffies(dev)) {
		for (i = 0; i < dev->nr_asks; i++)
			if (dev->ask[i].req.state == TMEM_REQ_FREE)
				break;
		/* A request that cannot be sent counts as one that is not answered. */
		dev->asked_at = jiffies;
		if (dev->asks_unanswered < ASKS_MAX)
			WRITE_ONCE(dev->asks_unanswered, dev->asks_unanswered + 1);
		if (i < dev->nr_asks)
			notify = add(dev, &dev->ask[i]);
	}
	wait = wait_jiffies(dev);
	spin_unlock_irq(&dev->control_vq_lock);
	if (notify)
		virtqueue_notify(dev->control_vq);
	return max(wait, 1UL);
}

/*
 * Takes the device's answer to a GENERATION request, whose length the caller has recorded. An
 * answer without a generation shows that a back end is there, and no more. Context: any but NMI,
 * under control_vq_lock.
 */
void tmem_generation_answered(struct tmem_dev *dev, struct tmem_req *req)
{
	struct tmem_ask *ask = container_of(req, struct tmem_ask, req);
	u64 generation = 0;
	bool was_silent;

	lockdep_assert_held(&dev->control_vq_lock);
	/* Read each field once, because the device can still write to the answer. */
	if (req->used_bytes >= sizeof(ask->in) &&
	    READ_ONCE(ask->in.resp.status) == VIRTIO_TMEM_S_OK)
		generation = le64_to_cpu(READ_ONCE(ask->in.body.generation));
	req->state = TMEM_REQ_FREE;
	WRITE_ONCE(dev->answered_at, jiffies);
	WRITE_ONCE(dev->asks_unanswered, 0);
	if (generation)
		dev->answer = generation;
	was_silent = dev->silent;
	WRITE_ONCE(dev->silent, false);
	/* The works run in this order: the report needs the new generation. */
	tmem_dev_resync(dev, false);
	/* Test whether the device answers quickly again, and send the report. */
	if (was_silent)
		tmem_dev_report(dev);
}

/*
 * Returns whether an answer with a generation has come since the last call, and sets @generation to
 * the newest one. Context: process; the sync work.
 */
bool tmem_generation_take(struct tmem_dev *dev, u64 *generation)
{
	bool found;

	spin_lock_irq(&dev->control_vq_lock);
	found = dev->answer;
	if (found) {
		*generation = dev->answer;
		dev->answer = 0;
	}
	spin_unlock_irq(&dev->control_vq_lock);
	return found;
}

/*
 * Forgets the answers that have come, and that any are missing. The caller then reads the
 * configuration, which is newer than the answers. Context: process.
 */
void tmem_generation_forget(struct tmem_dev *dev)
{
	spin_lock_irq(&dev->control_vq_lock);
	dev->answer = 0;
	WRITE_ONCE(dev->asks_unanswered, 0);
	WRITE_ONCE(dev->silent, false);
	WRITE_ONCE(dev->ask_wanted, false);
	spin_unlock_irq(&dev->control_vq_lock);
}

/*
 * Allocates the requests, and adds their size to dev->memory_bytes. Returns 0, or -ENOMEM; the
 * caller then calls tmem_generation_exit(), too.
 */
int tmem_generation_init(struct tmem_dev *dev)
{
	unsigned int i;

	dev->ask = kcalloc(ASKS_MAX, sizeof(*dev->ask), GFP_KERNEL);
	if (!dev->ask)
		return -ENOMEM;
	for (i = 0; i < ASKS_MAX; i++)
		dev->ask[i].req.kind = TMEM_REQ_GENERATION;
	dev->memory_bytes += ASKS_MAX * sizeof(*dev->ask);
	return 0;
}

/* Prepares for the first request, when the control queue is set up. */
void tmem_generation_start(struct tmem_dev *dev)
{
	dev->nr_asks = min(virtqueue_get_vring_size(dev->control_vq) / ASK_DIVISOR,
			   (unsigned int)ASKS_MAX);
	dev->asked_at = jiffies - msecs_to_jiffies(ASK_PERIOD_MS);
	dev->answered_at = jiffies;
}

void tmem_generation_exit(struct tmem_dev *dev)
{
	kfree(dev->ask);
}
