"""Where the tests that every backend shares run: the reference on the CPU, and everything on a GPU that is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from octavo.backends import WRITTEN


class Target(NamedTuple):
    """A backend on a device."""

    backend: str
    device: str


TARGETS = [Target("reference", "cpu"), *(Target(backend, "cuda") for backend in WRITTEN if WRITTEN[backend])]


@pytest.fixture(
    params=[pytest.param(t, id="-".join(t), marks=[pytest.mark.gpu] if t.device == "cuda" else []) for t in TARGETS]
)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """A backend on a device, which is torch's default device for the length of the test."""
    if request.param.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU here")
    torch.set_default_device(request.param.device)
    yield request.param
    torch.set_default_device(None)
