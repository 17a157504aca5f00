"""Rules as data: one need of a backend, and the makers of those that several backends have.

A rule is a pure function of (spec, device, phase) that never catches an exception. `choose` collects every broken rule
with the value found; `octavo explain`, error texts, an engine's reason list, docs/rules.md and test skips all print
from here. The tables are backends.py and indexer_backends.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .device import Device
from .spec import AttentionSpec

PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Rule:
    """One need of a backend.

    Attributes:
        needs: what has to be so, as words that follow "needs".
        holds: (spec, device, phase) -> whether it is so.
        found: (spec, device, phase) -> what is there instead; a list is sentences that stand by themselves.
        nearest: spec -> the fields to change, with their values, that mend it; None where no change of the spec does.
        phases: the phases that it is a rule of.
    """

    needs: str
    holds: Callable[[Any, Device, str], bool]
    found: Callable[[Any, Device, str], str | list[str]]
    nearest: Callable[[Any], dict[str, Any]] | None = None
    phases: tuple[str, ...] = PHASES

    def broken(self, spec: Any, device: Device, phase: str) -> bool:
        """Whether it is a rule of this phase and does not hold."""
        return phase in self.phases and not self.holds(spec, device, phase)

    def reasons(self, spec: Any, device: Device, phase: str) -> tuple[str, ...]:
        """Why it is broken, in words with the value found; empty if it holds."""
        if not self.broken(spec, device, phase):
            return ()
        found = self.found(spec, device, phase)
        return (f"needs {self.needs}; found {found}",) if isinstance(found, str) else tuple(found)


def head_dims(spec: AttentionSpec) -> str:
    """head_dim as tables write it: "128", or "192/128" where the value head differs."""
    return str(spec.head_dim) if spec.head_dim == spec.value_dim else f"{spec.head_dim}/{spec.value_dim}"


def alternatives(values: tuple[Any, ...]) -> str:
    values = tuple(str(v) for v in values)
    return values[0] if len(values) == 1 else f"{', '.join(values[:-1])} or {values[-1]}"


def one_of(field: str, allowed: tuple[Any, ...], nearest: Any = None, why: str = "") -> Rule:
    """The rule that a spec's `field` is one of `allowed`."""
    return Rule(
        needs=f"{field} {alternatives(allowed)}{why}",
        holds=lambda spec, device, phase: getattr(spec, field) in allowed,
        found=lambda spec, device, phase: str(getattr(spec, field)),
        nearest=None if nearest is None else lambda spec: {field: nearest},
    )


def at_most(field: str, limit: int, words: str, mends: bool = False, phases: tuple[str, ...] = PHASES) -> Rule:
    """The rule that a number of a spec is at most `limit`; `mends`: one can set it to the limit."""
    return Rule(
        needs=f"{words} of at most {limit}",
        holds=lambda spec, device, phase: getattr(spec, field) <= limit,
        found=lambda spec, device, phase: str(getattr(spec, field)),
        nearest=(lambda spec: {field: limit}) if mends else None,
        phases=phases,
    )


def without(field: str, words: str, value: Any = False, phases: tuple[str, ...] = PHASES) -> Rule:
    """The rule that `field` has the value that switches a feature off."""
    return Rule(
        needs=words,
        holds=lambda spec, device, phase: getattr(spec, field) == value,
        found=lambda spec, device, phase: f"{field}={getattr(spec, field)}",
        phases=phases,
    )


def architecture(archs: tuple[str, ...], words: str) -> Rule:
    """The rule that the device's architecture is in a list; never "or newer"."""
    return Rule(
        needs=words,
        holds=lambda spec, device, phase: device.arch in archs,
        found=lambda spec, device, phase: str(device),
    )


def shapes(pairs: tuple[str, ...], phases: tuple[str, ...] = PHASES) -> Rule:
    """The rule that the head dimensions are in a list of "128" and "192/128"."""
    return Rule(
        needs=f"head_dim {alternatives(pairs)}",
        holds=lambda spec, device, phase: head_dims(spec) in pairs,
        found=lambda spec, device, phase: head_dims(spec),
        phases=phases,
    )


def rules_table(rules: tuple[Rule, ...], phases: tuple[str, ...]) -> list[str]:
    """Lines of Markdown: what each rule needs, and an x under each phase or operation that it holds for."""
    rows = [[rule.needs, *("x" if phase in rule.phases else "" for phase in phases)] for rule in rules]
    heads = [["needs", *phases], ["---"] * (1 + len(phases))]
    return [f"| {' | '.join(cells)} |" for cells in (*heads, *rows)]
