"""The last step of top-k: the k largest of candidates that registers hold, by their bins, or of what only memory holds.

Tiles are [groups, 4]: neighbours in a thread, so that loads are of 16 bytes and what is counted along them needs no
other thread. The k-th's bin is exact, as a bin never falls when a number rises; what is in it, one to three numbers as
a rule, is resolved by repeated maxima. A place is a prefix sum over the index, so ties go to the lower index.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._select import INFINITE, NOTHING, bin_of, elements, key_of, number_of

MANY = tl.constexpr(31)  # from which on those of a bin are searched


@triton.jit
def sum_of(x):
    """The sum of a tile of two axes."""
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def max_of(x):
    """The largest of a tile of two axes."""
    return tl.max(tl.max(x, 1), 0)


@triton.jit
def min_of(x):
    """The smallest of a tile of two axes."""
    return tl.min(tl.min(x, 1), 0)


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
def narrow(key, count, wanted):
    """Of `count` keys above NOTHING the wanted-th largest, or a lower one that as many are at least; and how many of
    those equal to it belong to the `wanted` largest, or more.

    Guesses halve the distance at every other step, so that 64 do whatever the numbers are.
    """
    low = min_of(tl.where(key > NOTHING, key, INFINITE))
    high = max_of(key) + 1
    above = count * 0
    step = 0
    while ((high - low).to(tl.uint32, bitcast=True) > 1) & (count > wanted):
        pivot = guess_between(low, high, count, above, wanted) if step % 2 == 0 else middle(low, high)
        found = sum_of((key >= pivot).to(tl.int32))
        if found >= wanted:
            low = pivot
            count = found
        else:
            high = pivot
            above = found
        step += 1
    return low, tl.where(count <= wanted, wanted, wanted - above)


@triton.jit
def _largest(key, wanted):
    """`narrow` among few: the wanted-th largest by repeated maxima."""
    last = tl.cast(INFINITE + 1, tl.int32)
    room = wanted
    more = wanted > 0
    while more:
        last = max_of(tl.where(key < last, key, NOTHING))
        same = wanted * 0 + 1
        if room > 1:
            same = sum_of((key == last).to(tl.int32))
        more = same < room
        room = tl.where(more, room - same, room)
    return last, room


@triton.jit
def bin_of_kth(bins, total, c: tl.constexpr):
    """The k-th's bin of `total` > k numbers counted in bins but for the last one: the last that at most total - k are
    below."""
    j = tl.arange(0, c.bins)
    count = tl.load(bins + j, cache_modifier=".cg")
    return tl.max(tl.where(tl.cumsum(count, 0) - count <= total - c.k, j, 0), 0)


@triton.jit
def _bin_of_few(bins, total, SIZE: tl.constexpr, c: tl.constexpr):
    """`bin_of_kth` of at most SIZE numbers, how many are in lower ones, and how many in it, MANY standing for more."""
    j = tl.arange(0, c.bins)
    count = tl.load(bins + j, cache_modifier=".cg")
    under = tl.cumsum(count, 0) - count
    count = tl.where(j == c.bins - 1, total - under, count)
    # What is packed rises from bin to bin.
    packed = (j * SIZE + under) * (MANY + 1) + tl.minimum(count, MANY)
    packed = tl.max(tl.where(under <= total - c.k, packed, 0), 0)
    place = packed // (MANY + 1)
    return place // SIZE, place % SIZE, packed % (MANY + 1)


@triton.jit
def choose(x, index, total, low, scale, bins, out, out_stride, c: tl.constexpr):
    """Write the k largest of x [c.size / 4, 4], `total` of which from `low` on are counted in bins, NaN being nothing.

    They go to `out` in order of the tile, by their index.
    """
    over = x >= low
    same = x != x
    room = 0
    if total > c.k:
        bin, lower, inside = _bin_of_few(bins, total, c.size, c)
        wanted = c.k - (total - lower) + inside  # of those inside
        place = tl.where(over, bin_of(x, low, scale, c), -1.0)
        over = place >= bin.to(tl.float32)
        if (inside == MANY) | (inside > wanted):
            above = place >= (bin + 1).to(tl.float32)
            key = tl.where(over & (place < (bin + 1).to(tl.float32)), key_of(x), NOTHING)
            if inside == MANY:
                inside = tl.load(bins + bin, cache_modifier=".cg") if bin < c.bins - 1 else total - lower
                last, room = narrow(key, inside, c.k - (total - lower) + inside)
            else:
                last, room = _largest(key, wanted)
            over = above | (key > last)
            same = key == last
    write(over, same, index, room, out, out_stride, c)
    if total < c.k:
        pad(total, out, out_stride, c)


@triton.jit
def choose_all(x, index, total, out, out_stride, c: tl.constexpr):
    """Write the k largest of the `total` numbers of x [c.size / 4, 4], whatever they are, without bins."""
    key = key_of(x)
    last = tl.cast(NOTHING, tl.int32)
    room = 0
    if total > c.k:
        last, room = narrow(key, total, total * 0 + c.k)
    write(key > last, key == last, index, room, out, out_stride, c)
    if total < c.k:
        pad(total, out, out_stride, c)


@triton.jit
def counted_until(count):
    """The sum of int32 [groups, 4] up to each element."""
    group = tl.sum(count, 1)
    return (tl.cumsum(group, 0) - group)[:, None] + tl.cumsum(count, 1)


@triton.jit
def write(over, same, index, room, out, out_stride, c: tl.constexpr):
    """Write the indices of a tile's elements that are `over`, and of those that are `same` the first `room`."""
    counted = counted_until(over.to(tl.int32) + (same.to(tl.int32) << 16))
    sames = counted >> 16
    place = (counted & 0xFFFF) + tl.minimum(sames, room) - 1
    _put(over | (same & (sames <= room)), place, index, out, out_stride, c)


@triton.jit
def _put(chosen, place, index, out, out_stride, c: tl.constexpr):
    """Store each chosen index at its place. One by one along the neighbours, since a store of the tile would have other
    threads do it, and shared memory between."""
    place = tl.where(chosen & (place < c.k), place, -1)
    place_02, place_13 = tl.split(tl.reshape(place, (place.shape[0], 2, 2)))
    index_02, index_13 = tl.split(tl.reshape(index, (index.shape[0], 2, 2)))
    place_0, place_2 = tl.split(place_02)
    place_1, place_3 = tl.split(place_13)
    index_0, index_2 = tl.split(index_02)
    index_1, index_3 = tl.split(index_13)
    tl.store(out + place_0.to(tl.int64) * out_stride, index_0, mask=place_0 >= 0)
    tl.store(out + place_1.to(tl.int64) * out_stride, index_1, mask=place_1 >= 0)
    tl.store(out + place_2.to(tl.int64) * out_stride, index_2, mask=place_2 >= 0)
    tl.store(out + place_3.to(tl.int64) * out_stride, index_3, mask=place_3 >= 0)


@triton.jit
def pad(there, out, out_stride, c: tl.constexpr):
    """-1 to the places that `there` numbers leave."""
    place = tl.arange(0, c.k_padded)
    tl.store(out + place.to(tl.int64) * out_stride, place * 0 - 1, mask=(place >= there) & (place < c.k))


@triton.jit
def _count(numbers, length, one, two, c: tl.constexpr):
    """Of the `length` numbers of memory, those whose keys are at least `one`, and at least `two`."""
    ones = tl.full([c.searched], 0, tl.int32)
    twos = tl.full([c.searched], 0, tl.int32)
    for part in range(0, length, c.searched):
        key = key_of(elements(numbers, part + tl.arange(0, c.searched), length))
        ones += (key >= one).to(tl.int32)
        twos += (key >= two).to(tl.int32)
    return tl.sum(ones, 0), tl.sum(twos, 0)


@triton.jit
def _threshold(numbers, length, guess, c: tl.constexpr):
    """Narrow over numbers in memory to the k-th largest, from a guess: as `narrow`."""
    least = tl.cast(NOTHING + 1, tl.int32)
    there, count = _count(numbers, length, least, guess, c)
    low = least
    high = tl.cast(INFINITE + 1, tl.int32)
    above = tl.cast(0, tl.int32)
    if count >= c.k:
        low = guess
        _, more = _count(numbers, length, guess, guess + 1, c)
        if more < c.k:  # ties at the guess: the usual way to come here
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
        found, found_2 = _count(numbers, length, pivot, pivot_2, c)
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
    return there, tl.where(there <= c.k, least, low), room


@triton.jit
def search(numbers, length, guess, out, out_stride, c: tl.constexpr):
    """Write the places of the k largest of the `length` numbers in memory, in order, NaN being nothing."""
    there, last, room = _threshold(numbers, length, guess, c)
    taken = 0
    equal = 0
    for begin in range(0, length, c.searched):
        at = begin + tl.arange(0, c.searched)
        key = key_of(elements(numbers, at, length))
        over = key > last
        same = key == last
        counted = tl.cumsum(over.to(tl.int32) + (same.to(tl.int32) << 16), 0)
        sames = equal + (counted >> 16)
        chosen = over | (same & (sames <= room))
        place = taken + (counted & 0xFFFF) + tl.minimum(sames, room) - 1
        tl.store(out + place.to(tl.int64) * out_stride, at, mask=chosen & (place < c.k))
        taken += tl.sum(over.to(tl.int32), 0)
        equal += tl.sum(same.to(tl.int32), 0)
    pad(there, out, out_stride, c)
