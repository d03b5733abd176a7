// SPDX-License-Identifier: GPL-2.0-only
/*
 * POSIX_FADV_DONTNEED: the driver does not put pages that such a call evicts. The advice is only a
 * hint. There is a fixed number of slots for running calls. The driver puts the pages that a call
 * without a slot evicts.
 */
#include <linux/fadvise.h>
#include <linux/fs.h>
#include <linux/pagemap.h>

#include "hooks.h"

/* Maximum number of running POSIX_FADV_DONTNEED calls whose ranges the driver records. */
#define TMEM_FADVISE_MAX 8

static struct fadvise_range {
	const struct address_space *mapping;
	pgoff_t first, last;
} fadvise_ranges[TMEM_FADVISE_MAX];
static unsigned long fadvise_used;

/*
 * Returns whether a running POSIX_FADV_DONTNEED covers a page. The answer may be wrong while such a
 * call begins or ends. Context: any.
 */
bool tmem_fadvise_covers(const struct address_space *mapping, pgoff_t index)
{
	unsigned int i;

	if (likely(!READ_ONCE(fadvise_used)))
		return false;
	for (i = 0; i < TMEM_FADVISE_MAX; i++) {
		if (READ_ONCE(fadvise_ranges[i].mapping) == mapping &&
		    index >= READ_ONCE(fadvise_ranges[i].first) &&
		    index <= READ_ONCE(fadvise_ranges[i].last))
			return true;
	}
	return false;
}

static int fadvise_dontneed(struct file *file, loff_t offset, loff_t len)
{
	struct address_space *mapping = file->f_mapping;
	struct inode *inode = mapping->host;
	/*
	 * Compute the whole pages in the range, because the kernel drops only these. A length of 0
	 * means up to the end of the file.
	 */
	u64 end = (u64)offset + (u64)len;
	pgoff_t first = DIV_ROUND_UP_ULL((u64)offset, PAGE_SIZE);
	pgoff_t nr = len && end >= (u64)len && end < (u64)i_size_read(inode) ?
		     end >> PAGE_SHIFT : ULONG_MAX;
	/* A range that contains no whole page evicts nothing, and needs no slot. */
	unsigned int slot = nr > first ? 0 : TMEM_FADVISE_MAX;
	int ret;

	for (; slot < TMEM_FADVISE_MAX; slot++) {
		if (!test_and_set_bit(slot, &fadvise_used)) {
			fadvise_ranges[slot].first = first;
			fadvise_ranges[slot].last = nr - 1;
			/*
			 * Set the mapping last, so that a reader that finds it sees the range of
			 * the call.
			 */
			smp_store_release(&fadvise_ranges[slot].mapping, mapping);
			break;
		}
	}
	ret = tmem_original(generic_fadvise)(file, offset, len, POSIX_FADV_DONTNEED);
	if (slot < TMEM_FADVISE_MAX) {
		WRITE_ONCE(fadvise_ranges[slot].mapping, NULL);
		clear_bit_unlock(slot, &fadvise_used);
	}
	return ret;
}

static int wrap_fadvise(struct file *file, loff_t offset, loff_t len, int advice)
{
	int ret;

	tmem_enter();
	if (advice == POSIX_FADV_DONTNEED && offset >= 0 && len >= 0 &&
	    S_ISREG(file_inode(file)->i_mode))
		ret = fadvise_dontneed(file, offset, len);
	else
		ret = tmem_original(generic_fadvise)(file, offset, len, advice);
	tmem_leave();
	return ret;
}

static bool wants_fadvise(struct tmem_args *args)
{
	const struct file *file = (void *)tmem_arg(args, 0);

	return tmem_fs_serves(file_inode(file)->i_sb);
}

const struct tmem_target tmem_fadvise_targets[] = {
	{
		.name = "generic_fadvise",
		.addr = (unsigned long)generic_fadvise,
		.hook = TMEM_HOOK_FADVISE,
		.wrap = wrap_fadvise,
		.wanted = wants_fadvise,
	},
	{}
};
