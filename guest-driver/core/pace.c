// SPDX-License-Identifier: GPL-2.0-only
/*
 * Pace of kswapd: while the put ring fills up, kswapd waits for the host for a short time.
 *
 * kswapd evicts some hundred pages in less time than a host needs for one answer. Pages that do
 * not fit into the ring are dropped, and the next reader of each reads the disk. So kswapd calls
 * tmem_pace() after every 32 pages or so that it evicts (hooks/reclaim.c). If a quarter of the ring
 * is used, tmem_pace() sends all puts and waits until the host has taken half of them.
 *
 * A task that finds no free memory reclaims pages itself, and tmem_pace() does not delay it. But
 * when memory is almost exhausted, such a task first waits until kswapd has freed some
 * (throttle_direct_reclaim() of the kernel). So all waits of kswapd are bounded:
 * - A wait ends after PACE_US_MAX.
 * - kswapd waits for at most 1 / PACE_SHARE of the time, and PACE_BURST_US more. This is a leaky
 *   bucket, which all kswapd tasks share.
 * - If the host took no put before a wait timed out, kswapd does not wait again for a pause. The
 *   pauses grow from PACE_PAUSE_MIN_MS to PACE_PAUSE_MAX_MS, each twice as long as the one before,
 *   until the host takes puts again. So a host that hangs soon delays kswapd by only 2 ms in a
 *   second.
 */
#include <linux/swap.h>

#include "slot.h"
#include "wait.h"

/*
 * Longest wait of kswapd, in us. On two processors that run QEMU's emulation and tmemd, an answer
 * takes about this time. With a longest wait of 10 ms, tasks found no free memory and evicted pages
 * themselves, and the driver dropped twice as many pages.
 */
#define PACE_US_MAX		2000
/*
 * kswapd waits for at most 1 / PACE_SHARE of the time, and PACE_BURST_US more. The burst is as long
 * as a reader waits for the host by default (deadline_ms).
 */
#define PACE_SHARE		4
#define PACE_BURST_US		20000
/*
 * Shortest and longest pause after a wait in which the host took no put. On two processors that run
 * two emulated guests, tmemd often takes no put for 2 ms. With a first pause of a second, kswapd
 * then seldom waited, and the driver dropped three times as many pages.
 */
#define PACE_PAUSE_MIN_MS	8
#define PACE_PAUSE_MAX_MS	1000
/*
 * kswapd waits if at least 1 / PACE_BEGIN of the slots are in use, until at most 1 / PACE_END are.
 */
#define PACE_BEGIN		4
#define PACE_END		8

/* Returns how many slots of the put rings are in use. The number may be outdated. */
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

/* Returns how many slots of the put rings the host has answered since the device was set up. */
static u64 answered_slots(struct tmem_dev *dev)
{
	unsigned int i;
	u64 answered = 0;

	for (i = 0; i < dev->nr_queues; i++)
		answered += READ_ONCE(dev->queue[i].tail);
	return answered;
}

static u64 all_slots(struct tmem_dev *dev)
{
	return (u64)dev->nr_blocks * TMEM_BLOCK_PAGES;
}

/**
 * tmem_pace_init() - let kswapd wait at once when the ring fills up
 * @dev: the device, whose fields are 0
 */
void tmem_pace_init(struct tmem_dev *dev)
{
	init_waitqueue_head(&dev->pace_wait);
	dev->pace_pause = msecs_to_jiffies(PACE_PAUSE_MIN_MS);
	dev->pace_again = jiffies;
}

/*
 * Charges a wait that began at @began_ns and ends now to the budget, and at most PACE_US_MAX. The
 * guest's clock jumps during the wait if the guest does not run for a time. If several kswapd tasks
 * charge their waits at the same time, a charge may get lost.
 */
static void charge_wait(struct tmem_dev *dev, s64 began_ns)
{
	s64 now = ktime_get_ns();
	s64 earliest = now - (s64)PACE_SHARE * PACE_BURST_US * NSEC_PER_USEC;
	s64 budget = max(READ_ONCE(dev->pace_budget_ns), earliest);
	s64 waited_ns = min(now - began_ns, (s64)PACE_US_MAX * NSEC_PER_USEC);

	WRITE_ONCE(dev->pace_budget_ns, budget + PACE_SHARE * waited_ns);
}

/**
 * tmem_pace_wanted() - return whether the current task should call tmem_pace()
 *
 * Context: process, may be inside a function that must not sleep.
 *
 * Return: true if the task is kswapd, the put ring fills up, the budget allows a wait, and no pause
 * lasts. A pause follows a wait in which the host took no put.
 */
bool tmem_pace_wanted(void)
{
	struct tmem_dev *dev;
	bool wanted;

	if (!current_is_kswapd())
		return false;
	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	wanted = dev && READ_ONCE(dev->generation) &&
		 used_slots(dev) >= all_slots(dev) / PACE_BEGIN &&
		 !time_before(jiffies, READ_ONCE(dev->pace_again)) &&
		 (s64)ktime_get_ns() >= READ_ONCE(dev->pace_budget_ns);
	rcu_read_unlock();
	return wanted;
}

/**
 * tmem_pace() - make kswapd wait for the host, because the put ring fills up
 *
 * Context: process, sleeps up to PACE_US_MAX.
 */
void tmem_pace(void)
{
	struct tmem_dev *dev = tmem_dev_get();
	unsigned long pause;
	s64 began_ns;
	u64 before;
	unsigned int i;
	bool timed_out;

	if (!dev)
		return;
	began_ns = ktime_get_ns();
	before = answered_slots(dev);
	for (i = 0; i < dev->nr_queues; i++)
		tmem_send_all(&dev->queue[i]);
	tmem_count(TMEM_STAT_pace_waits);
	timed_out = !tmem_wait_event_until(dev->pace_wait,
					   used_slots(dev) <= all_slots(dev) / PACE_END,
					   ktime_get_ns() + (u64)PACE_US_MAX * NSEC_PER_USEC);
	if (timed_out)
		tmem_count(TMEM_STAT_pace_timeouts);
	if (timed_out && answered_slots(dev) == before) {
		pause = READ_ONCE(dev->pace_pause);
		WRITE_ONCE(dev->pace_again, jiffies + pause);
		WRITE_ONCE(dev->pace_pause, min(2 * pause, msecs_to_jiffies(PACE_PAUSE_MAX_MS)));
	} else {
		WRITE_ONCE(dev->pace_pause, msecs_to_jiffies(PACE_PAUSE_MIN_MS));
	}
	charge_wait(dev, began_ns);
	tmem_dev_put(dev);
}
