"""octavo's indexer in transformers' models with DeepSeek sparse attention (deepseek_v32, glm_moe_dsa).

Each layer's indexer keeps its projections and rotations; what scores and chooses is octavo: keys and queries in e4m3
with a scale each, mqa_logits, topk_indices. The keys stay in the model's own cache, which holds a key's D e4m3 bytes
and the 4 of its scale in place of the 16- or 32-bit numbers, so beams, crops and static caches work as before. The
attention over what was chosen is the model's own. With a float32 cache the scores are the stock model's: it shows that
nothing but the format of keys and queries makes a difference.
"""

from __future__ import annotations

import sys
import types
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InvalidInput, Unsupported
from ..formats import FORMATS, quantise, token_scale
from ..indexer import fold_query_scale, mqa_logits, topk_indices
from ..reference.index_append import round_up_to_power_of_two
from ..spec import dtype_name, one_of

# Model type -> the rotation of its indexer, a function of its module.
INDEXED = {"deepseek_v32": "apply_rotary_pos_emb", "glm_moe_dsa": "apply_rotary_pos_emb_interleave"}
SCALES = ("fp32", "pow2")
E4M3 = FORMATS["fp8_e4m3"]

_enabled: weakref.WeakKeyDictionary[Any, IndexerHandle] = weakref.WeakKeyDictionary()  # by decoder


@dataclass(frozen=True)
class IndexerHandle:
    """What `enable_indexer` returns.

    Attributes:
        indexers: the replaced modules. cache_dtype, scale_format, backend: as asked.
    """

    indexers: tuple[Any, ...]
    cache_dtype: str
    scale_format: str
    backend: str | None

    @property
    def bytes_per_token(self) -> int:
        """Bytes that the keys of one token take in all layers' caches."""
        if self.cache_dtype == "float32":
            return sum(4 * indexer.head_dim for indexer in self.indexers)
        return sum(indexer.head_dim + 4 for indexer in self.indexers)


def enable_indexer(
    model: Any, cache_dtype: str = "fp8_e4m3", scale_format: str = "fp32", backend: str | None = None
) -> IndexerHandle:
    """Make the indexers of `model` score in FP8 and choose by octavo, until `disable_indexer`.

    model: a causal model of one of INDEXED in eval mode; an earlier call is replaced. A cache that was begun before
    cannot be continued. Layers that share an earlier layer's choice have no indexer and stay as they are.
    cache_dtype: of the keys: fp8_e4m3, or float32, over which scores are computed in fp32 by torch.
    scale_format: fp32, or pow2 (rounded up to a power of two, as DeepSeek's checkpoints are trained with).
    backend: gluon, triton or reference, which then runs or is refused; None: the first that may.

    Raises Unsupported for a model without such indexers and InvalidInput for an unknown name.
    """
    decoder = _decoder(model)
    kind = decoder.config.model_type
    if kind not in INDEXED:
        raise Unsupported(
            "this model's indexer", [f"the model type must be one of {', '.join(INDEXED)}; the model has {kind}"]
        )
    if model.training:
        raise InvalidInput("model must be in eval mode: model.eval()", "training mode")
    cache_dtype = dtype_name(cache_dtype)
    one_of("cache_dtype", cache_dtype, ("fp8_e4m3", "float32"))
    one_of("scale_format", scale_format, SCALES)
    disable_indexer(model)
    indexers = tuple(layer.self_attn.indexer for layer in decoder.layers if layer.self_attn.indexer is not None)
    handle = IndexerHandle(indexers, cache_dtype, scale_format, backend)
    for indexer in indexers:
        rotate = getattr(sys.modules[type(indexer).__module__], INDEXED[kind])
        indexer.forward = types.MethodType(_forward(handle, rotate), indexer)
    _enabled[decoder] = handle
    return handle


def disable_indexer(model: Any) -> None:
    """Undo `enable_indexer`; does nothing to a model that is not enabled."""
    handle = _enabled.pop(_decoder(model), None)
    for indexer in handle.indexers if handle else ():
        del indexer.forward


def _decoder(model: Any) -> Any:
    if not hasattr(model, "get_decoder"):
        raise InvalidInput("model must be a transformers model with a text decoder", type(model).__name__)
    return model.get_decoder()


def _forward(handle: IndexerHandle, rotate: Any) -> Any:
    """The forward of an indexer, with transformers' signature: int32 [B, S, min(top-k, T)] of chosen columns."""

    @torch.no_grad()
    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        q_resid: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
    ) -> torch.Tensor:
        cache = past_key_values if cache is None else cache  # the name that 5.17 has
        q, k = _rotated(self, hidden_states, q_resid, position_embeddings, rotate)
        exact = handle.cache_dtype == "float32"
        keys = k.float() if exact else _pack(k, handle.scale_format)
        if cache is not None:
            keys, added = cache.update_indexer(keys, self.layer_idx), keys
            if keys.dtype != added.dtype:
                raise InvalidInput("the cache must have been begun with octavo's indexer", dtype_name(keys.dtype))
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float()
        weights = fold_query_scale(weights, 1.0, self.n_heads**-0.5 * self.softmax_scale)
        seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask > torch.finfo(torch.half).min
        seen = seen.expand(*q.shape[:2], keys.shape[1])
        scores = _fp32_logits(q, keys, weights) if exact else _logits(q, keys, weights, seen, handle.backend)
        return _choose(scores, seen, self.index_topk, handle.backend)

    return forward


def _rotated(
    indexer: Any, hidden_states: torch.Tensor, q_resid: torch.Tensor, position_embeddings: Any, rotate: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [B, S, H, D] and keys [B, S, D] of the new tokens."""
    batch, rows = hidden_states.shape[:2]
    turned = indexer.qk_rope_head_dim
    q = indexer.wq_b(q_resid).view(batch, rows, indexer.n_heads, indexer.head_dim)
    k = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    cos, sin = position_embeddings
    q_turned, k_turned = rotate(q[..., :turned], k[..., :turned], cos, sin, unsqueeze_dim=2)
    k = torch.cat([k_turned, k[..., turned:]], dim=-1).squeeze(2)
    return torch.cat([q_turned, q[..., turned:]], dim=-1), k


def _pack(k: torch.Tensor, scale_format: str) -> torch.Tensor:
    """Keys [B, S, D] as uint8 [B, S, D + 4]: e4m3 bytes, then the fp32 scale."""
    scale = token_scale(k, E4M3)
    if scale_format == "pow2":
        scale = round_up_to_power_of_two(scale)
    return torch.cat([quantise(k, scale[..., None], E4M3), scale[..., None].view(torch.uint8)], dim=-1)


def _logits(
    q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, seen: torch.Tensor, backend: str | None
) -> torch.Tensor:
    """Logits fp32 [B, S, T] of q [B, S, H, D] over keys uint8 [B, T, D + 4], up to the last column of seen [B, S, T].

    The sequences' keys are one run after another.
    """
    batch, rows, _, dim = q.shape
    width = keys.shape[1]
    scale = token_scale(q, E4M3)  # [B, S, H]
    stored = quantise(q, scale[..., None], E4M3).view(E4M3.dtype)
    flat = keys.reshape(batch * width, dim + 4)
    starts = (torch.arange(batch, dtype=torch.int32, device=q.device) * width)[:, None].expand(batch, rows).flatten()
    logits = torch.empty((batch * rows, width), device=q.device)
    mqa_logits(
        stored.flatten(0, 1),
        flat[:, :dim].contiguous().view(E4M3.dtype),
        flat[:, dim:].contiguous().view(torch.float32)[:, 0],
        fold_query_scale(weights, scale).flatten(0, 1),
        starts,
        starts + _lengths(seen).flatten(),
        out=logits,
        fill=float("-inf"),
        compressed=True,
        backend=backend,
    )
    return logits.view(batch, rows, width)


def _fp32_logits(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same of keys fp32 [B, T, D], in fp32."""
    scores = (q.float() @ keys.transpose(-1, -2).unsqueeze(1)).relu_()
    return (weights.unsqueeze(-2) @ scores).squeeze(-2)


def _lengths(seen: torch.Tensor) -> torch.Tensor:
    """One more than the last column that each row sees: bool [B, S, T] -> int32 [B, S]."""
    column = torch.arange(1, seen.shape[-1] + 1, dtype=torch.int32, device=seen.device)
    return (seen * column).amax(-1).to(torch.int32)


def _choose(logits: torch.Tensor, seen: torch.Tensor, k: int, backend: str | None) -> torch.Tensor:
    """The k best columns of those that each row sees: int32 [B, S, min(k, T)].

    Where a row sees fewer than k, the rest of its choice repeats one: the caller makes a set of it.
    """
    width = logits.shape[-1]
    logits = logits.masked_fill(~seen, float("nan")).flatten(0, 1)  # NaN, as of padding, is never chosen
    chosen = topk_indices(logits, _lengths(seen).flatten(), min(k, width), backend=backend)
    chosen = torch.where(chosen < 0, chosen[:, :1].clamp_min(0), chosen)
    return chosen.view(*seen.shape[:2], -1)
