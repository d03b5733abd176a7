# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The tables of tests/shards.py are complete, and CI runs the shards of a change first."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.paths import ROOT, TESTS

sys.path.append(str(TESTS))
import shards

# Directories whose files a shard of CI has to cover. `make check` suffices for changes of others.
COVERED = ("debian/", "guest-driver/", "host-daemon/", "packaging/", "qemu-dev/", "tests/vm/")


def tracked_files() -> list[str]:
    """Returns the paths of all files in git."""
    command = ["git", "ls-files"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_each_file_of_vm_tests_is_in_one_table() -> None:
    tables = " ".join([*shards.DRIVER_TESTS.values(), shards.HOST_TESTS]).split()
    own = {"native", "debug_kernel", "intree"}
    files = {path.stem.removeprefix("test_") for path in (TESTS / "vm").glob("test_*.py")}
    assert sorted(tables) == sorted(files - own)


def test_each_path_of_a_shard_exists() -> None:
    files = tracked_files()
    for name, shard in shards.SHARDS.items():
        for prefix in shard.paths:
            assert any(file.startswith(prefix) for file in files), f"{name}: {prefix}"


@pytest.mark.parametrize("directory", COVERED)
def test_each_file_of_the_product_is_covered_by_a_shard_of_ci(directory: str) -> None:
    names = [name for name, shard in shards.SHARDS.items() if shard.ci]
    for file in tracked_files():
        if file.startswith(directory) and not file.endswith(".md"):
            assert any(shards.covers(name, [file]) for name in names), file


def test_shards_that_cover_changes_come_first_then_those_of_the_oldest_run() -> None:
    state = {name: {"begin": float(number)} for number, name in enumerate(shards.SHARDS)}
    change = ["qemu-dev/src/hw/virtio/vhost-user-tmem.c"]
    touched = {name for name in shards.SHARDS if shards.covers(name, change)}
    found = shards.order(touched, state)
    assert found[:3] == ["host", "qemu", "qemu-newest"]
    rest = found[3:]
    assert rest == sorted(rest, key=lambda name: state[name]["begin"])
    assert set(found) == {name for name, shard in shards.SHARDS.items() if shard.ci}


def test_shards_that_never_ran_come_before_others() -> None:
    state = {name: {"begin": 1.0} for name in shards.SHARDS if name != "ops"}
    assert shards.order(set(), state)[0] == "ops"


def test_a_failed_shard_keeps_the_time_of_its_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise it would come first again, and the other shards would never run."""
    shard = shards.Shard("fails", ("false",), (), needs="")
    monkeypatch.setattr(shards, "STATE", tmp_path / "shards.json")
    monkeypatch.setitem(shards.SHARDS, "fails", shard)
    with pytest.raises(shards.FailedError):
        shards.run_shard("fails")
    assert set(shards.read_state()["fails"]) == {"begin"}


def test_unknown_commit_counts_the_files_of_the_last_commits() -> None:
    assert shards.changed_files("0" * 40) == shards.changed_files("")
    assert shards.changed_files("HEAD") == shards.git("diff", "--name-only", "HEAD").splitlines()


def test_commands_name_test_programs_that_exist() -> None:
    """cargo takes one filter of tests before --, and a name of --test that a crate has."""
    for name, shard in shards.SHARDS.items():
        for package, test in re.findall(r"-p (\S+) --test (\S+)", " ".join(shard.commands)):
            tests = ROOT / "host-daemon" / package / "tests"
            manifest = (tests.parent / "Cargo.toml").read_text()
            assert (tests / test).is_dir() or f'name = "{test}"' in manifest, f"{name}: {test}"
        for command in shard.commands:
            arguments = re.sub(r".* test --locked", "", command).split(" -- ")[0]
            assert arguments.count("::") <= 1, f"{name}: {command}"
