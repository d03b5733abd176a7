// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Makes a direct write fail midway, and reads the file through the page cache meanwhile:
 *
 *   directfail WAY FILE [fault|device]
 *
 * WAY is how the write is issued: sync, nowait (RWF_NOWAIT), aio or io_uring. FILE has two pages.
 *
 * The first page of the write's buffer is missing, so the write waits for it after it has
 * invalidated its range. The program then reads the first page of FILE through the page cache, and
 * resolves the missing page. With "fault" (the default) the second page of the buffer cannot be
 * read, so the write ends with EFAULT when the first page is on the disk. With "device" the second
 * page of the buffer can be read, and the caller has made the second page of the disk fail.
 *
 * The exit status is 0 if the write failed, the first page of the disk has the new contents, and
 * the page cache has the old ones. It is 3 if the write ended with an error before it wrote
 * anything.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE		4096UL
#define OLD		'A'
#define NEW		'B'
#define FAULT_MS	60000	/* longest time until the write touches its buffer */

static void die(const char *what)
{
	perror(what);
	exit(2);
}

struct write {
	const char *way;
	int fd;
	uint8_t *buffer;
	long result;		/* bytes written, or a negative error number */
	int ended[2];		/* a pipe that the writer closes at its end */
};

static long write_sync(const struct write *w, int flags)
{
	struct iovec vector = { w->buffer, 2 * PAGE };
	ssize_t done = pwritev2(w->fd, &vector, 1, 0, flags);

	return done < 0 ? -errno : done;
}

static long write_aio(const struct write *w)
{
	struct iocb request = {
		.aio_lio_opcode = IOCB_CMD_PWRITE,
		.aio_fildes = w->fd,
		.aio_buf = (uintptr_t)w->buffer,
		.aio_nbytes = 2 * PAGE,
	}, *requests[] = { &request };
	aio_context_t context = 0;
	struct io_event event;

	if (syscall(SYS_io_setup, 1, &context))
		die("io_setup");
	if (syscall(SYS_io_submit, context, 1, requests) != 1)
		return -errno;
	if (syscall(SYS_io_getevents, context, 1, 1, &event, NULL) != 1)
		die("io_getevents");
	syscall(SYS_io_destroy, context);
	return event.res;
}

static long write_io_uring(const struct write *w)
{
	struct io_uring_params params = {};
	int ring = syscall(SYS_io_uring_setup, 1, &params);
	uint8_t *submission, *completion;
	struct io_uring_cqe *cqe;
	struct io_uring_sqe *sqe;
	size_t sqes_bytes = params.sq_entries * sizeof(*sqe);

	if (ring < 0)
		die("io_uring_setup");
	submission = mmap(NULL, params.sq_off.array + params.sq_entries * sizeof(uint32_t),
			  PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
	completion = mmap(NULL, params.cq_off.cqes + params.cq_entries * sizeof(*cqe),
			  PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_CQ_RING);
	sqe = mmap(NULL, sqes_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
	if (submission == MAP_FAILED || completion == MAP_FAILED || sqe == MAP_FAILED)
		die("mmap of an io_uring ring");
	*sqe = (struct io_uring_sqe){
		.opcode = IORING_OP_WRITE,
		.fd = w->fd,
		.addr = (uintptr_t)w->buffer,
		.len = 2 * PAGE,
	};
	*(uint32_t *)(submission + params.sq_off.array) = 0;
	__atomic_store_n((uint32_t *)(submission + params.sq_off.tail), 1, __ATOMIC_RELEASE);
	if (syscall(SYS_io_uring_enter, ring, 1, 1, IORING_ENTER_GETEVENTS, NULL, 0) != 1)
		die("io_uring_enter");
	cqe = (struct io_uring_cqe *)(completion + params.cq_off.cqes);
	close(ring);
	return cqe->res;
}

static void *run_write(void *arg)
{
	struct write *w = arg;

	if (!strcmp(w->way, "aio"))
		w->result = write_aio(w);
	else if (!strcmp(w->way, "io_uring"))
		w->result = write_io_uring(w);
	else
		w->result = write_sync(w, strcmp(w->way, "nowait") ? 0 : RWF_NOWAIT);
	close(w->ended[1]);
	return NULL;
}

/* Returns a userfaultfd that reports the first page of @buffer as missing. */
static int watch(uint8_t *buffer)
{
	int fd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register area = {
		.range = { (uintptr_t)buffer, PAGE },
		.mode = UFFDIO_REGISTER_MODE_MISSING,
	};

	if (fd < 0 || ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_REGISTER, &area))
		die("userfaultfd");
	return fd;
}

static uint8_t first_byte(const char *path, int flags, uint8_t *page)
{
	int fd = open(path, O_RDONLY | flags);

	if (fd < 0 || pread(fd, page, PAGE, 0) != (ssize_t)PAGE)
		die(path);
	close(fd);
	return page[0];
}

int main(int argc, char **argv)
{
	uint8_t *memory = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE,
			       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint8_t *page = memory + 2 * PAGE, *source = memory + 3 * PAGE;
	uint8_t cached = '-', stored;
	struct pollfd wait[2] = { { .events = POLLIN }, { .events = POLLIN } };
	struct uffdio_copy copy = { .dst = (uintptr_t)memory, .src = (uintptr_t)source,
				    .len = PAGE };
	struct write w = { .buffer = memory };
	struct uffd_msg message;
	bool fault = argc < 4 || !strcmp(argv[3], "fault");
	pthread_t thread;

	if (argc < 3 || memory == MAP_FAILED) {
		fprintf(stderr, "usage: directfail sync|nowait|aio|io_uring FILE [fault|device]\n");
		return 2;
	}
	w.way = argv[1];
	w.fd = open(argv[2], O_RDWR | O_DIRECT);
	if (w.fd < 0)
		die(argv[2]);
	memset(source, NEW, PAGE);
	memset(memory + PAGE, NEW, PAGE);
	if (fault && mprotect(memory + PAGE, PAGE, PROT_NONE))
		die("mprotect");
	wait[0].fd = watch(memory);
	if (pipe(w.ended))
		die("pipe");
	wait[1].fd = w.ended[0];
	if (pthread_create(&thread, NULL, run_write, &w))
		die("pthread_create");

	if (poll(wait, 2, FAULT_MS) < 1)
		die("the write ended before it accessed its buffer");
	if (wait[0].revents) {
		if (read(wait[0].fd, &message, sizeof(message)) != sizeof(message) ||
		    message.event != UFFD_EVENT_PAGEFAULT)
			die("userfaultfd");
		/* The write has invalidated its range, and waits for its buffer. */
		cached = first_byte(argv[2], 0, page);
		if (ioctl(wait[0].fd, UFFDIO_COPY, &copy))
			die("UFFDIO_COPY");
	}
	pthread_join(thread, NULL);

	stored = first_byte(argv[2], O_DIRECT, page);
	printf("%s: write returned %ld (%s), concurrent read %c, disk %c\n", w.way, w.result,
	       w.result < 0 ? strerror(-w.result) : "written", cached, stored);
	if (w.result == -EAGAIN && stored == OLD)
		return 3;
	return w.result < 0 && cached == OLD && stored == NEW ? 0 : 1;
}
