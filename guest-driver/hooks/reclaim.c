// SPDX-License-Identifier: GPL-2.0-only
/*
 * Hook of try_to_unmap_flush(), at which kswapd and tasks that write to memory.reclaim wait for the
 * host (core/pace.c).
 *
 * In reclaim, shrink_folio_list() calls try_to_unmap_flush() after each 32 folios that it evicts
 * (each 64 at most on Linux 6.1). It holds no lock then, and may sleep. The split of a large folio
 * and the migration to slower memory call try_to_unmap_flush() with locks, and reclaim may run
 * both. So only calls from shrink_folio_list() are replaced.
 *
 * The replacement cannot call the original (struct tmem_target). So a call that has to flush a
 * TLB is not replaced. In a guest with several processors, this is the first call after
 * shrink_folio_list() has unmapped a page from a process that may have run on another processor.
 * So tasks seldom wait while most of the pages that they evict are mapped by processes.
 *
 * Calls of other tasks, and calls while the put ring has enough space, are not replaced
 * either. In a kernel with the patches of intree/, shrink_folio_list() begins with a call of the
 * hook instead.
 */
#include "../compat.h"
#include "hooks.h"

static void wrap_reclaim(void)
{
	tmem_enter();
	tmem_pace();
	tmem_leave();
}

static bool wants_reclaim(struct tmem_args *args)
{
	return tmem_pace_wanted() && !tmem_unmap_flush_required();
}

const struct tmem_target tmem_reclaim_targets[] = {
	{
		.name = "try_to_unmap_flush",
		.hook = TMEM_HOOK_RECLAIM,
		.wrap = wrap_reclaim,
		.wanted = wants_reclaim,
		.caller = "shrink_folio_list",
		.without = "reclaim does not wait for the host, and more pages are dropped",
	},
	{}
};
