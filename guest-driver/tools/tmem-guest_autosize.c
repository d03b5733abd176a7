// SPDX-License-Identifier: GPL-2.0-only
/*
 * tmem-guest autosize: reclaims page cache of an idle guest, so that the balloon device can return
 * its memory to the host (free page reporting). autosize_law.h decides how much.
 *
 * Pages leave the page cache by memory.reclaim of the root control group, and the driver puts them
 * into the pool. A reclaiming thread registers with the driver (VIRTIO_TMEM_IOC_PACE), so that it
 * waits when the put ring is full. The device is open only during a step, because an open device
 * keeps the module loaded.
 *
 * The file /sys/devices/system/node/nodeN/reclaim is not used: on Linux 7.2, a write to it counts
 * as a stall, and the service would take its own work for pressure.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "../virtio_tmem_ioctl.h"
#include "autosize_law.h"
#include "tmem-guest.h"

#define RECLAIM		"/sys/fs/cgroup/memory.reclaim"
#define DEVICES		"/sys/bus/virtio/devices"
#define REPORTING	"/sys/module/page_reporting/parameters"
#define COMPACT		"/proc/sys/vm/compact_memory"
#define RUN		"/run/tmem-guest-autosize"

#define VIRTIO_ID_BALLOON		5
#define VIRTIO_BALLOON_F_REPORTING	5
/*
 * The kernel reports free blocks of 2 MiB by default. Reclaimed pages are scattered, and seldom
 * form such blocks before compaction, but often blocks of order 4 (64 KiB).
 */
#define ORDER_DEFAULT	4
#define ORDER_LARGE	9
#define MIB		(1024 * 1024ull)
/* Reclaimed memory after which memory is compacted: with large blocks; otherwise, at the end. */
#define COMPACT_BYTES	(256 * MIB)
#define COMPACT_END_BYTES (64 * MIB)
/* Size of one write to memory.reclaim: Linux 6.1 reclaims all of it at least, without a break. */
#define PIECE_BYTES	MIB
#define INTERVAL_S	1.0

const char autosize_text[] =
"usage: tmem-guest autosize [OPTION...] [--json]\n"
"       tmem-guest autosize --once=SIZE [OPTION...] [--json]\n"
"       tmem-guest autosize --status [--json]\n"
"\n"
"Moves page cache that is not in use to the pool of the host, in small steps, so\n"
"that the host can use the memory. The host takes free memory back if the balloon\n"
"device has free page reporting. The command runs until it is ended; systemd runs\n"
"it as tmem-guest-autosize.service. It pauses if tasks wait for memory, if pages\n"
"come back soon, or if the pool does not keep them.\n"
"\n"
"  --status             show what the running service does and has returned\n"
"  --once=SIZE          return SIZE now, and exit; ends early at the floor, if the\n"
"                       cache is off, or if tasks wait for memory\n"
"  --floor=SIZE         page cache that stays in the guest (128M)\n"
"  --boot=SECONDS       return nothing before this uptime (120)\n"
"  --idle=SECONDS       take ten times larger steps after this time without load\n"
"                       (120)\n"
"  --pause=SECONDS      shortest pause; the longest is ten times as long (60)\n"
"  --order=N            report free blocks of 2^N pages to the host (4). With 9,\n"
"                       the kernel's default, compacts memory after each 256 MiB,\n"
"                       and not only at the end: use that if the host backs the\n"
"                       guest with transparent huge pages\n"
"  --without-reporting  return memory although the host does not take it back\n"
"\n"
"SIZE is a number of bytes, with K, M or G for powers of 1,024.\n"
"Exit status: 1 if --once returned nothing, or if no service runs for --status; 3\n"
"if the cache is off or not loaded; 6 if kernel or module lack a function.\n";

static struct {
	bool status, without_reporting;
	uint64_t once_bytes;
	unsigned int order;
	struct autosize_limits limits;
} options = {
	.order = ORDER_DEFAULT,
	.limits = { .boot_s = 120, .idle_s = 120, .pause_s = 60, .pause_max_s = 600,
		    .floor_bytes = 128 * MIB },
};

static const char *const why_text[NR_AUTOSIZE_WHY] = {
	[AUTOSIZE_RETURNING] = "returning memory",
	[AUTOSIZE_BEGUN] = "the service has just started",
	[AUTOSIZE_BOOTING] = "the guest has just started",
	[AUTOSIZE_CACHE_OFF] = "the cache is not on (tmem-guest status shows the reason)",
	[AUTOSIZE_NO_REPORTING] = "the balloon device has no free page reporting, so the host takes no memory back",
	[AUTOSIZE_SWAP] = "this kernel cannot reclaim files only, and swap is on",
	[AUTOSIZE_FLOOR] = "the page cache has reached its floor",
	[AUTOSIZE_WAITING] = "tasks waited for memory for a moment",
	[AUTOSIZE_STALL] = "tasks waited for memory",
	[AUTOSIZE_BACK] = "programs read many of the pages again",
	[AUTOSIZE_DISK] = "programs read pages again from the disk",
	[AUTOSIZE_UNKEPT] = "many evicted pages do not reach the pool",
	[AUTOSIZE_NOTHING] = "the kernel found nothing to reclaim",
	[AUTOSIZE_ENDED] = "the service ends",
};

static bool ended;

/* Returns whether the program is to end. The signals are blocked, so they stay pending. */
static bool is_ended(void)
{
	sigset_t pending;

	sigpending(&pending);
	return ended || sigismember(&pending, SIGTERM) || sigismember(&pending, SIGINT);
}

/* --- options -------------------------------------------------------------------------------- */

static bool parse_number(const char *text, double least, double most, double *number)
{
	char *rest;

	*number = strtod(text, &rest);
	return rest != text && !*rest && *number >= least && *number <= most;
}

static bool parse_size(const char *text, uint64_t *bytes)
{
	static const char units[] = "KMG";
	const char *unit;
	char *rest;
	unsigned long long number;

	errno = 0;
	number = strtoull(text, &rest, 10);
	if (rest == text || errno || *text == '-')
		return false;
	unit = *rest ? strchr(units, *rest) : NULL;
	if (*rest && (!unit || rest[1]))
		return false;
	*bytes = unit ? number << 10 * (unit - units + 1) : number;
	return !unit || *bytes >> 10 * (unit - units + 1) == number;
}

bool autosize_option(const char *name, const char *value)
{
	struct autosize_limits *limits = &options.limits;
	double number;

	if (!strcmp(name, "status")) {
		options.status = true;
	} else if (!strcmp(name, "without-reporting")) {
		options.without_reporting = true;
	} else if (!strcmp(name, "once")) {
		return parse_size(value, &options.once_bytes) && options.once_bytes;
	} else if (!strcmp(name, "floor")) {
		return parse_size(value, &limits->floor_bytes);
	} else if (!strcmp(name, "boot")) {
		return parse_number(value, 0, 1e6, &limits->boot_s);
	} else if (!strcmp(name, "idle")) {
		return parse_number(value, 0, 1e6, &limits->idle_s);
	} else if (!strcmp(name, "pause")) {
		limits->pause_max_s = 10 * limits->pause_s;
		if (!parse_number(value, 1, 1e6, &limits->pause_s))
			return false;
		limits->pause_max_s = 10 * limits->pause_s;
	} else if (!strcmp(name, "order")) {
		if (!parse_number(value, 0, ORDER_LARGE, &number) || number != (int)number)
			return false;
		options.order = number;
	}
	return true;
}

/* --- samples -------------------------------------------------------------------------------- */

static double uptime_s(void)
{
	struct timespec now;

	clock_gettime(CLOCK_BOOTTIME, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

/* Returns the sum of the values of the lines of a file that begin with one of two names. */
static uint64_t sum_of(const char *path, const char *a, const char *b)
{
	char line[256], name[64];
	unsigned long long value;
	uint64_t sum = 0;
	FILE *file = fopen(path, "re");

	if (!file)
		return 0;
	while (fgets(line, sizeof(line), file))
		if (sscanf(line, "%63s %llu", name, &value) == 2 &&
		    (!strcmp(name, a) || !strcmp(name, b)))
			sum += value;
	fclose(file);
	return sum;
}

static uint64_t counter(const char *name)
{
	char line[32];

	return read_line(SYSFS "/stats", name, line, sizeof(line)) ? strtoull(line, NULL, 10) : 0;
}

static uint64_t evicted_pages(void)
{
	return sum_of("/proc/vmstat", "pgsteal_file", "");
}

static uint64_t file_bytes(void)
{
	return sum_of("/proc/meminfo", "Active(file):", "Inactive(file):") << 10;
}

/* Returns the time for which tasks waited for memory, in us; UINT64_MAX if it is not known. */
static uint64_t stall_us(void)
{
	char line[128];
	const char *total;

	if (!read_line("/proc/pressure", "memory", line, sizeof(line)) || !*line)
		return UINT64_MAX;
	total = strstr(line, "total=");
	return total ? strtoull(total + strlen("total="), NULL, 10) : UINT64_MAX;
}

static bool is_on(void)
{
	char state[512];

	return read_line(SYSFS, "state", state, sizeof(state)) &&
	       (!strcmp(state, "on") || !strncmp(state, "on:", 3));
}

/* Returns whether a balloon device returns free memory to the host. */
static bool reports(void)
{
	DIR *directory = opendir(DEVICES);
	struct dirent *entry;
	char path[PATH_MAX], line[128];
	bool found = options.without_reporting;

	while (directory && !found && (entry = readdir(directory))) {
		snprintf(path, sizeof(path), DEVICES "/%s", entry->d_name);
		found = read_line(path, "device", line, sizeof(line)) &&
			strtoul(line, NULL, 16) == VIRTIO_ID_BALLOON &&
			read_line(path, "features", line, sizeof(line)) &&
			strlen(line) > VIRTIO_BALLOON_F_REPORTING &&
			line[VIRTIO_BALLOON_F_REPORTING] == '1';
	}
	if (directory)
		closedir(directory);
	return found;
}

static bool has_swap(void)
{
	char line[256];
	FILE *file = fopen("/proc/swaps", "re");
	bool found = file && fgets(line, sizeof(line), file) && fgets(line, sizeof(line), file);

	if (file)
		fclose(file);
	return found;
}

static void cpu_ticks(struct autosize_sample *sample)
{
	unsigned long long user, nice, system, idle, iowait, irq, softirq, steal;
	struct timespec used;
	char line[256];

	if (!read_line("/proc", "stat", line, sizeof(line)) ||
	    sscanf(line, "cpu %llu %llu %llu %llu %llu %llu %llu %llu", &user, &nice, &system,
		   &idle, &iowait, &irq, &softirq, &steal) != 8)
		return;
	sample->busy = user + nice + system + irq + softirq + steal;
	sample->ticks = sample->busy + idle + iowait;
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
	sample->own_busy = (used.tv_sec + used.tv_nsec / 1e9) * sysconf(_SC_CLK_TCK);
	sample->cpus = sysconf(_SC_NPROCESSORS_ONLN);
}

/* Sets the fields of a sample that autosize_stop() needs. */
static void sample_step(struct autosize_sample *now)
{
	memset(now, 0, sizeof(*now));
	now->on = is_on();
	now->stall_us = stall_us();
	/* Read the number of evicted pages first, because a put precedes its eviction. */
	now->evicted = evicted_pages();
	/*
	 * Pages that were read before the driver was loaded, and metadata of file systems, are no
	 * sign of a full pool. Only reads from the disk speak against reclaiming them.
	 */
	now->taken = counter("puts") + counter("refs") + counter("blocks_puts_none") +
		     counter("puts_skipped_metadata");
	now->failed = counter("puts_refused") + counter("puts_unanswered") + counter("refs_gone") +
		      counter("refs_unanswered") + counter("refs_dropped");
}

/* --- reclaim -------------------------------------------------------------------------------- */

static struct {
	bool no_swappiness;		/* memory.reclaim does not know swappiness= */
	uint64_t evicted;		/* pages that this program has evicted */
	uint64_t compacted;		/* value of evicted at the last compaction */
	char old_order[32];		/* order of reports before this program changed it */
} own;

static bool write_text(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	bool done = fd >= 0 && write(fd, text, strlen(text)) >= 0;
	int err = errno;

	if (fd >= 0)
		close(fd);
	errno = err;
	return done;
}

/* Prints once that a file which helps free memory to reach the host cannot be written. */
static void complain(const char *path)
{
	static const char *said;

	if (!said)
		fprintf(stderr, "tmem-guest: %s: %s: the host takes less memory back\n", path,
			strerror(errno));
	said = path;
}

/* Lets the kernel report small free blocks. On Linux 6.1, a new balloon device resets the order. */
static void set_order(void)
{
	char now[32], wanted[32];

	snprintf(wanted, sizeof(wanted), "%u", options.order);
	if (options.order == ORDER_LARGE ||
	    !read_line(REPORTING, "page_reporting_order", now, sizeof(now)) ||
	    !strcmp(now, wanted))
		return;
	if (!write_text(REPORTING "/page_reporting_order", wanted))
		complain(REPORTING "/page_reporting_order");
	else if (!*own.old_order)
		snprintf(own.old_order, sizeof(own.old_order), "%s", now);
}

/*
 * Makes blocks of the reclaimed pages that are large enough for the kernel to report. Tasks may
 * wait for compaction, so it does not follow reclaim that ended because something is wrong. If the
 * kernel reports small blocks, only an idle guest compacts memory.
 */
static void compact(enum autosize_why why, bool idle)
{
	uint64_t bytes = (own.evicted - own.compacted) * AUTOSIZE_PAGE_BYTES;

	if (why != AUTOSIZE_RETURNING && why != AUTOSIZE_FLOOR && why != AUTOSIZE_NOTHING)
		return;
	if (options.order != ORDER_LARGE && (!idle || bytes < COMPACT_END_BYTES))
		return;
	if (bytes && !write_text(COMPACT, "1"))
		complain(COMPACT);
	own.compacted = own.evicted;
}

/*
 * Reclaims up to @bytes, for at most half an interval, and less if autosize_stop() says so or the
 * kernel finds fewer pages. Returns false, after a message, if the program lacks a permission or
 * the kernel a function.
 */
static bool reclaim(uint64_t bytes)
{
	double until_s = uptime_s() + INTERVAL_S / 2;
	int device = open(VIRTIO_TMEM_DEVICE, O_RDWR | O_CLOEXEC);
	struct autosize_sample begun, now;
	bool go_on = true, stop = false, harm = false;
	char text[64];

	if (device < 0) {
		/* The module was removed: the next sample shows that. */
		if (errno == ENOENT || errno == ENODEV || errno == ENXIO)
			return true;
		fail(EXIT_SOME, "%s: %s: run the command as root", VIRTIO_TMEM_DEVICE,
		     strerror(errno));
		return false;
	}
	if (ioctl(device, VIRTIO_TMEM_IOC_PACE) && errno != EBUSY) {
		if (errno == ENOTTY)
			fail(EXIT_UNSUPPORTED, "the loaded module is older than this command: load the installed module");
		else
			fail(EXIT_SOME, "%s: %s: run the command as root", VIRTIO_TMEM_DEVICE,
			     strerror(errno));
		close(device);
		return false;
	}
	sample_step(&begun);
	while (!stop && !harm && bytes && !is_ended() && uptime_s() < until_s) {
		uint64_t piece = bytes < PIECE_BYTES ? bytes : PIECE_BYTES;

		snprintf(text, sizeof(text), "%llu%s", (unsigned long long)piece,
			 own.no_swappiness ? "" : " swappiness=0");
		/* EAGAIN: the kernel found fewer pages. EINTR: the guest is being suspended. */
		if (!write_text(RECLAIM, text)) {
			stop = true;
			if (errno != EAGAIN && errno != EINTR) {
				fail(EXIT_SOME, "%s: %s", RECLAIM, strerror(errno));
				go_on = false;
			}
		}
		sample_step(&now);
		harm = autosize_stop(&begun, &now);
		bytes -= piece;
	}
	close(device);
	own.evicted += evicted_pages() - begun.evicted;
	if (!harm && (own.evicted - own.compacted) * AUTOSIZE_PAGE_BYTES >= COMPACT_BYTES)
		compact(AUTOSIZE_RETURNING, false);
	return go_on;
}

static void sample(struct autosize_sample *now)
{
	sample_step(now);
	now->now_s = uptime_s();
	now->reports = reports();
	now->swaps = own.no_swappiness && has_swap();
	cpu_ticks(now);
	now->file_bytes = file_bytes();
	now->own = own.evicted;
	now->hits = counter("hits");
	now->refaults = sum_of("/proc/vmstat", "workingset_refault_file", "");
}

/* --- output --------------------------------------------------------------------------------- */

/* Prints a line about what was returned in some seconds, or 0, and why that ended. */
static void report(uint64_t bytes, double seconds, enum autosize_why why, double pause_s)
{
	if (json) {
		printf("{\"returned_bytes\": %llu, \"seconds\": %.1f, \"why\": ",
		       (unsigned long long)bytes, seconds);
		json_string(why_text[why]);
		printf(", \"pause_seconds\": %.0f}\n", pause_s);
	} else {
		if (seconds > 0)
			printf("returned %.1f MiB in %.1f s; stopped: %s", (double)bytes / MIB,
			       seconds, why_text[why]);
		else
			printf("returns nothing: %s", why_text[why]);
		if (pause_s > 0)
			printf("; next try in %.0f s", pause_s);
		printf("\n");
	}
	fflush(stdout);
}

/* Replaces the file that --status reads. */
static void write_status(const struct autosize *law, enum autosize_why why)
{
	double left_s = law->until_s - law->last.now_s;
	FILE *file = fopen(RUN "/status.new", "we");

	if (!file)
		return;
	fprintf(file, "state %s\n", why == AUTOSIZE_RETURNING ? "returning" :
		left_s > 0 ? "paused" : "waiting");
	fprintf(file, "reason %s\n", why_text[why]);
	fprintf(file, "pause_seconds %.0f\n", left_s > 0 ? left_s : 0);
	fprintf(file, "returned_bytes %llu\n",
		(unsigned long long)own.evicted * AUTOSIZE_PAGE_BYTES);
	fprintf(file, "file_bytes %llu\n", (unsigned long long)law->last.file_bytes);
	fprintf(file, "floor_bytes %llu\n", (unsigned long long)options.limits.floor_bytes);
	if (!fclose(file))
		rename(RUN "/status.new", RUN "/status");
}

/* Takes the lock of the service until the program ends. Returns false if that is not possible. */
static bool take_lock(void)
{
	struct flock lock = { .l_type = F_WRLCK };
	int fd = open(RUN "/lock", O_RDWR | O_CREAT | O_CLOEXEC, 0644);

	return fd >= 0 && !fcntl(fd, F_OFD_SETLK, &lock);
}

/* Returns whether a service runs. It takes no lock, with which a service could not start. */
static bool is_locked(void)
{
	struct flock lock = { .l_type = F_WRLCK };
	int fd = open(RUN "/lock", O_RDONLY | O_CLOEXEC);
	bool locked = fd >= 0 && !fcntl(fd, F_OFD_GETLK, &lock) && lock.l_type != F_UNLCK;

	if (fd >= 0)
		close(fd);
	return locked;
}

static void show_status(void)
{
	char line[512], *value;
	FILE *file = fopen(RUN "/status", "re");
	bool first = true;

	if (!file || !is_locked()) {
		fail(EXIT_SOME, "autosize does not run: try systemctl start tmem-guest-autosize");
	} else {
		while (fgets(line, sizeof(line), file)) {
			line[strcspn(line, "\n")] = '\0';
			value = strchr(line, ' ');
			if (!value)
				continue;
			*value++ = '\0';
			if (!json) {
				printf("%-14s %s\n", line, value);
				continue;
			}
			printf("%s", first ? "{" : ", ");
			json_string(line);
			printf(": ");
			if (value[strspn(value, "0123456789")])
				json_string(value);
			else
				printf("%s", value);
			first = false;
		}
		if (json)
			puts("}");
	}
	if (file)
		fclose(file);
}

/* --- service and --once --------------------------------------------------------------------- */

static void serve(const sigset_t *signals)
{
	static struct autosize law;
	struct autosize_sample now;
	enum autosize_why why = AUTOSIZE_BEGUN, said = AUTOSIZE_BEGUN;
	uint64_t bytes, from = 0;
	double next_s, left_s, began_s = 0;
	struct timespec time;

	if (mkdir(RUN, 0755) && errno != EEXIST) {
		fail(EXIT_SOME, "%s: %s: run the command as root", RUN, strerror(errno));
		return;
	}
	if (!take_lock()) {
		fail(EXIT_SOME, "%s/lock: cannot be locked: autosize runs already, or run the command as root",
		     RUN);
		return;
	}
	for (next_s = uptime_s(); !is_ended(); next_s += INTERVAL_S) {
		sample(&now);
		bytes = autosize_step(&law, &options.limits, &now, &why);
		if (bytes) {
			if (said != AUTOSIZE_RETURNING) {
				from = own.evicted;
				began_s = now.now_s;
				said = AUTOSIZE_RETURNING;
			}
			set_order();
			if (!reclaim(bytes))
				break;
		} else if (why != said && why != AUTOSIZE_WAITING) {
			compact(why, law.idle);
			report((own.evicted - from) * AUTOSIZE_PAGE_BYTES,
			       said == AUTOSIZE_RETURNING ? now.now_s - began_s : 0, why,
			       law.until_s > now.now_s ? law.until_s - now.now_s : 0);
			said = why;
			from = own.evicted;
		}
		write_status(&law, why);
		/* After a pause of the guest or a slow step, continue from now. */
		if (next_s + INTERVAL_S < uptime_s())
			next_s = uptime_s() - INTERVAL_S;
		left_s = next_s + INTERVAL_S - uptime_s();
		if (left_s > 0) {
			time.tv_sec = left_s;
			time.tv_nsec = (left_s - time.tv_sec) * 1e9;
			ended = sigtimedwait(signals, NULL, &time) > 0;
		}
	}
	if (said == AUTOSIZE_RETURNING)
		report((own.evicted - from) * AUTOSIZE_PAGE_BYTES, uptime_s() - began_s,
		       AUTOSIZE_ENDED, 0);
	if (*own.old_order)
		write_text(REPORTING "/page_reporting_order", own.old_order);
	unlink(RUN "/status");
}

static void once(void)
{
	struct autosize_sample now;
	enum autosize_why why = AUTOSIZE_RETURNING;
	uint64_t begun_us = stall_us(), left, before = 0;
	double began_s = uptime_s();

	/* The order stays in force at the end, because the kernel reports free memory later. */
	set_order();
	while (!is_ended()) {
		sample(&now);
		now.now_s += options.limits.boot_s;	/* --once works at any uptime */
		why = autosize_obstacle(&options.limits, &now);
		left = now.own * AUTOSIZE_PAGE_BYTES < options.once_bytes ?
		       options.once_bytes - now.own * AUTOSIZE_PAGE_BYTES : 0;
		if (why != AUTOSIZE_RETURNING || !left)
			break;
		why = now.stall_us - begun_us > AUTOSIZE_STALL_PAUSE_US ? AUTOSIZE_STALL :
		      now.file_bytes <= options.limits.floor_bytes ? AUTOSIZE_FLOOR :
		      before && now.own == before ? AUTOSIZE_NOTHING : AUTOSIZE_RETURNING;
		if (why != AUTOSIZE_RETURNING)
			break;
		before = now.own;
		if (left > now.file_bytes - options.limits.floor_bytes)
			left = now.file_bytes - options.limits.floor_bytes;
		if (!reclaim(left))
			return;
	}
	compact(why, true);
	if (why != AUTOSIZE_RETURNING)
		report(own.evicted * AUTOSIZE_PAGE_BYTES, uptime_s() - began_s, why, 0);
	else if (json)
		printf("{\"returned_bytes\": %llu, \"seconds\": %.1f, \"why\": null, \"pause_seconds\": 0}\n",
		       (unsigned long long)own.evicted * AUTOSIZE_PAGE_BYTES,
		       uptime_s() - began_s);
	else
		printf("returned %.1f MiB in %.1f s\n",
		       (double)own.evicted * AUTOSIZE_PAGE_BYTES / MIB, uptime_s() - began_s);
	if (!own.evicted)
		fail(why == AUTOSIZE_CACHE_OFF ? EXIT_NO_DRIVER : EXIT_SOME, "returned nothing");
}

void do_autosize(void)
{
	char state[512];
	sigset_t signals;

	if (options.status) {
		show_status();
		return;
	}
	if (options.once_bytes && !driver_state(state, sizeof(state)))
		return;
	if (stall_us() == UINT64_MAX) {
		fail(EXIT_UNSUPPORTED, "/proc/pressure/memory is missing: boot the kernel with psi=1");
		return;
	}
	/* A reclaim of no bytes shows whether the kernel knows the key. */
	if (!write_text(RECLAIM, "0 swappiness=0")) {
		if (errno != EINVAL) {
			fail(errno == ENOENT ? EXIT_UNSUPPORTED : EXIT_SOME,
			     "%s: %s: run the command as root, with version 2 of control groups",
			     RECLAIM, strerror(errno));
			return;
		}
		own.no_swappiness = true;
	}
	sigemptyset(&signals);
	sigaddset(&signals, SIGTERM);
	sigaddset(&signals, SIGINT);
	sigprocmask(SIG_BLOCK, &signals, NULL);
	if (options.once_bytes)
		once();
	else
		serve(&signals);
}
