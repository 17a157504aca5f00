"""What the site shows that docs/ does not hold: README.md as its first page, and files of the repository as text.

A hook of mkdocs.yml. In the repository a page may link to any file; the site holds the pages alone, so that a link to
another file becomes its path.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """index.md is README.md; links that leave docs/ are shown as paths."""
    folder = ROOT / "docs" / Path(page.file.src_uri).parent
    if page.file.src_uri == "index.md":
        markdown, folder = (ROOT / "README.md").read_text(encoding="utf-8"), ROOT

    def link(found: re.Match[str]) -> str:
        image, text, target, anchor = found.groups()
        if "://" in target:
            return found[0]
        path = (folder / target).resolve()
        if not path.exists():
            raise FileNotFoundError(f"{page.file.src_uri} links to {target}")
        if not path.is_relative_to(ROOT / "docs"):
            return f"{text} (`{path.relative_to(ROOT)}`)"
        away = "../" * page.file.src_uri.count("/")
        return f"{image}[{text}]({away}{path.relative_to(ROOT / 'docs').as_posix()}{anchor or ''})"

    return LINK.sub(link, markdown)
