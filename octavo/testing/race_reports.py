"""What racecheck reports of warp-specialised kernels: which of it is of a kind that is known, by the lines it names.

racecheck does not follow the barriers that Triton's own dispatch of warps and a tile's record are ordered by
(docs/trust.md), so it reports each of their accesses. A report is of a kind if all its accesses are; any other is new.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import octavo

Line = tuple[str, int]  # a file's name and a number

KERNELS = Path(octavo.__file__).parent / "kernels" / "gluon"
SPECIALISED = ("decode.py", "prefill.py", "mqa_logits.py")
RECORD = ("_prefill_tiles.py", ("put", "get"))
REPORT = "Race reported between"
ACCESS = re.compile(r"(?:Read|Write) access at \S+ in (\S+):(\d+)")


@cache
def kinds() -> tuple[frozenset[Line], ...]:
    """The lines of each kind: of the dispatch of each kernel, and of the record that prefill's producer hands on."""
    file, names = RECORD
    record = [f for f in ast.walk(_tree(file)) if isinstance(f, ast.FunctionDef) and f.name in names]
    lines = frozenset((file, n) for f in record for n in range(f.lineno, (f.end_lineno or f.lineno) + 1))
    return (*(frozenset((name, n) for n in dispatch_lines(name)) for name in SPECIALISED), lines)


def dispatch_lines(file: str) -> set[int]:
    """Where Triton's dispatch says it is from: a kernel's name, its call of warp_specialize, and what follows that."""
    found = set()
    for kernel in (f for f in ast.walk(_tree(file)) if isinstance(f, ast.FunctionDef)):
        for number, statement in enumerate(kernel.body):
            if isinstance(statement, ast.Expr) and "warp_specialize" in ast.unparse(statement.value)[:40]:
                following = kernel.body[number + 1 : number + 2]
                found |= {kernel.lineno, statement.lineno, *(s.lineno for s in following)}
    return found


def _tree(file: str) -> ast.Module:
    return ast.parse((KERNELS / file).read_text())


def unknown(text: str) -> tuple[int, list[str]]:
    """(how many reports a log of racecheck has, those that are of no known kind)."""
    reports = text.split(REPORT)[1:]
    return len(reports), [REPORT + report for report in reports if not _known(report)]


def _known(report: str) -> bool:
    lines = {(Path(file).name, int(line)) for file, line in ACCESS.findall(report)}
    return bool(lines) and any(lines <= kind for kind in kinds())
