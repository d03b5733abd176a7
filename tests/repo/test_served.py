# SPDX-License-Identifier: Apache-2.0 OR MIT
"""harness.served finds a kernel series that Debian offers and the driver does not serve."""

from __future__ import annotations

import pytest

from harness import served
from harness.paths import HarnessError

NAMES = {
    "bookworm": "linux-image-6.1.0-50-cloud-amd64-unsigned",
    "trixie-backports": "linux-image-7.4.1+deb13-cloud-amd64",
}


def newest(suite: str) -> str:
    return NAMES.get(suite, "linux-image-6.12.117+deb13-cloud-amd64-unsigned")


def rows(*series: str, vendor: str = "Debian") -> list[served.Served]:
    return [served.Served(f"{name}.", name, 0, vendor, ()) for name in series]


def test_kernel_series_that_is_not_served_is_reported() -> None:
    lines, missing = served.compare(rows("6.1", "6.12"), newest)
    assert missing == ["7.4"]
    assert [line for line in lines if "MISSING" in line] == [
        "trixie-backports: 7.4 MISSING (linux-image-7.4.1+deb13-cloud-amd64)"
    ]
    assert len(lines) == len(served.SUITES)


def test_series_of_another_vendor_counts_as_missing() -> None:
    others = rows("7.4", vendor="Ubuntu")
    assert served.compare(rows("6.1", "6.12") + others, newest)[1] == ["7.4"]


def test_no_kernel_series_is_reported_if_the_driver_serves_all() -> None:
    assert served.compare(rows("6.1", "6.12", "7.4"), newest)[1] == []


def test_package_name_without_a_kernel_series_is_an_error() -> None:
    with pytest.raises(HarnessError, match="names no kernel series"):
        served.compare(rows("6.1"), lambda suite: "linux-image-cloud-amd64")


def test_tested_kernels_rows_of_an_unknown_form_are_an_error() -> None:
    text = served.SOURCE.read_text()
    assert len(served.kernels(text)) > 1
    with pytest.raises(HarnessError, match="does not know"):
        served.kernels(text.replace('{ "6.12.", ', '{ /* older */ "6.12.", '))
