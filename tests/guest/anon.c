// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * anon MIB NOISE COUNT SEED [hold]: a process with MIB mebibytes of anonymous memory, whose pages
 * contain NOISE percent of random bytes and zeros. It writes all pages in order and reads the first
 * 128 MiB in order. Then it reads COUNT pages in random order, and reads or writes COUNT pages in
 * random order. At the end, it measures COUNT / 4 reads of pages that are not in memory. With
 * "hold", it then sleeps until it is killed.
 *
 * Random places have Zipf's distribution with the exponent 2/3: of N pages, the page of rank
 * N * u^3 is used, where u is distributed evenly between 0 and 1. Equal arguments use equal places.
 *
 * The output has a line for each phase: its name, operations, seconds and major faults. The phase
 * "fault" has instead the number of measured faults, and their median and 99th percentile in
 * microseconds, without the cost of the measurement.
 *
 * Exit status: 0 all bytes right, 1 a wrong byte, 2 another failure.
 */
#define _GNU_SOURCE
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>
#include <x86intrin.h>

#define PAGE		4096UL
#define WORDS		(PAGE / sizeof(uint64_t))
#define SEQUENTIAL	(128UL << 20 >> 12)	/* pages that are read in order */
#define WRITE_PERCENT	20
#define SPREAD		2654435761ul	/* a prime, so that each rank has its own page */

struct memory {
	uint64_t *words;
	uint8_t *versions;	/* number of writes to each page after the first, modulo 256 */
	uint64_t pages;
	unsigned int noise;	/* random words at the start of a page */
};

struct phase {
	const char *name;
	double began;
	long faults;
};

static uint64_t random_state;

static void die(const char *what)
{
	perror(what);
	exit(2);
}

static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15ull;
	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
	x = (x ^ x >> 27) * 0x94d049bb133111ebull;
	return x ^ x >> 31;
}

static uint64_t next_random(void)
{
	random_state++;
	return mix(random_state);
}

static uint64_t next_page(const struct memory *m)
{
	double u = (next_random() >> 11) * 0x1p-53;
	uint64_t rank = m->pages * (u * u * u);

	return rank * SPREAD % m->pages;
}

static double now(void)
{
	struct timespec at;

	if (clock_gettime(CLOCK_MONOTONIC, &at))
		die("clock_gettime");
	return at.tv_sec + at.tv_nsec * 1e-9;
}

static long major_faults(void)
{
	struct rusage use;

	if (getrusage(RUSAGE_SELF, &use))
		die("getrusage");
	return use.ru_majflt;
}

static struct phase begin(const char *name)
{
	return (struct phase){ .name = name, .faults = major_faults(), .began = now() };
}

static void end(struct phase phase, uint64_t operations)
{
	double seconds = now() - phase.began;

	printf("%s %lu %.6f %ld\n", phase.name, operations, seconds, major_faults() - phase.faults);
	fflush(stdout);
}

/* Bytes of these arrays must stay in memory: a fault on them is not one that is measured. */
static void *locked(size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (p == MAP_FAILED || mlock(p, bytes))
		die("anon: locked memory");
	return p;
}

static uint64_t stamp(const struct memory *m, uint64_t page)
{
	return page << 8 | m->versions[page];
}

static void fill(const struct memory *m, uint64_t page)
{
	uint64_t *words = m->words + page * WORDS;

	for (unsigned int i = 1; i < m->noise; i++)
		words[i] = mix(page * WORDS + i);
	words[0] = stamp(m, page);
}

static void check(const struct memory *m, uint64_t page)
{
	const uint64_t *words = m->words + page * WORDS;
	unsigned int i = 1 + page % (m->noise - 1);

	if (words[0] == stamp(m, page) && words[i] == mix(page * WORDS + i) && !words[WORDS - 1])
		return;
	printf("ANON MISMATCH page %lu: stamp %lx, not %lx\n", page, words[0], stamp(m, page));
	exit(1);
}

static void overwrite(const struct memory *m, uint64_t page)
{
	m->versions[page]++;
	m->words[page * WORDS] = stamp(m, page);
}

static void touch_randomly(const struct memory *m, const char *name, uint64_t count, bool writes)
{
	struct phase phase = begin(name);

	for (uint64_t i = 0; i < count; i++) {
		uint64_t page = next_page(m);

		check(m, page);
		if (writes && next_random() % 100 < WRITE_PERCENT)
			overwrite(m, page);
	}
	end(phase, count);
}

static int compare_ticks(const void *one, const void *other)
{
	uint64_t a = *(const uint64_t *)one, b = *(const uint64_t *)other;

	return (a > b) - (a < b);
}

static void measure_faults(const struct memory *m, uint64_t count)
{
	uint64_t *ticks = locked(count * sizeof(*ticks)), measured = 0, begin_ticks = __rdtsc();
	double began = now(), ticks_per_us;
	unsigned char present;

	for (uint64_t i = 0; i < count * 8 && measured < count; i++) {
		uint64_t page = next_random() % m->pages, at;
		volatile uint64_t *words = m->words + page * WORDS;

		if (mincore((void *)words, PAGE, &present))
			die("mincore");
		if (present & 1)
			continue;
		at = __rdtsc();
		(void)*words;
		ticks[measured++] = __rdtsc() - at;
		check(m, page);
	}
	ticks_per_us = (__rdtsc() - begin_ticks) / ((now() - began) * 1e6);
	qsort(ticks, measured, sizeof(*ticks), compare_ticks);
	printf("fault %lu %.3f %.3f\n", measured, measured ? ticks[measured / 2] / ticks_per_us : 0,
	       measured ? ticks[measured * 99 / 100] / ticks_per_us : 0);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	struct memory m = {};
	struct phase phase;
	uint64_t count;

	if (argc < 5 || argc > 6 || (argc == 6 && strcmp(argv[5], "hold"))) {
		fputs("usage: anon MIB NOISE COUNT SEED [hold]\n", stderr);
		return 2;
	}
	m.pages = strtoull(argv[1], NULL, 0) << 20 >> 12;
	m.noise = WORDS * strtoul(argv[2], NULL, 0) / 100;
	count = strtoull(argv[3], NULL, 0);
	random_state = strtoull(argv[4], NULL, 0) << 32;
	if (!m.pages || m.noise < 2 || m.noise >= WORDS || count < 4) {
		fputs("anon: MIB must be at least 1, NOISE 1 to 99, COUNT at least 4\n", stderr);
		return 2;
	}
	m.versions = locked(m.pages);
	m.words = mmap(NULL, m.pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
		       -1, 0);
	if (m.words == MAP_FAILED)
		die("anon: mmap");
	phase = begin("fill");
	for (uint64_t page = 0; page < m.pages; page++)
		fill(&m, page);
	end(phase, m.pages);
	phase = begin("sequential");
	for (uint64_t page = 0; page < m.pages && page < SEQUENTIAL; page++)
		check(&m, page);
	end(phase, m.pages < SEQUENTIAL ? m.pages : SEQUENTIAL);
	touch_randomly(&m, "read", count, false);
	touch_randomly(&m, "write", count, true);
	measure_faults(&m, count / 4);
	if (argc == 6)
		pause();
	return 0;
}
