"""The docs as a site: built without a warning, every page reachable, every public name in the API reference."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import octavo

pytest.importorskip("mkdocs", reason="mkdocs-material is the extra docs")
pytest.importorskip("material", reason="mkdocs-material is the extra docs")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is in the extra docs")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as CI builds it: a warning is an error."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-3000:]
    return out


def test_every_page_is_in_the_navigation_and_built(site):
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert listed - {"README.md"} == pages
    assert all((site / page).with_suffix(".html").is_file() for page in pages)


def test_the_first_page_is_the_readme(site):
    title = (ROOT / "README.md").read_text().splitlines()[0].lstrip("# ")
    assert f">{title}<" in re.sub(r"<a class=.headerlink.*?</a>", "", (site / "index.html").read_text())


def test_links_between_pages_lead_somewhere(site):
    """mkdocs checks what Markdown links to; this also sees what the hook rewrote."""
    for page in site.rglob("*.html"):
        if page.name == "404.html":
            continue
        for target in re.findall(r'(?:href|src)="(?!\w+:)([^"#?]+)', page.read_text()):
            assert (page.parent / target).exists(), f"{page.relative_to(site)} links to {target}"


def test_every_public_name_is_in_the_reference(site):
    anchors = set(re.findall(r'id="octavo\.[\w.]*?(\w+)"', (site / "reference.html").read_text()))
    assert set(octavo.__all__) - {"__version__"} <= anchors
