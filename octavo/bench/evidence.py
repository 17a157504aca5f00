"""What records say, as tables: cells side by side, ratios to the best peer, cost of a token, refusals. No drawing here.

Sides are compared only where they share a run, for a machine is not the same from one run to the next.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..backends import BY_NAME
from ..choose import choose
from ..device import KNOWN, Device, known_gpu
from ..errors import OctavoError
from ..formats import TORCH_DTYPES
from ..spec import LAYOUTS, AttentionSpec
from .accuracy_file import read_accuracy
from .records import OPS, Record, read_records

OTHER_SHAPES = "other shapes"
ENGINES = ("vllm", "sglang")  # a record of a step has an engine's side for its backend: "vllm-octavo:fp8"


@dataclass
class Cell:
    """One case of one run: its records by backend."""

    case: str
    op: str
    run: str
    records: dict[str, Record] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        """The case without its op and sizes: "llama-3.1-8b/tp1"."""
        return "/".join(part for part in self.case.split("/")[1:] if size(part) is None)

    @property
    def sizes(self) -> dict[str, int]:
        """b, q, ctx, t, n of the name, those that are there."""
        return dict(found for part in self.case.split("/")[1:] if (found := size(part)) is not None)

    @property
    def timed(self) -> dict[str, float]:
        """Microseconds by backend, of those that have them."""
        return {name: record.us for name, record in self.records.items() if record.us is not None}

    @property
    def cache(self) -> str:
        """The cache that octavo's records, else any, read: "FP8" or "16-bit"; "" for operations without, or of both."""
        held = {name: record for name, record in self.records.items() if "kv_dtype" in record.spec}
        own = [record for name, record in held.items() if is_octavo(name)] or list(held.values())
        found = {"FP8" if _in_fp8(record) else "16-bit" for record in own}
        return found.pop() if len(found) == 1 else ""

    @property
    def copied(self) -> bool:
        """Whether it is the measurement of a case that has another name."""
        return all(record.same_as is not None for record in self.records.values())

    def best(self, ours: bool, fp8: bool | None = None) -> tuple[str, float] | None:
        """The fastest of octavo's backends, or of the others; with `fp8` of those whose cache is FP8, or is not."""
        of = {
            name: us
            for name, us in self.timed.items()
            if is_octavo(name) == ours and fp8 in (None, _in_fp8(self.records[name]))
        }
        return min(of.items(), key=lambda pair: pair[1]) if of else None

    def ratio_of(self, fp8: bool | None) -> float | None:
        """How many times as fast as the best peer octavo's best is, of those that `best` takes; None without either."""
        mine, peer = self.best(True, fp8), self.best(False, fp8)
        return peer[1] / mine[1] if mine and peer else None

    @property
    def ratio(self) -> float | None:
        """How many times as fast as the best peer octavo's best is; None where either is missing."""
        return self.ratio_of(None)


@dataclass
class Evidence:
    """Everything that the files hold.

    Attributes:
        cells: in order of op and name, the latest run of each backend. accuracy: results of `octavo accuracy`.
        files: names of what was read.
    """

    cells: list[Cell]
    accuracy: list[dict[str, Any]]
    files: list[str]

    @property
    def records(self) -> list[Record]:
        """Of all cells."""
        return [record for cell in self.cells for record in cell.records.values()]

    @property
    def environments(self) -> list[dict[str, str]]:
        """Distinct ones, in order of appearance."""
        found = [record.env for record in self.records] + [one["environment"] for one in self.accuracy]
        return _distinct([env for env in found if env])

    def of_op(self, op: str) -> list[Cell]:
        """Cells of one op."""
        return [cell for cell in self.cells if cell.op == op]


def read(paths: Sequence[Path]) -> Evidence:
    """Records (.jsonl) and accuracy results (.json). InvalidInput, in one line, for a file that is neither."""
    records: list[Record] = []
    accuracy: list[dict[str, Any]] = []
    for path in paths:
        if path.suffix == ".json":
            accuracy.append(read_accuracy(path))
        else:
            records += read_records([path])
    return Evidence(_cells(records), accuracy, [path.name for path in paths])


def _cells(records: Iterable[Record]) -> list[Cell]:
    """Records by case and run; of a case and backend that were measured in several runs the latest counts."""
    latest: dict[tuple[str, str], Record] = {}
    for record in records:
        latest[record.case, record.backend] = record
    cells: dict[tuple[str, str], Cell] = {}
    for record in latest.values():
        cell = cells.setdefault((record.case, record.run), Cell(record.case, record.op, record.run))
        cell.records[record.backend] = record
    return sorted(cells.values(), key=lambda c: (OPS.index(c.op), _natural(c.case), c.run))


def is_octavo(backend: str) -> bool:
    """Whether a record's backend is octavo's: one of its own, or the side of an engine that runs octavo."""
    engine, _, side = backend.partition("-")
    return backend in BY_NAME or (side if engine in ENGINES else backend).startswith("octavo")


def _in_fp8(record: Record) -> bool:
    return str(record.spec.get("kv_dtype", "")).startswith("fp8")


def size(part: str) -> tuple[str, int] | None:
    """A part of a case's name that is a size: "b64" is ("b", 64)."""
    letters = part.rstrip("0123456789")
    digits = part[len(letters) :]
    return (letters, int(digits)) if letters in ("b", "q", "ctx", "t", "n") and 0 < len(digits) <= 18 else None


def _natural(name: str) -> list[Any]:
    """A key that orders b16 before b128."""
    return [(0, *found) if (found := size(part)) else (1, part, 0) for part in name.split("/")]


def _distinct(items: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if item not in found:
            found.append(item)
    return found


def geometric_mean(values: Sequence[float]) -> float | None:
    """None for none."""
    return math.exp(statistics.fmean(math.log(v) for v in values)) if values else None


def summary(evidence: Evidence) -> list[dict[str, Any]]:
    """Of each op and cache: cells, how many have a peer, geometric mean, least and most of the ratios to the best peer.

    A cell that is another one's measurement under its own name counts as a cell, but its ratio does not count again.
    """
    rows = []
    for op in OPS:
        of_op = evidence.of_op(op)
        for cache in sorted({cell.cache for cell in of_op}, reverse=True):  # FP8 before 16-bit
            cells = [cell for cell in of_op if cell.cache == cache]
            ratios = [cell.ratio for cell in cells if cell.ratio is not None and not cell.copied]
            rows.append(
                {
                    "op": op,
                    "name": f"{op}, {cache} cache" if cache else op,
                    "cells": len({cell.case for cell in cells}),
                    "compared": len(ratios),
                    "mean": geometric_mean(ratios),
                    "least": min(ratios, default=None),
                    "most": max(ratios, default=None),
                    "ahead": sum(ratio > 1 for ratio in ratios),
                }
            )
    return rows


def series(evidence: Evidence, op: str) -> dict[tuple[str, int], dict[str, dict[int, Record]]]:
    """Timed records by (subject, batch), backend and context: what speed-against-context figures are drawn from.

    Query rows of a sequence, where there are several, and an append before it are part of the subject. A point is of
    one case for all backends: of several with one context, that which most were timed in, or the largest. Only those
    with two contexts or more.
    """
    cases: dict[tuple[str, int], dict[int, dict[str, dict[str, Record]]]] = {}
    for cell in evidence.of_op(op):
        sizes = cell.sizes
        timed = {name: record for name, record in cell.records.items() if record.us is not None}
        if timed and "ctx" in sizes:
            subject = cell.subject + (f"/n{sizes['n']}" if "n" in sizes else "")
            subject += "/append" if cell.case.startswith("append+") else ""
            # A prefill step has fewer sequences the longer they are: one line for all of them.
            key = (subject, 0 if op == "prefill" else sizes.get("b", 0))
            cases.setdefault(key, {}).setdefault(sizes["ctx"], {}).setdefault(cell.case, {}).update(timed)
    found: dict[tuple[str, int], dict[str, dict[int, Record]]] = {}
    for key, contexts in cases.items():
        for context, named in contexts.items():
            of_most = max(named.values(), key=lambda by: (len(by), max(one.flops or 0 for one in by.values())))
            for backend, record in of_most.items():
                found.setdefault(key, {}).setdefault(backend, {})[context] = record
    return {key: of for key, of in found.items() if any(len(points) > 1 for points in of.values())}


@dataclass(frozen=True)
class Pair:
    """One shape with an FP8 and a 16-bit cache: (backend, microseconds) of the fastest over each, whoever's.

    case: the name of either case, without its cache's dtype and layout.
    """

    op: str
    case: str
    fp8: tuple[str, float]
    sixteen: tuple[str, float]

    @property
    def gain(self) -> float:
        """How many times as fast it is in FP8."""
        return self.sixteen[1] / self.fp8[1]


def pairs(evidence: Evidence) -> list[Pair]:
    """Of every shape that one run has with both kinds of cache. A 16-bit side may be of an FP8 case: SDPA widens it."""
    found: dict[tuple[str, str, str], dict[bool, dict[str, float]]] = {}
    for cell in evidence.cells:
        for name, record in cell.records.items():
            kv_dtype = record.spec.get("kv_dtype")
            if record.us is None or not isinstance(kv_dtype, str) or cell.op in ("append", "step", "start"):
                continue
            parts = [part for part in cell.case.split("/") if part not in TORCH_DTYPES and not _is_layout(part)]
            by_cache = found.setdefault((cell.op, "/".join(parts), cell.run), {})
            of = by_cache.setdefault(_in_fp8(record), {})
            of[name] = min(record.us, of.get(name, record.us))
    made = []
    for (op, case, _), by_cache in found.items():
        if len(by_cache) == 2:
            fp8, sixteen = (min(by_cache[kind].items(), key=lambda pair: pair[1]) for kind in (True, False))
            made.append(Pair(op, case, fp8, sixteen))
    return made


def model_of(case: str) -> str:
    """The model that a case is of, with its kind of layer; OTHER_SHAPES for cases that are named by their shape."""
    name = case.split("/")[1] if "/" in case else ""
    return OTHER_SHAPES if re.fullmatch(r"[0-9]+x[0-9]+|h[0-9]+|k[0-9]+|indexer|", name) else name


def cache_gains(of: Sequence[Pair]) -> list[dict[str, Any]]:
    """Of each operation and model: shapes, and geometric mean, least and most of how many times as fast FP8 is."""
    gains: dict[tuple[str, str], list[float]] = {}
    for pair in of:
        gains.setdefault((pair.op, model_of(pair.case)), []).append(pair.gain)
    return [
        {"op": op, "model": model, "shapes": len(x), "mean": geometric_mean(x), "least": min(x), "most": max(x)}
        for (op, model), x in gains.items()
    ]


def _is_layout(part: str) -> bool:
    """Whether a part of a case's name is its layout and page size: "leaf64"."""
    return part.rstrip("0123456789") in LAYOUTS


def memory_of(evidence: Evidence) -> float | None:
    """Bytes of the memory of the GPU that most records are of; None where there is none that octavo knows."""
    devices = [device for record in evidence.records if (device := _device(record.env)) and device.memory_gb]
    return statistics.mode(devices).memory_gb * 1e9 if devices else None


def token_costs(evidence: Evidence, memory_gb: float) -> list[dict[str, Any]]:
    """Of each decode cell: microseconds of attention a layer and token, bytes a token and layer, tokens that fit.

    memory_gb: 1e9 bytes of one rank's memory that one layer of the cache would have; tokens are counted for a layer.
    """
    rows = []
    for cell in evidence.of_op("decode"):
        best = cell.best(True)
        if best is None:
            continue
        spec = spec_of(cell.records[best[0]])
        if spec is not None:
            rows.append(
                {
                    "case": cell.case,
                    "backend": best[0],
                    "us_per_token": best[1] / max(1, cell.sizes.get("b", 1)),
                    "bytes_per_token": spec.bytes_per_token,
                    "tokens": int(memory_gb * 1e9) // spec.bytes_per_token,
                }
            )
    return rows


def accuracy_points(evidence: Evidence) -> dict[str, list[tuple[float, float, str]]]:
    """Of each backend: (how many times the fastest's time, error over bf16 attention's, case) of cells with errors."""
    found: dict[str, list[tuple[float, float, str]]] = {}
    for cell in evidence.cells:
        fastest = min(cell.timed.values(), default=None)
        for name, record in cell.records.items():
            if record.us is not None and record.rel_err and record.rel_err_bf16 and fastest:
                point = (record.us / fastest, record.rel_err / record.rel_err_bf16, cell.case)
                found.setdefault(name, []).append(point)
    return found


def refusals(evidence: Evidence) -> list[tuple[str, str, list[str]]]:
    """(backend, why, cases) of cells that were refused or wrong, each reason once."""
    found: dict[tuple[str, str], list[str]] = {}
    for cell in evidence.cells:
        for name, record in cell.records.items():
            if record.error:
                found.setdefault((name, record.error.replace(cell.case, "the case")), []).append(cell.case)
    return [(name, why, cases) for (name, why), cases in found.items()]


def plans(evidence: Evidence) -> list[tuple[str, str]]:
    """(subjects, plan) of each distinct spec that octavo ran, on the device of its records."""
    found: dict[str, list[str]] = {}
    for cell in evidence.cells:
        for name, record in cell.records.items():
            spec = spec_of(record) if name in BY_NAME and cell.op != "append" else None
            device = _device(record.env)
            if spec is None or device is None:
                continue
            try:
                plan = str(choose(spec, device))
            except OctavoError as refusal:
                plan = str(refusal)
            subjects = found.setdefault(plan, [])
            if cell.subject not in subjects:
                subjects.append(cell.subject)
    return [(", ".join(subjects), plan) for plan, subjects in found.items()]


def _device(env: dict[str, str]) -> Device | None:
    """The known device that a record's GPU name speaks of; the CPU for "none"; else None."""
    gpu = env.get("gpu", "none")
    return KNOWN["cpu"] if gpu == "none" else known_gpu(gpu)


def spec_of(record: Record) -> AttentionSpec | None:
    """The record's spec; None for an indexer's, or one with fields that this version does not have."""
    known = {f for f in AttentionSpec.__dataclass_fields__}
    fields = {name: value for name, value in record.spec.items() if name in known}
    try:
        return AttentionSpec(**fields) if {"num_q_heads", "num_kv_heads", "head_dim"} <= set(fields) else None
    except (OctavoError, OverflowError):  # an integer that no float holds
        return None
