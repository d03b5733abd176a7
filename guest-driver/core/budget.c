// SPDX-License-Identifier: GPL-2.0-only
/*
 * Memory of the index: its limit, and the bytes that objects, leaves, marks and policies use.
 *
 * Code that uses this memory never evicts entries itself. It starts the evictor (evict.c), which
 * makes room later. The evictor's work item is in this file, because all of that code can use it.
 */
#include "../compat.h"
#include "budget.h"

/*
 * Memory of the index in bytes: its limit, its fixed hash table, and the bytes in use, which
 * include the table. The last variable is the number of entries.
 */
long tmem_index_limit_bytes;
long tmem_index_table_bytes;
atomic_long_t tmem_index_used_bytes;
atomic_long_t tmem_index_nr_pages;

/*
 * Work item of the evictor, which makes room in a full index. tmem_evict_init() sets its function.
 */
struct work_struct tmem_evict_work;

/**
 * tmem_index_limit() - return how much memory the index may use now
 *
 * Return: bytes.
 */
long tmem_index_limit(void)
{
	return tmem_test_limit(READ_ONCE(tmem_index_limit_bytes));
}

/**
 * tmem_index_reserve() - change how much of the module's memory is not available to the index
 * @bytes: bytes that other parts take; negative to give back
 */
void tmem_index_reserve(long bytes)
{
	WRITE_ONCE(tmem_index_limit_bytes, tmem_index_limit_bytes - bytes);
}

/**
 * tmem_index_bytes() - return the memory of the index
 *
 * Return: bytes, with the hash table.
 */
long tmem_index_bytes(void)
{
	return atomic_long_read(&tmem_index_used_bytes);
}

/**
 * tmem_index_pages() - return the number of entries
 *
 * Return: pages that the host is believed to hold.
 */
long tmem_index_pages(void)
{
	return atomic_long_read(&tmem_index_nr_pages);
}

/**
 * tmem_charge() - count memory of the index before it is allocated
 * @bytes: number of bytes
 *
 * All CPUs approach the limit from below at once, and each may exceed it by one leaf.
 *
 * Return: false if the index is full.
 */
bool tmem_charge(long bytes)
{
	if (atomic_long_read(&tmem_index_used_bytes) + bytes > tmem_index_limit())
		return false;
	atomic_long_add(bytes, &tmem_index_used_bytes);
	return true;
}

/**
 * tmem_uncharge() - subtract memory of the index that was freed
 * @bytes: number of bytes
 */
void tmem_uncharge(long bytes)
{
	atomic_long_sub(bytes, &tmem_index_used_bytes);
}

/**
 * tmem_alone_in_node() - check whether an entry would have an XArray node of its own
 * @xa: the XArray
 * @index: place of the entry, which is not there
 *
 * A node serves 64 neighbours. It is charged with the first of them and given back with the last.
 * Entry 0 is never charged for a node, because an XArray with only entry 0, as in every small file,
 * needs none. The uncounted memory is at most one node for each XArray, and the nodes above, which
 * are one in 64.
 *
 * Return: true if the node has no other entry.
 */
bool tmem_alone_in_node(struct xarray *xa, unsigned long index)
{
	unsigned long first = max(index & ~(XA_CHUNK_SIZE - 1UL), 1UL);

	return index && !xa_find(xa, &first, index | (XA_CHUNK_SIZE - 1UL), XA_PRESENT);
}

/**
 * tmem_evict_start() - start the evictor because the index is full
 *
 * Context: any but NMI.
 */
void tmem_evict_start(void)
{
	queue_work(tmem_system_wq, &tmem_evict_work);
}

/**
 * tmem_index_make_room() - start the evictor if the index is over its limit
 *
 * Code that adds to the memory in use without a check of the limit calls this function afterwards.
 */
void tmem_index_make_room(void)
{
	if (atomic_long_read(&tmem_index_used_bytes) > tmem_index_limit())
		tmem_evict_start();
}
