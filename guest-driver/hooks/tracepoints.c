// SPDX-License-Identifier: GPL-2.0-only
/*
 * Registers the probes of put.c and bio.c at tracepoints, for a driver in a module. In a
 * kernel with the patches of intree/, intree.c takes the place of this file.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/string.h>
#include <linux/tracepoint.h>

#include "blocks.h"
#include "hooks.h"

static struct tmem_probe {
	const char *name;
	void *func;
	struct tracepoint *tp;
	bool registered;
} probes[] = {
	{ "mm_filemap_delete_from_page_cache", tmem_probe_removed },
	{ "writeback_dirty_folio", tmem_probe_dirty },
	{ "block_bio_queue", tmem_probe_bio_queue },
	{ "block_rq_issue", tmem_probe_rq_issue },
};

static void probe_match(struct tracepoint *tp, void *data)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(probes); i++)
		if (!strcmp(tp->name, probes[i].name))
			probes[i].tp = tp;
}

/* Registers the probes. Returns 0 or an error, which tmem_hooks_off() has reported. */
int tmem_probes_register(void)
{
	unsigned int i;
	int err;

	for_each_kernel_tracepoint(probe_match, NULL);
	for (i = 0; i < ARRAY_SIZE(probes); i++) {
		if (!probes[i].tp) {
			tmem_hooks_off("this kernel has no tracepoint %s", probes[i].name);
			return -ENOENT;
		}
	}
	for (i = 0; i < ARRAY_SIZE(probes); i++) {
		err = tracepoint_probe_register(probes[i].tp, probes[i].func, NULL);
		probes[i].registered = !err;
		if (err) {
			tmem_hooks_off("cannot register for tracepoint %s: error %d",
				       probes[i].name, err);
			tmem_probes_unregister();
			return err;
		}
	}
	return 0;
}

/* Unregisters the probes and waits until none runs. */
void tmem_probes_unregister(void)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(probes); i++)
		if (probes[i].registered &&
		    !tracepoint_probe_unregister(probes[i].tp, probes[i].func, NULL))
			probes[i].registered = false;
	tracepoint_synchronize_unregister();
}
