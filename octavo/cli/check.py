"""`octavo check`: the support table of this machine, cell by cell against fp64; exit 1 if a cell fails."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..backends import BACKENDS, BY_NAME
from ..errors import InvalidInput
from .progress import bar, for_messages, for_tables, show_table

if TYPE_CHECKING:
    import torch

    from ..testing.support import Check, Outcome

SHOWN_FAILURES = 20
SHOWN_REASONS = 6
MOST_SECONDS = 600.0  # of the processes; what a hang keeps from them is then run in this one


def check(
    quick: Annotated[bool, typer.Option(help="The first cells of the grid; under a minute.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    backend: Annotated[str, typer.Option(help="gluon, triton, reference; auto: each, and what is chosen.")] = "auto",
    jobs: Annotated[
        int | None,
        typer.Option(min=0, help="Processes beside this one; 0: none; on a GPU one a processor unless told."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
) -> None:
    """Run every cell of the support table on this machine and print how many passed, were refused and failed.

    A cell passes if it is as near to fp64 as bf16 attention is (in fast prefill: as FP8 allows) and runs again to the
    same bits. Exit code 1 if one fails, 130 if interrupted; what was run by then is printed.
    """
    from ..bench.records import environment
    from ..testing import support
    from .target import target_device

    if backend != "auto" and backend not in BY_NAME:
        raise InvalidInput(f"--backend must be auto or one of {', '.join(BY_NAME)}", repr(backend))
    on = target_device(device)
    progress = for_messages()
    started = time.perf_counter()
    named = None if backend == "auto" else backend
    todo = support.checks(on, quick, named)
    found: dict[int, Outcome] = {}
    interrupted = False
    try:
        with bar(progress, f"Checking {len(todo)} cells", len(todo)) as advance:
            for index, outcome in _outcomes(todo, quick, named, on, jobs):
                found[index] = outcome
                advance()
    except KeyboardInterrupt:
        interrupted = True
    outcomes = [found[index] for index in sorted(found)]
    result = {
        "environment": environment(on),
        "seconds": round(time.perf_counter() - started, 1),
        "cells": len(todo),
        "interrupted": interrupted,
        "outcomes": [outcome.as_dict() for outcome in outcomes],
    }
    if as_json:
        typer.echo(json.dumps(result, indent=2))
    else:
        _show(for_tables(100), result, outcomes)
    if interrupted:
        progress.print(f"octavo: interrupted after {len(outcomes)} of {len(todo)} cells")
        raise typer.Exit(130)
    if any(outcome.word == "failed" for outcome in outcomes):
        raise typer.Exit(1)


def _outcomes(
    todo: list[Check], quick: bool, named: str | None, device: torch.device, jobs: int | None
) -> Iterator[tuple[int, Outcome]]:
    """Every check's outcome by its number: of compiled backends from several processes, since one compiles slowly.

    Then, in this process, the others and those whose process died or took too long.
    """
    from ..bench.processes import in_processes, jobs_for

    if jobs is None:
        jobs = jobs_for(device)
    left = set(range(len(todo)))
    if jobs:
        reference = BACKENDS[-1].name  # compiles nothing
        apart = [i for i, one in enumerate(todo) if one.backend != reference]
        groups = [[(quick, named, i)] for i in apart]
        for group, results in in_processes(_run_one, groups, device, jobs, MOST_SECONDS):
            if results and results[0] is not None:
                left.discard(apart[group])
                yield apart[group], results[0]
    for index in sorted(left):
        yield index, todo[index].run()


def _run_one(check: tuple[bool, str | None, int], device: torch.device) -> Outcome:
    """In another process: one check by its number."""
    quick, named, index = check
    return _checks(quick, named, device)[index].run()


@functools.lru_cache
def _checks(quick: bool, named: str | None, device: torch.device) -> list[Check]:
    from ..testing import support

    return support.checks(device, quick, named)


def _show(console: Any, result: dict[str, Any], outcomes: list[Outcome]) -> None:
    from rich.table import Table
    from rich.text import Text

    from ..testing import support

    env = result["environment"]
    name = env.get("gpu") if env.get("gpu") != "none" else env.get("cpu", "CPU")
    table = Table(title=Text(f"{name}, torch {env['torch']}, octavo {env['octavo']}"), title_justify="left")
    for column in ("operation", "backend"):
        table.add_column(column)
    for word in support.WORDS:
        table.add_column(word, justify="right")
    for (op, backend), counts in support.summary(outcomes).items():
        failed = Text(str(counts["failed"]), style="bold red" if counts["failed"] else "")
        table.add_row(op, backend, str(counts["passed"]), str(counts["refused"]), failed)
    show_table(console, table)
    for backend, found in support.reasons(outcomes).items():
        console.print(Text(f"{backend} refuses what is not:", style="bold"))
        for reason, count in found[:SHOWN_REASONS]:
            console.print(Text(f"  {count:4} x {reason}"))
        if len(found) > SHOWN_REASONS:
            console.print(Text(f"         and {len(found) - SHOWN_REASONS} more; --json has all"))
    failures = [outcome for outcome in outcomes if outcome.word == "failed"]
    for outcome in failures[:SHOWN_FAILURES]:
        console.print(Text(f"failed: {outcome.backend} {outcome.op}: {outcome.cell}", style="red"))
        for detail in outcome.details:
            console.print(Text(f"  {detail}"))
    if len(failures) > SHOWN_FAILURES:
        console.print(Text(f"and {len(failures) - SHOWN_FAILURES} more failures; --json has all"))
    totals = {word: sum(o.word == word for o in outcomes) for word in support.WORDS}
    console.print(Text(", ".join(f"{n} {word}" for word, n in totals.items()) + f" in {result['seconds']} s"))
