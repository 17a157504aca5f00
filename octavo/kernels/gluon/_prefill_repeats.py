"""Tiles of prefill that are computed again: those with scores that are too large for the loop, which does not look.

As a rule there are none. One warpgroup does it all, block after block, so that the code is small.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait

from . import _pipeline as pipe
from ._names import async_load, thread_barrier
from ._prefill_results import normaliser, write_rows
from ._prefill_steps import (
    LOWEST,
    free,
    load_query,
    no_output,
    one_block,
    row_factors,
    scores_of,
    start_scores,
    wait_full,
)
from ._prefill_tiles import (
    BLOCKS,
    END_ROW,
    ENTRY_INTS,
    FIRST_ROW,
    HEAD,
    LENGTH,
    LOST,
    MISSING,
    ROWS,
    SEEN,
    SEQUENCE,
    TOP,
    V_SCALE,
    put,
    send_block,
)
from ._results import NOTHING, head_scale

WARPS = gl.constexpr(4)


@gluon.jit
def repeat_lost(q_desc, k_desc, v_desc, batch, schedule, scales, output, buffers, used, c: gl.constexpr):
    """Compute the items again that this program has noted as lost, in the shared memory that the others have left.

    buffers: of the query as pages and as rows, as terms, of its factors; of K and V as pages and as tiles; the record.
    used: barriers that the others have left.
    """
    lanes = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    # Other programs set it too, and all warps must see the same.
    lost = gl.max(gl.load(schedule.memory + LOST + lanes * 0, cache_modifier=".cg"), axis=0)
    if lost > 0:
        STAGES: gl.constexpr = c.stages
        for i in gl.static_range(len(used)):
            pipe.drop_barriers(used[i])
        q_full = pipe.make_barriers(1)
        k_full, empty = pipe.make_ring(STAGES)
        v_full = pipe.make_barriers(STAGES)
        v_landed = pipe.make_barriers(1)
        fence_async_shared()
        thread_barrier()
        bars = (k_full, v_full, empty, v_landed.index(0))
        q_full = q_full.index(0)
        mine = gl.program_id(0) + 1
        total = gl.load(schedule.memory) * c.heads
        count = total * 0
        number = total * 0
        landed = total * 0
        for base in range(0, total, 128):
            found = gl.load(schedule.lost + base + lanes, mask=base + lanes < total, other=0, cache_modifier=".cg")
            if gl.max((found == mine).to(gl.int32), axis=0) > 0:
                for item in range(base, gl.minimum(base + 128, total)):
                    noted = gl.load(schedule.lost + item, cache_modifier=".cg")
                    thread_barrier()  # before some warp clears it
                    if noted == mine:
                        gl.store(schedule.lost + item, 0)  # for the next layer
                        number, landed = repeat_item(item, count, number, landed, q_desc, k_desc, v_desc, batch,
                                                     schedule, scales, output, q_full, bars, buffers, c)  # fmt: skip
                        count += 1


@gluon.jit
def whole_span(first_row, end_row, seen, c: gl.constexpr):
    """First and end block of a tile that starts with `first_row`, as the plan has them of tiles that are not cut."""
    last = seen - 1 + gl.minimum(c.tile_rows, end_row - first_row)
    high = (gl.maximum(last, 0) + (c.block - 1)) // c.block
    low = high * 0
    if c.window > 0:
        low = gl.minimum(gl.maximum(seen - c.window, 0) // c.block, high)
    return low, high


@gluon.jit
def repeat_item(item, count, number, landed, q_desc, k_desc, v_desc, batch, schedule, scales, output, q_full, bars,
                buffers, c: gl.constexpr):  # fmt: skip
    """Attend for the rows of an item, one consumer's after the other's, and write them."""
    q_pages, q_in, q_terms, factors, k_pages, v_pages, k_tiles, v_tiles, record = buffers
    k_full, v_full, empty, v_landed = bars
    PIECES: gl.constexpr = c.pieces
    ints, floats = record
    entry = schedule.entries + item // c.heads * ENTRY_INTS
    head = item % c.heads
    b = gl.load(entry)
    first_row = gl.load(entry + 1)
    end_row = gl.load(entry + 2)
    length = gl.load(entry + 3)
    seen = gl.load(entry + 4)
    low, high = whole_span(first_row, end_row, seen, c)
    kv_head = head * c.pack // c.group
    begin = length * 0
    if c.window > 0:
        begin = gl.maximum(seen - c.window, 0)
    pages_of = (batch.page_table + b.to(gl.int64) * batch.table_row, begin, length, kv_head, batch.num_pages)
    thread_barrier()  # the last item's record has been read
    put(ints, count, BLOCKS, high - low, WARPS)
    put(ints, count, TOP, high - 1, WARPS)
    put(ints, count, LENGTH, length, WARPS)
    put(ints, count, SEEN, seen, WARPS)
    put(ints, count, HEAD, head, WARPS)
    put(ints, count, FIRST_ROW, first_row, WARPS)
    put(ints, count, END_ROW, gl.minimum(end_row, batch.rows), WARPS)
    put(ints, count, SEQUENCE, b, WARPS)
    put(ints, count, MISSING, 1, WARPS)  # pages may be
    put(floats, count, V_SCALE, head_scale(output.v_scale, kv_head, output.v_scale_head), WARPS)
    factor = head_scale(scales.keys, kv_head, scales.keys_head) * c.softmax_scale
    mbarrier.expect(q_full, 2 * ROWS * c.dim * c.query_bits // 8)
    for g in gl.static_range(2):
        async_load(q_desc, [first_row + g * (ROWS // c.pack), head * c.pack, 0], q_full, q_pages.index(g))
    mbarrier.wait(q_full, count & 1)
    R: gl.constexpr = gl.SliceLayout(1, pipe.accumulator_layout(c.block))
    r = gl.arange(0, ROWS, layout=R)
    for which in range(2):
        load_query(q_in.index(which), q_terms, factors, head, factor, scales, c)
        thread_barrier()
        of_rows = row_factors(factors, c)
        limit = gl.minimum(r // c.pack + seen + which * (ROWS // c.pack), length)  # a row sees tokens below it
        o = no_output(c)
        weight = gl.zeros([ROWS, 4], gl.float32, pipe.pair_layout(64, 4))
        reference = gl.full([ROWS], NOTHING if c.exact else LOWEST, gl.float32, R)
        landed = send_block(k_desc, v_desc, pages_of, high - 1, False, number, landed, bars, k_pages, v_pages, c, WARPS)
        wait_full(k_full, number, c)
        s = start_scores(number, q_terms, k_tiles, c)
        s = scores_of(warpgroup_mma_wait(0, deps=[s]), c)
        free(empty, number, c)
        tile = (batch, ints, count, factors)
        end = number + high - low
        while number < end:
            block = end - 1 - number + low
            landed = send_block(k_desc, v_desc, pages_of, gl.maximum(block - 1, low), number == end - 1, number + 1,
                                landed, bars, k_pages, v_pages, c, WARPS)  # fmt: skip
            s, o, reference, weight, of_rows = one_block(
                block, number, q_terms, s, o, reference, weight, of_rows, limit, tile, k_tiles, v_tiles, bars, True, c
            )
            number += 1
        wait_full(v_full, number, c)  # of the block that is keys alone, so that no phase ends unseen
        number += 1
        lost = reference != reference  # no row: it is not looked at here
        inverse, lse = normaliser(reference, weight, of_rows, factors, lost, c)
        for i in gl.static_range(PIECES):
            write_rows(o[i], inverse, lse, lost, i, count, ints, floats, output, schedule, which, c)
    return number, landed
