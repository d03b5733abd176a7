# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Draws the plots of the benchmarks' pages as SVG images, with matplotlib.

Equal values give equal images, which have neither a date nor random names. Text stays text, so that
readers can search it and a diff shows which value changed. The background is white, because pages
may have a dark one. This project is blue. Other bars are grey, and other curves differ by colour,
marker and dashes, so no reader has to distinguish two colours.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench.vm.intervals import Estimate

SVG = "{http://www.w3.org/2000/svg}"
WIDTH = 7.9  # inches, 760 pixels of CSS
ROW, GROUP, FRAME = 0.25, 0.32, 1.0  # heights of a bar, of a group's title, and of the rest
CURVES_HEIGHT = 4.4
OURS, RIVAL, PUBLISHED, INK = "#0072b2", "#9aa4ad", "#dddddd", "#222222"
# Colour, marker and dashes of the curves of rivals. The colours are those of Okabe and Ito.
STYLES = (("#d55e00", "s", "--"), ("#009e73", "^", "-."), ("#cc79a7", "D", ":"))
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "virtio-tmem",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # the font of matplotlib, with which it measures text
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#888888",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True)
class Bar:
    """A value with its name. The colour tells whether it is ours, a rival's or a published one."""

    name: str
    value: Estimate
    colour: str = RIVAL


@dataclass(frozen=True)
class Curve:
    """Values of one name over a number, such as a size."""

    name: str
    points: Sequence[tuple[float, Estimate]]
    ours: bool = False


def write(page: Path, name: str, image: str) -> None:
    """Writes an image for a page into the directory `images` beside the page's directory."""
    images = page.parent.parent / "images"
    images.mkdir(exist_ok=True)
    (images / f"{name}.svg").write_text(image)


def bars(
    title: str, axis: str, groups: Mapping[str, Sequence[Bar]], *, ratios: bool = False
) -> str:
    """Returns an image with horizontal bars. Each group has a title, which may be empty.

    Ratios have a line at 1, which is neither a gain nor a loss.
    """
    digits = 2 if ratios else 1
    heights = [GROUP + ROW * len(some) for some in groups.values()]
    most = max(bar.value.high for some in groups.values() for bar in some)

    def draw(figure: Any) -> None:
        column = figure.subplots(len(groups), sharex=True, squeeze=False, height_ratios=heights)
        for axes, (name, some) in zip(column.flat, groups.items(), strict=True):
            axes.set_title(name, loc="left", fontsize="medium", weight="bold")
            axes.grid(axis="x")
            for row, bar in enumerate(some):
                value = bar.value
                axes.barh(row, value.value, 0.7, color=bar.colour)
                _interval(axes, row, value, horizontal=True)
                # The label begins behind the interval, so that neither bar nor interval covers it.
                axes.annotate(
                    f"{value.value:,.{digits}f}", (value.high, row), (5, 0), va="center",
                    textcoords="offset points",
                )  # fmt: skip
            if ratios:
                axes.axvline(1, color=INK, linewidth=1, linestyle="--")
            axes.set_yticks(range(len(some)), [bar.name for bar in some])
            axes.tick_params(length=0)
            axes.set_ylim(len(some) - 0.4, -0.6)
        # All groups share these limits.
        axes.set_xlim(0, most * 1.12 or 1)
        axes.set_xlabel(axis)

    text = "; ".join(
        f"{f'{name}: ' if name else ''}{bar.name}: {bar.value.text(digits)}"
        for name, some in groups.items()
        for bar in some
    )
    return _image(title, text, FRAME + sum(heights), draw)


def curves(
    title: str,
    axes_names: tuple[str, str],
    some: Sequence[Curve],
    level: tuple[str, Estimate] | None = None,
) -> str:
    """Returns an image with a curve for each name, and a horizontal line for the value `level`."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        axes.grid()
        styles = iter(STYLES)
        if level:
            axes.axhline(level[1].value, color="#555555", linewidth=1.2, label=level[0])
        for curve in some:
            colour, marker, dashes = (OURS, "o", "-") if curve.ours else next(styles)
            for at, value in curve.points:
                _interval(axes, at, value, colour=colour)
            axes.plot(
                [at for at, _ in curve.points], [value.value for _, value in curve.points],
                color=colour, marker=marker, linestyle=dashes, linewidth=3 if curve.ours else 1.6,
                markersize=6, clip_on=False, label=curve.name,
            )  # fmt: skip
        axes.set_xticks(sorted({at for curve in some for at, _ in curve.points}))
        axes.set_xlim(0)
        axes.set_ylim(0)
        axes.set_xlabel(axes_names[0])
        axes.set_ylabel(axes_names[1])
        # The legend is outside of the axes, where it covers nothing.
        figure.legend(loc="outside lower center", ncols=2, frameon=False, handlelength=3.5)

    text = [f"{level[0]}: {level[1].text(1)}"] if level else []
    text += [
        f"{curve.name}: " + ", ".join(f"{at:g}: {value.text(1)}" for at, value in curve.points)
        for curve in some
    ]
    return _image(title, "; ".join(text), CURVES_HEIGHT, draw)


def _interval(
    axes: Any, at: float, value: Estimate, *, horizontal: bool = False, colour: str = INK
) -> None:
    """Draws the interval of a value with caps at its ends, unless it is empty."""
    if value.low == value.high:
        return
    x, y = (value.value, at) if horizontal else (at, value.value)
    size = [[max(0, value.value - value.low)], [max(0, value.high - value.value)]]
    axes.errorbar(
        x, y, **{"xerr" if horizontal else "yerr": size}, fmt="none", ecolor=colour, elinewidth=1.2,
        capsize=3,
    )  # fmt: skip


def _image(title: str, text: str, height: float, draw: Callable[[Any], None]) -> str:
    """Returns the image of a figure that `draw` fills. Screen readers read `text`."""
    # These imports take a second, which programs and tests without a plot do not wait for.
    import matplotlib as mpl  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    out = io.StringIO()
    with mpl.rc_context():
        mpl.rcdefaults()  # ignore the settings of the user
        mpl.rcParams.update(SETTINGS)
        figure = Figure((WIDTH, height), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left", fontsize="x-large", weight="bold")
        draw(figure)
        # None leaves out the entries with the date and the version of matplotlib.
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing)
    return _page_image(out.getvalue(), title, text)


def _page_image(image: str, title: str, text: str) -> str:
    """Returns an image for a page: with a title and `text`, and without what shows nothing.

    matplotlib groups and names each part of a plot, and gives places in millionths of a point.
    """
    root = ElementTree.fromstring(image)
    root[:] = _parts(root)
    for element in root.iter():
        for name in ("d", "x", "y"):
            if name in element.attrib:
                element.set(name, re.sub(r"\d+\.\d+", _short, element.get(name, "")).strip())
        if element.get("transform", "").startswith("rotate(-0 "):
            del element.attrib["transform"]
    notes = ("SPDX-License-Identifier: Apache-2.0 OR MIT",
             "Generated by tests/bench/run; edit tests/bench/vm/plot.py.")  # fmt: skip
    root[:0] = [*(ElementTree.Comment(f" {note} ") for note in notes),
                ElementTree.Element(f"{SVG}title", {"id": "title"}),
                ElementTree.Element(f"{SVG}desc", {"id": "desc"})]  # fmt: skip
    root[2].text, root[3].text = title, text
    root.attrib.update({"role": "img", "aria-labelledby": "title desc"})
    ElementTree.indent(root, " ")
    ElementTree.register_namespace("", SVG.strip("{}"))
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _parts(element: ElementTree.Element) -> Iterator[ElementTree.Element]:
    """Yields the children of an element, and instead of a group that has only a name its parts."""
    for child in element:
        child[:] = _parts(child)
        if child.tag == f"{SVG}g" and not child.attrib.keys() - {"id"}:
            yield from child
        else:
            yield child


def _short(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")
