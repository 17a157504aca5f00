"""`octavo bench --engine`: refusals, the sides that are asked for, and the scripts that start engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="typer is an extra")
from typer.testing import CliRunner  # noqa: E402

from octavo.bench.engines import in_sglang, in_vllm, sides, steps  # noqa: E402
from octavo.cli.main import app  # noqa: E402


def bench(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["bench", "--out", "r.jsonl", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--engine", "tgi"], "--engine must be one of vllm, sglang"),
        (["--engine", "vllm", "--site", "none"], "needs vllm, which is not installed; came site none"),
        (["--engine", "sglang", "--site", "none"], "needs sglang, which is not installed; came site none"),
    ],
)
def test_an_engine_that_is_not_there_is_exit_code_2(tmp_path, monkeypatch, arguments, why):
    monkeypatch.chdir(tmp_path)
    code, _, err = bench(*arguments)
    assert code == 2 and why in err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("engine", "module"), [("vllm", in_vllm), ("sglang", in_sglang)])
def test_every_side_at_few_and_many_sequences(tmp_path, monkeypatch, engine, module):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site" / engine).mkdir(parents=True)
    called: list[list[str]] = []
    monkeypatch.setattr(module, "main", called.append)
    code, _, err = bench("--engine", engine, "--site", "site")
    assert code == 0, err
    assert {("16x8192x64" in call, "512x512x64" in call) for call in called} == {(True, True)} or len(called) == 2
    for call in called:
        at = call.index("--sides") + 1
        assert call[at : at + 3] == [*steps.SIDES[engine][:3]] and call[call.index("--site") + 1] == "site"
    code, _, _ = bench("--engine", engine, "--site", "site", "--ops", "append", "--device", "cpu", "--seconds", "0.001")
    assert code == 0 and len(called) == (2 if engine == "vllm" else 4)
    assert {json.loads(line)["op"] for line in Path("r.jsonl").read_text().splitlines()} == {"append"}


@pytest.mark.parametrize("module", [in_vllm, in_sglang])
def test_a_side_is_the_module_itself_in_a_process_with_octavo_plugged_in(tmp_path, monkeypatch, module):
    started: dict[str, Any] = {}
    monkeypatch.setattr(sides, "launch", lambda command, env, log: started.update(command=command, env=env, log=log))
    asked: list[Any] = []
    monkeypatch.setattr(module, "drive", asked.append)
    cache = "fp8" if module is in_vllm else "fp8_e4m3"
    module.main(["throughput", "--out", "r.jsonl", "--site", str(tmp_path / "site")])
    module.start(f"octavo-triton:{cache}", asked[0], tmp_path)
    command, env = started["command"], started["env"]
    assert command[:4] == [sys.executable, "-u", "-m", module.__name__]
    assert command[4:9] == ["throughput", "--out", "r.jsonl", "--site", str(tmp_path / "site")]
    assert env["OCTAVO_BACKEND"] == "triton"
    folders = env["PYTHONPATH"].split(":")
    assert str(tmp_path / "site") in folders and (Path(folders[2]) / "octavo" / "__init__.py").is_file()
    assert "octavo.integrations" in (Path(folders[1]) / "octavo-0.dist-info" / "entry_points.txt").read_text()


def test_a_side_that_fails_tells_why_and_one_that_hangs_is_ended(tmp_path):
    def start(side: str) -> subprocess.Popen[bytes]:
        code = "raise SystemExit('Error: no such device')" if side == "a:b" else "import time; time.sleep(600)"
        return sides.launch([sys.executable, "-c", code], {}, sides.path(tmp_path, side, "log"))

    import time

    begin = time.monotonic()
    sides.run_group(["a:b", "c:d"], start, tmp_path, begin + 3, in_turn=False)
    assert time.monotonic() - begin < 30
    assert "Error: no such device" in sides.result(tmp_path, "a:b")["error"]
    assert "no result" in sides.result(tmp_path, "c:d")["error"]


@pytest.mark.parametrize("module", [in_vllm, in_sglang])
def test_records_of_sides(tmp_path, module):
    from octavo.bench.records import read_records

    fp8 = "octavo:fp8" if module is in_vllm else "octavo:fp8_e4m3"
    figures = {"step_ms": 5.0, "step_ms_p20": 4.9, "step_ms_p80": 5.2, "prefill_ms": 100.0}
    found = {fp8: {"64x2048x128": figures} if module is in_vllm else figures, "triton:auto": {"error": "no memory"}}
    asked: list[Any] = []
    drive, module.drive = module.drive, asked.append
    try:
        shapes = ["--shapes", "64x2048x128"] if module is in_vllm else []
        module.main(["throughput", "--out", str(tmp_path / "r.jsonl"), *shapes])
    finally:
        module.drive = drive
    if module is in_vllm:
        monkey = pytest.MonkeyPatch()
        monkey.setattr("octavo.bench.records.environment", lambda _: {"gpu": "none"})
        module.write_records(found, asked[0])
        monkey.undo()
    else:
        module.write_records(found, asked[0])
    records = list(read_records([tmp_path / "r.jsonl"]))
    timed = [r for r in records if r.us is not None]
    assert {(r.case.split("/")[1], r.us) for r in timed} == {("decode", 5000.0), ("prefill", 100000.0)}
    assert {r.op for r in records} == {"step"} and {r.spec["layout"] for r in timed} == {"leaf"}
    assert any(r.error == "no memory" for r in records)


def test_a_side_of_text_may_change_several_things():
    asked = in_vllm.options("octavo:fp8:chunked+prefix")
    assert asked["max_num_batched_tokens"] == 256 and asked["enable_prefix_caching"]
    assert asked["cudagraph_capture_sizes"] == in_vllm.CAPTURED and "compilation_config" not in asked
    plain = in_vllm.options("octavo:fp8")
    assert not plain["enable_prefix_caching"] and "max_num_batched_tokens" not in plain
    assert in_vllm.options("octavo:fp8:full+exact").keys() >= {"compilation_config", "additional_config"}


def test_a_prompt_fills_pages_that_a_cache_of_prefixes_can_hit():
    assert max(len(prompt.split()) for prompt in sides.PROMPTS) > 2 * 64


def test_a_shape_whose_batch_is_never_whole_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        in_vllm.main(["throughput", "--shapes", "16x32768x48", "--out", str(tmp_path / "r.jsonl")])
    assert "16x32768x48: its prompts take 65 steps" in capsys.readouterr().err
    for batch, tokens, more in [*map(in_vllm.shape_of, in_vllm.SHAPES), *steps.SHAPES]:
        assert batch * tokens // in_vllm.STEP_TOKENS + 1 < more
