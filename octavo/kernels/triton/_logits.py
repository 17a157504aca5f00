"""A tile of the indexer's logits: c.tokens keys by c.rows query rows, every head of which is a column of one product.

`c` is a `Constants` everywhere: what is known when a kernel is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl

from ...device import Device
from ..constants import CompileTime
from ._plan import INTERPRETED
from ._tiles import e4m3_to_fp16, fp32_to_bf16, product

FILL = tl.constexpr(2048)  # columns filled together
# Columns of a tile (query rows times heads) that leave no spills; elsewhere 128.
_WIDE = ("sm_90",)


@dataclass(frozen=True)
class Constants(CompileTime):
    """Compile-time constants: one `tl.constexpr` argument.

    Attributes:
        tokens, rows: keys and query rows of a tile. num_warps, num_stages: Triton's launch options.
        programs_per_sm: how many programs the registers of an SM hold.
        heads, heads_padded, dim, dim_padded: of the query, and the powers of two above.
        page_size, one_page, scales: of a paged cache; one_page: a tile lies on one page. 0, False, fp32 for ragged.
        out: dtype of the logits. fills: whether columns that no row sees are written.
        fp8_dot: e4m3 is multiplied as it is, else as fp16. interpreted: Triton's interpreter runs the kernel.
    """

    tokens: int
    rows: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    heads: int
    heads_padded: int
    dim: int
    dim_padded: int
    page_size: int
    one_page: bool
    scales: str
    out: str
    fills: bool
    fp8_dot: bool
    interpreted: bool


@lru_cache(maxsize=256)
def constants_of(
    device: Device, heads: int, dim: int, rows: int, out: torch.dtype, fills: bool, page_size: int, scales: str
) -> Constants:
    """Constants for calls of at least `rows` query rows that share keys; page_size 0: ragged."""
    padded = max(16, triton.next_power_of_2(heads))
    # Pages are read once a group of rows, from memory: there wide tiles pay. A run of keys lies in the L2 cache.
    columns = 256 if device.arch in _WIDE and page_size else 128
    together = min(triton.next_power_of_2(rows), max(1, columns // padded))
    tokens = 64
    return Constants(
        tokens=tokens,
        rows=together,
        num_warps=4 if device.fp8_dot or together * padded <= 64 else 8,  # keys in fp16 need registers too
        num_stages=6 if page_size else 4,  # a tile's page id and its keys, which wait for it, share them
        programs_per_sm=4 if together * padded <= 64 else 3 if together * padded <= 128 else 2,
        heads=heads,
        heads_padded=padded,
        dim=dim,
        dim_padded=triton.next_power_of_2(dim),
        page_size=page_size,
        one_page=page_size > 0 and page_size % tokens == 0,
        scales=scales,
        out=str(out).removeprefix("torch."),
        fills=fills,
        fp8_dot=device.fp8_dot and not INTERPRETED,  # the interpreter takes e4m3's NaN for a number
        interpreted=INTERPRETED,
    )


@triton.jit
def typed(pool, c: tl.constexpr):
    """A pool of bytes as one of FP8, if the device has it: then a tile goes to the tensor core as it is."""
    if c.fp8_dot:
        return pool.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    else:
        return pool


@triton.jit
def operand(x, c: tl.constexpr):
    """Stored elements as what is multiplied."""
    return x if c.fp8_dot else e4m3_to_fp16(x)


@triton.jit
def query_rows_of(first, limit, q, q_strides, weights, w_strides, c: tl.constexpr):
    """Query rows [first, first + c.rows), those below `limit`: operand [rows * heads padded, D] and weights."""
    column = tl.arange(0, c.rows * c.heads_padded)
    row = (first + column // c.heads_padded).to(tl.int64)
    head = column % c.heads_padded
    there = (row < limit) & (head < c.heads)
    d = tl.arange(0, c.dim_padded)[None, :]
    at = (row * q_strides[0] + head.to(tl.int64) * q_strides[1])[:, None] + d.to(tl.int64) * q_strides[2]
    x = tl.load(typed(q, c) + at, mask=there[:, None] & (d < c.dim), other=0.0 if c.fp8_dot else 0)
    w = tl.load(weights + row * w_strides[0] + head.to(tl.int64) * w_strides[1], mask=there, other=0.0)
    return operand(x, c), w


@triton.jit
def logits_of(k, k_scale, q, w, c: tl.constexpr):
    """Logits [tokens, rows] of keys k [tokens, D] with scales [tokens]."""
    x = product(operand(k, c), tl.trans(q), c)
    x = (x + tl.abs(x)) * w[None, :]
    x = tl.sum(tl.reshape(x, [c.tokens, c.rows, c.heads_padded]), 2)
    return x * 0.5 * k_scale[:, None]


@triton.jit
def store(at, value, mask, c: tl.constexpr):
    """Write fp32 `value` in the dtype of the logits."""
    if c.out == "bfloat16":
        tl.store(at, fp32_to_bf16(value, c), mask=mask)
    else:
        tl.store(at, value, mask=mask)


@triton.jit
def fill_outside(row, begin, end, low, high, out, out_strides, fill, c: tl.constexpr):
    """`fill` to the columns of [begin, end) of a row that are not in [low, high)."""
    for base in range(begin, end, FILL):
        if (high - base < FILL) | (base < low):
            column = base + tl.arange(0, FILL)
            value = tl.zeros([FILL], tl.float32) + fill
            outside = (column < end) & ((column < low) | (column >= high))
            store(out + row.to(tl.int64) * out_strides[0] + column.to(tl.int64) * out_strides[1], value, outside, c)
