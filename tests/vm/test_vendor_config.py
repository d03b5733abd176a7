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
# Kernel parameter that allows writes to a mounted disk, which the scenario "bmap" needs. Kernels of
# the vendors allow them by default. The test's kernels are built from allnoconfig and do not.
WRITE_MOUNTED = "bdev_allow_write_mounted=1"


@pytest.mark.parametrize("name", ["ext4", "xfs"])
@pytest.mark.parametrize("mglru", [False, True])
def test_torture_passes_on_vendor_configurations(
    session: Session, kernel: Kernel, module: Path, name: str, mglru: bool
) -> None:
    """On a vendor's configuration, the self-test passes and the torture program finds no fault.

    The program runs random operations, and each scenario.
    """
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
