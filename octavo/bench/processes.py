"""Work in processes of their own on one device: what compiles there is in the compilers' caches for everybody."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

MOST_SECONDS = 150.0


def in_processes(
    function: Callable[[Any, torch.device], Any],
    groups: Sequence[Sequence[Any]],
    device: torch.device,
    jobs: int,
    most_seconds: float = MOST_SECONDS,
) -> Iterator[tuple[int, list[Any] | None]]:
    """function(item, device) of every item, a group in one process, `jobs` processes at a time.

    Yields (number of a group, its results) as groups end: None for an item that raised, and in place of all for a group
    whose process died, which loses no other. What is not done within `most_seconds` is left, and no process outlives
    the call. `function` is one that other processes can import, its results can be pickled.
    """
    context = multiprocessing.get_context("spawn")  # a forked process cannot use a GPU that its parent has used
    waiting, until = deque(range(len(groups))), time.monotonic() + most_seconds
    processes: list[BaseProcess] = []
    held: dict[Connection, int] = {}  # the group that each process is at

    def hand(connection: Connection) -> None:
        held[connection] = waiting.popleft()
        with contextlib.suppress(OSError):  # it has died: its end says so
            connection.send(groups[held[connection]])

    try:
        while waiting or held:
            while waiting and len(held) < jobs:
                ours, theirs = context.Pipe()
                processes.append(context.Process(target=_work, args=(theirs, function, str(device)), daemon=True))
                processes[-1].start()
                theirs.close()  # the process has the only one, so that its death is an end of file
                hand(ours)
            ready = wait(list(held), max(0.0, until - time.monotonic()))
            if not ready:
                return
            for connection in held.keys() & set(ready):
                group, results = held.pop(connection), None
                with contextlib.suppress(EOFError, OSError):
                    results = connection.recv()
                    if waiting:
                        hand(connection)
                yield group, results
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _work(connection: Connection, function: Callable[[Any, torch.device], Any], device: str) -> None:
    """In a process of its own: every group that comes."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            results = []
            for item in connection.recv():
                results.append(None)
                with contextlib.suppress(Exception):
                    results[-1] = function(item, torch.device(device))
            connection.send(results)


def jobs_for(device: torch.device) -> int:
    """Processes that compile for a device beforehand: one a processor that this one may use; a CPU compiles nothing."""
    return 0 if device.type == "cpu" else processors()


def processors() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
