"""topk_indices: the k largest logits of each row, as indices.

Chosen are the k largest of the first lens[i] logits of row i; of equal ones the lower index (-0 equals 0). They
come in order of index, followed by -1 where there are fewer than k.

Edge cases: NaN is never chosen, so a row with fewer than k numbers ends in -1; -inf is a number, chosen last; a length
below 0 is 0, one above the row's width is the width. Nothing is read on the host.
"""

from __future__ import annotations

import torch

_ELEMENTS = 1 << 22  # logits that are looked at at once


def topk_indices(logits: torch.Tensor, lens: torch.Tensor, out: torch.Tensor) -> None:
    """logits [R, N] of any float dtype, lens int [R] -> out int32 [R, k], of any strides."""
    out.fill_(-1)
    num_rows, width = logits.shape
    if not (num_rows and width):
        return
    step = max(1, _ELEMENTS // width)
    for begin in range(0, num_rows, step):
        rows = slice(begin, begin + step)
        _choose(logits[rows], lens[rows], out[rows])


def _choose(logits: torch.Tensor, lens: torch.Tensor, out: torch.Tensor) -> None:
    num_rows, width = logits.shape
    k = min(out.shape[1], width)
    index = torch.arange(width, device=logits.device)
    valid = (index < lens[:, None]) & ~logits.isnan()
    masked = torch.where(valid, logits, float("-inf"))
    smallest = torch.topk(masked, k, dim=1).values[:, -1:]  # the values are determined, ties only move indices
    above = masked > smallest
    equal = valid & (masked == smallest)
    room = k - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1) <= room))
    # Chosen index number p of a row goes to place p; everything else to a place past the end.
    place = torch.where(chosen, chosen.cumsum(1) - 1, k)
    padded = torch.full((num_rows, k + 1), -1, dtype=torch.int32, device=logits.device)
    padded.scatter_(1, place, torch.where(chosen, index, -1).to(torch.int32))
    out[:, :k] = padded[:, :k]
