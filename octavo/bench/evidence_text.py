"""What every chapter of the evidence document is written with: its text and figures, tables, names, times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .evidence_page import plain
from .report import Figure

FIGURE_NAMES = "evidence-*.svg"


@dataclass
class Document:
    """Text, and the figures that it shows: SVG by file name."""

    text: str
    figures: dict[str, str] = field(default_factory=dict)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table and an empty line; columns after the first are numbers."""
    rules = ["---", *["---:"] * (len(header) - 1)]
    return ["| " + " | ".join(row) + " |" for row in (header, rules, *rows)] + [""]


def shown(figure: Figure, made: Document, folder: str) -> list[str]:
    """A figure, kept in `made`, as a link into the folder and its caption."""
    name = FIGURE_NAMES.replace("*", re.sub(r"[^a-z0-9]+", "-", figure.title.lower()).strip("-")[:100])
    made.figures[name] = figure.svg
    title = figure.title[:1].upper() + figure.title[1:]
    return [f"![{plain(figure.alt)}]({folder}/{name})", "", f"{plain(title)}. {plain(figure.caption)}", ""]


def micro(us: float) -> str:
    """Microseconds: a digit after the point of fewer than a thousand."""
    return f"{us:,.1f}" if us < 1000 else f"{us:,.0f}"


def code(text: str) -> str:
    """A name as code; what is not letters, digits and the signs of cases' names is plain text instead."""
    return f"`{text}`" if re.fullmatch(r"[\w./:+-]+", text, re.ASCII) else plain(text)
