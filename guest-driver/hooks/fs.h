/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Internal interface of the table of file systems: for fs.c, which looks file systems up for hooks,
 * and for discover.c, which adds and removes them.
 */
#ifndef _TMEM_FS_H
#define _TMEM_FS_H

#include <linux/hashtable.h>
#include <linux/mutex.h>
#include <linux/workqueue.h>

#include "hooks.h"

#define NR_TMEM_FS_TYPES 9
/* Maximum number of mounts that are served at the same time. */
#define TMEM_FS_MAX 64
#define TMEM_FS_HASH_BITS 6

/*
 * A hook requests a discovery for each bio of an unknown file system, which may be one that cannot
 * be served. After this many discoveries in a row without a result, the discovery runs at most once
 * a second.
 */
#define TMEM_FRUITLESS_MAX 16

extern DECLARE_HASHTABLE(tmem_fs_hash, TMEM_FS_HASH_BITS);
extern spinlock_t tmem_fs_lock;			/* guards writers of tmem_fs_hash */
/* Guards tmem_fs_type.off, tmem_fs.off, and the code that sets tmem_fs.live from them. */
extern struct mutex tmem_fs_switch_lock;

extern unsigned long tmem_fs_types_noted;	/* bit i: discovery of tmem_fs_types[i] is due */
extern bool tmem_fs_stopped;			/* true: the work item below must not be queued */
extern unsigned int tmem_fs_fruitless;		/* discoveries in a row that found nothing */
/* Work item of discover.c, which gives it its function. */
extern struct delayed_work tmem_fs_discovery;

void tmem_fs_start(struct tmem_fs *fs);

#endif /* _TMEM_FS_H */
