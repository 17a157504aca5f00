"""What the Hopper kernels are built on: rings, register layouts, FP8 pairs, and the order of tokens in V's rows.

Explicit here: who owns which element. A product with an FP8 pair (hi, lo) in neighbouring columns leaves both in one
thread, so `add_pairs` is arithmetic in registers; everything after it lives in `pair_layout`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ._names import async_load, reinterpret

# ---- layouts of four warps; [M, N] is a wgmma accumulator, [M, N / 2] what its pairs are added to


@gluon.constexpr_function
def column_bits(columns):
    """Register bases that walk over `columns` columns in steps of four: a thread owns one column of every four."""
    return [4 << i for i in range((columns // 4).bit_length() - 1)]


@gluon.constexpr_function
def accumulator_layout(n):
    """[64 k, n]: a wgmma accumulator."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 32])


@gluon.constexpr_function
def rows_layout(columns, vector):
    """[rows, columns]: loads of whole rows, `vector` neighbouring elements to a thread."""
    wide = min(32, columns // vector)
    return gl.BlockedLayout([1, vector], [32 // wide, wide], [4, 1], [1, 0])


@gluon.constexpr_function
def pair_layout(rows, columns):
    """[rows, columns]: the accumulator [rows, 2 columns], thread by thread, once each pair of columns is one value."""
    registers = [[8, 0]] + [[0, c] for c in column_bits(columns)]
    registers += [[64 << i, 0] for i in range((rows // 64).bit_length() - 1)]
    return gl.DistributedLinearLayout(
        registers, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [rows, columns]
    )


@gluon.constexpr_function
def warps_layout(columns):
    """[4, columns]: a value of each warp, all four held by every thread that owns the column in pair_layout."""
    registers = [[1, 0], [2, 0]] + [[0, c] for c in column_bits(columns)]
    return gl.DistributedLinearLayout(
        registers, [[0, 1], [0, 2], [0, 0], [0, 0], [0, 0]], [[0, 0], [0, 0]], [], [4, columns]
    )


@gluon.constexpr_function
def folded_layout(columns):
    """[32, columns]: what is left of pair_layout's rows when a thread has added up those that it owns of a column."""
    registers = [[0, c] for c in column_bits(columns)]
    return gl.DistributedLinearLayout(
        registers, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[8, 0], [16, 0]], [], [32, columns]
    )


@gluon.constexpr_function
def leaf_words_layout(tokens, n, page):
    """[tokens / page n, page]: P^T in V's token order, four neighbouring slots (tokens t, t+1, t+8, t+9) to a thread.

    From pair_layout it is one exchange between lanes 4 apart: the parity of the column against that of the token.
    """

    def slot(token):  # token bits b3 b2 b1 b0 -> b2 b1 b3 b0
        return [token // page * n, token % page // 16 * 16 + {0: 0, 1: 1, 2: 4, 4: 8, 8: 2}[token % 16]]

    registers = [slot(1), slot(8)] + [[2 * c, 0] for c in column_bits(n // 2)]
    registers += [slot(64 << i) for i in range((tokens // 64).bit_length() - 1)]
    lanes = [[2, 0], [4, 0], [1, 0], slot(2), slot(4)]
    return gl.DistributedLinearLayout(registers, lanes, [slot(16), slot(32)], [], [tokens // page * n, page])


# ---- FP8 pairs


@gluon.jit
def round_e4m3(x):
    """fp32 x rounded to e4m3, as fp32.

    By a cast of its own, its operands in the other order than the cast that is stored: of one cast whose results are
    both packed for a store and widened again, Triton 3.6's ptxas (12.8) widens registers that it has not written yet.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 pair, first, second;
        .reg .b32 halves;
        cvt.rn.satfinite.e4m3x2.f32 pair, $2, $3;
        cvt.rn.f16x2.e4m3x2 halves, pair;
        mov.b32 {second, first}, halves;
        cvt.f32.f16 $0, first;
        cvt.f32.f16 $1, second;
        }
        """,
        "=f,=f,f,f",
        [x],
        dtype=gl.float32,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def split_fp8(x):
    """x = hi + lo / 16 in two e4m3 terms, 8 significant bits: bf16's precision."""
    return x.to(gl.float8e4nv), ((x - round_e4m3(x)) * 16.0).to(gl.float8e4nv)


@gluon.jit
def add_pairs(x):
    """hi + lo / 16 of neighbouring columns, [M, N] -> [M, N / 2]."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    hi, lo = gl.split(gl.reshape(x, [M, N // 2, 2]))
    return gl.convert_layout(lo * 0.0625 + hi, pair_layout(M, N // 2), assert_trivial=True)


@gluon.jit
def power_of_two_scale(amax):
    """The power of two that brings `amax` into (224, 448].

    A bf16 number times it is exactly hi + lo / 16, down to 2^-17 of amax.
    """
    scale = 448.0 / gl.maximum(amax, 1e-30)
    return (scale.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)


# ---- columns of pair_layout


@gluon.jit
def column_max(y, exchange):
    """Maximum over the rows of y [M, C], for every thread that owns the column; `exchange`: fp32 [4, C], shared memory.

    gl.max over the rows takes a barrier more: it writes, reduces, and writes again.
    """
    M: gl.constexpr = y.shape[0]
    C: gl.constexpr = y.shape[1]
    exchange.store(gl.max(gl.max(gl.reshape(y, [M // 64, 4, 16, C]), axis=0), axis=1))
    top = gl.max(exchange.load(warps_layout(C)), axis=0)
    return gl.convert_layout(top, gl.SliceLayout(0, pair_layout(M, C)), assert_trivial=True)


@gluon.jit
def fold_rows(p):
    """Rows of p [M, C] of one thread added up: [32, C] in folded_layout."""
    M: gl.constexpr = p.shape[0]
    C: gl.constexpr = p.shape[1]
    pairs = gl.sum(gl.reshape(p, [M // 64, 4, 2, 8, C]), axis=2)
    return gl.convert_layout(gl.reshape(gl.sum(pairs, axis=0), [32, C]), folded_layout(C), assert_trivial=True)


@gluon.jit
def as_row(x, layout: gl.constexpr):
    """x [C], by column of one of these layouts, as [1, C] of another."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(0, layout), assert_trivial=True), 0)


# ---- the leaf layout in shared memory


@gluon.jit
def store_leaf_pairs(p, p_smem, PAGE: gl.constexpr):
    """p [tokens, C] -> e4m3 pairs [2 C, PAGE] of each page in shared memory, in the token order of V's rows.

    p_smem: [tokens / PAGE, 2 C, PAGE], the B operand of V^T P^T.
    """
    T: gl.constexpr = p.shape[0]
    C: gl.constexpr = p.shape[1]
    hi, lo = split_fp8(p)
    x = gl.reshape(gl.join(hi, lo), [T // PAGE, PAGE // 16, 2, 4, 2, C, 2])  # page, 16s, b3, b2 b1, b0, column, term
    x = gl.reshape(gl.permute(x, (0, 5, 6, 1, 3, 2, 4)), [T // PAGE * 2 * C, PAGE])
    rows = reinterpret(p_smem, gl.float8e4nv, [T // PAGE * 2 * C, PAGE], p_smem.layout)
    rows.store(gl.convert_layout(x, leaf_words_layout(T, 2 * C, PAGE)))


@gluon.jit
def zero_dead_tokens(v_page, begin, end, DV: gl.constexpr, PAGE: gl.constexpr):
    """Zero the bytes of V^T [DV, PAGE] whose token of the page is outside [begin, end).

    Stale bytes may be NaN, and 0 x NaN is NaN. fence_async_shared is due before the tensor cores read it.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [512 // PAGE, PAGE // 16], [4, 1], [1, 0])
    words = reinterpret(v_page, gl.int32, [DV, PAGE // 4], gl.NVMMASharedLayout(PAGE, 32, 2))
    word = gl.arange(0, PAGE // 4, layout=gl.SliceLayout(0, layout))
    token = word // 4 * 16 + word % 4 * 2  # a word holds tokens t, t+1, t+8, t+9
    keep = gl.where((token >= begin) & (token < end), 0xFF, 0)
    keep |= gl.where((token + 1 >= begin) & (token + 1 < end), 0xFF00, 0)
    keep |= gl.where((token + 8 >= begin) & (token + 8 < end), 0xFF0000, 0)
    keep |= gl.where((token + 9 >= begin) & (token + 9 < end), -0x1000000, 0)
    words.store(words.load(layout) & gl.expand_dims(keep, 0))


# ---- rings: a stage is full once its bytes have landed, empty once the consumer arrives


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr = 1):
    """NUMBER barriers, each of whose phases ends with ARRIVALS arrivals.

    Make none that nobody uses, and end them by `drop_barriers` where the kernel goes on without them: Triton gives
    their memory to something else, which PTX allows behind mbarrier.inval alone. Where processes share a GPU, the bits
    of a barrier do come back over what was stored there.
    """
    bars = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit
def drop_barriers(bars):
    """End barriers, so that their memory may be used for something else."""
    NUMBER: gl.constexpr = bars.shape[0]
    for i in gl.static_range(NUMBER):
        mbarrier.invalidate(bars.index(i))


@gluon.jit
def make_ring(STAGES: gl.constexpr, CONSUMERS: gl.constexpr = 1):
    """The barriers (full, empty) of a ring that CONSUMERS read: a stage is empty once all have arrived."""
    return make_barriers(STAGES), make_barriers(STAGES, CONSUMERS)


@gluon.jit
def copy_page(desc, slots, page, head, bar, at, STEP: gl.constexpr, PANELS: gl.constexpr):
    """Start the copy of a page of one head of K or V^T into slot `at`: PANELS panels of 128 columns, STEP slots apart.

    The pages of a stage, panel by panel, make one tile of K. A page id outside the pool costs no traffic: TMA fills the
    slot with zeros.
    """
    for panel in gl.static_range(PANELS):
        slot = slots.index(at + panel * STEP)
        async_load(desc, [page, head, 0, panel * 128], bar, slot)
