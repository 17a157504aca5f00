"""Fuzz on a GPU: 10,000 examples over every backend, then metadata of any value between canaries.

Specs are those of `fuzz.GPU_SPECS`, so that few kernels are compiled. Each example's cache is held to the reference's,
bit for bit, and each result to `bounds`, computed on the CPU. Run the second half under compute-sanitizer too.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable
from typing import Any

import hostile_cases
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from octavo import Attention, AttentionSpec, Unsupported, choose
from octavo.backends import BY_NAME, WRITTEN
from octavo.cache import PagedCache
from octavo.device import Device
from octavo.formats import TORCH_DTYPES
from octavo.testing import bounds, fuzz

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]

HOPPER = Device.named("h200")
EXAMPLES, PARTS = 10_000, 8
SECONDS = 480  # of a part, of which the first examples compile what the others run
HOSTILE, HOSTILE_PARTS = 400, 8
INDEXER_SHAPES = ((64, 128, 64, 1), (32, 128, 64, 2), (16, 64, 32, 3), (128, 128, 128, 4))
BACKENDS = [name for name in BY_NAME if name != "reference"]
COMMON = {"deadline": None, "print_blob": True, "database": None, "suppress_health_check": list(HealthCheck)}
SPECS = st.sampled_from(fuzz.GPU_SPECS)
SPECS_OF = {
    "triton": SPECS,
    "gluon": st.sampled_from([spec for spec in fuzz.GPU_SPECS if not BY_NAME["gluon"].reasons(spec, HOPPER, "decode")]),
}
Kept = dict[tuple[AttentionSpec, str], Attention]
KEPT: Kept = {}  # one Attention for each spec and backend of this process, whose workspace holds what was there before


def attentions(spec: AttentionSpec) -> list[Attention]:
    """An Attention of every backend that may run both phases, and of what is chosen where that is another pair."""
    found: dict[tuple[str, str], Attention] = {}
    for name in [*BACKENDS, "auto"]:
        try:
            choice = choose(spec, "cuda", None if name == "auto" else name)
        except Unsupported:
            continue
        if (spec, name) not in KEPT:
            most = {"max_batch": 8, "max_query_tokens": 1024, "max_context": 2048}
            KEPT[spec, name] = Attention(spec, **most, device="cuda", backend=None if name == "auto" else name)
            KEPT[spec, name].workspace.fill_(0xFF)
        found.setdefault((choice.prefill.backend, choice.decode.backend), KEPT[spec, name])
    return list(found.values())


def cache_faults(there: PagedCache, here: PagedCache) -> list[str]:
    """Where what the GPU appended is not, bit for bit, what the reference did."""
    pairs = {name: (getattr(there, name), getattr(here, name)) for name in ("k", "v", "k_scale", "v_scale")}
    return [name for name, (a, b) in pairs.items() if a is not None and not torch.equal(as_bytes(a), as_bytes(b))]


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("part", range(PARTS))
def test_attention(part):
    """In one process the parts run one after the other over the same workspaces; `pytest -n` runs them side by side."""
    device, counts = Device.detect("cuda"), collections.Counter()
    started = time.perf_counter()

    @seed(part)
    @settings(max_examples=EXAMPLES // PARTS, **COMMON)
    @given(fuzz.examples(SPECS, most_tokens=600, most_rows=150))
    def check(example: fuzz.Example) -> None:
        if time.perf_counter() - started > SECONDS:
            return
        there, here, told = example.batch("cuda", 16), example.batch("cpu", 16), example.plan["num_decodes"]
        if example.shared:  # several sequences wrote to the same slots: whose bytes stay is not said
            for name in ("k", "v", "k_scale", "v_scale"):
                if (to := getattr(here.cache, name)) is not None:
                    to.copy_(getattr(there.cache, name))
        assert cache_faults(there.cache, here.cache) == []
        for attention in attentions(example.spec):
            out = there.run(attention=attention, **example.plan)
            here.lse = None if there.lse is None else there.lse.cpu()
            of = attention.choice.prefill.backend, attention.choice.decode.backend
            assert bounds.faults(here, out.cpu(), of, device, told) == [], of
            counts[of] += 1
        counts["examples"] += 1

    check()
    print(part, dict(counts), f"{time.perf_counter() - started:.0f} s")
    assert counts["examples"] >= EXAMPLES // PARTS, f"only {counts['examples']} examples in {SECONDS} s"


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
