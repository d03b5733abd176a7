// SPDX-License-Identifier: GPL-2.0-only
/*
 * State of the hooks: which hooks are live, and why the cache is off. All files of hooks/ may
 * change it; only init.c decides when hooks are taken and released.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>
#include <linux/moduleparam.h>

#include "hooks.h"

bool tmem_allow_untested;
module_param_named(allow_untested, tmem_allow_untested, bool, 0444);
MODULE_PARM_DESC(allow_untested, "use kernels that are not on the list of tested ones or are too old, and file systems whose block size is not tested");

bool tmem_hooks_on;

static u64 live;		/* bits of enum tmem_hook */
static char off_reason[256];	/* first reason since the hooks were last taken; empty if none */

/**
 * tmem_hooks_report() - pass the state of the hooks on to the core
 */
void tmem_hooks_report(void)
{
	tmem_core_set_hooks(live, *off_reason ? off_reason : NULL);
}

/**
 * tmem_hooks_set() - record that a hook is live
 * @hook: the hook
 *
 * Context: process, one call at a time.
 */
void tmem_hooks_set(enum tmem_hook hook)
{
	live |= BIT_ULL(hook);
	tmem_hooks_report();
}

/**
 * tmem_hooks_off() - keep the cache off, with a reason
 * @fmt: the reason; the first one is kept until the hooks are taken again
 *
 * Context: process, one call at a time.
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

/**
 * tmem_hooks_none() - record that no hook is live, and keep the reason why the cache is off
 */
void tmem_hooks_none(void)
{
	live = 0;
}

/**
 * tmem_hooks_retry() - clear the reason why the cache is off, because the hooks are about to be
 * taken
 */
void tmem_hooks_retry(void)
{
	*off_reason = '\0';
}
