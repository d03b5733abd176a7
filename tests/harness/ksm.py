# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Switches kernel samepage merging (KSM) of the host on for a limited time.

KSM scans only memory that was marked for it: QEMU's private memory with merge=on. At the
end, the settings are restored and all pages are unmerged. A host that already uses KSM is not
changed: the harness raises an error.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from harness.paths import HarnessError
from harness.wait import until

DIRECTORY = Path("/sys/kernel/mm/ksm")
STOP, RUN, UNMERGE = "0", "1", "2"
# Bytes of the kernel's record of a page that it has scanned (struct ksm_rmap_item).
ITEM_BYTES = 64
# KSM has found all equal pages when a scan increases the merged bytes by less than this fraction.
SETTLED_FRACTION = 0.01


class Ksm:
    """Switches KSM on in a `with` statement. KSM scans `pages_to_scan` pages every `sleep_ms`."""

    def __init__(self, pages_to_scan: int, sleep_ms: int) -> None:
        self._settings = {"pages_to_scan": pages_to_scan, "sleep_millisecs": sleep_ms}
        self._before: dict[str, str] = {}

    def __enter__(self) -> Ksm:
        try:
            if (DIRECTORY / "run").read_text().strip() == RUN:
                raise HarnessError(
                    "KSM is in use on this host and would distort the figures; switch it off"
                )
            for name, value in self._settings.items():
                self._before[name] = (DIRECTORY / name).read_text()
                (DIRECTORY / name).write_text(str(value))
            (DIRECTORY / "run").write_text(RUN)
        except OSError as error:
            raise HarnessError(f"KSM cannot be switched on: {error}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        (DIRECTORY / "run").write_text(UNMERGE)
        (DIRECTORY / "run").write_text(STOP)
        for name, value in self._before.items():
            (DIRECTORY / name).write_text(value)

    def pause(self) -> None:
        """Stops the scan. Merged pages stay merged."""
        (DIRECTORY / "run").write_text(STOP)

    def resume(self) -> None:
        (DIRECTORY / "run").write_text(RUN)

    @staticmethod
    def count(name: str) -> int:
        return int((DIRECTORY / name).read_text())

    def saved_bytes(self, page_bytes: int) -> int:
        """Returns the bytes that the merged pages would take without KSM."""
        return self.count("pages_sharing") * page_bytes

    def own_bytes(self) -> int:
        """Returns the bytes of the kernel's records of the pages that it scans."""
        kinds = ("pages_shared", "pages_sharing", "pages_unshared", "pages_volatile")
        return sum(self.count(kind) for kind in kinds) * ITEM_BYTES

    def settle(self, seconds: float) -> None:
        """Waits until two complete scans in a row merge hardly any more pages."""
        scans, merged = self.count("full_scans"), self.count("pages_sharing")

        def settled() -> bool:
            nonlocal scans, merged
            now = self.count("full_scans")
            if now < scans + 2:
                return False
            before, scans, merged = merged, now, self.count("pages_sharing")
            return merged - before <= merged * SETTLED_FRACTION

        until(settled, seconds, "KSM finds no more equal pages")

    @staticmethod
    def pid() -> int:
        """Returns the pid of the kernel thread ksmd."""
        for path in Path("/proc").glob("[0-9]*/comm"):
            try:
                if path.read_text() == "ksmd\n":
                    return int(path.parent.name)
            except OSError:
                continue
        raise HarnessError("this kernel has no ksmd")
