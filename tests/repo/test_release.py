# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests the version, the copy of the source files and the apt repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.paths import ROOT

pytestmark = pytest.mark.long

NAMING = (
    "Cargo.toml", "Cargo.lock", "guest-driver/core/core.h", "debian/changelog",
    "examples/cloud-init.yaml", "CHANGELOG.md", "packaging/version",
)  # fmt: skip


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], check=False, text=True, env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run_checked(*command: str | Path, **environment: str) -> str:
    done = run(*command, **environment)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}"
    return done.stdout


def copy_version_files(directory: Path) -> Path:
    """Copies the files that name the version, and returns the copy of packaging/version."""
    for name in NAMING:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, directory / name)
    return directory / "packaging/version"


def test_all_files_name_the_same_version(tmp_path: Path) -> None:
    version = run_checked(ROOT / "packaging/version").strip()
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    for name in NAMING[:-2]:
        script = copy_version_files(tmp_path)
        file = tmp_path / name
        if name.endswith("core.h"):
            text = re.sub(r"(VERSION_PATCH\t)\d+", r"\g<1>99", file.read_text())
        elif name.endswith(".lock"):
            own = f'name = "tmem-control"\nversion = "{version}"'
            text = file.read_text().replace(own, own.replace(version, "99.0.0"))
        else:
            text = file.read_text().replace(version, "99.0.0", 1)
        file.write_text(text)
        done = run(script)
        assert done.returncode == 1, (
            f"packaging/version does not refuse another version in {name}: {done.stdout}"
        )
        assert name in done.stdout or name.endswith("Cargo.toml")


SOURCE_TREE = ROOT / "packaging/source-tree"


def test_source_tree_script_replaces_only_directories_that_it_wrote(tmp_path: Path) -> None:
    """The script leaves a directory with other files, and the repository itself, as they are."""
    target = tmp_path / "tree"
    run_checked(SOURCE_TREE, target)
    assert (target / "Makefile").exists()
    (target / "stale").touch()
    run_checked(SOURCE_TREE, target)
    assert not (target / "stale").exists()

    copy = tmp_path / "copy"
    run_checked("cp", "-a", target, copy)
    (copy / ".source-tree").unlink()
    script = copy / "packaging/source-tree"
    # A marker does not allow the script to delete the tree that contains the script.
    for directory in (copy, tmp_path):
        (directory / ".source-tree").touch()
        done = run(script, directory)
        assert done.returncode == 1 and "is or contains the source tree" in done.stdout, done.stdout
        (directory / ".source-tree").unlink()
    for directory in (tmp_path, copy / "docs"):
        done = run(SOURCE_TREE, directory)
        assert done.returncode == 1 and "did not write" in done.stdout, done.stdout
    assert (copy / "Makefile").exists() and (copy / "docs/install.md").exists()


def test_source_tree_script_copies_no_untracked_files(tmp_path: Path) -> None:
    """Neither a checkout behind a link nor one of another user counts as a source archive."""
    (tmp_path / "link").symlink_to(ROOT)
    run_checked(tmp_path / "link/packaging/source-tree", tmp_path / "tree")
    assert (tmp_path / "tree/Makefile").exists() and not (tmp_path / "tree/.git").exists()
    done = run(
        SOURCE_TREE, tmp_path / "other", GIT_TEST_ASSUME_DIFFERENT_OWNER="1",
        GIT_CONFIG_GLOBAL="/dev/null", GIT_CONFIG_NOSYSTEM="1",
    )  # fmt: skip
    assert done.returncode == 1 and "git cannot read the repository" in done.stdout, done.stdout
    assert not (tmp_path / "other").exists()


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Yields the environment of a new key. Its directory has a short path, as gpg-agent needs."""
    home = Path("/tmp") / f"gpg-{os.getpid()}"
    home.mkdir(mode=0o700)
    environment = {"GNUPGHOME": str(home)}
    run_checked(
        "gpg", "--batch", "--passphrase", "", "--quick-generate-key", "test@virtio-tmem.example",
        "ed25519", "sign", "1d", **environment,
    )  # fmt: skip
    yield environment
    run("gpgconf", "--kill", "all", **environment)
    shutil.rmtree(home)


def test_apt_accepts_the_repository_whose_packages_never_change(
    tmp_path: Path, key: dict[str, str]
) -> None:
    run_checked(
        ROOT / "packaging/packages",
        "--guest",
        tmp_path / "built",
        TMEM_PACKAGES_WORK=str(tmp_path / "work"),
    )
    repository = tmp_path / "repository"
    make: list[str | Path] = [
        ROOT / "packaging/repository",
        "--packages",
        tmp_path / "built",
        "--key",
    ]
    assert "no secret key" in run(*make, "nobody@example", repository, **key).stdout
    run_checked(*make, "test@virtio-tmem.example", repository, **key)
    # A second run for equal packages changes nothing. A package with other bytes is refused.
    run_checked(*make, "test@virtio-tmem.example", repository, **key)
    names = sorted(path.name for path in repository.iterdir())
    assert names == ["conf", "db", "dists", "pool", "virtio-tmem.gpg"]
    package = next((tmp_path / "built").glob("*.deb"))

    def served() -> dict[Path, bytes]:
        paths = (path for name in ("dists", "pool") for path in (repository / name).rglob("*"))
        return {path: path.read_bytes() for path in paths if path.is_file()}

    before = served()
    package.write_bytes(package.read_bytes() + b"\n")
    done = run(*make, "test@virtio-tmem.example", repository, **key)
    assert (
        done.returncode == 1 and "can only be included again, if they are the same" in done.stdout
    ), done.stdout
    assert before == served()

    apt = tmp_path / "apt"
    for name in ("cache/archives/partial", "lists/partial", "parts"):
        (apt / name).mkdir(parents=True)
    (apt / "sources.list").write_text(
        f"deb [signed-by={repository}/virtio-tmem.gpg] copy:{repository} bookworm main\n"
    )
    options = [
        f"-oDir::Etc::sourcelist={apt}/sources.list", "-oDir::Etc::sourceparts=-",
        f"-oDir::State::lists={apt}/lists", f"-oDir::Cache={apt}/cache",
        "-oDir::State::status=/dev/null", "-oAPT::Sandbox::User=", "-oAPT::Update::Error-Mode=any",
        f"-oDir::Etc::preferencesparts={apt}/parts", "-oDir::Etc::preferences=-",
    ]  # fmt: skip
    run_checked("apt-get", *options, "update")
    version = run_checked(ROOT / "packaging/version").strip()
    assert f"Version: {version}\n" in run_checked(
        "apt-cache", *options, "show", "virtio-tmem-guest"
    )
