"""Calls over tensors without memory, of specs whose kernels octavo/testing/aot.py holds to a bound ahead of time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from ...calls import AttentionCall, CacheBytes
from ...formats import FORMATS, TORCH_DTYPES
from ...layouts import Strides
from ...spec import AttentionSpec

SPECS = {
    "leaf 128": AttentionSpec(32, 8, 128),
    "leaf 128 exact": AttentionSpec(32, 8, 128, precision="exact"),
    "leaf 64 window sinks": AttentionSpec(64, 8, 64, window=128, sinks=True),
    "leaf 256": AttentionSpec(16, 8, 256),
    "leaf 192/128": AttentionSpec(32, 32, 192, 128),
    "leaf 128 page 128, 4 rows": AttentionSpec(64, 8, 128, page_size=128, max_query_len=4),
    "nhd 128": AttentionSpec(32, 8, 128, layout="nhd"),
    "nhd 128 page 16": AttentionSpec(32, 8, 128, layout="nhd", page_size=16),
    "nhd 128 e5m2 token_head": AttentionSpec(
        32, 8, 128, layout="nhd", kv_dtype="fp8_e5m2", scale_granularity="token_head"
    ),
    "hnd 80 bf16 softcap": AttentionSpec(32, 32, 80, layout="hnd", kv_dtype="bfloat16", softcap=50.0),
    "nhd 512": AttentionSpec(8, 1, 512, layout="nhd"),
    "nhd 128 bf16": AttentionSpec(32, 8, 128, layout="nhd", kv_dtype="bfloat16"),
}


def example_strides(spec: AttentionSpec, pages: int) -> Strides:
    """Strides of a cache of `pages` pages as `PagedCache.allocate` makes it, K and V from the start of their pools."""
    heads, size, dim, dim_v = spec.num_kv_heads, spec.page_size, spec.head_dim, spec.value_dim
    if spec.layout == "leaf":
        head = size * (dim + dim_v)
        return Strides(pages, 0, heads * head, head, dim, size * dim, heads * head, head, size)
    k_page, v_page = heads * size * dim, heads * size * dim_v
    if spec.layout == "nhd":
        return Strides(pages, 0, k_page, dim, heads * dim, 0, v_page, dim_v, heads * dim_v)
    return Strides(pages, 0, k_page, size * dim, dim, 0, v_page, size * dim_v, dim_v)


def example_calls(query_rows: int, batch: int = 3, pages: int = 64) -> Iterator[tuple[str, AttentionCall]]:
    """Labelled calls of `batch` sequences of `query_rows` rows, over caches as `PagedCache.allocate` makes them."""
    empty = partial(torch.empty, device="meta")
    rows = batch * query_rows
    for label, spec in SPECS.items():
        heads, size, dim, dim_v = spec.num_kv_heads, spec.page_size, spec.head_dim, spec.value_dim
        shape = (pages, heads, size) if spec.scale_granularity == "token_head" else ()
        scale = empty(shape, dtype=torch.float32) if spec.fp8 else None
        pool = empty(pages * heads * size * (dim + dim_v), dtype=FORMATS[spec.kv_dtype].storage)
        yield (
            label,
            AttentionCall(
                spec=spec,
                q=empty((rows, spec.num_q_heads, dim), dtype=TORCH_DTYPES[spec.query_dtype]),
                cache=CacheBytes(pool, pool, example_strides(spec, pages), scale, scale),
                seq_lens=empty(batch, dtype=torch.int32),
                page_table=empty((batch, 4096), dtype=torch.int32),
                query_starts=empty(batch + 1, dtype=torch.int32),
                q_scale=None,
                out_scale=None,
                sinks=empty(spec.num_q_heads, dtype=torch.float32) if spec.sinks else None,
                workspace=empty(1 << 26, dtype=torch.uint8),
                out=empty((rows, spec.num_q_heads, dim_v), dtype=TORCH_DTYPES[spec.out_dtype]),
                lse=None,
                num_decodes=None,
                max_query_len=None,
            ),
        )
