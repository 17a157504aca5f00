"""The indexer on a GPU, over backends: the same grids as under the interpreter, closed forms, graphs, garbage."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from indexer_cases import (
    INF,
    LOSS,
    NAN,
    AppendCase,
    PagedCase,
    RaggedCase,
    TopkCase,
    compare_append,
    compare_paged,
    compare_ragged,
    compare_topk,
    paged_call,
    planted_rows,
    topk_logits,
)

import octavo
from octavo.backends import WRITTEN
from octavo.formats import FORMATS, quantise, token_scale
from octavo.indexer import fold_query_scale, token_slots, visible_lengths
from octavo.indexer_calls import IndexBytes
from octavo.indexer_choose import choose_operation
from octavo.ops import kernel
from octavo.spec import IndexerSpec
from octavo.testing.graphs import Captured

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here")]

E4M3 = torch.float8_e4m3fn
CUDA = torch.device("cuda")
LOGITS = [name for name in WRITTEN if "mqa_logits" in WRITTEN[name]]
TOPK = [name for name in WRITTEN if "topk" in WRITTEN[name]]
APPEND = [name for name in WRITTEN if "index_append" in WRITTEN[name] and name != "reference"]


def int32(*values):
    return torch.tensor(values, dtype=torch.int32, device=CUDA)


def allowed(operation, backend, **fields):
    """Skips, with the backend's own reasons, what it refuses."""
    try:
        choose_operation(IndexerSpec(**fields), octavo.Device.detect("cuda"), operation, backend)
    except octavo.Unsupported as refused:
        pytest.skip("; ".join(refused.reasons))


def function(backend, operation):
    """An operation of a backend as its kernels have it."""
    return kernel(backend, "mqa_logits", operation)


APPENDS = [
    AppendCase(scale_format="fp32", rows=300),
    AppendCase(scale_format="pow2", dtype=torch.float16, strided=True),
    AppendCase(64, 128, "ue8m0", torch.float32, rows=5000),
    AppendCase(rows=1, wild=False),
]


@pytest.mark.parametrize("case", APPENDS, ids=str)
@pytest.mark.parametrize("backend", APPEND)
def test_append_equals_the_reference(case, backend):
    assert compare_append(case, kernel(backend, "index_append"), "cuda") == []


PAGED = [
    PagedCase(),
    PagedCase(n=2, lens=(0, 700, 64, 5000, 31, 129), max_context=5100),
    PagedCase(n=4, lens_form="strided", fill=None, lens=(700, 5, 1300), max_context=1400),
    PagedCase(n=7, heads=32, lens=(300, 65), fill=-1.0, max_context=400),
    PagedCase(heads=128, n=3, lens=(300, 65, 0)),
    PagedCase(heads=16, n=8, dim=64, lens=(200, 65), page_size=32),
    PagedCase(page_size=16, n=2, scale_format="ue8m0", lens=(200, 33), hole=True),
    PagedCase(page_size=128, scale_format="pow2", lens=(900, 128, 129), max_context=1000, hole=True),
    PagedCase(heads=24, lens=(130, 70), out=torch.bfloat16, strided=True),
    PagedCase(lens=tuple(i * 7 % 400 for i in range(700)), max_context=400, fill=None),
]


@pytest.mark.parametrize("case", PAGED, ids=str)
@pytest.mark.parametrize("backend", LOGITS)
def test_paged_logits_equal_the_reference(case, backend):
    fields = {"num_heads": case.heads, "head_dim": case.dim, "page_size": case.page_size, "max_query_len": case.n}
    out = str(case.out).removeprefix("torch.")
    allowed("paged_mqa_logits", backend, scale_format=case.scale_format, out_dtype=out, **fields)
    assert compare_paged(case, function(backend, "paged_mqa_logits"), "cuda", LOSS[backend]) == []


RAGGED = [
    RaggedCase(),
    RaggedCase(rows=300, keys=700, causal=True, width=700, fill=None),
    RaggedCase(rows=70, keys=900, compressed=True, width=950, heads=32),
    RaggedCase(rows=33, keys=300, compressed=True, width=40, out=torch.bfloat16),
    RaggedCase(rows=5, keys=5000, heads=128, width=5000, causal=True),
    RaggedCase(rows=40, keys=130, heads=16, dim=64),
]


@pytest.mark.parametrize("case", RAGGED, ids=str)
@pytest.mark.parametrize("backend", LOGITS)
def test_ragged_logits_equal_the_reference(case, backend):
    out = str(case.out).removeprefix("torch.")
    allowed("mqa_logits", backend, num_heads=case.heads, head_dim=case.dim, out_dtype=out)
    assert compare_ragged(case, function(backend, "mqa_logits"), "cuda", LOSS[backend]) == []


@pytest.mark.parametrize("backend", LOGITS)
def test_closed_forms(backend):
    """Z15: K = 1, q = 1/128, scales 2^-(t mod 8), exact 20 times over NaN; head dots 3 and -5 with weights 1 and 1."""
    length, context = 1000, 1088
    cache = octavo.IndexerCache.allocate(17)
    table = torch.arange(17, dtype=torch.int32, device=CUDA).flip(0)[None].contiguous()
    t = torch.arange(length, device=CUDA)
    expected = 2.0 ** -(t % 8)
    cache.append((448 * expected)[:, None].expand(-1, 128), table[0].long()[t // 64] * 64 + t % 64)
    cache.pages.flatten(1)[:, : 64 * 128] = torch.ones(1).to(E4M3).view(torch.uint8).item()
    q = torch.full((1, 1, 64, 128), 1 / 128, device=CUDA).to(E4M3)
    weights = torch.full((1, 64), 1 / 64, device=CUDA)
    lens = int32(length)
    for _ in range(20):
        out = torch.full((1, context), NAN, device=CUDA)
        octavo.paged_mqa_logits(q, cache, weights, lens, table, context, out=out, backend=backend)
        assert torch.equal(out[0, :length], expected) and out[0, length:].isnan().all()
    q = torch.zeros(1, 64, 128, device=CUDA)
    q[0, 0, 0], q[0, 1, 0] = 3.0, -5.0
    k = torch.eye(1, 128, device=CUDA).to(E4M3)
    for pair, value in (((1, 1), 3.0), ((1, -1), 3.0), ((-2, 1), -6.0)):
        weights = torch.zeros(1, 64, device=CUDA)
        weights[0, :2] = torch.tensor(pair)
        ones = torch.ones(1, device=CUDA)
        logits = octavo.mqa_logits(q.to(E4M3), k, ones, weights, int32(0), int32(1), backend=backend)
        assert logits.tolist() == [[value]]


@pytest.mark.parametrize("backend", LOGITS)
def test_deepgemms_own_bounds(backend):
    """The difference 1 - 2 <x, y> / (<x, x> + <y, y>): < 1e-3 to the unquantised formula, < 5e-6 to the quantised."""
    generator = torch.Generator(CUDA).manual_seed(3)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=CUDA)

    q, k, weights = normal(64, 64, 128), normal(4096, 128), normal(64, 64)
    q_scale = token_scale(q, FORMATS["fp8_e4m3"])
    k_scale = token_scale(k, FORMATS["fp8_e4m3"])
    q8 = quantise(q, q_scale[..., None], FORMATS["fp8_e4m3"]).view(E4M3)
    k8 = quantise(k, k_scale[:, None], FORMATS["fp8_e4m3"]).view(E4M3)
    folded = fold_query_scale(weights, q_scale)
    starts, ends = int32(*[0] * 64), int32(*[4096] * 64)
    got = octavo.mqa_logits(q8, k8, k_scale, folded, starts, ends, backend=backend).double()

    def formula(q, k):
        return (torch.einsum("shd,td->sht", q.double(), k.double()).relu() * weights.double()[..., None]).sum(1)

    for bound, want in (
        (1e-3, formula(q, k)),
        (5e-6, formula(q8.float() * q_scale[..., None], k8.float() * k_scale[:, None])),
    ):
        assert float(1 - 2 * (got * want).sum() / (got * got + want * want).sum()) < bound


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("backend", LOGITS)
def test_a_graph_replays_at_other_lengths_and_20_times_bit_equal(backend, n):
    """Captured at short lengths; replayed up to 131,072 with garbage in page tables; equal to a call outside."""
    batch, context, pages = 5, 131072, 4096
    cache = octavo.IndexerCache.allocate(pages)
    for first in range(0, pages * 64, 65536):
        k = torch.randn(65536, 128, device=CUDA)
        cache.append(k, torch.arange(first, first + 65536, device=CUDA))
    q = torch.randn(batch, n, 64, 128, device=CUDA).to(E4M3)
    weights = torch.randn(batch * n, 64, device=CUDA)
    lens, table = int32(3, 64, 0, 1, 70), torch.randint(0, pages, (batch, context // 64), device=CUDA).int()
    out = torch.full((batch * n, context), NAN, device=CUDA)
    chosen = torch.empty((batch * n, 2048), dtype=torch.int32, device=CUDA)
    slots = torch.empty((batch * n, 2048), dtype=torch.int64, device=CUDA)

    def step():
        octavo.paged_mqa_logits(q, cache, weights, lens, table, context, out=out, fill=-INF, backend=backend)
        octavo.topk_indices(out, visible_lengths(lens, n), 2048, out=chosen)
        slots.copy_(token_slots(chosen, table, 64, n))

    graph = Captured(step, CUDA)
    for lengths in ((131072, 5000, 0, 1, 777), (1, 2, 3, 4, 5), (20000, 131072, 131071, 64, 65)):
        lens.copy_(int32(*lengths))
        whole = table.clone()
        for row, length in enumerate(lengths):
            whole[row, -(-length // 64) :] = (-1, 2**31 - 1, -(2**31), pages, -7)[row]
        table.copy_(whole)
        out.fill_(NAN)
        graph.replay()
        first = (out.clone(), chosen.clone(), slots.clone())
        want = octavo.paged_mqa_logits(q, cache, weights, lens, table, context, fill=-INF, backend=backend)
        assert torch.equal(first[0], want)
        reference = torch.empty_like(chosen)
        kernel("reference", "topk", "topk_indices")(want, visible_lengths(lens, n), reference)
        assert torch.equal(first[1], reference)
        seen = visible_lengths(lens, n)[:, None]
        assert (first[1] < seen.clamp(min=1)).all() and ((first[2] >= 0) == (first[1] >= 0)).all()
        for _ in range(20):
            graph.replay()
            for a, b in zip(first, (out, chosen, slots), strict=True):
                assert torch.equal(a, b)
        table.copy_(torch.randint(0, pages, table.shape, device=CUDA).int())


@pytest.mark.parametrize("backend", LOGITS)
def test_lengths_beyond_the_table_and_rows_past_the_batch_never_fault(backend):
    case = PagedCase(n=2, lens=(130, 70, 300), max_context=100_000)
    allowed("paged_mqa_logits", backend, max_query_len=2)
    call = paged_call(case, "cuda")
    call = replace(call, page_table=torch.full_like(call.page_table, 2**31 - 1))
    paged = function(backend, "paged_mqa_logits")
    for lens in (int32(2**31 - 1, -(2**31), 10**6), int32(0, 0, 0)):
        paged(replace(call, seq_lens=lens))
        torch.cuda.synchronize()
        assert not (call.out[:, :100_000] > -INF).any()


TOPKS = [
    *(TopkCase(5, 131072, 2048, kind) for kind in ("normal", "ties", "zeros", "sorted", "infinities", "wide", "equal")),
    TopkCase(64, 20000, 2048, "ties", torch.bfloat16),
    TopkCase(700, 9000, 512, "zeros"),
    TopkCase(3, 5000, 2048),
    TopkCase(9, 700, 64, "ties"),
    TopkCase(2, 1_000_000, 2048, "normal", full=True),
    TopkCase(1, 40000, 8192, "wide"),
    *(TopkCase(140, 20000, 2048, "wide", dtype) for dtype in (torch.float32, torch.bfloat16)),
    TopkCase(64, 131072, 2048, "normal", full=True),
    *(TopkCase(64, 8192, 2048, kind, full=True) for kind in ("normal", "ties")),
]


@pytest.mark.parametrize("case", TOPKS, ids=str)
@pytest.mark.parametrize("backend", TOPK)
def test_topk_equals_the_reference(case, backend):
    assert compare_topk(case, kernel(backend, "topk", "topk_indices"), "cuda") == []


@pytest.mark.parametrize("small", ["registers", "lists"])
@pytest.mark.parametrize("rows", [5, 140])
def test_topk_where_registers_or_lists_are_too_small(rows, small, monkeypatch):
    """Candidates that registers do not hold are compacted, or the row is searched, as where lists do not hold them."""
    from octavo.kernels.triton import topk

    def plan(*shape):
        c, groups = topk_plan(*shape)
        assert (c.slices > 1) == (rows == 5)
        return replace(c, **({"size": 1024} if small == "registers" else {"listed": 256})), groups

    topk_plan = topk.plan
    monkeypatch.setattr(topk, "plan", plan)
    for kind in ("normal", "ties", "zeros", "wide"):
        assert compare_topk(TopkCase(rows, 20000, 2048, kind), topk.topk_indices, "cuda") == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [64, 192])
def test_topk_of_rows_that_exceed_registers_as_planned(rows, dtype):
    """Rows with too many candidates, with too many equals of the k-th, and with too few, and which path they take."""
    from octavo.kernels.triton import topk

    width, k, size = 131072, 2048, 4096
    logits, lens, kinds = planted_rows(rows, width, k, size, dtype)
    want, out = (torch.full((rows, k), -7, dtype=torch.int32) for _ in range(2))
    kernel("reference", "topk", "topk_indices")(logits, lens, want)
    out = out.cuda()
    launches = topk.launches(logits.cuda(), lens.cuda(), out, octavo.Device.detect("cuda"))
    for compiled, programs, arguments in launches:
        compiled[(programs,)](**arguments)
    assert torch.equal(out.cpu(), want)
    bounds = launches[0][2]["scratch"].bounds.cpu()
    candidates = (logits.float() >= bounds[:, :1]).sum(1)
    assert launches[0][2]["c"].size == size
    assert (candidates[kinds < 2] > size).all() and (candidates[kinds == 2] < k).any()


@pytest.mark.parametrize(("rows", "width"), [(64, 131072), (140, 20000), (7, 8192), (1, 1 << 20)])
def test_topk_repeats_are_bit_equal(rows, width):
    """Also on two streams at once, each with scratch of its own."""
    logits = torch.randn(rows, width, device=CUDA).round(decimals=2)
    lens = torch.full((rows,), width, dtype=torch.int32, device=CUDA)
    want = torch.empty((rows, 2048), dtype=torch.int32, device=CUDA)
    kernel("reference", "topk", "topk_indices")(logits, lens, want)
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    for _ in range(10):
        found = [octavo.topk_indices(logits, lens, 2048, backend="triton")]
        with torch.cuda.stream(other):
            found.append(octavo.topk_indices(logits, lens, 2048, backend="triton"))
        torch.cuda.synchronize()
        assert all(torch.equal(got, want) for got in found)


@pytest.mark.parametrize("backend", TOPK)
def test_topk_beyond_32_bit_offsets(backend):
    """Rows that start more than 2^31 elements into the logits."""
    rows, width = 5, 600_000_000
    logits = torch.full((rows, width), 5.0, dtype=torch.bfloat16, device=CUDA)
    case = TopkCase(rows, 20000, 512, "ties", torch.bfloat16)
    small, lens = topk_logits(case)
    logits[:, :20000] = small.to(CUDA)
    got = octavo.topk_indices(logits[:, :20000], lens.to(CUDA), 512, backend=backend)
    want = torch.empty((rows, 512), dtype=torch.int32)
    kernel("reference", "topk", "topk_indices")(small, lens, want)
    assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("backend", LOGITS)
def test_pages_beyond_32_bit_offsets(backend):
    """The same bytes at the first pages and behind 2.5 GB of pool give the same logits."""
    pages = 300_000
    cache = octavo.IndexerCache.allocate(pages)
    k = torch.randn(200, 128, device=CUDA)
    t = torch.arange(200, device=CUDA)
    q, weights = torch.randn(1, 1, 64, 128, device=CUDA).to(E4M3), torch.randn(1, 64, device=CUDA)
    found = []
    for first in (0, pages - 4):
        cache.append(k, first * 64 + t)
        table = torch.arange(first, first + 4, dtype=torch.int32, device=CUDA)[None]
        found.append(octavo.paged_mqa_logits(q, cache, weights, int32(200), table, 256, fill=0.0, backend=backend))
    assert torch.equal(*found)
    assert IndexBytes(cache.pages, "fp32").scales()[-1, 7].any()
