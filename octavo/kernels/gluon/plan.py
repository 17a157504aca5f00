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

from ... import tuning
from ...device import Device, device_of
from ...spec import AttentionSpec
from ..constants import CompileTime

_SEQUENCES = 1024  # looked at together
_COUNTED = tl.constexpr(1 << 36)  # what a count is in units of, above a sum of units in the same int64


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
        return max(1, 10240 // (self.columns * self.dim_v) - 2)

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
    rows = tuning.hopper_decode_rows(spec, max_query_len)
    tile = tuning.hopper_decode_tile(spec, rows)
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
    """First tile that a sequence's rows see, and how many there are."""
    first = length * 0
    if c.window > 0:
        first = tl.maximum(length - rows - c.window + 1, 0) // c.tile
    return first, (length + (c.tile - 1)) // c.tile - first


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
def _division(total, live, most, least, schedule):
    """How `live` sequences of `least` to `most` units are divided, `total` units in all, int64: whether by items, parts
    of an item (0: a program has whole ones), items of a program."""
    items = live * schedule.heads
    parts = schedule.programs // tl.maximum(items, 1)
    each = (items + (schedule.programs - 1)) // schedule.programs
    cut = tl.maximum(parts, 1)
    largest = tl.where(parts > 0, (most + (cut - 1)) // cut, each * most).to(tl.int64)
    small = largest * schedule.programs * 16 <= total * 17  # a sixteenth above the mean
    return small & (least >= parts) & (items > 0), parts, tl.maximum(each, 1)


@triton.jit
def _item_of(program, items, parts, each):
    """The item in which a program starts where items are not cut across programs, and which of its `parts`."""
    cut = tl.maximum(parts, 1)
    taking = tl.maximum((items + (each - 1)) // each, 1)  # programs that take whole items
    whole = (items.to(tl.int64) * program // taking).to(tl.int32)
    item = tl.where(parts > 0, program // cut, whole)
    return item, tl.where(parts > 0, program - item * cut, 0)


@triton.jit
def _pair(units):
    """Units of sequences, and above them a 1 (_COUNTED) where there are some: both are added up at once."""
    return tl.where(units > 0, units.to(tl.int64) + _COUNTED, 0)


@triton.jit
def _both(pair):
    """The two of a pair."""
    return (pair % _COUNTED).to(tl.int32), (pair // _COUNTED).to(tl.int32)


@triton.jit
def _survey(seq_lens, query_starts, batch, capacity, c: tl.constexpr, SEQUENCES: tl.constexpr):
    """Of all sequences: sums (a pair), most and least units where there are some; and what _units has of the last."""
    i = tl.arange(0, SEQUENCES)
    units, short = _units(seq_lens, query_starts, i, batch, capacity, c)
    sums, most, least = tl.sum(_pair(units), 0), tl.max(units, 0), tl.min(tl.where(units > 0, units, 2**30), 0)
    for base in range(SEQUENCES, batch, SEQUENCES):
        units, short = _units(seq_lens, query_starts, base + i, batch, capacity, c)
        sums += tl.sum(_pair(units), 0)
        most = tl.maximum(most, tl.max(units, 0))
        least = tl.minimum(least, tl.min(tl.where(units > 0, units, 2**30), 0))
    return sums, most, least, units, short


@triton.jit
def _clear_counters(schedule, SEQUENCES: tl.constexpr):
    """Nobody is done with any item yet."""
    items = schedule.batch * schedule.heads
    i = tl.arange(0, SEQUENCES)
    for base in range(tl.program_id(0) * SEQUENCES, items, tl.num_programs(0) * SEQUENCES):
        tl.store(counters_at(schedule) + base + i, 0, mask=base + i < items)


@triton.jit(do_not_specialize=["capacity"])
def plan_kernel(
    seq_lens,
    query_starts,
    schedule,
    capacity,
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
    batch, heads = schedule.batch, schedule.heads
    i = tl.arange(0, SEQUENCES)
    sums, most, least, units, short = _survey(seq_lens, query_starts, batch, capacity, c, SEQUENCES)
    all_units, live = _both(sums)
    total = all_units.to(tl.int64) * heads
    by_items, parts, each = _division(total, live, most, least, schedule)
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    item, part = _item_of(program, live * heads, parts, each)
    rank = item // heads  # of its sequence among those that have units
    start = tl.minimum(total * program // active_programs(total, schedule), total).to(tl.int32)
    shared = start // heads  # a sequence that ends at or before it, in units of one head, is over
    over_sums = tl.zeros([PROGRAMS], tl.int64)
    own = tl.zeros([PROGRAMS], tl.int32)
    running, shorts = sums * 0, live * 0
    for base in range(0, batch, SEQUENCES):
        there = base + i < batch
        if batch > SEQUENCES:
            units, short = _units(seq_lens, query_starts, base + i, batch, capacity, c)
        end, last = _both(running + tl.cumsum(_pair(units), 0))
        if tl.program_id(0) == 0:
            tl.store(schedule.memory + base + i, end - units, mask=there)
            tl.store(schedule.memory + base + i + 1, end, mask=base + i == batch - 1)
        if tl.program_id(0) == tl.num_programs(0) - 1:
            at = shorts + tl.cumsum(short.to(tl.int32), 0) - 1
            tl.store(short_at(schedule) + 1 + at, base + i, mask=short)
            shorts += tl.sum(short.to(tl.int32), 0)
        over = tl.where(by_items, last[None, :] <= rank[:, None], end[None, :] <= shared[:, None]) & there[None, :]
        over_sums += tl.sum(tl.where(over, (units.to(tl.int64) + _COUNTED)[None, :], 0), 1)
        mine = (last[None, :] == rank[:, None] + 1) & (units > 0)[None, :]
        own = tl.maximum(own, tl.max(tl.where(mine, units[None, :], 0), 1))
        running += tl.sum(_pair(units), 0)
    before, passed = _both(over_sums)
    item_start = before * heads + (item - rank * heads) * own + part * own // tl.maximum(parts, 1)
    start = tl.where(by_items, item_start, start)
    tl.store(starts_at(schedule) + program, start, mask=program <= schedule.programs)
    tl.store(schedule.memory + batch + 1 + program, passed, mask=program < schedule.programs)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        tl.store(parts_at(schedule), tl.where(by_items, parts, 0))
        tl.store(short_at(schedule), shorts)
    _clear_counters(schedule, SEQUENCES)
    if DEPENDENT:
        tl.inline_asm_elementwise("fence.acq_rel.gpu; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


def schedule_of(
    spec: AttentionSpec, device: Device, batch: int, max_query_len: int | None, memory: torch.Tensor
) -> Schedule:
    """The schedule of `batch` sequences in `memory`, int32 of at least tuning.hopper_schedule_ints."""
    tile = tuning.hopper_decode_tile(spec, tuning.hopper_decode_rows(spec, max_query_len))
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
    """Write the schedule of a step into `memory`: int32, at least tuning.hopper_schedule_ints of them.

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
    sequences = min(_SEQUENCES, max(32, triton.next_power_of_2(schedule.batch)))
    return (triton.cdiv(schedule.programs + 1, programs),), {
        "seq_lens": seq_lens,
        "query_starts": query_starts,
        "schedule": schedule,
        "capacity": capacity,
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
    llama = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    for label, fields, batch in (
        ("one sequence", {}, 1),
        ("300 sequences, window", {"window": 300}, 300),
        ("64 sequences, 4 rows, batch invariant", {"max_query_len": 4, "batch_invariant": True}, 64),
    ):
        spec = AttentionSpec(**{**llama, **fields})
        lens, starts, memory = (torch.empty(n, dtype=torch.int32, device="meta") for n in (batch, batch + 1, 1 << 16))
        schedule = schedule_of(spec, device, batch, None, memory)
        yield label, plan_kernel, launch(spec, lens, starts, schedule, 8192, None)[1]
