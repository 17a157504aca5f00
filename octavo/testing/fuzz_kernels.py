"""Compile what a fuzz on a GPU launches, many kernels at once: the one process that holds the device does it serially.

Kernels are compiled for classes of calls. What of an example chooses a class is in `classes`; what does not, lengths,
sequences and pages, is no reason to compile again.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

import torch

from ..bench.processes import in_processes, processors
from ..choose import choose
from ..errors import Unsupported
from ..spec import AttentionSpec
from ..warmup import watched
from .fuzz import GPU_SPECS, Example
from .fuzz_device import BACKENDS, Asked, Runner
from .fuzz_workers import alone


@dataclass(frozen=True)
class Task:
    """Classes of calls of one spec with one backend (None: what is chosen), where a decode has up to `rows` rows."""

    spec: AttentionSpec
    backend: str | None
    rows: int


@dataclass
class Compiled:
    """What came of tasks: kernels compiled, kernels found in Triton's cache, what failed, seconds."""

    compiled: int = 0
    cached: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0


def classes(spec: AttentionSpec, rows: int) -> Iterator[Example]:
    """An example for each class of calls whose longest decode has `rows` query rows.

    They differ in whether all sequences decode, in one scale of the query or one a head, in the dtype of sinks.
    """
    for prefills, heads, seed in product(((), ((70, rows),)), (1.0, 1.7), (0, 1)):
        if (heads == 1 or spec.query_dtype == "fp8_e4m3") and (seed == 0 or spec.sinks):
            yield Example(spec, ((70, rows),), prefills, told="rows", heads=heads, seed=seed)


def tasks(backends: tuple[str | None, ...] = BACKENDS) -> list[Task]:
    """All there is to compile. What every class of a spec needs comes first, so that it is seldom compiled twice."""
    found = [
        Task(spec, backend, rows)
        for spec in GPU_SPECS
        for backend in backends
        for rows in range(1, spec.max_query_len + 1)
    ]
    return sorted(found, key=lambda task: (task.rows, task.backend == "triton"))


def compile_task(task: Task, device: torch.device) -> Compiled:
    """Run a task's classes on a device, if the backend may; what is raised is told."""
    done, started = Compiled(), time.monotonic()
    try:
        choice = choose(task.spec, device, task.backend)
    except Unsupported:
        return done
    if task.backend is None and choice.prefill.backend == choice.decode.backend:
        return done  # that backend's own task does it
    with watched() as found:
        try:
            ask = alone(Runner(str(device), (task.backend,)))
            for example in classes(task.spec, task.rows):
                inputs = example.inputs(16)
                ask(Asked(inputs.spec, inputs.num_pages, inputs.strided, example.plan), inputs.tensors)
        except Exception:
            done.failures.append(f"{task}:\n{traceback.format_exc()}")
    done.compiled, done.cached = len(found.compiled), len(found.cached)
    done.seconds = time.monotonic() - started
    return done


def compile_all(jobs: int | None = None, seconds: float = 300.0, device: str = "cuda") -> Compiled:
    """Do all tasks in so many processes (None: one a processor); what is not done in time is left and told."""
    started, whole, todo = time.monotonic(), Compiled(), tasks()
    groups, late = [[task] for task in todo], len(todo)
    for number, results in in_processes(compile_task, groups, torch.device(device), jobs or processors(), seconds):
        late -= 1
        (done,) = results or [None]
        if done is None:
            whole.failures.append(f"{todo[number]}: its process died")
            continue
        whole.compiled, whole.cached = whole.compiled + done.compiled, whole.cached + done.cached
        whole.failures += done.failures
    if late:
        whole.failures.append(f"{late} of {len(todo)} tasks were not done after {seconds:.0f} s")
    whole.seconds = time.monotonic() - started
    return whole
