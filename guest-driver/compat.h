/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Every difference between kernel series that hooks/ has to know, and nothing
 * else: no other file of the driver asks for LINUX_VERSION_CODE.
 */
#ifndef _TMEM_COMPAT_H
#define _TMEM_COMPAT_H

#include <linux/ftrace.h>
#include <linux/pagemap.h>
#include <linux/version.h>

/* 6.1 has the older name of the setter and no accessor for arguments. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 2, 0)
#define tmem_set_ip(fregs, ip) ftrace_instruction_pointer_set(fregs, ip)
#define tmem_arg(fregs, n) regs_get_kernel_argument(&(fregs)->regs, n)
#else
#define tmem_set_ip(fregs, ip) ftrace_regs_set_instruction_pointer(fregs, ip)
#define tmem_arg(fregs, n) ftrace_regs_get_argument(fregs, n)
#endif

/*
 * A part of a readahead request, to be given to the file system as if it were all.
 * Fields of the structure that a kernel adds are carried along by the copy.
 */
static inline struct readahead_control tmem_rac_part(const struct readahead_control *rac,
						     pgoff_t index, unsigned int nr_pages)
{
	struct readahead_control part = *rac;

	part._index = index;
	part._nr_pages = nr_pages;
	part._batch_count = 0;
	part._workingset = false;
	return part;
}

/* Every folio of the request has been dealt with through parts of it. */
static inline void tmem_rac_done(struct readahead_control *rac)
{
	rac->_index += rac->_nr_pages;
	rac->_nr_pages = 0;
	rac->_batch_count = 0;
}

/* 6.10 on knows the source of a trace event's string from its declaration. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 10, 0)
#define tmem_assign_str(dst, src) __assign_str(dst, src)
#else
#define tmem_assign_str(dst, src) __assign_str(dst)
#endif

/* The series of the headers this was built with, as KERNEL_VERSION(major, minor, 0). */
#define TMEM_BUILT_FOR (LINUX_VERSION_CODE & ~0xff)

#endif /* _TMEM_COMPAT_H */
