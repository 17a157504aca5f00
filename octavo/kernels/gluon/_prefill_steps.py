"""What a consumer of prefill does with a block of keys: scores, softmax, and the two products around them.

fast: scores are fp16 pairs (`_halves`), and P is e4m3 relative to the running maximum. exact: scores are fp32, and P is
hi + lo relative to its own block's maximum, so that a sink costs no digits.

Every block's P V has a fresh accumulator and is added up in fp32. Tensor cores keep about 14 digits of a sum of FP8
products and cut the rest off: in one accumulator for all blocks, a channel of one sign loses a part that grows with the
context, and at last stops growing. So it is in fast with head_dim 256, for want of registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from . import _halves as half
from . import _pipeline as pipe
from ._prefill_tiles import LENGTH, MISSING, ROWS, SEQUENCE, get
from ._results import LOG2E

P_BITS, SLACK = gl.constexpr(6.0), gl.constexpr(2.5)  # P is in [0, 2^8.5], and e4m3 ends at 448 = 2^8.8
EXACT_BITS, EXACT_SLACK = gl.constexpr(8.0), gl.constexpr(16.0)  # P is in [0, 2^8]
LEAST = gl.constexpr(-8388608.0)  # of a maximum, in exact: fp32 holds scores of -2^23 to within 1/2, lower ones worse
LOWEST = gl.constexpr(-60000.0)  # a reference that no score is below, in fp16
MOST_FACTOR = gl.constexpr(65504.0)  # of a score, in fp16
MOST_SCORE = gl.constexpr(57344.0)  # of a row: fp16 ends at 65504, and a rounded query may be 1/16 more
PARABOLAS = gl.constexpr(2)  # of four pairs of P, those that spare the special-function unit


# ---- rings and rows


@gluon.jit
def wait_full(bars, step, c: gl.constexpr):
    """Wait for the block of a ring."""
    mbarrier.wait(bars.index(step & (c.stages - 1)), (step >> c.stage_bits) & 1)


@gluon.jit
def free(bars, step, c: gl.constexpr):
    """This consumer has read number `step`: the keys of that block, and the values of the one before."""
    mbarrier.arrive(bars.index(step & (c.stages - 1)), count=1)


@gluon.jit
def operand_of(tiles, step, c: gl.constexpr):
    """The block of a ring as the B operand."""
    return tiles.index(step & (c.stages - 1)).permute((1, 0))


@gluon.jit
def as_column(x, layout: gl.constexpr):
    """x [rows] as [rows, 1] of `layout`."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, layout), assert_trivial=True), 1)


@gluon.jit
def as_rows(x, c: gl.constexpr):
    """x [rows] in the layout that the softmax keeps of rows."""
    return gl.convert_layout(x, gl.SliceLayout(1, pipe.accumulator_layout(c.block)), assert_trivial=True)


# ---- the query


@gluon.jit
def query_scales(head, scales, rows: gl.constexpr, c: gl.constexpr):
    """The caller's scales of a tile's rows."""
    q_head = head * c.pack + gl.arange(0, ROWS, layout=rows) % c.pack
    return gl.load(scales.query + q_head * scales.query_head)


@gluon.jit
def scale_of_large_keys(x, scale, head, factor, scales, rows: gl.constexpr, c: gl.constexpr):
    """The query's scale, larger where the factor would exceed what fp16 holds: before so large a scale of theirs keys
    are small, and so are products with them."""
    if factor > 1.0:
        of_rows = gl.full([ROWS], factor * LOG2E, gl.float32, rows)
        if scales.query is not None:
            of_rows *= query_scales(head, scales, rows, c)
        least = pipe.power_of_two_scale(448.0 * 0.5 * MOST_FACTOR / of_rows)
        scale = gl.minimum(gl.maximum(scale, least), pipe.power_of_two_scale(gl.max(gl.abs(x), axis=1)))
    return scale


@gluon.jit
def load_query(q_in, q_terms, factors, head, factor, scales, c: gl.constexpr):
    """The query tile as e4m3 in shared memory, and what turns a product of each row into a score in powers of two."""
    layout: gl.constexpr = gl.BlockedLayout([1, c.dim // 8], [4, 8], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    x = q_in.load(layout).to(gl.float32)
    if c.exact:
        if c.query_terms == 1:  # an e4m3 query is taken as it is
            scale = gl.full([ROWS], 1.0, gl.float32, rows)
            q_terms[0].store(x.to(gl.float8e4nv))
        else:
            scale = pipe.power_of_two_scale(gl.max(gl.abs(x), axis=1))
            x = x * gl.expand_dims(scale, 1)
            q_terms[0].store(x.to(gl.float8e4nv))
            q_terms[1].store((x - pipe.round_e4m3(x)).to(gl.float8e4nv))
    else:  # no product with keys, which are 448 at most, exceeds what fp16 holds
        scale = pipe.power_of_two_scale(gl.sum(gl.abs(x), axis=1) * (448.0 * 448.0 / MOST_SCORE))
        if c.careful:
            scale = scale_of_large_keys(x, scale, head, factor, scales, rows, c)
        q_terms[0].store((x * gl.expand_dims(scale, 1)).to(gl.float8e4nv))
    factor = factor / scale
    if scales.query is not None:
        factor *= query_scales(head, scales, rows, c)
    factor = factor * LOG2E if c.softcap is None else factor * (1.0 / c.softcap)
    factors.store(gl.maximum(factor, 1e-37))
    fence_async_shared()


@gluon.jit
def row_factors(factors, c: gl.constexpr):
    """Factors of rows; for the fast softmax as fp16 holds them."""
    factor = factors.load(gl.SliceLayout(1, pipe.accumulator_layout(c.block)))
    if c.softcap is not None or c.exact:
        return factor
    else:
        return gl.minimum(gl.maximum(half.round_half(factor, False), 2.0**-24), MOST_FACTOR)


@gluon.jit
def softmax_factor(factor, c: gl.constexpr):
    """What is left to multiply scores by once they are capped."""
    if c.softcap is None:
        return factor
    else:
        return factor * 0.0 + 1.0


# ---- scores


@gluon.jit
def start_scores(step, q_terms, k_tiles, c: gl.constexpr):
    """Start Q K^T of a block."""
    BLOCK: gl.constexpr = c.block
    layout: gl.constexpr = pipe.accumulator_layout(c.block)
    k = operand_of(k_tiles, step, c)
    if c.exact:
        s = warpgroup_mma(q_terms[0], k, gl.zeros([ROWS, BLOCK], gl.float32, layout), use_acc=False, is_async=True)
        if c.query_terms == 2:
            s = warpgroup_mma(q_terms[1], k, s, is_async=True)
        return s
    else:
        return warpgroup_mma(q_terms[0], k, gl.zeros([ROWS, BLOCK], gl.float16, layout), use_acc=False, is_async=True)


@gluon.jit
def scores_of(s, c: gl.constexpr):
    """Products as the softmax takes them."""
    if c.exact:
        return s
    else:
        return half.pack_halves(s)


@gluon.jit
def positions(column, tile, c: gl.constexpr):
    """Positions of tokens, far beyond any length on pages that are not in the pool."""
    batch, ints, count = tile[0], tile[1], tile[2]
    LOOK: gl.constexpr = c.careful and not c.exact  # MISSING is set; in exact a branch takes fewer registers
    if LOOK or get(ints, count, MISSING) > 0:
        table = batch.page_table + get(ints, count, SEQUENCE).to(gl.int64) * batch.table_row
        page = gl.load(table + column // c.page, mask=column < get(ints, count, LENGTH), other=-1)
        column = gl.where((page >= 0) & (page < batch.num_pages), column, 2**30)
    return column


@gluon.jit
def masked(s, block, limit, tile, c: gl.constexpr):
    """-inf where a row does not see a token: a select, since the score of a stale key may be NaN."""
    L: gl.constexpr = s.type.layout
    if c.exact:
        BLOCK: gl.constexpr = c.block
        column = positions(block * c.block + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, L)), tile, c)
        column, end = gl.broadcast(gl.expand_dims(column, 0), as_column(limit, L))
        # one assembly: of gl.where ptxas keeps 64 predicates in registers
        s = gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.lt.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }",
            "=f,f,r,r", [s, column, end], dtype=gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        if c.window > 0:
            s = gl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ge.s32 p, $2, $3; selp.f32 $0, $1, 0fFF800000, p; }",
                "=f,f,r,r", [s, column, end - c.window], dtype=gl.float32, is_pure=True, pack=1,
            )  # fmt: skip
        return s
    else:
        PAIRS: gl.constexpr = c.block // 2
        column = positions(block * c.block + 2 * gl.arange(0, PAIRS, layout=gl.SliceLayout(0, L)), tile, c)
        column, end = gl.broadcast(gl.expand_dims(column, 0), as_column(limit, L))
        return half.mask_pairs(s, column, end, end - c.window, c.window > 0)


@gluon.jit
def capped(s, factor, c: gl.constexpr):
    """Scores softcap tanh(factor s) in powers of two."""
    L: gl.constexpr = s.type.layout
    if c.exact:
        # tanh(x) = 1 - 2 / (1 + exp(2 x)): exact at both ends
        e = gl.exp2(s * as_column(factor * (2.0 * LOG2E), L))
        return (c.softcap * LOG2E) * (1.0 - 2.0 / (1.0 + e))
    else:
        _, f = gl.broadcast(s, as_column(factor, L))
        _, cap = gl.broadcast(s, as_column(factor * 0.0 + c.softcap * LOG2E, L))
        return half.cap_pairs(s, f, cap)


# ---- softmax


@gluon.jit
def exponents_fast(s, reference, factor, tile, c: gl.constexpr):
    """Exponents of P in pairs, s factor - reference; the reference before and now, and the factor.

    The reference is what P's maximum was less P_BITS, in fp16. It moves only where P would exceed 2^(P_BITS + SLACK),
    which e4m3 holds: few blocks then rescale the output. Of capped scores the factor is 1.
    """
    top = as_rows(half.row_max(s), c)
    if c.careful:
        factor, reference = half.tempered(top, factor, row_factors(tile[3], c), reference, False)
    of_scores = softmax_factor(factor, c)
    new = half.round_half(top * of_scores - P_BITS, True)
    new = gl.where(new > reference + SLACK, new, reference)
    L: gl.constexpr = s.type.layout
    x = half.scale_pairs(s, as_column(half.twice(of_scores), L), as_column(half.twice(-new), L))
    return x, reference, new, factor


@gluon.jit
def lost_rows(reference, factor, limit, begin, end, c: gl.constexpr):
    """Rows of which tokens of [begin, end) were not added up as they should have been, for want of `tempered`.

    That cuts the softmax in two and costs 6 % of a long call and 20 % of a short one, so that tiles of such rows are
    computed again instead: their reference is beyond what fp16 (of exact scores, fp32) holds well enough, or below all
    that it can be, or fp16 does not hold their factor.
    """
    first = gl.maximum(begin, limit - c.window) if c.window > 0 else begin
    if c.exact:
        return gl.where(reference > LEAST, gl.abs(reference) > 4194304.0, gl.minimum(limit, end) > first)
    else:
        far = gl.where(reference > LOWEST, gl.abs(reference) > 8192.0, gl.minimum(limit, end) > first)
        return far | (factor >= MOST_FACTOR)


@gluon.jit
def softmax_fast(x, old, new, weight, c: gl.constexpr):
    """P in pairs, what brings older sums to the new reference, and the sums of P."""
    keep = gl.exp2(old - new)
    p = half.exp2_pairs(x, PARABOLAS)
    W: gl.constexpr = weight.type.layout
    added = gl.convert_layout(half.lane_sum(p), W, assert_trivial=True)
    return p, keep, weight * as_column(keep, W) + added


@gluon.jit
def exponents_exact(s, reference, factor, tile, c: gl.constexpr):
    """Exponents of P, s factor less the block's own maximum plus EXACT_BITS; that maximum, the reference of sums before
    and now, and the factor.

    The reference is an earlier maximum, which none exceeds by more than EXACT_SLACK bits. Of capped scores the factor
    is 1. A maximum below LEAST is LEAST: a score less it would be off by so much that P left fp16, and what is as low
    weighs nothing, or its row is lost.
    """
    top = as_rows(gl.max(s, axis=1), c)
    if c.careful:
        factor, reference = half.tempered(top, factor, row_factors(tile[3], c), reference, True)
    of_scores = softmax_factor(factor, c)
    own = gl.maximum(top * of_scores, LEAST)
    new = gl.where(own > reference + EXACT_SLACK, own, reference)
    L: gl.constexpr = s.type.layout
    return s * as_column(of_scores, L) - as_column(own - EXACT_BITS, L), own, reference, new, factor


@gluon.jit
def softmax_exact(x, own, old, new, weight, c: gl.constexpr):
    """P in pairs; what brings older sums, and the product of this P, to the new reference; the sums of P."""
    BLOCK: gl.constexpr = c.block
    keep = gl.exp2(old - new)
    add = gl.exp2(own - new)
    p = gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)
    sums = gl.sum(gl.sum(gl.reshape(p, [ROWS, BLOCK // 8, 4, 2]), axis=3), axis=1)
    W: gl.constexpr = weight.type.layout
    sums = gl.convert_layout(sums, W, assert_trivial=True)
    return half.pack_singles(p), keep, add, weight * as_column(keep, W) + sums * as_column(add, W)


@gluon.jit
def added_up(o, keep, pv):
    """The output so far, brought to the new reference by keep [rows], and a block's product."""
    L: gl.constexpr = o.type.layout
    return o * as_column(keep, L) + pv


@gluon.constexpr_function
def rescale_asm(n):
    """n registers times their factors, unless all factors of the warp are 1: a thread has two rows, by turns of two."""
    text = "{ .reg .pred p;\n"
    text += f"setp.neu.f32 p, ${2 * n}, 0f3F800000;\nsetp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;\n"
    text += "vote.sync.any.pred p, p, 0xffffffff;\n"
    text += "".join(f"mov.f32 ${i}, ${n + i};\n" for i in range(n)) + "@!p bra SAME;\n"
    text += "".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};\n" for i in range(n))
    return text + "SAME:\n}"


@gluon.constexpr_function
def rescale_constraints(n):
    """Of `rescale_asm`."""
    return ",".join(["=&f"] * n + ["f"] * (2 * n))


@gluon.jit
def rescaled(o, keep):
    """The output o [rows, columns] times keep [rows], which few blocks change."""
    OUT: gl.constexpr = o.type.layout
    N: gl.constexpr = min(o.shape[1] // 2, 64)  # registers
    _, keep = gl.broadcast(o, as_column(keep, OUT))
    return gl.inline_asm_elementwise(
        rescale_asm(N), rescale_constraints(N), [o, keep], dtype=gl.float32, is_pure=True, pack=N
    )


# ---- blocks


@gluon.jit
def add_products(p8, o, keep, following, step, v_tiles, c: gl.constexpr):
    """The output with a block's P V, piece by piece, and the next scores, whose product is in flight."""
    if not c.fresh:
        one = warpgroup_mma(p8, operand_of(v_tiles, step, c), rescaled(o[0], keep), is_async=True)
        one, following = warpgroup_mma_wait(0, deps=[one, following])
        return (one,), scores_of(following, c)
    PIECES: gl.constexpr = c.pieces
    PIECE: gl.constexpr = c.piece
    OUT: gl.constexpr = pipe.accumulator_layout(c.piece)
    v = v_tiles.index(step & (c.stages - 1))
    out = ()
    for i in gl.static_range(PIECES):
        columns = v.slice(i * PIECE, PIECE, dim=0).permute((1, 0))
        pv = warpgroup_mma(p8, columns, gl.zeros([ROWS, PIECE], gl.float32, OUT), use_acc=False, is_async=True)
        if i == 0:
            pv, following = warpgroup_mma_wait(0, deps=[pv, following])
        else:
            pv = warpgroup_mma_wait(0, deps=[pv])
        out = out + (added_up(o[i], keep, pv),)
    return out, scores_of(following, c)


@gluon.jit
def step_fast(block, step, q_terms, s, o, reference, weight, factor, limit, tile, k_tiles, v_tiles, bars,
              MASK: gl.constexpr, c: gl.constexpr):  # fmt: skip
    """A block alone: its softmax, then its P V together with the next block's Q K^T."""
    k_full, v_full, empty, v_landed = bars
    OUT: gl.constexpr = pipe.accumulator_layout(c.piece)
    if c.softcap is not None:
        s = capped(s, factor, c)
    if MASK:
        s = masked(s, block, limit, tile, c)
    x, old, new, factor = exponents_fast(s, reference, factor, tile, c)
    p, keep, weight = softmax_fast(x, old, new, weight, c)
    p8 = half.to_operand(p, gl.DotOperandLayout(0, OUT, 4))
    wait_full(v_full, step, c)
    wait_full(k_full, step + 1, c)
    following = start_scores(step + 1, q_terms, k_tiles, c)
    o, s = add_products(p8, o, keep, following, step, v_tiles, c)
    free(empty, step + 1, c)
    return s, o, new, weight, factor


@gluon.jit
def blocks_fast(step, q_terms, s, o, reference, weight, factor, k_tiles, v_tiles, bars, c: gl.constexpr):
    """`unroll` blocks that every row sees whole: under each softmax the next block's Q K^T and the last one's P V."""
    k_full, v_full, empty, v_landed = bars
    DIM: gl.constexpr = c.dim
    OUT: gl.constexpr = pipe.accumulator_layout(c.piece)
    UNROLL: gl.constexpr = c.unroll
    pv, kept = o[0], reference  # of the block before, once there is one
    for u in gl.static_range(UNROLL):
        if c.softcap is not None:
            s = capped(s, factor, c)
        x, old, new, factor = exponents_fast(s, reference, factor, None, c)
        wait_full(k_full, step + u + 1, c)  # here: the registers of these scores are free for the next
        following = start_scores(step + u + 1, q_terms, k_tiles, c)
        p, keep, weight = softmax_fast(x, old, new, weight, c)
        reference = new
        wait_full(v_full, step + u, c)  # here: a border that keeps the softmax before the wait for P V
        if u > 0:
            pv = warpgroup_mma_wait(1, deps=[pv])
            free(empty, step + u, c)
            o = (added_up(o[0], kept, pv),)
        p8 = half.to_operand(p, gl.DotOperandLayout(0, OUT, 4))
        if u < UNROLL - 1:
            nothing = gl.zeros([ROWS, DIM], gl.float32, OUT)
            pv = warpgroup_mma(p8, operand_of(v_tiles, step + u, c), nothing, use_acc=False, is_async=True)
            kept = keep
            s = scores_of(warpgroup_mma_wait(1, deps=[following]), c)
        else:  # nothing may be in flight over the loop's end: ptxas would serialise all products
            o, s = add_products(p8, o, keep, following, step + u, v_tiles, c)
            free(empty, step + u + 1, c)
    return s, o, reference, weight, factor


@gluon.jit
def step_exact(block, step, q_terms, s, o, reference, weight, factor, limit, tile, k_tiles, v_tiles, bars,
               MASK: gl.constexpr, c: gl.constexpr):  # fmt: skip
    """A block: its softmax with the next block's Q K^T under it, then its P V, piece by piece of the output."""
    k_full, v_full, empty, v_landed = bars
    PIECES: gl.constexpr = c.pieces
    PIECE: gl.constexpr = c.piece
    OUT: gl.constexpr = pipe.accumulator_layout(c.piece)
    if c.softcap is not None:
        s = capped(s, factor, c)
    if MASK:
        s = masked(s, block, limit, tile, c)
    x, own, before, new, factor = exponents_exact(s, reference, factor, tile, c)
    wait_full(k_full, step + 1, c)  # here: the registers of these scores are free for the next
    following = start_scores(step + 1, q_terms, k_tiles, c)
    p, keep, add, weight = softmax_exact(x, own, before, new, weight, c)
    hi, lo = half.split_pairs(p)
    hi = half.to_operand(hi, gl.DotOperandLayout(0, OUT, 4))
    lo = half.to_operand(lo, gl.DotOperandLayout(0, OUT, 4))
    wait_full(v_full, step, c)
    v = v_tiles.index(step & (c.stages - 1))
    nothing = gl.zeros([ROWS, PIECE], gl.float32, OUT)
    out = ()
    for i in gl.static_range(PIECES):
        columns = v.slice(i * PIECE, PIECE, dim=0).permute((1, 0))
        pv = warpgroup_mma(hi, columns, nothing, use_acc=False, is_async=True)
        pv = warpgroup_mma(lo, columns, pv, is_async=True)
        old = rescaled(o[i], keep)
        if i == 0:
            pv, s = warpgroup_mma_wait(0, deps=[pv, following])
        else:
            pv = warpgroup_mma_wait(0, deps=[pv])
        out = out + (old + pv * as_column(add, OUT),)
    free(empty, step + 1, c)
    return s, out, new, weight, factor


@gluon.jit
def one_block(block, step, q_terms, s, o, reference, weight, factor, limit, tile, k_tiles, v_tiles, bars,
              MASK: gl.constexpr, c: gl.constexpr):  # fmt: skip
    """One block, of either precision. tile: batch and record, and where c.careful the memory of factors."""
    if c.exact:
        return step_exact(block, step, q_terms, s, o, reference, weight, factor, limit, tile,
                          k_tiles, v_tiles, bars, MASK, c)  # fmt: skip
    else:
        return step_fast(block, step, q_terms, s, o, reference, weight, factor, limit, tile,
                         k_tiles, v_tiles, bars, MASK, c)  # fmt: skip


@gluon.jit
def no_output(c: gl.constexpr):
    """The pieces of the output before its first block."""
    PIECE: gl.constexpr = c.piece
    zero = gl.zeros([ROWS, PIECE], gl.float32, pipe.accumulator_layout(c.piece))
    if c.pieces == 1:
        return (zero,)
    elif c.pieces == 2:
        return zero, zero
    else:
        return zero, zero, zero, zero
