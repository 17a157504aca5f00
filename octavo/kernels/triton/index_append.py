"""index_append: quantise the indexer's keys with one scale a token and write them to their slots, in one launch.

A program takes a few rows whole, so that a row's scale is a reduction in registers. Bytes and scales equal
octavo.reference.index_append bit for bit: division by the scale is IEEE's, and the cast is integer arithmetic on every
device. There is one key head, so both cost less than the launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ...device import Device
from ...indexer_calls import SCALE_BYTES, IndexAppendCall, IndexBytes
from ..constants import CompileTime
from ._plan import target_of
from ._tiles import FP8_MAX, float32, fp32_to_e4m3


@dataclass(frozen=True)
class Constants(CompileTime):
    """Compile-time constants: one `tl.constexpr` argument.

    Attributes:
        rows: of a program. num_warps: Triton's launch option.
        dim, dim_padded: elements of a key, and the power of two above.
        page_size, scale_format: of the cache.
    """

    rows: int
    num_warps: int
    dim: int
    dim_padded: int
    page_size: int
    scale_format: str


def index_append(call: IndexAppendCall) -> None:
    """Write call.k [T, D] and its scales to call.slots; slots outside the pool are skipped and counted."""
    if call.slots.shape[0]:
        arguments, programs = launch(call, target_of(call.k.device))
        index_append_kernel[(programs,)](**arguments)


def launch(call: IndexAppendCall, device: Device) -> tuple[dict[str, Any], int]:
    """The kernel's arguments and the number of programs."""
    cache, rows = call.cache, call.slots.shape[0]
    c = _constants(rows, device, cache.head_dim, cache.page_size, cache.scale_format)
    arguments = {
        "k": call.k,
        "k_row": call.k.stride(0),
        "k_dim": call.k.stride(1),
        "slots": call.slots,
        "slots_stride": call.slots.stride(0),
        "pages": cache.pages,
        "page_stride": cache.pages.stride(0),
        "counters": call.counters,
        "rows": rows,
        "capacity": cache.num_pages * cache.page_size,
        "c": c,
        "num_warps": c.num_warps,
    }
    return arguments, triton.cdiv(rows, c.rows)


@lru_cache(maxsize=64)
def _constants(rows: int, device: Device, dim: int, page_size: int, scale_format: str) -> Constants:
    # One warp on four rows where those are few, so that no program waits for a barrier; else enough bytes in flight.
    few = rows <= 16 * device.num_sms
    return Constants(4 if few else 16, 1 if few else 4, dim, triton.next_power_of_2(dim), page_size, scale_format)


@triton.jit(do_not_specialize=["rows", "capacity"])
def index_append_kernel(
    k, k_row, k_dim, slots, slots_stride, pages, page_stride, counters, rows, capacity, c: tl.constexpr
):
    """Rows [program * c.rows, + c.rows) of k; pages: bytes, a page each `page_stride`."""
    row = tl.program_id(0).to(tl.int64) * c.rows + tl.arange(0, c.rows)
    there = row < rows
    d = tl.arange(0, c.dim_padded)[None, :]
    inside = d < c.dim
    slot = tl.load(slots + row * slots_stride, mask=there, other=-1)
    x = float32(tl.load(k + row[:, None] * k_row + d * k_dim, mask=there[:, None] & inside, other=0.0))
    live = (slot >= 0) & (slot < capacity)
    size = tl.abs(x)
    amax = tl.max(tl.where(size < float("inf"), size, 0.0), 1)
    scale = tl.div_rn(amax, tl.full([c.rows], FP8_MAX, tl.float32))
    scale = tl.where(amax > 0, tl.maximum(scale, 2.0**-126), 1.0)
    if c.scale_format != "fp32":
        scale = _power_of_two_above(scale)
    stored = fp32_to_e4m3(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)))
    owned = tl.where(live, slot, 0)
    page, offset = owned // c.page_size, owned % c.page_size
    start = page * page_stride
    tl.store(pages + (start + offset * c.dim)[:, None] + d, stored, mask=live[:, None] & inside)
    bits = scale.to(tl.int32, bitcast=True)
    if c.scale_format == "ue8m0":
        bits = (bits >> 23) * 0x01010101
    scales = pages.to(tl.pointer_type(tl.int32), bitcast=True)  # a page and its keys are whole words
    tl.store(scales + start // 4 + (c.page_size * c.dim // 4 + offset), bits, mask=live)
    _count(slot, x, live, counters, capacity)


@triton.jit
def _power_of_two_above(scale):
    """The smallest power of two that is at least `scale`, a positive normal fp32."""
    bits = scale.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _count(slot, x, live, counters, capacity):
    """Add the rows whose slot is neither -1 nor in the pool, and the NaN of the others."""
    skipped = tl.sum(((slot < -1) | (slot >= capacity)).to(tl.int32), 0)
    nans = tl.sum(((x != x) & live[:, None]).to(tl.int32))
    if skipped > 0:
        tl.atomic_add(counters, skipped, sem="relaxed")
    if nans > 0:
        tl.atomic_add(counters + 1, nans, sem="relaxed")


def aot_cases(device: Device) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Launches to compile ahead of time: see octavo/testing/aot.py."""
    for rows, dtype, scale_format, dim in (
        (64, torch.bfloat16, "fp32", 128),
        (64, torch.bfloat16, "ue8m0", 128),
        (8192, torch.bfloat16, "pow2", 128),
        (8192, torch.float32, "fp32", 64),
    ):
        pages = torch.empty((2, 64, 1, dim + SCALE_BYTES), dtype=torch.uint8, device="meta")
        call = IndexAppendCall(
            torch.empty((rows, dim), dtype=dtype, device="meta"),
            torch.empty(rows, dtype=torch.int64, device="meta"),
            IndexBytes(pages, scale_format),
            torch.empty(2, dtype=torch.int32, device="meta"),
        )
        yield f"{rows} rows of {dim} {dtype}, {scale_format}", index_append_kernel, launch(call, device)[0]
