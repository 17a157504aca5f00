"""The evidence: cells side by side, ratios within a run, untrusted text, and `octavo report`."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

for name in ("jinja2", "matplotlib", "typer"):
    pytest.importorskip(name, reason=f"{name} is an extra")
from evidence_records import RECORDS, SCRIPT, SPEC, accuracy, record, report, write  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from octavo.bench import evidence, evidence_page  # noqa: E402
from octavo.bench.records import ceiling, rate  # noqa: E402
from octavo.cli.main import app  # noqa: E402
from octavo.errors import InvalidInput  # noqa: E402


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "records.jsonl", RECORDS)


def test_cells_are_side_by_side_and_in_order(file):
    found = evidence.read([file])
    assert [cell.case for cell in found.of_op("decode")] == [
        "decode/llama/tp1/b64/ctx1024",
        "decode/llama/tp1/b64/ctx8192",
        "decode/llama/tp1/b128/ctx8192",
    ]
    first, second, refused = found.of_op("decode")
    assert first.subject == "llama/tp1" and first.sizes == {"b": 64, "ctx": 1024}
    assert first.best(True) == ("gluon", 20.0) and first.best(False) == ("flashinfer-xqa", 40.0)
    assert first.ratio == 2.0 and second.ratio == 0.9 and refused.ratio is None
    (row,) = [r for r in evidence.summary(found) if r["op"] == "decode"]
    assert row["mean"] == pytest.approx(1.8**0.5) and row["least"] == 0.9 and (row["cells"], row["ahead"]) == (3, 1)


def test_caches_of_16_bits_have_a_row_of_their_own(tmp_path):
    dense = {**SPEC, "kv_dtype": "bfloat16"}
    others = [
        record("decode/llama/tp1/bfloat16/b64/ctx1024", "triton", 100.0, spec=dense),
        record("decode/llama/tp1/bfloat16/b64/ctx1024", "flashinfer-xqa", 50.0, spec=dense),
        record("decode/llama/tp1/b8/ctx64", "flashinfer-xqa", 5.0),
        record("plan/llama/tp1/b64", "gluon", 2.0, spec={}),
    ]
    rows = {
        row["name"]: row for row in evidence.summary(evidence.read([write(tmp_path / "r.jsonl", RECORDS + others)]))
    }
    assert list(rows)[:2] == ["decode, FP8 cache", "decode, 16-bit cache"] and "plan" in rows and "decode" not in rows
    assert rows["decode, FP8 cache"]["cells"] == 4
    assert rows["decode, 16-bit cache"]["mean"] == pytest.approx(0.5)
    assert rows["decode, FP8 cache"]["mean"] == pytest.approx(1.8**0.5)


def test_sides_of_different_runs_are_not_compared(tmp_path):
    case = "decode/llama/tp1/b64/ctx1024"
    records = [record(case, "gluon", 20.0, run="r1"), record(case, "flashinfer-xqa", 40.0, run="r2")]
    found = evidence.read([write(tmp_path / "r.jsonl", records)])
    assert [cell.ratio for cell in found.cells] == [None, None]


def test_an_engines_sides_with_octavo_are_octavos(tmp_path):
    """Compared within a run: FP8 with FP8, 16 bits with 16 bits, and the fastest of all."""
    from octavo.bench.evidence_engines import engine_gains, engine_steps

    case, cache = "step/decode/llama/tp1/b64", {True: SPEC, False: {**SPEC, "kv_dtype": "bfloat16"}}
    times = (
        ("vllm-octavo:fp8", 10.0, True, "r1"),
        ("vllm-octavo-triton:fp8", 14.0, True, "r1"),
        ("vllm-flash:fp8", 18.0, True, "r1"),
        ("vllm-triton:fp8", 16.0, True, "r1"),
        ("vllm-octavo:auto", 12.0, False, "r1"),
        ("vllm-flash:auto", 15.0, False, "r1"),
        ("vllm-triton:auto", 5.0, False, "r2"),  # of another run: with nothing
        ("sglang-octavo:fp8_e4m3", 8.0, True, "r3"),
        ("sglang-fa3:fp8_e4m3", 9.0, True, "r3"),
        ("sglang-octavo:auto", 11.0, False, "r4"),
        ("sglang-fa3:auto", 5.5, False, "r4"),
    )
    records = [record(case, name, us, spec=cache[fp8], run=run) for name, us, fp8, run in times]
    found = evidence.read([write(tmp_path / "r.jsonl", records)])
    assert {name for name, *_ in times if evidence.is_octavo(name)} == {name for name, *_ in times if "octavo" in name}
    assert evidence.is_octavo("gluon") and not evidence.is_octavo("flashinfer-fa3")
    assert [cell.ratio for cell in found.of_op("step")] == [1.5, None, 9 / 8, 0.5]
    vllm, sglang = engine_steps(found)
    assert (vllm.engine, vllm.case, len(vllm.records)) == ("vllm", "decode/llama/tp1/b64", 7)
    assert vllm.ratios == {"FP8": 1.6, "16 bits": 1.25, "all": 1.5}
    assert sglang.ratios == {"FP8": 9 / 8, "16 bits": 0.5, "all": 9 / 8}  # all: of the run of octavo's fastest
    gains = {(gain.engine, gain.phase): gain.ratios for gain in engine_gains([vllm, sglang])}
    assert gains["vllm", "decode"]["FP8"] == pytest.approx(1.6) and len(gains) == 2
    html = evidence_page.page(found)
    assert "In whole engines" in html and "1.60" in html


def test_the_latest_of_two_records_counts(tmp_path):
    case = "decode/llama/tp1/b64/ctx1024"
    records = [record(case, "gluon", 20.0, run="r1"), record(case, "gluon", 19.0, run="r2")]
    (cell,) = evidence.read([write(tmp_path / "r.jsonl", records)]).cells
    assert cell.timed == {"gluon": 19.0} and cell.run == "r2"


def test_rates_and_ceilings_are_those_that_bound():
    decode, prefill = RECORDS[0], RECORDS[-1]
    assert rate(decode) == (5.0, "TB/s") and ceiling(decode) == 4.0
    assert rate(prefill) == (200.0, "TFLOP/s") and ceiling(prefill) == 1400.0


def test_series_and_costs(file):
    found = evidence.read([file])
    lines = evidence.series(found, "decode")
    assert list(lines) == [("llama/tp1", 64)] and sorted(lines["llama/tp1", 64]["gluon"]) == [1024, 8192]
    costs = evidence.token_costs(found, 1.0)
    assert [row["us_per_token"] for row in costs] == [20 / 64, 100 / 64]
    assert costs[0]["bytes_per_token"] == 2048 and costs[0]["tokens"] == 10**9 // 2048


def test_a_point_of_a_figure_is_of_one_case_for_all_backends(tmp_path):
    both = [
        (f"verify/llama/tp1{n}/b64/ctx{t}", name, t)
        for n in ("", "/n2")
        for t in (1024, 8192)
        for name in ("gluon", "fa2")
    ]
    alone = [(f"verify/llama/tp1/n4/b64/ctx{t}", "gluon", 9 * t) for t in (1024, 8192)]
    prompts = [(f"prefill/llama/tp1/b{b}/q{t}/ctx{t}", "gluon", b * t) for b, t in ((1, 1024), (4, 1024), (1, 8192))]
    prompts += [("prefill/llama/tp1/b4/q1024/ctx1024", "fa3", 5000)]
    records = [record(case, name, float(us)) for case, name, us in both + alone + prompts]
    records.append(record("prefill/llama/tp1/b1/q1024/ctx8192", "gluon", 7.0, flops=10**10))
    found = evidence.read([write(tmp_path / "r.jsonl", records)])
    verify = evidence.series(found, "verify")
    assert {key: sorted(of) for key, of in verify.items()} == {
        ("llama/tp1", 64): ["fa2", "gluon"],
        ("llama/tp1/n2", 64): ["fa2", "gluon"],
        ("llama/tp1/n4", 64): ["gluon"],
    }
    assert verify["llama/tp1/n2", 64]["gluon"][8192].us == 8192
    plain = [record(f"decode/llama/tp1/b64/ctx{t}", "gluon", 5.0) for t in (1024, 8192)]
    after = [
        replace(one, case=f"append+{one.case}", backend=name, us=9.0) for one in plain for name in ("gluon", "xqa")
    ]
    decode = evidence.series(evidence.read([write(tmp_path / "d.jsonl", after + plain)]), "decode")
    assert {key: (sorted(of), of["gluon"][1024].us) for key, of in decode.items()} == {
        ("llama/tp1/append", 64): (["gluon", "xqa"], 9.0),
        ("llama/tp1", 64): (["gluon"], 5.0),
    }
    (prefill,) = evidence.series(found, "prefill").values()
    assert prefill["gluon"][1024].case == prefill["fa3"][1024].case == "prefill/llama/tp1/b4/q1024/ctx1024"
    assert prefill["gluon"][8192].case == "prefill/llama/tp1/b1/q8192/ctx8192"


def test_plans_are_of_the_device_that_was_measured(file):
    ((subjects, plan),) = evidence.plans(evidence.read([file]))
    assert subjects == "llama/tp1" and "on h200" in plan and "gluon" in plan


def test_the_page_has_every_cell_and_every_refusal(file, tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(accuracy()))
    html = evidence_page.page(evidence.read([file, tmp_path / "a.json"]))
    for words in (
        *(cell.case for cell in evidence.read([file]).cells),
        "1.34 ×",
        "Unsupported: no",
        "refused",
        "NVIDIA H200",
        "flashinfer-xqa",
        "tiny: what the cache costs",
        "keys of 3 at 512",
        "+1.00 %",
        "records.jsonl, a.json",
    ):
        assert words in html, words
    assert html.count("data:image/svg+xml") == 3 and "<script" not in html
    assert not re.search(r"""(?:src|href)=["'](?!data:)""", html)


@pytest.mark.parametrize("where", ["case", "backend", "error", "env", "accuracy"])
def test_what_is_read_is_never_markup(tmp_path, where):
    records = list(RECORDS)
    if where == "case":
        records = [record(f"decode/{SCRIPT}/b64/ctx{n}", "gluon") for n in (1024, 2048)]
    elif where == "backend":
        records = [record(f"decode/llama/b64/ctx{n}", SCRIPT) for n in (1024, 2048)]
    elif where == "error":
        records.append(record("decode/llama/b9/ctx9", "x", None, error=f"Unsupported: {SCRIPT}"))
    elif where == "env":
        records.append(record("decode/llama/b9/ctx9", "x", env={SCRIPT: SCRIPT}))
    (tmp_path / "a.json").write_text(json.dumps(accuracy(model={"name": SCRIPT, "dtype": SCRIPT})))
    found = evidence.read([write(tmp_path / "r.jsonl", records), tmp_path / "a.json"])
    html = evidence_page.page(found)
    assert "<script" not in html and "&lt;script&gt;" in html
    assert "<script" not in evidence_page.markdown(found)


def test_markdown_marks_the_fastest_and_keeps_its_columns(file):
    text = evidence_page.markdown(evidence.read([file]))
    assert "| decode/llama/tp1/b64/ctx1024 | **20.0** | 30.0 | 40.0 | 2.00 |" in text
    assert "| decode/llama/tp1/b64/ctx8192 | 100.0 |  | **90.0** | 0.90 |" in text
    assert "| decode, FP8 cache | 3 | 2 | 1.34 | 0.90 |" in text
    assert evidence_page.plain("a|b`c\nd") == "a\\|b\\`c d"


def test_the_command_writes_page_tables_and_figure(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, _ = report(file, "--markdown", "t.md", "--figure", "f.svg")
    assert code == 0 and "7 records, 0 accuracy files: report.html" in out
    assert Path("report.html").read_text().startswith("<!doctype html>") and Path("t.md").read_text()[0] == "|"
    assert "<svg" in Path("f.svg").read_text()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (RECORDS[0].to_json() + '\n{"schema": 1, "case": "dec', r"r\.jsonl:2 must hold one JSON object"),
        ('{"schema": 2}\n', r"r\.jsonl:1 must have schema 1; came 2"),
        (RECORDS[0].to_json()[:-1] + ', "speed": 3}\n', "must have the fields of a record; came also speed"),
        ("", "at least one record"),
        *(
            (json.dumps(json.loads(RECORDS[0].to_json()) | {name: value}) + "\n", rf"r\.jsonl:1: {name} must be")
            for name, value in (
                *(("us", v) for v in ("x", 0, -1, math.nan, math.inf, True, [1], 10**400)),
                *((name, "x") for name in ("bytes", "flops", "rel_err", "rel_err_bf16", "spec", "ceiling", "env")),
                *((name, 5) for name in ("case", "op", "backend", "run", "timing", "time")),
                ("case", ""),
                ("run", ["a"]),
                ("spec", None),
            )
        ),
        (json.dumps(json.loads(RECORDS[0].to_json()) | {"op": "sort"}) + "\n", r"r\.jsonl:1: op must be one of"),
        (json.dumps(json.loads(RECORDS[0].to_json()) | {"env": {"gpu": 5}}) + "\n", "1: gpu of env must be text"),
        (
            json.dumps(json.loads(RECORDS[0].to_json()) | {"ceiling": {"copy_tbs": "4"}}) + "\n",
            "1: copy_tbs of ceiling",
        ),
        ("[" * 100_000 + "\n", r"r\.jsonl:1 must hold one JSON object"),
        ('{"schema": ' + "1" * 5000 + "}\n", r"r\.jsonl:1 must hold one JSON object"),
    ],
)
def test_a_bad_file_of_records_is_one_line(tmp_path, monkeypatch, content, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.jsonl").write_text(content)
    code, out, err = report("r.jsonl")
    assert code == 2 and re.search(why, err) and len(err.strip().splitlines()) == 1 and out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "readable JSON file"),
        ("[]", "a JSON object; came list"),
        ("{}", "no model, variants"),
        (json.dumps(accuracy(schema=2)), "schema 2"),
        (json.dumps({k: v for k, v in accuracy().items() if k != "sides"}), "no sides"),
        (json.dumps(accuracy(model=5)), "model of another kind"),
        (json.dumps(accuracy(model={"name": 5, "dtype": "x"})), "name of model of another kind"),
        (json.dumps(accuracy(text={"source": "s", "windows": "2", "length": 64})), "windows of text"),
        (json.dumps(accuracy(sides=[])), "sides of another kind"),
        (json.dumps(accuracy(sides={"16-bit": {"perplexity": {"value": math.nan}}})), "perplexity of '16-bit'"),
        (json.dumps(accuracy(sides={**accuracy()["sides"], "x": accuracy()["sides"]["16-bit"]})), "change of 'x'"),
        (json.dumps(accuracy(retrieval=[{"context": "a", "trials": 1, "right": {}}])), "row 0 of retrieval"),
        (
            json.dumps(accuracy(retrieval=[{"context": 9, "trials": 1, "right": {"16-bit": [True]}}])),
            "row 0 of retrieval",
        ),
        (json.dumps(accuracy(environment={"gpu": None})), "environment of another kind"),
        ("[" * 100_000, "readable JSON file"),
        ('{"schema": ' + "1" * 5000 + "}", "readable JSON file"),
    ],
)
def test_a_bad_accuracy_file_is_one_line(tmp_path, content, why):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(InvalidInput, match=why):
        evidence.read([tmp_path / "a.json"])


def test_a_missing_file_or_folder_is_exit_code_2(file, tmp_path):
    assert report(tmp_path / "none.jsonl")[0] == 2
    code, _, err = report(file, "--out", tmp_path / "none" / "r.html")
    assert code == 2 and "does not" in err


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no chromium here to open the page in")
def test_a_browser_shows_it_without_a_complaint(file, tmp_path):
    page = tmp_path / "r.html"
    page.write_text(evidence_page.page(evidence.read([file])))
    arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=500,1500", "--enable-logging=stderr"]
    shot = tmp_path / "r.png"
    found = subprocess.run(
        ["chromium", *arguments, f"--user-data-dir={tmp_path}/chr", f"--screenshot={shot}", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "CONSOLE" not in found.stderr and shot.stat().st_size > 10_000


def test_what_is_null_or_not_a_number_is_not_there(tmp_path):
    content = json.loads(RECORDS[0].to_json()) | {
        "bytes": None,
        "timing": None,
        "rel_err": math.nan,
        "backend": "a\u2028b",
    }
    (tmp_path / "r.jsonl").write_text(json.dumps(content, ensure_ascii=False) + "\n")
    (found,) = evidence.read([tmp_path / "r.jsonl"]).records
    assert (found.bytes, found.timing, found.rel_err, found.backend) == (None, "", None, "a\u2028b")
    (tmp_path / "r.jsonl").write_text(record(f"decode/llama/b{'9' * 5000}/ctx8", "gluon").to_json() + "\n")
    assert evidence_page.page(evidence.read([tmp_path / "r.jsonl"]))
    wide = {**SPEC, "softmax_scale": 10**400}
    write(tmp_path / "r.jsonl", [record("decode/llama/b1/ctx8", "gluon", spec=wide)])
    assert evidence.plans(evidence.read([tmp_path / "r.jsonl"])) == []


def test_where_a_model_was_measured_is_on_the_page(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(accuracy(environment={"gpu": "NVIDIA L40S"})))
    found = evidence.read([tmp_path / "a.json"])
    assert "NVIDIA L40S" in evidence_page.page(found) and "NVIDIA L40S" in evidence_page.markdown(found)


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GB200", "b200"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("none", "cpu"),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA H20", None),
    ],
)
def test_a_plan_is_of_the_named_device_or_of_none(gpu, name):
    device = evidence._device({"gpu": gpu})
    assert (device and device.name) == name


def test_points_of_several_runs_are_said_to_be(tmp_path):
    records = [record(f"decode/llama/tp1/b64/ctx{n}", "gluon", run=run) for n, run in ((1024, "r1"), (8192, "r2"))]
    (figure,) = evidence_page.speed_figures(evidence.read([write(tmp_path / "r.jsonl", records)]))
    assert "one of the 2 runs" in figure.caption
    (figure,) = evidence_page.speed_figures(evidence.read([write(tmp_path / "r.jsonl", RECORDS)]))
    assert "Dashed: measured in the same run." in figure.caption


def test_a_failed_cell_is_not_called_refused():
    failed = record("decode/llama/b1/ctx8", "triton", None, error="failed: RuntimeError: no")
    assert evidence_page._entry(failed, None)["text"] == "failed"


def test_what_moves_a_cursor_is_written_out(file, tmp_path, monkeypatch):
    assert evidence_page.plain("a\x1b[2Jb~c") == "a \\[2Jb\\~c"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text(RECORDS[0].to_json()[:-1] + ', "\\u001b[2J\\u009b": 3}\n')
    result = CliRunner().invoke(app, ["report", "bad.jsonl"], color=True)
    assert result.exit_code == 2 and "also \\x1b[2J\\x9b" in result.stderr and "\x1b" not in result.stderr


def test_inputs_and_outputs_are_different_files(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = file.read_bytes()
    for arguments in (
        ["--out", file],
        ["--markdown", Path("..", tmp_path.name, file.name)],
        ["--figure", "report.html"],
    ):
        code, out, err = report(file, *arguments)
        assert code == 2 and "neither read nor written otherwise" in err and out == ""
        assert file.read_bytes() == before and [path.name for path in tmp_path.iterdir()] == [file.name]


def test_nothing_is_written_where_something_cannot_be(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "one.jsonl", RECORDS[-1:])
    code, _, err = report("one.jsonl", "--figure", "f.svg")
    assert code == 2 and "--figure needs a case at two contexts" in err
    code, _, err = report(file, "--markdown", "none/t.md")
    assert code == 2 and "--markdown must lie in a folder" in err
    assert {path.suffix for path in tmp_path.iterdir()} == {".jsonl"}


def test_a_pipe_is_written_to_and_stays_one(file, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    code, _, _ = report(file, "--out", tmp_path / "pipe")
    reader.join(10)
    assert code == 0 and read[0].startswith("<!doctype html>") and (tmp_path / "pipe").is_fifo()


@pytest.mark.filterwarnings("error")
def test_letters_that_the_font_lacks_are_no_warning(tmp_path):
    records = [record(f"decode/\u6a21\u578b/b1/ctx{n}", "\u6a21\u578b") for n in (1024, 2048)]
    assert "\u6a21\u578b" in evidence_page.page(evidence.read([write(tmp_path / "r.jsonl", records)]))


@pytest.mark.skipif(
    not (shutil.which("chromium") and shutil.which("pdftotext")), reason="no chromium or pdftotext here"
)
def test_in_print_no_column_is_cut_off(tmp_path):
    names = ("gluon", "triton", "flashinfer-fa3", "flashinfer-xqa", "flashinfer-fa2", "sdpa-cudnn", "sdpa-flash")
    case = "decode/gpt-oss-120b:sliding_window/tp1/b512/ctx32768"
    records = [record(case, name, 12345.6 + i) for i, name in enumerate(names)]
    page = tmp_path / "r.html"
    page.write_text(evidence_page.page(evidence.read([write(tmp_path / "r.jsonl", records)])))
    arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/chr"]
    command = ["chromium", *arguments, f"--print-to-pdf={tmp_path}/r.pdf", page.as_uri()]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    text = subprocess.run(["pdftotext", tmp_path / "r.pdf", "-"], capture_output=True, text=True, check=True).stdout
    assert all(f"{12345.6 + i:,.1f}" in text for i in range(len(names))) and "ratio" in text


def test_pairs_are_of_one_run_and_one_shape(tmp_path):
    sixteen = {**SPEC, "kv_dtype": "bfloat16", "layout": "nhd"}
    dense = {**SPEC, "kv_dtype": "bfloat16", "layout": "dense", "page_size": None}
    records = [
        record("decode/llama/tp1/b64/ctx1024", "gluon", 20.0),
        record("decode/llama/tp1/b64/ctx1024", "triton", 25.0),
        record("decode/llama/tp1/bfloat16/b64/ctx1024", "triton", 50.0, spec=sixteen),
        record("decode/llama/tp1/b64/ctx8192", "gluon", 20.0),
        record("decode/llama/tp1/bfloat16/b64/ctx8192", "triton", 50.0, spec=sixteen, run="r2"),
        record("decode/llama/tp8/b64/ctx1024", "gluon", 20.0),
        record("prefill/32x8/d128/fp8_e4m3/leaf64/b1/q64/ctx64", "gluon", 10.0),
        record("prefill/32x8/d128/fp8_e4m3/leaf64/b1/q64/ctx64", "sdpa-cudnn", 15.0, spec=dense),
        record("append/llama/tp1/b1/t1", "triton", 1.0),
        record("append/llama/tp1/bfloat16/b1/t1", "triton", 1.0, spec=sixteen),
    ]
    first, second = evidence.pairs(evidence.read([write(tmp_path / "r.jsonl", records)]))
    assert first == evidence.Pair("decode", "decode/llama/tp1/b64/ctx1024", ("gluon", 20.0), ("triton", 50.0))
    assert first.gain == 2.5
    assert second == evidence.Pair("prefill", "prefill/32x8/d128/b1/q64/ctx64", ("gluon", 10.0), ("sdpa-cudnn", 15.0))


def test_a_copied_cell_counts_as_a_cell_and_not_in_the_mean(tmp_path):
    case = "decode/llama/tp1/b64/ctx1024"
    copies = [replace(r, case=case.replace("llama", "twin"), same_as=case) for r in RECORDS[:3]]
    (row,) = evidence.summary(evidence.read([write(tmp_path / "r.jsonl", [*RECORDS[:3], *copies])]))
    assert (row["cells"], row["compared"], row["mean"], row["most"]) == (2, 1, pytest.approx(2.0), 2.0)


def test_figures_of_one_rank_and_fp8_come_first(tmp_path):
    names = ("llama/tp1/bfloat16/b64", "llama/tp8/b64", "llama/tp1/b16", "llama/tp1/b64", "alone/tp1/b64")
    records = []
    for name in names:
        for context in (1024, 2048):
            records.append(record(f"decode/{name}/ctx{context}", "gluon"))
            if not name.startswith("alone"):
                records.append(record(f"decode/{name}/ctx{context}", "flashinfer-xqa"))
    titles = [f.title for f in evidence_page.speed_figures(evidence.read([write(tmp_path / "r.jsonl", records)]))]
    assert titles[:2] == ["decode, llama/tp1, 64 sequences", "decode, llama/tp1, 16 sequences"]
    assert titles[-1] == "decode, alone/tp1, 64 sequences" and len(titles) == 5


def test_the_page_has_fp8_beside_16_bits(tmp_path):
    sixteen = record("decode/llama/tp1/bfloat16/b64/ctx1024", "triton", 50.0, spec={**SPEC, "kv_dtype": "bfloat16"})
    found = evidence.read([write(tmp_path / "r.jsonl", [*RECORDS, sixteen])])
    (row,) = evidence.cache_gains(evidence.pairs(found))
    assert row == {"op": "decode", "model": "llama", "shapes": 1, "mean": pytest.approx(2.5), "least": 2.5, "most": 2.5}
    html = evidence_page.page(found)
    assert "FP8 beside 16 bits" in html and '<td class="number">2.50</td>' in html
    assert "FP8 beside 16 bits" not in evidence_page.page(evidence.read([write(tmp_path / "r.jsonl", RECORDS)]))
    models = [
        evidence.model_of(case) for case in ("decode/llama:full/tp1", "decode/32x8/d128", "append/indexer/h64", "x")
    ]
    assert models == ["llama:full", *[evidence.OTHER_SHAPES] * 3]
