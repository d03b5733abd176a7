// SPDX-License-Identifier: GPL-2.0-only
/*
 * Takes and releases the hooks. No page is cached before all hooks on which coherence depends are
 * live. When the module is freed, no task runs its code. If a step fails, the cache stays off,
 * with the reason in the log and in sysfs; loading the module still succeeds.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/sched.h>
#include <linux/string.h>
#include <linux/sysfs.h>
#include <linux/utsname.h>

#include "../compat.h"
#include "blocks.h"

#define TMEM_TESTED_RELEASES_MAX 4

/* Kernels on which the torture tests pass. The Makefile takes the series for DKMS from here. */
static const struct tested_kernel {
	const char *release;	/* beginning of uname -r */
	unsigned int series;	/* series of the headers that the module was built with */
	/*
	 * Third number of the oldest point release that is served. Older ones have faults with
	 * which a file has wrong contents; docs/guest-support.md names them.
	 */
	unsigned int oldest;
	const char *vendor;	/* contained in uname -v */
	/* Tested point releases, as uname -v names them after the vendor. */
	const char *point_releases[TMEM_TESTED_RELEASES_MAX];
} tested_kernels[] = {
	{ "6.1.", KERNEL_VERSION(6, 1, 0), 178, "Debian", { "6.1.192" } },
	{ "6.12.", KERNEL_VERSION(6, 12, 0), 114, "Debian", { "6.12.117" } },
	{ "7.2.", KERNEL_VERSION(7, 2, 0), 12, "Debian", { "7.2.12" } },
	{ "7.3.", KERNEL_VERSION(7, 3, 0), 4, "Debian", { "7.3.4" } },
};

static bool probes_on, ftrace_on;
static bool hooks_taken;		/* guarded by tmem_hooks_mutex */

/* Returns the row of the running kernel's series and vendor, or NULL. */
static const struct tested_kernel *find_tested_kernel(void)
{
	const struct new_utsname *uts = init_utsname();
	unsigned int i;

	/* Debian has kernels of these series for other processors, too, which were not tested. */
	if (!IS_ENABLED(CONFIG_X86_64))
		return NULL;
	for (i = 0; i < ARRAY_SIZE(tested_kernels); i++) {
		if (!strncmp(uts->release, tested_kernels[i].release,
			     strlen(tested_kernels[i].release)) &&
		    tested_kernels[i].series == TMEM_BUILT_FOR &&
		    (TMEM_BUILT_IN || strstr(uts->version, tested_kernels[i].vendor)))
			return &tested_kernels[i];
	}
	return NULL;
}

/*
 * Stores the point release of the running kernel, such as "6.12.117", in @release.
 *
 * A Debian kernel has it in uname -v, behind the vendor: "#1 SMP PREEMPT_DYNAMIC Debian
 * 6.12.117-1~deb12u1 (2026-11-14)". A kernel with a built-in driver has it at the beginning of
 * uname -r.
 */
static void point_release(const struct tested_kernel *kernel, char *release, size_t size)
{
	const struct new_utsname *uts = init_utsname();
	const char *name;

	name = TMEM_BUILT_IN ? uts->release :
	       skip_spaces(strstr(uts->version, kernel->vendor) + strlen(kernel->vendor));
	strscpy(release, tmem_test_point_release(name), size);
	release[strcspn(release, "-+~ ")] = '\0';
}

/*
 * Returns whether @release is not older than the oldest point release that is served. A release
 * without a third number, such as "7.3" of a pre-release, is older. A text that names no release of
 * the series is refused, too.
 */
static bool release_served(const struct tested_kernel *kernel, const char *release)
{
	unsigned int major, minor, point = 0;

	return sscanf(release, "%u.%u.%u", &major, &minor, &point) >= 2 &&
	       KERNEL_VERSION(major, minor, 0) == kernel->series && point >= kernel->oldest;
}

/*
 * Makes the driver compare more reads with the disk if the point release of the running kernel was
 * not tested. The self-test cannot prove that a point release did not change mm or the block
 * layer.
 */
static void check_point_release(const struct tested_kernel *kernel, const char *release)
{
	unsigned int i;

	for (i = 0; kernel && i < TMEM_TESTED_RELEASES_MAX && kernel->point_releases[i]; i++)
		if (!strcmp(release, kernel->point_releases[i]))
			return;
	tmem_verify_untested(release);
}

/*
 * Unregisters all hooks, also after an incomplete hooks_up(). Returns true when no code of hooks/
 * runs any more. After false, the module must never be freed.
 */
static bool hooks_down(void)
{
	bool stopped;

	WRITE_ONCE(tmem_hooks_on, false);
	tmem_fs_stop();
	tmem_swap_stop();
	if (probes_on)
		tmem_probes_unregister();
	probes_on = false;
	stopped = tmem_targets_stop();
	if (stopped && ftrace_on) {
		tmem_targets_drain();
		tmem_bio_wait();
	}
	if (stopped)
		ftrace_on = false;
	tmem_hooks_none();
	return stopped;
}

static const struct tmem_target *const target_lists[] = {
	tmem_vfs_targets, tmem_fadvise_targets, tmem_bio_targets, tmem_free_targets,
	tmem_reclaim_targets, tmem_readahead_targets, tmem_migrate_targets, tmem_selftest_targets,
};

/*
 * Hooks the functions on which coherence depends, or the others. Returns 0, or an error that
 * tmem_hooks_off() has reported.
 */
static int add_targets(bool needed)
{
	const struct tmem_target *target;
	unsigned int i;
	int err;

	for (i = 0; i < ARRAY_SIZE(target_lists); i++) {
		for (target = target_lists[i]; target->name; target++) {
			if (needed == !!target->without)
				continue;
			err = tmem_target_add(target);
			if (err && needed) {
				tmem_hooks_off("cannot hook %s: error %d", target->name, err);
				return err;
			}
			if (err)
				pr_info("cannot hook %s: error %d; %s\n", target->name, err,
					target->without);
		}
	}
	return 0;
}

static int hooks_up(void)
{
	const char *why;
	int err;

	tmem_targets_reset();
	err = add_targets(true);
	if (err)
		return err;
	err = tmem_probes_register();
	if (err)
		return err;
	probes_on = true;
	err = tmem_targets_start();
	if (err) {
		tmem_hooks_off("functions cannot be redirected: error %d%s", err, err == -EBUSY ?
			       ": a live patch redirects one, or kernel.ftrace_enabled is 0" : "");
		return err;
	}
	ftrace_on = true;
	TMEM_HOLD(selftest);
	why = tmem_selftest_run();
	if (why) {
		tmem_hooks_off("self-test: %s", why);
		return -EINVAL;
	}
	/*
	 * Add the hooks on which coherence does not depend one by one, after the others are live.
	 * If a live patch redirects one of these functions, only this hook is missing.
	 */
	add_targets(false);
	tmem_hooks_set(TMEM_HOOK_REMOVED);
	tmem_hooks_set(TMEM_HOOK_DIRTY);
	return 0;
}

#define DEAD_FTRACE "the kernel gave up on ftrace; restart the guest"

static int take_hooks(void)
{
	const struct tested_kernel *kernel = find_tested_kernel();
	char release[sizeof(init_utsname()->release)];
	int err;

	lockdep_assert_held(&tmem_hooks_mutex);
	tmem_hooks_retry();
	/* A put takes spinlocks with interrupts off. On PREEMPT_RT, spinlocks sleep. */
	if (IS_ENABLED(CONFIG_PREEMPT_RT)) {
		tmem_hooks_off("real-time kernels (PREEMPT_RT) are not served; use another kernel");
		return -EOPNOTSUPP;
	}
	if (!kernel && !tmem_allow_untested) {
		tmem_hooks_off("kernel %s (%s) is not tested; allow_untested=1 uses it anyway",
			       init_utsname()->release, init_utsname()->version);
		return -EOPNOTSUPP;
	}
	strscpy(release, init_utsname()->release, sizeof(release));
	if (kernel)
		point_release(kernel, release, sizeof(release));
	if (kernel && !release_served(kernel, release) && !tmem_allow_untested) {
		tmem_hooks_off("kernel %s (%s) is older than %s%u; allow_untested=1 uses it anyway",
			       init_utsname()->release, init_utsname()->version, kernel->release,
			       kernel->oldest);
		return -EOPNOTSUPP;
	}
	err = hooks_up();
	if (err) {
		if (!hooks_down())
			__module_get(THIS_MODULE);
		tmem_hooks_report();
		return err;
	}
	check_point_release(kernel, release);
	WRITE_ONCE(tmem_hooks_on, true);
	hooks_taken = true;
	tmem_fs_init();
	tmem_swap_init();
	tmem_device_init();
	return 0;
}

static int release_hooks(void)
{
	lockdep_assert_held(&tmem_hooks_mutex);
	if (!hooks_down()) {
		tmem_hooks_off(DEAD_FTRACE);
		tmem_swap_empty();
		/*
		 * Functions of the kernel stay redirected to this module, so it must never be
		 * freed.
		 */
		__module_get(THIS_MODULE);
		return -EIO;
	}
	hooks_taken = false;
	tmem_hooks_off("hooks are released; writing 1 to hooks_enabled takes them again");
	tmem_swap_exit();
	tmem_fs_exit();
	return 0;
}

static ssize_t hooks_enabled_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%d\n", READ_ONCE(hooks_taken));
}

/* Releases or takes the hooks. While they are released, a live patch can take their functions. */
static ssize_t hooks_enabled_store(struct kobject *kobj, struct kobj_attribute *attr,
				   const char *buf, size_t count)
{
	bool on;
	int err = kstrtobool(buf, &on);

	if (err)
		return err;
	mutex_lock(&tmem_hooks_mutex);
	if (on != hooks_taken)
		err = on ? take_hooks() : release_hooks();
	mutex_unlock(&tmem_hooks_mutex);
	return err ?: count;
}

static struct kobj_attribute hooks_enabled_attribute = __ATTR_RW(hooks_enabled);

int tmem_hooks_init(void)
{
	int err;

	tmem_fs_setup();
	tmem_swap_setup();
	tmem_bio_init();
	err = tmem_mounts_init();
	if (err)
		return err;
	err = tmem_fill_init();
	if (!err)
		err = tmem_areas_init();
	if (err) {
		tmem_fill_exit();
		tmem_mounts_stop();
		tmem_mounts_exit();
		return err;
	}
	mutex_lock(&tmem_hooks_mutex);
	take_hooks();
	mutex_unlock(&tmem_hooks_mutex);
	err = sysfs_create_file(tmem_kobj, &hooks_enabled_attribute.attr);
	if (err)
		pr_warn("hooks_enabled is missing in sysfs (error %d): unload the module before a live patch\n",
			err);
	return 0;
}

/*
 * Never returns, because functions of the kernel stay redirected to this module. It is too late to
 * refuse unloading, so rmmod does not return. The replacement functions only call the originals,
 * and no page is put or got.
 */
static void never_return(void)
{
	tmem_core_set_hooks(0, DEAD_FTRACE);
	pr_crit("the kernel gave up on ftrace and cannot release the hooks: the module stays in memory and rmmod does not return until the guest is restarted\n");
	for (;;)
		schedule_timeout_idle(MAX_SCHEDULE_TIMEOUT);
}

void tmem_hooks_exit(void)
{
	/* The removal of the file waits for a task that is taking or releasing the hooks. */
	sysfs_remove_file(tmem_kobj, &hooks_enabled_attribute.attr);
	tmem_device_exit();
	/*
	 * Remove the switches of types. The switches of mounts are removed together with the
	 * mounts.
	 */
	tmem_mounts_stop();
	if (!hooks_down())
		never_return();
	tmem_swap_exit();
	tmem_fs_exit();
	tmem_mounts_exit();
	tmem_areas_exit();
	tmem_fill_exit();
}
