/* SPDX-License-Identifier: GPL-2.0-only WITH Linux-syscall-note */
/*
 * Requests of user space to the virtio-tmem guest driver: ioctls of /dev/virtio_tmem.
 *
 * VIRTIO_TMEM_IOC_GET and VIRTIO_TMEM_IOC_SET are about one file. Each takes a struct
 * virtio_tmem_file, whose fd is an open regular file. The caller must own that file or have
 * CAP_FOWNER, as for chmod().
 *
 * - EBADF: fd is not open
 * - EINVAL: not a regular file, an unknown policy, or reserved is not 0
 * - EPERM: the caller is neither owner nor has CAP_FOWNER
 * - EOPNOTSUPP: the driver does not serve the file system, or its files cannot have policies
 * - EAGAIN: the driver does not know the file system yet; try again in some milliseconds
 * - ENOSPC: the limit of files with a policy is reached
 * - ENOMEM: no memory at the moment
 *
 * VIRTIO_TMEM_IOC_PACE registers the calling thread: while it writes to memory.reclaim of a control
 * group, it waits for the host when the driver's buffer for evicted pages fills up. Otherwise the
 * driver drops pages that do not fit. The registration ends when the last descriptor of this open
 * device is closed. Children of the thread are not registered.
 *
 * - EPERM: the caller does not have CAP_SYS_RESOURCE
 * - EBUSY: the limit of registered threads is reached
 */
#ifndef _VIRTIO_TMEM_IOCTL_H
#define _VIRTIO_TMEM_IOCTL_H

#include <linux/ioctl.h>
#include <linux/types.h>

#define VIRTIO_TMEM_DEVICE	"/dev/virtio_tmem"

enum virtio_tmem_policy {
	/* Pages are put when they are evicted. */
	VIRTIO_TMEM_POLICY_DEFAULT = 0,
	/*
	 * No page is put. Setting this policy erases all held pages of the file system, because the
	 * driver does not know which of them belong to the file. The policy holds for as long as
	 * the file exists, its file system is mounted and the driver is loaded.
	 */
	VIRTIO_TMEM_POLICY_NEVER = 1,
};

struct virtio_tmem_file {
	__s32 fd;
	__u32 policy;		/* enum virtio_tmem_policy */
	__u64 cached_pages;	/* pages of the file in the page cache of the guest */
	__u64 reserved[2];
};

#define VIRTIO_TMEM_IOC_MAGIC	0xb9

/* Fills in policy and cached_pages. */
#define VIRTIO_TMEM_IOC_GET	_IOWR(VIRTIO_TMEM_IOC_MAGIC, 1, struct virtio_tmem_file)
/* Sets the policy; ignores cached_pages. */
#define VIRTIO_TMEM_IOC_SET	_IOW(VIRTIO_TMEM_IOC_MAGIC, 2, struct virtio_tmem_file)
/* Registers the calling thread; takes no argument. */
#define VIRTIO_TMEM_IOC_PACE	_IO(VIRTIO_TMEM_IOC_MAGIC, 3)

#endif /* _VIRTIO_TMEM_IOCTL_H */
