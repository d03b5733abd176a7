// SPDX-License-Identifier: Apache-2.0 OR MIT
/*
 * Creates files that must not be cached, and makes other system calls that tests need:
 *
 * - special encrypt DIR: makes the file system encrypt files that are created in DIR from now on
 * - special verity FILE: enables fs-verity for FILE
 * - special journal FILE: makes data of FILE go through the journal from now on
 * - special quotafile FILE: makes an empty quota file of users, padded to QUOTA_BYTES
 * - special quotaon|quotaoff DIR FILE: switches user quotas of the file system at DIR
 * - special loop-direct DEVICE: makes a loop device bypass the page cache of the file below it
 * - special map FILE: copies FILE to standard output, through a mapping and page by page
 * - special same FILE: compares cached and direct reads, and ends with status 1 if they differ
 * - special move-ext FILE DONOR: exchanges the blocks of two ext4 files of the same size
 * - special advise FILE BYTES: repeatedly advises that the first BYTES are not needed
 * - special dontneed FILE: advises once that FILE is not needed
 * - special punch FILE OFFSET BYTES: punches a hole
 * - special scatter FILE: makes a file whose extents just fit its inode on ext4
 * - special fill DIR: allocates all free blocks of the file system
 * - special zero FILE OFFSET BYTES: zeroes a range by fallocate(), and prints "failed: " and the
 *   error if that fails
 * - special swap-out BYTES: writes to memory of this size and makes the kernel swap it out
 * - special drain: empties the kernel's per-CPU lists of pages and buffers, so that no page has a
 *   reference from such a list
 * - special block FILE PAGE: prints the file system's block of a page, counted in pages
 * - special damage FILE PAGE: simulates a memory error in a page of the page cache, while the
 *   program has a reference to its folio
 * - special feature DIR BITS: adds incompatible features to the mounted ext4 at DIR (Linux 6.18)
 * - special place FILE OFFSET: prints the place on the disk, in bytes, of the block with this byte
 * - special pieces DEVICE OFFSET BYTES PIECE: zeroes a range of a disk by a direct write from pieces of this
 *   size, or prints "failed: " and the error
 * - special zeroout DEVICE OFFSET BYTES: zeroes a range of a disk without sending it zeroes
 * - special scsi DEVICE OFFSET: zeroes a page of a disk by a SCSI command of SG_IO
 * - special from-map FILE SOURCE: writes a file directly, from a mapping of a file of its size
 * - special clone FILE SOURCE: makes FILE share the blocks of SOURCE
 * - special dax FILE on|off: selects for an ext4 whether FILE, when it is opened next, bypasses the
 *   page cache
 * - special store FILE: zeroes a file through a mapping, and writes it back
 * - special btrfs-add|btrfs-remove DIR DEVICE: adds a device to the btrfs at DIR, or moves all data
 *   away from the device and removes it
 * - special cached FILE PAGE: ends with status 0 if the page is in the page cache, otherwise with 1
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/btrfs.h>
#include <linux/fs.h>
#include <linux/fiemap.h>
#include <linux/fscrypt.h>
#include <linux/fsverity.h>
#include <linux/loop.h>
#include <scsi/sg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/quota.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE		4096UL
/* From include/uapi/linux/ext4.h of Linux 6.18. */
#define IOC_SET_TUNE_SB_PARAM	_IOW('f', 46, struct tune_sb_params)
#define TUNE_EDIT_FEATURES	0x4000
#define QFMT_VFS_V0	2	/* include/uapi/linux/quota.h */
/* Number of extents that scatter() makes, as many as an ext4 inode has, and their size in bytes. */
#define SCATTERED	4
#define SCATTERED_BYTES	(128UL << 10)
#define SCATTER_STEP	(1L << 20)	/* distance between two extents in the file, in bytes */
#define SCATTER_TRIES	50		/* attempts to get extents that ext4 does not divide */
/* Numbers of files and of rounds with which fill() allocates the last, scattered blocks. */
#define FILL_FILES	1000
#define FILL_ROUNDS	4
#define FILL_BYTES	(64L << 20)	/* first allocation that fill() tries */
#define SCSI_BLOCK	512UL
#define SCSI_TIMEOUT_MS	20000
/* Size of the quota file. The kernel uses only its first part. */
#define QUOTA_BYTES	(16 * PAGE)

static int fail(const char *what)
{
	perror(what);
	return 2;
}

static int encrypt(const char *dir)
{
	struct {
		struct fscrypt_add_key_arg arg;
		uint8_t raw[64];
	} key = {
		.arg.key_spec.type = FSCRYPT_KEY_SPEC_TYPE_IDENTIFIER,
		.arg.raw_size = sizeof(key.raw),
	};
	struct fscrypt_policy_v2 policy = {
		.version = FSCRYPT_POLICY_V2,
		.contents_encryption_mode = FSCRYPT_MODE_AES_256_XTS,
		.filenames_encryption_mode = FSCRYPT_MODE_AES_256_CTS,
		.flags = FSCRYPT_POLICY_FLAGS_PAD_32,
	};
	int fd = open(dir, O_RDONLY | O_DIRECTORY);

	for (unsigned int i = 0; i < sizeof(key.raw); i++)
		key.arg.raw[i] = i * 37 + 1;
	if (fd < 0 || ioctl(fd, FS_IOC_ADD_ENCRYPTION_KEY, &key))
		return fail("FS_IOC_ADD_ENCRYPTION_KEY");
	memcpy(policy.master_key_identifier, key.arg.key_spec.u.identifier,
	       sizeof(policy.master_key_identifier));
	if (ioctl(fd, FS_IOC_SET_ENCRYPTION_POLICY, &policy))
		return fail("FS_IOC_SET_ENCRYPTION_POLICY");
	return 0;
}

static int verity(const char *path)
{
	struct fsverity_enable_arg arg = {
		.version = 1, .hash_algorithm = FS_VERITY_HASH_ALG_SHA256, .block_size = PAGE,
	};
	int fd = open(path, O_RDONLY);

	if (fd < 0 || ioctl(fd, FS_IOC_ENABLE_VERITY, &arg))
		return fail("FS_IOC_ENABLE_VERITY");
	return 0;
}

static int btrfs_device(const char *dir, const char *device, bool add)
{
	struct btrfs_ioctl_vol_args arg = { 0 };
	int fd = open(dir, O_RDONLY | O_DIRECTORY);

	snprintf(arg.name, sizeof(arg.name), "%s", device);
	if (fd < 0 || ioctl(fd, add ? BTRFS_IOC_ADD_DEV : BTRFS_IOC_RM_DEV, &arg))
		return fail(device);
	return 0;
}

static int journal(const char *path)
{
	int fd = open(path, O_RDONLY), flags;

	if (fd < 0 || ioctl(fd, FS_IOC_GETFLAGS, &flags))
		return fail("FS_IOC_GETFLAGS");
	flags |= FS_JOURNAL_DATA_FL;
	if (ioctl(fd, FS_IOC_SETFLAGS, &flags))
		return fail("FS_IOC_SETFLAGS");
	return 0;
}

/*
 * Writes a quota file of format 2, revision 0: header, information, empty root in block 1 of 1 KiB.
 */
static int quota_file(const char *path)
{
	uint32_t head[] = { 0xd9c01f11, 0, 604800, 604800, 0, 2, 0, 0 };
	uint8_t *content = calloc(1, QUOTA_BYTES);
	int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0600);

	if (!content || fd < 0)
		return fail(path);
	memcpy(content, head, sizeof(head));
	if (write(fd, content, QUOTA_BYTES) != (ssize_t)QUOTA_BYTES || fsync(fd))
		return fail(path);
	return 0;
}

static int quota(const char *dir, int command, char *path)
{
	int fd = open(dir, O_RDONLY | O_DIRECTORY);

	if (fd < 0 || syscall(SYS_quotactl_fd, fd, QCMD(command, USRQUOTA), QFMT_VFS_V0, path)) {
		/*
		 * quotactl() names the device instead of the directory. In the tests, the file
		 * system with quotas is always on /dev/vda.
		 */
		if (quotactl(QCMD(command, USRQUOTA), "/dev/vda", QFMT_VFS_V0, path))
			return fail("quotactl");
	}
	return 0;
}

static int loop_direct(const char *path)
{
	int fd = open(path, O_RDWR);

	if (fd < 0 || ioctl(fd, LOOP_SET_DIRECT_IO, 1UL))
		return fail("LOOP_SET_DIRECT_IO");
	return 0;
}

static int map(const char *path)
{
	int fd = open(path, O_RDONLY);
	uint8_t buffer[PAGE], *where;
	struct stat st;

	if (fd < 0 || fstat(fd, &st))
		return fail(path);
	where = mmap(NULL, st.st_size, PROT_READ, MAP_SHARED, fd, 0);
	if (where == MAP_FAILED || madvise(where, st.st_size, MADV_RANDOM))
		return fail("mmap");
	for (off_t at = 0; at < st.st_size; at += PAGE) {
		size_t left = st.st_size - at, length = left < PAGE ? left : PAGE;

		memcpy(buffer, where + at, length);
		if (fwrite(buffer, 1, length, stdout) != length)
			return fail("write");
	}
	return fflush(stdout) ? fail("write") : 0;
}

static int same(const char *path)
{
	int cached = open(path, O_RDONLY), direct = open(path, O_RDONLY | O_DIRECT);
	uint8_t *a = aligned_alloc(PAGE, PAGE), *b = aligned_alloc(PAGE, PAGE);
	ssize_t got;

	if (cached < 0 || direct < 0 || !a || !b)
		return fail(path);
	for (off_t at = 0; (got = pread(cached, a, PAGE, at)) > 0; at += PAGE) {
		if (pread(direct, b, PAGE, at) != got)
			return fail("direct read");
		if (memcmp(a, b, got)) {
			printf("MISMATCH %s: page %ld\n", path, at / (long)PAGE);
			return 1;
		}
	}
	return got ? fail("read") : 0;
}

static int scatter(const char *path)
{
	uint8_t *content = aligned_alloc(PAGE, SCATTERED_BYTES);
	struct fiemap map;

	if (!content)
		return fail("memory");
	memset(content, 'A', SCATTERED_BYTES);
	for (int attempt = 0; attempt < SCATTER_TRIES; attempt++) {
		int fd = open(path, O_CREAT | O_TRUNC | O_RDWR, 0600);

		for (int i = 0; i < SCATTERED; i++)
			if (fd < 0 || pwrite(fd, content, SCATTERED_BYTES, i * SCATTER_STEP) !=
				      (ssize_t)SCATTERED_BYTES || fsync(fd))
				return fail(path);
		map = (struct fiemap){ .fm_length = ~0ULL, .fm_flags = FIEMAP_FLAG_SYNC };
		if (ioctl(fd, FS_IOC_FIEMAP, &map) || close(fd))
			return fail("FS_IOC_FIEMAP");
		if (map.fm_mapped_extents == SCATTERED)
			return 0;
	}
	fputs("the file system divides the extents\n", stderr);
	return 2;
}

static int fill(const char *dir)
{
	char path[256];
	int block, fd;
	off_t at = 0;

	snprintf(path, sizeof(path), "%s/fill", dir);
	fd = open(path, O_CREAT | O_WRONLY, 0600);
	if (fd < 0 || ioctl(fd, FIGETBSZ, &block))
		return fail(path);
	/* Freed blocks become available when the journal commits, so try several times. */
	for (int round = 0; round < FILL_ROUNDS; round++, sync())
		for (off_t bytes = FILL_BYTES; bytes >= block;) {
			if (!fallocate(fd, 0, at, bytes))
				at += bytes;
			else if (errno == ENOSPC)
				bytes /= 2;
			else
				return fail("fallocate");
		}
	/* If the blocks are too scattered for the extent tree of one file, use one file for each. */
	for (int i = 0; i < FILL_FILES; i++) {
		snprintf(path, sizeof(path), "%s/fill%d", dir, i);
		fd = open(path, O_CREAT | O_WRONLY, 0600);
		if (fd < 0 || fallocate(fd, 0, 0, block))
			break;
		close(fd);
	}
	sync();
	return 0;
}

static int zero(const char *path, off_t offset, off_t bytes)
{
	int fd = open(path, O_RDWR);

	if (fd < 0)
		return fail(path);
	if (fallocate(fd, FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, offset, bytes))
		printf("failed: %s\n", strerror(errno));
	return 0;
}

/* Argument of EXT4_IOC_MOVE_EXT, from fs/ext4/ext4.h. No uapi header has this structure. */
struct move_extent {
	uint32_t reserved;
	uint32_t donor_fd;
	uint64_t orig_start;
	uint64_t donor_start;
	uint64_t len;
	uint64_t moved_len;
};

#define EXT4_IOC_MOVE_EXT _IOWR('f', 15, struct move_extent)

static int move_ext(const char *path, const char *donor)
{
	int fd = open(path, O_RDWR);
	struct move_extent move = { .donor_fd = open(donor, O_RDWR) };
	struct stat st;

	if (fd < 0 || fstat(fd, &st))
		return fail(path);
	move.len = st.st_size / PAGE;
	if (ioctl(fd, EXT4_IOC_MOVE_EXT, &move) || move.moved_len != move.len)
		return fail("EXT4_IOC_MOVE_EXT");
	return 0;
}

static int advise(const char *path, off_t bytes)
{
	int fd = open(path, O_RDONLY), err;

	if (fd < 0)
		return fail(path);
	do {
		err = posix_fadvise(fd, 0, bytes, POSIX_FADV_DONTNEED);
	} while (!err);
	return fail("posix_fadvise");
}

static int dontneed(const char *path)
{
	int fd = open(path, O_RDONLY);

	if (fd < 0)
		return fail(path);
	return posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) ? fail("posix_fadvise") : 0;
}

static int punch(const char *path, off_t offset, off_t bytes)
{
	int fd = open(path, O_RDWR);

	if (fd < 0)
		return fail(path);
	if (fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, offset, bytes))
		return fail("fallocate");
	return 0;
}

/* The fields of struct ext4_tune_sb_params that add_features() needs, at their places. */
struct tune_sb_params {
	uint32_t set_flags;
	uint8_t other[76];
	uint32_t set_feature_incompat;
	uint8_t rest[148];
};

static int add_features(const char *dir, uint32_t bits)
{
	struct tune_sb_params params = {
		.set_flags = TUNE_EDIT_FEATURES,
		.set_feature_incompat = bits,
	};
	int fd = open(dir, O_RDONLY | O_DIRECTORY);

	if (fd < 0 || ioctl(fd, IOC_SET_TUNE_SB_PARAM, &params))
		return fail("EXT4_IOC_SET_TUNE_SB_PARAM");
	return 0;
}

static int swap_out(size_t bytes)
{
	uint8_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
			       -1, 0);

	if (memory == MAP_FAILED)
		return fail("mmap");
	for (size_t at = 0; at < bytes; at++)
		memory[at] = at * 7 + at / PAGE + 1;
	if (madvise(memory, bytes, MADV_PAGEOUT))
		return fail("MADV_PAGEOUT");
	return 0;
}

/*
 * Empties the kernel's per-CPU lists of new pages and of buffers. A list holds a reference to each
 * of its pages, so drop_caches cannot drop these pages, and only some kernels drain the lists
 * before they drop caches. migrate_pages() drains the lists of all processors first
 * (do_migrate_pages() in mm/mempolicy.c). The call here asks for a migration from node 0 to node 0,
 * which moves no page. Compaction would also drain the lists, but it waits for writeback.
 */
static int drain(void)
{
	unsigned long node = 1;

	if (syscall(SYS_migrate_pages, 0, 8 * sizeof(node), &node, &node) < 0)
		return fail("migrate_pages");
	return 0;
}

static int block(const char *path, int page)
{
	int fd = open(path, O_RDONLY), bytes, at;

	if (fd < 0 || ioctl(fd, FIGETBSZ, &bytes))
		return fail(path);
	at = page * (int)PAGE / bytes;
	if (ioctl(fd, FIBMAP, &at) || !at)
		return fail("FIBMAP");
	printf("%lu\n", (unsigned long)at * bytes / PAGE);
	return 0;
}

static int cached(const char *path, unsigned long page)
{
	int fd = open(path, O_RDONLY);
	unsigned char state;
	void *map;

	if (fd < 0)
		return fail(path);
	map = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, page * PAGE);
	if (map == MAP_FAILED || mincore(map, PAGE, &state))
		return fail("mincore");
	return !(state & 1);
}

static int place(const char *path, off_t offset)
{
	int fd = open(path, O_RDONLY), bytes, at;

	if (fd < 0 || ioctl(fd, FIGETBSZ, &bytes))
		return fail(path);
	at = offset / bytes;
	if (ioctl(fd, FIBMAP, &at) || !at)
		return fail("FIBMAP");
	printf("%lu\n", (unsigned long)at * bytes);
	return 0;
}

static int write_pieces(const char *device, off_t offset, size_t bytes, size_t piece)
{
	int fd = open(device, O_RDWR | O_DIRECT), nr = bytes / piece;
	struct iovec *pieces = calloc(nr, sizeof(*pieces));
	uint8_t *content = aligned_alloc(PAGE, bytes);

	if (fd < 0 || !pieces || !content)
		return fail(device);
	memset(content, 0, bytes);
	for (int i = 0; i < nr; i++)
		pieces[i] = (struct iovec){ content + i * piece, piece };
	if (pwritev(fd, pieces, nr, offset) != (ssize_t)bytes)
		printf("failed: %s\n", strerror(errno));
	return 0;
}

static int write_scsi(const char *device, uint64_t offset)
{
	uint32_t block = offset / SCSI_BLOCK, nr = PAGE / SCSI_BLOCK;
	uint8_t command[10] = {
		0x2a, 0, block >> 24, block >> 16, block >> 8, block, 0, nr >> 8, nr, 0,
	}, *content = aligned_alloc(PAGE, PAGE);
	struct sg_io_hdr header = {
		.interface_id = 'S',
		.dxfer_direction = SG_DXFER_TO_DEV,
		.cmd_len = sizeof(command),
		.cmdp = command,
		.dxfer_len = PAGE,
		.dxferp = content,
		.timeout = SCSI_TIMEOUT_MS,
	};
	int fd = open(device, O_RDWR);

	if (fd < 0 || !content)
		return fail(device);
	memset(content, 0, PAGE);
	if (ioctl(fd, SG_IO, &header) || header.status)
		return fail("SG_IO");
	return 0;
}

static int write_from_map(const char *path, const char *source)
{
	int to = open(path, O_WRONLY | O_DIRECT), from = open(source, O_RDONLY);
	struct stat st;
	void *map;

	if (to < 0 || from < 0 || fstat(from, &st))
		return fail(path);
	map = mmap(NULL, st.st_size, PROT_READ, MAP_SHARED, from, 0);
	if (map == MAP_FAILED || pwrite(to, map, st.st_size, 0) != st.st_size)
		return fail("write from a mapping");
	return 0;
}

static int zeroout(const char *device, uint64_t offset, uint64_t bytes)
{
	uint64_t range[2] = { offset, bytes };
	int fd = open(device, O_RDWR);

	if (fd < 0)
		return fail(device);
	if (ioctl(fd, BLKZEROOUT, range))
		return fail("BLKZEROOUT");
	return 0;
}

static int clone(const char *path, const char *source)
{
	int to = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0600), from = open(source, O_RDONLY);

	if (to < 0 || from < 0 || ioctl(to, FICLONE, from))
		return fail("FICLONE");
	return 0;
}

static int dax(const char *path, bool on)
{
	int fd = open(path, O_RDONLY);
	struct fsxattr attributes;

	if (fd < 0 || ioctl(fd, FS_IOC_FSGETXATTR, &attributes))
		return fail("FS_IOC_FSGETXATTR");
	attributes.fsx_xflags &= ~FS_XFLAG_DAX;
	if (on)
		attributes.fsx_xflags |= FS_XFLAG_DAX;
	if (ioctl(fd, FS_IOC_FSSETXATTR, &attributes))
		return fail("FS_IOC_FSSETXATTR");
	return 0;
}

static int store(const char *path)
{
	int fd = open(path, O_RDWR);
	struct stat st;
	void *map;

	if (fd < 0 || fstat(fd, &st))
		return fail(path);
	map = mmap(NULL, st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (map == MAP_FAILED)
		return fail("mmap");
	memset(map, 0, st.st_size);
	return msync(map, st.st_size, MS_SYNC) ? fail("msync") : 0;
}

static int damage(const char *path, unsigned long page)
{
	int fd = open(path, O_RDONLY), ends[2];
	struct iovec one = { .iov_len = PAGE };

	if (fd < 0 || pipe(ends))
		return fail(path);
	one.iov_base = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, fd, page * PAGE);
	if (one.iov_base == MAP_FAILED)
		return fail("mmap");
	if (vmsplice(ends[1], &one, 1, 0) != (ssize_t)PAGE)
		return fail("vmsplice");
	if (madvise(one.iov_base, PAGE, MADV_HWPOISON))
		return fail("MADV_HWPOISON");
	return 0;
}

int main(int argc, char **argv)
{
	if (argc == 3 && !strcmp(argv[1], "encrypt"))
		return encrypt(argv[2]);
	if (argc == 3 && !strcmp(argv[1], "verity"))
		return verity(argv[2]);
	if (argc == 3 && !strcmp(argv[1], "journal"))
		return journal(argv[2]);
	if (argc == 3 && !strcmp(argv[1], "quotafile"))
		return quota_file(argv[2]);
	if (argc == 4 && !strcmp(argv[1], "quotaon"))
		return quota(argv[2], Q_QUOTAON, argv[3]);
	if (argc == 4 && !strcmp(argv[1], "quotaoff"))
		return quota(argv[2], Q_QUOTAOFF, argv[3]);
	if (argc == 3 && !strcmp(argv[1], "loop-direct"))
		return loop_direct(argv[2]);
	if (argc == 3 && !strcmp(argv[1], "map"))
		return map(argv[2]);
	if (argc == 3 && !strcmp(argv[1], "same"))
		return same(argv[2]);
	if (argc == 4 && !strcmp(argv[1], "move-ext"))
		return move_ext(argv[2], argv[3]);
	if (argc == 4 && !strcmp(argv[1], "advise"))
		return advise(argv[2], strtol(argv[3], NULL, 0));
	if (argc == 3 && !strcmp(argv[1], "dontneed"))
		return dontneed(argv[2]);
	if (argc == 5 && !strcmp(argv[1], "punch"))
		return punch(argv[2], strtol(argv[3], NULL, 0), strtol(argv[4], NULL, 0));
	if (argc == 3 && !strcmp(argv[1], "scatter"))
		return scatter(argv[2]);
	if (argc == 3 && !strcmp(argv[1], "fill"))
		return fill(argv[2]);
	if (argc == 5 && !strcmp(argv[1], "zero"))
		return zero(argv[2], strtol(argv[3], NULL, 0), strtol(argv[4], NULL, 0));
	if (argc == 4 && !strcmp(argv[1], "feature"))
		return add_features(argv[2], strtoul(argv[3], NULL, 0));
	if (argc == 3 && !strcmp(argv[1], "swap-out"))
		return swap_out(strtoul(argv[2], NULL, 0));
	if (argc == 2 && !strcmp(argv[1], "drain"))
		return drain();
	if (argc == 4 && !strcmp(argv[1], "block"))
		return block(argv[2], atoi(argv[3]));
	if (argc == 4 && !strcmp(argv[1], "damage"))
		return damage(argv[2], strtoul(argv[3], NULL, 0));
	if (argc == 4 && !strcmp(argv[1], "place"))
		return place(argv[2], strtol(argv[3], NULL, 0));
	if (argc == 6 && !strcmp(argv[1], "pieces"))
		return write_pieces(argv[2], strtoll(argv[3], NULL, 0), strtoul(argv[4], NULL, 0),
				    strtoul(argv[5], NULL, 0));
	if (argc == 5 && !strcmp(argv[1], "zeroout"))
		return zeroout(argv[2], atoll(argv[3]), atoll(argv[4]));
	if (argc == 4 && !strcmp(argv[1], "scsi"))
		return write_scsi(argv[2], strtoull(argv[3], NULL, 0));
	if (argc == 4 && !strcmp(argv[1], "from-map"))
		return write_from_map(argv[2], argv[3]);
	if (argc == 4 && !strcmp(argv[1], "clone"))
		return clone(argv[2], argv[3]);
	if (argc == 4 && !strcmp(argv[1], "dax"))
		return dax(argv[2], !strcmp(argv[3], "on"));
	if (argc == 3 && !strcmp(argv[1], "store"))
		return store(argv[2]);
	if (argc == 4 && !strcmp(argv[1], "btrfs-add"))
		return btrfs_device(argv[2], argv[3], true);
	if (argc == 4 && !strcmp(argv[1], "btrfs-remove"))
		return btrfs_device(argv[2], argv[3], false);
	if (argc == 4 && !strcmp(argv[1], "cached"))
		return cached(argv[2], strtoul(argv[3], NULL, 0));
	fputs("usage: see the top of special.c\n", stderr);
	return 2;
}
