"""plan: who computes what in a step of decode, made on the device by one small kernel and shared by the step's layers.

The work is cut into units: tiles of `Constants.tile` tokens of one sequence, or pieces of a fixed number of tiles where
results must not depend on the batch. Every KV head of a sequence has the same units, one head after the other: an item.
Program p of P takes units [total p / P, total (p + 1) / P); or, where that makes no program's share much larger than
the mean, whole items or even parts of one, which leaves few or no partial results to merge. Sequences that are not
decoded have no units, and neither have short ones, of one token at most, whose rows are written without a product:
padding does not move where the others are cut.

The schedule is int32; `Schedule` says where it keeps what.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ... import hopper_tuning, tuning
from ...device import Device, device_of
from ...spec import AttentionSpec
from ..constants import CompileTime
from ._aot import LLAMA

_SEQUENCES = tl.constexpr(1024)  # looked at together, at most


@dataclass(frozen=True)
class Constants(CompileTime):
    """Compile-time constants of the decode kernel: one `gl.constexpr` argument.

    Attributes:
        group, max_rows: query heads per KV head, most query rows of a sequence.
        columns, blocks: query columns (row * group + head) of a product, and how many times that makes all of them.
        dim, dim_padded, dim_v: elements of a head; the power of two above, which the tensor cores multiply.
        page, pages, stages: tokens of a page, pages of a tile, tiles of a program's ring.
        piece: tiles of a unit; 0: a unit is one tile, and a program's neighbouring units are one piece.
        window: 0 for none. softmax_scale, softcap, lse: of the spec.
        all_decode: rows of no sequence are ours to write.
    """

    group: int
    max_rows: int
    columns: int
    blocks: int
    dim: int
    dim_padded: int
    dim_v: int
    page: int
    pages: int
    stages: int
    piece: int
    window: int
    softmax_scale: float
    softcap: float | None
    lse: bool
    all_decode: bool

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        return self.page * self.pages

    @property
    def unit_tiles(self) -> int:
        """Tiles of a unit of work."""
        return max(1, self.piece)

    @property
    def panel(self) -> int:
        """Columns of K that lie together in shared memory: the widest swizzle."""
        return min(self.dim_padded, 128)

    @property
    def panels(self) -> int:
        """Panels of a K row."""
        return self.dim_padded // self.panel

    @property
    def part(self) -> int:
        """fp32 of a partial result: columns x Dv, then the log2 of their denominators."""
        return self.columns * (self.dim_v + 1)

    @property
    def merged_at_once(self) -> int:
        """Partial results whose loads are in flight together: as registers allow."""
        return min(16, max(1, 10240 // (self.columns * self.dim_v) - 2))

    @property
    def tile_bytes(self) -> int:
        """Bytes of K and V^T of a tile in shared memory."""
        return self.tile * (self.dim_padded + self.dim_v)


class Schedule(NamedTuple):
    """The schedule as kernels read it: `memory` holds, one after the other,

    units of one head before each sequence [batch + 1]; the sequence in which each program starts [programs]; its first
    unit [programs + 1]; the parts of an item where all have as many and a program at most one, else 0; the number of
    short sequences and which they are [batch]; a counter an item, of the programs that are done with it.
    """

    memory: Any
    batch: int
    heads: int  # KV heads times blocks of columns
    programs: int


@lru_cache(maxsize=1024)
def constants(spec: AttentionSpec, max_query_len: int | None, all_decode: bool) -> Constants:
    """Constants of decode for sequences of at most min(spec.max_query_len, max_query_len) rows."""
    rows = hopper_tuning.decode_rows(spec, max_query_len)
    tile = hopper_tuning.decode_tile(spec, rows)
    return Constants(
        group=spec.group_size,
        max_rows=rows,
        columns=tile.columns,
        blocks=tile.blocks,
        dim=spec.head_dim,
        dim_padded=tuning.padded(spec.head_dim),
        dim_v=spec.value_dim,
        page=spec.page_size,
        pages=tile.pages,
        stages=tile.stages,
        piece=tile.piece if spec.batch_invariant else 0,
        window=spec.window or 0,
        softmax_scale=spec.scale,
        softcap=spec.softcap,
        lse=spec.lse,
        all_decode=all_decode,
    )


@triton.jit
def tile_span(length, rows, c: tl.constexpr):
    """First page that a sequence's rows see, with which its first tile begins, and how many tiles there are."""
    first = length * 0
    if c.window > 0:
        first = tl.maximum(length - rows - c.window + 1, 0) // c.page
    return first, (length - first * c.page + (c.tile - 1)) // c.tile


@triton.jit
def _units(seq_lens, query_starts, index, batch, capacity, c: tl.constexpr):
    """Units of one head of sequences `index`, and whether each is short: neither if it is not there, or not decoded."""
    there = index < batch
    length = tl.minimum(tl.load(seq_lens + index, mask=there, other=0), capacity)
    begin = tl.maximum(tl.load(query_starts + index, mask=there, other=0), 0)
    rows = tl.maximum(tl.load(query_starts + index + 1, mask=there, other=0), 0) - begin
    first, tiles = tile_span(tl.maximum(length, 0), rows, c)
    decoded = (rows > 0) & (rows <= c.max_rows)
    units = tl.where(decoded & (length > 1), (tiles + (c.unit_tiles - 1)) // c.unit_tiles, 0)
    return units, decoded & (length <= 1)


@triton.jit
def starts_at(schedule):
    """Where the schedule keeps the first unit of each program."""
    return schedule.memory + schedule.batch + 1 + schedule.programs


@triton.jit
def parts_at(schedule):
    """Where the schedule keeps the parts that each item has, or 0."""
    return schedule.memory + schedule.batch + 2 + 2 * schedule.programs


@triton.jit
def short_at(schedule):
    """Where the schedule keeps the number of short sequences, and behind it which they are."""
    return parts_at(schedule) + 1


@triton.jit
def counters_at(schedule):
    """Where the schedule keeps the counters of items."""
    return short_at(schedule) + 1 + schedule.batch


@triton.jit
def active_programs(total, schedule):
    """Programs that get work where units are shared evenly; `total` units in all, int64."""
    return tl.maximum(tl.minimum(total, schedule.programs), 1)


@triton.jit
def _quotient(a, b):
    """a // b of numbers that are not negative: fewer instructions than of those that may be."""
    return (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int32)


@triton.jit
def _division(all_units, live, most, least, schedule):
    """How the units of `live` sequences of `least` to `most`, `all_units` in all, are divided.

    Whether by items; parts of an item (0: a program has whole ones); items, or units, that there are to be divided;
    programs that take some. Firsts of units are kept in int32, so their number fits.
    """
    items = live * schedule.heads
    total = all_units * schedule.heads
    parts = _quotient(items * 0 + schedule.programs, tl.maximum(items, 1))
    each = (items + (schedule.programs - 1)) // schedule.programs
    cut = tl.maximum(parts, 1)
    largest = tl.where(parts > 0, _quotient(most + (cut - 1), cut), each * most).to(tl.int64)
    # a sixteenth above the mean
    small = largest * (schedule.programs * 16) <= all_units.to(tl.int64) * schedule.heads * 17
    by_items = small & (least >= parts) & (items > 0)
    # Of more than 16 parts each has four tiles, a program's ring and one more: fewer to merge, and no later.
    share = tl.where(parts > 16, 4, 1)
    share = tl.maximum(_quotient(most + (cut - 1), cut), share)
    parts = tl.where(by_items & (parts > 1), _quotient(most + (share - 1), share), parts)
    each = tl.maximum(each, 1)
    takers = tl.where(parts > 0, items * parts, _quotient(items + (each - 1), each))
    takers = tl.where(by_items, takers, active_programs(total, schedule))
    return by_items, parts, tl.where(by_items, items, total), takers


@triton.jit
def _begin_of(program, things, takers):
    """floor(things * program / takers), at most `things`: exact in 32 bits, as takers^2 is."""
    program = tl.minimum(program, takers)
    each = _quotient(things, takers)
    return each * program + _quotient((things - each * takers) * program, takers)


@triton.jit
def _survey(seq_lens, query_starts, batch, bound, capacity, c: tl.constexpr, SEQUENCES: tl.constexpr):
    """Of all sequences: sum of their units, how many have some, most and least of those; what _units has of the last.

    bound: of the sequences looked at.
    """
    i = tl.arange(0, SEQUENCES)
    units, short = _units(seq_lens, query_starts, i, batch, capacity, c)
    total, live = tl.sum(units, 0), tl.sum((units > 0).to(tl.int32), 0)
    most, least = tl.max(units, 0), tl.min(tl.where(units > 0, units, 2**30), 0)
    for base in range(SEQUENCES, bound, SEQUENCES):
        units, short = _units(seq_lens, query_starts, base + i, batch, capacity, c)
        total += tl.sum(units, 0)
        live += tl.sum((units > 0).to(tl.int32), 0)
        most = tl.maximum(most, tl.max(units, 0))
        least = tl.minimum(least, tl.min(tl.where(units > 0, units, 2**30), 0))
    return total, live, most, least, units, short


@triton.jit
def _clear_counters(schedule, SEQUENCES: tl.constexpr):
    """Nobody is done with any item yet."""
    items = schedule.batch * schedule.heads
    i = tl.arange(0, SEQUENCES)
    for base in range(tl.program_id(0) * SEQUENCES, items, tl.num_programs(0) * SEQUENCES):
        tl.store(counters_at(schedule) + base + i, 0, mask=base + i < items)


# What changes from step to step is no reason to compile again; Triton specialises what is in a tuple whatever is asked.
@triton.jit(do_not_specialize=["size", "capacity"])
def plan_kernel(
    seq_lens,
    query_starts,
    schedule,
    size,
    capacity,
    heads: tl.constexpr,
    programs: tl.constexpr,
    c: tl.constexpr,
    SEQUENCES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Every program adds up the units of all sequences, and finds where its PROGRAMS programs start.

    DEPENDENT: launched while the kernel before still runs, which it then waits for. The kernel after it starts once all
    programs have ended, and each ends with a fence: decode reads what is written here without a wait.
    """
    if DEPENDENT:
        gdc_wait()
    schedule = Schedule(schedule, size, heads, programs)
    _clear_counters(schedule, SEQUENCES)
    bound = size if SEQUENCES == _SEQUENCES else SEQUENCES  # known: no loop
    i = tl.arange(0, SEQUENCES)
    all_units, live, most, least, units, short = _survey(seq_lens, query_starts, size, bound, capacity, c, SEQUENCES)
    by_items, parts, things, takers = _division(all_units, live, most, least, schedule)
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    begin = _begin_of(program, things, takers)  # an item, or a unit
    passes = begin // heads  # sequences with units that are over at it, or units of one head
    before = tl.zeros([PROGRAMS], tl.int32)
    passed = tl.zeros([PROGRAMS], tl.int32)
    own = tl.zeros([PROGRAMS], tl.int32)
    running, running_units, shorts = live * 0, live * 0, live * 0
    for base in range(0, bound, SEQUENCES):
        there = base + i < size
        if SEQUENCES == _SEQUENCES:
            units, short = _units(seq_lens, query_starts, base + i, size, capacity, c)
        if tl.program_id(0) == 0:
            end = running_units + tl.cumsum(units, 0)
            tl.store(schedule.memory + base + i, end - units, mask=there)
            tl.store(schedule.memory + base + i + 1, end, mask=base + i == size - 1)
        if tl.program_id(0) == tl.num_programs(0) - 1:
            at = shorts + tl.cumsum(short.to(tl.int32), 0) - 1
            tl.store(short_at(schedule) + 1 + at, base + i, mask=short)
            shorts += tl.sum(short.to(tl.int32), 0)
        counted = tl.where(by_items, (units > 0).to(tl.int32), units)
        until = running + tl.cumsum(counted, 0)
        over = (until[None, :] <= passes[:, None]) & there[None, :]
        mine = (until[None, :] == passes[:, None] + 1) & (units > 0)[None, :]  # of whole items
        before += tl.sum(tl.where(over, units[None, :], 0), 1)
        passed += tl.sum(over.to(tl.int32), 1)
        own = tl.maximum(own, tl.max(tl.where(mine, units[None, :], 0), 1))
        running += tl.sum(counted, 0)
        running_units += tl.sum(units, 0)
    cut = tl.maximum(parts, 1)
    part = tl.where(parts > 0, tl.minimum(program, takers) - begin * cut, 0)
    start = before * heads + (begin - passes * heads) * own + _quotient(part * own, cut)
    start = tl.where(by_items, start, begin)
    tl.store(starts_at(schedule) + program, start, mask=program <= programs)
    tl.store(schedule.memory + size + 1 + program, passed, mask=program < programs)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(parts_at(schedule), tl.where(by_items, parts, 0))
        tl.store(short_at(schedule), shorts)
    if DEPENDENT:
        tl.inline_asm_elementwise("fence.acq_rel.gpu; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


def schedule_of(
    spec: AttentionSpec, device: Device, batch: int, max_query_len: int | None, memory: torch.Tensor
) -> Schedule:
    """The schedule of `batch` sequences in `memory`, int32 of at least hopper_tuning.decode_schedule_ints."""
    tile = hopper_tuning.decode_tile(spec, hopper_tuning.decode_rows(spec, max_query_len))
    return Schedule(memory, batch, spec.num_kv_heads * tile.blocks, device.num_sms * tile.programs_per_sm)


def plan(
    spec: AttentionSpec,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    query_starts: torch.Tensor,
    memory: torch.Tensor,
    num_decodes: int | None,
    max_query_len: int | None,
) -> None:
    """Write the schedule of a step into `memory`: int32, at least hopper_tuning.decode_schedule_ints of them.

    The other arguments are what Attention.plan got. Reads nothing on the host; one launch.
    """
    batch = seq_lens.shape[0] if num_decodes is None else num_decodes
    if batch == 0:
        return
    schedule = schedule_of(spec, device_of(seq_lens.device), batch, max_query_len, memory)
    capacity = page_table.shape[1] * spec.page_size
    grid, arguments = launch(spec, seq_lens, query_starts, schedule, capacity, max_query_len)
    plan_kernel[grid](**arguments)


def launch(
    spec: AttentionSpec,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    schedule: Schedule,
    capacity: int,
    max_query_len: int | None,
) -> tuple[tuple[int], dict[str, Any]]:
    """The grid and the arguments of the launch for a step of at most `capacity` tokens a sequence."""
    gpu = seq_lens.device.type != "cpu"  # the interpreter knows no dependent launch
    # of decode, whose start one program of the plan finds: few programs are soon interpreted
    programs = 1 if gpu else 16
    sequences = min(_SEQUENCES.value, max(32, triton.next_power_of_2(schedule.batch)))
    return (triton.cdiv(schedule.programs + 1, programs),), {
        "seq_lens": seq_lens,
        "query_starts": query_starts,
        "schedule": schedule.memory,
        "size": schedule.batch,
        "capacity": capacity,
        "heads": schedule.heads,
        "programs": schedule.programs,
        "c": constants(spec, max_query_len, False),
        "SEQUENCES": sequences,
        "PROGRAMS": programs,
        "DEPENDENT": gpu,
        **({"num_warps": max(1, sequences // 256), "launch_pdl": True} if gpu else {}),
    }


def aot_cases(device: Device) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The launches to compile ahead of time for `device` (octavo.testing.aot says what they are)."""
    if device.arch != "sm_90":
        return
    for label, fields, batch in (
        ("one sequence", {}, 1),
        ("300 sequences, window", {"window": 300}, 300),
        ("64 sequences, 4 rows, batch invariant", {"max_query_len": 4, "batch_invariant": True}, 64),
    ):
        spec = AttentionSpec(**{**LLAMA, **fields})
        lens, starts, memory = (torch.empty(n, dtype=torch.int32, device="meta") for n in (batch, batch + 1, 1 << 16))
        schedule = schedule_of(spec, device, batch, None, memory)
        yield label, plan_kernel, launch(spec, lens, starts, schedule, 8192, None)[1]
