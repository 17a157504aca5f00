"""Device functions that attention kernels share, each against its law: every byte, every rounding, every column."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from octavo.device import KNOWN
from octavo.formats import FORMATS, cast, decode
from octavo.kernels.triton import _plan, _tiles
from octavo.layouts import leaf_column
from octavo.spec import AttentionSpec

pytestmark = [pytest.mark.usefixtures("interpreter"), pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@triton.jit
def _decode(source, target, e4m3: tl.constexpr, n: tl.constexpr):
    i = tl.arange(0, n)
    x = tl.load(source + i)
    tl.store(target + i, _tiles.e4m3_to_fp16(x) if e4m3 else _tiles.e5m2_to_fp16(x))


@triton.jit
def _encode(source, target, n: tl.constexpr):
    i = tl.program_id(0) * n + tl.arange(0, n)
    tl.store(target + i, _tiles.fp32_to_e4m3(tl.load(source + i)))


@triton.jit
def _columns(target, p, moved, c: tl.constexpr):
    j = tl.arange(0, c.tokens)
    tl.store(target + j, _tiles.token_of_column(j))
    rows = tl.arange(0, c.rows)[:, None] * c.tokens
    tl.store(moved + rows + j[None, :], _tiles.in_value_order(tl.load(p + rows + j[None, :]), c))


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_every_byte_becomes_its_number(name):
    stored = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    got = torch.empty(256, dtype=torch.float16)
    _decode[(1,)](stored, got, name == "fp8_e4m3", 256)
    assert torch.equal(got.nan_to_num(nan=-1.0), decode(stored, FORMATS[name], torch.float16).nan_to_num(nan=-1.0))
    assert torch.equal(got.isnan(), decode(stored, FORMATS[name]).isnan())


def test_fp32_is_rounded_as_formats_say():
    every = decode(torch.arange(256, dtype=torch.int32).to(torch.uint8), FORMATS["fp8_e4m3"])
    every = every[every.isfinite()].sort().values
    between = (every[1:] + every[:-1]) / 2  # ties
    near = torch.cat([between.nextafter(every[1:]), between.nextafter(every[:-1])])
    wild = torch.tensor([float("nan"), float("inf"), -float("inf"), 464.0, 1e30, -1e-30, 2.0**-10, -0.0, 2.0**-149])
    x = torch.cat([every, between, near, wild, torch.randn(4096 - 5 * every.numel() + 4 + 0 * 9) * 8])
    x = x[: x.numel() // 64 * 64].contiguous()
    got = torch.empty(x.numel(), dtype=torch.uint8)
    _encode[(x.numel() // 64,)](x, got, 64)
    assert torch.equal(got, cast(x, FORMATS["fp8_e4m3"]))


def test_columns_of_the_leaf_layout():
    c = _plan.prefill_constants(AttentionSpec(2, 1, 64), KNOWN["h200"])
    tokens = torch.empty(c.tokens, dtype=torch.int32)
    p, moved = torch.randn(c.rows, c.tokens), torch.empty(c.rows, c.tokens)
    _columns[(1,)](tokens, p, moved, c)
    assert [leaf_column(t) for t in tokens.tolist()] == list(range(c.tokens))
    assert torch.equal(moved, p[:, tokens.long()])
