/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * State of a get, which the files that request pages, take answers and wait for them share.
 */
#ifndef _TMEM_GET_H
#define _TMEM_GET_H

#include "core.h"

/*
 * Maximum number of requests in flight of one get. They bring 4 MiB of pages, the largest readahead
 * in use.
 */
#define TMEM_GET_BURST		16

/* A request in flight of a get. */
struct tmem_get_sent {
	/* NULL if the request was abandoned: it belongs to the device, and so do its fields */
	struct tmem_get_req *get;
	u64 object;
	unsigned int first;		/* first page, counted from the first page of the get */
	unsigned int count;
};

/* State of one get. */
struct tmem_get_call {
	struct tmem_dev *dev;
	const struct tmem_key *key;
	pgoff_t index;
	struct page **pages;
	unsigned long *want;
	pgoff_t inside_end;
	u64 generation;
	u64 deadline_ns;
	u32 bucket;			/* bucket of the inode in the index */
	/* Called when TMEM_GET_BURST requests are in flight, to finish them. */
	void (*full)(struct tmem_get_call *call);
	struct tmem_get_sent sent[TMEM_GET_BURST];
	unsigned int nr_sent;
	unsigned int hits;
	unsigned int lost;		/* pages that the host reported as missing */
	bool late;
	bool answered;			/* at least one answer came in time */
};

/* Returns whether a get request is answered. */
static inline bool tmem_get_done(struct tmem_get_req *get)
{
	/* Read the answer after the state; pairs with tmem_bounce_answered(). */
	return smp_load_acquire(&get->req.state) == TMEM_REQ_DONE;
}

/* implemented in request.c */
u64 tmem_get_span_ns(void);
u64 tmem_get_spin_ns(void);
int tmem_get_submit(struct tmem_dev *dev, struct tmem_get_req *get, u64 generation, u32 pool);
bool tmem_get_abandon(struct tmem_get_req *get);
bool tmem_get_wait(struct tmem_get_req *get, u64 spin_until_ns, u64 deadline_ns);
void tmem_get_count_wait(u64 waited_ns);
void tmem_get_miss(struct tmem_get_call *call, unsigned int i, enum tmem_stat why);
void tmem_get_unit(struct tmem_get_call *call, unsigned int from, unsigned int to);
void tmem_get_take(struct tmem_get_call *call, struct tmem_get_sent *sent);
void tmem_get_lost(struct tmem_get_call *call, struct tmem_get_sent *sent);
void tmem_get_trace(const struct tmem_key *key, pgoff_t index, unsigned int wanted,
		    unsigned int hits, u64 begin_ns);

/* implemented in breaker.c */
void tmem_breaker_note(struct tmem_dev *dev, bool late, u64 waited_ns, u64 host_ns);

#endif /* _TMEM_GET_H */
