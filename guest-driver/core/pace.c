// SPDX-License-Identifier: GPL-2.0-only
/*
 * Pace of reclaim: while the put ring fills up, kswapd and registered tasks wait for the host for a
 * short time.
 *
 * kswapd evicts a few hundred pages in less time than a host needs for one answer. Pages that do
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
 *
 * A task that writes to memory.reclaim evicts pages although there is enough memory, so that the
 * guest can return memory to the host. Each page that the driver drops then costs a read from the
 * disk which the guest would not have needed. Such a task may register, and waits longer than
 * kswapd (PACE_TASK_US_MAX) and without a budget, because no task waits for its pages. It waits
 * only in reclaim that it requested itself. A write to memory.reclaim holds no lock but that of
 * the open file. madvise(MADV_PAGEOUT) and process_madvise() hold mmap_lock of the process, so its
 * other threads may wait for up to PACE_TASK_US_MAX at a time. If an allocation of a registered
 * task has to reclaim pages, the task may hold other locks, and does not wait. The driver
 * distinguishes allocations from requested reclaim by the mark of pressure stall information (PSI).
 * If that is off at boot (psi=0), the task waits in both.
 */
#include <linux/mutex.h>
#include <linux/pid.h>
#include <linux/sched.h>
#include <linux/swap.h>

#include "../compat.h"

#include "slot.h"
#include "wait.h"

/*
 * Longest wait of kswapd, in us. On two processors that run QEMU's emulation and tmemd, an answer
 * takes about this time. With a longest wait of 10 ms, tasks found no free memory and evicted pages
 * themselves, and the driver dropped twice as many pages.
 */
#define PACE_US_MAX		2000
/*
 * Longest wait of a registered task, in us. It is as long as a reader waits for the host by default
 * (deadline_ms).
 */
#define PACE_TASK_US_MAX	20000
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

/* Maximum number of registered tasks: a service, and commands of an operator. */
#define PACE_TASKS_MAX		4

/* Registered tasks. Free entries have no pid. tasks_lock guards changes; readers take no lock. */
static struct {
	struct pid *pid;
	const void *owner;
} tasks[PACE_TASKS_MAX];
static DEFINE_MUTEX(tasks_lock);

/*
 * Returns whether the current task is registered. An entry holds a reference on its pid, so no
 * later task has the same struct pid. An entry of a task that has exited matches no task.
 */
static bool is_registered(void)
{
	unsigned int i;

	for (i = 0; i < PACE_TASKS_MAX; i++) {
		struct pid *pid = READ_ONCE(tasks[i].pid);

		if (pid && pid == task_pid(current))
			return true;
	}
	return false;
}

/*
 * The registration holds for this thread, and not for its children. It does no harm after the
 * thread has ended. Registering again with the same owner is no error.
 */
int tmem_pace_register(const void *owner)
{
	int i, free = -1, err = 0;

	mutex_lock(&tasks_lock);
	for (i = 0; i < PACE_TASKS_MAX; i++) {
		if (!tasks[i].pid)
			free = i;
		else if (tasks[i].owner == owner && tasks[i].pid == task_pid(current))
			break;
	}
	if (i == PACE_TASKS_MAX && free < 0) {
		err = -EBUSY;
	} else if (i == PACE_TASKS_MAX) {
		tasks[free].owner = owner;
		WRITE_ONCE(tasks[free].pid, get_task_pid(current, PIDTYPE_PID));
	}
	mutex_unlock(&tasks_lock);
	return err;
}

/* A wait that has begun continues to its end. */
void tmem_pace_unregister(const void *owner)
{
	unsigned int i;

	mutex_lock(&tasks_lock);
	for (i = 0; i < PACE_TASKS_MAX; i++) {
		struct pid *pid = tasks[i].pid;

		if (!pid || tasks[i].owner != owner)
			continue;
		WRITE_ONCE(tasks[i].pid, NULL);
		put_pid(pid);
	}
	mutex_unlock(&tasks_lock);
}

/* Returns the pace of the current task, or NULL if the task does not wait. */
static struct tmem_pace *current_pace(struct tmem_dev *dev)
{
	if (current_is_kswapd())
		return &dev->pace_kswapd;
	/* tmem_in_memstall() is true while an allocation of the task reclaims pages. */
	return is_registered() && !tmem_in_memstall() ? &dev->pace_task : NULL;
}

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
	return (u64)dev->nr_groups * TMEM_GROUP_PAGES;
}

/* Lets tasks wait at once when the ring fills up. The fields of the device are 0. */
void tmem_pace_init(struct tmem_dev *dev)
{
	init_waitqueue_head(&dev->pace_wait);
	dev->pace_kswapd.us_max = PACE_US_MAX;
	dev->pace_kswapd.share = PACE_SHARE;
	dev->pace_task.us_max = PACE_TASK_US_MAX;
	dev->pace_kswapd.pause = msecs_to_jiffies(PACE_PAUSE_MIN_MS);
	dev->pace_task.pause = msecs_to_jiffies(PACE_PAUSE_MIN_MS);
	dev->pace_kswapd.again = jiffies;
	dev->pace_task.again = jiffies;
}

/*
 * Charges a wait that began at @began_ns and ends now to the budget, and at most the longest wait.
 * The guest's clock jumps during the wait if the guest does not run for a time. If several kswapd
 * tasks charge their waits at the same time, a charge may get lost.
 */
static void charge_wait(struct tmem_pace *pace, s64 began_ns)
{
	s64 now = ktime_get_ns();
	s64 earliest = now - (s64)pace->share * PACE_BURST_US * NSEC_PER_USEC;
	s64 budget = max(READ_ONCE(pace->budget_ns), earliest);
	s64 waited_ns = min(now - began_ns, (s64)pace->us_max * NSEC_PER_USEC);

	if (pace->share)
		WRITE_ONCE(pace->budget_ns, budget + pace->share * waited_ns);
}

/*
 * The task is kswapd, or a registered task that reclaims pages at its own request. It waits if the
 * put ring fills up, the budget allows a wait, and no pause lasts. A pause follows a wait in which
 * the host took no put. The caller may be inside a function that must not sleep.
 */
bool tmem_pace_wanted(void)
{
	struct tmem_pace *pace;
	struct tmem_dev *dev;
	bool wanted;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	pace = dev ? current_pace(dev) : NULL;
	wanted = pace && READ_ONCE(dev->generation) &&
		 used_slots(dev) >= all_slots(dev) / PACE_BEGIN &&
		 !time_before(jiffies, READ_ONCE(pace->again)) &&
		 (s64)ktime_get_ns() >= READ_ONCE(pace->budget_ns);
	rcu_read_unlock();
	return wanted;
}

/* Sleeps up to PACE_US_MAX in kswapd, and up to PACE_TASK_US_MAX in a registered task. */
void tmem_pace(void)
{
	struct tmem_dev *dev = tmem_dev_get();
	struct tmem_pace *pace;
	unsigned long pause;
	s64 began_ns;
	u64 before;
	unsigned int i;
	bool timed_out;

	if (!dev)
		return;
	/* Another thread may have ended the registration since tmem_pace_wanted(). */
	pace = current_pace(dev);
	if (!pace)
		goto out;
	began_ns = ktime_get_ns();
	before = answered_slots(dev);
	for (i = 0; i < dev->nr_queues; i++)
		tmem_send_all(&dev->queue[i]);
	tmem_count(TMEM_STAT_pace_waits);
	timed_out = !tmem_wait_event_until(dev->pace_wait,
					   used_slots(dev) <= all_slots(dev) / PACE_END,
					   ktime_get_ns() + (u64)pace->us_max * NSEC_PER_USEC);
	if (timed_out)
		tmem_count(TMEM_STAT_pace_timeouts);
	if (timed_out && answered_slots(dev) == before) {
		pause = READ_ONCE(pace->pause);
		WRITE_ONCE(pace->again, jiffies + pause);
		WRITE_ONCE(pace->pause, min(2 * pause, msecs_to_jiffies(PACE_PAUSE_MAX_MS)));
	} else {
		WRITE_ONCE(pace->pause, msecs_to_jiffies(PACE_PAUSE_MIN_MS));
	}
	charge_wait(pace, began_ns);
out:
	tmem_dev_put(dev);
}
