"""Sizes that follow from a spec and a device: so far the workspace of split-KV decode.

Plain functions, pure and monotone in the three bounds, so that a workspace sized for the largest batch holds every
smaller one.
"""

from __future__ import annotations

from .device import Device
from .spec import AttentionSpec

SPLIT_TOKENS = 256  # the fewest tokens worth a program of their own: below it the merge costs more than it hides
PROGRAMS_PER_SM = 4  # the most decode programs that an SM runs at once
UNIT_INTS = 4  # int32 of schedule a unit of work has: sequence, head, first tile, end tile
ALIGNMENT = 256  # bytes


def split_units(spec: AttentionSpec, device: Device, max_batch: int, max_context: int) -> int:
    """The most pieces that decode cuts a batch into; one piece is a span of tokens of one sequence and KV head.

    items = max_batch num_kv_heads. Each may be cut into ceil(context / SPLIT_TOKENS); but the batch is cut only while
    that fills idle programs, so there is at most one piece an item and one more for each program that the device
    runs at once. Not so with batch_invariant: there a row's cuts must not depend on the other rows.
    """
    context = max_context if spec.window is None else min(max_context, spec.window + spec.max_query_len - 1)
    items = max_batch * spec.num_kv_heads
    most = items * max(1, -(-context // SPLIT_TOKENS))
    if spec.batch_invariant:
        return most
    return min(most, items + device.num_sms * PROGRAMS_PER_SM)


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
