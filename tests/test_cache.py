"""PagedCache: exact bytes of each layout, append, views on an engine's memory, conversion, and what is refused."""

from __future__ import annotations

import copy
import itertools
import logging
import pickle

import pytest
import torch

import octavo
from octavo import AttentionSpec, InvalidInput, PagedCache, Unsupported
from octavo.formats import FORMATS, cast, dequantise, token_scale
from octavo.layouts import LEAF_COLUMNS, leaf_column

LAYOUTS = ("leaf", "nhd", "hnd")


def filled(spec, num_pages=3, seed=0, **scales):
    """A cache with one random token in every slot of pages 2 and 0, in that order; its k, v and slots."""
    g = torch.Generator().manual_seed(seed)
    cache = PagedCache.allocate(spec, num_pages, "cpu", **scales)
    slots = torch.cat([torch.arange(2 * spec.page_size, 3 * spec.page_size), torch.arange(spec.page_size)])
    k = torch.randn(len(slots), spec.num_kv_heads, spec.head_dim, generator=g, dtype=torch.float32).to(torch.bfloat16)
    v = torch.randn(len(slots), spec.num_kv_heads, spec.value_dim, generator=g, dtype=torch.float32).to(torch.bfloat16)
    cache.append(k, v, slots)
    return cache, k, v, slots


def test_leaf_bytes_are_where_the_formula_says():
    spec = AttentionSpec(4, 2, 32, head_dim_v=16, page_size=64)
    cache, k, v, slots = filled(spec)
    flat = cache.memory.k_pool
    assert cache.memory.v_pool is None and flat.numel() == 3 * 2 * 64 * (32 + 16)
    head_stride = 64 * (32 + 16)
    page_stride = 2 * head_stride
    pos = (0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)
    stored_k, stored_v = (cast(x.float(), FORMATS["fp8_e4m3"]) for x in (k, v))
    for row in (0, 1, 17, 63, 64, 127):
        p, t = divmod(int(slots[row]), 64)
        for h in range(2):
            at = p * page_stride + h * head_stride
            assert torch.equal(flat[at + t * 32 : at + t * 32 + 32], stored_k[row, h])
            for d in range(16):
                where = at + 64 * 32 + d * 64 + 16 * (t // 16) + pos[t % 16]
                assert flat[where] == stored_v[row, h, d]


def test_leaf_columns_are_the_stated_slots():
    slots = [0] * 16
    for token, column in enumerate(LEAF_COLUMNS):
        slots[column] = token
    assert slots == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert leaf_column(37) == 32 + LEAF_COLUMNS[5]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("granularity", ["tensor", "head", "token_head"])
@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "fp8_e5m2"])
def test_append_then_gather_is_quantise_then_dequantise(layout, granularity, kv_dtype):
    spec = AttentionSpec(4, 2, 32, 16, kv_dtype=kv_dtype, layout=layout, scale_granularity=granularity, page_size=32)
    head_scale = torch.tensor([0.5, 0.125])
    scales = {
        "tensor": {"k_scale": 1 / 16, "v_scale": torch.tensor(0.25)},
        "head": {"k_scale": head_scale, "v_scale": head_scale.flip(0)},
        "token_head": {},
    }[granularity]
    cache, k, v, _ = filled(spec, **scales)
    got_k, got_v = cache.gather(torch.tensor([2, 0], dtype=torch.int32), 64)
    f = FORMATS[kv_dtype]
    for got, x, name in ((got_k, k, "k_scale"), (got_v, v, "v_scale")):
        if granularity == "tensor":
            scale = torch.as_tensor(scales[name])
        elif granularity == "head":
            scale = scales[name][:, None]
        else:
            scale = token_scale(x, f)[..., None]
        assert torch.equal(got, dequantise(cast(x.float() / scale, f), scale, f))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_a_16_bit_cache_stores_what_came(kv_dtype, layout):
    spec = AttentionSpec(4, 2, 24, kv_dtype=kv_dtype, layout=layout, page_size=5)
    cache, k, v, _ = filled(spec)
    got_k, got_v = cache.gather(torch.tensor([2, 0]), 10)
    assert torch.equal(got_k, k.to(cache.k.dtype).float()) and torch.equal(got_v, v.to(cache.v.dtype).float())


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(LAYOUTS, 2)))
@pytest.mark.parametrize("granularity", ["tensor", "token_head"])
def test_convert_moves_bytes_and_scales(source, target, granularity):
    spec = AttentionSpec(4, 2, 32, 16, layout=source, scale_granularity=granularity, page_size=32)
    cache, _, _, _ = filled(spec, **({"k_scale": 0.5, "v_scale": 2.0} if granularity == "tensor" else {}))
    other = cache.convert(target)
    table = torch.tensor([2, 0, 1])
    for a, b in zip(cache.gather(table, 96), other.gather(table, 96), strict=True):
        assert torch.equal(a, b)
    back = other.convert(source)
    assert torch.equal(back.k, cache.k) and torch.equal(back.v, cache.v)


def test_convert_to_a_layout_that_cannot_hold_it_is_refused():
    cache, *_ = filled(AttentionSpec(4, 2, 32, kv_dtype="bfloat16", layout="nhd", page_size=24))
    with pytest.raises(Unsupported) as error:
        cache.convert("leaf")
    assert error.value.reasons == (
        "layout leaf holds FP8 only; kv_dtype is bfloat16",
        "layout leaf needs a page_size that is a multiple of 32; it is 24",
    )


def test_slots_skip_and_are_refused_before_anything_is_written():
    spec = AttentionSpec(4, 2, 32, layout="hnd", page_size=4)
    cache = PagedCache.allocate(spec, 2, "cpu")
    k = torch.ones(3, 2, 32, dtype=torch.bfloat16)
    cache.append(k, k, torch.tensor([-1, 5, -1]))
    assert int((cache.k != 0).sum()) == 2 * 32 and bool((cache.k[1, :, 1] != 0).all())
    before = cache.k.clone()
    for bad in (8, -2, 2**40):
        with pytest.raises(InvalidInput, match=rf"slots must be -1 or in \[0, 8\); came {bad}"):
            cache.append(2 * k, k, torch.tensor([0, bad, 1]))
    assert torch.equal(cache.k, before) and cache.counters.tolist() == [0, 0]


def test_nan_is_written_as_zero_and_counted():
    spec = AttentionSpec(2, 1, 16, page_size=32)
    cache = PagedCache.allocate(spec, 1, "cpu")
    k = torch.full((1, 1, 16), 2.0)
    k[0, 0, 3:5] = float("nan")
    cache.append(k, k, torch.tensor([0]))
    got, _ = cache.gather(torch.tensor([0]), 1)
    assert got[0, 0, 2:6].tolist() == [2.0, 0.0, 0.0, 2.0] and cache.counters.tolist() == [0, 4]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_is_whole_and_of_its_own(layout, duplicate):
    cache, k, v, slots = filled(AttentionSpec(4, 2, 32, layout=layout, page_size=32), k_scale=0.5, v_scale=0.25)
    other = duplicate(cache)
    table = torch.tensor([2, 0])
    for a, b in zip(other.gather(table, 64), cache.gather(table, 64), strict=True):
        assert torch.equal(a, b)
    before = cache.k.clone()
    other.append(2 * k, v, slots)
    assert torch.equal(cache.k, before) and not torch.equal(other.k, before)
    assert torch.equal(other.gather(table, 64)[1], cache.gather(table, 64)[1])


def test_tensors_elsewhere_are_refused():
    cache = PagedCache.allocate(AttentionSpec(4, 2, 32), 1, "cpu")
    k = torch.zeros(1, 2, 32)
    with pytest.raises(InvalidInput, match="k, v and slots must be on cpu; came cpu and meta"):
        cache.append(k, k.to("meta"), torch.tensor([0]))


def test_append_takes_any_strides_and_more_rows_than_slots():
    spec = AttentionSpec(4, 2, 32, layout="nhd", page_size=8)
    fused = torch.randn(10, 2, 3, 32).to(torch.bfloat16)  # an engine's QKV projection
    a, b = PagedCache.allocate(spec, 2, "cpu"), PagedCache.allocate(spec, 2, "cpu")
    slots = torch.tensor([3, 9, 0, 12])
    a.append(fused[:, :, 1], fused[:, :, 2], slots)
    b.append(fused[:4, :, 1].contiguous(), fused[:4, :, 2].contiguous(), slots)
    assert torch.equal(a.k, b.k) and torch.equal(a.v, b.v)
    transposed = fused[:4, :, 1].transpose(1, 2).contiguous().transpose(1, 2)
    b.append(transposed, fused[:4, :, 2], slots)
    assert torch.equal(a.k, b.k)


class TestViews:
    """Memory that an engine owns."""

    def test_one_pool_of_interleaved_heads(self):
        # [blocks, heads, block, K then V^T] with a padded page stride, as an engine hands it over.
        spec = AttentionSpec(4, 2, 32, page_size=32)
        page = 2 * 32 * 64 + 48
        memory = torch.full((3 * page + 16,), 0x55, dtype=torch.uint8)
        k = memory.as_strided((3, 2, 32, 32), (page, 32 * 64, 32, 1), 16)
        v = memory.as_strided((3, 2, 32, 32), (page, 32 * 64, 32, 1), 16 + 32 * 32)
        view = PagedCache.view(spec, k, v, k_scale=0.5)
        own, k_new, v_new, slots = filled(spec, k_scale=0.5)
        view.append(k_new, v_new, slots)
        table = torch.tensor([2, 0])
        for a, b in zip(view.gather(table, 64), own.gather(table, 64), strict=True):
            assert torch.equal(a, b)
        padding = torch.cat([memory[:16], *(memory[16 + p * page + page - 48 : 16 + (p + 1) * page] for p in range(3))])
        assert bool((padding == 0x55).all()), "bytes between pages are the engine's"

    def test_nhd_slots_of_a_combined_tensor(self):
        spec = AttentionSpec(4, 2, 24, layout="nhd", page_size=6, kv_dtype="fp8_e5m2")
        memory = torch.zeros(4, 6, 2, 2, 24, dtype=torch.float8_e5m2)  # [blocks, slots, heads, k|v, dim]
        view = PagedCache.view(spec, memory[:, :, :, 0], memory[:, :, :, 1])
        own, k, v, slots = filled(spec)
        view.append(k, v, slots)
        table = torch.tensor([2, 0])
        for a, b in zip(view.gather(table, 12), own.gather(table, 12), strict=True):
            assert torch.equal(a, b)

    def test_wrong_dtype_names_both(self):
        spec = AttentionSpec(4, 2, 32, layout="nhd")
        for dtype, word in ((torch.float8_e5m2, "fp8_e5m2"), (torch.bfloat16, "bfloat16")):
            memory = torch.zeros(2, 64, 2, 32).to(dtype)
            with pytest.raises(InvalidInput, match=f"must hold fp8_e4m3, the spec's kv_dtype; came {word}"):
                PagedCache.view(spec, memory, memory)
        memory = torch.zeros(2, 64, 2, 32, dtype=torch.uint8)
        with pytest.raises(InvalidInput, match="must hold bfloat16, the spec's kv_dtype; came uint8"):
            PagedCache.view(AttentionSpec(4, 2, 32, layout="nhd", kv_dtype="bfloat16"), memory, memory)

    def test_wrong_shape_and_strides(self):
        spec = AttentionSpec(4, 2, 32, layout="nhd")
        with pytest.raises(InvalidInput, match=r"k_bytes must have shape \[2, 64, 2, 32\] for layout nhd"):
            PagedCache.view(
                spec, torch.zeros(2, 2, 64, 32, dtype=torch.uint8), torch.zeros(2, 64, 2, 32, dtype=torch.uint8)
            )
        leaf = AttentionSpec(4, 2, 32)
        k = torch.zeros(2, 64, 2, 32, dtype=torch.uint8).transpose(1, 2)
        with pytest.raises(InvalidInput, match="k_bytes must be contiguous within a page and head for layout leaf"):
            PagedCache.view(leaf, k, torch.zeros(2, 2, 32, 64, dtype=torch.uint8))
        memory = torch.zeros(4096 * 5, dtype=torch.uint8)
        odd = memory.as_strided((2, 2, 64, 32), (4097, 2048, 32, 1))
        with pytest.raises(InvalidInput, match="multiples of 16 bytes for layout leaf"):
            PagedCache.view(leaf, odd, torch.zeros(2, 2, 32, 64, dtype=torch.uint8))


class TestScales:
    """Case C4, and that a 16-bit cache has none (case Z3)."""

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -2.0])
    def test_bad_values(self, bad):
        for scale in (bad, torch.tensor(bad)):
            with pytest.raises(InvalidInput, match="v_scale must be finite and positive everywhere"):
                PagedCache.allocate(AttentionSpec(4, 2, 32), 1, "cpu", k_scale=1.0, v_scale=scale)

    def test_wrong_shape(self):
        with pytest.raises(InvalidInput, match=r"k_scale must have shape \[2\]; came \[4\]"):
            PagedCache.allocate(
                AttentionSpec(4, 2, 32, scale_granularity="head"),
                1,
                "cpu",
                k_scale=torch.ones(4),
                v_scale=torch.ones(2),
            )

    def test_a_missing_one_means_one_and_is_said_once(self, caplog, monkeypatch):
        monkeypatch.setattr("octavo.notices.said", set())
        with caplog.at_level(logging.WARNING, "octavo"):
            caches = [PagedCache.allocate(AttentionSpec(4, 2, 32), 1, "cpu", v_scale=0.5) for _ in range(3)]
        assert caches[0].k_scale is None
        assert [r.message for r in caplog.records] == ["k_scale is missing and means 1.0"]

    def test_a_16_bit_cache_ignores_them_and_says_so(self, caplog, monkeypatch):
        monkeypatch.setattr("octavo.notices.said", set())
        spec = AttentionSpec(4, 2, 32, kv_dtype="bfloat16", layout="nhd")
        with caplog.at_level(logging.WARNING, "octavo"):
            cache = PagedCache.allocate(spec, 1, "cpu", k_scale=1 / 16, v_scale=0.5)
        assert cache.k_scale is None and cache.v_scale is None
        assert "a bfloat16 cache has no scales" in caplog.text

    def test_setting_one_later_is_checked_and_a_16_bit_cache_keeps_none(self):
        cache = PagedCache.allocate(AttentionSpec(4, 2, 32), 1, "cpu")
        cache.k_scale = 0.5
        assert cache.k_scale.item() == 0.5 and cache.v_scale is None
        cache.v_scale = 0.25
        assert cache.k_scale.item() == 0.5 and cache.v_scale.item() == 0.25
        with pytest.raises(InvalidInput, match="v_scale must be finite and positive"):
            cache.v_scale = torch.tensor(0.0)
        bf16 = PagedCache.allocate(AttentionSpec(4, 2, 32, kv_dtype="bfloat16", layout="nhd"), 1, "cpu")
        bf16.k_scale = torch.tensor(1 / 16)
        assert bf16.k_scale is None
        for wrong in ("0.5", [0.5], True):
            with pytest.raises(InvalidInput, match="k_scale must be a number or a tensor"):
                cache.k_scale = wrong

    def test_an_engines_scale_tensor_is_kept_by_reference(self):
        scale = torch.tensor([0.5, 0.25])
        spec = AttentionSpec(4, 2, 32, scale_granularity="head")
        cache = PagedCache.allocate(spec, 1, "cpu", k_scale=scale, v_scale=1.0)
        scale.mul_(2)
        assert cache.k_scale.tolist() == [1.0, 0.5] and cache.v_scale.tolist() == [1.0, 1.0]


def test_mla_stores_the_latent_once():
    spec = AttentionSpec(8, 1, 48, 32, mla=True, layout="nhd", page_size=16)
    cache = PagedCache.allocate(spec, 2, "cpu", k_scale=0.5)
    latent = torch.randn(20, 1, 48).to(torch.bfloat16)
    cache.append(latent, None, torch.arange(20))
    k, v = cache.gather(torch.tensor([0, 1]), 20)
    assert cache.memory.v_pool is None and cache.memory.k_pool.numel() == 2 * 16 * 48
    assert torch.equal(v, k[..., :32])
    with pytest.raises(InvalidInput, match="v must be None for an MLA cache"):
        cache.append(latent, latent, torch.arange(20))
    for name in ("k_scale", "v_scale", "k_scale"):  # one scale, which either name sets, as often as one likes
        setattr(cache, name, torch.tensor(0.25))
        assert cache.k_scale is cache.v_scale and cache.k_scale.item() == 0.25


@pytest.mark.parametrize(
    ("call", "needed"),
    [
        (lambda cache: cache.append(torch.zeros(1, 2, 32), torch.zeros(1, 2, 32), [0]), "slots must be a tensor"),
        (lambda cache: cache.append(None, torch.zeros(1, 2, 32), torch.tensor([0])), "k must be a tensor"),
        (
            lambda cache: cache.append(torch.zeros(1, 2, 32), torch.zeros(1, 2, 32), torch.tensor(0)),
            "slots must be int64",
        ),
        (lambda cache: cache.gather([0], 1), "page_table_row must be a tensor"),
        (lambda cache: cache.gather(torch.zeros(1, 1, dtype=torch.int32), 1), r"page_table_row must be \[max pages\]"),
        (lambda cache: PagedCache.view(cache.spec, None), "k_bytes must be a tensor"),
        (lambda cache: PagedCache.view(cache.spec, cache.k), "v_bytes must be a tensor; came NoneType"),
        (lambda cache: octavo.IndexerCache.view(None), "pages must be a tensor"),
        (
            lambda cache: octavo.topk_indices(torch.zeros(1, 4), torch.ones(1, dtype=torch.int32), 2.5),
            "k must be a pos",
        ),
        (
            lambda cache: octavo.topk_indices(torch.zeros(1, 4), torch.ones(1, dtype=torch.int32), True),
            "k must be a pos",
        ),
        (lambda cache: octavo.topk_indices([0.0], torch.ones(1, dtype=torch.int32), 1), "logits must be a tensor"),
    ],
)
def test_what_is_no_tensor_or_count_is_refused_by_name(call, needed):
    with pytest.raises(InvalidInput, match=needed):
        call(PagedCache.allocate(AttentionSpec(4, 2, 32), 1, "cpu"))


class TestExpandPageTable:
    """Case C1: an engine's pages of 528 tokens on smaller kernel pages."""

    @pytest.mark.parametrize("kernel_page", [16, 48])
    def test_tokens_stay_where_they_are(self, kernel_page):
        table = torch.tensor([[3, 1], [0, -1]], dtype=torch.int32)
        expanded = octavo.expand_page_table(table, 528, kernel_page)
        ratio = 528 // kernel_page
        assert expanded.shape == (2, 2 * ratio) and expanded.dtype == torch.int32
        for token in (0, 15, 16, 527, 528, 1000):
            slot = int(table[0, token // 528]) * 528 + token % 528
            assert int(expanded[0, token // kernel_page]) * kernel_page + token % kernel_page == slot
        assert bool((expanded[1, ratio:] == -1).all())

    def test_ids_that_are_not_pages_stay_outside_every_pool(self):
        table = torch.tensor([[2**31 - 1, -(2**31)]], dtype=torch.int32)
        assert bool((octavo.expand_page_table(table, 528, 16) == -1).all())

    def test_a_mix_that_does_not_divide_is_refused(self):
        with pytest.raises(InvalidInput, match="must divide the engine's; came 64 and 528"):
            octavo.expand_page_table(torch.zeros(1, 1, dtype=torch.int32), 528, 64)
