"""Why no kernel serves a layer, as engines tell it."""

from __future__ import annotations

from ..backends import BACKENDS
from ..choose import choose, verdicts
from ..device import Device
from ..errors import Unsupported
from ..plan_text import merge_reasons, phrase
from ..rules import PHASES
from ..spec import AttentionSpec


def kernel_reasons(spec: AttentionSpec, device: Device) -> list[str]:
    """Why no kernel runs `spec` on `device`; empty if one does. On a GPU the reference is for checking, not serving.

    A backend that OCTAVO_BACKEND names, the reference too, is taken at its word.
    """
    try:
        choice = choose(spec, device)
    except Unsupported as refusal:
        return list(refusal.reasons)
    chosen = {phase: choice.phase(phase) for phase in PHASES}
    fallen = [phase for phase, c in chosen.items() if c.backend == "reference" and not c.why.startswith("named")]
    if not fallen or device.arch == "cpu":
        return []
    against = {phase: verdicts(spec, device, phase) for phase in fallen}
    return [
        f"{backend.name}: {phrase(*pair)}"
        for backend in BACKENDS
        if backend.name != "reference"
        for pair in merge_reasons({p: against[p][backend.name].reasons if p in against else () for p in PHASES})
    ]
