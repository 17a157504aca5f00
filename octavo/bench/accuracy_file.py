"""Reading a file of `octavo accuracy`: what a page is made from must be there and be what it says, or one line tells.

The file may be anybody's: every value that is shown is checked for its type before a template or a figure sees it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..configs import read_json
from ..errors import InvalidInput

SCHEMA = 1  # of what octavo accuracy writes
_NEEDED = ("model", "variants", "sides", "text", "retrieval", "environment")
_OF_EVERY_SIDE, _OF_VARIANTS = ("perplexity",), ("change", "kl", "same_top")


def read_accuracy(path: Path) -> dict[str, Any]:
    """The results in the file. InvalidInput, in one line, where it is not a file of octavo accuracy."""
    found = read_json(path)
    missing = [name for name in _NEEDED if name not in found]
    if missing or found.get("schema") != SCHEMA:
        what = f"no {', '.join(missing)}" if missing else f"schema {found.get('schema')!r}"
        raise InvalidInput(f"{path} must be a file of octavo accuracy, schema {SCHEMA}", what)
    fault = _fault(found)
    if fault is not None:
        raise InvalidInput(f"{path} must be a file of octavo accuracy, schema {SCHEMA}", f"{fault} of another kind")
    return found


def _fault(found: dict[str, Any]) -> str | None:
    """The first entry that is not what the page needs, by its place; None where all are."""
    model, text, sides, environment = (found[name] for name in ("model", "text", "sides", "environment"))
    for name, of, texts, numbers in (
        ("model", model, ("name", "dtype"), ()),
        ("text", text, ("source",), ("windows", "length")),
    ):
        if not isinstance(of, dict):
            return name
        wrong = [key for key in texts if not isinstance(of.get(key), str)]
        wrong += [key for key in numbers if not _is_count(of.get(key))]
        if wrong:
            return f"{wrong[0]} of {name}"
    if not isinstance(environment, dict) or not all(isinstance(value, str) for value in environment.values()):
        return "environment"
    if not isinstance(sides, dict) or not sides:
        return "sides"
    for index, (name, side) in enumerate(sides.items()):
        for key in (*_OF_EVERY_SIDE, *(_OF_VARIANTS if index else ())):
            if not isinstance(side, dict) or not _is_estimate(side.get(key)):
                return f"{key} of {name!r}"
    return _retrieval_fault(found["retrieval"], list(sides))


def _retrieval_fault(rows: Any, sides: Sequence[str]) -> str | None:
    if not isinstance(rows, list):
        return "retrieval"
    for index, row in enumerate(rows):
        right = row.get("right") if isinstance(row, dict) else None
        if not isinstance(right, dict) or not (_is_count(row.get("context")) and _is_count(row.get("trials"))):
            return f"row {index} of retrieval"
        for name in sides:
            answers = right.get(name)
            if not isinstance(answers, list) or not all(isinstance(answer, bool) for answer in answers):
                return f"row {index} of retrieval"
    return None


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300 and math.isfinite(value)
    )


def _is_estimate(value: Any) -> bool:
    """{"value", "low", "high"}, the last two null where there is no interval."""
    return (
        isinstance(value, dict)
        and _is_number(value.get("value"))
        and all(name in value and (value[name] is None or _is_number(value[name])) for name in ("low", "high"))
    )
