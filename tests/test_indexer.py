"""The indexer on the reference backend: closed forms, edge cases, and equality with the formula in float64."""

from __future__ import annotations

import pytest
import torch

import octavo
from octavo import indexer_ops
from octavo.formats import FORMATS, quantise, token_scale
from octavo.indexer import fold_query_scale, token_slots, visible_lengths
from octavo.indexer_calls import IndexBytes, LogitsCall, PagedLogitsCall
from octavo.reference import mqa_logits as reference
from octavo.reference.topk import topk_indices

E4M3 = torch.float8_e4m3fn
NAN, INF = float("nan"), float("inf")


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def filled_cache(lengths, page_size=64, head_dim=128, scale_format="fp32", seed=0):
    """A cache of random keys on shuffled pages, its page table with garbage beyond the lengths, and the keys."""
    generator = torch.Generator().manual_seed(seed)
    per_sequence = max(1, -(-max(lengths) // page_size)) + 1
    num_pages = per_sequence * len(lengths) + 3
    order = torch.randperm(num_pages, generator=generator).to(torch.int32)
    table = order[: per_sequence * len(lengths)].reshape(len(lengths), per_sequence).clone()
    cache = octavo.IndexerCache.allocate(num_pages, head_dim, page_size, scale_format, device="cpu")
    cache.pages.fill_(0x7F)  # NaN wherever no token is
    keys = []
    for row, length in enumerate(lengths):
        k = torch.randn(length, head_dim, generator=generator)
        t = torch.arange(length)
        cache.append(k, table[row].long()[t // page_size] * page_size + t % page_size)
        table[row, -(-length // page_size) :] = int32(-1, 2**31 - 1, -(2**31))[row % 3]
        keys.append(k)
    return cache, table, keys


def random_query(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(E4M3)


@pytest.mark.parametrize("scale_format", ["fp32", "pow2", "ue8m0"])
@pytest.mark.parametrize(("page_size", "head_dim"), [(64, 128), (16, 64)])
def test_page_bytes_are_keys_then_scales(scale_format, page_size, head_dim):
    cache = octavo.IndexerCache.allocate(3, head_dim, page_size, scale_format, device="cpu")
    assert cache.pages.shape == (3, page_size, 1, head_dim + 4)
    k = torch.randn(2, head_dim) * torch.tensor([[1.0], [300.0]])
    cache.append(k, torch.tensor([2 * page_size + 5, 0]))
    scale = k.abs().amax(1) / 448
    if scale_format != "fp32":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    for row, (page, offset) in enumerate([(2, 5), (0, 0)]):
        flat = cache.pages[page].flatten()
        assert torch.equal(flat[offset * head_dim :][:head_dim].view(E4M3), (k[row] / scale[row]).to(E4M3))
        stored = flat[page_size * head_dim + 4 * offset :][:4]
        if scale_format == "ue8m0":
            assert stored.tolist() == [int(torch.log2(scale[row])) + 127] * 4
        else:
            assert stored.view(torch.float32).item() == scale[row]
    assert not cache.pages[1].any()


def test_a_power_of_two_scale_is_kept_and_the_next_number_is_doubled():
    above = torch.nextafter(torch.tensor(448.0), torch.tensor(INF)).item()
    for amax, scale in ((448.0, 1.0), (above, 2.0), (224.0, 0.5), (448 * 2.0**-20, 2.0**-20)):
        cache = octavo.IndexerCache.allocate(1, 64, 16, "pow2", device="cpu")
        cache.append(torch.full((1, 64), amax), torch.tensor([0]))
        assert cache.pages.flatten()[16 * 64 :][:4].view(torch.float32).item() == scale


def test_append_edge_cases():
    cache = octavo.IndexerCache.allocate(2, 64, 16, device="cpu")
    k = torch.ones(4, 64)
    k[1, 3], k[1, 4] = NAN, INF
    k[2] = 0
    cache.append(k, torch.tensor([0, 17, 1, -1]))
    read = cache.gather(int32(0, 1), 32)
    assert torch.equal(read[0], torch.ones(64))
    assert read[17, 3] == 0 and read[17, 4] == 1  # an infinity is the largest of the others
    assert not read[1].any() and read[2:16].abs().sum() == 0
    assert cache.counters.tolist() == [0, 1]
    before = cache.pages.clone()
    with pytest.raises(octavo.InvalidInput, match=r"slots must be -1 or in \[0, 32\); came 32"):
        cache.append(k, torch.tensor([1, 32, 2, 3]))
    assert torch.equal(cache.pages, before)


def test_append_takes_strided_keys_and_writes_an_engines_padded_pages():
    pool = torch.full((4, 16 * 132 + 64), 0xAB, dtype=torch.uint8)
    pages = pool.as_strided((4, 16, 1, 132), (pool.stride(0), 132, 132, 1))
    cache = octavo.IndexerCache.view(pages)
    k = torch.randn(128, 7).t()
    slots = torch.arange(7) + 3 * 16
    cache.append(k, slots)
    own = octavo.IndexerCache.allocate(4, 128, 16, device="cpu")
    own.append(k.contiguous(), slots)
    assert torch.equal(cache.gather(int32(3), 7), own.gather(int32(3), 7))
    assert (pool[:, 16 * 132 :] == 0xAB).all() and (pool[:3] == 0xAB).all()


def test_view_names_what_came():
    with pytest.raises(octavo.InvalidInput, match="uint8; came fp8_e4m3"):
        octavo.IndexerCache.view(torch.zeros(2, 64, 132, dtype=torch.uint8).view(E4M3))
    with pytest.raises(octavo.InvalidInput, match="contiguous"):
        octavo.IndexerCache.view(torch.zeros(2, 128, 132, dtype=torch.uint8)[:, ::2])
    with pytest.raises(octavo.InvalidInput, match="multiples of 4"):
        octavo.IndexerCache.view(
            torch.zeros(2, 64 * 132 + 2, dtype=torch.uint8).as_strided((2, 64, 132), (8450, 132, 1))
        )
    with pytest.raises(octavo.InvalidInput, match="fp32, pow2, ue8m0; came 'mx'"):
        octavo.IndexerCache.allocate(1, device="cpu", scale_format="mx")


def test_closed_form_of_scales_is_exact():
    """K = 1, q = 1/128, scales 2^-(t mod 8): the logit of token t is its scale, in a buffer full of NaN, 20 times."""
    length, context = 1000, 1088
    cache = octavo.IndexerCache.allocate(17, device="cpu")
    table = torch.arange(17, dtype=torch.int32).flip(0)[None]
    t = torch.arange(length)
    expected = 2.0 ** -(t % 8)
    # amax / 448 is the scale, so an element of 448 s stores 448 at scale s: the other bytes are set to ones below.
    cache.append((448 * expected)[:, None].expand(-1, 128), table[0].long()[t // 64] * 64 + t % 64)
    cache.pages.flatten(1)[:, : 64 * 128] = torch.ones(1).to(E4M3).view(torch.uint8)
    q = torch.full((1, 1, 64, 128), 1 / 128).to(E4M3)
    weights = torch.full((1, 64), 1 / 64)
    first = None
    for _ in range(20):
        out = torch.full((1, context), NAN)
        octavo.paged_mqa_logits(q, cache, weights, int32(length), table, context, out=out)
        assert torch.equal(out[0, :length], expected) and out[0, length:].isnan().all()
        first = out if first is None else first
        assert torch.equal(out.view(torch.int32), first.view(torch.int32))
    assert first is not None
    chosen = octavo.topk_indices(first, int32(length), 256)
    assert torch.equal(chosen[0].long(), torch.cat([t[t % 8 == 0], t[t % 8 == 1], t[t % 8 == 2][:6]]).sort().values)


def test_relu_comes_before_the_head_sum():
    q = torch.tensor([[[3.0] + [0] * 63, [-5.0] + [0] * 63]]).to(E4M3)  # head dots 3 and -5 with k = e0
    k = torch.eye(1, 64).to(E4M3)
    for weights, expected in (((1, 1), 3), ((1, -1), 3), ((-2, 1), -6)):
        out = octavo.mqa_logits(q, k, torch.ones(1), torch.tensor([weights], dtype=torch.float32), int32(0), int32(1))
        assert out.tolist() == [[expected]]


def formula(q, k, weights):
    """The definition in float64: q [n, H, D], k [T, D] dequantised, weights [n, H] -> [n, T]."""
    dots = torch.einsum("nhd,td->nht", q.double(), k.double()).relu()
    return (dots * weights.double()[..., None]).sum(1)


@pytest.mark.parametrize("scale_format", ["fp32", "pow2", "ue8m0"])
@pytest.mark.parametrize(
    ("page_size", "head_dim", "heads", "n"), [(64, 128, 64, 1), (16, 64, 16, 3), (128, 128, 32, 8)]
)
def test_paged_logits_equal_the_formula(scale_format, page_size, head_dim, heads, n):
    lengths = [0, 1, 63, 64, 65, 200]
    cache, table, _ = filled_cache(lengths, page_size, head_dim, scale_format)
    q = random_query(len(lengths), n, heads, head_dim)
    weights = torch.randn(len(lengths) * n, heads)
    out = octavo.paged_mqa_logits(q, cache, weights, int32(*lengths), table, 256, fill=-INF)
    exact = torch.empty(out.shape, dtype=torch.float64)
    call = PagedLogitsCall(
        q, IndexBytes(cache.pages, scale_format), weights, int32(*lengths), table, 256, exact, fill=-INF
    )
    reference.paged_mqa_logits(call, torch.float64)
    for b, length in enumerate(lengths):
        keys = cache.gather(table[b], length)
        expected = formula(q[b], keys, weights[b * n : (b + 1) * n])
        for j in range(n):
            seen = max(0, length - n + 1 + j)
            row = out[b * n + j]
            assert (row[seen:] == -INF).all()
            # Products of e4m3 are exact in fp32; the sums over D and H add rounding of 2^-24 a term, and `gather`
            # one more for the scale, which is all that the float64 result differs by.
            size = formula(q[b].double().abs(), keys.abs(), weights[b * n : (b + 1) * n].abs())[j, :seen]
            error = (row[:seen].double() - expected[j, :seen]).abs()
            assert (error <= (head_dim + heads + 1) * 2.0**-24 * size).all()
            assert ((exact[b * n + j, :seen] - expected[j, :seen]).abs() <= 1.01 * 2.0**-24 * size).all()


def test_lengths_a_row_any_strides_and_beyond_every_limit():
    cache, table, _ = filled_cache([130, 130])
    q, weights = random_query(2, 2, 16, 128), torch.randn(4, 16)
    lens = torch.zeros(2, 8, dtype=torch.int32)[:, ::4]
    lens[:] = torch.tensor([[5, 130], [-7, 2**31 - 1]])
    whole = octavo.paged_mqa_logits(q, cache, weights, int32(131, 131), table, 192)
    out = octavo.paged_mqa_logits(q, cache, weights, lens, table, 100, fill=-1.0)
    assert torch.equal(out[0, :5], whole[0, :5]) and (out[0, 5:] == -1).all()
    assert torch.equal(out[1], whole[1, :100])
    assert (out[2] == -1).all()
    assert torch.equal(out[3], whole[3, :100])
    wide = octavo.paged_mqa_logits(q, cache, weights, lens, table, 1000, fill=-1.0)
    assert (wide[3, table.shape[1] * 64 :] == -1).all()


def test_a_token_on_no_page_and_a_nan_key_stay_where_they_are():
    cache, table, _ = filled_cache([192])
    q, weights = random_query(1, 1, 16, 128), torch.randn(1, 16)
    whole = octavo.paged_mqa_logits(q, cache, weights, int32(192), table, 192)
    cache.pages[table[0, 0]].view(-1)[5 * 128] = 0x7F
    broken = table.clone()
    broken[0, 1] = cache.num_pages
    out = octavo.paged_mqa_logits(q, cache, weights, int32(192), broken, 192)
    assert out[0, 5].isnan() and torch.equal(out[0, :5], whole[0, :5]) and torch.equal(out[0, 6:64], whole[0, 6:64])
    assert (out[0, 64:128] == -INF).all() and torch.equal(out[0, 128:], whole[0, 128:])
    assert 5 not in octavo.topk_indices(out, int32(192), 191)


def test_out_in_bfloat16_wider_and_strided_is_written_only_where_seen():
    cache, table, _ = filled_cache([70])
    q, weights = random_query(1, 1, 16, 128), torch.randn(1, 16)
    whole = octavo.paged_mqa_logits(q, cache, weights, int32(70), table, 128)
    buffer = torch.full((1, 512), NAN, dtype=torch.bfloat16)
    out = octavo.paged_mqa_logits(q, cache, weights, int32(70), table, 100, out=buffer[:, 64:320])
    assert torch.equal(out[0, :70], whole[0, :70].bfloat16())
    assert buffer[0, :64].isnan().all() and buffer[0, 64 + 70 :].isnan().all()


def test_folding_the_query_scale_gives_the_unquantised_querys_logits():
    q = torch.randn(3, 16, 128)
    scale = token_scale(q, FORMATS["fp8_e4m3"])
    q8 = quantise(q, scale[..., None], FORMATS["fp8_e4m3"]).view(E4M3)
    k, weights = random_query(50, 128), torch.randn(3, 16)
    folded = fold_query_scale(weights, scale, 128**-0.5)
    out = octavo.mqa_logits(q8, k, torch.ones(50), folded, int32(0, 0, 0), int32(50, 50, 50))
    expected = formula(q8.float() * scale[..., None], k, weights) * 128**-0.5
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_ragged_ranges_full_and_compressed():
    q, k, k_scale, weights = random_query(5, 16, 64), random_query(40, 64), torch.rand(40) + 0.5, torch.randn(5, 16)
    starts, ends = int32(0, 10, 38, 20, -4), int32(40, 10, 99, 17, 3)
    whole = octavo.mqa_logits(q, k, k_scale, weights, int32(*[0] * 5), int32(*[40] * 5))
    torch.testing.assert_close(whole.double(), formula(q, k, weights) * k_scale, rtol=1e-5, atol=1e-4)
    ranges = [(0, 40), (10, 10), (38, 40), (20, 20), (0, 3)]
    kept = octavo.mqa_logits(q, k, k_scale, weights, starts, ends, out=torch.full((5, 40), NAN))
    filled = octavo.mqa_logits(q, k, k_scale, weights, starts, ends, fill=-INF)
    narrow = octavo.mqa_logits(q, k, k_scale, weights, starts, ends, fill=-INF, compressed=True)
    cut = octavo.mqa_logits(q, k, k_scale, weights, starts, ends, compressed=True, out=torch.full((5, 2), NAN))
    assert narrow.shape == (5, 40)
    for row, (start, end) in enumerate(ranges):
        seen = whole[row, start:end]
        assert torch.equal(kept[row, start:end], seen) and kept[row].isnan().sum() == 40 - len(seen)
        assert torch.equal(filled[row, start:end], seen) and (filled[row] == -INF).sum() == 40 - len(seen)
        assert torch.equal(narrow[row, : len(seen)], seen) and (narrow[row, len(seen) :] == -INF).all()
        assert torch.equal(cut[row, : min(2, len(seen))], seen[:2])


def test_a_byte_budget_cuts_the_rows_and_changes_nothing():
    q, k, weights = random_query(11, 16, 64), random_query(30, 64), torch.randn(11, 16)
    arguments = (q, k, torch.ones(30), weights, int32(*[0] * 11), int32(*range(20, 31)))
    whole = octavo.mqa_logits(*arguments, fill=-INF)
    seen, storages = [], set()
    for rows, logits in octavo.mqa_logits(*arguments, fill=-INF, max_bytes=4 * 30 * 4 + 7):
        assert logits.shape[0] <= 4
        assert torch.equal(logits, whole[rows])
        seen += range(11)[rows]
        storages.add(logits.data_ptr())
    assert seen == list(range(11)) and len(storages) == 1
    with pytest.raises(octavo.InvalidInput, match="one row of 30 logits, 120 bytes; came 119"):
        octavo.mqa_logits(*arguments, max_bytes=119)


def test_no_rows_and_no_keys():
    cache, table, _ = filled_cache([3])
    assert octavo.paged_mqa_logits(
        random_query(0, 1, 16, 128), cache, torch.zeros(0, 16), int32(), table, 64
    ).shape == (0, 64)
    q, weights = random_query(2, 16, 64), torch.zeros(2, 16)
    none = octavo.mqa_logits(q, random_query(0, 64), torch.ones(0), weights, int32(0, 0), int32(4, 4), fill=-INF)
    assert none.shape == (2, 0)
    assert octavo.topk_indices(none, int32(5, 5), 3).tolist() == [[-1, -1, -1]] * 2


def test_topk_is_in_order_of_index_with_ties_to_the_lower_and_padding_last():
    logits = torch.tensor(
        [
            [1.0, 3, 2, 3, 0, 3],  # three of equal size: the two first win
            [0.0, -0.0, 0.0, 1, 9, 9],  # a length of 4
            [NAN, 1, NAN, 0, NAN, NAN],  # NaN never wins
            [-INF, -INF, 5, -INF, -INF, -INF],  # -inf is a number
            [1.0, 2, 3, 4, 5, 6],
            [1.0, 2, 3, 4, 5, 6],
        ]
    )
    chosen = octavo.topk_indices(logits, int32(6, 4, 6, 6, 2, -1), 3)
    assert chosen.tolist() == [[1, 3, 5], [0, 1, 3], [1, 3, -1], [0, 1, 2], [0, 1, -1], [-1, -1, -1]]
    assert octavo.topk_indices(logits, int32(6, 4, 6, 6, 2, -1), 2)[0].tolist() == [1, 3]
    assert octavo.topk_indices(logits, int32(*[9] * 6), 9)[4].tolist() == [0, 1, 2, 3, 4, 5, -1, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk_equals_a_stable_sort(dtype):
    generator = torch.Generator().manual_seed(3)
    logits = (torch.randn(40, 700, generator=generator) * 4).round().to(dtype)  # many ties
    logits[torch.rand(logits.shape, generator=generator) < 0.05] = NAN
    lens = torch.randint(0, 701, (40,), generator=generator, dtype=torch.int32)
    out = torch.full((40, 130), 77, dtype=torch.int32)[:, ::2]
    chosen = octavo.topk_indices(logits, lens, 65, out=out)
    assert chosen.data_ptr() == out.data_ptr()
    for row in range(40):
        numbers = [(-float(logits[row, t]), t) for t in range(int(lens[row])) if not logits[row, t].isnan()]
        best = sorted(t for _, t in sorted(numbers)[:65])
        assert chosen[row].tolist() == best + [-1] * (65 - len(best))


def test_token_slots_follow_the_page_table():
    table = int32(7, 3, -1, 5, 2**31 - 1, 9).reshape(2, 3)
    chosen = int32(0, 63, 64, -1, 128, 192, 0, 65).reshape(2, 4)
    slots = token_slots(chosen, table, 64)
    assert slots.tolist() == [[448, 511, 192, -1], [9 * 64, -1, 5 * 64, (2**31 - 1) * 64 + 1]]
    assert torch.equal(token_slots(chosen[[0, 0, 1, 1]], table, 64, n=2), slots[[0, 0, 1, 1]])
    assert visible_lengths(int32(5, 1), 3).tolist() == [3, 4, 5, 0, 0, 1]


def test_arguments_are_refused_with_what_was_needed_and_what_came():
    cache, table, _ = filled_cache([3, 3])
    q, weights, lens = random_query(2, 1, 16, 128), torch.zeros(2, 16), int32(3, 3)
    for match, arguments in (
        ("q must be fp8_e4m3 of head_dim 128; came bfloat16", (q.bfloat16(), cache, weights, lens, table, 64)),
        (r"weights must be float32 \[2, 16\]; came float16", (q, cache, weights.half(), lens, table, 64)),
        (r"seq_lens must be int32 \[2\] or \[2, 1\]; came int64 \[2\]", (q, cache, weights, lens.long(), table, 64)),
        (r"page_table must be int32 \[2, max pages\]; came int32 \[1", (q, cache, weights, lens, table[:1], 64)),
        ("max_context must be a positive integer; came 0", (q, cache, weights, lens, table, 0)),
    ):
        with pytest.raises(octavo.InvalidInput, match=match):
            octavo.paged_mqa_logits(*arguments)
    with pytest.raises(octavo.InvalidInput, match="out must be float32 or bfloat16"):
        octavo.paged_mqa_logits(q, cache, weights, lens, table, 64, out=torch.empty(2, 63))
    with pytest.raises(octavo.InvalidInput, match="backend must be one of gluon, triton, reference; came 'cuda'"):
        octavo.paged_mqa_logits(q, cache, weights, lens, table, 64, backend="cuda")
    with pytest.raises(octavo.InvalidInput, match="lens must be int32 of 2 elements"):
        octavo.topk_indices(torch.zeros(2, 5), int32(1), 3)


def test_a_named_backend_never_falls_back():
    with pytest.raises(octavo.Unsupported) as refused:
        octavo.topk_indices(torch.zeros(1, 5), int32(5), 3, backend="gluon")
    assert refused.value.reasons == (
        "needs Hopper (sm_90); found cpu",
        "needs a kernel in this repository; found none yet",
    )
    assert refused.value.nearest == "no backend named (then reference)"


def test_torch_compile_traces_every_call_as_one_graph():
    cache, table, _ = filled_cache([100, 30])
    twin = octavo.IndexerCache.view(cache.pages.clone())
    q, weights, lens = random_query(2, 2, 16, 128), torch.randn(4, 16), int32(101, 31)
    k = torch.randn(2, 128)
    slots = torch.tensor([int(table[0, 1]) * 64 + 36, int(table[1, 0]) * 64 + 30])
    ragged = (
        random_query(3, 16, 128),
        random_query(9, 128),
        torch.ones(9),
        torch.randn(3, 16),
        int32(0, 1, 2),
        int32(9, 8, 2),
    )

    def step(index, q, weights, lens, table, k, slots):
        index.append(k, slots)
        logits = octavo.paged_mqa_logits(q, index, weights, lens, table, 128, fill=-INF)
        chosen = octavo.topk_indices(logits, visible_lengths(lens, 2), 64)
        return logits, token_slots(chosen, table, 64, n=2), octavo.mqa_logits(*ragged, fill=0.0)

    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    got = compiled(cache, q, weights, lens, table, k, slots)
    expected = step(twin, q, weights, lens, table, k, slots)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(cache.pages, twin.pages)


@pytest.mark.parametrize("fill", [None, -1.0])
def test_logits_and_topk_read_nothing_on_the_host(fill):
    """Meta tensors have no values to read: what runs on them asks for none, and so can be captured in a CUDA graph.

    The reference's functions are called, not the ops, whose fakes would run instead.
    """
    with torch.device("meta"):
        lens, table = torch.empty(2, dtype=torch.int32), torch.empty(2, 3, dtype=torch.int32)
        q, weights, out = torch.empty(2, 2, 16, 128, dtype=E4M3), torch.empty(4, 16), torch.empty(4, 180)
        pages = torch.empty(9, 64, 1, 132, dtype=torch.uint8)
        for scale_format in ("fp32", "ue8m0"):
            cache = IndexBytes(pages, scale_format)
            reference.paged_mqa_logits(PagedLogitsCall(q, cache, weights, lens, table, 180, out, fill))
        chosen = torch.empty(4, 7, dtype=torch.int32)
        topk_indices(out, visible_lengths(lens, 2), chosen)
        assert token_slots(chosen, table, 64, n=2).shape == (4, 7)
        k, k_scale = torch.empty(50, 128, dtype=E4M3), torch.empty(50)
        for compressed in (False, True):
            call = LogitsCall(q[0], k, k_scale, weights[:2], lens, lens, torch.empty(2, 50), fill, compressed)
            reference.mqa_logits(call)
        with pytest.raises(RuntimeError):
            lens.max().item()


def test_ops_pass_torchs_own_checks():
    cache, table, _ = filled_cache([30])
    q, weights, lens = random_query(1, 1, 16, 128), torch.randn(1, 16), int32(30)
    topk = (torch.randn(2, 9), int32(9, 3), torch.zeros(2, 4, dtype=torch.int32), "reference")
    torch.library.opcheck(indexer_ops.topk_indices, topk, test_utils=("test_schema", "test_faketensor"))
    paged = (q, cache.pages, weights, lens, table, None, torch.zeros(1, 64), 64, -1.0, "fp32", "reference")
    # The schema check multiplies every input, which torch cannot do in FP8.
    torch.library.opcheck(indexer_ops.paged_mqa_logits, paged, test_utils=("test_faketensor",))
