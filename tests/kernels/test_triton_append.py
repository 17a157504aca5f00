"""Triton's append under the interpreter, bit for bit against the reference."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from append_cases import Case, compare, spec_of
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from octavo.device import KNOWN, Device
from octavo.formats import FORMATS, cast
from octavo.kernels.triton import append as module
from octavo.kernels.triton._tiles import token_of_column
from octavo.kernels.triton.append import _column_of_token, _divide, _fp8_bits, append, tile_of
from octavo.layouts import LEAF_COLUMNS

pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]

spec = partial(spec_of, heads=2, dim=32, page=32)
FP8 = [
    Case(spec(layout, kv_dtype, granularity), x, slots=slots, values=values)
    for (layout, slots), kv_dtype, granularity, (x, values) in itertools.product(
        [("leaf", "prompt"), ("leaf", "holes"), ("nhd", "holes")],
        ["fp8_e4m3", "fp8_e5m2"],
        ["tensor", "head", "token_head"],
        [(torch.bfloat16, "edges"), (torch.bfloat16, "wild"), (torch.float16, "wild"), (torch.float32, "wild")],
    )
]
PLAIN = [
    Case(spec(layout, kv_dtype), x, slots="holes", values="wild")
    for layout in ("nhd", "hnd")
    for kv_dtype in ("bfloat16", "float16", "float32")
    for x in (torch.bfloat16, torch.float16, torch.float32)
]
OTHERS = [
    *(Case(spec(layout), form=form) for layout in ("leaf", "nhd", "hnd") for form in ("fused", "transposed")),
    *(
        Case(spec(layout, granularity=g), padded=True)
        for layout in ("leaf", "nhd", "hnd")
        for g in ("tensor", "token_head")
    ),
    *(Case(spec(layout), slots=slots, rows=130) for layout in ("leaf", "nhd") for slots in ("shifted", "decode")),
    Case(spec(page=64), slots="shifted", rows=130),
    *(Case(spec("hnd", granularity=g), slots="holes", values="wild") for g in ("tensor", "head", "token_head")),
    *(Case(spec(layout, granularity=g), values="huge") for layout in ("leaf", "nhd") for g in ("tensor", "token_head")),
    *(Case(spec(layout), scales=False) for layout in ("leaf", "nhd", "hnd")),
    *(Case(spec(layout), rows=1, slots="decode") for layout in ("leaf", "nhd", "hnd")),
    *(Case(spec(page=page), rows=2 * page, slots=slots) for page in (64, 96, 128) for slots in ("prompt", "holes")),
    *(Case(spec("nhd", page=page), rows=40, slots="holes") for page in (1, 24, 528)),
    *(Case(spec(layout, dim=80, dim_v=48), values="edges") for layout in ("leaf", "nhd", "hnd")),
    *(Case(spec(layout, heads=3, dim=192, dim_v=128), rows=20) for layout in ("leaf", "hnd")),
    *(
        Case(spec("nhd", kv_dtype, g, heads=1, dim=576, dim_v=512, mla=True), rows=12, slots="holes", values="wild")
        for kv_dtype, g in (("fp8_e4m3", "tensor"), ("fp8_e4m3", "token_head"), ("bfloat16", "tensor"))
    ),
]


HUGE = [case for case in OTHERS if case.values == "huge"]
LEAF = [case for case in OTHERS if case.spec.layout == "leaf"]


@pytest.mark.parametrize("case", FP8 + PLAIN + OTHERS, ids=str)
def test_append_equals_the_reference(case):
    assert compare(case, append, "cpu") == []


@pytest.mark.parametrize("case", LEAF, ids=str)
def test_append_of_few_tokens_equals_the_reference(monkeypatch, case):
    """The smaller tiles, which a GPU takes for few tokens, store what is scattered in another order."""
    monkeypatch.setattr(module, "_few", lambda *a: True)
    monkeypatch.setattr(module, "_constants", module._constants.__wrapped__)
    assert compare(case, append, "cpu") == []


def exact_fma(builder, x, y, z):
    """tl.fma of fp32 as a GPU does it, rounded once: an exact product, and a sum rounded to odd before fp32."""
    x, y, z = (np.asarray(a.data, np.float64) for a in (x, y, z))
    product = x * y
    total = product + z
    back = total - product
    error = (product - (total - back)) + (z - back)
    even = (np.asarray(total).view(np.int64) & 1) == 0
    odd = np.where((error != 0) & even, np.nextafter(total, np.sign(error) * np.inf), total)
    return TensorHandle(np.where(np.isfinite(total), odd, total).astype(np.float32), tl.float32)


@pytest.fixture
def fused(monkeypatch):
    """The interpreter takes the compiled kernel's way to divide, its tl.fma being one."""
    make = module._constants
    monkeypatch.setattr(InterpreterBuilder, "create_fma", exact_fma)
    monkeypatch.setattr(module, "_constants", lambda *a: replace(make(*a), interpreted=False))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("case", [c for c in FP8 if c.spec.layout == "leaf"] + HUGE + OTHERS[-3:], ids=str)
def test_append_without_a_division_equals_the_reference(case):
    assert compare(case, append, "cpu") == []


@triton.jit
def divide(x, s, out, SIZE: tl.constexpr, BITS: tl.constexpr):
    at = tl.arange(0, SIZE)
    scale = tl.load(s)
    tl.store(out + at, _divide(tl.load(x + at), scale, tl.div_rn(1.0, scale), BITS))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_divide_rounds_to_the_same_byte_as_ieee_division(x_dtype):
    """All 16-bit x that are not too large, and random fp32; scales that put quotients beside rounding boundaries."""
    generator = torch.Generator().manual_seed(1)
    beside = (torch.arange(16, 32)[:, None] * 2**19 + torch.tensor([-8, -1, 0, 1, 7])).flatten().double() / 2**23
    scales = torch.cat([beside, 1 + torch.rand(20, generator=generator).double(), torch.tensor([2 - 2.0**-23])]).float()
    if x_dtype == torch.float32:
        x = torch.randn(2**15, generator=generator)
    else:
        x = torch.arange(2**16).to(torch.int32).to(torch.int16).view(x_dtype).float()
        x = torch.where(x.abs() < 2.0**39, x, 0.0)
    out = torch.empty_like(x)
    for scale in scales:
        divide[(1,)](x, scale.reshape(1), out, x.numel(), 8 * x_dtype.itemsize)
        want = x / scale
        if x_dtype == torch.float32:
            assert torch.equal(out, want), scale.item()
        for format in (FORMATS["fp8_e4m3"], FORMATS["fp8_e5m2"]):
            assert torch.equal(cast(out, format), cast(want, format)), scale.item()


def test_nothing_to_append_launches_nothing():
    assert compare(Case(spec("nhd"), rows=0), append, "cpu") == []


@triton.jit
def cast_by_integers(x, out, SIZE: tl.constexpr, E4M3: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, _fp8_bits(tl.load(x + at), E4M3))


@triton.jit
def there_and_back(columns, tokens):
    at = tl.arange(0, 64)
    tl.store(columns + at, _column_of_token(at))
    tl.store(tokens + at, token_of_column(_column_of_token(at)))


def test_the_integer_cast_equals_the_formats_everywhere():
    """Each code, each midpoint, and the fp32 neighbours of both, of either sign; what lies beyond; infinity."""
    for name in ("fp8_e4m3", "fp8_e5m2"):
        format = FORMATS[name]
        codes = torch.arange(128, dtype=torch.uint8).view(format.dtype).float()
        codes = codes[codes.isfinite()]
        points = torch.cat(
            [codes, (codes[1:] + codes[:-1]) / 2, codes[-1:] * 1.0625, torch.tensor([1e38, float("inf")])]
        )
        points = torch.cat(
            [points, torch.nextafter(points, torch.tensor(0.0)), torch.nextafter(points, torch.tensor(1e38))]
        )
        points = torch.cat([points, -points])
        x = torch.zeros(2048)
        x[: points.numel()] = points
        out = torch.empty(2048, dtype=torch.uint8)
        cast_by_integers[(1,)](x, out, 2048, name == "fp8_e4m3")
        assert torch.equal(out, cast(x, format)), name


def test_leaf_columns_are_those_of_the_layout():
    columns, tokens = torch.empty(64, dtype=torch.int32), torch.empty(64, dtype=torch.int32)
    there_and_back[(1,)](columns, tokens)
    assert columns.tolist() == [16 * (t // 16) + LEAF_COLUMNS[t % 16] for t in range(64)]
    assert tokens.tolist() == list(range(64))


@pytest.mark.parametrize("device", sorted(KNOWN))
@pytest.mark.parametrize("rows", [1, 64, 256, 8192, 1 << 20])
def test_a_leaf_tile_divides_the_page(device, rows):
    for page, dim in itertools.product((32, 64, 96, 128, 256), (64, 128, 256, 512)):
        tile, _, warps = tile_of(spec(dim=dim, page=page), rows, Device.named(device))
        assert page % tile == 0 and tile % 16 == 0 and 1 <= warps <= 16
