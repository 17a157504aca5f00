"""What decode does once an item is computed: rows and their lse, parts of items, their merge, rows that see nothing.

An item is a sequence and KV head (and block of query columns). Inside, lse is log2 of the softmax's denominator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import _pipeline as pipe
from ._names import thread_barrier
from .plan import active_programs, counters_at, starts_at

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
NOTHING = gl.constexpr(-1.0e30)  # a maximum over nothing; finite, so that differences are not NaN


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
    begin = gl.minimum(gl.maximum(gl.load(batch.query_starts + b), 0), batch.rows)
    end = gl.minimum(gl.maximum(gl.load(batch.query_starts + b + 1), 0), batch.rows)
    length = gl.minimum(gl.load(batch.seq_lens + b), batch.capacity)
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
def finish(out, lse, columns, d, COLUMN_AXIS: gl.constexpr, item, batch, output, c: gl.constexpr):
    """Write an item's normalised `out` and lse (log2 of its denominator); the sink joins the denominator here, once.

    COLUMN_AXIS: the axis that columns lack in `out`: 0 for [Dv, columns], 1 for [columns, Dv].
    """
    b, head, first_row, rows, first_unit = item
    row, q_head, _, there = column_rows(columns, head, first_row, rows, batch, c)
    if output.sinks is not None:
        sink = gl.load(output.sinks + q_head, mask=there, other=0.0).to(gl.float32) * LOG2E
        top = gl.maximum(gl.maximum(lse, sink), NOTHING)
        joined = top + gl.log2(gl.exp2(lse - top) + gl.exp2(sink - top))
        saw = lse > -float("inf")
        out = out * gl.expand_dims(gl.where(saw, gl.exp2(lse - joined), 0.0), COLUMN_AXIS)
        lse = gl.where(saw, joined, lse)
    out = out * head_scale(output.v_scale, head // c.blocks, output.v_scale_head)
    if output.scale is not None:
        out = out / gl.load(output.scale)
    at = gl.expand_dims(row.to(gl.int64) * output.row + q_head * output.head, COLUMN_AXIS)
    at += gl.expand_dims(d * output.element, 1 - COLUMN_AXIS)
    mask = gl.expand_dims(there, COLUMN_AXIS) & gl.expand_dims(d < c.dim_v, 1 - COLUMN_AXIS)
    gl.store(output.out + at, out.to(output.out.dtype.element_ty), mask=mask)
    if c.lse:
        gl.store(output.lse + row.to(gl.int64) * output.lse_row + q_head * output.lse_head, lse * LN2, mask=there)


@gluon.jit
def part_slot(program, second, unit, c: gl.constexpr):
    """Where a part of an item is kept: the first and the last of a program, or, with pieces, each unit."""
    slot = unit if c.piece > 0 else 2 * program + second.to(gl.int32)
    return slot.to(gl.int64)


@gluon.jit
def parts_of(first_unit, units, schedule, c: gl.constexpr):
    """Of an item: its parts, the program that has the first of them, and whether that starts within its program."""
    if c.piece > 0:
        return units, first_unit * 0, False
    else:
        # program p starts at floor(total p / active), so unit u is that of the largest p with total p < (u + 1) active
        total = gl.load(schedule.memory + schedule.batch).to(gl.int64) * schedule.heads
        active = active_programs(total, schedule)
        first = (((first_unit.to(gl.int64) + 1) * active - 1) // gl.maximum(total, 1)).to(gl.int32)
        last = (((first_unit.to(gl.int64) + units) * active - 1) // gl.maximum(total, 1)).to(gl.int32)
        return last - first + 1, first, gl.load(starts_at(schedule) + first) < first_unit


@gluon.jit
def merge_if_last(item, parts, first, within, batch, schedule, output, memory, c: gl.constexpr):
    """Count this program's part of an item as done; the program that does the last part merges them all, in order."""
    b, head, first_row, rows, first_unit = item
    counter = counters_at(schedule) + b * schedule.heads + head
    thread_barrier()
    if gl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
        gl.store(counter, 0)  # for the next layer
        merge(item, parts, first, within, batch, output, memory, c)


@gluon.jit
def merge(item, parts, first, starts_within, batch, output, memory, c: gl.constexpr):
    """Combine the parts of an item, of which program `first` has the first."""
    b, head, first_row, rows, first_unit = item
    C: gl.constexpr = c.columns
    DV: gl.constexpr = c.dim_v
    AT_ONCE: gl.constexpr = c.merged_at_once
    layout: gl.constexpr = pipe.rows_layout(DV, 4)
    columns = gl.arange(0, c.columns, layout=gl.SliceLayout(1, layout))
    d = gl.arange(0, c.dim_v, layout=gl.SliceLayout(0, layout))
    within = gl.expand_dims(columns * c.dim_v, 1) + gl.expand_dims(d, 0)
    peak = gl.full([C], NOTHING, gl.float32, gl.SliceLayout(1, layout))
    denominator = gl.zeros([C], gl.float32, gl.SliceLayout(1, layout))
    out = gl.zeros([C, DV], gl.float32, layout)
    for base in range(0, parts, AT_ONCE):
        for u in gl.static_range(AT_ONCE):
            i = gl.minimum(base + u, parts - 1)
            at = memory + part_slot(first + i, (i == 0) & starts_within, first_unit + i, c) * c.part
            lse = gl.load(at + c.columns * c.dim_v + columns, cache_modifier=".cg")
            part = gl.load(at + within, cache_modifier=".cg")
            lse = gl.where(base + u < parts, lse, -float("inf"))
            new_peak = gl.maximum(peak, lse)
            keep = gl.exp2(peak - new_peak)
            add = gl.exp2(lse - new_peak)
            peak = new_peak
            denominator = denominator * keep + add
            out = out * gl.expand_dims(keep, 1) + part * gl.expand_dims(add, 1)
    out = out * gl.expand_dims(1.0 / gl.maximum(denominator, 1e-30), 1)
    finish(out, peak + gl.log2(denominator), columns, d, 1, item, batch, output, c)


@gluon.jit
def write_empty_rows(batch, schedule, output, c: gl.constexpr):
    """0 and -inf to the rows of decode sequences without tokens and, if they are ours, to those of no sequence."""
    for b in range(gl.program_id(0), schedule.batch, schedule.programs):
        length, first_row, rows = sequence(b, batch)
        if (length == 0) & (rows <= c.max_rows):
            for row in range(first_row, first_row + rows):
                write_empty_row(row, schedule, output, c)
    if c.all_decode:
        begin = gl.load(batch.query_starts)
        end = gl.load(batch.query_starts + schedule.batch)
        for row in range(gl.program_id(0), batch.rows, schedule.programs):
            if (row < begin) | (row >= end):
                write_empty_row(row, schedule, output, c)


@gluon.jit
def write_empty_row(row, schedule, output, c: gl.constexpr):
    """0 and -inf to all heads of a row of the query."""
    DV: gl.constexpr = c.dim_v
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    d = gl.arange(0, DV, layout=layout)
    for head in range(schedule.heads // c.blocks * c.group):
        at = row.to(gl.int64) * output.row + head * output.head
        gl.store(
            output.out + at + d * output.element, gl.zeros([DV], gl.float32, layout).to(output.out.dtype.element_ty)
        )
        if c.lse:
            gl.store(output.lse + row.to(gl.int64) * output.lse_row + head * output.lse_head, -float("inf"))
