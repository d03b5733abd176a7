// SPDX-License-Identifier: GPL-2.0-only
/*
 * Tests the rule Dirty of hooks/blocks.h on a page that belongs to no file, and changes pages of
 * files for tests of the rules.
 *
 * No operation on files can show the rule Dirty alone. A page that became dirty cannot be evicted
 * before it is written again, and this write erases the record, too. The rule decides only if an
 * error of the file system cleans the page without a write, or if the page of another file has a
 * wrong hint.
 */
#include <linux/file.h>
#include <linux/fs.h>
#include <linux/highmem.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pagemap.h>
#include <linux/slab.h>
#include <linux/string.h>

#include "../core/core.h"
#include "../hooks/blocks.h"

/* A block that no area has. */
#define BLOCK	(U32_MAX - 1)

/* Number of blocks below BLOCK that no area has either. */
#define BLOCKS	1000000

/*
 * Time at which the page becomes dirty: never, or before, during or after its write. TWICE: after
 * writes of the page to two blocks at the same time. NOT_OVERTAKEN: never, but another write of the
 * block begins and ends during the write of the page.
 */
enum {
	DIRTY_NOT, DIRTY_BEFORE, DIRTY_DURING, DIRTY_AFTER, DIRTY_TWICE, DIRTY_NOT_OVERTAKEN,
	NR_DIRTY
};

static char verdicts[NR_DIRTY + 1];

static void put(u32 block, void *arg)
{
}

/* Writes a page that becomes dirty at @when. Returns 'p' if the page is then put, or '-' if not. */
static char try(struct page *page, int when)
{
	struct folio *folio = page_folio(page);
	void *bytes = kmap_local_page(page);
	u64 check = tmem_check64_page(&tmem_keys, bytes);
	struct tmem_evicted evicted = { .page = page };
	bool equal = false;
	u32 seq, block;

	kunmap_local(bytes);
	if (when == DIRTY_BEFORE)
		SetPageDirty(page);
	seq = tmem_record_write(BLOCK, page);
	if (when == DIRTY_TWICE)
		tmem_record_write(BLOCK - 1, page);
	if (when == DIRTY_NOT_OVERTAKEN) {
		tmem_record_write_range(BLOCK, 1, true);
		tmem_record_write_range(BLOCK, 1, false);
	}
	if (when == DIRTY_DURING)
		SetPageDirty(page);
	if (seq)
		tmem_record_flush(BLOCK, seq, check, page);
	else
		tmem_record_write_range(BLOCK, 1, false);
	if (when == DIRTY_TWICE)
		tmem_record_write_range(BLOCK - 1, 1, false);
	if (when == DIRTY_AFTER || when == DIRTY_TWICE) {
		SetPageDirty(page);
		tmem_record_dirty(folio);
	}
	ClearPageDirty(page);
	tmem_record_leave(folio, true);
	rcu_read_lock();
	block = tmem_record_free(page);
	preempt_disable();
	if (tmem_evicted_read(&evicted))
		equal = tmem_record_compare(when == DIRTY_TWICE ? BLOCK : block, &evicted, put,
					    NULL);
	preempt_enable();
	rcu_read_unlock();
	tmem_record_erase(BLOCK - 1, 2);
	return equal ? 'p' : '-';
}

static int run_dirty(const char *val, const struct kernel_param *kp)
{
	struct page *page;
	int when;

	page = alloc_page(GFP_KERNEL | __GFP_ZERO);
	if (!page)
		return -ENOMEM;
	for (when = 0; when < NR_DIRTY; when++)
		verdicts[when] = try(page, when);
	__free_page(page);
	return 0;
}

static int get_verdicts(char *buffer, const struct kernel_param *kp)
{
	return sysfs_emit(buffer, "%s\n", verdicts);
}

static const struct kernel_param_ops dirty_ops = {
	.set = run_dirty,
	.get = get_verdicts,
};
module_param_cb(test_blocks_dirty, &dirty_ops, NULL, 0644);
MODULE_PARM_DESC(test_blocks_dirty, "TEST: a write tests the rule Dirty of hooks/blocks.h; reads as p (put) or - (refused) for a page that becomes dirty never, before, during and after its write, after two writes to different blocks, and never, but with another write of its block meanwhile");

static unsigned int refused;

/* Counts the blocks below BLOCK whose writes prevent a get of BLOCK, because counters collide. */
static int run_in_flight(const char *val, const struct kernel_param *kp)
{
	u32 i;

	refused = 0;
	for (i = 1; i <= BLOCKS; i++) {
		tmem_record_write_range(BLOCK - i, 1, true);
		refused += !tmem_record_get(BLOCK);
		tmem_record_write_range(BLOCK - i, 1, false);
		cond_resched();
	}
	tmem_record_erase(BLOCK, 1);
	return 0;
}

static int get_refused(char *buffer, const struct kernel_param *kp)
{
	return sysfs_emit(buffer, "%u\n", refused);
}

static const struct kernel_param_ops in_flight_ops = {
	.set = run_in_flight,
	.get = get_refused,
};
module_param_cb(test_blocks_in_flight, &in_flight_ops, NULL, 0644);
MODULE_PARM_DESC(test_blocks_in_flight, "TEST: a write begins and ends writes of a million other blocks one by one; reads as the number of them during which a block was not got from the host");

/* Calls a function with the first folio of a file, which is locked and in the page cache. */
static int change_file(const char *val, void (*change)(struct folio *folio))
{
	char *path = kstrdup(val, GFP_KERNEL);
	struct folio *folio;
	struct file *file;

	if (!path)
		return -ENOMEM;
	file = filp_open(strim(path), O_RDONLY, 0);
	kfree(path);
	if (IS_ERR(file))
		return PTR_ERR(file);
	folio = read_mapping_folio(file->f_mapping, 0, file);
	if (!IS_ERR(folio)) {
		folio_lock(folio);
		change(folio);
		folio_unlock(folio);
		folio_put(folio);
	}
	fput(file);
	return PTR_ERR_OR_ZERO(folio);
}

/* Makes a folio dirty, and clean again without a write. */
static void dirty_and_clean(struct folio *folio)
{
	filemap_dirty_folio(folio->mapping, folio);
	folio_cancel_dirty(folio);
}

static int set_page_dirtied(const char *val, const struct kernel_param *kp)
{
	return change_file(val, dirty_and_clean);
}

/* Changes the first page of a folio, which stays clean. */
static void zero(struct folio *folio)
{
	clear_highpage(folio_page(folio, 0));
}

static int set_page_zeroed(const char *val, const struct kernel_param *kp)
{
	return change_file(val, zero);
}

static const struct kernel_param_ops page_dirtied_ops = { .set = set_page_dirtied };
module_param_cb(test_page_dirtied, &page_dirtied_ops, NULL, 0200);
MODULE_PARM_DESC(test_page_dirtied, "TEST: makes the first folio of the file with this path dirty, and clean again without a write");

static const struct kernel_param_ops page_zeroed_ops = { .set = set_page_zeroed };
module_param_cb(test_page_zeroed, &page_zeroed_ops, NULL, 0200);
MODULE_PARM_DESC(test_page_zeroed, "TEST: fills the first page of the file with this path with zeroes, without making it dirty");
