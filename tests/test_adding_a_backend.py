"""docs/adding-a-backend.md, followed literally: a copy of the package is changed as its blocks say, and used."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "adding-a-backend.md"
BLOCK = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
PLACES = {  # where a block that is no file goes: before or after which line
    "in WRITTEN": ("after", "WRITTEN: dict[str, frozenset[str]] = {\n"),
    "in BACKENDS before reference": ("before", '    Backend(\n        name="reference",\n'),
}
USE = """
import torch
import octavo
from octavo.testing.inputs import make_batch

spec = octavo.AttentionSpec(8, 2, 64, kv_dtype="bfloat16", layout="nhd", page_size=16, max_query_len=2)
choice = octavo.choose(spec, "cpu")
assert (choice.prefill.backend, choice.decode.backend) == ("toy", "toy"), choice
for plan in ({}, {"num_decodes": 3, "max_query_len": 9}):
    batch = make_batch(spec, [1, 40, 77, 33], [1, 2, 1, 9])
    got, want = batch.run("toy", **plan), batch.run("reference", **plan)
    assert (got.float() - want.float()).abs().max() <= 2.0**-7, plan
try:
    octavo.choose(octavo.AttentionSpec(8, 2, 64, window=5), "h200", backend="toy")
except octavo.Unsupported as refusal:
    assert len(refusal.reasons) >= 3, refusal.reasons
print("used")
"""


def run(folder: Path, *command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A copy of the package with every block applied in turn, and the commands of the page."""
    folder = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "octavo", folder / "octavo", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name in ("tools", "README.md"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, folder / name)
    commands = []
    for title, text in BLOCK.findall(PAGE.read_text()):
        name, _, place = title.partition(", ")
        if title == "run":
            commands += text.splitlines()
        elif place:
            file, (side, line) = folder / name, PLACES[place]
            source = file.read_text()
            assert source.count(line) == 1, f"{name} has no one place {line!r}"
            file.write_text(source.replace(line, line + text if side == "after" else text + line))
        else:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)
    return folder, commands


def test_the_new_backend_is_chosen_and_right(followed):
    assert "used" in run(followed[0], sys.executable, "-c", USE)


def test_the_commands_of_the_page_run(followed):
    folder, commands = followed
    assert len(commands) == 2
    for command in commands:
        run(folder, "bash", "-c", command.replace("python", sys.executable, 1))
    rules = (folder / "docs" / "rules.md").read_text()
    assert "## toy" in rules and "| a CPU | x | x |" in rules


def test_the_new_files_keep_the_house(followed):
    """Style and arrows: nothing that the page says to write would be refused by this repository's own checks."""
    folder, _ = followed
    shutil.copy(ROOT / "pyproject.toml", folder)
    files = [*(folder / "octavo" / "kernels" / "toy").glob("*.py"), folder / "octavo" / "backends.py"]
    for command in (("check",), ("format", "--check")):
        run(folder, sys.executable, "-m", "ruff", *command, *map(str, files))
    for file in files[:-1]:
        assert "reference" not in re.findall(r"^(?:from|import) (\S+)", file.read_text(), re.MULTILINE)
