"""Writes what the docs print: the output below each `$ octavo ...` of README.md and docs/, and docs/rules.md.

Run by `make docs`; tests/test_docs.py compares. Output that is shown in part (with a line `...`) is left to its author.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from typer.testing import CliRunner

from octavo import backends, indexer_backends
from octavo.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
CONSOLE = re.compile(r"(?<=^```console\n)(.*?)(?=^```$)", re.MULTILINE | re.DOTALL)


def refreshed(block: re.Match[str]) -> str:
    """One console block with the output of its octavo commands as it is now."""
    parts = re.split(r"^\$ ", block[1], flags=re.MULTILINE)[1:]
    out = []
    for part in parts:
        command, _, shown = part.partition("\n")
        words = shlex.split(command)
        if words[0] == "octavo" and shown.strip() and "\n...\n" not in f"\n{shown}":
            lines = CliRunner().invoke(app, words[1:]).output.strip("\n").splitlines()
            shown = "\n".join(line.rstrip() for line in lines) + "\n"
        out.append(f"$ {command}\n{shown}")
    return "".join(out)


def main() -> None:
    os.environ["COLUMNS"] = "100"
    rules = backends.rules_markdown() + indexer_backends.rules_markdown()
    (ROOT / "docs" / "rules.md").write_text(rules, encoding="utf-8")
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        new = CONSOLE.sub(refreshed, text)
        if new != text:
            path.write_text(new, encoding="utf-8")
            print(f"rewritten: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
