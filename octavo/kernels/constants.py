"""What a kernel is compiled with, as one argument that Triton can hash, compare and write down."""

from __future__ import annotations


class CompileTime(dict):
    """Base of a frozen dataclass that is one constexpr argument: it is the dict of its fields too.

    Triton writes down as JSON what it compiled for a hook, where one is set: an engine sets one once it has warmed up.
    The encoder takes a dict and no dataclass, and a launch that compiles would fail with its error.
    """

    def __post_init__(self) -> None:
        self.update(vars(self))
