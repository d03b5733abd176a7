// SPDX-License-Identifier: GPL-2.0-only
/*
 * User-space tests of core/check.h: the content check and the packing of an index entry.
 *
 * The test prints its random seed, and accepts a seed as its argument.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef uint64_t u64;
typedef uint32_t u32;
typedef uint8_t u8;

#define READ_ONCE(x) (*(const volatile __typeof__(x) *)&(x))
#define OPTIMIZER_HIDE_VAR(var) __asm__("" : "=r" (var) : "0" (var))

#include "../core/check.h"

#define PAGE_BYTES	4096
#define ROUNDS		2000
#define QUEUES_MAX	16

static u64 rng_state;

/* splitmix64 (Steele, Lea, Flood 2014) */
static u64 rng(void)
{
	u64 z = rng_state += 0x9e3779b97f4a7c15ULL;

	z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ULL;
	z = (z ^ z >> 27) * 0x94d049bb133111ebULL;
	return z ^ z >> 31;
}

static void fill(void *to, size_t bytes)
{
	u64 *word = to;

	for (size_t i = 0; i < bytes / sizeof(*word); i++)
		word[i] = rng();
}

static int failures;

static void expect(int good, const char *what)
{
	if (good)
		return;
	fprintf(stderr, "FAILED: %s\n", what);
	failures++;
}

/* Adds a * b to the number in sum[], which has digits of 32 bits, by long multiplication. */
static void add_product(u32 sum[4], u64 a, u64 b)
{
	for (int i = 0; i < 4; i++) {
		u64 part = (i & 1 ? a >> 32 : (u32)a) * (i & 2 ? b >> 32 : (u32)b);
		u64 carry = 0;

		for (int at = (i & 1) + (i >> 1), digit = 0; at < 4; at++, digit++) {
			carry += sum[at] + (digit == 0 ? (u32)part : digit == 1 ? part >> 32 : 0);
			sum[at] = carry;
			carry >>= 32;
		}
	}
}

/*
 * Computes a check by the formulas of the header, without numbers of 128 bits. @key has the keys of
 * the second step.
 */
static u64 reference(const struct tmem_check_keys *keys, const u64 *key, const void *page)
{
	const u8 *byte = page;
	u32 sum[4] = { 0 };
	u64 word[2];

	for (int i = 0; i < PAGE_BYTES / 8; i += 2) {
		memcpy(word, byte + 8 * i, 16);
		add_product(sum, keys->key[i] + word[0], keys->key[i + 1] + word[1]);
	}
	return key[0] + (key[1] + sum[0]) * (key[2] + sum[1]) +
	       (key[3] + sum[2]) * (key[4] + sum[3]);
}

static void test_check(void)
{
	static u64 page[PAGE_BYTES / 8], other[PAGE_BYTES / 8];
	static struct tmem_check_keys keys;
	const u64 *end = keys.key + PAGE_BYTES / 8;
	unsigned int same_flip = 0, same_swap = 0, same_random = 0, same_zero = 0;

	for (int round = 0; round < ROUNDS; round++) {
		unsigned int bit = rng() % (PAGE_BYTES * 8), a, b;
		u32 check;

		fill(&keys, sizeof(keys));
		fill(page, sizeof(page));
		if (round % 4 == 0)	/* mostly zeroes, like pages of many files */
			memset(page, 0, PAGE_BYTES - 8 * (rng() % 8));
		check = tmem_check_page(&keys, page);
		expect(check == reference(&keys, end, page) >> 40,
		       "the check differs from the reference formula");
		expect(tmem_check64_page(&keys, page) ==
		       ((reference(&keys, end + 5, page) & 0xffffffff00000000) |
			reference(&keys, end + 10, page) >> 32),
		       "the check of 64 bits differs from the reference formula");
		expect(check < 1U << TMEM_CHECK_BITS,
		       "the check has more than TMEM_CHECK_BITS bits");

		memcpy(other, page, PAGE_BYTES);
		((u8 *)other)[bit / 8] ^= 1 << bit % 8;
		same_flip += tmem_check_page(&keys, other) == check;

		memcpy(other, page, PAGE_BYTES);
		a = rng() % (PAGE_BYTES / 8);
		b = (a + 1 + rng() % (PAGE_BYTES / 8 - 1)) % (PAGE_BYTES / 8);
		other[a] = page[b];
		other[b] = page[a];
		same_swap += page[a] != page[b] && tmem_check_page(&keys, other) == check;

		fill(other, sizeof(other));
		same_random += tmem_check_page(&keys, other) == check;
		memset(other, 0, sizeof(other));
		same_zero += !!memcmp(page, other, PAGE_BYTES) &&
			     tmem_check_page(&keys, other) == check;
	}
	/*
	 * In a round, two different pages have equal checks with probability 2^-24. In one of 10^8
	 * runs, one of the counters reaches 2 by chance.
	 */
	expect(same_flip < 2, "pages that differ in one bit have equal checks");
	expect(same_swap < 2, "pages with swapped words have equal checks");
	expect(same_random < 2, "a random page has the same check");
	expect(same_zero < 2, "a zero page has the same check");
}

static void test_entry(void)
{
	for (int round = 0; round < ROUNDS; round++) {
		unsigned int queues = 1 + rng() % QUEUES_MAX, queue = rng() % queues;
		u64 seq = rng() % ((TMEM_SEQ_MASK - queue) / queues + 1);
		u32 check = rng() & ((1U << TMEM_CHECK_BITS) - 1);
		u64 offset = tmem_cookie_offset(seq, queues, queue);
		u64 entry = tmem_entry(offset, check);

		expect(offset <= TMEM_SEQ_MASK, "the offset exceeds TMEM_SEQ_MASK");
		expect(tmem_entry_offset(entry) == offset, "the entry does not return its offset");
		expect(tmem_entry_check(entry) == check, "the entry does not return its check");
		expect(tmem_cookie_seq(offset, queues) == seq,
		       "the offset does not return its sequence number");
		expect(offset % queues == queue, "the offset does not return its queue");
		expect(tmem_cookie_offset(seq + 1, queues, queue) > offset,
		       "a later sequence number does not give a greater offset");
	}
	expect(tmem_entry_offset(tmem_entry(TMEM_SEQ_MASK, 0)) == TMEM_SEQ_MASK,
	       "the entry does not return the largest offset");
	expect(TMEM_SEQ_BITS + TMEM_CHECK_BITS == 64,
	       "sequence number and check do not fill 64 bits");
}

int main(int argc, char **argv)
{
	rng_state = argc > 1 ? strtoull(argv[1], NULL, 0) : (u64)time(NULL);
	printf("check_test: seed %llu\n", (unsigned long long)rng_state);
	test_check();
	test_entry();
	printf("check_test: %s\n", failures ? "FAILED" : "ok");
	return !!failures;
}
