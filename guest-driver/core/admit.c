// SPDX-License-Identifier: GPL-2.0-only
/*
 * Admission filter: keeps a stream that is read once from pushing useful pages out of the pool.
 *
 * While the host keeps all pages that it gets, the driver puts every page. A loss is a page that
 * the host no longer has, or that the index evicted itself. If losses outweigh hits, each new put
 * displaces another page, and the filter engages. The driver then puts a page only if it came from
 * the pool, was evicted before, was active, or belongs to one chunk in ADMIT_SAMPLE. A page that
 * the filter refuses costs one more read from the disk, because its next eviction is its second.
 * The filter disengages after ADMIT_HOLD hits for each page held, if no loss comes between them. A
 * stream brings no hits, however long it is.
 *
 * The host does not say how many pages it will keep, so only a loss shows it. The first stream
 * after the device appeared may therefore do harm; later ones do not. A refused put does not count
 * as a loss: the host is busy, and would take the page a moment later.
 *
 * The filter remembers pages that came from the pool exactly, by the page of RAM that each came
 * into. A get takes its page out of the pool, so a pool whose pages were forgotten would drain
 * while it serves. RAM that is freed in another way keeps its mark, which lets one page in without
 * need.
 *
 * Other evicted pages are remembered in a fixed table, with one bit for each page of a leaf. A leaf
 * that was evicted a second time defends its place against ADMIT_CREDIT puts of other leaves. Pages
 * whose reuse is farther away than the table remembers come in through the sample.
 *
 * No state is written by all CPUs for each page. A put takes no lock. It reads whether the filter
 * is engaged, and writes to the table only at the place of its leaf. Two CPUs may use one place at
 * the same moment. The leaf may then lose a bit, which costs one more read from the disk. Or it may
 * get a bit of another leaf, which lets a page in without need. Gets count their outcomes per CPU.
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
 * The table has one leaf for this many pages of RAM: it remembers 4 times RAM and takes 1/4096 of
 * it.
 */
#define ADMIT_RAM_PAGES		16
#define ADMIT_LEAVES_MIN	1024
#define ADMIT_LEAVES_MAX	65536
#define ADMIT_CREDIT		1024
/*
 * Marks are kept by page frame number, up to this many times RAM, because there are holes between
 * memory banks. Memory above that, or plugged later, has no marks.
 */
#define ADMIT_FRAMES_FACTOR	16
/* One chunk in this many is put although the filter is engaged. */
#define ADMIT_SAMPLE		64
/*
 * A loss weighs as much as this many hits. The filter engages when losses outweigh hits by more
 * than ADMIT_ENGAGE.
 */
#define ADMIT_LOSS_WEIGHT	16
#define ADMIT_ENGAGE		1024
#define ADMIT_WEIGHT_MAX	(64 * ADMIT_ENGAGE)
/* Hits until the filter disengages, for each page held when it engaged. */
#define ADMIT_HOLD		8
/*
 * A CPU adds its outcomes to those of all CPUs when they weigh this much: as a get of the largest
 * folio does. The delay of all CPUs together is less than ADMIT_ENGAGE on guests of 16 CPUs.
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
MODULE_PARM_DESC(admission, "Which pages are put once the host does not keep all: adaptive (default): those evicted before; off: all");

struct admit_leaf {
	u64 seen;
	u32 tag;
	u16 credit;
};

/* Outcomes on one CPU that are not in weight and engaged yet. */
struct admit_cpu {
	unsigned long hits, losses;
};

struct tmem_admit {
	unsigned long *back;		/* marks, one bit for each page of RAM; atomic */
	unsigned long nr_frames;
	unsigned int bits;
	struct admit_cpu __percpu *cpu;	/* used with preemption disabled */
	u64 engaged;			/* hits until the filter disengages; read without lock */
	/* Guards weight and engaged; leaf lock. */
	spinlock_t lock ____cacheline_aligned_in_smp;
	long weight;			/* weight of losses, less hits; read without lock */
	/* Read and written without a lock. */
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

/**
 * tmem_admit_back() - remember that a page came from the pool and should go back there
 * @dev: the device
 * @page: page of RAM that has the content now
 *
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

/**
 * tmem_moved() - move the mark of a page that tmem_get() brought to another page
 * @from: the page that tmem_get() filled
 * @to: the page of the page cache that has the content now
 *
 * Context: any.
 */
void tmem_moved(struct page *from, struct page *to)
{
	struct tmem_dev *dev;

	rcu_read_lock();
	dev = rcu_dereference(tmem_device);
	if (dev && came_back(dev->admit, from))
		tmem_admit_back(dev, to);
	rcu_read_unlock();
}

/**
 * tmem_admit() - decide whether an evicted page should be put
 * @dev: the device
 * @key: pool and inode
 * @index: page number
 * @page: the page; its mark is cleared
 * @workingset: the page was used again after it was read in
 *
 * Context: interrupts are off.
 *
 * Return: false if the page should not be put.
 */
bool tmem_admit(struct tmem_dev *dev, const struct tmem_key *key, u64 index, struct page *page,
		bool workingset)
{
	u64 inode = mix(mix(key->ino) + key->pool->serial);
	u64 hash = mix(inode ^ index >> LEAF_SHIFT);
	u64 chunk = mix(inode ^ index >> VIRTIO_TMEM_CHUNK_SHIFT) >> 32;
	struct tmem_admit *admit = dev->admit;
	bool back = came_back(admit, page);
	bool seen = seen_before(admit, hash, index & (LEAF_PAGES - 1));

	return !READ_ONCE(admit->engaged) || back || seen || workingset ||
	       !READ_ONCE(admission) || !(chunk % ADMIT_SAMPLE);
}

/* Adds the outcomes of one CPU to those of all CPUs, and engages or disengages the filter. */
static void fold(struct tmem_admit *admit, unsigned long hits, unsigned long losses)
{
	u64 engaged;
	long weight;

	spin_lock(&admit->lock);
	weight = admit->weight + losses * ADMIT_LOSS_WEIGHT;
	weight = clamp_t(long, weight - (long)hits, 0, ADMIT_WEIGHT_MAX);
	WRITE_ONCE(admit->weight, weight);
	engaged = admit->engaged - min_t(u64, admit->engaged, hits);
	if (losses && weight > ADMIT_ENGAGE)
		engaged = max_t(u64, tmem_index_pages(), LEAF_PAGES) * ADMIT_HOLD;
	WRITE_ONCE(admit->engaged, engaged);
	spin_unlock(&admit->lock);
}

/**
 * tmem_admit_learn() - record the outcome of requests for pages that the index had
 * @dev: the device
 * @hits: pages that the host returned
 * @losses: pages that were gone although they had not been invalidated
 *
 * While the filter is idle, as it is while the host keeps all pages, a hit changes nothing.
 *
 * Context: process.
 */
void tmem_admit_learn(struct tmem_dev *dev, unsigned long hits, unsigned long losses)
{
	struct tmem_admit *admit = dev->admit;
	struct admit_cpu *own;

	if (!hits && !losses)
		return;
	own = get_cpu_ptr(admit->cpu);
	if (losses || own->losses || READ_ONCE(admit->weight) || READ_ONCE(admit->engaged)) {
		own->hits += hits;
		own->losses += losses;
		if (own->hits + own->losses * ADMIT_LOSS_WEIGHT >= ADMIT_FOLD) {
			fold(admit, own->hits, own->losses);
			*own = (struct admit_cpu){};
		}
	}
	put_cpu_ptr(admit->cpu);
}

/* Returns the number of pages of RAM that can have a mark. */
static unsigned long frames(void)
{
	unsigned long end = 0;
	int node;

	for_each_online_node(node)
		end = max(end, node_end_pfn(node));
	return min(end, totalram_pages() * ADMIT_FRAMES_FACTOR);
}

/**
 * tmem_admit_init() - allocate the filter's table and marks
 * @dev: the device; its memory_bytes grow
 *
 * Return: 0 or -ENOMEM.
 */
int tmem_admit_init(struct tmem_dev *dev)
{
	unsigned long nr = clamp_t(unsigned long, totalram_pages() / ADMIT_RAM_PAGES,
				   ADMIT_LEAVES_MIN, ADMIT_LEAVES_MAX);
	unsigned int bits = ilog2(nr);
	size_t bytes = struct_size(dev->admit, leaf, 1UL << bits);
	unsigned long nr_frames = frames();
	size_t mark_bytes = BITS_TO_LONGS(nr_frames) * sizeof(long);

	dev->admit = kvzalloc(bytes, GFP_KERNEL);
	if (!dev->admit)
		return -ENOMEM;
	spin_lock_init(&dev->admit->lock);
	dev->admit->bits = bits;
	dev->admit->back = kvzalloc(mark_bytes, GFP_KERNEL);
	if (!dev->admit->back)
		return -ENOMEM;
	dev->admit->nr_frames = nr_frames;
	dev->admit->cpu = alloc_percpu(struct admit_cpu);
	if (!dev->admit->cpu)
		return -ENOMEM;
	dev->memory_bytes += bytes + mark_bytes + num_possible_cpus() * sizeof(struct admit_cpu);
	return 0;
}

/**
 * tmem_admit_exit() - free the filter's table and marks
 * @dev: the device
 */
void tmem_admit_exit(struct tmem_dev *dev)
{
	if (dev->admit) {
		free_percpu(dev->admit->cpu);
		kvfree(dev->admit->back);
	}
	kvfree(dev->admit);
}
