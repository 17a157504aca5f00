"""The house keeps its shape (docs/architecture.md): arrows point one way, importing is free, files stay readable."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "octavo"

# A module imports modules of its own floor and of those below. Rooms are packages, so a new file in one needs no entry.
FLOORS = (
    {"errors", "spec", "formats", "layouts", "device", "calls", "indexer_calls", "notices"},
    {
        "reference",
        "rules",
        "backends",
        "tuning",
        "hopper_tuning",
        "known_models",
        "configs",
        "kernels",
        "indexer_backends",
    },
    {"choose", "plan_text", "indexer_choose", "models"},
    {"ops", "indexer_ops", "cache", "attention", "indexer"},
    {"integrations", "serve", "cli", "bench", "testing", "quality", "warmup", "__main__"},
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
OPTIONAL = ("triton", "vllm", "sglang", "transformers", "typer", "rich", "matplotlib", "jinja2")
SOURCES = sorted(PACKAGE.rglob("*.py"))
# __init__ only names where things are, for type checkers and on access.
MODULES = [path for path in SOURCES if path != PACKAGE / "__init__.py"]


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path):
    """(line, absolute name) of everything that a file of the package imports, inside functions too."""
    package = name_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = [*base, *(node.module or "").split(".")] if node.module else base
            for alias in node.names:
                deeper = ROOT.joinpath(*base, alias.name)
                is_module = deeper.is_dir() or deeper.with_suffix(".py").is_file()
                yield node.lineno, ".".join([*base, alias.name] if is_module else base)


def room_of(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def wrong_arrows(path):
    here = room_of(name_of(path))
    for line, target in imports_of(path):
        room = room_of(target) if target.startswith("octavo.") else None
        if room is not None and FLOOR[room] > FLOOR[here]:
            yield f"{path.relative_to(ROOT)}:{line} imports {target}, which is a floor above"


def test_every_module_has_a_floor():
    rooms = {room_of(name_of(path)) for path in MODULES}
    assert rooms <= FLOOR.keys(), f"give {sorted(rooms - FLOOR.keys())} a floor here and in docs/architecture.md"


def test_arrows_point_down():
    assert [wrong for path in MODULES for wrong in wrong_arrows(path)] == []


def test_a_wrong_arrow_is_seen(tmp_path, monkeypatch):
    """The test above can fail: imports are seen in every spelling, inside functions too."""
    package = tmp_path / "octavo"
    package.mkdir()
    (package / "cache.py").touch()
    (package / "spec.py").write_text(
        "import octavo.choose\nfrom . import cache, errors\nfrom .attention import Attention\n"
        "def f():\n    from octavo.ops import append\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    found = [wrong.split(" imports ")[1].split(",")[0] for wrong in wrong_arrows(package / "spec.py")]
    assert sorted(found) == ["octavo.attention", "octavo.cache", "octavo.choose", "octavo.ops"]


@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_kernels_import_neither_each_other_nor_the_reference(backend):
    other = {"triton": "gluon", "gluon": "triton"}[backend]
    for path in (PACKAGE / "kernels" / backend).rglob("*.py"):
        for line, target in imports_of(path):
            banned = (f"octavo.kernels.{other}", "octavo.reference")
            assert not target.startswith(banned), f"{path.relative_to(ROOT)}:{line} imports {target}"


def test_the_reference_imports_no_kernel():
    for path in (PACKAGE / "reference").rglob("*.py"):
        for line, target in imports_of(path):
            assert not target.startswith(("octavo.kernels", "triton")), f"{path.relative_to(ROOT)}:{line} {target}"


def run_python(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("touched", ["import octavo", "import octavo; [getattr(octavo, n) for n in octavo.__all__]"])
def test_octavo_loads_no_optional_package(touched):
    """Neither importing octavo nor touching each public name loads one of them."""
    assert run_python(f"import sys; {touched}; print([n for n in {OPTIONAL} if n in sys.modules])") == "[]"


def test_explain_loads_neither_a_framework_nor_a_plotter():
    code = (
        "import sys; from octavo.cli.main import app; from typer.testing import CliRunner;"
        "r = CliRunner().invoke(app, ['explain', '--model', 'llama-3.1-8b', '--device', 'h200']);"
        "assert r.exit_code == 0, r.output;"
        "print([n for n in ('triton', 'vllm', 'sglang', 'transformers', 'matplotlib') if n in sys.modules])"
    )
    assert run_python(code) == "[]"


def test_importing_octavo_is_nearly_free():
    """Under 50 ms of a processor's time on top of `import torch`, in the best of five fresh processes."""
    code = "import time, torch; start = time.process_time(); import octavo; print(time.process_time() - start)"
    seconds = []
    for _ in range(5):
        seconds.append(float(run_python(code)))
        if seconds[-1] < 0.05:
            break
    assert min(seconds) < 0.05


def text_files():
    for pattern in ("*.md", "*.toml", "Makefile", ".ci/*", "requirements/*", "tools/*", "docs/**/*", "benchmarks/**/*"):
        yield from ROOT.glob(pattern)
    for folder in ("octavo", "tests"):
        yield from (ROOT / folder).rglob("*")


def test_no_file_outgrows_its_room():
    python = [p for folder in ("octavo", "tests", "tools") for p in (ROOT / folder).rglob("*.py")]
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in python}
    assert {name: n for name, n in lengths.items() if n > 520} == {}


def test_nothing_names_a_machine_or_a_registrys_host():
    """Paths of one machine, and hosts that packages come from: what is installed is named, where from is the user's."""
    private = re.compile(r"/(?:work|root|home/\w+|opt/\w+)/|pypi\.org|pythonhosted|npmjs|download\.pytorch")
    found = []
    for path in text_files():
        if path.is_dir() or "__pycache__" in path.parts or path == Path(__file__).resolve():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            match = private.search(line)
            if match:
                found.append(f"{path.relative_to(ROOT)}:{number} {match.group()}")
    assert found == []


def test_the_version_is_in_one_place():
    import octavo

    assert re.fullmatch(r"\d+\.\d+\.\d+", octavo.__version__)
    holding = [p for p in (*SOURCES, ROOT / "pyproject.toml") if f'"{octavo.__version__}"' in p.read_text()]
    assert holding == [PACKAGE / "__init__.py"]


def test_what_octavo_needs_is_pinned_for_machines_without_a_gpu():
    """Each direct dependency has an exact version in the constraints: the tests run with what they were made for."""
    listed = (ROOT / "pyproject.toml").read_text().split("[project.scripts]")[0].split("\ndependencies")[1]
    needed = {name.lower() for name in re.findall(r'"([A-Za-z][\w-]*)(?:\[\w+\])?>=', listed)}
    pins = "".join(path.read_text() for path in (ROOT / "requirements").glob("constraints-*.txt"))
    pinned = {name.lower() for name in re.findall(r"^([\w-]+)==", pins, re.MULTILINE)}
    assert {"torch", "triton", "transformers", "pytest"} <= needed
    assert needed - pinned == set()
