"""Fuzz on a GPU: 10,000 examples over every backend in one process, then metadata of any value between canaries.

Specs are those of `fuzz.GPU_SPECS`, so that few kernels are compiled. Run the second half under compute-sanitizer too.
"""

from __future__ import annotations

import collections
import contextlib
import time
from typing import Any

import hostile_cases
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo import Attention, AttentionSpec, Unsupported, choose
from octavo.backends import BY_NAME
from octavo.device import Device
from octavo.formats import TORCH_DTYPES
from octavo.testing import bounds, fuzz

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]

EXAMPLES, SECONDS = 10_000, 420
HOSTILE = 400
BACKENDS = [name for name in BY_NAME if name != "reference"]
COMMON = {"deadline": None, "print_blob": True, "database": None, "suppress_health_check": list(HealthCheck)}
SPECS = st.sampled_from(fuzz.GPU_SPECS)


def backends_of(spec: AttentionSpec) -> list[str | None]:
    """The backends that may run both phases, then what is chosen where none is named."""
    found: list[str | None] = []
    for name in [*BACKENDS, None]:
        try:
            choose(spec, "cuda", name)
        except Unsupported:
            continue
        found.append(name)
    return found


def test_attention():
    """One Attention for each spec and backend, whose workspace holds what the example before left."""
    device, kept, counts = Device.detect("cuda"), {}, collections.Counter()
    started = time.perf_counter()

    @settings(max_examples=EXAMPLES, derandomize=True, **COMMON)
    @given(fuzz.examples(SPECS, most_tokens=600, most_rows=150))
    def check(example: fuzz.Example) -> None:
        if time.perf_counter() - started > SECONDS:
            return
        batch, spec, told = example.batch("cuda"), example.spec, example.plan["num_decodes"]
        for name in backends_of(spec):
            if (spec, name) not in kept:
                most = {"max_batch": 8, "max_query_tokens": 1024, "max_context": 2048}
                kept[spec, name] = Attention(spec, **most, device="cuda", backend=name)
                kept[spec, name].workspace.fill_(0xFF)
            attention = kept[spec, name]
            out = batch.run(attention=attention, **example.plan)
            of = attention.choice.prefill.backend, attention.choice.decode.backend
            assert bounds.faults(batch, out, of, device, told) == [], of
            counts[of] += 1
        counts["examples"] += 1

    check()
    print(dict(counts), f"{time.perf_counter() - started:.0f} s")
    assert counts["examples"] >= EXAMPLES, f"only {counts['examples']} examples in {SECONDS} s"


@pytest.mark.parametrize("name", [name for name in hostile_cases.CASES if name in ("append", "indexer")])
def test_kernels_stay_in_their_memory(name):
    strategy, run = hostile_cases.CASES[name]

    @settings(max_examples=HOSTILE // 8, derandomize=True, **COMMON)
    @given(strategy())
    def check(case: Any) -> None:
        run(case, "cuda")
        torch.cuda.synchronize()

    check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_stays_in_its_memory(backend):
    @settings(max_examples=HOSTILE, derandomize=True, **COMMON)
    @given(hostile_cases.attention_calls(SPECS))
    def check(case: dict[str, Any]) -> None:
        with contextlib.suppress(Unsupported):
            run_hostile(case, backend)
        torch.cuda.synchronize()

    check()


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
    before = cache.memory.k_pool.clone()
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
    assert torch.equal(cache.memory.k_pool, before)
