// SPDX-License-Identifier: GPL-2.0-only
/*
 * Control queue, generation and report. One ordered workqueue does all of this in process context.
 *
 * The driver goes online by following the device's generation. When the device has another
 * generation than the one in use, the driver forgets all pages that it believed to be held, before
 * a request can carry the new generation. The time that this takes does not depend on the number of
 * pages. Readers and reclaim never wait for anything in this file.
 */
#include <linux/slab.h>
#include <linux/utsname.h>
#include <linux/virtio_config.h>

#include "core.h"

/* The driver gives up a request after this time; the next report repeats the work. */
#define CONTROL_TIMEOUT_MS	1000
#define REPORT_PERIOD_MS	10000
/* Interval of probes while the breaker is open. */
#define PROBE_PERIOD_MS		1000

/*
 * True from the preparation of a hibernation to its end: the device then counts as without a
 * backend.
 */
static bool hibernating;

struct tmem_control {
	struct tmem_req req;
	struct {
		struct virtio_tmem_req hdr;
		union {
			struct virtio_tmem_pool_create create;
			struct virtio_tmem_report report;
			struct virtio_tmem_latencies latencies;
		};
	} out;
	struct virtio_tmem_resp resp;
};

/* --- requests ------------------------------------------------------------------------------ */

/**
 * tmem_control_vq_callback() - take the device's answers to control requests
 * @vq: the control queue
 */
void tmem_control_vq_callback(struct virtqueue *vq)
{
	struct tmem_dev *dev = vq->vdev->priv;
	struct tmem_control *control;
	unsigned long flags;
	unsigned int len;

	spin_lock_irqsave(&dev->control_vq_lock, flags);
	do {
		virtqueue_disable_cb(vq);
		while ((control = virtqueue_get_buf(vq, &len))) {
			tmem_req_used(&control->req, len);
			if (control->req.state == TMEM_REQ_ABANDONED)
				control->req.state = TMEM_REQ_FREE;
			else
				/* Pairs with control_done(). */
				smp_store_release(&control->req.state, TMEM_REQ_DONE);
		}
	} while (!virtqueue_enable_cb(vq));
	spin_unlock_irqrestore(&dev->control_vq_lock, flags);
	wake_up(&dev->control_wait);
}

static struct tmem_control *free_control(struct tmem_dev *dev)
{
	unsigned int i;

	lockdep_assert_held(&dev->control_lock);
	for (i = 0; i < TMEM_CONTROL_REQUESTS; i++)
		if (READ_ONCE(dev->control[i]->req.state) == TMEM_REQ_FREE)
			return dev->control[i];
	return NULL;
}

static bool control_done(struct tmem_control *control)
{
	/* The answer was written before; pairs with tmem_control_vq_callback(). */
	return smp_load_acquire(&control->req.state) == TMEM_REQ_DONE;
}

/* Sends a request whose body is filled in. Returns its status, or UNANSWERED if no answer comes. */
static u8 control_send(struct tmem_dev *dev, struct tmem_control *control, u64 generation, u16 type,
		       u32 pool, size_t body_bytes)
{
	struct scatterlist out, in, *sgs[] = { &out, &in };
	u8 status = VIRTIO_TMEM_S_UNANSWERED;
	bool notify;
	int err;

	control->out.hdr = (struct virtio_tmem_req){
		.generation = cpu_to_le64(generation),
		.type = cpu_to_le16(type),
		.pool = cpu_to_le32(pool),
	};
	control->resp.status = VIRTIO_TMEM_S_UNANSWERED;
	control->req.room_bytes = sizeof(control->resp);
	sg_init_one(&out, &control->out, sizeof(control->out.hdr) + body_bytes);
	sg_init_one(&in, &control->resp, sizeof(control->resp));

	spin_lock_irq(&dev->control_vq_lock);
	err = virtqueue_add_sgs(dev->control_vq, sgs, 1, 1, &control->req, GFP_ATOMIC);
	if (!err)
		control->req.state = TMEM_REQ_SENT;
	notify = !err && virtqueue_kick_prepare(dev->control_vq);
	spin_unlock_irq(&dev->control_vq_lock);
	if (notify)
		virtqueue_notify(dev->control_vq);
	if (err)
		return status;

	wait_event_timeout(dev->control_wait, control_done(control),
			   msecs_to_jiffies(CONTROL_TIMEOUT_MS));
	spin_lock_irq(&dev->control_vq_lock);
	if (control->req.state == TMEM_REQ_DONE) {
		if (control->req.used_bytes >= sizeof(control->resp))
			status = READ_ONCE(control->resp.status);
		control->req.state = TMEM_REQ_FREE;
	} else {
		control->req.state = TMEM_REQ_ABANDONED;
	}
	spin_unlock_irq(&dev->control_vq_lock);
	if (status == VIRTIO_TMEM_S_STALE)
		tmem_count(TMEM_STAT_stale);
	return status;
}

/**
 * tmem_control_pool() - create or destroy a pool at the device
 * @dev: the device
 * @generation: generation that the request carries
 * @type: VIRTIO_TMEM_T_POOL_CREATE or VIRTIO_TMEM_T_POOL_DESTROY
 * @pool: id of the pool
 *
 * Context: process, sleeps up to a second.
 *
 * Return: 0; -ESTALE if the generation is over; -ENOSPC if a limit of the host is reached; -ENOENT
 * if there is no such pool; -EBUSY if earlier requests are not answered yet; -EIO for no answer or
 * any other status.
 */
int tmem_control_pool(struct tmem_dev *dev, u64 generation, u16 type, u32 pool)
{
	struct tmem_control *control;
	u8 status = VIRTIO_TMEM_S_UNANSWERED;
	bool create = type == VIRTIO_TMEM_T_POOL_CREATE;

	mutex_lock(&dev->control_lock);
	control = free_control(dev);
	if (control) {
		memset(&control->out.create, 0, sizeof(control->out.create));
		status = control_send(dev, control, generation, type, pool,
				      create ? sizeof(control->out.create) : 0);
	}
	mutex_unlock(&dev->control_lock);
	if (!control)
		return -EBUSY;
	switch (status) {
	case VIRTIO_TMEM_S_OK:
		return 0;
	case VIRTIO_TMEM_S_STALE:
		return -ESTALE;
	case VIRTIO_TMEM_S_LIMIT:
		return -ENOSPC;
	case VIRTIO_TMEM_S_NO_POOL:
		return -ENOENT;
	default:
		return -EIO;
	}
}

/* --- generation ---------------------------------------------------------------------------- */

static u64 read_generation(struct tmem_dev *dev)
{
	__le64 generation;

	/* One element of 8 bytes; it is read again if the configuration changed meanwhile. */
	__virtio_cread_many(dev->vdev, offsetof(struct virtio_tmem_config, generation),
			    &generation, 1, sizeof(generation));
	return le64_to_cpu(generation);
}

/* Returns a reason not to use the device, whatever its generation is, or NULL. */
static const char *unusable(struct tmem_dev *dev)
{
	struct virtio_device *vdev = dev->vdev;

	if (READ_ONCE(hibernating))
		return "hibernation";
	if (vdev->config->get_status(vdev) & VIRTIO_CONFIG_S_NEEDS_RESET)
		return "the device needs a reset, reload the module";
	return NULL;
}

/*
 * Runs after a configuration change, after a STALE answer, when a pool was added or removed, and
 * when cookies are used up.
 */
static void sync_work_fn(struct work_struct *work)
{
	struct tmem_dev *dev = container_of(work, struct tmem_dev, sync_work);
	bool renew = xchg(&dev->renew, false);
	const char *why = unusable(dev);
	u64 generation = why ? 0 : read_generation(dev);
	unsigned int i;
	int err;

	if (generation != dev->generation || renew) {
		tmem_state_offline(why ?: "no backend");
		/*
		 * The order is: first the epoch, so that slots of the old one are not sent; then
		 * the index, whose entries become unreachable because all pools lose their ids;
		 * then the generation. Senders read in the opposite order: a sender that sees the
		 * new generation sees neither old slots nor old entries.
		 */
		WRITE_ONCE(dev->epoch, dev->epoch + 1);
		tmem_pools_forget();
		if (renew) {
			WRITE_ONCE(dev->cookie_base, dev->cookie_base + TMEM_SEQ_MASK + 1);
			for (i = 0; i < dev->nr_queues; i++)
				tmem_ring_renew(&dev->queue[i]);
		}
		smp_wmb();	/* pairs with smp_rmb() in feed() and tmem_get() */
		if (generation != dev->generation)
			tmem_count(TMEM_STAT_generation_changes);
		WRITE_ONCE(dev->generation, generation);
		tmem_breaker_reset(dev);
		wake_up(&dev->feeder_wait);
		tmem_index_sweep();
		tmem_control_report_soon(dev);
	}
	if (!generation) {
		/* The reason may have changed. */
		tmem_state_offline(why ?: "no backend");
		return;
	}
	err = tmem_pools_create(dev, generation);
	/* After ESTALE a notification follows, or the next report reads the generation again. */
	if (err == -ESTALE)
		return;
	if (err && err != dev->pools_error)
		dev_notice(&dev->vdev->dev, "%s: new file systems are not cached (error %d)\n",
			   err == -ENOSPC ? "the host takes no more pools" :
			   "the host does not answer on the control queue", err);
	dev->pools_error = err;
	tmem_state_online();
}

/**
 * tmem_control_resync() - read the generation again, and bring the device's pools up to date
 * @dev: the device
 * @renew: forget everything even if the generation is the same
 *
 * Context: any but NMI.
 */
void tmem_control_resync(struct tmem_dev *dev, bool renew)
{
	if (renew)
		WRITE_ONCE(dev->renew, true);
	if (!READ_ONCE(dev->stopping))
		queue_work(dev->wq, &dev->sync_work);
}

/**
 * tmem_control_resync_any() - call tmem_control_resync() for the device, if there is one
 * @renew: forget everything even if the generation is the same
 *
 * Context: any but NMI.
 */
void tmem_control_resync_any(bool renew)
{
	struct tmem_dev *dev;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	if (dev)
		tmem_control_resync(dev, renew);
	rcu_read_unlock();
}

/**
 * tmem_control_hibernate() - forget everything and stay off, or return to service
 * @begin: true to stay off, false to return to service
 *
 * Context: process, may sleep as long as a control request may take.
 */
void tmem_control_hibernate(bool begin)
{
	struct tmem_dev *dev;

	WRITE_ONCE(hibernating, begin);
	dev = tmem_dev_get();
	if (!dev)
		return;
	tmem_control_resync(dev, false);
	flush_work(&dev->sync_work);
	tmem_dev_put(dev);
}

/* --- report -------------------------------------------------------------------------------- */

static void send_report(struct tmem_dev *dev, u64 generation)
{
	struct virtio_tmem_report *report;
	struct tmem_control *control;
	u64 hooks;
	u32 state;

	mutex_lock(&dev->control_lock);
	control = free_control(dev);
	if (!control)
		goto unlock;
	state = tmem_state_report(&hooks);
	report = &control->out.report;
	*report = (struct virtio_tmem_report){
		.version = cpu_to_le32(TMEM_VERSION_MAJOR << 16 | TMEM_VERSION_MINOR << 8 |
				       TMEM_VERSION_PATCH),
		.state = cpu_to_le32(state),
		.hooks = cpu_to_le64(hooks),
		.memory_bytes = cpu_to_le64(tmem_memory_bytes()),
		.index_pages = cpu_to_le64(tmem_index_pages()),
		.puts = cpu_to_le64(tmem_stat_sum(TMEM_STAT_puts, TMEM_STAT_puts)),
		.puts_dropped = cpu_to_le64(tmem_stat_sum(TMEM_STAT_puts_dropped_offline,
							  TMEM_STAT_puts_dropped_cookies)),
		.gets = cpu_to_le64(tmem_stat_sum(TMEM_STAT_gets, TMEM_STAT_gets)),
		.hits = cpu_to_le64(tmem_stat_sum(TMEM_STAT_hits, TMEM_STAT_hits)),
		.late = cpu_to_le64(tmem_stat_sum(TMEM_STAT_late, TMEM_STAT_late)),
		.mismatches = cpu_to_le64(tmem_stat_sum(TMEM_STAT_mismatches,
							TMEM_STAT_mismatches)),
		.invalidations = cpu_to_le64(tmem_stat_sum(TMEM_STAT_invalidations_removed,
							   TMEM_STAT_invalidations_off)),
	};
	strscpy_pad(report->kernel, init_utsname()->release, sizeof(report->kernel));
	if (control_send(dev, control, generation, VIRTIO_TMEM_T_REPORT, 0, sizeof(*report)) ==
	    VIRTIO_TMEM_S_STALE)
		tmem_control_resync(dev, false);
unlock:
	mutex_unlock(&dev->control_lock);
}

/*
 * Sends the histogram of waits. An older back end may serve a device that offers the request. It
 * answers UNSUPPORTED, and the driver does not send the request again in this generation.
 */
static void send_latencies(struct tmem_dev *dev, u64 generation)
{
	struct virtio_tmem_latencies *latencies;
	struct tmem_control *control;
	unsigned int i;
	u8 status;

	BUILD_BUG_ON(TMEM_STAT_get_waits_longer - TMEM_STAT_get_waits_1us + 1 !=
		     ARRAY_SIZE(latencies->get));
	if (!virtio_has_feature(dev->vdev, VIRTIO_TMEM_F_LATENCIES) ||
	    dev->latencies_refused == generation)
		return;
	mutex_lock(&dev->control_lock);
	control = free_control(dev);
	if (!control)
		goto unlock;
	latencies = &control->out.latencies;
	latencies->get_ns = cpu_to_le64(tmem_stat_sum(TMEM_STAT_get_waits_ns,
						      TMEM_STAT_get_waits_ns));
	for (i = 0; i < ARRAY_SIZE(latencies->get); i++)
		latencies->get[i] = cpu_to_le64(tmem_stat_sum(TMEM_STAT_get_waits_1us + i,
							      TMEM_STAT_get_waits_1us + i));
	status = control_send(dev, control, generation, VIRTIO_TMEM_T_LATENCIES, 0,
			      sizeof(*latencies));
	if (status == VIRTIO_TMEM_S_STALE)
		tmem_control_resync(dev, false);
	else if (status == VIRTIO_TMEM_S_UNSUPPORTED)
		dev->latencies_refused = generation;
unlock:
	mutex_unlock(&dev->control_lock);
}

static void report_work_fn(struct work_struct *work)
{
	struct tmem_dev *dev = container_of(to_delayed_work(work), struct tmem_dev, report_work);
	u64 generation = READ_ONCE(dev->generation);
	unsigned int period_ms;

	if (READ_ONCE(dev->stopping))
		return;
	/* Creates pools that could not be created before, and makes up for a lost notification. */
	tmem_control_resync(dev, false);
	if (generation) {
		tmem_breaker_probe(dev);
		send_report(dev, generation);
		send_latencies(dev, generation);
	}
	period_ms = READ_ONCE(dev->tripped) ? PROBE_PERIOD_MS : REPORT_PERIOD_MS;
	if (!READ_ONCE(dev->stopping))
		queue_delayed_work(dev->wq, &dev->report_work, msecs_to_jiffies(period_ms));
}

/**
 * tmem_control_report_soon() - send a report now because the state changed
 * @dev: the device
 *
 * Context: any but NMI.
 */
void tmem_control_report_soon(struct tmem_dev *dev)
{
	if (!READ_ONCE(dev->stopping))
		mod_delayed_work(dev->wq, &dev->report_work, 0);
}

/**
 * tmem_control_report_any() - call tmem_control_report_soon() for the device, if there is one
 *
 * Context: any but NMI.
 */
void tmem_control_report_any(void)
{
	struct tmem_dev *dev;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	if (dev)
		tmem_control_report_soon(dev);
	rcu_read_unlock();
}

/* --- set-up -------------------------------------------------------------------------------- */

/**
 * tmem_control_init() - allocate workqueue and requests of the control queue
 * @dev: the device; its memory_bytes grow
 *
 * Return: 0, or -ENOMEM; the caller then calls tmem_control_exit() as well.
 */
int tmem_control_init(struct tmem_dev *dev)
{
	unsigned int i;

	mutex_init(&dev->control_lock);
	spin_lock_init(&dev->control_vq_lock);
	init_waitqueue_head(&dev->control_wait);
	INIT_WORK(&dev->sync_work, sync_work_fn);
	INIT_DELAYED_WORK(&dev->report_work, report_work_fn);
	dev->stopping = true;
	dev->wq = alloc_ordered_workqueue("virtio_tmem", 0);
	if (!dev->wq)
		return -ENOMEM;
	for (i = 0; i < TMEM_CONTROL_REQUESTS; i++) {
		dev->control[i] = kzalloc(sizeof(*dev->control[i]), GFP_KERNEL);
		if (!dev->control[i])
			return -ENOMEM;
		dev->control[i]->req.kind = TMEM_REQ_CONTROL;
	}
	dev->memory_bytes += TMEM_CONTROL_REQUESTS * sizeof(*dev->control[0]);
	return 0;
}

/**
 * tmem_control_start() - read the generation of a device that is ready, and start to report
 * @dev: the device
 */
void tmem_control_start(struct tmem_dev *dev)
{
	tmem_state_offline("no backend");
	WRITE_ONCE(dev->stopping, false);
	tmem_control_resync(dev, false);
	tmem_control_report_soon(dev);
}

/**
 * tmem_control_stop() - stop all work items
 * @dev: the device; no other code can queue a work item any more
 *
 * Context: process, sleeps as long as an unanswered request is waited for.
 */
void tmem_control_stop(struct tmem_dev *dev)
{
	WRITE_ONCE(dev->stopping, true);
	cancel_delayed_work_sync(&dev->report_work);
	cancel_work_sync(&dev->sync_work);
	/*
	 * The report may have queued the sync work before it read the flag, and the sync work the
	 * report.
	 */
	cancel_delayed_work_sync(&dev->report_work);
	cancel_work_sync(&dev->sync_work);
}

/**
 * tmem_control_exit() - free workqueue and requests of the control queue
 * @dev: the device; it was reset
 */
void tmem_control_exit(struct tmem_dev *dev)
{
	unsigned int i;

	if (dev->wq)
		destroy_workqueue(dev->wq);
	for (i = 0; i < TMEM_CONTROL_REQUESTS; i++)
		kfree(dev->control[i]);
}
