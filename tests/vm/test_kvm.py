# SPDX-License-Identifier: Apache-2.0 OR MIT
"""On KVM, kicks and interrupts bypass QEMU (ioeventfd and irqfd), as QEMU's traces show."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from driver import driver_vm, load, start_daemon

from harness.kernel import Kernel
from harness.session import Session
from harness.vm import Tmem
from harness.wait import until

pytestmark = [
    pytest.mark.usefixtures("qemu", "host_programs"),
]

QUEUES = 2  # a control queue and one request queue


def test_kicks_and_interrupts_bypass_qemu(session: Session, kernel: Kernel, module: Path) -> None:
    if os.environ.get("TMEM_ACCEL") != "kvm":
        pytest.skip("needs KVM: run make shard NAME=kvm")
    daemon = start_daemon(session)
    trace = session.directory / "trace"
    events = ("kvm_set_ioeventfd_mmio", "kvm_irqchip_add_msi_route")
    arguments = [part for event in events for part in ("-trace", f"enable={event}")]
    tmem = Tmem(daemon.socket("vm1"), num_queues=QUEUES - 1)
    arguments += ["-D", str(trace)]
    load(driver_vm(session, kernel, module, tmem, arguments=arguments).start())

    def all_there() -> bool:
        lines = trace.read_text().splitlines() if trace.exists() else []
        kicks = [line for line in lines if events[0] in line and "assign: 1" in line]
        routes = [line for line in lines if events[1] in line and "vhost-user-tmem" in line]
        return len(kicks) >= QUEUES and len(routes) >= QUEUES

    until(all_there, 30, "QEMU has set up an ioeventfd and an irqfd's route for each queue")
