"""Other libraries' kernels over the same inputs, each used if it is installed.

A peer is a line of PEERS and a function `prepare(case, inputs) -> Side`. It lays the inputs out as it is fastest, does
per call what it needs per layer (its append in an appending case, its own query quantisation), and leaves out what a
step does once for all layers (its plan). Its values are checked before it is timed, like octavo's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ...errors import Unsupported
from ..cases import Case
from ..sides import Side


@dataclass(frozen=True)
class Peer:
    """One other implementation.

    Attributes:
        name: what records call it. ops: the ops of cases that it has.
        package: what must be importable. function: "module:function" of its `prepare`.
        builds: it compiles kernels when they are first called, and keeps them on disk.
    """

    name: str
    ops: tuple[str, ...]
    package: str
    function: str
    builds: bool = False

    @property
    def installed(self) -> bool:
        """Whether its package can be imported."""
        return find_spec(self.package) is not None

    def reasons(self, case: Case) -> list[str]:
        """Why it cannot run `case` at all; what else it refuses its own checks say when it is prepared."""
        found = []
        if case.op not in self.ops:
            found.append(f"{self.name} is measured for {', '.join(self.ops)}; the case is {case.op}")
        if not self.installed:
            found.append(f"{self.name} needs the package {self.package}, which is not installed")
        return found

    def prepare(self, case: Case, inputs: Any) -> Side:
        """The side to check and time. Unsupported with the reasons; its library may raise what it likes."""
        reasons = self.reasons(case)
        if reasons:
            raise Unsupported(f"{self.name} cannot run {case.name}", reasons)
        module, function = self.function.split(":")
        made: Callable[[Case, Any], Side] = getattr(import_module(module), function)
        return made(case, inputs)


PEERS = {
    peer.name: peer
    for peer in (
        Peer("flashinfer-xqa", ("decode",), "flashinfer", "octavo.bench.peers.flashinfer:xqa", True),
        Peer("flashinfer-fa2", ("decode",), "flashinfer", "octavo.bench.peers.flashinfer:fa2", True),
        Peer("flashinfer-fa3", ("prefill",), "flashinfer", "octavo.bench.peers.flashinfer:fa3", True),
        Peer("sdpa-cudnn", ("prefill",), "torch", "octavo.bench.peers.sdpa:cudnn"),
        Peer("sdpa-flash", ("prefill",), "torch", "octavo.bench.peers.sdpa:flash"),
        Peer("deepgemm", ("paged_mqa_logits", "mqa_logits"), "deep_gemm", "octavo.bench.peers.deepgemm:logits", True),
    )
}
