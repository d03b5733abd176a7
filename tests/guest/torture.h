/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * torture: random file operations, checked against a model, in a guest whose page cache is backed
 * by a second cache that must never return an old byte.
 *
 * Each worker has a directory of files and keeps the expected contents of each file (the model) in
 * its own anonymous memory. All choices depend on the seed and none on a result, so a run can be
 * replayed. The bytes that an operation writes contain its number, so a report about old bytes
 * names the operation that wrote them.
 */
#ifndef TORTURE_H
#define TORTURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define PAGE		4096UL
#define HISTORY		20	/* number of last operations on a file that a report lists */
#define FILES_MAX	256
#define JOBS_MAX	32
#define CELL		16	/* size of a stamp in bytes; see torture_model.c */
#define OPS_MAX		64	/* maximum number of kinds of operations */
#define ZERO_BLOCK	1024	/* smallest block size of the file systems under test */

#ifndef RWF_DONTCACHE
#define RWF_DONTCACHE	0x80	/* since 6.14; some headers of libc lack it */
#endif

struct rng {
	uint64_t state;
};

struct op_record {
	uint64_t op;
	const char *name;
	uint64_t offset, length;
	const char *note;
};

struct file {
	unsigned int id;
	char name[24];
	size_t limit;		/* largest size of the file */
	uint8_t *model;		/* `limit` bytes, which are zero from `size` on */
	size_t size;
	int fd;
	int direct_fd;		/* file descriptor; -1 until needed */
	uint8_t *map;		/* mapping of `limit` bytes, kept until reopened; or NULL */
	struct op_record history[HISTORY];
	unsigned int nr_history;
};

/* Shared by all processes of a run. */
struct shared {
	uint32_t report_lock;		/* taken by the first process that fails; only it reports */
	uint32_t pressure_lock;
	uint32_t evictor_pause, evictor_paused;
	uint64_t ops[JOBS_MAX];
	uint64_t reads[JOBS_MAX], bytes_checked[JOBS_MAX];
	uint64_t longest_read_ns[JOBS_MAX], longest_read_op[JOBS_MAX];
	/* Number of skipped operations of each kind: not supported here, or not possible. */
	uint64_t skipped[OPS_MAX];
	uint64_t evictions;
};

struct options {
	uint64_t seed, ops;
	unsigned int files, jobs, rounds;
	size_t size_max;
	const char *dir;		/* directory on the file system under test */
	const char *device, *fstype, *mount_options;	/* needed to unmount and mount DIR */
	const char *mode;		/* "model", "versions", or a scenario's name */
	bool evictor;
	bool direct_reclaim;
	bool replay;
	unsigned int replay_worker, replay_file;
	unsigned int readers, writers;
	unsigned int direct_readers;	/* number of readers that read from the disk only */
	bool mixed;
	bool disabled[OPS_MAX];
	bool zero_is_wrong;		/* result of zero_range_is_wrong() for this kernel */
};

struct worker {
	unsigned int id;
	struct rng rng;
	const struct options *opt;
	struct shared *shared;
	char dir[200];
	struct file *files;
	/* number of the current operation, which is also the version that it writes */
	uint64_t op;
	const char *op_name;
	/* page-aligned buffers of size_max bytes plus two pages each */
	uint8_t *buffer, *buffer2;
	bool swap_on, swap_checked;
};

/* torture_model.c */
uint64_t rng_next(struct rng *rng);
uint64_t rng_below(struct rng *rng, uint64_t n);
bool rng_chance(struct rng *rng, unsigned int percent);
void fill(uint8_t *to, uint64_t position, size_t length, unsigned int owner, uint32_t version);
void describe(char *text, size_t room, const uint8_t *cell, uint64_t position,
	      uint64_t version_max);
void record(struct worker *w, struct file *f, uint64_t offset, uint64_t length, const char *note);
void verify(struct worker *w, struct file *f, const uint8_t *found, uint64_t offset,
	    size_t length, const char *how);
void fail(struct worker *w, struct file *f, const char *format, ...)
	__attribute__((noreturn, format(printf, 3, 4)));
/* Reports a wrong byte that verify() does not find, and ends the run. */
void wrong_byte(struct worker *w, struct file *f, const char *format, ...)
	__attribute__((noreturn, format(printf, 3, 4)));
unsigned int owner_of(const struct worker *w, const struct file *f);
uint64_t now_ns(void);

/* torture_ops.c */
int ops_find(const char *name);
const char *ops_name(int kind);
void worker_open(struct worker *w, bool fresh);
void worker_close(struct worker *w);
void worker_run(struct worker *w, uint64_t ops);
void worker_check_all(struct worker *w);

/* torture_file.c: operations on one file, which scenarios also use */
void file_open(struct worker *w, struct file *f, bool fresh);
void file_close(struct file *f);
void file_path(const struct worker *w, const struct file *f, char *path, size_t room);
int file_direct(struct worker *w, struct file *f);
void file_read(struct worker *w, struct file *f, uint64_t offset, size_t length);
void file_read_direct(struct worker *w, struct file *f, uint64_t offset, size_t length);
bool file_read_dontcache(struct worker *w, struct file *f, uint64_t offset, size_t length);
void file_scan(struct worker *w, struct file *f, size_t chunk);
void file_write(struct worker *w, struct file *f, uint64_t offset, size_t length);
void file_write_direct(struct worker *w, struct file *f, uint64_t offset, size_t length);
bool file_write_dontcache(struct worker *w, struct file *f, uint64_t offset, size_t length);
void file_truncate(struct worker *w, struct file *f, size_t size);
bool file_fallocate(struct worker *w, struct file *f, int mode, uint64_t offset, size_t length);
bool file_move_ext(struct worker *w, struct file *from, struct file *donor, uint64_t from_page,
		   uint64_t donor_page, uint64_t pages);
bool file_exchange(struct worker *w, struct file *f, struct file *g, uint64_t page, uint64_t pages);
bool file_evict_inode(struct worker *w, struct file *f);
void model_resize(struct file *f, size_t size);
size_t resident_pages(int fd, size_t size);

/* torture_env.c */
bool write_text(const char *path, const char *text);
void drop_caches(int what);
void empty_lru_lists(void);
void settle(void);
void evict(struct worker *w, int what);
void pressure(struct shared *shared, struct rng *rng);
bool memcg_init(void);
bool memcg_reclaim(uint64_t bytes);
bool zero_range_is_wrong(const char *dir);
void swap_toggle(struct worker *w);
void swap_off(struct worker *w);
void evictor_run(const struct options *opt, struct shared *shared)
	__attribute__((noreturn));
uint64_t driver_stat(const char *name);
int remount(const struct options *opt);
void unmount_and_mount(const struct options *opt);
void unmount(const struct options *opt);
void mount_again(const struct options *opt);

/* torture_versions.c */
int versions_run(const struct options *opt, struct shared *shared);

/* torture_scenarios.c */
int scenario_run(const struct options *opt, struct shared *shared);
void scenario_list(void);

#endif
