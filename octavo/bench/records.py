"""Records: one JSON object a line, the only source of every figure, table and plot.

Each is flushed as it is made, so that an interrupted run loses at most the line it was writing, and carries the
environment it was measured in.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from .. import __version__
from ..errors import InvalidInput

SCHEMA = 1
OPS = ("decode", "verify", "prefill", "append", "mqa_logits", "paged_mqa_logits", "topk", "plan", "step", "start")

COMPUTE_BOUND = ("prefill", "mqa_logits")  # told in TFLOP/s; the others in TB/s

_REQUIRED = ("case", "op", "backend", "run", "spec")
_TEXTS = ("case", "op", "backend", "run", "timing", "error", "time", "same_as")
_NUMBERS = ("us", "us_p20", "us_p80", "bytes", "flops", "rel_err", "rel_err_bf16")
_BEGINNINGS = (b'{"case": "', b'{"schema": ')  # of a record's line, by which a cut one is known


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
        same_as: the case that was measured, where this one differs from it in its name alone.
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
    same_as: str | None = None
    time: str = ""
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise InvalidInput(f"op must be one of {', '.join(OPS)}", repr(self.op))
        if (self.us is None) == (self.error is None):
            raise InvalidInput("a record must have either us or error", f"us {self.us}, error {self.error}")
        if not self.time:
            self.time = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")

    def named(self, case: str) -> Record:
        """The record of a case that differs from this one's in its name alone."""
        if case == self.case:
            return self
        error = None if self.error is None else self.error.replace(self.case, case)
        return replace(self, case=case, error=error, same_as=self.same_as or self.case)

    def to_json(self) -> str:
        """One line, without the optional fields that are not set, nor the NaN of a wrong result: JSON has none."""
        return json.dumps(
            {k: v for k, v in asdict(self).items() if k in _REQUIRED or not (v in (None, {}, "") or _not_finite(v))}
        )


class RecordFile:
    """A JSONL file that records are appended to, each flushed; a context manager."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file: IO[str] | None = None

    def __enter__(self) -> RecordFile:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._mend_last_line()
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise InvalidInput(f"{self.path} must be writable", error.strerror) from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._file:
            self._file.close()

    def write(self, record: Record) -> None:
        """Append one record and flush it to the disk's cache."""
        assert self._file is not None, "used outside its with block"
        try:
            self._file.write(record.to_json() + "\n")
            self._file.flush()
        except OSError as error:  # a disk that is full
            raise InvalidInput(f"{self.path} must be writable", error.strerror) from error

    def there(self) -> dict[tuple[str, str], Record]:
        """The last record of each case and backend, for a run that goes on where it was interrupted.

        Raises InvalidInput for a file of anything else, which is left as it is.
        """
        if not self.path.exists():
            return {}
        try:
            self._mend_last_line()
        except OSError as error:
            raise InvalidInput(f"{self.path} must be a file of records", error.strerror) from error
        return {(r.case, r.backend): r for r in read_records([self.path])}

    def _mend_last_line(self) -> None:
        """Cut what an interrupted write left: the beginning of a record without its end. A whole one gets its end."""
        if not self.path.exists():
            return
        if not self.path.is_file():  # a device or a pipe has no end to read to
            raise InvalidInput(f"{self.path} must be a file of records", "a folder, a device or a pipe")
        data = self.path.read_bytes()
        start = data.rfind(b"\n") + 1
        last = data[start:]
        if not last:
            return
        if not any(last[: len(known)] == known[: len(last)] for known in _BEGINNINGS):
            raise InvalidInput(f"{self.path} must be a file of records", "a last line that is none")
        whole = _is_json(last)
        for _ in _read(self.path, data[: None if whole else start].decode("utf-8", "replace").split("\n")):
            pass  # a line that is no record is refused before anything is touched
        if whole:
            with self.path.open("ab") as file:
                file.write(b"\n")
        else:
            os.truncate(self.path, start)


def read_records(paths: Iterable[str | Path]) -> Iterator[Record]:
    """Every record of the files, in order. A line that is not one raises InvalidInput naming file, line and fault."""
    for path in map(Path, paths):
        try:
            lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: a string may hold other line ends
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInput(f"{path} must be a readable JSONL file", str(error)) from error
        yield from _read(path, lines)


def _read(path: Path, lines: Sequence[str]) -> Iterator[Record]:
    known = set(Record.__dataclass_fields__)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            what = getattr(error, "msg", str(error))
            raise InvalidInput(f"{place} must hold one JSON object", f"a line that ends or breaks: {what}") from error
        if not isinstance(fields, dict):
            raise InvalidInput(f"{place} must hold one JSON object", type(fields).__name__)
        if fields.get("schema") != SCHEMA:
            raise InvalidInput(f"{place} must have schema {SCHEMA}", repr(fields.get("schema")))
        missing = [name for name in _REQUIRED if name not in fields]
        if missing or not set(fields) <= known:
            wrong = f"no {', '.join(missing)}" if missing else f"also {', '.join(sorted(set(fields) - known))}"
            raise InvalidInput(f"{place} must have the fields of a record", wrong)
        # null is a field that is not there, and so is the NaN that a wrong result's error was once written as.
        fields = {
            name: value
            for name, value in fields.items()
            if name in _REQUIRED or not (value is None or (name.startswith("rel_err") and _not_finite(value)))
        }
        try:
            _check_types(fields)
            record = Record(**fields)
        except InvalidInput as error:
            raise InvalidInput(f"{place}: {error}") from error
        yield record


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _check_types(fields: dict[str, Any]) -> None:
    """Raise InvalidInput for a field of another type, or a number that nothing measured can be."""
    for name, value in fields.items():
        if name in _TEXTS and not (isinstance(value, str) and (value or name in ("timing", "time"))):
            raise InvalidInput(f"{name} must be text", repr(value)[:80])
        if name in _NUMBERS and not _measured(value):
            raise InvalidInput(f"{name} must be a number of at least 0", repr(value)[:80])
        if name in ("spec", "ceiling", "env") and not isinstance(value, dict):
            raise InvalidInput(f"{name} must be an object", repr(value)[:80])
    if fields.get("us") == 0:
        raise InvalidInput("us must be positive", 0)
    for name, value in fields.get("ceiling", {}).items():
        if not _measured(value):
            raise InvalidInput(f"{name} of ceiling must be a number of at least 0", repr(value)[:80])
    for name, value in fields.get("env", {}).items():
        if not isinstance(value, str):
            raise InvalidInput(f"{name} of env must be text", repr(value)[:80])


def _measured(value: Any) -> bool:
    """Whether it is a finite number of at least 0."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= float(value) < math.inf
    except OverflowError:  # an integer that no float holds
        return False


def _not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def environment(device: Any = None) -> dict[str, str]:
    """What a figure depends on: GPU or processor, versions of torch, triton, driver, octavo, a digest of its kernels.

    In a checkout the commit too, "-dirty" where octavo or its benchmarks differ from it.
    """
    import torch

    env = {"torch": torch.__version__, "python": platform.python_version(), "octavo": __version__}
    if torch.device(device or "cpu").type == "cuda":
        env["gpu"] = torch.cuda.get_device_name(device)
        env["driver"] = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0]
    else:
        env["gpu"] = "none"
        env["cpu"] = platform.processor() or platform.machine()
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # kernels import it later than this is asked
        env["triton"] = importlib.metadata.version("triton")
    env["kernels"] = kernels_digest()
    home = Path(__file__).parents[2]
    # An installed package has none of its own; the folder it is installed into may lie in somebody else's repository.
    commit = _output(["git", "-C", str(home), "rev-parse", "--short", "HEAD"]) if (home / ".git").exists() else ""
    if commit:
        changed = _output(["git", "-C", str(home), "status", "--porcelain", "--", "octavo", "benchmarks"])
        env["commit"] = commit + ("-dirty" if changed else "")
    return env


def kernels_digest() -> str:
    """12 hexadecimal digits of a SHA-256 over the names and sources of octavo/kernels: which kernels a figure is of."""
    folder, digest = Path(__file__).parents[1] / "kernels", hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def rate(record: Record) -> tuple[float, str]:
    """(number, unit) of a timed record: TFLOP/s where arithmetic bounds, else TB/s."""
    assert record.us
    if record.op in COMPUTE_BOUND:
        return (record.flops or 0) / record.us / 1e6, "TFLOP/s"
    return (record.bytes or 0) / record.us / 1e6, "TB/s"


def ceiling(record: Record) -> float | None:
    """What `rate` is compared with, measured in the record's run: the FP8 product's rate, or the copy's."""
    return record.ceiling.get("fp8_tflops" if record.op in COMPUTE_BOUND else "copy_tbs")
