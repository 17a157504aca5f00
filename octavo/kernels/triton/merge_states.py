"""merge_states: attention over the union of disjoint sets of keys, from attention over each; so decode's splits merge.

One program per query row and head runs over the parts in their order, with an online softmax of their lse.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ...device import Device
from ..constants import CompileTime
from ._plan import BOUNDS, INTERPRETED, as_bytes
from ._tiles import (
    LN2,
    LOG2E,
    NEVER,
    decodes,
    e4m3_to_fp16,
    finish,
    fp32_to_bf16,
    fp32_to_e4m3,
    head_scale,
    sequence,
    store_lse,
    store_out,
)


@dataclass(frozen=True)
class Constants(CompileTime):
    """Compile-time constants of `merge_states_kernel`: what casts need."""

    interpreted: bool


PARTS = tl.constexpr(8)  # parts loaded together


@triton.jit
def merge_parts(outs, lses, out_stride, lse_stride, out_dim, count, unit, dim: tl.constexpr, dim_padded: tl.constexpr):
    """`count` parts of one row summed with weights 2^(lse unit - peak): (acc fp32 [dim padded], total, peak).

    outs, lses: the row's first part; out_stride, lse_stride: to its next (int64). Of a part with lse -inf nothing else
    is read.
    """
    d = tl.arange(0, dim_padded)
    acc = tl.full([dim_padded], 0.0, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    peak = tl.full((), NEVER, tl.float32)
    for base in range(0, count, PARTS):
        part = base + tl.arange(0, PARTS)
        lse = tl.load(lses + part * lse_stride, mask=part < count, other=float("-inf")) * unit
        new = tl.maximum(peak, tl.max(lse, 0))
        weight = tl.exp2(lse - new)
        there = (weight > 0)[:, None] & (d < dim)[None, :]
        x = tl.load(outs + ((part * out_stride)[:, None] + d.to(tl.int64)[None, :] * out_dim), mask=there, other=0)
        x = e4m3_to_fp16(x).to(tl.float32) if x.dtype == tl.uint8 else x.to(tl.float32)
        alpha = tl.exp2(peak - new)
        acc = acc * alpha + tl.sum(x * weight[:, None], 0)
        total = total * alpha + tl.sum(weight, 0)
        peak = new
    return acc, total, peak


@triton.jit(do_not_specialize=["lses_part"])
def merge_states_kernel(
    outs,
    lses,
    out,
    lse,
    outs_strides,
    lses_part,
    lses_strides,
    out_strides,
    lse_strides,
    count,
    dim: tl.constexpr,
    dim_padded: tl.constexpr,
    c: tl.constexpr,
):
    """Grid (rows, heads): outs [n, T, Hq, D], lses [n, T, Hq] -> out [T, Hq, D], lse [T, Hq]."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    acc, total, peak = merge_parts(
        outs + row * outs_strides[1] + head * outs_strides[2],
        lses + row * lses_strides[0] + head * lses_strides[1],
        tl.cast(outs_strides[0], tl.int64),
        tl.cast(lses_part, tl.int64),
        outs_strides[3],
        count,
        LOG2E,
        dim,
        dim_padded,
    )
    sees = total > 0
    acc = acc / tl.where(sees, total, 1.0)
    d = tl.arange(0, dim_padded)
    at = out + row * out_strides[0] + head * out_strides[1] + d.to(tl.int64) * out_strides[2]
    if out.dtype.element_ty == tl.uint8:
        acc = fp32_to_e4m3(acc)
    elif out.dtype.element_ty == tl.bfloat16:
        acc = fp32_to_bf16(acc, c)
    tl.store(at, acc.to(out.dtype.element_ty), mask=d < dim)
    merged = tl.where(sees, (peak + tl.log2(total)) * LN2, float("-inf"))
    tl.store(lse + row * lse_strides[0] + head * lse_strides[1], merged)


@triton.jit
def _no_sequence(program, programs, batch, output, size, total_rows, head, c: tl.constexpr):
    """0 and -inf to head `head` of the rows before the first sequence and after the last; programs share the rows."""
    first = tl.minimum(tl.maximum(tl.load(batch.query_starts), 0), total_rows)
    end = tl.minimum(tl.maximum(tl.load(batch.query_starts + size), 0), total_rows)
    r = tl.arange(0, 16)
    for base in range(program * 16, total_rows, programs * 16):
        row = base + r
        there = (row < total_rows) & ((row < first) | (row >= end))
        if tl.max(there.to(tl.int32), 0) > 0:
            q_head = r * 0 + head
            store_out(
                output.out, tl.full([16, c.dim_v_padded], 0.0, tl.float32), row.to(tl.int64), q_head, there, output, c
            )
            store_lse(tl.full([16], float("-inf"), tl.float32), row.to(tl.int64), q_head, there, output)


@triton.jit(do_not_specialize=[*BOUNDS, "row_programs", "fill_programs"])
def merge_splits_kernel(
    memory,
    output,
    batch,
    partial,
    size,
    capacity,
    total_rows,
    num_decodes,
    table_row,
    num_pages,
    row_programs,
    fill_programs,
    c: tl.constexpr,
):
    """Grid (row_programs + fill_programs, query heads): a row of a decode that was split, or rows of no sequence."""
    bounds = (size, capacity, total_rows, num_decodes)
    program = tl.program_id(0)
    q_head = tl.program_id(1)
    if program >= row_programs:
        _no_sequence(program - row_programs, fill_programs, batch, output, size, total_rows, q_head, c)
    else:
        index = program // partial.max_rows
        row = program % partial.max_rows
        start, rows, _ = sequence(index, batch, bounds)
        if decodes(index, rows, bounds, c) & (row < rows):
            first = tl.load(partial.pieces + 2 * index)
            count = tl.load(partial.pieces + 2 * index + 1)
            if count > 1:
                head = q_head // c.group
                at = (first.to(tl.int64) * partial.heads + head) * partial.rows + row * c.group + q_head % c.group
                step = tl.cast(partial.heads, tl.int64) * partial.rows
                acc, total, peak = merge_parts(
                    partial.out + at * c.dim_v,
                    partial.lse + at,
                    step * c.dim_v,
                    step,
                    1,
                    count,
                    1.0,
                    c.dim_v,
                    c.dim_v_padded,
                )
                one = tl.arange(0, 1)
                there = one == 0
                heads = one + q_head
                total, lse = finish(one.to(tl.float32) + total, one.to(tl.float32) + peak, heads, there, output, c)
                v_scale = head_scale(memory.v_scale, memory.v_scale_strides, head, c)
                out_row = (one + start + row).to(tl.int64)
                store_out(output.out, acc[None, :] * (v_scale / total)[:, None], out_row, heads, there, output, c)
                store_lse(lse, out_row, heads, there, output)


def merge_states(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """outs [n, T, Hq, Dv] and lses fp32 [n, T, Hq] -> out [T, Hq, Dv] of outs' dtype, lse fp32 [T, Hq]."""
    out = torch.empty_like(outs[0])
    lse = torch.empty(out.shape[:2], dtype=torch.float32, device=outs.device)
    if lse.numel():
        merge_states_kernel[tuple(lse.shape)](**launch(outs, lses, out, lse))
    return out, lse


def launch(outs: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> dict[str, Any]:
    """The arguments of `merge_states_kernel`."""
    dim = outs.shape[3]
    return {
        "outs": as_bytes(outs),
        "lses": lses,
        "out": as_bytes(out),
        "lse": lse,
        "outs_strides": outs.stride(),
        "lses_part": lses.stride(0),
        "lses_strides": lses.stride()[1:],
        "out_strides": out.stride(),
        "lse_strides": lse.stride(),
        "count": outs.shape[0],
        "dim": dim,
        "dim_padded": triton.next_power_of_2(dim),
        "c": Constants(INTERPRETED),
        "num_warps": 2,
    }


def aot_cases(device: Device) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Launches to compile ahead of time: see octavo/testing/aot.py."""
    for dtype, dim in ((torch.bfloat16, 128), (torch.float16, 80), (torch.float32, 512), (torch.float8_e4m3fn, 64)):
        outs = torch.empty((8, 64, 32, dim), dtype=dtype, device="meta")
        lses = torch.empty(outs.shape[:3], dtype=torch.float32, device="meta")
        yield f"merge_states {dtype} of {dim}", merge_states_kernel, launch(outs, lses, outs[0], lses[0])
