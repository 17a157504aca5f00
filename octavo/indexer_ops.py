"""The indexer's torch.library ops, in the manner of ops.py: tensors, numbers and names; mutated tensors declared."""

from __future__ import annotations

import torch

from .indexer_calls import IndexAppendCall, IndexBytes, LogitsCall, PagedLogitsCall
from .ops import kernel

_library = torch.library.Library("octavo", "FRAGMENT")

_library.define(
    "index_append(Tensor k, Tensor slots, Tensor(a!) pages, Tensor(b!) counters, str scale_format, str backend) -> ()"
)
_library.define(
    "paged_mqa_logits(Tensor q, Tensor pages, Tensor weights, Tensor seq_lens, Tensor page_table, Tensor(a!) out, "
    "SymInt max_context, float? fill, str scale_format, str backend) -> ()"
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


def _index_append(
    k: torch.Tensor,
    slots: torch.Tensor,
    pages: torch.Tensor,
    counters: torch.Tensor,
    scale_format: str,
    backend: str,
) -> None:
    call = IndexAppendCall(k, slots, IndexBytes(pages, scale_format), counters)
    kernel(backend, "index_append")(call)


def _paged_mqa_logits(
    q: torch.Tensor,
    pages: torch.Tensor,
    weights: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    out: torch.Tensor,
    max_context: int,
    fill: float | None,
    scale_format: str,
    backend: str,
) -> None:
    cache = IndexBytes(pages, scale_format)
    call = PagedLogitsCall(q, cache, weights, seq_lens, page_table, max_context, out, fill)
    kernel(backend, "mqa_logits", "paged_mqa_logits")(call)


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
    kernel(backend, "mqa_logits")(call)


def _topk_indices(logits: torch.Tensor, lens: torch.Tensor, out: torch.Tensor, backend: str) -> None:
    kernel(backend, "topk", "topk_indices")(logits, lens, out)


def _nothing(*arguments: object) -> None:
    """The fake of an op that only writes to its arguments."""


for _name, _function in (
    ("index_append", _index_append),
    ("paged_mqa_logits", _paged_mqa_logits),
    ("mqa_logits", _mqa_logits),
    ("topk_indices", _topk_indices),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{_name}", _nothing, lib=_library)
