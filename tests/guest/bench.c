// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Commands that the benchmarks run in a guest. seq and drop print "bytes ticks".
 *
 * - bench seq FILE: reads FILE from beginning to end, 128 KiB at a time
 * - bench drop: drops the page cache
 * - bench clock: prints "0 ticks nanoseconds" of a fifth of a second, to convert ticks
 * - bench evict FILE: reads FILE and drops it from the page cache, in parts that the put ring can
 *   take, and waits for the host after each; prints the number of pages
 * - bench latency FILE COUNT BYTES SEED DISKFILE EVERY: reads COUNT blocks of FILE at random places,
 *   each once and without readahead. After each block, it reads this block from the page cache and
 *   makes a system call that does nothing. After each EVERY blocks, it reads a block of DISKFILE.
 *   Prints a line for each kind of operation: its name, and the ticks of each operation
 *
 * Ticks are those of the TSC. Under emulation and on hardware they come from the host, so that two
 * guests can be compared.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <x86intrin.h>

#define PAGE		4096UL
#define CHUNK		(128UL << 10)	/* size of a read of cat and dd in distributions */
#define BATCH		(1UL << 20)	/* fewer pages than the put ring of a guest of 192 MiB has */
#define STATS		"/sys/kernel/virtio_tmem/stats/"

static char buffer[CHUNK] __attribute__((aligned(4096)));

static void die(const char *what)
{
	perror(what);
	exit(2);
}

static void done(uint64_t bytes, uint64_t begin)
{
	uint64_t ticks = __rdtsc() - begin;

	printf("%lu %lu\n", bytes, ticks);
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

static void drop(void)
{
	int fd = open("/proc/sys/vm/drop_caches", O_WRONLY);
	uint64_t begin = __rdtsc();

	if (fd < 0 || write(fd, "1", 1) != 1)
		die("drop_caches");
	done(0, begin);
}

static uint64_t now_ns(void)
{
	struct timespec now;

	if (clock_gettime(CLOCK_MONOTONIC, &now))
		die("clock_gettime");
	return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static void wait_us(long us)
{
	nanosleep(&(struct timespec){ .tv_nsec = us * 1000 }, NULL);
}

static void measure_clock(void)
{
	uint64_t ns = now_ns(), ticks = __rdtsc();

	wait_us(200000);
	ticks = __rdtsc() - ticks;
	printf("0 %lu %lu\n", ticks, now_ns() - ns);
}

static void drop_pages(void)
{
	int fd = open("/proc/sys/vm/drop_caches", O_WRONLY);

	if (fd < 0 || write(fd, "1", 1) != 1)
		die("drop_caches");
	close(fd);
}

static uint64_t counter(const char *path)
{
	unsigned long value;
	FILE *file = fopen(path, "r");

	if (!file || fscanf(file, "%lu", &value) != 1)
		die(path);
	fclose(file);
	return value;
}

/* Waits until the host has answered all puts. */
static void settle(void)
{
	while (counter(STATS "puts") != counter(STATS "puts_stored") +
	       counter(STATS "puts_refused") + counter(STATS "puts_unanswered"))
		wait_us(1000);
}

static void evict(const char *path)
{
	int fd = open_file(path);
	uint64_t bytes = 0, part;
	ssize_t got = 1;

	if (posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM))
		die("posix_fadvise");
	drop_pages();
	settle();
	while (got) {
		for (part = 0; part < BATCH; part += got) {
			got = pread(fd, buffer, CHUNK, bytes + part);
			if (got < 0)
				die(path);
			if (!got)
				break;
		}
		bytes += part;
		drop_pages();
		settle();
	}
	printf("%lu\n", bytes / PAGE);
}

static uint64_t next_random(uint64_t *x)
{
	*x ^= *x << 13;
	*x ^= *x >> 7;
	*x ^= *x << 17;
	return *x;
}

/* A file whose blocks are read in random order, each once. */
struct blocks {
	const char *path;
	int fd;
	uint64_t bytes, number, next;
	uint32_t *order;
};

static struct blocks blocks_of(const char *path, uint64_t bytes, uint64_t x)
{
	struct blocks out = { .path = path, .fd = open_file(path), .bytes = bytes };
	struct stat status;

	if (fstat(out.fd, &status) || posix_fadvise(out.fd, 0, 0, POSIX_FADV_RANDOM))
		die(path);
	out.number = status.st_size / bytes;
	out.order = malloc(out.number * sizeof(*out.order));
	if (!out.number || !out.order)
		die(path);
	x = x * 0x9e3779b97f4a7c15ull + 1;
	for (uint64_t i = 0; i < out.number; i++) {
		uint64_t other = next_random(&x) % (i + 1);

		out.order[i] = out.order[other];
		out.order[other] = i;
	}
	return out;
}

/* Reads block i, and returns the ticks that the read took. */
static uint64_t read_block(const struct blocks *from, uint64_t i)
{
	off_t at = from->order[i % from->number] * from->bytes;
	uint64_t begin = __rdtsc();
	ssize_t got = pread(from->fd, buffer, from->bytes, at);
	uint64_t ticks = __rdtsc() - begin;

	if (got != (ssize_t)from->bytes)
		die(from->path);
	return ticks;
}

static void print_ticks(const char *name, const uint64_t *ticks, uint64_t count)
{
	printf("%s", name);
	for (uint64_t i = 0; i < count; i++)
		printf(" %lu", ticks[i]);
	printf("\n");
}

static void latency(char **argv)
{
	uint64_t count = strtoull(argv[3], NULL, 0), bytes = strtoull(argv[4], NULL, 0);
	uint64_t seed = strtoull(argv[5], NULL, 0), every = strtoull(argv[7], NULL, 0);
	struct blocks cold = blocks_of(argv[2], bytes, seed);
	struct blocks disk = blocks_of(argv[6], bytes, seed);
	uint64_t *ticks[4], begin, nr_disk = 0;

	if (bytes > CHUNK || count > cold.number || !every || count / every > disk.number) {
		fprintf(stderr, "bench latency: the files have too few blocks\n");
		exit(2);
	}
	for (int kind = 0; kind < 4; kind++) {
		ticks[kind] = malloc(count * sizeof(uint64_t));
		if (!ticks[kind])
			die("malloc");
		/* Touch the array, so that no page fault occurs while the clock runs. */
		memset(ticks[kind], 1, count * sizeof(uint64_t));
	}
	memset(buffer, 1, sizeof(buffer));
	for (uint64_t i = 0; i < count; i++) {
		ticks[0][i] = read_block(&cold, i);
		ticks[1][i] = read_block(&cold, i);
		begin = __rdtsc();
		syscall(SYS_getppid);
		ticks[2][i] = __rdtsc() - begin;
		if (i % every == every - 1) {
			ticks[3][nr_disk] = read_block(&disk, nr_disk);
			nr_disk++;
		}
	}
	print_ticks("get", ticks[0], count);
	print_ticks("cached", ticks[1], count);
	print_ticks("empty", ticks[2], count);
	print_ticks("disk", ticks[3], nr_disk);
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "seq"))
		seq(argv[2]);
	else if (argc == 2 && !strcmp(argv[1], "drop"))
		drop();
	else if (argc == 2 && !strcmp(argv[1], "clock"))
		measure_clock();
	else if (argc == 3 && !strcmp(argv[1], "evict"))
		evict(argv[2]);
	else if (argc == 8 && !strcmp(argv[1], "latency"))
		latency(argv);
	else
		return 2;
	return 0;
}
