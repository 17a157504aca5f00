"""Steps of whole engines: octavo's sides beside the engine's own attention, of the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .evidence import Cell, Evidence, geometric_mean
from .records import Record

CACHES = {"FP8": True, "16 bits": False, "all": None}  # which sides are compared; None: whatever their cache


@dataclass
class EngineStep:
    """One step of an engine: its records by side, of whatever runs.

    Attributes:
        engine, case: "vllm", "decode/llama-3.1-8b/tp1/b64/ctx2048".
        ratios: by CACHES, the time of the fastest side without octavo over that of octavo's fastest, of one run; of
            several the one in which octavo is the fastest.
    """

    engine: str
    case: str
    records: dict[str, Record] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Gain:
    """Of the steps of one engine and phase: how many, and geometric means of their ratios by CACHES."""

    engine: str
    phase: str
    steps: int
    ratios: dict[str, float | None]


def engine_steps(evidence: Evidence) -> list[EngineStep]:
    """Every step, in order of engine and case. A record's backend is ENGINE-SIDE: "vllm-octavo:fp8"."""
    found: dict[tuple[str, str], list[Cell]] = {}
    for cell in evidence.of_op("step"):
        for engine in dict.fromkeys(name.partition("-")[0] for name in cell.records):
            of = {name: record for name, record in cell.records.items() if name.partition("-")[0] == engine}
            found.setdefault((engine, cell.case), []).append(Cell(cell.case, cell.op, cell.run, of))
    order = list(dict.fromkeys(engine for engine, _ in found))
    return [
        _step(engine, case, cells)
        for (engine, case), cells in sorted(found.items(), key=lambda item: order.index(item[0][0]))
    ]


def _step(engine: str, case: str, cells: Sequence[Cell]) -> EngineStep:
    step = EngineStep(engine, case.removeprefix("step/"))
    for cell in cells:
        step.records |= {name.partition("-")[2]: record for name, record in cell.records.items()}
    for name, fp8 in CACHES.items():
        compared = [
            (mine[1], ratio)
            for cell in cells
            if (mine := cell.best(True, fp8)) and (ratio := cell.ratio_of(fp8)) is not None
        ]
        if compared:
            step.ratios[name] = min(compared)[1]
    return step


def engine_gains(steps: Sequence[EngineStep]) -> list[Gain]:
    """One of each engine and phase that has a step to compare."""
    found: dict[tuple[str, str], list[EngineStep]] = {}
    for step in steps:
        if step.ratios:
            found.setdefault((step.engine, step.case.partition("/")[0]), []).append(step)
    return [
        Gain(
            engine,
            phase,
            len(of),
            {name: geometric_mean([s.ratios[name] for s in of if name in s.ratios]) for name in CACHES},
        )
        for (engine, phase), of in found.items()
    ]
