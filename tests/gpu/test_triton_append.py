"""Triton's append on a GPU, bit for bit against the reference on the CPU.

Compiled, it takes paths that the interpreter does not have: no division, the hardware's casts, wide stores.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
from append_cases import Case, compare, spec_of

from octavo.cache import PagedCache
from octavo.calls import AppendCall
from octavo.formats import FORMATS, quantise
from octavo.spec import AttentionSpec
from octavo.testing.graphs import Captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
]


def append(call: AppendCall) -> None:
    from octavo.kernels.triton.append import append as kernel

    kernel(call)


spec = partial(spec_of, heads=8, dim=128, page=64)
MLA = spec("nhd", heads=1, dim=576, dim_v=512, mla=True)
CASES = [
    *(
        Case(spec(layout, kv_dtype, granularity), x, rows=300, slots=slots, values=values)
        for layout, kv_dtype, granularity in itertools.product(
            ["leaf", "nhd", "hnd"], ["fp8_e4m3", "fp8_e5m2"], ["tensor", "head", "token_head"]
        )
        for x, slots, values in (
            (torch.bfloat16, "prompt", "edges"),
            (torch.bfloat16, "holes", "wild"),
            (torch.float16, "prompt", "edges"),
            (torch.float16, "shifted", "wild"),
            (torch.float32, "prompt", "edges"),
            (torch.float32, "decode", "wild"),
        )
    ),
    *(
        Case(spec(layout, kv_dtype), x, rows=300, slots="holes", values="wild")
        for layout, kv_dtype, x in itertools.product(
            ["nhd", "hnd"], ["bfloat16", "float16", "float32"], [torch.bfloat16, torch.float16, torch.float32]
        )
    ),
    *(
        Case(spec(layout), rows=2500, slots=s)
        for layout in ("leaf", "nhd")
        for s in ("prompt", "shifted", "decode", "holes")
    ),
    *(Case(spec(layout), form=f, padded=True) for layout in ("leaf", "nhd", "hnd") for f in ("fused", "transposed")),
    *(
        Case(spec(layout, granularity=g), x, values="huge")
        for layout in ("leaf", "nhd")
        for g in ("tensor", "token_head")
        for x in (torch.bfloat16, torch.float32)
    ),
    *(Case(spec(layout), scales=False, values="wild") for layout in ("leaf", "nhd", "hnd")),
    *(Case(spec(page=page), rows=3000) for page in (32, 96, 128)),
    *(Case(spec("nhd", page=page), rows=700, slots="holes") for page in (1, 24, 528)),
    *(
        Case(spec(layout, dim=dim, dim_v=dim_v, heads=3), rows=900, values="edges")
        for layout in ("leaf", "nhd", "hnd")
        for dim, dim_v in ((64, None), (80, None), (96, None), (192, 128), (256, None), (512, None))
    ),
    *(Case(MLA, rows=rows, slots="holes", values="wild") for rows in (1, 64, 3000)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_append_equals_the_reference(case):
    assert compare(case, append, "cuda") == []


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_division_by_a_correction_equals_ieee_division(x_dtype, name):
    """All finite 16-bit inputs over scales that put them next to rounding boundaries: all ones, B -+ 8 ulp, random."""
    format = FORMATS[name]
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(x_dtype)
    x = torch.where(x.isfinite(), x, 0).view(-1, 1, 128)
    generator = torch.Generator().manual_seed(0)
    whole = torch.arange(16, 33)[:, None] * 2**19 + torch.arange(-8, 9)
    scales = torch.cat([whole.flatten().double() / 2**23, 1 + torch.rand(200, generator=generator).double()])
    scales = torch.cat([scales, 2 - torch.tensor([2.0**-23, 2.0**-22], dtype=torch.float64)])
    scales = (scales.float() * 2.0 ** torch.randint(-6, 7, scales.shape, generator=generator)).tolist()
    rows = x.shape[0]
    slots = torch.arange(rows, device="cuda")
    made = AttentionSpec(1, 1, 128, kv_dtype=name, layout="nhd", page_size=64)
    cache = PagedCache.allocate(made, rows // 64, "cuda", k_scale=1.0, v_scale=1.0)
    there = x.cuda()
    for scale in scales:
        cache.k_scale.fill_(scale)
        append(AppendCall(made, there, there, slots, cache.bytes(), cache.counters))
        want = quantise(x, torch.tensor(scale), format)
        assert torch.equal(cache.k.view(want.shape).cpu(), want), scale


@pytest.mark.parametrize("layout", ["leaf", "nhd"])
def test_a_captured_append_replays_with_new_slots_and_repeats_bit_for_bit(layout):
    made = spec(layout)
    caches = [PagedCache.allocate(made, 8, "cuda", k_scale=0.5, v_scale=2.0) for _ in range(3)]
    k, v = (torch.randn(100, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    slots = torch.full((100,), -1, device="cuda", dtype=torch.int64)
    captured = Captured(lambda: append(AppendCall(made, k, v, slots, caches[0].bytes(), caches[0].counters)), k.device)
    assert not caches[0].k.any() and not caches[0].v.any()
    slots.copy_(torch.arange(64, 164))
    captured.replay()
    for cache in caches[1:]:
        append(AppendCall(made, k, v, slots, cache.bytes(), cache.counters))
        assert torch.equal(cache.k, caches[0].k) and torch.equal(cache.v, caches[0].v)


@pytest.mark.parametrize("rows", [256, 8192])
def test_of_two_appends_to_the_same_slots_the_later_stays(rows):
    """One is launched while the one before it runs, and has to wait for its end."""
    made = spec()
    k, v = (torch.randn(2, rows, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    slots = torch.randperm(rows, device="cuda") * 2
    cache, alone = (PagedCache.allocate(made, rows // 32, "cuda", k_scale=0.5, v_scale=2.0) for _ in range(2))
    append(AppendCall(made, k[1], v[1], slots, alone.bytes(), alone.counters))

    def both() -> None:
        for i in (0, 1):
            append(AppendCall(made, k[i], v[i], slots, cache.bytes(), cache.counters))

    captured = Captured(both, k.device)
    for repeat in (both, captured.replay) * 20:
        repeat()
        assert torch.equal(cache.k, alone.k) and torch.equal(cache.v, alone.v)


@pytest.mark.parametrize("layout", ["leaf", "nhd", "hnd"])
def test_pages_beyond_32_bit_offsets(layout):
    """Case Z9: the same tokens at the first and at the last pages of a pool of 4.5 GB."""
    made = spec(layout)
    pages = 35_000
    cache = PagedCache.allocate(made, pages, "cuda")
    k, v = (torch.randn(130, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in "kv")
    for first in (0, pages - 4):
        slots = torch.arange(130, device="cuda") + first * made.page_size
        append(AppendCall(made, k, v, slots, cache.bytes(), cache.counters))
    assert cache.k[0].any() and cache.v[0].any()
    assert torch.equal(cache.k[:3], cache.k[-4:-1]) and torch.equal(cache.v[:3], cache.v[-4:-1])
    assert not cache.k[3:-4].any() and not cache.v[3:-4].any()
