"""What a program of decode has next: an item or a part of one, and the pages of its tiles.

Short items are over before a load is answered, so what is known of an item is loaded while the one before it is
computed, and looked at only after that. What the plan wrote, and read, is loaded before the wait for the kernel before
("CACHE" is ".cg" then, past what L1 may hold) or after it ("").
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ._results import head_scale, load_sinks, parts_of
from .plan import tile_span


class Batch(NamedTuple):
    """The sequences of a call."""

    seq_lens: Any
    page_table: Any
    query_starts: Any
    table_row: int  # stride of page_table
    capacity: int  # tokens that a row of page_table can name
    num_pages: int
    rows: int  # of the query


class Work(NamedTuple):
    """Neighbouring units of one item, and the sequence that it is of."""

    length: Any
    first_row: Any  # of the query, and how many
    rows: Any
    units: Any  # of the item
    first_unit: Any
    head: Any
    at: Any  # the first unit within the item that is ours, and how many
    n: Any
    ends: Any  # whether the sequence is over behind them
    oldest: Any  # token that some row sees
    page: Any  # with which the first tile begins
    tiles: Any


@gluon.jit
def of_each_lane(index):
    """`index`, of what is the same for all lanes and yet loaded by each for itself.

    ptxas takes such a number to a uniform register, and waits for it there, right behind its load; the bit added here,
    0 in all lanes but not known to be, keeps it in the lanes' registers, where nothing waits before the number is used.
    """
    return index + gl.inline_asm_elementwise(
        "mov.u32 $0, %lanemask_lt; shr.u32 $0, $0, 31;", "=r", [], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def of_all_lanes(x):
    """x, the same in all lanes, as a number that ptxas knows to be."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def following(b, work, schedule):
    """The sequence that is next after `work` of sequence b; the last, if there is none."""
    return gl.minimum(b + work.ends.to(gl.int32), schedule.batch - 1)


@gluon.jit
def facts_of(b, needed, batch, schedule, CACHE: gl.constexpr):
    """Of sequence b as memory has them: length, bounds of its query rows, units of one head before it and with it.

    Not `needed`: zeros, without a load.
    """
    b = of_each_lane(b)
    length = gl.load(batch.seq_lens + b, mask=needed, other=0, cache_modifier=CACHE)
    begin = gl.load(batch.query_starts + b, mask=needed, other=0, cache_modifier=CACHE)
    end = gl.load(batch.query_starts + b + 1, mask=needed, other=0, cache_modifier=CACHE)
    before = gl.load(schedule.memory + b, mask=needed, other=0, cache_modifier=CACHE)
    after = gl.load(schedule.memory + b + 1, mask=needed, other=0, cache_modifier=CACHE)
    return length, begin, end, before, after


@gluon.jit
def work_at(t, end, facts, batch, schedule, c: gl.constexpr, ANY: gl.constexpr = False):
    """The units from t on, and before `end`, that lie in one item of the sequence of `facts`.

    ANY: there may be none; then still of a head that there is, for what is loaded of it.
    """
    length, first_row, last_row, before, after = facts
    length, first_row, last_row = of_all_lanes(length), of_all_lanes(first_row), of_all_lanes(last_row)
    before, after = of_all_lanes(before), of_all_lanes(after)
    first_row = gl.minimum(gl.maximum(first_row, 0), batch.rows)
    rows = gl.minimum(gl.maximum(last_row, 0), batch.rows) - first_row
    length = gl.maximum(gl.minimum(length, batch.capacity), 0)
    units = after - before
    within = t - before * schedule.heads
    head = within // gl.maximum(units, 1)
    if ANY:
        head = gl.minimum(gl.maximum(head, 0), schedule.heads - 1)
    at = within - head * units
    n = gl.minimum(units - at, end - t)
    if c.piece > 0:
        n = gl.minimum(n, 1)
    oldest = length * 0
    if c.window > 0:
        oldest = gl.maximum(length - rows - c.window + 1, 0)
    first, tiles = tile_span(length, rows, c)
    skipped = at * c.unit_tiles
    count = gl.minimum(n * c.unit_tiles, tiles - skipped)
    first_unit, ends = before * schedule.heads + head * units, within + n >= units * schedule.heads
    page = first + skipped * c.pages
    return Work(length, first_row, rows, units, first_unit, head, at, n, ends, oldest, page, count)


@gluon.jit
def parts_if_cut(work, schedule, c: gl.constexpr):
    """parts_of the item, if this program has but a part of it."""
    parts, first, within = work.n * 0 + 1, work.n * 0, work.n < 0
    if (work.n > 0) & (work.n != work.units):
        parts, first, within = parts_of(work.first_unit, work.units, work.at, schedule, c)
    return parts, first, within


@gluon.jit
def page_entries(b, page, work, batch, CACHE: gl.constexpr, c: gl.constexpr):
    """Entries of the page table for the tile of sequence b that begins with `page`; -1 of pages that no row sees."""
    PAGES: gl.constexpr = c.pages
    table = batch.page_table + b.to(gl.int64) * batch.table_row + of_each_lane(page)
    entries = ()
    for g in gl.static_range(PAGES):
        used = (page + g >= work.oldest // c.page) & ((page + g) * c.page < work.length)
        entries = entries + (gl.load(table + g, mask=used, other=-1, cache_modifier=CACHE),)
    return entries


@gluon.jit
def load_scales(columns, work, batch, query, output, c: gl.constexpr):
    """The scales of K and V, and the sinks of the query columns where registers have room for them so early."""
    kv_head = of_each_lane(work.head // c.blocks)
    k_scale = head_scale(query.k_scale, kv_head, query.k_scale_head)
    v_scale = head_scale(output.v_scale, kv_head, output.v_scale_head)
    sinks = load_sinks(columns, work.head, work.first_row, work.rows, batch, output, c) if c.columns <= 8 else columns
    return k_scale, v_scale, sinks
