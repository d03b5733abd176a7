// SPDX-License-Identifier: GPL-2.0-only
/*
 * tmem-guest: shows the state of this guest's virtio-tmem driver, sends it requests about files,
 * reclaims page cache (tmem-guest_autosize.c), and measures what the cache changes
 * (tmem-guest_trial.c).
 *
 * The program walks a tree with openat(), follows no symbolic link, and holds one directory open
 * for each level. If a file is replaced by another one during the walk, the program reports an
 * error and sends no request for it.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#include "../virtio_tmem_ioctl.h"
#include "tmem-guest.h"

#define MODULE		"/sys/module/virtio_tmem"

/*
 * Deepest nesting of directories. A walk keeps one directory of each level open, and a process may
 * have 1,024 open files.
 */
#define DEPTH_MAX	256
/* Messages cut a path off after this number of bytes. The program walks longer paths, too. */
#define PATH_BYTES	16384
/* Number of retries if the driver does not know a file system yet, and the time between them. */
#define AGAIN_TIMES	40
#define AGAIN_MS	50
/* A walk shows its progress after this time, and then at this interval. */
#define PROGRESS_AFTER_S	3
#define PROGRESS_EVERY_S	2
#define COUNTERS_MAX	256
#define NAME_BYTES	64

bool json;
static int status;

static const char usage_text[] =
"usage: tmem-guest [--json] COMMAND [ARGUMENT...]\n"
"\n"
"Shows and controls the virtio-tmem driver of this guest. The driver sends pages\n"
"that the guest evicts from its page cache to a pool of the host.\n"
"\n"
"  status                      show whether the driver is on, or why it is off\n"
"  stats [--watch[=SECONDS]]   show the driver's counters\n"
"  drop PATH...                drop files from the page cache, and not into the pool\n"
"  policy PATH... [never|default]\n"
"                              show or set whether files may go into the pool\n"
"  autosize [OPTION...]        return memory of an idle guest to the host\n"
"  trial MINUTES               measure whether the cache helps the present load\n"
"\n"
"  --json                      print one JSON object\n"
"  --help                      after a command: show the help of that command\n"
"\n"
"Exit status: 0 success; 1 a part of the command failed; 2 wrong usage; 3 the\n"
"driver is off or not loaded; 4 the driver does not serve the file system; 5 the\n"
"user does not own a file; 6 the kernel or the module lacks a function.\n";

static const char status_text[] =
"usage: tmem-guest status [--json]\n"
"\n"
"Shows the driver's state, its memory, and the number of pages that it holds in\n"
"the pool. The state is one of these:\n"
"  on         pages go to the host and come back; a note follows if this release\n"
"             of the kernel was not tested\n"
"  tripped    the host answers too late: reads go to the disk until the host\n"
"             answers in time\n"
"  offline    the host has no daemon for this guest at the moment\n"
"  off        the driver does not work here; the reason follows\n"
"  poisoned   a page was wrong: the driver stays off until the\n"
"             module is loaded again\n"
"\n"
"Exit status: 0 if on or tripped, otherwise 3.\n";

static const char stats_text[] =
"usage: tmem-guest stats [--watch[=SECONDS]] [--json]\n"
"\n"
"Shows the driver's counters. guest-driver/sysfs.md describes them.\n"
"lost_fraction is the part of eligible evicted pages that the cache did not keep:\n"
"puts_lost / puts_eligible.\n"
"With --watch, shows the counters that changed, and their change per second,\n"
"every SECONDS (0.1 to 3600, by default 1) until the command is interrupted. With\n"
"--watch and --json, prints all counters each time, as one object on one line.\n";

static const char drop_text[] =
"usage: tmem-guest drop PATH... [--json]\n"
"\n"
"Drops files from this guest's page cache. The pages do not go into the pool of\n"
"the host; pages that are there stay. For a directory, drops all files below it.\n"
"Changed pages are written to the disk first. Pages that are in use, for example\n"
"by mmap(), stay. Symbolic links are not followed, and other file systems are not\n"
"entered. Users may drop their own files, root may drop all files.\n"
"\n"
"Prints the number of files and of dropped pages.\n";

static const char policy_text[] =
"usage: tmem-guest policy PATH... [never|default] [--json]\n"
"\n"
"never     pages of the file do not go into the pool of the host. Setting this\n"
"          policy erases all pages of the file system from the pool\n"
"default   pages of the file go there when they are evicted\n"
"\n"
"For a directory, sets the policy of all files that are below it now; later files\n"
"begin with default. A policy lasts until it is changed, the file is deleted, its\n"
"file system is unmounted or the module is unloaded; it is not stored on disk. If\n"
"no policy is given, the command shows the policy of the files. If a file has the\n"
"name of a policy, write its path as ./never.\n"
"Symbolic links are not followed, and other file systems are not entered. Users\n"
"may name their own files, root may name all files.\n";

/* --- output -------------------------------------------------------------------------------- */

void fail(int code, const char *fmt, ...)
{
	va_list args;

	if (status == EXIT_OK)
		status = code;
	fputs("tmem-guest: ", stderr);
	va_start(args, fmt);
	vfprintf(stderr, fmt, args);
	va_end(args);
	fputc('\n', stderr);
}

/* Returns the length in bytes of the UTF-8 sequence that begins at s, or 0 if none begins there. */
static int utf8_bytes(const unsigned char *s)
{
	int n = s[0] >= 0xc2 && s[0] <= 0xdf ? 2 : s[0] >= 0xe0 && s[0] <= 0xef ? 3 :
		s[0] >= 0xf0 && s[0] <= 0xf4 ? 4 : 0;
	int i;

	for (i = 1; i < n; i++)
		if ((s[i] & 0xc0) != 0x80)
			return 0;
	if ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] > 0x9f) ||
	    (s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] > 0x8f))
		return 0;
	return n;
}

void json_string(const char *text)
{
	const unsigned char *s = (const unsigned char *)text;
	int n;

	putchar('"');
	while (*s) {
		n = *s >= 0x80 ? utf8_bytes(s) : 1;
		if (!n)
			printf("\\udc%02x", *s);
		else if (*s == '"' || *s == '\\')
			printf("\\%c", *s);
		else if (*s < 0x20 || *s == 0x7f)
			printf("\\u%04x", *s);
		else
			fwrite(s, 1, n, stdout);
		s += n ? n : 1;
	}
	putchar('"');
}

static double now_s(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + now.tv_nsec / 1e9;
}

static void sleep_s(double seconds)
{
	struct timespec time = { (time_t)seconds, (seconds - (time_t)seconds) * 1e9 };

	nanosleep(&time, NULL);
}

/* --- the driver's files -------------------------------------------------------------------- */

bool read_line(const char *directory, const char *name, char *line, size_t bytes)
{
	char path[PATH_MAX];
	FILE *file;
	bool found;

	snprintf(path, sizeof(path), "%s/%s", directory, name);
	file = fopen(path, "re");
	if (!file)
		return false;
	found = fgets(line, bytes, file);
	if (!found)
		line[0] = '\0';
	line[strcspn(line, "\n")] = '\0';
	fclose(file);
	return true;
}

/* Returns whether depmod knows the module for this kernel. */
static bool module_is_installed(const char *release)
{
	char path[PATH_MAX], line[PATH_MAX];
	bool found = false;
	FILE *file;

	snprintf(path, sizeof(path), "/lib/modules/%s/modules.dep", release);
	file = fopen(path, "re");
	if (!file)
		return false;
	while (!found && fgets(line, sizeof(line), file))
		found = strstr(line, "virtio_tmem.ko");
	fclose(file);
	return found;
}

/* Reports that the module is not loaded, and what to do. */
static void not_loaded(void)
{
	struct utsname kernel;

	if (uname(&kernel) || module_is_installed(kernel.release)) {
		fail(EXIT_NO_DRIVER, "the module is not loaded: try modprobe virtio_tmem");
		return;
	}
	fail(EXIT_NO_DRIVER,
	     "the module is not loaded, and there is no module for the running kernel %s: try apt install linux-headers-%s, then dkms autoinstall, unless the driver does not serve this series of kernels",
	     kernel.release, kernel.release);
}

bool driver_state(char *state, size_t bytes)
{
	if (read_line(SYSFS, "state", state, bytes))
		return true;
	not_loaded();
	return false;
}

struct counter {
	char name[NAME_BYTES];
	unsigned long long value;
};

static int by_name(const void *a, const void *b)
{
	return strcmp(((const struct counter *)a)->name, ((const struct counter *)b)->name);
}

/* Reads all counters, sorted by name. Returns their number, or -1 if the module is not loaded. */
static int read_counters(struct counter *counters)
{
	DIR *directory = opendir(SYSFS "/stats");
	struct dirent *entry;
	char line[32];
	int nr = 0;

	if (!directory) {
		not_loaded();
		return -1;
	}
	while (nr < COUNTERS_MAX && (entry = readdir(directory))) {
		if (entry->d_name[0] == '.' || strlen(entry->d_name) >= NAME_BYTES ||
		    !read_line(SYSFS "/stats", entry->d_name, line, sizeof(line)))
			continue;
		snprintf(counters[nr].name, NAME_BYTES, "%s", entry->d_name);
		counters[nr++].value = strtoull(line, NULL, 10);
	}
	closedir(directory);
	qsort(counters, nr, sizeof(*counters), by_name);
	return nr;
}

static unsigned long long counter(const struct counter *counters, int nr, const char *name)
{
	struct counter key = { .value = 0 }, *found;

	snprintf(key.name, sizeof(key.name), "%s", name);
	found = bsearch(&key, counters, nr, sizeof(key), by_name);
	return found ? found->value : 0;
}

/* --- status and stats ---------------------------------------------------------------------- */

static void do_status(void)
{
	static struct counter counters[COUNTERS_MAX];
	static const char *const shown[] = {
		"index_pages", "memory_bytes", "puts", "gets", "hits", "trips", "mismatches"
	};
	char line[512], version[64] = "unknown", hooks[64] = "0x0", *reason;
	unsigned int i;
	int nr;

	if (!driver_state(line, sizeof(line)))
		return;
	nr = read_counters(counters);
	if (nr < 0)
		return;
	read_line(MODULE, "version", version, sizeof(version));
	read_line(SYSFS, "hooks", hooks, sizeof(hooks));
	reason = strstr(line, ": ");
	if (reason) {
		*reason = '\0';
		reason += 2;
	}
	if (json) {
		printf("{\"state\": ");
		json_string(line);
		printf(", \"reason\": ");
		if (reason)
			json_string(reason);
		else
			printf("null");
		printf(", \"version\": ");
		json_string(version);
		printf(", \"hooks\": ");
		json_string(hooks);
		for (i = 0; i < sizeof(shown) / sizeof(*shown); i++)
			printf(", \"%s\": %llu", shown[i], counter(counters, nr, shown[i]));
		printf("}\n");
	} else {
		printf("state         %s%s%s\n", line, reason ? ": " : "", reason ? reason : "");
		printf("version       %s\n", version);
		printf("hooks         %s\n", hooks);
		for (i = 0; i < sizeof(shown) / sizeof(*shown); i++)
			printf("%-13s %llu\n", shown[i], counter(counters, nr, shown[i]));
	}
	if (strcmp(line, "on") && strcmp(line, "tripped") && status == EXIT_OK)
		status = EXIT_NO_DRIVER;
}

static void show_counters(const struct counter *counters, int nr)
{
	unsigned long long eligible = counter(counters, nr, "puts_eligible");
	double lost = eligible ? (double)counter(counters, nr, "puts_lost") / eligible : 0;
	int i;

	if (!json) {
		for (i = 0; i < nr; i++)
			printf("%-26s %llu\n", counters[i].name, counters[i].value);
		printf("%-26s %.4f\n", "lost_fraction", lost);
		return;
	}
	putchar('{');
	for (i = 0; i < nr; i++) {
		printf("%s", i ? ", " : "");
		json_string(counters[i].name);
		printf(": %llu", counters[i].value);
	}
	printf("%s\"lost_fraction\": %.6f}\n", i ? ", " : "", lost);
}

static void show_changes(const struct counter *old, int nr_old, const struct counter *new, int nr,
			 double seconds)
{
	bool none = true;
	int i;

	for (i = 0; i < nr; i++) {
		double change = (double)new[i].value - (double)counter(old, nr_old, new[i].name);

		if (!change)
			continue;
		printf("%-26s %16llu %+14.1f/s\n", new[i].name, new[i].value,
		       change / seconds);
		none = false;
	}
	puts(none ? "(no change)\n" : "");
}

static void do_stats(double every_s)
{
	static struct counter counters[2][COUNTERS_MAX];
	int nr[2], turn = 0;
	double then, now;

	nr[0] = read_counters(counters[0]);
	if (nr[0] < 0)
		return;
	then = now_s();
	show_counters(counters[0], nr[0]);
	while (every_s > 0) {
		if (fflush(stdout))
			return;
		sleep_s(every_s);
		turn = !turn;
		nr[turn] = read_counters(counters[turn]);
		if (nr[turn] < 0)
			return;
		now = now_s();
		if (json)
			show_counters(counters[turn], nr[turn]);
		else
			show_changes(counters[!turn], nr[!turn], counters[turn], nr[turn],
				     now - then);
		then = now;
	}
}

/* --- walking a tree ------------------------------------------------------------------------ */

static struct {
	int device;			/* descriptor of the driver's device */
	char path[PATH_BYTES];		/* current path, for messages */
	struct statx top;		/* statx() of the path from the command line */
	bool (*visit)(int fd);		/* returns false to end the walk */
	unsigned long long files;
	unsigned long long errors;
	double begin_s, shown_s;
} walk;

static struct {
	unsigned long long cached, kept;
} dropped;

static struct {
	bool set;
	__u32 policy;
	unsigned long long never, normal, cached;
} policy;

static void __printf(2, 3) walk_fail(int code, const char *fmt, ...)
{
	char why[256];
	va_list args;

	va_start(args, fmt);
	vsnprintf(why, sizeof(why), fmt, args);
	va_end(args);
	walk.errors++;
	fail(code, "%s: %s", walk.path, why);
}

static void open_failed(void)
{
	if (errno == EACCES || errno == EPERM)
		walk_fail(EXIT_NOT_OWNER, "cannot be read without permission: run the command as its owner or as root");
	else if (errno == ELOOP)
		walk_fail(EXIT_SOME, "is a symbolic link, which is not followed: name the target of the link");
	else
		walk_fail(EXIT_SOME, "%s", strerror(errno));
}

/*
 * Sends a request to the driver. Sets *go_on to false if the driver does not serve the file system
 * or has reached its limit of policies, because the other files of the walk would fail in the same
 * way.
 */
static bool ask(int fd, unsigned long cmd, struct virtio_tmem_file *file, bool *go_on)
{
	static const struct timespec again = { .tv_nsec = AGAIN_MS * 1000000L };
	int i, err = 0;

	file->fd = fd;
	for (i = 0; i < AGAIN_TIMES; i++) {
		err = ioctl(walk.device, cmd, file) ? errno : 0;
		if (err != EAGAIN)
			break;
		nanosleep(&again, NULL);
	}
	*go_on = true;
	switch (err) {
	case 0:
		return true;
	case EPERM:
		walk_fail(EXIT_NOT_OWNER, "belongs to another user: run the command as the owner or as root");
		break;
	case EAGAIN:
	case EOPNOTSUPP:
		walk_fail(EXIT_NOT_SERVED,
			  "is on a file system that the driver does not serve, or whose files cannot have policies (see the README of the driver)");
		*go_on = false;
		break;
	case ENOSPC:
		walk_fail(EXIT_SOME,
			  "the limit of policies is reached: set other files to default first");
		*go_on = false;
		break;
	default:
		walk_fail(EXIT_SOME, "%s", strerror(err));
	}
	return false;
}

static void progress(void)
{
	double now = now_s();

	if (now - walk.begin_s < PROGRESS_AFTER_S || now - walk.shown_s < PROGRESS_EVERY_S)
		return;
	walk.shown_s = now;
	fprintf(stderr, "tmem-guest: %llu files done; now at %s\n", walk.files, walk.path);
}

static bool same_mount(const struct statx *st)
{
	if (st->stx_dev_major != walk.top.stx_dev_major ||
	    st->stx_dev_minor != walk.top.stx_dev_minor)
		return false;
#ifdef STATX_MNT_ID
	if (st->stx_mask & walk.top.stx_mask & STATX_MNT_ID)
		return st->stx_mnt_id == walk.top.stx_mnt_id;
#endif
	return true;
}

static int stat_at(int directory, const char *name, int flags, struct statx *st)
{
	unsigned int mask = STATX_TYPE | STATX_INO;

#ifdef STATX_MNT_ID
	mask |= STATX_MNT_ID;
#endif
	return statx(directory, name, flags | AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT, mask, st);
}

static bool walk_directory(int fd, unsigned int depth);

/*
 * Handles one name in a directory. It opens only files and directories, because the process that
 * writes to a FIFO would notice that the FIFO is opened.
 */
static bool walk_entry(int directory, const char *name, unsigned int depth)
{
	struct statx before, st;
	bool top = !depth, go_on = true;
	int fd;

	if (stat_at(directory, name, 0, &before)) {
		/* Report no error if a name was deleted after its directory was read. */
		if (top || errno != ENOENT)
			open_failed();
		return true;
	}
	if (!S_ISREG(before.stx_mode) && !S_ISDIR(before.stx_mode)) {
		if (top && S_ISLNK(before.stx_mode)) {
			errno = ELOOP;
			open_failed();
		} else if (top) {
			walk_fail(EXIT_SOME, "is neither a file nor a directory");
		}
		return true;
	}
	if (top)
		walk.top = before;
	if (!same_mount(&before))
		return true;
	fd = openat(directory, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
	if (fd < 0) {
		if (top || errno != ENOENT)
			open_failed();
		return true;
	}
	if (stat_at(fd, "", AT_EMPTY_PATH, &st)) {
		open_failed();
	} else if (!same_mount(&st) || (st.stx_mode & S_IFMT) != (before.stx_mode & S_IFMT)) {
		walk_fail(EXIT_SOME, "was replaced during the walk and is left out: run the command again");
	} else if (S_ISREG(st.stx_mode)) {
		walk.files++;
		go_on = walk.visit(fd);
		progress();
	} else {
		return walk_directory(fd, depth);
	}
	close(fd);
	return go_on;
}

/* Handles all names in a directory, and closes it. */
static bool walk_directory(int fd, unsigned int depth)
{
	size_t end = strlen(walk.path);
	struct dirent *entry;
	bool go_on = true;
	DIR *directory;

	if (depth >= DEPTH_MAX) {
		walk_fail(EXIT_SOME, "is %d directories deep: name this directory on the command line",
			  DEPTH_MAX);
		close(fd);
		return true;
	}
	directory = fdopendir(fd);
	if (!directory) {
		open_failed();
		close(fd);
		return true;
	}
	while (go_on) {
		errno = 0;
		entry = readdir(directory);
		if (!entry) {
			if (errno)
				open_failed();
			break;
		}
		if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
			continue;
		snprintf(walk.path + end, sizeof(walk.path) - end, "%s%s",
			 end && walk.path[end - 1] == '/' ? "" : "/", entry->d_name);
		go_on = walk_entry(fd, entry->d_name, depth + 1);
		walk.path[end] = '\0';
	}
	closedir(directory);
	return go_on;
}

/* Walks all paths. Returns false if the driver cannot be reached. */
static bool walk_all(char **paths, int nr, bool (*visit)(int fd))
{
	char state[512];
	int i;

	if (!driver_state(state, sizeof(state)))
		return false;
	walk.device = open(VIRTIO_TMEM_DEVICE, O_RDWR | O_CLOEXEC);
	if (walk.device < 0) {
		fail(EXIT_NO_DRIVER, "%s: %s; the driver's state is \"%s\"", VIRTIO_TMEM_DEVICE,
		     strerror(errno), state);
		return false;
	}
	walk.visit = visit;
	walk.begin_s = now_s();
	for (i = 0; i < nr; i++) {
		snprintf(walk.path, sizeof(walk.path), "%s", paths[i]);
		walk_entry(AT_FDCWD, paths[i], 0);
	}
	close(walk.device);
	return true;
}

/* --- drop ---------------------------------------------------------------------------------- */

static bool drop_file(int fd)
{
	struct virtio_tmem_file before = {}, after = {};
	bool go_on;
	int err;

	if (!ask(fd, VIRTIO_TMEM_IOC_GET, &before, &go_on))
		return go_on;
	/*
	 * Write dirty pages back, because they cannot be dropped. This costs nothing if all pages
	 * are clean, and it does not flush the disk.
	 */
	if (before.cached_pages &&
	    sync_file_range(fd, 0, 0, SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
				      SYNC_FILE_RANGE_WAIT_AFTER)) {
		walk_fail(EXIT_SOME, "cannot be written back: %s", strerror(errno));
		return true;
	}
	err = posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	if (err) {
		walk_fail(EXIT_SOME, "cannot be dropped: %s", strerror(err));
		return true;
	}
	if (!ask(fd, VIRTIO_TMEM_IOC_GET, &after, &go_on))
		return go_on;
	if (before.cached_pages > after.cached_pages)
		dropped.cached += before.cached_pages - after.cached_pages;
	dropped.kept += after.cached_pages;
	return true;
}

static void do_drop(char **paths, int nr)
{
	unsigned long long bytes;

	if (!walk_all(paths, nr, drop_file))
		return;
	bytes = dropped.cached * sysconf(_SC_PAGESIZE);
	if (json)
		printf("{\"files\": %llu, \"cached_pages\": %llu, \"bytes\": %llu, \"kept_pages\": %llu, \"errors\": %llu}\n",
		       walk.files, dropped.cached, bytes, dropped.kept, walk.errors);
	else
		printf("%llu files: dropped %llu pages from the page cache (%llu bytes); %llu stay in use\n",
		       walk.files, dropped.cached, bytes, dropped.kept);
}

/* --- policy -------------------------------------------------------------------------------- */

static bool policy_file(int fd)
{
	struct virtio_tmem_file file = { .policy = policy.policy };
	bool go_on;

	if (policy.set && !ask(fd, VIRTIO_TMEM_IOC_SET, &file, &go_on))
		return go_on;
	if (!ask(fd, VIRTIO_TMEM_IOC_GET, &file, &go_on))
		return go_on;
	if (file.policy == VIRTIO_TMEM_POLICY_NEVER)
		policy.never++;
	else
		policy.normal++;
	policy.cached += file.cached_pages;
	return true;
}

static void do_policy(char **paths, int nr)
{
	if (nr > 1 && (!strcmp(paths[nr - 1], "never") || !strcmp(paths[nr - 1], "default"))) {
		policy.set = true;
		policy.policy = !strcmp(paths[--nr], "never") ? VIRTIO_TMEM_POLICY_NEVER :
								VIRTIO_TMEM_POLICY_DEFAULT;
	}
	if (!walk_all(paths, nr, policy_file))
		return;
	if (json)
		printf("{\"files\": %llu, \"never\": %llu, \"default\": %llu, \"cached_pages\": %llu, \"errors\": %llu}\n",
		       walk.files, policy.never, policy.normal, policy.cached, walk.errors);
	else
		printf("%llu files: %llu never, %llu default; %llu pages in the page cache\n",
		       walk.files, policy.never, policy.normal, policy.cached);
}

/* --- command line -------------------------------------------------------------------------- */

static int usage(const char *text)
{
	fputs(text, stderr);
	return EXIT_USAGE;
}

static bool parse_seconds(const char *text, double *seconds)
{
	char *end;

	*seconds = 1;
	if (!text)
		return true;
	*seconds = strtod(text, &end);
	return end != text && !*end && *seconds >= 0.1 && *seconds <= 3600;
}

int main(int argc, char **argv)
{
	static const struct option options[] = {
		{ "json", no_argument, NULL, 'j' },
		{ "help", no_argument, NULL, 'h' },
		{ "watch", optional_argument, NULL, 'w' },
		{ "status", no_argument, NULL, 'a' },
		{ "once", required_argument, NULL, 'a' },
		{ "floor", required_argument, NULL, 'a' },
		{ "boot", required_argument, NULL, 'a' },
		{ "idle", required_argument, NULL, 'a' },
		{ "pause", required_argument, NULL, 'a' },
		{ "order", required_argument, NULL, 'a' },
		{ "without-reporting", no_argument, NULL, 'a' },
		{ NULL }
	};
	const char *command, *text = usage_text;
	bool help = false, watch = false, autosize = false, paths;
	double every_s = 0;
	int option, nr, place;

	while ((option = getopt_long(argc, argv, "h", options, &place)) != -1) {
		if (option == 'j')
			json = true;
		else if (option == 'h')
			help = true;
		else if (option == 'w' && parse_seconds(optarg, &every_s))
			watch = true;
		else if (option == 'a' && autosize_option(options[place].name, optarg))
			autosize = true;
		else
			return usage(option == 'a' ? autosize_text : usage_text);
	}
	command = optind < argc ? argv[optind++] : "";
	nr = argc - optind;
	if (!strcmp(command, "status"))
		text = status_text;
	else if (!strcmp(command, "stats"))
		text = stats_text;
	else if (!strcmp(command, "drop"))
		text = drop_text;
	else if (!strcmp(command, "policy"))
		text = policy_text;
	else if (!strcmp(command, "autosize"))
		text = autosize_text;
	else if (!strcmp(command, "trial"))
		text = trial_text;
	if (help) {
		fputs(text, stdout);
		return EXIT_OK;
	}
	paths = text == drop_text || text == policy_text;
	if (text == usage_text || (watch && text != stats_text) ||
	    (autosize && text != autosize_text) || (paths && !nr))
		return usage(text);
	if (text == trial_text ? nr != 1 || !trial_minutes(argv[optind]) : nr && !paths)
		return usage(text);

	if (text == status_text)
		do_status();
	else if (text == stats_text)
		do_stats(every_s);
	else if (text == drop_text)
		do_drop(argv + optind, nr);
	else if (text == policy_text)
		do_policy(argv + optind, nr);
	else if (text == trial_text)
		do_trial();
	else
		do_autosize();
	if ((fflush(stdout) || ferror(stdout)) && status == EXIT_OK)
		fail(EXIT_SOME, "standard output: %s", strerror(errno));
	return status;
}
