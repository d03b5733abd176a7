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
	{ "mm_filemap_add_to_page_cache", tmem_probe_added },
};

/*
 * Number of probes that are always registered: all but the last one. The last one
 * is registered only while there may be an unknown file system.
 */
#define NR_STEADY_PROBES (ARRAY_SIZE(probes) - 1)

static void probe_match(struct tracepoint *tp, void *data)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(probes); i++)
		if (!strcmp(tp->name, probes[i].name))
			probes[i].tp = tp;
}

static int probe_set(struct tmem_probe *probe, bool on)
{
	int err;

	if (probe->registered == on || !probe->tp)
		return 0;
	err = on ? tracepoint_probe_register(probe->tp, probe->func, NULL) :
		   tracepoint_probe_unregister(probe->tp, probe->func, NULL);
	if (!err)
		probe->registered = on;
	return err;
}

/**
 * tmem_probes_register() - register the probes of the tracepoints
 *
 * Return: 0 or an error, which tmem_hooks_off() has reported.
 */
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
	for (i = 0; i < NR_STEADY_PROBES; i++) {
		err = probe_set(&probes[i], true);
		if (err) {
			tmem_hooks_off("cannot register for tracepoint %s: error %d",
				       probes[i].name, err);
			tmem_probes_unregister();
			return err;
		}
	}
	return 0;
}

/**
 * tmem_probe_new_mounts() - start or stop looking for file systems when pages are added to the page
 *                           cache
 * @on: true to start
 *
 * Context: the discovery work only, or after it has ended.
 */
void tmem_probe_new_mounts(bool on)
{
	/* If the registration fails, the driver finds a mount at the mount's first eviction. */
	if (probe_set(&probes[NR_STEADY_PROBES], on))
		pr_debug("cannot register or unregister the probe of tracepoint %s\n",
			 probes[NR_STEADY_PROBES].name);
}

/**
 * tmem_probes_unregister() - unregister the probes and wait until none runs
 */
void tmem_probes_unregister(void)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(probes); i++)
		probe_set(&probes[i], false);
	tracepoint_synchronize_unregister();
}
