"""Decode context parallelism: ranks that share a KV head each hold every N-th token of a sequence.

Each rank attends with all their query heads over its own tokens, and the parts are weighed by their log-sum-exp. Token
g lies on rank g mod N, so the row at position p sees (p + N - rank) // N tokens here: one more for every N positions.
Rows whose positions are N apart are therefore one causal sequence over this rank's tokens, and a prompt is N of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Ranks(NamedTuple):
    """The group that shares sequences: vLLM's communicator, its size, and this rank's place."""

    group: Any
    size: int
    rank: int


class LocalBatch(NamedTuple):
    """What a rank attends to.

    Attributes:
        seq_lens, page_table, query_starts: as Attention.plan takes them, of this rank's tokens.
        place: int64 [T], where each row of the batch is among the rows of the local sequences; None: where it was.
    """

    seq_lens: torch.Tensor
    page_table: torch.Tensor
    query_starts: torch.Tensor
    place: torch.Tensor | None


def local_decodes(
    seq_lens: torch.Tensor, page_table: torch.Tensor, query_starts: torch.Tensor, ranks: Ranks, buffer: torch.Tensor
) -> LocalBatch:
    """Sequences of one row: as they are, with their tokens here; `buffer` int32 [>= B] is where graphs read those."""
    local = buffer[: seq_lens.shape[0]]
    torch.div(seq_lens + (ranks.size - 1 - ranks.rank), ranks.size, rounding_mode="floor", out=local)
    return LocalBatch(local, page_table, query_starts, None)


def local_rows(
    seq_lens: torch.Tensor, page_table: torch.Tensor, query_starts: torch.Tensor, ranks: Ranks, rows: int
) -> LocalBatch:
    """Sequences of any number of rows, each as N of rows N apart; nothing is read on the host."""
    n, device = ranks.size, seq_lens.device
    starts = query_starts.to(torch.int64)
    counts = (starts[1:] - starts[:-1])[:, None]  # [B, 1]
    first = torch.arange(n, device=device)  # the first row of each class
    have = (counts - first + n - 1) // n  # rows of each class [B, N]
    seen = (seq_lens[:, None] - counts + first + n - ranks.rank) // n  # tokens that the first of them sees
    lens = torch.where(have > 0, seen + have - 1, 0)
    begin = torch.cat([have.new_zeros(1), have.clamp_min(0).flatten().cumsum(0)])
    row = torch.arange(rows, device=device)
    owner = torch.searchsorted(starts[1:].contiguous(), row, right=True).clamp_max(seq_lens.shape[0] - 1)
    within = row - starts[owner]
    place = begin[owner * n + within % n] + within // n
    tables = page_table.repeat_interleave(n, 0)
    return LocalBatch(lens.flatten().to(torch.int32), tables, begin.to(torch.int32), place)


def combine(out: torch.Tensor, lse: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Parts over disjoint tokens as one: out [T, N Hq, Dv], natural lse [T, N Hq] -> this rank's heads [T, Hq, Dv]."""
    every = ranks.group.all_gather(lse[None].contiguous(), dim=0)
    total = torch.logsumexp(every, 0)
    share = torch.where(lse == float("-inf"), 0.0, torch.exp(lse - total))
    return ranks.group.reduce_scatter((out.float() * share[..., None]).to(out.dtype), dim=1)
