/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * State of a fetch, which the files that request pages and take answers share. hooks/fill.c begins
 * fetches with tmem_fetch_start().
 */
#ifndef _TMEM_GET_H
#define _TMEM_GET_H

#include "core.h"

/*
 * Maximum number of requests in flight of one fetch. Together they bring at most
 * TMEM_FETCH_PAGES_MAX pages.
 */
#define TMEM_GET_BURST		16

/*
 * A fetch is slow if it takes longer than the deadline divided by this number. A disk would be as
 * fast as a slow fetch.
 */
#define TMEM_SLOW_DIVISOR		4

/*
 * Maximum number of pages of a fetch. A run of the tasklet copies about as many, in 50 us. The
 * memory that describes them is less than a page.
 */
#define TMEM_FETCH_PAGES_MAX	128

/* A get request of a fetch, in flight. */
struct tmem_fetch_sent {
	/* NULL if the request was abandoned: it belongs to the device, and so do its fields */
	struct tmem_get_req *get;
	struct tmem_queue *queue;
	u64 object;
	unsigned int first;		/* first page, counted from the start of the fetch */
	unsigned int count;
};

/*
 * Fetch: the gets for pages of one READ bio. It ends when all of them are answered, or at the
 * deadline. No task waits for it in this driver. The caller of tmem_fetch_start() sets the first
 * group of fields, and all others to 0. It keeps the structure until the function returns true or
 * calls done().
 */
struct tmem_fetch {
	struct tmem_key key;
	pgoff_t index;
	unsigned int nr;		/* pages, all of one object of the index */
	struct page **pages;		/* locked, not uptodate */
	/* bit i is set if page i is wanted; at the end, if it was got */
	unsigned long *want;
	u64 *check64;			/* content checks of the pages that were got */
	u64 deadline_ns;		/* from tmem_get_deadline_ns() */
	bool awaited;			/* a reader will wait for the pages */
	bool ahead;			/* no reader wants the pages yet */
	struct page *first;		/* a reader of the pages waits for this one */
	/* Called when the fetch has ended, in a tasklet. */
	void (*done)(struct tmem_fetch *fetch);

	/* The pages from here on were not requested, because no request or bounce page was free. */
	unsigned int nr_tried;
	struct tmem_dev *dev;
	u64 generation;
	u32 bucket;			/* bucket of the object in the index */
	bool late;			/* an answer did not come in time */
	unsigned int hits;
	unsigned int lost;		/* pages that the host reported as missing */
	struct tmem_get_req *spare;	/* reserved request, or NULL */
	unsigned int nr_sent;
	struct tmem_fetch_sent sent[TMEM_GET_BURST];
	u64 sent_ns;
	u64 begin_ns;			/* before a wait for bounce pages */
	/*
	 * Requests in flight, plus one for each of: tmem_fetch_start(), or the wait for bounce
	 * pages; the timer that uses it.
	 */
	atomic_t pending;
	struct list_head list;		/* link in dev->fetches; guarded by dev->fetch_lock */
	bool waits;			/* for bounce pages; guarded by dev->fetch_lock */
	struct llist_node node;		/* link in queue->fetched */
};

/* Returns whether a get request is answered. */
static inline bool tmem_get_done(struct tmem_get_req *get)
{
	/* Read the answer after the state; pairs with tmem_bounce_answered(). */
	return smp_load_acquire(&get->req.state) == TMEM_REQ_DONE;
}

/* implemented in request.c */
u64 tmem_get_span_ns(void);
int tmem_get_submit(struct tmem_dev *dev, struct tmem_get_req *get, u64 generation, u32 pool);
bool tmem_get_abandon(struct tmem_get_req *get);
bool tmem_get_wait(struct tmem_get_req *get, u64 deadline_ns);
void tmem_get_count_wait(u64 waited_ns);
void tmem_fetch_miss(struct tmem_fetch *fetch, unsigned int i, enum tmem_stat why);
void tmem_fetch_leaf(struct tmem_fetch *fetch, unsigned int from, unsigned int to);
void tmem_fetch_take(struct tmem_fetch *fetch, struct tmem_fetch_sent *sent);
void tmem_fetch_lost(struct tmem_fetch *fetch, struct tmem_fetch_sent *sent);

/* implemented in breaker.c */
void tmem_breaker_note(struct tmem_dev *dev, bool late, bool awaited, u64 begin_ns, u64 sent_ns,
		       u64 end_ns);

/* implemented in bounce.c */
void tmem_fetch_release(struct tmem_fetch *fetch, struct tmem_queue *queue);

/* implemented in fetch.c */
bool tmem_fetch_start(struct tmem_fetch *fetch);

#endif /* _TMEM_GET_H */
