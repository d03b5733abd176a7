# SPDX-License-Identifier: Apache-2.0 OR MIT
"""systemd accepts the daemon's unit, and the unit has the values that the guides promise."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from harness.paths import ROOT

UNIT = ROOT / "host-daemon/tmemd/tmemd.service"
GUIDE = ROOT / "docs/operating.md"
# systemd 254 introduced these keys. Older versions ignore them and say so.
SINCE_254 = r"Unknown key( name)? '(RestartSteps|RestartMaxDelaySec)'"
WATCHDOG = ROOT / "host-daemon/tmemd/src/host/watchdog.rs"


def settings() -> dict[str, str]:
    lines = re.findall(r"^(\w+)=(.*)$", UNIT.read_text(), re.MULTILINE)
    assert len({key for key, _ in lines}) == len(lines), "the systemd unit sets a key twice"
    return dict(lines)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """`systemd-analyze verify` prints nothing about the unit, and a warning for a misspelt key."""
    copy = tmp_path / UNIT.name
    for text, good in [(UNIT.read_text(), True), (UNIT.read_text() + "WatchdogSeconds=1\n", False)]:
        # tmemd is not installed on the test machine, and systemd would report that.
        copy.write_text(re.sub("^ExecStart=.*", "ExecStart=/bin/true", text, flags=re.MULTILINE))
        done = subprocess.run(
            ["systemd-analyze", "verify", "--man=no", copy],
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        own = [
            line
            for line in done.stdout.splitlines()
            if UNIT.name in line and not re.search(SINCE_254, line)
        ]
        assert (not own) == good, done.stdout
        assert done.returncode == 0 or not good


def test_unit_sets_watchdog_and_restart() -> None:
    unit = settings()
    assert unit["Type"] == "notify"
    assert unit["WatchdogSignal"] == "SIGKILL", (
        "WatchdogSignal= is not SIGKILL, so a hung daemon could continue and write"
    )
    assert unit["Restart"] == "always"
    assert unit["StartLimitIntervalSec"] == "0"
    # systemd must keep the run directory, because the VM store in it must outlive an upgrade.
    assert unit["RuntimeDirectoryPreserve"] == "yes"
    assert unit["LimitMEMLOCK"] == "infinity"


def test_unit_is_not_restarted_after_a_configuration_error() -> None:
    unit = settings()
    assert unit["RestartPreventExitStatus"].split() == ["2", "78"]
    # The delay grows where systemd supports it, and no delay is longer than the guide says.
    assert int(unit["RestartSteps"]) > 0
    assert f"up to {unit['RestartMaxDelaySec'].removesuffix('s')} s" in GUIDE.read_text()


def test_kernel_ends_the_daemon_before_any_vm() -> None:
    """libvirt's VMs have a score adjustment of 0. The maximum, 1000, ignores used memory."""
    unit = settings()
    assert int(unit["OOMScoreAdjust"]) == 900
    assert unit["OOMPolicy"] == "continue"
    assert "`OOMScoreAdjust=900`" in GUIDE.read_text()


def test_unit_has_more_weight_than_all_vms() -> None:
    """The daemon's weight is above that of machine.slice, which is 100 by default, for all VMs."""
    unit = settings()
    assert int(unit["CPUWeight"]) == 1000
    assert unit["Slice"] == "-.slice", "the weight would not count beside machine.slice"


def test_watchdog_period_matches_the_guide_and_the_daemon() -> None:
    seconds = settings()["WatchdogSec"].removesuffix("s")
    assert f"`WatchdogSec=`, {seconds} s." in GUIDE.read_text()
    default = re.search(
        r"PERIOD_DEFAULT: Duration = Duration::from_secs\((\d+)\)", WATCHDOG.read_text()
    )
    assert default and default[1] == seconds
