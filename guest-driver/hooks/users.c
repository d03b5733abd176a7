// SPDX-License-Identifier: GPL-2.0-only
/*
 * Waiting for tasks that are in a section which may sleep: a replacement function of this module,
 * or a read that uses a file system. hooks.h has the functions that begin and end a section.
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
 * @users: the counts; no section can begin any more, and the caller sees all that began
 *
 * From then on the counts only become smaller. So a sum of 0 means that all sections have ended,
 * although the CPUs are read one after the other.
 *
 * The function reads the counts once per tick. To be woken instead, the tasks that end a section
 * would have to share a cache line. There is rarely a task to wait for.
 *
 * Context: process, may sleep.
 */
void tmem_users_wait(const long __percpu *users)
{
	while (sum(users))
		schedule_timeout_idle(1);
	/* Pairs with tmem_users_end(). */
	smp_mb();
}
