"""Exact attention over stored FP8 bytes, written apart from octavo's own: what a kernel may be judged by.

A twin of the model follows the one with the paged cache: it reads the same bytes back from the pages and attends to
them by a plain softmax in fp64, masked by transformers. What the two differ by is what octavo's attention adds to the
loss of the format itself.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import InvalidInput
from ..reference.attention import gather

NAME = "octavo_exact"


def enable_exact(model: Any) -> None:
    """Make `model` (a copy of its own: its config changes) attend by this file's function."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, exact_attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    model.set_attn_implementation(NAME)


def exact_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """softmax(q k^T scaling + mask) v in fp64, in transformers' attention signature.

    query [B, Hq, T, D], key [B, Hk, S, D], value [B, Hk, S, Dv], attention_mask [B or 1, 1, T, S] added to the scores
    -> ([B, T, Hq, Dv] in the query's dtype, None). Keywords: ``softcap`` (Gemma 2), ``s_aux`` [Hq] (gpt-oss's sinks).
    """
    batch, heads, rows, dim = query.shape
    kv_heads, seen = key.shape[1:3]
    group = heads // kv_heads
    # The heads of a group are folded into the rows: one matrix product per KV head, and no copy of K per query head.
    q = query.to(torch.float64).reshape(batch, kv_heads, group * rows, dim)
    k, v = key.to(torch.float64), value.to(torch.float64)
    scores = (q @ k.transpose(-1, -2)).mul_(dim**-0.5 if scaling is None else scaling).unflatten(2, (group, rows))
    softcap = kwargs.get("softcap")
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores += attention_mask[..., :seen].unsqueeze(2).to(torch.float64)
    sinks = kwargs.get("s_aux")
    if sinks is not None:
        column = sinks.to(torch.float64).view(1, kv_heads, group, 1, 1).expand(batch, -1, -1, rows, 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., :seen]
    out = (weights.flatten(2, 3) @ v).view(batch, heads, rows, -1)
    return out.transpose(1, 2).contiguous().to(query.dtype), None


def following_cache(followed: Any) -> Any:
    """A transformers cache whose layers hold what octavo's cache `followed` stored, read back from its pages.

    Its model is to be fed each chunk after the model that writes to `followed`. The keys and values that its own model
    makes are dropped: rounded anew, they would differ from the stored ones wherever two computations fall on different
    sides of a rounding boundary, and after some layers hardly one would be the same. K and V are fp32 [B, Hk, S, D].
    """
    from transformers.cache_utils import Cache, DynamicLayer

    # The class must not close over `followed`: classes are freed late, and with them the pages would be.
    class FollowingLayer(DynamicLayer):
        def __init__(self, cache: Any, index: int) -> None:
            super().__init__()
            self.cache, self.index = cache, index

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            seen = self.get_seq_length()
            return super().update(*stored(self.cache, self.index, seen, seen + key_states.shape[2]))

    return Cache(layers=[FollowingLayer(followed, index) for index in range(len(followed.layers))])


def stored(cache: Any, layer: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [begin, end) of every sequence of octavo's transformers cache: k [B, Hk, n, D], v [B, Hk, n, Dv] in fp32.

    The cache must have been written up to `end`, without padding.
    """
    pages, step = cache.pool.caches[layer], cache.sequences.current
    if step is None or any(length != end for length in step.lengths):
        raise InvalidInput(f"the followed cache must hold {end} tokens of every sequence", step and step.lengths)
    found = [gather(pages.spec, pages.bytes(), row, begin, end, torch.float32) for row in step.page_table]
    return torch.stack([k for k, _, _ in found]), torch.stack([v for _, v, _ in found])
