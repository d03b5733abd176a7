# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Where things are: the checkout, the cache, binaries named by the environment."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
ROOT = TESTS.parent


class HarnessError(Exception):
    """Something that the harness needs is missing or did not happen in time."""


def cache_dir() -> Path:
    """The project's cache, created on first use."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "virtio-tmem"
    path.mkdir(parents=True, exist_ok=True)
    return path
