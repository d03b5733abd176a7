// SPDX-License-Identifier: GPL-2.0-only
/*
 * Changes of the guest's RAM: memory hot-plug, virtio-mem and balloons.
 *
 * The limit of the index follows the size of RAM at once. A memory notifier reports memory blocks
 * that come or go. A balloon changes the size of RAM without a notification, so a shrinker and the
 * periodic report compare it with the last size. The put ring, bounce pages and the admission
 * filter have fixed sizes. If RAM has half or twice the size from which they were computed, the
 * device is reset and set up again. The hash table of the index keeps its size.
 */
#include <linux/memory.h>
#include <linux/mm.h>

#include "../compat.h"
#include "budget.h"

/* The device is set up again if RAM has become larger or smaller by this factor. */
#define RAM_FACTOR	2
/*
 * Time in seconds for which RAM must keep its new size, because a reset empties the cache. A
 * balloon may take several seconds to reach its size.
 */
#define RAM_SETTLE_S	10

static struct shrinker *shrinker;

/*
 * Follows the size of RAM, and requests a reset if the device has to be set up for another size.
 * Context: process; the report work only.
 */
void tmem_ram_check(struct tmem_dev *dev)
{
	unsigned long ram = totalram_pages(), now = jiffies;

	tmem_index_follow_ram();
	if (ram < dev->ram_pages * RAM_FACTOR && ram > dev->ram_pages / RAM_FACTOR) {
		dev->ram_new_pages = 0;
	} else if (ram != dev->ram_new_pages) {
		dev->ram_new_pages = ram;
		dev->ram_changed_at = now;
	} else if (time_after_eq(now, dev->ram_changed_at + RAM_SETTLE_S * HZ)) {
		tmem_dev_reset_soon("the size of RAM has changed");
	}
}

/* Returns the number of pages by which the index is above its limit, mostly 0. */
static unsigned long count_excess(struct shrinker *unused, struct shrink_control *sc)
{
	long excess;

	tmem_index_follow_ram();
	excess = atomic_long_read(&tmem_index_used_bytes) - tmem_index_limit();
	return excess > 0 ? DIV_ROUND_UP(excess, PAGE_SIZE) : 0;
}

static unsigned long scan_excess(struct shrinker *unused, struct shrink_control *sc)
{
	tmem_evict_start();
	return SHRINK_STOP;	/* the evictor frees the memory in the background */
}

static int ram_notify(struct notifier_block *block, unsigned long event, void *unused)
{
	if (event == MEM_ONLINE || event == MEM_OFFLINE)
		tmem_index_follow_ram();
	return NOTIFY_DONE;
}

static struct notifier_block ram_block = {
	.notifier_call = ram_notify,
};

/* Follows the size of RAM from now on. Returns 0 or an error. */
int tmem_ram_init(void)
{
	int err = register_memory_notifier(&ram_block);

	if (err)
		return err;
	shrinker = tmem_shrinker_add("virtio_tmem", count_excess, scan_excess);
	if (shrinker)
		return 0;
	unregister_memory_notifier(&ram_block);
	return -ENOMEM;
}

/* Undoes tmem_ram_init(), before the evictor is stopped. */
void tmem_ram_exit(void)
{
	tmem_shrinker_remove(shrinker);
	unregister_memory_notifier(&ram_block);
}
