"""Faults that a machine has and octavo does not: each is one clear message, and nothing is left half-made."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from octavo import AttentionSpec, Device, IndexerCache, InvalidInput, PagedCache, Unsupported, choose, ops
from octavo.bench import report as pages
from octavo.bench.records import RecordFile
from octavo.cli.main import app
from octavo.testing.inputs import make_batch

ROOT = Path(__file__).parents[1]
SPEC = AttentionSpec(4, 2, 64)
EXPLAIN = ("explain", "--model", "llama-3.1-8b", "--device", "h200")


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


def octavo(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """The command as a process, which a test can stop reading or interrupt."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "preexec_fn": heeding, **options}
    return subprocess.Popen([sys.executable, "-m", "octavo", *arguments], text=True, env=environment, **pipes)


def heeding() -> None:
    """A process in the background of a shell is born deaf to SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def raising(error: BaseException) -> Any:
    def function(*_: Any, **__: Any) -> None:
        raise error

    return function


@pytest.mark.parametrize("changes", [{}, {"layout": "nhd"}, {"layout": "hnd", "kv_dtype": "bfloat16"}])
def test_a_cache_too_large_says_what_would_fit(changes):
    spec = AttentionSpec(4, 2, 64, **changes)
    page = spec.bytes_per_token * spec.page_size
    pages_asked = 2**45 // page
    with pytest.raises(InvalidInput) as refusal:
        PagedCache.allocate(spec, pages_asked, "cpu")
    message = str(refusal.value)
    assert f"came {pages_asked:,} pages, {pages_asked * page:,} bytes" in message
    free = int(message.split("of which ")[1].split(" bytes")[0].replace(",", ""))
    assert 0 < free < 2**45 and f"{free // page:,} pages of {page:,} bytes" in message


def test_an_indexers_cache_too_large_says_what_would_fit():
    page = 64 * (128 + 4)
    with pytest.raises(InvalidInput, match=rf"pages of {page:,} bytes; came {2**40:,} pages, {2**40 * page:,} bytes"):
        IndexerCache.allocate(2**40, device="cpu")


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_no_half_of_a_cache_stays(monkeypatch, error):
    """V fails after K was allocated: K's memory is free before the error is handled."""
    real, made = torch.zeros, []

    def zeros(*arguments: Any, **options: Any) -> torch.Tensor:
        if made:
            raise error
        tensor = real(*arguments, **options)
        made.append(tensor.untyped_storage()._weak_ref())
        return tensor

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(InvalidInput, match="num_pages must fit"):
        try:
            PagedCache.allocate(AttentionSpec(4, 2, 64, layout="nhd"), 3, "cpu")
        except InvalidInput:
            gc.collect()
            expired = torch.UntypedStorage._expired(made[0])
            raise
    assert len(made) == 1 and expired


def test_other_errors_of_an_allocation_are_not_taken_for_one_of_memory(monkeypatch):
    monkeypatch.setattr(torch, "zeros", raising(RuntimeError("CUDA error: an illegal memory access was encountered")))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        PagedCache.allocate(SPEC, 3, "cpu")


def test_a_triton_without_gluon_is_refused_with_the_rule(monkeypatch):
    ops.kernel.cache_clear()
    for name in [n for n in sys.modules if n.startswith("octavo.kernels.gluon.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    with pytest.raises(Unsupported) as refusal:
        ops.kernel("gluon", "decode")
    (reason,) = refusal.value.reasons
    assert reason.startswith("needs triton 3.6 or newer, with Gluon; found triton ") and "triton.experimental" in reason


def test_an_old_triton_is_refused_before_anything_is_imported():
    import dataclasses

    old = dataclasses.replace(Device.named("h200"), triton_version="3.5.1")
    for backend in ("gluon", "triton"):
        with pytest.raises(Unsupported) as refusal:
            choose(SPEC, old, backend)
        assert "needs triton 3.6 or newer; found 3.5.1" in refusal.value.reasons


def test_an_import_that_fails_for_another_reason_is_no_refusal(monkeypatch):
    ops.kernel.cache_clear()
    monkeypatch.setattr(ops, "import_module", raising(ImportError("cannot import name 'x'", name="octavo.spec")))
    with pytest.raises(ImportError, match="cannot import name"):
        ops.kernel("triton", "decode")


def test_a_kernel_that_does_not_compile_says_which_one_of_what(monkeypatch):
    from octavo.reference import decode as module

    ops.kernel.cache_clear()
    monkeypatch.setattr(module, "decode", raising(RuntimeError("PassManager::run failed")))
    batch = make_batch(SPEC, [9], [1])
    with pytest.raises(RuntimeError, match="PassManager::run failed") as failure:
        batch.run()
    ops.kernel.cache_clear()
    (note,) = failure.value.__notes__
    assert "reference's decode did not compile or launch" in note and SPEC.to_json() in note
    assert "octavo check --backend reference" in note


def test_warmup_tells_what_did_not_compile(monkeypatch):
    from octavo.reference import prefill as module

    ops.kernel.cache_clear()
    monkeypatch.setattr(module, "prefill", raising(PermissionError(errno.EACCES, "Permission denied", "/cache/triton")))
    code, out, err = run(
        "warmup", "llama-3.1-8b", "--tp", "8", "--device", "cpu", "--max-tokens", "4", "--max-batch", "2"
    )
    ops.kernel.cache_clear()
    assert code == 1 and out == "" and "Traceback" not in err
    assert "does not run: PermissionError: [Errno 13] Permission denied: '/cache/triton'" in err
    assert "reference's prefill did not compile or launch, of {" in err


def test_a_driver_older_than_torchs_cuda_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(
        torch.cuda, "init", raising(RuntimeError("The NVIDIA driver on your system is too old\nand so on"))
    )
    code, out, err = run("check", "--device", "cuda")
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    assert "there is none: The NVIDIA driver on your system is too old" in err


@pytest.mark.parametrize("command", ["calibrate", "accuracy", "demo"])
def test_a_folder_that_cannot_be_written_is_told_before_the_work(command, tmp_path):
    file = tmp_path / "file"
    file.touch()
    code, _, err = run(command, "--out", str(file / "out.json"))
    assert code == 2 and "must lie in a folder that exists" in err and "Traceback" not in err


def test_a_full_disk_is_one_line_and_leaves_the_old_file(monkeypatch, tmp_path):
    target = tmp_path / "page.html"
    target.write_text("old")
    monkeypatch.setattr(Path, "replace", raising(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(InvalidInput, match="No space left on device"):
        pages.write(target, "new")
    assert target.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_records_on_a_full_disk_are_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(RecordFile, "write", raising(OSError(errno.ENOSPC, "No space left on device")))
    code, _, err = run("bench", "--out", str(tmp_path / "r.jsonl"), "--device", "cpu", "--seconds", "0.001")
    assert code == 2 and "octavo: No space left on device" in err and "Traceback" not in err


@pytest.mark.parametrize("arguments", [EXPLAIN, (*EXPLAIN, "--json"), ("--help",), ("--version",)])
def test_output_that_cannot_be_written_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        _, err = (process := octavo(*arguments, stdout=full)).communicate()
    assert process.returncode == 2 and err == "octavo: output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    "arguments", [EXPLAIN, ("--help",), ("check", "--quick", "--device", "cpu", "--backend", "triton")]
)
def test_a_closed_pipe_is_silence(arguments):
    """Typer's code would be 1, rich's too: a failed check."""
    process = octavo(*arguments)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait() == 128 + signal.SIGPIPE and "Error" not in err and "Traceback" not in err


def test_output_that_nobody_opened_is_no_fault():
    process = octavo(*EXPLAIN, stdout=None, preexec_fn=lambda: os.close(1))
    _, err = process.communicate()
    assert (process.returncode, err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "inside"),
    [
        (EXPLAIN, "octavo.cli.explain.load_config"),
        (("report", "{records}", "--out", "{out}"), "octavo.bench.evidence_page.page"),
        (("accuracy", "--out", "{out}"), "octavo.quality.load.load_default"),
        (("calibrate", "--out", "{out}"), "octavo.quality.load.load_default"),
        (("demo", "--out", "{out}"), "octavo.quality.load.load_default"),
        (("warmup", "llama-3.1-8b", "--device", "cpu"), "octavo.warmup.run_all"),
        (("check", "--quick", "--device", "cpu"), "octavo.testing.support.Check.run"),
    ],
)
def test_an_interrupt_is_one_line_and_leaves_nothing(arguments, inside, monkeypatch, tmp_path):
    folder, records = tmp_path / "out", tmp_path / "records.jsonl"
    folder.mkdir()
    record = {"case": "decode/x/tp1/b1/ctx8", "op": "decode", "backend": "triton", "run": "1", "spec": {}, "us": 1.0}
    records.write_text(json.dumps({**record, "schema": 1, "time": "2026-01-01T00:00:00Z"}) + "\n")
    monkeypatch.setattr(inside, raising(KeyboardInterrupt()))
    words = {"{out}": str(folder / "file"), "{records}": str(records)}
    code, _, err = run(*(words.get(a, a) for a in arguments))
    assert code == 130 and err.count("octavo: interrupted") == 1 and "Traceback" not in err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [("check", "--device", "cpu"), ("bench", "--matrix", "--device", "cpu", "--seconds", "2", "--out", "{out}")],
)
def test_sigint_of_a_running_command(arguments, tmp_path):
    out = tmp_path / "records.jsonl"
    process = octavo(*(str(out) if a == "{out}" else a for a in arguments))
    assert process.stderr is not None
    process.stderr.readline()  # it has begun
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    text, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "octavo: interrupted" in err and "Traceback" not in err + text
    if out.exists():  # whole records, each of which is kept
        assert all(json.loads(line)["schema"] == 1 for line in out.read_text().splitlines())
