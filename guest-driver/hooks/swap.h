/* SPDX-License-Identifier: GPL-2.0-only */
/* Swap areas: shared by slots.c, which the hooks use, and swap.c, which adds and removes them. */
#ifndef _TMEM_SWAP_H
#define _TMEM_SWAP_H

#include <linux/blk_types.h>
#include <linux/swap.h>
#include <linux/workqueue.h>

#include "hooks.h"

/* A swap partition, also one that is refused. Freed after a grace period of RCU. */
struct swap_area {
	struct block_device *bdev;
	const void *holder;		/* bd_holder of the device; only compared */
	struct tmem_fs *fs;		/* NULL if there was no memory; written once */
	unsigned long nr;		/* number of slots, or 0 if the partition is not served */
	unsigned long *freed;		/* slots that were freed and not erased yet */
	bool any;			/* a bit of @freed may be set */
	/* Used by tmem_erase_work: */
	unsigned long at;		/* where the search goes on */
	unsigned long behind;		/* time in jiffies of the first run that left bits, or 0 */
};

/* By the kernel's number of the swap area. Written by the work item and at the end. */
extern struct swap_area __rcu *tmem_swap_areas[MAX_SWAPFILES];
/* Devices, with references (tmem_bdev_hold()), that the work item examines. */
extern struct block_device *tmem_swap_noted[MAX_SWAPFILES];
/* Bitmap by swap type: areas that are swap files, which the driver refuses. */
extern unsigned long tmem_swap_files;
/* Work item of swap.c that adds and removes swap areas. */
extern struct delayed_work tmem_swap_work;

/* Module parameter "swap": 1 yes, 0 no, -1 if the device has VIRTIO_TMEM_F_SWAP. */
extern int tmem_swap_parameter;
extern const struct tmem_target tmem_swap_targets[];

#endif /* _TMEM_SWAP_H */
