"""The indexer's torch.library ops, in the manner of ops.py: tensors, numbers and names; mutated tensors declared.

A backend is chosen where an op runs, of the tensors it is given: "auto" is the first that may, a name is that one or
`Unsupported`, before anything is compiled. What was chosen for one shape is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from .device import device_of
from .indexer_backends import FILES
from .indexer_calls import IndexAppendCall, IndexBytes, LogitsCall, PagedLogitsCall
from .indexer_choose import choose_operation
from .ops import kernel, nothing
from .spec import IndexerSpec, dtype_name

_library = torch.library.Library("octavo", "FRAGMENT")

_library.define(
    "index_append(Tensor k, Tensor slots, Tensor(a!) pages, Tensor(b!) counters, str scale_format, str backend) -> ()"
)
_library.define(
    "paged_mqa_logits(Tensor q, Tensor pages, Tensor weights, Tensor seq_lens, Tensor page_table, Tensor? schedule, "
    "Tensor(a!) out, SymInt max_context, float? fill, str scale_format, str backend) -> ()"
)
_library.define(
    "mqa_logits(Tensor q, Tensor k, Tensor k_scale, Tensor weights, Tensor starts, Tensor ends, Tensor(a!) out, "
    "float? fill, bool compressed, str backend) -> ()"
)
_library.define("topk_indices(Tensor logits, Tensor lens, Tensor(a!) out, str backend) -> ()")

index_append = torch.ops.octavo.index_append.default
paged_mqa_logits = torch.ops.octavo.paged_mqa_logits.default
mqa_logits = torch.ops.octavo.mqa_logits.default
topk_indices = torch.ops.octavo.topk_indices.default


@lru_cache(maxsize=1024)
def _chosen(operation: str, device: torch.device, backend: str, environment: str | None, **fields: Any) -> Callable:
    choice = choose_operation(IndexerSpec(**fields), device_of(device), operation, backend)
    function = "topk_indices" if operation == "topk" else operation
    return kernel(choice.backend, FILES[operation], function)


def _function(operation: str, device: torch.device, backend: str, **fields: Any) -> Callable:
    """The function of the backend that runs `operation` for an indexer of these fields."""
    return _chosen(operation, device, backend, os.environ.get("OCTAVO_BACKEND"), **fields)


def _cache_fields(cache: IndexBytes) -> dict[str, Any]:
    """What a cache says of an IndexerSpec."""
    low = (cache.pages.data_ptr() | cache.pages.stride(0)) & 15
    return {
        "head_dim": cache.head_dim,
        "page_size": cache.page_size,
        "scale_format": cache.scale_format,
        "page_alignment": low & -low or 16,
    }


def _index_append(
    k: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    counters: torch.Tensor,
    scale_format: str,
    backend: str,
) -> None:
    cache = IndexBytes(pages, scale_format)
    _function("index_append", k.device, backend, **_cache_fields(cache))(IndexAppendCall(k, slots, cache, counters))


def _paged_mqa_logits(
    q: torch.Tensor,
    pages: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    schedule: torch.Tensor | None,
    out: torch.Tensor,
    max_context: int,
    fill: float | None,
    scale_format: str,
    backend: str,
) -> None:
    cache = IndexBytes(pages, scale_format)
    call = PagedLogitsCall(q, cache, weights, seq_lens, page_table, max_context, out, fill, schedule)
    _, rows, heads, _ = q.shape
    fields = {"num_heads": heads, "max_query_len": rows, "out_dtype": dtype_name(out.dtype), **_cache_fields(cache)}
    _function("paged_mqa_logits", q.device, backend, **fields)(call)


def _mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    fill: float | None,
    compressed: bool,
    backend: str,
) -> None:
    call = LogitsCall(q, k, k_scale, weights, starts, ends, out, fill, compressed)
    fields = {"num_heads": q.shape[1], "head_dim": q.shape[2], "out_dtype": dtype_name(out.dtype)}
    _function("mqa_logits", q.device, backend, **fields)(call)


def _topk_indices(logits: torch.Tensor, lens: torch.Tensor, out: torch.Tensor, backend: str) -> None:
    _function("topk", logits.device, backend, top_k=out.shape[1])(logits, lens, out)


for _name, _implementation in (
    ("index_append", _index_append),
    ("paged_mqa_logits", _paged_mqa_logits),
    ("mqa_logits", _mqa_logits),
    ("topk_indices", _topk_indices),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{_name}", nothing, lib=_library)
