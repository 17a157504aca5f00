"""What FP8 tensor cores cut off sums of products, at most and as a rule.

A step aligns DEPTH products and the sum so far to the largest of them and keeps 14 bits of each: it errs by less than
(DEPTH + 1) CUT times the larger of the largest product and that sum. Sums so far are exact partial sums, in the order
of elements and of tokens; the largest product is at most the root of the sum of their squares. (What is aligned to is
an exponent: a subnormal operand has that of the smallest normal number, see `normal`.) In sum |x y|, which is all that
a worst case without an order knows, sums whose terms cancel are lost.

As a rule it is less: what is cut is cut toward 0, anything from nothing to one unit. That is half a unit of each with
the sign of the product, so that DEPTH products err as their signs add up, beside the root of 33 / 12 units. An emulated
core erred by an eighth of that in the root of the mean square, and by less than that in all of 400,000 scores.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import pad

from .rounding import CUT, DEPTH, Rounding

STEP = (DEPTH + 1) * CUT


def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x [heads, rows, group, m] times y [heads, m, n]; one product a head, not one a row."""
    heads, rows, group, m = x.shape
    return (x.reshape(heads, rows * group, m) @ y).view(heads, rows, group, y.shape[2])


def normal(x: torch.Tensor, smallest: torch.Tensor | float) -> torch.Tensor:
    """Sizes that are at least an operand's, and at least its exponent's: 0 stays 0. fp32, as every bound here."""
    return (x.abs() + torch.where(x != 0, smallest, 0.0)).float()


def largest(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """At least the largest of the products that are added up: the root of the sum of their squares."""
    return product(x.square(), y.square()).sqrt_()


def share(signs: torch.Tensor) -> torch.Tensor:
    """The part of (DEPTH + 1) units that is cut off as a rule where the signs of products add up to `signs`."""
    return ((DEPTH + 1) / 12 + (signs + 1).square() / 4).sqrt() / (DEPTH + 1)


def of_scores(
    q: torch.Tensor, k: torch.Tensor, second: torch.Tensor, smallest: tuple[torch.Tensor, torch.Tensor], tail: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What is cut off q [heads, rows, group, D] k [heads, n, D]: at most, as a rule (of one term of the query: half)
    [heads, rows, group, n]; and the sum of the sizes of partial sums.

    second: sizes of the second of two terms of the query, or nothing. Sums of the first are those of both less the
    second's; those of the second begin with 0, or (tail) with the first's. smallest: normal numbers of q and k.
    """
    heads, rows, group, dim = q.shape
    steps = -(-dim // DEPTH)
    whole = (0, steps * DEPTH - dim)
    x = pad(q, whole).float().reshape(heads, rows * group, steps, DEPTH).transpose(1, 2)
    y = pad(k, whole).float().view(heads, -1, steps, DEPTH).permute(0, 2, 3, 1)
    shape = (heads, rows, group, k.shape[1])
    total = sums = torch.zeros(())
    for step in range(steps):
        total = total + x[:, step] @ y[:, step]
        sums = sums + total.abs()
    sums = sums.view(shape)
    tall = normal(k, smallest[1]).transpose(1, 2)
    most = math.sqrt(steps) * largest(normal(q, smallest[0]), tall) + sums
    if not second.numel():
        return STEP * most, STEP / 2 * most, sums
    most = most + (2 * steps + 1) * product(second.float(), tall)
    if tail:
        most = most + steps * total.abs().view(shape)
    signs = (x.sign() @ y.sign()).abs_().amax(1).view(shape)
    return STEP * most, STEP * most * share(signs), sums


def of_products(
    p: torch.Tensor,
    up: torch.Tensor,
    v: torch.Tensor,
    smallest: torch.Tensor,
    error: torch.Tensor,
    before: int,
    rounding: Rounding,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What is cut off p [heads, rows, group, n] v [heads, n, Dv], at most and as a rule, [heads, rows, group, Dv].

    up: the most that weights are. smallest: normal numbers of v. error: what sums are off by beside. before: tokens
    between one at which a tile may start, and the first.
    """
    n = p.shape[-1]
    if not n:
        return torch.zeros_like(error), torch.zeros_like(error)
    peak = up.amax(-1, keepdim=True).clamp_min(1e-300)  # of weights below a sink, fp32 holds no squares
    sums, steps = _partial_sums((p / peak).float(), v.float(), before, rounding)
    squares = largest((up / peak).float(), normal(v, smallest))
    count = -(-n // DEPTH) + 1
    most = STEP * (peak * (math.sqrt(count) * squares + sums) + steps * error)
    most = torch.minimum(most, (1 + rounding.weight) * _beside_one(up, v.abs(), count))
    front = before % DEPTH
    signs = pad(v.sign().float(), (0, 0, front, -(front + n) % DEPTH))
    signs = signs.view(v.shape[0], -1, DEPTH, v.shape[-1]).cumsum(2)
    run = signs.amax(2).clamp_min(0) - signs.amin(2).clamp_max(0)  # of whichever tokens of a step are seen
    return most, most * share(run.amax(1))[:, None, None]


def _beside_one(up: torch.Tensor, sizes: torch.Tensor, count: int) -> torch.Tensor:
    """What is cut off where one product is nearly all there is: no other loses more than itself, and that one, and each
    of `count` sums so far, a unit."""
    heads, rows, group, _ = up.shape
    top, at = up.max(-1, keepdim=True)
    of_top = sizes.gather(1, at.view(heads, -1, 1).expand(-1, -1, sizes.shape[-1])).view(heads, rows, group, -1)
    whole = product(up, sizes)
    return (whole - top * of_top).clamp_min(0.0) + (count + 1) * CUT * whole


def _partial_sums(p: torch.Tensor, v: torch.Tensor, before: int, rounding: Rounding) -> tuple[torch.Tensor, int]:
    """The sum of the sizes of partial sums of p v, and the most steps of a sum."""
    heads, rows, group, n = p.shape
    sizes, most = torch.zeros(()), 1
    for block in rounding.blocks or (rounding.step,):
        front = before % block
        tiles, steps = -(-(front + n) // block), block // DEPTH
        ends = (front, tiles * block - front - n)
        weights = pad(p, ends).view(heads, rows * group, tiles * steps, DEPTH).transpose(1, 2)
        parts = weights @ pad(v, (0, 0, *ends)).view(heads, tiles * steps, DEPTH, -1)
        parts = parts.view(heads, tiles, steps, rows * group, -1)
        if rounding.blocks:
            parts = parts.cumsum(2)
        else:
            parts, steps = parts.flip(1).flatten(1, 2).cumsum(1)[:, None], tiles * steps
        sizes = torch.maximum(sizes, parts.abs_().sum((1, 2)).view(heads, rows, group, -1))
        most = max(most, steps)
    return sizes, most
