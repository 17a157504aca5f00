"""What racecheck reports of warp-specialised kernels: which of it is of a kind that is known, by the lines it names.

racecheck does not follow the barriers that Triton's own dispatch of warps and a tile's record are ordered by
(docs/trust.md), so it reports each of their accesses. A report is of a kind if all its accesses are; any other is new.
"""

from __future__ import annotations

import ast
import itertools
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
    record = [f for f in _functions(file) if f.name in names]
    lines = frozenset((file, n) for f in record for n in range(f.lineno, (f.end_lineno or f.lineno) + 1))
    return (*(frozenset((name, n) for n in dispatch_lines(name)) for name in SPECIALISED), lines)


def dispatch_lines(file: str) -> set[int]:
    """Where Triton's dispatch says it is from: a kernel's name, its call of warp_specialize, and what follows that."""
    found = set()
    for kernel in _functions(file):
        for statement, following in itertools.zip_longest(kernel.body, kernel.body[1:]):
            call = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "gl.warp_specialize":
                found |= {kernel.lineno, statement.lineno} | ({following.lineno} if following else set())
    return found


def _functions(file: str) -> list[ast.FunctionDef]:
    tree = ast.parse((KERNELS / file).read_text())
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def known(text: str) -> int:
    """How many reports of a log of racecheck are of a known kind."""
    found = 0
    for report in text.split(REPORT)[1:]:
        lines = {(Path(file).name, int(line)) for file, line in ACCESS.findall(report)}
        found += bool(lines) and any(lines <= kind for kind in kinds())
    return found
