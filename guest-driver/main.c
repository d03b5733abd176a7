// SPDX-License-Identifier: GPL-2.0-only
/*
 * virtio-tmem: a page that this guest evicts is put into a pool in the host's memory. When the
 * guest needs the page again, it reads the page from this pool instead of the disk.
 *
 * core/ sends requests to the device and has the index of the pages that the host holds. hooks/ is
 * called by the kernel when pages leave the page cache and when bios are submitted. This file sets
 * up the core first and removes it last, because the hooks call the core and the core never calls
 * the hooks.
 */
#include <linux/module.h>

#include "core/core.h"
#include "tmem.h"

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
