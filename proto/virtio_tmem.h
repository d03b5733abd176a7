/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * virtio-tmem: layout of the requests between a guest driver and a device.
 *
 * This header is the source of every size, offset and value of the device. A
 * test compares the Rust crate in src/ with it, field by field. SPEC.md has the
 * rules for requests. All fields are little-endian. After a release no value or
 * layout changes: extensions get a feature bit.
 */
#ifndef VIRTIO_TMEM_H
#define VIRTIO_TMEM_H

#include <linux/types.h>

/*
 * Device id. The number is experimental until one is assigned. It is the
 * highest id that fits a modern PCI device id (0x1040 + id <= 0x107f). This is
 * its only definition in C.
 */
#define VIRTIO_ID_TMEM				63

/* Reserved feature bits: not specified yet, never offered, never accepted. */
#define VIRTIO_TMEM_F_PERSISTENT		0	/* pools that must not lose pages */
#define VIRTIO_TMEM_F_SHARED			1	/* pools that several guests share */
#define VIRTIO_TMEM_F_EVENTS			3	/* a queue of events to the driver */

/* Feature bits. */
#define VIRTIO_TMEM_F_RETAIN			2	/* retained pages, the REF request */
#define VIRTIO_TMEM_F_LATENCIES			4	/* the LATENCIES request */
#define VIRTIO_TMEM_F_SWAP			5	/* the driver is to cache swap areas */

/* The only page size of this implementation. The field page_size announces it. */
#define VIRTIO_TMEM_PAGE_SHIFT			12
#define VIRTIO_TMEM_PAGE_SIZE			4096

/* Limits, which device and driver MUST both keep. */
#define VIRTIO_TMEM_BATCH_MAX			64	/* pages or ranges in a request */
#define VIRTIO_TMEM_REQUEST_QUEUES_MAX		16	/* without the control queue */
#define VIRTIO_TMEM_QUEUE_SIZE_MAX		1024	/* descriptors in a queue */
#define VIRTIO_TMEM_CHUNK_SHIFT			8	/* log2 of pages in a chunk (1 MiB) */
#define VIRTIO_TMEM_INDEX_BITS			51	/* bits of a page index (2^63 B) */
#define VIRTIO_TMEM_POOLS_MAX			256	/* pools that exist at the same time */

/* Queue 0 is the control queue, 1 .. num_request_queues are request queues. */
#define VIRTIO_TMEM_CONTROL_QUEUE		0

/* Request types: four for a request queue, and five for the control queue. */
#define VIRTIO_TMEM_T_PUT			1
#define VIRTIO_TMEM_T_GET			2
#define VIRTIO_TMEM_T_FLUSH			3
#define VIRTIO_TMEM_T_REF			4
#define VIRTIO_TMEM_T_POOL_CREATE		16
#define VIRTIO_TMEM_T_POOL_DESTROY		17
#define VIRTIO_TMEM_T_REPORT			18
#define VIRTIO_TMEM_T_LATENCIES			19
#define VIRTIO_TMEM_T_GENERATION		20

/*
 * Status of a request. Zero is not a status, so a zeroed buffer is not an
 * answer. The driver writes UNANSWERED before it sends a request, and the device
 * never answers with UNANSWERED.
 */
#define VIRTIO_TMEM_S_OK			1	/* executed; each page has a result */
#define VIRTIO_TMEM_S_STALE			2	/* wrong generation; nothing changed */
#define VIRTIO_TMEM_S_BAD			3	/* wrong lengths, or a value out of range */
#define VIRTIO_TMEM_S_UNSUPPORTED		4	/* unknown type or flag */
#define VIRTIO_TMEM_S_NO_POOL			5	/* the driver has no such pool */
#define VIRTIO_TMEM_S_LIMIT			6	/* a limit of the host is reached */
#define VIRTIO_TMEM_S_UNANSWERED		255

/*
 * Result of a page: PUT answers STORED or REFUSED, GET answers HIT or MISS, REF
 * answers HELD or GONE.
 */
#define VIRTIO_TMEM_P_STORED			65
#define VIRTIO_TMEM_P_REFUSED			66
#define VIRTIO_TMEM_P_HIT			67
#define VIRTIO_TMEM_P_MISS			68
#define VIRTIO_TMEM_P_HELD			69
#define VIRTIO_TMEM_P_GONE			70

/* Values of virtio_tmem_put_page.flags. */
#define VIRTIO_TMEM_PUT_WORKINGSET		1	/* the page was active in the guest */

/* Values of virtio_tmem_get_page.flags. */
#define VIRTIO_TMEM_GET_RETAINED		1	/* the device retains the page */

/*
 * Values of virtio_tmem_pool_create.flags. A device that does not know a flag
 * answers UNSUPPORTED and creates no pool, so the flags need no feature bits.
 */
#define VIRTIO_TMEM_POOL_PRIVATE		1	/* never share pages with other drivers */

/* Value of virtio_tmem_range.nr_pages: from index to the end of the object. */
#define VIRTIO_TMEM_TO_END			0

/* Device configuration. */
struct virtio_tmem_config {
	__le64 generation;		/* 0: no back end, or not known */
	__le32 page_size;		/* VIRTIO_TMEM_PAGE_SIZE */
	__le16 num_request_queues;	/* 1 .. VIRTIO_TMEM_REQUEST_QUEUES_MAX */
	__le16 batch_max;		/* 1 .. VIRTIO_TMEM_BATCH_MAX */
	__le32 pools_max;		/* 1 .. VIRTIO_TMEM_POOLS_MAX */
	__le32 reserved[3];		/* 0; ignored by the driver */
};

/* Header of every request, readable by the device. */
struct virtio_tmem_req {
	__le64 generation;		/* ignored in a GENERATION */
	__le16 type;			/* VIRTIO_TMEM_T_... */
	__le16 count;			/* pages or ranges; 0 for control requests */
	__le32 pool;			/* id that the driver chose; 0: no pool */
	/*
	 * GET with VIRTIO_TMEM_F_RETAIN: bit n allows the device to retain the
	 * page index + n. All other bits are 0. The field is 0 in all other
	 * requests.
	 */
	__le64 retain;
};

/* Header of every answer, writable by the device. */
struct virtio_tmem_resp {
	__u8 status;			/* VIRTIO_TMEM_S_... */
	__u8 reserved[7];		/* 0 */
};

/*
 * A PUT is req, put_page[count] and the data of count pages. The answer is resp
 * and, for each page, a byte VIRTIO_TMEM_P_....
 */
struct virtio_tmem_put_page {
	__le64 object;
	__le64 index;
	__le64 cookie;			/* never 0 */
	__le32 flags;			/* VIRTIO_TMEM_PUT_... */
	__le32 reserved;		/* 0 */
};

/*
 * A GET requests the pages index .. index + count - 1 of one object. It is req,
 * get and le64 cookie[count]. The answer is resp, get_page[count] and room for
 * the data of count pages.
 */
struct virtio_tmem_get {
	__le64 object;
	__le64 index;
};

struct virtio_tmem_get_page {
	__le64 cookie;			/* cookie of the returned page; 0: a miss */
	__u8 result;			/* VIRTIO_TMEM_P_... */
	__u8 flags;			/* VIRTIO_TMEM_GET_... */
	__u8 reserved[6];		/* 0 */
};

/* A FLUSH is req and range[count]. The answer is resp. */
struct virtio_tmem_range {
	__le64 object;
	__le64 index;
	__le64 nr_pages;		/* number of pages, or VIRTIO_TMEM_TO_END */
};

/*
 * A REF is req and ref_page[count]. The answer is resp and, for each page, a
 * byte VIRTIO_TMEM_P_.... A driver sends the request only with
 * VIRTIO_TMEM_F_RETAIN.
 */
struct virtio_tmem_ref_page {
	__le64 object;
	__le64 index;
	__le64 cookie;			/* never 0 */
};

/*
 * A POOL_CREATE is req and pool_create. A POOL_DESTROY is only req. The answer to
 * each of these requests is resp.
 */
struct virtio_tmem_pool_create {
	__le32 flags;			/* VIRTIO_TMEM_POOL_...; an unknown bit is UNSUPPORTED */
	__le32 reserved;		/* 0 */
};

/* Values of virtio_tmem_report.state. */
#define VIRTIO_TMEM_R_OFF			0	/* the driver is loaded and off */
#define VIRTIO_TMEM_R_ON			1	/* the driver caches pages */
#define VIRTIO_TMEM_R_OFFLINE			2	/* on, but there is no back end */
#define VIRTIO_TMEM_R_TRIPPED			3	/* breaker open: answers were late */
#define VIRTIO_TMEM_R_POISONED			4	/* a check failed: off until reload */

/*
 * Bits of virtio_tmem_report.hooks for the types of file systems that the driver
 * serves. The driver defines the other bits.
 */
#define VIRTIO_TMEM_H_F2FS			55
#define VIRTIO_TMEM_H_EXT4			56
#define VIRTIO_TMEM_H_XFS			57
#define VIRTIO_TMEM_H_EXT2			58
#define VIRTIO_TMEM_H_EXT3			59
#define VIRTIO_TMEM_H_VFAT			60
#define VIRTIO_TMEM_H_EXFAT			61
#define VIRTIO_TMEM_H_EROFS			62
#define VIRTIO_TMEM_H_BTRFS			63

/*
 * A REPORT is req and report, and the answer is resp. The host uses it for
 * statistics only.
 */
struct virtio_tmem_report {
	__le32 version;			/* major << 16 | minor << 8 | patch */
	__le32 state;			/* VIRTIO_TMEM_R_... */
	__le64 hooks;			/* live hooks of the driver, VIRTIO_TMEM_H_... */
	__le64 memory_bytes;		/* guest memory that the driver uses */
	__le64 index_pages;		/* pages in the driver's index */
	__le64 puts;			/* pages accepted into the put ring */
	__le64 puts_dropped;		/* eligible pages that were not accepted */
	__le64 gets;			/* pages that readers requested */
	__le64 hits;			/* requested pages that were found and used */
	__le64 late;			/* GET requests without answer by the deadline */
	__le64 mismatches;		/* pages that failed a check; must be 0 */
	__le64 invalidations;		/* index entries erased, for any reason */
	__u8 kernel[64];		/* kernel release, any bytes, NUL-padded */
};

/*
 * A LATENCIES is req and latencies, and the answer is resp. The host uses it for
 * statistics only. get[] counts GET requests by the time that their readers
 * waited: less than 1 us, less than 2, 4, ... 16384 us, and longer. A driver
 * sends the request only with VIRTIO_TMEM_F_LATENCIES. A back end that does not
 * know the request answers UNSUPPORTED.
 */
struct virtio_tmem_latencies {
	__le64 get_ns;			/* sum of the readers' waits in ns */
	__le64 get[16];			/* GET requests, by waiting time */
};

/*
 * A GENERATION is only req, and the answer is resp and generation. The device
 * answers it whatever generation the request carries. The driver learns from it
 * that a back end is there, and which generation requests have to carry.
 */
struct virtio_tmem_generation {
	__le64 generation;		/* current generation, never 0 with S_OK */
};

#endif /* VIRTIO_TMEM_H */
