# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Computes medians of ratios and their 95 % intervals, by resampling the repetitions.

With few repetitions, the interval is only a rough one: with five, the bootstrap draws from five
values.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench.vm.machine import SEED

RESAMPLES = 2000
Pair = tuple[float, float]


@dataclass(frozen=True)
class Estimate:
    """A median with its 95 % interval."""

    value: float
    low: float
    high: float

    def text(self, digits: int = 2) -> str:
        return f"{self.value:,.{digits}f} ({self.low:,.{digits}f}-{self.high:,.{digits}f})"


def _estimate(items: Sequence[Pair], of: str) -> Estimate:
    def value(some: Sequence[Pair]) -> float:
        over = statistics.median(pair[0] for pair in some)
        if of == "first":
            return over
        under = statistics.median(pair[1] for pair in some)
        return over / under if under else float("inf")

    source = random.Random(SEED)
    values = sorted(value(source.choices(items, k=len(items))) for _ in range(RESAMPLES))
    return Estimate(value(items), values[int(RESAMPLES * 0.025)], values[int(RESAMPLES * 0.975)])


def ratio(pairs: Sequence[Pair]) -> Estimate:
    """Returns the median of the first values divided by the median of the second values.

    Both values of a pair were measured one after the other, so they are resampled together.
    """
    return _estimate(pairs, "ratio")


def middle(values: Sequence[float]) -> Estimate:
    """Returns the median of the values."""
    return _estimate([(value, 0.0) for value in values], "first")
