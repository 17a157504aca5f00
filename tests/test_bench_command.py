"""`octavo bench`: the cells it crosses, records that are resumed, and what an interrupted or wrong run says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.bench import matrix, measure, records
from octavo.bench.cases import Case
from octavo.bench.peers import PEERS, Peer
from octavo.bench.records import read_records
from octavo.cli.main import app
from octavo.device import Device
from octavo.errors import InvalidInput

H200 = Device.named("h200")
SMALL = (
    "--device",
    "cpu",
    "--seconds",
    "0.001",
    "--kv-cache-dtype",
    "fp8",
    "--ops",
    "decode,append",
    "--context",
    "64",
)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OCTAVO_BACKEND", raising=False)


def bench(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", "--out", "r.jsonl", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_the_matrix_is_the_cross_product():
    cells = matrix.cases(matrix.WHOLE)
    assert len({case.name for case in cells}) == len(cells)
    parts = [case.name.split("/") for case in cells]
    assert {part[1].split(":")[0] for part in parts} == set(matrix.MODELS)
    parts = [part for part in parts if ":indexer" not in part[1]]
    assert {part[2] for part in parts} == {"tp1", "tp8"} and {part[0] for part in parts} == set(matrix.OPS)
    decodes = [case for case in cells if case.op == "decode" and case.name.startswith("decode/qwen3-32b/")]
    assert len(decodes) == 2 * 2 * 3 * 3  # tp x KV dtype x concurrency x context
    assert {len(case.seq_lens) for case in decodes} == {16, 64, 512}
    cells = [case for case in cells if isinstance(case, Case)]
    kinds = {case.name.split("/")[1]: case.spec.window for case in cells if "gpt-oss" in case.name}
    assert kinds == {"gpt-oss-120b:sliding_window": 128, "gpt-oss-120b:full": None}
    assert {case.spec.layout for case in cells if case.spec.fp8} == {"leaf"}
    assert all(sum(c.query_lens) <= matrix.PREFILL_TOKENS for c in cells if c.op == "prefill")


def test_cells_that_do_not_fit_are_left_out():
    whole, fitting = matrix.cases(matrix.WHOLE), matrix.cases(matrix.WHOLE, 8e9)
    assert {c.name for c in fitting} < {c.name for c in whole}
    assert max(c.work.bytes for c in fitting) <= 0.3 * 8e9


def test_latent_attention_has_cells_of_its_indexer_only_and_unknown_ops_are_refused():
    found = matrix.cases(matrix.Selection(models=("deepseek-v3.2",), tps=(1, 8), ops=matrix.OPS))
    assert all(":indexer/" in case.name and case.spec.num_heads == 64 for case in found)
    assert {case.op for case in found} == {"paged_mqa_logits", "mqa_logits", "topk", "append"}
    names = [case.name for case in found]
    assert "paged_mqa_logits/deepseek-v3.2:indexer/b64/ctx8192" in names and len(set(names)) == len(names)
    assert "paged_mqa_logits/deepseek-v3.2:indexer/n4/b64/ctx8192" in names
    with pytest.raises(InvalidInput, match="decode, verify, prefill, append"):
        matrix.cases(matrix.Selection(ops=("decode", "sort")))


def test_an_indexer_is_measured_where_there_is_no_gpu():
    arguments = ("--device", "cpu", "--seconds", "0.001", "--models", "deepseek-v3.2", "--context", "64")
    code, _, err = bench(*arguments, "--ops", "decode,prefill,append")
    assert code == 0, err
    found = {r.op: r for r in read_records([Path("r.jsonl")])}
    assert set(found) == {"paged_mqa_logits", "mqa_logits", "append"} and all(r.us for r in found.values())
    assert found["paged_mqa_logits"].rel_err < 1e-5 and found["append"].case.startswith("append/deepseek-v3.2:indexer/")


def test_backends_are_those_that_may_and_peers_those_that_are_there(monkeypatch):
    fp8 = next(c for c in matrix.cases(matrix.Selection()) if c.op == "decode")
    sixteen = next(c for c in matrix.cases(matrix.Selection(kv_dtypes=("bfloat16",))) if c.op == "decode")
    monkeypatch.setitem(PEERS, "there", Peer("there", ("decode",), "json", "x:y"))
    monkeypatch.setitem(PEERS, "missing", Peer("missing", ("decode",), "no_such_package", "x:y"))
    assert matrix.backends_of(fp8, H200, peers=False) == ["gluon", "triton"]
    assert matrix.backends_of(sixteen, H200, peers=False) == ["triton"]
    found = matrix.backends_of(sixteen, H200, peers=True)
    assert "there" in found and "missing" not in found and not any("sdpa" in name for name in found)
    assert matrix.backends_of(fp8, Device.named("cpu"), peers=True) == ["reference"]


def test_records_are_resumed_and_none_is_run_twice(monkeypatch):
    code, _, err = bench(*SMALL)
    assert code == 0 and "3 of 3 cells are in r.jsonl" in err
    first = list(read_records([Path("r.jsonl")]))
    assert [r.op for r in first] == ["decode", "append", "append"] and all(r.us for r in first)
    assert len({r.run for r in first}) == 1 and first[0].env["torch"]
    with Path("r.jsonl").open("a") as file:
        file.write('{"schema": 1, "case": "dec')  # cut in the middle
    monkeypatch.setattr(measure, "time_calls", lambda *_, **__: pytest.fail("run again"))
    code, out, err = bench(*SMALL, "--json")
    assert code == 0 and out == "" and "3 of 3" in err
    assert len(list(read_records([Path("r.jsonl")]))) == 3


def test_an_interrupted_run_keeps_what_it_has_and_goes_on(monkeypatch):
    timed = measure.time_calls
    count = 0

    def stop(*arguments, **keywords):
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return timed(*arguments, **keywords)

    monkeypatch.setattr(measure, "time_calls", stop)
    code, _, err = bench(*SMALL)
    assert code == 130 and "interrupted; 1 of 3 cells are in r.jsonl, run it again to go on" in err
    code, out, _ = bench(*SMALL, "--json")
    assert code == 0 and [json.loads(text)["op"] for text in out.splitlines()] == ["append", "append"]
    assert len(list(read_records([Path("r.jsonl")]))) == 3


def test_a_wrong_result_is_exit_code_1(monkeypatch):
    monkeypatch.setattr("octavo.reference.decode.attention", lambda call, phase: call.out.fill_(9.0))
    code, _, err = bench(*SMALL)
    assert code == 1 and "wrong: relative error" in err and "1 results of octavo's are wrong" in err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--tp", "0"], "--tp must be positive numbers"),
        (["--concurrency", "many"], "--concurrency must be positive numbers"),
        (["--context", ""], "--context must be positive numbers"),
        (["--models", "llama-9"], "llama-9"),
        (["--ops", "decode,sort"], "ops must be of decode"),
        (["--kv-cache-dtype", "int8"], "int8"),
        (["--tp", "3"], "tp must divide"),
        (["--device", "tpu"], "--device must be auto, cpu or cuda"),
        (["--tp", "\u00b2"], "--tp must be positive numbers"),
        (["--context", "9" * 5000], "--context must be positive numbers"),
        (["--ops", ""], "there must be something to measure"),
        (["--out", "."], "must be a file of records; came a folder, a device or a pipe"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments, why):
    code, out, err = bench("--device", "cpu", *arguments)
    assert code == 2 and why in err and out == "" and err.startswith("octavo: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_device_is_no_file_of_records():
    result = CliRunner().invoke(app, ["bench", "--out", "/dev/full", *SMALL])
    assert result.exit_code == 2 and "/dev/full must be a file of records" in result.stderr


def test_a_foreign_file_is_not_touched():
    Path("r.jsonl").write_text("name,us\n")
    code, _, err = bench(*SMALL)
    assert code == 2 and "r.jsonl:1 must hold one JSON object" in err and Path("r.jsonl").read_text() == "name,us\n"


@pytest.mark.parametrize("content", ["precious words without an end", '{"a": 1}', '[{"case": "x"', '{"case": "x"}'])
def test_a_foreign_file_without_a_line_end_is_not_touched(content):
    Path("r.jsonl").write_text(content)
    code, _, err = bench(*SMALL)
    assert code == 2 and "r.jsonl" in err and len(err.splitlines()) == 1 and Path("r.jsonl").read_text() == content


def test_a_whole_record_without_its_line_end_is_kept(monkeypatch):
    assert bench(*SMALL)[0] == 0
    whole = Path("r.jsonl").read_bytes()
    Path("r.jsonl").write_bytes(whole[:-1])
    monkeypatch.setattr(measure, "time_calls", lambda *_, **__: pytest.fail("run again"))
    assert bench(*SMALL)[0] == 0 and Path("r.jsonl").read_bytes() == whole


def test_a_record_cut_anywhere_is_cut_off_and_measured_again():
    assert bench(*SMALL)[0] == 0
    lines = Path("r.jsonl").read_bytes().splitlines(keepends=True)
    for cut in (1, 9, lines[-1].index(b"}") + 1, len(lines[-1]) - 2):
        Path("r.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:cut])
        assert len(records.RecordFile("r.jsonl").there()) == 2, cut
        assert Path("r.jsonl").read_bytes() == b"".join(lines[:-1])


def test_a_file_where_a_folder_should_be_is_one_line():
    Path("words").write_text("")
    code, out, err = bench(*SMALL, "--out", "words/r.jsonl")
    assert code == 2 and out == "" and "words/r.jsonl must be writable" in err


def test_formats_models_and_repeats_have_a_name_each(model_folder):
    cells = matrix.cases(matrix.Selection(kv_dtypes=("fp8_e4m3", "fp8_e5m2", "bfloat16")))
    assert len({case.name for case in cells}) == len(cells)
    assert {case.name.split("/")[3] for case in cells if case.spec.kv_dtype == "fp8_e5m2"} == {"fp8_e5m2"}
    code, out, _ = bench(*SMALL, "--tp", "1,1", "--kv-cache-dtype", "fp8,fp8_e4m3", "--ops", "decode", "--json")
    assert code == 0 and len(out.splitlines()) == 1
    config = json.loads((model_folder / "config.json").read_text())
    for folder, heads in (("a", 2), ("b", 4)):
        Path(folder, "same").mkdir(parents=True)
        Path(folder, "same", "config.json").write_text(json.dumps({**config, "num_key_value_heads": heads}))
    code, _, err = bench(*SMALL, "--models", "a/same,b/same", "--out", "two.jsonl")
    assert code == 2 and "models must differ in their names" in err


def test_a_cell_that_fails_is_a_record_and_the_others_go_on(monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr("octavo.reference.decode.attention", broken)
    code, _, err = bench(*SMALL)
    first, *others = read_records([Path("r.jsonl")])
    assert code == 1 and first.error == "failed: RuntimeError: PassManager::run failed" and first.us is None
    assert len(others) == 2 and all(r.us for r in others) and "1 results of octavo's are wrong or failed" in err


def test_a_record_names_files_without_their_folders(monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("at /srv/site/a-b/x.hpp:36 (/lib/../y.h): 1/2 of a/b is left of ./c")

    monkeypatch.setattr("octavo.reference.decode.attention", broken)
    bench(*SMALL, "--ops", "decode")
    (record,) = read_records([Path("r.jsonl")])
    assert record.error == "failed: RuntimeError: at x.hpp:36 (y.h): 1/2 of a/b is left of ./c"


def test_inputs_that_do_not_fit_are_a_record(monkeypatch):
    def too_large(*_: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(measure, "AttentionInputs", too_large)
    assert bench(*SMALL, "--ops", "decode")[0] == 1
    assert [r.error for r in read_records([Path("r.jsonl")])] == ["failed: RuntimeError: can't allocate memory"]


def test_a_result_of_nan_is_a_record_that_is_json(monkeypatch):
    monkeypatch.setattr("octavo.reference.decode.attention", lambda call, phase: call.out.fill_(float("nan")))
    code, out, _ = bench(*SMALL, "--ops", "decode", "--json")
    found = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert code == 1 and found["error"] == "wrong: relative error nan" and "rel_err" not in found


def test_without_a_gpu_it_says_what_it_is():
    code, out, err = bench(*SMALL, "--json")
    assert code == 0 and "no GPU here: the reference on tiny cases" in err and "no GPU" not in out


def test_the_environment_is_of_what_is_installed(monkeypatch, tmp_path):
    import importlib.metadata

    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"{name} of metadata")
    assert records.environment()["triton"] == "triton of metadata"
    monkeypatch.setattr(records, "_output", lambda command: "abc1234")
    monkeypatch.setattr(records, "__file__", str(tmp_path / "site-packages" / "octavo" / "bench" / "records.py"))
    assert "commit" not in records.environment()  # whatever repository it is installed into


def test_a_record_says_which_kernels_it_is_of(monkeypatch, tmp_path):
    monkeypatch.setattr(records, "__file__", str(tmp_path / "octavo" / "bench" / "records.py"))
    kernel = tmp_path / "octavo" / "kernels" / "triton" / "decode.py"
    kernel.parent.mkdir(parents=True)
    kernel.write_text("one = 1\n")
    first = records.environment()["kernels"]
    (tmp_path / "octavo" / "bench").mkdir()
    (tmp_path / "octavo" / "bench" / "records.py").write_text("elsewhere\n")
    assert records.environment()["kernels"] == first and len(first) == 12
    kernel.write_text("one = 2\n")
    assert records.environment()["kernels"] != first


def test_a_changed_checkout_is_told_from_its_commit(monkeypatch):
    said = {"rev-parse": "abc1234", "status": " M octavo/kernels/triton/decode.py"}
    monkeypatch.setattr(records, "_output", lambda command: said.get(command[3], ""))
    assert records.environment()["commit"] == "abc1234-dirty"
    said["status"] = ""
    assert records.environment()["commit"] == "abc1234"


TWINS = ("--models", "llama-3.1-70b,qwen3-32b", "--tp", "8", "--ops", "decode,append")


def test_cells_of_equal_shape_are_measured_once_and_recorded_under_each_name(monkeypatch):
    timed = measure.time_calls
    count = 0

    def counted(*arguments, **keywords):
        nonlocal count
        count += 1
        return timed(*arguments, **keywords)

    monkeypatch.setattr(measure, "time_calls", counted)
    code, _, err = bench(*SMALL, *TWINS)
    found = list(read_records([Path("r.jsonl")]))
    assert code == 0 and "6 of 6 cells" in err and len(found) == 6 and count == 3
    assert len({r.case for r in found}) == 6
    for first, second in zip(found[::2], found[1::2], strict=True):
        assert first.same_as is None and second.same_as == first.case == second.case.replace(
            "qwen3-32b", "llama-3.1-70b"
        )
        assert (first.us, first.rel_err, first.run) == (second.us, second.rel_err, second.run)
    lines = Path("r.jsonl").read_text().splitlines(keepends=True)
    Path("r.jsonl").write_text("".join(lines[1:]))  # interrupted, say, between a record and its copies
    monkeypatch.setattr(measure, "time_calls", lambda *_, **__: pytest.fail("run again"))
    code, out, err = bench(*SMALL, *TWINS, "--json")
    again = json.loads(out)
    assert code == 0 and "6 of 6" in err
    assert again == json.loads(lines[0]) | {"same_as": found[0].case}


def test_the_matrix_has_equal_shapes_and_a_copy_says_so_of_its_own_refusal():
    groups = matrix.alike(matrix.cases(matrix.WHOLE))
    names = {tuple(case.name for case in group) for group in groups if len(group) > 1}
    assert ("decode/llama-3.1-70b/tp1/b16/ctx1024", "decode/qwen3-32b/tp1/b16/ctx1024") in names
    assert all(len({(case.op, case.spec) for case in group}) == 1 for group in groups)
    fields = {"op": "decode", "backend": "x", "run": "r", "spec": {}}
    refused = records.Record(case="decode/a/b1", error="x cannot run decode/a/b1", **fields)
    copy = refused.named("decode/b/b1")
    assert (copy.case, copy.error, copy.same_as) == ("decode/b/b1", "x cannot run decode/b/b1", "decode/a/b1")
    assert copy.named("decode/c/b1").same_as == "decode/a/b1" and refused.named(refused.case) is refused


def test_layers_with_sinks_and_windows_are_measured():
    code, _, err = bench(*SMALL, "--models", "gpt-oss-120b", "--ops", "decode,verify,prefill")
    found = list(read_records([Path("r.jsonl")]))
    assert code == 0 and len(found) == 6, err
    assert all(r.spec["sinks"] and r.us and r.rel_err < 1.1 * r.rel_err_bf16 for r in found)


def test_the_matrix_is_timed_for_less_long_and_compiled_first():
    from octavo.cli.bench import _defaults

    assert _defaults(False, "cpu", None, None) == (0.1, 0) and _defaults(True, "cpu", None, None) == (0.02, 0)
    assert _defaults(True, "cpu", 0.5, 3) == (0.5, 3)


def test_a_lost_device_ends_the_run_and_the_next_one_goes_on_behind_that_cell(monkeypatch):
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patched:
        patched.setattr("octavo.reference.decode.attention", broken)
        patched.setattr(measure, "_lost", lambda device: True)
        code, _, err = bench(*SMALL, *TWINS)
    assert code == 1 and "the device was lost in decode/llama-3.1-70b/tp8/b2/ctx64 on reference" in err
    assert "2 of 6 cells are in r.jsonl, run it again to go on" in err and "Traceback" not in err
    found = list(read_records([Path("r.jsonl")]))
    assert [r.case.split("/")[1] for r in found] == ["llama-3.1-70b", "qwen3-32b"]
    assert all(r.error.startswith("failed: RuntimeError: CUDA error") for r in found)
    code, _, err = bench(*SMALL, *TWINS)
    assert code == 0 and "6 of 6" in err, "what it was lost in is not tried again"
    assert [r.op for r in read_records([Path("r.jsonl")])][2:] == ["append"] * 4


def test_a_device_that_answers_is_not_lost(monkeypatch):
    import torch

    assert not measure._lost(torch.device("cpu"))

    def sick(_: object) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "synchronize", sick)
    assert measure._lost(torch.device("cuda")) and not measure._lost(torch.device("cpu"))
