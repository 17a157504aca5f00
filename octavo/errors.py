"""The three ways octavo says no, all raised before anything is compiled or launched; and others' errors in a line."""

from __future__ import annotations

from collections.abc import Sequence

# What ends a process. Anything else may be the failure of one thing alone: a tokenizer's panic is no Exception.
LEAVING = (KeyboardInterrupt, SystemExit)


class OctavoError(Exception):
    """Base of every error that octavo raises on purpose."""


class InvalidInput(OctavoError, ValueError):
    """An argument is malformed: the message says what was needed and what came."""

    def __init__(self, needed: str, came: object = None) -> None:
        super().__init__(needed if came is None else f"{needed}; came {came}")


class Unsupported(OctavoError):
    """A well-formed request that no (or not the named) backend can run.

    ``reasons`` holds one sentence per broken rule, with the value found; ``nearest`` the smallest known change
    that would be supported, or None.
    """

    def __init__(self, what: str, reasons: Sequence[str], nearest: str | None = None) -> None:
        self.reasons = tuple(reasons)
        self.nearest = nearest
        lines = [what, *(f"  - {reason}" for reason in self.reasons)]
        if nearest:
            lines.append(f"  nearest supported: {nearest}")
        super().__init__("\n".join(lines))
        self._what = what

    def __reduce__(self) -> tuple[type[Unsupported], tuple[str, tuple[str, ...], str | None]]:
        """Reasons survive pickling: engines plan in worker processes."""
        return type(self), (self._what, self.reasons, self.nearest)


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
