"""Which backend runs each operation of an indexer, why, and why each other one does not: choose.py for the indexer."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

from .backends import WRITTEN
from .choose import Verdict, check_backend, judged, named_backend, why_first
from .device import Device
from .errors import InvalidInput, Unsupported
from .indexer_backends import FILES, INDEXER_BACKENDS, INDEXER_BY_NAME, OPERATIONS
from .plan_text import WIDTH, columns, merge_reasons, reason_lines
from .spec import IndexerSpec


@dataclass(frozen=True)
class OperationChoice:
    """What runs one operation: its name, why in words, and the verdict on every backend in the table's order."""

    backend: str
    why: str
    verdicts: dict[str, Verdict] = field(hash=False)


@dataclass(frozen=True)
class IndexerChoice:
    """The plan of an indexer on one device; `str` of it is what `octavo explain` prints."""

    spec: IndexerSpec
    device: Device
    operations: dict[str, OperationChoice] = field(hash=False)

    @property
    def graph_support(self) -> str:
        """always: a CUDA graph may hold every operation at any batch; or never."""
        held = all(name in INDEXER_BY_NAME[choice.backend].captured for name, choice in self.operations.items())
        return "always" if held else "never"

    def as_dict(self) -> dict[str, Any]:
        """For --json and records."""
        operations = {
            name: {
                "backend": choice.backend,
                "why": choice.why,
                "verdicts": {of: verdict.as_dict() for of, verdict in choice.verdicts.items()},
            }
            for name, choice in self.operations.items()
        }
        return {"operations": operations, "graph_support": self.graph_support}

    def plan_lines(self, width: int = WIDTH - 2) -> list[str]:
        """The table: a line an operation, what a graph may hold, then the reasons against each other backend."""
        rows = [("operation", "backend", "why")]
        lines = columns([*rows, *((name, c.backend, c.why) for name, c in self.operations.items())])
        words = {"always": "always (any batch)", "never": "never (the append reads slots on the host)"}
        lines.append(f"CUDA graphs: {words[self.graph_support]}")
        for backend in INDEXER_BACKENDS:
            against = {name: c.verdicts[backend.name].reasons for name, c in self.operations.items()}
            if any(against.values()):
                lines += [f"not {backend.name}:", *reason_lines(merge_reasons(against), width)]
        return lines

    def __str__(self) -> str:
        return "\n".join([f"{describe(self.spec)}, on {self.device}", *("  " + line for line in self.plan_lines())])


def describe(spec: IndexerSpec) -> str:
    """A spec in one line."""
    rows = f", {spec.max_query_len} query rows a sequence" if spec.max_query_len > 1 else ""
    return (
        f"indexer of {spec.num_heads} heads of {spec.head_dim}, the {spec.top_k} best tokens of a row{rows}, "
        f"pages of {spec.page_size}, scales {spec.scale_format}"
    )


def choose_indexer(spec: IndexerSpec, device: Any = None, backend: str | None = None) -> IndexerChoice:
    """The plan of `spec` on `device`.

    Args:
        spec: the indexer.
        device: a Device, a known name ("h200"), a torch device or its name, or None or "auto": the one here.
        backend: gluon, triton or reference for every operation; None or "auto": the first of each operation that may.
            OCTAVO_BACKEND names one for the operations that the backend has.

    Raises InvalidInput for an unknown name and Unsupported, with every broken rule, for what cannot run.
    """
    if not isinstance(spec, IndexerSpec):
        raise InvalidInput("spec must be an IndexerSpec", type(spec).__name__)
    on = Device.of(device)
    return IndexerChoice(spec, on, {name: choose_operation(spec, on, name, backend) for name in OPERATIONS})


def choose_operation(spec: IndexerSpec, device: Device, operation: str, backend: str | None = None) -> OperationChoice:
    """`choose_indexer` of one operation."""
    named, by = named_backend(backend)
    check_backend(named, by, INDEXER_BY_NAME)
    if by == "OCTAVO_BACKEND" and named is not None and FILES[operation] not in WRITTEN[named]:
        named = None
    return _choose(spec, device, operation, named, by)


@functools.lru_cache(maxsize=4096)
def _choose(spec: IndexerSpec, device: Device, operation: str, named: str | None, by: str) -> OperationChoice:
    reasons = {b.name: b.reasons(spec, device, operation) for b in INDEXER_BACKENDS}
    may = [name for name, against in reasons.items() if not against]
    able = [name for name in may if named in (None, name)]
    if not able:
        names = [named] if named else list(INDEXER_BY_NAME)
        told = [reason if named else f"{name}: {reason}" for name in names for reason in reasons[name]]
        who = f"backend {named} (named by {by}) cannot" if named else "no backend can"
        nearest = f"no backend named (then {may[0]})" if may else None
        raise Unsupported(f"{who} run {operation} of {describe(spec)}, on {device}", told, nearest)
    return OperationChoice(able[0], why_first(able, named, by), judged(reasons))
