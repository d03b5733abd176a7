// SPDX-License-Identifier: GPL-2.0-only
/*
 * Swap areas: anonymous memory and shmem through the same path as files, if the device has
 * VIRTIO_TMEM_F_SWAP or the module parameter "swap" is 1.
 *
 * A swap partition or logical volume is served like a mounted file system: it has an area, whose
 * blocks are its slots, and a pool. Each write of a slot is recorded and erases its entry. Each
 * read asks the host first. A page is put when the kernel frees it, if its bytes equal the record
 * of its slot (bio.c, fill.c, put.c). The disk has all bytes, as without the driver. While the swap
 * cache has a folio, the kernel does not read its slot. Reclaim drops a folio only if nobody has
 * changed it since its bytes went to the disk.
 *
 * slots.c has the freed slots, whose bytes must leave the host, too.
 *
 * The driver learns of a swap area from its first write, and of its end from the holder of the
 * device. So swapon and swapoff never wait for the driver. The hooks of slots are added for the
 * first swap area.
 *
 * Instead of the address of a super block, a swap area has a small odd number.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/bitmap.h>
#include <linux/blk-integrity.h>
#include <linux/blkdev.h>
#include <linux/major.h>
#include <linux/module.h>
#include <linux/vmalloc.h>
#include <linux/workqueue.h>

#include "../compat.h"
#include "blocks.h"
#include "swap.h"

/* Period of both work items. Freed slots have to leave the host within five periods. */
#define PERIOD		HZ
/*
 * Time from which a pool is emptied because the work item cannot erase all freed slots. A slot that
 * was freed behind the place of the search waits for this time twice, and for a period.
 */
#define BEHIND_MAX	(3 * HZ / 2)
/* Time until the next run, if the host has to answer flushes before any slot can be erased. */
#define BUSY_PERIOD	(HZ / 20)
/*
 * Number of ranges of freed slots that one run of the work item erases. It takes some milliseconds.
 */
#define RUN_RANGES	4096
/* Number of bits of a bitmap that are searched before the task may be rescheduled. */
#define SCAN_BITS	BIT(20)

/* Bitmap by swap type. A bit is set if the log says that this swap file is not served. */
static unsigned long files_logged;

/*
 * Erases freed slots. It has a work item of its own, because that of swap areas may wait for a
 * disk.
 */
static struct delayed_work erase_work;
/* Held while freed slots of an area are erased, and while an area is taken out of the table. */
static DEFINE_MUTEX(erase_mutex);

/*
 * Erases all slots by emptying the pool. If a bit that a hook sets at the same time is lost, its
 * slot was freed before the pool is emptied, and needs no bit. Sleeps.
 */
static void erase_all(struct swap_area *area)
{
	unsigned long i;

	for (i = 0; i < BITS_TO_LONGS(area->nr); i++)
		WRITE_ONCE(area->freed[i], 0);
	/* A put that has not seen the bits finds no record, or has ended. */
	tmem_record_erase(area->fs->area->first, area->nr);
	tmem_pool_empty(area->fs->pool);
}

/* Returns the time in jiffies until the next run, after one that has left freed slots. Sleeps. */
static unsigned long left_freed(struct swap_area *area, unsigned long delay)
{
	WRITE_ONCE(area->any, true);
	if (!area->behind)
		area->behind = jiffies ?: 1;
	if (time_before(jiffies, area->behind + BEHIND_MAX) || TMEM_WITHOUT(BEHIND))
		return delay;
	area->behind = 0;
	erase_all(area);
	return PERIOD;
}

/*
 * Erases slots that were freed. Some may be left, because the run has lasted long, or because the
 * host has to answer flushes first. Returns the time until the next run in jiffies. Sleeps.
 */
static unsigned long erase_freed(const struct super_block *sb, struct swap_area *area)
{
	const struct tmem_fs *fs = smp_load_acquire(&area->fs);	/* pairs with area_add() */
	unsigned long left = area->nr, end;
	const struct tmem_area *blocks;
	unsigned int ranges = 0, nr;

	if (!fs || !area->nr)
		return PERIOD;
	/* A bit that is set after this line sets the flag again. A full barrier. */
	if (!xchg(&area->any, false)) {
		area->behind = 0;
		return PERIOD;
	}
	blocks = fs->area;
	while (left) {
		if (area->at >= area->nr)
			area->at = 0;
		end = min3(area->nr, area->at + SCAN_BITS, area->at + left);
		left -= end - area->at;
		while ((area->at = find_next_bit(area->freed, end, area->at)) < end) {
			if (ranges == RUN_RANGES || tmem_flushes_wait())
				return left_freed(area, ranges ? 1 : BUSY_PERIOD);
			ranges++;
			for (nr = 0; area->at + nr < end && nr < TMEM_FORGET_BLOCKS; nr++)
				if (!test_and_clear_bit(area->at + nr, area->freed))
					break;
			/* A put that has not seen the bits finds no record, or has ended. */
			tmem_record_erase(blocks->first + area->at, nr);
			tmem_area_forget(sb, area->at, nr, true, TMEM_INVAL_FREED);
			area->at += nr;
		}
		cond_resched();
	}
	area->behind = 0;
	return PERIOD;
}

static struct swap_area *area_at(unsigned int type)
{
	return rcu_dereference_protected(tmem_swap_areas[type], true);
}

static void erase_fn(struct work_struct *work)
{
	unsigned long delay = PERIOD;
	struct swap_area *area;
	unsigned int type;
	bool any = false;

	for (type = 0; type < MAX_SWAPFILES; type++) {
		mutex_lock(&erase_mutex);
		area = area_at(type);
		any |= !!area;
		if (area)
			delay = min(delay, erase_freed(tmem_swap_sb(type), area));
		mutex_unlock(&erase_mutex);
	}
	if (any && READ_ONCE(tmem_swap_on))
		queue_delayed_work(tmem_system_wq, &erase_work, delay);
}

/*
 * Forgets a swap area. Context: the work item, or no hook runs any more. Sleeps; may wait for
 * transfers of the disk.
 */
static void area_remove(unsigned int type)
{
	struct swap_area *area = area_at(type);

	if (!area)
		return;
	mutex_lock(&erase_mutex);
	RCU_INIT_POINTER(tmem_swap_areas[type], NULL);
	mutex_unlock(&erase_mutex);
	/* From here on, no page of the area is put (tmem_swap_is_freed()). */
	synchronize_rcu_expedited();
	if (area->fs) {
		/* The bytes leave the host now, although the next call may wait. */
		tmem_pool_empty(area->fs->pool);
		tmem_fs_drop(tmem_swap_sb(type));
	}
	tmem_bdev_put(area->bdev);
	vfree(area->freed);
	kfree(area);
}

/* Returns whether the device of a swap area belongs to another holder, or to none. */
static bool is_gone(const struct swap_area *area)
{
	return READ_ONCE(area->bdev->bd_holder) != area->holder;
}

/* Returns why a swap partition is not served, or NULL. tmem_refuse() examines device mapper. */
static const char *refuse(struct block_device *bdev)
{
	if (bdev->bd_disk->fops->submit_bio && !strstarts(bdev->bd_disk->disk_name, "dm-"))
		return "the disk is md, multipath or in memory";
	if (bdev->bd_disk->major == LOOP_MAJOR)
		return "the disk is a loop device";
	if (tmem_bdev_synchronous(bdev))
		return "the disk is synchronous, so the pool would not be faster";
	if (bdev_get_integrity(bdev))
		return "the disk has integrity data";
	return NULL;
}

/* Serves a swap partition, or remembers that it cannot be served. Sleeps. */
static void area_add(unsigned int type, struct block_device *bdev)
{
	const void *holder = READ_ONCE(bdev->bd_holder);
	const char *why = refuse(bdev);
	struct swap_area *area;
	struct tmem_fs *fs;
	unsigned int i;

	/*
	 * Remove areas whose end was not seen yet: the one with this number, and one on a device
	 * with this device number, which may have belonged to another partition.
	 */
	for (i = 0; i < MAX_SWAPFILES; i++)
		if (i == type || (area_at(i) && area_at(i)->bdev->bd_dev == bdev->bd_dev))
			area_remove(i);
	area = holder ? kzalloc(sizeof(*area), GFP_KERNEL) : NULL;
	if (!area || !tmem_bdev_hold(bdev)) {
		kfree(area);
		return;
	}
	area->bdev = bdev;
	area->holder = holder;
	if (!why) {
		area->nr = bdev_nr_sectors(bdev) / TMEM_BLOCK_SECTORS;
		area->freed = vzalloc(BITS_TO_LONGS(area->nr) * sizeof(long));
	}
	if (!area->freed)
		area->nr = 0;
	/* See each slot that is freed from now on, before a page can be put. */
	rcu_assign_pointer(tmem_swap_areas[type], area);
	synchronize_rcu_expedited();
	fs = tmem_bdev_hold(bdev) ? tmem_fs_serve_swap(type, bdev, why) : NULL;
	if (!fs || !fs->area || !area->nr) {
		area->nr = 0;
		if (!why && !(fs && *fs->refused))
			pr_warn("swap on %pg is not served: %s\n", bdev,
				fs && fs->no_area ? fs->no_area : "no memory");
	}
	/* The area has its size before a work item uses it; pairs with erase_freed(). */
	smp_store_release(&area->fs, fs);
}

/* Releases the devices that are still to be examined. Sleeps. */
static void forget_noted(void)
{
	unsigned int type;

	for (type = 0; type < MAX_SWAPFILES; type++)
		tmem_bdev_put(xchg(&tmem_swap_noted[type], NULL));
}

/*
 * Hooks the functions that free slots, before the first swap area is served. Returns 0, or -EAGAIN
 * for another attempt. After another error, no swap area is served. Sleeps.
 */
static int hook_slots(void)
{
	const struct tmem_target *target = tmem_swap_targets;
	int err = target->name ? 0 : -EOPNOTSUPP;

	/* A task that releases the hooks has the mutex, and waits for this work item. */
	if (!mutex_trylock(&tmem_hooks_mutex))
		return -EAGAIN;
	for (; !err && target->name; target++) {
		err = tmem_target_add(target);
		if (err)
			pr_warn("swap is off: cannot hook %s: error %d\n", target->name, err);
	}
	mutex_unlock(&tmem_hooks_mutex);
	if (err == -EOPNOTSUPP)
		pr_warn("swap is off: this kernel is not supported\n");
	if (err) {
		WRITE_ONCE(tmem_swap_allowed, false);
		forget_noted();
		return err == -EAGAIN ? -EIO : err;
	}
	WRITE_ONCE(tmem_swap_on, true);
	return 0;
}

static void swap_fn(struct work_struct *work)
{
	struct block_device *bdev;
	struct swap_area *area;
	unsigned int type;
	bool any = false;
	int err = 0;

	if (!READ_ONCE(tmem_swap_allowed))
		return;
	if (!READ_ONCE(tmem_swap_on))
		err = hook_slots();
	if (err == -EAGAIN)
		queue_delayed_work(tmem_system_wq, &tmem_swap_work, PERIOD);
	if (err)
		return;
	for (type = 0; type < MAX_SWAPFILES; type++) {
		if (test_bit(type, &tmem_swap_files) && !test_and_set_bit(type, &files_logged))
			pr_notice("swap area %u is refused: swap files are not served; use a partition or an LVM volume\n",
				  type);
		area = area_at(type);
		if (area && (is_gone(area) || tmem_swap_unwanted()))
			area_remove(type);
		bdev = READ_ONCE(tmem_swap_noted[type]);
		if (bdev) {
			if (tmem_swap_wanted())
				area_add(type, bdev);
			WRITE_ONCE(tmem_swap_noted[type], NULL);
			tmem_bdev_put(bdev);
		}
		area = area_at(type);
		if (!area)
			continue;
		any = true;
		if (area->fs && READ_ONCE(area->fs->flush))
			tmem_fs_refill(area->fs);
	}
	if (any && READ_ONCE(tmem_swap_on)) {
		queue_delayed_work(tmem_system_wq, &tmem_swap_work, PERIOD);
		queue_delayed_work(tmem_system_wq, &erase_work, PERIOD);
	}
}

/* --- set-up -------------------------------------------------------------------------------- */

/* Sets up the work items, once, before any hook can queue them. */
void tmem_swap_setup(void)
{
	INIT_DELAYED_WORK(&tmem_swap_work, swap_fn);
	INIT_DELAYED_WORK(&erase_work, erase_fn);
}

/* Begins to serve swap areas, unless the module parameter forbids it. */
void tmem_swap_init(void)
{
	tmem_swap_files = 0;
	files_logged = 0;
	WRITE_ONCE(tmem_swap_allowed, !!tmem_swap_parameter);
}

/* Stops to serve swap areas. The caller then removes the hooks, and calls tmem_swap_exit(). */
void tmem_swap_stop(void)
{
	WRITE_ONCE(tmem_swap_allowed, false);
	cancel_delayed_work_sync(&tmem_swap_work);
	/* The work item may have set it. */
	WRITE_ONCE(tmem_swap_on, false);
	cancel_delayed_work_sync(&erase_work);
}

/* Empties the pools of all swap areas, if their hooks do not work any more. */
void tmem_swap_empty(void)
{
	unsigned int type;

	for (type = 0; type < MAX_SWAPFILES; type++)
		if (area_at(type) && area_at(type)->fs)
			tmem_pool_empty(area_at(type)->fs->pool);
}

/* Forgets all swap areas, after all hooks were removed. */
void tmem_swap_exit(void)
{
	unsigned int type;

	/* A hook may have queued the work item just after tmem_swap_stop() cancelled it. */
	cancel_delayed_work_sync(&tmem_swap_work);
	for (type = 0; type < MAX_SWAPFILES; type++)
		area_remove(type);
	forget_noted();
}
