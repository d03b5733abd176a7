// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Runs readers and writers of the same blocks. No reader may see a version that is older than a
 * version whose write was complete before the read began, or older than a version that this reader
 * has seen before.
 *
 * Every block of 4 KiB consists of 256 equal cells: block number, version, and a hash of both. A
 * block has one writer at a time, and versions grow by one. A read that overlaps a write may see
 * both, byte by byte, so the rule holds for the oldest complete cell of a block.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "torture.h"

#define BLOCKS		192U	/* blocks of a file; few, so that reads and writes overlap */
#define RUN_MAX		8U	/* blocks of one write */
#define READ_MAX	32U
#define VERSION_FILES	3U	/* files: one written buffered, one directly, one in both ways */

struct cell {
	uint32_t block, version;
	uint64_t mixed;
};

struct version_state {
	uint32_t stop;
	/* lock of each block; the writer that has it may change the block's issued and done */
	uint32_t lock[VERSION_FILES][BLOCKS];
	uint32_t issued[VERSION_FILES][BLOCKS], done[VERSION_FILES][BLOCKS];
	uint64_t reads[JOBS_MAX], writes, longest_read_ns[JOBS_MAX];
};

static uint64_t mix(uint32_t block, uint32_t version)
{
	struct rng rng = { (uint64_t)block << 32 | version };

	return rng_next(&rng);
}

static void fill_block(uint8_t *to, uint32_t block, uint32_t version)
{
	struct cell cell = { block, version, mix(block, version) };

	for (size_t i = 0; i < PAGE; i += sizeof(cell))
		memcpy(to + i, &cell, sizeof(cell));
}

static void version_path(const struct options *opt, unsigned int file, char *path, size_t room)
{
	snprintf(path, room, "%s/w0/f%03u", opt->dir, file);
}

static int version_open(const struct options *opt, unsigned int file, int flags)
{
	char path[300];
	int fd;

	version_path(opt, file, path, sizeof(path));
	fd = open(path, O_RDWR | flags, 0600);
	if (fd < 0) {
		printf("TORTURE ERROR: open %s: %s\n", path, strerror(errno));
		fflush(stdout);
		_exit(2);
	}
	return fd;
}

static bool lock_run(struct version_state *s, unsigned int file, unsigned int first,
		     unsigned int count)
{
	for (unsigned int i = 0; i < count; i++) {
		if (!__atomic_exchange_n(&s->lock[file][first + i], 1, __ATOMIC_ACQUIRE))
			continue;
		while (i--)
			__atomic_store_n(&s->lock[file][first + i], 0, __ATOMIC_RELEASE);
		return false;
	}
	return true;
}

static void write_run(const struct options *opt, struct version_state *s, struct rng *rng,
		      int fd, unsigned int file, uint8_t *buffer)
{
	unsigned int count = 1 + rng_below(rng, RUN_MAX);
	unsigned int first = rng_below(rng, BLOCKS - count + 1);
	size_t length = count * PAGE;

	if (!lock_run(s, file, first, count))
		return;
	for (unsigned int i = 0; i < count; i++) {
		uint32_t version = __atomic_add_fetch(&s->issued[file][first + i], 1,
						      __ATOMIC_SEQ_CST);

		fill_block(buffer + i * PAGE, first + i, version);
	}
	if (pwrite(fd, buffer, length, first * PAGE) != (ssize_t)length) {
		printf("TORTURE ERROR seed=%lu: cannot write versions: %s\n", opt->seed,
		       strerror(errno));
		fflush(stdout);
		_exit(2);
	}
	for (unsigned int i = 0; i < count; i++) {
		__atomic_store_n(&s->done[file][first + i], s->issued[file][first + i],
				 __ATOMIC_SEQ_CST);
		__atomic_store_n(&s->lock[file][first + i], 0, __ATOMIC_RELEASE);
	}
	__atomic_add_fetch(&s->writes, 1, __ATOMIC_RELAXED);
}

static void writer(const struct options *opt, struct version_state *s, unsigned int id)
{
	struct rng rng = { opt->seed ^ (0x3817e5ull + id) << 20 };
	unsigned int files = opt->mixed ? VERSION_FILES : VERSION_FILES - 1;
	int buffered[VERSION_FILES], direct[VERSION_FILES];
	uint8_t *buffer = aligned_alloc(PAGE, RUN_MAX * PAGE);

	for (unsigned int i = 0; i < VERSION_FILES; i++) {
		buffered[i] = version_open(opt, i, 0);
		direct[i] = version_open(opt, i, O_DIRECT);
	}
	while (!__atomic_load_n(&s->stop, __ATOMIC_ACQUIRE)) {
		unsigned int file = rng_below(&rng, files);
		bool is_direct = file == 1 || (file == 2 && rng_chance(&rng, 50));
		struct timespec pause = { 0, rng_below(&rng, 3) * 1000000 };

		write_run(opt, s, &rng, is_direct ? direct[file] : buffered[file], file, buffer);
		if (!is_direct && rng_chance(&rng, 40))
			sync_file_range(buffered[file], 0, 0, SYNC_FILE_RANGE_WAIT_BEFORE |
					SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
		nanosleep(&pause, NULL);
	}
	_exit(0);
}

static void check_block(const struct options *opt, const uint8_t *found, unsigned int id,
			unsigned int file, uint32_t block, uint32_t least, uint32_t most,
			uint32_t *seen)
{
	uint32_t oldest = UINT32_MAX;
	struct cell cell;

	if (*seen > least)
		least = *seen;
	for (size_t i = 0; i < PAGE; i += sizeof(cell)) {
		bool whole;

		memcpy(&cell, found + i, sizeof(cell));
		whole = cell.mixed == mix(cell.block, cell.version);
		/*
		 * A read and a concurrent write copy bytes in any order, so a cell may be torn.
		 */
		if (!whole && most > least)
			continue;
		if (cell.version < oldest)
			oldest = cell.version;
		if (whole && cell.block == block && cell.version >= least && cell.version <= most)
			continue;
		printf("TORTURE MISMATCH seed=%lu versions reader=%u file=%u block=%u offset=%zu: "
		       "found block %u version %u%s, expected versions %u to %u (seen before: %u)\n",
		       opt->seed, id, file, block, i, cell.block, cell.version,
		       whole ? "" : " torn", least, most, *seen);
		fflush(stdout);
		_exit(1);
	}
	if (oldest == UINT32_MAX)	/* concurrent writes tore all cells: no version was seen */
		return;
	*seen = oldest;
}

static void reader(const struct options *opt, struct version_state *s, unsigned int id,
		   uint64_t reads)
{
	struct rng rng = { opt->seed ^ (0x4ead34ull + id) << 24 };
	unsigned int files = opt->mixed ? VERSION_FILES : VERSION_FILES - 1;
	/*
	 * Some readers read only from the disk, and the others only through the page cache. A
	 * reader that did both could see an older version without a fault: a buffered write changes
	 * the page cache first, and the disk later.
	 */
	bool is_direct = id >= opt->readers - opt->direct_readers;
	static uint32_t seen[VERSION_FILES][BLOCKS];
	uint8_t *buffer = aligned_alloc(PAGE, READ_MAX * PAGE), *map[VERSION_FILES];
	int fd[VERSION_FILES];

	for (unsigned int i = 0; i < VERSION_FILES; i++) {
		fd[i] = version_open(opt, i, is_direct ? O_DIRECT : 0);
		map[i] = mmap(NULL, BLOCKS * PAGE, PROT_READ, MAP_SHARED, fd[i], 0);
	}
	for (uint64_t n = 0; n < reads; n++) {
		unsigned int file = rng_below(&rng, files);
		unsigned int count = 1 + rng_below(&rng, READ_MAX);
		unsigned int first = rng_below(&rng, BLOCKS - count + 1);
		uint32_t least[READ_MAX];
		uint64_t start, took;

		for (unsigned int i = 0; i < count; i++)
			least[i] = __atomic_load_n(&s->done[file][first + i], __ATOMIC_SEQ_CST);
		start = now_ns();
		if (rng_chance(&rng, 10) && !is_direct) {
			memcpy(buffer, map[file] + first * PAGE, count * PAGE);
			madvise(map[file], BLOCKS * PAGE, MADV_DONTNEED);	/* unmap */
		} else if (pread(fd[file], buffer, count * PAGE, first * PAGE) !=
			   (ssize_t)(count * PAGE)) {
			printf("TORTURE ERROR seed=%lu: cannot read versions: %s\n", opt->seed,
			       strerror(errno));
			fflush(stdout);
			_exit(2);
		}
		took = now_ns() - start;
		if (took > s->longest_read_ns[id])
			s->longest_read_ns[id] = took;
		for (unsigned int i = 0; i < count; i++) {
			uint32_t most = __atomic_load_n(&s->issued[file][first + i],
							__ATOMIC_SEQ_CST);

			check_block(opt, buffer + i * PAGE, id, file, first + i, least[i], most,
				    &seen[file][first + i]);
		}
		s->reads[id]++;
	}
	_exit(0);
}

static void create_files(const struct options *opt)
{
	uint8_t block[PAGE];
	char path[300];

	snprintf(path, sizeof(path), "%s/w0", opt->dir);
	mkdir(path, 0700);
	for (unsigned int file = 0; file < VERSION_FILES; file++) {
		int fd;

		version_path(opt, file, path, sizeof(path));
		unlink(path);
		fd = version_open(opt, file, O_CREAT);
		for (uint32_t i = 0; i < BLOCKS; i++) {
			fill_block(block, i, 0);
			if (pwrite(fd, block, PAGE, i * PAGE) != PAGE) {
				printf("TORTURE ERROR: write %s: %s\n", path, strerror(errno));
				fflush(stdout);
				_exit(2);
			}
		}
		fsync(fd);
		close(fd);
	}
}

int versions_run(const struct options *opt, struct shared *shared)
{
	struct version_state *s = mmap(NULL, sizeof(*s), PROT_READ | PROT_WRITE,
				       MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	struct options evictor_options = *opt;
	pid_t evictor = 0, writers[JOBS_MAX];
	int worst = 0, status;
	uint64_t reads = 0, longest_ns = 0;

	if (s == MAP_FAILED)
		return 2;
	create_files(opt);
	evictor_options.files = VERSION_FILES;
	evictor_options.jobs = 1;
	for (unsigned int i = 0; i < opt->writers; i++) {
		writers[i] = fork();
		if (!writers[i])
			writer(opt, s, i);
	}
	if (opt->evictor) {
		evictor = fork();
		if (!evictor)
			evictor_run(&evictor_options, shared);
	}
	for (unsigned int i = 0; i < opt->readers; i++)
		if (!fork())
			reader(opt, s, i, opt->ops / opt->readers);
	for (unsigned int i = 0; i < opt->readers; i++) {
		if (wait(&status) < 0)
			break;
		if (!WIFEXITED(status) || WEXITSTATUS(status)) {
			worst = WIFEXITED(status) ? WEXITSTATUS(status) : 2;
			break;
		}
	}
	__atomic_store_n(&s->stop, 1, __ATOMIC_RELEASE);
	for (unsigned int i = 0; i < opt->writers; i++)
		waitpid(writers[i], NULL, 0);
	if (evictor) {
		kill(evictor, SIGKILL);
		waitpid(evictor, NULL, 0);
	}
	if (worst)
		return worst;
	for (unsigned int i = 0; i < opt->readers; i++) {
		reads += s->reads[i];
		if (s->longest_read_ns[i] > longest_ns)
			longest_ns = s->longest_read_ns[i];
	}
	printf("TORTURE seed=%lu mode=versions reads=%lu writes=%lu evictions=%lu hits=%lu "
	       "longest_read_us=%lu done ok\n", opt->seed, reads, s->writes, shared->evictions,
	       driver_stat("hits"), longest_ns / 1000);
	return 0;
}
