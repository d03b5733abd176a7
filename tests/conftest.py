# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Fixtures for VM tests. The report of a failed test has the end of each of its processes' logs."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness import kernel as kernels
from harness import kvm
from harness import module as modules
from harness.kernel import Kernel
from harness.paths import HarnessError, host_binary, qemu_binary
from harness.session import Session

SESSION = pytest.StashKey[Session]()
FAILED = pytest.StashKey[bool]()


@dataclass
class Results:
    """Results of all tests of this run, including those in worker processes of pytest-xdist."""

    ran: bool = False
    skipped: str = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped = report.longrepr[2]
        elif report.when == "call":
            self.ran = True


RESULTS = pytest.StashKey[Results]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel", default="6.12", help="kernel series of the guests")
    parser.addoption("--not-all-skipped", action="store_true", help="fail if all tests are skipped")
    parser.addoption(
        "--kvm", action="store_true", help="run on KVM; skip all tests if KVM cannot be used"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = Results()
    config.pluginmanager.register(config.stash[RESULTS])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--kvm"):
        reason = kvm.why_not(kernels.prepare(config.getoption("--kernel")))
        if reason:
            skip = pytest.mark.skip(reason=f"KVM cannot be used here: {reason}")
            for item in items:
                item.add_marker(skip)
        else:
            os.environ["TMEM_ACCEL"] = "kvm"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    results = config.stash[RESULTS]
    if not results.ran and results.skipped:
        terminalreporter.write_line(
            f"nothing was tested, all tests were skipped: {results.skipped}"
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # a worker process of pytest-xdist does not know the results of other workers
    results = session.config.stash[RESULTS]
    if results.skipped and not results.ran and session.config.getoption("--not-all-skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


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
    """Returns the stock kernel under test."""
    return kernels.prepare(request.config.getoption("--kernel"))


@pytest.fixture(scope="session")
def qemu() -> Path:
    """Returns the QEMU with the device, or fails with the command that builds it."""
    return qemu_binary()


@pytest.fixture(scope="session")
def host_programs() -> None:
    """Fails unless tmemd and tmemctl exist."""
    for name in ("tmemd", "tmemctl"):
        host_binary(name)


@pytest.fixture(scope="session")
def module(kernel: Kernel) -> Path:
    """Returns the guest driver's module as users get it, without test-only parameters."""
    return modules.build(kernel)


@pytest.fixture(scope="session")
def test_module(kernel: Kernel) -> Path:
    """Returns the guest driver's module with its test-only parameters."""
    return modules.build(kernel, test=True)


@pytest.fixture
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Yields the owner of the test's VMs and daemons.

    The test fails if a guest's kernel reports a fault.
    """
    with Session() as session:
        request.node.stash[SESSION] = session
        yield session
        if not request.node.stash.get(FAILED, False):
            session.check_consoles()


@pytest.fixture
def expect_error() -> Callable[[Callable[[], object]], str]:
    """Returns a function that runs an action and returns the message of its HarnessError."""

    def call(action: Callable[[], object]) -> str:
        with pytest.raises(HarnessError) as caught:
            action()
        return str(caught.value)

    return call
