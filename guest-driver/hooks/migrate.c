// SPDX-License-Identifier: GPL-2.0-only
/*
 * Hook of folio_migrate_flags(), by which page migration completes the move of a folio to other
 * page frames, as compaction does for most allocations of a large folio.
 *
 * The hints of records.c are by page frame number. Without this hook, a moved page has no hint and
 * is not put when it is evicted, and its record keeps a place until another one displaces it.
 *
 * Both folios are locked and not mapped, and no transfer of them is in flight.
 */
#include <linux/migrate.h>
#include <linux/pagemap.h>

#include "blocks.h"
#include "hooks.h"

static void entry_migrate(struct tmem_args *args)
{
	struct folio *to = (void *)tmem_arg(args, 0), *from = (void *)tmem_arg(args, 1);

	/* Other anonymous pages and huge pages may be large, and have no hints. */
	if (folio_test_anon(from) ? folio_test_swapcache(from) : !folio_test_hugetlb(from))
		tmem_record_move(to, from);
}

const struct tmem_target tmem_migrate_targets[] = {
	{
		.name = "folio_migrate_flags",
		.addr = (unsigned long)folio_migrate_flags,
		.hook = TMEM_HOOK_MIGRATE,
		.entry = entry_migrate,
		.without = "pages that the kernel moves are not put",
	},
	{}
};
