// SPDX-License-Identifier: GPL-2.0-only
/*
 * Slots of swap areas: which were freed, and the hooks that see it. swap.c has the swap areas.
 *
 * The kernel does not overwrite a slot that it frees. So that its bytes leave the host, the hooks
 * set a bit for each freed slot, and a work item of swap.c erases these slots. A page is not put
 * while its slot has the bit set. A write of the slot clears the bit and erases the slot.
 */
#include <linux/bio.h>
#include <linux/moduleparam.h>
#include <linux/swap.h>
#include <linux/swapops.h>

#include "../core/core.h"
#include "blocks.h"
#include "swap.h"

int tmem_swap_parameter = -1;
module_param_named(swap, tmem_swap_parameter, int, 0444);
MODULE_PARM_DESC(swap, "cache swap areas: 1 yes, 0 no, -1 if the device has swap=on (default)");

bool tmem_swap_allowed;
bool tmem_swap_on;
struct swap_area __rcu *tmem_swap_areas[MAX_SWAPFILES];
struct block_device *tmem_swap_noted[MAX_SWAPFILES];
struct delayed_work tmem_swap_work;

/* Returns whether pages of swap areas may go to the host now. Context: any. */
bool tmem_swap_wanted(void)
{
	return tmem_swap_parameter > 0 || (tmem_swap_parameter < 0 && tmem_dev_wants_swap(false));
}

/*
 * Returns whether the device wants no pages of swap areas, although one before it did. Swap areas
 * stay while there is no device. Context: any.
 */
bool tmem_swap_unwanted(void)
{
	return tmem_swap_parameter < 0 && !tmem_dev_wants_swap(true);
}

/* --- slots --------------------------------------------------------------------------------- */

static swp_entry_t entry_of(struct folio *folio)
{
	return (swp_entry_t){ .val = (unsigned long)folio->private };
}

/*
 * Returns whether a page is in the swap cache, and belongs to a swap area. The folio is locked or
 * under writeback. Context: any.
 */
bool tmem_swap_has(struct folio *folio, const struct super_block *sb)
{
	return folio_test_swapcache(folio) &&
	       swp_type(entry_of(folio)) == tmem_swap_type_of(sb);
}

/* Returns the swap area of a number. The caller is in an RCU read section. */
static struct swap_area *area_of(unsigned int type)
{
	return type < MAX_SWAPFILES ? rcu_dereference(tmem_swap_areas[type]) : NULL;
}

/* Returns the bitmap with the bit of a slot, or NULL if the slot is not served. */
static unsigned long *freed_of(const struct swap_area *area, unsigned long slot)
{
	if (slot >= READ_ONCE(area->nr))
		return NULL;
	return READ_ONCE(area->freed[slot / TMEM_PART_SLOTS]);	/* pairs with add_parts() */
}

/* Returns the number of slots that a swap area may have. Context: any. */
unsigned long tmem_swap_slots(const struct super_block *sb)
{
	const struct swap_area *area;
	unsigned long nr;

	rcu_read_lock();
	area = area_of(tmem_swap_type_of(sb));
	nr = area ? READ_ONCE(area->nr) : 0;
	rcu_read_unlock();
	return nr;
}

/*
 * Returns the sector of the slot of a page that is transferred from or to a device, or 0 if no
 * served swap area on the device has the slot. Context: any.
 */
sector_t tmem_swap_sector(struct page *page, const struct block_device *bdev)
{
	struct folio *folio = page_folio(page);
	const struct swap_area *area;
	unsigned long slot;
	unsigned int type;
	bool served;

	if (!folio_test_swapcache(folio) ||
	    (!folio_test_locked(folio) && !folio_test_writeback(folio)))
		return 0;
	type = swp_type(entry_of(folio));
	slot = swp_offset(entry_of(folio)) + folio_page_idx(folio, page);
	rcu_read_lock();
	area = area_of(type);
	served = area && area->bdev == bdev && freed_of(area, slot);
	rcu_read_unlock();
	return served ? tmem_swap_start(type) + (sector_t)slot * TMEM_BLOCK_SECTORS : 0;
}

/* Returns whether the slot of a block was freed, and not used again. Context: any. */
bool tmem_swap_is_freed(const struct super_block *sb, u32 block)
{
	const struct swap_area *area;
	const unsigned long *bits;
	bool freed;

	rcu_read_lock();
	area = area_of(tmem_swap_type_of(sb));
	bits = area ? freed_of(area, block) : NULL;
	freed = !bits || test_bit(block % TMEM_PART_SLOTS, bits);
	rcu_read_unlock();
	return freed;
}

/*
 * Notes that a slot is written. Returns whether its former bytes must leave the host, because it
 * was freed before. If many flushes wait, leaves the slot to the work item, and its page is not
 * put. Context: any.
 */
bool tmem_swap_reuse(const struct super_block *sb, u32 block)
{
	const struct swap_area *area;
	unsigned long *bits, bit = block % TMEM_PART_SLOTS;
	bool freed;

	rcu_read_lock();
	area = area_of(tmem_swap_type_of(sb));
	bits = area ? freed_of(area, block) : NULL;
	freed = bits && test_bit(bit, bits) && !tmem_flushes_wait() &&
		test_and_clear_bit(bit, bits);
	rcu_read_unlock();
	return freed;
}

/*
 * Notes that the kernel has freed slots: one, or up to a cluster of 512. Context: any but NMI, with
 * locks of the swap area.
 */
static void __maybe_unused slots_freed(unsigned int type, unsigned long first, unsigned long nr)
{
	unsigned long *bits, bit, some;
	struct swap_area *area;

	if (!READ_ONCE(tmem_swap_on))
		return;
	rcu_read_lock();
	area = area_of(type);
	for (; area && nr; first += some, nr -= some) {
		bit = first % TMEM_PART_SLOTS;
		some = min(nr, TMEM_PART_SLOTS - bit);
		bits = freed_of(area, first);
		if (!bits)
			continue;
		tmem_set_bits(bits, bit, some);
		/* Set the bits before reading the flag; pairs with erase_freed(). */
		smp_mb__after_atomic();
		if (!READ_ONCE(area->any))
			WRITE_ONCE(area->any, true);
	}
	rcu_read_unlock();
}

#ifdef TMEM_INTREE

static void entry_freed(struct tmem_args *args)
{
	slots_freed(tmem_arg(args, 0), tmem_arg(args, 1), tmem_arg(args, 2));
}

const struct tmem_target tmem_swap_targets[] = {
	{ .name = "swap_range_free", .hook = TMEM_HOOK_SWAP, .entry = entry_freed },
	{}
};

#elif TMEM_SWAP_FREES_ENTRIES

/* The kernel calls zswap_invalidate() for each slot that it frees, whether zswap is on or not. */
static void entry_freed(struct tmem_args *args)
{
	swp_entry_t entry = { .val = tmem_arg(args, 0) };

	slots_freed(swp_type(entry), swp_offset(entry), 1);
}

const struct tmem_target tmem_swap_targets[] = {
	{ .name = "zswap_invalidate", .hook = TMEM_HOOK_SWAP, .entry = entry_freed },
	{}
};

#elif TMEM_SWAP_FREES_SLOTS

/*
 * A slot that is freed may wait for others in a list of the processor. Then the kernel frees it for
 * good, with the shadow of its folio.
 */
static void entry_freed(struct tmem_args *args)
{
	swp_entry_t entry = { .val = tmem_arg(args, 0) };

	slots_freed(swp_type(entry), swp_offset(entry), 1);
}

static void entry_cleared(struct tmem_args *args)
{
	unsigned long first = tmem_arg(args, 1), last = tmem_arg(args, 2);

	slots_freed(tmem_arg(args, 0), first, last - first + 1);
}

const struct tmem_target tmem_swap_targets[] = {
	{ .name = "free_swap_slot", .hook = TMEM_HOOK_SWAP, .entry = entry_freed },
	{ .name = "clear_shadow_from_swap_cache", .hook = TMEM_HOOK_SWAP, .entry = entry_cleared },
	{}
};

#else

const struct tmem_target tmem_swap_targets[] = { {} };

#endif

/* --- discovery ------------------------------------------------------------------------------- */

/*
 * Has the work item examine the swap area of a bio that is being submitted, if it is not known, or
 * serve the part with its slot. Context: any but NMI.
 */
void tmem_swap_note(struct bio *bio)
{
	struct folio *folio = page_folio(bio_page(bio));
	struct block_device *bdev = bio->bi_bdev;
	bool known, wanted = false;
	struct swap_area *area;
	unsigned long slot;
	unsigned int type;

	if (!folio_test_swapcache(folio) || !folio_test_writeback(folio))
		return;
	type = swp_type(entry_of(folio));
	if (type >= MAX_SWAPFILES || !tmem_swap_wanted())
		return;
	slot = swp_offset(entry_of(folio));
	rcu_read_lock();
	area = area_of(type);
	known = area && area->bdev == bdev;
	if (known && slot < READ_ONCE(area->nr) && !freed_of(area, slot))
		wanted = !cmpxchg(&area->wanted, 0, slot / TMEM_PART_SLOTS + 1);
	rcu_read_unlock();
	if (wanted)
		tmem_swap_soon();
	if (known || READ_ONCE(tmem_swap_noted[type]))
		return;
	if (!tmem_bdev_hold(bdev))
		return;
	if (cmpxchg(&tmem_swap_noted[type], NULL, bdev))
		tmem_bdev_put(bdev);	/* does not sleep: the swap area has a reference */
	else
		mod_delayed_work(tmem_system_wq, &tmem_swap_work, 0);
}

/* Has the work item run soon. Context: any but NMI. */
void tmem_swap_soon(void)
{
	mod_delayed_work(tmem_system_wq, &tmem_swap_work, 0);
}
