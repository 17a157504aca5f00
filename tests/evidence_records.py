"""Records and accuracy files to make evidence from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octavo.bench.records import Record
from octavo.spec import AttentionSpec

SPEC = AttentionSpec(32, 8, 128).as_dict()
ENV = {"gpu": "NVIDIA H200", "torch": "2.11.0", "octavo": "0.1.0"}
SCRIPT = "<script>alert(1)</script>"


def record(case: str, backend: str, us: float | None = 100.0, **changes: Any) -> Record:
    fields = {"op": case.split("/")[0], "run": "r1", "spec": SPEC, "timing": "graph replay", "env": ENV}
    fields |= {"bytes": 10**8, "flops": 10**11, "rel_err": 0.002, "rel_err_bf16": 0.0025, "ceiling": {"copy_tbs": 4.0}}
    if us is None:
        fields |= {"rel_err": None, "rel_err_bf16": None, "error": "Unsupported: no"}
    return Record(case=case, backend=backend, us=us, **(fields | changes))


RECORDS = [
    record("decode/llama/tp1/b64/ctx1024", "gluon", 20.0),
    record("decode/llama/tp1/b64/ctx1024", "triton", 30.0),
    record("decode/llama/tp1/b64/ctx1024", "flashinfer-xqa", 40.0, rel_err=0.035),
    record("decode/llama/tp1/b64/ctx8192", "gluon", 100.0),
    record("decode/llama/tp1/b64/ctx8192", "flashinfer-xqa", 90.0, rel_err=0.035),
    record("decode/llama/tp1/b128/ctx8192", "gluon", None),
    record("prefill/llama/tp1/b1/q8192/ctx8192", "gluon", 500.0, ceiling={"fp8_tflops": 1400.0}),
]


def write(path: Path, records: list[Record]) -> Path:
    path.write_text("".join(r.to_json() + "\n" for r in records))
    return path


def accuracy(**changes: Any) -> dict[str, Any]:
    estimate = {"value": 0.01, "low": 0.005, "high": 0.02}
    side = {"perplexity": {"value": 12.0, "low": 11.0, "high": 13.0}, "top": estimate}
    fp8 = {**side, "change": estimate, "kl": estimate, "same_top": estimate}
    found = {"schema": 1, "model": {"name": "tiny", "dtype": "float32"}, "variants": [], "environment": ENV}
    found |= {
        "sides": {"16-bit": side, "fp8_e4m3 tensor fast": fp8},
        "text": {"source": "s", "windows": 2, "length": 64},
    }
    found["retrieval"] = [{"context": 512, "trials": 3, "right": {n: [True, False, True] for n in found["sides"]}}]
    return found | changes


def report(*arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `octavo report`."""
    from typer.testing import CliRunner

    from octavo.cli.main import app

    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr
