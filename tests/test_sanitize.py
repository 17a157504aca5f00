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
from octavo.testing import fuzz, race_reports, sanitize

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
print(f"========= RACECHECK SUMMARY: {{found}} hazards displayed ({{found}} errors, 0 warnings)" if tool == "racecheck"
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


def test_reports_of_races_are_known_by_the_lines_of_all_their_accesses():
    """One access of another line makes a report a new one, and what is counted but not quoted is new too."""
    name, call, _ = sorted(race_reports.dispatch_lines("prefill.py"))
    record = sorted(line for _, line in race_reports.kinds()[-1])
    put, get = record[0], record[-1]

    def access(line, file="_prefill_tiles.py", how="Write"):
        return f"{how} access at prefill_kernel+0x100 in {file}:{line} [8 hazards]"

    def log(*reports, errors):
        text = "gluon: 43 launches of steps, 0 wrong\n"
        for first, *others in reports:
            lines = [f"Error: Race reported between {first}", *(f"    and {other}" for other in others)]
            text += "".join(f"========= {line}\n" for line in lines)
        return text + f"========= RACECHECK SUMMARY: {len(reports)} hazards displayed ({errors} errors, 0 warnings)\n"

    dispatch = [access(name, "prefill.py", "Read"), access(name, "prefill.py"), access(call, "prefill.py")]
    handed_on = [access(put), access(get, how="Read")]
    for text, bad, told in (
        (log(dispatch, handed_on, errors=2), False, "0 findings, 2 of known kinds"),
        (log(dispatch, handed_on, errors=3), True, "1 findings, 2 of known kinds"),
        (log(handed_on, [access(put), access(get + 40)], errors=2), True, "1 findings, 1 of known kinds"),
        (log([access(put), access(name, "prefill.py")], errors=1), True, "1 findings "),
        (log(errors=0), False, "0 findings "),
    ):
        found, line = sanitize.finding(text, "racecheck", "gluon", 1.0)
        assert found == bad and told in line


def test_what_takes_too_long_is_stopped_and_told_and_the_rest_is_kept(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, slow="synccheck")
    log = tmp_path / "log.txt"
    started = time.monotonic()
    assert sanitize.check(["memcheck", "synccheck"], ["triton"], log, 3) == 1
    assert time.monotonic() - started < 30
    lines = [line for line in log.read_text().splitlines() if not line.startswith("  ")]
    assert any(line.startswith("memcheck") and "0 wrong" in line for line in lines)
    assert any(line.startswith("synccheck") and "not finished, stopped" in line for line in lines)
