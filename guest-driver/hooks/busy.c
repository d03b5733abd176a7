// SPDX-License-Identifier: GPL-2.0-only
/*
 * Ranges of files whose pages are not put while a call is running: POSIX_FADV_DONTNEED, whose
 * caller does not need the pages, and fallocate(), which changes cached pages before it can fail.
 *
 * There is a fixed number of slots for running calls, because each eviction searches all of them.
 * If no slot is free, fadvise.c does without one, and direct.c marks the inode.
 */
#include <linux/bitops.h>

#include "hooks.h"

/* Maximum number of running calls. Few processes make such calls, and most calls are short. */
#define TMEM_BUSY_MAX 16

static struct busy_range {
	const struct address_space *mapping;
	pgoff_t first, last;
} busy_ranges[TMEM_BUSY_MAX];
static unsigned long busy_used;		/* bit i: busy_ranges[i] belongs to a call */

/**
 * tmem_busy_begin() - put no pages of a range from now on
 * @mapping: mapping of the pages
 * @first: first page
 * @last: last page
 *
 * The function does not wait for a put that has already begun. Such a put holds its folio locked
 * until the folio has left the page cache.
 *
 * Return: slot for tmem_busy_end(), or -1 if all slots are in use.
 */
int tmem_busy_begin(const struct address_space *mapping, pgoff_t first, pgoff_t last)
{
	int slot;

	for (slot = 0; slot < TMEM_BUSY_MAX; slot++) {
		if (test_and_set_bit(slot, &busy_used))
			continue;
		WRITE_ONCE(busy_ranges[slot].first, first);
		WRITE_ONCE(busy_ranges[slot].last, last);
		/* Set the mapping last, so that a reader that finds it sees the call's range. */
		smp_store_release(&busy_ranges[slot].mapping, mapping);
		return slot;
	}
	return -1;
}

/**
 * tmem_busy_end() - allow puts of the range of a call again
 * @slot: from tmem_busy_begin(), or -1
 */
void tmem_busy_end(int slot)
{
	if (slot < 0)
		return;
	/* Complete the mark of the inode before puts are allowed; pairs with tmem_busy_covers(). */
	smp_store_release(&busy_ranges[slot].mapping, NULL);
	clear_bit_unlock(slot, &busy_used);
}

/**
 * tmem_busy_covers() - check whether the range of a running call contains a page
 * @mapping: mapping of the page, whose folio is locked
 * @index: index of the page
 *
 * Context: any.
 */
bool tmem_busy_covers(const struct address_space *mapping, pgoff_t index)
{
	unsigned int i;

	/* See the marks of calls that have ended; pairs with tmem_busy_end(). */
	if (likely(!smp_load_acquire(&busy_used)))
		return false;
	for (i = 0; i < TMEM_BUSY_MAX; i++) {
		if (smp_load_acquire(&busy_ranges[i].mapping) == mapping &&
		    index >= READ_ONCE(busy_ranges[i].first) &&
		    index <= READ_ONCE(busy_ranges[i].last))
			return true;
	}
	return false;
}
