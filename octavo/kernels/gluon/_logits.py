"""Pieces of mqa_logits: its constants, and what happens to scores, logits and columns without one.

Explicit here: who holds what. A head sum [64, TERMS] leaves the two terms of one query row in every thread, whatever
its column, so each thread keeps the row that is its own column, and no value is exchanged between threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..constants import CompileTime
from ._names import reinterpret
from ._rows import place_of, row_of, span

FILL_COLUMNS = gl.constexpr(512)
PAGES_AT_ONCE = gl.constexpr(128)
TERMS = gl.constexpr(8)  # columns of the head sum: the two terms of a row's weights, four times


@dataclass(frozen=True)
class Constants(CompileTime):
    """Compile-time constants of the kernel: one `gl.constexpr` argument.

    Attributes:
        paged: keys lie in pages; else in one run. page: tokens of a page.
        heads, dim: of the query.
        sequence_rows, groups: query rows of a sequence and blocks of them, with pages.
        block_rows, columns, passes: query rows that share a tile of keys; columns of a product; products of a tile.
        fold: blocks are taken from both ends in turns.
        switch: tiles that are worth what a program needs to begin with a block.
        tile, stages, query_stages: tokens of a tile; tiles of the ring; queries of theirs.
        max_registers: of a thread at launch.
        scan: blocks that a program looks at together.
        length_a_row: seq_lens has a length for each row.
        exponents: scales are ue8m0 bytes.
        compressed: a row's first column is its first token.
        fill: columns without a logit are filled.
    """

    paged: bool
    page: int
    heads: int
    dim: int
    sequence_rows: int
    groups: int
    block_rows: int
    columns: int
    passes: int
    fold: bool
    switch: int
    tile: int
    stages: int
    query_stages: int
    max_registers: int | None
    scan: int
    length_a_row: bool
    exponents: bool
    compressed: bool
    fill: bool

    @property
    def rows_a_pass(self) -> int:
        """Query rows of a product."""
        return self.columns // self.heads

    @property
    def box(self) -> int:
        """Tokens of one copy."""
        return min(self.page, self.tile)

    @property
    def boxes(self) -> int:
        """Copies of a tile."""
        return self.tile // self.box

    @property
    def subtiles(self) -> int:
        """Products of 64 tokens in a tile."""
        return self.tile // 64

    @property
    def tile_bytes(self) -> int:
        """Bytes that a tile's copies bring."""
        return self.tile * (self.dim + 4)

    @property
    def query_bytes(self) -> int:
        """Bytes that a block's query and weights bring."""
        return self.passes * self.columns * self.dim + self.weight_rows * self.heads * 4

    @property
    def weight_rows(self) -> int:
        """Rows of weights that are copied for a block: block_rows, as a power of two."""
        return 1 << (self.block_rows - 1).bit_length()


class Table(NamedTuple):
    """Page ids of the sequences, [sequences, width]."""

    ids: Any
    row: int
    column: int
    num_pages: int


class Output(NamedTuple):
    """Where logits go: [rows, width]. The columns of a row are filled in `pieces` pieces of `piece` columns."""

    logits: Any
    row: int
    column: int
    width: int
    fill: float
    pieces: int
    piece: int


@gluon.jit
def page_id(table, block, token, rows, c: gl.constexpr):
    """Id of the page of a block's token; -1 for one that no row can see, whose entry is not read. Runs have page 0."""
    if c.paged:
        at = table.ids + (block // c.groups).to(gl.int64) * table.row
        return gl.load(at + (token // c.page).to(gl.int64) * table.column, mask=token < rows.limit, other=-1)
    else:
        return token * 0


# ---- scores


@gluon.jit
def relu_bf16(x):
    """max(x, 0) in bf16, NaN kept: one instruction for two."""
    return gl.inline_asm_elementwise(
        "cvt.rn.relu.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def halves(x):
    """The left and the right half of the columns of x [64, N]."""
    return gl.split(gl.permute(gl.reshape(x, [64, 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def by_row(x, c: gl.constexpr):
    """Scores x [64, rows * heads] of a product, a tuple with one [64, heads] for each query row."""
    if c.rows_a_pass == 1:
        return (x,)
    elif c.rows_a_pass == 2:
        return halves(x)
    else:
        left, right = halves(x)
        return halves(left) + halves(right)


@gluon.jit
def split_weights(w_rows, w_smem, c: gl.constexpr):
    """Weights of a block's rows as B operands of the head sum, [TERMS, heads] each: their hi and lo in turns."""
    ROWS: gl.constexpr = c.block_rows
    HEADS: gl.constexpr = c.heads
    layout: gl.constexpr = gl.BlockedLayout([1, HEADS // 16], [2, 16], [4, 1], [1, 0])
    term = gl.expand_dims(gl.arange(0, TERMS, layout=gl.SliceLayout(1, layout)), 1)
    flat = reinterpret(w_rows, gl.float32, [c.weight_rows, HEADS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for r in gl.static_range(ROWS):
        w = gl.expand_dims(flat.index(r).load(gl.SliceLayout(0, layout)), 0)
        hi = w.to(gl.bfloat16)
        lo = (w - hi.to(gl.float32)).to(gl.bfloat16)
        w_smem.index(r).store(gl.where(term % 2 == 0, hi, lo))


@gluon.jit
def load_scales(s_tile, layout: gl.constexpr, c: gl.constexpr):
    """Scales of 64 keys."""
    bits = s_tile.load(layout)
    if c.exponents:
        byte = bits & 0xFF
        bits = gl.where(byte == 0, 0x400000, gl.where(byte == 0xFF, 0x7FC00000, byte << 23))
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def add_terms(x):
    """hi + lo of neighbouring columns, [64, TERMS] -> [64, TERMS / 2]."""
    hi, lo = gl.split(gl.reshape(x, [64, TERMS // 2, 2]))
    return hi + lo


@gluon.jit
def emit(sums, scales, position, length, to, output, c: gl.constexpr):
    """Write the logits of 64 tokens: sums of each query row [64, TERMS], every thread the row that is its column.

    position [64, TERMS / 2]: of the token among the `length` that the row sees; `to`: where those begin.
    """
    ROWS: gl.constexpr = c.block_rows
    y = add_terms(sums[0])
    COLUMNS: gl.constexpr = gl.SliceLayout(0, y.type.layout)
    column = gl.expand_dims(gl.arange(0, TERMS // 2, layout=COLUMNS), 0)
    for r in gl.static_range(1, ROWS):
        y = gl.where(column == r, add_terms(sums[r]), y)
    y = y * gl.expand_dims(scales, 1)
    seen = position.to(gl.uint32) < length.to(gl.uint32)  # not below 0 either
    gl.store(to + position.to(gl.int64) * output.column, y.to(output.logits.dtype.element_ty), mask=seen)


# ---- columns without a logit


@gluon.jit
def missing_pages(table, block, page, end, c: gl.constexpr):
    """Which of a block's pages `page`, below `end`, are not in the pool."""
    at = table.ids + (block // c.groups).to(gl.int64) * table.row
    found = gl.load(at + page.to(gl.int64) * table.column, mask=page < end, other=0)
    return (found < 0) | (found >= table.num_pages)


@gluon.jit
def any_missing(table, block, begin, end, c: gl.constexpr):
    """More than 0 if a page of a block's tokens [begin, end) is not in the pool."""
    i = gl.arange(0, PAGES_AT_ONCE, layout=gl.BlockedLayout([1], [32], [4], [0]))
    begin, end = begin // c.page, (end + (c.page - 1)) // c.page
    found = missing_pages(table, block, begin + i, end, c)
    for base in range(begin + PAGES_AT_ONCE, end, PAGES_AT_ONCE):
        found = found | missing_pages(table, block, base + i, end, c)
    return gl.sum(found.to(gl.int32), 0)


@gluon.jit
def mark_missing(table, block, begin, end, rows, output, c: gl.constexpr):
    """-inf for those of the tokens [begin, end) that a row sees and whose page id is not in the pool."""
    ROWS: gl.constexpr = c.block_rows
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, PAGES_AT_ONCE, layout=layout)
    nothing = gl.full([PAGES_AT_ONCE], float("-inf"), output.logits.dtype.element_ty, layout)
    pages = (end + (c.page - 1)) // c.page
    for base in range(begin // c.page, pages, PAGES_AT_ONCE):
        missing = missing_pages(table, block, base + i, pages, c)
        for j in gl.static_range(ROWS):
            sequence, within, there = place_of(block, j, rows, c)
            _, high = span(sequence, within, there, rows, c)
            to = output.logits + (row_of(block, c) + j).to(gl.int64) * output.row
            for k in range(c.page):
                token = (base + i) * c.page + k
                mine = missing & (token >= begin) & (token < gl.minimum(end, high))
                gl.store(to + token.to(gl.int64) * output.column, nothing, mask=mine)


@gluon.jit
def fill_columns(to, begin, end, output):
    """Fill columns [begin, end) of a row."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, FILL_COLUMNS, layout=layout)
    value = gl.full([FILL_COLUMNS], 0.0, gl.float32, layout) + output.fill
    value = value.to(output.logits.dtype.element_ty)
    for base in range(begin, end, FILL_COLUMNS):
        gl.store(to + (base + i).to(gl.int64) * output.column, value, mask=base + i < end)


@gluon.jit
def fill_unseen(rows, output, c: gl.constexpr):
    """Fill what no row sees; programs share the pieces of all rows."""
    for unit in range(gl.program_id(0), rows.rows * output.pieces, gl.num_programs(0)):
        row = unit // output.pieces
        begin = (unit - row * output.pieces) * output.piece
        end = gl.minimum(begin + output.piece, output.width)
        sequence, within = row * 0, row
        if c.paged:
            sequence, within = row // c.sequence_rows, row % c.sequence_rows
        low, high = span(sequence, within, row >= 0, rows, c)
        if c.compressed:
            high = high - low
            low = low * 0
        low = gl.where(high > low, low, output.width)
        to = output.logits + row.to(gl.int64) * output.row
        fill_columns(to, begin, gl.minimum(end, low), output)
        fill_columns(to, gl.maximum(begin, gl.maximum(high, 0)), gl.where(low == output.width, begin, end), output)
