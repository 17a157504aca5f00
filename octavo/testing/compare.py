"""Errors beside the error to expect: to fp64 attention over the same bytes, next to plain bf16 attention's.

No tolerance here is tuned. A result passes if its error to fp64 is at most `factor` times the error that attention
written plainly in bf16 torch makes on the same dequantised keys and values, plus what rounding the output costs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..formats import FORMATS, cast
from ..reference.attention import attention, gather, visible_tokens
from .inputs import Batch

CACHE = ("k", "v", "k_scale", "v_scale")  # tensors of a cache


@dataclass(frozen=True)
class Errors:
    """Relative errors to fp64 (Frobenius norm over all rows) and the largest absolute ones.

    Attributes:
        rel, rel_bf16: of the result, and of plain bf16 attention. max_abs, max_abs_bf16: the same for single elements.
    """

    rel: float
    rel_bf16: float
    max_abs: float
    max_abs_bf16: float

    def within(self, factor: float = 1.1) -> bool:
        """Whether the result is at most `factor` times as far from fp64 as plain bf16 attention is."""
        return self.rel <= factor * self.rel_bf16 and self.max_abs <= 2 * factor * self.max_abs_bf16


def exact(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 attention over the bytes of the batch's cache: out float64 [T, Hq, Dv], lse float32 [T, Hq]."""
    spec = replace(batch.spec, out_dtype="float32", lse=True)
    rows = batch.q.shape[0]
    out = torch.empty(rows, spec.num_q_heads, spec.value_dim, dtype=torch.float64, device=batch.q.device)
    lse = torch.empty(rows, spec.num_q_heads, device=batch.q.device)
    call = replace(batch, spec=spec).call(out, lse, torch.empty(0, dtype=torch.uint8))
    attention(call, compute_dtype=torch.float64)
    return out, lse


def plain_bf16(batch: Batch) -> torch.Tensor:
    """Attention as it is plainly written in bf16 torch, over the dequantised cache: bf16 [T, Hq, Dv].

    Query, keys, values and probabilities are bf16, products accumulate in fp32 and the softmax is fp32.
    """
    spec = batch.spec
    rows, heads, group = batch.q.shape[0], spec.num_kv_heads, spec.group_size
    result = torch.zeros(rows, spec.num_q_heads, spec.value_dim, dtype=torch.bfloat16, device=batch.q.device)
    q_all = batch.q.float()
    if spec.query_dtype == "fp8_e4m3":
        q_all = q_all * batch.arguments["q_scale"].reshape(-1, 1)

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.bfloat16).float()

    starts = batch.query_starts.tolist()
    for index, seq_len in enumerate(batch.seq_lens.tolist()):
        first, end = starts[index], starts[index + 1]
        if end <= first or seq_len <= 0:
            continue
        k, v, live = gather(spec, batch.cache.bytes(), batch.page_table[index], 0, seq_len, torch.float32)
        q = rounded(q_all[first:end]).view(end - first, heads, group, -1).permute(1, 2, 0, 3)
        scores = q @ rounded(k)[:, None].transpose(2, 3) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        positions = torch.arange(seq_len - (end - first), seq_len, device=k.device)
        visible = live[None] & visible_tokens(spec, positions, torch.arange(seq_len, device=k.device))
        scores = scores.masked_fill(~visible, float("-inf"))
        peak = scores.amax(-1, keepdim=True).clamp_min(-1e30)
        p = torch.exp(scores - peak)
        total = p.sum(-1, keepdim=True)
        if spec.sinks:
            total = total + torch.exp(batch.arguments["sinks"].float().view(heads, group, 1, 1) - peak)
        out = rounded(p) @ rounded(v)[:, None] / total
        out = torch.where(visible.any(-1)[:, None], out, 0.0)
        result[first:end] = out.permute(2, 0, 1, 3).reshape(end - first, spec.num_q_heads, -1).to(torch.bfloat16)
    return result


def numbers(batch: Batch, out: torch.Tensor) -> torch.Tensor:
    """A result of the batch in fp64, an e4m3 one times its scale."""
    return out.double() * batch.arguments["out_scale"].double() if batch.spec.out_dtype == "fp8_e4m3" else out.double()


def rounded(batch: Batch, x: torch.Tensor) -> torch.Tensor:
    """`x` in fp64 as an output of the batch's holds it, where that is e4m3; of another dtype as it is."""
    if batch.spec.out_dtype != "fp8_e4m3":
        return x.double()
    scale, format = batch.arguments["out_scale"].double(), FORMATS["fp8_e4m3"]
    return numbers(batch, cast(x.double() / scale, format).view(format.dtype))


def errors(batch: Batch, out: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor] | None = None) -> Errors:
    """How far `out`, a result of the batch, is from fp64, beside plain bf16 attention; both rounded to out_dtype.

    expected: the outputs of `exact` and `plain_bf16`, where several results of one batch are compared.
    """
    truth, plain = expected or (exact(batch)[0], plain_bf16(batch))
    got, plain = numbers(batch, out), rounded(batch, plain)
    norm = truth.norm().clamp_min(1e-300)

    def pair(x: torch.Tensor) -> tuple[float, float]:
        difference = x - truth
        return float(difference.norm() / norm), float(difference.abs().max()) if difference.numel() else 0.0

    (rel, max_abs), (rel_bf16, max_abs_bf16) = pair(got), pair(plain)
    return Errors(rel, rel_bf16, max_abs, max_abs_bf16)


def same_bytes(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two tensors, wherever they are, hold the same bytes, or neither is there."""
    if one is None or other is None:
        return one is other
    return torch.equal(*(x.cpu().contiguous().view(-1).view(torch.uint8) for x in (one, other)))


def cache_differences(one: Any, other: Any) -> list[str]:
    """The names of a cache's tensors that hold other bytes in two caches."""
    return [name for name in CACHE if not same_bytes(getattr(one, name), getattr(other, name))]
