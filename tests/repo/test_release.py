# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests the version, the source archive and the apt repository of a release."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.paths import ROOT

pytestmark = pytest.mark.long

NAMING = (
    "Cargo.toml", "Cargo.lock", "guest-driver/core/core.h", "debian/changelog",
    "examples/cloud-init.yaml", "docs/install.md", "CHANGELOG.md", "packaging/version",
)  # fmt: skip


PROGRAMS = ("tmemd", "tmemctl", "tmem-libvirt", "tmem-exporter")


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], check=False, text=True, env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def passed(*command: str | Path, **environment: str) -> str:
    done = run(*command, **environment)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}"
    return done.stdout


def copied(directory: Path) -> Path:
    """Copies the files that name the version."""
    for name in NAMING:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, directory / name)
    return directory / "packaging/version"


def test_all_files_name_the_same_version(tmp_path: Path) -> None:
    version = passed(ROOT / "packaging/version").strip()
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    for name in NAMING[:-3]:
        script = copied(tmp_path)
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


def test_setting_a_version_changes_all_files(tmp_path: Path) -> None:
    script = copied(tmp_path)
    old = passed(script).strip()
    log = tmp_path / "CHANGELOG.md"
    debian = tmp_path / "debian/changelog"
    before = f"virtio-tmem ({old}) UNRELEASED;"
    assert "\n## Unreleased\n" in log.read_text() and before in debian.read_text()
    # The first release may have the version that the tree has already.
    assert passed(script, "--set", old) == f"{old}\n"
    assert f"\n## {old}\n" in log.read_text() and before not in debian.read_text()
    assert "has no section Unreleased" in run(script, "--set", old).stdout
    log.write_text(log.read_text().replace("\n## ", "\n## Unreleased\n\n## ", 1))
    assert passed(script, "--set", "7.8.9") == "7.8.9\n"
    assert f"({old}) unstable;" in debian.read_text()
    assert f"version       {old}" not in (tmp_path / "docs/install.md").read_text()
    assert run(script, "--set", "7.8").returncode == 2


SOURCE_TREE = ROOT / "packaging/source-tree"


def test_source_tree_script_replaces_only_directories_that_it_wrote(tmp_path: Path) -> None:
    """The script leaves a directory with other files, and the repository itself, as they are."""
    target = tmp_path / "tree"
    passed(SOURCE_TREE, target)
    assert (target / "Makefile").exists()
    (target / "stale").touch()
    passed(SOURCE_TREE, target)
    assert not (target / "stale").exists()

    copy = tmp_path / "copy"
    passed("cp", "-a", target, copy)
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
    passed(tmp_path / "link/packaging/source-tree", tmp_path / "tree")
    assert (tmp_path / "tree/Makefile").exists() and not (tmp_path / "tree/.git").exists()
    done = run(
        SOURCE_TREE, tmp_path / "other", GIT_TEST_ASSUME_DIFFERENT_OWNER="1",
        GIT_CONFIG_GLOBAL="/dev/null", GIT_CONFIG_NOSYSTEM="1",
    )  # fmt: skip
    assert done.returncode == 1 and "git cannot read the repository" in done.stdout, done.stdout
    assert not (tmp_path / "other").exists()


# Stands in for dpkg-buildpackage: shows where it runs, and makes a package without contents.
BUILD = """#!/bin/sh
echo "BUILD $PWD $CARGO_TARGET_DIR"
touch ../virtio-tmem-guest_1_all.deb ../virtio-tmem_1.changes ../virtio-tmem_1.buildinfo
"""


def test_builds_of_a_commit_and_of_the_tree_use_separate_directories(tmp_path: Path) -> None:
    """With one target directory for both, Cargo would use the commit's programs for the tree."""
    program = tmp_path / "bin/dpkg-buildpackage"
    program.parent.mkdir()
    program.write_text(BUILD)
    program.chmod(0o755)
    output = tmp_path / "output"
    output.mkdir()
    version = passed(ROOT / "packaging/version").strip()
    versions = ("0.0.1", version)
    qemu = [output / f"virtio-tmem-qemu_10.0+tmem{name}~deb13_amd64.deb" for name in versions]
    for file in qemu:
        file.touch()

    def build(*options: str) -> list[str]:
        text = passed(
            ROOT / "packaging/packages", "--guest", *options, output,
            PATH=f"{program.parent}:{os.environ['PATH']}",
            TMEM_PACKAGES_WORK=str(tmp_path / "work"), CARGO_TARGET_DIR=str(tmp_path / "target"),
        )  # fmt: skip
        found = re.search(r"^BUILD (\S+) (\S+)$", text, re.MULTILINE)
        assert found, text
        return list(found.groups())

    tree = build()
    assert tree[1] == str(tmp_path / "target")
    # Packages of QEMU that belong to another version are deleted.
    assert [file.exists() for file in qemu] == [False, True]
    commit = build("--commit", "HEAD")
    assert not set(tree) & set(commit)
    assert build() == tree


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    passed(ROOT / "packaging/dist", directory)
    return directory


def test_release_files_are_reproducible(archives: Path, tmp_path: Path) -> None:
    """A second packaging/dist in another directory, time zone and language gives equal bytes."""
    passed(
        ROOT / "packaging/dist",
        tmp_path,
        TZ="Pacific/Auckland",
        LC_ALL="C.UTF-8",
        TMPDIR="/var/tmp",
    )
    names = sorted(path.name for path in archives.iterdir())
    assert names == sorted(path.name for path in tmp_path.iterdir())
    # The archive, a bill of materials for each program, and the checksums.
    assert len(names) == len(PROGRAMS) + 2
    for name in names:
        assert (archives / name).read_bytes() == (tmp_path / name).read_bytes(), (
            f"{name} differs between two runs of packaging/dist"
        )
    passed("sh", "-c", f"cd {archives} && sha256sum -c SHA256SUMS")


def test_source_archive_builds_without_git_and_network(archives: Path, tmp_path: Path) -> None:
    """The source archive has all crates, and its tree builds the packages for guests."""
    (archive,) = archives.glob("*.tar.xz")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path, filter="tar")
    (tree,) = tmp_path.iterdir()
    home = tmp_path / "cargo"
    home.mkdir()
    home.joinpath("config.toml").write_text(
        '[source.crates-io]\nreplace-with = "vendored"\n'
        f'[source.vendored]\ndirectory = "{tree}/vendor"\n'
    )
    manifest = ("--manifest-path", tree / "Cargo.toml")
    passed("cargo", "metadata", "--format-version=1", "--frozen", *manifest, CARGO_HOME=str(home))
    passed(tree / "packaging/packages", "--guest", tmp_path / "packages")
    assert len(list((tmp_path / "packages").glob("*.deb"))) >= 2


def test_bills_of_materials_list_the_crates_of_the_programs(archives: Path) -> None:
    for program in PROGRAMS:
        (file,) = archives.glob(f"{program}-[0-9]*.cdx.json")
        bill = json.loads(file.read_text())
        assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.5")
        components = {(each["name"], each["version"]): each for each in bill["components"]}
        tree = passed(
            "cargo", "tree", "--manifest-path", ROOT / "Cargo.toml", "--locked", "-p", program,
            "-e", "normal", "--target", "x86_64-unknown-linux-gnu", "--prefix", "none",
        )  # fmt: skip
        crates = set(re.findall(r"^(\S+) v(\S+)", tree, re.MULTILINE))
        crates.remove((program, bill["metadata"]["component"]["version"]))
        assert len(crates) > 10 and crates <= set(components)
        assert all(each["licenses"] for each in components.values())
        # A test's crate is no part of a program.
        assert "tmem-model" not in {name for name, _ in components}


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Generates a key in a directory with a short path, as gpg-agent's socket there needs."""
    home = Path("/tmp") / f"gpg-{os.getpid()}"
    home.mkdir(mode=0o700)
    environment = {"GNUPGHOME": str(home)}
    passed(
        "gpg", "--batch", "--passphrase", "", "--quick-generate-key", "test@virtio-tmem.example",
        "ed25519", "sign", "1d", **environment,
    )  # fmt: skip
    yield environment
    run("gpgconf", "--kill", "all", **environment)
    shutil.rmtree(home)


def test_tag_is_signed_and_on_a_commit_of_its_version(tmp_path: Path, key: dict[str, str]) -> None:
    copied(tmp_path)
    tag = tmp_path / "packaging/tag"
    shutil.copy(ROOT / "packaging/tag", tag)
    environment = {
        **key, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "test", "GIT_AUTHOR_EMAIL": "test@virtio-tmem.example",
        "GIT_COMMITTER_NAME": "test", "GIT_COMMITTER_EMAIL": "test@virtio-tmem.example",
    }  # fmt: skip

    def git(*words: str) -> str:
        return passed("git", "-C", tmp_path, *words, **environment).strip()

    def refused(words: str, *options: str) -> None:
        done = run(tag, *options, **environment)
        assert done.returncode == 1 and words in done.stdout, done.stdout

    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "first")
    first = git("rev-parse", "HEAD")
    old = passed(tmp_path / "packaging/version").strip()
    signed = ("--key", "test@virtio-tmem.example")
    refused("says UNRELEASED", *signed, old)
    passed(tmp_path / "packaging/version", "--set", "7.8.9")
    refused("the tree has changes", *signed, "7.8.9")
    git("commit", "--quiet", "--all", "--message", "second")

    refused(f"has the version 7.8.9, not {old}", *signed, old)
    refused(f"has the version {old}, not 7.8.9", *signed, "7.8.9", first)
    refused("no commit", *signed, "7.8.9", "none")
    passed(tag, *signed, "7.8.9", **environment)
    assert git("cat-file", "-t", "v7.8.9") == "tag"
    assert git("rev-parse", "v7.8.9^{commit}") == git("rev-parse", "HEAD")
    assert "Good signature" in git("verify-tag", "v7.8.9")
    assert git("tag", "--list", "--format=%(contents:subject)") == "virtio-tmem 7.8.9"
    refused("exists", *signed, "7.8.9")

    # Without a key, the tag is made only on request. A commit of another branch gets none.
    git("tag", "--delete", "v7.8.9")
    done = run(tag, "--key", "nobody@virtio-tmem.example", "7.8.9", **environment)
    assert done.returncode != 0 and not git("tag", "--list", "v7.8.9")
    passed(tag, "--unsigned", "7.8.9", **environment)
    assert git("cat-file", "-t", "v7.8.9") == "tag"
    git("tag", "--delete", "v7.8.9")
    second = git("rev-parse", "HEAD")
    git("checkout", "--quiet", first)
    refused("not an ancestor of HEAD", *signed, "7.8.9", second)
    assert run(tag, "7.8", **environment).returncode == 2


def forget(apt: Path) -> None:
    """Makes apt fetch all lists again."""
    shutil.rmtree(apt / "lists", ignore_errors=True)
    (apt / "lists/partial").mkdir(parents=True)


def test_apt_accepts_the_repository_and_refuses_a_modified_copy(
    tmp_path: Path, key: dict[str, str]
) -> None:
    passed(
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
    passed(*make, "test@virtio-tmem.example", repository, **key)
    # A second run for equal packages changes nothing. A package with other bytes is refused.
    passed(*make, "test@virtio-tmem.example", repository, **key)
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
    for name in ("cache/archives/partial", "parts"):
        (apt / name).mkdir(parents=True)
    forget(apt)
    (apt / "sources.list").write_text(
        f"deb [signed-by={repository}/virtio-tmem.gpg] copy:{repository} bookworm main\n"
    )
    options = [
        f"-oDir::Etc::sourcelist={apt}/sources.list", "-oDir::Etc::sourceparts=-",
        f"-oDir::State::lists={apt}/lists", f"-oDir::Cache={apt}/cache",
        "-oDir::State::status=/dev/null", "-oAPT::Sandbox::User=", "-oAPT::Update::Error-Mode=any",
        f"-oDir::Etc::preferencesparts={apt}/parts", "-oDir::Etc::preferences=-",
    ]  # fmt: skip
    passed("apt-get", *options, "update")
    version = passed(ROOT / "packaging/version").strip()
    assert f"Version: {version}\n" in passed("apt-cache", *options, "show", "virtio-tmem-guest")

    # apt refuses a package list that differs from the one whose checksum is signed.
    changed = repository / "dists/bookworm/main/binary-amd64/Packages"
    changed.with_suffix(".gz").unlink()
    original = changed.read_text()
    changed.write_text(original.replace("tmem-guest", "tmem-other"))
    forget(apt)
    done = run("apt-get", *options, "update")
    assert done.returncode != 0 and "mismatch" in done.stdout, done.stdout
    changed.write_text(original)
    # apt refuses a release file that was changed after it was signed.
    release = repository / "dists/bookworm/InRelease"
    release.write_text(release.read_text().replace("Label: virtio-tmem", "Label: virtio-temm"))
    forget(apt)
    done = run("apt-get", *options, "update")
    # gpgv (Debian 12) and sqv (Debian 13) describe a bad signature in different words.
    assert done.returncode != 0 and re.search("BADSIG|manipulated", done.stdout), done.stdout
