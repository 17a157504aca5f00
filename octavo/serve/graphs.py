"""Decode steps as CUDA graphs: one launch instead of hundreds, for steps in which every sequence has one new token.

A graph is captured for each of a few batch sizes over buffers that stay where they are; a step fills the buffers and
replays the next larger one. Rows beyond the step's are padding: length 0, slot -1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ..errors import first_line
from ..integrations.pages import Step
from ..notices import log

if TYPE_CHECKING:
    from .runner import Batch, Runner

Work = Callable[[], torch.Tensor]

WARM_UPS = 2  # eager runs before a capture: kernels compile, libraries allocate


def batch_sizes(most: int) -> list[int]:
    """Sizes that graphs are captured for, largest first, so that the smaller ones fit into its memory."""
    sizes = {1, 2, 4, 8, *range(16, 64, 16), *range(64, most + 1, 32), most}
    return sorted((size for size in sizes if size <= most), reverse=True)


class DecodeGraphs:
    """Captured decode steps of one runner.

    Args:
        runner: whose model and cache; nothing it holds may move from now on.
        max_batch: most sequences of a step. max_pages: most pages of a sequence.
        capture: capture(work) -> replay, which does again what work() did and returns the same tensor.
    """

    def __init__(
        self, runner: Runner, max_batch: int, max_pages: int, capture: Callable[[Work], Work] | None = None
    ) -> None:
        device = runner.device
        self._max_pages = max_pages
        self._tokens = torch.zeros(1, max_batch, dtype=torch.int64, device=device)
        self._positions = torch.zeros_like(self._tokens)
        self._slots = torch.full((max_batch,), -1, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._table = torch.zeros(max_batch, max_pages, dtype=torch.int32, device=device)
        self._starts = torch.arange(max_batch + 1, dtype=torch.int32, device=device)
        self._replays: dict[int, Work] = {}
        capture = capture or _CudaCapture(device)
        for size in batch_sizes(max_batch):
            self._replays[size] = capture(lambda size=size: self._forward(runner, size))

    def fits(self, batch: Batch) -> bool:
        """Whether `batch` is one new token for each of few enough sequences."""
        rows, width = batch.table.shape
        return rows == len(batch.tokens) and rows <= max(self._replays) and width <= self._max_pages

    def run(self, batch: Batch) -> torch.Tensor:
        """As Runner.run, of a batch that fits; the result lives until the next run."""
        rows = len(batch.tokens)
        size = min(size for size in self._replays if size >= rows)
        padding = (0, size - rows)
        pad = torch.nn.functional.pad
        self._tokens[0, :size].copy_(pad(batch.tokens, padding))
        self._positions[0, :size].copy_(pad(batch.positions, padding))
        self._slots[:size].copy_(pad(batch.slots, padding, value=-1))
        self._lengths[:size].copy_(pad(batch.lengths, padding))
        self._table[:rows, : batch.table.shape[1]].copy_(batch.table)
        return self._replays[size]()[batch.sampled.to(self._tokens.device)]

    def _forward(self, runner: Runner, size: int) -> torch.Tensor:
        step = Step(
            columns=size,
            slots=self._slots[:size],
            rows=None,
            seq_lens=self._lengths[:size],
            page_table=self._table[:size],
            query_starts=self._starts[: size + 1],
            counts=[1] * size,
            lengths=[0] * size,
        )
        return runner.forward(self._tokens[:, :size], self._positions[:, :size], step, size, 0)


class _CudaCapture:
    """Captures work into CUDA graphs that share one memory pool; they are replayed one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                work()
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            found = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return found

        return replay


def capture_decodes(runner: Runner, max_batch: int, max_pages: int) -> DecodeGraphs | None:
    """Graphs for `runner` where its device, backend and model can be captured; else None, and why is logged."""
    unfit = {choice.graph_support for choice in runner.handle.choices.values()} & {"never"}
    if runner.device.type != "cuda" or unfit or not runner.alone:
        return None
    try:
        return DecodeGraphs(runner, max_batch, max_pages)
    except Exception as error:  # a model whose forward asks the device for a value, as some mixtures of experts do
        torch.cuda.synchronize(runner.device)  # raises where more is broken than the capture
        log.warning("decode steps run without CUDA graphs: %s", first_line(error))
        return None
