"""The indexer of DeepSeek-V3.2 in vLLM without DeepGEMM: octavo's logits behind vLLM's own function names.

vLLM's `fp8_fp4_mqa_logits`, `fp8_fp4_paged_mqa_logits` and `get_paged_mqa_logits_metadata` call what DeepGEMM put into
three variables of their module; octavo puts its own there. Only the indexer is told that DeepGEMM is there: linear and
expert layers go on without. Where DeepGEMM is installed, nothing is replaced.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ..errors import Unsupported
from ..indexer import IndexerCache
from ..indexer import mqa_logits as ragged_logits
from ..indexer import paged_mqa_logits as paged_logits
from ..notices import say_once
from ._vllm_releases import release_of, unknown_release, version

NAMES = "vllm.utils.deep_gemm"
ASKERS = ("vllm.model_executor.layers.sparse_attn_indexer", "vllm.v1.attention.backends.mla.indexer")


def replace_logits() -> bool:
    """Put octavo's functions in DeepGEMM's place; whether that was done. What stands in the way is said, once."""
    if release_of(version()) is None:
        say_once(unknown_release(version()))
        return False
    names: Any = importlib.import_module(NAMES)
    if names.has_deep_gemm():
        say_once("DeepGEMM is installed: vLLM's indexer keeps its logits, and octavo's are not used")
        return False
    names._fp8_fp4_mqa_logits_impl = mqa_logits
    names._fp8_fp4_paged_mqa_logits_impl = paged_mqa_logits
    names._get_paged_mqa_logits_metadata_impl = schedule
    for path in ASKERS:
        asker: Any = importlib.import_module(path)
        asker.has_deep_gemm = lambda: True
    return True


def mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv: tuple[torch.Tensor, torch.Tensor],
    weights: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    width: int | None = None,
    clean_logits: bool = False,
) -> torch.Tensor:
    """Logits of M rows over N keys, fp32: [M, N], or with `width` (since 0.33) [M, width] from each row's first key."""
    k, scale = kv
    out = None if width is None else torch.empty((weights.shape[0], width), dtype=torch.float32, device=weights.device)
    fill = float("-inf") if clean_logits else None
    compressed = width is not None
    values = _fp8_query(q)
    k_scale = scale.view(torch.float32).flatten()
    return ragged_logits(values, k, k_scale, weights, starts, ends, out=out, fill=fill, compressed=compressed)


def paged_mqa_logits(
    q: tuple[torch.Tensor, torch.Tensor | None],
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    schedule_metadata: torch.Tensor,
    max_model_len: int,
    clean_logits: bool = False,
    indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """Logits of B x n rows over their pages, fp32 [B * n, max_model_len]; indices: the block table's row of each."""
    tables = block_tables if indices is None else block_tables[indices.to(torch.int64)]
    fill = float("-inf") if clean_logits else None
    index = IndexerCache.view(kv_cache)
    return paged_logits(_fp8_query(q), index, weights, context_lens, tables, max_model_len, fill=fill)


def schedule(context_lens: torch.Tensor, block_size: int, num_slots: int, **options: Any) -> torch.Tensor:
    """What vLLM keeps for DeepGEMM's kernels, int32 [slots + 1, 2]; octavo's need none."""
    return torch.zeros((num_slots + 1, 2), dtype=torch.int32, device=context_lens.device)


def _fp8_query(q: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    values, scale = q
    if scale is not None or values.dtype != torch.float8_e4m3fn:
        raise Unsupported(
            "this indexer query",
            [f"needs an fp8_e4m3 query whose scale is in the weights; found {values.dtype} with block scales"],
        )
    return values
