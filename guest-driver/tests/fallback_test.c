// SPDX-License-Identifier: GPL-2.0-only
/*
 * User-space tests of core/fallback.h: when the driver stops letting the host retain pages, and when
 * it begins again. The tests are deterministic.
 */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef uint64_t u64;

#define READ_ONCE(x) (*(const volatile __typeof__(x) *)&(x))
#define WRITE_ONCE(x, value) (*(volatile __typeof__(x) *)&(x) = (value))

#include "../core/fallback.h"

#define GONE_MAX	(TMEM_REF_WINDOW / TMEM_GONE_DIVISOR)
#define CPUS_MAX	64
/* Pages of the page cache. A reference is sent after this many further gets. */
#define CACHE_PAGES	512
/* After a full pool, the host may retain all pages again after this many gets at most. */
#define RECOVERY_GETS	4096

static int failures;

static void expect(int good, const char *what)
{
	if (good)
		return;
	fprintf(stderr, "FAILED: %s\n", what);
	failures++;
}

static void learn(struct tmem_fallback *fallback, bool gone, unsigned int times)
{
	while (times--)
		tmem_fallback_learn(fallback, gone);
}

static void test_more_than_a_sixteenth_gone_begins_fallback(void)
{
	struct tmem_fallback fallback = {};

	learn(&fallback, true, GONE_MAX);
	learn(&fallback, false, TMEM_REF_WINDOW - GONE_MAX);
	expect(!tmem_in_fallback(&fallback), "64 of 1,024 answers GONE begin the fallback");
	/* These answers replace as many older ones. */
	learn(&fallback, true, GONE_MAX);
	expect(!tmem_in_fallback(&fallback), "GONE answers count after 1,024 further answers");
	learn(&fallback, true, 1);
	expect(tmem_in_fallback(&fallback), "65 of 1,024 answers GONE do not begin the fallback");
}

static void test_pages_retained_before_fallback_do_not_end_it_early(void)
{
	struct tmem_fallback fallback = {};

	/* A sample of an earlier fallback that was never answered does not count. */
	tmem_fallback_sample(&fallback, 64);
	learn(&fallback, true, GONE_MAX + 1);
	learn(&fallback, false, TMEM_REF_WINDOW - GONE_MAX - 1);
	expect(tmem_in_fallback(&fallback), "answers for pages of no sample end the fallback early");
	learn(&fallback, false, 1);
	expect(!tmem_in_fallback(&fallback), "1,024 answers with 64 GONE do not end the fallback");
}

/*
 * Simulates a guest in fallback that gets pages and evicts them in the order of the gets. Its @cpus
 * processors make gets in turns. A get has @part pages, or, if @part is 0, has the pages of the
 * readahead windows of a file of 128 pages. The host loses a page of the sample if @loses is not 0
 * and divides the page's number. Returns the number of gets (pages) until the fallback ends, or at
 * least @gets_max if it does not end before. Sets *@retained to the number of pages of the sample.
 */
static unsigned int gets_in_fallback(unsigned int cpus, unsigned int part, unsigned int loses,
				     unsigned int gets_max, unsigned int *retained)
{
	static const unsigned char windows[] = { 4, 8, 16, 32, 32, 32, 4 };
	static bool cached[CACHE_PAGES], gone[CACHE_PAGES];
	unsigned int gets = 0, turn, pages, i, at, samples = 0;
	struct tmem_fallback fallback = {};
	int due[CPUS_MAX] = {};
	bool sample;

	memset(cached, 0, sizeof(cached));
	learn(&fallback, true, TMEM_REF_WINDOW);
	/* An earlier fallback left a different number to each processor. */
	for (i = 0; i < cpus; i++)
		due[i] = -(int)(i * 19 % 32 * (part ?: 32));
	for (turn = 0; gets < gets_max && tmem_in_fallback(&fallback); turn++) {
		pages = part ?: windows[turn % sizeof(windows)];
		sample = tmem_fallback_chooses(&due[turn % cpus], pages);
		if (sample)
			tmem_fallback_sample(&fallback, pages);
		for (i = 0; i < pages; i++, gets++) {
			at = gets % CACHE_PAGES;
			if (cached[at])
				tmem_fallback_learn(&fallback, gone[at]);
			cached[at] = sample;
			samples += sample;
			gone[at] = sample && loses && !(samples % loses);
		}
	}
	*retained = samples;
	return gets;
}

static void test_fallback_ends_soon_after_the_host_loses_no_page(void)
{
	unsigned int cpus, part, gets, retained, most = 0;

	for (cpus = 1; cpus <= CPUS_MAX; cpus++) {
		for (part = 0; part <= 64; part = part ? 2 * part : 1) {
			gets = gets_in_fallback(cpus, part, 0, 1 << 20, &retained);
			most = gets > most ? gets : most;
		}
	}
	printf("fallback_test: fallback lasts up to %u gets\n", most);
	expect(most <= RECOVERY_GETS, "fallback lasts more than 4,096 gets");
}

static void test_fallback_lasts_while_the_host_loses_pages(void)
{
	const unsigned int gets_max = 1 << 18;
	unsigned int part, loses, gets, retained;

	for (part = 0; part <= 64; part = part ? 2 * part : 1) {
		for (loses = 1; loses <= 8; loses *= 2) {
			gets = gets_in_fallback(1, part, loses, gets_max, &retained);
			expect(gets >= gets_max,
			       "fallback ends although the host loses an eighth of the sample");
			expect(retained <= gets_max / TMEM_RETAIN_SAMPLE + 64,
			       "more than one page in 32 is in the sample");
		}
	}
}

int main(void)
{
	test_more_than_a_sixteenth_gone_begins_fallback();
	test_pages_retained_before_fallback_do_not_end_it_early();
	test_fallback_ends_soon_after_the_host_loses_no_page();
	test_fallback_lasts_while_the_host_loses_pages();
	printf("fallback_test: %s\n", failures ? "FAILED" : "ok");
	return !!failures;
}
