// SPDX-License-Identifier: GPL-2.0-only
/*
 * Files of the module in /sys/kernel/virtio_tmem/. They exist with and without a device.
 *	state		one line: on, "on: <notes>", "offline: <why>", "off: <why>", tripped,
 *			"tripped: <notes>", "poisoned: <why>"
 *	hooks		hooks that are live, one bit each
 *	stats/<counter>	see stats_list.h
 *	stats/index_pages, index_retained_pages, index_bytes, memory_bytes: current values;
 *			index_bytes with its table
 *	stats/wait_max_us: longest wait of a reader for this device
 *	stats/puts_eligible, puts_lost: sums of counters, see stats.h
 */
#include <linux/kobject.h>
#include <linux/sysfs.h>

#include "core.h"

struct stat_attribute {
	struct kobj_attribute attr;
	enum tmem_stat stat;
};

static ssize_t stat_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	enum tmem_stat stat = container_of(attr, struct stat_attribute, attr)->stat;

	return sysfs_emit(buf, "%llu\n", tmem_stat_sum(stat, stat));
}

static ssize_t index_pages_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%ld\n", tmem_index_pages());
}

static ssize_t index_retained_pages_show(struct kobject *kobj, struct kobj_attribute *attr,
					 char *buf)
{
	return sysfs_emit(buf, "%ld\n", tmem_index_retained_pages());
}

/* Returns the memory of rings, bounce pages and index in bytes. */
static long memory_bytes(void)
{
	struct tmem_dev *dev;
	long bytes = tmem_index_bytes();

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	if (dev)
		bytes += dev->memory_bytes;
	rcu_read_unlock();
	return bytes;
}

static ssize_t memory_bytes_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%ld\n", memory_bytes());
}

static ssize_t index_bytes_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%ld\n", tmem_index_bytes());
}

static ssize_t wait_max_us_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	struct tmem_dev *dev;
	u64 wait_ns = 0;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	if (dev)
		wait_ns = READ_ONCE(dev->wait_max_ns);
	rcu_read_unlock();
	return sysfs_emit(buf, "%llu\n", div_u64(wait_ns, NSEC_PER_USEC));
}

static ssize_t puts_eligible_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%llu\n", tmem_stat_eligible());
}

static ssize_t puts_lost_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	return sysfs_emit(buf, "%llu\n", tmem_stat_lost());
}

static ssize_t state_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	return tmem_state_show(buf);
}

static ssize_t hooks_show(struct kobject *kobj, struct kobj_attribute *attr, char *buf)
{
	u64 hooks;

	tmem_state_report(&hooks);
	return sysfs_emit(buf, "0x%llx\n", hooks);
}

static struct stat_attribute stat_attributes[] = {
#define TMEM_STAT(name) { __ATTR(name, 0444, stat_show, NULL), TMEM_STAT_##name },
#include "stats_list.h"
#undef TMEM_STAT
};

static struct kobj_attribute index_pages_attribute = __ATTR_RO(index_pages);
static struct kobj_attribute index_retained_pages_attribute = __ATTR_RO(index_retained_pages);
static struct kobj_attribute index_bytes_attribute = __ATTR_RO(index_bytes);
static struct kobj_attribute memory_bytes_attribute = __ATTR_RO(memory_bytes);
static struct kobj_attribute wait_max_us_attribute = __ATTR_RO(wait_max_us);
static struct kobj_attribute puts_eligible_attribute = __ATTR_RO(puts_eligible);
static struct kobj_attribute puts_lost_attribute = __ATTR_RO(puts_lost);
static struct kobj_attribute state_attribute = __ATTR_RO(state);
static struct kobj_attribute hooks_attribute = __ATTR_RO(hooks);

/* Number of files in stats/ that are not counters. */
#define NR_GAUGES 7

static struct attribute *stats_group_attributes[NR_GAUGES + NR_TMEM_STATS + 1] = {
	&index_pages_attribute.attr,
	&index_retained_pages_attribute.attr,
	&index_bytes_attribute.attr,
	&memory_bytes_attribute.attr,
	&wait_max_us_attribute.attr,
	&puts_eligible_attribute.attr,
	&puts_lost_attribute.attr,
};

static const struct attribute_group stats_group = {
	.name = "stats",
	.attrs = stats_group_attributes,
};

static struct attribute *state_group_attributes[] = {
	&state_attribute.attr,
	&hooks_attribute.attr,
	NULL
};

static const struct attribute_group state_group = {
	.attrs = state_group_attributes,
};

static const struct attribute_group *groups[] = {
	&state_group,
	&stats_group,
	NULL
};

struct kobject *tmem_kobj;

/* Creates /sys/kernel/virtio_tmem. Returns 0 or an error. */
int tmem_sysfs_init(void)
{
	int i, err;

	for (i = 0; i < NR_TMEM_STATS; i++) {
		sysfs_attr_init(&stat_attributes[i].attr.attr);
		stats_group_attributes[NR_GAUGES + i] = &stat_attributes[i].attr.attr;
	}
	tmem_kobj = kobject_create_and_add("virtio_tmem", kernel_kobj);
	if (!tmem_kobj)
		return -ENOMEM;
	err = sysfs_create_groups(tmem_kobj, groups);
	if (err)
		kobject_put(tmem_kobj);
	return err;
}

void tmem_sysfs_exit(void)
{
	sysfs_remove_groups(tmem_kobj, groups);
	kobject_put(tmem_kobj);
}
