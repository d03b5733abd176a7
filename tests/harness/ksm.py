# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The host kernel's own merging of equal pages (KSM), switched on for a while.

Only memory that was marked for it is looked at: QEMU's private memory with merge=on. Settings are
put back as they were and all pages unmerged; a host that uses KSM already is left alone.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from harness.paths import HarnessError
from harness.wait import until

FOLDER = Path("/sys/kernel/mm/ksm")
STOP, RUN, UNMERGE = "0", "1", "2"
# The kernel's note of a page that it has looked at (struct ksm_rmap_item).
ITEM_BYTES = 64
SETTLED_FRACTION = 0.01  # of the merged pages; a scan that adds no more has found what there is


class Ksm:
    """Use it in a `with` statement; `pages_to_scan` every `sleep_ms`."""

    def __init__(self, pages_to_scan: int, sleep_ms: int) -> None:
        self._settings = {"pages_to_scan": pages_to_scan, "sleep_millisecs": sleep_ms}
        self._before: dict[str, str] = {}

    def __enter__(self) -> Ksm:
        try:
            if (FOLDER / "run").read_text().strip() == RUN:
                raise HarnessError("KSM is in use on this host: its figures would be mixed")
            for name, value in self._settings.items():
                self._before[name] = (FOLDER / name).read_text()
                (FOLDER / name).write_text(str(value))
            (FOLDER / "run").write_text(RUN)
        except OSError as error:
            raise HarnessError(f"KSM cannot be switched on: {error}") from error
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        (FOLDER / "run").write_text(UNMERGE)
        (FOLDER / "run").write_text(STOP)
        for name, value in self._before.items():
            (FOLDER / name).write_text(value)

    @staticmethod
    def count(name: str) -> int:
        return int((FOLDER / name).read_text())

    def saved_bytes(self, page_bytes: int) -> int:
        """Memory that would be taken without it."""
        return self.count("pages_sharing") * page_bytes

    def own_bytes(self) -> int:
        """The kernel's notes of the pages that it looks at."""
        kinds = ("pages_shared", "pages_sharing", "pages_unshared", "pages_volatile")
        return sum(self.count(kind) for kind in kinds) * ITEM_BYTES

    def settle(self, seconds: float) -> None:
        """Waits until two whole scans in a row hardly merge any more."""
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
        """Of its thread in the kernel."""
        for path in Path("/proc").glob("[0-9]*/comm"):
            try:
                if path.read_text() == "ksmd\n":
                    return int(path.parent.name)
            except OSError:
                continue
        raise HarnessError("this kernel has no ksmd")
