"""mqa_logits: the indexer's logits over pages (a decode step) and over one run of keys (a prefill).

    logits[i, t] = k_scale[t] * sum_h relu(q[i, h] . k[t]) * w[i, h]

A tile is c.tokens keys by c.rows query rows, every head of which is a column of one product: keys are the operand of M
rows as they lie in memory, and the head sum stays inside a warp. What it makes explicit:

* Products. e4m3 by e4m3 is exact in fp32 (8 significant bits). As fp16 operands, which hold every e4m3 number, a dot
  of D adds rounding of fp32: at most D 2^-24 sum|q k|. As e4m3 operands Hopper's and Ada's tensor cores keep about
  14 bits of an aligned sum: at most D / 32 2^-13 max|q k| a step, 1e-4 of a random dot.
* relu(x) w is (x + |x|) w / 2, the half applied once at the end: exact, NaN stays NaN, and no select is needed.
* The paged form has a fixed number of programs. Each takes an equal run of tiles of the whole batch, which it finds
  from the lengths on the device, so a graph replays at any lengths; then its share of what is to be filled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from ...device import Device
from ...indexer_calls import SCALE_BYTES, IndexBytes, LogitsCall, PagedLogitsCall
from ._logits import FILL, constants_of, fill_outside, logits_of, query_rows_of, store, typed
from ._plan import as_bytes, target_of

SCAN = tl.constexpr(128)  # sequences looked at together


def paged_mqa_logits(call: PagedLogitsCall) -> None:
    """Write call.out as octavo.reference.mqa_logits defines it; one launch, nothing is read on the host."""
    if call.q.shape[0] and call.q.shape[1]:
        arguments, programs = paged_launch(call, target_of(call.q.device))
        paged_mqa_logits_kernel[(programs,)](**arguments)


def paged_launch(call: PagedLogitsCall, device: Device) -> tuple[dict[str, Any], int]:
    """The kernel's arguments and the number of programs."""
    batch, rows, heads, dim = call.q.shape
    cache, lens = call.cache, call.seq_lens
    c = constants_of(
        device, heads, dim, rows, call.out.dtype, call.fill is not None, cache.page_size, cache.scale_format
    )
    capacity = min(call.max_context, call.page_table.shape[1] * cache.page_size, 2**31 - 2**16)
    a_sequence = lens.dim() == 1
    q = as_bytes(call.q)
    arguments = {
        "q": q,
        "q_strides": q.stride(),
        "weights": call.weights,
        "w_strides": call.weights.stride(),
        "pages": cache.pages,
        "page_stride": cache.pages.stride(0),
        "num_pages": cache.num_pages,
        "lens": lens,
        "lens_strides": (lens.stride(0), 0 if a_sequence else lens.stride(1)),
        "before_last": 1 if a_sequence else 0,
        "table": call.page_table,
        "table_row": call.page_table.stride(0),
        "table_column": call.page_table.stride(1),
        "out": call.out,
        "out_row": call.out.stride(0),
        "out_column": call.out.stride(1),
        "batch": batch,
        "query_rows": rows,
        "capacity": capacity,
        "max_context": call.max_context,
        "fill": 0.0 if call.fill is None else float(call.fill),
        "c": c,
        "num_warps": c.num_warps,
        "num_stages": c.num_stages,
    }
    most = batch * -(-rows // c.rows) * -(-max(capacity, 1) // c.tokens)
    if c.fills:
        most = max(most, batch * rows * -(-call.max_context // FILL.value))
    return arguments, max(1, min(most, c.programs_per_sm * device.num_sms))


@triton.jit
def _row_lengths(sequence, row, batch, query_rows, capacity, lens, lens_strides, before_last, c: tl.constexpr):
    """Tokens that rows `row` of sequences `sequence` see; 0 where there is no such row. The two broadcast."""
    there = (sequence < batch) & (row < query_rows)
    length = tl.load(lens + sequence.to(tl.int64) * lens_strides[0] + row * lens_strides[1], mask=there, other=0)
    length = tl.maximum(length, -(2**30)) - before_last * (query_rows - 1 - row)
    return tl.where(there, tl.minimum(tl.maximum(length, 0), capacity), 0)


@triton.jit
def _longest(sequence, batch, query_rows, capacity, lens, lens_strides, before_last, c: tl.constexpr):
    """Tiles that sequences [n] have: of the longest of their rows."""
    longest = sequence * 0
    if before_last == 1:
        longest = _row_lengths(
            sequence, sequence * 0 + (query_rows - 1), batch, query_rows, capacity, lens, lens_strides, before_last, c
        )
    else:
        for row in range(0, query_rows):
            longest = tl.maximum(
                longest,
                _row_lengths(
                    sequence, sequence * 0 + row, batch, query_rows, capacity, lens, lens_strides, before_last, c
                ),
            )
    return tl.cdiv(longest, c.tokens)


@triton.jit
def _share(program, programs, groups, batch, query_rows, capacity, lens, lens_strides, before_last, c: tl.constexpr):
    """The tiles [begin, end) of a program, counted over the batch; the sequence of the first and where that begins."""
    index = tl.arange(0, SCAN)
    total = tl.cast(0, tl.int64)
    for base in range(0, batch, SCAN):
        tiles = _longest(base + index, batch, query_rows, capacity, lens, lens_strides, before_last, c)
        total += tl.sum(tiles.to(tl.int64), 0)
    total *= groups
    begin = total * program // programs
    end = total * (program + 1) // programs
    sequence = program * 0
    first = tl.cast(0, tl.int64)
    before = tl.cast(0, tl.int64)
    for base in range(0, batch, SCAN):
        tiles = groups * _longest(base + index, batch, query_rows, capacity, lens, lens_strides, before_last, c).to(
            tl.int64
        )
        until = before + tl.cumsum(tiles, 0)
        passed = (until <= begin) & (base + index < batch)
        sequence += tl.sum(passed.to(tl.int32), 0)
        first += tl.sum(tl.where(passed, tiles, 0), 0)
        before += tl.sum(tiles, 0)
    return begin, end, sequence, first


@triton.jit
def _page_scales(pages, at, mask, c: tl.constexpr):
    """Scales of a cache as fp32; at: their offsets in bytes."""
    if c.scales == "ue8m0":
        exponent = tl.load(pages + at, mask=mask, other=0).to(tl.int32)
        bits = tl.where(exponent == 0, 0x400000, exponent << 23)  # 2^-127 is not a normal number
        return tl.where(exponent == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)
    else:
        return tl.load(pages.to(tl.pointer_type(tl.float32), bitcast=True) + at // 4, mask=mask, other=0.0)


@triton.jit
def _page_of(tile, end, table, table_step, c: tl.constexpr):
    """The page id of tile `tile`, or of each of its tokens [tokens]; what lies from token `end` on is not read."""
    if c.one_page:
        first = tile * c.tokens
        return tl.load(table + tl.cast(first // c.page_size, tl.int64) * table_step, mask=first < end, other=-1)
    else:
        token = tile * c.tokens + tl.arange(0, c.tokens)
        return tl.load(table + (token // c.page_size).to(tl.int64) * table_step, mask=token < end, other=-1)


@triton.jit
def _paged_tile(tile, page, pages, page_stride, num_pages, c: tl.constexpr):
    """K [tokens, D], scales [tokens] and whether the tokens are in the pool, of tile `tile` on `page`."""
    d = tl.arange(0, c.dim_padded)[None, :]
    live = (page >= 0) & (page < num_pages)
    start = tl.where(live, page, 0).to(tl.int64) * page_stride
    slot = tile * c.tokens % c.page_size
    if c.one_page:
        slot = tile % (c.page_size // c.tokens) * c.tokens
    slot = slot + tl.arange(0, c.tokens)
    if c.one_page:
        there = live
        at = start + (slot * c.dim)[:, None] + d
    else:
        slot = slot % c.page_size
        there = live[:, None]
        at = (start + slot * c.dim)[:, None] + d
    if c.dim != c.dim_padded:
        there = there & (d < c.dim)
    k = tl.load(typed(pages, c) + at, mask=there, other=0.0 if c.fp8_dot else 0)
    live = live & (slot >= 0)
    return k, _page_scales(pages, start + c.page_size * c.dim + 4 * slot, live, c), live


# A stride that changes from step to step is an argument: what is in a tuple Triton would specialise on.
@triton.jit(
    do_not_specialize=["num_pages", "table_row", "out_row", "batch", "query_rows", "capacity", "max_context", "fill"]
)
def paged_mqa_logits_kernel(
    q,
    q_strides,
    weights,
    w_strides,
    pages,
    page_stride,
    num_pages,
    lens,
    lens_strides,
    before_last: tl.constexpr,
    table,
    table_row,
    table_column,
    out,
    out_row,
    out_column,
    batch,
    query_rows,
    capacity,
    max_context,
    fill,
    c: tl.constexpr,
):
    """q [B, n, H, D]; before_last: a length is of a sequence's last row, and row j of n sees n - 1 - j tokens less."""
    out_strides = (out_row, out_column)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    groups = tl.cdiv(query_rows, c.rows)
    unit, end, sequence, first = _share(
        program, programs, groups, batch, query_rows, capacity, lens, lens_strides, before_last, c
    )
    j = tl.arange(0, c.rows)
    while unit < end:
        tiles = tl.max(
            _longest(tl.arange(0, 1) + sequence, batch, query_rows, capacity, lens, lens_strides, before_last, c),
            0,
        )
        within = (unit - first).to(tl.int32)
        group = within // tl.maximum(tiles, 1)
        begin = within % tl.maximum(tiles, 1)
        count = tl.minimum((tiles - begin).to(tl.int64), end - unit).to(tl.int32)
        if count > 0:
            row = group * c.rows + j
            seen = _row_lengths(sequence + j * 0, row, batch, query_rows, capacity, lens, lens_strides, before_last, c)
            longest = tl.max(seen, 0)
            at = sequence.to(tl.int64)
            x, w = query_rows_of(
                group * c.rows,
                query_rows,
                q + at * q_strides[0],
                (q_strides[1], q_strides[2], q_strides[3]),
                weights + at * query_rows * w_strides[0],
                w_strides,
                c,
            )
            to = out + (at * query_rows + row)[None, :] * out_strides[0]
            row_table = table + at * table_row
            for tile in range(begin, begin + count):
                page = _page_of(tile, longest, row_table, table_column, c)
                k, scale, live = _paged_tile(tile, page, pages, page_stride, num_pages, c)
                value = tl.where(live[:, None], logits_of(k, scale, x, w, c), float("-inf"))
                token = tile * c.tokens + tl.arange(0, c.tokens)
                store(to + token.to(tl.int64)[:, None] * out_strides[1], value, token[:, None] < seen[None, :], c)
        unit += count
        if unit - first >= tiles.to(tl.int64) * groups:
            first += tiles.to(tl.int64) * groups
            sequence += 1
    if c.fills:
        blocks = tl.cdiv(max_context, FILL)
        total = tl.cast(batch, tl.int64) * query_rows * blocks
        for block in range(program.to(tl.int64), total, programs):
            row = block // blocks
            begin = (block % blocks).to(tl.int32) * FILL
            length = _row_lengths(
                row // query_rows,
                (row % query_rows).to(tl.int32),
                batch,
                query_rows,
                capacity,
                lens,
                lens_strides,
                before_last,
                c,
            )
            fill_outside(row, begin, tl.minimum(begin + FILL, max_context), 0, length, out, out_strides, fill, c)


def mqa_logits(call: LogitsCall) -> None:
    """Write call.out as octavo.reference.mqa_logits defines it; one launch."""
    if call.q.shape[0] and call.out.shape[1]:
        arguments, programs = ragged_launch(call, target_of(call.q.device))
        mqa_logits_kernel[(programs,)](**arguments)


def ragged_launch(call: LogitsCall, device: Device) -> tuple[dict[str, Any], int]:
    """The kernel's arguments and the number of programs."""
    rows, heads, dim = call.q.shape
    c = constants_of(device, heads, dim, rows, call.out.dtype, call.fill is not None, 0, "fp32")
    q, k = as_bytes(call.q), as_bytes(call.k)
    columns = max(call.out.shape[1], call.k.shape[0]) if c.fills or call.compressed else call.k.shape[0]
    groups = triton.cdiv(rows, c.rows)
    # Runs of keys: long ones load a query once for more; but eight programs an SM hide each other's ends.
    wanted = triton.cdiv(8 * device.num_sms, groups)
    run = max(8, min(64, triton.cdiv(triton.cdiv(columns, c.tokens), wanted))) * c.tokens
    arguments = {
        "q": q,
        "q_strides": q.stride(),
        "weights": call.weights,
        "w_strides": call.weights.stride(),
        "k": k,
        "k_strides": k.stride(),
        "k_scale": call.k_scale,
        "scale_stride": call.k_scale.stride(0),
        "starts": call.starts,
        "starts_stride": call.starts.stride(0),
        "ends": call.ends,
        "ends_stride": call.ends.stride(0),
        "out": call.out,
        "out_row": call.out.stride(0),
        "out_column": call.out.stride(1),
        "rows": rows,
        "keys": call.k.shape[0],
        "columns": call.out.shape[1],
        "run": run,
        "fill": 0.0 if call.fill is None else float(call.fill),
        "compressed": call.compressed,
        "c": c,
        "num_warps": c.num_warps,
        "num_stages": c.num_stages,
    }
    return arguments, groups * max(1, triton.cdiv(columns, run))


@triton.jit(do_not_specialize=["out_row", "rows", "keys", "columns", "run", "fill"])
def mqa_logits_kernel(
    q,
    q_strides,
    weights,
    w_strides,
    k,
    k_strides,
    k_scale,
    scale_stride,
    starts,
    starts_stride,
    ends,
    ends_stride,
    out,
    out_row,
    out_column,
    rows,
    keys,
    columns,
    run,
    fill,
    compressed: tl.constexpr,
    c: tl.constexpr,
):
    """Grid groups of c.rows neighbouring rows x runs of keys; one run of all groups first, as they share its keys."""
    out_strides = (out_row, out_column)
    groups = tl.cdiv(rows, c.rows)
    group = tl.program_id(0) % groups
    base = tl.program_id(0) // groups * run
    row = group * c.rows + tl.arange(0, c.rows)
    there = row < rows
    start = tl.load(starts + row.to(tl.int64) * starts_stride, mask=there, other=0)
    end = tl.load(ends + row.to(tl.int64) * ends_stride, mask=there, other=0)
    start = tl.minimum(tl.maximum(start, 0), keys)
    end = tl.maximum(tl.minimum(tl.maximum(end, 0), keys), start)
    sees = end > start
    low = tl.maximum(tl.min(tl.where(sees, start, keys), 0), base) // c.tokens
    high = tl.cdiv(tl.minimum(tl.max(tl.where(sees, end, 0), 0), base + run), c.tokens)
    if low < high:
        x, w = query_rows_of(group * c.rows, rows, q, q_strides, weights, w_strides, c)
        to = out + row.to(tl.int64)[None, :] * out_strides[0]
        d = tl.arange(0, c.dim_padded)[None, :]
        for tile in range(low, high):
            token = tile * c.tokens + tl.arange(0, c.tokens)
            inside = token < keys
            at = (token.to(tl.int64) * k_strides[0])[:, None] + d * k_strides[1]
            mask = inside[:, None] if c.dim == c.dim_padded else inside[:, None] & (d < c.dim)
            key = tl.load(typed(k, c) + at, mask=mask, other=0.0 if c.fp8_dot else 0)
            scale = tl.load(k_scale + token.to(tl.int64) * scale_stride, mask=inside, other=0.0)
            value = logits_of(key, scale, x, w, c)
            visible = (token[:, None] >= start[None, :]) & (token[:, None] < end[None, :])
            column = token[:, None]
            if compressed:
                column = column - start[None, :]
                visible = visible & (column < columns)
            store(to + column.to(tl.int64) * out_strides[1], value, visible, c)
    if c.fills:
        for i in range(0, c.rows):
            one = group * c.rows + i
            if one < rows:
                left = tl.sum(tl.where(row == one, start, 0), 0)
                right = tl.sum(tl.where(row == one, end, 0), 0)
                if compressed:
                    right -= left
                    left *= 0
                fill_outside(one, base, tl.minimum(base + run, columns), left, right, out, out_strides, fill, c)


def aot_cases(device: Device) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Launches to compile ahead of time: see octavo/testing/aot.py."""

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    e4m3 = torch.float8_e4m3fn
    for heads, dim, rows, page_size, scales, out, fill in (
        (64, 128, 1, 64, "fp32", torch.float32, None),
        (64, 128, 2, 64, "fp32", torch.float32, float("-inf")),
        (64, 128, 4, 16, "ue8m0", torch.bfloat16, None),
        (32, 64, 8, 128, "pow2", torch.float32, None),
        (128, 128, 2, 64, "fp32", torch.float32, None),
    ):
        cache = IndexBytes(empty(64, page_size, 1, dim + SCALE_BYTES, dtype=torch.uint8), scales)
        paged = PagedLogitsCall(
            empty(3, rows, heads, dim, dtype=e4m3),
            cache,
            empty(3 * rows, heads),
            empty(3, dtype=torch.int32),
            empty(3, 512, dtype=torch.int32),
            4096,
            empty(3 * rows, 4096, dtype=out),
            fill,
        )
        label = f"{rows} x {heads} heads of {dim}, page {page_size} {scales}"
        yield label, paged_mqa_logits_kernel, paged_launch(paged, device)[0]
    for heads, compressed in ((64, False), (32, True)):
        ranges = empty(2048, dtype=torch.int32)
        ragged = LogitsCall(
            empty(2048, heads, 128, dtype=e4m3),
            empty(8192, 128, dtype=e4m3),
            empty(8192),
            empty(2048, heads),
            ranges,
            ranges,
            empty(2048, 8192),
            None,
            compressed,
        )
        yield f"ragged, {heads} heads", mqa_logits_kernel, ragged_launch(ragged, device)[0]
