"""What top-k's kernels share: how a row is cut, fp32 in the order of integers, and the search for a threshold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import triton
import triton.language as tl

from ...device import Device
from ..constants import CompileTime

NOTHING = tl.constexpr(-(2**31))  # the key of NaN and of what is not there, below that of -inf
LOWEST = tl.constexpr(-0x7F800001)  # the key of -inf
INFINITE = tl.constexpr(0x7F800000)  # the key of inf


@dataclass(frozen=True)
class Constants(CompileTime):
    """Compile-time constants: one `tl.constexpr` argument.

    Attributes:
        k: how many are chosen; k_padded: the power of two above.
        room: candidates of a row that registers hold; half of it is tried first.
        sample: elements of the estimate.
        slices: programs of a row that list candidates. chunk, chunks: elements that one looks at together, and how
            often. words: of 32 elements' bits, taken apart together, one a thread. listed: room of its list.
        searched: elements looked at together where the row itself is searched.
        num_warps, list_warps: Triton's launch option, of what chooses and of what lists.
        interpreted: Triton's interpreter runs the kernel.
    """

    k: int
    k_padded: int
    room: int
    sample: int
    slices: int
    chunk: int
    chunks: int
    words: int
    listed: int
    searched: int
    num_warps: int
    list_warps: int
    interpreted: bool


@lru_cache(maxsize=1024)
def plan(rows: int, width: int, k: int, device: Device) -> tuple[Constants, int]:
    """Constants, and the rows that lists are made for at a time; slices 0: registers hold any row."""
    padded = triton.next_power_of_2(k)
    room = max(8192, 2 * padded)
    short = Constants(
        k=k,
        k_padded=padded,
        room=room,
        sample=4096,
        slices=0,
        chunk=0,
        chunks=0,
        words=32 * 8,
        listed=0,
        searched=4096,
        num_warps=16,
        list_warps=8,
        interpreted=triton.knobs.runtime.interpret,
    )
    if width <= room:
        room = max(32, triton.next_power_of_2(width))
        return replace(short, room=room, num_warps=16 if room > 4096 else 8 if room > 1024 else 4), rows
    # Four programs an SM at once; when rows alone make as many, each program takes whole rows in turn.
    slices = min(16, 4 * device.num_sms // rows, width // 4096)
    if slices < 2:
        chunk = 2048
        whole = replace(
            short, slices=1, chunk=chunk, searched=2048, num_warps=8, chunks=triton.cdiv(width, chunk), listed=room
        )
        return whole, min(rows, device.num_sms)
    chunk = 4096
    chunks = triton.cdiv(width, slices * chunk)
    return replace(short, slices=slices, chunk=chunk, chunks=chunks, listed=room // 2), rows


@triton.jit
def float32(x):
    """x as fp32, exact; bf16 by its bits, since the interpreter's own conversion is not."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def mirrored(bits):
    """Bits of fp32 as an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def key_of(x):
    """fp32 as int32 of the same order; -0 as 0, NaN as NOTHING."""
    key = mirrored(x.to(tl.int32, bitcast=True))
    key = tl.where(x == 0, 0, key)
    return tl.where(x == x, key, NOTHING)


@triton.jit
def number_of(key):
    """The fp32 of a key; that of a key beyond those of the infinities is NaN."""
    return mirrored(key).to(tl.float32, bitcast=True)


@triton.jit
def middle(low, high):
    """The key half way between two, whose distance may exceed 31 bits."""
    return low + ((high - low).to(tl.uint32, bitcast=True) >> 1).to(tl.int32, bitcast=True)


@triton.jit
def guess_between(low, high, count, above, wanted):
    """A key between two, more than one apart, where the count should have fallen from `count` to `wanted`.

    In the tail of a distribution the logarithm of the count falls about evenly. Where that cannot be: the middle.
    """
    top = tl.log2(count.to(tl.float32))
    bottom = tl.log2(tl.maximum(above.to(tl.float32), 0.5))
    a = number_of(low)
    b = number_of(high)
    key = key_of(a + (b - a) * ((top - tl.log2(wanted * 1.0)) / tl.maximum(top - bottom, 1e-6)))
    return tl.where((key > low) & (key < high), key, middle(low, high))


@triton.jit
def narrow(key, low, high, count, above, least, most):
    """Narrow [low, high), keys, of which low has count(key >= low) = `count` >= least and high `above` < least.

    Ends at a count of at most `most`, or at neighbours: low is then the least-th largest. Returns low, its count and
    the count of high. Every other step halves the distance, so that 64 do whatever the numbers are.
    """
    step = 0
    while ((high - low).to(tl.uint32, bitcast=True) > 1) & (count > most):
        pivot = guess_between(low, high, count, above, (least + most) // 2) if step % 2 == 0 else middle(low, high)
        found = tl.sum((key >= pivot).to(tl.int32), 0)
        if found >= least:
            low = pivot
            count = found
        else:
            high = pivot
            above = found
        step += 1
    return low, count, above


@triton.jit
def bits_set(word):
    """How many bits of each uint32 are set, int32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return ((word + (word >> 16)) & 0x3F).to(tl.int32)
