"""PTX arithmetic, conversions, comparisons, moves between registers and between lanes."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from .ptx_context import (
    LANES,
    SIZES,
    UNSIGNED,
    Context,
    Effect,
    Mask,
    e4m3_to_float,
    float_to_bf16,
    float_to_e4m3,
    type_of,
)
from .ptx_machine import TENSOR_MAP, Warp

FLOATS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "max": np.fmax,
    "min": np.fmin,
    "abs": np.abs,
    "neg": np.negative,
    "rcp": np.reciprocal,
    "fma": lambda a, b, c: a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64),
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
}
INTEGERS: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": lambda a, b, c: a * b + c,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "neg": np.negative,
    "div": lambda a, b: np.trunc(a / b),
    "shl": lambda a, b: np.where(b < 8 * a.itemsize, a << np.minimum(b, 63).astype(a.dtype), 0),
    "shr": lambda a, b: a >> np.minimum(b, 8 * a.itemsize - 1).astype(a.dtype),
}


def high_product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The upper 32 of the 64 bits of a product."""
    return a.astype(np.int64) * b.astype(np.int64) >> 32


def arithmetic(c: Context) -> Effect:
    """add ... of every type."""
    op, part = c.parts[0], c.type
    if part in ("f32", "f16x2", "f16"):
        reads, function = [c.values(x, part) for x in c.operands[1:]], FLOATS[op]
        store = c.write(c.operands[0], part)
        return lambda w, mask: store(w, function(*(read(w) for read in reads)), mask)
    wide = "wide" in c.parts
    reads = [c.values(x, part) for x in c.operands[1:]]
    if op in ("shl", "shr"):
        reads[1] = c.read(c.operands[2], np.uint32)
    out = {"16": "32", "32": "64"}[part[1:]] if wide else part[1:]
    store = c.write(c.operands[0], "pred" if part == "pred" else "u" + out)
    if wide:
        signed = part[0] == "s"
        grown = [lambda w, read=read: read(w).astype(np.int64 if signed else np.uint64) for read in reads[:2]]
        if len(reads) == 3:
            last = c.read(c.operands[3], np.uint64)
            grown.append(lambda w: last(w).view(np.int64 if signed else np.uint64))
        reads = grown
    function = INTEGERS[op]
    if "hi" in c.parts:
        assert op == "mul" and part[1:] == "32", c.name
        function = high_product
    relu = "relu" in c.parts

    def effect(w: Warp, mask: Mask) -> None:
        result = function(*(read(w) for read in reads))
        store(w, np.maximum(result, 0) if relu else result, mask)

    return effect


def compare(c: Context) -> Effect:
    """setp, joined with another predicate or not."""
    part = c.type
    test = {
        "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal,
        "ne": np.not_equal, "neu": np.not_equal,
        "ltu": lambda a, b: ~(a >= b), "gtu": lambda a, b: ~(a <= b),
        "nan": lambda a, b: np.isnan(a) | np.isnan(b), "leu": lambda a, b: ~(a > b), "geu": lambda a, b: ~(a < b),
    }[c.parts[1]]  # fmt: skip
    a, b = (c.values(x, part) for x in c.operands[1:3])
    store = c.write(c.operands[0], "pred")
    joined = {"and": np.logical_and, "or": np.logical_or}.get(c.parts[2])
    if joined is None:
        return lambda w, mask: store(w, test(a(w), b(w)), mask)
    other = c.read(c.operands[3], bool)
    return lambda w, mask: store(w, joined(test(a(w), b(w)), other(w)), mask)


def select(c: Context) -> Effect:
    a, b, p = (
        c.read(c.operands[1], type_of(c.type)),
        c.read(c.operands[2], type_of(c.type)),
        c.read(c.operands[3], bool),
    )
    store = c.write(c.operands[0], "b" + re.sub(r"\D", "", c.type))
    return lambda w, mask: store(w, np.where(p(w), a(w), b(w)), mask)


def extract_bits(c: Context) -> Effect:
    """bfe."""
    a, at, count = (c.read(x, np.uint32) for x in c.operands[1:])
    store, signed = c.write(c.operands[0], "u32"), c.type[0] == "s"

    def effect(w: Warp, mask: Mask) -> None:
        up, down = np.uint32(32) - at(w) - count(w), np.uint32(32) - count(w)
        shifted = a(w) << up
        store(w, shifted.view(np.int32) >> down.view(np.int32) if signed else shifted >> down, mask)

    return effect


def funnel_shift(c: Context) -> Effect:
    """shf.l.wrap: the upper word of (b, a) shifted left."""
    assert tuple(c.parts[1:3]) == ("l", "wrap"), c.name
    a, b, by = (c.read(x, np.uint32) for x in c.operands[1:])
    store = c.write(c.operands[0], "u32")

    def effect(w: Warp, mask: Mask) -> None:
        both = b(w).astype(np.uint64) << np.uint64(32) | a(w).astype(np.uint64)
        store(w, ((both << (by(w).astype(np.uint64) & np.uint64(31))) >> np.uint64(32)).astype(np.uint32), mask)

    return effect


def permute_bytes(c: Context) -> Effect:
    """prmt."""
    a, b, selector = (c.read(x, np.uint32) for x in c.operands[1:])
    store = c.write(c.operands[0], "b32")

    def effect(w: Warp, mask: Mask) -> None:
        source = np.concatenate([np.ascontiguousarray(x(w)).view(np.uint8).reshape(32, 4) for x in (a, b)], 1)
        chosen = np.stack([source[LANES, selector(w) >> np.uint32(4 * i) & np.uint32(7)] for i in range(4)], 1)
        store(w, np.ascontiguousarray(chosen).view(np.uint32).reshape(32), mask)

    return effect


def convert(c: Context) -> Effect:
    """cvt."""
    to, source = c.parts[-2], c.parts[-1]
    if to == "e4m3x2":
        store = c.write(c.operands[0], "b16")
        if source == "f32":
            pair = [c.floats(c.operands[2]), c.floats(c.operands[1])]
        else:
            both = c.halves(c.operands[1])
            pair = [lambda w: both(w)[:, 0], lambda w: both(w)[:, 1]]
        return lambda w, mask: store(
            w, sum(float_to_e4m3(x(w)).astype(np.uint16) << 8 * i for i, x in enumerate(pair)), mask
        )
    if source == "e4m3x2":
        get, store = c.read(c.operands[1], np.uint16), c.write(c.operands[0], "f16x2")
        return lambda w, mask: store(w, e4m3_to_float(get(w).view(np.uint8).reshape(32, 2)), mask)
    if to in ("f16x2", "bf16x2"):
        high, low = c.floats(c.operands[1]), c.floats(c.operands[2])
        store = c.write(c.operands[0], "f16x2" if to == "f16x2" else "b32")
        if to == "f16x2":
            return lambda w, mask: store(w, np.stack([low(w), high(w)], 1), mask)
        return lambda w, mask: store(w, float_to_bf16(low(w)) | float_to_bf16(high(w)).astype(np.uint32) << 16, mask)
    if source == "bf16":
        get, store = c.read(c.operands[1], np.uint16), c.write(c.operands[0], "b32")
        return lambda w, mask: store(w, get(w).astype(np.uint32) << 16, mask)
    if to == "bf16":
        get, store = c.floats(c.operands[1]), c.write(c.operands[0], "b16")
        return lambda w, mask: store(w, float_to_bf16(get(w)), mask)
    get, store = c.values(c.operands[1], source), c.write(c.operands[0], to)
    if to == "f16" and "rp" in c.parts:
        return lambda w, mask: store(w, rounded_up(get(w)), mask)
    return lambda w, mask: store(w, get(w), mask)


def rounded_up(x: np.ndarray) -> np.ndarray:
    half = x.astype(np.float16)
    return np.where(half.astype(np.float32) < x, np.nextafter(half, np.float16(np.inf)), half)


def move(c: Context) -> Effect:
    """mov: registers, halves of registers, addresses of parameters."""
    target, source = c.operands
    if isinstance(target, list):
        size = SIZES[c.type[1:]] // 2
        half, whole = UNSIGNED[size], UNSIGNED[2 * size]
        get, parts = c.read(source, whole), [c.write(x, f"b{8 * size}") for x in target]

        def split(w: Warp, mask: Mask) -> None:
            for i, part in enumerate(parts):
                part(w, (get(w) >> whole(8 * size * i)).astype(half), mask)

        return split
    if isinstance(source, list):
        size = SIZES[c.type[1:]] // 2
        low, high = (c.read(x, UNSIGNED[size]) for x in source)
        store, kind = c.write(target, c.type), UNSIGNED[2 * size]
        return lambda w, mask: store(w, low(w).astype(kind) | high(w).astype(kind) << kind(8 * size), mask)
    parameter = re.match(r".*_param_(\d+)$", source)
    get = c.read(str(TENSOR_MAP + int(parameter[1])) if parameter else source, type_of(c.type))
    store = c.write(target, "pred" if c.type == "pred" else "b" + c.type[1:])
    return lambda w, mask: store(w, get(w), mask)


def shuffle(c: Context) -> Effect:
    """shfl of whole warps: by index, across (bfly) or from lanes below (up), where the lowest keep their own."""
    get, lane = c.read(c.operands[1], np.uint32), c.read(c.operands[2], np.uint32)
    store = c.write(c.operands[0].split("|")[0], "b32")
    source = {
        "idx": lambda w: lane(w) & 31,
        "bfly": lambda w: (LANES ^ lane(w)) & 31,
        "up": lambda w: np.where(lane(w) <= LANES, LANES - lane(w), LANES) & 31,
    }[c.parts[2]]
    return lambda w, mask: store(w, get(w)[source(w)], mask)


def vote(c: Context) -> Effect:
    get = c.read(c.operands[1], bool)
    if "ballot" in c.parts:
        store = c.write(c.operands[0], "b32")
        return lambda w, mask: store(
            w, np.full(32, int((get(w).astype(np.uint64) << LANES.astype(np.uint64)).sum())), mask
        )
    store, whole = c.write(c.operands[0], "pred"), np.any if "any" in c.parts else np.all
    return lambda w, mask: store(w, np.full(32, whole(get(w))), mask)


def reduce_lanes(c: Context) -> Effect:
    """redux."""
    get, store = c.values(c.operands[1], "s32"), c.write(c.operands[0], "u32")
    function = {"add": np.sum, "max": np.max, "min": np.min}[c.parts[2]]
    return lambda w, mask: store(w, np.full(32, function(get(w))), mask)


def count_bits(c: Context) -> Effect:
    get, store = c.read(c.operands[1], np.uint32), c.write(c.operands[0], "u32")
    return lambda w, mask: store(w, np.array([int(x).bit_count() for x in get(w)]), mask)


def elect(c: Context) -> Effect:
    store = c.write(c.operands[0].split("|")[1], "pred")
    return lambda w, mask: store(w, LANES == 0, mask)
