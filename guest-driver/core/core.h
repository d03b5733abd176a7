/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Declarations that the files of core/ share: the device, its queues, and the index's inner
 * interface. Files use only files of lower layers (tests/repo/test_driver_layers.py).
 *
 * Locks, outermost first. All spinlocks are taken with interrupts off, except fetch_lock and the
 * lock of admit.c, which are taken with interrupts on and bottom halves off:
 *	control.c: dev->control_lock (mutex)	control queue, one request at a time
 *	pool.c: tmem_pools_lock (mutex)	list of pools, assignment of their ids
 *	send.c: queue->send_lock	ring next and tail, requests of puts and flushes
 *	  bucket->lock		index.c: all index state of the objects that hash there
 *	    detached_lock		objects whose memory is freed later
 *	    queue->ring_lock		ring head, groups of the queue, flushes, REFs
 *	      dev->group_lock		free groups of slots
 *	  queue->vq_lock		the virtqueue; state of requests that are the device's
 *	    dev->get_lock		free get requests and bounce groups
 *	      stats.c: state_lock	state for sysfs; also taken alone
 *	dev->fetch_lock		fetches in flight; no lock is taken inside
 * control_vq_lock, window_lock, the lock of the index's limit (budget.c) and the locks of admit.c
 * and policy.c are leaf locks. vq_lock and bucket->lock are never held together. Callers
 * may hold mm and file system locks (i_pages) and the lock of a record set (hooks/records.c), so
 * none of these locks may be held while one of those is taken. An interrupt takes send_lock and all
 * locks below it.
 *
 * No lock or cache line is written by all CPUs for each page of a put or get. bucket->lock guards
 * the objects of one bucket. send_lock, ring_lock and vq_lock guard one queue. group_lock is taken
 * once for TMEM_GROUP_PAGES pages, and get_lock once for each request.
 * tests/repo/test_hot_paths.py lists all writes to shared memory.
 */
#ifndef _TMEM_CORE_H
#define _TMEM_CORE_H

#include <linux/completion.h>
#include <linux/hrtimer.h>
#include <linux/interrupt.h>
#include <linux/jiffies.h>
#include <linux/llist.h>
#include <linux/mutex.h>
#include <linux/percpu-refcount.h>
#include <linux/scatterlist.h>
#include <linux/spinlock.h>
#include <linux/virtio.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

#include <virtio_tmem.h>

#include "../testing.h"
#include "../tmem.h"
#include "check.h"
#include "fallback.h"
#include "stats.h"

#define TMEM_VERSION_MAJOR	0
#define TMEM_VERSION_MINOR	1
#define TMEM_VERSION_PATCH	0
#define TMEM_VERSION_STRING	__stringify(TMEM_VERSION_MAJOR) "." \
				__stringify(TMEM_VERSION_MINOR) "." \
				__stringify(TMEM_VERSION_PATCH)

/*
 * The module uses at most (guest RAM / 100 + 2 MiB) without VIRTIO_TMEM_F_RETAIN. Operators rely on
 * this number.
 */
#define TMEM_BUDGET_RAM_DIVISOR	100
#define TMEM_BUDGET_FLOOR_BYTES	(2UL << 20)
/*
 * With VIRTIO_TMEM_F_RETAIN, the index also has entries of pages that are in the page cache. So its
 * limit is higher by this part of RAM, which is one entry for each page of RAM.
 */
#define TMEM_BUDGET_RETAIN_DIVISOR	(PAGE_SIZE / sizeof(u64))
/* The put rings take 3/8 of the module's memory, bounce pages 1/8, and the index the rest. */
#define TMEM_RING_EIGHTHS	3
#define TMEM_BOUNCE_EIGHTHS	1
/*
 * Maximum number of slots (one page each) in the put rings of all queues together. Each time kswapd
 * runs, it frees at least the pages between the low and the high watermark: 113 pages in a guest of
 * 256 MiB and 2,815 in one of 1 GiB (measured with Linux 6.12), about 4,224 from 4 to 16 GiB. It
 * frees more while readers allocate, so the limit is about twice the largest of these numbers. A
 * larger ring would only delay the effect of a slow host. Group numbers, which are u16, also limit
 * the number.
 */
#define TMEM_RING_SLOTS_MAX	8192
/*
 * Minimum number of slots: one group for each possible request queue, and a spare group that any
 * queue can take.
 */
#define TMEM_RING_SLOTS_MIN	((VIRTIO_TMEM_REQUEST_QUEUES_MAX + 1) * TMEM_GROUP_PAGES)
#define TMEM_BOUNCE_PAGES_MAX	1024
#define TMEM_BOUNCE_PAGES_MIN	64

/*
 * Ring and bounce memory is allocated in groups of pages, of the largest order that the kernel does
 * not treat as costly.
 */
#define TMEM_GROUP_ORDER	3
#define TMEM_GROUP_PAGES	8
#define TMEM_BATCH_GROUPS	(VIRTIO_TMEM_BATCH_MAX / TMEM_GROUP_PAGES)

/*
 * Maximum number of put batches of a queue that are at the host. kswapd evicts a few hundred
 * neighbouring pages, which go to one queue, in less time than the host needs for an answer. Eight
 * full batches are more than the ring of a guest of 256 MiB holds.
 */
#define TMEM_PUTS_IN_FLIGHT	8
/*
 * Time in ms for which the puts of a partial batch wait for more puts. The time is a few ticks
 * long, so that occasional evictions do not cause a request for each page. It is short compared
 * with the time until a page is wanted again.
 */
#define TMEM_PUT_DELAY_MS	10
/*
 * Partial batches of all queues together use at most the number of slots divided by this value. The
 * other slots stay free for a burst of puts.
 */
#define TMEM_WAITING_DIVISOR	2
#define TMEM_FLUSHES_IN_FLIGHT	2
/*
 * Maximum number of batches of references (REF requests) at the host, for each queue. The host
 * answers a batch of references in a fraction of the time that it needs for a batch of puts.
 */
#define TMEM_REFS_IN_FLIGHT	2
/*
 * Maximum number of batches that a sender sends, completes or erases before it enables interrupts.
 * A batch of 64 puts takes some microseconds.
 */
#define TMEM_SEND_BATCHES	4
/*
 * Maximum number of erased ranges that wait to be reported to the host. The driver does not report
 * more of them; the host's eviction drops their pages later.
 */
#define TMEM_FLUSH_PENDING	256
/*
 * Maximum number of references (to retained pages that were evicted unchanged) that wait to be
 * sent, for all queues together. It is 16 batches, because kswapd frees pages faster than the host
 * answers references. One queue has at least TMEM_REF_PENDING_MIN. The driver drops further
 * references. Their pages then stay retained at the host, which evicts retained pages before
 * others.
 */
#define TMEM_REF_PENDING	1024
#define TMEM_REF_PENDING_MIN	256
/* Number of get requests, 1.7 KiB each. */
#define TMEM_GET_REQUESTS	32
/* Gets for readahead that begins in advance leave this part of requests and bounce pages free. */
#define TMEM_AHEAD_DIVISOR	4

/*
 * Number of control requests of a device. With one only, an unanswered request would block the
 * control queue.
 */
#define TMEM_CONTROL_REQUESTS	4

/* Largest place of a block in an object that the protocol allows. */
#define TMEM_INDEX_MAX		((1ULL << VIRTIO_TMEM_INDEX_BITS) - 1)

static_assert(BIT_ULL(TMEM_OBJECT_BITS) - 1 <= TMEM_INDEX_MAX);

enum tmem_req_kind {
	TMEM_REQ_PUT, TMEM_REQ_FLUSH, TMEM_REQ_REF, TMEM_REQ_GET, TMEM_REQ_CONTROL,
	TMEM_REQ_GENERATION
};

/*
 * State of a request. The driver may access the request's buffers in FREE and DONE, the device in
 * SENT and ABANDONED. In ABANDONED no task waits for the answer any more. The state changes under
 * vq_lock, or under control_vq_lock for control requests. The task that owns a DONE request may
 * set FREE without a lock.
 */
enum tmem_req_state { TMEM_REQ_FREE, TMEM_REQ_SENT, TMEM_REQ_ABANDONED, TMEM_REQ_DONE };

/* Common first member of all request structures, whose address is the token in a virtqueue. */
struct tmem_req {
	enum tmem_req_kind kind;
	enum tmem_req_state state;
	u32 room_bytes;			/* bytes of the request that the device may write */
	u32 used_bytes;			/* length that the device wrote, 0 if above room_bytes */
	u32 round;			/* tmem_in_flight.round when it was sent */
};

/*
 * Numbers of the requests of a virtqueue that are at the device. The virtqueue's lock guards them.
 */
struct tmem_in_flight {
	u32 round;			/* changes with the generation */
	unsigned int nr;
	unsigned int nr_old;		/* part of nr: sent in an earlier round */
};

/* Counts a request that was added to the virtqueue. */
static inline void tmem_req_sent(struct tmem_in_flight *in_flight, struct tmem_req *req)
{
	req->state = TMEM_REQ_SENT;
	req->round = in_flight->round;
	in_flight->nr++;
}

/*
 * Counts a request that the device has used, and records the length that the device claims to have
 * written. An impossible length counts as 0, so that no part of the answer is read.
 */
static inline void tmem_req_used(struct tmem_in_flight *in_flight, struct tmem_req *req, u32 len)
{
	req->used_bytes = len <= req->room_bytes ? len : 0;
	in_flight->nr--;
	in_flight->nr_old -= req->round != in_flight->round;
}

struct tmem_get_req {
	struct tmem_req req;
	struct list_head list;		/* link in dev->get_free */
	struct tmem_queue *queue;
	struct tmem_fetch *fetch;	/* to which the request belongs; NULL for a probe */
	wait_queue_head_t wait;
	/* number of the first page, counted from the start of the fetch */
	unsigned int first;
	unsigned int count;
	unsigned int nr_groups;
	u64 answered_ns;		/* time at which the driver saw the answer */
	u64 retain;			/* pages that the device may retain, one bit each */
	void *group[TMEM_BATCH_GROUPS];
	u64 entry[VIRTIO_TMEM_BATCH_MAX];
	struct {
		struct virtio_tmem_req hdr;
		struct virtio_tmem_get get;
		__le64 cookie[VIRTIO_TMEM_BATCH_MAX];
	} out;
	struct {
		struct virtio_tmem_resp resp;
		struct virtio_tmem_get_page page[VIRTIO_TMEM_BATCH_MAX];
	} in;
};

/*
 * A request queue with its put ring. Slots from tail to next are with the device or answered; slots
 * from next to head wait to be sent. The lock at the head of a group of fields guards the group.
 * Fields that are also read without the lock are written with WRITE_ONCE().
 *
 * Groups of fields that different CPUs write are in cache lines of their own, here and in struct
 * tmem_dev. Fields that each put or get reads are in other cache lines than fields that other CPUs
 * write.
 */
struct tmem_queue {
	struct tmem_dev *dev;
	unsigned int nr;

	/* The owner of send_lock is the only sender of the queue (send.c). */
	spinlock_t send_lock ____cacheline_aligned_in_smp;
	u64 next;			/* sequence number of the next slot to send */
	u64 tail;			/* sequence number of the oldest slot that is not free */
	unsigned int puts_in_flight;
	unsigned int flushes_in_flight;
	unsigned int refs_in_flight;
	bool timed;			/* kick_at is set for the puts or references that wait */
	bool unwatched;			/* the feeder ignores the queue until an answer comes */
	bool attention;			/* the feeder should call the sender at once */
	unsigned long kick_at;		/* time at which a partial batch is sent, in jiffies */
	struct tmem_put_batch *put[TMEM_PUTS_IN_FLIGHT];
	struct tmem_flush_batch *flush[TMEM_FLUSHES_IN_FLIGHT];
	struct tmem_ref_batch *ref_batch[TMEM_REFS_IN_FLIGHT];

	/* Guards vq, request states and in_flight. */
	spinlock_t vq_lock ____cacheline_aligned_in_smp;
	struct virtqueue *vq;
	struct tmem_in_flight in_flight;
	bool stalled;			/* the virtqueue is full until an answer comes */
	/* fetches whose requests are answered or abandoned, and the tasklet that ends them */
	struct llist_head fetched;
	struct llist_node *fetched_rest;	/* taken from fetched; used by the tasklet */
	struct tasklet_struct fetch_tasklet;

	/* Guards head, seq_start, map, pending flushes and references. Each put takes this lock. */
	spinlock_t ring_lock ____cacheline_aligned_in_smp;
	u64 head;			/* next sequence number to reserve */
	u64 seq_start;			/* sequence number whose cookie offset is queue->nr */
	unsigned int owned;		/* groups from tail to head; guarded by dev->group_lock */
	/* numbers of the queue's groups, by sequence number / TMEM_GROUP_PAGES */
	u16 *map;
	unsigned int nr_flush;
	struct tmem_flush_range *pending;
	/*
	 * References that wait to be sent have the numbers from ref_tail to ref_head - 1. Reference
	 * n is at place n % dev->ref_pending of the array ref.
	 */
	unsigned int ref_head;
	/* number of the oldest reference that waits; written under ring_lock and send_lock */
	unsigned int ref_tail;
	/* array of references; NULL, like ref_batch[i], if dev->retain is false */
	struct tmem_ref *ref;
} ____cacheline_aligned_in_smp;

/* State of the waits of kswapd, or of all registered tasks together (pace.c). */
struct tmem_pace {
	unsigned int us_max;	/* longest wait, in us */
	/* the waits last at most 1 / share of the time, and a burst more; 0: there is no budget */
	unsigned int share;
	/* length of the next pause after a wait in which the host took no put, in jiffies */
	unsigned long pause;
	unsigned long again;	/* time at which the pause ends, in jiffies */
	s64 budget_ns;		/* time of ktime_get_ns() from which the budget allows a wait */
};

struct tmem_dev {
	struct virtio_device *vdev;
	struct rcu_head rcu;

	/*
	 * The device's generation that requests carry, or 0 while nothing may be sent.
	 * sync_work_fn() describes the order in which it changes.
	 */
	u64 generation;
	u32 epoch;			/* grows whenever the driver erases all index entries */
	bool renew;			/* erase all entries even if generation is the same */
	u64 cookie_base;

	unsigned int nr_queues;
	unsigned int batch_max;
	unsigned int ref_pending;	/* size of tmem_queue.ref, a power of two */
	unsigned int batch_full;	/* puts in a full batch, which is sent at once */
	unsigned int pools_max;
	bool retain;			/* VIRTIO_TMEM_F_RETAIN is negotiated and used */
	bool swap;			/* VIRTIO_TMEM_F_SWAP is negotiated */
	struct tmem_queue *queue;
	unsigned long memory_bytes;
	unsigned long ram_pages;	/* size of RAM for which the device was set up */
	/* RAM, in pages, if it is too far from ram_pages, or 0; used by the report work */
	unsigned long ram_new_pages;
	/* when RAM got the size ram_new_pages, in jiffies; used by the report work */
	unsigned long ram_changed_at;
	struct tmem_admit *admit;
	/* References of tasks that use the device and may sleep, and of fetches. */
	struct percpu_ref users;
	struct completion unused;	/* completed when the last reference is released */

	/* Slots and data of the put rings, which all queues share. */
	unsigned int nr_groups;
	struct tmem_slot *slot;
	void **group;
	/*
	 * A page for each processor, into which tmem_evicted_read() copies an evicted page. Used
	 * with preemption off, and not in interrupts.
	 */
	void __percpu *scratch;
	/* Guards free, first_free and nr_free. */
	spinlock_t group_lock ____cacheline_aligned_in_smp;
	u16 *free;			/* ring of free groups, oldest first */
	unsigned int first_free;
	unsigned int nr_free;

	/* Guards fallback. fallback.nr_gone is also read without the lock. */
	spinlock_t fallback_lock ____cacheline_aligned_in_smp;
	struct tmem_fallback fallback;

	/* Feeder thread of all request queues. */
	struct task_struct *feeder ____cacheline_aligned_in_smp;
	wait_queue_head_t feeder_wait;
	/* bit i is set if tmem_put_end() should send the full batches of queue i; atomic */
	unsigned long full;
	/* kswapd and registered tasks wait here until the host has answered puts (pace.c) */
	wait_queue_head_t pace_wait;
	struct tmem_pace pace_kswapd;
	struct tmem_pace pace_task;	/* of all registered tasks together */

	/* State of gets. get_lock guards all fields of this group except get_req and bounce. */
	spinlock_t get_lock ____cacheline_aligned_in_smp;
	struct tmem_get_req **get_req;
	struct list_head get_free;
	unsigned int nr_get_free;
	void **bounce;			/* all groups of bounce pages */
	unsigned int nr_bounce;
	void **bounce_free;		/* stack of the free groups in bounce */
	unsigned int nr_bounce_free;
	/* number of groups of abandoned get requests, which the host may still write to */
	unsigned int nr_kept;
	/* fetches in a row that missed the deadline; written under get_lock */
	unsigned int late_row;
	/* fill of the breaker's leaky bucket; guarded by get_lock */
	u64 slow_ns;
	u64 slow_at_ns;			/* when the bucket last leaked; guarded by get_lock */
	/* ends of the last slow fetch and the last late one that counted; guarded by get_lock */
	u64 fetch_slow_ns, fetch_late_ns;
	/* longest wait of a reader; written under get_lock */
	u64 wait_max_ns;
	bool tripped;			/* the breaker is open; written under get_lock */

	/* State of fetches. fetch_lock guards all fields but fetch_timer and nr_fetches. */
	spinlock_t fetch_lock ____cacheline_aligned_in_smp;
	/* those with requests and those that wait for bounce pages, in the order of deadlines */
	struct list_head fetches;
	unsigned int nr_waiting[2];	/* for bounce pages: readers, and readahead in advance */
	u64 fetch_timer_ns;		/* time for which fetch_timer is armed, or 0 */
	struct hrtimer fetch_timer;
	atomic_t nr_fetches;		/* fetches that have begun and not ended */

	/* State of the control queue. */
	struct mutex control_lock ____cacheline_aligned_in_smp;
	/* last error of tmem_pools_create(); used by the sync work only */
	int pools_error;
	/* Guards control_vq, the states of its requests, control_in_flight and the next group. */
	spinlock_t control_vq_lock;
	struct virtqueue *control_vq;
	struct tmem_in_flight control_in_flight;
	struct tmem_control *control[TMEM_CONTROL_REQUESTS];
	wait_queue_head_t control_wait;

	/* GENERATION requests. control_vq_lock guards all fields but nr_asks and ask_wanted. */
	struct tmem_ask *ask;
	unsigned int nr_asks;
	unsigned int asks_unanswered;	/* sent since the last answer; also read without the lock */
	unsigned long asked_at;		/* time of the last request, in jiffies */
	/* time of the last answer, in jiffies; also read without the lock */
	unsigned long answered_at;
	u64 answer;			/* generation of an answer that the sync work takes, or 0 */
	bool silent;			/* no answer came in time; also read without the lock */
	/* Something has shown since the last request that the generation may be over. */
	bool ask_wanted;

	struct workqueue_struct *wq;	/* ordered: the three works never run together */
	struct work_struct sync_work;
	struct delayed_work report_work;
	struct delayed_work ask_work;
	/* The configuration changed since it was read. */
	bool config_changed;
	/* Generation that the device gave last, or 0; written at set-up and by the sync work. */
	u64 told;
	/* The device needed a reset when the configuration was read; written like told. */
	bool needs_reset;
	u64 pools_generation;		/* last generation other than 0, or 0 */
	u64 latencies_refused;		/* generation in which the backend refused LATENCIES */
	const char *reset_reason;	/* why the device should be reset, or NULL; set once */
	/*
	 * Number of checks in a row that found unanswered requests of an earlier generation, and
	 * time from which the next check counts, in jiffies; used by the sync and report works only
	 */
	unsigned int stuck_checks;
	unsigned long stuck_next;
	bool stopping;
};

/* Time in seconds for which an answer to a GENERATION request shows that a back end is there. */
#define TMEM_ANSWER_S		2

static inline bool tmem_answered_lately(struct tmem_dev *dev)
{
	return time_before(jiffies, READ_ONCE(dev->answered_at) + TMEM_ANSWER_S * HZ);
}

/*
 * tmem_device points to the device while it may be used. Its readers hold rcu_read_lock() or a
 * reference to the device. The functions below are implemented in dev.c.
 */
extern struct tmem_dev __rcu *tmem_device;
extern struct tmem_check_keys tmem_keys;

bool tmem_dev_exists(void);
bool tmem_dev_wants_swap(bool none);
struct tmem_dev *tmem_dev_get(void);
void tmem_dev_put(struct tmem_dev *dev);
int tmem_dev_users_init(struct tmem_dev *dev);
void tmem_dev_users_wait(struct tmem_dev *dev);
void tmem_dev_resync(struct tmem_dev *dev, bool renew);
void tmem_dev_resync_any(bool renew);
void tmem_dev_ask(struct tmem_dev *dev);
void tmem_dev_report(struct tmem_dev *dev);
void tmem_dev_report_any(void);

/* implemented in reset.c */
void tmem_dev_reset_soon(const char *reason);
void tmem_reset_round(struct tmem_dev *dev);
bool tmem_reset_check(struct tmem_dev *dev, bool works);
void tmem_resets_exit(void);

/* implemented in ram.c */
int tmem_ram_init(void);
void tmem_ram_exit(void);
void tmem_ram_check(struct tmem_dev *dev);

/* implemented in budget.c */
long tmem_counted_ram_bytes(void);
long tmem_budget_bytes(void);
void tmem_index_set_device_bytes(long bytes, bool retain);
void tmem_index_follow_ram(void);
long tmem_index_bytes(void);
long tmem_index_pages(void);
long tmem_index_retained_pages(void);

/* Place of an object's entries in the index. The functions below are implemented in index.c. */
struct tmem_where {
	u64 object;
	u32 pool;
	u32 bucket;
};

int tmem_index_init(void);
void tmem_index_exit(void);
u32 tmem_index_bucket(const struct tmem_key *key);
int tmem_index_store(const struct tmem_key *key, pgoff_t index, u64 entry,
		     struct tmem_where *where);
void tmem_index_take(const struct tmem_key *key, pgoff_t index, unsigned int nr,
		     const unsigned long *want, u64 keep, u64 *entry, struct tmem_where *where);
void tmem_index_forget(u32 bucket, u64 object, pgoff_t index, u64 mask);
bool tmem_index_retained(const struct tmem_key *key, pgoff_t index);
int tmem_index_hold(const struct tmem_key *key, pgoff_t index, u32 check, struct tmem_where *where,
		    u64 *offset);
bool tmem_index_erase_offset(u32 bucket, u64 object, u64 index, u64 offset);
bool tmem_index_orphan(u32 bucket, u64 object, u64 index);

/* implemented in evict.c */
void tmem_evict_init(void);
void tmem_evict_exit(void);
void tmem_index_sweep_start(void);
void tmem_index_sweep(void);

/* implemented in pool_id.c */
int tmem_pool_set_id(struct tmem_pool *pool, u32 id);
void tmem_pool_clear_id(struct tmem_pool *pool);
void tmem_pool_add_pages(u32 id, long pages);
const char *tmem_pool_name(u32 id);
bool tmem_pool_live(u32 id);
void tmem_pool_lost(u32 id);
void tmem_pool_ids_exit(void);

/* Pool of a file system. The functions below are implemented in pool.c. */
struct tmem_pool {
	struct list_head list;		/* link in tmem_pools or tmem_pools_freed */
	char name[32];
	/*
	 * Number of the pool, which is never reused. It selects the buckets of the pool's objects,
	 * which the id cannot do, because the id may change.
	 */
	u32 serial;
	u32 id;				/* id at the host, or 0; puts read it under a bucket lock */
	/* entries made with this id on a CPU minus entries erased on it */
	long __percpu *nr_pages;
	/*
	 * former id; the sync work destroys the pool with this id at the host, if it exists there
	 */
	u32 retired_id;
	bool freed;			/* freed by the hooks; guarded by tmem_pools_lock */
	bool private;			/* VIRTIO_TMEM_POOL_PRIVATE; never changes */
	bool lost;			/* a flush was dropped: the pool has to be emptied */
	/* generation in which the device refused a private pool, or 0; written by the sync work */
	u64 refused;
	struct tmem_policies *policies;	/* the pointer never changes */
	unsigned long wrong;		/* bit 0: a page was wrong (wrong.c) */
	const char *why;		/* check that found the first wrong page, or NULL */
	u64 wrong_block;
	struct rcu_head rcu;
};

/* Number of pools in tmem_pools_freed; written under tmem_pools_lock. */
extern unsigned int tmem_pools_nr_freed;

void tmem_pools_device(bool present);
void tmem_pools_gone(u64 generation);
void tmem_pools_forget(void);
int tmem_pools_create(struct tmem_dev *dev, u64 generation);
void tmem_pools_exit(void);

/* implemented in policy.c */
int tmem_policy_init(struct tmem_pool *pool);
void tmem_policy_free(struct tmem_pool *pool);

/* implemented in ring.c */
int tmem_slots_init(struct tmem_dev *dev, unsigned int nr_slots);
void tmem_slots_exit(struct tmem_dev *dev);
int tmem_ring_init(struct tmem_dev *dev, struct tmem_queue *queue);
void tmem_ring_exit(struct tmem_queue *queue);
bool tmem_ring_copy(struct tmem_dev *dev, struct tmem_queue *queue, u64 entry, void *dst);
void tmem_ring_renew(struct tmem_queue *queue);

/* implemented in queue.c */
struct tmem_queue *tmem_queue_of(struct tmem_dev *dev, u32 bucket, u64 index);
void tmem_queue_flush(const struct tmem_where *where, u64 index, u64 nr_pages, bool must);

/* implemented in retain.c */
int tmem_retain_init(struct tmem_dev *dev, struct tmem_queue *queue);
void tmem_retain_exit(struct tmem_queue *queue);
bool tmem_retain_wanted(struct tmem_dev *dev, unsigned int pages);
void tmem_retain_learn(struct tmem_dev *dev, u64 gone, unsigned int count);
void tmem_retain_reset(struct tmem_dev *dev);
void tmem_queue_ref(struct tmem_dev *dev, const struct tmem_where *where, u64 index, u64 offset,
		    u32 epoch);

/* implemented in send.c */
int tmem_send_init(struct tmem_dev *dev, struct tmem_queue *queue);
void tmem_send_exit(struct tmem_queue *queue);
void tmem_send_lost(struct tmem_queue *queue);
bool tmem_send(struct tmem_queue *queue);
void tmem_send_all(struct tmem_queue *queue);
long tmem_send_timeout(struct tmem_queue *queue);
void tmem_send_drain(struct tmem_queue *queue);
void tmem_send_vq_callback(struct virtqueue *vq);

/* implemented in feeder.c */
int tmem_feeder(void *data);

/* implemented in admit.c */
int tmem_admit_init(struct tmem_dev *dev);
void tmem_admit_exit(struct tmem_dev *dev);
bool tmem_admit(struct tmem_dev *dev, const struct tmem_key *key, u64 index, struct page *page,
		bool workingset);
void tmem_admit_back(struct tmem_dev *dev, struct page *page);
void tmem_admit_count_evictions(struct tmem_dev *dev, unsigned long pages);
void tmem_admit_learn(struct tmem_dev *dev, unsigned long hits, unsigned long losses);

/* implemented in bounce.c */
int tmem_bounce_init(struct tmem_dev *dev, unsigned int bounce_pages);
void tmem_bounce_exit(struct tmem_dev *dev);
bool tmem_bounce_fits(const struct tmem_dev *dev, unsigned int nr_pages, bool ahead);
struct tmem_get_req *tmem_bounce_alloc(struct tmem_dev *dev, unsigned int nr_pages, bool ahead);
void tmem_bounce_trim(struct tmem_dev *dev, struct tmem_get_req *get, unsigned int nr_pages);
void tmem_bounce_free(struct tmem_dev *dev, struct tmem_get_req *get);
void tmem_bounce_answered(struct tmem_dev *dev, struct tmem_get_req *get);

/* implemented in fetch.c */
void tmem_fetch_init(struct tmem_dev *dev);
void tmem_fetch_exit(struct tmem_dev *dev);
void tmem_fetches_pause(bool pause);

/* implemented in breaker.c */
void tmem_breaker_trip(struct tmem_dev *dev);
void tmem_breaker_probe(struct tmem_dev *dev);
void tmem_breaker_reset(struct tmem_dev *dev);

/* implemented in pace.c */
void tmem_pace_init(struct tmem_dev *dev);

/* implemented in control.c */
int tmem_control_init(struct tmem_dev *dev);
void tmem_control_exit(struct tmem_dev *dev);
void tmem_control_vq_callback(struct virtqueue *vq);
int tmem_control_pool(struct tmem_dev *dev, u64 generation, u16 type, u32 pool, u32 flags);

/* implemented in generation.c */
int tmem_generation_init(struct tmem_dev *dev);
void tmem_generation_exit(struct tmem_dev *dev);
void tmem_generation_start(struct tmem_dev *dev);
unsigned long tmem_generation_ask(struct tmem_dev *dev);
void tmem_generation_answered(struct tmem_dev *dev, struct tmem_req *req);
bool tmem_generation_take(struct tmem_dev *dev, u64 *generation);
void tmem_generation_forget(struct tmem_dev *dev);

/* implemented in sync.c */
int tmem_sync_init(struct tmem_dev *dev);
void tmem_sync_exit(struct tmem_dev *dev);
void tmem_sync_hibernate(bool begin);
void tmem_sync_start(struct tmem_dev *dev);
void tmem_sync_stop(struct tmem_dev *dev);

/* implemented in stats.c */
void tmem_state_offline(const char *why);
void tmem_state_online(void);
void tmem_state_tripped(bool tripped);
u32 tmem_state_report(u64 *hooks);
ssize_t tmem_state_show(char *buf);

/* implemented in sysfs.c */
int tmem_sysfs_init(void);
void tmem_sysfs_exit(void);

#endif /* _TMEM_CORE_H */
