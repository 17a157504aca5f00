"""Measure one case on octavo's backends and on peers: right first, on sampled rows against fp64, then timed.

Every cell is a record, a refusal or a wrong result too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

import torch

from ..choose import choose
from ..errors import InvalidInput, Unsupported
from ..ops import cache_backend
from .cases import Case
from .peers import PEERS
from .records import Record, environment
from .roofline import Ceilings, measure_ceilings
from .sides import AttentionInputs, Side, octavo_side
from .timing import Timing, time_calls

FAILED = "failed: "
WRONG = 0.1  # a relative error that no rounding explains: e4m3 query and P give 0.04


class DeviceLost(RuntimeError):
    """The device does nothing more in this process, which has to end; `record` is of the cell that it was lost in."""

    def __init__(self, record: Record) -> None:
        super().__init__(record.error)
        self.record = record


def measure(
    case: Case,
    backend: str,
    device: torch.device | str,
    *,
    run: str,
    ceilings: Ceilings | None = None,
    env: dict[str, str] | None = None,
    seconds: float = 0.2,
    inputs: Any = None,
) -> Record:
    """A record of `case` on `backend`: errors of sampled rows and the time of a call, or why there is none.

    backend: octavo's or a peer's name, or "auto" for what octavo chooses, whose name the record then has.
    inputs: what the sides of a comparison share; None: made here.
    What octavo's own code raises beside a refusal makes a failed cell. Raises DeviceLost where the device went with it.
    """
    device = torch.empty(0, device=device).device
    fields = cell(case, backend_name(case, backend, device), run, ceilings, env)
    return record_of(
        fields, lambda: _side(case, backend, inputs or AttentionInputs(case, device)), device, seconds, WRONG
    )


def of_run(device: torch.device | str, seconds: float) -> dict[str, Any]:
    """What the records of one run share, as `measure` takes it: its name, ceilings, environment, seconds a cell."""
    return {
        "run": datetime.now(timezone.utc).strftime("%Y%m%d-%H%M%S"),
        "ceilings": measure_ceilings(device),
        "env": environment(device),
        "seconds": seconds,
    }


def cell(case: Any, backend: str, run: str, ceilings: Ceilings | None, env: dict[str, str] | None) -> dict[str, Any]:
    """Fields of a record that are known before anything runs; `case` is a Case or an IndexerCase."""
    return {
        "case": case.name,
        "op": case.op,
        "backend": backend,
        "run": run,
        "spec": asdict(case.spec),
        "bytes": case.work.bytes,
        "flops": case.work.flops,
        "ceiling": {k: v for k, v in asdict(ceilings or Ceilings()).items() if v is not None},
        "env": env or {},
    }


def record_of(
    fields: dict[str, Any],
    make: Callable[[], Side],
    device: torch.device,
    seconds: float,
    wrong: float,
    *,
    time: Callable[..., Timing] | None = None,
) -> Record:
    """The record with `fields` of the side that `make` makes: its time once it is right; else why there is none.

    wrong: a relative error from which on a result is not timed. time: what takes the place of `time_calls`.
    Raises DeviceLost where the device went with it.
    """
    # Another library refuses in its own ways, and at any point.
    peer = fields["backend"] in PEERS
    refusals = (Exception,) if peer else (Unsupported, InvalidInput, torch.cuda.OutOfMemoryError)
    try:
        side = make()
        fields["spec"] |= side.as_run
        rel, rel_bf16 = checked(side)
        if rel is not None and not rel < wrong:
            return Record(**fields, rel_err=rel, rel_err_bf16=rel_bf16, error=f"wrong: relative error {rel:.3g}")
        timing = (time or time_calls)(side.calls, device, seconds=seconds)
    except Exception as error:  # a kernel that does not compile is one failed cell, not the end of the matrix
        said = "" if isinstance(error, refusals) else FAILED
        record = Record(**fields, error=f"{said}{type(error).__name__}: {without_folders(str(error))}"[:2000])
        if _lost(device):  # every other cell would fail by that
            raise DeviceLost(record) from error
        return record
    return Record(
        **fields,
        rel_err=rel,
        rel_err_bf16=rel_bf16,
        timing=timing.method,
        us=round(timing.us, 3),
        us_p20=round(timing.us_p20, 3),
        us_p80=round(timing.us_p80, 3),
    )


def without_folders(text: str) -> str:
    """A message without the folders of the files that it names: a record goes where those are not."""
    return re.sub(r"(?<![\w.])(?:/[\w.+-]+)+/([\w.+-]+)", r"\1", text)


def _lost(device: torch.device) -> bool:
    """Whether the device fails at nothing at all, as it does after an illegal access."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def compare(
    case: Case, backends: Sequence[str], device: torch.device | str, *, inputs: Any = None, **arguments: Any
) -> Iterator[Record]:
    """A record of `case` for each of `backends` over the same inputs, as `measure` makes it, one after the other."""
    shared = inputs
    for backend in backends:
        if shared is None and not (backend in PEERS and PEERS[backend].reasons(case)):
            try:
                shared = AttentionInputs(case, device)
            except RuntimeError:  # too large for the memory: `measure` meets the same and makes a record of it
                shared = None
        yield measure(case, backend, device, inputs=shared, **arguments)


def checked(side: Side) -> tuple[float | None, float | None]:
    """Errors of the first call, its output poisoned before: (rel, rel_bf16); None where nothing is checked."""
    if side.check is None:
        return None, None
    if side.out is not None:
        side.out.view(torch.uint8).fill_(0xFF)  # NaN: a row that is not written shows
    side.calls[0]()
    return side.check()


def _side(case: Case, backend: str, inputs: Any) -> Side:
    return PEERS[backend].prepare(case, inputs) if backend in PEERS else octavo_side(case, backend, inputs)


def backend_name(case: Case, backend: str, device: torch.device) -> str:
    """What a record of `backend` is called: itself, or for "auto" what octavo chooses for the case."""
    if backend != "auto":
        return backend
    if case.op == "append":
        return cache_backend(device, "append")
    choice = choose(case.spec, device)
    return (choice.prefill if case.op == "prefill" else choice.decode).backend
