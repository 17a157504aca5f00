"""Triton's attention on a GPU: the whole grid at real sizes, the named cases, graphs and torch.compile."""

from __future__ import annotations

import math
from dataclasses import replace

import attention_cases as grid
import pytest
import torch

from octavo import ops
from octavo.cache import PagedCache
from octavo.reference.merge_states import merge_states as reference_merge
from octavo.spec import AttentionSpec
from octavo.testing import cases, compare
from octavo.testing.graphs import Captured
from octavo.testing.inputs import make_batch, slots_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]

SPEC = AttentionSpec(8, 2, 128)


@pytest.fixture(autouse=True)
def default_device():
    """`octavo.testing.cases` makes its tensors on torch's default device."""
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.mark.parametrize("cell", grid.grid(heads=2, wide_pairs=True), ids=str)
def test_grid(cell):
    batch = cell.batch("cuda", scale=7, rows=9)
    out = grid.run(batch)
    assert grid.faults(cell, batch, out) == []
    assert torch.equal(grid.run(batch).view(torch.uint8), out.view(torch.uint8))


@pytest.mark.parametrize("layout", ["leaf", "nhd", "hnd"])
@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_z2_scales_are_used_once(layout, rows, kv_dtype):
    batch, right = cases.scale_probe(replace(SPEC, layout=layout, kv_dtype=kv_dtype), rows, "cuda")
    for plan in ({}, {"num_decodes": 0}):
        assert grid.run(batch, **plan)[-1].float().sub(right).abs().max() < 2e-3


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_z3_a_16_bit_cache_has_no_scales(kv_dtype):
    batch, right = cases.scale_probe(replace(SPEC, kv_dtype=kv_dtype, layout="nhd"), device="cuda")
    assert right == 1.0 and bool((grid.run(batch) == 1.0).all())


@pytest.mark.parametrize("length", [1, 13, 63, 64, 65, 4097])
@pytest.mark.parametrize(("layout", "page_size"), [("leaf", 32), ("leaf", 64), ("nhd", 4), ("nhd", 64), ("hnd", 16)])
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2", "float16"])
def test_z6_garbage_outside_live_tokens(length, layout, page_size, kv_dtype):
    if layout == "leaf" and kv_dtype == "float16":
        layout = "nhd"  # leaf holds FP8 only
    spec = replace(SPEC, layout=layout, page_size=page_size, kv_dtype=kv_dtype, lse=True)
    batch = make_batch(spec, [length, 2 * length], [1, min(length, 70)], device="cuda")
    nan, zero = cases.poisoned(batch)
    a, b = grid.run(nan), grid.run(zero)
    assert torch.equal(a, b) and bool(a.isfinite().all()) and torch.equal(nan.lse, zero.lse)
    assert torch.equal(a, grid.run(batch))


@pytest.mark.parametrize("granularity", ["tensor", "token_head"])
@pytest.mark.parametrize(("layout", "page_size"), [("leaf", 64), ("nhd", 16)])
@pytest.mark.parametrize("max_query_len", [1, 4])
def test_z6_a_window_never_touches_what_lies_before_it(granularity, layout, page_size, max_query_len):
    spec = replace(
        SPEC, layout=layout, page_size=page_size, window=100, scale_granularity=granularity, max_query_len=max_query_len
    )
    batch = make_batch(spec, [1000], [4], device="cuda")
    before = grid.run(batch)
    for poisoned in cases.poisoned(batch, [(0, t) for t in range(1000 - 4 - 99, 1000)]):
        poisoned.page_table[0, 0] = -1  # the page was freed
        assert torch.equal(grid.run(poisoned), before)


@pytest.mark.parametrize("pad_length", [0, 1])
@pytest.mark.parametrize("changes", [{}, {"layout": "nhd", "page_size": 16, "sinks": True}])
def test_z7_a_graph_captured_short_and_replayed_long_with_padded_rows(pad_length, changes):
    spec = replace(SPEC, lse=True, **changes)
    live = make_batch(spec, [1, 40, 64, 65, 9000], [1] * 5, device="cuda")
    expected = grid.run(live)
    table = torch.zeros(8, live.page_table.shape[1], dtype=torch.int32)
    padded = replace(
        live,
        q=torch.randn(8, 8, 128).to(torch.bfloat16),
        seq_lens=torch.ones(8, dtype=torch.int32),
        page_table=table,
        query_starts=torch.arange(9, dtype=torch.int32),
    )
    call = grid.call_of(padded, num_decodes=8, max_query_len=1)
    decode = ops.kernel("triton", "decode")
    captured = Captured(lambda: decode(call), torch.device("cuda"))
    padded.seq_lens[:5], padded.seq_lens[5:] = live.seq_lens, pad_length
    table[:5] = live.page_table
    table[5:] = torch.tensor([-1, 2**31 - 1, live.cache.num_pages], dtype=torch.int32)[:, None]
    padded.q[:5] = live.q
    call.workspace.fill_(0xFF)
    captured.replay()
    assert torch.equal(call.out[:5], expected) and torch.equal(call.lse[:5], live.lse)
    assert not call.out[5:].any() and bool((call.lse[5:] == -math.inf).all())


def test_a_graph_of_a_mixed_batch_is_replayed_with_another():
    short = make_batch(replace(SPEC, lse=True), [1, 1, 40, 1], [1, 1, 30, 8], device="cuda")
    long = make_batch(replace(SPEC, lse=True), [700, 3000, 5000, 60], [1, 4, 3, 32], device="cuda", seed=1)
    step = replace(long, seq_lens=short.seq_lens.clone(), query_starts=short.query_starts.clone(), q=long.q.clone())
    call = grid.call_of(step)
    prefill, decode = ops.kernel("triton", "prefill"), ops.kernel("triton", "decode")

    def both():
        prefill(call)
        decode(call)

    captured = Captured(both, torch.device("cuda"))
    step.seq_lens.copy_(long.seq_lens)
    step.query_starts.copy_(long.query_starts)
    captured.replay()
    assert torch.equal(call.out, grid.run(long)) and torch.equal(call.lse, long.lse)


def test_z9_pages_far_apart_in_the_pool():
    spec = AttentionSpec(4, 2, 128)
    stride, far = 1_039_680, 2066
    memory = torch.empty((far + 14) * stride, dtype=torch.uint8)  # 2.15 GiB
    assert memory.numel() > 2**31
    k = memory.as_strided((far + 14, 2, 64, 128), (stride, 64 * 256, 128, 1))
    v = memory.as_strided((far + 14, 2, 128, 64), (stride, 64 * 256, 64, 1), 64 * 128)
    cache = PagedCache.view(spec, k, v, 1 / 16, 1 / 2)
    for rows in (1, 100):
        batch, outs = make_batch(spec, [14 * 64], [rows], device="cuda"), []
        for start in (far, 0):
            batch.page_table = torch.arange(start, start + 14, dtype=torch.int32)[None]
            cache.append(batch.k.cuda(), batch.v.cuda(), slots_of(batch.page_table, 64, [14 * 64]))
            batch.cache = cache
            outs.append(grid.run(batch))
        assert torch.equal(outs[0], outs[1]) and bool(outs[0].isfinite().all())


@pytest.mark.parametrize("sink", [-math.inf, 0.0, math.log(3.0)])
@pytest.mark.parametrize("layout", ["leaf", "nhd"])
def test_z11_sinks_in_closed_form(sink, layout):
    batch, right = cases.sink_probe(replace(SPEC, layout=layout, out_dtype="float32"), sink, device="cuda")
    for plan in ({}, {"num_decodes": 0}):
        assert grid.run(batch, **plan).sub(right).abs().max() < 1e-6


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_z11_windows_and_several_query_rows(rows):
    spec = AttentionSpec(4, 2, 256, window=1024, sinks=True, softcap=50.0, max_query_len=8)
    for seed in range(20):
        batch = make_batch(spec, [1023 + seed % 18], [rows], seed=seed, k_scale=1 / 16, v_scale=1 / 2, device="cuda")
        assert compare.errors(batch, grid.run(batch)).within(1.1)


@pytest.mark.parametrize("tail_weight", [1.0, 1.0625, 1.1875])
@pytest.mark.parametrize("where", [0, 65_536, 131_071])
@pytest.mark.parametrize(
    ("precision", "rows", "error"), [("exact", 1, 2.0**-9), ("exact", 2, 2.0**-9), ("fast", 2, 0.01)]
)
def test_z16_a_sink_and_a_long_flat_tail(tail_weight, where, precision, rows, error):
    spec = AttentionSpec(2, 1, 64, out_dtype="float32", precision=precision)
    batch, right = cases.long_flat_tail(spec, 131_072, where, tail_weight, rows, "cuda")
    assert right == pytest.approx({1.0: 0.33333, 1.0625: 0.34694, 1.1875: 0.37255}[tail_weight], abs=1e-5)
    assert grid.run(batch)[-1].sub(right).abs().max() < right * error


@pytest.mark.parametrize("changes", [{}, {"layout": "nhd", "page_size": 16, "window": 2000}])
def test_batch_invariance(changes):
    spec = replace(SPEC, batch_invariant=True, lse=True, **changes)
    batch = make_batch(spec, [600, 9, 21000, 3000], [1, 1, 1, 300], device="cuda")
    out, lse = grid.run(batch), batch.lse
    for index, rows in ((0, slice(0, 1)), (2, slice(2, 3)), (3, slice(3, 303))):
        alone = grid.alone(batch, index, rows)
        assert torch.equal(grid.run(alone), out[rows]) and torch.equal(alone.lse, lse[rows])


@pytest.mark.parametrize("layout", ["leaf", "nhd"])
def test_append_and_run_trace_under_torch_compile(layout):
    """One graph that appends the last tokens of a decode and of a prefill and attends to them."""
    batch = make_batch(replace(SPEC, layout=layout), [700, 90], [1, 50], device="cuda")
    attention = batch.attention("triton")
    attention.plan(batch.seq_lens, batch.page_table, batch.query_starts)
    slots = slots_of(batch.page_table, SPEC.page_size, [700, 90])
    slots = torch.cat([slots[699:700], slots[740:]])

    def layer(q, cache):
        cache.append(q[:, :2] * 2, q[:, 2:4] + 1, slots)
        return attention.run(q * 2, cache) + 1

    eager, compiled = batch.cache.convert(layout), batch.cache.convert(layout)
    expected = layer(batch.q, eager)
    torch._dynamo.reset()
    assert eager.append_backend == "triton" and not torch.equal(eager.k, batch.cache.k)
    assert torch.equal(torch.compile(layer, fullgraph=True)(batch.q, compiled), expected)
    assert torch.equal(compiled.k, eager.k) and torch.equal(compiled.v, eager.v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_merge_states(dtype):
    outs, lses = torch.randn(19, 300, 32, 128).to(dtype), torch.randn(19, 300, 32) * 10
    lses[:, 2] = -math.inf
    lses[0, 3], outs[0, 3] = -math.inf, float("nan")
    out, lse = ops.kernel("triton", "merge_states")(outs, lses)
    right, right_lse = reference_merge(outs, lses)
    assert torch.allclose(lse, right_lse, rtol=1e-6, atol=1e-5)
    assert torch.allclose(out.float(), right.float(), rtol=2 * max(torch.finfo(dtype).eps, 1e-5), atol=1e-5)
