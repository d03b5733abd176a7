# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The tables of the documentation about the guest driver match the driver's sources exactly."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from test_abi import DRIVER, sources

from harness import kernel, served
from harness.paths import ROOT

SUPPORT = ROOT / "docs/guest-support.md"
README = DRIVER / "README.md"


def table(page: Path, name: str) -> list[list[str]]:
    """Returns the rows, without the heading, of the table after the comment `table: NAME`."""
    text = page.read_text()
    found = re.search(rf"^<!-- table: {name} -->\n((?:\|.*\|\n)+)", text, re.MULTILINE)
    assert found, f"{page.name} has no table '{name}'"
    rows = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in found[1].splitlines()
    ]
    assert len(rows) > 2 and set("".join(rows[1])) <= set("-: ")
    assert len({len(row) for row in rows}) == 1, (
        f"{page.name}, '{name}': the rows have different numbers of cells"
    )
    return rows[2:]


def code(cell: str) -> str:
    """Returns the text between the backquotes with which a cell begins."""
    found = re.match(r"`([^`]+)`", cell)
    assert found, f"the table's cell does not begin with backquotes: {cell}"
    return found[1]


def join_literals(text: str) -> str:
    """Returns C source in which string literals that are split over lines are joined."""
    return re.sub(r'"\s*\n\s*"', "", text)


def source(path: str) -> str:
    return join_literals((DRIVER / path).read_text())


def all_sources() -> str:
    return join_literals("\n".join(sources()))


def kernels_of_source() -> list[served.Served]:
    """Returns the rows of the array tested_kernels[] of the driver."""
    found = served.kernels(source("hooks/init.c"))
    assert len(found) > 1
    return found


def test_kernel_table_matches_the_source() -> None:
    rows = table(SUPPORT, "kernels")
    assert sorted(
        (code(row[1]), code(row[2]), code(row[3]), tuple(re.findall(r"`([^`]+)`", row[4])))
        for row in rows
    ) == sorted(
        (row.begins, row.vendor, f"{row.begins}{row.oldest}", row.releases)
        for row in kernels_of_source()
    )
    assert [(row[0], code(row[1])) for row in table(SUPPORT, "oldest releases")] == [
        (row.series, f"{row.begins}{row.oldest}") for row in kernels_of_source()
    ]
    for row in kernels_of_source():
        assert min(int(name.removeprefix(row.begins)) for name in row.releases) >= row.oldest
        assert row.begins == f"{row.series}."
        assert row.releases and all(name.startswith(row.begins) for name in row.releases)
        assert row.series in kernel.SERIES, (
            f"the page lists Linux {row.series}, which no test can boot"
        )


def test_dkms_requires_the_documented_kernel_options() -> None:
    """dkms.conf requires the kernel options that docs/guest-support.md lists."""
    conf = (DRIVER / "dkms.conf.in").read_text()
    (demanded,) = re.findall(r'^BUILD_EXCLUSIVE_CONFIG="(.*)"$', conf, re.MULTILINE)
    (row,) = re.findall(
        r"^\| without (.*?) \| not built by DKMS", SUPPORT.read_text(), re.MULTILINE
    )
    wanted = {*re.findall(r"`(CONFIG_\w+)`", row), "!CONFIG_PREEMPT_RT"}
    assert set(demanded.split()) == wanted
    assert "CONFIG_LIVEPATCH" not in wanted, (
        "dkms.conf requires CONFIG_LIVEPATCH, which the driver does not use"
    )


def test_readme_names_the_served_kernels() -> None:
    (row,) = re.findall(r"^\| guest kernels \|.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    now, later = row.split("|")[2:4]
    for row_of_source in kernels_of_source():
        series = re.escape(row_of_source.series)
        assert row_of_source.vendor in now
        assert re.search(rf"\b{series}\b", now), (
            f"README.md does not name the served series {series}"
        )
        assert not re.search(rf"\b{series}\b", later)


def test_file_system_table_matches_the_source() -> None:
    body = source("hooks/fs.c").split("tmem_fs_types[] = {", 1)[1].split("\n};", 1)[0]
    types = re.findall(r'\.name = "(\w+)"', body)
    assert "ext4" in types
    assert [code(row[0]) for row in table(SUPPORT, "file systems")] == types
    (row,) = re.findall(r"^\| file systems \|.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert set(re.findall(r"[\w]+", row.split("|")[2])) >= set(types)


def test_inode_flag_table_matches_the_source() -> None:
    (expression,) = re.findall(r"READ_ONCE\(inode->i_flags\) & \(([^)]+)\)", source("hooks/fs.c"))
    flags = [flag.strip() for flag in expression.split("|")]
    assert "S_ENCRYPTED" in flags
    assert sorted(code(row[1]) for row in table(SUPPORT, "inode flags")) == sorted(flags)


def test_quoted_messages_exist_in_the_driver() -> None:
    """Each message that docs/guest-support.md quotes is in the driver's sources."""
    sources = all_sources()
    messages = [code(row[0]) for name in ("messages", "refusals") for row in table(SUPPORT, name)]
    messages += re.findall(r"refused: `([^`]+)`", SUPPORT.read_text())
    assert len(messages) > 10
    for message in messages:
        assert message in sources, f"no source of the driver has the message: {message}"


def defined_numbers() -> dict[str, int]:
    """Returns the numbers that the driver's sources and the protocol's header define."""
    texts = [path.read_text() for path in (*DRIVER.glob("*.[ch]"), *DRIVER.glob("*/*.[ch]"))]
    texts.append((ROOT / "proto/virtio_tmem.h").read_text())
    found: dict[str, int] = {}
    for name, value in re.findall(r"^#define (\w+)\s+(\d+)\b", "\n".join(texts), re.MULTILINE):
        assert found.setdefault(name, int(value)) == int(value), (
            f"the driver defines {name} with two different values"
        )
    return found


@pytest.mark.parametrize("name", ["memory", "time"])
def test_bounds_in_the_readme_tables_match_the_source(name: str) -> None:
    values = defined_numbers()
    stated: list[tuple[str, str]] = []
    for _, _, names in table(README, name):
        stated += re.findall(r"`(\w+)` (\d+)", names)
        assert names.count("`") == 2 * len(re.findall(r"`(\w+)` (\d+)", names))
    assert len(stated) > 4
    assert [(what, values.get(what)) for what, _ in stated] == [
        (what, int(value)) for what, value in stated
    ]


def test_bounds_in_the_readme_text_match_the_source() -> None:
    values = defined_numbers()
    stated = re.findall(r"\(`([A-Z]\w+)` (\d+)\)", README.read_text())
    assert len(stated) > 1
    assert all(values[what] == int(value) for what, value in stated)


def parameters() -> dict[str, tuple[str, bool]]:
    """Returns the default of each parameter in the sources, and whether it can be written."""
    text = all_sources()
    found: dict[str, tuple[str, bool]] = {}
    for how, arguments in re.findall(r"^module_param(|_cb|_named)\(([^)]*)\);", text, re.MULTILINE):
        words = [word.strip() for word in arguments.split(",")]
        variable = {"": words[0], "_named": words[1], "_cb": words[2].lstrip("&")}[how]
        if variable == "NULL":  # no variable has the default; the parameter's description names it
            (about,) = re.findall(rf"MODULE_PARM_DESC\({words[0]},\s+\"(.*)\"\);", text)
            (value,) = re.findall(r"(\w+) \(default\)", about)
            found[words[0]] = (value, int(words[-1], 8) & 0o200 != 0)
            continue
        (declared,) = re.findall(
            rf"^(?:static )?([\w ]+?) {variable}(?: = ([^;]+))?;", text, re.MULTILINE
        )
        kind, value = declared
        if kind == "bool":
            value = {"": "N", "false": "N", "true": "Y"}[value]
        found[words[0]] = (value or "0", int(words[-1], 8) & 0o200 != 0)
    return found


def test_parameter_table_matches_the_source() -> None:
    rows = table(README, "parameters")
    assert {code(row[0]): (row[3], row[4] == "yes") for row in rows} == parameters()
    values = defined_numbers()
    for row in rows:
        upper = values.get(f"{code(row[0]).upper()}_MAX")
        if upper is not None:
            assert re.fullmatch(rf"[01]\.\.{upper}", row[2]), (
                f"parameter {row[0]}: the documented range does not end at {upper}"
            )
        assert row[4] in ("yes", "no")


def test_tracepoint_table_matches_the_source() -> None:
    text = (DRIVER / "trace.h").read_text()
    events: dict[str, set[str]] = {}
    for name, body in re.findall(r"TRACE_EVENT\((\w+),\n(.*?)\n\);", text, re.DOTALL):
        events[name] = set(re.findall(r"__field\([\w ]+, (\w+)\)", body))
        events[name] |= set(re.findall(r"__string\((\w+), ", body))
    assert events["tmem_breaker"] == {"open"}
    rows = table(README, "tracepoints")
    assert {code(row[0]): set(re.findall(r"`(\w+)`", row[2])) for row in rows} == events


def test_counters_documented_in_the_readme_exist_in_the_driver() -> None:
    listed = "\n".join(source(path) for path in ("core/stats_list.h", "core/sysfs.c"))
    section = README.read_text().split("## Files in sysfs", 1)[1].split("\n## ", 1)[0]
    cells = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")]
    names = re.findall(r"`(\w+)[*`]", "\n".join(cells))
    assert len(names) > 8
    for name in names:
        assert re.search(rf"\b{name}", listed), f"the driver has no counter {name}"


def test_table_of_kernel_differences_matches_compat_h() -> None:
    text = (DRIVER / "compat.h").read_text()
    versions = {
        f"{major}.{minor}"
        for major, minor in re.findall(
            r"^#if.*KERNEL_VERSION\((\d+), (\d+), 0\)", text, re.MULTILINE
        )
    }
    rows = table(ROOT / "docs/ARCHITECTURE.md", "compat")
    assert {row[1] for row in rows} == versions
    for row in rows:
        for name in re.findall(r"`(\w+)\(\)`", row[2]):
            assert re.search(rf"\b{name}\b", text), f"compat.h has no {name}()"


def check_links(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text()):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
            # The second heading of a name has the anchor NAME-1.
            found = {anchor, re.sub(r"-\d$", "", anchor)} & set(slugs)
            assert found, f"{page.name} links to #{anchor}, which {target} does not have"


def test_each_hook_is_switched_off_by_a_vm_test() -> None:
    """A test in tests/vm names each hook, to show that a wrong byte appears without the hook."""
    names = re.findall(
        r'^\t\[TMEM_HOOK_\w+\] = "(\w+)",$', source("testing/faults.c"), re.MULTILINE
    )
    assert len(names) > 7
    tests = "".join(path.read_text() for path in (ROOT / "tests/vm").glob("test_*.py"))
    # drop_slab has a switch of its own, drop_caches_flush, by which its test names it.
    marks = ["drop_caches_flush" if name == "drop_slab" else name for name in names]
    assert [mark for mark in marks if not re.search(rf"\b{mark}\b", tests)] == []


def test_link_targets_of_all_pages_exist() -> None:
    """Files and headings that a page links to exist."""
    listed = subprocess.check_output(["git", "-C", ROOT, "ls-files", "*.md"], text=True)
    for name in listed.splitlines():
        if (ROOT / name).exists():
            check_links(ROOT / name)


def test_table_parser_reads_escaped_cells(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table: t -->\n| a | b |\n| --- | --- |\n| `x` y | 1 |\n| `z\\|` | 2 |\n")
    assert [code(row[0]) for row in table(page, "t")] == ["x", "z\\|"]
