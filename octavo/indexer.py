"""The indexer of DeepSeek sparse attention: a cache of FP8 keys, the logits over it, and the choice of the k largest.

    logits[i, t] = k_scale[t] * sum_h relu(q[i, h] . k[t]) * weights[i, h]

The query is given as e4m3. Its scale and the model's constants belong in the weights: `fold_query_scale`. The rows of
one step go through append, paged_mqa_logits, topk_indices and token_slots. None of them reads anything on the host of
a GPU, but for the reference's append, which selects the live rows first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, overload

import torch

from . import indexer_ops as ops
from .cache import in_memory
from .device import torch_device
from .errors import InvalidInput
from .formats import FORMATS, check_tensors, dequantise
from .indexer_backends import INDEXER_BY_NAME
from .indexer_calls import SCALE_BYTES, IndexBytes
from .reference.index_append import decode_scale
from .reference.mqa_logits import row_lengths
from .spec import SCALE_FORMATS, dtype_name, one_of, positive

_OUT_DTYPES = (torch.float32, torch.bfloat16)


class IndexerCache:
    """Keys of one layer's indexer in pages, one scale a token. Made by `allocate` or `view`.

    Attributes:
        pages: uint8 [pages, P, 1, D + 4]: of each page P * D e4m3 bytes, then P scales of 4 bytes.
        scale_format: fp32 (amax / 448), pow2 (that, rounded up to a power of two) or ue8m0 (pow2's exponent byte, four
            times, in place of the fp32).
        counters: int32 [2]: rows skipped as their slot lies outside the pool (on a GPU), NaN elements written as 0.
    """

    def __init__(self, pages: torch.Tensor, scale_format: str = "fp32") -> None:
        one_of("scale_format", scale_format, SCALE_FORMATS)
        self.pages, self.scale_format = pages, scale_format
        self.num_pages, self.page_size = int(pages.shape[0]), int(pages.shape[1])
        self.head_dim = int(pages.shape[3]) - SCALE_BYTES
        self.device = pages.device
        self.counters = torch.zeros(2, dtype=torch.int32, device=pages.device)

    @classmethod
    def allocate(
        cls,
        num_pages: int,
        head_dim: int = 128,
        page_size: int = 64,
        scale_format: str = "fp32",
        device: Any = "cuda",
    ) -> IndexerCache:
        """A zeroed cache of `num_pages` pages on `device`.

        Raises InvalidInput for more pages than there is memory for, saying how many would fit.
        """
        for name, value in (("num_pages", num_pages), ("head_dim", head_dim), ("page_size", page_size)):
            positive(name, value)
        device = torch_device(device)
        page = (page_size, 1, head_dim + SCALE_BYTES)
        return in_memory(
            lambda: cls(torch.zeros((num_pages, *page), dtype=torch.uint8, device=device), scale_format),
            num_pages,
            math.prod(page),
            device,
        )

    @classmethod
    def view(cls, pages: torch.Tensor, scale_format: str = "fp32") -> IndexerCache:
        """A cache over memory that an engine owns: uint8 [pages, P, 1, D + 4] or [pages, P, D + 4]; nothing is copied.

        A page is contiguous; the page stride is any multiple of 4 bytes. Raises InvalidInput, naming what came.
        """
        check_tensors(pages=pages)
        if pages.dtype != torch.uint8:
            raise InvalidInput("pages must be uint8", dtype_name(pages.dtype))
        if pages.dim() == 3:
            pages = pages.unsqueeze(2)
        if pages.dim() != 4 or pages.shape[2] != 1 or pages.shape[3] <= SCALE_BYTES:
            raise InvalidInput("pages must be [pages, P, 1, D + 4] or [pages, P, D + 4]", list(pages.shape))
        if pages.stride(3) != 1 or pages.stride(1) != pages.shape[3]:
            raise InvalidInput("each page must be contiguous", f"strides {pages.stride()}")
        if pages.stride(0) % 4 or pages.data_ptr() % 4:
            raise InvalidInput(
                "the address and the page stride must be multiples of 4 bytes",
                f"address {pages.data_ptr() % 4} mod 4, page stride {pages.stride(0)}",
            )
        return cls(pages, scale_format)

    def append(self, k: torch.Tensor, slots: torch.Tensor, *, backend: str | None = None) -> None:
        """Quantise and write keys: k [T, D] of bfloat16, float16 or float32, slots int64 [T] = page * P + offset.

        k may have any strides and more rows than slots has. Slot -1 skips a row; a slot outside the pool is refused
        on a CPU (InvalidInput) and skipped and counted on a GPU. One launch. backend: as of `paged_mqa_logits`.
        """
        check_tensors(k=k, slots=slots)
        if slots.dtype != torch.int64 or slots.dim() != 1:
            raise InvalidInput("slots must be int64 [T]", _told(slots))
        if k.dim() != 2 or k.shape[0] < slots.shape[0] or k.shape[1] != self.head_dim:
            raise InvalidInput(f"k must be [{slots.shape[0]}, {self.head_dim}]", _told(k))
        if k.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise InvalidInput("k must be bfloat16, float16 or float32", _told(k))
        _same_device(self.device, k=k, slots=slots)
        ops.index_append(k, slots, self.pages, self.counters, self.scale_format, _backend(backend))

    def gather(self, page_table_row: torch.Tensor, n: int) -> torch.Tensor:
        """The first n keys of the sequence whose page ids are page_table_row [max pages]: fp32 [n, D], dequantised."""
        check_tensors(page_table_row=page_table_row)
        if page_table_row.dim() != 1:
            raise InvalidInput("page_table_row must be [max pages]", list(page_table_row.shape))
        capacity = page_table_row.shape[0] * self.page_size
        if n < 0 or n > capacity:
            raise InvalidInput(f"n must be in [0, {capacity}]", n)
        cache = IndexBytes(self.pages, self.scale_format)
        t = torch.arange(n, device=self.device)
        page, offset = page_table_row.to(torch.int64)[t // self.page_size], t % self.page_size
        scale = decode_scale(cache.scales()[page, offset], self.scale_format)
        return dequantise(cache.keys()[page, offset], scale[:, None], FORMATS["fp8_e4m3"])

    def __repr__(self) -> str:
        return (
            f"IndexerCache({self.num_pages} pages of {self.page_size}, head_dim {self.head_dim}, "
            f"scales {self.scale_format}, {self.device})"
        )


def fold_query_scale(weights: torch.Tensor, q_scale: torch.Tensor | float, constant: float = 1.0) -> torch.Tensor:
    """weights [R, H] times the query's scale [R, H], [R, 1] or a number, times `constant` -> fp32 [R, H].

    Since relu(s x) = s relu(x) for s > 0, a query stored as q / s gives the logits of q once s is in the weights.
    `constant` is what else multiplies a model's logits (head_dim ** -0.5, num_heads ** -0.5).
    """
    return weights.to(torch.float32) * q_scale * constant


def paged_mqa_logits(
    q: torch.Tensor,
    index: IndexerCache,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    max_context: int,
    *,
    plan: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    fill: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Logits of n query rows a sequence over its pages of `index`: [B * n, max_context], fp32.

    Args:
        q: e4m3 [B, n, H, D]; weights: fp32 [B * n, H], the query's scale in them (`fold_query_scale`).
        seq_lens: int32 [B] or [B, n], any strides. With [B], row j of n sees seq_len - n + 1 + j tokens.
        page_table: int32 [>= B, max pages]; beyond a sequence's pages it may hold anything. A token whose page id is
            not in the pool has logit -inf.
        max_context: columns of the result; lengths beyond it, or beyond the page table, end there.
        plan: taken for the sake of DeepGEMM's signature; no kernel of octavo needs one.
        out: fp32 or bf16 [B * n, >= max_context] to write into; None allocates.
        fill: written beyond each row's length; None leaves `out` alone there (unset memory where it is allocated).
        backend: gluon, triton or reference, which then runs or is refused; None: the first that may.
    """
    check_tensors(q=q, weights=weights, seq_lens=seq_lens, page_table=page_table)
    if q.dim() != 4:
        raise InvalidInput("q must be e4m3 [B, n, H, D]", _told(q))
    batch, n, heads, _ = q.shape
    positive("n, the query rows of q [B, n, H, D],", n)
    positive("H, the heads of q [B, n, H, D],", heads)
    _check_query(q, weights, index.head_dim, batch * n, heads)
    if tuple(seq_lens.shape) not in ((batch,), (batch, n)) or seq_lens.dtype != torch.int32:
        raise InvalidInput(f"seq_lens must be int32 [{batch}] or [{batch}, {n}]", _told(seq_lens))
    if page_table.dim() != 2 or page_table.shape[0] < batch or page_table.dtype != torch.int32:
        raise InvalidInput(f"page_table must be int32 [{batch}, max pages]", _told(page_table))
    _check_count("max_context", max_context)
    _same_device(index.device, q=q, weights=weights, seq_lens=seq_lens, page_table=page_table)
    backend = _backend(backend)
    out = _output(out, batch * n, max_context, q.device)
    scale_format = index.scale_format
    ops.paged_mqa_logits(
        q, index.pages, weights, seq_lens, page_table, plan, out, max_context, fill, scale_format, backend
    )
    return out


@overload
def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    fill: float | None = None,
    compressed: bool = False,
    max_bytes: None = None,
    backend: str | None = None,
) -> torch.Tensor: ...


@overload
def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    out: None = None,
    fill: float | None = None,
    compressed: bool = False,
    max_bytes: int,
    backend: str | None = None,
) -> Iterator[tuple[slice, torch.Tensor]]: ...


def mqa_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    k_scale: torch.Tensor,
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    fill: float | None = None,
    compressed: bool = False,
    max_bytes: int | None = None,
    backend: str | None = None,
) -> torch.Tensor | Iterator[tuple[slice, torch.Tensor]]:
    """Logits of S query rows over T keys, row i over starts[i] <= t < ends[i]: fp32 [S, T]; the form of a prefill.

    Args:
        q: e4m3 [S, H, D]; k: e4m3 [T, D]; k_scale: fp32 [T]; weights: fp32 [S, H] (`fold_query_scale`).
        starts: int32 [S]; where a row's range begins, which is cut to the keys.
        ends: int32 [S]; where it ends; it is empty where ends <= starts.
        out: fp32 or bf16 [S, >= T] to write into, any width where compressed; None allocates.
        fill: written where a row sees no key; None leaves `out` alone there (unset memory where it is allocated).
        compressed: column t - starts[i] instead of t, so that a row is as wide as its range. Columns beyond out's width
            are dropped. Without `out` the longest range is read on the host, which waits for a GPU.
        max_bytes: give the logits a few rows at a time: the result is an iterator of (rows, logits), `logits` being
            those of q[rows] in one buffer of at most so many bytes that the next step overwrites.
        backend: gluon, triton or reference, which then runs or is refused; None: the first that may.
    """
    check_tensors(q=q, k=k, k_scale=k_scale, weights=weights, starts=starts, ends=ends)
    if q.dim() != 3:
        raise InvalidInput("q must be e4m3 [S, H, D]", _told(q))
    rows, heads, dim = q.shape
    _check_query(q, weights, dim, rows, heads)
    if k.dim() != 2 or k.shape[1] != dim or k.dtype != torch.float8_e4m3fn:
        raise InvalidInput(f"k must be fp8_e4m3 [T, {dim}]", _told(k))
    if tuple(k_scale.shape) != (k.shape[0],) or k_scale.dtype != torch.float32:
        raise InvalidInput(f"k_scale must be float32 [{k.shape[0]}]", _told(k_scale))
    for name, t in (("starts", starts), ("ends", ends)):
        if tuple(t.shape) != (rows,) or t.dtype != torch.int32:
            raise InvalidInput(f"{name} must be int32 [{rows}]", _told(t))
    _same_device(q.device, k=k, k_scale=k_scale, weights=weights, starts=starts, ends=ends)
    backend = _backend(backend)
    width = _width(k.shape[0], starts, ends, out) if compressed else k.shape[0]
    if max_bytes is None:
        out = _output(out, rows, width, q.device)
        ops.mqa_logits(q, k, k_scale, weights, starts, ends, out, fill, compressed, backend)
        return out
    if out is not None:
        raise InvalidInput("max_bytes allocates its own buffer: out must be None with it")
    step = max_bytes // (4 * max(1, width))
    if step < 1:
        raise InvalidInput(f"max_bytes must hold one row of {width} logits, {4 * width} bytes", max_bytes)

    buffer = torch.empty((min(step, rows), width), dtype=torch.float32, device=q.device)

    def logits_of(part: slice) -> torch.Tensor:
        logits = buffer[: part.stop - part.start]
        ops.mqa_logits(q[part], k, k_scale, weights[part], starts[part], ends[part], logits, fill, compressed, backend)
        return logits

    parts = (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))
    return ((part, logits_of(part)) for part in parts)


def topk_indices(
    logits: torch.Tensor,
    lens: torch.Tensor,
    k: int,
    *,
    out: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The k largest of the first lens[i] logits of each row: int32 [R, k], in order of index, -1 where there are fewer.

    logits [R, N] fp32 or bf16, of any row stride; lens int32 [R] or [B, n] with B n = R. Ties go to the lower index;
    NaN is never chosen. `out` int32 [R, k] to write into; None allocates.
    """
    check_tensors(logits=logits, lens=lens)
    if logits.dim() != 2 or logits.dtype not in _OUT_DTYPES:
        raise InvalidInput("logits must be float32 or bfloat16 [R, N]", _told(logits))
    rows = logits.shape[0]
    if lens.dtype != torch.int32 or lens.numel() != rows:
        raise InvalidInput(f"lens must be int32 of {rows} elements", _told(lens))
    _check_count("k", k)
    if out is None:
        out = torch.empty((rows, k), dtype=torch.int32, device=logits.device)
    elif tuple(out.shape) != (rows, k) or out.dtype != torch.int32:
        raise InvalidInput(f"out must be int32 [{rows}, {k}]", _told(out))
    _same_device(logits.device, lens=lens, out=out)
    ops.topk_indices(logits, lens.reshape(rows), out, _backend(backend))
    return out


def token_slots(indices: torch.Tensor, page_table: torch.Tensor, page_size: int, n: int = 1) -> torch.Tensor:
    """Where chosen tokens lie: indices int32 [B * n, k] -> slots int64 [B * n, k], page * page_size + offset.

    page_table int32 [>= B, max pages]; n query rows share a sequence's row of it. -1 stays -1; so does an index beyond
    the page table, and a token whose page id is negative.
    """
    if indices.dim() != 2 or n < 1 or indices.shape[0] % n or indices.shape[0] // n > page_table.shape[0]:
        raise InvalidInput(f"indices must be [B * {n}, k] with B <= {page_table.shape[0]}", _told(indices))
    row = torch.arange(indices.shape[0], device=indices.device)[:, None] // n
    index = indices.to(torch.int64)
    page_of = index // page_size
    known = (index >= 0) & (page_of < page_table.shape[1])
    page = page_table[row, torch.where(known, page_of, 0)].to(torch.int64)
    return torch.where(known & (page >= 0), page * page_size + index % page_size, -1)


def visible_lengths(seq_lens: torch.Tensor, n: int) -> torch.Tensor:
    """The lens that `topk_indices` takes for logits of `paged_mqa_logits`: seq_lens [B] or [B, n] -> int32 [B * n]."""
    return row_lengths(seq_lens, n).flatten().to(torch.int32)


def _backend(name: str | None) -> str:
    """What the ops take: "auto", or a name that there is."""
    if name is None or name == "auto":
        return "auto"
    one_of("backend", name, tuple(INDEXER_BY_NAME))
    return name


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or value < 1:
        raise InvalidInput(f"{name} must be a positive integer", repr(value))


def _check_query(q: torch.Tensor, weights: torch.Tensor, dim: int, rows: int, heads: int) -> None:
    if q.dtype != torch.float8_e4m3fn or q.shape[-1] != dim:
        raise InvalidInput(f"q must be fp8_e4m3 of head_dim {dim}", _told(q))
    if tuple(weights.shape) != (rows, heads) or weights.dtype != torch.float32:
        raise InvalidInput(f"weights must be float32 [{rows}, {heads}]", _told(weights))


def _output(out: torch.Tensor | None, rows: int, width: int, device: torch.device) -> torch.Tensor:
    if out is None:
        return torch.empty((rows, width), dtype=torch.float32, device=device)
    if out.dim() != 2 or out.shape[0] != rows or out.shape[1] < width or out.dtype not in _OUT_DTYPES:
        raise InvalidInput(f"out must be float32 or bfloat16 [{rows}, >= {width}]", _told(out))
    _same_device(device, out=out)
    return out


def _width(keys: int, starts: torch.Tensor, ends: torch.Tensor, out: torch.Tensor | None) -> int:
    """Columns of compressed logits: the caller's, or those of the longest range."""
    if out is not None:
        return int(out.shape[-1])
    lengths = ends.clamp(0, keys) - starts.clamp(0, keys)
    return max(0, int(lengths.max())) if lengths.numel() else 0


def _same_device(device: torch.device, **tensors: torch.Tensor) -> None:
    for name, t in tensors.items():
        if t.device != device:
            raise InvalidInput(f"{name} must be on {device}", t.device)


def _told(t: torch.Tensor) -> str:
    return f"{dtype_name(t.dtype)} {list(t.shape)}"
