"""Capture once, replay often: a CUDA graph on a GPU; on a CPU the same discipline without one."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Captured:
    """A step captured over fixed storage. `replay()` runs it again with whatever that storage now holds.

    On a CUDA device `step` is captured in a CUDA graph, unless not `graphs` (a backend whose graph support is "never");
    otherwise replay calls `step`, and what is tested is that it reads its inputs from the same storage each time.
    """

    def __init__(self, step: Callable[[], None], device: torch.device, graphs: bool = True) -> None:
        self._step = step
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda" and graphs:
            stream = torch.cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                step()  # compiles and warms up outside the capture
            torch.cuda.current_stream(device).wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                step()
        else:
            step()

    def replay(self) -> None:
        """Run the step again."""
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()
