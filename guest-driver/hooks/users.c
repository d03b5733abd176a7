// SPDX-License-Identifier: GPL-2.0-only
/*
 * Waits for sections that may last long: replacement functions of this module, bios in flight, and
 * fills. hooks.h has the functions that begin and end a section.
 */
#include <linux/percpu.h>
#include <linux/sched.h>

#include "hooks.h"

static long sum(const long __percpu *users)
{
	long all = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		all += READ_ONCE(*per_cpu_ptr(users, cpu));
	return all;
}

/**
 * tmem_users_wait() - wait until all sections have ended
 * @users: the counts. No section can begin any more, and the caller sees the counts of all sections
 *   that have begun.
 *
 * From then on the counts only become smaller. So a sum of 0 means that all sections have ended,
 * although the CPUs are read one after the other.
 *
 * The function reads the counts once per tick. Waking it would need a cache line that all tasks
 * share when they end a section. The function rarely has to wait.
 *
 * Context: process, may sleep.
 */
void tmem_users_wait(const long __percpu *users)
{
	while (sum(users))
		schedule_timeout_idle(1);
	/* See all accesses of the sections that have ended; pairs with tmem_users_end(). */
	smp_mb();
}
