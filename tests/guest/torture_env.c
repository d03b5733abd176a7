// SPDX-License-Identifier: Apache-2.0 OR MIT
/* Functions that act on all files: eviction, memory pressure, swap, mounts. */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "torture.h"

#define SWAP_BYTES		(512UL << 10)	/* swap file; its pages fit into the put ring */
#define PRESSURE_SPARE_KIB	(40UL << 10)	/* memory that stays free, to avoid OOM kills */
#define MEMCG			"/sys/fs/cgroup/torture"

bool write_text(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);
	bool ok;

	if (fd < 0)
		return false;
	ok = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
	close(fd);
	return ok;
}

static uint64_t read_number(const char *path)
{
	char text[32] = "";
	int fd = open(path, O_RDONLY);

	if (fd < 0)
		return 0;
	if (read(fd, text, sizeof(text) - 1) < 0)
		text[0] = 0;
	close(fd);
	return strtoull(text, NULL, 10);
}

/* Returns a counter of the driver, or 0 if the driver is not loaded. */
uint64_t driver_stat(const char *name)
{
	char path[128];

	snprintf(path, sizeof(path), "/sys/kernel/virtio_tmem/stats/%s", name);
	return read_number(path);
}

/*
 * Waits until the put ring is empty, because the host has answered all puts or the driver has
 * dropped them.
 */
void settle(void)
{
	struct timespec pause = { 0, 2000000 };

	for (int i = 0; i < 1000; i++) {
		if (driver_stat("puts") <= driver_stat("puts_stored") +
		    driver_stat("puts_refused") + driver_stat("puts_unanswered"))
			return;
		nanosleep(&pause, NULL);
	}
}

void drop_caches(int what)
{
	char text[4];

	snprintf(text, sizeof(text), "%d", what);
	if (!write_text("/proc/sys/vm/drop_caches", text)) {
		printf("TORTURE ERROR: cannot write /proc/sys/vm/drop_caches: %s: run as root "
		       "with /proc mounted\n", strerror(errno));
		fflush(stdout);
		_exit(2);
	}
}

/*
 * Each processor has a list of new pages with references to them, so that drop_caches cannot drop
 * these pages. Every kernel empties the lists before it compacts memory, but not every kernel does
 * so before it drops caches.
 */
void empty_lru_lists(void)
{
	if (!write_text("/proc/sys/vm/compact_memory", "1")) {
		printf("TORTURE ERROR: cannot write /proc/sys/vm/compact_memory: %s: run as root "
		       "on a kernel with CONFIG_COMPACTION\n", strerror(errno));
		fflush(stdout);
		_exit(2);
	}
}

void evict(struct worker *w, int what)
{
	int fd = open(w->opt->dir, O_RDONLY | O_DIRECTORY);

	if (fd < 0 || syncfs(fd))
		fail(w, NULL, "syncfs %s", w->opt->dir);
	close(fd);
	drop_caches(what);
	__atomic_add_fetch(&w->shared->evictions, 1, __ATOMIC_RELAXED);
}

static unsigned long meminfo_kib(const char *field)
{
	char line[128];
	unsigned long value = 0;
	FILE *file = fopen("/proc/meminfo", "r");

	while (file && fgets(line, sizeof(line), file))
		if (!strncmp(line, field, strlen(field)) && line[strlen(field)] == ':')
			value = strtoul(line + strlen(field) + 1, NULL, 10);
	if (file)
		fclose(file);
	return value;
}

static size_t pressure_bytes(unsigned int percent)
{
	unsigned long free_kib = meminfo_kib("MemFree"), available_kib = meminfo_kib("MemAvailable");
	unsigned long kib = free_kib;

	if (available_kib < PRESSURE_SPARE_KIB + free_kib / 2)
		return 0;
	if (available_kib > free_kib)
		kib += (available_kib - free_kib) * percent / 100;
	if (kib > available_kib - PRESSURE_SPARE_KIB)
		kib = available_kib - PRESSURE_SPARE_KIB;
	return kib << 10;
}

/*
 * Allocates the free memory and a part of the reclaimable memory, touches it, and frees it. One
 * process does this at a time, in a child, so that an out-of-memory kill ends no other process.
 */
void pressure(struct shared *shared, struct rng *rng)
{
	unsigned int percent = 20 + rng_below(rng, 70);
	size_t bytes;
	pid_t child;
	uint8_t *p;

	if (__atomic_exchange_n(&shared->pressure_lock, 1, __ATOMIC_ACQUIRE))
		return;
	bytes = pressure_bytes(percent);
	child = bytes ? fork() : -1;
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		write_text("/proc/self/oom_score_adj", "1000");
		p = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (p == MAP_FAILED)
			_exit(0);
		for (size_t i = 0; i < bytes; i += PAGE)
			p[i] = 1;
		_exit(0);
	}
	if (child > 0)
		waitpid(child, NULL, 0);
	__atomic_store_n(&shared->pressure_lock, 0, __ATOMIC_RELEASE);
}

/*
 * Puts all processes of the run in one memory control group, whose reclaim can be requested by the
 * megabyte. Such a reclaim has the effect of memory pressure without its cost.
 */
bool memcg_init(void)
{
	char pid[16];

	mkdir("/sys/fs/cgroup", 0755);
	if (access("/sys/fs/cgroup/cgroup.controllers", F_OK) &&
	    mount("cgroup2", "/sys/fs/cgroup", "cgroup2", 0, NULL))
		return false;
	write_text("/sys/fs/cgroup/cgroup.subtree_control", "+memory");
	mkdir(MEMCG, 0755);
	snprintf(pid, sizeof(pid), "%d", getpid());
	return write_text(MEMCG "/cgroup.procs", pid) && !access(MEMCG "/memory.reclaim", F_OK);
}

/*
 * Reclaims memory. EAGAIN means that less than requested could be reclaimed, which is a success
 * here.
 */
bool memcg_reclaim(uint64_t bytes)
{
	char text[32];

	snprintf(text, sizeof(text), "%lu", bytes);
	return write_text(MEMCG "/memory.reclaim", text) || errno == EAGAIN;
}

/*
 * --- faults of the kernel itself ----------------------------------------------------------------
 */

/*
 * Returns whether FALLOC_FL_ZERO_RANGE is wrong in this kernel.
 *
 * The fault is in ext4 of Linux 7.2 and 7.3 if FALLOC_FL_ZERO_RANGE makes the file grow. ext4 then
 * zeroes the rest of the file's last block before it marks the whole blocks of the range as
 * unwritten. For that it reads the page again. The page keeps its old bytes and counts as written,
 * so data that is written to it later is lost. This function tests a new file whose pages have not
 * been evicted, so a cache below the page cache has no part in the result.
 */
bool zero_range_is_wrong(const char *dir)
{
	char path[256], old[100], found[sizeof(old)];
	bool wrong = false;
	int fd;

	snprintf(path, sizeof(path), "%s/zero-range", dir);
	fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
	if (fd < 0)
		return false;
	memset(old, 'o', sizeof(old));
	if (pwrite(fd, old, sizeof(old), PAGE) == sizeof(old) && !fsync(fd) &&
	    !fallocate(fd, FALLOC_FL_ZERO_RANGE, PAGE, PAGE) &&
	    pread(fd, found, sizeof(found), PAGE) == sizeof(found))
		wrong = !memcmp(found, old, sizeof(old));
	close(fd);
	unlink(path);
	return wrong;
}

/* --- a swap file -------------------------------------------------------------------------- */

static void swap_path(const struct worker *w, char *path, size_t room)
{
	snprintf(path, room, "%s/swapfile", w->dir);
}

/*
 * Makes a header as in include/linux/swap.h, union swap_header: version 1, page count, no bad
 * pages, magic at the end.
 */
static void swap_header(uint8_t *page)
{
	uint32_t version = 1, last_page = SWAP_BYTES / PAGE - 1;

	memset(page, 0, PAGE);
	memcpy(page + 1024, &version, 4);
	memcpy(page + 1028, &last_page, 4);
	memcpy(page + PAGE - 10, "SWAPSPACE2", 10);
}

static void swap_start(struct worker *w)
{
	char path[256];
	int fd;

	swap_path(w, path, sizeof(path));
	fd = open(path, O_RDWR | O_CREAT, 0600);
	if (fd < 0)
		fail(w, NULL, "open %s", path);
	for (uint64_t at = 0; at < SWAP_BYTES; at += PAGE) {
		fill(w->buffer, at, PAGE, w->id << 12 | 0xfff, w->op);
		if (!at)
			swap_header(w->buffer);
		if (pwrite(fd, w->buffer, PAGE, at) != PAGE)
			fail(w, NULL, "write %s", path);
	}
	if (fsync(fd))
		fail(w, NULL, "fsync %s", path);
	/*
	 * Drop the cached pages of the file: they would stay cached and old even in a stock kernel.
	 */
	empty_lru_lists();
	drop_caches(1);
	w->swap_checked = resident_pages(fd, SWAP_BYTES) == 0;
	close(fd);
	if (swapon(path, 0))
		fail(w, NULL, "swapon %s", path);
	w->swap_on = true;
}

/*
 * Switches swap off, and compares cached reads of the swap file with direct reads. The kernel has
 * written the file below the page cache.
 */
void swap_off(struct worker *w)
{
	char path[256];
	int fd, direct;

	if (!w->swap_on)
		return;
	swap_path(w, path, sizeof(path));
	memcg_reclaim(1 << 20);
	if (swapoff(path))
		fail(w, NULL, "swapoff %s", path);
	w->swap_on = false;
	if (!w->swap_checked)
		return;
	fd = open(path, O_RDONLY);
	direct = open(path, O_RDONLY | O_DIRECT);
	if (fd < 0 || direct < 0)
		fail(w, NULL, "open %s", path);
	for (uint64_t at = 0; at < SWAP_BYTES; at += PAGE) {
		if (pread(fd, w->buffer, PAGE, at) != PAGE ||
		    pread(direct, w->buffer2, PAGE, at) != PAGE)
			fail(w, NULL, "read %s", path);
		if (memcmp(w->buffer, w->buffer2, PAGE)) {
			printf("TORTURE MISMATCH seed=%lu op=%lu (%s) worker=%u file=swapfile "
			       "page %lu: cached and direct reads differ after swapoff\n",
			       w->opt->seed, w->op, w->op_name, w->id, at / PAGE);
			fflush(stdout);
			_exit(1);
		}
	}
	close(fd);
	close(direct);
}

void swap_toggle(struct worker *w)
{
	if (w->swap_on)
		swap_off(w);
	else
		swap_start(w);
}

/* --- mounts -------------------------------------------------------------------------------- */

/* Remounts the file system under test. The directory under test is its mount point. */
int remount(const struct options *opt)
{
	return mount(opt->device, opt->dir, opt->fstype, MS_REMOUNT, opt->mount_options);
}

static void mount_error(const char *what, const char *where)
{
	printf("TORTURE ERROR: %s %s: %s\n", what, where, strerror(errno));
	fflush(stdout);
	_exit(2);
}

void unmount(const struct options *opt)
{
	if (umount(opt->dir))
		mount_error("umount", opt->dir);
}

void mount_again(const struct options *opt)
{
	if (mount(opt->device, opt->dir, opt->fstype, 0, opt->mount_options))
		mount_error("mount", opt->device);
}

void unmount_and_mount(const struct options *opt)
{
	unmount(opt);
	mount_again(opt);
}

/* --- the evictor --------------------------------------------------------------------------- */

static void advise_random_file(const struct options *opt, struct rng *rng)
{
	char path[300];
	int fd;

	snprintf(path, sizeof(path), "%s/w%lu/f%03lu", opt->dir, rng_below(rng, opt->jobs),
		 rng_below(rng, opt->files));
	fd = open(path, O_RDONLY);
	if (fd < 0)	/* skip the file: a worker has unlinked it and not created it again yet */
		return;
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	close(fd);
}

/* Evicts concurrently with all operations of the workers, until it is killed. */
void evictor_run(const struct options *opt, struct shared *shared)
{
	struct rng rng = { opt->seed ^ 0xe71c704ull };

	for (;;) {
		struct timespec pause = { 0, (1 + rng_below(&rng, 12)) * 1000000 };

		__atomic_store_n(&shared->evictor_paused, shared->evictor_pause, __ATOMIC_SEQ_CST);
		if (__atomic_load_n(&shared->evictor_pause, __ATOMIC_SEQ_CST)) {
			nanosleep(&pause, NULL);
			continue;
		}
		switch (rng_below(&rng, 400)) {
		case 0:
			if (opt->direct_reclaim)
				pressure(shared, &rng);
			break;
		case 1 ... 20:
			drop_caches(3);
			break;
		case 21 ... 100:
			drop_caches(1);
			break;
		case 101 ... 160:
			advise_random_file(opt, &rng);
			break;
		case 161 ... 170:
			sync();
			break;
		default:
			if (opt->direct_reclaim)
				memcg_reclaim((1 + rng_below(&rng, 4)) << 19);
			else
				drop_caches(1);
		}
		__atomic_add_fetch(&shared->evictions, 1, __ATOMIC_RELAXED);
		nanosleep(&pause, NULL);
	}
}
