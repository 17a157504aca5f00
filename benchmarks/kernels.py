"""Speed of the kernels on this machine: one run, one record a cell, a short table at the end.

    python benchmarks/kernels.py triton --out benchmarks/results/h200/triton.jsonl

Decode over the batch and context grid, prefill, and append in every layout; each cell checked against fp64 on sampled
rows before it is timed, ceilings measured first in the same run.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from octavo import AttentionSpec
from octavo.bench import cases
from octavo.bench.measure import measure, of_run
from octavo.bench.records import Record, RecordFile

LLAMA = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
WIDE = replace(LLAMA, num_q_heads=64)
NARROW = AttentionSpec(num_q_heads=64, num_kv_heads=8, head_dim=64)
NHD = replace(LLAMA, layout="nhd")


def decode_cases() -> list[cases.Case]:
    """Batch and context from one short sequence to gigabytes of KV."""
    made = [
        cases.decode(LLAMA, batch, context)
        for batch, context in (
            *((1, 1024), (1, 8192), (1, 131072), (16, 4096), (16, 32768)),
            *((64, 1024), (64, 4096), (64, 8192), (256, 1024), (256, 8192)),
        )
    ]
    made += [cases.decode(spec, 64, 4096) for spec in (NHD, replace(NHD, page_size=16), replace(LLAMA, layout="hnd"))]
    made += [cases.decode(spec, b, c) for spec in (WIDE, NARROW) for b, c in ((64, 4096), (256, 4096))]
    made.append(cases.decode(replace(WIDE, max_query_len=4), 64, 8192))
    made.append(cases.decode(replace(NHD, kv_dtype="bfloat16"), 64, 4096))
    return made


def prefill_cases() -> list[cases.Case]:
    """Whole prompts, and a chunk after a long prefix."""
    made = [cases.prefill(LLAMA, b, n) for b, n in ((1, 2048), (1, 8192), (1, 16384), (4, 4096), (16, 1024))]
    made += [cases.prefill(LLAMA, 1, 512, 32768), cases.prefill(LLAMA, 8, 512, 8192)]
    made += [cases.prefill(spec, 1, 16384) for spec in (NHD, replace(LLAMA, precision="exact"), NARROW)]
    return made


def append_cases() -> list[cases.Case]:
    """A prompt, a small batch, and one token to each of many sequences."""
    grid = ((1, 8192), (1, 64), (256, 1))
    return [cases.append(spec, b, n) for spec in cases.in_layouts(LLAMA) for b, n in grid]


def line(record: Record) -> str:
    """One row of the table: what bounds it, as a share or a rate."""
    if record.error:
        return f"{record.case:58} {record.error.splitlines()[0][:90]}"
    assert record.us and record.bytes is not None and record.flops is not None
    copy = record.ceiling.get("copy_tbs")
    rate = (
        f"{record.flops / record.us / 1e6:6.0f} TFLOP/s"
        if record.op == "prefill"
        else f"{record.bytes / record.us / 1e6:6.2f} TB/s"
    )
    share = f"{record.bytes / record.us / 1e6 / copy:5.2f} of copy" if copy and record.op != "prefill" else ""
    error = f"rel {record.rel_err:.2e} (bf16 {record.rel_err_bf16:.2e})" if record.rel_err is not None else ""
    return f"{record.case:58} {record.us:9.1f} us  {rate}  {share}  {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("--out", required=True)
    parser.add_argument("--ops", default="decode,prefill,append")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=0.15)
    arguments = parser.parse_args()
    shared = of_run(arguments.device, arguments.seconds)
    grids = {"decode": decode_cases, "prefill": prefill_cases, "append": append_cases}
    print(f"ceilings: {shared['ceilings']}", flush=True)
    with RecordFile(arguments.out) as file:
        for op in arguments.ops.split(","):
            for case in grids[op]():
                record = measure(case, arguments.backend, arguments.device, **shared)
                file.write(record)
                print(line(record), flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
