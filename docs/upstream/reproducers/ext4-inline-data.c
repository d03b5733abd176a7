// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Conversion of files that are stored in their inodes, on an ext4 with inline_data.
 *
 *   cc -o ext4-inline-data ext4-inline-data.c
 *   ext4-inline-data DIR	DIR is on an ext4 of mkfs.ext4 -O inline_data -I 256; any user
 *   ext4-inline-data DIR check	after an unmount and a mount
 *
 * Before, the free blocks should be filled with other bytes than zeroes and freed again: the report
 * has the commands. The exit status of the check is 1 if a file has wrong bytes, and 0 if not.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* A file of 40 bytes 'H' leaves its inode; then at most one more byte is written, at 2000. */
static int make(const char *name, char *page)
{
	int fd = open(name, O_CREAT | O_TRUNC | O_RDWR, 0600);

	memset(page, 'H', 40);
	if (fd < 0 || write(fd, page, 40) != 40 || fsync(fd))
		err(2, "%s", name);
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	return fd;
}

static void settle(void)
{
	sync();
	sleep(1);
	sync();
}

/* Compares the files with what was written. Returns the number of wrong files. */
static int check(void)
{
	static const char *const names[] = {
		"read", "write", "read-write", "read-truncate", "read-fallocate",
	};
	char page[4096];
	unsigned int i, at;
	int fd, wrong = 0;

	for (i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
		int kept = 0, x = strstr(names[i], "write") != NULL, has_x;

		fd = open(names[i], O_RDONLY);
		if (fd < 0 || pread(fd, page, sizeof(page), 0) != sizeof(page))
			err(2, "%s", names[i]);
		close(fd);
		for (at = 0; at < 40; at++)
			kept += page[at] == 'H';
		has_x = page[2000] == 'x';
		printf("%s: %d of 40 bytes, byte 2000 is %s\n", names[i], kept,
		       has_x == x ? "right" : "wrong");
		wrong += kept != 40 || has_x != x;
	}
	return wrong;
}

int main(int argc, char **argv)
{
	char page[4096];
	int fd;

	if (argc < 2 || chdir(argv[1]))
		errx(2, "usage: ext4-inline-data DIR [check]");
	if (argc > 2)
		return check() != 0;

	fd = make("read", page);
	if (fallocate(fd, 0, 0, 65536) || pread(fd, page, 4096, 0) != 4096)
		err(2, "read");
	printf("read: the first byte is 0x%02x\n", (unsigned char)page[0]);

	fd = make("write", page);
	if (fallocate(fd, 0, 0, 65536) || pwrite(fd, "x", 1, 2000) != 1 || fsync(fd))
		err(2, "write");

	fd = make("read-write", page);
	if (fallocate(fd, 0, 0, 65536) || pread(fd, page, 4096, 0) != 4096)
		err(2, "read-write");
	settle();
	if (pwrite(fd, "x", 1, 2000) != 1 || fsync(fd))
		err(2, "read-write");

	fd = make("read-truncate", page);
	if (fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, 65536) || pread(fd, page, 40, 0) != 40)
		err(2, "read-truncate");
	settle();
	if (ftruncate(fd, 8192) || fsync(fd))
		err(2, "read-truncate");

	fd = make("read-fallocate", page);
	if (fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, 4096) || pread(fd, page, 40, 0) != 40)
		err(2, "read-fallocate");
	settle();
	if (fallocate(fd, 0, 4096, 4096) || fsync(fd))
		err(2, "read-fallocate");
	return 0;
}
