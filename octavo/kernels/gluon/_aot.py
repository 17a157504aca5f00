"""What octavo/testing/aot.py compiles Hopper's kernels for: fields of specs, and calls over tensors without memory."""

from __future__ import annotations

from typing import Any

import torch

from ...calls import AttentionCall, CacheBytes
from ...formats import TORCH_DTYPES
from ...indexer_calls import SCALE_BYTES, IndexBytes, LogitsCall, PagedLogitsCall
from ...layouts import Strides
from ...spec import AttentionSpec

LLAMA: dict[str, Any] = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
FEATURES: dict[str, Any] = {
    "window": 300,
    "softcap": 30.0,
    "sinks": True,
    "lse": True,
    "query_dtype": "fp8",
    "out_dtype": "fp8",
}


def example_call(spec: AttentionSpec, batch: int = 64, pages: int = 64) -> AttentionCall:
    """A call as Attention.run makes it, of `batch` decodes over a cache of `pages` pages in the leaf layout."""
    rows, fp32 = batch * spec.max_query_len, torch.float32
    k_head, head = spec.page_size * spec.head_dim, spec.page_size * (spec.head_dim + spec.value_dim)
    page = spec.num_kv_heads * head
    pool = _meta(pages * page, dtype=torch.uint8)
    strides = Strides(pages, 0, page, head, spec.head_dim, k_head, page, head, spec.page_size)
    return AttentionCall(
        spec,
        _meta(rows, spec.num_q_heads, spec.head_dim, dtype=TORCH_DTYPES[spec.query_dtype]),
        CacheBytes(pool, pool, strides, _meta(dtype=fp32), _meta(dtype=fp32)),
        _meta(batch),
        _meta(batch, pages),
        _meta(batch + 1),
        _meta(dtype=fp32) if spec.query_dtype == "fp8_e4m3" else None,
        _meta(dtype=fp32) if spec.out_dtype == "fp8_e4m3" else None,
        _meta(spec.num_q_heads, dtype=fp32) if spec.sinks else None,
        _meta(1 << 20, dtype=torch.uint8),
        _meta(rows, spec.num_q_heads, spec.value_dim, dtype=TORCH_DTYPES[spec.out_dtype]),
        _meta(rows, spec.num_q_heads, dtype=fp32) if spec.lse else None,
        batch,
        None,
    )


def example_paged_logits(
    heads: int = 64,
    dim: int = 128,
    n: int = 1,
    page: int = 64,
    scales: str = "fp32",
    lens: int = 1,
    out: torch.dtype = torch.float32,
    fill: float | None = None,
) -> PagedLogitsCall:
    """Logits of 64 sequences of `n` query rows over their pages."""
    batch, context = 64, 32768
    cache = IndexBytes(_meta(64, page, 1, dim + SCALE_BYTES, dtype=torch.uint8), scales)
    return PagedLogitsCall(
        _meta(batch, n, heads, dim, dtype=torch.float8_e4m3fn),
        cache,
        _meta(batch * n, heads, dtype=torch.float32),
        _meta(batch) if lens == 1 else _meta(batch, n),
        _meta(batch, context // page),
        context,
        _meta(batch * n, context, dtype=out),
        fill,
    )


def example_logits(compressed: bool = False, fill: float | None = None) -> LogitsCall:
    """Logits of 2048 rows over one run of keys."""
    rows, keys, fp8 = 2048, 8192, torch.float8_e4m3fn
    return LogitsCall(
        _meta(rows, 64, 128, dtype=fp8),
        _meta(keys, 128, dtype=fp8),
        _meta(keys, dtype=torch.float32),
        _meta(rows, 64, dtype=torch.float32),
        _meta(rows),
        _meta(rows),
        _meta(rows, keys, dtype=torch.float32),
        fill,
        compressed,
    )


def _meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
