# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The examples of cloud-init and Ansible are valid, and install what docs/install.md installs."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.paths import ROOT

EXAMPLES = ROOT / "examples"
# Debian's Python, whose yaml comes with the package ansible-core.
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


def installed(text: str) -> list[set[str]]:
    """Returns the project's packages in each `apt install` or `apt-get install` of a text."""
    lines = re.findall(r"apt(?:-get)? install (.*?)(?:&&|$)", text, re.MULTILINE)
    ours = [set(re.findall(r"virtio-tmem-[a-z]+|linux-headers-\$\(uname -r\)", s)) for s in lines]
    return [packages for packages in ours if packages]


def documented() -> list[set[str]]:
    return installed((ROOT / "docs/install.md").read_text())


def test_cloud_init_example_installs_the_documented_packages(tmp_path: Path) -> None:
    assert (EXAMPLES / "cloud-init.yaml").read_text().startswith("#cloud-config\n")
    config = yaml(EXAMPLES / "cloud-init.yaml")
    assert set(config) == {"package_update", "packages", "write_files", "runcmd"}
    (file,) = config["write_files"]
    assert config["runcmd"] == [[file["path"]]] and file["permissions"] == "0755"
    script = tmp_path / "script"
    script.write_text(file["content"])
    run("shellcheck", str(script))
    (packages,) = installed(file["content"])
    assert packages in documented()
    found = VERSION.search((ROOT / "debian/changelog").read_text())
    assert found and f"version={found[1]}\n" in file["content"]
    built = (ROOT / "debian/control").read_text()
    for name, kind in re.findall(r"(virtio-tmem-\w+)_\$\{version\}_(\w+)\.deb", file["content"]):
        assert f"Package: {name}\nArchitecture: {kind}\n" in built


def test_ansible_example_installs_the_documented_packages() -> None:
    run(
        "ansible-playbook", "--syntax-check", "-e", "packages=/tmp",
        "-i", str(EXAMPLES / "ansible/inventory.ini"), str(EXAMPLES / "ansible/site.yml"),
    )  # fmt: skip
    host, guest = yaml(EXAMPLES / "ansible/site.yml")
    for play in (host, guest):
        copy, install = play["tasks"][:2]
        (packages,) = installed(install["ansible.builtin.shell"]["cmd"])
        assert packages in documented()
        copied = {Path(name).name.split("_")[0] for name in copy["with_fileglob"]}
        assert copied == {name for name in packages if name.startswith("virtio")}
    groups = (EXAMPLES / "ansible/inventory.ini").read_text()
    assert all(f"[{play['hosts']}]" in groups for play in (host, guest))


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


@pytest.mark.parametrize("condition", ["--with", "--without"])
def test_rpm_spec_parses_with_the_version_of_the_tree(condition: str) -> None:
    spec = str(ROOT / "rpm/virtio-tmem.spec")
    query = ("-q", condition, "host", "--qf", "%{name} %{version}\n")
    names = run("rpmspec", *query, spec).splitlines()
    found = VERSION.search((ROOT / "debian/changelog").read_text())
    assert found
    packages = {"virtio-tmem-dkms", "virtio-tmem-guest"}
    if condition == "--with":
        packages |= {"virtio-tmem-host", "virtio-tmem-exporter"}
    # rpmspec also names the package without a suffix, which has no files and is not built.
    packages.add("virtio-tmem")
    assert set(names) == {f"{package} {found[1]}" for package in packages}


def test_rpms_for_guests_build(tmp_path: Path) -> None:
    run(str(ROOT / "rpm/build"), "--guest", str(tmp_path))
    contents = {
        path.name.rsplit("-", 2)[0]: run("rpm", "-qlp", str(path)).split()
        for path in tmp_path.glob("*.rpm")
    }
    assert set(contents) == {"virtio-tmem-dkms", "virtio-tmem-guest"}
    assert "/usr/sbin/tmem-guest" in contents["virtio-tmem-guest"]
    source = [name for name in contents["virtio-tmem-dkms"] if name.startswith("/usr/src/")]
    assert any(name.endswith("/dkms.conf") for name in source)
    assert any(name.endswith("/core/ring.c") for name in source)
