// SPDX-License-Identifier: GPL-2.0-only
/*
 * Areas: the blocks of served file systems and swap areas, and the intervals in which the driver
 * sees all transfers of an area. blocks.h has the rules.
 *
 * The driver cannot see writes that began before the area was known, or that bypass submit_bio().
 * After such a write it records nothing until the disk was drained: freezing its request queue
 * waits until all requests have ended, or gives up after DRAIN_TIMEOUT. A disk without a queue
 * (device mapper, md) passes bios on and may keep them in memory, so it cannot be drained. Its area
 * records only if the mount was seen from its start, or it is a swap area (fs_new()), and no write
 * was missed since.
 */
#include <linux/blk-mq.h>
#include <linux/blkdev.h>
#include <linux/mutex.h>
#include <linux/rcupdate.h>
#include <linux/slab.h>
#include <linux/suspend.h>
#include <linux/wait.h>
#include <linux/workqueue.h>

#include "../compat.h"
#include "../core/stats.h"
#include "blocks.h"
#include "fs.h"

/* Least time between two drains of the areas, which stop the disks for a moment. */
#define DRAIN_PERIOD	HZ
/*
 * Longest time for which a drain lets new requests wait. A disk of 125 MB/s ends 256 requests of 1
 * MiB in half of it. A command of a program (SG_IO) may take minutes. Then the area tries again
 * after DRAIN_RETRY.
 */
#define DRAIN_TIMEOUT	(5 * HZ)
#define DRAIN_RETRY	(20 * HZ)
/* Most blocks of a range that are counted one by one while they are erased. */
#define SHORT_BLOCKS	32
/* Period in which the tables of records follow the size of RAM. */
#define RAM_PERIOD	(10 * HZ)

/* Held while disks are drained, and while tables are replaced. Taken before areas_lock. */
static DEFINE_MUTEX(drain_lock);
static DEFINE_MUTEX(areas_lock);	/* guards writers of areas[], last_epoch and busy */
static struct tmem_area __rcu *areas[TMEM_FS_MAX];
static u32 last_epoch;
static struct delayed_work drain_work;
static struct delayed_work ram_work;
static DECLARE_WAIT_QUEUE_HEAD(drain_wait);	/* tasks that wait for an area that is busy */

/*
 * Returns whether a range of sectors begins in an area or reaches into it. The last sectors of an
 * area, which are no whole block, do not count.
 */
static bool overlaps(const struct tmem_area *area, const struct gendisk *disk, sector_t sector,
		     sector_t nr)
{
	return area && area->disk == disk && sector < area->start +
	       (sector_t)area->nr * TMEM_BLOCK_SECTORS && sector + nr > area->start;
}

/*
 * Returns the area that contains all of the @nr sectors of a disk from @sector on, or NULL. The
 * caller holds the RCU read lock while it uses the result.
 */
const struct tmem_area *tmem_area_find(const struct gendisk *disk, sector_t sector, sector_t nr)
{
	const struct tmem_area *area;
	unsigned int i;

	for (i = 0; i < TMEM_FS_MAX; i++) {
		area = rcu_dereference(areas[i]);
		if (overlaps(area, disk, sector, nr) && sector >= area->start &&
		    sector + nr <= area->start + (sector_t)area->nr * TMEM_BLOCK_SECTORS)
			return area;
	}
	return NULL;
}

/*
 * Returns the area that contains a block, or NULL. The caller holds the RCU read lock while it uses
 * the result.
 */
const struct tmem_area *tmem_area_of(u32 block)
{
	const struct tmem_area *area;
	unsigned int i;

	for (i = 0; i < TMEM_FS_MAX; i++) {
		area = rcu_dereference(areas[i]);
		if (area && block - area->first < area->nr)
			return area;
	}
	return NULL;
}

/* Returns whether a disk has an area. Context: any. */
bool tmem_area_serves(const struct gendisk *disk)
{
	const struct tmem_area *area;
	bool found = false;
	unsigned int i;

	rcu_read_lock();
	for (i = 0; i < TMEM_FS_MAX && !found; i++) {
		area = rcu_dereference(areas[i]);
		found = area && area->disk == disk;
	}
	rcu_read_unlock();
	return found;
}

/*
 * Returns the epoch of the area that has sector @start of a disk, or 0 outside of an interval, or
 * if there is no area. Context: any.
 */
u32 tmem_area_epoch(const struct gendisk *disk, sector_t start)
{
	const struct tmem_area *area;
	u32 epoch;

	rcu_read_lock();
	area = tmem_area_find(disk, start, 1);
	epoch = area ? READ_ONCE(area->epoch) : 0;
	rcu_read_unlock();
	return epoch;
}

/* Returns the block that contains a sector of the whole disk. */
static u32 block_of(const struct tmem_area *area, sector_t sector)
{
	return area->first + (u32)((sector - area->start) / TMEM_BLOCK_SECTORS);
}

/*
 * Erases blocks from the index. @first counts from the beginning of the area of @sb. The caller has
 * erased the records before. A put that found a record has ended then, or finds none any more.
 *
 * Context: any but NMI. With @may_sleep, the function may sleep, because the caller is in no RCU
 * section.
 */
void tmem_area_forget(const struct super_block *sb, u32 first, u32 nr, bool may_sleep,
		      enum tmem_inval why)
{
	u32 part, most = may_sleep ? TMEM_FORGET_BLOCKS : BIT(TMEM_OBJECT_BITS);
	struct tmem_key key;
	struct tmem_fs *fs;
	pgoff_t index;

	for (; nr; first += part, nr -= part) {
		part = min_t(u32, nr, most - first % most);
		rcu_read_lock();
		fs = tmem_fs_find(sb);
		if (fs) {
			index = tmem_block_key(&key, fs->pool, first);
			tmem_invalidate(&key, index, index + part - 1, why);
		}
		rcu_read_unlock();
		if (!fs)
			return;
		if (may_sleep)
			cond_resched();
	}
}

/*
 * Erases blocks: records, then index. @first is the number of the first block, and @place counts
 * from the beginning of the area of @sb. The erasure counts as a write: otherwise a get that begins
 * between the two would add a record, and use the entry. Context: as tmem_area_forget().
 */
static void erase_blocks(const struct super_block *sb, u32 first, u32 place, u32 nr, bool may_sleep)
{
	unsigned int number;

	if (nr <= SHORT_BLOCKS) {
		tmem_record_write_range(first, nr, true);
		tmem_area_forget(sb, place, nr, may_sleep, TMEM_INVAL_BLOCK);
		tmem_record_write_range(first, nr, false);
		return;
	}
	number = tmem_record_long_write(first, first + nr - 1);
	tmem_record_erase(first, nr);
	tmem_area_forget(sb, place, nr, may_sleep, TMEM_INVAL_BLOCK);
	tmem_record_long_end(number);
}

/*
 * Erases all blocks that a range of sectors of a disk touches, in all areas: records, then index.
 * Returns whether the range touches an area. Context: any but NMI. It sleeps only if @may_sleep.
 */
bool tmem_area_erase(const struct gendisk *disk, sector_t sector, sector_t nr, bool may_sleep)
{
	const struct super_block *sb;
	const struct tmem_area *area;
	bool touched = false;
	unsigned int i;

	for (i = 0; i < TMEM_FS_MAX; i++) {
		u32 first, nr_blocks, area_first;
		sector_t begin, end;

		rcu_read_lock();
		area = rcu_dereference(areas[i]);
		if (!overlaps(area, disk, sector, nr)) {
			rcu_read_unlock();
			continue;
		}
		touched = true;
		begin = max(sector, area->start);
		end = min(sector + nr, area->start + (sector_t)area->nr * TMEM_BLOCK_SECTORS);
		first = block_of(area, begin);
		nr_blocks = block_of(area, end - 1) - first + 1;
		area_first = area->first;
		sb = area->sb;
		rcu_read_unlock();
		erase_blocks(sb, first, first - area_first, nr_blocks, may_sleep);
	}
	return touched;
}

/* Ends the interval of all areas that a range touches, and erases its blocks. */
static bool end_interval(const struct gendisk *disk, sector_t sector, sector_t nr, bool for_good)
{
	struct tmem_area *area;
	bool touched = false;
	unsigned int i;

	rcu_read_lock();
	for (i = 0; i < TMEM_FS_MAX; i++) {
		area = rcu_dereference(areas[i]);
		if (!overlaps(area, disk, sector, nr))
			continue;
		touched = true;
		if (for_good)
			WRITE_ONCE(area->failed, true);
		WRITE_ONCE(area->epoch, 0);
	}
	rcu_read_unlock();
	/*
	 * A read that began before sees another sequence number now, and does not record. A read
	 * that begins from here on sees no interval.
	 */
	smp_mb();
	tmem_area_erase(disk, sector, nr, false);
	return touched;
}

/*
 * Erases the blocks of a write whose end the driver will not see. The areas record nothing until
 * the disk was drained. Context: any but NMI.
 */
void tmem_area_unseen(const struct gendisk *disk, sector_t sector, sector_t nr)
{
	if (!end_interval(disk, sector, nr, false))
		return;
	tmem_count(TMEM_STAT_blocks_unseen);
	queue_delayed_work(tmem_system_wq, &drain_work, DRAIN_PERIOD);
}

/*
 * Stops recording, because a write has failed: a device may carry out a write later that has timed
 * out. The areas record nothing until they are unmounted. Context: any but NMI.
 */
void tmem_area_failed(const struct gendisk *disk, sector_t sector, sector_t nr)
{
	end_interval(disk, sector, nr, true);
}

static u32 next_epoch(void)
{
	lockdep_assert_held(&areas_lock);
	return ++last_epoch ?: ++last_epoch;
}

/* Begins an interval of an area, if no write of it has failed. */
static u32 begin_interval(struct tmem_area *area)
{
	WRITE_ONCE(area->epoch, next_epoch());
	/* Either this function sees the flag, or end_interval() sees the epoch. */
	smp_mb();
	if (READ_ONCE(area->failed))
		WRITE_ONCE(area->epoch, 0);
	return last_epoch;
}

/*
 * Drains the disk of an area. The interval begins before the drain, so that a write that is missed
 * during the drain ends it. Reads may record and reclaim may put old bytes until the drain has
 * ended. These are erased, and only then may blocks be got. The drain may take long, so the lock is
 * released meanwhile. If it times out, the interval ends, and the next drain erases its blocks.
 */
static void drain_area(struct tmem_area *area)
{
	u32 epoch = begin_interval(area);

	area->busy = true;
	mutex_unlock(&areas_lock);
	TMEM_HOLD(drain);
	if (TMEM_WITHOUT(DRAIN) || tmem_drain_queue(area->disk->queue, DRAIN_TIMEOUT)) {
		if (!TMEM_WITHOUT(DRAINED))
			tmem_area_erase(area->disk, area->start,
					(sector_t)area->nr * TMEM_BLOCK_SECTORS, true);
		WRITE_ONCE(area->served, epoch);
	} else {
		WRITE_ONCE(area->epoch, 0);
		area->retry = jiffies + DRAIN_RETRY;
	}
	mutex_lock(&areas_lock);
	area->busy = false;
	wake_up_all(&drain_wait);
}

/* Returns whether an area has to be drained, which may have to wait (is_late()). */
static bool wants_drain(const struct tmem_area *area)
{
	return area && area->drained && !READ_ONCE(area->failed) && !READ_ONCE(area->epoch);
}

/* Returns whether the last drain of an area has timed out, and the next one has to wait. */
static bool is_late(const struct tmem_area *area)
{
	return time_before(jiffies, area->retry);
}

static void drain_fn(struct work_struct *work)
{
	struct tmem_area *area;
	bool late = false;
	unsigned int i;

	mutex_lock(&drain_lock);
	mutex_lock(&areas_lock);
	for (i = 0; i < TMEM_FS_MAX; i++) {
		area = rcu_dereference_protected(areas[i], lockdep_is_held(&areas_lock));
		if (!wants_drain(area))
			continue;
		if (!is_late(area))
			drain_area(area);
		late |= wants_drain(area) && is_late(area);
	}
	mutex_unlock(&areas_lock);
	mutex_unlock(&drain_lock);
	if (late)
		queue_delayed_work(tmem_system_wq, &drain_work, DRAIN_RETRY);
}

/*
 * Begins another interval of each area that is in one, because tables have replaced others. No
 * write was missed, so no disk has to be drained. Transfers that began before are not recorded, and
 * what fills have got is not used.
 */
static void renew_intervals(void)
{
	struct tmem_area *area;
	unsigned int i;
	u32 epoch;

	if (TMEM_WITHOUT(RENEW))
		return;
	mutex_lock(&areas_lock);
	for (i = 0; i < TMEM_FS_MAX; i++) {
		area = rcu_dereference_protected(areas[i], lockdep_is_held(&areas_lock));
		epoch = area ? READ_ONCE(area->epoch) : 0;
		if (!epoch)
			continue;
		/* The interval may end at any time. Its end stays one. */
		WRITE_ONCE(area->served, next_epoch());
		cmpxchg(&area->epoch, epoch, last_epoch);
	}
	mutex_unlock(&areas_lock);
}

static void ram_fn(struct work_struct *work)
{
	mutex_lock(&drain_lock);
	tmem_records_fit_ram(renew_intervals);
	mutex_unlock(&drain_lock);
	queue_delayed_work(tmem_system_wq, &ram_work, tmem_test_ram_period(RAM_PERIOD));
}

/* Returns the first number of a range of @nr block numbers that no area has, or 0. */
static u32 free_numbers(u32 nr)
{
	const struct tmem_area *area;
	u64 first = 1;
	unsigned int i;

	for (i = 0; i < TMEM_FS_MAX; i++) {
		area = rcu_dereference_protected(areas[i], lockdep_is_held(&areas_lock));
		if (!area || first + nr <= area->first || first >= (u64)area->first + area->nr)
			continue;
		first = (u64)area->first + area->nr;
		i = -1;	/* compare with all areas again */
	}
	return first + nr < U32_MAX ? first : 0;
}

/*
 * Returns whether another area has a part of the disk. A write erases the blocks of one area only.
 * A btrfs keeps its area when the device is removed from it, and another file system may use the
 * device then.
 */
static bool is_taken(const struct tmem_area *area)
{
	unsigned int i;

	for (i = 0; i < TMEM_FS_MAX; i++)
		if (overlaps(rcu_dereference_protected(areas[i], lockdep_is_held(&areas_lock)),
			     area->disk, area->start, (sector_t)area->nr * TMEM_BLOCK_SECTORS))
			return true;
	return false;
}

/*
 * Returns whether all writes of a device are bios and requests whose sectors are known at their
 * submission.
 */
static bool is_visible(struct block_device *bdev)
{
	if (TMEM_WITHOUT(VISIBLE))
		return true;
	return !bdev_is_zoned(bdev) && !blk_queue_dax(bdev_get_queue(bdev)) &&
	       !tmem_disk_has_rw_page(bdev->bd_disk);
}

/*
 * Makes the area of a file system, or a swap area: @nr blocks from a sector on. The caller holds
 * @bdev until tmem_area_free(). @from_start: the file system is being mounted, and no write of it
 * has been missed; or it is a swap area. Sleeps.
 *
 * Returns NULL and sets @why in these cases: there is no memory; there is no free block number
 * (16 TiB in all areas); programs can write to the device without a bio, as with DAX; another area
 * has a part of the device.
 */
struct tmem_area *tmem_area_new(const struct super_block *sb, struct block_device *bdev,
				sector_t start, u64 nr, bool from_start, const char **why)
{
	struct tmem_area *area;
	unsigned int i;

	if (!is_visible(bdev)) {
		*why = "the disk has writes that are no bios";
		return NULL;
	}
	area = kzalloc(sizeof(*area), GFP_KERNEL);
	if (!area) {
		*why = "no memory; mount the file system again";
		return NULL;
	}
	area->sb = sb;
	area->disk = bdev->bd_disk;
	area->start = start;
	area->nr = nr;
	area->drained = !bdev->bd_disk->fops->submit_bio;
	mutex_lock(&areas_lock);
	if (is_taken(area)) {
		mutex_unlock(&areas_lock);
		kfree(area);
		*why = "another file system that is mounted has used the disk";
		return NULL;
	}
	area->first = nr && nr < U32_MAX ? free_numbers(nr) : 0;
	for (i = 0; i < TMEM_FS_MAX; i++)
		if (!rcu_access_pointer(areas[i]))
			break;
	if (!area->first || i == TMEM_FS_MAX) {
		mutex_unlock(&areas_lock);
		kfree(area);
		*why = "no free block numbers, which are for 16 TiB of disks in all";
		return NULL;
	}
	rcu_assign_pointer(areas[i], area);
	/* See each later write: wait for tasks that looked for an area before it was there. */
	synchronize_rcu_expedited();
	if (!area->drained && from_start)
		area->served = begin_interval(area);
	mutex_unlock(&areas_lock);
	if (area->drained)
		mod_delayed_work(tmem_system_wq, &drain_work, 0);
	return area;
}

/* Removes the area of a file system that is being unmounted. @area may be NULL. Sleeps. */
void tmem_area_free(struct tmem_area *area)
{
	unsigned int i;

	if (!area)
		return;
	mutex_lock(&areas_lock);
	/* No drain begins any more. */
	WRITE_ONCE(area->failed, true);
	while (area->busy) {
		mutex_unlock(&areas_lock);
		wait_event(drain_wait, !READ_ONCE(area->busy));
		mutex_lock(&areas_lock);
	}
	for (i = 0; i < TMEM_FS_MAX; i++)
		if (rcu_access_pointer(areas[i]) == area)
			RCU_INIT_POINTER(areas[i], NULL);
	/*
	 * No other area gets the numbers before their records are erased: an evicted page would be
	 * put for the other area. The lock is held until then.
	 */
	synchronize_rcu_expedited();
	if (!TMEM_WITHOUT(NUMBERS))
		tmem_record_erase(area->first, area->nr);
	mutex_unlock(&areas_lock);
	kfree_rcu(area, rcu);
}

/*
 * The kernel writes the image of a hibernation after it has saved the memory, maybe to a swap file
 * in an area. A guest that continues with the saved memory has not seen these writes. So it erases
 * all records. The index is empty, and has no entry before the core's notifier has run, too.
 */
static int pm_notify(struct notifier_block *block, unsigned long event, void *unused)
{
	if (event == PM_POST_HIBERNATION && !TMEM_WITHOUT(RESUME))
		tmem_record_erase(1, U32_MAX - 1);
	return NOTIFY_DONE;
}

static struct notifier_block pm_block = {
	.notifier_call = pm_notify,
	.priority = 1,			/* before the core's notifier, which has 0 */
};

/* Makes the tables. Returns 0 or an error. */
int tmem_areas_init(void)
{
	int err;

	INIT_DELAYED_WORK(&drain_work, drain_fn);
	INIT_DELAYED_WORK(&ram_work, ram_fn);
	err = tmem_records_init();
	if (err)
		return err;
	err = register_pm_notifier(&pm_block);
	if (err) {
		tmem_records_exit();
		return err;
	}
	queue_delayed_work(tmem_system_wq, &ram_work, tmem_test_ram_period(RAM_PERIOD));
	return 0;
}

/* Frees the tables, after all hooks and areas were removed. */
void tmem_areas_exit(void)
{
	unregister_pm_notifier(&pm_block);
	cancel_delayed_work_sync(&drain_work);
	cancel_delayed_work_sync(&ram_work);
	tmem_records_exit();
}
