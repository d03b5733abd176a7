# SPDX-License-Identifier: Apache-2.0 OR MIT
"""If QEMU cannot create the device, its message names the object, the value and a remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.kernel import Kernel
from harness.session import Session
from harness.vm import Config, Tmem

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("qemu")]

PROPERTIES = [
    ({"num-queues": "17"}, ["num-queues=17", "16"]),
    ({"num-queues": "70000"}, ["num-queues"]),
    ({"queue-size": "300"}, ["queue-size=300", "power of 2"]),
    ({"queue-size": "2048"}, ["queue-size=2048", "1024"]),
    ({"queue-size": "0"}, ["queue-size=0"]),
    ({"iommu_platform": "on"}, ["iommu_platform=on"]),
    ({"packed": "on"}, ["packed=on"]),
    ({"backend-timeout-ms": "0"}, ["backend-timeout-ms"]),
]


@pytest.mark.parametrize(("properties", "words"), PROPERTIES, ids=lambda value: str(value)[:40])
def test_invalid_property_is_refused_with_its_value(
    session: Session,
    kernel: Kernel,
    expect_error: Callable[[Callable[[], object]], str],
    properties: dict[str, str],
    words: list[str],
) -> None:
    tmem = Tmem(session.directory / "absent", properties=properties)
    message = expect_error(session.vm(Config(kernel, tmem=tmem)).launch)
    assert "ended with status 1" in message
    for word in words:
        assert word in message, f"the message does not have '{word}': {message}"


@pytest.mark.parametrize("backend", ["memory-backend-ram", "memory-backend-memfd,share=off"])
def test_memory_that_is_not_shared_is_refused_with_a_remedy(
    session: Session,
    kernel: Kernel,
    expect_error: Callable[[Callable[[], object]], str],
    backend: str,
) -> None:
    tmem = Tmem(session.directory / "absent")
    message = expect_error(session.vm(Config(kernel, tmem=tmem, memory_backend=backend)).launch)
    assert "vhost-user-tmem" in message
    assert "share=on" in message, f"the message does not name share=on: {message}"


def test_missing_chardev_is_refused(
    session: Session, kernel: Kernel, expect_error: Callable[[Callable[[], object]], str]
) -> None:
    config = Config(kernel, arguments=["-device", "vhost-user-tmem-pci"])
    assert "chardev" in expect_error(session.vm(config).launch)


def test_chardev_that_is_no_socket_is_refused(
    session: Session, kernel: Kernel, expect_error: Callable[[Callable[[], object]], str]
) -> None:
    arguments = ["-chardev", "null,id=nowhere", "-device", "vhost-user-tmem-pci,chardev=nowhere"]
    message = expect_error(session.vm(Config(kernel, arguments=arguments)).launch)
    assert "nowhere" in message
    assert "socket" in message
