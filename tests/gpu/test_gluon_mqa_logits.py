"""Hopper's indexer logits on a GPU against the reference in fp64, and what no schedule and no neighbour may change."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from octavo.formats import FORMATS, cast
from octavo.indexer_calls import SCALE_BYTES, IndexBytes, LogitsCall, PagedLogitsCall
from octavo.reference import mqa_logits as reference
from octavo.testing.graphs import Captured

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="torch sees no Hopper GPU here")]

E4M3 = FORMATS["fp8_e4m3"]
LENS = (0, 1, 63, 64, 65, 129, 1000, 3001)
UNTOUCHED = 7.0e30
NOT_PAGES = (-1, 2**31 - 1, -(2**31), 12345678)


def e4m3(*shape: int) -> torch.Tensor:
    """Random elements, as a quantised row has them."""
    return cast(torch.randn(shape, device="cuda") * 60, E4M3).view(torch.float8_e4m3fn)


def paged(
    lens=LENS, n=1, heads=64, dim=128, page=64, scales="fp32", matrix=False, fill=None, out=torch.float32, hole=False
) -> PagedLogitsCall:
    """A call over shuffled pages; page ids beyond each length are no pages, with `hole` some before it too."""
    torch.manual_seed(len(lens) + n)
    batch, width = len(lens), max(1, -(-max(lens) // page)) + 2
    counts = [-(-length // page) for length in lens]
    pool = torch.empty(sum(counts) + 3, page * (dim + SCALE_BYTES), dtype=torch.uint8, device="cuda")
    pool[:, : page * dim] = e4m3(len(pool), page * dim).view(torch.uint8)
    if scales == "ue8m0":
        exponents = torch.randint(110, 130, (len(pool), page, 1), device="cuda", dtype=torch.uint8)
        pool[:, page * dim :] = exponents.expand(-1, -1, SCALE_BYTES).flatten(1)
    else:
        pool[:, page * dim :] = (torch.rand(len(pool), page, device="cuda") + 0.1).view(torch.uint8)
    table = torch.tensor(NOT_PAGES, dtype=torch.int32)[torch.randint(0, 4, (batch, width))]
    order = torch.randperm(len(pool), dtype=torch.int32).split([*counts, 3])
    for row, count in enumerate(counts):
        table[row, :count] = order[row]
        if hole and count > 2:
            table[row, 1] = NOT_PAGES[row % 4]
    seq_lens = torch.tensor(lens, dtype=torch.int32, device="cuda")
    if matrix:
        seq_lens = (seq_lens[:, None] - torch.randint(0, 70, (batch, 2 * n), device="cuda")).to(torch.int32)[:, ::2]
    context = max(1, max(lens))
    return PagedLogitsCall(
        e4m3(batch, n, heads, dim),
        IndexBytes(pool.view(len(pool), page, 1, dim + SCALE_BYTES), scales),
        torch.randn(batch * n, heads, device="cuda"),
        seq_lens,
        table.cuda(),
        context,
        torch.full((batch * n, context + 77), UNTOUCHED, device="cuda").to(out),
        fill,
    )


def ragged(rows=37, keys=1003, heads=64, dim=128, fill=None, compressed=False, width=None) -> LogitsCall:
    """A call over random ranges, backwards ones and ones beyond the keys among them."""
    torch.manual_seed(rows + keys)
    starts = torch.randint(-5, keys // 2, (rows,), device="cuda")
    ends = starts + torch.randint(-3, keys // 2, (rows,), device="cuda")
    starts[0], ends[0] = 0, keys + 9
    return LogitsCall(
        e4m3(rows, heads, dim),
        e4m3(keys, dim),
        torch.rand(keys, device="cuda") + 0.1,
        torch.randn(rows, heads, device="cuda"),
        starts.to(torch.int32),
        ends.to(torch.int32),
        torch.full((rows, width or keys + 13), UNTOUCHED, device="cuda"),
        fill,
        compressed,
    )


def run(call: PagedLogitsCall | LogitsCall) -> torch.Tensor:
    from octavo.kernels.gluon import mqa_logits

    (mqa_logits.paged_mqa_logits if isinstance(call, PagedLogitsCall) else mqa_logits.mqa_logits)(call)
    return call.out


def wrong(call: PagedLogitsCall | LogitsCall) -> list[str]:
    """What is wrong with the logits of `call`: compared with fp64, and untouched or filled where none belongs.

    A score is rounded to 8 significant bits: half of 2^-8 for each term, no more for their sum of absolute values.
    """
    function = reference.paged_mqa_logits if isinstance(call, PagedLogitsCall) else reference.mqa_logits
    want = call.out.double()
    before = want.clone()
    function(replace(call, out=want), torch.float64)
    sizes = torch.zeros_like(want)
    function(replace(call, out=sizes, weights=call.weights.abs(), fill=None), torch.float64)
    out = run(call).double()
    logits = want.isfinite() & (want != before) & (want != (call.fill if call.fill is not None else before))
    same = torch.where(want.isnan(), out.isnan(), out == want)
    found = [] if same[~logits].all() else [f"{int((~same & ~logits).sum())} columns without a logit"]
    unit = 2.0**-8 if call.out.dtype == torch.float32 else 2.0**-7
    beyond = logits & ~((out - want).abs() <= unit * sizes.abs() + 1e-30)
    if beyond.any():
        found.append(f"{int(beyond.sum())} logits of {int(logits.sum())}")
    a, b = out[logits], want[logits]
    difference = float(1 - 2 * (a * b).sum() / (a * a + b * b).sum()) if logits.any() else 0.0
    if not difference < (5e-6 if call.out.dtype == torch.float32 else 2e-5):  # the measure of DeepGEMM's own tests
        found.append(f"difference {difference:.1e}")
    return found


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"lens": (5000,)},
        {"lens": (0, 0, 0), "n": 2, "fill": -math.inf},
        {"n": 2, "fill": -math.inf, "hole": True},
        {"n": 3, "matrix": True, "hole": True},
        {"n": 4, "out": torch.bfloat16, "fill": 0.0},
        {"n": 5},
        {"n": 6, "matrix": True, "page": 32},
        {"n": 8, "heads": 32, "dim": 64, "page": 32, "hole": True},
        {"n": 4, "heads": 16, "page": 128, "scales": "ue8m0", "hole": True},
        {"heads": 16, "dim": 64, "page": 128},
        {"n": 2, "heads": 128},
        {"lens": tuple(0 if i % 7 else 70 * (i % 11) for i in range(300)), "fill": -1.0},
        {"lens": tuple(i * 37 % 300 for i in range(1500)), "n": 2},
    ],
    ids=lambda fields: "-".join(f"{k}={len(v) if k == 'lens' else v}" for k, v in fields.items()) or "plain",
)
def test_paged_logits_and_bit_equal_each_time(fields):
    call = paged(**fields)
    assert wrong(call) == []
    first = call.out.clone()
    for _ in range(20):
        assert torch.equal(run(call).view(torch.uint8), first.view(torch.uint8))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"fill": -2.0},
        {"compressed": True, "fill": -math.inf, "width": 300},
        {"rows": 3000, "keys": 500},
        {"heads": 128, "rows": 9},
        {"heads": 16, "rows": 5, "keys": 64},
        {"heads": 32, "dim": 64},
    ],
    ids=str,
)
def test_ragged_logits(fields):
    assert wrong(ragged(**fields)) == []


def test_a_prefill_of_a_causal_prompt():
    call = ragged(rows=700, keys=700)
    ends = torch.arange(1, 701, device="cuda", dtype=torch.int32)
    assert wrong(replace(call, starts=torch.zeros_like(ends), ends=ends)) == []


def test_nan_in_a_query_spoils_no_other_row_and_in_a_key_no_other_logit():
    """Four rows share a tile, and their scores a product."""
    clean = ragged(rows=8, keys=200)
    spoilt = replace(clean, q=clean.q.clone(), k=clean.k.clone(), out=clean.out.clone())
    spoilt.q.view(torch.uint8)[2, 3, 7] = 0x7F
    spoilt.k.view(torch.uint8)[17, 5] = 0xFF
    a, b = run(clean), run(spoilt)
    rows = torch.arange(8, device="cuda") != 2
    columns = torch.arange(a.shape[1], device="cuda") != 17
    assert torch.equal(a[rows][:, columns], b[rows][:, columns])
    sees = a != UNTOUCHED
    assert bool(b[2][sees[2]].isnan().all()) and bool(b[:, 17][sees[:, 17]].isnan().all())


def test_exact_where_few_bits_say_it_all():
    """K = 1, scales 2^-(t mod 8); heads with dots 3 and -5 under weights 1 and 1 give 3; a negative weight counts."""
    keys = torch.ones(200, 128, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.exp2(-(torch.arange(200, device="cuda") % 8).float())
    q = torch.zeros(2, 64, 128, device="cuda")
    q[0, 0, 0], q[0, 1, 0], q[1, 5], q[1, 6], q[1, 7] = 3.0, -5.0, 1 / 128, -1 / 16, 1 / 64
    weights = torch.zeros(2, 64, device="cuda")
    weights[0, :2], weights[1, 5:8] = 1.0, torch.tensor([1.0, 1.0, -0.75])
    starts, ends = (torch.full((2,), x, dtype=torch.int32, device="cuda") for x in (0, 200))
    out = torch.full((2, 256), math.nan, device="cuda")
    run(LogitsCall(q.to(torch.float8_e4m3fn), keys, scales, weights, starts, ends, out, None, False))
    assert torch.equal(out[0, :200], 3 * scales) and torch.equal(out[1, :200], -0.5 * scales)
    assert bool(out[:, 200:].isnan().all())


@pytest.mark.parametrize("n", [1, 2])
def test_a_graph_replays_any_lengths(n):
    call = paged([3000, 0, 64, 1500, 3840], n=n, fill=-math.inf)
    captured = Captured(lambda: run(call), call.q.device)
    for lens in ([3000, 0, 64, 1500, 3840], [0] * 5, [1, 0, 2, 3, 700], [-3, 0, 10**9, 1, 64]):
        call.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32))
        call.out.fill_(math.nan)
        captured.replay()
        replayed = call.out.clone()
        call.out.fill_(math.nan)
        assert wrong(call) == []
        assert torch.equal(replayed.view(torch.uint8), call.out.view(torch.uint8))


def test_rows_of_padding_change_nothing():
    """Padded rows of a graph: any bytes as their query, no length, no pages."""
    live = paged([100, 3000, 64], n=2)
    expected = run(live).clone()
    padding = torch.full((2, 2, 64, 128), 0x7F, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    padded = replace(
        live,
        q=torch.cat([live.q, padding]),
        weights=torch.cat([live.weights, torch.full((4, 64), math.nan, device="cuda")]),
        seq_lens=torch.cat([live.seq_lens, torch.tensor([0, -5], dtype=torch.int32, device="cuda")]),
        page_table=torch.cat([live.page_table, torch.full_like(live.page_table[:2], -1)]),
        out=torch.full((10, live.out.shape[1]), UNTOUCHED, device="cuda"),
    )
    out = run(padded)
    assert torch.equal(out[:6], expected) and bool((out[6:] == UNTOUCHED).all())


def test_keys_and_queries_of_any_strides():
    call = ragged(rows=9, keys=300)
    strided = replace(
        call,
        q=call.q.transpose(0, 1).contiguous().transpose(0, 1),
        k=torch.cat([call.k.view(torch.uint8)] * 2, 1).view(torch.float8_e4m3fn)[:, :128],
        k_scale=torch.cat([call.k_scale[:1], call.k_scale])[1:],
        weights=call.weights.t().contiguous().t(),
        out=call.out.t().contiguous().t(),
    )
    assert torch.equal(run(strided), run(call))
