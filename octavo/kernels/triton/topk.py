"""topk_indices: the k largest logits of each row as indices in order, in one launch or two, without a sort.

A row is read about once. A threshold that leaves somewhat more than k candidates is estimated from a spread sample of
the row; all who are above it are listed in order of index, several programs to a row; then one program a row, with the
candidates in registers, narrows down to the k-th largest exactly and lists what is chosen. What it makes explicit:

* The estimate decides the time, never the result. Where it left fewer than k candidates or more than there is room for,
  the same program narrows over the row itself; so do ties in their thousands.
* Order. fp32 is compared as integers whose order is that of the numbers (-0 equals 0, NaN is below -inf and is never
  chosen). Places of chosen elements are prefix sums over the index, so ties go to the lower index and repeats agree.
* Rows that fit in registers are not sampled, and where a row is that short, or rows are many, there is one launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

from ...device import Device
from ._plan import device_of
from ._select import (
    INFINITE,
    LOWEST,
    NOTHING,
    bits_set,
    float32,
    guess_between,
    key_of,
    middle,
    narrow,
    number_of,
    plan,
)

STAGES = tl.constexpr(3)  # chunks in flight
LIST_REGISTERS = 64  # of a thread: what four programs an SM may have
BLOCK = tl.constexpr(8)  # neighbours that a sample takes together: a sector of memory


def topk_indices(logits: torch.Tensor, lens: torch.Tensor, out: torch.Tensor) -> None:
    """logits [R, N] fp32 or bf16, lens int32 [R] -> out int32 [R, k], as octavo.reference.topk defines it."""
    if not logits.shape[0]:
        return
    for kernel, programs, arguments in launches(logits, lens, out, device_of(logits.device)):
        kernel[(programs,)](**arguments)


def launches(
    logits: torch.Tensor, lens: torch.Tensor, out: torch.Tensor, device: Device
) -> list[tuple[Any, int, dict[str, Any]]]:
    """Kernel, programs and arguments of each launch."""
    logits = logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()
    rows, width = logits.shape
    c, programs = plan(rows, width, out.shape[1], device)
    shared = {
        "logits": logits,
        "row_stride": logits.stride(0),
        "lens": lens,
        "lens_stride": lens.stride(0),
        "rows": rows,
        "width": width,
        "c": c,
    }
    result = {"out": out, "out_strides": out.stride(), "num_warps": c.num_warps}
    if not c.slices:
        return [(short_kernel, rows, {**shared, **result})]
    keys, indices = torch.empty((2, programs * c.slices, c.listed), dtype=torch.int32, device=logits.device)
    words = torch.empty((programs * c.slices, c.chunks * c.chunk // 32), dtype=torch.int32, device=logits.device)
    counts = torch.empty((programs, c.slices + 1), dtype=torch.int32, device=logits.device)
    shared |= {"lists": (keys, indices, words), "counts": counts}
    if c.slices == 1:
        return [(whole_kernel, programs, {**shared, **result})]
    return [
        (list_kernel, rows * c.slices, {**shared, "num_warps": c.list_warps, "maxnreg": LIST_REGISTERS}),
        (choose_kernel, rows, {**shared, **result}),
    ]


@triton.jit
def _row(index, logits, row_stride, lens, lens_stride, width):
    """Start and length of row `index`."""
    length = tl.load(lens + tl.cast(index, tl.int64) * lens_stride)
    return logits + tl.cast(index, tl.int64) * row_stride, tl.minimum(tl.maximum(length, 0), width)


@triton.jit
def _elements(row, at, length):
    """Elements `at` of a row as fp32; NaN from `length` on."""
    return float32(tl.load(row + at, mask=at < length, other=float("nan")))


@triton.jit
def _whole(begin, end, size: tl.constexpr):
    """Whole chunks of `size` in [begin, end): read without a mask, which would make loads of single elements."""
    return tl.maximum(end - begin, 0) // size


@triton.jit
def _estimate(row, length, c: tl.constexpr):
    """A number (fp32) that somewhat more than k of the row's elements should be above; length > c.room.

    Blocks are taken from equal parts of the row, at a place in each that looks random. Of the sample, the share k /
    length and 3.5 of its standard deviations are to be above.
    """
    i = tl.arange(0, c.sample)
    part = i // BLOCK
    size = length // (c.sample // BLOCK)  # at least BLOCK, as room is at least twice the sample
    begin = (part.to(tl.int64) * length // (c.sample // BLOCK)).to(tl.int32)
    jitter = ((part * 40503) & 0xFFFF) * ((size - BLOCK) // BLOCK + 1) >> 16
    key = key_of(_elements(row, begin + jitter * BLOCK + i % BLOCK, length))
    share = c.sample * (c.k / length.to(tl.float32))
    least = (share + 3.5 * tl.sqrt(share) + 2).to(tl.int32)
    everything = tl.cast(c.sample, tl.int32)
    pivot, _, _ = narrow(key, tl.min(key, 0), tl.max(key, 0) + 1, everything, everything * 0, least, least + least // 8)
    return number_of(tl.maximum(pivot, LOWEST))


@triton.jit
def _fetch(row, begin, length, c: tl.constexpr):
    """Have a slice on its way to the L2 cache while the threshold is estimated."""
    LINE: tl.constexpr = 1024 // row.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    if not c.interpreted:
        for part in range(0, c.chunks):
            at = begin + part * c.chunk + tl.arange(0, c.chunk // LINE) * LINE
            address = (row + tl.minimum(at, length - 1)).to(tl.int64)
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1
            )


@triton.jit
def _list(row, length, begin, threshold, to, c: tl.constexpr):
    """List the elements above `threshold` of the slice from `begin` on, by key and by index; their number.

    Few are: comparisons become words of 32 bits, and only words are counted, summed and taken apart.
    """
    end = tl.minimum(length, begin + c.chunks * c.chunk)
    at = tl.arange(0, c.chunk // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]
    whole = _whole(begin, end, c.chunk)
    for part in tl.range(0, whole, num_stages=STAGES):
        x = float32(tl.load(row + begin + part * c.chunk + at))
        _mark(x, threshold, to[2] + part * (c.chunk // 32), c)
    first = begin + whole * c.chunk
    if first < end:
        _mark(_elements(row, first + at, end), threshold, to[2] + whole * (c.chunk // 32), c)
    tl.debug_barrier()  # words are read by other threads than wrote them
    words = tl.cdiv(tl.maximum(end - begin, 0), c.chunk) * (c.chunk // 32)
    found = begin * 0
    for part in range(0, words, c.words):
        found = _take_apart(row, begin, part, words, found, to, c)
    return found


@triton.jit
def _mark(x, threshold, words, c: tl.constexpr):
    """Store which elements of x [words, 32] are above `threshold`."""
    bit = tl.full([1], 1, tl.int32) << tl.arange(0, 32)
    tl.store(words + tl.arange(0, c.chunk // 32), tl.sum(tl.where(x > threshold, bit[None, :], 0), 1))


@triton.jit
def _take_apart(row, begin, part, words, found, to, c: tl.constexpr):
    """List the elements of words [part, + c.words) of a slice after `found` others; how many there are then."""
    w = part + tl.arange(0, c.words)
    word = tl.load(to[2] + w, mask=w < words, other=0).to(tl.uint32, bitcast=True)
    size = bits_set(word)
    place = found + tl.cumsum(size, 0) - size
    for _ in range(0, tl.max(size, 0)):
        rest = word & (word - tl.minimum(word, 1))  # without its lowest bit
        at = begin + w * 32 + bits_set((word ^ rest) - tl.minimum(word, 1))
        listed = (word != 0) & (place < c.listed)
        value = float32(tl.load(row + at, mask=listed, other=0.0))
        tl.store(to[0] + place, key_of(value), mask=listed)
        tl.store(to[1] + place, at, mask=listed)
        word = rest
        place += 1
    return found + tl.sum(size, 0)


@triton.jit
def _choose(key, index, there, low, out, out_strides, c: tl.constexpr):
    """Write the k largest of `there` keys in order of index, and -1 where there are fewer; low: a key below none."""
    high = tl.max(key, 0) + 1
    low, count, above = narrow(key, tl.minimum(low, high - 1), high, there, there * 0, c.k, c.k)
    room = tl.where(count <= c.k, c.k, c.k - above)
    last = tl.where(there <= c.k, NOTHING + 1, low)
    _write(key, index, last, room, 0, 0, out, out_strides, c)
    _pad(there, out, out_strides, c)


@triton.jit
def _write(key, index, last, room, taken, equal, out, out_strides, c: tl.constexpr):
    """Write the indices of keys above `last`, and of those equal to it the first `room`; taken and equal: of both,
    what was before these. Returns both, these included.
    """
    over = key > last
    same = key == last
    counted = tl.cumsum(over.to(tl.int32) + (same.to(tl.int32) << 16), 0)
    overs = taken + (counted & 0xFFFF)
    sames = equal + (counted >> 16)
    chosen = over | (same & (sames <= room))
    place = overs + tl.minimum(sames, room) - 1
    tl.store(out + place.to(tl.int64) * out_strides[1], index, mask=chosen & (place < c.k))
    return taken + tl.sum(over.to(tl.int32), 0), equal + tl.sum(same.to(tl.int32), 0)


@triton.jit
def _pad(there, out, out_strides, c: tl.constexpr):
    """-1 to the places that `there` numbers leave."""
    place = tl.arange(0, c.k_padded)
    tl.store(out + place.to(tl.int64) * out_strides[1], place * 0 - 1, mask=(place >= there) & (place < c.k))


@triton.jit
def _count(row, length, one, two, c: tl.constexpr):
    """Elements of a whole row whose keys are at least `one`, and at least `two`."""
    ones = tl.full([c.searched], 0, tl.int32)
    twos = tl.full([c.searched], 0, tl.int32)
    whole = _whole(0, length, c.searched)
    for part in tl.range(0, whole, num_stages=STAGES):
        key = key_of(float32(tl.load(row + part * c.searched + tl.arange(0, c.searched))))
        ones += (key >= one).to(tl.int32)
        twos += (key >= two).to(tl.int32)
    key = key_of(_elements(row, whole * c.searched + tl.arange(0, c.searched), length))
    ones += (key >= one).to(tl.int32)
    twos += (key >= two).to(tl.int32)
    return tl.sum(ones, 0), tl.sum(twos, 0)


@triton.jit
def _search(row, length, threshold, out, out_strides, c: tl.constexpr):
    """The k largest of a row that no list holds: narrow over the row, from the estimate; then list what is chosen."""
    least = tl.cast(NOTHING + 1, tl.int32)
    guess = key_of(threshold)
    there, count = _count(row, length, least, guess, c)
    low = least
    high = tl.cast(INFINITE + 1, tl.int32)
    above = tl.cast(0, tl.int32)
    if count >= c.k:
        low = guess
        _, more = _count(row, length, guess, guess + 1, c)
        if more < c.k:  # ties at the estimate: the usual way to come here
            high = guess + 1
            above = more
    else:
        high = guess
        above = count
        count = there
    while ((high - low).to(tl.uint32, bitcast=True) > 1) & (count > c.k):
        one = guess_between(low, high, count, above, c.k)
        two = middle(low, high)
        pivot = tl.minimum(one, two)
        pivot_2 = tl.maximum(one, two)
        found, found_2 = _count(row, length, pivot, pivot_2, c)
        if found_2 >= c.k:
            low = pivot_2
            count = found_2
        elif found >= c.k:
            low = pivot
            count = found
            if pivot_2 > pivot:
                high = pivot_2
                above = found_2
        else:
            high = pivot
            above = found
    room = tl.where(count <= c.k, c.k, c.k - above)
    last = tl.where(there <= c.k, least, low)
    taken = 0
    equal = 0
    for begin in tl.range(0, length, c.searched, num_stages=STAGES):
        at = begin + tl.arange(0, c.searched)
        key = key_of(_elements(row, at, length))
        taken, equal = _write(key, at, last, room, taken, equal, out, out_strides, c)
    _pad(there, out, out_strides, c)


@triton.jit
def _choose_listed(SIZE: tl.constexpr, total, low, lists, counts, out, out_strides, c: tl.constexpr):
    """`_choose` of the `total` candidates, at most SIZE, in a row's lists; low: a key below none."""
    j = tl.arange(0, SIZE)
    at = j
    end = total * 0
    SLICES: tl.constexpr = c.slices
    for part in tl.static_range(SLICES):
        count = tl.load(counts + part)
        end += count
        at += tl.where(j >= end, c.listed - count, 0)
    key = tl.load(lists[0] + at, mask=j < total, other=NOTHING)
    index = tl.load(lists[1] + at, mask=j < total, other=0)
    _choose(key, index, total, low, out, out_strides, c)


@triton.jit
def _finish(row, length, lists, counts, out, out_strides, c: tl.constexpr):
    """Choose from a row's lists, or from the row where they do not hold what is needed."""
    total = length * 0
    longest = length * 0
    SLICES: tl.constexpr = c.slices
    for part in tl.static_range(SLICES):
        count = tl.load(counts + part)
        total += count
        longest = tl.maximum(longest, count)
    threshold = tl.load(counts + c.slices).to(tl.float32, bitcast=True)
    if (total >= c.k) & (total <= c.room) & (longest <= c.listed):
        low = key_of(threshold)
        if total <= c.room // 2:
            _choose_listed(c.room // 2, total, low, lists, counts, out, out_strides, c)
        else:
            _choose_listed(c.room, total, low, lists, counts, out, out_strides, c)
    else:
        _search(row, length, threshold, out, out_strides, c)


@triton.jit
def _choose_short(row, length, out, out_strides, c: tl.constexpr):
    """`_choose` of a row of at most c.room elements."""
    j = tl.arange(0, c.room)
    key = key_of(_elements(row, j, length))
    there = tl.sum((key > NOTHING).to(tl.int32), 0)
    low = tl.min(tl.where(key > NOTHING, key, INFINITE), 0)
    _choose(key, j, there, low, out, out_strides, c)


@triton.jit(do_not_specialize=["rows", "width"])
def list_kernel(logits, row_stride, lens, lens_stride, rows, width, lists, counts, c: tl.constexpr):
    """Grid rows x slices: list the candidates of a slice of a row."""
    index = tl.program_id(0) // c.slices
    part = tl.program_id(0) % c.slices
    row, length = _row(index, logits, row_stride, lens, lens_stride, width)
    if length > c.room:
        begin = part * (c.chunks * c.chunk)
        _fetch(row, begin, length, c)
        threshold = _estimate(row, length, c)
        start = tl.program_id(0).to(tl.int64) * c.listed
        words = lists[2] + tl.program_id(0).to(tl.int64) * (c.chunks * c.chunk // 32)
        to = (lists[0] + start, lists[1] + start, words)
        found = _list(row, length, begin, threshold, to, c)
        at = counts + tl.cast(index, tl.int64) * (c.slices + 1)
        tl.store(at + part, found)
        if part == 0:
            tl.store(at + c.slices, threshold.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["rows", "width"])
def choose_kernel(logits, row_stride, lens, lens_stride, rows, width, lists, counts, out, out_strides, c: tl.constexpr):
    """Grid rows: choose from what list_kernel left, or from a short row itself."""
    index = tl.program_id(0)
    row, length = _row(index, logits, row_stride, lens, lens_stride, width)
    to = out + tl.cast(index, tl.int64) * out_strides[0]
    if length <= c.room:
        _choose_short(row, length, to, out_strides, c)
    else:
        at = tl.cast(index, tl.int64) * c.slices
        own = (lists[0] + at * c.listed, lists[1] + at * c.listed)
        _finish(row, length, own, counts + at + index, to, out_strides, c)


@triton.jit(do_not_specialize=["rows", "width"])
def short_kernel(logits, row_stride, lens, lens_stride, rows, width, out, out_strides, c: tl.constexpr):
    """Grid rows, each of which registers hold."""
    index = tl.program_id(0)
    row, length = _row(index, logits, row_stride, lens, lens_stride, width)
    _choose_short(row, length, out + tl.cast(index, tl.int64) * out_strides[0], out_strides, c)


@triton.jit(do_not_specialize=["rows", "width"])
def whole_kernel(logits, row_stride, lens, lens_stride, rows, width, lists, counts, out, out_strides, c: tl.constexpr):
    """Each program every row of one residue: list and choose in turn, in a list of its own."""
    program = tl.program_id(0)
    start = program.to(tl.int64) * c.listed
    mine = (lists[0] + start, lists[1] + start, lists[2] + program.to(tl.int64) * (c.chunks * c.chunk // 32))
    count = counts + 2 * program.to(tl.int64)
    for index in range(program, rows, tl.num_programs(0)):
        row, length = _row(index, logits, row_stride, lens, lens_stride, width)
        to = out + tl.cast(index, tl.int64) * out_strides[0]
        if length <= c.room:
            _choose_short(row, length, to, out_strides, c)
        else:
            threshold = _estimate(row, length, c)
            found = _list(row, length, 0, threshold, mine, c)
            tl.store(count, found)
            tl.store(count + 1, threshold.to(tl.int32, bitcast=True))
            tl.debug_barrier()  # the list is read by other threads than wrote it
            _finish(row, length, mine, count, to, out_strides, c)
            tl.debug_barrier()  # and the next row's must not overtake that


def aot_cases(device: Device) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Launches to compile ahead of time: see octavo/testing/aot.py."""
    for rows, width, k, dtype in (
        (64, 131072, 2048, torch.float32),
        (1, 1 << 20, 2048, torch.bfloat16),
        (4096, 65536, 2048, torch.float32),
        (64, 4096, 2048, torch.float32),
    ):
        logits = torch.empty((rows, width), dtype=dtype, device="meta")
        lens = torch.empty(rows, dtype=torch.int32, device="meta")
        out = torch.empty((rows, k), dtype=torch.int32, device="meta")
        for kernel, _, arguments in launches(logits, lens, out, device):
            name = kernel.__name__.removesuffix("_kernel")
            arguments = {n: t.to("meta") if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
            yield f"{name} {k} of {rows} x {width} {dtype}", kernel, arguments
