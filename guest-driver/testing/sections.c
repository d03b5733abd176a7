// SPDX-License-Identifier: GPL-2.0-only
/*
 * Measures the longest time for which an operation of the index keeps a processor from other work.
 * Writing 1 to the parameter test_sections runs the measurement, on a guest with one processor and
 * an otherwise idle machine. Reading the parameter returns the results.
 *
 * A real-time thread on the processor of the operation wakes every PERIOD_NS and records its
 * largest delay. The thread is delayed while the operation neither reschedules nor enables
 * interrupts. Other work of the kernel delays it, too, so the result is the smallest value of
 * several rounds. The result "idle" is the delay beside a loop that reschedules all the time.
 */
#include <linux/delay.h>
#include <linux/hrtimer.h>
#include <linux/kthread.h>
#include <linux/ktime.h>
#include <linux/moduleparam.h>
#include <linux/mutex.h>
#include <linux/sched.h>
#include <linux/sysfs.h>

#include "../core/core.h"

#define PERIOD_NS	(20 * NSEC_PER_USEC)
/* Duration of the loop with which operations are compared, and time for deferred work, in ms. */
#define SECTION_IDLE_MS		50
#define SECTION_ROUNDS		3
/*
 * Number of leaves of 64 pages, each with one entry: as many as 10 GiB of held blocks have. They
 * take 3.3 MB of the index, which must not become full.
 */
#define SECTION_LEAVES		40960

enum section { IDLE, RANGE, SWEEP, NR_SECTIONS };

static const char *const section_name[NR_SECTIONS] = { "idle", "range", "sweep" };

static struct {
	u64 longest_ns, total_ns;
	unsigned long entries;
} result[NR_SECTIONS];

static DEFINE_MUTEX(sections_lock);
static u64 longest_ns;

static int monitor(void *unused)
{
	ktime_t period;
	u64 begin;

	while (!kthread_should_stop()) {
		period = ns_to_ktime(PERIOD_NS);
		begin = ktime_get_ns();
		set_current_state(TASK_INTERRUPTIBLE);
		schedule_hrtimeout(&period, HRTIMER_MODE_REL);
		WRITE_ONCE(longest_ns, max(longest_ns, ktime_get_ns() - begin));
	}
	return 0;
}

/* Stores an entry in each of the first leaves of a pool. Returns their number. */
static unsigned long fill(struct tmem_pool *pool)
{
	struct tmem_where where;
	struct tmem_key key;
	pgoff_t index;
	unsigned long i;

	for (i = 0; i < SECTION_LEAVES; i++) {
		index = tmem_block_key(&key, pool, i * VIRTIO_TMEM_BATCH_MAX);
		if (tmem_index_store(&key, index, 1, &where))
			break;
		cond_resched();
	}
	return i;
}

static void begin_section(u64 *begin)
{
	fsleep(SECTION_IDLE_MS * USEC_PER_MSEC);	/* work from before the measurement ends */
	WRITE_ONCE(longest_ns, 0);
	*begin = ktime_get_ns();
}

static void end_section(enum section section, u64 begin, unsigned long entries)
{
	u64 total_ns = ktime_get_ns() - begin;

	fsleep(SECTION_IDLE_MS * USEC_PER_MSEC);	/* deferred work of the operation ends */
	result[section].longest_ns = min(result[section].longest_ns, READ_ONCE(longest_ns));
	result[section].total_ns = min(result[section].total_ns, total_ns);
	result[section].entries = entries;
}

static int run_sections(void)
{
	struct task_struct *thread;
	unsigned long nr, block;
	struct tmem_key key;
	pgoff_t index;
	u64 begin;
	int err;

	err = tmem_test_pool(&key, "sections");
	if (err)
		return err;
	thread = kthread_create(monitor, NULL, "tmem_sections");
	if (IS_ERR(thread)) {
		tmem_pool_free(key.pool);
		return PTR_ERR(thread);
	}
	sched_set_fifo(thread);
	wake_up_process(thread);

	begin_section(&begin);
	while (ktime_get_ns() - begin < SECTION_IDLE_MS * NSEC_PER_MSEC)
		cond_resched();
	end_section(IDLE, begin, 0);

	nr = fill(key.pool);
	begin_section(&begin);
	for (block = 0; block < nr * VIRTIO_TMEM_BATCH_MAX; block += TMEM_FORGET_BLOCKS) {
		index = tmem_block_key(&key, key.pool, block);
		tmem_invalidate(&key, index, index + TMEM_FORGET_BLOCKS - 1, TMEM_INVAL_BLOCK);
		cond_resched();
	}
	end_section(RANGE, begin, nr);

	nr = fill(key.pool);
	begin_section(&begin);
	tmem_pool_free(key.pool);
	tmem_pools_wait_emptied();
	end_section(SWEEP, begin, nr);
	kthread_stop(thread);
	return 0;
}

static int set_sections(const char *value, const struct kernel_param *param)
{
	unsigned int i;
	int err = 0;

	mutex_lock(&sections_lock);
	for (i = 0; i < NR_SECTIONS; i++)
		memset(&result[i], 0xff, sizeof(result[i]));
	for (i = 0; i < SECTION_ROUNDS && !err; i++)
		err = run_sections();
	mutex_unlock(&sections_lock);
	return err;
}

/* Prints a line for each operation: name, longest section and total time in ns, entries. */
static int get_sections(char *buffer, const struct kernel_param *param)
{
	unsigned int i;
	int len = 0;

	mutex_lock(&sections_lock);
	for (i = 0; i < NR_SECTIONS; i++)
		len += sysfs_emit_at(buffer, len, "%s %llu %llu %lu\n", section_name[i],
				     result[i].longest_ns, result[i].total_ns, result[i].entries);
	mutex_unlock(&sections_lock);
	return len;
}

static const struct kernel_param_ops sections_ops = {
	.set = set_sections,
	.get = get_sections,
};
module_param_cb(test_sections, &sections_ops, NULL, 0600);
MODULE_PARM_DESC(test_sections, "TEST: writing 1 measures the longest time for which operations of the index do not reschedule; reads as the results");
