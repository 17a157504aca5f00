"""decode: the sequences of a batch with few query rows, split over their tokens so that the whole GPU reads the cache.

Every sequence is cut into pieces of nearly equal numbers of tiles. How many is decided on the device: enough to fill it
(the workspace bounds their number), or, with batch_invariant, by the sequence's own length alone. A sequence of one
piece is finished where it is computed; the others leave partial results (fp32, with their lse in powers of two) for
`merge_splits_kernel`, which follows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ... import tuning
from ...calls import AttentionCall
from ...device import Device
from ._aot import example_calls
from ._attend import attend, row_factors, under_sinks
from ._plan import BOUNDS, batch_of, decode_constants, memory_of, output_of, query_of, target_of
from ._tiles import decodes, finish, first_visible, head_scale, load_query, sequence, store_lse, store_out
from .merge_states import merge_splits_kernel

SCAN = tl.constexpr(256)  # sequences looked at together
MIN_PIECE = tl.constexpr(tuning.SPLIT_TOKENS)
MAX_PIECES = tl.constexpr(tuning.INVARIANT_SPLITS)


class Partial(NamedTuple):
    """Results of pieces in the workspace.

    Attributes:
        out, lse: fp32 [units, KV heads, rows, Dv] and [units, KV heads, rows].
        pieces: int32 [B, 2]: first unit of each sequence, and its number of pieces.
        heads: KV heads. rows, max_rows: packed rows and query rows of a sequence.
    """

    out: Any
    lse: Any
    pieces: Any
    heads: int
    rows: int
    max_rows: int


@triton.jit
def _tiles_of(index, batch, bounds, c: tl.constexpr):
    """First tile and number of tiles of sequences `index`, and whether they are decodes."""
    start, rows, length = sequence(index, batch, bounds)
    low = first_visible(length - rows, c) // c.tokens
    return low, tl.maximum(tl.cdiv(length, c.tokens) - low, 0), decodes(index, rows, bounds, c)


@triton.jit
def _pieces_of(tiles, share, room, c: tl.constexpr):
    """Pieces of sequences of `tiles` tiles; share: the tiles of a piece that fill the device."""
    least: tl.constexpr = (MIN_PIECE + c.tokens - 1) // c.tokens
    if c.batch_invariant:
        pieces = tl.minimum(tl.cdiv(tiles, least), tl.minimum(MAX_PIECES, room))
    else:
        pieces = tl.cdiv(tiles, tl.maximum(share, least))
    return tl.maximum(pieces, 1)


@triton.jit
def _piece(unit, units, batch, bounds, c: tl.constexpr):
    """The sequence of piece `unit` (-1: there are fewer pieces), its first piece and its number of pieces."""
    size, capacity, total_rows, num_decodes = bounds
    j = tl.arange(0, SCAN)
    room = units // tl.maximum(size, 1)
    share = room * 0 + 1
    if not c.batch_invariant:
        work = tl.full([SCAN], 0, tl.int32)
        for base in range(0, size, SCAN):
            low, tiles, ours = _tiles_of(base + j, batch, bounds, c)
            work += tl.where(ours, tiles, 0)
        spare = units - size
        total = tl.sum(work.to(tl.int64), 0)
        share = tl.where(spare > 0, (total + spare - 1) // tl.maximum(spare, 1), 2**30).to(tl.int32)
    found = room * 0 - 1
    first = room * 0
    count = room * 0
    before = room * 0
    for base in range(0, size, SCAN):
        low, tiles, ours = _tiles_of(base + j, batch, bounds, c)
        pieces = tl.where(ours, _pieces_of(tiles, share, room, c), 0)
        until = before + tl.cumsum(pieces, 0)
        here = (unit >= until - pieces) & (unit < until)
        found = tl.maximum(found, tl.max(tl.where(here, base + j, -1), 0))
        first += tl.sum(tl.where(here, until - pieces, 0), 0)
        count += tl.sum(tl.where(here, pieces, 0), 0)
        before += tl.sum(pieces, 0)
    return found, first, count


@triton.jit(do_not_specialize=[*BOUNDS, "units"])
def decode_kernel(
    query, memory, output, batch, partial, size, capacity, total_rows, num_decodes, table_row, num_pages, units,
    c: tl.constexpr,
):  # fmt: skip
    """Grid units x KV heads x row tiles: a piece of a sequence for a tile of the packed rows of a KV head."""
    bounds = (size, capacity, total_rows, num_decodes)
    row_tiles = tl.cdiv(partial.rows, c.rows)
    row_tile = tl.program_id(0) % row_tiles
    head = tl.program_id(0) // row_tiles % partial.heads
    unit = tl.program_id(0) // row_tiles // partial.heads
    index, first, count = _piece(unit, units, batch, bounds, c)
    if index >= 0:
        if (row_tile == 0) & (head == 0) & (unit == first):
            tl.store(partial.pieces + 2 * index, first)
            tl.store(partial.pieces + 2 * index + 1, count)
        start, rows, length = sequence(index, batch, bounds)
        position = length - rows + row_tile * c.rows // c.group
        last = tl.minimum((row_tile * c.rows + c.rows - 1) // c.group, tl.minimum(rows, partial.max_rows) - 1)
        last_position = length - rows + last
        m = row_tile * c.rows + tl.arange(0, c.rows)
        row = m // c.group
        there = (row < rows) & (row < partial.max_rows)
        q_head = head * c.group + m % c.group
        out_row = (start + row).to(tl.int64)
        limit = tl.where(there, length - rows + row, -1)
        # The piece is a share of the sequence's tiles, of which these rows may see fewer.
        begin = first_visible(length - rows, c) // c.tokens
        tiles = tl.maximum(tl.cdiv(length, c.tokens) - begin, 0)
        low = begin + ((unit - first).to(tl.int64) * tiles // count).to(tl.int32)
        high = begin + ((unit - first + 1).to(tl.int64) * tiles // count).to(tl.int32)
        low = tl.maximum(low, first_visible(position, c) // c.tokens)
        high = tl.maximum(tl.minimum(high, tl.cdiv(last_position + 1, c.tokens)), low)
        high = tl.where(row_tile * c.rows < rows * c.group, high, low)  # else the sequence has no such rows
        q, factor = load_query(out_row, q_head, there, query, c)
        factor = row_factors(factor, memory, head, c)
        table = (batch.page_table + index.to(tl.int64) * table_row, num_pages)
        acc, total, reference, peak = attend(
            q, factor, limit, position, last_position, low, high, head.to(tl.int64), table, memory, c
        )
        if count == 1:
            acc, total, reference = under_sinks(acc, total, reference, peak, output, c)
            total, lse = finish(total, reference, q_head, there, output, c)
            v_scale = head_scale(memory.v_scale, memory.v_scale_strides, head, c)
            store_out(output.out, acc * (v_scale / total)[:, None], out_row, q_head, there, output, c)
            store_lse(lse, out_row, q_head, there, output)
        else:
            sees = total > 0
            at = (unit.to(tl.int64) * partial.heads + head) * partial.rows + m
            d = tl.arange(0, c.dim_v_padded)[None, :]
            acc = acc / tl.where(sees, total, 1.0)[:, None]
            tl.store(partial.out + (at[:, None] * c.dim_v + d), acc, mask=there[:, None] & (d < c.dim_v))
            tl.store(partial.lse + at, tl.where(sees, reference + tl.log2(total), float("-inf")), mask=there)


def partial_of(call: AttentionCall, max_rows: int, wanted: int) -> tuple[Partial, int]:
    """Room for results of `wanted` pieces or of as many as the workspace holds; how many. One a sequence needs none."""
    spec, batch = call.spec, call.seq_lens.shape[0]
    heads, rows = spec.num_kv_heads, max_rows * spec.group_size
    floats = call.workspace[: call.workspace.numel() // 4 * 4].view(torch.float32)
    out = -(-2 * batch // 4) * 4  # the pieces come first; results stay aligned to 16 bytes
    units = max(batch, min(wanted, (floats.numel() - out) // (heads * rows * (spec.value_dim + 1))))
    lse = out + units * heads * rows * spec.value_dim if units > batch else out
    return Partial(floats[out:], floats[lse:], floats.view(torch.int32), heads, rows, max_rows), units


def launches(call: AttentionCall, device: Device) -> list[tuple[Any, tuple[int, ...], dict[str, Any]]]:
    """Kernels, grids and arguments: the pieces, then their merge and the rows of no sequence."""
    spec, total_rows, batch = call.spec, call.q.shape[0], call.seq_lens.shape[0]
    most = total_rows if call.max_query_len is None else min(call.max_query_len, total_rows)
    max_rows = max(1, min(spec.max_query_len, most))
    # With batch_invariant the tile must not depend on how many rows the others have.
    c = decode_constants(spec, device, spec.max_query_len if spec.batch_invariant else max_rows)
    wanted = tuning.decode_units(spec, device, batch, call.page_table.shape[1] * spec.page_size)
    partial, units = partial_of(call, max_rows, wanted)
    sequences, bounds = batch_of(call)
    shared = {
        "memory": memory_of(call.cache),
        "output": output_of(call),
        "batch": sequences,
        "partial": partial,
        **bounds,
    }
    found: list[tuple[Any, tuple[int, ...], dict[str, Any]]] = []
    if batch:
        options = {"num_warps": c.num_warps, "num_stages": c.num_stages, "maxnreg": c.max_registers}
        options["enable_fp_fusion"] = c.softcap is not None  # see _attend.tile_step
        row_tiles = -(-partial.rows // c.rows)
        grid = (units * spec.num_kv_heads * row_tiles,)
        found.append((decode_kernel, grid, {**shared, "query": query_of(call), "units": units, "c": c, **options}))
    fill = min(-(-total_rows // 16), 64) if call.num_decodes == batch else 0
    if units > batch or fill:
        row_programs = batch * max_rows
        rows = {"row_programs": row_programs, "fill_programs": fill, "num_warps": 2}
        found.append((merge_splits_kernel, (row_programs + fill, spec.num_q_heads), {**shared, **rows, "c": c}))
    return found


def decode(call: AttentionCall) -> None:
    """Write the rows of every decode sequence of `call`; where all are decodes, also those of no sequence.

    Nothing is allocated or read on the host.
    """
    if call.q.shape[0]:
        for kernel, grid, arguments in launches(call, target_of(call.q.device)):
            kernel[grid](**arguments)


def aot_cases(device: Device) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Launches to compile ahead of time: see octavo/testing/aot.py."""
    for label, call in example_calls(query_rows=1):
        for (kernel, _, arguments), name in zip(launches(call, device), ("decode", "merge of splits"), strict=True):
            yield f"{name} {label}", kernel, arguments
