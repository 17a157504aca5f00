"""Prefill beside other libraries over the same contents: one run, one record a cell and side, a summary at the end.

    python benchmarks/prefill.py --out benchmarks/results/h200/prefill.jsonl

Attention alone, fast and exact. Every side gets the 16-bit query: its own quantisation is in its time. Each cell is
checked against fp64 on sampled rows before it is timed. Compute-bound cells heat the GPU until its clock falls: each is
timed for a short while, all sides alike. Peers that are not installed, and cells that a peer refuses, are records with
the reason.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from octavo import AttentionSpec
from octavo.bench import cases
from octavo.bench.measure import compare, of_run
from octavo.bench.peers import PEERS
from octavo.bench.records import Record, RecordFile

# (sequences, query rows, tokens): whole prompts, then chunks after a long prefix.
PROMPTS = [(1, 1024), (16, 1024), (1, 4096), (4, 4096), (1, 8192), (1, 16384), (4, 16384), (1, 32768)]
CHUNKS = [(n, 512, 32768) for n in (1, 2, 4, 8)] + [(1, 2048, 16384), (8, 512, 8192)]
SHAPES = [*((n, rows, rows) for n, rows in PROMPTS), *CHUNKS]
SOME = [(1, 4096, 4096), (1, 16384, 16384), (1, 512, 32768)]


def grid(page_size: int) -> Iterator[cases.Case]:
    """All shapes of 32/8 heads of 128, fast; some of other head dimensions, and exact."""
    spec = AttentionSpec(32, 8, 128, page_size=page_size)
    exact = replace(spec, precision="exact")
    groups = [(spec, SHAPES), (exact, SOME)]
    groups += [(AttentionSpec(32, 8, dim, page_size=page_size), SOME) for dim in (64, 256)]
    for one, shapes in groups:
        for batch, rows, tokens in shapes:
            yield cases.prefill(one, batch, rows, tokens)


def line(sides: list[Record]) -> str:
    """One cell: TFLOP/s of causal work of each side, and octavo's error."""
    ours = sides[0]
    rates = [f"{r.backend} {r.flops / r.us / 1e6:.0f}" if r.us and r.flops else f"{r.backend} -" for r in sides]
    error = "" if ours.rel_err is None else f"rel {ours.rel_err:.4f}"
    return f"{ours.case:58} {'  '.join(rates)}  {error} {(ours.error or '').splitlines()[:1]}"


def summary(cells: list[list[Record]], peer: str) -> str:
    """Geometric mean and least of octavo's speed over a peer's."""
    pairs = [(ours.us, r.us) for ours, *peers in cells for r in peers if r.backend == peer and r.us and ours.us]
    gains = [theirs / ours for ours, theirs in pairs]
    if not gains:
        return f"{peer}: no cell"
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    return f"{peer}: {mean:.2f}x its speed in the geometric mean of {len(gains)} cells, {min(gains):.2f}x in the least"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--page-size", type=int, default=64)
    parser.add_argument("--peers", default=",".join(name for name, peer in PEERS.items() if "prefill" in peer.ops))
    parser.add_argument("--seconds", type=float, default=0.02, help="of timing a cell and side")
    parser.add_argument("--pause", type=float, default=0.1, help="before each cell, in seconds")
    arguments = parser.parse_args()
    peers = [name for name in arguments.peers.split(",") if name]
    shared = of_run(arguments.device, arguments.seconds)
    print(f"ceilings: {shared['ceilings']}", flush=True)
    cells = []
    with RecordFile(arguments.out) as file:
        for case in grid(arguments.page_size):
            time.sleep(arguments.pause)
            sides = []
            for record in compare(case, ["auto", *peers], arguments.device, **shared):
                file.write(record)
                sides.append(record)
                if torch.device(arguments.device).type == "cuda":
                    torch.cuda.empty_cache()
            cells.append(sides)
            print(line(sides), flush=True)
    for peer in peers:
        print(summary(cells, peer))


if __name__ == "__main__":
    main()
