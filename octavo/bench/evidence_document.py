"""The evidence as a Markdown document with figures beside it: what `octavo report --document` writes.

In a reader's order: what was found; then, of each model, which cache and which backend at which shape; accuracy, whole
engines, what was refused, what has no record. Every number comes from a record; `evidence` does the counting.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..backends import BY_NAME
from . import evidence as data
from . import evidence_page, matrix
from .evidence import OTHER_SHAPES, Cell, Evidence, Pair, model_of
from .evidence_engines import CACHES, engine_gains, engine_steps
from .evidence_page import plain, ratio
from .records import OPS, Record, ceiling, rate
from .report import Figure, percent, span

FIGURE_NAMES = "evidence-*.svg"
TITLES = {
    "decode": "decode: one new token a sequence",
    "verify": "verify: several new rows a sequence, drafts to check",
    "prefill": "prefill: a prompt, or a piece of one",
    "append": "append: new keys and values into the cache",
    "mqa_logits": "the indexer's logits over a prompt",
    "paged_mqa_logits": "the indexer's logits over the cache, a step",
    "topk": "the indexer's top-k",
    "plan": "plan: once a step, for all layers",
}
KERNELS = tuple(op for op in OPS if op in TITLES)


@dataclass
class Document:
    """Text, and the figures that it shows: SVG by file name."""

    text: str
    figures: dict[str, str] = field(default_factory=dict)


def document(evidence: Evidence, command: str, figures: str = "figures") -> Document:
    """The document.

    command: what writes it, told in it. figures: the folder that figures are in, as a link from the document.
    """
    made = Document("")
    pairs = data.pairs(evidence)
    lines = [*_head(evidence), *_short(evidence), *_caches(pairs), *_missing(evidence)]
    groups = _groups(evidence)
    if groups:
        lines += ["## Model by model", "", *_legend(), ""]
    for group in groups:
        lines += [f"### {plain(group)}", "", *_twin(evidence, group), *_tokens(evidence, group)]
        for figure in _speed(evidence, group):
            lines += _shown(figure, made, figures)
        lines += _pair_table([pair for pair in pairs if model_of(pair.case) == group])
        for op in KERNELS:
            lines += _cells(op, [cell for cell in evidence.of_op(op) if model_of(cell.case) == group])
    lines += _errors(evidence)
    error_figure = evidence_page.accuracy_figure(evidence)
    lines += [] if error_figure is None else _shown(error_figure, made, figures)
    lines += [
        *_models(evidence),
        *_engines(evidence),
        *_starts(evidence),
        *_refused(evidence),
        *_where(evidence, command),
    ]
    made.text = "\n".join(lines).rstrip() + "\n"
    return made


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table and an empty line; columns after the first are numbers."""
    rules = ["---", *["---:"] * (len(header) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (header, rules, *rows)] + [""]


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
        *_table(head, rows),
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
        *_table(["operation, model", "shapes", "times as fast in FP8, geometric mean", "least", "most"], rows),
    ]


def _twin(evidence: Evidence, group: str) -> list[str]:
    """That its shapes were measured under another model's name, where they were."""
    of = [record for cell in evidence.cells if model_of(cell.case) == group for record in cell.records.values()]
    names = dict.fromkeys(model_of(record.same_as) for record in of if record.same_as)
    return (
        [f"Shapes that it shares with {', '.join(map(plain, names))} were measured once, for both.", ""]
        if names
        else []
    )


def _tokens(evidence: Evidence, group: str) -> list[str]:
    """What a token takes in one layer's cache, of each number of ranks and kind of cache."""
    found: dict[str, None] = {}
    for cell in evidence.of_op("decode") if group != OTHER_SHAPES else ():
        for record in cell.records.values():
            spec = data.spec_of(record) if model_of(cell.case) == group and record.backend in BY_NAME else None
            if spec is not None:
                ranks = next((part for part in cell.case.split("/") if re.fullmatch(r"tp[0-9]+", part)), "tp1")
                found[f"{spec.bytes_per_token:,} ({ranks}, {spec.kv_dtype})"] = None
    return [f"Bytes a token and layer on a rank: {', '.join(found)}.", ""] if found else []


def _pair_table(pairs: Sequence[Pair]) -> list[str]:
    if not pairs:
        return []
    rows = [
        [code(f"{pair.op}/{_rest(pair.case)}"), f"{micro(pair.fp8[1])} {plain(pair.fp8[0])}"]
        + [f"{micro(pair.sixteen[1])} {plain(pair.sixteen[0])}", f"{pair.gain:.2f}"]
        for pair in pairs
    ]
    return _table(["FP8 beside 16 bits, µs", "fastest in FP8", "fastest in 16 bits", "times as fast in FP8"], rows)


def _speed(evidence: Evidence, group: str) -> list[Figure]:
    """A figure of each operation that is plotted against context: one rank, FP8, most backends, about 64 sequences."""
    figures = []
    for op in ("decode", "prefill", "paged_mqa_logits"):
        found = [(key, of) for key, of in data.series(evidence, op).items() if model_of(f"{op}/{key[0]}/b1") == group]

        def rank(one: tuple[tuple[str, int], dict[str, dict[int, Record]]]) -> tuple[bool, int, int, str]:
            (subject, batch), of = one
            words = set(subject.split("/"))
            return bool(words & {"tp8", "bfloat16", "exact", "append"}), -len(of), abs(batch - 64), subject

        if found:
            (subject, batch), of = min(found, key=rank)
            figures.append(evidence_page.speed_figure(op, subject, batch, of))
    return figures


def _shown(figure: Figure, made: Document, folder: str) -> list[str]:
    name = FIGURE_NAMES.replace("*", re.sub(r"[^a-z0-9]+", "-", figure.title.lower()).strip("-")[:100])
    made.figures[name] = figure.svg
    title = figure.title[:1].upper() + figure.title[1:]
    return [f"![{plain(figure.alt)}]({folder}/{name})", "", f"{plain(title)}. {plain(figure.caption)}", ""]


def _legend() -> list[str]:
    return [
        "Microseconds of one layer's call, median; the fastest of a run in bold. In a name: `tp8` one of 8 ranks, `b` "
        "sequences, `ctx` tokens of each, `q` their new rows in prefill, `n` in verify, `t` in append; `bfloat16` a "
        "16-bit cache, FP8 where none is named. *Ceiling*: the rate of octavo's fastest over the same run's device "
        "copy, of prefill and the logits of a prompt over its FP8 matrix product. *Peer*: the fastest other library's "
        "time over octavo's. *Error*: of octavo's fastest, relative error to float64 over that of attention "
        "written in bf16. Why a backend runs a layer or does not: `octavo explain --model NAME --device NAME`.",
    ]


def _rest(case: str) -> str:
    """A case's name in its group's tables."""
    return "/".join(case.split("/")[1 if model_of(case) == OTHER_SHAPES else 2 :])


def _groups(evidence: Evidence) -> list[str]:
    found = dict.fromkeys(model_of(cell.case) for cell in evidence.cells if cell.op in KERNELS)
    return sorted(found, key=lambda name: name == OTHER_SHAPES)


def micro(us: float) -> str:
    """Microseconds: a digit after the point of fewer than a thousand."""
    return f"{us:,.1f}" if us < 1000 else f"{us:,.0f}"


def code(text: str) -> str:
    """A name as code; what is not letters, digits and the signs of cases' names is plain text instead."""
    return f"`{text}`" if re.fullmatch(r"[\w./:+-]+", text, re.ASCII) else plain(text)


def _cells(op: str, cells: Sequence[Cell]) -> list[str]:
    """One table: a row a case, of whatever runs it was measured in; a column a backend."""
    if not cells:
        return []
    by_case: dict[str, list[Cell]] = {}
    for cell in cells:
        by_case.setdefault(cell.case, []).append(cell)
    names = sorted({name for cell in cells for name in cell.records}, key=lambda name: (name not in BY_NAME, name))
    header = [TITLES[op], *map(plain, names), "ceiling", "peer", "error"]
    rows = []
    for case, of in by_case.items():
        row = [code(_rest(case))]
        row += [next((_time(cell, name) for cell in of if name in cell.records), "") for name in names]
        ratios = [cell.ratio for cell in of if cell.ratio is not None]
        share, error = _quality(of)
        rows.append([*row, share, ratio(ratios[0]) if ratios else "", error])
    return _table(header, rows)


def _time(cell: Cell, name: str) -> str:
    record = cell.records[name]
    if record.us is None:
        return evidence_page.word(record)
    fastest = len(cell.timed) > 1 and record.us == min(cell.timed.values())
    return f"**{micro(record.us)}**" if fastest else micro(record.us)


def _quality(cells: Sequence[Cell]) -> tuple[str, str]:
    """(share of the ceiling, error over bf16 attention's) of octavo's fastest."""
    own = [r for cell in cells for name, r in cell.records.items() if name in BY_NAME and r.us is not None]
    if not own:
        return "", ""
    best = min(own, key=lambda record: record.us or 0.0)
    limit = ceiling(best)
    share = f"{rate(best)[0] / limit:.2f}" if limit else ""
    return share, f"{best.rel_err / best.rel_err_bf16:.2f}" if best.rel_err and best.rel_err_bf16 else ""


def _errors(evidence: Evidence) -> list[str]:
    """Of each operation and backend, how near to float64 its cells are."""
    found: dict[tuple[str, str, str], list[tuple[float, float | None]]] = {}
    for record in evidence.records:
        if record.rel_err is not None and record.us is not None:
            own = record.backend in BY_NAME and record.spec.get("precision") == "exact"
            key = (record.op, record.backend, ", exact" if own else "")
            bf16 = record.rel_err / record.rel_err_bf16 if record.rel_err_bf16 else None
            found.setdefault(key, []).append((record.rel_err, bf16))
    rows = []
    for (op, backend, precision), values in sorted(found.items(), key=lambda item: OPS.index(item[0][0])):
        errors, beside = [e for e, _ in values], [b for _, b in values if b is not None]
        rows.append(
            [f"{code(op)}, {plain(backend)}" + precision, str(len(values))]
            + [f"{statistics.median(errors):.1e}", f"{max(errors):.1e}"]
            + ([f"{statistics.median(beside):.2f}", f"{max(beside):.2f}"] if beside else ["", ""])
        )
    if not rows:
        return []
    head = ["operation, backend", "cells", "median error", "largest", "median, bf16 attention = 1", "largest"]
    return [
        "## How exact each backend is",
        "",
        "Relative error to float64 over the same stored bytes, on sampled rows of every cell before it was timed, and "
        "over the error of attention written in bf16 on the same numbers, which the indexer has none of. Fast prefill, "
        "and XQA and FA3 over an FP8 cache, round the query and the probabilities to e4m3: that is the larger error.",
        "",
        *_table(head, rows),
    ]


def _models(evidence: Evidence) -> list[str]:
    lines = ["## What the cache costs a model's answers", ""] if evidence.accuracy else []
    for found in _merged(evidence.accuracy):
        text, env = found["text"], found["environment"]
        on = "a CPU" if env.get("gpu") == "none" else plain(env.get("gpu") or "an unknown machine")
        lines += [
            f"{plain(found['model']['name'])} in {plain(found['model']['dtype'])} on {on}: {text['windows']} windows "
            f"of {text['length']:,} tokens of {plain(text['source'])}; 95 % intervals over windows, the same on every "
            "side. Keys: pass keys found in filler text of so many tokens.",
            "",
        ]
        head = [
            "cache, scales, precision",
            "perplexity",
            "change",
            "95 % interval, %",
            "mean KL, nats",
            "same top token",
        ]
        head += [f"keys of {row['trials']} at {row['context']:,}" for row in found["retrieval"]]
        rows = []
        for name, side in found["sides"].items():
            row = [plain(name), f"{side['perplexity']['value']:.3f}"]
            if "change" in side:
                row += [percent(side["change"]["value"], 2, True), span(side["change"], 100)]
                row += [f"{side['kl']['value']:.1e}", percent(side["same_top"]["value"], 1)]
            else:
                row += ["–"] * 4
            rows.append([*row, *(str(sum(answers["right"][name])) for answers in found["retrieval"])])
        lines += _table(head, rows)
    return lines


def _merged(files: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Files of one model, text and machine as one: a run may be split by granularity or precision."""
    found: dict[str, dict[str, Any]] = {}
    for one in files:
        machine = one["environment"].get("gpu"), one["environment"].get("cpu")
        contexts = [(row["context"], row["trials"]) for row in one["retrieval"]]
        key = repr((one["model"], one["text"], machine, contexts))
        first = found.setdefault(key, one)
        if first is not one:
            new = {name: side for name, side in one["sides"].items() if name not in first["sides"]}
            both = zip(first["retrieval"], one["retrieval"], strict=True)
            rows = [{**a, "right": b["right"] | a["right"]} for a, b in both]
            found[key] = {**first, "sides": first["sides"] | new, "retrieval": rows}
    return list(found.values())


def _engines(evidence: Evidence) -> list[str]:
    steps = engine_steps(evidence)
    if not steps:
        return []
    lines = [
        "## Whole engine steps",
        "",
        "Milliseconds of a step of the whole engine (all layers, weights, sampling, host) with each attention backend "
        "and its cache, on dummy weights of the named shape. Prefill: until every prompt has its first token. *FP8*, "
        "*16 bits*, *all*: the time of the fastest side without octavo over that of octavo's fastest, of sides with "
        "such a cache, or of any, in the same run; above 1 octavo is faster.",
        "",
    ]
    gains = [
        [f"{plain(gain.engine)}, {plain(gain.phase)}", str(gain.steps), *map(ratio, gain.ratios.values())]
        for gain in engine_gains(steps)
    ]
    lines += _table(["engine, geometric mean", "steps", *CACHES], gains) if gains else []
    for engine in dict.fromkeys(step.engine for step in steps):
        of = [step for step in steps if step.engine == engine]
        names = list(dict.fromkeys(name for step in of for name in step.records))
        rows = []
        for step in of:
            times = [_milliseconds(step.records.get(name)) for name in names]
            shares = [ratio(step.ratios.get(name)) for name in CACHES]
            rows.append([code(step.case), *times, *shares])
        lines += _table([f"{plain(engine)}: step, ms", *map(plain, names), *CACHES], rows)
    return lines


def _milliseconds(record: Record | None) -> str:
    """A step's time and its cache, or what became of it."""
    if record is None or record.us is None:
        return "" if record is None else evidence_page.word(record)
    return f"{record.us / 1e3:,.1f} {plain(str(record.spec.get('kv_dtype', '')))}"


def _starts(evidence: Evidence) -> list[str]:
    cells = evidence.of_op("start")
    if not cells:
        return []
    rows = []
    for cell in cells:
        for record in cell.records.values():
            took = "–" if record.us is None else f"{record.us / 1e6:,.1f}"
            kernels = [str(record.spec.get(name, "")) for name in ("compiled", "cached")]
            rows.append([code(cell.case.removeprefix("start/")), took, *map(plain, kernels)])
    return [
        "## Cold and warm starts",
        "",
        "Seconds of `octavo warmup` in a new process, imports included: every shape of call that serving the model "
        "makes. Cold: nothing is in Triton's cache; warm: what the cold start left there.",
        "",
        *_table(["model, cache, start", "seconds", "kernels compiled", "kernels from the cache"], rows),
    ]


def _refused(evidence: Evidence) -> list[str]:
    found: dict[tuple[str, str], list[str]] = {}
    for backend, why, cases in data.refusals(evidence):
        head, *reasons = why.removeprefix("Unsupported: ").split("\n  - ")
        new = "; ".join(reason for reason in reasons if reason not in head)
        told = f"{head}: {new}" if new else head
        found.setdefault((backend, told), []).extend(cases)
    if not found:
        return []
    rows = []
    for (backend, why), cases in found.items():
        others = f" and {len(cases) - 1:,} more" if len(cases) > 1 else ""
        rows.append([plain(backend), plain(why[:240]), f"{code(cases[0])}{others}"])
    lines = _table(["backend", "why", "cells"], rows)
    lines[1] = "| --- | --- | --- |"
    return ["## Refused, wrong or failed", "", *lines]


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
        *_table(["model", "cells of the matrix", "with a record"], rows),
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
