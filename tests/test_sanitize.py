"""The launches that compute-sanitizer sees, on a CPU: right, of every kind, and what a tool says is read rightly."""

from __future__ import annotations

import stat
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from octavo import AttentionSpec, choose
from octavo.testing import fuzz, sanitize

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def on_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sanitize, "named", lambda spec, backend: "reference")


def test_every_backend_that_takes_a_spec_is_launched():
    kinds = Counter(label.split()[0] for group in sanitize.GROUPS for label, _ in sanitize.launches(group, CPU))
    assert kinds["append"] == len(fuzz.GPU_SPECS) and kinds["merge_states"] == 1
    assert kinds["topk"] == len(sanitize.TOPK)
    assert kinds["triton"] > 40 and kinds["gluon"] > 40 and kinds["indexer"] == 5
    for spec in sanitize.MORE_OF_HOPPER:
        assert choose(spec, "h200").decode.backend == "gluon"


@pytest.mark.parametrize(
    "spec", [fuzz.GPU_SPECS[i] for i in (2, 4, 7, 9, 10)], ids=lambda s: f"{s.layout}{s.page_size}"
)
def test_steps_are_right_where_the_reference_runs_them(spec):
    for example in sanitize.steps(spec):
        assert sanitize.attention_faults(example, "reference", CPU) == []
    assert sanitize.append_faults(spec, CPU) == []


def test_parts_are_every_launch_once(monkeypatch, capsys):
    made = []
    every = [(str(i), lambda i=i: made.append(i) or []) for i in range(11)]
    monkeypatch.setattr(sanitize, "launches", lambda group, device: iter(every))
    assert [sanitize.launch("gluon", CPU, part, 4) for part in range(4)] == [0] * 4
    assert made == list(range(11))
    assert "gluon: 2 launches of steps, 0 wrong" in capsys.readouterr().out


def test_a_wrong_result_is_seen(monkeypatch):
    spec = AttentionSpec(8, 2, 64, layout="nhd", page_size=16)
    example = next(sanitize.steps(spec))
    stock = sanitize.Attention.run
    monkeypatch.setattr(
        sanitize.Attention, "run", lambda self, q, cache, out, **rest: stock(self, q * 2, cache, out=out)
    )
    assert sanitize.attention_faults(example, "reference", CPU)


def test_parts_and_choices_are_right():
    assert sanitize.merge_faults(CPU) == [] and sanitize.topk_faults(*sanitize.TOPK[0], CPU) == []


FAKE = """#!{python}
import sys, time
tool, group = sys.argv[2], sys.argv[sys.argv.index("--launch") + 1]
if "{slow}" == tool:
    time.sleep(60)
if (tool, group) == ("memcheck", "gluon"):
    print("========= Invalid __global__ read of size 4 bytes")
if (tool, group) != ("initcheck", "triton"):
    print(f"{{group}}: 9 launches of steps, 0 wrong")
found = int((tool, group) == ("memcheck", "gluon"))
print(f"========= RACECHECK SUMMARY: {{found}} hazards displayed (0 errors, 0 warnings)" if tool == "racecheck"
      else f"========= ERROR SUMMARY: {{found}} errors")
"""


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, slow: str = "") -> None:
    """A program in place of compute-sanitizer, and launches that say at once that they went well."""
    program = folder / "compute-sanitizer"
    program.write_text(FAKE.format(python=sys.executable, slow=slow))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    alone = folder / "python"
    alone.write_text('#!/bin/sh\necho "$4: 9 launches of steps, 0 wrong"\n')
    alone.chmod(alone.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sanitize.sys, "executable", str(alone))


def test_findings_and_what_did_not_finish_are_told(tmp_path, monkeypatch, capsys):
    """One finding, one process that ends before its launches do."""
    stand_in(tmp_path, monkeypatch)
    log = tmp_path / "log.txt"
    assert sanitize.check(list(sanitize.TOOLS), ["triton", "gluon"], log, 60) == 2
    lines = log.read_text().splitlines()
    assert sum("0 findings" in line and "0 wrong" in line for line in lines) == 6
    assert sum(line.startswith("no tool") and "0 wrong" in line for line in lines) == 2 * sanitize.PARTS
    assert any("memcheck" in line and "1 findings" in line for line in lines)
    assert "  ========= Invalid __global__ read of size 4 bytes" in lines
    assert any("initcheck" in line and "triton: not finished" in line for line in lines)
    assert capsys.readouterr().out.splitlines() == [line for line in lines if not line.startswith("  ")]


def test_what_takes_too_long_is_stopped_and_told_and_the_rest_is_kept(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, slow="synccheck")
    log = tmp_path / "log.txt"
    started = time.monotonic()
    assert sanitize.check(["memcheck", "synccheck"], ["triton"], log, 3) == 1
    assert time.monotonic() - started < 30
    lines = [line for line in log.read_text().splitlines() if not line.startswith("  ")]
    assert any(line.startswith("memcheck") and "0 wrong" in line for line in lines)
    assert any(line.startswith("synccheck") and "not finished, stopped" in line for line in lines)
