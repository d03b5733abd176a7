// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Loads for tests/bench_guest.py. Each prints "bytes ticks nanoseconds"; nanoseconds is the
 * processor time that it took, in user space and kernel.
 *
 * - bench seq FILE: reads FILE from beginning to end, 128 KiB at a time
 * - bench rand FILE COUNT SEED: reads COUNT pages of 4 KiB at random places
 * - bench drop: drops the page cache
 * - bench touch MIB: writes to that much memory, page by page, and frees it at its end
 *
 * Ticks are those of the TSC. Under emulation and on hardware they come from the host, so that two
 * guests can be compared. Under QEMU's -icount they are instructions that the guest executed.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <x86intrin.h>

#define PAGE		4096UL
#define CHUNK		(128UL << 10)	/* size of a read of cat and dd in distributions */

static char buffer[CHUNK] __attribute__((aligned(4096)));

static void die(const char *what)
{
	perror(what);
	exit(2);
}

static uint64_t processor_ns(void)
{
	struct timespec now;

	if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now))
		die("clock_gettime");
	return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static void done(uint64_t bytes, uint64_t begin)
{
	uint64_t ticks = __rdtsc() - begin;

	printf("%lu %lu %lu\n", bytes, ticks, processor_ns());
}

static int open_file(const char *path)
{
	int fd = open(path, O_RDONLY);

	if (fd < 0)
		die(path);
	return fd;
}

static void seq(const char *path)
{
	uint64_t begin, bytes = 0;
	int fd = open_file(path);
	ssize_t got;

	begin = __rdtsc();
	while ((got = read(fd, buffer, CHUNK)) > 0)
		bytes += got;
	if (got < 0)
		die(path);
	done(bytes, begin);
}

static void random_reads(const char *path, uint64_t count, uint64_t x)
{
	int fd = open_file(path);
	struct stat status;
	uint64_t begin;

	if (fstat(fd, &status) || status.st_size < (off_t)PAGE)
		die(path);
	/* Disables readahead, as a database does, so that each read brings one page. */
	if (posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM))
		die("posix_fadvise");
	x = x * 0x9e3779b97f4a7c15ull + 1;
	begin = __rdtsc();
	for (uint64_t i = 0; i < count; i++) {
		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		if (pread(fd, buffer, PAGE, x % (status.st_size / PAGE) * PAGE) != (ssize_t)PAGE)
			die(path);
	}
	done(count * PAGE, begin);
}

static void drop(void)
{
	int fd = open("/proc/sys/vm/drop_caches", O_WRONLY);
	uint64_t begin = __rdtsc();

	if (fd < 0 || write(fd, "1", 1) != 1)
		die("drop_caches");
	done(0, begin);
}

static void touch(uint64_t bytes)
{
	uint64_t begin = __rdtsc();
	char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		die("mmap");
	for (uint64_t i = 0; i < bytes; i += PAGE)
		memory[i] = 1;
	done(bytes, begin);
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "seq"))
		seq(argv[2]);
	else if (argc == 5 && !strcmp(argv[1], "rand"))
		random_reads(argv[2], strtoull(argv[3], NULL, 0), strtoull(argv[4], NULL, 0));
	else if (argc == 2 && !strcmp(argv[1], "drop"))
		drop();
	else if (argc == 3 && !strcmp(argv[1], "touch"))
		touch(strtoull(argv[2], NULL, 0) << 20);
	else
		return 2;
	return 0;
}
