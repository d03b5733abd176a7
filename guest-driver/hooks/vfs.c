// SPDX-License-Identifier: GPL-2.0-only
/*
 * Hooks of mounts and unmounts, of fadvise() (fadvise.c), and of the second half of drop_caches.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

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

static bool wants_set_mnt_opts(struct tmem_args *args)
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

static bool wants_shutdown_super(struct tmem_args *args)
{
	return tmem_fs_serves((void *)tmem_arg(args, 0));
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

/**
 * tmem_vfs_add() - hook the functions of VFS that the driver needs in every kernel
 *
 * Return: 0 or an error, which tmem_hooks_off() has reported.
 */
int tmem_vfs_add(void)
{
	const struct tmem_target targets[] = {
		{ (unsigned long)generic_shutdown_super, TMEM_HOOK_UNMOUNT, NULL,
		  wrap_shutdown_super, wants_shutdown_super },
		{ (unsigned long)generic_fadvise, TMEM_HOOK_FADVISE, NULL, tmem_wrap_fadvise,
		  tmem_wants_fadvise },
		/*
		 * Without this hook, the driver registers a mount when it sees the mount's first
		 * bio.
		 */
		{ (unsigned long)security_sb_set_mnt_opts, TMEM_HOOK_MOUNT, NULL,
		  wrap_set_mnt_opts, wants_set_mnt_opts },
	};
	unsigned int i, nr = ARRAY_SIZE(targets) - !TMEM_HAS_MOUNT_HOOK;
	int err;

	for (i = 0; i < nr; i++) {
		err = tmem_target_add(&targets[i]);
		if (err) {
			tmem_hooks_off("cannot hook %s: error %d",
				       tmem_hook_names[targets[i].hook], err);
			return err;
		}
	}
	return 0;
}

/**
 * tmem_drop_slab_add() - hook drop_slab()
 *
 * Coherence does not depend on this hook. Without it, drop_caches_flush has no effect.
 */
void tmem_drop_slab_add(void)
{
	const struct tmem_target target = {
		.hook = TMEM_HOOK_DROP_SLAB,
		.entry = entry_drop_slab,
	};
	int err = tmem_target_add_name("drop_slab", &target);

	if (err)
		pr_info("cannot hook drop_slab: error %d; drop_caches_flush does nothing\n",
			err);
}
