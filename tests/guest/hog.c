// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * hog BUSY_MS IDLE_MS: a real-time task that uses its processor for BUSY_MS milliseconds and sleeps
 * for IDLE_MS milliseconds, until it is killed. Other tasks on the processor run only while it
 * sleeps. The kernel permits real-time tasks 95 % of the time.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static long long now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000LL + now.tv_nsec;
}

int main(int argc, char **argv)
{
	const struct sched_param priority = { .sched_priority = 1 };
	long busy_ms, idle_ms;
	long long end_ns;

	if (argc != 3 || (busy_ms = atol(argv[1])) <= 0 || (idle_ms = atol(argv[2])) <= 0) {
		fputs("usage: hog BUSY_MS IDLE_MS\n", stderr);
		return 2;
	}
	if (sched_setscheduler(0, SCHED_FIFO, &priority)) {
		perror("sched_setscheduler");
		return 2;
	}
	for (;;) {
		end_ns = now_ns() + busy_ms * 1000000LL;
		while (now_ns() < end_ns)
			;
		usleep(idle_ms * 1000);
	}
}
