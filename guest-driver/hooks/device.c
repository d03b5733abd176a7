// SPDX-License-Identifier: GPL-2.0-only
/*
 * /dev/virtio_tmem: requests of users, see virtio_tmem_ioctl.h.
 *
 * Every user may open the device; only the owner of a file may use it on that file. The open file
 * keeps its file system mounted, and the open device keeps the module loaded. A user with
 * CAP_SYS_RESOURCE may register threads, whose number is limited.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/capability.h>
#include <linux/file.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/pagemap.h>
#include <linux/uaccess.h>

#include "../compat.h"
#include "../virtio_tmem_ioctl.h"
#include "blocks.h"

static int file_get(struct tmem_pool *pool, const struct inode *inode,
		    struct virtio_tmem_file *req)
{
	req->policy = tmem_policy_never(pool, inode->i_ino, inode->i_generation) ?
		      VIRTIO_TMEM_POLICY_NEVER : VIRTIO_TMEM_POLICY_DEFAULT;
	req->cached_pages = READ_ONCE(inode->i_mapping->nrpages);
	return 0;
}

static int file_set(struct tmem_pool *pool, const struct inode *inode, u32 policy)
{
	int err;

	switch (policy) {
	case VIRTIO_TMEM_POLICY_DEFAULT:
		tmem_policy_forget(pool, inode->i_ino);
		return 0;
	case VIRTIO_TMEM_POLICY_NEVER:
		if (tmem_policy_never(pool, inode->i_ino, inode->i_generation))
			return 0;
		err = tmem_policy_forbid(pool, inode->i_ino, inode->i_generation);
		if (err)
			return err;
		/* Pages that left the page cache before the policy may be freed later. */
		if (!TMEM_WITHOUT(POLICY))
			tmem_record_forbid();
		/*
		 * Which blocks belong to the file is not known, so all pages are dropped. The
		 * policy is set before: the pool takes puts again only when puts that may have
		 * missed the policy have ended (create_one()).
		 */
		tmem_pool_empty(pool);
		return 0;
	default:
		return -EINVAL;
	}
}

static int file_do(struct file *file, unsigned int cmd, struct virtio_tmem_file *req)
{
	struct inode *inode = file_inode(file);
	struct tmem_fs *fs;
	int err;

	if (!S_ISREG(inode->i_mode) || req->reserved[0] || req->reserved[1])
		return -EINVAL;
	if (!tmem_owner_or_capable(file))
		return -EPERM;
	fs = tmem_fs_get(inode->i_sb);
	if (fs) {
		if (cmd == VIRTIO_TMEM_IOC_GET)
			err = file_get(fs->pool, inode, req);
		else if (fs->type->no_policies)
			err = -EOPNOTSUPP;
		else
			err = file_set(fs->pool, inode, req->policy);
		tmem_fs_put(fs);
	} else {
		err = tmem_fs_note(inode->i_sb) ? -EAGAIN : -EOPNOTSUPP;
	}
	return err;
}

static long device_ioctl(struct file *device, unsigned int cmd, unsigned long arg)
{
	void __user *user = (void __user *)arg;
	struct virtio_tmem_file req;
	struct file *file;
	int err;

	if (cmd == VIRTIO_TMEM_IOC_PACE)
		return capable(CAP_SYS_RESOURCE) ? tmem_pace_register(device) : -EPERM;
	if (cmd != VIRTIO_TMEM_IOC_GET && cmd != VIRTIO_TMEM_IOC_SET)
		return -ENOTTY;
	if (copy_from_user(&req, user, sizeof(req)))
		return -EFAULT;
	file = fget(req.fd);
	if (!file)
		return -EBADF;
	err = file_do(file, cmd, &req);
	fput(file);
	if (!err && cmd == VIRTIO_TMEM_IOC_GET && copy_to_user(user, &req, sizeof(req)))
		err = -EFAULT;
	return err;
}

static int device_release(struct inode *inode, struct file *device)
{
	tmem_pace_unregister(device);
	return 0;
}

static const struct file_operations device_fops = {
	.owner = THIS_MODULE,
	.release = device_release,
	.unlocked_ioctl = device_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
};

static struct miscdevice device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "virtio_tmem",
	.fops = &device_fops,
	.mode = 0666,
};

static bool registered;

/*
 * Registers the misc device /dev/virtio_tmem, when the hooks are on. If that fails, the cache
 * works, but users cannot set policies of files.
 */
void tmem_device_init(void)
{
	int err;

	/* The device exists already if the hooks were released before and are taken again. */
	if (registered)
		return;
	err = misc_register(&device);
	if (err)
		pr_warn("%s is missing (error %d): policies of files cannot be set; load the module again\n",
			VIRTIO_TMEM_DEVICE, err);
	else
		registered = true;
}

/* Unregisters the misc device. No task may have it open. */
void tmem_device_exit(void)
{
	if (registered)
		misc_deregister(&device);
	registered = false;
}
