"""One sequence of up to a million tokens: right on sampled rows, and a time that grows as the work does.

    python benchmarks/long_context.py --out benchmarks/results/h200/long_context.jsonl

Decode over 256k, 512k and 1M tokens and chunks of 8,192 rows at their end, whose work grows with the context; whole
prompts of 128k, 256k and 512k, whose work grows with its square. Pools are larger than 2^31 bytes and pages lie in any
order, so an offset that is not int64 reads another token. Each cell is compared with fp64 before it is timed. A prompt
takes seconds: its calls are timed one by one and not in a graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence

import torch

from octavo import AttentionSpec
from octavo.bench import cases
from octavo.bench.measure import WRONG, DeviceLost, backend_name, cell, of_run, record_of
from octavo.bench.records import Record, RecordFile
from octavo.bench.sides import AttentionInputs, Side, octavo_side
from octavo.bench.timing import Timing, summarise

K = 1024
EVENTS = "events around each call, data sets in turn, median"
CONTEXTS, PROMPTS, CHUNK = (256 * K, 512 * K, 1024 * K), (128 * K, 256 * K, 512 * K), 8 * K


def grid(spec: AttentionSpec, scale: int) -> Iterator[tuple[cases.Case, str]]:
    """(case, backend); every length over `scale`."""
    for backend in ("auto", "triton"):
        for context in CONTEXTS:
            yield cases.decode(spec, 1, context // scale), backend
        for context in CONTEXTS if backend == "auto" else CONTEXTS[-1:]:
            yield cases.prefill(spec, 1, CHUNK // scale, context // scale), backend
    for rows in PROMPTS:
        yield cases.prefill(spec, 1, rows // scale), "auto"


def measured(case: cases.Case, backend: str, device: torch.device, shared: dict) -> Record:
    """The record of one case, whatever becomes of it. Raises DeviceLost where the device went with it."""
    fields = cell(case, backend_name(case, backend, device), shared["run"], shared["ceilings"], shared["env"])
    time = None if case.op == "decode" else time_one_by_one

    def make() -> Side:
        return octavo_side(case, backend, AttentionInputs(case, device))

    return record_of(fields, make, device, shared["seconds"], WRONG, time=time)


def time_one_by_one(calls: Sequence[Callable[[], object]], device: torch.device, *, seconds: float) -> Timing:
    """`time_calls` of so long calls: three of them, however many `seconds`; the first data set's was run before."""
    found = []
    for index in range(3):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        calls[index % len(calls)]()
        after.record()
        torch.cuda.synchronize(device)
        found.append(before.elapsed_time(after) * 1e3)
    return summarise(found, EVENTS)


def line(record: Record) -> str:
    """One cell: time, rate, error."""
    if record.us is None or record.bytes is None or record.flops is None:
        return f"{record.case:52} {record.backend:7} {(record.error or '')[:200]}"
    rate = f"{record.bytes / record.us / 1e6:6.2f} TB/s" if record.op == "decode" else ""
    rate = rate or f"{record.flops / record.us / 1e6:6.0f} TFLOP/s"
    return f"{record.case:52} {record.backend:7} {record.us:12.1f} us {rate}  rel {record.rel_err:.5f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=0.05, help="of timing a cell of decode")
    parser.add_argument("--scale", type=int, default=1, help="divides every length: 1024 to try the file itself")
    arguments = parser.parse_args()
    device = torch.empty(0, device=arguments.device).device
    shared = of_run(device, arguments.seconds)
    with RecordFile(arguments.out) as file:
        for case, backend in grid(AttentionSpec(32, 8, 128), arguments.scale):
            try:
                record = measured(case, backend, device, shared)
            except DeviceLost as lost:
                file.write(lost.record)
                raise
            file.write(record)
            print(line(record), flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
