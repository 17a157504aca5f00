"""octavo as an attention backend of vLLM: selection, a layer's cache over vLLM's memory, and its attention.

Selection answers with octavo's own reasons. A cache keeps the layer's own scale tensors: what loading weights again or
waking from sleep writes into them is what the kernels read.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import vllm.envs as envs
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType

from ..attention import Attention
from ..cache import PagedCache
from ..errors import Unsupported
from ..spec import AttentionSpec
from ._vllm_cache import view_cache
from ._vllm_ranks import Ranks, combine
from ._vllm_releases import (
    KERNEL_BLOCKS,
    PREFERRED_BLOCK,
    decode_rows,
    kernel_block,
    precision,
    release_of,
    unknown_release,
    version,
)
from ._vllm_step import OctavoMetadata, OctavoMetadataBuilder
from ._vllm_support import KV_DTYPES, check, configuration_reasons, device_here, layer_spec

_release = release_of(version())
if _release is None:
    raise ImportError(unknown_release(version()))
_VALIDATE = inspect.signature(AttentionBackend.validate_configuration)
NOT_IMPLEMENTED = {  # what models may ask of a layer beyond what selection told
    "use_alibi_sqrt": "needs no ALiBi bias; found use_alibi_sqrt",
    "chunk_lookback": "needs no chunked-local mask; found chunk_lookback",
}


class OctavoImpl(AttentionImpl[OctavoMetadata]):
    """One layer: writes its new keys and values, and attends over its cache.

    Raises Unsupported with every reason for a layer that octavo has no kernel for, before weights are loaded.
    """

    supports_dcp = True
    can_return_lse_for_decode = True
    # The query is quantised, or split into two e4m3 terms, inside the kernels: nothing is lost to a static scale.
    supports_quant_query_input = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **extra: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        _refuse(attn_type, kv_cache_dtype, extra)
        config = get_current_vllm_config_or_none()
        self.ranks = ranks_of(self.dcp_world_size)
        shared = 1 if self.ranks is None else self.ranks.size
        self.spec = layer_spec(
            (num_heads * shared, self.num_kv_heads),
            head_size,
            torch.get_default_dtype(),
            kv_cache_dtype,
            softmax_scale=self.scale,
            window=sliding_window,
            sinks=sinks is not None,
            softcap=logits_soft_cap or None,
            max_query_len=1 if config is None or shared > 1 else decode_rows(config),
            lse=shared > 1,
            precision=precision(config),
            batch_invariant=envs.VLLM_BATCH_INVARIANT,
            alibi=alibi_slopes is not None,
        )
        check(self.spec, device_here())
        self._owner: Any = None
        self._viewed: tuple[Any, Any, Any] = (None, None, None)
        self._cache: PagedCache | None = None

    def settle(self, spec: AttentionSpec, owner: Any) -> None:
        """What only a builder knows: pages and scale granularity, and the layer whose cache and scales are read."""
        if self.spec != spec or self._owner is not owner:
            self._cache = None
        self.spec, self._owner = spec, owner

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Sinks in a dtype that the kernels read."""
        if self.sinks is not None and self.sinks.dtype not in (torch.float32, torch.bfloat16):
            self.sinks = self.sinks.detach().float()

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write the first slot_mapping.shape[0] rows of key and value; slot -1 is padding."""
        if kv_cache.numel() and slot_mapping.shape[0]:
            self.cache(kv_cache).append(key, value, slot_mapping)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: OctavoMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the batch that was planned, into the rows of `output` that are not padding."""
        if output_scale is not None or output_block_scale is not None:
            raise Unsupported("fused output quantisation", ["needs an output of 16 bits; found a scale for it"])
        if attn_metadata is None:  # profiling: there is no cache yet
            return output.fill_(0)
        rows = attn_metadata.num_actual_tokens
        if rows == 0:
            return output
        attention = attn_metadata.kinds[layer.layer_name].at(attn_metadata.step)
        if self.ranks is not None:
            output[:rows] = self._attend_with_others(attention, query[:rows], kv_cache, attn_metadata.place)
            return output
        q_scale = layer._q_scale if query.dtype == torch.float8_e4m3fn else None
        attention.run(query[:rows], self.cache(kv_cache), q_scale=q_scale, sinks=self.sinks, out=output[:rows])
        return output

    def _attend_with_others(
        self, attention: Attention, query: torch.Tensor, kv_cache: torch.Tensor, place: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of all the group's query heads over this rank's tokens, combined into this rank's heads."""
        assert self.ranks is not None
        q = self.ranks.group.all_gather(query.contiguous(), dim=1)
        if place is not None:
            rows = torch.empty_like(q)
            rows[place] = q
            q = rows
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out = attention.run(q, self.cache(kv_cache), lse=lse)
        if place is not None:
            out, lse = out[place], lse[place]
        return combine(out, lse, self.ranks)

    def cache(self, kv_cache: torch.Tensor) -> PagedCache:
        """The layer's cache over vLLM's memory; viewed again when vLLM binds other memory or other scales."""
        owner = self._owner
        now = (kv_cache, owner._k_scale, owner._v_scale)
        if self._cache is None or any(a is not b for a, b in zip(now, self._viewed, strict=True)):
            self._cache = view_cache(self.spec, *now)
            self._viewed = now
        return self._cache


class OctavoBackend(_release.memory, AttentionBackend):
    """What vLLM selects as CUSTOM."""

    supported_dtypes = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes = list(KV_DTYPES)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """A member of vLLM's enumeration of backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[OctavoImpl]:
        """The layers."""
        return OctavoImpl

    @staticmethod
    def get_builder_cls() -> type[OctavoMetadataBuilder]:
        """The plans."""
        return OctavoMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Pages that the kernels take; vLLM splits a larger block into the largest that divides it."""
        return list(KERNEL_BLOCKS)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The block size where the user names none."""
        return PREFERRED_BLOCK

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Whether a page divides it."""
        return block_size is None or kernel_block(block_size) is not None

    @classmethod
    def supports_sink(cls) -> bool:
        """Learned logits per head that join the softmax."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """A window that ends at the row itself."""
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        """A scale for each KV head."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """A row's result does not depend on the others."""
        return True

    @classmethod
    def validate_configuration(cls, *args: Any, **kwargs: Any) -> list[str]:
        """octavo's reasons against the configuration, word for word; empty if it is supported."""
        asked = _VALIDATE.bind(*args, **kwargs)
        asked.apply_defaults()
        return configuration_reasons(dict(asked.arguments), get_current_vllm_config_or_none())


def ranks_of(size: int) -> Ranks | None:
    """The ranks that share a layer's sequences; None where each has its own."""
    if size == 1:
        return None
    from vllm.distributed.parallel_state import get_dcp_group

    group = get_dcp_group()
    return Ranks(group, size, group.rank_in_group)


def _refuse(attn_type: str, kv_cache_dtype: str, extra: dict[str, Any]) -> None:
    """Raise Unsupported for what no AttentionSpec says."""
    reasons = []
    if attn_type != AttentionType.DECODER:
        reasons.append(f"needs decoder attention over a KV cache; found {attn_type}")
    if kv_cache_dtype not in KV_DTYPES:
        reasons.append(f"needs kv_cache_dtype {', '.join(KV_DTYPES)}; found {kv_cache_dtype}")
    for name, given in extra.items():
        if given is not None and given is not False and given != -1:
            reasons.append(NOT_IMPLEMENTED.get(name, f"needs no {name}, which octavo does not know; found {given!r}"))
    if reasons:
        raise Unsupported("octavo cannot run this attention layer of vLLM's", reasons)
