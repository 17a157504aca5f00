"""Warm-up: the calls cover what serving calls, and `octavo warmup` says what it did."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from octavo import Attention, choose
from octavo.cli.main import app
from octavo.errors import InvalidInput
from octavo.spec import AttentionSpec
from octavo.warmup import sizes, warm, watched

SPEC = AttentionSpec(4, 2, 64)
SMALL = {"max_batch": 5, "max_query_tokens": 40, "max_context": 256}


def test_sizes_are_one_odd_ones_powers_and_the_most():
    assert sizes(1) == [1] and sizes(2) == [1, 2] and sizes(20) == [1, 2, 3, 4, 8, 16, 19, 20]


@pytest.mark.parametrize(
    ("changes", "caches"),
    [
        ({}, 2),
        ({"sinks": True, "lse": True, "max_query_len": 3, "window": 9}, 2),
        ({"kv_dtype": "bfloat16", "layout": "hnd"}, 1),
    ],
)
def test_every_kind_of_step_is_planned_and_run(monkeypatch, changes, caches):
    steps: list[tuple[Any, ...]] = []
    scales: list[bool] = []
    stock, stock_run = Attention.plan, Attention.run

    def plan(self, lens, table, starts, **known):
        steps.append((starts.diff().tolist(), known["num_decodes"], known["max_query_len"]))
        stock(self, lens, table, starts, **known)

    def run(self, q, cache, **given):
        scales.append(cache.k_scale is not None)
        return stock_run(self, q, cache, **given)

    monkeypatch.setattr(Attention, "plan", plan)
    monkeypatch.setattr(Attention, "run", run)
    spec = AttentionSpec(**{**SPEC.as_dict(), **changes})
    seen = []
    found = warm(choose(spec, "cpu"), "cpu", advance=lambda: seen.append(1), **SMALL)
    rows = spec.max_query_len
    assert found.calls == len(seen) == len(steps) + caches * len(sizes(40)) and found.compiled == found.cached == []
    assert scales == [scaled for scaled in (False, True)[:caches] for _ in range(len(steps) // caches)]
    for batch in (1, 2, 3, 4, 5):
        assert ([rows] * batch, batch, rows) in steps and ([rows] * batch, None, None) in steps
        assert ([1] * batch, batch, 1) in steps
    for tokens in (1, 3, 16, 32, 39, 40):
        assert ([tokens], 0, tokens) in steps
    assert ([rows, 40], 1, 40) in steps and ([rows, 40], None, None) in steps


def test_bounds_must_be_positive():
    with pytest.raises(InvalidInput, match="max_batch"):
        warm(choose(SPEC, "cpu"), "cpu", max_batch=0)
    with pytest.raises(InvalidInput, match="must hold one sequence's 9 rows of a decode step; came 4"):
        warm(choose(AttentionSpec(4, 2, 64, max_query_len=9), "cpu"), "cpu", max_query_tokens=4)


def test_what_triton_compiles_is_counted_and_the_listener_put_back():
    from triton import knobs

    heard: list[bool] = []
    knobs.compilation.listener = lambda **event: heard.append(event["cache_hit"])
    try:
        with watched() as found:
            for hit in (False, True, True):
                knobs.compilation.listener(
                    src=SimpleNamespace(), metadata={"name": "k"}, metadata_group={}, times=None, cache_hit=hit
                )
        assert (found.compiled, found.cached, heard) == (["k"], ["k", "k"], [False, True, True])
        with pytest.raises(KeyError), watched():
            raise KeyError
        knobs.compilation.listener(cache_hit=True)
        assert heard == [False, True, True, True]
    finally:
        knobs.compilation.listener = None


def warmup(*arguments: str) -> tuple[int, str, str]:
    small = ("--max-batch", "2", "--max-tokens", "4", "--max-context", "128", "--device", "cpu")
    result = CliRunner().invoke(app, ["warmup", *arguments, *small])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_command_warms_every_kind_of_layer():
    code, out, _ = warmup("gpt-oss-120b", "--tp", "8", "--kv-cache-dtype", "fp8", "--json")
    found = json.loads(out)
    assert code == 0 and [kind["kind"] for kind in found["kinds"]] == ["sliding_window", "full"]
    assert all(kind["backends"] == ["reference"] and kind["compiled"] == 0 < kind["calls"] for kind in found["kinds"])
    code, out, err = warmup("llama-3.1-8b", "--tp", "8")
    assert code == 0 and "reference: 0 kernels compiled" in out and "Warming full" in err


def test_an_indexer_is_warmed_too():
    code, out, err = warmup("deepseek-v3.2", "--tp", "8", "--json")
    assert code == 0, err
    latent, indexer = json.loads(out)["kinds"]
    # append of 1, 2, 3 and 4 tokens, steps of 1 and 2 sequences, runs of 1 to 4 rows
    assert indexer["kind"] == "indexer" and indexer["calls"] == 4 + 2 + 4 and indexer["backends"] == ["reference"]
    assert latent["calls"] > 0
    code, out, _ = warmup("deepseek-v3.2", "--tp", "8")
    assert "indexer, reference: 0 kernels compiled" in out
    assert warmup("deepseek-v3.2", "--tp", "8", "--backend", "reference")[0] == 0
    code, out, err = warmup("deepseek-v3.2", "--tp", "8", "--backend", "triton")
    assert code == 2 and not out and "cannot run" in err


def test_a_refused_plan_is_exit_code_2_with_its_reasons():
    code, out, err = warmup("llama-3.1-8b", "--backend", "gluon", "--kv-cache-dtype", "fp8")
    assert code == 2 and "needs Hopper (sm_90)" in err and out == ""


def test_bounds_that_hold_no_decode_are_exit_code_2():
    code, out, err = warmup("llama-3.1-8b", "--query-len", "9")
    assert code == 2 and "9 rows of a decode step; came 4" in err and out == "" and "does not run" not in err


def test_a_kernel_that_does_not_run_is_one_line_and_exit_code_1(monkeypatch):
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("PassManager::run failed\nand a long trace")

    monkeypatch.setattr(Attention, "run", broken)
    code, out, err = warmup("llama-3.1-8b", "--tp", "8")
    assert code == 1 and "does not run: RuntimeError: PassManager::run failed" in err and out == ""
    assert "trace" not in err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")
@pytest.mark.parametrize("changes", [{}, {"layout": "nhd", "kv_dtype": "bfloat16"}])
def test_after_a_warm_up_a_step_compiles_nothing(changes):
    from octavo.testing.inputs import make_batch

    spec = AttentionSpec(**{**AttentionSpec(32, 8, 128).as_dict(), **changes})
    warm(choose(spec, "cuda"), "cuda", max_batch=40, max_query_tokens=4096, max_context=8192)
    with watched() as found:
        for lens, rows in (([700] * 37, [1] * 37), ([3000], [3000]), ([90, 1500, 700], [1, 1500, 700])):
            batch = make_batch(spec, lens, rows, device="cuda")
            attn = Attention(spec, max_batch=41, max_query_tokens=4097, max_context=8192, device="cuda", backend=None)
            batch.run(attention=attn, num_decodes=sum(n == 1 for n in rows), max_query_len=max(rows))
            batch.run(attention=attn)
    assert found.compiled == []
