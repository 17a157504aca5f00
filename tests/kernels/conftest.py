"""Triton kernels on the CPU: under Triton's interpreter, which has to be asked for before triton is imported."""

from __future__ import annotations

import os
import sys

import pytest
import torch

if "triton" not in sys.modules and not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def interpreter() -> None:
    """Skips where Triton is there to compile: on a machine with a GPU, where tests/gpu runs the same grids."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("TRITON_INTERPRET=1 was not set before triton was imported (a GPU is there: see tests/gpu)")
