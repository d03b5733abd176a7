// SPDX-License-Identifier: GPL-2.0-only
/*
 * Virtio driver: finds a device, checks that this guest may use it, and sets up queues and memory.
 *
 * At suspend the driver erases all entries and frees its memory, and at resume it sets up the
 * device again. Around a hibernation the index stays empty, from before the first task is frozen
 * until the last task runs again. So a hibernation image never contains entries. No fetch is in
 * flight while tasks are frozen. A guest has at most one device.
 */
#include <linux/cc_platform.h>
#include <linux/kthread.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/random.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/suspend.h>
#include <linux/virtio_config.h>

#include "../compat.h"
#include "core.h"

/* Minimum queue size. A batch of puts without indirect descriptors takes up to 11 descriptors. */
#define QUEUE_SIZE_MIN		16

/*
 * Held while a device is set up or torn down. Guards device_taken, by which the driver refuses a
 * second device.
 */
static DEFINE_MUTEX(setup_lock);
static bool device_taken;

static bool retain = true;
module_param(retain, bool, 0444);
MODULE_PARM_DESC(retain, "let the host keep pages that are read back, so that unchanged ones need no copy when they are evicted again");

/* --- queues -------------------------------------------------------------------------------- */

/*
 * Returns -ENOENT if the device may have fewer request queues. Its configuration has the number of
 * the back end, and the front end may offer fewer.
 */
static int find_queues(struct tmem_dev *dev)
{
	struct virtqueue_info info[1 + VIRTIO_TMEM_REQUEST_QUEUES_MAX] = {
		{ "control", tmem_control_vq_callback },
	};
	struct virtqueue *vqs[1 + VIRTIO_TMEM_REQUEST_QUEUES_MAX];
	unsigned int i, size;
	int err;

	for (i = 1; i <= dev->nr_queues; i++)
		info[i] = (struct virtqueue_info){ "request", tmem_send_vq_callback };
	err = tmem_find_vqs(dev->vdev, 1 + dev->nr_queues, vqs, info);
	/* Which error a queue that does not exist causes depends on the transport. */
	if ((err == -ENOENT || err == -EINVAL) && dev->nr_queues > 1)
		return -ENOENT;
	if (err) {
		dev_err(&dev->vdev->dev, "the device is not used: %u virtqueues cannot be set up (error %d)\n",
			1 + dev->nr_queues, err);
		return err;
	}
	dev->control_vq = vqs[VIRTIO_TMEM_CONTROL_QUEUE];
	for (i = 0; i < dev->nr_queues; i++)
		dev->queue[i].vq = vqs[1 + i];
	for (i = 0; i <= dev->nr_queues; i++) {
		size = virtqueue_get_vring_size(vqs[i]);
		if (size >= QUEUE_SIZE_MIN && size <= VIRTIO_TMEM_QUEUE_SIZE_MAX)
			continue;
		dev_err(&dev->vdev->dev, "the device is not used: queue %u has %u descriptors, not %u to %u; update the host's QEMU\n",
			i, size, QUEUE_SIZE_MIN, VIRTIO_TMEM_QUEUE_SIZE_MAX);
		dev->vdev->config->del_vqs(dev->vdev);
		return -EINVAL;
	}
	return 0;
}

/* --- set-up -------------------------------------------------------------------------------- */

/* Returns the reason why this guest must not use the device, or NULL. */
static const char *unsuitable(struct virtio_device *vdev)
{
	if (!virtio_has_feature(vdev, VIRTIO_F_VERSION_1))
		return "the device is a legacy one; set disable-legacy=on";
	if (virtio_has_feature(vdev, VIRTIO_F_ACCESS_PLATFORM))
		return "the device is behind an IOMMU (VIRTIO_F_ACCESS_PLATFORM)";
	if (cc_platform_has(CC_ATTR_GUEST_MEM_ENCRYPT))
		return "the guest's memory is encrypted";
	if (PAGE_SIZE != VIRTIO_TMEM_PAGE_SIZE)
		return "the guest's pages are not of 4096 bytes";
	return NULL;
}

/*
 * Returns the number of pages in @eighths eighths of the module's memory.
 */
static unsigned int share_pages(unsigned int eighths)
{
	return min(tmem_budget_bytes() / 8UL * eighths / PAGE_SIZE, (unsigned long)UINT_MAX);
}

/* Limits of the device, from its configuration. */
struct limits {
	u16 queues;			/* request queues */
	u16 batch_max;
	u32 pools;
};

/*
 * Reads the limits of a device that the driver can use. Set-ups with fewer queues do not read them
 * again, because a VMM may forward each read to the back end (DRV-57).
 */
static int read_limits(struct virtio_device *vdev, struct limits *limits)
{
	const char *why = unsuitable(vdev);
	u32 page_size;

	if (why) {
		dev_err(&vdev->dev, "the device is not used: %s\n", why);
		tmem_state_offline(why);
		return -ENODEV;
	}
	virtio_cread_le(vdev, struct virtio_tmem_config, page_size, &page_size);
	virtio_cread_le(vdev, struct virtio_tmem_config, num_request_queues, &limits->queues);
	/* Let a test use a device that has fewer queues than its configuration says. */
	if (TMEM_INJECT(more_queues))
		limits->queues = VIRTIO_TMEM_REQUEST_QUEUES_MAX;
	virtio_cread_le(vdev, struct virtio_tmem_config, batch_max, &limits->batch_max);
	virtio_cread_le(vdev, struct virtio_tmem_config, pools_max, &limits->pools);
	if (page_size == VIRTIO_TMEM_PAGE_SIZE && limits->queues &&
	    limits->queues <= VIRTIO_TMEM_REQUEST_QUEUES_MAX && limits->batch_max &&
	    limits->batch_max <= VIRTIO_TMEM_BATCH_MAX && limits->pools &&
	    limits->pools <= VIRTIO_TMEM_POOLS_MAX)
		return 0;
	dev_err(&vdev->dev,
		"the device is not used: configuration out of range: page_size %u (%u), num_request_queues %u (1..%u), batch_max %u (1..%u), pools_max %u (1..%u); update the driver or the host\n",
		page_size, VIRTIO_TMEM_PAGE_SIZE, limits->queues, VIRTIO_TMEM_REQUEST_QUEUES_MAX,
		limits->batch_max, VIRTIO_TMEM_BATCH_MAX, limits->pools, VIRTIO_TMEM_POOLS_MAX);
	tmem_state_offline("the device could not be set up, see the kernel log");
	return -EINVAL;
}

static void free_device(struct tmem_dev *dev)
{
	unsigned int i;

	for (i = 0; dev->queue && i < dev->nr_queues; i++) {
		tmem_retain_exit(&dev->queue[i]);
		tmem_send_exit(&dev->queue[i]);
		tmem_ring_exit(&dev->queue[i]);
	}
	kfree(dev->queue);
	tmem_slots_exit(dev);
	tmem_admit_exit(dev);
	tmem_bounce_exit(dev);
	tmem_sync_exit(dev);
	tmem_control_exit(dev);
	percpu_ref_exit(&dev->users);
	kfree(dev);
}

static int alloc_memory(struct tmem_dev *dev)
{
	unsigned int slots, bounce, i;
	int err;

	slots = clamp_t(unsigned int, share_pages(TMEM_RING_EIGHTHS),
			TMEM_RING_SLOTS_MIN, TMEM_RING_SLOTS_MAX);
	bounce = clamp(share_pages(TMEM_BOUNCE_EIGHTHS),
		       TMEM_BOUNCE_PAGES_MIN, TMEM_BOUNCE_PAGES_MAX);
	dev->batch_full = clamp_t(unsigned int, slots / (TMEM_WAITING_DIVISOR * dev->nr_queues),
				  1, dev->batch_max);
	err = tmem_control_init(dev);
	if (!err)
		err = tmem_sync_init(dev);
	if (!err)
		err = tmem_admit_init(dev);
	if (!err)
		err = tmem_bounce_init(dev, rounddown(bounce, TMEM_GROUP_PAGES));
	if (!err)
		err = tmem_slots_init(dev, rounddown(slots, TMEM_GROUP_PAGES));
	if (err)
		return err;
	dev->queue = kcalloc(dev->nr_queues, sizeof(*dev->queue), GFP_KERNEL);
	if (!dev->queue)
		return -ENOMEM;
	for (i = 0; i < dev->nr_queues; i++) {
		struct tmem_queue *queue = &dev->queue[i];

		queue->dev = dev;
		queue->nr = i;
		spin_lock_init(&queue->vq_lock);
		spin_lock_init(&queue->ring_lock);
		spin_lock_init(&queue->send_lock);
	}
	tmem_fetch_init(dev);
	for (i = 0; i < dev->nr_queues; i++) {
		err = tmem_ring_init(dev, &dev->queue[i]);
		if (!err)
			err = tmem_send_init(dev, &dev->queue[i]);
		if (!err)
			err = tmem_retain_init(dev, &dev->queue[i]);
		if (err)
			return err;
	}
	return 0;
}

/*
 * Sets the device up with up to @limits->queues request queues. If the device may have fewer,
 * returns -ENOENT, and lowers @limits->queues for the next attempt.
 */
static int set_up(struct virtio_device *vdev, struct limits *limits)
{
	struct tmem_dev *dev;
	int err;

	dev = kzalloc(sizeof(*dev), GFP_KERNEL);
	if (!dev)
		return -ENOMEM;
	dev->vdev = vdev;
	dev->ram_pages = totalram_pages();
	dev->retain = retain && virtio_has_feature(vdev, VIRTIO_TMEM_F_RETAIN);
	dev->swap = virtio_has_feature(vdev, VIRTIO_TMEM_F_SWAP);
	spin_lock_init(&dev->fallback_lock);
	init_waitqueue_head(&dev->feeder_wait);
	tmem_pace_init(dev);
	/*
	 * The random base is below 2^63. A renewal adds 2^TMEM_SEQ_BITS, so no number of renewals
	 * makes it wrap around. The base is not 0, because no cookie is 0.
	 */
	dev->cookie_base = (get_random_u64() >> 1) | 1;
	/*
	 * With several queues, several workers of the host can serve the puts and gets of one
	 * processor. More queues than full batches in the ring would only take memory.
	 */
	dev->nr_queues = clamp(share_pages(TMEM_RING_EIGHTHS) / limits->batch_max, 1,
			       (unsigned int)limits->queues);
	dev->batch_max = limits->batch_max;
	dev->pools_max = limits->pools;
	err = tmem_dev_users_init(dev);
	if (!err)
		err = alloc_memory(dev);
	if (err)
		goto fail;
	dev->feeder = kthread_create(tmem_feeder, dev, "tmem_feeder");
	if (IS_ERR(dev->feeder)) {
		err = PTR_ERR(dev->feeder);
		goto fail;
	}
	/*
	 * Make the feeder a real-time thread: reclaim fills the rings, and must not starve the
	 * feeder, which empties them.
	 */
	sched_set_fifo_low(dev->feeder);
	vdev->priv = dev;
	err = find_queues(dev);
	if (err == -ENOENT)
		limits->queues = dev->nr_queues - 1;
	if (err)
		goto fail_feeder;
	virtio_device_ready(vdev);
	tmem_index_set_device_bytes(dev->memory_bytes, dev->retain);
	tmem_pools_device(true);
	wake_up_process(dev->feeder);
	rcu_assign_pointer(tmem_device, dev);
	tmem_sync_start(dev);
	return 0;
fail_feeder:
	kthread_stop(dev->feeder);
fail:
	free_device(dev);
	vdev->priv = NULL;
	tmem_state_offline("the device could not be set up, see the kernel log");
	return err;
}

static void tear_down(struct virtio_device *vdev)
{
	struct tmem_dev *dev = vdev->priv;
	unsigned int i;

	tmem_state_offline("no device");
	rcu_assign_pointer(tmem_device, NULL);
	synchronize_rcu();
	/* New puts find no device. Wait for fetches, which end at their deadline. */
	tmem_dev_users_wait(dev);
	kthread_stop(dev->feeder);
	tmem_sync_stop(dev);
	/* Set the state again, because the sync work may have set it to online before it ended. */
	tmem_state_offline("no device");
	/* The reset returns all buffers to the driver, answered or not. */
	virtio_reset_device(vdev);
	for (i = 0; i < dev->nr_queues; i++)
		tmem_send_lost(&dev->queue[i]);
	vdev->config->del_vqs(vdev);
	/* The feeder, tasks that put pages and interrupts have scheduled the tasklets. */
	tmem_fetch_exit(dev);
	tmem_pools_forget();
	tmem_pools_device(false);
	tmem_index_sweep();
	tmem_index_set_device_bytes(0, false);
	free_device(dev);
	vdev->priv = NULL;
}

static int tmem_probe(struct virtio_device *vdev)
{
	struct limits limits;
	int err = -EBUSY;
	u16 offered;

	mutex_lock(&setup_lock);
	if (device_taken) {
		dev_err(&vdev->dev, "the device is not used: this guest has a virtio-tmem device already; remove one of them\n");
		goto unlock;
	}
	err = read_limits(vdev, &limits);
	if (err)
		goto unlock;
	offered = limits.queues;
	do {
		err = set_up(vdev, &limits);
	} while (err == -ENOENT && limits.queues);
	if (!err && limits.queues < offered)
		dev_notice(&vdev->dev, "the host's VMM offers %u request queues only\n",
			   limits.queues);
	if (!err)
		device_taken = true;
unlock:
	mutex_unlock(&setup_lock);
	return err;
}

static void tmem_remove(struct virtio_device *vdev)
{
	mutex_lock(&setup_lock);
	if (vdev->priv) {
		tear_down(vdev);
		device_taken = false;
	} else {
		/*
		 * Reset the device even if set-up after suspend has failed, because virtio expects
		 * a reset.
		 */
		virtio_reset_device(vdev);
	}
	mutex_unlock(&setup_lock);
}

static void tmem_config_changed(struct virtio_device *vdev)
{
	struct tmem_dev *dev = vdev->priv;

	/* Let a test behave as with a front end that cannot notify the driver. */
	if (!dev || TMEM_INJECT(config_deaf))
		return;
	WRITE_ONCE(dev->config_changed, true);
	tmem_dev_resync(dev, false);
}

#ifdef CONFIG_PM_SLEEP
static int tmem_freeze(struct virtio_device *vdev)
{
	tmem_remove(vdev);
	return 0;
}

static int tmem_restore(struct virtio_device *vdev)
{
	return tmem_probe(vdev);
}
#endif

static const struct virtio_device_id tmem_id_table[] = {
	{ VIRTIO_ID_TMEM, VIRTIO_DEV_ANY_ID },
	{ 0 },
};
MODULE_DEVICE_TABLE(virtio, tmem_id_table);

/* Features of the device type; virtio core and virtio_ring accept those of the transport. */
static const unsigned int tmem_features[] = {
	VIRTIO_TMEM_F_LATENCIES,
	VIRTIO_TMEM_F_RETAIN,
	VIRTIO_TMEM_F_SWAP,
};

static struct virtio_driver tmem_driver = {
	.driver.name = "virtio_tmem",
	.feature_table = tmem_features,
	.feature_table_size = ARRAY_SIZE(tmem_features),
	.id_table = tmem_id_table,
	.probe = tmem_probe,
	.remove = tmem_remove,
	.config_changed = tmem_config_changed,
#ifdef CONFIG_PM_SLEEP
	.freeze = tmem_freeze,
	.restore = tmem_restore,
#endif
};

static int pm_notify(struct notifier_block *block, unsigned long event, void *unused)
{
	switch (event) {
	case PM_SUSPEND_PREPARE:
		tmem_fetches_pause(true);
		break;
	case PM_POST_SUSPEND:
		tmem_fetches_pause(false);
		break;
	case PM_HIBERNATION_PREPARE:
	case PM_RESTORE_PREPARE:
		tmem_fetches_pause(true);
		tmem_sync_hibernate(true);
		break;
	case PM_POST_HIBERNATION:
	case PM_POST_RESTORE:
		tmem_sync_hibernate(false);
		tmem_fetches_pause(false);
		break;
	}
	return NOTIFY_DONE;
}

static struct notifier_block pm_block = {
	.notifier_call = pm_notify,
};

int tmem_core_init(void)
{
	int err;

	/* The driver passes bitmaps of 64 pages as unsigned long. */
	BUILD_BUG_ON(BITS_PER_LONG != 64);
	get_random_bytes(&tmem_keys, sizeof(tmem_keys));
	tmem_evict_init();
	err = tmem_index_init();
	if (err)
		return err;
	err = tmem_ram_init();
	if (err)
		goto fail_index;
	err = tmem_sysfs_init();
	if (err)
		goto fail_ram;
	err = register_pm_notifier(&pm_block);
	if (err)
		goto fail_sysfs;
	err = register_virtio_driver(&tmem_driver);
	if (err)
		goto fail_pm;
	return 0;
fail_pm:
	unregister_pm_notifier(&pm_block);
fail_sysfs:
	tmem_sysfs_exit();
fail_ram:
	tmem_ram_exit();
fail_index:
	tmem_index_exit();
	return err;
}

/* The hooks are gone and have freed all pools. */
void tmem_core_exit(void)
{
	tmem_resets_exit();
	unregister_virtio_driver(&tmem_driver);
	unregister_pm_notifier(&pm_block);
	tmem_sysfs_exit();
	tmem_ram_exit();
	tmem_pools_exit();
	tmem_evict_exit();
	tmem_index_exit();
}
