"""Fuzz on a GPU: 10,000 examples over every backend in one process, then metadata of any value between canaries.

Specs are those of `fuzz.GPU_SPECS`, so that few kernels are compiled. Each example's cache is held to the reference's,
bit for bit, and each result to `bounds`, computed on the CPU. Run the second half under compute-sanitizer too.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import hostile_cases
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from octavo import Attention, Unsupported, choose
from octavo.backends import BY_NAME, WRITTEN
from octavo.device import Device
from octavo.formats import TORCH_DTYPES
from octavo.testing import fuzz, fuzz_kernels, fuzz_workers
from octavo.testing.fuzz_device import Runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]

HOPPER = Device.named("h200")
EXAMPLES, SECONDS, COMPILING = 10_000, 150, 120
HOSTILE, HOSTILE_PARTS = 400, 8
INDEXER_SHAPES = ((64, 128, 64, 1), (32, 128, 64, 2), (16, 64, 32, 3), (128, 128, 128, 4))
BACKENDS = [name for name in BY_NAME if name != "reference"]
COMMON = {"deadline": None, "print_blob": True, "database": None, "suppress_health_check": list(HealthCheck)}
SPECS = st.sampled_from(fuzz.GPU_SPECS)
SPECS_OF = {
    "triton": SPECS,
    "gluon": st.sampled_from([spec for spec in fuzz.GPU_SPECS if not BY_NAME["gluon"].reasons(spec, HOPPER, "decode")]),
}
RUNNER = Runner("cuda")  # for all examples of this process
say = partial(print, flush=True)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(-1).view(torch.uint8)


def test_attention():
    """One process runs what many make up and judge; its kernels are compiled before, many at once."""
    compiled = fuzz_kernels.compile_all(seconds=COMPILING)
    say(f"{compiled.compiled} kernels compiled, {compiled.cached} found in the cache, in {compiled.seconds:.0f} s")
    plan = fuzz_workers.Fuzz(EXAMPLES, seconds=SECONDS)
    outcome = fuzz_workers.run(plan, say)
    progress, failures = outcome.progress, compiled.failures + outcome.failures
    each = 1000 * progress.busy / max(1, progress.ran)
    say(f"{outcome.examples:,} of {EXAMPLES:,} examples right, in {outcome.seconds:.0f} s by {plan.workers} workers")
    names = dict(collections.Counter(progress.compiled))
    say(f"the device's process: {each:.1f} ms an example, {len(progress.compiled)} kernels compiled {names}")
    for (prefill, decode), count in sorted(outcome.counts.items()):
        say(f"prefill by {prefill}, decode by {decode}: {count:,}")
    assert [failure[:200] for failure in failures] == []
    assert outcome.examples == EXAMPLES, f"only {outcome.examples} examples in {SECONDS} s"


@seed(EXAMPLES)
@settings(max_examples=20, **COMMON)
@given(fuzz_workers.Fuzz().strategy)
def test_attention_in_this_process(example):
    """Where the line goes, above the others, that repeats an example which failed in a worker."""
    fuzz_workers.judge(example, fuzz_workers.alone(RUNNER))


def hostile(part: int, strategy: st.SearchStrategy[Any], run: Callable[[Any], None]) -> None:
    """Some examples of `strategy`; a wild write shows in the canaries, a wild read where no memory is."""

    @seed(part)
    @settings(max_examples=HOSTILE // HOSTILE_PARTS, **COMMON)
    @given(strategy)
    def check(case: Any) -> None:
        run(case)
        torch.cuda.synchronize()

    check()


@pytest.mark.parametrize("part", range(HOSTILE_PARTS))
def test_append_stays_in_its_memory(part):
    hostile(part, hostile_cases.append_calls(SPECS), lambda case: hostile_cases.run_append(case, "cuda"))


@pytest.mark.parametrize("part", range(HOSTILE_PARTS))
@pytest.mark.parametrize("backend", [name for name in BACKENDS if "mqa_logits" in WRITTEN[name]])
def test_the_indexer_stays_in_its_memory(backend, part):
    strategy = hostile_cases.indexer_calls(INDEXER_SHAPES)
    hostile(part, strategy, lambda case: hostile_cases.run_indexer(case, "cuda", backend))


@pytest.mark.parametrize("part", range(HOSTILE_PARTS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_stays_in_its_memory(backend, part):
    def run(case: dict[str, Any]) -> None:
        with contextlib.suppress(Unsupported):
            run_hostile(case, backend)

    hostile(part, hostile_cases.attention_calls(SPECS_OF[backend], least=2), run)


def run_hostile(case: dict[str, Any], backend: str) -> None:
    """Plan and run a case of `hostile_cases`, as an engine does, between canaries; the cache stays as it was."""
    spec, rows, batch = case["spec"], case["rows"], len(case["seq_lens"])
    fenced = hostile_cases.Fenced("cuda")
    table = torch.tensor(case["page_table"] or [[]], dtype=torch.int32)[:batch]
    bounds_of = {
        "max_batch": max(1, batch),
        "max_query_tokens": rows,
        "max_context": max(1, table.shape[1]) * spec.page_size,
    }
    size = choose(spec, "cuda", backend).workspace_bytes(**bounds_of)
    workspace = fenced(torch.full((size,), 0xFF, dtype=torch.uint8))
    attention = Attention(spec, **bounds_of, device="cuda", workspace=workspace, backend=backend)
    cache = hostile_cases.fenced_cache(spec, case["pages"], case["seed"], fenced)
    before = [as_bytes(pool) for pool in (cache.k, cache.v)]
    lens, starts = (fenced(torch.tensor(case[name], dtype=torch.int32)) for name in ("seq_lens", "query_starts"))
    plan = {name: case[name] for name in ("num_decodes", "max_query_len")}
    attention.plan(lens, fenced(table), starts, **plan)
    q = fenced(hostile_cases.random_bytes((rows, spec.num_q_heads, spec.head_dim), TORCH_DTYPES[spec.query_dtype], 2))
    out = fenced(torch.zeros(rows, spec.num_q_heads, spec.value_dim).to(TORCH_DTYPES[spec.out_dtype]))
    given_to_run = {
        "q_scale": fenced(torch.tensor(0.5)) if spec.query_dtype == "fp8_e4m3" else None,
        "out_scale": fenced(torch.tensor(0.5)) if spec.out_dtype == "fp8_e4m3" else None,
        "sinks": fenced(torch.zeros(spec.num_q_heads)) if spec.sinks else None,
        "lse": fenced(torch.zeros(rows, spec.num_q_heads)) if spec.lse else None,
    }
    attention.run(q, cache, out=out, **given_to_run)
    fenced.check()
    assert all(torch.equal(as_bytes(pool), was) for pool, was in zip((cache.k, cache.v), before, strict=True))
