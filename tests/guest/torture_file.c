// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Operations on one file. Each operation changes the file and the model of its contents.
 *
 * Bytes of the model from size to limit are always zero. So growing a file needs no work in the
 * model, and holes read as the model says.
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
#include <sys/uio.h>
#include <unistd.h>

#include "torture.h"

/* Size in bytes of the largest allocation clusters of the file systems under test. */
#define CLUSTER_MAX 16384

/* From fs/ext4/ext4.h; no header for user space has it. */
struct move_extent {
	uint32_t reserved;
	uint32_t donor_fd;
	/* all in blocks of the file system */
	uint64_t orig_start, donor_start, len, moved_len;
};
#define EXT4_IOC_MOVE_EXT _IOWR('f', 15, struct move_extent)

/* From fs/xfs/libxfs/xfs_fs.h since 6.10. */
struct exchange_range {
	int32_t file1_fd;
	uint32_t pad;
	uint64_t file1_offset, file2_offset, length, flags;
};
#define XFS_IOC_EXCHANGE_RANGE _IOW('X', 129, struct exchange_range)

void file_path(const struct worker *w, const struct file *f, char *path, size_t room)
{
	snprintf(path, room, "%s/%s", w->dir, f->name);
}

void model_resize(struct file *f, size_t size)
{
	if (size < f->size)
		memset(f->model + size, 0, f->size - size);
	f->size = size;
}

void file_open(struct worker *w, struct file *f, bool fresh)
{
	char path[256];

	file_path(w, f, path, sizeof(path));
	if (fresh)
		unlink(path);
	f->fd = open(path, O_RDWR | (fresh ? O_CREAT | O_EXCL : 0), 0600);
	if (f->fd < 0)
		fail(w, f, "open %s", path);
	f->direct_fd = -1;
	if (fresh)
		model_resize(f, 0);
}

void file_close(struct file *f)
{
	if (f->map)
		munmap(f->map, f->limit);
	f->map = NULL;
	if (f->direct_fd >= 0)
		close(f->direct_fd);
	f->direct_fd = -1;
	if (f->fd >= 0)
		close(f->fd);
	f->fd = -1;
}

int file_direct(struct worker *w, struct file *f)
{
	char path[256];

	if (f->direct_fd < 0) {
		file_path(w, f, path, sizeof(path));
		f->direct_fd = open(path, O_RDWR | O_DIRECT);
		if (f->direct_fd < 0)
			fail(w, f, "open O_DIRECT %s", path);
	}
	return f->direct_fd;
}

/*
 * Reads a range and compares it with the model. If the kernel does not know the flags, reads
 * without them and returns false.
 */
static bool timed_read(struct worker *w, struct file *f, int fd, uint64_t offset, size_t length,
		       int flags, const char *how)
{
	struct iovec vector = { w->buffer, length };
	size_t want = offset >= f->size ? 0 : f->size - offset;
	bool known = true;
	uint64_t start = now_ns(), took;
	ssize_t got;

	if (want > length)
		want = length;
	got = preadv2(fd, &vector, 1, offset, flags);
	if (got < 0 && flags && errno == EOPNOTSUPP) {
		known = false;
		got = preadv2(fd, &vector, 1, offset, 0);
	}
	took = now_ns() - start;
	if (got < 0)
		fail(w, f, "%s at %lu+%zu", how, offset, length);
	if ((size_t)got != want)
		fail(w, f, "%s at %lu+%zu returned %zd bytes, not %zu", how, offset, length, got,
		     want);
	if (took > w->shared->longest_read_ns[w->id]) {
		w->shared->longest_read_ns[w->id] = took;
		w->shared->longest_read_op[w->id] = w->op;
	}
	verify(w, f, w->buffer, offset, want, how);
	return known;
}

void file_read(struct worker *w, struct file *f, uint64_t offset, size_t length)
{
	timed_read(w, f, f->fd, offset, length, 0, "buffered");
}

void file_read_direct(struct worker *w, struct file *f, uint64_t offset, size_t length)
{
	timed_read(w, f, file_direct(w, f), offset, length, 0, "direct");
}

/* Reads with RWF_DONTCACHE: pages that it brings into the page cache are dropped after the copy. */
bool file_read_dontcache(struct worker *w, struct file *f, uint64_t offset, size_t length)
{
	return timed_read(w, f, f->fd, offset, length, RWF_DONTCACHE, "uncached");
}

/* Reads the whole file in chunks, so that readahead works. */
void file_scan(struct worker *w, struct file *f, size_t chunk)
{
	for (uint64_t at = 0; at < f->size; at += chunk)
		file_read(w, f, at, chunk);
}

/* Writes a range. If the kernel does not know the flags, writes without them and returns false. */
static bool write_all(struct worker *w, struct file *f, int fd, uint64_t offset, size_t length,
		      int flags)
{
	bool known = true;

	fill(w->buffer, offset, length, owner_of(w, f), w->op);
	for (size_t done = 0; done < length;) {
		struct iovec vector = { w->buffer + done, length - done };
		ssize_t got = pwritev2(fd, &vector, 1, offset + done, flags);

		if (got < 0 && flags && errno == EOPNOTSUPP) {
			known = false;
			flags = 0;
			continue;
		}
		if (got <= 0)
			fail(w, f, "write at %lu+%zu", offset, length);
		done += got;
	}
	memcpy(f->model + offset, w->buffer, length);
	if (offset + length > f->size)
		f->size = offset + length;
	return known;
}

void file_write(struct worker *w, struct file *f, uint64_t offset, size_t length)
{
	write_all(w, f, f->fd, offset, length, 0);
}

void file_write_direct(struct worker *w, struct file *f, uint64_t offset, size_t length)
{
	write_all(w, f, file_direct(w, f), offset, length, 0);
}

/*
 * Writes with RWF_DONTCACHE: pages that it brings into the page cache are dropped after writeback.
 */
bool file_write_dontcache(struct worker *w, struct file *f, uint64_t offset, size_t length)
{
	return write_all(w, f, f->fd, offset, length, RWF_DONTCACHE);
}

void file_truncate(struct worker *w, struct file *f, size_t size)
{
	if (ftruncate(f->fd, size))
		fail(w, f, "truncate to %zu", size);
	model_resize(f, size);
}

/*
 * Calls fallocate() for a range of the file. Returns false if the file system does not support the
 * mode, or does not support it for this range.
 */
bool file_fallocate(struct worker *w, struct file *f, int mode, uint64_t offset, size_t length)
{
	if (fallocate(f->fd, mode, offset, length)) {
		if (errno == EOPNOTSUPP)
			return false;
		/*
		 * If blocks are allocated in clusters, only whole clusters can be inserted or
		 * removed.
		 */
		if (errno == EINVAL && (offset | length) % CLUSTER_MAX &&
		    mode & (FALLOC_FL_COLLAPSE_RANGE | FALLOC_FL_INSERT_RANGE))
			return false;
		fail(w, f, "fallocate mode %#x at %lu+%zu, size %zu", mode, offset, length,
		     f->size);
	}
	if (mode & FALLOC_FL_COLLAPSE_RANGE) {
		memmove(f->model + offset, f->model + offset + length, f->size - offset - length);
		model_resize(f, f->size - length);
	} else if (mode & FALLOC_FL_INSERT_RANGE) {
		memmove(f->model + offset + length, f->model + offset, f->size - offset);
		memset(f->model + offset, 0, length);
		f->size += length;
	} else {
		if (mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE))
			memset(f->model + offset, 0, length);
		if (!(mode & FALLOC_FL_KEEP_SIZE) && offset + length > f->size)
			f->size = offset + length;
	}
	return true;
}

/*
 * Makes the kernel evict the inode with its pages, and opens the file again. A file whose DAX flag
 * is changed leaves the inode cache at its last close, together with its pages. The flag itself has
 * no effect on a disk without DAX.
 */
bool file_evict_inode(struct worker *w, struct file *f)
{
	int flags;
	bool done;

	if (ioctl(f->fd, FS_IOC_GETFLAGS, &flags))
		return false;
	flags ^= FS_DAX_FL;
	done = !ioctl(f->fd, FS_IOC_SETFLAGS, &flags);
	file_close(f);
	file_open(w, f, false);
	return done;
}

size_t resident_pages(int fd, size_t size)
{
	size_t pages = (size + PAGE - 1) / PAGE, resident = 0;
	unsigned char *state;
	void *map;

	if (!pages)
		return 0;
	state = malloc(pages);
	map = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
	if (!state || map == MAP_FAILED || mincore(map, size, state))
		resident = pages;	/* mincore() failed: assume that all pages are cached */
	else
		for (size_t i = 0; i < pages; i++)
			resident += state[i] & 1;
	if (map != MAP_FAILED)
		munmap(map, size);
	free(state);
	return resident;
}

/*
 * Exchanges the blocks of two ranges as e4defrag does. The data of "from" stays. The donor gets the
 * blocks that held this data, marked as unwritten, so it reads as zeroes. The result is defined
 * only if both files are written out and the donor has no cached page; the ioctl drops no cached
 * pages. Returns false and moves nothing if pages of the donor stay cached, or if the file system has
 * no blocks of its own (overlayfs).
 */
bool file_move_ext(struct worker *w, struct file *from, struct file *donor, uint64_t from_page,
		   uint64_t donor_page, uint64_t pages)
{
	struct move_extent move = { .donor_fd = donor->fd };
	int failed, block;

	if (ioctl(from->fd, FIGETBSZ, &block)) {
		if (errno == EINVAL)
			return false;
		fail(w, from, "FIGETBSZ");
	}
	move.orig_start = from_page * PAGE / block;
	move.donor_start = donor_page * PAGE / block;
	move.len = pages * PAGE / block;
	file_write(w, from, from_page * PAGE, pages * PAGE);
	file_write(w, donor, donor_page * PAGE, pages * PAGE);
	if (fsync(from->fd) || fsync(donor->fd))
		fail(w, from, "fsync before moving extents");
	if (donor->map) {
		munmap(donor->map, donor->limit);
		donor->map = NULL;
	}
	drop_caches(1);
	if (resident_pages(donor->fd, donor->size))
		return false;
	failed = ioctl(from->fd, EXT4_IOC_MOVE_EXT, &move);
	if (failed && errno != ENOTTY && errno != EOPNOTSUPP && errno != EBUSY)
		fail(w, from, "EXT4_IOC_MOVE_EXT");
	/* The ioctl stops at a busy page and may have moved some pages (Linux 7.2, no journal). */
	memset(donor->model + donor_page * PAGE, 0, move.moved_len * block);
	return !failed || move.moved_len;
}

/*
 * Exchanges a range of two files, which both files must have at the same position. Returns false
 * and does nothing if the file system does not support the exchange.
 */
bool file_exchange(struct worker *w, struct file *f, struct file *g, uint64_t page, uint64_t pages)
{
	struct exchange_range range = {
		.file1_fd = g->fd, .file1_offset = page * PAGE, .file2_offset = page * PAGE,
		.length = pages * PAGE,
	};
	uint8_t *other;

	if ((page + pages) * PAGE > f->size || (page + pages) * PAGE > g->size)
		return false;
	if (ioctl(f->fd, XFS_IOC_EXCHANGE_RANGE, &range)) {
		if (errno == ENOTTY || errno == EOPNOTSUPP)
			return false;
		fail(w, f, "XFS_IOC_EXCHANGE_RANGE");
	}
	other = malloc(pages * PAGE);
	if (!other)
		fail(w, f, "malloc");
	memcpy(other, f->model + page * PAGE, pages * PAGE);
	memcpy(f->model + page * PAGE, g->model + page * PAGE, pages * PAGE);
	memcpy(g->model + page * PAGE, other, pages * PAGE);
	free(other);
	return true;
}
