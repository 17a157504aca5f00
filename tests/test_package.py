"""What is uploaded: a wheel and an sdist, the same bytes each time, that install where nothing else is."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build", reason="build is in the extra dev")
pytest.importorskip("hatchling", reason="hatchling is in the extra dev")
ROOT = Path(__file__).resolve().parent.parent


def build(source: Path, out: Path, *what: str) -> dict[str, Path]:
    """Build in this environment; {suffix: file}."""
    command = [sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", str(out), str(source)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return {path.suffix: path for path in out.iterdir()}


def test_every_need_has_a_lowest_version():
    """What `make test-lowest` installs is every package that pyproject.toml names, at its lower bound."""
    found = subprocess.run([sys.executable, str(ROOT / "tools" / "lowest.py")], capture_output=True, text=True)
    pins = dict(line.split("==") for line in found.stdout.splitlines())
    needs = re.findall(r'^    "([a-z]+)', (ROOT / "pyproject.toml").read_text().split("\ndependencies = [")[1], re.M)
    assert {"torch", "triton", "numpy", "typer", "rich"} <= set(needs[:5]) <= set(pins)
    assert pins["torch"] == "2.10" and pins["triton"] == "3.6" and pins["transformers"] == "5.17"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist, and the wheel made of it: what a user's pip does."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def test_the_same_sources_give_the_same_bytes(built, tmp_path):
    again = build(ROOT, tmp_path)
    assert set(built) == set(again) == {".whl", ".gz"}
    for suffix, path in built.items():
        digests = {hashlib.sha256(p.read_bytes()).hexdigest() for p in (path, again[suffix])}
        assert len(digests) == 1, f"{path.name} differs from build to build"


def test_the_wheel_holds_the_package_and_nothing_else(built):
    names = zipfile.ZipFile(built[".whl"]).namelist()
    sources = {str(p.relative_to(ROOT)) for p in (ROOT / "octavo").rglob("*") if p.is_file() and p.suffix != ".pyc"}
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == sources and any(name.endswith("LICENSE") for name in names)


def test_the_sdist_holds_what_its_tests_need(built):
    with tarfile.open(built[".gz"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("pyproject.toml", "README.md", "LICENSE", "Makefile", "tests/conftest.py", "tools/environment.py"):
        assert needed in names
    assert not [n for n in names if re.search(r"__pycache__|\.venv|(^|/)\.(?!gitignore)", n)]


@pytest.mark.parametrize("suffix", [".whl", pytest.param(".gz", marks=pytest.mark.slow)])
def test_it_installs_in_a_clean_environment_and_explains(built, suffix, tmp_path):
    """The files alone are installed; their needs are found where this Python has them, by a path file."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    # hatchling, of which an sdist is built without isolation, comes by the path file too.
    site = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    (site / "needs.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")))
    command = [str(python), "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    done = subprocess.run([*command, str(built[suffix])], **run)
    assert done.returncode == 0, done.stderr[-2000:]
    where = subprocess.run([str(python), "-c", "import octavo; print(octavo.__file__)"], **run)
    assert where.stdout.strip().startswith(str(site)), where
    explain = [str(tmp_path / "venv" / "bin" / "octavo"), "explain", "--model", "llama-3.1-8b", "--device", "h200"]
    told = subprocess.run(explain, **run)
    assert told.returncode == 0 and "gluon" in told.stdout, told.stderr[-2000:]
