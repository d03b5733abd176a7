// SPDX-License-Identifier: GPL-2.0-only
/*
 * Pace of kswapd: while the put ring fills up, kswapd waits a moment for the host.
 *
 * kswapd evicts some hundred pages in less time than a host needs for one answer. Pages that do
 * not fit into the ring are dropped, and the next reader of each reads the disk. Between two parts
 * of its work, kswapd calls shrinkers, which may sleep. The driver's shrinker frees nothing. If the
 * ring is a quarter full, it sends all puts and waits until the host has taken half of them.
 *
 * No task waits for kswapd: a task that finds no free memory reclaims pages itself, and this
 * shrinker does not delay it. A wait ends after PACE_US_MAX. If the host took nothing meanwhile,
 * kswapd does not wait again for PACE_PAUSE, so a host that hangs costs 2 ms in a second.
 */
#include <linux/mm.h>
#include <linux/shrinker.h>
#include <linux/swap.h>

#include "../compat.h"
#include "ring.h"

/*
 * Longest wait of kswapd. Two processors that run QEMU's emulation and tmemd need about as long for
 * an answer. With 10 ms, tasks found no free memory and evicted pages themselves, and twice as many
 * pages were dropped.
 */
#define PACE_US_MAX		2000
#define PACE_PAUSE		HZ
/* kswapd waits when one slot in PACE_BEGIN is in use, until at most one in PACE_END is. */
#define PACE_BEGIN		4
#define PACE_END		8

static struct shrinker *pace_shrinker;

/* Returns how many slots are in use. The number is of some moment. */
static u64 used_slots(struct tmem_dev *dev)
{
	unsigned int i;
	u64 used = 0;

	for (i = 0; i < dev->nr_queues; i++) {
		u64 tail = READ_ONCE(dev->queue[i].tail);

		used += READ_ONCE(dev->queue[i].head) - tail;
	}
	return used;
}

/* Returns how many slots the host has answered since the device was set up. */
static u64 answered_slots(struct tmem_dev *dev)
{
	unsigned int i;
	u64 answered = 0;

	for (i = 0; i < dev->nr_queues; i++)
		answered += READ_ONCE(dev->queue[i].tail);
	return answered;
}

static void pace(struct tmem_dev *dev)
{
	u64 slots = (u64)dev->nr_blocks * TMEM_BLOCK_PAGES, before;
	unsigned int i;

	if (used_slots(dev) < slots / PACE_BEGIN || !READ_ONCE(dev->generation) ||
	    time_before(jiffies, READ_ONCE(dev->pace_again)))
		return;
	before = answered_slots(dev);
	for (i = 0; i < dev->nr_queues; i++)
		tmem_send_all(&dev->queue[i]);
	tmem_count(TMEM_STAT_pace_waits);
	if (!wait_event_hrtimeout(dev->pace_wait, used_slots(dev) <= slots / PACE_END,
				  ns_to_ktime((u64)PACE_US_MAX * NSEC_PER_USEC)))
		return;
	tmem_count(TMEM_STAT_pace_timeouts);
	if (answered_slots(dev) == before)
		WRITE_ONCE(dev->pace_again, jiffies + PACE_PAUSE);
}

/* Called by reclaim. There is nothing to free. */
static unsigned long pace_count(struct shrinker *shrinker, struct shrink_control *control)
{
	struct tmem_dev *dev;

	if (!current_is_kswapd())
		return 0;
	dev = tmem_dev_get();
	if (!dev)
		return 0;
	pace(dev);
	tmem_dev_put(dev);
	return 0;
}

static unsigned long pace_scan(struct shrinker *shrinker, struct shrink_control *control)
{
	return SHRINK_STOP;
}

/**
 * tmem_pace_init() - let kswapd call the driver
 *
 * Return: 0 or an error of the kernel.
 */
int tmem_pace_init(void)
{
	int err;

	pace_shrinker = tmem_shrinker_alloc();
	if (!pace_shrinker)
		return -ENOMEM;
	pace_shrinker->count_objects = pace_count;
	pace_shrinker->scan_objects = pace_scan;
	err = tmem_shrinker_register(pace_shrinker);
	if (err)
		tmem_shrinker_free(pace_shrinker);
	return err;
}

/**
 * tmem_pace_exit() - undo tmem_pace_init()
 *
 * Context: process, may sleep.
 */
void tmem_pace_exit(void)
{
	tmem_shrinker_free(pace_shrinker);
}
