// SPDX-License-Identifier: GPL-2.0-only
/*
 * Follows the device's generation, and sends reports to the host, on one ordered workqueue in
 * process context.
 *
 * The driver learns the generation from the configuration, which it reads at set-up and after a
 * notification, and from the answers to GENERATION requests (generation.c). It asks while it knows
 * no generation and while the breaker is open, after a STALE answer, and after a control request
 * that is not answered. If the device does not answer a GENERATION request in time, the breaker
 * opens, and the driver sends no other control request until an answer comes.
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
/*
 * Interval of reports while the breaker is open, or requests of an earlier generation are
 * unanswered. The driver asks for the generation as often (ASK_PERIOD_MS).
 */
#define PROBE_PERIOD_MS		1000

/*
 * True from the preparation of a hibernation to its end. While it is true, the driver behaves as if
 * the device had no backend.
 */
static bool hibernating;

/* --- generation ---------------------------------------------------------------------------- */

/*
 * Reads status and generation from the device, at set-up and after a configuration change
 * notification only. Answers that came before are older than the configuration, and are forgotten.
 */
static void read_config(struct tmem_dev *dev)
{
	struct virtio_device *vdev = dev->vdev;

	WRITE_ONCE(dev->needs_reset,
		   !!(vdev->config->get_status(vdev) & VIRTIO_CONFIG_S_NEEDS_RESET));
	/* Read the 8 bytes again if the configuration changed during the read. */
	virtio_cread_le(vdev, struct virtio_tmem_config, generation, &dev->told);
	/* An answer that came after the read is forgotten, too. This costs one STALE answer. */
	tmem_control_vq_callback(dev->control_vq);
	tmem_generation_forget(dev);
	tmem_count(TMEM_STAT_config_reads);
}

/*
 * Returns the reason why the device cannot be used, whatever its generation is, or NULL. Requests a
 * reset if the device needs one.
 */
static const char *unusable(struct tmem_dev *dev)
{
	if (READ_ONCE(hibernating))
		return "hibernation";
	if (dev->needs_reset) {
		tmem_dev_reset_soon("the device needs a reset");
		return "the device needs a reset";
	}
	return NULL;
}

/*
 * Brings generation and pools up to date. It runs after a configuration change or an answer with
 * the generation, when a pool was added or removed, and when the cookies are used up.
 */
static void sync_work_fn(struct work_struct *work)
{
	struct tmem_dev *dev = container_of(work, struct tmem_dev, sync_work);
	bool renew = xchg(&dev->renew, false);
	const char *why;
	u64 generation;
	unsigned int i;
	int err;

	if (READ_ONCE(dev->stopping))
		return;
	if (xchg(&dev->config_changed, false))
		read_config(dev);
	else
		tmem_generation_take(dev, &dev->told);
	why = unusable(dev);
	generation = why ? 0 : dev->told;
	if (generation != dev->generation || renew) {
		tmem_state_offline(why ?: generation ? "the backend has not answered yet" :
				   "no backend");
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
		smp_wmb();	/* pairs with smp_rmb() in send_due() and fetch_request() */
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
	 * release the pools that were freed since the last run, except for private ones, and
	 * remember the ids of the others, because the same generation may come back.
	 */
	if (!why && (!generation || generation != dev->pools_generation)) {
		tmem_pools_gone(generation);
		if (generation)
			dev->pools_generation = generation;
	}
	if (!generation) {
		/* Set the state to offline again, because the reason may have changed. */
		tmem_state_offline(why ?: "no backend");
		if (!why)
			tmem_dev_ask(dev);
		return;
	}
	/*
	 * A GENERATION request is not answered. The answer to the next one runs this work again.
	 * After a hibernation, the ask work is not queued.
	 */
	if (READ_ONCE(dev->silent)) {
		tmem_dev_ask(dev);
		return;
	}
	err = tmem_pools_create(dev, generation);
	/* No retry is needed after ESTALE: the driver asks for the generation. */
	if (err == -ESTALE)
		return;
	if (err && err != dev->pools_error)
		dev_notice(&dev->vdev->dev, "%s: new file systems are not cached until a retry succeeds (error %d)\n",
			   err == -ENOSPC ? "the host's limit of pools is reached" :
			   "the host does not answer on the control queue", err);
	dev->pools_error = err;
	if (err == -ETIMEDOUT || err == -EBUSY) {
		tmem_dev_ask(dev);
		return;
	}
	tmem_state_online();
}

/*
 * Asks the device for its generation while that is needed, and opens the breaker if no answer comes
 * in time.
 */
static void ask_work_fn(struct work_struct *work)
{
	struct tmem_dev *dev = container_of(to_delayed_work(work), struct tmem_dev, ask_work);
	unsigned long wait;

	if (READ_ONCE(dev->stopping) || unusable(dev))
		return;
	/* Take answers whose notification was lost with the back end that gave them. */
	tmem_control_vq_callback(dev->control_vq);
	if (dev->generation && !READ_ONCE(dev->tripped) && !READ_ONCE(dev->ask_wanted) &&
	    !READ_ONCE(dev->asks_unanswered))
		return;
	wait = tmem_generation_ask(dev);
	if (dev->generation && READ_ONCE(dev->silent))
		tmem_breaker_trip(dev);
	if (!READ_ONCE(dev->stopping))
		queue_delayed_work(dev->wq, &dev->ask_work,
				   min(wait, msecs_to_jiffies(REPORT_PERIOD_MS)));
}

/*
 * Erases all entries and stays off (@begin), or returns to service. Sleeps as long as a control
 * request may take.
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

/*
 * Sends a report. Returns whether the device accepted it. Sets @full if no control request is free.
 */
static bool send_report(struct tmem_dev *dev, u64 generation, bool *full)
{
	u8 status = VIRTIO_TMEM_S_UNANSWERED;
	struct virtio_tmem_report *report;
	struct tmem_control *control;
	u64 hooks;
	u32 state;

	mutex_lock(&dev->control_lock);
	control = tmem_control_free(dev);
	*full = !control;
	if (!control) {
		tmem_dev_ask(dev);
		goto unlock;
	}
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
		.invalidations = cpu_to_le64(tmem_stat_sum(TMEM_STAT_invalidations_unmount,
							   TMEM_STAT_invalidations_block)),
	};
	strscpy_pad(report->kernel, init_utsname()->release, sizeof(report->kernel));
	status = tmem_control_send(dev, control, generation, VIRTIO_TMEM_T_REPORT, 0,
				   sizeof(*report));
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
	if (status == VIRTIO_TMEM_S_UNSUPPORTED)
		dev->latencies_refused = generation;
unlock:
	mutex_unlock(&dev->control_lock);
}

static void report_work_fn(struct work_struct *work)
{
	struct tmem_dev *dev = container_of(to_delayed_work(work), struct tmem_dev, report_work);
	u64 generation = READ_ONCE(dev->generation);
	bool soon = false, reported, full;

	if (READ_ONCE(dev->stopping))
		return;
	/* Run the sync work, which creates pools that could not be created before. */
	tmem_dev_resync(dev, false);
	tmem_ram_check(dev);
	if (generation && !READ_ONCE(dev->silent)) {
		tmem_breaker_probe(dev);
		reported = send_report(dev, generation, &full);
		if (reported)
			send_latencies(dev, generation);
		soon = tmem_reset_check(dev, reported || tmem_answered_lately(dev));
		/* The next check needs the answer to the GENERATION request while it is new. */
		soon |= full;
	}
	soon |= READ_ONCE(dev->tripped);
	if (!READ_ONCE(dev->stopping))
		queue_delayed_work(dev->wq, &dev->report_work,
				   msecs_to_jiffies(soon ? PROBE_PERIOD_MS : REPORT_PERIOD_MS));
}

/* --- set-up -------------------------------------------------------------------------------- */

/* Allocates the workqueue. Returns 0, or -ENOMEM; the caller then calls tmem_sync_exit(), too. */
int tmem_sync_init(struct tmem_dev *dev)
{
	INIT_WORK(&dev->sync_work, sync_work_fn);
	INIT_DELAYED_WORK(&dev->report_work, report_work_fn);
	INIT_DELAYED_WORK(&dev->ask_work, ask_work_fn);
	dev->stopping = true;
	dev->wq = alloc_ordered_workqueue("virtio_tmem", 0);
	return dev->wq ? 0 : -ENOMEM;
}

/*
 * Reads the generation, and queues the creation of pools and the periodic reports. The device is
 * ready.
 */
void tmem_sync_start(struct tmem_dev *dev)
{
	tmem_state_offline("no backend");
	tmem_generation_start(dev);
	read_config(dev);
	WRITE_ONCE(dev->stopping, false);
	tmem_dev_resync(dev, false);
	tmem_dev_report(dev);
}

/*
 * Stops all work items. No other code can queue one any more. Sleeps until an unanswered control
 * request times out.
 */
void tmem_sync_stop(struct tmem_dev *dev)
{
	unsigned int i;

	WRITE_ONCE(dev->stopping, true);
	/*
	 * Cancel the work items twice: each of them may have queued another one before it read the
	 * flag.
	 */
	for (i = 0; i < 2; i++) {
		cancel_delayed_work_sync(&dev->report_work);
		cancel_delayed_work_sync(&dev->ask_work);
		cancel_work_sync(&dev->sync_work);
	}
}

/* Frees the workqueue. tmem_sync_stop() was called if tmem_sync_start() was. */
void tmem_sync_exit(struct tmem_dev *dev)
{
	if (dev->wq)
		destroy_workqueue(dev->wq);
}
