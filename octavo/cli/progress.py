"""Progress of long commands, on stderr: a bar on a terminal, a line elsewhere; stdout stays what was asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def saying(progress: Any, status: Any) -> Callable[[str], None]:
    """say(line): the status line of a terminal, a printed line elsewhere; `progress`: a rich Console."""
    return (lambda line: status.update(line)) if progress.is_terminal else progress.print


@contextmanager
def bar(progress: Any, what: str, total: int) -> Iterator[Callable[..., None]]:
    """A progress bar on a terminal, one line elsewhere; yields advance(steps=1)."""
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    if not progress.is_terminal:
        progress.print(what)
        yield lambda steps=1: None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=progress, transient=True) as shown:
        task = shown.add_task(what, total=total)
        yield lambda steps=1: shown.advance(task, steps)


def quiet() -> None:
    """Keep transformers' progress bars and advice out of ours; octavo's own warnings stay, one line each."""
    import huggingface_hub
    import transformers

    huggingface_hub.utils.logging.set_verbosity_error()  # a hub out of reach is our one line, not its twelve
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    log = logging.getLogger("octavo")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("octavo: %(message)s"))
        log.addHandler(handler)
