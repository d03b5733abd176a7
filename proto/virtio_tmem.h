/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * virtio-tmem: the wire between a guest driver and a device.
 *
 * This header is the source of every size, offset and value of the device; the
 * Rust crate beside it is compared with it field by field in a test, and the
 * rules that go with the layouts are in SPEC.md. All fields are little-endian.
 * Nothing here may change once released: extend with a feature bit.
 */
#ifndef VIRTIO_TMEM_H
#define VIRTIO_TMEM_H

#include <linux/types.h>

/*
 * Experimental until one is assigned; the highest id that fits a modern PCI
 * device id (0x1040 + id <= 0x107f). This is its only definition in C.
 */
#define VIRTIO_ID_TMEM				63

/* Reserved feature bits: no text yet, never offered, never accepted. */
#define VIRTIO_TMEM_F_PERSISTENT		0	/* pools that may not lose pages */
#define VIRTIO_TMEM_F_SHARED			1	/* pools that several guests see */
#define VIRTIO_TMEM_F_RETAIN			2	/* a get that leaves the page */
#define VIRTIO_TMEM_F_EVENTS			3	/* a device-to-driver queue */

/* Feature bits. */
#define VIRTIO_TMEM_F_LATENCIES			4	/* the LATENCIES request */

/* The only page size of this implementation; the configuration has page_size. */
#define VIRTIO_TMEM_PAGE_SHIFT			12
#define VIRTIO_TMEM_PAGE_SIZE			4096

/* Limits, each a MUST for both sides. */
#define VIRTIO_TMEM_BATCH_MAX			64	/* pages or ranges a request */
#define VIRTIO_TMEM_REQUEST_QUEUES_MAX		16	/* beside the control queue */
#define VIRTIO_TMEM_QUEUE_SIZE_MAX		1024	/* descriptors a queue */
#define VIRTIO_TMEM_CHUNK_SHIFT			8	/* pages of a chunk: 1 MiB */
#define VIRTIO_TMEM_INDEX_BITS			51	/* largest file: 2^63 bytes */
#define VIRTIO_TMEM_POOLS_MAX			256	/* live pools a device */

/* Queue 0 is the control queue, 1 .. num_request_queues are request queues. */
#define VIRTIO_TMEM_CONTROL_QUEUE		0

/* Request types. The first three go to a request queue, the others to control. */
#define VIRTIO_TMEM_T_PUT			1
#define VIRTIO_TMEM_T_GET			2
#define VIRTIO_TMEM_T_FLUSH			3
#define VIRTIO_TMEM_T_POOL_CREATE		16
#define VIRTIO_TMEM_T_POOL_DESTROY		17
#define VIRTIO_TMEM_T_REPORT			18
#define VIRTIO_TMEM_T_LATENCIES			19

/*
 * Status of a request. Zero is no status, so that a zeroed buffer is not an
 * answer; the driver presets UNANSWERED and the device never sends it.
 */
#define VIRTIO_TMEM_S_OK			1	/* done; see the page results */
#define VIRTIO_TMEM_S_STALE			2	/* another generation; nothing touched */
#define VIRTIO_TMEM_S_BAD			3	/* odd shape or a value out of range */
#define VIRTIO_TMEM_S_UNSUPPORTED		4	/* unknown type or flag */
#define VIRTIO_TMEM_S_NO_POOL			5	/* not a live pool of this driver */
#define VIRTIO_TMEM_S_LIMIT			6	/* a limit of the host is reached */
#define VIRTIO_TMEM_S_UNANSWERED		255

/* Result of a page: PUT answers STORED or REFUSED, GET answers HIT or MISS. */
#define VIRTIO_TMEM_P_STORED			65
#define VIRTIO_TMEM_P_REFUSED			66
#define VIRTIO_TMEM_P_HIT			67
#define VIRTIO_TMEM_P_MISS			68

/* virtio_tmem_put_page.flags */
#define VIRTIO_TMEM_PUT_WORKINGSET		1	/* the page was active in the guest */

/* virtio_tmem_range.nr_pages: from index to the end of the object. */
#define VIRTIO_TMEM_TO_END			0

/* Device configuration. */
struct virtio_tmem_config {
	__le64 generation;		/* 0: no backend, submit nothing */
	__le32 page_size;		/* VIRTIO_TMEM_PAGE_SIZE */
	__le16 num_request_queues;	/* 1 .. VIRTIO_TMEM_REQUEST_QUEUES_MAX */
	__le16 batch_max;		/* 1 .. VIRTIO_TMEM_BATCH_MAX */
	__le32 pools_max;		/* 1 .. VIRTIO_TMEM_POOLS_MAX */
	__le32 reserved[3];		/* 0; ignored by the driver */
};

/* First in every request, readable. */
struct virtio_tmem_req {
	__le64 generation;
	__le16 type;			/* VIRTIO_TMEM_T_... */
	__le16 count;			/* pages or ranges; 0 for control requests */
	__le32 pool;			/* driver's own counter; 0 is no pool */
	__le64 reserved;		/* 0 */
};

/* First in every answer, writable. */
struct virtio_tmem_resp {
	__u8 status;			/* VIRTIO_TMEM_S_... */
	__u8 reserved[7];		/* 0 */
};

/*
 * PUT: req, put_page[count], page data [count]; answered by resp and a byte
 * VIRTIO_TMEM_P_... per page.
 */
struct virtio_tmem_put_page {
	__le64 object;
	__le64 index;
	__le64 cookie;			/* never 0 */
	__le32 flags;			/* VIRTIO_TMEM_PUT_... */
	__le32 reserved;		/* 0 */
};

/*
 * GET: req, get, le64 cookie[count]: pages index .. index + count - 1 of one
 * object; answered by resp, get_page[count], page data [count].
 */
struct virtio_tmem_get {
	__le64 object;
	__le64 index;
};

struct virtio_tmem_get_page {
	__le64 cookie;			/* of the page returned, 0 at a miss */
	__u8 result;			/* VIRTIO_TMEM_P_... */
	__u8 reserved[7];		/* 0 */
};

/* FLUSH: req, range[count]; answered by resp. */
struct virtio_tmem_range {
	__le64 object;
	__le64 index;
	__le64 nr_pages;		/* or VIRTIO_TMEM_TO_END */
};

/* POOL_CREATE: req, pool_create; answered by resp. POOL_DESTROY: req; resp. */
struct virtio_tmem_pool_create {
	__le32 flags;			/* 0; any other is UNSUPPORTED */
	__le32 reserved;		/* 0 */
};

/* virtio_tmem_report.state */
#define VIRTIO_TMEM_R_OFF			0	/* loaded, stays off */
#define VIRTIO_TMEM_R_ON			1
#define VIRTIO_TMEM_R_OFFLINE			2	/* on, but no backend */
#define VIRTIO_TMEM_R_TRIPPED			3	/* breaker open: answers were late */
#define VIRTIO_TMEM_R_POISONED			4	/* a check failed: off until reload */

/* Bits of virtio_tmem_report.hooks: this type of file system is served. The others are the driver's own. */
#define VIRTIO_TMEM_H_EXT4			56
#define VIRTIO_TMEM_H_XFS			57

/* REPORT: req, report; answered by resp. For the host's statistics only. */
struct virtio_tmem_report {
	__le32 version;			/* major << 16 | minor << 8 | patch */
	__le32 state;			/* VIRTIO_TMEM_R_... */
	__le64 hooks;			/* a bit per hook that is live; VIRTIO_TMEM_H_... */
	__le64 memory_bytes;		/* that the driver holds in the guest */
	__le64 index_pages;		/* pages that the guest believes are here */
	__le64 puts;			/* pages accepted into the put ring */
	__le64 puts_dropped;		/* eligible pages that were not */
	__le64 gets;			/* pages asked of the device */
	__le64 hits;			/* pages that came back and were used */
	__le64 late;			/* requests that missed their deadline */
	__le64 mismatches;		/* pages that failed a check: must be 0 */
	__le64 invalidations;		/* index entries erased for coherence */
	__u8 kernel[64];		/* release, NUL-padded, any bytes */
};

/*
 * LATENCIES: req, latencies; answered by resp. For the host's statistics only.
 * How many GET requests their readers waited for so long: below 1 us, below 2,
 * 4, ... 16384 us, and all others. With VIRTIO_TMEM_F_LATENCIES only; a back
 * end that does not know the request answers UNSUPPORTED.
 */
struct virtio_tmem_latencies {
	__le64 get_ns;			/* all these waits together */
	__le64 get[16];
};

#endif /* VIRTIO_TMEM_H */
