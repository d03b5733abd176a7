# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Checks whether guests can run on KVM here.

An existing /dev/kvm is not enough. In a virtual machine, KVM may exist, create VMs and processors,
and then fail at a feature that a processor needs. Therefore the last check boots a guest.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

from harness.kernel import Kernel
from harness.paths import HarnessError
from harness.vm import Config, Vm

DEVICE = Path("/dev/kvm")

# These numbers are from linux/kvm.h.
GET_API_VERSION = 0xAE00
CREATE_VM = 0xAE01
API_VERSION = 12


def why_not(kernel: Kernel, device: Path = DEVICE) -> str | None:
    """Returns None if KVM can be used, and otherwise the reason as text."""
    return why_no_vm(device) or why_no_guest(kernel)


def why_no_vm(device: Path = DEVICE) -> str | None:
    """Returns the reason why the kernel creates no virtual machine, or None."""
    try:
        kvm = os.open(device, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        return f"{device} cannot be opened: {error.strerror}"
    try:
        version = fcntl.ioctl(kvm, GET_API_VERSION)
        if version != API_VERSION:
            return f"{device} has version {version} of KVM's interface, not {API_VERSION}"
        os.close(fcntl.ioctl(kvm, CREATE_VM, 0))
    except OSError as error:
        return f"{device} makes no virtual machine: {error.strerror}"
    finally:
        os.close(kvm)
    return None


def why_no_guest(kernel: Kernel) -> str | None:
    """Returns the reason why no guest boots on KVM, or None."""
    with tempfile.TemporaryDirectory(prefix="tmem-kvm-") as directory:
        vm = Vm(Config(kernel, name="kvm-probe", accelerator="kvm"), Path(directory) / "vm")
        try:
            vm.start()
        except HarnessError as error:
            return f"a guest does not boot on {DEVICE}: {' '.join(str(error).split())}"
        finally:
            vm.stop()
    return None
