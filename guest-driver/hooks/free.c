// SPDX-License-Identifier: GPL-2.0-only
/*
 * Hook of the functions that free folios whose last reference is gone. The driver puts evicted
 * pages there (put.c).
 *
 * Reclaim frees a batch of folios after it has flushed the TLB entries of their pages, and
 * drop_caches when it drops its references. The page allocator has not touched the contents and the
 * flags of a folio yet. Before Linux 6.9, large folios are freed one by one, with another function.
 *
 * A task may look at a page that it has found by its frame number, and so hold the last reference
 * to it for a moment. Then the page is freed elsewhere, and is not put. Pages that an interrupt
 * frees are not put either, because the interrupted task may use the processor's scratch page.
 */
#include <linux/hugetlb.h>
#include <linux/mm.h>

#include "../compat.h"
#include "hooks.h"

/*
 * Maximum number of pages that one call puts, because nothing else but interrupts may run on the
 * processor meanwhile: a put takes half a microsecond. A batch has up to 31 folios, and those of a
 * stream have 32 pages at most (readahead.c).
 */
#define FREE_PAGES_MAX	1024

#if TMEM_FREES_BATCHES

static void entry_free(struct tmem_args *args)
{
	const struct folio_batch *batch = (void *)tmem_arg(args, 0);
	unsigned int i, most = FREE_PAGES_MAX;

	for (i = 0; in_task() && i < batch->nr; i++)
		most = tmem_folio_freed(batch->folios[i], most);
}

#else

static void entry_free_list(struct tmem_args *args)
{
	struct list_head *list = (void *)tmem_arg(args, 0);
	unsigned int most = FREE_PAGES_MAX;
	struct page *page;

	if (in_task())
		list_for_each_entry(page, list, lru)
			most = tmem_folio_freed(page_folio(page), most);
}

static void entry_free_large(struct tmem_args *args)
{
	struct folio *folio = (void *)tmem_arg(args, 0);

	if (in_task() && !folio_test_hugetlb(folio))
		tmem_folio_freed(folio, FREE_PAGES_MAX);
}

#endif

const struct tmem_target tmem_free_targets[] = {
#if TMEM_FREES_BATCHES
	{ .name = "free_unref_folios", .hook = TMEM_HOOK_FREE, .entry = entry_free },
#else
	{ .name = "free_unref_page_list", .hook = TMEM_HOOK_FREE, .entry = entry_free_list },
	{ .name = "destroy_large_folio", .hook = TMEM_HOOK_FREE, .entry = entry_free_large },
#endif
	{}
};
