"""What top-k's kernels share: how a row is cut, fp32 in the order of integers, and the estimate of a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import triton
import triton.language as tl

from ...device import Device
from ..constants import CompileTime
from ._plan import INTERPRETED
from ._tiles import float32
from .append import DEPENDENT_LAUNCH

NOTHING = tl.constexpr(-(2**31))  # the key of NaN and of what is not there, below that of -inf
INFINITE = tl.constexpr(0x7F800000)  # the key of inf
HUGE = tl.constexpr(1e38)  # beyond it numbers are not told apart by bins
BLOCK = tl.constexpr(8)  # neighbours that a sample takes together: a sector of memory
# Where ptxas needs 64 registers a thread, two programs of 16 warps an SM; for others it spills, or takes more.
TWO_PROGRAMS = ("sm_80", "sm_86", "sm_89", "sm_90")
QUANTILES = tl.constexpr(256)  # bins that a sample is counted in
DEVIATIONS = tl.constexpr(3.5)  # of a sample's share, between it and what is estimated


@dataclass(frozen=True)
class Constants(CompileTime):
    """Compile-time constants: one `tl.constexpr` argument.

    Attributes:
        k: how many are chosen; k_padded: the power of two above.
        size: candidates of a row, or elements of a short one, that registers hold.
        sample: elements of the estimate.
        bins: what candidates are counted in, to find the k-th; times size at most 2^26, as `_bin_of_few` packs them.
        slices: programs of a row that list candidates. lanes: threads of one, each of 32 elements at a time; parts: how
            often. listed: room of its list.
        searched: elements looked at together where a row is searched.
        num_warps: Triton's launch option, of what lists and chooses.
        registers: of a thread of what lists; 0: as many as the compiler likes.
        dependent_launch: listing starts to read while the estimate runs.
        interpreted: Triton's interpreter runs the kernel.
    """

    k: int
    k_padded: int
    size: int
    sample: int
    bins: int
    lanes: int
    searched: int
    num_warps: int
    interpreted: bool
    slices: int = 0
    parts: int = 0
    listed: int = 0
    registers: int = 0
    dependent_launch: bool = False


@lru_cache(maxsize=1024)
def plan(rows: int, width: int, k: int, device: Device) -> tuple[Constants, int]:
    """Constants, and the rows that there is scratch for at a time; slices 0: registers hold any row."""
    room = max(8192, 2 * triton.next_power_of_2(k))
    if width <= room:
        size = max(64, triton.next_power_of_2(width))
        warps = 16 if size > 2048 else 8 if size > 1024 else 4
        return _constants(k, size, min(1024, size), warps, min(2048, size)), min(rows, 64 // warps * device.num_sms)
    registers = 64 if device.arch in TWO_PROGRAMS else 0

    def programs(warps: int) -> int:
        """Those that run at once."""
        return (32 // warps if registers else 1) * device.num_sms

    sample, size, warps = registers_for(width, k)
    if programs(warps) < 2 * rows:  # these take whole rows, and search what exceeds registers
        sample, size, warps = registers_for(width, k, spare=5)
    warps = warps if registers else 16
    part = 32 * 32 * warps
    slices = max(1, min(16, programs(warps) // rows, triton.cdiv(width, part)))
    parts = triton.cdiv(width, slices * part)
    slices = triton.cdiv(width, parts * part)
    c = _constants(k, size, sample, warps, 4096)
    c = replace(
        c,
        slices=slices,
        parts=parts,
        listed=min(room // 2, parts * part) if slices > 1 else room,
        registers=0 if c.interpreted else registers,
        dependent_launch=device.arch in DEPENDENT_LAUNCH and not c.interpreted,
    )
    # When rows alone make as many programs as run at once, each takes whole rows in turn.
    return c, rows if slices > 1 else min(rows, programs(warps))


def _constants(k: int, size: int, sample: int, warps: int, bins: int) -> Constants:
    return Constants(
        k=k,
        k_padded=triton.next_power_of_2(k),
        size=size,
        sample=sample,
        bins=bins,
        lanes=32 * warps,
        searched=128 * warps,
        num_warps=warps,
        interpreted=INTERPRETED,
    )


def registers_for(width: int, k: int, spare: int = 3) -> tuple[int, int, int]:
    """Sample, candidates in registers, and warps that hold them, 8 a thread, for rows of `width`.

    The fewest that hold what the estimate leaves and `spare` standard deviations of that. It leaves its share of the
    sample with its own deviations; half a bin, since it ends on a bin's edge, some 1/28 of that in a normal
    distribution; and 1.5 places in each of up to 16 lists, whose ends are multiples of four. With three deviations 2 or
    3 of 1,000 random rows exceed registers at the most, and are compacted.
    """
    for sample, size, warps in ((4096, 4096, 16), (8192, 4096, 16), (8192, 8192, 32), (16384, 8192, 32)):
        share = sample * k / width
        least = (share + DEVIATIONS.value * math.sqrt(share) + 2) * (1 + 1 / 28)
        if k * (least / share) * (1 + spare / math.sqrt(least)) + 24 <= size:
            return sample, size, warps
    return 16384, max(8192, min(16384, 2 * triton.next_power_of_2(k))), 32


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
def bits_set(word):
    """How many bits of each uint32 are set, int32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return ((word + (word >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def row_of(index, logits, row_stride, lens, lens_stride, width):
    """Start and length of row `index`, int64."""
    length = tl.load(lens + index * lens_stride)
    return logits + index * row_stride, tl.minimum(tl.maximum(length, 0), width)


@triton.jit
def elements(row, at, length):
    """Elements `at` of a row as fp32; NaN from `length` on."""
    return float32(tl.load(row + at, mask=at < length, other=float("nan")))


@triton.jit
def sum_and_max(x, y, c: tl.constexpr):
    """The sum of one and the largest of another, in one reduction."""
    if c.interpreted:
        return tl.sum(x, 0), tl.max(y, 0)
    else:
        return tl.reduce((x, y), 0, _sum_and_max)


@triton.jit
def _sum_and_max(a, b, p, q):
    return a + p, tl.maximum(b, q)


@triton.jit
def _sum_max_min(x, y, z, c: tl.constexpr):
    if c.interpreted:
        return tl.sum(x, 0), tl.max(y, 0), tl.min(z, 0)
    else:
        return tl.reduce((x, y, z), 0, _sum_max_and_min)


@triton.jit
def _sum_max_and_min(a, b, d, p, q, r):
    return a + p, tl.maximum(b, q), tl.minimum(d, r)


@triton.jit
def _min_and_max(x, y, c: tl.constexpr):
    if c.interpreted:
        return tl.min(x, 0), tl.max(y, 0)
    else:
        return tl.reduce((x, y), 0, _minimum_and_maximum)


@triton.jit
def _minimum_and_maximum(a, b, p, q):
    return tl.minimum(a, p), tl.maximum(b, q)


@triton.jit
def estimate(row, length, c: tl.constexpr):
    """Of a row a number (fp32) that somewhat more than k should be above, and bins in a unit above it.

    Of a row of at most k the number is -inf: lists hold it entirely.
    """
    low = float("-inf")
    scale = 0.0
    if length > c.k:
        low, scale = _bounds(_sample(row, length, c), length, c)
    return low, scale


@triton.jit
def _sample(row, length, c: tl.constexpr):
    """Elements of a row, in blocks from equal parts of it at a place in each that looks random; NaN as -inf."""
    i = tl.arange(0, c.sample)
    part = i // BLOCK
    size = length // (c.sample // BLOCK)
    begin = (part.to(tl.int64) * length // (c.sample // BLOCK)).to(tl.int32)
    jitter = ((part * 40503) & 0xFFFF) * (tl.maximum(size - BLOCK, 0) // BLOCK + 1) >> 16
    x = elements(row, begin + jitter * BLOCK + i % BLOCK, length)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def estimate_short(row, length, c: tl.constexpr):
    """`estimate` of a row that is at hand: single elements are as near as blocks."""
    i = tl.arange(0, c.sample)
    x = elements(row, ((i.to(tl.int64) * length) // c.sample).to(tl.int32), length)
    return _bounds(tl.where(x == x, x, float("-inf")), length, c)


@triton.jit
def _bounds(x, length, c: tl.constexpr):
    """Of a sample x: a number that somewhat more than k of the row should be above, and the bins in a unit between it
    and one that somewhat fewer should be above.

    The sample's share k / length and 3.5 of its standard deviations more, or less, are to be above. Where a bin of the
    sample holds too many for that, it is divided in turn.
    """
    share = c.sample * (c.k / length.to(tl.float32))
    spread = DEVIATIONS * tl.sqrt(share) + 2
    least = (share + spread).to(tl.int32)
    fewest = tl.maximum(share - spread, 1.0).to(tl.int32)
    low, high = _min_and_max(tl.where(x > -HUGE, x, HUGE), x, c)
    high = tl.minimum(high, HUGE)
    low = tl.minimum(low, high)
    ceiling = high
    above = length * 0
    passes = length * 0
    while (high > low) & (passes < 4):
        unit = (high - low) * (1 / QUANTILES)
        # Of an infinite or minute unit bins make no sense, but they are bins.
        bin = tl.minimum(tl.maximum((high - x) * (1 / unit), 0.0), QUANTILES - 1).to(tl.int32)
        counted = tl.histogram(bin, QUANTILES, mask=(x >= low) & ((x <= high) | (passes == 0)))
        count = above + tl.cumsum(counted, 0)
        before = (count < least).to(tl.int32) + ((count < fewest).to(tl.int32) << 16)
        under = tl.where(count < least, count, above)
        enough = tl.where(count < least, 1 << 30, count)
        places, under, enough = _sum_max_min(before, under, enough, c)
        ceiling = tl.where(above < fewest, high - (places >> 16) * unit, ceiling)
        bottom = tl.maximum(high - ((places & 0xFFFF) + 1) * unit, low)
        top = high - (places & 0xFFFF) * unit
        passes = tl.where((enough <= least + least // 8) | (bottom >= high), 4, passes + 1)
        low = bottom
        high = tl.where(passes < 4, top, high)
        above = under
    return low, tl.minimum(c.bins / tl.maximum(ceiling - low, 1e-30), 1e30)


@triton.jit
def bin_of(x, low, scale, c: tl.constexpr):
    """Which bin x >= low is in, as fp32 with a fraction; the last holds all above."""
    return tl.minimum((x - low) * scale, c.bins - 1.0)
