"""The evidence as a document: what `octavo report --document` writes, figures included."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

for name in ("jinja2", "matplotlib", "typer"):
    pytest.importorskip(name, reason=f"{name} is an extra")
from evidence_records import RECORDS, SCRIPT, SPEC, accuracy, record, report, write  # noqa: E402

from octavo.bench import evidence  # noqa: E402


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "records.jsonl", RECORDS)


@pytest.fixture
def made(file, tmp_path):
    from octavo.bench.evidence_document import document

    spec = {**SPEC, "kv_dtype": "bfloat16", "layout": "nhd"}
    more = [
        record("decode/llama/tp1/bfloat16/b64/ctx1024", "triton", 50.0, spec=spec),
        record("decode/llama/tp1/b64/ctx1024", "flashinfer-fa2", None, error="Unsupported: no\n  - x\n  - no"),
        record("step/decode/llama/tp1/b64", "vllm-octavo", 7153.0),
        record("step/decode/llama/tp1/b64", "vllm-flash", 8400.0),
        record("start/llama/fp8_e4m3/cold", "octavo", 40e6, spec={"compiled": 31, "cached": 2}),
        record("decode/32x8/d128/fp8_e4m3/leaf64/b1/ctx64", "triton", 1234.4),
        record("decode/twin/tp1/b64/ctx1024", "gluon", 20.0, same_as="decode/llama/tp1/b64/ctx1024"),
    ]
    write(tmp_path / "more.jsonl", more)
    (tmp_path / "a.json").write_text(json.dumps(accuracy(time="2026-01-02T03:04:05Z")))
    return document(evidence.read([file, tmp_path / "more.jsonl", tmp_path / "a.json"]), "octavo report x")


def test_every_number_is_a_records(made):
    for words in (
        "| `tp1/b64/ctx1024` | **20.0** | 30.0 | refused | 40.0 | 1.25 | 2.00 | 0.80 |",
        "| `tp1/b64/ctx8192` | 100.0 |  |  | **90.0** | 0.25 | 0.90 | 0.80 |",
        "| `32x8/d128/fp8_e4m3/leaf64/b1/ctx64` | 1,234 |",
        "| `decode/tp1/b64/ctx1024` | 20.0 gluon | 50.0 triton | 2.50 |",
        "| `decode`, llama | 1 | 2.50 | 2.50 | 2.50 |",
        "| `decode`, flashinfer-xqa | 2 | 3.5e-02 |",
        "| flashinfer-fa2 | no: x | `decode/llama/tp1/b64/ctx1024` |",
        "| `decode/llama/tp1/b64` | 7.2 fp8\\_e4m3 | 8.4 fp8\\_e4m3 | 1.17 | – | 1.17 |",
        "| vllm, decode | 1 | 1.17 | – | 1.17 |",
        "| `llama/fp8_e4m3/cold` | 40.0 | 31 | 2 |",
        "Bytes a token and layer on a rank: 2,048 (tp1, fp8\\_e4m3), 4,096 (tp1, bfloat16).",
        "from 2026-01-02 to ",
        "### twin\n\nShapes that it shares with llama were measured once, for both.",
        "+1.00 %",
        "**721 of 721 cells have no record yet.**",
        "octavo report x",
    ):
        assert words in made.text or words.replace("\\_", "_") in made.text, words


def test_its_figures_are_beside_it_and_its_tables_have_even_rows(made):
    links = re.findall(r"\]\(figures/([^)]+)\)", made.text)
    assert sorted(links) == sorted(made.figures) and len(links) == 2
    assert all("<svg" in svg for svg in made.figures.values())
    for table in re.findall(r"(?:^\|.*\n)+", made.text, re.MULTILINE):
        rows = table.splitlines()
        assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, rows[0]
        assert len(rows) <= 60


def test_the_whole_matrix_is_there_when_it_is(tmp_path):
    from octavo.bench import matrix
    from octavo.bench.evidence_document import document

    records = []
    for case in matrix.cases(matrix.WHOLE, 141e9):
        spec = asdict(case.spec)
        records.append(record(case.name, "triton", 10.0, op=case.op, spec=spec))
    made = document(evidence.read([write(tmp_path / "r.jsonl", records)]), "x")
    assert "Every cell has a record." in made.text and "other shapes" not in made.text
    assert all(f"### {name}\n" in made.text for name in ("llama-3.1-8b", "gpt-oss-120b:full", "qwen3-32b"))
    longest = max(len(table.splitlines()) for table in re.findall(r"(?:^\|.*\n)+", made.text, re.MULTILINE))
    assert longest <= 60 and len(made.figures) <= 24


@pytest.mark.parametrize("field", ["case", "backend", "error"])
def test_what_is_read_is_never_markup(tmp_path, field):
    from octavo.bench.evidence_document import document

    nasty = f"a`|{SCRIPT}\n# no"
    fields = {"case": "decode/llama/b1/ctx8", "backend": "x", "error": "Unsupported: no"} | {field: nasty}
    if field == "case":
        fields["case"] = f"decode/{nasty}/b1/ctx8"
    records = [record(fields["case"], fields["backend"], None, op="decode", error=fields["error"])]
    text = document(evidence.read([write(tmp_path / "r.jsonl", records)]), "x").text
    assert "<script" not in text and "\n# no" not in text


def test_the_command_writes_it_and_takes_old_figures_away(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("docs/figures").mkdir(parents=True)
    Path("docs/figures/evidence-old.svg").write_text("x")
    Path("docs/figures/other.svg").write_text("x")
    code, out, _ = report(file, "--document", "docs/evidence.md")
    assert code == 0 and "document: docs/evidence.md, 2 figures" in out
    text = Path("docs/evidence.md").read_text()
    assert f"octavo report {file} --document docs/evidence.md" in text and text.startswith("# Evidence\n")
    names = {path.name for path in Path("docs/figures").iterdir()}
    assert "evidence-old.svg" not in names and "other.svg" in names and len(names) == 3
    code, _, err = report(file, "--document", "none/evidence.md")
    assert code == 2 and "--document must lie in a folder" in err


def test_the_document_of_the_docs_is_of_the_records_that_are_kept(monkeypatch, tmp_path):
    """`make evidence` has been run since the last of them; figures are compared by name: bytes are matplotlib's."""
    root = Path(__file__).resolve().parent.parent
    command = re.search(r"^evidence:.*?\n\t(\$\(PY\).*?)\n\t\$", (root / "Makefile").read_text(), re.S | re.M)
    assert command
    given = [word for word in command[1].replace("\\", "").split() if word.startswith("benchmarks/")]
    records = [path for pattern in given for path in sorted(root.glob(pattern))]
    monkeypatch.chdir(root)
    files = [str(path.relative_to(root)) for path in records]
    arguments = [*files, "--out", str(tmp_path / "r.html"), "--document", str(tmp_path / "evidence.md")]
    code, out, err = report(*arguments)
    assert code == 0, out + err
    kept, made = ((folder / "evidence.md").read_text().splitlines() for folder in (root / "docs", tmp_path))
    told = [number for number, lines in enumerate(zip(kept, made, strict=True)) if lines[0] != lines[1]]
    assert [kept[n] for n in told if "octavo report" not in kept[n]] == []
    figures = [{path.name for path in (folder / "figures").glob("evidence-*")} for folder in (root / "docs", tmp_path)]
    assert figures[0] == figures[1]


def test_a_folders_records_are_told_as_a_pattern(file, tmp_path):
    from octavo.cli.report import _as_typed

    assert _as_typed([file]) == [str(file)]
    second = write(tmp_path / "b.jsonl", RECORDS)
    (tmp_path / "a.json").write_text("{}")
    assert _as_typed([file, second, tmp_path / "a.json"]) == [str(tmp_path / "*.jsonl"), str(tmp_path / "a.json")]
    assert _as_typed([second]) == [str(second)]


def test_accuracy_that_was_split_is_one_table(tmp_path):
    from octavo.bench.evidence_document import document

    first, second, other = accuracy(), accuracy(), accuracy(model={"name": "big", "dtype": "float32"})
    second["sides"] = {name.replace("tensor", "head"): side for name, side in first["sides"].items()}
    right = [True, True, True]
    second["retrieval"] = [{"context": 512, "trials": 3, "right": {name: right for name in second["sides"]}}]
    paths = []
    for name, found in (("a", first), ("b", second), ("c", other)):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(json.dumps(found))
    text = document(evidence.read(paths), "x").text
    assert text.count("| cache, scales, precision |") == 2 and text.count("tiny in float32") == 1
    tiny = text.split("big in float32")[0]
    assert tiny.count("| 16-bit |") == tiny.count("tensor fast") == tiny.count("head fast") == 1
    assert re.search(r"head fast \|.*\| 3 \|", tiny) and re.search(r"tensor fast \|.*\| 2 \|", tiny)
