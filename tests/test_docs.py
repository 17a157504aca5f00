"""The docs are true: their Python runs, their commands exist, and where they show an answer it is the answer.

In README.md and docs/: the ```python blocks of a file run one after the other in one namespace. In ```console blocks
`$ octavo ...` lines run and what stands below is what they print (a line `...` stands for any lines); in ```bash blocks
the commands run. Of commands that take minutes or need a model the options are checked; of `make` lines the target.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LONG = {
    "demo",
    "serve",
    "bench",
    "report",
    "accuracy",
    "calibrate",
    "warmup",
    "check",
}  # only their options are checked


def blocks(path, *languages):
    """(line, text) of each fenced block of a file in one of these languages."""
    text = path.read_text()
    return [
        (text[: match.start()].count("\n") + 2, match[2]) for match in BLOCK.finditer(text) if match[1] in languages
    ]


def commands(path):
    """(where, command line, the output that is shown or None)."""
    for line, text in blocks(path, "console"):
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, _, shown = part.replace("\\\n", " ").partition("\n")
            yield f"{path.name}:{line}", command, shown.strip("\n") or None
    for line, text in blocks(path, "bash"):
        for command in text.replace("\\\n", " ").splitlines():
            yield f"{path.name}:{line}", command, None


def ids(cases):
    return [str(case[0]) for case in cases]


PYTHON = [(path.name, path) for path in FILES if path.exists() and blocks(path, "python")]
COMMANDS = [case for path in FILES if path.exists() for case in commands(path)]


@pytest.mark.parametrize(("name", "path"), PYTHON, ids=ids(PYTHON))
def test_python_blocks_run(name, path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__docs__"}
    for line, text in blocks(path, "python"):
        # Blank lines in front make a traceback point into the document.
        exec(compile("\n" * (line - 1) + text, str(path), "exec"), namespace)


@pytest.mark.parametrize(("where", "command", "shown"), COMMANDS, ids=ids(COMMANDS))
def test_commands_do_what_is_shown(where, command, shown, monkeypatch):
    words = shlex.split(command, comments=True)
    while words and re.fullmatch(r"\w+=\S*", words[0]):
        words.pop(0)
    if not words:
        return
    if words[0] == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert [w for w in words[1:] if "=" not in w and w not in targets] == []
    elif words[0] == "octavo":
        check_octavo(words[1:], shown, monkeypatch)
    else:
        assert shown is None, f"{words[0]} is not run here, so its output cannot be shown"


def check_octavo(words, shown, monkeypatch):
    from typer.testing import CliRunner

    from octavo.cli.main import app

    monkeypatch.setenv("COLUMNS", "100")
    if words[0] in LONG:
        answer = CliRunner().invoke(app, [words[0], "--help"])
        assert answer.exit_code == 0, answer.output
        unknown = [w for w in words[1:] if w.startswith("--") and w.partition("=")[0] not in answer.output]
        assert unknown == []
        return
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code in (0, 2), answer.output
    if shown is not None:
        assert_shows(answer.output, shown)


def assert_shows(output, shown):
    """Each stretch of `shown` between lines `...` is in `output`, whole and in order, first and last at its ends."""
    lines = [line.rstrip() for line in output.strip("\n").splitlines()]
    stretches, position = [[]], 0
    for line in shown.splitlines():
        if line.strip() == "...":
            stretches.append([])
        else:
            stretches[-1].append(line.rstrip())
    for number, stretch in enumerate(stretches):
        fits = [i for i in range(position, len(lines) - len(stretch) + 1) if lines[i : i + len(stretch)] == stretch]
        assert fits, "the command no longer prints\n" + "\n".join(stretch) + "\nbut\n" + "\n".join(lines)
        assert number > 0 or fits[0] == 0, "the command prints something before\n" + "\n".join(stretch)
        position = fits[0] + len(stretch)
    assert position == len(lines) or not stretches[-1], "the command prints more:\n" + "\n".join(lines[position:])


def test_a_wrong_answer_is_seen():
    assert_shows("a\nb\nc\nd\n", "a\n...\nc\nd")
    assert_shows("a\nb\nc\n", "a\n...")
    for shown in ("a\nc", "b\n...", "a\n...\nb", "a\n...\nd", "a\nb\nc\nd"):
        with pytest.raises(AssertionError):
            assert_shows("a\nb\nc\n", shown)


def test_the_readme_stays_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160


def test_links_between_files_lead_somewhere():
    broken = []
    for path in [*FILES, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]:
        text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)|src=\"([^\"]+)\"", text):
            target = target[0] or target[1]
            if not target.startswith(("http:", "https:")) and not (path.parent / target).exists():
                broken.append(f"{path.name}: {target}")
    assert broken == []
