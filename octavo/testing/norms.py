"""How far rows of attention may be from fp64 if nothing conspires: the norm of a row's error, from how a kernel rounds.

The limits of elements (`bounds`) hold whatever the errors of a row's tokens are: with P off by 2^-4 they allow 2^-4 sum
|p v|, of 200 tokens ten times what the grid of attention does (`grid.FP8_ERROR`: "what rounding to 4 significant bits
allows", 2^-4 of the result's norm). Here is that rule for any input. The grid's other one, 1.1 times the error of plain
bf16 attention, is none: of one token, of equal scores or of powers of two, that error may be 0 by luck, and bf16 keys
make it large where a kernel's is not. Of a row with the result o = sum p_j v_j,

* P is off by `weight` of itself. If all of it is off alike, as of equal scores, o is off by `weight` |o|. If tokens err
  each by itself, and their values are at right angles, as those of many channels nearly are, by `weight` sqrt(S), S =
  sum p_j^2 |v_j|^2. The larger of both.
* scores off by D_j move o by sum p_j d_j (v_j - o): by sqrt(sum (p_j D_j)^2 (|v_j| + |o|)^2).
* what is cut off P V, and the output's rounding, u |o|. These four have nothing to do with each other: their squares
  add up. What all elements have in common is added: `total` of the denominator, and, beside a sink, what scores have in
  common, the sink's weight times max D times |o|.

Where few channels c count, N = (sum m_c)^2 / sum m_c^2 with m_c = sum_j v_jc^2, values are not at right angles. A sum
of N squares of mean 1 exceeds 1 + 2 sqrt(x / N) + 2 x / N with probability e^-x (Laurent and Massart, 2000); x is 20, a
chance of 2e-9. What is uniform has a third of the square of its most as mean, and that sum is below the most of 60
channels and more.

Nothing is averaged over rows, so that one row that is wrong shows. Where scores are off by more than 1/8, or the dtype
of the output does not hold the result, nothing is required: such rows have the limits of their elements alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..spec import AttentionSpec
from .cuts import product
from .rounding import BF16, E4M3, E4M3_FLOOR, E4M3_MAX, FP16, FP16_FLOOR, FP32, Rounding

CHANCE = 20.0  # e^-20 of a row
MOST_OFF = 1 / 8  # of scores
# Of an output's dtype: significant bits, half the distance of the smallest numbers, the largest number.
OUTPUTS = {
    "bfloat16": (BF16, 0.0, math.inf),
    "float16": (FP16, FP16_FLOOR, 65504.0),
    "float32": (FP32, 0.0, math.inf),
    "fp8_e4m3": (E4M3, E4M3_FLOOR, E4M3_MAX),
}


@dataclass(frozen=True)
class Row:
    """What is known of rows: p, off [heads, rows, group, n], v [heads, n, Dv]; the rest is [heads, rows, group, Dv].

    Attributes:
        p: weights, a sink's the last of them if `sink`. v: values. exact: p v.
        off: what scores are off by, as a rule where tensor cores cut, else at most.
        lost: what is cut off P V as a rule. floor: what an element is off by however small it is.
    """

    p: torch.Tensor
    v: torch.Tensor
    exact: torch.Tensor
    off: torch.Tensor
    lost: torch.Tensor
    floor: torch.Tensor
    sink: bool


def norm_limit(spec: AttentionSpec, out_scale: torch.Tensor | None, row: Row, rounding: Rounding) -> torch.Tensor:
    """The most that rows are off by [heads, rows, group, 1], infinity where nothing is required."""
    p, v, size = row.p, row.v, row.exact.norm(dim=-1, keepdim=True)
    off = row.off * (1 + row.off)  # at least e^off - 1
    moved = p * off
    mean = moved.sum(-1, keepdim=True)
    squares = v.square()
    means, squares = squares.sum(1), squares.sum(-1, keepdim=True)  # [heads, Dv], [heads, n, 1]
    channels = (means.sum(-1).square() / means.square().sum(-1).clamp_min(1e-300)).clamp_min(1.0)
    few = ((1 + 2 * (CHANCE / channels).sqrt() + 2 * CHANCE / channels) / 3).clamp_min(1.0)[:, None, None, None]
    by_weights = rounding.weight**2 * torch.maximum(size.square(), few * product(p.square(), squares))
    by_scores = product(moved.square(), torch.cat([squares, 2 * squares.sqrt(), torch.ones_like(squares)], -1))
    by_scores = few * (by_scores * torch.cat([torch.ones_like(size), size, size.square()], -1)).sum(-1, keepdim=True)
    by_sums = few * row.lost.square().sum(-1, keepdim=True)
    u, smallest, _ = OUTPUTS[spec.out_dtype]
    parts = by_weights + by_scores + by_sums + (u * size).square()
    unit = 1.0 if out_scale is None else float(out_scale)
    floor = row.floor.norm(dim=-1, keepdim=True) + smallest * unit * math.sqrt(spec.value_dim)
    allowed = parts.sqrt() * (1 + mean) + rounding.total * size + floor
    if row.sink and p.shape[-1] > 1:
        most = torch.where(p[..., :-1] > 0, off[..., :-1], 0.0).amax(-1, keepdim=True)
        allowed = allowed + p[..., -1:] * most * size
    return torch.where(mean <= MOST_OFF, allowed, math.inf)


def outside(
    got: torch.Tensor, exact: torch.Tensor, norm: torch.Tensor, spec: AttentionSpec, out_scale: torch.Tensor | None
) -> torch.Tensor:
    """How far rows of a result [T, Hq, Dv] are from `exact` over what they may be, [T, Hq]."""
    unit, most = 1.0 if out_scale is None else float(out_scale), OUTPUTS[spec.out_dtype][2]
    if spec.out_dtype == "fp8_e4m3":  # saturates
        exact = exact.clamp(-most * unit, most * unit)
    elif most < math.inf:
        norm = torch.where(exact.norm(dim=-1) + norm <= most, norm, math.inf)
    return (got * unit - exact).norm(dim=-1) / norm.clamp_min(1e-300)
