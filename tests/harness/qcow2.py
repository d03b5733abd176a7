# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Creates qcow2 images with the QEMU under test over QMP, so that qemu-img is not needed."""

from __future__ import annotations

import tempfile
from pathlib import Path

from harness.paths import qemu_binary
from harness.process import Process
from harness.qmp import Qmp
from harness.wait import until


def create(path: Path, size_bytes: int, backing: Path | None = None) -> Path:
    """Creates a qcow2 image, for example for snapshots of a VM.

    The image is empty, or has the raw image `backing` as its backing file.
    """
    path.touch()
    with tempfile.TemporaryDirectory(prefix="tmem-") as directory:
        socket = Path(directory) / "qmp"
        command = [str(qemu_binary()), "-machine", "none", "-nodefaults", "-display", "none"]
        command += ["-qmp", f"unix:{socket},server=on,wait=off"]
        process = Process("QEMU making an image", command, Path(directory) / "log")
        try:

            def listening() -> bool:
                process.expect_alive()
                return socket.exists()

            until(listening, 20, "QEMU opens its QMP socket")
            qmp = Qmp(socket, process.name)
            try:
                node = {"driver": "file", "node-name": "file", "filename": str(path)}
                qmp.execute("blockdev-add", node)
                options = {"driver": "qcow2", "file": "file", "size": size_bytes}
                if backing:
                    options |= {"backing-file": str(backing), "backing-fmt": "raw"}
                qmp.run_job("blockdev-create", {"job-id": "create", "options": options}, 30)
                qmp.execute("blockdev-del", {"node-name": "file"})
            finally:
                qmp.close()
        finally:
            process.kill()
    return path
