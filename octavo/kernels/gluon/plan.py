"""plan: who computes what in a step of decode, made on the device by one small kernel and shared by the step's layers.

The work is cut into units: tiles of `Constants.tile` tokens of one sequence, or pieces of a fixed number of tiles where
results must not depend on the batch. Every KV head of a sequence has the same units, one head after the other; program
p of P takes units [total p / P, total (p + 1) / P). A sequence that is not decoded, or has no tokens, has none: padding
does not move where the others are cut.

The schedule is int32: units of one head before each sequence [B + 1], the sequence in which each program starts [P],
its first unit [P + 1], and a counter an item (sequence and head), of the programs that are done with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ... import tuning
from ...device import Device, device_of
from ...spec import AttentionSpec
from ..constants import CompileTime

_SEQUENCES = 1024  # looked at together
_PROGRAMS = 4  # whose start one program of the plan finds


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
    """The schedule as kernels read it."""

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
    """Units of one head of sequences `index`: 0 for those that are not there, have no tokens, no rows or too many."""
    there = index < batch
    length = tl.minimum(tl.load(seq_lens + index, mask=there, other=0), capacity)
    begin = tl.maximum(tl.load(query_starts + index, mask=there, other=0), 0)
    rows = tl.maximum(tl.load(query_starts + index + 1, mask=there, other=0), 0) - begin
    first, tiles = tile_span(tl.maximum(length, 0), rows, c)
    return tl.where((rows > 0) & (rows <= c.max_rows), (tiles + (c.unit_tiles - 1)) // c.unit_tiles, 0)


@triton.jit
def starts_at(schedule):
    """Where the schedule keeps the first unit of each program."""
    return schedule.memory + schedule.batch + 1 + schedule.programs


@triton.jit
def counters_at(schedule):
    """Where the schedule keeps the counters of items."""
    return schedule.memory + schedule.batch + 2 + 2 * schedule.programs


@triton.jit
def active_programs(total, schedule):
    """Programs that get work, a unit at least; `total` units in all, int64."""
    return tl.maximum(tl.minimum(total, schedule.programs), 1)


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

    DEPENDENT: launched while the kernel before still runs, which it then waits for.
    """
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    batch = schedule.batch
    i = tl.arange(0, SEQUENCES)
    units = _units(seq_lens, query_starts, i, batch, capacity, c)
    all_units = tl.sum(units, 0)
    for base in range(SEQUENCES, batch, SEQUENCES):
        all_units += tl.sum(_units(seq_lens, query_starts, base + i, batch, capacity, c), 0)
    total = all_units.to(tl.int64) * schedule.heads
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    start = tl.minimum(total * program // active_programs(total, schedule), total).to(tl.int32)
    tl.store(starts_at(schedule) + program, start, mask=program <= schedule.programs)
    start //= schedule.heads  # a sequence that ends at or before it, in units of one head, is over
    passed = tl.zeros([PROGRAMS], tl.int32)
    running = all_units * 0
    for base in range(0, batch, SEQUENCES):
        if base > 0:
            units = _units(seq_lens, query_starts, base + i, batch, capacity, c)
        end = running + tl.cumsum(units, 0)
        if tl.program_id(0) == 0:
            tl.store(schedule.memory + base + i, end - units, mask=base + i < batch)
            tl.store(schedule.memory + base + i + 1, end, mask=base + i == batch - 1)
        over = (end[None, :] <= start[:, None]) & (base + i < batch)[None, :]
        passed += tl.sum(over.to(tl.int32), 1)
        running += tl.sum(units, 0)
    tl.store(schedule.memory + batch + 1 + program, passed, mask=program < schedule.programs)
    items = batch * schedule.heads
    for base in range(tl.program_id(0) * SEQUENCES, items, tl.num_programs(0) * SEQUENCES):
        tl.store(counters_at(schedule) + base + i, 0, mask=base + i < items)


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
    return (triton.cdiv(schedule.programs + 1, _PROGRAMS),), {
        "seq_lens": seq_lens,
        "query_starts": query_starts,
        "schedule": schedule,
        "capacity": capacity,
        "c": constants(spec, max_query_len, False),
        "SEQUENCES": min(_SEQUENCES, max(16, triton.next_power_of_2(schedule.batch))),
        "PROGRAMS": _PROGRAMS,
        "DEPENDENT": gpu,
        **({"num_warps": 2, "launch_pdl": True} if gpu else {}),
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
