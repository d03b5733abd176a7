// SPDX-License-Identifier: GPL-2.0-only
/*
 * Follows the device's generation, and sends reports to the host, on one ordered workqueue in
 * process context.
 *
 * If the device has another generation than the one in use, the driver erases all entries of the
 * index before a request can carry the new generation. It then goes online. The time that this
 * takes does not depend on the number of pages. Readers and reclaim never wait for anything in this
 * file.
 */
#include <linux/utsname.h>
#include <linux/virtio_config.h>

#include "control.h"

#define REPORT_PERIOD_MS	10000
/* Interval while the breaker is open, or requests of an earlier generation are unanswered. */
#define PROBE_PERIOD_MS		1000

/*
 * True from the preparation of a hibernation to its end. While it is true, the driver behaves as if
 * the device had no backend.
 */
static bool hibernating;

/* --- generation ---------------------------------------------------------------------------- */

static u64 read_generation(struct tmem_dev *dev)
{
	u64 generation;

	/* Read the 8 bytes again if the configuration changed during the read. */
	virtio_cread_le(dev->vdev, struct virtio_tmem_config, generation, &generation);
	return generation;
}

/*
 * Returns the reason why the device cannot be used, whatever its generation is, or NULL. Requests a
 * reset if the device needs one.
 */
static const char *unusable(struct tmem_dev *dev)
{
	struct virtio_device *vdev = dev->vdev;

	if (READ_ONCE(hibernating))
		return "hibernation";
	if (vdev->config->get_status(vdev) & VIRTIO_CONFIG_S_NEEDS_RESET) {
		tmem_dev_reset_soon("the device needs a reset");
		return "the device needs a reset";
	}
	return NULL;
}

/*
 * Brings generation and pools up to date. It runs after a configuration change or a STALE answer,
 * when a pool was added or removed, and when the cookies are used up.
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
		 * The order is: first the epoch, so that slots of the old epoch are not sent; then
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
		smp_wmb();	/* pairs with smp_rmb() in send_due() and tmem_get() */
		if (generation != dev->generation)
			tmem_count(TMEM_STAT_generation_changes);
		if (generation != dev->generation)
			tmem_reset_round(dev);
		WRITE_ONCE(dev->generation, generation);
		tmem_breaker_reset(dev);
		tmem_retain_reset(dev);
		wake_up(&dev->feeder_wait);
		tmem_index_sweep();
		tmem_dev_report(dev);
	}
	/*
	 * The pools of another generation do not exist any more. While there is no generation,
	 * release the pools that were freed since the last run.
	 */
	if (!why && (!generation || generation != dev->pools_generation)) {
		dev->pools_generation = generation;
		tmem_pools_gone();
	}
	if (!generation) {
		/* Set the state to offline again, because the reason may have changed. */
		tmem_state_offline(why ?: "no backend");
		return;
	}
	err = tmem_pools_create(dev, generation);
	/*
	 * No retry is needed after ESTALE: a notification follows, or the next report reads the
	 * generation again.
	 */
	if (err == -ESTALE)
		return;
	if (err && err != dev->pools_error)
		dev_notice(&dev->vdev->dev, "%s: new file systems are not cached until a retry succeeds (error %d)\n",
			   err == -ENOSPC ? "the host's limit of pools is reached" :
			   "the host does not answer on the control queue", err);
	dev->pools_error = err;
	tmem_state_online();
}

/**
 * tmem_sync_hibernate() - erase all entries and stay off, or return to service
 * @begin: true to stay off, false to return to service
 *
 * Context: process, may sleep as long as a control request may take.
 */
void tmem_sync_hibernate(bool begin)
{
	struct tmem_dev *dev;

	WRITE_ONCE(hibernating, begin);
	dev = tmem_dev_get();
	if (!dev)
		return;
	tmem_dev_resync(dev, false);
	flush_work(&dev->sync_work);
	tmem_dev_put(dev);
}

/* --- report -------------------------------------------------------------------------------- */

/* Sends a report. Returns whether the device accepted it. */
static bool send_report(struct tmem_dev *dev, u64 generation)
{
	u8 status = VIRTIO_TMEM_S_UNANSWERED;
	struct virtio_tmem_report *report;
	struct tmem_control *control;
	u64 hooks;
	u32 state;

	mutex_lock(&dev->control_lock);
	control = tmem_control_free(dev);
	if (!control)
		goto unlock;
	state = tmem_state_report(&hooks);
	report = &control->out.report;
	*report = (struct virtio_tmem_report){
		.version = cpu_to_le32(TMEM_VERSION_MAJOR << 16 | TMEM_VERSION_MINOR << 8 |
				       TMEM_VERSION_PATCH),
		.state = cpu_to_le32(state),
		.hooks = cpu_to_le64(hooks),
		.memory_bytes = cpu_to_le64(dev->memory_bytes + tmem_index_bytes()),
		.index_pages = cpu_to_le64(tmem_index_pages()),
		.puts = cpu_to_le64(tmem_stat_sum(TMEM_STAT_puts, TMEM_STAT_puts)),
		.puts_dropped = cpu_to_le64(tmem_stat_not_accepted()),
		.gets = cpu_to_le64(tmem_stat_sum(TMEM_STAT_gets, TMEM_STAT_gets)),
		.hits = cpu_to_le64(tmem_stat_sum(TMEM_STAT_hits, TMEM_STAT_hits)),
		.late = cpu_to_le64(tmem_stat_sum(TMEM_STAT_late, TMEM_STAT_late)),
		.mismatches = cpu_to_le64(tmem_stat_sum(TMEM_STAT_mismatches,
							TMEM_STAT_mismatches)),
		.invalidations = cpu_to_le64(tmem_stat_sum(TMEM_STAT_invalidations_removed,
							   TMEM_STAT_invalidations_off)),
	};
	strscpy_pad(report->kernel, init_utsname()->release, sizeof(report->kernel));
	status = tmem_control_send(dev, control, generation, VIRTIO_TMEM_T_REPORT, 0,
				   sizeof(*report));
	if (status == VIRTIO_TMEM_S_STALE)
		tmem_dev_resync(dev, false);
unlock:
	mutex_unlock(&dev->control_lock);
	return status == VIRTIO_TMEM_S_OK;
}

/*
 * Sends the histogram of the times for which readers waited for gets. A backend that does not know
 * this request may serve a device that offers it. The backend then answers UNSUPPORTED, and the
 * driver does not send the request again in this generation.
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
	control = tmem_control_free(dev);
	if (!control)
		goto unlock;
	latencies = &control->out.latencies;
	latencies->get_ns = cpu_to_le64(tmem_stat_sum(TMEM_STAT_get_waits_ns,
						      TMEM_STAT_get_waits_ns));
	for (i = 0; i < ARRAY_SIZE(latencies->get); i++)
		latencies->get[i] = cpu_to_le64(tmem_stat_sum(TMEM_STAT_get_waits_1us + i,
							      TMEM_STAT_get_waits_1us + i));
	status = tmem_control_send(dev, control, generation, VIRTIO_TMEM_T_LATENCIES, 0,
				   sizeof(*latencies));
	if (status == VIRTIO_TMEM_S_STALE)
		tmem_dev_resync(dev, false);
	else if (status == VIRTIO_TMEM_S_UNSUPPORTED)
		dev->latencies_refused = generation;
unlock:
	mutex_unlock(&dev->control_lock);
}

static void report_work_fn(struct work_struct *work)
{
	struct tmem_dev *dev = container_of(to_delayed_work(work), struct tmem_dev, report_work);
	u64 generation = READ_ONCE(dev->generation);
	bool soon = false;

	if (READ_ONCE(dev->stopping))
		return;
	/*
	 * Run the sync work: it creates pools that could not be created before, and reads the
	 * generation in case a notification was lost.
	 */
	tmem_dev_resync(dev, false);
	tmem_ram_check(dev);
	if (generation) {
		tmem_breaker_probe(dev);
		soon = tmem_reset_check(dev, send_report(dev, generation));
		send_latencies(dev, generation);
	}
	soon |= READ_ONCE(dev->tripped);
	if (!READ_ONCE(dev->stopping))
		queue_delayed_work(dev->wq, &dev->report_work,
				   msecs_to_jiffies(soon ? PROBE_PERIOD_MS : REPORT_PERIOD_MS));
}

/* --- set-up -------------------------------------------------------------------------------- */

/**
 * tmem_sync_init() - allocate the workqueue
 * @dev: the device
 *
 * Return: 0, or -ENOMEM; after -ENOMEM, the caller calls tmem_sync_exit() as well.
 */
int tmem_sync_init(struct tmem_dev *dev)
{
	INIT_WORK(&dev->sync_work, sync_work_fn);
	INIT_DELAYED_WORK(&dev->report_work, report_work_fn);
	dev->stopping = true;
	dev->wq = alloc_ordered_workqueue("virtio_tmem", 0);
	return dev->wq ? 0 : -ENOMEM;
}

/**
 * tmem_sync_start() - queue the first read of the generation, and the periodic reports to the host
 * @dev: the device, which is ready
 */
void tmem_sync_start(struct tmem_dev *dev)
{
	tmem_state_offline("no backend");
	WRITE_ONCE(dev->stopping, false);
	tmem_dev_resync(dev, false);
	tmem_dev_report(dev);
}

/**
 * tmem_sync_stop() - stop all work items
 * @dev: the device; no other code can queue a work item any more
 *
 * Context: process, may sleep until an unanswered control request times out.
 */
void tmem_sync_stop(struct tmem_dev *dev)
{
	WRITE_ONCE(dev->stopping, true);
	cancel_delayed_work_sync(&dev->report_work);
	cancel_work_sync(&dev->sync_work);
	/*
	 * Cancel both work items twice: the report may have queued the sync work before it read the
	 * flag, and the sync work may have queued the report.
	 */
	cancel_delayed_work_sync(&dev->report_work);
	cancel_work_sync(&dev->sync_work);
}

/**
 * tmem_sync_exit() - free the workqueue
 * @dev: the device; tmem_sync_stop() was called if tmem_sync_start() was
 */
void tmem_sync_exit(struct tmem_dev *dev)
{
	if (dev->wq)
		destroy_workqueue(dev->wq);
}
