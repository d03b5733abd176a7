# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The example of cloud-init is valid, and installs what docs/install.md installs."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from harness.paths import ROOT

EXAMPLES = ROOT / "examples"
# Debian's Python, whose yaml comes with the package python3-yaml.
PYTHON = "/usr/bin/python3"
VERSION = re.compile(r"^virtio-tmem \((.*)\)", re.MULTILINE)


def run(*command: str) -> str:
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, f"{' '.join(command)} failed:\n{done.stdout}"
    return done.stdout


def yaml(path: Path) -> Any:
    program = "import json, sys, yaml; json.dump(yaml.safe_load(open(sys.argv[1])), sys.stdout)"
    return json.loads(run(PYTHON, "-c", program, str(path)))


def installed_packages(text: str) -> list[set[str]]:
    """Returns the project's packages in each `apt install` or `apt-get install` of a text."""
    lines = re.findall(r"apt(?:-get)? install (.*?)(?:&&|$)", text, re.MULTILINE)
    ours = [set(re.findall(r"virtio-tmem-[a-z]+|linux-headers-\$\(uname -r\)", s)) for s in lines]
    return [packages for packages in ours if packages]


def documented_packages() -> list[set[str]]:
    return installed_packages((ROOT / "docs/install.md").read_text())


def test_cloud_init_example_installs_the_documented_packages(tmp_path: Path) -> None:
    assert (EXAMPLES / "cloud-init.yaml").read_text().startswith("#cloud-config\n")
    config = yaml(EXAMPLES / "cloud-init.yaml")
    assert set(config) == {"package_update", "packages", "write_files", "runcmd"}
    (file,) = config["write_files"]
    assert config["runcmd"] == [[file["path"]]] and file["permissions"] == "0755"
    script = tmp_path / "script"
    script.write_text(file["content"])
    run("shellcheck", str(script))
    (packages,) = installed_packages(file["content"])
    assert packages in documented_packages()
    found = VERSION.search((ROOT / "debian/changelog").read_text())
    assert found and f"version={found[1]}\n" in file["content"]
    built = (ROOT / "debian/control").read_text()
    for name, kind in re.findall(r"(virtio-tmem-\w+)_\$\{version\}_(\w+)\.deb", file["content"]):
        assert f"Package: {name}\nArchitecture: {kind}\n" in built


def test_containerfile_copies_the_files_that_scripts_deps_reads() -> None:
    """The Containerfile copies the files that scripts/deps reads before it runs this script."""
    text = (ROOT / "Containerfile").read_text()
    before, _ = text.split("RUN /src/scripts/deps test\n")
    copied = re.findall(r"^COPY (\S+) /src/(\S+)$", before, re.MULTILINE)
    assert copied and all(source == target for source, target in copied)
    assert all((ROOT / source).is_file() for source, _ in copied)
    script = (ROOT / "scripts/deps").read_text()
    read = {f"{path}" for path in re.findall(r"\$here/\.\./([\w./-]+)", script)}
    assert read <= {source for source, _ in copied}
