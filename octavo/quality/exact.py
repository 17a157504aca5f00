"""Exact attention over FP8 numbers, written apart from octavo's own attention: what a kernel may be judged by.

K and V are rounded by ``octavo.formats``, kept in transformers' own growing cache, and attended to by a plain softmax in
fp64. Masks come from transformers. A model run this way loses what the format loses and nothing else; what octavo's
paged attention loses beyond it is octavo's.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import formats

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
    -> ([B, T, Hq, Dv] in the query's dtype, None). Keywords: ``softcap`` (Gemma 2), ``s_aux`` [Hq], the sinks (gpt-oss).
    """
    batch, heads, rows, dim = query.shape
    kv_heads = key.shape[1]
    q = query.to(torch.float64).unflatten(1, (kv_heads, heads // kv_heads))
    k = key.to(torch.float64).unsqueeze(2)
    v = value.to(torch.float64).unsqueeze(2)
    scores = (q @ k.transpose(-1, -2)) * (dim**-0.5 if scaling is None else scaling)  # [B, Hk, G, T, S]
    softcap = kwargs.get("softcap")
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is not None:
        scores = scores + attention_mask[..., : key.shape[-2]].unsqueeze(2).to(torch.float64)
    sinks = kwargs.get("s_aux")
    if sinks is not None:
        column = sinks.to(torch.float64).view(1, kv_heads, -1, 1, 1).expand(batch, -1, -1, rows, 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)[..., : key.shape[-2]]
    out = (weights @ v).flatten(1, 2)  # [B, Hq, T, Dv]
    return out.transpose(1, 2).contiguous().to(query.dtype), None


def rounded_cache(kv_dtype: str, scales: list[tuple[torch.Tensor | None, torch.Tensor | None]]) -> Any:
    """A transformers cache whose layer i returns K and V as an FP8 cache of `kv_dtype` with `scales[i]` holds them.

    scales: (k_scale, v_scale) per layer, each None (1), a scalar, or [Hk]. K and V come back in fp32 [B, Hk, S, D].
    """
    from transformers.cache_utils import Cache, DynamicLayer

    format = formats.FORMATS[kv_dtype]

    def rounded(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        if scale is not None and scale.ndim == 1:
            scale = scale.view(-1, 1, 1)
        return formats.dequantise(formats.quantise(x, scale, format), scale, format)

    class RoundedLayer(DynamicLayer):
        def __init__(self, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> None:
            super().__init__()
            self.k_scale, self.v_scale = k_scale, v_scale

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return super().update(rounded(key_states, self.k_scale), rounded(value_states, self.v_scale))

    return Cache(layers=[RoundedLayer(*pair) for pair in scales])
