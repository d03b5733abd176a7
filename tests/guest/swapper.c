// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Changes anonymous memory and shared memory, and checks every byte of it. Each page has the number
 * of its region, its own number and the number of its version, and words that depend on these.
 *
 *	swapper SEED MIB ROUNDS		random operations on memory of MIB mebibytes
 *	swapper mark TEXT MIB		writes pages to the swap area, and sleeps
 *
 * The pages of `mark` begin with TEXT, and every second one with TEXT and "odd". The signal USR1
 * frees the latter, and no signal is expected after it. The signal USR2 has the program check,
 * change and write all pages again.
 *
 * Exit status: 0 all bytes right, 1 a wrong byte, 2 another failure.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE		4096UL
#define WORDS		(PAGE / sizeof(uint64_t))
#define NR_REGIONS	4
#define RUN_MAX		512	/* pages of one operation */

#ifndef MADV_PAGEOUT
#define MADV_PAGEOUT	21
#endif

struct region {
	uint64_t *words;
	uint32_t *versions;	/* by page; 0: all bytes are 0 */
	bool shared;
};

static struct region regions[NR_REGIONS];
static uint64_t pages;		/* of a region */
static uint64_t state;

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

static uint64_t below(uint64_t n)
{
	return mix(state++) % n;
}

/* Returns a word of a version of a page. Half of the words are easy to compress. */
static uint64_t word(unsigned int region, uint64_t page, uint32_t version, unsigned int i)
{
	uint64_t name = (uint64_t)region << 56 | page << 32 | version;

	if (!version)
		return 0;
	return i % 2 ? name : mix(name * WORDS + i);
}

static void map(struct region *r, bool shared)
{
	int flags = MAP_ANONYMOUS | (shared ? MAP_SHARED : MAP_PRIVATE);

	r->words = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0);
	if (r->words == MAP_FAILED)
		die("mmap");
	r->shared = shared;
	memset(r->versions, 0, pages * sizeof(*r->versions));
}

static void check(unsigned int region, uint64_t page)
{
	const uint64_t *words = regions[region].words + page * WORDS;
	uint32_t version = regions[region].versions[page];

	for (unsigned int i = 0; i < WORDS; i++) {
		if (words[i] == word(region, page, version, i))
			continue;
		printf("SWAP MISMATCH region %u page %lu version %u word %u: %lx, not %lx\n", region,
		       page, version, i, words[i], word(region, page, version, i));
		fflush(stdout);
		_exit(1);
	}
}

static void put(unsigned int region, uint64_t page)
{
	uint64_t *words = regions[region].words + page * WORDS;
	uint32_t version = ++regions[region].versions[page];

	for (unsigned int i = 0; i < WORDS; i++)
		words[i] = word(region, page, version, i);
}

static void each(unsigned int region, uint64_t page, uint64_t nr,
		 void (*act)(unsigned int region, uint64_t page))
{
	while (nr--)
		act(region, page++);
}

/*
 * Forks. The child checks pages, changes its private copies, and checks them. Meanwhile, the parent
 * changes some of its own pages.
 */
static void fork_and_write(unsigned int region, uint64_t page, uint64_t nr)
{
	pid_t child = fork();
	int status;

	if (child < 0)
		die("fork");
	if (!child) {
		each(region, page, nr, check);
		if (!regions[region].shared) {
			each(region, page, nr, put);
			if (madvise(regions[region].words + page * WORDS, nr * PAGE, MADV_PAGEOUT))
				die("madvise of the child");
			each(region, page, nr, check);
		}
		_exit(0);
	}
	if (!regions[region].shared)
		each(region, page, nr / 2, put);
	if (waitpid(child, &status, 0) != child)
		die("waitpid");
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		exit(WIFEXITED(status) ? WEXITSTATUS(status) : 2);
	each(region, page, nr, check);
}

static void renew(unsigned int region)
{
	struct region *r = &regions[region];

	if (munmap(r->words, pages * PAGE))
		die("munmap");
	map(r, below(2));
}

static void step(void)
{
	unsigned int region = below(NR_REGIONS);
	struct region *r = &regions[region];
	uint64_t page = below(pages), nr = 1 + below(RUN_MAX);
	void *at;

	if (nr > pages - page)
		nr = pages - page;
	at = r->words + page * WORDS;
	switch (below(16)) {
	case 0 ... 5:
		each(region, page, nr, put);
		break;
	case 6 ... 10:
		each(region, page, nr, check);
		break;
	case 11 ... 12:
		if (madvise(at, nr * PAGE, MADV_PAGEOUT))
			die("MADV_PAGEOUT");
		break;
	case 13:
		fork_and_write(region, page, nr);
		break;
	case 14:
		/* For shared memory, MADV_REMOVE frees the pages. */
		if (madvise(at, nr * PAGE, r->shared ? MADV_REMOVE : MADV_DONTNEED))
			die("MADV_DONTNEED");
		memset(r->versions + page, 0, nr * sizeof(*r->versions));
		break;
	default:
		if (!below(16))
			renew(region);
	}
}

static void wake(int number)
{
	(void)number;
}

static volatile sig_atomic_t change_wanted;

static void want_change(int number)
{
	(void)number;
	change_wanted = 1;
}

/* Returns the last word of a page of `mark`: how often the page was changed. */
static uint64_t *version_of(char *page)
{
	return (uint64_t *)page + WORDS - 1;
}

/* Checks the version of each page, changes it, and writes the pages to the swap area again. */
static void change(char *at, size_t bytes, uint64_t version)
{
	for (size_t page = 0; page < bytes; page += PAGE) {
		if (*version_of(at + page) != version) {
			printf("SWAP MISMATCH page %zu: version %lu, not %lu\n", page / PAGE,
			       *version_of(at + page), version);
			exit(1);
		}
	}
	for (size_t page = 0; page < bytes; page += PAGE)
		*version_of(at + page) = version + 1;
	if (madvise(at, bytes, MADV_PAGEOUT))
		die("MADV_PAGEOUT");
	printf("changed %lu\n", version + 1);
	fflush(stdout);
}

static int mark(const char *text, uint64_t mib)
{
	size_t bytes = mib << 20, length = strlen(text);
	uint64_t version = 0;
	char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (at == MAP_FAILED)
		die("mmap");
	for (size_t page = 0; page < bytes; page += PAGE) {
		for (unsigned int i = 0; i < WORDS; i++)
			((uint64_t *)(at + page))[i] = mix(page * WORDS + i);
		memcpy(at + page, text, length);
		if (page / PAGE % 2)
			memcpy(at + page + length, "odd", 3);
		*version_of(at + page) = version;
	}
	signal(SIGUSR1, wake);
	signal(SIGUSR2, want_change);
	if (madvise(at, bytes, MADV_PAGEOUT))
		die("MADV_PAGEOUT");
	puts("marked");
	fflush(stdout);
	for (pause(); change_wanted; pause()) {
		change_wanted = 0;
		change(at, bytes, version++);
	}
	for (size_t page = PAGE; page < bytes; page += 2 * PAGE)
		if (madvise(at + page, PAGE, MADV_DONTNEED))
			die("MADV_DONTNEED");
	puts("freed");
	fflush(stdout);
	pause();
	return 0;
}

int main(int argc, char **argv)
{
	uint64_t rounds;

	if (argc == 4 && !strcmp(argv[1], "mark"))
		return mark(argv[2], strtoull(argv[3], NULL, 0));
	if (argc != 4) {
		fputs("usage: swapper SEED MIB ROUNDS | swapper mark TEXT MIB\n", stderr);
		return 2;
	}
	state = strtoull(argv[1], NULL, 0) << 32;
	pages = (strtoull(argv[2], NULL, 0) << 20) / PAGE / NR_REGIONS;
	rounds = strtoull(argv[3], NULL, 0);
	for (unsigned int region = 0; region < NR_REGIONS; region++) {
		regions[region].versions = calloc(pages, sizeof(*regions->versions));
		if (!regions[region].versions)
			die("calloc");
		map(&regions[region], region == NR_REGIONS - 1);
		each(region, 0, pages, put);
	}
	while (rounds--)
		step();
	for (unsigned int region = 0; region < NR_REGIONS; region++)
		each(region, 0, pages, check);
	puts("SWAP done ok");
	return 0;
}
