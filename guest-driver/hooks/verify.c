// SPDX-License-Identifier: GPL-2.0-only
/*
 * Decides which hits are compared with the disk. For a read in the sample, the disk reads all pages
 * although the host has returned them, and the record of each block is compared with the check of
 * the host's bytes (fill.c, records.c).
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/module.h>
#include <linux/utsname.h>

#include "hooks.h"

/*
 * By default, the first TMEM_VERIFY_FIRST_HITS hits of each file system are compared with the disk,
 * and then one read in TMEM_VERIFY_EVERY.
 */
#define TMEM_VERIFY_FIRST_HITS 1000
#define TMEM_VERIFY_EVERY 1024
/*
 * On a kernel release that was not tested, one read in this many is compared with the disk.
 * docs/guest-support.md has the cost.
 */
#define TMEM_VERIFY_UNTESTED 64

static int verify_every = -1;

/* Kernel release if it was not tested, otherwise empty. Guarded by kernel_param_lock(). */
static char untested_release[__NEW_UTS_LEN + 1];
/* Value that verify_every=-1 stands for. It is set before the first hit. */
static unsigned int default_every = TMEM_VERIFY_EVERY;

/* Shows in "state" how many hits are compared. The caller holds kernel_param_lock(). */
static void show_untested(void)
{
	char note[128];
	int every = verify_every < 0 ? TMEM_VERIFY_UNTESTED : verify_every;

	if (!*untested_release)
		return;
	if (every)
		scnprintf(note, sizeof(note),
			  "kernel %s is not tested; one read in %d is compared with the disk",
			  untested_release, every);
	else
		scnprintf(note, sizeof(note),
			  "kernel %s is not tested; no read is compared with the disk",
			  untested_release);
	tmem_core_set_note(note);
}

static int set_verify_every(const char *val, const struct kernel_param *kp)
{
	int err = param_set_int(val, kp);

	if (!err)
		show_untested();
	return err;
}

static const struct kernel_param_ops verify_every_ops = {
	.set = set_verify_every,
	.get = param_get_int,
};
module_param_cb(verify_every, &verify_every_ops, &verify_every, 0644);
MODULE_PARM_DESC(verify_every,
		 "compare each n-th read that the host serves with the disk (0: none; -1: the first 1000 pages of each file system, then each 1024th read, or each 64th on an untested kernel release)");

/*
 * Counts the hits of a read, and returns whether they are to be compared with the disk. Context:
 * any but NMI.
 */
bool tmem_verify_due(struct tmem_fs *fs, unsigned int pages)
{
	int every = READ_ONCE(verify_every);

	if (!every)
		return false;
	if (every < 0) {
		/* Count with an atomic, which all CPUs write, only until the limit is reached. */
		if (atomic_read(&fs->first_hits) < TMEM_VERIFY_FIRST_HITS) {
			atomic_add(pages, &fs->first_hits);
			return true;
		}
		every = default_every;
	}
	/*
	 * Each CPU selects one in @every of its own reads. So about one in @every of all hits is
	 * compared.
	 */
	return !(this_cpu_inc_return(fs->cpu->reads) % every);
}

/*
 * Compares more hits because the kernel release was not tested. If the operator set verify_every,
 * that value is used. Context: process, before there are hits.
 */
void tmem_verify_untested(const char *release)
{
	kernel_param_lock(THIS_MODULE);
	default_every = TMEM_VERIFY_UNTESTED;
	strscpy(untested_release, release, sizeof(untested_release));
	show_untested();
	kernel_param_unlock(THIS_MODULE);
	pr_notice("kernel %s is not tested: one read in %u is compared with the disk unless verify_every is set\n",
		  release, TMEM_VERIFY_UNTESTED);
}
