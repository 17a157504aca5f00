"""Speed of the indexer's logits on this machine, beside DeepGEMM's where it is installed: one run, one record a cell.

    python benchmarks/mqa_logits.py --out benchmarks/results/h200/mqa_logits.jsonl

The grid that octavo's indexer is held to. All sides of a case run one after the other over the same inputs, each
compared with fp64 on sampled rows before it is timed. Compute-bound cells heat the GPU until its clock falls: every
cell is timed for a few milliseconds after a pause, all sides alike.
"""

from __future__ import annotations

import argparse
import math
import time
from collections import defaultdict

import torch

from octavo.bench.indexer_cases import IndexerCase, hopper_grid
from octavo.bench.indexer_measure import IndexerInputs, measure
from octavo.bench.measure import of_run
from octavo.bench.records import Record, RecordFile

LOGITS = ("paged_mqa_logits", "mqa_logits")


def line(case: IndexerCase, records: list[Record]) -> str:
    """One row of the table: microseconds, share of the copy bandwidth and TFLOP/s of each side."""
    cells = []
    for r in records:
        if r.us is None:
            cells.append(f"{r.backend} {(r.error or '').splitlines()[0][:60]}")
            continue
        share = case.work.bytes / r.us / 1e6 / r.ceiling.get("copy_tbs", math.nan)
        rate = f"{share:.2f}, {case.work.flops / r.us / 1e6:.0f}"
        cells.append(f"{r.backend} {r.us:.1f} us ({rate}, rel {r.rel_err:.1e})")
    return f"{case.name.removeprefix('paged_'):52} " + "  ".join(cells)


def ratios(groups: dict[str, list[float]]) -> str:
    """Geometric mean and least of the ratios in each group."""
    told = (f"{name}: {math.exp(sum(map(math.log, r)) / len(r)):.3f} ({min(r):.3f})" for name, r in groups.items())
    return "; ".join(told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--backends", default="gluon,deepgemm")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=0.02)
    parser.add_argument("--pause", type=float, default=0.1)
    arguments = parser.parse_args()
    fixed = of_run(arguments.device, arguments.seconds)
    print(f"ceilings: {fixed['ceilings']}", flush=True)
    against_peer: dict[str, list[float]] = defaultdict(list)
    with RecordFile(arguments.out) as file:
        for case in hopper_grid():
            if case.op not in LOGITS:
                continue
            inputs = IndexerInputs(case, arguments.device)
            records = []
            for backend in arguments.backends.split(","):
                time.sleep(arguments.pause)
                records.append(measure(case, backend, arguments.device, inputs=inputs, **fixed))
                file.write(records[-1])
            print(line(case, records), flush=True)
            if len(records) > 1 and records[0].us and records[1].us and "uneven" not in case.name:
                against_peer[f"{case.op} n{case.spec.max_query_len}"].append(records[1].us / records[0].us)
            del inputs
            torch.cuda.empty_cache()
    print("first against second, geometric mean (least):", ratios(against_peer))


if __name__ == "__main__":
    main()
