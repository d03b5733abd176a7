// SPDX-License-Identifier: GPL-2.0-only
/*
 * Redirects kernel functions with ftrace, in the same way as live patching does. In a kernel with
 * the patches of intree/, intree.c takes the place of this file.
 *
 * All functions are in one ftrace_ops. So if the kernel gives up on ftrace, gets stop together with
 * the hooks on which their coherence depends. The ftrace_ops must never have
 * FTRACE_OPS_FL_RECURSION, which may skip a call.
 *
 * A replacement calls the original by its address or name, and ftrace redirects this call to
 * tmem_ftrace_func(), too. tmem_ftrace_func() sees from the return address that this module is the
 * caller, and lets the call through. So a call of an original must never become a jump
 * (-fno-optimize-sibling-calls, tmem_leave()).
 */
#include <linux/ftrace.h>
#include <linux/kallsyms.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/rcupdate.h>

#include "../compat.h"
#include "hooks.h"

/* Maximum number of targets: mm and VFS 8, bios 1, swap 2, self-test 1. */
#define TMEM_TARGETS_MAX 12

/*
 * Largest distance in bytes from a function's address to its traced instruction. That instruction
 * is the first one or follows ENDBR64, and functions are aligned to this number of bytes.
 */
#define TMEM_ENTRY_MAX_BYTES 16

/* Written in process context, by one task at a time. An entry below nr_targets never changes. */
static struct tmem_target targets[TMEM_TARGETS_MAX];
static unsigned int nr_targets;
static bool registered, filtered;

DEFINE_PER_CPU(long, tmem_nr_inside);

static const struct tmem_target *find_target(unsigned long ip)
{
	/*
	 * Read the number before the entries, so that all entries below nr are complete. Pairs with
	 * tmem_target_add().
	 */
	unsigned int i, nr = smp_load_acquire(&nr_targets);

	for (i = 0; i < nr; i++)
		if (ip - targets[i].addr < TMEM_ENTRY_MAX_BYTES)
			return &targets[i];
	return NULL;
}

/*
 * Returns whether an address is in the function @name, or in a copy of it that the compiler made
 * and whose name has a suffix, such as ".constprop.0". It is not inline because of its large stack
 * frame.
 */
static noinline bool is_inside(unsigned long address, const char *name)
{
	char symbol[KSYM_SYMBOL_LEN];
	size_t bytes = strlen(name);

	sprint_symbol_no_offset(symbol, address);
	return !strncmp(symbol, name, bytes) && (!symbol[bytes] || symbol[bytes] == '.');
}

static void notrace tmem_ftrace_func(unsigned long ip, unsigned long parent_ip,
				     struct ftrace_ops *op, struct ftrace_regs *fregs)
{
	const struct tmem_target *target = find_target(ip);

	if (!target)
		return;
	if (unlikely(READ_ONCE(tmem_selftest_mapping)))
		tmem_selftest_saw_call(target->hook);
	if (tmem_hook_off(target->hook))
		return;
	if (target->entry)
		target->entry((struct tmem_args *)fregs);
	if (target->wrap && !within_module(parent_ip, THIS_MODULE) &&
	    (!target->wanted || target->wanted((struct tmem_args *)fregs)) &&
	    (!target->caller || is_inside(parent_ip, target->caller)))
		tmem_set_ip(fregs, (unsigned long)target->wrap);
}

static struct ftrace_ops tmem_ftrace_ops;

/*
 * Removes all targets. The caller has unregistered the hooks, and has waited until no task runs
 * code of this module.
 */
void tmem_targets_reset(void)
{
	nr_targets = 0;
	/*
	 * Set all fields again, because ftrace_free_filter() leaves pointers to freed memory in the
	 * structure.
	 */
	tmem_ftrace_ops = (struct ftrace_ops) {
		.func = tmem_ftrace_func,
		.flags = FTRACE_OPS_FL_IPMODIFY | FTRACE_OPS_FL_PERMANENT |
			 (IS_ENABLED(CONFIG_DYNAMIC_FTRACE_WITH_ARGS) ? 0 :
			  FTRACE_OPS_FL_SAVE_REGS),
	};
}

/* Sets the address of a function of which only the name is known. */
static int find_function(struct tmem_target *target)
{
	/* A disabled kprobe is registered only to find the address of the function by its name. */
	struct kprobe probe = { .symbol_name = target->name, .flags = KPROBE_FLAG_DISABLED };
	int err = register_kprobe(&probe);

	if (err)
		return err;
	target->addr = (unsigned long)probe.addr;
	unregister_kprobe(&probe);
	return 0;
}

/**
 * tmem_target_add() - watch a function
 * @target: function and actions; copied
 *
 * Context: process, one call at a time, before tmem_targets_start() or after it.
 *
 * Return: 0; -EBUSY if a live patch or the like redirects the function already; -EINVAL if it
 * cannot be traced; -ENOSPC if there are TMEM_TARGETS_MAX targets; -EEXIST if the address has a
 * target; -ENOENT if the kernel has no such function.
 */
int tmem_target_add(const struct tmem_target *target)
{
	struct tmem_target *new = &targets[nr_targets];
	int err = 0;

	if (nr_targets == TMEM_TARGETS_MAX)
		return -ENOSPC;
	*new = *target;
	if (!new->addr)
		err = find_function(new);
	if (err)
		return err;
	if (find_target(new->addr))
		return -EEXIST;
	/*
	 * Enter the function into the table before ftrace traces it; otherwise its first calls
	 * could find no target. Complete the entry before counting it; pairs with find_target().
	 */
	smp_store_release(&nr_targets, nr_targets + 1);
	filtered = true;
	err = ftrace_set_filter_ip(&tmem_ftrace_ops, new->addr, 0, 0);
	if (err)
		WRITE_ONCE(nr_targets, nr_targets - 1);
	else if (registered)
		tmem_hooks_set(new->hook);
	return err;
}

/*
 * Begins to watch all functions added so far. Returns 0; or -EBUSY as in tmem_target_add(), or if
 * tracing is switched off by sysctl.
 */
int tmem_targets_start(void)
{
	unsigned int i;
	int err;

	err = register_ftrace_function(&tmem_ftrace_ops);
	if (err)
		return err;
	registered = true;
	for (i = 0; i < nr_targets; i++)
		tmem_hooks_set(targets[i].hook);
	return 0;
}

/*
 * Stops watching all functions; tmem_targets_drain() then waits. After ftrace_kill(), the kernel no
 * longer changes call sites, so functions stay redirected. Then it returns false, and this module
 * must never be freed.
 */
bool tmem_targets_stop(void)
{
	if (registered && unregister_ftrace_function(&tmem_ftrace_ops))
		return false;
	registered = false;
	/*
	 * Do not free the filter twice: after a start that failed, a second free would corrupt the
	 * kernel's lists.
	 */
	if (filtered)
		ftrace_free_filter(&tmem_ftrace_ops);
	filtered = false;
	return true;
}

/*
 * Waits until no task is in the code of this module, after tmem_targets_stop(). The first
 * synchronize_rcu_tasks() waits for tasks that were redirected and have not entered yet, the second
 * one for tasks that are leaving.
 */
void tmem_targets_drain(void)
{
	synchronize_rcu_tasks();
	tmem_users_wait(&tmem_nr_inside);
	synchronize_rcu_tasks();
}
