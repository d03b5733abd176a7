// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * A direct write that fails midway leaves an old page in the page cache.
 *
 *   cc -o iomap-failed-direct-write iomap-failed-direct-write.c
 *   iomap-failed-direct-write FILE	FILE is made; any user; ext4 or xfs
 *
 * The buffer of the write has three pages: one of memory, one that maps the first page of FILE, and
 * one that cannot be read. The write invalidates its range, faults in the first page of FILE when
 * it reads the second page of the buffer, transfers two pages, and fails at the third one. Another
 * process that reads the file at that time has the effect of the mapping, too, and an error of the
 * disk has the effect of the third page.
 *
 * The exit status is 1 if page cache and disk differ afterwards, and 0 if not.
 */
#define _GNU_SOURCE
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGE 4096

static char *page;

/* Returns the first byte of the file, which is read with these flags of open(). */
static int byte(const char *path, int flags)
{
	int fd = open(path, O_RDONLY | flags);

	if (fd < 0 || pread(fd, page, PAGE, 0) != PAGE)
		err(2, "%s", path);
	close(fd);
	return page[0];
}

int main(int argc, char **argv)
{
	int fd, cached, disk;
	char *buffer;

	if (argc != 2 || posix_memalign((void **)&page, PAGE, 3 * PAGE))
		errx(2, "usage: iomap-failed-direct-write FILE");
	fd = open(argv[1], O_CREAT | O_TRUNC | O_RDWR, 0600);
	memset(page, 'A', 3 * PAGE);
	if (fd < 0 || write(fd, page, 3 * PAGE) != 3 * PAGE || fsync(fd))
		err(2, "%s", argv[1]);
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	close(fd);

	fd = open(argv[1], O_RDWR | O_DIRECT);
	buffer = mmap(NULL, 3 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (fd < 0 || buffer == MAP_FAILED ||
	    mmap(buffer + PAGE, PAGE, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED ||
	    mprotect(buffer + 2 * PAGE, PAGE, PROT_NONE))
		err(2, "mmap");
	memset(buffer, 'B', PAGE);
	if (pwrite(fd, buffer, 3 * PAGE, 0) < 0)
		printf("direct write of 3 pages: %s\n", strerror(errno));
	else
		puts("the direct write did not fail: nothing is shown");
	munmap(buffer, 3 * PAGE);

	cached = byte(argv[1], 0);
	disk = byte(argv[1], O_DIRECT);
	printf("byte 0 is 0x%02x in the page cache, 0x%02x on the disk\n", cached, disk);
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	printf("evicted: byte 0 reads as 0x%02x\n", byte(argv[1], 0));
	puts(cached != disk ? "WRONG" : "right");
	return cached != disk;
}
