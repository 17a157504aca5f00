"""mqa_logits: the logits by which DeepSeek sparse attention chooses the tokens that a query attends to.

    logits[i, t] = k_scale[t] * sum_h relu(q[i, h] . k[t]) * w[i, h]

relu comes before the head sum, the weights may have either sign, and a scale of the query is in the weights.
Nothing is read on the host of a GPU, so both functions can be captured in a CUDA graph.

Edge cases: a row that sees no key writes no logit (every column is filled where a fill is asked for); a length beyond
the page table or max_context, and a range beyond the keys, end there; a negative length or start is 0; a token
whose page id is not in the pool has logit -inf; what a page table or a page holds beyond a length is not used; a
NaN among the bytes of a visible token makes its own logit NaN and no other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..formats import FORMATS, decode
from ..indexer_calls import LogitsCall, PagedLogitsCall
from .index_append import decode_scale

E4M3 = FORMATS["fp8_e4m3"]
_SCORES = 1 << 24  # scores that are held at once, one a row, head and key


def paged_mqa_logits(call: PagedLogitsCall, compute_dtype: torch.dtype = torch.float32) -> None:
    """Write call.out; everything is computed in `compute_dtype` (float32 or float64)."""
    batch, rows, heads, _ = call.q.shape
    cache, size = call.cache, call.cache.page_size
    if batch == 0:
        return
    lens = row_lengths(call.seq_lens, rows)  # [B, n]
    tokens = min(call.max_context, call.page_table.shape[1] * size)
    out = call.out.unflatten(0, (batch, rows))
    q = call.q.to(compute_dtype)
    weights = call.weights.reshape(batch, rows, heads).to(compute_dtype)
    keys, scales = cache.keys(), cache.scales()
    step = max(1, _SCORES // (batch * rows * heads * size)) * size
    for begin, end in _steps(0, _longest(lens, tokens), step):
        t = torch.arange(begin, end, device=q.device)
        pages = call.page_table[:batch, begin // size : (end - 1) // size + 1].to(torch.int64)
        pages = pages.repeat_interleave(size, 1)[:, : end - begin]  # [B, tokens]
        in_pool = (pages >= 0) & (pages < cache.num_pages)
        pages = torch.where(in_pool, pages, 0)
        k = decode(keys[pages, t % size], E4M3, compute_dtype)  # [B, tokens, D]
        k_scale = decode_scale(scales[pages, t % size], cache.scale_format).to(compute_dtype)
        scores = torch.einsum("bnhd,btd->bnht", q, k).relu_()
        logits = torch.einsum("bnht,bnh->bnt", scores, weights) * k_scale[:, None]
        logits = torch.where(in_pool[:, None], logits, float("-inf"))
        _put(out[..., begin:end], logits, t < lens[..., None], call.fill)
    if call.fill is not None:
        out[..., _longest(lens, tokens) : call.max_context] = call.fill


def mqa_logits(call: LogitsCall, compute_dtype: torch.dtype = torch.float32) -> None:
    """Write call.out; everything is computed in `compute_dtype` (float32 or float64)."""
    heads, num_keys = call.q.shape[1], call.k.shape[0]
    k = decode(call.k, E4M3, compute_dtype)
    k_scale = call.k_scale.to(compute_dtype)
    starts, ends = call.starts.clamp(0, num_keys), call.ends.clamp(0, num_keys)
    for begin, end in _steps(0, call.q.shape[0], max(1, _SCORES // max(1, heads * num_keys))):
        rows = slice(begin, end)
        scores = torch.einsum("shd,td->sht", call.q[rows].to(compute_dtype), k).relu_()
        logits = torch.einsum("sht,sh->st", scores, call.weights[rows].to(compute_dtype)) * k_scale
        out = call.out[rows]
        column = torch.arange(out.shape[1], device=out.device)
        first, last = starts[rows, None].to(torch.int64), ends[rows, None].to(torch.int64)
        t = column + first if call.compressed else column.expand(out.shape)  # key of each column
        visible = (t >= first) & (t < last)
        if num_keys:
            logits = logits.gather(1, t.clamp(max=num_keys - 1))
        else:
            logits = torch.zeros(out.shape, dtype=compute_dtype, device=out.device)
        _put(out, logits, visible, call.fill)


def row_lengths(seq_lens: torch.Tensor, rows: int) -> torch.Tensor:
    """Tokens that each of `rows` query rows of a sequence sees: seq_lens [B] or [B, n] -> int64 [B, n], at least 0.

    With one length a sequence, row j of n sees seq_len - n + 1 + j: its own token is the last.
    """
    lens = seq_lens.to(torch.int64)
    if lens.dim() == 1:
        lens = lens[:, None] + torch.arange(1 - rows, 1, device=lens.device)
    return lens.clamp_min(0)


def _put(out: torch.Tensor, logits: torch.Tensor, visible: torch.Tensor, fill: float | None) -> None:
    """Write the visible logits into `out`, and `fill` or nothing to the rest of it."""
    out.copy_(torch.where(visible, logits.to(out.dtype), out if fill is None else fill))


def _longest(lens: torch.Tensor, limit: int) -> int:
    """Tokens to look at: the longest length on a CPU; on a GPU, where asking would wait, the limit."""
    return min(int(lens.max()), limit) if lens.device.type == "cpu" else limit


def _steps(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(begin, end, step):
        yield start, min(start + step, end)
