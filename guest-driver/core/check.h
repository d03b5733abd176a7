/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Keyed content check of a page, and the packing of a check and a cookie into one index entry.
 *
 * This file is pure arithmetic, so that tests/ can compile it in user space. The check is computed
 * in two steps with random 64-bit keys. The first step is NH over the 512 64-bit words of a page:
 *	sum of (key[2i] + word[2i] mod 2^64) * (key[2i+1] + word[2i+1] mod 2^64)  mod 2^128
 * Two different pages have the same sum with probability 2^-64 at most (J. Black, S. Halevi, H.
 * Krawczyk, T. Krovetz and P. Rogaway, "UMAC: Fast and secure message authentication", CRYPTO
 * 1999). The second step is Multilinear-HM over the four 32-bit words of that sum:
 *	k[0] + (k[1] + w[0]) * (k[2] + w[1]) + (k[3] + w[2]) * (k[4] + w[3])  mod 2^64
 * The upper 32 bits of the result are strongly universal (D. Lemire and O. Kaser, "Strongly
 * universal string hashing is fast", The Computer Journal 57(11), 2014). A strongly universal hash
 * stays so when it is truncated, so 24 bits are kept. A wrong page that was chosen without
 * knowledge of the keys passes with probability 2^-24 + 2^-64.
 *
 * NH needs one multiplication for 16 bytes. The speed matters because the check is the longest part
 * of a put.
 *
 * Never use the check as a lookup key or send it to the host.
 */
#ifndef _TMEM_CHECK_H
#define _TMEM_CHECK_H

#ifdef __KERNEL__
#include <linux/compiler.h>
#include <linux/types.h>
#endif

#define TMEM_CHECK_WORDS	(4096 / 8)
#define TMEM_CHECK_END_KEYS	5
/* keys of the first step, of the second step, and of the two second steps of 64 bits */
#define TMEM_CHECK_KEYS		(TMEM_CHECK_WORDS + 3 * TMEM_CHECK_END_KEYS)

#define TMEM_CHECK_BITS		24
/*
 * Number of bits of a sequence number. A queue can number 2^40 puts, which last over four months at
 * 100,000 puts per second. The driver then empties the cache and numbers from 0 again.
 */
#define TMEM_SEQ_BITS		40
#define TMEM_SEQ_MASK		((1ULL << TMEM_SEQ_BITS) - 1)

struct tmem_check_keys {
	u64 key[TMEM_CHECK_KEYS];
};

/*
 * Computes the second step of the check, Multilinear-HM over the four words of the NH sum. The
 * upper 32 bits of the result are strongly universal. @key has five keys.
 */
static inline u64 tmem_check_end(const u64 *key, __uint128_t sum)
{
	u64 low = sum, high = sum >> 64;

	return key[0] + (key[1] + (u32)low) * (key[2] + (low >> 32)) +
	       (key[3] + (u32)high) * (key[4] + (high >> 32));
}

/* Computes the first step of the check, NH over a page of 4096 bytes. */
static inline __uint128_t tmem_check_sum(const struct tmem_check_keys *keys, const void *page)
{
	const u64 *from = page, *key = keys->key;
	__uint128_t sum = 0;
	int i;

	/*
	 * Hide both pointers from the optimizer. Otherwise GCC computes the address of each word of
	 * the page from that of its key. That would be a fifth of the loop's instructions.
	 */
	OPTIMIZER_HIDE_VAR(from);
	OPTIMIZER_HIDE_VAR(key);
#pragma GCC unroll 4	/* otherwise a third of the instructions would only control the loop */
	for (i = 0; i < TMEM_CHECK_WORDS; i += 2) {
		u64 a = READ_ONCE(from[i]);
		u64 b = READ_ONCE(from[i + 1]);

		sum += (__uint128_t)(key[i] + a) * (key[i + 1] + b);
	}
	return sum;
}

/* Both content checks of a page. */
struct tmem_checks {
	u32 check;		/* below 2^TMEM_CHECK_BITS */
	u64 check64;
};

/*
 * Computes both content checks of a page of 4096 bytes. The check of 64 bits is two second steps
 * with independent keys, 32 bits of each. Two different pages have the same one with probability
 * 2^-63 at most.
 */
static inline struct tmem_checks tmem_checks_page(const struct tmem_check_keys *keys,
						  const void *page)
{
	__uint128_t sum = tmem_check_sum(keys, page);
	const u64 *end = keys->key + TMEM_CHECK_WORDS, *high = end + TMEM_CHECK_END_KEYS;
	const u64 *low = high + TMEM_CHECK_END_KEYS;

	return (struct tmem_checks){
		.check = tmem_check_end(end, sum) >> (64 - TMEM_CHECK_BITS),
		.check64 = (tmem_check_end(high, sum) & ~(u64)(u32)-1) |
			   tmem_check_end(low, sum) >> 32,
	};
}

/* Computes the content check of a page, which is below 2^TMEM_CHECK_BITS. */
static inline u32 tmem_check_page(const struct tmem_check_keys *keys, const void *page)
{
	return tmem_checks_page(keys, page).check;
}

/* Computes the content check of 64 bits of a page. */
static inline u64 tmem_check64_page(const struct tmem_check_keys *keys, const void *page)
{
	return tmem_checks_page(keys, page).check64;
}

/*
 * A cookie is base + seq * nr_queues + queue. It is unique. The cookies of one key grow, because
 * all puts of a key go to one queue. A cookie also identifies the ring slot while the page is in
 * the ring. An index entry has the content check and the cookie's offset from base.
 */

/*
 * Returns the offset of a put's cookie from the cookie base. An offset above TMEM_SEQ_MASK must not
 * be used. @seq is the number of the put in its queue. @queue is below @nr_queues.
 */
static inline u64 tmem_cookie_offset(u64 seq, unsigned int nr_queues, unsigned int queue)
{
	return seq * nr_queues + queue;
}

/* Returns the sequence number of a put from its cookie offset. */
static inline u64 tmem_cookie_seq(u64 offset, unsigned int nr_queues)
{
	return offset / nr_queues;
}

/* Packs an index entry from a cookie offset and a content check. */
static inline u64 tmem_entry(u64 offset, u32 check)
{
	return (u64)check << TMEM_SEQ_BITS | offset;
}

/* Returns the cookie offset of an index entry. */
static inline u64 tmem_entry_offset(u64 entry)
{
	return entry & TMEM_SEQ_MASK;
}

/* Returns the content check of an index entry. */
static inline u32 tmem_entry_check(u64 entry)
{
	return entry >> TMEM_SEQ_BITS;
}

#endif /* _TMEM_CHECK_H */
