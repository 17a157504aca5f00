"""The support table of a machine: every cell of the grid on every backend, against fp64 and against itself.

A cell passes, is refused with the planner's reasons, or fails with what is wrong; nothing is skipped in silence.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..backends import BACKENDS
from ..choose import choose
from ..errors import Unsupported, first_line
from ..indexer_backends import INDEXER_BY_NAME
from ..layouts import layout_reasons
from ..spec import AttentionSpec
from . import indexer_support
from .compare import cache_differences
from .grid import HOPPER_AXES, Cell, faults, grid
from .inputs import make_batch

CHOSEN = "chosen"  # what runs when no backend is named
QUICK_CELLS = 7  # of each grid, which holds the most different values first
OPS = {"one": "decode", "few": "verify", "sixteen": "verify", "prefill": "prefill", "mixed": "mixed"}
WORDS = ("passed", "refused", "failed")


@dataclass(frozen=True)
class Outcome:
    """What became of one cell on one backend.

    Attributes:
        op: decode, verify, prefill, mixed, append or an operation of the indexer. cell: the spec and batch in words.
        backend: its name, or "chosen". word: passed, refused or failed.
        details: reasons of a refusal, faults of a failure.
    """

    op: str
    cell: str
    backend: str
    word: str
    details: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return asdict(self)


@dataclass(frozen=True)
class Check:
    """One cell on one backend, still to be run: `run()` makes its outcome."""

    op: str
    cell: str
    backend: str
    of: Callable[[], list[str]]

    def run(self) -> Outcome:
        """Refused, failed with the faults or with what was raised, or passed."""
        try:
            found = self.of()
        except Unsupported as refusal:
            return Outcome(self.op, self.cell, self.backend, "refused", tuple(refusal.reasons))
        except Exception as error:  # a kernel that does not compile or launch is a failed cell, not the table's end
            why = f"{type(error).__name__}: {first_line(error)}"
            return Outcome(self.op, self.cell, self.backend, "failed", (why,))
        return Outcome(self.op, self.cell, self.backend, "failed" if found else "passed", tuple(found))


def backend_names(named: str | None = None) -> list[str]:
    """Backends to check: every one, then what is chosen where none is named; or the named one alone."""
    return [named] if named else [*(b.name for b in BACKENDS), CHOSEN]


def checks(device: torch.device, quick: bool = False, backend: str | None = None) -> list[Check]:
    """Every check of the table on `device`; quick: the first cells of each grid."""
    grids = (grid(heads=2, wide_pairs=not quick), grid(heads=2, axes=HOPPER_AXES))
    cells = [cell for part in grids for cell in part[: QUICK_CELLS if quick else None]]
    made = [
        Check(OPS[cell.rows], str(cell), name, lambda cell=cell, name=name: _attention_faults(cell, name, device))
        for cell in cells
        for name in backend_names(backend)
    ]
    made += [
        Check("append", label, CHOSEN, lambda spec=spec: _append_faults(spec, device))
        for label, spec in _append_specs(quick)
        if backend is None
    ]
    return made + [
        Check(op, label, name, lambda of=of, name=name: of(None if name == CHOSEN else name, device))
        for op, label, of in indexer_support.cells(quick)
        for name in backend_names(backend)
        if name == CHOSEN or name in INDEXER_BY_NAME  # one of attention alone has no part in it
    ]


def summary(outcomes: list[Outcome]) -> dict[tuple[str, str], dict[str, int]]:
    """Counts of each word by (op, backend), ops one after the other and backends in the table's order."""
    table: dict[tuple[str, str], dict[str, int]] = {}
    for outcome in outcomes:
        row = table.setdefault((outcome.op, outcome.backend), dict.fromkeys(WORDS, 0))
        row[outcome.word] += 1
    backends, ops = backend_names(), [*dict.fromkeys(OPS.values()), "append", *indexer_support.OPERATIONS]
    return dict(sorted(table.items(), key=lambda row: (ops.index(row[0][0]), backends.index(row[0][1]))))


def reasons(outcomes: list[Outcome]) -> dict[str, list[tuple[str, int]]]:
    """Of each backend, its reasons for a no and how many cells have each, the most frequent first."""
    counted: dict[str, collections.Counter[str]] = {}
    for outcome in outcomes:
        if outcome.word == "refused":
            counted.setdefault(outcome.backend, collections.Counter()).update(_rules(outcome.details))
    return {name: counter.most_common() for name, counter in counted.items()}


def _rules(details: tuple[str, ...]) -> Iterator[str]:
    """Reasons without the value found, which differs from cell to cell; each once."""
    yield from dict.fromkeys(reason.split("; found ")[0].removeprefix("needs ") for reason in details)


def _attention_faults(cell: Cell, backend: str, device: torch.device) -> list[str]:
    name = None if backend == CHOSEN else backend
    choose(cell.spec, device, name)  # refused before any tensor is made
    batch = cell.batch(str(device))
    attention = batch.attention(name)
    rows = batch.query_starts.diff().tolist()
    decodes = sum(n <= cell.spec.max_query_len for n in rows)
    out = batch.run(attention=attention, num_decodes=decodes, max_query_len=max(rows))
    found = faults(cell, batch, out)
    if not torch.equal(batch.run(attention=attention).view(torch.uint8), out.view(torch.uint8)):
        found.append("another result when the host does not know which sequences are decodes")
    return found


def _append_specs(quick: bool) -> list[tuple[str, AttentionSpec]]:
    """One spec of each layout, format and granularity of scales."""
    made = [
        AttentionSpec(4, 2, 64, kv_dtype=kv_dtype, layout=layout, scale_granularity=granularity)
        for layout in ("leaf", "nhd", "hnd")
        for kv_dtype in ("fp8_e4m3", "fp8_e5m2", "bfloat16", "float16")
        for granularity in ("tensor", "head", "token_head")
        if kv_dtype.startswith("fp8") or granularity == "tensor"
    ]
    made = [spec for spec in made if not layout_reasons(spec)]
    return [(f"{s.layout} {s.kv_dtype} {s.scale_granularity}", s) for s in (made[::3] if quick else made)]


def _append_faults(spec: AttentionSpec, device: torch.device) -> list[str]:
    """Where the bytes that append writes on `device` differ from the reference's on a CPU."""
    scale = None
    if spec.fp8 and spec.scale_granularity != "token_head":
        scale = 0.5 if spec.scale_granularity == "tensor" else torch.tensor([0.25, 0.7])
    there, here = (make_batch(spec, [5, 130], [1, 1], device=d, k_scale=scale, v_scale=scale) for d in (device, "cpu"))
    return cache_differences(there.cache, here.cache)
