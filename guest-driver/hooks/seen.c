// SPDX-License-Identifier: GPL-2.0-only
/*
 * Records the calls and folios that the hooks see for the mapping of the self-test. The hooks call
 * the functions of this file. selftest.c compares the record with the operations of the test.
 */
#include <linux/fs.h>
#include <linux/mm.h>

#include "hooks.h"

/* The mapping under test, or NULL. When it is cleared, no folio of the mapping exists any more. */
struct address_space *tmem_selftest_mapping;

struct tmem_seen tmem_seen;

/**
 * tmem_selftest_saw_removed() - record that the removal tracepoint fired for the test's mapping
 * @folio: folio that the tracepoint passed
 */
void tmem_selftest_saw_removed(const struct folio *folio)
{
	if (folio->index >= TMEM_SELFTEST_PAGES || tmem_selftest_blind(TMEM_HOOK_REMOVED))
		return;
	if (folio_ref_count(folio)) {
		atomic_inc(&tmem_seen.removed);
	} else {
		atomic_inc(&tmem_seen.reclaimed);
		WRITE_ONCE(tmem_seen.evicted, folio);
	}
}

/**
 * tmem_selftest_saw_freed() - record that a folio which left the test's mapping is being freed
 * @folio: folio that the hook found
 */
void tmem_selftest_saw_freed(const struct folio *folio)
{
	if (folio == READ_ONCE(tmem_seen.evicted) && !tmem_selftest_blind(TMEM_HOOK_FREE))
		atomic_inc(&tmem_seen.freed);
}

/**
 * tmem_selftest_saw_dirty() - record that the dirty tracepoint fired for the test's mapping
 * @folio: folio that the tracepoint passed
 */
void tmem_selftest_saw_dirty(const struct folio *folio)
{
	if (tmem_selftest_blind(TMEM_HOOK_DIRTY))
		return;
	tmem_seen.dirty_index = folio->index;
	atomic_inc(&tmem_seen.dirty);
}

/**
 * tmem_selftest_saw_call() - record that a watched function was entered during the test
 * @hook: hook of the function
 */
void tmem_selftest_saw_call(enum tmem_hook hook)
{
	if (!tmem_selftest_blind(hook))
		set_bit(hook, &tmem_seen.calls);
}
