"""What an indexer kernel is handed: one object an operation. Every backend's functions take these."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SCALE_BYTES = 4  # of one token, in every scale format


@dataclass(frozen=True)
class IndexBytes:
    """An index cache's memory.

    Attributes:
        pages: uint8 [pages, P, 1, D + 4]: of each page P * D e4m3 bytes, then P scales of 4 bytes. A page is
            contiguous; the shape is how engines allocate it, and says nothing about where an element lies.
        scale_format: fp32, pow2 (fp32 that is a power of two) or ue8m0 (the exponent byte, four times).
    """

    pages: torch.Tensor
    scale_format: str

    @property
    def num_pages(self) -> int:
        return self.pages.shape[0]

    @property
    def page_size(self) -> int:
        return self.pages.shape[1]

    @property
    def head_dim(self) -> int:
        return self.pages.shape[3] - SCALE_BYTES

    def keys(self) -> torch.Tensor:
        """e4m3 bytes as uint8 [pages, P, D]."""
        shape, strides = (self.num_pages, self.page_size, self.head_dim), (self.pages.stride(0), self.head_dim, 1)
        return self.pages.as_strided(shape, strides, self.pages.storage_offset())

    def scales(self) -> torch.Tensor:
        """Scale bytes as uint8 [pages, P, 4]."""
        shape, strides = (self.num_pages, self.page_size, SCALE_BYTES), (self.pages.stride(0), SCALE_BYTES, 1)
        start = self.pages.storage_offset() + self.page_size * self.head_dim
        return self.pages.as_strided(shape, strides, start)


@dataclass(frozen=True)
class IndexAppendCall:
    """Write keys into an index cache.

    Attributes:
        k: [>= T, D], any strides.
        slots: int64 [T]: page * P + offset; -1 skips the row.
        cache: where to.
        counters: int32 [2]: rows skipped because their slot lies outside the pool, NaN elements written as 0.
    """

    k: torch.Tensor
    slots: torch.Tensor
    cache: IndexBytes
    counters: torch.Tensor


@dataclass(frozen=True)
class PagedLogitsCall:
    """Logits of n query rows a sequence over its pages.

    Attributes:
        q: e4m3 [B, n, H, D]; weights: fp32 [B * n, H].
        cache: keys and their scales.
        seq_lens: int32 [B] or [B, n], any strides; page_table: int32 [>= B, max pages].
        max_context: columns that may be written.
        out: [B * n, >= max_context], fp32 or bf16.
        fill: written to every column below max_context that a row does not see; None leaves them alone.
        schedule: int32, what a backend's plan wrote for this step; None: it has none.
    """

    q: torch.Tensor
    cache: IndexBytes
    weights: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor
    max_context: int
    out: torch.Tensor
    fill: float | None
    schedule: torch.Tensor | None = None


@dataclass(frozen=True)
class LogitsCall:
    """Logits of query rows over one run of keys, each row over its own range.

    Attributes:
        q: e4m3 [S, H, D]; k: e4m3 [T, D]; k_scale: fp32 [T]; weights: fp32 [S, H].
        starts, ends: int32 [S]: row i sees keys starts[i] <= t < ends[i].
        out: [S, columns], fp32 or bf16. Key t is column t, or t - starts[i] where compressed.
        fill: written to every column that a row does not see; None leaves them alone.
    """

    q: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor
    weights: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor
    out: torch.Tensor
    fill: float | None
    compressed: bool
