"""Sizes of Hopper's Gluon kernels that follow from a spec and a device: tiles, schedules, workspaces.

Plain functions and tables, pure; what sizes a workspace is monotone in the bounds, as in tuning.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .device import Device
from .spec import AttentionSpec
from .tuning import ALIGNMENT, most_tokens, padded

# Hopper's decode (kernels/gluon):

SHARED_MEMORY = 228 * 1024  # bytes of an SM; every program takes RESERVED of it
RESERVED = 1024
SCRATCH = 2048  # barriers, the exchange of column maxima and what the compiler takes
COLUMNS = 32  # query columns of one pass: more would not leave registers for the accumulators
TILE_BYTES = 32 * 1024  # of K and V^T: with smaller tiles the barriers of each cost bandwidth
SHORT_TILE_BYTES = 16 * 1024  # of windows of one or two such tiles
PIECE_TOKENS = 2048  # of a piece with batch_invariant


@dataclass(frozen=True)
class DecodeTile:
    """How Hopper's decode is cut.

    Attributes:
        columns, blocks: query columns (row, head of the group) of one pass over the cache, a power of two, and passes.
        pages, stages: pages of a tile; tiles of the ring of a program.
        piece: tiles of a piece with batch_invariant.
        programs_per_sm, max_registers: how many programs share an SM, and the registers of a thread that this leaves
            (None: all that the compiler wants).
    """

    columns: int
    blocks: int
    pages: int
    stages: int
    piece: int
    programs_per_sm: int
    max_registers: int | None


def decode_rows(spec: AttentionSpec, max_query_len: int | None) -> int:
    """Query rows that a sequence is given room for."""
    return spec.max_query_len if max_query_len is None else max(1, min(spec.max_query_len, max_query_len))


@lru_cache(maxsize=1024)
def decode_tile(spec: AttentionSpec, rows: int) -> DecodeTile:
    """Tile of Hopper's decode for sequences of at most `rows` query rows."""
    wanted = rows * spec.group_size
    columns = min(COLUMNS, max(4, 1 << (wanted - 1).bit_length()))
    dim, dim_v = padded(spec.head_dim), spec.value_dim
    # A window of a tile or two is over before it has waited for its loads: four programs an SM wait side by side.
    room = 2 * SHORT_TILE_BYTES // (dim + dim_v)
    short = spec.window is not None and spec.window + rows - 1 + spec.page_size <= room
    short = short and columns <= 8 and max(dim, dim_v) <= 64  # or registers are short
    tokens = max(64, spec.page_size)  # the tensor cores take 64 rows at least
    while 2 * tokens * (dim + dim_v) <= (SHORT_TILE_BYTES if short else TILE_BYTES):
        tokens *= 2

    def stages(programs: int) -> int:
        room = SHARED_MEMORY // programs - RESERVED - SCRATCH - 2 * columns * (dim + tokens)
        return room // (tokens * (dim + dim_v))

    # Two programs hide each other's barriers, if an SM has registers for their accumulators and memory for two tiles.
    programs = 4 if short else 2 if columns * max(dim, dim_v) <= COLUMNS * 128 and stages(2) >= 2 else 1
    return DecodeTile(
        columns=columns,
        blocks=-(-wanted // columns),
        pages=tokens // spec.page_size,
        stages=stages(programs),
        piece=PIECE_TOKENS // tokens,
        programs_per_sm=programs,
        max_registers={1: None, 2: 128, 4: 64}[programs],
    )


def decode_schedule_ints(spec: AttentionSpec, device: Device, max_batch: int) -> int:
    """int32 of the schedule that Hopper's plan makes for at most `max_batch` sequences, whatever its max_query_len."""
    tiles = [decode_tile(spec, rows) for rows in range(1, spec.max_query_len + 1)]
    programs = max(t.programs_per_sm for t in tiles) * device.num_sms
    items = max_batch * spec.num_kv_heads * max(t.blocks for t in tiles)
    return 2 * programs + 2 * max_batch + items + 4


def decode_partials(spec: AttentionSpec, device: Device, rows: int, max_batch: int, max_context: int) -> int:
    """The most partial results that a launch leaves, of columns x (head_dim_v + 1) floats each.

    They are the first and the last part of every program; with batch_invariant all pieces.
    """
    tile = decode_tile(spec, rows)
    if not spec.batch_invariant:
        return 2 * tile.programs_per_sm * device.num_sms
    pieces = -(-most_tokens(spec, max_context) // (tile.piece * tile.pages * spec.page_size))
    return max_batch * spec.num_kv_heads * tile.blocks * max(1, pieces)


# Hopper's prefill (kernels/gluon):

PACKED_ROWS = 128  # rows of a tile: query rows times query heads of one KV head
HEADER_INTS = 16  # int32 at the start of a schedule
ENTRY_INTS = 12  # int32 of schedule that a tile, or piece of one, has


@dataclass(frozen=True)
class PrefillTile:
    """How Hopper's prefill is cut.

    Attributes:
        pack: query heads of a tile of PACKED_ROWS rows: the power of two in the group size.
        block, stages: tokens of a block of keys; blocks of the ring of keys and of that of values.
    """

    pack: int
    block: int
    stages: int


@lru_cache(maxsize=1024)
def prefill_tile(spec: AttentionSpec) -> PrefillTile:
    """Tile of Hopper's prefill."""
    block, stages = _prefill_stages(spec)
    return PrefillTile(min(spec.group_size & -spec.group_size, 32), block, 4 if stages >= 4 else 2)


def prefill_fits(spec: AttentionSpec) -> bool:
    """Whether a tile's query and two blocks of keys and values have room in an SM's shared memory."""
    return _prefill_stages(spec)[1] >= 2


def _prefill_stages(spec: AttentionSpec) -> tuple[int, int]:
    """Tokens of a block of keys, and for how many of them, with their values, shared memory has room."""
    exact, fp8_query = spec.precision == "exact", spec.query_dtype == "fp8_e4m3"
    block = max(64 if exact and spec.head_dim > 128 else 128, spec.page_size)
    terms = 2 if exact and not fp8_query else 1
    query = PACKED_ROWS * spec.head_dim * ((1 if fp8_query else 2) + terms)
    piece = 64 if exact else spec.head_dim
    results = 64 * piece * 4 if piece <= 128 else 0  # on their way to whole rows
    room = SHARED_MEMORY - RESERVED - SCRATCH - query - results
    return block, room // (block * 2 * spec.head_dim)


def prefill_pieces(device: Device) -> int:
    """The most pieces that items of prefill are cut into: two a program."""
    return 2 * device.num_sms


def prefill_counters(spec: AttentionSpec, device: Device) -> int:
    """int32 of counters of items that are cut: two each; a multiple of 4, so that what follows is aligned."""
    return -(-2 * (device.num_sms + spec.num_q_heads) // 4) * 4


def prefill_schedule_ints(spec: AttentionSpec, device: Device, max_batch: int, max_query_tokens: int) -> int:
    """int32 of the schedule that Hopper's prefill_plan makes: header, counters, lost items, tiles and pieces."""
    rows = PACKED_ROWS // prefill_tile(spec).pack
    entries = max_query_tokens // rows + max_batch + 1 + prefill_pieces(device)
    ints = HEADER_INTS + prefill_counters(spec, device) + prefill_lost(spec, entries)
    return ints + ENTRY_INTS * entries


def prefill_lost(spec: AttentionSpec, entries: int) -> int:
    """int32 that say which of so many entries' items were lost: a multiple of 4, so that what follows is aligned."""
    return -(-entries * (spec.num_q_heads // prefill_tile(spec).pack) // 4) * 4


def prefill_parts(spec: AttentionSpec, device: Device) -> int:
    """fp32 numbers of the rows of all pieces."""
    return prefill_pieces(device) * PACKED_ROWS * spec.value_dim


def prefill_workspace_bytes(
    spec: AttentionSpec, device: Device, max_batch: int, max_query_tokens: int, max_context: int
) -> int:
    """Bytes of prefill's workspace: rows of pieces and their lse, then room for a schedule."""
    floats = prefill_parts(spec, device) + prefill_pieces(device) * PACKED_ROWS
    ints = prefill_schedule_ints(spec, device, max_batch, max_query_tokens)
    return -(-(floats + ints) * 4 // ALIGNMENT) * ALIGNMENT


def decode_workspace_bytes(
    spec: AttentionSpec, device: Device, max_batch: int, max_query_tokens: int, max_context: int
) -> int:
    """Bytes of Hopper's decode workspace: partial results of a launch, then room for a schedule."""
    partials = 0
    for rows in range(1, spec.max_query_len + 1):
        count = decode_partials(spec, device, rows, max_batch, max_context)
        partials = max(partials, count * decode_tile(spec, rows).columns * (spec.value_dim + 1) * 4)
    total = partials + decode_schedule_ints(spec, device, max_batch) * 4
    return -(-total // ALIGNMENT) * ALIGNMENT


# Hopper's indexer logits (kernels/gluon):

LOGITS_SCRATCH = 1024  # barriers and what the compiler takes
BLOCK_ROWS = 4  # query rows that share a tile of keys: what a head sum's columns have room for
LOGITS_REGISTERS = {1: None, 2: 128, 3: 80, 4: 64}  # of a thread of 256, by programs an SM


@dataclass(frozen=True)
class LogitsTile:
    """How Hopper's indexer logits are cut.

    Attributes:
        block_rows: query rows that share a tile of keys.
        columns, passes: heads (of one or more rows) of a product; products that make a tile's.
        switch: tiles that are worth what a program needs to begin with a block.
        tokens, stages: keys of a tile; tiles of a program's ring.
        query_stages: queries of a program's ring.
        programs_per_sm, max_registers: how many programs share an SM, and a thread's registers at launch.
    """

    block_rows: int
    columns: int
    passes: int
    switch: int
    tokens: int
    stages: int
    query_stages: int
    programs_per_sm: int
    max_registers: int | None


@lru_cache(maxsize=1024)
def logits_tile(heads: int, dim: int, rows: int, most_tokens: int | None, device: Device) -> LogitsTile:
    """Tile for `rows` query rows a sequence, all sequences of at most `most_tokens` tokens together; None: for so many
    rows that share one run of keys.
    """
    paged = most_tokens is not None
    most = min(BLOCK_ROWS, 256 // heads)
    block_rows = -(-rows // -(-rows // most)) if paged else most
    padded_rows = 1 << (block_rows - 1).bit_length()
    few = block_rows * heads <= 192  # then memory bounds it, and more programs hide more of what each waits for
    columns = heads * max(1, min((64 if few else 128) // heads, padded_rows))
    passes = -(-block_rows * heads // columns)
    programs = {1: 4, 2: 3}.get(passes, 2) if few else 2
    # Larger tiles have fewer barriers; smaller ones are under way on every SM sooner.
    tokens = 128 if programs == 4 and paged and most_tokens > 128 * programs * device.num_sms else 64
    room = SHARED_MEMORY // programs - RESERVED - LOGITS_SCRATCH - block_rows * heads * 24
    query = passes * columns * dim
    query_stages = 2 if room - 2 * query >= 256 * (dim + 4) else 1
    return LogitsTile(
        block_rows=block_rows,
        columns=columns,
        passes=passes,
        switch=0 if paged else 2,  # of few and long blocks the shares would be uneven
        tokens=tokens,
        stages=min(16, (room - query_stages * query) // (tokens * (dim + 4))),
        query_stages=query_stages,
        programs_per_sm=programs,
        max_registers=LOGITS_REGISTERS[programs],
    )
