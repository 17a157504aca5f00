"""`octavo check`: cells pass, are refused with reasons, or fail with what is wrong; exit codes, JSON, interruption."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from octavo.cli.main import app
from octavo.cli.progress import for_tables, show_table
from octavo.reference import decode as reference_decode
from octavo.testing import indexer_support, support
from octavo.testing.grid import AXES, HOPPER_AXES, grid


@pytest.fixture(autouse=True)
def on_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OCTAVO_BACKEND", raising=False)


def check(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["check", "--quick", "--device", "cpu", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def outcomes(*arguments: str) -> list[dict[str, Any]]:
    code, out, _ = check("--json", *arguments)
    assert code == 0
    return json.loads(out)["outcomes"]


def test_a_cpu_passes_on_the_reference_and_refuses_the_others_in_words():
    found = outcomes()
    words = {name: {o["word"] for o in found if o["backend"] == name} for name in support.backend_names()}
    assert words == {"gluon": {"refused"}, "triton": {"refused"}, "reference": {"passed"}, "chosen": {"passed"}}
    assert {o["op"] for o in found} == {*support.OPS.values(), "append", *indexer_support.OPERATIONS}
    assert all(any("needs Hopper (sm_90); found" in d for d in o["details"]) for o in found if o["backend"] == "gluon")


def test_the_table_is_for_people():
    code, out, err = check()
    assert code == 0 and "Checking" in err
    assert "gluon refuses what is not:" in out and "x Hopper (sm_90)" in out
    assert out.rstrip().splitlines()[-1].startswith("44 passed, 36 refused, 0 failed in ")


def test_one_backend_alone():
    assert {o["backend"] for o in outcomes("--backend", "reference")} == {"reference"}


@pytest.mark.parametrize(("terminal", "width"), [(True, 40), (False, 100)])
def test_tables_are_as_wide_as_the_terminal_that_shows_them(monkeypatch, terminal, width):
    class Stdout(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    monkeypatch.setattr("sys.stdout", Stdout())
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    assert for_tables(100).width == width  # whatever stderr is


@pytest.mark.parametrize("width", [16, 24, 60])
def test_a_narrow_terminal_loses_no_figure(width):
    table = Table(title="figures")
    for header in ("cache", "perplexity", "change"):
        table.add_column(header)
    table.add_row("fp8_e4m3", "12345.678", Text("0.25 %"))
    table.add_row("16-bit", "12345.431", "")
    file = io.StringIO()
    show_table(Console(file=file, width=width), table)
    shown = file.getvalue()
    assert all(word in shown for word in ("figures", "fp8_e4m3", "12345.678", "0.25 %", "12345.431"))
    assert "\u2026" not in shown and max(map(len, shown.splitlines())) <= width + 7


@pytest.mark.parametrize("name", ["", "cuda", "Triton"])
def test_an_unknown_backend_is_an_error_that_lists_the_known(name):
    code, _, err = check("--backend", name)
    assert code == 2 and "one of gluon, triton, reference" in err


def test_a_wrong_result_fails_with_its_error(monkeypatch: pytest.MonkeyPatch):
    right = reference_decode.decode

    def scale_dropped(call):
        right(replace(call, cache=replace(call.cache, v_scale=None)))

    monkeypatch.setattr(reference_decode, "decode", scale_dropped)
    from octavo import ops

    ops.kernel.cache_clear()
    try:
        code, out, _ = check("--backend", "reference", "--json")
    finally:
        ops.kernel.cache_clear()
    failed = [o for o in json.loads(out)["outcomes"] if o["word"] == "failed"]
    assert code == 1 and {o["op"] for o in failed} >= {"decode"}
    assert any("decode: errors of" in detail for o in failed for detail in o["details"])


def test_what_a_backend_raises_fails_its_cell_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> list[str]:
        raise RuntimeError("no such kernel\nand a long trace")

    monkeypatch.setattr(support, "_append_faults", broken)
    code, out, _ = check("--json")
    found = json.loads(out)["outcomes"]
    assert code == 1 and {o["op"] for o in found if o["word"] == "failed"} == {"append"}
    assert {tuple(o["details"]) for o in found if o["word"] == "failed"} == {("RuntimeError: no such kernel",)}
    code, out, _ = check()
    assert code == 1 and "failed: chosen append: leaf fp8_e4m3 tensor" in out


def test_an_interrupted_check_tells_what_was_run(monkeypatch: pytest.MonkeyPatch):
    def stop(*_: object) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(support, "_append_faults", stop)
    code, out, err = check()
    assert code == 130 and "44 passed" not in out and "28 passed, 28 refused, 0 failed" in out
    assert "interrupted after 56 of 80 cells" in err


def test_a_byte_that_append_writes_elsewhere_is_seen(monkeypatch: pytest.MonkeyPatch):
    spec = support._append_specs(quick=False)[0][1]
    assert support._append_faults(spec, torch.device("cpu")) == []
    right = support.make_batch

    def nudged(spec, lens, rows, *, device, **scales):
        batch = right(spec, lens, rows, device=device, **scales)
        if isinstance(device, torch.device):
            batch.cache.v.view(torch.uint8)[-1, -1, -1, -1] += 1
        return batch

    monkeypatch.setattr(support, "make_batch", nudged)
    assert support._append_faults(spec, torch.device("cpu")) == ["v"]


def test_the_grids_hold_every_value_of_every_axis():
    for axes in ({}, HOPPER_AXES):
        cells = grid(heads=2, wide_pairs=True, axes=axes)
        of = AXES | axes
        for name in ("layout", "kv_dtype", "scale_granularity", "query_dtype", "out_dtype", "page_size", "precision"):
            assert {getattr(cell.spec, name) for cell in cells} == set(of[name]), name
        assert {(c.spec.head_dim, c.spec.value_dim) for c in cells} == set(of["dims"])
        assert {c.spec.group_size for c in cells} == set(of["ratio"])
        assert {c.rows for c in cells} == set(of["rows"])


@pytest.mark.parametrize("operation", indexer_support.OPERATIONS)
def test_a_wrong_indexer_is_seen(operation, monkeypatch):
    cpu = torch.device("cpu")
    for spec in indexer_support.SPECS:
        assert indexer_support._faults(operation, spec)("reference", cpu) == []
    if operation == "index_append":
        stock = indexer_support.IndexerCache.append
        calls: list[int] = []

        def append(self, k, slots, **named):
            calls.append(1)
            stock(self, k * (1 + len(calls) % 2), slots, **named)

        monkeypatch.setattr(indexer_support.IndexerCache, "append", append)
    else:
        name = "topk_indices" if operation == "topk" else operation
        stock_call = getattr(indexer_support, name)
        turn: list[int] = []

        def off(*arguments, **named):
            turn.append(1)
            found = stock_call(*arguments, **named)
            return found.roll(1, 0) if len(turn) == 1 else found

        monkeypatch.setattr(indexer_support, name, off)
    (fault,) = indexer_support._faults(operation, indexer_support.SPECS[1])("reference", cpu)
    assert fault.startswith(f"{operation}: ")


def test_processes_run_what_compiles_and_this_one_the_rest(monkeypatch: pytest.MonkeyPatch):
    from octavo.bench import processes
    from octavo.cli import check as command
    from octavo.testing import support

    asked: list[Any] = []

    def recorded(function, groups, device, jobs, most_seconds):
        """As if every third process had died and every third check had raised."""
        asked.append((groups, jobs))
        for number, group in enumerate(groups):
            yield number, [function(group[0], device)] if number % 3 == 0 else [None] if number % 3 == 1 else None

    cpu = torch.device("cpu")
    monkeypatch.setattr(processes, "in_processes", recorded)
    todo = support.checks(cpu, True)
    ran: list[str] = []
    monkeypatch.setattr(
        support.Check, "run", lambda self: ran.append(self.backend) or (self.op, self.cell, self.backend)
    )
    command._checks.cache_clear()
    want = {i: (one.op, one.cell, one.backend) for i, one in enumerate(todo)}
    assert dict(command._outcomes(todo, True, None, cpu, None)) == want and asked == [], "a CPU compiles nothing"
    ran.clear()
    assert dict(command._outcomes(todo, True, None, cpu, 3)) == want
    ((groups, jobs),) = asked
    assert jobs == 3 and {todo[i].backend for ((_, _, i),) in groups} == {"gluon", "triton", "chosen"}
    assert len(ran) == len(todo), "each once"


def test_processes_run_checks():
    from octavo.bench.processes import in_processes
    from octavo.cli import check as command
    from octavo.testing import support

    cpu = torch.device("cpu")
    todo = support.checks(cpu, True, "reference")
    found = dict(in_processes(command._run_one, [[(True, "reference", i)] for i in range(2)], cpu, 2))
    assert found == {i: [todo[i].run()] for i in range(2)}
