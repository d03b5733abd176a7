// SPDX-License-Identifier: GPL-2.0-only
/*
 * Deliberate faults, which the driver commits when a test requests one. They show that the checkers
 * of a debug kernel (lockdep, KASAN, kmemleak, KCSAN) report such faults.
 */
#include <linux/delay.h>
#include <linux/jiffies.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>

/* Duration of the data race, long enough for KCSAN, which checks samples of the accesses only. */
#define RACE_TIME	(5 * HZ)
#define LEAKS		8
/*
 * Size of the leaked objects. Few other allocations have this size, so a test recognizes the report
 * of the leak.
 */
#define LEAK_BYTES	4321
/*
 * Size of the object that is overrun. It is smaller than the allocator's rounded size, so that a
 * red zone follows the object.
 */
#define SHORT_BYTES	24

static void bug_sleep(void)
{
	static DEFINE_SPINLOCK(lock);

	spin_lock(&lock);
	might_sleep();
	spin_unlock(&lock);
}

static void bug_order(void)
{
	static DEFINE_SPINLOCK(first);
	static DEFINE_SPINLOCK(second);

	spin_lock(&first);
	spin_lock(&second);
	spin_unlock(&second);
	spin_unlock(&first);

	spin_lock(&second);
	spin_lock(&first);
	spin_unlock(&first);
	spin_unlock(&second);
}

static noinline void bug_overflow(void)
{
	u8 *bytes = kmalloc(SHORT_BYTES, GFP_KERNEL);

	if (!bytes)
		return;
	OPTIMIZER_HIDE_VAR(bytes);
	bytes[SHORT_BYTES] = 1;
	kfree(bytes);
}

/* Leaks several objects, because the address of the last one may stay on a stack. */
static noinline void bug_leak(void)
{
	unsigned int i;
	void *lost;

	for (i = 0; i < LEAKS; i++) {
		lost = kmalloc(LEAK_BYTES, GFP_KERNEL);
		OPTIMIZER_HIDE_VAR(lost);
	}
}

static unsigned long raced;

static noinline void race(struct work_struct *work)
{
	unsigned long end = jiffies + RACE_TIME;

	while (time_before(jiffies, end)) {
		raced++;
		barrier();
		cond_resched();
	}
}

static DECLARE_WORK(race_work, race);

static void bug_race(void)
{
	queue_work(system_unbound_wq, &race_work);
	race(NULL);
	flush_work(&race_work);
}

static const struct {
	const char *name;
	void (*run)(void);
} bugs[] = {
	{ "sleep", bug_sleep },
	{ "order", bug_order },
	{ "overflow", bug_overflow },
	{ "leak", bug_leak },
	{ "race", bug_race },
};

static int run_bug(const char *val, const struct kernel_param *kp)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(bugs); i++) {
		if (!sysfs_streq(val, bugs[i].name))
			continue;
		bugs[i].run();
		return 0;
	}
	return -EINVAL;
}

static const struct kernel_param_ops bug_ops = { .set = run_bug };

module_param_cb(test_bug, &bug_ops, NULL, 0200);
MODULE_PARM_DESC(test_bug, "TEST: commits a fault of this kind: sleep, order, overflow, leak or race");
