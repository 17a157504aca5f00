"""Sizes that follow from a spec and a device: tiles of the Triton kernels, and the workspace of split-KV decode.

Plain functions and tables, pure; what sizes a workspace is monotone in the three bounds, so that one sized for the
largest batch holds every smaller one.
"""

from __future__ import annotations

from dataclasses import dataclass

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
