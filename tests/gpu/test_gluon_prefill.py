"""Hopper's prefill on a GPU: its grid against fp64, the named cases, and what its schedule may not change."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from octavo import hopper_tuning
from octavo.attention import Attention
from octavo.cache import PagedCache
from octavo.calls import AttentionCall
from octavo.device import Device
from octavo.formats import TORCH_DTYPES
from octavo.reference.attention import gather, visible_tokens
from octavo.spec import AttentionSpec
from octavo.testing import cases
from octavo.testing.compare import errors, exact, plain_bf16
from octavo.testing.graphs import Captured
from octavo.testing.inputs import Batch, make_batch, slots_of

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="torch sees no Hopper GPU here")]

LENS, ROWS = [300, 777, 1000, 1500, 40, 0], [300, 17, 129, 640, 60, 5]  # two have rows without keys
SCALES = {"k_scale": 0.9, "v_scale": 1.1}
OUT_FP8 = 2.0**-4  # what rounding an output to e4m3 may cost


def spec_of(heads: int = 32, kv_heads: int = 8, dim: int = 128, **fields) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, dim, **fields)


def batch_of(spec: AttentionSpec, lens=LENS, rows=ROWS, **arguments) -> Batch:
    return make_batch(spec, lens, rows, device="cuda", **{**SCALES, **arguments})


def call_of(batch: Batch, num_decodes: int | None = 0) -> AttentionCall:
    """A call whose output and workspace are poisoned."""
    spec, rows, sequences = batch.spec, batch.q.shape[0], batch.seq_lens.shape[0]
    bounds = (sequences, rows, batch.page_table.shape[1] * spec.page_size)
    size = hopper_tuning.prefill_workspace_bytes(spec, Device.detect(batch.q.device), *bounds)
    out = torch.empty(rows, spec.num_q_heads, spec.value_dim, dtype=TORCH_DTYPES[spec.out_dtype], device="cuda")
    out.view(torch.uint8).fill_(0xFF)
    lse = torch.full((rows, spec.num_q_heads), math.nan, device="cuda") if spec.lse else None
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    return batch.call(out, lse, workspace, num_decodes, None)


def run(batch: Batch, num_decodes: int | None = 0) -> torch.Tensor:
    """prefill of `batch`; its lse is kept as batch.lse."""
    from octavo.kernels.gluon.prefill import prefill

    call = call_of(batch, num_decodes)
    prefill(call)
    batch.lse = call.lse
    return call.out


def floor_of(batch: Batch, channels: torch.Tensor | None = None) -> float:
    """Relative error to fp64 of attention whose query (by row and head) and P are rounded to e4m3, and nothing else.

    channels: those of the output that count, by their numbers; all if None.
    """
    spec, group = batch.spec, batch.spec.group_size
    starts, wrong, norm = batch.query_starts.tolist(), 0.0, 0.0
    for index, length in enumerate(batch.seq_lens.tolist()):
        q = batch.q[starts[index] : starts[index + 1]].double()
        if batch.arguments.get("q_scale") is not None:
            q = q * batch.arguments["q_scale"].double()
        if length <= 0 or not len(q):
            continue
        k, v, _ = gather(spec, batch.cache.bytes(), batch.page_table[index], 0, length, torch.float64)
        positions = torch.arange(length - len(q), length, device="cuda")
        seen = visible_tokens(spec, positions, torch.arange(length, device="cuda"))
        scale = q.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
        rounded = (q / scale).float().to(torch.float8_e4m3fn).double() * scale
        for head in range(spec.num_q_heads):
            result = []
            for x, step in ((q, 0.0), (rounded, 256.0)):
                s = x[:, head] @ k[head // group].T * spec.scale
                s = spec.softcap * torch.tanh(s / spec.softcap) if spec.softcap else s
                s = s.masked_fill(~seen, -math.inf)
                p = torch.exp(s - s.amax(-1, keepdim=True).clamp_min(-1e30))
                total = p.sum(-1, keepdim=True).clamp_min(1e-30)
                if step:
                    p = (p * step).float().to(torch.float8_e4m3fn).double() / step
                result.append(p @ (v[head // group] if channels is None else v[head // group][:, channels]) / total)
            wrong += float((result[1] - result[0]).square().sum())
            norm += float(result[0].square().sum())
    return math.sqrt(wrong / norm)


DIGITS = 2.0**-13  # tensor cores keep this of the largest of a sum so far and the 32 products that they add to it
ADDED = 2 * 128 + 8  # to a score of two e4m3 terms of 128: products, and the sum so far in each of eight steps


def lse_deviation(batch: Batch) -> torch.Tensor:
    """Standard deviation [rows, heads] that what tensor cores cut off gives lse, if all of a row's scores err alike.

    Of every number added, up to one unit in the last digit kept is cut off: a third of its square in the mean.
    """
    spec, starts = batch.spec, batch.query_starts.tolist()
    result = torch.zeros(batch.q.shape[:2], device="cuda")
    q_all = batch.q.float() * (1.0 if batch.arguments.get("q_scale") is None else batch.arguments["q_scale"])
    for index, length in enumerate(batch.seq_lens.tolist()):
        q = q_all[starts[index] : starts[index + 1]]
        if length <= 0 or not len(q):
            continue
        k, _, _ = gather(spec, batch.cache.bytes(), batch.page_table[index], 0, length, torch.float32)
        positions = torch.arange(length - len(q), length, device="cuda")
        seen = visible_tokens(spec, positions, torch.arange(length, device="cuda"))
        for head in range(spec.num_q_heads):
            s = torch.zeros(len(q), length, device="cuda")
            largest = s.clone()
            for d in range(0, spec.head_dim, 32):
                products = q[:, head, None, d : d + 32] * k[head // spec.group_size][None, :, d : d + 32]
                s += products.sum(-1)
                largest = torch.stack([largest, products.abs().amax(-1), s.abs()]).amax(0)
            s *= spec.scale
            s = spec.softcap * torch.tanh(s / spec.softcap) if spec.softcap else s
            p = torch.softmax(s.masked_fill(~seen, -1e30), -1)
            result[starts[index] : starts[index + 1], head] = (p * largest).sum(-1)
    return result * spec.scale * DIGITS * math.sqrt(ADDED / 3)


FAST = {
    "32/8": spec_of(),
    "64/8": spec_of(64),
    "64/8 of 64": spec_of(64, dim=64),
    "16/8 of 256": spec_of(16, dim=256),
    "32/4 of 256, pages of 32": spec_of(32, 4, 256, page_size=32),
    "pages of 32": spec_of(page_size=32),
    "pages of 128": spec_of(page_size=128),
    "pages of 128 of 64": spec_of(dim=64, page_size=128),
    "lse": spec_of(lse=True),
    "window": spec_of(lse=True, window=200),
    "softcap": spec_of(lse=True, softcap=20.0),
    "e4m3 query": spec_of(query_dtype="fp8", lse=True),
    "float16": spec_of(query_dtype="float16", out_dtype="float16"),
    "float32 out": spec_of(out_dtype="float32"),
    **{f"group of {g}": spec_of(2 * g, 2, lse=True) for g in (1, 3, 5, 7, 12, 16, 24, 32)},
}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name", FAST)
def test_fast_is_as_exact_as_e4m3_allows_and_bit_equal_each_time(name):
    batch = batch_of(FAST[name])
    out = run(batch)
    found = errors(batch, out)
    assert found.rel <= 1.1 * math.hypot(floor_of(batch), found.rel_bf16)
    if batch.lse is not None:
        _, lse = exact(batch)
        assert torch.equal(batch.lse.isfinite(), lse.isfinite())
        assert (batch.lse - lse)[lse.isfinite()].abs().max() < 0.25  # 2^-4 of a score
    assert all(same(out, run(batch)) for _ in range(20))


@pytest.mark.parametrize("name", [n for n in FAST if FAST[n].out_dtype != "float32"])
def test_exact_is_as_exact_as_bf16_attention_and_bit_equal_each_time(name):
    batch = batch_of(replace(FAST[name], precision="exact"))
    out = run(batch)
    assert errors(batch, out).within(1.1)
    if batch.lse is not None:
        _, lse = exact(batch)
        assert torch.equal(batch.lse.isfinite(), lse.isfinite())
        wrong, allowed = (x[lse.isfinite()].double() for x in (batch.lse - lse, lse_deviation(batch)))
        assert wrong.square().mean() <= allowed.square().mean()
        assert (wrong.abs() <= 5 * allowed + 1e-5).all()  # tens of thousands of rows; the rest is fp32's
    assert all(same(out, run(batch)) for _ in range(20))


@pytest.mark.parametrize("precision", ["fast", "exact"])
def test_e4m3_out_sinks_and_scales_of_heads(precision):
    spec = spec_of(out_dtype="fp8", sinks=True, scale_granularity="head", precision=precision)
    batch = batch_of(spec, k_scale=torch.rand(8, device="cuda") + 0.5, v_scale=torch.rand(8, device="cuda") + 0.5)
    assert errors(batch, run(batch)).rel <= OUT_FP8


@pytest.mark.parametrize("precision", ["fast", "exact"])
@pytest.mark.parametrize("lens, rows", [([9000], [70]), ([9000, 5000], [33, 128]), ([20000], [1])])
def test_items_that_are_cut_are_merged(precision, lens, rows):
    batch = batch_of(spec_of(lse=True, precision=precision), lens, rows)
    out, found = run(batch), errors(batch, run(batch))
    assert found.within(1.1) if precision == "exact" else found.rel <= 1.1 * floor_of(batch)
    assert all(same(out, run(batch)) for _ in range(20))


@pytest.mark.parametrize("tokens, rows", [(1000, 300), (16384, 128), (131072, 64)])
@pytest.mark.parametrize("kind", ["normal", "outlier channel of V", "common offset of keys"])
@pytest.mark.parametrize("precision", ["fast", "exact"])
def test_hard_inputs(kind, precision, tokens, rows):
    spec = spec_of(8, 2, precision=precision)
    batch = batch_of(spec, [tokens], [rows], k_scale=0.1, v_scale=0.5)
    k, v = batch.k.clone(), batch.v.clone()
    if kind == "outlier channel of V":
        v[..., 5] += 100.0
    elif kind == "common offset of keys":
        k += 3.0
    batch.cache.append(k, v, slots_of(batch.page_table, spec.page_size, [tokens]))
    out = run(batch)
    found, floor = errors(batch, out), floor_of(batch)
    print(f"HARD {kind}, {precision}, {tokens} tokens: {found.rel:.5f}, floor {floor:.5f}, bf16 {found.rel_bf16:.5f}, "
          f"largest {found.max_abs:.5f} and {found.max_abs_bf16:.5f}")  # fmt: skip
    assert found.within(1.1) if precision == "exact" else found.rel <= 1.1 * math.hypot(floor, found.rel_bf16)
    if kind == "outlier channel of V":  # it hides what the other channels lose
        others = torch.tensor([d for d in range(spec.head_dim) if d != 5], device="cuda")
        want, plain = (x[..., others].double() for x in (exact(batch)[0], plain_bf16(batch)))
        rel, rel_bf16 = (float((x - want).norm() / want.norm()) for x in (out[..., others].double(), plain))
        floor = 0.0 if precision == "exact" else floor_of(batch, others)
        print(
            f"HARD its other channels, {precision}, {tokens} tokens: {rel:.5f}, floor {floor:.5f}, bf16 {rel_bf16:.5f}"
        )
        assert rel <= 1.1 * math.hypot(floor, rel_bf16)


@pytest.mark.parametrize(
    "precision, dim", [("fast", 64), ("fast", 128), ("exact", 64), ("exact", 128), ("exact", 256)]
)  # fast of 256 has one accumulator
def test_a_mean_over_131072_tokens_loses_nothing(precision, dim):
    """All scores 0 and all values alike: one accumulator over all tokens would stop growing on the way."""
    spec = spec_of(4, 1, dim, precision=precision, out_dtype="float32")
    batch = batch_of(spec, [131072], [40], k_scale=1.0, v_scale=1.0)
    k, v = torch.zeros_like(batch.k), torch.full_like(batch.v, 0.8125)
    batch.cache.append(k, v, slots_of(batch.page_table, spec.page_size, [131072]))
    assert run(batch).sub(0.8125).abs().max() < 1e-5


@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("window", [None, 32])
def test_bytes_of_no_token_never_reach_a_result(page_size, window):
    lens, rows = [3, 13, 63, 64, 65, 127, 129, 1000], [3, 5, 63, 10, 40, 127, 129, 200]
    batch = batch_of(spec_of(64, page_size=page_size, window=window, lse=True), lens, rows)
    live = None
    if window is not None:
        live = [(b, t) for b, (n, r) in enumerate(zip(lens, rows, strict=True)) for t in range(max(0, n - r - 31), n)]
    nan, zero = cases.poisoned(batch, live)
    a, b = run(nan), run(zero)
    assert torch.equal(a, b) and bool(a.isfinite().all()) and torch.equal(nan.lse, zero.lse)


def test_padding_changes_nothing():
    live = batch_of(spec_of(lse=True, batch_invariant=True), [100, 3000, 700], [60, 300, 129])
    expected, expected_lse = run(live), live.lse
    total = expected.shape[0]
    ids = torch.tensor([-1, 2**31 - 1], dtype=torch.int32, device="cuda")
    padded = replace(
        live,
        q=torch.cat([live.q, live.q[:50]]),
        seq_lens=torch.cat([live.seq_lens, torch.tensor([0, -5], dtype=torch.int32, device="cuda")]),
        page_table=torch.cat([live.page_table, ids[:, None].expand(2, live.page_table.shape[1])]),
        query_starts=torch.cat([live.query_starts, torch.tensor([total + 20, total + 30], device="cuda")]).int(),
    )
    out = run(padded)
    assert torch.equal(out[:total], expected) and torch.equal(padded.lse[:total], expected_lse)
    assert not out[total:].any() and bool((padded.lse[total:] == -math.inf).all())


def test_pages_far_apart():
    """Case Z9: pages of 1,039,680 bytes from one to the next, 2.15 GiB in all, at the far end of the pool."""
    spec = spec_of(8, 2, lse=True)
    near = batch_of(spec, [13, 64 * 6 + 1, 64 * 7], [13, 200, 100])
    stride, far, pages = 1_039_680, 2066, near.cache.num_pages
    pool = torch.zeros(stride * (far + pages), dtype=torch.uint8, device="cuda")
    page = near.cache.memory.k_pool.numel() // pages
    pool.as_strided((pages, page), (stride, 1), far * stride).copy_(near.cache.memory.k_pool.view(pages, page))
    half = spec.page_size * spec.head_dim
    views = [
        pool.as_strided((far + pages, 2, *shape), (stride, 2 * half, shape[1], 1), offset)
        for shape, offset in (((64, 128), 0), ((128, 64), half))
    ]
    cache = PagedCache.view(spec, *views, **SCALES)
    assert torch.equal(run(replace(near, cache=cache, page_table=near.page_table + far)), run(near))


@pytest.mark.parametrize("precision", ["fast", "exact"])
def test_pages_that_are_not_there_are_not_seen(precision):
    batch = batch_of(spec_of(lse=True, precision=precision), [700, 100, 3000], [40, 33, 300])
    table = batch.page_table.clone()
    table[0, 3], table[0, 8], table[2, 40] = -1, 2**31 - 1, batch.cache.num_pages
    table[1, :2] = torch.tensor([-7, 2**31 - 1], dtype=torch.int32)
    holes = replace(batch, page_table=table)
    out = run(holes)
    found = errors(holes, out)
    assert found.within(1.1) if precision == "exact" else found.rel < 0.05
    assert not out[40:73].any() and bool((holes.lse[40:73] == -math.inf).all())


@pytest.mark.parametrize("precision", ["fast", "exact"])
def test_mixed_batches_in_one_call_and_in_a_graph(precision):
    """Decode rows go to decode by the plan, with what the host knows and without; replayed with other lengths."""
    spec = spec_of(64, max_query_len=2, lse=True, precision=precision)
    batch = batch_of(spec, [100, 300, 500, 900], [1, 2, 40, 300])
    attention = Attention(spec, max_batch=4, max_query_tokens=400, max_context=2048, device="cuda")
    truth, _ = exact(batch)
    decoded = slice(0, 3)
    for told in (None, 2):
        out = batch.run(attention=attention, num_decodes=told)
        assert (out[decoded].double() - truth[decoded]).norm() < 4e-3 * truth[decoded].norm()
        bound = 4e-3 if precision == "exact" else 0.05
        assert (out[3:].double() - truth[3:]).norm() < bound * truth[3:].norm()
    out, lse = torch.empty_like(out), torch.empty_like(batch.lse)

    def step() -> None:
        attention.plan(batch.seq_lens, batch.page_table, batch.query_starts)
        for _ in range(2):  # layers
            attention.run(batch.q, batch.cache, out=out, lse=lse)

    captured = Captured(step, batch.q.device)
    for lens in ([100, 300, 500, 900], [1, 2, 45, 310], [0, 300, 40, 0]):
        batch.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        out.view(torch.uint8).fill_(0xFF)
        captured.replay()
        expected = batch.run(attention=attention)
        assert torch.equal(out, expected) and torch.equal(lse, batch.lse)


def test_chunks_agree_with_the_whole():
    """Case Z5: 144 tokens at once, in chunks, the last of them alone."""
    spec = spec_of(8, 2, lse=True, precision="exact", out_dtype="float32")
    whole = batch_of(spec, [144], [144], k_scale=1 / 16, v_scale=1 / 2)
    expected = run(whole)
    assert errors(whole, expected).rel < 4e-3
    for chunks in ([128, 16], [64, 64, 16], [143, 1]):
        start = 0
        for n in chunks:
            rows = slice(start, start + n)
            part = replace(
                whole,
                q=whole.q[rows],
                seq_lens=torch.tensor([start + n], dtype=torch.int32, device="cuda"),
                query_starts=torch.tensor([0, n], dtype=torch.int32, device="cuda"),
            )
            assert (run(part) - expected[rows]).norm() < 4e-3 * expected[rows].norm()
            start += n


def test_exact_prefill_and_decode_agree_within_bf16():
    """What decode gives for the last row is what prefill gave, so that log-probabilities do not jump."""
    from octavo.kernels.gluon.decode import decode

    spec = spec_of(precision="exact")
    batch = batch_of(spec, [3000, 777, 64], [300, 17, 64])
    last = batch.query_starts[1:] - 1
    rows = run(batch)[last].float()
    one = replace(batch, q=batch.q[last], query_starts=torch.arange(4, dtype=torch.int32, device="cuda"))
    bounds = (3, 3, one.page_table.shape[1] * spec.page_size)
    size = hopper_tuning.decode_workspace_bytes(spec, Device.detect(batch.q.device), *bounds)
    out = torch.empty_like(batch.q[last])
    decode(one.call(out, None, torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda"), 3, 1))
    assert (rows - out.float()).norm() < 2.0**-8 * rows.norm()


@pytest.mark.parametrize("tail_weight", [1.0, 1.0625, 1.1875])
@pytest.mark.parametrize("at", [0, 65536, 131070])
def test_a_sink_and_a_long_flat_tail(tail_weight, at):
    """Case Z16: exact keeps the tail; fast, whose P is relative to the running maximum, rounds it away."""
    spec = AttentionSpec(4, 1, 128, out_dtype="float32", precision="exact")
    batch, right = cases.long_flat_tail(spec, 131072, at, tail_weight, rows=2, device="cuda")
    assert run(batch)[-1].sub(right).abs().max() < 2.0**-9 * right


@pytest.mark.parametrize("sink", [-math.inf, 0.0, math.log(3.0)])
@pytest.mark.parametrize("precision", ["fast", "exact"])
def test_sinks_and_scales_in_closed_form(sink, precision):
    spec = spec_of(out_dtype="float32", precision=precision)
    batch, right = cases.sink_probe(spec, sink, device="cuda")
    assert run(batch).sub(right).abs().max() < 1e-3 * right
    batch, right = cases.scale_probe(spec, rows=3, device="cuda")
    assert run(batch)[-1].sub(right).abs().max() < (2e-3 if precision == "exact" else 2.0**-4)
