"""The grid of attention: which specs and batches every backend is held to, on a CPU and on a GPU, and how far it may be
from fp64.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import torch

from ..layouts import layout_reasons
from ..spec import AttentionSpec
from . import compare
from .inputs import Batch, make_batch

# e4m3 carries 4 significant bits: a query or P rounded to it is off by at most 2^-4 of itself, and by less on average.
FP8_ERROR = 2.0**-4

AXES: dict[str, tuple[Any, ...]] = {
    "layout": ("leaf", "nhd", "hnd"),
    "kv_dtype": ("fp8_e4m3", "fp8_e5m2", "bfloat16", "float16"),
    "scale_granularity": ("tensor", "head", "token_head"),
    "query_dtype": ("bfloat16", "float16", "fp8_e4m3"),
    "out_dtype": ("bfloat16", "float16", "float32", "fp8_e4m3"),
    "dims": ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (512, 512)),
    "page_size": (1, 8, 16, 24, 32, 48, 64, 96, 128, 528),
    "ratio": (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 71, 128),
    "features": ((), ("window",), ("softcap",), ("sinks",), ("window", "softcap", "sinks")),
    "lse": (False, True),
    "rows": ("one", "few", "sixteen", "prefill", "mixed"),
    "precision": ("fast", "exact"),
}
# What Hopper's kernels are for, as values of AXES.
HOPPER_AXES: dict[str, tuple[Any, ...]] = {
    "layout": ("leaf",),
    "kv_dtype": ("fp8_e4m3",),
    "scale_granularity": ("tensor", "head"),
    "dims": ((64, 64), (128, 128), (256, 256)),
    "page_size": (32, 64, 128),
    "ratio": (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32),
    "rows": ("one", "few", "prefill", "mixed"),
}
WIDE = ("dims", "page_size", "ratio")  # axes so long that, of them, only each value is due, not each pair
FEATURES = {"window": 40, "softcap": 20.0, "sinks": True}


@dataclass(frozen=True)
class Cell:
    """One spec and one kind of batch."""

    spec: AttentionSpec
    rows: str

    def __str__(self) -> str:
        parts = [f"{name}={value}" for name, value in self.spec.as_dict().items() if value != _DEFAULTS.get(name)]
        return " ".join([self.rows, *parts])

    def batch(self, device: str, scale: int = 1, rows: int = 1) -> Batch:
        """Its batch, of lengths times `scale`, of prefill rows times `rows`; a decode is long enough to be split."""
        lens = {
            "one": [1, 37, 330, 0],
            "few": [3, 70, 300],
            "sixteen": [9, 270],
            "prefill": [5, 90],
            "mixed": [37, 300, 20, 70],
        }[self.rows]
        query_lens = {
            "one": [1] * 4,
            "few": [4, 3, 1],
            "sixteen": [16, 13],
            "prefill": [5 * rows, 17 * rows],
            "mixed": [1, 2, 5 * rows, 9 * rows],
        }[self.rows]
        tensor = None if not self.spec.fp8 or self.spec.scale_granularity == "token_head" else 0.5
        made = make_batch(
            self.spec, [n * scale for n in lens], query_lens, device=device, k_scale=tensor, v_scale=tensor
        )
        if self.spec.fp8 and self.spec.scale_granularity == "head":
            heads = torch.arange(1, self.spec.num_kv_heads + 1, device=device, dtype=torch.float32)
            made.cache.k_scale, made.cache.v_scale = 0.4 / heads, 0.7 * heads
        return made

    @property
    def fast(self) -> bool:
        """Whether prefill multiplies an e4m3 query and P."""
        return self.spec.precision == "fast" and self.spec.kv_dtype == "fp8_e4m3"


_DEFAULTS = AttentionSpec(2, 1, 64).as_dict()


def _cell(values: dict[str, Any], heads: int) -> Cell | None:
    """A cell, or None where the layout or the query forbids it."""
    dim, dim_v = values["dims"]
    spec = AttentionSpec(
        heads * values["ratio"],
        heads,
        dim,
        dim_v,
        **{name: values[name] for name in AXES if name not in ("dims", "ratio", "features", "rows")},
        **{name: FEATURES[name] for name in values["features"]},
        max_query_len={"one": 1, "few": 4, "sixteen": 16, "prefill": 1, "mixed": 2}[values["rows"]],
    )
    if layout_reasons(spec) or (spec.query_dtype == "fp8_e4m3" and spec.kv_dtype != "fp8_e4m3"):
        return None
    return Cell(spec, values["rows"])


def grid(
    heads: int = 1, wide_pairs: bool = False, tries: int = 40, axes: dict[str, tuple[Any, ...]] | None = None
) -> list[Cell]:
    """Cells that hold every value of every axis and every pair of values that can be, of axes that are not `WIDE`.

    wide_pairs: pairs of a wide and another axis too. axes: fewer values of some axes. Greedy and deterministic.
    """
    values_of = AXES | (axes or {})
    generator = random.Random(0)

    def due(values: dict[str, Any]) -> set[tuple[Any, ...]]:
        found: set[tuple[Any, ...]] = {(name, value) for name, value in values.items()}
        for one, two in itertools.combinations(values, 2):
            if (one in WIDE) + (two in WIDE) <= (1 if wide_pairs else 0):
                found.add((one, values[one], two, values[two]))
        return found

    def draw() -> dict[str, Any]:
        return {name: generator.choice(values) for name, values in values_of.items()}

    cells: list[Cell] = []
    seen: set[tuple[Any, ...]] = set()
    idle = 0
    while idle < 12:
        drawn = [(values, cell) for values in (draw() for _ in range(tries)) if (cell := _cell(values, heads))]
        values, cell = max(drawn, key=lambda pair: len(due(pair[0]) - seen))
        new = due(values) - seen
        idle = 0 if new else idle + 1
        if new:
            seen |= new
            cells.append(cell)
    return cells


def faults(cell: Cell, batch: Batch, out: torch.Tensor) -> list[str]:
    """What is wrong with a result.

    Decode, and prefill without FP8 products, are as near to fp64 as bf16 attention, fast prefill within FP8's error.
    """
    spec = batch.spec
    truth, lse = compare.exact(batch)
    plain, got = compare.rounded(batch, compare.plain_bf16(batch)), compare.numbers(batch, out)
    rounding = FP8_ERROR if spec.out_dtype == "fp8_e4m3" else 0.0
    lens = batch.query_starts.diff().repeat_interleave(batch.query_starts.diff())
    decodes = lens <= spec.max_query_len
    found = [] if bool(got.isfinite().all()) else ["an output that is not finite"]
    for name, rows in (("decode", decodes), ("prefill", ~decodes)):
        norm = truth[rows].norm()
        if not norm > 0:
            continue
        error, bf16 = (got - truth)[rows], (plain - truth)[rows]
        bound = float(bf16.norm() / norm) * 1.1
        most = float(bf16.abs().max()) * 2.2
        if name == "prefill" and cell.fast:
            bound, most = FP8_ERROR + rounding, float("inf")
        if not (error.norm() / norm <= bound and error.abs().max() <= most):
            came = f"{float(error.norm() / norm):.5f} and {float(error.abs().max()):.5f}"
            found.append(f"{name}: errors of {came}, over {bound:.5f} and {most:.5f}")
        if batch.lse is not None:
            sees = lse[rows].isfinite()
            if not torch.equal(batch.lse[rows].isfinite(), sees):
                found.append(f"{name}: lse is finite where it should not be, or is not where it should")
            # A score is off by the rounding of its query: 2^-9 of it in bf16, 2^-4 in e4m3; scores here are below 16.
            off = (batch.lse[rows] - lse[rows])[sees].abs().max()
            if not off <= 16 * (FP8_ERROR if name == "prefill" and cell.fast else 2.0**-9):
                found.append(f"{name}: lse is off by {float(off):.5f}")
    return found
