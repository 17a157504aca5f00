"""Compile what a fuzz on a GPU launches, many kernels at once: the one process that holds the device does it serially.

Kernels are compiled for classes of calls. What of an example chooses a class is in `classes`; what does not, lengths,
sequences and pages, is no reason to compile again.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from ..choose import choose
from ..errors import Unsupported
from ..spec import AttentionSpec
from ..warmup import watched
from .fuzz import GPU_SPECS, Example
from .fuzz_device import BACKENDS, Asked, Runner
from .fuzz_workers import alone, quiet


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


def compile_task(task: Task, device: str) -> Compiled:
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
            ask = alone(Runner(device, (task.backend,)))
            for example in classes(task.spec, task.rows):
                inputs = example.inputs(16)
                ask(Asked(inputs.spec, inputs.num_pages, inputs.strided, example.plan), inputs.tensors)
        except Exception:
            done.failures.append(f"{task}:\n{traceback.format_exc()}")
    done.compiled, done.cached = len(found.compiled), len(found.cached)
    done.seconds = time.monotonic() - started
    return done


def compile_all(processes: int | None = None, seconds: float = 300.0, device: str = "cuda") -> Compiled:
    """Do all tasks in so many processes (None: one a core, at most 16); what is not done in time is ended and told."""
    started, whole, late = time.monotonic(), Compiled(), 0
    with multiprocessing.get_context("spawn").Pool(processes or min(16, os.cpu_count() or 1), quiet) as pool:
        results = [pool.apply_async(compile_task, (task, device)) for task in tasks()]
        for result in results:
            try:
                done = result.get(max(0.0, started + seconds - time.monotonic()))
            except multiprocessing.TimeoutError:
                late += 1
                continue
            whole.compiled, whole.cached = whole.compiled + done.compiled, whole.cached + done.cached
            whole.failures += done.failures
    if late:
        whole.failures.append(f"{late} of {len(results)} tasks were not done after {seconds:.0f} s")
    whole.seconds = time.monotonic() - started
    return whole
