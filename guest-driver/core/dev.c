// SPDX-License-Identifier: GPL-2.0-only
/*
 * References to the device, and functions that request work that sync.c does for the device.
 *
 * Code calls these functions when the generation may be over or the state has changed. They only
 * queue a work item, so this file uses no other file of the core.
 */
#include "core.h"

struct tmem_dev __rcu *tmem_device;
struct tmem_check_keys tmem_keys;

/* Returns whether there is a device. Context: any. */
bool tmem_dev_exists(void)
{
	return rcu_access_pointer(tmem_device);
}

/*
 * Returns whether the user of the device wants swap areas to be cached, or @none if there is no
 * device. Context: any.
 */
bool tmem_dev_wants_swap(bool none)
{
	const struct tmem_dev *dev;
	bool wants;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	wants = dev ? dev->swap : none;
	rcu_read_unlock();
	return wants;
}

/* Returns the device, with a reference for use across a sleep, or NULL if there is none. */
struct tmem_dev *tmem_dev_get(void)
{
	struct tmem_dev *dev;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	if (dev && !percpu_ref_tryget(&dev->users))
		dev = NULL;
	rcu_read_unlock();
	return dev;
}

void tmem_dev_put(struct tmem_dev *dev)
{
	percpu_ref_put(&dev->users);
}

static void dev_unused(struct percpu_ref *users)
{
	complete(&container_of(users, struct tmem_dev, users)->unused);
}

/* Allows references on a device that is being set up. Returns 0 or -ENOMEM. */
int tmem_dev_users_init(struct tmem_dev *dev)
{
	init_completion(&dev->unused);
	return percpu_ref_init(&dev->users, dev_unused, 0, GFP_KERNEL);
}

/*
 * Waits until all references on a device are released, when tmem_dev_get() cannot find it any more.
 * Sleeps until gets that have begun are complete.
 */
void tmem_dev_users_wait(struct tmem_dev *dev)
{
	/*
	 * percpu_ref_kill() changes the references to one shared count, so that the release of the
	 * last reference is detected.
	 */
	percpu_ref_kill(&dev->users);
	wait_for_completion(&dev->unused);
}

/*
 * Queues work that brings generation and pools up to date. @renew: erase all entries of the index
 * even if the generation has not changed. Context: any but NMI.
 */
void tmem_dev_resync(struct tmem_dev *dev, bool renew)
{
	if (renew)
		WRITE_ONCE(dev->renew, true);
	if (!READ_ONCE(dev->stopping))
		queue_work(dev->wq, &dev->sync_work);
}

/* Calls tmem_dev_resync() for the device, if there is one. Context: any but NMI. */
void tmem_dev_resync_any(bool renew)
{
	struct tmem_dev *dev;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	if (dev)
		tmem_dev_resync(dev, renew);
	rcu_read_unlock();
}

/*
 * Queues work that asks the device for its generation, after an answer STALE or none. Context: any
 * but NMI.
 */
void tmem_dev_ask(struct tmem_dev *dev)
{
	WRITE_ONCE(dev->ask_wanted, true);
	if (!READ_ONCE(dev->stopping))
		mod_delayed_work(dev->wq, &dev->ask_work, 0);
}

/* Queues work that sends a report to the host, because the state changed. Context: any but NMI. */
void tmem_dev_report(struct tmem_dev *dev)
{
	if (!READ_ONCE(dev->stopping))
		mod_delayed_work(dev->wq, &dev->report_work, 0);
}

/* Calls tmem_dev_report() for the device, if there is one. Context: any but NMI. */
void tmem_dev_report_any(void)
{
	struct tmem_dev *dev;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	if (dev)
		tmem_dev_report(dev);
	rcu_read_unlock();
}
