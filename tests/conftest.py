"""Where the tests that backends share run: the reference on the CPU; on a GPU each backend, and what is chosen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from octavo import Unsupported
from octavo.backends import WRITTEN
from octavo.rules import PHASES


class Target(NamedTuple):
    """A backend on a device."""

    backend: str
    device: str


# A backend is named for both phases; one that has only decode is reached by "auto", as users reach it.
NAMED = [backend for backend in WRITTEN if WRITTEN[backend].issuperset(PHASES)]
TARGETS = [Target("reference", "cpu"), *(Target(backend, "cuda") for backend in [*NAMED, "auto"])]


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A case that a named backend refuses is skipped with the backend's own reasons."""
    try:
        yield
    except Unsupported as refused:
        target = getattr(item, "funcargs", {}).get("target")
        if target is None or target.backend not in NAMED or target.backend == "reference":
            raise
        pytest.skip("; ".join(refused.reasons))


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small models on a shared machine: threads cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a tokenizer of one token a byte, as a local folder."""
    from transformers_models import save_with_letters

    return save_with_letters(tmp_path_factory.mktemp("model"))
