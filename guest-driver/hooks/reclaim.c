// SPDX-License-Identifier: GPL-2.0-only
/*
 * Hook of try_to_unmap_flush(), at which kswapd waits for the host (core/pace.c).
 *
 * Reclaim calls try_to_unmap_flush() after each 32 folios that it evicts (each 64 at most on Linux
 * 6.1), holds no lock then, and may sleep. The function does nothing unless pages were unmapped
 * from processes since its last call. Only such a call is replaced, by the wait, so the original
 * need not be called. Calls of all tasks but kswapd, and calls while the put ring has enough space,
 * are not replaced either.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/sched.h>

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

/**
 * tmem_reclaim_add() - hook reclaim
 *
 * Coherence does not depend on this hook. Without it, more pages are dropped when the put ring is
 * full.
 */
void tmem_reclaim_add(void)
{
	const struct tmem_target target = {
		.hook = TMEM_HOOK_RECLAIM,
		.wrap = wrap_reclaim,
		.wanted = wants_reclaim,
	};
	int err = tmem_target_add_name("try_to_unmap_flush", &target);

	if (err)
		pr_info("cannot hook try_to_unmap_flush: error %d; kswapd does not wait for the host\n",
			err);
}
