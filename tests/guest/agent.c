// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Runs commands, writes files and reads files in the guest for the host (tests/harness/channel.py).
 *
 * Agent and host exchange frames over a virtio-serial port, or over the terminal that the first
 * argument names. A frame is a struct frame and `length` bytes. All fields are little-endian. Up to
 * JOBS_MAX commands (jobs) run at the same time, and an answer has the id of its request. A reset
 * can cut off a frame. The agent then searches for the magic of the next frame, and the host sends
 * a PING and waits for the PONG before it uses a channel.
 *
 * The agent must never wait for a job, and must not end while the guest runs.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x31414d54u /* "TMA1" */
#define PORT_NAME "tmem.agent"
#define PAYLOAD_MAX (256u << 10) /* data bytes of a frame; the host sends larger files in parts */
#define OUTPUT_CHUNK 16384	 /* bytes of a job's output in a frame */
#define JOBS_MAX 32

enum type {
	PING = 1,	/* arg: nonce */
	EXEC = 2,	/* arg: time-out in ms; payload: a line for sh -c */
	PUT = 3,	/* arg: offset; payload: u32 mode, path, NUL, bytes */
	GET = 4,	/* arg: offset; payload: u32 length, path, NUL */
	KILL = 5,	/* arg: signal; id: id of the EXEC */
	PONG = 16,	/* arg: nonce; payload: the kernel's boot id */
	STDOUT = 17,	/* payload: output bytes of the job */
	STDERR = 18,	/* payload: error output bytes of the job */
	EXIT = 19,	/* arg: status as of wait(2), or EXIT_TIMED_OUT, or EXIT_NO_JOB */
	REPLY = 20,	/* arg: errno of PUT or GET; payload: bytes read */
};

#define EXIT_TIMED_OUT (1ull << 32)
#define EXIT_NO_JOB (1ull << 33)

struct frame {
	uint32_t magic;
	uint32_t type;
	uint32_t id;
	uint32_t length;
	uint64_t arg;
};

struct job {
	uint32_t id;
	pid_t pid; /* 0 if the slot is free */
	int pidfd, out, err;
	int64_t deadline_ms;
	int timed_out;
};

static int port;
static struct job jobs[JOBS_MAX];
static char payload[PAYLOAD_MAX + 1];
static char chunk[PAYLOAD_MAX];

static void say(const char *what)
{
	dprintf(STDERR_FILENO, "agent: %s: %s\n", what, strerror(errno));
}

static int64_t now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static void nap(void)
{
	struct timespec ten_ms = {.tv_nsec = 10 * 1000 * 1000};

	nanosleep(&ten_ms, NULL);
}

/* Finds the port by its name and opens it. It may appear some time after its driver is loaded. */
static int open_port(void)
{
	for (;;) {
		DIR *class = opendir("/sys/class/virtio-ports");
		struct dirent *entry;

		while (class && (entry = readdir(class))) {
			char path[512], name[64] = "";
			FILE *file;
			int fd;

			snprintf(path, sizeof(path), "/sys/class/virtio-ports/%s/name", entry->d_name);
			file = fopen(path, "r");
			if (!file)
				continue;
			if (!fgets(name, sizeof(name), file))
				name[0] = 0;
			fclose(file);
			name[strcspn(name, "\n")] = 0;
			if (strcmp(name, PORT_NAME))
				continue;
			snprintf(path, sizeof(path), "/dev/%s", entry->d_name);
			fd = open(path, O_RDWR | O_CLOEXEC);
			if (fd >= 0) {
				closedir(class);
				return fd;
			}
		}
		if (class)
			closedir(class);
		nap();
	}
}

/* Opens a terminal that is connected to the host, and lets it pass all bytes on unchanged. */
static int open_terminal(const char *path)
{
	int fd = open(path, O_RDWR | O_CLOEXEC | O_NOCTTY);
	struct termios settings;

	if (fd < 0 || tcgetattr(fd, &settings))
		return -1;
	cfmakeraw(&settings);
	return tcsetattr(fd, TCSANOW, &settings) ? -1 : fd;
}

static void write_all(const void *data, size_t length)
{
	const char *at = data;

	while (length) {
		ssize_t done = write(port, at, length);

		if (done > 0) {
			at += done;
			length -= done;
		} else if (done < 0 && errno != EINTR && errno != EAGAIN) {
			nap(); /* no host is connected; the next connection starts with a PING */
			return;
		}
	}
}

static void send_frame(uint32_t type, uint32_t id, uint64_t arg, const void *data, size_t length)
{
	struct frame frame = {
		.magic = MAGIC, .type = type, .id = id, .length = length, .arg = arg};

	write_all(&frame, sizeof(frame));
	write_all(data, length);
}

/* Reads exactly `length` bytes. Returns -1 if the host disconnects before that. */
static int read_all(void *data, size_t length)
{
	char *at = data;

	while (length) {
		ssize_t done = read(port, at, length);

		if (done > 0) {
			at += done;
			length -= done;
		} else if (done == 0) {
			nap();
			return -1;
		} else if (errno != EINTR && errno != EAGAIN) {
			nap();
			return -1;
		}
	}
	return 0;
}

static struct job *find_job(uint32_t id)
{
	for (int i = 0; i < JOBS_MAX; i++)
		if (jobs[i].pid && jobs[i].id == id)
			return &jobs[i];
	return NULL;
}

static void exec_child(int out, int err)
{
	int null = open("/dev/null", O_RDONLY);

	setsid();
	dup2(null, STDIN_FILENO);
	dup2(out, STDOUT_FILENO);
	dup2(err, STDERR_FILENO);
	close_range(STDERR_FILENO + 1, ~0u, 0);
	signal(SIGPIPE, SIG_DFL);
	/* The agent is protected from the OOM killer. Its jobs must not inherit this protection. */
	int score = open("/proc/self/oom_score_adj", O_WRONLY);
	if (score >= 0) {
		if (write(score, "0", 1) != 1)
			_exit(126);
		close(score);
	}
	execl("/bin/sh", "sh", "-c", payload, (char *)NULL);
	_exit(127);
}

static void start_job(const struct frame *request)
{
	struct job *job = NULL;
	int out[2], err[2];

	for (int i = 0; i < JOBS_MAX && !job; i++)
		if (!jobs[i].pid)
			job = &jobs[i];
	if (!job) {
		send_frame(EXIT, request->id, EXIT_NO_JOB, NULL, 0);
		return;
	}
	if (pipe2(out, O_CLOEXEC)) {
		send_frame(EXIT, request->id, EXIT_NO_JOB, NULL, 0);
		return;
	}
	if (pipe2(err, O_CLOEXEC)) {
		close(out[0]);
		close(out[1]);
		send_frame(EXIT, request->id, EXIT_NO_JOB, NULL, 0);
		return;
	}
	pid_t pid = fork();
	if (pid == 0)
		exec_child(out[1], err[1]);
	close(out[1]);
	close(err[1]);
	int pidfd = pid > 0 ? (int)syscall(SYS_pidfd_open, pid, 0) : -1;
	if (pidfd < 0) {
		if (pid > 0) {
			kill(pid, SIGKILL);
			waitpid(pid, NULL, 0);
		}
		close(out[0]);
		close(err[0]);
		send_frame(EXIT, request->id, EXIT_NO_JOB, NULL, 0);
		return;
	}
	fcntl(out[0], F_SETFL, O_NONBLOCK);
	fcntl(err[0], F_SETFL, O_NONBLOCK);
	*job = (struct job){.id = request->id,
			    .pid = pid,
			    .pidfd = pidfd,
			    .out = out[0],
			    .err = err[0],
			    .deadline_ms = now_ms() + (int64_t)request->arg};
}

/*
 * Sends one chunk of a job's output to the host. Returns 0 if the pipe has no more data at the
 * moment. Closes the pipe at the end of the output.
 */
static int forward(const struct job *job, int *fd, uint32_t type)
{
	ssize_t done;

	if (*fd < 0)
		return 0;
	done = read(*fd, chunk, OUTPUT_CHUNK);
	if (done > 0) {
		send_frame(type, job->id, 0, chunk, done);
		return 1;
	}
	if (done == 0 || errno != EAGAIN) {
		close(*fd);
		*fd = -1;
	}
	return 0;
}

static void finish_job(struct job *job)
{
	int status = 0;

	/*
	 * Send only the output that is in the pipes now. A background process that the job started
	 * may hold them open forever.
	 */
	while (forward(job, &job->out, STDOUT))
		;
	while (forward(job, &job->err, STDERR))
		;
	waitpid(job->pid, &status, 0);
	send_frame(EXIT, job->id, (uint32_t)status | (job->timed_out ? EXIT_TIMED_OUT : 0), NULL, 0);
	close(job->pidfd);
	if (job->out >= 0)
		close(job->out);
	if (job->err >= 0)
		close(job->err);
	job->pid = 0;
}

static void put_file(const struct frame *request)
{
	uint32_t mode;
	char *path = payload + sizeof(mode);
	char *data;
	size_t left;
	int fd, error = 0;

	if (request->length < sizeof(mode) + 2 ||
	    !(data = memchr(path, 0, request->length - sizeof(mode)))) {
		send_frame(REPLY, request->id, EINVAL, NULL, 0);
		return;
	}
	memcpy(&mode, payload, sizeof(mode));
	data++;
	left = payload + request->length - data;
	fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | (request->arg ? 0 : O_TRUNC), mode);
	if (fd < 0) {
		send_frame(REPLY, request->id, errno, NULL, 0);
		return;
	}
	if (left && pwrite(fd, data, left, request->arg) != (ssize_t)left)
		error = errno ? errno : EIO;
	/* fchmod() of a file in /proc/sys fails with EPERM. Such a file needs no mode. */
	if (fchmod(fd, mode) && errno != EPERM && !error)
		error = errno;
	if (close(fd) && !error)
		error = errno;
	send_frame(REPLY, request->id, error, NULL, 0);
}

static void get_file(const struct frame *request)
{
	uint32_t length;
	ssize_t done;
	int fd;

	memcpy(&length, payload, sizeof(length));
	payload[request->length] = 0;
	if (request->length < sizeof(length) + 2 || length > sizeof(chunk)) {
		send_frame(REPLY, request->id, EINVAL, NULL, 0);
		return;
	}
	fd = open(payload + sizeof(length), O_RDONLY | O_CLOEXEC);
	done = fd < 0 ? -1 : pread(fd, chunk, length, request->arg);
	send_frame(REPLY, request->id, done < 0 ? errno : 0, chunk, done < 0 ? 0 : done);
	if (fd >= 0)
		close(fd);
}

static void pong(const struct frame *request)
{
	char id[64];
	int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
	ssize_t length = fd < 0 ? 0 : read(fd, id, sizeof(id));

	if (fd >= 0)
		close(fd);
	send_frame(PONG, request->id, request->arg, id, length < 0 ? 0 : length);
}

static void serve_request(void)
{
	struct frame request;
	struct job *job;

	if (read_all(&request, sizeof(request)))
		return;
	while (request.magic != MAGIC || request.length > PAYLOAD_MAX) {
		char *bytes = (char *)&request;

		memmove(bytes, bytes + 1, sizeof(request) - 1);
		if (read_all(bytes + sizeof(request) - 1, 1))
			return;
	}
	if (read_all(payload, request.length))
		return;
	payload[request.length] = 0;
	switch (request.type) {
	case PING:
		pong(&request);
		break;
	case EXEC:
		start_job(&request);
		break;
	case PUT:
		put_file(&request);
		break;
	case GET:
		get_file(&request);
		break;
	case KILL:
		job = find_job(request.id);
		if (job)
			kill(-job->pid, (int)request.arg);
		break;
	}
}

static int poll_timeout(void)
{
	int64_t nearest = INT64_MAX;

	for (int i = 0; i < JOBS_MAX; i++)
		if (jobs[i].pid && !jobs[i].timed_out && jobs[i].deadline_ms < nearest)
			nearest = jobs[i].deadline_ms;
	if (nearest == INT64_MAX)
		return -1;
	nearest -= now_ms();
	return nearest < 0 ? 0 : nearest > 60000 ? 60000 : (int)nearest;
}

static void serve(void)
{
	struct pollfd fds[1 + 3 * JOBS_MAX];

	fds[0] = (struct pollfd){.fd = port, .events = POLLIN};
	for (int i = 0; i < JOBS_MAX; i++) {
		int live = jobs[i].pid != 0;

		/* poll() ignores the entries of slots without a job: descriptor -1. */
		fds[1 + 3 * i] = (struct pollfd){live ? jobs[i].out : -1, POLLIN, 0};
		fds[2 + 3 * i] = (struct pollfd){live ? jobs[i].err : -1, POLLIN, 0};
		fds[3 + 3 * i] = (struct pollfd){live ? jobs[i].pidfd : -1, POLLIN, 0};
	}
	if (poll(fds, 1 + 3 * JOBS_MAX, poll_timeout()) < 0)
		return;
	for (int i = 0; i < JOBS_MAX; i++) {
		struct job *job = &jobs[i];

		if (!job->pid)
			continue;
		if (fds[1 + 3 * i].revents)
			forward(job, &job->out, STDOUT);
		if (fds[2 + 3 * i].revents)
			forward(job, &job->err, STDERR);
		if (fds[3 + 3 * i].revents) {
			finish_job(job);
		} else if (!job->timed_out && job->deadline_ms <= now_ms()) {
			job->timed_out = 1;
			kill(-job->pid, SIGKILL);
			kill(job->pid, SIGKILL);
		}
	}
	if (fds[0].revents & POLLIN)
		serve_request();
	else if (fds[0].revents)
		nap(); /* hang-up: the host is not connected at the moment */
}

int main(int argc, char **argv)
{
	int score = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

	if (score < 0 || write(score, "-1000", 5) != 5)
		say("oom_score_adj");
	if (score >= 0)
		close(score);
	if (mlockall(MCL_CURRENT | MCL_FUTURE))
		say("mlockall");
	signal(SIGPIPE, SIG_IGN);
	port = argc > 1 ? open_terminal(argv[1]) : open_port();
	if (port < 0) {
		say(argv[1]);
		return 1;
	}
	dprintf(STDOUT_FILENO, "agent: ready\n");
	for (;;)
		serve();
}
