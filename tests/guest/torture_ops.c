// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Operations of a worker, and their random choice.
 *
 * Each choice uses the worker's random generator and depends only on earlier choices and on the
 * model. So the same seed gives the same operations, regardless of the kernel's answers and of the
 * order in which the processes run.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "torture.h"

/*
 * Function of an operation on a file. Returns true if the operation was done, or false if it is not
 * possible with this file and counts as skipped.
 */
typedef bool (*op_function)(struct worker *w, struct file *f);

struct range {
	uint64_t offset;
	size_t length;
};

/* Draws a range within [0, end): mostly short, sometimes up to the end; half on page boundaries. */
static struct range draw_range(struct worker *w, size_t end)
{
	struct range r = { rng_below(&w->rng, end), 0 };
	unsigned int size = rng_below(&w->rng, 100);
	size_t most = size < 50 ? 2 * PAGE : size < 85 ? 16 * PAGE : end;

	r.length = 1 + rng_below(&w->rng, most);
	if (rng_chance(&w->rng, 50)) {
		r.offset &= -PAGE;
		r.length = (r.length + PAGE - 1) & -PAGE;
	}
	if (r.length > end - r.offset)
		r.length = end - r.offset;
	return r;
}

/* Draws whole pages within [0, end); the length is 0 if there is none. */
static struct range draw_pages(struct worker *w, size_t end)
{
	size_t pages = end / PAGE;
	struct range r = { 0, 0 };

	if (!pages)
		return r;
	r.offset = rng_below(&w->rng, pages);
	r.length = 1 + rng_below(&w->rng, rng_chance(&w->rng, 70) ? 4 : pages);
	if (r.length > pages - r.offset)
		r.length = pages - r.offset;
	r.offset *= PAGE;
	r.length *= PAGE;
	return r;
}

static struct file *draw_other(struct worker *w, struct file *f)
{
	unsigned int other = rng_below(&w->rng, w->opt->files - 1);

	return &w->files[other >= f->id ? other + 1 : other];
}

/* --- reading ------------------------------------------------------------------------------- */

static bool op_read(struct worker *w, struct file *f)
{
	struct range r = draw_range(w, f->size);

	if (rng_chance(&w->rng, 10))	/* read beyond the end of the file */
		r.length += PAGE;
	record(w, f, r.offset, r.length, NULL);
	file_read(w, f, r.offset, r.length);
	return true;
}

static bool op_scan(struct worker *w, struct file *f)
{
	static const size_t chunks[] = { 1000, PAGE, 4 * PAGE, 32 * PAGE };
	size_t chunk = chunks[rng_below(&w->rng, 4)];

	if (f->size > 256 * PAGE && chunk < 4 * PAGE)
		chunk = 4 * PAGE;
	record(w, f, 0, f->size, "in chunks");
	file_scan(w, f, chunk);
	return true;
}

/* Reads single pages at random places, with and without readahead around them. */
static bool op_sparse_read(struct worker *w, struct file *f)
{
	bool random = rng_chance(&w->rng, 50);

	record(w, f, 0, f->size, random ? "random" : "normal");
	posix_fadvise(f->fd, 0, 0, random ? POSIX_FADV_RANDOM : POSIX_FADV_NORMAL);
	for (int i = 0; i < 8; i++)
		file_read(w, f, rng_below(&w->rng, f->size), 1 + rng_below(&w->rng, PAGE));
	posix_fadvise(f->fd, 0, 0, POSIX_FADV_NORMAL);
	return true;
}

static bool op_direct_read(struct worker *w, struct file *f)
{
	struct range r = draw_pages(w, f->size + PAGE);

	if (r.offset >= f->size)
		r.offset = 0;
	record(w, f, r.offset, r.length, NULL);
	file_read_direct(w, f, r.offset, r.length);
	return true;
}

static bool op_dontcache_read(struct worker *w, struct file *f)
{
	struct range r = draw_range(w, f->size);

	record(w, f, r.offset, r.length, NULL);
	return file_read_dontcache(w, f, r.offset, r.length);
}

/* Reads through a mapping. Also checks that the last page has zeroes behind the end of the file. */
static bool op_mmap_read(struct worker *w, struct file *f)
{
	struct range r = draw_range(w, f->size);
	uint64_t start = r.offset & -PAGE;
	uint64_t end = (r.offset + r.length + PAGE - 1) & -PAGE;
	uint64_t data = end < f->size ? end : f->size;
	uint8_t *map;

	record(w, f, start, end - start, f->map ? "standing mapping" : NULL);
	map = f->map;
	if (!map) {
		map = mmap(NULL, end, PROT_READ, MAP_SHARED, f->fd, 0);
		if (map == MAP_FAILED)
			fail(w, f, "mmap");
		if (rng_chance(&w->rng, 30))
			madvise(map, end, MADV_RANDOM);
	}
	verify(w, f, map + start, start, data - start, "mapped");
	for (uint64_t i = data; i < end; i++) {
		if (map[i])
			wrong_byte(w, f,
				   "byte %lu of a mapping, behind the end %zu of the file, is %#x",
				   i, f->size, map[i]);
	}
	if (!f->map)
		munmap(map, end);
	return true;
}

/* --- writing ------------------------------------------------------------------------------- */

static bool op_write(struct worker *w, struct file *f)
{
	struct range r = draw_range(w, f->limit);

	if (rng_chance(&w->rng, 60) && r.offset > f->size)
		r.offset = f->size;		/* append instead of leaving a hole */
	record(w, f, r.offset, r.length, NULL);
	file_write(w, f, r.offset, r.length);
	return true;
}

static bool op_direct_write(struct worker *w, struct file *f)
{
	struct range r = draw_pages(w, f->limit);

	if (rng_chance(&w->rng, 10) && r.length > PAGE) {
		r.offset += 512;		/* not aligned to the file system's blocks */
		r.length -= 1024;
	}
	record(w, f, r.offset, r.length, NULL);
	file_write_direct(w, f, r.offset, r.length);
	return true;
}

static bool op_dontcache_write(struct worker *w, struct file *f)
{
	struct range r = draw_range(w, f->limit);

	record(w, f, r.offset, r.length, NULL);
	return file_write_dontcache(w, f, r.offset, r.length);
}

static bool op_mmap_write(struct worker *w, struct file *f)
{
	struct range r = draw_range(w, f->size);
	bool sync = rng_chance(&w->rng, 25);
	uint8_t *map = f->map;

	record(w, f, r.offset, r.length, sync ? "msync" : NULL);
	if (!map) {
		map = mmap(NULL, f->limit, PROT_READ | PROT_WRITE, MAP_SHARED, f->fd, 0);
		if (map == MAP_FAILED)
			fail(w, f, "mmap");
	}
	fill(f->model + r.offset, r.offset, r.length, owner_of(w, f), w->op);
	memcpy(map + r.offset, f->model + r.offset, r.length);
	if (sync && msync(map, f->limit, MS_SYNC) && errno != ENOMEM)
		fail(w, f, "msync");
	if (!f->map && rng_chance(&w->rng, 20))
		f->map = map;
	else if (!f->map)
		munmap(map, f->limit);
	return true;
}

/* --- size and holes ------------------------------------------------------------------------ */

static bool op_truncate(struct worker *w, struct file *f)
{
	size_t size;

	switch (rng_below(&w->rng, 10)) {
	case 0:
		size = 0;
		break;
	case 1 ... 3:	/* a new size near the current size */
		size = f->size + rng_below(&w->rng, 2 * PAGE);
		size = size > PAGE ? size - PAGE : 1;
		break;
	case 4:		/* a new size just below or above a page boundary, or on it */
		size = (f->size & -PAGE) + rng_below(&w->rng, 3);
		size = size ? size - 1 : 0;
		break;
	default:
		size = rng_below(&w->rng, f->limit + 1);
	}
	if (size > f->limit)
		size = f->limit;
	record(w, f, size, 0, size < f->size ? "down" : "up");
	file_truncate(w, f, size);
	if (size < f->limit && rng_chance(&w->rng, 40)) {	/* then grow: the new part is zero */
		size += rng_below(&w->rng, f->limit - size);
		record(w, f, size, 0, "up again");
		file_truncate(w, f, size);
	}
	return true;
}

static bool op_punch(struct worker *w, struct file *f)
{
	struct range r = draw_range(w, f->size);

	record(w, f, r.offset, r.length, NULL);
	return file_fallocate(w, f, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, r.offset, r.length);
}

/*
 * Returns whether FALLOC_FL_ZERO_RANGE on this range meets the kernel's fault that
 * zero_range_is_wrong() describes: the range has whole blocks only, and the file ends within it.
 */
static bool zero_goes_wrong(const struct file *f, struct range r)
{
	uint64_t end = r.offset + r.length;

	return !((r.offset | end) % ZERO_BLOCK) && r.offset < f->size && f->size < end;
}

static bool op_zero(struct worker *w, struct file *f)
{
	bool grow = rng_chance(&w->rng, 30);
	struct range r = draw_range(w, grow ? f->limit : f->size);

	if (grow && w->opt->zero_is_wrong && zero_goes_wrong(f, r))
		grow = false;	/* the kernel's fault needs a file that grows */
	record(w, f, r.offset, r.length, grow ? "may grow" : NULL);
	return file_fallocate(w, f, FALLOC_FL_ZERO_RANGE | (grow ? 0 : FALLOC_FL_KEEP_SIZE),
			      r.offset, r.length);
}

static bool op_collapse(struct worker *w, struct file *f)
{
	struct range r = draw_pages(w, f->size - 1);

	if (!r.length)
		return false;
	record(w, f, r.offset, r.length, NULL);
	return file_fallocate(w, f, FALLOC_FL_COLLAPSE_RANGE, r.offset, r.length);
}

static bool op_insert(struct worker *w, struct file *f)
{
	struct range r = draw_pages(w, f->size - 1);

	if (r.length > f->limit - f->size)
		r.length = (f->limit - f->size) & -PAGE;
	if (!r.length)
		return false;
	record(w, f, r.offset, r.length, NULL);
	return file_fallocate(w, f, FALLOC_FL_INSERT_RANGE, r.offset, r.length);
}

static bool op_allocate(struct worker *w, struct file *f)
{
	struct range r = draw_range(w, f->limit);

	record(w, f, r.offset, r.length, NULL);
	return file_fallocate(w, f, 0, r.offset, r.length);
}

/* --- names --------------------------------------------------------------------------------- */

static void maybe_map(struct worker *w, struct file *f)
{
	if (rng_chance(&w->rng, 20)) {
		f->map = mmap(NULL, f->limit, PROT_READ | PROT_WRITE, MAP_SHARED, f->fd, 0);
		if (f->map == MAP_FAILED)
			fail(w, f, "mmap");
	}
}

static bool op_reopen(struct worker *w, struct file *f)
{
	record(w, f, 0, 0, NULL);
	file_close(f);
	file_open(w, f, false);
	maybe_map(w, f);
	return true;
}

/* Makes the kernel evict the inode while its pages are cached, and read the inode again. */
static bool op_evict_inode(struct worker *w, struct file *f)
{
	record(w, f, 0, 0, NULL);
	return file_evict_inode(w, f);
}

/* Replaces a file by a new one, which usually gets the inode number of the old one. */
static bool op_recreate(struct worker *w, struct file *f)
{
	bool keep = rng_chance(&w->rng, 30);
	char path[256];

	record(w, f, 0, 0, keep ? "read once more after unlink" : NULL);
	file_path(w, f, path, sizeof(path));
	if (unlink(path))
		fail(w, f, "unlink %s", path);
	if (keep && f->size)
		file_scan(w, f, 16 * PAGE);
	file_close(f);
	file_open(w, f, true);
	file_truncate(w, f, rng_below(&w->rng, f->limit + 1));
	maybe_map(w, f);
	return true;
}

/*
 * Renames file f over another file of the same limit. The model of the other file then describes a
 * new empty file with f's old name.
 */
static bool op_rename(struct worker *w, struct file *f)
{
	struct file *g = draw_other(w, f), swap;
	char from[256], to[256];

	if (g->limit != f->limit)
		return false;
	record(w, f, 0, 0, "moved over");
	record(w, g, 0, 0, "replaced");
	file_path(w, f, from, sizeof(from));
	file_path(w, g, to, sizeof(to));
	if (rename(from, to))
		fail(w, f, "rename over %s", to);
	swap = *f;
	memcpy(f->name, g->name, sizeof(f->name));
	memcpy(g->name, swap.name, sizeof(g->name));
	file_close(g);
	file_open(w, g, true);
	if (f->direct_fd >= 0) {
		close(f->direct_fd);
		f->direct_fd = -1;
	}
	return true;
}

/* --- between files ------------------------------------------------------------------------- */

static bool op_clone(struct worker *w, struct file *f)
{
	struct file *g = draw_other(w, f);
	struct range r = draw_pages(w, g->size < f->size ? g->size : f->size);
	struct file_clone_range clone = {
		.src_fd = g->fd, .src_offset = r.offset, .src_length = r.length,
		.dest_offset = r.offset,
	};

	if (!r.length)
		return false;
	record(w, f, r.offset, r.length, "to here");
	record(w, g, r.offset, r.length, "from here");
	if (ioctl(f->fd, FICLONERANGE, &clone)) {
		if (errno == EOPNOTSUPP || errno == ENOTTY)
			return false;
		fail(w, f, "FICLONERANGE");
	}
	memcpy(f->model + r.offset, g->model + r.offset, r.length);
	return true;
}

static bool op_copy(struct worker *w, struct file *f)
{
	struct file *g = draw_other(w, f);
	struct range r = draw_range(w, g->size < f->limit ? g->size : f->limit);
	size_t left = r.length;
	loff_t in = r.offset, out = r.offset;

	record(w, f, r.offset, r.length, "to here");
	record(w, g, r.offset, r.length, "from here");
	while (left) {
		ssize_t got = copy_file_range(g->fd, &in, f->fd, &out, left, 0);

		if (got < 0 && (errno == EOPNOTSUPP || errno == EXDEV))
			return false;
		if (got <= 0)
			fail(w, f, "copy_file_range at %lu+%zu returned %zd", r.offset, r.length,
			     got);
		left -= got;
	}
	memcpy(f->model + r.offset, g->model + r.offset, r.length);
	if (r.offset + r.length > f->size)
		f->size = r.offset + r.length;
	return true;
}

static bool op_move_ext(struct worker *w, struct file *f)
{
	struct file *g = draw_other(w, f);
	struct range r = draw_pages(w, f->limit < g->limit ? f->limit : g->limit);

	if (r.length > 8 * PAGE)
		r.length = 8 * PAGE;
	record(w, f, r.offset, r.length, "blocks from here");
	record(w, g, r.offset, r.length, "donor");
	if (!file_move_ext(w, f, g, r.offset / PAGE, r.offset / PAGE, r.length / PAGE))
		return false;
	if (rng_chance(&w->rng, 50))
		file_read(w, g, r.offset, r.length);
	return true;
}

static bool op_exchange(struct worker *w, struct file *f)
{
	struct file *g = draw_other(w, f);
	struct range r = draw_pages(w, f->limit < g->limit ? f->limit : g->limit);

	record(w, f, r.offset, r.length, "exchanged");
	record(w, g, r.offset, r.length, "exchanged");
	return file_exchange(w, f, g, r.offset / PAGE, r.length / PAGE);
}

/* --- cache and disk ------------------------------------------------------------------------ */

static bool op_fadvise(struct worker *w, struct file *f)
{
	struct range r = draw_range(w, f->limit);
	bool whole = rng_chance(&w->rng, 50), sync = rng_chance(&w->rng, 50);
	int advice = rng_chance(&w->rng, 75) ? POSIX_FADV_DONTNEED : POSIX_FADV_WILLNEED;

	if (whole)
		r = (struct range){ 0, 0 };
	record(w, f, r.offset, r.length,
	       advice == POSIX_FADV_DONTNEED ? "DONTNEED" : "WILLNEED");
	if (sync && fdatasync(f->fd))
		fail(w, f, "fdatasync");
	posix_fadvise(f->fd, r.offset, r.length, advice);
	return true;
}

/* Evicts all clean pages from the page cache, so that the driver puts them and can have hits. */
static bool op_evict(struct worker *w, struct file *f)
{
	int what = rng_chance(&w->rng, 75) ? 1 : 2 + rng_below(&w->rng, 2);

	record(w, f, what, 0, "drop_caches");
	evict(w, what);
	return true;
}

static bool op_reclaim(struct worker *w, struct file *f)
{
	uint64_t bytes = (1 + rng_below(&w->rng, 8)) << 20;

	record(w, f, 0, bytes, NULL);
	if (rng_chance(&w->rng, 50) && syncfs(f->fd))
		fail(w, f, "syncfs");
	return memcg_reclaim(bytes);
}

static bool op_pressure(struct worker *w, struct file *f)
{
	record(w, f, 0, 0, NULL);
	pressure(w->shared, &w->rng);
	return true;
}

static bool op_swap(struct worker *w, struct file *f)
{
	record(w, f, 0, 0, w->swap_on ? "off" : "on");
	swap_toggle(w);
	return true;
}

static bool op_sync(struct worker *w, struct file *f)
{
	unsigned int how = rng_below(&w->rng, 4);

	record(w, f, how, 0, NULL);
	if (how == 0 ? syncfs(f->fd) : how == 1 ? fdatasync(f->fd) : fsync(f->fd))
		fail(w, f, "sync");
	return true;
}

static bool op_remount(struct worker *w, struct file *f)
{
	record(w, f, 0, 0, NULL);
	if (!w->opt->fstype)
		return false;
	if (remount(w->opt))
		fail(w, f, "remount");
	return true;
}

/* --- drawing ------------------------------------------------------------------------------- */

static const struct {
	const char *name;
	unsigned int weight;
	op_function run;
	bool needs_data;	/* if the file is empty, the worker writes to it instead */
} kinds[] = {
	{ "read", 200, op_read, true },
	{ "scan", 60, op_scan, true },
	{ "sparse-read", 60, op_sparse_read, true },
	{ "direct-read", 30, op_direct_read, true },
	{ "dontcache-read", 30, op_dontcache_read, true },
	{ "mmap-read", 70, op_mmap_read, true },
	{ "write", 110, op_write, false },
	{ "direct-write", 45, op_direct_write, false },
	{ "dontcache-write", 25, op_dontcache_write, false },
	{ "mmap-write", 50, op_mmap_write, true },
	{ "truncate", 35, op_truncate, false },
	{ "punch", 25, op_punch, true },
	{ "zero", 25, op_zero, true },
	{ "collapse", 15, op_collapse, true },
	{ "insert", 15, op_insert, true },
	{ "allocate", 10, op_allocate, false },
	{ "reopen", 25, op_reopen, false },
	{ "recreate", 12, op_recreate, false },
	{ "rename", 8, op_rename, false },
	{ "evict-inode", 12, op_evict_inode, false },
	{ "clone", 12, op_clone, true },
	{ "copy", 20, op_copy, true },
	{ "move-ext", 6, op_move_ext, false },
	{ "exchange", 8, op_exchange, false },
	{ "fadvise", 30, op_fadvise, false },
	{ "evict", 60, op_evict, false },
	{ "reclaim", 20, op_reclaim, false },
	{ "pressure", 1, op_pressure, false },
	{ "swap", 2, op_swap, false },
	{ "sync", 40, op_sync, false },
	{ "remount", 2, op_remount, false },
};

#define NR_KINDS (sizeof(kinds) / sizeof(kinds[0]))
_Static_assert(NR_KINDS <= OPS_MAX, "struct shared counts by kind");

int ops_find(const char *name)
{
	for (unsigned int i = 0; i < NR_KINDS; i++)
		if (!strcmp(kinds[i].name, name))
			return i;
	return -1;
}

const char *ops_name(int kind)
{
	return (unsigned int)kind < NR_KINDS ? kinds[kind].name : NULL;
}

static unsigned int draw_kind(struct worker *w)
{
	unsigned int total = 0, i;
	uint64_t at;

	for (i = 0; i < NR_KINDS; i++)
		total += w->opt->disabled[i] ? 0 : kinds[i].weight;
	at = rng_below(&w->rng, total);
	for (i = 0;; i++) {
		unsigned int weight = w->opt->disabled[i] ? 0 : kinds[i].weight;

		if (at < weight)
			return i;
		at -= weight;
	}
}

/*
 * Returns the largest size of a file in bytes. Of eight files in a row, one is tiny, four are
 * small, two are medium, and one is large.
 */
static size_t limit_of(const struct options *opt, unsigned int id)
{
	size_t limit;

	switch (id % 8) {
	case 0:
		limit = PAGE;
		break;
	case 7:
		limit = opt->size_max;
		break;
	case 5 ... 6:
		limit = 64 * PAGE;
		break;
	default:
		limit = 12 * PAGE;
	}
	return limit < opt->size_max ? limit : opt->size_max;
}

void worker_open(struct worker *w, bool fresh)
{
	if (fresh) {
		if (mkdir(w->dir, 0700) && errno != EEXIST)
			fail(w, NULL, "mkdir %s", w->dir);
		w->files = calloc(w->opt->files, sizeof(*w->files));
		w->buffer = mmap(NULL, w->opt->size_max + 2 * PAGE, PROT_READ | PROT_WRITE,
				 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		w->buffer2 = mmap(NULL, w->opt->size_max + 2 * PAGE, PROT_READ | PROT_WRITE,
				  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (!w->files || w->buffer == MAP_FAILED || w->buffer2 == MAP_FAILED)
			fail(w, NULL, "cannot allocate memory for %u files", w->opt->files);
	}
	for (unsigned int i = 0; i < w->opt->files; i++) {
		struct file *f = &w->files[i];

		if (fresh) {
			f->id = i;
			f->limit = limit_of(w->opt, i);
			f->model = mmap(NULL, f->limit, PROT_READ | PROT_WRITE,
					MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
			if (f->model == MAP_FAILED)
				fail(w, NULL, "cannot allocate memory for a model of %zu bytes",
				     f->limit);
			snprintf(f->name, sizeof(f->name), "f%03u", i);
		}
		file_open(w, f, fresh);
	}
}

void worker_close(struct worker *w)
{
	swap_off(w);
	for (unsigned int i = 0; i < w->opt->files; i++)
		file_close(&w->files[i]);
}

void worker_run(struct worker *w, uint64_t ops)
{
	for (uint64_t end = w->op + ops; w->op < end;) {
		struct file *f = &w->files[rng_below(&w->rng, w->opt->files)];
		unsigned int kind = draw_kind(w);

		w->op++;
		w->op_name = kinds[kind].name;
		if (kinds[kind].needs_data && !f->size) {
			w->op_name = "write";
			op_write(w, f);
		} else if (!kinds[kind].run(w, f)) {
			__atomic_add_fetch(&w->shared->skipped[kind], 1, __ATOMIC_RELAXED);
		}
		w->shared->ops[w->id] = w->op;
	}
}

/* Checks every byte of every file: first as cached, then twice after evictions. */
void worker_check_all(struct worker *w)
{
	w->op_name = "check all";
	for (int pass = 0; pass < 3; pass++) {
		for (unsigned int i = 0; i < w->opt->files; i++) {
			record(w, &w->files[i], 0, w->files[i].size, NULL);
			file_scan(w, &w->files[i], 32 * PAGE);
		}
		evict(w, 1);
	}
}
