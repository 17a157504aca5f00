"""The evidence as a page and as Markdown: figures and tables of `evidence`, which does the counting."""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import Any

from . import evidence as data
from . import plots, report
from .evidence import Evidence, is_octavo
from .evidence_engines import CACHES, engine_gains, engine_steps
from .records import COMPUTE_BOUND, Record, ceiling, rate

# Octavo's in warm colours, others in cold ones; told apart by their markers too.
LOOKS = {
    "gluon": (plots.ORANGE, "o"),
    "triton": ("#b98a1f", "s"),
    "reference": (plots.GREY, "x"),
    "flashinfer-fa3": (plots.BLUE, "^"),
    "flashinfer-xqa": (plots.BLUE, "v"),
    "flashinfer-fa2": ("#5b8fc7", "D"),
    "deepgemm": (plots.BLUE, "^"),
    "sdpa-cudnn": (plots.GREEN, "P"),
    "sdpa-flash": ("#76b79a", "X"),
}
OTHER = ("#6b5b95", "*")
MOST_FIGURES = 24
MEMORY_GB = 1.0
UNITS = {True: "TFLOP/s", False: "TB/s"}


def page(evidence: Evidence) -> str:
    """The HTML page."""
    return report.render(
        "evidence.html",
        summary=data.summary(evidence),
        gains=data.cache_gains(data.pairs(evidence)),
        engines=engine_gains(engine_steps(evidence)),
        caches=list(CACHES),
        tables=[_table(evidence, op) for op in dict.fromkeys(cell.op for cell in evidence.cells)],
        speed_figures=list(speed_figures(evidence)),
        accuracy_figure=accuracy_figure(evidence),
        costs=data.token_costs(evidence, MEMORY_GB),
        memory_gb=MEMORY_GB,
        models=[_model(found) for found in evidence.accuracy],
        plans=data.plans(evidence),
        refusals=data.refusals(evidence),
        environments=[list(env.items()) for env in evidence.environments],
        files=evidence.files,
        ratio=ratio,
    )


def ratio(value: float | None) -> str:
    """Two digits; a dash for none."""
    return "–" if value is None else f"{value:.2f}"


def _look(backend: str) -> tuple[str, str]:
    return LOOKS.get(backend, OTHER)


def speed_figures(evidence: Evidence) -> Iterator[report.Figure]:
    """Rate against context, a figure for each op, subject and batch, MOST_FIGURES at most.

    Those with a peer first, of these FP8 on one rank, of these about 64 sequences.
    """
    found = []
    for op in dict.fromkeys(cell.op for cell in evidence.cells):
        for (subject, batch), by_backend in data.series(evidence, op).items():
            alone = all(is_octavo(name) for name in by_backend)
            other = bool({"tp8", "bfloat16", "exact", "append"} & set(subject.split("/")))
            found.append(((alone, other, abs(batch - 64) if batch else 0), op, subject, batch, by_backend))
    for _, op, subject, batch, by_backend in sorted(found, key=lambda one: one[0])[:MOST_FIGURES]:
        yield speed_figure(op, subject, batch, by_backend)


def speed_figure(op: str, subject: str, batch: int, by_backend: dict[str, dict[int, Record]]) -> report.Figure:
    """Rate against context of one subject; batch: sequences, 0 where they differ."""
    curves = [
        plots.Curve(name, *_look(name), [(context, rate(of[context])[0]) for context in sorted(of)])
        for name, of in by_backend.items()
    ]
    some = next(iter(next(iter(by_backend.values())).values()))
    bound = op in COMPUTE_BOUND
    limit = ceiling(some)
    ceilings = {} if limit is None else {"FP8 matrix product" if bound else "device copy": limit}
    unit = UNITS[bound]
    title = f"{op}, {subject}" + (f", {batch} sequence{'s' if batch > 1 else ''}" if batch else "")
    best = {name: max(rate(record)[0] for record in of.values()) for name, of in by_backend.items()}
    told = ", ".join(f"{name} up to {value:.4g}" for name, value in best.items())
    runs = len({record.run for of in by_backend.values() for record in of.values()})
    measured = "measured in the same run" if runs == 1 else f"measured in one of the {runs} runs that the points are of"
    return report.Figure(
        title,
        plots.curves(curves, "tokens a sequence", unit, ceilings),
        f"{title}: {unit} against tokens a sequence; {told} {unit}.",
        f"{some.timing[:1].upper()}{some.timing[1:]}. Dashed: {measured}.",
    )


def accuracy_figure(evidence: Evidence) -> report.Figure | None:
    """Error against time of every cell that has both; None for none."""
    points = data.accuracy_points(evidence)
    if not points:
        return None
    of = [plots.Curve(name, *_look(name), [(x, y) for x, y, _ in found]) for name, found in points.items()]
    return report.Figure(
        "Error against time, every cell",
        plots.scatter(of, "time, fastest = 1", "error, bf16 attention = 1"),
        "Every cell: relative error to float64 over that of bf16 attention, against time over the fastest side's.",
        "Left is faster, down is more exact. Sampled rows of each cell, to attention in float64 over the same bytes.",
    )


def _table(evidence: Evidence, op: str) -> dict[str, Any]:
    """Rows of one op: a column a backend."""
    cells = evidence.of_op(op)
    backends = list(dict.fromkeys(name for cell in cells for name in cell.records))
    rows = []
    for cell in cells:
        fastest = min(cell.timed.values(), default=None)
        rows.append(
            {
                "case": cell.case,
                "cells": [_entry(cell.records.get(name), fastest) for name in backends],
                "ratio": cell.ratio,
            }
        )
    return {"op": op, "backends": backends, "rows": rows}


def word(record: Record) -> str:
    """What became of a cell without a time: wrong, failed or refused."""
    return next((word for word in ("wrong", "failed") if (record.error or "").startswith(word)), "refused")


def _entry(record: Record | None, fastest: float | None) -> dict[str, Any]:
    if record is None:
        return {"text": "", "notes": [], "best": False}
    if record.us is None:
        return {"text": word(record), "notes": [], "best": False}
    value, unit = rate(record)
    limit = ceiling(record)
    note = f"{value:.0f} {unit}" if unit == "TFLOP/s" else f"{value:.2f} {unit}"
    notes = [note + (f", {value / limit:.2f}" if limit else "")] if value else []  # of an engine's step it is not known
    notes += [f"error {record.rel_err:.1e}"] if record.rel_err is not None else []
    return {"text": f"{record.us:,.1f}", "notes": notes, "best": record.us == fastest}


def _model(found: dict[str, Any]) -> dict[str, Any]:
    """Tables and figures of one `octavo accuracy` file."""
    base = next(iter(found["sides"]))
    variants = [name for name in found["sides"] if name != base]
    rows = [
        plots.Row(name, side["change"]["value"], plots.ORANGE, side["change"]["low"], side["change"]["high"])
        for name in variants
        for side in [found["sides"][name]]
    ]
    figures = []
    if rows:
        figures.append(
            report.Figure(
                "Change of perplexity",
                plots.changes(rows, "against the 16-bit cache, %"),
                "; ".join(f"{row.name} {row.value:+.2%}" for row in rows),
                "95 % intervals over windows of text, the same windows on both sides.",
            )
        )
    return {"found": found, "base": base, "variants": variants, "figures": figures}


def markdown(evidence: Evidence) -> str:
    """Tables for a README: the summary, then microseconds of every cell by backend."""
    lines = [
        "| operation | cells | with a peer | times the best peer, geometric mean | least |",
        "|---|---|---|---|---|",
    ]
    for row in data.summary(evidence):
        lines.append(
            f"| {row['name']} | {row['cells']} | {row['compared']} | {ratio(row['mean'])} | {ratio(row['least'])} |"
        )
    for op in dict.fromkeys(cell.op for cell in evidence.cells):
        table = _table(evidence, op)
        names = [plain(name) for name in table["backends"]]
        lines += ["", f"| {op}, microseconds | {' | '.join(names)} | times the best peer |"]
        lines.append("|---" * (len(names) + 2) + "|")
        for row in table["rows"]:
            entries = [f"**{e['text']}**" if e["best"] else e["text"] for e in row["cells"]]
            lines.append(f"| {plain(row['case'])} | {' | '.join(entries)} | {ratio(row['ratio'])} |")
    for env in evidence.environments:
        lines += ["", ", ".join(f"{plain(name)} {plain(value)}" for name, value in env.items())]
    return "\n".join(lines) + "\n"


def plain(text: str) -> str:
    """Text that cannot end a table's cell nor be read as markup."""
    shown = "".join(c if c.isprintable() else " " for c in str(text))  # line ends, and what moves a terminal's cursor
    escaped = "".join("\\" + c if c in "|`*_[]\\~" else c for c in shown)
    return html.escape(escaped, quote=False)
