/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Differences between kernel series that the driver has to know. No other file of the driver uses
 * LINUX_VERSION_CODE.
 */
#ifndef _TMEM_COMPAT_H
#define _TMEM_COMPAT_H

#include <linux/bio.h>
#include <linux/blk-mq.h>
#include <linux/fs.h>
#include <linux/ftrace.h>
#include <linux/hrtimer.h>
#include <linux/blk_types.h>
#include <linux/kobject.h>
#include <linux/mm.h>
#include <linux/mm_inline.h>
#include <linux/pagemap.h>
#include <linux/shrinker.h>
#include <linux/slab.h>
#include <linux/version.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>
#include <linux/workqueue.h>
#include <linux/writeback.h>	/* filemap_dirty_folio() before 6.2, struct folio_batch */

/*
 * Before Linux 6.2, ftrace's function that sets the instruction pointer has another name, and
 * ftrace has no function that returns an argument of the traced function.
 */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
#define tmem_set_ip(fregs, ip) ftrace_instruction_pointer_set(fregs, ip)
#define tmem_ftrace_arg(fregs, n) regs_get_kernel_argument(&(fregs)->regs, n)
#else
#define tmem_set_ip(fregs, ip) ftrace_regs_set_instruction_pointer(fregs, ip)
#define tmem_ftrace_arg(fregs, n) ftrace_regs_get_argument(fregs, n)
#endif

/*
 * Returns whether a folio was used again after it was read in. Such a folio has the flag "active"
 * or "workingset". Before 6.14, the multi-generational LRU sets one of these two flags at the
 * folio's second use through a file descriptor. Since 6.14, it sets them only after five uses, but
 * counts every use; this function also reads that count.
 */
static inline bool tmem_folio_used_again(struct folio *folio)
{
#if defined(CONFIG_LRU_GEN) && LINUX_VERSION_CODE >= KERNEL_VERSION(6, 14, 0)
	if (folio_lru_refs(folio) > 1)
		return true;
#endif
	return folio_test_active(folio) || folio_test_workingset(folio);
}

/* Since Linux 6.17, an open file has the order with which its readahead goes on. */
#define TMEM_HAS_RA_ORDER (LINUX_VERSION_CODE >= KERNEL_VERSION(6, 17, 0))

/* Since Linux 6.9, reclaim frees folios of all sizes in batches. */
#define TMEM_FREES_BATCHES (LINUX_VERSION_CODE >= KERNEL_VERSION(6, 9, 0))

/* Before Linux 6.12, a bio with a wrong alignment ends with another error. */
#ifndef BLK_STS_INVAL
#define BLK_STS_INVAL BLK_STS_NOTSUPP
#endif

/* The names of the system's work queues changed in 6.17, and 7.2 warns about the older names. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 17, 0)
#define tmem_system_wq system_unbound_wq
#else
#define tmem_system_wq system_dfl_wq
#endif

/*
 * Since Linux 6.10, __assign_str() takes the source string from the declaration of the trace
 * event's string field.
 */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 10, 0)
#define tmem_assign_str(dst, src) __assign_str(dst, src)
#else
#define tmem_assign_str(dst, src) __assign_str(dst)
#endif

/* Before 6.11 virtio_find_vqs() takes names and callbacks of virtqueues in separate arrays. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 11, 0)
struct virtqueue_info {
	const char *name;
	vq_callback_t *callback;
};

/* Maximum number of a device's virtqueues: the control queue and 16 request queues. */
#define TMEM_COMPAT_VQS_MAX 17

static inline int tmem_find_vqs(struct virtio_device *vdev, unsigned int nr,
				struct virtqueue **vqs, const struct virtqueue_info *info)
{
	vq_callback_t *callbacks[TMEM_COMPAT_VQS_MAX];
	const char *names[TMEM_COMPAT_VQS_MAX];
	unsigned int i;

	if (nr > TMEM_COMPAT_VQS_MAX)
		return -EINVAL;
	for (i = 0; i < nr; i++) {
		callbacks[i] = info[i].callback;
		names[i] = info[i].name;
	}
	return virtio_find_vqs(vdev, nr, vqs, callbacks, names, NULL);
}
#else
static inline int tmem_find_vqs(struct virtio_device *vdev, unsigned int nr,
				struct virtqueue **vqs, struct virtqueue_info *info)
{
	return virtio_find_vqs(vdev, nr, vqs, info, NULL);
}
#endif

/*
 * Returns whether the caller owns a file or has CAP_FOWNER. The kernel maps the owner's user id by
 * the mount (mnt_idmap) since 6.3, and by a user namespace before 6.3.
 */
static inline bool tmem_owner_or_capable(const struct file *file)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 3, 0)
	return inode_owner_or_capable(file_mnt_user_ns((struct file *)file), file_inode(file));
#else
	return inode_owner_or_capable(file_mnt_idmap(file), file_inode(file));
#endif
}

/* Before Linux 6.2, the type of a kobject (struct kobj_type) may not be const. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
#define tmem_kobject_init_and_add(kobj, ktype, parent, ...) \
	kobject_init_and_add(kobj, (void *)(ktype), parent, __VA_ARGS__)
#else
#define tmem_kobject_init_and_add(kobj, ktype, parent, ...) \
	kobject_init_and_add(kobj, ktype, parent, __VA_ARGS__)
#endif

/*
 * Returns whether the current task has unmapped pages whose TLB entries try_to_unmap_flush() must
 * still flush. Some architectures never defer this flush.
 */
static inline bool tmem_unmap_flush_required(void)
{
#ifdef CONFIG_ARCH_WANT_BATCHED_UNMAP_TLB_FLUSH
	return current->tlb_ubc.flush_required;
#else
	return false;
#endif
}

/*
 * Returns whether the current task waits for memory, as pressure stall information (PSI) counts it.
 * An allocation that reclaims pages is such a wait. A write to memory.reclaim is none.
 */
static inline bool tmem_in_memstall(void)
{
#ifdef CONFIG_PSI
	return current->in_memstall;
#else
	return true;
#endif
}

/*
 * Creates a slab cache whose memory keeps its type while RCU readers run. The slab allocator links
 * its free objects by a pointer. Since 6.12, the pointer can be inside a free object, at
 * @link_offset, where no RCU reader reads. Before 6.12, it takes TMEM_SLAB_LINK bytes behind each
 * object.
 */
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 12, 0)
#define TMEM_SLAB_LINK	0L
#else
#define TMEM_SLAB_LINK	((long)sizeof(void *))
#endif

static inline struct kmem_cache *tmem_slab_create(const char *name, unsigned int bytes,
						  unsigned int link_offset)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 12, 0)
	struct kmem_cache_args args = {
		.freeptr_offset = link_offset,
		.use_freeptr_offset = true,
	};

	return kmem_cache_create(name, bytes, &args, SLAB_TYPESAFE_BY_RCU);
#else
	return kmem_cache_create(name, bytes, 0, SLAB_TYPESAFE_BY_RCU, NULL);
#endif
}

/*
 * Registers a shrinker, and returns it, or NULL if there is no memory. Since 6.7, the kernel
 * allocates the structure.
 */
static inline struct shrinker *
tmem_shrinker_add(const char *name,
		  unsigned long (*count)(struct shrinker *shrinker, struct shrink_control *sc),
		  unsigned long (*scan)(struct shrinker *shrinker, struct shrink_control *sc))
{
	struct shrinker *shrinker;

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 7, 0)
	shrinker = kzalloc(sizeof(*shrinker), GFP_KERNEL);
#else
	shrinker = shrinker_alloc(0, "%s", name);
#endif
	if (!shrinker)
		return NULL;
	shrinker->count_objects = count;
	shrinker->scan_objects = scan;
	shrinker->seeks = DEFAULT_SEEKS;
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 7, 0)
	if (register_shrinker(shrinker, "%s", name)) {
		kfree(shrinker);
		return NULL;
	}
#else
	shrinker_register(shrinker);
#endif
	return shrinker;
}

/* Removes a shrinker, and waits until no task uses it. */
static inline void tmem_shrinker_remove(struct shrinker *shrinker)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 7, 0)
	unregister_shrinker(shrinker);
	kfree(shrinker);
#else
	shrinker_free(shrinker);
#endif
}

/*
 * Waits up to @timeout jiffies until all requests of a queue have ended. New requests wait
 * meanwhile. Returns whether they have ended.
 */
static inline bool tmem_drain_queue(struct request_queue *queue, unsigned long timeout)
{
	bool ended;

	blk_freeze_queue_start(queue);
	ended = blk_mq_freeze_queue_wait_timeout(queue, timeout);
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 14, 0)
	blk_mq_unfreeze_queue(queue);
#else
	blk_mq_unfreeze_queue_nomemrestore(queue);
#endif
	return ended;
}

/* Allocates a disk, which put_disk() frees, or returns NULL. */
static inline struct gendisk *tmem_disk_alloc(void)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 9, 0)
	return blk_alloc_disk(NUMA_NO_NODE);
#else
	struct gendisk *disk = blk_alloc_disk(NULL, NUMA_NO_NODE);

	return IS_ERR(disk) ? NULL : disk;
#endif
}

/* Returns whether the bios of a plug must not wait. Linux 6.1 sets REQ_NOWAIT for them later. */
static inline bool tmem_plug_nowait(const struct blk_plug *plug)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
	return plug && plug->nowait;
#else
	return false;
#endif
}

/* Returns whether the kernel can read and write pages of a disk without a bio, as before 6.3. */
static inline bool tmem_disk_has_rw_page(const struct gendisk *disk)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 3, 0)
	return disk->fops->rw_page;
#else
	return false;
#endif
}

/*
 * Functions that the kernel calls for each slot of a swap area that it frees. Before 6.13, slots
 * wait in lists of processors. Since 7.2, the function is part of zswap. Series in between, which
 * are not served, were not examined.
 */
#define TMEM_SWAP_FREES_SLOTS	(LINUX_VERSION_CODE < KERNEL_VERSION(6, 13, 0))
#define TMEM_SWAP_FREES_ENTRIES	(LINUX_VERSION_CODE >= KERNEL_VERSION(7, 2, 0))

/*
 * Returns whether a disk ends bios while they are submitted, as one in memory does. Before 6.3, the
 * kernel has other functions for such disks (tmem_disk_has_rw_page()).
 */
static inline bool tmem_bdev_synchronous(struct block_device *bdev)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 3, 0)
	return tmem_disk_has_rw_page(bdev->bd_disk);
#else
	return bdev_synchronous(bdev);
#endif
}

/*
 * Returns whether the submitter of a bio wants its end in a task. Linux 7.3 has brought this flag.
 */
static inline bool tmem_bio_ends_in_task(const struct bio *bio)
{
#if LINUX_VERSION_CODE >= KERNEL_VERSION(7, 3, 0)
	return bio_flagged((struct bio *)bio, BIO_COMPLETE_IN_TASK);
#else
	return false;
#endif
}

/* Sets up a timer of the clock of ktime_get(). Since 6.13, one function does both steps. */
static inline void tmem_hrtimer_setup(struct hrtimer *timer,
				      enum hrtimer_restart (*function)(struct hrtimer *timer),
				      enum hrtimer_mode mode)
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 13, 0)
	hrtimer_init(timer, CLOCK_MONOTONIC, mode);
	timer->function = function;
#else
	hrtimer_setup(timer, function, CLOCK_MONOTONIC, mode);
#endif
}

/*
 * Series of the kernel headers that the module was built with, as KERNEL_VERSION(major, minor, 0).
 */
#define TMEM_BUILT_FOR (LINUX_VERSION_CODE & ~0xff)

#endif /* _TMEM_COMPAT_H */
