// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Quotas that are switched off while the file system is read-only leave old pages of the quota file
 * in the page cache.
 *
 *   cc -o quota-off-suspended quota-off-suspended.c
 *   quota-off-suspended DEVICE DIR
 *
 * As root. DEVICE has an ext4 without the feature "quota", and is not mounted. DIR is a directory.
 * The kernel needs CONFIG_QFMT_V2.
 *
 * The exit status is 1 if page cache and disk differ afterwards, and 0 if not.
 */
#define _GNU_SOURCE
#include <err.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/quota.h>
#include <unistd.h>

#define BYTES (16 * 4096)
#define QFMT_V0 2	/* format of the files of quota_v2 with 32 bits */

static void make_files(const char *dir)
{
	char path[4096];
	int fd, i;

	for (i = 0; i < 40; i++) {
		snprintf(path, sizeof(path), "%s/file%d", dir, i);
		fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0600);
		if (fd < 0 || write(fd, path, 100) != 100 || fchown(fd, 1000 + i, -1))
			err(2, "%s", path);
		close(fd);
	}
	sync();
}

static void read_file(const char *path, int flags, char *to)
{
	int fd = open(path, O_RDONLY | flags);

	if (fd < 0 || pread(fd, to, BYTES, 0) != BYTES)
		err(2, "%s", path);
	close(fd);
}

/* Compares what a reader of the quota file gets with the disk. Returns whether they differ. */
static int compare(const char *when, const char *path)
{
	char *cached, *disk;
	int i, bad = 0;

	if (posix_memalign((void **)&cached, 4096, BYTES) ||
	    posix_memalign((void **)&disk, 4096, BYTES))
		err(2, "posix_memalign");
	read_file(path, 0, cached);
	read_file(path, O_DIRECT, disk);
	for (i = 0; i < BYTES; i++)
		bad += cached[i] != disk[i];
	printf("%s: %d of %d bytes of the quota file differ from the disk\n", when, bad, BYTES);
	free(cached);
	free(disk);
	return bad != 0;
}

int main(int argc, char **argv)
{
	/* header and information of an empty quota file: magic, version, grace times, blocks */
	static const uint32_t head[] = { 0xd9c01f11, 0, 604800, 604800, 0, 2, 0, 0 };
	static char bytes[BYTES];
	int fd, wrong, read_only;
	char path[4096];

	if (argc != 3)
		errx(2, "usage: quota-off-suspended DEVICE DIR");
	snprintf(path, sizeof(path), "%s/aquota.user", argv[2]);
	for (read_only = 0; read_only < 2; read_only++) {
		if (mount(argv[1], argv[2], "ext4", 0, "usrquota"))
			err(2, "mount");
		memcpy(bytes, head, sizeof(head));
		fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0600);
		if (fd < 0 || write(fd, bytes, BYTES) != BYTES || fsync(fd))
			err(2, "%s", path);
		close(fd);
		if (quotactl(QCMD(Q_QUOTAON, USRQUOTA), argv[1], QFMT_V0, path))
			err(2, "Q_QUOTAON");
		make_files(argv[2]);
		/* This suspends quotas. */
		if (read_only && mount(argv[1], argv[2], NULL, MS_REMOUNT | MS_RDONLY, NULL))
			err(2, "remount,ro");
		if (quotactl(QCMD(Q_QUOTAOFF, USRQUOTA), argv[1], 0, NULL))
			err(2, "Q_QUOTAOFF");
		wrong = compare(read_only ? "switched off while read-only" : "switched off", path);
		if (umount(argv[2]))
			err(2, "umount");
	}
	puts(wrong ? "WRONG" : "right");
	return wrong;
}
