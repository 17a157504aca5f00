"""Several processes on one GPU, which run the same steps over and over: every result has the first one's bits.

    python -m octavo.testing.sharing --processes 4 --seconds 60

The driver gives each process the GPU in turn and stops kernels in the middle of it. That changes nothing as long as
they keep the rules of PTX; nor does it matter how slow the others make one. Results are compared bit for bit, 40 runs
at a time, so that there is always a kernel to be stopped. Values are other tests' business.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from ..attention import Attention
from ..backends import BY_NAME
from ..device import Device
from ..formats import TORCH_DTYPES
from ..indexer import IndexerCache, mqa_logits, paged_mqa_logits, topk_indices
from ..spec import AttentionSpec
from . import fuzz, indexer_support, sanitize
from .inputs import Batch

AT_ONCE = 40


def step(attention: Attention, batch: Batch, outs: torch.Tensor, i: int) -> torch.Tensor:
    """Output number i of a step, which is 0 before."""
    attention.run(batch.q, batch.cache, out=outs[i].zero_(), **batch.arguments)
    return outs[i]


def attention_steps(spec: AttentionSpec, device: torch.device) -> Iterator[tuple[str, Callable[[int], torch.Tensor]]]:
    """The kinds of step of `sanitize.steps` on Hopper's kernels: a label, and what runs a step into output number i."""
    for number, example in enumerate(sanitize.steps(spec)):
        batch = sanitize.moved(example.batch("cpu"), device)
        backend = sanitize.named(spec, "gluon")
        attention = Attention(spec, max_batch=8, max_query_tokens=256, max_context=1024, device=device, backend=backend)
        attention.plan(batch.seq_lens, batch.page_table, batch.query_starts, **example.plan)
        shape = (AT_ONCE, batch.q.shape[0], spec.num_q_heads, spec.value_dim)
        outs = torch.zeros(shape, dtype=TORCH_DTYPES[spec.out_dtype], device=device)

        yield f"step {number} of {spec}", partial(step, attention, batch, outs)


def indexer_steps(device: torch.device) -> Iterator[tuple[str, Callable[[int], torch.Tensor]]]:
    """Logits of every spec of the indexer's on Hopper's kernels, paged and over a run of keys, and their top-k."""
    nothing = float("-inf")
    for spec in indexer_support.SPECS:
        given = indexer_support.Inputs.of(spec)
        here = given.cache(spec, torch.device("cpu"), "reference")
        cache = IndexerCache.view(torch.zeros_like(here.pages).to(device), spec.scale_format)
        cache.append(given.keys.to(device), given.slots.to(device))
        q, weights, lens, table = (
            t.to(device) for t in (given.queries, given.weights, given.seq_lens, given.page_table)
        )
        width = given.page_table.shape[1] * spec.page_size
        keys = given.keys.float().clamp(-8, 8).to(torch.float8_e4m3fn).to(device)
        starts = torch.arange(weights.shape[0], dtype=torch.int32, device=device) * 3
        ends = (starts * 14).clamp_max(len(keys))
        scales = torch.linspace(0.5, 2.0, len(keys), device=device)
        paged = partial(paged_mqa_logits, q, cache, weights, lens, table, width, fill=nothing, backend="gluon")
        ragged = partial(
            mqa_logits, q.flatten(0, 1), keys, scales, weights, starts, ends, fill=nothing, backend="gluon"
        )
        logits = ragged()
        yield f"paged logits of {spec}", lambda i, run=paged: run()
        yield f"logits of {spec}", lambda i, run=ragged: run()
        yield f"top-k of {spec}", lambda i, logits=logits, ends=ends, k=spec.top_k: topk_indices(logits, ends, k)


def steps(device: torch.device) -> list[tuple[str, Callable[[int], torch.Tensor]]]:
    """All steps that Hopper's kernels have a say in."""
    hopper = Device.named("h200")
    specs = [
        s for s in (*fuzz.GPU_SPECS, *sanitize.MORE_OF_HOPPER) if not BY_NAME["gluon"].reasons(s, hopper, "decode")
    ]
    return [step for spec in specs for step in attention_steps(spec, device)] + list(indexer_steps(device))


def repeat(run: Callable[[int], torch.Tensor], seconds: float) -> tuple[int, int]:
    """Run a step for so long, at least AT_ONCE times: how many times, and how many had other bits than the first."""
    first = run(0).clone().view(torch.uint8)
    runs, other = 0, torch.zeros((), dtype=torch.int64, device=first.device)
    until = time.monotonic() + seconds
    while True:
        results = [run(i) for i in range(AT_ONCE)]
        for result in results:
            other += (result.view(torch.uint8) != first).any()
        runs, found = runs + AT_ONCE, int(other)  # waits
        if time.monotonic() > until:
            return runs, found


def alone(seconds: float, turn: int, only: str) -> int:
    """Repeat every step whose label has `only` in it, from step number `turn` on; print a JSON line of each.

    Returns how many had other bits at some time.
    """
    every = [step for step in steps(torch.device("cuda")) if only in step[0]]
    turn %= len(every)
    print(json.dumps({"steps": len(every)}), flush=True)
    sys.stdin.readline()  # until all processes are here
    bad = 0
    for label, run in every[turn:] + every[:turn]:
        runs, other = repeat(run, seconds / len(every))
        bad += other > 0
        print(json.dumps({"label": label, "runs": runs, "other": other}), flush=True)
    return bad


def shared(processes: int, seconds: float, only: str = "") -> tuple[int, list[str]]:
    """`alone` in so many processes at once: how many runs there were, and a line for each step that went wrong."""
    command = [sys.executable, "-m", "octavo.testing.sharing", "--alone", "--seconds", str(seconds), "--only", only]
    running = []
    for i in range(processes):
        turn = ["--turn", str(7 * i)]
        running.append(subprocess.Popen([*command, *turn], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    try:
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()  # its steps are made
        for process in running:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # how it ended is seen below
                process.stdin.write("\n")
                process.stdin.flush()
        written = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            process.kill()
    wrong = [f"a process ended with {p.returncode}" for p in running if p.returncode not in (0, 1)]
    found = [json.loads(line) for text in written for line in text.splitlines()]
    wrong += [f"{step['other']} of {step['runs']} runs: {step['label']}" for step in found if step["other"]]
    return sum(step["runs"] for step in found), wrong


def main() -> None:
    """Run all processes, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60, help="that all steps of a process take together")
    parser.add_argument("--only", default="", help="part of the labels of steps to run")
    parser.add_argument("--alone", action="store_true", help="be one of the processes; waits for a line on stdin")
    parser.add_argument("--turn", type=int, default=0, help="the step that a process begins with")
    arguments = parser.parse_args()
    if arguments.alone:
        sys.exit(bool(alone(arguments.seconds, arguments.turn, arguments.only)))
    total, wrong = shared(arguments.processes, arguments.seconds, arguments.only)
    print(f"{total:,} runs by {arguments.processes} processes, {len(wrong)} steps wrong")
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
