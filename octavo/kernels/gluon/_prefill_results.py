"""What a consumer of prefill does once its keys are through: rows and their lse, parts of cut items, their merge.

Inside, lse is log2 of the softmax's denominator.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import _pipeline as pipe
from ._names import thread_barrier
from ._prefill_steps import EXACT_BITS, LOWEST, as_column, as_rows, row_factors
from ._prefill_tiles import COUNTER, END_ROW, FIRST_ROW, HEAD, ITEM, LOST, PART, PARTS, ROWS, SLOT, V_SCALE, get
from ._results import LN2, LOG2E, NOTHING


class Parts(NamedTuple):
    """Memory of parts of items: fp32 rows, and their lse."""

    out: Any
    lse: Any


@gluon.jit
def normaliser(reference, weight, factor, factors, lost, c: gl.constexpr):
    """1 / x of the denominators of rows, and their lse in powers of two; of those that are lost some number."""
    bits = reference - EXACT_BITS if c.exact else reference
    total = as_rows(gl.sum(weight, axis=1), c)
    if not c.exact:  # what is masked still adds 2^-24 by a parabola
        total = gl.where(reference > LOWEST, total, 0.0)
    if c.watched:
        total, bits = gl.where(lost, 1.0, total), gl.where(lost, 0.0, bits)
    lse = bits + gl.log2(total)
    if c.careful:  # what scores were scaled down by
        lse = lse * (row_factors(factors, c) / factor)
    return gl.where(total > 0.0, 1.0 / total, 0.0), lse


@gluon.jit
def finish_tile(
    o, inverse, lse, lost, count, ints, floats, output, memory, schedule, WHICH: gl.constexpr, c: gl.constexpr
):
    """Normalise and write 64 rows; or keep them as a part, and merge all parts if this one is the last.

    lost: rows of `lost_rows`; in a part their lse is NaN.
    """
    OUT: gl.constexpr = pipe.accumulator_layout(c.piece)
    R: gl.constexpr = gl.SliceLayout(1, OUT)
    PIECES: gl.constexpr = c.pieces
    parts = get(ints, count, PARTS)
    if parts == 1:
        for i in gl.static_range(PIECES):
            write_rows(o[i], inverse, lse, lost, i, count, ints, floats, output, schedule, WHICH, c)
    else:
        slot = 2 * get(ints, count, SLOT) + WHICH
        d = gl.arange(0, c.piece, layout=gl.SliceLayout(0, OUT))
        rows = gl.arange(0, ROWS, layout=R)
        at = memory.out + slot.to(gl.int64) * (ROWS * c.dim) + gl.expand_dims(rows * c.dim, 1) + gl.expand_dims(d, 0)
        for i in gl.static_range(PIECES):
            gl.store(at + i * c.piece, o[i] * as_column(inverse, OUT))
        if c.watched:
            lse = gl.where(lost, float("nan"), lse)
        gl.store(memory.lse + slot * ROWS + rows, gl.convert_layout(lse, R, assert_trivial=True))
        counter = schedule.counters + 2 * get(ints, count, COUNTER) + WHICH
        thread_barrier()
        if gl.atomic_add(counter, 1, sem="acq_rel") == parts - 1:
            gl.store(counter, 0)  # for the next layer
            merge(parts, count, ints, floats, output, memory, schedule, WHICH, c)


@gluon.jit
def merge(parts, count, ints, floats, output, memory, schedule, WHICH, c: gl.constexpr):
    """Combine the parts of an item's 64 rows, in order."""
    OUT: gl.constexpr = pipe.accumulator_layout(c.piece)
    R: gl.constexpr = gl.SliceLayout(1, OUT)
    PIECES: gl.constexpr = c.pieces
    PIECE: gl.constexpr = c.piece
    d = gl.arange(0, c.piece, layout=gl.SliceLayout(0, OUT))
    rows = gl.arange(0, ROWS, layout=R)
    first = 2 * (get(ints, count, SLOT) - get(ints, count, PART) * c.heads) + WHICH
    peak = gl.full([ROWS], NOTHING, gl.float32, R)
    for i in range(parts):
        peak = gl.maximum(peak, gl.load(memory.lse + (first + 2 * i * c.heads) * ROWS + rows, cache_modifier=".cg"))
    for n in gl.static_range(PIECES):
        total = gl.zeros([ROWS], gl.float32, R)
        out = gl.zeros([ROWS, PIECE], gl.float32, OUT)
        within = gl.expand_dims(rows * c.dim, 1) + gl.expand_dims(d + n * c.piece, 0)
        for i in range(parts):
            slot = first + 2 * i * c.heads
            share = gl.exp2(gl.load(memory.lse + slot * ROWS + rows, cache_modifier=".cg") - peak)
            part = gl.load(memory.out + slot.to(gl.int64) * (ROWS * c.dim) + within, cache_modifier=".cg")
            total += share
            out += part * gl.expand_dims(share, 1)
        lost = total != total
        total, peak = gl.where(lost, 1.0, total), gl.where(lost, 0.0, peak)
        inverse = as_rows(gl.where(total > 0.0, 1.0 / total, 0.0), c)
        lse = as_rows(peak + gl.log2(total), c)
        write_rows(out, inverse, lse, as_rows(lost, c), n, count, ints, floats, output, schedule, WHICH, c)


@gluon.jit
def write_rows(out, inverse, lse, lost, piece: gl.constexpr, count, ints, floats, output, schedule, WHICH,
               c: gl.constexpr):  # fmt: skip
    """Write a piece of rows, of whose denominator `inverse` is 1 / x, and with the first their lse.

    The sink joins the denominator here, once. Items with rows that are lost are noted.
    """
    OUT: gl.constexpr = pipe.accumulator_layout(c.piece)
    head = get(ints, count, HEAD) * c.pack
    first_row = get(ints, count, FIRST_ROW) + WHICH * (ROWS // c.pack)
    end_row = get(ints, count, END_ROW)
    r = gl.arange(0, ROWS, layout=lse.type.layout)
    if c.watched and piece == 0:
        gl.store(schedule.lost + get(ints, count, ITEM) + r * 0, gl.program_id(0) + 1, mask=lost)
        gl.store(schedule.memory + LOST + r * 0, 1, mask=lost)
    if output.sinks is not None:
        sink = gl.load(output.sinks + head + r % c.pack).to(gl.float32) * LOG2E
        peak = gl.maximum(gl.maximum(lse, sink), NOTHING)
        joined = peak + gl.log2(gl.exp2(lse - peak) + gl.exp2(sink - peak))
        saw = lse > -float("inf")
        inverse *= gl.where(saw, gl.exp2(lse - joined), 0.0)
        lse = gl.where(saw, joined, lse)
    scale = get(floats, count, V_SCALE)
    if output.scale is not None:
        scale = scale / gl.load(output.scale)
    out = (out * as_column(inverse * scale, OUT)).to(output.out.dtype.element_ty)
    if c.piece <= 128:  # a wider one would take the shared memory of a block of keys on its way to whole rows
        out = gl.convert_layout(out, gl.BlockedLayout([1, 8], [256 // c.piece, c.piece // 8], [4, 1], [1, 0]))
    L: gl.constexpr = out.type.layout
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    d = gl.arange(0, c.piece, layout=gl.SliceLayout(0, L)) + piece * c.piece
    row = first_row + rows // c.pack
    at = row.to(gl.int64) * output.row + (head + rows % c.pack).to(gl.int64) * output.head
    at = gl.expand_dims(at, 1) + gl.expand_dims(d.to(gl.int64) * output.element, 0)
    gl.store(output.out + at, out, mask=gl.expand_dims(row < end_row, 1))
    if c.lse and piece == 0:
        row = first_row + r // c.pack
        at = row.to(gl.int64) * output.lse_row + (head + r % c.pack).to(gl.int64) * output.lse_head
        gl.store(output.lse + at, lse * LN2, mask=row < end_row)
