// SPDX-License-Identifier: GPL-2.0-only
/*
 * Memory of the index: its limit, and the bytes that objects, leaves and policies use.
 *
 * Code that uses this memory never evicts entries itself. It starts the evictor (evict.c), which
 * makes room later. The evictor's work item is in this file, because all of that code can use it.
 */
#include <linux/log2.h>
#include <linux/mm.h>

#include "../compat.h"
#include "budget.h"

/*
 * Maximum number of bytes that a CPU reserves at a time for its stock: memory of the index that
 * only this CPU may use later. They are enough for 450 pages of a file that is read in order. A CPU
 * charges objects and leaves to its stock without a write to shared memory.
 */
#define STOCK_BYTES_MAX		4096
/*
 * The stocks of all CPUs together are at most this part of the limit, because other CPUs cannot use
 * a CPU's stock.
 */
#define STOCK_DIVISOR		32

/*
 * Memory of the index in bytes: its limit, and its fixed hash table. Each put reads these numbers,
 * which seldom change.
 */
long tmem_index_limit_bytes __read_mostly;
long tmem_index_table_bytes __read_mostly;
/* Guards the fields below, and writers of tmem_index_limit_bytes. */
static DEFINE_SPINLOCK(limit_lock);
static unsigned long limit_ram_pages;	/* size of RAM from which the limit was computed */
static long reserved_bytes;		/* memory that the device takes */
static bool reserved_for_retain;	/* the device retains pages */
/* The stock of a CPU is at most tmem_index_limit() >> stock_shift bytes. */
static unsigned int stock_shift __read_mostly;

/*
 * Bytes of the index in use, with the hash table and the stocks of all CPUs. This number may exceed
 * the limit of the index for a short time.
 */
atomic_long_t tmem_index_used_bytes ____cacheline_aligned_in_smp;

DEFINE_PER_CPU(struct tmem_index_cpu, tmem_index_cpu);

/* Work item of the evictor, which makes room in the index. tmem_evict_init() sets its function. */
struct work_struct tmem_evict_work;

/* Returns how many bytes of memory the index may use now. */
long tmem_index_limit(void)
{
	return tmem_test_limit(READ_ONCE(tmem_index_limit_bytes));
}

/*
 * The module's memory follows the size of RAM up to this many times the RAM of the kernel's own
 * zones. The kernel cannot move the module's memory, so that memory is never in ZONE_MOVABLE, which
 * may have nearly all RAM after a hot-plug.
 */
#define KERNEL_RAM_FACTOR	4

/* Returns the bytes of RAM that count for the module's memory, for the size that RAM has now. */
long tmem_counted_ram_bytes(void)
{
	return min(totalram_pages(), KERNEL_RAM_FACTOR * nr_free_buffer_pages()) * PAGE_SIZE;
}

static long budget_of(long ram_bytes)
{
	return ram_bytes / TMEM_BUDGET_RAM_DIVISOR + (long)TMEM_BUDGET_FLOOR_BYTES;
}

/* Returns how many bytes of memory the index may use without its hash table. */
long tmem_index_entry_bytes(void)
{
	return max(tmem_index_limit() - tmem_index_table_bytes, 0L);
}

/*
 * Returns how many bytes of memory the module may use without VIRTIO_TMEM_F_RETAIN, for the size
 * that RAM has now.
 */
long tmem_budget_bytes(void)
{
	return budget_of(tmem_counted_ram_bytes());
}

/*
 * Computes the limit from the size of RAM. The limit is never below the hash table, although RAM
 * may have become so small that the device alone takes more than the module may use.
 */
static void update_limit(void)
{
	long ram_bytes, bytes;

	lockdep_assert_held(&limit_lock);
	/* If RAM changes after this line, tmem_index_follow_ram() finds another size later. */
	WRITE_ONCE(limit_ram_pages, totalram_pages());
	ram_bytes = tmem_counted_ram_bytes();
	bytes = budget_of(ram_bytes) - reserved_bytes;
	if (reserved_for_retain)
		bytes += ram_bytes / (long)TMEM_BUDGET_RETAIN_DIVISOR;
	WRITE_ONCE(tmem_index_limit_bytes, max(bytes, tmem_index_table_bytes));
}

/*
 * Sets how many bytes of the module's memory the device takes, so that the index cannot. @retain:
 * the device retains pages, so that the index may use more memory. Context: process.
 */
void tmem_index_set_device_bytes(long bytes, bool retain)
{
	unsigned long flags;

	spin_lock_irqsave(&limit_lock, flags);
	reserved_bytes = bytes;
	reserved_for_retain = retain;
	update_limit();
	spin_unlock_irqrestore(&limit_lock, flags);
	tmem_index_make_room();
}

/*
 * Computes the limit again if the size of RAM has changed. Reclaim calls this function often, so it
 * writes to shared memory only after a change. Context: any but NMI.
 */
void tmem_index_follow_ram(void)
{
	unsigned long flags;

	if (totalram_pages() == READ_ONCE(limit_ram_pages))
		return;
	spin_lock_irqsave(&limit_lock, flags);
	update_limit();
	spin_unlock_irqrestore(&limit_lock, flags);
	tmem_index_make_room();
}

/* Starts the accounting of the index. */
void tmem_index_budget_init(long table_bytes)
{
	tmem_index_table_bytes = table_bytes;
	stock_shift = ilog2(STOCK_DIVISOR) + order_base_2(num_possible_cpus());
	atomic_long_set(&tmem_index_used_bytes, table_bytes);
	tmem_index_set_device_bytes(0, false);
}

/*
 * Returns the bytes of memory of the index, with the hash table and without the stocks. The number
 * is exact while nothing is entered or erased.
 */
long tmem_index_bytes(void)
{
	long bytes = atomic_long_read(&tmem_index_used_bytes);
	int cpu;

	for_each_possible_cpu(cpu)
		bytes -= READ_ONCE(per_cpu_ptr(&tmem_index_cpu, cpu)->stock_bytes);
	return bytes;
}

/*
 * Returns the number of entries: pages that the host is believed to hold or retain. The number is
 * exact while nothing is entered or erased.
 */
long tmem_index_pages(void)
{
	long pages = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		pages += READ_ONCE(per_cpu_ptr(&tmem_index_cpu, cpu)->nr_pages);
	/*
	 * The sum may be negative: an entry may be added on a CPU that this loop has already read,
	 * and erased on a CPU that it reads later.
	 */
	return max(pages, 0L);
}

/*
 * Returns the number of retained entries: pages that the guest has in its page cache and the host
 * is believed to keep. The number is exact while nothing is entered, taken or erased.
 */
long tmem_index_retained_pages(void)
{
	long pages = 0;
	int cpu;

	for_each_possible_cpu(cpu)
		pages += READ_ONCE(per_cpu_ptr(&tmem_index_cpu, cpu)->nr_retained);
	return max(pages, 0L);
}

/*
 * Returns how many bytes a CPU reserves for its stock at once. A stock with more than twice as many
 * bytes is reduced to this number.
 */
static long stock_batch(void)
{
	return min(tmem_index_limit() >> (stock_shift + 1), (long)STOCK_BYTES_MAX);
}

/*
 * Reserves bytes of the index's memory. Returns false, and reserves nothing, if the index would
 * exceed its limit.
 */
static bool take(long bytes)
{
	/*
	 * Check with a read first: if the index is full, no CPU then writes to
	 * tmem_index_used_bytes, which all CPUs share.
	 */
	if (atomic_long_read(&tmem_index_used_bytes) + bytes > tmem_index_limit())
		return false;
	if (atomic_long_add_return(bytes, &tmem_index_used_bytes) <= tmem_index_limit())
		return true;
	atomic_long_sub(bytes, &tmem_index_used_bytes);
	return false;
}

/*
 * Counts memory of the index before it is allocated. Returns false if the index is full. The bytes
 * come from the stock of this CPU. Only if the stock is too small, the CPU reserves more memory of
 * the index. Context: any but NMI.
 */
bool tmem_charge(long bytes)
{
	struct tmem_index_cpu *own;
	unsigned long flags;
	bool charged = true;
	long batch;

	local_irq_save(flags);
	own = this_cpu_ptr(&tmem_index_cpu);
	if (own->stock_bytes >= bytes) {
		WRITE_ONCE(own->stock_bytes, own->stock_bytes - bytes);
	} else {
		batch = stock_batch();
		if (take(bytes + batch))
			WRITE_ONCE(own->stock_bytes, own->stock_bytes + batch);
		else
			charged = take(bytes);
	}
	local_irq_restore(flags);
	return charged;
}

/*
 * Subtracts memory of the index that was freed. The bytes go to the stock of this CPU. If the stock
 * is too large, the CPU returns a part of it, so that other CPUs can use this memory. Context: any
 * but NMI.
 */
void tmem_uncharge(long bytes)
{
	struct tmem_index_cpu *own;
	unsigned long flags;
	long batch;

	local_irq_save(flags);
	own = this_cpu_ptr(&tmem_index_cpu);
	batch = stock_batch();
	bytes += own->stock_bytes;
	if (bytes > 2 * batch) {
		atomic_long_sub(bytes - batch, &tmem_index_used_bytes);
		bytes = batch;
	}
	WRITE_ONCE(own->stock_bytes, bytes);
	local_irq_restore(flags);
}

/*
 * Returns the entry, or the node, to which the path to entry @index leads from @node. The caller
 * holds the lock that guards the XArray.
 */
static void *next_on_path(struct xa_node *node, unsigned long index)
{
	return rcu_dereference_protected(node->slots[index >> node->shift & XA_CHUNK_MASK], true);
}

/*
 * Returns how many nodes an XArray, whose lock the caller holds, must allocate for an entry.
 *
 * An XArray has one node for each level of the path to an entry, and each node can have 64 entries
 * or lower nodes. Its number of levels depends on its largest index. An XArray with only entry 0
 * has no node.
 */
unsigned int tmem_nodes_missing(struct xarray *xa, unsigned long index)
{
	unsigned int levels = DIV_ROUND_UP(fls64(index), XA_CHUNK_SHIFT), has = 0;
	void *entry = rcu_dereference_protected(xa->xa_head, true);

	if (!entry)
		return levels;
	if (xa_is_node(entry))
		has = xa_to_node(entry)->shift / XA_CHUNK_SHIFT + 1;
	/*
	 * The XArray adds levels above its first node, and then needs a node for each level below
	 * the highest one, because its old entries are in another part of the tree.
	 */
	if (levels > has)
		return levels - has + levels - 1;
	for (levels = has; levels && entry; levels--)
		entry = next_on_path(xa_to_node(entry), index);
	return levels;
}

/*
 * Returns the number of nodes on the paths to entry 0 and to entry @index. Only these nodes come or
 * go when entry @index is stored or erased: an XArray adds and removes levels at its top, on the
 * path to entry 0.
 */
static unsigned int nodes_on_paths(struct xarray *xa, unsigned long index)
{
	void *first = rcu_dereference_protected(xa->xa_head, true), *entry = first;
	unsigned int nodes = 0;

	if (xa_is_node(entry) && index >> xa_to_node(entry)->shift > XA_CHUNK_MASK)
		entry = NULL;
	while (xa_is_node(first) || xa_is_node(entry)) {
		nodes += xa_is_node(entry);
		if (xa_is_node(first)) {
			nodes += first != entry;
			first = next_on_path(xa_to_node(first), 0);
		}
		if (xa_is_node(entry))
			entry = next_on_path(xa_to_node(entry), index);
	}
	return nodes;
}

/*
 * Stores an entry in an XArray, whose lock the caller holds, and updates the number of its nodes. A
 * store that fails may add nodes, too. Returns 0 or -ENOMEM.
 */
int tmem_nodes_store(struct xarray *xa, unsigned long index, void *entry, u32 *nodes)
{
	unsigned int missing = tmem_nodes_missing(xa, index);
	int err = xa_err(__xa_store(xa, index, entry, GFP_INDEX));

	*nodes += missing - tmem_nodes_missing(xa, index);
	return err;
}

/*
 * Erases an entry of an XArray, whose lock the caller holds, and updates the number of its nodes.
 * Returns the erased entry, or NULL.
 */
void *tmem_nodes_erase(struct xarray *xa, unsigned long index, u32 *nodes)
{
	unsigned int before = nodes_on_paths(xa, index);
	void *entry = __xa_erase(xa, index);

	*nodes -= before - nodes_on_paths(xa, index);
	return entry;
}

/* Starts the evictor because the index is full. Context: any but NMI. */
void tmem_evict_start(void)
{
	/* Use memory before reading the work item; pairs with its start, a full barrier. */
	smp_mb();
	/*
	 * Do not write to the work item if it is pending, because all CPUs share it. If the index
	 * is full, all CPUs drop puts, and call this function for each dropped put.
	 */
	if (!work_pending(&tmem_evict_work))
		queue_work(tmem_system_wq, &tmem_evict_work);
}

/*
 * Starts the evictor if the index is over its limit. Code that adds to the memory in use without a
 * check of the limit calls this function afterwards.
 */
void tmem_index_make_room(void)
{
	if (atomic_long_read(&tmem_index_used_bytes) > tmem_index_limit())
		tmem_evict_start();
}
