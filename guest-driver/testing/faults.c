// SPDX-License-Identifier: GPL-2.0-only
/*
 * Parameters with which tests inject faults, stop tasks, switch hooks off and read measurements.
 * testing.h is the interface that the driver calls.
 */
#include <linux/delay.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/sysfs.h>

#include "../core/budget.h"
#include "../hooks/fs.h"
#include "../testing.h"

/* Interval in ms at which a stopped task checks whether the test has released it. */
#define TMEM_HOLD_MS		10

/* Parameters for faults. With the value n, a fault occurs at every n'th call; with 0, never. */
unsigned int tmem_inject_ring_full;
module_param_named(inject_ring_full, tmem_inject_ring_full, uint, 0644);
MODULE_PARM_DESC(inject_ring_full, "TEST: every n'th put finds the ring full");

unsigned int tmem_inject_nomem;
module_param_named(inject_nomem, tmem_inject_nomem, uint, 0644);
MODULE_PARM_DESC(inject_nomem, "TEST: every n'th put finds no memory for the index");

unsigned int tmem_inject_nomem_device;
module_param_named(inject_nomem_device, tmem_inject_nomem_device, uint, 0644);
MODULE_PARM_DESC(inject_nomem_device, "TEST: every n'th set-up of a device finds no memory for bounce pages");

unsigned int tmem_inject_nomem_states;
module_param_named(inject_nomem_states, tmem_inject_nomem_states, uint, 0644);
MODULE_PARM_DESC(inject_nomem_states, "TEST: every n'th allocation of states for the pages of a long bio fails");

unsigned int tmem_inject_nomem_write;
module_param_named(inject_nomem_write, tmem_inject_nomem_write, uint, 0644);
MODULE_PARM_DESC(inject_nomem_write, "TEST: every n'th write finds only the last free memory for its state");

unsigned int tmem_inject_more_queues;
module_param_named(inject_more_queues, tmem_inject_more_queues, uint, 0644);
MODULE_PARM_DESC(inject_more_queues, "TEST: every n'th set-up of a device reads the largest number of request queues");

unsigned int tmem_inject_memory_error;
module_param_named(inject_memory_error, tmem_inject_memory_error, uint, 0644);
MODULE_PARM_DESC(inject_memory_error, "TEST: every n'th evicted page that the driver copies or checks has a memory error");

unsigned int tmem_inject_corrupt;
module_param_named(inject_corrupt, tmem_inject_corrupt, uint, 0644);
MODULE_PARM_DESC(inject_corrupt, "TEST: a bit of every n'th page that the host returns is flipped before the content check");

unsigned int tmem_inject_retained_changed;
module_param_named(inject_retained_changed, tmem_inject_retained_changed, uint, 0644);
MODULE_PARM_DESC(inject_retained_changed, "TEST: every n'th retained page looks changed when it is evicted");

unsigned int tmem_inject_erased_late;
module_param_named(inject_erased_late, tmem_inject_erased_late, uint, 0644);
MODULE_PARM_DESC(inject_erased_late, "TEST: every n'th part of a get (up to 64 pages) finds its index entries erased");

unsigned int tmem_inject_config_deaf;
module_param_named(inject_config_deaf, tmem_inject_config_deaf, uint, 0644);
MODULE_PARM_DESC(inject_config_deaf, "TEST: every n'th notification of a changed configuration is lost");

unsigned int tmem_inject_vq_full;
module_param_named(inject_vq_full, tmem_inject_vq_full, uint, 0644);
MODULE_PARM_DESC(inject_vq_full, "TEST: every n'th request that is sent while others are in flight finds the virtqueue full");

unsigned long tmem_test_index_bytes;
module_param_named(test_index_bytes, tmem_test_index_bytes, ulong, 0644);
MODULE_PARM_DESC(test_index_bytes, "TEST: limit of the index in bytes, its table included, if it is below the normal limit; 0: normal limit");

unsigned long tmem_test_cookies;
module_param_named(test_cookies, tmem_test_cookies, ulong, 0444);
MODULE_PARM_DESC(test_cookies, "TEST: number of cookies that a queue has left when it starts, one for each put; 0: all");

unsigned int tmem_test_sweeps;
module_param_named(test_sweeps, tmem_test_sweeps, uint, 0444);
MODULE_PARM_DESC(test_sweeps, "TEST: number of walks through the index that free entries of former pools");

module_param_named(test_index_limit, tmem_index_limit_bytes, long, 0444);
MODULE_PARM_DESC(test_index_limit, "TEST: limit of the index in bytes, for the present size of RAM");

module_param_named(test_pools_freed, tmem_pools_nr_freed, uint, 0444);
MODULE_PARM_DESC(test_pools_freed, "TEST: number of pools of former file systems whose memory is not free yet");

/**
 * tmem_inject() - decide whether a fault occurs now
 * @calls: number of calls from this place
 * @every: value of the parameter
 *
 * Return: true for every @every'th call.
 */
bool tmem_inject(atomic_t *calls, unsigned int every)
{
	return every && !((unsigned int)atomic_inc_return(calls) % every);
}

unsigned int tmem_hold_feeder, tmem_hold_probe, tmem_hold_fetch;
unsigned int tmem_hold_submit, tmem_hold_fill, tmem_hold_free;
unsigned int tmem_hold_drain, tmem_hold_put, tmem_hold_selftest, tmem_hold_write;
unsigned int tmem_hold_choice, tmem_hold_forbid;
module_param_named(test_hold_feeder, tmem_hold_feeder, uint, 0644);
MODULE_PARM_DESC(test_hold_feeder, "TEST: 1: stop the feeder thread when it is next woken; reads 2 while it waits; 0: let it continue");

module_param_named(test_hold_probe, tmem_hold_probe, uint, 0644);
MODULE_PARM_DESC(test_hold_probe, "TEST: 1: stop the next probe of the open breaker after it was sent; reads 2 while it waits; 0: let it continue");
module_param_named(test_hold_fetch, tmem_hold_fetch, uint, 0644);
MODULE_PARM_DESC(test_hold_fetch, "TEST: 1: stop the next task that has sent the requests of a fetch; reads 2 while it waits; 0: let it continue");
module_param_named(test_hold_submit, tmem_hold_submit, uint, 0644);
MODULE_PARM_DESC(test_hold_submit, "TEST: 1: stop the next process that writes to a served disk, after the blocks were erased and before the disk gets the write; reads 2 while it waits; 0: let it continue");
module_param_named(test_hold_fill, tmem_hold_fill, uint, 0644);
MODULE_PARM_DESC(test_hold_fill, "TEST: 1: stop the next read of held blocks before it looks at their records; reads 2 while it waits; 0: let it continue");
module_param_named(test_hold_free, tmem_hold_free, uint, 0644);
MODULE_PARM_DESC(test_hold_free, "TEST: 1: stop the next task that frees a page which has left the page cache, before the page is put; reads 2 while it waits; 0: let it continue");
module_param_named(test_hold_choice, tmem_hold_choice, uint, 0644);
MODULE_PARM_DESC(test_hold_choice, "TEST: 1: stop the next read of held blocks where test_hold_fill does, but stop the clock of its deadline, too; reads 2 while it waits; 0: let it continue");
module_param_named(test_hold_forbid, tmem_hold_forbid, uint, 0644);
MODULE_PARM_DESC(test_hold_forbid, "TEST: 1: stop the next task that sets the policy of a file, before it deletes the marks of pages that have left the page cache; reads 2 while it waits; 0: let it continue");
module_param_named(test_hold_write, tmem_hold_write, uint, 0644);
MODULE_PARM_DESC(test_hold_write, "TEST: 1: stop the next process that writes to a served disk, after the records were erased and before the index entries; reads 2 while it waits; 0: let it continue");
module_param_named(test_hold_drain, tmem_hold_drain, uint, 0644);
MODULE_PARM_DESC(test_hold_drain, "TEST: 1: stop the next drain of a disk, after its interval has begun and before it waits for requests; reads 2 while it waits; 0: let it continue");
module_param_named(test_hold_put, tmem_hold_put, uint, 0644);
MODULE_PARM_DESC(test_hold_put, "TEST: 1: stop the next put of a page, after all decisions that do not depend on its bytes; reads 2 while it waits; 0: let it continue");
module_param_named(test_hold_selftest, tmem_hold_selftest, uint, 0644);
MODULE_PARM_DESC(test_hold_selftest, "TEST: 1: stop before the next self-test; reads 2 while it waits; 0: let it continue");

/**
 * tmem_hold() - stop the calling task if a test requests it
 * @place: variable of the parameter test_hold_<place>
 *
 * Context: process, sleeps.
 */
void tmem_hold(unsigned int *place)
{
	if (cmpxchg(place, TMEM_HOLD_WANTED, TMEM_HOLD_HELD) != TMEM_HOLD_WANTED)
		return;
	while (READ_ONCE(*place))
		msleep(TMEM_HOLD_MS);
}

/**
 * tmem_hold_and_extend() - stop the calling task if a test requests it, without using up its time
 * @place: variable of the parameter test_hold_<place>
 * @deadline_ns: time at which the task must have ended
 *
 * Return: the deadline, later by the time for which the task was stopped.
 * Context: process, sleeps.
 */
u64 tmem_hold_and_extend(unsigned int *place, u64 deadline_ns)
{
	u64 begin_ns = ktime_get_ns();

	tmem_hold(place);
	return deadline_ns + ktime_get_ns() - begin_ns;
}

/**
 * tmem_hold_atomic() - stop the calling task, which must not sleep, if a test requests it
 * @place: variable of the parameter test_hold_<place>
 *
 * Context: any, with interrupts on.
 */
void tmem_hold_atomic(unsigned int *place)
{
	if (cmpxchg(place, TMEM_HOLD_WANTED, TMEM_HOLD_HELD) != TMEM_HOLD_WANTED)
		return;
	while (READ_ONCE(*place))
		cpu_relax();
}

unsigned long tmem_test_hooks_off, tmem_test_selftest_blind;

/*
 * Parses names from a table, separated by commas; an empty list means no bit. The function
 * allocates nothing, because a kernel with a built-in driver parses its command line before it can
 * allocate memory.
 */
static int set_mask(const char *val, const struct kernel_param *kp, const char *const *names,
		    int nr)
{
	unsigned long mask = 0;

	while (*val) {
		size_t len = strcspn(val, "\n, ");
		int i;

		for (i = 0; len && i < nr; i++)
			if (strlen(names[i]) == len && !strncmp(names[i], val, len))
				break;
		if (i == nr)
			return -EINVAL;
		if (len)
			mask |= BIT(i);
		val += len;
		if (*val)
			val++;
	}
	WRITE_ONCE(*(unsigned long *)kp->arg, mask);
	return 0;
}

static int get_mask(char *buffer, const struct kernel_param *kp)
{
	return sysfs_emit(buffer, "%#lx\n", *(unsigned long *)kp->arg);
}

static const char *const hook_names[NR_TMEM_HOOKS] = {
	[TMEM_HOOK_REMOVED] = "removed",
	[TMEM_HOOK_FREE] = "free",
	[TMEM_HOOK_DIRTY] = "dirty",
	[TMEM_HOOK_BIO] = "bio",
	[TMEM_HOOK_MOUNT] = "mount",
	[TMEM_HOOK_UNMOUNT] = "unmount",
	[TMEM_HOOK_FADVISE] = "fadvise",
	[TMEM_HOOK_DROP_SLAB] = "drop_slab",
	[TMEM_HOOK_RECLAIM] = "reclaim",
	[TMEM_HOOK_MIGRATE] = "migrate",
	[TMEM_HOOK_READAHEAD] = "readahead",
	[TMEM_HOOK_SWAP] = "swap",
	[TMEM_HOOK_SELFTEST] = "selftest",
};

static int set_hooks_off(const char *val, const struct kernel_param *kp)
{
	return set_mask(val, kp, hook_names, NR_TMEM_HOOKS);
}

static const struct kernel_param_ops hooks_off_ops = {
	.set = set_hooks_off,
	.get = get_mask,
};
module_param_cb(test_hooks_off, &hooks_off_ops, &tmem_test_hooks_off, 0644);
MODULE_PARM_DESC(test_hooks_off, "TEST: names of hooks that do nothing; the cache may then return old data");
module_param_cb(test_selftest_blind, &hooks_off_ops, &tmem_test_selftest_blind, 0444);
MODULE_PARM_DESC(test_selftest_blind, "TEST: names of hooks whose calls the self-test ignores");

static const char *const check_names[NR_TMEM_BLOCK_CHECKS] = {
	[TMEM_CHECK_ERASE] = "erase",
	[TMEM_CHECK_FORGET] = "forget",
	[TMEM_CHECK_EQUAL] = "equal",
	[TMEM_CHECK_IN_FLIGHT] = "in_flight",
	[TMEM_CHECK_READ_SEQ] = "read_seq",
	[TMEM_CHECK_GET_SEQ] = "get_seq",
	[TMEM_CHECK_FAILED] = "failed",
	[TMEM_CHECK_PASSTHROUGH] = "passthrough",
	[TMEM_CHECK_BIO_QUEUE] = "bio_queue",
	[TMEM_CHECK_DRAIN] = "drain",
	[TMEM_CHECK_BYTES] = "bytes",
	[TMEM_CHECK_WHOLE] = "whole",
	[TMEM_CHECK_VISIBLE] = "visible",
	[TMEM_CHECK_LEAVE] = "leave",
	[TMEM_CHECK_POLICY] = "policy",
	[TMEM_CHECK_DIRTY] = "dirty",
	[TMEM_CHECK_RESUME] = "resume",
	[TMEM_CHECK_RENEW] = "renew",
	[TMEM_CHECK_SECOND_HASH] = "second_hash",
	[TMEM_CHECK_LATEST] = "latest",
	[TMEM_CHECK_FORMER] = "former",
	[TMEM_CHECK_NUMBERS] = "numbers",
	[TMEM_CHECK_FILL_EPOCH] = "fill_epoch",
	[TMEM_CHECK_GRACE] = "grace",
	[TMEM_CHECK_WRITE_SEQ] = "write_seq",
	[TMEM_CHECK_GET_WRITTEN] = "get_written",
	[TMEM_CHECK_SERVED] = "served",
	[TMEM_CHECK_DRAINED] = "drained",
	[TMEM_CHECK_PRIVATE] = "private",
	[TMEM_CHECK_INVAL] = "inval",
	[TMEM_CHECK_LOST] = "lost",
	[TMEM_CHECK_BEHIND] = "behind",
	[TMEM_CHECK_ORPHAN] = "orphan",
	[TMEM_CHECK_SLOTS] = "slots",
	[TMEM_CHECK_SWAP_FILE] = "swap_file",
};

static int set_blocks_without(const char *val, const struct kernel_param *kp)
{
	return set_mask(val, kp, check_names, NR_TMEM_BLOCK_CHECKS);
}

static const struct kernel_param_ops blocks_without_ops = {
	.set = set_blocks_without,
	.get = get_mask,
};

unsigned long tmem_test_blocks_without;
module_param_cb(test_blocks_without, &blocks_without_ops, &tmem_test_blocks_without, 0644);
MODULE_PARM_DESC(test_blocks_without, "TEST: names of safety checks (testing.h) that are removed; the cache may then return old data");

char *tmem_test_release;
module_param_named(test_release, tmem_test_release, charp, 0444);
MODULE_PARM_DESC(test_release, "TEST: point release that the driver takes for that of the kernel, such as 6.12.118-1");

module_param_named(test_fs_stopped, tmem_fs_stopped, bool, 0444);
MODULE_PARM_DESC(test_fs_stopped, "TEST: N: file systems are served although the self-test has not passed; the default is Y");

unsigned int tmem_test_replace_ms;
module_param_named(test_replace_ms, tmem_test_replace_ms, uint, 0644);
MODULE_PARM_DESC(test_replace_ms, "TEST: period in milliseconds in which the tables of records are replaced, although RAM has the same size; 0: not");
unsigned int tmem_test_replaced;
module_param_named(test_replaced, tmem_test_replaced, uint, 0444);
MODULE_PARM_DESC(test_replaced, "TEST: number of begins and ends of replacements of the tables of records");
