// SPDX-License-Identifier: GPL-2.0-only
/*
 * virtio-tmem: a page that this guest evicts is put into a pool in the host's memory. When the page
 * is missed, it comes from there instead of the disk.
 *
 * core/ talks to the device and knows which pages it holds; hooks/ sees pages come and go. This
 * file loads and unloads both. The hooks come last and go first, because they call the core and the
 * core never calls them.
 */
#include <linux/delay.h>
#include <linux/module.h>
#include <linux/moduleparam.h>

#include "core/core.h"
#include "tmem.h"

/* A reader that would have to wait longer than this should read the disk. */
#define DEADLINE_MS_MAX		1000
/* A spin of more microseconds than a context switch takes wastes a vCPU. */
#define SPIN_US_MAX		1000
/* Interval at which a task that a test holds checks whether it may go on. */
#define TMEM_HOLD_MS		10

static int set_deadline_ms(const char *value, const struct kernel_param *param)
{
	return param_set_uint_minmax(value, param, 1, DEADLINE_MS_MAX);
}

static int set_spin_us(const char *value, const struct kernel_param *param)
{
	return param_set_uint_minmax(value, param, 0, SPIN_US_MAX);
}

static const struct kernel_param_ops deadline_ms_ops = {
	.set = set_deadline_ms,
	.get = param_get_uint,
};

static const struct kernel_param_ops spin_us_ops = {
	.set = set_spin_us,
	.get = param_get_uint,
};

unsigned int tmem_deadline_ms = 20;
module_param_cb(deadline_ms, &deadline_ms_ops, &tmem_deadline_ms, 0644);
MODULE_PARM_DESC(deadline_ms, "Longest time that a read waits for the host, in all (1-1000, default 20)");

unsigned int tmem_spin_us = 30;
module_param_cb(spin_us, &spin_us_ops, &tmem_spin_us, 0644);
MODULE_PARM_DESC(spin_us, "How much of it is spent polling before sleeping (0-1000, default 30)");

static const char *const admission_names[] = { "off", "adaptive" };

static int set_admission(const char *value, const struct kernel_param *param)
{
	int nr = sysfs_match_string(admission_names, value);

	if (nr < 0)
		return nr;
	WRITE_ONCE(tmem_admission, nr);
	return 0;
}

static int get_admission(char *buffer, const struct kernel_param *param)
{
	return sysfs_emit(buffer, "%s\n", admission_names[READ_ONCE(tmem_admission)]);
}

static const struct kernel_param_ops admission_ops = {
	.set = set_admission,
	.get = get_admission,
};

bool tmem_admission = true;
module_param_cb(admission, &admission_ops, NULL, 0644);
MODULE_PARM_DESC(admission, "Which pages are put once the host does not keep all: adaptive (default): those evicted before; off: all");

#ifdef TMEM_TEST
/* Faults for tests: they occur the n'th time, and every n'th time after it; 0 is never. */
unsigned int tmem_inject_ring_full;
module_param_named(inject_ring_full, tmem_inject_ring_full, uint, 0644);
MODULE_PARM_DESC(inject_ring_full, "TEST: every n'th put finds the ring full");

unsigned int tmem_inject_nomem;
module_param_named(inject_nomem, tmem_inject_nomem, uint, 0644);
MODULE_PARM_DESC(inject_nomem, "TEST: every n'th put finds no memory for the index");

unsigned int tmem_inject_corrupt;
module_param_named(inject_corrupt, tmem_inject_corrupt, uint, 0644);
MODULE_PARM_DESC(inject_corrupt, "TEST: every n'th page got has a bit flipped before its check");

unsigned long tmem_test_index_bytes;
module_param_named(test_index_bytes, tmem_test_index_bytes, ulong, 0644);
MODULE_PARM_DESC(test_index_bytes, "TEST: the most that the index may use, its table included; 0 is as much as there is");

unsigned long tmem_test_cookies;
module_param_named(test_cookies, tmem_test_cookies, ulong, 0444);
MODULE_PARM_DESC(test_cookies, "TEST: puts of a queue until its cookies are used up; 0 is all there are");

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

unsigned int tmem_hold_replace, tmem_hold_verify, tmem_hold_breaker;
module_param_named(test_hold_replace, tmem_hold_replace, uint, 0644);
MODULE_PARM_DESC(test_hold_replace, "TEST: 1 holds the task that replaces a file system, after it found the new one and before it frees the old one; 2: held; 0: go on");
module_param_named(test_hold_verify, tmem_hold_verify, uint, 0644);
MODULE_PARM_DESC(test_hold_verify, "TEST: the same for the task that is about to compare a hit with the disk");
module_param_named(test_hold_breaker, tmem_hold_breaker, uint, 0644);
MODULE_PARM_DESC(test_hold_breaker, "TEST: the same for the task that opened the breaker, before it reports that");

/**
 * tmem_hold() - wait here if a test requests that
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
#endif

static int __init tmem_init(void)
{
	int err;

	err = tmem_core_init();
	if (err)
		return err;
	err = tmem_hooks_init();
	if (err)
		tmem_core_exit();
	return err;
}

static void __exit tmem_exit(void)
{
	tmem_hooks_exit();
	tmem_core_exit();
}

module_init(tmem_init);
module_exit(tmem_exit);

MODULE_DESCRIPTION("Transcendent memory: page cache in a pool of the host");
MODULE_VERSION(TMEM_VERSION_STRING);
MODULE_LICENSE("GPL");
