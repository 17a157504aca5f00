"""SGLang's KV pool as octavo's caches: its bytes, viewed. Imports sglang: load it inside a function.

SGLang's pool has a K and a V buffer a layer, [slots, Hk, D] each. A page of P slots is as many bytes in the leaf
layout, so the same memory, its page 0 (the dummy that padding is written to) included, is viewed as leaf pages; page
tables and slots stay what they are. What else reads slots of the pool would read other bytes: that is closed.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from ..cache import PagedCache
from ..errors import Unsupported
from ..spec import AttentionSpec
from ._sglang_names import CLOSED


def pools_of(pool: Any) -> list[MHATokenToKVPool]:
    """The pools with buffers: one, or those of full and of windowed layers; empty for another kind.

    The exact classes: a subclass is another layout.
    """
    pools = [pool.full_kv_pool, pool.swa_kv_pool] if type(pool) is SWAKVPool else [pool]
    return pools if all(type(p) is MHATokenToKVPool for p in pools) else []


def is_windowed(pool: Any, layer_id: int) -> bool:
    """Whether the layer's pages are numbered by the windowed pool, which is smaller and has numbers of its own."""
    return type(pool) is SWAKVPool and pool.layers_mapping[layer_id][1]


def view(pool: Any, layer_id: int, spec: AttentionSpec, k_scale: Any, v_scale: Any) -> PagedCache:
    """The layer's K and V in `spec.layout`; nothing is copied."""
    k, v = pool.get_kv_buffer(layer_id)
    pages = k.shape[0] // spec.page_size
    slots, heads = pages * spec.page_size, spec.num_kv_heads
    if spec.layout == "leaf":
        k_shape = (pages, heads, spec.page_size, spec.head_dim)
        v_shape = (pages, heads, spec.value_dim, spec.page_size)
    else:
        k_shape = (pages, spec.page_size, heads, spec.head_dim)
        v_shape = (pages, spec.page_size, heads, spec.value_dim)
    scales = {"k_scale": k_scale, "v_scale": v_scale} if spec.fp8 else {}
    return PagedCache.view(spec, k[:slots].view(k_shape), v[:slots].view(v_shape), **scales)


def close(pool: Any) -> None:
    """Make the pool refuse in words what would read or write its leaf pages as if they were slots."""
    for owner in {id(p): p for p in (pool, *pools_of(pool))}.values():
        for name in CLOSED:
            if hasattr(owner, name):
                setattr(owner, name, _refusal(type(owner).__name__, name))


def _refusal(owner: str, name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise Unsupported(
            f"{owner}.{name}",
            [f"the pool's pages are in octavo's leaf layout; {name} reads or writes slots of [heads, head_dim]"],
            "--kv-cache-dtype auto, whose pages keep SGLang's layout",
        )

    return refuse


def page_table(
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    page_size: int,
    to_windowed: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Write a snapshot of the requests' pages to `out`, int32 [B, max pages].

    req_to_token: [requests, tokens] slots; only the first of each page is read. to_windowed: the windowed pool's slot
    of each slot; None: as it is. What lies beyond a request's tokens may be anything that is a slot.
    """
    firsts = req_to_token[:, ::page_size]
    if to_windowed is None:
        torch.index_select(firsts, 0, requests, out=out)
    else:
        out.copy_(to_windowed[firsts.index_select(0, requests)])
    out.div_(page_size, rounding_mode="floor")
