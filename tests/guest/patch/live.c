// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Live-patches one function of the kernel without a change of its effect:
 *
 *   insmod live.ko function=NAME
 *
 * The replacement function jumps into the original function, to the instruction after its call of
 * ftrace. It is not written in C, because it would need the types of each function's arguments.
 */
#include <linux/ftrace.h>
#include <linux/kprobes.h>
#include <linux/livepatch.h>
#include <linux/module.h>
#include <asm/nospec-branch.h>

static char *function;
module_param(function, charp, 0444);

/* Address of the instruction in the original function that follows its call of ftrace. */
unsigned long live_original;
void live_replacement(void);

/*
 * The code may overwrite %rax at the start of a function: only variadic functions have an argument
 * in it.
 */
asm(".pushsection .text\n"
    ".globl live_replacement\n"
    ".type live_replacement, @function\n"
    "live_replacement:\n"
    "	mov live_original(%rip), %rax\n"
    ANNOTATE_RETPOLINE_SAFE
    "	jmp *%rax\n"
    ".size live_replacement, . - live_replacement\n"
    ".popsection\n");

static struct klp_func funcs[] = {
	{ .new_func = live_replacement },
	{ }
};

static struct klp_object objects[] = {
	{ .funcs = funcs },	/* an object without a name is the kernel itself, not a module */
	{ }
};

static struct klp_patch patch = { .mod = THIS_MODULE, .objs = objects };

static int __init live_init(void)
{
	/* Register a disabled kprobe, only to find the address of the function by its name. */
	struct kprobe probe = { .symbol_name = function, .flags = KPROBE_FLAG_DISABLED };
	static const u8 endbr64[] = { 0xf3, 0x0f, 0x1e, 0xfa };
	int err = register_kprobe(&probe);

	if (err)
		return err;
	live_original = (unsigned long)probe.addr - probe.offset;
	unregister_kprobe(&probe);
	if (!memcmp((void *)live_original, endbr64, sizeof(endbr64)))
		live_original += sizeof(endbr64);
	live_original += MCOUNT_INSN_SIZE;
	funcs[0].old_name = function;
	return klp_enable_patch(&patch);
}

/* Does nothing. The kernel unloads the module only after 0 was written to its file "enabled". */
static void __exit live_exit(void)
{
}

module_init(live_init);
module_exit(live_exit);

MODULE_DESCRIPTION("virtio-tmem tests: a live patch");
MODULE_LICENSE("Dual MIT/GPL");
MODULE_INFO(livepatch, "Y");
