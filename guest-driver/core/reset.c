// SPDX-License-Identifier: GPL-2.0-only
/*
 * Resets of the device by the driver: the driver leaves the device, as at an unbind, and sets it up
 * again. The reset takes all buffers back from the device, answered or not. The new set-up reads
 * the size of the guest's RAM and the features of the device again. The cache starts empty.
 *
 * A work item makes the reset through the driver core, because the removal of the device waits for
 * all other work of the driver. The order of locks is that of an unbind: the lock of struct device,
 * then setup_lock of transport.c. The work item is on a freezable workqueue, so it never runs while
 * devices are suspended.
 */
#include <linux/device.h>
#include <linux/jiffies.h>

#include "core.h"

/*
 * Minimum time between two resets, in seconds. A reset empties the cache. If a fault of the device
 * comes back after each reset, the guest keeps its cache for most of the time.
 */
#define RESET_PERIOD_S	60

static void reset_work_fn(struct work_struct *work);
static DECLARE_DELAYED_WORK(reset_work, reset_work_fn);
/* time from which the driver may reset the device again, in jiffies; used by the work item only */
static unsigned long reset_again;
/* True while no reset can be requested, because the module is being unloaded. */
static bool resets_off;

/*
 * Returns the virtio device, with a reference to its struct device, and the reason for its reset,
 * or NULL if it need not be reset. A device that was set up after the request need not be reset.
 */
static struct virtio_device *reset_wanted(const char **reason)
{
	struct virtio_device *vdev = NULL;
	struct tmem_dev *dev;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	*reason = dev ? READ_ONCE(dev->reset_reason) : NULL;
	if (*reason) {
		vdev = dev->vdev;
		get_device(&vdev->dev);
	}
	rcu_read_unlock();
	return vdev;
}

static void reset_work_fn(struct work_struct *work)
{
	struct virtio_device *vdev;
	unsigned long now = jiffies;
	const char *reason;
	int err;

	if (time_before(now, reset_again)) {
		queue_delayed_work(system_freezable_wq, &reset_work, reset_again - now);
		return;
	}
	vdev = reset_wanted(&reason);
	if (!vdev)
		return;
	dev_notice(&vdev->dev, "reset of the device: %s\n", reason);
	tmem_count(TMEM_STAT_device_resets);
	reset_again = now + RESET_PERIOD_S * HZ;
	/*
	 * If the device is removed at the same time, the driver core only finds out that it has no
	 * driver any more. tmem_probe() reports its errors itself.
	 */
	err = device_reprobe(&vdev->dev);
	if (err)
		dev_err(&vdev->dev, "the device is not used after a reset (error %d)\n", err);
	put_device(&vdev->dev);
}

/**
 * tmem_dev_reset_soon() - request a reset of the device, which empties the cache
 * @reason: reason for the log, a string constant
 *
 * The device is reset and set up again in the background, at most once in RESET_PERIOD_S. Further
 * requests until then have no effect.
 *
 * Context: any but NMI.
 */
void tmem_dev_reset_soon(const char *reason)
{
	struct tmem_dev *dev;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	/* tmem_resets_exit() waits for RCU readers that have read resets_off. */
	if (dev && !READ_ONCE(resets_off) && !cmpxchg(&dev->reset_reason, NULL, reason))
		queue_delayed_work(system_freezable_wq, &reset_work, 0);
	rcu_read_unlock();
}

/**
 * tmem_resets_exit() - wait until no reset runs, and prevent further ones
 *
 * Context: process, may sleep; the caller holds no lock that the removal or set-up of a device
 * takes.
 */
void tmem_resets_exit(void)
{
	WRITE_ONCE(resets_off, true);
	synchronize_rcu();
	cancel_delayed_work_sync(&reset_work);
}
