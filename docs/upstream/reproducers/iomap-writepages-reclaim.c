// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Direct reclaim evicts an inode of overlayfs, and with it a dirty inode of the file system below.
 *
 *   cc -o iomap-writepages-reclaim iomap-writepages-reclaim.c
 *   iomap-writepages-reclaim DIR CGROUP
 *
 * As root. DIR is the directory of an overlayfs mount whose upper layer is on xfs. CGROUP is the
 * directory of a new control group below the root (cgroup v2, with the memory controller).
 *
 * A change of the flag FS_DAX_FL asks the kernel to evict the inode with its last reference. It has
 * no other effect on a disk without DAX. The files are made in the control group, so that its
 * reclaim evicts their inodes. They are written outside of it: reclaim that finds dirty pages
 * starts writeback, which may be faster.
 *
 * The exit status is 1 if data is lost, and 0 if not.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#define FILES	200
#define BYTES	8192

#ifndef FS_DAX_FL
#define FS_DAX_FL 0x02000000
#endif

static char bytes[BYTES];

static int put_text(const char *dir, const char *name, const char *text)
{
	char path[4096];
	int fd, failed;

	snprintf(path, sizeof(path), "%s/%s", dir, name);
	fd = open(path, O_WRONLY);
	failed = fd < 0 || write(fd, text, strlen(text)) < 0;
	if (fd >= 0)
		close(fd);
	return failed;
}

static int open_file(const char *dir, int number, int flags)
{
	char path[4096];
	int fd;

	snprintf(path, sizeof(path), "%s/file%d", dir, number);
	fd = open(path, flags, 0600);
	if (fd < 0)
		err(2, "%s", path);
	return fd;
}

int main(int argc, char **argv)
{
	int i, fd, flags, wrong = 0, errors = 0;
	char pid[20];
	ssize_t got;

	if (argc != 3)
		errx(2, "usage: iomap-writepages-reclaim DIR CGROUP");
	snprintf(pid, sizeof(pid), "%d", getpid());
	if (put_text(argv[2], "cgroup.procs", pid))
		err(2, "%s", argv[2]);
	for (i = 0; i < FILES; i++) {
		fd = open_file(argv[1], i, O_CREAT | O_TRUNC | O_RDWR);
		if (ioctl(fd, FS_IOC_GETFLAGS, &flags))
			err(2, "FS_IOC_GETFLAGS");
		flags ^= FS_DAX_FL;
		if (ioctl(fd, FS_IOC_SETFLAGS, &flags))
			err(2, "FS_IOC_SETFLAGS");
		close(fd);
	}
	if (put_text(argv[2], "../cgroup.procs", pid))
		err(2, "%s/..", argv[2]);
	memset(bytes, 'A', BYTES);
	for (i = 0; i < FILES; i++) {
		fd = open_file(argv[1], i, O_WRONLY);
		if (write(fd, bytes, BYTES) != BYTES)
			err(2, "write");
		close(fd);
	}
	/* A write fails if less can be reclaimed. */
	for (i = 0; i < 5; i++)
		put_text(argv[2], "memory.reclaim", "64M");
	for (i = 0; i < FILES; i++) {
		fd = open_file(argv[1], i, O_RDONLY);
		if (fsync(fd))
			errors++;
		got = pread(fd, bytes, BYTES, 0);
		if (got != BYTES || bytes[0] != 'A' || memcmp(bytes, bytes + 1, BYTES - 1))
			wrong++;
		close(fd);
	}
	printf("%d of %d files lost their data, and fsync() failed for %d files\n", wrong, FILES,
	       errors);
	puts(wrong ? "WRONG" : "right");
	return wrong != 0;
}
