"""The process that holds the device of a fuzz: it runs what other processes make up, one example after the other.

Making an example up and bounding its results cost many times what running it costs. So one process appends and attends,
over the same Attentions and workspaces whoever asks, as a server does; and those of `fuzz_workers` do the rest.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from ..attention import Attention
from ..backends import BY_NAME
from ..choose import choose
from ..device import Device
from ..errors import Unsupported
from ..spec import AttentionSpec
from ..warmup import watched
from .compare import CACHE
from .fuzz import Inputs

BACKENDS = (*(name for name in BY_NAME if name != "reference"), None)  # None: what is chosen
ALIGNMENT = 256  # bytes, at least what an allocation on a GPU has: Triton compiles for addresses at multiples of 16
Pair = tuple[str, str]
Tensors = dict[str, torch.Tensor]
Field = tuple[str, torch.dtype, tuple[int, ...], int]  # name, dtype, shape, first byte


@dataclass(frozen=True)
class Asked:
    """What a worker asks for, beside tensors."""

    spec: AttentionSpec
    num_pages: int
    strided: bool
    plan: dict[str, int | None]


@dataclass(frozen=True)
class Answer:
    """What the device's process answers, beside tensors: k, v, k_scale, v_scale and, of the n-th pair, out n, lse n.

    Attributes:
        device: its facts. pairs: backends (prefill, decode) that ran, in order. error: what was raised instead.
    """

    device: Device
    pairs: tuple[Pair, ...] = ()
    error: str | None = None


@dataclass
class Runner:
    """Runs examples on a device.

    Attributes:
        device: where. backends: names that are tried for each spec; None: what is chosen without a name.
        kept: one Attention for each spec and pair of backends, whose workspace holds what was there before.
    """

    device: str = "cuda"
    backends: tuple[str | None, ...] = BACKENDS
    kept: dict[AttentionSpec, dict[Pair, Attention]] = field(default_factory=dict)

    def attentions(self, spec: AttentionSpec) -> dict[Pair, Attention]:
        """An Attention of every backend that may run both phases, and of what is chosen where that is another pair."""
        if spec not in self.kept:
            found: dict[Pair, Attention] = {}
            for name in self.backends:
                try:
                    choice = choose(spec, self.device, name)
                except Unsupported:
                    continue
                pair = choice.prefill.backend, choice.decode.backend
                if pair not in found:
                    most: dict[str, Any] = {"max_batch": 8, "max_query_tokens": 1024, "max_context": 2048}
                    found[pair] = Attention(spec, **most, device=self.device, backend=name)
                    found[pair].workspace.fill_(0xFF)
            self.kept[spec] = found
        return self.kept[spec]

    def answer(self, asked: Asked, tensors: Tensors) -> tuple[Answer, Tensors]:
        """Append, then attend with every pair of backends. The tensors are on the device, before and after."""
        batch = Inputs(asked.spec, asked.num_pages, asked.strided, tensors).batch()
        made: Tensors = {name: t for name in CACHE if (t := getattr(batch.cache, name)) is not None}
        attentions = self.attentions(asked.spec)
        for n, attention in enumerate(attentions.values()):
            made[f"out {n}"] = batch.run(None, attention, **asked.plan)
            if batch.lse is not None:
                made[f"lse {n}"] = batch.lse
        return Answer(Device.detect(self.device), tuple(attentions)), made

    def lost(self) -> bool:
        """Whether the device runs nothing more, as after an illegal address."""
        if self.device == "cpu":
            return False
        try:
            torch.zeros(1, device=self.device).item()
        except Exception:  # whatever it is, the device does not run
            return True
        return False


def packed(tensors: Tensors) -> tuple[list[Field], torch.Tensor]:
    """The bytes of tensors one after the other, uint8 on their device, so that one copy moves them all."""
    fields: list[Field] = []
    end = 0
    for name, tensor in tensors.items():
        fields.append((name, tensor.dtype, tuple(tensor.shape), end))
        end += -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT
    device = next((tensor.device for tensor in tensors.values()), "cpu")
    buffer = torch.empty(end, dtype=torch.uint8, device=device)
    for target, tensor in zip(unpacked(fields, buffer).values(), tensors.values(), strict=True):
        target.copy_(tensor)
    return fields, buffer


def unpacked(fields: Iterable[Field], buffer: torch.Tensor) -> Tensors:
    """Views of the tensors that `packed` put into the buffer, wherever that is by now."""
    found = {}
    for name, dtype, shape, start in fields:
        count = torch.Size(shape).numel() * dtype.itemsize
        found[name] = buffer[start : start + count].view(dtype).view(shape)
    return found


def send(connection: Connection, head: Any, fields: list[Field], buffer: torch.Tensor) -> None:
    """Send something small and what `packed` made: torch's own way takes file descriptors, or far longer."""
    connection.send((head, fields, buffer.numel()))
    if buffer.numel():
        connection.send_bytes(buffer.numpy().data)


def receive(connection: Connection) -> tuple[Any, list[Field], torch.Tensor]:
    """What `send` sent; the bytes are on the CPU."""
    head, fields, size = connection.recv()
    buffer = torch.empty(size, dtype=torch.uint8)
    if size:
        connection.recv_bytes_into(buffer.numpy().data)
    return head, fields, buffer


@dataclass
class Progress:
    """How far the device's process is.

    Attributes:
        ran: examples. busy: seconds that it did not wait for somebody to ask.
        compiled: names of kernels that it compiled. lost: what was raised where the device was lost.
    """

    ran: int = 0
    busy: float = 0.0
    compiled: list[str] = field(default_factory=list)
    lost: str | None = None


def serve(runner: Runner, asking: list[Connection], running: Any, tells: Connection, every: int) -> None:
    """Answer whoever asks until nobody is left or the device is lost; tell the progress after so many examples.

    running: a shared integer: whose example runs.
    """
    numbers = {connection: number for number, connection in enumerate(asking)}
    with watched() as found:
        progress = Progress(compiled=found.compiled)
        while numbers and progress.lost is None:
            for connection in [one for one in wait(list(numbers)) if isinstance(one, Connection)]:
                started = time.perf_counter()
                try:
                    asked = receive(connection)
                    running.value = numbers[connection]
                    progress.lost = serve_one(runner, connection, *asked)
                except (EOFError, OSError):  # the worker has ended
                    del numbers[connection]
                    continue
                if progress.lost is not None:
                    break
                running.value = -1
                progress.ran += 1
                progress.busy += time.perf_counter() - started
                if progress.ran % every == 0:
                    tells.send(progress)
    tells.send(progress)


def serve_one(
    runner: Runner, connection: Connection, asked: Asked, fields: list[Field], buffer: torch.Tensor
) -> str | None:
    """Run a worker's example and answer it; what was raised, if that lost the device."""
    try:
        answer, tensors = runner.answer(asked, unpacked(fields, buffer.to(runner.device)))
        fields, buffer = packed(tensors)
        buffer = buffer.cpu()  # here what goes wrong on a GPU is raised
    except Exception as error:
        raised = "".join(traceback.format_exception(error))
        if runner.lost():
            return raised
        answer, fields, buffer = Answer(Device.detect(runner.device), error=raised), [], torch.empty(0)
    send(connection, answer, fields, buffer)
    return None
