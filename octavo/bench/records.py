"""Records: one JSON object a line, the only source of every figure, table and plot.

Each is flushed as it is made, so that an interrupted run loses at most the line it was writing, and carries the
environment it was measured in.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from .. import __version__
from ..errors import InvalidInput

SCHEMA = 1
OPS = ("decode", "verify", "prefill", "append", "mqa_logits", "paged_mqa_logits", "topk", "plan", "step")


_REQUIRED = ("case", "op", "backend", "run", "spec")


@dataclass
class Record:
    """One measured, failed or refused cell.

    Attributes:
        case: a path of a name, "decode/llama-3.1-8b/tp1/b64/ctx4096". op: one of OPS. backend: octavo's or a
            peer's name.
        run: the run it belongs to; sides of a comparison share it. spec: what was run, layout and page size included.
        us, us_p20, us_p80: microseconds of a call; None with `error`. timing: the method in words.
        bytes, flops: the fewest that the work needs. rel_err, rel_err_bf16: relative error to fp64, and plain bf16's.
        ceiling: rates measured in the same run. env: gpu, versions, commit. error: why there is no time.
    """

    case: str
    op: str
    backend: str
    run: str
    spec: dict[str, Any]
    timing: str = ""
    us: float | None = None
    us_p20: float | None = None
    us_p80: float | None = None
    bytes: int | None = None
    flops: int | None = None
    rel_err: float | None = None
    rel_err_bf16: float | None = None
    ceiling: dict[str, float] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    time: str = ""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise InvalidInput(f"op must be one of {', '.join(OPS)}", repr(self.op))
        if (self.us is None) == (self.error is None):
            raise InvalidInput("a record must have either us or error", f"us {self.us}, error {self.error}")
        if not self.time:
            self.time = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")

    def to_json(self) -> str:
        """One line, without the optional fields that are not set."""
        return json.dumps({k: v for k, v in asdict(self).items() if k in _REQUIRED or v not in (None, {}, "")})


class RecordFile:
    """A JSONL file that records are appended to, each flushed; a context manager."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[str] | None = None

    def __enter__(self) -> RecordFile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._mend_last_line()
        self._file = self.path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()

    def write(self, record: Record) -> None:
        """Append one record and flush it to the disk's cache."""
        assert self._file is not None, "used outside its with block"
        self._file.write(record.to_json() + "\n")
        self._file.flush()

    def done(self) -> set[tuple[str, str]]:
        """(case, backend) of the records that are there, for a run that goes on where it was interrupted."""
        if not self.path.exists():
            return set()
        self._mend_last_line()
        return {(r.case, r.backend) for r in read_records([self.path])}

    def _mend_last_line(self) -> None:
        """Cut what an interrupted write left: a last line without its end."""
        if not self.path.exists():
            return
        data = self.path.read_bytes()
        if data and not data.endswith(b"\n"):
            os.truncate(self.path, data.rfind(b"\n") + 1)


def read_records(paths: Iterable[str | Path]) -> Iterator[Record]:
    """Every record of the files, in order. A line that is not one raises InvalidInput naming file, line and fault."""
    known = set(Record.__dataclass_fields__)
    for path in map(Path, paths):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{path} must be a readable JSONL file", str(error)) from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                fields = json.loads(line)
            except json.JSONDecodeError as error:
                raise InvalidInput(
                    f"{place} must hold one JSON object", f"a line that ends or breaks: {error.msg}"
                ) from error
            if not isinstance(fields, dict):
                raise InvalidInput(f"{place} must hold one JSON object", type(fields).__name__)
            if fields.get("schema") != SCHEMA:
                raise InvalidInput(f"{place} must have schema {SCHEMA}", repr(fields.get("schema")))
            missing = [name for name in _REQUIRED if name not in fields]
            if missing or not set(fields) <= known:
                wrong = f"no {', '.join(missing)}" if missing else f"also {', '.join(sorted(set(fields) - known))}"
                raise InvalidInput(f"{place} must have the fields of a record", wrong)
            yield Record(**fields)


def environment(device: Any = None) -> dict[str, str]:
    """What a figure depends on: GPU or processor, torch, triton, driver and octavo versions, and the commit if there is
    one.
    """
    import torch

    env = {"torch": torch.__version__, "python": platform.python_version(), "octavo": __version__}
    if torch.device(device or "cpu").type == "cuda":
        env["gpu"] = torch.cuda.get_device_name(device)
        env["driver"] = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0]
    else:
        env["gpu"] = "none"
        env["cpu"] = platform.processor() or platform.machine()
    triton = sys.modules.get("triton")
    if triton is not None:
        env["triton"] = triton.__version__
    commit = _output(["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"])
    if commit:
        env["commit"] = commit
    return env


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
