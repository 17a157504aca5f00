"""Which backend runs each phase, why, and why each other one does not.

Pure: a spec and a device go in, a Choice or `Unsupported` comes out, before anything is compiled. Every backend is
judged in every phase and every broken rule is kept. A backend named by the caller (or OCTAVO_BACKEND) never falls back.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from .backends import BACKENDS, BY_NAME, Backend
from .device import Device
from .errors import InvalidInput, Unsupported
from .plan_text import WIDTH, columns, describe, merge_reasons, phrase, reason_lines
from .rules import PHASES
from .spec import AttentionSpec, positive


@dataclass(frozen=True)
class Verdict:
    """must (the only one that may), may or cannot; `reasons`: one sentence per broken rule, with the value found."""

    word: str
    reasons: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For --json and records."""
        return {"verdict": self.word, "reasons": list(self.reasons)}

    def __str__(self) -> str:
        return self.word


@dataclass(frozen=True)
class PhaseChoice:
    """What runs one phase.

    Attributes:
        backend: its name.
        compute_query_dtype: what is multiplied in place of the query; "fp8_e4m3 x2" is a sum of two e4m3 terms.
        why: why this backend, in words.
        verdicts: of every backend, in the table's order.
    """

    backend: str
    compute_query_dtype: str
    why: str
    verdicts: dict[str, Verdict] = field(hash=False)


@dataclass(frozen=True)
class Choice:
    """The plan of one layer kind on one device; `str` of it is the table that `octavo explain` prints.

    Attributes:
        spec, device: what it is for.
        prefill, decode: the backend of each phase by name, why, and the verdict on every backend with its reasons.
    """

    spec: AttentionSpec
    device: Device
    prefill: PhaseChoice
    decode: PhaseChoice

    def phase(self, name: str) -> PhaseChoice:
        """The choice of "prefill" or "decode"."""
        return self.prefill if name == "prefill" else self.decode

    @property
    def graph_support(self) -> str:
        """Which batches a CUDA graph may hold: always, uniform_batch, single_token_decode or never.

        Where only decode can be captured, that is a batch of decode sequences of max_query_len rows each.
        """
        prefill, decode = (BY_NAME[self.phase(p).backend].graphs for p in PHASES)
        if not decode:
            return "never"
        if prefill:
            return "always"
        return "uniform_batch" if self.spec.max_query_len > 1 else "single_token_decode"

    def workspace_bytes(self, max_batch: int, max_query_tokens: int, max_context: int) -> int:
        """Bytes of device memory beside the cache: of the backend that needs more. Monotone in each bound."""
        for name, value in (
            ("max_batch", max_batch),
            ("max_query_tokens", max_query_tokens),
            ("max_context", max_context),
        ):
            positive(name, value)
        return max(
            BY_NAME[self.phase(p).backend].workspace_bytes(
                self.spec, self.device, max_batch, max_query_tokens, max_context
            )
            for p in PHASES
        )

    def schedule_ints(self, phase: str, max_batch: int, max_query_tokens: int) -> int:
        """int32 that the plan of a phase's backend writes for batches of at most that size; 0: it has no plan."""
        of = BY_NAME[self.phase(phase).backend].schedule_ints
        return 0 if of is None else of(self.spec, self.device, phase, max_batch, max_query_tokens)

    def as_dict(self) -> dict[str, Any]:
        """For --json and records."""
        phases = {
            name: {
                "backend": choice.backend,
                "compute_query_dtype": choice.compute_query_dtype,
                "why": choice.why,
                "verdicts": {name: verdict.as_dict() for name, verdict in choice.verdicts.items()},
            }
            for name, choice in ((p, self.phase(p)) for p in PHASES)
        }
        return {**phases, "graph_support": self.graph_support}

    def plan_lines(self, width: int = WIDTH - 2) -> list[str]:
        """The table: a line a phase, what a graph may hold, then the reasons against each other backend."""
        rows = [("phase", "backend", "multiplies", "why")]
        rows += [(p, c.backend, c.compute_query_dtype, c.why) for p, c in ((p, self.phase(p)) for p in PHASES)]
        lines = columns(rows)
        lines.append(f"CUDA graphs: {_GRAPH_WORDS[self.graph_support]}")
        for backend in BACKENDS:
            against = {p: self.phase(p).verdicts[backend.name].reasons for p in PHASES}
            if any(against.values()):
                lines += [f"not {backend.name}:", *reason_lines(merge_reasons(against), width)]
        return lines

    def __str__(self) -> str:
        return "\n".join([f"{describe(self.spec)}, on {self.device}", *("  " + line for line in self.plan_lines())])


_GRAPH_WORDS = {
    "always": "always (any batch)",
    "uniform_batch": "uniform_batch (decode only, every sequence with the same number of rows)",
    "single_token_decode": "single_token_decode (decode only, one row a sequence)",
    "never": "never (the decode backend reads lengths on the host)",
}


def choose(spec: AttentionSpec, device: Any = None, backend: str | None = None) -> Choice:
    """The plan of `spec` on `device`.

    Args:
        spec: one layer kind.
        device: a Device, a known name ("h200"), a torch device or its name, or None or "auto": the one here.
        backend: gluon, triton or reference for both phases, whatever it costs; None or "auto" takes OCTAVO_BACKEND
            and, without that, the first in each phase that may run.

    Raises:
        InvalidInput: an unknown device or backend; the known ones are listed.
        Unsupported: a phase that no backend, or not the named one, can run; with every broken rule and the value found.
    """
    if not isinstance(spec, AttentionSpec):
        raise InvalidInput("spec must be an AttentionSpec", type(spec).__name__)
    named, by = named_backend(backend)
    check_backend(named, by, BY_NAME)
    return _choose(spec, Device.of(device), named, by)


def named_backend(backend: Any) -> tuple[Any, str]:
    """(the backend that was named, by whom): by the caller, else by OCTAVO_BACKEND; None where neither names one."""
    if backend is None or backend == "auto":
        return os.environ.get("OCTAVO_BACKEND") or None, "OCTAVO_BACKEND"
    return backend, "the caller"


def check_backend(named: Any, by: str, known: Iterable[str]) -> None:
    """Raise InvalidInput, listing the known names, for a backend that is none of them."""
    known = tuple(known)
    if named is not None and (not isinstance(named, str) or named not in known):
        raise InvalidInput(f"backend (named by {by}) must be one of {', '.join(known)}", repr(named))


def verdicts(spec: AttentionSpec, device: Device, phase: str) -> dict[str, Verdict]:
    """Of every backend, in the table's order."""
    return judged({b.name: b.reasons(spec, device, phase) for b in BACKENDS})


def judged(reasons: dict[str, tuple[str, ...]]) -> dict[str, Verdict]:
    """The verdicts on backends, from the reasons against each."""
    may = "must" if sum(not r for r in reasons.values()) == 1 else "may"
    return {name: Verdict("cannot", r) if r else Verdict(may) for name, r in reasons.items()}


def why_first(able: list[str], named: str | None, by: str) -> str:
    """Why the first of the backends that are able is taken, in words; `named` (by whom) is the only one of them."""
    if named is not None:
        return f"named by {by}"
    return "must: the only backend that may" if len(able) == 1 else f"may, and comes before {' and '.join(able[1:])}"


@functools.lru_cache(maxsize=4096)
def _choose(spec: AttentionSpec, device: Device, named: str | None, by: str) -> Choice:
    found = {phase: verdicts(spec, device, phase) for phase in PHASES}
    chosen: dict[str, PhaseChoice] = {}
    for phase, of in found.items():
        able = [name for name, verdict in of.items() if verdict.word != "cannot"]
        if named is not None:
            able = [name for name in able if name == named]
        if not able:
            raise _unsupported(spec, device, named, by, found)
        query = BY_NAME[able[0]].compute_query_dtype(spec, device, phase)
        chosen[phase] = PhaseChoice(able[0], query, why_first(able, named, by), of)
    return Choice(spec, device, **chosen)


def _unsupported(
    spec: AttentionSpec, device: Device, named: str | None, by: str, found: dict[str, dict[str, Verdict]]
) -> Unsupported:
    names = [b.name for b in BACKENDS] if named is None else [named]
    reasons = []
    for name in names:
        for pair in merge_reasons({phase: of[name].reasons for phase, of in found.items()}):
            reasons.append(f"{name}: {phrase(*pair)}" if named is None else phrase(*pair))
    who = "no backend can" if named is None else f"backend {named} (named by {by}) cannot"
    return Unsupported(f"{who} run {describe(spec)}, on {device}", reasons, nearest_change(spec, device, named))


def nearest_change(spec: AttentionSpec, device: Device, named: str | None) -> str | None:
    """The smallest known change that makes a plan: fields of the spec, or to name no backend; None if there is none.

    Each is tried before it is told.
    """
    found = [mend(spec, device, b) for b in BACKENDS if named in (None, b.name)]
    changes = [change for change in found if change]
    if changes:
        return ", ".join(f"{field}={value!r}" for field, value in min(changes, key=len).items())
    if named is not None:
        phases = (verdicts(spec, device, phase) for phase in PHASES)
        able = [next((name for name, v in of.items() if v.word != "cannot"), None) for of in phases]
        if all(able):
            return f"no backend named (then {able[0]} in prefill, {able[1]} in decode)"
    return None


def mend(spec: AttentionSpec, device: Device, backend: Backend) -> dict[str, Any] | None:
    """Fields of `spec` to change so that `backend` runs both phases; None if its rules name no way."""
    change: dict[str, Any] = {}
    for _ in range(3):  # one mended rule may break another: nhd for leaf, then a page size
        broken = [rule for phase in PHASES for rule in backend.broken(replace(spec, **change), device, phase)]
        if not broken:
            return change
        for rule in broken:
            if rule.nearest is None:
                return None
            change.update(rule.nearest(replace(spec, **change)))
    return None
