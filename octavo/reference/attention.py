"""attention: softmax(scale q k^T + bias) v over paged keys and values, written as the formula.

A sequence of n query rows and s tokens has its rows at positions s - n .. s - 1 (bottom-right). With p a row's
position, token t < s is visible to it if

    t <= p                                  (causal)
    p - t < window, and t - p < window      (window; the second only binds where not causal)
    t // chunk == p // chunk                (attention_chunk)
    t lies on a page whose id is in [0, num_pages).

score = softcap(softmax_scale q . k) - slope |p - t|, out = sum exp(score - m) v / (sum exp(score - m) + exp(sink - m)),
lse = m + log(that denominator): a sink is part of it, so pass sinks to one part only of an attention that is merged.

Edge cases: a row that sees no token gives out 0 and lse -inf, with a sink too; so does every row that belongs to no
sequence (before query_starts[0], after query_starts[B]); seq_len <= 0 or no rows is padding; seq_len beyond the page
table's width is cut to it; bytes outside a sequence's tokens, and outside every row's window, are never read.
"""

from __future__ import annotations

import torch

from ..calls import AttentionCall, CacheBytes
from ..formats import FORMATS, cast, dequantise
from ..layouts import leaf_order
from ..spec import AttentionSpec

_SUM_BLOCK = 2048  # keys summed in one product
_MAX_SCORES = 1 << 24  # scores held at once: rows are taken in blocks, so that long contexts fit in memory


def attention(call: AttentionCall, phase: str = "both", compute_dtype: torch.dtype = torch.float32) -> None:
    """Compute the rows of `call` in `compute_dtype` (float32 or float64); reads lengths on the host.

    phase: "both", or "prefill" or "decode" for the sequences of that phase alone. Rows of no sequence are written by
    prefill, and by decode where there is no other phase.
    """
    spec = call.spec
    if phase != "decode" or call.num_decodes == call.seq_lens.shape[0]:
        call.out.zero_()
        if call.lse is not None:
            call.lse.fill_(float("-inf"))
    total_rows = call.q.shape[0]
    starts = [min(max(start, 0), total_rows) for start in call.query_starts.tolist()]
    for index, seq_len in enumerate(call.seq_lens.tolist()):
        first, rows = starts[index], starts[index + 1] - starts[index]
        seq_len = min(seq_len, call.page_table.shape[1] * spec.page_size)
        decodes = rows <= spec.max_query_len if call.num_decodes is None else index < call.num_decodes
        if phase != "both" and decodes != (phase == "decode"):
            continue
        if rows <= 0 or seq_len <= 0:
            continue
        begin = first_token(spec, seq_len - rows)
        k, v, live = gather(spec, call.cache, call.page_table[index], begin, seq_len, compute_dtype)
        block = max(1, _MAX_SCORES // (spec.num_q_heads * max(seq_len - begin, 1)))
        if spec.batch_invariant:  # a product's sums depend on its shape: each row has one of its own
            block = 1
        for row in range(0, rows, block):
            span = slice(first + row, first + min(row + block, rows))
            positions = torch.arange(seq_len - rows + row, seq_len - rows + min(row + block, rows), device=k.device)
            low, high = begin, seq_len
            if spec.batch_invariant:
                position = seq_len - rows + row
                low, high = first_token(spec, position), max(position + 1, 0) if spec.causal else seq_len
            part = slice(low - begin, high - begin)
            _attend(call, span, positions, low, k[:, part], v[:, part], live[part], compute_dtype)


def first_token(spec: AttentionSpec, position: int) -> int:
    """The first token that a row at `position`, or any after it, can see."""
    begin = 0
    if spec.window is not None:
        begin = max(begin, position - spec.window + 1)
    if spec.attention_chunk is not None:
        begin = max(begin, position // spec.attention_chunk * spec.attention_chunk)
    return begin


def gather(
    spec: AttentionSpec, cache: CacheBytes, pages: torch.Tensor, begin: int, end: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [begin, end) of the sequence on `pages`: k [Hk, n, D], v [Hk, n, Dv] dequantised, live bool [n].

    A token on a page outside the pool is not live; its values are 0.
    """
    size = spec.page_size
    tokens = torch.arange(begin, end, device=pages.device)
    ids = pages[tokens // size].to(torch.int64)
    live = (ids >= 0) & (ids < cache.strides.num_pages)
    ids, offset = torch.where(live, ids, 0), tokens % size
    format = FORMATS[spec.kv_dtype]

    def take(view: torch.Tensor, column: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        stored = view[ids, :, column].transpose(0, 1)  # [Hk, n, D]
        if scale is not None and scale.dim() == 3:
            scale = scale[ids, :, offset].T[..., None]
        elif scale is not None and scale.dim() == 1:
            scale = scale[:, None, None]
        return torch.where(live[:, None], dequantise(stored, scale, format, dtype), 0.0)

    k = take(cache.k_view(spec), offset, cache.k_scale)
    if spec.layout == "leaf":
        columns = torch.tensor(leaf_order(size), device=pages.device)
        v = take(cache.v_view(spec).transpose(2, 3), columns[offset], cache.v_scale)
    else:
        v = take(cache.v_view(spec), offset, cache.v_scale)
    return k, v, live


def _attend(
    call: AttentionCall,
    span: slice,
    positions: torch.Tensor,
    begin: int,
    k: torch.Tensor,
    v: torch.Tensor,
    live: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    """Rows `span` of call.q at `positions` over the tokens from `begin` on that k, v [Hk, n, D] hold."""
    spec = call.spec
    if k.shape[1] == 0:  # rows before the sequence's first token
        return
    rows, heads, group = span.stop - span.start, spec.num_kv_heads, spec.group_size
    q = _query(call, span, dtype).view(rows, heads, group, spec.head_dim)
    q = q.permute(1, 0, 2, 3).reshape(heads, rows * group, spec.head_dim)
    scores = (torch.bmm(q, k.transpose(1, 2)) * spec.scale).view(heads, rows, group, k.shape[1])
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    tokens = torch.arange(begin, begin + k.shape[1], device=k.device)
    distance = positions[:, None] - tokens[None, :]
    if spec.alibi:
        slopes = alibi_slopes(spec.num_q_heads).to(scores).view(heads, 1, group, 1)
        scores = scores - slopes * distance.abs()[None, :, None, :]
    visible = live[None, :] & visible_tokens(spec, positions, tokens)
    scores = scores.masked_fill(~visible[None, :, None, :], float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    sees = peak > float("-inf")
    if call.sinks is not None:
        sinks = call.sinks.to(dtype).view(heads, 1, group, 1)
        peak = torch.maximum(peak, sinks)
    peak = torch.where(sees, peak, 0.0)
    p = torch.exp(scores - peak)
    total = p.sum(-1, keepdim=True)
    if call.sinks is not None:
        total = total + torch.exp(sinks - peak)
    out = _weighted_sum(p.view(heads, rows * group, -1), v).view(heads, rows, group, spec.value_dim)
    out = torch.where(sees, out / total, 0.0)
    _store(call, span, out.permute(1, 0, 2, 3).reshape(rows, spec.num_q_heads, spec.value_dim))
    if call.lse is not None:
        lse = torch.where(sees, peak + torch.log(total), float("-inf"))
        call.lse[span] = lse[..., 0].permute(1, 0, 2).reshape(rows, spec.num_q_heads).to(torch.float32)


def _weighted_sum(p: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """p [Hk, rows, n] times v [Hk, n, Dv], added up in blocks: one long fp32 sum over 131,072 keys is off by 2e-3."""
    out = torch.zeros(p.shape[0], p.shape[1], v.shape[2], dtype=p.dtype, device=p.device)
    for start in range(0, p.shape[2], _SUM_BLOCK):
        out += torch.bmm(p[..., start : start + _SUM_BLOCK], v[:, start : start + _SUM_BLOCK])
    return out


def visible_tokens(spec: AttentionSpec, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """bool [rows, tokens]: what the mask of `spec` lets rows at `positions` see, as the module docstring states it."""
    p, t = positions[:, None], tokens[None, :]
    visible = torch.ones(p.shape[0], t.shape[1], dtype=torch.bool, device=tokens.device)
    visible &= p >= 0
    if spec.causal:
        visible &= t <= p
    if spec.window is not None:
        visible &= (p - t < spec.window) & (t - p < spec.window)
    if spec.attention_chunk is not None:
        visible &= t // spec.attention_chunk == p // spec.attention_chunk
    return visible


def alibi_slopes(heads: int) -> torch.Tensor:
    """Slopes of Press et al. 2021, fp32 [heads]: 2^(-8 i / n) for n the power of two below, then odd ones of 2 n."""
    n = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]
    slopes += [2.0 ** (-4.0 * (2 * i + 1) / n) for i in range(heads - n)]
    return torch.tensor(slopes)


def _query(call: AttentionCall, span: slice, dtype: torch.dtype) -> torch.Tensor:
    """Rows `span` of the query in `dtype`, an e4m3 one with its scale."""
    q = call.q[span]
    if call.spec.query_dtype != "fp8_e4m3":
        return q.to(dtype)
    scale = call.q_scale
    if scale is not None and scale.numel() > 1:
        scale = scale[:, None]
    return dequantise(q.view(torch.uint8), scale, FORMATS["fp8_e4m3"], dtype)


def _store(call: AttentionCall, span: slice, out: torch.Tensor) -> None:
    """Write rows in the output's dtype; an e4m3 output is divided by out_scale and saturates."""
    if call.spec.out_dtype == "fp8_e4m3":
        scaled = out if call.out_scale is None else out / call.out_scale.to(out.dtype)
        call.out.view(torch.uint8)[span] = cast(scaled, FORMATS["fp8_e4m3"])
    else:
        call.out[span] = out.to(call.out.dtype)
