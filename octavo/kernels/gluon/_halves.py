"""Softmax on pairs of fp16 scores: a register holds two neighbouring columns, an instruction computes both.

Tensor cores add up FP8 products to fp16 as fast as to fp32. Half the registers of a tile of scores is what lets two of
them lie beside the output, and half the instructions what lets the softmax run under the products. An fp16 score is off
by 2^-12 of itself, 2^8 times less than an e4m3 query makes it anyway.

A tensor of pairs is int32 [rows, columns / 2]: columns 2 i and 2 i + 1 in the low and the high half.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def pack_halves(x):
    """fp16 [M, N] -> pairs [M, N / 2]: a renaming of registers."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    words = gl.inline_asm_elementwise(
        "mov.b32 $0, $2; mov.b32 $1, $2;", "=r,=r,r", [x], dtype=gl.int32, is_pure=True, pack=2
    )
    word, _ = gl.split(gl.reshape(words, [M, N // 2, 2]))
    return word


@gluon.jit
def pack_singles(x):
    """fp32 [M, N] -> pairs [M, N / 2], rounded to fp16."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    low, high = gl.split(gl.reshape(x, [M, N // 2, 2]))
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def twice(x):
    """fp32 x, which fp16 holds, as a pair of it with itself."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 h; cvt.rn.f16.f32 h, $1; mov.b32 $0, {h, h}; }",
        "=r,f",
        [x],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def round_half(x, UP: gl.constexpr):
    """fp32 x rounded to fp16, to the nearest or upwards, as fp32."""
    if UP:
        return gl.inline_asm_elementwise(
            "{ .reg .b16 h; cvt.rp.f16.f32 h, $1; cvt.f32.f16 $0, h; }",
            "=f,f",
            [x],
            dtype=gl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return x.to(gl.float16).to(gl.float32)


@gluon.jit
def larger(a, b):
    """The larger of each half."""
    return gl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def added(a, b):
    """The sum of each half."""
    return gl.inline_asm_elementwise("add.rn.f16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def fold_columns(x, combine: gl.constexpr):
    """Pairs [M, C] -> [M, 4]: the columns that one thread owns of a row, combined two by two."""
    M: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    if C == 4:
        return x
    else:
        a, b = gl.split(gl.permute(gl.reshape(x, [M, 2, C // 2]), (0, 2, 1)))
        return fold_columns(combine(a, b), combine)


@gluon.jit
def row_max(x):
    """Maximum over the columns of pairs [M, C], fp32 [M]."""
    top = gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; mov.b32 {l, h}, $1; max.f16 l, l, h; cvt.f32.f16 $0, l; }",
        "=f,r",
        [fold_columns(x, larger)],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )
    return gl.max(top, axis=1)


@gluon.jit
def lane_sum(x):
    """Sums over the columns of pairs [M, C] that one thread owns, fp32 [M, 4]."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 l, h; .reg .f32 a, b; mov.b32 {l, h}, $1; cvt.f32.f16 a, l; cvt.f32.f16 b, h; add.f32 $0, a, b; }",
        "=f,r",
        [fold_columns(x, added)],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def mask_pairs(x, first, limit, low, WINDOW: gl.constexpr):
    """-inf where column `first` (of the low half; the high half is one on) is not below `limit`, or is below `low`."""
    if WINDOW:
        return gl.inline_asm_elementwise(
            """
            {
            .reg .pred p, q;
            .reg .b16 l, h;
            .reg .b32 t;
            mov.b32 {l, h}, $1;
            add.s32 t, $2, 1;
            setp.lt.s32 p, $2, $3;
            setp.ge.and.s32 p, $2, $4, p;
            setp.lt.s32 q, t, $3;
            setp.ge.and.s32 q, t, $4, q;
            selp.b16 l, l, 0xFC00, p;
            selp.b16 h, h, 0xFC00, q;
            mov.b32 $0, {l, h};
            }
            """,
            "=r,r,r,r,r",
            [x, first, limit, low],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        return gl.inline_asm_elementwise(
            """
            {
            .reg .pred p, q;
            .reg .b16 l, h;
            .reg .b32 t;
            mov.b32 {l, h}, $1;
            add.s32 t, $2, 1;
            setp.lt.s32 p, $2, $3;
            setp.lt.s32 q, t, $3;
            selp.b16 l, l, 0xFC00, p;
            selp.b16 h, h, 0xFC00, q;
            mov.b32 $0, {l, h};
            }
            """,
            "=r,r,r,r",
            [x, first, limit],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )


@gluon.jit
def cap_pairs(x, factor, cap):
    """cap tanh(factor x) of each half."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b16 l, h;
        .reg .f32 a, b;
        mov.b32 {l, h}, $1;
        cvt.f32.f16 a, l;
        cvt.f32.f16 b, h;
        mul.f32 a, a, $2;
        mul.f32 b, b, $2;
        tanh.approx.f32 a, a;
        tanh.approx.f32 b, b;
        mul.f32 a, a, $3;
        mul.f32 b, b, $3;
        cvt.rn.f16x2.f32 $0, b, a;
        }
        """,
        "=r,r,f,f",
        [x, factor, cap],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def scale_pairs(x, factor, offset):
    """x factor + offset of each half, rounded once."""
    _, factor = gl.broadcast(x, factor)
    _, offset = gl.broadcast(x, offset)
    return gl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, factor, offset], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def tempered(top, now, whole, reference, EXACT: gl.constexpr):
    """What scores are multiplied by, and the reference, fp32 [M], of rows of which `top` is a new maximum.

    now, whole: what they are multiplied by so far, and what by rights. Where the reference is to move to a maximum
    beyond 8000, the factor becomes smaller, so that it is 7900. fp16 holds such a reference to within 4, a larger one
    to within 8 and more, by which every P would be too small. What is lost nobody knows: fp16 scores as large are off
    by 2^-9 of themselves and of the maximum, which is 16 at the border and grows as fast as what is made of it shrinks.
    Exact scores are fp32, and off by the 14 digits of tensor cores: 2^22 is the border, up to which a score less its
    maximum is off by less than 1.

    A maximum below the reference changes nothing, however far it is: its scores weigh nothing. Where a row has seen
    nothing but such scores, one that is nearer gives the factor back, and what was added up before weighs nothing.
    """
    MOST: gl.constexpr = 4194304.0 if EXACT else 8000.0
    LESS: gl.constexpr = 2097152.0 if EXACT else 7900.0
    NOTHING: gl.constexpr = -6291456.0 if EXACT else -32768.0  # a reference below it is no score's
    seen = gl.where(reference < NOTHING, -float("inf"), reference)
    score = top * now  # not above `seen` where all is masked
    size = gl.abs(score)
    fit = gl.minimum(LESS / gl.abs(top), whole)
    if not EXACT:
        fit = round_half(fit, False)
    fit = gl.where((score > seen) & ((size > MOST) | (size < 0.5 * LESS)), fit, now)
    seen = seen * (fit / now)
    if not EXACT:
        seen = round_half(seen, True)
    return fit, gl.where(fit != now, seen, reference)


# 2^x by the special-function unit, its halves put together by hand: for ex2.approx.f16x2 ptxas does that for each use.
# And by multiply-add units: x = n + f, a parabola for 2^f (off by 2^-9), n added to the exponent. x is at least -15, of
# which the bits become 0 (or, in the high half, 2^-24: the sum of the low one carries where n is negative).
_BY_UNIT = """
mov.b32 {{low, high}}, {x};
ex2.approx.f16 low, low;
ex2.approx.f16 high, high;
cvt.u32.u16 t, low;
cvt.u32.u16 r, high;
prmt.b32 {out}, t, r, 0x5410;
"""
_BY_PARABOLA = """
max.f16x2 x, {x}, least;
add.rn.f16x2 t, x, magic;
sub.rn.f16x2 r, t, magic;
sub.rn.f16x2 x, x, r;
fma.rn.f16x2 r, x, c2, c1;
fma.rn.f16x2 r, r, x, c0;
and.b32 t, t, 0x003F003F;
shl.b32 t, t, 10;
add.s32 {out}, t, r;
"""
_CONSTANTS = """
.reg .b16 low, high;
.reg .b32 x, t, r, least, magic, c0, c1, c2;
mov.b32 least, 0xCB80CB80;
mov.b32 magic, 0x66006600;
mov.b32 c0, 0x3C003C00;
mov.b32 c1, 0x39A139A1;
mov.b32 c2, 0x33A133A1;
"""


@gluon.constexpr_function
def exp2_asm(parabolas):
    """2^x of four pairs, `parabolas` of them by multiply-adds."""
    text = "{" + _CONSTANTS
    for i in range(4):
        step = _BY_PARABOLA if i >= 4 - parabolas else _BY_UNIT
        text += step.format(out=f"${i}", x=f"${4 + i}")
    return text + "}"


@gluon.jit
def exp2_pairs(x, PARABOLAS: gl.constexpr):
    """2^x of each half, PARABOLAS of four pairs without the special-function unit."""
    return gl.inline_asm_elementwise(
        exp2_asm(PARABOLAS), "=&r,=&r,=&r,=&r,r,r,r,r", [x], dtype=gl.int32, is_pure=True, pack=4
    )


@gluon.jit
def to_operand(x, layout: gl.constexpr):
    """Pairs [M, N / 2] of P -> e4m3 [M, N], the A operand over tokens in the order of V's rows: no data moves."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = 2 * x.shape[1]
    first, second = gl.split(gl.permute(gl.reshape(x, [M, N // 16, 2, 4]), (0, 1, 3, 2)))  # tokens t, t + 8
    words = gl.inline_asm_elementwise(
        """
        {
        .reg .b16 a, b;
        cvt.rn.satfinite.e4m3x2.f16x2 a, $1;
        cvt.rn.satfinite.e4m3x2.f16x2 b, $2;
        mov.b32 $0, {a, b};
        }
        """,
        "=r,r,r",
        [first, second],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    words = gl.join(words, words)  # a word stands for each of its four elements
    words = gl.reshape(gl.join(words, words), [M, N])
    words = gl.convert_layout(words, layout, assert_trivial=True)
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [words], dtype=gl.float8e4nv, is_pure=True, pack=4
    )


@gluon.jit
def split_pairs(x):
    """Pairs as hi + lo, of which e4m3 holds the first exactly and the second to its 4 digits (from 2^-6 up)."""
    hi = gl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, u;
        mov.b32 u, 0x58085808;
        mul.rn.f16x2 t, $1, u;
        sub.rn.f16x2 u, t, $1;
        sub.rn.f16x2 $0, t, u;
        }
        """,
        "=r,r",
        [x],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    lo = gl.inline_asm_elementwise("sub.rn.f16x2 $0, $1, $2;", "=r,r,r", [x, hi], dtype=gl.int32, is_pure=True, pack=1)
    return hi, lo
