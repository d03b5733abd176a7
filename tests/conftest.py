# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Fixtures for VM tests; a failed test's report carries the last words of all it ran."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from harness import kernel as kernels
from harness import module as modules
from harness.kernel import Kernel
from harness.paths import HarnessError, host_binary, qemu_binary
from harness.session import Session

SESSION = pytest.StashKey[Session]()
FAILED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel", default="6.12", help="kernel series of the guests")
    parser.addoption("--shard", help="K/N: of all tests, by name, the K-th of N parts")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shard = config.getoption("--shard")
    if not shard:
        return
    part, _, of = shard.partition("/")
    if not (part.isdigit() and of.isdigit() and 1 <= int(part) <= int(of)):
        raise pytest.UsageError(f"--shard {shard}: expected K/N with 1 <= K <= N")
    # By position in the sorted names: stable, and each test is in exactly one shard.
    names = sorted(item.nodeid for item in items)
    mine = set(names[int(part) - 1 :: int(of)])
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in mine])
    items[:] = [item for item in items if item.nodeid in mine]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        item.stash[FAILED] = True
        if session := item.stash.get(SESSION, None):
            report.sections.append(("virtual machines", session.report()))
    return report


@pytest.fixture(scope="session")
def kernel(request: pytest.FixtureRequest) -> Kernel:
    """The stock kernel under test."""
    return kernels.prepare(request.config.getoption("--kernel"))


@pytest.fixture(scope="session")
def qemu() -> Path:
    """The QEMU with the device, or a failure that says how to get it."""
    return qemu_binary()


@pytest.fixture(scope="session")
def host_programs() -> None:
    """tmemd and tmemctl exist."""
    for name in ("tmemd", "tmemctl"):
        host_binary(name)


@pytest.fixture(scope="session")
def module(kernel: Kernel) -> Path:
    """The guest driver's module as users get it."""
    return modules.build(kernel)


@pytest.fixture(scope="session")
def test_module(kernel: Kernel) -> Path:
    """The module with its test-only parameters."""
    return modules.build(kernel, test=True)


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Owns the test's VMs and daemons; afterwards no guest may have complained."""
    with Session() as session:
        request.node.stash[SESSION] = session
        yield session
        if not request.node.stash.get(FAILED, False):
            session.check_consoles()


@pytest.fixture
def expect_error() -> Callable[[Callable[[], object]], str]:
    """Calls something that must raise HarnessError, and returns its message."""

    def call(action: Callable[[], object]) -> str:
        with pytest.raises(HarnessError) as caught:
            action()
        return str(caught.value)

    return call
