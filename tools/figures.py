"""Draws the figures of docs/ that are made from records: python tools/figures.py."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from octavo.bench.plots import BLUE, GREEN, GREY, ORANGE, Curve, curves
from octavo.bench.records import Record, read_records

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "benchmarks" / "results" / "h200"
# Name, (backend, query heads, head_dim, page size), colour and marker of each line of the figure of decode.
DECODE = (
    ("gluon 32/8 x 128", ("gluon", 32, 128, 128), BLUE, "o"),
    ("gluon 64/8 x 128", ("gluon", 64, 128, 128), GREY, "^"),
    ("gluon 64/8 x 64", ("gluon", 64, 64, 128), GREEN, "D"),
    ("triton 32/8 x 128", ("triton", 32, 128, 64), ORANGE, "s"),
)
LARGEST = 4096  # MiB; beyond it the lines are level


def shares(
    records: Iterable[Record], backend: str, heads: int, dim: int, page_size: int = 64
) -> list[tuple[float, float]]:
    """(MiB to the nearest power of two, share of the same run's copy) of one-row decode over leaf pages, up to LARGEST.

    The last record of each case counts, and of cases of the same size the slowest.
    """
    last: dict[str, tuple[int, float]] = {}
    for record in records:
        spec = record.spec
        shape = (spec.get("num_q_heads"), spec.get("head_dim"), spec.get("layout"), spec.get("page_size"))
        if (record.op, record.backend, *shape) != ("decode", backend, heads, dim, "leaf", page_size):
            continue
        if record.us and record.bytes and "copy_tbs" in record.ceiling and not record.case.startswith("append+"):
            share = record.bytes / record.us / 1e6 / record.ceiling["copy_tbs"]
            last[record.case] = (2 ** round(math.log2(record.bytes / 2**20)), share)
    slowest: dict[int, float] = {}
    for size, share in last.values():
        slowest[size] = min(share, slowest.get(size, share))
    return [(float(size), slowest[size]) for size in sorted(slowest) if size <= LARGEST]


def decode_figure(records: Iterable[Record]) -> str:
    """Share of the copy's rate over the bytes of a call."""
    held = list(records)
    lines = [Curve(name, color, marker, shares(held, *which)) for name, which, color, marker in DECODE]
    drawn = [line for line in lines if line.points]
    return curves(drawn, "keys and values, MiB", "bytes / time, of the copy's rate", {"the same run's copy": 1.0})


def main() -> None:
    records = read_records([RECORDS / "triton-decode.jsonl", RECORDS / "decode.jsonl"])
    (ROOT / "docs" / "figures" / "decode.svg").write_text(decode_figure(records), encoding="utf-8")


if __name__ == "__main__":
    main()
