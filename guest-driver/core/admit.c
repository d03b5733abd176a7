// SPDX-License-Identifier: GPL-2.0-only
/*
 * Admission: keeps a stream that is read once from flushing what is useful out of the pool.
 *
 * As long as the host keeps what it is given, every page is put. When pages that the index has are
 * lost, at the host or by the index's own eviction, and losses outweigh hits, what is put now
 * pushes out something else, and the filter engages: a page is then put only if it came from the
 * pool, was evicted before, was active, or belongs to one chunk in ADMIT_SAMPLE. A page turned down
 * costs one more read from disk, since its next eviction is its second. The filter lets go after
 * ADMIT_HOLD hits for each page held, without losses between them: a stream brings no hits, however
 * long it is.
 *
 * The host does not say how much it will keep, so that only a loss can tell: the first stream after
 * the device came may do harm, those after it do not. That a put is refused is no loss here: the
 * host is busy, and would take the page a moment later.
 *
 * What came from the pool is remembered exactly, by the page of RAM that it came into: a get takes
 * it out of the pool, so that a pool whose pages were forgotten would drain while it serves. RAM
 * that is freed otherwise keeps its mark, which lets one page in without need.
 *
 * What else was evicted before is remembered in a fixed table, a bit for each page of a leaf; a
 * leaf that came again defends its place against ADMIT_CREDIT puts of others. Those with reuse
 * farther away than the table remembers come in by the sample.
 */
#include <linux/hash.h>
#include <linux/mm.h>
#include <linux/mmzone.h>
#include <linux/slab.h>

#include "leaf.h"

/* One leaf for so many pages of RAM: what is remembered is 4 times RAM, for 1/4096 of it. */
#define ADMIT_RAM_PAGES		16
#define ADMIT_LEAVES_MIN	1024
#define ADMIT_LEAVES_MAX	65536
#define ADMIT_CREDIT		1024
/*
 * Marks are by page frame number, up to so many times RAM, for holes between its banks. What is
 * beyond, or plugged later, has none.
 */
#define ADMIT_FRAMES_FACTOR	16
/* One chunk in so many is put all the same. */
#define ADMIT_SAMPLE		64
/* A loss weighs as much as so many hits, and so much more weight of losses engages the filter. */
#define ADMIT_LOSS_WEIGHT	16
#define ADMIT_ENGAGE		1024
#define ADMIT_WEIGHT_MAX	(64 * ADMIT_ENGAGE)
/* How many hits it takes until the filter lets go, for each page held when it engaged. */
#define ADMIT_HOLD		8

struct admit_leaf {
	u64 seen;
	u32 tag;
	u16 credit;
};

struct tmem_admit {
	unsigned long *back;		/* marks; each bit is atomic by itself */
	unsigned long nr_frames;
	spinlock_t lock;		/* all below; nothing is taken under it */
	unsigned int bits;
	long weight;			/* of losses, less hits */
	u64 engaged;			/* hits to come until it lets go */
	struct admit_leaf leaf[];
};

/* As hash_64(), which has no more than 32 bits: these are all 64, the upper ones the better. */
static u64 mix(u64 value)
{
	return value * GOLDEN_RATIO_64;
}

/* Was the page evicted before? From now on it was. */
static bool seen_before(struct tmem_admit *admit, u64 hash, unsigned int bit)
{
	struct admit_leaf *leaf = &admit->leaf[hash >> (64 - admit->bits)];
	u32 tag = (u32)hash;

	if (leaf->tag != tag || !leaf->seen) {
		if (leaf->credit)
			leaf->credit--;
		else
			*leaf = (struct admit_leaf){ .tag = tag, .seen = BIT_ULL(bit) };
		return false;
	}
	if (!(leaf->seen & BIT_ULL(bit))) {
		leaf->seen |= BIT_ULL(bit);
		return false;
	}
	leaf->credit = ADMIT_CREDIT;
	return true;
}

/**
 * tmem_admit_back() - a page came from the pool, and should go back there
 * @dev: the device
 * @page: where it is now
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
 * tmem_moved() - what tmem_get() brought is in the page cache as another page
 * @from: the page that it was brought to
 * @to: the page of the page cache
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
 * tmem_admit() - should a page that is evicted be put?
 * @dev: the device
 * @key: pool and inode
 * @index: page number
 * @page: where it is; its mark is taken away
 * @workingset: the page was used again since it was read in
 *
 * Context: interrupts are off.
 *
 * Return: false if it should not.
 */
bool tmem_admit(struct tmem_dev *dev, const struct tmem_key *key, u64 index, struct page *page,
		bool workingset)
{
	u64 inode = mix(mix(key->ino) + key->pool->serial);
	u64 hash = mix(inode ^ index >> LEAF_SHIFT);
	u64 chunk = mix(inode ^ index >> VIRTIO_TMEM_CHUNK_SHIFT) >> 32;
	struct tmem_admit *admit = dev->admit;
	bool back = came_back(admit, page);
	bool seen, engaged;

	spin_lock(&admit->lock);
	seen = seen_before(admit, hash, index & (LEAF_PAGES - 1));
	engaged = admit->engaged;
	spin_unlock(&admit->lock);
	return !engaged || back || seen || workingset || !READ_ONCE(tmem_admission) ||
	       !(chunk % ADMIT_SAMPLE);
}

/**
 * tmem_admit_learn() - what became of pages that the index had
 * @dev: the device
 * @hits: pages that were there
 * @losses: pages that were not, though nobody had invalidated them
 *
 * Context: any but NMI.
 */
void tmem_admit_learn(struct tmem_dev *dev, unsigned long hits, unsigned long losses)
{
	struct tmem_admit *admit = dev->admit;
	unsigned long flags;

	if (!hits && !losses)
		return;
	spin_lock_irqsave(&admit->lock, flags);
	admit->weight += losses * ADMIT_LOSS_WEIGHT;
	admit->weight = clamp_t(long, admit->weight - (long)hits, 0, ADMIT_WEIGHT_MAX);
	admit->engaged -= min_t(u64, admit->engaged, hits);
	if (losses && admit->weight > ADMIT_ENGAGE)
		admit->engaged = max_t(u64, tmem_index_pages(), LEAF_PAGES) * ADMIT_HOLD;
	spin_unlock_irqrestore(&admit->lock, flags);
}

/* How many marks there are. */
static unsigned long frames(void)
{
	unsigned long end = 0;
	int node;

	for_each_online_node(node)
		end = max(end, node_end_pfn(node));
	return min(end, totalram_pages() * ADMIT_FRAMES_FACTOR);
}

/**
 * tmem_admit_init() - allocate what is remembered
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
	dev->memory_bytes += bytes + mark_bytes;
	return 0;
}

/**
 * tmem_admit_exit() - free it
 * @dev: the device
 */
void tmem_admit_exit(struct tmem_dev *dev)
{
	if (dev->admit)
		kvfree(dev->admit->back);
	kvfree(dev->admit);
}
