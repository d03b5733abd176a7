// SPDX-License-Identifier: GPL-2.0-only
/*
 * tmem-guest trial: switches the cache off and on for periods of equal length while the guest does
 * its usual work, and compares disk reads, I/O wait and pressure of both.
 *
 * The order of the periods is OFF ON ON OFF, twice. So a load that rises or falls steadily changes
 * the sums of both kinds equally. The first third of a period does not count: the pool is empty
 * when the cache is switched on.
 *
 * A difference is reported only if all periods of one kind are above all periods of the other kind.
 * If the cache changed nothing, chance would order four and four periods so in 3 of 100 trials.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tmem-guest.h"

#define PERIODS			8
#define KINDS			2
#define OF_KIND			(PERIODS / KINDS)
#define MINUTES_LEAST		0.4
#define MINUTES_MOST		1440
/* Part of a period that does not count. */
#define WARM_UP			(1 / 3.0)
#define TYPES_MAX		32
#define SECTOR_BYTES		512
#define MIB			(1024 * 1024.0)
/* A difference below this is of no use to anyone, even if it is certain. */
#define LEAST_MIB_PER_S		0.01
#define LEAST_PERCENT		0.1

const char trial_text[] =
"usage: tmem-guest trial MINUTES [--json]\n"
"\n"
"Measures whether the cache helps the load that runs in this guest now. Switches\n"
"the cache off and on for eight periods, which take MINUTES (0.4 to 1440) in all,\n"
"and compares them. Run it while the guest does its usual work, which has to be\n"
"about the same in all periods: an hour of even load is better than ten minutes.\n"
"While the cache is off, the guest is as slow as without it. Each time it is\n"
"switched off, the pool loses the pages of this guest.\n"
"\n"
"The trial ends early on Ctrl-C, and leaves the cache as it was before. Only root\n"
"may run it.\n"
"\n"
"  disk reads   MiB per second that all disks of the guest read\n"
"  I/O wait     time in which a processor had nothing to do but wait for a disk\n"
"  I/O stall    time in which a task waited for a disk (/proc/pressure/io)\n"
"  memory stall time in which a task waited for memory (/proc/pressure/memory)\n"
"  hits         pages that came from the pool, in percent of the requested ones\n"
"\n"
"Exit status: 0 whatever the result is; 1 if the trial did not finish; 3 if the\n"
"cache is not on; 5 without permission.\n";

/* --- switching the cache ------------------------------------------------------------------- */

/* Types of file systems whose cache was on before the trial. */
static char switched[TYPES_MAX][32];
static unsigned int nr_switched;

static bool write_switch(const char *type, char value)
{
	char path[PATH_MAX];
	FILE *file;
	bool done;

	snprintf(path, sizeof(path), SYSFS "/fs/%s/enabled", type);
	file = fopen(path, "we");
	done = file && fputc(value, file) != EOF;
	if (file && fclose(file))
		done = false;
	if (!done)
		fail(errno == EACCES || errno == EPERM ? EXIT_NOT_OWNER : EXIT_SOME, "%s: %s",
		     path, strerror(errno));
	return done;
}

static bool switch_cache(bool on)
{
	bool done = true;
	unsigned int i;

	for (i = 0; i < nr_switched; i++)
		done &= write_switch(switched[i], on ? '1' : '0');
	return done;
}

/* Finds the types of file systems whose cache is on. */
static void find_switches(void)
{
	DIR *directory = opendir(SYSFS "/fs");
	char path[PATH_MAX], line[16];
	struct dirent *entry;

	while (directory && nr_switched < TYPES_MAX && (entry = readdir(directory))) {
		snprintf(path, sizeof(path), SYSFS "/fs/%s", entry->d_name);
		if (entry->d_name[0] == '.' || strlen(entry->d_name) >= sizeof(switched[0]) ||
		    !read_line(path, "enabled", line, sizeof(line)) || strcmp(line, "1"))
			continue;
		strcpy(switched[nr_switched++], entry->d_name);
	}
	if (directory)
		closedir(directory);
}

static bool is_on(void)
{
	char state[512];

	return read_line(SYSFS, "state", state, sizeof(state)) &&
	       (!strcmp(state, "on") || !strncmp(state, "on:", 3));
}

/* --- measures ------------------------------------------------------------------------------ */

/* Sums since the guest was started, and differences of such sums. A stall is -1 if unknown. */
struct sample {
	double seconds, read_bytes, wait, processor, io_us, memory_us, gets, hits;
};

static double monotonic_s(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

/* Returns what disks have read. Devices above other devices, such as LVM, would count it twice. */
static double read_bytes(void)
{
	DIR *directory = opendir("/sys/block");
	char path[PATH_MAX], line[512];
	struct dirent *entry;
	double sectors, sum = 0;

	while (directory && (entry = readdir(directory))) {
		snprintf(path, sizeof(path), "/sys/block/%s/device", entry->d_name);
		if (entry->d_name[0] == '.' || access(path, F_OK))
			continue;
		snprintf(path, sizeof(path), "/sys/block/%s", entry->d_name);
		if (read_line(path, "stat", line, sizeof(line)) &&
		    sscanf(line, "%*f %*f %lf", &sectors) == 1)
			sum += sectors * SECTOR_BYTES;
	}
	if (directory)
		closedir(directory);
	return sum;
}

/* Sums up the times of all processors, in ticks: while they waited for disks, and all. */
static void processor_times(struct sample *s)
{
	char line[512], *rest = line + strlen("cpu");
	unsigned int i;
	double ticks;
	char *end;

	if (!read_line("/proc", "stat", line, sizeof(line)) || strncmp(line, "cpu ", 4))
		return;
	/* user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user time */
	for (i = 0; i < 8; i++) {
		ticks = strtod(rest, &end);
		if (end == rest)
			break;
		s->processor += ticks;
		if (i == 4)
			s->wait = ticks;
		rest = end;
	}
}

static double stall_us(const char *what)
{
	char line[128];
	const char *total = NULL;

	if (read_line("/proc/pressure", what, line, sizeof(line)))
		total = strstr(line, "total=");
	return total ? strtod(total + strlen("total="), NULL) : -1;
}

static double counter(const char *name)
{
	char line[32];

	return read_line(SYSFS "/stats", name, line, sizeof(line)) ? strtod(line, NULL) : 0;
}

static struct sample sample(void)
{
	struct sample s = {
		.seconds = monotonic_s(), .read_bytes = read_bytes(),
		.io_us = stall_us("io"), .memory_us = stall_us("memory"),
		.gets = counter("gets"), .hits = counter("hits"),
	};

	processor_times(&s);
	return s;
}

static double difference(double after, double before)
{
	return before < 0 || after < 0 ? -1 : after - before;
}

static struct sample since(struct sample before)
{
	struct sample s = sample();

	s.seconds -= before.seconds;
	s.read_bytes -= before.read_bytes;
	s.wait -= before.wait;
	s.processor -= before.processor;
	s.io_us = difference(s.io_us, before.io_us);
	s.memory_us = difference(s.memory_us, before.memory_us);
	s.gets -= before.gets;
	s.hits -= before.hits;
	return s;
}

static double mib_per_s(const struct sample *s)
{
	return s->read_bytes / MIB / s->seconds;
}

static double wait_percent(const struct sample *s)
{
	return s->processor > 0 ? 100 * s->wait / s->processor : 0;
}

static double io_percent(const struct sample *s)
{
	return s->io_us < 0 ? -1 : s->io_us / 1e4 / s->seconds;
}

static double memory_percent(const struct sample *s)
{
	return s->memory_us < 0 ? -1 : s->memory_us / 1e4 / s->seconds;
}

static double hit_percent(const struct sample *s)
{
	return s->gets > 0 ? 100 * s->hits / s->gets : 0;
}

static const struct measure {
	const char *name, *key;
	double (*of)(const struct sample *s);
	double least;		/* smallest difference of medians that is reported */
} measures[] = {
	{ "disk reads, MiB/s", "disk_reads_mib_per_s", mib_per_s, LEAST_MIB_PER_S },
	{ "I/O wait, %", "io_wait_percent", wait_percent, LEAST_PERCENT },
	{ "I/O stall, %", "io_stall_percent", io_percent, LEAST_PERCENT },
	{ "memory stall, %", "memory_stall_percent", memory_percent, LEAST_PERCENT },
};

#define NR_MEASURES (sizeof(measures) / sizeof(*measures))

/* --- result -------------------------------------------------------------------------------- */

/* Lowest, median and highest value of the periods of one kind. */
struct range {
	double low, median, high;
};

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return (x > y) - (x < y);
}

static struct range range_of(const struct sample *samples, double (*of)(const struct sample *s))
{
	double values[OF_KIND];
	unsigned int i;

	for (i = 0; i < OF_KIND; i++)
		values[i] = of(&samples[i]);
	qsort(values, OF_KIND, sizeof(*values), by_value);
	return (struct range){
		.low = values[0],
		.median = (values[OF_KIND / 2 - 1] + values[OF_KIND / 2]) / 2,
		.high = values[OF_KIND - 1],
	};
}

/* Returns -1 if the cache makes a measure smaller, 1 if it makes it larger, and otherwise 0. */
static int effect(struct range off, struct range on, double least)
{
	if (on.high < off.low && off.median - on.median >= least)
		return -1;
	if (on.low > off.high && on.median - off.median >= least)
		return 1;
	return 0;
}

static const char *verdict(bool less, bool more)
{
	if (less && more)
		return "mixed";
	if (less)
		return "helps";
	return more ? "harms" : "no difference shown";
}

static void show(struct sample samples[KINDS][OF_KIND])
{
	static const char *const effects[] = { "less with the cache", "no difference shown",
					       "more with the cache" };
	struct range hits = range_of(samples[1], hit_percent), off, on;
	bool less = false, more = false;
	unsigned int i;
	int found;

	if (json)
		printf("{\"seconds_counted\": %.1f", samples[0][0].seconds);
	else
		printf("medians of %d periods, with the lowest and highest\n%-18s%24s%24s\n",
		       OF_KIND, "", "cache off", "cache on");
	for (i = 0; i < NR_MEASURES; i++) {
		off = range_of(samples[0], measures[i].of);
		on = range_of(samples[1], measures[i].of);
		found = off.low < 0 ? 0 : effect(off, on, measures[i].least);
		less |= found < 0;
		more |= found > 0;
		if (json && off.low < 0)
			printf(", \"%s\": null", measures[i].key);
		else if (json)
			printf(", \"%s\": {\"off\": [%.3f, %.3f, %.3f], \"on\": [%.3f, %.3f, %.3f], \"effect\": %d}",
			       measures[i].key, off.low, off.median, off.high, on.low, on.median,
			       on.high, found);
		else if (off.low < 0)
			printf("%-18s the kernel does not measure it (boot parameter psi=1)\n",
			       measures[i].name);
		else
			printf("%-18s%8.2f (%.2f-%.2f)  %8.2f (%.2f-%.2f)  %s\n", measures[i].name,
			       off.median, off.low, off.high, on.median, on.low, on.high,
			       effects[found + 1]);
	}
	if (json)
		printf(", \"hits_percent\": [%.1f, %.1f, %.1f], \"verdict\": \"%s\"}\n", hits.low,
		       hits.median, hits.high, verdict(less, more));
	else
		printf("%-18s%24s%8.1f (%.1f-%.1f)\n\nresult: %s\n", "hits, %", "", hits.median,
		       hits.low, hits.high, verdict(less, more));
}

/* --- the trial ----------------------------------------------------------------------------- */

static double minutes;

bool trial_minutes(const char *text)
{
	char *end;

	minutes = strtod(text, &end);
	return end != text && !*end && minutes >= MINUTES_LEAST && minutes <= MINUTES_MOST;
}

/* Sleeps. Returns false if the command is to end. */
static bool wait_s(const sigset_t *ends, double seconds)
{
	struct timespec time = { (time_t)seconds, (seconds - (time_t)seconds) * 1e9 };

	return sigtimedwait(ends, NULL, &time) < 0;
}

static bool run_periods(struct sample samples[KINDS][OF_KIND], const sigset_t *ends)
{
	static const bool is_on_in[PERIODS] = { 0, 1, 1, 0, 0, 1, 1, 0 };
	double seconds = minutes * 60 / PERIODS;
	unsigned int nr[KINDS] = {}, period;
	struct sample before;
	bool on;

	for (period = 0; period < PERIODS; period++) {
		on = is_on_in[period];
		fprintf(stderr, "tmem-guest: period %u of %d: cache %s for %.0f s\n", period + 1,
			PERIODS, on ? "on" : "off", seconds);
		if (!switch_cache(on))
			return false;
		if (!wait_s(ends, seconds * WARM_UP)) {
			fail(EXIT_SOME, "the trial was ended");
			return false;
		}
		before = sample();
		if (!wait_s(ends, seconds * (1 - WARM_UP))) {
			fail(EXIT_SOME, "the trial was ended");
			return false;
		}
		samples[on][nr[on]++] = since(before);
		if (!is_on()) {
			fail(EXIT_NO_DRIVER,
			     "the driver was not on in this period: try tmem-guest status");
			return false;
		}
	}
	return true;
}

void do_trial(void)
{
	struct sample samples[KINDS][OF_KIND];
	char state[512];
	sigset_t ends;
	bool done;

	if (!driver_state(state, sizeof(state)))
		return;
	if (!is_on()) {
		fail(EXIT_NO_DRIVER, "the cache is not on; the driver's state is \"%s\"", state);
		return;
	}
	find_switches();
	if (!nr_switched) {
		fail(EXIT_NO_DRIVER, "the cache of all types of file systems is off: write 1 to "
		     SYSFS "/fs/TYPE/enabled");
		return;
	}
	sigemptyset(&ends);
	sigaddset(&ends, SIGINT);
	sigaddset(&ends, SIGTERM);
	sigaddset(&ends, SIGHUP);
	sigprocmask(SIG_BLOCK, &ends, NULL);
	done = run_periods(samples, &ends);
	if (!switch_cache(true))
		done = false;
	if (done)
		show(samples);
}
