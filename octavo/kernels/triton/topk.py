"""topk_indices: the k largest logits of each row as indices in order, in one launch or two, without a sort.

A row is read about once. A threshold that leaves somewhat more than k candidates is estimated from a spread sample of
the row; all who are above it are listed in order of index, several programs to a row, and counted in bins; the last of
a row's programs to finish then has the candidates in registers, finds the k-th's bin and lists what is chosen. What it
makes explicit:

* The estimate decides the time, never the result. Of more candidates than registers hold, those from the k-th's bin on
  are kept. Where there are fewer than k, or ties in their thousands, the same program searches the row itself.
* Order. Numbers are compared as fp32 or as integers of the same order (-0 equals 0, NaN is below -inf and is never
  chosen). Places of chosen elements are prefix sums over the index, so ties go to the lower index and repeats agree.
* Rows that fit in registers are not listed: there is one launch. Where rows are many a program takes whole ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, libdevice

from ...device import Device
from ._choose import bin_of_kth, choose, choose_all, counted_until, search, sum_of
from ._plan import target_of
from ._select import (
    bin_of,
    bits_set,
    elements,
    estimate,
    estimate_short,
    key_of,
    plan,
    row_of,
    sum_and_max,
)
from ._tiles import float32

ESTIMATE_REGISTERS = 96  # of a thread, of 16 warps: left to itself, ptxas takes 64 for some devices, and spills


def topk_indices(logits: torch.Tensor, lens: torch.Tensor, out: torch.Tensor) -> None:
    """logits [R, N] fp32 or bf16, lens int32 [R] -> out int32 [R, k], as octavo.reference.topk defines it."""
    if not logits.shape[0]:
        return
    for kernel, programs, arguments in launches(logits, lens, out, target_of(logits.device)):
        kernel[(programs,)](**arguments)


def launches(
    logits: torch.Tensor, lens: torch.Tensor, out: torch.Tensor, device: Device
) -> list[tuple[Any, int, dict[str, Any]]]:
    """Kernel, programs and arguments of each launch."""
    logits = logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()
    rows, width = logits.shape
    c, groups = plan(rows, width, out.shape[1], device)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    bins = empty(groups, c.bins)
    source = {
        "logits": logits,
        "row_stride": logits.stride(0),
        "lens": lens,
        "lens_stride": lens.stride(0),
        "rows": rows,
        "width": width,
    }
    result = {"out": out, "out_strides": out.stride(), "c": c, "num_warps": c.num_warps}
    if not c.slices:
        return [(short_kernel, groups, {**source, "bins": bins, **result})]
    source["scratch"] = Scratch(
        bounds=empty(rows, 2, dtype=torch.float32),
        left=empty(rows),
        bins=bins,
        counts=empty(groups, c.slices),
        numbers=empty(groups, c.slices, c.listed, dtype=torch.float32),
        indices=empty(groups, c.slices, c.listed),
        marks=empty(groups, c.slices, c.parts, c.lanes),
    )
    result |= {"maxnreg": c.registers} if c.registers else {}
    result |= {"launch_pdl": True} if c.dependent_launch else {}
    few = c.sample <= 4096
    first: dict[str, Any] = {"c": c, "num_warps": 8 if few else 16}
    if not few and not c.interpreted:
        first["maxnreg"] = ESTIMATE_REGISTERS
    kernel, programs = (select_kernel, rows * c.slices) if c.slices > 1 else (whole_kernel, groups)
    return [(estimate_kernel, rows, {**source, **first}), (kernel, programs, {**source, **result})]


class Scratch(NamedTuple):
    """What programs hand to each other: for each row, or where a program takes whole rows, for each program.

    Attributes:
        bounds: fp32 [rows, 2], where a row's bins begin, and how many there are in a unit.
        left: int32 [rows], how many slices of a row are listed; of whole rows, whether one is left to be searched.
        bins: int32 [groups, c.bins], candidates in each but the last. counts: int32 [groups, c.slices], in each list.
        numbers, indices: fp32 and int32 [groups, c.slices, c.listed], the lists.
        marks: int32 [groups, c.slices, c.parts, c.lanes], see `_words`.
    """

    bounds: Any
    left: Any
    bins: Any
    counts: Any
    numbers: Any
    indices: Any
    marks: Any


@triton.jit
def _ones(word, c: tl.constexpr):
    """How many bits of each int32 are set."""
    if c.interpreted:
        return bits_set(word.to(tl.uint32, bitcast=True))
    else:
        return libdevice.popc(word)


@triton.jit
def _lowest(word, c: tl.constexpr):
    """Which is the lowest bit set of each int32; anything where none is."""
    if c.interpreted:
        bits = word.to(tl.uint32, bitcast=True)
        return bits_set((bits & (0 - bits)) - tl.minimum(bits, 1))
    else:
        return libdevice.ffs(word) - 1


@triton.jit
def _part(row, first, end, c: tl.constexpr):
    """A part of a row from `first` on as [lanes, 32 / V, V], V neighbours being one load; NaN from `end` on.

    The lanes come first, so that the other axes lie inside a thread.
    """
    V: tl.constexpr = 128 // row.dtype.element_ty.primitive_bitwidth
    t = tl.arange(0, c.lanes)[:, None, None]
    r = tl.arange(0, 32 // V)[None, :, None]
    e = tl.arange(0, V)[None, None, :]
    at = first + (r * (c.lanes * V) + t * V + e)
    whole = first + 32 * c.lanes <= end
    return tl.load(row + at) if whole else tl.load(row + at, mask=at < end, other=float("nan"))


@triton.jit
def _mark(x, low, V: tl.constexpr, c: tl.constexpr):
    """Which of each lane's 32 elements of x [lanes, 32 / V, V] are from `low` on: bit V r + e."""
    bit = tl.arange(0, 32 // V)[:, None] * V + tl.arange(0, V)[None, :]
    bit = (tl.full([1], 1, tl.int32) << bit)[None, :, :]
    return tl.sum(tl.sum(tl.where(x >= low, bit, 0), 2), 1)


@triton.jit
def _words(marks, V: tl.constexpr, c: tl.constexpr):
    """Words of 32 neighbours, in order, of what `_mark` made of a part and stored."""
    REPEATS: tl.constexpr = 32 // V
    GROUPS: tl.constexpr = c.lanes // REPEATS  # words of one repeat
    j = tl.arange(0, c.lanes)
    at = marks + (j % GROUPS) * REPEATS
    shift = ((j // GROUPS) * V).to(tl.uint32)
    word = tl.full([c.lanes], 0, tl.int32)
    for i in tl.static_range(REPEATS):
        bits = tl.load(at + i).to(tl.uint32, bitcast=True) >> shift
        word |= ((bits & ((1 << V) - 1)) << (V * i)).to(tl.int32, bitcast=True)
    return word


@triton.jit
def _list(row, begin, end, x, low, scale, to, bins, c: tl.constexpr):
    """List the elements from `low` on of [begin, end), whose first part is x, in order of index; their number.

    Few are: comparisons become words of 32 bits, and only words are counted, summed and taken apart, two bits at a
    time. The next part is on its way meanwhile.
    """
    V: tl.constexpr = 128 // row.dtype.element_ty.primitive_bitwidth
    PART: tl.constexpr = 32 * c.lanes
    found = begin * 0
    for part in range(0, tl.cdiv(tl.maximum(end - begin, 0), PART)):
        first = begin + part * PART
        marks = to[2] + part * c.lanes
        tl.store(marks + tl.arange(0, c.lanes), _mark(float32(x), low, V, c))
        if first + PART < end:
            x = _part(row, first + PART, end, c)
        tl.debug_barrier()  # marks are read by other threads than wrote them
        word = _words(marks, V, c)
        size = _ones(word, c)
        place = found + tl.cumsum(size, 0) - size
        total, most = sum_and_max(size, size, c)
        index = first + tl.arange(0, c.lanes) * 32
        for _ in range(0, (most + 1) // 2):
            rest = word & (word - 1)
            at = index + _lowest(word, c)
            at_2 = index + _lowest(rest, c)
            number = float32(tl.load(row + at, mask=word != 0, other=0.0))
            number_2 = float32(tl.load(row + at_2, mask=rest != 0, other=0.0))
            _add(number, at, place, word != 0, low, scale, to, bins, c)
            _add(number_2, at_2, place + 1, rest != 0, low, scale, to, bins, c)
            word = rest & (rest - 1)
            place += 2
        found += total
    _end(to, found, c.listed)
    return found


@triton.jit
def _add(x, at, place, there, low, scale, to, bins, c: tl.constexpr):
    """Store candidates at their places of the list, and count them in all bins but the last, which has most."""
    bin = bin_of(x, low, scale, c).to(tl.int32)
    tl.atomic_add(bins + bin, 1, mask=there & (bin < c.bins - 1), sem="relaxed")
    tl.store(to[0] + place, x, mask=there & (place < c.listed))
    tl.store(to[1] + place, at, mask=there & (place < c.listed))


@triton.jit
def _four(count):
    """The next multiple of four."""
    return (count + 3) & -4


@triton.jit
def _filled(group, counts, c: tl.constexpr):
    """Of a row's lists: which group of four is the filled one of number `group`, how many are filled, how many
    candidates there are, and how many in the longest list.

    What other programs wrote is read from the L2 cache.
    """
    SLICES: tl.constexpr = c.slices
    place = group
    filled = 0
    total = 0
    longest = 0
    for part in tl.static_range(SLICES):
        count = tl.load(counts + part, cache_modifier=".cg")
        groups = _four(count) // 4
        filled += groups
        total += count
        longest = tl.maximum(longest, count)
        place += tl.where(group >= filled, c.listed // 4 - groups, 0)
    return place, filled, total, longest


@triton.jit
def _group(lists, place, there):
    """Numbers and indices of groups of four, NaN and 0 where they are not there."""
    at = place[:, None] * 4 + tl.arange(0, 4)[None, :]
    x = tl.load(lists[0] + at, mask=there[:, None], other=float("nan"), cache_modifier=".cg")
    return x, tl.load(lists[1] + at, mask=there[:, None], other=0, cache_modifier=".cg")


@triton.jit
def _end(lists, count, room):
    """NaN of index 0 behind the `count` entries of a list, up to a multiple of four, which makes loads of 16 bytes."""
    place = count + tl.arange(0, 4)
    there = place < tl.minimum(_four(count), room)
    tl.store(lists[0] + place, tl.full([4], float("nan"), tl.float32), mask=there)
    tl.store(lists[1] + place, place * 0, mask=there)


@triton.jit
def _compact(low, scale, lists, counts, bins, c: tl.constexpr):
    """Keep what is from the k-th's bin on, in order at the front of a row's lists, and empty lower bins; how many.

    In turns of half of what registers hold: what one writes lies before what the next one reads.
    """
    _, filled, total, _ = _filled(0, counts, c)
    bin = bin_of_kth(bins, total, c)
    kept = total * 0
    for begin in range(0, filled, c.size // 8):
        group = begin + tl.arange(0, c.size // 8)
        place, _, _, _ = _filled(group, counts, c)
        x, index = _group(lists, place, group < filled)
        keep = (x >= low) & (bin_of(x, low, scale, c) >= bin.to(tl.float32))
        at = kept + counted_until(keep.to(tl.int32)) - 1
        tl.debug_barrier()  # all are read before any is written
        tl.store(lists[0] + at, x, mask=keep)
        tl.store(lists[1] + at, index, mask=keep)
        kept += sum_of(keep.to(tl.int32))
    _end(lists, kept, c.slices * c.listed)
    lower = tl.arange(0, c.bins)
    tl.store(bins + lower, lower * 0, mask=lower < bin)
    tl.debug_barrier()  # other threads read than wrote
    return kept


@triton.jit
def _choose_listed(low, scale, lists, counts, bins, out, out_stride, c: tl.constexpr):
    """Choose from a row's lists: 0. Or 1 where they lack what is needed, or registers do not hold all ties."""
    group = tl.arange(0, c.size // 4)
    place, filled, total, longest = _filled(group, counts, c)
    left = 1
    if ((total >= c.k) | (low == float("-inf"))) & (longest <= c.listed):
        if c.slices > 1 and 4 * filled > c.size:  # whole_kernel would spill, and has few such rows
            total = _compact(low, scale, lists, counts, bins, c)
            filled = _four(total) // 4
            place = group
        if 4 * filled <= c.size:
            x, index = _group(lists, place, group < filled)
            choose(x, index, total, low, scale, bins, out, out_stride, c)
            left = 0
    return left


@triton.jit
def _choose_short(row, length, bins, out, out_stride, c: tl.constexpr):
    """The k largest of a row of at most c.size elements, all of them in registers."""
    at = tl.arange(0, c.size // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    x = elements(row, at, length)
    there = sum_of((x == x).to(tl.int32))
    low = float("-inf")
    scale = 0.0
    if there > c.k:
        low, scale = estimate_short(row, length, c)
    total = sum_of((x >= low).to(tl.int32))
    if (there <= c.k) | (total < c.k):
        choose_all(x, at, there, out, out_stride, c)
    else:
        tl.store(bins + tl.arange(0, c.bins), tl.full([c.bins], 0, tl.int32))
        tl.debug_barrier()
        bin = bin_of(x, low, scale, c)
        tl.atomic_add(bins + bin.to(tl.int32), 1, mask=(x >= low) & (bin < c.bins - 1), sem="relaxed")
        tl.debug_barrier()
        choose(x, at, total, low, scale, bins, out, out_stride, c)


@triton.jit(do_not_specialize=["rows", "width"])
def estimate_kernel(logits, row_stride, lens, lens_stride, rows, width, scratch, c: tl.constexpr):
    """Grid rows: estimate the bounds of a row, and zero what select_kernel counts in; whole_kernel does that itself."""
    if c.dependent_launch:
        gdc_launch_dependents()
    index = tl.program_id(0).to(tl.int64)
    if c.slices > 1:
        tl.store(scratch.bins + index * c.bins + tl.arange(0, c.bins), tl.full([c.bins], 0, tl.int32))
        tl.store(scratch.left + index, 0)
    row, length = row_of(index, logits, row_stride, lens, lens_stride, width)
    low, scale = estimate(row, length, c)
    tl.store(scratch.bounds + 2 * index, low)
    tl.store(scratch.bounds + 2 * index + 1, scale)


@triton.jit
def _lists(scratch, mine, c: tl.constexpr):
    """Numbers, indices and marks from list `mine` on, int64."""
    marks = scratch.marks + mine * (c.parts * c.lanes)
    return scratch.numbers + mine * c.listed, scratch.indices + mine * c.listed, marks


@triton.jit(do_not_specialize=["rows", "width"])
def select_kernel(logits, row_stride, lens, lens_stride, rows, width, scratch, out, out_strides, c: tl.constexpr):
    """Grid rows x slices: list the candidates of a slice of a row; the row's last program chooses."""
    index = (tl.program_id(0) // c.slices).to(tl.int64)
    part = tl.program_id(0) % c.slices
    row, length = row_of(index, logits, row_stride, lens, lens_stride, width)
    begin = part * (c.parts * 32 * c.lanes)
    end = tl.minimum(length, begin + c.parts * 32 * c.lanes)
    x = _part(row, begin, end, c)
    tl.debug_barrier()  # all loads are on their way: without it each is waited for before the next
    if c.dependent_launch:
        gdc_wait()
    low = tl.load(scratch.bounds + 2 * index)
    scale = tl.load(scratch.bounds + 2 * index + 1)
    bins = scratch.bins + index * c.bins
    counts = scratch.counts + index * c.slices
    found = _list(row, begin, end, x, low, scale, _lists(scratch, index * c.slices + part, c), bins, c)
    tl.store(counts + part, found)
    tl.debug_barrier()  # the program's stores, before its arrival
    finished = tl.atomic_add(scratch.left + index, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    if finished == c.slices - 1:
        lists = _lists(scratch, index * c.slices, c)
        chosen = out + index * out_strides[0]
        if _choose_listed(low, scale, lists, counts, bins, chosen, out_strides[1], c) > 0:
            search(row, length, key_of(low), chosen, out_strides[1], c)


@triton.jit(do_not_specialize=["rows", "width"])
def whole_kernel(logits, row_stride, lens, lens_stride, rows, width, scratch, out, out_strides, c: tl.constexpr):
    """Each program every row of one residue: list and choose in turn, in a list of its own.

    Rows left over are searched in the end: in the same loop that would take registers from all.
    """
    program = tl.program_id(0).to(tl.int64)
    lists = _lists(scratch, program, c)
    bins = scratch.bins + program * c.bins
    counts = scratch.counts + program
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        index = tl.cast(i, tl.int64)
        row, length = row_of(index, logits, row_stride, lens, lens_stride, width)
        x = _part(row, 0, length, c)
        tl.store(bins + tl.arange(0, c.bins), tl.full([c.bins], 0, tl.int32))
        tl.debug_barrier()  # bins are zero before anything is counted
        if c.dependent_launch:
            gdc_wait()
        low = tl.load(scratch.bounds + 2 * index)
        scale = tl.load(scratch.bounds + 2 * index + 1)
        found = _list(row, 0, length, x, low, scale, lists, bins, c)
        tl.store(counts, found)
        tl.debug_barrier()  # the list is read by other threads than wrote it
        chosen = out + index * out_strides[0]
        tl.store(scratch.left + index, _choose_listed(low, scale, lists, counts, bins, chosen, out_strides[1], c))
        tl.debug_barrier()  # and the next row's must not overtake that
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        index = tl.cast(i, tl.int64)
        if tl.load(scratch.left + index) > 0:
            row, length = row_of(index, logits, row_stride, lens, lens_stride, width)
            guess = key_of(tl.load(scratch.bounds + 2 * index))
            search(row, length, guess, out + index * out_strides[0], out_strides[1], c)


@triton.jit(do_not_specialize=["rows", "width"])
def short_kernel(logits, row_stride, lens, lens_stride, rows, width, bins, out, out_strides, c: tl.constexpr):
    """Each program every row of one residue, each of which registers hold."""
    bins += tl.program_id(0).to(tl.int64) * c.bins
    for i in range(tl.program_id(0), rows, tl.num_programs(0)):
        index = tl.cast(i, tl.int64)
        row, length = row_of(index, logits, row_stride, lens, lens_stride, width)
        _choose_short(row, length, bins, out + index * out_strides[0], out_strides[1], c)
        tl.debug_barrier()  # the next row's bins must not overtake this one's


def aot_cases(device: Device) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Launches to compile ahead of time: see octavo/testing/aot.py."""
    for rows, width, k, dtype in (
        (64, 131072, 2048, torch.float32),
        (64, 131072, 2048, torch.bfloat16),
        (1, 1 << 20, 2048, torch.float32),
        (4096, 65536, 2048, torch.float32),
        (600, 131072, 2048, torch.float32),
        (64, 8192, 2048, torch.float32),
        (64, 4096, 2048, torch.float32),
    ):
        logits = torch.empty((rows, width), dtype=dtype, device="meta")
        lens = torch.empty(rows, dtype=torch.int32, device="meta")
        out = torch.empty((rows, k), dtype=torch.int32, device="meta")
        for kernel, _, arguments in launches(logits, lens, out, device):
            name = kernel.__name__.removesuffix("_kernel")
            yield f"{name} {k} of {rows} x {width} {dtype}", kernel, arguments
