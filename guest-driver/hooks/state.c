// SPDX-License-Identifier: GPL-2.0-only
/*
 * State of the hooks: which hooks are live, why the cache is off, which sections of code run, and
 * what the hooks see during the self-test. All files of hooks/ may change it; only init.c decides
 * when hooks are taken and released.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/moduleparam.h>
#include <linux/percpu.h>
#include <linux/sched.h>

#include "hooks.h"

bool tmem_allow_untested;
module_param_named(allow_untested, tmem_allow_untested, bool, 0444);
MODULE_PARM_DESC(allow_untested, "use kernels that are not on the list of tested ones or are too old, and file systems whose block size is not tested");

DEFINE_MUTEX(tmem_hooks_mutex);	/* held while hooks are taken, added or released */
bool tmem_hooks_on;

static u64 live;		/* bits of enum tmem_hook */
static char off_reason[256];	/* first reason since the hooks were last taken; empty if none */

/* Passes the state of the hooks on to the core. */
void tmem_hooks_report(void)
{
	tmem_core_set_hooks(live, *off_reason ? off_reason : NULL);
}

/* Records that a hook is live. Context: process, one call at a time. */
void tmem_hooks_set(enum tmem_hook hook)
{
	live |= BIT_ULL(hook);
	tmem_hooks_report();
}

/*
 * Keeps the cache off. The first reason is kept until the hooks are taken again. Context: process,
 * one call at a time.
 */
void tmem_hooks_off(const char *fmt, ...)
{
	va_list args;

	if (*off_reason)
		return;
	va_start(args, fmt);
	vscnprintf(off_reason, sizeof(off_reason), fmt, args);
	va_end(args);
	pr_warn("off: %s\n", off_reason);
	tmem_hooks_report();
}

/* Records that no hook is live, and keeps the reason why the cache is off. */
void tmem_hooks_none(void)
{
	live = 0;
}

/* Clears the reason why the cache is off, because the hooks are about to be taken. */
void tmem_hooks_retry(void)
{
	*off_reason = '\0';
}

/* --- sections that may last long ------------------------------------------------------------ */

static long sum(const long __percpu *users)
{
	long all = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		all += READ_ONCE(*per_cpu_ptr(users, cpu));
	return all;
}

/*
 * Waits until all sections have ended. No section can begin any more, and the caller sees the
 * counts of all sections that have begun. From then on the counts only become smaller. So a sum of
 * 0 means that all sections have ended, although the CPUs are read one after the other.
 *
 * The function reads the counts once per tick. Waking it would need a cache line that all tasks
 * share when they end a section. The function rarely has to wait.
 */
void tmem_users_wait(const long __percpu *users)
{
	while (sum(users))
		schedule_timeout_idle(1);
	/* See all accesses of the sections that have ended; pairs with tmem_users_end(). */
	smp_mb();
}

/* --- self-test: calls and folios of its mapping that the hooks see --------------------------- */

/* The mapping under test, or NULL. When it is cleared, no folio of the mapping exists any more. */
struct address_space *tmem_selftest_mapping;

struct tmem_seen tmem_seen;

/* Records that the removal tracepoint fired for the test's mapping. */
void tmem_selftest_saw_removed(const struct folio *folio)
{
	if (folio->index >= TMEM_SELFTEST_PAGES || tmem_selftest_blind(TMEM_HOOK_REMOVED))
		return;
	if (folio_ref_count(folio)) {
		atomic_inc(&tmem_seen.removed);
	} else {
		atomic_inc(&tmem_seen.reclaimed);
		WRITE_ONCE(tmem_seen.evicted, folio);
	}
}

/* Records that a folio which left the test's mapping is being freed. */
void tmem_selftest_saw_freed(const struct folio *folio)
{
	if (folio == READ_ONCE(tmem_seen.evicted) && !tmem_selftest_blind(TMEM_HOOK_FREE))
		atomic_inc(&tmem_seen.freed);
}

/* Records that the dirty tracepoint fired for the test's mapping. */
void tmem_selftest_saw_dirty(const struct folio *folio)
{
	if (tmem_selftest_blind(TMEM_HOOK_DIRTY))
		return;
	tmem_seen.dirty_index = folio->index;
	atomic_inc(&tmem_seen.dirty);
}

/* Records that a watched function was entered during the test. */
void tmem_selftest_saw_call(enum tmem_hook hook)
{
	if (!tmem_selftest_blind(hook))
		set_bit(hook, &tmem_seen.calls);
}
