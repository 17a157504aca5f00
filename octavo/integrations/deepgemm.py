"""DeepGEMM's indexer functions, by its names and signatures, over octavo's kernels: point an engine's import here.

    import octavo.integrations.deepgemm as deep_gemm

Both generations of the signatures are taken: fused_kv_cache or kv_cache, context_lens [B] or [B, next_n], queries alone
or with a scale that is None. Schedule metadata are made for callers that allocate by their shape, and ignored: octavo's
kernels find their shares from the lengths on the device. What only DeepGEMM has (FP4, `indices`) is refused in words.
Where it would raise an assertion for a shape, page size or next_n, octavo runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..device import device_of
from ..errors import InvalidInput, Unsupported
from ..indexer import IndexerCache, mqa_logits, paged_mqa_logits

__all__ = [
    "fp8_fp4_mqa_logits",
    "fp8_fp4_paged_mqa_logits",
    "fp8_mqa_logits",
    "fp8_paged_mqa_logits",
    "get_num_sms",
    "get_paged_mqa_logits_metadata",
]

_ROW = 256  # elements that a row of logits is padded to: rows start aligned


def _also_named(**names: str) -> Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]:
    """Lets a function's arguments be given by other versions' names: other name = name in the signature."""

    def wrap(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            return function(*args, **{names.get(name, name): value for name, value in kwargs.items()})

        return call

    return wrap


def get_num_sms() -> int:
    """Streaming multiprocessors of the current GPU; 0 without one."""
    return device_of(torch.device("cuda")).num_sms if torch.cuda.is_available() else 0


def get_paged_mqa_logits_metadata(
    context_lens: torch.Tensor, block_kv: int, num_sms: int, indices: torch.Tensor | None = None
) -> torch.Tensor:
    """int32 [num_sms + 1, 2] of zeros on the device of context_lens: `fp8_paged_mqa_logits` takes and ignores it."""
    _without_indices(indices)
    return torch.zeros((num_sms + 1, 2), dtype=torch.int32, device=context_lens.device)


@_also_named(fused_kv_cache="kv_cache", schedule_metadata="schedule_meta")
def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    schedule_meta: torch.Tensor | None = None,
    max_context_len: int | None = None,
    clean_logits: bool = False,
    logits_dtype: torch.dtype | torch.Tensor | None = torch.float32,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """`octavo.paged_mqa_logits` as DeepGEMM has it: logits [B * next_n, max_context_len].

    q e4m3 [B, next_n, H, D]; kv_cache uint8 [pages, P, 1, D + 4]; weights [B * next_n, H], the query's scale in them;
    context_lens int32 [B] or [B, next_n]; clean_logits: -inf beyond each row's length, which is otherwise unset.
    """
    if not isinstance(logits_dtype, torch.dtype):  # the older order: (..., clean_logits, indices)
        logits_dtype, indices = torch.float32, logits_dtype if indices is None else indices
    _without_indices(indices)
    if max_context_len is None:
        raise InvalidInput("max_context_len must be given", "None")
    if context_lens.dim() == 2 and context_lens.shape[1] == 1:
        context_lens = context_lens[:, 0] if q.shape[1] == 1 else context_lens.expand(-1, q.shape[1])
    return paged_mqa_logits(
        q,
        IndexerCache.view(kv_cache.view(torch.uint8)),
        weights.to(torch.float32),
        context_lens,
        block_table,
        max_context_len,
        out=_rows(q.shape[0] * q.shape[1], max_context_len, logits_dtype, q.device),
        fill=float("-inf") if clean_logits else None,
    )


@_also_named(
    ks="cu_seq_len_k_start", ke="cu_seq_len_k_end", cu_seqlen_ks="cu_seq_len_k_start", cu_seqlen_ke="cu_seq_len_k_end"
)
def fp8_mqa_logits(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    cu_seq_len_k_start: torch.Tensor,
    cu_seq_len_k_end: torch.Tensor,
    clean_logits: bool = True,
    max_seqlen_k: int = 0,
    logits_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """`octavo.mqa_logits` as DeepGEMM has it: logits [S, T], or [S, max_seqlen_k] compressed where that is not 0.

    q e4m3 [S, H, D]; kv: (e4m3 [T, D], fp32 [T]); weights [S, H]; row i sees keys from cu_seq_len_k_start[i] to before
    cu_seq_len_k_end[i]; clean_logits: -inf where a row sees no key, which is otherwise unset.
    """
    k, k_scale = kv
    return mqa_logits(
        q,
        k,
        k_scale.view(torch.float32).reshape(-1),
        weights.to(torch.float32),
        cu_seq_len_k_start,
        cu_seq_len_k_end,
        out=_rows(q.shape[0], max_seqlen_k or k.shape[0], logits_dtype, q.device),
        fill=float("-inf") if clean_logits else None,
        compressed=max_seqlen_k > 0,
    )


def fp8_fp4_paged_mqa_logits(q: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`fp8_paged_mqa_logits` of a query that comes as (q, scale), scale None."""
    return fp8_paged_mqa_logits(_query(q), *args, **kwargs)


def fp8_fp4_mqa_logits(q: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`fp8_mqa_logits` of a query that comes as (q, scale), scale None."""
    return fp8_mqa_logits(_query(q), *args, **kwargs)


def _query(q: Any) -> torch.Tensor:
    values, scale = q if isinstance(q, (tuple, list)) else (q, None)
    if scale is not None:
        raise Unsupported("FP4 indexer queries", ["the query must be e4m3, its scale in the weights; it has a scale"])
    return values


def _without_indices(indices: torch.Tensor | None) -> None:
    if indices is not None:
        raise Unsupported(
            "mqa logits with indices", ["each query row must belong to the sequence of its place; indices are given"]
        )


def _rows(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[rows, width], each row aligned."""
    return torch.empty((rows, -(-width // _ROW) * _ROW), dtype=dtype, device=device)[:, :width]
