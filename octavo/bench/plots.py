"""Figures as SVG text, drawn by matplotlib without a display.

They are drawn at the width of a phone's page, so that their letters stay readable there; two stand side by side on a
wider one. Letters are drawn as outlines: a figure looks the same whatever fonts a reader has.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 4.9, 2.9  # inches
INK, MUTED, GRID = "#1d2733", "#667380", "#e3e8ee"
BLUE, ORANGE, GREY, GREEN = "#2563a8", "#d0661c", "#8a97a5", "#2f8f5b"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "svg.fonttype": "path",
    "svg.hashsalt": "octavo",  # the same numbers give the same bytes
    # Names of models and files are shown as they are, never read as mathematics.
    "text.parse_math": False,
}


@dataclass(frozen=True)
class Row:
    """One named value of a figure with its colour and, if it has one, its interval."""

    name: str
    value: float
    color: str
    low: float | None = None
    high: float | None = None

    def times(self, factor: float) -> Row:
        """The row in another unit; factor is positive."""
        bounds = (None if bound is None else bound * factor for bound in (self.low, self.high))
        return Row(self.name, self.value * factor, self.color, *bounds)

    def error_bar(self) -> list[list[float]] | None:
        """The interval as matplotlib takes it: below and above the value."""
        if self.low is None or self.high is None:
            return None
        return [[max(self.value - self.low, 0.0)], [max(self.high - self.value, 0.0)]]


class _Drawing:
    """A figure being drawn: its axes, and its SVG once the block is left."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure
        self.axes = figure.add_subplot()
        self.svg = ""


@contextmanager
def _drawing(height: float = HEIGHT) -> Iterator[_Drawing]:
    # Figure is used without pyplot: no global state, no window system.
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # A name in letters that the font lacks is drawn as boxes; the figure's alternative text has it.
        warnings.filterwarnings("ignore", message="Glyph ")
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        FigureCanvasSVG(figure)
        drawing = _Drawing(figure)
        yield drawing
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        drawing.svg = buffer.getvalue()


def bars(rows: Sequence[Row], label: str, digits: int = 2) -> str:
    """Horizontal bars from 0 with their intervals and, inside each, its value."""
    with _drawing(0.75 + 0.52 * len(rows)) as drawing:
        axes = drawing.axes
        for at, row in enumerate(rows):
            axes.barh(at, row.value, height=0.62, color=row.color, alpha=0.9)
            interval = row.error_bar()
            if interval:
                axes.errorbar(row.value, at, xerr=interval, color=INK, capsize=3.5, linewidth=1.2)
            axes.text(0, at, f"  {row.value:,.{digits}f}", va="center", ha="left", color="white", fontweight="bold")
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
    return drawing.svg


def changes(rows: Sequence[Row], label: str, limit: float | None = None) -> str:
    """Relative changes in per cent, of rows in fractions, as points with their intervals; `limit` is a dashed line."""
    with _drawing(0.85 + 0.52 * len(rows)) as drawing:
        axes = drawing.axes
        axes.axvline(0, color=GREY, linewidth=1)
        for at, row in enumerate(row.times(100) for row in rows):
            axes.errorbar(
                row.value, at, xerr=row.error_bar(), color=row.color, marker="o", markersize=7, capsize=4, linewidth=2
            )
            shown = f"{row.value:+.2f} %" if round(row.value, 2) else "0.00 %"
            axes.annotate(shown, (row.value, at), (0, 8), textcoords="offset points", ha="center", fontsize=9)
        if limit is not None:
            axes.axvline(100 * limit, color=MUTED, linestyle="--", linewidth=1)
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.7)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_xlabel(label)
        axes.margins(x=0.12)
    return drawing.svg


def lines(
    x: Sequence[float],
    series: Mapping[str, Sequence[float]],
    xlabel: str,
    ylabel: str,
    reference: tuple[str, float] | None = None,
) -> str:
    """One line per entry of `series` over `x`, the vertical axis from 0; `reference` is a named dashed line."""
    with _drawing() as drawing:
        axes = drawing.axes
        for (name, values), color, marker in zip(series.items(), (BLUE, ORANGE, GREEN), "osD", strict=False):
            axes.plot(x, values, color=color, marker=marker, markersize=3.5, linewidth=1.3, label=name)
        if reference is not None:
            axes.axhline(reference[1], color=MUTED, linestyle="--", linewidth=1, label=reference[0])
        top = max((*(v for values in series.values() for v in values), reference[1] if reference else 0.0), default=0.0)
        axes.set_ylim(0, max(top, 1e-9) * 1.4)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(axis="y")
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        if len(series) > 1 or reference is not None:
            axes.legend(loc="upper right", ncols=3, columnspacing=1.2, handlelength=1.6)
    return drawing.svg


def histogram(
    edges: Sequence[float], counts: Sequence[int], color: str, xlabel: str, marks: Mapping[str, float]
) -> str:
    """Shares of `counts` between `edges` on a logarithmic axis, cut to where there are any; marks are named lines."""
    held = [index for index, number in enumerate(counts) if number]
    first, last = (held[0], held[-1] + 1) if held else (0, len(counts))
    total = sum(counts) or 1
    with _drawing() as drawing:
        axes = drawing.axes
        shares = [100 * number / total for number in counts[first:last]]
        axes.stairs(shares, edges[first : last + 1], fill=True, color=color, alpha=0.85)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(lambda value, _: power_of_ten(value))
        axes.xaxis.set_minor_formatter(lambda value, _: "")
        axes.set_xlim(edges[first], edges[last])
        top = max(*shares, 1e-9) * 1.25
        axes.set_ylim(0, top)
        for name, value in marks.items():
            if edges[first] < value < edges[last]:
                axes.axvline(value, color=INK, linewidth=1, linestyle=":")
                axes.annotate(
                    name, (value, top), (3, -2), textcoords="offset points", va="top", fontsize=9, rotation=90
                )
        axes.grid(axis="y")
        axes.set_xlabel(xlabel)
        axes.set_ylabel("share of tokens, %")
    return drawing.svg


def power_of_ten(value: float) -> str:
    """0.001 as "10\u207b\u00b3": matplotlib's own labels are mathematics, which is switched off."""
    digits = str.maketrans("-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079")
    return "10" + str(round(math.log10(value))).translate(digits) if value > 0 else ""


def sizes(rows: Sequence[Row], label: str) -> str:
    """Horizontal bars of whole numbers from 0, each with its number behind it."""
    with _drawing(0.75 + 0.52 * len(rows)) as drawing:
        axes = drawing.axes
        for at, row in enumerate(rows):
            axes.barh(at, row.value, height=0.62, color=row.color, alpha=0.9)
            axes.annotate(f"{row.value:,.0f}", (row.value, at), (5, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(rows)), [row.name for row in rows])
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        axes.set_xlim(0, (max((row.value for row in rows), default=0) or 1) * 1.25)
        axes.locator_params(axis="x", nbins=4)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel(label)
    return drawing.svg


@dataclass(frozen=True)
class Curve:
    """One line of a figure: points (x, y) in order of x."""

    name: str
    color: str
    marker: str
    points: Sequence[tuple[float, float]]


def curves(of: Sequence[Curve], xlabel: str, ylabel: str, ceilings: Mapping[str, float]) -> str:
    """Lines over a logarithmic x of powers of two, the vertical axis from 0; ceilings are named dashed lines."""
    with _drawing(HEIGHT + 0.3) as drawing:
        axes = drawing.axes
        for curve in of:
            x, y = zip(*curve.points, strict=True)
            axes.plot(x, y, color=curve.color, marker=curve.marker, markersize=4.5, linewidth=1.5, label=curve.name)
        for name, value in ceilings.items():
            axes.axhline(value, color=MUTED, linestyle="--", linewidth=1)
            place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
            axes.annotate(name, (0, value), (3, 3), fontsize=8, color=MUTED, **place)
        axes.set_xscale("log", base=2)
        held = sorted({x for curve in of for x, _ in curve.points})
        axes.set_xticks(held, [short(x) for x in held])
        axes.minorticks_off()
        top = max((*(y for curve in of for _, y in curve.points), *ceilings.values()), default=0.0)
        axes.set_ylim(0, max(top, 1e-9) * 1.15)
        axes.grid(axis="y")
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        drawing.figure.legend(loc="outside upper center", ncols=3, columnspacing=1.2, handlelength=1.6)
    return drawing.svg


def scatter(of: Sequence[Curve], xlabel: str, ylabel: str) -> str:
    """Points on two logarithmic axes, with lines at 1."""
    with _drawing(HEIGHT + 0.3) as drawing:
        axes = drawing.axes
        for curve in of:
            x, y = zip(*curve.points, strict=True)
            axes.scatter(x, y, color=curve.color, marker=curve.marker, s=16, alpha=0.75, label=curve.name, linewidths=0)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.axhline(1, color=MUTED, linestyle="--", linewidth=1)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:g}")
            axis.set_minor_formatter(lambda value, _: "")
        axes.grid()
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        drawing.figure.legend(loc="outside upper center", ncols=3, columnspacing=1.2, handlelength=1.2)
    return drawing.svg


def short(value: float) -> str:
    """32768 as "32k"."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 256 == 0 else f"{value:g}"
