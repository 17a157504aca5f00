"""`octavo report`: records and accuracy files as one self-contained page, and as Markdown tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..bench.evidence import Evidence

EXTRAS = "report"


def report(
    files: Annotated[list[Path], typer.Argument(help="JSONL files of octavo bench, JSON files of octavo accuracy.")],
    out: Annotated[Path, typer.Option(help="Where the HTML page goes.")] = Path("report.html"),
    markdown: Annotated[Path | None, typer.Option(help="Also tables for a README.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Also the first figure, as SVG.")] = None,
    document: Annotated[
        Path | None, typer.Option(help="Also a Markdown document of all of it, its figures in figures/ beside it.")
    ] = None,
) -> None:
    """Draw what was measured: speed against context, every cell with its peers, accuracy, plans, what was refused.

    Exit code 2, with one line that names file, line and fault, for a file that is not what it should be.
    """
    from ..bench import report as pages
    from ..errors import InvalidInput
    from ..quality.load import require

    require(pages.PACKAGES, EXTRAS)
    outs = {"--out": out, "--markdown": markdown, "--figure": figure, "--document": document}
    taken = [path.resolve() for path in files]
    for option, path in outs.items():
        if path is None:
            continue
        pages.writable(path, option)
        if path.resolve() in taken:
            raise InvalidInput(f"{option} must be a file that is neither read nor written otherwise", str(path))
        taken.append(path.resolve())

    from ..bench import evidence, evidence_page

    found = evidence.read(files)
    if not found.cells and not found.accuracy:
        raise InvalidInput("the files must hold at least one record", ", ".join(found.files))
    first = None if figure is None else next(evidence_page.speed_figures(found), None)
    if figure is not None and first is None:
        raise InvalidInput("--figure needs a case at two contexts or more", "none")
    html = evidence_page.page(found)
    pages.write(out, html)
    count, models = len(found.records), len(found.accuracy)
    typer.echo(f"{count} record{'s' * (count != 1)}, {models} accuracy file{'s' * (models != 1)}: {out}")
    if markdown is not None:
        pages.write(markdown, evidence_page.markdown(found))
        typer.echo(f"tables: {markdown}")
    if figure is not None and first is not None:
        pages.write(figure, first.svg)
        typer.echo(f"figure: {figure}")
    if document is not None:
        _write_document(document, files, found)


def _as_typed(files: list[Path]) -> list[str]:
    """The files, those that are all of a folder's records as a pattern."""
    told = []
    for path in files:
        of_folder = sorted(path.parent.glob("*.jsonl"))
        whole = len(of_folder) > 1 and set(of_folder) <= set(files)
        told.append(str(path.parent / "*.jsonl") if whole and path.suffix == ".jsonl" else str(path))
    return list(dict.fromkeys(told))


def _write_document(path: Path, files: list[Path], found: Evidence) -> None:
    """The document and its figures; figures of an earlier one that it does not show are taken away."""
    from ..bench import report as pages
    from ..bench.evidence_document import document
    from ..bench.evidence_text import FIGURE_NAMES

    made = document(found, f"octavo report {' '.join(_as_typed(files))} --document {path}")
    folder = path.expanduser().absolute().parent / "figures"
    folder.mkdir(exist_ok=True)
    for name, svg in made.figures.items():
        pages.write(folder / name, svg)
    for old in folder.glob(FIGURE_NAMES):
        if old.name not in made.figures:
            old.unlink()
    pages.write(path, made.text)
    typer.echo(f"document: {path}, {len(made.figures)} figures in {folder}")
