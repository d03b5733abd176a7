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

/**
 * tmem_dev_get() - take a reference on the device, for use across a sleep
 *
 * Return: the device, or NULL if there is none.
 */
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

/**
 * tmem_dev_put() - release a reference on the device
 * @dev: the device
 */
void tmem_dev_put(struct tmem_dev *dev)
{
	percpu_ref_put(&dev->users);
}

static void dev_unused(struct percpu_ref *users)
{
	complete(&container_of(users, struct tmem_dev, users)->unused);
}

/**
 * tmem_dev_users_init() - allow references on a device that is being set up
 * @dev: the device
 *
 * Return: 0 or -ENOMEM.
 */
int tmem_dev_users_init(struct tmem_dev *dev)
{
	init_completion(&dev->unused);
	return percpu_ref_init(&dev->users, dev_unused, 0, GFP_KERNEL);
}

/**
 * tmem_dev_users_wait() - wait until all references on a device are released
 * @dev: the device; tmem_dev_get() cannot find it any more
 *
 * Context: process, sleeps until gets that have begun are complete.
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

/**
 * tmem_dev_resync() - queue work that brings generation and pools up to date
 * @dev: the device
 * @renew: erase all entries of the index even if the generation has not changed
 *
 * Context: any but NMI.
 */
void tmem_dev_resync(struct tmem_dev *dev, bool renew)
{
	if (renew)
		WRITE_ONCE(dev->renew, true);
	if (!READ_ONCE(dev->stopping))
		queue_work(dev->wq, &dev->sync_work);
}

/**
 * tmem_dev_resync_any() - call tmem_dev_resync() for the device, if there is one
 * @renew: erase all entries of the index even if the generation has not changed
 *
 * Context: any but NMI.
 */
void tmem_dev_resync_any(bool renew)
{
	struct tmem_dev *dev;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	if (dev)
		tmem_dev_resync(dev, renew);
	rcu_read_unlock();
}

/**
 * tmem_dev_ask() - queue work that asks the device for its generation
 * @dev: the device, which has answered with STALE or not at all
 *
 * Context: any but NMI.
 */
void tmem_dev_ask(struct tmem_dev *dev)
{
	WRITE_ONCE(dev->ask_wanted, true);
	if (!READ_ONCE(dev->stopping))
		mod_delayed_work(dev->wq, &dev->ask_work, 0);
}

/**
 * tmem_dev_report() - queue work that sends a report to the host, because the state changed
 * @dev: the device
 *
 * Context: any but NMI.
 */
void tmem_dev_report(struct tmem_dev *dev)
{
	if (!READ_ONCE(dev->stopping))
		mod_delayed_work(dev->wq, &dev->report_work, 0);
}

/**
 * tmem_dev_report_any() - call tmem_dev_report() for the device, if there is one
 *
 * Context: any but NMI.
 */
void tmem_dev_report_any(void)
{
	struct tmem_dev *dev;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	if (dev)
		tmem_dev_report(dev);
	rcu_read_unlock();
}
