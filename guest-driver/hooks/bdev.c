// SPDX-License-Identifier: GPL-2.0-only
/*
 * Finds the block device of a super block. Most super blocks name it in s_bdev. A btrfs has no
 * s_bdev, and may have several devices. The name of one of them is its s_id.
 *
 * A btrfs can also remove this device while it is mounted, and the driver does not see an unmount
 * while it releases its hooks. So the driver holds references of its own to the device, to the
 * module of its disk, and to that of its SCSI host.
 */
#include <linux/blkdev.h>
#include <linux/err.h>
#include <linux/module.h>
#include <scsi/scsi_device.h>
#include <scsi/scsi_host.h>

#include "../compat.h"
#include "hooks.h"

/* Returns the device of a name, with a reference that the caller drops, or NULL. */
static struct block_device *find(const char *name)
{
	/* Modules have no access to block_class. Each new disk has a pointer to it. */
	struct gendisk *any = tmem_disk_alloc();
	struct device *dev;

	if (!any)
		return NULL;
	dev = class_find_device_by_name(disk_to_dev(any)->class, name);
	put_disk(any);
	return dev ? dev_to_bdev(dev) : NULL;
}

/*
 * Returns the module of the SCSI host of a disk, or NULL. A disk keeps its host in memory. The last
 * reference to some hosts is released by a function of their module (scsi_debug, tcm_loop), which
 * may be removed when the disk is closed.
 */
static struct module *host_module(struct gendisk *disk)
{
	const struct device *parent = disk_to_dev(disk)->parent;

	/* The device type has no symbol for modules. */
	if (!parent || !parent->type || !parent->type->name ||
	    strcmp(parent->type->name, "scsi_device"))
		return NULL;
	return to_scsi_device(parent)->host->hostt->module;
}

/* Takes references to the modules of a disk. Returns false if one of them is being removed. */
static bool modules_get(struct gendisk *disk)
{
	if (!try_module_get(disk->fops->owner))
		return false;
	if (try_module_get(host_module(disk)))
		return true;
	module_put(disk->fops->owner);
	return false;
}

/*
 * Takes references to a device, and to modules that it needs. Returns false if one of these is
 * being removed. tmem_bdev_put() releases the references. The caller has a reference to the device.
 */
bool tmem_bdev_hold(struct block_device *bdev)
{
	if (!modules_get(bdev->bd_disk))
		return false;
	get_device(&bdev->bd_device);
	return true;
}

/*
 * Returns the block device of a super block, or NULL. The caller holds s_umount, and releases the
 * device with tmem_bdev_put(). Sleeps.
 *
 * A wrong device would cost hits and no wrong byte: its area sees no transfer of @sb.
 */
struct block_device *tmem_bdev_get(const struct super_block *sb)
{
	struct block_device *bdev = sb->s_bdev;

	if (bdev)
		get_device(&bdev->bd_device);
	else
		bdev = find(sb->s_id);
	if (bdev && !modules_get(bdev->bd_disk)) {
		put_device(&bdev->bd_device);
		bdev = NULL;
	}
	return bdev;
}

/* Releases a block device, which may be NULL. Sleeps. */
void tmem_bdev_put(struct block_device *bdev)
{
	struct module *owner, *host;

	if (!bdev)
		return;
	owner = bdev->bd_disk->fops->owner;
	host = host_module(bdev->bd_disk);
	put_device(&bdev->bd_device);
	module_put(host);
	module_put(owner);
}
