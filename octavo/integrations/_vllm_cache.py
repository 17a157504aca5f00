"""vLLM's memory as a PagedCache: [blocks, heads, slots, content] with the bytes of one block and head together."""

from __future__ import annotations

from typing import Any

import torch

from ..cache import PagedCache
from ..errors import InvalidInput
from ..formats import FORMATS
from ..spec import AttentionSpec, dtype_name


def view_cache(spec: AttentionSpec, kv_cache: torch.Tensor, k_scale: Any = None, v_scale: Any = None) -> PagedCache:
    """The cache of a layer over `kv_cache` [B, Hk, P, D + Dv] as vLLM binds it; nothing is copied, scales neither.

    In the leaf layout a block and head is K [P, D], then V^T [Dv, P]; in hnd each slot is K, then V. Blocks and heads
    may be any multiple of 16 bytes apart. Raises InvalidInput for another shape, dtype or order.
    """
    content = spec.head_dim + spec.value_dim
    wanted = (spec.num_kv_heads, spec.page_size, content)
    if kv_cache.dim() != 4 or tuple(kv_cache.shape[1:]) != wanted:
        raise InvalidInput(f"the KV cache must be [blocks, {', '.join(map(str, wanted))}]", list(kv_cache.shape))
    if kv_cache.stride(3) != 1 or kv_cache.stride(2) != content:
        raise InvalidInput(
            "the KV cache must hold the slots of one block and head together", f"strides {kv_cache.stride()}"
        )
    format = FORMATS[spec.kv_dtype]
    if kv_cache.element_size() != format.dtype.itemsize:
        raise InvalidInput(f"the KV cache must hold {spec.kv_dtype}", dtype_name(kv_cache.dtype))
    stored = kv_cache if kv_cache.dtype == format.storage else kv_cache.view(format.storage)
    if not spec.fp8:
        k_scale = v_scale = None  # vLLM's layers have scales in any case
    if spec.layout == "hnd":
        return PagedCache.view(spec, stored[..., : spec.head_dim], stored[..., spec.head_dim :], k_scale, v_scale)
    blocks, heads, slots = stored.shape[:3]
    # A dimension of one has whatever stride its tensor was cut with, which kernels would take at its word.
    head = stored.stride(1) if heads > 1 else slots * content
    block = stored.stride(0) if blocks > 1 else heads * head
    start = int(stored.storage_offset())
    k = stored.as_strided((blocks, heads, slots, spec.head_dim), (block, head, spec.head_dim, 1), start)
    v_start = start + slots * spec.head_dim
    v = stored.as_strided((blocks, heads, spec.value_dim, slots), (block, head, slots, 1), v_start)
    return PagedCache.view(spec, k, v, k_scale, v_scale)
