// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Creates a device-mapper device, for guests without dmsetup:
 *
 *   dm NAME START SECTORS TARGET PARAMETERS [START SECTORS TARGET PARAMETERS]...
 *   dm NAME suspend
 *
 * The first form creates the device NAME if it does not exist, loads the table of the given
 * targets, and prints the path of the device's node in /dev. It waits for I/O in flight before it
 * replaces a table, but flushes no file system. After the second form, all I/O of the device waits
 * until the first form loads the next table.
 */
#include <fcntl.h>
#include <linux/dm-ioctl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/sysmacros.h>

#define ROOM_BYTES	8192	/* size in bytes of the buffer for a request with its table */

static uint8_t room[ROOM_BYTES];
static struct dm_ioctl *const request = (struct dm_ioctl *)room;
static int control;

static void prepare(const char *name, uint32_t flags)
{
	memset(room, 0, sizeof(room));
	request->version[0] = DM_VERSION_MAJOR;
	request->data_size = sizeof(room);
	request->data_start = sizeof(*request);
	request->flags = flags;
	snprintf(request->name, sizeof(request->name), "%s", name);
}

static void call(unsigned long command, const char *what)
{
	if (ioctl(control, command, request)) {
		perror(what);
		exit(2);
	}
}

static void load(const char *name, char **argv, int lines)
{
	size_t at = sizeof(*request);

	/* The kernel accepts a verity target on a read-only device only. */
	prepare(name, strcmp(argv[2], "verity") ? 0 : DM_READONLY_FLAG);
	request->target_count = lines;
	for (int i = 0; i < lines; i++, argv += 4) {
		struct dm_target_spec *target = (struct dm_target_spec *)(room + at);
		size_t length = strlen(argv[3]) + 1;
		size_t next = (sizeof(*target) + length + 7) & ~7UL;

		if (at + next > sizeof(room)) {
			fprintf(stderr, "dm: the table does not fit a request\n");
			exit(2);
		}
		target->sector_start = strtoull(argv[0], NULL, 0);
		target->length = strtoull(argv[1], NULL, 0);
		snprintf(target->target_type, sizeof(target->target_type), "%s", argv[2]);
		memcpy(target + 1, argv[3], length);
		target->next = next;
		at += next;
	}
	call(DM_TABLE_LOAD, "DM_TABLE_LOAD");
}

int main(int argc, char **argv)
{
	bool there, running;

	control = open("/dev/mapper/control", O_RDWR);
	if (argc == 3 && !strcmp(argv[2], "suspend")) {
		prepare(argv[1], DM_SUSPEND_FLAG | DM_SKIP_LOCKFS_FLAG | DM_NOFLUSH_FLAG);
		call(DM_DEV_SUSPEND, "suspend");
		return 0;
	}
	if (argc < 6 || (argc - 2) % 4 || control < 0) {
		fprintf(stderr, "usage: dm NAME START SECTORS TARGET PARAMETERS [...] | NAME suspend\n");
		return 2;
	}
	prepare(argv[1], 0);
	there = !ioctl(control, DM_DEV_STATUS, request);
	running = there && !(request->flags & DM_SUSPEND_FLAG);
	if (!there) {
		prepare(argv[1], 0);
		call(DM_DEV_CREATE, "DM_DEV_CREATE");
	}
	load(argv[1], argv + 2, (argc - 2) / 4);
	if (running) {
		prepare(argv[1], DM_SUSPEND_FLAG | DM_SKIP_LOCKFS_FLAG);
		call(DM_DEV_SUSPEND, "suspend");
	}
	prepare(argv[1], 0);
	call(DM_DEV_SUSPEND, "resume");
	printf("/dev/dm-%u\n", minor(request->dev));
	return 0;
}
