"""What a kernel is handed: one object for attention, one for append. Every backend's functions take these."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .layouts import Strides
from .spec import AttentionSpec


@dataclass(frozen=True)
class CacheBytes:
    """A cache's memory: flat pools of storage elements and the strides into them.

    Attributes:
        k_pool, v_pool: 1-D; v_pool is k_pool where both lie in one allocation.
        strides: addresses in storage elements.
        k_scale, v_scale: fp32 [] (tensor), [Hk] (head) or [pages, Hk, P] (token_head); None is 1.
    """

    k_pool: torch.Tensor
    v_pool: torch.Tensor
    strides: Strides
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    def k_view(self, spec: AttentionSpec) -> torch.Tensor:
        """K as [pages, Hk, P, D], whatever the layout."""
        s = self.strides
        shape = (s.num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
        return self.k_pool.as_strided(
            shape, (s.k_page, s.k_head, s.k_slot, 1), self.k_pool.storage_offset() + s.k_offset
        )

    def v_view(self, spec: AttentionSpec) -> torch.Tensor:
        """V as [pages, Hk, P, Dv], or [pages, Hk, Dv, P] in token columns for the leaf layout."""
        s = self.strides
        rows, columns = (spec.value_dim, spec.page_size) if spec.layout == "leaf" else (spec.page_size, spec.value_dim)
        shape = (s.num_pages, spec.num_kv_heads, rows, columns)
        return self.v_pool.as_strided(
            shape, (s.v_page, s.v_head, s.v_slot, 1), self.v_pool.storage_offset() + s.v_offset
        )


@dataclass(frozen=True)
class AppendCall:
    """Write tokens into a cache.

    Attributes:
        spec: shapes and format of the cache.
        k, v: [>= T, Hk, D] and [>= T, Hk, Dv], any strides; v is None for MLA.
        slots: int64 [T]: page * P + offset; -1 skips the row.
        cache: where to; its token_head scales are written too.
        counters: int32 [2]: rows skipped because their slot lies outside the pool, NaN elements written as 0.
    """

    spec: AttentionSpec
    k: torch.Tensor
    v: torch.Tensor | None
    slots: torch.Tensor
    cache: CacheBytes
    counters: torch.Tensor


@dataclass(frozen=True)
class AttentionCall:
    """Attend from ragged query rows to paged keys and values.

    Attributes:
        spec: what is computed.
        q: [T, Hq, D]; out: [T, Hq, Dv]; lse: fp32 [T, Hq] or None.
        cache: keys and values.
        seq_lens: int32 [B]; page_table: int32 [>= B, max pages]; query_starts: int32 [B + 1].
        q_scale: fp32 [] or [Hq] of an e4m3 query; out_scale: fp32 [] of an e4m3 output; None is 1.
        sinks: fp32 or bf16 [Hq] or None.
        workspace: uint8, at least the backend's workspace_bytes; what it holds is of no meaning before a launch.
        num_decodes: the first so many sequences are decodes, where the caller knows; None: decided on the device, by
            a sequence's rows being at most spec.max_query_len.
        max_query_len: most rows of any sequence of this call, where the caller knows.
        schedule, prefill_schedule: int32, what the plans of the decode and of the prefill backend wrote for this step;
            None: it has none, or makes its own.
    """

    spec: AttentionSpec
    q: torch.Tensor
    cache: CacheBytes
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    query_starts: torch.Tensor
    q_scale: torch.Tensor | None
    out_scale: torch.Tensor | None
    sinks: torch.Tensor | None
    workspace: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor | None
    num_decodes: int | None
    max_query_len: int | None
    schedule: torch.Tensor | None = None
    prefill_schedule: torch.Tensor | None = None
