"""Speed of the indexer's append, logits and top-k on this machine: one run, one record a cell, a short table.

    python benchmarks/indexer.py --out benchmarks/results/h200/indexer-triton.jsonl --backend triton

Top-k is told beside a plain read of the same logits in the same run. `mqa_logits.py` compares logits with other
libraries.
"""

from __future__ import annotations

import argparse

import torch

from octavo.bench.indexer_cases import hopper_grid
from octavo.bench.indexer_measure import IndexerInputs, measure
from octavo.bench.measure import of_run
from octavo.bench.records import Record, RecordFile


def line(record: Record, read_tbs: float | None) -> str:
    """One row of the table: microseconds, and what bounds it."""
    if record.us is None:
        return f"{record.case:56} {(record.error or '').splitlines()[0][:80]}"
    assert record.bytes is not None and record.flops is not None
    told = f"{record.bytes / record.us / 1e6:5.2f} TB/s"
    if record.op == "topk" and read_tbs:
        told += f"  {record.us / (record.bytes / read_tbs / 1e6):5.2f} reads of the logits"
    if record.flops:
        told += f"  {record.flops / record.us / 1e6:6.0f} TFLOP/s"
    return f"{record.case:56} {record.us:9.2f} us  {told}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--ops", default="append,topk,paged_mqa_logits,mqa_logits")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=0.03)
    arguments = parser.parse_args()
    shared = of_run(arguments.device, arguments.seconds)
    ceilings = shared["ceilings"]
    print(f"ceilings: {ceilings}", flush=True)
    with RecordFile(arguments.out) as file:
        for case in hopper_grid():
            if case.op not in arguments.ops.split(","):
                continue
            inputs = IndexerInputs(case, arguments.device)
            record = measure(case, arguments.backend, arguments.device, inputs=inputs, **shared)
            file.write(record)
            print(line(record, ceilings.read_tbs), flush=True)
            del inputs
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
