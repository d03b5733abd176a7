// SPDX-License-Identifier: GPL-2.0-only
/*
 * POSIX_FADV_DONTNEED: the driver does not put pages that such a call evicts, and erases the
 * entries of the call's range. Coherence does not depend on this, because the advice is only a
 * hint. The driver puts the pages that a call without a slot evicts (busy.c), and erases their
 * entries when the call ends.
 */
#include <linux/fadvise.h>
#include <linux/fs.h>
#include <linux/pagemap.h>

#include "../compat.h"
#include "hooks.h"

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
	struct tmem_fs *fs;
	int slot = -1, ret;

	/* A range that contains no whole page evicts nothing, and needs no slot. */
	if (nr > first)
		slot = tmem_busy_begin(mapping, first, nr - 1);
	ret = tmem_original(generic_fadvise)(file, offset, len, POSIX_FADV_DONTNEED);
	tmem_busy_end(slot);
	if (ret || nr <= first)
		return ret;

	fs = tmem_fs_get(inode->i_sb);
	if (fs) {
		tmem_invalidate_range(fs->pool, inode->i_ino, first, nr - 1, TMEM_INVAL_FADVISE);
		tmem_fs_put(fs);
	}
	return ret;
}

/**
 * tmem_wrap_fadvise() - replacement of generic_fadvise()
 * @file: the file
 * @offset: start of the range in bytes
 * @len: length of the range in bytes, or 0 up to the end of the file
 * @advice: POSIX_FADV_...
 *
 * Return: result of the original generic_fadvise().
 */
int tmem_wrap_fadvise(struct file *file, loff_t offset, loff_t len, int advice)
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

/**
 * tmem_wants_fadvise() - check whether to replace a call of generic_fadvise()
 * @args: arguments of the call; the first is the file
 *
 * Return: true if the file is on a file system that is served.
 */
bool tmem_wants_fadvise(struct tmem_args *args)
{
	const struct file *file = (void *)tmem_arg(args, 0);

	return tmem_fs_serves(file_inode(file)->i_sb);
}
