// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * FALLOC_FL_ZERO_RANGE of the last block of a file, which uses only a part of it, on ext4.
 *
 *   cc -o ext4-zero-range-eof ext4-zero-range-eof.c
 *   ext4-zero-range-eof FILE	FILE is made; any user; ext4 with blocks of 1 or 4 KiB
 *
 * The exit status is 1 if the file has wrong bytes, and 0 if not.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PAGE 4096

static char *page;

/* Returns the first byte of the second page, which is read with these flags of open(). */
static int byte(const char *path, int flags)
{
	int fd = open(path, O_RDONLY | flags);

	if (fd < 0 || pread(fd, page, PAGE, PAGE) <= 0)
		err(2, "%s", path);
	close(fd);
	return page[0];
}

static void show(const char *when, int cached, int disk)
{
	printf("%s: byte 4096 is 0x%02x in the page cache, 0x%02x on the disk\n", when, cached,
	       disk);
}

int main(int argc, char **argv)
{
	int fd, cached, disk, wrong;

	if (argc != 2 || posix_memalign((void **)&page, PAGE, 2 * PAGE))
		errx(2, "usage: ext4-zero-range-eof FILE");
	fd = open(argv[1], O_CREAT | O_TRUNC | O_RDWR, 0600);
	memset(page, 'A', 2 * PAGE);
	if (fd < 0 || write(fd, page, PAGE + 100) != PAGE + 100 || fsync(fd))
		err(2, "%s", argv[1]);

	if (fallocate(fd, FALLOC_FL_ZERO_RANGE, PAGE, PAGE))
		err(2, "fallocate");
	cached = byte(argv[1], 0);
	disk = byte(argv[1], O_DIRECT);
	show("zeroed", cached, disk);
	wrong = cached || disk;

	memset(page, 'B', 100);
	if (pwrite(fd, page, 100, PAGE) != 100 || fsync(fd))
		err(2, "pwrite");
	cached = byte(argv[1], 0);
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	disk = byte(argv[1], O_DIRECT);
	show("written and synced", cached, disk);
	cached = byte(argv[1], 0);
	show("evicted", cached, disk);
	wrong |= cached != 'B' || disk != 'B';
	puts(wrong ? "WRONG" : "right");
	return wrong;
}
