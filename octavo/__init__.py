"""octavo: FP8 KV-cache attention for LLM serving.

    import octavo
    spec = octavo.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)      # what is asked for
    print(octavo.choose(spec, device="h200"))                                      # which kernel runs, and why no other
    cache = octavo.PagedCache.allocate(spec, num_pages=64, device="cpu")           # bytes, layout, scales in one object
    cache.append(k, v, slots)                                                      # quantise and write
    attn = octavo.Attention(spec, max_batch=8, max_query_tokens=512, max_context=4096, device="cpu")
    attn.plan(seq_lens, page_table, query_starts)                                  # once a step
    out = attn.run(q, cache)                                                       # once a layer

A model through it: octavo.integrations.transformers.enable(model, kv_cache_dtype="fp8_e4m3").
On the command line: octavo explain, octavo demo. docs/architecture.md says how the parts hang together.
"""

from __future__ import annotations

import importlib
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import Attention, attention, merge_states
    from .cache import PagedCache, expand_page_table
    from .choose import Choice, choose
    from .device import Device
    from .errors import InvalidInput, OctavoError, Unsupported
    from .indexer import IndexerCache, mqa_logits, paged_mqa_logits, topk_indices
    from .indexer_choose import choose_indexer
    from .spec import AttentionSpec, IndexerSpec

__version__ = "0.1.0"

_HOMES = {
    "Attention": "attention",
    "AttentionSpec": "spec",
    "Choice": "choose",
    "Device": "device",
    "IndexerCache": "indexer",
    "IndexerSpec": "spec",
    "InvalidInput": "errors",
    "OctavoError": "errors",
    "PagedCache": "cache",
    "Unsupported": "errors",
    "attention": "attention",
    "choose": "choose",
    "choose_indexer": "indexer_choose",
    "expand_page_table": "cache",
    "merge_states": "attention",
    "mqa_logits": "indexer",
    "paged_mqa_logits": "indexer",
    "topk_indices": "indexer",
}
__all__ = [
    "Attention",
    "AttentionSpec",
    "Choice",
    "Device",
    "IndexerCache",
    "IndexerSpec",
    "InvalidInput",
    "OctavoError",
    "PagedCache",
    "Unsupported",
    "attention",
    "choose",
    "choose_indexer",
    "expand_page_table",
    "merge_states",
    "mqa_logits",
    "paged_mqa_logits",
    "topk_indices",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    types.ModuleType.__setattr__(sys.modules[__name__], name, value)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class _Package(types.ModuleType):
    """Keeps `octavo.attention` and `octavo.choose` the functions: importing those submodules would rebind the names."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
