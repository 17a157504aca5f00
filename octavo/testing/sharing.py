"""Several processes on one GPU, which run the same steps over and over: every result has the first one's bits.

    python -m octavo.testing.sharing --processes 4 --seconds 60

The driver gives each process the GPU in turn and stops kernels in the middle of it. That changes nothing as long as
they keep the rules of PTX; nor does it matter how slow the others make one. Results are compared bit for bit, after
40 runs back to back, as layers follow each other. Values are other tests' business.
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
from typing import Any

import torch

from ..attention import Attention
from ..device import Device
from ..formats import TORCH_DTYPES
from ..indexer import mqa_logits, paged_mqa_logits, topk_indices
from ..indexer_backends import INDEXER_BY_NAME
from ..spec import AttentionSpec
from . import indexer_support, sanitize
from .inputs import Batch

AT_ONCE = 40
Runs = Callable[[], tuple[torch.Tensor, ...]]  # runs a step AT_ONCE times; its results, [AT_ONCE, ...] each
Step = tuple[str, Runs]  # with a label


def attend(
    attention: Attention, batch: Batch, outs: torch.Tensor, lses: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Runs into each of `outs` and `lses`, which are 0 before: rows of no sequence may stay as they were."""
    results = (outs,) if lses is None else (outs, lses)
    for result in results:
        result.zero_()
    for i in range(AT_ONCE):
        attention.run(batch.q, batch.cache, out=outs[i], lse=None if lses is None else lses[i], **batch.arguments)
    return results


def returned(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor]:
    """Runs of what returns its one result."""
    return (torch.stack([run() for _ in range(AT_ONCE)]),)


def attention_steps(spec: AttentionSpec, device: torch.device) -> Iterator[Step]:
    """The kinds of step of `sanitize.steps` on Hopper's kernels."""
    for number, example in enumerate(sanitize.steps(spec)):
        batch = sanitize.moved(example.batch("cpu"), device)
        backend = sanitize.named(spec, "gluon")
        attention = Attention(spec, max_batch=8, max_query_tokens=256, max_context=1024, device=device, backend=backend)
        attention.plan(batch.seq_lens, batch.page_table, batch.query_starts, **example.plan)
        shape = (AT_ONCE, batch.q.shape[0], spec.num_q_heads, spec.value_dim)
        outs = torch.empty(shape, dtype=TORCH_DTYPES[spec.out_dtype], device=device)
        lses = torch.empty(shape[:3], device=device) if spec.lse else None
        yield f"step {number} of {spec}", partial(attend, attention, batch, outs, lses)


def indexer_steps(device: torch.device) -> Iterator[Step]:
    """Logits of every spec of the indexer's on Hopper's kernels, paged and over a run of keys, and a top-k of it."""
    nothing = float("-inf")
    for spec in indexer_support.SPECS:
        given = indexer_support.Inputs.of(spec)
        cache = given.cache(spec, device, None)
        q, weights, lens, table = (
            t.to(device) for t in (given.queries, given.weights, given.seq_lens, given.page_table)
        )
        width = given.page_table.shape[1] * spec.page_size
        keys, scales, starts, ends = (t.to(device) for t in given.run_of_keys())
        paged = partial(paged_mqa_logits, q, cache, weights, lens, table, width, fill=nothing, backend="gluon")
        ragged = partial(
            mqa_logits, q.flatten(0, 1), keys, scales, weights, starts, ends, fill=nothing, backend="gluon"
        )
        for operation, run in (("paged_mqa_logits", paged), ("mqa_logits", ragged)):
            if not INDEXER_BY_NAME["gluon"].reasons(spec, Device.detect(device), operation):
                yield f"{operation} of {spec}", partial(returned, run)
        logits = torch.randn(len(ends), len(keys)).to(device)
        yield f"topk of {spec}", partial(returned, partial(topk_indices, logits, ends, spec.top_k))


def steps(device: torch.device) -> list[Step]:
    """All steps that Hopper's kernels have a say in."""
    attention = [step for spec in sanitize.specs_of("gluon") for step in attention_steps(spec, device)]
    return attention + list(indexer_steps(device))


def repeat(runs: Runs, seconds: float) -> tuple[int, int]:
    """Run a step for so long, at least AT_ONCE times: how many times, and how many had other bits than the first."""
    first = [results[0].clone().view(torch.uint8) for results in runs()]
    count = other = 0
    until = time.monotonic() + seconds
    while not count or time.monotonic() < until:
        differ = [(got.view(torch.uint8) != want).flatten(1).any(1) for got, want in zip(runs(), first, strict=True)]
        count, other = count + AT_ONCE, other + int(torch.stack(differ).any(0).sum())  # waits
    return count, other


def alone(seconds: float, turn: int, only: str) -> None:
    """Repeat every step whose label has `only` in it, from step number `turn` on; print a JSON line of each."""
    every = [step for step in steps(torch.device("cuda")) if only in step[0]]
    for _, run in every:
        run()  # compiled, if it was not
    _ready()
    sys.stdin.readline()  # until all processes are here
    turn %= len(every)
    for label, run in every[turn:] + every[:turn]:
        runs, other = repeat(run, seconds / len(every))
        print(json.dumps({"label": label, "runs": runs, "other": other}), flush=True)


def load() -> None:
    """Keep the GPU busy until the process is killed: one that always has something to run is given its turns."""
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    _ready()
    while True:
        for _ in range(50):
            torch.mm(x, x)
        torch.cuda.synchronize()


def _ready() -> None:
    torch.cuda.synchronize()
    print("{}", flush=True)


def shared(processes: int, seconds: float, only: str = "", loads: int = 2) -> tuple[int, list[str]]:
    """`alone` in so many processes at once, beside `loads` of `load`.

    Returns how many runs there were, and a line for each step that went wrong and each process that did not end well.
    """
    command = [sys.executable, "-m", "octavo.testing.sharing"]
    each = [*command, "--role", "steps", "--seconds", str(seconds), "--only", only, "--turn"]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running: list[Any] = [subprocess.Popen([*each, str(7 * i)], **pipes) for i in range(processes)]
    busy: list[Any] = [subprocess.Popen([*command, "--role", "load"], **pipes) for _ in range(loads)]
    try:
        ready = [bool(process.stdout.readline()) for process in (*busy, *running)]  # or it has ended
        for process in running:
            with contextlib.suppress(BrokenPipeError):  # how it ended is seen below
                process.stdin.write("\n")
                process.stdin.flush()
        written = [process.communicate()[0] for process in running]
        lasting = [began and one.poll() is None for began, one in zip(ready, busy, strict=False)]
        wrong = ["a load has ended"] * lasting.count(False)
    finally:
        for process in (*running, *busy):
            process.kill()
            process.wait()
    wrong += [f"a process ended with {process.returncode}" for process in running if process.returncode]
    found = [json.loads(line) for text in written for line in text.splitlines()]
    wrong += [f"{step['other']} of {step['runs']} runs: {step['label']}" for step in found if step["other"]]
    return sum(step["runs"] for step in found), wrong


def main() -> None:
    """Run all processes, or one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60, help="that all steps of a process take together")
    parser.add_argument("--only", default="", help="part of the labels of steps to run")
    parser.add_argument("--loads", type=int, default=2, help="processes that keep the GPU busy")
    parser.add_argument("--role", choices=("steps", "load"), help="be one of the processes")
    parser.add_argument("--turn", type=int, default=0, help="the step that a process begins with")
    arguments = parser.parse_args()
    if arguments.role == "steps":
        return alone(arguments.seconds, arguments.turn, arguments.only)
    if arguments.role == "load":
        load()
    total, wrong = shared(arguments.processes, arguments.seconds, arguments.only, arguments.loads)
    print(f"{total:,} runs by {arguments.processes} processes, {len(wrong)} steps wrong")
    print("\n".join(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
