"""Hopper's decode on a GPU: its grid against fp64, the named cases, and what its schedule may not change.

It is called directly, so that a test says which sequences are decodes and what the workspace holds.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from octavo import hopper_tuning
from octavo.cache import PagedCache
from octavo.calls import AttentionCall
from octavo.device import Device
from octavo.formats import TORCH_DTYPES
from octavo.spec import AttentionSpec
from octavo.testing import cases
from octavo.testing.compare import errors, exact
from octavo.testing.graphs import Captured
from octavo.testing.inputs import Batch, make_batch

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="torch sees no Hopper GPU here")]

MIXED = [1, 63, 64, 129, 1000, 3001, 777, 2048, 13, 65]
SCALES = {"k_scale": 0.9, "v_scale": 1.1}


def spec_of(heads: int = 32, kv_heads: int = 8, dim: int = 128, **fields) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, dim, **fields)


def call_of(batch: Batch, num_decodes: int | None = -1, max_query_len: int | None = None) -> AttentionCall:
    """A call whose output and workspace are poisoned; num_decodes -1: all."""
    spec, rows, sequences = batch.spec, batch.q.shape[0], batch.seq_lens.shape[0]
    bounds = (sequences, rows, batch.page_table.shape[1] * spec.page_size)
    size = hopper_tuning.decode_workspace_bytes(spec, Device.detect(batch.q.device), *bounds)
    out = torch.empty(rows, spec.num_q_heads, spec.value_dim, dtype=TORCH_DTYPES[spec.out_dtype], device="cuda")
    out.view(torch.uint8).fill_(0xFF)
    lse = torch.full((rows, spec.num_q_heads), math.nan, device="cuda") if spec.lse else None
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    return batch.call(out, lse, workspace, sequences if num_decodes == -1 else num_decodes, max_query_len)


def run(batch: Batch, num_decodes: int | None = -1, max_query_len: int | None = None) -> torch.Tensor:
    """decode of `batch`; its lse is kept as batch.lse."""
    from octavo.kernels.gluon.decode import decode

    call = call_of(batch, num_decodes, max_query_len)
    decode(call)
    batch.lse = call.lse
    return call.out


def batch_of(spec: AttentionSpec, lens=MIXED, rows=None, **arguments) -> Batch:
    return make_batch(spec, lens, rows or [1] * len(lens), device="cuda", **{**SCALES, **arguments})


GRID = {
    "32/8": spec_of(),
    "64/8": spec_of(64),
    "64/8 of 64": spec_of(64, dim=64),
    "16/8 of 256": spec_of(16, dim=256),
    "32/4 of 256, pages of 128": spec_of(32, 4, 256, page_size=128),
    "32/4 of 256, pages of 32": spec_of(32, 4, 256, page_size=32),
    "16/16 of 192/128": spec_of(16, 16, 192, head_dim_v=128),
    "pages of 32": spec_of(page_size=32),
    "pages of 128": spec_of(page_size=128),
    "lse and sinks": spec_of(lse=True, sinks=True),
    "window": spec_of(lse=True, window=300),
    "softcap": spec_of(lse=True, softcap=2.0),
    "e4m3 query and output": spec_of(query_dtype="fp8", out_dtype="fp8"),
    "float16": spec_of(query_dtype="float16", out_dtype="float16"),
    "batch invariant": spec_of(batch_invariant=True, lse=True),
    **{f"group of {g}": spec_of(2 * g, 2, lse=True) for g in (1, 3, 5, 7, 12, 16, 24, 32)},
}


@pytest.mark.parametrize("name", GRID)
def test_as_exact_as_bf16_attention_and_bit_equal_each_time(name):
    batch = batch_of(GRID[name])
    out = run(batch)
    assert errors(batch, out).within(1.1)
    if batch.lse is not None:
        _, lse = exact(batch)
        assert (batch.lse - lse).abs().max() < 2e-3
    again = [run(batch) for _ in range(20)]
    assert all(torch.equal(out.view(torch.uint8), x.view(torch.uint8)) for x in again)


@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_scales_of_heads_and_float32_out(page_size):
    spec = spec_of(out_dtype="float32", scale_granularity="head", page_size=page_size)
    batch = batch_of(spec, k_scale=torch.rand(8, device="cuda") + 0.5, v_scale=torch.rand(8, device="cuda") + 0.5)
    assert errors(batch, run(batch)).within(1.1)


@pytest.mark.parametrize("fields", [{}, {"window": 100, "sinks": True}, {"page_size": 128}, {"batch_invariant": True}])
@pytest.mark.parametrize("heads", [32, 64])
def test_rows_of_a_draft_see_their_own_past(heads, fields):
    spec = spec_of(heads, max_query_len=8, lse=True, **fields)
    batch = batch_of(spec, rows=[8, 7, 6, 5, 4, 3, 2, 1, 0, 8])
    assert errors(batch, run(batch)).within(1.1)
    _, lse = exact(batch)
    sees = lse > -math.inf
    assert bool((batch.lse[~sees] == -math.inf).all()) and (batch.lse - lse)[sees].abs().max() < 2e-3
    four = batch_of(spec, rows=[1, 2, 3, 4, 1, 2, 3, 4, 0, 4])
    assert errors(four, run(four, max_query_len=4)).within(1.1)


@pytest.mark.parametrize("programs", [1, 7, 100, 1000])
def test_any_number_of_programs(monkeypatch, programs):
    from octavo.kernels.gluon import decode, plan

    made = plan.schedule_of
    monkeypatch.setattr(hopper_tuning, "decode_schedule_ints", lambda *_: 1 << 16)
    monkeypatch.setattr(hopper_tuning, "decode_workspace_bytes", lambda *_: 1 << 24)
    for module in (plan, decode):
        monkeypatch.setattr(module, "schedule_of", lambda *a: made(*a)._replace(programs=programs))
    batch = batch_of(spec_of(lse=True, sinks=True))
    assert errors(batch, run(batch)).within(1.1)


@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("window", [None, 32])
def test_bytes_of_no_token_never_reach_a_result(page_size, window):
    lens = [1, 13, 63, 64, 65, 127, 129, 1000]
    batch = batch_of(spec_of(64, page_size=page_size, window=window, lse=True), lens)
    live = None if window is None else [(b, t) for b, n in enumerate(lens) for t in range(max(0, n - window), n)]
    nan, zero = cases.poisoned(batch, live)
    a, b = run(nan), run(zero)
    assert torch.equal(a, b) and bool(a.isfinite().all()) and torch.equal(nan.lse, zero.lse)


@pytest.mark.parametrize("lens", [[100, 3000, 64, 700, 5], [20000] * 5, [1000] * 64, [2000] * 16], ids=str)
def test_padding_moves_nothing(lens):
    """Sequences of one token or none have no part in the schedule, so the others are cut as without them."""
    live = batch_of(spec_of(lse=True, sinks=True), lens)
    expected, expected_lse, n = run(live), live.lse, len(lens)
    ids = torch.tensor([-1, 2**31 - 1, -(2**31), -1, 2**31 - 1, -(2**31), 0], dtype=torch.int32, device="cuda")
    padded = replace(
        live,
        q=torch.cat([live.q, live.q[:1].expand(7, -1, -1)]),
        seq_lens=torch.cat([live.seq_lens, torch.tensor([0, -5, 0, 1, 1, 1, 1], dtype=torch.int32, device="cuda")]),
        page_table=torch.cat([live.page_table, ids[:, None].expand(7, live.page_table.shape[1])]),
        query_starts=torch.arange(n + 8, dtype=torch.int32, device="cuda"),
    )
    out = run(padded)
    assert torch.equal(out[:n], expected) and torch.equal(padded.lse[:n], expected_lse)
    assert not out[n:-1].any() and bool((padded.lse[n:-1] == -math.inf).all())
    assert errors(padded, out).within(1.1)


EVEN = {"whole items": [1024] * 64, "nearly": [1000, 1024, 930, 1001] * 16, "halves": [4096, 4000] * 8, "one": [5000]}


@pytest.mark.parametrize("fields", [{}, {"max_query_len": 4}, {"page_size": 128, "lse": True}, {"window": 1000}])
@pytest.mark.parametrize("name", EVEN)
def test_whole_items_and_even_parts(name, fields):
    spec, lens = spec_of(64, **fields), EVEN[name]
    batch = batch_of(spec, lens, [spec.max_query_len] * len(lens))
    out = run(batch)
    assert errors(batch, out).within(1.1)
    assert torch.equal(out, run(batch))


SHORT = ["lse and sinks", "softcap", "e4m3 query and output", "16/16 of 192/128", "64/8 of 64"]


@pytest.mark.parametrize("name", SHORT)
def test_sequences_of_one_token(name):
    spec = replace(GRID[name], max_query_len=4)
    batch = batch_of(spec, [1, 1, 2, 1, 1000, 1], [1, 2, 1, 4, 1, 0])
    out = run(batch)
    assert errors(batch, out).within(1.1)
    if spec.lse:
        _, lse = exact(batch)
        sees = lse > -math.inf
        assert bool((batch.lse[~sees] == -math.inf).all()) and (batch.lse - lse)[sees].abs().max() < 2e-3


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("length", [1, 2, 15, 63, 64, 65, 127, 128, 129, 255, 257, 1000, 4096, 8191, 32769, 131072])
def test_any_length_as_exact_as_bf16_attention(long_batch, length, dim):
    batch = long_batch[dim]
    short = replace(batch, seq_lens=torch.full_like(batch.seq_lens, length))
    assert errors(short, run(short)).within(1.1)


@pytest.fixture(scope="module")
def long_batch():
    """A sequence of 131,072 tokens of each head dimension."""
    return {dim: batch_of(spec_of(16, 2, dim, lse=True), [131072]) for dim in (64, 128)}


@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_a_window_over_several_rows_of_256(rows):
    spec = spec_of(4, 2, 256, window=1024, max_query_len=rows, sinks=True)
    lens = list(range(1023, 1041))
    batch = batch_of(spec, lens, [rows] * len(lens))
    assert errors(batch, run(batch)).within(1.1)


def test_pages_far_apart():
    """32-bit offsets would wrap: pages of 1,039,680 bytes from one to the next, 2.15 GiB in all."""
    spec = spec_of(8, 2)
    near = batch_of(spec, [13, 64 * 6 + 1, 64 * 7])
    stride, far, pages = 1_039_680, 2066, near.cache.num_pages
    pool = torch.zeros(stride * (far + pages), dtype=torch.uint8, device="cuda")
    page = near.cache.memory.k_pool.numel() // pages
    pool.as_strided((pages, page), (stride, 1), far * stride).copy_(near.cache.memory.k_pool.view(pages, page))
    half = spec.page_size * spec.head_dim
    views = [
        pool.as_strided((far + pages, 2, *shape), (stride, 2 * half, shape[1], 1), offset)
        for shape, offset in (((64, 128), 0), ((128, 64), half))
    ]
    cache = PagedCache.view(spec, *views, k_scale=SCALES["k_scale"], v_scale=SCALES["v_scale"])
    assert torch.equal(run(replace(near, cache=cache, page_table=near.page_table + far)), run(near))


def test_pages_that_are_not_there_are_not_seen():
    batch = batch_of(spec_of(lse=True), [100, 3000, 64, 700, 1])
    table = batch.page_table.clone()
    table[1, 5], table[1, 20], table[3, 0], table[4, 0] = -1, 2**31 - 1, batch.cache.num_pages, -7
    holes = replace(batch, page_table=table)
    out = run(holes)
    assert errors(holes, out).within(1.1)
    assert not out[4].any() and bool((holes.lse[4] == -math.inf).all())


def test_rows_of_no_sequence_are_zero():
    batch = batch_of(spec_of(lse=True), [100, 3000, 64])
    expected = run(batch)
    wider = replace(
        batch,
        q=torch.cat([batch.q[:2], batch.q, batch.q]),
        query_starts=torch.arange(2, 6, dtype=torch.int32, device="cuda"),
    )
    out = run(wider)
    others = torch.tensor([0, 1, 5, 6, 7], device="cuda")
    assert torch.equal(out[2:5], expected)
    assert not out[others].any() and bool((wider.lse[others] == -math.inf).all())


def test_longer_sequences_are_left_to_prefill_on_the_device():
    batch = batch_of(spec_of(64, max_query_len=2), [100, 300, 500, 900], [1, 2, 40, 1])
    out, (truth, _) = run(batch, num_decodes=None), exact(batch)
    decoded = torch.tensor([0, 1, 2, 43], device="cuda")
    assert (out[decoded].double() - truth[decoded]).norm() < 4e-3 * truth[decoded].norm()
    assert bool((out[3:43].view(torch.uint8) == 0xFF).all())


def test_a_result_does_not_depend_on_the_batch():
    batch = batch_of(spec_of(batch_invariant=True, lse=True), [9000, 300, 5000, 70, 2048])
    out = run(batch)
    for b in range(5):
        one = replace(
            batch,
            seq_lens=batch.seq_lens[b : b + 1],
            page_table=batch.page_table[b : b + 1],
            q=batch.q[b : b + 1],
            query_starts=torch.arange(2, dtype=torch.int32, device="cuda"),
        )
        assert torch.equal(run(one), out[b : b + 1])


def test_layers_share_a_plan_and_a_graph_replays_any_lengths():
    from octavo.kernels.gluon.decode import decode
    from octavo.kernels.gluon.plan import plan

    batch = batch_of(spec_of(lse=True), [3000] * 5)
    ints = hopper_tuning.decode_schedule_ints(batch.spec, Device.detect(batch.q.device), 5)
    schedule = torch.full((ints,), -1, dtype=torch.int32, device="cuda")
    calls = [replace(call_of(batch), schedule=schedule) for _ in range(2)]

    def step() -> None:
        plan(batch.spec, batch.seq_lens, batch.page_table, batch.query_starts, schedule, 5, 1)
        for call in calls:
            decode(call)

    captured = Captured(step, batch.q.device)
    for lens in ([3000] * 5, [1, 40, 64, 2999, 130], [0, 0, 7, 0, 0], [0] * 5):
        batch.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        captured.replay()
        expected = run(batch)
        for call in calls:
            assert torch.equal(call.out, expected) and torch.equal(call.lse, batch.lse)


@pytest.mark.parametrize("tail_weight", [1.0, 1.0625, 1.1875])
@pytest.mark.parametrize("at", [0, 65536, 131071])
def test_a_sink_and_a_long_flat_tail(tail_weight, at):
    batch, right = cases.long_flat_tail(
        AttentionSpec(4, 1, 128, out_dtype="float32"), 131072, at, tail_weight, device="cuda"
    )
    assert run(batch).sub(right).abs().max() < 2.0**-9 * right


@pytest.mark.parametrize("sink", [-math.inf, 0.0, math.log(3.0)])
def test_sinks_and_scales_in_closed_form(sink):
    batch, right = cases.sink_probe(spec_of(out_dtype="float32"), sink, device="cuda")
    assert run(batch).sub(right).abs().max() < 1e-6
    batch, right = cases.scale_probe(spec_of(out_dtype="float32"), device="cuda")
    assert run(batch).sub(right).abs().max() < 2e-3
