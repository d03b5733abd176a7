// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Reclaims page cache by memory.reclaim of the root control group. A thread that has registered
 * itself (VIRTIO_TMEM_IOC_PACE) waits for the put ring meanwhile.
 *
 * - reclaim plain BYTES: reclaims without a registration
 * - reclaim paced BYTES: registers, and reclaims
 * - reclaim closed BYTES: registers, closes the device, and reclaims
 * - reclaim child BYTES: registers, and lets a child reclaim, which is not registered
 * - reclaim read FILE: registers, and reads a file, for which it must not wait
 * - reclaim register: registers until the driver refuses, and once more after it has closed one
 *   device; prints the number of registrations before the error, and both results
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../guest-driver/virtio_tmem_ioctl.h"

#define REGISTRATIONS_MAX 64

static void die(const char *what)
{
	fprintf(stderr, "reclaim: %s: %s\n", what, strerror(errno));
	exit(1);
}

static int open_device(void)
{
	int fd = open(VIRTIO_TMEM_DEVICE, O_RDWR);

	if (fd < 0)
		die(VIRTIO_TMEM_DEVICE);
	return fd;
}

/* Returns 0 or a positive error number. */
static int pace(int fd)
{
	return ioctl(fd, VIRTIO_TMEM_IOC_PACE) ? errno : 0;
}

/* Linux 6.1 does not know swappiness=. The guests of the tests have no swap. */
static void reclaim(const char *bytes)
{
	int fd = open("/sys/fs/cgroup/memory.reclaim", O_WRONLY);
	char text[64];

	if (fd < 0)
		die("memory.reclaim");
	snprintf(text, sizeof(text), "%s swappiness=0", bytes);
	if (write(fd, text, strlen(text)) < 0 &&
	    (errno != EINVAL || write(fd, bytes, strlen(bytes)) < 0) && errno != EAGAIN)
		die("memory.reclaim");
	close(fd);
}

static void read_file(const char *path)
{
	static char buffer[1 << 16];
	int fd = open(path, O_RDONLY);
	ssize_t got;

	if (fd < 0)
		die(path);
	do {
		got = read(fd, buffer, sizeof(buffer));
	} while (got > 0);
	if (got < 0)
		die(path);
}

static void fill_registrations(void)
{
	int fd[REGISTRATIONS_MAX], nr = 0, err;

	for (;;) {
		fd[nr] = open_device();
		err = pace(fd[nr]);
		if (err || nr == REGISTRATIONS_MAX - 1)
			break;
		/* A second registration of a thread with the same device changes nothing. */
		if (pace(fd[nr++]))
			die("second registration");
	}
	printf("%d %d", nr, err);
	if (nr)
		close(fd[0]);
	printf(" %d\n", pace(fd[nr]));
}

int main(int argc, char **argv)
{
	const char *how = argc > 1 ? argv[1] : "";
	int fd, status;

	if (!strcmp(how, "register")) {
		fill_registrations();
		return 0;
	}
	if (argc != 3)
		return 2;
	if (strcmp(how, "plain")) {
		fd = open_device();
		errno = pace(fd);
		if (errno)
			die("registration");
		if (!strcmp(how, "closed"))
			close(fd);
	}
	if (!strcmp(how, "read")) {
		read_file(argv[2]);
	} else if (!strcmp(how, "child")) {
		if (!fork()) {
			reclaim(argv[2]);
			return 0;
		}
		if (wait(&status) < 0 || status)
			return 1;
	} else {
		reclaim(argv[2]);
	}
	return 0;
}
