# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The driver works on kernels with the configurations of other vendors."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import Torture, driver_guest, is_on, seed, stats
from test_filesystems import SCENARIOS, SMALL

from harness import debug_kernel, disk
from harness.kernel import Kernel
from harness.session import Session

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

MGLRU = "/sys/kernel/mm/lru_gen/enabled"
OPERATIONS = 10_000
# The scenario "bmap" writes to the mounted disk, as md does. The vendors allow it, a kernel that
# begins with allnoconfig does not.
WRITE_MOUNTED = "bdev_allow_write_mounted=1"


@pytest.mark.parametrize("name", ["ext4", "xfs"])
@pytest.mark.parametrize("mglru", [False, True])
def test_torture_passes_on_vendor_configurations(
    session: Session, kernel: Kernel, module: Path, name: str, mglru: bool
) -> None:
    """Loading runs the self-test; then random operations and each hook's own scenario follow."""
    if kernel.series not in debug_kernel.VENDORS:
        pytest.skip(
            f"Linux {kernel.series} is no vendor kernel; use --kernel rhel, fedora or ubuntu"
        )
    fs = disk.FILE_SYSTEMS[name]
    guest = driver_guest(
        session, kernel, module,
        parameters="verify_every=100", fs=fs, cpus=2,
        cmdline=WRITE_MOUNTED,
    )  # fmt: skip
    if guest.run(f"test -e {MGLRU}").status == 0:
        guest.sh(f"echo {'y' if mglru else 'n'} >{MGLRU}")
    elif mglru:
        pytest.skip(f"kernel {kernel.release} has no MGLRU")
    Torture(guest, f"--seed={seed()} --ops={OPERATIONS} {SMALL}").finish()
    for scenario in SCENARIOS:
        mounted = f"--device=/dev/{guest.disk('data')} --fstype={fs.kind}"
        Torture(guest, f"--scenario={scenario} {mounted}").finish()
    assert is_on(guest)
    assert stats(guest)["hits"] > 0
