# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Mapping of the guest's memory in QEMU: whether the host can map it with huge pages."""

import re
from pathlib import Path

import pytest

HUGE_PAGE_BYTES = 2 << 20


@pytest.mark.parametrize("size", ["64M", "66M"])
@pytest.mark.parametrize("kind", ["memfd", "file"])
def test_shared_memory_can_be_mapped_with_huge_pages(machine, folder, kind, size):
    """QEMU requests huge pages for shared memory and aligns its mapping to their size.

    Whether the kernel then uses huge pages depends on shmem_enabled, or on the mount option `huge`
    of a tmpfs.
    """
    path = f",mem-path={folder}/memory" if kind == "file" else ""
    backend = f"memory-backend-{kind},id=mem,size={size},share=on{path}"
    options = ["-object", backend]
    vm = machine(memory=options, machine=",memory-backend=mem", more=("-m", size))
    maps = Path(f"/proc/{vm.process.pid}/smaps").read_text()
    name = rf"{folder}/memory" if kind == "file" else "/memfd:memory-backend-memfd"
    mapping = rf"^([0-9a-f]+)-\S+ rw-s [^\n]* {re.escape(name)}.*?^VmFlags:(.*?)$"
    found = re.search(mapping, maps, re.MULTILINE | re.DOTALL)
    assert found, f"QEMU has no mapping of {name}"
    assert int(found[1], 16) % HUGE_PAGE_BYTES == 0, f"the mapping begins at {found[1]}"
    assert "hg" in found[2].split(), "QEMU requests no huge pages"
