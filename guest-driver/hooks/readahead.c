// SPDX-License-Identifier: GPL-2.0-only
/*
 * Hook of page_cache_ra_order(), which allocates the folios of a readahead window.
 *
 * Reclaim frees up to 31 folios at a time, whose pages must find space in the put ring, because
 * kswapd waits for the host only between these batches. Since Linux 6.17, each window of a stream
 * has folios of four times the size, up to 2 MiB if the windows are as large. This hook limits the
 * order of the window whose folios are about to be allocated. So a batch has less than 1,024 pages
 * of a stream. docs/benchmarks/history.md has the pages that are lost without the limit.
 *
 * A stream never reaches the order of a huge page then. If an open file already has that order, the
 * application has requested huge pages (MADV_HUGEPAGE), and the order stays.
 *
 * The order is in the readahead state of the open file. The kernel changes this state without a
 * lock, and so does this hook. In the worst case a window has smaller or larger folios.
 */
#include <linux/fs.h>
#include <linux/pagemap.h>

#include "../compat.h"
#include "hooks.h"

#if TMEM_HAS_RA_ORDER

/* Order of folios of 32 pages, which is the default readahead window. */
#define READAHEAD_ORDER_MAX	5

static void entry_ra_order(struct tmem_args *args)
{
	const struct readahead_control *rac = (void *)tmem_arg(args, 0);
	struct file_ra_state *ra = (void *)tmem_arg(args, 1);
	unsigned int order = READ_ONCE(ra->order);

	if (order > READAHEAD_ORDER_MAX && order < PMD_SHIFT - PAGE_SHIFT &&
	    tmem_fs_serves(rac->mapping->host->i_sb))
		WRITE_ONCE(ra->order, READAHEAD_ORDER_MAX);
}

#endif

const struct tmem_target tmem_readahead_targets[] = {
#if TMEM_HAS_RA_ORDER
	{
		.name = "page_cache_ra_order",
		.hook = TMEM_HOOK_READAHEAD,
		.entry = entry_ra_order,
		.without = "fewer pages of large folios are put",
	},
#endif
	{}
};
