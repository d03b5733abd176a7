/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Decides from the answers to references (REF) whether the driver is in fallback: gets then take
 * their pages out of the pool, because the host has lost too many of the pages that it retained.
 *
 * The file is pure arithmetic, so that tests/ can compile it in user space. The caller serializes
 * all calls but tmem_in_fallback().
 */
#ifndef _TMEM_FALLBACK_H
#define _TMEM_FALLBACK_H

#ifdef __KERNEL__
#include <linux/compiler.h>
#include <linux/types.h>
#endif

/* Number of recent answers that decide about fallback (DRV-54 in proto/SPEC.md). */
#define TMEM_REF_WINDOW		1024
/* Fallback lasts while more than one in this many of these answers are GONE. */
#define TMEM_GONE_DIVISOR	16
/*
 * In fallback, gets let the host retain one page in this many (the sample). If all pages of the
 * sample are lost, reads from the disk grow by 3.1 %. The driver counts pages. It does not choose
 * them by their place in a file, because a small working set may have no page at such a place. It
 * does not count gets, because the same small get of each read of a file could be chosen.
 */
#define TMEM_RETAIN_SAMPLE	32
/*
 * In fallback, an answer counts this many times for each page of the sample, because the page
 * stands for the gets that were not sampled. So 30 pages that the host kept end the fallback, which
 * are one in 32 of 960 pages. Without this weight, it takes 960 pages of the sample.
 *
 * The weight is limited to as many answers as the sample has pages. References to pages that the
 * host retained before the fallback may be answered in quick succession, and would otherwise end it
 * after 30 answers.
 */
#define TMEM_SAMPLE_WEIGHT	32
/* Maximum number of answers with that weight that are left; together they fill the window. */
#define TMEM_SAMPLES_MAX	(TMEM_REF_WINDOW / TMEM_SAMPLE_WEIGHT)

/**
 * struct tmem_fallback - the recent answers to references
 * @window: a bit for each of the last TMEM_REF_WINDOW answers; set for GONE
 * @at: next bit of @window to be replaced
 * @nr_gone: number of bits that are set in @window
 * @samples: number of answers that will count TMEM_SAMPLE_WEIGHT times
 */
struct tmem_fallback {
	u64 window[TMEM_REF_WINDOW / 64];
	unsigned int at;
	unsigned int nr_gone;
	unsigned int samples;
};

/*
 * Returns whether gets take their pages out of the pool. Another CPU may change the answers
 * meanwhile.
 */
static inline bool tmem_in_fallback(const struct tmem_fallback *fallback)
{
	return READ_ONCE(fallback->nr_gone) > TMEM_REF_WINDOW / TMEM_GONE_DIVISOR;
}

/*
 * Returns whether a part of a get in fallback belongs to the sample, which has one page in
 * TMEM_RETAIN_SAMPLE. @due is the number of pages of such parts, minus TMEM_RETAIN_SAMPLE for each
 * page of the sample.
 */
static inline bool tmem_fallback_chooses(int *due, unsigned int pages)
{
	*due += pages;
	if (*due <= 0)
		return false;
	*due -= TMEM_RETAIN_SAMPLE * pages;
	return true;
}

/* Records that the host may retain pages of a get in fallback. */
static inline void tmem_fallback_sample(struct tmem_fallback *fallback, unsigned int pages)
{
	fallback->samples += pages;
	if (fallback->samples > TMEM_SAMPLES_MAX)
		fallback->samples = TMEM_SAMPLES_MAX;
}

/* Records an answer to a reference. @gone: the host does not have the page. */
static inline void tmem_fallback_learn(struct tmem_fallback *fallback, bool gone)
{
	unsigned int nr = fallback->nr_gone, times = 1, at, i;
	u64 bit;

	if (!tmem_in_fallback(fallback)) {
		fallback->samples = 0;
	} else if (fallback->samples) {
		fallback->samples--;
		times = TMEM_SAMPLE_WEIGHT;
	}
	for (i = 0; i < times; i++) {
		at = fallback->at;
		bit = 1ULL << at % 64;
		nr -= !!(fallback->window[at / 64] & bit);
		nr += gone;
		if (gone)
			fallback->window[at / 64] |= bit;
		else
			fallback->window[at / 64] &= ~bit;
		fallback->at = (at + 1) % TMEM_REF_WINDOW;
	}
	WRITE_ONCE(fallback->nr_gone, nr);
}

#endif
