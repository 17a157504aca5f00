"""The evidence as a Markdown document with figures beside it: what `octavo report --document` writes.

In a reader's order: what was found; then, of each model, which cache and which backend at which shape; accuracy, whole
engines, what was refused, what has no record. Every number comes from a record; `evidence` does the counting.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import evidence as data
from . import evidence_chapters as chapters
from . import evidence_page, matrix
from .evidence import Evidence, Pair
from .evidence_models import KERNELS, by_model
from .evidence_page import plain, ratio
from .evidence_text import Document, code, shown, table


def document(evidence: Evidence, command: str, figures: str = "figures") -> Document:
    """The document.

    command: what writes it, told in it. figures: the folder that figures are in, as a link from the document.
    """
    made = Document("")
    pairs = data.pairs(evidence)
    error_figure = evidence_page.accuracy_figure(evidence)
    lines = [
        *_head(evidence),
        *_short(evidence),
        *_caches(pairs),
        *_missing(evidence),
        *by_model(evidence, pairs, made, figures),
        *chapters.errors(evidence),
        *([] if error_figure is None else shown(error_figure, made, figures)),
        *chapters.accuracy(evidence),
        *chapters.engines(evidence),
        *chapters.starts(evidence),
        *chapters.refused(evidence),
        *_where(evidence, command),
    ]
    made.text = "\n".join(lines).rstrip() + "\n"
    return made


def _head(evidence: Evidence) -> list[str]:
    days = sorted({r.time[:10] for r in evidence.records} | {str(a.get("time", ""))[:10] for a in evidence.accuracy})
    days = [day for day in days if day]
    when = "on an unknown day" if not days else f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}"
    gpus = dict.fromkeys(env.get("gpu", "") for env in evidence.environments)
    where = " and ".join("a CPU" if gpu == "none" else plain(gpu) for gpu in gpus if gpu) or "an unknown machine"
    count, models = len(evidence.records), len(evidence.accuracy)
    return [
        "# Evidence",
        "",
        f"Made by `octavo report` from {count:,} record{'s' * (count != 1)} and {models} accuracy "
        f"file{'s' * (models != 1)}, measured {plain(when)} on {where}; no number is written by hand.",
        "",
        "**Speed is of shapes**: one layer's call over random keys and values, no weights; a model's name stands for "
        "its heads, window and ranks. **Accuracy is of the models named with it**, answering through the cache. "
        "Another GPU, a B200 for one, and your own models are filled in by the same commands:",
        "",
        "```bash",
        "octavo bench --matrix --peers --out matrix.jsonl   # each cell checked against float64, then timed",
        "octavo accuracy ./my-model --out accuracy.json",
        "octavo report matrix.jsonl accuracy.json --document evidence.md",
        "```",
        "",
    ]


def _short(evidence: Evidence) -> list[str]:
    rows = []
    for row in data.summary(evidence):
        if row["op"] in KERNELS:
            ahead = f"{row['ahead']} of {row['compared']}" if row["compared"] else "no peer measured"
            figures = [ratio(row[name]) for name in ("mean", "least", "most")]
            rows.append([row["name"], f"{row['cells']:,}", ahead, *figures])
    if not rows:
        return []
    named = any("exact" in cell.case.split("/") for cell in evidence.cells)
    exact = (
        " Cells named `exact` are octavo's prefill without FP8 products, beside peers that may use them."
        if named
        else ""
    )
    head = ["operation", "cells", "faster than every peer in", "times the best peer, geometric mean", "least", "most"]
    return [
        "## In short",
        "",
        "**Which backend.** octavo's fastest backend beside the fastest other library of the same run; above 1 octavo "
        "is faster. Cells that differ in their model's name alone count once." + exact,
        "",
        *table(head, rows),
    ]


def _caches(pairs: Sequence[Pair]) -> list[str]:
    """FP8 beside 16 bits, by operation and model."""
    rows = [
        [f"{code(row['op'])}, {plain(row['model'])}", str(row["shapes"])]
        + [ratio(row[name]) for name in ("mean", "least", "most")]
        for row in data.cache_gains(pairs)
    ]
    if not rows:
        return []
    return [
        "**Which cache.** The fastest backend over a 16-bit cache, whoever's it is, over the fastest over an FP8 one, "
        "of every shape that one run has with both (SDPA's keys and values lie dense, without pages). Above 1 FP8 is "
        "faster; its cache holds twice the tokens. What it costs in accuracy is further down.",
        "",
        *table(["operation, model", "shapes", "times as fast in FP8, geometric mean", "least", "most"], rows),
    ]


def _missing(evidence: Evidence) -> list[str]:
    """What of the matrix has no record."""
    there = {cell.case for cell in evidence.cells}
    whole = matrix.WHOLE
    cells = [case.name for case in matrix.cases(whole, data.memory_of(evidence))]
    rows, gone = [], sum(name not in there for name in cells)
    for model in whole.models:
        names = [name for name in cells if name.split("/")[1].split(":")[0] == model]
        rows.append([model, f"{len(names):,}", f"{sum(name in there for name in names):,}"])
    told = "Every cell has a record." if not gone else f"**{gone:,} of {len(cells):,} cells have no record yet.**"
    return [
        f"**What is here of the matrix, and what not.** {told} The matrix crosses these models with "
        f"{_listed(whole.tps)} ranks, {_listed(whole.concurrencies)} sequences, {_listed(whole.contexts)} tokens, FP8 "
        "and 16-bit caches. Outside it: latent attention, which no kernel here takes (of deepseek-v3.2 it has the "
        f"indexer), and cells whose keys and values exceed {matrix.LARGEST_SHARE:.0%} of the memory.",
        "",
        *table(["model", "cells of the matrix", "with a record"], rows),
    ]


def _listed(numbers: Sequence[int]) -> str:
    """ "1,024 and 8,192"."""
    *first, last = (f"{number:,}" for number in numbers)
    return f"{', '.join(first)} and {last}" if first else last


def _where(evidence: Evidence, command: str) -> list[str]:
    envs = [env for env in evidence.environments if not any(env.items() < e.items() for e in evidence.environments)]
    lines = ["## Where and how", ""]
    lines += ["* " + ", ".join(f"{plain(name)} {plain(value)}" for name, value in env.items()) for env in envs]
    timings = list(dict.fromkeys(record.timing for record in evidence.records if record.timing))
    lines += ["", f"Timed by: {'; '.join(map(plain, timings))}."] if timings else []
    return [*lines, "", "Written by", "", "```bash", "".join(c for c in command if c.isprintable()), "```"]
