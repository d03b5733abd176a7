// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Computes the expected bytes of files, and reports wrong ones.
 *
 * The written bytes depend on three values: the owner of the file, the version, and the position in
 * the file at the time of the write. Most versions consist of cells of 16 bytes (stamps), which
 * contain the three values. So a report about an old cell can name the write that it comes from,
 * even after collapse and insert have moved the cell. Some versions are one repeated word
 * (same-filled pages) or noise (incompressible).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "torture.h"

#define STAMP_MAGIC	0x7e000000u
#define SAME_MAGIC	0x5a3e000000000000ull

uint64_t rng_next(struct rng *rng)
{
	/* splitmix64: Steele, Lea, Flood, OOPSLA 2014 */
	uint64_t z = (rng->state += 0x9e3779b97f4a7c15ull);

	z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
	z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
	return z ^ (z >> 31);
}

uint64_t rng_below(struct rng *rng, uint64_t n)
{
	return n ? rng_next(rng) % n : 0;
}

bool rng_chance(struct rng *rng, unsigned int percent)
{
	return rng_below(rng, 100) < percent;
}

uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

unsigned int owner_of(const struct worker *w, const struct file *f)
{
	return w->id << 12 | f->id;
}

enum kind { STAMP, SAME, NOISE };

static enum kind kind_of(uint32_t version)
{
	uint32_t h = version * 2654435761u >> 24;

	return h < 16 ? NOISE : h < 40 ? SAME : STAMP;
}

static void make_cell(uint8_t *cell, uint64_t index, unsigned int owner, uint32_t version)
{
	uint32_t head[2] = { STAMP_MAGIC | (owner & 0xffffff), version };
	uint64_t words[2];
	struct rng rng;

	switch (kind_of(version)) {
	case STAMP:
		memcpy(cell, head, 8);
		memcpy(cell + 8, &index, 8);
		return;
	case SAME:
		words[0] = words[1] = SAME_MAGIC | version;
		break;
	case NOISE:
		rng.state = (uint64_t)owner << 40 ^ (uint64_t)version << 20 ^ index * 0x9e37ull;
		words[0] = rng_next(&rng);
		words[1] = rng_next(&rng);
		break;
	}
	memcpy(cell, words, CELL);
}

/*
 * Fills a buffer with the bytes that a file has at a position if a version was written there. The
 * position and the length need no alignment.
 */
void fill(uint8_t *to, uint64_t position, size_t length, unsigned int owner, uint32_t version)
{
	uint8_t cell[CELL];

	while (length) {
		size_t skip = position % CELL;
		size_t part = CELL - skip < length ? CELL - skip : length;

		make_cell(cell, position / CELL, owner, version);
		memcpy(to, cell + skip, part);
		to += part;
		position += part;
		length -= part;
	}
}

static bool all_zero(const uint8_t *p, size_t n)
{
	while (n--)
		if (*p++)
			return false;
	return true;
}

/*
 * Writes a description of a cell, for a report, to the buffer `text` of `room` bytes. The cell was
 * found at `position` of the file, a multiple of CELL.
 */
void describe(char *text, size_t room, const uint8_t *cell, uint64_t position, uint64_t version_max)
{
	uint32_t head[2];
	uint64_t index, word;

	memcpy(head, cell, 8);
	memcpy(&word, cell, 8);
	memcpy(&index, cell + 8, 8);
	if (all_zero(cell, CELL))
		snprintf(text, room, "zeroes");
	else if ((head[0] & 0xff000000u) == STAMP_MAGIC)
		snprintf(text, room, "worker %u file %u version %u written at offset %" PRIu64,
			 head[0] >> 12 & 0xfff, head[0] & 0xfff, head[1], index * CELL);
	else if ((word & 0xffff000000000000ull) == SAME_MAGIC)
		snprintf(text, room, "same-filled, version %" PRIu64, word & 0xffffffff);
	else
		snprintf(text, room, "noise or mixed: %016" PRIx64 "%016" PRIx64
			 " (cell %" PRIu64 ", versions up to %" PRIu64 ")",
			 word, index, position / CELL, version_max);
}

void record(struct worker *w, struct file *f, uint64_t offset, uint64_t length, const char *note)
{
	struct op_record *r = &f->history[f->nr_history++ % HISTORY];

	*r = (struct op_record){ w->op, w->op_name, offset, length, note };
	if (w->opt->replay && w->opt->replay_worker == w->id && w->opt->replay_file == f->id) {
		printf("replay: op %" PRIu64 " %s offset=%" PRIu64 " length=%" PRIu64 " size=%zu %s\n",
		       w->op, w->op_name, offset, length, f->size, note ? note : "");
		fflush(stdout);
	}
}

static void begin_report(struct shared *shared)
{
	/* Only the first failed process reports. Others wait here until the parent kills them. */
	while (__atomic_exchange_n(&shared->report_lock, 1, __ATOMIC_ACQ_REL))
		sleep(1);
	fflush(stdout);
}

static void report_history(struct worker *w, struct file *f)
{
	unsigned int first = f->nr_history > HISTORY ? f->nr_history - HISTORY : 0;

	printf("last operations on worker %u file %u (%s), size %zu:\n", w->id, f->id, f->name,
	       f->size);
	for (unsigned int i = first; i < f->nr_history; i++) {
		struct op_record *r = &f->history[i % HISTORY];

		printf("  op %" PRIu64 " %s offset=%" PRIu64 " length=%" PRIu64 " %s\n", r->op,
		       r->name, r->offset, r->length, r->note ? r->note : "");
	}
	printf("replay with: --seed=%" PRIu64 " --ops=%" PRIu64 " --files=%u --jobs=%u "
	       "--size-max=%zu --rounds=%u --replay=%u:%u\n", w->opt->seed, w->opt->ops,
	       w->opt->files, w->opt->jobs, w->opt->size_max, w->opt->rounds, w->id, f->id);
	fflush(stdout);
}

/* Prints the operation and a text, before the only report of this run. */
static void report(struct worker *w, const char *what, const char *format, va_list args)
{
	begin_report(w->shared);
	printf("TORTURE %s seed=%" PRIu64 " op=%" PRIu64 " (%s) worker=%u: ", what, w->opt->seed,
	       w->op, w->op_name, w->id);
	vprintf(format, args);
}

void fail(struct worker *w, struct file *f, const char *format, ...)
{
	int error = errno;
	va_list args;

	va_start(args, format);
	report(w, "ERROR", format, args);
	va_end(args);
	printf(": %s\n", strerror(error));
	if (f)
		report_history(w, f);
	fflush(stdout);
	_exit(2);
}

void wrong_byte(struct worker *w, struct file *f, const char *format, ...)
{
	va_list args;

	va_start(args, format);
	report(w, "MISMATCH", format, args);
	va_end(args);
	printf("\n");
	report_history(w, f);
	fflush(stdout);
	_exit(1);
}

/* Reads a page from the disk. Returns a text that says whether the disk is wrong as well. */
static const char *disk_says(struct worker *w, struct file *f, uint64_t page)
{
	size_t want = f->size - page < PAGE ? f->size - page : PAGE;
	char path[256];
	int fd;

	file_path(w, f, path, sizeof(path));
	fd = open(path, O_RDONLY | O_DIRECT);
	if (fd < 0 || pread(fd, w->buffer2, PAGE, page) < (ssize_t)want)
		return "unreadable";
	close(fd);
	return memcmp(w->buffer2, f->model + page, want) ? "also wrong" : "as expected";
}

void verify(struct worker *w, struct file *f, const uint8_t *found, uint64_t offset,
	    size_t length, const char *how)
{
	uint64_t bad, cell;
	size_t wrong_pages = 0;
	char expected_text[160], found_text[160];
	uint8_t window[CELL] = { 0 }, want[CELL] = { 0 };

	w->shared->reads[w->id]++;
	w->shared->bytes_checked[w->id] += length;
	if (!memcmp(found, f->model + offset, length))
		return;

	for (bad = offset; found[bad - offset] == f->model[bad]; bad++)
		;
	for (uint64_t p = bad & -PAGE; p < offset + length; p += PAGE) {
		uint64_t a = p < offset ? offset : p;
		uint64_t b = p + PAGE < offset + length ? p + PAGE : offset + length;

		wrong_pages += memcmp(found + (a - offset), f->model + a, b - a) != 0;
	}
	cell = bad / CELL * CELL;
	for (unsigned int i = 0; i < CELL; i++) {
		if (cell + i >= offset && cell + i < offset + length) {
			window[i] = found[cell + i - offset];
			want[i] = f->model[cell + i];
		}
	}
	describe(expected_text, sizeof(expected_text), want, cell, w->op);
	describe(found_text, sizeof(found_text), window, cell, w->op);

	begin_report(w->shared);
	printf("TORTURE MISMATCH seed=%" PRIu64 " op=%" PRIu64 " (%s) worker=%u file=%u (%s) "
	       "offset=%" PRIu64 " (page %" PRIu64 " + %" PRIu64 ") read %s of %" PRIu64 "+%zu, "
	       "%zu pages wrong\n", w->opt->seed, w->op, w->op_name, w->id, f->id, f->name, bad,
	       bad / PAGE, bad % PAGE, how, offset, length, wrong_pages);
	printf("  expected: %s\n  found:    %s\n  disk:     %s\n", expected_text, found_text,
	       disk_says(w, f, bad & -PAGE));
	report_history(w, f);
	_exit(1);
}
