// SPDX-License-Identifier: GPL-2.0-only
/*
 * Finds the block device of a super block. Most super blocks name it in s_bdev. A btrfs has no
 * s_bdev, and may have several devices. The name of one of them is its s_id.
 *
 * A btrfs can also remove this device while it is mounted. So the driver holds references of its
 * own to the device, and to the module of its disk.
 */
#include <linux/blkdev.h>
#include <linux/err.h>
#include <linux/module.h>

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
	if (bdev && !try_module_get(bdev->bd_disk->fops->owner)) {
		put_device(&bdev->bd_device);
		bdev = NULL;
	}
	return bdev;
}

/* Releases a block device, which may be NULL. Sleeps. */
void tmem_bdev_put(struct block_device *bdev)
{
	struct module *owner;

	if (!bdev)
		return;
	owner = bdev->bd_disk->fops->owner;
	put_device(&bdev->bd_device);
	module_put(owner);
}
