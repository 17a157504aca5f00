"""The lowest versions that pyproject.toml allows, as constraints for pip; standard library only.

    python3 tools/lowest.py > constraints.txt

`make test-lowest` runs the tests with them. Tools that check the sources (ruff, pyright) are left out: only what runs
with the package has a lowest version that matters.
"""

import re
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"
BOUND = re.compile(r'"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?>=([0-9.]+)[^"]*"')
LEFT_OUT = {"ruff", "pyright"}


def bounds(text: str) -> dict[str, str]:
    """{package: lowest version} of [project] and its extras."""
    start, end = text.index("\ndependencies = ["), text.index("\n[project.scripts]")
    found: dict[str, str] = {}
    for name, version in BOUND.findall(text[start:end]):
        if found.setdefault(name, version) != version:
            raise SystemExit(f"{name} has two lower bounds: {found[name]} and {version}")
    return {name: version for name, version in found.items() if name not in LEFT_OUT}


if __name__ == "__main__":
    for package, lowest in sorted(bounds(PROJECT.read_text()).items()):
        print(f"{package}=={lowest}")
