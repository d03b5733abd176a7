# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A file of the guest driver uses only files of lower layers.

File A uses file B if A, or an inline function that A calls, names a function or variable that B
defines, or if A includes the header B. Out of scope: uses by macros of the kernel's headers.
"""

from __future__ import annotations

import re
from pathlib import Path

from test_abi import DRIVER

# Layers from the bottom up. A file uses only files of the layers below its own. hooks/intree.c is
# left out: it takes the place of two files, ftrace.c and tracepoints.c.
LAYERS = """
compat.h
core/check.h
virtio_tmem_ioctl.h tmem.h testing.h trace.h
core/fallback.h core/stats_list.h core/wait.h hooks/attach.h
core/stats.h hooks/hooks.h
core/core.h hooks/fs.h hooks/blocks.h hooks/swap.h
core/slot.h core/budget.h core/control.h core/get.h
core/wake.h core/leaf.h
core/index.h
core/dev
core/stats core/budget core/pool_id core/bounce
core/leaf core/policy core/wrong core/admit core/queue core/generation core/sysfs core/reset
core/index core/retain core/ram core/control
core/ring core/evict
core/send
core/feeder core/request core/pool core/pace
core/breaker
core/fetch
core/sync
core/transport
hooks/state hooks/bdev
hooks/slots
hooks/fs
hooks/ftrace hooks/verify hooks/refuse hooks/mounts hooks/records
hooks/areas hooks/device
hooks/fill
hooks/bio
hooks/fadvise hooks/selftest
hooks/put
hooks/tracepoints
hooks/discover
hooks/swap hooks/vfs hooks/reclaim hooks/migrate hooks/readahead
hooks/init
main
"""

NAME = re.compile(r"\b[a-z]\w*\b")
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
INLINE = re.compile(
    r"^static inline [^;{]*?\b(\w+)\([^;{]*\)\n(\{.*?^\})", re.DOTALL | re.MULTILINE
)
FUNCTION = re.compile(r"^(?!static|extern)\w[^\n;={]*?\b(\w+)\([^;{}=]*\)\n\{", re.MULTILINE)
# Pattern of the definition of a global variable, which begins in the first column. The group
# contains the type and the names.
VARIABLES = re.compile(r"^(?!static|extern|typedef)(\w[\w *,\[\]]*)(?:;| =)", re.MULTILINE)
INCLUDE = re.compile(r'^#include "(.*)"', re.MULTILINE)
DEFINE = re.compile(r"^DEFINE_[A-Z_]+\((?:struct \w+, )?(\w+)", re.MULTILINE)


def code(text: str) -> str:
    """Returns a source without comments and strings."""
    return STRING.sub('""', COMMENT.sub("", text))


def inlines(headers: list[str]) -> dict[str, set[str]]:
    """Returns the inline functions of headers, each with the names that it uses, transitively."""
    used = {
        name: set(NAME.findall(body)) for text in headers for name, body in INLINE.findall(text)
    }
    for _ in used:
        for names in used.values():
            names.update(*(used[name] for name in names & used.keys()))
    return used


def definitions(text: str) -> set[str]:
    """Returns the functions and variables that a source defines for other files."""
    found = set(FUNCTION.findall(text)) | set(DEFINE.findall(text))
    for names in VARIABLES.findall(text):
        found |= set(re.findall(r"(?<!struct )\b\w+", names))
    return {name for name in found if name.startswith("tmem_")}


def uses(sources: dict[str, str], headers: list[str]) -> dict[str, dict[str, set[str]]]:
    """Returns for each file the other files that it uses, with the names."""
    owner = {name: file for file, text in sources.items() for name in definitions(text)}
    inline = inlines(headers)
    graph: dict[str, dict[str, set[str]]] = {}
    for file, text in sources.items():
        names = set(NAME.findall(text))
        for name in names & inline.keys():
            names = names | inline[name]
        graph[file] = {}
        for name in names & owner.keys():
            if owner[name] != file:
                graph[file].setdefault(owner[name], set()).add(name)
    return graph


def includes() -> dict[str, dict[str, set[str]]]:
    """Returns for each file of the driver the driver's headers that it includes."""
    graph: dict[str, dict[str, set[str]]] = {}
    for directory in ("", "core/", "hooks/"):
        for path in DRIVER.glob(directory + "*.[ch]"):
            if path.name.endswith(".mod.c") or path.name == "intree.c":
                continue
            name = str(path.relative_to(DRIVER)).removesuffix(".c")
            found = INCLUDE.findall(path.read_text())
            headers = ((path.parent / header).resolve().relative_to(DRIVER) for header in found)
            graph[name] = {str(header): {"#include"} for header in headers}
    return graph


def read_sources(pattern: str) -> dict[str, str]:
    found = (
        path for directory in ("", "core/", "hooks/") for path in DRIVER.glob(directory + pattern)
    )
    return {
        str(path.relative_to(DRIVER).with_suffix("")): code(path.read_text())
        for path in found
        if not path.name.endswith(".mod.c") and path.name != "intree.c"
    }


def driver() -> dict[str, dict[str, set[str]]]:
    return uses(read_sources("*.c"), list(read_sources("*.h").values()))


def layers() -> dict[str, int]:
    lines = LAYERS.strip().splitlines()
    return {file: number for number, line in enumerate(lines) for file in line.split()}


def test_each_driver_file_is_assigned_to_a_layer() -> None:
    assert sorted(layers()) == sorted(includes())


def test_driver_files_use_lower_layers_only() -> None:
    layer = layers()
    graph = driver()
    assert sum(len(files) for files in graph.values()) > 100, (
        "the parser found at most 100 uses between driver files, so it missed some"
    )
    wrong = [
        f"{file} uses {other}: {', '.join(sorted(names))}"
        for file, others in [*graph.items(), *includes().items()]
        for other, names in others.items()
        if layer[other] >= layer[file]
    ]
    assert not wrong, "\n".join(wrong)


def test_core_files_use_only_core_files() -> None:
    for file, others in driver().items():
        if file.startswith("core/"):
            assert not [other for other in others if not other.startswith("core/")], (
                f"{file} uses a file outside of core/"
            )


def test_only_testing_h_depends_on_test_builds() -> None:
    """Only testing.h depends on TMEM_TEST. In a normal build its functions are empty."""
    for directory in ("", "core/", "hooks/"):
        for path in DRIVER.glob(f"{directory}*.[ch]"):
            assert path.name == "testing.h" or not re.search(
                r"\bTMEM_TEST\b|\bmodule_param\w*\((?:test|inject)_", path.read_text()
            ), f"{path.name} has test-only code, which belongs in testing.h"
    assert len(list(Path(DRIVER / "testing").glob("*.c"))) > 2


def test_parser_finds_uses_between_driver_files() -> None:
    sources = {
        "a": "int tmem_a(int x)\n{\n\treturn tmem_f() + tmem_i();\n}\nbool tmem_v = true;\n",
        "b": "int tmem_f(void)\n{\n}\nstatic int tmem_b(void)\n{\n}\nu64 tmem_n, tmem_m;\n",
        "c": code('/* tmem_f() */ "tmem_v" DEFINE_MUTEX(tmem_l);'),
    }
    header = "static inline int tmem_i(void)\n{\n\treturn tmem_j();\n}\n"
    header += "static inline int tmem_j(void)\n{\n\treturn tmem_n;\n}\n"
    assert definitions(sources["b"]) == {"tmem_f", "tmem_n", "tmem_m"}
    assert uses(sources, [header]) == {"a": {"b": {"tmem_f", "tmem_n"}}, "b": {}, "c": {}}
