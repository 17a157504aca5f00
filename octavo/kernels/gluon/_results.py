"""What decode does once an item is computed: rows and their lse, parts of items, their merge, rows that see nothing.

An item is a sequence and KV head (and block of query columns). Inside, lse is log2 of the softmax's denominator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import _pipeline as pipe
from ._names import thread_barrier
from .plan import active_programs, counters_at, parts_at, short_at, starts_at

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
NOTHING = gl.constexpr(-1.0e30)  # a maximum over nothing; finite, so that differences are not NaN


class Query(NamedTuple):
    """The query, its strides in elements, and the scales of query and keys with theirs."""

    q: Any
    row: int
    head: int
    scale: Any
    scale_head: int
    k_scale: Any
    k_scale_head: int


class Pools(NamedTuple):
    """K and V^T as they lie in memory: the first element, and the strides to the first token of a page and head."""

    k: Any
    k_page: int
    k_head: int
    v: Any
    v_page: int
    v_head: int
    v_element: int


class Output(NamedTuple):
    """Where results go with strides in elements, and what enters at the end."""

    out: Any
    row: int
    head: int
    element: int
    lse: Any
    lse_row: int
    lse_head: int
    scale: Any
    v_scale: Any
    v_scale_head: int
    sinks: Any


@gluon.jit
def sequence(b, batch):
    """Length, first query row and number of query rows of sequence b."""
    begin = gl.minimum(gl.maximum(gl.load(batch.query_starts + b, cache_modifier=".cg"), 0), batch.rows)
    end = gl.minimum(gl.maximum(gl.load(batch.query_starts + b + 1, cache_modifier=".cg"), 0), batch.rows)
    length = gl.minimum(gl.load(batch.seq_lens + b, cache_modifier=".cg"), batch.capacity)
    return gl.maximum(length, 0), begin, end - begin


@gluon.jit
def column_rows(j, head, first_row, rows, batch, c: gl.constexpr):
    """Of query columns j of a pass: row of the query, query head, row of the sequence, whether there is such a row."""
    column = head % c.blocks * c.columns + j
    row = column // c.group
    return first_row + row, head // c.blocks * c.group + column % c.group, row, row < rows


@gluon.jit
def head_scale(scale, head, stride):
    """A scale of one head; 1 where there is none."""
    if scale is None:
        return 1.0
    else:
        return gl.load(scale + head * stride)


@gluon.jit
def in_powers_of_two(y, factor, c: gl.constexpr):
    """Products y times `factor` as scores in powers of two, capped if the spec says so."""
    if c.softcap is None:
        return y * (factor * LOG2E)
    else:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)): exact at both ends
        e = gl.exp2(y * (factor * (2.0 * LOG2E / c.softcap)))
        return (c.softcap * LOG2E) * (1.0 - 2.0 / (1.0 + e))


@gluon.jit
def load_sinks(columns, head, first_row, rows, batch, output, c: gl.constexpr):
    """The sinks of query columns as they lie in memory; without any, what nobody reads."""
    if output.sinks is None:
        return columns
    else:
        _, q_head, _, there = column_rows(columns, head, first_row, rows, batch, c)
        return gl.load(output.sinks + q_head, mask=there, other=0.0)


@gluon.jit
def finish(out, lse, columns, d, COLUMN_AXIS: gl.constexpr, item, sinks, batch, output, c: gl.constexpr):
    """Write an item's normalised `out` and lse (log2 of its denominator); the sink joins the denominator here, once.

    COLUMN_AXIS: the axis that columns lack in `out`: 0 for [Dv, columns], 1 for [columns, Dv].
    sinks: of load_sinks where axis and registers let them be loaded before; else they are loaded here.
    """
    b, head, first_row, rows, first_unit, v_scale = item
    row, q_head, _, there = column_rows(columns, head, first_row, rows, batch, c)
    if output.sinks is not None:
        if (COLUMN_AXIS == 1) | (c.columns > 8):
            sinks = load_sinks(columns, head, first_row, rows, batch, output, c)
        joined, share = join_sink(lse, sinks.to(gl.float32))
        saw = lse > -float("inf")
        out = out * gl.expand_dims(gl.where(saw, share, 0.0), COLUMN_AXIS)
        lse = gl.where(saw, joined, lse)
    out = out * v_scale
    if output.scale is not None:
        out = out / gl.load(output.scale)
    at = gl.expand_dims(row.to(gl.int64) * output.row + q_head.to(gl.int64) * output.head, COLUMN_AXIS)
    at += gl.expand_dims(d.to(gl.int64) * output.element, 1 - COLUMN_AXIS)
    mask = gl.expand_dims(there, COLUMN_AXIS) & gl.expand_dims(d < c.dim_v, 1 - COLUMN_AXIS)
    gl.store(output.out + at, out.to(output.out.dtype.element_ty), mask=mask)
    if c.lse:
        at_lse = row.to(gl.int64) * output.lse_row + q_head.to(gl.int64) * output.lse_head
        gl.store(output.lse + at_lse, lse * LN2, mask=there)


@gluon.jit
def part_slot(program, second, unit, c: gl.constexpr):
    """Where a part of an item is kept: the first and the last of a program, or, with pieces, each unit."""
    slot = unit if c.piece > 0 else 2 * program + second.to(gl.int32)
    return slot.to(gl.int64)


@gluon.jit
def parts_of(first_unit, units, at, schedule, c: gl.constexpr):
    """Of an item, of which this program has the units from `at` on: its parts, the program that has the first of them,
    and whether that starts within its program."""
    if c.piece > 0:
        return units, first_unit * 0, first_unit < 0
    else:
        # program p starts at floor(total p / active), so unit u is that of the largest p with total p < (u + 1) active
        total = gl.load(schedule.memory + schedule.batch, cache_modifier=".cg").to(gl.int64) * schedule.heads
        active = active_programs(total, schedule)
        first = (((first_unit.to(gl.int64) + 1) * active - 1) // gl.maximum(total, 1)).to(gl.int32)
        last = (((first_unit.to(gl.int64) + units) * active - 1) // gl.maximum(total, 1)).to(gl.int32)
        within = gl.load(starts_at(schedule) + first, cache_modifier=".cg") < first_unit
        # or each item has as many parts, the i-th from floor(units i / parts) on
        even = gl.load(parts_at(schedule), cache_modifier=".cg")
        i = (at * even + units - 1) // gl.maximum(units, 1)
        first = gl.where(even > 0, gl.program_id(0) - i, first)
        return gl.where(even > 0, even, last - first + 1), first, (even == 0) & within


@gluon.jit
def merge_if_last(item, parts, first, within, batch, schedule, output, memory, c: gl.constexpr):
    """Count this program's part of an item as done; the program that does the last part merges them all, in order."""
    b, head, first_row, rows, first_unit, v_scale = item
    counter = counters_at(schedule) + b * schedule.heads + head
    thread_barrier()
    if gl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
        gl.store(counter, 0)  # for the next layer
        merge(item, parts, first, within, batch, output, memory, c)


@gluon.jit
def load_parts(at, shift, count, columns, within, c: gl.constexpr):
    """lse and rows of the next parts, `count` of them if not c.merged_at_once; the first lies `shift` behind `at`."""
    STEP: gl.constexpr = c.part if c.piece > 0 else 2 * c.part
    AT_ONCE: gl.constexpr = c.merged_at_once
    lses = (gl.load(at + shift + c.columns * c.dim_v + columns, cache_modifier=".cg"),)
    parts = (gl.load(at + shift + within, cache_modifier=".cg"),)
    for u in gl.static_range(1, AT_ONCE):
        part = at + u * STEP
        lse = gl.load(part + c.columns * c.dim_v + columns, mask=u < count, other=-float("inf"), cache_modifier=".cg")
        lses = lses + (lse,)
        parts = parts + (gl.load(part + within, mask=u < count, other=0.0, cache_modifier=".cg"),)
    return lses, parts


@gluon.jit
def merge(item, count, first, starts_within, batch, output, memory, c: gl.constexpr):
    """Combine the `count` parts of an item, of which program `first` has the first.

    All that are loaded together share one maximum, found in two chains: a chain a part is what merging took longest.
    """
    b, head, first_row, rows, first_unit, v_scale = item
    C: gl.constexpr = c.columns
    DV: gl.constexpr = c.dim_v
    STEP: gl.constexpr = c.part if c.piece > 0 else 2 * c.part
    AT_ONCE: gl.constexpr = c.merged_at_once
    layout: gl.constexpr = pipe.rows_layout(DV, 4)
    columns = gl.arange(0, c.columns, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, c.dim_v, layout=gl.SliceLayout(0, layout))
    within = gl.expand_dims(columns * c.dim_v, 1) + gl.expand_dims(d, 0)
    peak = gl.full([C], NOTHING, gl.float32, gl.SliceLayout(1, layout))
    denominator = gl.zeros([C], gl.float32, gl.SliceLayout(1, layout))
    out = gl.zeros([C, DV], gl.float32, layout)
    at = memory + part_slot(first, first < 0, first_unit, c) * c.part
    shift = gl.where(starts_within, c.part, 0)  # the first part may be its program's second
    for base in range(0, count, AT_ONCE):
        lses, parts = load_parts(at, shift, count - base, columns, within, c)
        even, odd = lses[0], peak
        for u in gl.static_range(1, AT_ONCE, 2):
            odd = gl.maximum(odd, lses[u])
        for u in gl.static_range(2, AT_ONCE, 2):
            even = gl.maximum(even, lses[u])
        new_peak = gl.maximum(even, odd)
        keep = gl.exp2(peak - new_peak)
        peak = new_peak
        denominator = denominator * keep
        out = out * gl.expand_dims(keep, 1)
        for u in gl.static_range(AT_ONCE):
            add = gl.exp2(lses[u] - new_peak)
            denominator += add
            out += parts[u] * gl.expand_dims(add, 1)
        at += AT_ONCE * STEP
        shift = shift * 0
    out = out * gl.expand_dims(1.0 / gl.maximum(denominator, 1e-30), 1)
    finish(out, peak + gl.log2(denominator), columns, d, 1, item, columns, batch, output, c)


@gluon.jit
def rows_without_units(batch, schedule, c: gl.constexpr):
    """Whether there are rows that no program has units of: short sequences, or rows of no sequence if ours."""
    found = gl.load(short_at(schedule), cache_modifier=".cg") > 0
    if c.all_decode:
        begin = gl.load(batch.query_starts, cache_modifier=".cg")
        end = gl.load(batch.query_starts + schedule.batch, cache_modifier=".cg")
        found = found | (begin > 0) | (end < batch.rows)
    return found


@gluon.jit
def write_rows_without_units(query, pools, batch, schedule, output, c: gl.constexpr):
    """The rows of short sequences, a query head at a time, and those of no sequence if ours."""
    heads = schedule.heads // c.blocks * c.group
    work = gl.load(short_at(schedule), cache_modifier=".cg") * heads
    for i in range(gl.program_id(0), work, schedule.programs):
        b = gl.load(short_at(schedule) + 1 + i // heads, cache_modifier=".cg")
        length, first_row, rows = sequence(b, batch)
        page = gl.load(batch.page_table + b.to(gl.int64) * batch.table_row, mask=length > 0, other=-1)
        sees = (page >= 0) & (page < batch.num_pages)
        for row in range(first_row, first_row + rows):
            write_row(row, i % heads, page, sees & (row == first_row + rows - 1), query, pools, output, c)
    if c.all_decode:
        begin = gl.load(batch.query_starts)
        end = gl.load(batch.query_starts + schedule.batch)
        for row in range(gl.program_id(0), batch.rows, schedule.programs):
            if (row < begin) | (row >= end):
                for head in range(heads):
                    write_row(row, head, row * 0, row < 0, query, pools, output, c)


@gluon.jit
def write_row(row, head, page, sees, query, pools, output, c: gl.constexpr):
    """A row and query head: V of the first token of `page` beside the sink, if it sees that; else 0 and -inf."""
    D: gl.constexpr = c.dim_padded
    DV: gl.constexpr = c.dim_v
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row, page, kv_head = row.to(gl.int64), page.to(gl.int64), head // c.group
    share = head_scale(output.v_scale, kv_head, output.v_scale_head)
    if output.scale is not None:
        share = share / gl.load(output.scale)
    if c.lse or output.sinks is not None:
        d = gl.arange(0, D, layout=layout)
        k_at = page * pools.k_page + kv_head.to(gl.int64) * pools.k_head
        q_at = row * query.row + head.to(gl.int64) * query.head
        k = gl.load(pools.k + k_at + d, mask=sees & (d < c.dim), other=0.0).to(gl.float32)
        q = gl.load(query.q + q_at + d, mask=d < c.dim, other=0.0).to(gl.float32)
        factor = c.softmax_scale * head_scale(query.k_scale, kv_head, query.k_scale_head)
        lse = in_powers_of_two(gl.sum(q * k, 0), factor * head_scale(query.scale, head, query.scale_head), c)
        if output.sinks is not None:
            lse, beside = join_sink(lse, gl.load(output.sinks + head).to(gl.float32))
            share = share * beside
        if c.lse:
            at_lse = row * output.lse_row + head.to(gl.int64) * output.lse_head
            gl.store(output.lse + at_lse, gl.where(sees, lse * LN2, -float("inf")))
    e = gl.arange(0, DV, layout=layout).to(gl.int64)
    v_at = page * pools.v_page + kv_head.to(gl.int64) * pools.v_head
    v = gl.load(pools.v + v_at + e * pools.v_element, mask=sees, other=0.0).to(gl.float32) * share
    at = row * output.row + head.to(gl.int64) * output.head + e * output.element
    gl.store(output.out + at, v.to(output.out.dtype.element_ty))


@gluon.jit
def join_sink(lse, sink):
    """log2 of a denominator that a sink has joined, and what is left of the share of what was there."""
    sink = sink * LOG2E
    top = gl.maximum(gl.maximum(lse, sink), NOTHING)
    joined = top + gl.log2(gl.exp2(lse - top) + gl.exp2(sink - top))
    return joined, gl.exp2(lse - joined)
