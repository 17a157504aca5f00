"""The first calls of cells, made before any is measured, so that measuring compiles nothing.

Every cell's first call is made once over a few pages that all its sequences share: the kernels are those that measuring
launches, and little memory is needed. Sides that share a kernel go to one process, so that none is compiled twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch

from ..backends import BACKENDS
from .cases import Case
from .indexer_cases import IndexerCase
from .indexer_measure import IndexerInputs, indexer_side
from .peers import PEERS
from .sides import AttentionInputs, octavo_side

Cell = tuple[Case | IndexerCase, str]  # and a backend's name


def groups(cells: Sequence[tuple[Case | IndexerCase, Sequence[str]]]) -> list[list[Cell]]:
    """The cells that compile something, in groups of one op, backend and spec; peers' and octavo's in turn.

    Peers build for longest, so that theirs should begin early, but wait for each other where they build the same.
    """
    found: dict[tuple[Any, ...], list[Cell]] = {}
    for case, backends in cells:
        for backend in backends:
            if backend == BACKENDS[-1].name or (backend in PEERS and not PEERS[backend].builds):
                continue
            found.setdefault((backend not in PEERS, backend, case.op, case.spec), []).append((case, backend))
    ours, theirs = ([of for key, of in found.items() if key[0] is mine] for mine in (True, False))
    return [one for pair in zip_longest(theirs, ours) for one in pair if one is not None]


def call_once(cell: Cell, device: torch.device) -> None:
    """The first call of a cell's side, over little memory; raises what the measurement meets again."""
    case, backend = cell
    inputs: Any
    if isinstance(case, Case):
        inputs, own = AttentionInputs(case, device, compact=True), octavo_side
    else:
        inputs, own = IndexerInputs(case, device, compact=True), indexer_side
    side = PEERS[backend].prepare(case, inputs) if backend in PEERS else own(case, backend, inputs)  # type: ignore
    side.calls[0]()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
