# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The point release of the kernel decides whether the driver serves it, and how much it compares.

On an untested release, the driver compares more hits with the disk, and reports that. It stays off
on a release that is too old.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from driver import (
    MODULE,
    WHERE,
    driver_guest,
    driver_vm,
    evict,
    growth,
    load,
    set_parameter,
    state,
    stats,
)

from harness import served
from harness.guest import Guest
from harness.kernel import Kernel
from harness.session import Session

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

# Files of the test. Each fits into the put ring.
FILES = [f"{WHERE}/{number}" for number in range(12)]
# TMEM_VERIFY_FIRST_HITS, TMEM_VERIFY_EVERY_HITS and TMEM_VERIFY_UNTESTED_HITS of verify.c.
FIRST_HITS = 1000
TESTED_EVERY = 1024
UNTESTED_EVERY = 64


def release(guest: Guest) -> str:
    """Returns the point release of a Debian kernel."""
    return guest.sh("uname -v").split("Debian ", 1)[1].split("-", 1)[0]


def row_of(kernel: Kernel) -> served.Served:
    """Returns the row of tested_kernels[] of the kernel under test."""
    return next(row for row in served.kernels() if kernel.release.startswith(row.begins))


def untested_release(kernel: Kernel) -> str:
    """Returns a newer point release than the tested ones."""
    row = row_of(kernel)
    return f"{row.begins}{max(int(name.rsplit('.', 1)[1]) for name in row.releases) + 1}"


def note(name: str, share: str) -> str:
    return f"on: kernel {name} is not tested; {share} compared with the disk"


def write_files(guest: Guest) -> None:
    # The driver selects bios for the comparison. Without readahead, each bio has one page, so the
    # test can count pages.
    guest.sh(f"echo 0 >/sys/block/{guest.disk('data')}/queue/read_ahead_kb")
    for path in FILES:
        guest.sh(f"dd if=/dev/urandom of={path} bs=1M count=1 2>/dev/null")
        evict(guest, [path])


def sectors_read(guest: Guest) -> int:
    """Returns the number of sectors of 512 bytes that were read from the data disk."""
    return int(guest.read(f"/sys/block/{guest.disk('data')}/stat").split()[2])


def read_again(guest: Guest) -> tuple[int, int]:
    """Reads the evicted files; returns the hits, and how many of them were compared.

    Prints the time and the sectors that the reading took, which docs/guest-support.md quotes.
    """
    before, sectors, begun = stats(guest), sectors_read(guest), time.monotonic()
    grown = growth(before, evict(guest, FILES))
    seconds = time.monotonic() - begun
    assert grown["blocks_gets_equal"] == grown["verified_hits"], (
        "the driver dropped a comparison with the disk although nothing writes to the files"
    )
    print(
        f"{grown['hits']} hits, {grown['verified_hits']} compared,"
        f" {sectors_read(guest) - sectors} sectors, {seconds:.2f} s,"
        f" gets waited {grown['waits_us']} us"
    )
    return grown["hits"], grown["verified_hits"]


def read_first_hits(guest: Guest) -> None:
    """Reads the files until they had FIRST_HITS hits, all of which the driver compares.

    One reading may have fewer hits, because the put ring had no space for some pages.
    """
    seen = compared = 0
    while seen <= FIRST_HITS:
        hits, more = read_again(guest)
        assert hits > 0
        seen, compared = seen + hits, compared + more
    assert compared > FIRST_HITS // 2, (
        f"only {compared} of the first {seen} hits were compared with the disk"
    )


def check_share(hits: int, compared: int, every: int) -> None:
    # The driver counts hits over all readings, so the number of compared hits in one reading may
    # differ by one.
    assert abs(compared - hits / every) <= 1, (
        f"{compared} of {hits} hits were compared with the disk, not one in {every}"
    )


def test_untested_kernel_release_compares_more_hits_with_the_disk(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    name = untested_release(kernel)
    guest = driver_guest(session, kernel, test_module, parameters=f"test_release={name}-1~deb12u1")
    assert state(guest) == note(name, "one read in 64 is")
    write_files(guest)
    read_first_hits(guest)
    hits, compared = read_again(guest)
    assert hits > 2 * TESTED_EVERY
    check_share(hits, compared, UNTESTED_EVERY)

    # A value of verify_every that the operator sets has priority, and the state shows it.
    for every in (1024, 512):
        set_parameter(guest, "verify_every", f"{every}")
        assert state(guest) == note(name, f"one read in {every} is")
        check_share(*read_again(guest), every)
    set_parameter(guest, "verify_every", "0")
    assert state(guest) == note(name, "no read is")
    assert read_again(guest)[1] == 0
    assert stats(guest)["verify_mismatches"] == 0


def test_verify_every_set_at_load_overrides_the_default_of_untested_releases(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    name = untested_release(kernel)
    guest = driver_guest(
        session, kernel, test_module, parameters=f"test_release={name} verify_every=256"
    )
    assert state(guest) == note(name, "one read in 256 is")
    write_files(guest)
    check_share(*read_again(guest), 256)


def test_on_a_tested_kernel_release_one_hit_in_tested_every_is_compared(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """On a tested release, the state has no note, and one read in TESTED_EVERY is compared."""
    guest = driver_guest(session, kernel, module, parameters="")
    listed = {name for row in served.kernels() for name in row.releases}
    tested = release(guest) in listed
    assert state(guest) == ("on" if tested else note(release(guest), "one read in 64 is"))
    write_files(guest)
    read_first_hits(guest)
    check_share(*read_again(guest), TESTED_EVERY if tested else UNTESTED_EVERY)
    # After a reload, the driver uses the list of tested releases in its sources again.
    guest.sh("umount /mnt && rmmod virtio_tmem")
    load(guest, "allow_untested=1")
    assert state(guest) == ("on" if tested else note(release(guest), "one read in 64 is"))


def test_kernel_older_than_the_oldest_served_release_is_refused(
    session: Session, kernel: Kernel, test_module: Path
) -> None:
    """The numbers are compared, not the texts, and a text without a release is refused."""
    row = row_of(kernel)
    guest = driver_vm(session, kernel, test_module, None).start()
    oldest = f"{row.begins}{row.oldest}"
    old = [
        f"{row.begins}{row.oldest - 1}-1~deb12u1",
        f"{row.begins}{min(9, row.oldest - 1)}",  # as texts, "9" would be greater than "114"
        f"{row.series}~rc7-1~exp1",
        f"9{row.begins}{row.oldest}",
        "custom",
    ]
    refused = f"is older than {oldest}; allow_untested=1"
    for name in old:
        guest.sh(f"insmod {MODULE} test_release={name}")
        assert state(guest).startswith("off: kernel ") and refused in state(guest), name
        guest.sh("rmmod virtio_tmem")
    # The driver accepts the kernel, and is off only because there is no device.
    for parameters in (
        f"test_release={oldest}",
        f"test_release={oldest}-1~deb12u1",
        f"test_release={row.begins}1000+deb13",
        f"allow_untested=1 test_release={old[0]}",
    ):
        guest.sh(f"insmod {MODULE} {parameters}")
        assert "no device" in state(guest), parameters
        guest.sh("rmmod virtio_tmem")
