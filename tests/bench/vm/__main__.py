# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs `make bench-proof`; see the package's description."""

from __future__ import annotations

import sys

from bench.vm.proof import main

if __name__ == "__main__":
    sys.exit(main())
