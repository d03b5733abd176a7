// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Makes reads that must not sleep: nowait FILE STEP_PAGES
 *
 * The program calls preadv2(RWF_NOWAIT) for one page every STEP_PAGES, from the end to the
 * beginning, so that no page is cached by the readahead of the read before. It prints "reads N
 * again M longest_us T": the number of reads, the number of reads that would have had to wait, and
 * the longest read in microseconds.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define PAGE	4096L

static long now_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000 + now.tv_nsec / 1000;
}

int main(int argc, char **argv)
{
	static char page[PAGE];
	struct iovec vec = { page, PAGE };
	long reads = 0, again = 0, longest_us = 0, begun_us, took_us, step, at;
	struct stat stat;
	int fd;

	if (argc != 3 || (step = atol(argv[2]) * PAGE) <= 0)
		return 2;
	fd = open(argv[1], O_RDONLY);
	if (fd < 0 || fstat(fd, &stat)) {
		perror(argv[1]);
		return 2;
	}
	for (at = (stat.st_size - 1) / step * step; at >= 0; at -= step) {
		begun_us = now_us();
		if (preadv2(fd, &vec, 1, at, RWF_NOWAIT) < 0) {
			if (errno != EAGAIN) {
				perror("preadv2");
				return 1;
			}
			again++;
		}
		took_us = now_us() - begun_us;
		if (took_us > longest_us)
			longest_us = took_us;
		reads++;
	}
	printf("reads %ld again %ld longest_us %ld\n", reads, again, longest_us);
	return 0;
}
