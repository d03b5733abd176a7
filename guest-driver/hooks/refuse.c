// SPDX-License-Identifier: GPL-2.0-only
/*
 * Finds mounts that the driver must not serve, although it serves their type, and swap areas
 * (tmem_refuse()).
 *
 * The page cache has the clear text of data that dm-crypt keeps secret, and pages of dm-verity and
 * dm-integrity after their check. The host must not see the data of dm-crypt, and could change the
 * data of dm-verity and dm-integrity. So each block device below a file system must pass data on
 * unchanged.
 *
 * Only the table of a device-mapper device shows what the device does. No exported function leads
 * to a table, and names and UUIDs are free text. So the driver looks up, by name, the functions
 * that find a table's targets, and calls them directly: with indirect branch tracking, they may
 * have lost the mark that allows a call by address. The driver finds the lower devices of a device
 * through sysfs. It refuses a device that it cannot examine.
 *
 * Unless allow_untested is set, the driver also refuses a geometry that was not tested.
 *
 * Out of scope: a table that is exchanged below a mounted file system or a swap area, or between a
 * swapoff and a swapon that follows within a second.
 */
#include <linux/blkdev.h>
#include <linux/device-mapper.h>
#include <linux/kprobes.h>
#include <linux/major.h>
#include <linux/module.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/static_call.h>
#include <linux/sysfs.h>

#include "hooks.h"

/*
 * The driver refuses a file system that is on more block devices than this, counted over all
 * layers.
 */
#define STACK_MAX 64

static bool allow_encrypted;
module_param(allow_encrypted, bool, 0444);
MODULE_PARM_DESC(allow_encrypted, "serve file systems and swap on encrypted or verified block devices");

/* device-mapper targets that pass data on unchanged to lower devices that sysfs shows. */
static const char *const plain_targets[] = {
	"cache", "delay", "error", "flakey", "linear", "mirror", "multipath", "raid", "snapshot",
	"snapshot-merge", "snapshot-origin", "striped", "thin", "thin-pool", "zero",
};

struct stack {
	struct gendisk *disk[STACK_MAX];	/* the driver holds a reference to each disk */
	unsigned int nr;
	unsigned int checked;		/* index in disk[] of the next disk for disk_ok() */
	const struct gendisk *above;	/* disk whose lower devices are being added */
	char *why;
	size_t why_bytes;
};

/* --- device-mapper ------------------------------------------------------------------------- */

enum dm_function { DM_GET_MD, DM_PUT, DM_GET_TABLE, DM_PUT_TABLE, DM_FIND_TARGET, NR_DM_FUNCTIONS };

static const char *const dm_functions[NR_DM_FUNCTIONS] = {
	[DM_GET_MD] = "dm_get_md",
	[DM_PUT] = "dm_put",
	[DM_GET_TABLE] = "dm_get_live_table",
	[DM_PUT_TABLE] = "dm_put_live_table",
	[DM_FIND_TARGET] = "dm_table_find_target",
};

static struct mapped_device *no_md(dev_t dev)
{
	return NULL;
}

static void no_put(struct mapped_device *md)
{
}

static struct dm_table *no_table(struct mapped_device *md, int *srcu_idx)
{
	return NULL;
}

static void no_put_table(struct mapped_device *md, int srcu_idx)
{
}

static struct dm_target *no_target(struct dm_table *table, sector_t sector)
{
	return NULL;
}

DEFINE_STATIC_CALL(tmem_dm_get_md, no_md);
DEFINE_STATIC_CALL(tmem_dm_put, no_put);
DEFINE_STATIC_CALL(tmem_dm_get_table, no_table);
DEFINE_STATIC_CALL(tmem_dm_put_table, no_put_table);
DEFINE_STATIC_CALL(tmem_dm_find_target, no_target);

/*
 * Looks up the addresses of the functions of dm-mod. The caller holds a reference to the module
 * dm-mod, which may have been reloaded since the last call.
 */
static bool find_dm_functions(void)
{
	struct kprobe probes[NR_DM_FUNCTIONS] = {}, *list[NR_DM_FUNCTIONS];
	unsigned int i;

	for (i = 0; i < NR_DM_FUNCTIONS; i++) {
		/* Disabled kprobes are registered only to find addresses of functions by name. */
		probes[i].symbol_name = dm_functions[i];
		probes[i].flags = KPROBE_FLAG_DISABLED;
		list[i] = &probes[i];
	}
	if (register_kprobes(list, NR_DM_FUNCTIONS))
		return false;
	static_call_update(tmem_dm_get_md, (void *)probes[DM_GET_MD].addr);
	static_call_update(tmem_dm_put, (void *)probes[DM_PUT].addr);
	static_call_update(tmem_dm_get_table, (void *)probes[DM_GET_TABLE].addr);
	static_call_update(tmem_dm_put_table, (void *)probes[DM_PUT_TABLE].addr);
	static_call_update(tmem_dm_find_target, (void *)probes[DM_FIND_TARGET].addr);
	unregister_kprobes(list, NR_DM_FUNCTIONS);
	return true;
}

static bool is_plain(const char *target)
{
	return match_string(plain_targets, ARRAY_SIZE(plain_targets), target) >= 0;
}

static bool opaque(const struct gendisk *disk, struct stack *stack)
{
	scnprintf(stack->why, stack->why_bytes,
		  "the devices below %s cannot be examined; allow_encrypted=1 serves it anyway",
		  disk->disk_name);
	return false;
}

static bool table_ok(const struct gendisk *disk, struct mapped_device *md, struct stack *stack)
{
	sector_t sector = 0, end = get_capacity((struct gendisk *)disk);
	struct dm_target *target;
	struct dm_table *table;
	bool ok = true;
	int srcu_idx;

	table = static_call(tmem_dm_get_table)(md, &srcu_idx);
	if (!table)
		ok = opaque(disk, stack);
	while (ok && sector < end) {
		target = static_call(tmem_dm_find_target)(table, sector);
		if (!target || target->begin + target->len <= sector) {
			ok = opaque(disk, stack);
		} else if (!is_plain(target->type->name)) {
			scnprintf(stack->why, stack->why_bytes,
				  "%s uses the %s target; allow_encrypted=1 serves it anyway",
				  disk->disk_name, target->type->name);
			ok = false;
		} else {
			sector = target->begin + target->len;
		}
	}
	static_call(tmem_dm_put_table)(md, srcu_idx);
	return ok;
}

/* --- all devices --------------------------------------------------------------------------- */

static bool is_dm(const struct gendisk *disk)
{
	return strstarts(disk->disk_name, "dm-");
}

/*
 * Returns whether a disk belongs to a stacking driver whose lower devices this driver cannot read
 * safely.
 */
static bool is_opaque(const struct gendisk *disk)
{
	return strstarts(disk->disk_name, "bcache") || strstarts(disk->disk_name, "drbd");
}

static bool is_below(const struct gendisk *above, const struct device *dev)
{
	const struct gendisk *disk = dev_to_bdev(dev)->bd_disk;
	struct kernfs_node *link;

	/*
	 * The backing file of a loop device may be on any disk, and the driver cannot see on which
	 * one. So it considers every device-mapper disk and opaque disk as below the loop device.
	 */
	if (above->major == LOOP_MAJOR)
		return is_dm(disk) || is_opaque(disk);
	link = sysfs_get_dirent(above->slave_dir->sd, dev_name(dev));
	sysfs_put(link);
	return link;
}

/* Adds a disk or partition to the stack @arg if it is below the disk @arg->above. */
static int add_below(struct device *dev, void *arg)
{
	struct gendisk *disk = dev_to_bdev(dev)->bd_disk;
	struct stack *stack = arg;
	unsigned int i;

	for (i = 0; i < stack->nr; i++)
		if (stack->disk[i] == disk)
			return 0;
	if (!is_below(stack->above, dev))
		return 0;
	if (stack->nr == STACK_MAX)
		return -ENOSPC;
	get_device(disk_to_dev(disk));
	stack->disk[stack->nr++] = disk;
	return 0;
}

static bool add_all_below(struct gendisk *disk, struct stack *stack)
{
	stack->above = disk;
	if (disk->major != LOOP_MAJOR && (!disk->slave_dir || !disk->slave_dir->sd))
		return opaque(disk, stack);
	if (class_for_each_device(disk_to_dev(disk)->class, NULL, stack, add_below))
		return opaque(disk, stack);
	return true;
}

static bool dm_ok(struct gendisk *disk, struct stack *stack)
{
	struct module *owner = disk->fops->owner;
	struct mapped_device *md = NULL;
	bool ok;

	if (!try_module_get(owner))
		return opaque(disk, stack);
	if (find_dm_functions())
		md = static_call(tmem_dm_get_md)(disk_devt(disk));
	if (md) {
		ok = table_ok(disk, md, stack) && add_all_below(disk, stack);
		static_call(tmem_dm_put)(md);
	} else {
		ok = opaque(disk, stack);
	}
	module_put(owner);
	return ok;
}

static bool disk_ok(struct gendisk *disk, struct stack *stack)
{
	if (is_dm(disk))
		return dm_ok(disk, stack);
	if (is_opaque(disk))
		return opaque(disk, stack);
	if (disk->major == MD_MAJOR || strstarts(disk->disk_name, "md") ||
	    disk->major == LOOP_MAJOR)
		return add_all_below(disk, stack);
	return true;
}

static bool stack_ok(struct gendisk *disk, char *why, size_t why_bytes)
{
	struct stack *stack = kzalloc(sizeof(*stack), GFP_KERNEL);
	bool ok = true;

	if (!stack) {
		scnprintf(why, why_bytes, "no memory to examine the devices below; mount it again");
		return false;
	}
	stack->why = why;
	stack->why_bytes = why_bytes;
	get_device(disk_to_dev(disk));
	stack->disk[stack->nr++] = disk;
	while (ok && stack->checked < stack->nr)
		ok = disk_ok(stack->disk[stack->checked++], stack);
	while (stack->nr)
		put_device(disk_to_dev(stack->disk[--stack->nr]));
	kfree(stack);
	return ok;
}

/* --- geometry ------------------------------------------------------------------------------ */

/* Size of the buffer for mount options. Options of an xfs take a few hundred bytes. */
#define OPTIONS_BYTES 4096

/*
 * Returns whether a mount has an option as in /proc/self/mountinfo, with the comma before it, or if
 * its options cannot be read.
 */
static bool has_option(struct super_block *sb, const char *option)
{
	struct seq_file options = { .size = OPTIONS_BYTES };
	bool has = true;

	if (!sb->s_op->show_options)
		return false;
	options.buf = kzalloc(OPTIONS_BYTES, GFP_KERNEL);
	if (options.buf && !sb->s_op->show_options(&options, sb->s_root) &&
	    options.count < OPTIONS_BYTES)
		has = strstr(options.buf, option);
	kfree(options.buf);
	return has;
}

/*
 * Returns whether an xfs has a realtime volume. A zoned xfs always shows max_open_zones, even if
 * its realtime volume is on the data device and it shows no rtdev.
 */
static bool has_realtime(struct super_block *sb)
{
	return has_option(sb, ",rtdev=") || has_option(sb, ",max_open_zones=");
}

static bool geometry_ok(struct super_block *sb, char *why, size_t why_bytes)
{
	/* On vfat and exfat, a block is a sector, and files are allocated in clusters. */
	if (sb->s_blocksize != 512 && sb->s_blocksize != 1024 && sb->s_blocksize != 4096) {
		scnprintf(why, why_bytes,
			  "blocks of %lu bytes are not tested; allow_untested=1 serves it anyway",
			  sb->s_blocksize);
		return false;
	}
	if (!strcmp(sb->s_type->name, "xfs") && has_realtime(sb)) {
		scnprintf(why, why_bytes,
			  "a realtime or zoned xfs is not tested; allow_untested=1 serves it anyway");
		return false;
	}
	return true;
}

/*
 * Returns whether there is a reason not to serve a mount that no parameter of the module overrides,
 * and sets @why to it. The caller holds s_umount. @sb is NULL for a swap area. It may sleep, and
 * does no I/O. One call at a time.
 */
bool tmem_refuse(struct super_block *sb, const struct block_device *bdev, char *why,
		 size_t why_bytes)
{
	if (sb && !tmem_allow_untested && !geometry_ok(sb, why, why_bytes))
		return true;
	return !allow_encrypted && !stack_ok(bdev->bd_disk, why, why_bytes);
}
