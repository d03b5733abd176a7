// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Short fixed sequences of operations (scenarios), one for each way in which a file changes while
 * the pool has an old copy of its pages. Each scenario must read the new bytes. Some of them read
 * old bytes at once if a safety check of the driver is removed (tests/vm/test_torture.py).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include "torture.h"

#define PAGES		24UL	/* size of a file that a scenario works on */
#define SPLIT_BLOCK	1024UL	/* smallest block size of ext4 and xfs in these tests */
#define SPLIT_PAGES	8UL	/* size of the large folio; a power of two */
#define SWAPPED_BYTES	(384UL << 10)	/* anonymous memory, half of which must be swapped out */
/* number of mounts; one of them likely gets the address of an earlier super block */
#define UNMOUNT_CYCLES	48
#define MIN_BLOCK	1024UL	/* smallest block size of a file system, the unit of FIBMAP */
#define HUGE		(2UL << 20)	/* the largest folio of a file on x86 */

static void evict_all(struct worker *w, struct file *f)
{
	for (int i = 0; i < 20; i++) {
		evict(w, 1);
		settle();
		if (!resident_pages(f->fd, f->size))
			return;
		empty_lru_lists();
	}
	errno = EBUSY;
	fail(w, f, "pages stayed in the page cache, so the scenario would test nothing");
}

/* Overwrites the complete file and evicts all its pages, so that the pool has them. */
static void prime(struct worker *w, struct file *f, const char *step)
{
	w->op++;
	w->op_name = step;
	record(w, f, 0, PAGES * PAGE, "written and evicted");
	evict(w, 1);	/* evict other pages first, so that the put ring has room for this file */
	settle();
	file_truncate(w, f, 0);
	file_write(w, f, 0, PAGES * PAGE);
	evict_all(w, f);
}

static void begin(struct worker *w, struct file *f, const char *step)
{
	w->op++;
	w->op_name = step;
	record(w, f, 0, 0, NULL);
}

/* Reads and verifies the file twice: as it is now, and after another eviction. */
static void look(struct worker *w, struct file *f)
{
	file_scan(w, f, 4 * PAGE);
	evict(w, 1);
	file_scan(w, f, 4 * PAGE);
}

/* Changes no file after its eviction. Hits of this scenario show that evicted pages come back. */
static void scenario_plain(struct worker *w, struct file *f, struct file *g)
{
	prime(w, f, "plain");
	prime(w, g, "plain");
	look(w, f);
	look(w, g);
}

static void scenario_dirty(struct worker *w, struct file *f, struct file *g)
{
	prime(w, f, "dirty");
	begin(w, f, "overwrite whole pages");
	file_write(w, f, 0, PAGES * PAGE);
	look(w, f);
	prime(w, g, "dirty");
	begin(w, g, "overwrite parts of pages");
	file_write(w, g, 100, 2 * PAGE);
	look(w, g);
}

/*
 * Splits a large folio that is not uptodate, so that its pages are read again without having been
 * removed from the page cache. Blocks are smaller than pages, and all blocks of the folio except
 * the first are written. The kernel stores with the folio which blocks are valid. Punching out a
 * page splits the folio, and the kernel then no longer knows which blocks are valid.
 */
static void scenario_split(struct worker *w, struct file *f, struct file *g)
{
	(void)g;
	prime(w, f, "split");
	begin(w, f, "overwrite all but the first block");
	file_write(w, f, SPLIT_BLOCK, SPLIT_PAGES * PAGE);
	if (fsync(f->fd))
		fail(w, f, "fsync");
	begin(w, f, "punch");
	file_fallocate(w, f, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
		       (SPLIT_PAGES - 2) * PAGE, PAGE);
	look(w, f);
}

static void scenario_truncate(struct worker *w, struct file *f, struct file *g)
{
	(void)g;
	prime(w, f, "truncate to a page boundary");
	file_truncate(w, f, 8 * PAGE);
	file_truncate(w, f, PAGES * PAGE);
	look(w, f);
	prime(w, f, "truncate within a page");
	file_truncate(w, f, 8 * PAGE + 100);
	file_truncate(w, f, PAGES * PAGE);
	look(w, f);
	prime(w, f, "truncate to nothing");
	file_truncate(w, f, 0);
	file_truncate(w, f, PAGES * PAGE);
	look(w, f);
}

static void scenario_punch(struct worker *w, struct file *f, struct file *g)
{
	(void)g;
	prime(w, f, "punch");
	file_fallocate(w, f, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 3 * PAGE + 5, 6 * PAGE);
	look(w, f);
	prime(w, f, "zero range");
	file_fallocate(w, f, FALLOC_FL_ZERO_RANGE, 2 * PAGE, 5 * PAGE + 77);
	look(w, f);
}

/*
 * Zeroes a range of blocks that crosses the end of the file. The two scenarios that call this
 * function find the fault of the kernel that zero_range_is_wrong() describes. They evict no page
 * before the zeroing, so the driver has no part in the result.
 */
static void zero_and_grow(struct worker *w, struct file *f)
{
	begin(w, f, "zero whole blocks over the end");
	file_truncate(w, f, 0);
	file_write(w, f, 0, PAGE + 100);
	if (fsync(f->fd))
		fail(w, f, "fsync");
	file_fallocate(w, f, FALLOC_FL_ZERO_RANGE, PAGE, PAGE);
}

static void scenario_zero_grow(struct worker *w, struct file *f, struct file *g)
{
	(void)g;
	zero_and_grow(w, f);
	look(w, f);
}

static void scenario_zero_grow_write(struct worker *w, struct file *f, struct file *g)
{
	(void)g;
	zero_and_grow(w, f);
	begin(w, f, "write to what was zeroed");
	file_write(w, f, PAGE, 100);
	look(w, f);
}

static void scenario_shift(struct worker *w, struct file *f, struct file *g)
{
	(void)g;
	prime(w, f, "collapse");
	file_fallocate(w, f, FALLOC_FL_COLLAPSE_RANGE, 4 * PAGE, 3 * PAGE);
	look(w, f);
	prime(w, f, "insert");
	file_fallocate(w, f, FALLOC_FL_INSERT_RANGE, 4 * PAGE, 3 * PAGE);
	look(w, f);
}

static void scenario_direct(struct worker *w, struct file *f, struct file *g)
{
	(void)g;
	prime(w, f, "direct write");
	begin(w, f, "direct write");
	file_write_direct(w, f, 2 * PAGE, 8 * PAGE);
	look(w, f);
}

static void scenario_move_ext(struct worker *w, struct file *f, struct file *g)
{
	prime(w, f, "move extents");
	prime(w, g, "move extents");
	begin(w, g, "move extents");
	if (!file_move_ext(w, f, g, 4, 4, 8)) {
		errno = EOPNOTSUPP;
		fail(w, g, "the kernel refused EXT4_IOC_MOVE_EXT");
	}
	look(w, g);
	look(w, f);
}

/* Finds the blocks of a file, which must not have holes. The file is opened for reading only. */
static unsigned int map_blocks(struct worker *w, struct file *f, int *blocks, int *bytes)
{
	char path[256];
	unsigned int nr;
	int fd;

	file_path(w, f, path, sizeof(path));
	fd = open(path, O_RDONLY);
	if (fd < 0 || ioctl(fd, FIGETBSZ, bytes) || *bytes < (int)MIN_BLOCK || *bytes > (int)PAGE)
		fail(w, f, "FIGETBSZ");
	nr = PAGES * PAGE / *bytes;
	for (unsigned int i = 0; i < nr; i++) {
		blocks[i] = i;
		if (ioctl(fd, FIBMAP, &blocks[i]) || !blocks[i])
			fail(w, f, "FIBMAP of block %u", i);
	}
	close(fd);
	return nr;
}

/* Fills the blocks with new content, bypassing the file system. */
static void write_blocks(struct worker *w, struct file *f, const int *blocks, unsigned int nr,
			 int bytes)
{
	int device = open(w->opt->device, O_RDWR | O_DIRECT);

	if (device < 0)
		fail(w, f, "open %s", w->opt->device);
	fill(f->model, 0, PAGES * PAGE, owner_of(w, f), w->op);
	for (unsigned int i = 0; i < nr; i++) {
		memcpy(w->buffer, f->model + i * bytes, bytes);
		if (pwrite(device, w->buffer, bytes, (off_t)blocks[i] * bytes) != bytes)
			fail(w, f, "write %s", w->opt->device);
	}
	fsync(device);
	close(device);
}

/*
 * Writes below the page cache as md does with a bitmap in a file. md asks for the blocks of a file
 * that it has open for writing, and writes them itself. The page cache then has old, clean pages,
 * which must not be put.
 */
static void scenario_bmap(struct worker *w, struct file *f, struct file *g)
{
	int blocks[PAGES * PAGE / MIN_BLOCK], bytes;
	unsigned int nr;

	(void)g;
	prime(w, f, "bmap");
	file_scan(w, f, 4 * PAGE);
	nr = map_blocks(w, f, blocks, &bytes);
	begin(w, f, "written below the page cache");
	write_blocks(w, f, blocks, nr, bytes);
	file_close(f);
	evict(w, 1);
	settle();
	file_open(w, f, false);
	evict_all(w, f);
	look(w, f);
}

static void scenario_clone(struct worker *w, struct file *f, struct file *g)
{
	struct file_clone_range clone = { .src_fd = g->fd, .src_length = PAGES * PAGE };

	prime(w, f, "clone");
	prime(w, g, "clone");
	if (ioctl(f->fd, FICLONERANGE, &clone))
		fail(w, f, "FICLONERANGE");
	memcpy(f->model, g->model, PAGES * PAGE);
	look(w, f);
}

static void scenario_exchange(struct worker *w, struct file *f, struct file *g)
{
	prime(w, f, "exchange");
	prime(w, g, "exchange");
	begin(w, f, "exchange of ranges");
	if (!file_exchange(w, f, g, 2, PAGES - 4)) {
		errno = EOPNOTSUPP;
		fail(w, f, "the kernel refused XFS_IOC_EXCHANGE_RANGE");
	}
	look(w, f);
	look(w, g);
}

/* Argument of XFS_IOC_SWAPEXT, from fs/xfs/libxfs/xfs_fs.h, without the part that is unused. */
struct swapext {
	int64_t version, target_fd, donor_fd, offset, length;
	char pad[16];
	struct {
		uint64_t unused1[7];
		struct {
			int64_t s;
			int32_t ns, pad;
		} mtime, ctime;
		uint64_t unused2[6];
	} stat;
};
#define XFS_IOC_SWAPEXT _IOWR('X', 109, struct swapext)

/* Exchanges all blocks of two files of equal size, as xfs_fsr does. */
static void scenario_swapext(struct worker *w, struct file *f, struct file *g)
{
	uint8_t other[PAGES * PAGE];
	struct swapext swap = {
		.target_fd = f->fd, .donor_fd = g->fd, .length = PAGES * PAGE,
	};
	struct stat st;

	prime(w, f, "swapext");
	prime(w, g, "swapext");
	begin(w, f, "swapext");
	begin(w, g, "swapext");
	if (fstat(f->fd, &st))
		fail(w, f, "fstat");
	swap.stat.mtime.s = st.st_mtim.tv_sec;
	swap.stat.mtime.ns = st.st_mtim.tv_nsec;
	swap.stat.ctime.s = st.st_ctim.tv_sec;
	swap.stat.ctime.ns = st.st_ctim.tv_nsec;
	if (ioctl(f->fd, XFS_IOC_SWAPEXT, &swap))
		fail(w, f, "XFS_IOC_SWAPEXT");
	memcpy(other, f->model, sizeof(other));
	memcpy(f->model, g->model, sizeof(other));
	memcpy(g->model, other, sizeof(other));
	look(w, f);
	look(w, g);
}

/*
 * Evicts an inode with its pages while the page cache has new content and the pool an old copy. No
 * earlier read or reclaim of a page has shown the driver that the copy is old.
 */
static void scenario_evict_inode(struct worker *w, struct file *f, struct file *g)
{
	(void)g;
	prime(w, f, "overwrite, then inode eviction");
	begin(w, f, "overwrite whole pages");
	file_write(w, f, 0, PAGES * PAGE);
	if (fsync(f->fd))
		fail(w, f, "fsync");
	if (!file_evict_inode(w, f))
		fail(w, f, "FS_IOC_SETFLAGS");
	if (resident_pages(f->fd, f->size)) {
		errno = EBUSY;
		fail(w, f, "the inode was not evicted, so the scenario would test nothing");
	}
	look(w, f);
}

/* Replaces a file by a new one, which usually gets the inode number of the old one. */
static void scenario_inode(struct worker *w, struct file *f, struct file *g)
{
	char path[256];

	(void)g;
	for (int i = 0; i < 16; i++) {
		prime(w, f, "unlink and create");
		file_path(w, f, path, sizeof(path));
		unlink(path);
		file_close(f);
		file_open(w, f, true);
		file_truncate(w, f, PAGES * PAGE);
		look(w, f);
	}
}

/*
 * Binds the task to its processor. A super block is freed after a grace period, by work on the
 * processor that released it. Only memory that is allocated on that processor is likely to get its
 * address.
 */
static void stay_here(void)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(sched_getcpu(), &set);
	/* Continue after an error: the scenario is then only less likely to find a fault. */
	if (sched_setaffinity(0, sizeof(set), &set))
		perror("sched_setaffinity");
}

static void wait_for_free(void)
{
	struct timespec pause = { 0, 10000000 };

	syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0);
	nanosleep(&pause, NULL);
}

/* Changes bytes on the disk between two mounts. */
static void scenario_unmount(struct worker *w, struct file *f, struct file *g)
{
	int blocks[PAGES * PAGE / MIN_BLOCK], bytes;
	unsigned int nr;

	(void)g;
	stay_here();
	for (int cycle = 0; cycle < UNMOUNT_CYCLES; cycle++) {
		prime(w, f, "unmount");
		file_close(f);
		nr = map_blocks(w, f, blocks, &bytes);
		worker_close(w);
		unmount(w->opt);
		begin(w, f, "changed while not mounted");
		write_blocks(w, f, blocks, nr, bytes);
		wait_for_free();
		mount_again(w->opt);
		worker_open(w, false);
		look(w, f);
	}
}

/* Checks that POSIX_FADV_DONTNEED also erases a file's pages from the driver's index. */
static void scenario_fadvise(struct worker *w, struct file *f, struct file *g)
{
	struct timespec pause = { 0, 5000000 };
	uint64_t hits;

	(void)g;
	prime(w, f, "fadvise");
	file_scan(w, f, 4 * PAGE);
	/* Try again: pages stay cached while the driver compares them with the disk. */
	for (int i = 0; i < 20; i++) {
		posix_fadvise(f->fd, 0, 0, POSIX_FADV_DONTNEED);
		if (!resident_pages(f->fd, f->size))
			break;
		nanosleep(&pause, NULL);
	}
	if (resident_pages(f->fd, f->size)) {
		errno = EBUSY;
		fail(w, f, "pages of the file stayed in the page cache");
	}
	hits = driver_stat("hits");
	file_scan(w, f, 4 * PAGE);
	if (driver_stat("hits") != hits) {
		printf("TORTURE MISMATCH scenario=fadvise: %lu hits of dropped pages\n",
		       driver_stat("hits") - hits);
		fflush(stdout);
		_exit(1);
	}
}

/* Reads the complete file with RWF_DONTCACHE, four pages at a time. */
static void read_dontcache(struct worker *w, struct file *f)
{
	struct iovec vector = { w->buffer, 4 * PAGE };

	for (uint64_t at = 0; at < PAGES * PAGE; at += 4 * PAGE) {
		ssize_t got = preadv2(f->fd, &vector, 1, at, RWF_DONTCACHE);

		if (got < 0 && errno == EOPNOTSUPP) {
			puts("TORTURE SKIP: preadv2 does not know RWF_DONTCACHE");
			fflush(stdout);
			_exit(3);
		}
		if (got != (ssize_t)(4 * PAGE))
			fail(w, f, "preadv2 at %lu", at);
		if (memcmp(w->buffer, f->model + at, got)) {
			printf("TORTURE MISMATCH scenario=dontcache: wrong byte in the read at %lu\n",
			       at);
			fflush(stdout);
			_exit(1);
		}
	}
}

static void scenario_dontcache(struct worker *w, struct file *f, struct file *g)
{
	struct iovec vector = { w->buffer, 8 * PAGE };

	(void)g;
	prime(w, f, "dontcache");
	read_dontcache(w, f);
	look(w, f);
	read_dontcache(w, f);
	for (int i = 0; i < 8; i++) {
		prime(w, f, "dontcache write");
		begin(w, f, "dontcache write");
		fill(w->buffer, 4 * PAGE, 8 * PAGE, owner_of(w, f), w->op);
		memcpy(f->model + 4 * PAGE, w->buffer, 8 * PAGE);
		if (pwritev2(f->fd, &vector, 1, 4 * PAGE, RWF_DONTCACHE) != (ssize_t)(8 * PAGE))
			fail(w, f, "pwritev2");
		read_dontcache(w, f);
		look(w, f);
		read_dontcache(w, f);
	}
}

/* Writes a file of --size-max at once, so that the file system makes its largest folios. */
static void prime_large(struct worker *w, struct file *f, const char *step)
{
	begin(w, f, step);
	file_truncate(w, f, 0);
	file_write(w, f, 0, f->limit);
	evict_all(w, f);
}

/* Reads a file through a mapping with folios of 2 MiB, while the pool has some of its pages. */
static void read_huge(struct worker *w, struct file *f)
{
	uint8_t *room = mmap(NULL, f->limit + HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uint8_t *map = room + (-(uintptr_t)room & (HUGE - 1));

	if (room == MAP_FAILED ||
	    mmap(map, f->size, PROT_READ, MAP_SHARED | MAP_FIXED, f->fd, 0) == MAP_FAILED)
		fail(w, f, "mmap");
	madvise(map, f->size, MADV_HUGEPAGE);
	verify(w, f, map, 0, f->size, "through a huge mapping");
	munmap(room, f->limit + HUGE);
}

static void look_large(struct worker *w, struct file *f)
{
	file_scan(w, f, 32 * PAGE);
	evict(w, 1);
	settle();
	read_huge(w, f);
	evict(w, 1);
	settle();
	file_scan(w, f, HUGE);
	evict(w, 1);
	settle();
	file_read(w, f, 0, f->size);
}

/* Checks that no part of a large folio is older than a change to another part of this folio. */
static void scenario_large(struct worker *w, struct file *f, struct file *g)
{
	(void)g;
	f = &w->files[7];	/* this file may become the largest one */
	prime_large(w, f, "large");
	look_large(w, f);
	prime_large(w, f, "large, parts overwritten");
	file_write(w, f, 70 * PAGE + 5, PAGE);
	file_write(w, f, 3 * PAGE, PAGE);
	look_large(w, f);
	prime_large(w, f, "large, parts written directly");
	file_write_direct(w, f, 40 * PAGE, 60 * PAGE);
	look_large(w, f);
	prime_large(w, f, "large, a hole punched");
	file_fallocate(w, f, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 9 * PAGE + 5, 80 * PAGE);
	look_large(w, f);
	prime_large(w, f, "large, a hole punched while cached");
	file_read(w, f, 0, f->size);
	file_fallocate(w, f, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 9 * PAGE + 5, 80 * PAGE);
	look_large(w, f);
	prime_large(w, f, "large, cut and grown");
	file_truncate(w, f, f->limit - 500 * PAGE + 7);
	file_truncate(w, f, f->limit);
	look_large(w, f);
	file_truncate(w, f, 30 * PAGE - 1);
	look_large(w, f);
}

static uint64_t swap_used_kib(void)
{
	char line[300];
	uint64_t used = 0;
	FILE *file = fopen("/proc/swaps", "r");

	while (file && fgets(line, sizeof(line), file))
		sscanf(line, "%*s %*s %*u %lu", &used);
	if (file)
		fclose(file);
	return used;
}

/* Locks the page of the swap header, which was read at swapon, so that it stays cached. */
static uint8_t *hold_swap_header(struct worker *w)
{
	char path[256];
	uint8_t *header;
	int fd;

	snprintf(path, sizeof(path), "%s/swapfile", w->dir);
	fd = open(path, O_RDONLY);
	header = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, 0);
	if (fd < 0 || header == MAP_FAILED || mlock(header, PAGE))
		fail(w, NULL, "cannot lock the swap header of %s", path);
	close(fd);
	return header;
}

static void swap_out(struct worker *w, struct file *f)
{
	for (int i = 0; i < 64 && swap_used_kib() < SWAPPED_BYTES / 2048; i++)
		memcg_reclaim(SWAPPED_BYTES);
	if (swap_used_kib() < SWAPPED_BYTES / 2048)
		fail(w, f, "the kernel swapped nothing out");
}

static void scenario_swap(struct worker *w, struct file *f, struct file *g)
{
	uint8_t *header;
	uint8_t *anonymous = mmap(NULL, SWAPPED_BYTES, PROT_READ | PROT_WRITE,
				  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	(void)g;
	if (anonymous == MAP_FAILED)
		fail(w, f, "cannot allocate memory to swap out");
	for (int i = 0; i < 4; i++) {
		begin(w, f, "swap");
		evict(w, 1);
		settle();
		swap_toggle(w);
		if (!w->swap_checked) {
			errno = EBUSY;
			fail(w, f, "the swap file stayed in the page cache");
		}
		header = hold_swap_header(w);
		fill(anonymous, 0, SWAPPED_BYTES, 0xabcdef, w->op);
		swap_out(w, f);
		swap_toggle(w);
		munmap(header, PAGE);
	}
	munmap(anonymous, SWAPPED_BYTES);
}

/*
 * Reads pages from swap, which leaves them clean, makes the kernel write to them, and swaps them
 * out again. This tests the kernel of native guests. The driver has no part in it.
 */
static void scenario_swapped_buffer(struct worker *w, struct file *f, struct file *g)
{
	uint8_t *buffer = mmap(NULL, SWAPPED_BYTES, PROT_READ | PROT_WRITE,
			       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	int zero = open("/dev/zero", O_RDONLY);
	unsigned int wrong = 0, sum = 0;

	(void)g;
	if (buffer == MAP_FAILED || zero < 0)
		fail(w, f, "cannot allocate memory to swap out");
	swap_toggle(w);
	memset(buffer, 1, SWAPPED_BYTES);
	swap_out(w, f);
	for (size_t i = 0; i < SWAPPED_BYTES; i += PAGE)
		sum += buffer[i];
	if (sum != SWAPPED_BYTES / PAGE || read(zero, buffer, SWAPPED_BYTES) != SWAPPED_BYTES)
		fail(w, f, "cannot fill the buffer");
	for (int i = 0; i < 64; i++)
		memcg_reclaim(SWAPPED_BYTES);
	for (size_t i = 0; i < SWAPPED_BYTES; i += PAGE)
		wrong += buffer[i] != 0;
	if (wrong) {
		printf("TORTURE MISMATCH swapped_buffer: %u of %lu pages lost what the kernel wrote\n",
		       wrong, SWAPPED_BYTES / PAGE);
		fflush(stdout);
		_exit(1);
	}
	swap_toggle(w);
	munmap(buffer, SWAPPED_BYTES);
	close(zero);
}

static const struct {
	const char *name;
	void (*run)(struct worker *w, struct file *f, struct file *g);
} scenarios[] = {
	{ "plain", scenario_plain },
	{ "dirty", scenario_dirty },
	{ "split", scenario_split },
	{ "truncate", scenario_truncate },
	{ "punch", scenario_punch },
	{ "zero_grow", scenario_zero_grow },
	{ "zero_grow_write", scenario_zero_grow_write },
	{ "shift", scenario_shift },
	{ "direct", scenario_direct },
	{ "move_ext", scenario_move_ext },
	{ "bmap", scenario_bmap },
	{ "clone", scenario_clone },
	{ "exchange", scenario_exchange },
	{ "swapext", scenario_swapext },
	{ "evict_inode", scenario_evict_inode },
	{ "inode", scenario_inode },
	{ "unmount", scenario_unmount },
	{ "fadvise", scenario_fadvise },
	{ "dontcache", scenario_dontcache },
	{ "large", scenario_large },
	{ "swap", scenario_swap },
	{ "swapped_buffer", scenario_swapped_buffer },
};

#define NR_SCENARIOS (sizeof(scenarios) / sizeof(scenarios[0]))

void scenario_list(void)
{
	for (unsigned int i = 0; i < NR_SCENARIOS; i++)
		puts(scenarios[i].name);
}

int scenario_run(const struct options *opt, struct shared *shared)
{
	struct worker w = {
		.opt = opt, .shared = shared, .op_name = "start", .rng = { opt->seed },
	};
	uint64_t puts_before = driver_stat("puts"), hits_before = driver_stat("hits");

	for (unsigned int i = 0; i < NR_SCENARIOS; i++) {
		if (strcmp(scenarios[i].name, opt->mode))
			continue;
		snprintf(w.dir, sizeof(w.dir), "%s/w0", opt->dir);
		worker_open(&w, true);
		scenarios[i].run(&w, &w.files[5], &w.files[6]);
		worker_close(&w);
		printf("TORTURE seed=%lu scenario=%s puts=%lu hits=%lu done ok\n", opt->seed,
		       opt->mode, driver_stat("puts") - puts_before,
		       driver_stat("hits") - hits_before);
		return 0;
	}
	fprintf(stderr, "torture: no scenario %s; --list names them\n", opt->mode);
	return 2;
}
