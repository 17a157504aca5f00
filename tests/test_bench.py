"""Timing, rooflines and records."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

from octavo import AttentionSpec, InvalidInput
from octavo.bench import cases
from octavo.bench.measure import measure
from octavo.bench.records import Record, RecordFile, environment, read_records
from octavo.bench.roofline import append_work, attention_work, measure_ceilings
from octavo.bench.timing import CLOCK, sets_needed, summarise, time_calls

SPEC = AttentionSpec(32, 8, 128)


def record(**changes):
    return Record(
        **{"case": "decode/x/b1", "op": "decode", "backend": "reference", "run": "r1", "spec": {}, "us": 1.5, **changes}
    )


def test_summarise():
    t = summarise([5.0, 1.0, 2.0, 4.0, 3.0], CLOCK)
    assert (t.us, t.method) == (3.0, CLOCK) and t.us_p20 == pytest.approx(1.8) and t.us_p80 == pytest.approx(4.2)


def test_calls_are_rotated_and_warmed_up():
    seen = []
    t = time_calls([lambda i=i: seen.append(i) for i in range(3)], "cpu", seconds=0, least=6)
    assert seen == [0, 1, 2] * 3 and t.us > 0
    with pytest.raises(InvalidInput, match="calls must hold at least one call"):
        time_calls([], "cpu")


def test_sets_exceed_the_cache():
    assert sets_needed(10**9, 50 << 20) == 2 and sets_needed(1 << 20, 50 << 20) == 64
    n = sets_needed(30 << 20, 50 << 20)
    assert (n - 1) * (30 << 20) >= 4 * (50 << 20)


def test_decode_work_counts_each_byte_once():
    work = attention_work(SPEC, [4096] * 64, [1] * 64)
    assert work.bytes == 64 * (4096 * 2048 + 32 * 128 * 4)
    assert work.flops == 2 * 64 * 4096 * 32 * 256


def test_causal_and_window_work_count_visible_pairs_only():
    spec = AttentionSpec(2, 1, 64)
    assert attention_work(spec, [10], [4]).flops == 2 * (7 + 8 + 9 + 10) * 2 * 128
    windowed = AttentionSpec(2, 1, 64, window=3)
    assert attention_work(windowed, [10], [4]).flops == 2 * 4 * 3 * 2 * 128
    assert attention_work(windowed, [2], [2]).flops == 2 * 3 * 2 * 128
    assert attention_work(windowed, [10], [4]).bytes == 6 * 128 + 4 * 2 * 64 * 4


def test_append_work():
    assert append_work(SPEC, 100).bytes == 100 * (8 * 256 * 2 + 2048 + 8)


def test_a_cpu_has_no_ceilings():
    assert measure_ceilings("cpu").copy_tbs is None


def test_records_round_trip_and_resume(tmp_path):
    path = tmp_path / "sub" / "r.jsonl"
    with RecordFile(path) as file:
        file.write(record(env=environment()))
        file.write(record(case="decode/x/b2", us=None, error="refused: page size 7"))
        lines = path.read_text().splitlines()
        assert len(lines) == 2, "flushed as they are made"
    assert json.loads(lines[0])["env"]["torch"] == torch.__version__ and "error" not in json.loads(lines[0])
    a, b = read_records([path])
    assert a.us == 1.5 and b.us is None and b.error == "refused: page size 7"
    path.write_text(path.read_text() + '{"schema": 1, "case": "dec')  # interrupted in the middle of a line
    with pytest.raises(InvalidInput, match=r"r\.jsonl:3 must hold one JSON object"):
        list(read_records([path]))
    there = {("decode/x/b1", "reference"), ("decode/x/b2", "reference")}
    assert RecordFile(path).done() == there and RecordFile(tmp_path / "none").done() == set()
    with RecordFile(path) as file:
        assert file.done() == there
        file.write(record(case="decode/x/b3"))
    assert len(list(read_records([path]))) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "must hold one JSON object; came list"),
        ('{"schema": 2}', "must have schema 1; came 2"),
        ('{"schema": 1, "case": "x"}', "must have the fields of a record; came no op, backend, run, spec"),
        (record().to_json()[:-1] + ', "speed": 3}', "must have the fields of a record; came also speed"),
    ],
)
def test_a_wrong_line_is_one_clear_line(tmp_path, line, message):
    path = tmp_path / "r.jsonl"
    path.write_text(record().to_json() + "\n" + line + "\n")
    with pytest.raises(InvalidInput, match=re.escape(f"r.jsonl:2 {message}")):
        list(read_records([path]))


def test_a_record_has_a_time_or_an_error():
    with pytest.raises(InvalidInput, match="either us or error"):
        record(error="no")
    with pytest.raises(InvalidInput, match="op must be one of decode"):
        record(op="attention")


class TestMeasure:
    """One case on one backend, on the CPU."""

    @pytest.mark.parametrize(
        "case",
        [
            cases.decode(replace(SPEC, num_q_heads=8, num_kv_heads=2), 3, 100),
            cases.decode(replace(SPEC, num_q_heads=8, num_kv_heads=2, max_query_len=4, layout="nhd"), 2, 70),
            cases.prefill(replace(SPEC, num_q_heads=8, num_kv_heads=2, page_size=32), 2, 40, 90),
        ],
        ids=lambda case: case.name,
    )
    def test_attention_is_checked_and_timed(self, case):
        made = measure(case, "reference", "cpu", run="r", seconds=0.0)
        assert made.error is None and made.us > 0 and made.op == case.name.split("/")[0]
        assert made.rel_err < 1.1 * made.rel_err_bf16 and made.bytes == case.work.bytes

    def test_append_is_timed(self):
        made = measure(cases.append(SPEC, 2, 30), "reference", "cpu", run="r", seconds=0.0)
        assert made.us > 0 and made.bytes == 60 * (8 * 256 * 2 + 2048 + 8) and made.rel_err is None

    def test_a_refusal_is_a_record(self):
        made = measure(cases.decode(SPEC, 1, 64), "gluon", "cpu", run="r")
        assert made.us is None and made.error.startswith("Unsupported: ") and "sm_90" in made.error

    def test_a_wrong_result_is_not_timed(self, monkeypatch):
        monkeypatch.setattr("octavo.reference.decode.attention", lambda call, phase: call.out.fill_(9.0))
        made = measure(cases.decode(SPEC, 1, 64), "reference", "cpu", run="r")
        assert made.us is None and made.error.startswith("wrong: relative error")

    def test_names_tell_cases_apart(self):
        specs = [SPEC, *(replace(SPEC, **c) for c in ({"window": 9}, {"layout": "hnd"}, {"precision": "exact"}))]
        assert len({cases.prefill(s, 1, 8).name for s in specs}) == 4
        assert [s.layout for s in cases.in_layouts(replace(SPEC, page_size=16))] == ["nhd", "hnd"]
