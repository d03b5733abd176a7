# SPDX-License-Identifier: Apache-2.0 OR MIT
"""If two fragments of a kernel configuration set an option, the later fragment's value is used."""

from __future__ import annotations

import pytest

from harness import debug_kernel


def test_last_config_fragment_overrides_earlier_values() -> None:
    base = "# a comment\nCONFIG_A=y\nCONFIG_B=y\n"
    assert debug_kernel.merge([base, 'CONFIG_A=n\nCONFIG_C="x=y"\n']) == {
        "CONFIG_A": "n",
        "CONFIG_B": "y",
        "CONFIG_C": '"x=y"',
    }


@pytest.mark.parametrize("kind", sorted(debug_kernel.VENDORS))
def test_vendor_kernel_configs_disable_live_patching(kind: str) -> None:
    texts = [path.read_text() for path in debug_kernel.fragments(kind)]
    assert debug_kernel.merge(texts)["CONFIG_LIVEPATCH"] == "n"
