# SPDX-License-Identifier: Apache-2.0 OR MIT
"""One of two emulated processors changes the memory map while the other one accesses devices.

The test needs the patch in qemu-dev/patches whose title begins with "physmem". Without the patch,
accesses of the other processor go to a wrong device, or QEMU ends. The test ran twice without the
patch. QEMU ended in one run. In the other one, a processor never woke from a sleep, because the
write that arms its timer had gone to a wrong device.
"""

from __future__ import annotations

import re

import pytest
from test_driver import tree_disk

from harness.kernel import Kernel
from harness.session import Session
from harness.vm import Config

pytestmark = pytest.mark.usefixtures("qemu")

CHANGES = 3000
COMMAND = 4  # offset of the command register in a PCI function's configuration
DECODES_MEMORY = 2


def test_memory_map_changes_under_load_lose_no_device_access(
    session: Session, kernel: Kernel
) -> None:
    """Accesses reach their devices while an unused disk switches its memory range off and on."""
    data, _ = tree_disk(session)
    guest = session.vm(Config(kernel, cpus=2, disks=[data])).start()
    device = guest.sh(f"readlink -f /sys/block/{guest.disk('data')}")
    function = re.findall(r"0000:[0-9a-f:.]+", device)[-1]
    register = f"/sys/bus/pci/devices/{function}/config"
    low = int(guest.sh(f"dd if={register} bs=1 skip={COMMAND} count=1 2>/dev/null | od -An -tu1"))
    for path, value in (("/tmp/on", low), ("/tmp/off", low & ~DECODES_MEMORY)):
        guest.put(path, bytes([value]))
    other = guest.start("while :; do cat /proc/interrupts >/dev/null; done", 300)
    write = f"of={register} bs=1 seek={COMMAND} count=1 conv=notrunc 2>/dev/null"
    done = guest.sh(
        f"i=0; while [ $i -lt {CHANGES // 2} ]; do"
        f" dd if=/tmp/off {write}; dd if=/tmp/on {write}; i=$((i + 1)); done; echo $i",
        240,
    )
    assert int(done) == CHANGES // 2
    other.kill()
