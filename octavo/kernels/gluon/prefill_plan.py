"""prefill_plan: the tiles of a step of prefill, heaviest first, made on the device and shared by the step's layers.

A tile is `Constants.tile_rows` query rows of one sequence for `Constants.pack` query heads, packed; every group of
`pack` heads has the same tiles. The list holds tiles that exist and no other, ordered by how far they reach, so that
programs that take the next item when they are free end together. Where items fill a few waves of programs and a part of
one, the items of that part are cut along the keys into pieces, which the program that finishes the last of them merges.

The schedule is int32: a header (entries, items handed out, programs done), two counters for each item that is cut, one
a consumer, of the pieces done, then the entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ... import hopper_tuning
from ...device import Device, device_of
from ...spec import AttentionSpec
from ..constants import CompileTime
from ._aot import LLAMA

HEADER, ENTRY = hopper_tuning.HEADER_INTS, hopper_tuning.ENTRY_INTS
_TILES = 64  # that one program of the plan ranks
_SEQUENCES = 64  # looked at together
_MOST_PIECES = tl.constexpr(16)  # of an item
_LEAST_PIECE = tl.constexpr(8)  # blocks of a piece: below it the merge costs more than it saves
_MOST_WAVES = tl.constexpr(8)  # beyond so many whole waves, what is left over does not count
_MERGE = tl.constexpr(0.02)  # what a piece more costs, in items


@dataclass(frozen=True)
class Constants(CompileTime):
    """Compile-time constants of the prefill kernel: one `gl.constexpr` argument.

    Attributes:
        group, pack, heads: query heads per KV head; of them packed into a tile; packs of query heads in all.
        dim, page, block, stages: elements of a head, tokens of a page and of a block of keys, blocks of either ring.
        exact: query and P are two e4m3 terms, and scores fp32.
        query_terms, query_bits: e4m3 terms that a query becomes, and the bits of what the caller passes.
        max_rows: most query rows of a sequence that decodes.
        window: 0 for none. softmax_scale, softcap, lse: of the spec.
        never_cut: no item is cut.
    """

    group: int
    pack: int
    heads: int
    dim: int
    page: int
    block: int
    stages: int
    exact: bool
    query_terms: int
    query_bits: int
    max_rows: int
    window: int
    softmax_scale: float
    softcap: float | None
    lse: bool
    never_cut: bool
    careful: bool  # of tiles that are computed again: scores that are too large are scaled down, see `_halves.tempered`

    @property
    def tile_rows(self) -> int:
        """Query rows of a tile."""
        return 128 // self.pack

    @property
    def unroll(self) -> int:
        """Blocks that the fast loop overlaps: as registers allow."""
        return 2 if self.dim <= 128 else 1

    @property
    def again(self) -> Constants:
        """Constants of tiles that are computed again."""
        return replace(self, careful=True)

    @property
    def watched(self) -> bool:
        """Whether rows may be lost, see `_prefill_steps.lost_rows`: scores that no softcap bounds."""
        return self.softcap is None and not self.careful

    @property
    def fresh(self) -> bool:
        """Whether each block's P V has an accumulator of its own: as registers allow."""
        return self.exact or self.dim <= 128

    @property
    def stage_bits(self) -> int:
        """log2 of the stages of a ring."""
        return self.stages.bit_length() - 1

    @property
    def pages(self) -> int:
        """Pages of a block."""
        return self.block // self.page

    @property
    def dim_v(self) -> int:
        """Elements of a value head."""
        return self.dim

    @property
    def rows_zeroed(self) -> int:
        """Rows of V^T that the producer zeroes at a time: 16 bytes a lane, and the 8 rows of a swizzle."""
        return max(8, 512 // self.page)

    @property
    def panel(self) -> int:
        """Columns of K that lie together in shared memory: the widest swizzle."""
        return min(self.dim, 128)

    @property
    def panels(self) -> int:
        """Panels of a K row."""
        return self.dim // self.panel

    @property
    def piece(self) -> int:
        """Columns of the output that one product makes."""
        return min(self.dim, 64) if self.exact else self.dim

    @property
    def pieces(self) -> int:
        """Products that make the output of a block."""
        return self.dim // self.piece


class Schedule(NamedTuple):
    """The schedule as kernels read it."""

    memory: Any
    counters: Any
    lost: Any  # of each item, 1 + the program that has to compute it again; 0: none
    entries: Any


class Step(NamedTuple):
    """The sequences of a step."""

    query_starts: Any
    seq_lens: Any


@triton.jit
def _sequence(index, there, batch, capacity, rows_bound, num_decodes, c: tl.constexpr):
    """First row, rows and length of sequences `index`, and whether they end before they begin.

    No rows for those that decode or are not there.
    """
    begin = tl.load(batch.query_starts + index, mask=there, other=0)
    end = tl.load(batch.query_starts + index + 1, mask=there, other=0)
    begin = tl.minimum(tl.maximum(begin, 0), rows_bound)
    rows = tl.minimum(tl.maximum(end, 0), rows_bound) - begin
    length = tl.minimum(tl.maximum(tl.load(batch.seq_lens + index, mask=there, other=0), 0), capacity)
    decodes = (index < num_decodes) | ((num_decodes < 0) & (rows <= c.max_rows))
    return begin, tl.where(decodes, 0, rows), length, rows < 0


@triton.jit
def _tiles_beyond(blocks, rows, length, c: tl.constexpr):
    """How many tiles of a sequence reach beyond its first `blocks` blocks."""
    tiles = (rows + (c.tile_rows - 1)) // c.tile_rows
    short = blocks * c.block - (length - rows)  # rows that reach no further
    first = tl.minimum(tl.maximum(short, 0) // c.tile_rows, tiles - 1)
    return tl.where(blocks < 0, tiles, tl.where((length > blocks * c.block) & (tiles > 0), tiles - first, 0))


@triton.jit
def _pieces(tiles, programs, c: tl.constexpr):
    """How many tiles at the end of the list are cut, and in how many pieces each."""
    items = tiles * c.heads
    waves = items // programs
    left = (items - waves * programs + (c.heads - 1)) // c.heads
    n = 1 + tl.arange(0, _MOST_PIECES)
    rounds = (left * c.heads * n + (programs - 1)) // programs
    time = rounds.to(tl.float32) / n + _MERGE * n
    time = tl.where((n == 1) | (left * c.heads * n <= 2 * programs), time, 1e9)
    best = tl.argmin(time, 0) + 1
    if c.never_cut:
        best = best * 0 + 1
    return left, tl.where((waves < _MOST_WAVES) & (left > 0), best, 1)


@triton.jit(do_not_specialize=["size", "capacity", "rows_bound", "num_decodes", "programs"])
def plan_kernel(
    batch, schedule, size, capacity, rows_bound, num_decodes, programs,
    c: tl.constexpr, ENTRY: tl.constexpr, TILES: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Every program ranks TILES tiles against all: no atomics, so the list is the same every time.

    An entry is: sequence, first row, end of the sequence's rows, its length, tokens that the tile's first row sees,
    first and end block, pieces of the tile (0: nothing to do), their first slot, this piece, number of the cut tile.
    """
    # Sequence b has the tile numbers from query_starts[b] / tile_rows + b on: at least as many as it needs.
    t = tl.program_id(0) * TILES + tl.arange(0, TILES)
    j = tl.arange(0, SEQUENCES)
    b = tl.zeros([TILES], tl.int32) - 1
    for base in range(0, size, SEQUENCES):
        there = base + j < size
        begin, _, _, _ = _sequence(base + j, there, batch, capacity, rows_bound, num_decodes, c)
        first = begin // c.tile_rows + base + j
        b += tl.sum((there[None, :] & (first[None, :] <= t[:, None])).to(tl.int32), 1)
    begin, rows, length, descending = _sequence(b, b >= 0, batch, capacity, rows_bound, num_decodes, c)
    tile = t - (begin // c.tile_rows + b)
    exists = (b >= 0) & (tile * c.tile_rows < rows)
    seen = length - rows + tile * c.tile_rows + 1
    last = length - rows + tl.minimum((tile + 1) * c.tile_rows, rows)
    end_block = tl.where(exists, (tl.maximum(last, 0) + (c.block - 1)) // c.block, 0)
    first_block = end_block * 0
    if c.window > 0:
        first_block = tl.minimum(tl.maximum(seen - c.window, 0) // c.block, end_block)
    rank = tl.zeros([TILES], tl.int32)
    tiles = size * 0
    falls = size * 0
    for base in range(0, size, SEQUENCES):
        i = base + j
        others, other_rows, other_length, descends = _sequence(i, i < size, batch, capacity, rows_bound, num_decodes, c)
        falls += tl.sum(descends.to(tl.int32), 0)
        blocks = end_block[:, None] - (i[None, :] < b[:, None]).to(tl.int32)
        beyond = _tiles_beyond(blocks, other_rows[None, :], other_length[None, :], c)
        rank += tl.sum(tl.where(i[None, :] == b[:, None], 0, beyond), 1)
        tiles += tl.sum((other_rows + (c.tile_rows - 1)) // c.tile_rows, 0)
    rank += (rows + (c.tile_rows - 1)) // c.tile_rows - 1 - tile  # of a sequence, the last first
    # Row numbers that descend are no batch: their tiles could be more than there is room for. None is listed then.
    tiles = tl.where(falls > 0, 0, tiles)
    exists = exists & (falls == 0)
    cut, pieces = _pieces(tiles, programs, c)
    whole = tiles - cut
    n = tl.where(rank >= whole, pieces, 1)
    at = tl.where(rank >= whole, whole + (rank - whole) * pieces, rank)
    blocks = end_block - first_block
    share = tl.maximum((blocks + n - 1) // n, _LEAST_PIECE)
    used = tl.maximum((blocks + share - 1) // share, 1)
    for piece in range(0, pieces):
        there = exists & (piece < n)
        p = schedule.entries + (at + piece) * ENTRY
        end = end_block - piece * share
        tl.store(p, b, mask=there)
        tl.store(p + 1, begin + tile * c.tile_rows, mask=there)
        tl.store(p + 2, begin + rows, mask=there)
        tl.store(p + 3, length, mask=there)
        tl.store(p + 4, seen, mask=there)
        tl.store(p + 5, tl.where(piece == used - 1, first_block, tl.maximum(end - share, first_block)), mask=there)
        tl.store(p + 6, end, mask=there)
        tl.store(p + 7, tl.where(piece < used, used, 0), mask=there)
        tl.store(p + 8, (rank - whole) * pieces, mask=there)
        tl.store(p + 9, piece + t * 0, mask=there)
        tl.store(p + 10, rank - whole, mask=there)
    if tl.program_id(0) == 0:
        tl.store(schedule.memory, whole + cut * pieces)
        tl.store(schedule.memory + 1, 0)
        tl.store(schedule.memory + 2, 0)
        tl.store(schedule.memory + 3, 0)
    items = cut * c.heads * 2
    for base in range(tl.program_id(0) * TILES, items, tl.num_programs(0) * TILES):
        tl.store(schedule.counters + base + tl.arange(0, TILES), 0, mask=base + tl.arange(0, TILES) < items)
    items = (whole + cut * pieces) * c.heads
    for base in range(tl.program_id(0) * TILES, items, tl.num_programs(0) * TILES):
        tl.store(schedule.lost + base + tl.arange(0, TILES), 0, mask=base + tl.arange(0, TILES) < items)


@lru_cache(maxsize=1024)
def constants(spec: AttentionSpec) -> Constants:
    """Constants of prefill."""
    tile = hopper_tuning.prefill_tile(spec)
    exact, fp8_query = spec.precision == "exact", spec.query_dtype == "fp8_e4m3"
    return Constants(
        group=spec.group_size,
        pack=tile.pack,
        heads=spec.num_q_heads // tile.pack,
        dim=spec.head_dim,
        page=spec.page_size,
        block=tile.block,
        stages=tile.stages,
        exact=exact,
        query_terms=2 if exact and not fp8_query else 1,
        query_bits=8 if fp8_query else 16,
        max_rows=spec.max_query_len,
        window=spec.window or 0,
        softmax_scale=spec.scale,
        softcap=spec.softcap,
        lse=spec.lse,
        never_cut=spec.batch_invariant,
        careful=False,
    )


def schedule_of(spec: AttentionSpec, device: Device, memory: torch.Tensor) -> Schedule:
    """The schedule in `memory`, int32 of at least hopper_tuning.prefill_schedule_ints."""
    lost = HEADER + hopper_tuning.prefill_counters(spec, device)
    heads = constants(spec).heads
    entries = lost + hopper_tuning.prefill_lost(spec, (memory.numel() - lost) // (ENTRY + heads))
    return Schedule(memory, memory[HEADER:], memory[lost:], memory[entries:])


def prefill_plan(
    spec: AttentionSpec,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    query_starts: torch.Tensor,
    memory: torch.Tensor,
    num_decodes: int | None,
    max_query_len: int | None,
) -> None:
    """Write the schedule of a step into `memory`: int32, at least hopper_tuning.prefill_schedule_ints of them.

    The other arguments are what Attention.plan got. Reads nothing on the host; one launch.
    """
    batch = seq_lens.shape[0]
    if batch == 0:
        memory[:HEADER].zero_()  # no tile; rows of no sequence there may be
        return
    if batch == num_decodes:  # then prefill is not launched
        return
    capacity = page_table.shape[1] * spec.page_size
    grid, arguments = launch(
        spec, Step(query_starts, seq_lens), capacity, num_decodes, memory, device_of(seq_lens.device)
    )
    plan_kernel[grid](**arguments)


def launch(
    spec: AttentionSpec, step: Step, capacity: int, num_decodes: int | None, memory: torch.Tensor, device: Device
) -> tuple[tuple[int], dict[str, Any]]:
    """The grid and the arguments of the launch for a step of at most `capacity` tokens a sequence."""
    batch, c, schedule = step.seq_lens.shape[0], constants(spec), schedule_of(spec, device, memory)
    numbers = schedule.entries.shape[0] // ENTRY - hopper_tuning.prefill_pieces(device)  # of tiles, see plan_kernel
    return (triton.cdiv(numbers, _TILES),), {
        "batch": step,
        "schedule": schedule,
        "size": batch,
        "capacity": capacity,
        "rows_bound": (numbers - batch) * c.tile_rows,
        "num_decodes": -1 if num_decodes is None else num_decodes,
        "programs": device.num_sms,
        "c": c,
        "ENTRY": ENTRY,
        "TILES": _TILES,
        "SEQUENCES": _SEQUENCES,
        "num_warps": 4,
    }


def aot_cases(device: Device) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """The launches to compile ahead of time for `device` (octavo.testing.aot says what they are)."""
    if device.arch != "sm_90":
        return
    lens, starts, memory = (torch.empty(n, dtype=torch.int32, device="meta") for n in (64, 65, 1 << 16))
    for label, fields, num_decodes in (
        ("of 128", {}, None),
        ("of 64, 4 rows, batch invariant", {"head_dim": 64, "max_query_len": 4, "batch_invariant": True}, 8),
        (
            "exact of 256, pages of 32, window",
            {"head_dim": 256, "page_size": 32, "precision": "exact", "window": 300},
            None,
        ),
    ):
        spec = AttentionSpec(**{**LLAMA, **fields})
        yield label, plan_kernel, launch(spec, Step(starts, lens), 8192, num_decodes, memory, device)[1]
