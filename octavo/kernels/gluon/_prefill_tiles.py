"""Where prefill's tiles come from: what the producer hands the consumers, and the producer itself.

A tile is 128 packed rows (query row, query head) of one sequence; each of two consumers has 64 of them. Its record in
shared memory is read again in the epilogue, so that nothing of it takes registers meanwhile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from . import _pipeline as pipe
from ._names import async_load, reinterpret, thread_barrier
from ._results import head_scale
from .prefill_plan import ENTRY

ROWS = gl.constexpr(64)  # packed rows of a consumer
ENTRY_INTS = gl.constexpr(ENTRY)

# Fields of a record: integers
BLOCKS = gl.constexpr(0)  # how many blocks of keys; -1: no more tiles
TOP = gl.constexpr(1)  # the last of them
LENGTH = gl.constexpr(2)  # tokens of the sequence
SEEN = gl.constexpr(3)  # tokens that the first row sees
HEAD = gl.constexpr(4)  # pack of query heads
FIRST_ROW = gl.constexpr(5)
END_ROW = gl.constexpr(6)
PARTS = gl.constexpr(7)  # programs that share the tile
SLOT = gl.constexpr(8)  # of this part
COUNTER = gl.constexpr(9)  # of the item
PART = gl.constexpr(10)
SEQUENCE = gl.constexpr(11)
MISSING = gl.constexpr(12)  # pages that are not in the pool
ITEM = gl.constexpr(13)
LOST = gl.constexpr(3)  # of a schedule's header: whether this step has lost an item so far
# and fp32
FACTOR = gl.constexpr(0)  # softmax scale times scale of keys
V_SCALE = gl.constexpr(1)


class Batch(NamedTuple):
    """The sequences of a call."""

    query_starts: Any
    page_table: Any
    table_row: int  # stride of page_table
    num_pages: int
    rows: int  # of the query
    size: int  # sequences


class Scales(NamedTuple):
    """Scales of query and keys with their strides over heads."""

    query: Any
    query_head: int
    keys: Any
    keys_head: int


@gluon.jit
def put(record, count, field: gl.constexpr, value, WARPS: gl.constexpr = 1):
    """Set a field of the record of tile number `count` of this program."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    record.index((count % 2) * 16 + field).store(gl.full([1], value, record.dtype, layout=layout))


@gluon.jit
def get(record, count, field: gl.constexpr):
    """A field of the record of tile number `count` of this program."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(record.index((count % 2) * 16 + field).load(layout), axis=0)


@gluon.jit
def page_id(table, page, begin, end, num_pages, c: gl.constexpr):
    """Id of a page of a sequence; -1, which TMA reads as zeros, where no token in [begin, end) is on it."""
    used = (page * c.page + c.page > begin) & (page * c.page < end)
    found = gl.load(table + page, mask=used, other=-1)
    return gl.where((found >= 0) & (found < num_pages), found, -1)


@gluon.jit
def missing_pages(table, begin, end, num_pages, c: gl.constexpr):
    """How many pages of tokens [begin, end) are not in the pool. By one warp."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    i = gl.arange(0, 128, layout=layout)
    first, last = begin // c.page, (end + (c.page - 1)) // c.page
    count = first * 0
    for base in range(first, last, 128):
        found = gl.load(table + base + i, mask=base + i < last, other=0)
        count += gl.sum(((found < 0) | (found >= num_pages)).to(gl.int32), axis=0)
    return count


@gluon.jit
def zero_tokens(v_words, stage, block, begin, end, c: gl.constexpr, WARPS: gl.constexpr = 1):
    """Zero the bytes of V^T of a block's tokens outside [begin, end): 0 x NaN is NaN."""
    PAGES: gl.constexpr = c.pages
    WORDS: gl.constexpr = c.page // 4  # of a row of V^T
    STEP: gl.constexpr = c.rows_zeroed
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [512 // c.page, c.page // 16], [WARPS, 1], [1, 0])
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, layout))
    for g in gl.static_range(PAGES):
        first = block * c.block + g * c.page
        if (first < begin) | (first + c.page > end):
            token = first + word // 4 * 16 + word % 4 * 2  # a word holds tokens t, t+1, t+8, t+9
            keep = gl.where((token >= begin) & (token < end), 0xFF, 0)
            keep |= gl.where((token + 1 >= begin) & (token + 1 < end), 0xFF00, 0)
            keep |= gl.where((token + 8 >= begin) & (token + 8 < end), 0xFF0000, 0)
            keep |= gl.where((token + 9 >= begin) & (token + 9 < end), -0x1000000, 0)
            for r in range(c.dim // STEP):
                rows = v_words.index((stage * c.pages + g) * (c.dim // STEP) + r)
                rows.store(rows.load(layout) & gl.expand_dims(keep, 0))


@gluon.jit
def start_values(v_desc, v_pages, table, block, begin, end, kv_head, num_pages, bar, stage, c: gl.constexpr):
    """Start the copy of a block of V^T."""
    PAGES: gl.constexpr = c.pages
    mbarrier.expect(bar, c.block * c.dim)
    for g in gl.static_range(PAGES):
        page = page_id(table, block * c.pages + g, begin, end, num_pages, c)
        pipe.copy_page(v_desc, v_pages, page, kv_head, bar, stage * c.pages + g, 0, 1)


@gluon.jit
def wait_empty(bars, number, c: gl.constexpr):
    """Wait until the keys that block `number` takes the place of have been read; for values, wait for number + 1."""
    mbarrier.wait(bars.index(number & (c.stages - 1)), ((number >> c.stage_bits) & 1) ^ 1)


@gluon.jit
def send_block(k_desc, v_desc, pages_of, block, last, number, landed, bars, k_pages, v_pages, c: gl.constexpr,
               WARPS: gl.constexpr = 1):  # fmt: skip
    """Start the copies of a block as number `number` of the rings; returns how many waited for v_landed so far.

    pages_of: page table of the sequence, its tokens [begin, end), KV head and pages of the pool. last: keys alone.
    """
    k_full, v_full, empty, v_landed = bars
    table, begin, end, kv_head, num_pages = pages_of
    PAGES: gl.constexpr = c.pages
    STEP: gl.constexpr = c.rows_zeroed
    v_words = reinterpret(v_pages, gl.int32, [c.stages * c.pages * (c.dim // STEP), STEP, c.page // 4],
                                   gl.NVMMASharedLayout(c.page, 32, 2))  # fmt: skip
    stage = number & (c.stages - 1)
    wait_empty(empty, number, c)
    mbarrier.expect(k_full.index(stage), c.block * c.dim)
    for g in gl.static_range(PAGES):
        page = page_id(table, block * c.pages + g, begin, end, num_pages, c)
        at = stage * (c.panels * c.pages) + g
        pipe.copy_page(k_desc, k_pages, page, kv_head, k_full.index(stage), at, c.pages, c.panels)
    wait_empty(empty, number + 1, c)
    full = v_full.index(stage)
    if last:
        mbarrier.arrive(full, count=1)
    else:
        if (block * c.block < begin) | (block * c.block + c.block > end):
            start_values(v_desc, v_pages, table, block, begin, end, kv_head, num_pages, v_landed, stage, c)
            mbarrier.wait(v_landed, landed & 1)
            landed += 1
            zero_tokens(v_words, stage, block, begin, end, c, WARPS)
            fence_async_shared()
            if WARPS > 1:
                thread_barrier()
            mbarrier.arrive(full, count=1)
        else:
            start_values(v_desc, v_pages, table, block, begin, end, kv_head, num_pages, full, stage, c)
    return landed


@gluon.jit
def produce(q_desc, k_desc, v_desc, batch, schedule, scales, output, query_bars, bars, q_in, k_pages, v_pages, record,
            c: gl.constexpr):  # fmt: skip
    """Take items as long as there are any, and fill the rings with their query, keys and values."""
    q_full, q_empty = query_bars
    ints, floats = record
    programs = gl.num_programs(0)
    total = gl.load(schedule.memory) * c.heads
    item = gl.program_id(0)
    count = item * 0
    number = item * 0  # of a block, over all tiles
    landed = item * 0
    while item < total:
        entry = schedule.entries + item // c.heads * ENTRY_INTS
        parts = gl.load(entry + 7)
        if parts > 0:
            head = item % c.heads
            b = gl.load(entry)
            first_row = gl.load(entry + 1)
            end_row = gl.load(entry + 2)
            length = gl.load(entry + 3)
            seen = gl.load(entry + 4)
            low = gl.load(entry + 5)
            high = gl.load(entry + 6)
            first_slot = gl.load(entry + 8)
            part = gl.load(entry + 9)
            cut = gl.load(entry + 10)
            kv_head = head * c.pack // c.group
            table = batch.page_table + b.to(gl.int64) * batch.table_row
            k_scale = head_scale(scales.keys, kv_head, scales.keys_head)
            v_scale = head_scale(output.v_scale, kv_head, output.v_scale_head)
            begin = length * 0
            if c.window > 0:
                begin = gl.maximum(seen - c.window, 0)
            missing = missing_pages(
                table, gl.maximum(begin, low * c.block), gl.minimum(length, high * c.block), batch.num_pages, c
            )
            mbarrier.wait(q_empty, (count & 1) ^ 1)
            put(ints, count, BLOCKS, high - low)
            put(ints, count, TOP, high - 1)
            put(ints, count, LENGTH, length)
            put(ints, count, SEEN, seen)
            put(ints, count, HEAD, head)
            put(ints, count, FIRST_ROW, first_row)
            put(ints, count, END_ROW, gl.minimum(end_row, batch.rows))
            put(ints, count, PARTS, parts)
            put(ints, count, SLOT, (first_slot + part) * c.heads + head)
            put(ints, count, COUNTER, cut * c.heads + head)
            put(ints, count, PART, part)
            put(ints, count, SEQUENCE, b)
            put(ints, count, MISSING, missing)
            put(ints, count, ITEM, item)
            put(floats, count, FACTOR, k_scale * c.softmax_scale)
            put(floats, count, V_SCALE, v_scale)
            mbarrier.expect(q_full, 2 * ROWS * c.dim * c.query_bits // 8)
            for g in gl.static_range(2):
                row = first_row + g * (ROWS // c.pack)
                async_load(q_desc, [row, head * c.pack, 0], q_full, q_in.index(g))
            pages_of = (table, begin, length, kv_head, batch.num_pages)
            # One block of keys more, read by nobody, so that the consumers may always start the next product.
            for i in range(high - low + 1):
                last = i == high - low
                block = gl.maximum(high - 1 - i, low)
                landed = send_block(
                    k_desc, v_desc, pages_of, block, last, number + i, landed, bars, k_pages, v_pages, c
                )
            number += high - low + 1
            count += 1
        item = programs + gl.atomic_add(schedule.memory + 1, 1)
    mbarrier.wait(q_empty, (count & 1) ^ 1)
    put(ints, count, BLOCKS, -1)
    mbarrier.arrive(q_full, count=1)
    if gl.atomic_add(schedule.memory + 2, 1) == programs - 1:  # for the next layer
        gl.store(schedule.memory + 1, 0)
        gl.store(schedule.memory + 2, 0)
    write_rows_of_no_sequence(batch, output, c)


@gluon.jit
def write_rows_of_no_sequence(batch, output, c: gl.constexpr):
    """0 and -inf to the rows before the first sequence and after the last."""
    DIM: gl.constexpr = c.dim
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    d = gl.arange(0, DIM, layout=layout)
    begin = gl.load(batch.query_starts)
    end = gl.load(batch.query_starts + batch.size)
    for row in range(gl.program_id(0), batch.rows, gl.num_programs(0)):
        if (row < begin) | (row >= end):
            for head in range(c.heads * c.pack):
                at = output.out + row.to(gl.int64) * output.row + head * output.head
                gl.store(at + d * output.element, gl.zeros([DIM], gl.float32, layout).to(output.out.dtype.element_ty))
                if c.lse:
                    gl.store(output.lse + row.to(gl.int64) * output.lse_row + head * output.lse_head, -float("inf"))
