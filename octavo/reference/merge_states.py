"""merge_states: attention over the union of disjoint sets of keys, from the attention over each.

out = sum_i exp(lse_i - lse) out_i with lse = log sum_i exp(lse_i). Edge case: a part whose lse is -inf has no say,
whatever its output holds (NaN too); where every part's is -inf the result is 0 and -inf.
"""

from __future__ import annotations

import torch


def merge_states(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """outs [n, T, Hq, Dv] and lses fp32 [n, T, Hq] -> out [T, Hq, Dv] of outs' dtype, lse fp32 [T, Hq]."""
    lse = torch.logsumexp(lses.to(torch.float32), 0)
    # A row that no part saw: -inf - -inf is NaN, so its weights are set rather than computed.
    weights = torch.where(lses == float("-inf"), 0.0, torch.exp(lses - lse))[..., None]
    terms = torch.where(weights > 0, outs.to(torch.float32) * weights, 0.0)
    return terms.sum(0).to(outs.dtype), lse
