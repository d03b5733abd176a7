# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Boots the guests of the workloads, native ones or QEMU's, and reads their counters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.vm.host_bytes import family_seconds
from bench.vm.machine import BENCH, DATA, SECTOR_BYTES, Machine
from bench.vm.results import Measured
from harness import fio, kernel, kvm, module, native, toolchain
from harness.daemon import Daemon, Tenant
from harness.disk import Disk
from harness.guest import Job
from harness.host_use import processor_seconds
from harness.machine import EVERYWHERE, Pinning, pinning
from harness.native import NativeConfig, NativeVm
from harness.paths import TESTS, HarnessError, cache_dir, guest_program, qemu_binary
from harness.session import Session
from harness.vm import MIB, Config, Tmem, Vm

FIO, SQLITE = "/bin/fio", "/usr/bin/sqlite3"
SECONDS = 600  # longest time of one step in a guest
LOADS = "/loads"  # directory in the guest with the requests of all repetitions
TOTALS = ("puts_eligible", "puts_lost", "hits", "misses_late", "misses_tripped")
# Prefixes of counters that tell why pages are not in the pool, or are not read from there.
REASONS = ("puts_dropped_", "puts_skipped_", "puts_refused", "puts_unanswered", "refs_gone",
           "refs_dropped", "refs_unanswered", "trips")  # fmt: skip
SQLITE_SUITE = "bookworm"
SQLITE_PACKAGES = ("sqlite3", "libsqlite3-0", "libreadline8", "libtinfo6", "zlib1g", "libc6")


def sqlite_files() -> dict[str, Path]:
    """Returns Debian's sqlite3 and its libraries, by their paths in the guest."""
    root = cache_dir() / "sqlite" / SQLITE_SUITE
    if not root.is_dir():
        scratch = root.with_name("scratch")
        toolchain.fetch(SQLITE_SUITE, SQLITE_PACKAGES, root.with_name("debs"), scratch)
        scratch.rename(root)
    out = {SQLITE: root / "usr/bin/sqlite3"}
    names = ("libsqlite3.so.0", "libreadline.so.8", "libtinfo.so.6", "libz.so.1", "libm.so.6",
             "libc.so.6", "ld-linux-x86-64.so.2")  # fmt: skip
    for name in names:
        # The package has the dynamic loader in two places; take the first one.
        found = next(path for path in sorted(root.rglob(name)) if path.is_file())
        place = "lib64" if name.startswith("ld-") else "lib/x86_64-linux-gnu"
        out[f"/{place}/{name}"] = found.resolve()
    return out


@dataclass(frozen=True)
class Spec:
    """Description of a guest. Without a `daemon`, the guest has no device."""

    name: str
    ram_bytes: int
    disks: tuple[Disk, ...]
    daemon: Daemon | None = None
    parameters: str = ""  # module parameters of the driver
    direct: bool = True  # False: the disks go through the host's page cache
    sqlite: bool = False
    files: Mapping[str, Path] = field(default_factory=dict)  # more programs in the guest
    merge: bool | None = None  # whether KSM may merge QEMU's memory; None: the memory is shared


class Host(Protocol):
    """A way to run guests: user-mode Linux or QEMU."""

    what: str
    slowdown: float  # estimate of the time of a part, divided by that with native guests
    pinning: Pinning

    def create(self, session: Session, spec: Spec) -> Vm | NativeVm:
        """Returns a guest that is not started yet."""

    def start(self, vm: Vm | NativeVm, spec: Spec) -> None:
        """Boots the guest, with the driver if it has the device."""

    def programs(self) -> dict[str, Path]:
        """Returns the files with the guest's kernel and driver, which the results depend on."""


def _files(spec: Spec) -> dict[str, Path]:
    bench = guest_program(TESTS / "guest/bench.c")
    return {
        BENCH: bench,
        FIO: fio.program(),
        **(sqlite_files() if spec.sqlite else {}),
        **spec.files,
    }


def check_on(vm: Vm | NativeVm) -> None:
    """Raises if the state of the guest's driver is not "on"."""
    state = vm.guest.read("/sys/kernel/virtio_tmem/state")
    if state.split(":")[0] != "on":
        raise HarnessError(f"{vm.name}: the driver is '{state}', not on")


class Native:
    """User-mode Linux, at the machine's own speed."""

    what = f"user-mode Linux {Path(native.chosen_kernel()).name}"
    slowdown = 1.0

    def __init__(self) -> None:
        self.pinning = pinning()
        self._kernel = native.build()

    def programs(self) -> dict[str, Path]:
        return {"kernel with the driver": self._kernel}

    def create(self, session: Session, spec: Spec) -> NativeVm:
        return session.native_vm(
            NativeConfig(
                name=spec.name,
                memory_bytes=spec.ram_bytes,
                disks=spec.disks,
                tmem=spec.daemon.socket(spec.name) if spec.daemon else None,
                files=_files(spec),
                parameters=spec.parameters if spec.daemon else "",
                direct=spec.direct,
            )
        )

    def start(self, vm: Vm | NativeVm, spec: Spec) -> None:
        vm.start()
        if spec.daemon:
            check_on(vm)


# Factor by which guests on emulated processors are slower than native guests: a quick run of all
# parts took 25 minutes on a loaded machine, and was estimated to take 3.
TCG_SLOWDOWN = 6.0

# Size of QEMU's buffer for translated code. It is memory of the emulation and not of the guest, so
# it must not grow during a run.
TCG_BUFFER_BYTES = 64 * MIB

# RAM that the kernel of a distribution takes in a machine of QEMU in addition to that of a native
# guest: MemAvailable after the boot, with 192 MiB of RAM, was 100 MiB instead of 154 MiB. With less
# RAM, the smallest guests have none left for their work.
QEMU_MORE_RAM_BYTES = 56 * MIB


def memory_backend(spec: Spec) -> str:
    """Returns QEMU's option for the guest's memory. KSM merges private memory only."""
    if spec.merge is None:
        return "memory-backend-memfd,share=on"
    return f"memory-backend-ram,share=off,merge={'on' if spec.merge else 'off'}"


class Qemu:
    """QEMU with KVM, or with TCG where no guest boots on KVM.

    Each guest gets QEMU_MORE_RAM_BYTES more than its Spec says.
    """

    def __init__(self, series: str = "6.12") -> None:
        qemu_binary()
        self._kernel = kernel.prepare(series)
        self._driver = module.build(self._kernel)
        self.why_not = kvm.why_not(self._kernel)
        self._accelerator = "tcg" if self.why_not else "kvm"
        how = "TCG (emulated processors)" if self.why_not else "KVM"
        more = f"{QEMU_MORE_RAM_BYTES // MIB} MiB more RAM for each guest"
        self.what = f"QEMU with {how}, {more}"
        self.slowdown = TCG_SLOWDOWN if self.why_not else 1.0
        self.pinning = EVERYWHERE

    def programs(self) -> dict[str, Path]:
        return {"kernel": self._kernel.vmlinuz, "driver": self._driver, "qemu": qemu_binary()}

    def create(self, session: Session, spec: Spec) -> Vm:
        # The driver of a native guest retains pages unless "retain=0" is among its parameters.
        tmem = None
        if spec.daemon:
            tmem = Tmem(spec.daemon.socket(spec.name), properties={"retain": "on"})
        return session.vm(
            Config(
                kernel=self._kernel,
                name=spec.name,
                memory_bytes=spec.ram_bytes + QEMU_MORE_RAM_BYTES,
                disks=spec.disks,
                tmem=tmem,
                files={"/virtio_tmem.ko": self._driver, **_files(spec)},
                accelerator=self._accelerator,
                tcg_buffer_bytes=TCG_BUFFER_BYTES,
                memory_backend=memory_backend(spec),
            )
        )

    def start(self, vm: Vm | NativeVm, spec: Spec) -> None:
        vm.start()
        if spec.daemon:
            # Emulated processors are ten times slower, so the deadline is longer there.
            slower = "deadline_ms=200" if self.why_not else ""
            vm.guest.insmod("/virtio_tmem.ko", f"{slower} {spec.parameters}".strip())
            check_on(vm)


class Box(Machine):
    """A running guest of a workload."""

    def __init__(self, vm: Vm | NativeVm, spec: Spec) -> None:
        super().__init__(vm, spec.daemon is not None)
        self.spec = spec

    def mount_set(self, name: str = "data", options: str = "ro") -> None:
        """Mounts the disk, and waits until the driver serves it."""
        self.guest.mount(name, DATA, options=options)
        self.wait_until_served()

    def mount_loads(self) -> None:
        """Mounts the disk with the requests of all repetitions."""
        self.mount_uncached("loads", LOADS)

    def sh(self, command: str) -> str:
        return self.guest.sh(command, SECONDS)

    def start(self, command: str) -> Job:
        return self.guest.start(command, SECONDS)

    def run_fio(self, arguments: str) -> dict[str, Any]:
        """Runs fio and returns the report of its job, or of its jobs as one group."""
        return fio_report(self.sh(fio_command(arguments)))

    def end(self) -> None:
        self.vm.check_console()
        self.vm.stop()


def fio_command(arguments: str) -> str:
    """Returns fio's command line. fio never drops the page cache by itself.

    `arguments` has the options of all jobs, and then the name and the options of each job. Without
    a name, all options are those of one job.
    """
    job = "" if "--name=" in arguments else "--name=job "
    return f"{FIO} --invalidate=0 --thread --output-format=json {job}{arguments}"


def fio_report(text: str) -> dict[str, Any]:
    """Returns the report of the only job or group in fio's output."""
    # fio may print warnings before the JSON object of the report.
    if "{" not in text:
        raise HarnessError(f"fio printed no report: {text}")
    job: dict[str, Any] = json.loads(text[text.index("{") :])["jobs"][0]
    if job["error"]:
        raise HarnessError(f"fio reported the error {job['error']}")
    return job


class Use:
    """Measures the growth of a guest's counters and of the processor time of guest and daemon."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        box = self._box
        stat = box.guest.disk_stat("data")
        out: dict[str, float] = {
            "disk_reads": stat.reads,
            "disk_read_bytes": stat.read_sectors * SECTOR_BYTES,
            "disk_writes": stat.writes,
            "disk_write_bytes": stat.write_sectors * SECTOR_BYTES,
            "guest_cpu_s": family_seconds(box.vm.process.pid),
        }
        if box.cached:
            counters = box.all_counters()
            out |= {name: counters[name] for name in TOTALS}
            out |= {name: value for name, value in counters.items() if name.startswith(REASONS)}
        if box.spec.daemon:
            out["tmemd_cpu_s"] = processor_seconds(box.spec.daemon.process.pid)
        return out

    def growth(self) -> Measured:
        """Returns the growth. Reasons for lost pages are left out if they did not grow."""
        grown = {name: value - self._before[name] for name, value in self._now().items()}
        return {
            name: value for name, value in grown.items() if value or not name.startswith(REASONS)
        }


class Lab:
    """Starts and ends the guests and daemons of one part of the benchmark."""

    def __init__(self, host: Host, session: Session, images: Path) -> None:
        self.host = host
        self.session = session
        self._images = images
        self._boxes: list[Box] = []
        self._daemons: list[Daemon] = []

    @property
    def directory(self) -> Path:
        return self.session.directory

    def image(self, name: str, make: Callable[[Path], object]) -> Path:
        """Returns an image that no guest changes; `make` creates it for all parts of a run."""
        path = self._images / f"{name}.img"
        if not path.exists():
            make(path)
        return path

    def start_daemon(self, *names: str, pool_bytes: int, domain: str | None = None) -> Daemon:
        tenants = [Tenant(name, trust_domain=domain) for name in names]
        daemon = self.session.daemon(*tenants, pool_size=f"{pool_bytes // MIB}MiB")
        daemon.start()
        self._daemons.append(daemon)
        return daemon

    def create(self, spec: Spec) -> Box:
        """Returns a guest that is not started."""
        box = Box(self.host.create(self.session, spec), spec)
        self._boxes.append(box)
        return box

    def boot(self, box: Box) -> None:
        self.host.start(box.vm, box.spec)

    def boot_guest(self, spec: Spec) -> Box:
        """Returns a guest that has booted."""
        box = self.create(spec)
        self.boot(box)
        return box

    def end(self, boxes: Iterable[Box] = ()) -> None:
        """Ends the guests `boxes`. Without `boxes`, ends all guests and the daemons."""
        some = list(boxes)
        for box in some or self._boxes:
            box.end()
        if some:
            self._boxes = [box for box in self._boxes if box not in some]
        else:
            self._boxes = []
            for daemon in self._daemons:
                daemon.stop()
            self._daemons = []
