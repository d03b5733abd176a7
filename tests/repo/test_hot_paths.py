# SPDX-License-Identifier: Apache-2.0 OR MIT
"""No put, get or invalidation of the guest driver writes to memory that all processors write.

The test follows the calls from the functions that run for each page. It finds each lock, atomic
operation and write to a global variable or to the device, and compares them with a list. Writes of
one processor to its own counters (this_cpu_...()) are left out. So a global counter, or a lock
that all processors take for each page, fails here when it is added.
"""

from __future__ import annotations

import re

import pytest
from test_abi import DRIVER
from test_driver_layers import code

# Functions that run for each page or folio: the probes, begin and end of bios, and the function
# that ftrace calls before a replacement.
ROOTS = (
    "tmem_probe_removed",
    "entry_free",
    "entry_free_list",
    "entry_free_large",
    "tmem_probe_dirty",
    "tmem_ftrace_func",
    "wants_submit_bio",
    "wrap_submit_bio",
    "bio_ended",
    "end_all",
    "fetched",
    "rest_fn",
    "tmem_probe_bio_queue",
    "tmem_probe_rq_issue",
    "entry_freed",
    "entry_cleared",
)

# Functions at which the search ends, because they do not run for each page.
RARE = {
    "tmem_dev_ask": "the generation is over, or the breaker opened",
    "tmem_dev_resync": "the cookies are used up",
    "tmem_dev_resync_any": "the cookies are used up",
    "tmem_dev_report": "the breaker opened",
    "breaker_set": "the breaker opened",
    "tmem_pool_lost": "a flush of a private pool was dropped",
    "tmem_swap_note": "a page is swapped out",
    "tmem_poison": "a page was wrong",
    "tmem_pool_wrong": "a page was wrong",
    "tmem_fs_flush": "a page was wrong",
    "tmem_policy_forget": "a file with a policy was deleted",
    "expired": "the answer is late",
    "tmem_get_abandon": "the answer is late",
    "tmem_selftest_saw_removed": "the self-test runs",
    "tmem_selftest_saw_freed": "the self-test runs",
    "tmem_selftest_saw_dirty": "the self-test runs",
    "tmem_selftest_saw_call": "the self-test runs",
}

# Shared writes by function. The text says how often they happen, or which processors share them.
ALLOWED = {
    ("new_leaf", "xa_lock(leaves)"): "up to 64 pages of one object",
    ("remove_leaf", "xa_lock_irqsave(&object->leaves)"): "up to 64 pages of one object",
    ("reserve", "spin_lock(&queue->ring_lock)"): "each put, of one queue",
    ("take_group", "spin_lock(&dev->group_lock)"): "each 8 puts of a queue",
    ("take_group", "dev->first_free"): "under group_lock",
    ("take_group", "dev->nr_free"): "under group_lock",
    ("wake_feeder", "wake_up(&queue->dev->feeder_wait)"): "a batch is full or begins",
    ("tmem_queue_flush", "spin_lock_irqsave(&queue->ring_lock)"): "erased ranges of one queue",
    ("tmem_index_store", "spin_lock_irqsave(&bucket->lock)"): "each put, of one bucket",
    ("tmem_invalidate", "spin_lock_irqsave(&bucket->lock)"): "each range, of one bucket",
    ("tmem_index_take", "spin_lock_irqsave(&bucket->lock)"): "each 64 pages, of one bucket",
    ("tmem_index_forget", "spin_lock_irqsave(&bucket->lock)"): "a request that missed a page",
    ("tmem_index_hold", "spin_lock_irqsave(&bucket->lock)"): "each REF, of one bucket",
    ("tmem_queue_ref", "spin_lock(&queue->ring_lock)"): "each REF, of one queue",
    ("fill_ref_batch", "spin_lock(&queue->ring_lock)"): "up to 64 references of one queue",
    ("tmem_retain_learn", "spin_lock(&dev->fallback_lock)"): "up to 64 references of one queue",
    ("tmem_retain_wanted", "spin_lock_irq(&dev->fallback_lock)"): "a page in 32, in fallback",
    ("tmem_evict_start", "queue_work(&tmem_evict_work)"): "the index is full, until the work runs",
    ("take", "atomic_long_add_return(&tmem_index_used_bytes)"): "up to 4 KiB of index memory",
    ("take", "atomic_long_sub(&tmem_index_used_bytes)"): "the index is full",
    ("tmem_uncharge", "atomic_long_sub(&tmem_index_used_bytes)"): "up to 4 KiB of index memory",
    ("came_back", "test_and_clear_bit(admit->back)"): "pages that came from the pool, in 2 MiB",
    ("tmem_admit_back", "set_bit(dev->admit->back)"): "pages that came from the pool, in 2 MiB",
    ("fold", "spin_lock_bh(&admit->lock)"): "64 pages of a CPU, and only while pages are lost",
    ("fold", "admit->weight"): "under its lock",
    ("fold", "admit->evicted"): "under its lock",
    ("fold", "admit->engaged"): "under its lock",
    ("tmem_bounce_alloc", "spin_lock_irq(&dev->get_lock)"): "each request of up to 64 pages",
    ("tmem_bounce_alloc", "dev->nr_bounce_free"): "under get_lock",
    ("tmem_bounce_alloc", "dev->nr_get_free"): "under get_lock",
    ("tmem_bounce_free", "spin_lock_irqsave(&dev->get_lock)"): "each request of up to 64 pages",
    ("tmem_bounce_free", "dev->nr_get_free"): "under get_lock",
    ("tmem_bounce_trim", "spin_lock_irq(&dev->get_lock)"): "a request with pages in the put ring",
    ("free_groups", "dev->nr_bounce_free"): "under get_lock",
    ("fetch_begin", "atomic_inc(&dev->nr_fetches)"): "each bio that is filled",
    ("fetch_begin", "atomic_dec(&dev->nr_fetches)"): "a suspend begins",
    ("fetch_end", "atomic_dec(&dev->nr_fetches)"): "each bio that is filled",
    ("tmem_fill", "atomic_inc_return(&nr_fills)"): "each bio that is filled",
    ("fill_gone", "atomic_dec(&nr_fills)"): "each bio that is filled",
    ("rest_fn", "atomic_dec(&nr_rests)"): "each bio whose rest the disk reads",
    ("fetch_add", "spin_lock_bh(&dev->fetch_lock)"): "each bio that is filled",
    ("add_locked", "dev->fetch_timer_ns"): "under fetch_lock",
    ("fetch_forget", "spin_lock_bh(&dev->fetch_lock)"): "each bio that is filled",
    ("fetch_wait", "spin_lock_bh(&dev->fetch_lock)"): "no bounce pages are free",
    ("stop_waiting", "dev->nr_waiting"): "no bounce pages were free",
    ("take_waiting", "spin_lock_bh(&dev->fetch_lock)"): "fetches wait for bounce pages",
    ("request_pages", "atomic_inc(&fetch->pending)"): "each request of one bio",
    ("request_pages", "atomic_dec(&fetch->pending)"): "the virtqueue is full",
    ("tmem_fetch_start", "atomic_set(&fetch->pending)"): "each bio that is filled, of this bio",
    ("tmem_fetch_start", "atomic_dec_and_test(&fetch->pending)"): "of one bio",
    ("tmem_fetch_release", "atomic_dec_and_test(&fetch->pending)"): "each request of one bio",
    ("tmem_bounce_answered", "spin_lock(&dev->get_lock)"): "a late answer",
    ("tmem_bounce_answered", "dev->nr_kept"): "a late answer",
    ("tmem_bounce_answered", "wake_up(&get->wait)"): "each request, of one reader",
    ("tmem_get_submit", "spin_lock_irq(&queue->vq_lock)"): "each request of one queue",
    ("request_send", "set_bit(queue->nr)"): "each full batch",
    ("send_turn", "spin_lock_irqsave(&queue->send_lock)"): "each batch of one queue",
    ("send_turn", "spin_lock(&queue->vq_lock)"): "each batch of one queue",
    ("submit", "spin_lock(&queue->vq_lock)"): "each batch of one queue",
    ("send_flushes", "spin_lock(&queue->ring_lock)"): "up to 64 ranges of one queue",
    ("remove_flushes", "spin_lock(&queue->ring_lock)"): "up to 64 ranges of one queue",
    ("tmem_ring_free", "spin_lock(&queue->ring_lock)"): "each answered batch of one queue",
    ("tmem_ring_free", "wake_up(&queue->dev->pace_wait)"): "answered batches while reclaim waits",
    ("return_group", "spin_lock(&dev->group_lock)"): "each 8 puts of a queue",
    ("return_group", "dev->nr_free"): "under group_lock",
    ("tmem_index_orphan", "spin_lock_irqsave(&bucket->lock)"): "each put of a private pool",
    ("tmem_swap_reuse", "test_and_clear_bit(bit)"): "of 64 slots",
    ("tmem_index_erase_offset", "spin_lock_irqsave(&bucket->lock)"): "each put that was refused",
    ("tmem_breaker_note", "spin_lock_irqsave(&dev->get_lock)"): "a slow or late fetch",
    ("tmem_breaker_note", "dev->fetch_late_ns"): "under get_lock",
    ("tmem_breaker_note", "dev->fetch_slow_ns"): "under get_lock",
    ("tmem_breaker_note", "dev->wait_max_ns"): "under get_lock",
    ("tmem_breaker_note", "dev->late_row"): "under get_lock",
    ("tmem_breaker_note", "dev->slow_ns"): "under get_lock",
    ("tmem_breaker_note", "dev->slow_at_ns"): "under get_lock",
    ("slow_ns", "dev->slow_ns"): "under get_lock",
    ("slow_ns", "dev->slow_at_ns"): "under get_lock",
    ("tmem_verify_due", "atomic_add(&fs->first_hits)"): "the first 1,000 hits of a file system",
    ("tmem_fs_note", "test_and_set_bit(&tmem_fs_types_noted)"): "until the discovery runs",
    ("tmem_fs_note", "schedule_delayed_work(&tmem_fs_discovery)"): "until the discovery runs",
    ("tmem_fs_note", "tmem_fs_types"): "until the discovery runs",
    ("lock_set", "spin_lock_irqsave(&set->lock)"): "each page, of seven blocks",
    ("count_begin", "atomic_inc(writes_of(block, false))"): "each written page, of few blocks",
    ("count_begin", "atomic_inc(writes_of(block, true))"): "each written page, of few blocks",
    ("count_end", "atomic_dec(writes_of(block, false))"): "each written page, of few blocks",
    ("count_end", "atomic_dec(writes_of(block, true))"): "each written page, of few blocks",
    ("tmem_set_bits", "atomic_long_or(GENMASK(bits - 1, 0) << first % BITS_PER_LONG)"): "64 pages",
    ("tmem_record_free", "test_and_clear_bit(t->removed)"): "of 64 page frames",
    ("tmem_put_end", "test_and_clear_bit(&dev->full)"): "each full batch",
    ("erase_in_sets", "spin_lock_irqsave(&set->lock)"): "long discards",
    ("tmem_record_long_write", "atomic64_cmpxchg(&long_range[i])"): "each discard",
    ("tmem_record_long_end", "atomic64_set_release(&long_range[nr])"): "the same",
    ("tmem_record_long_write", "atomic_inc(&long_others)"): "each discard or zone operation",
    ("tmem_record_long_write", "atomic_inc(&long_writes)"): "each discard or zone operation",
    ("tmem_record_long_end", "atomic_dec(&long_others)"): "each discard or zone operation",
    ("tmem_record_long_end", "atomic_dec(&long_writes)"): "each discard or zone operation",
    ("tmem_area_unseen", "queue_delayed_work(&drain_work)"): "a command of a user, or no memory",
}

FUNCTION = re.compile(
    r"^(?!extern)\w[^\n;={}#]*?\b(\w+)\(([^;{}]*?)\)\n(\{.*?^\})", re.DOTALL | re.MULTILINE
)
CALL = re.compile(r"\b([a-z]\w*)\(")
# Pattern of the kernel's macros and functions that write to memory that processors may share.
# __set_bit() and other functions with two leading underscores do not match: the driver uses them
# only for memory of the caller.
WRITER = re.compile(
    r"\b((?!\w+_(?:read|init)\()(?:atomic\w*|refcount|kref|percpu_counter)_\w+"
    r"|(?:raw_)?spin_(?:try)?lock\w*|bit_spin_lock|xa_(?:try)?lock\w*|(?:read|write)_lock\w*"
    r"|write_seqlock\w*|mutex_(?:try)?lock\w*|down_\w+|test_and_\w+_bit\w*|(?:set|clear|change)_bit\w*"
    r"|(?:try_)?cmpxchg\w*|xchg\w*|queue_(?:delayed_)?work\w*|mod_delayed_work\w*"
    r"|schedule_(?:delayed_)?work\w*"
    r"|wake_up\w*|complete(?:_all)?)\("
)
# Writes through pointers to objects that several processors use.
SHARED = (
    r"(?:dev|queue->dev|call->dev|admit|fs|rd->fs|mount|fs->mount|pool|key->pool|marks|policies)"
)
ASSIGN = r"(?:\s*(?:[-+|&^*]|<<|>>)?=(?!=)|\+\+|--)"
FIELD = re.compile(
    rf"\b({SHARED}->\w+){ASSIGN}|WRITE_ONCE\(({SHARED}->\w+)|(?:\+\+|--)({SHARED}->\w+)"
)
# Pattern of the definition of a global variable, in the first column, or of a static variable in a
# function.
GLOBAL = re.compile(
    r"^(?!typedef|return|#)(?:static |extern )?(?!const )(?:struct |unsigned |enum )*\w+[ *]+"
    r"(\w+)(?:\[[^\]]*\])*(?: __\w+| ____\w+)*(?: = [^;]*)?;",
    re.MULTILINE,
)
STATIC_LOCAL = re.compile(
    r"^\t+static (?!const )[^;=(]*?(\w+)(?:\[[^\]]*\])*(?: =[^;]*)?;", re.MULTILINE
)


def functions(sources: list[str]) -> dict[str, list[tuple[str, str]]]:
    """Returns the parameters and the body of each function, by name.

    Several static functions may have the same name.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for text in sources:
        for name, parameters, body in FUNCTION.findall(text):
            found.setdefault(name, []).append((parameters, body))
    return found


def argument(text: str) -> str:
    """Returns the argument that names the memory to which a function of WRITER writes.

    It is the argument that is an address, or that is more than the name of a variable.
    """
    depth, parts = 0, [""]
    for letter in text:
        depth += letter == "("
        if letter == ")":
            if not depth:
                break
            depth -= 1
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    words = [" ".join(part.split()) for part in parts]
    targets = [word for word in words if word.startswith("&") or "->" in word]
    return targets[0] if targets else words[0]


def writes(parameters: str, body: str, variables: set[str]) -> set[str]:
    """Returns the shared writes of a function."""
    found = {f"{match[1]}({argument(body[match.end() :])})" for match in WRITER.finditer(body)}
    found |= {next(filter(None, groups)) for groups in FIELD.findall(body)}
    local = set(re.findall(r"\b(\w+)\s*(?:,|$)", parameters))
    local |= {
        name
        for line in re.findall(
            r"^\t+(?!return|goto)(?:const )?(?:struct |unsigned |enum )*\w+[ *]+(?=\w)([^;()]*)",
            body,
            re.MULTILINE,
        )
        for name in re.findall(r"(?:^|,)\s*\**(\w+)", line)
    }
    own = set(STATIC_LOCAL.findall(body))
    for name in (variables - local) | own:
        place = rf"(?<![\w.>]){name}\b(?:\[[^\]]*\])*(?:\.\w+)*"
        if re.search(rf"{place}{ASSIGN}|WRITE_ONCE\({place}|(?:\+\+|--){place}", body):
            found.add(name)
    return found


def shared_writes(sources: list[str], roots: tuple[str, ...]) -> set[tuple[str, str]]:
    """Returns the shared writes of all functions that the roots call, and of the roots."""
    known = functions(sources)
    variables = {name for text in sources for name in GLOBAL.findall(text)}
    todo, seen, found = list(roots), set(), set()
    while todo:
        name = todo.pop()
        if name in seen or name in RARE:
            continue
        seen.add(name)
        for parameters, body in known.get(name, []):
            todo += CALL.findall(body)
            found |= {(name, write) for write in writes(parameters, body, variables)}
    return found


def driver() -> list[str]:
    paths = [
        path for directory in ("core", "hooks") for path in (DRIVER / directory).glob("*.[ch]")
    ]
    return [code(path.read_text()) for path in sorted(paths) if path.name != "intree.c"]


def test_hot_paths_write_no_memory_shared_by_all_cpus() -> None:
    known = functions(driver())
    missing = [name for name in (*ROOTS, *RARE) if name not in known]
    assert not missing, f"the driver does not define these functions of ROOTS or RARE: {missing}"
    found = shared_writes(driver(), ROOTS)
    added = sorted(found - ALLOWED.keys())
    assert not added, (
        "new writes to shared memory on a path that runs for each page. Count per CPU, or keep "
        f"the state in a queue or bucket. Add rare writes to ALLOWED with the reason: {added}"
    )
    gone = sorted(ALLOWED.keys() - found)
    assert not gone, f"ALLOWED names writes that no longer exist; remove them: {gone}"


@pytest.mark.parametrize(
    ("statement", "write"),
    [
        ("atomic_long_inc(&tmem_total);", "atomic_long_inc(&tmem_total)"),
        ("refcount_inc(&dev->users);", "refcount_inc(&dev->users)"),
        ("spin_lock_irqsave(&total_lock, flags);", "spin_lock_irqsave(&total_lock)"),
        ("set_bit(3, total_bits);", "set_bit(3)"),
        ("total++;", "total"),
        ("WRITE_ONCE(total, total + 1);", "total"),
        ("total_of[nr].pages += 2;", "total_of"),
        ("WRITE_ONCE(dev->total, 1);", "dev->total"),
        ("dev->total += nr;", "dev->total"),
        ("static unsigned long calls;\n\n\tcalls++;", "calls"),
    ],
)
def test_checker_of_hot_paths_finds_shared_writes_in_called_functions(
    statement: str, write: str
) -> None:
    source = (
        "static unsigned long total;\nstruct total total_of[4] __read_mostly;\n"
        "static void called(struct tmem_dev *dev, int nr)\n{\n\t" + statement + "\n}\n"
        "bool tmem_root(void)\n{\n\tif (x)\n\t\tcalled(dev, 1);\n\treturn true;\n}\n"
    )
    assert shared_writes([source], ("tmem_root",)) == {("called", write)}


@pytest.mark.parametrize(
    "statement",
    [
        "this_cpu_inc(tmem_stats.count[1]);",
        "unsigned long total;\n\n\ttotal = 1;",
        "if (total == 1)\n\t\treturn;",
        "__set_bit(1, held);",
        "nr = atomic_read(&tmem_total);",
    ],
)
def test_checker_of_hot_paths_allows_per_cpu_writes(statement: str) -> None:
    source = f"static unsigned long total;\nvoid tmem_root(int nr)\n{{\n\t{statement}\n}}\n"
    assert shared_writes([source], ("tmem_root",)) == set()
