"""Device functions that kernels share: FP8 in integer arithmetic, paging, tiles of K and V, the query.

`c` is a `_plan.Constants` everywhere: what is known when a kernel is compiled. Every offset that a page id or a row
number enters is int64, as is every one of a query head: heads may lie as far apart as rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FP8_MAX = tl.constexpr(448.0)
NEVER = tl.constexpr(-1e30)  # a peak below every score, and finite: the difference of two is 0, not NaN


@triton.jit
def e4m3_to_fp16(bits):
    """e4m3 bytes (uint8) as fp16: exact, subnormals and NaN included, without the conversion that sm_89 brought."""
    x = bits.to(tl.uint16)
    # The 4 exponent bits, read as the low ones of fp16's 5, are off by 15 - 7.
    value = (((x & 0x80) << 8) | ((x & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((x & 0x7F) == 0x7F, float("nan"), value.to(tl.float16)).to(tl.float16)


@triton.jit
def e5m2_to_fp16(bits):
    """e5m2 bytes (uint8) as fp16: the upper half of one."""
    return (bits.to(tl.uint16) << 8).to(tl.float16, bitcast=True)


@triton.jit
def fp32_to_e4m3(x):
    """fp32 as e4m3 bytes (uint8), nearest even, saturating at 448, NaN as 0: `formats.cast` in integer arithmetic."""
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), FP8_MAX)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # exponent bias 127 to 7, 3 bits of mantissa
    tiny = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000  # fp32's last bit is 2^-9 there: it rounds for us
    code = sign | tl.where(size < 0.015625, tiny, normal)
    return tl.where(x == x, code, 0).to(tl.uint8)


@triton.jit
def float32(x):
    """x as fp32, exact; bf16 by its bits, since the interpreter's own conversion is not."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def bf16_bits(x):
    """fp32 as the bits of bf16 (uint16), nearest even, NaN as 0x7FC0: integer arithmetic."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return tl.where(nan, 0x7FC0, rounded).to(tl.uint16)


@triton.jit
def fp32_to_bf16(x, c: tl.constexpr):
    """fp32 as bf16, nearest even; Triton's interpreter cuts instead of rounding."""
    if c.interpreted:
        return bf16_bits(x).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def to_fp8(x, c: tl.constexpr):
    """fp32 within 448 as an e4m3 operand; Triton's interpreter loses the carry of a rounded mantissa."""
    if c.interpreted:
        return fp32_to_e4m3(x).to(tl.float8e4nv, bitcast=True)
    else:
        return x.to(tl.float8e4nv)


@triton.jit
def settled(x):
    """fp16 `x` as it is, in the threads that made it.

    Triton moves a conversion from FP8 behind the change to an operand's layout. Where V has rows of elements, that
    change gathers single bytes; of fp16 it is one transposing load. What may have effects (is_pure=False) stays.
    """
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float16, is_pure=False, pack=2)


@triton.jit
def to_operand(x, kind: tl.constexpr, c: tl.constexpr):
    """fp32 as an operand of `kind`: fp8, fp16 or bf16."""
    if kind == "fp8":
        return to_fp8(x, c)
    elif kind == "fp16":
        return x.to(tl.float16)
    else:
        return fp32_to_bf16(x, c)


@triton.jit
def stored_to_operand(x, kind: tl.constexpr, c: tl.constexpr):
    """Stored elements as an operand of `kind`; exact in every pair that _plan makes."""
    if kind == "fp8":
        return x if c.fp8_casts else x.to(tl.float8e4nv, bitcast=True)
    elif c.kv == "fp8_e4m3":
        return x.to(tl.float16) if c.fp8_casts else e4m3_to_fp16(x)
    elif c.kv == "fp8_e5m2":
        if c.interpreted:
            return e5m2_to_fp16(x)
        else:
            return x.to(tl.float8e5, bitcast=True).to(tl.float16)
    else:
        return x


@triton.jit
def product(a, b, c: tl.constexpr):
    """a @ b accumulated afresh in fp32; Triton's interpreter holds bf16 as integers, so there the product is fp32's."""
    if c.interpreted and a.dtype == tl.bfloat16:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    else:
        return tl.dot(a, b)


@triton.jit
def sequence(index, batch, bounds):
    """First query row, number of rows and length of sequence(s) `index`; no rows where it is no sequence.

    bounds: (sequences, tokens that a page table row can name, query rows, num_decodes or -1); starts and lengths are
    cut to them. They vary from call to call, so they are no part of `batch`, on which Triton would specialise.
    """
    size, capacity, total_rows, num_decodes = bounds
    there = (index >= 0) & (index < size)
    start = tl.load(batch.query_starts + index, mask=there, other=0)
    end = tl.load(batch.query_starts + index + 1, mask=there, other=0)
    length = tl.load(batch.seq_lens + index, mask=there, other=0)
    start = tl.minimum(tl.maximum(start, 0), total_rows)
    end = tl.minimum(tl.maximum(end, 0), total_rows)
    return start, tl.maximum(end - start, 0), tl.minimum(tl.maximum(length, 0), capacity)


@triton.jit
def decodes(index, rows, bounds, c: tl.constexpr):
    """Whether sequence(s) `index` of `rows` query rows are decodes: the first num_decodes, or the short ones if -1."""
    size, capacity, total_rows, num_decodes = bounds
    return tl.where(num_decodes < 0, rows <= c.max_query_len, index < num_decodes) & (rows > 0)


@triton.jit
def first_visible(position, c: tl.constexpr):
    """The first token that a row at `position` sees."""
    if c.window is None:
        return tl.maximum(position, 0) * 0
    else:
        return tl.maximum(position - c.window + 1, 0)


@triton.jit
def token_of_column(column):
    """Token of a page in a column of a V row of the leaf layout: octavo.layouts.LEAF_COLUMNS inverted."""
    return (column // 16) * 16 + ((column >> 2) & 3) * 2 + ((column >> 1) & 1) * 8 + (column & 1)


@triton.jit
def in_value_order(p, c: tl.constexpr):
    """P [rows, tokens] with its columns in the order of V's: the leaf layout's inside 16.

    Column 8 b + 2 t + r becomes 4 t + 2 b + r: a thread's accumulators are then its operand, and nothing moves.
    """
    if c.leaf:
        p = tl.permute(tl.reshape(p, [c.rows, c.tokens // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
        return tl.reshape(p, [c.rows, c.tokens])
    else:
        return p


@triton.jit
def tile_pages(first, begin, end, table, c: tl.constexpr, masked: tl.constexpr):
    """Page ids (int64, 0 for what is no page) and whether they are pages: scalars with `c.one_page`, else [tokens].

    table: where a sequence's ids begin, and how many pages there are. Of a masked tile, only the ids of tokens in
    [begin, end) are read.
    """
    ids, num_pages = table
    if c.one_page:
        page = tl.load(ids + first // c.page_size)
    else:
        token = first + tl.arange(0, c.tokens)
        if masked:
            page = tl.load(ids + token // c.page_size, mask=(token >= begin) & (token < end), other=-1)
        else:
            page = tl.load(ids + token // c.page_size)
    live = (page >= 0) & (page < num_pages)
    return tl.where(live, page, 0).to(tl.int64), live


@triton.jit
def page_slot(first, c: tl.constexpr):
    """Slot in its page of the first token of a tile on one page, so written that the compiler sees its alignment."""
    return first // c.tokens % (c.page_size // c.tokens) * c.tokens


@triton.jit
def typed(pool, c: tl.constexpr):
    """A pool of bytes as one of FP8, if the device has it: then a tile goes from memory to the tensor core as it is."""
    if c.fp8_casts and c.kv == "fp8_e4m3":
        return pool.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    else:
        return pool


@triton.jit
def kept(x, mask, c: tl.constexpr):
    """Stored elements where `mask`, else 0; whatever they hold."""
    if c.fp8_casts and c.kv == "fp8_e4m3":
        return tl.where(mask, x.to(tl.uint8, bitcast=True), 0).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        return tl.where(mask, x, 0)


@triton.jit
def load_keys(first, begin, end, page, live, head, memory, c: tl.constexpr, masked: tl.constexpr):
    """K of a tile: stored elements [tokens, dim padded]; 0 where nothing may be read."""
    side = memory.k, memory.k_offset, memory.k_page, memory.k_head, memory.k_slot
    return _load_rows(first, begin, end, page, live, head, side, c.dim, c.dim_padded, c, masked)


@triton.jit
def load_values(first, begin, end, page, live, head, memory, c: tl.constexpr, masked: tl.constexpr):
    """V of a tile in the order of `in_value_order`: stored elements [tokens, dim_v padded].

    0 where nothing may be read, so that no NaN there meets a P of 0.
    """
    if c.leaf:
        token = token_of_column(tl.arange(0, c.tokens))
        d = tl.arange(0, c.dim_v_padded)[:, None]
        # Bytes past the end are dropped after a load of whole rows: a mask along a row would load byte by byte.
        at = typed(memory.v, c) + (memory.v_offset + page * memory.v_page + head * memory.v_head + page_slot(first, c))
        at = at + (d * memory.v_slot + tl.arange(0, c.tokens)[None, :])
        there = live
        if c.dim_v != c.dim_v_padded:
            there = there & (d < c.dim_v)
        v = tl.load(at, mask=there, other=0.0 if c.fp8_casts and c.kv == "fp8_e4m3" else 0)
        if masked:
            v = kept(v, ((first + token >= begin) & (first + token < end))[None, :], c)
        return tl.trans(v)
    else:
        side = memory.v, memory.v_offset, memory.v_page, memory.v_head, memory.v_slot
        return _load_rows(first, begin, end, page, live, head, side, c.dim_v, c.dim_v_padded, c, masked)


@triton.jit
def _load_rows(
    first,
    begin,
    end,
    page,
    live,
    head,
    side,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    c: tl.constexpr,
    masked: tl.constexpr,
):
    """Stored elements [tokens, DIM_PADDED] of a tile; side: pool, offset, and strides of page, head and slot."""
    pool, offset, page_step, head_step, slot_step = side
    token = tl.arange(0, c.tokens)
    d = tl.arange(0, DIM_PADDED)[None, :]
    if c.one_page:
        at = offset + page * page_step + head * head_step + page_slot(first, c) * slot_step
        at = typed(pool, c) + at + ((token.to(tl.int64) * slot_step)[:, None] + d)
        there = live
        if masked:
            there = (live & (first + token >= begin) & (first + token < end))[:, None]
    else:
        slot = ((first + token) % c.page_size).to(tl.int64)
        at = typed(pool, c) + offset + head * head_step
        at = at + ((page * page_step + slot * slot_step)[:, None] + d)
        there = live[:, None]
    if DIM != DIM_PADDED:
        there = there & (d < DIM)
    return tl.load(at, mask=there, other=0.0 if c.fp8_casts and c.kv == "fp8_e4m3" else 0)


@triton.jit
def token_scales(scale, strides, first, begin, end, page, live, head, c: tl.constexpr):
    """token_head scales of a tile, fp32 [tokens]; 0 where nothing may be read."""
    token = first + tl.arange(0, c.tokens)
    at = page * strides[0] + head * strides[1] + (token % c.page_size) * strides[2]
    return tl.load(scale + at, mask=live & (token >= begin) & (token < end), other=0.0)


@triton.jit
def head_scale(scale, strides, head, c: tl.constexpr):
    """The scale of a KV head where it is one number for a whole call, else 1."""
    if scale is None or c.scales == "token_head":
        return 1.0
    elif c.scales == "head":
        return tl.load(scale + head * strides[0])
    else:
        return tl.load(scale)


@triton.jit
def load_query(row, q_head, there, query, c: tl.constexpr):
    """Query rows as an operand [rows, dim padded] and what its products have to be multiplied by, fp32 [rows].

    row: int64 [rows]; q_head: [rows]; there: which of them to read. An e4m3 operand is scaled to its row's maximum; a
    16-bit query becomes fp16 times the power of two that puts the row's maximum at 2^14 to 2^15: it cannot overflow.
    """
    d = tl.arange(0, c.dim_padded)[None, :]
    at = query.q + ((row * query.q_row + q_head.to(tl.int64) * query.q_head)[:, None] + d)
    x = tl.load(at, mask=there[:, None] & (d < c.dim), other=0)
    if c.query == "fp8_e4m3":
        factor = tl.full([c.rows], 1.0, tl.float32)
        if query.scale is not None:
            factor = tl.load(query.scale + q_head * query.scale_head, mask=there, other=1.0)
        if c.dot_k == "fp8":
            return x.to(tl.float8e4nv, bitcast=True), factor
        else:
            return x.to(tl.float8e4nv, bitcast=True).to(tl.float16) if c.fp8_casts else e4m3_to_fp16(x), factor
    elif c.dot_k == "bf16":
        return to_operand(x.to(tl.float32), "bf16", c), tl.full([c.rows], 1.0, tl.float32)
    else:
        x = x.to(tl.float32)
        peak = tl.max(tl.abs(x), 1)
        if c.dot_k == "fp8":
            peak = tl.maximum(peak, 1e-30)
            return to_fp8(x * (1.0 / peak * FP8_MAX)[:, None], c), peak / FP8_MAX
        else:
            exponent = tl.maximum((peak.to(tl.uint32, bitcast=True) >> 23).to(tl.int32), 30)
            up = ((268 - exponent) << 23).to(tl.float32, bitcast=True)  # 2^14 over the power of two below the peak
            down = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
            return (x * up[:, None]).to(tl.float16), down


@triton.jit
def store_out(out, value, row, q_head, there, output, c: tl.constexpr):
    """Write rows of fp32 `value` [rows, dim_v padded] in the output's dtype, an e4m3 one divided by its scale."""
    d = tl.arange(0, c.dim_v_padded)[None, :]
    at = (row * output.out_row + q_head.to(tl.int64) * output.out_head)[:, None] + d.to(tl.int64) * output.out_dim
    at = out + at
    if c.out == "fp8_e4m3":
        if output.scale is not None:
            value = tl.div_rn(value, tl.full(value.shape, tl.load(output.scale), tl.float32))
        value = fp32_to_e4m3(value)
    elif c.out == "bfloat16":
        value = fp32_to_bf16(value, c)
    elif c.out == "float16":
        value = value.to(tl.float16)
    tl.store(at, value, mask=there[:, None] & (d < c.dim_v))


@triton.jit
def store_lse(lse, row, q_head, there, output):
    """Write rows of fp32 `lse` [rows] where the call wants them."""
    if output.lse is not None:
        at = output.lse + row * output.lse_row + q_head.to(tl.int64) * output.lse_head
        tl.store(at, lse, mask=there)


@triton.jit
def finish(total, peak, q_head, there, output, c: tl.constexpr):
    """What accumulators relative to 2^peak are divided by, and the lse; total = sum 2^(score - peak), and sinks join.

    A row that saw nothing (total 0) gets infinity, so that its output is 0, and lse -inf.
    """
    sees = total > 0
    if output.sinks is not None:
        sink = tl.load(output.sinks + q_head * output.sink_head, mask=there, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(peak, sink)
        lse = top + tl.log2(total * tl.exp2(peak - top) + tl.exp2(sink - top))
        total = total + tl.exp2(sink - peak)
    else:
        lse = peak + tl.log2(total)
    return tl.where(sees, total, float("inf")), tl.where(sees, lse * LN2, float("-inf"))
