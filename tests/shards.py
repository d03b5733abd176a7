#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs the tests of the project: `check-fast`, `check`, and the shards with all other tests.

The tables below say for each shard what it runs, what it needs, and which files it covers. `make`
and CI call this file. CI runs `check`, then the shards that cover the changed files, and then those
that have not run for the longest time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# Start and duration of the last run of each shard, and the commit at which it last passed.
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
STATE = CACHE / "virtio-tmem/shards.json"
# CI starts no shard that is expected to end later than this. CI has an hour, and a shard may last
# longer than its last run.
CI_LIMIT_S = 3300
# Number of commits whose files count as changed for a shard that has never passed on this machine.
CHANGED_COMMITS = 20

# TMEM_NO_SKIPS names what this machine has. A test that needs only this is not skipped.
CARGO_TEST = "TMEM_NO_SKIPS=$(scripts/no-skips) cargo --config net.retry=5 test --locked"
# A test with one guest keeps about one processor busy.
PYTEST = "cd tests && ./python -m pytest -n ${JOBS:-2} --dist worksteal --durations=10"
PROGRAMS = "deps-test programs"
VM = f"{PROGRAMS} qemu"


@dataclass(frozen=True)
class Shard:
    """Tests that run together, in the top directory, after `make NEEDS`."""

    help: str
    commands: tuple[str, ...]
    # Prefixes of the paths that the shard covers.
    paths: tuple[str, ...]
    needs: str = VM
    # Expected duration on two cores, until a run of the shard was measured.
    minutes: int = 18
    # CI leaves out a shard that builds a kernel, or needs a nightly compiler or KVM.
    ci: bool = True


def vm_tests(names: str, options: str = "") -> str:
    """Returns the command that runs the files vm/test_NAME.py."""
    files = " ".join(f"vm/test_{name}.py" for name in names.split())
    return f"{PYTEST} {options} {files}"


# ---- what `make check-fast` and `make check` run ------------------------------------------------

LINTS = (
    "cargo fmt --all --check",
    "rustfmt --check --edition 2024 tests/fuzz/targets/fuzz_targets/*.rs",
    "cargo --config net.retry=5 clippy --locked --workspace --all-targets -- -D warnings",
)
FAST = (
    *LINTS,
    f"{CARGO_TEST} -p virtio-tmem -p tmem-pool -p tmemd --lib",
    "make -s -C guest-driver test",
)
CHECK = (
    *LINTS,
    "make -s lint",
    f"{CARGO_TEST} --workspace",
    "cargo run --locked -p tmem-simulator",
    "make -s -C guest-driver test",
    "tests/python -m pytest -q -n 2 -m 'not long' tests/repo",
    f"{PYTEST} -m smoke vm",
)

# ---- shards -------------------------------------------------------------------------------------

# Tests of the driver run on each series of kernels, with modules built for it.
KERNELS = ("6.1", "6.12", "7.2", "7.3")
DRIVER_TESTS = {
    "driver": "admission async autosize blocks blocks_checks bounds compaction core deadline"
    " driver generation guest_command lies mmio pace ram reporting ring",
    "files": "direct_writes files fs_errors hooks large_folios lockdown memory_error mounts patches"
    " refused trace tracers untested_release",
    "reads": "coverage figures fio life reads retain selftest swap",
    "torture": "filesystems long other_types torture",
}
DRIVER_PATHS = ("guest-driver/", "proto/", "tests/guest/", "tests/harness/", "tests/vm/")
# The results of these tests do not depend on the guest's kernel.
HOST_TESTS = (
    "harness kvm libvirt memory_map memory_slots migration overcommit pressure"
    " snapshot time upgrade watchdog"
)


def dkms(kernel: str) -> str:
    """Returns the command that builds and installs the module with DKMS for a kernel."""
    return f"cd tests && ./python -m pytest --kernel {kernel} -k dkms repo/test_packaging.py"


def driver_shards() -> dict[str, Shard]:
    """Returns the shards of the driver's tests. `make check` has run the smoke tests on 6.12."""
    return {
        f"{part}-{kernel}": Shard(
            f"tests of the driver on {kernel}: {part}",
            (
                vm_tests(
                    names, f"--kernel {kernel}" + (" -m 'not smoke'" if kernel == "6.12" else "")
                ),
                # DKMS builds the module for this kernel.
                *([dkms(kernel)] if part == "files" else []),
            ),
            DRIVER_PATHS,
        )
        for kernel in KERNELS
        for part, names in DRIVER_TESTS.items()
    }


def kernel_shards() -> dict[str, Shard]:
    """Returns the shards that build a kernel from source if it is not in the cache."""
    tests = {
        "debug": "debug_kernel",
        "kcsan": "debug_kernel",
        "intree": "intree",
    }
    return {
        f"kernel-{kernel}": Shard(
            f"tests with the kernel {kernel}, which is built from source",
            (
                f"tests/kernel prepare {kernel} --key release",
                vm_tests(name, f"--kernel {kernel}").replace("-n ${JOBS:-2} --dist worksteal", ""),
            ),
            DRIVER_PATHS,
            minutes=60,
            ci=False,
        )
        for kernel, name in tests.items()
    }


def package_shards() -> dict[str, Shard]:
    """Returns the shards that build the packages and install them in Debian systems."""
    paths = ("debian/", "packaging/", "examples/", "docs/install.md", "Cargo.toml")
    systems = ("namespaces bookworm", "namespaces trixie", "host bookworm", "guest bookworm")
    shards = {
        "packages-" + system.replace(" ", "-"): Shard(
            f"install, run, upgrade and purge the packages: {system}",
            (
                # QEMU's packages take ten minutes: only the shard packages-qemu builds them.
                "qemu-dev/package --print >/dev/null 2>&1 || export QEMU=0; make packages",
                # Status 77: this machine cannot run this check, which says why.
                "packaging/check-packages --in {} --suite {} || [ $? -eq 77 ]".format(
                    *system.split()
                ),
            ),
            paths,
            needs="deps-test" if "namespaces" in system else VM,
            minutes=15,
        )
        for system in (*systems, "guest trixie")
    }
    shards["packages-qemu"] = Shard(
        "build QEMU's packages, and install all packages",
        ("make packages", "packaging/check-packages --in namespaces"),
        ("qemu-dev/debian/", "qemu-dev/package"),
        needs="deps-test",
        minutes=25,
    )
    shards["container"] = Shard(
        "follow the instructions of the Containerfile",
        ("scripts/deps packages", "packaging/check-container"),
        ("Containerfile", "scripts/deps"),
        needs="",
        minutes=25,
    )
    return shards


SHARDS: dict[str, Shard] = {
    **driver_shards(),
    "f2fs": Shard(
        "torture of f2fs on Debian's kernel for all machines",
        (vm_tests("other_types", "-k torture --kernel 6.12-amd64"),),
        DRIVER_PATHS,
        minutes=5,
    ),
    "host": Shard(
        "tests of QEMU's device, the daemon, libvirt and migration in VMs",
        (
            vm_tests(HOST_TESTS, "-m 'not smoke'"),
            "cd tests && ./python -m pytest --not-all-skipped -m smoke vm/test_libvirt.py",
        ),
        ("host-daemon/", "qemu-dev/src/", "tests/harness/", "tests/vm/"),
    ),
    "retain": Shard(
        "tests of coherence with retained pages, and with the optimized programs that are shipped",
        (
            "export TMEM_RETAIN=on TMEM_BIN_DIR=$PWD/target/release; "
            + vm_tests("files mounts torture direct_writes fs_errors fio"),
        ),
        (*DRIVER_PATHS, "host-daemon/"),
        needs="deps-test daemon qemu",
        minutes=22,
    ),
    "pool": Shard(
        "interleavings of the pool's threads, and the daemon with epoll instead of io_uring",
        (
            f"{CARGO_TEST} -p tmem-pool --features shuttle --lib -- interleavings",
            f"TMEM_EVENT_LOOP=epoll {CARGO_TEST} -p tmemd --test integration"
            " -- drain:: hang_up:: liars:: random::",
        ),
        ("host-daemon/tmem-pool/", "host-daemon/tmemd/src/queue/"),
        needs="deps-test",
        minutes=6,
    ),
    "simulator": Shard(
        "50,000 seeds of the simulator, others on each day, with optimized programs",
        (
            "cargo run --locked --release -p tmem-simulator -- --seeds 50000"
            " --first $((1 + 50000 * ($(date +%s) / 86400)))",
        ),
        ("host-daemon/tmem-pool/", "host-daemon/tmemd/", "tests/model/", "tests/simulator/"),
        needs="deps-test",
        minutes=10,
    ),
    "ops": Shard(
        "commands, a real Prometheus, tmemctl top in a terminal, timing side channels",
        (
            f"{CARGO_TEST} -p tmemctl --test integration terminal:: -- --ignored",
            f"{CARGO_TEST} -p tmem-exporter --test integration prometheus:: -- --ignored",
            f"{CARGO_TEST} --release -p tmem-exporter --test integration cost::"
            " -- --ignored --nocapture",
            f"TMEM_SEEDS=8 {CARGO_TEST} --release -p tmem-bench replay_test",
            f"{CARGO_TEST} --release -p tmem-bench timing -- --nocapture",
        ),
        ("host-daemon/tmem-control/", "host-daemon/tmem-exporter/", "host-daemon/tmemctl/",
         "host-daemon/tmem-pool/", "tests/bench/"),
        needs="deps-test",
        minutes=12,
    ),
    "repo": Shard(
        "long tests of scripts and packages",
        ("tests/python -m pytest -q -n 2 -m long tests/repo",),
        ("debian/", "packaging/", "scripts/", "tests/repo/"),
        needs=PROGRAMS,
        minutes=6,
    ),
    "qemu": Shard(
        "QEMU's own tests with the device, and tests of its life",
        ("qemu-dev/qtests", "QEMU=$(qemu-dev/build --print) tests/python -m pytest qemu-dev/tests"),
        ("qemu-dev/",),
        minutes=15,
    ),
    "qemu-newest": Shard(
        "the device in the newest QEMU, which is built; a fault of that version is only reported",
        ("scripts/deps newest", "qemu-dev/try-newest || [ $? -eq 3 ]"),
        ("qemu-dev/patches/", "qemu-dev/src/"),
        minutes=25,
    ),
    **package_shards(),
    **kernel_shards(),
    "native": Shard(
        "guests in user-mode Linux, whose kernel is built",
        ("cd tests && ./python -m pytest vm/test_native.py",),
        ("guest-driver/", "tests/native-kernel/"),
        needs=PROGRAMS,
        minutes=40,
        ci=False,
    ),
    "miri": Shard(
        "the pool's allocators in Miri, which finds undefined behaviour",
        (
            "cargo +nightly miri --version >/dev/null 2>&1 || rustup toolchain install nightly"
            " --profile minimal --component miri --component rust-src",
            "cargo +nightly miri test --locked -p tmem-pool --lib"
            " -- heap:: index::arena:: evict::ghost::",
        ),
        ("host-daemon/tmem-pool/src/heap/", "host-daemon/tmem-pool/src/index/"),
        needs="deps-test",
        ci=False,
    ),
    "fuzz": Shard(
        "each fuzz target for ${MINUTES:-3} minutes",
        ("scripts/deps fuzz", "tests/fuzz/targets/run ${MINUTES:-3} ${TARGETS:-}"),
        ("host-daemon/tmemd/src/queue/", "host-daemon/tmemd/src/vhost/", "tests/fuzz/",
         "tests/model/"),
        needs="",
        ci=False,
    ),
    "kvm": Shard(
        "all VM tests on KVM; skipped with a reason if no guest boots on KVM",
        ("cd tests && ./python -m pytest --kvm vm --ignore=vm/test_native.py",),
        (),
        minutes=60,
        ci=False,
    ),
    "long": Shard(
        "torture on all file systems for ${DURATION:-2h} on the kernels ${KERNELS:-6.12}",
        ("cd tests && ./python vm/long.py --duration ${DURATION:-2h}"
         " --kernels ${KERNELS:-6.12}",),
        (),
        minutes=120,
        ci=False,
    ),
}  # fmt: skip


# ---- running ------------------------------------------------------------------------------------


class FailedError(Exception):
    """A command has failed."""


def run(commands: tuple[str, ...]) -> None:
    """Runs shell commands in the top directory until one of them fails."""
    for command in commands:
        begin = time.monotonic()
        print(f"shards: {command}", flush=True)
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=ROOT, check=False)
        if done.returncode != 0:
            raise FailedError(f"status {done.returncode}: {command}")
        print(f"shards: {time.monotonic() - begin:.0f} s: {command}", flush=True)


def run_shard(name: str) -> None:
    """Builds what the shard needs, runs it, and remembers its time, duration and success."""
    shard = SHARDS[name]
    state = read_state()
    last = state.setdefault(name, {})
    last["begin"] = begin = time.time()
    write_state(state)
    needs = (f"make -s {shard.needs}",) if shard.needs else ()
    run((*needs, *shard.commands))
    last.update(seconds=time.time() - begin, passed=git("rev-parse", "HEAD"))
    write_state(state)


def read_state() -> dict[str, dict[str, Any]]:
    """Returns what earlier runs have remembered of each shard."""
    try:
        return dict(json.loads(STATE.read_text()))
    except (OSError, ValueError):
        return {}


def write_state(state: dict[str, dict[str, Any]]) -> None:
    """Replaces the state of earlier runs."""
    STATE.parent.mkdir(parents=True, exist_ok=True)
    new = STATE.with_suffix(".new")
    new.write_text(json.dumps(state, indent=1))
    new.replace(STATE)


def git(*arguments: str) -> str:
    """Returns the output of a git command, or an empty string if it fails."""
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def changed_files(commit: str) -> list[str]:
    """Returns the files changed since a commit, or by the last commits if it is unknown."""
    if not commit or not git("merge-base", commit, "HEAD"):
        commit = git("rev-parse", f"HEAD~{CHANGED_COMMITS}")
    return (
        git("diff", "--name-only", commit).splitlines() if commit else git("ls-files").splitlines()
    )


def covers(name: str, files: list[str]) -> bool:
    """Returns true if a shard covers one of the files."""
    return any(file.startswith(SHARDS[name].paths) for file in files)


def order(touched: set[str], state: dict[str, dict[str, Any]]) -> list[str]:
    """Returns the shards of CI: first those that cover changed files, then the others.

    In both parts, the shard whose last run is the oldest comes first. Shards that never ran come in
    another order each day, so that all of them run in time on a machine that keeps no state.
    """
    names = [name for name, shard in SHARDS.items() if shard.ci]
    turn = int(time.time() // 86400) % len(names)
    begins = {name: last.get("begin", 0.0) for name, last in state.items()}
    return sorted(
        names[turn:] + names[:turn],
        key=lambda name: (name not in touched, begins.get(name, 0.0)),
    )


def run_ci() -> None:
    """Runs `make check`, and as many shards as are expected to end within CI_LIMIT_S."""
    begin = time.monotonic()
    run(("make -s check",))
    # A new kernel series in Debian is a task for the maintainers, not a fault of the change.
    run(
        ("tests/kernel newest || echo 'shards: the driver does not serve a new kernel, see above'",)
    )
    state = read_state()
    touched = {
        name
        for name in SHARDS
        if covers(name, changed_files(state.get(name, {}).get("passed", "")))
    }
    failed = []
    for name in order(touched, state):
        expected = state.get(name, {}).get("seconds", 60.0 * SHARDS[name].minutes)
        left = CI_LIMIT_S - (time.monotonic() - begin)
        if expected > left:
            print(f"shards: {name} needs {expected:.0f} s, and {left:.0f} s are left: another run")
            continue
        print(f"shards: running {name} after {time.monotonic() - begin:.0f} s", flush=True)
        try:
            run_shard(name)
        except FailedError as error:
            print(f"shards: {name} FAILED: {error}", flush=True)
            failed.append(name)
    if failed:
        raise FailedError(f"shards {' '.join(failed)}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs the tests of the project.")
    parser.add_argument("action", choices=("fast", "check", "run", "ci"))
    parser.add_argument("shard", nargs="*", help="shards to run; without a name: list them")
    parser.add_argument("--all", action="store_true", help="run all shards that CI may run")
    arguments = parser.parse_args()
    names = arguments.shard
    if arguments.all:
        names = [name for name, shard in SHARDS.items() if shard.ci]
    for name in names:
        if name not in SHARDS:
            sys.exit(f"shards: there is no shard {name}; `make shard` lists them")
    try:
        if arguments.action == "fast":
            run(FAST)
        elif arguments.action == "check":
            run(CHECK)
        elif arguments.action == "ci":
            run_ci()
        elif names:
            for name in names:
                run_shard(name)
        else:
            for name, shard in SHARDS.items():
                print(f"  {name:28} {shard.minutes:4} min  {shard.help}")
    except FailedError as error:
        sys.exit(f"shards: failed: {error}")


if __name__ == "__main__":
    main()
