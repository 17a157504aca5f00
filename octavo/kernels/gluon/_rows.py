"""Which tokens the rows of indexer logits see, and which tiles of them a program computes: by the program itself.

Rows that read the same keys make a block: up to `block_rows` query rows of one sequence, or neighbouring rows where all
rows share one run of keys. A block has the tiles of tokens from the first to the last that any of its rows sees. Blocks
are cut into units: `switch` for what a program needs to begin with a block, then one a tile. All units, in the order
of `nth_block`, are shared evenly: each program adds up the lengths and finds where its share starts, so no launch has
to come before, and nothing is kept between launches.

Written in Triton, which Gluon's kernels can call and the interpreter can run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

NEVER = tl.constexpr(2**31 - 1)


class Rows(NamedTuple):
    """The query rows of a call: of sequences with a page table each, or of one run of keys."""

    first: Any  # seq_lens, or starts
    last: Any  # ends; None with a page table
    stride: int  # of seq_lens over sequences, or of starts
    last_stride: int  # of seq_lens over the rows of a sequence, or of ends
    limit: int  # tokens that can be seen: of the page table and the result, or keys
    blocks: int
    rows: int


@triton.jit
def place_of(block, j, rows, c: tl.constexpr):
    """Sequence of row `j` of `block`, the row within it, and whether there is one. A run of keys is one sequence."""
    if c.paged:
        within = block % c.groups * c.block_rows + j
        return (
            block // c.groups + j * 0,
            within,
            (block < rows.blocks) & (j < c.block_rows) & (within < c.sequence_rows),
        )
    else:
        within = block * c.block_rows + j
        return within * 0, within, (j < c.block_rows) & (within < rows.rows)


@triton.jit
def nth_block(n, rows, c: tl.constexpr):
    """The block that is in turn after n others; n may be a tensor, and beyond the last.

    Of rows over one run of keys the first and the last in turns: where rows see more keys the later they are, every
    share then has short blocks and long ones, however long it takes to begin with one.
    """
    if c.fold:
        block = tl.where(n % 2 == 0, n // 2, rows.blocks - 1 - n // 2)
        return tl.where(n < rows.blocks, block, n)
    else:
        return n


@triton.jit
def row_of(block, c: tl.constexpr):
    """First row of a block."""
    if c.paged:
        return block // c.groups * c.sequence_rows + block % c.groups * c.block_rows
    else:
        return block * c.block_rows


@triton.jit
def span(sequence, within, there, rows, c: tl.constexpr):
    """Tokens [low, high) that a row sees; none where it is not `there`."""
    if c.paged:
        at = rows.first + sequence.to(tl.int64) * rows.stride
        if c.length_a_row:
            high = tl.load(at + within.to(tl.int64) * rows.last_stride, mask=there, other=0)
        else:
            high = tl.maximum(tl.load(at, mask=there, other=0), 0) + (1 - c.sequence_rows) + within
        low = within * 0
    else:
        low = tl.maximum(tl.load(rows.first + within.to(tl.int64) * rows.stride, mask=there, other=0), 0)
        high = tl.load(rows.last + within.to(tl.int64) * rows.last_stride, mask=there, other=0)
    high = tl.minimum(tl.maximum(high, 0), rows.limit)
    return low, tl.where(there, tl.maximum(high, low), low)


@triton.jit
def block_tiles(block, rows, c: tl.constexpr):
    """First tile that any row of a block sees, how many there are to the last, and the end of the last one's tokens.

    `block` may be a tensor.
    """
    ROWS: tl.constexpr = c.block_rows
    first = block * 0 + NEVER
    last = block * 0
    for j in tl.static_range(ROWS):
        sequence, within, there = place_of(block, j, rows, c)
        low, high = span(sequence, within, there, rows, c)
        first = tl.minimum(first, tl.where(high > low, low, NEVER))
        last = tl.maximum(last, tl.where(high > low, high, 0))
    first = tl.where(last > 0, first // c.tile, 0)
    return first, (last + (c.tile - 1)) // c.tile - first, last


@triton.jit
def units_of(tiles, c: tl.constexpr):
    """Units of a block of so many tiles."""
    return tl.where(tiles > 0, tiles + c.switch, 0)


@triton.jit
def part(t, end, before, tiles, c: tl.constexpr):
    """Of units [t, end), those in the block that begins with unit `before`: its first tile, how many, where it ends."""
    after = before + units_of(tiles, c)
    skipped = tl.maximum(t - before - c.switch, 0)
    return skipped, tl.maximum(tl.minimum(end, after) - before - c.switch, 0) - skipped, after


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def share(i, rows, c: tl.constexpr):
    """Units [start, end) of this program, how many blocks come before that of the first, and their units.

    i: 0, 1, ... c.scan - 1.
    """
    SCAN: tl.constexpr = c.scan
    _, tiles, _ = block_tiles(nth_block(i, rows, c), rows, c)
    units = units_of(tiles, c)
    total = tl.sum(units, 0)
    for base in range(SCAN, rows.blocks, SCAN):
        _, tiles, _ = block_tiles(nth_block(base + i, rows, c), rows, c)
        total += tl.sum(units_of(tiles, c), 0)
    program, programs = tl.program_id(0), tl.num_programs(0)
    each = total // programs
    spare = total - each * programs
    start = program * each + tl.minimum(program, spare)
    end = start + each + (program < spare).to(tl.int32)
    until = tl.associative_scan(units, 0, _add)
    over = (until <= start) & (i < rows.blocks)
    block = tl.sum(over.to(tl.int32), 0)
    before = tl.sum(tl.where(over, units, 0), 0)
    running = tl.sum(units, 0)
    for base in range(SCAN, rows.blocks, SCAN):
        _, tiles, _ = block_tiles(nth_block(base + i, rows, c), rows, c)
        units = units_of(tiles, c)
        over = (running + tl.associative_scan(units, 0, _add) <= start) & (base + i < rows.blocks)
        block += tl.sum(over.to(tl.int32), 0)
        before += tl.sum(tl.where(over, units, 0), 0)
        running += tl.sum(units, 0)
    return start, end, block, before
