"""Sizes that follow from a spec and a device: tiles of the Triton kernels, and the workspace of split-KV decode.

Plain functions and tables, pure; what sizes a workspace is monotone in the three bounds, so that one sized for the
largest batch holds every smaller one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .device import Device
from .spec import AttentionSpec

SPLIT_TOKENS = 256  # the fewest tokens worth a program of their own: below it the merge costs more than it hides
INVARIANT_SPLITS = 32  # the most pieces of a sequence with batch_invariant, be the GPU full or not
PROGRAMS_PER_SM = 4  # the most decode programs that an SM runs at once
UNIT_INTS = 4  # int32 of schedule a unit of work has: sequence, head, first tile, end tile
MAX_TILE_TOKENS = 128
AMPERE = ("sm_80", "sm_86")
WARPGROUP_DOT = ("sm_90", "sm_100", "sm_103")  # tensor cores that take operands from shared memory
ALIGNMENT = 256  # bytes


@dataclass(frozen=True)
class Tile:
    """A program's share: packed query rows, tokens a step, and Triton's num_warps, num_stages and maxnreg."""

    rows: int
    tokens: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def padded(dim: int) -> int:
    """The power of two that a tile's side has for `dim` elements."""
    return max(16, 1 << (dim - 1).bit_length())


def max_registers(spec: AttentionSpec, device: Device) -> int | None:
    """Registers of a thread; None leaves them to ptxas, which may spill a few bytes to fit one more program.

    Its choice was measured on sm_90, where the common tiles spill nothing.
    """
    return None if device.arch == "sm_90" and spec.scale_granularity != "token_head" else 255


def tile_tokens(spec: AttentionSpec, wanted: int) -> int:
    """Tokens of a tile, at most the power of two `wanted`; in the leaf layout a tile lies on one page."""
    if spec.layout == "leaf":
        while spec.page_size % wanted:
            wanted //= 2
    return wanted


def stages(spec: AttentionSpec, tokens: int, room: int, most: int) -> int:
    """Triton's num_stages for up to `most` tiles of K and V in flight in `room` bytes of shared memory.

    Two a tile where its page id is one number that is loaded ahead too.
    """
    tile = tokens * (padded(spec.head_dim) + padded(spec.value_dim)) * spec.kv_itemsize
    tiles = max(2, min(most, room // tile))
    return 2 * tiles if spec.page_size % tokens == 0 else tiles


def decode_tile(spec: AttentionSpec, device: Device, query_rows: int) -> Tile:
    """Tile of decode for sequences of at most `query_rows` rows."""
    dim = max(padded(spec.head_dim), padded(spec.value_dim))
    rows = min(padded(query_rows * spec.group_size), 64 if dim <= 128 else 32 if dim <= 256 else 16)
    tokens = tile_tokens(spec, 64 if dim <= 128 or (dim <= 256 and device.fp8_dot) else 32)
    # Few warps: what they hand each other through shared memory is what bounds decode, not the arithmetic.
    if dim > 128 or rows > 16 or not spec.fp8:
        warps = 8 if dim > 256 else 4
    elif device.arch in AMPERE or spec.scale_granularity == "token_head":
        warps = 4  # the arithmetic that decodes FP8, or scales, in registers too
    else:
        warps = 1 if dim <= 64 else 2
    return Tile(rows, tokens, warps, stages(spec, tokens, device.shared_memory // 4, 3), max_registers(spec, device))


def prefill_tile(spec: AttentionSpec, device: Device, fp8_dot: bool) -> Tile:
    """Tile of prefill; fp8_dot: its products are FP8."""
    dim = max(padded(spec.head_dim), padded(spec.value_dim))
    if device.arch in WARPGROUP_DOT:
        # 64 rows a warpgroup and two programs an SM: one's softmax runs beside another's products.
        rows, tokens, warps = (64, 64, 4) if dim <= 128 else (64, 64, 8) if dim <= 256 else (32, 16, 8)
    else:  # both operands in registers
        rows, tokens, warps = (64, 32, 4) if dim <= 128 else (32, 32, 4) if dim <= 256 else (16, 16, 8)
    if spec.scale_granularity == "token_head" or (device.arch in AMPERE and spec.fp8 and spec.page_size % tokens):
        tokens //= 2  # scales, or addresses and the arithmetic that decodes FP8, in registers beside them
    tokens = max(tokens, 32 if fp8_dot else 16)  # the depth of one instruction
    tokens = tile_tokens(spec, tokens)
    room = device.shared_memory // 2 - rows * padded(spec.head_dim) * 2 - tokens * dim * 4
    return Tile(rows, tokens, warps, stages(spec, tokens, room, 3), max_registers(spec, device))


def most_tokens(spec: AttentionSpec, max_context: int) -> int:
    """The most tokens of a sequence that decode goes over: all, or the window's and what is left of its tiles."""
    if spec.window is None:
        return max_context
    return min(max_context, spec.window + spec.max_query_len - 1 + 2 * MAX_TILE_TOKENS)


def sequence_splits(spec: AttentionSpec, max_context: int) -> int:
    """The most pieces of one sequence."""
    splits = max(1, -(-most_tokens(spec, max_context) // SPLIT_TOKENS))
    return min(splits, INVARIANT_SPLITS) if spec.batch_invariant else splits


def split_units(spec: AttentionSpec, device: Device, max_batch: int, max_context: int) -> int:
    """The most pieces that decode cuts a batch into; one piece is a span of tokens of one sequence and KV head.

    items = max_batch num_kv_heads. Each may be cut into ceil(context / SPLIT_TOKENS); but the batch is cut only while
    that fills idle programs, so there is at most one piece an item and one more for each program that the device
    runs at once. Not so with batch_invariant: there a row's cuts must not depend on the other rows.
    """
    items = max_batch * spec.num_kv_heads
    most = items * sequence_splits(spec, max_context)
    if spec.batch_invariant:
        return most
    return min(most, items + device.num_sms * PROGRAMS_PER_SM)


def decode_units(spec: AttentionSpec, device: Device, batch: int, context: int) -> int:
    """Pieces of sequences, each for all KV heads, that Triton's decode makes room for; at least one a sequence."""
    return max(batch, split_units(spec, device, batch, context) // spec.num_kv_heads)


def split_workspace_bytes(
    spec: AttentionSpec, device: Device, max_batch: int, max_query_tokens: int, max_context: int
) -> int:
    """Bytes of split-KV decode's workspace: fp32 partial outputs and their lse, schedule, one counter an item.

    A piece leaves group_size rows of head_dim_v + 1 floats for each query row of its sequence, of which a decode batch
    has at most min(max_query_len, max_query_tokens).
    """
    units = split_units(spec, device, max_batch, max_context)
    rows = spec.group_size * min(spec.max_query_len, max_query_tokens)
    total = units * (rows * (spec.value_dim + 1) * 4 + UNIT_INTS * 4) + max_batch * spec.num_kv_heads * 4
    return -(-total // ALIGNMENT) * ALIGNMENT


def no_workspace(spec: AttentionSpec, device: Device, max_batch: int, max_query_tokens: int, max_context: int) -> int:
    """0: a backend that keeps nothing between launches."""
    return 0


# Hopper's decode (kernels/gluon):

HOPPER_SHARED_MEMORY = 228 * 1024  # bytes of an SM; every program takes HOPPER_RESERVED of it
HOPPER_RESERVED = 1024
HOPPER_SCRATCH = 2048  # barriers, the exchange of column maxima and what the compiler takes
HOPPER_COLUMNS = 32  # query columns of one pass: more would not leave registers for the accumulators
HOPPER_TILE_BYTES = 32 * 1024  # of K and V^T: with smaller tiles the barriers of each cost bandwidth
HOPPER_SHORT_TILE_BYTES = 16 * 1024  # of windows of one or two such tiles
HOPPER_PIECE_TOKENS = 2048  # of a piece with batch_invariant


@dataclass(frozen=True)
class HopperDecodeTile:
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


def hopper_decode_rows(spec: AttentionSpec, max_query_len: int | None) -> int:
    """Query rows that a sequence is given room for."""
    return spec.max_query_len if max_query_len is None else max(1, min(spec.max_query_len, max_query_len))


@lru_cache(maxsize=1024)
def hopper_decode_tile(spec: AttentionSpec, rows: int) -> HopperDecodeTile:
    """Tile of Hopper's decode for sequences of at most `rows` query rows."""
    wanted = rows * spec.group_size
    columns = min(HOPPER_COLUMNS, max(4, 1 << (wanted - 1).bit_length()))
    dim, dim_v = padded(spec.head_dim), spec.value_dim
    # A window of a tile or two is over before it has waited for its loads: four programs an SM wait side by side.
    room = 2 * HOPPER_SHORT_TILE_BYTES // (dim + dim_v)
    short = spec.window is not None and spec.window + rows - 1 + spec.page_size <= room
    short = short and columns <= 8 and max(dim, dim_v) <= 64  # or registers are short
    tokens = max(64, spec.page_size)  # the tensor cores take 64 rows at least
    while 2 * tokens * (dim + dim_v) <= (HOPPER_SHORT_TILE_BYTES if short else HOPPER_TILE_BYTES):
        tokens *= 2

    def stages(programs: int) -> int:
        room = HOPPER_SHARED_MEMORY // programs - HOPPER_RESERVED - HOPPER_SCRATCH - 2 * columns * (dim + tokens)
        return room // (tokens * (dim + dim_v))

    # Two programs hide each other's barriers, if an SM has registers for their accumulators and memory for two tiles.
    programs = 4 if short else 2 if columns * max(dim, dim_v) <= HOPPER_COLUMNS * 128 and stages(2) >= 2 else 1
    return HopperDecodeTile(
        columns=columns,
        blocks=-(-wanted // columns),
        pages=tokens // spec.page_size,
        stages=stages(programs),
        piece=HOPPER_PIECE_TOKENS // tokens,
        programs_per_sm=programs,
        max_registers={1: None, 2: 128, 4: 64}[programs],
    )


def hopper_schedule_ints(spec: AttentionSpec, device: Device, max_batch: int) -> int:
    """int32 of the schedule that Hopper's plan makes for at most `max_batch` sequences, whatever its max_query_len."""
    tiles = [hopper_decode_tile(spec, rows) for rows in range(1, spec.max_query_len + 1)]
    programs = max(t.programs_per_sm for t in tiles) * device.num_sms
    items = max_batch * spec.num_kv_heads * max(t.blocks for t in tiles)
    return 2 * programs + 2 * max_batch + items + 4


def hopper_decode_partials(spec: AttentionSpec, device: Device, rows: int, max_batch: int, max_context: int) -> int:
    """The most partial results that a launch leaves, of columns x (head_dim_v + 1) floats each.

    They are the first and the last part of every program; with batch_invariant all pieces.
    """
    tile = hopper_decode_tile(spec, rows)
    if not spec.batch_invariant:
        return 2 * tile.programs_per_sm * device.num_sms
    pieces = -(-most_tokens(spec, max_context) // (tile.piece * tile.pages * spec.page_size))
    return max_batch * spec.num_kv_heads * tile.blocks * max(1, pieces)


# Hopper's prefill (kernels/gluon):

HOPPER_PACKED_ROWS = 128  # rows of a tile: query rows times query heads of one KV head
HOPPER_HEADER_INTS = 16  # int32 at the start of a schedule
HOPPER_ENTRY_INTS = 12  # int32 of schedule that a tile, or piece of one, has


@dataclass(frozen=True)
class HopperPrefillTile:
    """How Hopper's prefill is cut.

    Attributes:
        pack: query heads of a tile of HOPPER_PACKED_ROWS rows: the power of two in the group size.
        block, stages: tokens of a block of keys; blocks of the ring of keys and of that of values.
    """

    pack: int
    block: int
    stages: int


@lru_cache(maxsize=1024)
def hopper_prefill_tile(spec: AttentionSpec) -> HopperPrefillTile:
    """Tile of Hopper's prefill."""
    block, stages = _hopper_prefill_stages(spec)
    return HopperPrefillTile(min(spec.group_size & -spec.group_size, 32), block, 4 if stages >= 4 else 2)


def hopper_prefill_fits(spec: AttentionSpec) -> bool:
    """Whether a tile's query and two blocks of keys and values have room in an SM's shared memory."""
    return _hopper_prefill_stages(spec)[1] >= 2


def _hopper_prefill_stages(spec: AttentionSpec) -> tuple[int, int]:
    """Tokens of a block of keys, and for how many of them, with their values, shared memory has room."""
    exact, fp8_query = spec.precision == "exact", spec.query_dtype == "fp8_e4m3"
    block = max(64 if exact and spec.head_dim > 128 else 128, spec.page_size)
    terms = 2 if exact and not fp8_query else 1
    query = HOPPER_PACKED_ROWS * spec.head_dim * ((1 if fp8_query else 2) + terms)
    piece = 64 if exact else spec.head_dim
    results = 64 * piece * 4 if piece <= 128 else 0  # on their way to whole rows
    room = HOPPER_SHARED_MEMORY - HOPPER_RESERVED - HOPPER_SCRATCH - query - results
    return block, room // (block * 2 * spec.head_dim)


def hopper_prefill_pieces(device: Device) -> int:
    """The most pieces that items of prefill are cut into: two a program."""
    return 2 * device.num_sms


def hopper_prefill_counters(spec: AttentionSpec, device: Device) -> int:
    """int32 of counters of items that are cut: two each; a multiple of 4, so that what follows is aligned."""
    return -(-2 * (device.num_sms + spec.num_q_heads) // 4) * 4


def hopper_prefill_schedule_ints(spec: AttentionSpec, device: Device, max_batch: int, max_query_tokens: int) -> int:
    """int32 of the schedule that Hopper's prefill_plan makes: header, counters, lost items, tiles and pieces."""
    rows = HOPPER_PACKED_ROWS // hopper_prefill_tile(spec).pack
    entries = max_query_tokens // rows + max_batch + 1 + hopper_prefill_pieces(device)
    ints = HOPPER_HEADER_INTS + hopper_prefill_counters(spec, device) + hopper_prefill_lost(spec, entries)
    return ints + HOPPER_ENTRY_INTS * entries


def hopper_prefill_lost(spec: AttentionSpec, entries: int) -> int:
    """int32 that say which of so many entries' items were lost: a multiple of 4, so that what follows is aligned."""
    return -(-entries * (spec.num_q_heads // hopper_prefill_tile(spec).pack) // 4) * 4


def hopper_prefill_parts(spec: AttentionSpec, device: Device) -> int:
    """fp32 numbers of the rows of all pieces."""
    return hopper_prefill_pieces(device) * HOPPER_PACKED_ROWS * spec.value_dim


def hopper_prefill_workspace_bytes(
    spec: AttentionSpec, device: Device, max_batch: int, max_query_tokens: int, max_context: int
) -> int:
    """Bytes of prefill's workspace: rows of pieces and their lse, then room for a schedule."""
    floats = hopper_prefill_parts(spec, device) + hopper_prefill_pieces(device) * HOPPER_PACKED_ROWS
    ints = hopper_prefill_schedule_ints(spec, device, max_batch, max_query_tokens)
    return -(-(floats + ints) * 4 // ALIGNMENT) * ALIGNMENT


def hopper_workspace_bytes(
    spec: AttentionSpec, device: Device, max_batch: int, max_query_tokens: int, max_context: int
) -> int:
    """Bytes of Hopper's decode workspace: partial results of a launch, then room for a schedule."""
    partials = 0
    for rows in range(1, spec.max_query_len + 1):
        count = hopper_decode_partials(spec, device, rows, max_batch, max_context)
        partials = max(partials, count * hopper_decode_tile(spec, rows).columns * (spec.value_dim + 1) * 4)
    total = partials + hopper_schedule_ints(spec, device, max_batch) * 4
    return -(-total // ALIGNMENT) * ALIGNMENT


# Hopper's indexer logits (kernels/gluon):

HOPPER_LOGITS_SCRATCH = 1024  # barriers and what the compiler takes
HOPPER_BLOCK_ROWS = 4  # query rows that share a tile of keys: what a head sum's columns have room for
HOPPER_LOGITS_REGISTERS = {1: None, 2: 128, 3: 80, 4: 64}  # of a thread of 256, by programs an SM


@dataclass(frozen=True)
class HopperLogitsTile:
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
def hopper_logits_tile(heads: int, dim: int, rows: int, most_tokens: int | None, device: Device) -> HopperLogitsTile:
    """Tile for `rows` query rows a sequence, all sequences of at most `most_tokens` tokens together; None: for so many
    rows that share one run of keys.
    """
    paged = most_tokens is not None
    most = min(HOPPER_BLOCK_ROWS, 256 // heads)
    block_rows = -(-rows // -(-rows // most)) if paged else most
    padded_rows = 1 << (block_rows - 1).bit_length()
    few = block_rows * heads <= 192  # then memory bounds it, and more programs hide more of what each waits for
    columns = heads * max(1, min((64 if few else 128) // heads, padded_rows))
    passes = -(-block_rows * heads // columns)
    programs = {1: 4, 2: 3}.get(passes, 2) if few else 2
    # Larger tiles have fewer barriers; smaller ones are under way on every SM sooner.
    tokens = 128 if programs == 4 and paged and most_tokens > 128 * programs * device.num_sms else 64
    room = HOPPER_SHARED_MEMORY // programs - HOPPER_RESERVED - HOPPER_LOGITS_SCRATCH - block_rows * heads * 24
    query = passes * columns * dim
    query_stages = 2 if room - 2 * query >= 256 * (dim + 4) else 1
    return HopperLogitsTile(
        block_rows=block_rows,
        columns=columns,
        passes=passes,
        switch=0 if paged else 2,  # of few and long blocks the shares would be uneven
        tokens=tokens,
        stages=min(16, (room - query_stages * query) // (tokens * (dim + 4))),
        query_stages=query_stages,
        programs_per_sm=programs,
        max_registers=HOPPER_LOGITS_REGISTERS[programs],
    )
