"""Progress of long commands, on stderr: a bar on a terminal, a line elsewhere; stdout stays what was asked for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..notices import log


def for_messages() -> Any:
    """A rich Console on stderr that shows what it is given as it is: names of files may look like markup."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, markup=False)


def saying(progress: Any, status: Any) -> Callable[[str], None]:
    """say(line): the status line of a terminal, a printed line elsewhere; `progress`: a rich Console."""
    from rich.text import Text

    if progress.is_terminal:
        return lambda line: status.update(Text(line))
    return lambda line: progress.print(line, markup=False, soft_wrap=True)


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


def for_tables(width: int) -> Any:
    """A rich Console on stdout: as wide as its terminal, `width` columns where it is none, whatever stderr is."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


def show_table(console: Any, table: Any) -> None:
    """Print a rich Table; where the terminal is too narrow for its figures, each row as lines of "column: figure"."""
    from rich.measure import Measurement
    from rich.text import Text

    if Measurement.get(console, console.options.update(width=10_000), table).minimum <= console.width:
        console.print(table)
        return
    if table.title:
        console.print(table.title, style="italic")
    first, *others = table.columns
    for name, *figures in zip(*(column.cells for column in table.columns), strict=True):
        console.print(Text.assemble(f"{first.header}: ", name))
        for column, figure in zip(others, figures, strict=True):
            if str(figure):
                console.print(Text.assemble(f"  {column.header}: ", figure))


def is_number(word: str) -> bool:
    """Whether it is a whole number in plain digits, of a size that something here can have."""
    return word.isascii() and word.isdigit() and len(word) <= 18


def quiet() -> None:
    """Keep transformers' progress bars and advice out of ours; octavo's own warnings stay, one line each."""
    import huggingface_hub
    import transformers

    huggingface_hub.utils.logging.set_verbosity_error()  # a hub out of reach is our one line, not its twelve
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("octavo: %(message)s"))
        log.addHandler(handler)
