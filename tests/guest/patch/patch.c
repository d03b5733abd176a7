// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Changes a guest's ftrace as the tests need it:
 *
 * - insmod patch.ko function=NAME: redirects the function through ftrace, as a live patch does, but
 *   does not change what it does
 * - insmod patch.ko kill=1: makes the kernel disable ftrace, as after an internal error
 * - insmod patch.ko flush=1: calls try_to_unmap_flush() with kswapd's task flag, as the split of a
 *   large folio in kswapd does
 */
#include <linux/ftrace.h>
#include <linux/kprobes.h>
#include <linux/module.h>

static char *function;
module_param(function, charp, 0444);
static bool kill;
module_param(kill, bool, 0444);
static bool flush;
module_param(flush, bool, 0444);

static void patch_func(unsigned long ip, unsigned long parent_ip, struct ftrace_ops *op,
		       struct ftrace_regs *fregs)
{
}

static struct ftrace_ops ops = {
	.func = patch_func,
	.flags = FTRACE_OPS_FL_IPMODIFY |
		 (IS_ENABLED(CONFIG_DYNAMIC_FTRACE_WITH_ARGS) ? 0 : FTRACE_OPS_FL_SAVE_REGS),
};

static unsigned long address_of(const char *name)
{
	/* Register a disabled kprobe, only to find the address of the function by its name. */
	struct kprobe probe = { .symbol_name = name, .flags = KPROBE_FLAG_DISABLED };
	unsigned long address;

	if (register_kprobe(&probe))
		return 0;
	address = (unsigned long)probe.addr;
	unregister_kprobe(&probe);
	return address;
}

static int __init patch_init(void)
{
	unsigned long address = address_of(kill ? "ftrace_kill" :
					   flush ? "try_to_unmap_flush" : function);
	int err;

	if (!address)
		return -ENOENT;
	if (kill || flush) {
		if (flush)
			current->flags |= PF_KSWAPD;
		((void (*)(void))address)();
		if (flush)
			current->flags &= ~PF_KSWAPD;
		return 0;
	}
	err = ftrace_set_filter_ip(&ops, address, 0, 0);
	if (!err)
		err = register_ftrace_function(&ops);
	if (err)
		ftrace_free_filter(&ops);
	return err;
}

static void __exit patch_exit(void)
{
	if (kill || flush)
		return;
	unregister_ftrace_function(&ops);
	ftrace_free_filter(&ops);
}

module_init(patch_init);
module_exit(patch_exit);

MODULE_DESCRIPTION("virtio-tmem tests: another user of ftrace");
MODULE_LICENSE("Dual MIT/GPL");
