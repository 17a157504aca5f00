"""How long one call takes, by one method for octavo's kernels and for its peers.

On a GPU: the calls, one for each of several data sets that together exceed the L2 cache, are captured in one CUDA
graph, so that every call finds its data cold and the host's launch time is not in the figure; the graph is replayed
and each replay's time, by device events, is divided by its calls. On a CPU the calls are timed one by one with a clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..errors import InvalidInput

GRAPH = "graph replay, rotated cold caches, median"
CLOCK = "host clock, rotated data, median"
_LEAST_CALLS = 8  # in one graph: a replay shorter than some tens of microseconds times its own launch
_LONG_MS = 5.0  # of one call over each data set: no launch shows in it, and one replay warms up


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: median and the 20th and 80th percentile over the repeats, and the method in words."""

    us: float
    us_p20: float
    us_p80: float
    method: str


def time_calls(
    calls: Sequence[Callable[[], object]], device: torch.device | str, *, seconds: float = 0.2, least: int = 5
) -> Timing:
    """Time `calls`, the same work over different data each, for about `seconds` and at least `least` repeats.

    On a GPU they are captured: they must not synchronise, nor allocate what they keep. InvalidInput for no calls.
    """
    if not calls:
        raise InvalidInput("calls must hold at least one call", "none")
    device = torch.device(device)
    samples = (
        _graph_samples(calls, device, seconds, least)
        if device.type == "cuda"
        else _clock_samples(calls, seconds, least)
    )
    return summarise(samples, GRAPH if device.type == "cuda" else CLOCK)


def summarise(samples: Sequence[float], method: str) -> Timing:
    """Median and percentiles of `samples`, microseconds a call."""
    if len(samples) == 1:
        return Timing(samples[0], samples[0], samples[0], method)
    fifths = statistics.quantiles(samples, n=5, method="inclusive")
    return Timing(statistics.median(samples), fifths[0], fifths[3], method)


def sets_needed(bytes_per_call: int, l2_bytes: int) -> int:
    """How many data sets make every call find its own cold: those not in use exceed the L2 cache four times over."""
    return min(64, 1 + -(-4 * l2_bytes // max(bytes_per_call, 1)))


def _graph_samples(
    calls: Sequence[Callable[[], object]], device: torch.device, seconds: float, least: int
) -> list[float]:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls:  # compile and warm up outside the capture
            call()
        long = _pass_ms(calls) > _LONG_MS
    torch.cuda.current_stream(device).wait_stream(stream)
    rounds = 1 if long else -(-_LEAST_CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(1 if long else 3):
        graph.replay()
    torch.cuda.synchronize(device)
    per_replay = rounds * len(calls)
    samples: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(samples) < least or time.perf_counter() < deadline:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
        for event in events:  # several replays in flight, so that the host's gaps are not in the figure
            event.record()
            if event is not events[-1]:
                graph.replay()
        torch.cuda.synchronize(device)
        samples += [a.elapsed_time(b) * 1e3 / per_replay for a, b in zip(events, events[1:], strict=False)]
    return samples


def _pass_ms(calls: Sequence[Callable[[], object]]) -> float:
    """Milliseconds of the calls one after the other, launched one by one: of short ones, that of their launches."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def _clock_samples(calls: Sequence[Callable[[], object]], seconds: float, least: int) -> list[float]:
    for call in calls:
        call()
    samples: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(samples) < least or time.perf_counter() < deadline:
        start = time.perf_counter()
        calls[len(samples) % len(calls)]()
        samples.append((time.perf_counter() - start) * 1e6)
    return samples
