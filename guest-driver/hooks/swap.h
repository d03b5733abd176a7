/* SPDX-License-Identifier: GPL-2.0-only */
/* Swap areas: shared by slots.c, which the hooks use, and swap.c, which adds and removes them. */
#ifndef _TMEM_SWAP_H
#define _TMEM_SWAP_H

#include <linux/blk_types.h>
#include <linux/swap.h>
#include <linux/workqueue.h>

#include "hooks.h"

/* Number of slots of a part of a swap area, whose bits fill a page. */
#define TMEM_PART_SLOTS		(PAGE_SIZE * BITS_PER_BYTE)

/*
 * A swap area, also one that is refused. Freed after a grace period of RCU. A slot is served from
 * when its part has a bitmap: the kernel shows no module how many slots a swap file has.
 */
struct swap_area {
	struct block_device *bdev;	/* the partition, or the device of the swap file */
	const void *holder;		/* bd_holder of the device; only compared */
	struct tmem_fs *fs;		/* NULL if there was no memory; written once */
	unsigned long nr;		/* most slots that it may have, or 0 if it is not served */
	unsigned long wanted;		/* 1 + number of a written part without a bitmap, or 0 */
	bool any;			/* a bit of @freed may be set */
	/* Used by the work item that erases slots: */
	unsigned long at;		/* where the search goes on */
	unsigned long behind;		/* time in jiffies of the first run that left bits, or 0 */

	unsigned long *freed[];		/* by part: slots that were freed and not erased yet */
};

/* By the kernel's number of the swap area. Written by the work item and at the end. */
extern struct swap_area __rcu *tmem_swap_areas[MAX_SWAPFILES];
/* Devices, with references (tmem_bdev_hold()), that the work item examines. */
extern struct block_device *tmem_swap_noted[MAX_SWAPFILES];
/* Work item of swap.c that adds and removes swap areas. */
extern struct delayed_work tmem_swap_work;

/* Module parameter "swap": 1 yes, 0 no, -1 if the device has VIRTIO_TMEM_F_SWAP. */
extern int tmem_swap_parameter;
extern const struct tmem_target tmem_swap_targets[];

#endif /* _TMEM_SWAP_H */
