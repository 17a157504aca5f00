"""The evidence document's chapters of accuracy, whole engines, starts, and what was refused."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ..backends import BY_NAME
from . import evidence as data
from . import evidence_page
from .evidence import Evidence
from .evidence_engines import CACHES, engine_gains, engine_steps
from .evidence_page import plain, ratio
from .evidence_text import code, table
from .records import OPS, Record
from .report import percent, span


def errors(evidence: Evidence) -> list[str]:
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
        *table(head, rows),
    ]


def accuracy(evidence: Evidence) -> list[str]:
    """Of each model, text and machine, a table of its caches."""
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
        lines += table(head, rows)
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


def engines(evidence: Evidence) -> list[str]:
    """Steps of whole engines: gains by engine, then every step."""
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
    lines += table(["engine, geometric mean", "steps", *CACHES], gains) if gains else []
    for engine in dict.fromkeys(step.engine for step in steps):
        of = [step for step in steps if step.engine == engine]
        names = list(dict.fromkeys(name for step in of for name in step.records))
        rows = []
        for step in of:
            times = [_milliseconds(step.records.get(name)) for name in names]
            shares = [ratio(step.ratios.get(name)) for name in CACHES]
            rows.append([code(step.case), *times, *shares])
        lines += table([f"{plain(engine)}: step, ms", *map(plain, names), *CACHES], rows)
    return lines


def _milliseconds(record: Record | None) -> str:
    """A step's time and its cache, or what became of it."""
    if record is None or record.us is None:
        return "" if record is None else evidence_page.word(record)
    return f"{record.us / 1e3:,.1f} {plain(str(record.spec.get('kv_dtype', '')))}"


def starts(evidence: Evidence) -> list[str]:
    """Seconds of cold and warm starts."""
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
        *table(["model, cache, start", "seconds", "kernels compiled", "kernels from the cache"], rows),
    ]


def refused(evidence: Evidence) -> list[str]:
    """What has no time, why, and how many cells by that."""
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
    lines = table(["backend", "why", "cells"], rows)
    lines[1] = "| --- | --- | --- |"
    return ["## Refused, wrong or failed", "", *lines]
