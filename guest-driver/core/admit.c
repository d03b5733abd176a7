// SPDX-License-Identifier: GPL-2.0-only
/*
 * Admission filter: prevents that a stream of pages that are read once pushes useful pages out of
 * the pool.
 *
 * While the host keeps all pages that it gets, the driver puts every page. A loss is a page that
 * the host no longer has. If losses outweigh hits, each new put displaces another page, and the
 * filter engages. It also engages if a full index evicts as many pages as it has, without hits.
 * The driver then puts a page only if it came from the pool, was evicted before, was used again
 * after it was read in, or belongs to the sample: one chunk (256 neighbouring blocks) in
 * ADMIT_SAMPLE. A page that the filter refuses costs one more read from the disk, because the
 * filter admits it at its next eviction. The filter disengages after ADMIT_HOLD hits for each page
 * in the index, if no loss or eviction comes between them. A stream of new pages brings no hits,
 * however long it is.
 *
 * The host does not say how many pages it will keep, so only a loss shows that the pool is full.
 * The first stream after the device appeared may therefore push out useful pages; later streams do
 * not. A put that the host refuses does not count as a loss: the host is busy, and would take the
 * page a moment later.
 *
 * The filter remembers pages that came from the pool exactly, by the page of RAM that each came
 * into. A get takes its page out of the pool. If the filter forgot such pages and refused their
 * next puts, gets would empty the pool. A page of RAM that is freed without a put keeps its bit,
 * so the filter may later admit one page without need.
 *
 * The filter remembers other evicted pages in a table of fixed size, with one bit for each page of
 * a leaf (64 neighbouring blocks). If a page of a leaf is evicted a second time, the leaf
 * keeps its place in the table. It loses the place after ADMIT_CREDIT evicted pages of other leaves
 * with the same place. The sample admits pages that are used again after the table has forgotten
 * them.
 *
 * No state is written by all CPUs for each page. A put takes no lock. It reads whether the filter
 * is engaged, and writes to the table only at the place of its leaf. Two CPUs may use one place at
 * the same moment. The leaf may then lose a bit, which costs one more read from the disk. Or it may
 * get a bit of another leaf, and the filter then admits a page without need. Gets count their
 * outcomes per CPU.
 */
#include <linux/hash.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/moduleparam.h>
#include <linux/percpu.h>
#include <linux/slab.h>
#include <linux/sysfs.h>

#include "leaf.h"

/*
 * The table has one leaf for this many pages of RAM. A leaf covers 64 neighbouring blocks,
 * so the table can remember four times as many pages as RAM has. It takes 1/4096 of RAM.
 */
#define ADMIT_RAM_PAGES		16
#define ADMIT_LEAVES_MIN	1024
#define ADMIT_LEAVES_MAX	65536
#define ADMIT_CREDIT		1024
/*
 * The filter has a bit "came from the pool" for each page frame number below the number of pages
 * of RAM times this factor. Page frame numbers exceed the number of pages, because there are holes
 * between memory banks. Memory at higher addresses, or plugged in later, has no bits.
 */
#define ADMIT_FRAMES_FACTOR	16
/*
 * While the filter is engaged, it admits all pages of one chunk (256 neighbouring blocks)
 * in this many chunks.
 */
#define ADMIT_SAMPLE		64
/*
 * Weight of a loss (a page that the host no longer has), where a hit weighs 1. The filter engages
 * when the losses outweigh the hits by more than ADMIT_ENGAGE.
 */
#define ADMIT_LOSS_WEIGHT	16
#define ADMIT_ENGAGE		1024
#define ADMIT_WEIGHT_MAX	(64 * ADMIT_ENGAGE)
/*
 * The filter disengages after this many hits for each page that the index had when the filter
 * engaged.
 */
#define ADMIT_HOLD		8
/*
 * A CPU adds its own counts of hits and losses to the sums of all CPUs when the counts have at
 * least this weight, which is the weight of one get of the largest folio. On guests of up to 16
 * CPUs, the counts that CPUs have not added yet weigh less than ADMIT_ENGAGE in total.
 */
#define ADMIT_FOLD		64

static bool admission = true;
static const char *const admission_names[] = { "off", "adaptive" };

static int set_admission(const char *value, const struct kernel_param *param)
{
	int nr = sysfs_match_string(admission_names, value);

	if (nr < 0)
		return nr;
	WRITE_ONCE(admission, nr);
	return 0;
}

static int get_admission(char *buffer, const struct kernel_param *param)
{
	return sysfs_emit(buffer, "%s\n", admission_names[READ_ONCE(admission)]);
}

static const struct kernel_param_ops admission_ops = {
	.set = set_admission,
	.get = get_admission,
};

module_param_cb(admission, &admission_ops, NULL, 0644);
MODULE_PARM_DESC(admission, "which pages are put after the host has lost pages: adaptive (default): pages that were used or evicted before, and a sample; off: all pages");

struct admit_leaf {
	u64 seen;
	u32 tag;
	u16 credit;
};

/* Hits and losses of gets on one CPU that are not yet added to struct tmem_admit. */
struct admit_cpu {
	unsigned long hits, losses;
};

struct tmem_admit {
	/*
	 * one bit for each page of RAM, set if its content came from the pool; accessed atomically
	 */
	unsigned long *back;
	unsigned long nr_frames;
	unsigned int bits;
	/* hits and losses of each CPU; used without bottom halves */
	struct admit_cpu __percpu *cpu;
	/* hits until the filter disengages, 0 if it is not engaged; read without the lock */
	u64 engaged;
	/* Leaf lock that guards weight, evicted and engaged. */
	spinlock_t lock ____cacheline_aligned_in_smp;
	/* weight of the losses minus number of hits, at least 0; read without the lock */
	long weight;
	/* pages that the index evicted minus number of hits, at least 0; read without the lock */
	long evicted;
	/* Table of evicted pages, which all CPUs read and write without a lock. */
	struct admit_leaf leaf[] ____cacheline_aligned_in_smp;
};

/* Multiplies like hash_64() but returns all 64 bits, of which the upper ones are mixed best. */
static u64 mix(u64 value)
{
	return value * GOLDEN_RATIO_64;
}

/* Returns whether the page was evicted before, and records this eviction. */
static bool seen_before(struct tmem_admit *admit, u64 hash, unsigned int bit)
{
	struct admit_leaf *leaf = &admit->leaf[hash >> (64 - admit->bits)];
	u64 seen = READ_ONCE(leaf->seen);
	u16 credit = READ_ONCE(leaf->credit);
	u32 tag = (u32)hash;

	if (READ_ONCE(leaf->tag) != tag || !seen) {
		if (credit) {
			WRITE_ONCE(leaf->credit, credit - 1);
		} else {
			WRITE_ONCE(leaf->tag, tag);
			WRITE_ONCE(leaf->seen, BIT_ULL(bit));
		}
		return false;
	}
	if (!(seen & BIT_ULL(bit))) {
		WRITE_ONCE(leaf->seen, seen | BIT_ULL(bit));
		return false;
	}
	if (credit != ADMIT_CREDIT)
		WRITE_ONCE(leaf->credit, ADMIT_CREDIT);
	return true;
}

/*
 * Remembers that a page of RAM got its content from the pool, so that its next put is admitted.
 * Context: any.
 */
void tmem_admit_back(struct tmem_dev *dev, struct page *page)
{
	unsigned long frame = page_to_pfn(page);

	if (frame < dev->admit->nr_frames)
		set_bit(frame, dev->admit->back);
}

static bool came_back(struct tmem_admit *admit, struct page *page)
{
	unsigned long frame = page_to_pfn(page);

	return frame < admit->nr_frames && test_bit(frame, admit->back) &&
	       test_and_clear_bit(frame, admit->back);
}

/*
 * Returns whether an evicted page should be put, and clears its bit "came from the pool".
 * @workingset: the page was used again after it was read in. Interrupts are off.
 */
bool tmem_admit(struct tmem_dev *dev, const struct tmem_key *key, u64 index, struct page *page,
		bool workingset)
{
	u64 object = mix(mix(key->object) + key->pool->serial);
	u64 hash = mix(object ^ index >> LEAF_SHIFT);
	u64 chunk = mix(object ^ index >> VIRTIO_TMEM_CHUNK_SHIFT) >> 32;
	struct tmem_admit *admit = dev->admit;
	bool back = came_back(admit, page);
	bool seen = seen_before(admit, hash, index & (LEAF_PAGES - 1));

	return !READ_ONCE(admit->engaged) || back || seen || workingset ||
	       !READ_ONCE(admission) || !(chunk % ADMIT_SAMPLE);
}

/* Returns the number of hits for which the filter stays engaged. */
static u64 hold_hits(void)
{
	return max_t(u64, tmem_index_pages(), LEAF_PAGES) * ADMIT_HOLD;
}

/*
 * Adds the hits and losses of one CPU to the sums of all CPUs, and engages or disengages the
 * filter.
 */
static void fold(struct tmem_admit *admit, unsigned long hits, unsigned long losses)
{
	long weight, evicted;
	u64 engaged;

	spin_lock_bh(&admit->lock);
	weight = admit->weight + losses * ADMIT_LOSS_WEIGHT;
	weight = clamp_t(long, weight - (long)hits, 0, ADMIT_WEIGHT_MAX);
	WRITE_ONCE(admit->weight, weight);
	evicted = max(admit->evicted - (long)hits, 0L);
	WRITE_ONCE(admit->evicted, evicted);
	engaged = admit->engaged - min_t(u64, admit->engaged, hits);
	if (losses && weight > ADMIT_ENGAGE)
		engaged = hold_hits();
	WRITE_ONCE(admit->engaged, engaged);
	spin_unlock_bh(&admit->lock);
}

/* Records that the full index evicted pages. Context: process. */
void tmem_admit_count_evictions(struct tmem_dev *dev, unsigned long pages)
{
	/*
	 * The filter engages if as many pages as the index had were evicted, without hits in
	 * between. A full index evicts a part of itself at a time, which alone does not show that
	 * the puts are useless.
	 */
	long most = max(tmem_index_pages() + (long)pages, (long)ADMIT_ENGAGE);
	struct tmem_admit *admit = dev->admit;
	long evicted;

	if (!pages)
		return;
	spin_lock_bh(&admit->lock);
	evicted = min_t(long, admit->evicted + pages, 2 * most);
	WRITE_ONCE(admit->evicted, evicted);
	if (evicted > most)
		WRITE_ONCE(admit->engaged, hold_hits());
	spin_unlock_bh(&admit->lock);
}

/*
 * Records how many pages of a get the host returned (hits), and how many it did not have although
 * the driver had not invalidated them (losses). A hit changes nothing while the filter is
 * disengaged and no loss or eviction is recorded. Context: process or softirq.
 */
void tmem_admit_learn(struct tmem_dev *dev, unsigned long hits, unsigned long losses)
{
	struct tmem_admit *admit = dev->admit;
	struct admit_cpu *own;

	if (!hits && !losses)
		return;
	local_bh_disable();
	own = this_cpu_ptr(admit->cpu);
	if (losses || own->losses || READ_ONCE(admit->weight) || READ_ONCE(admit->evicted) ||
	    READ_ONCE(admit->engaged)) {
		own->hits += hits;
		own->losses += losses;
		if (own->hits + own->losses * ADMIT_LOSS_WEIGHT >= ADMIT_FOLD) {
			fold(admit, own->hits, own->losses);
			*own = (struct admit_cpu){};
		}
	}
	local_bh_enable();
}

/* Returns the number of page frames that can have a bit "came from the pool". */
static unsigned long frames(void)
{
	unsigned long end = 0;
	int node;

	for_each_online_node(node)
		end = max(end, node_end_pfn(node));
	return min(end, totalram_pages() * ADMIT_FRAMES_FACTOR);
}

/*
 * Allocates the filter's table and its bitmap of page frames, and adds their size to
 * dev->memory_bytes. Returns 0 or -ENOMEM.
 */
int tmem_admit_init(struct tmem_dev *dev)
{
	unsigned long nr = clamp_t(unsigned long, totalram_pages() / ADMIT_RAM_PAGES,
				   ADMIT_LEAVES_MIN, ADMIT_LEAVES_MAX);
	unsigned int bits = ilog2(nr);
	size_t bytes = struct_size(dev->admit, leaf, 1UL << bits);
	unsigned long nr_frames = frames();
	size_t bitmap_bytes = BITS_TO_LONGS(nr_frames) * sizeof(long);

	dev->admit = kvzalloc(bytes, GFP_KERNEL);
	if (!dev->admit)
		return -ENOMEM;
	spin_lock_init(&dev->admit->lock);
	dev->admit->bits = bits;
	dev->admit->back = kvzalloc(bitmap_bytes, GFP_KERNEL);
	if (!dev->admit->back)
		return -ENOMEM;
	dev->admit->nr_frames = nr_frames;
	dev->admit->cpu = alloc_percpu(struct admit_cpu);
	if (!dev->admit->cpu)
		return -ENOMEM;
	dev->memory_bytes += bytes + bitmap_bytes + num_possible_cpus() * sizeof(struct admit_cpu);
	return 0;
}

void tmem_admit_exit(struct tmem_dev *dev)
{
	if (dev->admit) {
		free_percpu(dev->admit->cpu);
		kvfree(dev->admit->back);
	}
	kvfree(dev->admit);
}
