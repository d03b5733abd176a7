# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Switches tracers of functions that the driver redirects on and off while files are used.

Operators use tracers when they look for a fault. ftrace, kprobes and fprobes patch the same places
of the kernel's code as the driver.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import WHERE, LastingTorture, driver_guest, seed, stats, wait_state

from harness.kernel import Kernel
from harness.session import Session
from harness.wait import until

pytestmark = pytest.mark.usefixtures("qemu", "host_programs")

TRACING = "/sys/kernel/tracing"
# Functions of mm, VFS and the block layer that the driver redirects.
FUNCTIONS = (
    "submit_bio",
    "generic_fadvise",
    "generic_shutdown_super",
    "security_sb_set_mnt_opts",
    "drop_slab",
    "try_to_unmap_flush",
)
# Shell script that switches each tracer on for a while in each round, and appends a line to the
# tracer's file if the tracer saw a call.
TOGGLE = f"""
cd {TRACING} || exit 1
saw() {{ grep -c -m 1 submit_bio trace >>/tmp/saw.$1; echo >trace; }}
echo '{" ".join(FUNCTIONS)} *tmem*' >set_ftrace_filter
echo 1 >tracing_on
while ! [ -e /tmp/enough ]; do
	for tracer in function function_graph; do
		echo $tracer >current_tracer || exit 2
		cat {WHERE}/w0/* {WHERE}/w1/* >/dev/null 2>&1; : >{WHERE}/x; rm {WHERE}/x
		saw $tracer
		echo nop >current_tracer
	done
	for f in {" ".join(FUNCTIONS)}; do
		echo "p:k_$f $f" >>kprobe_events && echo "r:r_$f $f" >>kprobe_events || exit 3
	done
	echo 1 >events/kprobes/enable || exit 4
	cat {WHERE}/w0/* {WHERE}/w1/* >/dev/null 2>&1; : >{WHERE}/x; rm {WHERE}/x
	saw kprobes
	echo 0 >events/kprobes/enable && echo >kprobe_events || exit 5
	if grep -q 'f\\[:\\[' README; then
		for f in {" ".join(FUNCTIONS)}; do
			echo "f:f_$f $f" >>dynamic_events && echo "f:e_$f $f%return" >>dynamic_events || exit 6
		done
		echo 1 >events/fprobes/enable || exit 7
		cat {WHERE}/w0/* {WHERE}/w1/* >/dev/null 2>&1; : >{WHERE}/x; rm {WHERE}/x
		saw fprobes
		echo 0 >events/fprobes/enable && echo >dynamic_events || exit 8
	fi
	echo >>/tmp/rounds
done
echo >set_ftrace_filter
"""
ROUNDS = 4
ROUNDS_SECONDS = 600.0


def test_tracers_under_torture_cause_no_wrong_byte(
    session: Session, kernel: Kernel, module: Path
) -> None:
    """With tracers, every byte is right, pages come from the cache, and the driver stays on."""
    guest = driver_guest(
        session,
        kernel,
        module,
        parameters="verify_every=0",
        cpus=2,
        tcg_threads="single",
    )
    torture = LastingTorture(guest, seed(), "--ops=4000 --jobs=2 --files=16 --size-max=262144")
    guest.put("/tmp/toggle", TOGGLE.encode())
    guest.sh("touch /tmp/rounds")
    toggling = guest.start("exec sh /tmp/toggle", 900)

    def toggled() -> bool:
        assert not torture.has_ended(guest), guest.get(torture.OUTPUT)[-4000:]
        assert not toggling.done(), toggling.wait().text
        return int(guest.sh("wc -l </tmp/rounds")) >= ROUNDS

    until(toggled, ROUNDS_SECONDS, f"all tracers were on {ROUNDS} times")
    before = stats(guest)["hits"]
    guest.sh("touch /tmp/enough")
    assert toggling.wait().status == 0
    torture.finish(guest)
    tracers = guest.sh("cd /tmp && grep -l 1 saw.*").split()
    assert {"saw.function", "saw.function_graph", "saw.kprobes"} <= set(tracers)
    if "CONFIG_FPROBE_EVENTS=y" in (kernel.kdir / ".config").read_text():
        assert "saw.fprobes" in tracers
    counters = stats(guest)
    print(tracers, counters)
    assert counters["hits"] > before > 0
    assert counters["mismatches"] == 0
    wait_state(guest, "on")
