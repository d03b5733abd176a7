// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * pressure DIR MIB: writes, reads and compares two files of MIB mebibytes each, which together are
 * larger than memory. The program writes one file with write(2) and the other through a shared
 * mapping, so that nearly all of the page cache is dirty at any time.
 *
 * Exit status: 0 all bytes right, 1 a wrong byte, 2 another failure.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE	4096UL
#define PASSES	3	/* the second and the third pass overwrite pages that may have been put */

static void die(const char *what)
{
	perror(what);
	_exit(2);
}

static void fill(uint64_t *page, uint64_t number, uint64_t pass, uint64_t who)
{
	uint64_t x = (number << 16 | pass << 8 | who) * 0x9e3779b97f4a7c15ull + 1;

	for (unsigned int i = 0; i < PAGE / sizeof(*page); i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		page[i] = x;
	}
}

static void compare(const void *found, uint64_t number, uint64_t pass, uint64_t who)
{
	uint64_t right[PAGE / sizeof(uint64_t)];

	fill(right, number, pass, who);
	if (!memcmp(found, right, PAGE))
		return;
	printf("PRESSURE MISMATCH file %lu page %lu pass %lu\n", who, number, pass);
	fflush(stdout);
	_exit(1);
}

static void with_write(int fd, uint64_t pages, uint64_t pass)
{
	uint64_t page[PAGE / sizeof(uint64_t)];

	for (uint64_t i = 0; i < pages; i++) {
		fill(page, i, pass, 0);
		if (pwrite(fd, page, PAGE, i * PAGE) != (ssize_t)PAGE)
			die("pressure: write");
	}
	for (uint64_t i = 0; i < pages; i++) {
		if (pread(fd, page, PAGE, i * PAGE) != (ssize_t)PAGE)
			die("pressure: read");
		compare(page, i, pass, 0);
	}
}

static void with_mapping(int fd, uint64_t pages, uint64_t pass)
{
	uint8_t *p = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (p == MAP_FAILED)
		die("pressure: mmap");
	for (uint64_t i = 0; i < pages; i++)
		fill((uint64_t *)(p + i * PAGE), i, pass, 1);
	for (uint64_t i = 0; i < pages; i++)
		compare(p + i * PAGE, i, pass, 1);
	munmap(p, pages * PAGE);
}

static void run(const char *dir, uint64_t pages, unsigned int who)
{
	char path[256];
	int fd;

	snprintf(path, sizeof(path), "%s/pressure%u", dir, who);
	fd = open(path, O_CREAT | O_RDWR | O_TRUNC, 0600);
	if (fd < 0 || ftruncate(fd, pages * PAGE))
		die(path);
	for (unsigned int pass = 0; pass < PASSES; pass++)
		(who ? with_mapping : with_write)(fd, pages, pass);
	_exit(0);
}

int main(int argc, char **argv)
{
	uint64_t pages = argc == 3 ? strtoull(argv[2], NULL, 10) << 20 >> 12 : 0;
	int status, result = 0;

	if (!pages) {
		fputs("usage: pressure DIR MIB\n", stderr);
		return 2;
	}
	for (unsigned int who = 0; who < 2; who++) {
		pid_t child = fork();

		if (child < 0)
			die("pressure: fork");
		if (!child)
			run(argv[1], pages, who);
	}
	while (wait(&status) > 0) {
		if (WIFSIGNALED(status))
			printf("PRESSURE ERROR: a process was killed by signal %d\n", WTERMSIG(status));
		if (status && result != 1)
			result = WIFEXITED(status) ? WEXITSTATUS(status) : 2;
	}
	return result;
}
