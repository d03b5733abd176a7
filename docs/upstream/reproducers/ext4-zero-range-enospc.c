// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * FALLOC_FL_ZERO_RANGE that fails after it has zeroed a part of a clean page, on ext4.
 *
 *   cc -o ext4-zero-range-enospc ext4-zero-range-enospc.c
 *   ext4-zero-range-enospc DIR		DIR is on a small ext4 that mkfs.ext4 -b 1024 -m 0 made, and
 *					which the program fills; any user
 *
 * The exit status is 1 if page cache and disk differ afterwards, and 0 if not.
 */
#define _GNU_SOURCE
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fiemap.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define PAGE	4096
#define CHUNK	(128 << 10)
#define LENGTH	(64 << 10)	/* above 32 KiB (extent_max_zeroout_kb), ext4 converts extents */

static char *bytes;

static void path_of(char *path, size_t size, const char *dir, const char *name, int number)
{
	snprintf(path, size, "%s/%s%d", dir, name, number);
}

/*
 * Makes a file of four extents, which fill the inode. A conversion of a part of an extent then
 * needs a block for the extent tree. Returns the open file.
 */
static int make(const char *path)
{
	struct fiemap map;
	int fd, i, try;

	for (try = 0; try < 50; try++) {
		fd = open(path, O_CREAT | O_TRUNC | O_RDWR, 0600);
		if (fd < 0)
			err(2, "%s", path);
		memset(bytes, 'A', CHUNK);
		for (i = 0; i < 4; i++)
			if (pwrite(fd, bytes, CHUNK, (off_t)i << 20) != CHUNK || fsync(fd))
				err(2, "pwrite");
		map = (struct fiemap){ .fm_length = ~0ULL, .fm_flags = FIEMAP_FLAG_SYNC };
		if (ioctl(fd, FS_IOC_FIEMAP, &map))
			err(2, "FIEMAP");
		if (map.fm_mapped_extents == 4)
			return fd;
		close(fd);
	}
	errx(2, "cannot make a file of four extents");
}

/* Allocates all free blocks. */
static void fill(const char *dir, int block)
{
	char path[4096];
	int fd, number;

	for (number = 0; number < 600; number++) {
		/* The first files are large. The last free blocks are scattered: one block each. */
		long chunk = number < 4 ? 64L << 20 : block;
		off_t at = 0;

		path_of(path, sizeof(path), dir, "fill", number);
		fd = open(path, O_CREAT | O_TRUNC | O_RDWR, 0600);
		if (fd < 0)
			break;
		for (; chunk >= block && (number < 4 || !at);)
			if (!fallocate(fd, 0, at, chunk))
				at += chunk;
			else if (errno == ENOSPC)
				chunk /= 2;
			else
				err(2, "fallocate");
		close(fd);
		sync();		/* blocks may become free when the journal commits */
		if (number >= 4 && !at)
			break;
	}
}

static int byte(const char *path, int flags, off_t at)
{
	int fd = open(path, O_RDONLY | flags);

	if (fd < 0 || pread(fd, bytes, CHUNK, 0) != CHUNK)
		err(2, "%s", path);
	close(fd);
	return bytes[at];
}

int main(int argc, char **argv)
{
	int fd, block, failed, number, cached, disk, at;
	char path[4096], name[4096];

	if (argc != 2 || posix_memalign((void **)&bytes, PAGE, CHUNK))
		errx(2, "usage: ext4-zero-range-enospc DIR");
	path_of(path, sizeof(path), argv[1], "zeroed", 0);
	fd = make(path);
	if (ioctl(fd, FIGETBSZ, &block))
		err(2, "FIGETBSZ");
	at = block < PAGE ? block : 100;
	fill(argv[1], block);

	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	byte(path, 0, 0);	/* The pages are clean and up to date now. */
	failed = fallocate(fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, at, LENGTH);
	printf("zero range of %d at %d, blocks of %d: %s\n", LENGTH, at, block,
	       failed ? strerror(errno) : "no error, so nothing is shown");
	cached = byte(path, 0, at);
	disk = byte(path, O_DIRECT, at);
	printf("byte %d is 0x%02x in the page cache, 0x%02x on the disk\n", at, cached, disk);
	if (fsync(fd))
		err(2, "fsync");
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	printf("synced and evicted: byte %d reads as 0x%02x\n", at, byte(path, 0, at));
	for (number = 0; number < 600; number++) {
		path_of(name, sizeof(name), argv[1], "fill", number);
		unlink(name);
	}
	puts(cached != disk ? "WRONG" : "right");
	return cached != disk;
}
