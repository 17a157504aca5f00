"""The named cases on every backend and device that is here; octavo/testing/cases.py says what each is."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import octavo
from octavo import AttentionSpec, InvalidInput, PagedCache
from octavo.reference.attention import gather
from octavo.testing import cases
from octavo.testing.compare import errors
from octavo.testing.graphs import Captured
from octavo.testing.inputs import make_batch, slots_of

SPEC = AttentionSpec(8, 2, 128)
CACHES = [
    {},
    {"layout": "nhd"},
    {"layout": "hnd", "page_size": 4},
    {"kv_dtype": "fp8_e5m2"},
    {"scale_granularity": "head"},
]


@pytest.mark.parametrize("changes", CACHES)
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_z2_scales_are_used_once(target, changes, rows):
    batch, right = cases.scale_probe(replace(SPEC, **changes), rows)
    # A decode sequence has at most spec.max_query_len rows: more may be left unwritten.
    plans = [{}, {"num_decodes": 0}] + ([{"num_decodes": 1}] if rows == 1 else [])
    for plan in plans:
        out = batch.run(target.backend, **plan).float()
        assert out[-1].sub(right).abs().max() < 2e-3
    assert abs(right - 0.48201) < 1e-5


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_z3_a_16_bit_cache_has_no_scales(target, kv_dtype):
    batch, right = cases.scale_probe(replace(SPEC, kv_dtype=kv_dtype, layout="nhd"))
    assert right == 1.0 and bool((batch.run(target.backend) == 1.0).all())


@pytest.mark.parametrize("precision", ["fast", "exact"])
@pytest.mark.parametrize("layout", ["leaf", "nhd"])
def test_z5_chunked_prefill_and_prefix_hits_agree(target, layout, precision):
    spec = replace(SPEC, layout=layout, out_dtype="float32", precision=precision)
    whole = make_batch(spec, [144], [144], k_scale=1 / 16, v_scale=1 / 2)
    expected = whole.run(target.backend)
    for chunks in ([128, 16], [64, 64, 16], [1] * 144):
        cache = PagedCache.allocate(spec, whole.cache.num_pages, target.device, 1 / 16, 1 / 2)
        slots, done, parts = slots_of(whole.page_table, spec.page_size, [144]), 0, []
        for n in chunks:
            rows = slice(done, done + n)
            cache.append(whole.k[rows], whole.v[rows], slots[rows])
            done += n
            lens, starts = torch.tensor([done], dtype=torch.int32), torch.tensor([0, n], dtype=torch.int32)
            parts.append(
                octavo.attention(spec, whole.q[rows], cache, lens, whole.page_table, starts, backend=target.backend)
            )
        assert torch.equal(cache.k, whole.cache.k) and torch.equal(cache.v, whole.cache.v)
        # In fp32 the sums differ in their order: 144 terms rounded to 2^-24. An exact kernel rounds as bf16 attention
        # does, 2^-8 on each side; a fast one multiplies e4m3 terms of 2^-4.
        unit = 144 * 2.0**-24 if target.backend == "reference" else 2.0 ** (-7 if precision == "exact" else -3)
        assert torch.allclose(torch.cat(parts), expected, rtol=0, atol=unit * float(whole.v.abs().max()))


@pytest.mark.parametrize("length", [1, 13, 63, 64, 65])
@pytest.mark.parametrize(("layout", "page_size"), [("leaf", 32), ("leaf", 64), ("nhd", 4), ("nhd", 16), ("hnd", 64)])
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2", "float16"])
def test_z6_garbage_outside_live_tokens(target, length, layout, page_size, kv_dtype):
    if layout == "leaf" and kv_dtype == "float16":
        layout = "nhd"  # leaf holds FP8 only
    spec = replace(SPEC, layout=layout, page_size=page_size, kv_dtype=kv_dtype, lse=True)
    batch = make_batch(spec, [length, 2 * length], [1, min(length, 5)])
    nan, zero = cases.poisoned(batch)
    a, b = nan.run(target.backend), zero.run(target.backend)
    assert torch.equal(a, b) and bool(a.isfinite().all()) and torch.equal(nan.lse, zero.lse)
    assert torch.equal(a, batch.run(target.backend))


@pytest.mark.parametrize("granularity", ["tensor", "token_head"])
def test_z6_a_window_never_touches_what_lies_before_it(target, granularity):
    spec = replace(SPEC, window=32, scale_granularity=granularity)
    batch = make_batch(spec, [100], [4])
    before = batch.run(target.backend)
    nan, zero = cases.poisoned(batch, [(0, t) for t in range(100 - 4 - 31, 100)])
    for poisoned in (nan, zero):
        poisoned.page_table[0, 0] = -1  # the page was freed
        assert torch.equal(poisoned.run(target.backend), before)


@pytest.mark.parametrize("pad_length", [0, 1])
@pytest.mark.parametrize("changes", [{}, {"layout": "nhd", "page_size": 16, "sinks": True}])
def test_z7_padded_rows_of_a_graph(target, pad_length, changes):
    spec = replace(SPEC, lse=True, **changes)
    live = make_batch(spec, [1, 40, 64, 65, 130], [1] * 5)
    expected = live.run(target.backend)
    width = live.page_table.shape[1]
    lens, starts = torch.ones(8, dtype=torch.int32), torch.arange(9, dtype=torch.int32)
    table = torch.zeros(8, width, dtype=torch.int32)
    q = torch.randn(8, 8, 128).to(torch.bfloat16)
    out, lse = torch.full((8, 8, 128), float("nan"), dtype=torch.bfloat16), torch.full((8, 8), float("nan"))
    attn = octavo.Attention(
        spec, max_batch=8, max_query_tokens=8, max_context=256, device=target.device, backend=target.backend
    )
    attn.workspace.fill_(0xFF)

    def step() -> None:
        attn.plan(lens, table, starts, num_decodes=8, max_query_len=1)
        attn.run(q, live.cache, out=out, lse=lse, **live.arguments)

    captured = Captured(step, torch.device(target.device), attn.choice.graph_support != "never")
    lens[:5], lens[5:] = live.seq_lens, pad_length
    table[:5] = live.page_table
    table[5:] = torch.tensor([-1, 2**31 - 1, live.cache.num_pages])[:, None]
    q[:5] = live.q
    captured.replay()
    assert torch.equal(out[:5], expected) and torch.equal(lse[:5], live.lse)
    assert not out[5:].any() and bool((lse[5:] == -math.inf).all())


def test_z9_pages_far_apart_in_the_pool(target):
    spec = AttentionSpec(4, 2, 128)
    page, stride = 2 * 64 * 256, 1_039_680
    first, far = 0, 2066
    memory = torch.empty((far + 14) * stride, dtype=torch.uint8)  # 2.15 GiB, touched only where pages are written
    k = memory.as_strided((far + 14, 2, 64, 128), (stride, 64 * 256, 128, 1))
    v = memory.as_strided((far + 14, 2, 128, 64), (stride, 64 * 256, 64, 1), 64 * 128)
    assert memory.numel() > 2**31 > page
    cache = PagedCache.view(spec, k, v, 1 / 16, 1 / 2)
    batch = make_batch(spec, [14 * 64], [1])
    outs = []
    for start in (far, first):
        batch.page_table = torch.arange(start, start + 14, dtype=torch.int32)[None]
        cache.append(batch.k, batch.v, slots_of(batch.page_table, 64, [14 * 64]))
        batch.cache = cache
        outs.append(batch.run(target.backend))
    assert torch.equal(outs[0], outs[1]) and bool(outs[0].isfinite().all())


@pytest.mark.parametrize("sink", [-math.inf, 0.0, math.log(3.0)])
@pytest.mark.parametrize("layout", ["leaf", "nhd"])
def test_z11_sinks_in_closed_form(target, sink, layout):
    batch, right = cases.sink_probe(replace(SPEC, layout=layout, out_dtype="float32"), sink)
    assert batch.run(target.backend).sub(right).abs().max() < 1e-6
    assert right == pytest.approx({-math.inf: 1.0, 0.0: 0.75, math.log(3.0): 0.5}[sink] * 0.5)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_z11_windows_and_several_query_rows(target, rows):
    spec = AttentionSpec(4, 2, 256, window=1024, sinks=True, softcap=50.0, max_query_len=8)
    for batch in cases.random_batches(spec, 20, lambda seed: [1023 + seed % 18], rows):
        assert errors(batch, batch.run(target.backend)).within(1.1)


@pytest.mark.parametrize("tail_weight", [1.0, 1.0625, 1.1875])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_z16_a_sink_and_a_long_flat_tail(target, tail_weight, where):
    tokens = 131_072
    spec = AttentionSpec(2, 1, 64, out_dtype="float32")
    at = {"first": 0, "middle": tokens // 2, "last": tokens - 1}[where]
    batch, right = cases.long_flat_tail(spec, tokens, at, tail_weight)
    assert right == pytest.approx({1.0: 0.33333, 1.0625: 0.34694, 1.1875: 0.37255}[tail_weight], abs=1e-5)
    # bf16 attention rounds P to 8 bits and V exactly: 2^-9 of the result.
    assert batch.run(target.backend).sub(right).abs().max() < right * 2.0**-9


def test_c1_an_engines_pages_of_528_tokens(target):
    spec = AttentionSpec(4, 2, 64, layout="nhd", page_size=528)
    batch = make_batch(spec, [1000], [3])
    for kernel_page in (16, 48):
        small = replace(spec, page_size=kernel_page)
        ratio = 528 // kernel_page
        k, v = (x.view(-1, kernel_page, 2, 64) for x in (batch.cache.k, batch.cache.v))
        assert k.shape[0] == batch.cache.num_pages * ratio
        expanded = replace(
            batch,
            spec=small,
            cache=PagedCache.view(small, k, v),
            page_table=octavo.expand_page_table(batch.page_table, 528, kernel_page),
        )
        assert torch.equal(expanded.run(target.backend), batch.run(target.backend))
        with pytest.raises(InvalidInput, match=f"page_size={kernel_page}; came page_size=528"):
            replace(expanded, cache=batch.cache).run(target.backend)


def test_c2_dtype_belongs_to_the_cache(target):
    batch = make_batch(SPEC, [70], [1])
    other = PagedCache.view(replace(SPEC, kv_dtype="fp8_e5m2"), batch.cache.k, batch.cache.v)
    with pytest.raises(InvalidInput, match="kv_dtype=fp8_e4m3; came kv_dtype=fp8_e5m2"):
        replace(batch, cache=other).run(target.backend)
    with pytest.raises(InvalidInput, match="must hold fp8_e4m3, the spec's kv_dtype; came fp8_e5m2"):
        PagedCache.view(SPEC, batch.cache.k.view(torch.float8_e5m2), batch.cache.v.view(torch.float8_e5m2))


def test_repeated_runs_are_bit_equal(target):
    batch = make_batch(replace(SPEC, sinks=True), [5, 200], [1, 30])
    first = batch.run(target.backend)
    assert all(torch.equal(batch.run(target.backend), first) for _ in range(5))


def test_gather_leaves_other_tokens_untouched(target):
    batch = make_batch(SPEC, [70], [1])
    k, v, live = gather(SPEC, batch.cache.bytes(), batch.page_table[0], 60, 70, torch.float32)
    whole_k, whole_v = batch.cache.gather(batch.page_table[0], 70)
    assert torch.equal(k.transpose(0, 1), whole_k[60:]) and torch.equal(v.transpose(0, 1), whole_v[60:]) and live.all()
