// SPDX-License-Identifier: GPL-2.0-only
/*
 * Resets of the device by the driver: the driver leaves the device, as at an unbind, and sets it up
 * again. The reset takes all buffers back from the device, answered or not. The new set-up reads
 * the size of the guest's RAM and the features of the device again. The cache starts empty.
 *
 * The set-up reads the configuration, which some front ends forward to the back end. The reset
 * therefore waits until the device has answered a GENERATION request, unless the device needs a
 * reset. A repeated set-up cannot wait for that, because the driver has no queue: it reads the
 * configuration even if the back end is gone.
 *
 * A work item makes the reset through the driver core, because the removal of the device waits for
 * all other work of the driver. The order of locks is that of an unbind: the lock of struct device,
 * then setup_lock of transport.c. The work item is on a freezable workqueue, so it never runs while
 * devices are suspended.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/device.h>
#include <linux/jiffies.h>
#include <linux/virtio_config.h>

#include "core.h"

/*
 * Minimum time between two resets, in seconds. A reset empties the cache. If a fault of the device
 * comes back after each reset, the guest keeps its cache for most of the time.
 */
#define RESET_PERIOD_S	60
/*
 * The driver resets the device if this many checks in a row, with STUCK_PERIOD_MS between them,
 * find requests of an earlier generation that are not answered. At each of these checks, the device
 * must have just answered a report or a GENERATION request. The driver asks for the generation if
 * it has no control request left for a report.
 *
 * A back end answers requests of an earlier generation with STALE as soon as it is connected. If a
 * front end skips them, their bounce pages and descriptors are lost until a reset. A device that
 * does not answer at all is not reset: its requests are of the current generation. The driver
 * counts checks, and not time, because the guest's clock jumps if the guest does not run for a
 * time.
 */
#define STUCK_CHECKS	10
#define STUCK_PERIOD_MS	1000
/*
 * Maximum number of further attempts to set up a device whose set-up after a reset has failed, for
 * example because a balloon has just taken the memory. The first one comes SETUP_RETRY_S seconds
 * after the reset, and each further one after twice as long, the last one 11 minutes after the
 * reset.
 */
#define SETUP_RETRIES	6
#define SETUP_RETRY_S	10

static void reset_work_fn(struct work_struct *work);
static DECLARE_DELAYED_WORK(reset_work, reset_work_fn);
/* time from which the driver may reset the device again, in jiffies; used by the work item only */
static unsigned long reset_again;
/*
 * The device while it is not set up after a reset, with a reference to its struct device, or NULL;
 * used by the work item, and by tmem_resets_exit() after its last run
 */
static struct virtio_device *left;
/* Number of attempts to set up this device again; used by the work item only. */
static unsigned int attempts;
/* True while no reset can be requested, because the module is being unloaded. */
static bool resets_off;

/*
 * Returns the virtio device, with a reference to its struct device, and the reason for its reset,
 * or NULL if it need not be reset. A device that was set up after the request need not be reset.
 * Sets @wait to whether the driver has asked the device, and has to wait for the answer.
 */
static struct virtio_device *reset_wanted(const char **reason, bool *wait)
{
	struct virtio_device *vdev = NULL;
	struct tmem_dev *dev;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	*reason = dev ? READ_ONCE(dev->reset_reason) : NULL;
	*wait = *reason && !READ_ONCE(dev->needs_reset) && !tmem_answered_lately(dev);
	if (*wait)
		tmem_dev_ask(dev);
	if (*reason && !*wait) {
		vdev = dev->vdev;
		get_device(&vdev->dev);
	}
	rcu_read_unlock();
	return vdev;
}

static void forget_left(void)
{
	if (left)
		put_device(&left->dev);
	left = NULL;
}

/* Requests another attempt to set up the device if it is not set up after a reset. */
static void retry_later(void)
{
	unsigned int seconds = tmem_retry_seconds(SETUP_RETRY_S << attempts);

	if (rcu_access_pointer(tmem_device)) {
		forget_left();
		return;
	}
	if (attempts == SETUP_RETRIES) {
		pr_err("%s: %u attempts to set up the device after a reset have failed: bind it again or reload the module\n",
		       dev_name(&left->dev), attempts);
		forget_left();
		return;
	}
	pr_warn("%s: the set-up of the device after a reset has failed: next attempt in %u s\n",
		dev_name(&left->dev), seconds);
	attempts++;
	queue_delayed_work(system_freezable_wq, &reset_work, seconds * HZ);
}

static int is_device(struct device *device, const void *wanted)
{
	return device == wanted;
}

/*
 * Sets up the device again. The failed set-up has left FAILED in its status, and virtio requires a
 * reset after that. Returns false if the device was removed or has a driver.
 */
static bool set_up_again(void)
{
	struct device *found = NULL;
	int err;

	device_lock(&left->dev);
	/*
	 * The removal of a device takes it off its bus, then takes this lock, and then ends the
	 * access to its registers. So a device that is found on its bus can be reset here.
	 * device_is_registered() is true for too long.
	 */
	if (!left->dev.driver)
		found = bus_find_device(left->dev.bus, NULL, &left->dev, is_device);
	if (found) {
		virtio_reset_device(left);
		virtio_add_status(left, VIRTIO_CONFIG_S_ACKNOWLEDGE);
		put_device(found);
	}
	device_unlock(&left->dev);
	if (!found)
		return false;
	/* The driver core calls tmem_probe(), which reports its errors itself. */
	err = device_attach(&left->dev);
	if (err < 0)
		pr_err("%s: the driver core cannot bind the device (error %d)\n",
		       dev_name(&left->dev), err);
	return true;
}

static void reset_work_fn(struct work_struct *work)
{
	struct virtio_device *vdev;
	unsigned long now = jiffies;
	const char *reason;
	bool wait;
	int err;

	if (left && !rcu_access_pointer(tmem_device)) {
		if (set_up_again())
			retry_later();
		else
			forget_left();
		return;
	}
	forget_left();
	if (time_before(now, reset_again)) {
		queue_delayed_work(system_freezable_wq, &reset_work, reset_again - now);
		return;
	}
	vdev = reset_wanted(&reason, &wait);
	if (wait)
		queue_delayed_work(system_freezable_wq, &reset_work, HZ);
	if (!vdev)
		return;
	dev_notice(&vdev->dev, "reset of the device: %s\n", reason);
	tmem_count(TMEM_STAT_device_resets);
	reset_again = now + RESET_PERIOD_S * HZ;
	/*
	 * If the device is removed at the same time, the driver core does not bind it again. If an
	 * operator unbinds it at the same time, the reset may bind it again. device_reprobe() does
	 * not return the errors of tmem_probe(), which reports them itself.
	 */
	err = device_reprobe(&vdev->dev);
	if (err)
		dev_err(&vdev->dev, "the device is not used after a reset (error %d)\n", err);
	left = vdev;
	attempts = 0;
	retry_later();
}

/*
 * Requests a reset of the device, which empties the cache. @reason is a string constant for the
 * log. The device is reset and set up again in the background, at most once in RESET_PERIOD_S.
 * Further requests until then have no effect. Context: any but NMI.
 */
void tmem_dev_reset_soon(const char *reason)
{
	struct tmem_dev *dev;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	/* tmem_resets_exit() waits for RCU readers that have read resets_off. */
	if (dev && !READ_ONCE(resets_off) && !cmpxchg(&dev->reset_reason, NULL, reason))
		mod_delayed_work(system_freezable_wq, &reset_work, 0);
	rcu_read_unlock();
}

static void next_round(struct tmem_in_flight *in_flight)
{
	in_flight->round++;
	in_flight->nr_old = in_flight->nr;
}

/*
 * Counts the requests that are at the device as those of an earlier generation, because the
 * generation changes. Context: process; the sync work.
 */
void tmem_reset_round(struct tmem_dev *dev)
{
	unsigned int i;

	for (i = 0; i < dev->nr_queues; i++) {
		spin_lock_irq(&dev->queue[i].vq_lock);
		next_round(&dev->queue[i].in_flight);
		spin_unlock_irq(&dev->queue[i].vq_lock);
	}
	spin_lock_irq(&dev->control_vq_lock);
	next_round(&dev->control_in_flight);
	spin_unlock_irq(&dev->control_vq_lock);
	dev->stuck_checks = 0;
}

/* Returns whether requests of an earlier generation are not answered. */
static bool stuck(struct tmem_dev *dev)
{
	unsigned int i;
	bool found;

	spin_lock_irq(&dev->control_vq_lock);
	found = dev->control_in_flight.nr_old;
	spin_unlock_irq(&dev->control_vq_lock);
	for (i = 0; i < dev->nr_queues && !found; i++) {
		spin_lock_irq(&dev->queue[i].vq_lock);
		found = dev->queue[i].in_flight.nr_old;
		spin_unlock_irq(&dev->queue[i].vq_lock);
	}
	return found;
}

/*
 * Requests a reset if requests of an earlier generation stay unanswered. @works: the device has
 * just answered a report or a GENERATION request. Returns whether the caller should check again
 * after STUCK_PERIOD_MS. Context: process; the report work.
 */
bool tmem_reset_check(struct tmem_dev *dev, bool works)
{
	if (!works || !stuck(dev)) {
		dev->stuck_checks = 0;
		return false;
	}
	if (dev->stuck_checks && time_before(jiffies, dev->stuck_next))
		return true;
	dev->stuck_next = jiffies + msecs_to_jiffies(STUCK_PERIOD_MS);
	if (++dev->stuck_checks <= STUCK_CHECKS)
		return true;
	tmem_dev_reset_soon("requests of an earlier generation are not answered");
	return false;
}

/*
 * Waits until no reset runs, and prevents further ones. The caller holds no lock that the removal
 * or set-up of a device takes. Sleeps.
 */
void tmem_resets_exit(void)
{
	WRITE_ONCE(resets_off, true);
	synchronize_rcu();
	cancel_delayed_work_sync(&reset_work);
	forget_left();
}
