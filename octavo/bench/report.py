"""Self-contained HTML pages of measurements: text, tables and figures in one file, without network or script.

A page is a template under ``templates/`` that extends ``base.html``, and a dict. Everything from outside (a model's
words, a file's name) is escaped by jinja2; the only markup let through is what templates themselves hold. Figures are
images in data URIs, so that nothing in one can reach the page.
"""

from __future__ import annotations

import base64
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InvalidInput

TEMPLATES = Path(__file__).parent / "templates"
PACKAGES = ("jinja2", "matplotlib")  # what a page with figures needs; the extra `report`


@dataclass(frozen=True)
class Figure:
    """One figure of a page.

    Attributes:
        title: a heading of a few words.
        svg: the drawing, as an SVG document.
        alt: what it shows, for who does not see it.
        caption: what was measured and how.
    """

    title: str
    svg: str
    alt: str
    caption: str

    @property
    def uri(self) -> str:
        """The drawing as a data URI."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.svg.encode()).decode("ascii")


def render(template: str, **page: Any) -> str:
    """The page that `template` (a file of templates/) makes of `page`. A name the template uses must be given."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(count=count, percent=percent, span=span)
    return environment.get_template(template).render(**page)


def writable(path: Path, option: str = "--out") -> None:
    """Raise InvalidInput unless a file can be written at `path`, which `option` named: asked before the work."""
    folder = path.expanduser().absolute().parent
    if path.is_dir():
        raise InvalidInput(f"{option} must be a file; {path} is a folder")
    if _is_special(path):
        return
    if not folder.is_dir():
        raise InvalidInput(f"{option} must lie in a folder that exists; {folder} does not")
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InvalidInput(
            f"{option} must lie in a folder that can be written; {folder} cannot: {error.strerror}"
        ) from error


def write(path: Path, text: str) -> None:
    """Write `text` to `path`, which then holds all of it or is as it was, whatever interrupts the writing.

    A device or a pipe is written to, never replaced by a file.
    """
    path = path.expanduser().absolute()
    if _is_special(path):
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"{path} must be writable", error.strerror) from error
        return
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # a temporary file is its owner's alone; a report is as any other file
        temporary.replace(path)
    except OSError as error:
        raise InvalidInput(f"{path} must be writable", error.strerror) from error
    finally:
        temporary.unlink(missing_ok=True)


def _is_special(path: Path) -> bool:
    """Whether it is a device, a pipe or a socket, such as /dev/null."""
    path = path.expanduser()
    return path.exists() and not path.is_file() and not path.is_dir()


def count(value: int) -> str:
    """46603 as "46,603"."""
    return f"{value:,}"


def percent(value: float, digits: int = 2, sign: bool = False) -> str:
    """0.0125 as "1.25 %", with a sign where asked; what is shown as 0 has none."""
    shown = round(value * 100, digits) or 0.0
    return f"{shown:{'+' if sign and shown else ''}.{digits}f} %"


def span(estimate: dict[str, float | None], scale: float = 1.0, digits: int = 2) -> str:
    """The interval of an estimate, as "10.17 to 13.44"; a dash where there is none."""
    low, high = estimate["low"], estimate["high"]
    return "–" if low is None or high is None else f"{low * scale:.{digits}f} to {high * scale:.{digits}f}"
