"""Every step of Hopper's kernels on a GPU that other processes have too."""

from __future__ import annotations

import pytest
import torch

from octavo.testing import sharing

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="torch sees no Hopper GPU here")]


def test_results_are_the_same_on_a_gpu_that_is_shared():
    runs, wrong = sharing.shared(processes=3, seconds=60)
    assert wrong == []
    assert runs > 3 * 40 * sharing.AT_ONCE  # some 60 steps in each process
