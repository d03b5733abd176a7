// SPDX-License-Identifier: GPL-2.0-only
/*
 * State and counters of the module. sysfs.c shows them to the operator, and sync.c reports them to
 * the host. A change of the state requests a report.
 *
 * The state stays poisoned until the module is loaded again.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/sysfs.h>

#include "core.h"

/* This file has the instances of the tracepoints, which use the names of counters. */
#define CREATE_TRACE_POINTS
#include "../trace.h"

#define REASON_BYTES	256

DEFINE_PER_CPU(struct tmem_stats, tmem_stats);

const char *const tmem_stat_names[NR_TMEM_STATS] = {
#define TMEM_STAT(name) __stringify(name),
#include "stats_list.h"
#undef TMEM_STAT
};

/* Leaf lock, taken with interrupts off. Guards the state variables of this file. */
static DEFINE_SPINLOCK(state_lock);
static bool online;			/* result of tmem_online(); also read without the lock */
static bool ready;			/* there is a device with a backend */
static bool is_tripped;
static char poison_reason[REASON_BYTES];
static char hooks_reason[REASON_BYTES];
static char on_note[REASON_BYTES];
static char offline_reason[REASON_BYTES] = "no device";
static char note[TMEM_NOTE_BYTES];
/* file systems that are served, bits of VIRTIO_TMEM_H_... */
static u64 served;
static u64 hooks_live;

static void update_online(void)
{
	lockdep_assert_held(&state_lock);
	WRITE_ONCE(online, ready && !poison_reason[0] && !hooks_reason[0]);
}

bool tmem_online(void)
{
	return READ_ONCE(online);
}

/* Records that there is no device or no backend. sysfs shows the reason. */
void tmem_state_offline(const char *why)
{
	unsigned long flags;

	spin_lock_irqsave(&state_lock, flags);
	ready = false;
	is_tripped = false;
	strscpy(offline_reason, why, sizeof(offline_reason));
	update_online();
	spin_unlock_irqrestore(&state_lock, flags);
}

/* Records that the device has a backend and knows the guest's pools. */
void tmem_state_online(void)
{
	unsigned long flags;
	bool report;

	spin_lock_irqsave(&state_lock, flags);
	report = !ready;
	ready = true;
	update_online();
	spin_unlock_irqrestore(&state_lock, flags);
	if (report)
		tmem_dev_report_any();
}

/*
 * Records whether the breaker is open. Context: under get_lock of the device, together with the
 * change of dev->tripped.
 */
void tmem_state_tripped(bool tripped)
{
	unsigned long flags;

	spin_lock_irqsave(&state_lock, flags);
	is_tripped = tripped;
	spin_unlock_irqrestore(&state_lock, flags);
}

void tmem_poison(const char *why, u64 block)
{
	unsigned long flags;
	bool first;

	tmem_count(TMEM_STAT_mismatches);
	trace_tmem_poison(why, block);
	spin_lock_irqsave(&state_lock, flags);
	first = !poison_reason[0];
	if (first)
		scnprintf(poison_reason, sizeof(poison_reason), "%s, block %llu", why, block);
	update_online();
	spin_unlock_irqrestore(&state_lock, flags);
	if (!first)
		return;
	pr_crit("a page was wrong (%s, block %llu): the cache is off until the module is loaded again; check the host\n",
		why, block);
	tmem_dev_report_any();
}

void tmem_core_set_hooks(u64 live, const char *off_reason)
{
	unsigned long flags;

	spin_lock_irqsave(&state_lock, flags);
	hooks_live = live;
	strscpy(hooks_reason, off_reason ?: "", sizeof(hooks_reason));
	update_online();
	spin_unlock_irqrestore(&state_lock, flags);
	tmem_dev_report_any();
}

void tmem_core_set_served(u64 types, const char *text)
{
	unsigned long flags;

	spin_lock_irqsave(&state_lock, flags);
	served = types;
	strscpy(note, text, sizeof(note));
	spin_unlock_irqrestore(&state_lock, flags);
	tmem_dev_report_any();
}

void tmem_core_set_note(const char *text)
{
	unsigned long flags;

	spin_lock_irqsave(&state_lock, flags);
	strscpy(on_note, text, sizeof(on_note));
	spin_unlock_irqrestore(&state_lock, flags);
}

/*
 * Returns the state for the host (VIRTIO_TMEM_R_...), and sets @hooks to the bits of the live hooks
 * and of the served file system types.
 */
u32 tmem_state_report(u64 *hooks)
{
	unsigned long flags;
	u32 state;

	spin_lock_irqsave(&state_lock, flags);
	*hooks = hooks_live | served;
	if (poison_reason[0])
		state = VIRTIO_TMEM_R_POISONED;
	else if (hooks_reason[0])
		state = VIRTIO_TMEM_R_OFF;
	else if (!ready)
		state = VIRTIO_TMEM_R_OFFLINE;
	else if (is_tripped)
		state = VIRTIO_TMEM_R_TRIPPED;
	else
		state = VIRTIO_TMEM_R_ON;
	spin_unlock_irqrestore(&state_lock, flags);
	return state;
}

/* Prints the state for sysfs. Returns the length of the line in bytes. */
ssize_t tmem_state_show(char *buf)
{
	ssize_t len;

	spin_lock_irq(&state_lock);
	if (poison_reason[0])
		len = sysfs_emit(buf, "poisoned: %s\n", poison_reason);
	else if (hooks_reason[0])
		len = sysfs_emit(buf, "off: %s\n", hooks_reason);
	else if (!ready)
		len = sysfs_emit(buf, "%s: %s\n", rcu_access_pointer(tmem_device) ?
				 "offline" : "off", offline_reason);
	else
		len = sysfs_emit(buf, "%s%s%s%s%s\n", is_tripped ? "tripped" : "on",
				 *note || *on_note ? ": " : "", on_note,
				 *note && *on_note ? "; " : "", note);
	spin_unlock_irq(&state_lock);
	return len;
}

/* --- counters ------------------------------------------------------------------------------ */

/* Returns the sum of neighbouring counters, from @first to @last, over all CPUs. */
u64 tmem_stat_sum(enum tmem_stat first, enum tmem_stat last)
{
	u64 sum = 0;
	int cpu, i;

	for_each_possible_cpu(cpu)
		for (i = first; i <= last; i++)
			sum += READ_ONCE(per_cpu_ptr(&tmem_stats, cpu)->count[i]);
	return sum;
}
