// SPDX-License-Identifier: GPL-2.0-only
/*
 * Swap areas: anonymous memory and shmem through the same path as files, if the device has
 * VIRTIO_TMEM_F_SWAP or the module parameter "swap" is 1.
 *
 * A swap partition, logical volume or file is served like a mounted file system: it has an area,
 * whose blocks are its slots, and a pool. Each write of a slot is recorded and erases its entry.
 * Each read asks the host first. A page is put when the kernel frees it, if its bytes equal the
 * record of its slot (bio.c, fill.c, put.c). The disk has all bytes, as without the driver. While
 * the swap cache has a folio, the kernel does not read its slot. Reclaim drops a folio only if
 * nobody has changed it since its bytes went to the disk.
 *
 * slots.c has the freed slots, whose bytes must leave the host, too.
 *
 * The driver learns of a swap area from its first write, and of its end from the holder of the
 * device. So swapon and swapoff never wait for the driver. A swap file stays in the table until its
 * file system is unmounted, but has no page after its swapoff, because the kernel frees all slots.
 * The hooks of slots are added for the first swap area.
 *
 * Instead of the address of a super block, a swap area has a small odd number.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/bitmap.h>
#include <linux/blk-integrity.h>
#include <linux/blkdev.h>
#include <linux/major.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/slab.h>
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
/*
 * Most slots of a swap area, which have 256 GiB: the driver reserves block numbers for all of them.
 */
#define SLOTS_MAX	BIT(26)

/*
 * Erases freed slots. It has a work item of its own, because that of swap areas may wait for a
 * disk.
 */
static struct delayed_work erase_work;
/* Held while freed slots of an area are erased, and while an area is taken out of the table. */
static DEFINE_MUTEX(erase_mutex);

static unsigned long nr_parts(const struct swap_area *area)
{
	return DIV_ROUND_UP(area->nr, TMEM_PART_SLOTS);
}

/*
 * Erases all slots by emptying the pool. If a bit that a hook sets at the same time is lost, its
 * slot was freed before the pool is emptied, and needs no bit. Sleeps.
 */
static void erase_all(struct swap_area *area)
{
	unsigned long part, i;

	for (part = 0; part < nr_parts(area); part++)
		for (i = 0; area->freed[part] && i < BITS_TO_LONGS(TMEM_PART_SLOTS); i++)
			WRITE_ONCE(area->freed[part][i], 0);
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

/* Returns the next slot with a bit from @at on, or @end. @first is the slot of the first bit. */
static unsigned long next_freed(const unsigned long *bits, unsigned long first, unsigned long at,
				unsigned long end)
{
	return bits ? first + find_next_bit(bits, end - first, at - first) : end;
}

/*
 * Erases slots that were freed. Some may be left, because the run has lasted long, or because the
 * host has to answer flushes first. Returns the time until the next run in jiffies. Sleeps.
 */
static unsigned long erase_freed(const struct super_block *sb, struct swap_area *area)
{
	const struct tmem_fs *fs = smp_load_acquire(&area->fs);	/* pairs with area_add() */
	unsigned long left = area->nr, first, end, *bits;
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
		first = round_down(area->at, TMEM_PART_SLOTS);
		end = min3(area->nr, first + TMEM_PART_SLOTS, area->at + left);
		left -= end - area->at;
		bits = READ_ONCE(area->freed[first / TMEM_PART_SLOTS]);
		while ((area->at = next_freed(bits, first, area->at, end)) < end) {
			if (ranges == RUN_RANGES || tmem_flushes_wait())
				return left_freed(area, ranges ? 1 : BUSY_PERIOD);
			ranges++;
			for (nr = 0; area->at + nr < end && nr < TMEM_FORGET_BLOCKS; nr++)
				if (!test_and_clear_bit(area->at + nr - first, bits))
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
	unsigned long part;

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
	for (part = 0; part < nr_parts(area); part++)
		free_page((unsigned long)area->freed[part]);
	kvfree(area);
}

/* Returns whether the device of a swap area belongs to another holder, or to none. */
static bool is_gone(const struct swap_area *area)
{
	return READ_ONCE(area->bdev->bd_holder) != area->holder;
}

/* Returns why a swap area is not served, or NULL. tmem_refuse() examines device mapper. */
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

/*
 * Serves the part of a swap area that is wanted, and the one behind it. Without memory for the
 * first one, the next run tries again. Sleeps.
 */
static void add_parts(struct swap_area *area)
{
	unsigned long part, end, *bits;

	if (!READ_ONCE(area->wanted))
		return;
	part = READ_ONCE(area->wanted) - 1;
	for (end = min(part + 2, nr_parts(area)); part < end; part++) {
		if (area->freed[part])
			continue;
		bits = (unsigned long *)get_zeroed_page(GFP_KERNEL | __GFP_NORETRY | __GFP_NOWARN);
		if (!bits && part == area->wanted - 1)
			return;
		if (!bits)
			break;
		/* The bits are 0 before a hook sees them; pairs with freed_of(). */
		smp_store_release(&area->freed[part], bits);
	}
	WRITE_ONCE(area->wanted, 0);
}

/*
 * Serves a swap area, or remembers that it cannot be served. Returns false if there is no memory,
 * or if too many file systems are served. Sleeps.
 */
static bool area_add(unsigned int type, struct block_device *bdev)
{
	u64 nr = min_t(u64, bdev_nr_sectors(bdev) / TMEM_BLOCK_SECTORS, SLOTS_MAX);
	const void *holder = READ_ONCE(bdev->bd_holder);
	const char *why = refuse(bdev);
	struct swap_area *area;
	struct tmem_fs *fs;

	area = area_at(type);
	if (!holder || (area && area->bdev == bdev))
		return true;
	/* The end of the area with this number was not seen yet. */
	area_remove(type);
	area = kvzalloc(struct_size(area, freed, DIV_ROUND_UP(nr, TMEM_PART_SLOTS)), GFP_KERNEL);
	if (!area)
		return false;
	if (!tmem_bdev_hold(bdev)) {
		kvfree(area);
		return true;
	}
	area->bdev = bdev;
	area->holder = holder;
	area->nr = why ? 0 : nr;
	area->wanted = 1;
	/* See each slot that is freed from now on, before a page can be put. */
	rcu_assign_pointer(tmem_swap_areas[type], area);
	synchronize_rcu_expedited();
	fs = tmem_bdev_hold(bdev) ? tmem_fs_serve_swap(type, bdev, why) : NULL;
	if (!fs) {
		pr_warn_once("swap on %pg waits: no memory, or too many mounts are served\n",
			     bdev);
		area_remove(type);
		return false;
	}
	if (!fs->area) {
		WRITE_ONCE(area->nr, 0);
		if (!*fs->refused)
			pr_warn("swap on %pg is not served: %s\n", bdev, fs->no_area);
	}
	/* The area has its size before a work item uses it; pairs with erase_freed(). */
	smp_store_release(&area->fs, fs);
	return true;
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
		area = area_at(type);
		if (area && (is_gone(area) || tmem_swap_unwanted()))
			area_remove(type);
		bdev = READ_ONCE(tmem_swap_noted[type]);
		if (bdev) {
			if (tmem_swap_wanted() && !area_add(type, bdev)) {
				any = true;	/* try again */
				continue;
			}
			WRITE_ONCE(tmem_swap_noted[type], NULL);
			tmem_bdev_put(bdev);
		}
		area = area_at(type);
		if (!area)
			continue;
		any = true;
		add_parts(area);
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
