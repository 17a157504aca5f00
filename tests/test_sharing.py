"""Repeats of steps: what is counted as other bits. On a GPU, tests/gpu/test_sharing.py."""

from __future__ import annotations

import pytest
import torch

from octavo.testing import sharing


def test_runs_with_other_bits_are_counted():
    """-0 and other NaN are other bits, the same NaN is not; of several results one is enough."""
    usual = torch.tensor([0.0, float("nan"), 1.0])
    negative = torch.tensor([-0.0, float("nan"), 1.0])
    other = usual.view(torch.int32).bitwise_or(torch.tensor([0, 1, 0], dtype=torch.int32)).view(torch.float32)

    def found(*unusual):
        runs = torch.stack([*unusual, *[usual] * (sharing.AT_ONCE - len(unusual))])
        rounds = iter([usual.expand_as(runs), runs])
        return sharing.repeat(lambda: (usual.expand_as(runs).contiguous(), next(rounds).contiguous()), 0.0)

    assert found() == (sharing.AT_ONCE, 0)
    assert found(usual, negative) == (sharing.AT_ONCE, 1)
    assert found(other, usual, other) == (sharing.AT_ONCE, 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine on which no process can begin")
def test_processes_that_end_early_are_named():
    assert sharing.shared(2, 0.1, loads=1) == (0, ["a load has ended", *["a process ended with 1"] * 2])
