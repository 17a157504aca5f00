"""`octavo report`: records and accuracy files as one self-contained page, and as Markdown tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EXTRAS = "report"


def report(
    files: Annotated[list[Path], typer.Argument(help="JSONL files of octavo bench, JSON files of octavo accuracy.")],
    out: Annotated[Path, typer.Option(help="Where the HTML page goes.")] = Path("report.html"),
    markdown: Annotated[Path | None, typer.Option(help="Also tables for a README.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Also the first figure, as SVG.")] = None,
) -> None:
    """Draw what was measured: speed against context, every cell with its peers, accuracy, plans, what was refused.

    Exit code 2, with one line that names file, line and fault, for a file that is not what it should be.
    """
    from ..bench import report as pages
    from ..errors import InvalidInput
    from ..quality.load import require

    require(pages.PACKAGES, EXTRAS)
    for path in (out, markdown, figure):
        if path is not None:
            pages.writable(path)

    from ..bench import evidence, evidence_page

    found = evidence.read(files)
    if not found.cells and not found.accuracy:
        raise InvalidInput("the files must hold at least one record", ", ".join(found.files))
    pages.write(out, evidence_page.page(found))
    typer.echo(f"{len(found.records)} records, {len(found.accuracy)} accuracy files: {out}")
    if markdown is not None:
        pages.write(markdown, evidence_page.markdown(found))
        typer.echo(f"tables: {markdown}")
    if figure is not None:
        first = next(evidence_page.speed_figures(found), None)
        if first is None:
            raise InvalidInput("a figure needs a case at two contexts or more", "none")
        pages.write(figure, first.svg)
        typer.echo(f"figure: {figure}")
