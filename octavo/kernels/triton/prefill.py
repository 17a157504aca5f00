"""prefill: the sequences of a batch that are no decodes, and the rows of no sequence.

One program computes `c.rows` packed rows (query rows times the query heads of one KV head) of one sequence, which it
finds from query_starts on the device, so that the grid depends on shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl

from ...calls import AttentionCall
from ...device import Device
from ._aot import example_calls
from ._attend import attend, row_factors, under_sinks
from ._plan import BOUNDS, batch_of, memory_of, output_of, prefill_constants, query_of, target_of
from ._tiles import decodes, finish, first_visible, head_scale, load_query, sequence, store_lse, store_out

SCAN = tl.constexpr(256)  # sequences looked at together


@triton.jit
def _sequence_of_tile(tile, batch, size, total_rows, c: tl.constexpr):
    """The sequence of packed tile `tile`, -1 and `size` for the rows before and after all, and the tile's number in it.

    Sequence j starts at tile query_starts[j] group // rows + j + 1: at least as many tiles as its rows need.
    """
    found = tile * 0 - 1
    start_tile = tile * 0
    for base in range(0, size + 1, SCAN):
        j = base + tl.arange(0, SCAN)
        start = tl.load(batch.query_starts + j, mask=j <= size, other=0)
        start = tl.minimum(tl.maximum(start, 0), total_rows).to(tl.int64)
        first = (start * c.group // c.rows).to(tl.int32) + j + 1
        before = (j <= size) & (first <= tile)
        found = tl.maximum(found, tl.max(tl.where(before, j, -1), 0))
        start_tile = tl.maximum(start_tile, tl.max(tl.where(before, first, 0), 0))
    return found, tile - start_tile


@triton.jit(do_not_specialize=[*BOUNDS, "tiles"])
def prefill_kernel(
    query, memory, output, batch, size, capacity, total_rows, num_decodes, table_row, num_pages, tiles, heads,
    c: tl.constexpr,
):  # fmt: skip
    """Grid tiles x KV heads: the last tiles of a sequence, which see the most tokens, run first."""
    bounds = (size, capacity, total_rows, num_decodes)
    head = tl.program_id(0) % heads
    index, tile = _sequence_of_tile(tiles - 1 - tl.program_id(0) // heads, batch, size, total_rows, c)
    start, rows, length = sequence(index, batch, bounds)
    if (index < 0) | (index >= size):
        # Rows of no sequence: those before the first start or after the last end.
        edge = tl.load(batch.query_starts + tl.maximum(index, 0))
        edge = tl.minimum(tl.maximum(edge, 0), total_rows)
        start = tl.where(index < 0, 0, edge)
        rows = tl.where(index < 0, edge, total_rows - edge)
        length = length * 0
    elif decodes(index, rows, bounds, c):
        rows = rows * 0
    flat = tile * c.rows
    if flat < rows * c.group:
        m = flat + tl.arange(0, c.rows)
        row = m // c.group
        there = row < rows
        q_head = head * c.group + m % c.group
        out_row = (start + row).to(tl.int64)
        last = tl.minimum((flat + c.rows - 1) // c.group, rows - 1)
        position = length - rows + flat // c.group
        last_position = length - rows + last
        limit = tl.where(there, length - rows + row, -1)
        q, factor = load_query(out_row, q_head, there, query, c)
        factor = row_factors(factor, memory, head, c)
        low = first_visible(position, c) // c.tokens
        high = tl.maximum(tl.cdiv(last_position + 1, c.tokens), low)
        table = (batch.page_table + index.to(tl.int64) * table_row, num_pages)
        acc, total, reference, peak = attend(
            q, factor, limit, position, last_position, low, high, head.to(tl.int64), table, memory, c
        )
        acc, total, reference = under_sinks(acc, total, reference, peak, output, c)
        total, lse = finish(total, reference, q_head, there, output, c)
        v_scale = head_scale(memory.v_scale, memory.v_scale_strides, head, c)
        store_out(output.out, acc * (v_scale / total)[:, None], out_row, q_head, there, output, c)
        store_lse(lse, out_row, q_head, there, output)


def launch(call: AttentionCall, device: Device) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Grid and arguments of the kernel."""
    c = prefill_constants(call.spec, device)
    batch, bounds = batch_of(call)
    tiles = call.q.shape[0] * c.group // c.rows + call.seq_lens.shape[0] + 2
    heads = call.spec.num_kv_heads
    return (tiles * heads,), {
        "query": query_of(call),
        "memory": memory_of(call.cache),
        "output": output_of(call),
        "batch": batch,
        **bounds,
        "tiles": tiles,
        "heads": heads,
        "c": c,
        "num_warps": c.num_warps,
        "num_stages": c.num_stages,
        "maxnreg": c.max_registers,
        "enable_fp_fusion": c.softcap is not None,  # see _attend.tile_step
    }


def prefill(call: AttentionCall) -> None:
    """Write the rows of every prefill sequence of `call`, and 0 and -inf to the rows of no sequence.

    Nothing is allocated or read on the host.
    """
    if call.q.shape[0]:
        grid, arguments = launch(call, target_of(call.q.device))
        prefill_kernel[grid](**arguments)


def aot_cases(device: Device) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Launches to compile ahead of time: see octavo/testing/aot.py."""
    for label, call in example_calls(query_rows=64):
        yield f"prefill {label}", prefill_kernel, launch(call, device)[1]
