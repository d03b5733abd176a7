/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * How the hooks are attached to the kernel. This header decides between two ways:
 *
 * - A module redirects functions with ftrace (ftrace.c) and joins tracepoints (tracepoints.c), in a
 *   kernel without patches.
 * - A kernel with the patches of intree/ calls the hooks itself (intree.c). The driver is built in,
 *   and the kernel needs no ftrace, kprobes or tracepoints. Kbuild then defines TMEM_INTREE.
 *
 * All other files of hooks/ are the same for both ways.
 */
#ifndef _TMEM_ATTACH_H
#define _TMEM_ATTACH_H

#include <linux/fs.h>
#include <linux/types.h>

#include "../compat.h"

/* Arguments of a hooked function, for tmem_arg(args, n) with n from 0. */
struct tmem_args;

#ifdef TMEM_INTREE
#include <linux/tmem_hooks.h>

/* Maximum number of arguments that a hook reads. */
#define TMEM_ARGS_MAX 3

struct tmem_args {
	unsigned long value[TMEM_ARGS_MAX];
};

#define tmem_arg(args, n) ((args)->value[n])

/* Name of the original function, which runs without the hook. */
#define tmem_original(function) __##function

/*
 * submit_bio() calls its hook before it accounts for a bio. So /proc/vmstat and the task's I/O lack
 * a bio that the driver submits.
 */
#define __submit_bio submit_bio_noacct

/* A kernel with the patches calls the hook for mounts in any configuration. */
#define TMEM_HAS_MOUNT_HOOK true

/* True if driver and kernel are built together, from a source that the patches of intree/ fit. */
#define TMEM_BUILT_IN true
#else
#define tmem_arg(args, n) tmem_ftrace_arg((struct ftrace_regs *)(args), n)

/*
 * Name of the original function. ftrace.c recognizes calls from this module and does not redirect
 * them.
 */
#define tmem_original(function) function

/* The hook for mounts needs CONFIG_SECURITY, without which the hooked function is inline. */
#define TMEM_HAS_MOUNT_HOOK IS_ENABLED(CONFIG_SECURITY)

#define TMEM_BUILT_IN false
#endif

#endif /* _TMEM_ATTACH_H */
