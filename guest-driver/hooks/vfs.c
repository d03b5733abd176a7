// SPDX-License-Identifier: GPL-2.0-only
/* Hooks of mounts and unmounts, and of the second half of drop_caches. */
#include <linux/fs.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/security.h>

#include "../compat.h"
#include "hooks.h"

/*
 * Registers a new mount before the first file is opened on it. Coherence does not
 * depend on this, but a disk that cannot be drained is recorded only if its mount was seen from the
 * start (areas.c).
 *
 * vfs_get_tree() would be the natural place, but it may wait for a disk without limit, and the
 * unloading of this module would wait with it. At its end it calls security_sb_set_mnt_opts(),
 * which this function replaces, with s_umount held for writing. The replacement allocates memory
 * but does not wait for anything else.
 */
static int wrap_set_mnt_opts(struct super_block *sb, void *options, unsigned long kern_flags,
			     unsigned long *set_kern_flags)
{
	int err;

	tmem_enter();
	err = security_sb_set_mnt_opts(sb, options, kern_flags, set_kern_flags);
	if (!err)
		tmem_fs_mounted(sb);
	tmem_leave();
	return err;
}

static bool wants_super(struct tmem_args *args)
{
	return tmem_fs_serves((void *)tmem_arg(args, 0));
}

/* Replacement of generic_shutdown_super(): frees the pool before the super block is shut down. */
static void wrap_shutdown_super(struct super_block *sb)
{
	tmem_enter();
	tmem_fs_drop(sb);
	tmem_original(generic_shutdown_super)(sb);
	tmem_leave();
}

/*
 * Parameter for users who want an empty cache for a measurement. Writing 3 to drop_caches first
 * drops pages, which the driver puts, and then calls drop_slab(), whose hook empties the pools.
 */
static bool drop_caches_flush;
module_param(drop_caches_flush, bool, 0644);
MODULE_PARM_DESC(drop_caches_flush, "writing 2 or 3 to drop_caches also empties the pools of this guest at the host");

static void entry_drop_slab(struct tmem_args *args)
{
	if (READ_ONCE(drop_caches_flush))
		tmem_fs_flush_all();
}

const struct tmem_target tmem_vfs_targets[] = {
	{
		.name = "generic_shutdown_super",
		.addr = (unsigned long)generic_shutdown_super,
		.hook = TMEM_HOOK_UNMOUNT,
		.wrap = wrap_shutdown_super,
		.wanted = wants_super,
	},
	{
		.name = "drop_slab",
		.hook = TMEM_HOOK_DROP_SLAB,
		.entry = entry_drop_slab,
		.without = "drop_caches_flush does nothing",
	},
	/* Without this hook, the driver registers a mount when it sees the mount's first bio. */
	{
		.name = TMEM_HAS_MOUNT_HOOK ? "security_sb_set_mnt_opts" : NULL,
		.addr = (unsigned long)security_sb_set_mnt_opts,
		.hook = TMEM_HOOK_MOUNT,
		.wrap = wrap_set_mnt_opts,
		.wanted = wants_super,
	},
	{}
};
