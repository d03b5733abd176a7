// SPDX-License-Identifier: GPL-2.0-only
/*
 * Switches and counters of file systems, in /sys/kernel/virtio_tmem/:
 *	fs/<type>/enabled	all mounts of a type, also future ones
 *	mounts/<major:minor>/	one mount: enabled, state, puts, gets, hits, held_pages
 *	mounts/swap-<major:minor>-<number>/	one swap area, with the same files
 *
 * The directory of a mount is removed before its super block is shut down. sysfs waits for tasks
 * that are reading or writing one of its files, and answers ENODEV to tasks that only have a file
 * open. So no file uses a mount after it was freed. As a consequence, the functions of these files
 * must not wait for s_umount or discovery_lock.
 */
#include <linux/fs.h>
#include <linux/kdev_t.h>
#include <linux/kobject.h>
#include <linux/percpu.h>
#include <linux/sysfs.h>

#include "../compat.h"
#include "blocks.h"

static struct kobject *mounts_kobj, *types_kobj;

static struct tmem_fs *fs_of(struct kobject *kobj)
{
	return container_of(kobj, struct tmem_fs, kobj);
}

static struct tmem_fs_type *type_of(const struct kobject *kobj)
{
	struct tmem_fs_type *type;

	for (type = tmem_fs_types; type->name; type++)
		if (!strcmp(type->name, kobject_name(kobj)))
			break;
	return type;
}

/* --- files of a mount ---------------------------------------------------------------------- */

static ssize_t enabled_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%d\n", !READ_ONCE(fs_of(kobj)->off));
}

static ssize_t enabled_store(struct kobject *kobj, struct kobj_attribute *attr, const char *buf,
			     size_t count)
{
	bool on;
	int err = kstrtobool(buf, &on);

	if (err)
		return err;
	tmem_fs_switch(NULL, fs_of(kobj), on);
	return count;
}

static ssize_t state_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	int len = tmem_fs_state(fs_of(kobj), buf, PAGE_SIZE - 1);

	return len + sysfs_emit_at(buf, len, "\n");
}

static ssize_t held_pages_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%lu\n", tmem_pool_pages(fs_of(kobj)->pool));
}

/* Prints the counter at offset @at of struct tmem_fs_cpu, summed over all CPUs. */
static ssize_t emit_count(struct kobject *kobj, size_t at, char *buf)
{
	const struct tmem_fs *fs = fs_of(kobj);
	unsigned long sum = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		sum += READ_ONCE(*(unsigned long *)((u8 *)per_cpu_ptr(fs->cpu, cpu) + at));
	return sysfs_emit(buf, "%lu\n", sum);
}

static ssize_t puts_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	return emit_count(kobj, offsetof(struct tmem_fs_cpu, puts), buf);
}

static ssize_t gets_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	return emit_count(kobj, offsetof(struct tmem_fs_cpu, gets), buf);
}

static ssize_t hits_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	return emit_count(kobj, offsetof(struct tmem_fs_cpu, hits), buf);
}

static struct kobj_attribute enabled_attribute = __ATTR_RW(enabled);
static struct kobj_attribute state_attribute = __ATTR_RO(state);
static struct kobj_attribute puts_attribute = __ATTR_RO(puts);
static struct kobj_attribute gets_attribute = __ATTR_RO(gets);
static struct kobj_attribute hits_attribute = __ATTR_RO(hits);
/* For root only: the number tells what other users of the mount do. */
static struct kobj_attribute held_pages_attribute = __ATTR_RO_MODE(held_pages, 0400);

static struct attribute *mount_attrs[] = {
	&enabled_attribute.attr,
	&state_attribute.attr,
	&puts_attribute.attr,
	&gets_attribute.attr,
	&hits_attribute.attr,
	&held_pages_attribute.attr,
	NULL
};
ATTRIBUTE_GROUPS(mount);

static void mount_release(struct kobject *kobj)
{
	complete(&fs_of(kobj)->released);
}

static const struct kobj_type mount_ktype = {
	.release = mount_release,
	.sysfs_ops = &kobj_sysfs_ops,
	.default_groups = mount_groups,
};

/*
 * Makes the directory of a mount or swap area on a device. The other fields are set. Returns 0 or
 * an error. The caller then does not serve the mount, because an operator could not switch it off.
 * It calls tmem_mount_remove() after an error, too.
 */
int tmem_mount_add(struct tmem_fs *fs, dev_t dev)
{
	char name[sizeof("swap-4294967295:4294967295-4294967295")];

	if (tmem_is_swap(fs->sb))
		snprintf(name, sizeof(name), "swap-%u:%u-%u", MAJOR(dev), MINOR(dev),
			 tmem_swap_type_of(fs->sb));
	else
		snprintf(name, sizeof(name), "%u:%u", MAJOR(dev), MINOR(dev));
	init_completion(&fs->released);
	return tmem_kobject_init_and_add(&fs->kobj, &mount_ktype, mounts_kobj, "%s", name);
}

/* Removes a mount's directory, and waits for tasks that are reading or writing one of its files. */
void tmem_mount_remove(struct tmem_fs *fs)
{
	/*
	 * tmem_mount_add() may have failed to make the directory, because memory was short or the
	 * name was in use.
	 */
	if (fs->kobj.state_in_sysfs)
		kobject_del(&fs->kobj);
	kobject_put(&fs->kobj);
	/*
	 * Wait for mount_release(), which another task may run: it is code of this module, which
	 * may be unloaded next.
	 */
	wait_for_completion(&fs->released);
}

/* --- sysfs files of a file system type ------------------------------------------------------- */

static ssize_t type_enabled_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%d\n", !READ_ONCE(type_of(kobj)->off));
}

static ssize_t type_enabled_store(struct kobject *kobj, struct kobj_attribute *attr,
				  const char *buf, size_t count)
{
	bool on;
	int err = kstrtobool(buf, &on);

	if (err)
		return err;
	tmem_fs_switch(type_of(kobj), NULL, on);
	return count;
}

static struct kobj_attribute type_enabled_attribute =
	__ATTR(enabled, 0644, type_enabled_show, type_enabled_store);

/* Makes the sysfs directories mounts/ and fs/, and one for each type. Returns 0 or -ENOMEM. */
int tmem_mounts_init(void)
{
	struct tmem_fs_type *type;

	mounts_kobj = kobject_create_and_add("mounts", tmem_kobj);
	types_kobj = kobject_create_and_add("fs", tmem_kobj);
	if (!mounts_kobj || !types_kobj)
		goto nomem;
	for (type = tmem_fs_types; type->name; type++) {
		type->kobj = kobject_create_and_add(type->name, types_kobj);
		if (!type->kobj || sysfs_create_file(type->kobj, &type_enabled_attribute.attr))
			goto nomem;
	}
	return 0;
nomem:
	tmem_mounts_stop();
	tmem_mounts_exit();
	return -ENOMEM;
}

/* Removes the sysfs directory fs/ and its directory of each type. */
void tmem_mounts_stop(void)
{
	struct tmem_fs_type *type;

	for (type = tmem_fs_types; type->name; type++) {
		kobject_put(type->kobj);
		type->kobj = NULL;
	}
	kobject_put(types_kobj);
	types_kobj = NULL;
}

/* Removes the directory of mounts, after all mounts were removed. */
void tmem_mounts_exit(void)
{
	kobject_put(mounts_kobj);
	mounts_kobj = NULL;
}
