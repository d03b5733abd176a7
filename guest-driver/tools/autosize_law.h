/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Control law of "tmem-guest autosize": decides from samples of a guest how much page cache the
 * service reclaims next. The law is a pure function of samples and of its own state, so that a test
 * can run it against a simulated guest (tests/autosize_test.c).
 *
 * The service reclaims small steps while no task waits for memory, the pool keeps the evicted pages
 * and few of them are read again. Otherwise it pauses. Each pause raises the back-off level by 1. A
 * level doubles the next pause and halves the steps after it. The level falls by 1 when the service
 * has reclaimed without trouble for as long as the last pause.
 */
#ifndef AUTOSIZE_LAW_H
#define AUTOSIZE_LAW_H

#include <stdbool.h>
#include <stdint.h>

#define AUTOSIZE_PAGE_BYTES	4096
/* A step is this part of the file pages in memory, and at most AUTOSIZE_STEP_BYTES_MAX. */
#define AUTOSIZE_STEP_DIVISOR	256
#define AUTOSIZE_STEP_BYTES_MAX	(4ull << 20)
#define AUTOSIZE_STEP_BYTES_MIN	(128ull << 10)
/*
 * Factor of steps while the processors are idle: less than IDLE_BUSY of their time and less than
 * IDLE_BUSY_ONE of the time of one of them is in use. Large steps themselves are work for kernel
 * threads, so they go on until IDLE_BUSY_ONE is in use. If a sample comes later than GAP_S, the
 * guest did not run, and what its processors will do is not known.
 */
#define AUTOSIZE_IDLE_FACTOR	10
#define AUTOSIZE_IDLE_BUSY	0.05
#define AUTOSIZE_IDLE_BUSY_ONE	0.25
#define AUTOSIZE_GAP_S		10
/* Time for which tasks waited for memory during the last samples: wait for better times, pause. */
#define AUTOSIZE_STALL_SAMPLES	6
#define AUTOSIZE_STALL_WAIT_US	2000
#define AUTOSIZE_STALL_PAUSE_US	10000
/*
 * Recent pages are counted with a weight that halves about every RECENT_S seconds. The service
 * pauses if the pages that were read again are more than a part of those that it reclaimed, or if
 * those that the disk read again are more than a smaller part.
 */
#define AUTOSIZE_RECENT_S	60.0
#define AUTOSIZE_BACK_DIVISOR	8
#define AUTOSIZE_DISK_DIVISOR	100
#define AUTOSIZE_BACK_PAGES_MIN	256
/* The service pauses if more than this part of evicted file pages reaches no pool. */
#define AUTOSIZE_UNKEPT_DIVISOR	8
#define AUTOSIZE_UNKEPT_PAGES_MIN 1024
/* At the floor, the service begins again when the file pages exceed the floor by this part. */
#define AUTOSIZE_FLOOR_DIVISOR	8
/* Levels of back-off: halvings of the step. */
#define AUTOSIZE_LEVEL_MAX	5

enum autosize_why {
	AUTOSIZE_RETURNING,
	AUTOSIZE_BEGUN,		/* first sample */
	AUTOSIZE_BOOTING,	/* the guest has started a short time ago */
	AUTOSIZE_CACHE_OFF,	/* the driver does not put pages, or its breaker is open */
	AUTOSIZE_NO_REPORTING,	/* the balloon device does not return free memory to the host */
	AUTOSIZE_SWAP,		/* the kernel cannot reclaim files only, and there is swap */
	AUTOSIZE_FLOOR,		/* few file pages are in memory */
	AUTOSIZE_WAITING,	/* tasks waited for memory for a short time */
	/* reasons of pauses */
	AUTOSIZE_STALL,		/* tasks waited for memory */
	AUTOSIZE_BACK,		/* reclaimed pages were read again */
	AUTOSIZE_DISK,		/* reclaimed pages were read again from the disk */
	AUTOSIZE_UNKEPT,	/* evicted pages do not reach the pool */
	AUTOSIZE_NOTHING,	/* the kernel found no page to reclaim */
	/* not of the law */
	AUTOSIZE_ENDED,		/* the service ends */
	NR_AUTOSIZE_WHY
};

struct autosize_limits {
	double boot_s;		/* no reclaim before this uptime */
	double idle_s;		/* larger steps after this time without load */
	double pause_s, pause_max_s;
	uint64_t floor_bytes;	/* file pages that stay in memory */
};

/* State of a guest. Only taken, failed and hits, which the driver counts, may begin again at 0. */
struct autosize_sample {
	double now_s;			/* time since the guest's start */
	bool on, reports, swaps;	/* see CACHE_OFF, NO_REPORTING and SWAP */
	uint64_t stall_us;		/* time for which tasks waited for memory */
	uint64_t busy, ticks;		/* processor time in use, and all processor time */
	uint64_t own_busy;		/* the part of busy that the service has used */
	unsigned int cpus;
	uint64_t file_bytes;		/* file pages in memory */
	uint64_t evicted;		/* file pages that the kernel has evicted */
	uint64_t own;			/* the part of these that the service has evicted */
	uint64_t taken;			/* those that the driver sent to the pool, or cannot send */
	uint64_t failed;		/* those of them that the pool does not have: known later */
	uint64_t refaults;		/* file pages that were read again after an eviction */
	uint64_t hits;			/* pages that came from the pool */
};

/* State of the law; all fields begin as 0. */
struct autosize {
	struct autosize_sample last;
	bool begun, requested, at_floor;
	bool idle;			/* the last step was a large one */
	uint64_t stall_us[AUTOSIZE_STALL_SAMPLES];
	unsigned int next_stall;
	double busy_at_s;		/* last time at which the processors were not idle */
	double own, back, disk, evicted, kept;	/* recent pages */
	unsigned int level;
	double quiet_s;			/* time with steps since the last change of the level */
	double until_s;			/* end of the pause */
	enum autosize_why pause_why;
};

static inline double autosize_pause_s(const struct autosize_limits *limits, unsigned int level)
{
	double pause = limits->pause_s * (1u << level);

	return pause < limits->pause_max_s ? pause : limits->pause_max_s;
}

/* Adds a difference, which may be negative, to a number of recent pages, which may not. */
static inline void autosize_count(double *recent, uint64_t pages, double keep)
{
	double sum = *recent * keep + (int64_t)pages;

	*recent = sum > 0 ? sum : 0;
}

/* Forgets the recent pages, so that later pages alone decide. */
static inline void autosize_forget(struct autosize *law)
{
	law->own = 0;
	law->back = 0;
	law->disk = 0;
	law->evicted = 0;
	law->kept = 0;
}

/* Returns the number of pages that went to the pool since a sample, without those that failed. */
static inline uint64_t autosize_kept(const struct autosize_sample *now,
				     const struct autosize_sample *then)
{
	return (now->taken - then->taken) - (now->failed - then->failed);
}

/* Adds a sample to the sums of recent pages, and returns the stall during the last samples. */
static inline uint64_t autosize_add(struct autosize *law, const struct autosize_sample *now)
{
	const struct autosize_sample *last = &law->last;
	double seconds = now->now_s - last->now_s;
	double keep = AUTOSIZE_RECENT_S / (AUTOSIZE_RECENT_S + seconds);
	uint64_t refaults = now->refaults - last->refaults, hits = now->hits - last->hits;
	uint64_t disk = refaults > hits ? refaults - hits : 0, stall_us = 0;
	int64_t busy = (now->busy - last->busy) - (now->own_busy - last->own_busy);
	int64_t ticks = now->ticks - last->ticks;
	double part = AUTOSIZE_IDLE_BUSY;
	unsigned int i;

	if (now->taken < last->taken) {
		/* The module was loaded again. */
		autosize_forget(law);
	} else {
		autosize_count(&law->own, now->own - last->own, keep);
		autosize_count(&law->evicted, now->evicted - last->evicted, keep);
		autosize_count(&law->kept, autosize_kept(now, last), keep);
		autosize_count(&law->back, refaults, keep);
		autosize_count(&law->disk, disk, keep);
	}
	law->stall_us[law->next_stall] = now->stall_us - last->stall_us;
	law->next_stall = (law->next_stall + 1) % AUTOSIZE_STALL_SAMPLES;
	for (i = 0; i < AUTOSIZE_STALL_SAMPLES; i++)
		stall_us += law->stall_us[i];
	if (now->cpus && (law->idle || AUTOSIZE_IDLE_BUSY_ONE / now->cpus < part))
		part = AUTOSIZE_IDLE_BUSY_ONE / now->cpus;
	if (busy > ticks * part || seconds > AUTOSIZE_GAP_S)
		law->busy_at_s = now->now_s;
	return stall_us;
}

/* Returns the reason for which the service must begin a pause, or AUTOSIZE_RETURNING. */
static inline enum autosize_why autosize_trouble(const struct autosize *law, uint64_t stall_us)
{
	if (stall_us > AUTOSIZE_STALL_PAUSE_US)
		return AUTOSIZE_STALL;
	if (law->disk > AUTOSIZE_BACK_PAGES_MIN && law->disk > law->own / AUTOSIZE_DISK_DIVISOR)
		return AUTOSIZE_DISK;
	if (law->back > AUTOSIZE_BACK_PAGES_MIN && law->back > law->own / AUTOSIZE_BACK_DIVISOR)
		return AUTOSIZE_BACK;
	if (law->evicted > AUTOSIZE_UNKEPT_PAGES_MIN &&
	    law->evicted - law->kept > law->evicted / AUTOSIZE_UNKEPT_DIVISOR)
		return AUTOSIZE_UNKEPT;
	return AUTOSIZE_RETURNING;
}

/*
 * Returns the reason for which the service cannot reclaim, which has nothing to do with load, or
 * AUTOSIZE_RETURNING.
 */
static inline enum autosize_why autosize_obstacle(const struct autosize_limits *limits,
						  const struct autosize_sample *now)
{
	if (!now->on)
		return AUTOSIZE_CACHE_OFF;
	if (!now->reports)
		return AUTOSIZE_NO_REPORTING;
	if (now->swaps)
		return AUTOSIZE_SWAP;
	if (now->now_s < limits->boot_s)
		return AUTOSIZE_BOOTING;
	return AUTOSIZE_RETURNING;
}

/**
 * autosize_stop() - decide during a step whether to leave the rest of it
 * @begun: sample at the beginning of the step
 * @now: sample after a part of the step; both need on, stall_us, evicted, taken and failed only
 *
 * A step can be so large that the next call of autosize_step() would be too late.
 *
 * Return: true if the cache is off, tasks waited for memory, or evicted pages reach no pool.
 */
static inline bool autosize_stop(const struct autosize_sample *begun,
				 const struct autosize_sample *now)
{
	int64_t unkept = now->evicted - begun->evicted - autosize_kept(now, begun);

	return !now->on || now->stall_us - begun->stall_us > AUTOSIZE_STALL_WAIT_US ||
	       unkept > AUTOSIZE_UNKEPT_PAGES_MIN;
}

/**
 * autosize_step() - decide how much to reclaim until the next sample
 * @law: state; a caller that reclaims less than requested only makes the next steps smaller
 * @limits: settings
 * @now: a new sample
 * @why: the reason of the decision
 *
 * Return: number of bytes, 0 unless @why is AUTOSIZE_RETURNING.
 */
static inline uint64_t autosize_step(struct autosize *law, const struct autosize_limits *limits,
				     const struct autosize_sample *now, enum autosize_why *why)
{
	uint64_t step, stall_us, floor, most = AUTOSIZE_STEP_BYTES_MAX;
	bool fruitless = law->requested && now->own == law->last.own;
	double seconds = now->now_s - law->last.now_s;
	bool paused = law->last.now_s < law->until_s;
	enum autosize_why trouble;

	law->idle = law->idle && law->requested;
	law->requested = false;
	if (!law->begun) {
		law->begun = true;
		law->busy_at_s = now->now_s;
		law->last = *now;
		*why = AUTOSIZE_BEGUN;
		return 0;
	}
	stall_us = autosize_add(law, now);
	law->last = *now;
	*why = autosize_obstacle(limits, now);
	/* Pages of a time without steps say nothing about the next steps. */
	if (*why != AUTOSIZE_RETURNING || paused)
		autosize_forget(law);
	if (*why != AUTOSIZE_RETURNING)
		return 0;
	*why = law->pause_why;
	if (now->now_s < law->until_s)
		return 0;
	trouble = fruitless ? AUTOSIZE_NOTHING : autosize_trouble(law, stall_us);
	if (trouble != AUTOSIZE_RETURNING) {
		law->until_s = now->now_s + autosize_pause_s(limits, law->level);
		law->pause_why = trouble;
		law->quiet_s = 0;
		if (trouble != AUTOSIZE_NOTHING && law->level < AUTOSIZE_LEVEL_MAX)
			law->level++;
		*why = trouble;
		return 0;
	}
	*why = AUTOSIZE_WAITING;
	if (stall_us > AUTOSIZE_STALL_WAIT_US)
		return 0;
	*why = AUTOSIZE_FLOOR;
	floor = limits->floor_bytes + (law->at_floor ? limits->floor_bytes / AUTOSIZE_FLOOR_DIVISOR :
						       AUTOSIZE_STEP_BYTES_MIN);
	law->at_floor = now->file_bytes <= floor;
	if (law->at_floor)
		return 0;

	*why = AUTOSIZE_RETURNING;
	law->quiet_s += seconds;
	if (law->level && law->quiet_s >= autosize_pause_s(limits, law->level - 1)) {
		law->level--;
		law->quiet_s = 0;
	}
	step = now->file_bytes / AUTOSIZE_STEP_DIVISOR;
	law->idle = now->now_s - law->busy_at_s >= limits->idle_s;
	if (law->idle) {
		step *= AUTOSIZE_IDLE_FACTOR;
		most *= AUTOSIZE_IDLE_FACTOR;
	}
	step = (step < most ? step : most) >> law->level;
	if (step < AUTOSIZE_STEP_BYTES_MIN)
		step = AUTOSIZE_STEP_BYTES_MIN;
	if (step > now->file_bytes - limits->floor_bytes)
		step = now->file_bytes - limits->floor_bytes;
	law->requested = true;
	return step;
}

#endif /* AUTOSIZE_LAW_H */
