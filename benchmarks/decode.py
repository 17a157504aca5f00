"""Decode beside other libraries over the same contents: one run, one record a cell and side, a summary at the end.

    python benchmarks/decode.py --out benchmarks/results/h200/decode.jsonl
    python benchmarks/decode.py --out decode.jsonl --batches 64 --contexts 4096 --peers ""

Attention alone, and with an append of one token a sequence. Each side has the page size and layout it is fastest on and
its own append; each cell is checked against fp64 on sampled rows before it is timed. Peers that are not installed, and
cells that a peer refuses or that do not fit, are records with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator

import torch

from octavo import AttentionSpec
from octavo.bench import cases
from octavo.bench.measure import compare, of_run
from octavo.bench.peers import PEERS
from octavo.bench.records import Record, RecordFile

BATCHES, CONTEXTS = (1, 16, 64, 128, 256), (1024, 4096, 8192, 32768, 131072)
SMALL, LARGE = 600e6, 2e9  # bytes of a cell: the two groups whose means are told
# octavo's fastest page sizes. A token's V is bytes a page apart: with two of them in a line of memory an append is
# sooner done, which counts where contexts are SHORT.
PAGE_SIZE, APPEND_PAGE_SIZE, SHORT = 128, 64, 4096
SPECS = [AttentionSpec(q, 8, dim, page_size=PAGE_SIZE) for q, dim in ((32, 128), (64, 128), (64, 64))]  # of models


def grid(arguments: argparse.Namespace) -> Iterator[cases.Case]:
    """Attention alone and with an append, smallest first: a run that is cut short lacks the largest of each shape."""
    cells = [(b, n) for b in numbers(arguments.batches) for n in numbers(arguments.contexts)]
    for batch, context in sorted(cells, key=math.prod):
        for spec in SPECS:
            yield cases.decode(spec, batch, context)
            if arguments.append:
                if context <= SHORT:
                    spec = dataclasses.replace(spec, page_size=APPEND_PAGE_SIZE)
                yield cases.decode(spec, batch, context).with_append()


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def line(sides: list[Record]) -> str:
    """One cell: octavo's time, its share of the copy, and each peer's time as a multiple of it."""
    ours, *peers = sides
    if ours.us is None or ours.bytes is None:
        return f"{ours.case:58} {(ours.error or '').splitlines()[0][:90]}"
    copy = ours.ceiling.get("copy_tbs")
    share = f"{ours.bytes / ours.us / 1e6 / copy:5.2f} of copy" if copy else ""
    times = [f"{p.backend} {p.us / ours.us:.2f}x" if p.us else f"{p.backend} -" for p in peers]
    return f"{ours.case:58} {ours.us:9.1f} us  {share}  {'  '.join(times)}"


def gains(cells: list[list[Record]]) -> list[float]:
    """Of each cell that a peer ran: the fastest peer's time over octavo's."""
    found = []
    for ours, *peers in cells:
        times = [p.us for p in peers if p.us]
        if ours.us and times:
            found.append(min(times) / ours.us)
    return found


def summary(cells: list[list[Record]]) -> str:
    """Geometric means of the gains, and where a peer is ahead."""
    groups = {
        f"under {SMALL / 1e6:.0f} MB": [c for c in cells if (c[0].bytes or 0) < SMALL],
        f"over {LARGE / 1e9:.0f} GB": [c for c in cells if (c[0].bytes or 0) > LARGE],
        "all": cells,
    }
    lines = []
    for name, group in groups.items():
        found = gains(group)
        if found:
            mean = math.exp(sum(map(math.log, found)) / len(found))
            behind = sum(gain < 1 for gain in found)
            lines.append(f"{name:12} {len(found):3} cells, {mean:.2f}x the fastest peer's speed; behind in {behind}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)))
    parser.add_argument("--contexts", default=",".join(map(str, CONTEXTS)))
    parser.add_argument("--peers", default=",".join(name for name, peer in PEERS.items() if "decode" in peer.ops))
    parser.add_argument("--seconds", type=float, default=0.04, help="of timing a cell and side")
    parser.add_argument("--append", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    backends = ["auto", *(name for name in arguments.peers.split(",") if name)]
    shared = of_run(arguments.device, arguments.seconds)
    print(f"ceilings: {shared['ceilings']}", flush=True)
    cells = []
    with RecordFile(arguments.out) as file:
        for case in grid(arguments):
            sides = []
            for record in compare(case, backends, arguments.device, **shared):
                file.write(record)
                sides.append(record)
                if torch.device(arguments.device).type == "cuda":
                    torch.cuda.empty_cache()
            cells.append(sides)
            print(line(sides), flush=True)
    print(summary(cells))


if __name__ == "__main__":
    main()
