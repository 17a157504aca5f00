"""Timing, rooflines and records."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

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
    assert RecordFile(path).there().keys() == there and RecordFile(tmp_path / "none").there() == {}
    with RecordFile(path) as file:
        assert file.there().keys() == there
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


def test_cold_and_warm_starts_are_records(tmp_path):
    out = tmp_path / "start.jsonl"
    script = Path(__file__).resolve().parent.parent / "benchmarks" / "start.py"
    small = ("--max-batch", "1", "--max-tokens", "2", "--max-context", "64")
    command = [sys.executable, script, "--out", out, "--device", "cpu", "--models", "smollm2-135m", "--", *small]
    environment = {**os.environ, "PYTHONPATH": str(script.parent.parent)}
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment)
    cold, warm = read_records([out])
    assert (cold.case, warm.case) == tuple(f"start/smollm2-135m/fp8_e4m3/{kind}" for kind in ("cold", "warm"))
    assert cold.op == "start" and cold.us > 1e5 and cold.run == warm.run and cold.spec["compiled"] == 0
    command[command.index("smollm2-135m")] = "no-such-model"
    subprocess.run(command, check=True, capture_output=True, timeout=120, env=environment)
    assert [r.us for r in read_records([out])][2:] == [None, None]
    assert "no-such-model" in list(read_records([out]))[2].error


class _Graphs:
    """torch.cuda as `time_calls` uses it, on a clock that calls move: what is captured and how often it is replayed."""

    def __init__(self, monkeypatch, call_ms: float) -> None:
        import contextlib

        self.now, self.call_ms, self.captured, self.replays, self.capturing = 0.0, call_ms, 0, 0, False
        outer = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                self.at = 0.0

            def record(self) -> None:
                self.at = outer.now

            def synchronize(self) -> None: ...

            def elapsed_time(self, other: Event) -> float:
                return other.at - self.at

        class Graph:
            def replay(self) -> None:
                outer.replays += 1
                outer.now += outer.captured * outer.call_ms

        @contextlib.contextmanager
        def graph(_: object):
            self.capturing = True
            yield
            self.capturing = False

        class Stream:
            def __init__(self, _: object = None) -> None: ...

            def wait_stream(self, _: object) -> None: ...

        fakes = {"Event": Event, "CUDAGraph": Graph, "graph": graph, "Stream": Stream, "current_stream": Stream}
        fakes |= {"stream": lambda _: contextlib.nullcontext(), "synchronize": lambda _: None}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def call(self) -> None:
        if self.capturing:
            self.captured += 1
        else:
            self.now += self.call_ms


@pytest.mark.parametrize(
    ("sets", "call_ms", "captured", "replays"),
    [(2, 0.01, 8, 3 + 5), (3, 0.01, 9, 3 + 5), (16, 0.01, 16, 3 + 5), (2, 10.0, 2, 1 + 5), (1, 4.0, 8, 3 + 5)],
)
def test_short_calls_share_a_replay_and_long_ones_are_not_repeated_more_than_they_must(
    monkeypatch, sets, call_ms, captured, replays
):
    graphs = _Graphs(monkeypatch, call_ms)
    timing = time_calls([graphs.call] * sets, "cuda", seconds=0.0)
    assert (graphs.captured, graphs.replays) == (captured, replays)
    assert timing.us == pytest.approx(call_ms * 1e3)
