"""Sides of a comparison: the same inputs in every layout, and peers that are right, wrong, refuse or are not there."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch

from octavo import AttentionSpec, Unsupported
from octavo.bench import cases, measure
from octavo.bench.peers import PEERS, Peer
from octavo.bench.sides import AttentionInputs, Side

SPEC = AttentionSpec(8, 2, 64)
CASES = [
    cases.decode(SPEC, 3, 100),
    cases.decode(replace(SPEC, max_query_len=3), 2, 70),
    cases.decode(SPEC, 3, 100).with_append(),
    cases.prefill(SPEC, 2, 40, 90),
]


def dense_attention(case, inputs, append: bool) -> Side:
    """A peer: pages of 32 in hnd, gathered and multiplied by torch in fp32."""
    size = 32

    def stream(x):
        return x.unflatten(0, (-1, size)).transpose(1, 2).contiguous()

    (k_pool, v_pool), tables = inputs.paged(size, stream(inputs.k), stream(inputs.v))
    spec, starts = case.spec, inputs.query_starts.tolist()
    out = torch.empty(starts[-1], spec.num_q_heads, spec.head_dim, dtype=torch.bfloat16)

    def run(index: int) -> None:
        table, q = tables[index], inputs.queries[index].float()
        if append:
            slots = inputs.slots(table, size)
            for pool, new in zip((k_pool, v_pool), inputs.new[index], strict=True):
                pool[slots // size, :, slots % size] = new.to(torch.float8_e4m3fn).view(torch.uint8)
        for b, length in enumerate(case.seq_lens):
            rows = slice(starts[b], starts[b + 1])
            n = starts[b + 1] - starts[b]
            k, v = (
                pool[table[b].long()].transpose(1, 2).flatten(0, 1)[:length].view(torch.float8_e4m3fn).float()
                for pool in (k_pool, v_pool)
            )
            k, v = (x.repeat_interleave(spec.group_size, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[rows], k) * spec.scale
            seen = torch.arange(length) <= torch.arange(length - n, length)[:, None]
            p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            result = torch.einsum("hqk,khd->qhd", p, v)
            if index == 0:
                out[rows] = result.bfloat16()

    calls = [lambda i=i: run(i) for i in range(inputs.sets)]
    return Side(calls, out, lambda: inputs.errors(out), {"layout": "hnd", "page_size": size})


@pytest.fixture
def peers(monkeypatch):
    """Peers in a module of their own: right, forgetful (never appends), refuses, absent."""
    module = types.ModuleType("peers_of_this_test")
    module.right = lambda case, inputs: dense_attention(case, inputs, case.appends)
    module.forgetful = lambda case, inputs: dense_attention(case, inputs, False)

    def refuses(case, inputs):
        raise ValueError("no heads like these")

    module.refuses = refuses
    monkeypatch.setitem(sys.modules, module.__name__, module)
    ops = ("decode", "verify", "prefill")
    for name in ("right", "forgetful", "refuses"):
        monkeypatch.setitem(PEERS, name, Peer(name, ops, "torch", f"{module.__name__}:{name}"))
    monkeypatch.setitem(PEERS, "absent", Peer("absent", ops, "no_such_package_here", "no:where"))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_side_computes_over_the_same_inputs(peers, case):
    inputs = AttentionInputs(case, "cpu")
    records = list(measure.compare(case, ["reference", "right"], "cpu", inputs=inputs, run="r", seconds=0.0))
    for changes in ({"layout": "nhd", "page_size": 16}, {"layout": "hnd", "page_size": 128}, {"page_size": 32}):
        other = replace(case, spec=replace(case.spec, **changes))
        records.append(measure.measure(other, "reference", "cpu", inputs=inputs, run="r", seconds=0.0))
    assert [r.error for r in records] == [None] * 5
    assert all(r.rel_err < 2 * r.rel_err_bf16 and r.us > 0 for r in records)
    assert {r.rel_err_bf16 for r in records} == {records[0].rel_err_bf16}
    assert (records[1].backend, records[1].spec["layout"], records[1].spec["page_size"]) == ("right", "hnd", 32)
    assert records[0].spec["layout"] == "leaf" and records[0].case == records[1].case


@pytest.mark.parametrize("context", [64, 3000])
def test_a_side_that_does_not_append_is_wrong(peers, context):
    case = cases.decode(SPEC, 2, context)
    made = measure.measure(case.with_append(), "forgetful", "cpu", run="r")
    assert made.us is None and made.error.startswith("wrong: relative error")
    assert measure.measure(case, "forgetful", "cpu", run="r", seconds=0.0).error is None


def test_what_a_peer_refuses_is_a_record(peers):
    case = CASES[0]
    made = {r.backend: r for r in measure.compare(case, ["refuses", "absent", "flashinfer-fa3"], "cpu", run="r")}
    assert "ValueError: no heads like these" in made["refuses"].error
    assert "needs the package no_such_package_here, which is not installed" in made["absent"].error
    assert "measured for prefill; the case is decode" in made["flashinfer-fa3"].error
    assert all(r.us is None for r in made.values())


def test_an_appending_case_counts_both():
    case = cases.decode(SPEC, 3, 100)
    both = case.with_append()
    assert both.name == "append+" + case.name and both.op == "decode"
    assert both.work.bytes == case.work.bytes + cases.append(SPEC, 3, 1).work.bytes


def test_contents_repeat_but_memory_does_not(monkeypatch):
    monkeypatch.setattr("octavo.bench.sides._PERIODS", 3)
    inputs = AttentionInputs(cases.decode(SPEC, 4, 300), "cpu")
    assert inputs.period == 3 * 128 and inputs.stride == 384
    cache, tables = inputs.cache(SPEC)
    ids = torch.cat([table.flatten() for table in tables])
    assert len(ids.unique()) == len(ids) == cache.num_pages == 2 * 4 * 5
    k, _ = inputs.tokens(1)
    gathered, _ = cache.gather(tables[1][2], 300)
    assert torch.equal(k[2, :300].view(torch.float8_e4m3fn).float(), gathered)


def test_sdpa_is_measured_for_whole_prompts_only():
    made = measure.measure(cases.prefill(SPEC, 1, 16, 64), "sdpa-flash", "cpu", run="r")
    assert "whole prompts of one length" in made.error
    whole = measure.measure(cases.prefill(SPEC, 2, 48), "sdpa-flash", "cpu", run="r", seconds=0.0)
    assert whole.error is None and whole.rel_err < 2 * whole.rel_err_bf16
    assert (whole.spec["layout"], whole.spec["kv_dtype"]) == ("dense", "bfloat16")


def test_flashinfer_says_what_it_is_not_set_up_for():
    from octavo.bench.peers import flashinfer

    spec = replace(SPEC, window=64, sinks=True)
    case = cases.prefill(spec, 1, 64)
    with pytest.raises(Unsupported, match="measured with window None; it is 64") as refused:
        flashinfer.fa3(case, AttentionInputs(case, "cpu"))
    assert "measured with sinks False; it is True" in str(refused.value)
    case = cases.decode(replace(spec, kv_dtype="fp8_e5m2"), 1, 64)
    with pytest.raises(Unsupported, match="kv_dtype fp8_e4m3 or bfloat16; it is fp8_e5m2") as refused:
        flashinfer.fa2(case, AttentionInputs(case, "cpu"))
    assert "sinks" in str(refused.value) and "window" not in str(refused.value)


def test_a_window_counts_the_token_itself():
    from octavo.bench.peers import flashinfer

    assert flashinfer._window_left(cases.decode(SPEC, 1, 64)) == -1
    assert flashinfer._window_left(cases.decode(replace(SPEC, window=128), 1, 64)) == 127  # flashinfer leaves it out


def test_sinks_are_the_same_for_every_side_and_for_fp64():
    case = cases.decode(replace(SPEC, sinks=True), 3, 5)  # few tokens: a sink takes its share
    inputs = AttentionInputs(case, "cpu")
    made = measure.measure(case, "reference", "cpu", inputs=inputs, run="r", seconds=0.0)
    assert made.error is None and made.rel_err < 1.1 * made.rel_err_bf16
    inputs.sinks = inputs.sinks + 3.0  # what the sampled rows were computed with is not what a side now gets
    assert measure.measure(case, "reference", "cpu", inputs=inputs, run="r").error.startswith("wrong")


def test_sides_of_one_layout_share_a_pool_unless_they_write_to_it():
    case = cases.decode(SPEC, 3, 100)
    inputs = AttentionInputs(case, "cpu")
    first, _ = inputs.cache(SPEC)
    assert inputs.cache(SPEC)[0] is first
    inputs.cache(replace(SPEC, layout="nhd"))
    assert inputs.cache(SPEC)[0] is not first, "one layout's pool is held at a time"
    held = inputs.cache(SPEC)[0]
    inputs.paged(32, inputs.k.unflatten(0, (-1, 32)))
    assert inputs.cache(SPEC)[0] is not held
    appending = AttentionInputs(case.with_append(), "cpu")
    assert appending.cache(SPEC)[0] is not appending.cache(SPEC)[0]
