"""Every kernel under compute-sanitizer: memcheck, racecheck, initcheck and synccheck over a grid of its code paths.

    python -m octavo.testing.sanitize --out benchmarks/results/h200/sanitizers.txt
    python -m octavo.testing.sanitize --launch gluon        the launches alone, as each tool runs them

Inputs are made on the CPU and copied, so that nearly every kernel of the process is octavo's; workspaces and outputs
stay as cudaMalloc returns them, so that initcheck sees what is read before it is written. Results are compared as
anywhere else. Each group is launched once without a tool, by several processes, which compile its kernels; then each
tool runs each group in a process of its own, all at the same time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..attention import Attention, merge_states
from ..backends import BY_NAME
from ..bench import report
from ..cache import PagedCache
from ..device import Device
from ..errors import Unsupported
from ..formats import TORCH_DTYPES
from ..indexer import IndexerCache, mqa_logits, paged_mqa_logits, topk_indices
from ..reference.merge_states import merge_states as reference_merge
from ..spec import AttentionSpec
from . import bounds, fuzz, indexer_support, race_reports
from .compare import cache_differences, same_bytes
from .inputs import Batch, slots_of

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
ALONE = "no tool"
GROUPS = ("triton", "gluon", "indexer", "topk")
PARTS = 6  # of a group's launches without a tool
FOUND = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warn)")
TOPK = ((3, 700, 64), (2, 20000, 512), (40, 9000, 2048))  # held in registers, in slices, whole rows in turn
CPU, NOTHING = torch.device("cpu"), float("-inf")
MORE_OF_HOPPER = (
    AttentionSpec(16, 2, 128, max_query_len=8, lse=True),
    AttentionSpec(16, 2, 64, sinks=True, softcap=30.0, precision="exact"),
    AttentionSpec(4, 4, 192, head_dim_v=128),
    AttentionSpec(8, 1, 256, page_size=32, precision="exact", window=100),
    AttentionSpec(64, 2, 128, page_size=128, out_dtype="float32"),
    AttentionSpec(8, 2, 128, batch_invariant=True, page_size=32, max_query_len=2),
)


class Running(NamedTuple):
    """A tool, or none, over a group of launches."""

    tool: str
    group: str
    log: Path
    process: subprocess.Popen[bytes]


def steps(spec: AttentionSpec) -> Iterator[fuzz.Example]:
    """The kinds of step: decode (some of it cut), drafts, prompts, and both with padding and rows of no sequence."""
    common = {"q": fuzz.Values(), "k_scale": 0.37, "v_scale": 2.0, "heads": 1.7}
    most = spec.max_query_len
    yield fuzz.Example(spec, ((1, 1), (63, 1), (330, 1), (600, 1), (0, 0)), told="rows", **common)
    if most > 1:
        yield fuzz.Example(spec, ((most, most), (300, most), (64, 1)), told="decodes", **common)
    yield fuzz.Example(spec, (), ((70, 70), (200, 33), (3, 17)), told="rows", **common)
    decodes = ((5, 1), (400, 1), (70, 0))
    yield fuzz.Example(spec, decodes, ((90, 90), (300, 40)), before=2, after=5, shared=True, holes=True, **common)


def moved(batch: Batch, device: torch.device) -> Batch:
    """The batch on another device, by copies."""
    spec, memory = batch.spec, batch.cache.memory
    pools = [batch.cache.k, batch.cache.v]
    scales = {name: getattr(batch.cache, name) for name in ("k_scale", "v_scale")}
    if spec.layout == "leaf":  # K and V of a page lie together
        whole = memory.k_pool.to(device)
        pools = [
            whole.as_strided(p.shape, p.stride(), p.storage_offset() - memory.k_pool.storage_offset()) for p in pools
        ]
    else:
        pools = [p.to(device) for p in pools]
    made = {name: None if scale is None else torch.ones_like(scale).to(device) for name, scale in scales.items()}
    cache = PagedCache.view(spec, *pools, **made)
    for name, scale in scales.items():
        if scale is not None and (target := made[name]) is not None:
            target.copy_(scale)  # those of dead tokens are NaN, which no caller may give
    names = ("q", "seq_lens", "page_table", "query_starts")
    arguments = {name: t.to(device) for name, t in batch.arguments.items()}
    return replace(batch, cache=cache, arguments=arguments, **{name: getattr(batch, name).to(device) for name in names})


def attention_faults(example: fuzz.Example, backend: str, device: torch.device) -> list[str]:
    """What is wrong with one step on a backend, nothing of whose memory was written before."""
    here, spec, told = example.batch("cpu"), example.spec, example.plan["num_decodes"]
    there = moved(here, device)
    attention = Attention(
        spec, max_batch=8, max_query_tokens=256, max_context=1024, device=device, backend=named(spec, backend)
    )
    attention.plan(there.seq_lens, there.page_table, there.query_starts, **example.plan)
    rows = there.q.shape[0]
    shape = (rows, spec.num_q_heads, spec.value_dim)
    out = torch.empty(shape, dtype=TORCH_DTYPES[spec.out_dtype], device=device)
    lse = torch.empty(shape[:2], device=device) if spec.lse else None
    attention.run(there.q, there.cache, out=out, lse=lse, **there.arguments)
    here.lse = None if lse is None else lse.cpu()
    of = attention.choice.prefill.backend, attention.choice.decode.backend
    return bounds.faults(here, out.cpu(), of, Device.detect(device), told)


def named(spec: AttentionSpec, backend: str) -> str | None:
    """The backend by name; None, so that it is chosen for decode, where it has no prefill of such a spec."""
    hopper = Device.named("h200")
    return None if BY_NAME[backend].reasons(spec, hopper, "prefill") else backend


def append_faults(spec: AttentionSpec, device: torch.device) -> list[str]:
    """Where the bytes of an append on `device`, to slots some of which are none, are not the reference's."""
    example = fuzz.Example(spec, ((1, 1), (70, 1)), k_scale=0.37, v_scale=2.0, heads=1.7)
    batch = example.batch("cpu")
    slots = slots_of(batch.page_table, spec.page_size, batch.seq_lens.tolist())
    slots[::7] = -1
    caches = []
    for on in (CPU, device):
        cache = moved(replace(batch, cache=zeros_like(batch.cache)), on).cache
        cache.append(batch.k.to(on), batch.v.to(on), slots.to(on))
        caches.append(cache)
    return cache_differences(*caches)


def zeros_like(cache: PagedCache) -> PagedCache:
    """A cache of zeros with the scales of another; token_head ones are zeros too."""
    spec = cache.spec
    if not spec.fp8 or spec.scale_granularity == "token_head":
        return PagedCache.allocate(spec, cache.num_pages, "cpu")
    return PagedCache.allocate(spec, cache.num_pages, "cpu", cache.k_scale, cache.v_scale)


def merge_faults(device: torch.device) -> list[str]:
    """What is wrong with merge_states of parts, some of which saw nothing."""
    outs, lses = torch.randn(11, 5, 4, 80), torch.randn(11, 5, 4)
    lses[::3, 2] = float("-inf")
    got, want = merge_states(outs.to(device), lses.to(device)), reference_merge(outs, lses)
    return [f"merge_states: {i}" for i in (0, 1) if not torch.allclose(got[i].cpu(), want[i], rtol=1e-5, atol=1e-5)]


def indexer_faults(spec: Any, device: torch.device) -> Iterator[str]:
    """What is wrong with the indexer's operations of one spec, on every backend that may run them."""
    given = indexer_support.Inputs.of(spec)
    here = given.cache(spec, CPU, "reference")
    zeros = torch.zeros_like(here.pages).to(device)
    there = IndexerCache.view(zeros, spec.scale_format)
    there.append(given.keys.to(device), given.slots.to(device))
    if not same_bytes(there.pages, here.pages):
        yield "index_append: other bytes than the reference's"
    width = given.page_table.shape[1] * spec.page_size
    run_of_keys = given.run_of_keys()
    for backend in ("triton", "gluon"):
        results = []
        for on, cache, name in ((device, there, backend), (CPU, here, "reference")):
            q, weights, lens, table = (
                t.to(on) for t in (given.queries, given.weights, given.seq_lens, given.page_table)
            )
            run, scale, first, end = (t.to(on) for t in run_of_keys)
            try:
                one = paged_mqa_logits(q, cache, weights, lens, table, width, fill=NOTHING, backend=name)
                other = mqa_logits(q.flatten(0, 1), run, scale, weights, first, end, fill=NOTHING, backend=name)
            except Unsupported:
                break
            results.append([one.cpu(), other.cpu()])
        else:
            for operation, got, want in zip(("paged_mqa_logits", "mqa_logits"), *results, strict=True):
                if wrong := indexer_support.difference(got, want):
                    yield f"{backend} {operation}: {wrong}"


def topk_faults(rows: int, width: int, k: int, device: torch.device) -> list[str]:
    """What is wrong with the choice of the k largest of rows, one of which has many equal numbers."""
    logits = torch.randn(rows, width)
    logits[1, : width // 2] = 1.5
    lens = torch.full((rows,), width, dtype=torch.int32)
    lens[0] = width // 3
    got = topk_indices(logits.to(device), lens.to(device), k).cpu()
    return [] if torch.equal(got, topk_indices(logits, lens, k, backend="reference")) else ["other indices"]


def specs_of(group: str) -> list[AttentionSpec]:
    """The specs that are launched on a backend of attention: those that it takes on Hopper."""
    hopper = Device.named("h200")
    specs = (*fuzz.GPU_SPECS, *(MORE_OF_HOPPER if group == "gluon" else ()))
    return [spec for spec in specs if not BY_NAME[group].reasons(spec, hopper, "decode")]


def launches(group: str, device: torch.device) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Every launch of a group, as a label and what makes it."""
    if group == "indexer":
        for spec in indexer_support.SPECS:
            yield f"indexer {spec}", lambda spec=spec: list(indexer_faults(spec, device))
        return
    if group == "topk":
        for rows, width, k in TOPK:
            yield f"topk of {rows} x {width}", lambda shape=(rows, width, k): topk_faults(*shape, device)
        return
    for spec in specs_of(group):
        if group == "triton":
            yield f"append {spec}", lambda spec=spec: append_faults(spec, device)
        for example in steps(spec):
            yield f"{group} {example}", lambda example=example: attention_faults(example, group, device)
    if group == "triton":
        yield "merge_states", lambda: merge_faults(device)


def launch(group: str, device: torch.device, part: int = 0, parts: int = 1) -> int:
    """Make every launch of a group, or one of `parts` of them; print what is wrong and how many there were.

    Launches of a spec follow each other, so a part is a run of them. Returns how many are wrong.
    """
    count = wrong = 0
    every = list(launches(group, device))
    for label, made in every[part * len(every) // parts : (part + 1) * len(every) // parts]:
        try:
            found = made()
        except Exception as error:  # the next launch tells whether the device is lost
            found = [f"{type(error).__name__}: {error}"]
        count += 1
        if found:
            wrong += 1
            print(f"WRONG {label}: {found}"[:600], flush=True)
    print(f"{group}: {count} launches of steps, {wrong} wrong", flush=True)
    return wrong


def check(tools: list[str], groups: list[str], out: Path | None, seconds: float) -> int:
    """Run every group alone, then every tool over every group side by side; print a line for each as it ends.

    What is not done after `seconds` is stopped and said so. Returns how many have findings or did not finish.
    """
    deadline = time.monotonic() + seconds
    lines, bad = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for among in ([ALONE], tools):
            for (tool, group, log, _), took in ended(started_in(Path(folder), among, groups), deadline):
                text = log.read_text(errors="replace")
                found, told = finding(text, tool, group, took)
                bad += found
                lines.append(told)
                print(told, flush=True)
                if found or race_reports.REPORT in text:
                    lines += [f"  {line}" for line in text.splitlines()[: None if tool == "racecheck" else 80]]
    if out is not None:
        report.write(out, "\n".join(lines) + "\n")
    return bad


def finding(text: str, tool: str, group: str, took: float | None) -> tuple[bool, str]:
    """Whether a log shows anything but a clean end, and a line that says what it shows.

    Reports of racecheck that are of a known kind (`race_reports`) are counted apart.
    """
    known = race_reports.known(text)
    counted = [sum(int(number or 0) for number in numbers) - known for numbers in FOUND.findall(text)]
    ran = re.search(rf"^{group}: .* wrong$", text, re.M)
    clean = took is not None and not any(counted) and ran is not None and ", 0 wrong" in ran.group(0)
    clean = clean and (bool(counted) or tool == ALONE)
    told = "" if tool == ALONE else f"{counted[-1]} findings" if counted else "no summary"
    told += f", {known} of known kinds" if known else ""
    when = "stopped" if took is None else f"{took:.0f} s"
    return not clean, f"{tool:10} {told:14} {ran.group(0) if ran else group + ': not finished'}, {when}"


def ended(running: list[Running], deadline: float) -> Iterator[tuple[Running, float | None]]:
    """Each process as it ends, and after how many seconds. At the deadline the rest is stopped, seconds None."""
    started = time.monotonic()
    while running:
        over = time.monotonic() > deadline
        for one in list(running):
            took = None if one.process.poll() is None else time.monotonic() - started
            if took is None:
                if not over:
                    continue
                os.killpg(one.process.pid, signal.SIGKILL)  # a tool's target is a process of its own
                one.process.wait()
            running.remove(one)
            yield one, took
        time.sleep(0.1)


def started_in(folder: Path, tools: list[str], groups: list[str]) -> list[Running]:
    """Every tool over every group as a process whose log lies in `folder`; without a tool, a group in parts."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    running = []
    for tool, group in itertools.product(tools, groups):
        parts = PARTS if tool == ALONE else 1
        for part in range(parts):
            log = folder / f"{tool}-{group}-{part}.txt"
            command = [] if tool == ALONE else ["compute-sanitizer", "--tool", tool, "--print-limit", "1000"]
            command += [sys.executable, "-m", "octavo.testing.sanitize", "--launch", group]
            command += ["--part", str(part), "--parts", str(parts)]
            with log.open("w") as file:
                process = subprocess.Popen(
                    command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                )
            running.append(Running(tool, group, log, process))
    return running


def main() -> None:
    """Launch a group, or run tools over groups."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launch", choices=GROUPS, help="only make the launches of this group")
    parser.add_argument("--part", type=int, default=0, help="of the group's launches, from 0")
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--seconds", type=float, default=600, help="for all of them together")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.launch:
        wrong = launch(arguments.launch, torch.device(arguments.device), arguments.part, arguments.parts)
        sys.exit(bool(wrong))
    sys.exit(bool(check(arguments.tools.split(","), arguments.groups.split(","), arguments.out, arguments.seconds)))


if __name__ == "__main__":
    main()
