"""Figures of docs/ from records: which records count, and that the same ones give the same bytes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is an extra")
from octavo.bench.records import Record  # noqa: E402
from octavo.spec import AttentionSpec  # noqa: E402

PATH = Path(__file__).resolve().parent.parent / "tools" / "figures.py"
SPEC = AttentionSpec(32, 8, 128)


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location("figures", PATH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(case: str, us: float | None, megabytes: int, **changes) -> Record:
    fields = {"op": "decode", "backend": "gluon", "run": "r", "spec": SPEC.as_dict(), "ceiling": {"copy_tbs": 4.0}}
    fields |= {"error": "Unsupported: no"} if us is None else {}
    return Record(case=case, us=us, bytes=megabytes * 10**6, **(fields | changes))


def test_the_last_record_of_a_case_and_the_slowest_of_a_size_count(figures):
    records = [
        record("decode/a", 9.0, 134),
        record("decode/a", 50.0, 134),  # measured again
        record("decode/b", 40.0, 135),
        record("decode/c", 150.0, 540),
        record("decode/d", None, 1075),
        record("append+decode/c", 500.0, 540),
        record("decode/c", 1.0, 540, backend="flashinfer-xqa"),
        record("decode/e", 1.0, 540, spec=AttentionSpec(32, 8, 128, layout="nhd").as_dict()),
    ]
    assert figures.shares(records, "gluon", 32, 128) == [
        (128.0, pytest.approx(134 / 50 / 4)),
        (512.0, pytest.approx(540 / 150 / 4)),
    ]
    assert figures.shares(records, "gluon", 64, 128) == []


def test_the_figure_of_decode_repeats_to_the_byte(figures):
    records = [record("decode/a", 50.0, 134), record("decode/c", 150.0, 540)]
    svg = figures.decode_figure(records)
    assert svg == figures.decode_figure(records) and svg.lstrip().startswith("<?xml") and "</svg>" in svg
