"""Tensor parallel: every rank runs the same batches on its part of the model; rank 0 decides which.

The ranks are torchrun's, the parts are transformers' own plan. Rank 0 schedules, samples and talks to clients; it
broadcasts each batch before it runs it. The logits are whole on every rank, as the plan gathers them.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch

from ..errors import InvalidInput
from .runner import FIELDS, Batch, Runner

IDLE = timedelta(days=365)  # rank 0 may have nothing to tell the others for long


def launched() -> bool:
    """Whether this process is one of torchrun's."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def launch(tp: int, arguments: list[str]) -> None:
    """Become torchrun with `tp` ranks of `octavo serve` with these arguments; does not return."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(tp)]
    command += ["-m", "octavo", "serve", *arguments]
    threads = max(1, (os.cpu_count() or 1) // tp)
    os.execve(sys.executable, command, {"OMP_NUM_THREADS": str(threads), **os.environ})


def join(tp: int, device: torch.device) -> tuple[int, Any, torch.device]:
    """(this rank, the group that batches are broadcast in, this rank's device)."""
    import torch.distributed as dist

    size = int(os.environ["WORLD_SIZE"])
    if size != tp:
        raise InvalidInput(f"--tp must be the number of ranks that torchrun started, {size}", tp)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return dist.get_rank(), dist.new_group(backend="gloo", timeout=IDLE), device


class LeadingRunner:
    """Rank 0's runner: tells the others what to run, and runs it."""

    alone = False

    def __init__(self, runner: Runner, group: Any) -> None:
        self._runner, self._group = runner, group
        self.handle, self.page_size, self.device = runner.handle, runner.page_size, runner.device

    def run(self, batch: Batch) -> torch.Tensor:
        """As Runner.run, on all ranks."""
        header, packed = batch.packed()
        self._send(header)
        self._send(packed)
        return self._runner.run(batch)

    def stop(self) -> None:
        """Let the others go."""
        self._send(torch.zeros(FIELDS, dtype=torch.int64))

    def _send(self, values: torch.Tensor) -> None:
        import torch.distributed as dist

        dist.broadcast(values, src=0, group=self._group)


def follow(runner: Runner, group: Any) -> None:
    """Any other rank: run what rank 0 tells, until it lets this one go."""
    import torch.distributed as dist

    header = torch.zeros(FIELDS, dtype=torch.int64)
    while True:
        dist.broadcast(header, src=0, group=group)
        if not int(header[0]):
            return
        sizes = header.tolist()
        packed = torch.empty(Batch.packed_size(sizes), dtype=torch.int64)
        dist.broadcast(packed, src=0, group=group)
        runner.run(Batch.unpacked(sizes, packed))
