// SPDX-License-Identifier: GPL-2.0-only
/*
 * Parameters with which tests inject faults, stop tasks, switch hooks off and read measurements.
 * testing.h is the interface that the driver calls.
 */
#include <linux/delay.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <linux/sysfs.h>

#include "../core/budget.h"
#include "../hooks/hooks.h"
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

/**
 * tmem_hold() - stop the calling task if a test requests it
 * @place: parameter
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
MODULE_PARM_DESC(test_blocks_without, "TEST: names of safety checks of hooks/blocks.h that are removed; the cache may then return old data");

char *tmem_test_release;
module_param_named(test_release, tmem_test_release, charp, 0444);
MODULE_PARM_DESC(test_release, "TEST: point release that the driver takes for that of the kernel, such as 6.12.118-1");

unsigned int tmem_test_replace_ms;
module_param_named(test_replace_ms, tmem_test_replace_ms, uint, 0644);
MODULE_PARM_DESC(test_replace_ms, "TEST: period in milliseconds in which the tables of records are replaced, although RAM has the same size; 0: not");
unsigned int tmem_test_replaced;
module_param_named(test_replaced, tmem_test_replaced, uint, 0444);
MODULE_PARM_DESC(test_replaced, "TEST: number of begins and ends of replacements of the tables of records");
