"""Triton's attention under the interpreter: the grid against fp64, and the named cases at small sizes."""

from __future__ import annotations

import math
from dataclasses import replace

import attention_cases as grid
import pytest
import torch

from octavo import tuning
from octavo.calls import AttentionCall
from octavo.device import KNOWN
from octavo.kernels.triton.decode import partial_of
from octavo.reference.merge_states import merge_states as reference_merge
from octavo.spec import AttentionSpec
from octavo.testing import cases, compare
from octavo.testing.inputs import make_batch

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning"),  # numpy's
]

SPEC = AttentionSpec(4, 2, 64)
EXACT = replace(SPEC, precision="exact")


@pytest.mark.parametrize("cell", grid.grid(), ids=str)
def test_grid(cell):
    batch = cell.batch("cpu")
    assert grid.faults(cell, batch, grid.run(batch)) == []


@pytest.mark.parametrize(
    "changes", [{}, {"layout": "nhd"}, {"layout": "hnd", "page_size": 4}, {"kv_dtype": "fp8_e5m2"}]
)
@pytest.mark.parametrize("rows", [1, 2, 40])
def test_z2_scales_are_used_once(changes, rows):
    batch, right = cases.scale_probe(replace(SPEC, **changes), rows)
    for plan in ({}, {"num_decodes": 0}):
        assert grid.run(batch, **plan)[-1].float().sub(right).abs().max() < 2e-3


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16"])
def test_z3_a_16_bit_cache_has_no_scales(kv_dtype):
    batch, right = cases.scale_probe(replace(SPEC, kv_dtype=kv_dtype, layout="nhd"))
    assert right == 1.0 and bool((grid.run(batch) == 1.0).all())


@pytest.mark.parametrize(
    ("layout", "precision", "singly"), [("leaf", "fast", [100] + [1] * 44), ("nhd", "exact", [1] * 144)]
)
def test_z5_chunked_prefill_agrees(layout, precision, singly):
    spec = AttentionSpec(2, 1, 64, layout=layout, precision=precision, out_dtype="float32")
    whole = make_batch(spec, [144], [144], k_scale=1 / 16, v_scale=1 / 2)
    truth, _ = compare.exact(whole)
    bf16 = (compare.plain_bf16(whole).double() - truth).norm()
    for chunks in ([144], [128, 16], [64, 64, 16], singly):
        done, parts = 0, []
        for n in chunks:
            done += n
            part = replace(
                whole,
                q=whole.q[done - n : done],
                seq_lens=torch.tensor([done], dtype=torch.int32),
                query_starts=torch.tensor([0, n], dtype=torch.int32),
            )
            parts.append(grid.run(part))
        bound = grid.FP8_ERROR * truth.norm() if precision == "fast" else 1.1 * bf16
        assert (torch.cat(parts).double() - truth).norm() < bound


@pytest.mark.parametrize("length", [1, 13, 63, 64, 65])
@pytest.mark.parametrize(
    ("layout", "page_size", "granularity"),
    [
        ("leaf", 32, "token_head"),
        ("leaf", 64, "tensor"),
        ("nhd", 4, "tensor"),
        ("nhd", 64, "token_head"),
        ("hnd", 16, "token_head"),
    ],
)
def test_z6_garbage_outside_live_tokens(length, layout, page_size, granularity):
    spec = replace(SPEC, layout=layout, page_size=page_size, scale_granularity=granularity, lse=True)
    batch = make_batch(spec, [length, 2 * length], [1, min(length, 5)])
    nan, zero = cases.poisoned(batch)
    a, b = grid.run(nan), grid.run(zero)
    assert torch.equal(a, b) and bool(a.isfinite().all()) and torch.equal(nan.lse, zero.lse)


@pytest.mark.parametrize("granularity", ["tensor", "token_head"])
@pytest.mark.parametrize(("layout", "page_size"), [("leaf", 32), ("nhd", 16)])
@pytest.mark.parametrize("max_query_len", [1, 4])
def test_z6_a_window_never_touches_what_lies_before_it(granularity, layout, page_size, max_query_len):
    spec = replace(
        SPEC, layout=layout, page_size=page_size, window=32, scale_granularity=granularity, max_query_len=max_query_len
    )
    batch = make_batch(spec, [100], [4])
    before = grid.run(batch)
    for poisoned in cases.poisoned(batch, [(0, t) for t in range(100 - 4 - 31, 100)]):
        assert torch.equal(grid.run(poisoned), before)
        poisoned.page_table[0, 0] = -1  # the page was freed
        assert torch.equal(grid.run(poisoned), before)


@pytest.mark.parametrize("pad_length", [0, 1])
@pytest.mark.parametrize("changes", [{}, {"layout": "nhd", "page_size": 16, "sinks": True}])
def test_z7_padded_rows(pad_length, changes):
    spec = replace(SPEC, lse=True, **changes)
    live = make_batch(spec, [1, 40, 64, 65, 300], [1] * 5)
    expected = grid.run(live)
    table = torch.tensor([-1, 2**31 - 1, live.cache.num_pages])[:, None].expand(3, live.page_table.shape[1])
    padded = replace(
        live,
        q=torch.cat([live.q, live.q[:3]]),
        seq_lens=torch.cat([live.seq_lens, torch.full((3,), pad_length, dtype=torch.int32)]),
        page_table=torch.cat([live.page_table, table.to(torch.int32)]),
        query_starts=torch.arange(9, dtype=torch.int32),
    )
    for plan in ({"num_decodes": 8, "max_query_len": 1}, {}):
        out = grid.run(padded, **plan)
        assert torch.equal(out[:5], expected) and torch.equal(padded.lse[:5], live.lse)
        assert not out[5:].any() and bool((padded.lse[5:] == -math.inf).all())


@pytest.mark.parametrize("rows", [1, 2, 30])
def test_pages_that_are_not_there_are_not_seen(rows):
    """Whole pages in the middle of a sequence, with a tile on one page and on several."""
    for layout, page_size in (("leaf", 64), ("nhd", 16), ("hnd", 24)):
        spec = replace(EXACT, layout=layout, page_size=page_size, max_query_len=2, lse=True)
        batch = make_batch(spec, [300], [rows])
        batch.page_table[0, 1], batch.page_table[0, 3] = -1, batch.cache.num_pages
        cell = grid.Cell(spec, "hole")
        assert grid.faults(cell, batch, grid.run(batch)) == []


@pytest.mark.parametrize(("rows", "precision"), [(1, "fast"), (20, "fast"), (20, "exact")])
def test_a_query_of_zeros_and_the_smallest_scales(rows, precision):
    """Nothing overflows, and what underflows is 0: every score is 0 here, so the output is the mean of the values."""
    spec = replace(SPEC, precision=precision, scale_granularity="token_head", lse=True, out_dtype="float32")
    batch = make_batch(spec, [100], [rows])
    batch.q.zero_()
    batch.cache.k_scale.fill_(2.0**-126)
    for scale in (2.0**-126, 2.0**100):
        batch.cache.v_scale.fill_(scale)
        out = grid.run(batch)
        truth, lse = compare.exact(batch)
        assert (out / scale - truth / scale).norm() <= 2.0**-9 * (truth / scale).norm()
        assert (batch.lse - lse).abs().max() < 1e-5
    plain = make_batch(replace(spec, scale_granularity="tensor"), [100], [rows], k_scale=2.0**-126, v_scale=1.0)
    plain.q.zero_()
    assert grid.faults(grid.Cell(plain.spec, "zeros"), plain, grid.run(plain)) == []


@pytest.mark.parametrize("num_decodes", [None, 0, 3])
def test_rows_of_no_sequence_become_0(num_decodes):
    batch = make_batch(replace(SPEC, lse=True), [70, 5, 300], [1, 1, 1])
    expected, lse = grid.run(batch, num_decodes=num_decodes), batch.lse
    padded = grid.with_rows_of_no_sequence(batch, 2, 40)
    out = grid.run(padded, num_decodes=num_decodes)
    assert torch.equal(out[2:5], expected) and torch.equal(padded.lse[2:5], lse)
    assert not out[:2].any() and not out[5:].any()
    assert bool((padded.lse[:2] == -math.inf).all() and (padded.lse[5:] == -math.inf).all())


def test_starts_and_lengths_outside_their_bounds_are_cut():
    batch = make_batch(replace(EXACT, lse=True), [70, 130], [1, 20])
    width = batch.page_table.shape[1] * 64
    wild = replace(batch, seq_lens=torch.tensor([70, 2**31 - 1], dtype=torch.int32))
    cut = replace(batch, seq_lens=torch.tensor([70, width], dtype=torch.int32))
    assert torch.equal(grid.run(wild), grid.run(cut))
    for starts in ([-5, 1, 2**31 - 1], [0, 1, 21], [-(2**31), 1, 30]):
        same = replace(batch, query_starts=torch.tensor(starts, dtype=torch.int32))
        assert torch.equal(grid.run(same), grid.run(batch))
    assert not grid.run(replace(batch, query_starts=torch.tensor([9, 3, 1], dtype=torch.int32)))[9:].any()


def test_more_query_rows_than_tokens_see_nothing_at_first():
    for spec in (replace(EXACT, lse=True), replace(EXACT, lse=True, max_query_len=16, sinks=True)):
        batch = make_batch(spec, [5], [12])
        out = grid.run(batch)
        assert not out[:7].any() and bool((batch.lse[:7] == -math.inf).all())
        assert grid.faults(grid.Cell(spec, "hole"), batch, out) == []


@pytest.mark.parametrize("sink", [-math.inf, 0.0, math.log(3.0)])
@pytest.mark.parametrize("layout", ["leaf", "nhd"])
def test_z11_sinks_in_closed_form(sink, layout):
    batch, right = cases.sink_probe(replace(SPEC, layout=layout, out_dtype="float32"), sink)
    for plan in ({}, {"num_decodes": 0}):
        assert grid.run(batch, **plan).sub(right).abs().max() < 1e-6


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_z11_windows_and_several_query_rows(rows):
    spec = AttentionSpec(2, 1, 256, window=1024, sinks=True, softcap=50.0, max_query_len=8)
    for batch in cases.random_batches(spec, 2, lambda seed: [1030 + 9 * seed], rows):
        assert compare.errors(batch, grid.run(batch)).within(1.1)


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize(
    ("precision", "rows", "tokens", "error"),
    [("exact", 1, 2048, 2.0**-9), ("exact", 2, 2048, 2.0**-9), ("fast", 2, 8192, 0.01)],
)
def test_z16_a_sink_and_a_long_flat_tail(where, precision, rows, tokens, error):
    """Decode and exact prefill are as near as bf16 attention; FP8 prefill loses the tail in the sink's own tile."""
    spec = AttentionSpec(2, 1, 64, out_dtype="float32", precision=precision)
    at = {"first": 0, "middle": tokens // 2, "last": tokens - 1}[where]
    batch, right = cases.long_flat_tail(spec, tokens, at, 1.1875, rows=rows)
    assert grid.run(batch)[-1].sub(right).abs().max() < right * error


@pytest.mark.parametrize("changes", [{}, {"layout": "nhd", "page_size": 16, "window": 200}])
def test_runs_are_bit_equal_and_batch_invariant(changes):
    spec = replace(SPEC, batch_invariant=True, lse=True, **changes)
    batch = make_batch(spec, [600, 9, 1100, 64], [1, 1, 1, 30])
    out, lse = grid.run(batch), batch.lse
    assert torch.equal(grid.run(batch), out)
    for index, rows in ((0, slice(0, 1)), (2, slice(2, 3)), (3, slice(3, 33))):
        alone = grid.alone(batch, index, rows)
        assert torch.equal(grid.run(alone), out[rows]) and torch.equal(alone.lse, lse[rows])


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("batch", [1, 2, 7, 100])
def test_the_workspace_holds_every_piece(heads, batch):
    """What plan sizes is what decode makes room for: otherwise a row's splits would depend on the batch."""
    for invariant in (False, True):
        spec = AttentionSpec(4 * heads, heads, 64, batch_invariant=invariant)
        size = tuning.split_workspace_bytes(spec, KNOWN["h200"], batch, batch, 1100)
        call = AttentionCall(
            spec,
            *[torch.empty(0)] * 2,
            torch.empty(batch),
            *[None] * 5,
            torch.empty(size, dtype=torch.uint8),
            *[None] * 4,
        )
        wanted = tuning.decode_units(spec, KNOWN["h200"], batch, 1100)
        assert partial_of(call, 1, wanted)[1] == wanted


def test_many_sequences_are_looked_at_in_blocks():
    """More sequences than a program looks at together, some of them split, some without rows."""
    lens = [1 + (7 * i) % 11 for i in range(265)]
    lens[263] = 900
    rows = [i % 40 == 1 or i > 260 for i in range(265)]
    spec = AttentionSpec(1, 1, 64, layout="nhd", page_size=8, lse=True)
    batch = make_batch(spec, lens, [int(r) for r in rows])
    assert grid.faults(grid.Cell(spec, "one"), batch, grid.run(batch, num_decodes=265)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("parts", "dim"), [(1, 64), (3, 80), (19, 128)])
def test_merge_states(dtype, parts, dim):
    from octavo.kernels.triton.merge_states import merge_states

    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(parts, 5, 3, dim, generator=generator).to(dtype)
    lses = torch.randn(parts, 5, 3, generator=generator) * 10
    lses[:, 2] = -math.inf
    lses[0, 3], outs[0, 3] = -math.inf, float("nan")
    out, lse = merge_states(outs, lses)
    right, right_lse = reference_merge(outs, lses)
    assert torch.allclose(lse, right_lse, rtol=1e-6, atol=1e-5)
    # fp32 arithmetic on both sides: at most the last bit of the output differs.
    assert torch.allclose(out.float(), right.float(), rtol=max(torch.finfo(dtype).eps, 1e-5), atol=1e-5)
    assert not out[2].any() and bool((lse[2] == -math.inf).all())
