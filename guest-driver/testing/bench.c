// SPDX-License-Identifier: GPL-2.0-only
/*
 * Micro-benchmarks for the programs in tests/bench. Writing to the parameter test_bench runs them.
 * Reading the parameter returns the medians.
 *
 * The clock is the TSC. It measures time on hardware and under plain emulation; under QEMU's
 * -icount it counts the instructions that the guest executed. Interrupts are off during a sample.
 */
#include <linux/delay.h>
#include <linux/err.h>
#include <linux/mm.h>
#include <linux/moduleparam.h>
#include <linux/mutex.h>
#include <linux/prandom.h>
#include <linux/slab.h>
#include <linux/sort.h>
#include <linux/timex.h>
#include <linux/uaccess.h>

#include "../core/core.h"
#include "../hooks/blocks.h"

/* Number of samples of each kind, of which the median is reported. */
#define BENCH_SAMPLES		1024
/* Number of puts in a sample: a quarter of a full batch. */
#define BENCH_PUTS		16
/*
 * Number of pages that are put once when they are cold. They exceed the processor's second-level
 * cache, as pages that reclaim evicts are usually not in the cache.
 */
#define BENCH_COLD_PAGES	BENCH_SAMPLES
/* First block of the cold pages. No area has these blocks. */
#define BENCH_COLD_BLOCK	(U32_MAX - BENCH_COLD_PAGES)
/*
 * Maximum number of attempts at a put, 1 ms apart, while the ring is full or the host has no pool
 * yet.
 */
#define BENCH_RETRIES		10000
/* Objects of the index, for puts of hot and of cold pages. */
#define BENCH_OBJECT		12
#define BENCH_OBJECT_COLD	14
/* Number of pages of the hot puts: every second page below this number. */
#define BENCH_HELD_END		4096

enum bench_kind {
	BENCH_COPY,		/* copy_page() */
	BENCH_COPY_CHECK,	/* copy of a put, which computes the content check */
	BENCH_PUT,
	/* put of a page that is not in the processor's cache, and equals its record */
	BENCH_PUT_COLD,
	BENCH_PUT_OFF,		/* part of BENCH_PUT_COLD during which interrupts are off */
	NR_BENCH
};

static const char *const bench_name[NR_BENCH] = {
	"copy", "copy_check", "put", "put_cold", "put_off",
};

static DEFINE_MUTEX(bench_lock);
static u64 bench_median[NR_BENCH];

struct bench {
	struct tmem_key key;
	struct page *from, *to;
	struct page *cold[BENCH_COLD_PAGES];
	u64 cold_check[BENCH_COLD_PAGES];
	struct rnd_state rnd;
	u64 next_put;
	u64 *sample[NR_BENCH];
	u64 check;
	unsigned long left;
};

/* Reads the TSC. On user-mode Linux get_cycles() is always 0. */
static u64 bench_ticks(void)
{
#ifdef CONFIG_UML
	return __builtin_ia32_rdtsc();
#else
	return get_cycles();
#endif
}

static int bench_puts(struct bench *bench, unsigned int at)
{
	unsigned int i, retries = BENCH_RETRIES;
	unsigned long flags;
	void *from = page_address(bench->from), *to = page_address(bench->to);
	u64 t[4];
	struct tmem_evicted evicted;
	bool put;

	for (i = 0; i < BENCH_PUTS; i++) {
		prandom_bytes_state(&bench->rnd, from, sizeof(u64));
		local_irq_save(flags);
		t[0] = bench_ticks();
		copy_page(to, from);
		t[1] = bench_ticks();
		/* Use the results; otherwise the compiler would not compute the check. */
		bench->left += copy_mc_to_kernel(to, from, PAGE_SIZE);
		bench->check += tmem_check_page(&tmem_keys, to);
		t[2] = bench_ticks();
		evicted = (struct tmem_evicted){ .page = bench->from };
		put = tmem_evicted_read(&evicted) &&
		      tmem_put(&bench->key, bench->next_put * 2 % BENCH_HELD_END, &evicted, false);
		t[3] = bench_ticks();
		local_irq_restore(flags);
		tmem_put_end();
		if (!put) {
			if (!retries--)
				return -EAGAIN;
			fsleep(USEC_PER_MSEC);
			i--;
			continue;
		}
		bench->next_put++;
		bench->sample[BENCH_COPY][at + i] = t[1] - t[0];
		bench->sample[BENCH_COPY_CHECK][at + i] = t[2] - t[1];
		bench->sample[BENCH_PUT][at + i] = t[3] - t[2];
	}
	return 0;
}

/* Records a page of the puts of cold pages as written to its block, without reading the page. */
static void bench_record(struct bench *bench, unsigned int at)
{
	u32 block = BENCH_COLD_BLOCK + at;

	tmem_record_flush(block, tmem_record_write(block, bench->cold[at]), bench->cold_check[at],
			  bench->cold[at]);
}

/* Arguments and result of bench_put_block(). */
struct bench_put {
	struct tmem_key key;
	struct tmem_evicted evicted;
	bool taken;
};

static void bench_put_block(u32 block, void *arg)
{
	struct bench_put *put = arg;

	put->taken = tmem_put(&put->key, block - BENCH_COLD_BLOCK, &put->evicted, false);
}

/*
 * Puts a page that is not in the processor's cache, if it equals the record of its block. If the
 * ring does not take the page, the function puts it again.
 */
static int bench_cold(struct bench *bench, unsigned int at)
{
	unsigned int retries = BENCH_RETRIES;
	struct bench_put put = { .key = bench->key };
	unsigned long flags;
	u64 t[3];

	put.key.object = BENCH_OBJECT_COLD;
	do {
		put.evicted = (struct tmem_evicted){ .page = bench->cold[at] };
		/* The driver leaves interrupts on during the first step. */
		local_irq_save(flags);
		t[0] = bench_ticks();
		if (tmem_evicted_read(&put.evicted)) {
			t[1] = bench_ticks();
			tmem_record_compare(BENCH_COLD_BLOCK + at, &put.evicted, bench_put_block,
					    &put);
			t[2] = bench_ticks();
		}
		local_irq_restore(flags);
		tmem_put_end();
		if (put.taken) {
			bench->sample[BENCH_PUT_COLD][at] = t[2] - t[0];
			bench->sample[BENCH_PUT_OFF][at] = t[2] - t[1];
			return 0;
		}
		fsleep(USEC_PER_MSEC);
		bench_record(bench, at);
	} while (retries--);
	return -EAGAIN;
}

static int bench_compare(const void *a, const void *b)
{
	u64 x = *(const u64 *)a, y = *(const u64 *)b;

	return x < y ? -1 : x > y;
}

static int bench_measure(struct bench *bench)
{
	unsigned int i, kind;
	int err;

	/* Fill the index before the measurement, so that all measured puts replace entries. */
	for (i = 0; i < BENCH_HELD_END / 2; i += BENCH_PUTS) {
		err = bench_puts(bench, i % BENCH_SAMPLES);
		if (err)
			return err;
	}
	for (i = 0; i < BENCH_SAMPLES; i++) {
		err = bench_cold(bench, i);
		if (err)
			return err;
		cond_resched();
	}
	for (kind = 0; kind < NR_BENCH; kind++) {
		sort(bench->sample[kind], BENCH_SAMPLES, sizeof(u64), bench_compare, NULL);
		bench_median[kind] = bench->sample[kind][BENCH_SAMPLES / 2];
	}
	return 0;
}

static int bench_run(void)
{
	struct bench *bench = kzalloc(sizeof(*bench), GFP_KERNEL);
	int err = -ENOMEM;
	unsigned int i;

	if (!bench)
		return -ENOMEM;
	bench->from = alloc_page(GFP_KERNEL);
	bench->to = alloc_page(GFP_KERNEL);
	bench->key = (struct tmem_key){ tmem_pool_new("bench", false), BENCH_OBJECT };
	for (i = 0; i < NR_BENCH; i++) {
		bench->sample[i] = kvcalloc(BENCH_SAMPLES, sizeof(u64), GFP_KERNEL);
		if (!bench->sample[i])
			goto out;
	}
	for (i = 0; i < BENCH_COLD_PAGES; i++) {
		bench->cold[i] = alloc_page(GFP_KERNEL);
		if (!bench->cold[i])
			goto out;
	}
	if (!bench->from || !bench->to || IS_ERR_OR_NULL(bench->key.pool))
		goto out;
	/* Use a fixed seed, because no result depends on the random numbers. */
	prandom_seed_state(&bench->rnd, BENCH_OBJECT);
	prandom_bytes_state(&bench->rnd, page_address(bench->from), PAGE_SIZE);
	for (i = 0; i < BENCH_COLD_PAGES; i++) {
		prandom_bytes_state(&bench->rnd, page_address(bench->cold[i]), PAGE_SIZE);
		bench->cold_check[i] = tmem_check64_page(&tmem_keys, page_address(bench->cold[i]));
		bench_record(bench, i);
	}
	err = bench_measure(bench);
out:
	tmem_record_erase(BENCH_COLD_BLOCK, BENCH_COLD_PAGES);
	if (!IS_ERR_OR_NULL(bench->key.pool))
		tmem_pool_free(bench->key.pool);
	for (i = 0; i < NR_BENCH; i++)
		kvfree(bench->sample[i]);
	for (i = 0; i < BENCH_COLD_PAGES; i++)
		if (bench->cold[i])
			__free_page(bench->cold[i]);
	if (bench->from)
		__free_page(bench->from);
	if (bench->to)
		__free_page(bench->to);
	kfree(bench);
	return err;
}

static int set_bench(const char *value, const struct kernel_param *param)
{
	int err;

	mutex_lock(&bench_lock);
	err = bench_run();
	mutex_unlock(&bench_lock);
	return err;
}

/* Prints a line for each kind: name and median. */
static int get_bench(char *buffer, const struct kernel_param *param)
{
	unsigned int i;
	int len = 0;

	mutex_lock(&bench_lock);
	for (i = 0; i < NR_BENCH; i++)
		len += sysfs_emit_at(buffer, len, "%s %llu\n", bench_name[i], bench_median[i]);
	mutex_unlock(&bench_lock);
	return len;
}

static const struct kernel_param_ops bench_ops = {
	.set = set_bench,
	.get = get_bench,
};
module_param_cb(test_bench, &bench_ops, NULL, 0600);
MODULE_PARM_DESC(test_bench, "TEST: runs micro-benchmarks; any value");
