"""Repeats of steps: what is counted as other bits. On a GPU, tests/gpu/test_sharing.py."""

from __future__ import annotations

import torch

from octavo.testing import sharing


def test_runs_with_other_bits_are_counted():
    """One run of every AT_ONCE; -0 and other NaN are other bits, and the same NaN is not."""
    result = torch.tensor([0.0, float("nan"), 1.0])
    negative = torch.tensor([-0.0, float("nan"), 1.0])
    assert sharing.repeat(lambda i: result, 0.0) == (sharing.AT_ONCE, 0)
    assert sharing.repeat(lambda i: negative if i == 7 else result, 0.0) == (sharing.AT_ONCE, 1)
    other = result.view(torch.int32).bitwise_or(torch.tensor([0, 1, 0], dtype=torch.int32)).view(torch.float32)
    assert sharing.repeat(lambda i: other if i in (3, 4) else result, 0.0) == (sharing.AT_ONCE, 2)
