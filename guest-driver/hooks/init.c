// SPDX-License-Identifier: GPL-2.0-only
/*
 * Brings the hooks up in an order in which nothing can be cached before all
 * that keeps it right is live, and down in an order in which no code of this
 * module runs when it is freed. What cannot be done leaves the cache off, with
 * the reason in the log and in sysfs; loading succeeds all the same.
 */
#include <linux/module.h>
#include <linux/sched.h>
#include <linux/utsname.h>

#include "../compat.h"
#include "hooks.h"

/* Kernels on which the torture tests pass. */
static const struct {
	const char *release;	/* beginning of uname -r */
	unsigned int series;	/* of the headers it was built with */
	const char *vendor;	/* somewhere in uname -v */
} tested_kernels[] = {
	{ "6.1.", KERNEL_VERSION(6, 1, 0), "Debian" },
	{ "6.12.", KERNEL_VERSION(6, 12, 0), "Debian" },
	{ "7.2.", KERNEL_VERSION(7, 2, 0), "Debian" },
};

static bool allow_untested;
module_param(allow_untested, bool, 0444);
MODULE_PARM_DESC(allow_untested, "use kernels that are not on the list of tested ones");

const char *const tmem_hook_names[NR_TMEM_HOOKS] = {
	[TMEM_HOOK_REMOVED] = "removed",
	[TMEM_HOOK_DIRTY] = "dirty",
	[TMEM_HOOK_TRUNCATE] = "truncate",
	[TMEM_HOOK_DIRECT] = "direct",
	[TMEM_HOOK_MOUNT] = "mount",
	[TMEM_HOOK_UNMOUNT] = "unmount",
	[TMEM_HOOK_FADVISE] = "fadvise",
	[TMEM_HOOK_DROP_SLAB] = "drop_slab",
	[TMEM_HOOK_MOVE_EXT] = "move_ext",
	[TMEM_HOOK_SWAPON] = "swapon",
	[TMEM_HOOK_BMAP] = "bmap",
	[TMEM_HOOK_READAHEAD] = "readahead",
	[TMEM_HOOK_READ_FOLIO] = "read_folio",
	[TMEM_HOOK_SELFTEST] = "selftest",
};

#ifdef TMEM_TEST
unsigned long tmem_test_hooks_off, tmem_test_selftest_blind;

/* A list of names from tmem_hook_names[], separated by commas; empty for none. */
static int set_hooks_off(const char *val, const struct kernel_param *kp)
{
	char *list = kstrdup(val, GFP_KERNEL), *rest = list, *name;
	unsigned long mask = 0;
	int i, err = list ? 0 : -ENOMEM;

	while (!err && rest && (name = strsep(&rest, ","))) {
		name = strim(name);
		if (!*name)
			continue;
		i = match_string(tmem_hook_names, NR_TMEM_HOOKS, name);
		if (i < 0)
			err = -EINVAL;
		else
			mask |= BIT(i);
	}
	kfree(list);
	if (!err)
		WRITE_ONCE(*(unsigned long *)kp->arg, mask);
	return err;
}

static int get_hooks_off(char *buffer, const struct kernel_param *kp)
{
	return sysfs_emit(buffer, "%#lx\n", *(unsigned long *)kp->arg);
}

static const struct kernel_param_ops hooks_off_ops = {
	.set = set_hooks_off,
	.get = get_hooks_off,
};
module_param_cb(test_hooks_off, &hooks_off_ops, &tmem_test_hooks_off, 0644);
MODULE_PARM_DESC(test_hooks_off, "names of hooks that shall do nothing; the cache is wrong then");
module_param_cb(test_selftest_blind, &hooks_off_ops, &tmem_test_selftest_blind, 0444);
MODULE_PARM_DESC(test_selftest_blind, "names of hooks that the self-test shall not see called");
#endif

bool tmem_hooks_on;

static u64 live;		/* bits of enum tmem_hook */
static char off_reason[256];	/* written once */
static bool probes_on, ftrace_on;

/**
 * tmem_hooks_set - a hook is live
 * @hook: which
 *
 * Process context, one at a time.
 */
void tmem_hooks_set(enum tmem_hook hook)
{
	live |= BIT_ULL(hook);
	tmem_core_set_hooks(live, *off_reason ? off_reason : NULL);
}

/**
 * tmem_hooks_off - say why the cache, or a file system, stays off
 * @fmt: a reason; the first one is kept
 *
 * Process context, one at a time.
 */
void tmem_hooks_off(const char *fmt, ...)
{
	va_list args;

	if (*off_reason)
		return;
	va_start(args, fmt);
	vscnprintf(off_reason, sizeof(off_reason), fmt, args);
	va_end(args);
	pr_warn("virtio_tmem: off: %s\n", off_reason);
	tmem_core_set_hooks(live, off_reason);
}

static bool kernel_tested(void)
{
	const struct new_utsname *uts = init_utsname();
	unsigned int i;

	/* Debian has these series for other processors, too. */
	if (!IS_ENABLED(CONFIG_X86_64))
		return false;
	for (i = 0; i < ARRAY_SIZE(tested_kernels); i++) {
		if (!strncmp(uts->release, tested_kernels[i].release,
			     strlen(tested_kernels[i].release)) &&
		    tested_kernels[i].series == TMEM_BUILT_FOR &&
		    strstr(uts->version, tested_kernels[i].vendor))
			return true;
	}
	return false;
}

/* Unregisters all; no code of hooks/ runs afterwards. Any part may not have been begun. */
static void hooks_down(void)
{
	WRITE_ONCE(tmem_hooks_on, false);
	tmem_fs_stop();
	if (probes_on)
		tmem_probes_unregister();
	probes_on = false;
	tmem_ftrace_stop();
	if (ftrace_on)
		tmem_ftrace_drain();
	ftrace_on = false;
	live = 0;
}

static int hooks_up(void)
{
	const char *why;
	int err;

	err = tmem_verify_init();
	if (err) {
		tmem_hooks_off("out of memory");
		return err;
	}
	err = tmem_coherence_add();
	if (err)
		return err;
	why = tmem_selftest_add();
	if (why) {
		tmem_hooks_off("self-test: %s", why);
		return -EINVAL;
	}
	err = tmem_probes_register();
	if (err)
		return err;
	probes_on = true;
	err = tmem_ftrace_start();
	if (err) {
		tmem_hooks_off("functions cannot be redirected: error %d%s", err, err == -EBUSY ?
			       ": a live patch has one, or sysctl kernel.ftrace_enabled is 0" : "");
		return err;
	}
	ftrace_on = true;
	why = tmem_selftest_run();
	if (why) {
		tmem_hooks_off("self-test: %s", why);
		return -EINVAL;
	}
	tmem_hooks_set(TMEM_HOOK_REMOVED);
	tmem_hooks_set(TMEM_HOOK_DIRTY);
	return 0;
}

/**
 * tmem_hooks_init - bring the hooks up
 *
 * Return: 0, also when the cache stays off; -ENOMEM.
 */
int tmem_hooks_init(void)
{
	int err = tmem_mounts_init();

	if (err)
		return err;
	/* A put takes locks with interrupts off: on such a kernel they sleep. */
	if (IS_ENABLED(CONFIG_PREEMPT_RT)) {
		tmem_hooks_off("real-time kernels (PREEMPT_RT) are not served");
		return 0;
	}
	if (!kernel_tested() && !allow_untested) {
		tmem_hooks_off("kernel %s (%s) is not tested; allow_untested=1 uses it anyway",
			       init_utsname()->release, init_utsname()->version);
		return 0;
	}
	if (hooks_up()) {
		hooks_down();
		tmem_verify_exit();
		tmem_core_set_hooks(0, off_reason);
		return 0;
	}
	WRITE_ONCE(tmem_hooks_on, true);
	tmem_fs_init();
	tmem_device_init();
	return 0;
}

/**
 * tmem_hooks_exit - take the hooks down and forget all file systems
 */
void tmem_hooks_exit(void)
{
	tmem_device_exit();
	/* No more switching of file system types; those of mounts go with them. */
	tmem_mounts_stop();
	hooks_down();
	/* Verifications look at folios only, but their file systems are compared. */
	tmem_verify_exit();
	tmem_fs_exit();
	tmem_mounts_exit();
}
