// SPDX-License-Identifier: GPL-2.0-only
/*
 * Tests of tools/autosize_law.h against a simulated guest.
 *
 * The guest has file pages in units of 64 KiB. Programs read units at random, the kernel and the
 * service evict those that were read longest ago, and the pool keeps a share of them. A read from
 * the disk makes a task wait for memory, a read from the pool does not, so that the law has to
 * detect useless reclaim by its other rules. The test prints its seed, and accepts a seed as its
 * argument.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../tools/autosize_law.h"

#define MIB		(1ull << 20)
#define UNIT_BYTES	(64ull << 10)
#define UNIT_PAGES	(UNIT_BYTES / AUTOSIZE_PAGE_BYTES)
#define UNITS		(700 * MIB / UNIT_BYTES)
#define DISK_UNIT_US	1000
#define TICKS		100
#define HOUR		3600

#define CHECK(condition) \
	do { \
		if (!(condition)) { \
			fprintf(stderr, "%s:%d: %s\n", __func__, __LINE__, #condition); \
			exit(1); \
		} \
	} while (0)

static const struct autosize_limits limits = {
	.boot_s = 120, .idle_s = 120, .pause_s = 60, .pause_max_s = 600, .floor_bytes = 128 * MIB
};

static uint64_t rng_state;

/* splitmix64 (Steele, Lea, Flood 2014) */
static uint64_t rng(void)
{
	uint64_t z = rng_state += 0x9e3779b97f4a7c15ULL;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ULL;
	z = (z ^ z >> 27) * 0x94d049bb133111ebULL;
	return z ^ z >> 31;
}

static struct {
	bool cached[UNITS], pooled[UNITS], known[UNITS];
	uint64_t read_at[UNITS];
	uint64_t reads;			/* number of the last read */
	unsigned int kept_percent;	/* share of evicted units that the pool keeps */
	bool late;			/* the host refuses the others later, the driver does not */
	uint64_t refused;		/* pages that it will have refused at the next sample */
	struct autosize_sample now;
	struct autosize law;
	enum autosize_why why;
} guest;

static void read_unit(unsigned int unit)
{
	guest.read_at[unit] = ++guest.reads;
	if (guest.cached[unit])
		return;
	guest.cached[unit] = true;
	guest.now.file_bytes += UNIT_BYTES;
	if (guest.known[unit])
		guest.now.refaults += UNIT_PAGES;
	if (guest.pooled[unit])
		guest.now.hits += UNIT_PAGES;
	else if (guest.known[unit])
		guest.now.stall_us += DISK_UNIT_US;
	guest.pooled[unit] = false;
	guest.known[unit] = true;
}

/* Evicts the units that were read longest ago, until the law stops the step. */
static void reclaim(uint64_t bytes)
{
	static const uint64_t never = UINT64_MAX;
	struct autosize_sample begun = guest.now;
	unsigned int unit, oldest = 0;

	for (; bytes >= UNIT_BYTES && !autosize_stop(&begun, &guest.now); bytes -= UNIT_BYTES) {
		uint64_t at = never;

		for (unit = 0; unit < UNITS; unit++) {
			if (guest.cached[unit] && guest.read_at[unit] < at) {
				at = guest.read_at[unit];
				oldest = unit;
			}
		}
		CHECK(at != never);
		guest.cached[oldest] = false;
		guest.pooled[oldest] = rng() % 100 < guest.kept_percent;
		guest.now.file_bytes -= UNIT_BYTES;
		guest.now.evicted += UNIT_PAGES;
		guest.now.own += UNIT_PAGES;
		guest.now.taken += guest.pooled[oldest] || guest.late ? UNIT_PAGES : 0;
		guest.refused += !guest.pooled[oldest] && guest.late ? UNIT_PAGES : 0;
	}
}

/* Starts a guest whose programs have read all files once. */
static void start(double uptime_s)
{
	unsigned int unit;

	memset(&guest, 0, sizeof(guest));
	guest.kept_percent = 100;
	guest.now.cpus = 1;
	guest.now.now_s = uptime_s;
	guest.now.on = true;
	guest.now.reports = true;
	for (unit = 0; unit < UNITS; unit++)
		read_unit(unit);
}

/*
 * Lets a second pass in which programs read @reads units of the first @set, and use @load percent
 * of the processor. Returns the bytes that the law let the service reclaim.
 */
static uint64_t run_second(unsigned int set, unsigned int reads, unsigned int load)
{
	uint64_t step;

	while (reads--)
		read_unit(rng() % set);
	guest.now.now_s++;
	guest.now.ticks += TICKS;
	guest.now.busy += TICKS * load / 100;
	guest.now.failed += guest.refused;
	guest.refused = 0;
	step = autosize_step(&guest.law, &limits, &guest.now, &guest.why);
	CHECK((guest.why == AUTOSIZE_RETURNING) == (step > 0));
	CHECK(step <= AUTOSIZE_STEP_BYTES_MAX * AUTOSIZE_IDLE_FACTOR);
	CHECK(!step || guest.now.file_bytes - step >= limits.floor_bytes);
	reclaim(step);
	return step;
}

static void run_quiet_seconds(unsigned int seconds)
{
	while (seconds--)
		run_second(1, 1, 1);
}

/* An idle guest gets down to the floor, in large steps after two minutes without load. */
static void an_idle_guest_returns_its_page_cache(void)
{
	unsigned int seconds = 0;

	start(1000);
	run_quiet_seconds(110);
	CHECK(guest.now.file_bytes > 400 * MIB && guest.now.file_bytes < 500 * MIB);
	while (guest.why != AUTOSIZE_FLOOR && ++seconds < 60)
		run_quiet_seconds(1);
	CHECK(guest.now.file_bytes <= limits.floor_bytes + AUTOSIZE_STEP_BYTES_MIN);
	/* It does not begin again for each page that programs read. */
	guest.now.file_bytes = limits.floor_bytes * 9 / 8;
	CHECK(!run_second(1, 1, 1) && guest.why == AUTOSIZE_FLOOR);
	guest.now.file_bytes += UNIT_BYTES;
	CHECK(run_second(1, 1, 1));
	/* A guest with load returns memory, too, but slowly. */
	start(0);
	for (seconds = 0; seconds < limits.boot_s + 180; seconds++)
		run_second(100 * MIB / UNIT_BYTES, 200, 50);
	CHECK(guest.now.file_bytes > 300 * MIB && guest.now.file_bytes < 500 * MIB);
}

/* A working set that alternates between 100 and 600 MiB each minute is not reclaimed each time. */
static void an_alternating_working_set_is_left_alone(void)
{
	const unsigned int small = 100 * MIB / UNIT_BYTES, large = 600 * MIB / UNIT_BYTES;
	double ratio, amplitude_bytes = 500 * MIB;
	unsigned int t, load;

	for (load = 1; load <= 50; load += 49) {
		start(1000);
		for (t = 0; t < HOUR; t++)
			run_second(t / 60 % 2 ? large : small, t / 60 % 2 ? 2000 : 300, load);
		ratio = guest.now.own * AUTOSIZE_PAGE_BYTES / amplitude_bytes;
		printf("autosize: alternating, load %u %%: reclaimed %.2f times the amplitude\n",
		       load, ratio);
		CHECK(ratio <= 2);
	}
}

/* A stall ends reclaim within two seconds. Each pause is twice as long as the one before. */
static void pauses_after_stalls_double(void)
{
	static const unsigned int pauses[] = { 60, 120, 240, 480, 600, 600 };
	unsigned int i, t;

	start(1000);
	run_quiet_seconds(20);
	CHECK(guest.why == AUTOSIZE_RETURNING);
	for (i = 0; i < sizeof(pauses) / sizeof(*pauses); i++) {
		guest.now.stall_us += AUTOSIZE_STALL_PAUSE_US + 1;
		CHECK(!run_second(1, 1, 1) && guest.why == AUTOSIZE_STALL);
		for (t = 1; !run_second(1, 1, 1); t++)
			CHECK(t < HOUR);
		CHECK(t == pauses[i]);
	}
	/* Steps are half as large after a pause. As much time without trouble restores them. */
	start(1000);
	guest.now.stall_us += AUTOSIZE_STALL_PAUSE_US + 1;
	while (!run_second(1, 1, 50))
		;
	guest.now.stall_us += AUTOSIZE_STALL_PAUSE_US + 1;
	while (!run_second(1, 1, 50))
		;
	CHECK(guest.law.level == 1);
	for (t = 1; t < limits.pause_s; t++)
		run_second(1, 1, 50);
	CHECK(!guest.law.level && guest.why == AUTOSIZE_RETURNING);
	/* A short stall delays the next step only. */
	start(1000);
	run_quiet_seconds(20);
	guest.now.stall_us += AUTOSIZE_STALL_WAIT_US + 1;
	CHECK(!run_second(1, 1, 1) && guest.why == AUTOSIZE_WAITING);
	run_quiet_seconds(AUTOSIZE_STALL_SAMPLES);
	CHECK(guest.why == AUTOSIZE_RETURNING && !guest.law.level);
}

/* Nothing is reclaimed after boot, without cache, without reporting, or if pages may be swapped. */
static void obstacles_prevent_reclaim(void)
{
	start(0);
	run_quiet_seconds(119);
	CHECK(guest.why == AUTOSIZE_BOOTING && !guest.now.own);
	run_quiet_seconds(2);
	CHECK(guest.why == AUTOSIZE_RETURNING && guest.now.own);
	guest.now.on = false;
	CHECK(!run_second(1, 1, 1) && guest.why == AUTOSIZE_CACHE_OFF);
	/* The law does not count what the kernel evicts meanwhile. */
	guest.now.evicted += 100000;
	CHECK(!run_second(1, 1, 1));
	guest.now.on = true;
	CHECK(run_second(1, 1, 1));
	guest.now.reports = false;
	CHECK(!run_second(1, 1, 1) && guest.why == AUTOSIZE_NO_REPORTING);
	guest.now.reports = true;
	guest.now.swaps = true;
	CHECK(!run_second(1, 1, 1) && guest.why == AUTOSIZE_SWAP);
}

/* If the pool does not keep the pages, the service soon ends, before the disk reads them again. */
static void pages_that_the_pool_does_not_keep_end_reclaim(void)
{
	start(1000);
	guest.kept_percent = 50;
	run_quiet_seconds(HOUR);
	CHECK(guest.now.own * AUTOSIZE_PAGE_BYTES < 100 * MIB);
	start(1000);
	guest.kept_percent = 50;
	run_quiet_seconds(5);
	CHECK(guest.why == AUTOSIZE_UNKEPT);
}

/* The host refuses pages some time after the driver has sent them. That ends reclaim, too. */
static void pages_that_the_host_refuses_later_end_reclaim(void)
{
	start(1000);
	guest.kept_percent = 0;
	guest.late = true;
	run_quiet_seconds(5);
	CHECK(guest.why == AUTOSIZE_UNKEPT);
	run_quiet_seconds(HOUR);
	CHECK(guest.now.own * AUTOSIZE_PAGE_BYTES < 100 * MIB);

	/* More pages may be refused between two samples than are sent. */
	start(1000);
	run_quiet_seconds(20);
	guest.now.failed += guest.now.taken;
	CHECK(!run_second(1, 1, 1) && guest.why == AUTOSIZE_UNKEPT);
	/* Refusals of pages that were evicted before the service began do not count. */
	start(1000);
	run_quiet_seconds(1);
	guest.now.failed += 100000;
	run_quiet_seconds(10);
	CHECK(guest.why == AUTOSIZE_RETURNING);
}

/* The driver's counters begin again when the module is loaded again. */
static void counters_of_a_new_driver_do_not_count_as_losses(void)
{
	start(1000);
	run_quiet_seconds(20);
	CHECK(guest.why == AUTOSIZE_RETURNING && guest.now.taken);
	guest.now.hits = 5000;
	guest.now.failed = 100;
	CHECK(run_second(1, 1, 1));
	guest.now.taken = 0;
	guest.now.hits = 0;
	guest.now.failed = 0;
	CHECK(run_second(1, 1, 1));
	run_quiet_seconds(5);
	CHECK(guest.why == AUTOSIZE_RETURNING);
	guest.kept_percent = 0;
	run_quiet_seconds(5);
	CHECK(guest.why == AUTOSIZE_UNKEPT);
}

/* A large step of an idle guest ends before much is lost. */
static void a_step_ends_when_it_harms(void)
{
	const struct autosize_sample begun = { .on = true, .evicted = 7, .taken = 5, .failed = 1 };
	struct autosize_sample now = begun;
	uint64_t before;

	start(1000);
	run_quiet_seconds(120);
	before = guest.now.own;
	CHECK(run_second(1, 1, 1) > AUTOSIZE_STEP_BYTES_MAX);
	CHECK(guest.now.own - before > 2 * AUTOSIZE_UNKEPT_PAGES_MIN);
	guest.kept_percent = 0;
	before = guest.now.own;
	CHECK(run_second(1, 1, 1) > AUTOSIZE_STEP_BYTES_MAX);
	CHECK(guest.now.own - before <= AUTOSIZE_UNKEPT_PAGES_MIN + UNIT_PAGES);

	now.evicted += 2000 + AUTOSIZE_UNKEPT_PAGES_MIN;
	now.taken += 2000;
	now.stall_us += AUTOSIZE_STALL_WAIT_US;
	CHECK(!autosize_stop(&begun, &now));
	now.failed++;
	CHECK(autosize_stop(&begun, &now));
	now = begun;
	now.taken++;			/* a put precedes its eviction */
	CHECK(!autosize_stop(&begun, &now));
	now = begun;
	now.stall_us += AUTOSIZE_STALL_WAIT_US + 1;
	CHECK(autosize_stop(&begun, &now));
	now = begun;
	now.on = false;
	CHECK(autosize_stop(&begun, &now));
}

/* Reads of many reclaimed pages cause one pause, whether they last a second or 40. */
static void an_event_causes_one_pause(void)
{
	unsigned int seconds, t, why;

	for (seconds = 1; seconds <= 40; seconds += 39) {
		start(1000);
		run_quiet_seconds(20);
		for (t = 0, why = 0; t < 200; t++) {
			if (t < seconds) {
				guest.now.refaults += 2000;
				guest.now.hits += 2000;
			}
			run_second(1, 1, 1);
			CHECK(t || guest.why == AUTOSIZE_BACK);
			why += guest.why != AUTOSIZE_RETURNING && guest.why != AUTOSIZE_FLOOR;
		}
		CHECK(why == limits.pause_s);
	}
}

/* One busy thread is load, on any number of processors. So is a time in which the guest slept. */
static void a_busy_thread_prevents_large_steps(void)
{
	unsigned int t, busy;
	uint64_t step;

	for (busy = 20; busy <= 30; busy += 10) {
		start(1000);
		guest.now.cpus = 32;
		run_quiet_seconds(1);
		for (t = 0; t < 200; t++) {
			guest.now.ticks += 31 * TICKS;
			step = run_second(1, 1, busy);
			CHECK(step || guest.why == AUTOSIZE_FLOOR);
			CHECK(busy == 20 || step <= AUTOSIZE_STEP_BYTES_MAX);
		}
		CHECK((guest.why == AUTOSIZE_FLOOR) == (busy == 20));
	}
	/* Large steps may cause a little load: it prevents them, and does not end them. */
	start(1000);
	for (t = 0; t < 200; t++)
		CHECK(run_second(1, 1, 10) <= AUTOSIZE_STEP_BYTES_MAX);
	start(1000);
	run_quiet_seconds(125);
	CHECK(run_second(1, 1, 20) > AUTOSIZE_STEP_BYTES_MAX);
	CHECK(run_second(1, 1, 20) > AUTOSIZE_STEP_BYTES_MAX);
	CHECK(run_second(1, 1, 30) <= AUTOSIZE_STEP_BYTES_MAX);
	/* The service's own time is no load, either. */
	start(1000);
	for (t = 0; t < 125; t++) {
		guest.now.own_busy += TICKS * 60 / 100;
		step = run_second(1, 1, 61);
	}
	CHECK(step > AUTOSIZE_STEP_BYTES_MAX);
	start(1000);
	run_quiet_seconds(100);
	guest.now.now_s += HOUR;
	CHECK(run_second(1, 1, 1) <= AUTOSIZE_STEP_BYTES_MAX);
	CHECK(guest.why == AUTOSIZE_RETURNING);
	/* The kernel's sum of idle time may fall, which does not show that the guest is idle. */
	run_quiet_seconds(10);
	CHECK(guest.law.busy_at_s < guest.now.now_s);
	guest.now.ticks -= 2 * TICKS;
	run_quiet_seconds(1);
	CHECK(guest.law.busy_at_s == guest.now.now_s);
}

/* Reads of reclaimed pages from the disk end reclaim sooner than reads from the pool. */
static void pages_that_come_back_end_reclaim(void)
{
	unsigned int i, unit = 0, t;

	for (i = 0; i < 2; i++) {
		start(1000);
		run_quiet_seconds(100);
		CHECK(guest.why == AUTOSIZE_RETURNING);
		for (t = 0; guest.why == AUTOSIZE_RETURNING; t++) {
			/* Read 32 units in a second: few enough that no stall is counted. */
			guest.now.refaults += 32 * UNIT_PAGES;
			guest.now.hits += i ? 0 : 32 * UNIT_PAGES;
			run_second(1, 1, 1);
			CHECK(++unit < HOUR);
		}
		CHECK(guest.why == (i ? AUTOSIZE_DISK : AUTOSIZE_BACK));
		CHECK(i ? t <= 3 : t > 3);
	}
}

/* If the kernel reclaims nothing, the service does not try each second. */
static void fruitless_steps_are_not_repeated(void)
{
	unsigned int t, steps = 0;

	start(1000);
	for (t = 0; t < HOUR; t++) {
		guest.now.now_s++;
		guest.now.ticks += TICKS;
		steps += !!autosize_step(&guest.law, &limits, &guest.now, &guest.why);
	}
	CHECK(steps > 0 && steps <= HOUR / limits.pause_s + 1);
}

/* The size of a step does not grow with the guest's memory without limit. */
static void steps_are_limited(void)
{
	start(1000);
	run_quiet_seconds(1);
	guest.now.now_s++;
	guest.now.file_bytes = 64 * 1024 * MIB;
	CHECK(autosize_step(&guest.law, &limits, &guest.now, &guest.why) ==
	      AUTOSIZE_STEP_BYTES_MAX);
}

int main(int argc, char **argv)
{
	rng_state = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
	printf("autosize_test: seed %llu\n", (unsigned long long)rng_state);
	an_idle_guest_returns_its_page_cache();
	an_alternating_working_set_is_left_alone();
	pauses_after_stalls_double();
	obstacles_prevent_reclaim();
	pages_that_the_pool_does_not_keep_end_reclaim();
	pages_that_the_host_refuses_later_end_reclaim();
	counters_of_a_new_driver_do_not_count_as_losses();
	a_step_ends_when_it_harms();
	an_event_causes_one_pause();
	a_busy_thread_prevents_large_steps();
	pages_that_come_back_end_reclaim();
	fruitless_steps_are_not_repeated();
	steps_are_limited();
	return 0;
}
